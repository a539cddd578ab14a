"""Power cuts in a model of the drive: each operation's calls are recorded, and what may be lost of them is."""

from __future__ import annotations

import copy
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from featstore.testing.faults import Record, recorded
from tests.campaigns.checks import BadStateError, Prepared, prepared, report
from tests.campaigns.journal import Journal
from tests.campaigns.operations import SCENARIOS
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

NO_COMMIT = [name for name, scenario in SCENARIOS.items() if not scenario.commits]


def test_what_may_be_lost(tmp_path: Path) -> None:
    """Calls by hand: only what was flushed is there for certain, and a rename has both of its names."""
    (tmp_path / "kept").write_bytes(b"old")
    journal = Journal(tmp_path)
    inode, top = 1 << 60, tmp_path.stat().st_ino

    def call(kind: str, name: str, other: str = "", of: int = inode, data: bytes = b"", size: int = 0) -> None:
        where = str(tmp_path / other) if other else ""
        journal.apply(Record(kind, of, str(tmp_path / name), where, 0, len(data) or size, data))

    call("create", "a")
    call("write", "a", data=b"x" * 5000)
    assert journal.left("nothing") == {"kept": b"old"}
    assert journal.left("names") == {"a": b"", "kept": b"old"}
    call("rename", "a", "kept")
    assert journal.left("names") == {"kept": b""}, "the mistake that a flush before the rename prevents"
    torn = {journal.left("some", seed).get("kept") for seed in range(50)}
    assert torn == {b"old", b"", b"x" * 4096, b"\0" * 4096 + b"x" * 904, b"x" * 5000}
    assert all(len(journal.left("some", seed)) <= 2 for seed in range(50))
    call("flush", "kept")
    assert {journal.left("some", seed).get("kept") for seed in range(50)} == {b"old", b"x" * 5000}
    call("flush", ".", of=top)
    assert journal.left("nothing") == journal.left("everything") == {"kept": b"x" * 5000}
    call("mkdir", "folder", of=inode + 1)
    call("create", "folder/b", of=inode + 2)
    call("flush", "folder", of=inode + 1)
    assert "folder/b" not in journal.left("nothing"), "its directory has no name that lasts"
    call("flush", ".", of=top)
    assert journal.left("nothing")["folder/b"] == b""


def calls_of(ready: Prepared) -> tuple[list[Record], Journal]:
    """Record an operation; return its calls, and the journal before them."""
    ready.fresh()
    journal, replayed = Journal(ready.root), Journal(ready.root)
    with recorded(ready.root) as calls:
        ready.call()
    for each in calls:
        replayed.apply(each)
    there = Journal(ready.root)
    assert replayed.left("everything") == there.left("nothing"), "the record lacks a call"
    return calls, journal


def cut_each(folder: str, name: str, n_draws: int, step: int = 1) -> None:
    """Cut the power before every ``step``-th call of an operation, and after the last; in the child."""
    ready = prepared(folder, name)
    calls, journal = calls_of(ready)
    n_states = 0
    for number, how, left in journal.states(calls, n_draws, step):
        n_states += 1
        journal.write(left, ready.root)
        ready.is_new(f"power cut after call {number} of {len(calls)}, {how} not flushed happened", number == len(calls))
    report("power cuts in a model", operation=name, calls=len(calls), states=n_states)


# Flushes that may be left out and no bad state follows: directories, and how many flushes of each, by operation, as measured. A
# directory is flushed with each new file, so another flush of it makes the same names durable. Of operations that are not here,
# this was not measured yet: there it is enough that some flush is noticed.
UNNOTICED: dict[str, dict[str, int]] = {
    "create": {"/g.tmp-*": 5},
    "replace": {"/g.tmp-*": 5},
    "edges": {"/g.tmp-*": 7},
    "update": {},
    "add": {},
    "append": {"/g": 4},
    "save": {"/g": 1},
    "remove data": {},
    "pack again": {"/p.tmp-*": 3},
}


def unlisted(name: str, needless: list[str]) -> list[str]:
    """List the flushes of an operation that nobody noticed to be left out, beyond those of UNNOTICED."""
    if name not in UNNOTICED:
        return []
    found = Counter(re.sub("[0-9a-f]{32}", "*", each) for each in needless)
    return sorted((found - Counter(UNNOTICED[name])).elements())


def test_an_unnoticed_flush_must_be_listed() -> None:
    made = f"/g.tmp-{'0f' * 16}"
    assert unlisted("create", [made] * 5) == []
    assert unlisted("create", [made] * 6) == ["/g.tmp-*"]
    assert unlisted("create", [f"{made}/node.x.1.rows"]) == ["/g.tmp-*/node.x.1.rows"]
    assert unlisted("update", ["/g"]) == ["/g"]


def leave_out_each(folder: str, name: str, step: int = 1) -> None:
    """The control, in the child: each flush is left out in turn; there is a bad state, or UNNOTICED has the flush."""
    ready = prepared(folder, name)
    calls, before = calls_of(ready)
    flushes = [number for number, each in enumerate(calls) if each.kind == "flush"]
    needless = []
    for dropped in flushes[::step]:
        without = calls[:dropped] + calls[dropped + 1 :]
        journal = copy.deepcopy(before)
        ends = {number for number, each in enumerate(without) if number > dropped and each.kind in ("rename", "exchange")}
        ends |= {number + 1 for number in ends} | {len(without)}
        try:
            for number in range(len(without) + 1):
                if number in ends:
                    for choice in ("nothing", "names", "some"):
                        journal.write(journal.left(choice, number), ready.root)
                        ready.is_new(f"without flush {dropped}, after {number}, {choice}", number == len(without))
                if number < len(without):
                    journal.apply(without[number])
        except BadStateError:
            continue
        needless.append(calls[dropped].path.removeprefix(ready.root.as_posix()))
    n_tried = len(flushes[::step])
    report("power cuts in a model: control", operation=name, left_out=n_tried, noticed=n_tried - len(needless), others=needless)
    assert len(needless) < n_tried, needless
    assert not unlisted(name, needless), (name, unlisted(name, needless))


def cut_some(folder: str, cases: list[tuple[str, int]], controls: list[tuple[str, int]]) -> None:
    """A sample, in one child."""
    for number, (name, step) in enumerate(cases + controls):
        os.mkdir(f"{folder}/{number}")
        if number < len(cases):
            cut_each(f"{folder}/{number}", name, 1, step)
        else:
            leave_out_each(f"{folder}/{number}", name, step)


SAMPLE = [("create", 41), ("update", 7), ("aggregate", 61), ("pack again", 23)]
CONTROLS = [("create", 9), ("replace", 13)]


def test_power_cuts_of_some_operations(tmp_path: Path) -> None:
    run_in_fork(cut_some, str(tmp_path), SAMPLE, CONTROLS)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_power_cuts_of_every_operation(name: str, tmp_path: Path) -> None:
    run_in_fork(cut_each, str(tmp_path), name, 2, timeout_s=3000)


@pytest.mark.stress
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in NO_COMMIT])
def test_without_a_flush_power_cuts_are_noticed(name: str, tmp_path: Path) -> None:
    run_in_fork(leave_out_each, str(tmp_path), name, timeout_s=3000)
