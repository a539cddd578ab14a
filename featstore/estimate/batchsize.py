"""The size of batches: one or a few are sampled and measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from featstore.budget import KEPT_COST
from featstore.errors import BudgetError
from featstore.gather.buffers import HOLDER, SMALL_BYTES, size_class
from featstore.pack.packgraph import Graph
from featstore.sampling.batch import SampledBatch
from featstore.sampling.sampledbatches import Memo, SampledBatches
from featstore.sampling.scratch import SCRATCH
from featstore.topology.noderows import NodeRows

__all__ = ["REUSE", "ROW_BYTES", "BatchSize", "is_tight", "larger", "measure", "most_of", "pooled_bytes"]

ROW_BYTES = 64  # per row of a batch, besides its features: ids, edges and memory of sampling
EDGES = 8  # per row of a pack's batch, if no batch can be read: a generous guess
REUSE = 9  # idle blocks are used again for somewhat smaller arrays
MARGIN = 16  # batches differ in size by a few percent: the largest is assumed to be larger by this fraction
NO_ROWS: Mapping[str, NodeRows] = {}
N_OTHERS = 8  # batches that are measured besides the first


def larger(n_rows: int) -> int:
    """Estimate the rows of the largest batch from a batch of ``n_rows``."""
    return n_rows + n_rows // MARGIN


def pooled_bytes(n_bytes: int) -> int:
    """Count the bytes of an array from the pool; 0 for a small one, which is ordinary memory."""
    return size_class(n_bytes) if n_bytes >= SMALL_BYTES else 0


@dataclass(frozen=True)
class BatchSize:
    """Size of one batch: rows, edges and memory.

    Parameters
    ----------
    n_rows : int
        Distinct nodes.
    n_stored : int
        Words of 4 bytes that its blocks' sources, counts and arrays take in a file.
    sample_bytes : int
        Bytes of memory that its sample holds.
    sampling_bytes : int
        Bytes of memory held while it is sampled, with the sample, without the sampler's scratch.
    n_edges : int
        Edges of all blocks together.
    scratch_bytes : int
        Bytes of memory that the sampler keeps for each thread.
    rows_of : mapping of str to int
        Rows of each feature, where nodes of some types have none; of all features that are not named ``n_rows``.
    delivered_of : mapping of str to int
        Rows of each feature that the loop gets, where a node may be in the batch several times; empty: as many as are gathered.
    n_nodes : int
        Nodes, each as often as it is in the batch; 0: ``n_rows``.
    """

    n_rows: int
    n_stored: int = 0
    sample_bytes: int = 0
    sampling_bytes: int = 0
    n_edges: int = 0
    scratch_bytes: int = 0
    rows_of: Mapping[str, int] = field(default_factory=dict)
    delivered_of: Mapping[str, int] = field(default_factory=dict)
    n_nodes: int = 0

    @property
    def larger(self) -> int:
        """Estimated rows of the largest batch: batches differ in size by a few percent."""
        return larger(self.n_rows)

    def of(self, n_rows: int) -> BatchSize:
        """Scale this size to a batch of ``n_rows``."""
        if n_rows == self.n_rows:
            return self
        n, by = max(1, self.n_rows), n_rows
        parts = [self.n_stored, self.sample_bytes, self.sampling_bytes, self.n_edges, self.scratch_bytes, self.n_nodes]
        rows_of, delivered_of = ({name: -(-k * by // n) for name, k in of.items()} for of in (self.rows_of, self.delivered_of))
        stored, sample, sampling, edges, scratch, nodes = (part * by // n for part in parts)
        return BatchSize(by, stored, sample, sampling, edges, scratch, rows_of, delivered_of, nodes)

    def rows_like(self, n_rows: int, n_nodes: int) -> int:
        """Return ``n_rows``, or, if more, this batch's rows scaled to ``n_nodes`` nodes."""
        return max(n_rows, -(-n_nodes * self.n_rows // self.n_nodes) if self.n_nodes else 0)


def measure(graph: Graph, batches: SampledBatches, rows: Mapping[str, NodeRows] = NO_ROWS) -> BatchSize:
    """Sample the first batch, which epoch 0 need not sample again, and return the size that stands for all batches.

    ``rows`` are those of the features.

    If the rows of the largest batch are known, the size is scaled to them. If batches differ, because their seeds are neighbours,
    other batches of the epoch are sampled, too. The size returned then exceeds the largest one by its excess over their mean.

    Raises
    ------
    BudgetError
        There is no memory for the batch.
    """
    if not len(batches):
        return BatchSize(0)
    size, sampled = _sample(graph, batches, 0, rows)
    if batches.most_rows is not None:
        return size.of(batches.most_rows)
    batches.remember(_First(sampled, size.sample_bytes, graph))
    del sampled  # so that it can be given back if there is no memory for others
    return size if batches.run_length == 1 else _upper(graph, batches, size, rows)


def _upper(graph: Graph, batches: SampledBatches, first: BatchSize, rows: Mapping[str, NodeRows]) -> BatchSize:
    """Estimate the size of an epoch's largest batch from the first one and some others."""
    sizes = [first, *_others(graph, batches, rows)]
    like = [first.rows_like(each.n_rows, each.n_nodes) for each in sizes]  # with copies, of which a batch may have many more
    most = sizes[like.index(max(like))]
    larger_one = most.n_rows * (2 * max(like) - sum(like) // len(like)) // max(1, max(like))
    return most.of(larger_one if batches.disjoint else min(int(graph.num_nodes), larger_one))


def _sample(graph: Graph, batches: SampledBatches, position: int, rows: Mapping[str, NodeRows]) -> tuple[BatchSize, SampledBatch]:
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
    extra += 0 if sampled.copies is None else 8 * sampled.n_nodes
    stored = sum(len(block.src) + block.n_dst for block in sampled.blocks) + extra // 4
    pool.trim()
    n_edges = sum(len(block.src) for block in sampled.blocks)
    scratch = after.get(SCRATCH, 0) - before.get(SCRATCH, 0) or after.get(SCRATCH, 0)  # a used sampler has its scratch
    ids = sampled.input_ids.numpy()
    rows_of = {name: len(each.of(ids)) for name, each in rows.items() if each.kinds}
    size = BatchSize(len(ids), stored, held, max(held, drawn), n_edges, scratch, rows_of)
    # The longest list may be in another batch.
    size = replace(size, sampling_bytes=size.sampling_bytes + batches.weights_bytes)
    if sampled.copies is not None:
        nodes = sampled.nodes.numpy()
        size = replace(size, delivered_of={name: len(each.of(nodes)) for name, each in rows.items()}, n_nodes=len(nodes))
    return size, sampled


class _First(Memo):
    """Memo of the first batch: epoch 0 gets it once, unless its memory is needed before."""

    def __init__(self, sampled: SampledBatch, n_bytes: int, graph: Graph) -> None:
        self._held, self._pool, self._n_bytes = [sampled], graph.pool, n_bytes
        self._loan = graph.budget.lend(self._lent_bytes, self._give_back, cost=KEPT_COST, of=HOLDER)

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
    """Bound the nodes of a batch, by its seeds and fan-outs alone."""
    n, rows = int(graph.num_nodes), batches.batch_size
    if batches.most_rows is not None:
        return batches.most_rows
    for fanout in [-1] if batches.fanouts is None else batches.fanouts:
        rows = n if fanout < 0 else min(n, rows * (1 + fanout))
    return min(n, rows)


def most_of(graph: Graph, batches: SampledBatches, features: Iterable[str] = ()) -> BatchSize:
    """Bound the size of a batch: a generous guess, for the error if there is no memory to sample one."""
    rows, edges = most_rows(graph, batches), 0
    if batches.most_rows is not None:
        edges = EDGES * rows
    # With a subgraph for each seed, nodes and edges may be there once in each.
    times = batches.batch_size if batches.disjoint else 1
    nodes, n_nodes, n_edges = batches.batch_size, times * int(graph.num_nodes), times * int(graph.num_edges)
    for fanout in [-1] if batches.fanouts is None else batches.fanouts:
        nodes = n_nodes if fanout < 0 else min(n_nodes, nodes * (1 + fanout))
        edges += n_edges if fanout < 0 else min(n_edges, (nodes if batches.disjoint else rows) * fanout)
    held, weights = 8 * rows + 16 * edges, batches.weights_bytes
    if not batches.disjoint:
        return BatchSize(rows, edges + rows, held, 2 * held + weights, edges)
    held += 16 * nodes
    delivered = dict.fromkeys(features, nodes)
    return BatchSize(rows, edges + 3 * nodes, held, 2 * held + weights, edges, delivered_of=delivered, n_nodes=nodes)


def _others(graph: Graph, batches: SampledBatches, rows: Mapping[str, NodeRows]) -> list[BatchSize]:
    """Measure some batches of epoch 0 besides its first, spread over the epoch, while there is memory."""
    found: list[BatchSize] = []
    for position in sorted({k * (len(batches) - 1) // N_OTHERS for k in range(1, N_OTHERS + 1)} - {0}):
        try:
            found.append(_sample(graph, batches, position, rows)[0])
        except BudgetError:
            break
    return found


def is_tight(graph: Graph, batches: SampledBatches, row_bytes: int) -> bool:
    """Tell whether two batches may need more than half of the free memory; a batch is then measured before anything begins."""
    rows = most_rows(graph, batches)
    needed = 2 * rows * (row_bytes + ROW_BYTES) + batches.weights_bytes
    return bool(needed > (graph.budget.available + graph.budget.on_loan) // 2)
