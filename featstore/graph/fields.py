"""Fields of a graph by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Fields"]


class Fields(Mapping[str, Any]):
    """Fields by name; a missing one is a KeyError that lists what there is."""

    def __init__(self, what: str, names: list[str], get: Callable[[str], Any]) -> None:
        self._what = what
        self._names = names
        self._get = get

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(f"no {self._what} {name!r}; there is {', '.join(map(repr, self._names)) or 'none'}")
        return self._get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: …' for name in self._names)}}}"
