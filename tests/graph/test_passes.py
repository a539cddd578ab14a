"""Passes over the rows of a field: any graph, dtype, memory, topology and number of threads give the bits of one product."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.errors import BudgetError
from featstore.graph import passes
from featstore.graph.passes import OPS, Passes
from featstore.storage.update import Update
from featstore.testing.faults import run_in_child
from featstore.topology.liststream import stream_bytes
from tests.support.whole_graph import aggregated, skewed_graph

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
TOPOLOGIES: tuple[dict[str, Any], ...] = ({}, {"topology": "chunked", "chunk_bytes": 4096})


def features_of(n: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    """Return rows of every dtype, by its name."""
    rng = np.random.default_rng(seed)
    numbers = torch.from_numpy(rng.standard_normal((n, width)) * 10.0 ** rng.integers(-3, 4, (n, width)))
    return {name: numbers.to(getattr(torch, name)) for name in DTYPES}


def least_of(g: featstore.OutOfCoreGraph, name: str, op: str) -> int:
    """Return the bytes without which passes are refused."""
    budget = Budget(1 << 30)
    with pytest.raises(BudgetError) as caught:
        Passes(g.edge_lists(), g.fields.rows_of(name), op, torch.float64, budget, 0, 1, "test")
    assert caught.value.needed is not None
    assert budget.used == 0
    return caught.value.needed - budget.total


def summed(g: featstore.OutOfCoreGraph, name: str, op: str, memory: int, n_threads: int) -> tuple[np.ndarray[Any, Any], int]:
    """Return the rows of all nodes, and how many blocks they came in; nothing more is held than ``memory``."""
    budget, found = Budget(memory), []
    with Passes(g.edge_lists(), g.fields.rows_of(name), op, torch.float64, budget, memory, n_threads, "test") as found_by:
        for block in found_by.blocks():
            assert block.first == sum(map(len, found))
            found.append(block.sums.copy())
        # A list that is taken in stretches has a run read twice where a stretch ends within it.
        extra = g.num_edges * g.topology.id_bytes if g.topology.degrees().max() > 500 else 0
        assert found_by.costs.bytes_read <= found_by.n_blocks * g.features[name].nbytes + extra
        n_blocks = found_by.costs.blocks
    assert budget.peak <= memory
    assert budget.used == 0
    return np.concatenate(found), n_blocks


@settings(max_examples=6)
@given(
    n=st.integers(1, 70),
    mean=st.sampled_from([0, 1, 6, 20]),
    hub=st.sampled_from([0, 9, 3_000]),
    width=st.sampled_from([1, 2, 7, 33]),
    spare=st.sampled_from([0, 500, 5_000, 10**6]),
    seed=st.integers(0, 5),
)
def test_all_memories_and_threads_give_the_bits_of_a_product(tmp_path_factory, n, mean, hub, width, spare, seed) -> None:
    """Every dtype and op, both forms of the adjacency; little memory cuts nodes into blocks, and a long list into stretches."""
    indptr, indices = skewed_graph(n, mean, [n // 2] if hub else [], hub, seed)
    features = features_of(n, width, seed)
    expected = {
        (name, op): aggregated(indptr, indices, x.to(torch.float64).numpy(), op).tobytes()
        for name, x in features.items()
        for op in OPS
    }
    for options in TOPOLOGIES:
        path = tmp_path_factory.mktemp("passes") / "g"
        with featstore.OutOfCoreGraph.create(path, indptr, indices, features, progress=False, memory="16MiB", **options) as g:
            for k, ((name, op), product) in enumerate(expected.items()):
                n_threads = (1, 4)[(k + seed) % 2]
                found, _ = summed(g, name, op, least_of(g, name, op) + spare, n_threads)
                assert found.tobytes() == product, (options, name, op, n_threads)


def test_blocks_are_as_many_as_the_memory_makes_them(tmp_path: Path) -> None:
    """From one block to one a few nodes, and a list that is longer than the memory: the same bits, with any number of threads."""
    n = 120
    indptr, indices = skewed_graph(n, 5, [7], 3_000)
    x = np.random.default_rng(0).standard_normal((n, 40))
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, {"x": x}, progress=False, memory="16MiB") as g:
        for op in OPS:
            expected, counts = aggregated(indptr, indices, x, op).tobytes(), []
            least = least_of(g, "x", op)
            for spare in (0, 10_000, 10**6):
                by_threads = {n_threads: summed(g, "x", op, least + spare, n_threads) for n_threads in (1, 2, 5)}
                assert {found.tobytes() for found, _ in by_threads.values()} == {expected}, (op, spare)
                counts.append({n_blocks for _, n_blocks in by_threads.values()})
            assert all(len(each) == 1 for each in counts)
            n_blocks = [each.pop() for each in counts]
            assert n_blocks == sorted(n_blocks, reverse=True)
            assert n_blocks[0] > 10
            assert n_blocks[-1] == 1


def held(memory: int) -> int:
    """List what lists are read through."""
    block = max(16 << 10, memory // 32)
    return stream_bytes(block) + block


@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.float64])
def test_blocks_are_the_fewest_for_the_memory_of_their_sums(tmp_path: Path, sum_dtype: torch.dtype) -> None:
    """The documented formula where all lists are as long; the best of all cuts, by dynamic programming, where they are not."""
    n, width, degree = 300, 24, 5
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, width)).astype(np.float32)
    regular = np.arange(0, n * degree + 1, degree), rng.integers(0, n, n * degree)
    seen = set()
    for name, (indptr, indices) in {"regular": regular, "skewed": skewed_graph(n, 5, [7, 200], 90)}.items():
        path = tmp_path / name
        with featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False, memory="16MiB") as g:
            per_node = width * sum_dtype.itemsize + 48 + np.diff(indptr) * g.topology.id_bytes
            row = 2 * width * 4  # a row of each of two runs
            for memory in (80_000, 90_000, 110_000, 140_000, 200_000):
                # Runs of a sixteenth of the memory each; shorter ones where that makes blocks fewer by more than they cost.
                rooms = [memory - min(n, memory * 2 // share // row) * row - held(memory) for share in (16, 32, 64)]
                costs = [-(-int(per_node.sum()) // each) * (256 + share) for each, share in zip(rooms, (16, 32, 64), strict=True)]
                room = rooms[int(np.argmin(costs))]
                with Passes(g.edge_lists(), g.fields.rows_of("x"), "sum", sum_dtype, Budget(memory), memory, 1, "test") as made:
                    n_blocks = made.n_blocks
                if name == "regular":
                    assert n_blocks == -(-n // (room // int(per_node[0])))
                    total = int(per_node.sum())
                    assert -(-total // room) <= n_blocks <= -(-total // (room - int(per_node[0])))
                ends, fewest = np.concatenate([[0], np.cumsum(per_node)]), [0]
                for stop in range(1, n + 1):
                    fewest.append(1 + min(fewest[k] for k in range(stop) if ends[stop] - ends[k] <= room))
                assert n_blocks == fewest[-1]
                seen.add(n_blocks)
    assert len(seen) >= 3


def test_every_budget_does_or_names_one_that_does(tmp_path: Path) -> None:
    indptr, indices = skewed_graph(200, 6, [3], 4_000)
    x = np.random.default_rng(0).standard_normal((200, 3_000)).astype(np.float32)
    path = tmp_path / "g"
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False).close()
    expected = torch.from_numpy(aggregated(indptr, indices, x, "gcn")).to(torch.float32)
    refused = []
    for memory in np.geomspace(1 << 20, 16 << 20, 5).astype(int).tolist():
        for _ in range(3):
            try:
                with featstore.open(path, memory=memory) as g:
                    found = g.aggregate("x", "gcn", name="s", overwrite=True, progress=False)[:1]
                    assert g.budget.peak <= memory
                break
            except BudgetError as error:
                assert error.needed > memory, error
                refused.append(memory)
                memory = error.needed
        else:
            raise AssertionError(f"{memory} bytes, which an error named, do not do either")
        assert torch.equal(found, expected[:1])
        with featstore.open(path, memory="64MiB") as g:
            assert torch.equal(g.features["s"][:], expected), memory
    assert refused, "the smallest was enough: nothing was swept"


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def aggregate_watched(folder: str, memory: int, slack: int) -> None:
    path = Path(folder) / "g"
    with featstore.open(path, memory=memory, threads=2) as g:
        g.aggregate("warm", "mean", name="w", progress=False)  # imports, threads' stacks, what allocators keep
    with featstore.open(path, memory=memory, threads=2) as g:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = status("VmRSS")
        g.aggregate("x", "gcn", name="s", progress=False)
        grown = status("VmHWM") - before
        assert g.budget.peak <= memory
    assert memory // 2 < grown <= memory + slack, f"{grown} bytes of memory in a budget of {memory}"


def test_the_process_grows_by_no_more_than_the_budget(tmp_path: Path) -> None:
    """As the kernel counts its pages: what is held and not counted would show."""
    n = 60_000
    indptr, indices = skewed_graph(n, 10, [5], 200_000)
    rng = np.random.default_rng(0)
    features = {"x": rng.standard_normal((n, 128), dtype=np.float32), "warm": np.ones((n, 2), np.float32)}
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, features, progress=False).close()
    run_in_child(aggregate_watched, str(tmp_path), 24 << 20, 4 << 20)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_ctrl_c_while_rows_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_threads: int) -> None:
    """A real signal: threads and memory are given back, the dataset is as it was, its lock is free, and a later call is whole."""
    indptr, indices = skewed_graph(2_000, 5)
    x = np.random.default_rng(0).standard_normal((2_000, 256)).astype(np.float32)
    path = tmp_path / "g"
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False).close()
    real, calls = passes._core.accumulate, [0]

    def accumulate(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    with featstore.open(path, memory="10MiB", threads=n_threads) as g:
        alive = threading.active_count()
        with monkeypatch.context() as patch:
            patch.setattr(passes._core, "accumulate", accumulate)
            with pytest.raises(KeyboardInterrupt):
                g.aggregate("x", "sum", name="s", dtype="float64", progress=False)
        assert calls[0] >= 3
        assert threading.active_count() <= alive
        assert "aggregation" not in g.memory_report()
        assert "s" not in g.features
        with Update(path):
            pass
        found = g.aggregate("x", "sum", name="s", dtype="float64", progress=False)
        g.verify(progress=False)
        rows = torch.cat([found[np.arange(low, low + 500)] for low in range(0, 2_000, 500)])
    assert rows.numpy().tobytes() == aggregated(indptr, indices, x, "sum").tobytes()
