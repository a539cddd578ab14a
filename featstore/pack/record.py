"""An opened pack: its record, and the batches that were sampled offline (DiskGNN), each checked at every read."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore.config import format_size, user_path
from featstore.display import Display, Shown, Table, described
from featstore.errors import CorruptionError, FormatError, StaleError, VersionError
from featstore.gather.buffers import BufferPool
from featstore.lazy import lazy
from featstore.plan.samples import SampleFile
from featstore.plan.trace import lengths_of
from featstore.sampling.batch import SampledBatch
from featstore.sampling.batches import UNKNOWN_RUN
from featstore.sampling.foreign import adjacency_of
from featstore.storage.directory import OpenDirectory, with_directory
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.topology.noderows import NodeRows
from featstore.topology.types import Types

if TYPE_CHECKING:
    from typing_extensions import Self

    from featstore.graph.base import StoredGraph

__all__ = [
    "NODE_DATA",
    "PACK_VERSION",
    "RECORD",
    "SAMPLES",
    "TYPED_VERSION",
    "ColumnRows",
    "OfflineSamples",
    "RowNeeds",
    "fits",
    "is_file_name",
    "read_record",
    "write_record",
]

PACK_VERSION = 1
TYPED_VERSION = 2  # of the record of a pack of a graph of several types, which a reader of one type must not take for its own
MOST = 1 << 62  # no count and no size is larger
RECORD, SAMPLES = "pack", "samples"
NODE_DATA = "node_data"  # the record's name for the files of node data that the pack carries
# Required fields of a record: a type (integers are from 0 to 2⁶²), or a tuple of alternatives; ``{str: each}`` is an object of
# any names, ``[each]`` a list. Other fields are checked by the code that uses them.
_EXTENTS = {"name": str, "id": str, **dict.fromkeys(("pages", "bytes", "sums_bytes"), int)}
_FEATURE = {"name": str, "made_of": str, "dtype": str, "shape": [int], "row_bytes": int, "file": _EXTENTS}
FIELDS: dict[str, dict[str, Any]] = {
    "pack": {"num_nodes": int, "epochs": int, "batches": int, "samples": str, "made_of": {str: str}}
    | {"batch_size": (int, None), "drop_last": bool, "fanouts": ([(int, -1)], None), "seed": object},
    "layout": {"samples": str, "tables": {str: str}, "features": [_FEATURE], "policy": str, "digest": str}
    | dict.fromkeys(("capacity", "superbatch", "device_rows"), int),
}
TYPED_FIELDS: dict[str, Any] = {"num_edges": int, "node_types": list, "edge_types": list, "seed_type": str}
TYPED_FIELDS |= {"fanouts_of_types": {str: [(int, -1)]}}
OPTIONAL: dict[str, dict[str, Any]] = {"pack": {"together": int}, "layout": {"disk": int, "restart": int}}  # checked if present


def fits(value: Any, spec: Any) -> bool:
    """Tell whether a record's value fits its specification, of the form of :data:`FIELDS`."""
    if isinstance(spec, tuple):
        return any(fits(value, each) for each in spec)
    if isinstance(spec, list):
        return isinstance(value, list) and all(fits(each, spec[0]) for each in value)
    if isinstance(spec, dict):
        if str in spec:
            return isinstance(value, dict) and all(fits(each, spec[str]) for each in value.values())
        return isinstance(value, dict) and all(name in value and fits(value[name], each) for name, each in spec.items())
    if spec is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST
    return isinstance(value, spec) if isinstance(spec, type) else bool(value == spec)


def is_file_name(name: str) -> bool:
    """Tell whether a record may name a file so: letters, digits and a few signs, which lead nowhere else."""
    return re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) is not None


def write_record(path: str, kind: str, record: Mapping[str, Any], disk: DiskQuota | None = None) -> None:
    """Write a JSON object durably, as a file of one section."""
    with SectionWriter(path, kind, disk) as writer:
        writer.append(np.frombuffer(json.dumps(record).encode(), np.uint8))
        writer.finish(durable=True).close()


def read_record(path: str, kind: str, directory: OpenDirectory | None = None) -> dict[str, Any]:
    """Read a record that :func:`write_record` wrote; if ``directory`` is given, the file is looked up there.

    CorruptionError, FormatError: the file is damaged, or no record. VersionError: the record has another format.
    """
    file = SectionFile(path, kind, directory=directory)
    try:
        record = json.loads(file[0].tobytes())
    except (ValueError, IndexError, RecursionError) as error:
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"the record is not a JSON object: {error}", path) from None
    finally:
        file.close()
    if not isinstance(record, dict):
        raise CorruptionError("the record is not a JSON object", path)
    known = (PACK_VERSION, TYPED_VERSION) if kind == RECORD else (PACK_VERSION,)
    if record.get("format") not in known:
        raise VersionError(f"{path}: pack format {record.get('format')}; this release reads up to {max(known)}", path)
    typed = TYPED_FIELDS if record["format"] == TYPED_VERSION else {}
    optional = {name: spec for name, spec in OPTIONAL.get(kind, {}).items() if name in record}
    for name, spec in {**FIELDS.get(kind, {}), **typed, **optional}.items():
        if name not in record or not fits(record[name], spec):
            raise CorruptionError(f"the record's {name} is {record.get(name)!r:.100}", path)
    return record


class RowNeeds(Protocol):
    """The rows of a column of features that each batch of a pack needs, of which layouts are made.

    An :class:`OfflineSamples` itself if nodes have no types: a batch then needs the rows of its nodes.
    """

    @property
    def n_rows(self) -> int:
        """Rows of the column."""

    @property
    def epochs(self) -> int:
        """Epochs that were sampled."""

    @property
    def n_batches(self) -> int:
        """Batches of an epoch."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Rows that each batch needs, int64 [epochs * n_batches]."""

    def __len__(self) -> int: ...

    def ids(self, number: int) -> npt.NDArray[Any]:
        """Read the rows that batch ``number`` needs, int32 (int64 from 2³¹ rows on)."""

    def counts(self) -> npt.NDArray[np.int64]:
        """Count the batches that need each row, int64 [n_rows]."""


class ColumnRows:
    """The rows of a column that types of nodes share, as batches of a pack need them (:class:`RowNeeds`).

    ``rows`` are those of the types whose features are packed; nodes of other types need none.
    """

    def __init__(self, pack: OfflineSamples, rows: NodeRows) -> None:
        self._pack, self._rows = pack, rows
        self.n_rows, self.epochs, self.n_batches = rows.n, pack.epochs, pack.n_batches

    def __len__(self) -> int:
        return len(self._pack)

    @lazy
    def lengths(self) -> npt.NDArray[np.int64]:
        """Rows that each batch needs; the first use reads the ids of every batch."""
        return lengths_of(self.ids, len(self))

    def ids(self, number: int) -> npt.NDArray[Any]:
        """Read the rows that batch ``number`` needs, in the order in which its nodes' rows are delivered."""
        return self._rows.stored(self._pack.ids(number))

    def counts(self) -> npt.NDArray[np.int64]:
        """Count the batches that need each row, with one batch in memory at a time."""
        return _counts(self)


def _counts(needs: RowNeeds) -> npt.NDArray[np.int64]:
    counts = np.zeros(needs.n_rows, np.int64)
    for number in range(len(needs)):
        counts[needs.ids(number).astype(np.intp, copy=False)] += 1  # distinct within a batch
    return counts


class OfflineSamples(Shown):
    """Batches of a pack; the subclass :class:`featstore.Pack` can also check layouts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(user_path(path))
        self.record, file = with_directory(self.path, self._open, "pack")
        self._finalizer = weakref.finalize(self, file.close)
        self.samples = SampleFile(file)
        self.types = self._types()
        self._columns: dict[NodeRows, ColumnRows] = {}
        if len(self.samples) != self.epochs * self.n_batches:
            raise CorruptionError(f"{len(self.samples)} batches instead of {self.epochs * self.n_batches}", file.path)

    def _open(self, directory: OpenDirectory) -> tuple[dict[str, Any], SectionFile]:
        if not directory.has(RECORD):
            raise FormatError(f"{self.path} is not a pack: it has no record; featstore.sample_offline makes packs", self.path)
        record = read_record(self.file(RECORD), "pack", directory)
        file = SectionFile(self.file(SAMPLES), "samples", directory=directory)
        if file.file_id != record["samples"]:
            file.close()
            raise CorruptionError("these are not the samples that the pack was made with", file.path)
        return record, file

    def _types(self) -> Types:
        """Read the types from the record; CorruptionError if they contradict it, or the samples."""
        record, path = self.record, self.file(RECORD)
        if record["format"] != TYPED_VERSION:
            return Types.one(self.num_nodes, 0)
        try:
            found = Types.of_entry(record, path)
        except FormatError as error:
            raise CorruptionError(f"the record's types cannot be used: {error}", path) from None
        if record["seed_type"] not in found.nodes:
            raise CorruptionError(f"the seeds are of {record['seed_type']!r}, which is no type of nodes", path)
        if self.samples.n_hops % max(1, len(found.edges)):
            raise CorruptionError(f"batches of {self.samples.n_hops} blocks, for {len(found.edges)} types of edges", path)
        return found

    @property
    def seed_type(self) -> str | None:
        """The type of the seeds; None if nodes have no types."""
        return None if self.types.is_one else str(self.record["seed_type"])

    @property
    def n_hops(self) -> int:
        """Hops of a batch."""
        return self.samples.n_hops // max(1, len(self.types.edges))

    @property
    def n_rows(self) -> int:
        """Rows of a column in which each node has a row; see :class:`RowNeeds`."""
        return self.num_nodes

    def of_rows(self, rows: NodeRows | None) -> RowNeeds:
        """View the batches as the rows that they need of a column; None: row ``i`` is that of node ``i``."""
        if rows is None:
            return self
        if rows not in self._columns:  # kept, as the lengths take a pass over the samples
            self._columns[rows] = ColumnRows(self, rows)
        return self._columns[rows]

    def file(self, name: str) -> str:
        """Return the path of one of the pack's files."""
        return os.path.join(self.path, name)

    @property
    def num_nodes(self) -> int:
        """Nodes of the graph that was sampled."""
        return int(self.record["num_nodes"])

    @property
    def epochs(self) -> int:
        """Epochs that were sampled."""
        return int(self.record["epochs"])

    @property
    def n_batches(self) -> int:
        """Batches of an epoch."""
        return int(self.record["batches"])

    @property
    def run_length(self) -> int:
        """Consecutive similar batches, see :class:`~featstore.Batches`; 2 if the record lacks it."""
        return int(self.record.get("together", UNKNOWN_RUN))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Nodes of each batch, int64 [epochs * n_batches]."""
        return self.samples.lengths

    def __len__(self) -> int:
        return len(self.samples)

    def ids(self, number: int) -> npt.NDArray[Any]:
        """Read the input ids of batch ``number``, int32 (int64 from 2³¹ nodes on)."""
        return self._nodes(self.samples.ids(number), number)

    def batch(self, number: int, pool: BufferPool) -> SampledBatch:
        """Read batch ``number`` as it was sampled; batch ``i`` of epoch ``e`` is number ``e * n_batches + i``."""
        batch = self.samples.batch(number, pool)
        if (batch.epoch, batch.index) != divmod(number, self.n_batches):
            said = f"batch {number} says that it is batch {batch.index} of epoch {batch.epoch}"
            raise CorruptionError(said, self.file(SAMPLES))
        self._nodes(batch.input_ids.numpy(), number)
        if self.seed_type is not None:  # labels are looked up by ids within this type
            kind, seeds = self.types.nodes[self.seed_type], batch.seeds
            if len(seeds) and not kind.first <= int(seeds.min()) <= int(seeds.max()) < kind.stop:
                raise CorruptionError(f"batch {number} has seeds that are not of type {kind.name!r}", self.file(SAMPLES))
        return batch

    def _nodes(self, ids: npt.NDArray[Any], number: int) -> npt.NDArray[Any]:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_nodes:
            raise CorruptionError(f"batch {number} has nodes beyond the graph's {self.num_nodes}", self.file(SAMPLES))
        return ids

    def counts(self) -> npt.NDArray[np.int64]:
        """Count the batches that need each node, int64 [num_nodes], with one batch in memory at a time."""
        return _counts(self)

    def check(self, g: StoredGraph) -> None:
        """Raise StaleError unless the pack was sampled from the adjacency of ``g``."""
        if self.record["made_of"] != adjacency_of(g):
            raise StaleError(
                f"{self.path} was sampled from another graph than {g.path}, or from an earlier one in its place; "
                "sample anew with overwrite=True (featstore pack --overwrite)",
                self.file(RECORD),
            )

    def check_in_place(self) -> dict[str, Any]:
        """Read the record on disk again; raise StaleError if another pack was made in this one's place since."""
        record = read_record(self.file(RECORD), RECORD)
        if record["samples"] != self.record["samples"]:
            raise StaleError(
                f"{self.path}: another pack was made here since this one was opened; open the new one with featstore.Pack(path)",
                self.file(RECORD),
            )
        return record

    def close(self) -> None:
        """Close the pack's files; may be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._finalizer.alive else ", closed"
        return f"{type(self).__name__}({self.path!r}, epochs={self.epochs}, batches={self.n_batches}{state})"

    def _display(self) -> Display:
        record = self.record
        rows = [("nodes", described(self.num_nodes)), ("hops", described(self.n_hops))]
        rows += [("bytes of samples", format_size(self.samples.nbytes))]
        rows += [("seeds a batch", described(record["batch_size"]))]
        rows += [] if self.seed_type is None else [("seeds of", self.seed_type)]
        rows += [] if record["fanouts"] is None else [("fanouts", described(record["fanouts"]))]
        return Display(repr(self), [Table(("", ""), rows)])
