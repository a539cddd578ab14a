"""A window of batches drawn at once: hop by hop, all batches' lists in the order of the file, each list passed once a hop.

Each hop's draws are logged by batch. A batch's blocks are then made from its logs, as if it had been sampled alone. Between hops,
the lists of the nodes that a hop has added are logged by range, so that the next hop has them in the order of the file. With one
type of edges each node has one list, and its number.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.epochs import LEAST_POSITIONS, TARGET_WORDS, Draws, sort_targets
from featstore.errors import BudgetError, ClosedError
from featstore.gather.buffers import huge_array
from featstore.gather.fileturns import FileTurns
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.sampling.batch import SampledBatch
from featstore.sampling.hops import FanoutSampler
from featstore.sampling.listaccess import MAX_DRAWN, ListAccess, Run
from featstore.sampling.logs import SpillingLogs, least_log_bytes
from featstore.sampling.replay import Replay, has_places
from featstore.sampling.scratch import Int64s
from featstore.storage.rundir import DiskQuota
from featstore.topology.listblocks import NodeLists
from featstore.topology.liststream import LIST_BYTES, stream_bytes

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["EpochWindow", "Seeds", "drawn_bytes", "has_places", "is_wide", "least_bytes", "useful_bytes"]

LEAST_BITS, MOST_BITS = 12, 20  # targets are sorted over a range of 2**bits lists at once
MOST_RANGES = 4096
AT_ONCE = 4096  # targets of several ranges that draw at once: many times a drive's queue, and few for a worker
SORT_FRACTION = 1 / 4  # of a worker's memory, that the arrays over a range take at most
RANGE_BYTES = 128  # per list of a range: the starts of its targets, its number, and look-up of lists
LEAST_BLOCK_BYTES = 64 << 10  # of two blocks together
STREAM_FRACTION = 1 / 8  # of a worker's memory, that the blocks that lists are read into take at most
SORTED_BYTES = 8  # per target, besides its record
DRAWN_BYTES = 24  # per id that is drawn before it is read: its position, its place in the logs, the id itself
KEY_BYTES = 32  # of a batch's hop, at the most
BYTES_AN_EDGE = 32  # per edge while a batch is numbered: its block, and its log, with places if it has them; per list of a type
PATIENCE, PATIENCE_S = 250, 0.02  # number of times that a non-urgent window checks for free memory, and seconds between checks


def is_wide(graph: OutOfCoreGraph) -> bool:
    """Tell whether logs hold 64-bit words."""
    return max(graph.num_nodes, graph.topology.num_lists) >= 2**31 or graph.topology.id_bytes == 8


@dataclass(frozen=True)
class _Shape:
    """Division of a worker's memory."""

    shift: int  # a range has 2**shift lists
    n_ranges: int
    n_logs: int
    block_bytes: int  # of two blocks of ids, read one after the other
    scratch_words: int  # to draw a large fan-out
    targets_bytes: int  # of logs of targets, and again of the records of one range
    drawn_bytes: int

    @property
    def range_entries(self) -> int:
        return (1 << self.shift) + 1

    @property
    def sorting_bytes(self) -> int:
        """Bytes of sorting: records of targets, batch and place of each target, and three arrays over a range of lists."""
        return self.targets_bytes + self.targets_bytes * SORTED_BYTES // (4 * TARGET_WORDS) + RANGE_BYTES * self.range_entries

    @property
    def nbytes(self) -> int:
        logs = self.targets_bytes + self.drawn_bytes + KEY_BYTES * self.n_logs
        return logs + self.sorting_bytes + stream_bytes(self.block_bytes) + 8 * self.scratch_words


def _shape(graph: OutOfCoreGraph, fanouts: tuple[int, ...], n_batches: int, n_bytes: int, wide: bool) -> _Shape:
    """Divide ``n_bytes`` of one worker, or the least memory of :func:`least_bytes` if that is more."""
    n, shift = max(1, graph.topology.num_lists), MOST_BITS
    while shift > LEAST_BITS and RANGE_BYTES << shift > n_bytes * SORT_FRACTION:
        shift -= 1
    while -(-n // (1 << shift)) > MOST_RANGES:
        shift += 1
    while shift and 1 << shift >= 2 * n:
        shift -= 1
    n_ranges, n_logs = -(-n // (1 << shift)), n_batches * len(fanouts)
    block = LIST_BYTES
    while block > LEAST_BLOCK_BYTES and stream_bytes(block) > n_bytes * STREAM_FRACTION:
        block //= 2
    targets, drawn = least_log_bytes(n_ranges, wide), least_log_bytes(n_logs, wide)
    targets = max(targets, LEAST_POSITIONS * DRAWN_BYTES)  # the same memory, one after the other
    least = _Shape(shift, n_ranges, n_logs, block, Draws.scratch(fanouts), targets, drawn)
    # Drawn ids get three fifths of the rest: a target is one record, and draws several ids.
    left = max(0, n_bytes - least.nbytes)
    more = left * 2 // 5 * (4 * TARGET_WORDS) // (2 * 4 * TARGET_WORDS + SORTED_BYTES)
    return _Shape(shift, n_ranges, n_logs, block, least.scratch_words, targets + more, drawn + left * 3 // 5)


def least_bytes(graph: OutOfCoreGraph, fanouts: tuple[int, ...], n_batches: int, wide: bool) -> int:
    """Return the least memory, in bytes, in which one thread draws a window of ``n_batches``."""
    return _shape(graph, fanouts, n_batches, 0, wide).nbytes


def drawn_bytes(n_edges: int, n_targets: int, width: int, places: bool = False) -> int:
    """Count the bytes of a batch's logs of draws, in words of ``width`` bytes; ``places`` as of :func:`has_places`."""
    return width * ((2 if places else 1) * n_edges + 2 * n_targets)


def useful_bytes(
    graph: OutOfCoreGraph, fanouts: tuple[int, ...], n_batches: int, drawn: int, targets: int, n_workers: int
) -> int:
    """Return the bytes of memory in which nothing is spilled, for batches of ``drawn`` bytes of logs and ``targets`` lists."""
    least = least_bytes(graph, fanouts, n_batches, True) + int(stream_bytes(LIST_BYTES) / STREAM_FRACTION)
    return n_workers * least + 2 * n_batches * (drawn + targets * (2 * 4 * TARGET_WORDS + SORTED_BYTES))


class _Worker:
    """Memory of a thread that draws."""

    def __init__(self, shape: _Shape, wide: bool) -> None:
        width = 8 if wide else 4
        self.records = huge_array(shape.targets_bytes)
        n_targets = shape.targets_bytes // (width * TARGET_WORDS)
        self.batch, self.place = (huge_array(n_targets * 4).view(np.uint32) for _ in range(2))
        self.ends, self.nodes, self.starts = (np.empty(shape.range_entries, np.int64) for _ in range(3))
        self.scratch = np.empty(shape.scratch_words, np.int64)


class Seeds:
    """The seeds of an epoch's batches by position, and the numbers of the batches, which key their draws.

    ``seeds(number)`` is pure and thread-safe. ``number(position)`` is the position, unless several processes train together.
    """

    def __init__(self, seeds: Callable[[int], Any], number: Callable[[int], int] = operator.index) -> None:
        self._seeds, self.number = seeds, number

    def __call__(self, position: int) -> Any:
        return self._seeds(self.number(position))


class EpochWindow:
    """The batches ``first … stop - 1`` of an epoch, to be drawn together.

    ``sampler`` gives fan-outs, keys and the memory of batches; ``seeds`` the seeds and numbers. The caller has reserved
    ``n_bytes``, :func:`least_bytes` at the least. ``n_workers`` threads draw, or fewer if the memory does not suffice.
    ``path()`` names run files for logs that do not fit. ``access`` is that of :class:`~featstore.EpochSampler`. What is drawn
    ``ahead`` may be dropped by any thread that lacks memory, which then waits for the threads that draw: these wait for no other.
    """

    def __init__(
        self,
        sampler: FanoutSampler,
        graph: OutOfCoreGraph,
        seeds: Seeds,
        epoch: int,
        first: int,
        stop: int,
        *,
        n_bytes: int,
        n_workers: int,
        path: Callable[[], str],
        disk: DiskQuota,
        access: str = "auto",
        ahead: bool = False,
    ) -> None:
        self.ahead = ahead
        self.first, self.stop = first, stop
        self._sampler, self._graph, self._seeds, self._epoch = sampler, graph, seeds, epoch
        self._topology = graph.topology  # kept, since graph.topology takes the graph's lock
        self._wide, self._has_places = is_wide(graph), has_places(sampler)
        self._n = stop - first
        fanouts = sampler.list_fanouts
        least = least_bytes(graph, fanouts, self._n, self._wide)
        if n_bytes < least:
            raise BudgetError(f"a window of {self._n} batches cannot be drawn in {n_bytes} bytes", least)
        self._n_workers = max(1, min(n_workers, n_bytes // (2 * least)))
        self._shape = shape = _shape(graph, fanouts, self._n, n_bytes // self._n_workers, self._wide)
        self._reading = ListAccess(self._topology, access, shape.shift)
        logs = partial(SpillingLogs, n_workers=self._n_workers, wide=self._wide, path=path, disk=disk)
        self._targets = logs(shape.n_ranges, n_bytes=self._n_workers * shape.targets_bytes)
        self._drawn = logs(shape.n_logs, n_bytes=self._n_workers * shape.drawn_bytes)
        self._depth = len(fanouts)
        self._loans = graph.budget.awaited if ahead else contextlib.nullcontext
        kinds = graph.types.edges
        self._kinds = [(kinds[key], np.array(each, np.int64)) for key, each in sampler.drawn_of_types.items()]
        places = itertools.product(range(self._depth), range(first, stop))
        self._keys = np.array([sampler.hop_key((epoch, seeds.number(position), hop)) for hop, position in places], np.uint64)
        self._waited_s = [0.0] * self._n_workers  # seconds of waiting for lists
        self._read_bytes = [0] * self._n_workers
        self._drawn_reads = [0] * self._n_workers  # ids that were read alone
        self._closed = False
        self._batch_bytes = 0  # largest memory of numbering a batch so far
        self._is_urgent = threading.Event()

    @property
    def passes_s(self) -> float:
        """Seconds that the window's threads have waited for lists, averaged over them."""
        return sum(self._waited_s) / self._n_workers

    @property
    def list_bytes(self) -> int:
        """Bytes of lists read in passes."""
        return sum(self._read_bytes)

    @property
    def drawn_reads(self) -> int:
        """Ids that were read alone, after they were drawn, without their lists."""
        return sum(self._drawn_reads)

    @property
    def spilled_bytes(self) -> int:
        """Bytes in run files."""
        return self._targets.spilled_bytes + self._drawn.spilled_bytes

    def stop_drawing(self) -> None:
        """Let :meth:`draw` end early, with ClosedError."""
        self._closed = True
        self._is_urgent.set()

    def close(self) -> None:
        """Give the memory back, and remove the run files; no thread may draw or sample any more."""
        self._closed = True
        for logs in (self._targets, self._drawn):
            logs.close()  # not left to the collector of cycles: the next window has this memory in the ledger

    def hurry(self) -> None:
        """Mark the window as urgent: a thread waits for it.

        Until then, batches are numbered only while twice their memory is free.
        """
        self._is_urgent.set()

    @property
    def is_urgent(self) -> bool:
        """Whether a thread has waited for the window."""
        return self._is_urgent.is_set()

    def draw(self) -> None:
        """Draw all hops of all batches; after an error, such as run files that do not fit the disk, the window is of no use."""
        with self._loans():
            for hop in range(self._depth):
                self._in_parallel(np.zeros(self._n, np.int64), partial(self._aim, hop), again=True)
                # From here on the targets' logs are read; the arrays that sort them are not held while batches are numbered.
                workers = [_Worker(self._shape, self._wide) for _ in range(self._n_workers)]
                groups, files = self._groups()
                self._in_parallel(files, partial(self._draw, workers, hop, groups), again=False)
                del workers
                self._targets.clear()

    def sample(self, position: int) -> SampledBatch:
        """Make a batch from the logs; any number of threads may call it."""
        ids, index = self._ids(position), position - self.first
        with self._sampler.scratch(len(ids)) as scratch:
            hops = self._sampler.expand(scratch, ids, self._replay(index, edges=self._sampler.edges))
            return self._sampler.assemble(scratch, ids, hops, self._epoch, self._seeds.number(position))

    def _ids(self, position: int) -> Int64s:
        seeds = self._seeds(position)
        return (seeds.numpy() if isinstance(seeds, torch.Tensor) else np.asarray(seeds)).astype(np.int64, copy=False)

    def _in_parallel(self, files: Int64s, work: Callable[[int, int], None], *, again: bool) -> None:
        """Call ``work(worker, number)`` for each piece of work; ``files[number]`` is the file that it reads (:class:`FileTurns`).

        If memory is short for several pieces at once, they run one after the other. ``again``: a piece of work that lacked
        memory has had no effect, and is repeated.
        """
        coming, short = FileTurns(files), list[int]()
        lock = threading.Lock()
        failed = threading.Event()

        def run(worker: int) -> None:
            while not (failed.is_set() or short):
                with lock:
                    number = coming.take(worker)
                if number is None:
                    return
                try:
                    self._check()
                    work(worker, number)
                except BudgetError:
                    if self._n_workers == 1 or not again:
                        failed.set()
                        raise
                    short.append(number)
                except BaseException:
                    failed.set()
                    raise

        if self._n_workers == 1:
            run(0)
            return

        def run_in_thread(worker: int) -> None:
            with self._loans():
                run(worker)

        with ThreadPoolExecutor(self._n_workers, thread_name_prefix="featstore-draw") as workers:
            for future in [workers.submit(run_in_thread, worker) for worker in range(self._n_workers)]:
                future.result()
        for number in itertools.chain(short, iter(partial(coming.take, 0), None)):
            self._check()
            self._graph.pool.trim()
            work(0, number)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the epoch is over")

    # By batch.

    def _aim(self, hop: int, worker: int, index: int) -> None:
        """Number a batch's nodes up to ``hop``, and log the lists of those that the last hop has added as targets of this one."""
        ids = self._ids(self.first + index)
        targets, budget = self._targets.workers[worker], self._graph.budget
        for _ in range(PATIENCE):
            if budget.available >= 2 * self._n_workers * self._batch_bytes or self._is_urgent.wait(PATIENCE_S):
                break
            self._check()
        else:
            raise BudgetError("others have the memory that drawing a window ahead takes")
        with self._sampler.scratch(len(ids)) as scratch:
            first, place, hops = 0, 0, self._replay(index, edges=False)
            blocks = self._sampler.expand(scratch, ids, hops, hop)
            if blocks:
                first = blocks[-1].n_dst
                edges = sum(len(block.src) for block in blocks) + (0 if hops.joined is None else hops.joined.n)
                self._batch_bytes = max(self._batch_bytes, BYTES_AN_EDGE * edges)
            del blocks
            lists, end = scratch.nodes, scratch.hops.n_nodes
            if hops.joined is not None:
                place, lists = hops.joined.join(scratch.nodes[:end], hop)
                first, end = 0, len(lists)
            while (first := targets.scatter(lists, first, end, index, self._shape.shift, place)) < end:
                self._targets.spill(worker)

    def _replay(self, index: int, *, edges: bool) -> Replay:
        def read(hop: int) -> npt.NDArray[Any]:
            return self._drawn.read(hop * self._n + index, self._graph.pool.array)

        number = self._seeds.number(self.first + index)
        return Replay(self._sampler, read, self._wide, self._epoch, number, edges=edges)

    # By list.

    def _groups(self) -> tuple[list[list[int]], Int64s]:
        """Group ranges of lists whose targets draw together; return the groups, and the file of each group.

        Each group's draws wait for their reads, so groups are large. A group of several ranges has at most as many targets as a
        range has lists, for which a worker's arrays have room.
        """
        shape, groups, files = self._shape, list[list[int]](), list[int]()
        file_of = self._topology.files_of(np.arange(shape.n_ranges, dtype=np.int64) << shape.shift).tolist()
        last: dict[int, tuple[list[int], int]] = {}  # by file: the last group begun, and its targets
        for number, file in enumerate(file_of):
            n = self._targets.length(number) // TARGET_WORDS
            group, n_before = last.get(file, ([], 0))
            if not group or n_before + n >= min(shape.range_entries, AT_ONCE) or (number + 1 - group[0]) << shape.shift >= 2**31:
                group, n_before = [], 0
            if n:
                if not group:
                    groups.append(group)
                    files.append(file)
                group.append(number)
                last[file] = group, n_before + n
        return groups, np.array(files, np.int64)

    def _draw(self, workers: list[_Worker], hop: int, groups: list[list[int]], worker: int, number: int) -> None:
        """Let the targets in a group's ranges of lists draw, as many at once as the memory takes."""
        memory, group = workers[worker], groups[number]
        records, used = memory.records, 0
        base, end = group[0] << self._shape.shift, (group[-1] + 1) << self._shape.shift

        def draw() -> None:
            self._check()
            with self._graph.neighbor_lists.using() as cache:
                self._draw_targets(memory, hop, worker, base, end - base, records[:used], cache)

        def array(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            nonlocal used
            n_bytes = n * np.dtype(dtype).itemsize
            if used + n_bytes > len(records):
                draw()
                used = 0
            used += n_bytes
            return records[used - n_bytes : used].view(dtype)

        for each in group:
            for _ in self._targets.pieces(each, array):
                pass
        if used:
            draw()

    def _draw_targets(
        self,
        memory: _Worker,
        hop: int,
        worker: int,
        base: int,
        n_range: int,
        records: npt.NDArray[np.uint8],
        cache: NeighborCache | None,
    ) -> None:
        topology = self._topology
        arrays = memory.ends, memory.batch, memory.place, memory.nodes, memory.starts
        n = sort_targets(records, self._wide, base, n_range, *arrays)
        lists, starts = memory.nodes[:n], memory.starts[: n + 1]
        runs = self._runs(memory, hop, worker, lists, starts)

        def take(first: int, at: Int64s, degree: Int64s, ids: npt.NDArray[Any]) -> None:
            for run in runs:
                low, high = max(0, run.first - first), min(len(at), run.stop - first)
                if low < high:
                    lists = first + low - run.first, first + high - run.first
                    run.draws.begin(*lists, at[low:high], degree[low:high], ids, topology.id_bytes, memory.scratch)
                    while not run.draws.go_on():
                        self._drawn.spill(worker)

        wanted, missing = lists, None
        if cache is not None:
            at, degree = np.empty(n, np.int64), np.empty(n, np.int64)
            if cache.whole:
                cache.locate(lists, at, degree)
                take(0, at, degree, cache.records)
                return
            missing = cache.find(lists, at, degree)
            take(0, at, degree, cache.records)
            wanted = lists[missing]
        if not len(wanted):
            return
        n_targets = np.diff(starts)
        n_targets = n_targets if missing is None else n_targets[missing]
        passed, alone = self._reading.ways(runs, wanted, missing, n_targets)
        for run, part in alone:
            self._draw_elsewhere(run, memory, worker, wanted[part], _positions(missing, part))
        for part in passed:
            positions, found = _positions(missing, part), topology.lists(wanted[part], self._shape.block_bytes)
            while True:
                begin_s = time.perf_counter()
                block = next(found, None)
                self._waited_s[worker] += time.perf_counter() - begin_s
                if block is None:
                    break
                self._read_bytes[worker] += block.ids.nbytes
                first, at, degree = block.spread(positions)
                take(first, at, degree, block.ids)

    def _runs(self, memory: _Worker, hop: int, worker: int, lists: Int64s, starts: Int64s) -> list[Run]:
        """Make what draws from lists that have targets, for each type of edges that has some of them."""
        runs, first = list[Run](), 0
        hops = hop, self._depth if self._sampler.redraw else hop + 1
        ends = np.searchsorted(lists, [kind.first_list + kind.n_lists for kind, _ in self._kinds])
        for (_, fanouts), stop in zip(self._kinds, ends.tolist(), strict=True):
            if first < stop:
                draws = Draws(
                    self._drawn.workers[worker],
                    self._keys,
                    fanouts,
                    hops,
                    self._sampler.replace,
                    self._n,
                    lists[first:stop],
                    starts[first : stop + 1],
                    memory.batch,
                    memory.place,
                    numbered=self._has_places,
                )
                runs.append(Run(first, stop, draws, fanouts[slice(*hops)].tolist()))
            first = stop
        return runs

    def _draw_elsewhere(self, run: Run, memory: _Worker, worker: int, wanted: Int64s, positions_of: Int64s | None) -> None:
        """Draw from the lists ``wanted`` of a run, then read the drawn ids; ``positions_of`` as of :func:`_positions`."""
        topology, draws = self._topology, run.draws
        lists = NodeLists(np.arange(len(wanted)), *topology.offsets(wanted), np.empty(0, topology.id_dtype))
        first, at, degree = lists.spread(positions_of)
        first -= run.first
        n = min(MAX_DRAWN, len(memory.records) // DRAWN_BYTES)
        positions, holes = (memory.records[8 * n * k : 8 * n * (k + 1)].view(np.int64) for k in range(2))
        found = memory.records[16 * n : 16 * n + topology.id_bytes * n].view(topology.id_dtype)
        draws.begin_elsewhere(first, first + len(at), at, degree, positions, holes, memory.scratch)
        is_done = False
        while not is_done:
            is_done = draws.go_on()
            n_drawn = draws.n_drawn
            begin_s = time.perf_counter()
            topology.read_edges(positions[:n_drawn], found[:n_drawn])
            self._waited_s[worker] += time.perf_counter() - begin_s
            topology.check_found(positions[:n_drawn], found[:n_drawn])
            draws.fill(found[:n_drawn], topology.id_bytes)
            self._drawn_reads[worker] += n_drawn
            if not is_done and draws.is_full:
                self._drawn.spill(worker)
            self._check()


def _positions(missing: Int64s | None, part: slice) -> Int64s | None:
    """Find where a part of the lists that are not in memory lies among all that have targets; None: from 0 on."""
    if missing is not None:
        return missing[part]
    return np.arange(part.start, part.stop) if part.start else None
