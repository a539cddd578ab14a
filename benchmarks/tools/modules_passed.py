"""Modules and functions of the library that one epoch passes, counted by tracing: how far apart the parts of one batch's way are.

    python -m benchmarks.tools.modules_passed

Python functions alone: those of the compiled core are a call each. Making the graph, the loader and the pack does not count.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import featstore

N, BATCH = 2000, 50


def make(folder: Path) -> Path:
    """Make a small random graph, and a pack of it."""
    rng = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 20, N))])
    indices = rng.integers(0, N, indptr[-1])
    x = rng.random((N, 16), dtype=np.float32)
    path = folder / "graph"
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False).close()
    with featstore.open(path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3])
        featstore.sample_offline(g, sampler, np.arange(500), BATCH, path=folder / "pack", progress=False).close()
    return path


def passed(loader: featstore.Loader) -> tuple[int, int]:
    """Run an epoch, and return how many modules and functions of the library it passed, in all threads."""
    root, seen = os.path.dirname(featstore.__file__), set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        for _ in loader:
            pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return len({module for module, _ in seen}), len(seen)


def main() -> None:
    """Print a line a strategy."""
    with tempfile.TemporaryDirectory() as name:
        path = make(Path(name))
        strategies: dict[str, featstore.Strategy] = {
            "on demand": featstore.OnDemand(cache=0.1),
            "superbatch": featstore.Superbatch(cache=0.1, length=5),
            "streamed": featstore.Streamed(cache=0.1, length=5),
            "packed": featstore.Packed(Path(name) / "pack", cache=0.1),
        }
        with featstore.open(path, memory="64MB") as g:
            for title, strategy in strategies.items():
                given: dict[str, Any] = {"features": "x", "labels": None, "strategy": strategy}
                if title != "packed":
                    given |= {"sampler": featstore.NeighborSampler(g, [4, 3]), "seeds": np.arange(500), "batch_size": BATCH}
                with featstore.Loader(g, **given) as loader:
                    modules, functions = passed(loader)
                print(f"{title:<12}{modules:>4} modules{functions:>6} functions")


if __name__ == "__main__":
    main()
