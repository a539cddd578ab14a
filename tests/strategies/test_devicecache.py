"""Rows on the device, for every strategy: batches are the same bits, and what the device holds is neither planned nor read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.cache.devicetier import DeviceTier
from featstore.cache.select import top_rows, top_rows_beside
from featstore.errors import OptionError
from featstore.gather.buffers import BufferPool
from featstore.gather.sources import MemorySource
from featstore.plan.trace import Trace
from featstore.storage.rowfile import RowFile
from tests.support.loaders import make_loader, row_policies

N, BATCH = 600, 40
WIDTH = 4 * 7 + 2 * 3 + 2 * 5 + 11  # bytes of the features' rows
STRATEGIES: dict[str, dict[str, Any]] = {
    "on demand": {},
    "degree": {"policy": "degree", "cache": 0.1},
    "lru": {"policy": "lru", "cache": 0.1},
    "belady": {"strategy": "superbatch", "cache": 0.1, "length": 4},
    "fixed": {"strategy": "superbatch", "cache": 0.1, "policy": "degree", "length": 4},
    "ginex": {"strategy": "ginex", "cache": 0.1, "length": 4},
    "streamed": {"strategy": "streamed", "cache": 0.1, "length": 4},
    "auto": {"strategy": "auto"},
}
pytestmark = pytest.mark.filterwarnings("ignore:strategy '(streamed|auto)':featstore.PerformanceWarning")


@pytest.fixture(scope="module")
def arrays() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(3)
    return {
        "x": torch.from_numpy(rng.standard_normal((N, 7)).astype(np.float32)),
        "h": torch.from_numpy(rng.standard_normal((N, 3)).astype(np.float16)),
        "b": torch.from_numpy(rng.standard_normal((N, 5))).to(torch.bfloat16),
        "q": torch.from_numpy(rng.integers(-128, 128, (N, 11), dtype=np.int8)),
    }


def make_dataset(path: Path, arrays: dict[str, torch.Tensor]) -> Path:
    rng = np.random.default_rng(4)
    indptr = np.arange(0, 6 * N + 1, 6)
    indices = np.minimum((N * rng.random(6 * N) ** 3).astype(np.int64), N - 1)
    featstore.OutOfCoreGraph.create(path, indptr, indices, features=arrays, progress=False).close()
    return path


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, torch.Tensor]) -> Path:
    return make_dataset(tmp_path_factory.mktemp("device") / "graph", arrays)


def epoch(
    g: featstore.OutOfCoreGraph, options: dict[str, Any], epochs: int = 1
) -> tuple[list[list[featstore.MiniBatch]], dict[str, Any]]:
    """Run epochs; return their batches, and the loader's counts."""
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    common: dict[str, Any] = {"features": list(g.features), "labels": None}
    with make_loader(g, sampler, np.arange(0, N, 2), BATCH, **(common | options)) as loader:
        return [list(loader) for _ in range(epochs)], loader.stats()


def check(batches: list[featstore.MiniBatch], arrays: dict[str, torch.Tensor], device: str = "cpu") -> None:
    """Compare every feature of every batch with an in-memory look-up, bit for bit."""
    assert len(batches) == -(-N // 2 // BATCH)
    for batch in batches:
        for name, rows in batch.features.items():
            want = arrays[name][batch.input_ids.cpu()]
            assert rows.device.type == device
            assert rows.dtype == want.dtype
            assert torch.equal(rows.cpu().contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("name", STRATEGIES)
def test_batches_whatever_the_device_holds(dataset: Path, arrays: dict[str, torch.Tensor], name: str, device: str) -> None:
    """One row, a tenth, more than there are; of none see the contract's suite."""
    for size in (f"{WIDTH}B", 0.1, "1GiB"):
        with featstore.open(dataset, memory="64MiB") as g:
            (batches, _), stats = epoch(g, {**STRATEGIES[name], "device_cache": size, "device": device}, epochs=2)
            check(batches, arrays, device)
            rows = {0.1: N // 10, "1GiB": N}.get(size, 1)
            assert stats["device_cache"]["rows"] == rows
            assert sum(stats["hits"].values()) == stats["rows"]
            held = g.memory_report()
            assert "device cache" not in held
            assert "device map" not in held
        if rows == N:
            assert stats["hits"]["device"] == stats["rows"]


@pytest.mark.parametrize(
    "policy", [each for each in row_policies() if isinstance(featstore.get_policy(each), featstore.StaticPolicy)]
)
def test_batches_whatever_chooses_the_rows(dataset: Path, arrays: dict[str, torch.Tensor], policy: str, device: str) -> None:
    for options in (STRATEGIES["degree"], STRATEGIES["fixed"]):
        with featstore.open(dataset, memory="64MiB") as g:
            cache = featstore.DeviceCache(0.2, policy=policy)
            (batches,), stats = epoch(g, {**options, "policy": policy, "device_cache": cache, "device": device})
            check(batches, arrays, device)
            # The host has the next best: together they serve what a tier of as many rows as both would.
            both, alone = (
                epoch(g, {"device_cache": featstore.DeviceCache(each, policy=policy), "device": device})[1]["hits"]
                for each in (0.3, 0.2)
            )
            assert stats["hits"]["device"] == alone["device"]
            n_host = sum(int(g.features[name].cache is not None) for name in g.features)
            assert n_host in (0, len(arrays))
            assert abs(stats["hits"]["device"] + stats["hits"]["host"] - both["device"]) <= 0.02 * both["device"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_fall_by_what_the_device_holds(
    dataset: Path, arrays: dict[str, torch.Tensor], name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readers, too, see nothing of its rows once it is filled: they are never asked for them again."""
    asked: list[np.ndarray[Any, Any]] = []
    gather = RowFile.gather

    def watched(self: RowFile, rows: Any, *args: Any, **options: Any) -> Any:
        if self.row_bytes == 28 and len(rows):  # not of neighbour lists
            asked.append(np.array(rows))
        return gather(self, rows, *args, **options)

    monkeypatch.setattr(RowFile, "gather", watched)
    with featstore.open(dataset, memory="64MiB") as g:
        with g.policy_inputs(WIDTH) as inputs:
            top = np.sort(np.argsort(-inputs.context.out_degree, kind="stable")[: N // 5])
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options = {**STRATEGIES[name], "device_cache": 0.2, "device": device, "features": ["x"], "labels": None}
        with make_loader(g, sampler, np.arange(0, N, 2), BATCH, **options) as loader:
            assert any(np.array_equal(each, top) for each in asked)
            asked.clear()
            batches = list(loader)
            check(batches, arrays, device)
            hits = loader.stats()["hits"]
        assert not np.isin(np.concatenate([np.empty(0, np.int64), *asked]), top).any()
        assert hits["device"] == sum(int(np.isin(batch.input_ids.cpu().numpy(), top).sum()) for batch in batches)


@pytest.mark.parametrize("name", ["belady", "ginex", "streamed"])
def test_a_planned_cache_sees_the_other_accesses_alone(dataset: Path, name: str, device: str) -> None:
    """Its loads are those of Belady's policy over the batches without the device's rows, in one superbatch."""
    with featstore.open(dataset, memory="64MiB") as g:
        options = {**STRATEGIES[name], "length": 100, "features": ["x"], "device_cache": 0.1, "device": device}
        (batches,), stats = epoch(g, options)
        with g.policy_inputs(WIDTH) as inputs:
            top = top_rows(inputs.context.out_degree, N // 10)
        rest = [ids[~np.isin(ids, top)] for ids in (batch.input_ids.cpu().numpy() for batch in batches)]
        loads = int(featstore.simulate(Trace(rest, N), N // 10, "belady").sum())
        missed = stats["hits"].get("packed", 0) + stats["hits"]["base"]
        first = min(N // 10, len(np.unique(np.concatenate(rest)))) if name == "ginex" else 0  # which fills its cache at the start
        assert abs(missed + first - loads) <= (0 if name != "ginex" else first)


def test_no_nodes(tmp_path: Path, device: str) -> None:
    empty = np.empty((0, 3), np.float32)
    featstore.OutOfCoreGraph.create(tmp_path / "g", [0], np.empty(0, np.int64), features={"x": empty}, progress=False).close()
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        for strategy in ("ondemand", "superbatch", "streamed"):
            for size in (0.5, "1GiB"):
                options: dict[str, Any] = {"labels": None, "strategy": strategy, "device": device, "device_cache": size}
                with featstore.Loader(g, featstore.NeighborSampler(g, [2]), [], **options) as loader:
                    assert list(loader) == []


def test_what_is_refused(dataset: Path, device: str) -> None:
    with featstore.open(dataset, memory="16MiB") as g:
        before = g.memory_report()
        for policy in ("lru", "belady"):
            with pytest.raises(
                OptionError, match=f"device_cache: rows on the device do not change: policy '{policy}' is not static"
            ):
                featstore.DeviceCache(0.1, policy=policy)
        for size in ("fast", -1, 1.5, True):
            with pytest.raises((ValueError, TypeError)):
                featstore.DeviceCache(size)
        with pytest.raises(featstore.BudgetError, match="a device cache of one row takes"):
            epoch(g, {"device_cache": "10B", "device": device})
        assert {**g.memory_report(), "indptr": 0} == {**before, "indptr": 0}
    for name, options in STRATEGIES.items():
        with featstore.open(dataset, memory="1MiB") as g:
            g.budget.total = g.budget.used + 20_000
            with pytest.raises(featstore.BudgetError) as caught:
                epoch(g, {**options, "device_cache": 1.0, "device": device})
            assert caught.value.needed is not None, name
            assert caught.value.needed > g.budget.total
            assert "device cache" not in g.memory_report()
            g.budget.total = caught.value.needed
            epoch(g, {**options, "device_cache": 1.0, "device": device})  # which is enough


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), KeyboardInterrupt(), featstore.CorruptionError("bad", "x", 0)]
)
def test_failures_while_it_fills(dataset: Path, error: BaseException, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open(dataset, memory="16MiB") as g:
        before = g.memory_report()

        def fails(*args: Any, **options: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(type(g.features["b"].source), "gather", fails)
            with pytest.raises(type(error)):
                epoch(g, {"device_cache": 0.5, "device": device})
        found = g.memory_report()
        assert {**found, "indptr": 0} == {**before, "indptr": 0}
        epoch(g, {"device_cache": 0.5, "device": device})


@given(data=st.data())
def test_split_and_rest(device: str, data: st.DataObject) -> None:
    """They part a batch, in its order, as NumPy does."""
    n = data.draw(st.integers(1, 200))
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1)))), np.int64)
    ids = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True)), np.int64)
    budget = Budget(1 << 20)
    tier = DeviceTier(rows, {"x": ((2,), torch.float32)}, torch.device(device), BufferPool(budget), n)
    part, rest = tier.split(ids)
    here = np.isin(ids, rows)
    assert np.array_equal(part.positions, np.flatnonzero(here))
    assert np.array_equal(part.others, np.flatnonzero(~here))
    assert np.array_equal(rows[part.slots], ids[here])
    assert np.array_equal(rest, ids[~here])
    assert np.array_equal(tier.rest(ids.astype(np.int32)), rest)
    scores = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)), np.int64)
    k = data.draw(st.integers(0, n + 2))
    assert tier.map is not None
    found = top_rows_beside(scores, k, tier.map)
    left = np.setdiff1d(np.arange(n), rows)
    assert np.array_equal(found, np.sort(left[np.argsort(-scores[left], kind="stable")][:k]))
    tier.close()
    tier.close()
    assert budget.used == 0


def test_threads_by_stage(dataset: Path, arrays: dict[str, torch.Tensor], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of cached rows is by the threads that were asked for; and no batch differs."""
    copied: set[int] = set()

    class Watched(MemorySource):
        def gather(self, *args: Any, **options: Any) -> Any:
            copied.add(self.n_threads)
            return super().gather(*args, **options)

    monkeypatch.setattr("featstore.cache.gather.MemorySource", Watched)
    for name in ("degree", "lru", "belady", "fixed", "ginex", "streamed"):
        with featstore.open(dataset, memory="64MiB", threads=2) as g:
            copied.clear()
            options = {**STRATEGIES[name], "device": device}
            (batches,), _ = epoch(g, {**options, "threads": {"sample": 2, "gather": 3}, "device_cache": 0.05})
            check(batches, arrays, device)
            assert copied == {3}
            copied.clear()
            (batches,), _ = epoch(g, {**options, "threads": 3})
            check(batches, arrays, device)
            assert 3 not in copied
            for threads in ({"smaple": 1}, {"sample": 1, "transfer": 1}):
                with pytest.raises(OptionError, match=r"threads: there is no stage '(smaple|transfer)'; the stages are 'sample'"):
                    epoch(g, {"threads": threads})
