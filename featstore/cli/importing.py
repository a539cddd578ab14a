"""``featstore import``: a dataset from the files of a published data set, whose layouts are those of ``adapters.datasets``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from featstore.cli.arguments import add_path
from featstore.cli.create import CREATE_OPTIONS, add_create_options, create_options
from featstore.cli.output import print_result
from featstore.registry import adapter

__all__ = ["add_arguments", "add_source", "named_source", "run"]

_FILES = "CSV, Parquet and Arrow files are imported by 'table'"
_OTHER_WORDS = {
    **dict.fromkeys(("arrow", "csv", "parquet", "tables"), _FILES),
    "scipy": "sparse matrices that SciPy has saved are imported by 'npz'",
    "pyg": "PyG's graphs are imported in Python, by featstore.OutOfCoreGraph.from_pyg(path, data)",
}  # which users may try in place of a source
# What argparse and the command itself keep beside the options of a source.
_OTHER = (*CREATE_OPTIONS, "source", "folder", "path", "json", "run", "parser", "given")


def named_source(arguments: Sequence[str]) -> str | None:
    """Find the source that a command line names, if any, before its options are known."""
    if arguments[:1] != ["import"]:
        return None
    return next((each for each in arguments[1:] if each in adapter("datasets").SOURCES), None)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add what comes before the dataset: the source, and its folder."""
    sources = adapter("datasets").SOURCES
    text = "; ".join(f"{name}: {each.text}" for name, each in sources.items()).replace("%", "%%")
    parser.add_argument("source", metavar="SOURCE", type=_source, choices=list(sources), help=f"layout of the files. {text}")
    add_path(parser, "folder", metavar="FOLDER", help="where the files are")


def _source(name: str) -> str:
    """Raise the parser's error, with advice, for a word that is known not to be a source; it checks the others itself."""
    if name not in adapter("datasets").SOURCES and name in _OTHER_WORDS:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r}; {_OTHER_WORDS[name]}")
    return name


def add_arguments(parser: argparse.ArgumentParser, source: str | None = None) -> None:
    """Add the options, with those of a named source."""
    if source is not None:
        adapter("datasets").SOURCES[source].add_options(parser.add_argument_group(f"options of {source}"))
    add_create_options(parser)


def run(options: argparse.Namespace) -> int:
    """Import the files, and print what was read."""
    own = {name: value for name, value in vars(options).items() if name not in _OTHER and value is not None}
    source = adapter("datasets").SOURCES[options.source]
    report = source.read(options.folder, options.path, **create_options(options), **own)
    print_result(options, report.to_dict(), str(report))
    return 0
