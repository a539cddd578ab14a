"""Damage to every kind of file is found and named, or changes nothing that is read; and the campaign notices what it should."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import BudgetError, CorruptionError
from tests.campaigns.damage import DISTINCT, LACK, WHOLE, Damage, changed_by, inverted, key_of, outcome, run
from tests.campaigns.damage_subjects import SUBJECTS, Subject, kind_of

pytestmark = pytest.mark.usefixtures("_program_server")

SMALL = {"run": 150, "typed": 50, "dataset": 50, "pack": 9, "tables": 50}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: a campaign writes its files again and again."""
    folder = Path(tempfile.mkdtemp(prefix="featstore-damage-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", SMALL)
def test_damage_is_found_or_harmless(memory: Path, name: str) -> None:
    report = run(name, SMALL[name], memory)
    assert not report.failures, report
    assert report.drawn == SMALL[name]
    assert report.n > SMALL[name] // 2, report
    assert report.counts["found"] > SMALL[name] // 4, report


@pytest.mark.stress
@pytest.mark.parametrize("name", WHOLE)
def test_a_hundred_thousand_damages_are_found_or_harmless(memory: Path, name: str) -> None:
    report = run(name, WHOLE[name], memory, first=10**6)  # others than those above
    print(name, report)
    assert not report.failures, report
    assert report.drawn == WHOLE[name]
    assert report.n >= DISTINCT[name], report
    assert sum(DISTINCT.values()) > 100_000


@pytest.mark.parametrize("name", ["typed", "run", "tables"])
def test_without_checksums_data_are_silently_wrong(memory: Path, name: str) -> None:
    """The control: the comparison of sums is taken out of the library, and the same damages are wrong data."""
    report = run(name, 90, memory, verify="off", checked=False)
    assert report.counts["WRONG"] > 5, report
    assert len(report.failures) == sum(n for what, n in report.counts.items() if what.isupper())


def test_deaths_and_what_goes_unseen_are_noticed(memory: Path) -> None:
    """The control of the campaign itself: a reader that maps a file without sums dies of some damages and misses the others."""
    report = run("mapped", 60, memory)
    assert report.counts["DEAD"] > 3, report
    assert report.counts["WRONG"] > 20, report
    assert report.drawn == 60
    assert report.counts["repeat"] > 0, report
    assert report.counts["no change"] > 0, report
    dead = next(number for number, what in report.failures.items() if what.startswith("DEAD"))
    again = run("mapped", 1, memory, first=dead)
    assert again.counts == {"DEAD": 1}
    assert list(again.failures) == [dead]


def test_an_error_must_name_the_damaged_file_or_what_contradicts_it(tmp_path: Path) -> None:
    """The control of names: of an error that names another file, nobody learns what is damaged."""
    files = [
        "catalog.lmdb/data.mdb",
        *(f"{name}.1.rows{sums}" for name in ("node.x", "node.x2", "edge.w") for sums in ("", ".sums")),
    ]

    def said(what: str, damaged: str, named: str, is_sealed: bool = False) -> str:
        def read(path: Path, verify: str) -> Iterator[Any]:
            raise CorruptionError("damaged", path / named)

        subject = Subject(lambda path, seed: None, read, lambda path: None)
        one = Damage(what, kind_of(damaged), {damaged: b""}, is_sealed)
        return outcome(subject, tmp_path, "", one, files).partition(":")[0]

    assert said("cut", "node.x.1.rows", "node.x.1.rows") == "found"
    assert said("cut", "node.x.1.rows.sums", "node.x.1.rows") == "found"
    assert said("cut", "node.x.1.rows", "node.x.1.rows.sums") == "found"
    for other in ("edge.w.1.rows", "node.x2.1.rows", "catalog.lmdb/data.mdb", ""):
        for is_sealed in (False, True):
            assert said("cut", "node.x.1.rows", other, is_sealed) == "NOT NAMED", other
    assert said("an older copy", "catalog.lmdb/data.mdb", "edge.w.1.rows") == "found"
    assert said("cut", "catalog.lmdb/data.mdb", "edge.w.1.rows") == "NOT NAMED"


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("by", ["use", "check"])
def test_a_lack_of_memory_is_no_finding(tmp_path: Path, is_sealed: bool, by: str) -> None:
    """The control of budgets: an error of them, in use or in the check, says nothing of the damage."""

    def lack(path: Path) -> None:
        raise BudgetError("needs more memory")

    def read(path: Path, verify: str) -> Iterator[Any]:
        if by == "use":
            lack(path)
        yield np.arange(3)

    subject = Subject(lambda path, seed: None, read, lack if by == "check" else lambda path: None)
    whole = "" if by == "use" else subject.digest(tmp_path)
    one = Damage("cut", "node.x", {"node.x.1.rows": b""}, is_sealed)
    assert outcome(subject, tmp_path, whole, one, ["node.x.1.rows"]).startswith(LACK)


def test_damages_that_change_nothing_or_are_the_same_are_told() -> None:
    files = {"a": b"bytes", "b": b"bytes"}

    def changed(**new: bytes | None) -> dict[str, bytes | None]:
        return changed_by(Damage("", "a", dict(new)), files)

    assert changed(a=b"bytes") == {}
    assert changed(a=b"bytes", b=None) == {"b": None}
    keys = [changed(a=b"other"), changed(b=b"other"), changed(a=b""), changed(a=None), changed(a=b"other", b=None)]
    assert len(set(map(key_of, keys))) == len(keys)
    assert key_of(changed(a=b"other", b=b"bytes")) == key_of(changed(a=b"other"))


def test_what_a_damage_changed_is_inverted() -> None:
    """A damage is "not read" if it is harmless with these bytes, too."""
    assert inverted(b"\x00\x01\x02", b"\x00\x03\x02") == b"\x00\xfe\x02"
    assert inverted(b"\x00\x01\x02", b"\x00") == b"\x00\xfe\xfd"
    assert inverted(b"\x00", b"\x00\x07") == b"\x00\xf8"
    assert inverted(b"\x00\xff", None) == b"\xff\x00"


def test_every_kind_of_file_is_damaged(memory: Path) -> None:
    """Those of a dataset, a pack and a run that docs/format.md names; a kind that comes later must be added to a subject."""
    kinds = set[str]()
    for name in WHOLE:
        (memory / name).mkdir()
        made = memory / name / "it"
        SUBJECTS[name].make(made, 1)
        kinds |= {kind_of(str(path.relative_to(made))) for path in made.rglob("*") if path.is_file()}
    rows = {"node.x", "node.y", "edge.indptr", "edge.indices", "edge.out_degree", "edge.edge_ids", "edge.w", "edge.chunks"}
    rows |= {"edge.chunk_directory", "patch-node", "blocks-node", "cache.neighbors", "parts", "train_nodes", "cross_out_degree"}
    rows |= {
        "part_nodes",
        "part_offsets",
        "part_indices",
        "ids.names",
        "ids.offsets",
        "ids.hashes",
        "ids.buckets",
        "extents",
        "columns",
    }
    others = {
        "catalog",
        "pack",
        "samples",
        "data",
        "layout",
        "plan",
        "fill",
        "device",
        "shared",
        "done",
        "begun",
        "progress",
        "trace",
    }
    assert kinds >= rows | {f"{name}.sums" for name in rows} | others
