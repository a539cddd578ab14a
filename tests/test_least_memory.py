"""The least memory of an open dataset: the error of too little names it, at the first attempt."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.storage import pagedsums
from featstore.storage.leastmemory import least_memory
from featstore.storage.pagedsums import PagedSums, kept_from, share_of, table_bytes
from featstore.storage.reader import least_queue_bytes

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
def test_the_first_error_names_what_suffices(
    datasets: dict[str, Path], shape: str, paged: bool, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if paged:  # as tables of files that are thousands of times larger
        monkeypatch.setattr(pagedsums, "ALWAYS_KEPT_BYTES", 0)
        monkeypatch.setattr(pagedsums, "SHARE", 4000)
    with pytest.raises(featstore.BudgetError, match="is too small for opening") as caught:
        featstore.open(datasets[shape], memory=1, verify=verify)
    needed = caught.value.needed
    assert needed is not None
    with featstore.open(datasets[shape], memory=needed, verify=verify) as g:
        for store in g.features.values():
            if store.row_bytes <= PAGE:
                assert torch.equal(store[[-1]], torch.full((1, *store.shape[1:]), (len(store) - 1) % 256, dtype=torch.uint8))
        assert g.budget.peak <= needed
    for less in (needed - 1, needed - PAGE):
        with pytest.raises(featstore.BudgetError) as caught:
            featstore.open(datasets[shape], memory=less, verify=verify)
        assert caught.value.needed == needed


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([1, 512, 5 << 20])), max_size=25),
    st.integers(0, 4 << 20),
)
@settings(max_examples=60)
def test_it_is_the_least(tables: list[tuple[int, int]], total: int) -> None:
    """What is needed is constant between the points at which a queue grows, a cache of pages grows, or a table is kept whole."""
    files: list[Any] = [SimpleNamespace(n_sums_bytes=PAGE * n, layout=SimpleNamespace(row_bytes=width)) for n, width in tables]

    def needed(total: int) -> int:
        return least_queue_bytes(total) + sum(table_bytes(PAGE * n, width, total, share) for n, width in tables)

    share = share_of(PAGE * n for n, _ in tables)
    steps = {kept_from(PAGE * n, share) for n, _ in tables}
    last = max([*steps, total]) + needed(1 << 40)
    points = sorted({total, last, *steps, *range(0, last, 32 * PAGE), *range(0, last, share * PAGE)})
    spans = pairwise(point for point in points if point >= total)
    expected = next(max(first, needed(first)) for first, end in spans if needed(first) < end)
    assert least_memory(files, "always", total) == expected


@pytest.mark.parametrize("width", [512, 5 << 20])
def test_many_tables_share_a_quarter(width: int) -> None:
    """Of 200 MB each: with one more the least memory grows by the pages that it caches at the least."""
    needed = []
    for n in (1, 5, 19, 20, 100):
        files: list[Any] = [SimpleNamespace(n_sums_bytes=200 << 20, layout=SimpleNamespace(row_bytes=width))] * n
        needed.append(least_memory(files, "always", 0))
        total = 1 << 30
        tables = n * table_bytes(200 << 20, 512, total, share_of([200 << 20] * n))
        assert tables <= total // 4 * (PAGE + 16) // PAGE + n * PagedSums.held_bytes(512, 0)
    assert needed == sorted(needed)
    assert needed[-1] < 64 << 20
    assert needed[3] - needed[2] < 4 << 20


def test_a_dataset_of_many_features_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose tables are all too large to keep."""
    monkeypatch.setattr(pagedsums, "ALWAYS_KEPT_BYTES", 0)
    monkeypatch.setattr(pagedsums, "SHARE", 20)
    features = {f"x{k}": np.full((200, 4096), k, np.uint8) for k in range(24)}
    with featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(201, np.int64), [], features, progress=False) as g:
        pass
    monkeypatch.setattr(pagedsums, "kept_from", lambda table, share: 1 << 62)
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert g.memory_report()["checksum tables"] <= 16 << 20
        for k in range(24):
            assert bool((g.features[f"x{k}"][[0, 199]] == k).all())
