"""Open Graph Benchmark: folders of node property prediction, binary or CSV, of one type or several."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from featstore.adapters.datasets.arrays import Archive, check_rows, small_ints
from featstore.adapters.datasets.csvfiles import CsvSource, count_lines, read_ints, read_records
from featstore.adapters.datasets.edges import EdgeList
from featstore.adapters.datasets.folders import (
    add_reverse,
    file_in,
    open_folder,
    read_split_archive,
    refuse_pickled,
)
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import ImportSource, register
from featstore.adapters.datasets.writing import FoundEdges, FoundNodes, Gaps, write
from featstore.config import is_folder
from featstore.creation.options import CreateOptions
from featstore.errors import FormatError
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey

__all__ = ["ogb"]

# Data sets to whose edges OGB's own loader adds the inverse ones, by the names of their folders (its table is not in the folder).
_INVERTED = ("ogbn_products", "products", "ogbn_proteins", "proteins")
_CSV_DTYPES = ("float32", "float64", "uint8", "int8", "int16", "int32", "int64")
_COUNTS = ("edge_index", "num_nodes_list", "num_edges_list")


def ogb(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    add_inverse_edge: bool | None = None,
    reverse: bool = False,
    feature_dtype: str | None = None,
    label_dtype: str | None = None,
    **options: Any,
) -> Report:
    """Import a folder of OGB's node property prediction: ``raw/`` and ``split/``, as OGB's archives unpack.

    Parameters
    ----------
    folder : path-like
        Such as ``dataset/ogbn_products``. What is in ``raw/`` says which form it has: ``data.npz``, ``edge.csv.gz``,
        ``edge_index_dict.npz`` or ``triplet-type-list.csv.gz``.
    path : path-like
        The new dataset.
    split : str, optional
        Which of the folders in ``split/``; needed if there are several.
    add_inverse_edge : bool, optional
        Whether each edge is followed by its reverse, as OGB's loader does for some data sets; by default it is for
        ``ogbn_products`` and ``ogbn_proteins``, by the folder's name.
    reverse : bool
        With types, also make ``(b, "rev_r", a)`` of each type ``(a, "r", b)`` whose ends differ.
    feature_dtype, label_dtype : str, optional
        Of numbers in CSV files; by default int64 where a file begins with a megabyte of whole numbers, float32 elsewhere.
    **options
        ``coalesce``, ``remove_self_loops``, ``to_undirected``, ``topology``, ``chunk_bytes``, ``stripes``, ``overwrite``,
        ``progress`` and ``memory`` of :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Returns
    -------
    Report
        ``node_feat`` is the feature ``x``, labels are ``y``, splits are ``train_idx``, ``valid_idx`` and ``test_idx``; other
        arrays of nodes are node data, those of edges are edge features, under their own names.

    Raises
    ------
    FormatError, CorruptionError, IndexError
        Files are missing, damaged, or do not agree; an id is no node. The message has file and line, or the array.
    MissingExtraError
        CSV files, without pyarrow.
    ValueError, FileExistsError, BusyError, BudgetError, OSError
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Notes
    -----
    Everything is streamed: beside ``memory``, reading takes about 32 MiB, and splits are held whole.
    """
    begin = time.perf_counter()
    made = CreateOptions.given(path, options)
    root = open_folder(folder, "raw", "dataset/ogbn_products")
    raw = os.path.join(root, "raw")
    asked = add_inverse_edge
    if add_inverse_edge is None:
        add_inverse_edge = os.path.basename(os.path.normpath(root)) in _INVERTED
    dtypes = (feature_dtype, label_dtype)
    for name, dtype in (("feature_dtype", feature_dtype), ("label_dtype", label_dtype)):
        if dtype not in (None, *_CSV_DTYPES):
            raise ValueError(f"{name}: numbers of CSV files become one of {', '.join(_CSV_DTYPES)}, not {dtype!r}")
    if file_in(raw, "data.npz"):
        nodes, edges = _binary(raw)
    elif file_in(raw, "edge.csv.gz"):
        nodes, edges = _csv(raw, dtypes)
    elif file_in(raw, "edge_index_dict.npz"):
        nodes, edges = _binary_types(raw)
    elif file_in(raw, "triplet-type-list.csv.gz"):
        nodes, edges = _csv_types(raw, dtypes)
    else:
        raise FormatError(
            f"{raw}: none of the files that OGB's node property prediction begins with is in it: data.npz, edge.csv.gz, "
            "edge_index_dict.npz, triplet-type-list.csv.gz",
            raw,
        )
    notes = []
    if add_inverse_edge and set(nodes) == {ONE_NODE}:
        for each in edges.values():
            each.both = True
        notes.append("each edge is followed by its reverse, as OGB's loader does for this data set (add_inverse_edge)")
    elif asked:
        raise ValueError(
            "add_inverse_edge is of data sets with one type of nodes; reverse=True adds a relation for each of these"
        )
    notes += [f"there are no labels of {kind}" for kind, each in nodes.items() if "y" not in each.data and kind == ONE_NODE]
    notes += _add_splits(root, split, nodes)
    return write("ogb", folder, made, nodes, edges, reverse=reverse, notes=notes, begin=begin)


# --- one type -------------------------------------------------------------------------------------------------------------------


def _binary(raw: str) -> tuple[dict[str, FoundNodes], dict[EdgeKey, FoundEdges]]:
    archive = Archive(os.path.join(raw, "data.npz"))
    n, n_edges = (_one(small_ints(archive, name), archive.path) for name in ("num_nodes_list", "num_edges_list"))
    nodes = FoundNodes(n)
    edges = FoundEdges(EdgeList.of(archive.rows("edge_index", wider=True), n, n, pairs=False, n_edges=n_edges))
    for name in archive.names:
        if name in _COUNTS:
            continue
        source = archive.rows(name)
        if name.startswith("node_"):
            _add_nodes_field(nodes, name, source)
        elif name.startswith("edge_"):
            check_rows(source, n_edges)
            edges.features[name] = source
        else:
            raise FormatError(
                f"{archive.path}: the array {name!r} is neither of nodes (node_…) nor of edges (edge_…)", archive.path
            )
    if (labels := file_in(raw, "node-label.npz")) is not None:
        nodes.add_labels(Archive(labels).rows("node_label"))
    return {ONE_NODE: nodes}, {ONE_EDGE: edges}


def _csv(raw: str, dtypes: tuple[str | None, str | None]) -> tuple[dict[str, FoundNodes], dict[EdgeKey, FoundEdges]]:
    n = _count_in(raw, "num-node-list.csv.gz")
    nodes = FoundNodes(n)
    edges = _csv_edges(raw, n, n, dtypes[0])
    _add_csv_nodes(nodes, raw, dtypes[0])
    if (species := file_in(raw, "species.csv.gz")) is not None:  # of ogbn-proteins
        nodes.data["node_species"] = Gaps(CsvSource(species, n))
    if (labels := file_in(raw, "node-label.csv.gz")) is not None:
        nodes.add_labels(CsvSource(labels, n, dtypes[1]))
    return {ONE_NODE: nodes}, {ONE_EDGE: edges}


def _csv_edges(folder: str, n_sources: int, n_destinations: int, dtype: str | None) -> FoundEdges:
    n_edges = _count_in(folder, "num-edge-list.csv.gz")
    path = os.path.join(folder, "edge.csv.gz")
    if not n_edges and os.path.lexists(path) and (n_lines := count_lines(path)):
        raise FormatError(f"{path} has {n_lines} lines; num-edge-list.csv.gz says that there are 0 edges", path)
    found = FoundEdges(
        EdgeList.of(CsvSource(path, n_edges, "int64", 2), n_sources, n_destinations, pairs=True)
        if n_edges
        else EdgeList(path, 0, lambda n: iter(()), n_sources, n_destinations, lambda row, edge: path)
    )
    for name, file in _fields(folder, "edge"):
        found.features[name] = Gaps(CsvSource(file, n_edges, dtype))
    return found


def _add_csv_nodes(nodes: FoundNodes, folder: str, dtype: str | None) -> None:
    for name, file in _fields(folder, "node"):
        _add_nodes_field(nodes, name, Gaps(CsvSource(file, nodes.n, dtype if name == "node_feat" else None)))


def _fields(folder: str, of: str) -> Iterable[tuple[str, str]]:
    """Find the files of fields of nodes or edges, with their names: ``node-feat.csv.gz``, ``node_year.csv.gz``."""
    if not is_folder(folder):
        return
    for file in sorted(os.listdir(folder)):
        stem = file.removesuffix(".csv.gz")
        if stem != file and (stem == f"{of}-feat" or stem.startswith(f"{of}_")):
            yield stem.replace("-", "_"), os.path.join(folder, file)


def _add_nodes_field(nodes: FoundNodes, name: str, source: Any) -> None:
    check_rows(source, nodes.n)
    if name == "node_feat":
        nodes.features["x"] = source
    else:
        nodes.data[name] = source


def _count_in(folder: str, name: str) -> int:
    path = os.path.join(folder, name)
    return _one([int(each) for each in read_ints(path)], path)


def _one(counts: list[int], path: str) -> int:
    """Get the count of the only graph; FormatError if there are several."""
    if len(counts) != 1:
        raise FormatError(f"{path}: numbers of {len(counts)} graphs; only a data set of one graph can be imported", path)
    if counts[0] < 0:
        raise FormatError(f"{path}: a negative number, {counts[0]}", path)
    return counts[0]


# --- several types --------------------------------------------------------------------------------------------------------------


def _binary_types(raw: str) -> tuple[dict[str, FoundNodes], dict[EdgeKey, FoundEdges]]:
    counts, edge_counts, all_edges = (
        Archive(os.path.join(raw, f"{name}_dict.npz")) for name in ("num_nodes", "num_edges", "edge_index")
    )
    nodes = {kind: FoundNodes(_one(small_ints(counts, kind), counts.path)) for kind in counts.names}
    edges: dict[EdgeKey, FoundEdges] = {}
    for name in all_edges.names:
        key = _triplet(name.split("___"), nodes, all_edges.path)
        n_edges = _one(small_ints(edge_counts, name), edge_counts.path)
        source = all_edges.rows(name, wider=True)
        edges[key] = FoundEdges(EdgeList.of(source, nodes[key[0]].n, nodes[key[2]].n, pairs=False, n_edges=n_edges))
    for file in sorted(os.listdir(raw)):
        stem = file.removesuffix(".npz").removesuffix("_dict")
        if file.endswith(".npz") and stem.startswith(("node_", "edge_")) and file != "edge_index_dict.npz":
            archive = Archive(os.path.join(raw, file))
            for name in archive.names:
                source = archive.rows(name)
                if stem.startswith("node_"):
                    _add_nodes_field(_known(name, nodes, archive.path), stem, source)
                else:
                    key = _triplet(name.split("___"), nodes, archive.path)
                    if key not in edges:
                        raise FormatError(f"{archive.path}: there are no edges {name!r}", archive.path)
                    check_rows(source, edges[key].edges.n_edges)
                    edges[key].features[stem] = source
    if (path := file_in(raw, "node-label.npz")) is not None:
        archive = Archive(path)
        for name in archive.names:
            _known(name, nodes, path).add_labels(archive.rows(name))
    return nodes, edges


def _csv_types(raw: str, dtypes: tuple[str | None, str | None]) -> tuple[dict[str, FoundNodes], dict[EdgeKey, FoundEdges]]:
    counts_path, triplets_path = (os.path.join(raw, f"{name}.csv.gz") for name in ("num-node-dict", "triplet-type-list"))
    kinds, *rows = read_records(counts_path)
    if len(rows) != 1 or len(rows[0]) != len(kinds) or not all(each.strip().isdigit() for each in rows[0]):
        raise FormatError(f"{counts_path}: a line of types and a line with the number of nodes of each are expected", counts_path)
    _refuse_paths(kinds, counts_path)
    nodes = {kind: FoundNodes(int(n)) for kind, n in zip(kinds, rows[0], strict=True)}
    edges = {}
    for triplet in read_records(triplets_path):
        key = _triplet(triplet, nodes, triplets_path)
        _refuse_paths(key, triplets_path)
        folder = os.path.join(raw, "relations", "___".join(key))
        edges[key] = _csv_edges(folder, nodes[key[0]].n, nodes[key[2]].n, dtypes[0])
    for kind, each in nodes.items():
        _add_csv_nodes(each, os.path.join(raw, "node-feat", kind), dtypes[0])
    for kind in _chosen(os.path.join(raw, "nodetype-has-label.csv.gz"), nodes):
        nodes[kind].add_labels(CsvSource(os.path.join(raw, "node-label", kind, "node-label.csv.gz"), nodes[kind].n, dtypes[1]))
    return nodes, edges


def _refuse_paths(names: Sequence[str], path: str) -> None:
    """Raise FormatError if a type, whose files are in a folder of its name, is named as a folder elsewhere."""
    for name in names:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise FormatError(f"{path}: {name!r:.200} is no name of a type, as its files are in a folder of that name", path)


def _triplet(parts: list[str], nodes: dict[str, FoundNodes], path: str) -> EdgeKey:
    if len(parts) != 3:
        raise FormatError(f"{path}: {'___'.join(parts)!r} is not a type of edges, source, relation and destination", path)
    head, relation, tail = parts
    _known(head, nodes, path)
    _known(tail, nodes, path)
    return head, relation, tail


def _known(kind: str, nodes: dict[str, FoundNodes], path: str) -> FoundNodes:
    if kind not in nodes:
        raise FormatError(f"{path}: there is no type {kind!r} of nodes; there is {', '.join(nodes)}", path)
    return nodes[kind]


def _chosen(path: str, nodes: dict[str, FoundNodes]) -> list[str]:
    """Read which types have labels, or splits: a line of types, and a line of True and False."""
    kinds, *rows = read_records(path)
    if len(rows) != 1 or len(rows[0]) != len(kinds) or not {each.strip() for each in rows[0]} <= {"True", "False"}:
        raise FormatError(f"{path}: a line of types and a line of True and False are expected", path)
    for kind in kinds:
        _known(kind, nodes, path)
    return [kind for kind, is_one in zip(kinds, rows[0], strict=True) if is_one.strip() == "True"]


# --- splits ---------------------------------------------------------------------------------------------------------------------


def _add_splits(root: str, name: str | None, nodes: dict[str, FoundNodes]) -> list[str]:
    """Add the splits to the nodes; return notes."""
    folder = os.path.join(root, "split")
    there = sorted(each.name for each in os.scandir(folder) if each.is_dir()) if is_folder(folder) else []
    if name is None and not there:
        return [f"there is no split in {folder}"]
    if name is None and len(there) > 1:
        raise ValueError(f"{folder} has several splits: {', '.join(there)}; split (--split) says which to take")
    name = there[0] if name is None else name
    if name not in there:
        raise ValueError(f"split: {folder} has no {name!r}; it has {', '.join(there) or 'none'}")
    folder = os.path.join(folder, name)
    if (path := file_in(folder, "nodetype-has-split.csv.gz")) is not None:
        for kind in _chosen(path, nodes):
            _add_split_files(nodes[kind], os.path.join(folder, kind))
    elif set(nodes) != {ONE_NODE}:
        if (archive := file_in(folder, "split_dict.npz")) is not None:
            for full, ids in read_split_archive(archive).items():
                split, _, kind = full.partition("/")
                _known(kind, nodes, archive).add_split(split, ids, f"{archive}: {full}")
            return [f"the split is {name!r}"]
        if (pickled := file_in(folder, "split_dict.pt")) is not None:
            raise refuse_pickled(pickled, os.path.join(folder, "split_dict.npz"), of_types=True)
        raise FormatError(f"{folder}: nodetype-has-split.csv.gz is missing, which names the types of nodes with a split", folder)
    else:
        _add_split_files(nodes[ONE_NODE], folder)
    return [f"the split is {name!r}"]


def _add_split_files(nodes: FoundNodes, folder: str) -> None:
    archive, alone = os.path.join(folder, "split_dict.npz"), {}
    given = read_split_archive(archive) if os.path.lexists(archive) else {}
    for split, ids in given.items():
        nodes.add_split(split, ids, f"{archive}: {split}")
    for split in ("train", "valid", "test"):
        path = os.path.join(folder, f"{split}.csv.gz")
        if os.path.lexists(path):
            if split not in given:
                nodes.add_split(split, read_ints(path), path)
        elif not given and (pickled := file_in(folder, "split_dict.pt")) is not None:
            raise refuse_pickled(pickled, archive)
        elif not given and (pickled := file_in(folder, f"{split}.pt")) is not None:
            alone[split] = pickled
        elif not given:
            read_ints(path)  # which is missing
    if alone:
        raise refuse_pickled(next(iter(alone.values())), archive, files=alone)


def _add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--split", metavar="NAME", help="which split, if there are several")
    group.add_argument(
        "--add-inverse-edge",
        action=argparse.BooleanOptionalAction,
        help="whether each edge is followed by its reverse (default: for ogbn_products and ogbn_proteins, as OGB's loader does)",
    )
    add_reverse(group)
    group.add_argument(
        "--feature-dtype", metavar="DTYPE", help="of CSV files: float32, int64 and others (default: by their begin)"
    )
    group.add_argument("--label-dtype", metavar="DTYPE", help="of labels in CSV files (default: by their begin)")


register(ImportSource("ogb", "a folder of OGB's node property prediction, such as dataset/ogbn_products", ogb, _add_options))
