"""``featstore import table``: tables of nodes and edges, described by words, for :mod:`.tables`."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Sequence
from typing import Any

from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import ImportSource
from featstore.config import listed, user_path
from featstore.registry import adapter

__all__ = ["TABLE"]

_Words = Sequence[str] | None


def _add_options(group: argparse._ArgumentGroup) -> None:
    def words(name: str, metavar: str, text: str) -> None:
        group.add_argument(name, nargs="+", action="extend", metavar=metavar, help=text)

    words(
        "--nodes",
        "[TYPE=]FILE:ID",
        "tables of nodes, and their columns of ids; a directory or a pattern stands for several files",
    )
    words(
        "--edges", "[SOURCE,RELATION,DESTINATION=]FILE:SRC:DST", "tables of edges, and their columns of sources and destinations"
    )
    fields = "columns, joined by '+', with a dtype by '/'"
    words("--features", "[TYPE:]NAME=COLUMNS", f"features of nodes: {fields}: x=a+b/float32; a column may have lists")
    words("--node-data", "[TYPE:]NAME=COLUMNS", "labels, likewise")
    words("--edge-features", "[TYPE:]NAME=COLUMNS", "weights and times of edges, likewise")
    words("--split", "[TYPE=]COLUMN", "column of text, such as train and test, which become node data train_idx and test_idx")
    words("--fill", "COLUMN=VALUE", "value of cells without one, in fields of such columns; by default such a cell is an error")
    words("--null-values", "TEXT", "cells of CSV that have no value, besides empty ones, such as NA")
    words("--node-header", "[TYPE=]NAMES", "names of the columns, joined by commas, of CSV files of nodes without a header")
    words("--edge-header", "[SOURCE,RELATION,DESTINATION=]NAMES", "likewise, of files of edges")
    group.add_argument("--text-ids", action="store_true", default=None, help="ids are text, also where they look like integers")
    group.add_argument("--delimiter", metavar="CHAR", help="of CSV; by default a comma, of .tsv a tab")
    group.add_argument("--missing", choices=("error", "drop"), help="of edges with an end that is not in a table of nodes")


def _typed(words: _Words, option: str, form: str, mark: str = "=") -> dict[str, list[str]]:
    """Divide words by the type that they begin with; one without a type is of ``"_"``."""
    found: dict[str, list[str]] = {}
    for word in words or ():
        kind, is_typed, rest = word.partition(mark)
        name, rest = (kind, rest) if is_typed else ("_", word)
        if not name or not rest:
            raise ValueError(f"--{option} {word!r} is not {form}")
        found.setdefault(name, []).append(rest)
    return found


def _fills(words: _Words) -> dict[str, float]:
    """Read ``label=-1``."""
    found: dict[str, float] = {}
    for word in words or ():
        name, _, value = word.rpartition("=")
        try:
            number = int(value) if value.lstrip("-").isdecimal() else float(value)  # a large int64 is no float
        except ValueError:
            name, number = "", 0
        if not name or name in found:
            raise ValueError(f"--fill {word!r} is not COLUMN=VALUE with a number, one for each column, such as label=-1")
        found[name] = number
    return found


def _columns(words: Sequence[str], option: str, fills: dict[str, float], used: set[str]) -> dict[str, Any]:
    """Read ``x=a+b/float32``; ``used`` gets the columns whose cells are filled."""
    tables = adapter("datasets.tables")
    found = {}
    for word in words:
        name, equals, rest = word.partition("=")
        columns, _, dtype = rest.partition("/")
        if not (name and equals and columns):
            raise ValueError(f"--{option} {word!r} is not NAME=COLUMNS, such as x=a+b/float32")
        names = columns.split("+")
        used.update(filled := [each for each in names if each in fills])
        if len({fills[each] for each in filled}) > 1:
            raise ValueError(f"--fill: columns {', '.join(filled)} make one field {name!r}, which has one value")
        found[name] = tables.Column(names[0] if len(names) == 1 else names, dtype or None, fills[filled[0]] if filled else None)
    return found


def _files(folder: str, words: Sequence[str], option: str, n_columns: int, form: str) -> tuple[list[str], list[str]]:
    """Read files with their columns; all of a type have the same columns."""
    files: list[str] = []
    columns: list[str] = []
    for word in words:
        file, *rest = word.rsplit(":", n_columns)
        if len(rest) != n_columns or not all((file, *rest)):
            raise ValueError(f"--{option} {word!r} is not {form}")
        files.append(os.path.join(folder, file))
        columns = columns or rest
        if rest != columns:
            raise ValueError(f"--{option}: tables of one type have the same columns, not {columns} and {rest}")
    return files, columns


def _header(headers: dict[str, list[str]], name: str) -> list[str] | None:
    """Take the names of the columns of a type's tables out of all headers."""
    words = headers.pop(name, [])
    return [column for word in words for column in word.split(",")] or None


def read(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    nodes: _Words = None,
    edges: _Words = None,
    features: _Words = None,
    node_data: _Words = None,
    edge_features: _Words = None,
    split: _Words = None,
    fill: _Words = None,
    null_values: _Words = None,
    node_header: _Words = None,
    edge_header: _Words = None,
    text_ids: bool | None = None,
    delimiter: str | None = None,
    missing: str = "error",
    **options: Any,
) -> Report:
    """Import the tables that words describe, as the options of ``featstore import table`` do.

    Raises ValueError for words of another form, NotADirectoryError for a file in place of the folder, and as
    :func:`featstore.adapters.datasets.tables.import_tables`.
    """
    tables = adapter("datasets.tables")
    folder = user_path(folder)
    if os.path.isfile(folder):
        inside = os.path.dirname(folder) or "."
        reason = f"FOLDER is a file: give the folder that the tables are in ({inside}), and their names by --nodes and --edges"
        raise NotADirectoryError(errno.ENOTDIR, reason, folder)
    table = {"text": text_ids, "delimiter": delimiter, "null_values": ("", *(null_values or ()))}
    fills, filled = _fills(fill), set[str]()
    node_files = _typed(nodes, "nodes", "[TYPE=]FILE:ID")
    edge_files = _typed(edges, "edges", "[SOURCE,RELATION,DESTINATION=]FILE:SRC:DST")
    of_nodes: dict[str, Any] = {}
    by_type = [
        _typed(words, name, "[TYPE:]NAME=COLUMNS", ":") for name, words in (("features", features), ("node-data", node_data))
    ]
    splits = _typed(split, "split", "[TYPE=]COLUMN")
    headers = (
        _typed(node_header, "node-header", "[TYPE=]NAMES"),
        _typed(edge_header, "edge-header", "[SOURCE,RELATION,DESTINATION=]NAMES"),
    )
    for name, words in node_files.items():
        files, (column,) = _files(folder, words, "nodes", 1, "[TYPE=]FILE:ID")
        kinds = [_columns(each.pop(name, []), "features", fills, filled) for each in by_type]
        column_of_split = splits.pop(name, [None])
        if len(column_of_split) > 1:
            raise ValueError(f"--split: one column a type, not {', '.join(map(str, column_of_split))}")
        of_nodes[name] = tables.NodeTable(files, column, *kinds, column_of_split[0], header=_header(headers[0], name), **table)
    edge_fields = _typed(edge_features, "edge-features", "[TYPE:]NAME=COLUMNS", ":")
    of_edges: dict[Any, Any] = {}
    for name, words in edge_files.items():
        files, (src, dst) = _files(folder, words, "edges", 2, "[SOURCE,RELATION,DESTINATION=]FILE:SRC:DST")
        fields = _columns(edge_fields.pop(name, []), "edge-features", fills, filled)
        header = _header(headers[1], name)
        of_edges[tuple(name.split(","))] = tables.EdgeTable(files, src, dst, fields, header=header, **table)
    names = ("features", "node-data", "split", "edge-features", "node-header", "edge-header")
    for option, left in zip(names, (*by_type, splits, edge_fields, *headers), strict=True):
        if left:
            what = "without a type" if "_" in left else f"of type {next(iter(left))!r}"
            raise ValueError(f"--{option} {what}: there is no such table")
    if unused := sorted(set(fills) - filled):
        raise ValueError(f"--fill: no field has the columns {listed(unused)}")
    if "_" in of_nodes and not of_edges:
        named = " ".join(f"node={word}" for word in node_files["_"])
        raise ValueError(f"--nodes: there are no --edges, and nodes alone have a type, such as --nodes {named}")
    if set(of_nodes) <= {"_"} and set(of_edges) <= {("_",)}:
        made = tables.import_tables(path, of_nodes.get("_"), of_edges.get(("_",)), missing=missing, **options)
    else:
        made = tables.import_tables(path, of_nodes, of_edges, missing=missing, **options)
    assert isinstance(made, Report)
    return made


TABLE = ImportSource("table", "CSV, Parquet and Arrow files of nodes and edges with ids of any kind", read, _add_options)
