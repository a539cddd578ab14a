"""Section files past the page cache: the same bytes, the same errors, and nothing lost where the file system refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featstore.errors import CorruptionError
from featstore.storage import direct
from featstore.storage.extents import ExtentMap, ExtentWriter
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter
from tests.support.written_rows import opened, write_rows

KINDS = (np.int32, np.int64, np.uint8)


def arrays_of(lengths: list[tuple[int, int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(0, 200, n).astype(KINDS[kind]) for n, kind in lengths]


def write(path: Path, arrays: list[np.ndarray], n_bytes: int) -> SectionFile:
    with SectionWriter(path, "test", direct=n_bytes) as writer:
        assert [writer.append(array) for array in arrays] == list(range(len(arrays)))
        return writer.finish()


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 1, 3, 511, 512, 1023, 1024, 2048, 5000]), st.integers(0, 2)), max_size=9),
    n_bytes=st.sampled_from([4096, 8192, 65536]),
)
def test_what_was_written_is_read(tmp_path: Path, lengths: list[tuple[int, int]], n_bytes: int) -> None:
    """Sizes across pages and buffers; one array at a time and in runs; the file is as long as through the page cache."""
    arrays = arrays_of(lengths)
    files = [write(tmp_path / str(size), arrays, size) for size in (0, n_bytes)]
    try:
        assert os.path.getsize(files[0].path) == os.path.getsize(files[1].path)
        for file in files:
            for first in range(len(arrays)):
                for found, array in zip(file.run(first, len(arrays) - first), arrays[first:], strict=True):
                    assert np.array_equal(found, array)
                    assert found.dtype == array.dtype
                    assert found.flags.aligned
                assert np.array_equal(file[first], arrays[first])
            for first, count in ((0, len(arrays) + 1), (-1, 1), (len(arrays), 1), (0, 0)):
                with pytest.raises(IndexError):
                    file.run(first, count)
    finally:
        for file in files:
            file.remove()
    assert not os.listdir(tmp_path)


def test_direct_reads_are_direct_and_find_damage(tmp_path: Path) -> None:
    arrays = arrays_of([(700, 0), (0, 1), (1500, 1), (700, 0)])
    file = write(tmp_path / "file", arrays, 4096)
    probe = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    assert bool(fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT) == direct.set_direct(probe, True)
    os.close(probe)
    good = Path(file.path).read_bytes()
    n = sum(array.nbytes for array in arrays)
    for at in range(0, n, 131):
        Path(file.path).write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(CorruptionError, match="damaged"):
            file.run(0, 4)
    for length in (0, 1, 2799, 2800, 4096, 8192, n - 1):
        Path(file.path).write_bytes(good[:length])
        with pytest.raises(CorruptionError, match="early"):
            file.run(0, 4)
    Path(file.path).write_bytes(good)
    assert all(np.array_equal(a, b) for a, b in zip(file.run(0, 4), arrays, strict=True))
    file.remove()


@pytest.mark.parametrize("where", ["switch", "transfer"])
def test_where_direct_io_is_refused_the_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """At once, or only by the transfers, as where a device wants coarser pages."""
    pwrite, preadv, refused = os.pwrite, os.preadv, []

    def refusing(real: Any) -> Any:
        def call(fd: int, *rest: Any) -> Any:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                refused.append(fd)
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, *rest)

        return call

    def no_switch(fd: int) -> str:
        refused.append(fd)
        return "buffered: O_DIRECT refused (Invalid argument)"

    if where == "transfer":
        monkeypatch.setattr(os, "pwrite", refusing(pwrite))
        monkeypatch.setattr(os, "preadv", refusing(preadv))
    else:
        monkeypatch.setattr(direct, "direct_mode", no_switch)
    arrays = arrays_of([(3000, 1), (10, 0), (5000, 0)])
    file = write(tmp_path / "file", arrays, 8192)
    assert all(np.array_equal(a, b) for a, b in zip(file.run(0, 3), arrays, strict=True))
    assert len(refused) == 2  # once each, for writing and for reading
    file.remove()


def test_short_transfers_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[: max(4096, len(data) // 8192 * 4096)], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:4096]], offset))
    arrays = arrays_of([(3000, 1), (10, 0), (5000, 0)])
    file = write(tmp_path / "file", arrays, 65536)
    assert all(np.array_equal(a, b) for a, b in zip(file.run(0, 3), arrays, strict=True))
    file.remove()


@pytest.mark.parametrize("k", range(4))
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Whichever of the writes behind the caller's back fails, the caller hears of it and the file is gone."""
    disk, pwrite, left = DiskQuota(None), os.pwrite, [k]

    def failing(fd: int, data: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    writer = SectionWriter(tmp_path / "file", "test", disk, 4096)
    with pytest.raises(OSError, match="No space") as caught, writer:
        for array in arrays_of([(1000, 0)] * 4):
            writer.append(array)
        writer.finish()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    assert disk.used == 0
    assert not os.listdir(tmp_path)
    for n_bytes in (1, 4097):
        with pytest.raises(ValueError, match="whole pages"):
            SectionWriter(tmp_path / "file", "test", disk, n_bytes)
    assert not os.listdir(tmp_path)


def test_a_buffer_that_is_being_written_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write goes on until the second buffer is full, and takes the bytes that were there when it began."""
    pwrite, goes_on = os.pwrite, threading.Event()

    def waiting(fd: int, data: Any, offset: int) -> int:
        goes_on.wait()
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", waiting)
    data = np.random.default_rng(0).integers(0, 256, 4 * 4096).astype(np.uint8)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    writer = direct.DirectWriter(fd, str(tmp_path / "file"), 4096)
    try:
        writer.append(data[:8191])
        goes_on.set()
        writer.append(data[8191:])
        writer.finish()
    finally:
        goes_on.set()
        writer.abort()
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 4097, 8192, 9000])
def test_what_is_flushed_is_there_and_the_rest_follows(tmp_path: Path, cut: int) -> None:
    """From an offset on, with the whole pages told of once and in order."""
    data, pages = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8), []
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    writer = direct.DirectWriter(fd, str(path), 8192, 4096, lambda each: pages.append(each.tobytes()))
    try:
        writer.append(data[:cut])
        writer.flush()
        whole = cut // 4096 * 4096
        assert writer.offset == 4096 + whole
        assert writer.tail.tobytes() == data[whole:cut].tobytes()
        assert path.read_bytes()[4096:] == b"".join(pages) == data[:whole].tobytes()
        writer.append(data[cut:])
        writer.finish()
    finally:
        writer.abort()
        os.close(fd)
    assert path.read_bytes()[4096:] == data.tobytes()
    assert b"".join(pages) == data.tobytes() + bytes(-len(data) % 4096)


def closing_badly(monkeypatch: pytest.MonkeyPatch, n_good: int = 0) -> list[int]:
    """As on a network file system: close reports that earlier writes failed, and the descriptor is gone all the same.

    The first ``n_good`` closes are spared.
    """
    closed, close = [], os.close

    def failing(fd: int) -> None:
        closed.append(fd)
        close(fd)
        if len(closed) > n_good:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "close", failing)
    return closed


@pytest.mark.parametrize("n_bytes", [0, 4096])
def test_a_close_that_fails_is_the_error_and_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes: int
) -> None:
    disk = DiskQuota(None)
    file = write(tmp_path / "good", arrays_of([(10, 0)]), 0)
    writer = SectionWriter(tmp_path / "file", "test", disk, n_bytes)
    writer.append(np.arange(10))
    with monkeypatch.context() as patched:
        closed = closing_badly(patched)
        with pytest.raises(OSError, match="Input/output") as caught, writer:
            writer.finish()
        assert caught.value.errno == errno.EIO
        file.close()  # what was only read loses nothing
        file.close()
        with pytest.raises(ValueError, match="closed"):
            writer.append(np.arange(10))
        writer.abort()
        assert len(closed) == len(set(closed)) == 2  # one each
    assert disk.used == 0
    assert os.listdir(tmp_path) == ["good"]


def test_extents_and_row_files_close_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extents = ExtentMap(np.zeros(1, np.int64), 4)
    record = write_rows(tmp_path, np.zeros((10, 4), np.uint8))
    with opened(tmp_path, record, verify="off") as (file, _):
        with monkeypatch.context() as patched:
            closed = closing_badly(patched)
            file.close()  # what was only read loses nothing
            file.close()
            assert len(closed) == 1
        with monkeypatch.context() as patched:
            closed = closing_badly(patched, n_good=1)  # that of the table of sums
            with pytest.raises(OSError, match="Input/output"), ExtentWriter(tmp_path / "e", extents) as writer:
                writer.finish()
            assert len(closed) == 2
    assert sorted(os.listdir(tmp_path)) == ["rows.bin", "rows.bin.sums"]
