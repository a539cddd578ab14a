"""Making of a new feature: its rows, and intermediate fields, lie in a folder of the dataset until one commit adds it.

The maker works in the folder ``making.<feature>`` under the dataset's writer lock. A record in the folder names the feature's
recipe, its inputs, and the rows that are on the drive. If a maker is killed, a later one resumes from the last record. A maker
without a recipe keeps no record, so it cannot be resumed. In a graph of several types a maker can make a feature of several types
of nodes, each of which gets a field.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

import numpy as np

from featstore.changes.fields import check_new_field
from featstore.config import format_size
from featstore.creation.build import file_stem
from featstore.creation.source import torch_dtype
from featstore.errors import BusyError, CorruptionError, FormatError
from featstore.graph.derive.provenance import DERIVED, provenance
from featstore.progress import note
from featstore.storage.catalog import EDGE, Catalog, FieldPart, FieldRecord
from featstore.storage.format import DTYPES, file_bytes, sums_bytes, sums_seed
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.lock import FileLock
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.sections import SectionFile, replacing
from featstore.storage.update import MAKING, MAKING_STATE, Update
from featstore.storage.writer import FileRecord, RowFileWriter, WriterState, free_bytes, fsync_directory
from featstore.topology.types import ONE_NODE, qualified

__all__ = [
    "CHECKPOINT_S",
    "FILES",
    "PART",
    "Field",
    "Making",
    "Steps",
    "adjacency_of",
    "check_new_feature",
    "fields_of",
    "files_of_record",
    "open_made",
]

CHECKPOINT_S: Final = 5.0  # least seconds between two records; more if flushing takes long
KIND: Final = "making"
PATIENCE_S: Final = 5.0  # for a rank of an earlier call
PART: Final = "part-"  # prefix of the folders of ranks' rows, and of their locks, see graph/derive/sharedmaking.py
FILES: Final = "adjacency and feature"  # key in a recipe: the ids of the files that are read
_UNREADABLE: Final = (FormatError, CorruptionError, FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError)


def adjacency_of(catalog: Catalog) -> dict[str, list[str]]:
    """List the ids of the adjacency's files, by key."""
    fields = catalog.by_role("topology", EDGE).values()
    return {record.key: [catalog.files[part.file].rows_id for part in record.parts] for record in fields}


def check_new_feature(catalog: Catalog, name: str, overwrite: bool, of: Iterable[str] = (ONE_NODE,)) -> None:
    """Check that a new feature of the types ``of`` of nodes can get this name; ValueError or TypeError otherwise."""
    for kind in of:
        check_new_field(catalog, f"node/{kind}", "feature", name, overwrite, qualified(kind, ""))


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


class Steps:
    """The steps of making files, a field each, in a folder with a record to resume from. One owner thread.

    Parameters
    ----------
    folder : str
    name : str
        Of the feature, for messages.
    recipe : mapping, optional
        See :class:`Making`.
    generation : int
        Number of the commit that the files are made for.
    progress : bool
    """

    state_name = MAKING_STATE
    others: frozenset[str] = frozenset()  # further entries of the folder, which stay

    def __init__(self, folder: str, name: str, recipe: Mapping[str, Any] | None, generation: int, *, progress: bool) -> None:
        self.folder, self.name, self._recipe = folder, name, json.loads(json.dumps(recipe))
        self.generation, self._shows = generation, progress
        self._writer: RowFileWriter | None = None
        self._left: WriterState | None = None
        self._left_step, self._left_name, self._writing, self._kept_rows = -1, "", "", 0
        self._files: dict[int, FileRecord] = {}
        self._fields: dict[int, Field] = {}
        self._done = -1
        self._written_at = time.monotonic()

    # -- the record --------------------------------------------------------------------------------------------------------------

    @property
    def _state_path(self) -> str:
        return os.path.join(self.folder, self.state_name)

    def _begin(self, stacklevel: int | None) -> None:
        """Resume the work of a killed maker if its recipe is the same; else remove its folder and start anew.

        ``stacklevel`` is that of a warning with the reason, if a record is removed; None: nobody is warned.
        """
        if os.path.lexists(self.folder):
            self._wait_for_parts()
            is_kept = os.path.lexists(self._state_path)
            why = self._take_over()
            if why is None:
                note(f"featstore: going on with {self.name!r}, which an earlier call had begun", self._shows)
                return
            shutil.rmtree(self.folder)
            text = f"making {self.name!r} from the start: {why}"
            if is_kept and stacklevel is not None:
                warnings.warn(text, stacklevel=stacklevel)
            else:
                note(f"featstore: {text}", self._shows)
        os.mkdir(self.folder)
        fsync_directory(os.path.dirname(self.folder))

    def _wait_for_parts(self) -> None:
        """Wait for ranks of an earlier call, which may still write their parts; BusyError if one does not end."""
        for name in os.listdir(self.folder):
            if name.startswith(PART) and name.endswith(".lock"):
                lock_part(os.path.join(self.folder, name)).release()

    def _take_over(self) -> str | None:
        """Take over the state that a killed maker recorded; return None, or the reason why it cannot be resumed."""
        if self._recipe is None:
            return "an earlier call did not finish, and a call without resume= goes on with none"
        try:
            record, (tail, first, sums) = _read_state(self._state_path)
            if record["format"] != 1:
                return "what an earlier call left is of another release"
            left = record["recipe"]
            others = [name for name in {**self._recipe, **left} if left.get(name) != self._recipe.get(name)]
            if others:
                return f"what an earlier call left differs in: {', '.join(others)}"
            files, fields = files_of_record(record["files"]), fields_of(record)
            writer, done = record["writer"], int(record["done"])
        except FileNotFoundError:
            return "an earlier call was ended before anything was kept"
        except _UNREADABLE:
            return "what an earlier call left cannot be read"
        if any(not os.path.isfile(os.path.join(self.folder, each.name)) for each in files.values()):
            return "files are missing of what an earlier call left"
        self._files, self._fields, self._done = files, fields, done
        if writer is not None:
            self._left_step, self._left_name = int(writer["step"]), str(writer["name"])
            self._left = WriterState(
                file_id=bytes.fromhex(writer["id"]),
                generation=int(writer["generation"]),
                n_rows=int(writer["rows"]),
                offset=int(writer["offset"]),
                tail=tail,
                first_sums=first,
                sums=sums,
                n_sums_pages=int(writer["sums_pages"]),
            )
        self._sweep()
        return None

    def _sweep(self) -> None:
        """Remove files that the record does not name, but no rank's part."""
        named = {self.state_name, *self.others, *(name for each in self._files.values() for name in (each.name, each.sums_name))}
        if self._left is not None:
            stem = self._left_name
            named |= {f"{name}.{self._left.file_id.hex()}.tmp" for name in (stem, f"{stem}.sums")}
        for entry in os.listdir(self.folder):
            if entry not in named and not entry.startswith(PART):
                os.unlink(os.path.join(self.folder, entry))

    def _record(self, step: int = -1, state: WriterState | None = None) -> None:
        """Record the state of all fields durably, in one step; do nothing without a recipe."""
        if self._recipe is None:
            return
        writer = None
        if state is not None:
            writer = {
                "step": step,
                "name": self._writing,
                "id": state.file_id.hex(),
                "generation": state.generation,
                "rows": state.n_rows,
                "offset": state.offset,
                "sums_pages": state.n_sums_pages,
            }
        record = {"format": 1, "recipe": self._recipe, "writer": writer, **self.made()}
        none = np.empty(0, np.uint64)
        arrays = (np.empty(0, np.uint8), none, none) if state is None else (state.tail, state.first_sums, state.sums)
        with replacing(self._state_path, KIND) as sections:
            for each in (np.frombuffer(json.dumps(record).encode(), np.uint8), *arrays):
                sections.append(each)
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

    def _check_room(self, field: Field) -> None:
        """Check that the drive has room for the rest of a field; OSError (ENOSPC) otherwise, before anything is written."""
        needed = field.disk_bytes - (0 if self._left is None else self._left.offset)
        free = free_bytes(self.folder)
        if free is not None and needed > free:
            text = f"{os.strerror(errno.ENOSPC)}: {self.name!r} takes {format_size(needed)}, and {format_size(free)} are free"
            raise OSError(errno.ENOSPC, text, self.folder)

    def writer(self, step: int, field: Field, buffer_bytes: int, *, name: str = "", kind: str = "feature") -> RowFileWriter:
        """Open the writer of a step's field, behind the rows that were made before; ``name`` is the file's."""
        options: dict[str, Any] = {"kind": kind, "dtype": field.dtype, "generation": self.generation}
        options["buffer_bytes"] = buffer_bytes
        self._check_room(field)
        name, left = name or f"step-{step}.rows", self._left
        self._left, self._writing, self._kept_rows = None, name, 0
        self._fields[step] = field
        if left is not None and self._left_step == step:
            try:
                self._writer = RowFileWriter(self.folder, name, field.layout, **options, resume=left)
                self._kept_rows = left.n_rows
                return self._writer
            except (FormatError, FileNotFoundError):
                note(f"featstore: making a field of {self.name!r} from the start: what was left of it is cut short", self._shows)
                self._sweep()
        self._writer = RowFileWriter(self.folder, name, field.layout, **options)
        return self._writer

    def checkpoint(self, step: int) -> None:
        """Record the written rows if the last record is old enough, so that flushing takes only a small part of the time."""
        if self._writer is not None and self._writer.n_rows > self._kept_rows and self.is_due:
            begin = time.monotonic()
            self._kept_rows = self._writer.n_rows
            self._record(step, self._writer.checkpoint())
            self._written_at += min(60.0, 4 * (time.monotonic() - begin))

    @property
    def is_due(self) -> bool:
        """Whether the last record is old enough for another one."""
        return self._recipe is not None and time.monotonic() - self._written_at >= CHECKPOINT_S

    def keep(self, step: int) -> None:
        """Record the written rows now."""
        if self._recipe is not None and self._writer is not None:
            self._record(step, self._writer.checkpoint())

    def finish(self, step: int, drops: Sequence[int] = ()) -> None:
        """Complete a step's field, and remove the fields of the steps ``drops``."""
        assert self._writer is not None
        self.put({step: self._writer.commit()}, drops)

    def put(self, files: Mapping[int, FileRecord], drops: Sequence[int] = ()) -> None:
        """Note that steps are finished whose files are complete; drop fields as :meth:`finish` does."""
        self._writer = None
        self._files.update(files)
        self.skip(max(files), drops)

    def file(self, step: int) -> FileRecord:
        """Get the record of a finished step's file."""
        return self._files[step]

    def skip(self, step: int, drops: Sequence[int] = ()) -> None:
        """Note that a step is finished, which has no field unless :meth:`finish` completed one; drop fields as it does."""
        self._done = step
        gone = [self._files.pop(each) for each in drops if each in self._files]
        self._record()
        for record in gone:
            for name in (record.name, record.sums_name):
                os.unlink(os.path.join(self.folder, name))

    def open(self, step: int, reader: Reader) -> RowFile:
        """Open a step's field for reading; the caller closes it."""
        return open_made(self.folder, self._files[step], reader)

    # -- life --------------------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Close the files, and keep them for a later call."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # recorded rows were flushed before, so a failed write does not matter
                self._writer.leave()

    def _leave(self, error: BaseException | None) -> None:
        self.leave()
        if self._recipe is None and isinstance(error, KeyboardInterrupt) and self._fields:
            note(f"featstore: what was made of {self.name!r} is removed; resume= would have kept it", self._shows)
        if isinstance(error, BusyError):  # a rank of an earlier call is still writing there
            return
        if isinstance(error, OSError) or not os.path.exists(self._state_path):
            shutil.rmtree(self.folder, ignore_errors=True)


class Making(Steps):
    """The making of one feature, step by step; a context manager, which holds the dataset's writer lock. One owner thread.

    Parameters
    ----------
    root : str
        The dataset's directory.
    opened : Catalog
        Catalog of the opened dataset; BusyError if an input of the feature was replaced since.
    name : str
        Name of the new feature; ValueError if the name is taken.
    of : sequence of str
        Types of nodes that the feature may be of.
    recipe : mapping, optional
        Inputs and parameters of the feature as JSON values, each under a name for messages; the key ``FILES`` has the ids of the
        files that are read. A maker resumes only work with the same recipe. Without a recipe it starts anew, and keeps no record.
    uses : sequence of str
        Keys of the input fields, beside the adjacency.
    overwrite : bool
    progress : bool
        Print, on a terminal and in a notebook, whether the work of a killed maker is resumed.

    Notes
    -----
    An error of the drive leaves no files. If a kill, Ctrl-C or too little memory ends a maker with a recipe, its record and files
    stay for a later call. A record that cannot be resumed is removed, with a UserWarning that names the reason. Folders of other
    features that cannot be resumed are removed, too.
    """

    def __init__(
        self,
        root: str,
        opened: Catalog,
        name: str,
        recipe: Mapping[str, Any] | None,
        uses: Sequence[str],
        *,
        of: Sequence[str] = (ONE_NODE,),
        overwrite: bool,
        progress: bool,
    ) -> None:
        self._name, full = name, qualified(",".join(of), name)
        folder = os.path.join(root, f"{MAKING}{file_stem(full)}")
        self._uses = list(uses)
        self._update = Update(root)
        try:
            super().__init__(folder, full, recipe, self._update.generation, progress=progress)
            catalog = self._update.catalog
            if adjacency_of(catalog) != adjacency_of(opened) or any(
                catalog.fields.get(key) != opened.fields[key] for key in uses
            ):
                raise BusyError("the dataset was changed since it was opened", root)
            check_new_feature(catalog, name, overwrite, of)
            try:
                self._sweep_others()
                self._begin(stacklevel=7)  # warns in the caller of aggregate or infer
            except BaseException as error:
                self._leave(error)
                raise
        except BaseException:
            self._update.__exit__(None, None, None)
            raise

    def _sweep_others(self) -> None:
        """Remove folders of other features that have no readable record, or one whose input files are gone."""
        ids = {each.rows_id for each in self._update.catalog.files.values()}
        for entry in sorted(os.scandir(self._update.root), key=lambda each: each.name):
            if entry.name.startswith(MAKING) and entry.is_dir(follow_symlinks=False) and entry.path != self.folder:
                try:
                    record, _ = _read_state(os.path.join(entry.path, MAKING_STATE))
                    is_usable = ids.issuperset(record["recipe"][FILES])
                except _UNREADABLE:
                    is_usable = False
                except OSError:  # it may be readable later
                    continue
                if not is_usable:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def commit(self, steps: Mapping[str, int]) -> Catalog:
        """Add the fields of steps to the dataset as the feature of types of nodes, in one commit; return the new catalog.

        CommittedError if the commit is done but may not be durable. After other OSErrors the dataset is as it was.
        """
        update, names = self._update, []
        for of, step in steps.items():
            made, field = self._files[step], self._fields[step]
            file = replace(made, name=f"node.{file_stem(qualified(of, self._name))}.{update.generation}.rows")
            key, shape = f"node/{of}/{self._name}", (field.n_rows, *field.row_shape)
            part = FieldPart(file.name, 0, field.n_rows)
            entry = {f"{DERIVED}{key}": provenance(update.catalog, file.file_id, self._uses)}
            update.add([file], [FieldRecord(key, "feature", field.dtype, shape, update.generation, (part,))], entry)
            names += [(made.name, file.name), (made.sums_name, file.sums_name)]
        for old, new in names:
            os.rename(os.path.join(self.folder, old), os.path.join(update.root, new))
        fsync_directory(update.root)
        catalog = update.commit()
        shutil.rmtree(self.folder, ignore_errors=True)
        return catalog

    def __enter__(self) -> Making:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._leave(error)
        finally:
            self._update.__exit__(kind, error, trace)


def _read_state(path: str) -> tuple[dict[str, Any], list[Any]]:
    """Read a record and its arrays; raises one of ``_UNREADABLE`` if the record is missing or damaged."""
    file = SectionFile(path, KIND)
    try:
        return dict(json.loads(file[0].tobytes())), [file[number].copy() for number in (1, 2, 3)]
    finally:
        file.close()


def lock_part(path: str) -> FileLock:
    """Take the lock of a rank's part, against a rank of an earlier call that is being ended; BusyError if that does not end."""
    return FileLock(path, exclusive=True, patience_s=PATIENCE_S)


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
