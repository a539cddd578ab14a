"""Members of archives and raw arrays, block by block, against NumPy; damage is named."""

from __future__ import annotations

import errno
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from featstore.adapters.datasets.arrays import Archive, RawSource, open_array
from featstore.creation.source import Source, numpy_dtype
from featstore.errors import CorruptionError, FormatError
from featstore.testing.faults import sweep
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses


def whole(source: Source, max_bytes: int) -> Any:
    """Read a source to its end in blocks, which are as small as they are asked to be."""
    blocks = list(source.blocks(max_bytes))
    assert all(len(block) <= max(1, max_bytes // max(1, source.row_bytes)) for block in blocks)
    rows = np.concatenate(blocks) if blocks else np.empty((0, source.row_bytes), np.uint8)
    return rows.view(numpy_dtype(source.dtype)).reshape(source.shape)


@given(
    array=arrays.arrays(
        st.sampled_from(["<f4", ">f4", "<i8", "<i4", "u1", "?", "<f2"]),
        st.tuples(st.integers(0, 40), st.integers(1, 5)) | st.tuples(st.integers(0, 90)),
        elements=st.nothing() | st.integers(0, 1),
    ),
    fortran=st.booleans(),
    compressed=st.booleans(),
    max_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_any_member(
    array: Any, fortran: bool, compressed: bool, max_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("a") / "a.npz"
    (np.savez_compressed if compressed else np.savez)(
        path, before=np.arange(9), it=np.asarray(array, order="F" if fortran else "C")
    )
    source = Archive(path).rows("it")
    for _ in range(2):  # a source can be read again
        np.testing.assert_array_equal(whole(source, max_bytes), array)


@given(n=st.integers(0, 300), fortran=st.booleans(), dtype=st.sampled_from(["<i8", "<i4", ">i4", "<u4"]), k=st.integers(1, 400))
def test_columns(n: int, fortran: bool, dtype: str, k: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("a") / "a.npz"
    edges = np.arange(2 * n).reshape(2, n).astype(dtype)
    np.savez_compressed(path, e=np.asarray(edges, order="F" if fortran else "C"))
    blocks = list(Archive(path).rows("e", wider=True).columns(k))
    np.testing.assert_array_equal(np.concatenate([np.empty((2, 0), dtype), *blocks], axis=1), edges)


def test_every_flipped_bit_and_every_cut_of_an_archive(tmp_path: Path) -> None:
    """The rows are those that were written, or there is a named error."""
    array = np.arange(300, dtype=np.float32).reshape(60, 5)
    path = tmp_path / "a.npz"
    for compressed in (False, True):
        (np.savez_compressed if compressed else np.savez)(path, a=array)
        good = path.read_bytes()
        wrong = [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :] for i in range(0, len(good), 7)]
        n_errors = 0
        for bad in (*wrong, *(good[:i] for i in range(0, len(good), 37))):
            path.write_bytes(bad)
            try:
                found = whole(Archive(path).rows("a"), 256)
            except (FormatError, CorruptionError) as error:
                assert "a.npz" in str(error)
                n_errors += 1
            else:
                np.testing.assert_array_equal(found, array)
        assert n_errors > len(wrong) // 2


def read_with_faults(folder: str, compressed: bool) -> None:
    """Fail each read of an archive in turn; in the child."""
    array = np.random.default_rng(0).integers(0, 1 << 30, (9000, 5))
    path = Path(folder) / "a.npz"
    (np.savez_compressed if compressed else np.savez)(path, small=np.arange(3), a=array, b=np.asfortranarray(array))
    n_failed = 0
    for fault in sweep(folder, "read", "EIO"):
        try:
            with fault:
                archive = Archive(path)
                assert archive.small("small").tolist() == [0, 1, 2]
                for name in ("a", "b"):
                    np.testing.assert_array_equal(whole(archive.rows(name), 1 << 16), array)
        except OSError as error:
            assert type(error) is OSError
            assert (error.errno, error.filename) == (errno.EIO, str(path))
            n_failed += 1
        else:
            assert not fault.fired
    assert n_failed > 20


@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize("compressed", [False, True])
def test_every_failing_read_of_an_archive_is_an_io_error_with_its_path(compressed: bool, tmp_path: Path) -> None:
    run_in_fork(read_with_faults, str(tmp_path), compressed)


def test_what_is_no_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text.npy", b"hello")
        archive.writestr("long.npy", b"\x93NUMPY\x01\x00v\x00" + b"x" * 300)
    for name in ("text", "long"):
        refuses((FormatError, CorruptionError), "a.npz", lambda: Archive(path).rows(name))
    refuses(FormatError, "no array 'other'; it has text, long", lambda: Archive(path).rows("other"))
    np.savez(path, big=np.zeros(1 << 18), objects=np.array([None]))
    refuses(FormatError, "should be a small array", lambda: Archive(path).small("big"))
    refuses(FormatError, "objects: the .npy header does not describe", lambda: Archive(path).small("objects"))
    with zipfile.ZipFile(path, "w"):
        pass
    refuses(FormatError, "has no arrays", lambda: Archive(path))
    path.write_bytes(b"")
    refuses(FormatError, "a.npz", lambda: Archive(path))


def test_raw_arrays(tmp_path: Path) -> None:
    path, array = tmp_path / "raw.npy", np.arange(84, dtype=np.float32).reshape(12, 7)
    array.tofile(path)
    for max_bytes in (1, 60, 1 << 20):
        np.testing.assert_array_equal(whole(RawSource("rows", str(path), (12, 7), "float32"), max_bytes), array)
    np.testing.assert_array_equal(whole(open_array("rows", path, 12, raw=("float32", None)), 99), array)
    refuses(FormatError, "has 364 bytes, and the file has 336", lambda: RawSource("rows", str(path), (13, 7), "float32"))
    refuses(FormatError, "cannot have 11 rows of float32", lambda: open_array("rows", path, 11, raw=("float32", None)))
    refuses(FormatError, "raw array of unknown size", lambda: open_array("rows", path, raw=("float32", None)))
    refuses(FormatError, "raw array of unknown size", lambda: open_array("rows", path, 12))
    np.save(path, array)
    np.testing.assert_array_equal(whole(open_array("rows", path, 12, raw=("float64", (1,))), 99), array)
    refuses(FormatError, "rows has 12 rows; expected 13", lambda: open_array("rows", path, 13))
    path.write_bytes(b"")
    refuses(FormatError, "the file is empty", lambda: open_array("rows", path))


def test_a_raw_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "raw.npy"
    np.zeros((12, 7), np.float32).tofile(path)
    source = RawSource("rows", str(path), (12, 7), "float32")
    path.write_bytes(path.read_bytes()[:-1])
    refuses(CorruptionError, "raw.npy", lambda: whole(source, 64))
