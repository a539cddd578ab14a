"""Caches of features and of neighbour lists that a graph is asked for: the same rows, refused or damaged ones leave none."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore import progress
from featstore.cache import table
from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.errors import BudgetError, BusyError, CorruptionError, PluginError
from featstore.graph import adjacency, neighborlists, rowcaches
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.storage.catalog import read_catalog
from featstore.storage.update import Update
from featstore.topology import base as topology
from featstore.topology.noderows import RowsOfTypes
from tests.graph.test_damaged_dataset import replace_column
from tests.graph.test_dataset import copy, names, quick
from tests.support.reference_policies import ReferenceLRU
from tests.support.typed import academic

pytestmark = pytest.mark.usefixtures("small_pieces")

__all__ = ["copy", "quick"]  # fixtures


@pytest.mark.parametrize("what", ["features", "neighbors"])
def test_closed_while_a_cache_is_made(small: SimpleNamespace, what: str) -> None:
    with featstore.open(small.path, memory="64MiB") as g:

        class Closing(featstore.StaticPolicy):
            def scores(self, context: Any) -> Any:
                g.close()
                return np.ones(small.num_nodes)

        with pytest.raises(featstore.ClosedError):
            if what == "features":
                g.cache("x", "20KB", Closing)
            else:
                g.cache_neighbors("20KB", Closing)
        assert g.budget.used == 0


@pytest.mark.parametrize("form", [{}, {"topology": "chunked", "chunk_bytes": 4096}], ids=["csc", "chunked"])
def test_policies_see_the_degrees_of_rows(tmp_path: Path, form: dict[str, Any]) -> None:
    """Of types that share a column, over all types of edges; of types that a loader does not gather nothing is known."""
    graph = academic(papers=300)
    for kind, n in graph.n.items():
        graph.features[kind] = {"x": np.zeros((n, 2), np.float32)}
    with graph.create(tmp_path / "g", **form) as g:
        rows = g.node_rows("paper,author,institution/x")
        assert isinstance(rows, RowsOfTypes)
        for gathered in (rows, RowsOfTypes(rows.n, rows.parts[1:])):
            with g.policy_inputs(8, rows=gathered) as inputs:
                found = inputs.context.in_degree, inputs.context.out_degree
                for end, degrees in zip((1, 0), found, strict=True):
                    expected = np.zeros(rows.n, np.int64)
                    for kind, first in gathered.parts:
                        for key, pairs in graph.edges.items():
                            if key[0 if end == 0 else 2] == kind.name:
                                expected[first : first + kind.n] += np.bincount(pairs[end], minlength=kind.n)
                    assert np.array_equal(degrees, expected)


def test_without_arguments_all_features_are_cached(tmp_path: Path) -> None:
    """Whole where the memory suffices; else as many rows of each, which give way to whoever needs the memory."""
    n, rng = 4000, np.random.default_rng(0)
    rows = {"x": rng.standard_normal((n, 256), np.float32), "h": rng.integers(0, 256, (n, 300), np.uint8)}
    OutOfCoreGraph.create(tmp_path / "g", np.arange(n + 1), rng.integers(0, n, n), features=rows, progress=False).close()
    for memory, is_whole in (("64MiB", True), ("6MiB", False)):
        with featstore.open(tmp_path / "g", memory=memory, threads=1) as g:
            g.cache()
            caches = [g.features[name].cache for name in rows]
            capacities = {0 if cache is None else cache.capacity for cache in caches}
            assert (capacities == {n}) == is_whole
            assert min(capacities) == max(capacities) > n // 8
            for name, values in rows.items():
                before = g.features[name].stats()["rows_loaded"]
                assert np.array_equal(g.features[name][:].numpy(), values)
                assert (g.features[name].stats()["rows_loaded"] == before) == is_whole
            with g.budget.reserve("somebody else", g.budget.available + (1 << 20)):  # which the caches give back
                assert np.array_equal(g.features["x"][:100].numpy(), rows["x"][:100])
            g.cache(budget="400KB", policy="lru")  # bytes of all together
            assert sum(size for holder, size in g.memory_report().items() if holder.startswith("cache of")) <= 400_000
            g.cache(budget=0)
            assert all(g.features[name].cache is None for name in rows)
            with pytest.raises(BudgetError, match="one row"):
                g.cache(budget="20KB")
            with pytest.raises(ValueError, match="one cache"):
                g.cache(policy=featstore.get_policy("lru"))


def test_the_degree_policy_keeps_the_highest_out_degrees(small: SimpleNamespace) -> None:
    degrees = np.bincount(small.indices, minlength=1000)
    with featstore.open(small.path, memory="64MiB") as g:
        g.cache("x", 4000 + 100 * 50)
        cache = g.features["x"].cache
        kept = np.flatnonzero(cache.map.slot_of_row >= 0)
        np.testing.assert_array_equal(kept, np.sort(np.lexsort((np.arange(1000), -degrees))[: len(kept)]))
        assert "policy inputs" not in g.memory_report()


@pytest.mark.parametrize("is_online", [False, True])
def test_what_a_policy_asked_for_is_let_go_of(small: SimpleNamespace, is_online: bool) -> None:
    """The budget counts it while rows are chosen, or an online policy starts, and no longer."""
    held = []

    class Degree(StaticPolicy):
        def scores(self, context: PolicyContext) -> Any:
            held.append(weakref.ref(context.out_degree))
            return context.out_degree

    class Looking(ReferenceLRU):
        def start(self, capacity: int, context: PolicyContext) -> None:
            held.append(weakref.ref(context.out_degree))
            super().start(capacity, context)

    with featstore.open(small.path) as g:
        g.cache("x", 0.1, policy=Looking() if is_online else Degree())
        gc.collect()
        assert [each() for each in held] == [None]
        used = g.budget.used
        if is_online:
            g["x"].cache.context.forget()
            assert len(g["x"].cache.context.out_degree) == 1000  # made anew, and counted
            assert g.budget.used == used + 8 * 1000


def test_out_degrees_in_16_bits_are_the_out_degrees_or_the_most(tmp_path: Path) -> None:
    n, rng = 500, np.random.default_rng(0)
    most = adjacency.MOST_DEGREE
    sources = np.concatenate([np.repeat([3, 70, 444], [most + 1, most, most - 1]), rng.integers(0, n, 4000)])
    lists = np.bincount(rng.integers(0, n, len(sources)), minlength=n)
    with OutOfCoreGraph.create(tmp_path / "g", np.concatenate([[0], np.cumsum(lists)]), sources, progress=False) as g:
        degrees = np.bincount(sources, minlength=n)
        assert degrees.max() > most
        assert np.array_equal(g.short_degrees(), np.minimum(degrees, most))


def test_arrays_for_policies_may_be_made_when_asked_for(small: SimpleNamespace) -> None:
    calls = []

    def counts() -> np.ndarray:
        calls.append(threading.current_thread())
        assert g.topology.num_nodes == 1000  # the graph can be used meanwhile
        return np.arange(1000)

    with featstore.open(small.path, memory="64MiB") as g:
        g.cache("x", "10KB", "degree", counts=counts)
        assert not calls
        g.cache("x", "10KB", "frequency", counts=counts)
        assert len(calls) == 1
        cache = g.features["x"].cache
        assert np.flatnonzero(cache.map.slot_of_row >= 0).min() > 900


def test_wrong_caches_are_refused_and_leave_none(small: SimpleNamespace) -> None:
    def no_idea(context: Any) -> Any:
        raise RuntimeError("no idea")

    def policy(name: str, scores: Any) -> Any:
        return type(name, (featstore.StaticPolicy,), {"scores": lambda self, context: scores(context)})

    Wrong, Text = policy("Wrong", lambda context: np.full(context.n, np.nan)), policy("Text", lambda context: ["a"] * context.n)
    Raises = policy("Raises", no_idea)
    with featstore.open(small.path, memory="16MiB") as g:
        for call, error, match in (
            (lambda: g.cache("x", "10KB", "nonesuch"), ValueError, "nonesuch"),
            (lambda: g.cache("x", "10KB", 3), TypeError, "policy"),
            (lambda: g.cache("x", "many"), ValueError, "not a size"),
            (lambda: g.cache("x", "4000B"), BudgetError, "one row"),
            (lambda: g.cache("x", "10KB", "frequency"), ValueError, "the policy needs counts: pass counts="),
            (lambda: g.cache("x", "10KB", "frequency", counts=np.zeros(3)), ValueError, "counts must have shape"),
            (lambda: g.cache("x", "10KB", Wrong), PluginError, "Wrong"),
            (lambda: g.cache("x", "10KB", Raises()), PluginError, "no idea"),
            (lambda: g.cache_neighbors("10KB", "lru"), ValueError, "not a static one"),
            (lambda: g.cache_neighbors("10KB", "nonesuch"), ValueError, "nonesuch"),
            (lambda: g.cache_neighbors("16KiB", Wrong), PluginError, "Wrong"),
            (lambda: g.cache_neighbors("16KiB", Raises), PluginError, "no idea"),
            (lambda: g.cache_neighbors("16KiB", Text), PluginError, "real numbers"),
            (lambda: g.cache_neighbors("16KiB", "frequency"), ValueError, "pass counts="),
            (lambda: g.cache_neighbors("100B"), BudgetError, "at least"),
        ):
            with pytest.raises(error, match=match):
                call()
            assert g.features["x"].cache is None
            assert g.neighbor_cache is None
            assert set(g.memory_report()) <= {"reader buffers", "checksum tables", "indptr"}
        g.cache("x", "10KB")  # the next correct call works
        g.cache_neighbors("16KiB")
        assert g.neighbor_cache is not None


def test_a_cache_beyond_the_budget_says_what_would_do(tmp_path: Path) -> None:
    x = np.zeros((5000, 1000), np.float32)
    with OutOfCoreGraph.create(tmp_path / "g", np.zeros(5001, np.int64), [], {"x": x}, memory="8MiB") as g:
        with pytest.raises(BudgetError, match=r"bytes .* would do") as caught:
            g.cache("x", "16MiB")
        assert caught.value.needed > 16_000_000
        assert g.features["x"].cache is None
        g.cache("x", "2MiB")
    with featstore.open(tmp_path / "g", memory=caught.value.needed + (4 << 20)) as g:
        g.cache("x", "16MiB")


def test_damage_met_while_a_cache_is_filled(copy: Path) -> None:
    for name in ("node.x.", "edge.out_degree."):
        path = names(copy, name)
        good = path.read_bytes()
        with featstore.open(copy, memory="64MiB") as g:
            path.write_bytes(good[:-1] + b"\1")
            with pytest.raises(CorruptionError) as caught:
                g.cache("x", "1MB")
            assert caught.value.filename == str(path)
            assert g.features["x"].cache is None
            path.write_bytes(good)
            g.cache("x", "1MB")


def test_a_saved_neighbour_cache_is_loaded_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_built = 0
    real = NeighborCache.build

    def build(*arguments: Any, **options: Any) -> Any:
        nonlocal n_built
        n_built += 1
        return real(*arguments, **options)

    monkeypatch.setattr(NeighborCache, "build", build)
    with featstore.open(copy, memory="64MiB") as g:
        for call in (
            lambda: g.cache_neighbors(save=True),
            lambda: g.cache_neighbors("16KiB", featstore.get_policy("degree"), save=True),
            lambda: g.cache_neighbors("16KiB", "frequency", counts=np.zeros(1000), save=True),
        ):
            with pytest.raises(ValueError, match="saved for a policy's name"):
                call()
        with Update(copy), pytest.raises(BusyError):
            g.cache_neighbors("16KiB", save=True)
        assert g.neighbor_cache is not None
        g.cache_neighbors("16KiB", save=True)
        saved = g.neighbor_cache
        assert n_built == 2
        g.verify()
    with featstore.open(copy, memory="64MiB") as g:
        g.cache_neighbors("16KiB")
        assert n_built == 2  # loaded
        np.testing.assert_array_equal(g.neighbor_cache.records, saved.records)
        np.testing.assert_array_equal(g.neighbor_cache.offset_of_node, saved.offset_of_node)
        assert g.memory_report()["neighbor cache"] >= g.neighbor_cache.nbytes
        for budget, policy, seed in (("20KiB", "in_out_ratio", 0), ("16KiB", "degree", 0), ("16KiB", "in_out_ratio", 1)):
            n_built = 0
            g.cache_neighbors(budget, policy, seed=seed)
            assert n_built == 1  # another request
        g.cache_neighbors("20KiB", save=True)
    with Update(copy):
        pass  # what was superseded is swept
    assert sum("cache.neighbors" in name for name in os.listdir(copy)) == 4
    assert len(read_catalog(copy).files) == 9
    with featstore.open(copy, memory="64MiB") as g:
        path = next(copy.glob("cache.neighbors.records.*.rows"))
        good = path.read_bytes()
        path.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
        with pytest.raises(CorruptionError) as caught:
            g.cache_neighbors("20KiB")
        assert caught.value.filename == str(path)
        assert g.neighbor_cache is None
        assert "neighbor cache" not in g.memory_report()


@pytest.mark.parametrize("by", ["this handle", "another", "nobody"])
def test_what_was_saved_last_is_in_the_dataset(copy: Path, by: str) -> None:
    """Also where the handle was opened while the dataset had that very cache, and it was replaced since."""
    with featstore.open(copy, memory="64MiB") as g:
        g.cache_neighbors("20KiB", save=True)
    with featstore.open(copy, memory="64MiB") as g, featstore.open(copy, memory="64MiB") as other:
        if by != "nobody":
            (g if by == "this handle" else other).cache_neighbors("16KiB", save=True)
        before = read_catalog(copy)
        assert before.extra["cache/neighbors"]["bytes"] == (20480 if by == "nobody" else 16384)
        with Update(copy), contextlib.nullcontext() if by == "nobody" else pytest.raises(BusyError):
            g.cache_neighbors("20KiB", save=True)  # nothing is to be written where it is there
        records = g.neighbor_cache.records.copy()
        g.cache_neighbors("20KiB")
        assert read_catalog(copy).generation == before.generation
        g.cache_neighbors("20KiB", save=True)
        after = read_catalog(copy)
        assert after.generation == before.generation + (by != "nobody")
    assert after.extra["cache/neighbors"]["bytes"] == 20480
    with featstore.open(copy, memory="64MiB") as g, pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeighborCache, "build", None)  # would fail if it were used
        g.cache_neighbors("20KiB")
        np.testing.assert_array_equal(g.neighbor_cache.records, records)
        g.verify(progress=False)


def test_a_handle_loads_what_it_has_saved_itself(copy: Path) -> None:
    with featstore.open(copy, memory="64MiB") as g:
        g.cache_neighbors("20KiB", save=True)
        g.cache_neighbors("16KiB", save=True)
        records, before = g.neighbor_cache.records.copy(), read_catalog(copy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NeighborCache, "build", None)  # would fail if it were used
            g.cache_neighbors("16KiB", save=True)
        np.testing.assert_array_equal(g.neighbor_cache.records, records)
        assert read_catalog(copy).generation == before.generation  # nothing was written
        g.verify(progress=False)
    assert sum("cache.neighbors" in name for name in os.listdir(copy)) == 4  # the files, and their sums, of one cache


def test_a_cache_that_cannot_be_opened_is_saved_all_the_same(copy: Path) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with featstore.open(copy, memory="64MiB") as g:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("featstore.graph.snapshot.open_file", refuse)
            g.cache_neighbors("16KiB", save=True)
        g.cache_neighbors("16KiB")
    with featstore.open(copy, memory="64MiB") as g, pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeighborCache, "build", None)  # would fail if it were used
        g.cache_neighbors("16KiB")


def test_a_saved_neighbour_cache_of_another_topology_is_never_used(copy: Path) -> None:
    with featstore.open(copy, memory="64MiB") as g:
        g.cache_neighbors("16KiB", save=True)
        degrees = np.bincount(np.fromfile(names(copy, "edge.indices."), np.int32, g.num_edges, offset=4096), minlength=1000)
    replace_column(copy, "out_degree", degrees, "int64")
    with featstore.open(copy, memory="64MiB") as g, pytest.MonkeyPatch.context() as patch:
        patch.setattr(NeighborCache, "from_arrays", None)  # would fail if it were used
        g.cache_neighbors("16KiB")
        replace_column(copy, "out_degree", degrees, "int64")
        with pytest.raises(BusyError, match="replaced"):
            g.cache_neighbors("16KiB", save=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool, list[int]]]:
    """Record progress: label, total, whether it shows, and what was added."""
    bars: list[tuple[str, int, bool, list[int]]] = []

    class Recorder(progress.Progress):
        def __init__(self, label: str, total: int, show: bool, unit: str = "B", delay_s: float = 0.0) -> None:
            super().__init__(label, total, False, unit, delay_s)
            bars.append((label, total, show, []))

        def add(self, n_bytes: int) -> None:
            super().add(n_bytes)
            bars[-1][3].append(n_bytes)

    for module in (adjacency, neighborlists, rowcaches):
        monkeypatch.setattr(module, "Progress", Recorder)
    return bars


@pytest.mark.parametrize("size", [0.5, None])
def test_a_long_pass_over_the_lists_shows_how_far_it_is(
    size: float | None, small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with featstore.open(small.path, memory="8MiB") as g:
        n_bytes = None if size is None else 8 * g.num_nodes + int(size * g.topology.nbytes) + 8192
        shown = {}
        for after_s, progress in ((0.0, True), (0.0, False), (600.0, True)):
            monkeypatch.setattr(neighborlists, "SHOWN_AFTER_S", after_s)
            monkeypatch.setattr(sys, "stderr", terminal := Terminal())
            g.cache_neighbors(n_bytes, progress=progress)
            assert g.neighbor_cache.whole == (size is None)
            shown[after_s, progress] = terminal.getvalue()
    assert "neighbour lists: 100%" in shown.pop((0.0, True))
    assert set(shown.values()) == {""}


def test_progress_covers_all_that_takes_long(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets as they are read; of a neighbour cache degrees, scores and the passes that choose, and then the lists."""
    bars = recorded(monkeypatch)
    monkeypatch.setattr(topology, "BLOCK_BYTES", 4096)
    for shows in (False, True):
        bars.clear()
        with featstore.open(small.path, memory="8MiB", progress=shows) as g:
            g.cache_neighbors(8 * g.num_nodes + g.topology.nbytes // 2 + 8192, progress=not shows)
            n, n_bytes = g.num_nodes, g.topology.nbytes
        (first, whole, last) = bars
        assert first[:3] == ("offsets", 8 * (n + 1), shows)
        assert len(first[3]) == -(-first[1] // 4096)
        assert sum(first[3]) == first[1]
        assert whole[2:] == (not shows, [])  # not everything fits, and nothing is saved
        assert last[:3] == ("neighbour lists", 24 * n + 8 * n * 9 + n_bytes, not shows)
        assert last[3][:1] == [24 * 512]  # in-degrees, out-degrees, scores of a block of nodes
        assert sum(last[3]) == last[1]
        assert max(last[3]) < last[1] // 4


def test_filling_a_cache_shows_how_far_it_is(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, where it takes long, unless the dataset was opened with ``progress=False``."""

    monkeypatch.setattr(table, "FILL_BYTES", 100 * 100)
    for shows, after_s, said in ((True, 0.0, "cache of 'x': 100%"), (True, 600.0, ""), (False, 0.0, "")):
        monkeypatch.setattr(rowcaches, "FILL_SHOWN_AFTER_S", after_s)
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with featstore.open(small.path, memory="8MiB", progress=shows) as g:
            g.cache("x", 0.5)
            assert g.features["x"].cache is not None
            sampler = featstore.NeighborSampler(g, [3])
            featstore.Loader(g, sampler, small.train_idx, strategy=featstore.OnDemand(0.5, "degree")).close()
        assert said in terminal.getvalue()
        assert terminal.getvalue().count("100%") == 2 * bool(said)
        assert bool(terminal.getvalue()) == bool(said)
    bars = recorded(monkeypatch)
    with featstore.open(small.path, memory="8MiB") as g:
        g.cache("x", 0.5)
        g.cache("x", 0.5, "lru")  # nothing is filled
    assert bars[-2:] == [("cache of 'x'", 50_000, True, [10_000] * 5), ("cache of 'x'", 50_000, True, [])]
