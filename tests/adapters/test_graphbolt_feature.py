"""Features of GraphBolt over a dataset: with a stand-in, and with GraphBolt's own classes and pipelines where DGL is there."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import BudgetError, ClosedError, MissingExtraError
from tests.support.graphbolt import library_of, load, stand_in
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses
from tests.support.typed import CITES, WRITES, TypedArrays

pytestmark = pytest.mark.usefixtures("_program_server")

LIBRARY = library_of()
needs_dgl = pytest.mark.skipif(LIBRARY is None, reason="DGL is not installed: make graphbolt")
needs_library = pytest.mark.skipif(
    LIBRARY is None or not LIBRARY.exists(), reason=f"no compiled GraphBolt for torch {torch.__version__}: make graphbolt"
)
WAYS = ["stand-in", pytest.param("python", marks=needs_dgl), pytest.param("compiled", marks=needs_library)]
ways = pytest.mark.parametrize("way", WAYS)
pipelines = pytest.mark.parametrize("way", WAYS[1:])

N, N_EDGES = 300, 900
IDS = torch.tensor([7, 0, 299, 7])
EMPTY = torch.tensor([], dtype=torch.int64)


def arrays() -> SimpleNamespace:
    rng = np.random.default_rng(0)
    x, h = rng.standard_normal((N, 5)).astype(np.float32), rng.standard_normal((N, 2, 3)).astype(np.float16)
    return SimpleNamespace(edges=rng.integers(0, N, (2, N_EDGES)), x=x, h=h, w=rng.random(N_EDGES))


def made(folder: Path) -> Any:
    """Make a dataset of one type."""
    a = arrays()
    options: dict[str, Any] = {"features": {"x": a.x, "h": a.h}, "edge_features": {"w": a.w}, "memory": "32MiB"}
    return featstore.OutOfCoreGraph.from_edge_index(folder / "g", a.edges, N, progress=False, **options)


def adapter(way: str) -> tuple[Any, Any]:
    """Import GraphBolt, and the adapter to it."""
    gb = load(way)
    return gb, importlib.import_module("featstore.adapters.graphbolt")


def awaited(feature: Any, ids: torch.Tensor) -> torch.Tensor:
    """Read rows as GraphBolt's documentation says: the future of the last stage has them."""
    futures = list(feature.read_async(ids))
    assert len(futures) == feature.read_async_num_stages(ids.device) == feature.read_async_num_stages(torch.device("cuda"))
    found: torch.Tensor = futures[-1].wait()
    return found


def run_reads(folder: Path, way: str) -> None:
    gb, adapted = adapter(way)
    a = arrays()
    with made(folder) as g:
        found = adapted.features(g)
        expected = {("node", None, "x"): a.x, ("node", None, "h"): a.h, ("edge", None, "w"): a.w}
        assert found.keys() == expected.keys()
        store = gb.BasicFeatureStore(found)
        for key, array in expected.items():
            feature, full = found[key], torch.from_numpy(array)
            assert isinstance(feature, gb.Feature)
            assert (feature.count(), feature.size(), feature.metadata()) == (len(full), full.shape[1:], {})
            assert store.size(*key) == full.shape[1:]
            assert torch.equal(feature.read(), full)
            for ids in (IDS, IDS.int(), EMPTY):
                for rows in (feature.read(ids), store.read(*key, ids), awaited(feature, ids)):
                    assert rows.dtype == full.dtype
                    assert torch.equal(rows, full[ids])
            assert torch.equal(pickle.loads(pickle.dumps(feature)).read(IDS), full[IDS])
        assert adapted.StoreFeature(g.features["x"], {"classes": 3}).metadata() == {"classes": 3}
        assert found["node", None, "x"].to("cpu") is found["node", None, "x"]
        assert not found["node", None, "x"].is_pinned()
        assert repr(found["node", None, "h"]) == f"StoreFeature({g.features['h']!r})"


def run_reads_are_the_stores(folder: Path, way: str) -> None:
    """Rows of a cache come from it; what does not fit is a BudgetError; ids are checked."""
    _, adapted = adapter(way)
    made(folder).close()
    with featstore.open(folder / "g", memory="1MiB") as g:
        feature = adapted.features(g)["node", None, "x"]
        g.cache("x", "64KiB", policy="degree")
        feature.read(IDS)
        awaited(feature, IDS)
        assert g.features["x"].stats()["cache"]["hits"] == 2 * len(IDS)
        many = torch.arange(N).repeat(200)  # 1.2 MB of rows
        refuses(BudgetError, "", lambda: feature.read(many))
        refuses(BudgetError, "", lambda: awaited(feature, many))
        for ask in (feature.read, lambda ids: awaited(feature, ids)):
            refuses(IndexError, "300", lambda ask=ask: ask(torch.tensor([3, N])))
    refuses(ClosedError, "", lambda: feature.read(IDS))
    refuses(ClosedError, "", lambda: awaited(feature, IDS))
    refuses(ClosedError, "", lambda: adapted.features(g))


def run_updates(folder: Path, way: str) -> None:
    """An update is a commit, through a store of features, too; another handle and the old store keep the old rows."""
    gb, adapted = adapter(way)
    a = arrays()
    with made(folder) as g:
        found, old = adapted.features(g), g.features["x"]
        store = gb.BasicFeatureStore(found)
        ids, rows = torch.tensor([5, 2]), torch.ones(2, 5)
        store.update("node", None, "x", rows, ids)
        expected = torch.from_numpy(a.x).clone()
        expected[ids] = rows
        for read in (found["node", None, "x"].read(), awaited(found["node", None, "x"], torch.arange(N)), g.features["x"][:]):
            assert torch.equal(read, expected)
        assert found["node", None, "x"].store is g.features["x"]
        assert torch.equal(old[ids], torch.from_numpy(a.x)[ids])
        found["node", None, "x"].update(torch.zeros(2, 5), ids)  # once more, of the same feature
        found["edge", None, "w"].update(torch.arange(N_EDGES, dtype=torch.float64))
        refuses(ValueError, "", lambda: found["node", None, "x"].update(torch.ones(3, 5), ids))
        refuses(IndexError, "300", lambda: found["node", None, "x"].update(rows, torch.tensor([1, N])))
    with featstore.open(folder / "g") as g:
        assert not g.features["x"][ids].any()
        assert torch.equal(g.edge_features["w"][:], torch.arange(N_EDGES, dtype=torch.float64))
        g.features["x"]._change = None  # as of rows that no file of the dataset has
        refuses(NotImplementedError, "'x' are in no file", lambda: adapted.StoreFeature(g.features["x"]).update(rows, ids))


def run_types(folder: Path, way: str) -> None:
    gb, adapted = adapter(way)
    rng = np.random.default_rng(1)
    edges = {WRITES: rng.integers(0, 40, (2, 120)), CITES: rng.integers(0, 60, (2, 200))}
    graph = TypedArrays({"author": 40, "paper": 60}, edges).draw("x", 0, author=3, paper=4).draw("z", 1, paper=2)
    graph.edge_features[CITES] = {"w": rng.random((200, 1))}
    with graph.create(folder / "g") as g:
        found = adapted.features(g)
        expected = {("node", kind, name): rows for kind, of in graph.features.items() for name, rows in of.items()}
        expected["edge", "paper:cites:paper", "w"] = graph.edge_features[CITES]["w"]
        assert found.keys() == expected.keys()
        ids = torch.tensor([39, 0, 39])
        for key, array in expected.items():
            assert torch.equal(gb.BasicFeatureStore(found).read(*key, ids), torch.from_numpy(array)[ids])
        found["node", "paper", "z"].update(torch.zeros(1, 2), torch.tensor([59]))
        assert not g["paper"].features["z"][59].any()
        assert torch.equal(found["node", "author", "x"].read(), torch.from_numpy(graph.features["author"]["x"]))


def run_refused(folder: Path, way: str) -> None:
    _, adapted = adapter(way)
    with made(folder) as g:
        feature = adapted.StoreFeature(g.features["x"])
        refuses(NotImplementedError, r"^pin_memory_\(\): rows of 'x' stay on disk.*gpu_cached_feature", feature.pin_memory_)
        for device in ("cuda", "pinned", torch.device("cuda:1")):
            refuses(NotImplementedError, rf"^to\('{device}'\): rows of 'x' stay", lambda device=device: feature.to(device))
        refuses(TypeError, "not of a Tensor", lambda: adapted.StoreFeature(g.features["x"][:]))
        refuses(TypeError, "not of a FeatureStore", lambda: adapted.features(g.features["x"]))
        refuses(TypeError, r"featstore.open\(", lambda: adapted.features(str(folder / "g")))
    edges = {("a", "b:c", "d"): np.zeros((2, 1), np.int64), ("a:b", "c", "d"): np.zeros((2, 1), np.int64)}
    graph = TypedArrays({"a": 1, "a:b": 1, "d": 1}, edges, edge_features={key: {"w": np.ones(1)} for key in edges})
    with graph.create(folder / "colons") as g:
        refuses(ValueError, "two types of edges are 'a:b:c:d'", lambda: adapted.features(g))


@ways
@pytest.mark.parametrize("run", [run_reads, run_reads_are_the_stores, run_updates, run_types, run_refused])
def test_features(tmp_path: Path, run: Callable[[Path, str], None], way: str) -> None:
    run_in_fork(run, tmp_path, way)


# -- pipelines of GraphBolt's own ----------------------------------------------------------------------------------------------


def seeds_of(gb: Any) -> Any:
    """Return a data pipe of batches of 64 seeds, whose name later releases have changed."""
    name = "seeds" if hasattr(gb.MiniBatch(), "seeds") else "seed_nodes"
    return gb.ItemSampler(gb.ItemSet(torch.arange(N), names=name), batch_size=64), name


def run_fetched(folder: Path, way: str) -> None:
    """The stage ``fetch_feature`` of a pipeline, with GraphBolt's loader and without, has the rows of the seeds."""
    gb, adapted = adapter(way)
    a = arrays()
    with made(folder) as g:
        pipe, name = seeds_of(gb)

        def as_inputs(batch: Any) -> Any:
            batch.input_nodes = getattr(batch, name)
            return batch

        store = gb.BasicFeatureStore(adapted.features(g))
        pipe = pipe.transform(as_inputs).fetch_feature(store, node_feature_keys=["x", "h"])
        for batches in (list(pipe), list(gb.DataLoader(pipe, num_workers=0))):
            assert [len(batch.input_nodes) for batch in batches] == [64, 64, 64, 64, 44]
            for batch in batches:
                assert torch.equal(batch.node_features["x"], torch.from_numpy(a.x)[batch.input_nodes])
                assert torch.equal(batch.node_features["h"], torch.from_numpy(a.h)[batch.input_nodes])


def run_sampled(folder: Path, way: str) -> None:
    """A whole pipeline: GraphBolt draws neighbours, and rows of nodes and of edges come from the drive."""
    gb, adapted = adapter(way)
    a = arrays()
    with made(folder) as g:
        order = np.lexsort((a.edges[0], a.edges[1]))  # by destination; the original edge ids beside it
        indptr = torch.from_numpy(np.searchsorted(a.edges[1][order], np.arange(N + 1)))
        given = {gb.ORIGINAL_EDGE_ID: torch.from_numpy(order)}
        graph = gb.fused_csc_sampling_graph(indptr, torch.from_numpy(a.edges[0][order]), edge_attributes=given)
        store = gb.BasicFeatureStore(adapted.features(g))
        pipe, _ = seeds_of(gb)
        pipe = pipe.sample_neighbor(graph, [3, 2]).fetch_feature(store, ["x"], ["w"])
        n_edges = 0
        for batch in gb.DataLoader(pipe, num_workers=0):
            nodes = batch.input_nodes
            assert torch.equal(batch.node_features["x"], torch.from_numpy(a.x)[nodes])
            for subgraph, rows in zip(batch.sampled_subgraphs, batch.edge_features, strict=True):
                ids = subgraph.original_edge_ids
                assert torch.equal(rows["w"], torch.from_numpy(a.w)[ids])
                n_edges += len(ids)
        assert n_edges > N


@pipelines
def test_fetching_in_a_pipeline(tmp_path: Path, way: str) -> None:
    run_in_fork(run_fetched, tmp_path, way)


@needs_library
def test_a_compiled_pipeline_that_samples(tmp_path: Path) -> None:
    run_in_fork(run_sampled, tmp_path, "compiled")


@pytest.mark.parametrize("error", [ImportError("No module named 'dgl'"), FileNotFoundError("Cannot find the C++ library")])
def test_without_graphbolt(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """DGL is not there, or has no library for this torch."""

    def find(name: str, *_: Any) -> None:
        if name == "dgl":
            raise error

    for name in [each for each in sys.modules if each.startswith(("dgl", "featstore.adapters.graphbolt"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find), *sys.meta_path])
    refuses(
        MissingExtraError,
        f"needs dgl .* torch {torch.__version__.partition('+')[0]}.*{re.escape(str(error))}",
        lambda: importlib.import_module("featstore.adapters.graphbolt"),
    )


def test_control_of_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its base class answers nothing by itself, as GraphBolt's."""
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    feature = importlib.import_module("dgl.graphbolt").Feature()
    calls = [feature.read, feature.size, feature.count, lambda: feature.update(None), lambda: feature.read_async(IDS)]
    for call in calls:
        refuses(NotImplementedError, "", call)
