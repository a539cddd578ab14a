"""from_edge_index: the external sort against a sort in memory, at bounds of almost nothing, and with ten times the memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore.creation import build as building
from featstore.creation import extsort
from featstore.creation.extsort import PairSorter, sort_pairs
from featstore.errors import BudgetError, CorruptionError, FormatError
from featstore.storage.catalog import read_catalog
from tests.support.making import from_edge_index
from tests.support.rowfiles import check_sums, edge

pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of datasets are made here, and fsync would take most of the time; test_format sees that it is called."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def check(root: Path, edges: np.ndarray, n: int) -> None:
    """Compare a dataset with a sort in memory: row 0 sources, row 1 destinations, as in PyG."""
    src, dst = edges.astype(np.int64)
    order = np.lexsort((src, dst))
    np.testing.assert_array_equal(edge(root, "indices"), src[order])
    np.testing.assert_array_equal(edge(root, "indptr"), np.concatenate(([0], np.bincount(dst, minlength=n).cumsum())))
    np.testing.assert_array_equal(edge(root, "out_degree"), np.bincount(src, minlength=n))
    catalog = read_catalog(root)
    assert (catalog.num_nodes, catalog.num_edges) == (n, edges.shape[1])
    for record in catalog.files.values():
        check_sums(root, record)


def random_edges(n: int, n_edges: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, n, n_edges), (rng.random(n_edges) ** 4 * n).astype(np.int64)])


def blocks_of(edges: Any, step: int) -> Iterator[Any]:
    for first in range(0, edges.shape[1], step):
        yield edges[:, first : first + step]


def save(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


FORMS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "array": lambda e, _: e,
    "lists": lambda e, _: e.tolist(),
    "two arrays": lambda e, _: (e[0], e[1]),
    "fortran": lambda e, _: np.asfortranarray(e),
    "transposed": lambda e, _: np.ascontiguousarray(e.T).T,
    "int32": lambda e, _: e.astype(np.int32),
    "uint16": lambda e, _: e.astype(np.uint16),
    "uint64": lambda e, _: e.astype(np.uint64),
    "swapped": lambda e, _: e.astype(">i8"),
    "tensor": lambda e, _: torch.from_numpy(e.copy()),
    "int32 tensor": lambda e, _: torch.from_numpy(e.astype(np.int32)),
    "tensor of pairs, transposed": lambda e, _: torch.from_numpy(np.ascontiguousarray(e.T)).t(),
    "npy": lambda e, p: save(p / "e.npy", e),
    "npy uint32": lambda e, p: str(save(p / "u.npy", e.astype(np.uint32))),
    "npy fortran": lambda e, p: save(p / "f.npy", np.asfortranarray(e)),
    "npy swapped": lambda e, p: save(p / "s.npy", e.astype(">i4")),
    "memmap": lambda e, p: np.load(save(p / "m.npy", e), mmap_mode="r"),
    "blocks": lambda e, _: blocks_of(e, 999),
    "tensor blocks": lambda e, _: blocks_of(torch.from_numpy(e.copy()), 5000),
    "one block": lambda e, _: iter([e]),
    "list of blocks": lambda e, _: list(blocks_of(e, 6001)),
    "tuple of a tensor": lambda e, _: (torch.from_numpy(e.copy()),),
    "two tensors": lambda e, _: list(torch.from_numpy(e.copy())),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    edges = random_edges(300, 20_000)
    from_edge_index(tmp_path / "g", FORMS[form](edges, tmp_path), 300, memory=1000)  # blocks of 1,024 pairs, spilled
    check(tmp_path / "g", edges, 300)
    assert sorted({entry.split(".")[0] for entry in os.listdir(tmp_path / "g")}) == [
        "catalog",
        "edge",
        "opening",
        "readers",
        "writer",
    ]


@given(
    st.integers(1, 50),
    st.integers(0, 300),
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.integers(2, 5),
    st.sampled_from([0, 4, 8]),
)
def test_any_edges_at_any_bound(tmp_path: Path, n: int, n_edges: int, seed: int, cap: int, fan_out: int, edge_bytes: int) -> None:
    """Buckets are split over destinations, over sources, and counted, down to a bound of one pair."""
    edges = random_edges(n, n_edges, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extsort, "_FAN_OUT", fan_out)
        with PairSorter(n, 0, tmp_path, edge_bytes) as sorter:
            sorter.block_pairs, sorter._cap = 1 + cap // 2, cap
            done = 0
            for block in blocks_of(edges, 7):
                sorter.add(block[1], block[0], done)
                done += block.shape[1]
            found = list(sorter.sorted())
        assert os.listdir(tmp_path) == []
    assert all(0 < len(dst) <= cap for dst, *_ in found)
    order = np.lexsort(edges)  # stable
    for k, expected in enumerate((edges[1][order], edges[0][order], order)):
        if k == 2 and not edge_bytes:
            assert all(parts[2] is None for parts in found)
        else:
            np.testing.assert_array_equal(np.concatenate([*(parts[k] for parts in found), np.empty(0, np.int64)]), expected)


@pytest.mark.parametrize("case", ["one destination", "one source", "one pair", "one destination at the end", "ladder"])
def test_more_edges_of_one_kind_than_memory_holds(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    n, n_edges = 5000, 30_000
    edges = random_edges(n, n_edges)
    if case == "one destination":
        edges[1] = 17
    elif case == "one source":
        edges[0] = 0
    elif case == "one pair":
        edges[:] = [[4], [n - 1]]
    elif case == "one destination at the end":
        edges[1] = n - 1
    else:
        edges[1] = np.arange(n_edges) % n
        edges[0] = edges[1][::-1]
    from_edge_index(tmp_path / "g", edges, n, memory=1000)
    check(tmp_path / "g", edges, n)


@pytest.mark.parametrize(("n", "n_edges"), [(0, 0), (1, 0), (1, 5), (7, 0), (100_000, 3)])
def test_small_and_empty(tmp_path: Path, n: int, n_edges: int) -> None:
    edges = random_edges(max(n, 1), n_edges)
    from_edge_index(tmp_path / "g", edges, n)
    check(tmp_path / "g", edges, n)
    from_edge_index(tmp_path / "h", iter([edges, edges[:, :0]]), n)
    check(tmp_path / "h", edges, n)
    if not n_edges:
        for k, given_as in enumerate(([], [[], []], ([], []))):
            from_edge_index(tmp_path / f"i{k}", given_as, n)
            check(tmp_path / f"i{k}", edges, n)
        from_edge_index(tmp_path / "j", iter([]), n)
        check(tmp_path / "j", edges, n)


def test_ids_of_eight_bytes(tmp_path: Path) -> None:
    """From 2³¹ nodes on pairs take 16 bytes, and one key no longer holds both ids."""
    n = 1 << 40
    rng = np.random.default_rng(0)
    dst, src = rng.integers(0, n, (2, 5000))
    dst[::2] = dst[0]
    order = np.lexsort((src, dst))
    with PairSorter(n, 0, tmp_path) as sorter:
        sorter._cap = 100
        sorter.add(dst, src)
        assert sorter.bytes_spilled >= 16 * 5000
        found = list(sorter.sorted())
    np.testing.assert_array_equal(np.concatenate([part for part, *_ in found]), dst[order])
    np.testing.assert_array_equal(np.concatenate([part for _, part, _ in found]), src[order])
    for low, high in ((0, n), (0, 1 << 62)):
        for edges in (None, np.arange(5000)):
            a, b, c = sort_pairs(dst, src, low, high, n, edges)
            np.testing.assert_array_equal(a, dst[order])
            np.testing.assert_array_equal(b, src[order])
            assert (c is None) if edges is None else np.array_equal(c, order)


@pytest.mark.parametrize("n", [3, 1 << 20, 1 << 25, 1 << 26, 1 << 31, 1 << 32, 1 << 33])
def test_equal_pairs_keep_their_order_whatever_their_keys_take(n: int) -> None:
    """A signed word has room for a pair's key and its place of 12 bits, for its key alone, or not for its key."""
    rng = np.random.default_rng(0)
    dst, src = rng.choice([*rng.integers(0, n, 30), 0, n - 1], (2, 4000))
    order = np.lexsort((src, dst))
    for numbers in (np.arange(4000), None):
        a, b, edges = sort_pairs(dst.copy(), src.copy(), 0, n, n, numbers)
        np.testing.assert_array_equal(a, dst[order])
        np.testing.assert_array_equal(b, src[order])
        assert (edges is None) if numbers is None else np.array_equal(edges, order)


@pytest.mark.parametrize(
    ("edges", "n", "error", "match"),
    [
        ([[0, 1], [1, 2]], 2, IndexError, r"edge_index\[1, 1\] is 2, which is not a node: ids are 0 … 1"),
        ([[0, -1], [1, 1]], 2, IndexError, r"edge_index\[0, 1\] is -1"),
        (np.array([[0, 2**64 - 1], [0, 0]], np.uint64), 2, IndexError, r"edge_index\[0, 1\] is 18446744073709551615"),
        (iter([np.zeros((2, 3), np.int64), np.array([[0], [9]])]), 2, IndexError, r"edge_index\[1, 3\] is 9"),
        ([[0], [0]], 0, IndexError, r"edge_index\[0, 0\] is 0, which is not a node: there are none"),
        ([[0, 1], [1]], 2, ValueError, "edge_index: .*inhomogeneous"),
        (iter([[[0], [1, 1]]]), 2, ValueError, "edge_index: .*inhomogeneous"),
        ([[0.5], [0.0]], 2, TypeError, "must hold integers"),
        (torch.zeros(2, 2), 2, TypeError, "must hold integers"),
        (np.zeros((2, 2), bool), 2, TypeError, "must hold integers"),
        (np.zeros((3, 2), np.int64), 2, ValueError, r"shape \[2, E\]"),
        (np.zeros(4, np.int64), 2, ValueError, r"shape \[2, E\]"),
        ([(0, 1), (1, 1), (0, 0)], 2, ValueError, r"not \[3, 2\]; a list of pairs is given as np.array\(pairs\).T"),
        (zip([0, 1], [1, 1], strict=True), 2, ValueError, r"block 0 of edge_index .*; single pairs are given as np.array\(list"),
        (iter([np.zeros((2, 3), int), np.zeros(2, int)]), 2, ValueError, r"block 1 of edge_index must have shape \[2, E\]"),
        (iter([np.zeros((2, 3))]), 2, TypeError, "block 0 of edge_index must hold integers"),
        ([[[0, 1]], [[1, 1]]], 2, ValueError, r"shape \[2, E\], not \[2, 1, 2\]"),
        (5, 2, TypeError, r"edge_index must be an array \[2, E\], .*or an iterable of blocks \[2, k\], not int"),
        (np.zeros((2, 2), np.int64), -1, ValueError, "at least 0"),
        (np.zeros((2, 2), np.int64), 2.0, TypeError, "must be an integer"),
        (np.zeros((2, 2), np.int64), True, TypeError, "must be an integer"),
    ],
)
def test_wrong_edges_are_refused_and_leave_nothing(
    tmp_path: Path, edges: Any, n: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        from_edge_index(tmp_path / "g", edges, n)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("edges", "edge_features", "error", "match"),
    [
        ([[0.5], [0.0]], None, TypeError, "must hold integers"),
        (torch.zeros((3, 2), dtype=torch.int64), None, ValueError, r"shape \[2, E\]"),
        (5, None, TypeError, "edge_index must be an array .*, not int"),
        ("flat.npy", None, ValueError, r"shape \[2, E\], not \[6\]"),
        ("good.npy", {"w": np.zeros(2)}, ValueError, "edge feature 'w' has 2 rows, but the graph has 3 edges"),
    ],
)
def test_what_an_array_says_of_itself_is_checked_before_anything_is_made(
    tmp_path: Path, edges: Any, edge_features: Any, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "flat.npy", np.zeros(6, np.int64))
    np.save(tmp_path / "good.npy", np.zeros((2, 3), np.int64))
    monkeypatch.setattr(building, "BuildDirectory", None)
    with pytest.raises(error, match=match):
        from_edge_index(tmp_path / "g", tmp_path / edges if isinstance(edges, str) else edges, 2, edge_features=edge_features)


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'csc'"):
        from_edge_index(tmp_path / "g", [], 2, topology="coo")
    with pytest.raises(BudgetError):
        from_edge_index(tmp_path / "g", [], 2, memory=10)
    (tmp_path / "x.npy").write_bytes(b"nothing of the kind")
    with pytest.raises(FormatError):
        from_edge_index(tmp_path / "g", tmp_path / "x.npy", 2)


def test_a_full_disk_while_spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    edges = random_edges(500, 20_000)
    real, count = os.pwrite, 0
    for k in (1, 50, 400, 1000):
        count = 0

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            nonlocal count
            count += 1
            if count == k:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(OSError, match="No space") as caught:
                from_edge_index(tmp_path / "g", edges, 500, memory=1000)
        assert "spill" in caught.value.filename
        assert os.listdir(tmp_path) == []
    from_edge_index(tmp_path / "g", edges, 500, memory=1000)
    check(tmp_path / "g", edges, 500)


def test_a_spill_file_that_is_cut_short(tmp_path: Path) -> None:
    with PairSorter(100, 0, tmp_path) as sorter:
        sorter.add(*random_edges(100, 5000))
        spilled = [path for path in tmp_path.iterdir() if path.stat().st_size > 8]
        os.truncate(spilled[0], 8)
        with pytest.raises(CorruptionError):
            list(sorter.sorted())
    assert os.listdir(tmp_path) == []


def test_ten_times_more_edges_than_memory(tmp_path: Path) -> None:
    """10 million edges, 160 MB as int64 pairs, within 16 MB; a fifth of them lead to one node."""
    script = textwrap.dedent(f"""
        import resource, numpy as np
        from tests.support.making import from_edge_index
        n, e, k = 200_000, 10_000_000, 50_000
        rng = np.random.default_rng(0)
        def blocks():
            for first in range(0, e, k):
                block = rng.integers(0, n, (2, k))
                block[1, ::5] = 77
                yield block
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        from_edge_index({str(tmp_path / "warm")!r}, np.zeros((2, 1), np.int64), 1, memory="16MiB")
        before = peak()
        from_edge_index({str(tmp_path / "g")!r}, blocks(), n, memory="16MiB")
        print(peak() - before)
    """)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 16 << 20
    indptr, indices = edge(tmp_path / "g", "indptr"), edge(tmp_path / "g", "indices")
    rng = np.random.default_rng(0)
    in_degree, out_degree, total = np.zeros(200_000, np.int64), np.zeros(200_000, np.int64), 0
    for _ in range(200):
        block = rng.integers(0, 200_000, (2, 50_000))
        block[1, ::5] = 77
        in_degree += np.bincount(block[1], minlength=200_000)
        out_degree += np.bincount(block[0], minlength=200_000)
        total += int((block[0] * block[1]).sum())
    np.testing.assert_array_equal(np.diff(indptr), in_degree)
    np.testing.assert_array_equal(np.bincount(indices, minlength=200_000), out_degree)
    np.testing.assert_array_equal(edge(tmp_path / "g", "out_degree"), out_degree)
    owner = np.repeat(np.arange(200_000), in_degree)
    assert int((owner * indices.astype(np.int64)).sum()) == total
    falls = np.flatnonzero(np.diff(indices) < 0) + 1
    assert np.isin(falls, indptr).all()  # ascending within every list
