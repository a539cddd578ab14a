"""Partitioners: FENNEL and LDG equal brute force, whatever the graph; bounds; bad input; memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pymetis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore._core.partition import Placer, edges_inside, group_by_part
from featstore.budget import Budget
from featstore.errors import BudgetError, MissingExtraError, OptionError, PluginError
from featstore.partitioning import base
from featstore.partitioning.assign import judge
from featstore.partitioning.base import GraphStream
from featstore.partitioning.fennel import Fennel
from featstore.partitioning.ldg import LDG
from featstore.topology.listblocks import ListBlock
from featstore.topology.partarrays import by_part
from tests.support.graphs import make_graph
from tests.support.reference_partitions import fennel, ldg, most_nodes
from tests.support.refusing import refuses

pytestmark = pytest.mark.usefixtures("small_pieces")


class Arrays:
    """A topology in memory, read in blocks of ``step`` ids that cut lists."""

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, step: int = 3, dtype: Any = np.int32) -> None:
        self.indptr, self.ids, self.step = indptr, indices.astype(dtype), step
        self.resident_offsets = indptr
        self.num_nodes, self.num_edges, self.nbytes, self.id_dtype = len(indptr) - 1, len(indices), indices.nbytes, dtype

    def blocks(self, block_bytes: int) -> Any:
        for first in range(0, self.num_edges, self.step):
            ids = self.ids[first : first + self.step].copy()
            node = int(np.searchsorted(self.indptr, first, side="right")) - 1
            end = int(np.searchsorted(self.indptr, first + len(ids), side="left"))
            yield ListBlock(node, self.indptr[node : end + 1].copy(), first, ids)


def assign(method: Any, indptr: np.ndarray, indices: np.ndarray, k: int, train: Any = None, **shape: Any) -> np.ndarray:
    """Run a partitioner over arrays."""
    is_train = None if train is None else np.isin(np.arange(len(indptr) - 1), train).astype(np.uint8)
    topology: Any = Arrays(indptr, indices, **shape)
    bar: Any = SimpleNamespace(add=lambda n: None)
    return method.assign(GraphStream(topology, k, is_train, 0, Budget(1 << 24), bar))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Small graphs with self-loops, repeated edges and isolated nodes."""
    n = draw(st.integers(1, 14))
    lists = draw(st.lists(st.lists(st.integers(0, n - 1), max_size=6), min_size=n, max_size=n))
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    return indptr, np.array([u for each in lists for u in sorted(each)], np.int64)


@given(
    graphs(),
    st.integers(1, 20),
    st.integers(1, 3),
    st.sampled_from([1.5, 2.0, 1.25, 3]),
    st.sampled_from([None, "ranges"]),
    st.sets(st.integers(0, 13)) | st.none(),
    st.integers(1, 9),
    st.sampled_from([np.int32, np.int64]),
)
def test_fennel_is_brute_force(graph, k, passes, gamma, start, train, step, dtype) -> None:
    indptr, indices = graph
    train = None if train is None else [v for v in train if v < len(indptr) - 1]
    found = assign(Fennel(passes, gamma, start), indptr, indices, k, train, step=step, dtype=dtype)
    assert found.dtype == np.int32
    assert found.tolist() == fennel(indptr, indices, k, passes, gamma, train or (), start)
    assert np.bincount(found).max() <= most_nodes(len(found), k)


@given(
    graphs(),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([None, "ranges"]),
    st.sets(st.integers(0, 13)) | st.none(),
)
def test_two_levels_are_brute_force(graph: Any, levels: tuple[int, int], start: Any, train: Any) -> None:
    indptr, indices = graph
    train = None if train is None else [v for v in train if v < len(indptr) - 1]
    k = levels[0] * levels[1]
    found = assign(Fennel(levels=levels, start=start), indptr, indices, k, train)
    assert found.tolist() == fennel(indptr, indices, k, train=train or (), start=start, levels=levels)


@pytest.mark.parametrize("start", [None, "ranges"])
@pytest.mark.parametrize("levels", [(2, 9), (5, 4)])
def test_two_levels_of_a_larger_graph_are_brute_force(levels: tuple[int, int], start: str | None) -> None:
    """Each group is divided by its own edges, nodes and training nodes; all three differ between groups."""
    n, rng = 800, np.random.default_rng(7)
    degrees = np.where(np.arange(n) < 300, 14, np.where(np.arange(n) < 500, 5, 1))
    lists = [
        np.sort(np.where(rng.random(d) < 0.8, (v + rng.integers(-60, 60, d)) % n, rng.integers(0, n, d)))
        for v, d in enumerate(degrees)
    ]
    indptr, indices = np.concatenate([[0], np.cumsum(degrees)]), np.concatenate(lists)
    train = np.flatnonzero(rng.random(n) < np.linspace(0.6, 0.0, n)).tolist()
    k = levels[0] * levels[1]
    found = assign(Fennel(levels=levels, start=start), indptr, indices, k, train, step=997)
    assert found.tolist() == fennel(indptr, indices, k, train=train, start=start, levels=levels)


@given(graphs(), st.integers(1, 20), st.integers(1, 3))
def test_ldg_is_brute_force(graph: Any, k: int, passes: int) -> None:
    assert assign(LDG(passes), *graph, k).tolist() == ldg(*graph, k, passes)


def test_ldg_of_a_larger_graph_is_brute_force() -> None:
    """Its scores choose others than FENNEL's would here; training nodes do not weigh."""
    indptr, indices = make_graph(200, 6, 1)
    for k, passes in ((3, 1), (7, 2)):
        assert assign(LDG(passes), indptr, indices, k, train=[*range(50)]).tolist() == ldg(indptr, indices, k, passes)


def make(path: Path, n: int = 600, degree: float = 6, memory: str = "16MiB", seed: int = 0) -> featstore.OutOfCoreGraph:
    indptr, indices = make_graph(n, degree, seed) if n else (np.zeros(1, np.int64), np.empty(0, np.int64))
    return featstore.OutOfCoreGraph.create(path, indptr, indices, progress=False, memory=memory)


@pytest.fixture
def g(tmp_path: Path) -> Any:
    with make(tmp_path / "g") as graph:
        yield graph


def arrays(g: featstore.OutOfCoreGraph) -> tuple[np.ndarray, np.ndarray]:
    indptr = g.topology.indptr.copy()
    return indptr, np.concatenate([ids.copy() for _, ids in g.topology.scan()] or [np.empty(0, np.int32)])


def test_from_the_file_as_from_arrays(g: Any) -> None:
    train = np.arange(0, 600, 7)
    found = featstore.partition(g, 7, train_idx=train, passes=2, gamma=2)
    assert found.dtype == torch.int32
    assert found.tolist() == fennel(*arrays(g), 7, passes=2, gamma=2, train=train.tolist())
    mask = torch.zeros(600, dtype=torch.bool)
    mask[::7] = True
    assert torch.equal(found, featstore.partition(g, 7, train_idx=mask, passes=2, gamma=2.0, keep=False))
    assert featstore.partition(g, 6, "ldg", passes=1, keep=False).tolist() == ldg(*arrays(g), 6, 1)


def test_communities_are_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    n, k = 2_000, 20
    community = rng.integers(0, k, n)
    members = [np.flatnonzero(community == c) for c in range(k)]
    lists = [np.sort(np.where(rng.random(10) < 0.8, rng.choice(members[c], 10), rng.integers(0, n, 10))) for c in community]
    with featstore.OutOfCoreGraph.create(
        tmp_path / "g", np.arange(0, 10 * n + 1, 10), np.concatenate(lists), progress=False
    ) as g:
        cuts = {method: judge(g, featstore.partition(g, k, method), k).cut for method in ("fennel", "ldg", "random", "ranges")}
        first = judge(g, featstore.partition(g, k, passes=1), k).cut
    assert cuts["fennel"] < 0.6 < 0.9 < min(cuts["random"], cuts["ranges"])
    assert cuts["ldg"] < 0.9
    assert cuts["fennel"] < first  # passes that see what the first could not


def test_quality_is_counted(g: Any) -> None:
    train = np.arange(100)
    parts = featstore.partition(g, 9, "random", seed=1)
    indptr, indices = arrays(g)
    crossing = parts.numpy()[np.repeat(np.arange(600), np.diff(indptr))] != parts.numpy()[indices]
    quality = judge(g, parts, 9, train)
    assert quality.cut == pytest.approx(crossing.mean())
    assert quality.balance == 67 / (600 / 9)
    assert quality.train_balance == np.bincount(parts[:100], minlength=9).max() / (100 / 9)
    assert quality.n_empty == 0


def test_training_nodes_are_spread(g: Any) -> None:
    train = np.arange(120)  # one corner of the ids
    spread = judge(g, featstore.partition(g, 12, train_idx=train, start="ranges"), 12, train)
    left = judge(g, featstore.partition(g, 12, start="ranges"), 12, train)
    assert spread.train_balance < left.train_balance


@pytest.mark.parametrize("method", ["fennel", "ldg", "ranges", "random"])
@pytest.mark.parametrize(("n", "k"), [(0, 1), (0, 5), (1, 1), (1, 4), (5, 300), (600, 300), (40, 70_000), (600, 1)])
def test_few_nodes_and_many_parts(tmp_path: Path, method: str, n: int, k: int) -> None:
    with make(tmp_path / "g", n, 3) as g:
        parts = featstore.partition(g, k, method, train_idx=np.ones(n, bool))
        assert parts.shape == (n,)
        assert not n or (int(parts.min()) >= 0 and int(parts.max()) < k)
        assert not n or np.bincount(parts).max() <= most_nodes(n, k)
        assert torch.equal(g.parts()[f"{method}-{k}"].load(), parts)
        quality = judge(g, parts, k)
        assert quality.n_empty == k - len(np.unique(parts))


def test_isolated_nodes_fill_the_parts(tmp_path: Path) -> None:
    indptr = np.zeros(101, np.int64)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, np.empty(0, np.int64), progress=False) as g:
        assert np.bincount(featstore.partition(g, 8)).max() <= most_nodes(100, 8)
        assert np.bincount(featstore.partition(g, 8, levels=(4, 2))).max() <= 15
        assert judge(g, g.parts()["fennel-8"].load(), 8).cut == 0


def test_users_parts(g: Any) -> None:
    given = np.arange(600) % 5
    parts = featstore.partition(g, method=given, train_idx=[3, 4, 8], name="mine")
    assert parts.tolist() == given.tolist()
    kept = g.parts()["mine"]
    assert (kept.n_parts, kept.n_train, kept.method) == (5, 3, "array")
    assert kept.train_nodes().tolist() == [3, 8, 4]
    given[:] = 0
    assert parts.tolist() != given.tolist()
    assert featstore.partition(g, 9, torch.arange(600) % 5, name="nine").dtype == torch.int32
    assert g.parts()["nine"].n_parts == 9


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, TypeError, "n_parts is needed"),
        ({"n_parts": 4, "method": "fenel"}, ValueError, "no partitioner is named 'fenel'"),
        ({"n_parts": 4, "method": 7}, TypeError, "a method is a name"),
        ({"n_parts": 4, "method": "ranges", "passes": 2}, OptionError, "passes: method 'ranges' has no options"),
        ({"n_parts": 4, "depth": 2}, OptionError, "depth: method 'fennel' has passes, gamma, start, levels"),
        ({"n_parts": 4, "method": Fennel(), "passes": 2}, OptionError, "was made with its options"),
        ({"n_parts": 4, "gamma": 1}, OptionError, "gamma: must be a number above 1"),
        ({"n_parts": 4, "gamma": float("nan")}, OptionError, "gamma"),
        ({"n_parts": 4, "gamma": "2"}, OptionError, "gamma"),
        ({"n_parts": 4, "start": "random"}, OptionError, "start: must be None or 'ranges'"),
        ({"n_parts": 4, "levels": (2, 3)}, OptionError, "2 times 3 parts are 6, not 4"),
        ({"n_parts": 4, "levels": (4,)}, OptionError, "levels: must be two"),
        ({"n_parts": 4, "levels": (-2, -2)}, OptionError, "levels: must be two"),
        ({"n_parts": 4, "levels": 4}, OptionError, "levels: must be two"),
        ({"n_parts": 4, "name": "a/b"}, ValueError, "name must be"),
        ({"n_parts": 4, "name": "../x"}, ValueError, "name must be"),
        ({"n_parts": 4, "name": ""}, ValueError, "name must be"),
        ({"n_parts": 4, "keep_lists": True, "keep": False}, ValueError, "keep_lists goes with keep=True"),
        ({"n_parts": 4, "name": 3}, TypeError, "name must be text"),
        ({"n_parts": 4, "train_idx": [600]}, IndexError, "600 at position 0 is not a node"),
        ({"n_parts": 4, "train_idx": [1, -1]}, IndexError, "-1 at position 1"),
        (
            {"n_parts": 4, "train_idx": np.arange(500) % 2},
            ValueError,
            "train_idx: ids of 0 and 1 alone look like a mask: 0 is at positions 0 and 2; ",
        ),
        ({"n_parts": 300, "method": "fennel", "gamma": 5000.0}, ValueError, "gamma: 5000.0 is too much"),
        ({"n_parts": 4, "train_idx": [*range(100), 600]}, IndexError, "600 at position 100 is not a node"),
        ({"n_parts": 4, "train_idx": [0.5]}, TypeError, "train_idx must be integers"),
        ({"n_parts": 4, "train_idx": np.ones(5, bool)}, ValueError, "a mask must have one entry a node"),
        ({"n_parts": 4, "train_idx": [[1]]}, ValueError, "one-dimensional"),
        ({"method": np.zeros(5, int)}, ValueError, "one entry a node"),
        ({"method": np.zeros(600)}, TypeError, "must be integers"),
        ({"method": np.full(600, -1)}, ValueError, "node 0 is in part -1"),
        ({"method": -(np.arange(600) == 400).astype(int)}, ValueError, "node 400 is in part -1"),
        ({"n_parts": 3, "method": np.arange(600) % 4}, ValueError, r"node 3 is in part 3, which is not in \[0, 3\)"),
        ({"method": np.zeros(600, int), "passes": 2}, TypeError, "passes is an option of a method"),
    ],
)
def test_bad_input_is_named(g: Any, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    refuses(error, text, lambda: featstore.partition(g, **arguments))
    assert g.parts() == {}


def test_metis_is_named_where_it_is_missing(g: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    refuses(MissingExtraError, "pymetis", lambda: featstore.partition(g, 4, "metis"))


def test_metis_finds_planted_communities(tmp_path: Path) -> None:
    """With shuffled ids; the real library."""
    rng = np.random.default_rng(0)
    n, size, k = 1200, 60, 20
    label = rng.permutation(n) // size
    members = np.argsort(label, kind="stable").reshape(-1, size)
    dst = np.repeat(np.arange(n), 12)
    src = np.where(rng.random(len(dst)) < 0.9, members[label[dst], rng.integers(0, size, len(dst))], rng.integers(0, n, len(dst)))
    with featstore.OutOfCoreGraph.from_edge_index(
        tmp_path / "planted", np.stack([src, dst]), n, features={"x": np.zeros((n, 1), np.float32)}, progress=False
    ) as planted:
        part = featstore.partition(planted, k, "metis").numpy()
        cut = float((part[src] != part[dst]).mean())
    assert cut < 0.15, "9.5 % of the edges leave their community"
    assert np.bincount(part, minlength=k).max() <= 1.1 * size


def test_metis_gets_each_edge_in_both_directions(g: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    real = pymetis.part_graph

    def part_graph(k: int, adjacency: Any) -> Any:
        starts, ids = adjacency.adj_starts, adjacency.adjacent
        seen.update(edges={(int(u), v) for v in range(600) for u in ids[starts[v] : starts[v + 1]]}, n=len(ids))
        return real(k, adjacency)

    monkeypatch.setattr(pymetis, "part_graph", part_graph)
    assert sorted(set(featstore.partition(g, 4, "metis").tolist())) == [0, 1, 2, 3]
    indptr, indices = arrays(g)
    stored = {(int(u), v) for v in range(600) for u in indices[indptr[v] : indptr[v + 1]] if u != v}
    assert seen["edges"] == stored | {(v, u) for u, v in stored}
    assert seen["n"] == len(seen["edges"])
    assert featstore.partition(g, 1, "metis").unique().tolist() == [0]


class Holds(base.Partitioner):
    """Notes what the budget counts while it works."""

    def assign(self, graph: GraphStream) -> Any:
        self.held = graph._budget.report()
        return np.zeros(graph.num_nodes, int)


def test_memory_is_counted_and_bounded(tmp_path: Path) -> None:
    n = 50_000
    with make(tmp_path / "g", n, 4, "16MiB") as g:
        g.topology  # noqa: B018 - 8 bytes a node for offsets
        before = g.budget.used
        g.budget._peak = before
        parts = featstore.partition(g, 100, train_idx=np.arange(0, n, 2))
        assert g.memory_report()["parts"] == 4 * n
        assert g.budget.peak - before <= 16 * n + (1 << 20)
        held = Holds()
        featstore.partition(g, 3, held, train_idx=[1], keep=False)
        assert held.held["partitioning"] == 5 * n
        del parts
        assert not {"parts", "partitioning"} & g.memory_report().keys()
    with featstore.open(tmp_path / "g", memory=g.budget.used + 700_000) as small:
        caught = refuses(BudgetError, "", lambda: featstore.partition(small, 100))
        assert caught.value.needed is not None
        assert "partitioning" not in small.memory_report()
        assert small.parts().keys() == {"fennel-100"}


@pytest.mark.parametrize(("method", "least"), [("fennel", 24 * 100), ("ldg", 24 * 100), ("random", 4 * 600)])
def test_what_a_method_holds_is_counted(g: Any, method: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the parts: tables of parts, or what is shuffled."""
    reserved, reserve = list[int](), GraphStream.reserve

    def noted(self: GraphStream, n_bytes: int) -> Any:
        reserved.append(n_bytes)
        return reserve(self, n_bytes)

    monkeypatch.setattr(GraphStream, "reserve", noted)
    featstore.partition(g, 100, method, keep=False, progress=False)
    assert sum(reserved) >= least


def test_the_least_named_suffices(tmp_path: Path) -> None:
    make(tmp_path / "g", 50_000, 4).close()
    memory = 700_000
    for _ in range(12):
        with featstore.open(tmp_path / "g", memory=memory) as g:
            try:
                assert len(featstore.partition(g, 50)) == 50_000
                return
            except BudgetError as error:
                assert error.needed > memory
                memory = error.needed
    raise AssertionError("each error names more")


class Wrong(base.Partitioner):
    """Returns what it is given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def assign(self, graph: GraphStream) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("method", [Wrong, lambda answer: answer])
def test_parts_do_not_change_with_the_array_that_they_were_made_of(g: Any, method: Any) -> None:
    answer = np.zeros(600, np.int32)
    found = featstore.partition(g, 4, method(answer), keep=False)
    answer.fill(1)
    assert not found.any()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (np.zeros(599, int), "one entry a node"),
        (np.zeros(600), "must be integers"),
        (np.full(600, 4), "node 0 is in part 4"),
        (None, "one entry a node"),
        (RuntimeError("boom"), "assign raised RuntimeError: boom"),
    ],
)
def test_a_faulty_partitioner_is_named(g: Any, answer: Any, text: str) -> None:
    caught = refuses(PluginError, text, lambda: featstore.partition(g, 4, Wrong(answer)))
    assert "Wrong" in str(caught.value)
    refuses(BudgetError, "no memory", lambda: featstore.partition(g, 4, Wrong(BudgetError("no memory"))))


def test_the_kernel_checks_what_it_is_given() -> None:
    indptr, one, cap = np.array([0, 1, 2]), np.ones(1), np.array([2])
    part = np.full(2, -1, np.int32)
    Placer(indptr, part, 1, 1.5, one, one, cap)
    for wrong in (
        {"part": np.full(3, -1, np.int32)},
        {"part": np.full(2, 1, np.int32)},
        {"width": 0},
        {"cap": np.array([1])},
        {"cap": np.array([2, 2])},
        {"group": np.array([0, 1], np.int32)},
        {"is_train": np.zeros(3, np.uint8)},
    ):
        arguments = {
            "indptr": indptr,
            "part": part,
            "width": 1,
            "gamma": 1.5,
            "scale": one,
            "train_scale": one,
            "cap": cap,
            **wrong,
        }
        refuses(ValueError, r"disagree|out of range|too many|no room|entry a group", lambda: Placer(**arguments))
    offsets, out = np.empty(3, np.int64), np.empty(2, np.int64)
    assert group_by_part(np.array([0, 2], np.int32), None, offsets, out) == 1
    assert group_by_part(np.array([0, 1], np.int32), np.array([0, 2]), offsets, out) == 1
    refuses(ValueError, "no block", lambda: edges_inside(indptr, 0, np.zeros(2, np.int32), np.zeros(3, np.int32), 4, 0))
    refuses(ValueError, "are not among", lambda: edges_inside(indptr, 1, np.zeros(2, np.int32), np.zeros(1, np.int32), 4, 0))


@given(st.lists(st.integers(0, 5), max_size=40), st.randoms(use_true_random=False))
def test_nodes_by_part(parts: list[int], random: Any) -> None:
    nodes = random.sample(range(len(parts)), k=len(parts) // 2)
    array = np.array(parts, np.int32)
    offsets, found = by_part(array, 6, np.array(nodes, np.int64))
    assert [found[offsets[p] : offsets[p + 1]].tolist() for p in range(6)] == [
        [v for v in nodes if parts[v] == p] for p in range(6)
    ]
    offsets, found = by_part(array, 6)
    assert found.tolist() == sorted(range(len(parts)), key=lambda v: parts[v])
    assert offsets[-1] == len(parts)
