"""Values of the catalog: JSON objects with a checksum, and typed access to them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

import xxhash

from featstore.errors import CorruptionError, FormatError
from featstore.storage.format import DTYPES

__all__ = ["Entry", "pack_value", "unpack_value"]

_U64: Final = struct.Struct("<Q")


def pack_value(key: bytes, value: Mapping[str, Any]) -> bytes:
    """Encode a value: a checksum of key and JSON text, then the text."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()
    return _U64.pack(xxhash.xxh3_64_intdigest(key + text)) + text


def unpack_value(key: bytes, data: bytes, path: str) -> dict[str, Any]:
    """Decode the value of a key; CorruptionError if its checksum differs, FormatError if it is no JSON object."""
    text = data[8:]
    if len(data) < 8 or _U64.unpack_from(data)[0] != xxhash.xxh3_64_intdigest(key + text):
        raise CorruptionError(f"the catalog's entry {key!r} is damaged: its checksum differs", path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: the catalog's entry {key!r} is not a JSON object", path)
    return value


class Entry:
    """Typed access to one JSON object read from a file; a missing member, or one of another type, is a FormatError."""

    def __init__(self, value: dict[str, Any], where: str) -> None:
        self.value = value
        self.where = where

    def text(self, name: str) -> str:
        """Get a member that is text and not empty."""
        found = self.value.get(name)
        if not isinstance(found, str) or not found:
            raise FormatError(f"{self.where}: {name!r} must be text, not {found!r}")
        return found

    def number(self, name: str, least: int = 0) -> int:
        return self._number(self.value.get(name), name, least)

    def _number(self, found: Any, name: str, least: int = 0) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found < 1 << 62:
            raise FormatError(f"{self.where}: {name!r} must be an integer from {least} on, not {found!r}")
        return found

    def numbers(self, name: str) -> tuple[int, ...]:
        return tuple(self._number(item, name) for item in self.list(name))

    def list(self, name: str) -> list[Any]:
        found = self.value.get(name)
        if not isinstance(found, list):
            raise FormatError(f"{self.where}: {name!r} must be a list, not {found!r}")
        return found

    def dtype(self) -> str:
        found = self.text("dtype")
        if found not in DTYPES:
            raise FormatError(f"{self.where}: unknown dtype {found!r}")
        return found
