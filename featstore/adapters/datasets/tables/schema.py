"""Tables of nodes and of edges, as a user describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from featstore.adapters.datasets.tables.columns import Column

__all__ = ["EdgeTable", "Fields", "NodeTable", "Table"]

Fields = Mapping[str, "str | Sequence[str] | Column"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Options for reading the files of a table.

    Parameters
    ----------
    text : bool, optional
        Whether ids are text; by default the first file's are integers where its column has these (of CSV: in its first block).
    delimiter : str, optional
        Of CSV; by default a tab for ``.tsv``, else a comma.
    header : sequence of str, optional
        Names of the columns of CSV files without a header.
    null_values : sequence of str
        Cells of CSV that have no value where they are not quoted. A quoted empty cell is text.
    """

    text: bool | None = None
    delimiter: str | None = None
    header: Sequence[str] | None = None
    null_values: Sequence[str] = ("",)


@dataclass(frozen=True)
class NodeTable(Table):
    """A table with a row for each node of a type.

    Parameters
    ----------
    files : path, or list of paths
        CSV (``.csv``, ``.tsv``, also compressed: ``.csv.gz``), Parquet or Arrow IPC. A directory stands for its files, sorted by
        name; patterns such as ``"nodes-*.parquet"`` for what they match.
    id : str
        The column of ids. Rows may come in any order; row ``i`` becomes node ``i``.
    features : mapping of str to columns, optional
        A column of numbers or of lists of one length, a list of columns, or a :class:`Column`.
    data : mapping of str to columns, optional
        Node data, such as labels; a row for each node.
    split : str, optional
        A column of text, such as ``train``, ``valid`` and ``test``. The nodes of each become node data: ``train_idx``. These,
        ``val`` and ``validation`` are known in any case: ``Val`` makes ``valid_idx``.
    """

    files: Any
    id: str
    features: Fields = field(default_factory=dict)
    data: Fields = field(default_factory=dict)
    split: str | None = None


@dataclass(frozen=True)
class EdgeTable(Table):
    """A table with a row for each edge of a type.

    Parameters
    ----------
    files : path, or list of paths
        See :class:`NodeTable`. Edges are numbered in the order of the files and their rows.
    src, dst : str
        Columns of the ids of sources and destinations.
    features : mapping of str to columns, optional
        Edge data, such as weights and times.
    """

    files: Any
    src: str
    dst: str
    features: Fields = field(default_factory=dict)
