"""The result of a sampler: the nodes of a batch and one bipartite block per hop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Protocol

import torch

from featstore.config import format_size
from featstore.display import Display, Shown, Table
from featstore.topology.types import EdgeKey

__all__ = [
    "EDGE_ARRAYS",
    "HISTORY_ARRAYS",
    "Block",
    "CheckedSampler",
    "HistoryRows",
    "NodeCopies",
    "SampledBatch",
    "Sampler",
    "table_of_blocks",
    "table_of_tensors",
]

# Optional arrays of a block with one entry per edge, by field name, with their dtypes. All code that passes blocks on uses this
# table. In files, position ``i`` of the table is bit ``i``, so new arrays come last.
EDGE_ARRAYS: dict[str, tuple[torch.dtype, ...]] = {"edge_pos": (torch.int64,), "weight": (torch.float32, torch.float64)}

# Optional arrays of a batch, see :class:`HistoryRows`. Files hold these arrays in this order, behind the blocks.
HISTORY_ARRAYS = ("pull", "pull_slots", "push", "push_slots")


@dataclass(frozen=True, slots=True)
class Block(Shown):
    """The bipartite graph of one hop: messages flow from sources to destinations.

    Parameters
    ----------
    src, dst : int64 tensor, shape (n_edges,)
        Local numbers: positions in the batch's ``input_ids``; ``dst`` ascending. The first ``n_dst`` sources are destinations.
    n_src, n_dst : int
    edge_pos : int64 tensor, shape (n_edges,), optional
        Number of each edge in the order in which the user gave the edges: the row of its edge data. Only with a sampler's
        ``edges=True``.
    weight : float32 or float64 tensor, shape (n_edges,), optional
        Factor of each message before messages are summed: one over the expected number of times that the edge is drawn. Only
        if a sampler draws some neighbours to stand for all. The library's samplers give float32.
    """

    src: torch.Tensor
    dst: torch.Tensor
    n_src: int
    n_dst: int
    edge_pos: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    def __repr__(self) -> str:
        arrays = "".join(f", {name}" for name in self.edge_arrays)
        return f"Block(edges={len(self.src)}, n_src={self.n_src}, n_dst={self.n_dst}{arrays})"

    def _display(self) -> Display:
        return Display(repr(self), [table_of_tensors({"src": self.src, "dst": self.dst, **self.edge_arrays})])

    @property
    def edge_arrays(self) -> dict[str, torch.Tensor]:
        """The block's arrays with an entry for each edge, by name: those of ``edge_pos`` and ``weight`` that it has."""
        found = ((name, getattr(self, name)) for name in EDGE_ARRAYS)
        return {name: values for name, values in found if values is not None}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The block's tensors: ``src``, ``dst``, and those of ``edge_arrays``."""
        return self.src, self.dst, *self.edge_arrays.values()

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Block:
        """Make the block with ``move(tensor)`` in place of each tensor."""
        arrays = {name: move(values) for name, values in self.edge_arrays.items()}
        return Block(move(self.src), move(self.dst), self.n_src, self.n_dst, **arrays)


def table_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Table:
    """Make the table that shows tensors by name."""

    def row(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return name, dtype, str(list(tensor.shape)), format_size(tensor.nbytes), str(tensor.device)

    return Table.of_first(("", "dtype", "shape", "bytes", "device"), starmap(row, tensors.items()), len(tensors))


def table_of_blocks(blocks: Mapping[str, Block]) -> Table:
    """Make the table that shows blocks by name."""
    rows = ((name, f"{len(block.src):,}", f"{block.n_src:,}", f"{block.n_dst:,}") for name, block in blocks.items())
    return Table.of_first(("", "edges", "sources", "destinations"), rows, len(blocks))


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """The historical embeddings that a batch pulls and pushes, see :class:`~featstore.History`.

    Parameters
    ----------
    step : int
        Steps of training before the batch, since the history was empty.
    pull, pull_slots : int64 tensor, shape (n_pull,)
        Positions of the last block's sources that were not expanded, ascending, and their slots in the history table.
    push, push_slots : int64 tensor, shape (n_push,)
        Positions of the last block's sources whose rows are kept, ascending, and their slots; none of them is pulled.
    """

    step: int
    pull: torch.Tensor
    pull_slots: torch.Tensor
    push: torch.Tensor
    push_slots: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of :data:`HISTORY_ARRAYS`, in that order."""
        return self.pull, self.pull_slots, self.push, self.push_slots

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> HistoryRows:
        """Make the same rows with ``move(tensor)`` in place of each tensor."""
        return HistoryRows(self.step, *map(move, self.tensors))


@dataclass(frozen=True, slots=True)
class NodeCopies:
    """The nodes of a batch that has a subgraph for each seed: a node of the graph is there once in each that reaches it.

    Parameters
    ----------
    rows : int64 tensor, shape (n_nodes,)
        The position of each node in the batch's ``input_ids``; the seeds' are ``0 … n_seeds - 1``.
    batch : int64 tensor, shape (n_nodes,)
        Number of the seed whose subgraph each node is of.
    """

    rows: torch.Tensor
    batch: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors."""
        return self.rows, self.batch


@dataclass(frozen=True, slots=True)
class SampledBatch(Shown):
    """One sampled batch.

    Parameters
    ----------
    index, epoch : int
        Number of the batch in the epoch, and the epoch.
    input_ids : int64 tensor, shape (n,)
        Distinct node ids, the seeds first; row ``k`` of the batch's features belongs to ``input_ids[k]``.
    n_seeds : int
    blocks : tuple of Block
        Outermost hop first: ``blocks[0].n_src == n`` and ``blocks[-1].n_dst == n_seeds``.
    history : HistoryRows, optional
        The rows pulled and pushed, if the batch was sampled with historical embeddings. The destinations of the last block but
        one are then the last block's sources without the pulled ones, in their order; ``input_ids`` begins with them.
    copies : NodeCopies, optional
        The batch has a subgraph for each seed. Its blocks are then of the nodes of ``copies``, of which ``input_ids`` has the
        distinct ids, and ``blocks[0].n_src == len(copies.rows)``.
    """

    index: int
    epoch: int
    input_ids: torch.Tensor
    n_seeds: int
    blocks: tuple[Block, ...]
    history: HistoryRows | None = None
    copies: NodeCopies | None = None

    def __repr__(self) -> str:
        sizes = f"seeds={self.n_seeds}, nodes={self.n_nodes}, blocks={list(self.blocks)}"
        more = ", history" * (self.history is not None) + ", disjoint" * (self.copies is not None)
        return f"SampledBatch(index={self.index}, epoch={self.epoch}, {sizes}{more})"

    def _display(self) -> Display:
        title = f"SampledBatch(index={self.index}, epoch={self.epoch}, seeds={self.n_seeds}, nodes={self.n_nodes})"
        tensors = {"input_ids": self.input_ids}
        if self.history is not None:
            tensors |= {f"history.{name}": getattr(self.history, name) for name in HISTORY_ARRAYS}
        tensors |= {} if self.copies is None else {"copies.rows": self.copies.rows, "copies.batch": self.copies.batch}
        blocks = {f"blocks[{hop}]": block for hop, block in enumerate(self.blocks)}
        return Display(title, [table_of_tensors(tensors), table_of_blocks(blocks)])

    @property
    def seeds(self) -> torch.Tensor:
        """The batch's seeds: the first ``n_seeds`` of ``input_ids``."""
        return self.input_ids[: self.n_seeds]

    @property
    def n_nodes(self) -> int:
        """Number of nodes that the blocks have: of the ids, unless there is a subgraph for each seed."""
        return len(self.input_ids if self.copies is None else self.copies.rows)

    @property
    def nodes(self) -> torch.Tensor:
        """The ids of the nodes that the blocks have, int64 ``[n_nodes]``: ``input_ids``, or a copy of them with repeats."""
        return self.input_ids if self.copies is None else self.input_ids[self.copies.rows]

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The batch's ids, and the tensors of its blocks, its history and its copies."""
        of_blocks = (tensor for block in self.blocks for tensor in block.tensors)
        more = (() if each is None else each.tensors for each in (self.history, self.copies))
        return self.input_ids, *of_blocks, *(tensor for each in more for tensor in each)


class Sampler(Protocol):
    """Contract of a sampler: thread-safe, and a pure function of the graph, the sampler's options and the arguments."""

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        """Sample one batch for distinct ``seeds`` (int64)."""
        ...


class CheckedSampler(Shown, ABC):
    """A sampler whose batches are valid: one of the library's, or a wrapper that checks the batches of a :class:`Sampler`."""

    disjoint: bool = False  # whether batches have a subgraph for each seed

    @property
    def label(self) -> str:
        """The name of the sampler's class, for messages."""
        return type(self).__qualname__

    @property
    def fanouts(self) -> Sequence[int] | None:
        """Neighbours that a node draws in each hop, the seeds' own first; None if unknown."""
        return None

    @property
    def fanouts_of_types(self) -> Mapping[EdgeKey, tuple[int, ...]] | None:
        """The fan-outs of each type of edges; None if the graph has one, or the sampler does not draw types."""
        return None

    @abstractmethod
    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        """Sample one batch; see :class:`Sampler`."""

    def trim(self) -> bool:
        """Give back the scratch of threads that do not sample now, except for one; return whether any was held."""
        return False
