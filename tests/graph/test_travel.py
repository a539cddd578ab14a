"""Pickling: objects that travel to worker processes, others that say that they do not, and what objects say of themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from tests.support.refusing import refuses


def make(g: featstore.OutOfCoreGraph, **options: Any) -> featstore.Loader:
    return featstore.Loader(g, featstore.NeighborSampler(g, [3, 2], seed=1), g.node_data["train_idx"], 40, **options)


def test_what_belongs_to_a_process_says_so_and_what_to_use_instead(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g, make(g) as loader:
        stay = (
            (loader, r"a Loader cannot be pickled or copied: .* a loader is made where it is used"),
            (iter(loader), r"an iterator over an epoch cannot be .*state_dict"),
            (featstore.History(8, nodes=0.1), r"a History cannot be .*state_dict\(\)"),
        )
        for each, message in stay:
            for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
                refuses(TypeError, message, lambda: attempt(each))
        batches = [batch.x.clone() for batch in loader]
    assert len(batches) == len(loader)


def test_fields_travel_as_a_dict(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        for attempt in (lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy):
            features, data = attempt(g.features), attempt(g.node_data)
            assert {name: store[[3, -1]].tolist() for name, store in features.items()} == {
                name: store[[3, -1]].tolist() for name, store in g.features.items()
            }
            assert data["y"].equal(g.node_data["y"])


def test_a_loader_says_what_it_is(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        strategy = featstore.Superbatch(cache=0.1, length=3)
        with make(g, features=["x", "h"], strategy=strategy) as loader:
            title = f"Loader({str(small.path)!r}, {len(loader)} batches of 40)"
            options = {
                "sampler": "NeighborSampler(fanouts=[3, 2], replace=False, seed=1)",
                "features": "x, h",
                "labels": "y",
                "strategy": repr(strategy),
                "device": "cpu",
            }
            lines = repr(loader).splitlines()
            assert lines[0] == title
            assert [line.split(maxsplit=1) for line in lines[1:6]] == [[*each] for each in options.items()]
        closed = repr(loader).splitlines()
        assert closed[0] == f"{title[:-1]}, closed)"
        assert [line.split(maxsplit=1) for line in closed[1:]] == [[*each] for each in options.items()]
    refuses(featstore.ClosedError, f"the loader is closed; it was of {small.path}", lambda: iter(loader))
    assert "not made" in repr(object.__new__(featstore.Loader))
    batches = featstore.RandomBatches(np.arange(7), 2)
    assert repr(batches) == "RandomBatches(<7 ids>, batch_size=2, shuffle=True, seed=0, drop_last=False)"


@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_what_is_closed_is_named(small: SimpleNamespace, topology: str) -> None:
    path = small.path
    with featstore.open(small.path, memory="64MiB") as g:
        if topology == "chunked":
            path = f"{small.path}.chunked"
            features = {"x": small.x}
            g = featstore.OutOfCoreGraph.create(path, small.indptr, small.indices, features, topology=topology)
    with featstore.open(path, memory="64MiB") as g:
        store, adjacency = g.features["x"], g.topology
        g.cache("x", "50KB", "lru")
        cache = store.cache
        assert cache is not None
    calls: tuple[Callable[[], Any], ...] = (
        lambda: store[0],
        lambda: store.take_async([0]),
        lambda: g.topology,
        lambda: adjacency.offsets(np.arange(3)),
        lambda: g.pool.borrow(4096),
        lambda: g.reader.engine().__enter__(),
        lambda: pickle.dumps(g),
    )
    for call in calls:
        refuses(featstore.ClosedError, f"{path}.* is closed", call)
    refuses(featstore.ClosedError, "the cache of 'x' was closed", lambda: cache.plan(np.arange(3)))
