"""Inference of a model given layer by layer: every node's output, with all neighbours, out of core."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch

from featstore.config import check_flag
from featstore.creation.source import dtype_name, torch_dtype
from featstore.gather.device import check_device
from featstore.graph.aggregate import Room, files_of, generous, room_in, write_rows
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore
from featstore.graph.making import FILES, Field, Making, check_new_feature
from featstore.graph.passes import PassCosts, Passes, StoredRows, summed_dtype
from featstore.inference.gathered import whole_blocks
from featstore.inference.layers import Aggregate, Layer, checked, digest_of_weights, forms_of
from featstore.progress import Progress
from featstore.storage.catalog import NODE
from featstore.storage.doublebuffer import read_ahead
from featstore.storage.writer import RowFileWriter

__all__ = ["LayerCosts", "infer", "run_layers"]

HOLDER: Final = "inference"  # in the budget's report


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


def infer(
    g: OutOfCoreGraph,
    layers: Sequence[Layer],
    features: str = "x",
    out: str = "h",
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    memory: int | str | None = None,
    resume: str | None = None,
    progress: bool = True,
) -> FeatureStore:
    """Compute every node's output by a model given layer by layer, with all in-neighbours, and add it as a feature.

    Parameters
    ----------
    g : OutOfCoreGraph
    layers : sequence of Aggregate or callable
        The model's layers, in order. An :class:`~featstore.Aggregate` declares its aggregation, and runs in blockwise passes. Any
        other layer is called as in a training loop, ``layer(h, block)``. ``h`` has the rows of the block's sources, shape
        (n_src, …); the first ``n_dst`` rows are the destinations'. The layer returns the destinations' outputs, shape
        (n_dst, …). A layer includes all that follows it, such as its activation. Call ``model.eval()`` before.
    features : str
        The feature that the first layer gets.
    out : str
        Name of the new feature, the last layer's output.
    dtype : torch.dtype or str, optional
        Dtype of the rows that layers get: by default float64 for a float64 feature, otherwise float32. Outputs are stored in
        their own dtype.
    device : str or torch.device
        Device on which layers' own code runs; rows are aggregated on the CPU.
    overwrite : bool
        Replace a feature of that name.
    memory : int or str, optional
        Most bytes to hold, within the graph's budget; by default nearly all that is free. Memory that layers allocate is not
        counted.
    resume : str, optional
        A name for this model: if a call is interrupted, the next call with the same name goes on from there. The caller must
        ensure that the layers compute the same; give another name after every change of code or of a value that layers refer to.
        The call compares the files of the adjacency and the feature, the number and forms of the layers, ``dtype``, weights and
        train/eval modes of modules. By default every call starts over, and keeps nothing.
    progress : bool
        Show progress bars, with the time left, on a terminal and in a notebook.

    Returns
    -------
    FeatureStore
        ``g.features[out]``: row v is node v's output.

    Raises
    ------
    KeyError, ValueError, TypeError
        There is no such feature; the name is taken; there are no layers, or a layer cannot be called; a layer returned no
        floating-point tensor of one row a node (the error names the layer).
    BudgetError
        Too little memory for the sums of one node, or for a node with all its in-neighbours; the error names enough memory.
    BusyError, CommittedError, CorruptionError, OSError
        The errors of :meth:`featstore.OutOfCoreGraph.aggregate`.

    Warns
    -----
    UserWarning
        The files of an interrupted call of this name do not fit, and are removed; the warning names the differences.

    Notes
    -----
    Exceptions of layers pass through. The result is committed in one step. A layer's output is kept in the dataset's folder until
    the next layer is done. With ``resume`` it stays there after a kill, Ctrl-C or an exception of a layer.

    An :class:`~featstore.Aggregate` reads its rows once a block of nodes, whose sums fit the memory with 48 bytes a node. Sums
    are made in ascending order of the neighbours, in float32 for float32 rows: in the same order as ``index_add_`` over a
    block's edges. Any other layer reads the distinct sources of each block.

    Examples
    --------
    >>> h = featstore.infer(g, [Aggregate(lambda h, mean: (l.of_self(h) + l.of_neighbors(mean)).relu()) for l in model.layers])
    """
    run_layers(g, layers, features, out, dtype, device, overwrite, memory, resume, progress)
    store: FeatureStore = g.features[out]
    return store


def run_layers(
    g: OutOfCoreGraph,
    layers: Sequence[Layer],
    features: str,
    out: str,
    dtype: torch.dtype | str | None,
    device: str | torch.device,
    overwrite: bool,
    memory: int | str | None,
    resume: str | None,
    progress: bool,
) -> list[LayerCosts]:
    """Run :func:`infer` with the same arguments; return the costs of each layer that was run."""
    for each, flag in (("overwrite", overwrite), ("progress", progress)):
        check_flag(each, flag)
    if not hasattr(g, "topology"):
        raise TypeError(f"a graph with an adjacency is needed, not a {type(g).__name__}")
    g.refuse_types("infer()")
    if resume is not None and (not isinstance(resume, str) or not resume):
        raise TypeError(f"resume must be a name of this model, such as 'sage-1', not {resume!r}")
    layers = checked(layers)
    stored = g.features[features].dtype
    usual = torch.float64 if stored == torch.float64 else torch.float32
    given = usual if dtype is None else torch_dtype(dtype_name(dtype))
    if given not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be float32 or float64, not {dtype}")
    if out == features:
        raise ValueError(f"out: {out!r} is the feature that is read; choose another name")
    check_new_feature(g.catalog, out, overwrite)
    g.check_replaceable(out)
    recipe: dict[str, Any] | None = None
    if resume is not None:
        recipe = {
            "what": "infer",
            "resume": resume,
            FILES: files_of(g.catalog, features),
            "number of layers": len(layers),
            "forms of layers": forms_of(layers),
            "weights or train/eval modes": digest_of_weights(layers),
            "dtype": str(given),
        }
    with (
        generous(g.budget, memory),
        Making(g.path, g.catalog, out, recipe, [f"{NODE}/{features}"], overwrite=overwrite, progress=progress) as making,
        torch.inference_mode(),
    ):
        run = _Run(g, making, given, check_device(device), memory, progress)
        for number, layer in enumerate(layers):
            run.layer(number, len(layers), layer, features)
        g.adopt_feature(making.commit(2 * len(layers) - 1), out)
    return run.costs


class _Run:
    """Run of the layers, one after the other.

    Steps of the making: ``2 i`` is the rows of layer i's ``before``, ``2 i + 1`` its output.
    """

    def __init__(
        self,
        g: OutOfCoreGraph,
        making: Making,
        dtype: torch.dtype,
        device: torch.device,
        memory: int | str | None,
        progress: bool,
    ) -> None:
        self._g, self._making, self._dtype, self._device = g, making, dtype, device
        self._memory, self._shows = memory, progress
        self.costs: list[LayerCosts] = []

    def layer(self, number: int, n_layers: int, layer: Layer, features: str) -> None:
        making, step = self._making, 2 * number + 1
        if making.is_done(step):
            return
        begin, costs = time.perf_counter(), LayerCosts()
        label = f"layer {number + 1}/{n_layers}"
        with contextlib.ExitStack() as stack:
            if number:
                source, shape = self._open(stack, step - 2)
            else:
                source, shape = self._g.rows_of(features), tuple(self._g.features[features].shape[1:])
            if not isinstance(layer, Aggregate):
                self._general(number, layer, source, shape, costs, label)
            else:
                passed, passed_shape = source, shape
                if layer.before is not None:
                    if not making.is_done(step - 1):
                        self._map(number, layer, source, shape, costs, label)
                    passed, passed_shape = self._open(stack, step - 1)
                self._aggregate(number, layer, (source, shape), (passed, passed_shape), costs, label)
        making.finish(step, [step - 2, step - 1])
        costs.total_s = time.perf_counter() - begin
        self.costs.append(costs)

    def _open(self, stack: contextlib.ExitStack, step: int) -> tuple[StoredRows, tuple[int, ...]]:
        field_of = self._making.field_of(step)
        assert field_of is not None
        file = stack.enter_context(contextlib.closing(self._making.open(step, self._g.reader)))
        return StoredRows(file, torch_dtype(field_of.dtype), math.prod(field_of.row_shape)), field_of.row_shape

    # -- kinds of layers -------------------------------------------------------------------------------------------------------

    def _map(
        self, number: int, layer: Aggregate, source: StoredRows, shape: tuple[int, ...], costs: LayerCosts, label: str
    ) -> None:
        """Write the rows that a layer aggregates: ``before`` of the rows that the layer gets."""
        assert layer.before is not None
        room = room_in(self._g.budget, self._memory, self._piece_row(source))
        output = _Output(self, number, 2 * number, room, costs, f"{label}: what is aggregated")
        with self._g.budget.reserve(HOLDER, room.held), output:
            row_bytes = self._piece_row(source)
            output.expect((self._g.num_nodes - output.first) * row_bytes)
            step = max(1, room.piece_bytes // row_bytes)
            for first, stop, rows in self._pieces((source, shape), output.first, self._g.num_nodes, step):
                output.write(first, stop, self._timed(layer.before, costs, rows))
                output.passed((stop - first) * row_bytes)
        self._making.finish(2 * number)

    def _aggregate(
        self,
        number: int,
        layer: Aggregate,
        own: tuple[StoredRows, tuple[int, ...]],
        passed: tuple[StoredRows, tuple[int, ...]],
        costs: LayerCosts,
        label: str,
    ) -> None:
        g, (rows, shape) = self._g, passed
        summed = summed_dtype(rows.dtype)
        sums = summed if self._dtype == torch.float32 else torch.float64
        per_row = self._piece_row(own[0]) + sums.itemsize * rows.width
        room = room_in(g.budget, self._memory, per_row)
        output = _Output(self, number, 2 * number + 1, room, costs, label)
        with g.budget.reserve(HOLDER, room.held), output:
            with Passes(
                g.topology, rows, layer.op, sums, g.budget, room.passes, g.options.threads, HOLDER, output.passed, output.first
            ) as passes:
                output.expect(passes.total_bytes)
                for block in passes.blocks():
                    found = torch.from_numpy(block.sums).reshape(len(block.sums), *shape)
                    step = max(1, room.piece_bytes // per_row)
                    for first, stop, h_self in self._pieces(own if layer.needs_self else None, block.first, block.stop, step):
                        aggregated = found[first - block.first : stop - block.first].to(self._dtype).to(self._device)
                        output.write(first, stop, self._timed(layer.apply, costs, h_self, aggregated))
                costs.passes = passes.costs

    def _general(
        self, number: int, layer: Any, source: StoredRows, shape: tuple[int, ...], costs: LayerCosts, label: str
    ) -> None:
        g = self._g
        room = room_in(g.budget, self._memory, 0)
        output = _Output(self, number, 2 * number + 1, room, costs, label)
        item = self._dtype.itemsize
        with g.budget.reserve(HOLDER, room.held), output:
            output.expect(g.num_nodes - output.first)
            for first, block, rows in whole_blocks(g.topology, source, item, output.first, g.budget, room.passes, HOLDER):
                h, n = self._as_given(rows, source, shape), block.n_dst
                output.write(first, first + n, self._timed(layer, costs, h, block.map(lambda tensor: tensor.to(self._device))))
                output.passed(n)
                costs.blocks += 1

    # -- rows --------------------------------------------------------------------------------------------------------------------

    def _piece_row(self, source: StoredRows) -> int:
        """Count the bytes of a row of a piece: twice as stored, for two alternating pieces, and once as a layer gets it."""
        return 2 * source.file.row_bytes + source.width * self._dtype.itemsize

    def _pieces(
        self, own: tuple[StoredRows, tuple[int, ...]] | None, first: int, stop: int, step: int
    ) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """Yield begin, end and rows of pieces of nodes, reading the next piece meanwhile; rows are None without ``own``."""
        if own is None:
            yield from ((low, min(stop, low + step), None) for low in range(first, stop, step))
            return
        source, shape = own
        turns = np.empty((2, min(step, max(1, stop - first)), source.file.row_bytes), np.uint8)
        blocks = ((low, turns[k % 2, : min(step, stop - low)]) for k, low in enumerate(range(first, stop, step)))
        for low, found in read_ahead(source.file, blocks):
            yield low, low + len(found), self._as_given(found, source, shape)

    def _as_given(self, stored: Any, source: StoredRows, shape: tuple[int, ...]) -> torch.Tensor:
        rows = torch.from_numpy(stored.reshape(-1)).view(source.dtype).reshape(len(stored), *shape)
        return rows.to(self._dtype).to(self._device)

    @staticmethod
    def _timed(function: Any, costs: LayerCosts, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args)
        finally:
            costs.apply_s += time.perf_counter() - begin


class _Output:
    """The field that a step writes, with shape and dtype of its first rows; a context manager."""

    def __init__(self, run: _Run, number: int, step: int, room: Room, costs: LayerCosts, label: str) -> None:
        self._making, self._n = run._making, run._g.num_nodes
        self._number, self._step, self._room, self._costs, self._label = number, step, room, costs, label
        self._shows, self._bar = run._shows, Progress(label, 0, False)
        self._stack = contextlib.ExitStack()
        self._writer: RowFileWriter | None = None
        self._field = self._making.field_of(step)
        self._of = ""  # for messages: the rows that later rows must match
        if self._field is not None:
            self._of = ", as the rows that the interrupted call left: another name for resume= starts over"
            self._open(self._field)

    @property
    def first(self) -> int:
        return 0 if self._writer is None else self._writer.n_rows

    def expect(self, total: int) -> None:
        self._bar = self._stack.enter_context(Progress(self._label, total, self._shows))

    def passed(self, n: int) -> None:
        self._bar.add(n)

    def write(self, first: int, stop: int, rows: Any) -> None:
        begin = time.perf_counter()
        name = f"layer {self._number}"
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
            raise TypeError(f"layer {self._number} returned {rows.dtype}: {error}") from None
        if not all(rows.shape[1:]):
            raise ValueError(f"layer {self._number} returned rows of shape {tuple(rows.shape[1:])}, which have no numbers")
        self._field = Field(self._n, rows.shape[1:], dtype)
        self._open(self._field)

    def _open(self, of: Field) -> None:
        self._writer = self._making.writer(self._step, of, self._room.buffer_bytes)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is None and self._writer is None:
            raise ValueError("a graph without nodes has no output: its width is not known")
