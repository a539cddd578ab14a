"""``featstore import table``: tables of nodes and edges, described by words, for :mod:`.tables`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.sources import Source
from featstore.config import user_path
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


def _columns(words: Sequence[str], option: str) -> dict[str, Any]:
    """Read ``x=a+b/float32``."""
    tables = adapter("datasets.tables")
    found = {}
    for word in words:
        name, equals, rest = word.partition("=")
        columns, _, dtype = rest.partition("/")
        if not (name and equals and columns):
            raise ValueError(f"--{option} {word!r} is not NAME=COLUMNS, such as x=a+b/float32")
        names = columns.split("+")
        found[name] = tables.Column(names[0] if len(names) == 1 else names, dtype or None)
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
    text_ids: bool | None = None,
    delimiter: str | None = None,
    missing: str = "error",
    **options: Any,
) -> Report:
    """Import the tables that words describe, as the options of ``featstore import table`` do.

    Raises ValueError for words of another form, and as :func:`featstore.adapters.datasets.tables.import_tables`.
    """
    tables = adapter("datasets.tables")
    folder, table = user_path(folder), {"text": text_ids, "delimiter": delimiter}
    node_files = _typed(nodes, "nodes", "[TYPE=]FILE:ID")
    edge_files = _typed(edges, "edges", "[SOURCE,RELATION,DESTINATION=]FILE:SRC:DST")
    of_nodes: dict[str, Any] = {}
    by_type = [
        _typed(words, name, "[TYPE:]NAME=COLUMNS", ":") for name, words in (("features", features), ("node-data", node_data))
    ]
    splits = _typed(split, "split", "[TYPE=]COLUMN")
    for name, words in node_files.items():
        files, (column,) = _files(folder, words, "nodes", 1, "[TYPE=]FILE:ID")
        kinds = [_columns(each.pop(name, []), "features") for each in by_type]
        column_of_split = splits.pop(name, [None])
        if len(column_of_split) > 1:
            raise ValueError(f"--split: one column a type, not {', '.join(map(str, column_of_split))}")
        of_nodes[name] = tables.NodeTable(files, column, *kinds, column_of_split[0], **table)
    edge_fields = _typed(edge_features, "edge-features", "[TYPE:]NAME=COLUMNS", ":")
    of_edges: dict[Any, Any] = {}
    for name, words in edge_files.items():
        files, (src, dst) = _files(folder, words, "edges", 2, "[SOURCE,RELATION,DESTINATION=]FILE:SRC:DST")
        fields = _columns(edge_fields.pop(name, []), "edge-features")
        of_edges[tuple(name.split(","))] = tables.EdgeTable(files, src, dst, fields, **table)
    for option, left in (("features", by_type[0]), ("node-data", by_type[1]), ("split", splits), ("edge-features", edge_fields)):
        if left:
            what = "without a type" if "_" in left else f"of type {next(iter(left))!r}"
            raise ValueError(f"--{option} {what}: there is no such table")
    if set(of_nodes) <= {"_"} and set(of_edges) <= {("_",)}:
        made = tables.import_tables(path, of_nodes.get("_"), of_edges.get(("_",)), missing=missing, **options)
    else:
        made = tables.import_tables(path, of_nodes, of_edges, missing=missing, **options)
    assert isinstance(made, Report)
    return made


TABLE = Source("table", "CSV, Parquet and Arrow files of nodes and edges with ids of any kind", read, _add_options)
