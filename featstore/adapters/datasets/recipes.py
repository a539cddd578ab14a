"""Recipes of imports: the files that are read, as they are now, and what becomes of them. A call goes on with its own recipe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from featstore.config import user_path
from featstore.creation.source import ArrayLike, Source
from featstore.creation.steps import Inputs

__all__ = ["describe", "inputs_of_folder"]


def inputs_of_folder(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    fields: Mapping[str, ArrayLike],
    files: Iterable[str] = (),
    **options: Any,
) -> Inputs:
    """Describe an import of a folder, or of one file, into a dataset at ``target``; ``options`` change what is written.

    ``fields`` are all rows that are read, each under a name of its own; ``files`` are read besides those of the folder. If rows
    are neither a file's nor an array, or the folder is no file, there is no recipe: the files would not say whether inputs are
    the same.
    """
    place = user_path(folder)
    if not os.path.lexists(place):
        return Inputs()
    described = {name: describe(value) for name, value in fields.items()}
    if None in described.values():
        return Inputs()
    named = (value.name.partition(": ")[0] for value in fields.values() if isinstance(value, Source))
    found = {*_files_in(place, os.path.abspath(user_path(target))), *filter(os.path.isfile, named), *files}
    return Inputs({"files": Inputs.of_files(sorted(found)), "fields": described, **options})


def _files_in(place: str, target: str) -> Iterator[str]:
    """Yield the paths of all files of a folder, but for those of the new dataset, if that is made within it."""
    if os.path.isfile(place):
        yield place
        return
    seen = set()
    for root, folders, names in os.walk(os.path.abspath(place), followlinks=True):
        seen.add(os.path.realpath(root))
        folders[:] = [
            name
            for name in folders
            if os.path.realpath(os.path.join(root, name)) not in seen  # a link back
            and os.path.join(root, name) != target
            and not os.path.join(root, name).startswith((f"{target}.tmp-", f"{target}.old-"))
        ]
        yield from filter(os.path.isfile, (os.path.join(root, name) for name in names))


def describe(value: ArrayLike) -> Any:
    """Describe rows as JSON values; None if what they hold is not known without reading them."""
    if isinstance(value, Source):
        return None if value.is_read_once else [type(value).__name__, value.name, value.dtype, list(value.shape)]
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return ["array", str(value.dtype), list(value.shape), xxhash.xxh3_128_hexdigest(data.view(np.uint8).reshape(-1).data)]
    return None
