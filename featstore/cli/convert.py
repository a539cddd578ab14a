"""``featstore convert``: the adjacency of a dataset in another form."""

from __future__ import annotations

import argparse
import time

from featstore.cli.arguments import size
from featstore.cli.output import print_result
from featstore.config import format_size
from featstore.graph.convert import convert
from featstore.storage.catalog import TOPOLOGIES, current_catalog

__all__ = ["add_arguments", "add_form", "form_text", "run"]


def add_form(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Add the arguments that say how the adjacency shall be stored."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``featstore convert``."""
    add_form(parser, is_required=True)
    parser.add_argument("--memory", type=size, metavar="SIZE", help="most memory to use")


def run(options: argparse.Namespace) -> int:
    """Convert the dataset, and say what it is now."""
    begin = time.perf_counter()
    is_new = convert(
        options.path,
        options.topology,
        chunk_bytes=options.chunk_bytes,
        memory=options.memory,
        progress=not options.json,
    )
    catalog = current_catalog(options.path)
    result = {"path": options.path, "converted": is_new, "topology": catalog.topology}
    if catalog.chunk_bytes:
        result["chunk_bytes"] = catalog.chunk_bytes
    result["seconds"] = round(time.perf_counter() - begin, 3)
    done = f"converted in {result['seconds']:.1f} s" if is_new else "it was so already"
    print_result(options, result, f"{options.path}: {form_text(result)}; {done}")
    return 0


def form_text(result: dict[str, object]) -> str:
    """Return as text in which form an adjacency is."""
    chunk_bytes = result.get("chunk_bytes")
    return (
        f"{result['topology']}, chunks of {format_size(chunk_bytes)}" if isinstance(chunk_bytes, int) else str(result["topology"])
    )
