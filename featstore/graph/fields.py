"""Mappings of fields by name, whose errors list the existing names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from featstore.config import format_size, listed
from featstore.display import Display, Shown, Table
from featstore.graph.feature import FeatureStore

__all__ = ["Fields"]


class Fields(Shown, Mapping[str, Any]):
    """Fields by name; the KeyError of a missing name lists the existing names."""

    def __init__(
        self, what: str, names: list[str], get: Callable[[str], Any], shape: Callable[[str], tuple[object, Sequence[int]]]
    ) -> None:
        self._what = what
        self._names = names
        self._get = get
        self._shape = shape  # gives dtype and shape without reading the field

    @classmethod
    def of(cls, what: str, stores: dict[str, FeatureStore]) -> Fields:
        """Make a mapping of the current stores."""
        return cls(what, list(stores), stores.__getitem__, lambda name: (stores[name].dtype, stores[name].shape))

    def of_type(self, of: str) -> Fields:
        """Make a mapping of the fields of a type of nodes or of edges, by their own names."""
        names = [name.removeprefix(f"{of}/") for name in self._names if name.startswith(f"{of}/")]
        what = f"{self._what} of {of}"
        return Fields(what, names, lambda name: self._get(f"{of}/{name}"), lambda name: self._shape(f"{of}/{name}"))

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            kind, _, of = self._what.partition(" of ")
            raise KeyError(f"no {kind} {name!r}{f' of {of!r}' if of else ''}; there is {listed(self._names)}")
        return self._get(name)

    def __setitem__(self, name: str, value: object) -> NoReturn:
        method = "add_data" if self._what.startswith("node data") else "add_feature"
        raise TypeError(f"assignment does not add {self._what} {name!r} to the dataset: g.{method} does")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def described(self, name: str) -> tuple[str, list[int], int]:
        """Get the dtype, the shape and the bytes of a field without reading it."""
        dtype, shape = self._shape(name)
        text = str(dtype).removeprefix("torch.")
        return text, list(shape), getattr(torch, text).itemsize * math.prod(shape)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """Travel as a dict of the fields: stores that open the dataset where they arrive, node data by value."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        found = []
        for name in self._names:
            dtype, shape, _ = self.described(name)
            found.append(f"{name!r}: {dtype} {shape}")
        return f"{{{', '.join(found)}}}"

    def _display(self) -> Display:
        described = ((name, *self.described(name)) for name in self._names)
        rows = ((name, dtype, str(shape), format_size(n_bytes)) for name, dtype, shape, n_bytes in described)
        title = self._what.replace("feature", "features", 1)
        return Display(title, [Table.of_first(("", "dtype", "shape", "bytes"), rows, len(self))])
