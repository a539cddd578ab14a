"""Duplicates, self loops and reverse edges while a dataset is made, against NumPy, at bounds of a few pairs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.creation import build as building
from featstore.creation import extsort
from featstore.creation.extsort import PairSorter
from featstore.graph.dataset import OutOfCoreGraph
from tests.support.making import from_edge_index

FORMS: dict[str, dict[str, Any]] = {"csc": {}, "chunked": {"topology": "chunked", "chunk_bytes": 4096}}
OPTIONS = ("coalesce", "remove_self_loops", "to_undirected")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many datasets are made here, and fsync would take most of the time; test_format sees that it is called."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Small(PairSorter):
    """Spills what is more than five pairs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.block_pairs, self._cap = 3, 5


def cleaned(edges: np.ndarray, coalesce: bool, remove_self_loops: bool, to_undirected: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges that stay, by destination and source, and the number of each."""
    if remove_self_loops:
        edges = edges[:, edges[0] != edges[1]]
    if to_undirected:
        edges = np.concatenate([edges, edges[::-1]], 1)
    if coalesce or to_undirected:
        edges = np.unique(edges[::-1], axis=1)[::-1]
        return edges, np.arange(edges.shape[1])
    order = np.lexsort(edges)
    return edges[:, order], order


def check(g: OutOfCoreGraph, edges: np.ndarray, numbers: np.ndarray) -> None:
    assert g.num_edges == edges.shape[1]
    empty = torch.empty((2, 0), dtype=torch.int64)
    blocks = list(g.edges(edge_pos=True))
    np.testing.assert_array_equal(torch.cat([empty, *(block for block, _ in blocks)], 1), edges)
    np.testing.assert_array_equal(torch.cat([empty[0], *(found for _, found in blocks)]), numbers)
    np.testing.assert_array_equal(g.in_degree, np.bincount(edges[1], minlength=g.num_nodes))
    np.testing.assert_array_equal(g.out_degree, np.bincount(edges[0], minlength=g.num_nodes))


def blocks_of(edges: np.ndarray, step: int) -> Iterator[np.ndarray]:
    for first in range(0, edges.shape[1], step):
        yield edges[:, first : first + step]


@given(
    st.integers(1, 12),
    st.integers(0, 60),
    st.integers(0, 2**32),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["array", "blocks", "csc"]),
    st.sampled_from(list(FORMS)),
    st.booleans(),
)
def test_any_edges_and_options(
    tmp_path_factory: pytest.TempPathFactory,
    n: int,
    n_edges: int,
    seed: int,
    options: tuple[bool, bool, bool],
    given_as: str,
    form: str,
    spills: bool,
) -> None:
    edges = np.random.default_rng(seed).integers(0, n, (2, n_edges))
    asked: dict[str, Any] = {**dict(zip(OPTIONS, options, strict=True)), **FORMS[form], "progress": False}
    path = tmp_path_factory.mktemp("g") / "g"
    with pytest.MonkeyPatch.context() as patch:
        if spills:
            patch.setattr(building, "PairSorter", Small)
            patch.setattr(extsort, "_FAN_OUT", 2)
        if given_as == "csc":
            edges = edges[:, np.argsort(edges[1], kind="stable")]
            indptr = np.concatenate([[0], np.bincount(edges[1], minlength=n).cumsum()])
            g = OutOfCoreGraph.create(path, indptr, edges[0], {"x": np.arange(n)}, **asked)
        else:
            source = edges if given_as == "array" else blocks_of(edges, 7)
            g = OutOfCoreGraph.from_edge_index(path, source, n, {"x": np.arange(n)}, **asked)
    with g:
        check(g, *cleaned(edges, *options))
        assert g["x"][:].tolist() == list(range(n))
        g.verify(progress=False)
    assert not [name for name in os.listdir(path) if "spill" in name]


def test_one_pair_more_often_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in several blocks, of which one edge stays."""
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    edges = np.tile([[3], [7]], (1, 20_000))
    from_edge_index(tmp_path / "g", edges, 9, memory=1000, to_undirected=True, progress=False)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert torch.cat(list(g.edges()), 1).tolist() == [[7, 3], [3, 7]]


def test_within_memory(tmp_path: Path) -> None:
    """Four million edges, 64 MB as int64 pairs, and their reverse, within 16 MB; a fifth of them lead to one node."""
    script = textwrap.dedent(f"""
        import resource, numpy as np
        from tests.support.making import from_edge_index
        rng = np.random.default_rng(0)
        def blocks():
            for _ in range(80):
                block = rng.integers(0, 1000, (2, 50_000))
                block[1, ::5] = 77
                yield block
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        options = {{"remove_self_loops": True, "to_undirected": True, "memory": "16MiB", "progress": False}}
        from_edge_index({str(tmp_path / "warm")!r}, np.zeros((2, 1), np.int64), 1, **options)
        before = peak()
        from_edge_index({str(tmp_path / "g")!r}, blocks(), 1000, **options)
        print(peak() - before)
    """)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 16 << 20
    is_edge = np.zeros((1000, 1000), bool)
    rng = np.random.default_rng(0)
    for _ in range(80):
        block = rng.integers(0, 1000, (2, 50_000))
        block[1, ::5] = 77
        is_edge[block[1], block[0]] = True
    is_edge |= is_edge.T
    np.fill_diagonal(is_edge, False)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        np.testing.assert_array_equal(torch.cat(list(g.edges()), 1), np.stack(np.nonzero(is_edge))[::-1])


def test_as_pyg_does(tmp_path: Path) -> None:
    """PyG sorts by source, and this by destination; an undirected graph is the same either way."""
    utils = pytest.importorskip("torch_geometric.utils")
    edges = torch.from_numpy(np.random.default_rng(0).integers(0, 30, (2, 300)))
    wanted = {"coalesce": utils.coalesce, "remove_self_loops": lambda e: utils.remove_self_loops(e)[0]}
    wanted["to_undirected"] = utils.to_undirected
    for name, of_pyg in wanted.items():
        with OutOfCoreGraph.from_edge_index(tmp_path / name, edges, 30, progress=False, **{name: True}) as g:
            found = torch.cat(list(g.edges()), 1)
            src, dst = of_pyg(edges).numpy()
            np.testing.assert_array_equal(found, np.stack([src, dst])[:, np.lexsort((src, dst))])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"coalesce": 1}, TypeError, "coalesce must be True or False"),
        ({"remove_self_loops": "yes"}, TypeError, "remove_self_loops must be True or False"),
        ({"to_undirected": None}, TypeError, "to_undirected must be True or False"),
        *(
            ({name: True, "edge_features": {"w": np.zeros(3)}}, ValueError, f"edge_features cannot be given with {name}=True")
            for name in OPTIONS
        ),
        ({"coalesce": True, "stripes": ["."], "topology": "chunked"}, ValueError, "stripes cannot be given with coalesce=True"),
        ({"to_undirected": True, "stripes": ["."], "topology": "chunked"}, ValueError, "given with to_undirected=True"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    edges = np.array([[0, 1, 1], [1, 1, 2]])
    for make in (
        lambda: OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, 3, **options),
        lambda: OutOfCoreGraph.create(tmp_path / "g", [0, 0, 2, 3], edges[0], **options),
    ):
        with pytest.raises(kind, match=message):
            make()
    assert os.listdir(tmp_path) == []


def test_wrong_input_is_named_as_without_options(tmp_path: Path) -> None:
    for options in ({}, {"coalesce": True}):
        with pytest.raises(IndexError, match=r"indices\[2\] is 9, which is not a node: ids are 0 … 2"):
            OutOfCoreGraph.create(tmp_path / "g", [0, 0, 2, 3], [0, 1, 9], **options)
        with pytest.raises(ValueError, match=r"indptr\[2\] is 1, after 2"):
            OutOfCoreGraph.create(tmp_path / "g", [0, 2, 1, 3], [0, 1, 1], **options)
        with pytest.raises(IndexError, match=r"edge_index\[0, 2\] is 9"):
            OutOfCoreGraph.from_edge_index(tmp_path / "g", [[0, 1, 9], [0, 0, 9]], 3, **options)


def test_loops_are_removed_and_chunks_striped(tmp_path: Path) -> None:
    """The number of edges is known before they are written: files of chunks get equal shares."""
    (tmp_path / "drive").mkdir()
    edges = np.random.default_rng(0).integers(0, 50, (2, 9000))
    form = {**FORMS["chunked"], "stripes": [tmp_path / "drive"]}
    with OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, 50, remove_self_loops=True, progress=False, **form) as g:
        check(g, *cleaned(edges, False, True, False))
