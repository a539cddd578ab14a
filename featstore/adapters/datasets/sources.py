"""The layouts of files that can be imported, by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from featstore.adapters.datasets.report import Report

__all__ = ["SOURCES", "ImportSource", "register"]


def _no_options(parser: argparse._ArgumentGroup) -> None:
    """Add no option."""


@dataclass(frozen=True)
class ImportSource:
    """A layout of files that ``featstore import NAME FOLDER DATASET`` reads.

    Parameters
    ----------
    name : str
    text : str
        What the layout is, in a few words, for the command's help.
    read : callable
        ``read(folder, path, **options)`` makes the dataset ``path`` of what lies in ``folder``, and returns a :class:`Report`. It
        takes ``coalesce``, ``remove_self_loops``, ``to_undirected``, ``topology``, ``chunk_bytes``, ``stripes``, ``overwrite``,
        ``progress`` and ``memory`` of :meth:`featstore.OutOfCoreGraph.from_edge_index`, and options of its own.
    add_options : callable
        ``add_options(group)`` adds the own options to the command's arguments. An option that is not given is not passed to
        ``read``: its ``default`` is ``None``, also where it has ``action="store_true"`` or ``action="extend"``.
    """

    name: str
    text: str
    read: Callable[..., Report]
    add_options: Callable[[argparse._ArgumentGroup], None] = _no_options


#: The sources of ``featstore import``, by name.
SOURCES: dict[str, ImportSource] = {}


def register(source: ImportSource) -> None:
    """Make a source known by its name."""
    assert source.name not in SOURCES, source.name
    SOURCES[source.name] = source
