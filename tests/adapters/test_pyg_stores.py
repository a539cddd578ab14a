"""A dataset as PyG's stores, after PyG's own tests of stores and of loaders over them (its source distribution has none)."""

from __future__ import annotations

import os
import pickle
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.programs import run_in_fork
from tests.support.pyg import Data, LinkNeighborLoader, NeighborLoader, NodeLoader, data_of, whole_lists
from tests.support.refusing import refuses

from featstore.adapters.pyg import Sampler, stores  # isort: skip  # after PyG, which tests.support.pyg imports without its warnings
from torch_geometric.data import EdgeAttr, TensorAttr  # isort: skip
from torch_geometric.data.feature_store import AttrView  # isort: skip

pytestmark = [
    pytest.mark.usefixtures("_program_server", "small_pieces"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker"),  # on one core
]


@pytest.fixture(scope="module")
def whole(small: SimpleNamespace) -> Any:
    """The whole graph in memory, as PyG holds it."""
    data = data_of(small.indptr, small.indices)
    data.x, data.h, data.y = torch.from_numpy(small.x), torch.from_numpy(small.h), torch.from_numpy(small.y)
    return data


INDICES = [
    None,
    slice(None),
    slice(10, 20),
    slice(900, None, 7),
    slice(5, 5),
    range(3, 30, 4),
    range(30, 3, -4),
    torch.tensor([5, 0, 999, 5]),
    torch.tensor([-1, 3], dtype=torch.int32),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([[1, 2], [3, 4]]),
    torch.arange(1000) % 3 == 0,
    np.array([7, 7, 1]),
    np.arange(1000) > 990,
    [4, 2],
    17,
    -1,
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: type(index).__name__)
@pytest.mark.parametrize("name", ["x", "h", "y"])
def test_every_index_reads_what_a_tensor_has(g, whole, name, index) -> None:
    store, _ = stores(g)
    full = whole[name]
    own = slice(None) if index is None else torch.tensor(list(index)) if isinstance(index, range) else index
    want = full[own]
    got = store.get_tensor(group_name=None, attr_name=name, index=index)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert store.get_tensor_size(None, name, index) == tuple(want.shape)
    got.fill_(0)
    assert torch.equal(store.get_tensor(None, name, index), want)  # what is given away is a copy


def test_views_and_forms_of_asking(g, whole) -> None:
    store, _ = stores(g)
    ids = torch.tensor([3, 1])
    attr = TensorAttr(None, "x", ids)
    partial = TensorAttr(None)
    partial.update(attr)
    assert torch.equal(store.get_tensor(partial), whole.x[ids])
    view = store.view(group_name=None)
    view.attr_name = "x"
    view["index"] = ids
    assert view == store.view(None, "x", ids)
    assert torch.equal(view(), whole.x[ids])
    for got in (store[attr], store[None, "x", ids], store.view(group_name=None)["x"][ids], store.view(group_name=None).x[ids]):
        assert torch.equal(got, whole.x[ids])
    for got in (store[None, "x", None], store[None, "x", :], store[None, "x"][:], store[None, "x"]()):
        assert torch.equal(got, whole.x)
    assert isinstance(store[None, "x"], AttrView)
    refuses(ValueError, "not fully specified", lambda: store.get_tensor(None, "x"))
    as_array = store.get_tensor(None, "x", np.array([3, 1]), convert_type=True)
    assert isinstance(as_array, np.ndarray)
    assert np.array_equal(as_array, whole.x[ids].numpy())
    many = store.multi_get_tensor([TensorAttr(None, name, ids) for name in ("x", "y", "h")])
    assert all(torch.equal(rows, whole[name][ids]) for rows, name in zip(many, ("x", "y", "h"), strict=True))
    assert len(store) == 3
    assert "h, x, y" in repr(store)


def test_attributes_are_the_features_and_what_each_node_has(g) -> None:
    assert [attr.attr_name for attr in stores(g)[0].get_all_tensor_attrs()] == ["x", "y"]  # no h, which can be asked for
    only, _ = stores(g, ["y", "x"])
    assert [attr.attr_name for attr in only.get_all_tensor_attrs()] == ["y", "x"]
    assert all(attr.group_name is None and not attr.is_set("index") for attr in only.get_all_tensor_attrs())
    refuses(KeyError, "no attribute 'h'; there is 'y', 'x'", lambda: only.get_tensor(None, "h", None))
    refuses(KeyError, "no node data 'z'", lambda: stores(g, ["x", "z"]))
    refuses(ValueError, "'train_idx' of shape", lambda: stores(g, ["x", "train_idx"]))


def test_stores_of_something_else(whole) -> None:
    refuses(TypeError, "stores are made of an OutOfCoreGraph, not of a Data", lambda: stores(whole))


def test_the_group_alone_is_a_view_and_no_attribute(g, whole) -> None:
    store, _ = stores(g)
    assert isinstance(store[None], AttrView)
    ids = torch.tensor([4, 2])
    for view in (store[None], store.view(None), store.view(group_name=None)):
        assert torch.equal(view.h[ids], whole.h[ids])
        refuses(KeyError, "no attribute without a name: give attr_name; there is 'h', 'x', 'y'", view)
    refuses(KeyError, "without a name", lambda: store.get_tensor_size(TensorAttr(None)))
    for ask in (lambda: store["paper"], lambda: store["x", ids], lambda: store.view(group_name="paper")):
        refuses(KeyError, "group_name=None is the one type of nodes, as in store", ask)


def test_sizes_are_not_read(small) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        store, edges = stores(g)
        assert store.get_tensor_size(None, "x") == (1000, 25)
        assert store.get_tensor_size(None, "y") == (1000,)
        assert store.get_tensor_size(None, "h", torch.tensor([1, 2])) == (2, 300)
        assert edges.get_all_edge_attrs()[0].size == (1000, 1000)
        assert not {"node data", "indptr"} & set(g.memory_report())
        assert sum(each.stats()["reads"] for each in g.features.values()) == 0


def test_what_is_not_there(g) -> None:
    store, _ = stores(g)
    for group, name in [(None, "z"), (None, "train_idx"), ("paper", "x"), (None, None)]:
        for ask in (store.get_tensor, store.get_tensor_size):
            refuses(KeyError, "no attribute", lambda: ask(group, name, None))
    refuses(KeyError, "group_name=None is the one type of nodes", lambda: store["paper", "x", None])
    for name in ("x", "y"):
        for ids in (torch.tensor([0, 1000]), np.array([-1001]), 1000, torch.ones(999, dtype=torch.bool)):
            refuses(IndexError, "", lambda: store.get_tensor(None, name, ids))
        refuses(TypeError, "", lambda: store.get_tensor(None, name, torch.tensor([0.5])))
    with pytest.raises(KeyError):
        store.multi_get_tensor([TensorAttr(None, "x", torch.tensor([0])), TensorAttr(None, "z", torch.tensor([0]))])


def test_stores_are_read_only(g) -> None:
    store, edges = stores(g)
    x = torch.zeros(1000, 25)
    for change in (
        lambda: store.put_tensor(x, None, "x", None),
        lambda: store.update_tensor(x, None, "x", None),
        lambda: store.remove_tensor(None, "x", None),
        lambda: store.__setitem__((None, "x", None), x),
        lambda: store.__delitem__((None, "x", None)),
        lambda: edges.put_edge_index((x, x), None, "coo"),
        lambda: edges.remove_edge_index(None, "csc"),
        lambda: edges.__setitem__((None, "coo"), (x, x)),
        lambda: edges.__delitem__((None, "csc")),
        lambda: edges.coo(store=True),
    ):
        refuses(NotImplementedError, r"make one with featstore\.adapters\.pyg\.create", change)


def test_layouts(small, g, whole) -> None:
    _, edges = stores(g)
    row, colptr = edges.get_edge_index(edge_type=None, layout="csc")
    assert torch.equal(row, torch.from_numpy(small.indices))
    assert torch.equal(colptr, torch.from_numpy(small.indptr))
    colptr.fill_(0)
    assert torch.equal(edges[None, "csc"][1], torch.from_numpy(small.indptr))
    for got in (edges[None, "coo"], edges.get_edge_index(None, "coo", True, (1000, 1000)), edges.coo()[:2]):
        assert torch.equal(torch.stack(got), whole.edge_index)
    assert edges.csc()[2] is None
    rowptr, col, perm = edges.csr()
    want = torch.stack([torch.repeat_interleave(torch.arange(1000), rowptr.diff()), col])
    assert torch.equal(want, whole.edge_index[:, perm])
    (attr,) = edges.get_all_edge_attrs()
    assert (attr.edge_type, attr.layout.value, attr.is_sorted) == (None, "csc", True)
    for attr in (EdgeAttr(None, "csr"), EdgeAttr(("a", "to", "b"), "csc"), EdgeAttr(None, "csc", size=(1000, 7))):
        with pytest.raises(KeyError, match=r"not found: (CSC and COO forms are there|edge_type=None|its size is)"):
            edges.get_edge_index(attr)
    assert "num_edges=7642" in repr(edges)


def test_graphs_at_the_borders(tmp_path) -> None:
    cases = {"none": ([0], []), "no edges": ([0, 0, 0], []), "one": ([0, 1], [0]), "long": ([0, *[2] * 70_000, 3], [1, 2, 3])}
    for name, (indptr, indices) in cases.items():
        with featstore.OutOfCoreGraph.create(tmp_path / name, indptr, indices, progress=False) as g:
            store, edges = stores(g)
            assert torch.stack(edges.coo()[:2]).tolist() == data_of(np.array(indptr), np.array(indices, int)).edge_index.tolist()
            assert store.get_all_tensor_attrs() == []
    refuses(KeyError, "there is none", lambda: store.get_tensor(None, "x", None))


def test_an_adjacency_beyond_the_budget(tmp_path) -> None:
    indptr = np.arange(0, 3_000_001, 30)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, np.zeros(3_000_000, int), progress=False):
        pass
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        _, edges = stores(g)
        refuses(featstore.BudgetError, r"the whole adjacency in memory: .*adapters\.pyg\.Sampler", lambda: edges.csc())
        sampler = Sampler(featstore.NeighborSampler(g, [5], redraw=False))
        assert next(iter(NodeLoader(stores(g), sampler, torch.arange(10), batch_size=10))).edge_index.shape == (2, 50)


def check_same(mine: Any, its: Any) -> None:
    assert isinstance(mine, Data)
    assert set(mine.keys()) - {"num_nodes"} == set(its.keys()) - {"num_nodes"}
    for name in set(its.keys()):
        equal = torch.equal if isinstance(its[name], torch.Tensor) else lambda a, b: a == b
        assert equal(mine[name], its[name]), name


@pytest.mark.shares_resources  # the resource tracker of multiprocessing stays
@pytest.mark.parametrize(
    ("workers", "per_worker"),
    [
        ({}, None),
        ({}, False),
        ({"num_workers": 2}, None),
        ({"num_workers": 2}, False),
        ({"num_workers": 1, "multiprocessing_context": "forkserver"}, None),  # which pickles as spawn does
    ],
    ids=str,
)
def test_pyg_gives_the_same_batches_over_our_files(small, g, whole, workers, per_worker) -> None:
    options = {"input_nodes": torch.from_numpy(small.train_idx), "batch_size": 64, "filter_per_worker": per_worker}
    sampler = featstore.NeighborSampler(g, [-1, -1], redraw=False)
    mine = NeighborLoader(stores(g, ["x", "h", "y"]), num_neighbors=[], neighbor_sampler=Sampler(sampler), **options, **workers)
    its = NodeLoader(whole, whole_lists(whole, small.indptr, small.indices, 2), **options)
    assert len(mine) == len(its) == 5
    for batch, want in zip(mine, its, strict=True):
        del want.e_id  # which positions of the file the library's sampler does not return
        if "num_sampled_nodes" not in want:  # torch-sparse counts none
            del batch.num_sampled_nodes, batch.num_sampled_edges
        check_same(batch, want)


def test_the_same_under_the_whole_adjacency_that_pyg_holds(small, g, whole) -> None:
    """PyG's own sampler takes its arrays from the graph store; without compiled packages it goes as far as that."""
    from torch_geometric.sampler import NeighborSampler as ItsSampler

    with pytest.warns(UserWarning, match="pyg-lib"):
        sampler = ItsSampler(stores(g), [2])
    assert sampler.num_nodes == 1000
    assert torch.equal(sampler.colptr, torch.from_numpy(small.indptr))
    assert torch.equal(sampler.row, torch.from_numpy(small.indices))
    assert not sampler.is_hetero


def killed(path: str) -> None:
    """Kill a worker; in the child, as it changes what a signal does."""
    with featstore.open(path, memory="64MiB") as g:
        sampler = Sampler(featstore.NeighborSampler(g, [3, 3], redraw=False))
        loader = NodeLoader(stores(g), sampler, torch.arange(1000), batch_size=2, num_workers=1, filter_per_worker=True)
        batches = iter(loader)
        next(batches)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises the same wherever the process is just then
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        with pytest.raises((RuntimeError, OSError, EOFError)):  # the worker is gone, or took along what it had sent
            list(batches)
        del batches
        assert len(list(NodeLoader(stores(g), sampler, torch.arange(100), batch_size=50))) == 2


def test_a_killed_worker_is_an_error_and_the_parent_goes_on(small) -> None:
    run_in_fork(killed, str(small.path))


def test_stores_closed_in_the_middle(small, g) -> None:
    pair, sampler = stores(g), Sampler(featstore.NeighborSampler(g, [3, 3], redraw=False))
    batches = iter(NodeLoader(pair, sampler, torch.arange(1000), batch_size=50))
    workers = iter(NodeLoader(pair, sampler, torch.arange(1000), batch_size=50, num_workers=1, filter_per_worker=True))
    next(batches)
    next(workers)
    g.close()
    refuses(featstore.ClosedError, "", lambda: list(batches))
    assert len(list(workers)) == 19  # a worker has the dataset open for itself
    for ask in (lambda: pair[0][None, "x", [1]], lambda: pair[0][None, "y", [1]], pair[1].csc, lambda: stores(g)):
        refuses(featstore.ClosedError, "", ask)
    refuses(featstore.ClosedError, "", lambda: pickle.dumps(pair))


def test_an_error_in_a_worker_keeps_its_kind(small, g) -> None:
    sampler = Sampler(featstore.NeighborSampler(g, [3], redraw=False))
    for workers in (0, 1):
        loader = NodeLoader(stores(g), sampler, torch.tensor([0, 1000]), batch_size=2, num_workers=workers)
        refuses(IndexError, "seed 1000 at position 1 is out of range", lambda: list(loader))


def test_stores_that_travel_share_one_graph(g, whole) -> None:
    ids = torch.tensor([5, 3])
    features, edges = pickle.loads(pickle.dumps(stores(g)))
    assert torch.equal(features[None, "x", ids], whole.x[ids])
    assert torch.equal(torch.stack(edges.coo()[:2]), whole.edge_index)
    assert features._g is edges._g is not g
    features._g.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_link_loaders_over_our_files(small, g, whole, workers) -> None:
    pairs = whole.edge_index[:, ::50]
    sampler = Sampler(featstore.NeighborSampler(g, [-1], redraw=False))
    options = {"edge_label_index": pairs, "batch_size": 32, "num_workers": workers}
    loader = LinkNeighborLoader(
        stores(g, ["x", "h", "y"]), [], **{**options, "edge_label_index": (None, pairs)}, neighbor_sampler=sampler
    )
    its = LinkNeighborLoader(whole, [], **options, neighbor_sampler=sampler)
    seen = []
    for batch, want in zip(loader, its, strict=True):
        check_same(batch, want)
        seen.append(batch.n_id[batch.edge_label_index])
        assert torch.equal(batch.x, whole.x[batch.n_id])
    assert torch.equal(torch.cat(seen, 1), pairs)
