"""Each allocation of every operation and of epochs fails in turn: MemoryError, nothing is left, and the next call works."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.testing.faults import Fault, sweep
from tests.campaigns.checks import prepared, report
from tests.campaigns.operations import SCENARIOS
from tests.campaigns.test_failing_calls import fail_calls
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

WAYS = ("alloc", "core_alloc")


def lack_memory(folder: str, name: str, step: int = 1) -> None:
    """Fail every ``step``-th allocation, of 32 KiB and more, and those of any size that the core asks for; in the child."""
    ready, figures = prepared(folder, name), dict[str, int]()
    for way in WAYS:
        ready.fresh()
        with Fault(ready.root, way, "ENOMEM", k=1 << 40) as fault:
            ready.call()
        figures[way] = fault.calls
        if fault.calls:
            figures[f"{way} failed"], figures[f"{way} errors"] = fail_calls(ready, way, "ENOMEM", step)
    assert any(figures[way] for way in WAYS)
    report("allocations", operation=name, **figures)


def lack_some(folder: str, cases: list[tuple[str, int]]) -> None:
    """A sample, in one child."""
    for number, (name, step) in enumerate(cases):
        os.mkdir(f"{folder}/{number}")
        lack_memory(f"{folder}/{number}", name, step)


SAMPLE = [("create", 9), ("aggregate", 9), ("epoch", 17), ("layout", 13)]


def test_some_allocations_fail(tmp_path: Path) -> None:
    run_in_fork(lack_some, str(tmp_path), SAMPLE)


@pytest.mark.stress
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_allocation_fails(name: str, tmp_path: Path) -> None:
    run_in_fork(lack_memory, str(tmp_path), name, timeout_s=3400)


# -- large batches, by strategy --------------------------------------------------------------------------------------------------

MANY = 12_000  # rows of a batch: NumPy goes through more than 8,192 in buffers of its own, and 2.4 dies where it gets none


def epochs_lack_memory(path: str, step: int) -> None:
    rng, n = np.random.default_rng(0), 2 * MANY
    features, data = {"x": rng.standard_normal((n, 4), dtype=np.float32)}, {"y": np.arange(n)}
    for topology in ("csc", "chunked"):
        where = f"{path}/{topology}"
        featstore.OutOfCoreGraph.create(
            where, np.arange(n + 1), rng.integers(0, n, n), features, data, topology=topology, progress=False
        ).close()

    numbers = itertools.count()

    def run(name: str, strategy: Any) -> None:
        with featstore.open(f"{path}/{name}", memory="64MiB", backend="pread", threads=1, progress=False) as g:
            sampler = featstore.NeighborSampler(g, [1])
            if strategy is None:  # a pack whose batches share rows on disk
                pack = f"{path}/p{next(numbers)}"
                featstore.sample_offline(g, sampler, np.arange(n), MANY, path=pack, progress=False).close()
                strategy = featstore.Packed(pack, cache="200KB", policy="frequency", disk="3x")
                given: tuple[Any, ...] = ()
            else:
                given = (sampler, np.arange(n), MANY)
            with featstore.Loader(g, *given, strategy=strategy, prefetch=0, threads=1) as loader:
                for batch in loader:
                    assert np.array_equal(batch.x.numpy(), features["x"][batch.input_ids.numpy()])

    for name, strategy in (
        ("chunked", featstore.OnDemand(cache="100KB", policy="lru")),
        ("csc", featstore.Superbatch(cache="100KB", length=2)),
        ("csc", featstore.Streamed(cache="100KB", length=2)),
        ("csc", None),
    ):
        run(name, strategy)
        for fault in sweep(path, "alloc", "ENOMEM", step=step):
            with fault:
                try:
                    run(name, strategy)
                except (MemoryError, OSError) as error:
                    assert isinstance(error, MemoryError) or error.errno == errno.ENOMEM, error
        run(name, strategy)


def test_allocations_of_epochs_may_fail(tmp_path: Path) -> None:
    run_in_fork(epochs_lack_memory, str(tmp_path), 9)


@pytest.mark.stress
def test_every_allocation_of_epochs_may_fail(tmp_path: Path) -> None:
    run_in_fork(epochs_lack_memory, str(tmp_path), 1, timeout_s=1200)
