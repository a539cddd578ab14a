"""Datasets from PyG's data: every form of edges, attributes, datasets of one graph, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.pyg import Data, HeteroData, LinkNeighborLoader
from tests.support.refusing import refuses
from tests.support.typed import CITES, WRITES

from featstore.adapters.pyg import NeighborLoader, Sampler, create, stores  # isort: skip  # after PyG, without its warnings

from torch_geometric import EdgeIndex  # isort: skip
from torch_geometric.data import Batch, InMemoryDataset, OnDiskDataset, TemporalData  # isort: skip
from torch_geometric.transforms import RandomLinkSplit  # isort: skip

N = 200


def graph(seed: int = 0) -> Any:
    """A graph with repeated edges in no order, masks, labels, an index set."""
    rng = np.random.default_rng(seed)
    data = Data(
        x=torch.from_numpy(rng.standard_normal((N, 7), dtype=np.float32)),
        edge_index=torch.from_numpy(rng.integers(0, N - 1, (2, 1500))),  # the last node is isolated
        y=torch.from_numpy(rng.integers(0, 4, N)),
    )
    data.train_mask = torch.from_numpy(rng.random(N) < 0.3)
    data.test_idx = np.arange(0, N, 9)
    data.pos = torch.from_numpy(rng.standard_normal((N, 3)))
    return data


def sorted_edges(edge_index: torch.Tensor) -> list[list[int]]:
    return sorted(edge_index.t().tolist())


def check(g: featstore.OutOfCoreGraph, data: Any) -> None:
    assert g.num_nodes == N
    assert g.num_edges == data.edge_index.shape[1]
    assert sorted_edges(torch.stack(stores(g)[1].coo()[:2])) == sorted_edges(data.edge_index)
    assert list(g.features) == ["x"]
    assert torch.equal(g.features["x"][:], data.x)
    assert torch.equal(g.node_data["y"], data.y)
    assert torch.equal(g.node_data["train_mask"], data.train_mask)
    assert torch.equal(g.node_data["test_idx"], torch.as_tensor(data.test_idx))
    assert torch.equal(g.node_data["pos"], data.pos)


@pytest.fixture
def data() -> Any:
    return graph()


def test_a_graph_comes_back(data, tmp_path) -> None:
    with featstore.OutOfCoreGraph.from_pyg(tmp_path / "g", data, progress=False, memory="64MiB") as g:
        check(g, data)
        assert g.budget.total == 64 << 20
    with create(tmp_path / "other", data, ["pos", "x"], progress=False) as g:
        assert list(g.features) == ["pos", "x"]
        assert torch.equal(g.features["pos"][:], data.pos)
    refuses(FileExistsError, "", lambda: create(tmp_path / "g", data, progress=False))
    data.x += 1
    with create(tmp_path / "g", data, overwrite=True, progress=False) as g:
        check(g, data)


def transposed(data: Any) -> Any:
    return torch.sparse_coo_tensor(data.edge_index.flip(0), torch.ones(data.edge_index.shape[1]), (N, N), check_invariants=True)


class Sparse:
    """The part of a torch_sparse.SparseTensor that is asked for."""

    def __init__(self, edge_index: torch.Tensor, weights: Any = None, sizes: tuple[int, int] = (N, N)) -> None:
        order = torch.argsort(edge_index[1], stable=True)
        self.rowptr, self.sizes = torch.searchsorted(edge_index[1][order], torch.arange(sizes[0] + 1)), sizes
        self.col, self.weights = edge_index[0][order], weights

    def csr(self) -> Any:
        return self.rowptr, self.col, self.weights

    def sparse_sizes(self) -> tuple[int, int]:
        return self.sizes


FORMS = {
    "int32": lambda data: {"edge_index": data.edge_index.int()},
    "EdgeIndex": lambda data: {"edge_index": EdgeIndex(data.edge_index, sparse_size=(N, N))},
    "not contiguous": lambda data: {"edge_index": data.edge_index.t().contiguous().t()},
    "coo": lambda data: {"adj_t": transposed(data)},
    "torch_sparse": lambda data: {"adj_t": Sparse(data.edge_index)},
    "both": lambda data: {"edge_index": data.edge_index, "adj_t": transposed(data)},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_edges(data, tmp_path, form) -> None:
    other = data.clone()
    del other.edge_index
    for name, value in FORMS[form](data).items():
        other[name] = value
    with create(tmp_path / "g", other, progress=False) as g:
        check(g, data)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta")
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_compressed_edges(data, tmp_path, layout) -> None:
    data.edge_index = torch.unique(data.edge_index, dim=1)
    other = data.clone()
    del other.edge_index
    other.adj_t = getattr(transposed(data), f"to_sparse_{layout}")()
    with create(tmp_path / "g", other, progress=False) as g:
        check(g, data)


class InMemory(InMemoryDataset):
    """Graphs in memory."""

    def __init__(self, graphs: list[Any]) -> None:
        super().__init__()
        self.data, self.slices = self.collate(graphs)


def test_datasets_of_one_graph(data, tmp_path, request) -> None:
    with create(tmp_path / "memory", InMemory([data]), progress=False) as g:
        check(g, data)
    dataset = OnDiskDataset(str(tmp_path / "database"))
    data.test_idx = torch.from_numpy(data.test_idx)
    dataset.append(data)
    request.addfinalizer(dataset.close)
    with create(tmp_path / "disk", dataset, progress=False) as g:
        check(g, data)
    dataset.append(graph(1))
    refuses(ValueError, "has 2 graphs; give one of them", lambda: create(tmp_path / "several", dataset, progress=False))
    small = [Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor(1)) for _ in range(2)]
    with create(tmp_path / "batch", Batch.from_data_list(small), progress=False) as g:
        assert (g.num_nodes, g.node_data["ptr"].tolist(), g.node_data["y"].tolist()) == (6, [0, 3, 6], [1, 1])


def test_borders(tmp_path) -> None:
    lonely = Data(num_nodes=3, edge_index=torch.empty((2, 0), dtype=torch.int64), label=torch.tensor(5))
    with create(tmp_path / "g", lonely, progress=False) as g:
        assert (g.num_nodes, g.num_edges, list(g.features), g.node_data["label"].tolist()) == (3, 0, [], [5])


def test_attributes_of_edges_come_with_the_batches(data, tmp_path) -> None:
    """As PyG's own loader has them, in the order of ``edge_index``."""
    rng = np.random.default_rng(1)
    data.edge_attr = torch.from_numpy(rng.standard_normal((1500, 3), dtype=np.float32))
    data.edge_weight = torch.from_numpy(rng.random(1500))
    with create(tmp_path / "g", data, progress=False) as g:
        assert sorted(g.edge_features) == ["edge_attr", "edge_weight"]
        for name, store in g.edge_features.items():
            assert torch.equal(store[:], data[name])
        for strategy in ("ondemand", "superbatch"):
            n_edges = 0
            for batch in NeighborLoader(g, [5, -1], batch_size=20, strategy=strategy):
                n_edges += len(batch.e_id)
                assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
                assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
                assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])
            assert n_edges > 1500
        some = next(iter(NeighborLoader(g, [5], batch_size=20, edge_features="edge_attr")))
        assert "edge_attr" in some
        assert "edge_weight" not in some
        none = next(iter(NeighborLoader(g, [5], batch_size=20, edge_features=())))
        assert "e_id" not in none
        none = next(iter(NeighborLoader(g, [5], batch_size=20, edges=False)))
        assert not {"e_id", "edge_attr"} & set(none.keys())
        numbers = next(iter(NeighborLoader(g, [5], batch_size=20, edge_features=(), edges=True)))
        assert torch.equal(numbers.n_id[numbers.edge_index], data.edge_index[:, numbers.e_id])
        assert "edge_attr" not in numbers


def test_the_whole_list_of_edges_is_as_it_was_given(data, tmp_path) -> None:
    """Rows of edge features belong to it; with ``is_sorted=True`` it is as PyG's CSC form."""
    data.edge_attr = torch.arange(1500)
    for topology in ("csc", "chunked"):
        create(tmp_path / topology, data, progress=False).close()
        if topology == "chunked":
            featstore.convert(tmp_path / topology, "chunked", chunk_bytes=4096, progress=False)
        with featstore.open(tmp_path / topology, memory="64MiB") as g:
            edges = stores(g)[1]
            for size in (None, (N, N), (None, N), [N, None]):
                got = torch.stack(edges.get_edge_index(None, "coo", size=size))
                assert torch.equal(got, data.edge_index)
            in_order = torch.stack(edges.get_edge_index(None, "coo", is_sorted=True))
            assert torch.equal(in_order, torch.stack(edges.coo()[:2]))
            assert not torch.equal(in_order, data.edge_index)
            assert bool((in_order[1].diff() >= 0).all())


@pytest.mark.parametrize("split_labels", [False, True])
@pytest.mark.parametrize("negative", [False, True])
def test_links_of_a_split_are_node_data(data, tmp_path, split_labels, negative) -> None:
    """As RandomLinkSplit makes them, of which the training labels may be as many as edges; other values are no links."""
    torch.manual_seed(0)
    data.edge_attr = torch.rand(data.num_edges, 2)
    split = RandomLinkSplit(add_negative_train_samples=negative, split_labels=split_labels)
    for number, part in enumerate(split(data)):
        names = [name for name in part.keys() if "edge_label" in name]  # noqa: SIM118  # a Data is no mapping
        assert len(names) >= 2
        with create(tmp_path / str(number), part, progress=False) as g:
            assert list(g.edge_features) == ["edge_attr"]
            assert torch.equal(g.edge_features["edge_attr"][:], part.edge_attr)
            for name in names:
                assert torch.equal(g.node_data[name], part[name])
            assert not {attr.attr_name for attr in stores(g)[0].get_all_tensor_attrs()} & set(names)
            if split_labels:
                continue
            links = (None, g.node_data["edge_label_index"])
            sampler = Sampler(featstore.NeighborSampler(g, [-1], redraw=False))
            options = {"neighbor_sampler": sampler, "edge_label": g.node_data["edge_label"], "batch_size": 64}
            loader = LinkNeighborLoader(stores(g), [], edge_label_index=links, **options)
            found = list(loader)
            assert torch.equal(torch.cat([batch.n_id[batch.edge_label_index] for batch in found], 1), part.edge_label_index)
            assert torch.equal(torch.cat([batch.edge_label for batch in found]), part.edge_label)


def test_as_many_links_as_nodes_are_not_of_nodes(data, tmp_path) -> None:
    data.edge_label_index, data.edge_label = data.edge_index[:, :N], torch.ones(N)
    with create(tmp_path / "g", data, progress=False) as g:
        assert "edge_label" not in {attr.attr_name for attr in stores(g)[0].get_all_tensor_attrs()}
        assert "edge_label" in g.node_data


def test_links_of_a_type_are_node_data_of_their_source(tmp_path: Path) -> None:
    torch.manual_seed(0)
    split = RandomLinkSplit(edge_types=[WRITES, CITES], add_negative_train_samples=True)
    for number, part in enumerate(split(hetero())):
        with create(tmp_path / str(number), part, progress=False) as g:
            for (source, relation, end), key in ((WRITES, "author,writes,paper"), (CITES, "paper,cites,paper")):
                for name in ("edge_label_index", "edge_label"):
                    value = part[source, relation, end][name]
                    assert len(value)
                    assert torch.equal(g[source].node_data[f"{name}:{relation}:{end}"], value)
                    assert not [each for each in g.edge_features if each.startswith(key) and "label" in each]
            assert not [each for each in stores(g)[0].get_all_tensor_attrs() if "edge_label" in each.attr_name]
            links = (WRITES, g["author"].node_data["edge_label_index:writes:paper"])
            sampler = Sampler(featstore.NeighborSampler(g, {WRITES: [-1], CITES: [-1]}, redraw=False))
            options = {"neighbor_sampler": sampler, "batch_size": 16}
            found = list(LinkNeighborLoader(stores(g), [], edge_label_index=links, **options))
            pairs = [(each["author"].n_id, each["paper"].n_id, each[WRITES].edge_label_index) for each in found]
            ends = [torch.stack([authors[ends[0]], papers[ends[1]]]) for authors, papers, ends in pairs]
            assert torch.equal(torch.cat(ends, 1), part[WRITES].edge_label_index)


def broken(**values: Any) -> Any:
    data = graph()
    for name, value in values.items():
        data[name] = value
    return data


def without(*names: str, **values: Any) -> Any:
    data = broken(**values)
    for name in names:
        del data[name]
    return data


def hetero() -> Any:
    """Papers, authors without features, and tags without attributes."""
    rng, data = np.random.default_rng(4), HeteroData()
    data["paper"].x, data["paper"].y = torch.rand(30, 5), torch.arange(30)
    data["paper"].train_mask, data["paper"].year = torch.arange(30) % 2 == 0, np.arange(30)
    data["author"].num_nodes, data["author"].year = 12, torch.arange(12)
    data["tag"].num_nodes = 0
    data[WRITES].edge_index = torch.from_numpy(np.stack([rng.integers(0, 12, 80), rng.integers(0, 30, 80)]))
    data[WRITES].edge_attr, data[WRITES].time = torch.rand(80, 2), torch.arange(80)
    data[CITES].edge_index = torch.from_numpy(rng.integers(0, 30, (2, 200)))
    data["tag", "of", "paper"].edge_index = torch.empty((2, 0), dtype=torch.int64)
    return data


def stored_edges(g: featstore.OutOfCoreGraph, key: Any) -> tuple[np.ndarray, np.ndarray]:
    """Read the sources of a type's edges as they are stored, and the edge ids in the input."""
    kind, topology = g.types.edges[key], g.topology
    numbers = np.arange(kind.first_edge, kind.first_edge + kind.n_edges)
    ids = np.empty(kind.n_edges, topology.id_dtype)
    topology.read_edges(numbers, ids)
    if topology.edge_ids is not None:
        topology.edge_ids.replace(numbers, np.empty)
    return ids - kind.src.first, numbers - kind.first_edge


def test_types_come_back(tmp_path: Path) -> None:
    data = hetero()
    with featstore.OutOfCoreGraph.from_pyg(tmp_path / "g", data, progress=False, memory="64MiB") as g:
        assert (g.node_types, g.edge_types) == data.metadata()
        assert {name: each.n for name, each in g.types.nodes.items()} == {"paper": 30, "author": 12, "tag": 0}
        assert [list(g[kind].features) for kind in g.node_types] == [["x"], [], []]
        assert torch.equal(g["paper"].features["x"][:], data["paper"].x)
        assert sorted(g["paper"].node_data) == ["train_mask", "y", "year"]
        assert torch.equal(g["paper"].node_data["train_mask"], data["paper"].train_mask)
        assert torch.equal(g["author"].node_data["year"], data["author"].year)
        assert torch.equal(g[WRITES].features["edge_attr"][:], data[WRITES].edge_attr)
        assert torch.equal(g[WRITES].features["time"][:], data[WRITES].time)
        for key in g.edge_types:
            src, dst = data[key].edge_index.numpy()
            order = np.lexsort((src, dst))
            for found, expected in zip(stored_edges(g, key), (src[order], order), strict=True):
                assert np.array_equal(found, expected)
        g.verify(progress=False)
    with create(tmp_path / "years", data, ["year", "x"], progress=False) as g:
        assert [sorted(g[kind].features) for kind in g.node_types] == [["x", "year"], ["year"], []]
        assert torch.equal(g["author"].features["year"][:], data["author"].year)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "SparseTensor"])
def test_compressed_edges_of_a_type(tmp_path: Path, layout: str) -> None:
    data = hetero()
    src, dst = pairs = data[WRITES].edge_index.unique(dim=1)
    adj_t = torch.sparse_coo_tensor(pairs.flip(0), torch.ones(pairs.shape[1]), (30, 12), check_invariants=True).coalesce()
    del data[WRITES]
    if layout == "SparseTensor":
        data[WRITES].adj_t = Sparse(pairs, sizes=(30, 12))
    else:
        data[WRITES].adj_t = adj_t if layout == "coo" else getattr(adj_t, f"to_sparse_{layout}")()
    with create(tmp_path / "g", data, progress=False) as g:
        assert np.array_equal(stored_edges(g, WRITES)[0], src[np.lexsort((src, dst))])


def changed(where: Any, **values: Any) -> Callable[[], Any]:
    """Return a maker of typed data with other attributes of a type."""

    def make() -> Any:
        data = hetero()
        for name, value in values.items():
            setattr(data if where is None else data[where], name, value)
        return data

    return make


REFUSED = [
    (changed("venue", name="x"), ValueError, r"set data\['venue'\].num_nodes"),
    (changed("paper", x=torch.rand(29, 5), num_nodes=30), ValueError, r"data\['paper'\]: feature 'x' of shape .* of 30 nodes"),
    (changed("paper", train_mask=torch.ones(30)), ValueError, r"data\['paper'\]: 'train_mask' of torch.float32"),
    (changed("author", name="Ann"), TypeError, r"'name' is a str, .* \(del data\['author'\].name\)"),
    (changed(None, task="labels"), ValueError, r"attribute 'task' belongs to no type: leave it out \(del data.task\)"),
    (
        changed(WRITES, w=torch.rand(79)),
        ValueError,
        r"'w' of shape \(79,\) .* 80 edges: .*del data\['author', 'writes', 'paper'\]",
    ),
    (changed(CITES, edge_index=torch.tensor([[0], [30]])), IndexError, r"edge type \('paper', 'cites', .* is 30"),
    (
        changed(("paper", "in", "venue"), edge_index=torch.zeros((2, 1), dtype=int)),
        ValueError,
        r"no node type 'venue'; set data\['venue'\]",
    ),
    (changed(("paper", "in", "tag"), w=torch.ones(3)), ValueError, r"data\['paper', 'in', 'tag'\]: there is no edge_index"),
    (changed(("paper", "in", "author"), adj_t=torch.eye(12).to_sparse()), ValueError, r"adj_t is not of shape \(12, 30\)"),
    (lambda: TemporalData(src=torch.tensor([0]), dst=torch.tensor([0]), t=torch.tensor([0])), TypeError, "temporal data"),
    (lambda: {"x": 1}, TypeError, "data must be a torch_geometric Data, HeteroData or dataset, not dict"),
    (
        lambda: broken(edge_attr=torch.rand(1499, 2)),
        ValueError,
        r"'edge_attr' of shape \(1499, 2\) .* 1500 edges: leave it out \(del data.edge_attr\)",
    ),
    (lambda: broken(name="cora"), TypeError, "attribute 'name' is a str"),
    (
        lambda: broken(train_mask=torch.ones(N - 1, dtype=torch.bool)),
        ValueError,
        "'train_mask' of torch.bool .* is no mask of 200",
    ),
    (lambda: broken(val_mask=torch.ones(N)), ValueError, "'val_mask' of torch.float32"),
    (lambda: broken(x=torch.rand(N + 5, 3), num_nodes=N), ValueError, "'x' of shape .* has not one row for each of 200 nodes"),
    (lambda: broken(x=torch.rand(N, 3).to(torch.complex64)), TypeError, "complex64 cannot be stored"),
    (lambda: broken(edge_index=torch.tensor([[0], [N]])), IndexError, "is not a node"),
    (lambda: broken(edge_index=torch.tensor([[0.0], [1.0]])), TypeError, "edge_index must hold integers"),
    (lambda: broken(edge_index=torch.tensor([[0, 1, 2]])), ValueError, r"edge_index must have shape \[2, E\]"),
    (lambda: broken(edge_index=np.array([[0], [1]])), TypeError, "edge_index must be a tensor"),
    (lambda: without("edge_index"), ValueError, "no edge_index and no adj_t"),
    (lambda: without("edge_index", adj_t=torch.eye(N)), TypeError, "adj_t must be a sparse tensor"),
    (lambda: without("edge_index", adj_t=2 * transposed(graph())), ValueError, "adj_t has weights"),
    (
        lambda: without("edge_index", adj_t=transposed(graph()), edge_attr=torch.rand(1500, 2)),
        ValueError,
        r"'edge_attr' belongs to edges, and adj_t .* give edge_index.*del data\.edge_attr",
    ),
    (lambda: without("edge_index", adj_t=Sparse(graph().edge_index, torch.rand(1500))), ValueError, "adj_t has weights"),
    (lambda: Data(), ValueError, "set data.num_nodes"),
    (lambda: Data(edge_index=torch.tensor([[0], [1]])), ValueError, "set data.num_nodes"),
]


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(tmp_path, make, kind, message) -> None:
    refuses(kind, message, lambda: create(tmp_path / "g", make(), progress=False))
    assert not (tmp_path / "g").exists()


def test_labels_of_another_length_are_warned_of(tmp_path: Path) -> None:
    """They are stored, as any node data; a loader would refuse them when the conversion is done."""
    data = graph()
    data.y = data.y[:-1]
    with pytest.warns(featstore.FeatstoreWarning, match=r"data: 'y' of shape \(199,\) has not one row for each of 200"):
        create(tmp_path / "g", data, progress=False).close()
    typed = changed("paper", y=torch.zeros(29, dtype=torch.int64))()
    with pytest.warns(featstore.FeatstoreWarning, match=r"data\['paper'\]: 'y' of shape \(29,\)"):
        create(tmp_path / "typed", typed, progress=False).close()


def test_features_that_are_not_there(data, tmp_path) -> None:
    with pytest.raises(ValueError, match="the data have no attribute 'z'; they have 'x', 'y'"):
        create(tmp_path / "g", data, "z", progress=False)
    with pytest.raises(ValueError, match="the data have no attribute 'z'; they have 'year', 'x', 'y'"):
        create(tmp_path / "g", hetero(), ["year", "z"], progress=False)
    refuses(ValueError, "feature 'test_idx' of shape", lambda: create(tmp_path / "g", data, ["x", "test_idx"], progress=False))


def test_what_pyg_trained_on_trains_from_disk(tmp_path: Path, data: SimpleNamespace) -> None:
    """The one line that changes: the masks of the data are the seeds of the loader."""
    from featstore.adapters.pyg import NeighborLoader

    with featstore.OutOfCoreGraph.from_pyg(tmp_path / "g", data, progress=False) as g:
        with NeighborLoader(g, num_neighbors=[-1], input_nodes=g.node_data["train_mask"], batch_size=16) as loader:
            seen = torch.cat([batch.input_id for batch in loader])
    assert torch.equal(seen, data.train_mask.nonzero().view(-1))
