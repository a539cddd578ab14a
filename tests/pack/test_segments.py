"""The segmented disk cache: counted by one pass and by brute force, and found by counting alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.figures.segment_traffic import traffic
from featstore.budget import Budget
from featstore.errors import BudgetError
from featstore.pack.segments import Segment, Stored, segments, shortest_segments, stored_bytes, stored_rows
from featstore.plan.trace import Trace
from tests.support.refusing import refuses

N = 40
ROW_BYTES = st.sampled_from([1, 4, 100, 512, 3072, 4095, 4096, 4097, 10_000])


@st.composite
def traces(draw: st.DrawFn, most: int = 9) -> list[np.ndarray]:
    batches = draw(st.lists(st.lists(st.integers(0, N - 1), unique=True, max_size=N), max_size=most))
    return [np.array(batch, np.int32) for batch in batches]


def pages(n_rows: int, row_bytes: int) -> int:
    return math.ceil(n_rows * row_bytes / 4096)


def pages_of(places: list[int], row_bytes: int) -> set[int]:
    """Every page that holds a byte of the rows at these places."""
    return {at // 4096 for place in places for at in range(place * row_bytes, (place + 1) * row_bytes)}


def check(segment: Segment, batches: list[np.ndarray], row_bytes: int, threshold: int) -> None:
    """Compare a segment with sets and dictionaries."""
    mine = [batch.tolist() for batch in batches[segment.first : segment.stop]]
    counts = Counter(row for batch in mine for row in batch)
    assert sorted(segment.rows.tolist()) == sorted(row for row, count in counts.items() if count > threshold)
    place = {row: at for at, row in enumerate(segment.rows.tolist())}
    assert segment.accesses == sum(map(len, mine))
    for k, batch in enumerate(mine):
        touched = pages_of([place[row] for row in batch if row in place], row_bytes)
        assert segment.packed[k] == sum(row not in place for row in batch)
        assert segment.pages[k] == len(touched)
        assert segment.runs[k] == sum(page - 1 not in touched for page in touched)


@given(traces(), ROW_BYTES, st.integers(1, 12), st.integers(0, 3), st.sampled_from(["minhash", "row"]))
def test_segments_are_those_of_brute_force(batches, row_bytes, length, threshold, order) -> None:
    row_bytes = min(row_bytes, 4097) if len(batches) > 4 else row_bytes  # brute force looks at every byte
    found = list(segments(batches, N, length, row_bytes, threshold=threshold, order=order))
    assert [(s.first, s.stop) for s in found] == [(a, min(a + length, len(batches))) for a in range(0, len(batches), length)]
    for segment in found:
        check(segment, batches, row_bytes, threshold)
        if order == "row":
            assert (np.diff(segment.rows) > 0).all()
    total = traffic(batches, N, length, row_bytes, threshold=threshold, order=order)
    assert total.packed_rows == sum(int(s.packed.sum()) for s in found)
    assert total.cached_rows == sum(len(s.rows) for s in found)
    extents = sum(pages(int(rows), row_bytes) for s in found for rows in s.packed)
    caches = sum(pages(len(s.rows), row_bytes) for s in found)
    assert total.disk_bytes == stored_bytes(extents) + (stored_bytes(caches) if caches else 0)
    assert total.bytes_read == 4096 * (extents + sum(int(s.pages.sum()) for s in found))
    assert total.n_accesses == sum(map(len, batches))


@given(traces())
def test_rows_on_disk_for_every_length_at_once(batches: list[np.ndarray]) -> None:
    rows = stored_rows(batches, N)
    assert len(rows) == len(batches) + 1
    for length in range(1, len(batches) + 1):
        total = traffic(batches, N, length, 4, order=None)
        assert rows[length] == total.cached_rows + total.packed_rows
    assert rows[0] == rows[min(1, len(batches))] == sum(map(len, batches))


@given(traces(), ROW_BYTES, st.floats(0, 1.2))
def test_shortest_is_the_first_of_an_exhaustive_search_that_fits(batches: list[np.ndarray], row_bytes: int, share: float) -> None:
    takes = [traffic(batches, N, length, row_bytes, order=None).disk_bytes for length in range(1, max(2, len(batches) + 1))]
    disk = int(share * takes[0])
    fits = [length for length, n_bytes in enumerate(takes, 1) if n_bytes <= disk]
    if fits:
        found = shortest_segments(batches, N, row_bytes, disk)
        assert (found.length, found.disk_bytes) == (fits[0], takes[fits[0] - 1])
    else:
        caught = refuses(OSError, "shared by all", lambda: shortest_segments(batches, N, row_bytes, disk))
        assert caught.value.errno == 28


@given(traces())
def test_a_callers_own_count_is_told_what_is_stored(batches: list[np.ndarray]) -> None:
    """Of every length in turn, until one fits: rows of extents and of caches, and how many accesses the caches serve."""
    last = max(1, len(batches))
    seen: list[Stored] = []
    found = shortest_segments(
        batches, N, 4, 1 << 20, takes=lambda stored: seen.append(stored) or (1 << 20) + last - stored.length
    )
    assert (found.length, found.disk_bytes) == (last, 1 << 20)
    assert [stored.length for stored in seen] == list(range(1, last + 1))
    for stored in seen:
        packed, cached, shared = list[int](), list[int](), 0
        for first in range(0, len(batches), stored.length):
            mine = [batch.tolist() for batch in batches[first : first + stored.length]]
            counts = Counter(row for batch in mine for row in batch)
            packed += [sum(counts[row] == 1 for row in batch) for batch in mine]
            cached.append(sum(count > 1 for count in counts.values()))
            shared += sum(count for count in counts.values() if count > 1)
        assert (stored.packed.tolist(), stored.cached.tolist(), stored.shared) == (packed, cached, shared)


def test_the_least_that_is_quoted_would_do() -> None:
    batches = [np.arange(0, 30, dtype=np.int32), np.arange(10, 40, dtype=np.int32)]
    least = traffic(batches, N, 2, 4096, order=None).disk_bytes
    assert shortest_segments(batches, N, 4096, least).length == 2
    refuses(OSError, "shared by all", lambda: shortest_segments(batches, N, 4096, least - 1))


def clusters(rng: np.random.Generator, n: int, n_batches: int) -> list[np.ndarray]:
    """Batches that need groups of rows together, the groups scattered over the ids."""
    group = rng.integers(0, n // 16, n)
    return [np.flatnonzero(np.isin(group, rng.choice(n // 16, n // 64))).astype(np.int32) for _ in range(n_batches)]


def test_rows_needed_by_the_same_batches_lie_together() -> None:
    rng = np.random.default_rng(0)
    n = 20_000
    batches = clusters(rng, n, 12)
    ordered, scattered = (traffic(batches, n, 6, 256, order=order) for order in ("minhash", "row"))
    assert (ordered.disk_bytes, ordered.packed_rows) == (scattered.disk_bytes, scattered.packed_rows)
    assert ordered.pages_read < 0.6 * scattered.pages_read
    assert ordered.pages_read < traffic(batches, n, 6, 256, n_hashes=1).pages_read


def skewed(rng: np.random.Generator, n: int, n_batches: int) -> list[np.ndarray]:
    """Batches that need a few rows much more often than the others, scattered over the ids."""
    chance = rng.permutation(1.0 / np.arange(1, n + 1) ** 0.8)
    return [np.sort(rng.choice(n, n // 8, replace=False, p=chance / chance.sum())).astype(np.int32) for _ in range(n_batches)]


def drifting(rng: np.random.Generator, n: int, n_batches: int) -> list[np.ndarray]:
    """Batches whose rows lie near each other, and near those of the batch before."""
    middles = np.cumsum(rng.integers(0, n // 16, n_batches))
    return [np.unique(np.round(rng.normal(at, n / 12, n // 8)).astype(np.int64) % n).astype(np.int32) for at in middles]


@pytest.mark.parametrize("make", [clusters, skewed, drifting])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_shortest_reads_hardly_more_than_the_best_of_all(make: Callable[..., list[np.ndarray]], share: float) -> None:
    """Every length and every threshold up to 4 laid out: the search, which lays out none, is within a tenth of the best."""
    n, row_bytes = 20_000, 128
    batches = make(np.random.default_rng(4), n, 16)
    disk = int(share * traffic(batches, n, 1, row_bytes, order=None).disk_bytes)
    every = [traffic(batches, n, length, row_bytes, threshold=m) for length in range(1, 17) for m in range(5)]
    fitting = [each.bytes_read for each in every if each.disk_bytes <= disk]
    found = shortest_segments(batches, n, row_bytes, disk)
    ours = traffic(batches, n, found.length, row_bytes)
    assert ours.disk_bytes == found.disk_bytes <= disk
    assert min(fitting) <= ours.bytes_read <= 1.1 * min(fitting)
    assert max(fitting) > 1.3 * min(fitting)  # of others that fit


def test_an_order_is_a_function_of_the_seed() -> None:
    batches = clusters(np.random.default_rng(1), 4000, 5)
    first, again, other = (next(segments(batches, 4000, 5, 256, seed=seed)).rows for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(np.sort(first), np.sort(other))


def test_search_keeps_within_the_ledger() -> None:
    batches = clusters(np.random.default_rng(2), 20_000, 8)
    budget = Budget(4 << 20)
    traffic(batches, 20_000, 4, 256, budget=budget)
    shortest_segments(batches, 20_000, 256, 1 << 30, budget=budget)
    assert budget.used == 0
    assert budget.peak >= 4 * 20_000 + 16 * 4000
    caught = refuses(BudgetError, "", lambda: shortest_segments(batches, 20_000, 256, 1 << 30, budget=Budget(1000)))
    assert caught.value.needed is not None
    small = Budget(1000)
    refuses(BudgetError, "", lambda: list(segments(batches, 20_000, 4, 256, budget=small)))
    assert small.used == 0


def test_from_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    batches = clusters(np.random.default_rng(3), 2000, 6)
    trace = Trace(batches, 2000)
    trace.save(tmp_path / "trace")
    opened = Trace.open(tmp_path / "trace")
    assert traffic(opened, 2000, 3, 100) == traffic(trace, 2000, 3, 100) == traffic(batches, 2000, 3, 100)
    opened.close()


@pytest.mark.parametrize("bad", [{"length": 0}, {"threshold": -1}, {"n_hashes": 0}])
def test_what_cannot_be(bad: dict[str, int]) -> None:
    options = {"length": 1, **bad}
    refuses(ValueError, "at least", lambda: next(segments([np.arange(3)], 3, options.pop("length"), 4, **options)))
