"""Spill files, beside lists: values come back in the order of writing; files go when they are read, and with their owner."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featstore.errors import CorruptionError
from featstore.storage import spill
from featstore.storage.spill import SpillFile, SpillFiles

RECORD = np.dtype([("at", "<i8"), ("hashes", "<u8", 2)])
INT = np.dtype("<i4")


@given(
    dtype=st.sampled_from([INT, np.dtype("<f8"), RECORD]),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), max_size=30),
    at_once=st.integers(1, 12),
)
def test_equal_lists_in_any_order_of_writes_and_reads(
    tmp_path_factory: Any, dtype: np.dtype[Any], steps: list[tuple[int, int, bool]], at_once: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("spill"), np.random.default_rng(0)
    with SpillFiles(str(folder), dtype, 3) as files:
        expected: list[list[bytes]] = [[], [], []]
        for number, n, is_read in steps:
            if is_read:
                n = min(n, len(expected[number]))
                if n:
                    assert [each.tobytes() for each in files[number].take(n)] == expected[number][:n]
                    del expected[number][:n]
            else:
                values = np.frombuffer(rng.bytes(n * dtype.itemsize), dtype)
                files[number].append(values)
                expected[number] += [each.tobytes() for each in values]
        for file, values_left in zip(files, expected, strict=True):
            blocks = list(file.drain(at_once))
            assert all(len(block) == at_once for block in blocks[:-1])
            assert [each.tobytes() for block in blocks for each in block] == values_left
            assert not os.path.exists(file.path) or not file.n_written
    assert not list(folder.iterdir())


def test_values_of_any_form_are_converted(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 1) as files:
        files[0].append(np.arange(10)[::3])
        files[0].append(np.empty(0, np.int64))
        assert files[0].take(4).tolist() == [0, 3, 6, 9]
        assert files[0].take(0).tolist() == []


def test_files_that_another_object_wrote_are_read_and_written_on(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 1) as files:
        files[0].append(np.arange(5))
        other = SpillFile(files[0].path, INT, 5)
        other.append(np.arange(5, 8))
        assert np.concatenate(list(other.drain(3))).tolist() == [*range(8)]
        assert not list(tmp_path.iterdir())


def test_all_files_go_with_their_owner(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 300) as files, SpillFiles(str(tmp_path), INT, 2) as others:
        before = len(os.listdir("/proc/self/fd"))
        for file in files:
            file.append(np.arange(3))
        assert len(os.listdir("/proc/self/fd")) == before
        others[1].append(np.arange(3))
        assert len(list(tmp_path.iterdir())) == 301
        next(files[7].drain(1))
        next(iter(files[8].drain(3)))
        files.close()
        assert [str(each) for each in tmp_path.iterdir()] == [others[1].path]
        files.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 1) as files:
        files[0].append(np.arange(9))
        os.truncate(files[0].path, 20)
        with pytest.raises(CorruptionError, match="the file ends 4 bytes early"):
            list(files[0].drain(3))
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_late_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some file systems report it when the file is closed."""

    def close_fd(fd: int, path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    with SpillFiles(str(tmp_path), INT, 2) as files:
        files[1].append(np.arange(2))
        with monkeypatch.context() as patch:
            patch.setattr(spill, "close_fd", close_fd)
            with pytest.raises(OSError, match="Input/output error") as raised:
                files[1].append(np.arange(2))
        assert raised.value.filename == files[1].path
        assert raised.value.filename.endswith("-1.tmp")
        assert files[1].n_written == 2
        files[1].append(np.arange(5, 9))  # in its place
        assert np.concatenate(list(files[1].drain(4))).tolist() == [0, 1, 5, 6, 7, 8]
        with monkeypatch.context() as patch:
            patch.setattr(spill, "close_fd", close_fd)
            with pytest.raises(OSError, match="Input/output error"):
                files[0].append(np.arange(2))
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
