"""Row sources: all kinds keep one contract, and one of a user's works where the library's do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.cache.base import get_policy
from featstore.cache.table import FeatureCache
from featstore.config import Options
from featstore.errors import BudgetError, ClosedError
from featstore.gather.buffers import BufferPool
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import Addresses, BatchPlan, Changeset, Tier, TierRows
from featstore.gather.sources import AbsentRows, ExtentSource, MemorySource, RowSource
from featstore.graph.feature import FeatureStore
from featstore.storage.extents import ExtentMap, ExtentWriter
from featstore.storage.format import sums_seed
from featstore.storage.reader import Reader
from featstore.storage.rowfile import ReadStats, RowFile
from featstore.testing import RowSourceContract
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.refusing import refuses
from tests.support.written_rows import write_rows

_readers: list[Reader] = []


def reader() -> Reader:
    _readers.append(Reader(Options.resolve("64MB"), Budget(64_000_000)))
    return _readers[-1]


@pytest.fixture(autouse=True)
def closed_readers() -> Iterator[None]:
    """Every reader is closed after the test, and holds nothing then."""
    yield
    while _readers:
        made = _readers.pop()
        made.close()
        assert made.budget.used == 0, made.budget.report()


def row_file(rows: np.ndarray, folder: Path, using: Reader | None = None) -> RowFile:
    record = write_rows(folder, rows)
    seeds = {"seed": record.seed, "sums_seed": sums_seed(record.seed), "fingerprint": record.file_id}
    return (using or reader()).open(folder / record.name, layout=record.layout, n_rows=record.n_rows, **seeds)


class TestFiles(RowSourceContract):
    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        return row_file(rows, folder)


class TestMemory(RowSourceContract):
    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        return MemorySource(rows.copy(), 2)


class Closing(ExtentSource):
    """Closes its file, too, which others may read in the library."""

    def close(self) -> ReadStats:
        cost = super().close()
        self._file.close()
        return cost


def extents_of(rows: np.ndarray, folder: Path) -> Closing:
    """The rows cut into extents, two of them empty and one of a single row, that lie in the file in another order."""
    using = reader()
    base = row_file(rows, folder, using)
    cuts, order = np.array([0, 100, 100, 130, 131, 613, 700, 700]), np.array([4, 0, 6, 1, 5, 3, 2])
    extents = ExtentMap(np.diff(cuts)[order], rows.shape[1])
    with ExtentWriter(folder / "extents", extents) as writer:
        writer.fill(base, lambda k: np.arange(cuts[order[k]], cuts[order[k] + 1]), 16 << 20)
        record = writer.finish()
    base.close()
    seeds = {"seed": record.seed, "sums_seed": sums_seed(record.seed), "fingerprint": record.file_id}
    file = using.open(folder / "extents", layout=record.layout, n_rows=record.n_rows, **seeds)
    return Closing(file, extents, np.argsort(order), 1 << 20)


class TestExtents(RowSourceContract):
    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        return extents_of(rows, folder)


def test_extents_count_what_was_read_in_vain_and_say_that_they_are_closed(tmp_path: Path) -> None:
    """Reads run ahead: those of extents that nobody took have a cost, but no rows."""
    rows = np.random.default_rng(0).integers(0, 256, (700, 400), dtype=np.uint8)
    source = extents_of(rows, tmp_path)
    source.check_open()
    out = np.empty((100, 400), np.uint8)
    cost = source.gather(range(source.n_rows), out)
    cost.add(source.close())
    assert (source.stats, cost.rows, cost.bytes_requested) == (cost, 100, 100 * 400)
    assert source.stats.bytes_read >= 100 * 400
    refuses(ClosedError, "", source.check_open)


class TestAbsent(RowSourceContract):
    absent = FileNotFoundError

    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        return AbsentRows(f"{folder}", *rows.shape, f"of {folder}")


class Shards:
    """A user's source: rows in several others, the first of each after the last of the one before."""

    path, mode, in_order = "shards", "sharded", False

    def __init__(self, shards: list[RowSource]) -> None:
        self.shards = shards
        self.bounds = np.cumsum([0, *(shard.n_rows for shard in shards)])
        self.n_rows, self.row_bytes = int(self.bounds[-1]), shards[0].row_bytes
        self.fingerprint = " ".join(shard.fingerprint for shard in shards)
        self.stats = ReadStats()
        self._lock = threading.Lock()

    def gather(
        self, addresses: Addresses, out: np.ndarray, positions: np.ndarray | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        self.check_open()
        rows = np.asarray(addresses, np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.n_rows:
            raise IndexError("no such row")
        positions, cost = np.arange(len(rows)) if positions is None else positions, ReadStats()
        which = np.searchsorted(self.bounds, rows, side="right") - 1
        for number, shard in enumerate(self.shards):
            mine = which == number
            cost.add(shard.gather(rows[mine] - self.bounds[number], out, positions[mine], gap_bytes))
        with self._lock:
            self.stats.add(cost)
        return cost

    def check_open(self) -> None:
        for shard in self.shards:
            shard.check_open()

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def shards(rows: np.ndarray, folder: Path, using: Reader | None = None) -> Shards:
    parts = []
    for number, part in enumerate(np.array_split(rows, 3)):
        (folder / str(number)).mkdir()
        parts.append(row_file(part, folder / str(number), using))
    return Shards(list(parts))


class TestShards(RowSourceContract):
    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        return shards(rows, folder)


N = 900


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeatureStore]:
    """A feature in shards."""
    using = reader()
    x = np.random.default_rng(0).standard_normal((N, 6), dtype=np.float32)
    source = shards(x.view(np.uint8), tmp_path, using)
    made = FeatureStore("x", source, x.shape, torch.float32, using, BufferPool(using.budget), 2)
    made.x = torch.from_numpy(x)  # type: ignore[attr-defined]
    yield made
    made.close()
    made._pool.close()


def use_cache(store: FeatureStore, policy: str | None, capacity: int) -> FeatureCache:
    cache = FeatureCache(capacity, store.row_bytes, len(store), None if policy is None else get_policy(policy))
    store.use_cache(cache)
    return cache


@pytest.mark.parametrize("policy", ["none", "lru", "random"])
def test_a_feature_in_shards(store: Any, policy: str) -> None:
    if policy != "none":
        use_cache(store, policy, 200).fill(store.source.gather)
    x = store.x
    rng = np.random.default_rng(1)
    for _ in range(5):
        rows = rng.integers(0, N, 700)
        assert torch.equal(store[rows], x[rows])
        assert torch.equal(store[torch.from_numpy(rows).to(torch.int32)], x[rows])
        assert torch.equal(store[rows - N], x[rows])  # from the end
        assert torch.equal(store.take(rows.reshape(70, 10), coalesce_gap=0), x[rows].reshape(70, 10, 6))
        assert torch.equal(torch.index_select(store, 0, torch.from_numpy(rows)), x[rows])
        assert torch.equal(store.take_async(rows).result(), x[rows])
    assert torch.equal(store[0], x[0])
    assert torch.equal(store[N - 1], x[-1])
    assert torch.equal(store[-1], x[-1])
    assert torch.equal(store[...], x)
    assert torch.equal(torch.stack(list(store)), x)
    assert torch.equal(torch.from_numpy(np.asarray(store)), x)
    mask = rng.random(N) < 0.3
    assert torch.equal(store[mask], x[torch.from_numpy(mask)])
    assert (store.cache is None) == (policy == "none")


def test_slices(store: Any) -> None:
    for begin in (None, 0, 7, N - 1, N, 2 * N, -1, -N, -5):
        for end in (None, 0, 1, N - 3, N + 3, -1, -N - 1):
            for step in (None, 1, 2, 7, -1, -3):
                wanted = np.arange(N)[begin:end:step].copy()  # torch takes no negative strides
                assert torch.equal(store[begin:end:step], store.x[wanted]), (begin, end, step)


def test_what_a_planned_cache_gave_back_is_read(store: Any) -> None:
    cache, counts = use_cache(store, None, 4), GatherCounts()
    rows, here, none = np.array([7, 899, 0]), np.arange(3), np.empty(0, np.int64)
    ids = torch.from_numpy(rows)
    plan = BatchPlan(3, (TierRows(Tier.BASE, rows),), Changeset(rows, here, here.astype(np.int32), none))
    assert torch.equal(store.gather(ids, plan, None, counts), store.x[rows])
    assert cache.n_cached == 3
    hits = BatchPlan(3, (TierRows(Tier.HOST, here.astype(np.int32), here),))
    assert torch.equal(store.gather(ids, hits, None, counts), store.x[rows])
    assert (counts.rows, counts.read.rows) == ({Tier.BASE: 3, Tier.HOST: 3}, 3)
    cache._cut(1)
    assert torch.equal(store.gather(ids, hits, None, counts), store.x[rows])
    assert (counts.rows, counts.read.rows) == ({Tier.BASE: 5, Tier.HOST: 4}, 5)


def test_short_memory_leaves_an_extent_where_it_is(store: Any) -> None:
    """A gather that failed for lack of memory may be repeated, though extents come once: they are read last."""

    class Once(MemorySource):
        in_order = True

        def gather(self, *arguments: Any) -> ReadStats:
            assert not calls.count("once")
            calls.append("once")
            return super().gather(*arguments)

    class Short(MemorySource):
        def gather(self, *arguments: Any) -> ReadStats:
            calls.append("base")
            if calls == ["base"]:
                raise BudgetError("no room for scratch", 1)
            return super().gather(*arguments)

    calls: list[str] = []
    rows = store.x.numpy().view(np.uint8)
    plan = BatchPlan(
        5, (TierRows(Tier.PACKED, range(2), np.array([4, 0])), TierRows(Tier.BASE, np.array([8, 1, 2]), np.array([1, 2, 3])))
    )
    store.source.close()
    store._gather.source = Short(rows, 1)
    store.use_cache(None)
    ids, tiers = torch.arange(5), {Tier.PACKED: Once(rows[:2], 1)}
    refuses(BudgetError, "", lambda: store.gather(ids, plan, tiers))
    assert torch.equal(store.gather(ids, plan, tiers), store.x[[1, 8, 1, 2, 0]])
    assert calls == ["base", "base", "once"]


def test_a_closed_source_is_the_stores_error(store: FeatureStore) -> None:
    title = f"FeatureStore('x', shape=(900, 6), dtype=torch.float32, backend={store.stats()['backend']!r})"
    assert repr(store).splitlines()[0] == title
    assert store.stats()["mode"] == "sharded"
    store.close()
    for ids in ([], [0], [0, 1]):
        refuses(ClosedError, "", lambda: store[ids])


PLANNERS: dict[str, dict[str, Any]] = {
    "online": {"policy": "lru"},
    "static": {"policy": "degree"},
    "superbatch": {"strategy": "superbatch", "length": 4},
    "residents": {"strategy": "superbatch", "length": 4, "policy": "degree"},
    "serial": {"strategy": "ginex", "length": 4},
    "streamed": {"strategy": "streamed", "length": 4},
    "packed": {"strategy": "packed", "policy": "belady"},
    "frequent": {"strategy": "packed", "policy": "frequency", "device_cache": 0.1},
}


@pytest.mark.filterwarnings("ignore:strategy 'streamed':featstore.PerformanceWarning")
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_after_a_part_of_the_cache_was_given_back(tmp_path: Path, planner: str) -> None:
    n, options = 1000, {"cache": 0.03, "labels": None, "prefetch": 0, **PLANNERS[planner]}
    x = np.random.default_rng(0).standard_normal((n, 5)).astype(np.float32)
    featstore.OutOfCoreGraph.create(tmp_path / "g", *make_graph(n, 6.0), {"x": x}, progress=False).close()
    with featstore.open(tmp_path / "g", memory="32MB") as g:
        store, sampler = g.features["x"], featstore.NeighborSampler(g, [3, 3], seed=1)
        given: tuple[Any, ...] = (sampler, np.arange(0, n, 3), 25)
        if options.get("strategy") == "packed":
            featstore.sample_offline(g, *given, path=tmp_path / "p", progress=False).close()
            given, options["pack"] = (), tmp_path / "p"
        with make_loader(g, *given, **options) as loader:
            for _ in range(2):
                for number, batch in enumerate(loader):
                    assert torch.equal(batch.x, torch.from_numpy(x)[batch.input_ids])
                    if number == 5:
                        store.cache.lend()
                        assert store.cache.give_back(store.cache.array.nbytes) > 0
            assert loader.stats()["hits"]["host"] > 0


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch"])
def test_loaders_run_over_a_users_source(tmp_path: Path, strategy: str) -> None:
    """Same batches as from the dataset's own file; what needs pages says so."""
    n = 2000
    indptr, indices = make_graph(n, 6.0)
    x = np.random.default_rng(0).standard_normal((n, 5)).astype(np.float32)
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", indptr, indices, {"x": x}, {"ids": np.arange(0, n, 3)}, progress=False
    ).close()
    with featstore.open(tmp_path / "g", memory="32MB") as g:
        old = g.features["x"]
        source = shards(x.view(np.uint8), tmp_path, g.reader)
        g.columns["x"] = FeatureStore("x", source, x.shape, torch.float32, g.reader, g.pool, 2)
        sampler = featstore.NeighborSampler(g, [3, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 50, "labels": None, "cache": 0.2, "strategy": strategy}
        with make_loader(g, sampler, g.node_data["ids"], **options) as loader:
            for batch in loader:
                assert torch.equal(batch.x, torch.from_numpy(x)[batch.input_ids])
            assert loader.stats()["hits"]["host"] > 0
            assert loader.stats()["rows_loaded"] <= source.stats.rows
        with pytest.raises(ValueError, match="the rows of 'x' cannot be packed: shards is not read in pages"):
            make_loader(g, sampler, g.node_data["ids"], **{**options, "strategy": "streamed"})
        old.close()
