"""Sizes that strategies choose by themselves, kept in a table; ``python -m tests.memory.sizes`` writes it anew."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from pathlib import Path

import featstore
from tests.support.frozen import STRATEGIES, THREADS, make_dataset, make_loader_of, make_pack

__all__ = ["CASES", "DIM", "FLOORS", "TABLE", "N", "key_of", "sizes_of"]

TABLE = Path(__file__).with_name("automatic_sizes.json")
N, DIM = 40_000, 64
# What "auto" takes depends on the drive; it divides its memory as the strategy that it takes does.
_CHOOSING = [name for name in STRATEGIES if name != "auto"]
CASES = [(name, memory, "neighbor") for name in _CHOOSING for memory in (4_000_000, 8_000_000, 12_000_000)]
CASES += [(name, memory, "epoch") for name in _CHOOSING for memory in (5_000_000, 16_000_000)]
FLOORS = {"rows": N // 100, "batches": 1}  # of what is compared: less than that is no difference


def key_of(strategy: str, memory: int, sampler: str) -> str:
    """Return a case's name in the table."""
    return f"{strategy}, {sampler}, {memory} bytes"


def sizes_of(graph: Path, strategy: str, memory: int, sampler: str) -> dict[str, int]:
    """Return the rows of the feature cache and, where superbatches are planned, their batches, at an epoch's first batch.

    An epoch has 60 batches, and a cache of all rows takes 10 MB. A cache may be on loan: of its rows when the loader was made and
    at the first batch the more are returned.
    """
    pack = None
    if strategy == "packed":
        pack = graph.with_name(f"{sampler}-of-sizes.pack")
        if not pack.exists():
            make_pack(pack, graph, sampler, "many_idx")
        for layout in pack.glob("layout-*"):
            shutil.rmtree(layout)
    with featstore.open(graph, memory=memory, threads=THREADS) as g:
        with make_loader_of(g, sampler, STRATEGIES[strategy](pack), "many_idx") as loader:
            found = [_rows(g)]
            for _ in loader:
                found.append(_rows(g))
                break
            lengths = {"batches": loader.stats()["superbatch"]["batches"]} if "superbatch" in loader.stats() else {}
            return {"rows": max(found), **lengths}


def _rows(g: featstore.OutOfCoreGraph) -> int:
    cache = g.features["x"].stats().get("cache")
    return 0 if cache is None else int(cache["capacity"])


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    with tempfile.TemporaryDirectory() as folder:
        graph = make_dataset(Path(folder) / "graph", N, DIM, edge_dim=8)
        table = {key_of(*case): sizes_of(graph, *case) for case in CASES}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
