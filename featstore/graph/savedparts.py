"""Partitions kept in the dataset: the part of every node, its edges into others, and the training nodes, under a name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.display import Display, Shown, Table, described
from featstore.errors import BusyError, FormatError, StaleError
from featstore.graph.neighbors.savedcache import made_of
from featstore.graph.selfreliant import SelfReliantParts
from featstore.graph.snapshot import Snapshot, opening_committed
from featstore.storage.catalog import Catalog
from featstore.storage.rowfile import RowFile
from featstore.storage.update import Update
from featstore.storage.writer import FileRecord
from featstore.topology.crossedges import counts_dtype

__all__ = [
    "HOLDER",
    "PARTS_KEY",
    "SELF_RELIANT_ROLES",
    "Blocks",
    "KeptParts",
    "check_parts_name",
    "file_of_parts",
    "kept_parts",
    "read_parts",
    "save_parts",
]

HOLDER: Final = "parts"  # in the budget's report

PARTS_KEY: Final = "parts/"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

SELF_RELIANT_ROLES: Final = ("train_nodes", "train_offsets", "part_sizes")  # the files of self-reliant parts
LIST_ROLES: Final = frozenset(("part_nodes", "part_offsets", "part_indices"))  # files of the adjacency in part order


@dataclass(frozen=True)
class Blocks:
    """An array to be kept that comes in blocks; each block is written before the next one is requested."""

    dtype: np.dtype[Any]
    blocks: Iterator[npt.NDArray[Any]]


@dataclass(frozen=True)
class KeptParts(Shown):
    """Parts that a dataset keeps, as :meth:`OutOfCoreGraph.parts <featstore.OutOfCoreGraph.parts>` lists them.

    Attributes
    ----------
    name : str
    n_parts : int
        Parts have numbers in ``[0, n_parts)``; some may be empty.
    n_train : int
        Number of training nodes; 0 if none were given.
    method : str
        The partitioner's name, or ``"array"``.
    options : dict
        Options of the partitioner.
    generation : int
        Number of the commit, which increases.
    is_stale : bool
        Whether the parts were made for another adjacency than the dataset has now; such parts cannot be loaded.
    has_lists : bool
        Whether the adjacency is also kept in the order of the parts.
    hops : int or None
        Of self-reliant parts, into which training nodes alone are divided, see :meth:`self_reliant`; else None.
    num_nodes : int
        Of the graph.
    """

    name: str
    n_parts: int
    n_train: int
    method: str
    options: dict[str, Any]
    generation: int
    is_stale: bool
    has_lists: bool
    hops: int | None
    num_nodes: int = field(repr=False)
    _read: Callable[[KeptParts, str], torch.Tensor] = field(repr=False, compare=False)

    def _shown(self) -> Iterator[tuple[str, Any]]:
        return ((each.name, getattr(self, each.name)) for each in fields(self) if each.repr)

    def __repr__(self) -> str:
        return f"KeptParts({', '.join(f'{name}={value!r}' for name, value in self._shown())})"

    def _display(self) -> Display:
        rows = [(name, described(value, name)) for name, value in self._shown() if name != "name"]
        return Display(f"KeptParts({self.name!r})", [Table(("", ""), rows)])

    def load(self) -> torch.Tensor:
        """Read the part of every node: int32 ``[num_nodes]``, counted in the graph's budget while the tensor lives.

        Raises
        ------
        StaleError
            The parts were made for another adjacency than the dataset has now, or were replaced since they were listed.
        ClosedError, BudgetError, CorruptionError, OSError
            The graph is closed; memory is short; a file is damaged or cannot be read.
        ValueError
            The parts are self-reliant.
        """
        self.refuse_self_reliant()
        return self._read(self, "parts")

    def self_reliant(self) -> SelfReliantParts:
        """Read parts that were made with ``hops``. Raises as :meth:`load`; ValueError for parts of all nodes."""
        if self.hops is None:
            raise ValueError(f"parts {self.name!r} are not self-reliant: featstore.partition makes such parts with hops=")
        offsets, n_nodes = (self._read(self, role).numpy() for role in ("train_offsets", "part_sizes"))
        if offsets[0] or offsets[-1] != self.n_train or (np.diff(offsets) < 0).any():
            raise FormatError(f"parts {self.name!r}: offsets do not ascend from 0 to {self.n_train} training nodes")
        nodes = self.train_nodes()
        return SelfReliantParts(self.num_nodes, self.hops, nodes, offsets, n_nodes)

    def refuse_self_reliant(self) -> None:
        """Raise ValueError if only training nodes are divided into these parts."""
        if self.hops is not None:
            raise ValueError(f"parts {self.name!r} are self-reliant, with training nodes only: they go with PartBatches")

    def train_nodes(self) -> torch.Tensor:
        """Read the training nodes by part, ascending within each: int64 ``[n_train]``. Raises as :meth:`load`."""
        if not self.n_train:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return self._read(self, "train_nodes")

    def cross_out_degree(self) -> torch.Tensor:
        """Read the number of each node's out-edges into other parts: int32 ``[num_nodes]``, int64 from 2³¹ edges on.

        The number is also how often the node occurs in lists of other parts: see
        :class:`~featstore.cache.cross_partition.CrossPartition`. Raises as :meth:`load`.
        """
        self.refuse_self_reliant()
        return self._read(self, "cross_out_degree")


def check_parts_name(name: object) -> None:
    """Check that parts can be kept under ``name``; TypeError or ValueError otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"name must be text, not {name!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be up to 100 letters, digits, '.', '_' and '-', and begin with none of the last: {name!r}")


def kept_parts(catalog: Catalog, read: Callable[[KeptParts, str], torch.Tensor]) -> dict[str, KeptParts]:
    """List the parts that a catalog keeps, by name, the latest last; entries of an unknown form are left out."""
    now = made_of(catalog)
    found = []
    for key, entry in catalog.extra.items():
        n_parts, n_train, generation = (entry.get(each) for each in ("n_parts", "n_train", "generation"))
        if not key.startswith(PARTS_KEY) or not all(isinstance(n, int) and n >= 0 for n in (n_parts, n_train, generation)):
            continue
        assert isinstance(n_parts, int)
        assert isinstance(n_train, int)
        assert isinstance(generation, int)
        options = entry.get("options")
        method, options = str(entry.get("method")), dict(options) if isinstance(options, dict) else {}
        stale = entry.get("made_of") != now
        files = entry.get("files")
        has_lists = isinstance(files, dict) and files.keys() >= LIST_ROLES
        name, hops = key.removeprefix(PARTS_KEY), entry.get("hops")
        if hops is not None and not (isinstance(hops, int) and hops >= 1):
            continue
        made = method, options, generation, stale, has_lists, hops
        found.append(KeptParts(name, n_parts, n_train, *made, catalog.num_nodes, read))
    return {each.name: each for each in sorted(found, key=lambda each: each.generation)}


def save_parts(
    snapshot: Snapshot,
    name: str,
    arrays: Mapping[str, npt.NDArray[Any] | Blocks],
    recipe: Mapping[str, Any],
    adopt: Callable[[Catalog, str, list[str]], None],
) -> None:
    """Keep parts in the dataset, in one commit, in place of earlier parts of this name; BusyError if the dataset was replaced.

    ``arrays`` has ``parts``, int32 ``[num_nodes]``, and ``cross_out_degree``, see
    :func:`~featstore.topology.crossedges.count_cross_edges`. If training nodes were given, it has ``train_nodes``, int64, by
    part. If lists are kept in part order, it has the arrays that :class:`~featstore.topology.partorder.PartOrder` makes. Of
    self-reliant parts it has ``train_nodes``, ``train_offsets`` and ``part_sizes`` alone. ``recipe`` has ``method``, ``n_parts``,
    ``options`` and, of self-reliant parts, ``hops``. ``adopt(catalog, key, files)`` is called after the commit, while the lock of
    the writer is still held.
    """
    key = PARTS_KEY + name
    with Update(snapshot.root, snapshot.lock) as update:
        if made_of(update.catalog) != made_of(snapshot.catalog):
            raise BusyError("the dataset was replaced since it was opened", snapshot.root)
        files: dict[str, FileRecord] = {}
        n_train = 0
        for role, array in arrays.items():
            blocks = array.blocks if isinstance(array, Blocks) else (array,)
            files[role] = update.write_array(f"{role}.{name}", role, array.dtype, blocks)
            n_train = files[role].n_rows if role == "train_nodes" else n_train
        entry = {
            **recipe,
            "n_train": n_train,
            "generation": update.generation,
            "made_of": made_of(snapshot.catalog),
            "files": {role: record.name for role, record in files.items()},
        }
        old = update.catalog.extra.get(key, {}).get("files")
        gone = [str(file) for file in old.values()] if isinstance(old, dict) else []
        update.add(files.values(), extra={key: entry}, drop=gone)
        catalog = update.commit()
        with opening_committed(f"parts {name!r} are kept in {snapshot.root}, but opening them failed", snapshot.root):
            adopt(catalog, key, [record.name for record in files.values()])


def file_of_parts(snapshot: Snapshot, kept: KeptParts, role: str) -> RowFile:
    """Find the file of an array of kept parts, checked by :func:`_expected`; StaleError or FormatError if there is none."""
    return snapshot.files[_record(snapshot, kept, role).name]


def read_parts(snapshot: Snapshot, budget: Budget, kept: KeptParts, role: str) -> torch.Tensor:
    """Read and check an array of kept parts; see :meth:`KeptParts.load`."""
    record, (dtype, n_rows, stop) = _record(snapshot, kept, role), _expected(snapshot.catalog, kept, role)
    array = np.empty(n_rows, dtype)
    tensor = torch.from_numpy(array)
    budget.reserve(HOLDER, array.nbytes, owner=tensor)
    if n_rows:
        snapshot.files[record.name].read(0, n_rows, array.view(np.uint8).reshape(n_rows, dtype.itemsize))
    if n_rows and not (int(array.min()) >= 0 and int(array.max()) < stop):
        path = os.path.join(snapshot.root, record.name)
        raise FormatError(f"{path}: {role} of parts {kept.name!r} are beyond [0, {stop})", path)
    return tensor


def _record(snapshot: Snapshot, kept: KeptParts, role: str) -> FileRecord:
    catalog, root = snapshot.catalog, snapshot.root
    entry = catalog.extra.get(PARTS_KEY + kept.name, {})
    if entry.get("made_of") != made_of(catalog):
        raise StaleError(
            f"{root}: parts {kept.name!r} were made for another adjacency than the dataset has now: partition it again", root
        )
    if entry.get("generation") != kept.generation:
        raise StaleError(f"{root}: parts {kept.name!r} were replaced since they were listed: list them again", root)
    named = entry.get("files")
    name = named.get(role) if isinstance(named, dict) else None
    record, (dtype, n_rows, _) = catalog.files.get(name) if isinstance(name, str) else None, _expected(catalog, kept, role)
    wanted = (role, n_rows, dtype.name, dtype.itemsize)
    if record is None or (record.kind, record.n_rows, record.dtype, record.layout.row_bytes) != wanted:
        raise FormatError(f"{root}: parts {kept.name!r} have no file of {role} with {n_rows} rows: partition it again", root)
    return record


def _expected(catalog: Catalog, kept: KeptParts, role: str) -> tuple[np.dtype[Any], int, int]:
    """Look up the dtype and length that an array of kept parts must have, and the exclusive bound of its numbers."""
    n, n_edges = catalog.num_nodes, catalog.num_edges
    ids = np.dtype(np.int32 if n < 2**31 else np.int64)
    expected: dict[str, tuple[np.dtype[Any], int, int]] = {
        "parts": (np.dtype(np.int32), n, kept.n_parts),
        "train_nodes": (np.dtype(np.int64), kept.n_train, n),
        "cross_out_degree": (counts_dtype(n_edges), n, n_edges + 1),
        "train_offsets": (np.dtype(np.int64), kept.n_parts + 1, kept.n_train + 1),
        "part_sizes": (np.dtype(np.int64), kept.n_parts, n + 1),
        "part_nodes": (ids, n, n),
        "part_offsets": (np.dtype(np.int64), 2 * (kept.n_parts + 1), max(n, n_edges) + 1),
        "part_indices": (ids, n_edges, n),
    }
    return expected[role]
