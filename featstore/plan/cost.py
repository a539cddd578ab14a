"""The cost model: seconds of an epoch's data preparation under each strategy, from its accesses and what the drive does.

One estimator serves ``strategy="auto"`` and ``featstore plan --explain``. It counts what the executor would do: reads after
neighbouring pages were merged, bytes in sequence, bytes copied, and which of these run beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from featstore.config import format_size
from featstore.plan.planfile import STORED_PER_ACCESS
from featstore.storage.drive import DriveSpeed
from featstore.storage.layout import PAGE_BYTES

__all__ = [
    "CANDIDATES",
    "SAMPLE_BYTES",
    "Estimate",
    "Machine",
    "OnDisk",
    "Workload",
    "cheapest",
    "estimate_all",
    "random_read_s",
    "random_reads",
    "table",
]

FORESEEN = 2 / 3  # of planning: packing begins when two of the planner's three passes have found the misses
BUFFERS = 4  # batches at once: the loop's, one that is put together, two made ahead
PIECE_BYTES = 1 << 20  # a scan for packing reads the pieces that hold a wanted row
SAMPLE_BYTES = 4 + STORED_PER_ACCESS  # on disk, a sampled node: its id, its edges, its plan
TIE = 0.05  # estimates that differ by less are taken to be equal
STATIC, DEGREE, PLANNED, ONLINE = "frequency", "degree", "belady", "sieve"
MAKE_TABLES = {STATIC: 2.5, PLANNED: 0.7}  # times what counting an epoch's rows takes, measured on R22
ROW_TABLE_BYTES, LOAD_TABLE_BYTES, ADMIT_TABLE_BYTES = 4, 4, 12  # on disk, of a plan


@dataclass(frozen=True)
class Machine:
    """What the drive and the memory were measured to do.

    Parameters
    ----------
    drive : DriveSpeed
        Random reads a second; bytes a second read and written in sequence.
    copy_bandwidth : float
        Bytes of rows a second that are copied from memory to memory.
    batch_bandwidth : float
        Where a batch's plan says from where and to where, beside threads that read and check; 0, not measured: the same.
    fresh_bandwidth : float
        Into memory that was never touched; 0, not measured: the same.
    """

    drive: DriveSpeed
    copy_bandwidth: float
    batch_bandwidth: float = 0.0
    fresh_bandwidth: float = 0.0


@dataclass(frozen=True)
class OnDisk:
    """What a pack's layout has on disk, counted to the byte where the disk is small, and what an epoch reads of shared rows.

    Parameters
    ----------
    disk_bytes : int
        Of the whole layout.
    rows : int
        Of all epochs: in extents of batches, and shared.
    packed : int
        That an epoch has in the extents of its batches.
    length : int
        Batches of a segment that share rows; 1: none do.
    reads, n_bytes : int
        Of shared rows, an epoch: read operations after close pages were merged, and what they move.
    fails : str
        Why it cannot be made; empty where it can.
    """

    disk_bytes: int
    rows: int
    packed: int
    length: int = 1
    reads: int = 0
    n_bytes: int = 0
    fails: str = ""


@dataclass(frozen=True)
class Workload:
    """What an epoch asks for, and with what it is served.

    Parameters
    ----------
    n_rows, row_bytes : int
        Rows of the features and their bytes, all features together.
    n_batches, n_accesses : int
        Of an epoch.
    capacity : int
        Rows of the host cache.
    n_top : int
        Accesses that the ``capacity`` most used rows of this very epoch serve: a static policy's hits where samples are frozen.
    n_static : int, optional
        Accesses that the ``capacity`` most used rows of another epoch serve, where samples are fresh; ``n_top`` by default.
    n_degree : int, optional
        Accesses that the ``capacity`` rows of the most out-edges serve; None: not known.
    loads : int
        Rows that the planned policy loads in an epoch.
    sample_s, plan_s : float
        Seconds of sampling an epoch and of planning its cache.
    superbatch : int
        Batches that are planned together.
    count_s : float
        Seconds of counting how many batches of an epoch need each row.
    epochs : int
        That one-off work is spread over.
    disk_bytes : int, optional
        Most bytes of extents at once.
    has_pack : bool
        Offline samples are given, which every strategy would run; without them nothing can be packed for good.
    pack_epochs : int
        Epochs of those samples; each has extents of its own.
    layouts : mapping of str to int
        Bytes of the layouts that are there already, by policy.
    on_disk : mapping of str to OnDisk
        By policy, layouts that were counted to the byte, because the disk is small or because they are there.
    n_device : int
        Accesses that rows on the device serve; ``n_top``, ``n_static``, ``n_degree`` and ``loads`` are of the others.
    device_rows : int
        Rows on the device; with a pack those of its layout, for packed strategies alone.
    device_on_host : bool
        The device is the host itself, which then copies for it.
    online_loads : int, optional
        Rows that an online policy loads in its first epoch; None: not known.
    online_again : int
        In each epoch after it.
    ahead_bytes : int
        Memory that misses of several batches are read into at once, where the cache is planned; 0: each batch's alone.
    miss_share : float
        Of a batch's rows, those that the planned policy loads once the cache is full, with a margin.
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
    count_s: float = 0.0
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
    miss_share: float = 1.0

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
    """What one strategy would take.

    Attributes
    ----------
    strategy, policy : str
    epoch_s, once_s : float
        Seconds of each epoch; seconds before the first.
    rows_loaded : int
        Rows from storage, an epoch.
    disk_bytes : int
        Run files or packed extents at once.
    moved_bytes : int
        Of features, read and written in an epoch.
    parts : dict of str to float
        Seconds of an epoch by what is done; they overlap.
    impossible : str
        Why it cannot be taken; empty where it can.
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

    def total_s(self, epochs: int) -> float:
        """Seconds of so many epochs, one-off work included."""
        return self.once_s + epochs * self.epoch_s

    def to_dict(self, epochs: int) -> dict[str, Any]:
        """Return plain containers, for JSON."""
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
    """Return the read operations, and their bytes, of rows scattered evenly over a file, in so many gathers.

    Each gather merges reads of one page, and of pages no further apart than is cheaper than another read, as the reader does.
    """
    if not n_loads or not n_gathers:
        return 0.0, 0.0
    unit = max(1, -(-row_bytes // PAGE_BYTES)) * PAGE_BYTES  # what one row's read moves
    units = max(1.0, n_rows * row_bytes / unit)
    wanted = units * -math.expm1(-n_loads / n_gathers / units)
    density = wanted / units
    gap = drive.gap_bytes // unit
    bridged = sum(j * density * (1 - density) ** j for j in range(1, gap + 1))  # units read over, for each that is wanted
    reads = max(1.0, wanted * (1 - density) ** (gap + 1))
    return n_gathers * reads, n_gathers * min(wanted * (1 + bridged), units) * unit


def random_read_s(n_loads: int, n_gathers: int, n_rows: int, row_bytes: int, drive: DriveSpeed) -> float:
    """Seconds that :func:`random_reads` take.

    A read takes the time of an operation, which moves one page, and that of its other pages at the rate of gathers; so where
    nearly all pages are wanted it is a scan.
    """
    reads, n_bytes = random_reads(n_loads, n_gathers, n_rows, row_bytes, drive)
    return _reads_s(reads, n_bytes, drive)


def _reads_s(reads: float, n_bytes: float, drive: DriveSpeed) -> float:
    return reads / drive.iops + max(0.0, n_bytes - reads * PAGE_BYTES) / (drive.gather_bandwidth or drive.bandwidth)


def _copied_s(n_rows: float, w: Workload, m: Machine) -> float:
    return n_rows * w.row_bytes / m.copy_bandwidth


def _gathered_s(n_rows: int, w: Workload, m: Machine) -> float:
    return n_rows * w.row_bytes / (m.batch_bandwidth or m.copy_bandwidth)


def _admitted_s(n_rows: int, w: Workload, m: Machine) -> float:
    """Seconds of copying rows into the cache that were gathered just before: R22 at a tenth takes 0.1 s, the gathers 1.4 s."""
    return _copied_s(n_rows, w, m)


def _fresh_s(n_rows: float, w: Workload, m: Machine) -> float:
    """Seconds by which rows are copied more slowly into memory that is new."""
    return max(0.0, n_rows * w.row_bytes / (m.fresh_bandwidth or m.copy_bandwidth) - _copied_s(n_rows, w, m))


def _pipeline_s(producer_s: float, consumer_s: float, n: int) -> float:
    """Seconds of two stages beside each other, over ``n`` equal items: the first and the last wait for one another."""
    return producer_s / n + (n - 1) / n * max(producer_s, consumer_s) + consumer_s / n


def _scan_s(n_loads: int, w: Workload, n_scans: int, m: Machine) -> float:
    """Seconds of passes over the pieces of the base file that hold a wanted row."""
    pieces = max(1.0, w.base_bytes / PIECE_BYTES)
    each = n_loads / max(1, n_scans)
    wanted = pieces * -math.expm1(-each / pieces)
    return n_scans * min(wanted * PIECE_BYTES, w.base_bytes) / m.drive.bandwidth


def _put_together(w: Workload) -> int:
    """Return the rows that the host copies for a device that it is itself: the device's twice, the others once more."""
    return w.n_accesses + w.n_device if w.device_rows and w.device_on_host else 0


def _ondemand(w: Workload, m: Machine, policy: str, hits: int, counting_s: float) -> Estimate:
    loads = w.n_accesses - w.n_device - hits
    read = random_read_s(loads, w.n_batches, w.n_rows, w.row_bytes, m.drive)
    copy = _gathered_s(hits + _put_together(w), w, m)  # a gather's rate has that of the others
    fill = random_read_s(w.capacity, 1, w.n_rows, w.row_bytes, m.drive)
    fill += _copied_s(w.capacity, w, m) + _fresh_s(w.capacity, w, m)
    parts = {"sample": w.sample_s, "read": read, "copy": copy}
    moved = int(random_reads(loads, w.n_batches, w.n_rows, w.row_bytes, m.drive)[1])
    return Estimate("ondemand", policy, max(w.sample_s, read + copy), counting_s + fill, loads, 0, moved, parts)


def _ondemand_by_counts(w: Workload, m: Machine) -> Estimate:
    """Rows chosen by an epoch that is sampled to count them."""
    hits = w.n_top if w.n_static is None else w.n_static
    return _ondemand(w, m, STATIC if w.capacity else "none", hits, w.sample_s if w.capacity else 0.0)


def _ondemand_by_degree(w: Workload, m: Machine) -> Estimate:
    """Rows chosen by what the graph says of them."""
    found = _ondemand(w, m, DEGREE, w.n_degree or 0, 0.0)
    return found if w.n_degree is not None else replace(found, impossible="what the degrees would hit is not known")


def _ondemand_online(w: Workload, m: Machine) -> Estimate:
    """Rows chosen as they come: what is loaded is copied in, and the first epoch finds an empty cache."""
    loads = again = w.n_accesses - w.n_device
    if w.online_loads is not None:
        loads, again = w.online_loads, min(w.online_again, w.online_loads)
    found = _ondemand(w, m, ONLINE, w.n_accesses - w.n_device - again, 0.0)
    admit, first = _gathered_s(again, w, m), _gathered_s(loads, w, m)
    read = random_read_s(loads, w.n_batches, w.n_rows, w.row_bytes, m.drive)
    read_and_copy = found.parts["read"] + found.parts["copy"] + admit
    epoch = max(w.sample_s, read_and_copy)
    cold = max(w.sample_s, read + found.parts["copy"] + first) - epoch
    fresh = _fresh_s(min(w.capacity, loads), w, m)
    parts = {**found.parts, "copy": found.parts["copy"] + admit}
    impossible = "" if w.online_loads is not None else "what it would load is not known"
    return replace(found, epoch_s=epoch, once_s=cold + fresh, parts=parts, impossible=impossible)


def _superbatch(w: Workload, m: Machine) -> Estimate:
    stored = w.n_accesses * SAMPLE_BYTES
    inspect = w.sample_s + w.plan_s + stored / m.drive.write_bandwidth
    at_once = max(1, w.ahead_bytes // 2 // w.row_bytes)  # one half is read while the other is delivered from
    gathers = max(1, min(w.n_batches, -(-w.loads // at_once)))
    read = random_read_s(w.loads, gathers, w.n_rows, w.row_bytes, m.drive)
    copied = w.n_accesses - w.n_device + _put_together(w)
    copy = _gathered_s(copied + 2 * w.loads, w, m)  # out of where they were read to, and into the cache
    parts = {"inspect": inspect, "read": read, "copy": copy}
    n = w.n_superbatches
    disk = stored * min(4, n) // n
    moved = int(random_reads(w.loads, gathers, w.n_rows, w.row_bytes, m.drive)[1])
    return Estimate("superbatch", PLANNED, _pipeline_s(inspect, max(read, copy), n), 0.0, w.loads, disk, moved, parts)


def _streamed(w: Workload, m: Machine) -> Estimate:
    n, extents = w.n_superbatches, w.loads * w.row_bytes
    stored = w.n_accesses * SAMPLE_BYTES
    plans = ROW_TABLE_BYTES * w.n_accesses + (LOAD_TABLE_BYTES + ADMIT_TABLE_BYTES) * w.loads
    plans_s = min(stored, plans) / m.drive.write_bandwidth
    inspect = w.sample_s + w.plan_s + stored / m.drive.write_bandwidth
    scan = _scan_s(w.loads, w, n, m)
    write = extents / m.drive.write_bandwidth
    read = extents / m.drive.bandwidth
    copy = _gathered_s(w.n_accesses - w.n_device + _put_together(w), w, m) + _admitted_s(w.loads, w, m)
    parts = {"inspect": inspect, "scan": scan, "write": write, "read": read, "copy": copy}
    # The drive reads and writes at once, and packing runs beside the rest of planning once the misses are known.
    packed = scan + write - m.drive.write_overlap * min(scan, write)
    rest = (1 - FORESEEN) * w.plan_s + plans_s
    prepared = inspect - rest + max(rest, packed)
    # Packing beside reading shares the drive.
    epoch = max(_pipeline_s(prepared, max(read, copy), n), packed + read)
    disk = extents * min(2, n) // n + stored * min(4, n) // n
    impossible = ""
    if w.disk_bytes is not None and disk > w.disk_bytes:
        impossible = f"superbatches of {w.superbatch} take {format_size(disk)} of a disk of {format_size(w.disk_bytes)}"
    moved = int(scan * m.drive.bandwidth) + 2 * extents
    return Estimate("streamed", PLANNED, epoch, 0.0, w.loads, disk, moved, parts, impossible)


def _packed(w: Workload, m: Machine, policy: str, loads: int, updates: int, fill: int, plan_s: float) -> Estimate:
    """Frozen extents; ``fill`` are the rows that the host tier starts with, which have extents too, as the device's have."""
    at_start = fill + w.device_rows
    counted = w.on_disk.get(policy)
    if counted is None:
        tables = ROW_TABLE_BYTES * w.n_accesses + LOAD_TABLE_BYTES * loads + ADMIT_TABLE_BYTES * updates
        rows = loads * w.pack_epochs
        counted = OnDisk((rows + at_start) * w.row_bytes + tables * w.pack_epochs, rows, loads)
    once = at_start * w.row_bytes / (m.drive.fill_bandwidth or m.drive.bandwidth) + _fresh_s(at_start, w, m)
    once += _fresh_s(min(w.capacity, updates), w, m)
    disk = w.layouts.get(policy, counted.disk_bytes)
    if policy not in w.layouts:
        once += (plan_s + MAKE_TABLES[policy] * w.count_s) * w.pack_epochs
        written = counted.rows + at_start
        once += _scan_s(written, w, 1, m) + written * w.row_bytes / m.drive.write_bandwidth
    impossible = counted.fails if w.has_pack else "needs pack=, offline samples"
    if not impossible and w.disk_bytes is not None and disk > w.disk_bytes:
        what = "the layout that is there takes" if policy in w.layouts else "extents take"
        impossible = f"{what} {format_size(disk)} of a disk of {format_size(w.disk_bytes)}"
    copied = w.n_accesses - w.n_device + _put_together(w)
    read, copy = counted.packed * w.row_bytes / m.drive.bandwidth, _gathered_s(copied, w, m) + _admitted_s(updates, w, m)
    parts = {"read": read, "copy": copy}
    if counted.length > 1:  # shared rows are read when their batch's turn comes, extents ahead
        parts["shared"] = _reads_s(counted.reads, counted.n_bytes, m.drive)
    moved = counted.packed * w.row_bytes + counted.n_bytes
    return Estimate("packed", policy, max(read, copy) + parts.get("shared", 0.0), once, loads, disk, moved, parts, impossible)


def _frequency_packed(w: Workload, m: Machine) -> Estimate:
    return _packed(w, m, STATIC, w.n_accesses - w.n_device - w.n_top, 0, w.capacity, 0.0)


def _belady_packed(w: Workload, m: Machine) -> Estimate:
    return _packed(w, m, PLANNED, w.loads, w.loads, 0, w.plan_s)


CANDIDATES: Mapping[tuple[str, str], Callable[[Workload, Machine], Estimate]] = {
    ("ondemand", STATIC): _ondemand_by_counts,
    ("ondemand", DEGREE): _ondemand_by_degree,
    ("ondemand", ONLINE): _ondemand_online,
    ("superbatch", PLANNED): _superbatch,
    ("streamed", PLANNED): _streamed,
    ("packed", STATIC): _frequency_packed,
    ("packed", PLANNED): _belady_packed,
}


def estimate_all(w: Workload, m: Machine, others: Sequence[Estimate] = ()) -> list[Estimate]:
    """Estimate every strategy, also those that cannot be taken, with the reason; ``others`` are estimated already."""
    # The first epoch's buffers are new memory, which streaming takes while the drive is busy with extents.
    buffers = _fresh_s(BUFFERS * w.n_accesses / max(1, w.n_batches), w, m)
    found = [
        each if each.strategy == "streamed" else replace(each, once_s=each.once_s + buffers)
        for each in (*(estimator(w, m) for estimator in CANDIDATES.values()), *others)
    ]
    if not (w.device_rows and w.has_pack):
        return found
    return [  # a pack's layout has chosen the device's rows
        each if each.impossible or each.strategy == "packed" else replace(each, impossible="has no rows on the device")
        for each in found
    ]


def cheapest(estimates: Sequence[Estimate], epochs: int) -> tuple[Estimate, str]:
    """Return the possible one that takes least for so many epochs, and why.

    Of those that are nearer to each other than estimates are exact, the one whose epochs take least: what is made once may be
    used again.

    Raises
    ------
    ValueError
        None is possible.
    """
    possible = sorted((each for each in estimates if not each.impossible), key=lambda each: each.total_s(epochs))
    if not possible:
        raise ValueError("; ".join(f"{each.strategy} ({each.policy}): {each.impossible}" for each in estimates))
    near = [each for each in possible if each.total_s(epochs) <= (1 + TIE) * possible[0].total_s(epochs)]
    best = min(near, key=lambda each: (each.epoch_s, each.total_s(epochs)))
    possible = [best, *(each for each in possible if each is not best)]
    part, seconds = max(best.parts.items(), key=lambda item: item[1])
    reason = (
        f"{best.total_s(epochs):.3g} s for {epochs} {'epoch' if epochs == 1 else 'epochs'}, most of it {part} ({seconds:.3g} s)"
    )
    if len(possible) > 1:
        second = possible[1]
        reason += f"; next is {second.strategy} ({second.policy}) with {second.total_s(epochs):.3g} s"
    return best, reason


def table(estimates: Sequence[Estimate], epochs: int, taken: Estimate | None = None) -> str:
    """Return estimates as text, a line a strategy."""
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
