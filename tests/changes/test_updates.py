"""Updates: rows are those of a NumPy array that is changed alike, by each way of reading; their cost; what they refuse."""

from __future__ import annotations

import os
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.changes.updates import MOST_PATCHES
from featstore.errors import BudgetError, BusyError, CorruptionError, StaleError
from featstore.storage.catalog import read_catalog
from featstore.testing.faults import flipped
from tests.support.sampled import covering

RNG = np.random.default_rng(11)
EDGE = ("_", "_", "_")
# Bytes of a row: below a page, a divisor of it, more than one, dense with rows that cut pages.
WIDTHS = [1, 7, 100, 512, 3000, 4096, 4608, 5000]


def make(path: Path, **features: np.ndarray) -> None:
    n = len(next(iter(features.values())))
    edges = RNG.integers(0, n, (2, 3 * n))
    featstore.OutOfCoreGraph.from_edge_index(
        path, edges, n, features, {"y": np.arange(n)}, edge_features={"w": np.arange(3 * n)}, progress=False
    ).close()


def bytes_of(path: Path) -> dict[str, int]:
    return {name: os.path.getsize(path / name) for name in os.listdir(path) if ".rows" in name}


def check(store: Any, expected: np.ndarray, rng: np.random.Generator) -> None:
    """Read by each way that there is."""
    n = len(expected)
    ids = rng.integers(0, n, 2 * n)
    assert np.array_equal(store[:].numpy(), expected)
    assert np.array_equal(store[ids].numpy(), expected[ids])
    low, high = np.sort(rng.integers(0, n + 1, 2))
    assert np.array_equal(store[int(low) : int(high)].numpy(), expected[low:high])
    blocks = torch.cat([rows for _, rows in store.blocks(rows=max(1, n // 3))])
    assert np.array_equal(blocks.numpy(), expected)


@pytest.mark.parametrize(("width", "options"), covering(WIDTHS, [{}, {"backend": "pread", "memory": "16MiB", "verify": "off"}]))
def test_rows_are_those_of_an_array(width: int, options: dict[str, Any], tmp_path: Path) -> None:
    n = 9000 if width < 600 else 700
    rng = np.random.default_rng(width)
    x = rng.integers(0, 255, (n, width), np.uint8)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g", **options) as g:
        for k in range(12):
            ids = rng.integers(0, n, int(rng.choice([1, 3, 40])))
            if k % 4 == 0:
                ids = np.arange(n - 3, n)  # the last block, which is cut
            rows = rng.integers(0, 255, (len(ids), width), np.uint8)
            store = g.features["x"].update(ids, rows, progress=False)
            x[ids] = rows
            check(store, x, rng)
            assert store is g.features["x"]
        g.verify(progress=False)
    with featstore.open(tmp_path / "g", **options) as g:
        check(g.features["x"], x, rng)
        assert len(read_catalog(tmp_path / "g").files) < 40


def test_an_update_costs_what_it_changes(tmp_path: Path) -> None:
    n = 40_000
    x = RNG.integers(0, 255, (n, 512), np.uint8)
    make(tmp_path / "g", x=x)
    before = bytes_of(tmp_path / "g")
    rng = np.random.default_rng(1)
    with featstore.open(tmp_path / "g") as g:
        g.features["x"].update(rng.integers(0, n, 20), x[:20], progress=False)
    new = {name: n_bytes for name, n_bytes in bytes_of(tmp_path / "g").items() if name not in before}
    assert len(new) == 4
    assert sum(new.values()) <= (20 + 2 + 1 + 2) * 4096
    written = 0
    for _ in range(60):
        with featstore.open(tmp_path / "g") as g:
            known = bytes_of(tmp_path / "g")
            g.features["x"].update(rng.integers(0, n, 10), x[:10], progress=False)
            written += sum(size for name, size in bytes_of(tmp_path / "g").items() if name not in known)
    # 10 pages and 5 of headers and sums a time; a block is copied as often as patches double.
    assert written < 60 * (10 * 7 + 6) * 4096
    patches = read_catalog(tmp_path / "g").files["node.x.1.rows"].patches
    assert 1 <= len(patches) <= MOST_PATCHES
    assert sum(size for name, size in bytes_of(tmp_path / "g").items() if name.startswith("patch-")) < 1000 * 4096


def test_many_changes_write_the_file_anew(tmp_path: Path) -> None:
    n = 5000
    x = RNG.standard_normal((n, 64)).astype(np.float32)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g") as g:
        x[: n // 2] += 1
        g.features["x"].update(slice(0, n // 2), x[: n // 2], progress=False)
        assert np.array_equal(g.features["x"][:].numpy(), x)
        x[::4] = 0
        mask = np.zeros(n, np.bool_)
        mask[::4] = True
        g.features["x"].update(mask, np.zeros((mask.sum(), 64), np.float32), progress=False)
        assert np.array_equal(g.features["x"][:].numpy(), x)
    names = {name for name in bytes_of(tmp_path / "g") if ".x." in name}
    assert names == {"node.x.3.rows", "node.x.3.rows.sums"}


def test_readers_keep_the_old_rows(tmp_path: Path) -> None:
    x = RNG.standard_normal((3000, 8)).astype(np.float32)
    make(tmp_path / "g", x=x)
    other = featstore.open(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        old, fingerprint = g.features["x"], g.fingerprint()
        new = old.update([5, 7, 5], np.stack([x[0], x[1], x[2]]), progress=False)
        assert np.array_equal(old[:].numpy(), x)
        assert np.array_equal(new[[5, 7]].numpy(), x[[2, 1]])
        assert {key for key in fingerprint if fingerprint[key] != g.fingerprint()[key]} == {"node/_/x"}
        assert len(g.fingerprint()["node/_/x"]) == 32
        for _ in range(3):
            new = new.update([9], x[:1], progress=False)
        assert np.array_equal(old[:].numpy(), x)
        assert np.array_equal(other.features["x"][:].numpy(), x)
        with pytest.raises(BusyError, match="open it again"):
            other.features["x"].update([1], x[:1], progress=False)
    assert np.array_equal(other.features["x"][:].numpy(), x)
    other.close()
    with featstore.open(tmp_path / "g") as g:
        assert np.array_equal(g.features["x"][[5, 7, 9]].numpy(), x[[2, 1, 0]])


def test_a_handle_makes_any_number_of_changes(tmp_path: Path) -> None:
    """Descriptors and memory stay as they are; a store that is kept stays whole."""
    x = RNG.standard_normal((3000, 256)).astype(np.float32)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g") as g:
        held, seen = g.features["x"].update([7], x[:1], progress=False), []
        expected = held[:].clone()
        for k in range(60):
            g.features["x"].update([40 * k], x[k : k + 1], progress=False)
            g.update_data("y", [k], [7], progress=False)
            if k % 20 == 19:
                seen.append((len(os.listdir("/proc/self/fd")), g.memory_report()["patch tables"]))
        assert max(fds for fds, _ in seen) <= seen[0][0] + 2 * 2 * MOST_PATCHES
        assert max(n_bytes for _, n_bytes in seen) < 10_000
        assert torch.equal(held[:], expected)
        assert torch.equal(g.features["x"][[40 * 59]], torch.from_numpy(x[59:60]))


def test_a_handle_removes_what_it_replaced(tmp_path: Path) -> None:
    """The disk has the last two states, unless another handle may read older ones."""
    x = RNG.standard_normal((3000, 256)).astype(np.float32)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g") as g:
        most = 2 * x.nbytes + sum(bytes_of(tmp_path / "g").values())
        held = g.features["x"]
        expected = held[:].clone()
        for k in range(8):
            x[: 1500 + k] = k
            g.features["x"].update(slice(0, 1500 + k), x[: 1500 + k], progress=False)
            g.add_data("z", np.arange(k), overwrite=True, progress=False)
            assert sum(bytes_of(tmp_path / "g").values()) <= most
            assert len([name for name in bytes_of(tmp_path / "g") if ".x." in name]) <= 4
        assert torch.equal(held[:], expected)
        with featstore.open(tmp_path / "g") as other:
            old = x.copy()
            for k in range(3):
                x[:2000] = -k
                g.features["x"].update(slice(0, 2000), x[:2000], progress=False)
            assert np.array_equal(other.features["x"][:].numpy(), old)
            assert len([name for name in bytes_of(tmp_path / "g") if ".x." in name]) == 8
        g.features["x"].update([1], x[:1], progress=False)
        assert len([name for name in bytes_of(tmp_path / "g") if name.startswith("node.x.")]) == 2
        g.verify(progress=False)
    with featstore.open(tmp_path / "g") as g:
        assert np.array_equal(g.features["x"][:].numpy(), x)


def test_edge_features_and_node_data(tmp_path: Path) -> None:
    x = RNG.standard_normal((3000, 8)).astype(np.float32)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g") as g:
        w, y = np.arange(9000), np.arange(3000)
        w[[-1, 4]], y[[2, 1]] = [7, 8], [5, 6]
        assert np.array_equal(g.edge_features["w"].update([-1, 4], [7, 8], progress=False)[:].numpy(), w)
        held = g.node_data["y"]
        g.update_data("y", torch.tensor([2, 1]), torch.tensor([5, 6]), progress=False)
        assert np.array_equal(g.node_data["y"].numpy(), y)
        assert held.tolist() == list(range(3000))
    with featstore.open(tmp_path / "g") as g:
        assert np.array_equal(g.edge_features["w"][:].numpy(), w)
        assert np.array_equal(g.node_data["y"].numpy(), y)
        g.remove_feature("w", type=EDGE)
        g.remove_data("y")
    with featstore.open(tmp_path / "g") as g:
        g.verify(progress=False)
    assert not [name for name in bytes_of(tmp_path / "g") if ".w." in name or ".y." in name]


def test_types_that_share_a_column(tmp_path: Path) -> None:
    x = {"a": RNG.standard_normal((300, 130)).astype(np.float32), "b": RNG.standard_normal((500, 130)).astype(np.float32)}
    nodes = {name: featstore.Nodes(len(rows), features={"x": rows}) for name, rows in x.items()}
    edges = {("a", "to", "b"): np.stack([np.arange(300), np.arange(300)])}
    featstore.OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=edges, progress=False).close()
    with featstore.open(tmp_path / "g") as g:
        for _ in range(2):
            for name, rows in x.items():
                ids = RNG.integers(0, len(rows), 4)
                rows[ids] = RNG.standard_normal((1, 130))
                g[name].features["x"].update(ids, rows[ids], progress=False)
        for name, rows in x.items():
            assert np.array_equal(g[name].features["x"][:].numpy(), rows)
        assert len(g.columns) == 1
    with featstore.open(tmp_path / "g") as g:
        sampler = featstore.NeighborSampler(g, [5])
        with featstore.Loader(g, sampler, ("b", np.arange(500)), 100, features="x", strategy="superbatch") as loader:
            for batch in loader:
                for name, rows in x.items():
                    assert np.array_equal(batch.x[name].numpy(), rows[batch.input_ids[name].numpy()])
        g["a"].features["x"].update(slice(None), x["a"] + 1, progress=False)
        g.verify(progress=False)
    with featstore.open(tmp_path / "g") as g:
        assert np.array_equal(g["a"].features["x"][:].numpy(), x["a"] + 1)
        assert np.array_equal(g["b"].features["x"][:].numpy(), x["b"])


def test_a_change_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is committed, and the error says so; the handle shows the old rows, and changes nothing from then on."""
    x = np.zeros((3000, 8), np.float32)
    make(tmp_path / "g", x=x)

    def refuse(*_: Any) -> None:
        raise BudgetError("patch tables needs more", 1)

    with featstore.open(tmp_path / "g") as g:
        with monkeypatch.context() as patch:
            patch.setattr("featstore.graph.snapshot.PatchedRows", refuse)
            with pytest.raises(BudgetError, match=r"'x' is in .*, but opening it failed: patch tables"):
                g.features["x"].update([1], x[:1] + 1, progress=False)
        assert not g.features["x"][:].any()
        with featstore.open(tmp_path / "g") as other:
            assert other.features["x"][[1, 2], 0].tolist() == [1, 0]
        with pytest.raises(BusyError, match="open it again"):
            g.features["x"].update([2], x[:1] + 1, progress=False)
        old = g.features["x"]
        g.remove_feature("x")
        with pytest.raises(KeyError, match="'x' was removed from"):
            old.update([2], x[:1], progress=False)
        assert not old[:].any()
        with featstore.open(tmp_path / "g") as other:
            assert "x" not in other.features


@pytest.mark.parametrize("n_changed", [1, 500])  # a patch, and a file anew
@pytest.mark.parametrize("removes", [False, True], ids=["overwritten", "removed"])
def test_a_column_that_another_handle_has_divided(removes: bool, n_changed: int, tmp_path: Path) -> None:
    """The older handle changes rows of one type: it reads these new rows, and the old ones of the other types."""
    x = {name: RNG.standard_normal((n, 130)).astype(np.float32) for name, n in (("a", 300), ("b", 500), ("c", 40))}
    nodes = {name: featstore.Nodes(len(rows), features={"x": rows}) for name, rows in x.items()}
    edges = {("a", "to", "b"): np.stack([np.arange(300), np.arange(300)])}
    featstore.OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=edges, progress=False).close()
    with featstore.open(tmp_path / "g") as g:
        with featstore.open(tmp_path / "g") as other:
            if removes:
                other.remove_feature("x", type="a")
            else:
                other.add_feature("x", x["a"] * 2, type="a", overwrite=True, progress=False)
        for name in ("b", "c", "b"):
            x[name][:n_changed] += 1
            rows = x[name][:n_changed]
            found = g[name].features["x"].update(slice(0, len(rows)), rows, progress=False)
            assert np.array_equal(found[:].numpy(), x[name])
            for each, rows in x.items():
                assert np.array_equal(g[each].features["x"][:].numpy(), rows)
        g.verify(progress=False)
    with featstore.open(tmp_path / "g") as g:
        for name in ("b", "c"):
            assert np.array_equal(g[name].features["x"][:].numpy(), x[name])
        if removes:
            assert "x" not in g["a"].features
        else:
            assert np.array_equal(g["a"].features["x"][:].numpy(), x["a"] * 2)


@pytest.mark.parametrize("width", [60, 2000])
def test_every_strategy_reads_patches(width: int, tmp_path: Path) -> None:
    n = 2000
    x = RNG.standard_normal((n, width)).astype(np.float32)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g") as g:
        for ids in (np.arange(0, n, 31), np.arange(40, 60), [n - 1]):
            x[ids] += 1
            g.features["x"].update(ids, x[ids], progress=False)
        sampler, seeds = featstore.NeighborSampler(g, [4, 4]), np.arange(0, n, 2)
        pack = featstore.sample_offline(g, sampler, seeds, 100, path=tmp_path / "p", progress=False)
        for strategy in ("ondemand", "superbatch", "streamed", "ginex", featstore.Packed(pack, cache=0.1)):
            given = () if isinstance(strategy, featstore.Packed) else (sampler, seeds, 100)
            with featstore.Loader(g, *given, features="x", strategy=strategy) as loader:
                for batch in loader:
                    assert np.array_equal(batch.x.numpy(), x[batch.input_ids.numpy()]), strategy
        pack.close()
        means = g.aggregate("x", "sum", dtype="float64", progress=False)
        expected = np.zeros((n, width))
        for v in range(0, n, 97):
            expected[v] = x[g.neighbors(v).numpy()].astype(np.float64).sum(0)
            assert np.allclose(means[[v]][0].numpy(), expected[v])


def test_a_pack_of_the_old_rows_is_stale_by_name(tmp_path: Path) -> None:
    x = RNG.standard_normal((2000, 16)).astype(np.float32)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g") as g:
        sampler = featstore.NeighborSampler(g, [4])
        pack = featstore.sample_offline(g, sampler, np.arange(500), 100, path=tmp_path / "p", progress=False)
        strategy = featstore.Packed(pack, cache=0.1)
        featstore.Loader(g, features="x", strategy=strategy).close()
        g.features["x"].update(5, x[5] + 1, progress=False)
        with pytest.raises(StaleError, match="an earlier one; remove this directory"):
            featstore.Loader(g, features="x", strategy=strategy)
        (layout,) = (tmp_path / "p").glob("layout-*")
        shutil.rmtree(layout)
        x[5] += 1
        with featstore.Loader(g, features="x", strategy=strategy) as loader:
            for batch in loader:
                assert np.array_equal(batch.x.numpy(), x[batch.input_ids.numpy()])
        pack.close()


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    ([3000], np.zeros((1, 8), np.float32), IndexError, "3000"),
    ([-3001], np.zeros((1, 8), np.float32), IndexError, "-3001"),
    ([1.5], np.zeros((1, 8), np.float32), TypeError, "float"),
    ([1, 2], np.zeros((1, 8), np.float32), ValueError, "2 rows of 'x' have shape (2, 8), not (1, 8)"),
    ([1], np.zeros((1, 9), np.float32), ValueError, "not (1, 9)"),
    ([1], np.zeros((1, 8)), TypeError, "float32, not float64"),
    ([1], np.zeros((1, 8), np.complex64), TypeError, "complex64"),
    ([[0, 1], [2, 3]], np.zeros((4, 8), np.float32), ValueError, "4 rows of 'x' have shape (2, 2, 8), not (4, 8)"),
    ([1], torch.zeros(1, 8, device="meta"), TypeError, "dense tensor, with values"),
    ([1], torch.zeros(1, 8).to_sparse(), TypeError, "torch.sparse_coo"),
    ([1], "rows.npy", TypeError, "give np.load(path, mmap_mode='r')"),
    ([1], iter([[1.0] * 8]), TypeError, "not a list_iterator"),
    ([1], [["1"] * 8], TypeError, "<U1 is not cast"),
    ([1], [[1e39] * 8], ValueError, "1e+39 do not fit"),
]


@pytest.mark.parametrize(("ids", "rows", "error", "text"), WRONG)
def test_wrong_arguments_change_nothing(ids: Any, rows: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    make(tmp_path / "g", x=np.ones((3000, 8), np.float32))
    before = bytes_of(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        with pytest.raises(error, match=re.escape(text)):
            g.features["x"].update(ids, rows)
        assert g.features["x"].update([], np.empty((0, 8), np.float32)) is g.features["x"]
    assert bytes_of(tmp_path / "g") == before
    assert read_catalog(tmp_path / "g").generation == 1


LISTS: list[tuple[str, Any, Any]] = [
    ("int64", [True, 5], [1, 5]),
    ("int64", [1.9, 0], TypeError),
    ("int64", [float("nan"), 0], TypeError),
    ("int64", [2**63 + 5, 2**63], ValueError),
    ("int64", [2**70, 0], TypeError),
    ("int64", [None, 0], TypeError),
    ("int64", (-(2**63), 2**63 - 1), [-(2**63), 2**63 - 1]),
    ("uint8", [0, 255], [0, 255]),
    ("uint8", [-1, 0], ValueError),
    ("int8", [128, 0], ValueError),
    ("bool", [True, False], [True, False]),
    ("bool", [1, 0], TypeError),
    ("float16", [1, 65504], [1, 65504]),
    ("float16", [65536, 0], ValueError),
    ("float16", [float("inf"), 2.5], [float("inf"), 2.5]),
]


@pytest.mark.parametrize(("dtype", "rows", "expected"), LISTS)
def test_lists_are_cast_where_values_fit(dtype: str, rows: Any, expected: Any, tmp_path: Path) -> None:
    make(tmp_path / "g", x=np.ones(30, dtype))
    with featstore.open(tmp_path / "g") as g:
        if isinstance(expected, type):
            with pytest.raises(expected, match="rows of 'x' are"):
                g.features["x"].update([4, 2], rows, progress=False)
            assert g.features["x"][[4, 2]].tolist() == [1, 1]
        else:
            assert g.features["x"].update([4, 2], rows, progress=False)[[4, 2]].tolist() == expected


def test_ids_of_several_axes(tmp_path: Path) -> None:
    x = RNG.standard_normal((300, 8)).astype(np.float32)
    make(tmp_path / "g", x=x)
    ids, rows = np.array([[7, 1], [-1, 7]]), RNG.standard_normal((2, 2, 8)).astype(np.float32)
    x[ids] = rows
    with featstore.open(tmp_path / "g") as g:
        assert np.array_equal(g.features["x"].update(ids, rows, progress=False)[:].numpy(), x)
        assert np.array_equal(g.features["x"].update(ids, torch._neg_view(torch.tensor(rows)), progress=False)[7].numpy(), -x[7])


def test_room_is_asked_for_before_ids_are_sorted(tmp_path: Path) -> None:
    n = 400_000
    path, ids = tmp_path / "g", np.arange(n)[::-1]
    featstore.OutOfCoreGraph.create(
        path, np.zeros(n + 1, np.int64), np.empty(0, np.int64), features={"x": np.zeros(n, np.uint8)}, progress=False
    ).close()
    with featstore.open(path, memory="16MiB") as g:
        tracemalloc.start()
        try:
            with pytest.raises(BudgetError, match="changes"):
                g.features["x"].update(ids, np.ones(n, np.uint8), progress=False)
            assert tracemalloc.get_traced_memory()[1] < 12 * n  # the ids as int64
        finally:
            tracemalloc.stop()
        some = RNG.integers(0, n, 100_000)
        assert g.features["x"].update(some, np.ones(100_000, np.uint8), progress=False)[:].sum() == len(np.unique(some))


def test_damage_of_a_patch_is_found(tmp_path: Path) -> None:
    x = RNG.standard_normal((3000, 8)).astype(np.float32)
    make(tmp_path / "g", x=x)
    with featstore.open(tmp_path / "g") as g:
        g.features["x"].update([700], x[:1], progress=False)
    (patch,) = read_catalog(tmp_path / "g").files["node.x.1.rows"].patches
    with flipped(tmp_path / "g" / patch.file, 4096 + 100), featstore.open(tmp_path / "g") as g:
        with pytest.raises(CorruptionError, match=re.escape(patch.file)):
            g.features["x"][[700]]
        with pytest.raises(CorruptionError, match=re.escape(patch.file)):
            list(g.features["x"].blocks(rows=3000))
        with pytest.raises(CorruptionError, match=re.escape(patch.file)):
            g.verify(progress=False)
        assert g.features["x"][[0]].tolist() == x[:1].tolist()
    with flipped(tmp_path / "g" / patch.blocks, 4096), pytest.raises(CorruptionError, match=re.escape(patch.blocks)):
        featstore.open(tmp_path / "g")
    with featstore.open(tmp_path / "g") as g:
        g.verify(progress=False)
