"""Results and errors as a terminal user reads them."""

from __future__ import annotations

import argparse
import errno
import json
import os
from typing import Any

from featstore.cli.packs import may_be_pack
from featstore.config import format_size
from featstore.errors import OptionError
from featstore.pack.layout import LAYOUT_PREFIX
from featstore.pack.nodedata import NODE_DATA_PREFIX
from featstore.storage.writer import free_bytes, is_drive_full

__all__ = ["advice_on_damage", "one_line", "print_result"]


def print_result(options: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Print ``result`` as one JSON object with ``--json``, and ``text`` otherwise."""
    print(json.dumps(result) if options.json else text)


def one_line(error: BaseException) -> str:
    """Format an error's message in one line, with the file concerned."""
    if isinstance(error, OptionError):
        return f"--{error.option.replace('_', '-')}: {error.reason}"
    if isinstance(error, FileNotFoundError) and error.filename is not None and error.strerror == os.strerror(errno.ENOENT):
        return f"{os.fsdecode(error.filename)}: no such file or directory"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        name = os.fsdecode(error.filename)
        advice = "; ulimit -n raises the limit that featstore doctor shows" if error.errno == errno.EMFILE else ""
        return f"{name}: {_drive_full(error, name) if is_drive_full(error) else error.strerror}{advice}"
    if isinstance(error, OSError) and error.strerror:
        return " ".join(str(error.strerror).split())
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def _drive_full(error: OSError, path: str) -> str:
    """Describe a full drive, and the space that is free after the written files were removed."""
    text = str(error.strerror).replace(os.strerror(errno.ENOSPC), "the drive is full")
    free = free_bytes(path)
    return text if free is None or "free" in text else text.replace("full", f"full ({format_size(free)} are free now)", 1)


def advice_on_damage(error: BaseException) -> str:
    """Give advice on a damaged or missing file of a pack, as the end of a line; empty if the file is no pack's."""
    found = os.fsdecode(getattr(error, "filename", None) or "")
    folders = [found, os.path.dirname(found), os.path.dirname(os.path.dirname(found))]
    path = next((folder for folder in folders if may_be_pack(folder)), None)
    if path is None:
        return ""
    name = found.removeprefix(os.path.join(path, "")).split(os.sep)[0]
    if name.startswith(LAYOUT_PREFIX):
        return f"; remove {os.path.join(path, name)}, and featstore pack DATASET {path} --add-layout makes it anew"
    if name.startswith(NODE_DATA_PREFIX):
        first = "remove this file, and " if os.path.lexists(found) else ""
        return f"; {first}featstore pack DATASET {path} --add-layout writes it anew"
    return f"; take another copy of the pack, or sample anew: featstore pack DATASET {path} --overwrite"
