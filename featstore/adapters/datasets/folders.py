"""Helpers of the importers of folders: they find files, and refuse those that could run code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.adapters.datasets.arrays import Archive
from featstore.config import check_at_least, is_folder, user_path
from featstore.creation.typed import nodes_of_type
from featstore.errors import FormatError
from featstore.topology.types import EdgeKey

__all__ = [
    "PICKLED",
    "add_num_nodes",
    "add_reverse",
    "file_in",
    "numbers",
    "open_folder",
    "read_split_archive",
    "refuse_pickled",
    "relations_in",
]


PICKLED: Final = "reading a file of torch.save can run code that it holds, so it is not read; if you trust its maker"


def open_folder(folder: str | os.PathLike[str], inside: str, example: str) -> str:
    """Get a folder's path; FormatError, with an example, unless ``inside`` is in it."""
    path = user_path(folder)
    if not is_folder(path):
        raise FileNotFoundError(2, os.strerror(2), path)
    if not is_folder(os.path.join(path, inside)):
        raise FormatError(
            f"{path}: there is no folder {inside!r} in it; give the folder of one data set, such as {example}", path
        )
    return path


def file_in(folder: str, *names: str) -> str | None:
    """Get the path of the first of some files that is in a folder."""
    paths = (os.path.join(folder, name) for name in names)
    return next((path for path in paths if os.path.lexists(path)), None)


def refuse_pickled(path: str, archive: str, *, of_types: bool = False, files: Mapping[str, str] | None = None) -> FormatError:
    """Explain why a file of ``torch.save`` is not read, and what to do instead.

    ``of_types``: it has arrays by split and type. ``files``: each has one array, which gets the name that it has here.
    """
    loaded = f"load({json.dumps(path)}, weights_only=False)"
    if of_types:
        loaded = f'{{f"{{s}}/{{t}}": ids for s, of in {loaded}.items() for t, ids in of.items()}}'
    elif files is not None:
        loaded = f"{{s: load(file, weights_only=False) for s, file in {json.dumps(files)}.items()}}"
    code = f"from numpy import savez; from torch import load; savez({json.dumps(archive)}, **{loaded})"
    return FormatError(f"{path}: {PICKLED}, convert it once: python -c {shlex.quote(code)}", path)


def read_split_archive(path: str) -> dict[str, npt.NDArray[Any]]:
    """Read a ``split_dict.npz``, as :func:`refuse_pickled` advises to make it: the ids of each split."""
    archive = Archive(path)
    found = {}
    for name in archive.names:
        rows = [np.array(each) for each in archive.rows(name).values(1 << 20)]
        found[name] = np.concatenate(rows) if rows else np.empty(0, np.int64)
    return found


def relations_in(folder: str, separator: str) -> dict[EdgeKey, str]:
    """Find the folders of relations, such as ``paper__cites__paper``, by type of edges, in the order of their names."""
    found: dict[EdgeKey, str] = {}
    for name in sorted(os.listdir(folder)):
        parts = name.split(separator)
        if len(parts) == 3 and all(parts) and os.path.isdir(os.path.join(folder, name)):
            found[parts[0], parts[1].strip("_"), parts[2]] = os.path.join(folder, name)
    return found


def numbers(
    given: Mapping[str, int] | Iterable[tuple[str, int]] | None, relations: Iterable[EdgeKey], folder: str
) -> dict[str, int]:
    """Convert the option ``num_nodes``, a mapping or the command line's pairs; ValueError for a type that no relation has."""
    found = {kind: check_at_least(f"num_nodes[{kind!r}]", n, 0) for kind, n in dict(given or {}).items()}
    kinds = dict.fromkeys(end for key in relations for end in (key[0], key[2]))
    if unknown := [kind for kind in found if kind not in kinds]:
        raise ValueError(f"num_nodes: {folder} has no type {unknown[0]!r} of nodes; its relations have {', '.join(kinds)}")
    return found


def add_num_nodes(group: argparse._ArgumentGroup) -> None:
    """Add the option ``--num-nodes``."""
    group.add_argument(
        "--num-nodes",
        type=nodes_of_type,
        nargs="+",
        metavar="TYPE=N",
        help="numbers of nodes that neither a file nor a published table says",
    )


def add_reverse(group: argparse._ArgumentGroup) -> None:
    """Add the option ``--reverse``."""
    group.add_argument(
        "--reverse",
        action="store_const",
        const=True,
        help="also make B,rev_R,A of each type of edges A,R,B whose ends differ, so that batches reach A from B",
    )
