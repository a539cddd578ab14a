"""Writers that are killed, lack descriptors, or have the power cut: the old dataset or the new one is there, whole."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import BusyError, CommittedError, FeatstoreError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage import builddir
from featstore.storage.catalog import read_catalog
from featstore.storage.layout import choose_layout
from featstore.storage.update import Update
from featstore.testing.faults import forked, sweep
from tests.support.making import create
from tests.support.programs import run_beside, run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

# --- killed writers -------------------------------------------------------------------------------------------------------------

OPERATIONS = ["open", "write", "fsync", "rename", "unlink"]
N = {"old": 50, "new": 60}


def make(path: Path, which: str, *, overwrite: bool = True, **form: Any) -> None:
    """Create one of two datasets, which differ in everything; with edges enough to be spilled."""
    n = N[which]
    rng = np.random.default_rng(n)
    x = np.full((n, 300), n, np.float32)
    edges = rng.integers(0, n, (2, 300))
    OutOfCoreGraph.from_edge_index(
        path,
        edges,
        n,
        {"x": x},
        {"y": x[:, 0]},
        edge_features={"w": np.full((300, 40), n, np.int16)},
        overwrite=overwrite,
        memory="9MiB" if form else "8MiB",
        progress=False,
        **form,
    ).close()


def which(path: Path) -> str | None:
    """Say which dataset is there, checking that it is whole; None where there is nothing."""
    if not os.path.lexists(path):
        return None
    with featstore.open(path, memory="8MiB", backend="pread", threads=1) as g:
        g.verify()
        name = {n: name for name, n in N.items()}[g.num_nodes]
        assert bool((g.features["x"][:] == g.num_nodes).all())
        assert g.node_data["y"].tolist() == [g.num_nodes] * g.num_nodes
        assert g.num_edges == 300
        assert bool((g.edge_features["w"][:] == g.num_nodes).all())
        return name


def striped(folder: str) -> dict[str, Any]:
    """Return the options of chunks of which one part lies in ``folder/drive``, which is made."""
    os.makedirs(f"{folder}/drive", exist_ok=True)
    return {"topology": "chunked", "chunk_bytes": 4096, "stripes": [f"{folder}/drive"]}


def stripes(path: Path) -> set[str]:
    """Return the links in a dataset, each of which must lead to a stripe beside it that is there."""
    found = {name for name in os.listdir(path) if name.startswith("featstore-stripe-")}
    assert found == set(os.listdir(path.parent / "drive"))
    return found


def kill_create(folder: str, step: int, old: bool, in_stripes: bool = False) -> None:
    """Kill a builder at every ``step``-th system call; in the child."""
    path, n_killed, seen = Path(folder) / "g", 0, set()
    form = striped(folder) if in_stripes else {}
    for fault in sweep(folder, [*OPERATIONS, "mkdir"] if in_stripes else OPERATIONS, "kill", step=step):
        if old:
            make(path, "old", **form)
        else:
            shutil.rmtree(path, ignore_errors=True)
        with fault:
            killed = forked(lambda: make(path, "new", **form))
        state = which(path)
        assert state in (("old", "new") if old else (None, "new")), state
        assert killed is not None or state == "new"  # what was acknowledged is there
        n_killed += killed is not None
        seen.add(state)
        # The next writer is not in anyone's way, and sweeps what the dead one left.
        make(path, "old")
        assert sorted(os.listdir(folder)) == (["drive", "g"] if in_stripes else ["g"]), os.listdir(folder)
        assert not in_stripes or stripes(path) == set()
        assert which(path) == "old"
    assert n_killed >= 80 // step, n_killed
    assert len(seen) == 2, seen


@pytest.mark.stress
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("in_stripes", [False, True])
def test_builders_killed_at_every_system_call(tmp_path: Path, old: bool, in_stripes: bool) -> None:
    run_in_fork(kill_create, str(tmp_path), 1, old, in_stripes, timeout_s=1800)


def kill_at_random(folder: str, n: int) -> None:
    """Kill a builder at random moments, between system calls too; in the child."""
    path, rng, states = Path(folder) / "g", np.random.default_rng(0), []
    make(path, "old")
    started = time.perf_counter()
    make(path, "new")
    usual_s = time.perf_counter() - started
    while len(states) < n:
        make(path, "old")
        pid = os.fork()
        if pid == 0:
            make(path, "new")
            os._exit(0)
        time.sleep(rng.uniform(0, 1.2 * usual_s))  # chooses the moment; nothing waits for anything
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            states.append(which(path))
    make(path, "old")
    assert os.listdir(folder) == ["g"]
    assert set(states) == {"old", "new"}, states


@pytest.mark.stress
def test_three_hundred_builders_killed_at_random(tmp_path: Path) -> None:
    run_in_fork(kill_at_random, str(tmp_path), 300, timeout_s=1800)


def kill_careless(folder: str) -> None:
    """The control, in the child: a builder that works at the final place. Its killed builds are noticed."""

    def build_in_place(self: builddir.BuildDirectory, kept: str) -> None:
        os.mkdir(self.target)
        self.path = self.target

    def commit(self: builddir.BuildDirectory) -> None:
        self.path = ""

    builddir.BuildDirectory._make = build_in_place  # type: ignore[method-assign]
    builddir.BuildDirectory.commit = commit  # type: ignore[method-assign]
    path, n_broken = Path(folder) / "g", 0
    for fault in sweep(folder, OPERATIONS, "kill", step=17):
        shutil.rmtree(path, ignore_errors=True)
        with fault:
            forked(lambda: make(path, "new"))
        try:
            which(path)
        except (FeatstoreError, OSError):
            n_broken += 1
    assert n_broken >= 3


def kill_update(folder: str, step: int) -> None:
    """Kill somebody who adds a field, at every ``step``-th system call; in the child."""
    path, seen = Path(folder) / "g", set()
    make(path, "old")
    before = read_catalog(path)

    def add() -> None:
        with Update(path) as update:
            with update.writer("node.z", choose_layout(4), kind="data", dtype="float32") as out:
                out.write(np.ones((50, 4), np.uint8))
                file = out.commit()
            template = update.catalog.fields["node/_/y"]
            part = type(template.parts[0])(file.name, 0, 50)
            update.add([file], [type(template)("node/_/z", "data", "float32", (50,), file.generation, (part,))])
            update.commit()

    for fault in sweep(folder, OPERATIONS, "kill", step=step):
        shutil.rmtree(path)
        make(path, "old")
        with fault:
            killed = forked(add)
        assert which(path) == "old"
        with featstore.open(path, memory="8MiB", backend="pread") as g:
            added = "z" in g.node_data
            assert not added or len(g.node_data["z"]) == 50
        assert killed is not None or added
        seen.add(added)
        # The lock is free; leftovers go, also while somebody reads.
        with featstore.open(path, memory="8MiB", backend="pread"), Update(path) as update:
            assert (update.catalog.generation == before.generation + 1) == added
        named = {name for record in update.catalog.files.values() for name in (record.name, record.sums_name)}
        assert {name for name in os.listdir(path) if ".rows" in name or name.endswith(".tmp")} == named
        assert os.listdir(path / "catalog.lmdb") == ["data.mdb"]
    assert seen == {False, True}


def kill_convert(folder: str, step: int) -> None:
    """Kill a conversion, there or back, at every ``step``-th system call: one of the forms is there, whole; in the child."""
    path, seen = Path(folder) / "g", set()
    forms = {"csc": {"topology": "csc"}, "chunked": {"topology": "chunked", "chunk_bytes": 4096}, "striped": striped(folder)}
    for before, there in (("csc", "chunked"), ("chunked", "csc"), ("chunked", "striped"), ("striped", "csc")):
        for fault in sweep(folder, [*OPERATIONS, "mkdir"], "kill", step=step):
            make(path, "old", **forms[before])
            with fault:
                killed = forked(lambda: featstore.convert(path, memory="64MiB", progress=False, **forms[there]))
            assert which(path) == "old"
            catalog = read_catalog(path)
            in_stripes = {name.partition("/")[0] for name in catalog.files if "/" in name}
            found = "striped" if in_stripes else catalog.topology
            assert found in (before, there)
            assert killed is not None or found == there
            seen.add((before, there, found))
            # The lock is free; leftovers go, those of a commit that never came also while somebody reads.
            read = contextlib.nullcontext() if found == there else featstore.open(path, memory="64MiB", backend="pread")
            with read, Update(path) as update:
                pass
            named = {name for record in update.catalog.files.values() for name in (record.name, record.sums_name)}
            assert {name for name in os.listdir(path) if ".rows" in name or name.endswith(".tmp")} == {
                name for name in named if "/" not in name
            }
            assert stripes(path) == in_stripes
    assert len(seen) == 8, seen


def kill_changes(folder: str, step: int) -> None:
    """Kill updates of rows that make a patch, merge patches, or write the file anew: old or new rows are there; in the child."""
    path, seen = Path(folder) / "g", set()
    steps = [([1], 1), ([11], 2), (slice(0, 40), 3)]

    def update(k: int) -> None:
        ids, value = steps[k]
        with featstore.open(path, memory="8MiB", backend="pread", threads=1) as g:
            rows = np.full((len(range(50)[ids]) if isinstance(ids, slice) else len(ids), 300), value, np.float32)
            g.features["x"].update(ids, rows, progress=False)

    for k in range(len(steps)):
        for fault in sweep(folder, OPERATIONS, "kill", step=step):
            make(path, "old")
            expected = np.full((50, 300), 50, np.float32)
            for before in range(k):
                update(before)
                expected[steps[before][0]] = steps[before][1]
            with fault:
                killed = forked(lambda k=k: update(k))  # type: ignore[misc]
            after = expected.copy()
            after[steps[k][0]] = steps[k][1]
            with featstore.open(path, memory="8MiB", backend="pread") as g:
                g.verify(progress=False)
                found = g.features["x"][:].numpy()
            is_new = np.array_equal(found, after)
            assert is_new or np.array_equal(found, expected)
            assert killed is not None or is_new
            seen.add((k, is_new))
            with Update(path) as swept:
                pass
            named = {name for record in swept.catalog.files.values() for name in (record.name, record.sums_name)}
            assert {name for name in os.listdir(path) if ".rows" in name or name.endswith(".tmp")} == named
    assert len(seen) == 2 * len(steps), seen


@pytest.mark.stress
def test_changes_killed_at_every_system_call(tmp_path: Path) -> None:
    run_in_fork(kill_changes, str(tmp_path), 1, timeout_s=1800)


@pytest.mark.stress
def test_conversions_killed_at_every_system_call(tmp_path: Path) -> None:
    run_in_fork(kill_convert, str(tmp_path), 1, timeout_s=1800)


@pytest.mark.stress
def test_updates_killed_at_every_system_call(tmp_path: Path) -> None:
    run_in_fork(kill_update, str(tmp_path), 1)


def kill_some(folder: str) -> None:
    """A sample of all the kills above, and their control; in one child, as starting one takes longer than the kills."""
    for name, campaign in (
        ("fresh", lambda path: kill_create(path, 41, False)),
        ("over", lambda path: kill_create(path, 41, True)),
        ("over stripes", lambda path: kill_create(path, 43, True, True)),
        ("update", lambda path: kill_update(path, 9)),
        ("changes", lambda path: kill_changes(path, 7)),
        ("convert", lambda path: kill_convert(path, 31)),
        ("careless", kill_careless),
    ):
        os.mkdir(f"{folder}/{name}")
        campaign(f"{folder}/{name}")


def test_writers_killed_at_a_system_call(tmp_path: Path) -> None:
    run_in_fork(kill_some, str(tmp_path))


def few_descriptors(folder: str, step: int) -> None:
    """Too few descriptors for what makes, replaces or converts a dataset: nothing is left; in the child."""
    path, drive, form = Path(folder) / "g", Path(folder) / "drive", striped(folder)
    make(path, "old", **form)  # what opens something once does it now
    make(path, "new")
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: make(path, "new", **form),
        "replace": lambda: make(path, "new", **form),
        "convert": lambda: featstore.convert(path, memory="64MiB", progress=False, **form),
    }
    for name, call in calls.items():
        n_failed, is_done, spare = 0, False, 0
        while not is_done:
            if name == "create":
                shutil.rmtree(path)
            else:
                make(path, "old", **(form if name == "replace" else {}))
            before, catalog = sorted(os.listdir(drive)), None if name == "create" else read_catalog(path)
            used = {int(fd) for fd in os.listdir("/proc/self/fd")}
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + spare, 4096))
            try:
                call()
                is_done = True
            except CommittedError as error:
                assert error.errno == errno.EMFILE
                is_done = True
            except OSError as error:
                assert error.errno == errno.EMFILE
                n_failed += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            spare += step
            where = (name, spare)
            assert sorted(os.listdir(folder)) == (["drive", "g"] if catalog is not None or is_done else ["drive"]), where
            if is_done:
                assert stripes(path), where
            else:
                assert sorted(os.listdir(drive)) == before, where
                assert catalog is None or read_catalog(path) == catalog, where
            make(path, "old")
            assert not os.listdir(drive), where
        assert n_failed >= -(-5 // step), (name, n_failed)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.stress)])
def test_too_few_descriptors_leave_nothing(tmp_path: Path, step: int) -> None:
    run_in_fork(few_descriptors, str(tmp_path), step)


# --- power cuts -----------------------------------------------------------------------------------------------------------------


class Disk:
    """What a disk is sure to hold: bytes of a file as of its last fsync, names of a directory as of the directory's.

    ``drop``: number of the fsync that is skipped, as if it had been left out of the source.
    """

    def __init__(self, patch: pytest.MonkeyPatch, drop: int = 0) -> None:
        self.content: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.kinds: list[str] = []
        self.states: list[Callable[[], None]] = []
        self.drop = drop
        self._real = os.fsync
        patch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        path = f"/proc/self/fd/{fd}"
        inode = os.fstat(fd).st_ino
        self.kinds.append("directory" if os.path.isdir(path) else "file")
        if len(self.kinds) == self.drop:
            return
        if self.kinds[-1] == "file":
            self.content[inode] = Path(path).read_bytes()
        else:
            self.names[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}

    def settle(self, root: Path) -> None:
        """Take everything under a directory for durable."""
        for path in (root, *root.rglob("*")):
            if path.is_dir():
                self.names[path.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self.content[path.stat().st_ino] = path.read_bytes()

    def restore(self, inode: int, target: Path) -> None:
        """Write what is durable below a directory to ``target``: files never synced are empty, unsynced names are gone."""
        target.mkdir()
        for name, child in self.names.get(inode, {}).items():
            if child in self.names:
                self.restore(child, target / name)
            elif name.startswith(("g", "catalog.lmdb")) and "." not in name.removeprefix("catalog.lmdb"):
                (target / name).mkdir()
            else:
                (target / name).write_bytes(self.content.get(child, b""))


def survives(disk: Disk, folder: Path, target: Path) -> str | None:
    """What a power cut now would leave at ``g``: old, new, nothing, or "broken"."""
    shutil.rmtree(target, ignore_errors=True)
    disk.restore(folder.stat().st_ino, target)
    try:
        return which(target / "g")
    except (FeatstoreError, OSError):
        return "broken"


def test_a_power_cut_after_create_loses_nothing_and_each_fsync_is_needed(tmp_path: Path) -> None:
    folder, target = tmp_path / "disk", tmp_path / "after"
    folder.mkdir()

    def run(drop: int) -> tuple[Disk, str | None]:
        shutil.rmtree(folder / "g", ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, drop)
            disk.settle(folder)
            make(folder / "g", "new", overwrite=False)
        return disk, survives(disk, folder, target)

    disk, after = run(0)
    assert after == "new"
    n = len(disk.kinds)
    for k in range(1, n + 1):
        if disk.kinds[k - 1] == "file":  # the control: without this fsync the file is empty after a power cut
            assert run(k)[1] == "broken", k
    assert run(n)[1] is None  # without the last one, of the parent directory, the dataset's name is gone
    assert run(n - 1)[1] == "broken"  # the build directory's own: it fixes the name of the catalog


def test_a_power_cut_at_any_time_leaves_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = tmp_path / "disk", tmp_path / "after"
    folder.mkdir()
    make(folder / "g", "old")
    disk = Disk(monkeypatch)
    disk.settle(folder)
    seen = []
    record = disk._fsync

    def fsync(fd: int) -> None:
        seen.append(survives(disk, folder, target))
        record(fd)
        seen.append(survives(disk, folder, target))

    monkeypatch.setattr(os, "fsync", fsync)
    make(folder / "g", "new")
    assert seen == sorted(seen, reverse=True)  # old … old, new
    assert set(seen) == {"old", "new"}


# --- two writers ----------------------------------------------------------------------------------------------------------------


def build_slowly(link: Any, path: Path) -> None:
    def blocks() -> Iterator[np.ndarray]:
        yield np.zeros((1, 2))
        link.send("building")
        link.recv()  # it never comes

    create(path, np.zeros(3, np.int64), [], {"x": ((2, 2), "float64", blocks())}, overwrite=True)


@pytest.mark.parametrize("old", [False, True])
def test_a_second_builder_in_another_process(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "g"
    if old:
        make(path, "old")
    with run_beside(build_slowly, path) as (link, builder):
        assert link.recv() == "building"
        for _ in range(2):
            with pytest.raises(BusyError):
                make(path, "new")
        assert which(path) == ("old" if old else None)
        if old:
            with pytest.raises(BusyError):
                Update(path)
        builder.kill()
        builder.join()
    make(path, "new")  # the dead one's locks are gone, and so is what it built
    assert which(path) == "new"
    assert os.listdir(tmp_path) == ["g"]
