"""Hostile datasets and files to import: nothing outside is opened, nothing is run, little memory is taken."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.campaigns import hostile
from tests.campaigns.hostile import Hostile, Meter, Watch, attempt, payloads
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="featstore-hostile-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def of(found: Hostile, least: int) -> None:
    """Assert that all cases went well, and that they were as many."""
    print(dict(found.counts))
    assert not found.wrong, f"{found.counts}\n" + "\n".join(found.wrong[:20])
    assert found.counts["refused"] >= least, found.counts


def of_escapes(folder: str, name: str, least: int) -> None:
    of(hostile.escapes(name, folder), least)


def of_names(folder: str, name: str, least: int) -> None:
    of(hostile.names(name, folder), least)


def of_sizes(folder: str, name: str, step: int, least: int) -> None:
    of(hostile.sizes(name, folder, step), least)


@pytest.mark.parametrize(
    ("name", "least"), [("typed", 270), pytest.param("dataset", 580, marks=pytest.mark.stress), ("pack", 200)]
)
def test_other_things_in_the_place_of_files(memory: Path, name: str, least: int) -> None:
    run_in_fork(of_escapes, str(memory), name, least)


@pytest.mark.parametrize(
    ("name", "least"), [("typed", 240), pytest.param("dataset", 500, marks=pytest.mark.stress), ("pack", 250)]
)
def test_names_that_lead_elsewhere(memory: Path, name: str, least: int) -> None:
    run_in_fork(of_names, str(memory), name, least)


@pytest.mark.parametrize(
    ("name", "step", "least"),
    [
        *(("typed", 17, 70), ("dataset", 61, 30), ("pack", 61, 8)),
        *(
            pytest.param(name, 1, least, marks=pytest.mark.stress)
            for name, least in (("typed", 1300), ("dataset", 2500), ("pack", 500))
        ),
    ],
)
def test_sizes_that_are_not_so(memory: Path, name: str, step: int, least: int) -> None:
    run_in_fork(of_sizes, str(memory), name, step, least)


def of_hard_links(folder: str) -> None:
    found = hostile.hard_links(folder)
    assert not found.wrong, found.wrong
    assert found.counts["read"] > 45


def test_what_hard_links_lead_to_is_not_written(memory: Path) -> None:
    run_in_fork(of_hard_links, str(memory))


def of_depths(folder: str) -> None:
    of(hostile.depths(folder), 25)


def test_depth_and_what_unpacks_to_much(memory: Path) -> None:
    run_in_fork(of_depths, str(memory))


def of_code(folder: str) -> None:
    of(hostile.code(folder), 60)


def test_nothing_is_run(memory: Path) -> None:
    run_in_fork(of_code, str(memory))


# --- controls -------------------------------------------------------------------------------------------------------------------


def without_checks_of_links(folder: str) -> None:
    from featstore.storage import calls, directory

    def follow(path: str, *, dir_fd: int | None = None, name_inside: str | None = None) -> tuple[int, int]:
        fd = os.open(path if name_inside is None else name_inside, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
        return fd, os.fstat(fd).st_size

    for module in (calls, directory):
        module.open_regular = follow  # type: ignore[attr-defined]
    found = hostile.escapes("typed", folder)
    assert found.counts["ESCAPE"] > 30, found.counts


def test_without_the_check_of_links_an_escape_is_seen(memory: Path) -> None:
    run_in_fork(without_checks_of_links, str(memory))


def without_checks_of_names(folder: str) -> None:
    from featstore.storage import catalog, directory

    for module in (catalog, directory):
        if hasattr(module, "resolve_inside"):
            module.resolve_inside = lambda root, name, dir_fd=None: os.path.join(root, name)
    found = hostile.names("typed", folder)
    assert found.counts["ESCAPE"] > 5, found.counts


def test_without_the_check_of_names_an_escape_is_seen(memory: Path) -> None:
    run_in_fork(without_checks_of_names, str(memory))


def of_meter(folder: str) -> None:
    with Meter() as meter:
        np.ones(8 << 20)
    assert 60 << 20 < meter.n_bytes < 80 << 20
    with Meter() as meter:
        said = attempt(lambda: np.empty(1 << 30), [folder])
    assert said.startswith("FOREIGN")
    assert meter.n_bytes < 8 << 20


def test_what_is_taken_or_asked_for_is_measured(memory: Path) -> None:
    run_in_fork(of_meter, str(memory))


def test_payloads_run_when_they_are_read_without_care(memory: Path) -> None:
    (memory / "outside").mkdir()
    canary = memory / "outside" / "ran"
    found = payloads(canary)
    readers = {
        "pickle": pickle.loads,
        "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
        "npz": lambda data: np.load(io.BytesIO(data), allow_pickle=True)["x"],
        "yaml": yaml.unsafe_load,
    }
    for kind, read in readers.items():
        watch = Watch(memory / "outside")
        made = read(found[kind])
        assert canary.exists(), kind
        assert watch.events(), kind
        watch.close()
        for each in (
            made,
            made.get("graph") if isinstance(made, dict) else made.flat[0] if isinstance(made, np.ndarray) else made,
        ):
            if hasattr(each, "close"):
                each.close()
        canary.unlink()
