"""The loader of whoever gives no options: a cache that is made, kept to or shared by itself."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore


@pytest.fixture
def g(small: SimpleNamespace) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.open(small.path, memory="64MiB", threads=1) as graph:
        yield graph


def load(g: featstore.OutOfCoreGraph, **options: Any) -> featstore.Loader:
    return featstore.Loader(g, featstore.NeighborSampler(g, [4, 3]), np.arange(600), 50, **options)


def epoch(loader: featstore.Loader, small: SimpleNamespace) -> dict[str, Any]:
    """Count the reads that an epoch adds, after a look at its rows."""
    before = loader.stats()["rows_loaded"]
    rows = {"x": torch.from_numpy(small.x), "h": torch.from_numpy(small.h)}
    for batch in loader:
        for name, values in batch.features.items():
            assert torch.equal(values, rows[name][batch.input_ids])
    stats = loader.stats()
    return {**stats, "more": stats["rows_loaded"] - before}


def test_rows_stay_in_memory_without_an_option(small: SimpleNamespace, g: featstore.OutOfCoreGraph) -> None:
    with load(g, features=["x", "h"]) as loader:
        caches = [g.features[name].cache for name in ("x", "h")]
        assert [None if cache is None else cache.capacity for cache in caches] == [1000, 1000]
        assert epoch(loader, small)["more"] == 0
    with load(g, strategy=featstore.OnDemand(cache=0)) as loader:
        assert g.features["x"].cache is None
        assert epoch(loader, small)["more"] > 0


@pytest.mark.parametrize("policy", ["degree", "lru"])
def test_what_was_cached_by_hand_stays(small: SimpleNamespace, g: featstore.OutOfCoreGraph, policy: str) -> None:
    """Of its size and under its policy; a feature that has none gets one beside it."""
    g.cache("x", 0.1, policy)
    mine = g.features["x"].cache
    with load(g, features=["x", "h"]) as loader:
        epoch(loader, small)
        assert g.features["x"].cache is mine
        assert mine.capacity == 100
        beside = g.features["h"].cache
        assert beside.capacity == 1000


def test_loaders_share_a_cache(small: SimpleNamespace, g: featstore.OutOfCoreGraph) -> None:
    """Of one policy; under another one a loader makes its own in its place, of which both read on."""
    with load(g) as training:
        made = g.features["x"].cache
        steps = iter(training)
        next(steps)
        with load(g) as validation:
            assert g.features["x"].cache is made
            assert epoch(validation, small)["more"] == 0
        with load(g, strategy=featstore.OnDemand(policy="sieve")) as other:
            cache = g.features["x"].cache
            assert cache.policy.name == "sieve"
            epoch(other, small)
        assert len(list(steps)) == 11
        assert epoch(training, small)["batches"] == 24


def test_what_was_given_back_is_made_anew(small: SimpleNamespace, g: featstore.OutOfCoreGraph) -> None:
    with load(g) as loader:
        with g.budget.reserve("somebody else", g.budget.available + 50_000):
            cache = g.features["x"].cache
            assert cache.is_cut
        assert epoch(loader, small)["hits"]["host"] > 0
    with load(g) as loader:
        cache = g.features["x"].cache
        assert not cache.is_cut
        assert epoch(loader, small)["more"] == 0


def test_nothing_is_chosen_where_all_rows_fit(small: SimpleNamespace, g: featstore.OutOfCoreGraph) -> None:
    """The default strategy takes ``OnDemand``, and neither samples nor measures anything for that."""
    with load(g) as loader:
        found = loader.stats()["auto"]
        assert found == {
            "taken": {"strategy": "ondemand", "policy": "degree"},
            "reason": "all rows fit in memory",
            "estimates": [],
        }
        assert epoch(loader, small)["more"] == 0
    with load(g) as loader:
        assert loader.stats()["auto"]["reason"] == "the features have caches"
    with load(g, strategy=featstore.Auto(cache=0.999)) as loader:
        assert loader.stats()["auto"]["estimates"]


def test_auto_counts_on_several_epochs(small: SimpleNamespace, g: featstore.OutOfCoreGraph) -> None:
    with load(g, strategy=featstore.Auto(cache=0.1)) as loader:
        assert loader.stats()["auto"]["epochs"] == 10
        epoch(loader, small)
