"""Counters that strategies and the loader share: seconds of each stage, reads, and rows delivered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from featstore.gather.plan import BatchPlan, Tier
from featstore.storage.rowfile import ReadStats

__all__ = ["BatchCounts", "GatherCounts", "Overlap", "ReadCounts", "StageTimer"]


class StageTimer:
    """Seconds by name, added up from any thread."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to ``name``."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Context manager that adds the time spent inside to ``name``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def seconds(self) -> dict[str, float]:
        """Return seconds by name."""
        with self._lock:
            return dict(self._seconds)


class Overlap:
    """Wall-clock seconds in which any stage of a loader worked, and seconds in which the loop waited. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_working = 0
        self._since = self._loading_s = self._waited_s = 0.0

    def __enter__(self) -> None:
        """Begin to work, in any thread; seconds in which several threads work count once."""
        with self._lock:
            if not self._n_working:
                self._since = time.perf_counter()
            self._n_working += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_working -= 1
            if not self._n_working:
                self._loading_s += time.perf_counter() - self._since

    def waited(self, seconds: float) -> None:
        """Count seconds for which the loop waited."""
        with self._lock:
            self._waited_s += seconds

    @property
    def hidden(self) -> float:
        """The share of loading that the loop did not wait for, 0 … 1; 0 before anything was loaded."""
        with self._lock:
            working = time.perf_counter() - self._since if self._n_working else 0.0
            loading = self._loading_s + working
            return 0.0 if loading <= 0 else min(1.0, max(0.0, 1 - self._waited_s / loading))


@dataclass
class GatherCounts:
    """Counts of one or more gathers; owned by the caller of the gathers, one thread at a time.

    Parameters
    ----------
    rows : dict of Tier to int
        Rows delivered from each tier.
    read : ReadStats
        Cost of the reads, also of gathers that failed afterwards.
    update_s : float
        Seconds of choosing the rows that the host cache admits, and of copying them there.
    hits_lost : int
        Rows that were planned as hits, but had to be read, since the host cache has given their memory back.
    """

    rows: dict[Tier, int] = field(default_factory=dict)
    read: ReadStats = field(default_factory=ReadStats)
    update_s: float = 0.0
    hits_lost: int = 0

    def count(self, tier: Tier, n_rows: int) -> None:
        self.rows[tier] = self.rows.get(tier, 0) + n_rows

    def count_plan(self, plan: BatchPlan) -> None:
        for part in plan.parts:
            self.count(Tier.BASE if part.tier == Tier.AHEAD else part.tier, len(part.addresses))


class ReadCounts:
    """Reads so far, added up from any thread."""

    def __init__(self) -> None:
        self._total = ReadStats()
        self._lock = threading.RLock()  # an epoch that a finalizer ends, within a call of this thread, counts here too

    def add(self, cost: ReadStats) -> None:
        """Add the cost of a read."""
        with self._lock:
            self._total.add(cost)

    def total(self) -> dict[str, int]:
        """Return ``rows_loaded``, ``reads``, ``bytes_requested`` and ``bytes_read``."""
        with self._lock:
            n = self._total
            return {
                "rows_loaded": n.rows,
                "reads": n.reads,
                "bytes_requested": n.bytes_requested,
                "bytes_read": n.bytes_read,
            }


class BatchCounts:
    """Assembled batches, and their rows by tier, added up from any thread."""

    def __init__(self) -> None:
        self._n_batches = self._n_rows = self._hits_lost = self._n_beside = 0
        self._hits = {Tier.HOST: 0, Tier.BASE: 0}
        self._lock = threading.Lock()

    def add(self, n_rows: int, hits: Mapping[Tier, int], hits_lost: int = 0) -> None:
        """Add a batch of ``n_rows`` rows, over all features; ``hits_lost`` of them were planned as hits, but had to be read."""
        with self._lock:
            self._n_batches += 1
            self._n_rows += n_rows
            self._hits_lost += hits_lost
            for tier, n in hits.items():
                self._hits[tier] = self._hits.get(tier, 0) + n

    def add_beside(self) -> None:
        """Add an epoch that reads on demand because another epoch has the features' caches."""
        with self._lock:
            self._n_beside += 1

    @property
    def n_batches(self) -> int:
        """Batches so far."""
        return self._n_batches

    def total(self) -> dict[str, Any]:
        """Return ``batches``, ``rows``, ``hits`` (rows by tier), ``hits_lost`` and ``epochs_beside``."""
        with self._lock:
            hits = {tier.name.lower(): n for tier, n in sorted(self._hits.items())}
            return {
                "batches": self._n_batches,
                "rows": self._n_rows,
                "hits": hits,
                "hits_lost": self._hits_lost,
                "epochs_beside": self._n_beside,
            }
