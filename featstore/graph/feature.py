"""The feature store, a tensor whose rows lie on disk."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from featstore._core.rows import is_writable
from featstore.cache.gather import Gather
from featstore.cache.table import FeatureCache
from featstore.config import check_at_least, no_attribute
from featstore.display import Display, ShownAsTables, Stats
from featstore.errors import BudgetError, ClosedError
from featstore.gather.buffers import BufferPool, as_bytes
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import BatchPlan, Tier
from featstore.gather.rowblocks import row_blocks
from featstore.gather.rowindex import as_index_array, resolve_rows
from featstore.gather.sources import RowSource, check_source
from featstore.gather.tupleindex import select
from featstore.graph.showing import show_store
from featstore.registry import is_plugin
from featstore.storage.pagestream import PagedRows
from featstore.storage.reader import Reader
from featstore.topology.part import Part

__all__ = ["FeatureStore"]


P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that ``torch.compile`` breaks its graph at the call and does not trace the function.

    Tracing would replace NumPy's calls by torch's, and reuse the memory of one call's tensors for the next.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # At the call, not at definition: disable() imports the compiler, which takes seconds.
            return cast(T, torch.compiler.disable(function)(*args, **kwargs))  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return call


def _overlap(ids: npt.NDArray[np.int64], out: torch.Tensor) -> bool:
    """Check whether two dense arrays share memory."""
    first, other = ids.ctypes.data, out.data_ptr()
    return first < other + out.nbytes and other < first + ids.nbytes


class FeatureStore(ShownAsTables, Dataset[torch.Tensor]):
    """A tensor of shape ``(n_rows, *row_shape)`` that is read from disk as it is indexed. Thread-safe.

    A dataset makes its stores: ``g.features["x"]``. A store does not change: :meth:`update` changes rows in the dataset, and
    returns a store of the new ones. A store is a map-style dataset of its rows. It pickles as path and options, so that
    DataLoader workers can receive it.

    Attributes
    ----------
    shape : torch.Size
    dtype : torch.dtype
    ndim, nbytes : int
    device : torch.device
        Always ``cpu``.
    row_bytes : int
    """

    def __init__(
        self,
        name: str,
        source: RowSource,
        shape: Sequence[int],
        dtype: torch.dtype,
        reader: Reader,
        pool: BufferPool,
        n_threads: int,
        reopen: Callable[[], tuple[Callable[..., FeatureStore], tuple[Any, ...]]] | None = None,
        part: Part | None = None,
        change: Callable[[Any, Any, bool], FeatureStore] | None = None,
    ) -> None:
        self.name = name
        self._change = change
        self._part = part  # which has the only nodes whose rows may be read; loaders check their batches themselves
        self.shape = torch.Size(shape)
        self._row_shape = tuple(self.shape[1:])
        self.dtype = dtype
        self.ndim = len(self.shape)
        self.nbytes = self.shape.numel() * dtype.itemsize
        self.device = torch.device("cpu")
        if is_plugin(source):
            check_source(source, len(self), self.nbytes // max(1, len(self)))
        self.row_bytes = source.row_bytes
        self._reader = reader
        self._pool = pool
        self._gather = Gather(source, pool, n_threads)
        self._reopen = reopen
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None

    # -- attributes of a tensor -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def size(self) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Get the shape, or the length of one dimension, as ``Tensor.size`` does."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Get the number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Get the number of elements."""
        return self.shape.numel()

    def _display(self) -> Display:
        state = ", closed" if self._is_closed else ""
        what = f"{self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, backend={self._reader.backend!r}"
        return show_store(self, f"FeatureStore({what}{state})", self._is_closed)

    def __add__(self, other: object) -> NoReturn:
        raise TypeError("a FeatureStore is not computed with; read rows, and add to them")

    def __setitem__(self, index: object, rows: object) -> NoReturn:
        raise TypeError("rows of a FeatureStore are not assigned: store.update(ids, rows) changes the dataset, in one commit")

    if not TYPE_CHECKING:  # for a type checker __getattr__ would define every name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property failed: with the error of its own
                return object.__getattribute__(self, name)
            is_torchs = not name.startswith("_") and hasattr(torch.Tensor, name)
            raise no_attribute(self, name, "rows are on disk: it is there for store[ids]" if is_torchs else "")

    def __contains__(self, value: object) -> bool:
        raise TypeError("a FeatureStore is not searched by value; read rows and compare them")

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = max(1, (1 << 20) // max(1, self.row_bytes))
        for first in range(0, len(self), step):
            yield from self[first : first + step].unbind(0)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("the rows lie on disk: an array of them is always a copy")
        array = self.numpy()
        return np.asarray(array if dtype is None else array.astype(dtype, copy=False))

    def __dlpack__(self, *, copy: bool | None = None, **options: Any) -> Any:
        if copy is False:
            raise BufferError("the rows lie on disk: a tensor of them is always a copy")
        return self[:].__dlpack__(**options)  # one read; torch.as_tensor would read row after row

    def __dlpack_device__(self) -> tuple[Any, int]:
        return torch.empty(0, device="cpu").__dlpack_device__()

    # -- reading ----------------------------------------------------------------------------------------------------------------

    @property
    def own_part(self) -> Part | None:
        """The part of a graph that has these rows, and no others; None: all rows are there."""
        return self._part

    @uncompiled
    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read rows, or parts of rows, by NumPy's rules.

        Parameters
        ----------
        index : int, slice, integer array-like of any shape, boolean mask, ellipsis, None, or tuple of these
            Negative ids count from the end; repeats and any order are allowed. ``store[ids, 3:5]`` takes columns of rows,
            ``store[ids, columns]`` one number of each row, as in NumPy.

        Returns
        -------
        Tensor of self.dtype
            Of the shape that NumPy's result has; for rows alone ``(*index.shape, *row_shape)``. It is a copy, never a view.

        Raises
        ------
        IndexError
            An id or a position is out of range (the error names it), a mask does not fit, arrays do not broadcast together, or a
            row is not in the part of which the graph is a view. Raised before any read.
        TypeError
            ``index`` is no index, or is a ``torch.uint8`` tensor, which may mean a mask or ids.
        CorruptionError, OSError, BudgetError, ClosedError
            See :meth:`take`.

        Notes
        -----
        Rows are read whole, where parts of them are taken, 8 MiB at a time beside the result.
        """
        if isinstance(index, list):
            index = as_index_array(index)
        selection = select(index, self.shape)
        if selection is not None:
            with self._naming_enough():
                return selection.read(self._gather_checked, self._pool, self.dtype)
        rows, lead = self._resolve(index)
        return self._read(rows, lead)

    def _resolve(self, index: Any) -> tuple[npt.NDArray[np.int64] | range, tuple[int, ...] | None]:
        """Turn a user's index into rows as :func:`resolve_rows` does; IndexError for a row that the part has not."""
        part = self._part  # stays valid if another thread closes
        self._check_open()
        rows, lead = resolve_rows(index, self.shape)
        if part is not None:
            part.check(rows)
        return rows, lead

    def _gather_checked(self, rows: npt.NDArray[np.int64] | range, out: npt.NDArray[np.uint8]) -> None:
        """Read rows into ``out``; IndexError for one that the part has not."""
        part = self._part
        self._check_open()
        if part is not None:
            part.check(rows)
        self._gather.rows(rows, out)

    def _check_open(self) -> None:
        if self._is_closed:  # the source may be open: that of a view is the graph's
            raise ClosedError(f"{self.source.path} is closed")

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Read all rows once, in order, at the drive's rate.

        Parameters
        ----------
        rows : int, optional
            Rows a block, of which the last may have fewer. By default 8 MiB of rows, fewer if the budget has little left.

        Returns
        -------
        iterator of (int, Tensor of self.dtype, shape (k, *row_shape))
            The first row of each block, and its rows, each bit for bit.

        Raises
        ------
        ValueError, IndexError
            ``rows`` is less than 1; a row is not in the part of which the graph is a view.
        BudgetError
            From the loop: three blocks do not fit the budget, or blocks that were kept fill it.
        CorruptionError, OSError, ClosedError
            From the loop: see :meth:`take`.

        Notes
        -----
        Up to 32 MiB are read ahead, and a thread fills the next block while the loop has one. Small blocks are views of 8 MiB,
        whose memory goes back when all of them are gone. The feature's cache is neither used nor changed. A forked child reads on
        by itself.
        """
        if rows is not None:
            rows = min(check_at_least("rows", rows, 1), max(1, len(self)))
        self._check_open()
        self.source.check_open()
        if self._part is not None:
            self._part.check(range(len(self)))
        return self._blocks(rows)

    def _blocks(self, rows: int | None) -> Iterator[tuple[int, torch.Tensor]]:
        with self._naming_enough():
            yield from row_blocks(self.source, self._pool, self._row_shape, self.dtype, rows)

    def numpy(self) -> npt.NDArray[Any]:
        """Read all rows into an array, in pooled memory that counts in the budget while the array lives.

        Raises
        ------
        BudgetError
            They do not fit; ``needed`` is a budget that suffices. :meth:`blocks` reads them piece by piece.
        TypeError
            NumPy lacks the dtype, bfloat16.
        CorruptionError, OSError, ClosedError
            See :meth:`take`.
        """
        if self.dtype == torch.bfloat16:
            raise TypeError(f"NumPy has no bfloat16, of which {self.name!r} is: take store[:], or store[:].float().numpy()")
        with self._naming_enough():
            return self[:].numpy()

    @uncompiled
    def take(self, rows: Any, out: torch.Tensor | None = None, coalesce_gap: int | None = None) -> torch.Tensor:
        """Read feature rows into memory.

        Parameters
        ----------
        rows : integer array-like, shape (n,)
            Row ids in ``[-len(self), len(self))``; any order, repeats allowed.
        out : Tensor of self.dtype, shape (n, *row_shape), optional
            C-contiguous CPU destination, which may be pinned, and may be the memory of ``rows``; pooled memory if absent.
        coalesce_gap : int, optional
            Largest gap, in bytes, between two needed pages that one read covers instead of two; 0 for none. By default derived
            from the drive's measured speed.

        Returns
        -------
        Tensor of self.dtype, shape (n, *row_shape)
            ``out`` if given. Row ``i`` is feature ``rows[i]``, bit for bit.

        Raises
        ------
        IndexError
            An id is out of range; raised before any read, and names the id.
        TypeError, ValueError
            ``out`` has a wrong dtype, shape or layout; raised before any read.
        CorruptionError
            A checksum differs or a read came short; ``out`` is then undefined.
        OSError
            The drive failed; ``errno`` and ``filename`` are set.
        BudgetError
            The budget has no memory for the result; pass ``out``.
        ClosedError
            The dataset was closed.

        Notes
        -----
        There is at most one read per distinct missing 4 KiB page and 2 million rows. The GIL is released. Thread-safe.
        """
        ids, lead = self._resolve(rows)
        if lead is None:
            raise TypeError("take() wants an array of rows; use store[i] for one")
        shape = (*lead, *self._row_shape)
        if coalesce_gap is not None:
            coalesce_gap = check_at_least("coalesce_gap", coalesce_gap, 0)
        if out is None:
            return self._read(ids, lead, coalesce_gap)
        self._check_out(out, shape)
        if isinstance(ids, np.ndarray) and _overlap(ids, out):
            ids = ids.copy()  # checking whether out is writable, and filling it, overwrites the ids
        if not is_writable(out.data_ptr(), out.nbytes):
            raise ValueError("out must be writable, not a read-only mapping")
        self._gather.rows(ids, as_bytes(out, self.row_bytes), gap_bytes=coalesce_gap)
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

    @uncompiled
    def take_async(self, rows: Any) -> Future[torch.Tensor]:
        """Start :meth:`take` in the background; return a future of its tensor. The ids are checked and copied at once."""
        ids, lead = self._resolve(rows)
        if lead is None:
            raise TypeError("take_async() wants an array of rows")
        if isinstance(ids, np.ndarray):
            ids = ids.copy()  # the caller may change the array at once
        if self._pid != os.getpid():
            self._start()

        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self.source.path} is closed")
            if self._workers is None:
                self._workers = ThreadPoolExecutor(2, thread_name_prefix="featstore-take")
                weakref.finalize(self, self._workers.shutdown, wait=False)
            return self._workers.submit(self._read, ids, lead)

    @uncompiled
    def gather(
        self,
        ids: torch.Tensor,
        plan: BatchPlan | None = None,
        tiers: Mapping[Tier, RowSource] | None = None,
        counts: GatherCounts | None = None,
        threads: int | None = None,
    ) -> torch.Tensor:
        """Gather the rows of a batch; loaders call this. After a BudgetError the same call may be repeated.

        ``plan`` names the place of each row, see :meth:`~featstore.cache.gather.Gather.planned`; without a plan the places are
        looked up now. Rows that the plan leaves to a device are not in the result. ``tiers`` are the plan's tiers other than the
        cache and the feature's own rows. The counts of this call are added to ``counts``. ``threads`` threads copy
        cached rows, by default the graph's number.
        """
        if plan is None:
            return self._read(*resolve_rows(ids, self.shape), counts=counts, threads=threads)

        def rows_of() -> npt.NDArray[np.int64]:
            mine = ids if plan.device is None else ids[torch.from_numpy(plan.device.others)]
            return np.asarray(resolve_rows(mine, self.shape)[0])

        out, memory = self._pool.rows(plan.n_rows, self.row_bytes, (plan.n_rows, *self._row_shape), self.dtype)
        self._gather.planned(plan, rows_of, memory, counts, tiers, threads)
        return out

    @contextmanager
    def _naming_enough(self) -> Iterator[None]:
        """Let BudgetError name a budget that suffices for the reader's own buffers, too, which grow with the budget."""
        try:
            yield
        except BudgetError as error:
            needed, reader = error.needed, self._reader
            if needed is None:
                raise
            others = needed - reader.held_bytes
            while others + reader.least_bytes(needed) > needed:
                needed = others + reader.least_bytes(needed)
            raise BudgetError(error.reason, needed) from None

    def _read(
        self,
        rows: npt.NDArray[np.int64] | range,
        lead: tuple[int, ...] | None,
        gap_bytes: int | None = None,
        counts: GatherCounts | None = None,
        threads: int | None = None,
    ) -> torch.Tensor:
        """Read rows into pooled memory of shape (*lead, *row_shape), or (*row_shape) for a single row (``lead`` is None)."""
        shape = self._row_shape if lead is None else (*lead, *self._row_shape)
        out, memory = self._pool.rows(len(rows), self.row_bytes, shape, self.dtype)
        self._gather.rows(rows, memory, counts, gap_bytes, threads)
        return out

    # -- torch ------------------------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        return torch_function(func, args, kwargs or {})

    # -- torch.utils.data -------------------------------------------------------------------------------------------------------

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """Read rows for a DataLoader, in one gather; its fetcher calls this once a batch."""
        return list(self[indices].unbind(0))

    def __call__(self, indices: Any) -> torch.Tensor:
        """Read ``self[indices]``, so that a store can be the ``collate_fn`` of a DataLoader over ids."""
        return self[indices]

    def update(self, ids: Any, rows: Any, *, progress: bool = True) -> FeatureStore:
        """Change rows of the feature in the dataset, in one commit.

        Parameters
        ----------
        ids : int, slice, list, integer array of any width, or boolean mask
            The rows to change, as for indexing. Of an id that occurs twice the last row counts, as in NumPy.
        rows : array or Tensor of self.dtype, shape (*shape of ids, *self.shape[1:])
            In memory or memory-mapped. Numbers and lists are cast to the dtype if they are of its kind, or of a simpler one
            (booleans, integers, floats), and in its range.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Returns
        -------
        FeatureStore
            The changed feature, which ``g.features`` has from now on. This store goes on showing the old rows, as loaders use
            it; other handles show the new ones when they are opened again.

        Raises
        ------
        IndexError, TypeError, ValueError
            An id is out of range; rows have a wrong dtype or shape, or numbers do not fit. Nothing is written then.
        NotImplementedError
            The store is of a part, or of rows that no file of the dataset has.
        BudgetError
            The budget has no room for the blocks, or for the ids.
        BusyError
            Another process is writing the dataset, or has changed the feature; or a loader uses the feature's cache.
        CommittedError
            The rows are changed, but making that durable, or opening them, failed.
        CorruptionError, OSError
            Reading old rows failed; the disk is full or failed. The dataset is as it was, and no files are left.

        Notes
        -----
        Rows are not written in place. An update writes the *blocks* that it changes to a new file, a patch: a block is a page
        of 4 KiB, or the few pages that hold a whole number of rows. Patches are merged as they grow, so that there are at most
        eight, and a block is copied a logarithmic number of times. If more than a quarter of the blocks would lie in patches,
        the feature is written anew, so the file at most doubles for a moment. Memory: 48 bytes an id, and a few blocks.
        A cache of the feature in this handle has old rows, so it is dropped: make it again with :meth:`cache`.

        Whatever was made of the old rows is stale: packs, saved layouts, and features that are being made of it. Features that
        were made of it before keep their rows.

        Examples
        --------
        >>> x = x.update([3, 5], torch.zeros(2, x.shape[1]))
        """
        if self._change is None:
            raise NotImplementedError(f"the rows of {self.name!r} are in no file that can be changed: change the whole dataset")
        return self._change(ids, rows, progress)

    # -- life -------------------------------------------------------------------------------------------------------------------

    def use_cache(self, cache: FeatureCache | None) -> None:
        """Use a host cache for gathers from now on, or none if ``cache`` is None; datasets call this."""
        self._gather.use_cache(cache)

    @property
    def source(self) -> RowSource:
        """Source of the rows, without the cache."""
        return self._gather.source

    @property
    def pages(self) -> PagedRows:
        """Source of the rows as a file whose pages can be read in sequence; ValueError if the source has no pages."""
        if not hasattr(self.source, "stream"):
            raise ValueError(f"the rows of {self.name!r} cannot be packed: {self.source.path} is not read in pages")
        return cast("PagedRows", self.source)

    @property
    def cache(self) -> FeatureCache | None:
        """The host cache in use."""
        return self._gather.cache

    def stats(self) -> Stats:
        """Report the backend and its reason, the mode, counts of rows, reads and bytes, and the cache's statistics.

        Where reads take a slower way, through threads or the page cache, ``reason`` says so, and names ``featstore doctor``.
        ``reads`` and ``bytes_read`` count all reads of the feature's source since the dataset was opened. Passes that pack
        extents are included once they are over; they count no rows.
        """
        counts = self.source.stats
        result = Stats(
            {
                "backend": self._reader.backend,
                "reason": self._reader.why(self.source.mode),
                "mode": self.source.mode,
                "takes": self._gather.n_takes,
                "rows_loaded": counts.rows,
                "reads": counts.reads,
                "bytes_requested": counts.bytes_requested,
                "bytes_read": counts.bytes_read,
            }
        )
        cache = self.cache
        if cache is not None:
            result["cache"] = cache.stats()
        return result

    def close(self, *, keep_source: bool = False) -> None:
        """Wait for reads under way, then refuse more; may be called again. ``keep_source``: others read it, so it stays open."""
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            self._is_closed, self._part = True, None
            workers = self._workers
        if workers is not None:
            workers.shutdown(wait=True)
        if not keep_source:
            self.source.close()

    def __reduce__(self) -> tuple[Callable[..., FeatureStore], tuple[Any, ...]]:
        if self._reopen is None:
            raise ClosedError("this store was not opened from a dataset and cannot be pickled")
        return self._reopen()


@uncompiled
def torch_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Apply a torch function to a feature store; TypeError if ``func`` is not defined for one."""
    if getattr(func, "__name__", None) == "index_select":  # by name: PyG replaces torch's function by its own
        return _index_select(*args, **kwargs)
    if func is torch.nn.functional.embedding:
        return _embedding(*args, **kwargs)
    name = getattr(func, "__name__", func)
    raise TypeError(
        f"{name} is not defined for a FeatureStore: rows are read by store[ids], torch.index_select(store, 0, ids) or "
        "torch.nn.functional.embedding(ids, store); call it on what they return"
    )


def _torch_ids(function: str, ids: Any, n: int) -> npt.NDArray[np.integer[Any]]:
    """Check ids as torch's own functions do: int32 or int64, never negative; return them as an array."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function} wants an int32 or int64 tensor of ids")
    array: npt.NDArray[np.integer[Any]] = ids.detach().cpu().numpy()
    if array.size and array.min() < 0:
        position = int((array.reshape(-1) < 0).argmax())
        found = int(array.reshape(-1)[position])
        raise IndexError(f"row {found} at position {position} is out of range for {n} rows: {function} takes no negative ids")
    return array


def _index_select(input: FeatureStore, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if dim not in (0, -input.ndim):
        raise TypeError(f"only dimension 0 of a FeatureStore can be selected from, not {dim}")
    if not isinstance(index, torch.Tensor) or index.ndim > 1:
        raise TypeError("index_select wants a 1-D int32 or int64 tensor of ids")
    return input.take(_torch_ids("index_select", index, len(input)).reshape(-1), out=out)


def _embedding(
    input: torch.Tensor,
    weight: FeatureStore,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None:
        raise TypeError("max_norm would change stored rows; a FeatureStore is read-only")
    return weight[_torch_ids("embedding", input, len(weight))]
