"""``featstore import``: a dataset from the files of a published data set, whose layouts are those of ``adapters.datasets``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from featstore.cli.arguments import add_path, memory_size
from featstore.cli.convert import add_form
from featstore.cli.output import print_result
from featstore.registry import adapter

__all__ = ["add_arguments", "add_source", "named_source", "run"]

# Options of every source, and what argparse and the command itself keep beside them.
_COMMON = ("coalesce", "remove_self_loops", "to_undirected", "topology", "chunk_bytes", "overwrite", "memory")
_OTHER = ("source", "folder", "path", "json", "run", "parser", "stripe", "given")


def named_source(arguments: Sequence[str]) -> str | None:
    """Find the source that a command line names, if any, before its options are known."""
    found = (each for each in arguments[1:] if not each.startswith("-"))
    name = next(found, None) if arguments[:1] == ["import"] else None
    return name if name in adapter("datasets").SOURCES else None


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add what comes before the dataset: the source, and its folder."""
    sources = adapter("datasets").SOURCES
    text = "; ".join(f"{name}: {each.text}" for name, each in sources.items()).replace("%", "%%")
    parser.add_argument("source", metavar="SOURCE", choices=list(sources), help=f"layout of the files. {text}")
    add_path(parser, "folder", metavar="FOLDER", help="where the files are")


def add_arguments(parser: argparse.ArgumentParser, source: str | None = None) -> None:
    """Add the options, with those of a named source."""
    if source is not None:
        adapter("datasets").SOURCES[source].add_options(parser.add_argument_group(f"options of {source}"))
    parser.add_argument("--coalesce", action="store_true", help="remove duplicate edges")
    parser.add_argument("--remove-self-loops", action="store_true", help="remove edges from a node to itself")
    parser.add_argument("--to-undirected", action="store_true", help="add the reverse of each edge; removes duplicates")
    add_form(parser, is_required=False)
    parser.add_argument("--memory", type=memory_size, metavar="SIZE", help="most memory to use: bytes, or a share (5%%)")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")


def run(options: argparse.Namespace) -> int:
    """Import the files, and print what was read."""
    given: dict[str, Any] = {name: getattr(options, name) for name in _COMMON}
    own = {name: value for name, value in vars(options).items() if name not in (*_COMMON, *_OTHER) and value is not None}
    source = adapter("datasets").SOURCES[options.source]
    report = source.read(options.folder, options.path, **given, stripes=options.stripe, progress=not options.json, **own)
    print_result(options, report.to_dict(), str(report))
    return 0
