"""Each system call of every operation fails in turn: the right error, the old state or the new one, and nothing is left."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import featstore
from featstore.storage import calls as storage_calls
from featstore.testing.faults import Fault, fault_stacks, sweep
from tests.campaigns.checks import BadStateError, Prepared, prepared, report
from tests.campaigns.operations import SCENARIOS
from tests.support.library_threads import remaining
from tests.support.programs import run_in_fork
from tests.system.test_faults import descriptors

pytestmark = pytest.mark.usefixtures("_program_server")

PACKAGE = str(Path(featstore.__file__).parent)

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

# The errors that the library may swallow, as calls ("*": all) below a function of its: each other one must be raised.
_READ = "close of what was only read, or locked"
_EMPTY = "close of a directory, or of a file into which nothing was written"
_CLEAN = "what is done is done; what cannot be removed now is swept by the next writer"
_RUN = "a run file: whoever made it uses it no more, and it goes with its directory"
ALLOWED = {
    **dict.fromkeys(
        [
            ("close", "adapters/datasets/arrays.py __init__"),
            ("close", "adapters/datasets/csvfiles.py _batches"),
            ("close", "creation/topologyfiles.py _opened"),
            ("close", "graph/changing.py _adopt"),
            ("close", "graph/openfields.py forget_feature"),
            ("close", "storage/catalog.py read_catalog"),
            ("close", "storage/directory.py close"),
            ("close", "storage/lock.py __init__"),
            ("close", "storage/lock.py release"),
            ("close", "storage/pagestream.py close"),
            ("close", "storage/rowfile.py _load_sums"),
            ("close", "storage/rowfile.py close"),
            ("close", "storage/sections.py close"),
            ("close", "storage/update.py close"),
        ],
        _READ,
    ),
    **dict.fromkeys(
        [
            ("close", "storage/builddir.py __init__"),
            ("close", "storage/builddir.py _leave"),
            ("close", "storage/rundir.py _mark"),
            ("close", "storage/stripes.py make_stripe"),
            ("close", "storage/writer.py fsync_directory"),
        ],
        _EMPTY,
    ),
    **dict.fromkeys(
        [
            ("*", "graph/convert.py _sweep"),
            ("*", "storage/directory.py remove_replaced"),
            ("*", "storage/update.py sweep_unused"),
            ("*", "storage/calls.py remove_tree"),
            ("unlink", "storage/builddir.py _forget_state"),
        ],
        _CLEAN,
    ),
    **dict.fromkeys(
        [
            ("unlink", "storage/spill.py close"),
            ("unlink", "storage/rundir.py _remove_parent"),
            ("*", "storage/rundir.py _remove_tree"),
            ("unlink", "storage/rundir.py remove_file"),
        ],
        _RUN,
    ),
    **dict.fromkeys(
        [(each, "sampling/listweights.py _make_tables") for each in ("write", "fsync", "rename", "mkdir")],
        "no room for a run file of weights: a warning says that whole lists are read",
    ),
    ("flock", "storage/lock.py release"): "a shared lock, which the close that follows gives up",
    (
        "close",
        "adapters/datasets/tables/pairs.py close",
    ): "scratch, flushed before a record names it, and read back through this file",
    ("close", "graph/snapshot.py _let_go"): "a file of node data that was read alone",
    ("close", ""): "a file that was there before, or is removed, closed with its last reader, below no function of the library",
    ("flock", "storage/lock.py alone"): "a probe: replaced files stay, and the next writer removes them",
    ("mkdir", "adapters/datasets/exporting.py placed"): "the directory is there",
    ("mkdir", "storage/catalog.py write_catalog"): "the directory is there",
    ("open", "graph/neighborlists.py _see_saved"): "the cache is saved and in use; a later call makes it again",
    ("read", "graph/neighborlists.py _see_saved"): "the cache is saved and in use; a later call makes it again",
    ("*", "storage/reuse.py keep"): "a file kept to be written over; another is made in its place",
}

# An operation that needs each entry of ALLOWED: the test of the operation fails if no call is swallowed by the entry there. So an
# entry that is dead is noticed wherever its operation runs, whatever else runs, and in which process.
SHOWN_BY = {
    "add again": ["close graph/changing.py _adopt"],
    "convert": ["* graph/convert.py _sweep"],
    "convert to stripes": ["close storage/stripes.py make_stripe"],
    "epoch": ["* storage/rundir.py _remove_tree", "close storage/rundir.py _mark", "unlink storage/rundir.py _remove_parent"],
    "epoch by weight": [
        *(f"{each} sampling/listweights.py _make_tables" for each in ("write", "fsync", "rename", "mkdir")),
        "unlink storage/spill.py close",
    ],
    "epoch streamed": ["* storage/reuse.py keep"],
    "export": ["mkdir adapters/datasets/exporting.py placed"],
    "import": [
        "close adapters/datasets/arrays.py __init__",
        "close adapters/datasets/csvfiles.py _batches",
        "unlink storage/rundir.py remove_file",
    ],
    "import tables": [
        "* storage/calls.py remove_tree",
        "* storage/directory.py remove_replaced",
        "close adapters/datasets/tables/pairs.py close",
        "close storage/builddir.py __init__",
        "close storage/builddir.py _leave",
        "close storage/sections.py close",
        "unlink storage/builddir.py _forget_state",
    ],
    "part": ["close creation/topologyfiles.py _opened"],
    "remove": ["close graph/openfields.py forget_feature"],
    "save again": [
        "close storage/lock.py __init__",
        "close storage/pagestream.py close",
        "open graph/neighborlists.py _see_saved",
        "read graph/neighborlists.py _see_saved",
    ],
    "update": [
        "* storage/update.py sweep_unused",
        "close ",
        "close storage/catalog.py read_catalog",
        "close storage/directory.py close",
        "close storage/lock.py release",
        "close storage/rowfile.py _load_sums",
        "close storage/rowfile.py close",
        "close storage/writer.py fsync_directory",
        "flock storage/lock.py alone",
        "flock storage/lock.py release",
        "mkdir storage/catalog.py write_catalog",
    ],
    "update data": ["close graph/snapshot.py _let_go"],
    "verify": ["close storage/update.py close"],
}


def allowed_by(operation: str, stack: list[tuple[str, str]]) -> tuple[str, str] | None:
    """Find the entry of ALLOWED by which an error of a call, with this stack, may be swallowed."""
    package = f"{PACKAGE}/"
    places = [f"{file.removeprefix(package)} {function}" for file, function in stack if file.startswith(package)]
    places = [each for each in places if not each.startswith("testing/")]
    found = ((each, place) for place in places or [""] for each in (operation, "*") if (each, place) in ALLOWED)
    return next(found, None)


def files_in(found: set[str]) -> set[str]:
    return {each for each in found if not each.startswith("task ")}


def fail_calls(
    ready: Prepared, operation: str, action: str, step: int = 1, swallowed: Counter[tuple[str, str]] | None = None
) -> tuple[int, int]:
    """Fail every ``step``-th call of one operation in turn, in the child; return how many failed, and how many were errors.

    Entries of ALLOWED by which the others were ``swallowed`` are counted there.
    """
    n_fired = n_errors = 0
    is_memory = "alloc" in operation  # whoever asks for it may do with less
    with fault_stacks() as last_stack:
        before = descriptors()
        for fault in sweep(ready.root, operation, action, step=step):
            where = f"{operation} {fault.k}: {action}"
            ready.fresh()
            error: BaseException | None = None
            with fault:
                try:
                    ready.call()
                except (OSError, MemoryError) as caught:
                    error = caught
            stack = last_stack()
            n_fired += bool(fault.fired)
            n_errors += error is not None
            if error is None and fault.fired and action not in GOES_ON and not is_memory:
                entry = allowed_by(operation, stack)
                if entry == ("close", "") and not _is_kept(fault.fired_path, fault.directory, ready.template):
                    entry = None
                if entry is None:
                    raise BadStateError(f"{ready.name}: {where}: swallowed: of {fault.fired_path} in {stack[:12]}")
                if swallowed is not None:
                    swallowed[entry] += 1
            if error is not None:
                assert fault.fired, where
                assert action not in GOES_ON, (ready.name, where, repr(error))
                assert isinstance(error, OSError) or action == "ENOMEM", (where, error)
                if isinstance(error, OSError):
                    assert error.errno == getattr(errno, action, None), (ready.name, where, repr(error))
                    is_of_a_file = error.filename is not None or not is_memory  # threads may lack memory to start
                    assert not is_of_a_file or str(error.filename).startswith(str(ready.root)), (ready.name, where, repr(error))
            # Looking into a directory to remove it takes memory, too.
            removes = operation == "unlink" or (is_memory and allowed_by("unlink", stack) is not None)
            ready.is_new_after(error, where, may_leave=removes)
            error = None
            if ready.scenario.resumes:  # several threads are at work: the process's pool has as many as were busy at once
                left = remaining(lambda: files_in(descriptors()) ^ files_in(before), 30)
                assert not left, (ready.name, where, left)
            else:
                assert descriptors(before) == before, (ready.name, where)
    return n_fired, n_errors


def _is_kept(path: str, root: Path | str, template: Path) -> bool:
    """Tell whether a file that is closed was there before, or is removed: its bytes are nobody's."""
    return path.endswith(" (deleted)") or (template / os.path.relpath(path, root)).exists()


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
    swallowed = Counter[tuple[str, str]]()
    for operation, action in ways[len(name) % one_in :: one_in]:
        fired, errors = fail_calls(ready, operation, action, step, swallowed)
        n_fired, n_errors = n_fired + fired, n_errors + errors
    by_place = {" ".join(each): n for each, n in swallowed.most_common()}
    figures = {"ways": len(ways), "failed": n_fired, "errors": n_errors, "swallowed": by_place, "states": ready.n_states}
    report("failing calls", operation=name, **figures)
    if step == one_in == 1:
        assert not idle(name, by_place), (name, idle(name, by_place))


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


def read_again(folder: str) -> None:
    """The control, in the child: a read of a dataset's file that fails is tried again, and nobody hears of it."""
    import featstore.storage.update as update

    real = storage_calls.pread_exactly

    def pread_exactly(fd: int, n_bytes: int, offset: int, path: str) -> bytearray:
        try:
            return real(fd, n_bytes, offset, path)
        except OSError:
            return real(fd, n_bytes, offset, path)

    update.pread_exactly = pread_exactly  # type: ignore[attr-defined]
    with pytest.raises(BadStateError, match=r"swallowed: of .*\.rows in .*storage/update\.py', 'open_file'"):
        fail_calls(prepared(folder, "open"), "read", "EIO")
    update.pread_exactly = real  # type: ignore[attr-defined]


def fail_some(folder: str, cases: list[tuple[str, str, str, int]]) -> None:
    """A sample, and the control, in one child."""
    for number, (name, operation, action, step) in enumerate(cases):
        os.mkdir(f"{folder}/{number}")
        fail_calls(prepared(f"{folder}/{number}", name), operation, action, step)
    for control in (read_again, retry_flushes):
        os.mkdir(f"{folder}/{control.__name__}")
        control(f"{folder}/{control.__name__}")


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
    ("aggregate", "open", "EMFILE", 34),  # the flush of a record that is in place
    ("infer named", "write", "ENOSPC", 17),
    ("epoch", "write", "ENOSPC", 13),
    ("epoch by weight", "read", "EIO", 17),
    ("pack again", "fsync", "EIO", 5),
    ("layout", "rename", "EIO", 3),
]


def test_some_failing_calls(tmp_path: Path) -> None:
    run_in_fork(fail_some, str(tmp_path), SAMPLE)


def idle(name: str, swallowed: Iterable[str]) -> list[str]:
    """List the entries of ALLOWED that an operation is to show, and by which none of its calls was swallowed."""
    return [entry for entry in SHOWN_BY.get(name, []) if entry not in swallowed]


@pytest.mark.stress
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_failing_call(name: str, tmp_path: Path) -> None:
    run_in_fork(fail_each, str(tmp_path), name, timeout_s=3400)


def test_every_error_that_may_be_swallowed_is_shown_by_an_operation() -> None:
    shown = [entry for entries in SHOWN_BY.values() for entry in entries]
    assert sorted(shown) == sorted(map(" ".join, ALLOWED))
    assert SHOWN_BY.keys() <= SCENARIOS.keys()


def show_idle(folder: str) -> None:
    """In the child: the closes of a removal show the entry that is its own; one that nothing needs is noticed."""
    swallowed = Counter[tuple[str, str]]()
    fail_calls(prepared(folder, "remove"), "close", "EIO", swallowed=swallowed)
    by_place = set(map(" ".join, swallowed))
    assert not idle("remove", by_place), by_place
    SHOWN_BY["remove"].append("close storage/nothing.py close")
    assert idle("remove", by_place) == ["close storage/nothing.py close"]


def test_an_idle_entry_is_noticed(tmp_path: Path) -> None:
    run_in_fork(show_idle, str(tmp_path))
