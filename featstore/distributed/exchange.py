"""The exchange of rows between ranks: threads that answer the other ranks' questions, and questions to them.

A question asks one rank for a few rows, and has one answer, which comes into a buffer that waits for it. So no rank sends what
another one has no room for, and several answers are under way at a time. torch's gloo carries the messages.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from featstore.distributed.messages import (
    HEAD_BYTES,
    TEXT_BYTES,
    Kind,
    Question,
    decode_error,
    encode_error,
    read_text,
    write_text,
)
from featstore.errors import ClosedError
from featstore.gather.plan import Addresses
from featstore.gather.sources import RowSource

__all__ = ["Answer", "Exchange", "Sizes"]

Uint8s = npt.NDArray[np.uint8]

QUESTIONS: Final = 0  # the tag of questions; answers have others
_TAGS: Final = 1 << 30
_FOREVER: Final = timedelta(days=365)  # a wait of gloo's that times out would cut this rank off from all others
_HURRY_S: Final = 5.0  # for the others to notice that this rank ends with an error


class Sizes:
    """Sizes of an exchange's buffers, the same on all ranks.

    Parameters
    ----------
    row_bytes : int
    piece_bytes : int
        Bytes of the rows of an answer, at least one row.
    n_answers : int
        Answers that one rank has under way at a time.
    n_rows : int
        Rows of all ranks.
    """

    MOST_ROWS: Final = 8192  # of an answer
    PIECE_BYTES: Final = 512 << 10
    MOST_ANSWERS: Final = 16
    LEAST_ANSWERS: Final = 2

    def __init__(self, row_bytes: int, piece_bytes: int, n_answers: int, n_rows: int) -> None:
        self.row_bytes, self.n_answers = row_bytes, n_answers
        self.piece_rows = max(1, min(self.MOST_ROWS, piece_bytes // max(1, row_bytes)))
        self.dtype: np.dtype[np.signedinteger] = np.dtype(np.int32 if n_rows < 2**31 else np.int64)
        self.answer_bytes = HEAD_BYTES + max(TEXT_BYTES, self.piece_rows * row_bytes)
        self.question_bytes = HEAD_BYTES + max(TEXT_BYTES, self.piece_rows * self.dtype.itemsize)

    @classmethod
    def within(cls, room: int, row_bytes: int, n_ranks: int, n_rows: int) -> tuple[int, int]:
        """Choose the bytes of an answer's rows, and the number of answers, whose buffers take about ``room`` bytes."""
        n_answers = cls.MOST_ANSWERS
        while n_answers > cls.LEAST_ANSWERS and cls(row_bytes, row_bytes, n_answers, n_rows).bytes_of(n_ranks) > room:
            n_answers //= 2
        piece = cls.PIECE_BYTES
        while piece > row_bytes and cls(row_bytes, piece, n_answers, n_rows).bytes_of(n_ranks) > room:
            piece //= 2
        return max(piece, row_bytes), n_answers

    def bytes_of(self, n_ranks: int) -> int:
        """Count the bytes of a rank's buffers: for answers to it, for other ranks' questions, and for its answers to them."""
        questions = self.n_answers * self.question_bytes
        return self.n_answers * (self.answer_bytes + self.question_bytes) + (n_ranks - 1) * (questions + 2 * self.answer_bytes)


class Answer:
    """An answer that is under way, or there; its buffer is the exchange's."""

    def __init__(self, peer: _Peer, n: int, buffer: Uint8s) -> None:
        self.peer, self.n, self.buffer = peer, n, buffer
        self.sent_s = time.monotonic()
        self.is_there = self.is_failed = self.is_left = False
        self.works: list[Any] = []


class _Peer:
    """Another rank, as this one sees it."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank, self.host = rank, host
        self.lock = threading.Lock()  # over the order of questions, and of the last word after them
        self.asked: SimpleQueue[Answer | None] = SimpleQueue()
        self.n_asked = 0
        self.heard_s = 0.0  # when the last answer came
        self.says_done = False
        self.kept: list[Any] = []  # messages that may be under way when this rank has ended
        self.threads: list[tuple[threading.Thread, threading.Event]] = []  # each with what it sets when it ends

    @property
    def is_heard(self) -> bool:
        """Whether threads still wait for it. Not by is_alive(): Ctrl-C in a join makes Python 3.11 believe that they ended."""
        return any(thread.ident is not None and not ended.is_set() for thread, ended in self.threads)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Exchange:
    """Ask other ranks for rows, and answer their questions for those of this rank. Thread-safe, in the process that made it.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        One of gloo, of all ranks, which nothing else uses.
    rank : int
    hosts : sequence of str
        Names of the ranks' machines.
    rows : RowSource or None
        The rows of this rank.
    sizes : Sizes
    timeout_s : float
        Seconds after which a rank that answers nothing is lost.
    name : str
        What is exchanged, in messages.

    Notes
    -----
    If a rank is lost, rows of other ranks can no longer be read by this one: rows that are wanted next may be on the lost one.
    """

    def __init__(
        self, group: Any, rank: int, hosts: Sequence[str], rows: RowSource | None, sizes: Sizes, timeout_s: float, name: str
    ) -> None:
        self._group, self._rows, self._sizes, self._name = group, rows, sizes, name
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._peers = {other: _Peer(other, host) for other, host in enumerate(hosts) if other != rank}
        # Taken itself, not by way of the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._free = [np.empty(sizes.answer_bytes, np.uint8) for _ in range(sizes.n_answers)]
        self._lost: tuple[type[Exception], str] | None = None
        self._is_closed = False
        self.answered_rows = 0

    def start(self) -> None:
        """Start the threads, two for each other rank."""
        for peer in self._peers.values():
            for what, run in (("answers", self._answer), ("listens", self._listen)):
                name = f"featstore-shards-{what}-{peer.rank}"
                ended = threading.Event()
                thread = threading.Thread(target=_until_it_ends, args=(run, peer, ended), name=name, daemon=True)
                peer.threads.append((thread, ended))
                thread.start()

    # -- asking ------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if other ranks cannot be asked: one is lost, this exchange was closed, or this is a forked process."""
        if self._pid != os.getpid():
            raise ClosedError(
                f"{self._name}: a forked process cannot ask other ranks; read these rows in the process that made them, as "
                "featstore.Loader does in threads"
            )
        lost = self._lost
        if lost is not None:
            raise lost[0](lost[1])

    def ask(self, rank: int, rows: Addresses, gap_bytes: int | None, *, wait: bool) -> Answer | None:
        """Ask a rank for at most ``piece_rows`` of its rows; None if all buffers are in use, unless ``wait`` waits for one."""
        self.check()  # before the lock, which a forked process may find taken
        with self._lock:
            if not self._free and not wait:
                return None
            self._changed.wait_for(lambda: self._free or self._lost)
            self.check()
            peer = self._peers[rank]
            answer = Answer(peer, len(rows), self._free.pop())
        try:
            self._send(peer, answer, rows, gap_bytes)
        except Exception:
            self._release(answer)
            raise
        return answer

    def _send(self, peer: _Peer, answer: Answer, rows: Addresses, gap_bytes: int | None) -> None:
        with peer.lock:  # so that answers are waited for in the order of the questions
            self.check()  # nobody answers what comes after the last word
            peer.n_asked += 1
            tag = 1 + peer.n_asked % _TAGS
            message = Question(rows, tag, gap_bytes).encode(self._sizes.dtype)
            n_bytes = HEAD_BYTES + max(TEXT_BYTES, answer.n * self._sizes.row_bytes)
            try:
                # First the buffer, then the question: else the answer would wait until it is told of the buffer.
                answer.works.append(self._receive(peer, answer.buffer[:n_bytes], tag))
                answer.works.append((self._post(peer, message, QUESTIONS), message))
            except RuntimeError as error:
                self._lose(peer, ConnectionError, f"{peer} is lost: {_first_line(error)}")
                self.check()
            peer.asked.put(answer)

    def wait(self, answer: Answer) -> Uint8s:
        """Wait for an answer; return its rows, uint8 ``[n, row_bytes]``, in the exchange's memory, until :meth:`release`.

        Raises
        ------
        ConnectionError, TimeoutError
            The rank is lost, or has sent nothing for ``timeout_s``; the error names it.
        CorruptionError, OSError, BudgetError, ClosedError
            The rank could not read its rows; the error names it.
        """
        peer = answer.peer
        with self._lock:
            while not answer.is_there:
                self.check()
                left_s = max(peer.heard_s, answer.sent_s) + self.timeout_s - time.monotonic()
                if left_s <= 0:
                    text = f"{peer} has sent no rows for {self.timeout_s:g} s: it, or the network, is down or overloaded"
                    self._lose(peer, TimeoutError, text)
                else:
                    self._changed.wait(left_s)
            if answer.is_failed:
                self.check()
        kind = int(answer.buffer[:8].view(np.int64)[0])
        if kind == Kind.ERROR:
            raise decode_error(answer.buffer, str(peer), peer.host)
        return answer.buffer[HEAD_BYTES : HEAD_BYTES + answer.n * self._sizes.row_bytes].reshape(answer.n, -1)

    def release(self, answer: Answer) -> None:
        """Give up an answer. If it is still under way, its buffer is free once it is there."""
        with self._lock:
            answer.is_left = True
            if answer.is_there:
                self._release(answer)

    def _release(self, answer: Answer) -> None:
        with self._lock:
            self._free.append(answer.buffer)
            self._changed.notify_all()

    def _listen(self, peer: _Peer) -> None:
        """Wait for the answers of a rank, in a thread: gloo's waits end neither by Ctrl-C nor in time."""
        while (answer := peer.asked.get()) is not None:
            try:
                answer.works[0].wait(_FOREVER)
            except RuntimeError as error:
                answer.is_failed = True
                self._lose(peer, ConnectionError, f"{peer} is lost: {_first_line(error)}")
            with self._lock:
                answer.is_there, peer.heard_s = True, time.monotonic()
                if answer.is_left and not answer.is_failed:
                    self._release(answer)
                self._changed.notify_all()
            del answer

    # -- answering ---------------------------------------------------------------------------------------------------------------

    def _answer(self, peer: _Peer) -> None:
        """Answer the questions of a rank, in their order, in a thread; one answer is on its way while the next one is read."""
        sizes = self._sizes
        questions = [np.empty(sizes.question_bytes, np.uint8) for _ in range(sizes.n_answers)]
        answers, under_way = [np.empty(sizes.answer_bytes, np.uint8) for _ in range(2)], list[Any]([None, None])
        try:
            # Posted ahead, so that a rank need not be told for each question that there is room for it.
            posted = [self._receive(peer, message, QUESTIONS) for message in questions]
            for turn in itertools.count():
                at, message = turn % len(questions), questions[turn % len(questions)]
                posted[at].wait(_FOREVER)
                kind = Kind(int(message[:8].view(np.int64)[0]))
                if kind != Kind.ROWS:
                    self._end(peer, kind, message)
                    break
                if (sent := under_way[turn % 2]) is not None:
                    sent.wait(_FOREVER)
                question, answer = Question.decode(message, sizes.dtype), answers[turn % 2]
                n_bytes = self._read(question, answer)
                under_way[turn % 2] = self._post(peer, answer[:n_bytes], question.tag)
                posted[at] = self._receive(peer, message, QUESTIONS)
            for sent in under_way:
                if sent is not None:
                    sent.wait(_FOREVER)
        except RuntimeError as error:
            if not peer.says_done:
                self._lose(peer, ConnectionError, f"{peer} is lost: {_first_line(error)}")

    def _read(self, question: Question, answer: Uint8s) -> int:
        """Read rows for an answer; return the answer's bytes."""
        n, width = len(question.rows), self._sizes.row_bytes
        try:
            assert self._rows is not None, "only ranks with rows are asked"
            if n:
                self._rows.gather(
                    question.rows, answer[HEAD_BYTES : HEAD_BYTES + n * width].reshape(n, width), None, question.gap_bytes
                )
        except Exception as error:
            return encode_error(error, answer)
        answer[:8].view(np.int64)[0] = Kind.ROWS
        with self._lock:
            self.answered_rows += n
        return HEAD_BYTES + n * width

    def _end(self, peer: _Peer, kind: Kind, message: Uint8s) -> None:
        """Note that a rank asks nothing more."""
        peer.says_done = True
        if kind == Kind.FAILED:
            with peer.lock:
                self._lose(peer, ConnectionError, f"{peer} has left: {read_text(message)}")
                self._say(peer, Kind.GONE)

    # -- life --------------------------------------------------------------------------------------------------------------------

    def _lose(self, peer: _Peer, kind: type[Exception], text: str) -> None:
        """Note that a rank is lost, so that whoever waits for rows raises; the first one that is lost is named."""
        with self._lock:
            if self._lost is None and not self._is_closed:
                self._lost = kind, f"{self._name}: {text}"
            self._changed.notify_all()

    def _post(self, peer: _Peer, message: Uint8s, tag: int) -> Any:
        return self._group.send([torch.from_numpy(message)], peer.rank, tag)

    def _receive(self, peer: _Peer, message: Uint8s, tag: int) -> Any:
        return self._group.recv([torch.from_numpy(message)], peer.rank, tag)

    def _say(self, peer: _Peer, kind: Kind, text: str = "") -> None:
        message = np.empty(HEAD_BYTES + TEXT_BYTES, np.uint8)
        n_bytes = write_text(kind, text, message)
        with contextlib.suppress(RuntimeError):  # a rank that is lost is told nothing
            peer.kept.append((self._post(peer, message[:n_bytes], QUESTIONS), message))

    def close(self, failure: str | None = None) -> None:
        """End the exchange; no :meth:`wait` may be under way. May be called again.

        Without a ``failure`` this waits until all ranks close theirs, and answers them meanwhile; TimeoutError, which names
        them, if some have not after ``timeout_s``. With one, the other ranks are told, and waited for 5 seconds at most.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        with self._lock:
            failure = failure if self._lost is None else failure or self._lost[1]
            self._is_closed = True
            self._lost = ClosedError, f"{self._name} is closed"
            self._changed.notify_all()
        deadline = time.monotonic() + (self.timeout_s if failure is None else min(self.timeout_s, _HURRY_S))
        late: list[_Peer] = []
        try:
            for peer in self._peers.values():
                with peer.lock:
                    self._say(peer, Kind.DONE if failure is None else Kind.FAILED, failure or "")
                    peer.asked.put(None)
            for peer in self._peers.values():
                for _, ended in peer.threads:
                    ended.wait(max(0.0, deadline - time.monotonic()))
                if peer.is_heard:
                    late.append(peer)
        finally:
            self._cut_off()
        if late and failure is None:
            names = ", ".join(map(str, late))
            raise TimeoutError(f"{self._name}: closed, though {names} did not close within {self.timeout_s:g} s")

    def _cut_off(self) -> None:
        """End the threads that still wait for a rank, and give up the connections."""
        waiting = [peer for peer in self._peers.values() if peer.is_heard]
        if waiting:
            with contextlib.suppress(RuntimeError):  # after a wait that times out gloo closes this rank's connections
                self._receive(waiting[0], np.empty(8, np.uint8), _TAGS + 1).wait(timedelta(milliseconds=1))
            for peer in waiting:
                for _, ended in peer.threads:
                    ended.wait(_HURRY_S)
        with contextlib.suppress(ValueError, RuntimeError):  # the process group was destroyed before
            dist.destroy_process_group(self._group)
        self._free.clear()


def _until_it_ends(run: Callable[[_Peer], None], peer: _Peer, ended: threading.Event) -> None:
    try:
        run(peer)
    finally:
        ended.set()


def _first_line(error: BaseException) -> str:
    """Shorten torch's message, which may have a stack behind it."""
    return str(error).partition("\n")[0].rpartition("] ")[2] or type(error).__name__
