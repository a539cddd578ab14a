"""Row files: headers from outside, layout on disk, checksums, and what stands when a write fails."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from featstore.errors import CorruptionError, FeatstoreError, FormatError, VersionError
from featstore.storage import format as fmt
from featstore.storage import writer as writing
from featstore.storage.calls import close_quietly, open_regular
from featstore.storage.format import DTYPES, Header, file_seed, resolve_inside, sums_seed
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.writer import FileRecord, RowFileWriter, write_file
from tests.support.cases import each
from tests.support.rowfiles import PAGE, check_sums, file_rows

ID = bytes(range(16))


def write(directory: Path, rows: np.ndarray, name: str = "x.rows", *, block: int | None = None, **options: object) -> FileRecord:
    layout = choose_layout(rows.shape[1])
    with RowFileWriter(directory, name, layout, kind="feature", dtype="uint8", **options) as out:  # type: ignore[arg-type]
        for first in range(0, len(rows), block or max(1, len(rows))):
            out.write(rows[first : first + (block or len(rows))])
        return out.commit()


def random_rows(n: int, row_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes), dtype=np.uint8)


# --- seeds and header -----------------------------------------------------------------------------------------------------------


def test_seeds_are_fixed_by_the_format() -> None:
    packed = b"feature".ljust(32, b"\0") + ID + struct.pack("<Q", 3)
    assert file_seed("feature", ID, 3) == xxhash.xxh3_64_intdigest(packed) == file_seed("feature", ID.hex(), 3)
    assert sums_seed(5) == xxhash.xxh3_64_intdigest(b"sums", 5)
    seeds = {file_seed(kind, ID, generation) for kind in ("feature", "data") for generation in (1, 2)}
    assert len(seeds) == 4


def test_header_bytes_are_those_of_the_table() -> None:
    page = Header("feature", ID, 7, RowLayout(400, 10, 4096), 123, "float32").pack()
    expected = b"FEATSTOR" + struct.pack("<II", 1, 0x01020304) + b"feature".ljust(32, b"\0") + ID
    expected += struct.pack("<QQQQQHH", 7, 123, 400, 10, 4096, 9, 4)
    assert page[: len(expected)] == expected
    assert not any(page[len(expected) : 4088])
    assert struct.unpack("<Q", page[4088:])[0] == xxhash.xxh3_64_intdigest(page[:4088])
    assert len(page) == PAGE


@given(
    kind=st.sampled_from(["feature", "indptr", "k" * 32]),
    file_id=st.binary(min_size=16, max_size=16),
    generation=st.integers(1, 2**63),
    row_items=st.integers(1, 2000),
    n_rows=st.integers(0, 2**40),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_header_round_trip(kind: str, file_id: bytes, generation: int, row_items: int, n_rows: int, dtype: str) -> None:
    header = Header(kind, file_id, generation, choose_layout(row_items * DTYPES[dtype][1]), n_rows, dtype)
    assert Header.unpack(header.pack(), "f") == header


def forge(**changes: object) -> bytes:
    """A header whose checksum is right and whose fields need not be."""
    values: dict[str, object] = {
        "magic": b"FEATSTOR", "version": 1, "mark": 0x01020304, "kind": b"feature", "id": ID, "generation": 1, "rows": 10,
        "row_bytes": 4, "group_rows": 1, "group_bytes": 4, "code": 9, "itemsize": 4,
    }  # fmt: skip
    tail = changes.pop("tail", b"")
    assert isinstance(tail, bytes)
    values.update(changes)
    body = (struct.pack("<8sII32s16sQQQQQHH", *values.values()) + tail).ljust(4088, b"\0")
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_forged_header_control() -> None:
    assert Header.unpack(forge(), "f").n_rows == 10


HOSTILE: dict[str, list[Any]] = {
    "magic": [b"NOTOURS!"],
    "kind": [b"", b"\xff\xfe", b"a\0b"],
    "rows": [2**63, 2**64 - 1, 2**61],
    "row_bytes": [0],
    "group_rows": [0],
    "group_bytes": [0, 3, 100, 2**63],
    "code": [0, 999],
    "itemsize": [8],
    "tail": [b"\1"],
}
CHANGES: list[tuple[dict[str, Any], type[Exception]]] = [({name: value}, FormatError) for name, value in each(HOSTILE)]
CHANGES += [({"row_bytes": n, "group_bytes": n}, FormatError) for n in (2**32, 2**64 - 4, 6)]
CHANGES += [({"group_rows": 2**63, "group_bytes": 4096}, FormatError)]
CHANGES += [({name: value}, VersionError) for name, value in each({"version": [2, 0], "mark": [0x04030201]})]


@pytest.mark.parametrize(("changes", "kind"), CHANGES)
def test_hostile_header_is_refused(changes: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="hostile"):
        Header.unpack(forge(**changes), "hostile")


def test_any_flipped_bit_of_a_header_is_found() -> None:
    page = Header("feature", ID, 1, RowLayout(4, 1, 4), 10, "float32").pack()
    assert Header.unpack(page, "f").n_rows == 10  # control
    rng = np.random.default_rng(0)
    for bit in [*range(130 * 8), *range(4088 * 8, 4096 * 8), *rng.integers(0, PAGE * 8, 200).tolist()]:
        damaged = bytearray(page)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError, match="damaged"):
            Header.unpack(bytes(damaged), "f")


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_never_a_header(data: bytes) -> None:
    with pytest.raises(FeatstoreError):
        Header.unpack(data, "f")


@given(st.binary(max_size=4088 - 8))
def test_arbitrary_fields_under_a_right_checksum_parse_or_are_refused(fields: bytes) -> None:
    body = (b"FEATSTOR" + fields).ljust(4088, b"\0")
    with contextlib.suppress(FormatError):
        Header.unpack(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)), "f")


@pytest.mark.parametrize("n_bytes", [0, 1, PAGE - 1])
def test_a_header_that_is_cut_short_is_corruption_with_its_offset(n_bytes: int) -> None:
    header = Header("feature", ID, 1, RowLayout(4, 1, 4), 2000, "float32")
    assert header.file_bytes == 3 * PAGE
    with pytest.raises(CorruptionError) as caught:
        Header.unpack(header.pack()[:n_bytes], "f")
    assert caught.value.offset == n_bytes
    assert caught.value.filename == "f"


# --- paths ----------------------------------------------------------------------------------------------------------------------


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"abc")
    fd, size = open_regular(target)  # control
    close_quietly(fd)
    assert size == 3
    os.mkfifo(tmp_path / "fifo")  # a plain open of it would wait for ever
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(target)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    server.close()
    for name, what in (("fifo", "FIFO"), ("directory", "directory"), ("link", "symbolic link"), ("socket", "socket")):
        with pytest.raises(FormatError, match=what):
            open_regular(tmp_path / name)
    with pytest.raises(FormatError, match="device"):
        open_regular("/dev/null")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "..", "../x", "a/../../x", "a//x", "./x", "a/.", "x\0y"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match="outside"):
        resolve_inside(tmp_path, name)


def test_names_do_not_pass_through_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    assert resolve_inside(tmp_path, "real/x") == str(tmp_path / "real/x")
    with pytest.raises(FormatError, match="symbolic link"):
        resolve_inside(tmp_path, "alias/x")


# --- the writer -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [1, 4, 7, 8, 400, 511, 512, 3072, 4095, 4096, 4097, 5732, 65536, 1 << 20])
@pytest.mark.parametrize("n", [0, 1, 3, 700])
def test_rows_come_back_and_every_page_has_its_sum(tmp_path: Path, row_bytes: int, n: int) -> None:
    if row_bytes > 5732:
        n = min(n, 5)
    rows = random_rows(n, row_bytes)
    record = write(tmp_path, rows, block=37, buffer_bytes=3 * PAGE)
    assert sorted(os.listdir(tmp_path)) == ["x.rows", "x.rows.sums"]
    np.testing.assert_array_equal(file_rows(tmp_path, record), rows)
    check_sums(tmp_path, record)
    header = Header.unpack((tmp_path / "x.rows").read_bytes()[:PAGE], "x.rows")
    assert header == record.header()


def test_many_pages_of_sums(tmp_path: Path) -> None:
    rows = random_rows(3 * 511 + 17, PAGE)
    record = write(tmp_path, rows, block=100)
    assert record.n_sums_bytes == 4 * PAGE
    check_sums(tmp_path, record)
    record = write(tmp_path, rows[:510], name="exact.rows")
    assert record.n_sums_bytes == PAGE
    check_sums(tmp_path, record)
    record = write(tmp_path, rows[:511], name="over.rows")
    assert record.n_sums_bytes == 2 * PAGE
    check_sums(tmp_path, record)


@given(st.lists(st.integers(0, 50), max_size=12), st.sampled_from([3, 8, 100, 1000, 2047, 2048, 2049, 4096, 5000]))
def test_blocks_of_any_size_give_the_same_bytes(tmp_path: Path, sizes: list[int], row_bytes: int) -> None:
    rows = random_rows(sum(sizes), row_bytes)
    layout = choose_layout(row_bytes)
    with RowFileWriter(tmp_path, "x.rows", layout, kind="feature", dtype="uint8", buffer_bytes=2 * PAGE) as out:
        first = 0
        for k in sizes:
            out.write(rows[first : first + k])
            first += k
        record = out.commit()
    np.testing.assert_array_equal(file_rows(tmp_path, record), rows)
    raw = np.fromfile(tmp_path / "x.rows", np.uint8)
    used = np.zeros(len(raw), bool)
    used[:PAGE] = True
    for i in range(len(rows)):
        used[PAGE + layout.offset(i) : PAGE + layout.offset(i) + row_bytes] = True
    assert not raw[~used].any()  # padding is zero
    check_sums(tmp_path, record)


def test_wrong_blocks_are_refused_and_change_nothing(tmp_path: Path) -> None:
    with RowFileWriter(tmp_path, "x.rows", choose_layout(4), kind="feature", dtype="uint8") as out:
        for bad in (np.zeros((2, 5), np.uint8), np.zeros((2, 4), np.int8), np.zeros(4, np.uint8)):
            with pytest.raises(ValueError, match="rows must be uint8"):
                out.write(bad)
        out.write(np.ones((2, 4), np.uint8))
        assert out.commit().n_rows == 2
        with pytest.raises(ValueError, match="closed"):
            out.write(np.ones((2, 4), np.uint8))
        with pytest.raises(ValueError, match="closed"):
            out.commit()


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with RowFileWriter(tmp_path, "x.rows", choose_layout(4), kind="feature", dtype="uint8") as out:
        out.write(np.ones((5000, 4), np.uint8))
        assert len(os.listdir(tmp_path)) == 2
    assert os.listdir(tmp_path) == []


class Calls:
    """Count the calls of ``os`` functions, and fail or shorten the k-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, code: int) -> None:
        self.n = 0
        self.failed = 0
        self.names: list[str] = []
        for name in ("pwrite", "fsync", "rename", "open"):
            monkeypatch.setattr(writing.os, name, self._wrap(name, getattr(os, name), fail_at, code))

    def _wrap(self, name: str, real: object, fail_at: int, code: int) -> object:
        def call(*arguments: object, **options: object) -> object:
            self.n += 1
            self.names.append(name)
            if self.n == fail_at:
                self.failed += 1
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)  # type: ignore[operator]

        return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_failing_call_leaves_nothing_behind(tmp_path: Path, code: int) -> None:
    rows = random_rows(5000, 16)
    k, failed = 0, True
    while failed:
        k += 1
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, k, code)
            try:
                write(tmp_path, rows, block=1000, buffer_bytes=4 * PAGE)
                failed = False
            except OSError as error:
                caught = error
        if failed:
            assert (caught.errno, calls.failed) == (code, 1)
            # A failed fsync is not tried again.
            assert calls.names[k - 1] != "fsync" or "fsync" not in calls.names[k:]
            assert os.listdir(tmp_path) == []
    assert k > 12  # control: it reached the writes, both fsyncs, both renames and the directory
    assert sorted(os.listdir(tmp_path)) == ["x.rows", "x.rows.sums"]


def test_short_writes_go_on_at_the_exact_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    real = os.pwrite
    n_short = 0

    def short(fd: int, data: memoryview, offset: int) -> int:
        nonlocal n_short
        n = int(rng.integers(1, len(data) + 1))
        n_short += n < len(data)
        return real(fd, data[:n], offset)

    monkeypatch.setattr(writing.os, "pwrite", short)
    rows = random_rows(3000, 20)
    record = write(tmp_path, rows)
    assert n_short > 5
    np.testing.assert_array_equal(file_rows(tmp_path, record), rows)
    check_sums(tmp_path, record)


def test_order_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files are synced before either has its name, and the directory after both have."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        events.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        real_fsync(fd)

    def rename(source: str, target: str) -> None:
        events.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(writing.os, "fsync", fsync)
    monkeypatch.setattr(writing.os, "rename", rename)
    write(tmp_path, random_rows(10, 8))
    assert events == ["file", "file", "rename", "rename", "directory"]
    events.clear()
    write_file(tmp_path / "small", b"abc")
    assert events == ["file", "rename", "directory"]


def test_write_file_keeps_the_old_one_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "small"
    write_file(path, b"old")
    for k in (1, 2, 3, 4):
        with pytest.MonkeyPatch.context() as patch:
            Calls(patch, k, errno.ENOSPC)
            with pytest.raises(OSError, match="No space"):
                write_file(path, b"new")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["small"]
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_open_regular_refuses_what_turned_into_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the open somebody puts a link in the file's place."""
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    regular = os.lstat(tmp_path / "file")
    monkeypatch.setattr(fmt.os, "lstat", lambda path, dir_fd=None: regular)
    with pytest.raises(FormatError, match="symbolic link"):
        open_regular(tmp_path / "link")
