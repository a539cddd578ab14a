"""Choice of a strategy: an epoch described by a recorded trace, the machine's measured rates, and estimates from both."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.cache.base import get_policy
from featstore.cache.select import top_rows
from featstore.cache.table import FeatureCache
from featstore.estimate.cost import Estimate, Machine, Workload, table
from featstore.estimate.epochmodel import MODEL_BYTES, EpochModel
from featstore.estimate.misses import MissCurves, Misses
from featstore.estimate.rowsample import NUMBERED_BYTES, RowSample, numbered
from featstore.estimate.unseen import count_accesses, count_bytes, distinct_rows
from featstore.plan.planmemory import planning_bytes
from featstore.plan.simulate import simulate
from featstore.plan.trace import Trace

__all__ = ["Choice", "chosen_mask", "expected_hits", "extrapolated", "observe", "static_hits", "top_sum"]

Int64s = npt.NDArray[np.int64]

TALLY_BYTES = 32  # per access of a batch, while it is counted
ONLINE_BYTES = 64  # per access of a batch, while an online policy is simulated
TIMED = 3  # batches on which planning is timed
REPLAYED = 1 << 18  # accesses that suffice to predict an epoch's hits within 1 %
MISS_MARGIN = 1.25  # factor on misses, since superbatches differ
CURVE = (1 / 8, 1 / 4, 1 / 2, 1)  # sizes, as fractions of the cache, at which misses are counted
REPEATS = 0.05  # share of repeated rows in the rows loaded late; a smaller share is chance


@dataclass(frozen=True)
class Choice:
    """The estimates, the taken one, and the reason."""

    workload: Workload
    machine: Machine
    estimates: list[Estimate]
    taken: Estimate
    reason: str
    note: str = ""  # facts that were not known yet
    passes: int | None = None  # over the features, of an epoch in superbatches of the workload's length
    advice: str | None = None  # for fewer passes

    def table(self) -> str:
        """Format the estimates as text, with a star at the taken one."""
        drive = self.machine.drive
        head = (
            f"{self.workload.capacity:,} rows in memory ({self.workload.capacity / max(1, self.workload.n_rows):.3g} of all); "
            f"{drive.iops:,.0f} random reads/s, {drive.bandwidth / 1e9:.2f} GB/s read, "
            f"{drive.gather_bandwidth / 1e9:.2f} GB/s gathered, "
            f"{drive.write_bandwidth / 1e9:.2f} GB/s written ({drive.write_overlap:.0%} of it beside reads), "
            f"{drive.fill_bandwidth / 1e9:.2f} GB/s filled; copied {self.machine.copy_bandwidth / 1e9:.2f} GB/s, "
            f"by plan {self.machine.batch_bandwidth / 1e9:.2f}, into fresh memory {self.machine.fresh_bandwidth / 1e9:.2f}"
        )
        taken = f"taken: {self.taken.strategy} ({self.taken.policy}): {self.reason}"
        if self.workload.device_rows:
            head += f"; {self.workload.device_rows:,} rows on the device"
        head += f"\n{self.note}" if self.note else ""
        taken += f"\n{self.advice}" if self.advice else ""
        return f"{head}\n{table(self.estimates, self.workload.epochs, self.taken)}\n{taken}"

    def to_dict(self) -> dict[str, Any]:
        epochs = self.workload.epochs
        return {
            "taken": self.taken.to_dict(epochs),
            "reason": self.reason,
            "epochs": epochs,
            "capacity": self.workload.capacity,
            "device_rows": self.workload.device_rows,
            "note": self.note,
            "superbatch": {"batches": self.workload.superbatch, "passes": self.passes, "advice": self.advice},
            "estimates": [each.to_dict(epochs) for each in self.estimates],
            **asdict(self.machine),  # the drive's rates under "drive"
        }


def chosen_mask(scores: npt.NDArray[Any], n_rows: int) -> npt.NDArray[np.bool_]:
    """Mark the ``n_rows`` rows of the highest scores, bool [n]; takes 8 bytes for each of these meanwhile."""
    mask = np.zeros(len(scores), bool)
    mask[top_rows(scores, n_rows)] = True
    return mask


def observe(
    trace: Trace,
    *,
    row_bytes: int,
    capacity: int,
    budget: Budget,
    n_batches: int | None = None,
    sample_s: float = 0.0,
    passes_s: float = 0.0,
    sample_read_s: float = 0.0,
    superbatch: int | None = None,
    epochs: int = 1,
    disk_bytes: int | None = None,
    has_pack: bool = False,
    pack_epochs: int = 1,
    layouts: Mapping[str, int] | None = None,
    device_rows: int = 0,
    device_on_host: bool = True,
    on_device: npt.NDArray[np.bool_] | None = None,
    online: str | None = None,
    ahead_bytes: int = 0,
    out_degree: npt.NDArray[Any] | None = None,
) -> Workload:
    """Describe an epoch for the cost model by a trace of some or all of its batches.

    ``row_bytes`` is the sum over all features; ``capacity`` is the rows of the host cache. ``n_batches`` is the number of batches
    of the epoch; if the trace has fewer, counts are scaled. Sampling the traced batches took ``sample_s`` seconds. Of these,
    passes over neighbour lists took ``passes_s``, which does not grow with the batches. ``online`` names an online policy to
    simulate as well. The device holds the rows of ``on_device``, or the ``device_rows`` that most batches need. ``out_degree`` is
    used to count the hits of a cache by degree. The other arguments go to :class:`~featstore.estimate.cost.Workload`.

    Takes memory for accesses and for slots of the cache, and a byte for each row of the field. BudgetError: too little memory to
    simulate Belady's policy.
    """
    recorded = len(trace)
    total = recorded if n_batches is None else n_batches
    # If the trace is only a part of the epoch, the rest is extrapolated anyway, and a part of the rows serves as well.
    halvings = 0 if recorded == total else max(0, math.ceil(math.log2(max(1, trace.n_accesses) / REPLAYED)))
    if halvings:
        n_bytes = (8 * trace.n >> halvings) + (NUMBERED_BYTES + 16) * 2 * REPLAYED + TALLY_BYTES * trace.longest
        n_bytes += 8 * (capacity >> halvings)
        with budget.reserve("cost model", n_bytes):
            sample = RowSample(trace.n, halvings)
            numbers, part = numbered(sample.trace(trace))
            rooms = [max(min(1, each), each >> halvings) for each in (capacity, device_rows)]
            by_degree = [] if out_degree is None else _by_degree(sample.values(out_degree), rooms[0], numbers)
            held = None if on_device is None else on_device[sample.rows(numbers)]
            seen = _look(part, round(trace.n / 2**halvings), rooms[0], rooms[1], total, held, by_degree, online, budget)
            seen.grow(trace.n_accesses / max(1, part.n_accesses))
            del part, numbers, by_degree, held
        # A part's arrays lie in the processor's caches, so planning is timed on all rows of a few batches.
        few = trace.head(TIMED)
        slots = min(capacity, trace.n)
        with budget.reserve("simulation", planning_bytes(trace.n, few.n_accesses, longest=few.longest, capacity=slots)):
            _, seen.plan_s = _planned(few, slots, total)
    elif trace.n > trace.n_accesses:  # most rows are never requested
        with budget.reserve(
            "cost model", trace.n + (NUMBERED_BYTES + len(CURVE)) * trace.n_accesses + 8 * min(capacity, trace.n)
        ):
            rows, asked = numbered(trace)
            by_degree = [] if out_degree is None else _by_degree(out_degree, capacity, rows)
            held = None if on_device is None else on_device[rows]
            seen = _look(asked, trace.n, capacity, device_rows, total, held, by_degree, online, budget)
            del asked, rows, by_degree, held
    else:
        with budget.reserve("cost model", 0 if out_degree is None else len(CURVE) * trace.n + 8 * min(capacity, trace.n)):
            by_degree = [] if out_degree is None else _by_degree(out_degree, capacity)
            seen = _look(trace, trace.n, capacity, device_rows, total, on_device, by_degree, online, budget)
            del by_degree
    scale = total / max(1, recorded)
    # Counts are subtracted before they are rounded; rounded separately, the hits could exceed the accesses.
    accesses = trace.n_accesses * scale
    n_accesses, n_others = round(accesses), round(accesses - seen.n_device)

    def hits(n: float) -> int:
        return n_others - round(accesses - seen.n_device - n)

    return Workload(
        n_rows=trace.n,
        row_bytes=row_bytes,
        n_batches=total,
        n_accesses=n_accesses,
        capacity=min(capacity, trace.n),
        n_top=hits(seen.n_top),
        loads=round(seen.loads),
        sample_s=passes_s + (sample_s - passes_s) * scale,
        plan_s=seen.plan_s,
        sample_read_s=sample_read_s,
        superbatch=max(1, total if superbatch is None else min(total, superbatch)),
        epochs=epochs,
        disk_bytes=disk_bytes,
        has_pack=has_pack,
        pack_epochs=pack_epochs,
        n_static=hits(seen.n_static),
        n_degree=None if seen.n_degree is None else hits(seen.n_degree),
        layouts={} if layouts is None else dict(layouts),
        n_device=n_accesses - n_others,
        device_rows=min(device_rows, trace.n),
        device_on_host=device_on_host,
        online_loads=None if seen.online_loads is None else round(seen.online_loads),
        online_again=round(seen.online_again),
        ahead_bytes=ahead_bytes,
        misses=MissCurves(
            _curve(min(capacity, trace.n), seen.planned_misses, seen.planned_loads),
            _curve(min(capacity, trace.n), seen.degree_misses),
        ),
    )


def _by_degree(degrees: npt.NDArray[Any], capacity: int, rows: Int64s | None = None) -> list[npt.NDArray[np.bool_]]:
    """Mark the rows of the most out-edges at each size of :data:`CURVE`, for all rows or for ``rows``."""
    masks = (chosen_mask(degrees, round(share * capacity)) for share in CURVE)
    return [mask if rows is None else mask[rows] for mask in masks]


def _curve(capacity: int, shares: tuple[float, ...], of_epochs: tuple[float, ...] | None = None) -> Misses:
    """Make the curve of misses counted at the last sizes of :data:`CURVE`."""
    return Misses(tuple(round(share * capacity) for share in CURVE[len(CURVE) - len(shares) :]), shares, of_epochs)


@dataclass
class _Seen:
    """Estimates of an epoch from some of its batches: accesses that hit, rows loaded, seconds."""

    n_device: float
    n_static: float
    n_top: float
    n_degree: float | None
    loads: float
    online_loads: float | None
    online_again: float
    plan_s: float
    planned_misses: tuple[float, ...]  # shares of a batch's rows, at the sizes of CURVE or the last
    planned_loads: tuple[float, ...]  # shares of an epoch's rows
    degree_misses: tuple[float, ...]

    def grow(self, factor: float) -> None:
        """Scale the estimates from a part of the rows to all, by ``factor``; shares stay."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not isinstance(value, tuple):
                setattr(self, each.name, factor * value)


def _look(
    trace: Trace,
    n: int,
    capacity: int,
    device_rows: int,
    total: int,
    on_device: npt.NDArray[np.bool_] | None,
    by_degree: list[npt.NDArray[np.bool_]],
    online: str | None,
    budget: Budget,
) -> _Seen:
    """Count and simulate a trace over all of ``n`` rows, or over numbers of the requested rows alone."""
    recorded = len(trace)
    scale = total / max(1, recorded)
    capacity, device_rows = min(capacity, n), min(device_rows, n)
    chosen_bytes = 0 if not device_rows else trace.n + (0 if on_device is not None else 8 * min(device_rows, trace.n))
    with budget.reserve("cost model", count_bytes(trace) * trace.n + chosen_bytes + TALLY_BYTES * trace.longest):
        counts, rows_of, fresh = count_accesses(trace)
        rows_of[0] -= trace.n - n
        rest, n_device = trace, 0.0
        n_static = static_hits(rows_of, device_rows + capacity, recorded, total)
        if device_rows:
            is_given = on_device is not None
            if on_device is None:
                n_device = static_hits(rows_of, device_rows, recorded, total)
                n_static -= n_device
                on_device = chosen_mask(counts, device_rows)
            rest = _without(trace, on_device)
            del counts
            counts, rows_of, fresh = count_accesses(rest)
            rows_of[0] -= trace.n - n
            if is_given:  # these rows were chosen without looking at the batches
                n_device = scale * (trace.n_accesses - rest.n_accesses)
                n_static = static_hits(rows_of, capacity, recorded, total)
        n_top = float(top_sum(rows_of, capacity))
        of_degree = [float(np.sum(counts, dtype=np.int64, where=rows)) for rows in by_degree]
        del counts
        slots = min(capacity, trace.n)
        with budget.reserve("simulation", planning_bytes(trace.n, rest.n_accesses, longest=rest.longest, capacity=slots)):
            loaded, plan_s = _planned(rest, capacity, total)
            # A whole epoch may be long, so only the given cache size is simulated.
            curve = [int(share * capacity) for share in (CURVE if total != recorded else CURVE[-1:])]
            curve_loads = [*(simulate(rest, rows, "belady") for rows in curve[:-1]), loaded]
        online_loaded = None if online is None or not slots else _online(rest, slots, online, budget)
        of_model, online_of_model = [0.0] * len(curve), 0.0
        most = min(REPLAYED, round(scale * rest.n_accesses), budget.available // (4 * MODEL_BYTES))
        if total != recorded and most:
            with budget.reserve("simulation", MODEL_BYTES * most):
                model = EpochModel.like(rows_of, total, most)
                of_model = [model.share(simulate(model.trace, model.rows(rows), "belady")) for rows in curve]
                if online is not None and online_loaded is not None:
                    online_of_model = model.share(_online(model.trace, max(1, model.rows(slots)), online, budget))
    n_degree = scale * of_degree[-1] if of_degree else None
    n_accesses, distinct = scale * trace.n_accesses, float(distinct_rows(rows_of, recorded, max(recorded, total)))
    loads = float(loaded.sum())
    epoch_loads = [loads]
    if total != recorded:
        # Rows chosen on a few batches serve these batches too well. Rows chosen on a whole epoch of frozen samples do no worse
        # than rows by degree, and serve all accesses if there is room for all rows.
        n_top = n_accesses - n_device if distinct <= capacity else max(n_static, n_degree or 0.0)
        # The device's rows were chosen on these batches, too.
        unseen = (n_accesses - n_device) / max(1.0, scale * rest.n_accesses)
        rest_accesses = scale * rest.n_accesses
        epoch_loads = [
            unseen * extrapolated(each, fresh, total, distinct, share * rest_accesses)
            for each, share in zip(curve_loads, of_model, strict=True)
        ]
        loads = epoch_loads[-1]
    else:
        n_device = float(trace.n_accesses - rest.n_accesses)
        n_static = min(n_static, n_accesses - n_device)  # n_static is for another epoch, of which the device's rows serve less
    late = slice(recorded - max(1, recorded // 4), recorded)
    asked = max(1, int(rest.lengths[late].sum()))
    misses = tuple(min(1.0, MISS_MARGIN * float(each[late].sum()) / asked) for each in curve_loads)
    shares = tuple(min(1.0, each / max(1.0, n_accesses - n_device)) for each in epoch_loads)
    degree_misses = tuple(1 - hits / max(1, rest.n_accesses) for hits in of_degree)
    first, again = None, 0.0
    if online_loaded is not None:
        first = extrapolated(online_loaded, fresh, total, distinct, online_of_model * scale * rest.n_accesses)
        rate = _rate(online_loaded, fresh)
        again = n_accesses - n_static if rate is None else total * rate
    return _Seen(n_device, n_static, n_top, n_degree, loads, first, again, plan_s, misses, shares, degree_misses)


def _without(trace: Trace, rows: npt.NDArray[np.bool_]) -> Trace:
    left = ~rows
    lengths = np.array([np.count_nonzero(left.take(ids)) for ids in trace], np.int64)

    def ids_of(number: int) -> npt.NDArray[Any]:
        ids = trace[number]
        found: npt.NDArray[Any] = ids[left.take(ids)]
        return found

    return Trace.reading(ids_of, lengths, trace.n)


def _planned(trace: Trace, capacity: int, n_batches: int) -> tuple[Int64s, float]:
    """Simulate Belady's policy: return the rows loaded a batch, and the seconds of planning ``n_batches``.

    If the trace has fewer batches, only the seconds per batch are scaled, not the fixed ones.
    """
    few, few_s = max(1, len(trace) // 4), 0.0
    if n_batches > len(trace) > 1:
        begin = time.perf_counter()
        simulate(trace.head(few), capacity, "belady")
        few_s = time.perf_counter() - begin
    begin = time.perf_counter()
    loaded = simulate(trace, capacity, "belady")
    whole_s = time.perf_counter() - begin
    more = n_batches - len(trace)
    each = max(0.0, whole_s - few_s) / max(1, len(trace) - few) if few_s else whole_s / max(1, len(trace))
    return loaded, whole_s + more * each


def _online(trace: Trace, capacity: int, policy: str, budget: Budget) -> Int64s:
    """Simulate an online policy from an empty cache; return the rows loaded a batch."""
    n_bytes = FeatureCache.least_bytes(capacity, 1, trace.n, get_policy(policy)) + ONLINE_BYTES * trace.longest
    with budget.reserve("simulation", n_bytes):
        return simulate(trace, capacity, policy)


def extrapolated(loaded: Int64s, fresh: Int64s, n_batches: int, distinct: float, modelled: float) -> float:
    """Estimate the rows that a policy loads in an epoch of ``n_batches``, which requests ``distinct`` rows.

    ``loaded`` has the rows loaded in each of the first batches, ``fresh`` the rows in no batch before. A full cache goes on as it
    did. If it is not full yet, ``modelled`` rows are loaded, those of an :class:`~featstore.estimate.epochmodel.EpochModel`; but
    each distinct row at least.
    """
    n, total = len(loaded), float(loaded.sum())
    if n >= n_batches or not total:
        return total * n_batches / max(1, n)
    rate = _rate(loaded, fresh)
    if rate is not None:
        return total + (n_batches - n) * rate
    return max(modelled, total + max(0.0, distinct - float(fresh.sum())))


def _rate(loaded: Int64s, fresh: Int64s) -> float | None:
    """Compute the rows a batch that a full cache loads, from the last half of the batches; None if it is not full yet."""
    half = len(loaded) // 2
    late, again = float(loaded[half:].sum()), float((loaded[half:] - fresh[half:]).sum())
    return late / (len(loaded) - half) if half and again > REPEATS * late else None


def static_hits(rows_of: Int64s, capacity: int, seen: int, n_batches: int) -> float:
    """Estimate the accesses of an epoch that the ``capacity`` rows of the highest counts of another epoch would serve.

    ``rows_of`` has the number of rows with each count, over the ``seen`` batches; both epochs have ``n_batches``. A cache with
    room for more rows than were seen takes rows of further batches until it is full, and then other rows at random. It misses
    the rows that it does not hold.
    """
    n, n_accesses = int(rows_of.sum()), float((np.arange(len(rows_of)) * rows_of).sum())
    hits = expected_hits(rows_of, capacity, seen) / max(1, seen)
    if n_batches > seen and n - int(rows_of[0]) < capacity < n:
        by_batches = distinct_rows(rows_of, seen, np.arange(seen, n_batches + 2))
        last = min(n_batches - seen, int(np.searchsorted(by_batches, capacity, "right")) - 1)
        found, more = by_batches[last : last + 2]
        chance = max(0.0, capacity - found) / max(1.0, n - found)
        hits = max(hits, n_accesses / seen - (more - found) * (1 - chance))
    return float(hits * n_batches)


def top_sum(rows_of: Int64s, capacity: int) -> int:
    """Sum the ``capacity`` highest counts, given that ``rows_of[k]`` rows have the count ``k``."""
    taken = np.diff(np.minimum(np.cumsum(rows_of[::-1]), capacity), prepend=0)
    return int((taken * np.arange(len(rows_of) - 1, -1, -1)).sum())


def expected_hits(rows_of: Int64s, capacity: int, n_batches: int) -> float:
    """Estimate the accesses of ``n_batches`` other batches that the ``capacity`` rows of the highest counts would serve.

    Counts on the same batches would overestimate the hits: each access helped to choose its row. So each access is judged by the
    counts of all batches but its own, scaled to the same number of batches.
    """
    n, k = int(rows_of.sum()), np.arange(len(rows_of))
    if not capacity or not n:
        return 0.0
    if capacity >= n or n_batches < 2:  # one batch does not predict another
        return float((k * rows_of).sum()) * min(1.0, capacity / n)
    above = np.cumsum(rows_of[::-1])[::-1] - rows_of  # rows of a higher count, which are kept first
    kept = np.clip((capacity - above) / np.maximum(1, rows_of), 0.0, 1.0)
    chance = np.interp((k[1:] - 1) * n_batches / (n_batches - 1), k, kept)
    return float((k[1:] * rows_of[1:] * chance).sum())
