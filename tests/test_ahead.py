"""Reading ahead: every batch gets the rows its plan misses, whatever the groups; errors come at the batch they belong to."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.gather.ahead import AheadSource, ReadAhead
from featstore.storage.reader import ReadStats
from tests.conftest import make_graph

N = 500
DATA = {
    "x": np.arange(N * 64, dtype=np.int64).view(np.uint8).reshape(N, 512),
    "z": np.random.default_rng(0).integers(0, 256, (N, 5), dtype=np.uint8),
}


class Fields:
    """Two features in memory whose reads are noted, and fail where ``broken`` is among the rows."""

    def __init__(self, broken: int = -1) -> None:
        self.calls: list[int] = []
        self.broken = broken
        self.counted = ReadStats()

    def read(self, name: str) -> Any:
        def read(rows: Any, out: Any) -> ReadStats:
            if self.broken in rows:
                raise OSError(errno.EIO, "broken")
            self.calls.append(len(rows))
            out[:] = DATA[name][rows]
            return ReadStats(rows=len(rows))

        return read

    def ahead(self, misses: Any, start: int, stop: int, n_bytes: int) -> ReadAhead:
        widths = {name: data.shape[1] for name, data in DATA.items()}
        return ReadAhead(misses, {name: self.read(name) for name in DATA}, widths, start, stop, n_bytes, self.counted.add)


@given(
    st.lists(st.lists(st.integers(0, N - 1), max_size=12).map(lambda rows: np.array(rows, np.int64)), max_size=30),
    st.sampled_from([0, 8192, 12288, 40960, 1 << 20]),
    st.integers(0, 3),
    st.integers(0, 7),
)
def test_every_batch_gets_what_it_misses(batches: list[Any], n_bytes: int, start: int, not_planned: int) -> None:
    """Also where plans come late, batches have no misses, or do not fit the memory."""
    fields, asked = Fields(), []
    start = min(start, len(batches))

    def misses(position: int, wait: bool) -> Any:
        asked.append(position)
        return batches[position] if wait or position % 8 != not_planned else None

    ahead = fields.ahead(misses, start, len(batches), n_bytes)
    try:
        most_rows = n_bytes // 2 // 4096 * 4096 // 517
        for position in range(start, len(batches)):
            for name in ("x", "z", "x"):
                rows = ahead.take(position, name)
                if len(batches[position]) > most_rows:
                    assert rows is None
                else:
                    assert rows is not None
                    assert np.array_equal(rows, DATA[name][batches[position]])
            ahead.passed(position)
    finally:
        ahead.close()
    taken = [len(rows) for rows in batches[start:] if len(rows) <= most_rows]
    assert fields.counted.rows == 2 * sum(taken)
    assert len(fields.calls) <= 2 * len(taken)


def test_batches_share_a_read_and_two_groups_lie_ready() -> None:
    batches = [np.arange(8 * b, 8 * b + 8) for b in range(20)]
    fields = Fields()
    ahead = fields.ahead(lambda position, wait: batches[position], 0, 20, 2 * 5 * 4096)  # 39 rows a half: four batches
    try:
        for position in range(20):
            ahead.take(position, "x")
            if position == 0:
                ahead.take(7, "x")  # the second group does not wait for the first to be passed
            assert len(fields.calls) <= 2 * (position // 4 + 2)  # and a third does
            ahead.passed(position)
    finally:
        ahead.close()
    assert fields.calls == [32, 32] * 5


def test_an_error_comes_with_its_batch_and_closing_wakes_who_waits() -> None:
    batches = [np.array([b]) for b in range(10)]
    ahead = Fields(broken=6).ahead(lambda position, wait: batches[position] if wait else None, 0, 10, 1 << 16)
    for position in range(6):
        assert np.array_equal(ahead.take(position, "z"), DATA["z"][[position]])
        ahead.passed(position)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            ahead.take(6, "x")
    ahead.close()
    ahead.close()

    unplanned = threading.Event()
    waiting = Fields().ahead(lambda position, wait: unplanned.wait(30) and None, 0, 10, 1 << 16)
    found: list[Any] = []
    taker = threading.Thread(target=lambda: found.append(waiting.take(0, "x")))
    taker.start()
    unplanned.set()  # the epoch is over: there will be no plan
    waiting.close()
    taker.join(30)
    assert found == [None]


def test_a_source_checks_its_plan() -> None:
    source = AheadSource(DATA["z"][:3].copy(), 1)
    out = np.zeros((4, 5), np.uint8)
    source.gather(np.array([0, 1, 2]), out, np.array([3, 0, 1]))
    assert np.array_equal(out[[3, 0, 1]], DATA["z"][:3])
    with pytest.raises(ValueError, match="3 rows were read ahead for a plan that misses 2"):
        source.gather(np.array([0, 1]), out, np.array([3, 0]))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_loader_reads_ahead(tmp_path: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer gathers than batches, none but them; an error reaches the loop after the batches before it."""
    n = 3000
    indptr, indices = make_graph(n, 8.0)
    x = np.random.default_rng(0).standard_normal((n, 8)).astype(np.float32)  # many rows fit the planner's memory
    data = {"train_idx": np.arange(0, n, 3)}
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, {"x": x}, data, progress=False).close()
    with featstore.open(tmp_path / "g", memory="16MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 40, "labels": None, "superbatch": 10, "feature_cache": 0.1, "overlap": overlap}
        store = g.features["x"]
        inner, calls, fail_at = store.read_rows, [], [-1]

        def read(rows: Any, out: Any) -> ReadStats:
            calls.append(len(rows))
            if len(calls) == fail_at[0]:
                raise OSError(errno.EIO, "broken")
            return inner(rows, out)

        monkeypatch.setattr(store, "read_rows", read)
        with featstore.Loader(g, sampler, g.node_data["train_idx"], strategy="superbatch", **options) as loader:
            assert g.memory_report().get("read ahead", 0) > 0 or not overlap  # else it is the planner's
            before = store.stats()["rows_loaded"]
            for batch in loader:
                assert torch.equal(batch.x, torch.from_numpy(x)[batch.input_ids])
            assert len(calls) < len(loader)
            assert sum(calls) == loader.stats()["rows_loaded"] == store.stats()["rows_loaded"] - before
            fail_at[0] = len(calls) + 3
            loader.set_epoch(0)
            delivered = 0
            with pytest.raises(OSError, match="broken"):
                for batch in loader:
                    assert batch.index == delivered
                    delivered += 1
            assert 0 < delivered < len(loader)
        assert "read ahead" not in g.memory_report()
