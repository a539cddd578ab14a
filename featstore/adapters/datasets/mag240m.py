"""MAG240M of OGB's large-scale challenge: float16 papers, the other types by their numbers, one array of edges a relation."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from featstore.adapters.datasets.arrays import Archive, open_array, small_ints
from featstore.adapters.datasets.edges import EdgeList
from featstore.adapters.datasets.folders import (
    add_num_nodes,
    add_reverse,
    file_in,
    numbers,
    open_folder,
    read_split_archive,
    refuse_pickled,
    relations_in,
)
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import ImportSource, register
from featstore.adapters.datasets.writing import FoundEdges, FoundNodes, write
from featstore.creation.options import CreateOptions
from featstore.errors import FormatError

__all__ = ["PUBLISHED", "mag240m"]

PAPER: Final = "paper"
# The published numbers, which hold if there are as many papers (Hu et al.: OGB-LSC. NeurIPS 2021, table 3).
PUBLISHED: Final = {"paper": 121_751_666, "author": 122_383_112, "institution": 25_721}
# Splits that have no name among the library's: all test nodes are "test-whole", which the loader joins of the other two.
_TESTS: Final = ("test-dev", "test-challenge")


def mag240m(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    num_nodes: Mapping[str, int] | None = None,
    reverse: bool = False,
    **options: Any,
) -> Report:
    """Import a folder of MAG240M, ``mag240m_kddcup2021``.

    Parameters
    ----------
    folder : path-like
        The folder that has ``processed/`` in it.
    path : path-like
        The new dataset.
    num_nodes : mapping of str to int, optional
        Numbers of the types without features, ``author`` and ``institution``. By default those of ``meta.npz``, or the published
        ones if the papers are as many as published.
    reverse : bool
        Also make ``(b, "rev_r", a)`` of each type ``(a, "r", b)`` whose ends differ, as most models do.
    **options
        ``topology``, ``chunk_bytes``, ``stripes``, ``overwrite``, ``progress`` and ``memory`` of
        :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Returns
    -------
    Report
        Papers have the feature ``x``, float16, labels ``y`` with NaN where there is none, and ``node_year``. Splits are
        ``train_idx``, ``valid_idx``, and ``test_idx`` of the test nodes.

    Raises
    ------
    FormatError, CorruptionError, IndexError
        Files are missing, damaged, or do not agree; an id is no node. ``meta.pt`` or ``split_dict.pt`` is needed, which can run
        code when it is read: the message has the command that converts it.
    ValueError, FileExistsError, BusyError, BudgetError, OSError
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.
    """
    begin = time.perf_counter()
    made = CreateOptions.given(path, options)
    root = open_folder(folder, "processed", "dataset/mag240m_kddcup2021")
    processed = os.path.join(root, "processed")
    relations = relations_in(processed, "___")
    if not relations:
        raise FormatError(f"{processed}: there is no folder of a relation, such as paper___cites___paper", processed)
    given, found = numbers(num_nodes, relations, processed), {}
    kinds = dict.fromkeys(end for key in relations for end in (key[0], key[2]))
    for kind in kinds:
        features = file_in(os.path.join(processed, kind), "node_feat.npy")
        if features is not None:
            source = open_array(f"features of {kind}", features, given.get(kind), raw=("float16", None))
            found[kind] = FoundNodes(source.n_rows, {"x": source})
    found = {kind: found[kind] if kind in found else FoundNodes(_number(root, kind, given, found)) for kind in kinds}
    edges = {}
    for key, place in relations.items():
        array = open_array("edges", os.path.join(place, "edge_index.npy"), wider=True)
        edges[key] = FoundEdges(EdgeList.of(array, found[key[0]].n, found[key[2]].n, pairs=False))
    for kind, each in found.items():
        if (labels := file_in(os.path.join(processed, kind), "node_label.npy")) is not None:
            each.add_labels(open_array("labels", labels, each.n))
        if (years := file_in(os.path.join(processed, kind), "node_year.npy")) is not None:
            each.data["node_year"] = open_array("years", years, each.n)
    notes = _add_splits(root, found)
    return write("mag240m", folder, made, found, edges, reverse=reverse, notes=notes, begin=begin)


def _number(root: str, kind: str, given: Mapping[str, int], found: Mapping[str, FoundNodes]) -> int:
    if kind in given:
        return given[kind]
    if (meta := file_in(root, "meta.npz")) is not None:
        archive = Archive(meta)
        if kind in archive:
            (n,) = small_ints(archive, kind)
            return n
    if PAPER in found and found[PAPER].n == PUBLISHED[PAPER] and kind in PUBLISHED:
        return PUBLISHED[kind]
    if (pickled := file_in(root, "meta.pt")) is not None:
        raise refuse_pickled(pickled, os.path.join(root, "meta.npz"))
    raise FormatError(f"{root}: the number of nodes of {kind!r} must be given: num_nodes (--num-nodes {kind}=N)", root)


def _add_splits(root: str, found: Mapping[str, FoundNodes]) -> list[str]:
    if PAPER not in found or (archive := file_in(root, "split_dict.npz")) is None:
        if PAPER in found and (pickled := file_in(root, "split_dict.pt")) is not None:
            raise refuse_pickled(pickled, os.path.join(root, "split_dict.npz"))
        return [f"there are no splits: {root} has no split_dict"]
    papers, notes = found[PAPER], []
    splits = read_split_archive(archive)
    for name, ids in splits.items():
        if name in _TESTS:
            papers.add_split(name.replace("-", "_"), ids, f"{archive}: {name}")
        elif name != "test-whole":
            papers.add_split(name, ids, f"{archive}: {name}")
    tests = splits.get("test-whole", splits.get("test-dev"))
    if "test" not in splits and tests is not None:
        which = "test-whole" if "test-whole" in splits else "test-dev"
        papers.add_split("test", tests, f"{archive}: {which}")
        notes.append(f"test_idx is the split {which}")
    return notes


def _add_options(group: argparse._ArgumentGroup) -> None:
    add_num_nodes(group)
    add_reverse(group)


register(ImportSource("mag240m", "the folder mag240m_kddcup2021 of OGB's large-scale challenge", mag240m, _add_options))
