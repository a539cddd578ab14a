"""The options of a new dataset, which all ways of making one share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from featstore.config import available_memory, check_flag, format_size, parse_memory, user_path
from featstore.creation.cleaning import Cleaning
from featstore.creation.topologyfiles import Form
from featstore.errors import BudgetError

__all__ = ["LEAST_MEMORY", "CreateOptions"]

LEAST_MEMORY = 8 << 20


@dataclass(frozen=True)
class CreateOptions:
    """Path of a new dataset, and the options that do not depend on its inputs: checked once, by :meth:`of`."""

    path: str
    form: Form
    cleaning: Cleaning
    overwrite: bool
    progress: bool
    memory: int | str | None  # as it was given, for the graph that is opened
    work_bytes: int  # memory to work in, without the chunk that is being filled

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        coalesce: bool = False,
        remove_self_loops: bool = False,
        to_undirected: bool = False,
        topology: str = "csc",
        chunk_bytes: int | str | None = None,
        stripes: Sequence[str | os.PathLike[str]] = (),
        overwrite: bool = False,
        progress: bool = True,
        memory: int | str | None = None,
    ) -> CreateOptions:
        """Check a user's options; see :meth:`featstore.OutOfCoreGraph.create`."""
        form = Form.of(topology, chunk_bytes, stripes, path)
        cleaning = Cleaning.of(coalesce, remove_self_loops, to_undirected, form.stripes)
        overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
        return cls(user_path(path), form, cleaning, overwrite, progress, memory, _work_bytes(memory, form.chunk_bytes))

    @classmethod
    def given(cls, path: str | os.PathLike[str], options: Mapping[str, Any]) -> CreateOptions:
        """Check the options that an importer was given by keyword; TypeError: there is no such option."""
        known = list(inspect.signature(cls.of).parameters)[1:]
        for name in options:
            if name not in known:
                raise TypeError(f"no option {name!r}; an importer takes those of OutOfCoreGraph.create: {', '.join(known)}")
        return cls.of(path, **options)


def _work_bytes(memory: int | str | None, chunk_bytes: int) -> int:
    least = LEAST_MEMORY + chunk_bytes
    n_bytes = max(least, min(1 << 30, available_memory() // 4)) if memory is None else parse_memory(memory)
    if n_bytes < least:
        of = f" with chunks of {format_size(chunk_bytes)}" if chunk_bytes else ""
        raise BudgetError(f"making a dataset{of} needs more memory than {n_bytes} bytes", least)
    return n_bytes - chunk_bytes
