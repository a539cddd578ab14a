"""Edge features: rows of a batch's edges equal a look-up in memory, whatever the sampler, the strategy and the adjacency."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.errors import BudgetError, CorruptionError, PluginError
from featstore.load.edges import gather_edges
from featstore.sampling.batch import SampledBatch
from featstore.sampling.edgenumbers import edge_numbers
from featstore.storage.catalog import EDGE, read_catalog
from featstore.testing.faults import flipped
from tests.sampling.test_edgenumbers import as_lists, edges_of
from tests.support.sampled import covering

pytestmark = pytest.mark.shares_resources  # one graph for many tests

N, E = 300, 5000
FORMS: dict[str, dict[str, Any]] = {"csc": {}, "chunked": {"topology": "chunked", "chunk_bytes": 4096}}


def edge_rows(n: int = E) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(7)
    return {"w": rng.random(n, dtype=np.float32), "kind": rng.integers(0, 255, (n, 3), np.uint8)}


def make(path: Path, form: str = "csc", **more: Any) -> featstore.OutOfCoreGraph:
    x = np.random.default_rng(1).random((N, 4), dtype=np.float32)
    options = {"features": {"x": x}, "edge_features": edge_rows(), "progress": False, "memory": "64MiB", **FORMS[form], **more}
    return featstore.OutOfCoreGraph.from_edge_index(path, edges_of(N, E, 5), N, **options)


@pytest.fixture(scope="module", params=list(FORMS))
def graph(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[featstore.OutOfCoreGraph]:
    with make(tmp_path_factory.mktemp("edges") / "g", request.param) as g:
        yield g


def check(batch: featstore.MiniBatch | Any, names: tuple[str, ...] = ("w", "kind")) -> None:
    """Rows are those of the edges as they were given, each of which leads from its source to its destination."""
    given, rows = edges_of(N, E, 5), edge_rows()
    assert tuple(batch.edge_features) == names
    for k, block in enumerate(batch.blocks):
        pos, ids = block.edge_pos.cpu().numpy(), batch.input_ids.cpu().numpy()
        np.testing.assert_array_equal(given[0][pos], ids[block.src.cpu().numpy()])
        np.testing.assert_array_equal(given[1][pos], ids[block.dst.cpu().numpy()])
        for name in names:
            found = batch.edge_features[name]
            assert len(found) == len(batch.blocks)
            assert found[k].device == block.edge_pos.device
            np.testing.assert_array_equal(found[k].cpu().numpy(), rows[name][pos])


STRATEGIES = ["ondemand", "superbatch", "ginex", "streamed", "auto"]
SAMPLERS = {
    "neighbor": lambda g: featstore.NeighborSampler(g, [4, 3], seed=2, edges=True),
    "with replacement": lambda g: featstore.NeighborSampler(g, [4, 3], replace=True, seed=2, edges=True),
    "drawing once": lambda g: featstore.NeighborSampler(g, [4, 3], seed=2, redraw=False, edges=True),
    "by layers": lambda g: featstore.LaborSampler(g, [4, 3], seed=2, edges=True),
    "by importance": lambda g: featstore.LaborSampler(g, [4, 3], seed=2, importance_sampling=1, edges=True),
    "an epoch at a time": lambda g: featstore.EpochSampler(g, [4, 3], seed=2, edges=True, window=100),
    "an epoch by layers": lambda g: featstore.EpochSampler(g, [4, 3], seed=2, draws="labor", edges=True, window=100),
    "a layer at a time": lambda g: featstore.LayerSampler(g, [60, 90], seed=2, edges=True),
    "layers of means": lambda g: featstore.LayerSampler(g, [60, 90], seed=2, skip=True, replace=True, op="mean", edges=True),
    "subgraphs": lambda g: featstore.ShadowSampler(g, [3, 2], layers=3, seed=2, edges=True),
    "all": lambda g: featstore.NeighborSampler(g, [-1], edges=True),
}


@pytest.mark.parametrize(("strategy", "sampler"), covering(STRATEGIES, SAMPLERS))
def test_rows_of_edges(graph: featstore.OutOfCoreGraph, strategy: str, sampler: str, device: str) -> None:
    options = {"edge_features": ["w", "kind"], "labels": None, "strategy": strategy, "device": device}
    with featstore.Loader(graph, SAMPLERS[sampler](graph), torch.arange(N), 70, **options) as loader:
        n_batches = 0
        for _ in range(2):
            for batch in loader:
                check(batch)
                assert batch.edge_features["w"][0].device.type == device
                n_batches += 1
        assert n_batches == 10
        stats = loader.stats()
        assert stats["edge_features"]["rows_loaded"] > 0
        assert stats["seconds"]["edges"] > 0
        assert stats["rows"] == sum(stats["hits"].values())


def test_a_pack(graph: featstore.OutOfCoreGraph, tmp_path: Path, device: str) -> None:
    for edges in (True, False):
        sampler = featstore.NeighborSampler(graph, [4, 3], seed=2, edges=edges)
        pack = featstore.sample_offline(graph, sampler, torch.arange(N), 70, path=tmp_path / str(edges))
        options = {"edge_features": ["w", "kind"], "labels": None, "device": device}
        with featstore.Loader(graph, strategy=featstore.Packed(pack, cache="10%"), **options) as loader:
            if edges:
                for batch in loader:
                    check(batch)
            else:
                with pytest.raises(PluginError, match="edges=True"):
                    next(iter(loader))
    with featstore.PackedGraph(tmp_path / "True") as packed, pytest.raises(ValueError, match="has no rows of edges"):
        featstore.Loader(packed, strategy=featstore.Packed(tmp_path / "True"), labels=None, edge_features="w")


def test_a_store_of_edges(graph: featstore.OutOfCoreGraph) -> None:
    rows = edge_rows()
    assert list(graph.edge_features) == ["w", "kind"] or list(graph.edge_features) == ["kind", "w"]
    store = graph.edge_features["kind"]
    assert tuple(store.shape) == (E, 3)
    np.testing.assert_array_equal(store[[5, -1, 5]].numpy(), rows["kind"][[5, -1, 5]])
    with pytest.raises(IndexError):
        store[E]
    with pytest.raises(KeyError, match="no edge feature 'x'; there is"):
        graph.edge_features["x"]
    again = pickle.loads(pickle.dumps(graph.edge_features["w"]))
    np.testing.assert_array_equal(again[:].numpy(), rows["w"])
    assert list(graph.features) == ["x"]


@pytest.mark.parametrize("form", ["array", "npy", "blocks", "tensor"])
def test_forms_of_input(tmp_path: Path, form: str) -> None:
    given, w = edges_of(N, E, 5), edge_rows()["w"]
    indptr, indices, _ = as_lists(given, N)
    inputs: dict[str, Any] = {"array": w, "tensor": torch.from_numpy(w), "npy": tmp_path / "w.npy"}
    inputs["blocks"] = ((E,), "float32", (w[k : k + 999] for k in range(0, E, 999)))
    np.save(tmp_path / "w.npy", w)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, edge_features={"w": inputs[form]}, progress=False) as g:
        np.testing.assert_array_equal(g.edge_features["w"][:].numpy(), w)
        batch = featstore.NeighborSampler(g, [-1], edges=True).sample(torch.arange(N))
        pos = batch.blocks[0].edge_pos.numpy()
        np.testing.assert_array_equal(indices[pos], batch.input_ids.numpy()[batch.blocks[0].src.numpy()])
        assert featstore.convert(g.path, "chunked", progress=False)
    with featstore.open(tmp_path / "g") as g:
        g.verify(progress=False)
        np.testing.assert_array_equal(g.edge_features["w"][:].numpy(), w)


def test_no_features_of_nodes_and_no_edges(tmp_path: Path, device: str) -> None:
    empty = np.zeros((2, 0), np.int64)
    options = {"edge_features": {"w": np.zeros((0, 2), np.float32)}, "progress": False}
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", empty, 5, **options) as g:
        sampler = featstore.NeighborSampler(g, [2, 2], edges=True)
        more: dict[str, Any] = {"features": [], "labels": None, "edge_features": "w", "device": device}
        with featstore.Loader(g, sampler, torch.arange(5), 2, **more) as loader:
            for batch in loader:
                assert [tuple(rows.shape) for rows in batch.edge_features["w"]] == [(0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("edge_features", "match"),
    [
        ({"w": np.zeros(E - 1)}, f"edge feature 'w' has {E - 1} rows, but the graph has {E} edges"),
        ({"indices": np.zeros(E)}, "cannot be named 'indices'"),
        ({"edge_ids": np.zeros(E)}, "cannot be named 'edge_ids'"),
        ({"a/b": np.zeros(E)}, "a field has a name of"),
    ],
)
@pytest.mark.parametrize("lists", [False, True])
def test_wrong_edge_features_are_refused_and_leave_nothing(
    tmp_path: Path, edge_features: dict[str, Any], match: str, lists: bool
) -> None:
    edges = edges_of(N, E, 5)
    create, from_edge_index = featstore.OutOfCoreGraph.create, featstore.OutOfCoreGraph.from_edge_index
    with pytest.raises(ValueError, match=match):
        if lists:
            create(tmp_path / "g", *as_lists(edges, N)[:2], edge_features=edge_features, progress=False)
        else:
            blocks = iter([edges[:, :3000], edges[:, 3000:]])
            from_edge_index(tmp_path / "g", blocks, N, edge_features=edge_features, progress=False)
    assert os.listdir(tmp_path) == []


def test_pyg_gets_them_in_the_order_of_its_edges(graph: featstore.OutOfCoreGraph) -> None:
    pytest.importorskip("torch_geometric")
    rows = edge_rows()
    for redraw in (True, False):
        sampler = featstore.NeighborSampler(graph, [4, 3], seed=2, redraw=redraw, edges=True)
        with featstore.Loader(graph, sampler, torch.arange(N), 70, labels=None, edge_features=["w", "kind"]) as loader:
            for batch in loader:
                data = batch.to_pyg()
                np.testing.assert_array_equal(data.w.numpy(), rows["w"][data.e_id.numpy()])
                np.testing.assert_array_equal(data["kind"].numpy(), rows["kind"][data.e_id.numpy()])


def test_loaders_that_cannot_have_them(graph: featstore.OutOfCoreGraph) -> None:
    seeds = torch.arange(N)
    with pytest.raises(ValueError, match="make the sampler with edges=True"):
        featstore.Loader(graph, featstore.NeighborSampler(graph, [2]), seeds, labels=None, edge_features="w")
    sampler = featstore.NeighborSampler(graph, [2], edges=True)
    with pytest.raises(ValueError, match=r"edge_features: the graph has no 'x'; it has 'kind', 'w'"):
        featstore.Loader(graph, sampler, seeds, labels=None, edge_features=["x"])

    class Wrong:
        def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
            batch = sampler.sample(seeds, epoch, index)
            block = batch.blocks[0]
            wrong = type(block)(block.src, block.dst, block.n_src, block.n_dst, torch.full_like(block.src, E))
            return SampledBatch(index, epoch, batch.input_ids, batch.n_seeds, (wrong,))

    with featstore.Loader(graph, Wrong(), seeds, labels=None, edge_features="w") as loader:
        with pytest.raises(PluginError, match=f"beyond the {E} edges"):
            next(iter(loader))


def test_damage_is_found(tmp_path: Path) -> None:
    make(tmp_path / "g").close()
    record = read_catalog(tmp_path / "g").fields[f"{EDGE}/w"]
    with flipped(tmp_path / "g" / record.parts[0].file, 4096 + 4000), featstore.open(tmp_path / "g") as g:
        with pytest.raises(CorruptionError, match=r"edge\.w\.1\.rows"):
            g.verify(progress=False)
        sampler = featstore.NeighborSampler(g, [-1], edges=True)
        with featstore.Loader(g, sampler, torch.arange(N), labels=None, edge_features="w") as loader:
            with pytest.raises(CorruptionError, match=r"edge\.w\.1\.rows"):
                list(loader)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "edges.npy", edges_of(N, E, 5))
    np.save(tmp_path / "w.npy", edge_rows()["w"])
    line = ["create", str(tmp_path / "g"), "--edge-index", str(tmp_path / "edges.npy"), "--num-nodes", str(N)]
    assert main([*line, "--edge-features", f"w={tmp_path / 'w.npy'}"]) == 0
    assert "edge data  w: float32 [5000]" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "g")]) == 0
    with featstore.open(tmp_path / "g") as g:
        np.testing.assert_array_equal(g.edge_features["w"][:].numpy(), edge_rows()["w"])


def test_edges_of_a_batch_are_joined_once(graph: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of its features, and however often memory is looked for."""
    joined: list[Any] = []
    refused: list[Any] = []

    def counting(blocks: Any, *more: Any) -> Any:
        joined.append(blocks)
        return edge_numbers(blocks, *more)

    def refusing(store: featstore.FeatureStore, blocks: Any, *more: Any) -> Any:
        if not any(blocks is each for each in refused):
            refused.append(blocks)
            raise BudgetError("no memory now", None)
        return gather_edges(store, blocks, *more)

    monkeypatch.setattr("featstore.load.stages.Stages.release", lambda stages, run: True)  # there was memory to give back
    monkeypatch.setattr("featstore.load.stages.edge_numbers", counting)
    monkeypatch.setattr("featstore.load.stages.gather_edges", refusing)
    options = {"edge_features": ["w", "kind"], "labels": None, "threads": 1, "prefetch": 1}
    with featstore.Loader(graph, SAMPLERS["neighbor"](graph), torch.arange(N), 70, **options) as loader:
        for batch in loader:
            check(batch)
        assert len(joined) == len(loader) == len(refused)
