"""Features aggregated over a type of edges: the bits of a product in memory, where they go, what shares a file, going on."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import featstore
from featstore.creation import steps
from featstore.errors import BudgetError, BusyError, CorruptionError
from featstore.graph.derive import aggregate, making
from featstore.graph.passes import OPS, Passes
from featstore.topology.edgelists import EdgeLists
from featstore.topology.types import EdgeType
from tests.support.refusing import refuses
from tests.support.typed import CITES, EMPLOYS, REV, WRITES, TypedArrays, academic, random_types
from tests.support.whole_graph import aggregated


def expected_of(graph: TypedArrays, key: Any, x: np.ndarray, op: str) -> np.ndarray:
    """Compute ``aggregate`` of ``x``: ``aggregated`` over a graph whose nodes are sources as well as destinations."""
    src, dst = graph.edges[key]
    n = max(graph.n[key[0]], graph.n[key[2]])
    rows = np.zeros((n, *x.shape[1:]))
    rows[: len(x)] = x
    order = np.lexsort((src, dst))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))]).astype(np.int64)
    return aggregated(indptr, src[order], rows, op)[: graph.n[key[2]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TypedArrays]:
    path, graph = tmp_path_factory.mktemp("typed") / "g", academic(papers=400)
    graph.draw("shared", 5, paper=5, author=5, institution=5)  # one column of all three types
    graph.create(path).close()
    return path, graph


@pytest.fixture
def g(made: tuple[Path, TypedArrays], tmp_path: Path) -> Any:
    shutil.copytree(made[0], tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="32MiB") as opened:
        yield opened


# --- sums -----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=st.integers(0, 50), chunked=st.booleans(), memory=st.sampled_from([None, "2600KiB"]))
@example(seed=1, chunked=True, memory="2600KiB")
def test_any_types_have_the_bits_of_a_product(tmp_path_factory: Any, seed: int, chunked: bool, memory: str | None) -> None:
    """Self relations, relations that differ in their name alone, types without nodes, types of edges without edges."""
    graph = random_types(seed)
    path = tmp_path_factory.mktemp("types") / "g"
    options: dict[str, Any] = {"topology": "chunked", "chunk_bytes": 4096} if chunked else {}
    with graph.create(path, memory="16MiB", **options) as g:
        for number, key in enumerate(graph.edges):
            for op in OPS if key[0] == key[2] else OPS[:2]:
                store = g.aggregate("x", op, edge_type=key, name=f"{op}{number}", dtype="float64", memory=memory, progress=False)
                expected = expected_of(graph, key, graph.features[key[0]]["x"], op)
                assert store is g[key[2]].features[f"{op}{number}"]
                assert store[:].numpy().tobytes() == expected.tobytes(), (key, op)
        g.verify(progress=False)
        assert g.budget.peak <= g.budget.total


def test_papers_means_go_to_authors_and_on_to_institutions(g: Any, made: tuple[Path, TypedArrays]) -> None:
    """The beginning of MAG240M's baselines; several hops over a self relation, in float64 between them."""
    graph = made[1]
    x = graph.features["paper"]["x"]
    for_authors = g.aggregate("x", edge_type=REV, name="x", progress=False)
    assert (for_authors.name, for_authors.dtype, tuple(for_authors.shape)) == ("author/x", torch.float16, (graph.n["author"], 16))
    authors = torch.from_numpy(expected_of(graph, REV, x, "mean")).half()
    assert torch.equal(for_authors[:], authors)
    back = g.aggregate("x", "sum", edge_type=WRITES, dtype="float64", progress=False)
    assert (back.name, len(back)) == ("paper/x_sum", graph.n["paper"])
    assert np.array_equal(back[:].numpy(), expected_of(graph, WRITES, authors.numpy(), "sum"))
    twice = g.aggregate("x", "gcn", edge_type=CITES, hops=2, dtype="float64", progress=False)
    expected = expected_of(graph, CITES, expected_of(graph, CITES, x, "gcn"), "gcn")
    assert (twice.name, np.array_equal(twice[:].numpy(), expected)) == ("paper/x_gcn2", True)
    with featstore.open(g.path, memory="32MiB") as again:
        assert sorted(again.features) == sorted(g.features)
        assert torch.equal(again["author"].features["x"][:], authors)
        again.verify(progress=False)
    assert not [name for name in os.listdir(g.path) if name.startswith("making")]


def test_little_memory_makes_blocks_and_stretches_of_a_type(tmp_path: Path) -> None:
    """Lists longer than the memory, of a type that is neither the first nor in the first lists."""
    rng = np.random.default_rng(0)
    long = np.stack([rng.integers(0, 300, 5_000), np.where(rng.random(5_000) < 0.7, 7, rng.integers(0, 90, 5_000))])
    graph = TypedArrays(
        {"a": 40, "b": 300, "c": 90},
        {("a", "r", "b"): np.stack([rng.integers(0, 40, 900), rng.integers(0, 300, 900)]), ("b", "r", "c"): long},
        {"b": {"x": rng.standard_normal((300, 40))}},
    )
    graph.edges["c", "s", "c"] = np.stack([rng.integers(0, 90, 6_000), np.full(6_000, 7)])
    graph.features["c"] = {"x": rng.standard_normal((90, 40))}
    with graph.create(tmp_path / "g", memory="16MiB") as g:
        for key, ops in ((("b", "r", "c"), OPS[:2]), (("c", "s", "c"), OPS)):
            for op in ops:
                rows = g.fields.rows_of("x", key[0])
                budget = featstore.budget.Budget(1 << 30)
                with pytest.raises(BudgetError) as caught:
                    Passes(g.edge_lists(key), rows, op, torch.float64, budget, 0, 1, "test")
                assert caught.value.needed is not None
                least = caught.value.needed - budget.total
                for spare in (0, 9_000):
                    budget = featstore.budget.Budget(least + spare)
                    with Passes(g.edge_lists(key), rows, op, torch.float64, budget, least + spare, 2, "test") as passes:
                        found = np.concatenate([block.sums.copy() for block in passes.blocks()])
                        assert passes.n_blocks > 1
                    assert budget.peak <= least + spare
                    expected = expected_of(graph, key, graph.features[key[0]]["x"], op)
                    assert found.tobytes() == expected.tobytes(), (key, op, spare)


# --- columns --------------------------------------------------------------------------------------------------------------------


def test_a_feature_of_one_type_is_replaced_without_those_of_others(g: Any, made: tuple[Path, TypedArrays]) -> None:
    """Three types share a file; then one has a file of its own, in this handle as in one that is opened later."""
    graph = made[1]
    before = {kind: g[kind].features["shared"] for kind in g.node_types}
    assert "paper,author,institution/shared" in g.columns
    found = g.aggregate("shared", "sum", edge_type=EMPLOYS, name="shared", overwrite=True, progress=False)
    expected = torch.from_numpy(expected_of(graph, EMPLOYS, graph.features["institution"]["shared"], "sum")).float()
    assert torch.equal(before["author"][:], torch.from_numpy(graph.features["author"]["shared"])), "handed out before"
    with featstore.open(g.path, memory="32MiB") as again:
        for each in (g, again):
            assert torch.equal(each["author"].features["shared"][:], expected)
            for kind in ("paper", "institution"):
                assert torch.equal(each[kind].features["shared"][:], torch.from_numpy(graph.features[kind]["shared"]))
            assert {name for name in each.columns if name.endswith("/shared")} == {"paper,institution/shared", "author/shared"}
            sampler = featstore.NeighborSampler(each, [3])
            with featstore.Loader(each, sampler, ("author", [3, 4]), features="shared", strategy="ondemand") as loader:
                for batch in loader:
                    for kind, rows in batch.x.items():
                        assert torch.equal(rows, each[kind].features["shared"][batch.input_ids[kind]])
    assert torch.equal(found[:], expected)
    g.aggregate("shared", edge_type=CITES, name="shared2", progress=False)  # reads a range of the file
    for kind in ("paper", "institution"):  # until one type is left in the file, and then none
        key = WRITES if kind == "paper" else None
        if key is not None:
            g.aggregate("shared", "sum", edge_type=key, name="shared", overwrite=True, progress=False)
    with featstore.open(g.path, memory="32MiB") as again:
        for each in (g, again):
            rows = each["institution"].features["shared"]
            assert torch.equal(rows[:], torch.from_numpy(graph.features["institution"]["shared"]))
            assert len(rows) == graph.n["institution"]
        again.verify(progress=False)


def test_a_feature_in_a_loaders_hands_is_not_replaced(g: Any) -> None:
    sampler = featstore.NeighborSampler(g, [3])
    strategy = featstore.Superbatch(cache=0.1, length=2)
    with featstore.Loader(g, sampler, ("author", np.arange(50)), batch_size=10, features="shared", strategy=strategy) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(BusyError, match="middle of an epoch"):
            g.aggregate("shared", edge_type=EMPLOYS, name="shared", overwrite=True, progress=False)
        batches.close()


# --- refusals -------------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name(g: Any, small: Any) -> None:
    before = sorted(os.listdir(g.path))
    for error, words, arguments in (
        (ValueError, r"needs edge_type=.*: of \('author', 'writes', 'paper'\), ", {}),
        (TypeError, "edge_type must be a tuple .*, not 'writes'", {"edge_type": "writes"}),
        (KeyError, "no edge type .*'wrote'.*; there is .*'writes'", {"edge_type": ("author", "wrote", "paper")}),
        (KeyError, "no feature 'x' of 'author'; there is 'shared'", {"edge_type": WRITES}),
        (ValueError, "op='gcn' .* begin and end at one type of nodes, not .*'rev_writes'", {"edge_type": REV, "op": "gcn"}),
        (ValueError, "hops=2 .* begin and end at one type", {"edge_type": REV, "hops": 2}),
        (ValueError, "is the feature that is aggregated", {"edge_type": CITES, "name": "x"}),
        (ValueError, "there is a feature 'author/shared' already; overwrite=True", {"edge_type": REV, "name": "shared"}),
        (ValueError, "'author/y' is the name of node data", {"edge_type": REV, "name": "y", "overwrite": True}),
    ):
        refuses(error, words, lambda arguments=arguments: g.aggregate("x", progress=False, **arguments))
    assert sorted(os.listdir(g.path)) == before
    with featstore.open(small.path, memory="64MiB") as one:
        refuses(ValueError, "one type of edges, without a name; leave out", lambda: one.aggregate("x", edge_type=WRITES))


def test_an_id_of_another_type_is_damage(g: Any) -> None:
    kind: EdgeType = g.types.edges[WRITES]
    lists = EdgeLists(g.topology, kind)
    for stored, at in itertools.product((kind.src.first - 1, kind.src.stop), range(3)):
        ids = np.full(3, kind.src.first, lists.id_dtype)
        ids[at] = stored
        with pytest.raises(
            CorruptionError, match=f"'author,writes,paper' names node {stored} of all types, which is no 'author'"
        ):
            lists.to_local(ids)
    ids = np.array([kind.src.first, kind.src.stop - 1], lists.id_dtype)
    lists.to_local(ids)
    assert ids.tolist() == [0, kind.src.n - 1]


# --- going on -------------------------------------------------------------------------------------------------------------------


def test_an_interrupted_call_of_the_same_edge_type_is_gone_on_with(g: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files left of another type of edges, of the same content, are not used."""
    monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)
    monkeypatch.setattr(aggregate, "_PART_BYTES", 256)
    real = making.Making.checkpoint

    def interrupted(key: Any) -> None:
        written = [0]

        def checkpoint(self: making.Making) -> None:
            real(self)
            written[0] += 1
            if written[0] == 3:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(making.Making, "checkpoint", checkpoint)
            g.aggregate("shared", "sum", edge_type=key, name="s", progress=False)

    interrupted(REV)
    assert os.path.exists(os.path.join(g.path, "making.author%2Fs", "state"))
    with pytest.warns(UserWarning, match="differs in: edge type"):
        found = g.aggregate("shared", "sum", edge_type=EMPLOYS, name="s", progress=False)
    control = g.aggregate("shared", "sum", edge_type=EMPLOYS, name="control", progress=False)
    assert torch.equal(found[:], control[:])
    interrupted(CITES)
    firsts: list[int] = []
    begun = Passes.__init__

    def begin(self: Passes, *args: Any) -> None:
        firsts.append(args[-2])
        begun(self, *args)

    monkeypatch.setattr(Passes, "__init__", begin)
    found = g.aggregate("shared", "sum", edge_type=CITES, name="s", progress=False)
    assert 0 < firsts[0] < g["paper"].num_nodes
    control = g.aggregate("shared", "sum", edge_type=CITES, name="control", progress=False)
    assert torch.equal(found[:], control[:])
