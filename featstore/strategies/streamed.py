"""``Streamed``: fresh samples whose missed rows are packed, superbatch by superbatch, and read sequentially."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featstore.cache.base import Policy, StaticPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import format_size
from featstore.estimate.batchsize import BatchSize, larger
from featstore.estimate.cost import (
    ADMIT_TABLE_BYTES,
    DEGREE,
    LOAD_TABLE_BYTES,
    PLANNED,
    ROW_TABLE_BYTES,
    SAMPLE_BYTES,
    Estimate,
    Machine,
    Workload,
    admitted_s,
    copied_s,
    gathered_s,
    pipeline_s,
    put_together,
    scan_s,
)
from featstore.estimate.length import SEVERAL, Length, PackingPasses, Planning, at_least, longest_auto, passes_over
from featstore.estimate.misses import MissCurves
from featstore.gather.buffers import take_pages, working_beside
from featstore.pack.packing import PackArenas, PackCounts, RunPacker
from featstore.plan.overlapped import MissedRows, PackSuperbatch
from featstore.plan.superbatchextents import SuperbatchExtents
from featstore.storage.extentmap import episodes
from featstore.storage.extents import PAGES, ExtentMap, least_memory, most_memory
from featstore.storage.format import file_bytes, sums_bytes
from featstore.storage.pagedsums import table_bytes
from featstore.storage.pagestream import MOST_WINDOW_BYTES, Arenas, PagedRows, least_window
from featstore.storage.reuse import FileReuse
from featstore.storage.rundir import DiskQuota, RunDirectory, finalize_here
from featstore.strategies.base import Runner
from featstore.strategies.cachefilling import CacheFilling
from featstore.strategies.context import Context
from featstore.strategies.domain import Domain
from featstore.strategies.lists import with_lists
from featstore.strategies.lookahead import degree_bytes, look_ahead, rows_in_memory
from featstore.strategies.memory import AHEAD, FRACTIONS, PACKING, WINDOWS, Memory, ask, ask_of_bytes
from featstore.strategies.options import option, policy_of
from featstore.strategies.profile import Profile
from featstore.strategies.registry import register_strategy
from featstore.strategies.superbatch import Asked, Superbatch, SuperbatchRunner, run_asked, run_planned
from featstore.strategies.superbatchsizes import SuperbatchSizes

__all__ = ["Streamed", "StreamedRunner"]

Int64s = npt.NDArray[np.int64]

CACHE_SHARES = (1 / 4, 1 / 2, 3 / 4)  # parts of the memory that batches leave that are tried for caches
WORTH = 1 / 10  # caches get more only if that saves at least this part of the bytes that an epoch moves
MISSES_FOUND = 2 / 3  # of planning: packing begins when two of the planner's three passes have found the misses


@register_strategy("streamed")
@dataclass(frozen=True)
class Streamed(Superbatch):
    """Run superbatches as :class:`~featstore.Superbatch` does, and copy missed rows into extents that are read sequentially.

    One pass over the features copies the missed rows of a whole superbatch, beside the rest of its planning. With a static
    policy, fresh samples get DiskGNN's division: some rows stay in memory, the others are packed.

    Parameters
    ----------
    cache, run_dir, edge_cache
        As of :class:`~featstore.Superbatch`.
    policy : str, Policy or class
        As of :class:`~featstore.Superbatch`. ``"auto"``: the rows of the most out-edges stay (``"degree"``), unless an epoch
        moves clearly fewer bytes by ``"belady"``. With a ``length``, an ``edge_cache`` or without a cache ``"belady"``.
    length : int or "auto"
        Batches a superbatch; each superbatch costs a pass over the features. ``"auto"`` with a planned policy: as many as disk
        and memory allow, 200 at most, and fewer if passes are cheap. ``"auto"`` with a static policy: the epoch, or half of it
        if one half is packed about as fast as the other is gathered. If :class:`~featstore.EpochSampler` draws the batches at
        once, it is half of the epoch if a second pass reads no more than is packed. Planning gets up to half of the memory if
        passes would read more than everything else moves. A :class:`~featstore.PerformanceWarning` advises more memory or disk
        if an epoch still moves more than twice the minimum.
    disk : int, str or None
        As of :class:`~featstore.Superbatch`; the extents of two superbatches are on disk, too.
    """

    policy: str | Policy | type[Policy] = option(
        "auto", policy_of(PlannedPolicy, StaticPolicy, auto=True), "which rows stay in memory, or auto"
    )

    takes_history: ClassVar[bool] = True
    takes_types: ClassVar[bool] = True
    takes_mixed: ClassVar[bool] = True
    judged_with: ClassVar[tuple[str, ...]] = (PLANNED, DEGREE)

    @classmethod
    def estimate(cls, workload: Workload, machine: Machine) -> Estimate | None:
        """See :class:`~featstore.Strategy`."""
        w, m = workload, machine
        n, extents = w.n_superbatches, w.loads * w.row_bytes
        stored = w.n_accesses * SAMPLE_BYTES
        plans = ROW_TABLE_BYTES * w.n_accesses + (LOAD_TABLE_BYTES + ADMIT_TABLE_BYTES) * w.loads
        plans_s = min(stored, plans) / m.drive.write_bandwidth
        looks_ahead = w.policy == PLANNED
        plan_s = w.plan_s if looks_ahead else m.static_table_s * w.n_accesses
        inspect = w.sample_s + plan_s + stored / m.drive.write_bandwidth
        scan = scan_s(w.loads, w, n * w.packings, m)
        write = extents / m.drive.write_bandwidth
        read = extents / m.drive.bandwidth
        copy = gathered_s(w.n_accesses - w.n_device + put_together(w), w, m)
        once = 0.0
        if looks_ahead:
            copy += admitted_s(w.loads, w, m)
        else:  # the first pass fills the cache, too
            once = copied_s(w.capacity, w, m)
        parts = {"inspect": inspect, "scan": scan, "write": write, "read": read, "copy": copy}
        # The drive reads and writes at once, and packing runs beside the rest of planning once the misses are known.
        packed = scan + write - m.drive.write_overlap * min(scan, write)
        rest = (1 - MISSES_FOUND) * plan_s * looks_ahead + plans_s
        prepared = inspect - rest + max(rest, packed)
        # Packing beside reading shares the drive.
        epoch = max(pipeline_s(prepared, max(read, copy), n), w.sample_read_s + packed + read)
        disk = extents * min(2, n) // n + stored * min(4, n) // n
        impossible = ""
        if w.disk_bytes is not None and disk > w.disk_bytes:
            impossible = f"superbatches of {w.superbatch} take {format_size(disk)} of a disk of {format_size(w.disk_bytes)}"
        moved = int(scan * m.drive.bandwidth) + 2 * extents
        return Estimate("streamed", w.policy, epoch, once, w.loads, disk, moved, parts, impossible, hides_first_touch=True)

    @property
    def planned_by(self) -> str | Policy | type[Policy]:
        """See :class:`~featstore.Superbatch`."""
        return PLANNED if self.policy == "auto" else self.policy

    def run(self, context: Context) -> Runner:
        """See :class:`~featstore.Strategy`."""
        context.nodes.drop_caches()  # as Superbatch
        context = ask_of_bytes(context, self.cache)
        planning, profile, why = self.planning(context), None, ""
        if self.length != "auto" or context.chosen.profile_bytes:
            return run_planned(self, context, planning)
        context.drop_caches(edges=bool(planning.edge_rows))
        context = with_lists(context, self.cache_bytes(context, planning))
        context, memory = ask(context, self.sizes(context, planning).needs, self.cache_bytes(context, planning), plans=True)
        if memory.suffices:  # else run_planned raises
            rows = rows_in_memory(context, memory, self.cache)
            profile, misses, why = look_ahead(context, planning, rows, by_degree=self._may_stay(context, planning))
        try:
            if profile is None:
                runner = run_planned(self, context, planning)
            else:
                left = None if planning.disk is None else planning.disk - profile.n_bytes
                runner = run_asked(*self._cheapest(context, left, misses))
        except BaseException:
            if profile is not None:
                profile.close()
            raise
        assert isinstance(runner, StreamedRunner)
        runner.profile, runner.not_looked = profile, why
        return runner

    def _may_stay(self, context: Context, planning: Planning) -> bool:
        """Return whether rows may be chosen by degree, once for all batches."""
        if self.policy != "auto":
            return not planning.looks_ahead
        return self.cache is not None and not self.edge_cache and degree_bytes(context) < context.budget.available

    def _cheapest(self, context: Context, disk: int | None, misses: MissCurves) -> tuple[Streamed, Asked]:
        """Divide the memory for each policy that may be taken; take that by which an epoch moves the fewest bytes."""
        of_policies: list[tuple[float, Streamed, Asked]] = []
        policies = (DEGREE, PLANNED) if self.policy == "auto" and misses.by_degree.capacities else (self.planned_by,)
        for policy in policies:
            strategy = replace(self, policy=policy)
            planning = strategy.planning(context)
            planning = replace(planning, disk=disk, misses=misses.of(planning.looks_ahead))
            asked = strategy.asked(context, planning)
            sizes = asked[2]
            assert isinstance(sizes, StreamedSizes)
            of_policies.append((sizes.moved / (1 if policy == DEGREE else 1 - WORTH), strategy, asked))
        _, strategy, asked = min(of_policies, key=itemgetter(0))
        return strategy, asked

    def sizes(self, context: Context, planning: Planning) -> StreamedSizes:
        """See :class:`~featstore.Superbatch`."""
        return StreamedSizes(context, planning)

    def runner(self) -> type[StreamedRunner]:
        """See :class:`~featstore.Superbatch`."""
        return StreamedRunner


class StreamedSizes(SuperbatchSizes):
    """Add the memory of packing and the cost of passes over the features; divide memory so that an epoch moves few bytes."""

    def __init__(self, context: Context, planning: Planning) -> None:
        super().__init__(context, planning)
        self._is_drawn = context.batches.ahead_bytes() != (0, 0)
        capacity = planning.capacity
        self._rows = max((0, *planning.misses.capacities)) if capacity is None else capacity  # rows that caches will have
        self._packings = 1  # passes over the features for one superbatch
        self.moved = 0  # bytes of features that an epoch moves, once the memory is divided

    def needs(self, batch: BatchSize) -> dict[str, tuple[int, int]]:
        """See :class:`SuperbatchSizes`; adds the memory to pack a batch, and to read the extents of each feature."""
        longest, share, of_features = self.length(batch), self._miss_share, self._of_features(batch)
        most = max((most_memory(width, int(n * share), longest) for width, n, _ in of_features), default=0)
        needs = super().needs(batch)
        needs.pop(AHEAD, None)  # the features' own files are not read while batches run
        return {
            # Packing comes before the planner: spilled next positions cost less than another pass over the features.
            WINDOWS: (len(of_features) * least_window(), len(of_features) * MOST_WINDOW_BYTES),
            PACKING: (self._packing_bytes(batch, self._shortest), most),
            **needs,
        }

    def divide(self, memory: Memory, for_caches: int = 0) -> None:
        """See :class:`SuperbatchSizes`.

        For caches that size themselves, several shares of the memory are tried. A share is left to the caches if an epoch then
        moves clearly fewer bytes. Memory for longer superbatches and for packing saves passes over the features; memory for
        caches saves misses.
        """
        memory.tables = self._tables_bytes(memory.batch, self._shortest)
        if self.planning.capacity is None and self.planning.misses.capacities:
            left = self._left(memory)
            least = self._divided(memory, 0)
            for share in CACHE_SHARES:
                moved = self._divided(memory, int(share * left))
                if moved < (1 - WORTH) * least:
                    least, for_caches = moved, int(share * left)
        self.moved = self._divided(memory, for_caches)

    def _divided(self, memory: Memory, for_caches: int) -> int:
        """Divide the memory; return the bytes of features that an epoch moves with this division."""
        nodes, batch = self.context.nodes, memory.batch
        if self.planning.capacity is None:
            self._rows = self._cached = min(nodes.n, for_caches // max(1, nodes.width))
            memory.needs.update(self.needs(memory.batch))
        least = memory.leasts[PACKING] = memory.needs[PACKING][0]
        memory.tables = self._tables_bytes(batch, self._shortest)
        super().divide(memory, for_caches)
        size = self.granted_length(memory)[0]
        # The least is that of superbatches of this length.
        least = memory.leasts[PACKING] = max(least, self._packing_bytes(batch, size))
        memory.granted[PACKING] = max(memory.granted[PACKING], least)
        memory.tables = self._tables_bytes(batch, size)
        if self.planning.capacity is None:
            self._rows = min(nodes.n, memory.left_for_caches_after_grants(self.context.prefetch) // max(1, nodes.width))
        granted, self._packings = memory.granted[PACKING], 1
        for width, n, id_bytes in self._of_features(batch):
            missed = int(larger(n) * self._miss_share)
            packed = ExtentMap(np.full(size, missed), width)
            of_one = episodes(packed, granted - _sums_bytes(width, missed, size), id_bytes)
            self._packings = max(self._packings, len(of_one))
        return self.passes(batch).moved(self._packings * -(-self._n_batches // max(1, size)))

    def estimate_length(self, memory: Memory) -> Length:
        """See :class:`SuperbatchSizes`."""
        found = super().estimate_length(memory)
        return replace(found, passes=self._packings * found.passes)

    def _left(self, memory: Memory) -> int:
        """Compute the bytes that batches leave beyond the holders' leasts."""
        return max(0, memory.unused() - sum(memory.leasts.values()))

    def _of_features(self, batch: BatchSize) -> list[tuple[int, int, int]]:
        """List of each feature: bytes of a row, rows that a batch asks for, and bytes of a row's number."""
        nodes = self.context.nodes
        asked, widths = nodes.asked(batch), nodes.row_bytes
        return [(widths[name], asked[name], 4 if nodes.rows_of(name).n < 2**31 else 8) for name in nodes.stores]

    def _tables_bytes(self, batch: BatchSize, size: int) -> int:
        """Compute the bytes of checksums of open extents: of the superbatch being packed, and of those that the loop reads."""
        size = max(1, size)
        n_open = min(1 + -(-3 // size), -(-self._n_batches // size))
        graph, n_bytes = self._graph, 0
        for width, n, _ in self._of_features(batch):
            sums = _sums_bytes(width, int(larger(n) * self._miss_share), size)
            n_bytes += table_bytes(sums, PAGES.row_bytes, graph.budget.total, graph.reader.sums_divisor)
        return n_open * n_bytes

    @property
    def _miss_share(self) -> float:
        return self.planning.misses.share(self._rows)

    def packed_bytes(self, batch: BatchSize) -> int:
        """See :class:`SuperbatchSizes`. Half the bytes count: samples of four superbatches are on disk, but extents of two."""
        return int(self.context.nodes.asked_bytes(batch) * self._miss_share) // 2

    def passes(self, batch: BatchSize) -> PackingPasses:
        """See :class:`SuperbatchSizes`."""
        nodes = self.context.nodes
        misses = self.planning.misses
        return passes_over(nodes.n_bytes, self._n_batches, nodes.asked_bytes(batch), misses, self._rows, is_drawn=self._is_drawn)

    def _packing_bytes(self, batch: BatchSize, size: int) -> int:
        """Compute the least bytes to pack superbatches of ``size`` batches, a batch at a time."""
        most = 0
        for width, n, _ in self._of_features(batch):
            longest = larger(n)
            most = max(most, least_memory(width, longest) + _sums_bytes(width, longest, size) + 8 * size)
        return most


class StreamedRunner(SuperbatchRunner):
    """Run superbatches as :class:`SuperbatchRunner` does, after a pass over the features copied missed rows into extents."""

    name: ClassVar[str] = "streamed"

    def __init__(self, context: Context, memory: Memory, sizes: SuperbatchSizes) -> None:
        self.profile: Profile | None = None  # closed with the runner
        self.not_looked = ""  # why no batches were sampled ahead, so that all rows were taken to be missed
        self._each_counts = [PackCounts() for _ in context.nodes.each]
        super().__init__(context, memory, sizes)
        self._bases: Mapping[str, PagedRows] = {name: store.pages for name, store in context.nodes.stores.items()}
        self._reuse = FileReuse(sizes.planning.run_dir)
        self._on_death.append(finalize_here(self, self._reuse.close))
        self._arenas = PackArenas(Arenas(0), {name: Arenas(0) for name in context.features})
        self._drops.append(self._arenas.drop)

    @property
    def _counts(self) -> PackCounts:
        """The counts of packing all features: a pass over features with the same rows is a part of a pass over all."""
        return PackCounts.joined(self._each_counts)

    def stats(self) -> dict[str, Any]:
        """Return ``superbatch``, with an epoch's ``passes``, the superbatches left ``unpacked``, and the ``policy``."""
        found = super().stats()
        size, n = found["superbatch"]["batches"], found["superbatch"]["of"]
        counts = self._counts
        # One pass is expected for each superbatch that is still to be packed.
        found["superbatch"]["passes"] = max(0, -(-n // max(1, size)) - counts.done) + counts.passes
        found["superbatch"]["unpacked"] = counts.unpacked
        found["superbatch"]["policy"] = self._planning.policy.name
        if self.not_looked:
            found["superbatch"]["not_looked"] = self.not_looked
        return found

    def _judge_packing(self) -> None:
        """Warn if superbatches are packed in several passes, or not at all."""
        counts, context, batch = self._counts, self.context, self.memory.batch
        size, n = int(self._planning.superbatch), len(context.batches)
        if counts.unpacked:
            held = 0 if self.profile is None else self.profile.n_bytes
            more = at_least(
                counts.disk_bytes * longest_auto(self._planning, n) // max(1, size) * 9 // 8 + held + context.chosen.profile_bytes
            )
            what = "the disk has no room for the extents of a superbatch, whose rows are read at random"
            self._warn("disk", f"{what}; disk='{more}' would have")
        n_superbatches, passes = -(-n // max(1, size)), self._sizes.passes(batch)
        if passes is None:
            return
        if passes.moved(n_superbatches * counts.most_passes) > SEVERAL * passes.moved(n_superbatches):
            left = self._memory[PACKING].n_bytes
            more = at_least(context.graph.budget.total + int(max(0, counts.memory_bytes - left) / FRACTIONS[PACKING]))
            what = f"a superbatch is packed in {counts.most_passes} passes over the features, as {format_size(left)} are left"
            self._warn("memory", f"{what} for packing; memory='{more}' would make it one")

    def close(self, failed: bool = False) -> None:
        """Give the memory back; may be called again."""
        self._reuse.close()
        super().close(failed)
        if self.profile is not None:
            self.profile.close()

    def _packer(self, at: int, runs: RunDirectory, disk: DiskQuota, filling: CacheFilling) -> PackSuperbatch | None:
        # The automatic length rests on estimated misses: a superbatch that misses more rows than the disk has room for is not
        # packed, and its rows are read from the base file.
        may_skip = isinstance(self._sizes.planning.superbatch, str)
        part, n_features = self.context.nodes.each[at], len(self.context.features)
        if not at:
            self._reuse.use(disk)
            self._arenas.keep(self._memory[PACKING].n_bytes // 4 * 3, self._memory[WINDOWS].n_bytes)
        pack = RunPacker(
            {name: self._bases[name] for name in part.stores},
            self.context.graph.reader,
            runs,
            disk,
            self._memory[PACKING],
            self._memory[WINDOWS].n_bytes // max(1, n_features),
            self._reuse,
            self._arenas,
            self.context.nodes.reads.add,
            keep=filling.kept,
            may_skip=may_skip,
            label=f"{at}-" if at else "",
        )
        self._each_counts[at] = pack.counts
        return _PreparingPack(pack, self.context, part, larger(part.accesses(self.memory.batch)), filling, self._judge_packing)


class _PreparingPack:
    """Pack superbatches; beside the first one, touch the pages that the first gathers will write to.

    The pass that packs the first superbatch fills the caches, too.
    """

    def __init__(
        self, pack: RunPacker, context: Context, part: Domain, n_rows: int, filling: CacheFilling, say: Callable[[], None]
    ) -> None:
        self._pack, self._context, self._part, self._n_rows = pack, context, part, n_rows
        self._filling, self._say = filling, say

    @property
    def most_held(self) -> int:
        return self._pack.most_held

    def fits(self, n_missed: Int64s, n_bytes: int) -> bool:
        return self._pack.fits(n_missed, n_bytes)

    def __call__(self, k: int, n_missed: Int64s, rows_of: MissedRows, check: Callable[[], None]) -> SuperbatchExtents | None:
        with nullcontext() if k else working_beside(self._prepare):
            packed = self._pack(k, n_missed, rows_of, check)
        try:
            if not k:
                self._filling.finish(self._part.stores)  # where nothing was packed, as the disk has no room
            self._say()
        except BaseException:  # from reading, or a warning that is turned into an error
            if packed is not None:
                packed.remove()
            raise
        return packed

    def _prepare(self, go_on: Callable[[], bool]) -> None:
        graph = self._context.graph
        for store in self._part.stores.values():
            cache: FeatureCache | None = store.cache
            if cache is not None:
                take_pages(cache.array.reshape(-1), partial(_is_whole, cache, go_on))
            # Buffers for the loop's batch, one being made, and those made ahead.
            with graph.pool.copied_to(self._context.device):
                graph.pool.prepare(self._n_rows * store.row_bytes, self._context.prefetch + 2, go_on)


def _is_whole(cache: FeatureCache, go_on: Callable[[], bool]) -> bool:
    """Return whether to go on: ``go_on()`` allows it, and the cache has given no page back."""
    return go_on() and not cache.is_cut


def _sums_bytes(row_bytes: int, n_rows: int, size: int) -> int:
    """Compute the bytes of checksums of ``size`` extents of ``n_rows`` rows of a feature."""
    extents = ExtentMap(np.full(size, n_rows), row_bytes)
    return sums_bytes(file_bytes(PAGES, extents.total_pages))
