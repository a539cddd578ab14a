"""Epochs at many budgets in one process, which a control group holds to each budget and 64 MiB.

``python -m tests.memory.budgets --seed S`` runs all cases whole; with ``strategy``, ``sampler`` … one of them.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import featstore
from featstore.storage import drive
from featstore.testing.limits import MemoryGroup, memory_group
from tests.campaigns.checks import report
from tests.campaigns.races import resident_bytes
from tests.memory.resident import status
from tests.memory.sizes import DIM, N
from tests.support.frozen import SAMPLERS, STRATEGIES, THREADS, digest_of, make_dataset, make_loader_of, make_pack
from tests.support.programs import run_in_fork

__all__ = ["CASES", "Case", "epochs_at_budgets", "in_a_group"]

BESIDE = 64 << 20  # the promise: so much beside the budget
LEAST, AMPLE = 300_000, 48_000_000  # less than opening needs; all rows, and all that is sampled ahead
HANGS_S = 120.0


@dataclass(frozen=True)
class Named:
    """Quality of the numbers in errors: ``wrong`` in a row do not suffice, and the next is less than ``times`` the least."""

    wrong: int = 0
    times: float = 4.0  # batches that little memory does not hold are not sampled: a bound of theirs is counted


# Promised is Named(). These are the exceptions, by strategy and sampler ("": any); test_promises.py has those of loaders' errors.
_OF_EPOCHS = Named(wrong=3)  # node data, and indptr of the sampler and of the loader, are named one after the other
_OF_WINDOWS = Named(wrong=3, times=64)  # so here; and the bound of a batch with all neighbours is far above what it has
_OF_LAYERS = Named(times=64)  # so is the bound of a layer's lists
_OF_EDGES = Named(times=8)  # and that of the rows of edges
_OF_PACKS = Named(times=32)  # and that of a pack's batches, in less memory than node data takes
EXCEPTIONS = {
    ("", "epoch"): _OF_EPOCHS,
    ("", "window"): _OF_WINDOWS,
    ("", "layer"): _OF_LAYERS,
    ("", "edges"): _OF_EDGES,
    ("packed", ""): _OF_PACKS,
}

CALLS = ("open", "Loader", "epoch")  # each names what it needs itself, not what those after it do
TOPOLOGIES = ("csc", "chunked")


@dataclass(frozen=True)
class Case:
    strategy: str
    sampler: str
    topology: str
    history: bool = False

    def __str__(self) -> str:
        return f"{self.strategy}, {self.sampler}, {self.topology}" + ", a history" * self.history

    @property
    def named(self) -> Named:
        """Quality of the numbers in errors."""
        found = EXCEPTIONS.get((self.strategy, "")) or EXCEPTIONS.get(("", self.sampler))
        return found or Named()


CASES = [Case(*each) for each in product(STRATEGIES, SAMPLERS, TOPOLOGIES)]
CASES += [
    Case(*each, history=True)
    for each in product(STRATEGIES, ("neighbor", "labor"), TOPOLOGIES)
    if each[0] != "packed"  # a pack was sampled before there was a history
]


class Refused(NamedTuple):
    """A BudgetError of one of the CALLS, without what its frames hold."""

    call: int
    needed: int | None
    text: str


class Budgeted:
    """The dataset of :mod:`tests.memory.sizes`, 10 MB of rows, and how far each run went beyond its budget."""

    def __init__(self, folder: str, case: Case, group: MemoryGroup | None) -> None:
        self.case, self._group = case, group
        self.path = make_dataset(Path(folder) / "graph", N, DIM, edge_dim=8)
        if case.topology == "chunked":
            featstore.convert(self.path, topology="chunked", chunk_bytes="64KiB", progress=False)
        self.pack = make_pack(Path(folder) / "pack", self.path, case.sampler) if case.strategy == "packed" else None
        self.expected = ""
        self.most_beside = 0
        self.n_runs = self.n_refused = self.n_wrong = self.call = 0

    def epoch(self, memory: int) -> str:
        """Run an epoch within a budget; return what the batches come to. ``self.call`` is the call that runs."""
        self.call = 0
        if self.pack is not None:
            for layout in self.pack.glob("layout-*"):  # made anew: it depends on the memory
                shutil.rmtree(layout)
        options: dict[str, Any] = {"history": featstore.History(16, 0.1, 5)} if self.case.history else {}
        if self.case.sampler == "edges":
            options["edge_features"] = "w"
        strategy = STRATEGIES[self.case.strategy](self.pack)
        with featstore.open(self.path, memory=memory, threads=THREADS) as g:
            self.call = 1
            with make_loader_of(g, self.case.sampler, strategy, **options) as loader:
                self.call = 2
                found = digest_of(merged(batch) for batch in loader)
            assert g.memory_report().peak <= memory, f"the ledger's peak is {g.memory_report().peak} bytes of {memory}"
        return found

    def run(self, memory: int) -> Refused | None:
        """Run an epoch within a budget, in a group that has 64 MiB more; return the call that raised a BudgetError, if any."""
        resident_bytes()  # gives back what is free
        if self._group is not None:
            self._group.limit(self._group.anonymous_bytes + memory + BESIDE)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        print(f"{self.case}: {memory} bytes", file=sys.stderr, flush=True)
        found, refused = "", None
        try:
            found = self.epoch(memory)
        except featstore.BudgetError as error:
            refused = Refused(self.call, error.needed, str(error))
            self.n_refused += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
            beside = status("VmHWM") - before - memory
            self.most_beside = max(self.most_beside, beside)
        assert beside <= BESIDE, f"{self.case}: {beside} bytes beside a budget of {memory}"
        if refused is None:
            assert found == (self.expected or found), f"{self.case}: other batches in {memory} bytes"
            self.expected, self.n_runs = found, self.n_runs + 1
        return refused

    def least(self) -> int:
        """Find the least that is accepted, but for a hundredth."""
        refused, accepted = LEAST, self.accepted(LEAST)
        while accepted > refused * 1.01:
            memory = (refused + accepted) // 2
            if self.run(memory) is None:
                accepted = memory
            else:
                refused = memory
        return accepted

    def accepted(self, memory: int) -> int:
        """Run an epoch in ``memory``, or in what each call names that is refused; return what sufficed for all.

        AssertionError: a number is wrong, see :meth:`check_named`.
        """
        refused = self.run(memory)
        while refused is not None:
            memory, refused = self.check_named(memory, refused)
        return memory

    def check_named(self, memory: int, refused: Refused) -> tuple[int, Refused | None]:
        """Make a refused call succeed with what it names; return the number, and which call after it is refused, if any.

        AssertionError: it names none, or one with which it is refused again; or a much smaller number would do.
        """
        known, call, tried, again = self.case.named, refused.call, [memory], refused
        while again is not None and again.call <= call:
            where = f"{self.case}: {CALLS[call]} in {tried} bytes"
            assert again.needed is not None, f"{where}: {again.text}"
            assert again.needed > tried[-1], f"{where}: {again.text}"
            assert len(tried) - 1 <= known.wrong, f"{where}: what was named is too little: {again.text}"
            tried.append(again.needed)
            again = self.run(tried[-1])
        self.n_wrong = max(self.n_wrong, len(tried) - 2)
        less = int(tried[-1] / known.times)
        if less > tried[-2]:
            smaller = self.run(less)
            is_more = smaller is None or smaller.call > call
            assert not is_more, f"{self.case}: {CALLS[call]} in {memory} bytes named {tried[-1]}, much more than {less}, which do"
        return tried[-1], again


def merged(batch: featstore.MiniBatch) -> featstore.MiniBatch:
    """Do what a step does with a history."""
    if batch.history is not None:
        batch.history.merge(batch.x.new_zeros(batch.blocks[-2].n_dst, 16))
    return batch


def epochs_at_budgets(folder: str, case: Case, n: int, seed: int, group: MemoryGroup | None) -> None:
    """Run ``n`` budgets from the least to ample, in the child. AssertionError or death: one was not kept."""
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    drive.SCRATCH_BYTES = 1 << 20
    draws, budgeted, began_s = random.Random(f"{seed} {case}"), Budgeted(folder, case, group), time.monotonic()
    if group is not None:
        group.enter()
    assert budgeted.run(AMPLE) is None, f"{case}: refused in {AMPLE} bytes"
    least = budgeted.least()
    for _ in range(n):
        budgeted.accepted(int(math.exp(draws.uniform(math.log(least * 0.9), math.log(AMPLE)))))
    figures = {"least": least, "budgets": budgeted.n_runs, "refused": budgeted.n_refused, "most_wrong": budgeted.n_wrong}
    figures |= {"most_beside_mb": round(budgeted.most_beside / 2**20, 1), "seconds": round(time.monotonic() - began_s)}
    report("budgets", case=str(case), in_group=group is not None, seed=seed, **figures)


def in_a_group(folder: str, case: Case, n: int, seed: int = 1, run: Callable[..., None] = epochs_at_budgets) -> None:
    """Run a case in a child, as root in a control group. AssertionError: its output says which budget it did not keep."""
    with memory_group(1 << 40) if os.geteuid() == 0 else nullcontext() as group:
        run_in_fork(run, folder, case, n, seed, group, timeout_s=3000)


def main(line: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.memory.budgets", description=__doc__)
    parser.add_argument("words", nargs="*", help="words of the cases to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budgets", type=int, default=50)
    options = parser.parse_args(line)
    cases = [case for case in CASES if all(word in f"{case}".replace(",", "").split() for word in options.words)]
    n_failed = 0
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="featstore-budgets-") as folder:
            try:
                in_a_group(folder, case, options.budgets, options.seed)
            except AssertionError as error:
                n_failed += 1
                print(error, flush=True)
    print(json.dumps({"cases": len(cases), "failed": n_failed}))
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
