"""Damage to every kind of file is found and named, or changes nothing that is read; and the campaign notices what it should."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from featstore.errors import CorruptionError
from tests.campaigns.damage import WHOLE, Damage, outcome, run
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
    assert report.n == SMALL[name]
    assert report.counts["found"] > SMALL[name] // 4, report


@pytest.mark.stress
@pytest.mark.parametrize("name", WHOLE)
def test_a_hundred_thousand_damages_are_found_or_harmless(memory: Path, name: str) -> None:
    report = run(name, WHOLE[name], memory, first=10**6)  # others than those above
    print(name, report)
    assert not report.failures, report
    assert report.n == WHOLE[name]


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
    assert report.n == 60
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
