"""Epochs in windows: look-ahead, the next epoch, memory and disk; and what takes its batches so."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import EpochSampler, LaborSampler, NeighborSampler
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.sampling.window import EpochWindow
from featstore.sampling.windowed import WindowedBatches
from tests.load.test_overlap import until
from tests.sampling.test_epochwide import EpochGraph, Int64s, batches_of, window_of
from tests.sampling.test_neighbor import same
from tests.support.array_graphs import random_graph
from tests.support.sampled import covering

WHOLE = 1000  # a window of an epoch; without it batches are drawn alone where lists fit in memory

# ---------------------------------------------------------------- the epoch in windows


def windowed(sampler: EpochSampler, batches: list[Int64s], epoch: int = 0, start: int = 0) -> WindowedBatches:
    return sampler.windowed(lambda k: torch.from_numpy(batches[k]), epoch, start, len(batches))


LABOR: list[dict[str, Any]] = [{}, {"batch_dependency": 4}, {"layer_dependency": True, "redraw": False}]


@pytest.mark.parametrize(
    ("drawing", "window"),
    covering([(NeighborSampler, {}), *((LaborSampler, options) for options in LABOR)], [1, 2, 5, 100, "auto"]),
)
def test_batches_in_turn_equal_batches_alone(
    small: SimpleNamespace, drawing: tuple[Any, dict[str, Any]], window: int | str
) -> None:
    kind, options = drawing
    with featstore.open(small.path, memory="64MiB", threads=2) as g:
        draws = "labor" if kind is LaborSampler else "neighbor"
        sampler, alone = (
            EpochSampler(g, [4, 3], seed=6, window=window, draws=draws, **options),
            kind(g, [4, 3], seed=6, **options),
        )
        batches = batches_of(small.train_idx, 23)
        for epoch, start in ((0, 0), (3, 0), (1, 5), (2, len(batches))):
            with closing(windowed(sampler, batches, epoch, start)) as taken:
                for k in range(start, len(batches)):
                    assert same(taken.sample(k), alone.sample(torch.from_numpy(batches[k]), epoch, k))
        assert "epoch samples" not in {holder for holder, n_bytes in g.memory_report().items() if n_bytes}
    assert not Path(f"{small.path}.runs").exists()


def test_batches_out_of_turn_and_again(small: SimpleNamespace) -> None:
    """By many threads, in any order, some twice: a pure function. A batch whose window is gone is sampled alone."""
    with featstore.open(small.path, memory="64MiB", threads=2) as g:
        batches = batches_of(small.train_idx, 17)
        alone = NeighborSampler(g, [3, 3], seed=1)
        expected = [alone.sample(torch.from_numpy(seeds), 0, k) for k, seeds in enumerate(batches)]
        for window in (1, 3, "auto"):
            order = np.concatenate([np.random.default_rng(2).permutation(len(batches)), np.arange(len(batches))])
            with (
                closing(windowed(EpochSampler(g, [3, 3], seed=1, window=window), batches)) as taken,
                ThreadPoolExecutor(4) as threads,
            ):
                for k, batch in zip(order, threads.map(lambda k: taken.sample(int(k)), order), strict=True):
                    assert same(batch, expected[k])


def test_the_next_window_is_drawn_while_this_one_is_taken(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [threading.Event() for _ in range(4)]
    draw = EpochWindow.draw

    def told(self: EpochWindow) -> None:
        draw(self)
        drawn[self.first // 3].set()

    monkeypatch.setattr(EpochWindow, "draw", told)
    with featstore.open(small.path, memory="64MiB") as g:
        batches = batches_of(small.train_idx, 25)
        with closing(windowed(EpochSampler(g, [2], window=3), batches)) as taken:
            taken.sample(0)
            assert drawn[1].wait(30)
            assert not drawn[2].is_set()  # two windows share the memory
            for k in range(3):
                taken.sample(k)
            assert drawn[2].wait(30)


@pytest.mark.parametrize("window", [5, "auto"])
def test_windows_at_once_share_the_memory(tmp_path: Path, window: int | str) -> None:
    """The one that is taken and the one that is drawn ahead, of the same epoch or of the next: both fit what was reserved."""
    n, rng = 50_000, np.random.default_rng(3)
    indptr, indices = np.arange(0, 12 * n + 1, 12), rng.integers(0, n, 12 * n)
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", indptr, indices, {"x": np.zeros((n, 4), np.float32)}, {"train_idx": rng.permutation(n)[:8000]}
    ).close()
    with featstore.open(tmp_path / "g", memory="64MiB", threads=2) as g:
        batches = batches_of(g.node_data["train_idx"].numpy(), 400)
        with closing(windowed(EpochSampler(g, [8, 8], seed=1, window=window, disk="1MB"), batches)) as taken:
            most = 0
            for k in range(len(batches)):
                taken.sample(k)
                with taken._changed:
                    held = [each.window._n_workers * each.window._shape.nbytes for each in taken._windows]
                assert sum(held) <= taken._memory.n_bytes == g.memory_report()["epoch samples"]
                most = max(most, len(held))
            assert most == 2


def test_a_window_that_nobody_waits_for_leaves_memory_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still while little is free, until somebody waits for it, or there is more."""
    monkeypatch.setattr("featstore.sampling.window.PATIENCE", 1 << 60)  # it gives up only where somebody said so
    g = EpochGraph.of(random_graph(300, 5), tmp_path)
    batches = batches_of(np.arange(100), 10)
    sampler = NeighborSampler(g, [3, 3], seed=2)
    for free in (False, True):
        with window_of(sampler, g, batches, tmp_path) as window, ThreadPoolExecutor(1) as thread:
            window._batch_bytes = g.budget.available
            drawing = thread.submit(window.draw)
            with pytest.raises(concurrent.futures.TimeoutError):  # before Python 3.11 another one than the builtin
                drawing.result(0.2)
            if free:
                window._batch_bytes = 1
            else:
                window.hurry()
            drawing.result(30)
            assert same(window.sample(3), sampler.sample(torch.from_numpy(batches[3]), 0, 3))


def test_a_window_that_is_waited_for_hurries(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried: list[int] = []
    monkeypatch.setattr(EpochWindow, "hurry", lambda self: (hurried.append(self.first), self._is_urgent.set())[0])
    with featstore.open(small.path, memory="64MiB") as g:
        batches = batches_of(small.train_idx, 20)
        with closing(windowed(EpochSampler(g, [10, 10], window=5), batches)) as taken:
            for k in range(len(batches)):
                taken.sample(k)
    assert hurried[0] == 0


def test_closing_stops_drawing_and_sends_waiters_away(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    began, aim = threading.Event(), EpochWindow._aim

    def slowly(self: EpochWindow, *args: Any) -> None:
        began.set()
        until(lambda: self._closed)
        aim(self, *args)

    monkeypatch.setattr(EpochWindow, "_aim", slowly)
    with featstore.open(small.path, memory="64MiB") as g, ThreadPoolExecutor(2) as threads:
        batches = batches_of(small.train_idx, 1)
        taken = windowed(EpochSampler(g, [2, 2]), batches)
        waiting = [threads.submit(taken.sample, k) for k in (0, 1)]
        assert began.wait(30)
        taken.close()
        for each in waiting:
            with pytest.raises(ClosedError):
                each.result()
        taken.close()
        with pytest.raises(ClosedError):
            taken.sample(0)
        assert not [holder for holder, n_bytes in g.memory_report().items() if n_bytes and holder == "epoch samples"]


def test_a_full_disk_is_said_and_the_window_may_be_tried_again(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open(small.path, memory="16MiB", threads=1) as g:
        batches = batches_of(small.train_idx, 10)
        sampler = EpochSampler(g, [-1, -1, 5], window=len(batches), disk="8KiB")
        expected = NeighborSampler(g, [-1, -1, 5]).sample(torch.from_numpy(batches[0]))
        with closing(windowed(sampler, batches)) as taken:
            monkeypatch.setattr("featstore.sampling.windowed.MEMORY_FRACTION", 2**-20)
            for _ in range(2):
                with pytest.raises(OSError, match=r"what is sampled ahead would take .* of a disk budget of 8") as error:
                    taken.sample(0)
                assert error.value.errno == errno.ENOSPC
            monkeypatch.setattr(sampler, "disk", None)
            assert same(taken.sample(0), expected)
        assert not list(Path(f"{small.path}.runs").glob("*"))


def test_windows_that_do_not_fit_the_drive_or_a_quota_of_it_are_halved(
    small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with featstore.open(small.path, memory="16MiB", threads=1) as g:
        batches = batches_of(small.train_idx, 10)
        expected = NeighborSampler(g, [5, 5]).sample(torch.from_numpy(batches[0]))
        codes = [errno.ENOSPC, errno.EDQUOT]
        draw = EpochWindow.draw

        def full(self: EpochWindow) -> None:
            if codes:
                code = codes.pop(0)
                raise OSError(code, os.strerror(code))
            draw(self)

        monkeypatch.setattr(EpochWindow, "draw", full)
        with closing(windowed(EpochSampler(g, [5, 5], window="auto"), batches)) as taken:
            size = taken._divide().size
            assert same(taken.sample(0), expected)
            assert taken._plan.size == size // 4


def test_too_little_memory_names_the_least(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        batches = batches_of(small.train_idx, 10)
        sampler = EpochSampler(g, [5, 5], window=len(batches))
        least = sampler.memory_bytes(len(batches), 10)[0]
        rest = g.budget.reserve("rest", g.budget.available - least + 4096)
        with closing(windowed(sampler, batches)) as taken, pytest.raises(BudgetError) as error:
            taken.sample(0)
        assert error.value.needed is not None
        rest.release()


def test_a_damaged_list_ends_the_epoch(small: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    featstore.OutOfCoreGraph.create(path, small.indptr, small.indices, progress=False).close()
    with featstore.open(path) as g:
        name = g.topology.indices.path
    with open(name, "r+b") as file:
        file.seek(4096 + 2000)
        file.write(b"\xff\xff\xff\x7f")
    with featstore.open(path, memory="64MiB") as g:
        batches = batches_of(np.arange(1000), 100)
        with closing(windowed(EpochSampler(g, [-1]), batches)) as taken, pytest.raises(CorruptionError) as error:
            taken.sample(0)
        assert error.value.filename == name
    with featstore.open(path, memory="64MiB", verify="off") as g:
        with closing(windowed(EpochSampler(g, [-1]), batches)) as taken, pytest.raises(CorruptionError, match="leads to node"):
            taken.sample(0)


def test_options_are_checked_and_kept(small: SimpleNamespace) -> None:
    with featstore.open(small.path) as g:
        for bad in (0, -3, "all", 2.5):
            with pytest.raises((ValueError, TypeError), match="window"):
                EpochSampler(g, [2], window=bad)
        with pytest.raises(ValueError, match="fanouts is empty"):
            EpochSampler(g, [])
        with pytest.raises(ValueError, match="bytes"):
            EpochSampler(g, [2], disk="much")
        sampler = EpochSampler(g, [2, 3], replace=True, seed=4, redraw=False, window=7, disk="1MiB", run_dir="there")
        copy = pickle.loads(pickle.dumps(sampler))
        try:
            assert repr(copy) == repr(sampler) == ("EpochSampler(fanouts=[2, 3], replace=True, seed=4, redraw=False, window=7)")
            assert (copy.disk, copy.run_dir) == (1 << 20, os.path.abspath("there"))
        finally:
            copy.graph.close()


# ---------------------------------------------------------------- what takes its batches


@pytest.mark.usefixtures("no_kept_lists")  # or nothing would be passed over
def test_auto_counts_passes_once(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of eight batches tells the passes of the whole epoch; only the rest grows with the batches."""
    seen: list[tuple[float, float, float]] = []
    observe = featstore.strategies.auto.observe

    def told(trace: Any, **options: Any) -> Any:
        workload = observe(trace, **{**options, "sample_s": 3.0, "passes_s": options["passes_s"] and 2.0})
        seen.append((options["passes_s"], options["sample_s"], workload.sample_s))
        return workload

    monkeypatch.setattr(featstore.strategies.auto, "observe", told)
    with featstore.open(small.path, memory="64MiB") as g:
        for kind in (NeighborSampler, EpochSampler):
            featstore.Loader(g, kind(g, [3, 2], seed=1), small.train_idx, 10, strategy=featstore.Auto(cache=0.1)).close()
    (none, _, scaled), (passes, all_of_it, once) = seen
    assert (none, scaled) == (0.0, pytest.approx(3.0 * 30 / 8))
    assert 0 < passes < all_of_it
    assert once == pytest.approx(2.0 + 1.0 * 30 / 8)


def test_offline_samples_and_counts_are_drawn_in_windows(
    small: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs, and policies that count an epoch's accesses: the same as with a sampler that goes batch by batch."""
    windows: list[tuple[int, int, int]] = []
    draw = EpochWindow.draw
    monkeypatch.setattr(EpochWindow, "draw", lambda self: (windows.append((self._epoch, self.first, self.stop)), draw(self))[1])
    with featstore.open(small.path, memory="64MiB") as g:
        packs = [
            featstore.sample_offline(g, kind(g, [4, 2], seed=3), small.train_idx, 40, epochs=2, path=tmp_path / kind.__name__)
            for kind in (NeighborSampler, EpochSampler)
        ]
        assert windows == [(0, 0, 8), (1, 0, 8)]
        for k in range(2 * packs[0].n_batches):
            assert same(packs[0].batch(k, g.pool), packs[1].batch(k, g.pool))
        for pack in packs:
            pack.close()
        kept = []
        for sampler in (NeighborSampler(g, [4, 2], seed=3), EpochSampler(g, [4, 2], seed=3, window=WHOLE)):
            strategy = featstore.OnDemand(cache=0.2, policy="frequency")
            with featstore.Loader(g, sampler, small.train_idx, 40, strategy=strategy) as loader:
                for batch in loader:
                    del batch
                kept.append(np.flatnonzero(g.features["x"].cache.map.slot_of_row >= 0).tolist())
        assert len(kept[0]) == 200
        assert kept[0] == kept[1]
        assert windows[2:4] == [(0, 0, 8), (0, 0, 8)]  # to count, and to train
        assert set(windows[4:]) <= {(1, 0, 8)}  # that is likely next


@dataclass
class Seen:
    """Windows that were begun, by epoch, and events for when the one of epoch 1 has begun and is drawn."""

    epochs: list[int] = field(default_factory=list)
    done: dict[int, threading.Event] = field(default_factory=lambda: {k: threading.Event() for k in range(9)})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, draw = Seen(), EpochWindow.draw

    def told(self: EpochWindow) -> None:
        found.epochs.append(self._epoch)
        try:
            draw(self)
        finally:
            found.done[self._epoch].set()

    monkeypatch.setattr(EpochWindow, "draw", told)
    return found


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed"])
def test_the_next_epoch_is_drawn_beside_this_one(small: SimpleNamespace, seen: Seen, strategy: str) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        alone = NeighborSampler(g, [4, 3], seed=7)
        with featstore.Loader(
            g, EpochSampler(g, [4, 3], seed=7, window=WHOLE), small.train_idx, 30, strategy=strategy, seed=2
        ) as loader:
            order = featstore.RandomBatches(small.train_idx, 30, seed=2)
            for epoch in range(3):
                for batch in loader:
                    expected = alone.sample(order.epoch(epoch).seeds(batch.index), epoch, batch.index)
                    assert torch.equal(batch.input_ids, expected.input_ids)
                assert seen.done[epoch + 1].wait(30), "the next epoch is not drawn while the loop rests"
            assert [epoch for epoch in seen.epochs if epoch] == [1, 2, 3]
            loader.set_epoch(7)  # what was drawn is of no use
            assert next(iter(loader)).index == 0
            assert seen.epochs[-1] in (7, 8)
            assert 7 in seen.epochs
    assert not Path(f"{small.path}.runs").exists()


def test_what_is_drawn_for_the_next_epoch_is_given_back_where_memory_is_short(small: SimpleNamespace, seen: Seen) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        with featstore.Loader(g, EpochSampler(g, [4, 3], seed=7, window=WHOLE), small.train_idx, 30, seed=2) as loader:
            first = [batch.input_ids.clone() for batch in loader]
            assert seen.done[1].wait(30)
            held = g.memory_report()["epoch samples"]
            with g.budget.reserve("others", g.budget.available + held // 2):
                assert g.memory_report().get("epoch samples", 0) < held // 2
            loader.set_epoch(0)
            assert all(torch.equal(one, batch.input_ids) for one, batch in zip(first, loader, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_draw_ahead_wait_neither_for_themselves_nor_for_each_other(
    small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The ledger may ask any thread to take a loan back, also one that draws what is lent."""
    aim, met, asked = EpochWindow._aim, threading.Barrier(2), list[int]()

    def short(self: EpochWindow, hop: int, worker: int, index: int) -> None:
        if self._epoch == 1 and index == hop == 0:
            met.wait(30)  # two loaders' windows are drawn ahead
            with contextlib.suppress(featstore.BudgetError):
                self._graph.budget.reserve("more than there is", 1 << 40)
            asked.append(index)
            met.wait(30)
        aim(self, hop, worker, index)

    monkeypatch.setattr(EpochWindow, "_aim", short)
    with featstore.open(small.path, memory="64MiB", threads=threads) as g, contextlib.ExitStack() as stack:
        samplers = [EpochSampler(g, [4, 3], seed=seed, window=WHOLE) for seed in (7, 8)]
        loaders = [stack.enter_context(featstore.Loader(g, each, small.train_idx, 30, seed=2)) for each in samplers]
        for loader in loaders:
            for _ in loader:
                pass
        for loader in loaders:
            assert sum(1 for _ in loader) == len(loader)
        assert asked == [0, 0]


def test_a_window_that_lacked_the_memory_of_others_ahead_of_time_takes_it(
    small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for no other has less memory; the loop waits for the window when it fails."""
    draw, epochs = EpochWindow.draw, list[int]()

    def late(self: EpochWindow) -> None:
        epochs.append(self._epoch)
        if self.ahead:
            self._is_urgent.wait(30)
            raise BudgetError("others lend it")
        draw(self)

    monkeypatch.setattr(EpochWindow, "draw", late)
    with featstore.open(small.path, memory="64MiB") as g:
        with featstore.Loader(g, EpochSampler(g, [4, 3], seed=7, window=WHOLE), small.train_idx, 30, seed=2) as loader:
            assert sum(1 for _ in loader) == sum(1 for _ in loader) == len(loader)
    assert epochs[:3] == [0, 1, 1]


def test_what_is_left_of_an_epoch_says_nothing_of_the_next(small: SimpleNamespace, seen: Seen) -> None:
    """A run that is resumed near the end of an epoch draws later epochs in one window all the same."""
    with featstore.open(small.path, memory="64MiB") as g:
        options = {"labels": "y", "seed": 3}
        with featstore.Loader(g, EpochSampler(g, [4, 3], seed=7, window=WHOLE), small.train_idx, 13, **options) as loader:
            for _, batch in zip(range(len(loader) - 1), loader, strict=False):
                del batch
            state = loader.state_dict()
        seen.epochs.clear()
        with featstore.Loader(g, EpochSampler(g, [4, 3], seed=7, window=WHOLE), small.train_idx, 13, **options) as loader:
            loader.load_state_dict(state)
            assert sum(1 for _ in loader) == 1
            for _ in range(3):
                assert sum(1 for _ in loader) == len(loader)
        assert max(seen.epochs.count(epoch) for epoch in (0, 1, 2, 3)) == 1


def test_what_cannot_be_drawn_ahead_fails_no_batch_before_it(small: SimpleNamespace) -> None:
    """An epoch whose successor there is none: all its batches are had, and it closes."""

    def seeds_of(epoch: int) -> Any:
        raise MemoryError(f"epoch {epoch}")

    with featstore.open(small.path, memory="64MiB") as g:
        batches, sampler = batches_of(small.train_idx, 40), EpochSampler(g, [3])
        with g.budget.reserve("epoch samples", 8 << 20) as memory:
            taken = sampler.windowed(lambda k: torch.from_numpy(batches[k]), 0, 0, len(batches), memory, sampler.coming(seeds_of))
            with closing(taken):
                for k in range(len(batches)):
                    taken.sample(k)


def test_a_window_that_failed_ahead_of_time_is_drawn_again(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, draw = list[int](), EpochWindow.draw

    def once(self: EpochWindow) -> None:
        if self._epoch == 1 and not failed:
            failed.append(self._epoch)
            raise BudgetError("others had the memory")
        draw(self)

    monkeypatch.setattr(EpochWindow, "draw", once)
    with featstore.open(small.path, memory="64MiB") as g:
        with featstore.Loader(g, EpochSampler(g, [4, 3], seed=7, window=WHOLE), small.train_idx, 30, seed=2) as loader:
            assert sum(1 for _ in loader) == sum(1 for _ in loader) == len(loader)
    assert failed == [1]


def test_a_loader_left_early_leaves_nothing(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="32MiB") as g:
        sampler = EpochSampler(g, [5, 5], window=2)
        for strategy in ("ondemand", "superbatch", "streamed", "ginex"):
            with featstore.Loader(g, sampler, small.train_idx, 20, strategy=strategy) as loader:
                for _ in range(2):
                    batches = iter(loader)
                    next(batches)
                    del batches
        assert not {holder for holder, n_bytes in g.memory_report().items() if n_bytes} & {"epoch samples"}
    assert not list(Path(f"{small.path}.runs").glob("*"))
