"""Writers that lack descriptors, and two writers at once: the old dataset or the new one is there, whole."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import BusyError, CommittedError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage.catalog import read_catalog
from featstore.storage.update import Update
from tests.support.making import create
from tests.support.programs import run_beside, run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

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
