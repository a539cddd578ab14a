"""Memory on loan: the ledger's model, caches that give rows back, and gathers beside them."""

from __future__ import annotations

import contextlib
import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.cache.base import PolicyContext, get_policy
from featstore.cache.table import FeatureCache
from featstore.errors import BudgetError, PluginError
from featstore.gather.plan import Tier
from tests.support import taking
from tests.support.loaders import make_loader
from tests.support.refusing import refuses

ONLINE = ["lru", "clock", "sieve", "s3fifo"]


class Holder:
    """Reserves a least and something beyond it, which it lends."""

    def __init__(self, budget: Budget, least: int, more: int, cost: int, step: int) -> None:
        self.held = budget.reserve(f"holder {cost}", least + more)
        self.least, self.step, self.calls = least, step, 0
        self.loan = budget.lend(self.lent, self.give_back, cost=cost, of=self.held)

    def lent(self) -> int:
        return self.held.n_bytes - self.least

    def give_back(self, n_bytes: int) -> int:
        self.calls += 1
        freed = min(self.lent(), max(n_bytes, self.step))
        self.held.resize(self.held.n_bytes - freed)
        return freed


def test_a_holder_that_reserves_while_it_gives_back_is_refused() -> None:
    budget = Budget(100)

    class Greedy(Holder):
        def give_back(self, n_bytes: int) -> int:
            refuses(BudgetError, "", lambda: budget.reserve("for giving back", 50))
            return super().give_back(n_bytes)

    holder = Greedy(budget, 0, 90, 0, 1)
    budget.reserve("more", 40)
    assert holder.lent() == 60


def rows_of(n: int, width: int = 24) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, width), dtype=np.uint8)


def cached(cache: FeatureCache) -> dict[int, int]:
    """Slot of each cached row."""
    found = cache.map.slot_of_row if cache.capacity else np.empty(0, np.int32)
    return {int(row): int(found[row]) for row in np.flatnonzero(found >= 0)}


@pytest.mark.parametrize("given_back", [1, 500, 3_000, 10_000, 10**6])
def test_a_static_cache_loses_its_lowest_scores(given_back: int) -> None:
    n = 1_000
    data, budget = rows_of(n), Budget(1 << 20)
    degrees = np.random.default_rng(1).permutation(n)
    cache = FeatureCache(400, 24, n, get_policy("degree"), PolicyContext(n, 24, out_degree_of=lambda: degrees), budget)

    def read(rows: np.ndarray, out: np.ndarray, positions: np.ndarray) -> None:
        out[positions] = data[rows]

    cache.fill(read, by_score=True)
    cache.lend()
    best = np.argsort(-degrees)
    held = budget.used
    budget.reserve("others", budget.total - held + min(given_back, held))
    assert budget.used <= budget.total
    assert cache.is_cut
    slots = cached(cache)
    assert sorted(slots) == sorted(best[: cache.capacity].tolist())
    for row, slot in slots.items():
        assert (cache.array[slot] == data[row]).all()
    cache._check()
    ids = np.arange(n)
    plan = cache.plan(ids)
    hits = {int(k) for part in plan.parts if part.tier == Tier.HOST for k in np.asarray(part.positions)}
    assert hits == set(slots)


def run_batch(cache: FeatureCache, data: np.ndarray, ids: np.ndarray) -> None:
    """Gather a batch as a store does, and compare."""
    with cache.pinned():
        plan = cache.plan(ids)
        out = np.full((len(ids), data.shape[1]), 0xEE, np.uint8)
        for part in plan.parts:
            source = cache.array if part.tier == Tier.HOST else data
            out[slice(None) if part.positions is None else part.positions] = source[part.addresses]
    assert (out == data[ids]).all()
    missed = next((part for part in plan.parts if part.tier == Tier.BASE), None)
    if missed is None:
        cache.admit(ids[:0])
    else:
        cache.apply(cache.admit(np.asarray(missed.addresses), missed.positions), out)


@pytest.mark.parametrize("policy", ONLINE)
@pytest.mark.parametrize("n_used", [0, 3, 20, 50])
@pytest.mark.parametrize("left", [0, 1, 7, 30])
def test_an_online_cache_goes_on_with_fewer_rows(policy: str, n_used: int, left: int) -> None:
    n = 200
    data, budget = rows_of(n), Budget(1 << 20)
    cache = FeatureCache(50, 24, n, get_policy(policy), PolicyContext(n, 24), budget)
    cache.lend()
    rng = np.random.default_rng(n_used + left)
    order = rng.permutation(n)[:n_used]
    for row in order:
        run_batch(cache, data, np.array([row]))
    row_bytes = 24 + 8 + 1 + get_policy(policy).slot_bytes
    before, free = set(cached(cache)), budget.available
    with budget.reserve("others", free + (50 - left) * row_bytes if left else budget.total):
        assert cache.capacity <= left
        kept = cached(cache)
        assert set(kept) <= before
        assert len(kept) == min(n_used, cache.capacity)
        assert sorted(kept.values()) == list(range(len(kept)))
        if policy == "lru":
            assert set(kept) == set(order[len(order) - len(kept) :].tolist())
        for row, slot in kept.items():
            assert (cache.array[slot] == data[row]).all()
        assert budget.used <= budget.total
        for _ in range(10):
            run_batch(cache, data, rng.integers(0, n, 40))
            if left:
                cache._check()
        assert cache.n_cached == cache.capacity


def test_a_cache_is_given_back_whole_just_before_a_batch_is_admitted() -> None:
    """By another thread, in the moment before the batch's thread has the lock."""
    data, budget = rows_of(100), Budget(1 << 20)
    cache = FeatureCache(50, 24, 100, get_policy("sieve"), PolicyContext(100, 24), budget)
    cache.lend()
    lock = cache._lock
    taken: list[int] = []

    class Late:
        def __enter__(self) -> None:
            if not taken:
                taken.append(1)
                cache._lock = lock
                thread = threading.Thread(target=budget.reserve, args=("others", budget.total))
                thread.start()
                thread.join()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    plan = cache.plan(np.arange(30))
    (missed,) = plan.parts
    cache._lock = cast(Any, Late())
    changes = cache.admit(np.asarray(missed.addresses))
    assert taken
    assert cache.capacity == 0
    cache.apply(changes, data[:30].copy())
    run_batch(cache, data, np.arange(30))


def test_a_policy_that_fails_while_its_cache_shrinks_is_named_and_harms_no_row() -> None:
    lru: Any = type(get_policy("lru"))

    class Stubborn(lru):
        name = "stubborn"

        def victims(self, n: int) -> Any:
            raise RuntimeError("no")

    data, budget = rows_of(100), Budget(1 << 20)
    cache = FeatureCache(50, 24, 100, Stubborn(), PolicyContext(100, 24), budget)
    cache.lend()
    run_batch(cache, data, np.arange(40))
    budget.reserve("others", budget.available + 400)
    assert cache.is_cut
    refuses(PluginError, "stubborn", lambda: run_batch(cache, data, np.arange(30)))
    run_batch(cache, data, np.arange(30))
    cache._check()


def test_pages_go_back_to_the_system() -> None:
    n, width = 64, 1 << 20
    budget = Budget(n * width * 2)
    cache = FeatureCache(n, width, n, None, budget=budget)
    cache.lend()
    cache.array[:] = 1
    whole = cache.array
    budget.reserve("others", budget.available + 40 * width)
    assert cache.capacity <= 24
    assert (cache.array == 1).all()
    assert not whole[cache.capacity :].any()  # fresh pages: what was there is gone


@pytest.mark.parametrize("policy", ["degree", "lru"])
def test_a_cache_on_demand_is_made_anew_where_it_lost_much_and_that_is_free(small: SimpleNamespace, policy: str) -> None:
    """A little lost is not worth reading all rows again; a lot that others still hold cannot be had; a user's cache is his."""
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=1)
        strategy = featstore.OnDemand(cache="auto", policy=policy)
        with featstore.Loader(g, sampler, np.arange(200), 20, labels=None, strategy=strategy) as loader:
            store = g.features["x"]
            whole = store.cache
            row = whole.nbytes // small.num_nodes

            def epoch() -> FeatureCache:
                for batch in loader:
                    assert torch.equal(batch.x, torch.from_numpy(small.x)[batch.input_ids])
                assert store.cache is not None
                return store.cache

            assert epoch() is whole
            g.pool.trim()
            g.budget.reserve("others", g.budget.available + 20 * row).release()
            assert whole.is_cut
            assert epoch() is whole
            g.pool.trim()
            g.reader.trim()
            others = g.budget.reserve("others", g.budget.available + whole.nbytes // 2)
            assert loader._runner.memory.unused() < whole.nbytes // 2
            assert epoch() is whole
            others.release()
            again = epoch()
            assert again is not whole
            assert again.capacity == small.num_nodes
            g.cache("x", 0.5)
            assert epoch().capacity == small.num_nodes // 2


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed"])
def test_rows_are_right_while_another_thread_takes_memory_back(small: SimpleNamespace, strategy: str) -> None:
    reference = torch.from_numpy(small.x)
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=1)
        options: dict[str, Any] = {"policy": "degree"} if strategy == "ondemand" else {"length": 3}
        loader = make_loader(
            g,
            sampler,
            np.arange(0, small.num_nodes, 3),
            batch_size=20,
            labels=None,
            strategy=strategy,
            cache="auto",
            **options,
        )
        g.pool.trim()
        cache = g.features["x"].cache
        assert cache is not None
        cut, stop = threading.Event(), threading.Event()

        def take_back() -> None:
            held = []
            try:
                while not stop.is_set() and g.budget.on_loan:
                    held.append(taking.take_back(g.budget, 4, more=1))
                    if cache.is_cut:  # what costs less is taken back before
                        cut.set()
            finally:
                cut.set()  # or the loop would wait for ever
                for each in held:
                    each.release()

        thread = threading.Thread(target=take_back)
        try:
            for k, batch in enumerate(loader):
                if k == 3:
                    thread.start()
                    cut.wait()
                assert torch.equal(batch.x, reference[batch.input_ids])
        finally:
            stop.set()
            thread.join()
        assert g.features["x"].cache is cache
        assert cache.is_cut
        for batch in loader:  # and once more, in the memory that there is now
            assert torch.equal(batch.x, reference[batch.input_ids])
        after = g.features["x"].cache
        assert after.capacity == small.num_nodes


N_IDLE = 6_000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 3 MB of features and 2.4 MB of node data, opened in 5 MiB by its users."""
    path = tmp_path_factory.mktemp("wide") / "g"
    indptr, indices = np.arange(0, 8 * N_IDLE + 1, 8), np.random.default_rng(0).integers(0, N_IDLE, 8 * N_IDLE)
    x, y = np.ones((N_IDLE, 128), np.float32), np.ones((N_IDLE, 100), np.float32)
    data = {"y": y, "l": np.zeros(N_IDLE, np.int64)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, data, progress=False).close()
    return str(path)


def history_epoch(g: Any) -> None:
    history = featstore.History(64, nodes=0.5)
    # In one thread: what the cache on loan gives back to several depends on which of them comes first.
    options: dict[str, Any] = {"labels": "l", "history": history, "prefetch": 0, "threads": {"sample": 1, "read": 1}}
    with featstore.Loader(g, featstore.NeighborSampler(g, [3, 3]), torch.arange(200), 50, **options) as loader:
        for batch in loader:
            batch.history.merge(torch.ones(batch.blocks[-2].n_dst, 64))


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.node_data["y"],
        lambda g: g.cache("x", "2MiB"),
        lambda g: g.cache("x", "2MiB", policy="lru"),
        lambda g: g.cache_neighbors("300KiB", progress=False),
        lambda g: g.cache_neighbors(progress=False),
        lambda g: featstore.partition(g, 10, keep=False, progress=False),
        lambda g: g.aggregate("x", "mean", name="m", overwrite=True, progress=False),
        lambda g: featstore.infer(g, [lambda h, block: h[: block.n_dst]], "x", "h", overwrite=True, progress=False),
        history_epoch,
        lambda g: g.features["x"][: N_IDLE // 2],
    ],
)
def test_buffers_that_nobody_uses_are_lent(wide: str, use: Any) -> None:
    """Whatever is used, it gets as much as where nothing was gathered before, to what threads in turn leave over."""
    reports = []
    for is_filled in (False, True):
        with featstore.open(wide, memory="5MiB") as g:
            if is_filled:
                for n in (N_IDLE, N_IDLE // 5):
                    g.features["x"][:n]
                held = g.memory_report().holders["batch buffers"]
                assert held.bytes == held.on_loan_bytes >= 3_000_000
                assert held.on_loan_s >= 0
            kept = use(g)
            assert g.budget.used <= g.budget.total
            g.pool.trim()
            g.reader.trim()
            reports.append({name: n for name, n in g.memory_report().items() if "neighbor" in name or "cache" in name})
            del kept
    assert reports[1] == pytest.approx(reports[0], rel=0.02)


def test_a_buffer_in_use_is_not_lent(wide: str) -> None:
    with featstore.open(wide, memory="5MiB") as g:
        rows = g.features["x"][:]
        assert g.budget.on_loan == 0
        refuses(BudgetError, "node data needs", lambda: g.node_data["y"])
        assert torch.equal(rows, torch.ones_like(rows))
        del rows
        assert g.node_data["y"].sum() == N_IDLE * 100


def test_a_child_takes_back_what_its_parent_left_idle(wide: str) -> None:
    with featstore.open(wide, memory="5MiB") as g:
        g.features["x"][:]
        if (pid := os.fork()) == 0:
            ok = False
            with contextlib.suppress(BaseException):
                ok = bool(g.node_data["y"].numpy().sum() == N_IDLE * 100)
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(("policy", "is_dear"), [("belady", True), ("sieve", False), ("degree", False)])
def test_planned_rows_are_dear(policy: str, is_dear: bool) -> None:
    """Plans count on their rows: who can wait for other memory takes those of other policies alone."""
    budget = Budget(1 << 20)
    chosen = None if is_dear else get_policy(policy)  # None: plans say what is in it
    cache = FeatureCache(500, 64, 1000, chosen, None, budget)
    cache.lend()
    more = budget.available + 64
    with budget.sparing():
        if is_dear:
            refuses(BudgetError, "", lambda: budget.reserve("more", more))
        else:
            budget.reserve("more", more)
    assert (cache.capacity == 500) == is_dear
    if is_dear:
        budget.reserve("more", more)
        assert cache.capacity < 500
    cache.close()
