"""``featstore verify``: every byte of a dataset, or of a pack, checked."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from featstore.cli.output import advice_on_damage, one_line, print_result
from featstore.cli.packs import describe_types, may_be_pack
from featstore.config import format_size
from featstore.errors import CorruptionError, FormatError, StaleError, VersionError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.pack.offline import Pack
from featstore.storage.catalog import CATALOG_DIRECTORY

__all__ = ["PATH", "add_arguments", "run"]

PATH = "directory of the dataset, or of a pack"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # the path is the only argument


def run(options: argparse.Namespace) -> int:
    """Check the dataset or pack, and print a report; return 1 if it is damaged."""
    begin = time.perf_counter()
    path = os.path.abspath(options.path)
    result: dict[str, Any] = {"path": path, "ok": True}
    try:
        if is_there := may_be_pack(path):
            with Pack(path) as pack:
                result |= pack.verify(progress=not options.json)
                result |= describe_types(pack.types)
                result |= {} if pack.seed_type is None else {"seed_type": pack.seed_type}
            text = _describe_verified(result)
        else:
            is_there = os.path.isdir(os.path.join(path, CATALOG_DIRECTORY))
            with OutOfCoreGraph.open(path) as graph:
                result |= graph.verify(progress=not options.json)
            text = f"{path}: {result['files']} files, {format_size(result['bytes'])}, all as they were written"
    except (CorruptionError, FormatError, FileNotFoundError) as error:
        if not is_there or isinstance(error, (VersionError, StaleError)):
            raise
        # The dataset or pack exists, but is damaged.
        print(f"featstore: {one_line(error)}{advice_on_damage(error)}", file=sys.stderr)
        return 1
    result["seconds"] = round(time.perf_counter() - begin, 3)
    print_result(options, result, text)
    return 0


def _describe_verified(result: dict[str, Any]) -> str:
    """Format the checked parts of a pack as text, and the files of its directory that were not checked."""
    what = f"samples, {result['layouts']} layout{'s' * (result['layouts'] != 1)}"
    what += f", node data {', '.join(result['node_data'])}" if result["node_data"] else ""
    if "seed_type" in result:
        what += f"; node types {', '.join(result['node_types'])}, seeds of {result['seed_type']}"
    lines = [f"{result['path']}: {result['files']} files, {format_size(result['bytes'])} ({what}), all as they were written"]
    if result["unfinished_bytes"]:
        left = format_size(result["unfinished_bytes"])
        lines.append(f"  not checked: {left} of interrupted packing, which --add-layout goes on with; or remove layout-*.partial")
    if result["others"]:
        lines.append(f"  not checked, for they are none of a pack's files: {', '.join(result['others'])}")
    return "\n".join(lines)
