"""The length of superbatches: what the planner's memory and the disk allow, and what is said where that is few."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.cache.base import Policy, get_policy
from featstore.cache.degree import Degree
from featstore.cache.fixed import FixedRows
from featstore.estimate.length import PackingPasses, Planning, at_least, choose_size, planner_bytes, what_would_help
from featstore.plan.planmemory import PLANNER_FRACTION
from tests.support.graphs import make_graph

BATCH, MANY = 1000, 200


def planning(
    n: int = 10_000, total: int = 1 << 32, disk: int | None = 1 << 60, overlap: bool = True, policy: Policy | None = None
) -> Planning:
    return Planning((policy or get_policy("belady"),), "auto", disk, "runs", n, total, overlap)


def needed(n: int, n_batches: int, size: int, *, spilled: bool, overlap: bool = True) -> int:
    return planner_bytes(planning(overlap=overlap), n, n_batches, BATCH, size, spilled=spilled)


@given(
    n=st.sampled_from([10_000, 1_000_000, 100_000_000]),
    total=st.integers(1 << 20, 1 << 32),
    n_batches=st.integers(1, 400),
    overlap=st.booleans(),
    pass_bytes=st.none() | st.integers(1, 10**12),
)
def test_the_length_is_the_largest_that_its_share_holds(n, total, n_batches, overlap, pass_bytes) -> None:
    """By brute force over every length."""
    passes = None if pass_bytes is None else PackingPasses(pass_bytes, 10**9)
    found = choose_size(planning(n, total, overlap=overlap), n_batches, BATCH, 1, passes)
    most = min(n_batches, MANY) if overlap else n_batches
    for fraction in (PLANNER_FRACTION, 2 * PLANNER_FRACTION, 4 * PLANNER_FRACTION):
        held, spilled = (
            max(
                [1]
                + [
                    size
                    for size in range(1, most + 1)
                    if needed(n, n_batches, size, spilled=each, overlap=overlap) <= int(total * fraction)
                ]
            )
            for each in (False, True)
        )
        expected = max(held, min(spilled, most if passes else 50))
        n_passes = -(-n_batches // expected)
        if passes is None or expected == most or n_passes * passes.n_bytes <= max(passes.n_bytes, passes.n_others):
            break
    assert found == (expected if passes is None else min(expected, -(-n_batches // passes.cheap)))


@pytest.mark.parametrize("n", [100_000, 16_777_216, 111_059_956])
def test_the_field_costs_a_quarter_byte_a_row(n: int) -> None:
    """Nothing else grows with the field; a superbatch of papers100M's size is as long as one of a small graph's."""
    small = needed(n=10**9, n_batches=100, size=10, spilled=True)
    assert 0 <= needed(n, 100, 10, spilled=True) <= n // 4 + needed(20 * BATCH, 100, 10, spilled=True) + 64 * BATCH
    assert small <= 10**9 // 4 + needed(20 * BATCH, 100, 10, spilled=True) + 64 * BATCH
    assert choose_size(planning(n, 1 << 30), 200, BATCH, 1) == 200


@pytest.mark.parametrize("n_batches", [1, 2, 1179])
def test_rows_that_stay_are_packed_in_two_superbatches(n_batches: int) -> None:
    """Nothing is looked ahead to, so more passes save nothing; with one superbatch nothing is packed beside the loop."""
    passes, n = PackingPasses(10**12, 10**9, 2 * 10**12), 111_059_956
    fixed = planning(n, 1 << 30, policy=FixedRows(Degree()))
    assert choose_size(fixed, n_batches, BATCH, 1, passes) == -(-n_batches // 2)
    assert planner_bytes(fixed, n, n_batches, BATCH, n_batches, spilled=False, capacity=n) < n // 4 + 200 * BATCH
    assert choose_size(fixed, n_batches, BATCH, 1, PackingPasses(10**12, 10**9, 10**12)) == n_batches, "a pass is the longer one"
    for others, most in ((10**12, -(-n_batches // 2)), (10**12 - 1, n_batches)):
        drawn = PackingPasses(10**12, others, 2 * 10**12, is_drawn=True)
        assert choose_size(fixed, n_batches, BATCH, 1, drawn) == most, "nothing but packing is left to be done beside the loop"
    some = max(1, n_batches // 3)
    said = what_would_help(fixed, n_batches, BATCH, 1, passes, some)
    assert said is None or "would make it 2" in said
    assert n_batches == 1 or choose_size(planning(n, 1 << 30), n_batches, BATCH, 1, passes) == min(n_batches, MANY)


@pytest.mark.parametrize(
    ("disk", "size"),
    [(1 << 40, 500), (1_500_000, 500), (1_499_999, 334), (1_168_000, 334), (1_167_999, 250), (400_000, 100), (399_999, 91)],
)
def test_few_superbatches_lie_on_disk_whole(disk: int, size: int) -> None:
    """A thousand batches of 1,000 bytes, half of them of extents: two superbatches with all extents, or three with those of two.

    Four and more take as much as four without the half. All are about as long: a short one would cost a pass as any other.
    """
    fixed = planning(disk=disk, policy=FixedRows(Degree()))
    assert choose_size(fixed, 1000, BATCH, 1000, PackingPasses(10**12, 2_000_000, 2 * 10**12)) == size


@pytest.mark.parametrize(("policy", "n_bytes"), [(FixedRows(Degree()), 1_500_000), (None, 4 * 1000 * MANY)])
def test_the_disk_that_is_advised_suffices(policy: Policy | None, n_bytes: int) -> None:
    """An epoch of a thousand batches as a whole; where plans look ahead, four superbatches of the most batches."""
    passes, few = PackingPasses(10**12, 2_000_000), planning(disk=40_000, policy=policy)
    size = choose_size(few, 1000, BATCH, 1000, passes)
    said = what_would_help(few, 1000, BATCH, 1000, passes, size)
    assert said is not None
    assert f"disk='{at_least(n_bytes)}'" in said
    longest = 1000 if policy else MANY
    assert choose_size(replace(few, disk=n_bytes), 1000, BATCH, 1000, passes) == longest
    assert choose_size(replace(few, disk=n_bytes - 2), 1000, BATCH, 1000, passes) < longest


def test_half_of_the_free_disk_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.storage.rundir.free_bytes", lambda path: 2 * 4 * 1001 * 30)
    assert choose_size(planning(disk=None), 1000, BATCH, 1000) == 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # ranks of a machine write to one drive
    assert choose_size(planning(disk=None), 1000, BATCH, 1000) == 10


def test_the_disk_is_that_of_the_run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their directory, or its parent, is made later, and where it is a link to another drive."""
    asked, free = list[str](), os.statvfs

    def statvfs(path: str) -> Any:
        found = free(path)  # or no such file
        asked.append(os.path.realpath(path))
        return found

    monkeypatch.setattr(os, "statvfs", statvfs)
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    for name, where in (("drive", "drive"), ("link", "drive"), ("drive/job/runs", "drive"), ("new", ".")):
        asked.clear()
        assert choose_size(replace(planning(disk=None), run_dir=str(tmp_path / name)), 1000, BATCH, 1000) >= 1
        assert asked == [os.path.realpath(tmp_path / where)]


def test_a_disk_limits_the_length() -> None:
    assert choose_size(planning(disk=4 * 1000 * 30 + 4 * 30), 1000, BATCH, 1000) == 30
    assert choose_size(planning(disk=10), 1000, BATCH, 1000) == 1


@pytest.mark.parametrize(
    ("others", "gathered", "n_passes"), [(0, 0, 1), (4, 3, 1), (8, 0, 2), (5, 18, 5), (0, 40, 8), (90, 0, 8), (10**6, 10**6, 8)]
)
def test_cheap_passes_make_several_superbatches(others: int, gathered: int, n_passes: int) -> None:
    """So many that passes read a quarter of what is moved besides, and eight at most; that is no reason to warn."""
    roomy, passes = planning(total=1 << 34), PackingPasses(10**9, others * 10**9, gathered * 10**9)
    size = choose_size(roomy, 200, BATCH, 1, passes)
    assert -(-200 // size) == n_passes
    assert what_would_help(roomy, 200, BATCH, 1, passes, size) is None
    few = choose_size(planning(total=1 << 34, disk=4 * 1000 * 5 + 20), 200, BATCH, 1000, passes)
    assert few == 5, "no more than the disk holds"


def test_what_would_help() -> None:
    """Nothing where an epoch moves no more than twice the least; else memory or disk, whichever is short, and it does help."""
    small, passes = planning(total=1 << 22), PackingPasses(10**10, 10**9)
    size = choose_size(small, 100, 20_000, 1, passes)
    assert 1 <= size < 50
    said = what_would_help(small, 100, 20_000, 1, passes, size)
    assert said is not None
    assert f"superbatches have {size} of 100 batches, so an epoch reads the features {-(-100 // size)} times" in said
    assert "would make it 1" in said
    memory = said.split("memory='")[1].split("'")[0]
    larger = planning(total=featstore.config.parse_size(memory))
    assert choose_size(larger, 100, 20_000, 1, passes) == 100
    assert what_would_help(larger, 100, 20_000, 1, passes, 100) is None
    assert what_would_help(small, 100, 20_000, 1, PackingPasses(10**10, 10**13), size) is None
    short = planning(total=1 << 34, disk=4 * 1000 * 10 + 40)
    size = choose_size(short, 100, BATCH, 1000, passes)
    assert size == 10
    said = what_would_help(short, 100, BATCH, 1000, passes, size)
    assert said is not None
    assert "disk='239MiB' would make it 1" in said


def test_many_passes_are_said(tmp_path: Path) -> None:
    """On a disk that holds two batches, each pair costs a pass over the features; the loader warns and says what would help."""
    n = 20_000
    indptr, indices = make_graph(n, 3.0)
    x = np.zeros((n, 64), np.float32)
    seeds = np.arange(2000)
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, {"x": x}, {"train_idx": seeds}, progress=False).close()
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        sampler = featstore.NeighborSampler(g, [3], seed=1)
        given: dict[str, Any] = {"batch_size": 20, "labels": None, "shuffle": False}
        strategy = featstore.Streamed(cache=None, disk="120KB")
        with pytest.warns(featstore.PerformanceWarning, match=r"reads the features \d+ times.*disk='.*' would make it 1"):
            loader = featstore.Loader(g, sampler, g.node_data["train_idx"], strategy=strategy, **given)
        with loader:
            found = loader.stats()["superbatch"]
            assert found["of"] == 100
            assert found["passes"] == -(-100 // found["batches"]) > 2


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    n, rng, path = 30_000, np.random.default_rng(0), tmp_path_factory.mktemp("wide") / "g"
    indptr = np.arange(0, 12 * n + 1, 12)
    indices = (n * rng.random(12 * n) ** 2).astype(np.int64)
    x, data = rng.standard_normal((n, 32), dtype=np.float32), {"train_idx": rng.permutation(n)[:2400]}
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, data, progress=False).close()
    return path


@pytest.mark.parametrize("lacking", ["memory", "disk"])
@pytest.mark.parametrize("strategy", [featstore.Superbatch, featstore.Ginex])
def test_superbatches_of_one_batch_are_said(wide: Path, strategy: type[featstore.Superbatch], lacking: str) -> None:
    """With what there should be more of; and that much does help. Where one batch was asked for, or is all, nothing is said."""

    def length(memory: int | str, batch_size: int = 200, **options: Any) -> int:
        with featstore.open(wide, memory=memory) as g:
            sampler, seeds = featstore.NeighborSampler(g, [10, 5], seed=1), g.node_data["train_idx"]
            with featstore.Loader(g, sampler, seeds, batch_size, labels=None, strategy=strategy(**options)) as loader:
                return int(loader.stats()["superbatch"]["batches"])

    little: dict[str, Any] = {"memory": "6MiB", "disk": "10MB"} if lacking == "memory" else {"memory": "64MiB", "disk": "150KB"}
    name = strategy.__name__.lower()
    with pytest.warns(featstore.PerformanceWarning, match=rf"'{name}': superbatches have 1 of 12 batches.*would make") as said:
        assert length(**little) == 1
    assert len(said) == 1
    more = str(said[0].message).split(f"{lacking}='")[1].split("'")[0]
    assert length(**{**little, lacking: more}) == 12  # a warning would be an error
    assert length(**little, length=1) == 1
    assert length("64MiB", 2400) == 1
