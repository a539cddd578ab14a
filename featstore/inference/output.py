"""The rows that a layer returns, written as a field with the shape and dtype of the first ones; and what a layer cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from featstore.creation.source import dtype_name, torch_dtype
from featstore.creation.steps import Field
from featstore.graph.derive.aggregate import Room, write_rows
from featstore.graph.derive.sharedmaking import SharedMaking
from featstore.graph.passes import PassCosts
from featstore.progress import Progress
from featstore.storage.writer import RowFileWriter
from featstore.topology.types import ONE_NODE, NodeType

__all__ = ["LayerCosts", "Output"]


@dataclass
class LayerCosts:
    """Cost of a layer: the passes of an aggregating layer, the blocks of any other layer, and seconds.

    ``apply_s`` seconds pass in the layer's own code, ``write_s`` in copying rows to write and waiting for earlier writes, and
    ``total_s`` in all.
    """

    passes: PassCosts = field(default_factory=PassCosts)
    blocks: int = 0
    apply_s: float = 0.0
    write_s: float = 0.0
    total_s: float = 0.0


class Output:
    """The field that a step writes, with shape and dtype of its first rows; a context manager."""

    def __init__(
        self,
        making: SharedMaking,
        number: int,
        step: int,
        kind: NodeType,
        room: Room,
        costs: LayerCosts,
        label: str,
        shows: bool,
    ) -> None:
        self._making, self._kind = making, kind
        self._name = f"layer {number}" + ("" if kind.name == ONE_NODE else f" for {kind.name!r}")
        self._is_absent = False
        self._step, self._room, self._costs, self._label = step, room, costs, label
        self._shows, self._bar = shows, Progress(label, 0, False)
        self._stack = contextlib.ExitStack()
        self._writer: RowFileWriter | None = None
        self._field = self._making.field_of(step)
        self._of = ""  # for messages: the rows that later rows must match
        if self._field is not None:
            self._of = ", as the rows that the interrupted call left: another name for resume= starts over"
            self._open(self._field)

    @property
    def first(self) -> int:
        """First node whose row is not written."""
        return self._making.first()

    def expect(self, total: int) -> None:
        self._bar = self._stack.enter_context(Progress(self._label, total, self._shows))

    def passed(self, n: int) -> None:
        self._bar.add(n)

    def own(self, returned: Any, n_dst: int, n_given: int) -> Any:
        """Select the destinations' outputs from those of all types; None if the layer has none of their type."""
        if not isinstance(returned, Mapping):
            raise TypeError(f"{self._name} returned a {type(returned).__name__}, not a mapping of types of nodes to outputs")
        rows = returned.get(self._kind.name)
        if rows is None and self._writer is not None:
            raise ValueError(f"{self._name} returned outputs of the type for some nodes, and none for nodes from {self.first} on")
        self._is_absent = rows is None
        if isinstance(rows, torch.Tensor) and rows.ndim and len(rows) == n_given:
            return rows[:n_dst]
        return rows

    def write(self, first: int, stop: int, rows: Any) -> None:
        begin, name = time.perf_counter(), self._name
        if not isinstance(rows, torch.Tensor):
            raise TypeError(f"{name} returned a {type(rows).__name__}, not a tensor")
        if rows.ndim < 1 or len(rows) != stop - first or (self._field and tuple(rows.shape[1:]) != self._field.row_shape):
            expected = "…" if self._field is None else ", ".join(map(str, self._field.row_shape))
            raise ValueError(
                f"{name} returned shape {tuple(rows.shape)} for {stop - first} nodes, not ({stop - first}, {expected}){self._of}"
            )
        if not rows.dtype.is_floating_point or (self._field and rows.dtype != torch_dtype(self._field.dtype)):
            expected = "a floating-point dtype" if self._field is None else self._field.dtype
            raise TypeError(f"{name} returned {rows.dtype}, not {expected}{self._of}")
        if self._field is None:
            self._begin(rows)
        assert self._field is not None
        assert self._writer is not None
        write_rows(rows.detach(), self._making, self._step, self._writer, self._field)
        self._costs.write_s += time.perf_counter() - begin

    def _begin(self, rows: torch.Tensor) -> None:
        try:
            dtype = dtype_name(rows.dtype)
        except TypeError as error:
            raise TypeError(f"{self._name} returned {rows.dtype}: {error}") from None
        if not all(rows.shape[1:]):
            raise ValueError(f"{self._name} returned rows of shape {tuple(rows.shape[1:])}, which have no numbers")
        self._field = Field(self._kind.n, rows.shape[1:], dtype)
        self._open(self._field)

    def _open(self, of: Field) -> None:
        self._writer = self._making.writer(self._step, of, self._room.buffer_bytes)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is None and self._writer is None and not self._is_absent:
            raise ValueError("a graph without nodes has no output: its width is not known")
