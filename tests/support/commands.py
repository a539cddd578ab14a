"""Commands of the shell, run in the test's own process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from featstore.cli.main import main

__all__ = ["run"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command that succeeds; return what it prints with ``--json``."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
