"""create: every input and dtype, bit for bit; bad topologies; bounded memory; the old dataset outlives a failed new one."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore.creation import build as building
from featstore.creation import builder
from featstore.creation.inputedges import CscInput
from featstore.creation.source import open_source
from featstore.errors import BudgetError, CorruptionError, FeatstoreError, FormatError
from featstore.storage.catalog import read_catalog
from tests.support.making import create
from tests.support.rowfiles import check_sums, edge, node
from tests.support.sampled import covering, one_in

pytestmark = pytest.mark.usefixtures("small_pieces")

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
EMPTY = np.zeros(1, np.int64), np.zeros(0, np.int64)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of datasets are made here, and fsync would take most of the time; test_format sees that it is called."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def tensor_of(dtype: str, *shape: int) -> torch.Tensor:
    """Random bits of a dtype: NaN payloads, denormals and -0.0 among them."""
    generator = torch.Generator().manual_seed(len(dtype) + len(shape))
    target = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    n_bytes = target.itemsize
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * n_bytes), generator=generator, dtype=torch.uint8)
    return raw.view(target)


def bits(value: torch.Tensor | np.ndarray) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(value, torch.Tensor) else value.tobytes()


def random_csc(n: int, n_edges: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, n_edges + 1, n - 1)) if n > 1 else np.empty(0, np.int64)
    indptr = np.concatenate(([0], cuts, [n_edges])).astype(np.int64) if n else np.zeros(1, np.int64)
    return indptr, rng.integers(0, max(n, 1), n_edges if n else 0)


def canonical(indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return np.concatenate([np.sort(indices[a:b]) for a, b in pairwise(indptr)] + [indices[:0]])


def check_topology(root: Path, indptr: np.ndarray, indices: np.ndarray) -> None:
    np.testing.assert_array_equal(edge(root, "indptr"), indptr)
    np.testing.assert_array_equal(edge(root, "indices"), canonical(indptr, indices))
    np.testing.assert_array_equal(edge(root, "out_degree"), np.bincount(indices, minlength=len(indptr) - 1))
    for record in read_catalog(root).files.values():
        check_sums(root, record)


# --- inputs ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 7), (50, 3, 5)])
def test_every_dtype_bit_for_bit_from_a_tensor(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    x = tensor_of(dtype, *shape)
    create(tmp_path / "g", np.zeros(51, np.int64), [], {"x": x}, {"y": x[:0], "z": x[3:]})
    assert bits(node(tmp_path / "g", "x")) == bits(x)
    assert bits(node(tmp_path / "g", "z")) == bits(x[3:])
    record = read_catalog(tmp_path / "g").fields["node/_/x"]
    assert (record.dtype, record.shape) == (dtype, shape)
    assert read_catalog(tmp_path / "g").fields["node/_/y"].shape == (0, *shape[1:])


def npy(path: Path, array: np.ndarray, version: tuple[int, int]) -> Path:
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version=version, allow_pickle=False)
    return path


def blocks_of(array: Any, step: int) -> Iterator[Any]:
    for first in range(0, len(array), step):
        yield array[first : first + step]


FORMS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "array": lambda a, _: a,
    "list": lambda a, _: a.tolist(),
    "fortran": lambda a, _: np.asfortranarray(a),
    "strided": lambda a, _: np.repeat(a, 2, axis=0)[::2],
    "swapped": lambda a, _: a.astype(a.dtype.newbyteorder(">")),
    "read-only": lambda a, _: (a.setflags(write=False), a)[1],
    "tensor": lambda a, _: torch.from_numpy(a.copy()),
    "strided tensor": lambda a, _: torch.from_numpy(np.repeat(a, 2, axis=0))[::2],
    "transposed tensor": lambda a, _: torch.from_numpy(np.ascontiguousarray(a.T)).permute(*range(a.ndim - 1, -1, -1)),
    "tensor with grad": lambda a, _: torch.from_numpy(a.copy()).requires_grad_() if a.dtype.kind == "f" else a,
    "npy 1": lambda a, p: npy(p / "v1.npy", a, (1, 0)),
    "npy 2": lambda a, p: str(npy(p / "v2.npy", a, (2, 0))),
    "npy 3": lambda a, p: npy(p / "v3.npy", a, (3, 0)),
    "npy fortran": lambda a, p: npy(p / "f.npy", np.asfortranarray(a), (1, 0)),
    "npy swapped": lambda a, p: npy(p / "s.npy", a.astype(a.dtype.newbyteorder(">")), (1, 0)),
    "memmap": lambda a, p: np.load(npy(p / "m.npy", a, (1, 0)), mmap_mode="r"),
    "blocks": lambda a, _: (a.shape, a.dtype, blocks_of(a, 7)),
    "tensor blocks": lambda a, _: (a.shape, torch.from_numpy(a.copy()).dtype, blocks_of(torch.from_numpy(a.copy()), 1)),
    "one block": lambda a, _: (list(a.shape), str(a.dtype), [a]),
}


@pytest.mark.parametrize(
    ("form", "kind", "row"), covering(FORMS, ["float64", "int64"], [(6,), (), (2, 3), (2, 3, 2)], together=2)
)
def test_every_form_of_input(tmp_path: Path, form: str, kind: str, row: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).integers(-(2**40), 2**40, (29, *row)).astype(kind)
    indptr, indices = random_csc(29, 100)
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    create(tmp_path / "g", indptr, indices, {"x": FORMS[form](x.copy(), tmp_path)}, {"again": FORMS[form](x.copy(), tmp_path)})
    for name in ("x", "again"):
        np.testing.assert_array_equal(node(tmp_path / "g", name), x)


@pytest.mark.parametrize(
    ("form", "kind"),
    covering(
        [form for form in FORMS if form not in ("fortran", "npy fortran", "tensor with grad")],
        ["int64", "int32", "int16", "uint8", "uint16", "uint32", "uint64"],
    ),
)
def test_topology_from_every_form_and_integer(tmp_path: Path, form: str, kind: str) -> None:
    if form == "list" and kind != "int64":
        return
    indptr, indices = random_csc(40, 200)
    a, b = (
        FORMS[form](array.astype(kind), tmp_path / f"part{i}") for i, array in enumerate((indptr, indices)) if make(tmp_path, i)
    )
    create(tmp_path / "g", a, b)
    check_topology(tmp_path / "g", indptr, indices)


def make(tmp_path: Path, part: int) -> bool:
    (tmp_path / f"part{part}").mkdir(exist_ok=True)
    return True


def test_small_blocks_split_any_source_alike(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((23, 3, 4))
    for form, to_input in FORMS.items():
        for max_bytes in (1, 96, 200, 1000, 10**6):
            source = open_source("x", to_input(x.copy(), tmp_path))
            blocks = [block.copy() for block in source.blocks(max_bytes)]
            assert b"".join(block.tobytes() for block in blocks) == x.tobytes(), form
            assert all(len(block) for block in blocks)
            assert "blocks" in form or form == "one block" or max(map(len, blocks)) <= max(1, max_bytes // 96)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (np.zeros((3, 2), complex), TypeError, "complex128 cannot be stored"),
        (np.zeros((3, 2), np.uint32), TypeError, "uint32 cannot be stored"),
        (np.array(["a", "b", "c"]), TypeError, "cannot be stored"),
        (np.array([{}, {}, {}]), TypeError, "object cannot be stored"),
        (torch.zeros(3, 2, dtype=torch.complex64), TypeError, "complex64 cannot be stored"),
        (torch.eye(3).to_sparse(), TypeError, "dense tensor"),
        (np.zeros((3, 0)), ValueError, "rows without bytes"),
        (np.zeros(()), ValueError, "at least one dimension"),
        (np.zeros((4, 2)), ValueError, r"4 rows, but the graph has 3 nodes \(indptr has 4 entries\)"),
        (((3, 2), "float32", [np.zeros((2, 2), np.float32)]), ValueError, "2 rows instead of the 3"),
        (((3, 2), "float32", [np.zeros((4, 2), np.float32)]), ValueError, "more than the 3 rows"),
        (((3, 2), "float32", [np.zeros((3, 1), np.float32)]), ValueError, "expected float32"),
        (((3, 2), "float32", [np.zeros((3, 2), np.float64)]), ValueError, "expected float32"),
        (((-3, 2), "float32", []), ValueError, "negative size"),
        ((None, "float32", []), TypeError, "iterable of row blocks"),
        (((3, 2), "complex64", []), TypeError, "cannot be stored"),
    ],
)
def test_wrong_features_are_refused(tmp_path: Path, value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create(tmp_path / "g", np.zeros(4, np.int64), [], {"x": value})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a\0b", "x" * 61, "\ud800", 3])
def test_wrong_names_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match="a field has a name of"):
        create(tmp_path / "g", *EMPTY, {name: np.zeros(0)})
    with pytest.raises(ValueError, match="both as a feature and as node data"):
        create(tmp_path / "g", *EMPTY, {"x": np.zeros(0)}, {"x": np.zeros(0)})


@pytest.mark.parametrize("name", ["x", "node feat", "größe", "特徴" * 30, "a%2Fb", "a~b", "-rf", "x.1.rows", "indptr"])
def test_odd_names_are_kept(tmp_path: Path, name: str) -> None:
    create(tmp_path / "g", np.zeros(3, np.int64), [], {name: np.arange(2)})
    np.testing.assert_array_equal(node(tmp_path / "g", name), [0, 1])
    assert all(len(os.fsencode(entry)) < 255 for entry in os.listdir(tmp_path / "g"))


@pytest.mark.parametrize("release", ["1.2.3", None])
def test_a_dataset_says_what_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str | None) -> None:
    """The library may be used from its sources, without being installed."""

    def version(name: str) -> str:
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(builder, "version", version)
    create(tmp_path / "g", *EMPTY)
    assert read_catalog(tmp_path / "g").dataset["created_by"] == f"featstore {release or '(not installed)'}"


# --- .npy files from outside ----------------------------------------------------------------------------------------------------


def header(text: str, version: int = 1, data: bytes = b"", length: int | None = None) -> bytes:
    raw = text.encode()
    size = len(raw) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + raw + data


OK = "{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}"


def test_npy_control(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(header(OK, data=bytes(16)))
    assert open_source("x", tmp_path / "x.npy").shape == (2,)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", FormatError),
        (b"\x93NUMPY", FormatError),
        (b"PK\x03\x04" + bytes(20), FormatError),
        (header(OK, version=4, data=bytes(16)), FormatError),
        (header(OK, version=2, length=2**32 - 1), FormatError),
        (header(OK, version=1, length=60_000), CorruptionError),
        (header(OK, data=bytes(15)), CorruptionError),
        (header(OK, data=bytes(17)), CorruptionError),
        (header(OK), CorruptionError),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", data=bytes(8)), FormatError),
        (header("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,)}", data=bytes(8)), FormatError),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"), FormatError),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (2.0,)}", data=bytes(16)), FormatError),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999999999999,)}"), FormatError),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387903,)}"), CorruptionError),
        (header("{'descr': '<f8', 'fortran_order': 1, 'shape': (2,)}", data=bytes(16)), FormatError),
        (header("{'descr': '<f8', 'shape': (2,)}", data=bytes(16)), FormatError),
        (header("{'descr': '<q99', 'fortran_order': False, 'shape': (2,)}", data=bytes(16)), FormatError),
        (header("__import__('os').abort()"), FormatError),
        (header("(" * 3000), FormatError),
        (header("[]"), FormatError),
    ],
)
def test_hostile_npy_files(tmp_path: Path, data: bytes, error: type[Exception]) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(error):
        open_source("x", tmp_path / "x.npy")


def test_npy_of_pickles_is_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(FormatError, match="does not describe an array of numbers"):
        open_source("x", tmp_path / "x.npy")


@given(st.binary(max_size=300))
def test_arbitrary_npy_headers(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text)
    with pytest.raises((FeatstoreError, TypeError, ValueError)):
        open_source("x", tmp_path / "x.npy")


def test_npy_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = npy(tmp_path / "x.npy", np.zeros((1000, 10)), (1, 0))
    blocks = open_source("x", path).blocks(800)
    next(blocks)
    os.truncate(path, 4000)
    with pytest.raises(CorruptionError, match="ends"):
        list(blocks)


def test_npy_that_is_missing_or_a_fifo(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        create(tmp_path / "g", tmp_path / "absent.npy", [])
    os.mkfifo(tmp_path / "fifo.npy")
    with pytest.raises(FormatError, match="FIFO"):
        create(tmp_path / "g", tmp_path / "fifo.npy", [])


# --- the topology ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 400), st.integers(0, 2**32))
def test_any_graph_in_canonical_form(tmp_path: Path, n: int, n_edges: int, seed: int) -> None:
    indptr, indices = random_csc(n, n_edges, seed)
    create(tmp_path / "g", indptr, indices, overwrite=True)
    check_topology(tmp_path / "g", indptr, indices)


@pytest.mark.parametrize("seed", one_in(3, range(4)))
def test_lists_longer_than_memory(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of almost nothing: blocks of 1,024, lists of up to 30,000 go through spill files."""
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    rng = np.random.default_rng(seed)
    degrees = rng.choice([0, 1, 5, 900, 1500, 30_000], 40)
    indptr = np.concatenate(([0], np.cumsum(degrees)))
    n = 40 if seed % 2 else 5000  # more nodes than the degrees of which are counted in passing
    indptr = np.concatenate((indptr, np.full(n - 40, indptr[-1])))
    indices = (rng.random(indptr[-1]) ** 3 * n).astype(np.int64)
    create(tmp_path / "g", indptr, indices, memory=1000)
    check_topology(tmp_path / "g", indptr, indices)
    assert not [entry for entry in os.listdir(tmp_path / "g") if "spill" in entry]


def test_lists_that_are_sorted_already_take_the_short_way_to_the_same(tmp_path: Path) -> None:
    indptr, indices = random_csc(100, 3000)
    ascending = canonical(indptr, indices)
    found, order = building._sort_lists(ascending.copy(), np.diff(indptr), 100)
    np.testing.assert_array_equal(found, ascending)
    assert order is None
    # A key with the place, the key alone, two keys: as many bits as one word holds, or more.
    for n in (100, 2**54, 2**60):
        found, order = building._sort_lists(indices.copy(), np.diff(indptr), n)
        np.testing.assert_array_equal(found, ascending)
        owner = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        np.testing.assert_array_equal(order, np.lexsort((indices, owner)))


BAD_OFFSETS = [
    ([], [], "indptr is empty"),
    ([1, 2], [0, 0], r"indptr\[0\] is 1: offsets ascend from 0 to 2, the number of indices"),
    ([0, 2, 1, 3], [0, 0, 0], r"indptr\[2\] is 1, after 2: offsets ascend"),
    ([0, 4, 3], [0, 0, 0], r"indptr\[1\] is 4, after 0"),
    ([0, 1, -1, 3], [0, 0, 0], r"indptr\[2\] is -1, after 1"),
    ([0, 2**62, 3], [0, 0, 0], r"indptr\[1\] is 4611686018427387904, after 0"),
    ([0, 1], [0, 0], r"indptr\[1\], the last one, is 1: offsets ascend from 0 to 2"),
    ([0], [0], r"indptr\[0\], the last one, is 0: offsets ascend from 0 to 1"),
    (np.array([2**63, 1], np.uint64), [0], r"indptr\[0\] is 9223372036854775808: "),
    (np.array([0, 2**63 + 5], np.uint64), [0], r"indptr\[1\] is 9223372036854775813, after 0"),
]
BAD_IDS = [
    ([0, 1, 2], [1, 2], r"indices\[1\] is 2, which is not a node: ids are 0 … 1"),
    ([0, 1, 2], [-1, 0], r"indices\[0\] is -1"),
    ([0, 1], np.array([2**64 - 1], np.uint64), r"indices\[0\] is 18446744073709551615"),
]


def as_array(values: Any) -> np.ndarray:
    return np.asarray(values, None if len(values) else np.int64)


def in_blocks(values: np.ndarray) -> Any:
    return values.shape, values.dtype, blocks_of(values, 1)


@pytest.mark.parametrize(("indptr", "indices", "match"), BAD_OFFSETS)
def test_bad_offsets_are_found_before_anything_is_made(
    tmp_path: Path, indptr: Any, indices: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=match):  # where they can be read but once, they are found as they are read
        create(tmp_path / "g", in_blocks(as_array(indptr)), as_array(indices))
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(building, "BuildDirectory", None)
    for form in ("array", "tensor", "npy 1"):
        if form != "tensor" or as_array(indptr).dtype != np.uint64:
            with pytest.raises(ValueError, match=match):
                create(tmp_path / "g", FORMS[form](as_array(indptr), tmp_path), as_array(indices))


@pytest.mark.parametrize(("indptr", "indices", "match"), BAD_IDS)
def test_an_id_that_is_no_node_is_named(tmp_path: Path, indptr: Any, indices: Any, match: str) -> None:
    for as_input in (as_array, lambda values: in_blocks(as_array(values))):
        with pytest.raises(IndexError, match=match):
            create(tmp_path / "g", as_input(indptr), as_input(indices))
        assert os.listdir(tmp_path) == []


@given(st.data())
def test_the_first_wrong_entry_is_named(data: st.DataObject) -> None:
    """However many are read at once, positions count from the first one."""
    size = st.integers(1, 50)
    indptr, indices = random_csc(data.draw(st.integers(1, 40)), 300, data.draw(st.integers(0, 9)))
    n = len(indptr) - 1
    wrong = sorted(data.draw(st.sets(st.integers(0, 299), min_size=1, max_size=3)))
    indices[wrong] = n
    ids = CscInput(indptr, indices).ids(8 * data.draw(size))
    with pytest.raises(IndexError, match=rf"^indices\[{wrong[0]}\] is {n}, which is not a node"):
        for first in range(0, 300, step := data.draw(size)):
            ids(min(step, 300 - first))
    fall = data.draw(st.integers(1, n))
    indptr[fall:] = data.draw(st.sampled_from([-1, 301, 2**62]))
    offsets = CscInput(indptr, indices).offsets(data.draw(size), 8 * data.draw(size))
    with pytest.raises(ValueError, match=rf"^indptr\[{fall}\] is {indptr[fall]}, after {indptr[fall - 1]}: "):
        list(offsets)


def test_a_wrong_id_in_a_list_longer_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.creation.options.LEAST_MEMORY", 0)
    indices = np.zeros(5000, np.int64)
    indices[4321] = 2
    with pytest.raises(IndexError, match=r"indices\[4321\] is 2"):
        create(tmp_path / "g", [0, 7, 5000], indices, memory=1000)
    assert os.listdir(tmp_path) == []


def test_topologies_of_the_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="indptr must hold integers, not float64"):
        create(tmp_path / "g", [0, np.nan, 1], [0])
    with pytest.raises(ValueError, match=r"indices: .*inhomogeneous"):
        create(tmp_path / "g", [0, 1], [[0], [0, 1]])
    with pytest.raises(TypeError, match="must hold integers"):
        create(tmp_path / "g", np.zeros(3, np.int64), np.zeros(0, bool))
    with pytest.raises(ValueError, match=r"one dimension, not shape \(3, 1\)$"):
        create(tmp_path / "g", np.zeros((3, 1), np.int64), [])
    with pytest.raises(ValueError, match="from_edge_index takes pairs"):
        create(tmp_path / "g", np.zeros((2, 5), np.int64), [])
    with pytest.raises(ValueError, match="'csc', 'chunked'"):
        create(tmp_path / "g", *EMPTY, topology="coo")
    with pytest.raises(BudgetError) as caught:
        create(tmp_path / "g", *EMPTY, memory="1MB")
    assert caught.value.needed == 8 << 20


# --- bounded memory -------------------------------------------------------------------------------------------------------------


def test_a_stream_ten_times_the_memory(tmp_path: Path) -> None:
    """Features of 160 MB and 4 million edges from generators, within a bound of 16 MB."""
    script = textwrap.dedent(f"""
        import resource, sys, numpy as np
        from tests.support.making import create
        n, d, e = 100_000, 400, 4_000_000
        rng = np.random.default_rng(0)
        def x():
            for first in range(0, n, 1000):
                yield np.full((1000, d), first, np.float32)
        def indices():
            for first in range(0, e, 10_000):
                yield rng.integers(0, n, 10_000)
        def indptr():
            for first in range(0, n, 1000):
                yield np.arange(first, first + 1000) * (e // n)
            yield np.array([e])
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        create({str(tmp_path / "warm")!r}, np.zeros(2, np.int64), [], {{"x": np.zeros((1, 4))}}, memory="16MiB")
        before = peak()
        create({str(tmp_path / "g")!r}, ((n + 1,), "int64", indptr()), ((e,), "int64", indices()),
               {{"x": ((n, d), "float32", x())}}, memory="16MiB")
        print(peak() - before)
    """)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 16 << 20
    catalog = read_catalog(tmp_path / "g")
    assert (catalog.num_nodes, catalog.num_edges) == (100_000, 4_000_000)
    shutil.rmtree(tmp_path / "g")


def test_no_progress_bar_off_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "g", *EMPTY, progress=True)
    assert capsys.readouterr() == ("", "")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    create(tmp_path / "h", np.zeros(3, np.int64), [], {"x": np.zeros((2, 2))}, progress=True)
    assert "create" in terminal.getvalue()
    quiet = Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    create(tmp_path / "i", *EMPTY, progress=False)
    assert quiet.getvalue() == ""
