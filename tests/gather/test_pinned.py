"""Pinned memory: which blocks of the pool are locked for copies to a device, and by way of which device they are unlocked."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.errors import ClosedError
from featstore.gather import buffers, pinned
from featstore.gather.buffers import BufferPool
from featstore.load.transfer import Transfer
from tests.strategies.test_superbatch import dataset
from tests.support.refusing import refuses

__all__ = ["dataset"]  # fixture


class Runtime:
    """CUDA's runtime: which memory is locked, by way of which device. The current device is each thread's own, first 0."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.devices: dict[int, int] = {}  # by address
        self.answer = 0
        self.error = 0  # that the next kernel would raise
        self._thread = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._thread, "current", 0)

    @contextlib.contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        before = self.current
        self._thread.current = device if isinstance(device, int) else device.index or 0
        yield
        self._thread.current = before

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        if self.answer == 0:
            assert address % 4096 == 0
            assert address not in self.locked
            assert flags == 1
            self.locked[address], self.devices[address] = n_bytes, self.current
        self.error = self.answer
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        assert self.devices.pop(address) == self.current
        del self.locked[address]
        return 0

    def ones(self, *size: int, device: str) -> None:
        """Launch a kernel, as ``torch.ones`` does."""
        assert device == "cuda"
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"cuda error {error}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"cuda error {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(pinned.torch, "ones", made.ones)
    return made


@contextlib.contextmanager
def pinning(pool: BufferPool, number: int = 0) -> Iterator[BufferPool]:
    """The pool, while this thread takes memory for a CUDA device."""
    with pool.copied_to(torch.device("cuda", number)):
        yield pool


def test_pooled_memory_is_locked_once_a_block(runtime: Runtime) -> None:
    budget = Budget(10**8)
    pool = BufferPool(budget)
    with pinning(pool, 1):
        first = pool.tensor(1 << 20, torch.uint8)
        second = pool.tensor(5 << 20, torch.uint8)
        assert [runtime.locked[tensor.data_ptr()] >= tensor.nbytes for tensor in (first, second)] == [True, True]
        assert sum(runtime.locked.values()) == budget.used
        address = first.data_ptr()
        del first
        assert pool.tensor(1 << 20, torch.uint8).data_ptr() == address  # pooled, and locked already
    assert len(runtime.locked) == 2
    pool.trim()
    assert list(runtime.locked) == [second.data_ptr()]
    pool.close()
    assert list(runtime.locked) == [second.data_ptr()]  # it follows its tensor
    del second
    assert runtime.locked == {}
    assert budget.used == 0


def test_only_what_is_copied_to_a_device_is_locked(runtime: Runtime) -> None:
    """A user's copy of other memory has been read when it returns: he may drop it, and its block be another tensor's."""
    pool = BufferPool(Budget(10**8))
    ordinary = pool.tensor(1 << 20, torch.uint8)
    address = ordinary.data_ptr()
    with pinning(pool):
        locked = pool.tensor(1 << 20, torch.uint8).data_ptr()  # given back at once
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(lambda: pool.tensor(1 << 20, torch.uint8).data_ptr()).result() not in runtime.locked
        with pool.copied_to(torch.device("cpu")):
            assert pool.tensor(1 << 20, torch.uint8).data_ptr() not in runtime.locked
        assert pool.tensor(1 << 20, torch.uint8).data_ptr() == locked
    del ordinary
    taken = [pool.tensor(1 << 20, torch.uint8) for _ in range(3)]
    assert address in [tensor.data_ptr() for tensor in taken]
    assert list(runtime.locked) == [locked]  # idle meanwhile: it serves the device alone
    with pytest.raises(KeyError), pinning(pool):
        raise KeyError
    assert pool.tensor(1 << 20, torch.uint8).data_ptr() != locked


def test_idle_blocks_of_one_kind_make_room_for_the_other(runtime: Runtime) -> None:
    pool = BufferPool(Budget(1 << 20))
    pool.tensor(1 << 20, torch.uint8)
    with pinning(pool):
        assert pool.tensor(1 << 20, torch.uint8).data_ptr() in runtime.locked
    assert pool.tensor(1 << 20, torch.uint8).data_ptr() not in runtime.locked
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_is_ordinary_and_said_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_warned", threading.Event())
    budget = Budget(10**8)
    pool = BufferPool(budget)
    runtime.answer = 2
    with pinning(pool), pytest.warns(RuntimeWarning, match=r"cuda error 2.*slower") as said:
        held = [pool.tensor(1 << 20, torch.uint8) for _ in range(3)]
    assert len(said) == 1
    assert runtime.locked == {}
    assert budget.used == 3 << 20
    for number, tensor in enumerate(held):
        tensor.fill_(number)
    assert [int(tensor.sum()) for tensor in held] == [0, 1 << 20, 2 << 20]
    del tensor, held
    pool.trim()
    assert budget.used == 0  # and nothing was unlocked that was not locked
    runtime.answer = 0
    with pinning(pool):
        assert pool.tensor(1 << 20, torch.uint8).data_ptr() in runtime.locked


def test_memory_is_unlocked_by_way_of_its_own_device(runtime: Runtime) -> None:
    """Whichever thread drops it, and whichever device is current there: else CUDA refuses, or makes a context on that one."""
    pool = BufferPool(Budget(10**8))
    with pinning(pool, 2):
        held = [pool.tensor(1 << 20, torch.uint8) for _ in range(2)]
    assert set(runtime.devices.values()) == {2}
    assert runtime.current == 0
    held.pop()
    pool.trim()  # by this thread
    held.pop()
    with runtime.device(1), ThreadPoolExecutor(1) as executor:
        executor.submit(pool.trim).result()
        assert runtime.current == 1
    assert runtime.locked == {}


def test_a_refusal_is_not_the_next_kernels_error(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps its last error until somebody asks for it, and torch does so after each launch."""
    monkeypatch.setattr(pinned, "_warned", threading.Event())
    pool = BufferPool(Budget(10**8))
    runtime.answer = 2
    with pinning(pool), pytest.warns(RuntimeWarning, match="cuda error 2"):
        pool.tensor(1 << 20, torch.uint8)
    assert runtime.error == 0


def test_at_the_interpreters_exit_nothing_is_unlocked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may be gone by then."""
    pool = BufferPool(Budget(10**8))
    with pinning(pool):
        pool.tensor(1 << 20, torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(pinned.sys, "is_finalizing", lambda: True)
        pool.trim()
    assert len(runtime.locked) == 1


def test_a_child_after_fork_leaves_the_parents_locks(runtime: Runtime) -> None:
    pool = BufferPool(Budget(10**8))
    with pinning(pool):
        tensor = pool.tensor(1 << 20, torch.uint8)
    gc.collect()  # what other tests left, such as a process group: a child without its threads must not destroy that
    pid = os.fork()
    if pid == 0:
        del tensor
        pool.trim()
        gc.collect()
        os._exit(0 if len(runtime.locked) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tensor.data_ptr() in runtime.locked


def test_a_loader_for_cuda_locks_what_it_copies_there(dataset: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and edges, taken by the threads of its stages; what the graph hands out beside is ordinary memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(Transfer, "__call__", lambda self, position, assembled: assembled[0])
    monkeypatch.setattr(Transfer, "receive", lambda self, batch: None)
    monkeypatch.setattr(buffers, "SMALL_BYTES", 4096)

    def locked(tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in runtime.locked

    with featstore.open(dataset, memory="64MB") as g:
        seeds, sampler = g.node_data["train_idx"], featstore.NeighborSampler(g, [4, 3])
        for device in ("cuda:1", "cpu"):
            with featstore.Loader(
                g, sampler, seeds, batch_size=500, features="x", device=device, strategy=featstore.OnDemand(cache=None)
            ) as batches:
                for batch in batches:
                    assert locked(batch.x) == (device != "cpu")
                    if batch.index:  # the first was sampled when the loader was made
                        assert locked(batch.blocks[0].src) == (device != "cpu")
                    assert not locked(g.features["x"][batch.input_ids])
                    assert set(runtime.devices.values()) <= {1}
            del batch
            g.pool.trim()
            assert not runtime.locked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_cuda_locks_pooled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees the lock; a refusal leaves no error behind; another thread may drop a block, and its address is locked anew."""
    pool = BufferPool(Budget(10**8))
    with pinning(pool, torch.cuda.current_device()), ThreadPoolExecutor(1) as executor:
        for _ in range(3):
            held = pool.tensor(1 << 20, torch.uint8)
            assert held.is_pinned()
            del held
            executor.submit(pool.trim).result()
    monkeypatch.setattr(pinned, "PORTABLE", 1 << 30)  # no such flag
    monkeypatch.setattr(pinned, "_warned", threading.Event())
    with pinning(pool), pytest.warns(RuntimeWarning, match="does not pin"):
        assert not pool.tensor(1 << 20, torch.uint8).is_pinned()
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_pool_that_is_closed_while_memory_is_taken_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(10**8)
    pool, reserve = BufferPool(budget, owner="the graph"), Budget.try_reserve

    def close_before(self: Budget, *given: Any, **more: Any) -> Any:
        pool.close()
        return reserve(self, *given, **more)

    monkeypatch.setattr(Budget, "try_reserve", close_before)
    refuses(ClosedError, "the graph is closed", lambda: pool.tensor(1 << 20, torch.uint8))
    assert budget.used == 0
