"""IGB and MLPerf R-GAT: folders of arrays by type, raw ones among them, and splits by position."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from featstore.adapters.datasets.arrays import Archive, RawSource, open_array
from featstore.adapters.datasets.edges import EdgeList
from featstore.adapters.datasets.folders import (
    add_num_nodes,
    add_reverse,
    file_in,
    numbers,
    open_folder,
    refuse_pickled,
    relations_in,
)
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import ImportSource, register
from featstore.adapters.datasets.writing import CheckedIds, FoundEdges, FoundNodes, PaddedLabels, Positions, write
from featstore.config import user_path
from featstore.creation.options import CreateOptions
from featstore.creation.source import Source
from featstore.errors import FormatError
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey

__all__ = ["LABELLED", "SIZES", "igb"]

PAPER: Final = "paper"
CITES: Final[EdgeKey] = ("paper", "cites", "paper")
# The published numbers of nodes, by the name of the size and the type (Khatua et al.: IGB. KDD 2023, and the data sets' loaders).
SIZES: Final[dict[str, dict[str, int]]] = {
    "tiny": {"paper": 100_000, "author": 357_041, "institute": 8_738, "fos": 84_220, "journal": 8_101, "conference": 398},
    "small": {
        "paper": 1_000_000,
        "author": 1_926_066,
        "institute": 14_751,
        "fos": 190_449,
        "journal": 15_277,
        "conference": 1_215,
    },
    "medium": {
        "paper": 10_000_000,
        "author": 15_544_654,
        "institute": 23_256,
        "fos": 415_054,
        "journal": 37_565,
        "conference": 4_189,
    },
    "large": {
        "paper": 100_000_000,
        "author": 116_959_896,
        "institute": 26_524,
        "fos": 649_707,
        "journal": 48_820,
        "conference": 4_490,
    },
    "full": {
        "paper": 269_346_174,
        "author": 277_220_883,
        "institute": 26_918,
        "fos": 712_960,
        "journal": 49_052,
        "conference": 4_547,
    },
}
WIDTH: Final = 1024  # of the published features of all types
# Papers with a label in the full size, which are the first ones.
LABELLED: Final = {19: 227_130_858, 2983: 157_675_969}
_SPLITS: Final = "split_dict.npz"
_PICKLED: Final = {"train": "train_idx.pt", "valid": "val_idx.pt"}  # as MLPerf's reference writes them into processed/
_LABEL_FILES: Final = {19: "node_label_19.npy", 2983: "node_label_2K.npy"}


def igb(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    size: str | None = None,
    num_nodes: Mapping[str, int] | None = None,
    classes: int = 19,
    papers_only: bool = False,
    reverse: bool = False,
    labelled: int | None = None,
    **options: Any,
) -> Report:
    """Import a folder of IGB, which is also that of MLPerf's R-GAT: ``processed/paper/node_feat.npy`` and others.

    Parameters
    ----------
    folder : path-like
        The folder of one size, such as ``igb/full``, which has ``processed/`` in it.
    path : path-like
        The new dataset.
    size : {"tiny", "small", "medium", "large", "full"}, optional
        Which published numbers of nodes hold; by default the one that the folder is named after.
    num_nodes : mapping of str to int, optional
        Numbers of nodes by type, of other data sets in this layout; they go before those of ``size``.
    classes : {19, 2983}
        Which labels: ``node_label_19.npy`` or ``node_label_2K.npy``.
    papers_only : bool
        Make a graph of papers and their citations, without types, though other types are there.
    reverse : bool
        Also make ``(b, "rev_r", a)`` of each type ``(a, "r", b)`` whose ends differ, as the benchmarks' loaders do.
    labelled : int, optional
        Number of the first papers that are split: 60 % train, 20 % validation, the rest test, in order. By default all with a row
        of labels; in the full size the published number. ValueError beside ``processed/split_dict.npz``, which has other splits.
    **options
        ``topology``, ``chunk_bytes``, ``stripes``, ``overwrite``, ``progress`` and ``memory`` of
        :meth:`featstore.OutOfCoreGraph.from_edge_index`; of papers only, ``coalesce``, ``remove_self_loops`` and
        ``to_undirected``, too.

    Returns
    -------
    Report
        Each type has its feature ``x``; papers have labels ``y`` and ``train_idx``, ``valid_idx`` and ``test_idx``.

    Raises
    ------
    FormatError, CorruptionError, IndexError
        Files are missing, damaged, or do not agree; an id is no node. The message has the file and the position.
    ValueError, FileExistsError, BusyError, BudgetError, OSError
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Notes
    -----
    The large sizes have raw arrays without a header under a ``.npy`` name. They are recognised, and taken as float32 rows, whose
    length follows from the file's size and the number of nodes; of a published number it is 1024. Edges are ``[E, 2]``.
    MLPerf's own splits, ``processed/train_idx.pt`` and ``val_idx.pt``, are refused with a command that makes
    ``processed/split_dict.npz`` of them, which is read.
    """
    begin = time.perf_counter()
    made = CreateOptions.given(path, options)
    root = open_folder(folder, "processed", "igb/tiny")
    if size is None and os.path.basename(os.path.normpath(root)) in SIZES:
        size = os.path.basename(os.path.normpath(root))
    if size is not None and size not in SIZES:
        raise ValueError(f"size: {size!r} is none of {', '.join(SIZES)}")
    if classes not in _LABEL_FILES:
        raise ValueError(f"classes: {classes!r} is neither 19 nor 2983")
    processed = os.path.join(root, "processed")
    relations = relations_in(processed, "__")
    if CITES not in relations:
        raise FormatError(f"{processed}: there is no folder paper__cites__paper with the citations", processed)
    given = {**(SIZES[size] if size else {}), **numbers(num_nodes, relations, processed)}
    if papers_only:
        relations = {CITES: relations[CITES]}
    kinds = dict.fromkeys((PAPER, *(end for key in relations for end in (key[0], key[2]))))
    published = {} if size is None else SIZES[size]
    found = {}
    for kind in kinds:
        width = WIDTH if given.get(kind) == published.get(kind, -1) else None
        found[kind] = _nodes(os.path.join(processed, kind), kind, given, width)
    edges = {}
    for key, place in relations.items():
        source = _edges(os.path.join(place, "edge_index.npy"))
        edges[key] = FoundEdges(EdgeList.of(source, found[key[0]].n, found[key[2]].n, pairs=True))
    notes, n_labelled = _add_labels(found[PAPER], os.path.join(processed, PAPER), classes, size)
    notes += _add_splits(found[PAPER], processed, n_labelled, labelled)
    if len(found) == 1 and len(edges) == 1:
        return write(
            "igb", folder, made, {ONE_NODE: found[PAPER]}, {ONE_EDGE: edges[CITES]}, reverse=reverse, notes=notes, begin=begin
        )
    return write("igb", folder, made, found, edges, reverse=reverse, notes=notes, begin=begin)


def _nodes(folder: str, kind: str, given: Mapping[str, int], width: int | None) -> FoundNodes:
    """Open the features of a type; a raw array has rows of ``width`` values, or such that the file has a row for each node."""
    path = file_in(folder, "node_feat.npy")
    if path is None:
        if kind not in given:
            raise FormatError(
                f"{folder}: there are no features (node_feat.npy), so the number of nodes of {kind!r} must be given: "
                f"size (--size) or num_nodes (--num-nodes {kind}=N)",
                folder,
            )
        return FoundNodes(given[kind])
    source = open_array(f"features of {kind}", path, given.get(kind), raw=("float32", None if width is None else (width,)))
    return FoundNodes(source.n_rows, {"x": source})


def _edges(path: str) -> Source:
    """Open edges ``[E, 2]``; a raw file is one of int64."""
    n = os.stat(path).st_size // 16
    return open_array("edges", path, None if _has_header(path) else n, raw=("int64", (2,)), wider=True)


def _has_header(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(6) == b"\x93NUMPY"


def _add_labels(papers: FoundNodes, folder: str, classes: int, size: str | None) -> tuple[list[str], int]:
    """Add labels; return notes, and how many of the first papers have one."""
    path = file_in(folder, _LABEL_FILES[classes])
    if path is None:
        return [f"there are no labels {_LABEL_FILES[classes]}"], 0
    if _has_header(path):
        source = open_array("labels", path)
    else:
        source = RawSource(f"{user_path(path)}: labels", path, (os.stat(path).st_size // 4,), "float32")
    notes = []
    n = n_labelled = source.n_rows
    if n > papers.n:
        raise FormatError(f"{path}: labels of {n} papers, of which there are {papers.n}", path)
    if size is not None and papers.n == SIZES[size][PAPER]:
        n_labelled = LABELLED[classes] if size == "full" else papers.n
        if n < n_labelled:
            raise FormatError(f"{path}: labels of {n} papers; {n_labelled} are published for the size {size!r}", path)
    if n < papers.n:
        notes.append(f"{path} has labels of the first {n:,} papers; the others have none")
        source = PaddedLabels(source, papers.n)
    papers.add_labels(source)
    return notes, n_labelled


def _add_splits(papers: FoundNodes, folder: str, n_labelled: int, asked: int | None) -> list[str]:
    """Add the splits of ``split_dict.npz``, or else those by position among the first ``asked`` papers; return notes."""
    path = os.path.join(folder, _SPLITS)
    if os.path.lexists(path):
        if asked is not None:
            raise ValueError(f"labelled is of splits by position; {path} has splits: remove it, or leave labelled out")
        archive = Archive(path)
        for name in archive.names:
            papers.add_split(name, CheckedIds(archive.rows(name), papers.n), path)
        return [f"splits are those of {path}"]
    pickled = {name: file for name, file in _PICKLED.items() if os.path.lexists(os.path.join(folder, file))}
    if pickled and asked is None:
        files = {name: os.path.join(folder, file) for name, file in pickled.items()}
        raise refuse_pickled(next(iter(files.values())), path, files=files)
    n = n_labelled if asked is None else asked
    if not 0 <= n <= papers.n:
        raise ValueError(f"labelled: {n} of {papers.n} papers")
    if "y" not in papers.data:
        return ["without labels there are no splits"]
    n_train, n_valid = int(n * 0.6), int(n * 0.2)
    bounds = np.cumsum([0, n_train, n_valid, n - n_train - n_valid]).tolist()
    for split, first, end in zip(("train", "valid", "test"), bounds, bounds[1:], strict=False):
        papers.add_split(split, Positions(first, end), folder)
    return [f"splits are by position: 60 %, 20 % and 20 % of the first {n:,} papers"]


def _add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--size", choices=list(SIZES), help="published numbers of nodes (default: by the folder's name)")
    add_num_nodes(group)
    group.add_argument("--classes", type=int, choices=list(_LABEL_FILES), help="which labels (default: 19)")
    group.add_argument(
        "--papers-only", action="store_const", const=True, help="papers and citations alone, a graph without types"
    )
    add_reverse(group)
    group.add_argument(
        "--labelled", type=int, metavar="N", help="number of the first papers that are split (default: all labelled)"
    )


register(ImportSource("igb", "a folder of IGB, or of MLPerf's R-GAT, of one size, such as igb/full", igb, _add_options))
