"""External sort of (destination, source) pairs in bounded memory: spilled to buckets by range, each sorted in memory.

A bucket over the bound is split again, over destinations and then, for a single destination, over sources. A bucket of one
repeated pair is not sorted, but only counted. Each pair may carry its number in the input.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.descriptor import open_fd
from featstore._core.pairs import divide
from featstore._core.pairs import sort_keys as radix_sort
from featstore.storage.calls import close_quietly, fsync_fd
from featstore.storage.spill import SpillFile, SpillFiles

__all__ = ["PairSorter", "sort_keys", "sort_pairs"]

Int64s = npt.NDArray[np.int64]

_FAN_OUT = 128
_LEAST_BY_RADIX = 1 << 12  # keys: fewer are sorted faster by comparing them


def sort_pairs(
    dst: Int64s, src: Int64s, dst_low: int, dst_high: int, n: int, edges: Int64s | None = None
) -> tuple[Int64s, Int64s, Int64s | None]:
    """Sort pairs by destination, then source; equal pairs stay in order; ``edges`` are the pairs' numbers.

    ``dst_low <= dst < dst_high`` and ``0 <= src < n``; all arrays are int64 ``[k]``.
    """
    bits = max(1, (n - 1).bit_length())
    key_bits = (dst_high - dst_low - 1).bit_length() + bits
    if key_bits <= 63:
        # One sort of one integer array is several times faster than a sort by two keys.
        key = dst - dst_low
        key <<= bits
        key |= src
        key, order = sort_keys(key, key_bits, edges is not None)
        if edges is not None and order is not None:
            edges = edges[order]
        src = key & ((1 << bits) - 1)
        key >>= bits
        key += dst_low
        return key, src, edges
    order = np.lexsort((src, dst))
    return dst[order], src[order], None if edges is None else edges[order]


def sort_keys(key: Int64s, key_bits: int, with_order: bool) -> tuple[Int64s, Int64s | None]:
    """Sort keys below ``2**key_bits`` stably, perhaps in place; return them, and each key's old position if ``with_order``."""
    if not with_order:
        return _sorted(key, 0, key_bits), None
    place_bits = (len(key) - 1).bit_length() if len(key) else 0
    if key_bits + place_bits > 63:
        order = np.argsort(key, kind="stable")
        return key[order], order
    key <<= place_bits
    key |= np.arange(len(key))
    key = _sorted(key, place_bits, place_bits + key_bits)  # places ascend already
    order = key & ((1 << place_bits) - 1)
    key >>= place_bits
    return key, order


def _sorted(key: Int64s, low: int, high: int) -> Int64s:
    """Sort words by their bits from ``low`` up to ``high``; those below ascend among equal ones. Perhaps in place."""
    if len(key) < _LEAST_BY_RADIX:
        key.sort()
        return key
    spare = np.empty_like(key)
    return spare if radix_sort(key, spare, low, high) else key


@dataclass
class _Bucket:
    """The file of pairs whose destination, or for one destination whose source, lies in ``[low, high)``."""

    file: SpillFile
    low: int
    high: int
    dst: int | None

    @property
    def n_pairs(self) -> int:
        return self.file.n_written


class PairSorter:
    """Collect pairs in any order and give them back sorted; a context manager that removes its spill files. One owner thread.

    Equal pairs come in the order in which they were added.

    Parameters
    ----------
    n : int
        Destinations and sources are in ``[0, n)``.
    memory : int
        Bytes that may be held, the caller's blocks of up to :attr:`block_pairs` pairs included.
    directory : path-like
        Directory of spill files: up to twice the pairs' bytes (8 a pair if ``n < 2³¹``, otherwise 16; and ``edge_bytes``).
    edge_bytes : {0, 4, 8}
        Bytes of the number that each pair carries; 0: pairs carry none.
    """

    def __init__(self, n: int, memory: int, directory: str | os.PathLike[str], edge_bytes: int = 0) -> None:
        self.n = n
        share = 160 if edge_bytes else 96  # bytes a pair while it is sorted
        self.block_pairs = max(1024, memory // (2 * share))
        self._cap = max(1024, memory // share)
        self._directory = os.fspath(directory)
        node = "<i4" if n < 1 << 31 else "<i8"
        fields = [("dst", node), ("src", node)] + [("edge", f"<i{edge_bytes}")] * (edge_bytes > 0)
        self._dtype = np.dtype(fields)
        self._numbers = edge_bytes > 0
        self._held: list[npt.NDArray[Any]] = []
        self._n_held = 0
        self._spill: list[_Bucket] = []
        self._own: set[SpillFile] = set()  # those that are removed here, unlike those of keep()
        self.bytes_spilled = 0

    def add(self, dst: Int64s, src: Int64s, first_edge: int = 0) -> None:
        """Add pairs that are in range; the arrays are copied. The pairs' numbers count from ``first_edge``."""
        for first in range(0, len(dst), self.block_pairs):
            block = np.empty(min(self.block_pairs, len(dst) - first), dtype=self._dtype)
            block["dst"] = dst[first : first + self.block_pairs]
            block["src"] = src[first : first + self.block_pairs]
            if self._numbers:
                block["edge"] = np.arange(first_edge + first, first_edge + first + len(block))
            if not self._spill and self._n_held + len(block) <= self._cap:
                self._held.append(block)
                self._n_held += len(block)
                continue
            if not self._spill:
                self._spill = self._cut(0, self.n, None)
                for held in self._held:
                    self._scatter(self._spill, held)
                self._held, self._n_held = [], 0
            self._scatter(self._spill, block)

    def sorted(self) -> Iterator[tuple[Int64s, Int64s, Int64s | None]]:
        """Yield ``(dst, src, numbers)`` in blocks, sorted by destination and then source; may be used once."""
        if self._spill:
            yield from self._drain(self._spill)
        elif self._held:
            pairs = np.concatenate(self._held)
            self._held = []
            dst, src, edges = self._columns(pairs)
            del pairs
            yield sort_pairs(dst, src, 0, self.n, self.n, edges)

    def keep(self) -> dict[str, Any] | None:
        """Make what was spilled durable, and leave its files there; describe it for :meth:`go_on`, as JSON values.

        None if nothing was spilled. Whoever keeps the files, ``files`` in what is returned, removes them.
        """
        spilled = [bucket for bucket in self._spill if bucket.n_pairs]
        if not spilled:
            return None
        for bucket in spilled:
            fd = open_fd(bucket.file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fsync_fd(fd, bucket.file.path)
            finally:
                close_quietly(fd)
        self._own.difference_update(bucket.file for bucket in spilled)
        return {
            "files": [os.path.basename(bucket.file.path) for bucket in spilled],
            "ranges": [[bucket.low, bucket.high, bucket.n_pairs] for bucket in spilled],
            "digests": [bucket.file.digest for bucket in spilled],
        }

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Go on with what another sorter of such pairs has kept, in place of adding them; its memory may have been another."""
        for name, (low, high, n_pairs), digest in zip(kept["files"], kept["ranges"], kept["digests"], strict=True):
            file = SpillFile(os.path.join(self._directory, name), self._dtype, n_pairs, digest)
            self._spill.append(_Bucket(file, low, high, None))

    def _columns(self, pairs: npt.NDArray[Any]) -> tuple[Int64s, Int64s, Int64s | None]:
        edges = pairs["edge"].astype(np.int64) if self._numbers else None
        return pairs["dst"].astype(np.int64), pairs["src"].astype(np.int64), edges

    def _cut(self, low: int, high: int, dst: int | None) -> list[_Bucket]:
        """Cut a range into buckets of equal width."""
        width = -(-(high - low) // _FAN_OUT)
        starts = range(low, high, width)
        files = SpillFiles(self._directory, self._dtype, len(starts))
        return [_Bucket(file, start, min(start + width, high), dst) for file, start in zip(files, starts, strict=True)]

    def _scatter(self, spill: list[_Bucket], pairs: npt.NDArray[Any]) -> None:
        first, begins, divided = spill[0], np.empty(len(spill), np.int64), np.empty_like(pairs)
        number_bytes = self._dtype["dst"].itemsize
        divide(
            pairs.view(np.uint8),
            pairs.itemsize,
            0 if first.dst is None else number_bytes,
            number_bytes,
            first.low,
            first.high - first.low,
            np.empty(len(pairs), np.uint16),
            begins,
            divided.view(np.uint8),
        )
        for bucket, begin, end in zip(spill, begins.tolist(), [*begins[1:].tolist(), len(pairs)], strict=True):
            if end > begin:
                self._own.add(bucket.file)
                bucket.file.append(divided[begin:end])
        self.bytes_spilled += pairs.nbytes

    def _drain(self, spill: list[_Bucket]) -> Iterator[tuple[Int64s, Int64s, Int64s | None]]:
        for bucket in spill:
            if not bucket.n_pairs:
                continue
            if bucket.n_pairs <= self._cap:
                pairs = bucket.file.take(bucket.n_pairs)
                dst, src, edges = self._columns(pairs)
                del pairs
                self._remove(bucket.file)
                low, high = (bucket.low, bucket.high) if bucket.dst is None else (bucket.dst, bucket.dst + 1)
                yield sort_pairs(dst, src, low, high, self.n, edges)
                continue
            yield from self._split(bucket)

    def _split(self, bucket: _Bucket) -> Iterator[tuple[Int64s, Int64s, Int64s | None]]:
        """Yield the sorted pairs of a bucket that is too large to sort in memory."""
        if bucket.high - bucket.low > 1:
            finer = self._cut(bucket.low, bucket.high, bucket.dst)
        elif bucket.dst is None:
            finer = self._cut(0, self.n, bucket.low)
        else:
            for first in range(0, bucket.n_pairs, self._cap):
                n = min(self._cap, bucket.n_pairs - first)
                edges = self._columns(bucket.file.take(n))[2] if self._numbers else None
                yield np.full(n, bucket.dst, np.int64), np.full(n, bucket.low, np.int64), edges
            self._remove(bucket.file)
            return
        for first in range(0, bucket.n_pairs, self.block_pairs):
            pairs = bucket.file.take(min(self.block_pairs, bucket.n_pairs - first))
            try:
                self._scatter(finer, pairs)
            except ValueError:  # a number that is in no part of the range
                raise bucket.file.damage() from None
        self._remove(bucket.file)
        yield from self._drain(finer)

    def _remove(self, file: SpillFile) -> None:
        if file in self._own:
            file.remove()
            self._own.discard(file)

    def close(self) -> None:
        self._held = []
        while self._own:
            with contextlib.suppress(OSError):
                self._own.pop().remove()

    def __enter__(self) -> PairSorter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
