"""Messages between ranks: a question for rows, the rows or the error in its answer."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.gather.plan import Addresses

__all__ = ["HEAD_BYTES", "TEXT_BYTES", "Kind", "Question", "decode_error", "encode_error", "write_text"]

Uint8s = npt.NDArray[np.uint8]

HEAD_BYTES: Final = 64  # before the ids of a question, and before the rows of an answer
TEXT_BYTES: Final = 2048  # of an error; more is cut off


class Kind(IntEnum):
    """The purpose of a message."""

    ROWS = 1  # a question: these rows are wanted; an answer: here they are
    ERROR = 2  # an answer: they could not be read
    DONE = 3  # the rank will ask nothing more
    FAILED = 4  # the rank ends with an error, and answers nothing more
    GONE = 5  # the answer to FAILED


@dataclass(frozen=True)
class Question:
    """A question for rows.

    Parameters
    ----------
    rows : integer array, or range of step 1
        Numbers of rows at the rank that is asked.
    tag : int
        Tag of the answer.
    gap_bytes : int, optional
        See :meth:`RowSource.gather <featstore.gather.sources.RowSource.gather>`.
    """

    rows: Addresses
    tag: int
    gap_bytes: int | None = None

    def encode(self, dtype: np.dtype[np.signedinteger]) -> Uint8s:
        """Write the question as bytes, row numbers as ``dtype``."""
        is_run = isinstance(self.rows, range)
        message = np.empty(HEAD_BYTES + (0 if is_run else len(self.rows) * dtype.itemsize), np.uint8)
        first = self.rows[0] if isinstance(self.rows, range) else -1
        gap = -1 if self.gap_bytes is None else self.gap_bytes
        message[:HEAD_BYTES].view(np.int64)[:] = [Kind.ROWS, len(self.rows), self.tag, first, gap, 0, 0, 0]
        if not is_run:
            message[HEAD_BYTES:].view(dtype)[:] = self.rows
        return message

    @classmethod
    def decode(cls, message: Uint8s, dtype: np.dtype[np.signedinteger]) -> Question:
        """Read a question; its rows are a view of the message."""
        _, n, tag, first, gap, *_ = message[:HEAD_BYTES].view(np.int64).tolist()
        rows: Addresses = range(first, first + n) if first >= 0 else message[HEAD_BYTES:].view(dtype)[:n]
        return cls(rows, tag, None if gap < 0 else gap)


def write_text(kind: Kind, text: str, message: Uint8s) -> int:
    """Write a message with a text, which is cut to ``TEXT_BYTES``; return the bytes written."""
    encoded = text.encode(errors="backslashreplace")[:TEXT_BYTES]  # such as names of files that are not UTF-8
    message[:HEAD_BYTES].view(np.int64)[:2] = [kind, len(encoded)]
    message[HEAD_BYTES : HEAD_BYTES + len(encoded)] = np.frombuffer(encoded, np.uint8)
    return HEAD_BYTES + len(encoded)


def read_text(message: Uint8s) -> str:
    """Read the text of a message."""
    n = int(message[:HEAD_BYTES].view(np.int64)[1])
    return message[HEAD_BYTES : HEAD_BYTES + n].tobytes().decode(errors="ignore")


def encode_error(error: BaseException, message: Uint8s) -> int:
    """Write the error that kept a rank from reading rows as an answer; return its bytes."""
    fields: dict[str, object] = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, CorruptionError):
        fields |= {"text": error.message, "offset": error.offset}
    elif isinstance(error, BudgetError):
        fields |= {"text": error.reason, "needed": error.needed}
    elif isinstance(error, OSError) and error.errno is not None:
        fields |= {"text": error.strerror, "errno": error.errno}
    elif isinstance(error, ClosedError):
        fields["closed"] = True
    if isinstance(error, OSError) and error.filename is not None:
        fields["path"] = os.fsdecode(error.filename)
    most = TEXT_BYTES
    while len(text := json.dumps({k: v[:most] if isinstance(v, str) else v for k, v in fields.items()})) > TEXT_BYTES:
        most //= 2
    return write_text(Kind.ERROR, text, message)


def decode_error(message: Uint8s, rank: str, host: str) -> Exception:
    """Make the error of an answer, of the same kind as at the ``rank``, which it names; a file is named with its ``host``."""
    fields = json.loads(read_text(message))
    text, path = f"{rank} could not read rows: {fields['text']}", fields.get("path")
    where = None if path is None else f"{host}:{path}"
    if "offset" in fields:
        return CorruptionError(text, where or host, fields["offset"])
    if "needed" in fields:
        needed = fields["needed"]
        return BudgetError(text if needed is None else f"{text}; it would need {needed} bytes there")
    if "errno" in fields:
        return OSError(fields["errno"], text, where)
    if "closed" in fields:
        return ClosedError(text)
    return OSError(errno.EREMOTEIO, f"{text} ({fields['type']})", where)
