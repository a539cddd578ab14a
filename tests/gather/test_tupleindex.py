"""Indices of several axes: NumPy's values, shape and dtype for every index that NumPy takes, or an error before any read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import featstore
from featstore.errors import BudgetError, ClosedError
from featstore.gather import tupleindex

N = 23
ROWS = {"one": (), "wide": (6,), "matrix": (2, 3), "cube": (2, 1, 3)}
LEADS = [(), (1,), (4,), (3, 1), (3, 4), (1, 4), (0,), (2, 1, 1)]  # several of these broadcast together


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.integers(-999, 999, (N, *row)).astype(np.float32) for name, row in ROWS.items()}


@pytest.fixture(scope="module", params=["whole", "some rows at a time"])
def graph(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray]
) -> Iterator[featstore.OutOfCoreGraph]:
    path = tmp_path_factory.mktemp("data") / "g"
    features: dict[str, Any] = {**arrays, "short": torch.from_numpy(arrays["matrix"]).to(torch.bfloat16)}
    none = np.empty(0, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "whole":
            patch.setattr(tupleindex, "STEP_BYTES", 100)
        with featstore.OutOfCoreGraph.create(path, np.zeros(N + 1, np.int64), none, features, progress=False, memory="32MB") as g:
            yield g


@st.composite
def indices(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draw a tuple that indexes some of the axes of ``shape``; arrays may fail to broadcast, and masks to fit."""
    parts: list[Any] = []
    axis = 0
    n_axes = draw(st.integers(0, len(shape)))
    while axis < n_axes:
        n = shape[axis]
        kind = draw(st.sampled_from(["int", "slice", "array", "array", "list", "tensor", "mask", "wide mask", "numpy int"]))
        ids = hnp.arrays(np.int64, st.sampled_from(LEADS), elements=st.integers(-n, n - 1))
        width = 1
        if kind in ("int", "numpy int"):
            number = draw(st.integers(-n, n - 1))
            parts.append(number if kind == "int" else draw(st.sampled_from([np.int16(number), np.array(number)])))
        elif kind == "slice":
            parts.append(draw(st.slices(n)))
        elif kind == "array":
            parts.append(draw(ids).astype(draw(st.sampled_from([np.int64, np.int8, ">i4"]))))
        elif kind == "list":
            parts.append(draw(ids).tolist())
        elif kind == "tensor":
            parts.append(torch.from_numpy(draw(ids)))
        else:
            width = 1 if kind == "mask" else draw(st.integers(1, n_axes - axis))
            parts.append(draw(hnp.arrays(bool, shape[axis : axis + width])))
        axis += width
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), Ellipsis)
    for _ in range(draw(st.integers(0, 2))):
        parts.insert(draw(st.integers(0, len(parts))), None)
    return tuple(parts)


def for_numpy(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Write an index as NumPy takes it: tensors as arrays, and empty lists as integers."""
    found = []
    for part in index:
        if isinstance(part, torch.Tensor):
            part = part.numpy()
        elif isinstance(part, list):
            part = np.asarray(part, np.int64) if np.size(part) == 0 else np.asarray(part)
        found.append(part)
    return tuple(found)


@settings(max_examples=200)
@given(data=st.data(), name=st.sampled_from([*ROWS]))
def test_as_numpy_takes_it(
    graph: featstore.OutOfCoreGraph, arrays: dict[str, np.ndarray], data: st.DataObject, name: str
) -> None:
    array, store = arrays[name], graph.features[name]
    index = data.draw(indices(array.shape))
    try:
        expected = np.asarray(array[for_numpy(index)])
    except IndexError:
        expected = None
    before = store.stats()["reads"]
    try:
        found = store[index]
    except IndexError:  # of numbers, NumPy checks no positions if it takes none
        assert expected is None or not expected.size
        assert store.stats()["reads"] == before
        return
    assert expected is not None
    assert (tuple(found.shape), found.dtype) == (expected.shape, torch.float32)
    assert np.array_equal(found.numpy(), expected)


@settings(max_examples=60)
@given(data=st.data())
def test_of_a_dtype_that_numpy_lacks(graph: featstore.OutOfCoreGraph, arrays: dict[str, np.ndarray], data: st.DataObject) -> None:
    index = data.draw(indices((N, 2, 3)))
    try:
        expected = np.asarray(arrays["matrix"][for_numpy(index)])
    except IndexError:
        return
    if not expected.size:
        return
    found = graph.features["short"][index]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.tensor(np.array(expected, order="C")).to(torch.bfloat16))


def test_lists_are_indices_as_numpys_are(graph: featstore.OutOfCoreGraph, arrays: dict[str, np.ndarray]) -> None:
    array, store = arrays["wide"], graph.features["wide"]
    lists: list[Any] = [[], [[]], ([[]], 0), [[True] * 6] * N, [[1, 2], [3, -1]], ([1, 2], [0, 3])]
    for index in lists:
        expected = array[index]
        found = store[index]
        assert (tuple(found.shape), found.tolist()) == (expected.shape, expected.tolist()), index


@pytest.mark.parametrize("row", [2**70, -(2**70)])
def test_a_row_beyond_64_bits(graph: featstore.OutOfCoreGraph, row: int) -> None:
    for index in (row, (row, 0), (row, slice(2))):
        with pytest.raises(IndexError, match=str(row)):
            graph.features["wide"][index]


@given(mask=hnp.arrays(bool, (N, 6)), as_tensor=st.booleans())
def test_a_mask_of_numbers(graph: featstore.OutOfCoreGraph, arrays: dict[str, np.ndarray], mask: Any, as_tensor: bool) -> None:
    found = graph.features["wide"][torch.from_numpy(mask) if as_tensor else mask]
    assert np.array_equal(found.numpy(), arrays["wide"][mask])


def test_a_new_axis_alone(graph: featstore.OutOfCoreGraph, arrays: dict[str, np.ndarray]) -> None:
    assert np.array_equal(graph.features["wide"][None].numpy(), arrays["wide"][None])


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ((0, 6), IndexError, "6 is out of range for axis 1, which has 6 places"),
        ((slice(None), [0, -7]), IndexError, "-7 is out of range for axis 1"),
        (([0, N], 3), IndexError, f"row {N} at position 1"),
        ((N, [3]), IndexError, f"row {N}"),
        (([0, 1], [0, 1, 2]), IndexError, r"\(2,\), \(3,\) do not broadcast"),
        ((slice(None), np.zeros(5, bool)), IndexError, r"mask must have shape \(6,\)"),
        (np.zeros((N, 5), bool), IndexError, rf"mask must have shape \({N}, 6\)"),
        ((True, 0), IndexError, "a single truth value is no mask"),
        ((torch.tensor(True), 0), IndexError, "a single truth value is no mask"),
        ((0, 1.5), TypeError, "indexed by integers"),
        ((0, "a"), TypeError, "indexed by integers"),
        ((0, torch.tensor([1], dtype=torch.uint8)), TypeError, "mask or ids"),
        ((0, [[1], [2, 3]]), TypeError, "not an index array"),
        ((..., 0, ...), IndexError, "one ellipsis"),
        ((0, 0, 0), IndexError, "3 axes are indexed, and there are 2"),
        ((0, np.zeros((6, 2), bool)), IndexError, "3 axes are indexed, and there are 2"),
    ],
)
def test_what_is_no_index(graph: featstore.OutOfCoreGraph, index: Any, error: type[Exception], words: str) -> None:
    store = graph.features["wide"]
    before = store.stats()["reads"]
    with pytest.raises(error, match=words):
        store[index]
    assert store.stats()["reads"] == before


@pytest.fixture
def whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of steps as it is outside of tests, whatever the graph of the module has."""
    monkeypatch.setattr(tupleindex, "STEP_BYTES", 8 << 20)


def made(path: Path, values: np.ndarray, memory: str | int) -> featstore.OutOfCoreGraph:
    featstore.create(path, values, progress=False).close()
    return featstore.open(path, memory=memory)


@pytest.mark.usefixtures("whole_steps")
def test_a_column_is_read_within_little_memory(tmp_path: Path) -> None:
    values = np.arange(16_384 * 1024, dtype=np.float32).reshape(-1, 1024)  # 64 MiB
    with made(tmp_path / "g", values, "24MiB") as g:
        x = g["x"]
        assert np.array_equal(x[:, 7].numpy(), values[:, 7])
        assert np.array_equal(x[::-1, 1020:].numpy(), values[::-1, 1020:])
        ids = np.random.default_rng(0).permutation(len(values))
        assert np.array_equal(x[ids, -1].numpy(), values[ids, -1])
        assert np.array_equal(x[ids, ids % 1024].numpy(), values[ids, ids % 1024])
        assert g.budget.peak <= 24 << 20


@pytest.mark.usefixtures("whole_steps")
def test_rows_that_places_share_are_read_once(tmp_path: Path) -> None:
    values = np.arange(512 * 1024, dtype=np.float32).reshape(-1, 1024)  # a row a page
    with made(tmp_path / "g", values, "24MiB") as g:
        x = g["x"]
        ids, columns = np.arange(0, 200, 10), np.arange(1024)
        assert np.array_equal(x[ids[:, None], columns].numpy(), values[ids[:, None], columns])
        assert x.stats()["rows_loaded"] == len(ids)


@pytest.mark.usefixtures("whole_steps")
def test_the_error_names_memory_that_suffices(tmp_path: Path) -> None:
    values = np.arange(16_384 * 1024, dtype=np.float32).reshape(-1, 1024)
    with made(tmp_path / "g", values, "24MiB") as g, pytest.raises(BudgetError) as refused:
        g["x"][:, :600]
    assert refused.value.needed is not None
    with featstore.open(tmp_path / "g", memory=refused.value.needed) as g:
        assert np.array_equal(g["x"][:, :600].numpy(), values[:, :600])


def test_a_closed_store_is_refused(tmp_path: Path) -> None:
    with made(tmp_path / "g", np.eye(4, dtype=np.float32), "8MiB") as g:
        x = g["x"]
    for index in ((slice(None), 0), (slice(0, 0), 0), ([0], [1])):
        with pytest.raises(ClosedError):
            x[index]
