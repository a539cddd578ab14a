"""Scans of words: all in order, within the memory that is stated, many reads ahead; damage is found; no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings

from featstore.errors import CorruptionError
from featstore.storage import pagestream, rowfile
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagestream import PageStream
from featstore.storage.rowfile import RowFile
from featstore.storage.scan import scan_bytes, scan_words
from tests.support.kernel_counts import agree_with_the_kernel
from tests.support.written_rows import opened, write_rows

SIZES = st.integers(0, 300_000) | st.sampled_from([4096, 4104, 8192, 12_288])


class Noted(PageStream):
    """A stream that is remembered."""

    made: list[Noted]

    def __init__(self, file: RowFile, runs: npt.NDArray[np.int64], window_bytes: int, arena: Any = None) -> None:
        super().__init__(file, runs, window_bytes, arena)
        self.made.append(self)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that its reads need at once."""
        return self._n_buffers * int(self._counts.max()) * PAGE_BYTES


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Noted]]:
    monkeypatch.setattr(rowfile, "PageStream", Noted)
    monkeypatch.setattr(Noted, "made", [], raising=False)
    return Noted.made


def words_of(n: int, width: int, folder: Path) -> tuple[npt.NDArray[Any], Any]:
    words = np.random.default_rng(n).integers(-(2**31), 2**31, n).astype(f"i{width}")
    return words, write_rows(folder, words.view(np.uint8).reshape(n, width))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n_bytes=SIZES, most_bytes=st.integers(0, 400_000), width=st.sampled_from([4, 8]))
def test_all_words_come_in_order_within_the_memory(tmp_path_factory, streams, n_bytes, most_bytes, width) -> None:
    streams.clear()
    folder = tmp_path_factory.mktemp("scan")
    words, record = words_of(n_bytes // width, width, folder)
    found = np.empty(0, words.dtype)
    with opened(folder, record) as (file, _):
        for first, block in scan_words(file, len(words), words.dtype, most_bytes):
            assert first == len(found)
            held = block.base.nbytes + streams[0].buffer_bytes
            assert held <= scan_bytes(n_bytes, most_bytes) <= max(3 * PAGE_BYTES, most_bytes)
            found = np.concatenate([found, block])
    assert np.array_equal(found, words)
    assert len(streams) == (len(words) > 0)


def test_many_reads_are_under_way_while_a_block_is_used(tmp_path: Path, streams: list[Noted]) -> None:
    words, record = words_of(1 << 20, 8, tmp_path)
    with opened(tmp_path, record) as (file, _):
        scan = scan_words(file, len(words), words.dtype)
        _, block = next(scan)
        (stream,) = streams
        assert block.nbytes == 2 << 20
        assert stream._fed - stream.core.consumed >= 6
        scan.close()  # type: ignore[attr-defined]  # a generator


@pytest.mark.parametrize("page", [0, 4, 11])
def test_damage_is_found_before_its_words_are_given(tmp_path: Path, page: int) -> None:
    words, record = words_of(12 * 1024, 4, tmp_path)
    path = tmp_path / record.name
    with path.open("r+b") as raw:
        raw.seek((1 + page) * PAGE_BYTES + 7)
        raw.write(b"damaged")
    n_found = 0
    with opened(tmp_path, record) as (file, _), pytest.raises(CorruptionError) as caught:
        for _, block in scan_words(file, len(words), words.dtype, 16_384):
            n_found += len(block)
    assert (caught.value.path, caught.value.offset) == (str(path), (1 + page) * PAGE_BYTES)
    assert n_found <= page * 1024


def test_a_page_of_sums_in_use_is_not_set_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that checks a page may be looking at it."""
    monkeypatch.setattr(rowfile, "is_kept", lambda *_: False)  # the table is read as it is needed
    monkeypatch.setattr(pagestream, "_STEP", 1)
    real, loaded = RowFile.sums_pages, list[int]()
    monkeypatch.setattr(
        RowFile, "sums_pages", lambda file, first, n: loaded.extend(range(first, first + n)) or real(file, first, n)
    )
    words, record = words_of(600 * 512, 8, tmp_path)
    with opened(tmp_path, record) as (file, _):
        found = [block.copy() for _, block in scan_words(file, len(words), words.dtype, 400_000)]
        assert not file.holds_sums
        assert file.n_sums_pages == 2
    assert np.array_equal(np.concatenate(found), words)
    assert loaded == [0, 1]


def test_nothing_is_left_of_one_that_is_given_up(tmp_path: Path) -> None:
    words, record = words_of(12 * 1024, 4, tmp_path)
    with opened(tmp_path, record) as (file, _):
        before = set(threading.enumerate())
        scan = scan_words(file, len(words), words.dtype, 16_384)
        next(scan)
        scan.close()  # type: ignore[attr-defined]  # a generator
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("backend", ["io_uring", "pread"])
@pytest.mark.parametrize("n_blocks", [1, 99])
def test_what_a_stream_reads_is_counted(tmp_path: Path, backend: str, n_blocks: int) -> None:
    """As the kernel counts it, also of a stream that is given up with reads under way."""
    words, record = words_of(3 << 17, 8, tmp_path)
    with opened(tmp_path, record, backend=backend) as (file, _):
        assert file.mode == "direct", "this test needs a file system with direct I/O"

        def scan() -> None:
            blocks = scan_words(file, len(words), words.dtype, 1 << 20)
            sum(1 for _ in zip(range(n_blocks), blocks, strict=False))
            blocks.close()  # type: ignore[attr-defined]  # a generator

        n_bytes = agree_with_the_kernel(file, scan)
        assert n_bytes == words.nbytes or (n_blocks == 1 and 1 << 18 <= n_bytes < words.nbytes)
        assert (file.stats.rows, file.stats.bytes_requested) == (0, 0)
        assert file.stats.reads > 0
