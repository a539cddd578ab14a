"""DGL's GraphBolt: a folder whose ``metadata.yaml`` names the nodes, the edges, the features and the tasks."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.adapters.datasets.arrays import check_rows, open_array
from featstore.adapters.datasets.csvfiles import CsvSource, count_lines
from featstore.adapters.datasets.edges import EdgeList
from featstore.adapters.datasets.folders import PICKLED, add_reverse
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import ImportSource, register
from featstore.adapters.datasets.writing import CheckedIds, FoundEdges, FoundNodes, check_ids, check_room, write
from featstore.config import user_path
from featstore.creation.inputfields import check_field_name
from featstore.creation.options import CreateOptions
from featstore.creation.source import Source, numpy_dtype
from featstore.errors import FormatError, MissingExtraError
from featstore.storage.calls import naming
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, name_of_links

__all__ = ["graphbolt"]

FILE: Final = "metadata.yaml"
_MOST_BYTES: Final = 4 << 20
_SETS: Final = {"train_set": "train", "validation_set": "valid", "test_set": "test"}
_SEEDS: Final = ("seeds", "seed_nodes", "node_pairs")


def graphbolt(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    task: str | None = None,
    reverse: bool = False,
    **options: Any,
) -> Report:
    """Import a dataset of DGL's GraphBolt, before or after its own preprocessing of features.

    Parameters
    ----------
    folder : path-like
        With ``metadata.yaml`` in it, or that file's own path.
    path : path-like
        The new dataset.
    task : str, optional
        Name of the only task whose seeds and labels are kept; by default all are, and the names of those of the second task and
        on begin with its name and a dot.
    reverse : bool
        With types, also make ``(b, "rev_r", a)`` of each type ``(a, "r", b)`` whose ends differ.
    **options
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Returns
    -------
    Report
        Features have the names of ``metadata.yaml``. Seeds and what belongs to them become node data. Seeds that are nodes are
        ``train_idx``, ``valid_idx`` and ``test_idx``; their labels become ``y``, a row for each node, with -1 or NaN where no
        set has one. Seeds that are edges, ``[k, 2]``, are ``train_edges``, their labels ``train_edge_labels``, and so on; with
        types, node data of the edges' source, named ``train_edges:RELATION:DESTINATION`` and so on. Other arrays of a set keep
        their names behind ``train_`` or ``train_edge_``.

    Raises
    ------
    FormatError, CorruptionError, IndexError
        ``metadata.yaml`` does not describe a graph of nodes and edges, a file is missing or does not agree with it, an id is no
        node; an array is in PyTorch's format, which can run code when it is read. The message has the file.
    MissingExtraError
        PyYAML, or for edges in CSV pyarrow, is not installed.
    ValueError, FileExistsError, BusyError, BudgetError, OSError
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Notes
    -----
    ``in_memory`` has no meaning here, as features are on disk. Labels are put together in a file without a name, beside the
    dataset.
    """
    begin = time.perf_counter()
    made = CreateOptions.given(path, options)
    meta = _Metadata(folder)
    nodes, edges = meta.nodes(), {}
    check_room(meta.path, sum(each.n for each in nodes.values()), path)
    for key, each in meta.edges(nodes).items():
        edges[key] = FoundEdges(each)
    notes = meta.add_features(nodes, edges)
    notes += meta.add_tasks(task, nodes, os.path.dirname(os.path.abspath(made.path)))
    return write("graphbolt", folder, made, nodes, edges, reverse=reverse, notes=notes, begin=begin, files=meta.files)


class _Metadata:
    """The content of ``metadata.yaml``; each error names the file, and the entry."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        where = user_path(folder)
        self.path = where if os.path.isfile(where) else os.path.join(where, FILE)
        self.folder = os.path.dirname(self.path)
        if os.path.isdir(where) and not os.path.lexists(self.path):
            text = f"there is no {FILE} in it; give the folder of one dataset, such as datasets/ogbn-arxiv-seeds"
            raise FormatError(f"{where}: {text}", os.fspath(where))
        self.files: set[str] = set()  # that the entries name
        try:
            import yaml
        except ImportError as error:
            text = f"{self.path}: reading it needs PyYAML ({error}): pip install pyyaml"
            raise MissingExtraError(text) from None
        with open(self.path, "rb") as file:
            text_bytes = file.read(_MOST_BYTES + 1)
        if len(text_bytes) > _MOST_BYTES:
            raise self.error(f"more than {_MOST_BYTES} bytes")
        try:
            read = yaml.safe_load(text_bytes)
        except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
            # PyYAML raises any of these where a value is not of the kind that its tag says, such as "!!int" alone.
            raise self.error(f"not YAML: {' '.join(str(error).split())}") from None
        self._refuse_repeats(read)
        self._all = self._mapping(read, "the file")
        if "graph_topology" in self._all and "graph" not in self._all:
            raise self.error(
                "it is of GraphBolt's preprocessed folder, whose edges are a file of torch.save (graph_topology); "
                f"give the folder above it, whose own {FILE} names the edges"
            )
        self._graph = self._mapping(self._all.get("graph"), "graph")

    def error(self, text: str) -> FormatError:
        return FormatError(f"{self.path}: {text}", self.path)

    def _refuse_repeats(self, read: Any) -> None:
        """Raise FormatError if aliases stand for so much that writing it in a message would not end."""
        left, size = [read], 0
        while left:
            value = left.pop()
            size += 1 + (len(value) if isinstance(value, (str, bytes, list, dict, tuple, set)) else 0)
            if isinstance(value, int) and value.bit_length() > 256:
                raise self.error("a number has more than 256 bits")
            if size > _MOST_BYTES:
                raise self.error(f"more than {_MOST_BYTES} characters and entries, with those that aliases (*name) repeat")
            if isinstance(value, dict):
                left += [*value, *value.values()]
            elif isinstance(value, (list, tuple, set)):
                left += value

    def _mapping(self, value: Any, what: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{what} must be a mapping of names, not {type(value).__name__}")
        return value

    def _entries(self, holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
        value = holder.get(name) or []
        if not isinstance(value, list):
            raise self.error(f"{name} must be a list, not {type(value).__name__}")
        return [self._mapping(each, f"{name}[{number}]") for number, each in enumerate(value)]

    def nodes(self) -> dict[str, FoundNodes]:
        """Read the types of nodes: one, :data:`ONE_NODE`, if it has no name."""
        found: dict[str, FoundNodes] = {}
        for each in self._entries(self._graph, "nodes"):
            kind, n = each.get("type"), each.get("num")
            if not isinstance(n, int) or isinstance(n, bool) or n < 0:
                raise self.error(f"graph: nodes: num must be a number of nodes, not {n!r:.80}")
            name = ONE_NODE if kind is None else str(kind)
            if name in found:
                raise self.error(f"graph: nodes: type {name!r} is there twice")
            found[name] = FoundNodes(n)
        if not found:
            raise self.error("graph: nodes must name the nodes, such as [{num: 1000}]")
        if len(found) > 1 and ONE_NODE in found:
            raise self.error("graph: nodes: each of several types needs its type")
        return found

    def edges(self, nodes: Mapping[str, FoundNodes]) -> dict[EdgeKey, EdgeList]:
        """Read the types of edges."""
        found: dict[EdgeKey, EdgeList] = {}
        for each in self._entries(self._graph, "edges"):
            key = self._edge_key(each.get("type"), nodes)
            n_sources, n_destinations = nodes[key[0]].n, nodes[key[2]].n
            if key in found:
                raise self.error(f"graph: edges: type {':'.join(key)!r} is there twice")
            path = self._file(each, "graph: edges")
            if each.get("format") == "csv":
                source: Source = CsvSource(path, count_lines(path), "int64", 2)
                found[key] = EdgeList.of(source, n_sources, n_destinations, pairs=True)
            else:
                found[key] = EdgeList.of(open_array("edges", path, wider=True), n_sources, n_destinations, pairs=False)
        if not found:
            raise self.error("graph: edges must name the edges, with type, format and path")
        return found

    def _edge_key(self, kind: Any, nodes: Mapping[str, FoundNodes]) -> EdgeKey:
        if kind is None and ONE_NODE in nodes:
            return ONE_EDGE
        parts = str(kind).split(":")
        if len(parts) != 3 or not all(parts):
            raise self.error(f"graph: edges: type {kind!r} is not SOURCE:RELATION:DESTINATION")
        for end in (parts[0], parts[2]):
            if end not in nodes:
                raise self.error(f"graph: edges: type {kind!r}: there is no type {end!r} of nodes; there is {', '.join(nodes)}")
        return parts[0], parts[1], parts[2]

    def _file(self, entry: Mapping[str, Any], what: str) -> str:
        path, form = entry.get("path"), entry.get("format")
        if not isinstance(path, str) or "\0" in path or any("\ud800" <= each <= "\udfff" for each in path):
            raise self.error(f"{what}: path must be a file, not {path!r:.200}")
        where = os.path.join(self.folder, path)
        # By the names alone: a link in the folder is its owner's doing, but not where ".." behind it leads.
        if ".." in path.split("/") or not os.path.abspath(where).startswith(os.path.join(os.path.abspath(self.folder), "")):
            raise self.error(
                f"{what}: path {path:.200} leads out of the folder of {FILE}; move the file, or a symbolic link to it, there, "
                "and name it from there on, without .."
            )
        self.files.add(where)
        if form == "torch":
            code = (
                f"from numpy import save; from torch import load; save({json.dumps(where + '.npy')}, load({json.dumps(where)}))"
            )
            raise FormatError(
                f"{where}: format torch: {PICKLED}, convert it once, and name {path}.npy, format numpy, in {self.path}: "
                f"python -c {shlex.quote(code)}",
                where,
            )
        if form not in ("numpy", "csv"):
            raise self.error(f"{what}: format {form!r} of {path} is none of numpy and csv")
        return where

    def add_features(self, nodes: Mapping[str, FoundNodes], edges: Mapping[EdgeKey, FoundEdges]) -> list[str]:
        """Add the features of nodes and of edges; return notes."""
        notes = []
        for each in [*self._entries(self._all, "feature_data"), *self._entries(self._graph, "feature_data")]:
            domain, kind, name = each.get("domain"), each.get("type"), str(each.get("name"))
            if domain == "graph":
                notes.append(f"the feature {name!r} of the graph is left out")
                continue
            if each.get("format") == "csv":
                raise self.error(f"feature_data: {name}: format csv is for edges")
            path = self._file(each, f"feature_data: {name}")
            source = open_array(f"feature {name}", path)
            if domain == "node":
                of = self._node_type(kind, nodes)
                check_rows(source, nodes[of].n)
                self._refuse_second(name, nodes[of].features)
                nodes[of].features[name] = source
            elif domain == "edge":
                key = self._edge_key(kind, nodes)
                if key not in edges:
                    raise self.error(f"feature_data: {name}: there are no edges {kind!r}")
                check_rows(source, edges[key].edges.n_edges)
                self._refuse_second(name, edges[key].features)
                edges[key].features[name] = source
            else:
                raise self.error(f"feature_data: {name}: domain {domain!r} is none of node, edge and graph")
        return notes

    def _refuse_second(self, name: str, features: Mapping[str, Any]) -> None:
        if name in features:
            raise self.error(f"feature_data: {name} is there twice for one type")

    def _node_type(self, kind: Any, nodes: Mapping[str, FoundNodes]) -> str:
        name = ONE_NODE if kind is None else str(kind)
        if name not in nodes:
            raise self.error(f"there is no type {kind!r} of nodes; there is {', '.join(nodes)}")
        return name

    def add_tasks(self, name: str | None, nodes: Mapping[str, FoundNodes], spare: str) -> list[str]:
        """Add the seeds and labels of all tasks, or of the named one; return notes. ``spare`` is a folder for temporary files."""
        tasks = self._entries(self._all, "tasks")
        names = [str(each.get("name", number)) for number, each in enumerate(tasks)]
        if name is not None and name not in names:
            raise ValueError(f"task: {self.path} has no {name!r}; it has {', '.join(names) or 'none'}")
        if not tasks:
            return ["there are no tasks, and so neither splits nor labels"]
        if twice := [each for each in names if names.count(each) > 1]:
            raise self.error(f"tasks: {twice[0]!r} is there twice")
        first = 0 if name is None else names.index(name)
        notes = [f"seeds and labels are those of the task {names[first]!r}", *self._add_task("", tasks[first], nodes, spare)]
        for other, task in zip(names[1:], tasks[1:], strict=True) if name is None else ():
            notes.append(f"names of data of the task {other!r} begin with {other + '.'!r}")
            notes += self._add_task(f"{other}.", task, nodes, spare)
        return notes

    def _add_task(self, prefix: str, task: Mapping[str, Any], nodes: Mapping[str, FoundNodes], spare: str) -> list[str]:
        """Add the seeds and labels of a task as node data whose names begin with ``prefix``; return notes."""
        notes = []
        labels: dict[str, _NodeLabels] = {}
        for set_name, split in _SETS.items():
            for each in self._entries(task, set_name):
                kind = each.get("type")
                files = self._named(self._entries(each, "data"), f"{set_name} of type {kind!r}")
                seeds_name = next((name for name in _SEEDS if name in files), None)
                if seeds_name is None:
                    none = " and no ".join(_SEEDS)
                    notes.append(f"{set_name} of {kind or 'the nodes'} is left out, with its labels: it has no {none}")
                    continue
                seeds = open_array(f"{set_name}: seeds", self._file(files.pop(seeds_name), set_name))
                others = {
                    name: open_array(f"{set_name}: {name}", self._file(entry, set_name), seeds.n_rows)
                    for name, entry in files.items()
                }
                if ":" in str(kind) or (kind is None and len(seeds.shape) != 1):
                    key = self._edge_key(kind, nodes)
                    of, ends = key[0], (nodes[key[0]].n, nodes[key[2]].n)
                    fields: list[tuple[str, Source]] = [(name_of_links(f"{split}_edges", key), CheckedIds(seeds, *ends))]
                    fields += [(name_of_links(f"{split}_edge_{name}", key), rows) for name, rows in others.items()]
                else:
                    of = self._node_type(kind, nodes)
                    fields = [(f"{split}_idx", CheckedIds(seeds, nodes[of].n))]
                    if given := others.pop("labels", None):
                        if of not in labels:
                            labels[of] = _NodeLabels(spare, given, nodes[of].n)
                        labels[of].put(seeds, given)
                    fields += [(f"{split}_{name}", rows) for name, rows in others.items()]
                for name, rows in fields:
                    notes += self._add_data(prefix + name, rows, nodes[of], f"{set_name} of type {kind!r}")
        for of, each_labels in labels.items():
            nodes[of].add_labels(each_labels, f"{prefix}y")
        return notes

    def _named(self, entries: list[Mapping[str, Any]], where: str) -> dict[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for each in entries:
            name = str(each.get("name"))
            if name in found:
                raise self.error(f"{where}: {name!r} is there twice")
            found[name] = each
        return found

    def _add_data(self, name: str, rows: Source, nodes: FoundNodes, where: str) -> list[str]:
        """Add node data; return a note if it cannot have its name."""
        try:
            check_field_name(name)
        except ValueError as error:
            return [f"{where}: {rows.name} is left out: {error}"]
        if name in nodes.data:
            raise self.error(f"{where}: {name!r} is there twice")
        nodes.data[name] = rows
        return []


class _NodeLabels(Source):
    """A row of labels for each node, from the labels of seeds; in a temporary file, which has no label at first."""

    def __init__(self, folder: str, like: Source, n: int) -> None:
        super().__init__(like.name, like.dtype, (n, *like.shape[1:]))
        if like.dtype in ("uint8", "bool"):
            raise FormatError(f"{like.name}: labels of {like.dtype} have no value that stands for none; convert them to int64")
        kind = numpy_dtype(like.dtype)
        with naming(folder), tempfile.TemporaryFile(dir=folder) as file:
            # Space is allocated first: a write to mapped memory that the drive has no room for would kill the process.
            os.posix_fallocate(file.fileno(), 0, max(1, n * self.row_bytes, self.row_bytes))
            self._rows = np.memmap(file, kind, "r+", shape=(max(1, n), *like.shape[1:]))
        step = max(1, (1 << 20) // self.row_bytes)
        for first in range(0, n, step):
            self._rows[first : first + step] = np.nan if kind.kind == "f" else -1

    def put(self, seeds: Source, labels: Source) -> None:
        """Put the labels of seeds at their nodes."""
        if labels.dtype != self.dtype or labels.shape[1:] != self.shape[1:]:
            raise FormatError(
                f"{labels.name}: {labels.dtype} {list(labels.shape)}; the sets before have {self.dtype} rows of {self.name}"
            )
        k, done = 1 << 16, 0
        for ids, rows in zip(seeds.values(k * seeds.row_bytes), labels.values(k * labels.row_bytes), strict=True):
            check_ids(seeds.name, ids, (self.n_rows,), done)
            self._rows[ids] = rows
            done += len(ids)

    def blocks(self, max_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        step = self._step(max_bytes)
        for first in range(0, self.n_rows, step):
            rows = np.array(self._rows[first : min(self.n_rows, first + step)])
            yield rows.reshape(len(rows), -1).view(np.uint8)


def _add_options(group: argparse._ArgumentGroup) -> None:
    text = "only task whose seeds and labels are kept (default: all; names of those of the second and on begin with the task's)"
    group.add_argument("--task", metavar="NAME", help=text)
    add_reverse(group)


register(ImportSource("graphbolt", "a folder with GraphBolt's metadata.yaml", graphbolt, _add_options))
