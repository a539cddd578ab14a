"""Each system call of everything that commits fails in turn: what is there afterwards is the old or the new state, whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.adapters import datasets
from featstore.adapters.datasets import tables
from featstore.errors import CommittedError
from featstore.storage.catalog import read_catalog
from featstore.storage.lock import OPENING_LOCK, READERS_LOCK, WRITER_LOCK
from featstore.storage.stripes import mark_of
from featstore.storage.update import Update
from featstore.testing.faults import Fault, sweep
from tests.support.imports import Folder
from tests.support.loaders import make_loader
from tests.support.programs import run_in_fork
from tests.system.test_faults import descriptors

pytestmark = pytest.mark.usefixtures("_program_server")

LOCKS = {OPENING_LOCK, READERS_LOCK, WRITER_LOCK}
CACHE_BYTES = "20KB"
N = {"old": 700, "new": 800}
APPENDED = 7
KEY = "drive/speed"
IN_CHUNKS = {"topology": "chunked", "chunk_bytes": 4096}


def arrays(which: str) -> tuple[np.ndarray, np.ndarray]:
    """Edges and features of one of two datasets, which differ in everything."""
    n = N[which]
    return np.random.default_rng(n).integers(0, n, (2, 5000)), np.full((n, 5), n, np.float32)


def make(path: Path, which: str, overwrite: bool = False, **form: Any) -> None:
    edges, x = arrays(which)
    order = np.lexsort((edges[0], edges[1]))
    indptr = np.searchsorted(edges[1][order], np.arange(N[which] + 1))
    featstore.OutOfCoreGraph.create(
        path, indptr, edges[0][order], {"x": x}, {"y": x[:, 0]}, overwrite=overwrite, memory="9MiB", progress=False, **form
    ).close()


def make_from_edges(path: Path, which: str, overwrite: bool = False) -> None:
    edges, x = arrays(which)
    featstore.OutOfCoreGraph.from_edge_index(
        path, edges, N[which], {"x": x}, {"y": x[:, 0]}, overwrite=overwrite, memory="8MiB", progress=False
    ).close()


def opened(root: Path) -> featstore.OutOfCoreGraph:
    return featstore.open(root / "g", memory="16MiB", backend="pread", threads=1)


def save(root: Path, seed: int) -> None:
    with opened(root) as g:
        g.cache_neighbors(CACHE_BYTES, "random", seed=seed, save=True)


def convert(root: Path, to: str) -> None:
    form = {"csc": {"topology": "csc"}, "chunked": IN_CHUNKS, "stripes": {**IN_CHUNKS, "stripes": [root / "drive"]}}[to]
    featstore.convert(root / "g", **form, memory="64MiB", progress=False)


def keep(root: Path, value: int) -> None:
    """As measured rates are kept."""
    with Update(root / "g") as update:
        update.add([], extra={KEY: {"value": value}})
        update.commit()


def change(root: Path, name: str) -> None:
    """Change the dataset in one commit."""
    with opened(root) as g:
        if name == "add":
            g.add_feature("z", np.full((g.num_nodes, 5), 7, np.float32), progress=False)
        elif name == "add again":
            g.add_feature("z", np.full((g.num_nodes, 7), 8, np.float32), overwrite=True, progress=False)
        elif name == "remove":
            g.remove_feature("z")
        elif name == "append":
            rows = np.full((APPENDED, 5), APPENDED, np.float32)
            g.append_nodes(APPENDED, {"x": rows}, {"y": rows[:, 0]}, progress=False)
        else:
            g.features["z"].update(UPDATES[name][0], UPDATES[name][1], progress=False)


UPDATES: dict[str, Any] = {  # a few pages; more, into which those are merged; so many that the file is written anew
    "update": ([1, 600], np.full((2, 5), 1, np.float32)),
    "merge": (slice(200, 220), np.full((20, 5), 2, np.float32)),
    "anew": (slice(None, None, 2), np.full((350, 5), 3, np.float32)),
}


def changed(*names: str) -> Callable[[Path], None]:
    """What is there after these changes of the old dataset."""

    def make_it(root: Path) -> None:
        make(root / "g", "old")
        for name in names:
            change(root, name)

    return make_it


def pack(root: Path, seed: int, overwrite: bool) -> None:
    with opened(root) as g:
        sampler = featstore.NeighborSampler(g, fanouts=[3], seed=seed)
        ids = np.arange(0, 600, 3)
        featstore.sample_offline(
            g, sampler, ids, 50, seed=seed, path=root / "p", overwrite=overwrite, threads=1, progress=False
        ).close()


def layout(root: Path) -> None:
    with opened(root) as g:
        make_loader(g, strategy="packed", pack=root / "p", features="x", labels="y", feature_cache=0.1).close()


def import_folder(root: Path) -> None:
    datasets.ogb(root / "in", root / "g", overwrite=True, memory="9MiB", progress=False)


def import_tables(root: Path) -> None:
    nodes = tables.NodeTable(root / "in" / "nodes.csv", "name", {"x": ["x"]}, {"y": "y"})
    edges = tables.EdgeTable(root / "in" / "edges.csv", "from", "to")
    tables.import_tables(root / "g", nodes, edges, overwrite=True, memory="16MiB", progress=False)


def export(root: Path, form: str) -> None:
    with opened(root) as g:
        datasets.export(g, root / "out", form, memory="8MiB", progress=False)


def read(root: Path) -> None:
    with opened(root) as g:
        check_rows(g)


def verify(root: Path) -> None:
    with opened(root) as g:
        g.verify(progress=False)


# -- what is there ---------------------------------------------------------------------------------------------------------------


def check_rows(g: featstore.OutOfCoreGraph) -> str:
    n = N["old"] if g.num_nodes == N["old"] + APPENDED else g.num_nodes
    assert bool((g.features["x"][:n] == n).all())
    assert bool((g.features["x"][n:] == APPENDED).all())
    assert g.node_data["y"].flatten().tolist() == [n] * n + [APPENDED] * (g.num_nodes - n)
    assert g.num_edges == 5000
    return {**{n: name for name, n in N.items()}, N["old"] + APPENDED: "appended"}[g.num_nodes]


def state(root: Path) -> tuple[Any, ...]:
    """Open and verify everything in ``root``; return what says which of the states it is in."""
    found: list[Any] = []
    if os.path.lexists(root / "g"):
        with opened(root) as g:
            g.verify(progress=False)
            found.append(check_rows(g))
            found.append([(name, g.features[name][:].tolist()) for name in g.features if name != "x"])
        catalog = read_catalog(root / "g")
        found += [catalog.topology, sum("/" in name for name in catalog.files)]
        found.append(json.dumps({key: catalog.extra.get(key) for key in ("cache/neighbors", KEY)}, sort_keys=True))
        for seed in (1, 2):
            with opened(root) as g:
                g.cache_neighbors(CACHE_BYTES, "random", seed=seed)  # from the saved one, where that is this
    if os.path.lexists(root / "p"):
        with featstore.Pack(root / "p") as found_pack:
            checked = found_pack.verify(progress=False)
            assert not checked["others"]
            found += [found_pack.record["seed"], checked["layouts"], checked["node_data"]]
    if os.path.lexists(root / "out"):
        files = sorted(each for each in (root / "out").rglob("*") if each.is_file())
        found.append([(os.fspath(each.relative_to(root)), hashlib.sha256(each.read_bytes()).hexdigest()) for each in files])
    return tuple(found)


def named(root: Path) -> set[str]:
    if not os.path.lexists(root / "g"):
        return set()
    catalog = read_catalog(root / "g")
    return {name.partition("/")[0] for record in catalog.files.values() for name in (record.name, record.sums_name)}


def leftovers(root: Path, before: Path) -> set[str]:
    """Files that nothing names, and directories of builders; what was named ``before`` is swept once nobody reads it."""
    found = set(os.listdir(root)) - {"g", "p", "drive", "in", "out"}
    if os.path.lexists(root / "drive"):
        found |= set(os.listdir(root / "drive")) - named(root) - named(before)
    if os.path.lexists(root / "g"):
        found |= set(os.listdir(root / "g")) - named(root) - named(before) - LOCKS - {"catalog.lmdb"}
        found |= set(os.listdir(root / "g" / "catalog.lmdb")) - {"data.mdb"}
    if os.path.lexists(root / "p"):
        found |= {name for name in os.listdir(root / "p") if name.endswith((".tmp", ".partial"))}
    return found


# -- scenarios -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A call that is to fail, and what is there before.

    ``commits``: the state is another one afterwards. ``goes_on``: the call does more than commit, which fails in its own way.
    ``resumes``: a full drive leaves what was finished, for the next call.
    """

    before: Callable[[Path], None]
    call: Callable[[Path], None]
    commits: bool = True
    goes_on: bool = False
    resumes: bool = False


def nothing(root: Path) -> None:
    pass


def an_old_dataset(root: Path) -> None:
    make(root / "g", "old")


def a_saved_cache(root: Path) -> None:
    make(root / "g", "old")
    save(root, 1)


def a_drive(root: Path) -> None:
    (root / "drive").mkdir()


def chunks(root: Path) -> None:
    a_drive(root)
    make(root / "g", "old", **IN_CHUNKS)


def stripes(root: Path) -> None:
    a_drive(root)
    make(root / "g", "old", **IN_CHUNKS, stripes=[root / "drive"])


def a_pack(root: Path) -> None:
    make(root / "g", "old")
    pack(root, 1, False)


def of_edges(root: Path) -> None:
    """A dataset whose edges are sorted back when they are exported."""
    make_from_edges(root / "g", "old")


def a_folder(root: Path) -> None:
    """OGB's layout of the new dataset."""
    folder = Folder(root / "in", N["new"], 5000)
    folder.edges, folder.x = arrays("new")
    folder.y = np.full((N["new"], 1), N["new"])
    folder.binary()


def a_folder_and_an_old_dataset(root: Path) -> None:
    a_folder(root)
    an_old_dataset(root)


def tables_and_an_old_dataset(root: Path) -> None:
    (root / "in").mkdir()
    n = N["new"]
    (root / "in" / "nodes.csv").write_text("name,x,y\n" + "".join(f"p{i},{n}.0,{n}\n" for i in range(n)))
    (root / "in" / "edges.csv").write_text("from,to\n" + "".join(f"p{a},p{b}\n" for a, b in arrays("new")[0].T))
    an_old_dataset(root)


SCENARIOS = {
    "create": Scenario(nothing, lambda root: make(root / "g", "new")),
    "replace": Scenario(an_old_dataset, lambda root: make(root / "g", "new", overwrite=True)),
    "edges": Scenario(nothing, lambda root: make_from_edges(root / "g", "new")),
    "edges replace": Scenario(an_old_dataset, lambda root: make_from_edges(root / "g", "new", overwrite=True)),
    "create chunks": Scenario(nothing, lambda root: make(root / "g", "new", **IN_CHUNKS)),
    "convert": Scenario(a_saved_cache, lambda root: convert(root, "chunked")),
    "convert back": Scenario(chunks, lambda root: convert(root, "csc")),
    "create stripes": Scenario(a_drive, lambda root: make(root / "g", "new", **IN_CHUNKS, stripes=[root / "drive"])),
    "replace stripes": Scenario(stripes, lambda root: make(root / "g", "new", True, **IN_CHUNKS, stripes=[root / "drive"])),
    "convert to stripes": Scenario(chunks, lambda root: convert(root, "stripes")),
    "convert stripes back": Scenario(stripes, lambda root: convert(root, "csc")),
    "open": Scenario(a_saved_cache, read, commits=False),
    "verify": Scenario(a_saved_cache, verify, commits=False),
    "save": Scenario(an_old_dataset, lambda root: save(root, 1)),
    "save again": Scenario(a_saved_cache, lambda root: save(root, 2)),
    "keep": Scenario(a_saved_cache, lambda root: keep(root, 1)),
    "add": Scenario(an_old_dataset, lambda root: change(root, "add")),
    "add again": Scenario(changed("add"), lambda root: change(root, "add again")),
    "remove": Scenario(changed("add"), lambda root: change(root, "remove")),
    "append": Scenario(an_old_dataset, lambda root: change(root, "append")),
    "append to chunks": Scenario(chunks, lambda root: change(root, "append")),
    "append to stripes": Scenario(stripes, lambda root: change(root, "append")),
    "update": Scenario(changed("add"), lambda root: change(root, "update")),
    "merge": Scenario(changed("add", "update"), lambda root: change(root, "merge")),
    "anew": Scenario(changed("add", "update", "merge"), lambda root: change(root, "anew")),
    "import": Scenario(a_folder, import_folder, resumes=True),
    "import replace": Scenario(a_folder_and_an_old_dataset, import_folder, resumes=True),
    "import tables": Scenario(tables_and_an_old_dataset, import_tables, resumes=True),
    "export": Scenario(of_edges, lambda root: export(root, "npy")),
    "export parquet": Scenario(of_edges, lambda root: export(root, "parquet")),
    "pack": Scenario(an_old_dataset, lambda root: pack(root, 1, False)),
    "pack again": Scenario(a_pack, lambda root: pack(root, 2, True)),
    "layout": Scenario(a_pack, layout, goes_on=True),
    "verify pack": Scenario(a_pack, lambda root: featstore.Pack(root / "p").verify(progress=False) and None, commits=False),
}


def fresh(template: Path, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root, symlinks=True)
    for link in root.glob("g/featstore-stripe-*"):  # as if the stripe had been made with this very link
        link.unlink()
        link.symlink_to(root / "drive" / link.name)
        (mark,) = (root / "drive" / link.name).glob("owner-*")
        mark.rename(mark.with_name(mark_of(os.fspath(link))))


@contextlib.contextmanager
def prepared(folder: str, name: str) -> Iterator[tuple[Scenario, Path, Path, tuple[Any, ...], tuple[Any, ...]]]:
    """Make what is there before a scenario; yield it, and the states before and after the call."""
    scenario, template, root = SCENARIOS[name], Path(folder) / "template", Path(folder) / "data"
    template.mkdir()
    scenario.before(template)
    old = state(template)
    fresh(template, root)
    scenario.call(root)
    new = state(root)
    assert (new != old) == scenario.commits
    assert not leftovers(root, template)
    yield scenario, template, root, old, new


def before_labels(name: str, new: Any) -> Any:
    """Return the state where a layout is in place, and its labels will come with its next loader."""
    return (*new[:-1], []) if name == "layout" else new


def is_said(name: str, operation: str, action: str) -> bool:
    """Tell whether a failing call has to be an error: not one that is gone on with, nor one that looks for what may go."""
    return action not in GOES_ON and (operation in ("write", "fsync", "rename") or (name, operation) in SAID_BY_CREATE)


def files_in(found: set[str]) -> set[str]:
    return {each for each in found if not each.startswith("task ")}


def fail_calls(folder: str, name: str, operation: str, action: str, step: int) -> None:
    """Fail every ``step``-th call of one operation in turn; in the child."""
    with prepared(folder, name) as (scenario, template, root, old, new):
        before = descriptors()
        for fault in sweep(root, operation, action, step=step):
            where = f"{name}: {operation} {fault.k}: {action}"
            fresh(template, root)
            error: BaseException | None = None
            with fault:
                try:
                    scenario.call(root)
                except (OSError, MemoryError) as caught:
                    error = caught
            assert error is not None or not fault.fired or not is_said(name, operation, action), f"{where}: swallowed"
            if error is not None:
                assert fault.fired, where
                assert isinstance(error, OSError), (where, error)
                assert error.errno == getattr(errno, action), (where, repr(error))
                assert str(error.filename).startswith(str(root)), (where, repr(error))
            found = state(root)
            if isinstance(error, CommittedError):
                assert found in (new, before_labels(name, new)), (where, found, old, new)
                assert scenario.commits
            elif error is not None:
                assert found == old or (scenario.goes_on and found == new), (where, repr(error), found, old)
            else:
                assert found == new, (where, found, new)
            left = leftovers(root, template)
            if scenario.resumes and action == "ENOSPC" and error is not None:
                left -= {entry for entry in os.listdir(root) if entry.startswith("g.tmp-")}
            if operation != "unlink":
                assert not left, (where, left, repr(error))
            error = None
            if scenario.resumes:  # several threads are at work: the process's pool has as many as were busy at once
                assert files_in(descriptors()) == files_in(before), where
            else:
                assert descriptors(before) == before, where
            if scenario.commits and found == old:
                scenario.call(root)
                assert state(root) == new, where
                if scenario.resumes and operation != "unlink":
                    assert not leftovers(root, root), where
            if os.path.lexists(root / "g"):
                keep(root, 2)  # the next writer sweeps what could not be removed
                swept = leftovers(root, root) - {entry for entry in os.listdir(root) if ".tmp-" in entry}
                assert not swept, (where, swept)


FAULTS = [
    ("open", "EMFILE"),
    ("open", "EIO"),
    ("write", "ENOSPC"),
    ("fsync", "EIO"),
    ("fsync", "ENOSPC"),
    ("rename", "EIO"),
    ("rename", "ENOSPC"),
    ("read", "EIO"),
    ("close", "EIO"),
    ("flock", "EIO"),
    ("mkdir", "ENOSPC"),
    ("unlink", "EIO"),
]
GOES_ON, SAID_BY_CREATE = ("short", "EINTR"), {("create", "open"), ("create", "read")}
STRIPED = ("create stripes", "replace stripes", "convert to stripes", "convert stripes back")
READS_ONLY, IN_PLACE = ("open", "verify", "verify pack"), ("save", "save again", "keep", "add", "update")
CHANGES = ("add again", "remove", "append", "append to chunks", "append to stripes", "merge", "anew")
NEVER = {  # operations that a scenario has none of
    **{name: {"write", "fsync", "rename", "mkdir", "unlink"} for name in READS_ONLY},
    **{name: {"mkdir", "unlink"} for name in IN_PLACE},
    **{name: {"mkdir"} for name in CHANGES},
    **{name: {"mkdir"} for name in ("convert", "convert back", "convert stripes back")},
    # Where nothing was before, nothing is removed.
    **{name: {"unlink"} for name in ("create", "create chunks", "create stripes", "edges", "pack", "export", "export parquet")},
}
CASES = [(name, *fault) for name in SCENARIOS for fault in FAULTS if fault[0] not in NEVER.get(name, ())]
CASES += [(name, "write", action) for name in ("create", "edges replace") for action in ("EIO", "EDQUOT", "EFBIG", *GOES_ON)]


@pytest.mark.stress
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_failing_call(case: tuple[str, str, str], tmp_path: Path) -> None:
    run_in_fork(fail_calls, str(tmp_path), *case, 1, timeout_s=1800)


def fail_some(folder: str, cases: list[list[Any]]) -> None:
    """A sample, in one child."""
    for number, (name, operation, action, step) in enumerate(cases):
        where = Path(folder) / str(number)
        where.mkdir()
        fail_calls(str(where), name, operation, action, step)


SAMPLE = [
    ("save", "rename", "ENOSPC", 1),
    ("save again", "open", "EMFILE", 47),
    ("replace", "rename", "EIO", 19),
    ("replace", "flock", "EIO", 4),
    ("create", "open", "EMFILE", 23),
    ("create", "fsync", "EIO", 9),
    ("create", "write", "EFBIG", 17),
    ("edges replace", "write", "short", 17),
    ("create chunks", "write", "ENOSPC", 29),
    ("convert", "fsync", "EIO", 11),
    ("convert back", "rename", "ENOSPC", 3),
    ("create stripes", "fsync", "EIO", 17),
    ("replace stripes", "unlink", "EIO", 17),
    ("convert to stripes", "mkdir", "ENOSPC", 1),
    ("keep", "fsync", "EIO", 1),
    ("add", "write", "ENOSPC", 2),
    ("append", "write", "ENOSPC", 7),
    ("append to chunks", "write", "ENOSPC", 5),
    ("append to stripes", "rename", "EIO", 3),
    ("update", "write", "ENOSPC", 3),
    ("update", "rename", "EIO", 2),
    ("merge", "fsync", "EIO", 3),
    ("anew", "write", "ENOSPC", 3),
    ("import replace", "flock", "EIO", 8),
    ("import tables", "close", "EIO", 97),
    ("export", "fsync", "EIO", 3),
    ("export parquet", "write", "ENOSPC", 9),
    ("pack again", "fsync", "EIO", 5),
    ("layout", "rename", "EIO", 3),
]


def test_some_failing_calls(tmp_path: Path) -> None:
    run_in_fork(fail_some, str(tmp_path), SAMPLE)


# -- after the commit ------------------------------------------------------------------------------------------------------------


def after_saves_renames(folder: str) -> None:
    for operation, action in (("open", "EMFILE"), ("open", "EIO"), ("fsync", "EIO"), ("fsync", "ENOSPC")):
        root = Path(folder) / f"{operation}-{action}"
        root.mkdir()
        after_a_saves_rename(root, operation, action)


def after_a_saves_rename(root: Path, operation: str, action: str) -> None:
    """Fail what follows the catalog's rename: the directory's open or fsync; in the child."""
    make(root / "g", "old")
    with opened(root) as g:
        real = os.rename

        def rename(source: str, target: str) -> None:
            real(source, target)
            if str(target).endswith("data.mdb"):
                fault.__enter__()

        fault = Fault(root, operation, action)
        os.rename = rename
        try:
            with pytest.raises(CommittedError, match="is in place") as caught:
                g.cache_neighbors(CACHE_BYTES, "random", seed=1, save=True)
        finally:
            os.rename = real
            fault.__exit__(None, None, None)
        assert fault.fired == 1
        assert caught.value.errno == getattr(errno, action)
        assert caught.value.filename == str(root / "g" / "catalog.lmdb")
        assert caught.value.path == str(root / "g" / "catalog.lmdb" / "data.mdb")
        assert g.neighbor_cache is not None
    assert not leftovers(root, root)
    catalog = read_catalog(root / "g")
    assert catalog.extra["cache/neighbors"]["seed"] == 1
    assert state(root)[0] == "old"


def test_what_follows_the_catalogs_rename_removes_nothing_that_it_names(tmp_path: Path) -> None:
    run_in_fork(after_saves_renames, str(tmp_path))


INTERRUPTED = [
    "save",
    "save again",
    "keep",
    "create",
    "replace",
    "pack again",
    "layout",
    *reversed(STRIPED),
    "update",
    "merge",
    "add",
]


@pytest.mark.parametrize(
    ("name", "step"),
    [(name, 3) for name in INTERRUPTED[::3]] + [pytest.param(name, 1, marks=pytest.mark.stress) for name in INTERRUPTED],
)
def test_ctrl_c_after_any_step_leaves_the_old_or_the_new(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rename, fsync and removal in turn, or every third of them, is done, and then Ctrl-C comes."""
    with prepared(str(tmp_path), name) as (scenario, template, root, old, new):
        k, seen, fired = 1 - step, set(), True
        while fired:
            k, count, fired = k + step, 0, False
            fresh(template, root)

            def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **options: Any) -> Any:
                    nonlocal count, fired
                    result = real(*arguments, **options)
                    count += 1
                    if count == k:
                        fired = True
                        raise KeyboardInterrupt
                    return result

                return call

            with monkeypatch.context() as patch:
                for each in ("rename", "fsync", "unlink"):
                    patch.setattr(os, each, wrap(getattr(os, each)))
                with contextlib.suppress(KeyboardInterrupt):
                    scenario.call(root)
            found = state(root)
            assert found in (old, new, before_labels(name, new)), (k, found)
            seen.add(found == new)
        assert found == new
        assert seen == {False, True}


def test_an_error_after_create_says_that_the_dataset_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    with monkeypatch.context() as patch:
        patch.setattr("featstore.graph.opendataset.open_files", refuse)
        with pytest.raises(CommittedError, match="complete and in place, but opening it failed: Too many open files") as caught:
            make(tmp_path / "g", "new")
    error = caught.value
    assert (error.errno, error.filename, error.path) == (errno.EMFILE, str(tmp_path / "g"), str(tmp_path / "g"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.errno, copy.path) == (str(error), error.errno, error.path)
    assert state(tmp_path)[0] == "new"


def test_a_budget_that_cannot_open_what_was_made_says_that_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    x = np.zeros((2, 2))
    with pytest.raises(featstore.BudgetError, match="complete and in place, but opening it failed") as caught:
        featstore.OutOfCoreGraph.create(tmp_path / "g", [0, 0, 0], [], {"x": x}, memory=1000, progress=False)
    assert caught.value.needed is not None
    featstore.open(tmp_path / "g", memory="8MiB").close()
