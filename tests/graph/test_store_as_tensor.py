"""A feature store where code wants a tensor: NumPy's forms of an index, torch's functions that make tensors, its datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, StackDataset

import featstore

N = 301
OF_ROWS = [
    3,
    -1,
    np.array(4),
    slice(None),
    slice(5, 40, 3),
    slice(None, None, -1),
    [1, -2, 1],
    np.array([[2, 0]]),
    np.arange(N) < 9,
]
WHOLE = [slice(None), slice(0, None), slice(-50, 50), slice(None, None, 1)]


def made(path: Path, values: torch.Tensor) -> featstore.OutOfCoreGraph:
    return featstore.OutOfCoreGraph.create(
        path, np.zeros(N + 1, np.int64), np.empty(0, np.int64), {"x": values}, progress=False, memory="16MB"
    )


def values_of(*row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(-99, 99, (N, *row))).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("row", [(), (6,), (2, 3)], ids=str)
def test_other_axes_taken_whole_as_numpy_takes_them(tmp_path: Path, row: tuple[int, ...]) -> None:
    values = values_of(*row)
    array = values.numpy()
    with made(tmp_path / "g", values) as g:
        store = g.features["x"]
        forms = [(), ..., (...,)]
        for index in OF_ROWS:
            forms += [index, (index,), (index, ...)]
            for n in range(1, len(row) + 1):
                forms += [(index, *WHOLE[:n]), (index, ..., *WHOLE[:n]), (index, *WHOLE[:n], ...)]
            forms += [(..., index, *WHOLE[: len(row)])]
        forms += [(..., *WHOLE[: n + 1]) for n in range(len(row) + 1)]
        for form in forms:
            assert same(store[form], torch.from_numpy(np.array(array[form]))), form


@pytest.mark.parametrize("row", [(), (6,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_a_tensor_of_a_store_is_one_read(tmp_path: Path, row: tuple[int, ...], dtype: torch.dtype) -> None:
    values = values_of(*row, dtype=dtype)
    with made(tmp_path / "g", values) as g:
        store = g.features["x"]
        for n, function in enumerate((torch.as_tensor, torch.tensor, torch.asarray, torch.from_dlpack)):
            found = function(store)
            assert same(found, values)
            assert store.stats()["takes"] == n + 1
        assert torch.as_tensor(store, dtype=torch.float64).dtype == torch.float64
        if dtype != torch.bfloat16:
            assert np.array_equal(np.from_dlpack(store), values.numpy())
        with pytest.raises(BufferError, match="always a copy"):
            store.__dlpack__(copy=False)


def test_a_stack_of_datasets_reads_once_a_batch(tmp_path: Path) -> None:
    values = values_of(7)
    with made(tmp_path / "g", values) as g:
        store, y = g.features["x"], torch.arange(N)
        loader = DataLoader(StackDataset(store, y), batch_size=50, shuffle=True)
        for x, ids in loader:
            assert same(x, values[ids])
        assert store.stats()["takes"] == len(loader)
