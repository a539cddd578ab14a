"""The ring is refilled as reads land: at every wait the queue is full, or no read is left to begin."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ring's loop on a ring that is played (ring_refill.c)."""
    path = tmp_path_factory.mktemp("ring") / "ring_refill"
    include = ROOT / "src_cython" / "featstore" / "_core"
    command = [os.environ.get("CC", "gcc"), "-std=gnu11", "-O1", "-Wno-unused-function", f"-I{include}", "-pthread", "-o", path]
    subprocess.run([*command, ROOT / "tests" / "ring_refill.c"], check=True, capture_output=True, text=True)
    return path


@pytest.mark.parametrize("newest_first", [0, 1])
@pytest.mark.parametrize(("depth", "n_reads"), [(1, 5), (8, 5), (8, 100), (64, 65), (64, 1000)])
def test_the_queue_is_full_at_every_wait(program: Path, depth: int, n_reads: int, newest_first: int) -> None:
    """One read lands a wait, the oldest or the newest; another takes its place before the next wait."""
    command = [program, str(depth), str(n_reads), str(newest_first)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    *waits, (done, error) = (tuple(map(int, line.split())) for line in lines)
    assert (done, error) == (n_reads, 0)
    assert len(waits) == n_reads
    assert [(flying, left) for flying, left in waits if flying < depth and left] == []
    assert max(flying for flying, _ in waits) == min(depth, n_reads)
