"""Each system call of every operation fails in turn: the right error, the old state or the new one, and nothing is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from featstore.storage import calls as storage_calls
from featstore.testing.faults import Fault, sweep
from tests.campaigns.checks import BadStateError, Prepared, prepared, report
from tests.campaigns.operations import SCENARIOS
from tests.support.programs import run_in_fork
from tests.system.test_faults import descriptors

pytestmark = pytest.mark.usefixtures("_program_server")

# What fails, and how. A flush that fails once and then succeeds, with the bytes lost, is the lie that kernels tell: an operation
# must not try again.
FAULTS = [
    *[("open", action) for action in ("EMFILE", "EIO", "ENOMEM", "EINTR")],
    *[("read", action) for action in ("EIO", "short", "EINTR")],
    *[("write", action) for action in ("ENOSPC", "EIO", "EDQUOT", "EFBIG", "short", "EINTR")],
    *[("fsync", action) for action in ("EIO", "ENOSPC")],
    *[("rename", action) for action in ("EIO", "ENOSPC")],
    *[("truncate", action) for action in ("ENOSPC", "EINTR")],
    *[("mmap", action) for action in ("ENOMEM",)],
    *[("flock", action) for action in ("EIO", "ENOMEM")],
    *[("mkdir", action) for action in ("ENOSPC",)],
    *[("unlink", action) for action in ("EIO",)],
    *[("close", action) for action in ("EIO",)],
]
GOES_ON = ("short", "EINTR")  # is gone on with
SAID = ("write", "fsync", "rename")  # must be errors; another call may be one that looks for what may go
SAID_BY_CREATE = {("create", "open"), ("create", "read")}


def files_in(found: set[str]) -> set[str]:
    return {each for each in found if not each.startswith("task ")}


def fail_calls(ready: Prepared, operation: str, action: str, step: int = 1) -> tuple[int, int]:
    """Fail every ``step``-th call of one operation in turn, in the child; return how many failed, and how many were errors."""
    before, n_fired, n_errors = descriptors(), 0, 0
    for fault in sweep(ready.root, operation, action, step=step):
        where = f"{operation} {fault.k}: {action}"
        ready.fresh()
        error: BaseException | None = None
        with fault:
            try:
                ready.call()
            except (OSError, MemoryError) as caught:
                error = caught
        n_fired += bool(fault.fired)
        n_errors += error is not None
        must_say = action not in GOES_ON and (operation in SAID or (ready.name, operation) in SAID_BY_CREATE)
        if error is None and fault.fired and must_say and not is_of_a_run(ready):
            raise BadStateError(f"{ready.name}: {where}: swallowed")
        if error is not None:
            assert fault.fired, where
            assert action not in GOES_ON, (ready.name, where, repr(error))
            assert isinstance(error, OSError) or action == "ENOMEM", (where, error)
            if isinstance(error, OSError):
                assert error.errno == getattr(errno, action, None), (ready.name, where, repr(error))
                is_of_a_file = error.filename is not None or "alloc" not in operation  # threads may lack memory to start
                assert not is_of_a_file or str(error.filename).startswith(str(ready.root)), (ready.name, where, repr(error))
        ready.is_new_after(error, where, may_leave=operation == "unlink")
        error = None
        if ready.scenario.resumes:  # several threads are at work: the process's pool has as many as were busy at once
            assert files_in(descriptors()) == files_in(before), (ready.name, where)
        else:
            assert descriptors(before) == before, (ready.name, where)
    return n_fired, n_errors


def is_of_a_run(ready: Prepared) -> bool:
    """Whether the operation is an epoch, which goes on without a file that it need not have."""
    return ready.name.startswith("epoch")


def calls_of(ready: Prepared) -> dict[str, int]:
    """Count the calls of each operation of the system that there are."""
    found = {}
    for operation in dict.fromkeys(operation for operation, _ in FAULTS):
        ready.fresh()
        with Fault(ready.root, operation, "EIO", k=1 << 40) as fault:
            ready.call()
        found[operation] = fault.calls
    return found


def fail_each(folder: str, name: str, step: int = 1, one_in: int = 1) -> None:
    """Fail every ``step``-th call in each way, or in ``one_in`` of them, of those that the operation makes; in the child."""
    ready = prepared(folder, name)
    there = calls_of(ready)
    assert all(there[each] for each in ("open", "read", "close"))
    assert not ready.scenario.commits or all(there[each] for each in ("write", "fsync", "rename"))
    ways = [(operation, action) for operation, action in FAULTS if there[operation]]
    n_fired = n_errors = 0
    for operation, action in ways[len(name) % one_in :: one_in]:
        fired, errors = fail_calls(ready, operation, action, step)
        n_fired, n_errors = n_fired + fired, n_errors + errors
    report("failing calls", operation=name, ways=len(ways), failed=n_fired, errors=n_errors, states=ready.n_states)


def retry_flushes(folder: str) -> None:
    """The control, in the child: flushes that are tried again after an error, which the kernel then says are done."""
    real = storage_calls.fsync_fd

    def fsync_fd(fd: int, path: str) -> None:
        try:
            real(fd, path)
        except OSError:
            os.fsync(fd)

    import featstore.storage.writer as writer

    storage_calls.fsync_fd = writer.fsync_fd = fsync_fd  # type: ignore[attr-defined]
    with pytest.raises(BadStateError, match="swallowed"):
        fail_calls(prepared(folder, "update"), "fsync", "EIO")


def fail_some(folder: str, cases: list[tuple[str, str, str, int]]) -> None:
    """A sample, and the control, in one child."""
    for number, (name, operation, action, step) in enumerate(cases):
        os.mkdir(f"{folder}/{number}")
        fail_calls(prepared(f"{folder}/{number}", name), operation, action, step)
    os.mkdir(f"{folder}/control")
    retry_flushes(f"{folder}/control")


SAMPLE = [
    ("replace", "rename", "EIO", 19),
    ("replace", "flock", "EIO", 4),
    ("create", "open", "EMFILE", 23),
    ("create", "write", "EFBIG", 17),
    ("edges replace", "write", "short", 17),
    ("create chunks", "open", "ENOMEM", 37),
    ("convert to stripes", "mkdir", "ENOSPC", 1),
    ("replace stripes", "unlink", "EIO", 17),
    ("append to stripes", "rename", "EIO", 3),
    ("update", "write", "ENOSPC", 3),
    ("merge", "fsync", "EIO", 3),
    ("import replace", "flock", "EIO", 8),
    ("import tables", "close", "EIO", 97),
    ("export parquet", "write", "ENOSPC", 9),
    ("part", "read", "EIO", 41),
    ("aggregate", "fsync", "EIO", 5),
    ("infer named", "write", "ENOSPC", 17),
    ("epoch", "write", "ENOSPC", 13),
    ("pack again", "fsync", "EIO", 5),
    ("layout", "rename", "EIO", 3),
]


def test_some_failing_calls(tmp_path: Path) -> None:
    run_in_fork(fail_some, str(tmp_path), SAMPLE)


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_failing_call(name: str, tmp_path: Path) -> None:
    run_in_fork(fail_each, str(tmp_path), name, timeout_s=3400)
