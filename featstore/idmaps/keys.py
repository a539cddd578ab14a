"""Columns of names: text or integers, with hashes that identify them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.names import copy_names, hash_names

__all__ = ["KINDS", "IntKeys", "Keys", "TextKeys", "joined", "keys_of", "mixed", "ranges"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

KINDS = ("text", "int64")

# Of the second words, which are never stored: nobody can choose names for which they are equal.
_POINT = secrets.randbelow((1 << 61) - 1)


def mixed(values: npt.NDArray[Any]) -> UInt64s:
    """Hash integers to 64 bits, each to another (the finalizer of SplitMix64)."""
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def ranges(begins: Int64s, lengths: Int64s) -> Int64s:
    """List the numbers of ranges, one range after the other."""
    ends = np.cumsum(lengths)
    found = np.arange(int(ends[-1]) if len(ends) else 0)
    found += np.repeat(begins - (ends - lengths), lengths)
    return found


@dataclass(frozen=True, eq=False)
class IntKeys:
    """Names that are integers: int64 ``[n]``."""

    values: Int64s
    kind = "int64"

    def __len__(self) -> int:
        return len(self.values)

    def hashes(self, out: UInt64s | None = None) -> UInt64s:
        """Hash each name to two words, uint64 ``[n, 2]``, of ``out`` if given. Equal first words mean equal names."""
        found = np.empty((len(self.values), 2), np.uint64) if out is None else out
        found[:, 0] = mixed(self.values)
        found[:, 1] = 0
        return found

    def take(self, at: Int64s) -> IntKeys:
        return IntKeys(self.values[at])

    def show(self, at: int) -> str:
        """Write a name as messages do."""
        return str(self.values[at])


@dataclass(frozen=True, eq=False)
class TextKeys:
    """Names that are text: name ``i`` is the UTF-8 of ``data[offsets[i]:offsets[i + 1]]``."""

    offsets: Int64s
    data: npt.NDArray[np.uint8]
    kind = "text"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def hashes(self, out: UInt64s | None = None) -> UInt64s:
        """Hash each name to two words, uint64 ``[n, 2]``, of ``out`` if given: its xxh3_64, and a polynomial modulo 2⁶¹ - 1.

        Together they identify a name within a process, which takes the polynomial's value at a random point: whoever chose the
        names, two with one first word, of at most L bytes, have one second word with a probability of (L / 7 + 1) / 2⁶¹.
        """
        found = np.empty((len(self), 2), np.uint64) if out is None else out
        hash_names(self.offsets, self.data, _POINT, found)
        return found

    def lengths(self) -> Int64s:
        return np.diff(self.offsets)

    def take(self, at: Int64s) -> TextKeys:
        return TextKeys.copied(self.offsets[at], self.offsets[at + 1] - self.offsets[at], self.data)

    @classmethod
    def copied(cls, begins: Int64s, lengths: Int64s, data: npt.NDArray[np.uint8]) -> TextKeys:
        """Copy names out of ``data``."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        out = np.empty(int(offsets[-1]), np.uint8)
        copy_names(begins, lengths, data, out)
        return cls(offsets, out)

    def text(self, at: int) -> str:
        return self.data[self.offsets[at] : self.offsets[at + 1]].tobytes().decode("utf-8", "backslashreplace")

    def texts(self) -> list[str]:
        data, ends = self.data.tobytes(), self.offsets.tolist()
        return [data[begin:end].decode() for begin, end in itertools.pairwise(ends)]

    def show(self, at: int) -> str:
        """Write a name as messages do, cut to 60 letters."""
        found = self.text(at)
        return repr(found) if len(found) <= 60 else f"{found[:60]!r}… ({len(found)} letters)"

    @classmethod
    def of(cls, names: Iterable[str]) -> TextKeys:
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
        return cls(offsets, np.frombuffer(b"".join(encoded), np.uint8))


Keys: TypeAlias = IntKeys | TextKeys


def joined(first: Keys, second: Keys) -> Keys:
    """Put the names of two columns of one kind one after the other."""
    if isinstance(first, IntKeys) and isinstance(second, IntKeys):
        return IntKeys(np.concatenate((first.values, second.values)))
    assert isinstance(first, TextKeys), "columns of one kind"
    assert isinstance(second, TextKeys), "columns of one kind"
    ends = second.offsets[1:] + len(first.data)
    offsets = np.concatenate((first.offsets, ends))
    return TextKeys(offsets, np.concatenate((first.data, second.data)))


def keys_of(names: Any, kind: str) -> Keys:
    """Read a user's names; TypeError for names of another kind."""
    if isinstance(names, torch.Tensor):
        names = names.detach().cpu().numpy()
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"names must be a sequence, such as a list of names, not {names!r:.80}")
    if kind == "text":
        names = names.reshape(-1).tolist() if isinstance(names, np.ndarray) else list(names)
        if bad := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"names of these nodes are text, not {type(bad[0]).__name__}: {bad[0]!r:.80}")
        return TextKeys.of(names)
    array = names if isinstance(names, np.ndarray) else np.array(list(names) or np.empty(0, np.int64))
    if array.dtype.kind not in "iu":
        raise TypeError(f"names of these nodes are integers, not {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise TypeError(f"names of these nodes are int64, which {int(array.max())} is beyond")
    return IntKeys(array.reshape(-1).astype(np.int64))
