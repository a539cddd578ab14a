"""A loader and an offline sampling refuse samplers of other graphs, and take those of the same dataset opened again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.sampling.batch import SampledBatch
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader

N, BATCH = 500, 50
STRATEGIES: dict[str, dict[str, Any]] = {
    "ondemand": {},
    "superbatch": {"strategy": "superbatch", "length": 3, "cache": 0.1},
}


def create(path: Path, n: int = N, seed: int = 0) -> Path:
    x = np.arange(6 * n, dtype=np.float32).reshape(n, 6)
    data = {"train_idx": np.arange(0, n, 2)}
    featstore.OutOfCoreGraph.create(path, *make_graph(n, 6.0, seed), {"x": x}, data, progress=False, overwrite=True).close()
    return path


@pytest.fixture
def g(tmp_path: Path) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(create(tmp_path / "g"), memory="64MB", threads=2) as g:
        assert len(g.node_data["train_idx"])
        yield g


def refused(g: featstore.OutOfCoreGraph, sampler: Any, *words: str) -> None:
    """Assert that a loader, and an offline sampling, raises a ValueError with these words, and that nothing stays."""
    before = g.memory_report()
    for options in STRATEGIES.values():
        with pytest.raises(ValueError, match=r"^the sampler .* samples") as caught:
            make_loader(g, sampler, g.node_data["train_idx"], BATCH, labels=None, **options)
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(ValueError, match=r"^the sampler .* samples"):
        featstore.sample_offline(g, sampler, g.node_data["train_idx"], BATCH, progress=False)
    assert not Path(f"{g.path}.pack").exists()
    assert g.memory_report() == before


def test_a_sampler_of_another_dataset(g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    with featstore.open(create(tmp_path / "other", seed=1), memory="64MB") as other:
        refused(g, featstore.NeighborSampler(other, [3]), g.path, other.path, "the adjacency is another")


def test_a_sampler_of_another_number_of_nodes(g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    """Seeds of the larger graph would be out of range, those of the smaller one would be sampled without a word."""
    for n in (N - 1, N + 1):
        with featstore.open(create(tmp_path / "other", n), memory="64MB") as other:
            refused(g, featstore.NeighborSampler(other, [3]), f"{other.path} of {n} nodes", f"{g.path} of {N} nodes")


def test_the_same_path_with_another_dataset(g: featstore.OutOfCoreGraph) -> None:
    create(Path(g.path), seed=1)
    with featstore.open(g.path, memory="64MB") as new:
        refused(g, featstore.NeighborSampler(new, [3]), g.path, "replaced between the two openings")


class Derived(featstore.NeighborSampler):
    """A sampler of somebody's own."""


def plain(n: int) -> Any:
    """A sampler that knows a number of nodes, as PyG's do, but no graph."""

    def sample(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        return SampledBatch(index, epoch, seeds, len(seeds), ())

    return SimpleNamespace(sample=sample, num_nodes=n)


def test_samplers_of_others_that_say_what_they_are_of(g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    with featstore.open(create(tmp_path / "other", seed=1), memory="64MB") as other:
        refused(g, Derived(other, [3]), g.path, other.path)
        refused(g, SimpleNamespace(sample=plain(N).sample, graph=other), g.path, other.path)
    refused(g, plain(N + 1), f"{N + 1} nodes", f"{N} nodes")
    for sampler in (plain(N), plain(np.int64(N)), plain(None), plain({"paper": 7}), Derived(g, [3])):
        with featstore.Loader(g, sampler, g.node_data["train_idx"], BATCH, labels=None) as loader:
            assert len(list(loader)) == len(loader)


def test_a_recorded_trace_is_of_as_many_rows(g: featstore.OutOfCoreGraph) -> None:
    from featstore.plan.trace import record

    with pytest.raises(ValueError, match=f"of {N} nodes, and the batches are for a graph of {N + 1} nodes"):
        record(featstore.NeighborSampler(g, [3]), [torch.arange(5)], N + 1)


def content(loader: featstore.Loader) -> list[tuple[Any, ...]]:
    with loader:
        return [(batch.input_ids.tolist(), batch.x.tolist(), batch.blocks[0].src.tolist()) for batch in loader]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_dataset_opened_again(g: featstore.OutOfCoreGraph, tmp_path: Path, strategy: str) -> None:
    """One graph: also where its directory was copied, or linked. Samples count in the budget of their own handle."""
    seeds = g.node_data["train_idx"]
    want = content(featstore.Loader(g, featstore.NeighborSampler(g, [4, 3]), seeds, BATCH, labels=None))
    shutil.copytree(g.path, tmp_path / "copy")
    (tmp_path / "link").symlink_to(g.path)
    for path in (g.path, tmp_path / "copy", tmp_path / "link"):
        with featstore.open(path, memory="64MB") as again:
            sampler = featstore.NeighborSampler(again, [4, 3])
            assert content(make_loader(g, sampler, seeds, BATCH, labels=None, **STRATEGIES[strategy])) == want
            assert again.memory_report()["sampler scratch"]
