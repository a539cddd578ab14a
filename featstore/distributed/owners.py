"""Owners of rows: which ranks have each row of a sharded feature, and under which number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from featstore.gather.plan import Addresses

__all__ = ["Claim", "Owners", "Share"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Claim:
    """The rows that a rank says it has.

    Parameters
    ----------
    rank : int
    host : str
        The name of the rank's machine.
    n : int
        Number of rows.
    first : int, optional
        Id of the first one, of consecutive rows; None if their ids are listed.
    same : str
        Ranks with the same text have the same rows, such as those of one machine; "" if no other rank has.
    """

    rank: int
    host: str
    n: int
    first: int | None
    same: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Share:
    """Rows of a gather that one owner has: their numbers there, and their places in ``out`` (None: the first ones, in order)."""

    owner: int
    rows: Addresses
    out: Uint8s
    positions: Int64s | None

    def cut(self, begin: int, end: int) -> Share:
        """Cut out rows ``begin … end - 1`` of the share."""
        if self.positions is None:
            return Share(self.owner, self.rows[begin:end], self.out[begin:end], None)
        return Share(self.owner, self.rows[begin:end], self.out, self.positions[begin:end])


class Owners:
    """The owners of ``n`` rows, each a group of ranks that have the same ones.

    Rows are numbered through, owner after owner. Where owners have consecutive ids, that is the id; else :meth:`learn` is called
    with the ids of every owner, and then :meth:`check`.

    Parameters
    ----------
    claims : sequence of Claim
        One a rank, by rank.
    n : int

    Attributes
    ----------
    claims : list of list of Claim
        The ranks of each owner.
    starts : int64 array, shape (k + 1,)
        Number of the first row of each owner, and ``n``.
    numbers : int32 or int64 array, shape (n,), or None
        The number of each id; None where that is the id.

    Raises
    ------
    ValueError
        A row is on no rank, or on two ranks that do not have the same rows.
    """

    def __init__(self, claims: Sequence[Claim], n: int) -> None:
        found: dict[tuple[object, ...], list[Claim]] = {}
        for claim in claims:
            if claim.n:
                key = (claim.first, claim.n, claim.same) if claim.same else (claim.rank,)
                found.setdefault(key, []).append(claim)
        self._n = n
        self.is_listed = any(same[0].first is None for same in found.values())
        self.claims = sorted(found.values(), key=lambda same: n if same[0].first is None else same[0].first)
        self.starts = np.cumsum([0, *(same[0].n for same in self.claims)])
        self.numbers: npt.NDArray[np.signedinteger] | None = None
        if self.is_listed:
            if self.starts[-1] < n:
                self._refuse_missing(f"{n - self.starts[-1]} of the {n} rows")
            return
        end = 0
        for number, (claim, *_) in enumerate(self.claims):
            assert claim.first is not None
            if claim.first > end:
                self._refuse_missing(f"rows {end} to {claim.first - 1}")
            if claim.first < end:
                raise ValueError(
                    f"row {claim.first} is on {self.claims[number - 1][0]} and on {claim}, which have different rows"
                )
            end += claim.n
        if end < n:
            self._refuse_missing(f"rows {end} to {n - 1}")

    def _refuse_missing(self, what: str) -> NoReturn:
        raise ValueError(f"{what} are on no rank: each row must be on one machine")

    @property
    def n_bytes(self) -> int:
        """Bytes of ``numbers``, once they are there."""
        return self._n * self._dtype.itemsize if self.is_listed else 0

    @property
    def _dtype(self) -> np.dtype[np.signedinteger]:
        return np.dtype(np.int32 if self._n < 2**31 else np.int64)

    def learn(self, owner: int, done: int, ids: Int64s) -> None:
        """Learn the ids of an owner's rows ``done``, ``done + 1`` …; ValueError if one is no id, or came before."""
        if self.numbers is None:
            self.numbers = np.full(self._n, -1, self._dtype)
        claim = self.claims[owner][0]
        wrong = np.flatnonzero((ids < 0) | (ids >= self._n))
        if len(wrong):
            raise ValueError(f"id {ids[wrong[0]]} of {claim} is out of range for {self._n} rows")
        first = int(self.starts[owner]) + done
        given = np.arange(first, first + len(ids), dtype=self._dtype)
        there = self.numbers[ids]
        twice = np.flatnonzero(there >= 0)
        if not len(twice):
            self.numbers[ids] = given
            there = self.numbers[ids]
            twice = np.flatnonzero(there != given)
        if len(twice):
            other = int(np.searchsorted(self.starts, there[twice[0]], side="right")) - 1
            what = "twice" if other == owner else f"and on {self.claims[other][0]}, which have different rows"
            raise ValueError(f"row {ids[twice[0]]} is on {claim} {what}")

    def check(self) -> None:
        """Check that all rows have an owner; ValueError otherwise."""
        if self.numbers is not None and len(missing := np.flatnonzero(self.numbers < 0)):
            self._refuse_missing(f"{len(missing)} rows, such as row {missing[0]},")

    def of_rank(self, rank: int) -> int | None:
        """Find the owner that a rank is one of; None if it has no rows."""
        return next((k for k, same in enumerate(self.claims) if any(claim.rank == rank for claim in same)), None)

    def split(self, rows: Addresses, out: Uint8s, positions: Int64s | None) -> Iterator[Share]:
        """Divide the rows of a gather by owner: a share for each that has some of them, its rows ascending.

        IndexError if a row is out of range.
        """
        n = len(rows)
        if not n:
            return
        if isinstance(rows, range):
            low, high = rows[0], rows[-1]
        else:
            low, high = int(rows.min()), int(rows.max())
        if not 0 <= low <= high < self._n:
            raise IndexError(f"row {low if low < 0 else high} is out of range for {self._n} rows")
        if isinstance(rows, range) and self.numbers is None:
            for owner in range(*np.searchsorted(self.starts, [low, high], side="right") - [1, 0]):
                start = int(self.starts[owner])
                begin, end = max(low, start), min(high + 1, int(self.starts[owner + 1]))
                at = slice(begin - low, end - low)
                into = (out[at], None) if positions is None else (out, positions[at])
                yield Share(owner, range(begin - start, end - start), *into)
            return
        numbers = np.asarray(rows) if self.numbers is None else self.numbers[np.asarray(rows)]
        order = np.argsort(numbers)
        numbers = numbers[order]
        places = order if positions is None else positions[order]
        cuts = np.searchsorted(numbers, self.starts)
        for owner, (begin, end) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            if begin < end:
                yield Share(owner, numbers[begin:end] - self.starts[owner], out, places[begin:end])
