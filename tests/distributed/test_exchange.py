"""The exchange of rows, between ranks in one process: questions of several threads, buffers, lost ranks, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from featstore.distributed.exchange import Sizes
from featstore.distributed.messages import Question
from featstore.distributed.rows import ShardedRows
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.gather.plan import Addresses
from featstore.gather.sources import MemorySource, RowSource
from featstore.storage.rowfile import ReadStats
from featstore.testing import RowSourceContract
from tests.support.library_threads import remaining
from tests.support.shards import Ranks, at_once

# gloo's own thread and sockets stay until the process ends or a group is collected.
pytestmark = [pytest.mark.shares_resources]


def be_patient(ranks: Ranks) -> None:
    """Let ranks wait from now on for longer than a busy machine takes."""
    for exchange in ranks.exchanges:
        exchange.timeout_s = 60.0


class Told(MemorySource):
    """Rows of a rank that does what it is told before it reads."""

    def __init__(self, rows: np.ndarray, then: Callable[[Addresses], None]) -> None:
        super().__init__(rows.copy(), 1)
        self.then = then

    def gather(
        self, addresses: Addresses, out: np.ndarray, positions: np.ndarray | None = None, gap_bytes: int | None = None
    ) -> ReadStats:
        self.then(addresses)
        return super().gather(addresses, out, positions, gap_bytes)


def some_rows(n: int = 900, row_bytes: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, row_bytes), np.uint8)


def taken(rows: ShardedRows, ids: Any, width: int = 40) -> np.ndarray:
    out = np.zeros((len(ids), width), np.uint8)
    rows.gather(ids, out)
    return out


class TestSharded(RowSourceContract):
    def make(self, rows: np.ndarray, folder: Path) -> RowSource:
        n, ranks = len(rows), list[Ranks]()

        class Closing(ShardedRows):
            """Closes all ranks' rows, as all ranks do."""

            def close(self) -> None:
                at_once([lambda: ShardedRows.close(self), ranks[0].rows[1].close, ranks[0].rows[2].close])

        ranks.append(Ranks(rows, [0, n // 4, n // 2, n]))
        ranks[0].rows[0].__class__ = Closing
        return ranks[0].rows[0]


@pytest.mark.parametrize("n_answers", [2, 5])
def test_threads_of_all_ranks_ask_at_once(n_answers: int) -> None:
    """More questions than buffers, from several threads, of every rank."""
    x = some_rows(3000)
    ranks = Ranks(x, [0, 700, 1900, 3000], piece_bytes=7 * 40, n_answers=n_answers)

    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 3000, rng.integers(1, 400))
        return np.array_equal(taken(ranks.rows[seed % 3], ids), x[ids])

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(120)))
    for rank, each in enumerate(ranks.rows):
        assert each.remote.rows == each.remote.bytes_read // 40
        assert sum(other.answered_rows for other in ranks.rows) == sum(other.remote.rows for other in ranks.rows)
        assert len(ranks.exchanges[rank]._free) == n_answers, "all buffers are back"
    ranks.close()
    assert ranks.budget.used == 0


def test_own_rows_do_not_travel() -> None:
    x = some_rows()
    ranks = Ranks(x, [0, 300, 600, 900])
    assert np.array_equal(taken(ranks.rows[1], np.arange(300, 600)), x[300:600])
    assert np.array_equal(taken(ranks.rows[1], range(310, 590)), x[310:590])
    assert ranks.rows[1].remote == ReadStats()
    ids = np.array([299, 300, 599, 600, 299])
    assert np.array_equal(taken(ranks.rows[1], ids), x[ids])
    remote = ranks.rows[1].remote
    assert (remote.rows, remote.reads, remote.bytes_read) == (3, 2, 120)
    assert 0 < remote.waited_s < 60
    assert [each.answered_rows for each in ranks.rows] == [2, 0, 1]
    ranks.close()


def test_ranks_ask_one_question_for_each_owner_and_piece() -> None:
    x = some_rows()
    asked: list[int] = []
    ranks = Ranks(x, [0, 300, 900], sources={1: Told(x[300:], lambda rows: asked.append(len(rows)))}, piece_bytes=100 * 40)
    ids = np.random.default_rng(0).permutation(900)
    assert np.array_equal(taken(ranks.rows[0], ids), x[ids])
    assert asked == [100] * 6
    asked.clear()
    assert np.array_equal(taken(ranks.rows[0], range(250, 451)), x[250:451])
    assert asked == [100, 51]
    ranks.close()


def test_answers_are_under_way_side_by_side() -> None:
    """Both other ranks read rows before either has answered."""
    x, both = some_rows(), threading.Barrier(2, timeout=60)
    sources: dict[int, RowSource] = {r: Told(x[300 * r : 300 * r + 300], lambda rows: both.wait() and None) for r in (1, 2)}
    ranks = Ranks(x, [0, 300, 600, 900], sources=sources)
    ids = np.arange(550, 650)
    assert np.array_equal(taken(ranks.rows[0], ids), x[ids])
    ranks.close()


def test_own_rows_are_read_beside_the_others() -> None:
    x, both = some_rows(), threading.Barrier(2, timeout=60)
    sources: dict[int, RowSource] = {r: Told(x[450 * r : 450 * r + 450], lambda rows: both.wait() and None) for r in (0, 1)}
    ranks = Ranks(x, [0, 450, 900], sources=sources)
    ids = np.array([7, 800])
    assert np.array_equal(taken(ranks.rows[0], ids), x[ids])
    ranks.close()


@pytest.mark.parametrize(
    "error", [CorruptionError("checksum differs", "/rows", 4096), BudgetError("no room", 7), ClosedError("closed")]
)
def test_an_error_of_an_owner_comes_to_who_asked(error: Exception) -> None:
    """And the exchange goes on."""
    x, fails = some_rows(), [True]

    def maybe(rows: Addresses) -> None:
        if fails and 77 in rows:
            raise error

    ranks = Ranks(x, [0, 300, 900], sources={1: Told(x[300:], maybe)}, piece_bytes=400)
    ids = np.arange(900)
    with pytest.raises(type(error), match=r"rank 1 \(host-1\) could not read rows: (checksum|no room|closed)"):
        taken(ranks.rows[0], ids)
    assert np.array_equal(taken(ranks.rows[0], ids[:377]), x[:377])
    fails.clear()
    assert np.array_equal(taken(ranks.rows[0], ids), x)
    assert len(ranks.exchanges[0]._free) == 4
    ranks.close()


def test_an_error_of_this_rank_waits_for_what_is_under_way() -> None:
    x = some_rows()

    def fail(rows: Addresses) -> None:
        raise OSError(5, "Input/output error", "/rows")

    ranks = Ranks(x, [0, 300, 900], sources={0: Told(x[:300], fail)}, piece_bytes=400)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error: '/rows'"):
            taken(ranks.rows[0], np.arange(900))
    assert np.array_equal(taken(ranks.rows[0], np.arange(300, 900)), x[300:])
    ranks.close()


def test_a_rank_that_answers_nothing_is_lost_after_a_while() -> None:
    x, go_on = some_rows(), threading.Event()
    ranks = Ranks(x, [0, 300, 900], sources={1: Told(x[300:], lambda rows: go_on.wait(60) and None)}, timeout_s=0.3)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the rows of 'x': rank 1 \(host-1\) has sent no rows for 0.3 s"):
        taken(ranks.rows[0], np.arange(900))
    assert 0.3 <= time.monotonic() - begin < 60
    with pytest.raises(TimeoutError, match="rank 1"):
        taken(ranks.rows[0], np.arange(900))
    assert np.array_equal(taken(ranks.rows[0], np.arange(300)), x[:300]), "rows of this rank can be read"
    go_on.set()
    be_patient(ranks)
    at_once([each.close for each in ranks.rows])
    assert ranks.budget.used == 0


def test_a_slow_rank_is_not_lost_while_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes ten seconds of a clock that goes while rank 1 reads alone; four are under way at a time."""
    x, now = some_rows(), [0.0]
    monkeypatch.setattr("featstore.distributed.exchange.time", SimpleNamespace(monotonic=lambda: now[0]))

    def read_slowly(rows: Addresses) -> None:
        now[0] += 10

    ranks = Ranks(x, [0, 300, 900], sources={1: Told(x[300:], read_slowly)}, piece_bytes=2000, timeout_s=100)
    assert np.array_equal(taken(ranks.rows[0], np.arange(900)), x)
    assert now[0] > 100
    ranks.close()


def test_closing_waits_for_all_ranks_and_answers_them() -> None:
    x = some_rows()
    ranks = Ranks(x, [0, 300, 600, 900])
    closing = threading.Thread(target=ranks.rows[0].close)
    closing.start()
    assert not remaining(lambda: not ranks.exchanges[0]._is_closed, 60)
    for rank in (1, 2):
        assert np.array_equal(taken(ranks.rows[rank], np.arange(900)), x), "rank 0 answers though it has closed"
    assert closing.is_alive()
    with pytest.raises(ClosedError, match="closed"):
        taken(ranks.rows[0], np.arange(900))
    at_once([ranks.rows[1].close, ranks.rows[2].close])
    closing.join(60)
    assert not closing.is_alive()
    ranks.rows[0].close()


def test_closing_waits_no_longer_than_the_time_out() -> None:
    ranks = Ranks(some_rows(), [0, 300, 600, 900], timeout_s=0.3)
    with pytest.raises(TimeoutError, match=r"closed, though rank 1 \(host-1\), rank 2 \(host-2\) did not close within 0.3 s"):
        ranks.rows[0].close()
    be_patient(ranks)
    for rank in (1, 2):
        with pytest.raises(ConnectionError, match=r"rank 0 \(host-0\) is lost"):
            taken(ranks.rows[rank], np.arange(300))
    for rank in (1, 2):
        ranks.rows[rank].leave(ValueError("the test is over"))
    assert ranks.budget.used == 0


def test_the_others_hear_that_a_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, in the middle of a wait, and with the reason."""
    monkeypatch.setattr("featstore.distributed.exchange._HURRY_S", 60.0)
    x, waits = some_rows(), threading.Event()

    def wait(rows: Addresses) -> None:
        waits.set()
        over.wait(60)

    over = threading.Event()
    ranks = Ranks(x, [0, 300, 600, 900], sources={1: Told(x[300:600], wait)})
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(taken, ranks.rows[0], np.arange(900))
        waits.wait(60)
        ranks.rows[2].leave(ZeroDivisionError("in the loop"))
        with pytest.raises(ConnectionError, match=r"rank 2 \(host-2\) has left: ZeroDivisionError: in the loop"):
            asking.result(60)
    with pytest.raises(ConnectionError, match="has left: ZeroDivisionError: in the loop"):
        taken(ranks.rows[1], np.arange(300))
    over.set()
    at_once([each.close for each in ranks.rows])
    assert ranks.budget.used == 0


def test_no_question_comes_after_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is on its way when its rank hears that the other has left comes before the answer to that, and is answered."""
    monkeypatch.setattr("featstore.distributed.exchange._HURRY_S", 60.0)
    x, encode = some_rows(), Question.encode
    ranks = Ranks(x, [0, 450, 900], piece_bytes=450 * 40)
    asking, leaving = ranks.exchanges[0], threading.Thread(target=ranks.rows[1].leave, args=(ValueError("in the loop"),))

    def late(question: Question, dtype: Any) -> Any:
        leaving.start()
        end = time.monotonic() + 0.5
        while asking._lost is None and time.monotonic() < end:
            time.sleep(0.01)
        return encode(question, dtype)

    monkeypatch.setattr(Question, "encode", late)
    begin = time.monotonic()
    try:
        assert np.array_equal(taken(ranks.rows[0], np.arange(900)), x), "the answer came before the news"
    except ConnectionError as error:
        assert "rank 1 (host-1) has left: ValueError: in the loop" in str(error)
    ranks.rows[0].close()
    leaving.join(60)
    assert time.monotonic() - begin < 50
    assert ranks.budget.used == 0


@pytest.mark.parametrize("row_bytes", [1, 4, 512, 5732, 1 << 20, 40 << 20])
@pytest.mark.parametrize("n_ranks", [2, 16])
def test_buffers_keep_to_their_room_where_rows_allow(row_bytes: int, n_ranks: int) -> None:
    for room in (1 << 20, 4 << 20, 1 << 30):
        piece, n_answers = Sizes.within(room, row_bytes, n_ranks, 1000)
        sizes = Sizes(row_bytes, piece, n_answers, 1000)
        assert sizes.piece_rows >= 1
        assert sizes.n_answers >= 2
        least = Sizes(row_bytes, row_bytes, 2, 1000)
        assert sizes.bytes_of(n_ranks) <= max(room, least.bytes_of(n_ranks))
        assert sizes.piece_rows * row_bytes <= max(row_bytes, 512 << 10)
        assert sizes.bytes_of(n_ranks) <= (9 << 20) + (n_ranks << 21) or row_bytes > 16 << 10
