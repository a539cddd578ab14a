"""Steps of making files in a folder, with a record in it: a later call goes on with what an ended one had finished.

The record names the recipe of what is made, the finished files, and how far the unfinished ones are on the drive. A call with the
same recipe takes the record over. What the record does not name is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from featstore.config import format_size
from featstore.creation.source import torch_dtype
from featstore.errors import CommittedError, CorruptionError, FormatError
from featstore.progress import note
from featstore.storage.builddir import BUILD_STATE
from featstore.storage.catalog import CATALOG_DIRECTORY
from featstore.storage.format import DTYPES, file_bytes, sums_bytes, sums_seed
from featstore.storage.layout import PAGE_BYTES, RowLayout, choose_layout
from featstore.storage.lock import OPENING_LOCK, READERS_LOCK, WRITER_LOCK
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.sections import SectionFile, replacing
from featstore.storage.update import MAKING_STATE
from featstore.storage.writer import FileRecord, RowFileWriter, WriterState, free_bytes

__all__ = [
    "CHECKPOINT_S",
    "FILES",
    "UNREADABLE",
    "BuildSteps",
    "Field",
    "Inputs",
    "Steps",
    "fields_of",
    "files_of_record",
    "open_made",
    "read_state",
]

CHECKPOINT_S: Final = 5.0  # least seconds between two records; more if flushing takes long
KIND: Final = "making"
FILES: Final = "adjacency and feature"  # key in a recipe: the ids of the files that are read
UNREADABLE: Final = (FormatError, CorruptionError, FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError)
_FORMAT: Final = 3  # of the record; also where files are laid out in another way

Array = npt.NDArray[Any]


class Field:
    """A field that a step makes: rows of one shape and dtype (a name of ``DTYPES``), one for each node of a type."""

    def __init__(self, n_rows: int, row_shape: Sequence[int], dtype: str) -> None:
        self.n_rows, self.row_shape, self.dtype = n_rows, tuple(row_shape), dtype
        self.row_bytes = int(np.prod(self.row_shape, dtype=np.int64)) * DTYPES[dtype][1]

    @property
    def layout(self) -> RowLayout:
        return choose_layout(self.row_bytes)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, checksums included."""
        n_bytes = file_bytes(self.layout, self.n_rows)
        return n_bytes + sums_bytes(n_bytes)


@dataclass(frozen=True)
class _Left:
    """An unfinished file that an earlier call left: its final name, and how far it is."""

    name: str
    state: WriterState

    @property
    def temporary(self) -> list[str]:
        return [f"{name}.{self.state.file_id.hex()}.tmp" for name in self.final]

    @property
    def final(self) -> list[str]:
        return [self.name, f"{self.name}.sums"]

    def is_in(self, folder: str) -> bool:
        """Check whether its rows are there, under one name or the other, as far as the record says."""
        for name in (self.temporary[0], self.final[0]):
            with contextlib.suppress(FileNotFoundError):
                return os.stat(os.path.join(folder, name)).st_size >= (self.state.offset if self.state.offset > PAGE_BYTES else 0)
        return False


class Steps:
    """The steps of making files, a field each, in a folder with a record to resume from. One owner thread.

    Parameters
    ----------
    folder : str
    name : str
        Of what is made, for messages.
    recipe : mapping, optional
        Inputs and parameters as JSON values, each under a name for messages. Without one no record is kept.
    generation : int
        Number of the commit that the files are made for.
    progress : bool

    Attributes
    ----------
    more : dict
        Further JSON values, which are recorded, and taken over, with the steps.
    arrays : dict of str to array
        Further arrays, likewise.
    kept : set of str
        Further files in the folder that the record names: they stay as long as it does. They are durable before it.
    """

    state_name = MAKING_STATE
    others: frozenset[str] = frozenset()  # further entries of the folder, which stay

    def __init__(self, folder: str, name: str, recipe: Mapping[str, Any] | None, generation: int, *, progress: bool) -> None:
        self.folder, self.name, self._recipe = folder, name, json.loads(json.dumps(recipe))
        self.generation, self._shows = generation, progress
        self.more: dict[str, Any] = {}
        self.arrays: dict[str, Array] = {}
        self.kept: set[str] = set()
        self._writers: dict[int, tuple[str, RowFileWriter]] = {}  # open ones, by step
        self._left: dict[int, _Left] = {}
        self._kept_rows = 0
        self._files: dict[int, FileRecord] = {}
        self._fields: dict[int, Field] = {}
        self._done = -1
        self._written_at = time.monotonic()

    # -- the record --------------------------------------------------------------------------------------------------------------

    @property
    def _state_path(self) -> str:
        return os.path.join(self.folder, self.state_name)

    def _take_over(self) -> str | None:
        """Take over the state that a killed maker recorded; return None, or the reason why it cannot be resumed."""
        if self._recipe is None:
            return "an earlier call did not finish, and a call without resume= goes on with none"
        try:
            record, arrays = read_state(self._state_path)
            if record["format"] != _FORMAT:
                return "what an earlier call left is of another release"
            left = record["recipe"]
            others = [name for name in {**self._recipe, **left} if left.get(name) != self._recipe.get(name)]
            if others:
                return f"what an earlier call left differs in: {', '.join(others)}"
            files, fields = files_of_record(record["files"]), fields_of(record)
            writers, done = _read_writers(record["writers"], arrays), int(record["done"])
            more, kept = dict(record["more"]), set(map(str, record["kept"]))
            named = dict(zip(record["arrays"], arrays[3 * len(writers) :], strict=True))
        except FileNotFoundError:
            return "an earlier call was ended before anything was kept"
        except UNREADABLE:
            return "what an earlier call left cannot be read"
        if any(not os.path.isfile(os.path.join(self.folder, each)) for each in (*(each.name for each in files.values()), *kept)):
            return "files are missing of what an earlier call left"
        self._files, self._fields, self._done, self._left = files, fields, done, writers
        self.kept = kept
        self.more.update(more)
        self.arrays.update(named)
        self._sweep()
        return None

    def _stays(self, entry: str) -> bool:
        """Decide whether an entry of the folder stays that neither the record nor ``others`` names."""
        return False

    def _sweep(self) -> None:
        """Remove files that the record does not name."""
        named = {self.state_name, *self.others, *self.kept}
        named.update(name for each in self._files.values() for name in (each.name, each.sums_name))
        for each in self._left.values():  # under their final names, if the maker was killed before it recorded that they are done
            named.update((*each.temporary, *each.final))
        for entry in os.listdir(self.folder):
            if entry not in named and not self._stays(entry):
                os.unlink(os.path.join(self.folder, entry))

    def _record(self, states: Mapping[int, WriterState] | None = None) -> None:
        """Record the state of all fields durably, in one step; do nothing without a recipe."""
        if self._recipe is None:
            return
        writers: list[dict[str, Any]] = []
        arrays: list[Array] = []
        for step, state in (states or {}).items():
            writers.append(
                {
                    "step": step,
                    "name": self._writers[step][0],
                    "id": state.file_id.hex(),
                    "generation": state.generation,
                    "rows": state.n_rows,
                    "offset": state.offset,
                    "sums_pages": state.n_sums_pages,
                }
            )
            arrays += [state.tail, state.first_sums, state.sums]
        record = {"format": _FORMAT, "recipe": self._recipe, "writers": writers, **self.made()}
        record |= {"more": self.more, "kept": sorted(self.kept), "arrays": list(self.arrays)}
        try:
            with replacing(self._state_path, KIND) as sections:
                for each in (np.frombuffer(json.dumps(record).encode(), np.uint8), *arrays, *self.arrays.values()):
                    sections.append(each)
        except CommittedError as error:  # of the record: what is made is not complete
            found = error.error
            raise OSError(found.errno, found.strerror, found.filename) from None
        self._written_at = time.monotonic()

    def made(self) -> dict[str, Any]:
        """Describe what is made, as JSON values: the last step that is done, and the files and fields of steps."""
        files = {str(number): _entry(each) for number, each in self._files.items()}
        fields = {str(number): [each.n_rows, each.row_shape, each.dtype] for number, each in self._fields.items()}
        return {"done": self._done, "files": files, "fields": fields}

    # -- steps -------------------------------------------------------------------------------------------------------------------

    def is_done(self, step: int) -> bool:
        """Check whether a step is finished, as steps are in order; its field may have been dropped since."""
        return step <= self._done

    def field_of(self, step: int) -> Field | None:
        """Get a step's field; None if no row of it was made."""
        return self._fields.get(step)

    def _check_room(self, field: Field, left: _Left | None) -> None:
        """Check that the drive has room for the rest of a field; OSError (ENOSPC) otherwise, before anything is written."""
        needed = field.disk_bytes - (0 if left is None else left.state.offset)
        free = free_bytes(self.folder)
        if free is not None and needed > free:
            text = f"{os.strerror(errno.ENOSPC)}: {self.name!r} takes {format_size(needed)}, and {format_size(free)} are free"
            raise OSError(errno.ENOSPC, text, self.folder)

    def writer(self, step: int, field: Field, buffer_bytes: int, *, name: str = "", kind: str = "feature") -> RowFileWriter:
        """Open the writer of a step's field, behind the rows that were made before; ``name`` is the file's."""
        options: dict[str, Any] = {"kind": kind, "dtype": field.dtype, "generation": self.generation}
        options["buffer_bytes"] = buffer_bytes
        name, left = name or f"step-{step}.rows", self._left.pop(step, None)
        self._check_room(field, left)
        self._fields[step] = field
        if left is not None:
            try:
                writer = RowFileWriter(self.folder, name, field.layout, **options, resume=left.state)
                self._writers[step], self._kept_rows = (name, writer), self._kept_rows + left.state.n_rows
                return writer
            except (FormatError, FileNotFoundError):
                note(f"featstore: making a field of {self.name!r} from the start: what was left of it is cut short", self._shows)
                for each in (*left.temporary, *left.final):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(self.folder, each))
        writer = RowFileWriter(self.folder, name, field.layout, **options)
        self._writers[step] = name, writer
        return writer

    def checkpoint(self, prepare: Callable[[], None] | None = None, written: int = 0) -> None:
        """Record the written rows if the last record is old enough, so that flushing takes only a small part of the time.

        ``prepare`` is called before a record. ``written`` counts what was written beside the rows.
        """
        if self.is_due and written + sum(each.n_rows for _, each in self._writers.values()) > self._kept_rows:
            begin = time.monotonic()
            if prepare is not None:
                prepare()
            self.keep()
            self._kept_rows += written
            self._written_at += min(60.0, 4 * (time.monotonic() - begin))

    @property
    def is_due(self) -> bool:
        """Whether the last record is old enough for another one."""
        return self._recipe is not None and time.monotonic() - self._written_at >= CHECKPOINT_S

    def keep(self) -> None:
        """Record the written rows now."""
        if self._recipe is not None and self._writers:
            states = {step: writer.checkpoint() for step, (_, writer) in self._writers.items()}
            self._kept_rows = sum(each.n_rows for each in states.values())
            self._record(states)

    def add(self, files: Mapping[int, FileRecord], *, keeps: bool = True) -> None:
        """Note that files are complete while others are still written; if ``keeps``, record it with the rows of these."""
        self._files.update(files)
        for step in files:
            self._writers.pop(step, None)
        if keeps and self._writers:
            self.keep()
        elif keeps:
            self._record()

    def finish(self, step: int, drops: Sequence[int] = ()) -> None:
        """Complete a step's field, and remove the fields of the steps ``drops``."""
        self.put({step: self._writers[step][1].commit()}, drops)

    def put(self, files: Mapping[int, FileRecord], drops: Sequence[int] = ()) -> None:
        """Note that steps are finished whose files are complete; drop fields as :meth:`finish` does."""
        self.add(files, keeps=False)
        self.skip(max(files), drops)

    def file(self, step: int) -> FileRecord:
        """Get the record of a finished step's file."""
        return self._files[step]

    def find_file(self, step: int) -> FileRecord | None:
        """Get the record of a finished step's file; None if it has none."""
        return self._files.get(step)

    def skip(self, step: int, drops: Sequence[int] = ()) -> None:
        """Note that a step is finished, which has no field unless :meth:`finish` completed one; drop fields as it does."""
        self._done, self._kept_rows = step, 0
        gone = [self._files.pop(each) for each in drops if each in self._files]
        self._record()
        for record in gone:
            for name in (record.name, record.sums_name):
                os.unlink(os.path.join(self.folder, name))

    def drop(self, names: Iterable[str]) -> None:
        """Remove further files that were kept."""
        gone = list(names)
        self.kept.difference_update(gone)
        self._record()
        for name in gone:
            os.unlink(os.path.join(self.folder, name))

    def open(self, step: int, reader: Reader) -> RowFile:
        """Open a step's field for reading; the caller closes it."""
        return open_made(self.folder, self._files[step], reader)

    # -- life --------------------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Close the files, and keep them for a later call."""
        for _, writer in self._writers.values():
            with contextlib.suppress(OSError):  # recorded rows were flushed before, so a failed write does not matter
                writer.leave()

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Keep the files of writers if the block raises: whoever owns the folder removes them, or keeps them for a later call."""
        try:
            yield
        except BaseException:
            self.leave()
            raise


@dataclass
class Inputs:
    """Fingerprint of a dataset's inputs, so that a later call with the same inputs can go on; or none.

    Parameters
    ----------
    recipe : mapping, optional
        JSON values: paths, sizes and times of files, and all options that change what is written. None: no call goes on.
    counts : dict of str to int
        What is counted while inputs are read. A later call takes it over with the steps, as it does not read them again.
    """

    recipe: Mapping[str, Any] | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Name of the recipe, for the build directory; empty without one."""
        return "" if self.recipe is None else xxhash.xxh3_128_hexdigest(json.dumps(self.recipe, sort_keys=True).encode())

    def with_options(self, **options: Any) -> Inputs:
        """Add options that change what is written; the counts are the same object."""
        return self if self.recipe is None else Inputs({**self.recipe, **options}, self.counts)

    @staticmethod
    def of_files(paths: Iterable[str | os.PathLike[str]]) -> list[list[Any]]:
        """Describe files as they are now: path, bytes, and time of the last change in nanoseconds."""
        found = []
        for path in paths:
            name = os.path.abspath(path)
            status = os.stat(name)
            found.append([name, status.st_size, status.st_mtime_ns])
        return found


class BuildSteps(Steps):
    """The steps of building a dataset, in its build directory, where files have their final names.

    The build directory has the inputs' digest in its name. It stays for a later call as
    :class:`~featstore.storage.builddir.BuildDirectory` says, once a step is recorded.
    """

    state_name = BUILD_STATE
    others = frozenset((WRITER_LOCK, READERS_LOCK, OPENING_LOCK, CATALOG_DIRECTORY))

    def __init__(self, folder: str, name: str, inputs: Inputs, *, progress: bool) -> None:
        super().__init__(folder, name, inputs.recipe, 1, progress=progress)
        self._inputs = inputs
        self.more["counts"] = inputs.counts

    def begin(self) -> None:
        """Go on with the files of an ended build, if there are any; else begin."""
        if self._recipe is None:
            return
        is_kept = os.path.lexists(self._state_path)
        why = self._take_over()
        if not all(each.is_in(self.folder) for each in self._left.values()):  # others have what follows from their rows
            why = "what an earlier call left is cut short"
        if why is None:
            self._inputs.counts.update(self.more["counts"])
            self.more["counts"] = self._inputs.counts
            note(f"featstore: going on with {self.name!r}, which an earlier call had begun", self._shows)
            return
        note(f"featstore: making {self.name!r} from the start: {why}", self._shows and is_kept)
        self.restart()

    def restart(self) -> None:
        """Forget, and remove, all that was made so far; writers are closed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._state_path)
        for each in (
            self._files,
            self._fields,
            self._left,
            self._writers,
            self.arrays,
            self.kept,
            self.more,
            self._inputs.counts,
        ):
            each.clear()
        self.more["counts"] = self._inputs.counts
        self._done, self._kept_rows = -1, 0
        self._sweep()


def read_state(path: str) -> tuple[dict[str, Any], list[Array]]:
    """Read a record and its arrays; raises one of :data:`UNREADABLE` if the record is missing or damaged."""
    file = SectionFile(path, KIND)
    try:
        record = dict(json.loads(file[0].tobytes()))
        return record, [file[number].copy() for number in range(1, len(file))]
    finally:
        file.close()


def _read_writers(entries: Sequence[Mapping[str, Any]], arrays: Sequence[Array]) -> dict[int, _Left]:
    found = {}
    for number, entry in enumerate(entries):
        tail, first, sums = arrays[3 * number : 3 * number + 3]
        state = WriterState(
            file_id=bytes.fromhex(entry["id"]),
            generation=int(entry["generation"]),
            n_rows=int(entry["rows"]),
            offset=int(entry["offset"]),
            tail=tail,
            first_sums=first,
            sums=sums,
            n_sums_pages=int(entry["sums_pages"]),
        )
        found[int(entry["step"])] = _Left(str(entry["name"]), state)
    return found


def files_of_record(entries: Mapping[str, Any]) -> dict[int, FileRecord]:
    """Read the ``files`` of what :meth:`Steps.made` describes."""
    return {int(step): _file_record(entry) for step, entry in entries.items()}


def fields_of(made: Mapping[str, Any]) -> dict[int, Field]:
    """Read the fields of what :meth:`Steps.made` describes."""
    return {int(step): Field(*entry) for step, entry in made["fields"].items()}


def open_made(folder: str, record: FileRecord, reader: Reader) -> RowFile:
    """Open a file that a step has made; the caller closes it."""
    return reader.open(
        os.path.join(folder, record.name),
        layout=record.layout,
        n_rows=record.n_rows,
        seed=record.seed,
        sums_seed=sums_seed(record.seed),
        fingerprint=record.file_id,
    )


def _entry(record: FileRecord) -> dict[str, Any]:
    layout = record.layout
    values = {name: getattr(record, name) for name in ("name", "kind", "file_id", "generation", "n_rows", "dtype")}
    sizes = {"n_bytes": record.n_bytes, "n_sums_bytes": record.n_sums_bytes}
    return {**values, **sizes, "layout": [layout.row_bytes, layout.group_rows, layout.group_bytes]}


def _file_record(entry: Mapping[str, Any]) -> FileRecord:
    values = {name: entry[name] for name in entry if name != "layout"}
    torch_dtype(values["dtype"])
    return FileRecord(**values, layout=RowLayout(*entry["layout"]))
