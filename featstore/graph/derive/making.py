"""Making of a new feature: its rows, and intermediate fields, lie in a folder of the dataset until one commit adds it.

The maker works in the folder ``making.<feature>`` under the dataset's writer lock. A record in the folder names the feature's
recipe, its inputs, and the rows that are on the drive. If a maker is killed, a later one resumes from the last record. A maker
without a recipe keeps no record, so it cannot be resumed. In a graph of several types a maker can make a feature of several types
of nodes, each of which gets a field.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

from featstore.changes.fields import check_new_field
from featstore.creation.builder import file_stem
from featstore.creation.steps import FILES, UNREADABLE, Steps, read_state
from featstore.errors import BusyError, FeatstoreWarning, warn
from featstore.graph.derive.provenance import DERIVED, provenance
from featstore.progress import note
from featstore.storage.calls import remove_tree
from featstore.storage.catalog import EDGE, Catalog, FieldPart, FieldRecord
from featstore.storage.lock import FileLock
from featstore.storage.update import MAKING, MAKING_STATE, Update
from featstore.storage.writer import fsync_directory
from featstore.topology.types import ONE_NODE, qualified

__all__ = [
    "PART",
    "FolderSteps",
    "Making",
    "adjacency_of",
    "check_new_feature",
    "lock_part",
]

PATIENCE_S: Final = 5.0  # for a rank of an earlier call
PART: Final = "part-"  # prefix of the folders of ranks' rows, and of their locks, see graph/derive/sharedmaking.py


def adjacency_of(catalog: Catalog) -> dict[str, list[str]]:
    """List the ids of the adjacency's files, by key."""
    fields = catalog.by_role("topology", EDGE).values()
    return {record.key: [catalog.files[part.file].rows_id for part in record.parts] for record in fields}


def check_new_feature(catalog: Catalog, name: str, overwrite: bool, of: Iterable[str] = (ONE_NODE,)) -> None:
    """Check that a new feature of the types ``of`` of nodes can get this name; ValueError or TypeError otherwise."""
    for kind in of:
        check_new_field(catalog, f"node/{kind}", "feature", name, overwrite, qualified(kind, ""))


class FolderSteps(Steps):
    """Steps in a folder of a dataset, which has folders of other ranks inside; the folder is made here."""

    def _begin(self, warns: bool) -> None:
        """Resume the work of a killed maker if its recipe is the same; else remove its folder and start anew.

        ``warns``: a record that is removed is a warning, with the reason.
        """
        if os.path.lexists(self.folder):
            self._wait_for_parts()
            is_kept = os.path.lexists(self._state_path)
            why = self._take_over()
            if why is None:
                note(f"featstore: going on with {self.name!r}, which an earlier call had begun", self._shows)
                return
            remove_tree(self.folder)
            text = f"making {self.name!r} from the start: {why}"
            if is_kept and warns:
                warn(text, FeatstoreWarning)
            else:
                note(f"featstore: {text}", self._shows)
        os.mkdir(self.folder)
        fsync_directory(os.path.dirname(self.folder))

    def _wait_for_parts(self) -> None:
        """Wait for ranks of an earlier call, which may still write their parts; BusyError if one does not end."""
        for name in os.listdir(self.folder):
            if name.startswith(PART) and name.endswith(".lock"):
                lock_part(os.path.join(self.folder, name)).release()

    def _stays(self, entry: str) -> bool:
        return entry.startswith(PART)  # of a rank

    def _leave(self, error: BaseException | None) -> None:
        self.leave()
        if self._recipe is None and isinstance(error, KeyboardInterrupt) and self._fields:
            note(f"featstore: what was made of {self.name!r} is removed; resume= would have kept it", self._shows)
        if isinstance(error, BusyError):  # a rank of an earlier call is still writing there
            return
        if isinstance(error, OSError) or not os.path.exists(self._state_path):
            remove_tree(self.folder, quiet=True)


class Making(FolderSteps):
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
                self._begin(warns=True)
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
                    record, _ = read_state(os.path.join(entry.path, MAKING_STATE))
                    is_usable = ids.issuperset(record["recipe"][FILES])
                except UNREADABLE:
                    is_usable = False
                except OSError:  # it may be readable later
                    continue
                if not is_usable:
                    remove_tree(entry.path, quiet=True)

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
        # From the first rename on nothing can be resumed. If a kill or a power cut leaves the folder, here or after the commit,
        # the next writer sweeps it, because it has no record.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, MAKING_STATE))
            fsync_directory(self.folder)
        for old, new in names:
            os.rename(os.path.join(self.folder, old), os.path.join(update.root, new))
        fsync_directory(update.root)
        catalog = update.commit()
        remove_tree(self.folder, quiet=True)
        return catalog

    def __enter__(self) -> Making:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._leave(error)
        finally:
            self._update.__exit__(kind, error, trace)


def lock_part(path: str) -> FileLock:
    """Take the lock of a rank's part, against a rank of an earlier call that is being ended; BusyError if that does not end."""
    return FileLock(path, exclusive=True, patience_s=PATIENCE_S)
