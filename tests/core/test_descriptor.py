"""Descriptors: they own an open file, whoever holds them, and give it up once."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from featstore._core.descriptor import Descriptor, close, dup_fd, memory_fd, open_fd
from featstore._core.io import PAGE_BYTES, File


def is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{int(fd)}")


def makers(path: Path) -> list[Descriptor]:
    first = open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
    return [first, dup_fd(first), memory_fd("test")]


def test_a_file_closes_with_the_last_reference(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    for fd in makers(tmp_path / "file"):
        assert isinstance(fd, int)
        assert not os.get_inheritable(fd)
    held = makers(tmp_path / "file")
    numbers, again = [int(each) for each in held], list(held)
    assert os.pread(held[0], 3, 0) == os.pread(held[1], 3, 0) == b"abc"
    assert os.pread(held[2], 3, 0) == b""
    held.clear()
    assert all(map(is_open, numbers))
    del again, fd
    assert not any(map(is_open, numbers))


def test_closing_again_does_nothing(tmp_path: Path) -> None:
    fd = open_fd(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    number = int(fd)
    close(fd)
    assert not is_open(number)
    with open(tmp_path / "other", "w") as other:
        assert other.fileno() == number  # which is another file's now
        close(fd)
        del fd
        other.write("whole")
    assert (tmp_path / "other").read_text() == "whole"
    with pytest.raises(OSError, match="Bad file descriptor"):
        close(number)  # a number that owns nothing is closed as by os.close


def test_opens_as_os_open_does(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_fd(tmp_path / "none", os.O_RDONLY)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / "none")
    folder = open_fd(tmp_path, os.O_PATH | os.O_DIRECTORY)
    made = open_fd("made", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    assert os.fstat(made).st_mode & 0o777 == 0o600
    assert (tmp_path / "made").exists()


def test_a_file_of_the_core_takes_it_over(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(PAGE_BYTES))
    fd = open_fd(path, os.O_RDONLY)
    file = File(path, PAGE_BYTES, 1, PAGE_BYTES, 1, 0, PAGE_BYTES, False, fd)
    close(fd)
    del fd
    assert is_open(file.fd_number)
    number = file.fd_number
    file.close()
    assert not is_open(number)
    fd = open_fd(path, os.O_RDONLY)
    number = int(fd)
    with pytest.raises(Exception, match="the catalog says"):
        File(path, PAGE_BYTES, 1, PAGE_BYTES, 1, 0, 2 * PAGE_BYTES, False, fd)
    assert not is_open(number)


def opened(path: Path) -> None:
    fd = open_fd(path, os.O_RDONLY)
    os.fstat(fd)


def test_an_interrupt_before_the_assignment_leaves_nothing_open(tmp_path: Path) -> None:
    """After each bytecode of a function that opens a file, KeyboardInterrupt; the control assigns a number that owns nothing."""
    code, before = opened.__code__, set(os.listdir("/proc/self/fd"))

    def interrupted(k: int) -> bool:
        left = k

        def step(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if frame.f_code is not code:
                return None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left == 0:
                raise KeyboardInterrupt
            return step

        sys.settrace(step)
        try:
            opened(tmp_path)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    k = 1
    while interrupted(k):
        k += 1
        assert set(os.listdir("/proc/self/fd")) == before, k
    assert k > 10
