"""Epoch-wide batches of real graphs: both forms, chunk sizes, windows, threads, budgets and caches give those of NeighborSampler.

The graphs lie in the folder ``$FEATSTORE_GRAPHS``, by default ``../shared/data`` beside the checkout; where they do not, these
tests are skipped, and say so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore

DATA = Path(os.environ.get("FEATSTORE_GRAPHS", Path(__file__).resolve().parents[3] / "shared" / "data"))
NAMES = ("cora", "musae_github", "linux414-calls", "cnr-2000", "ego-twitter")
MOST_SEEDS, N_BATCHES, SEED = 6_000, 24, 7

Batches = dict[tuple[int, int], str]  # a digest of each, by epoch and index


@dataclass(frozen=True)
class Case:
    """Form in which an epoch is drawn: in chunks, or None for CSC; in a memory, or None for the least that an error names."""

    chunk_bytes: int | None
    window: int | str = "auto"
    threads: int = 2
    memory: int | None = 256 << 20
    cached: float = 0.0  # so much of the adjacency is in the neighbour cache


CASES = (
    Case(None),
    Case(None, memory=None, threads=1),
    Case(None, window=5, threads=3, cached=0.2),
    Case(None, window=1, memory=None),
    Case(4096, memory=None),
    Case(4096, window=7, threads=3),
    Case(1 << 16, threads=1, cached=0.2),
    Case(1 << 20, window=11, memory=None),
    Case(64 << 20, threads=3),
)


def digest(batch: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for array in (batch.input_ids, *(part for block in batch.blocks for part in (block.src, block.dst))):
        found.update(array.numpy().tobytes())
        found.update(b"/")
    return found.hexdigest()


def batches_of(g: featstore.OutOfCoreGraph, sampler: Any) -> Batches:
    """Two epochs, so that the second one's first window is drawn beside the first."""
    seeds, found = g.node_data["seeds"], dict[tuple[int, int], str]()
    size = -(-len(seeds) // N_BATCHES)
    with featstore.Loader(g, sampler, seeds, size, features=[], labels=None, seed=SEED) as loader:
        for epoch in range(2):
            for batch in loader:
                found[epoch, batch.index] = digest(batch)
                del batch
    return found


def epochwide(path: Path, case: Case, fanouts: list[int], **options: Any) -> Batches:
    memory = case.memory or 1 << 20
    for _ in range(8):
        try:
            with featstore.open(path, memory=memory, threads=case.threads) as g:
                if case.cached:
                    g.cache_neighbors(int(case.cached * g.topology.nbytes) + 8 * g.num_nodes + 8192, progress=False)
                sampler = featstore.EpochSampler(g, fanouts, seed=SEED, window=case.window, **options)
                found = batches_of(g, sampler)
                assert g.budget.peak <= memory
                return found
        except featstore.BudgetError as error:
            assert case.memory is None, error
            assert error.needed is not None, error
            assert error.needed > memory, error
            memory = error.needed
    raise AssertionError(f"{memory} bytes, which an error named, do not do either")


@pytest.mark.stress
@pytest.mark.parametrize("name", NAMES)
def test_epoch_wide_batches_of_a_real_graph(name: str, tmp_path: Path) -> None:
    if not (DATA / f"{name}.npz").is_file():
        pytest.skip(f"no {name} in {DATA} ($FEATSTORE_GRAPHS)")
    spec = importlib.util.spec_from_file_location("graphs", DATA / "graphs.py")
    assert spec is not None
    assert spec.loader is not None
    graphs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(graphs)
    indptr, ids, _ = graphs.load(name)
    seeds = np.random.default_rng(0).permutation(len(indptr) - 1)[:MOST_SEEDS]  # isolated nodes, too
    paths: dict[int | None, Path] = {}
    for chunk_bytes in {case.chunk_bytes for case in CASES}:
        paths[chunk_bytes] = tmp_path / f"chunks-{chunk_bytes}"
        options: dict[str, Any] = {} if chunk_bytes is None else {"topology": "chunked", "chunk_bytes": chunk_bytes}
        featstore.OutOfCoreGraph.create(
            paths[chunk_bytes], indptr, ids, node_data={"seeds": seeds}, progress=False, memory="512MiB", **options
        ).close()
    for fanouts, drawing in (([10, 5, 5], {}), ([6, 4], {"replace": True}), ([5, -1], {"redraw": False})):
        with featstore.open(paths[None], memory="1GiB") as g:
            g.cache_neighbors(progress=False)
            expected = batches_of(g, featstore.NeighborSampler(g, fanouts, seed=SEED, **drawing))
        assert len(expected) == 2 * -(-len(seeds) // -(-len(seeds) // N_BATCHES))
        for case in CASES:
            assert epochwide(paths[case.chunk_bytes], case, fanouts, **drawing) == expected, (fanouts, case)
