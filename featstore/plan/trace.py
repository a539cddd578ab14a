"""Traces: the rows that each batch of a run asks for, in memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.distinct import first_bad
from featstore.cache.planned import Horizon
from featstore.config import check_at_least, user_path
from featstore.distinct import distinct
from featstore.gather.arrays import id_array
from featstore.sampling.batch import Sampler
from featstore.sampling.foreign import checked_sampler
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, replacing
from featstore.topology.noderows import NodeRows

__all__ = ["Trace", "lengths_of", "record"]

Ints = npt.NDArray[Any]

KIND = "trace"
_NO_BITS = np.empty(0, np.uint64)


def _checked(ids: npt.ArrayLike | torch.Tensor, n: int, bits: npt.NDArray[np.uint64] = _NO_BITS) -> tuple[Ints, bool]:
    """Check the ids of a batch, and narrow them to int32 where ``n`` allows; return them, and whether an id comes twice.

    Repeated ids are found with ``bits``, one a row; without ``bits`` they are not looked for.
    """
    array = id_array("a batch of a trace", ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"a batch of a trace is a 1-D integer array, not {array.dtype} of {array.ndim} dimensions")
    is_narrow = n < 2**31
    # A uint64 beyond int64 becomes negative here, and is found as out of range.
    rows = np.ascontiguousarray(array, np.int32 if is_narrow and np.can_cast(array.dtype, np.int32) else np.int64)
    narrowed = np.empty(len(rows), np.int32) if is_narrow and rows.dtype != np.int32 else None
    bad = first_bad(rows, n, narrowed, bits)
    if bad >= 0 and not 0 <= array[bad] < n:
        why = "rows are numbered from 0" if array[bad] < 0 else f"out of range for {n} rows"
        raise IndexError(f"row {array[bad]} at position {bad}: {why}")
    return rows if narrowed is None else narrowed, bad >= 0


def _distinct(batches: Sequence[Ints], n: int) -> list[Ints]:
    """Check and narrow batches. ValueError: a batch names a row twice.

    Repeated rows are found with a bit a row, or by sorting if the rows far outnumber the accesses.
    """
    by_bits = n <= 64 * sum(array.size for array in batches)
    bits = np.zeros(n // 64 + 1, np.uint64) if by_bits else _NO_BITS
    narrowed = []
    for number, array in enumerate(batches):
        rows, is_twice = _checked(array, n, bits)
        if is_twice or (not by_bits and len(distinct(rows)) < len(rows)):
            raise ValueError(f"batch {number} names a row twice; a trace lists each row of a batch once")
        narrowed.append(rows)
    return narrowed


def lengths_of(ids: Callable[[int], Ints], n_batches: int) -> npt.NDArray[np.int64]:
    """Count the rows of each batch by reading them: files of samples know the lengths of nodes alone, not of their rows."""
    return np.array([len(ids(number)) for number in range(n_batches)], np.int64)


class Trace(Sequence[Ints]):
    """The distinct rows of each batch, in order.

    ``batches`` are integer arrays in memory; :meth:`open` reads them from a file instead, a batch at a time. The field has
    ``n`` rows, by default one more than the largest id. ValueError: a batch names a row twice.
    """

    _file: SectionFile | None = None

    def __init__(self, batches: Sequence[npt.ArrayLike | torch.Tensor], n: int | None = None) -> None:
        arrays = [id_array(f"batch {number}", batch) for number, batch in enumerate(batches)]
        # Arrays of other dtypes have no largest id; they are refused below.
        n = max((int(a.max()) + 1 for a in arrays if a.size and a.dtype.kind in "iu"), default=0) if n is None else n
        n = check_at_least("n", n, 0)
        if n >= 2**63:
            raise IndexError(f"row {n - 1} is beyond 64 bits")
        checked = _distinct(arrays, n)
        self._set(checked.__getitem__, np.array([len(array) for array in checked], np.int64), n)

    def _set(self, ids: Callable[[int], Ints], lengths: npt.NDArray[np.int64], n: int) -> None:
        self._ids, self.n = ids, n
        self.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Trace:
        """Open a trace file of :func:`record` or :meth:`save`. A batch is read and checked when it is asked for."""
        file = SectionFile(user_path(path), KIND)
        trace = cls.reading(lambda number: file[number + 1], file.lengths[1:], int(file[0][0]))
        trace._file = file
        return trace

    @classmethod
    def reading(cls, ids: Callable[[int], Ints], lengths: npt.NDArray[np.int64], n: int) -> Trace:
        """Make a trace whose batch ``number`` is read by ``ids(number)``: ``lengths[number]`` distinct rows."""
        trace = cls.__new__(cls)
        trace._set(ids, lengths, n)
        return trace

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, durably, in place of any earlier file."""
        _write(path, self.n, self)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        """Return the rows of batch ``index``, int32 (int64 from 2³¹ rows on)."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} is out of range for {len(self)} batches")
        return self._ids(index % len(self))

    def __iter__(self) -> Iterator[Ints]:
        for index in range(len(self)):
            yield self[index]

    @property
    def n_accesses(self) -> int:
        """Number of rows asked for, over all batches."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of rows that each batch asks for, int64."""
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """Number of rows that the largest batch asks for."""
        return int(self.lengths.max(initial=0))

    def head(self, n_batches: int) -> Trace:
        """Make a trace of the first ``n_batches`` batches, or of all if there are fewer; it reads from this one."""
        return Trace.reading(self.__getitem__, self.lengths[:n_batches], self.n)

    def horizon(self) -> Horizon:
        """Return the whole trace as the horizon of a planned policy."""
        return Horizon(self.n, self.offsets, self.__getitem__, len(self))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()


def _write(path: str | os.PathLike[str], n: int, batches: Iterable[Ints], disk: DiskQuota | None = None) -> None:
    """Write a trace file for a field of ``n`` rows; each batch lists distinct rows."""
    with replacing(user_path(path), KIND, disk) as writer:
        writer.append(np.array([n], np.int64))
        for batch in batches:
            writer.append(_checked(batch, n)[0])


def record(
    sampler: Sampler,
    batches: Iterable[torch.Tensor],
    n: int,
    path: str | os.PathLike[str] | None = None,
    epoch: int = 0,
    disk: DiskQuota | None = None,
    rows: NodeRows | None = None,
) -> Trace:
    """Sample batches and record the rows that each asks for, in memory, or in a trace file at ``path``.

    ``batches`` has the seeds of each batch, in the epoch's order; ``n`` is the number of nodes. ``rows`` are the rows of the
    field that nodes have, by default one each. A file is written a batch at a time, and counts against ``disk``. PluginError:
    the sampler did not return a batch of ``n`` nodes.
    """
    checked, of = checked_sampler(sampler, n), NodeRows(n) if rows is None else rows
    nodes = (checked.sample(seeds, epoch=epoch, index=index).input_ids for index, seeds in enumerate(batches))
    samples = (of.stored(ids.numpy()) for ids in nodes)
    if path is None:
        return Trace([ids.astype(np.int32 if of.n < 2**31 else np.int64) for ids in samples], of.n)
    _write(path, of.n, samples, disk)
    return Trace.open(path)
