"""SciPy's sparse matrices, in memory or as ``scipy.sparse.save_npz`` writes them, and other ``.npz`` archives of a graph."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any, Final

import numpy as np

from featstore.adapters.datasets.arrays import Archive, small_ints
from featstore.adapters.datasets.edges import EdgeList
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import ImportSource, register
from featstore.adapters.datasets.writing import SPLITS, CheckedIds, FoundEdges, FoundNodes, Mask, write
from featstore.creation.options import CreateOptions
from featstore.creation.source import ArrayLike, Source, open_source
from featstore.errors import FormatError
from featstore.topology.types import ONE_EDGE, ONE_NODE

__all__ = ["npz", "scipy"]

_EDGES: Final = (("edge_index",), ("indptr", "indices"), ("row", "col"))
_SCIPY: Final = ("format", "shape", "data", "_is_array")
_LABELS: Final = ("y", "labels", "label", "node_label")
_MASKS: Final = ("train_mask", "val_mask", "valid_mask", "test_mask")


def npz(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    features: str | list[str] | None = None,
    num_nodes: int | None = None,
    weights: bool = False,
    **options: Any,
) -> Report:
    """Import an ``.npz`` archive: of ``scipy.sparse.save_npz``, or one of arrays that are a graph's.

    Parameters
    ----------
    file : path-like
        With ``edge_index`` ``[2, E]``; or ``indptr`` and ``indices``; or ``row`` and ``col``. Entry ``[i, j]`` of a matrix is the
        edge from ``i`` to ``j``.
    path : path-like
        The new dataset.
    features : str or list of str, optional
        Arrays that become features, which are read from disk row by row; by default ``x``. Others that are named ``edge_…``
        become edge features; all the rest becomes node data: labels under ``y``, if they are named ``y``, ``labels``, ``label``
        or ``node_label``.
    num_nodes : int, optional
        Needed if neither the matrix, nor the features, nor the labels say it.
    weights : bool
        Keep a matrix's values as the edge feature ``weight``. By default only the places of the values are kept.
    **options
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Returns
    -------
    Report

    Raises
    ------
    FormatError, CorruptionError, IndexError
        The archive is damaged, lacks an array, or its arrays do not agree; an id is no node. The message has the array.
    ValueError, FileExistsError, BusyError, BudgetError, OSError
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Notes
    -----
    Members are streamed, stored or deflated; none is read whole but those of at most 1 MiB that say a matrix's form.
    """
    begin = time.perf_counter()
    made = CreateOptions.given(path, options)
    archive = Archive(file)
    form = next((names for names in _EDGES if all(name in archive for name in names)), None)
    kind = _format(archive, form)
    if form is None:
        there = ", ".join(archive.names)
        raise FormatError(
            f"{archive.path}: no edges are in it, as edge_index, as indptr and indices, or as row and col; it has {there}",
            archive.path,
        )
    wanted = ["x"] if features is None else [features] if isinstance(features, str) else list(features)
    of_matrix = {*form, *(_SCIPY if "format" in archive or weights or form != _EDGES[0] else ())}
    others = {name: archive.rows(name) for name in archive.names if name not in of_matrix}
    if missing := [name for name in wanted if name not in others and features is not None]:
        raise ValueError(f"features: {archive.path} has no {missing[0]!r} that is not of the edges; it has {', '.join(others)}")
    n = _num_nodes(archive, others, wanted, num_nodes)
    nodes, edges = FoundNodes(n), FoundEdges(_edges(archive, form, kind, n))
    for name, source in others.items():
        if name in wanted:
            if source.n_rows != n:
                raise FormatError(f"{source.name} has {source.n_rows} rows, but there are {n} nodes")
            nodes.features[name] = source
        elif name in _LABELS:
            nodes.add_labels(source)
        elif SPLITS.get(name, name) in SPLITS.values():
            nodes.add_split(name, CheckedIds(source, n), source.name)
        else:
            _add_other(name, source, nodes, edges)
    notes = []
    if weights:
        edges.features["weight"] = archive.rows("data")
    elif "data" in archive and "data" not in others:
        notes.append("the values of the matrix, data, are left out; weights (--weights) keeps them as the edge feature 'weight'")
    return write("npz", file, made, {ONE_NODE: nodes}, {ONE_EDGE: edges}, notes=notes, begin=begin)


def _add_other(name: str, source: Source, nodes: FoundNodes, edges: FoundEdges) -> None:
    """Add an array whose meaning its name and its number of rows say."""
    n_edges = edges.edges.n_edges
    if name.startswith("edge_"):
        if source.n_rows != n_edges:
            why = "an array named edge_… has a row for each: rename it in the archive, or remove it"
            raise FormatError(f"{source.name} has {source.n_rows} rows, but there are {n_edges} edges; {why}")
        edges.features[name] = source
    elif 0 < source.n_rows == n_edges != nodes.n:
        why = f"rows of edges are named edge_…: rename it to 'edge_{name}' in the archive, or remove it"
        raise FormatError(f"{source.name} has {n_edges} rows, as there are edges, and there are {nodes.n} nodes; {why}")
    else:
        is_mask = name in _MASKS and source.dtype == "bool" and source.shape == (nodes.n,)
        nodes.data[name] = Mask(source) if is_mask else source


def _format(archive: Archive, form: tuple[str, ...] | None) -> str:
    """Get the format of SciPy's matrices, ``csr`` if the archive names none; FormatError for one without lists of edges."""
    given = archive.small("format").reshape(-1).tolist() if "format" in archive and form != _EDGES[0] else ["csr"]
    kind = given[0] if len(given) == 1 else given
    kind = kind.decode("utf-8", "backslashreplace") if isinstance(kind, bytes) else str(kind)
    if kind not in ("csr", "csc") and (kind, form) != ("coo", ("row", "col")):
        raise FormatError(f"{archive.path}: a matrix of format {kind!r}; convert it with .tocsr()", archive.path)
    return kind


def _num_nodes(archive: Archive, others: dict[str, Any], wanted: list[str], given: int | None) -> int:
    if given is not None:
        return given
    if "shape" in archive and "shape" not in others:
        shape = small_ints(archive, "shape")
        if len(shape) != 2 or shape[0] != shape[1]:
            raise FormatError(f"{archive.path}: a graph's matrix is square, not {shape}", archive.path)
        return shape[0]
    known = [others[name].n_rows for name in (*wanted, *_LABELS) if name in others]
    if "indptr" in archive:
        known.append(archive.rows("indptr", wider=True).n_rows - 1)
    if not known:
        raise ValueError(
            f"num_nodes (--num-nodes): {archive.path} has no array that says how many nodes there are; give the number"
        )
    return int(known[0])


def _edges(archive: Archive, form: tuple[str, ...], kind: str, n: int) -> EdgeList:
    first, second = (archive.rows(name, wider=True) for name in (form[0], form[-1]))
    if form == ("edge_index",):
        return EdgeList.of(first, n, n, pairs=False)
    if form == ("row", "col"):
        return EdgeList.of_columns(archive.path, first, second, n)
    if first.n_rows != n + 1:
        raise FormatError(f"{first.name} has {first.n_rows} entries for {n} nodes; there is one more than there are nodes")
    return EdgeList.of_lists(archive.path, first, second, n, from_rows=kind == "csr")


def scipy(
    matrix: Any,
    path: str | os.PathLike[str],
    *,
    features: dict[str, ArrayLike] | None = None,
    node_data: dict[str, ArrayLike] | None = None,
    weights: bool = False,
    **options: Any,
) -> Report:
    """Make a dataset from a square sparse matrix of SciPy: entry ``[i, j]`` is the edge from ``i`` to ``j``.

    Parameters
    ----------
    matrix : scipy.sparse matrix or array
        In any format; others than CSR and CSC are first converted to CSR, in memory.
    path : path-like
        The new dataset.
    features, node_data : mappings, optional
        See :meth:`featstore.OutOfCoreGraph.create`.
    weights : bool
        Keep the values as the edge feature ``weight``. By default only their places are kept; a stored zero is an edge.
    **options
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        It is no sparse matrix.
    ValueError, IndexError, FileExistsError, BusyError, FormatError, BudgetError, OSError
        It is not square; see :meth:`featstore.OutOfCoreGraph.from_edge_index`.
    """
    begin = time.perf_counter()
    made = CreateOptions.given(path, options)
    if not hasattr(matrix, "tocsr") or getattr(matrix, "ndim", 2) != 2:
        raise TypeError(f"matrix must be a sparse matrix of SciPy, not {type(matrix).__name__}")
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"a graph's matrix is square, not {matrix.shape}")
    compressed = matrix if matrix.format in ("csr", "csc") else matrix.tocsr()
    n = int(matrix.shape[0])
    indptr, indices = (open_source(name, getattr(compressed, name), wider=True) for name in ("indptr", "indices"))
    edges = FoundEdges(EdgeList.of_lists("matrix", indptr, indices, n, from_rows=compressed.format == "csr"))
    if weights:
        edges.features["weight"] = open_source("weight", np.asarray(compressed.data))
    nodes = FoundNodes(n, dict(features or {}), dict(node_data or {}))
    return write("scipy", "a matrix in memory", made, {ONE_NODE: nodes}, {ONE_EDGE: edges}, begin=begin)


def _add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--features", nargs="+", metavar="NAME", help="arrays that become features (default: x)")
    group.add_argument("--num-nodes", type=int, metavar="N", help="number of nodes, if no array says it")
    group.add_argument("--weights", action="store_const", const=True, help="keep a matrix's values as the edge feature weight")


register(
    ImportSource("npz", "an .npz archive: of scipy.sparse.save_npz, or with edge_index or indptr and indices", npz, _add_options)
)
