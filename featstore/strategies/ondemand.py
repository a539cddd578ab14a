"""``OnDemand``: sample a batch when its turn comes, and read the rows that the host cache lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from featstore.cache.base import OnlinePolicy, Policy, StaticPolicy, get_policy
from featstore.cache.table import FeatureCache
from featstore.epochmemory import EpochMemory
from featstore.errors import BusyError
from featstore.estimate.batchsize import is_tight
from featstore.estimate.cost import (
    DEGREE,
    ONLINE,
    STATIC,
    Estimate,
    Machine,
    Workload,
    copied_s,
    fresh_s,
    gathered_s,
    put_together,
    random_read_s,
    random_reads,
)
from featstore.graph.feature import FeatureStore
from featstore.sampling.sampledbatches import EpochBatches
from featstore.strategies.accesscounts import AccessCounts
from featstore.strategies.base import Batch, EpochRun, Runner, Strategy
from featstore.strategies.caches import (
    check_instances,
    make_online_edge_caches,
    online_edge_bytes,
    size_caches,
)
from featstore.strategies.context import Context
from featstore.strategies.lists import with_lists
from featstore.strategies.memory import SAMPLED_AHEAD, Memory, ask, ask_of_bytes
from featstore.strategies.options import CACHE, EDGE_CACHE, EDGE_CACHE_HELP, check_managed, option, policy_of
from featstore.strategies.registry import register_strategy

__all__ = ["OnDemand", "are_cached", "stand_in"]

LOST_FRACTION = 1 / 4  # of their bytes: caches are made anew only if they gave back more


@register_strategy("ondemand")
@dataclass(frozen=True)
class OnDemand(Strategy):
    """Sample a batch when its turn comes, and read the rows that the host cache lacks.

    Parameters
    ----------
    cache : int, str, float or None
        Host cache of the features: bytes (``"1GiB"``) or a share of the rows (``"10%"`` or ``0.1``). ``"auto"``, the default,
        keeps the cache that a feature has, of ``g.cache`` or of another loader under the same policy. Features without one get
        a cache in the memory that batches leave. None: the cache that a feature has, if any.
    policy : str, Policy or class
        A static or an online policy. ``"frequency"`` samples the first epoch once more to count.
    edge_cache : int, str, float or None
        Host cache of the edge features: bytes, or a share of the edges. None: the cache that an edge feature has, if any.
    edge_policy : str, Policy or class
        An online policy, over edge ids. Static policies are refused: they score nodes.

    Raises
    ------
    OptionError
        A value cannot be used; a policy is given without a cache.
    """

    cache: int | float | str | None = option("auto", CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto")
    policy: str | Policy | type[Policy] = option("degree", policy_of(StaticPolicy, OnlinePolicy), "which rows stay in memory")

    edge_cache: int | float | str | None = option(None, EDGE_CACHE, EDGE_CACHE_HELP)
    edge_policy: str | Policy | type[Policy] = option("sieve", policy_of(OnlinePolicy), "which rows of edges stay in memory")

    takes_history: ClassVar[bool] = True
    takes_types: ClassVar[bool] = True
    takes_mixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_managed(self, "policy", "cache", "'auto'")
        check_managed(self, "edge_policy", "edge_cache", "'10%'")

    @classmethod
    def estimate(cls, workload: Workload, machine: Machine) -> Sequence[Estimate]:
        """See :class:`~featstore.Strategy`."""
        return _by_counts(workload, machine), _by_degree(workload, machine), _online(workload, machine)

    def run(self, context: Context) -> Runner:
        """See :class:`~featstore.Strategy`."""
        memory, cache = None, self.cache
        of_edges = online_edge_bytes(context, self.edge_cache, self.edge_policy)
        own = [name for name in context.features if cache != "auto" or not _is_cached(context.nodes.stores[name], self.policy)]
        if cache == "auto" and not own:
            cache = None
        # The caches to be made replace those that the features have.
        if cache is not None:
            context.nodes.of(own).drop_caches()
        if of_edges:
            context.edges.drop_caches()
        context = ask_of_bytes(context, cache)
        of_nodes = {} if cache == "auto" else context.nodes.sizes(cache, get_policy(self.policy), context.batch)
        caches = sum(of_nodes.values()) + sum(of_edges.values())
        context = with_lists(context, caches)
        shares = cache is not None or bool(of_edges) or context.divide is not None
        shares = shares or context.batches.lists is not None or context.batches.ahead_bytes() != (0, 0)
        if shares or is_tight(context.graph, context.batches, context.nodes.width):
            context, memory = ask(context, caches=caches)
            memory.divide()
        make_online_edge_caches(context, of_edges, self.edge_policy)
        return OnDemandRunner(context, memory, cache, self.policy, own)


class OnDemandRunner(Runner):
    """Run batches that are sampled when they are asked for."""

    def __init__(
        self,
        context: Context,
        memory: Memory | None,
        cache: int | float | str | None,
        policy: str | Policy | type[Policy],
        own: Sequence[str],
    ) -> None:
        super().__init__(context, memory)
        self._is_static, self._beside = False, context.tiers
        self._is_owed = False  # a cache could not be made, because the feature's cache followed another loader's plans
        self._caches: dict[str, FeatureCache] = {}  # caches that were made
        self._whole: dict[str, int] = {}  # bytes of these caches before they gave any back
        self._ahead: EpochMemory | None = None  # memory of a sampler that draws many batches at once
        if SAMPLED_AHEAD in self.memory.granted:
            context.graph.reader.trim()  # queues of the threads that sampled for estimates or counts
            self._ahead = EpochMemory(context.graph.budget, self.memory.held, partial(context.batches.keep_ahead, 0))
        if cache is not None:
            check_instances(policy, len(context.features))
        if context.divide is not None:
            context.divide(context, self.memory, cache, get_policy(policy))
        if cache is None:
            return
        sizes, self.prefetch = size_caches(replace(context, nodes=context.nodes.of(own)), self.memory, cache, get_policy(policy))
        self._remake = partial(self._make_caches, sizes, policy, on_loan=cache == "auto" or context.chosen.lends_caches)
        self._remake()
        self._is_static = bool(sizes) and isinstance(get_policy(policy), StaticPolicy)

    def _make_caches(self, sizes: Mapping[str, int], policy: str | Policy | type[Policy], *, on_loan: bool) -> None:
        graph, device, is_static = self.context.graph, self.context.on_device, isinstance(get_policy(policy), StaticPolicy)
        self._beside, self._is_owed = self.context.tiers, False
        with self.context.timer.time("cache"), AccessCounts(self.context) as counts:
            for name, n_bytes in sizes.items():
                if graph.columns.get(name) is not self.context.nodes.stores[name]:
                    continue  # it was changed since: the loader goes on with the earlier rows, which have no cache any more
                if self.context.nodes.is_claimed(name):
                    self._is_owed = True
                    continue
                tier = None if device is None or not is_static else device.of(name)
                beside = None if tier is None else tier.map
                try:
                    graph.row_caches.make(name, n_bytes, get_policy(policy), counts=counts, on_loan=on_loan, without=beside)
                    self._note(name)
                except BusyError:  # an epoch with plans began meanwhile
                    self._is_owed = True

    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch``. Nothing is done ahead, except by a sampler that draws many batches at once."""
        # A static cache leaves out the rows on the device: it is made anew when these have changed.
        if self._is_owed or (self._is_static and self._beside != self.context.tiers) or self._may_grow_again():
            self._remake()
        order = self.context.batches.epoch(epoch)
        if self._ahead is None or self._ahead.is_running:  # the memory is another running epoch's
            return _OnDemandEpoch(self.context, order.windowed(start))
        use = self._ahead.begin("batches drawn at once")
        return _OnDemandEpoch(self.context, order.windowed(start, self._ahead[SAMPLED_AHEAD]), partial(self._ahead.end, use))

    def _note(self, name: str) -> None:
        """Record the cache that was made for a feature, and its bytes."""
        cache = self.context.nodes.stores[name].cache
        if cache is not None:
            self._caches[name], self._whole[name] = cache, max(self._whole.get(name, 0), cache.nbytes)

    def _may_grow_again(self) -> bool:
        """Return whether caches gave back so much that reading their rows anew pays, and that memory is free again."""
        lost = 0
        for name, cache in self._caches.items():
            if self.context.nodes.stores[name].cache is cache and cache.is_cut:
                lost += self._whole[name] - cache.nbytes
        return lost > int(sum(self._whole.values()) * LOST_FRACTION) and lost <= self.memory.unused()

    def close(self, failed: bool = False) -> None:
        """Give the sampler's memory back; may be called again."""
        if self._ahead is not None:
            self._ahead.close()


def _is_cached(store: FeatureStore, policy: str | Policy | type[Policy]) -> bool:
    """Return whether a feature has a cache that a loader with ``cache="auto"`` keeps."""
    cache: FeatureCache | None = store.cache
    if cache is None or cache.policy is None or not cache.capacity:
        return False  # no cache, or one that followed plans
    # A cache of a given size stays. Another loader's automatic cache stays if this loader would make the same one.
    return not cache.is_lent or (cache.policy.name == get_policy(policy).name and not cache.is_cut)


def are_cached(context: Context) -> bool:
    """Return whether a loader with default options keeps the features' caches.

    It does if one of them has a given size, or if every feature has a cache that such a loader would make.
    """
    caches = [store.cache for store in context.nodes.stores.values()]
    given = any(cache is not None and cache.policy is not None and cache.capacity and not cache.is_lent for cache in caches)
    return given or (bool(caches) and all(_is_cached(store, DEGREE) for store in context.nodes.stores.values()))


class _OnDemandEpoch(EpochRun):
    def __init__(self, context: Context, order: EpochBatches, ended: Callable[[], None] = lambda: None) -> None:
        self._context, self._order, self._ended = context, order, ended

    @property
    def threads(self) -> int:
        return self._context.threads

    def batch(self, position: int) -> Batch:
        with self._context.timer.time("sample"):
            return Batch(position, self._order.sample(position))

    def stop(self) -> None:
        self._order.stop()

    def close(self) -> None:
        self._order.close()
        self._ended()


def stand_in(context: Context, epoch: int, start: int) -> EpochRun:
    """Begin ``epoch`` at batch ``start``, read on demand, because another epoch's plans have claimed the features' caches."""
    context.counts.add_beside()
    return _OnDemandEpoch(context, context.batches.epoch(epoch).windowed(start))


def _estimated(w: Workload, m: Machine, policy: str, hits: int, counting_s: float) -> Estimate:
    loads = w.n_accesses - w.n_device - hits
    read = random_read_s(loads, w.n_batches, w.n_rows, w.row_bytes, m.drive)
    copy = gathered_s(hits + put_together(w), w, m)  # the rate of reading includes the copies of missed rows
    fill = random_read_s(w.capacity, 1, w.n_rows, w.row_bytes, m.drive)
    fill += copied_s(w.capacity, w, m) + fresh_s(w.capacity, w, m)
    parts = {"sample": w.sample_s, "read": read, "copy": copy}
    moved = int(random_reads(loads, w.n_batches, w.n_rows, w.row_bytes, m.drive)[1])
    epoch = max(w.sample_s, read + copy, w.sample_read_s + read)  # the last: both read from one drive
    return Estimate("ondemand", policy, epoch, counting_s + fill, loads, 0, moved, parts)


def _by_counts(w: Workload, m: Machine) -> Estimate:
    """Estimate an epoch whose cached rows are chosen by counts of one sampled epoch."""
    hits = w.n_top if w.n_static is None else w.n_static
    return _estimated(w, m, STATIC if w.capacity else "none", hits, w.sample_s if w.capacity else 0.0)


def _by_degree(w: Workload, m: Machine) -> Estimate:
    """Estimate an epoch whose cached rows are chosen by degree."""
    found = _estimated(w, m, DEGREE, w.n_degree or 0, 0.0)
    return found if w.n_degree is not None else replace(found, impossible="what the degrees would hit is not known")


def _online(w: Workload, m: Machine) -> Estimate:
    """Estimate an epoch under an online policy: loaded rows are copied into the cache, which is empty in the first epoch."""
    loads = again = w.n_accesses - w.n_device
    if w.online_loads is not None:
        loads, again = w.online_loads, min(w.online_again, w.online_loads)
    found = _estimated(w, m, ONLINE, w.n_accesses - w.n_device - again, 0.0)
    admit, first = gathered_s(again, w, m), gathered_s(loads, w, m)
    read = random_read_s(loads, w.n_batches, w.n_rows, w.row_bytes, m.drive)
    reads = w.sample_read_s + found.parts["read"]
    epoch = max(w.sample_s, found.parts["read"] + found.parts["copy"] + admit, reads)
    cold = (
        max(w.sample_s, read + found.parts["copy"] + first, w.sample_read_s + read) - epoch
    )  # less than 0 if more rows merge into fewer reads
    fresh = fresh_s(min(w.capacity, loads), w, m)
    parts = {**found.parts, "copy": found.parts["copy"] + admit}
    impossible = "" if w.online_loads is not None else "what it would load is not known"
    return replace(found, epoch_s=epoch, once_s=max(0.0, cold) + fresh, parts=parts, impossible=impossible)
