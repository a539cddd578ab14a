"""Planned hits that loans cost: counted, and as many as the rows that are read beyond those that were planned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support import taking
from tests.support.loaders import make_loader

STRATEGIES: dict[str, dict[str, Any]] = {
    "superbatch": {"length": 3},
    "ginex": {"length": 10},  # the third batch is in its middle: at its end neighbour lists have the memory
    "streamed": {"length": 3},
    "packed": {},
}
pytestmark = pytest.mark.filterwarnings("ignore:strategy 'streamed':featstore.PerformanceWarning")


@pytest.fixture(scope="module")
def pack(small: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack") / "p"
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=1)
        featstore.sample_offline(g, sampler, np.arange(0, small.num_nodes, 3), 20, path=path).close()
    return path


def epoch(small: SimpleNamespace, pack: Path, name: str, parts: int | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Run an epoch; after its third batch, lend one in ``parts`` of what is on loan to others, for a moment."""
    with featstore.open(small.path, memory="64MB") as g:
        options: dict[str, Any] = {**STRATEGIES[name], "features": ["x", "h"], "labels": None, "prefetch": 1, "threads": 1}
        if name == "packed":
            options["pack"] = pack
        else:
            options["seeds"], options["batch_size"] = np.arange(0, small.num_nodes, 3), 20
            options["sampler"] = featstore.NeighborSampler(g, [5, 5], seed=1)
        with make_loader(g, strategy=name, cache="auto", **options) as loader:
            found = []
            for batch in loader:
                found += [rows.clone() for rows in batch.features.values()]
                if len(found) == 6 and parts is not None:
                    taking.take_back(g.budget, parts, more=parts - 1).release()
            return found, loader.stats()


@pytest.mark.parametrize(
    ("name", "parts"), [*((name, 1) for name in STRATEGIES), ("superbatch", 2), ("streamed", 2), ("packed", 2)]
)
def test_as_many_as_are_read_beyond_the_plan(small: SimpleNamespace, pack: Path, name: str, parts: int) -> None:
    want, undisturbed = epoch(small, pack, name, None)
    found, stats = epoch(small, pack, name, parts)
    assert all(torch.equal(one, other) for one, other in zip(want, found, strict=True))
    assert undisturbed["hits_lost"] == 0
    assert stats["hits_lost"] > 0
    assert stats["hits_lost"] == undisturbed["hits"]["host"] - stats["hits"]["host"]
    more = stats["rows_loaded"] - undisturbed["rows_loaded"]
    # Ginex reads a superbatch's first rows into the cache before it begins: those that have no slot are not read then.
    assert stats["hits_lost"] > more > 0 if name == "ginex" else stats["hits_lost"] == more


def test_a_cache_that_decides_by_itself_loses_none(small: SimpleNamespace) -> None:
    """Nothing was planned: a row that its cache has given back is missed like any other."""
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=1)
        with featstore.Loader(g, sampler, np.arange(200), 20, labels=None, strategy=featstore.OnDemand(cache="auto")) as loader:
            for batch in loader:
                if batch.index == 3:
                    taking.take_back(g.budget, 1).release()
            assert loader.stats()["hits"]["base"] > 0 == loader.stats()["hits_lost"]
