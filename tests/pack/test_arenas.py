"""Memory that is kept for the next stream, packing or plan: used again, never by two at once, given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore._core.stream import mark_pieces
from featstore.cache.base import PolicyContext
from featstore.cache.belady import Belady
from featstore.cache.planned import Horizon
from featstore.plan.planmemory import planning_bytes
from featstore.storage import pagestream
from featstore.storage.pagestream import Arenas, PageStream, arena_bytes
from tests.strategies.test_superbatch import dataset, ondemand
from tests.support.loaders import make_loader
from tests.support.written_rows import opened, write_rows

__all__ = ["dataset", "ondemand"]  # fixtures


def test_arenas_of_the_same_sizes_are_the_same() -> None:
    arenas = Arenas(1 << 20)
    first = arenas.of(4096, 8192)
    assert [arena is again for arena, again in zip(first, arenas.of(4096, 8192), strict=True)] == [True, True]
    assert arenas.nbytes == 12288
    (other,) = arenas.of(8192)
    assert other is not first[1]
    assert arenas.nbytes == 8192
    assert arenas.of(1 << 20, 4096) == [None, None]
    assert arenas.nbytes == 0
    arenas.of(1 << 20)
    arenas.drop()
    assert arenas.nbytes == 0


def test_two_streams_never_share_an_arena(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (3000, 4096), dtype=np.uint8)
    with opened(tmp_path, write_rows(tmp_path, rows)) as (file, _):
        arenas = Arenas(8 << 20)
        for _ in range(2):  # the second time with what the first gave back
            streams = [
                PageStream(file, np.array([[first, 1000]]), 4 << 20, arenas.of(arena_bytes(4 << 20))[0])
                for first in (1, 1001, 2001)
            ]
            for stream in streams:
                stream.feed(stream.n_pieces)
            for number, stream in enumerate(streams):
                out = np.zeros((1000, 4096), np.uint8)
                stream.core.scatter(1000, np.arange(1000), out)
                assert np.array_equal(out, rows[1000 * number : 1000 * (number + 1)])
                stream.close()


def test_epochs_take_no_new_memory(dataset: Path, tmp_path: Path, ondemand: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = pagestream.Arena
    monkeypatch.setattr(pagestream, "Arena", lambda n_bytes, forked: (made.append(n_bytes), real(n_bytes, forked))[1])
    with featstore.open(dataset, memory="256MB") as g:
        sampler, seeds = featstore.NeighborSampler(g, [4, 3], seed=1), g.node_data["train_idx"]
        options: dict[str, Any] = {"features": "x", "cache": 0.05, "strategy": "streamed", "length": 40}
        options |= {"batch_size": 40, "seed": 3, "run_dir": tmp_path / "runs"}
        with make_loader(g, sampler, seeds, **options) as loader:
            counts = []
            for _ in range(3):
                for batch in loader:
                    assert torch.equal(batch.x, g.features["x"].take(batch.input_ids))
                counts.append(len(made))
        assert counts[0] == counts[-1] > 0
        assert g.budget.peak <= g.budget.total


def test_a_planner_keeps_its_memory_where_it_is_told_to() -> None:
    rng = np.random.default_rng(7)
    n, capacity = 20_000, 2_000
    batches = [np.unique((n * rng.random(4000) ** 2).astype(np.int32)) for _ in range(6)]
    offsets = np.cumsum([0] + [len(batch) for batch in batches]).astype(np.int64)
    window = Horizon(n, offsets, batches.__getitem__, 6)
    policy, other = Belady(), Belady()
    least = 8 * capacity  # free slots, and the row of each slot
    policy.keep_memory(True)
    for _ in range(3):
        for each in (policy, other):
            each.start(capacity, PolicyContext(n, 1))
        for a, b in zip(policy.plan(window), other.plan(window), strict=True):
            assert np.array_equal(a.slots, b.slots)
            assert np.array_equal(a.changes.in_slots, b.changes.in_slots)
        assert other.nbytes == least
        assert least < policy.nbytes <= planning_bytes(n, int(offsets[-1]), longest=max(map(len, batches)))
    policy.keep_memory(False)
    assert policy.nbytes == 0


@given(
    st.integers(1, 9000), st.integers(1, 5), st.integers(0, 3000), st.integers(1, 5), st.lists(st.integers(0, 60), max_size=20)
)
def test_pieces_that_hold_rows(row_bytes: int, group_rows: int, padding: int, pages: int, rows: list[int]) -> None:
    """Against what every byte of every row says."""
    group_bytes, piece = group_rows * row_bytes + padding, pages * 4096
    size = 4096 + (61 // group_rows + 1) * group_bytes
    for dtype in (np.int32, np.int64):
        wanted = np.zeros(-(-size // piece), np.uint8)
        mark_pieces(np.array(rows, dtype), (4096, row_bytes, group_rows, group_bytes), piece, wanted)
        expected: set[int] = set()
        for row in rows:
            start = 4096 + row // group_rows * group_bytes + row % group_rows * row_bytes
            expected |= set(range(start // piece, (start + row_bytes - 1) // piece + 1))
        assert set(np.flatnonzero(wanted).tolist()) == expected
    for bad in (-1, 10**6):
        with pytest.raises(IndexError, match="outside the file"):
            mark_pieces(np.array([bad]), (4096, row_bytes, group_rows, group_bytes), piece, wanted)


@given(st.integers(2, 40_000), st.integers(1, 1 << 22))
def test_buffers_fit_their_window(pages: int, run_bytes: int) -> None:
    window = pages * 4096 + 100
    n, size = pagestream._buffers(window, run_bytes)
    assert n >= 2
    assert size % 4096 == 0
    assert 4096 <= size <= pagestream.PIECE_BYTES
    assert n * size <= window
    if run_bytes <= 4096 and pages >= pagestream.MOST_SHORT:
        assert (n, size) == (pagestream.MOST_SHORT, 4096)


@pytest.mark.parametrize(("length", "at_once"), [(1, 64), (3, 64), (40, 4), (400, 2)])
def test_short_runs_are_streamed_as_they_lie(tmp_path: Path, length: int, at_once: int) -> None:
    """Many more at once than the window has large pieces; checked, from a table that is made ready once."""
    rows = np.random.default_rng(0).integers(0, 256, (6000, 4096), dtype=np.uint8)
    firsts = np.arange(0, 6000 - length, 3 * length + 20)
    runs = np.stack([1 + firsts, np.full(len(firsts), length)], axis=1)
    with opened(tmp_path, write_rows(tmp_path, rows)) as (file, _):
        assert file.holds_sums
        with PageStream(file, runs, 1 << 20) as stream:
            assert stream._n_buffers == at_once
            out = np.zeros((length, 4096), np.uint8)
            for k, first in enumerate(firsts.tolist()):
                stream.feed(stream.pieces_before((k + 1) * length))
                stream.core.scatter(length, None, out)
                assert np.array_equal(out, rows[first : first + length])
