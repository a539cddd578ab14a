"""The memory of opening a dataset: the error of too little names what suffices, at the first attempt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.config import Options
from featstore.graph.snapshot import check_memory
from featstore.storage import pagedsums, rowfile
from featstore.storage.pagedsums import PagedSums, divisor_for, pointer_bytes, table_bytes

PAGE = 4096
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "no features": {},
    "one narrow": {"x": (40_000,)},
    "rows of several sizes": {"x": (40_000, 128), "h": (40_000, 7), "wide": (40_000, 300)},
    "rows of a megabyte": {"x": (8, 1 << 20), "h": (8, 3)},
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    for name, shapes in SHAPES.items():
        n = next((shape[0] for shape in shapes.values()), 3)
        rows = {key: np.arange(n, dtype=np.uint8).reshape(-1, *[1] * (len(shape) - 1)) for key, shape in shapes.items()}
        features = {key: np.broadcast_to(rows[key], shape) for key, shape in shapes.items()}
        data = {"a": np.zeros(40_000, np.uint8)}  # many narrow rows, which come first
        featstore.OutOfCoreGraph.create(folder / name, np.zeros(n + 1, np.int64), [], features, data).close()
    return {name: folder / name for name in SHAPES}


@pytest.mark.parametrize("verify", ["always", "open", "off"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_error_names_what_suffices(datasets, shape, paged, verify, monkeypatch) -> None:
    if paged:  # as tables of files that are thousands of times larger
        monkeypatch.setattr(pagedsums, "ALWAYS_KEPT_BYTES", 0)
        monkeypatch.setattr(pagedsums, "DIVISOR", 4000)
    with pytest.raises(featstore.BudgetError, match="is too small for opening") as caught:
        featstore.open(datasets[shape], memory=1, verify=verify)
    needed = caught.value.needed
    assert needed is not None
    with featstore.open(datasets[shape], memory=needed, verify=verify) as g:
        for store in g.features.values():
            if store.row_bytes <= PAGE:
                assert torch.equal(store[[-1]], torch.full((1, *store.shape[1:]), (len(store) - 1) % 256, dtype=torch.uint8))
        assert g.budget.peak <= needed


@pytest.mark.parametrize("width", [512, 5 << 20])
def test_many_tables_share_a_quarter(width: int) -> None:
    """Of 200 MB each: what one more adds to the memory that suffices is what it caches at the least."""
    needed = []
    for n in (1, 5, 19, 20, 100):
        files: list[Any] = [
            SimpleNamespace(kind="feature", patches=(), n_sums_bytes=200 << 20, layout=SimpleNamespace(row_bytes=width))
        ] * n
        with pytest.raises(featstore.BudgetError) as caught:
            check_memory("g", files, Options.resolve(memory=1))
        needed.append(caught.value.needed or 0)
        check_memory("g", files, Options.resolve(memory=needed[-1]))
        total = 1 << 30
        tables = n * table_bytes(200 << 20, 512, total, divisor_for([200 << 20] * n))
        pointers = n * pointer_bytes((200 << 20) // PAGE)
        assert tables <= total // 4 * (PAGE + 16) // PAGE + n * PagedSums.held_bytes(512, 0) + pointers
    assert needed == sorted(needed)
    assert needed[-1] < (64 << 20) + pointers
    assert needed[3] - needed[2] < 4 << 20


def test_a_dataset_of_many_features_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose tables are all too large to keep."""
    monkeypatch.setattr(pagedsums, "ALWAYS_KEPT_BYTES", 0)
    monkeypatch.setattr(pagedsums, "DIVISOR", 20)
    features = {f"x{k}": np.full((200, 4096), k, np.uint8) for k in range(24)}
    with featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(201, np.int64), [], features, progress=False) as g:
        pass
    monkeypatch.setattr(pagedsums, "is_kept", lambda table, total, share: False)
    monkeypatch.setattr(rowfile, "is_kept", lambda table, total, share: False)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert g.memory_report()["checksum tables"] <= 16 << 20
        for k in range(24):
            assert bool((g.features[f"x{k}"][[0, 199]] == k).all())
