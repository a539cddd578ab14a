"""Handing over: beside the next batch's assembly, in memory that is counted, and never before a copy is complete.

CUDA's own part runs where there is a device (tests/test_tiers.py); here stand-ins for its streams and its locks say what is asked
of them, and when.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import featstore
from featstore.budget import Budget
from featstore.gather import buffers, pinned
from featstore.gather.buffers import BufferPool
from featstore.gather.device import Apart, DeviceArray
from featstore.gather.plan import DeviceRows
from featstore.graph.feature import FeatureStore
from featstore.load.minibatch import MiniBatch
from featstore.load.transfer import Assembled, Transfer
from featstore.sampling.batch import Block
from featstore.strategies.counters import Stopwatch
from tests.loaders import make_loader
from tests.test_packed import copied, pack, run
from tests.test_superbatch import dataset, ondemand, same

__all__ = ["dataset", "ondemand", "pack"]  # fixtures

TIERS: dict[str, Any] = {"feature_cache": 0.1, "device_cache": 0.05}


class Order:
    """Which gathers have begun, and what is put together only once the gather of the batch after has begun, or has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_gathers: int, wait_for: str) -> None:
        self.n_gathers, self.waited = n_gathers, 0
        self.begun = self.ended = 0
        self._changed = threading.Condition()
        gather, together = FeatureStore.gather, Apart.together

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            with self._changed:
                self.begun += 1
                self._changed.notify_all()
            rows = gather(*args, **kwargs)
            with self._changed:
                self.ended += 1
                self._changed.notify_all()
            return rows

        put_together = [0]

        def slow(apart: Apart) -> torch.Tensor:
            # Two features a batch, so the next batch's gathers are the ones from here on.
            put_together[0] += 1
            after = min(self.n_gathers, 2 * ((put_together[0] + 1) // 2 + 1))
            with self._changed:
                assert self._changed.wait_for(lambda: getattr(self, wait_for) >= after, 30), "nothing runs beside handing over"
            self.waited += 1
            return together(apart)

        monkeypatch.setattr(FeatureStore, "gather", noted)
        monkeypatch.setattr(Apart, "together", slow)


@pytest.mark.parametrize("wait_for", ["begun", "ended"])
@pytest.mark.parametrize("policy", ["frequency", "belady"])
def test_assembly_goes_on_beside_handing_over(
    dataset: Path,
    pack: Path,
    tmp_path: Path,
    ondemand: list[Any],
    policy: str,
    wait_for: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch is put together after the next one's gather, and with Belady its changes of the host's cache, and is as ever."""
    mine = copied(pack, tmp_path)
    options = {**TIERS, "policy": policy, "device": device, **({"superbatch": 7} if policy == "belady" else {})}
    run(dataset, mine, epochs=0, **options)
    order = Order(monkeypatch, 50, wait_for)
    found, stats = run(dataset, mine, epochs=1, prefetch=2, **options)
    assert order.waited == 50
    assert same(found[0], ondemand[:25])
    assert {"load", "read", "gather", "transfer"} <= stats["seconds"].keys()
    assert sum(stats["hits"].values()) == stats["rows"]


def test_what_waits_to_be_handed_over_is_counted(
    dataset: Path, pack: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch holds its assembled rows; with the tier in host memory also the memory it is put together in, then only this."""
    on_host = int(device == "cpu")
    mine = copied(pack, tmp_path)
    run(dataset, mine, epochs=0, policy="frequency", **TIERS)
    go = threading.Event()
    together = Apart.together
    monkeypatch.setattr(Apart, "together", lambda apart: together(apart) if go.wait(30) else None)
    with featstore.open(dataset, memory="64MB") as g:
        options: dict[str, Any] = {"policy": "frequency", "memory": "16MB", "features": ["x", "z"], "device": device, **TIERS}
        loader = make_loader(g, strategy="packed", pack=mine, **options)
        with loader, featstore.Pack(mine) as opened:
            top = np.argsort(-opened.counts(), kind="stable")[: round(0.05 * g.num_nodes)]
            resting = loader._runner.setup.share.used
            iterator = iter(loader)
            run_ = iterator.begin()._pipeline
            deadline = threading.Event()
            while not (len(run_._assembled) == 1 and run_._finishing == 2 and len(run_._ready) == 2):
                assert not deadline.wait(0.001)
            order = loader._runner.setup.batches.epoch(0).order
            first = [int(k) for k in order[:4]]

            def sample_bytes(batch: int) -> int:
                sampled = opened.batch(batch, g.pool)
                return sum(t.nbytes for t in [sampled.input_ids, *(t for b in sampled.blocks for t in (b.src, b.dst))])

            samples = sum(sample_bytes(batch) for batch in first)
            width = 33 * 4 + 7
            waiting = sum(width * ((1 + on_host) * len(ids) - int(np.isin(ids, top).sum())) for ids in map(opened.ids, first[:2]))
            assert loader._runner.setup.share.used == resting + samples + waiting
            go.set()
            batch = next(iterator)
            iterator.close()
            whole = sample_bytes(first[0]) + width * len(batch.input_ids)
            assert loader._runner.setup.share.used == resting + on_host * whole
            del batch


def test_short_memory_between_features_loses_no_counts(
    dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = copied(pack, tmp_path)
    want = run(dataset, mine, epochs=1, policy="frequency", device=device, **TIERS)[1]
    gather, calls = FeatureStore.gather, [0]

    def short(store: FeatureStore, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += store.name == "z"
        if store.name == "z" and calls[0] == 5:
            raise featstore.BudgetError("no room", 1)
        return gather(store, *args, **kwargs)

    monkeypatch.setattr(FeatureStore, "gather", short)
    found, stats = run(dataset, mine, epochs=1, policy="frequency", device=device, **TIERS)
    assert calls[0] == 26
    assert same(found[0], ondemand[:25])
    assert (stats["hits"], stats["rows_loaded"]) == (want["hits"], want["rows_loaded"])


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (33,)), (torch.bfloat16, (3, 2)), (torch.bool, ()), (torch.int64, (1,))]
)
def test_a_tier_in_host_memory_takes_none_that_is_not_counted(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Rows go straight to the batch: with torch's index_select all of the tier's lay in memory once more."""
    pool = BufferPool(Budget(10**8))
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.integers(0, 256, (5000, math.prod(shape) * dtype.itemsize), dtype=np.uint8))
    whole = (rows % 2 if dtype == torch.bool else rows).view(dtype).reshape(5000, *shape)
    tier = DeviceArray(2000, shape, dtype, torch.device("cpu"), pool, pool.budget, 2)
    tier.rows.copy_(whole[:2000])
    order = rng.permutation(5000)
    slots = np.flatnonzero(order < 2000)
    part = DeviceRows(order[slots].astype(np.int32), slots, np.flatnonzero(order >= 2000))
    others = whole[torch.from_numpy(order[part.others])]
    made: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    out = tier.memory_for(part)
    with Watch():
        batch = Apart(tier, part, others, out).together()
    assert batch is out
    assert set(made) <= {"aten.view.default", "aten.view.dtype", "aten.detach.default", "aten.alias.default"}  # no copies
    got, want = (t.reshape(5000, -1).contiguous() for t in (batch, whole[torch.from_numpy(order)]))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


# -- a device with streams


class Stream:
    """Says what was asked of it, and whether the host's memory was still there when its copies were complete."""

    def __init__(self, log: list[str], pool: BufferPool) -> None:
        self._log, self._pool = log, pool

    def synchronize(self) -> None:
        self._log.append("complete" if self._pool._returned.empty() else "too late")


@contextlib.contextmanager
def inside(log: list[str], stream: object) -> Iterator[None]:
    log.append("begin")
    try:
        yield
    finally:
        log.append("end")


def assembled(pool: BufferPool, n: int = 40_000) -> Assembled:
    """A batch of pooled memory, one feature of which is apart."""

    def made(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return pool.tensor(shape, dtype).zero_()

    ids = made(n)
    block = Block(made(n), made(n), n, n // 2)
    tier = DeviceArray(8, (3,), torch.float32, torch.device("meta"), pool, pool.budget)
    part = DeviceRows(np.arange(8, dtype=np.int32), np.arange(8), np.arange(8, n))
    others = made(n - 8, 3, dtype=torch.float32)
    features = {"x": made(n, 3, dtype=torch.float32), "z": others, "w": made(n, 1)}
    batch = MiniBatch(ids[: n // 2], ids, (block,), features, made(n // 2), 0)
    return Assembled(batch, {"z": Apart(tier, part, others, tier.memory_for(part))}, batch.nbytes, None)


@pytest.mark.parametrize("fails", [False, True])
def test_host_memory_goes_back_once_the_copy_is_complete(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, log = BufferPool(Budget(10**8)), []
    transfer = Transfer(torch.device("meta"), Stopwatch())
    transfer._stream = Stream(log, pool)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: inside(log, stream))
    batch = assembled(pool)
    if fails:
        monkeypatch.setattr(Apart, "together", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            transfer(0, batch)
        gc.collect()
    else:
        there = transfer(0, batch)
        assert {t.device.type for t in there._tensors()} == {"meta"}
        assert list(there.features) == ["x", "z", "w"]
        assert [tuple(rows.shape) for rows in there.features.values()] == [(40_000, 3), (40_000, 3), (40_000, 1)]
    assert log == ["begin", "end", "complete"]
    assert pool._returned.empty()  # all of it is held until the assembled batch dies
    del batch
    gc.collect()
    assert pool._returned.qsize() == 7


def test_the_loops_stream_keeps_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a batch is another stream's: each tensor is recorded with the one that is current where the loop takes it."""
    pool, recorded = BufferPool(Budget(10**8)), []
    transfer = Transfer(torch.device("cpu"), Stopwatch())
    batch = assembled(pool).batch
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor.data_ptr(), stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the loop's on {device}")
    transfer.receive(batch)
    assert recorded == []  # nothing was copied in a stream
    transfer._stream = Stream([], pool)
    transfer.receive(batch)
    tensors = [batch.input_ids, *batch.features.values(), batch.y, batch.blocks[0].src, batch.blocks[0].dst]
    assert recorded == [(tensor.data_ptr(), "the loop's on cpu") for tensor in tensors]


def test_the_loader_takes_every_batch_over(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, str]] = []
    monkeypatch.setattr(Transfer, "receive", lambda _, batch: taken.append((batch.index, threading.current_thread().name)))
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        for prefetch in (0, 2):
            taken.clear()
            n = sum(1 for _ in featstore.Loader(g, sampler, g.node_data["train_idx"], 100, device="meta", prefetch=prefetch))
            assert taken == [(index, threading.current_thread().name) for index in range(n)]


# -- pinned memory


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
    monkeypatch.setattr(Transfer, "__call__", lambda self, position, assembled: assembled.batch)
    monkeypatch.setattr(Transfer, "receive", lambda self, batch: None)
    monkeypatch.setattr(buffers, "SMALL_BYTES", 4096)

    def locked(tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in runtime.locked

    with featstore.open(dataset, memory="64MB") as g:
        seeds, sampler = g.node_data["train_idx"], featstore.NeighborSampler(g, [4, 3])
        for device in ("cuda:1", "cpu"):
            with make_loader(g, sampler, seeds, batch_size=500, features="x", device=device) as batches:
                for batch in batches:
                    assert locked(batch.x) == (device != "cpu")
                    if batch.index:  # the first was sampled when the loader was made
                        assert locked(batch.blocks[0].src) == (device != "cpu")
                    assert not locked(g.features["x"][batch.input_ids])
                    assert set(runtime.devices.values()) <= {1}
            del batch
            g.pool.trim()
            assert not runtime.locked


# -- a GPU

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@on_a_gpu
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


@on_a_gpu
def test_a_loop_in_a_stream_of_its_own(dataset: Path) -> None:
    """It has each batch, and its memory until it has computed on it: that is long after the batch was dropped."""
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"features": ["x"], "device": "cuda", "device_cache": 0.2, "prefetch": 2}
        sums, wanted = [], []
        with featstore.Loader(g, sampler, g.node_data["train_idx"], 40, **options) as loader:
            with torch.cuda.stream(torch.cuda.Stream()):
                for batch in loader:
                    wanted.append(batch.input_ids.cpu())
                    torch.cuda._sleep(20_000_000)
                    sums.append(batch.x.double().sum())
                    del batch
                found = torch.stack(sums).cpu()
        for ids, total in zip(wanted, found.tolist(), strict=True):
            assert total == pytest.approx(g.features["x"][ids].double().sum().item(), rel=1e-9)
