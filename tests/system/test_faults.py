"""Faults of the operating system, where one call fails or many: gathering, creating. Campaigns are in tests/campaigns."""

from __future__ import annotations

import errno
import functools
import gc
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from featstore.testing.faults import Fault, run_in_child, sweep
from featstore.testing.limits import memory_group
from tests.support.library_threads import tasks
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

N, DIM = 600, 75  # rows of 300 bytes: 13 a page, 47 pages


def arrays(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """indptr, indices and x of a small graph."""
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 9, N)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    return indptr, rng.integers(0, N, indptr[-1]), rng.standard_normal((N, DIM), dtype=np.float32)


def create(path: Path, seed: int) -> None:
    """Create the dataset of a seed."""
    indptr, indices, x = arrays(seed)
    data = {"y": np.arange(N)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features={"x": x}, node_data=data, progress=False).close()


def holds(path: Path, seed: int) -> bool:
    """Whether the dataset at ``path`` is the one of the seed; any other content is an error."""
    with featstore.open(path, memory="64MiB", backend="pread") as g:
        g.verify()
        found = g.features["x"][:].numpy()
        assert g.node_data["y"].tolist() == list(range(N))
    return np.array_equal(found, arrays(seed)[2])


def descriptors(expected: set[str] | None = None, patience_s: float = 30.0) -> set[str]:
    """List open descriptors of this process, and its threads; joined ones on their way out get ``patience_s``."""
    _freeze()
    found, deadline = _descriptors(), time.monotonic() + patience_s
    while expected is not None and found != expected and time.monotonic() < deadline:
        time.sleep(0.001)
        found = _descriptors()
    return found


@functools.cache
def _freeze() -> None:
    """Let collections of garbage pass over what is there, unless they do: torch takes most of the time of a full one.

    Once, as what is frozen is counted by walking over it.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _descriptors() -> set[str]:
    gc.collect()
    names = {f"task {task}" for task in tasks()}
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return names


# -- create; calls that fail there are in tests/campaigns -----------------------------------------------------------------------


def short_writes(folder: str) -> None:
    root = Path(folder)
    for k in (1, 2, 5):
        with Fault(root, ["write", "read"], "short", k=k, times=40) as fault:
            create(root / f"g{k}", k)
        assert fault.fired
        assert holds(root / f"g{k}", k)
    for k in range(1, 12, 3):
        with Fault(root, ["write", "read", "open"], "EINTR", k=k, times=3) as fault:
            create(root / f"i{k}", k)
        assert fault.fired == 3
        assert holds(root / f"i{k}", k)


def test_create_goes_on_after_short_and_interrupted_writes(tmp_path: Path) -> None:
    run_in_fork(short_writes, str(tmp_path))


def file_size_limit(folder: str) -> None:
    root = Path(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (4096, 100_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):
            create(root / "g", 1)
        assert os.listdir(root) == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    create(root / "g", 1)
    assert holds(root / "g", 1)


def test_create_under_a_file_size_limit(tmp_path: Path) -> None:
    run_in_fork(file_size_limit, str(tmp_path))


# -- gather --------------------------------------------------------------------------------------------------------------------


def gather_meets(path: str) -> None:
    x = arrays(0)[2]
    ids = np.random.default_rng(1).permutation(N)[:200]
    with featstore.open(path, memory="64MiB", backend="pread") as g:
        store = g.features["x"]
        assert np.array_equal(store.take(ids, coalesce_gap=0).numpy(), x[ids])
        before = descriptors()
        for fault in sweep(path, "read", "EIO"):
            out = torch.full((200, DIM), -7.0)
            error = None
            with fault:
                try:
                    store.take(ids, out=out, coalesce_gap=0)
                except OSError as caught:
                    error = caught
            assert (error is not None) == bool(fault.fired)
            if error is not None:
                assert error.errno == errno.EIO
                assert str(error.filename).startswith(path)
            assert np.array_equal(store.take(ids, coalesce_gap=0).numpy(), x[ids]), "usable after an error"
        assert descriptors(before) == before
        for action in ("short", "EINTR", "EAGAIN"):
            with Fault(path, "read", action, k=3, times=3) as fault:
                assert np.array_equal(store.take(ids, coalesce_gap=0).numpy(), x[ids])
            assert fault.fired == 3, action


def test_pread_gather_meets_errors_and_short_reads(tmp_path: Path) -> None:
    create(tmp_path / "g", 0)
    run_in_fork(gather_meets, str(tmp_path / "g"))


def few_descriptors(path: str) -> None:
    x = arrays(0)[2]
    with featstore.open(path, memory="64MiB") as g:  # in use while the others fail
        store = g.features["x"]
        for spare in range(12):
            used = {int(fd) for fd in os.listdir("/proc/self/fd")}
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1 + spare, 4096))
            try:
                with featstore.open(path, memory="64MiB") as second:
                    assert np.array_equal(second.features["x"][[3]].numpy(), x[[3]])
            except OSError as error:
                assert error.errno == errno.EMFILE
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            assert np.array_equal(store[[3, 4]].numpy(), x[[3, 4]])


def test_too_few_descriptors(tmp_path: Path) -> None:
    create(tmp_path / "g", 0)
    run_in_fork(few_descriptors, str(tmp_path / "g"))


# -- little memory -------------------------------------------------------------------------------------------------------------


def gather_within(path: str, n_rows: int) -> None:
    with featstore.open(path, memory="48MB") as g:
        g.cache("x", budget="16MB", policy="sieve")
        rng = np.random.default_rng(0)
        for _ in range(20):
            ids = rng.integers(0, n_rows, 4_000)
            assert np.array_equal(g.features["x"][ids][:, 0].numpy(), ids.astype(np.float32))
        assert sum(g.memory_report().values()) <= 48_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")
def test_dataset_larger_than_its_memory_group(tmp_path: Path) -> None:
    n_rows = 700_000
    blocks = (np.repeat(np.arange(i, i + 7_000, dtype=np.float32)[:, None], 128, axis=1) for i in range(0, n_rows, 7_000))
    rows = ((n_rows, 128), torch.float32, blocks)
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", np.zeros(n_rows + 1, np.int64), np.empty(0, np.int64), features={"x": rows}, progress=False
    ).close()
    # torch itself takes about 200 MB; the features 358 MB.
    with memory_group(330 << 20) as group:
        run_in_child(gather_within, str(tmp_path / "g"), n_rows, prepare=group.enter)
