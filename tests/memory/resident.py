"""A program that runs epochs in a control group and prints how far its resident memory grew: ``resident.py JOB``, JSON both."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import featstore
from tests.support.frozen import STRATEGIES, THREADS, make_loader_of


def status(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def epochs(graph: str, job: dict[str, Any], memory: int) -> Iterator[int]:
    """Run the job's strategy on a dataset for two epochs; yield the ledger's peak at the end of each."""
    with featstore.open(graph, memory=memory, threads=THREADS) as g:
        strategy = STRATEGIES[job["strategy"]](job["packs"].get(graph))
        with make_loader_of(g, job["sampler"], strategy, "many_idx") as loader:
            for _ in range(2):
                assert sum(1 for _ in loader) == len(loader)
                yield g.memory_report().peak


def main(job: dict[str, Any]) -> None:
    """Warm up on the small dataset, enter the group, and run the large one."""
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    list(epochs(job["small"], job, 64 << 20))
    if job["group"] is not None:
        Path(job["group"]).write_text(str(os.getpid()))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    peak = max(epochs(job["large"], job, job["memory"]))
    print(json.dumps({"grown": status("VmHWM") - before, "peak": peak}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
