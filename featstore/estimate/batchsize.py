"""The size of batches: one is sampled, and measured."""

from __future__ import annotations

from dataclasses import dataclass

from featstore.errors import BudgetError
from featstore.gather.buffers import HOLDER, SMALL_BYTES, block_bytes
from featstore.pack.packgraph import Graph
from featstore.sampling.batch import SampledBatch
from featstore.sampling.sampledbatches import Memo, SampledBatches
from featstore.sampling.scratch import SCRATCH

__all__ = ["REUSE", "ROW_BYTES", "BatchSize", "is_tight", "larger", "measure", "most_of", "pooled_bytes"]

ROW_BYTES = 64  # of a row of a batch, beside its features: ids, edges and what sampling takes
EDGES = 8  # of a row of a pack's batch, where none can be read: a generous guess
REUSE = 9  # idle blocks are used again for somewhat smaller arrays
MARGIN = 16  # batches differ in size by a few percent: the largest is taken to be larger by one part of so many
N_OTHERS = 8  # batches that are measured beside the first
LOAN_COST = 5  # a batch that was sampled to be measured is given back right after idle buffers: it can be sampled again


def larger(n_rows: int) -> int:
    """Return the rows that the largest batch is taken to have, where one of ``n_rows`` is known."""
    return n_rows + n_rows // MARGIN


def pooled_bytes(n_bytes: int) -> int:
    """Bytes of an array from the pool; small ones are ordinary memory."""
    return block_bytes(n_bytes) if n_bytes >= SMALL_BYTES else 0


@dataclass(frozen=True)
class BatchSize:
    """What one batch comes to.

    Parameters
    ----------
    n_rows : int
        Distinct nodes.
    n_stored : int
        Sources, counts and arrays of its blocks, as they lie in a file, in words of 4 bytes.
    sample_bytes : int
        Of memory that its sample holds.
    sampling_bytes : int
        That are held while it is sampled, the sample included; the sampler's scratch apart.
    n_edges : int
        Of all blocks together.
    scratch_bytes : int
        Of memory that the sampler keeps for each thread.
    """

    n_rows: int
    n_stored: int = 0
    sample_bytes: int = 0
    sampling_bytes: int = 0
    n_edges: int = 0
    scratch_bytes: int = 0

    @property
    def larger(self) -> int:
        """Rows that the largest batch is taken to have: batches differ in size by a few percent."""
        return larger(self.n_rows)

    def of(self, n_rows: int) -> BatchSize:
        """Return a batch of ``n_rows`` that is otherwise alike."""
        if n_rows == self.n_rows:
            return self
        n, by = max(1, self.n_rows), n_rows
        parts = (self.n_stored, self.sample_bytes, self.sampling_bytes, self.n_edges, self.scratch_bytes)
        return BatchSize(by, *(part * by // n for part in parts))


def measure(graph: Graph, batches: SampledBatches) -> BatchSize:
    """Sample the first batch, which epoch 0 need not sample again, and return what it comes to.

    Where the rows of the largest batch are known, it is the largest. Where batches differ, because their seeds are neighbours,
    others of the epoch are sampled, too. The largest of them, and as much more as it is larger than their mean, stands for all.

    Raises
    ------
    BudgetError
        There is no memory for it.
    """
    if not len(batches):
        return BatchSize(0)
    size, sampled = _sample(graph, batches, 0)
    if batches.most_rows is not None:
        return size.of(batches.most_rows)
    batches.remember(_First(sampled, size.sample_bytes, graph))
    del sampled  # or it could not be given back where there is no memory for others
    return size if batches.together == 1 else _upper(graph, batches, size)


def _upper(graph: Graph, batches: SampledBatches, first: BatchSize) -> BatchSize:
    """Measure the largest batch of an epoch, from some of them."""
    others = _others(graph, batches)
    most = max([first, *others], key=lambda each: each.n_rows)
    mean = (first.n_rows + sum(each.n_rows for each in others)) // (1 + len(others))
    return most.of(min(int(graph.num_nodes), 2 * most.n_rows - mean))


def _sample(graph: Graph, batches: SampledBatches, position: int) -> tuple[BatchSize, SampledBatch]:
    """Sample a batch of epoch 0; idle buffers go back to the system before and after."""
    pool = graph.pool
    pool.trim()
    before = graph.budget.report()
    sampled = batches.epoch(0).sample(position)
    after = graph.budget.report()
    drawn = after.get(HOLDER, 0) - before.get(HOLDER, 0)
    held = sum(pooled_bytes(tensor.numel() * tensor.element_size()) for tensor in sampled.tensors)
    extra = sum(values.nbytes for block in sampled.blocks for values in block.edge_arrays.values())
    extra += 0 if sampled.history is None else sum(tensor.nbytes for tensor in sampled.history.tensors)
    stored = sum(len(block.src) + block.n_dst for block in sampled.blocks) + extra // 4
    pool.trim()
    n_edges = sum(len(block.src) for block in sampled.blocks)
    scratch = after.get(SCRATCH, 0) - before.get(SCRATCH, 0) or after.get(SCRATCH, 0)  # a sampler that was used has its own
    return BatchSize(len(sampled.input_ids), stored, held, max(held, drawn), n_edges, scratch), sampled


class _First(Memo):
    """The first batch: epoch 0 gets it once, unless the memory is needed before."""

    def __init__(self, sampled: SampledBatch, n_bytes: int, graph: Graph) -> None:
        self._held, self._pool, self._n_bytes = [sampled], graph.pool, n_bytes
        self._loan = graph.budget.lend(self._lent_bytes, self._give_back, cost=LOAN_COST, of=HOLDER)

    def _lent_bytes(self) -> int:
        return self._n_bytes if self._held else 0

    def _give_back(self, n_bytes: int) -> int:
        lent = self._lent_bytes()
        self._held.clear()
        self._pool.trim()
        return lent

    def batch(self, position: int) -> SampledBatch | None:
        try:
            return None if position else self._held.pop()
        except IndexError:
            return None

    def trim(self) -> None:
        self._held.clear()

    def forget(self) -> None:
        self._held.clear()


def most_rows(graph: Graph, batches: SampledBatches) -> int:
    """Return the nodes of a batch at the most, by its seeds and fan-outs alone."""
    n, rows = int(graph.num_nodes), batches.batch_size
    if batches.most_rows is not None:
        return batches.most_rows
    for fanout in [-1] if batches.fanouts is None else batches.fanouts:
        rows = n if fanout < 0 else min(n, rows * (1 + fanout))
    return min(n, rows)


def most_of(graph: Graph, batches: SampledBatches) -> BatchSize:
    """Bound a batch: a generous guess, for errors where there is no memory to sample one."""
    rows, edges = most_rows(graph, batches), 0
    if batches.most_rows is not None:
        edges = EDGES * rows
    for fanout in [-1] if batches.fanouts is None else batches.fanouts:
        edges += int(graph.num_edges) if fanout < 0 else min(int(graph.num_edges), rows * fanout)
    held = 8 * rows + 16 * edges
    return BatchSize(rows, edges + rows, held, 2 * held, edges)


def _others(graph: Graph, batches: SampledBatches) -> list[BatchSize]:
    """Sample some batches of epoch 0 but for its first, spread over it, as far as there is memory."""
    found: list[BatchSize] = []
    for position in sorted({k * (len(batches) - 1) // N_OTHERS for k in range(1, N_OTHERS + 1)} - {0}):
        try:
            found.append(_sample(graph, batches, position)[0])
        except BudgetError:
            break
    return found


def is_tight(graph: Graph, batches: SampledBatches, row_bytes: int) -> bool:
    """Whether two batches may need more than half of what is left: then one is measured before anything begins."""
    rows = most_rows(graph, batches)
    return bool(2 * rows * (row_bytes + ROW_BYTES) > (graph.budget.available + graph.budget.on_loan) // 2)
