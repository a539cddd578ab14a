"""The mini-batch of a graph of several types: ids within the types, a block for each type of edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.display import Display
from featstore.gather.buffers import BufferPool, memory_errors
from featstore.load.disjoint import batch_nodes
from featstore.load.minibatch import LoadedBatch, Move
from featstore.load.report import show_batch
from featstore.registry import adapter
from featstore.sampling.batch import Block, SampledBatch
from featstore.sampling.edgenumbers import edge_type_of
from featstore.strategies.base import Batch
from featstore.strategies.domain import Domain
from featstore.topology.noderows import NodeRows, by_type
from featstore.topology.types import EdgeKey, NodeType, Types

__all__ = ["HeteroMiniBatch", "TypedNodes", "parts_of", "typed_batch"]

Int64s = npt.NDArray[np.int64]


@dataclass(eq=False, repr=False)
class HeteroMiniBatch(LoadedBatch):
    """One batch of a :class:`~featstore.Loader` of a graph of several types. All ids are ids within their type.

    Attributes
    ----------
    seed_type : str
        The type of the seeds.
    seeds : int64 tensor, shape (n_seeds,)
        The nodes of the loss, each once: the first of ``input_ids[seed_type]``.
    input_ids : dict of str to int64 tensor, shape (n,)
        Nodes of the batch, by type; a type may have none. Distinct, unless there is a subgraph for each seed.
    blocks : tuple of dict of (str, str, str) to Block
        One bipartite block of each type of edges, for each hop, outermost first. ``src`` and ``dst`` are positions in
        ``input_ids`` of the types of the two ends, of which the block has the first ``n_src`` and ``n_dst``.
    labels : dict of str to tensor, shape (n_given, …)
        As of :class:`MiniBatch`, of the seeds' type.
    index : int
    seed_index, seed_positions
        As of :class:`MiniBatch`.
    batch : dict of str to int64 tensor, shape (n,), or None
        By type, as of :class:`MiniBatch`.
    num_sampled_nodes : dict of str to list of int
        For each type, its seeds, and the nodes that each hop added, the seeds' own hop first.
    edge_features : dict of str to tuple of dict of (str, str, str) to tensor, shape (n_edges, …)
        Of each feature a dict a block, whose rows belong to the edges of the block; of the types of edges that have the feature.
    """

    seed_type: str
    seeds: torch.Tensor
    input_ids: dict[str, torch.Tensor]
    blocks: tuple[dict[EdgeKey, Block], ...]
    labels: dict[str, torch.Tensor]
    index: int
    seed_index: torch.Tensor
    seed_positions: torch.Tensor | None
    num_sampled_nodes: dict[str, list[int]]
    edge_features: dict[str, tuple[dict[EdgeKey, torch.Tensor], ...]]
    rows: dict[str, torch.Tensor]
    parts: dict[str, list[tuple[str, str, int, int]]]  # of each of rows: the feature, a type, and where its rows are
    batch: dict[str, torch.Tensor] | None = None
    history: Any = None

    @property
    def features(self) -> dict[str, dict[str, torch.Tensor]]:
        """The features by name, each of the types that have it; row ``k`` belongs to ``input_ids[type][k]``."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for store, rows in self.rows.items():
            for name, kind, first, stop in self.parts[store]:
                found.setdefault(name, {})[kind] = rows[first:stop]
        return found

    @property
    def x(self) -> dict[str, torch.Tensor]:
        """The first feature, by type."""
        for of_types in self.features.values():
            return of_types
        raise AttributeError("this loader was made with features=[]: its batches have no x")

    @property
    def gathered(self) -> Mapping[str, torch.Tensor]:
        """See :class:`LoadedBatch`."""
        return self.rows

    def with_gathered(self, rows: dict[str, torch.Tensor]) -> HeteroMiniBatch:
        """See :class:`LoadedBatch`."""
        return replace(self, rows=rows)

    def to_pyg(self) -> Any:
        """Return the batch as a ``torch_geometric.data.HeteroData``; see :func:`featstore.adapters.pyg.to_hetero_data`.

        Raises
        ------
        MissingExtraError
            torch_geometric is not installed.
        OptionError
            A feature or a label has a name that PyG's batches use.
        """
        with memory_errors():
            return adapter("pyg").to_hetero_data(self)

    def _tensors(self) -> list[torch.Tensor]:
        of_blocks = (each for hop in self.blocks for block in hop.values() for each in block.tensors)
        of_edges = (rows for hops in self.edge_features.values() for hop in hops for rows in hop.values())
        of_seeds = self.seed_index, *self.labels.values(), *(() if self.seed_positions is None else (self.seed_positions,))
        of_nodes = *self.input_ids.values(), *(self.batch or {}).values()
        return [*of_nodes, *self.rows.values(), *of_seeds, *of_blocks, *of_edges]

    def _map(self, move: Move) -> HeteroMiniBatch:
        input_ids = {kind: move(ids) for kind, ids in self.input_ids.items()}
        return replace(
            self,
            seeds=input_ids[self.seed_type][: len(self.seeds)],
            input_ids=input_ids,
            blocks=tuple({key: block.map(move) for key, block in hop.items()} for hop in self.blocks),
            labels={name: move(tensor) for name, tensor in self.labels.items()},
            seed_index=move(self.seed_index),
            seed_positions=None if self.seed_positions is None else move(self.seed_positions),
            edge_features={
                name: tuple({key: move(rows) for key, rows in hop.items()} for hop in hops)
                for name, hops in self.edge_features.items()
            },
            rows={name: move(rows) for name, rows in self.rows.items()},
            batch=None if self.batch is None else {kind: move(numbers) for kind, numbers in self.batch.items()},
        )

    def _display(self) -> Display:
        nodes = ", ".join(f"{kind}={len(ids)}" for kind, ids in self.input_ids.items())
        head = f"index={self.index}, seeds={len(self.seeds)} of {self.seed_type!r}, hops={len(self.blocks)}"
        tensors = {f"input_ids[{kind!r}]": ids for kind, ids in self.input_ids.items()}
        for name, of_types in self.features.items():
            tensors |= {f"features[{name!r}][{kind!r}]": rows for kind, rows in of_types.items()}
        tensors |= {f"labels[{name!r}]": tensor for name, tensor in self.labels.items()}
        for name, hops in self.edge_features.items():
            for hop, of_hop in enumerate(hops):
                tensors |= {f"edge_features[{name!r}][{hop}][{key}]": rows for key, rows in of_hop.items()}
        tensors |= {f"batch[{kind!r}]": numbers for kind, numbers in (self.batch or {}).items()}
        blocks = {f"blocks[{hop}][{key}]": block for hop, of_hop in enumerate(self.blocks) for key, block in of_hop.items()}
        return show_batch(f"HeteroMiniBatch({head}, {nodes})", tensors, blocks)


class TypedNodes:
    """The nodes of a sampled batch by type, and the blocks between them.

    Parameters
    ----------
    types : Types
    sampled : SampledBatch
        Of a sampler that draws types: its blocks are of each type of edges, hop after hop.
    pool : BufferPool
        Memory of the ids and blocks.
    """

    def __init__(self, types: Types, sampled: SampledBatch, pool: BufferPool) -> None:
        ids = batch_nodes(sampled, pool).numpy()
        self._types, self._pool = types, pool
        self._at = dict(zip(types.nodes, by_type(ids, types.nodes.values()), strict=True))
        self._number = pool.array((len(ids),), np.int64)  # of each node of the batch, in its type
        self.input_ids: dict[str, torch.Tensor] = {}
        for name, at in self._at.items():
            local = pool.tensor((len(at),), torch.int64)
            np.subtract(ids[at], types.nodes[name].first, out=local.numpy())
            self.input_ids[name] = local
            self._number[at] = np.arange(len(at))
        self.batch: dict[str, torch.Tensor] | None = None
        if sampled.copies is not None:
            self.batch = {name: pool.tensor((len(at),), torch.int64) for name, at in self._at.items()}
            for name, numbers in self.batch.items():
                np.take(sampled.copies.batch.numpy(), self._at[name], out=numbers.numpy(), mode="clip")
        k = max(1, len(types.edges))
        hops = [sampled.blocks[first : first + k] for first in range(0, len(sampled.blocks), k)]
        self.blocks = tuple(dict(zip(types.edges, hop, strict=True)) for hop in hops)
        ends = [sampled.n_seeds, *(hop[0].n_src for hop in reversed(hops))]
        of_types = {name: np.searchsorted(at, ends) for name, at in self._at.items()}
        self.num_sampled_nodes = {name: [int(n[0]), *np.diff(n).tolist()] for name, n in of_types.items()}

    def local_blocks(self) -> tuple[dict[EdgeKey, Block], ...]:
        """Make the blocks in numbers within the types; blocks that are a part of an outer one stay a part of it."""
        found: tuple[dict[EdgeKey, Block], ...] = tuple({} for _ in self.blocks)
        for key, kind in self._types.edges.items():
            src_at, dst_at = self._at[key[0]], self._at[key[2]]
            made: Block | None = None
            outer: Block | None = None
            for hop, out in zip(self.blocks, found, strict=True):
                block = hop[key]
                n_src, n_dst = (int(np.searchsorted(at, n)) for at, n in ((src_at, block.n_src), (dst_at, block.n_dst)))
                if made is None or outer is None or not _is_part(block, outer):
                    outer, made = block, self._local(block, kind.first_edge)
                n = len(block.src)
                out[key] = replace(made.map(lambda values, n=n: values[:n]), n_src=n_src, n_dst=n_dst)  # type: ignore[misc]
        return found

    def edge_features(
        self, gathered: Mapping[str, tuple[torch.Tensor, ...]]
    ) -> dict[str, tuple[dict[EdgeKey, torch.Tensor], ...]]:
        """Group the rows of edges, one tensor a hop of each store, by the feature's name, hop and type of edges."""
        found: dict[str, tuple[dict[EdgeKey, torch.Tensor], ...]] = {}
        for store, hops in gathered.items():
            of_hops = found.setdefault(store.rpartition("/")[2], tuple({} for _ in self.blocks))
            for of_types, rows in zip(of_hops, hops, strict=True):
                of_types[edge_type_of(self._types, store).key] = rows
        return found

    def _local(self, block: Block, first_edge: int) -> Block:
        ends = self._pool.tensor((2, len(block.src)), torch.int64)
        for out, numbers in zip(ends, (block.src, block.dst), strict=True):
            np.take(self._number, numbers.numpy(), out=out.numpy(), mode="clip")
        edge_pos = block.edge_pos
        if edge_pos is not None and first_edge:
            edge_pos = self._pool.tensor((len(block.src),), torch.int64)
            assert block.edge_pos is not None
            np.subtract(block.edge_pos.numpy(), first_edge, out=edge_pos.numpy())
        return Block(ends[0], ends[1], block.n_src, block.n_dst, edge_pos, block.weight)


def _is_part(block: Block, outer: Block) -> bool:
    """Tell whether a block's edges are the first of another one's, in the same memory."""
    return len(block.src) <= len(outer.src) and all(
        mine.data_ptr() == other.data_ptr() for mine, other in zip(block.tensors, outer.tensors, strict=True) if len(mine)
    )


def parts_of(store: str, rows: NodeRows, input_ids: Mapping[str, torch.Tensor]) -> list[tuple[str, str, int, int]]:
    """List the parts of a store's gathered rows: the feature's name, a type, and where the rows of that type are."""
    found, first = [], 0
    for kind in rows.kinds:
        stop = first + len(input_ids[kind.name])
        found.append((store.rpartition("/")[2], kind.name, first, stop))
        first = stop
    return found


def typed_batch(
    types: Types,
    kind: NodeType,
    nodes: Domain,
    batch: Batch,
    features: dict[str, torch.Tensor],
    pool: BufferPool,
    labels: dict[str, torch.Tensor],
    number: torch.Tensor,
    positions: torch.Tensor | None,
) -> HeteroMiniBatch:
    """Make the batch that a graph of several types delivers, of seeds of one ``kind``: ids and blocks within the types."""
    typed = TypedNodes(types, batch.sampled, pool)
    ids = typed.input_ids
    return HeteroMiniBatch(
        seed_type=kind.name,
        seeds=ids[kind.name][: batch.sampled.n_seeds],
        input_ids=ids,
        blocks=typed.local_blocks(),
        labels=labels,
        index=batch.sampled.index,
        seed_index=number,
        seed_positions=positions,
        batch=typed.batch,
        num_sampled_nodes=typed.num_sampled_nodes,
        edge_features=typed.edge_features(batch.edge_features),
        rows=features,
        parts={name: parts_of(name, nodes.rows_of(name), ids) for name in features},
    )
