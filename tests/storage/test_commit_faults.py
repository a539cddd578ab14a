"""Failures after a commit: the error says that the new state is in place. Other failing calls: :mod:`tests.campaigns`."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore.errors import CommittedError
from featstore.storage.catalog import read_catalog
from featstore.testing.faults import Fault
from tests.campaigns.operations import CACHE_BYTES, leftovers, make, opened, state
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")


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


def test_an_error_after_create_says_that_the_dataset_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    with monkeypatch.context() as patch:
        patch.setattr("featstore.graph.dataset.open_files", refuse)
        with pytest.raises(CommittedError, match="complete and in place, but opening it failed: Too many open files") as caught:
            make(tmp_path / "g", "new")
    error = caught.value
    assert (error.errno, error.filename, error.path) == (errno.EMFILE, str(tmp_path / "g"), str(tmp_path / "g"))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.errno, copy.path) == (str(error), error.errno, error.path)
    assert state(tmp_path)[0] == "new"


def test_too_little_memory_to_open_what_was_made_says_that_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("featstore.graph.dataset.open_files", refuse)
        with pytest.raises(CommittedError, match="in place, but opening it failed: Cannot allocate memory") as caught:
            make(tmp_path / "g", "new")
    assert (caught.value.errno, caught.value.path) == (errno.ENOMEM, str(tmp_path / "g"))
    assert state(tmp_path)[0] == "new"


def test_a_budget_that_cannot_open_what_was_made_says_that_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    x = np.zeros((2, 2))
    with pytest.raises(featstore.BudgetError, match="complete and in place, but opening it failed") as caught:
        featstore.OutOfCoreGraph.create(tmp_path / "g", [0, 0, 0], [], {"x": x}, memory=1000, progress=False)
    assert caught.value.needed is not None
    featstore.open(tmp_path / "g", memory="8MiB").close()
