"""Transfer of batches: beside the next batch's assembly, in memory that is counted, and never before a copy is complete."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import featstore
from featstore.budget import Budget
from featstore.gather.buffers import BufferPool
from featstore.gather.counters import StageTimer
from featstore.gather.device import Apart, DeviceArray
from featstore.gather.plan import DeviceRows
from featstore.graph.feature import FeatureStore
from featstore.load.minibatch import MiniBatch
from featstore.load.transfer import Assembled, Transfer
from featstore.sampling.batch import Block
from tests.strategies.test_packed import copied, pack, run
from tests.strategies.test_superbatch import dataset, ondemand, same

__all__ = ["dataset", "ondemand", "pack"]  # fixtures

TIERS: dict[str, Any] = {"cache": 0.1, "device_cache": 0.05}


class Order:
    """Gathers that have begun, and what is put together only once the gather of the batch after has begun, or has ended."""

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
                assert self._changed.wait_for(lambda: getattr(self, wait_for) >= after, 30), "nothing runs beside the transfer"
            self.waited += 1
            return together(apart)

        monkeypatch.setattr(FeatureStore, "gather", noted)
        monkeypatch.setattr(Apart, "together", slow)


@pytest.mark.parametrize("wait_for", ["begun", "ended"])
@pytest.mark.parametrize("policy", ["frequency", "belady"])
def test_assembly_goes_on_beside_the_transfer(dataset, pack, tmp_path, ondemand, policy, wait_for, device, monkeypatch) -> None:
    """Each batch is put together after the next one's gather, and with Belady its changes of the host's cache, and is as ever."""
    mine = copied(pack, tmp_path)
    options = {**TIERS, "policy": policy, "device": device, **({"length": 7} if policy == "belady" else {})}
    run(dataset, mine, epochs=0, **options)
    order = Order(monkeypatch, 50, wait_for)
    found, stats = run(dataset, mine, epochs=1, prefetch=2, **options)
    assert order.waited == 50
    assert same(found[0], ondemand[:25])
    assert {"load", "read", "gather", "transfer"} <= stats["seconds"].keys()
    assert sum(stats["hits"].values()) == stats["rows"]


def test_short_memory_between_features_loses_no_counts(dataset, pack, tmp_path, ondemand, device, monkeypatch) -> None:
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
    tier = DeviceArray(2000, shape, dtype, torch.device("cpu"), pool, 2)
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
    views = {"aten.as_strided.default", "aten.view.default", "aten.view.dtype", "aten.detach.default", "aten.alias.default"}
    assert set(made) <= views  # no copies
    got, want = (t.reshape(5000, -1).contiguous() for t in (batch, whole[torch.from_numpy(order)]))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


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
    tier = DeviceArray(8, (3,), torch.float32, torch.device("meta"), pool)
    part = DeviceRows(np.arange(8, dtype=np.int32), np.arange(8), np.arange(8, n))
    others = made(n - 8, 3, dtype=torch.float32)
    features = {"x": made(n, 3, dtype=torch.float32), "z": others, "w": made(n, 1)}
    batch = MiniBatch(ids[: n // 2], ids, (block,), features, {"y": made(n // 2)}, 0, made(n // 2))
    return Assembled(batch, {"z": Apart(tier, part, others, tier.memory_for(part))}, {})


@pytest.mark.parametrize("fails", [False, True])
def test_host_memory_goes_back_once_the_copy_is_complete(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, log = BufferPool(Budget(10**8)), []
    transfer = Transfer(torch.device("meta"), StageTimer())
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
    assert pool._returned.qsize() == 8


def test_the_loops_stream_keeps_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a batch is another stream's: each tensor is recorded with the one that is current where the loop takes it."""
    pool, recorded = BufferPool(Budget(10**8)), []
    transfer = Transfer(torch.device("cpu"), StageTimer())
    batch = assembled(pool).batch
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor.data_ptr(), stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the loop's on {device}")
    transfer.receive(batch)
    assert recorded == []  # nothing was copied in a stream
    transfer._stream = Stream([], pool)
    transfer.receive(batch)
    tensors = [batch.input_ids, *batch.features.values(), batch.seed_index, batch.y, batch.blocks[0].src, batch.blocks[0].dst]
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
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
