"""What a loader needs of the memory at the least: one sum, which stages leave to each other, and which errors name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featstore.config import format_size
from featstore.errors import BudgetError
from featstore.gather.buffers import HOLDER, SMALL_BYTES, block_bytes
from featstore.sampling.batch import SampledBatch
from featstore.sampling.drawn import SampledBatches
from featstore.sampling.neighbor import SCRATCH, scratch_bytes
from featstore.strategies.expected import expected_edges

__all__ = [
    "BATCHES",
    "BatchSize",
    "Needs",
    "Sampling",
    "foresee",
    "guess",
    "is_tight",
    "larger",
    "least_total",
    "measure",
    "most_rows",
    "too_small",
    "would_do",
]

BATCHES = "batches"  # in the share's report
ROW_BYTES = 64  # of a row of a batch, beside its features: ids, edges and what sampling takes
REUSE = 9  # idle blocks are used again for somewhat smaller arrays
MARGIN = 16  # batches differ in size by a few percent: the largest is taken to be larger by one part of so many


def larger(n_rows: int) -> int:
    """Return the rows of the largest batch, where one of ``n_rows`` is known."""
    return n_rows + n_rows // MARGIN


def _pooled(n_bytes: int) -> int:
    """Bytes of a pooled array; small ones are ordinary memory."""
    return block_bytes(n_bytes) if n_bytes >= SMALL_BYTES else 0


@dataclass(frozen=True)
class BatchSize:
    """What one batch comes to.

    Parameters
    ----------
    n_rows : int
        Distinct nodes.
    n_stored : int
        Ids and counts of its blocks, as they lie in a file.
    sample_bytes : int
        Of memory that its sample holds.
    sampling_bytes : int
        That are held while it is sampled, the sample included; the sampler's scratch apart.
    """

    n_rows: int
    n_stored: int = 0
    sample_bytes: int = 0
    sampling_bytes: int = 0

    def of(self, n_rows: int) -> BatchSize:
        """Return a batch of ``n_rows`` that is otherwise alike."""
        if n_rows == self.n_rows:
            return self
        n, by = max(1, self.n_rows), n_rows
        return BatchSize(by, self.n_stored * by // n, self.sample_bytes * by // n, self.sampling_bytes * by // n)


@dataclass(frozen=True)
class Sampling:
    """What batches are sampled from.

    Parameters
    ----------
    graph : OutOfCoreGraph
    batches : SampledBatches
    threads : int
        Batches sampled at once.
    """

    graph: Any
    batches: SampledBatches
    threads: int


def measure(setup: Sampling, position: int = 0) -> BatchSize:
    """Sample a batch of epoch 0, and return what it comes to; idle buffers go back to the system before and after.

    Raises
    ------
    BudgetError
        There is no memory for it.
    """
    graph, order = setup.graph, setup.batches.epoch(0)
    if not len(order):
        return BatchSize(0)
    pool = graph.pool
    pool.trim()
    before = graph.budget.report().get(HOLDER, 0)
    sampled: SampledBatch = order.sample(position)
    drawn = graph.budget.report().get(HOLDER, 0) - before
    tensors = [sampled.input_ids, *(tensor for block in sampled.blocks for tensor in block.tensors)]
    held = sum(_pooled(tensor.numel() * tensor.element_size()) for tensor in tensors)
    stored = sum(len(block.src) + block.n_dst for block in sampled.blocks)
    n_rows = len(sampled.input_ids)
    del sampled, tensors
    pool.trim()
    return BatchSize(n_rows, stored, held, max(held, drawn))


def foresee(setup: Sampling) -> BatchSize:
    """Return what a batch comes to, expected from the degrees; no rows where the sampler does not say its fan-outs."""
    graph, fanouts = setup.graph, setup.batches.fanouts
    if setup.batches.most_rows is not None:
        held = _pooled(8 * setup.batches.most_rows)
        return BatchSize(setup.batches.most_rows, 0, held, held)
    if fanouts is None or not hasattr(graph, "degree_pieces"):
        return BatchSize(0)
    rows, edges = expected_edges(graph, fanouts, setup.batches.batch_size)
    held = _pooled(8 * rows) + sum(2 * _pooled(8 * n) for n in edges)
    drawing = max((3 * _pooled(8 * n) for n in edges), default=0)  # places of drawn ids, and the ids, before they are numbered
    return BatchSize(rows, sum(edges) + rows, held, held + drawing)


def largest(setup: Sampling, batch: BatchSize, n: int = 8) -> BatchSize:
    """Return ``batch``, or what the largest of some others comes to, as far as there is memory to sample them."""
    order = setup.batches.epoch(0)
    for position in sorted({k * (len(order) - 1) // n for k in range(1, n + 1)} - {0}):
        try:
            other = measure(setup, position)
        except BudgetError:
            break
        batch = max(batch, other, key=lambda each: each.n_rows)
    return batch


def too_small(error: BudgetError, needed: int) -> BudgetError:
    """Return an error that names ``needed``, or what ``error`` does, whichever is more."""
    needed = max(needed, error.needed or 0)
    return BudgetError(error.message.split("; at least")[0] + would_do(needed), needed)


def guess(setup: Sampling, row_bytes: int, more: int = 0) -> int:
    """Return the memory in which an epoch runs, from the fan-outs and the mean degree, where nothing can be sampled.

    ``more``: bytes that the loader is about to take beside.
    """
    graph, batches = setup.graph, setup.batches
    n = graph.num_nodes
    mean = -(-int(getattr(graph, "num_edges", 0)) // max(1, n))
    n_bytes, last, rows = 0, 0, batches.batch_size
    for fanout in batches.fanouts or ():
        edges = min(rows, n) * (mean if fanout < 0 else min(fanout, mean))
        rows = min(n, rows + edges)
        n_bytes += 2 * _pooled(8 * edges)
        last = 2 * _pooled(8 * edges) + _pooled(8 * edges)  # places of drawn ids, and the ids, before they are numbered
    n_bytes = 2 * (n_bytes + _pooled(8 * rows) + _pooled(rows * row_bytes)) + last
    if batches.scratch_is_counted:
        n_bytes += scratch_bytes(rows, n)
    report = graph.budget.report()
    offsets = 0 if "indptr" in report or not hasattr(graph, "num_edges") else 8 * n + 4096
    others = graph.budget.required(idle=True)
    return _solve(graph, _fixed(graph, (HOLDER, BATCHES, SCRATCH)) + offsets + n_bytes * 9 // 8 + more + others)


def is_tight(graph: Any, n_rows: int, row_bytes: int) -> bool:
    """Whether two batches of up to ``n_rows`` rows may need more than half of what is left: then they are measured first."""
    return bool(2 * n_rows * (row_bytes + ROW_BYTES) > (graph.budget.available + graph.budget.on_loan) // 2)


def most_rows(setup: Sampling) -> int:
    """Most distinct nodes that a batch can have."""
    n, batches = int(setup.graph.num_nodes), setup.batches
    if batches.most_rows is not None:
        return batches.most_rows
    rows = batches.batch_size
    for fanout in batches.fanouts if batches.fanouts is not None else [-1]:
        rows = n if fanout < 0 else min(n, rows * (1 + fanout))
    return rows


def would_do(needed: int) -> str:
    """Return how an error goes on that names the least memory."""
    return f"; at least {needed} bytes ({format_size(needed)}) would do"


def _held(graph: Any, without: tuple[str, ...]) -> int:
    """Bytes that are held now, but for those of some holders, and for what grows with the memory."""
    report: Mapping[str, int] = graph.budget.report()
    held = sum(n_bytes for holder, n_bytes in report.items() if holder not in without)
    n_bytes: int = held - graph.reader.held_bytes
    return n_bytes


def _fixed(graph: Any, without: tuple[str, ...]) -> int:
    """Bytes of :func:`_held` that are not on loan."""
    return max(0, _held(graph, without) - int(graph.budget.on_loan))


def _solve(graph: Any, fixed: int) -> int:
    """Return the least memory that has ``fixed`` bytes beside the reader's queue and tables, which grow with it."""
    total = fixed
    while (more := fixed + graph.reader.least_bytes(total)) > total:
        total = more
    return total


def least_total(graph: Any, n_bytes: int, worker: Any) -> int:
    """Return the least memory that has ``n_bytes`` for batches beside what is held otherwise and what other loaders need."""
    return _solve(graph, _fixed(graph, (HOLDER, BATCHES)) + n_bytes + graph.budget.required(worker, idle=True))


class Needs:
    """What a loader's stages need at the least, together.

    Parameters
    ----------
    setup : Sampling
    row_bytes : mapping of str to int
        Of each feature.
    batch : BatchSize
        The first batch.
    beside : int
        What the strategy holds for as long as it runs.
    cache_bytes : int
        Of the caches that are asked for.
    capacity : int
        Rows of each.
    plans : bool
        Batches come with plans from a file, and others are sampled meanwhile.
    is_measured : bool
        The batch was sampled; otherwise its size is what is expected.
    """

    def __init__(
        self,
        setup: Sampling,
        row_bytes: Mapping[str, int],
        batch: BatchSize,
        beside: int,
        cache_bytes: int,
        capacity: int,
        *,
        plans: bool,
        is_measured: bool = True,
    ) -> None:
        self._setup, self._row_bytes, self.batch, self._plans = setup, dict(row_bytes), batch, plans
        self._is_measured = is_measured
        self._beside, self._cache_bytes, self._capacity = beside, cache_bytes, capacity
        self.worker: Any = None  # who has said to the budget what this loader's batches need
        # From here on the loader's own parts come on top, as they are reserved.
        self._fixed = _fixed(setup.graph, (HOLDER, BATCHES))

    def _plan_bytes(self, n_rows: int) -> int:
        if not self._plans or not n_rows:
            return 0
        changed = min(n_rows, self._capacity)
        n_bytes = sum(_pooled(width * n_rows) for width in (8, 4, 8, 8)) + sum(_pooled(width * changed) for width in (8, 4, 8, 8))
        return n_bytes * REUSE // (REUSE - 1)

    def batch_bytes(self, n_rows: int) -> int:
        """Return what a batch of ``n_rows`` holds while the loop has it."""
        rows = sum(_pooled(n_rows * width) for width in self._row_bytes.values())
        return self.batch.of(n_rows).sample_bytes * REUSE // (REUSE - 1) + rows

    def loop_bytes(self, n_rows: int) -> int:
        """Return what the loop's batch and the next one, being made, take."""
        one = self.batch_bytes(n_rows)
        batch = self.batch.of(n_rows)
        beside = self._plan_bytes(n_rows) + batch.sample_bytes if self._plans else 0  # a sample that waits to be written
        return max(2 * one + beside, one + batch.sampling_bytes)

    def total(self, n_rows: int, *, idle: bool = False) -> int:
        """Return the least memory in which an epoch runs whose largest batch has ``n_rows``.

        Beside the epochs that are running, and the batches that their loops still hold; with ``idle``, or beside that of another
        loader that rests.
        """
        graph = self._setup.graph
        others = self._others(idle=idle)
        return _solve(
            graph, self._fixed + self._unsampled() + self._beside + self._cache_bytes + self.loop_bytes(n_rows) + others
        )

    def _unsampled(self) -> int:
        """Return what sampling will hold once it has begun, where the batch's size is only expected."""
        if self._is_measured:
            return 0
        graph = self._setup.graph
        report = graph.budget.report()
        offsets = 0 if "indptr" in report or not hasattr(graph, "num_edges") else 8 * graph.num_nodes + 4096
        scratch = scratch_bytes(self.batch.n_rows, graph.num_nodes) if self._setup.batches.scratch_is_counted else 0
        unsampled: int = offsets + max(0, scratch - report.get(SCRATCH, 0))
        return unsampled

    def least(self, n_rows: int = 0) -> int:
        """Return the least that an error names: for larger batches than those that are known, beside other loaders."""
        return self.total(larger(max(n_rows, self.batch.n_rows)), idle=True)

    def _others(self, *, idle: bool) -> int:
        """Return what other loaders' batches need, see :meth:`Budget.required`."""
        return int(self._setup.graph.budget.required(self.worker, idle=idle))

    def check(self) -> None:
        """Raise BudgetError where not even the first batch's rows can be gathered beside those of another one like it."""
        budget = self._setup.graph.budget
        if self.total(self.batch.n_rows) > budget.total:
            self.batch = largest(self._setup, self.batch)
            needed = self.least()
            parts = {
                "what is held already": _fixed(self._setup.graph, (HOLDER, BATCHES)),
                "two batches": self.loop_bytes(self.batch.n_rows),
                "other loaders' batches": self._others(idle=False),
                "the strategy": self._beside,
                "caches": self._cache_bytes,
            }
            text = ", ".join(f"{name} {format_size(n_bytes)}" for name, n_bytes in parts.items() if n_bytes)
            raise BudgetError(
                f"the {budget.name} budget of {format_size(budget.total)} is too small: {text}{would_do(needed)}", needed
            )

    def unused(self) -> int:
        """Return the bytes that may still be taken, when strategy and caches have theirs."""
        graph = self._setup.graph
        report = graph.budget.report()
        held: int = graph.budget.used - report.get(HOLDER, 0) - report.get(BATCHES, 0) - graph.reader.held_bytes
        held += graph.reader.least_bytes(graph.budget.total)
        others = self._others(idle=True)
        return max(0, int(graph.budget.total) - held - self.loop_bytes(larger(self.batch.n_rows)) - others)

    def left_for_cache(self, available: int, prefetch: int) -> tuple[int, int]:
        """Return what caches may take of ``available`` bytes, and how many batches are made ahead beside them.

        Where less than half would be left for the caches, fewer batches are made ahead.
        """
        loop, one = self.loop_bytes(larger(self.batch.n_rows)), self.batch_bytes(larger(self.batch.n_rows))
        threads = (self._setup.threads - 1) * self._sampler_bytes
        free = min(available, self.unused() + loop)
        while prefetch > 1 and loop + (prefetch - 1) * one + threads > free // 2:
            prefetch -= 1
        return max(0, free - loop - max(0, prefetch - 1) * one - threads), prefetch

    @property
    def _sampler_bytes(self) -> int:
        """What a thread takes that samples beside others."""
        batch = self.batch.of(larger(self.batch.n_rows))
        return batch.sampling_bytes + scratch_bytes(batch.n_rows, self._setup.graph.num_nodes)

    def samplers(self, threads: int) -> int:
        """Return how many threads may sample beside the loop: one takes its turn where memory is short, others need some each."""
        return max(1, min(threads, self.unused() // max(1, self._sampler_bytes)))

    def spare(self, beside: int | None = None) -> int:
        """Return the bytes that may be taken beyond what is needed, while ``beside`` of the strategy's are not reserved yet."""
        graph = self._setup.graph
        held: int = _held(graph, (HOLDER, BATCHES)) + graph.reader.least_bytes(graph.budget.total)
        still = (self._beside if beside is None else beside) + self._cache_bytes + self.loop_bytes(larger(self.batch.n_rows))
        return max(0, int(graph.budget.total) - held - still - self._others(idle=True))
