"""Features aggregated out of core: the bits of a product in memory, blocks, commits, going on after kills, faults, memory."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

import featstore
from featstore._core import aggregate as core
from featstore.creation import steps
from featstore.errors import BudgetError, CorruptionError
from featstore.graph import passes
from featstore.graph.derive import making
from featstore.testing.faults import flipped
from tests.support.kernel_counts import kernel_bytes
from tests.support.sampled import covering
from tests.support.whole_graph import aggregated, skewed_graph

N = 600
OPS = ["sum", "mean", "gcn"]


def features_of(n: int, seed: int = 0) -> dict[str, Any]:
    """Return a feature of each kind of dtype, of several widths and shapes."""
    rng = np.random.default_rng(seed)
    return {
        "float32": rng.standard_normal((n, 17)).astype(np.float32),
        "float64": rng.standard_normal((n, 3, 2)),
        "float16": rng.standard_normal((n, 9)).astype(np.float16),
        "bfloat16": torch.from_numpy(rng.standard_normal((n, 5))).to(torch.bfloat16),
        "int64": rng.integers(-(2**40), 2**40, (n, 3)),
        "int32": rng.integers(-99, 99, (n, 5)).astype(np.int32),
        "uint8": rng.integers(0, 256, (n, 1)).astype(np.uint8),
        "bool": rng.random((n, 4)) < 0.5,
        "vector": rng.standard_normal(n),
    }


def as_numpy(values: Any) -> np.ndarray[Any, Any]:
    """Return an array of the same numbers."""
    return values.to(torch.float64).numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, dict[str, Any]]:
    path = tmp_path_factory.mktemp("aggregate") / "g"
    indptr, indices = skewed_graph(N, 12, [3, N - 1], 5_000)
    features = features_of(N)
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, progress=False).close()
    return path, indptr, indices, features


def copy_of(path: Path, folder: Path) -> Path:
    shutil.copytree(path, folder / "g")
    return folder / "g"


# --- sums -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "memory"), covering(OPS, [None, "2400KiB"]))
def test_every_dtype_has_the_bits_of_a_product_in_memory(made: Any, tmp_path: Path, op: str, memory: str | None) -> None:
    path, indptr, indices, features = made
    with featstore.open(copy_of(path, tmp_path), memory="32MiB") as g:
        for name, x in features.items():
            store = g.aggregate(name, op, name="out", dtype="float64", memory=memory, overwrite=True, progress=False)
            expected = aggregated(indptr, indices, as_numpy(x), op)
            assert tuple(store.shape) == expected.shape
            assert store[:].numpy().tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("op", OPS)
def test_the_reference_has_the_bits_of_scipys_product(made: Any, op: str) -> None:
    """Of the sorted adjacency, repeated edges counted; with the scales of ``"gcn"`` before and behind."""
    _, indptr, indices, features = made
    matrix = csr_array((np.ones(len(indices)), indices, indptr), shape=(N, N))
    matrix.sort_indices()
    for name in ("float32", "float64", "int64"):
        x = as_numpy(features[name]).reshape(N, -1).astype(np.float64)
        if op == "gcn":
            dst = np.repeat(np.arange(N), np.diff(indptr))
            is_other = indices != dst
            both = np.concatenate([dst[is_other], np.arange(N)]), np.concatenate([indices[is_other], np.arange(N)])
            order = np.lexsort((both[1], both[0]))
            ends = np.concatenate([[0], np.cumsum(np.bincount(both[0], minlength=N))])
            others = csr_array((np.ones(len(order)), both[1][order], ends), shape=(N, N))
            scale = (1 / np.sqrt(np.diff(ends)))[:, None]
            expected = (others @ (x * scale)) * scale
        else:
            expected = matrix @ x
            if op == "mean":
                expected /= np.maximum(np.diff(indptr), 1)[:, None]
        assert aggregated(indptr, indices, x, op).tobytes() == expected.tobytes(), name


def test_the_dtype_is_the_features_own_or_float64(made: Any, tmp_path: Path) -> None:
    path, indptr, indices, features = made
    with featstore.open(copy_of(path, tmp_path), memory="32MiB") as g:
        for name, x in features.items():
            store = g.aggregate(name, progress=False)
            assert store.name == f"{name}_mean"
            stored = g.features[name].dtype
            assert store.dtype == (stored if stored.is_floating_point else torch.float64)
            expected = torch.from_numpy(aggregated(indptr, indices, as_numpy(x), "mean")).to(store.dtype)
            assert torch.equal(store[:], expected)
        assert g.aggregate("uint8", name="half", dtype=torch.float16, progress=False).dtype == torch.float16
        with pytest.raises(TypeError, match="floating-point"):
            g.aggregate("uint8", name="no", dtype="int64", progress=False)


def test_hops_are_repeated_in_float64(made: Any, tmp_path: Path) -> None:
    path, indptr, indices, features = made
    expected = features["float32"]
    for _ in range(3):
        expected = aggregated(indptr, indices, expected, "gcn")
    with featstore.open(copy_of(path, tmp_path), memory="32MiB") as g:
        store = g.aggregate("float32", "gcn", hops=3, progress=False)
        assert store.name == "float32_gcn3"
        assert torch.equal(store[:], torch.from_numpy(expected).to(torch.float32))
        assert not [name for name in os.listdir(g.path) if name.startswith("making")]
        g.verify(progress=False)


@settings(max_examples=15)
@given(
    n=st.integers(0, 40),
    mean=st.sampled_from([0, 1, 6]),
    width=st.sampled_from([1, 2, 7, 16, 33]),
    op=st.sampled_from(OPS),
    seed=st.integers(0, 5),
)
def test_any_graph(tmp_path_factory: pytest.TempPathFactory, n: int, mean: int, width: int, op: str, seed: int) -> None:
    path = tmp_path_factory.mktemp("any") / "g"
    indptr, indices = skewed_graph(n, mean, [0] if n else [], 9, seed)
    x = np.random.default_rng(seed).standard_normal((n, width))
    with featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False, memory="16MiB") as g:
        found = g.aggregate("x", op, progress=False)[:].numpy()
    assert found.tobytes() == aggregated(indptr, indices, x, op).tobytes()


def test_all_vectors_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    n, width, parts = 50, 37, np.array([0, 50])
    indptr, indices = skewed_graph(n, 9)
    for rows_dtype, sums_dtype in ((np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64)):
        rows, found = rng.standard_normal((n, width)).astype(rows_dtype), []
        for level in range(core.LEVELS):
            sums = np.zeros((n, width), sums_dtype)
            ids, cursor, ends, nexts = indices.view(np.uint8), indptr[:-1].copy(), indptr[1:].copy(), np.empty(n, np.int64)
            core.begin(ids, 8, cursor, ends, nexts)
            for low in range(0, n, 20):
                part = rows[low : low + 20].reshape(-1)
                args = ids, 8, cursor, ends, nexts, sums.reshape(-1).view(np.uint8), sums.itemsize, None, -1, parts, 1, level
                assert core.accumulate(part.view(np.uint8), rows.itemsize, low, width, *args) == -1
            found.append(sums.tobytes())
        assert len(set(found)) == 1
        if sums_dtype is np.float64:
            assert found[0] == aggregated(indptr, indices, rows, "sum").tobytes()


def add_all(rows: Any, indptr: Any, indices: Any, bounds: Any, n_threads: int) -> tuple[Any, int]:
    """Return sums of rows of float64, cut into parts, and what the kernel has returned."""
    sums, nexts, cursor = np.zeros_like(rows), np.empty(len(rows), np.int64), indptr[:-1].copy()
    numbers, n_sums = rows.reshape(-1).view(np.uint8), sums.reshape(-1).view(np.uint8)
    lists = indices.view(np.uint8), 8, cursor, indptr[1:].copy(), nexts
    core.begin(*lists)
    bad = core.accumulate(numbers, 8, 0, rows.shape[1], *lists, n_sums, 8, None, -1, np.array(bounds), n_threads)
    return sums, bad


@settings(max_examples=50, deadline=None)
@given(inner=st.lists(st.integers(0, 60)), n_threads=st.integers(0, 9), swapped=st.sets(st.integers(0, 59), max_size=3))
@example(inner=[30], n_threads=1, swapped={0, 40})
def test_any_parts_and_threads_give_the_same_sums(inner: list[int], n_threads: int, swapped: set[int]) -> None:
    """Also the same first list that descends."""
    n = 60
    indptr, lists = np.arange(0, 2 * n + 1, 2), np.tile(np.arange(n), (n, 1))
    indices = np.sort(np.random.default_rng(0).permuted(lists, axis=1)[:, :2])
    for v in swapped:
        indices[v] = indices[v, ::-1]
    rows = np.random.default_rng(1).standard_normal((n, 3))
    sums, bad = add_all(rows, indptr, indices.reshape(-1), [0, *sorted(inner), n], n_threads)
    assert bad == min(swapped, default=-1)
    if not swapped:
        assert sums.tobytes() == aggregated(indptr, indices.reshape(-1), rows, "sum").tobytes()


def test_parts_that_are_not_all_destinations_are_refused() -> None:
    rows, indptr, indices = np.ones((3, 1)), np.array([0, 1, 2, 3]), np.array([0, 1, 2])
    for bounds in ([0, 2], [1, 3], [0, 2, 1, 3], [0, -1, 3], [0, 4], np.empty(0, np.int64)):
        with pytest.raises(ValueError, match="parts"):
            add_all(rows, indptr, indices, bounds, 2)


def test_a_list_beyond_the_ids_is_refused_in_any_part() -> None:
    lists = np.zeros(24, np.uint8), 8, np.zeros(3, np.int64), np.array([1, 1, 4]), np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="beyond"):
        core.accumulate(np.zeros(24, np.uint8), 8, 0, 1, *lists, np.zeros(24, np.uint8), 8, None, -1, np.arange(4), 2)


def test_lists_that_do_not_ascend_are_damage() -> None:
    ids, nexts = np.array([1, 0], np.int32), np.empty(1, np.int64)
    cursor, ends, sums = np.zeros(1, np.int64), np.array([2]), np.zeros(8, np.uint8)
    core.begin(ids.view(np.uint8), 4, cursor, ends, nexts)
    rows = np.ones(2, np.float32).view(np.uint8)
    assert core.accumulate(rows, 4, 0, 1, ids.view(np.uint8), 4, cursor, ends, nexts, sums, 8, None, -1, np.array([0, 1]), 1) == 0
    with pytest.raises(ValueError, match="beyond"):
        core.begin(ids.view(np.uint8), 4, cursor, np.array([3]), nexts)


# --- blocks and memory ----------------------------------------------------------------------------------------------------------


def wide(folder: Path, n: int = 4_000, width: int = 512) -> tuple[Path, Any, Any, Any]:
    """Make a dataset whose features are far larger than its adjacency."""
    indptr, indices = skewed_graph(n, 4)
    x = np.random.default_rng(0).standard_normal((n, width)).astype(np.float32)
    featstore.OutOfCoreGraph.create(folder / "g", indptr, indices, {"x": x}, progress=False).close()
    return folder / "g", indptr, indices, x


def stored(path: Path, name: str) -> torch.Tensor:
    """Return all rows of a feature."""
    with featstore.open(path, memory="256MiB") as g:
        return g.features[name][:].clone()


def test_each_block_reads_the_feature_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, indptr, indices, x = wide(tmp_path)
    costs: list[Any] = []
    real = passes.Passes.__exit__

    def leave(self: Any, *args: object) -> None:
        costs.append(self.costs)
        real(self, *args)

    monkeypatch.setattr(passes.Passes, "__exit__", leave)
    with featstore.open(path, memory="16MiB") as g:
        direct = g.features["x"].stats()["mode"] == "direct"
        assert g.topology.num_nodes == len(x)
        before = kernel_bytes()
        g.aggregate("x", "sum", name="s", dtype="float64", progress=False)
        kernel = kernel_bytes() - before
        assert g.budget.peak <= g.budget.total
        assert "aggregation" not in g.memory_report()
    assert stored(path, "s").numpy().tobytes() == aggregated(indptr, indices, x, "sum").tobytes()
    assert costs[0].blocks >= 2
    assert costs[0].bytes_read <= costs[0].blocks * x.nbytes
    if direct:
        assert kernel <= (costs[0].blocks + 1) * x.nbytes
        assert kernel >= costs[0].bytes_read


def test_the_memory_is_reserved_and_the_least_is_named(tmp_path: Path) -> None:
    path, _, _, _ = wide(tmp_path, 40, 40_000)
    with featstore.open(path, memory="3MiB") as g, pytest.raises(BudgetError) as caught:
        g.aggregate("x", progress=False)
    assert caught.value.needed is not None
    with featstore.open(path, memory=caught.value.needed) as g:
        seen: dict[str, int] = {}
        real = g.topology.lists

        def lists(*args: Any) -> Any:
            seen.update(g.memory_report())
            return real(*args)

        g.topology.lists = lists  # type: ignore[method-assign]
        g.aggregate("x", progress=False)
        assert seen["aggregation"] > 40_000 * 8
        assert g.budget.peak <= g.budget.total


# --- going on, kills, faults ----------------------------------------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record what is there after every block."""
    monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("width", [1024, 1500])
def test_an_interrupted_call_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    path, indptr, indices, x = wide(tmp_path, 3_000, width)
    blocks: list[int] = []
    real = passes.Passes._summed

    def summed(self: Any, first: int, stop: int) -> Any:
        if len(blocks) == 2:
            raise KeyboardInterrupt
        blocks.append(first)
        return real(self, first, stop)

    with featstore.open(path, memory="12MiB") as g:
        with monkeypatch.context() as patch:
            patch.setattr(passes.Passes, "_summed", summed)
            with pytest.raises(KeyboardInterrupt):
                g.aggregate("x", "sum", name="s", dtype="float64", progress=False)
        assert "s" not in g.features
        left = os.listdir(path / "making.s")
        assert len(left) == 3
    begun: list[int] = []
    with featstore.open(path, memory="12MiB") as g, monkeypatch.context() as patch:
        patch.setattr(passes.Passes, "_summed", lambda *a: begun.append(a[1]) or real(*a))
        g.aggregate("x", "sum", name="s", dtype="float64", progress=False)
        assert begun[0] > blocks[1], "it went on"
        g.verify(progress=False)
    assert stored(path, "s").numpy().tobytes() == aggregated(indptr, indices, x, "sum").tobytes()
    assert not (path / "making.s").exists()


def test_what_was_left_of_something_else_is_not_used(tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path, indptr, indices, x = wide(tmp_path, 2_000)
    for damage, words in (("another op", "left differs in: op$"), ("record", "left cannot be read$"), ("rows", "")):
        with featstore.open(path, memory="12MiB") as g, monkeypatch.context() as patch:
            real, count = making.Making.checkpoint, [0]

            def checkpoint(self: Any, real: Any = real, count: Any = count) -> None:
                real(self)
                count[0] += 1
                if count[0] == 2:
                    raise KeyboardInterrupt

            patch.setattr(making.Making, "checkpoint", checkpoint)
            with pytest.raises(KeyboardInterrupt):
                g.aggregate("x", "mean" if damage == "another op" else "sum", name="s", overwrite=True, progress=False)
        folder = path / "making.s"
        assert folder.exists()
        if damage == "record":
            with flipped(folder / "state", 40, 1):
                shutil.copy(folder / "state", folder / "copy")
            os.replace(folder / "copy", folder / "state")
        elif damage == "rows":
            rows = next(each for each in folder.iterdir() if each.name.endswith(".tmp") and ".sums" not in each.name)
            os.truncate(rows, 4096)
        with featstore.open(path, memory="12MiB") as g, pytest.warns(UserWarning, match=words) if words else nullcontext():
            g.aggregate("x", "sum", name="s", overwrite=True, progress=False)
        expected = torch.from_numpy(aggregated(indptr, indices, x, "sum")).to(torch.float32)
        assert torch.equal(stored(path, "s"), expected), damage


def test_damage_is_found_and_leaves_nothing(tmp_path: Path) -> None:
    path, _, _, _ = wide(tmp_path, 2_000)
    rows = next(each for each in path.iterdir() if each.name.startswith("node.x") and each.suffix == ".rows")
    before = sorted(os.listdir(path))
    with featstore.open(path, memory="12MiB") as g, flipped(rows, 200_000, 3), pytest.raises(CorruptionError):
        g.aggregate("x", progress=False)
    assert sorted(os.listdir(path)) == before


def test_a_full_drive_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _, _ = wide(tmp_path, 500)
    monkeypatch.setattr(steps, "free_bytes", lambda path: 1000)
    with featstore.open(path, memory="32MiB") as g, pytest.raises(OSError, match="are free") as caught:
        g.aggregate("x", progress=False)
    assert caught.value.errno == errno.ENOSPC
    assert not (path / "making.x_mean").exists()
