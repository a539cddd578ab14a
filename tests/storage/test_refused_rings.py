"""Refusals of the kernel: rings, at first or later, where pread takes their place unless a ring was asked for by name; direct
reads of a file system that takes ``O_DIRECT``, where the page cache does."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import featstore
from featstore._core.stream import Stream
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import PageStream
from featstore.storage.reader import MIN_ARENA_BYTES, STREAM_THREADS
from featstore.storage.rowfile import RowFile
from featstore.storage.writer import FileRecord
from featstore.testing.faults import Fault, deny_syscalls, forked
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses
from tests.support.written_rows import opened, write_rows

pytestmark = pytest.mark.usefixtures("_program_server")

ROWS = np.random.default_rng(0).integers(0, 256, (90_000, 512), dtype=np.uint8)


def gathers(file: RowFile) -> bool:
    """Whether a gather returns the right rows."""
    ids = np.random.default_rng(1).integers(0, len(ROWS), 300)
    out = np.zeros((300, ROWS.shape[1]), np.uint8)
    file.gather(ids, out)
    return np.array_equal(out, ROWS[ids])


def streams(file: RowFile) -> bool:
    """Whether a stream of the first pages does."""
    out = np.zeros((2000, ROWS.shape[1]), np.uint8)
    with PageStream(file, np.array([[1, out.nbytes // PAGE_BYTES]]), 1 << 20) as stream:
        stream.feed(stream.n_pieces)
        stream.core.scatter(len(out), None, out)
    return np.array_equal(out, ROWS[:2000])


def refused_from_the_start(path: str, x: npt.NDArray[np.float32], error: int) -> None:
    deny_syscalls(["io_uring_setup"], error)
    with featstore.open(path, memory="64MiB") as g:
        store = g.features["x"]
        assert np.array_equal(store[:].numpy(), x)
        assert store.stats()["backend"] == "pread"
        assert os.strerror(error) in store.stats()["reason"]
    caught = refuses(OSError, os.strerror(error), lambda: featstore.open(path, memory="64MiB", backend="io_uring"))
    assert caught.value.errno == error


def refused_with_each_error(path: str) -> None:
    with featstore.open(path, memory="64MiB", backend="io_uring") as g:
        x = g.features["x"][:].numpy()
        assert g.features["x"].stats()["backend"] == "io_uring", "the control: this machine has rings"
    for error in (errno.EPERM, errno.ENOSYS, errno.ENOMEM):
        assert forked(functools.partial(refused_from_the_start, path, x, error)) is None, errno.errorcode[error]


def test_refused_from_the_start(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((300, 75), dtype=np.float32)
    indptr, indices = np.arange(301), np.zeros(300, np.int64)
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, features={"x": x}, progress=False).close()
    run_in_fork(refused_with_each_error, str(tmp_path / "g"))


# What the kernel refuses cannot be undone: each runs in a fork of one child.


def to_a_stream(folder: Path, record: FileRecord) -> None:
    with (
        opened(folder, record, backend="auto") as (file, reader),
        opened(folder, record, backend="io_uring") as (other, demanding),
    ):
        assert gathers(file)
        assert streams(file)
        deny_syscalls(["io_uring_setup"])
        assert reader.backend == "io_uring"
        assert streams(file)
        assert (reader.backend, reader.reason.startswith("io_uring was refused")) == ("pread", True)
        assert gathers(file)
        caught = refuses(OSError, os.strerror(errno.EPERM), lambda: streams(other))
        assert caught.value.errno == errno.EPERM
        assert gathers(other)  # its ring is there
        assert demanding.backend == "io_uring"


def to_a_fork(folder: Path, record: FileRecord) -> None:
    with opened(folder, record, backend="auto") as (file, reader):
        assert gathers(file)

        def child() -> None:
            deny_syscalls(["io_uring_setup"])
            assert gathers(file)
            assert reader.backend == "pread"

        assert forked(child) is None
        assert reader.backend == "io_uring"


def to_the_queue_of_checksums(folder: Path, record: FileRecord) -> None:
    with opened(folder, record, memory=6 * MIN_ARENA_BYTES, backend="auto") as (file, reader):
        assert file._paged is not None
        deny_syscalls(["io_uring_setup"])
        assert gathers(file)
        assert reader.backend == "pread"


def while_in_use(folder: Path, record: FileRecord) -> None:
    with opened(folder, record, backend="auto") as (file, reader):
        assert gathers(file)
        deny_syscalls(["io_uring_enter"], errno.ENXIO)
        for _ in range(2):
            caught = refuses(OSError, os.strerror(errno.ENXIO), lambda: gathers(file))
            assert (caught.value.errno, caught.value.filename) == (errno.ENXIO, file.path)
        assert streams(file)  # a ring that can be made and not be used is none
        assert reader.backend == "pread"


def while_a_stream_begins(folder: Path, record: FileRecord) -> None:
    """Another is refused its ring between this one's ring and its thread: one thread reads it all the same."""
    with opened(folder, record, backend="auto") as (file, reader):
        assert gathers(file)

        def late(make: Callable[[str], Stream]) -> Stream:
            made = reader.with_backend(make)
            reader.backend = "pread"
            return made

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(file, "with_backend", late)
            with PageStream(file, np.array([[1, 2000]]), 1 << 20) as stream:
                assert (stream.core.backend, len(stream._threads), file.stream_threads) == ("io_uring", 1, STREAM_THREADS)


def refused_later(folder: str) -> None:
    record = write_rows(Path(folder), ROWS)
    for refused in (to_a_stream, while_a_stream_begins, to_a_fork, to_the_queue_of_checksums, while_in_use):
        assert forked(functools.partial(refused, Path(folder), record)) is None, refused


def test_refused_later(tmp_path: Path) -> None:
    run_in_fork(refused_later, str(tmp_path))


def direct_reads_are_refused(folder: str) -> None:
    """As on overlayfs over squashfs: opening and ``fcntl`` take O_DIRECT, reads do not."""
    x = np.random.default_rng(0).standard_normal((3000, 100), dtype=np.float32)
    indptr, indices = np.arange(0, 12_001, 4), np.random.default_rng(1).integers(0, 3000, 12_000)
    with Fault(folder, "read_direct", "EINVAL", times=10**9) as fault:
        featstore.OutOfCoreGraph.create(f"{folder}/g", indptr, indices, features={"x": x}, progress=False).close()
        assert fault.fired
        for backend in ("auto", "io_uring", "pread"):
            with featstore.open(f"{folder}/g", memory="64MiB", backend=backend) as g:
                store = g.features["x"]
                assert np.array_equal(store[:].numpy(), x)
                mode = store.stats()["mode"]
                assert mode == "buffered: the file system takes O_DIRECT and refuses to read (Invalid argument)"
                assert store.stats()["reason"].endswith("; direct I/O was refused: featstore doctor says why")
                sampler = featstore.NeighborSampler(g, [4, 4])
                for strategy in ("superbatch", "streamed"):  # run files, too
                    with featstore.Loader(g, sampler, np.arange(3000), 300, labels=None, strategy=strategy) as loader:
                        for batch in loader:
                            assert np.array_equal(batch.x.numpy(), x[batch.input_ids.numpy()])
    with Fault(folder, "read_direct", "EIO", times=10**9) as fault, featstore.open(f"{folder}/g", backend="buffered") as g:
        assert np.array_equal(g.features["x"][:].numpy(), x)
        assert g.features["x"].stats()["mode"] == "buffered: asked for"
        assert g.features["x"].stats()["reason"] == "the kernel allows it"
    assert fault.calls == 0
    with (
        Fault(folder, "read_direct", "EIO", times=10**9) as fault,
        pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught,
    ):
        featstore.open(f"{folder}/g", backend="pread")
    assert (caught.value.errno, os.path.dirname(caught.value.filename)) == (errno.EIO, f"{folder}/g")


def test_direct_reads_are_refused(tmp_path: Path) -> None:
    run_in_fork(direct_reads_are_refused, str(tmp_path))
