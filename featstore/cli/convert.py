"""``featstore convert``: the adjacency of a dataset in another form."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from featstore.cli.arguments import add_path, memory_size, size
from featstore.cli.output import print_result
from featstore.config import format_size
from featstore.graph.convert import convert
from featstore.storage.catalog import TOPOLOGIES, Catalog, current_catalog
from featstore.storage.stripes import stripe_directory

__all__ = ["add_arguments", "add_form", "describe_form", "form_text", "run"]


def add_form(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Add the arguments of the adjacency's form."""
    parser.add_argument(
        "--topology",
        choices=TOPOLOGIES,
        required=is_required,
        default=None if is_required else "csc",
        help="how the adjacency is stored: csc needs 8 bytes of memory a node, chunked next to none",
    )
    parser.add_argument(
        "--chunk-bytes", type=size, metavar="SIZE", help="with chunked: size of a chunk, a multiple of 4KiB (1MiB by default)"
    )
    add_path(
        parser,
        "--stripe",
        dest="stripes",
        action="append",
        default=[],
        metavar="DIR",
        help="with chunked: a directory on another drive, which takes a share of the chunks; may be repeated",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_form(parser, is_required=True)
    parser.add_argument("--memory", type=memory_size, metavar="SIZE", help="most memory to use: bytes, or a share (5%%)")


def run(options: argparse.Namespace) -> int:
    """Convert the dataset, and print its new form."""
    begin = time.perf_counter()
    is_new = convert(
        options.path,
        options.topology,
        chunk_bytes=options.chunk_bytes,
        stripes=options.stripes,
        memory=options.memory,
        progress=not options.json,
    )
    result = {
        "path": os.path.abspath(options.path),
        "converted": is_new,
        **describe_form(options.path, current_catalog(options.path)),
    }
    result["seconds"] = round(time.perf_counter() - begin, 3)
    done = f"converted in {result['seconds']:.1f} s" if is_new else "it was so already"
    print_result(options, result, f"{options.path}: {form_text(result)}; {done}")
    return 0


def describe_form(path: str, catalog: Catalog) -> dict[str, Any]:
    """Describe an adjacency's form: ``topology``, and if they apply ``chunk_bytes`` and ``stripes``."""
    found: dict[str, Any] = {"topology": catalog.topology}
    if catalog.chunk_bytes:
        found["chunk_bytes"] = catalog.chunk_bytes
    stripes = [(stripe_directory(path, name), record.n_bytes) for name, record in catalog.files.items()]
    if found_stripes := {stripe: n_bytes for stripe, n_bytes in stripes if stripe is not None}:
        found["stripes"] = found_stripes
    return found


def form_text(result: dict[str, Any]) -> str:
    """Format an adjacency's form as text."""
    text = str(result["topology"])
    if "chunk_bytes" in result:
        text += f", chunks of {format_size(result['chunk_bytes'])}"
    if "stripes" in result:
        text += f" in {1 + len(result['stripes'])} files"
    return text
