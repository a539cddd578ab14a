"""The rows that a loader keeps on its device: chosen by a static policy and read, with ``"auto"`` after the first step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.cache.base import StaticPolicy
from featstore.cache.devicetier import DeviceTier
from featstore.cache.planned import NO_ROWS
from featstore.cache.select import top_rows
from featstore.cache.sizes import in_proportion
from featstore.config import format_size
from featstore.errors import BudgetError, PerformanceWarning, warn
from featstore.gather.device import OUT_OF_MEMORY
from featstore.strategies.accesscounts import AccessCounts
from featstore.strategies.context import Context, OnDevice
from featstore.strategies.domain import Domain

__all__ = ["DEVICE_POLICY", "FILL_BYTES", "SIZED_LATER", "FilledLater", "free_bytes", "make_tiers", "rows_left"]

FILL_BYTES = 8 << 20  # one read
DEVICE_POLICY = "degree"  # the default
SIZED_LATER = (
    "device_cache='auto' is sized when the loop asks for its second batch; "
    "estimated with what is free of the device now, less the reserve"
)


def make_tiers(
    context: Context, policy: StaticPolicy, n_rows: Sequence[int], go_on: Callable[[], bool] = lambda: True
) -> tuple[DeviceTier | None, ...] | None:
    """Choose the rows that stay on a loader's device, and read them; None if ``go_on()`` returned False before all were read.

    ``n_rows`` are the rows of the tier for each of ``nodes.each``; without rows there is none.

    Raises
    ------
    BudgetError, PluginError, OSError, CorruptionError, RuntimeError
        From choosing or reading; no memory is held then.
    """
    graph, parts, chosen = context.graph, context.nodes.each, list[npt.NDArray[np.int64]]()
    with AccessCounts(context) as counts:
        for part, n in zip(parts, n_rows, strict=True):
            if n:
                with graph.policy_inputs(part.width, counts, rows=part.rows) as inputs:
                    chosen.append(top_rows(inputs.scores(policy), n))
            else:
                chosen.append(NO_ROWS)
    made = list[DeviceTier | None]()
    with ExitStack() as undo:
        for part, rows in zip(parts, chosen, strict=True):
            if not len(rows):
                made.append(None)
                continue
            shapes = {name: (tuple(store.shape[1:]), store.dtype) for name, store in part.stores.items()}
            tier = DeviceTier(rows, shapes, context.device, graph.pool, part.n, context.copy_threads)
            undo.callback(tier.close)
            made.append(tier)
            for name, row_bytes in part.row_bytes.items():
                if not tier.fill(name, max(1, FILL_BYTES // max(1, row_bytes)), partial(part.read, name), go_on):
                    return None
        undo.pop_all()
    return tuple(made)


def free_bytes(device: torch.device, budget: Budget, reserve: int) -> int:
    """Compute the bytes of a device that computing leaves free, as far as the steps so far have shown; may be negative.

    Parameters
    ----------
    device : torch.device
        CUDA: the memory of the device, less the most that torch has reserved so far, the bytes of other processes, and
        ``reserve``. Any other device: the total of the budget, less its peak and ``reserve``.
    budget : Budget
    reserve : int
        Bytes to leave free.

    References
    ----------
    Bai et al., PaGraph, TPDS 2021, section 4: the cache is sized after a first mini-batch, by torch's peak use and a reserve.
    PaGraph does not subtract the bytes of other processes.
    """
    if device.type != "cuda":
        return budget.total - budget.peak - reserve
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total - torch.cuda.max_memory_reserved(device) - others - reserve)


def rows_left(
    device: torch.device, budget: Budget, reserve: int, columns: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], int]:
    """Compute how many rows fit the memory that computing leaves free, and the bytes of that memory.

    ``columns`` are the number of rows, and the bytes of a row, of features with the same rows. Each gets the same share of its
    rows. On the CPU the tiers' tables take a part of the memory.
    """
    left, beside = free_bytes(device, budget, reserve), 0
    if device.type == "cpu":  # the tiers' tables are in the same memory
        left, beside = left - 4 * sum(n for n, _ in columns), 8
    widths = [max(1, row_bytes + beside) for _, row_bytes in columns]
    each = in_proportion(max(0, left), [n * width for (n, _), width in zip(columns, widths, strict=True)])
    return tuple(n_bytes // width for n_bytes, width in zip(each, widths, strict=True)), left


def _columns(nodes: Domain) -> list[tuple[int, int]]:
    return [(part.n, part.width) for part in nodes.each]


class FilledLater(OnDevice):
    """Tiers that are sized when the loop asks for its second batch, and filled by a thread of their own. Thread-safe.

    Parameters
    ----------
    policy : StaticPolicy
        Chooses the rows.
    reserve : int
        Bytes of the device to leave free.
    """

    def __init__(self, policy: StaticPolicy, reserve: int) -> None:
        super().__init__()
        self.why = "no step is done yet"
        self.policy, self._reserve = policy, reserve
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._failure: BaseException | None = None
        self._warning: str | None = None

    def step_done(self, context: Context) -> None:
        """Note, in the loop's thread, that a step is done; the first call starts the thread that sizes and fills the tiers.

        Warns once, with a PerformanceWarning, if they did not fit.

        Raises
        ------
        Exception
            The error of the policy or of reading the rows, once.
        """
        with self._lock:
            if self._thread is None and not self._is_over:
                self.why = "it is being filled"
                self._thread = threading.Thread(target=self._run, args=(context,), name="featstore-device", daemon=True)
                self._thread.start()
            failure, self._failure = self._failure, None
            warning, self._warning = self._warning, None
        if failure is not None:
            raise failure
        if warning is not None:
            warn(warning, PerformanceWarning)

    def _run(self, context: Context) -> None:
        try:
            self._fill(context)
        except (BudgetError, OUT_OF_MEMORY) as error:
            self.why = f"it did not fit: {str(error).splitlines()[0]}"
            self._warning = f"device_cache='auto': {self.why}; the loader goes on without"
        except BaseException as error:
            self.why = f"filling it failed: {error}"
            self._failure = None if self._is_over else error

    def _fill(self, context: Context) -> None:
        n_rows, left = rows_left(context.device, context.graph.budget, self._reserve, _columns(context.nodes))
        if not any(n_rows):
            self.why = (
                f"there is no room: of the device {format_size(left)} are left, {format_size(self._reserve)} in reserve"
                if left >= 0
                else f"there is no room: {format_size(-left)} short, {format_size(self._reserve)} in reserve"
            )
            return
        cuda: Any = torch.cuda
        stream: Any = contextlib.nullcontext()
        if context.device.type == "cuda":  # not in the stream of computing
            stream = cuda.stream(cuda.Stream(context.device))
        with stream:
            tiers = make_tiers(context, self.policy, n_rows, lambda: not self._is_over)
        with self._lock:
            if tiers is not None and not self._is_over:
                self.tiers, self.why = tiers, ""
                return
        for tier in tiers or ():
            if tier is not None:
                tier.close()

    def expected_rows(self, context: Context, taken: int = 0) -> tuple[int, ...]:
        """See :class:`OnDevice`; before the tiers are there, the numbers that fit the free memory less the reserve."""
        if self.tiers:
            return self.n_rows
        reserve = self._reserve + (taken if context.device.type == "cpu" else 0)
        return rows_left(context.device, context.graph.budget, reserve, _columns(context.nodes))[0]

    def join(self) -> tuple[DeviceTier | None, ...]:
        """Wait until filling has ended; return the tiers, none if it failed."""
        thread = self._thread
        if thread is not None:
            thread.join()
        return self.tiers

    def close(self) -> None:
        """Stop filling, and give the memory back; may be called again. No batch may be under way."""
        with self._lock:
            self._is_over = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        super().close()
