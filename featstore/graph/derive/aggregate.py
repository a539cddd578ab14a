"""Features made by aggregating another feature over neighbours; :mod:`featstore.inference` makes features by a model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from featstore.budget import Budget
from featstore.config import check_at_least, check_flag, listed, parse_memory
from featstore.creation.source import dtype_name
from featstore.creation.steps import FILES, Field
from featstore.errors import BudgetError
from featstore.graph.adjacency import Adjacency
from featstore.graph.base import StoredGraph
from featstore.graph.derive.making import adjacency_of, check_new_feature
from featstore.graph.derive.sharedmaking import SharedMaking
from featstore.graph.feature import FeatureStore
from featstore.graph.openfields import OpenFields
from featstore.graph.passes import PassCosts, Passes, StoredRows, check_op
from featstore.progress import Progress
from featstore.ranks import Meeting
from featstore.storage.catalog import Catalog
from featstore.storage.writer import RowFileWriter
from featstore.topology.edgelists import EdgeLists
from featstore.topology.types import ONE_EDGE, EdgeKey, EdgeType

__all__ = [
    "HOLDER",
    "Room",
    "aggregate_in_hops",
    "default_name",
    "edges_to_aggregate",
    "files_of",
    "generous",
    "room_in",
    "write_rows",
]


HOLDER: Final = "aggregation"  # in the budget's report
_MOST_HOPS: Final = 1 << 16  # each hop makes a file, one after the other
_LEAST_BUFFER: Final = 64 << 10
_MOST_BUFFER: Final = 16 << 20  # of the writer's two buffers together
_MOST_PIECE: Final = 32 << 20  # large, as torch starts a team of threads for each operation on a piece
_WRITER_BYTES: Final = 1 << 19  # of checksums that are not written yet
_GROUP_BYTES: Final = 1 << 20  # rows that are padded at once
_PART_BYTES: Final = 1 << 18  # rows whose dtype is changed at once
_MOST_READER: Final = 24 << 20  # left to the reader for sorting rows
_MEMORY_FACTOR: Final = (
    1.5  # memory added to a budget for each byte that passes lack, as the writer and the reader get parts of it
)


@dataclass(frozen=True)
class Room:
    """Division of the memory for making a field: bytes of passes, of the writer's buffer, and of rows that a layer gets at once.

    ``held`` is the sum of the bytes beside the passes: the writer's and the pieces of rows.
    """

    passes: int
    buffer_bytes: int
    piece_bytes: int
    held: int


def room_in(budget: Budget, memory: int | str | None, given_bytes: int, written_bytes: int = 0) -> Room:
    """Divide the available bytes of a budget, or ``memory`` of them, among passes, writer and rows for a layer.

    ``given_bytes`` are the bytes of one row for a layer, in all of its forms; 0 without a layer. ``written_bytes`` are the bytes
    of a written row; 0 if not known yet.
    """
    n_bytes = budget.available
    if memory is not None or n_bytes < budget.total // 4:
        n_bytes += budget.on_loan  # a reservation takes loans back
    n_bytes -= min(_MOST_READER, n_bytes // 8)
    if memory is not None:
        n_bytes = min(n_bytes, parse_memory(memory))
    buffer_bytes = max(_LEAST_BUFFER, min(_MOST_BUFFER, n_bytes // 32))
    piece_bytes = max(given_bytes, min(_MOST_PIECE, n_bytes // 32)) if given_bytes else 0
    held = buffer_bytes + piece_bytes + max(written_bytes, _PART_BYTES) + _WRITER_BYTES + _GROUP_BYTES
    return Room(n_bytes - held, buffer_bytes, piece_bytes, held)


@contextlib.contextmanager
def generous(budget: Budget, memory: int | str | None) -> Iterator[None]:
    """Raise the need that a BudgetError of the block names to a sufficient budget, or ``memory``.

    The writer and the reader get a part of any additional memory, so passes need more than the missing bytes.
    """
    try:
        yield
    except BudgetError as error:
        if error.needed is None:
            raise
        stated = budget.total if memory is None else parse_memory(memory)
        needed = stated + math.ceil(_MEMORY_FACTOR * max(0, error.needed - budget.total))
        raise BudgetError(error.reason, needed) from None


def files_of(catalog: Catalog, keys: Iterable[str]) -> list[str]:
    """List the ids of the files that hold the adjacency and some features, given by their keys in the catalog."""
    of_features = [catalog.files[part.file].rows_id for key in keys for part in catalog.fields[key].parts]
    return [*(each for ids in adjacency_of(catalog).values() for each in ids), *of_features]


def write_rows(rows: torch.Tensor, making: SharedMaking, step: int, writer: RowFileWriter, field: Field) -> None:
    """Append rows to a step's field in the field's dtype, with regular checkpoints."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    most = max(1, _PART_BYTES // field.row_bytes)
    for low in range(0, len(rows), most):
        part = rows[low : low + most].to("cpu", dtype).contiguous()
        writer.write(part.view(torch.uint8).numpy().reshape(len(part), field.row_bytes))
        making.checkpoint()


def aggregate_in_hops(
    g: StoredGraph,
    fields: OpenFields,
    adjacency: Adjacency,
    feature: str,
    op: str,
    edge_type: EdgeKey | None,
    hops: int,
    name: str | None,
    dtype: torch.dtype | str | None,
    overwrite: bool,
    memory: int | str | None,
    progress: bool,
    meeting: Meeting,
) -> list[PassCosts]:
    """Aggregate a feature as :meth:`featstore.OutOfCoreGraph.aggregate`; return the costs of this rank's passes by hop.

    The caller has entered ``meeting``: a handle of one rank alone may refuse.
    """
    check_op(op)
    hops = check_at_least("hops", hops, 1, _MOST_HOPS)
    for each, flag in (("overwrite", overwrite), ("progress", progress)):
        check_flag(each, flag)
    kind = edges_to_aggregate(g, edge_type, op, hops)
    src, dst = kind.src.name, kind.dst.name
    store: FeatureStore = g.features[feature] if g.types.is_one else g[src].features[feature]
    g.check_in_file(store.name)
    name = default_name(feature, op, hops) if name is None else name
    if name == feature and src == dst:
        raise ValueError(f"name: {name!r} is the feature that is aggregated; choose another")
    out_dtype = output_dtype(store.dtype, dtype)
    check_new_feature(fields.catalog, name, overwrite, [dst])
    fields.check_replaceable(name, dst)
    row_shape = store.shape[1:]
    made = dtype_name(out_dtype)
    uses = [f"node/{src}/{feature}"]
    recipe = {
        "what": "aggregate",
        FILES: files_of(fields.catalog, uses),
        "op": op,
        "hops": hops,
        "dtype": made,
    }
    if not g.types.is_one:  # types may share a file
        recipe |= {"edge type": kind.key, "feature": feature}
    made_fields = {hop: Field(kind.dst.n, row_shape, "float64" if hop < hops - 1 else made) for hop in range(hops)}
    edges, costs = EdgeLists(adjacency.topology, kind), []
    with (
        generous(g.budget, memory),
        SharedMaking(meeting, g, fields.catalog, name, recipe, uses, of=[dst], overwrite=overwrite, progress=progress) as making,
    ):
        for hop in range(hops):
            if making.is_done(hop):
                continue
            with contextlib.ExitStack() as stack:
                rows = fields.rows_of(feature, src)
                if hop:
                    file = stack.enter_context(contextlib.closing(making.open(hop - 1, g.reader)))
                    rows = StoredRows(file, torch.float64, rows.width)
                label = f"aggregate {making.name}" + (f" {hop + 1}/{hops}" if hops > 1 else "")
                _, stop = making.share(hop, kind.dst.n, [edges])
                cost = PassCosts()  # of a rank without rows
                if making.writes:
                    cost = _rows(g, edges, rows, op, hop, stop, made_fields[hop], making, memory, progress, label)
                costs.append(cost)
                making.finish(hop, [hop - 1])
        fields.adopt_feature(making.commit({dst: hops - 1}), name, dst)
        making.end()
    return costs


def edges_to_aggregate(g: StoredGraph, edge_type: object, op: str, hops: int) -> EdgeType:
    """Get the type of edges over which a feature is aggregated.

    Raises
    ------
    ValueError
        The graph has several types and none is named, or has one and a type is; ``op`` or ``hops`` need edges that begin and end
        at one type of nodes.
    KeyError, TypeError
        The graph has no such type; the type is no tuple.
    """
    types = g.types
    there = listed(types.edges)
    if types.is_one:
        if edge_type is not None:
            raise ValueError(f"edge_type: the graph has one type of edges, without a name; leave out {edge_type!r}")
        return types.edges[ONE_EDGE]
    if edge_type is None:
        raise ValueError(f"aggregate() over a graph of several types needs edge_type=, the type of the edges: of {there}")
    if not isinstance(edge_type, tuple):
        raise TypeError(f"edge_type must be a tuple (source, relation, destination), not {edge_type!r}; there is {there}")
    if edge_type not in types.edges:
        raise KeyError(f"no edge type {edge_type!r}; there is {there}")
    kind = types.edges[edge_type]
    if kind.src != kind.dst and (op == "gcn" or hops > 1):
        what = "op='gcn' adds a node's own row" if op == "gcn" else f"hops={hops} aggregates the result again"
        raise ValueError(
            f"{what}, so it needs edges that begin and end at one type of nodes, not {edge_type!r}: take 'mean' or "
            "'sum', and one hop after the other"
        )
    return kind


def default_name(feature: str, op: str, hops: int) -> str:
    """Name an aggregated feature: ``x_mean``, ``x_mean2``."""
    return f"{feature}_{op}{hops if hops > 1 else ''}"


def output_dtype(stored: torch.dtype, asked: torch.dtype | str | None) -> torch.dtype:
    if asked is None:
        return stored if stored.is_floating_point else torch.float64
    found: torch.dtype = getattr(torch, dtype_name(asked))
    if not found.is_floating_point:
        raise TypeError(f"dtype must be a floating-point one, not {asked}")
    return found


def _rows(
    g: StoredGraph,
    edges: EdgeLists,
    rows: StoredRows,
    op: str,
    hop: int,
    stop: int,
    field: Field,
    making: SharedMaking,
    memory: int | str | None,
    progress: bool,
    label: str,
) -> PassCosts:
    """Write this rank's rows of a hop's field, up to destination ``stop``."""
    room = room_in(g.budget, memory, 0, field.row_bytes)
    with g.budget.reserve(HOLDER, room.held):
        writer, bar = making.writer(hop, field, room.buffer_bytes), Progress(label, 0, False)
        passes = Passes(
            edges,
            rows,
            op,
            torch.float64,
            g.budget,
            room.passes,
            g.options.threads,
            HOLDER,
            lambda n_bytes: bar.add(n_bytes),
            making.first(),
            stop,
        )
        bar = Progress(label, passes.total_bytes, progress and making.is_shown)
        with passes, bar:
            for block in passes.blocks():
                write_rows(torch.from_numpy(block.sums), making, hop, writer, field)
        return passes.costs
