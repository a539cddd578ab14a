"""The rows of a sharded feature as one row source: local ones are read, the others asked for."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from typing import Final

import numpy as np
import numpy.typing as npt

from featstore._core.rows import copy_rows
from featstore.budget import Budget, Reservation
from featstore.distributed.exchange import Answer, Exchange
from featstore.distributed.owners import Owners, Share
from featstore.errors import ClosedError
from featstore.gather.plan import Addresses
from featstore.gather.sources import RowSource
from featstore.storage.rowfile import ReadStats
from featstore.storage.stripedrows import dividing

__all__ = ["ShardedRows"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]

MOST_AT_ONCE: Final = 1 << 21  # rows that are divided by owner at once
_LOCAL_THREADS: Final = 4  # gathers whose local rows are read at a time, beside the others' rows


class ShardedRows:
    """Rows of one feature that several ranks have (:class:`~featstore.gather.sources.RowSource`). Thread-safe.

    Parameters
    ----------
    name : str
        The feature.
    owners : Owners
    rank : int
        This process.
    local : RowSource or None
        Its rows.
    exchange : Exchange or None
        None if there is one rank.
    piece_rows : int
        Rows that one question asks for.
    row_bytes : int
    fingerprint : str
    budget : Budget
        Counts the memory of dividing a gather by owner.
    held : Reservation
        What is held until the source is closed.
    """

    mode, in_order = "sharded", False

    def __init__(
        self,
        name: str,
        owners: Owners,
        rank: int,
        local: RowSource | None,
        exchange: Exchange | None,
        piece_rows: int,
        row_bytes: int,
        fingerprint: str,
        budget: Budget,
        held: Reservation,
    ) -> None:
        self.path = f"the rows of {name!r} on {len(owners.claims)} machines"
        self.n_rows, self.row_bytes, self.fingerprint = int(owners.starts[-1]), row_bytes, fingerprint
        self.stats, self.remote = ReadStats(), ReadStats()
        self._owners, self._mine, self._local = owners, owners.of_rank(rank), local
        # The ranks of an owner have the same rows: others divide their questions among them.
        self._asked = [same[rank % len(same)].rank for same in owners.claims]
        self._turn = rank
        self._exchange, self._piece_rows, self._budget, self._held = exchange, piece_rows, budget, held
        self._is_closing = False
        self._start()
        if exchange is not None:
            self._finalizer = weakref.finalize(self, exchange.close, "its process has ended, or dropped the feature")

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._users = 0
        self._threads: ThreadPoolExecutor | None = None

    def gather(
        self, addresses: Addresses, out: Uint8s, positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        """See :meth:`RowSource.gather <featstore.gather.sources.RowSource.gather>`.

        Rows of this rank are read meanwhile. ``reads`` are those of this rank's drive and the questions, ``bytes_read`` the
        bytes that came from either. ConnectionError or TimeoutError, which names the rank, if one is lost.
        """
        with self._in_use():
            cost, remote, done = ReadStats(), ReadStats(), 0
            self._check_range(addresses)
            with dividing(self._budget, min(len(addresses), MOST_AT_ONCE)) as most:
                while done < len(addresses):
                    part = addresses[done : done + most]
                    end = done + len(part)
                    into = (out[done:end], None) if positions is None else (out, positions[done:end])
                    self._gather(self._owners.split(part, *into), gap_bytes, cost, remote)
                    done = end
            cost.add(remote)
            with self._lock:
                self.stats.add(cost)
                self.remote.add(remote)
            return cost

    def _check_range(self, addresses: Addresses) -> None:
        """Check all rows before any is read: dividing them checks a part alone."""
        if len(addresses):
            ends = (addresses[0], addresses[-1]) if isinstance(addresses, range) else (addresses.min(), addresses.max())
            if not 0 <= ends[0] <= ends[1] < self.n_rows:
                raise IndexError(f"rows {ends[0]} to {ends[1]} are out of range for {self.n_rows}")

    def _gather(self, shares: Iterator[Share], gap_bytes: int | None, cost: ReadStats, remote: ReadStats) -> None:
        local, others = None, list[Share]()
        for share in shares:
            if share.owner == self._mine:
                local = share
            else:
                others.append(share)
        if local is None or not others:
            if local is not None:
                cost.add(self._read(local, gap_bytes))
            self._fetch(others, gap_bytes, remote)
            return
        reading = self._beside(local, gap_bytes)
        try:
            self._fetch(others, gap_bytes, remote)
        except BaseException:
            reading.exception()  # it writes to the caller's memory until then
            raise
        cost.add(reading.result())

    def _read(self, share: Share, gap_bytes: int | None) -> ReadStats:
        assert self._local is not None
        return self._local.gather(share.rows, share.out, share.positions, gap_bytes)

    def _beside(self, share: Share, gap_bytes: int | None) -> Future[ReadStats]:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_LOCAL_THREADS, thread_name_prefix="featstore-shards-local")
            return self._threads.submit(self._read, share, gap_bytes)

    def _pieces(self, shares: list[Share]) -> Iterator[Share]:
        """Cut shares into pieces, those of all owners in turn; ranks begin with different owners."""
        first = next((k for k, share in enumerate(shares) if share.owner > self._turn), 0)
        step = self._piece_rows
        cut = [
            [share.cut(begin, begin + step) for begin in range(0, len(share.rows), step)]
            for share in shares[first:] + shares[:first]
        ]
        for each in zip_longest(*cut):
            yield from (piece for piece in each if piece is not None)

    def _fetch(self, shares: list[Share], gap_bytes: int | None, remote: ReadStats) -> None:
        """Ask for rows, and copy them to their places as they come; as many questions are under way as there are buffers."""
        if not shares:
            return
        assert self._exchange is not None
        exchange, under_way = self._exchange, deque[tuple[Share, Answer]]()
        try:
            for piece in self._pieces(shares):
                rank = self._asked[piece.owner]
                while (answer := exchange.ask(rank, piece.rows, gap_bytes, wait=not under_way)) is None:
                    self._take(exchange, *under_way.popleft(), remote)
                under_way.append((piece, answer))
            while under_way:
                self._take(exchange, *under_way.popleft(), remote)
        finally:
            for _, answer in under_way:  # after an error
                exchange.release(answer)

    @staticmethod
    def _take(exchange: Exchange, piece: Share, answer: Answer, remote: ReadStats) -> None:
        try:
            begin = time.perf_counter()
            rows = exchange.wait(answer)
            waited_s = time.perf_counter() - begin
            copy_rows(rows, None, piece.out, piece.positions)
            remote.add(ReadStats(len(rows), 1, rows.nbytes, rows.nbytes, waited_s))
        finally:
            exchange.release(answer)

    # -- life --------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the source open during the ``with`` block."""
        if self._pid != os.getpid():  # the parent may have held the lock when it forked
            self._start()
        users = 0
        try:
            with self._lock:
                self.check_open()
                self._users += 1
                users = 1
            yield
        finally:
            with self._lock:
                self._users -= users
                if self._is_closing:
                    self._changed.notify_all()

    @property
    def answered_rows(self) -> int:
        """Rows that other ranks have got from this one."""
        return 0 if self._exchange is None else self._exchange.answered_rows

    def check_open(self) -> None:
        if self._is_closing:
            raise ClosedError(f"{self.path}: closed")

    def leave(self, error: BaseException) -> None:
        """Close without waiting for the other ranks, which are told of the ``error``."""
        self._close(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Wait for gathers under way, and until all ranks close theirs; see :meth:`Exchange.close`. May be called again."""
        self._close(None)

    def _close(self, failure: str | None) -> None:
        if self._pid != os.getpid():
            self._start()
            self._exchange = None  # the parent's
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
            if was_closing:
                return
            if failure is None:
                self._changed.wait_for(lambda: self._users == 0)
        try:
            if self._exchange is not None:
                self._finalizer.detach()
                self._exchange.close(failure)
        finally:
            with self._lock:
                self._changed.wait_for(lambda: self._users == 0)
                threads, self._threads = self._threads, None
            if threads is not None:
                threads.shutdown()
            self._owners.numbers = None
            self._held.release()
