"""Drives that the kernel finds full, at every fill level, below whatever commits: the old dataset stays, and nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.campaigns.drives import Drive, needs_mounts
from tests.campaigns.operations import SCENARIOS, Scenario, changed, fresh, leftovers, opened, state
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

PAGE = 4096


def change_data(root: Path, name: str) -> None:
    with opened(root) as g:
        if name == "add":
            g.add_data("w", np.zeros(g.num_nodes, np.float32), progress=False)
        elif name == "update":
            g.update_data("w", [1, 600], np.ones(2, np.float32), progress=False)
        else:
            g.remove_data("w")


def with_data(root: Path) -> None:
    changed("add")(root)
    change_data(root, "add")


CALLS = {
    **{
        name: SCENARIOS[name]
        for name in ("add", "add again", "remove", "append", "append to chunks", "append to a type", "update", "merge", "anew")
    },
    **{name: SCENARIOS[name] for name in ("import", "import replace", "import tables", "export", "export parquet")},
    "add data": Scenario(changed("add"), lambda root: change_data(root, "add")),
    "update data": Scenario(with_data, lambda root: change_data(root, "update")),
    "remove data": Scenario(with_data, lambda root: change_data(root, "remove")),
}


def whole_state(root: Path) -> tuple[Any, ...]:
    """The verified state, with the node data that the others do not have."""
    found = state(root)
    if os.path.lexists(root / "g"):
        with opened(root) as g:
            found += (g.node_data["w"].tolist() if "w" in g.node_data else None,)
    return found


def fill(ballast: Path, n_free: int) -> None:
    """Take all of the drive but ``n_free`` bytes."""
    fd, n_bytes = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_EXCL), 0
    try:
        while (more := _grow(fd, n_bytes)) > n_bytes:
            n_bytes = more
            os.sync()  # xfs frees removed files late, and keeps some blocks until then
        os.ftruncate(fd, n_bytes - n_free)
        os.fsync(fd)
    finally:
        os.close(fd)


def _grow(fd: int, n_bytes: int) -> int:
    """Make a file of so many bytes as large as it can be."""
    piece = 16 << 20
    while piece:
        try:
            os.posix_fallocate(fd, n_bytes, piece)
            n_bytes += piece
        except OSError as error:
            assert error.errno == errno.ENOSPC
            piece //= 2
            piece -= piece % 1024
    return n_bytes


def fill_at_each_level(folder: str, name: str, kind: str, step: int) -> None:
    """Run an operation with no page free, with ``step``, with twice as many, until it succeeds; in the child."""
    scenario, template = CALLS[name], Path(folder) / "template"
    template.mkdir()
    scenario.before(template)
    drive = Drive(Path(folder), "ext4" if kind == "tmpfs" else kind)
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48M", "tmpfs", drive.path], check=True)
        at_each_level(drive.path, template, scenario, name, step)
        subprocess.run(["umount", drive.path], check=True)
    else:
        with drive.mounted():
            at_each_level(drive.path, template, scenario, name, step)


def at_each_level(drive: Path, template: Path, scenario: Scenario, name: str, step: int) -> None:
    root, ballast = drive / "data", drive / "ballast"
    fresh(template, root)
    old = whole_state(root)
    scenario.call(root)
    new = whole_state(root)
    assert new != old
    n_failed = 0
    for n_pages in itertools.count(0, step):
        where = f"{name}: {n_pages} pages are free"
        fresh(template, root)
        fill(ballast, n_pages * PAGE)
        error: OSError | None = None
        try:
            scenario.call(root)
        except OSError as caught:
            error = caught
        found = whole_state(root)  # as much as ever can be read of a full drive
        assert found == (new if error is None else old), (where, repr(error))
        left = leftovers(root, template)
        if scenario.resumes and error is not None:  # what was finished, for the next call
            left -= {each for each in left if each.startswith("g.tmp-")}
        assert not left, (where, left, repr(error))
        ballast.unlink()
        if error is None:
            break
        assert error.errno == errno.ENOSPC, (where, repr(error))
        assert str(error.filename).startswith(str(root)), (where, repr(error))
        n_failed += 1
        scenario.call(root)
        assert whole_state(root) == new, where
        assert not leftovers(root, root), where
    assert n_failed, f"{name}: nothing failed on a full drive"


def fill_some(folder: str, cases: list[list[Any]]) -> None:
    """A sample, in one child."""
    for number, (name, kind, step) in enumerate(cases):
        where = Path(folder) / str(number)
        where.mkdir()
        fill_at_each_level(str(where), name, kind, step)


SAMPLE = [
    ("update", "tmpfs", 4),
    ("update data", "ext4", 5),
    ("remove", "tmpfs", 3),
    ("append", "ext4", 17),
    ("export", "tmpfs", 31),
    ("append to a type", "xfs", 41),
]


def test_some_operations_on_drives_that_run_full(tmp_path: Path) -> None:
    needs_mounts()
    needs_mounts("xfs")
    run_in_fork(fill_some, str(tmp_path), SAMPLE)


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "xfs"])
@pytest.mark.parametrize("name", CALLS)
def test_every_operation_on_a_drive_that_runs_full(name: str, kind: str, tmp_path: Path) -> None:
    needs_mounts("xfs" if kind == "xfs" else "ext4")
    run_in_fork(fill_at_each_level, str(tmp_path), name, kind, 1, timeout_s=3000)
