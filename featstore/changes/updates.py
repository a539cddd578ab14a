"""Changing rows of a field, and appending rows: new blocks go to a patch file, and one commit puts it over the old rows.

Nothing is written in place, so open readers keep what they have, and a kill leaves the old rows. A patch has whole blocks, each
the fewest rows that fill whole pages. Before a patch is written, the last patches are merged into it as long as they are no
larger than it, or there are :data:`MOST_PATCHES` already. So patches grow by powers of two, and a block is copied a logarithmic
number of times. If a quarter of all blocks would lie in patches, the file is written anew instead.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.changes.fields import HOLDER, check_same_graph, room_for
from featstore.creation.source import dtype_name, numpy_dtype, torch_dtype
from featstore.distinct import distinct
from featstore.errors import BusyError
from featstore.gather.arrays import as_array
from featstore.gather.patchedrows import PatchedRows
from featstore.progress import Progress
from featstore.storage.catalog import BLOCKS, PATCHES, Catalog, FieldPart, FieldRecord
from featstore.storage.lock import FileLock
from featstore.storage.rowfile import RowFile
from featstore.storage.update import Update
from featstore.storage.writer import FileRecord, Patch, RowFileWriter

__all__ = [
    "MOST_PATCHES",
    "PATCHED_FRACTION",
    "NewRows",
    "Rows",
    "fields_in",
    "given_rows",
    "insert_rows",
    "moved",
    "patch_rows",
    "update_rows",
]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]
Rows = RowFile | PatchedRows

MOST_PATCHES: Final = 8
PATCHED_FRACTION: Final = 1 / 4  # of the blocks, that may lie in patches
_ROW_BYTES: Final = 32  # of a row of a block beside its own: its number, and those of its place
_ID_BYTES: Final = 48  # of an id: its number, its place, and what sorting takes
_KINDS: Final = {"b": 0, "u": 1, "i": 1, "f": 2}  # a list is cast to its own kind, or to a later one


@dataclass(frozen=True)
class NewRows:
    """Rows to write: distinct row numbers of a file, ascending, and a function that returns consecutive ones of their rows.

    ``take(first, n)`` returns uint8 ``[n, row_bytes]``, the rows of ``ids[first : first + n]``; it is called in order.
    """

    ids: Int64s
    take: Callable[[int, int], Uint8s]


def given_rows(
    what: str, index: Int64s | range, axes: tuple[int, ...] | None, rows: Any, shape: tuple[int, ...], dtype: str, first: int = 0
) -> NewRows:
    """Check the rows of an update, and put them in order; of ids that occur twice the last counts, as in NumPy.

    ``what`` names the field in messages, ``index`` and ``axes`` are the ids as
    :func:`~featstore.gather.rowindex.resolve_rows` gives them, ``shape`` and ``dtype`` are the field's, and ``first`` is the row
    of its file with which it begins. Takes :data:`_ID_BYTES` an id. TypeError or ValueError for wrong rows.
    """
    values: Any = rows
    if isinstance(rows, (str, bytes, os.PathLike, Iterator)):
        advice = "update some ids after the others" if isinstance(rows, Iterator) else "give np.load(path, mmap_mode='r')"
        raise TypeError(f"rows of {what} are an array or a tensor, not a {type(rows).__name__}: {advice}")
    if isinstance(rows, (list, tuple, int, float)):
        values = _cast(what, rows, dtype)
    elif not isinstance(rows, torch.Tensor):
        values = as_array(f"rows of {what}", rows)
    elif rows.layout != torch.strided or rows.is_meta:
        raise TypeError(f"rows of {what} are a dense tensor, with values, not one of {rows.layout} on {rows.device}")
    if (found := dtype_name(values.dtype, of=f"rows of {what}", wider=True)) != dtype:
        raise TypeError(f"rows of {what} are {dtype}, not {found}: cast them before")
    expected, n = (*((1,) if axes is None else axes), *shape[1:]), len(index)
    if tuple(values.shape) != expected and not (n == 1 and tuple(values.shape) == shape[1:]):
        raise ValueError(f"{n} rows of {what} have shape {expected}, not {tuple(values.shape)}")
    values = values.reshape(n, *shape[1:])
    numbers = np.asarray(index, np.int64)
    if isinstance(index, range) or bool((numbers[1:] > numbers[:-1]).all()):
        return NewRows(numbers + first if first else numbers, partial(_take, values, dtype, None))
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    last = np.ones(n, np.bool_)
    last[:-1] = ordered[1:] != ordered[:-1]
    return NewRows(ordered[last] + first, partial(_take, values, dtype, order[last]))


def _take(values: Any, dtype: str, order: Int64s | None, begin: int, n: int) -> Uint8s:
    """Get some rows as bytes, in the order of their ids; without ``order`` they are given in it."""
    some: Any = slice(begin, begin + n) if order is None else order[begin : begin + n]
    if isinstance(values, torch.Tensor):
        of = values[some if order is None else torch.from_numpy(some)].detach().cpu().resolve_neg().contiguous()
        found: Uint8s = of.reshape(n, -1).view(torch.uint8).numpy()
        return found
    part = np.ascontiguousarray(values[some], dtype=numpy_dtype(dtype).newbyteorder("<"))
    return part.reshape(n, -1).view(np.uint8)


def _cast(what: str, given: Any, dtype: str) -> Any:
    """Cast numbers and lists, if that keeps their kind, and they are in the range of the dtype."""
    array, target = as_array(f"rows of {what}", given), torch_dtype(dtype)
    if not array.size:
        return torch.empty(array.shape, dtype=target, device="cpu")
    kind = 2 if target.is_floating_point else 0 if target == torch.bool else 1
    if _KINDS.get(array.dtype.kind, 3) > kind:
        raise TypeError(f"rows of {what} are {dtype}, and a list of {array.dtype} is not cast to it: cast it before")
    if kind != 2:
        if kind and not torch.iinfo(target).min <= int(array.min()) <= int(array.max()) <= torch.iinfo(target).max:
            raise ValueError(f"rows of {what} are {dtype}, and values from {array.min()} to {array.max()} do not fit it")
        return array.astype(numpy_dtype(dtype))
    exact = torch.from_numpy(array.astype(np.float64))
    found = exact.to(target)
    if bool((found.isinf() & ~exact.isinf()).any()):
        raise ValueError(f"rows of {what} are {dtype}, and values from {array.min()} to {array.max()} do not fit it")
    return found


class _Overlay:
    """The rows of blocks as they will be: new rows over old ones. Blocks are requested in ascending order."""

    def __init__(self, old: Rows, new: NewRows, n_rows: int) -> None:
        self._old, self._new, self._n_rows = old, new, n_rows
        self._unit = old.layout.block[0]

    def rows(self, blocks: Int64s) -> Uint8s:
        """Make the rows of blocks, of the last one as many as there are."""
        unit, ids = self._unit, self._new.ids
        rows = (blocks[:, None] * unit + np.arange(unit)).reshape(-1)
        rows = rows[: len(rows) - max(0, int(rows[-1]) + 1 - self._n_rows)]
        out = np.empty((len(rows), self._old.row_bytes), np.uint8)
        low, high = np.searchsorted(ids, [rows[0], rows[-1] + 1]).tolist()
        places = np.searchsorted(rows, ids[low:high])  # every id in between is in a block that is asked for
        is_old = np.ones(len(rows), np.bool_)
        is_old[places] = False
        kept = np.flatnonzero(is_old)
        if len(kept) == len(rows) == int(rows[-1]) + 1 - int(rows[0]):
            self._old.gather(range(int(rows[0]), int(rows[-1]) + 1), out)
        elif len(kept):
            self._old.gather(rows[kept], out, kept)
        if high > low:
            out[places] = self._new.take(low, high - low)
        return out

    def write(self, writer: RowFileWriter, blocks: Iterable[Int64s], progress: Callable[[int], None]) -> None:
        for some in blocks:
            found = self.rows(some)
            writer.write(found)
            progress(found.nbytes)


def _in_steps(blocks: Int64s | range, step: int) -> Iterator[Int64s]:
    for first in range(0, len(blocks), step):
        yield np.asarray(blocks[first : first + step], np.int64)


def patch_rows(
    update: Update,
    base: FileRecord,
    old: Rows,
    new: NewRows,
    tables: Callable[[str], Int64s],
    memory: tuple[int, int],
    progress: Callable[[int], None],
    n_rows: int | None = None,
) -> FileRecord:
    """Write new rows over a file, and register the files; return the file's new record, which may be another file.

    Parameters
    ----------
    update : Update
    base : FileRecord
        Of the last commit.
    old : RowFile or PatchedRows
        The rows of that record.
    new : NewRows
        At least one; all rows from ``base.total_rows`` on are among them.
    tables : callable
        Returns the numbers of the blocks of a patch, given the name of their file.
    memory : tuple of int
        Bytes of the blocks that are made at once, and of a writer's buffers.
    progress : callable
        Gets the number of bytes that were written since its last call.
    n_rows : int, optional
        Number of rows afterwards; by default as before.
    """
    unit, block_pages = base.layout.block
    n_rows = base.total_rows if n_rows is None else n_rows
    n_blocks, overlay = -(-n_rows // unit), _Overlay(old, new, n_rows)
    step = max(1, memory[0] // ((block_pages << 12) + _ROW_BYTES * unit))
    stem, options = _like(base, memory)
    blocks, patches = distinct(new.ids // unit), list(base.patches)
    lengths = [update.catalog.files[each.blocks].n_rows for each in patches]
    if sum(lengths) + len(blocks) > PATCHED_FRACTION * n_blocks:
        with update.writer(stem, base.layout, **options) as writer:
            overlay.write(writer, _in_steps(range(n_blocks), step), progress)
            found = writer.commit()
        update.add([found], drop=[base.name])
        return found
    gone: list[Patch] = []
    while patches and (lengths[-1] <= len(blocks) or len(patches) >= MOST_PATCHES):
        gone.append(patches.pop())
        lengths.pop()
        blocks = np.union1d(blocks, tables(gone[-1].blocks))
    with update.writer(f"{PATCHES[0]}{stem}", base.layout, **options) as writer:
        overlay.write(writer, _in_steps(blocks, step), progress)
        made = writer.commit()
    table = update.write_array(f"{PATCHES[1]}{stem}", BLOCKS, np.dtype(np.int64), [blocks])
    patches.append(Patch(made.name, table.name, made.file_id))
    record = replace(base, patches=tuple(patches), n_appended=n_rows - base.n_rows)
    update.add([made, table, record], drop=[name for each in gone for name in (each.file, each.blocks)])
    return record


def _like(base: FileRecord, memory: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    """Make the beginning of the name of a file in place of another one, and options of its writer."""
    return re.sub(r"\.\d+\.rows$", "", base.name), {"kind": base.kind, "dtype": base.dtype, "buffer_bytes": memory[1]}


def insert_rows(
    update: Update,
    base: FileRecord,
    old: Rows,
    at: int,
    n: int,
    take: Callable[[int, int], Uint8s],
    memory: tuple[int, int],
    progress: Callable[[int], None],
) -> FileRecord:
    """Write a file anew with ``n`` more rows before row ``at``, and register it; return its record.

    ``take`` is as for :class:`NewRows`; the other parameters are those of :func:`patch_rows`.
    """
    stem, options = _like(base, memory)
    step = max(1, memory[0] // (base.layout.row_bytes + _ROW_BYTES))

    def stored(first: int, k: int) -> Uint8s:
        out = np.empty((k, old.row_bytes), np.uint8)
        old.gather(range(first, first + k), out)
        return out

    with update.writer(stem, base.layout, **options) as writer:
        for begin, stop, rows in ((0, at, stored), (0, n, take), (at, base.total_rows, stored)):
            for first in range(begin, stop, step):
                found = rows(first, min(step, stop - first))
                writer.write(found)
                progress(found.nbytes)
        made = writer.commit()
    update.add([made], drop=[base.name])
    return made


def update_rows(
    root: str,
    opened: Catalog,
    key: str,
    n_ids: int,
    make: Callable[[], NewRows],
    old: Rows,
    tables: Callable[[str], Int64s],
    *,
    budget: Budget,
    progress: bool,
    own: FileLock | None,
) -> tuple[Catalog, list[str]]:
    """Write new rows of a field, and commit them; return the new catalog, and the keys of all fields in the same file.

    ``make`` makes the new rows of ``n_ids`` ids, when there is room. ``opened`` is the commit of which ``old`` are the rows. See
    :class:`Update` for ``own``. BusyError if another handle has changed the field since.
    """
    block_bytes, buffer_bytes = room_for(budget, old.row_bytes)
    unit_bytes = (old.layout.block[1] << 12) + _ROW_BYTES * old.layout.block[0]
    held = 3 * max(block_bytes // 4, unit_bytes) + buffer_bytes + (2 << 20) + _ID_BYTES * n_ids
    with contextlib.ExitStack() as stack:
        stack.enter_context(budget.reserve(HOLDER, held))
        new = make()
        update = stack.enter_context(Update(root, own))
        catalog = update.catalog
        check_same_graph(opened, catalog, root)
        record = opened.fields[key]
        base = opened.files[record.parts[0].file]
        if catalog.fields.get(key) != record or catalog.files.get(base.name) != base:
            raise BusyError(f"the rows of {record.name!r} were changed since the dataset was opened: open it again", root)
        with Progress(f"update {record.name}", len(new.ids) * old.row_bytes, progress) as bar:
            made = patch_rows(update, base, old, new, tables, (block_bytes // 4, buffer_bytes), bar.add)
        fields = fields_in(catalog.fields, base.name)
        update.add([], [moved(each, made, update.generation) for each in fields])
        return update.commit(), [each.key for each in fields]


def fields_in(fields: Mapping[str, FieldRecord], name: str) -> list[FieldRecord]:
    """List the fields whose rows lie in a file."""
    return [each for each in fields.values() if any(part.file == name for part in each.parts)]


def moved(field: FieldRecord, file: FileRecord, generation: int, by: int = 0) -> FieldRecord:
    """Make the record of a field whose file was changed or written anew, with its rows ``by`` rows further on."""
    parts = tuple(FieldPart(file.name, part.first, part.rows, part.at if not by else (part.at or 0) + by) for part in field.parts)
    return replace(field, generation=generation, parts=parts)
