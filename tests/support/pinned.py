"""Rates of a machine that does not change: what a choice measures beside other processes is anything."""

from __future__ import annotations

import pytest

from featstore.estimate.copies import CopySpeed
from featstore.estimate.tablespeed import TableSpeed
from featstore.storage.drive import DriveSpeed

USUAL = DriveSpeed(87_000, 2.5e9, 3.2e9)


def pin_machine(monkeypatch: pytest.MonkeyPatch, drive: DriveSpeed = USUAL) -> None:
    """Let ``auto`` judge this drive and usual copies, tables, and reads of a pack's batches."""
    module = "featstore.strategies.auto"
    monkeypatch.setattr(f"{module}.drive_speed", lambda *_: drive)
    monkeypatch.setattr(f"{module}.copy_speed", lambda *_: CopySpeed(8e9, 8e9, 8e9))
    monkeypatch.setattr(f"{module}.table_speed", lambda *_: TableSpeed(1e-8, 2e-8, 2e-8))
    monkeypatch.setattr(f"{module}._reading_s", lambda *_: 1e-3)
