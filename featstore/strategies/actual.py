"""Whole epochs under ``strategy="auto"`` as they were: beside the estimate, and beside what the drive's kept rates come to.

The last one of each strategy is kept in the dataset's catalog, where ``featstore plan --explain`` finds it. Where it took much
more or less than its own counts of rows come to at the kept rates, these are marked, and the next ``"auto"`` measures the drive
again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from featstore.errors import BusyError
from featstore.plan.choice import Choice
from featstore.plan.cost import Estimate, Workload
from featstore.storage.catalog import current_catalog
from featstore.storage.drive import doubted, forget_speed
from featstore.storage.update import Update
from featstore.strategies.estimates import estimate_again

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Actual", "Epochs", "counted", "kept_runs", "runs_table"]

KEY = "auto/runs"
# Times the seconds that the kept rates come to; a loader's first epoch makes its files and finds its memory anew.
MUCH, MUCH_AT_FIRST = 1.5, 2.0
WAITED = 0.5  # of an epoch: the loop waited so long, so that loading its batches is what it took
DRIVE_PARTS = ("read", "scan", "write", "shared")
_CANNOT_WRITE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True)
class Actual:
    """A whole epoch of a loader, all its batches delivered and no other epoch beside it, and what was expected of it.

    Times are of ``time.perf_counter`` but for ``when``. Rows are counted once, not once a feature.

    Attributes
    ----------
    strategy, policy : str
        As the loader chose, with ``"none"`` where nothing is cached.
    capacity : int
        Rows of the host cache.
    n_batches : int
        Batches of the epoch.
    n_before : int
        Whole epochs of this loader before it; 0: it made the loader's files and found its memory anew.
    estimate_s : float
        Seconds of data preparation of an epoch, as estimated before the loader's first.
    estimate_rows : int
        Rows that an epoch would load from disk, as estimated then.
    counted_s : float
        Seconds that the cost model makes of the rows that the epoch had of each tier, at the drive's kept rates.
    drive_s : float
        Those of ``counted_s`` that are the drive's, reading and writing.
    epoch_s : float
        Seconds from the first ``next()`` until all batches were delivered, the loop's own work included.
    wait_s : float
        Seconds of ``epoch_s`` that the loop waited for batches.
    rows_loaded : int
        Rows that neither the host's nor the device's cache held.
    when : float
        Seconds since 1970 (UTC) at its end.
    """

    strategy: str
    policy: str
    capacity: int
    n_batches: int
    n_before: int
    estimate_s: float
    estimate_rows: int
    counted_s: float
    drive_s: float
    epoch_s: float
    wait_s: float
    rows_loaded: int
    when: float

    @property
    def is_all_loading(self) -> bool:
        """Whether the epoch took as long as its data preparation: batches were waited for, instead of waiting for the loop."""
        return self.wait_s >= WAITED * self.epoch_s

    @property
    def doubts_the_drive(self) -> bool:
        """Whether the drive must have done much more or less than was measured of it, as far as an epoch tells."""
        if not self.is_all_loading or self.counted_s <= 0 or self.drive_s < self.counted_s / 2:
            return False
        return not 1 / MUCH <= self.epoch_s / self.counted_s <= (MUCH if self.n_before else MUCH_AT_FIRST)

    @property
    def prepared_s(self) -> float:
        """Seconds of data preparation: the epoch's, or, where the loop kept it waiting, those that are known of."""
        return self.epoch_s if self.is_all_loading else self.wait_s

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, for JSON."""
        return {**asdict(self), "prepared_s": self.prepared_s, "is_all_loading": self.is_all_loading}

    def shown(self) -> str:
        """Return the seconds of data preparation as text."""
        return f"{'' if self.is_all_loading else '>= '}{self.prepared_s:.3g}"


def counted(workload: Workload, hits: Mapping[str, int], n_features: int) -> Workload:
    """Return a workload with the rows that an epoch had of each tier, of all features together, in place of expected ones."""
    total, host, device = (n // n_features for n in (sum(hits.values()), hits.get("host", 0), hits.get("device", 0)))
    loads = total - host - device
    return replace(
        workload,
        n_accesses=total,
        n_top=host,
        n_static=host,
        n_degree=host,
        loads=loads,
        online_loads=loads,
        online_again=loads,
        n_device=device,
    )


class Epochs:
    """The whole epochs of a loader; one thread at a time.

    Parameters
    ----------
    choice : Choice
        What the loader's strategy was chosen by.
    n_features, n_batches : int
        Features that are gathered; batches of an epoch.
    """

    def __init__(self, choice: Choice, n_features: int, n_batches: int) -> None:
        self.last: Actual | None = None
        self._choice, self._n_features, self._n_batches = choice, n_features, n_batches
        self._is_over = False

    def begin(self, counters: Callable[[], Mapping[str, Any]]) -> Callable[[], None]:
        """Note that an epoch begins; what is returned is called when all its batches were delivered. Reads ``Loader.stats``."""
        before, start = counters(), time.perf_counter()

        def end() -> None:
            seconds, after = time.perf_counter() - start, counters()
            if after["batches"] - before["batches"] == self._n_batches:  # no other epoch ran beside it
                wait_s = after["seconds"].get("wait", 0.0) - before["seconds"].get("wait", 0.0)
                hits = {tier: n - before["hits"].get(tier, 0) for tier, n in after["hits"].items()}
                self.last = self._judge(seconds, wait_s, hits)

        return end

    def _judge(self, epoch_s: float, wait_s: float, hits: Mapping[str, int]) -> Actual:
        taken: Estimate = self._choice.taken
        workload = counted(self._choice.workload, hits, self._n_features)
        again = estimate_again(taken, workload, self._choice.machine)
        return Actual(
            taken.strategy,
            taken.policy,
            workload.capacity,
            self._n_batches,
            0 if self.last is None else self.last.n_before + 1,
            taken.epoch_s,
            taken.rows_loaded,
            again.epoch_s,
            sum(again.parts.get(part, 0.0) for part in DRIVE_PARTS),
            epoch_s,
            wait_s,
            workload.loads,
            time.time(),
        )

    def drop(self) -> None:
        """Keep nothing."""
        self._is_over = True

    def keep(self, g: OutOfCoreGraph) -> None:
        """Keep the last epoch in the dataset's catalog, once, and mark the drive's rates there where it doubts them.

        Nothing happens where the dataset cannot be written, or is being written.
        """
        last = None if self._is_over else self.last
        self._is_over = True
        if last is None:
            return
        try:
            with Update(g.path) as update:
                known = update.catalog.extra.get(KEY, {})
                extra = {KEY: {**known, f"{last.strategy}/{last.policy}": last.to_dict()}}
                marked = doubted(update.catalog) if last.doubts_the_drive else {}
                update.add([], extra={**extra, **marked})
                update.commit()
            if marked:
                forget_speed(g.reader)
        except BusyError:
            pass
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise


def kept_runs(path: str) -> list[Actual]:
    """Return the last epoch of each strategy that a dataset's catalog has, the latest first; what is no record is left out."""
    names = {each.name for each in fields(Actual)}
    entries = current_catalog(path).extra.get(KEY, {}).values()
    found = []
    for entry in entries:
        numbers = [] if not isinstance(entry, dict) else [entry.get(name) for name in names - {"strategy", "policy"}]
        if numbers and all(isinstance(number, (int, float)) for number in numbers):
            found.append(Actual(**{name: entry[name] for name in names}))
    return sorted(found, key=lambda each: -each.when)


def runs_table(runs: list[Actual]) -> str:
    """Return epochs and their estimates as text."""
    lines = [
        'epochs under strategy="auto", the last of each strategy: seconds and rows loaded, estimated and actual',
        f"{'strategy':<24}{'in memory':>14}{'batches':>10}{'s/epoch':>10}{'of counts':>11}{'actual':>10}{'rows':>14}"
        f"{'actual':>14}",
    ]
    for each in runs:
        lines.append(
            f"{f'  {each.strategy} ({each.policy})':<24}{each.capacity:>14,}{each.n_batches:>10,}{each.estimate_s:>10.3g}"
            f"{each.counted_s:>11.3g}{each.shown():>10}{each.estimate_rows:>14,}{each.rows_loaded:>14,}"
            + ("  the drive is to be measured again" if each.doubts_the_drive else "")
        )
    return "\n".join(lines)
