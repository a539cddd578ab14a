"""The compiled core refuses arrays, sizes and places that do not fit each other, before it touches memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore._core import aggregate, belady, buffers, cache, epochs, policies, sampler
from featstore._core.io import MAX_SORTED_ROWS, PAGE_BYTES, Engine, File
from featstore._core.packer import Packer
from featstore._core.partition import Placer
from featstore._core.rows import copy_rows
from featstore._core.stream import Stream, mark_pieces
from featstore.errors import ClosedError, CorruptionError, FormatError

PAGES = (0, PAGE_BYTES, 1, PAGE_BYTES)  # geometry of rows of a page each


def i32(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def i64(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def u64(n: int) -> np.ndarray[Any, Any]:
    return np.zeros(n, np.uint64)


@pytest.mark.parametrize("n_rows", [3, 2**40])
@pytest.mark.parametrize("geometry", [(PAGE_BYTES, 1, PAGE_BYTES), (8, 512, PAGE_BYTES), (3, 1, 2**62)])
def test_rows_beyond_the_end_of_a_file_are_refused(tmp_path: Path, n_rows: int, geometry: tuple[int, int, int]) -> None:
    (tmp_path / "rows").write_bytes(bytes(3 * PAGE_BYTES))
    holds = 2 * geometry[1] if geometry[2] == PAGE_BYTES else 1
    File(tmp_path / "rows", *geometry, holds, PAGE_BYTES, 3 * PAGE_BYTES).close()
    with pytest.raises(FormatError, match="end beyond its 12288 bytes"):
        File(tmp_path / "rows", *geometry, max(n_rows, holds + 1), PAGE_BYTES, 3 * PAGE_BYTES)


def test_no_more_rows_are_sorted_at_once_than_a_key_can_number() -> None:
    engine = Engine("pread", 1, PAGE_BYTES)
    engine.set_scratch(1 << 25)
    assert engine.nbytes == PAGE_BYTES + 16 * MAX_SORTED_ROWS
    engine.close()


@pytest.mark.parametrize("n_threads", [0, -1, 2**31 - 1])
def test_any_number_of_threads_copies(n_threads: int) -> None:
    rows, out = np.arange(300, dtype=np.uint8).reshape(100, 3), np.zeros((100, 3), np.uint8)
    copy_rows(rows, None, out, None, n_threads)
    assert np.array_equal(out, rows)


@pytest.mark.parametrize("cls", [buffers.Arena, buffers.Borrowed, File, Engine, Stream, Packer, Placer])
def test_half_made_objects_give_back_nothing_of_others(cls: Any) -> None:
    """Their fields are zero, as the descriptor of what the process reads is."""
    here = os.fstat(0)
    for arguments in ((), ("file",), (None,) * 9):
        with pytest.raises(TypeError):
            cls(*arguments)
    assert os.path.samestat(os.fstat(0), here)


def test_an_arena_of_all_addresses_is_none() -> None:
    with pytest.raises(MemoryError):
        buffers.Arena(2**64 - 1)


@pytest.mark.parametrize("geometry", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 2, 1, 1)])
def test_impossible_geometry_is_refused(tmp_path: Path, geometry: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="geometry"):
        mark_pieces(i64(0), geometry, PAGE_BYTES, np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="geometry"):
        packer(tmp_path, offsets=i64(PAGE_BYTES), geometry=geometry)


@pytest.mark.parametrize("row", [-1, 2, 2**52, 2**63 - 1])
def test_pieces_of_rows_outside_the_file_are_not_marked(row: int) -> None:
    wanted = np.zeros(2, np.uint8)
    with pytest.raises(IndexError, match=f"row {row} "):
        mark_pieces(i64(row), PAGES, PAGE_BYTES, wanted)
    assert not wanted.any()
    with pytest.raises(ValueError, match="pieces of 0 bytes"):
        mark_pieces(i64(0), PAGES, 0, wanted)


def stream(path: Path, pages: list[int], counts: list[int], buffer_bytes: int = 2 * PAGE_BYTES) -> Stream:
    path.write_bytes(bytes(4 * PAGE_BYTES))
    places = np.array(pages, np.uint64), np.array(counts, np.uint32)
    return Stream(os.open(path, os.O_RDONLY), False, str(path), "pread", *places, 1, buffer_bytes)


def test_streams_refuse_what_they_cannot_read_or_verify(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="impossible stream"):
        stream(tmp_path / "rows", [0], [1], 1 << 31)
    verified = stream(tmp_path / "rows", [0, 510], [1, 1])
    verified.use_sums(7, 1)
    verified.allow(2)
    verified.read()  # no page of sums was handed in: nothing is right
    with pytest.raises(CorruptionError):
        verified.fail()
    verified.close()
    for page, count in ((511, 1), (510, 2), (2**64 - 1, 1)):
        beyond = stream(tmp_path / "rows", [page], [count])
        with pytest.raises(ValueError, match="has no sum"):
            beyond.use_sums(7, 1)
        beyond.close()
    narrow = stream(tmp_path / "rows", [0], [1])
    with pytest.raises(ValueError, match="without bytes"):
        narrow.scatter(1, None, np.zeros((1, 0), np.uint8))
    narrow.close()


def packer(
    path: Path, offsets: np.ndarray[Any, Any], geometry: tuple[int, ...] = PAGES, buffer_bytes: int = 2 * PAGE_BYTES
) -> Packer:
    return Packer(-1, str(path), 0, np.zeros((1, 512), np.uint64), i32(0), i64(0, 1), offsets, geometry, 2, buffer_bytes)


def test_packers_refuse_extents_that_begin_nowhere(tmp_path: Path) -> None:
    for offset in (-PAGE_BYTES, 100):
        with pytest.raises(ValueError, match=f"byte {offset}"):
            packer(tmp_path, i64(offset))
    with pytest.raises(ValueError, match="impossible packing"):
        packer(tmp_path, i64(PAGE_BYTES), buffer_bytes=1 << 31)


def test_bytes_that_a_stopped_packer_does_not_take_are_an_error(tmp_path: Path) -> None:
    stopped = packer(tmp_path, i64(PAGE_BYTES))
    stopped.stop()
    with pytest.raises(ClosedError):
        stopped.append(0, np.zeros(8, np.uint8))


def test_sums_of_wide_rows_are_refused_before_their_size_wraps() -> None:
    bytes_, numbers = np.zeros(8, np.uint8), i64(0)
    for width in (2**61, 2**62, 2**63 - 1):
        with pytest.raises(ValueError, match="rows of 4 bytes"):
            aggregate.accumulate(
                bytes_, 4, 0, width, bytes_, 8, numbers, i64(1), numbers.copy(), bytes_, 4, None, -1, i64(0, 1), 1
            )
        with pytest.raises(ValueError, match="shorter than the destinations"):
            aggregate.finish(bytes_, 4, width, np.ones(4), True, 1)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lists_of_batches_stay_within_their_arrays(dtype: type) -> None:
    rows = np.array([1], dtype)
    for cursor in (i64(0), i64(0, 2), i64(0, -1)):
        with pytest.raises(IndexError, match="row 1 at position 0"):
            belady.fill_iters(rows, 0, cursor, i32(0, 0))
        with pytest.raises(IndexError, match="row 1 at position 0"):
            belady.next_uses(rows, 0, cursor, i64(*[3] * len(cursor)), i32(0, 0), i64(0), True)
    with pytest.raises(ValueError, match="shorter"):
        belady.next_uses(rows, 0, i64(0, 0), i64(0), i32(0), i64(0), True)
    with pytest.raises(ValueError, match="shorter"):
        belady.next_uses(rows, 0, i64(0, 0), i64(0, 0), i32(0), i64(), True)
    bits = belady.Bits(u64(belady.Bits.words_for(8)), 8, 2)
    with pytest.raises(ValueError, match="shorter"):
        belady.bits_at(bits, i64(0, 1), np.zeros(1, np.uint8))


def test_cache_tables_stay_within_their_arrays() -> None:
    for slot in (64, -1):
        with pytest.raises(ValueError, match="without a bit"):
            cache.distinct_slots(i32(slot), u64(1), i32(0))
    with pytest.raises(ValueError, match="without a bit"):
        cache.check_victims(i32(0), np.zeros(65, np.int64), u64(1))
    for n_rows in (-1, 3):
        with pytest.raises(ValueError, match="no such length"):
            cache.take_top(u64(4), 0, 0, 4, i64(0, 0), n_rows)


@pytest.mark.parametrize(
    ("log", "state"), [(i32(*[0] * 3), i64(0, 0, -1)), (i32(*[0] * 4), i64(0)), (i32(*[0] * 4), i64(0, 5, -1))]
)
def test_policies_refuse_logs_that_do_not_fit(log: np.ndarray[Any, Any], state: np.ndarray[Any, Any]) -> None:
    slots, mark = i32(0), np.ones(2, np.uint8)
    with pytest.raises(ValueError, match="log"):
        policies.lru_use(slots, True, log, i32(-1, -1), state)
    with pytest.raises(ValueError, match="log"):
        policies.lru_victims(slots.copy(), log, i32(0, 0), state)
    with pytest.raises(ValueError, match="log"):
        policies.sieve_insert(slots, log, mark, state)
    with pytest.raises(ValueError, match="log"):
        policies.sieve_victims(slots.copy(), 2, log, mark, state)


def test_policies_refuse_hands_and_queues_that_do_not_fit() -> None:
    for hand in (-1, 2):
        with pytest.raises(ValueError, match="hand"):
            policies.clock_victims(i32(0), np.ones(2, np.uint8), hand)
    fits: dict[str, Any] = {"small": i32(0, 0), "main": i32(0, 0), "mark": np.zeros(2, np.uint8), "rows": i64(-1, -1)}
    fits |= {"ghost": i64(-1), "table": i32(-1, -1), "state": i64(0, 0, 0, 0, 0)}
    for name, bad in (
        ("small", i32(0)),
        ("main", i32(0)),
        ("rows", i64(-1)),
        ("table", i32(-1, -1, -1)),
        ("table", i32(-1)),
        ("state", i64(0)),
        ("state", i64(2, 0, 0, 0, 0)),
        ("state", i64(0, 0, 0, 3, 0)),
        ("state", i64(0, 0, 0, 0, 1)),
    ):
        arrays = (fits | {name: bad}).values()
        with pytest.raises(ValueError, match=r"do not fit|outside"):
            policies.s3fifo_insert(i64(7), i32(0), 9, *arrays)
        with pytest.raises(ValueError, match=r"do not fit|outside"):
            policies.s3fifo_victims(i32(0), 1, *arrays)
    policies.s3fifo_insert(i64(7), i32(0), 9, *fits.values())


def logs_of(n: int) -> epochs.Logs:
    n_words = epochs.LEAST_BLOCKS * epochs.LEAST_BLOCK_WORDS
    return epochs.Logs(n, np.zeros(8 * n_words, np.int8), epochs.LEAST_BLOCK_WORDS, True)


@pytest.mark.parametrize(("node", "shift"), [(4, 1), (2, 0), (-1, 0), (-1, 1), (-(2**63), 62)])
def test_nodes_without_a_log_are_not_logged(node: int, shift: int) -> None:
    logs = logs_of(2)
    with pytest.raises(ValueError, match="no log"):
        logs.scatter(i64(0, node), 0, 2, 0, shift)
    assert logs.is_empty


def test_draws_refuse_targets_of_no_batch_and_lists_that_begin_nowhere() -> None:
    def draws(*batches: int) -> epochs.Draws:
        batch, place = np.array(batches, np.uint32), np.zeros(len(batches), np.uint32)
        options: Any = u64(2).reshape(2, 1), i64(3), (0, 1), False, 2, i64(0), i64(0, len(batches)), batch, place
        return epochs.Draws(logs_of(2), *options)

    with pytest.raises(ValueError, match="a target of batch 2 of 2"):
        draws(0, 2, 1)
    room = np.zeros(epochs.LEAST_POSITIONS, np.int64)
    for first in (-1, -(2**63)):
        with pytest.raises(ValueError, match="before the first edge"):
            draws(0, 1).begin_elsewhere(0, 1, i64(first), i64(5), room, room.copy(), i64())


def test_a_hop_that_cannot_begin_ends_the_one_under_way() -> None:
    hops = sampler.Hops(10, True)
    nodes, place, degree = np.zeros(10, np.int64), np.zeros(10, np.int64), np.zeros(10, np.int64)
    hops.attach(nodes, place, degree, u64(16))
    hops.begin(i64(4))
    place[0], degree[0] = 0, 3
    records, src, dst = i32(1, 2, 3), i64(0, 0, 0), i64(0, 0, 0)
    hops.start(1, -1, False, 0, records, 4, src, dst, i64(), i64(), i64())
    with pytest.raises(ValueError, match="src has room for 2"):
        hops.start(1, -1, False, 0, records, 4, src[:2], dst, i64(), i64(), i64())
    with pytest.raises(ValueError, match="no hop is under way"):
        hops.number()
    hops.start(1, -1, False, 0, records, 4, src, dst, i64(), i64(), i64())
    assert hops.number()
    assert (src.tolist(), hops.n_nodes) == ([1, 2, 3], 4)
