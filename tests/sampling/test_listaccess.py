"""Epoch-wide sampling that draws first and reads what was drawn: the same batches, and fewer bytes where that costs less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import NeighborSampler
from featstore._core.epochs import sort_targets
from featstore.sampling import window as window_module
from featstore.sampling.listaccess import ACCESSES, costs_less_drawn
from featstore.sampling.window import is_wide, least_bytes
from tests.sampling.test_epochwide import (
    PLENTY,
    ChunkedEpochGraph,
    EpochGraph,
    batches_of,
    check_window,
    window_of,
)
from tests.support.array_graphs import random_graph
from tests.support.kernel_counts import kernel_bytes
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("small_pieces")

Int64s = npt.NDArray[np.int64]
KINDS = [EpochGraph, ChunkedEpochGraph]


def hub_graph(kind: type[EpochGraph], path: Path, hub: int = 1 << 18) -> EpochGraph:
    """Short lists, and one in the middle of 1 MiB."""
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 9, 3000)
    degrees[1500] = hub
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    return kind(indptr, rng.integers(0, 3000, indptr[-1]).astype(np.int32), path=str(path / "graph"))


@pytest.mark.parametrize(
    ("fanouts", "replace", "kind", "access"),
    covering([[5, 3], [-1, 2], [200], [3000]], [False, True], KINDS, ["random", "auto"], together=2),
)
def test_a_long_list_is_not_passed_over(
    tmp_path: Path, kind: type[EpochGraph], fanouts: list[int], replace: bool, access: str
) -> None:
    g = hub_graph(kind, tmp_path)
    batches = [np.array([1500, 1]), np.array([300, 1500, 2]), np.array([4])]
    sampler = NeighborSampler(g, fanouts, replace=replace, seed=8)
    for n_bytes in (least_bytes(g, sampler.fanouts, 3, is_wide(g)), PLENTY):
        check_window(sampler, g, batches, tmp_path, n_bytes=n_bytes, access=access)


@pytest.mark.parametrize("kind", KINDS)
def test_random_access_asks_for_what_was_drawn_and_nothing_else(tmp_path: Path, kind: type[EpochGraph]) -> None:
    """A position of each target and draw, of lists that are not in memory; no list is streamed."""
    g = kind.of(random_graph(4000, 15).cached(20_000), tmp_path)
    batches = batches_of(np.arange(0, 4000, 3), 90)
    sampler = NeighborSampler(g, [4], seed=1)
    cache = g.neighbor_cache
    degrees = np.diff(g.indptr)
    missing = [k for k in np.concatenate(batches) if cache.offset_of_node[k] < 0]
    expected = int(np.minimum(degrees[missing], 4).sum())
    g.file.n_gathered, n_read = 0, g.file.n_read
    with window_of(sampler, g, batches, tmp_path, access="random") as window:
        window.draw()
        assert window.drawn_reads == expected > 500
        assert window.list_bytes == 0
    assert g.file.n_gathered == expected
    assert g.file.n_read == n_read
    assert not g.file.streams


@pytest.mark.parametrize(("kind", "access", "size"), covering(KINDS, ACCESSES, [2, 30, 700], together=2))
def test_few_targets_in_many_ranges_are_read_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[EpochGraph], access: str, size: int
) -> None:
    """Once a hop, where a window is of few seeds; the batches are those that are sampled alone, in any case."""
    monkeypatch.setattr(window_module, "LEAST_BITS", 4)
    monkeypatch.setattr(window_module, "MOST_BITS", 6)
    base = random_graph(3000, 15)
    for cached in (base, base.cached(20_000)):
        g = kind.of(cached, tmp_path)
        seeds = np.random.default_rng(2).permutation(3000)[:size]
        batches, sampler = [seeds[: size // 2], seeds[size // 2 :]], NeighborSampler(g, [3, 2], seed=5)
        check_window(sampler, g, batches, tmp_path, n_bytes=PLENTY, access=access)
        calls: list[int] = []
        with monkeypatch.context() as patched, window_of(sampler, g, batches, tmp_path, access=access) as window:
            read = g.topology.read_edges
            patched.setattr(g.topology, "read_edges", lambda at, out: calls.append(len(at)) or read(at, out))
            window.draw()
        if access == "random" and size == 2:
            assert 1 <= len(calls) <= 2
        if access == "random" and size == 700:
            assert len(calls) > 2, "the control: what one range may have is not for all"


@given(data=st.data(), wide=st.booleans(), n_range=st.sampled_from([1, 7, 200, 5000, 2**31 - 1]))
def test_targets_are_sorted_by_node(data: st.DataObject, wide: bool, n_range: int) -> None:
    """By counting and by comparing, stable; a node out of range is refused."""
    base, room = data.draw(st.integers(0, 0 if not wide and n_range > 5000 else 1000)), 201
    nodes = data.draw(st.lists(st.integers(0, n_range - 1) | st.integers(0, min(9, n_range - 1)), max_size=200))
    records = np.zeros((len(nodes), 3), np.int64 if wide else np.int32)
    records[:, 0], records[:, 1], records[:, 2] = np.array(nodes, np.int64) + base, np.arange(len(nodes)), 7
    outputs = [np.zeros(room, np.int64), *np.zeros((2, 200), np.uint32), *np.zeros((2, room + 200), np.int64)]

    def sort() -> int:
        return sort_targets(records.view(np.uint8).reshape(-1), wide, base, n_range, *outputs)

    n = sort()
    _, batch, place, found, starts = outputs
    order = np.argsort(np.array(nodes, np.int64), kind="stable")
    distinct, counts = np.unique(nodes, return_counts=True)
    assert (found[:n] - base).tolist() == distinct.tolist()
    if n:
        assert np.diff(starts[: n + 1]).tolist() == counts.tolist()
        assert (starts[0], batch[: len(nodes)].tolist()) == (0, order.tolist())
        assert (place[: len(nodes)] == 7).all()
        records[0, 0] = base - 1
        with pytest.raises(ValueError, match="outside its range"):
            sort()


@pytest.mark.parametrize("kind", KINDS)
def test_what_costs_less_is_chosen(tmp_path: Path, kind: type[EpochGraph]) -> None:
    """A few draws of a long list are read alone; many of it, or short lists side by side, in a pass."""
    g = hub_graph(kind, tmp_path)
    topology, hub = g.topology, np.array([1500])

    def chosen(nodes: Int64s, n_targets: int, *fanouts: int) -> bool:
        return costs_less_drawn(topology, nodes, np.full(len(nodes), n_targets), list(fanouts))

    assert chosen(hub, 1, 5)
    assert chosen(hub, 2, 5, 3)
    assert not chosen(hub, 1, -1)
    assert not chosen(hub, 100_000, 10)
    assert not chosen(np.arange(1500), 1, 5)
    assert not chosen(np.arange(3000), 500, 10)
    assert chosen(np.arange(1495, 1505), 1, 5)
    assert not chosen(hub[:0], 1, 5)
    around, n_targets = np.arange(1438, 1502), np.ones(64, np.int64)  # the long list's node is in the second piece
    n_targets[1] = 100_000
    assert costs_less_drawn(hub_graph(kind, tmp_path, 1 << 20).topology, around, n_targets, [5])
    for nodes, drawn in ((hub, True), (np.arange(1400), False)):
        with window_of(NeighborSampler(g, [5], seed=1), g, [nodes], tmp_path, access="auto") as window:
            window.draw()
            assert (window.drawn_reads > 0) == drawn
            assert (window.list_bytes > 0) != drawn


@pytest.mark.parametrize("topology", ["csc", "chunked"])
def test_the_kernel_reads_less(tmp_path: Path, topology: str) -> None:
    """Of a real file; what is chosen may read more than the drawn pages, but in fewer reads."""
    g = hub_graph(EpochGraph, tmp_path, 1 << 20)
    made: dict[str, Any] = {"topology": topology} | ({"chunk_bytes": "256KiB"} if topology == "chunked" else {})
    x = {"x": np.zeros((g.num_nodes, 1), np.float32)}
    featstore.OutOfCoreGraph.create(tmp_path / "graph", g.indptr, g.indices, features=x, **made).close()
    read: dict[str, int] = {}
    for access in ACCESSES:
        with featstore.open(tmp_path / "graph", memory="64MiB", verify="off") as opened:
            sampler = featstore.EpochSampler(opened, [5, 2], seed=3, access=access)
            alone = NeighborSampler(opened, [5, 2], seed=3)
            before = kernel_bytes()
            taken = sampler.windowed(lambda index: torch.tensor([1500, index]), 0, 0, 3)
            samples = [taken.sample(k) for k in range(3)]
            read[access] = kernel_bytes() - before
            taken.close()
            for k, sample in enumerate(samples):
                assert torch.equal(sample.input_ids, alone.sample(torch.tensor([1500, k]), 0, k).input_ids)
            stats = sampler.stats()
            assert (stats["drawn_reads"] > 0) == (access != "pass")
    assert max(read["random"], read["auto"]) < read["pass"] / 4


def test_damaged_ids_that_are_read_alone_are_named(tmp_path: Path) -> None:
    g = hub_graph(EpochGraph, tmp_path, 5000)
    g.indices[int(g.indptr[1500]) : int(g.indptr[1501])] = 3000
    with (
        window_of(NeighborSampler(g, [5], seed=1), g, [np.array([1500])], tmp_path, access="random") as window,
        pytest.raises(featstore.CorruptionError, match="leads to node 3000 of 3000"),
    ):
        window.draw()


def test_it_is_an_option_of_the_sampler(tmp_path: Path) -> None:
    g = hub_graph(EpochGraph, tmp_path, 500)
    sampler = featstore.EpochSampler(g, [3], access="random")
    assert sampler.access == "random"
    assert sampler.__reduce__()[0].keywords["access"] == "random"
    assert featstore.EpochSampler(g, [3], draws="labor").access == "pass"
    with pytest.raises(ValueError, match="access='random' goes with draws='neighbor', not 'labor'"):
        featstore.EpochSampler(g, [3], draws="labor", access="random")
    with pytest.raises(ValueError, match="access is one of 'auto', 'pass', 'random', not 'never'"):
        featstore.EpochSampler(g, [3], access="never")
