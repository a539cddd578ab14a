"""Plans of batches in a file: what comes back, and whose memory it lies in."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.cache.planned import PlannedBatch
from featstore.errors import BudgetError, CorruptionError
from featstore.gather.buffers import huge_array
from featstore.gather.plan import Changeset, Tier
from featstore.plan.planfile import PlanFile, write_bytes, write_plan
from featstore.storage.sections import SectionWriter


def planned(ids: np.ndarray, rng: np.random.Generator) -> PlannedBatch:
    slots = np.where(rng.random(len(ids)) < 0.8, rng.permutation(len(ids)), -1).astype(np.int32)
    positions = np.flatnonzero(slots < 0)[::2]
    in_slots = rng.permutation(len(ids))[: len(positions)].astype(np.int32)
    return PlannedBatch(slots, Changeset(ids[positions], positions, in_slots, rng.permutation(5000)[:7].astype(np.int64)))


@pytest.mark.parametrize("tier", [Tier.BASE, Tier.PACKED])
@pytest.mark.parametrize("direct", [False, True])
def test_plans_come_back_in_memory_that_the_caller_gives(tmp_path: Path, tier: Tier, direct: bool) -> None:
    """Against NumPy; every array with an entry a row is the caller's, and where he has none nothing is half done."""
    rng = np.random.default_rng(4)
    batches = [rng.permutation(60_000)[:n] for n in (0, 1, 17, 5000)]
    plans = [planned(ids, rng) for ids in batches]
    with SectionWriter(tmp_path / "plan", "plan", direct=write_bytes(5000) if direct else 0) as writer:
        for plan, ids in zip(plans, batches, strict=True):
            write_plan(writer.append, plan, ids if tier == Tier.PACKED else None)
        file = PlanFile(writer.finish(), tier)
    lent: list[np.ndarray] = []

    def array(n: int, dtype: Any) -> np.ndarray:
        lent.append(np.empty(n, dtype))
        return lent[-1]

    def none_left(n: int, dtype: Any) -> np.ndarray:
        raise BudgetError("no memory", n)

    for number, (plan, ids) in enumerate(zip(plans, batches, strict=True)):
        with pytest.raises(BudgetError):
            file.plan(number, ids, none_left)
        found = file.plan(number, ids, array)
        host, others = found.parts
        hits, missed = np.flatnonzero(plan.slots >= 0), np.flatnonzero(plan.slots < 0)
        assert np.array_equal(host.positions, hits)
        assert np.array_equal(host.addresses, plan.slots[hits])
        assert others.tier == tier
        if tier == Tier.PACKED:
            missed = missed[np.argsort(ids[missed])]
            assert np.array_equal(others.addresses, np.arange(len(missed)))
        else:
            assert np.array_equal(others.addresses, ids[missed])
            assert not len(missed) or any(np.shares_memory(others.addresses, some) for some in lent)
        assert np.array_equal(others.positions, missed)
        for part in (host.positions, host.addresses, others.positions):
            assert not len(part) or any(np.shares_memory(part, some) for some in lent)
        assert found.changes is not None
        for name in ("in_rows", "in_positions", "in_slots", "out_rows"):
            assert np.array_equal(getattr(found.changes, name), getattr(plan.changes, name))
    with pytest.raises(CorruptionError, match="does not place its 4999 rows"):
        file.plan(3, batches[3][1:])
    file.remove()


@pytest.mark.parametrize("tier", [Tier.BASE, Tier.PACKED])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_nothing_but_the_callers_memory_is_taken(tmp_path: Path, tier: Tier, direct: bool, dtype: type) -> None:
    """As tracemalloc sees it, reading and conversions included; and what was read into is not held by what comes back."""
    rng = np.random.default_rng(5)
    ids = rng.permutation(400_000)
    with SectionWriter(tmp_path / "plan", "plan", direct=write_bytes(len(ids)) if direct else 0) as writer:
        write_plan(writer.append, planned(ids, rng), ids)
        file = PlanFile(writer.finish(), tier)
    lent: list[tuple[np.ndarray, Any]] = []

    def array(n: int, dtype: Any) -> np.ndarray:
        lent.append((huge_array(n * np.dtype(dtype).itemsize).view(dtype), dtype))  # mapped, so not traced
        return lent[-1][0]

    asked = ids.astype(dtype)
    expected = ids[file.missed(0)]
    for call in (lambda: file.plan(0, ids, array), lambda: file.misses(0, asked, array)):
        tracemalloc.start()
        try:
            found = call()
            assert tracemalloc.get_traced_memory()[1] < 20_000
        finally:
            tracemalloc.stop()
    assert np.array_equal(found, expected)
    plan = file.plan(0, ids, array)
    held = [part.positions for part in plan.parts] + [plan.parts[0].addresses, plan.changes.in_slots, plan.changes.out_rows]
    buffers = [some for some, kind in lent if kind == np.uint8]
    assert buffers
    assert not any(np.shares_memory(some, buffer) for some in held for buffer in buffers)
    file.remove()
