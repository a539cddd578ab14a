"""Numbers of names in order of first appearance, in memory and through files: those of a dictionary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.creation.extsort import PairSorter
from featstore.errors import BudgetError
from featstore.idmaps.keys import TextKeys
from featstore.idmaps.numbering import MemoryNumbers, Numbers, Room, SpilledNumbers, TableFullError

NAMES = st.lists(st.text(st.sampled_from("abcä"), max_size=3), max_size=200)
CUTS = st.lists(st.integers(0, 200), max_size=4)


def blocks_of(names: Sequence[str], cuts: Sequence[int]) -> list[TextKeys]:
    ends = sorted(min(cut, len(names)) for cut in cuts)
    bounds = [0, *ends, len(names)]
    return [TextKeys.of(names[begin:end]) for begin, end in itertools.pairwise(bounds)]


def check(numbers: Numbers, names: Sequence[str], others: Sequence[str], cuts: Sequence[int]) -> None:
    """Number ``names``, then find ``others``, and compare with a dictionary."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    got: list[int] = []
    fresh: list[str] = []
    for block in blocks_of(names, cuts):
        ids, new = numbers.add(block.hashes())
        got += ids.tolist()
        fresh += block.take(new).texts()
    assert got == [order[name] for name in names]
    assert fresh == list(order)
    found = numbers.find(TextKeys.of(others).hashes())
    assert [-1 if i >= len(order) else i for i in found.tolist()] == [order.get(name, -1) for name in others]
    assert numbers.n == len(order)
    blocks = list(numbers.sorted_hashes(len(order)))
    hashes = np.concatenate([np.empty(0, np.uint64), *(each for each, _ in blocks)])
    expected = TextKeys.of(list(order)).hashes()[:, 0]
    assert (hashes == np.sort(expected)).all()
    assert (expected[np.concatenate([np.empty(0, np.int64), *(ids for _, ids in blocks)])] == hashes).all()


@given(NAMES, NAMES, CUTS)
def test_in_memory(names: list[str], others: list[str], cuts: list[int]) -> None:
    check(MemoryNumbers(Room(1 << 20)), names, others, cuts)


@given(names=NAMES, others=NAMES, cuts=CUTS)
@settings(max_examples=25)
def test_through_files(tmp_path_factory: pytest.TempPathFactory, names: list[str], others: list[str], cuts: list[int]) -> None:
    directory = tmp_path_factory.mktemp("spilled")
    with SpilledNumbers(str(directory), 1 << 20) as numbers:
        for each in (*blocks_of(names, cuts), TextKeys.of(others)):
            numbers.collect(each.hashes())
        with PairSorter(max(1, numbers.total), 1 << 20, directory) as sorter:
            numbers.number(sorter.add, sorter.sorted)
            check(numbers, names, others, [*cuts, 7])
    assert not list(directory.iterdir())


def test_many_names_grow_the_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    names = [str(number) for number in rng.integers(0, 30_000, 100_000)]
    check(MemoryNumbers(Room(4 << 20)), names, ["x", names[5]], [10, 40_000])
    with SpilledNumbers(str(tmp_path), 8 << 20) as numbers:
        for each in (*blocks_of(names, [3]), TextKeys.of(["x", names[5]])):
            numbers.collect(each.hashes())
        with PairSorter(numbers.total, 1 << 20, tmp_path) as sorter:
            collected = {*tmp_path.glob("spill-*")}
            numbers.number(sorter.add, sorter.sorted)
            assert sorter.bytes_spilled
            assert len(collected) == 256
            assert not collected & {*tmp_path.iterdir()}, "what was read has gone"
            check(numbers, names, ["x", names[5]], [])


def test_a_table_takes_its_room_alone() -> None:
    room = Room(120_000)
    names = TextKeys.of([str(number) for number in range(4000)])
    MemoryNumbers(room).add(names.hashes())
    with pytest.raises(TableFullError):
        MemoryNumbers(room).add(names.hashes())


def test_a_table_that_grows_has_room_for_two() -> None:
    """While names are copied, for what is there and what takes its place: 16 bytes of each of 1024 names, and of 2048."""
    names = TextKeys.of([str(number) for number in range(2000)])
    with pytest.raises(TableFullError):
        MemoryNumbers(Room(32_767)).add(names.hashes())
    MemoryNumbers(Room(32_768)).add(names.hashes())


def test_too_little_memory_is_named(tmp_path: Path) -> None:
    names = TextKeys.of([str(number) for number in range(20_000)])
    with SpilledNumbers(str(tmp_path), 4096) as numbers:
        numbers.collect(names.hashes())
        with PairSorter(numbers.total, 1 << 20, tmp_path) as sorter, pytest.raises(BudgetError, match="for a bitmap"):
            numbers.number(sorter.add, sorter.sorted)
    assert not list(tmp_path.iterdir())
