"""Features that a dataset gets of its others: aggregated over neighbours; a model's outputs are :mod:`featstore.inference`'s."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from featstore.budget import Budget
from featstore.config import check_at_least, check_flag, parse_memory
from featstore.errors import BudgetError, BusyError
from featstore.graph.feature import FeatureStore
from featstore.graph.making import FILES, Field, Making, adjacency_of, check_new_feature
from featstore.graph.opened import Opened
from featstore.graph.passes import PassCosts, Passes, Rows, check_op
from featstore.graph.progress import Progress
from featstore.graph.snapshot import Snapshot, opening_committed
from featstore.graph.source import dtype_name
from featstore.graph.topology import Topology
from featstore.storage.catalog import NODE, Catalog
from featstore.storage.writer import RowFileWriter

__all__ = ["HOLDER", "MadeFeatures", "Room", "aggregate", "default_name", "files_of", "generous", "room_in", "write_rows"]


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


class MadeFeatures(Opened):
    """An opened dataset that makes features of its own."""

    _snapshot: Snapshot

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """The adjacency."""

    def aggregate(
        self,
        feature: str,
        op: str = "mean",
        *,
        hops: int = 1,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        overwrite: bool = False,
        memory: int | str | None = None,
        progress: bool = True,
    ) -> FeatureStore:
        """Make a feature of each node's in-neighbours' rows, out of core, and add it to the dataset.

        Training on it saves a hop of sampling and gathering: PaGraph's preprocessing.

        Parameters
        ----------
        feature : str
            Of any dtype and row shape.
        op : {"mean", "sum", "gcn"}
            Over the list of in-neighbours N(v), in which a repeated edge counts each time. ``"sum"``: Σ x_u. ``"mean"``: Σ x_u
            divided by the length of the list, 0 where it is empty. ``"gcn"``: s_v · Σ s_u x_u over N(v) and v itself, where s_v =
            1/√(d_v + 1); v counts exactly once, whatever edges lead from v to v, and d_v are the in-edges from other nodes.
            Where edges have a direction, s_u and s_v are both made of in-degrees, as in PyG's ``gcn_norm``.
        hops : int
            Aggregate so often, each time what came of it before. Between hops there are float64 fields.
        name : str, optional
            Of the new feature; by default ``x_mean``, and ``x_mean2`` for two hops.
        dtype : torch.dtype or str, optional
            Of the new feature, a floating-point one: by default the feature's own, float64 for integers and bools.
        overwrite : bool
            Replace a feature of that name. Stores of it that were handed out go on reading the old one, whose file is removed
            when the graph is closed.
        memory : int or str, optional
            Most bytes to hold, within the graph's budget; by default nearly all that it has left.
        progress : bool
            Show a progress bar, with the time left, on a terminal and in a notebook.

        Returns
        -------
        FeatureStore
            ``g.features[name]``, ready to be used; other handles have it when they are opened again.

        Raises
        ------
        KeyError, ValueError, TypeError
            No such feature; no such op, a name that is taken or none, no floating-point dtype.
        BudgetError
            Too little memory for the sums of one node; names what does.
        BusyError
            Somebody else is writing the dataset, or has changed it since it was opened; or a loader uses the feature that is to
            be replaced.
        CommittedError
            The feature is in the dataset, but making that durable, or opening it, failed.
        CorruptionError, OSError
            Reading or writing failed. The dataset is as it was, and nothing is left.

        Notes
        -----
        Sums are made in float64, in ascending order of the neighbours, and rounded once, to ``dtype``: bit for bit what SciPy's
        product ``csr_array((ones, indices, indptr)) @ x`` has in float64. int64 beyond 2⁵³ is rounded first.

        Blocks of nodes whose sums fit the memory, 8 bytes a number, take turns; each reads the feature once, in sequence. The
        graph's threads add; how many they are changes no bit.

        All is added in one commit. After a kill or Ctrl-C, the same call goes on where the last one was, but for the last
        seconds. The dataset's writer lock is held meanwhile. Needs disk for the new feature, and between hops for two float64
        fields.

        Examples
        --------
        >>> g.aggregate("x", op="mean", name="x_mean")
        FeatureStore('x_mean', shape=(1000, 16), dtype=torch.float32, backend='io_uring')

        References
        ----------
        Bai et al.: PaGraph. IEEE TPDS 2021, section 5.1 (PP). Kipf, Welling: Semi-Supervised Classification with Graph
        Convolutional Networks. ICLR 2017, equation 2 (gcn).
        """
        self._check_open()
        with self._or_closed():
            aggregate(self, feature, op, hops, name, dtype, overwrite, memory, progress)
        return self.features[default_name(feature, op, hops) if name is None else name]

    @property
    def catalog(self) -> Catalog:
        """The commit that is open, and what this handle has added to it."""
        return self._snapshot.catalog

    def rows_of(self, name: str) -> Rows:
        """Return a feature's rows as passes over them want them."""
        store = self.features[name]
        file = self._snapshot.file_of(self._snapshot.catalog.by_role("feature")[name])
        return Rows(file, store.dtype, math.prod(store.shape[1:]))

    def check_replaceable(self, name: str) -> None:
        """Raise BusyError where a loader uses the cache of a feature."""
        with self.locked():
            store = self._stores.get(name)
            if store is not None and store.cache is not None and store.cache.in_use:
                raise BusyError(f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch")

    def adopt_feature(self, catalog: Catalog, name: str) -> None:
        """Use a feature that was just committed; BusyError where a loader has begun to use the one it replaces."""
        key = f"{NODE}/{name}"
        with self.locked():
            with opening_committed(f"the feature {name!r} is in {self.path}, but opening it failed", self.path):
                self._snapshot.adopt(catalog, key, [part.file for part in catalog.fields[key].parts])
            if name in self._stores:
                self._drop_cache(self._stores[name])
            self._open_feature(name)

    @abstractmethod
    def _open_feature(self, name: str) -> None:
        """Make the store of a feature of the snapshot, in place of an earlier one."""


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
    g: MadeFeatures,
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
    g: MadeFeatures,
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
