"""Choosing a strategy: what a recorded trace says of an epoch, what the machine was measured to do, estimates from both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.base import get_policy
from featstore.cache.rowmap import huge_array
from featstore.cache.select import top_rows
from featstore.cache.table import FeatureCache
from featstore.config import Budget
from featstore.gather.executor import MemorySource
from featstore.plan.cost import SAMPLE_BYTES, Estimate, Machine, Workload, cheapest, estimate_all, table
from featstore.plan.planmemory import planning_bytes
from featstore.plan.simulate import row_counts, simulate
from featstore.plan.trace import Trace

__all__ = ["Choice", "choose", "copy_bandwidth", "expected_hits", "extrapolated", "observe", "top_sum"]

Int64s = npt.NDArray[np.int64]

COPY_BYTES = 64 << 20
ONLINE_BYTES = 64  # an access of a batch, while an online policy is simulated
MISS_MARGIN = 1.25  # superbatches differ
REPEATS = 0.05  # of the rows loaded late: fewer are chance
MOST_BATCHES = 200  # that are recorded; the rest of the epoch is taken to be like them


@dataclass(frozen=True)
class Choice:
    """The estimates, the one that was taken, and why."""

    workload: Workload
    machine: Machine
    estimates: list[Estimate]
    taken: Estimate
    reason: str

    def table(self) -> str:
        """Return the estimates as text, the one that was taken marked by a star."""
        head = (
            f"{self.workload.capacity:,} rows in memory ({self.workload.capacity / max(1, self.workload.n_rows):.3g} of all); "
            f"{self.machine.device.iops:,.0f} random reads/s, {self.machine.device.bandwidth / 1e9:.2f} GB/s read, "
            f"{self.machine.device.gather_bandwidth / 1e9:.2f} GB/s gathered, "
            f"{self.machine.device.write_bandwidth / 1e9:.2f} GB/s written, {self.machine.copy_bandwidth / 1e9:.2f} GB/s copied"
        )
        taken = f"taken: {self.taken.strategy} ({self.taken.policy}): {self.reason}"
        return f"{head}\n{table(self.estimates, self.workload.epochs, self.taken)}\n{taken}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, for JSON."""
        epochs, device = self.workload.epochs, self.machine.device
        return {
            "taken": self.taken.to_dict(epochs),
            "reason": self.reason,
            "epochs": epochs,
            "capacity": self.workload.capacity,
            "estimates": [each.to_dict(epochs) for each in self.estimates],
            "device": {
                "iops": device.iops,
                "bandwidth": device.bandwidth,
                "write_bandwidth": device.write_bandwidth,
                "gather_bandwidth": device.gather_bandwidth,
                "copy_bandwidth": self.machine.copy_bandwidth,
            },
        }


def choose(workload: Workload, machine: Machine) -> Choice:
    """Estimate every strategy and take the cheapest that is possible."""
    estimates = estimate_all(workload, machine)
    taken, reason = cheapest(estimates, workload.epochs)
    return Choice(workload, machine, estimates, taken, reason)


def copy_bandwidth(row_bytes: int, n_threads: int, budget: Budget) -> float:
    """Measure at how many bytes a second the executor copies scattered rows within memory (some 10 ms)."""
    n = max(16, min(COPY_BYTES, budget.available // 8) // max(1, row_bytes))
    with budget.reserve("measuring copies", n * row_bytes * 5 // 4 + 8 * n):
        # Huge pages, as caches and pools have; written before, because pages that never were are all one page.
        array = huge_array(n * row_bytes).reshape(n, row_bytes)
        out = huge_array(max(4, n // 4) * row_bytes).reshape(-1, row_bytes)
        for each in (array, out):
            each.fill(1)
        rows = np.random.default_rng(0).integers(0, n, len(out)).astype(np.int32)
        source = MemorySource(array, n_threads)
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            source.gather(rows, out, None)
            best = max(best, out.nbytes / max(1e-9, time.perf_counter() - start))
    return best


def observe(
    trace: Trace,
    *,
    row_bytes: int,
    capacity: int,
    budget: Budget,
    n_batches: int | None = None,
    sample_s: float = 0.0,
    superbatch: int | None = None,
    epochs: int = 1,
    disk_bytes: int | None = None,
    has_pack: bool = False,
    pack_epochs: int = 1,
    layouts: Mapping[str, int] | None = None,
    device_rows: int = 0,
    device_on_host: bool = True,
    online: str | None = None,
    ahead_bytes: int = 0,
    out_degree: npt.NDArray[Any] | None = None,
) -> Workload:
    """Find out what the cost model wants to know of an epoch.

    Parameters
    ----------
    trace : Trace
        Some or all batches of the epoch.
    row_bytes : int
        Of all features together.
    capacity : int
        Rows of the host cache.
    budget : Budget
        Pays for the simulation.
    n_batches : int, optional
        Of the epoch, where the trace has fewer: its counts are then scaled.
    sample_s : float
        Seconds of sampling the traced batches.
    superbatch : int, optional
        As many batches as fit the disk by default, 200 at most.
    online : str, optional
        An online policy to simulate as well.
    epochs, disk_bytes, has_pack, pack_epochs, layouts, device_rows, device_on_host, ahead_bytes
        See :class:`~featstore.plan.cost.Workload`.
    out_degree : integer array, shape (n,), optional
        Of the rows, for what a cache by degree would hit.

    Raises
    ------
    BudgetError
        The budget does not suffice to simulate Belady's policy over the trace.
    """
    recorded = len(trace)
    total = recorded if n_batches is None else n_batches
    scale = total / max(1, recorded)
    capacity = min(capacity, trace.n)
    device_rows = min(device_rows, trace.n)
    with budget.reserve("cost model", (25 + bool(device_rows)) * trace.n):
        begin = time.perf_counter()
        counts = row_counts(trace)
        count_s = time.perf_counter() - begin
        rest = trace
        n_device = n_all = 0
        if device_rows:
            n_device = round(expected_hits(counts, device_rows, recorded))
            n_all = round(expected_hits(counts, device_rows + capacity, recorded))
            rest = _without(trace, top_rows(counts, device_rows), counts)
        seen, fresh = np.zeros(trace.n, bool), np.zeros(recorded, np.int64)
        for number, ids in enumerate(rest):
            fresh[number] = len(ids) - np.count_nonzero(seen[ids])
            seen[ids] = True
        del seen
        n_top = top_sum(counts, capacity)
        n_static = n_all - n_device if device_rows else round(expected_hits(counts, capacity, recorded))
        n_degree = None if out_degree is None else int(counts[top_rows(out_degree, capacity)].sum())
        with budget.reserve("simulation", planning_bytes(trace.n, rest.n_accesses, longest=rest.longest)):
            loaded, plan_s = _planned(rest, capacity, total)
        online_loaded = None if online is None or not capacity else _online(rest, capacity, online, budget)
    loads = int(loaded.sum())
    if total != recorded:
        # Rows chosen on a few batches serve those too well; those that a whole epoch of frozen samples chooses do no worse than
        # degrees.
        n_top = max(n_static, n_degree or 0)
        # The device's rows were chosen on these batches, too.
        unseen = (trace.n_accesses - n_device) / max(1, rest.n_accesses)
        loads = round(unseen * extrapolated(loaded, fresh, total) / scale)
    else:
        n_device = trace.n_accesses - rest.n_accesses
    late = slice(recorded - max(1, recorded // 4), recorded)
    miss_share = min(1.0, MISS_MARGIN * float(loaded[late].sum()) / max(1, int(rest.lengths[late].sum())))
    stored = 4 * SAMPLE_BYTES * trace.n_accesses + 2 * loads * row_bytes  # at once, as many superbatches as lie on disk
    most = MOST_BATCHES if disk_bytes is None else disk_bytes * recorded // max(1, stored)
    return Workload(
        n_rows=trace.n,
        row_bytes=row_bytes,
        n_batches=total,
        n_accesses=round(trace.n_accesses * scale),
        capacity=capacity,
        n_top=round(n_top * scale),
        loads=round(loads * scale),
        sample_s=sample_s * scale,
        plan_s=plan_s,
        count_s=count_s * scale,
        superbatch=max(1, min(total, MOST_BATCHES, most) if superbatch is None else min(total, superbatch)),
        epochs=epochs,
        disk_bytes=disk_bytes,
        has_pack=has_pack,
        pack_epochs=pack_epochs,
        n_static=round(n_static * scale),
        n_degree=None if n_degree is None else round(n_degree * scale),
        layouts={} if layouts is None else dict(layouts),
        n_device=round(n_device * scale),
        device_rows=device_rows,
        device_on_host=device_on_host,
        online_loads=None if online_loaded is None else round(extrapolated(online_loaded, fresh, total)),
        online_again=0
        if online_loaded is None
        else _again(online_loaded, fresh, total, round((trace.n_accesses - n_static) * scale)),
        ahead_bytes=ahead_bytes,
        miss_share=miss_share,
    )


def _part(trace: Trace, n_batches: int) -> Trace:
    return Trace.reading(lambda number: trace[number], trace.lengths[:n_batches], trace.n)


def _without(trace: Trace, rows: Int64s, counts: Int64s) -> Trace:
    """Return a trace without some rows, whose counts become 0."""
    left = np.ones(trace.n, bool)
    left[rows], counts[rows] = False, 0
    lengths = np.array([np.count_nonzero(left[ids]) for ids in trace], np.int64)

    def ids_of(number: int) -> npt.NDArray[Any]:
        ids = trace[number]
        found: npt.NDArray[Any] = ids[left[ids]]
        return found

    return Trace.reading(ids_of, lengths, trace.n)


def _planned(trace: Trace, capacity: int, n_batches: int) -> tuple[Int64s, float]:
    """Return the rows that Belady's policy loads, and the seconds in which so many batches are planned.

    What planning takes whatever the batches, of a part of them, is not scaled.
    """
    few, few_s = max(1, len(trace) // 4), 0.0
    if n_batches > len(trace) > 1:
        begin = time.perf_counter()
        simulate(_part(trace, few), capacity, "belady")
        few_s = time.perf_counter() - begin
    begin = time.perf_counter()
    loaded = simulate(trace, capacity, "belady")
    whole_s = time.perf_counter() - begin
    more = n_batches - len(trace)
    each = max(0.0, whole_s - few_s) / max(1, len(trace) - few) if few_s else whole_s / max(1, len(trace))
    return loaded, whole_s + more * each


def _online(trace: Trace, capacity: int, policy: str, budget: Budget) -> Int64s:
    """Return the rows that an online policy loads from an empty cache."""
    n_bytes = FeatureCache.least_bytes(capacity, 1, trace.n, get_policy(policy)) + ONLINE_BYTES * trace.longest
    with budget.reserve("simulation", n_bytes):
        return simulate(trace, capacity, policy)


def _again(loaded: Int64s, fresh: Int64s, n_batches: int, unseen: int) -> int:
    """Return how many rows an online policy loads in a later epoch: at the rate of a full cache, or those it never saw."""
    half = len(loaded) // 2
    late, again = float(loaded[half:].sum()), float((loaded[half:] - fresh[half:]).sum())
    if again > REPEATS * late:
        return round(n_batches * late / (len(loaded) - half))
    return unseen


def extrapolated(loaded: npt.NDArray[np.int64], fresh: npt.NDArray[np.int64], n_batches: int) -> float:
    """Return how many rows Belady's policy loads in an epoch of ``n_batches``, from those of its first batches.

    Parameters
    ----------
    loaded : int64 array
        Rows loaded in each of the first batches.
    fresh : int64 array
        Of its rows, those that no batch before had.
    n_batches : int

    Notes
    -----
    Where rows are loaded again, the cache is full, and goes on at the rate of the last half. Where none are, what is loaded are
    the distinct rows, whose number grows as a power of the batches (Heaps' law).
    """
    n = len(loaded)
    if n >= n_batches or not loaded.sum():
        return float(loaded.sum()) * n_batches / max(1, n)
    half = n // 2
    late, again = float(loaded[half:].sum()), float((loaded[half:] - fresh[half:]).sum())
    total = float(loaded.sum())
    if not half or again > REPEATS * late:
        return total + (n_batches - n) * late / (n - half)
    growth = np.log(total / max(1.0, total - late)) / np.log(n / half)
    return float(total * (n_batches / n) ** min(1.0, growth))


def top_sum(counts: npt.NDArray[np.int64], capacity: int) -> int:
    """Return the sum of the ``capacity`` highest counts, which are small numbers: counted, not sorted, and copied nowhere."""
    rows_of = np.bincount(counts)[::-1]  # rows of each count, the highest first
    taken = np.diff(np.minimum(np.cumsum(rows_of), capacity), prepend=0)
    return int((taken * np.arange(len(rows_of) - 1, -1, -1)).sum())


def expected_hits(counts: npt.NDArray[np.int64], capacity: int, n_batches: int) -> float:
    """Return how many accesses of other batches, as many, the ``capacity`` rows of the highest counts would serve.

    Counted on the batches that chose them, those rows would serve too many: each access helped to choose its row. So each is
    judged by the counts of all batches but its own, brought to the same number of batches.
    """
    n = len(counts)
    if not capacity or not n:
        return 0.0
    if capacity >= n or n_batches < 2:  # one batch says nothing of another
        return float(counts.sum()) * min(1.0, capacity / n)
    rows_of = np.bincount(counts)  # rows of each count
    above = np.cumsum(rows_of[::-1])[::-1] - rows_of  # rows of a higher one, which are kept first
    kept = np.clip((capacity - above) / np.maximum(1, rows_of), 0.0, 1.0)
    k = np.arange(1, len(rows_of))
    chance = np.interp((k - 1) * n_batches / (n_batches - 1), np.arange(len(kept)), kept)
    return float((k * rows_of[1:] * chance).sum())
