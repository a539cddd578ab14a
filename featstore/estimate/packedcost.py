"""Estimates of running a pack's frozen layout, and of making one if there is none, for the strategy ``Packed``."""

from __future__ import annotations

from featstore.config import format_size
from featstore.estimate.cost import (
    ADMIT_TABLE_BYTES,
    LOAD_TABLE_BYTES,
    PLANNED,
    ROW_TABLE_BYTES,
    STATIC,
    Estimate,
    Machine,
    OnDisk,
    Workload,
    admitted_s,
    fresh_s,
    gathered_s,
    put_together,
    reads_s,
    scan_s,
)

__all__ = ["by_frequency", "by_plan"]


def by_frequency(w: Workload, m: Machine) -> Estimate:
    """Estimate a layout whose rows in memory stay: the host tier starts with them, from an extent of its own."""
    return _estimated(w, m, STATIC, w.n_accesses - w.n_device - w.n_top, 0, w.capacity, m.static_table_s * w.n_accesses)


def by_plan(w: Workload, m: Machine) -> Estimate:
    """Estimate a layout whose cache Belady's policy manages."""
    return _estimated(w, m, PLANNED, w.loads, w.loads, 0, w.plan_s + m.planned_table_s * w.n_accesses)


def _estimated(w: Workload, m: Machine, policy: str, loads: int, updates: int, fill: int, tables_s: float) -> Estimate:
    """Estimate a layout with frozen extents; ``fill`` rows fill the host tier at first, from extents, as the device's rows do.

    ``tables_s`` are the seconds of making an epoch's tables, without ordering missed rows and without writing.
    """
    at_start = fill + w.device_rows
    counted = w.on_disk.get(policy)
    tables = ROW_TABLE_BYTES * w.n_accesses + LOAD_TABLE_BYTES * loads + ADMIT_TABLE_BYTES * updates
    if counted is None:
        rows = loads * w.pack_epochs
        counted = OnDisk((rows + at_start) * w.row_bytes + tables * w.pack_epochs, rows, loads)
    once = at_start * w.row_bytes / (m.drive.fill_bandwidth or m.drive.bandwidth) + fresh_s(at_start, w, m)
    once += fresh_s(min(w.capacity, updates), w, m)
    disk = w.layouts.get(policy, counted.disk_bytes)
    if policy not in w.layouts:
        once += (tables_s + m.missed_table_s * loads + tables / m.drive.write_bandwidth) * w.pack_epochs
        written = counted.rows + at_start
        once += scan_s(written, w, 1, m) + written * w.row_bytes / m.drive.write_bandwidth
    impossible = counted.fails if w.has_pack else "needs pack=, offline samples"
    if not impossible and w.disk_bytes is not None and disk > w.disk_bytes:
        what = "the layout that is there takes" if policy in w.layouts else "extents take"
        impossible = f"{what} {format_size(disk)} of a disk of {format_size(w.disk_bytes)}"
    copied = w.n_accesses - w.n_device + put_together(w)
    read, copy = counted.packed * w.row_bytes / m.drive.bandwidth, gathered_s(copied, w, m) + admitted_s(updates, w, m)
    parts = {"read": read, "copy": copy}
    if counted.length > 1:  # shared rows are read when their batch's turn comes, extents ahead
        parts["shared"] = reads_s(counted.reads, counted.n_bytes, m.drive)
    moved = counted.packed * w.row_bytes + counted.n_bytes
    epoch = max(read, copy) + parts.get("shared", 0.0)
    return Estimate("packed", policy, epoch, once, loads, disk, moved, parts, impossible, is_of_layout=True)
