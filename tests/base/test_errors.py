"""Exceptions and warnings of the library."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore.errors import FeatstoreWarning, warn


@contextmanager
def managed() -> Iterator[None]:
    """Warn within a context manager, as code of the library does."""
    warn("managed", FeatstoreWarning)
    yield


def test_a_warning_names_the_line_of_the_user(tmp_path: Path) -> None:
    """Of calls that are any number of frames deep, so that it is shown, and filtered, where it can be mended."""
    x = np.ones((9, 2), np.float32)
    featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", np.zeros((2, 1), int), 9, {"x": x}, progress=False).close()
    with featstore.open(tmp_path / "g", memory="8MiB") as g, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = featstore.NeighborSampler(g, [2])
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        featstore.Loader(g, sampler, np.arange(2), batch_size=3, drop_last=True).close()
        featstore.RandomBatches(np.arange(2), 3, drop_last=True)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line), (__file__, line + 1)]
    assert all(each.category is FeatstoreWarning for each in caught)


def test_a_warning_without_code_of_the_user_is_given_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys._getframe().f_globals, "__name__", "featstore.tests")
    with pytest.warns(FeatstoreWarning, match="managed") as caught, managed():
        pass
    assert not caught[0].filename.endswith("contextlib.py")
