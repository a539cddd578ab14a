"""Drives and quotas that the kernel finds full, at every level, below whatever commits: the old state stays, and nothing else."""

from __future__ import annotations

import errno
import gc
import itertools
from pathlib import Path

import pytest

from featstore.errors import CorruptionError
from featstore.storage import writer
from tests.campaigns.checks import BadStateError, Prepared, before_labels, report
from tests.campaigns.drives import KINDS, Drive, needs_mounts
from tests.campaigns.operations import FULL, SCENARIOS, state
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

PAGE = 4096
NAMES = [name for name, each in SCENARIOS.items() if each.commits]
STEPS = {"btrfs": 7}  # which refuses everything while less than some 2 MB are free


def fill_at_each_level(folder: str, name: str, kind: str, step: int) -> None:
    """Run an operation with no page free, with ``step`` of them, with twice as many …, until it succeeds; in the child."""
    drive = Drive(Path(folder), kind)
    with drive.mounted() as root:
        root.mkdir()
        ready = Prepared(name, Path(folder) / "template", root)
        expected = errno.EDQUOT if kind == "quota" else errno.ENOSPC
        n_failed = n_kept = 0
        for n_pages in itertools.count(0, step):
            where = f"{kind}, {n_pages} pages are free"
            error, is_kept = fail_once(ready, drive, n_pages * PAGE, where)
            if error is None:
                break
            n_failed, n_kept = n_failed + 1, n_kept + is_kept
            if error.errno != expected or not str(error.filename).startswith(str(root)):
                raise BadStateError(f"{name}: {where}: {error!r}") from error
        assert n_failed, f"{name}: nothing failed on a full drive"
        assert n_kept or FULL not in ready.scenario.resumes, f"{name}: nothing was kept for the next call"
        gc.collect()  # errors, and the frames that they and their tracebacks hold, in which files are open
    report("full drives", operation=name, kind=kind, errors=n_failed, kept=n_kept, states=ready.n_states)


def fail_once(ready: Prepared, drive: Drive, n_free: int, where: str) -> tuple[OSError | None, bool]:
    """Run an operation on a drive with ``n_free`` bytes, and check what is there, on the full drive, too.

    Return its error, and whether something is kept for the next call.
    """
    ready.fresh()
    error: OSError | None = None
    with drive.filled(n_free):
        try:
            ready.call()
        except OSError as caught:
            error = caught
        found = state(ready.root)  # as much as ever can be read of a full drive
    is_kept = any(ready.root.glob("*.tmp-*"))
    is_new = ready.is_new_after(error, where)
    assert found in ([ready.new] if is_new else [ready.old, before_labels(ready.name, ready.new)]), (where, error)
    return error, is_kept


def swallow_full(folder: str) -> None:
    """The control, in the child: a write of a file that finds the drive full and says nothing. What it leaves is noticed."""
    real = writer.pwrite_all

    def pwrite_all(*of: object) -> None:
        try:
            real(*of)  # type: ignore[arg-type]
        except OSError as error:
            assert error.errno == errno.ENOSPC

    writer.pwrite_all = pwrite_all  # type: ignore[attr-defined]
    with pytest.raises((BadStateError, CorruptionError)):
        fill_at_each_level(folder, "update", "tmpfs", 1)
    writer.pwrite_all = real  # type: ignore[attr-defined]


def fill_some(folder: str, cases: list[tuple[str, str, int]]) -> None:
    """A sample, in one child."""
    for number, (name, kind, step) in enumerate(cases):
        where = Path(folder) / str(number)
        where.mkdir()
        fill_at_each_level(str(where), name, kind, step)


SAMPLE = [
    ("update", "tmpfs", 4),
    ("update data", "ext4", 5),
    ("remove", "tmpfs", 3),
    ("append", "ext4 4k", 17),
    ("export", "tmpfs", 31),
    ("append to a type", "xfs", 41),
]
SAMPLE_OF_BTRFS = [("partition", "btrfs", 300), ("import", "quota", 60)]


def test_some_operations_on_drives_that_run_full(tmp_path: Path) -> None:
    needs_mounts("ext4", "xfs")
    run_in_fork(fill_some, str(tmp_path), SAMPLE)


def test_some_operations_on_btrfs_and_within_a_quota(tmp_path: Path) -> None:
    needs_mounts("btrfs", "quota")
    run_in_fork(fill_some, str(tmp_path), SAMPLE_OF_BTRFS)


def test_a_full_drive_that_goes_unsaid_is_noticed(tmp_path: Path) -> None:
    needs_mounts("tmpfs")
    run_in_fork(swallow_full, str(tmp_path))


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_on_a_drive_that_runs_full(name: str, kind: str, tmp_path: Path) -> None:
    needs_mounts(kind)
    run_in_fork(fill_at_each_level, str(tmp_path), name, kind, STEPS.get(kind, 1), timeout_s=3000)
