"""Messages between ranks: what was written is read, and errors arrive as they were, with the machine named."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from featstore.errors import BudgetError, ClosedError, CorruptionError


@given(
    rows=st.lists(st.integers(0, 2**31 - 1), max_size=50) | st.builds(lambda a, n: range(a, a + n), *[st.integers(0, 2**40)] * 2),
    tag=st.integers(1, 2**30),
    gap=st.none() | st.integers(0, 2**40),
    wide=st.booleans(),
)
def test_questions_are_read_as_written(rows: Any, tag: int, gap: int | None, wide: bool) -> None:
    dtype = np.dtype(np.int64 if wide else np.int32)
    question = Question(rows if isinstance(rows, range) else np.array(rows, np.int64), tag, gap)
    if isinstance(rows, range) and not rows:
        return  # nobody asks for nothing
    message = np.zeros(HEAD_BYTES + TEXT_BYTES, np.uint8)
    written = question.encode(dtype)
    message[: len(written)] = written
    found = Question.decode(message, dtype)
    assert (found.tag, found.gap_bytes) == (tag, gap)
    assert type(found.rows) is type(question.rows)
    assert (found.rows == question.rows) if isinstance(rows, range) else found.rows.tolist() == rows  # type: ignore[union-attr]


def sent(error: BaseException) -> Exception:
    message = np.zeros(HEAD_BYTES + TEXT_BYTES, np.uint8)
    assert encode_error(error, message) <= len(message)
    assert message[:8].view(np.int64)[0] == Kind.ERROR
    return decode_error(message, "rank 1 (far)", "far")


def test_errors_arrive_as_they_were() -> None:
    damaged = sent(CorruptionError("checksum of a page differs", "/data/rows", 8192))
    assert isinstance(damaged, CorruptionError)
    assert (damaged.path, damaged.offset) == ("far:/data/rows", 8192)
    assert str(damaged).endswith("rank 1 (far) could not read rows: checksum of a page differs at byte 8192: 'far:/data/rows'")
    failed = sent(OSError(errno.EIO, "Input/output error", "/data/rows"))
    assert isinstance(failed, OSError)
    assert (failed.errno, failed.filename) == (errno.EIO, "far:/data/rows")
    assert "rank 1 (far)" in str(failed)
    short = sent(BudgetError("reader buffers need more", 1000))
    assert isinstance(short, BudgetError)
    assert str(short) == "rank 1 (far) could not read rows: reader buffers need more; it would need 1000 bytes there"
    assert short.needed is None  # it is a size of the other rank's memory
    closed = sent(ClosedError("/data is closed"))
    assert isinstance(closed, ClosedError)
    assert str(closed) == "rank 1 (far) could not read rows: /data is closed"
    other = sent(KeyError("x"))
    assert isinstance(other, OSError)
    assert other.errno == errno.EREMOTEIO
    assert "rank 1 (far) could not read rows: 'x' (KeyError)" in str(other)
    assert isinstance(sent(OSError("without a number")), OSError)


@pytest.mark.parametrize("text", ["ä" * 3000, "\U0001f600" * 1000, "\x00" * 5000, "'" * 5000])
def test_long_texts_are_cut(text: str) -> None:
    error = sent(CorruptionError(text, text.replace("\x00", "_"), 0))
    assert isinstance(error, CorruptionError)
    assert text[:50] in str(error.message)
    message = np.zeros(HEAD_BYTES + TEXT_BYTES, np.uint8)
    assert write_text(Kind.FAILED, text, message) <= len(message)
    assert text.startswith(read_text(message)[:400])


def test_a_text_that_is_not_unicode() -> None:
    """Such as the name of a file in another encoding."""
    message = np.zeros(HEAD_BYTES + TEXT_BYTES, np.uint8)
    write_text(Kind.FAILED, "file \udcff", message)
    assert read_text(message) == "file \\udcff"
