"""The making of one feature by several ranks: each writes its rows of a step, rank 0 joins them into one file, and commits.

Rank 0 makes the feature as one process does, in the dataset's folder ``making.<feature>``, but of each step the first rows alone.
Rank ``r`` writes later ones in the folder ``part-r`` inside, with a record of its own. When all have theirs, rank 0 copies them
behind its own. So the file is the one that a single process would have made.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np

from featstore.creation.steps import Field, fields_of, files_of_record, open_made
from featstore.graph.base import StoredGraph
from featstore.graph.derive.making import PART, FolderSteps, Making, lock_part
from featstore.ranks import Meeting
from featstore.storage.calls import remove_tree
from featstore.storage.catalog import Catalog, read_catalog
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.writer import RowFileWriter
from featstore.topology.edgelists import EdgeLists
from featstore.topology.types import ONE_NODE

__all__ = ["SharedMaking", "divided"]

HOLDER: Final = "joining"  # in the budget's report
_PIECE_BYTES: Final = 1 << 20  # rows that are copied at once
_PIECE: Final = 1 << 16  # nodes whose degrees are read at once


def divided(n: int, lists: Sequence[EdgeLists], n_ranks: int) -> list[int]:
    """Divide ``n`` destinations into consecutive blocks, one a rank, by nodes and edges in equal parts; return their bounds.

    The first block is empty only if there are no nodes.
    """
    if n_ranks == 1:
        return [0, n]
    n_edges = sum(each.n_edges for each in lists)
    of_node = 1 + n_edges // max(1, n)
    targets = [(n_edges + n * of_node) * rank // n_ranks for rank in range(1, n_ranks)]
    bounds, done = [0], 0
    for first in range(0, n, _PIECE):
        stop = min(n, first + _PIECE)
        cost = np.full(stop - first, of_node)
        for each in lists:
            cost += each.degrees(first, stop)
        ends = done + np.cumsum(cost)
        done = int(ends[-1])
        while len(bounds) < n_ranks and targets[len(bounds) - 1] <= done:
            bounds.append(first + int(np.searchsorted(ends, targets[len(bounds) - 1])) + 1)
    return [*bounds, *[n] * (n_ranks + 1 - len(bounds))]


class _RankSteps(FolderSteps):
    """A rank's rows of each step, which no other rank resumes; its lock keeps out a rank of an earlier call that still runs."""

    def __init__(self, making: str, name: str, recipe: Mapping[str, Any] | None, generation: int, meeting: Meeting) -> None:
        own = os.path.join(making, f"{PART}{meeting.rank}")
        self._lock = lock_part(f"{own}.lock")
        try:
            ranks = {"rank": meeting.rank, "world_size": meeting.world_size}
            super().__init__(own, name, None if recipe is None else {**recipe, **ranks}, generation, progress=False)
            self._begin(warns=False)
        except BaseException:
            self._lock.release()
            raise

    def close(self, error: BaseException | None) -> None:
        self._leave(error)
        self._lock.release()


class SharedMaking:
    """The making of one feature, step by step, by all ranks of a meeting; a context manager. See :class:`Making`.

    All ranks take the same steps, and meet after each. A rank's rows are there for a later call once it has met.

    Parameters
    ----------
    meeting : Meeting
    g : StoredGraph
        Of one directory on all ranks; ValueError otherwise.
    catalog : Catalog
        Of the commit that it has open.
    name, recipe, uses, of, overwrite, progress
        See :class:`Making`; messages are those of rank 0.
    same : mapping, optional
        What must be the same on all ranks, ValueError otherwise; by default the recipe.

    Attributes
    ----------
    writes : bool
        Whether this rank has rows of the step to write.
    """

    def __init__(
        self,
        meeting: Meeting,
        g: StoredGraph,
        catalog: Catalog,
        name: str,
        recipe: Mapping[str, Any] | None,
        uses: Sequence[str],
        *,
        of: Sequence[str] = (ONE_NODE,),
        overwrite: bool,
        progress: bool,
        same: Mapping[str, Any] | None = None,
    ) -> None:
        self._meeting, self._g = meeting, g
        self._main: Making | None = None
        self._part: _RankSteps | None = None
        self._there: dict[str, Any] = {}  # what rank 0 has made, on other ranks
        self._bounds, self._buffer_bytes = [0, 0], 0
        self._writer: RowFileWriter | None = None
        self.writes = True
        if meeting.is_first:
            self._main = Making(g.path, catalog, name, recipe, uses, of=of, overwrite=overwrite, progress=progress)
        try:
            self._begin(recipe, {"name": name, **((recipe or {}) if same is None else same)})
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _begin(self, recipe: Mapping[str, Any] | None, same: dict[str, Any]) -> None:
        """Meet once rank 0 has begun: then the other ranks find its folder."""
        meeting, main = self._meeting, self._main
        said: dict[str, Any] = {"same": same}
        if main is not None:
            said |= {"name": main.name, "folder": os.path.basename(main.folder), "inode": os.stat(main.folder).st_ino}
            said |= {"generation": main.generation, "made": main.made()}
        found = meeting.meet(said)
        others = sorted({key for each in found for key, value in each["same"].items() if found[0]["same"].get(key) != value})
        if others:
            raise ValueError(f"ranks make a feature together by the same arguments; they differ in: {', '.join(others)}")
        if main is not None:
            _remove_parts(main.folder, meeting.world_size)
        else:
            self._begin_part(recipe, found[0])
        meeting.meet()  # before rows are made, where a rank cannot take part

    def _begin_part(self, recipe: Mapping[str, Any] | None, first: Mapping[str, Any]) -> None:
        folder = os.path.join(self._g.path, first["folder"])
        if not os.path.isdir(folder) or os.stat(folder).st_ino != first["inode"]:
            raise ValueError(f"{self._g.path} is another directory than that of rank 0: ranks make a feature of one dataset")
        self._part = _RankSteps(folder, first["name"], recipe, first["generation"], self._meeting)
        self._there = first["made"]

    @property
    def name(self) -> str:
        return self._own.name

    @property
    def _own(self) -> FolderSteps:
        own = self._main or self._part
        assert own is not None
        return own

    @property
    def is_shown(self) -> bool:
        """Whether this rank is the one that shows progress."""
        return self._meeting.is_first

    # -- steps -------------------------------------------------------------------------------------------------------------------

    def is_done(self, step: int) -> bool:
        """See :meth:`Steps.is_done`; the same on all ranks."""
        return step <= self._there["done"] if self._main is None else self._main.is_done(step)

    def field_of(self, step: int) -> Field | None:
        """See :meth:`Steps.field_of`."""
        if self._main is not None:
            return self._main.field_of(step)
        return fields_of(self._there).get(step) or self._own.field_of(step)

    def share(self, step: int, n: int, lists: Sequence[EdgeLists] = ()) -> tuple[int, int]:
        """Begin a step over ``n`` destinations with these lists; return the first and the end of those of this rank."""
        rank = self._meeting.rank
        self._bounds, self._writer = divided(n, lists, self._meeting.world_size), None
        low, high = self._bounds[rank : rank + 2]
        self.writes = self._part is None or (low < high and not self._part.is_done(step))
        return low, high

    def writer(self, step: int, field: Field, buffer_bytes: int) -> RowFileWriter:
        """Open the writer of this rank's rows of a step's field, behind those that were made before."""
        if self._part is not None:
            low, high = self._bounds[self._meeting.rank :][:2]
            field = Field(high - low, field.row_shape, field.dtype)
        self._buffer_bytes = buffer_bytes
        self._writer = self._own.writer(step, field, buffer_bytes)
        return self._writer

    def first(self) -> int:
        """Find the first destination of this rank whose row is not written yet."""
        low, high = self._bounds[self._meeting.rank :][:2]
        return low if self._writer is None else min(high, low + self._writer.n_rows)

    def checkpoint(self) -> None:
        """See :meth:`Steps.checkpoint`."""
        self._own.checkpoint()

    def finish(self, step: int, drops: Sequence[int] = ()) -> None:
        """Complete a step's field once all ranks have their rows, and remove the fields of the steps ``drops``."""
        if self._meeting.world_size == 1:
            self._own.finish(step, drops)
        else:
            self._complete(step, drops, is_made=True)

    def skip(self, step: int, drops: Sequence[int] = ()) -> None:
        """Note that a step has no field on any rank."""
        if self._meeting.world_size == 1:
            self._own.skip(step, drops)
        else:
            self._complete(step, drops, is_made=False)

    def _complete(self, step: int, drops: Sequence[int], *, is_made: bool) -> None:
        found = self._meeting.meet(self._kept(step) if is_made else {"field": None})
        fields = {json.dumps(each["field"]) for each in found if each is not None}
        if len(fields) > 1:
            raise ValueError(f"ranks have made rows of {' and '.join(sorted(fields))} in one step: give them the same layers")
        main, is_made = self._main, fields != {"null"}
        if main is not None and is_made:
            self._join(main, step, found)
            main.finish(step, drops)
        elif main is not None:
            main.skip(step, drops)
        there = self._meeting.meet(None if main is None else main.made())[0]
        if main is None:
            self._there = there

    def _kept(self, step: int) -> dict[str, Any] | None:
        """Make this rank's rows of a step durable; return their field and file for the other ranks, None if it has none."""
        if self._part is None:
            self._own.keep()
            field = self._own.field_of(step)
            assert field is not None  # the first rank has rows where there are any
            return {"field": [field.row_shape, field.dtype]}
        if self.writes:
            earlier = [each for each in fields_of(self._part.made()) if each != step]  # rank 0 has joined them
            self._part.finish(step, earlier)
        made, field = self._part.made(), self._part.field_of(step)
        return None if field is None else {"field": [field.row_shape, field.dtype], "files": made["files"]}

    def _join(self, main: Making, step: int, found: Sequence[Any]) -> None:
        """Copy the rows of the other ranks behind those of this one; some may have been copied before."""
        writer = self._writer
        assert writer is not None
        n = max(1, _PIECE_BYTES // writer.layout.row_bytes)
        with self._g.budget.reserve(HOLDER, self._buffer_bytes + n * writer.layout.row_bytes):
            turn = np.empty((n, writer.layout.row_bytes), np.uint8)
            for rank in range(1, self._meeting.world_size):
                low, high = self._bounds[rank : rank + 2]
                if writer.n_rows >= high:
                    continue
                record = files_of_record(found[rank]["files"])[step]
                folder = os.path.join(main.folder, f"{PART}{rank}")
                with contextlib.closing(open_made(folder, record, self._g.reader)) as file:
                    for first in range(writer.n_rows, high, n):
                        rows = turn[: min(n, high - first)]
                        file.read(first - low, len(rows), rows)
                        writer.write(rows)
                        main.checkpoint()

    def open(self, step: int, reader: Reader) -> RowFile:
        """Open the field of a finished step for reading; the caller closes it."""
        if self._main is not None:
            return self._main.open(step, reader)
        folder = os.path.dirname(self._own.folder)
        return open_made(folder, files_of_record(self._there["files"])[step], reader)

    def commit(self, steps: Mapping[str, int]) -> Catalog:
        """Let rank 0 commit, see :meth:`Making.commit`; return the new catalog on all ranks."""
        catalog = None if self._main is None else self._main.commit(steps)
        self._meeting.meet()
        return read_catalog(self._g.path) if catalog is None else catalog

    def end(self) -> None:
        """Meet once all ranks have opened what was committed: until then rank 0 keeps others from replacing it."""
        self._meeting.end()

    # -- life --------------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> SharedMaking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._meeting.tell(error)  # first: the others' files are there until they know of a failure
        finally:  # also after Ctrl-C in telling
            if self._main is not None:
                self._main.__exit__(kind, error, trace)
            elif self._part is not None:
                self._part.close(error)


def _remove_parts(folder: str, n_ranks: int) -> None:
    """Remove parts of ranks that there are no longer, as an earlier call had more of them."""
    for name in os.listdir(folder):
        if name.startswith(PART) and not name.endswith(".lock") and not 0 < int(name.removeprefix(PART)) < n_ranks:
            remove_tree(os.path.join(folder, name))
