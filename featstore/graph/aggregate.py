"""Features that a dataset gets of its others: aggregated over neighbours; a model's outputs are :mod:`featstore.inference`'s."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from featstore.budget import Budget
from featstore.config import check_at_least, check_flag, parse_memory
from featstore.creation.source import dtype_name
from featstore.errors import BudgetError
from featstore.graph.feature import FeatureStore
from featstore.graph.making import FILES, Field, Making, adjacency_of, check_new_feature
from featstore.graph.opendataset import OpenDataset
from featstore.graph.passes import PassCosts, Passes, Rows, check_op
from featstore.progress import Progress
from featstore.storage.catalog import NODE, Catalog
from featstore.storage.writer import RowFileWriter
from featstore.topology.base import Topology

__all__ = ["HOLDER", "Room", "aggregate", "default_name", "files_of", "generous", "room_in", "write_rows"]


HOLDER: Final = "aggregation"  # in the budget's report
_MOST_HOPS: Final = 1 << 16  # a file each, one after the other
_LEAST_BUFFER: Final = 64 << 10
_MOST_BUFFER: Final = 16 << 20  # a piece of rows and the next one
_MOST_PIECE: Final = 32 << 20  # torch starts and ends a team of threads for each operation on a piece
_WRITER_BYTES: Final = 1 << 19  # of checksums that are not written yet
_GROUP_BYTES: Final = 1 << 20  # rows that are padded at once
_PART_BYTES: Final = 1 << 18  # rows whose dtype is changed at once
_MOST_READER: Final = 24 << 20  # left to the reader, which sorts what it reads
_SHARE: Final = 1.5  # of memory more than passes want, as parts of it go to the writer and the reader


@dataclass(frozen=True)
class Room:
    """Division of the memory for making a field: bytes for passes, the writer's buffer, rows that a layer gets at once.

    ``held`` are the bytes of the writer and the pieces together.
    """

    passes: int
    buffer_bytes: int
    piece_bytes: int
    held: int


def room_in(budget: Budget, memory: int | str | None, given_bytes: int, written_bytes: int = 0) -> Room:
    """Divide what a budget has left, or ``memory`` of it.

    A row that a layer gets has ``given_bytes``, in all of its forms, or 0 where none does. One that is written has
    ``written_bytes``, or 0 where that is not known yet.
    """
    n_bytes = budget.available
    if memory is not None or n_bytes < budget.total // 4:
        n_bytes += budget.on_loan  # which a reservation takes back
    n_bytes -= min(_MOST_READER, n_bytes // 8)
    if memory is not None:
        n_bytes = min(n_bytes, parse_memory(memory))
    buffer_bytes = max(_LEAST_BUFFER, min(_MOST_BUFFER, n_bytes // 32))
    piece_bytes = max(given_bytes, min(_MOST_PIECE, n_bytes // 32)) if given_bytes else 0
    held = buffer_bytes + piece_bytes + max(written_bytes, _PART_BYTES) + _WRITER_BYTES + _GROUP_BYTES
    return Room(n_bytes - held, buffer_bytes, piece_bytes, held)


@contextlib.contextmanager
def generous(budget: Budget, memory: int | str | None) -> Iterator[None]:
    """Have a BudgetError name a budget, or ``memory``, that does: of what is more a part goes to the writer and the reader."""
    try:
        yield
    except BudgetError as error:
        if error.needed is None:
            raise
        stated = budget.total if memory is None else parse_memory(memory)
        needed = stated + math.ceil(_SHARE * max(0, error.needed - budget.total))
        raise BudgetError(error.reason, needed) from None


def files_of(catalog: Catalog, name: str) -> list[str]:
    """Return the ids of the files that hold the adjacency and a feature."""
    of_feature = [catalog.files[part.file].file_id for part in catalog.fields[f"{NODE}/{name}"].parts]
    return [*(each for ids in adjacency_of(catalog).values() for each in ids), *of_feature]


def write_rows(rows: torch.Tensor, making: Making, step: int, writer: RowFileWriter, field: Field) -> None:
    """Append rows to a step's field in its dtype, and record them now and then."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    most = max(1, _PART_BYTES // field.row_bytes)
    for low in range(0, len(rows), most):
        part = rows[low : low + most].to("cpu", dtype).contiguous()
        writer.write(part.view(torch.uint8).numpy().reshape(len(part), field.row_bytes))
        making.checkpoint(step)


def aggregate(
    g: OpenDataset,
    feature: str,
    op: str,
    hops: int,
    name: str | None,
    dtype: torch.dtype | str | None,
    overwrite: bool,
    memory: int | str | None,
    progress: bool,
) -> list[PassCosts]:
    """Make a feature, see :meth:`featstore.OutOfCoreGraph.aggregate`; return what the passes of each hop came to."""
    check_op(op)
    hops = check_at_least("hops", hops, 1, _MOST_HOPS)
    for each, flag in (("overwrite", overwrite), ("progress", progress)):
        check_flag(each, flag)
    store: FeatureStore = g.features[feature]
    name = default_name(feature, op, hops) if name is None else name
    if name == feature:
        raise ValueError(f"name: {name!r} is the feature that is aggregated; choose another")
    out_dtype = output_dtype(store.dtype, dtype)
    check_new_feature(g.catalog, name, overwrite)
    g.check_replaceable(name)
    row_shape, n = store.shape[1:], g.num_nodes
    made = dtype_name(out_dtype)
    recipe = {
        "what": "aggregate",
        FILES: files_of(g.catalog, feature),
        "op": op,
        "hops": hops,
        "dtype": made,
    }
    fields = {hop: Field(n, row_shape, "float64" if hop < hops - 1 else made) for hop in range(hops)}
    uses = [f"{NODE}/{feature}"]
    topology, costs = g.topology, []
    with (
        generous(g.budget, memory),
        Making(g.path, g.catalog, name, recipe, uses, overwrite=overwrite, progress=progress) as making,
    ):
        for hop in range(hops):
            if making.is_done(hop):
                continue
            with contextlib.ExitStack() as stack:
                rows = g.rows_of(feature)
                if hop:
                    file = stack.enter_context(contextlib.closing(making.open(hop - 1, g.reader)))
                    rows = Rows(file, torch.float64, rows.width)
                label = f"aggregate {name}" + (f" {hop + 1}/{hops}" if hops > 1 else "")
                costs.append(_hop(g, topology, rows, op, hop, fields[hop], making, memory, progress, label))
        g.adopt_feature(making.commit(hops - 1), name)
    return costs


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


def _hop(
    g: OpenDataset,
    topology: Topology,
    rows: Rows,
    op: str,
    hop: int,
    field: Field,
    making: Making,
    memory: int | str | None,
    progress: bool,
    label: str,
) -> PassCosts:
    """Make one hop's field, from where an earlier call left it."""
    room = room_in(g.budget, memory, 0, field.row_bytes)
    with g.budget.reserve(HOLDER, room.held):
        writer = making.writer(hop, field, room.buffer_bytes)
        first, bar = writer.n_rows, Progress(label, 0, False)
        passes = Passes(
            topology,
            rows,
            op,
            torch.float64,
            g.budget,
            room.passes,
            g.options.threads,
            HOLDER,
            lambda n_bytes: bar.add(n_bytes),
            first,
        )
        bar = Progress(label, passes.total_bytes, progress)
        with passes, bar:
            for block in passes.blocks():
                write_rows(torch.from_numpy(block.sums), making, hop, writer, field)
        making.finish(hop, [hop - 1])
        return passes.costs
