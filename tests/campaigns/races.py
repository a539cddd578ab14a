"""Races: eight threads begin, abandon, close, fork and interrupt loops of every strategy, on a shared graph and on their own.

``python -m tests.campaigns.races --seconds 600`` runs them whole. ``--seed S --first R`` begins with round ``R`` of that seed:
each thread draws the same acts again, one after the other, though when they meet is up to the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import glob
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import featstore
from featstore.storage import drive
from featstore.testing.faults import forked
from tests.campaigns.checks import report
from tests.campaigns.interrupts import at_moment, expect_interrupts
from tests.campaigns.test_failing_calls import files_in
from tests.support.frozen import BATCH, N_BATCHES, STRATEGIES, THREADS, digest_of, make_dataset, make_loader_of, make_pack
from tests.support.library_threads import going_on, remaining, tasks
from tests.system.test_faults import descriptors

__all__ = ["Races", "grown_bytes", "races"]

N_THREADS = 8
N, DIM = 3_000, 24
ROUND_S = 10.0  # all threads end after each; what is left is counted then
PATIENCE_S = 120.0  # for the acts that are under way when a round is over, and for a forked child; more is a hang
GROWTH_BYTES = 24 << 20  # of memory, in all rounds after those that warm up
AMPLE, TIGHT = 512 << 20, (2 << 20, 4 << 20, 12 << 20)
SAMPLERS = ("neighbor", "labor", "layer", "epoch", "edges")
POLICIES = ("lru", "sieve", "clock", "degree")
ENDINGS = ("whole", "whole", "forked", "two at once", "abandoned", "closed", "closed with its loader", "closed with its graph")


class Races:
    """A dataset, its packs, the batches that all loaders must deliver, and the graph that threads share."""

    def __init__(self, folder: str, seed: int) -> None:
        self.seed, self.dropped, root = seed, expect_interrupts(), Path(folder)
        self.path = make_dataset(root / "graph", N, DIM, edge_dim=4, n_many=BATCH)
        self.packs = {sampler: make_pack(root / f"{sampler}.pack", self.path, sampler) for sampler in SAMPLERS}
        self.expected = {}
        with featstore.open(self.path, memory=AMPLE, threads=THREADS) as g:
            self.x = g.features["x"][:].clone()
            for sampler in SAMPLERS:
                with make_loader_of(g, sampler, featstore.OnDemand(), **edges_of(sampler)) as loader:
                    self.expected[sampler] = [[digest_of([batch]) for batch in loader] for _ in range(2)]
        self.counts = Counter[str]()
        self.wrong = list[str]()
        self._shared: featstore.OutOfCoreGraph | None = None
        self._lock = threading.Lock()

    # -- graphs ------------------------------------------------------------------------------------------------------------------

    def shared(self, draws: random.Random, share_replaced: float = 0.04) -> featstore.OutOfCoreGraph:
        """Return the graph that all threads use; now and then open it again, and close the one that others are using."""
        with self._lock:
            before, found = None, self._shared
            if found is None or found.closed or draws.random() < share_replaced:
                before, found = found, self.opened(draws)
                self._shared = found
        if before is not None:
            before.close()
        return found

    def opened(self, draws: random.Random) -> featstore.OutOfCoreGraph:
        memory = draws.choice((AMPLE, AMPLE, draws.choice(TIGHT)))
        return featstore.open(self.path, memory=memory, threads=THREADS, backend=draws.choice(("auto", "auto", "pread")))

    # -- acts --------------------------------------------------------------------------------------------------------------------

    def act(self, draws: random.Random, may_fork: bool) -> str:
        """Draw an act and do it. Return what it came to; what must not be raises AssertionError or another error."""
        what = draws.choices(("epoch", "own graph", "reads", "cache"), (10, 4, 3, 1))[0]
        g = None
        try:
            if what == "own graph":
                g = self.opened(draws)
                with g:
                    return self.epoch(g, draws, may_fork)
            g = self.shared(draws)
            if what == "reads":
                return self.reads(g, draws)
            return self.cache(g, draws) if what == "cache" else self.epoch(g, draws, may_fork)
        except featstore.ClosedError as error:
            if g is None or not g.closed or hides_interrupt(error):
                raise
            return "closed by another thread"
        except featstore.BudgetError as error:
            assert not hides_interrupt(error)
            if g is not None:
                assert g.budget.total < AMPLE, error
                assert error.needed is not None, error
                assert error.needed > g.budget.total, error
            return "too little memory"

    def reads(self, g: featstore.OutOfCoreGraph, draws: random.Random) -> str:
        store = g.features["x"]
        for _ in range(draws.randrange(1, 20)):
            ids = torch.tensor([draws.randrange(N) for _ in range(draws.randrange(200))], dtype=torch.int64)
            rows = draws.choice((store.__getitem__, store.take, lambda ids: store.take_async(ids).result()))(ids)
            assert torch.equal(rows, self.x[ids]), "wrong rows of a read"
        return "read"

    def cache(self, g: featstore.OutOfCoreGraph, draws: random.Random) -> str:
        try:
            if draws.random() < 0.3:
                g.drop_cache(g.features["x"])
            else:
                g.cache("x", draws.choice((0.02, 0.2)), draws.choice(POLICIES))
        except featstore.BusyError:
            return "a cache that follows plans"
        return "cached"

    def epoch(self, g: featstore.OutOfCoreGraph, draws: random.Random, may_fork: bool) -> str:
        """Run loops of one loader, and end them in one of the ways."""
        sampler, name, ending = draws.choice(SAMPLERS), draws.choice(tuple(STRATEGIES)), draws.choice(ENDINGS)
        with_history = sampler in ("neighbor", "labor") and name in ("ondemand", "superbatch", "ginex") and draws.random() < 0.2
        strategy = STRATEGIES[name](self.packs[sampler] if name == "packed" else None)
        options: dict[str, Any] = {**edges_of(sampler), "prefetch": draws.choice((0, 2, "auto"))}
        if with_history:
            options["history"] = featstore.History(8, 0.2, 5)
        elif draws.random() < 0.2:
            options["device_cache"] = 0.05
        if ending == "forked" and not may_fork:
            ending = "whole"
        if ending == "two at once" and with_history:
            ending = "abandoned"
        loader = make_loader_of(g, sampler, strategy, **options)
        expected = self.expected[sampler]

        def checked(batch: featstore.MiniBatch, epoch: int, number: int) -> None:
            assert torch.equal(batch.x, self.x[batch.input_ids]), f"wrong rows: {sampler}, {name}, {ending}, {options}"
            if batch.history is not None:
                batch.history.merge(batch.x.new_zeros(batch.blocks[-2].n_dst, 8))
            else:
                assert digest_of([batch]) == expected[epoch][number], f"other batch: {sampler}, {name}, {ending}, {options}"

        running, cut = iter(loader), draws.randrange(N_BATCHES - 1)
        other = iter(loader) if ending == "two at once" else None
        for number in range(N_BATCHES if ending in ("whole", "forked", "two at once") else cut):
            checked(next(running), 0, number)
            if other is not None:
                checked(next(other), 1, number)
            if ending == "forked" and number == cut:
                forked_child(self, g, loader, running, draws)
        if ending == "closed with its graph" and draws.random() < 0.5:
            g.close()
            ending = "closed graph"
        elif ending == "closed with its loader":
            loader.close()
        elif ending == "closed":
            running.close()  # type: ignore[attr-defined]
            with contextlib.suppress(featstore.ClosedError):
                raise AssertionError(f"a closed loop delivers {next(running)}")
            if name != "packed":  # its pack has two epochs
                for number, batch in zip(range(3), loader, strict=False):
                    checked(batch, min(cut, 1), number)  # a loop without a batch was no epoch
        elif ending in ("whole", "forked"):
            assert next(running, None) is None
            for number, batch in enumerate(loader):
                checked(batch, 1, number)
            loader.close()
        return f"{name}: {ending}"

    # -- threads -----------------------------------------------------------------------------------------------------------------

    def work(self, round_number: int, thread: int, deadline_s: float) -> None:
        """Do acts until the deadline. In every other round half of those of thread 0, the main one, are interrupted."""
        draws, number = random.Random(f"{self.seed} {round_number} {thread}"), 0
        while time.monotonic() < deadline_s and not self.wrong:
            what, number = "", number + 1
            try:
                is_interrupted = thread == 0 and self.interrupts and draws.random() < 0.5
                what = self.interrupted(draws) if is_interrupted else self.act(draws, may_fork=True)
            except BaseException:
                self.wrong.append(f"round {round_number}, thread {thread}, act {number}:\n{traceback.format_exc()}")
            with self._lock:
                self.counts[what] += 1

    def interrupted(self, draws: random.Random) -> str:
        after_s = 10 ** draws.uniform(-3.5, -0.3)
        try:
            error, struck_s, _ = at_moment(lambda: self.act(draws, may_fork=False), after_s)
        except RuntimeError as wrapped:  # Thread.start() itself was interrupted, between taking a lock and giving it back
            if not isinstance(wrapped.__context__, KeyboardInterrupt):
                raise
            return "interrupted"
        if error is not None:  # its frames hold what was open
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return "interrupted"
        return "dropped" if struck_s is not None else "done before the interrupt"

    def round(self, number: int, seconds: float) -> None:
        """Let all threads work for so long, and wait for them."""
        faulthandler.dump_traceback_later(seconds + PATIENCE_S, exit=True)
        self.left, self.interrupts = "", number % 2 == 1
        deadline_s = time.monotonic() + seconds
        threads = [threading.Thread(target=self.work, args=(number, each, deadline_s)) for each in range(1, N_THREADS)]
        for thread in threads:
            thread.start()
        self.work(number, 0, deadline_s)
        for thread in threads:
            thread.join()
        if self._shared is not None:
            self._shared.close()
            self.left = self._left_by_loaders(self._shared) if not self.wrong else ""
            self._shared = None

    @staticmethod
    def _left_by_loaders(g: featstore.OutOfCoreGraph) -> str:
        """Say what loaders of a closed graph still hold; threads on their way out may hold one for a while."""
        until_s = time.monotonic() + 10
        gc.collect()
        while g.budget.used and time.monotonic() < until_s:
            time.sleep(0.05)
            gc.collect()
        return f"held by nobody: {g.memory_report()}" if g.budget.used else ""


def hides_interrupt(error: BaseException) -> bool:
    """Tell whether an error came up while a KeyboardInterrupt was on its way, and took its place."""
    before = error.__context__
    return before is not None and (isinstance(before, KeyboardInterrupt) or hides_interrupt(before))


def edges_of(sampler: str) -> dict[str, Any]:
    return {"edge_features": "w"} if sampler == "edges" else {}


def forked_child(races: Races, g: featstore.OutOfCoreGraph, loader: Any, running: Iterator[Any], draws: random.Random) -> None:
    """Fork here, in the middle of a loop and whatever the other threads do, and let the child read and make a loader."""
    way = draws.choice(("drops", "closes", "reads", "loads"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        killed_by = forked(lambda: in_child(races, g, loader, running, way))
    assert killed_by is None, f"the child that {way} was killed by signal {killed_by}"


def in_child(races: Races, g: featstore.OutOfCoreGraph, loader: Any, running: Any, way: str) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(int(PATIENCE_S) // 2)
    torch.set_num_threads(1)
    if way == "closes":
        running.close()
        loader.close()
        with contextlib.suppress(featstore.ClosedError):
            raise AssertionError(f"the parent's loop delivers {next(running)}")
    elif way == "drops":
        del running, loader
        gc.collect()
    try:
        assert torch.equal(g.features["x"][:500], races.x[:500])
        if way == "loads":
            with make_loader_of(g, "neighbor", featstore.OnDemand(cache=None), prefetch=2) as own:
                assert [digest_of([batch]) for batch in own] == races.expected["neighbor"][0]
    except featstore.ClosedError:
        assert g.closed
    except featstore.BudgetError:
        assert g.budget.total < AMPLE


# -- what is left ----------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Anonymous memory that is resident, once what is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def n_threads(most: float) -> int:
    """Count this process's threads; more than ``most`` get 10 s to end. Arrow's allocator starts one by one for each CPU."""

    def count() -> int:
        return sum(name != "jemalloc_bg_thd" for name in tasks().values())

    remaining(lambda: count() > most, 10)
    return count()


def grown_bytes(resident: Sequence[int]) -> float:
    """Estimate how much memory grew from round to round, in all rounds after the first third, which warms up.

    It is the median of what a quarter of them adds, times four. A leak in each round, or in every few, adds up, however little
    each is. One jump does not count: an allocator took another arena.
    """
    rest = resident[min(-(-len(resident) // 3), len(resident) - 2) :]
    step = max(1, len(rest) // 4)
    return statistics.median(rest[at] - rest[at - step] for at in range(step, len(rest))) * (len(rest) - 1) / step


class Left:
    """Files that rounds leave open, and loaders that nobody holds: an error, or what an interrupt left, which is counted."""

    def __init__(self) -> None:
        self._first = files_in(descriptors())
        self._open = set[str]()  # left by interrupts, and still there
        self.by_interrupts = list[str]()  # all that they left, by round

    def look(self, where: str, held: str, n_interrupts: int, may_leave: bool) -> None:
        """Look at what is open after a round, and at what loaders ``held``. AssertionError: it may not be, or is too much.

        ``n_interrupts`` is how many there were in all rounds so far. ``may_leave``: there were some in this one.
        """
        remaining(lambda: files_in(descriptors()) - self._first - self._open, 10)  # rings and joined threads end
        found = files_in(descriptors())
        self._open &= found  # some are collected later
        closed, more = self._first - found, sorted(found - self._first - self._open)
        assert not closed, f"{where}: {closed} was closed"
        assert may_leave or not more, f"{where}: {more} is left"
        assert may_leave or not held, f"{where}: {held}"
        self._open.update(more)
        self.by_interrupts += [f"{where}: {each}" for each in (*more, *([held] if held else []))]
        most = 1 + n_interrupts // 50  # CPython raises some between an open and the ``with`` after it
        assert len(self.by_interrupts) <= most, f"{n_interrupts} interrupts left more than {most}: {self.by_interrupts}"


def races(folder: str, seconds: float, seed: int = 1, first: int = 0, round_s: float = ROUND_S) -> dict[str, Any]:
    """Run rounds for so long. AssertionError, which says the seed and the round: something was wrong, or was left."""
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    torch.set_num_threads(1)
    drive.SCRATCH_BYTES = 1 << 20
    faulthandler.dump_traceback_later(2 * PATIENCE_S, exit=True)
    ours = Races(folder, seed)
    threading.excepthook = lambda args: ours.wrong.append("".join(traceback.format_exception(args.exc_value)))
    left, n_tasks, resident = Left(), list[int](), list[int]()
    n_rounds = max(3, round(seconds / round_s))
    warm = (n_rounds + 1) // 2
    for number in range(first, first + n_rounds):
        where = f"seed {seed}, round {number}"
        print(where, ours.counts.total(), "acts", file=sys.stderr, flush=True)
        ours.round(number, round_s)
        assert not ours.wrong, f"{where}: " + "\n".join(ours.wrong)
        n_interrupts = ours.counts["interrupted"] + ours.counts["dropped"]
        left.look(where, ours.left, n_interrupts, ours.interrupts)
        running = going_on(10)
        assert not running, f"{where}: {running} go on"
        assert not glob.glob(f"{ours.path}.runs/*"), f"{where}: run files are left"
        n_tasks.append(n_threads(max(n_tasks[:warm]) if len(n_tasks) >= warm else math.inf))
        resident.append(resident_bytes())
    faulthandler.cancel_dump_traceback_later()
    grown = grown_bytes(resident)
    assert grown <= GROWTH_BYTES, f"seed {seed}: memory grows: by {grown / 2**20:.0f} MiB, in {resident}"
    assert max(n_tasks[warm:]) <= max(n_tasks[:warm]), f"seed {seed}: threads grow: {n_tasks}"
    said = [what for what in ours.dropped if what.startswith("KeyboardInterrupt")]
    others = [what for what in ours.dropped if not what.startswith(("KeyboardInterrupt", "ResourceWarning"))]
    assert not others, f"seed {seed}: {others}"
    assert ours.counts["dropped"] <= len(said), f"seed {seed}: {ours.counts['dropped']} interrupts were lost; CPython says {said}"
    figures = {"seconds": seconds, "seed": seed, "rounds": n_rounds, "acts": dict(sorted(ours.counts.items()))}
    figures |= {
        "interrupts": n_interrupts,
        "left_by_interrupts": left.by_interrupts,
        "threads": n_tasks,
        "resident_mb": [each >> 20 for each in resident],
        "grown_mb": round(grown / 2**20, 1),
    }
    report("races", **figures)
    return figures


def main(line: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.races", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(line)
    with tempfile.TemporaryDirectory(prefix="featstore-races-") as folder:
        print(json.dumps(races(folder, options.seconds, options.seed, options.first), indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
