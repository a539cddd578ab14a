"""torch's defaults and torch.compile: nothing is made on the default device or of the default dtype, and no store is traced."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors

import featstore
from featstore.inference.layers import Aggregate
from tests.support.pyg import Data, NodeSamplerInput
from tests.support.sampled import covering, one_in

from featstore.adapters import pyg  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings

N = 600
RNG = np.random.default_rng(29)
X = torch.from_numpy(RNG.random((N, 20), np.float32))
Y = torch.from_numpy(RNG.integers(0, 4, N))
EDGES = torch.from_numpy(RNG.integers(0, N, (2, 5 * N)))
W = torch.from_numpy(RNG.random((5 * N, 2), np.float32))
IDX = torch.arange(0, N, 3)
ROWS = torch.tensor([5, 1, 5])
GIVEN = Data(x=X, y=Y, edge_index=EDGES, edge_attr=W, idx=IDX)
STRATEGIES = ["ondemand", featstore.OnDemand(cache=0.2, policy="sieve"), "superbatch", featstore.Streamed(disk="30x"), "ginex"]
LAYERS = [Aggregate(lambda h, mean: h + mean, op) for op in ("mean", "gcn")]


@pytest.fixture(params=["meta device", "bfloat16", "deterministic"])
def defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    try:
        if request.param == "meta device":
            torch.set_default_device("meta")
        elif request.param == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            torch.set_default_dtype(torch.bfloat16)  # the coarsest: what was made of it would show in any result
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def g(tmp_path: Path, defaults: None) -> Iterator[featstore.OutOfCoreGraph]:
    with featstore.OutOfCoreGraph.from_pyg(tmp_path / "g", GIVEN, progress=False, memory="64MiB") as made:
        yield made


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether it lies in host memory, bit for bit."""
    if (found.device.type, found.dtype, found.shape) != ("cpu", expected.dtype, expected.shape):
        return False
    return found.numpy().tobytes() == expected.numpy().tobytes()


def test_stores_and_node_data(g: featstore.OutOfCoreGraph) -> None:
    store = g.features["x"]
    for found in (store[ROWS], store[ROWS.tolist()], store.take(ROWS), torch.index_select(store, 0, ROWS)):
        assert same(found, X[ROWS])
    assert same(store[7], X[7])
    assert same(store[:], X)
    assert same(next(iter(store)), X[0])
    assert same(g.node_data["y"], Y)
    assert same(g.edge_features["edge_attr"][ROWS], W[ROWS])
    nodes, _ = pyg.stores(g)
    assert same(nodes.get_tensor(None, "y", slice(2, 5)), Y[2:5])


@pytest.mark.parametrize(
    ("strategy", "sampler"), covering(STRATEGIES, [featstore.NeighborSampler, partial(featstore.EpochSampler, window=9)])
)
def test_batches(g: featstore.OutOfCoreGraph, strategy: Any, sampler: Callable[..., Any]) -> None:
    with featstore.Loader(g, sampler(g, [3, 3]), g.node_data["idx"], 50, strategy=strategy, device_cache=0.1) as loader:
        for batch in loader:
            assert same(batch.x, X[batch.input_ids])
            assert same(batch.y, Y[batch.seeds])


def test_history(g: featstore.OutOfCoreGraph) -> None:
    history = featstore.History(3, nodes=IDX)
    sampler = featstore.NeighborSampler(g, [3, 3])
    with featstore.Loader(g, sampler, IDX, 50, history=history, threads=1) as loader:
        for batch in loader:
            assert same(batch.x, X[batch.input_ids])
            h = batch.x.new_ones((batch.blocks[-2].n_dst, 3))
            assert batch.history.merge(h).device.type == "cpu"


def test_passes_and_parts(g: featstore.OutOfCoreGraph) -> None:
    assert same(g.aggregate("x", "sum", name="s", progress=False)[[0]], _sum(0)[None])
    featstore.partition(g, 4, train_idx=IDX, progress=False)
    kept = g.parts()["fennel-4"]
    assert kept.load().device.type == "cpu"
    batches = featstore.PartitionBatches(g, IDX, 50)
    assert {int(i) for k in range(len(batches)) for i in batches.epoch(0).seeds(k)} == set(IDX.tolist())
    store = featstore.infer(g, LAYERS, "x", "h", progress=False)
    assert same(store[ROWS], store[:][ROWS])


def _sum(node: int) -> torch.Tensor:
    return X[EDGES[0, EDGES[1] == node]].double().sum(0).float()


def test_packs(g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    sampler = featstore.NeighborSampler(g, [3, 3])
    path = tmp_path / "pack"
    featstore.sample_offline(g, sampler, IDX, 50, path=path, progress=False)
    packed = featstore.Packed(path, cache="10%")
    with featstore.Loader(g, strategy=packed) as loader:
        for batch in loader:
            assert same(batch.x, X[batch.input_ids])
            assert same(batch.y, Y[batch.seeds])


def test_pyg(g: featstore.OutOfCoreGraph) -> None:
    with pyg.NeighborLoader(g, [3, 3], input_nodes=None, batch_size=100) as loader:
        for data in loader:
            assert same(data.x, X[data.n_id])
            assert same(data.edge_attr, W[data.e_id])
    sampler = pyg.Sampler(featstore.NeighborSampler(g, [3, 3], redraw=False))
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.cat([ROWS, ROWS])))  # some twice
    assert out.node[:6].tolist() == [5, 1, 5, 5, 1, 5]
    assert {each.device.type for each in (out.node, out.row, out.col)} == {"cpu"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "g"
    featstore.OutOfCoreGraph.from_pyg(path, GIVEN, progress=False, memory="64MiB").close()
    return path


def factories_without_device(source: str) -> list[int]:
    """Return the lines that call a function of torch which makes a tensor on the default device."""
    names = {function.__name__ for function in _device_constructors()}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in names
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_factory_names_its_device() -> None:
    assert factories_without_device("import torch\ntorch.zeros(3)\ntorch.zeros(3, device='cpu')\ntorch.from_numpy(x)") == [2]
    package = Path(featstore.__file__).parent
    assert not [f"{path}:{line}" for path in package.rglob("*.py") for line in factories_without_device(path.read_text())]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # PyG's index_select, in the place of torch's
@pytest.mark.parametrize(
    "read",
    one_in(
        2,
        [
            lambda store, ids: store[ids],
            lambda store, ids: store.take(ids),
            lambda store, ids: store.take(ids, out=torch.empty((len(ids), 20), device="cpu")),
            lambda store, ids: store.take_async(ids).result(),
            lambda store, ids: store.gather(ids),
            lambda store, ids: store(ids),
            lambda store, ids: torch.index_select(store, 0, ids),
            lambda store, ids: torch.nn.functional.embedding(ids, store),
        ],
    ),
)
@pytest.mark.shares_resources  # the store's threads outlive the test
def test_compiled_code(stored: Path, read: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Each call reads once, whatever its size; what is around it is compiled."""
    torch._dynamo.reset()
    with featstore.open(stored, memory="64MiB") as g:
        g.cache("x", "20KiB", policy="lru")
        store = g.features["x"]
        compiled = torch.compile(lambda ids: read(store, ids * 2 - 5) * 2 + 1, backend="aot_eager")
        for n, size in enumerate((3, 10, 250)):
            ids = torch.from_numpy(RNG.integers(3, N // 2, size))
            assert torch.equal(compiled(ids), X[ids * 2 - 5] * 2 + 1)
            assert store.stats()["takes"] == n + 1
    torch._dynamo.reset()
