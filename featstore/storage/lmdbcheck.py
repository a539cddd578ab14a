"""Checks of LMDB's pages before LMDB reads them: LMDB follows page numbers and offsets unchecked, and crashes at a bad one.

The format is data version 1 of LMDB 0.9 for 64-bit little-endian machines (``mdb.c``: ``MDB_page``, ``MDB_meta``,
``MDB_node``).
"""

from __future__ import annotations

import struct
from typing import Final

from featstore.errors import CorruptionError, FormatError

__all__ = ["check_environment"]

# Page header: number, padding, flags, ends of the free space (of an overflow page: count of pages).
_PAGE: Final = struct.Struct("<QHHHH")
# Meta page: magic, version, address, map size, two trees, last page, transaction.
_META: Final = struct.Struct("<IIQQ48s48sQQ")
# Tree: padding (of the first one: page size), flags, depth, pages of three kinds, entries, root.
_TREE: Final = struct.Struct("<IHHQQQQQ")
# Node: size of the data (of a branch: page number, 48 bits with the flags), flags, size of the key.
_NODE: Final = struct.Struct("<HHHH")
_U16: Final = struct.Struct("<H")
_U64: Final = struct.Struct("<Q")

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE, _DIRTY = 1, 2, 4, 8, 16
_BIG_DATA = 1
_NO_PAGE = (1 << 64) - 1
_MAX_KEY = 511
_MAX_DEPTH = 16
_MAX_MAP_BYTES = 1 << 34


class _Checker:
    def __init__(self, body: bytes, path: str) -> None:
        self._body = body
        self._path = path
        self._page_bytes = 0
        self._n_pages = 0
        self._seen: set[int] = set()

    def _fail(self, message: str, page: int) -> CorruptionError:
        return CorruptionError(f"the catalog's LMDB page {page} is damaged: {message}", self._path, page * self._page_bytes)

    def check(self) -> None:
        root, depth = self._check_metas()
        if root == _NO_PAGE:
            return
        if not 1 <= depth <= _MAX_DEPTH:
            raise self._fail(f"a tree of depth {depth}", 0)
        level = [root]
        for height in range(depth, 0, -1):
            below: list[int] = []
            for page in level:
                below += self._check_page(page, leaf=height == 1)
            level = below

    def _check_metas(self) -> tuple[int, int]:
        """Check both meta pages; return the root of the newer one's main tree and its depth."""
        newest = (-1, 0, 0)
        page_bytes = 4096
        for index in range(2):
            start = index * page_bytes
            if start + _PAGE.size + _META.size > len(self._body):
                raise CorruptionError("the catalog ends within LMDB's meta pages", self._path, len(self._body))
            magic, version, _, map_bytes, free, main, last_page, transaction = _META.unpack_from(self._body, start + _PAGE.size)
            if magic != _MAGIC or version != _VERSION:
                raise FormatError(f"{self._path}: not an LMDB environment of version {_VERSION} in this byte order", self._path)
            tree = _TREE.unpack(free)
            if index == 0:
                page_bytes = self._page_bytes = tree[0]
                if not 512 <= page_bytes <= 1 << 15 or page_bytes & (page_bytes - 1):
                    raise FormatError(f"{self._path}: LMDB pages of {page_bytes} bytes", self._path)
                self._n_pages = len(self._body) // page_bytes
            number, _, flags, _, _ = _PAGE.unpack_from(self._body, start)
            if number != index or flags & ~_DIRTY != _META_PAGE or tree[0] != page_bytes or map_bytes > _MAX_MAP_BYTES:
                raise self._fail("its meta data", index)
            if last_page >= self._n_pages:
                raise CorruptionError(
                    f"the catalog lacks pages: {last_page + 1} of {page_bytes} bytes are in use", self._path, len(self._body)
                )
            _, tree_flags, depth, _, _, _, _, root = _TREE.unpack(main)
            if tree_flags:
                raise self._fail("a tree of an unknown kind", index)
            newest = max(newest, (transaction, depth, root))
        return newest[2], newest[1]

    def _claim(self, page: int, n: int = 1) -> int:
        """Mark ``n`` pages as in use, to which no other page may refer; return the byte offset of the first."""
        if not 2 <= page <= page + n <= self._n_pages:
            raise self._fail("a reference beyond the end", page if page < self._n_pages else 0)
        for number in range(page, page + n):
            if number in self._seen:
                raise self._fail("referred to twice", number)
            self._seen.add(number)
        return page * self._page_bytes

    def _check_page(self, page: int, *, leaf: bool) -> list[int]:
        """Check a page of a tree; return the pages below it."""
        start = self._claim(page)
        number, _, flags, lower, upper = _PAGE.unpack_from(self._body, start)
        if number != page or flags & ~_DIRTY != (_LEAF if leaf else _BRANCH):
            raise self._fail("not the kind of page that it must be", page)
        n_nodes = (lower - _PAGE.size) // 2
        if lower % 2 or not _PAGE.size < lower <= upper <= self._page_bytes or n_nodes < (1 if leaf else 2):
            raise self._fail("its free space", page)
        below = []
        for i in range(n_nodes):
            at = _U16.unpack_from(self._body, start + _PAGE.size + 2 * i)[0]
            if not upper <= at <= self._page_bytes - _NODE.size:
                raise self._fail(f"its entry {i}", page)
            low, high, node_flags, key_bytes = _NODE.unpack_from(self._body, start + at)
            room = self._page_bytes - at - _NODE.size - key_bytes
            if key_bytes > _MAX_KEY or room < 0:
                raise self._fail(f"the key of its entry {i}", page)
            size = low | high << 16
            if not leaf:
                below.append(size | node_flags << 32)
            elif node_flags == _BIG_DATA and room >= _U64.size:
                self._check_overflow(_U64.unpack_from(self._body, start + at + _NODE.size + key_bytes)[0], size)
            elif node_flags or size > room:
                raise self._fail(f"the value of its entry {i}", page)
        return below

    def _check_overflow(self, page: int, n_bytes: int) -> None:
        n = -(-(_PAGE.size + n_bytes) // self._page_bytes)
        start = self._claim(page, n)
        number, _, flags, low, high = _PAGE.unpack_from(self._body, start)
        if number != page or flags & ~_DIRTY != _OVERFLOW or low | high << 16 != n:
            raise self._fail("not the overflow page that it must be", page)


def check_environment(body: bytes, path: str) -> None:
    """Check that reading an LMDB environment from start to end stays within its bytes (all of ``data.mdb``) and ends.

    The check visits every page in use once. It does not check values, which have their own checksums. CorruptionError for
    damage, FormatError for an environment of another version or kind.
    """
    _Checker(body, path).check()
