"""The one way by which all importers make a dataset of what they have found, and report it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.adapters.datasets.arrays import check_rows
from featstore.adapters.datasets.edges import EdgeList, RepeatedRows
from featstore.adapters.datasets.recipes import inputs_of_folder
from featstore.adapters.datasets.report import Report
from featstore.config import user_path
from featstore.creation.build import from_edge_index
from featstore.creation.cleaning import Cleaning
from featstore.creation.inputedges import not_a_node
from featstore.creation.options import CreateOptions
from featstore.creation.source import ArrayLike, Source, numpy_dtype, open_source, torch_dtype
from featstore.creation.steps import Inputs
from featstore.creation.typed import Edges, Nodes, create_typed
from featstore.errors import FormatError
from featstore.graph.snapshot import opening_committed
from featstore.storage.catalog import Catalog, current_catalog
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, edge_name, qualified

__all__ = [
    "SPLITS",
    "CheckedIds",
    "FoundEdges",
    "FoundNodes",
    "Gaps",
    "Labels",
    "Mask",
    "PaddedLabels",
    "Positions",
    "catalog_of_new",
    "check_ids",
    "check_room",
    "count_unlabelled",
    "split_ids",
    "write",
]

UInt8s = npt.NDArray[np.uint8]

# Names of splits in data sets, and of the node data that `featstore train` looks for.
SPLITS = {"train": "train_idx", "valid": "valid_idx", "val": "valid_idx", "validation": "valid_idx", "test": "test_idx"}


@dataclass
class FoundNodes:
    """A type of nodes, as far as it is known; the fields are inputs of :meth:`featstore.OutOfCoreGraph.create`."""

    n: int
    features: dict[str, ArrayLike] = field(default_factory=dict)
    data: dict[str, ArrayLike] = field(default_factory=dict)

    def add_labels(self, source: Source, name: str = "y") -> None:
        """Add labels, one row a node; FormatError if there are others."""
        check_rows(source, self.n)
        if name in self.data:
            raise FormatError(f"{source.name}: there are other labels, which become {name!r}, too; remove one of both")
        self.data[name] = Labels(source)

    def add_split(self, split: str, ids: npt.NDArray[Any] | Source, name: str) -> None:
        """Add the nodes of a split, which another file names; IndexError if one of them is no node."""
        if not isinstance(ids, Source):
            ids = split_ids(ids, self.n, name)
        of = SPLITS.get(split, split)
        if of in self.data:
            raise FormatError(f"{name}: another array or file is {of!r}, too; remove one of both")
        self.data[of] = ids


@dataclass
class FoundEdges:
    """The edges of a type, and their features. ``both``: each edge is followed by its reverse."""

    edges: EdgeList
    features: dict[str, Source] = field(default_factory=dict)
    both: bool = False


class _Counted(Source):
    """Rows some of which are counted while they are read, under the name ``what``."""

    what = ""

    def __init__(self, source: Source) -> None:
        super().__init__(source.name, source.dtype, source.shape)
        self._source = source
        self._counts: dict[str, int] = {}
        self._key = self.what

    def count_in(self, counts: dict[str, int], name: str) -> None:
        """Put the number of counted rows into ``counts``, once all are read."""
        self._counts, self._key = counts, f"{self.what} {name}"

    @property
    def n_counted(self) -> int:
        return self._counts[self._key]

    def count(self, block: UInt8s) -> int:
        """Count those of some rows, uint8 ``[k, row_bytes]``."""
        raise NotImplementedError

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        n = 0
        for block in self._source.blocks(max_bytes):
            n += self.count(block)
            yield block
        self._counts[self._key] = n


class Labels(_Counted):
    """Labels; counted are missing ones."""

    what = "missing"

    def count(self, block: UInt8s) -> int:
        return count_unlabelled(block, self.dtype)


class Mask(_Counted):
    """A split as a mask, bool ``[n]``; counted are its nodes."""

    what = "chosen"

    def count(self, block: UInt8s) -> int:
        return int(np.count_nonzero(block))


class Gaps(_Counted):
    """Rows of text; counted are those with NaN, as which a value that is not there is read."""

    what = "gaps"

    def count(self, block: UInt8s) -> int:
        rows = block.view(numpy_dtype(self.dtype))
        return int(np.isnan(rows).any(1).sum()) if rows.dtype.kind == "f" else 0


def count_unlabelled(block: UInt8s, dtype: str, filled: npt.NDArray[np.bool_] | None = None) -> int:
    """Count the rows that are no label: all of their numbers are NaN, negative whole numbers, or ``filled``."""
    rows = torch.from_numpy(np.array(block)).view(torch_dtype(dtype))
    missing = rows.isnan() if rows.is_floating_point() else rows < 0
    if filled is not None:
        missing |= torch.from_numpy(filled.reshape(missing.shape))
    return int(missing.all(1).sum())


class CheckedIds(Source):
    """Ids of nodes that are checked while they are read: IndexError names the array and the position.

    ``*n``: the number of nodes; or two, of the sources and the destinations of links, ``[k, 2]``. FormatError for an array of
    something else.
    """

    def __init__(self, ids: Source, *n: int) -> None:
        if "int" not in ids.dtype or ids.shape[1:] != ((2,) if len(n) == 2 else ()):
            shape = "[k, 2]" if len(n) == 2 else "[k]"
            raise FormatError(f"{ids.name} must hold ids of nodes, whole numbers {shape}, not {ids.dtype} {list(ids.shape)}")
        super().__init__(ids.name, ids.dtype, ids.shape)
        self._ids, self._n = ids, n

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        done = 0
        for block in self._ids.blocks(max_bytes):
            check_ids(self.name, block.view(numpy_dtype(self.dtype)), self._n, done)
            done += len(block)
            yield block


def check_ids(name: str, ids: npt.NDArray[Any], n: tuple[int, ...], first: int) -> None:
    """Raise IndexError for the first id of a row, or of its columns, that is no node; ``first`` is the position of ``ids[0]``."""
    rows = ids.reshape(-1, len(n))
    bad = (rows < 0) | (rows >= np.array(n))
    if bad.any():
        at, column = divmod(int(bad.argmax()), len(n))
        where = f"{first + at}, {column}" if len(n) > 1 else f"{first + at}"
        raise not_a_node(f"{name}[{where}]: {int(rows[at, column])}", n[column])


def catalog_of_new(path: str) -> Catalog:
    """Read the catalog of a dataset that was just committed; CommittedError if that fails."""
    with opening_committed(f"the dataset at {path} is complete and in place, but opening it failed", path):
        return current_catalog(path)


def check_room(name: str, n: int, path: str | os.PathLike[str]) -> None:
    """Refuse ``n`` nodes whose offsets the drive of a new dataset has no room for.

    FormatError, which begins with ``name``: no drive of this size could have it. OSError (ENOSPC): the drive is too full. Of one
    that cannot be written, as its builder says, the space means nothing.
    """
    parent = os.path.dirname(os.path.abspath(user_path(path)))
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK, effective_ids=True):
        return
    usage = shutil.disk_usage(parent)
    if 8 * n > usage.total > 0:
        raise FormatError(
            f"{name}: {n} nodes are said to be there, whose offsets alone take {8 * n} bytes, and the drive of {parent} "
            f"has {usage.total}"
        )
    if 8 * n > usage.free:
        why = f"the offsets of {n} nodes alone take {8 * n} bytes, and {usage.free} are free"
        raise OSError(errno.ENOSPC, why, parent)


class PaddedLabels(Source):
    """Labels of the first nodes, and none of the others: NaN, or -1 among whole numbers."""

    def __init__(self, source: Source, n: int) -> None:
        super().__init__(source.name, source.dtype, (n, *source.shape[1:]))
        if source.dtype in ("uint8", "bool") and source.n_rows < n:
            raise FormatError(
                f"{source.name}: {source.n_rows} labels of {n} nodes, and {source.dtype} has no value that stands for none; "
                "convert them to int64"
            )
        self._source = source

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        yield from self._source.blocks(max_bytes)
        kind = torch_dtype(self.dtype)
        none = torch.tensor(float("nan") if kind.is_floating_point else -1, dtype=kind, device="cpu")
        step = self._step(max_bytes)
        for first in range(self._source.n_rows, self.n_rows, step):
            rows = none.repeat(min(step, self.n_rows - first), self.row_bytes // none.element_size())
            yield rows.view(torch.uint8).numpy()


class Positions(Source):
    """The ids from ``first`` to before ``end``: a split by position."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__(f"nodes {first} to {end}", "int64", (end - first,))
        self._first = first

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        step = self._step(max_bytes)
        for first in range(0, self.n_rows, step):
            ids = np.arange(self._first + first, self._first + min(self.n_rows, first + step), dtype="<i8")
            yield ids.view(np.uint8).reshape(-1, 8)


def split_ids(ids: npt.NDArray[Any], n: int, name: str) -> npt.NDArray[np.int64]:
    """Check the ids of a split, shape ``[k]`` or ``[k, 1]``: FormatError for other arrays, IndexError for ids of no node."""
    if ids.dtype.kind not in "iu" or ids.size != len(ids):
        raise FormatError(f"{name} must hold whole numbers, one a line, not {ids.dtype} {list(ids.shape)}")
    flat = ids.reshape(-1)
    bad = (flat < 0) | (flat >= n)
    if bad.any():
        at = int(bad.argmax())
        raise not_a_node(f"{name}, line {at + 1}: {int(flat[at])}", n)
    return flat.astype(np.int64, copy=False)


def write(
    source: str,
    folder: str | os.PathLike[str],
    options: CreateOptions,
    nodes: Mapping[str, FoundNodes],
    edges: Mapping[EdgeKey, FoundEdges],
    *,
    reverse: bool = False,
    notes: list[str] | None = None,
    begin: float | None = None,
    files: Iterable[str] = (),
) -> Report:
    """Make the dataset, and report what was read.

    Parameters
    ----------
    source : str
        Name of the layout.
    folder : path-like
        What is read.
    options : CreateOptions
        Of the new dataset.
    nodes, edges : mappings
        By type; of one type each, ``ONE_NODE`` and ``ONE_EDGE``, in a graph without types.
    reverse : bool
        With types, also make ``(b, "rev_r", a)`` of each type ``(a, "r", b)`` whose ends differ.
    notes : list of str, optional
        For the report.
    begin : float, optional
        When the import began, by ``time.perf_counter``.

    Notes
    -----
    Raises as ``from_edge_index`` and ``create`` do. After an error there is no new dataset, and an old one is as it was. If the
    call is killed, or the drive is full, the same call goes on with the adjacency and the fields that were finished, as long as
    all files are the same.
    """
    begin = time.perf_counter() if begin is None else begin
    notes = list(notes or [])
    check_room(os.fspath(folder), sum(each.n for each in nodes.values()), options.path)
    inputs = _inputs(source, folder, options.path, nodes, edges, reverse, files)
    if set(nodes) == {ONE_NODE}:
        _write_one(options, nodes[ONE_NODE], edges[ONE_EDGE], inputs)
        if reverse:
            notes.append("reverse edges were asked for, and are made of edges between two types of nodes, which there are not")
    else:
        _write_typed(options, nodes, edges, reverse, inputs)
    found = Report(source, os.fspath(folder), options.path, {name: each.n for name, each in nodes.items()}, {}, 0, notes=notes)
    catalog = catalog_of_new(options.path)
    found.add_shapes(catalog)
    for key, each in edges.items():
        found.edges_read += each.edges.n_edges
        found.edges[edge_name(key)] = each.edges.n_edges
        if reverse and key != ONE_EDGE and key[0] != key[2]:
            found.edges[edge_name(_reversed(key))] = each.edges.n_edges
            found.reverses_added += each.edges.n_edges
        if each.both:
            found.reverses_added += each.edges.n_edges
    if set(nodes) == {ONE_NODE}:
        _count_cleaned(found, edges[ONE_EDGE], catalog.num_edges, options.cleaning)
    for kind, of_type in nodes.items():
        for name, field_ in of_type.data.items():
            full = qualified(kind, name)
            if isinstance(field_, Labels):
                found.unlabelled[full] = field_.n_counted
            elif isinstance(field_, Mask):
                found.splits[full] = field_.n_counted
            elif name.rpartition(".")[2] in SPLITS.values():  # of a task of several
                found.splits[full] = open_source(name, field_).n_rows
    for full, value in _fields_of(nodes, edges):
        if isinstance(value, Gaps) and value.n_counted:
            found.notes.append(f"{value.n_counted:,} rows of {full} lack a value, which is NaN there: {value.name}")
    found.seconds = time.perf_counter() - begin
    return found


def _fields_of(nodes: Mapping[str, FoundNodes], edges: Mapping[EdgeKey, FoundEdges]) -> Iterator[tuple[str, ArrayLike]]:
    """Yield all fields, with their names among those of all types."""
    for kind, of_nodes in nodes.items():
        for name, value in (*of_nodes.features.items(), *of_nodes.data.items()):
            yield qualified(kind, name), value
    for key, of_edges in edges.items():
        for name, source in of_edges.features.items():
            yield qualified(edge_name(key), name), source


def _inputs(
    source: str,
    folder: str | os.PathLike[str],
    path: str,
    nodes: Mapping[str, FoundNodes],
    edges: Mapping[EdgeKey, FoundEdges],
    reverse: bool,
    files: Iterable[str],
) -> Inputs:
    """Describe all that is read, and have it counted where a later call finds the counts."""
    fields: dict[str, ArrayLike] = {}
    for kind, each in nodes.items():
        for role, given in (("feature", each.features), ("data", each.data)):
            fields.update((f"{role} {qualified(kind, name)}", value) for name, value in given.items())
    of_edges = {}
    for key, found in edges.items():
        of_edges[edge_name(key)] = [found.edges.name, found.edges.n_edges, found.both]
        fields.update((f"feature {qualified(edge_name(key), name)}", value) for name, value in found.features.items())
    sizes = {kind: each.n for kind, each in nodes.items()}
    inputs = inputs_of_folder(folder, path, fields, files, source=source, nodes=sizes, edges=of_edges, reverse=reverse)
    for full, value in _fields_of(nodes, edges):
        if isinstance(value, _Counted):
            value.count_in(inputs.counts, full)
    for key, found in edges.items():
        found.edges.count_in(inputs.counts, edge_name(key))
    return inputs


def _write_one(options: CreateOptions, nodes: FoundNodes, found: FoundEdges, inputs: Inputs) -> None:
    features = {name: RepeatedRows(each) if found.both else each for name, each in found.features.items()}
    stream = found.edges.stream(both=found.both)
    from_edge_index(options, stream, nodes.n, nodes.features, nodes.data, features or None, inputs)


def _write_typed(
    options: CreateOptions,
    nodes: Mapping[str, FoundNodes],
    edges: Mapping[EdgeKey, FoundEdges],
    reverse: bool,
    inputs: Inputs,
) -> None:
    if not options.cleaning.is_none:
        raise ValueError(f"{options.cleaning.given} is for a graph of one type; this one has several: clean its edges before")
    all_edges: dict[EdgeKey, Edges] = {key: Edges(each.edges.stream(), each.features) for key, each in edges.items()}
    if reverse:
        for key, each in edges.items():
            back = _reversed(key)
            if key[0] == key[2]:
                continue
            if back in edges:
                raise ValueError(f"{edge_name(back)!r} is there already: import without reverse edges")
            all_edges[back] = Edges(each.edges.stream(flip=True), each.features)
    create_typed(options, {kind: Nodes(each.n, each.features, each.data) for kind, each in nodes.items()}, all_edges, inputs)


def _reversed(key: EdgeKey) -> EdgeKey:
    return key[2], f"rev_{key[1]}", key[0]


def _count_cleaned(report: Report, found: FoundEdges, n_stored: int, cleaning: Cleaning) -> None:
    """Divide what the dataset has less, or more, than was read: loops, reverses, duplicates."""
    n = found.edges.n_edges * (1 + found.both)
    if cleaning.remove_self_loops:
        report.loops_dropped = found.edges.n_loops * (1 + found.both)
    if cleaning.to_undirected:
        report.reverses_added += n - report.loops_dropped
    report.duplicates_dropped = report.edges_read + report.reverses_added - report.loops_dropped - n_stored
    report.edges = {edge_name(ONE_EDGE): n_stored}
