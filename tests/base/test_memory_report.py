"""The report of the memory: its form, the name of every loan of the library, since when it is out, and reports beside a loop."""

from __future__ import annotations

import json
import pickle
import re
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget, HeldMemory, MemoryReport
from featstore.cache.table import FeatureCache
from featstore.estimate.batchsize import measure
from featstore.gather import buffers
from featstore.gather.buffers import BufferPool
from featstore.plan.samples import KeptIds
from featstore.sampling.macrolists import HOLDER as LISTS
from featstore.sampling.macrolists import macro_lists
from featstore.sampling.sampledbatches import Drawn
from featstore.strategies.switch import FEATURES, NEIGHBORS
from tests.sampling.test_partitionbatches import N
from tests.support.loaders import make_loader
from tests.topology.test_chunks import chunked, graph_with
from tests.topology.test_partlists import path

__all__ = ["path"]  # a fixture

ROOT = Path(featstore.__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:strategy 'streamed':featstore.PerformanceWarning")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The ledger's clock: ``now``, in seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("featstore.budget.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def lent(budget: Budget) -> dict[str, float]:
    """Seconds for which each holder has had memory on loan; nothing changes meanwhile."""
    report = budget.report()
    loans = [loan for loan in budget._loans if loan.n_bytes]
    assert sum(loan.n_bytes for loan in loans) == report.on_loan == budget.on_loan, "a loan without its holder's name"
    assert {holder for loan in loans for holder, n_bytes in loan.by_holder().items() if n_bytes} == {
        name for name, held in report.holders.items() if held.on_loan_bytes
    }
    return {name: held.on_loan_s for name, held in report.holders.items() if held.on_loan_bytes}


def lenders(budget: Budget) -> set[str]:
    """Modules that have memory on loan."""
    return {loan._size.__module__ for loan in budget._loans if loan.n_bytes}


def take_all(budget: Budget) -> None:
    """Take every loan back, for a moment."""
    with budget.reserve("others", budget.available + budget.on_loan):
        assert not lent(budget)


def test_a_report_is_a_mapping_of_bytes(clock: SimpleNamespace) -> None:
    budget = Budget(10 << 20)
    kept = KeptIds(budget)
    kept.append(np.arange(1 << 18, dtype=np.int32))
    budget.reserve("indptr", 2 << 20)
    budget.reserve("indptr", 1 << 20)
    budget.reserve("gone", 4 << 20).release()
    clock.now += 2.25
    report = budget.report()
    assert report == {"indptr": 3 << 20, "sampled ids": 1 << 20}
    assert list(report) == ["indptr", "sampled ids"]
    assert json.loads(json.dumps(dict(report))) == {**report}
    assert (report["indptr"], report.get("gone", 0), len(report), "gone" in report) == (3 << 20, 0, 2, False)
    assert report.holders == {"indptr": HeldMemory(3 << 20), "sampled ids": HeldMemory(1 << 20, 1 << 20, 2.25)}
    assert (report.total, report.used, report.available) == (10 << 20, 4 << 20, 6 << 20)
    assert (report.on_loan, report.peak) == (1 << 20, 8 << 20)
    assert str(report).splitlines() == [
        "holder           held   on loan    for",
        "indptr       3.00 MiB",
        "sampled ids  1.00 MiB  1.00 MiB  2.2 s",
        "4.00 MiB of 10.00 MiB are held, 1.00 MiB of them on loan; at most 8.00 MiB were held",
    ]
    assert repr(report) == str(report)
    assert '<td style="text-align: right">3.00 MiB</td>' in report._repr_html_()
    assert pickle.loads(pickle.dumps(report)).holders == report.holders
    with pytest.raises(AttributeError):
        report.peak = 0  # type: ignore[misc]
    kept.drop()
    assert report["sampled ids"] == 1 << 20, "it is of its moment"
    assert str(MemoryReport({}, 5, 0)).splitlines() == ["0 B of 5 B are held, 0 B of them on loan; at most 0 B were held"]


MADE: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    # options; holders whose memory an epoch uses, so that it is lent anew after it; others
    "on demand": ({"strategy": "ondemand"}, set(), {"cache of 'x'"}),
    "superbatch": ({"strategy": "superbatch", "length": 3}, {"planner", "read ahead"}, {"cache of 'x'"}),
    "streamed": ({"strategy": "streamed", "length": 3}, {"planner", "packing", "extents read ahead"}, {"cache of 'x'"}),
    "ginex": ({"strategy": "ginex", "length": 3}, {FEATURES, "planner"}, set()),
    "packed": ({"strategy": "packed"}, {"extents read ahead"}, {"cache of 'x'"}),
    "epoch": ({"strategy": "ondemand", "cache": None}, {"epoch samples"}, set()),
}


@pytest.mark.parametrize("name", MADE)
def test_loans_of_a_loader(small: SimpleNamespace, tmp_path: Path, clock: SimpleNamespace, name: str) -> None:
    """Made at 0 s; all is taken back; lent anew by an epoch from 6 to 7 s, and what the next one uses again at 20 s."""
    options, used, others = MADE[name]
    options = {"cache": "auto", "labels": None, "prefetch": 1, "threads": 1, **options}
    with featstore.open(small.path, memory="64MiB") as g, ExitStack() as stack:
        kind = partial(featstore.EpochSampler, window=1000) if name == "epoch" else featstore.NeighborSampler
        options["sampler"] = kind(g, [5, 5], seed=1)
        options["seeds"], options["batch_size"] = np.arange(0, small.num_nodes, 3), 30
        if name == "packed":
            given = [options.pop("sampler"), options.pop("seeds"), options.pop("batch_size")]
            options["pack"] = stack.enter_context(featstore.sample_offline(g, *given, path=tmp_path / "p"))
        loader = stack.enter_context(make_loader(g, **options))
        start = clock.now
        clock.now = start + 5
        lists = set() if name in ("ginex", "packed") else {"neighbor cache"}  # until they are taken back
        assert lent(g.budget) == dict.fromkeys(used | others | lists, 5)
        take_all(g.budget)
        clock.now = start + 6
        for _ in loader:
            clock.now = start + 7
        del _
        g.pool.trim()  # the buffers of its batches
        clock.now = start + 10
        g.pool.trim()
        assert lent(g.budget) == {**dict.fromkeys(used, 3), **dict.fromkeys(others, 4)}  # since it ended, since it began
        clock.now = start + 20
        sum(1 for _ in loader)
        g.pool.trim()
        clock.now = start + 21
        g.pool.trim()
        assert lent(g.budget) == {**dict.fromkeys(used, 1), **dict.fromkeys(others, 15)}
        modules = {FEATURES: "switch", "cache of 'x'": "table"}
        assert {each.rpartition(".")[2] for each in lenders(g.budget)} == {
            modules.get(each, "epochmemory") for each in used | others
        }
        loader.close()
        assert not lent(g.budget).keys() - {"cache of 'x'"}


def test_what_an_epoch_uses_is_not_on_loan(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=1)
        seeds = np.arange(0, small.num_nodes, 3)
        with featstore.Loader(
            g, sampler, seeds, 30, labels=None, strategy=featstore.Superbatch(length=3, cache="auto")
        ) as loader:
            for _ in loader:
                held = g.memory_report().holders
                assert held["planner"].on_loan_bytes == held["read ahead"].on_loan_bytes == 0
                assert held["cache of 'x'"].on_loan_bytes == held["cache of 'x'"].bytes


def test_a_share_that_a_neighbor_cache_has_is_not_on_loan(small: SimpleNamespace) -> None:
    """A loan follows the name of its reservation."""
    reports: list[MemoryReport] = []
    with featstore.open(small.path, memory="64MiB") as g:

        class Watched(featstore.NeighborSampler):
            def sample(self, *args: Any, **kwargs: Any) -> Any:
                reports.append(g.memory_report())
                return super().sample(*args, **kwargs)

        options: dict[str, Any] = {"strategy": "ginex", "length": 3, "cache": "auto", "threads": 1, "labels": None}
        with make_loader(g, Watched(g, [5, 5], seed=1), np.arange(0, small.num_nodes, 3), 30, **options) as loader:
            sum(1 for _ in loader)
        held = [report.holders[NEIGHBORS] for report in reports if NEIGHBORS in report]
        assert held
        assert not any(each.on_loan_bytes for each in held)


def test_a_cache_that_is_being_loaded_is_not_on_loan(clock: SimpleNamespace) -> None:
    budget = Budget(1 << 20)
    cache = FeatureCache(50, 24, 200, None, budget=budget)
    cache.lend()

    def read(rows: np.ndarray, out: np.ndarray) -> None:
        assert not lent(budget)
        clock.now += 5
        out[:] = 0

    cache.preload(np.arange(10), read)
    clock.now += 1
    assert lent(budget) == {"feature cache": 1}
    cache.close()
    assert budget.report() == {}


def test_the_loan_of_offset_pages(clock: SimpleNamespace) -> None:
    budget = Budget(64 << 20)
    topology = chunked(*graph_with([1] * 400_000, np.int32), 1 << 16, budget)
    clock.now += 4
    assert lent(budget) == {"offset pages": 4}
    assert lenders(budget) == {"featstore.topology.offsetpages"}
    take_all(budget)
    topology.offsets(np.arange(400_000))
    assert not lent(budget), "once taken back they are not lent anew"
    topology.close()


def test_the_loan_of_lists_of_parts(path: Path, clock: SimpleNamespace) -> None:
    with featstore.open(path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [5, 4])
        batches = featstore.PartitionBatches(g, np.arange(N), 100, "planted", macro=4)
        drawn = Drawn(sampler, batches, macro_lists(g, sampler, batches))
        lists, order = drawn.lists, batches.epoch(0)
        assert lists is not None
        clock.now += 1
        lists.use(lists.useful_bytes)
        clock.now += 4
        assert lent(g.budget) == {LISTS: 4}
        assert lenders(g.budget) == {"featstore.sampling.macrolists"}
        with lists.of(0, order, 0):
            assert g.memory_report().holders[LISTS].on_loan_bytes == lists.useful_bytes // 2
            with lists.of(0, order, len(order) - 1):
                assert not lent(g.budget)
            clock.now += 1
            assert lent(g.budget) == {LISTS: 1}
        assert lent(g.budget) == {LISTS: 1}
        take_all(g.budget)
        clock.now += 1
        lists.begin()
        clock.now += 1
        assert lent(g.budget) == {LISTS: 1}
        drawn.close()


def test_the_loan_of_neighbor_lists(small: SimpleNamespace, clock: SimpleNamespace) -> None:
    """One at a time, whatever was given back and made again."""
    with featstore.open(small.path, memory="64MiB") as g:
        for _ in range(2):
            g.cache_neighbors()
            assert not lent(g.budget)
            g.neighbor_lists.lend()
            clock.now += 3
            assert lent(g.budget) == {"neighbor cache": 3}
            assert lenders(g.budget) == {"featstore.graph.neighborlists"}
            held = g.memory_report().holders["neighbor cache"]
            assert held.on_loan_bytes == held.bytes
            take_all(g.budget)
            assert g.neighbor_cache is None
            assert not lent(g.budget)
        g.cache_neighbors()
        g.neighbor_lists.lend()
        g.cache_neighbors(0)
        assert not lent(g.budget)


def test_the_loan_of_sampled_ids(clock: SimpleNamespace) -> None:
    budget = Budget(1 << 20)
    kept = KeptIds(budget)
    clock.now += 1
    kept.append(np.arange(1_000))
    clock.now += 1
    kept.append(np.arange(1_000))
    clock.now += 1
    assert lent(budget) == {"sampled ids": 2}
    assert lenders(budget) == {"featstore.plan.samples"}
    take_all(budget)
    assert not budget.used
    kept.drop()
    assert not budget._loans, "one a superbatch would stay"


def test_the_loan_of_a_batch_that_was_sampled_to_know_its_size(small: SimpleNamespace, clock: SimpleNamespace) -> None:
    """No more than the budget counts of it: small tensors are ordinary memory."""
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [20, 20], replace=True, seed=1)
        drawn = Drawn(sampler, featstore.RandomBatches(np.arange(small.num_nodes), 500), None)
        measure(g, drawn)
        clock.now += 3
        assert lent(g.budget) == {"batch buffers": 3}
        assert lenders(g.budget) == {"featstore.estimate.batchsize"}
        held = g.memory_report().holders["batch buffers"]
        assert held.on_loan_bytes == held.bytes
        batch = drawn.epoch(0).sample(0)
        assert not lent(g.budget)
        assert g.memory_report()["batch buffers"] == held.bytes
        assert sum(tensor.nbytes for tensor in batch.tensors) > 0


def test_the_loan_of_idle_buffers(clock: SimpleNamespace) -> None:
    """From when the first of them is idle; whoever reserves gets as much as they are, and no more than needed."""
    budget = Budget(8 << 20)
    pool = BufferPool(budget)
    tensors = [pool.tensor((1 << 20,), torch.uint8) for _ in range(8)]
    clock.now += 5
    assert not lent(budget)
    del tensors[2:]
    clock.now += 1
    assert lent(budget) == {"batch buffers": 0}
    clock.now += 3
    del tensors[1:]
    assert lent(budget) == {"batch buffers": 3}
    assert lenders(budget) == {"featstore.gather.buffers"}
    assert budget.report().holders["batch buffers"].on_loan_bytes == 7 << 20
    with budget.reserve("somebody", 3 << 20):
        assert budget.report().holders["batch buffers"].on_loan_bytes == 4 << 20
        with pytest.raises(featstore.BudgetError):
            budget.reserve("somebody", (4 << 20) + 1)
        assert tensors[0].nbytes == budget.report()["batch buffers"] == 1 << 20
    pool.trim()
    assert not lent(budget)


def test_the_loan_of_edge_weights(clock: SimpleNamespace, tmp_path: Path) -> None:
    edges, w = np.array([[0, 1, 2], [1, 2, 0]]), np.ones(3, np.float32)
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, 3, edge_features={"w": w}, progress=False) as g:
        sampler = featstore.NeighborSampler(g, [2], weight="w")
        clock.now += 5
        assert lent(g.budget) == {"edge weights": 5}
        assert lenders(g.budget) == {"featstore.sampling.listweights"}
        take_all(g.budget)
        assert "edge weights" not in g.memory_report()
        assert sampler.sample([0]).input_ids.tolist() == [0, 2]


def test_no_loan_is_left_out() -> None:
    """Whoever adds one adds a test of its name here."""
    tested: dict[str, Callable[..., None]] = {
        "cache/table.py": test_loans_of_a_loader,
        "epochmemory.py": test_loans_of_a_loader,
        "strategies/switch.py": test_loans_of_a_loader,
        "topology/offsetpages.py": test_the_loan_of_offset_pages,
        "sampling/listweights.py": test_the_loan_of_edge_weights,
        "sampling/macrolists.py": test_the_loan_of_lists_of_parts,
        "graph/neighborlists.py": test_the_loan_of_neighbor_lists,
        "gather/buffers.py": test_the_loan_of_idle_buffers,
        "plan/samples.py": test_the_loan_of_sampled_ids,
        "estimate/batchsize.py": test_the_loan_of_a_batch_that_was_sampled_to_know_its_size,
    }
    lending = re.compile(r"\.lend\(self\.")
    found = {str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if lending.search(file.read_text())}
    assert found == tested.keys()


@pytest.mark.parametrize("strategy", ["streamed", "ginex"])
def test_a_report_beside_a_loop_agrees_with_itself(small: SimpleNamespace, strategy: str) -> None:
    with featstore.open(small.path, memory="32MiB") as g:
        sampler, seeds = featstore.NeighborSampler(g, [5, 5], seed=1), np.arange(0, small.num_nodes, 2)
        options: dict[str, Any] = {"strategy": strategy, "length": 3}
        reports, over = list[MemoryReport](), threading.Event()

        def report() -> None:
            while not over.is_set():
                reports.append(g.memory_report())

        thread, interval = threading.Thread(target=report), sys.getswitchinterval()
        with make_loader(g, sampler, seeds, 20, features=["x", "h"], labels=None, cache="auto", **options) as loader:
            sys.setswitchinterval(1e-4)
            thread.start()
            try:
                for _ in range(2):
                    for batch in loader:
                        assert torch.equal(batch.x, torch.from_numpy(small.x)[batch.input_ids])
            finally:
                over.set()
                sys.setswitchinterval(interval)
                thread.join()
        assert reports
        for each in reports:
            assert each.used == sum(each.values()) <= each.peak <= each.total
            assert all(held.on_loan_bytes <= held.bytes for held in each.holders.values())
            for name in ("x", "h"):  # a cache is on loan whole, or not
                cache = each.holders.get(f"cache of '{name}'", HeldMemory(0))
                assert cache.on_loan_bytes in (0, cache.bytes)
        assert any(each.on_loan for each in reports)


def test_what_malloc_keeps_goes_back_where_the_budget_has_little_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times a second at most; no budget counts it."""
    clock, calls = [100.0], []
    monkeypatch.setattr(buffers, "_malloc_trim", calls.append)
    monkeypatch.setattr(buffers.time, "monotonic", lambda: clock[0])
    budget = Budget(64 << 20)
    pool = BufferPool(budget)
    pool.array(1 << 20, np.uint8)
    assert not calls, "most of the budget is left"
    with budget.reserve("others", 60 << 20):
        for seconds, n in ((0.1, 0), (0.2, 1), (0.2, 1), (0.1, 2)):
            clock[0] += seconds
            pool.array(1 << 20, np.uint8)
            assert len(calls) == n
    pool.trim()
    assert len(calls) == 3
