"""The feature store: a tensor whose rows lie on disk."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.rows import is_writable
from featstore.cache.base import OnlinePolicy
from featstore.cache.table import NO_POSITIONS
from featstore.errors import BudgetError, ClosedError
from featstore.gather.ahead import AheadSource
from featstore.gather.buffers import BufferPool, carve
from featstore.gather.executor import Executor, FileSource, MemorySource, Source, Tally
from featstore.gather.plan import BatchPlan, Changeset, Tier
from featstore.graph.rowindex import resolve_rows
from featstore.graph.torchfunctions import torch_function
from featstore.storage.reader import Reader
from featstore.storage.rowfile import ReadStats, RowFile

if TYPE_CHECKING:
    from featstore.cache.table import FeatureCache

__all__ = ["FeatureStore"]

# A gather through a cache is planned in parts, so that the plan's arrays (28 bytes a row) stay small beside the rows.
MOST_ROWS_AT_ONCE = 1 << 21  # as many as the reader sorts at once: a page is read once a part
# The plan of so few is ordinary memory, which is never refused: a gather ends, however short the budget is.
FEWEST_ROWS_AT_ONCE = 512
PLAN_BYTES = 28  # a row, of what FeatureCache.plan() makes
_MEMORY = frozenset({Tier.HOST})
_DISK = frozenset({Tier.BASE})
_OTHERS = frozenset(Tier) - _MEMORY


def _scratch_bytes(cache: FeatureCache, n_rows: int) -> int:
    """Return the bytes of the arrays that a gather of ``n_rows`` through a cache makes."""
    ids_bytes = 8 if isinstance(cache.policy, OnlinePolicy) else 0
    return (PLAN_BYTES + ids_bytes) * n_rows + cache.admit_bytes(n_rows) + 128  # each array begins at a multiple of 8


def _byte_rows(tensor: torch.Tensor, n_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """View a contiguous CPU tensor as rows of bytes."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride, which reshape() keeps
    return np.asarray(flat.view(torch.uint8).numpy()).reshape(n_rows, row_bytes)


def _overlap(ids: npt.NDArray[np.int64], out: torch.Tensor) -> bool:
    """Return whether two dense arrays have memory in common."""
    first, other = ids.ctypes.data, out.data_ptr()
    return first < other + out.nbytes and other < first + ids.nbytes


class FeatureStore:
    """A tensor of shape ``(n_rows, *row_shape)`` that is read from disk as it is indexed. Read-only and thread-safe.

    Made by a dataset: ``g.features["x"]``. It pickles as path and options, so it travels to DataLoader workers.

    Attributes
    ----------
    shape : torch.Size
    dtype : torch.dtype
    ndim, nbytes : int
    device : torch.device
        Always ``cpu``.
    """

    def __init__(
        self,
        name: str,
        file: RowFile,
        shape: Sequence[int],
        dtype: torch.dtype,
        reader: Reader,
        pool: BufferPool,
        n_threads: int,
        reopen: Callable[[], tuple[Callable[..., FeatureStore], tuple[Any, ...]]] | None = None,
    ) -> None:
        self.name = name
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.ndim = len(self.shape)
        self.nbytes = self.shape.numel() * dtype.itemsize
        self.device = torch.device("cpu")
        self._file = file
        self._reader = reader
        self._pool = pool
        self._n_threads = n_threads
        self._reopen = reopen
        # One attribute, so that a gather beside use_cache() never plans by one cache and copies from another.
        self._tiers: tuple[FeatureCache | None, Executor] = None, Executor({Tier.BASE: FileSource(file)})
        self._is_closed = False
        self._n_takes = 0
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None

    # -- what a tensor has ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or the length of one dimension, as ``Tensor.size`` does."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"FeatureStore({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, backend={self._reader.backend!r})"

    def __contains__(self, value: object) -> bool:
        raise TypeError("a FeatureStore is not searched by value; read rows and compare them")

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = max(1, (1 << 20) // max(1, self._file.row_bytes))
        for first in range(0, len(self), step):
            yield from self[first : first + step].unbind(0)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("the rows lie on disk: an array of them is always a copy")
        array = self[:].numpy()
        return np.asarray(array if dtype is None else array.astype(dtype, copy=False))

    # -- reading ----------------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return rows by NumPy's rules for the first axis.

        Parameters
        ----------
        index : int, slice, integer array-like of any shape, or boolean mask of shape (n_rows,)
            Negative ids count from the end; repeats and any order are allowed.

        Returns
        -------
        Tensor of self.dtype, shape (*index.shape, *row_shape)

        Raises
        ------
        IndexError
            An id out of range (named, with its position), before anything is read.
        TypeError
            Not an index.
        CorruptionError, OSError, BudgetError, ClosedError
            See :meth:`take`.
        """
        rows, lead = resolve_rows(index, len(self))
        out = self._pool.tensor((len(rows), *self.shape[1:]), self.dtype)
        self._fill(rows, out, None)
        return out[0] if lead is None else out.reshape(*lead, *self.shape[1:])

    def take(
        self, rows: Any, out: torch.Tensor | None = None, coalesce_gap: int | None = None, *, tally: Tally | None = None
    ) -> torch.Tensor:
        """Read feature rows into memory.

        Parameters
        ----------
        rows : integer array-like, shape (n,)
            Row ids in ``[-len(self), len(self))``; any order, repeats allowed.
        out : Tensor of self.dtype, shape (n, *row_shape), optional
            C-contiguous CPU destination, which may be pinned, and may be the memory of ``rows``; pooled memory if absent.
        coalesce_gap : int, optional
            Unneeded bytes between two pages that are read over instead of starting another read. 0: none. By default as measured.
        tally : Tally, optional
            Receives the counts of this call alone; loaders use it.

        Returns
        -------
        Tensor of self.dtype, shape (n, *row_shape)
            ``out`` if given. Row ``i`` is feature ``rows[i]``, bit for bit.

        Raises
        ------
        IndexError
            An id is out of range; raised before any read is issued, and names the id.
        TypeError, ValueError
            ``out`` does not fit; before any read.
        CorruptionError
            A checksum differs or a read came short; ``out`` is then undefined.
        OSError
            The drive failed; ``errno`` and ``filename`` are set.
        BudgetError
            No memory for the result within the budget; pass ``out``.
        ClosedError
            The dataset was closed.

        Notes
        -----
        At most one read per distinct missing 4 KiB page and 2 million rows. Releases the GIL. Thread-safe.
        """
        ids, lead = resolve_rows(rows, len(self))
        if lead is None:
            raise TypeError("take() wants an array of rows; use store[i] for one")
        shape = (*lead, *self.shape[1:])
        if coalesce_gap is not None and coalesce_gap < 0:
            raise ValueError(f"coalesce_gap must be at least 0, not {coalesce_gap}")
        if out is None:
            out = self._pool.tensor(shape, self.dtype)
        else:
            self._check_out(out, shape)
            if isinstance(ids, np.ndarray) and _overlap(ids, out):
                ids = ids.copy()  # asking whether out may be written to, and filling it, changes them
            if not is_writable(out.data_ptr(), out.nbytes):
                raise ValueError("out must be writable, not a read-only mapping")
        self._fill(ids, out, coalesce_gap, tally)
        return out

    def _check_out(self, out: torch.Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out must be a torch.Tensor, not {type(out).__name__}")
        if out.dtype != self.dtype:
            raise TypeError(f"out must have dtype {self.dtype}, not {out.dtype}")
        if out.device.type != "cpu" or out.layout != torch.strided:
            raise ValueError(f"out must be a dense CPU tensor, not {out.layout} on {out.device}")
        if tuple(out.shape) != shape:
            raise ValueError(f"out must have shape {shape}, not {tuple(out.shape)}")
        if not out.is_contiguous():
            raise ValueError("out must be C-contiguous")
        if out.requires_grad:
            raise ValueError("out must not require grad")

    def take_async(self, rows: Any) -> Future[torch.Tensor]:
        """Start :meth:`take` in the background, and return a future of its tensor. The ids are checked and copied at once."""
        ids, lead = resolve_rows(rows, len(self))
        if lead is None:
            raise TypeError("take_async() wants an array of rows")
        if isinstance(ids, np.ndarray):
            ids = ids.copy()  # the caller may change his array at once
        if self._pid != os.getpid():
            self._start()

        def run() -> torch.Tensor:
            out = self._pool.tensor((*lead, *self.shape[1:]), self.dtype)
            self._fill(ids, out, None)
            return out

        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self._file.path} is closed")
            if self._workers is None:
                self._workers = ThreadPoolExecutor(2, thread_name_prefix="featstore-take")
                weakref.finalize(self, self._workers.shutdown, wait=False)
            return self._workers.submit(run)

    def _fill(
        self, rows: npt.NDArray[np.int64] | range, out: torch.Tensor, gap_bytes: int | None, tally: Tally | None = None
    ) -> None:
        n = len(rows)
        if n == 0:
            self._file.check_open()
            return
        row_bytes = self._file.row_bytes
        buffer = _byte_rows(out, n, row_bytes)
        self._n_takes += 1
        while True:
            tiers = self._tiers
            try:
                self._fill_from(tiers, rows, buffer, gap_bytes, tally)
                return
            except ClosedError:
                if tiers is self._tiers:
                    raise
                # That cache was replaced meanwhile: again by the new one.

    def _fill_from(
        self,
        tiers: tuple[FeatureCache | None, Executor],
        rows: npt.NDArray[np.int64] | range,
        buffer: npt.NDArray[np.uint8],
        gap_bytes: int | None,
        tally: Tally | None,
    ) -> None:
        cache, executor = tiers
        if cache is None:
            if isinstance(rows, range):
                self._file.read(rows.start, len(rows), buffer)
                return
            cost = self._file.gather(rows, buffer, None, gap_bytes)
            if tally is not None:
                tally.read.add(cost)
                tally.count(Tier.BASE, len(rows))
            return
        if gap_bytes is not None:
            executor = Executor({**executor.sources, Tier.BASE: FileSource(self._file, gap_bytes)})
        done, at_once = 0, MOST_ROWS_AT_ONCE
        while done < len(rows):
            part = rows[done : done + at_once]
            try:
                # Before anything has changed: what was gathered can then be admitted, too.
                scratch = self._pool.array(_scratch_bytes(cache, len(part)), np.uint8)
            except BudgetError:
                self._pool.trim()
                at_once = max(len(part) // 2, FEWEST_ROWS_AT_ONCE)
                continue
            ids = np.arange(part.start, part.stop, dtype=np.int64) if isinstance(part, range) else part
            self._fill_cached(cache, executor, ids, buffer[done : done + len(ids)], tally, carve(scratch))
            done += len(ids)

    def _fill_cached(
        self,
        cache: FeatureCache,
        executor: Executor,
        ids: npt.NDArray[np.int64],
        buffer: npt.NDArray[np.uint8],
        tally: Tally | None,
        room: Callable[[int, npt.DTypeLike], npt.NDArray[Any]],
    ) -> None:
        """Gather through the cache; ``room`` makes the arrays, of :func:`_scratch_bytes` in all."""
        if isinstance(cache.policy, OnlinePolicy):
            # What is read is what is admitted, though the caller changes his array meanwhile: others use the cache.
            given, ids = ids, room(len(ids), np.int64)
            np.copyto(ids, given)
        # Slots may change hands as soon as they are not pinned: hits are copied before any admission.
        with cache.pinned():
            plan = cache.plan(ids, room)
            executor.execute(plan, buffer, _MEMORY)
        executor.execute(plan, buffer, _DISK, tally)
        misses = next((part for part in plan.parts if part.tier == Tier.BASE), None)
        if misses is None:
            cache.admit(ids[:0])  # raises what a policy did wrong when it was told of the hits
        else:
            begin = time.perf_counter()
            changes = cache.admit(np.asarray(misses.addresses, np.int64), misses.positions, room)
            self._apply(cache, changes, buffer, tally, begin)
        if tally is not None:
            tally.count_plan(plan)

    @staticmethod
    def _apply(
        cache: FeatureCache, changes: Changeset | None, buffer: npt.NDArray[np.uint8], tally: Tally | None, begin: float
    ) -> None:
        """Change the cache; the seconds since ``begin`` are the update's, where there is one."""
        cache.apply(changes, buffer)
        if tally is not None and changes is not None:
            tally.update_s += time.perf_counter() - begin

    def read_rows(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> ReadStats:
        """Read rows from the file, past the cache, as bytes; return what it cost.

        Parameters
        ----------
        rows : int64 array, shape (k,)
            In ``[0, len(self))``.
        out : uint8 array, shape (k, row_bytes), C-contiguous

        Raises
        ------
        IndexError, CorruptionError, OSError, BudgetError, ClosedError
            ``out`` is then undefined.
        """
        return self._file.gather(rows, out)

    def run_plan(
        self,
        plan: BatchPlan,
        ids: npt.NDArray[np.int64],
        tally: Tally | None = None,
        ahead: npt.NDArray[np.uint8] | None = None,
        sources: Mapping[Tier, Source] | None = None,
    ) -> torch.Tensor:
        """Gather a planned batch and apply the plan's changes to the host cache.

        Parameters
        ----------
        plan : BatchPlan
            Made by an inspector for this store's cache as it is now; plans run in the order in which they were made, by one
            thread.
        ids : int64 array, shape (plan.n_rows,)
            The batch's rows: hits whose slots the cache has given back meanwhile are read from the file.
        tally : Tally, optional
            Gets what this call came to.
        ahead : uint8 array, shape (k, row_bytes), optional
            The rows that the plan reads from the file, read already (:class:`~featstore.gather.ahead.ReadAhead`).
        sources : mapping of Tier to Source, optional
            The tiers ``PACKED`` and ``DISK_CACHE``, for plans that use them.

        Returns
        -------
        Tensor of self.dtype, shape (plan.n_rows, *row_shape)

        Raises
        ------
        CorruptionError, OSError, BudgetError, ClosedError
            As :meth:`take`; the cache is then as before the call.
        """
        out = self._pool.tensor((plan.n_rows, *self.shape[1:]), self.dtype)
        if plan.n_rows:
            buffer = _byte_rows(out, plan.n_rows, self._file.row_bytes)
            self._n_takes += 1
            cache, executor = self._tiers
            if ahead is not None:
                executor = Executor({**executor.sources, Tier.BASE: AheadSource(ahead, self._n_threads)})
            if sources:
                executor = Executor({**executor.sources, **sources})
                if cache is not None:
                    # Two cores read extents and plans; a copying thread that waits for one of them holds up the others.
                    executor.sources[Tier.HOST] = MemorySource(cache.array, max(1, self._n_threads - 2))
            lost = NO_POSITIONS
            if cache is not None:
                with cache.pinned():
                    plan, lost = cache.surviving(plan)
                    executor.execute(plan, buffer, _MEMORY, tally)
            if len(lost):
                # Hits in slots that the cache has given back since the plan was made. Before an extent is read, which is read
                # once: for lack of memory this may be tried again.
                cost = self._file.gather(np.asarray(ids, np.int64)[lost], buffer, lost)
                if tally is not None:
                    tally.read.add(cost)
                    tally.count(Tier.BASE, len(lost))
            executor.execute(plan, buffer, _OTHERS, tally)
            if cache is not None:
                cache.count(plan)
                self._apply(cache, plan.changes, buffer, tally, time.perf_counter())
            if tally is not None:
                tally.count_plan(plan)
        elif plan.changes is not None and self.cache is not None:  # of no rows, and yet some may leave
            self.cache.apply(plan.changes, np.empty((0, self._file.row_bytes), np.uint8))
        return out

    # -- torch ------------------------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        return torch_function(func, args, kwargs or {})

    # -- torch.utils.data -------------------------------------------------------------------------------------------------------

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """Return rows for a DataLoader, in one gather; its fetcher calls this once a batch."""
        return list(self[indices].unbind(0))

    def __call__(self, indices: Any) -> torch.Tensor:
        """Return ``self[indices]``: a store is a ``collate_fn`` for a DataLoader over ids."""
        return self[indices]

    # -- life -------------------------------------------------------------------------------------------------------------------

    def use_cache(self, cache: FeatureCache | None) -> None:
        """Gather through a host cache from now on (None: no longer); datasets call this."""
        sources: dict[Tier, Any] = {Tier.BASE: FileSource(self._file)}
        if cache is not None:
            sources[Tier.HOST] = MemorySource(cache.array, self._n_threads)
        self._tiers = cache, Executor(sources)

    @property
    def file(self) -> RowFile:
        """The file of its rows."""
        return self._file

    @property
    def cache(self) -> FeatureCache | None:
        """The host cache in use."""
        return self._tiers[0]

    def stats(self) -> dict[str, Any]:
        """Return the backend and the reason for it, the mode, counts of rows, reads and bytes, and the counts of the cache."""
        counts = self._file.stats
        result: dict[str, Any] = {
            "backend": self._reader.backend,
            "reason": self._reader.reason,
            "mode": self._file.mode,
            "takes": self._n_takes,
            "rows_loaded": counts.rows,
            "reads": counts.reads,
            "bytes_requested": counts.bytes_requested,
            "bytes_read": counts.bytes_read,
        }
        cache = self.cache
        if cache is not None:
            result["cache"] = cache.stats()
        return result

    def close(self) -> None:
        """Wait for reads under way, then refuse more; may be called again."""
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            self._is_closed = True
            workers = self._workers
        if workers is not None:
            workers.shutdown(wait=True)
        self._file.close()

    def __reduce__(self) -> tuple[Callable[..., FeatureStore], tuple[Any, ...]]:
        if self._reopen is None:
            raise ClosedError("this store was not opened from a dataset and cannot be pickled")
        return self._reopen()
