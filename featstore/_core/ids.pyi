"""Buffers of node ids, as the compiled modules hold them."""

from typing import Any, final

from typing_extensions import Self

@final
class Ids:
    def __new__(cls, buffer: Any, id_bytes: int, writable: bool = False) -> Self: ...
