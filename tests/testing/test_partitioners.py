"""The contract of partitioners: those of the library keep it, faulty ones are found; the registry and entry points."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.budget import Budget
from featstore.errors import OptionError, PluginError
from featstore.partitioning import base
from featstore.partitioning.base import get_partitioner
from featstore.testing import PartitionerContract
from tests.support.refusing import refuses


class TestFennel(PartitionerContract):
    def make(self) -> featstore.Partitioner:
        return get_partitioner("fennel", {})


class TestFennelFromRanges(PartitionerContract):
    def make(self) -> featstore.Partitioner:
        return get_partitioner("fennel", {"start": "ranges", "passes": 2, "gamma": 1.7})


class TestLDG(PartitionerContract):
    def make(self) -> featstore.Partitioner:
        return get_partitioner("ldg", {})


class TestRanges(PartitionerContract):
    def make(self) -> featstore.Partitioner:
        return get_partitioner("ranges", {})


class TestRandom(PartitionerContract):
    def make(self) -> featstore.Partitioner:
        return get_partitioner("random", {})


class TestMetis(PartitionerContract):
    def make(self) -> featstore.Partitioner:
        return get_partitioner("metis", {})

    def test_memory_grows_with_nodes_not_with_edges(self) -> None:
        """It does not: METIS works in memory. What the edges take is counted, and refused where it does not fit."""
        graph: Any = SimpleNamespace(num_nodes=10, num_edges=1 << 20, n_parts=2)
        graph.reserve = lambda n_bytes: Budget(1 << 20).reserve("partitioning", n_bytes)
        refuses(featstore.BudgetError, "", lambda: self.make().assign(graph))


@pytest.mark.parametrize("n", [0, 1, 10, 64, 200_000])
@pytest.mark.parametrize("k", [1, 3, 10, 64])
def test_ranges_and_random_are_even(n: int, k: int) -> None:
    graph: Any = base.GraphStream.__new__(base.GraphStream)
    graph.num_nodes, graph.n_parts, graph.seed, graph._budget = n, k, 3, Budget(1 << 24)
    parts = get_partitioner("ranges", {}).assign(graph)
    assert (np.diff(parts) >= 0).all()
    for found in (parts, get_partitioner("random", {}).assign(graph)):
        assert set(np.bincount(found, minlength=k).tolist()) <= {n // k, -(-n // k)}
    again = get_partitioner("random", {}).assign(graph)
    graph.seed = 4
    other = get_partitioner("random", {}).assign(graph)
    assert np.array_equal(found, again)
    assert n < 10 or k == 1 or not np.array_equal(found, other)


class Right(featstore.Partitioner):
    """By the number of in-edges; the faulty ones differ in one thing."""

    def assign(self, graph: featstore.GraphStream) -> Any:
        sum(1 for _ in graph.blocks())
        return np.diff(graph.indptr) % graph.n_parts


class TooFar(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        return super().assign(graph) + 1


class Short(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        return super().assign(graph)[:-1]


class Floats(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        return super().assign(graph) * 1.0


class Twice(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        super().assign(graph)
        return super().assign(graph)


class Blocks(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        return (super().assign(graph) + len(list(graph.blocks()))) % graph.n_parts

    n_passes = 2  # type: ignore[assignment]


class Keeps(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        graph.reserve(10)
        return super().assign(graph)


class Holds(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        held = [ids.tolist() for _, ids in graph.blocks()]
        return (np.diff(graph.indptr) + 0 * len(held)) % graph.n_parts


class Writes(Right):
    def assign(self, graph: featstore.GraphStream) -> Any:
        if graph.is_train is not None:
            graph.is_train[:] = 0
        return super().assign(graph)


def suite(cls: type[featstore.Partitioner]) -> Any:
    class Suite(PartitionerContract):
        def make(self) -> featstore.Partitioner:
            return cls()

    return Suite()


def run_all(cls: type[featstore.Partitioner], folder: Path) -> None:
    tests = suite(cls)
    tests.test_every_node_has_a_part(7)
    tests.test_tiny_graphs(2)
    tests.test_isolated_nodes()
    tests.test_training_nodes([3])
    tests.test_the_same_whatever_the_blocks()
    tests.test_memory_grows_with_nodes_not_with_edges()
    tests.test_in_a_dataset(folder)


def test_a_right_one_passes(tmp_path: Path) -> None:
    run_all(Right, tmp_path)


@pytest.mark.parametrize("cls", [TooFar, Short, Floats, Twice, Blocks, Keeps, Holds, Writes])
def test_control_a_faulty_one_is_found(cls: type[featstore.Partitioner], tmp_path: Path) -> None:
    refuses((AssertionError, ValueError, TypeError), "", lambda: run_all(cls, tmp_path))


@pytest.fixture
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    featstore.available_partitioners()
    monkeypatch.setattr(base.PARTITIONERS, "known", dict(base.PARTITIONERS.known))


@pytest.mark.usefixtures("_registry")
def test_registering_one() -> None:
    assert {"fennel", "ldg", "metis", "random", "ranges"} <= set(featstore.available_partitioners())

    @featstore.register_partitioner("stripes")
    @dataclass(frozen=True)
    class Stripes(featstore.Partitioner):
        width: int = 1

        def assign(self, graph: featstore.GraphStream) -> Any:
            return np.arange(graph.num_nodes) // self.width % graph.n_parts

    made = get_partitioner("stripes", {"width": 3, "passes": None})
    assert (made.name, made.width) == ("stripes", 3)  # type: ignore[attr-defined]
    assert get_partitioner(Stripes, {}).name == "stripes"
    assert get_partitioner(made, {}) is made
    refuses(OptionError, "depth: method 'stripes' has width", lambda: get_partitioner("stripes", {"depth": 1}))
    with pytest.raises(ValueError, match="registered already"):
        featstore.register_partitioner("fennel")(type("Other", (Right,), {"__module__": "elsewhere"}))
    refuses(TypeError, "not a subclass of Partitioner", lambda: featstore.register_partitioner("no")(dict))


class Breaks(featstore.Partitioner):
    def __init__(self) -> None:
        raise RuntimeError("boom")

    def assign(self, graph: featstore.GraphStream) -> Any: ...


@pytest.mark.usefixtures("_registry")
def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("right", f"{__name__}:Right", "featstore.partitioners"),
        importlib.metadata.EntryPoint("broken", f"{__name__}:Missing", "featstore.partitioners"),
        importlib.metadata.EntryPoint("breaks", f"{__name__}:Breaks", "featstore.partitioners"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "featstore.partitioners" else [])
    assert {"right", "broken"} <= set(featstore.available_partitioners())
    assert type(get_partitioner("right", {})) is Right
    refuses(PluginError, "broken", lambda: get_partitioner("broken", {}))
    refuses(PluginError, "cannot be made: RuntimeError: boom", lambda: get_partitioner("breaks", {}))
