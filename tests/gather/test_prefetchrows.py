"""Prefetched rows: every batch gets the rows its plan misses, whatever the groups; errors come at the batch they belong to."""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget, Reservation
from featstore.errors import BudgetError
from featstore.gather.counters import GatherCounts
from featstore.gather.executor import execute
from featstore.gather.plan import BatchPlan, Tier, TierRows
from featstore.gather.prefetchrows import RowPrefetcher
from featstore.gather.sources import MemorySource
from featstore.storage.rowfile import ReadStats
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader

N = 500
DATA = {
    "x": np.arange(N * 64, dtype=np.int64).view(np.uint8).reshape(N, 512),
    "z": np.random.default_rng(0).integers(0, 256, (N, 5), dtype=np.uint8),
}


class Fields:
    """Two features in memory whose reads are noted, and fail where ``broken`` is among the rows."""

    def __init__(self, broken: int = -1) -> None:
        self.calls: list[int] = []
        self.broken = broken
        self.counted = ReadStats()

    def read(self, name: str) -> Any:
        def read(rows: Any, out: Any, *_: Any) -> ReadStats:
            if self.broken in rows:
                raise OSError(errno.EIO, "broken")
            self.calls.append(len(rows))
            out[:] = DATA[name][rows]
            return ReadStats(rows=len(rows))

        return read

    def ahead(self, misses: Any, start: int, stop: int, n_bytes: int) -> RowPrefetcher:
        widths = {name: data.shape[1] for name, data in DATA.items()}
        ahead = RowPrefetcher(misses, {name: self.read(name) for name in DATA}, widths, start, stop, n_bytes, self.counted.add)
        ahead.begin()
        return ahead


@given(
    st.lists(st.lists(st.integers(0, N - 1), max_size=12).map(lambda rows: np.array(rows, np.int64)), max_size=30),
    st.sampled_from([0, 8192, 12288, 40960, 1 << 20]),
    st.integers(0, 3),
    st.integers(0, 7),
)
def test_every_batch_gets_what_it_misses(batches: list[Any], n_bytes: int, start: int, not_planned: int) -> None:
    """Also where plans come late, batches have no misses, or do not fit the memory."""
    fields, asked = Fields(), []
    start = min(start, len(batches))

    def misses(position: int, wait: bool, most: int) -> Any:
        if not wait and position % 8 == not_planned:
            return None
        if len(batches[position]) > most:
            return len(batches[position])
        asked.append(position)
        return batches[position]

    ahead = fields.ahead(misses, start, len(batches), n_bytes)
    try:
        most_rows = n_bytes // 2 // 4096 * 4096 // 517
        for position in range(start, len(batches)):
            for name in ("x", "z", "x"):
                rows = ahead.take(position, name)
                if len(batches[position]) > most_rows:
                    assert rows is None
                else:
                    assert rows is not None
                    assert np.array_equal(rows, DATA[name][batches[position]])
            ahead.passed(position)
    finally:
        ahead.close()
    taken = [len(rows) for rows in batches[start:] if len(rows) <= most_rows]
    assert fields.counted.rows == 2 * sum(taken)
    assert len(fields.calls) <= 2 * len(taken)
    assert len(asked) == len(set(asked))  # no plan is read twice


def test_batches_share_a_read_and_two_groups_lie_ready() -> None:
    batches = [np.arange(8 * b, 8 * b + 8) for b in range(20)]
    fields = Fields()
    ahead = fields.ahead(
        lambda position, wait, most: batches[position] if most >= 8 else 8, 0, 20, 2 * 5 * 4096
    )  # 39 rows a half
    try:
        for position in range(20):
            ahead.take(position, "x")
            if position == 0:
                ahead.take(7, "x")  # the second group does not wait for the first to be passed
            assert len(fields.calls) <= 2 * (position // 4 + 2)  # and a third does
            ahead.passed(position)
    finally:
        ahead.close()
    assert fields.calls == [32, 32] * 5


def test_an_error_comes_with_its_batch_and_closing_wakes_who_waits() -> None:
    batches = [np.array([b]) for b in range(10)]
    ahead = Fields(broken=6).ahead(lambda position, wait, most: batches[position] if wait else None, 0, 10, 1 << 16)
    for position in range(6):
        assert np.array_equal(ahead.take(position, "z"), DATA["z"][[position]])
        ahead.passed(position)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            ahead.take(6, "x")
    ahead.close()
    ahead.close()

    unplanned = threading.Event()
    waiting = Fields().ahead(lambda position, wait, most: unplanned.wait(30) and None, 0, 10, 1 << 16)
    found: list[Any] = []
    taker = threading.Thread(target=lambda: found.append(waiting.take(0, "x")))
    taker.start()
    unplanned.set()  # the epoch is over: there will be no plan
    waiting.close()
    taker.join(30)
    assert found == [None]


def test_rows_read_ahead_are_those_that_the_plan_misses() -> None:
    rows, positions = np.array([7, 5, 6]), np.array([3, 0, 1])
    parts = (TierRows(Tier.HOST, np.array([4]), np.array([2])), TierRows(Tier.BASE, rows, positions))
    plan = BatchPlan(4, parts).read_ahead(3)
    assert plan.parts == (parts[0], TierRows(Tier.AHEAD, range(3), positions))
    out, counts = np.zeros((4, 5), np.uint8), GatherCounts()
    execute(plan, {Tier.AHEAD: MemorySource(DATA["z"][:3].copy(), 1)}, out, frozenset({Tier.AHEAD}), counts)
    assert np.array_equal(out[[3, 0, 1]], DATA["z"][:3])
    counts.count_plan(plan)
    assert counts.rows == {Tier.HOST: 1, Tier.BASE: 3}
    with pytest.raises(ValueError, match="2 rows were read ahead for a plan that misses 3"):
        BatchPlan(4, parts).read_ahead(2)


def created(path: Path, width: int) -> np.ndarray[Any, Any]:
    """Create a dataset of 3,000 nodes; return its feature."""
    n = 3000
    x = np.random.default_rng(0).standard_normal((n, width)).astype(np.float32)
    data = {"train_idx": np.arange(0, n, 3)}
    featstore.OutOfCoreGraph.create(path, *make_graph(n, 8.0), {"x": x}, data, progress=False).close()
    return x


@pytest.mark.parametrize("strategy", ["superbatch", "ginex"])
def test_a_loader_reads_ahead(tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer gathers than batches, none but them; an error reaches the loop after the batches before it."""
    x = created(tmp_path / "g", 8)  # many rows fit the planner's memory
    with featstore.open(tmp_path / "g", memory="16MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 40, "labels": None, "length": 10, "cache": 0.1, "strategy": strategy}
        store = g.features["x"]
        inner, calls, fail_at = store.source.gather, [], [-1]

        def read(rows: Any, out: Any, *_: Any) -> ReadStats:
            calls.append(len(rows))
            if len(calls) == fail_at[0]:
                raise OSError(errno.EIO, "broken")
            return inner(rows, out)

        monkeypatch.setattr(store.source, "gather", read)
        with make_loader(g, sampler, g.node_data["train_idx"], **options) as loader:
            assert g.memory_report().get("read ahead", 0) > 0 or strategy == "ginex"  # else it is the planner's
            before = store.stats()["rows_loaded"]
            for batch in loader:
                assert torch.equal(batch.x, torch.from_numpy(x)[batch.input_ids])
            assert len(calls) < len(loader)
            assert sum(calls) == loader.stats()["rows_loaded"] == store.stats()["rows_loaded"] - before
            fail_at[0] = len(calls) + 3
            loader.set_epoch(0)
            delivered = 0
            with pytest.raises(OSError, match="broken"):
                for batch in loader:
                    assert batch.index == delivered
                    delivered += 1
            assert 0 < delivered < len(loader)
        assert "read ahead" not in g.memory_report()


def test_what_was_read_ahead_is_given_back() -> None:
    """While there is something, while a read is under way, while a plan is waited for; after memory was short; only once."""
    batches = [np.array([b, b + 1]) for b in range(10)]
    fields, reading, go_on = Fields(), threading.Event(), threading.Event()

    def misses(position: int, wait: bool, most: int) -> Any:
        return batches[position] if wait and position < 4 else (go_on.wait(30) and None if wait else None)

    ahead = fields.ahead(misses, 0, 10, 1 << 16)
    assert ahead.take(1, "x") is not None
    ahead.passed(0)
    assert ahead.give_back()
    assert ahead._memory is None
    assert [ahead.take(position, "x") for position in range(10)] == [None] * 10
    assert not ahead.give_back()
    go_on.set()
    ahead.close()

    class Slow(Fields):
        def read(self, name: str) -> Any:
            inner = super().read(name)

            def read(rows: Any, out: Any, *_: Any) -> ReadStats:
                reading.set()
                assert go_on.wait(30)
                return inner(rows, out)

            return read

    go_on.clear()
    ahead = Slow().ahead(lambda position, wait, most: batches[position] if wait else None, 0, 10, 1 << 16)
    assert reading.wait(30)
    found: list[bool] = []
    giver = threading.Thread(target=lambda: found.append(ahead.give_back()))
    giver.start()
    assert not found  # the read goes into the memory: it is waited for
    go_on.set()
    giver.join(30)
    assert found == [True]
    assert ahead._memory is None
    assert not ahead._groups
    assert ahead.take(0, "x") is None
    ahead.close()

    assert not fields.ahead(misses, 0, 0, 0).give_back()


def test_a_shortage_of_memory_costs_one_batch_its_rows_read_ahead() -> None:
    fields, short = Fields(), [0, 2]

    def misses(position: int, wait: bool, most: int) -> Any:
        return np.array([position]) if wait else None

    def read(rows: Any, out: Any) -> ReadStats:
        if rows[0] in short:
            short.remove(rows[0])
            raise BudgetError("no memory", 1)
        return fields.read("x")(rows, out)

    ahead = RowPrefetcher(misses, {"x": read}, {"x": 512}, 0, 4, 1 << 16, fields.counted.add)
    ahead.begin()
    for position in range(4):
        rows = ahead.take(position, "x")
        assert (rows is None) == (position in (0, 2))
        assert rows is None or np.array_equal(rows, DATA["x"][[position]])
        ahead.passed(position)
    assert not short
    ahead.close()


def all_of(budget: Budget) -> Reservation:
    """Take what is left of a budget that threads reserve from at the same time."""
    while True:
        with contextlib.suppress(BudgetError):
            return budget.reserve("test", budget.available)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_reading_ahead_makes_room_for_a_batch(tmp_path: Path, prefetch: int) -> None:
    """If the budget has nothing else left, the epoch goes on without it; the next one has it again."""
    x = created(tmp_path / "g", 256)
    with featstore.open(tmp_path / "g", memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 40, "labels": None, "length": 5, "cache": 0.1, "prefetch": prefetch}
        with make_loader(g, sampler, g.node_data["train_idx"], strategy="superbatch", **options) as loader:
            had = g.memory_report()["read ahead"]
            assert had > 0
            for _ in range(2):
                assert g.memory_report()["read ahead"] == had
                kept, hogs, least = [], [], had
                for batch in loader:
                    assert torch.equal(batch.x, torch.from_numpy(x)[batch.input_ids])
                    least = min(least, g.memory_report().get("read ahead", 0))
                    if least:  # nothing that the loop had comes back, and nothing else is left
                        kept.append(batch)
                        hogs.append(all_of(g.budget))
                    else:
                        kept.clear()
                assert least == 0
                for hog in hogs:
                    hog.release()
                loader.set_epoch(0)
                next(iter(loader))
        assert g.budget.peak <= g.budget.total
