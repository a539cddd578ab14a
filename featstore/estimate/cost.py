"""The cost model: formulas for seconds of an epoch's data preparation, from its accesses and the rates of drive and memory.

Strategies estimate their own seconds with these formulas (``Strategy.estimate``), for ``strategy="auto"`` and ``featstore plan
--explain``. The formulas count the executor's work: reads after close pages were merged, bytes read in sequence, bytes copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from featstore.config import format_size
from featstore.estimate.misses import UNKNOWN, MissCurves
from featstore.plan.planfile import STORED_PER_ACCESS
from featstore.storage.drive import DriveSpeed
from featstore.storage.layout import PAGE_BYTES

__all__ = [
    "ADMIT_TABLE_BYTES",
    "DEGREE",
    "LOAD_TABLE_BYTES",
    "ONLINE",
    "PLANNED",
    "ROW_TABLE_BYTES",
    "SAMPLE_BYTES",
    "STATIC",
    "Estimate",
    "Machine",
    "OnDisk",
    "Workload",
    "admitted_s",
    "cheapest",
    "copied_s",
    "first_touch_s",
    "fresh_s",
    "gathered_s",
    "pipeline_s",
    "put_together",
    "random_read_s",
    "random_reads",
    "reads_s",
    "scan_s",
    "table",
]

BUFFERS = 4  # batches at once: the loop's, one being assembled, two made ahead
PIECE_BYTES = 1 << 20  # a scan for packing reads the pieces that hold a wanted row
SAMPLE_BYTES = 4 + STORED_PER_ACCESS  # on disk, per sampled node: its id, its edges, its plan
TIE = 0.05  # estimates with a smaller relative difference count as equal, where one has work done once that may be used again
NOISE = 0.02  # the same, where they move other numbers of bytes: by so much do measured rates differ between runs
STATIC, DEGREE, PLANNED, ONLINE = "frequency", "degree", "belady", "sieve"
ROW_TABLE_BYTES, LOAD_TABLE_BYTES, ADMIT_TABLE_BYTES = 4, 4, 12  # on disk, of a plan


@dataclass(frozen=True)
class Machine:
    """Measured rates of the drive and of the memory.

    Parameters
    ----------
    drive : DriveSpeed
        Random reads a second; bytes a second read and written in sequence.
    copy_bandwidth : float
        Bytes of rows a second copied from memory to memory.
    batch_bandwidth, fresh_bandwidth : float
        The same rate for a batch's plan, from and to scattered places, beside threads that read and check; and into memory that
        was never touched. 0: not measured, ``copy_bandwidth`` is used.
    static_table_s, planned_table_s, missed_table_s : float
        Seconds of making a pack's tables, without writing. For a row of a batch if rows in memory stay, counting included; for a
        row if a plan changes them, beyond ``Workload.plan_s``; and in addition for a missed row. 0: not measured.
    """

    drive: DriveSpeed
    copy_bandwidth: float
    batch_bandwidth: float = 0.0
    fresh_bandwidth: float = 0.0
    static_table_s: float = 0.0
    planned_table_s: float = 0.0
    missed_table_s: float = 0.0


@dataclass(frozen=True)
class OnDisk:
    """Bytes and rows of a pack's layout, counted exactly if the disk is small, and an epoch's reads of shared rows.

    The whole layout takes ``disk_bytes`` and has ``rows``: rows in extents, of which an epoch has ``packed``, and rows shared by
    the ``length`` batches of a segment (1: no shared rows). Shared rows cost an epoch ``reads`` of ``n_bytes`` in all, close
    pages merged. ``fails``: the reason that the layout cannot be made.
    """

    disk_bytes: int
    rows: int
    packed: int
    length: int = 1
    reads: int = 0
    n_bytes: int = 0
    fails: str = ""

    def of_rank(self, world_size: int) -> OnDisk:
        """Count what an epoch of one of as many ranks reads of the same layout."""
        packed, reads, n_bytes = (round(n / world_size) for n in (self.packed, self.reads, self.n_bytes))
        return replace(self, packed=packed, reads=reads, n_bytes=n_bytes)


@dataclass(frozen=True)
class Workload:
    """Requests of an epoch, and the memory and disk that serve them.

    Parameters
    ----------
    n_rows, row_bytes : int
        Rows of the features and their bytes, all features together.
    n_batches, n_accesses : int
        Batches of an epoch, and rows that they request.
    capacity : int
        Rows of the host cache.
    n_top : int
        Accesses that the ``capacity`` most used rows of this very epoch serve: a static policy's hits on frozen samples.
    n_static, n_degree : int, optional
        Accesses that the ``capacity`` most used rows of another epoch serve, for fresh samples; by default ``n_top``. And
        accesses that the ``capacity`` rows of the most out-edges serve; None: not known.
    loads : int
        Rows that the planned policy loads in an epoch.
    sample_s, plan_s : float
        Seconds of sampling an epoch and of planning its cache.
    superbatch, packings : int
        Batches that are planned together; passes over the features in which their misses are packed.
    epochs : int
        Epochs that one-off work is spread over.
    disk_bytes : int, optional
        Most bytes of extents at once.
    has_pack : bool
        Offline samples are given, which every strategy would run; only with them can a layout be made.
    pack_epochs : int
        Epochs of the offline samples; each epoch has its own extents.
    layouts, on_disk : mapping of str to int, and to OnDisk
        By policy: bytes of the layouts that exist already; and layouts that were counted to the byte, because the disk is small
        or because they exist.
    n_device, device_rows : int
        Accesses that rows on the device serve, and the number of these rows. ``n_top``, ``n_static``, ``n_degree`` and ``loads``
        do not include these accesses. With a pack they are the rows of its layout, for packed strategies alone.
    device_on_host : bool
        The device is the host itself, which then copies for the device.
    online_loads, online_again : int
        Rows that an online policy loads in its first epoch, None: not known; and in each later epoch.
    ahead_bytes : int
        Memory that misses of several batches are read into at once, if the cache is planned; 0: each batch's misses alone.
    sample_read_s : float
        Seconds of an epoch for which sampling alone would keep the drive busy with random reads.
    misses : MissCurves
        Share of a batch's rows that miss, by the size of the cache.
    policy : str
        Policy of the superbatches: the planned one, or by degree.
    """

    n_rows: int
    row_bytes: int
    n_batches: int
    n_accesses: int
    capacity: int
    n_top: int
    loads: int
    sample_s: float
    plan_s: float
    superbatch: int
    epochs: int = 1
    disk_bytes: int | None = None
    has_pack: bool = False
    pack_epochs: int = 1
    n_static: int | None = None
    n_degree: int | None = None
    layouts: Mapping[str, int] = field(default_factory=dict)
    on_disk: Mapping[str, OnDisk] = field(default_factory=dict)
    n_device: int = 0
    device_rows: int = 0
    device_on_host: bool = True
    online_loads: int | None = None
    online_again: int = 0
    ahead_bytes: int = 0
    sample_read_s: float = 0.0
    packings: int = 1
    misses: MissCurves = UNKNOWN
    policy: str = PLANNED

    @property
    def base_bytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_bytes

    @property
    def n_superbatches(self) -> int:
        """Superbatches of an epoch, at least one."""
        return max(1, -(-self.n_batches // max(1, self.superbatch)))


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of one strategy.

    Attributes
    ----------
    strategy, policy : str
    epoch_s, once_s : float
        Seconds of each epoch; seconds before the first.
    rows_loaded : int
        Rows read from storage in an epoch.
    disk_bytes : int
        Bytes of run files or packed extents at once.
    moved_bytes : int
        Bytes of features read and written in an epoch; of about equal estimates, the one that moves fewest is taken.
    parts : dict of str to float
        Seconds of an epoch by kind of work; they overlap.
    impossible : str
        Reason that the strategy cannot be taken; empty if it can.
    is_of_layout : bool
        The strategy runs a pack's layout, which has the device's rows; other strategies then have none there.
    hides_first_touch : bool
        The first epoch's buffers, which are new memory, are written while the drive is busy: they add nothing to ``once_s``.
    """

    strategy: str
    policy: str
    epoch_s: float
    once_s: float
    rows_loaded: int
    disk_bytes: int = 0
    moved_bytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    impossible: str = ""
    is_of_layout: bool = False
    hides_first_touch: bool = False

    def total_s(self, epochs: int) -> float:
        """Compute the seconds of ``epochs`` epochs, one-off work included."""
        return self.once_s + epochs * self.epoch_s

    def to_dict(self, epochs: int) -> dict[str, Any]:
        """Convert the estimate to plain containers, for JSON."""
        return {
            "strategy": self.strategy,
            "policy": self.policy,
            "epoch_s": self.epoch_s,
            "once_s": self.once_s,
            "total_s": self.total_s(epochs),
            "rows_loaded": self.rows_loaded,
            "disk_bytes": self.disk_bytes,
            "moved_bytes": self.moved_bytes,
            "parts": self.parts,
            "impossible": self.impossible,
        }


def random_reads(n_loads: int, n_gathers: int, n_rows: int, row_bytes: int, drive: DriveSpeed) -> tuple[float, float]:
    """Estimate the read operations, and their bytes, of rows scattered evenly over a file, in ``n_gathers`` gathers.

    Each gather merges, as the reader does, reads of one page, and of pages whose gap costs less than another read.
    """
    if not n_loads or not n_gathers:
        return 0.0, 0.0
    unit = max(1, -(-row_bytes // PAGE_BYTES)) * PAGE_BYTES  # bytes moved by one row's read
    units = max(1.0, n_rows * row_bytes / unit)
    wanted = units * -math.expm1(-n_loads / n_gathers / units)
    density = wanted / units
    gap = drive.gap_bytes // unit
    bridged = sum(j * density * (1 - density) ** j for j in range(1, gap + 1))  # unwanted units read, for each wanted one
    reads = max(1.0, wanted * (1 - density) ** (gap + 1))
    return n_gathers * reads, n_gathers * min(wanted * (1 + bridged), units) * unit


def random_read_s(n_loads: int, n_gathers: int, n_rows: int, row_bytes: int, drive: DriveSpeed) -> float:
    """Estimate the seconds of :func:`random_reads`; if nearly all pages are wanted, the reads form a scan."""
    reads, n_bytes = random_reads(n_loads, n_gathers, n_rows, row_bytes, drive)
    return reads_s(reads, n_bytes, drive)


def reads_s(reads: float, n_bytes: float, drive: DriveSpeed) -> float:
    """Compute the seconds of ``reads`` operations of one page each; bytes beyond one page count at the rate of gathers."""
    return reads / drive.iops + max(0.0, n_bytes - reads * PAGE_BYTES) / (drive.gather_bandwidth or drive.bandwidth)


def copied_s(n_rows: float, w: Workload, m: Machine) -> float:
    """Compute the seconds of copying rows from memory to memory."""
    return n_rows * w.row_bytes / m.copy_bandwidth


def gathered_s(n_rows: int, w: Workload, m: Machine) -> float:
    """Compute the seconds of copying rows by a batch's plan, from and to scattered places."""
    return n_rows * w.row_bytes / (m.batch_bandwidth or m.copy_bandwidth)


def admitted_s(n_rows: int, w: Workload, m: Machine) -> float:
    """Compute the seconds of copying just gathered rows into the cache: R22 at a tenth takes 0.1 s, the gathers 1.4 s."""
    return copied_s(n_rows, w, m)


def fresh_s(n_rows: float, w: Workload, m: Machine) -> float:
    """Compute the extra seconds of copying rows into new memory."""
    return max(0.0, n_rows * w.row_bytes / (m.fresh_bandwidth or m.copy_bandwidth) - copied_s(n_rows, w, m))


def pipeline_s(producer_s: float, consumer_s: float, n: int) -> float:
    """Compute the seconds of two overlapping stages over ``n`` equal items; the first and the last item do not overlap."""
    return producer_s / n + (n - 1) / n * max(producer_s, consumer_s) + consumer_s / n


def scan_s(n_loads: int, w: Workload, n_scans: int, m: Machine) -> float:
    """Estimate the seconds of ``n_scans`` passes over the pieces of the base file that hold a wanted row."""
    pieces = max(1.0, w.base_bytes / PIECE_BYTES)
    each = n_loads / max(1, n_scans)
    wanted = pieces * -math.expm1(-each / pieces)
    return n_scans * min(wanted * PIECE_BYTES, w.base_bytes) / m.drive.bandwidth


def put_together(w: Workload) -> int:
    """Count the rows copied to assemble batches on a device that is the host: the device's rows twice, the others once more."""
    return w.n_accesses + w.n_device if w.device_rows and w.device_on_host else 0


def first_touch_s(w: Workload, m: Machine) -> float:
    """Compute the extra seconds of writing the first epoch's buffers, which are new memory."""
    return fresh_s(BUFFERS * w.n_accesses / max(1, w.n_batches), w, m)


def cheapest(estimates: Sequence[Estimate], epochs: int) -> tuple[Estimate, str]:
    """Choose the possible estimate with the fewest seconds for ``epochs``, and the reason; ValueError if none is possible.

    Of estimates that differ by less than their accuracy, those with the fastest epochs are preferred, since one-off work may be
    used again; and of these, if they differ by no more than measured rates do, the one that moves the fewest bytes.
    """
    possible = sorted((each for each in estimates if not each.impossible), key=lambda each: each.total_s(epochs))
    if not possible:
        raise ValueError("; ".join(f"{each.strategy} ({each.policy}): {each.impossible}" for each in estimates))
    near = [each for each in possible if each.total_s(epochs) <= (1 + TIE) * possible[0].total_s(epochs)]
    fastest = min(each.epoch_s for each in near)
    near = [each for each in near if each.epoch_s <= (1 + NOISE) * fastest]
    best = min(near, key=lambda each: (each.moved_bytes, each.epoch_s, each.total_s(epochs)))
    possible = [best, *(each for each in possible if each is not best)]
    part, seconds = max(best.parts.items(), key=lambda item: item[1])
    of = "1 epoch" if epochs == 1 else f"{epochs} epochs, {best.epoch_s:.3g} s each"
    reason = f"{best.total_s(epochs):.3g} s for {of}, most of it {part} ({seconds:.3g} s)"
    if len(possible) > 1:
        second = possible[1]
        reason += f"; next is {second.strategy} ({second.policy}) with {second.total_s(epochs):.3g} s"
    return best, reason


def table(estimates: Sequence[Estimate], epochs: int, taken: Estimate | None = None) -> str:
    """Format estimates as text, a line a strategy."""
    lines = [
        f"{'strategy':<24}{'s/epoch':>10}{'s once':>10}{f's for {epochs}':>12}{'rows loaded':>14}{'disk':>12}  parts of an epoch"
    ]
    for each in estimates:
        mark = "* " if each is taken else "  "
        why = ", ".join(f"{name} {seconds:.3g}" for name, seconds in each.parts.items())
        lines.append(
            f"{mark + each.strategy + ' (' + each.policy + ')':<24}{each.epoch_s:>10.3g}{each.once_s:>10.3g}"
            f"{each.total_s(epochs):>12.3g}{each.rows_loaded:>14,}{format_size(each.disk_bytes):>12}  "
            + (f"not possible: {each.impossible}" if each.impossible else why)
        )
    return "\n".join(lines)
