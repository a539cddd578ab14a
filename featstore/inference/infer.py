"""Inference of a model given layer by layer: every node's output, with all neighbours, out of core."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

import numpy as np
import torch

from featstore.config import check_flag, listed, refuse_path
from featstore.creation.source import dtype_name, torch_dtype
from featstore.creation.steps import FILES
from featstore.errors import FeatstoreWarning, warn
from featstore.gather.device import check_device
from featstore.gather.doublebuffer import double_buffer
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.derive.aggregate import files_of, generous, room_in
from featstore.graph.derive.making import check_new_feature
from featstore.graph.derive.sharedmaking import SharedMaking
from featstore.graph.feature import FeatureStore
from featstore.graph.passes import Passes, StoredRows, summed_dtype
from featstore.inference.gathered import WholeBlock, whole_block, whole_blocks
from featstore.inference.layers import Aggregate, Layer, TypedLayer, checked, digest_of_weights, forms_of, training_module
from featstore.inference.output import LayerCosts, Output
from featstore.ranks import Meeting
from featstore.topology.types import ONE_EDGE, ONE_NODE, NodeType, qualified

__all__ = ["Run", "infer", "run_layers"]

HOLDER: Final = "inference"  # in the budget's report


@overload
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
    rank: int | None = None,
    world_size: int | None = None,
) -> FeatureStore: ...
@overload
def infer(
    g: OutOfCoreGraph,
    layers: Sequence[TypedLayer],
    features: Mapping[str, str],
    out: str = "h",
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    memory: int | str | None = None,
    resume: str | None = None,
    progress: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
) -> dict[str, FeatureStore]: ...


def infer(
    g: OutOfCoreGraph,
    layers: Sequence[Layer] | Sequence[TypedLayer],
    features: str | Mapping[str, str] = "x",
    out: str = "h",
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    overwrite: bool = False,
    memory: int | str | None = None,
    resume: str | None = None,
    progress: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
) -> FeatureStore | dict[str, FeatureStore]:
    """Compute every node's output by a model given layer by layer, with all in-neighbours, and add it as a feature.

    Parameters
    ----------
    g : OutOfCoreGraph
    layers : sequence of Aggregate or callable
        The model's layers, in order. An :class:`~featstore.Aggregate` declares its aggregation, and runs in blockwise passes. Any
        other layer is called as in a training loop, ``layer(h, block)``. ``h`` has the rows of the block's sources, shape
        (n_src, …); the first ``n_dst`` rows are the destinations'. The layer returns the destinations' outputs, shape
        (n_dst, …). A layer includes all that follows it, such as its activation. Call ``model.eval()`` before.

        In a graph of several types a layer is called with rows and blocks by type, ``layer(h, blocks)``, for some nodes of one
        type and all edges into them. ``blocks`` has a Block of each type of edges that ends there. ``h`` has the rows of that
        type, the destinations' first, and of the types of sources; a type without rows has a Tensor of shape (n, 0). The layer
        returns a mapping, of which the destinations' type counts: their outputs, shape (n_dst, …), or outputs of all rows
        in ``h`` of the type, whose first ones count. If it returns none for a type, that type has no rows in the next layer.
    features : str or mapping of str to str
        The feature that the first layer gets; in a graph of several types that of each type which has one, such as
        ``{"paper": "x"}``.
    out : str
        Name of the new feature, the last layer's output; in a graph of several types of each type which has one.
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
    rank, world_size : int, optional
        Those of torch's process group by default: all ranks call alike, with the same layers, on one dataset, and each makes its
        rows of every layer. ``rank=0, world_size=1`` makes the feature alone.

    Returns
    -------
    FeatureStore or dict of str to FeatureStore
        ``g.features[out]``: row v is node v's output. With several types ``g[type].features[out]`` by type.

    Raises
    ------
    KeyError, ValueError, TypeError
        There is no such feature, or type; the name is taken; there are no layers, or a layer cannot be called; a layer returned
        no floating-point tensor of one row a node (the error names the layer).
    BudgetError
        Too little memory for the sums of one node, or for a node with all its in-neighbours; the error names enough memory.
    BusyError, CommittedError, CorruptionError, OSError, RuntimeError
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
    >>> def sage(layer):
    ...     return Aggregate(lambda h, mean: (layer.of_self(h) + layer.of_neighbors(mean)).relu())
    >>> h = featstore.infer(g, [sage(layer) for layer in model.layers])
    """
    with Meeting(rank, world_size) as meeting:
        run = run_layers(g, layers, features, out, dtype, device, overwrite, memory, resume, progress, meeting)
    stores: dict[str, FeatureStore] = {of: g.features[qualified(of, out)] for of in run.types_made}
    return stores[ONE_NODE] if g.types.is_one else stores


def run_layers(
    g: OutOfCoreGraph,
    layers: Sequence[Layer] | Sequence[TypedLayer],
    features: str | Mapping[str, str],
    out: str,
    dtype: torch.dtype | str | None,
    device: str | torch.device,
    overwrite: bool,
    memory: int | str | None,
    resume: str | None,
    progress: bool,
    meeting: Meeting,
) -> Run:
    """Run :func:`infer` with the same arguments; return the run, which has its costs and the types with an output.

    The caller has entered ``meeting``: a handle of one rank alone may refuse.
    """
    for each, flag in (("overwrite", overwrite), ("progress", progress)):
        check_flag(each, flag)
    refuse_path(g)
    if not hasattr(g, "topology"):
        raise TypeError(f"a graph with an adjacency is needed, not a {type(g).__name__}")
    g.refuse_part("infer()")
    if resume is not None and (not isinstance(resume, str) or not resume):
        raise TypeError(f"resume must be a name of this model, such as 'sage-1', not {resume!r}")
    layers = checked(layers, typed=not g.types.is_one)
    if (training := training_module(layers)) is not None:
        text = f"layers: a {training} is in training mode, which changes outputs: call model.eval() first"
        warn(text, FeatstoreWarning)
    of_types = _features_of_types(g, features)
    stored = [g.features[qualified(of, name)].dtype for of, name in of_types.items()]
    usual = torch.float64 if torch.float64 in stored else torch.float32
    given = usual if dtype is None else torch_dtype(dtype_name(dtype))
    if given not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be float32 or float64, not {dtype}")
    for of, name in of_types.items():
        g.check_in_file(qualified(of, name))
        if out == name:
            raise ValueError(f"out: {qualified(of, out)!r} is the feature that is read; choose another name")
    kinds = list(g.types.nodes)
    check_new_feature(g.catalog, out, overwrite, kinds)
    for of in kinds:
        g.fields.check_replaceable(out, of)
    keys = [f"node/{of}/{name}" for of, name in of_types.items()]
    recipe: dict[str, Any] | None = None
    is_named = resume is not None
    if is_named or meeting.world_size > 1:  # several ranks compare what they run
        recipe = {
            "what": "infer",
            "resume": resume,
            FILES: files_of(g.catalog, keys),
            "number of layers": len(layers),
            "forms of layers": forms_of(layers),
            "weights or train/eval modes": digest_of_weights(layers),
            "dtype": str(given),
        }
        if not g.types.is_one:  # types may share a file
            recipe["features"] = of_types
    with (
        generous(g.budget, memory),
        SharedMaking(
            meeting,
            g,
            g.catalog,
            out,
            recipe if is_named else None,
            keys,
            of=kinds,
            overwrite=overwrite,
            progress=progress,
            same=recipe,
        ) as making,
        torch.inference_mode(),
    ):
        run = Run(g, making, out, of_types, given, check_device(device), memory, progress and making.is_shown)
        for number, layer in enumerate(layers):
            run.layer(number, len(layers), layer)
        made = run.made_by(len(layers) - 1)
        catalog = making.commit(made)
        for of in made:
            g.fields.adopt_feature(catalog, out, of)
        making.end()
        run.types_made = list(made)
    return run


def _features_of_types(g: OutOfCoreGraph, features: Any) -> dict[str, str]:
    """Read the features of the first layer by type of nodes; TypeError, ValueError or KeyError if they are not the graph's."""
    if g.types.is_one:
        if not isinstance(features, str):
            raise TypeError(f"features must be the name of a feature in a graph of one type, not {features!r}")
        g.features[features]  # the KeyError names those that are there
        return {ONE_NODE: features}
    there = listed(g.node_types)
    if not isinstance(features, Mapping):
        raise TypeError(
            'features must be a mapping of types of nodes to names, such as {"paper": "x"}, in a graph of several types, not '
            f"{features!r}; its types are {there}"
        )
    for of, name in features.items():
        if of not in g.types.nodes:
            raise ValueError(f"features: the graph has no node type {of!r}; it has {there}")
        g[of].features[name]
    return dict(features)


_Sources = dict[str, tuple[StoredRows, tuple[int, ...]]]  # rows by type of nodes, and their shape


class Run:
    """Run of the layers, one after the other; in a graph of several types each layer for one type of nodes after another.

    Steps of the making: of layer i and the k-th of T types, ``2 (i T + k)`` is the rows of an Aggregate's ``before``, and the
    next one its output.
    """

    def __init__(
        self,
        g: OutOfCoreGraph,
        making: SharedMaking,
        out: str,
        features: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device,
        memory: int | str | None,
        progress: bool,
    ) -> None:
        self._g, self._making, self._out = g, making, out
        self._features, self._dtype, self._device = features, dtype, device
        self._memory, self._shows = memory, progress
        self._kinds = list(g.types.nodes.values())
        self.costs: list[LayerCosts] = []
        self.types_made: list[str] = []

    def _step(self, number: int, k: int) -> int:
        return 2 * (number * len(self._kinds) + k) + 1

    def made_by(self, number: int) -> dict[str, int]:
        """Find the types of which a layer has made an output, with its steps."""
        steps = {kind.name: self._step(number, k) for k, kind in enumerate(self._kinds)}
        return {name: step for name, step in steps.items() if self._making.field_of(step) is not None}

    def layer(self, number: int, n_layers: int, layer: Layer | TypedLayer) -> None:
        making, last = self._making, len(self._kinds) - 1
        if making.is_done(self._step(number, last)):
            return
        begin, costs = time.perf_counter(), LayerCosts()
        for k, kind in enumerate(self._kinds):
            step = self._step(number, k)
            if making.is_done(step):
                continue
            label = f"layer {number + 1}/{n_layers}" + (f", {kind.name}" if len(self._kinds) > 1 else "")
            with contextlib.ExitStack() as stack:
                sources = self._sources(stack, number)
                if not isinstance(layer, Aggregate):
                    is_made = self._general(number, step, kind, layer, sources, costs, label)
                else:
                    own = passed = sources[kind.name]
                    if layer.before is not None:
                        if not making.is_done(step - 1):
                            self._map(number, step - 1, kind, layer, own, costs, label)
                        passed = self._open(stack, step - 1)
                    self._aggregate(number, step, kind, layer, own, passed, costs, label)
                    is_made = True
            there = self._g.catalog.by_role("feature", f"node/{kind.name}")
            if not is_made and number == n_layers - 1 and self._out in there:  # it would stay beside this model's
                of = qualified(kind.name, self._out)
                raise ValueError(
                    f"out: there is a feature {of!r}, and the last layer has no rows of its type; choose another name"
                )
            if k == last and not is_made and not self.made_by(number):
                raise ValueError(f"layer {number} returned rows of no type of nodes")
            # What a layer read is needed until all types have its output.
            drops = [step - 1, *(self._step(number - 1, each) for each in range(last + 1) if k == last)]
            (making.finish if is_made else making.skip)(step, drops)
        costs.total_s = time.perf_counter() - begin
        self.costs.append(costs)

    def _sources(self, stack: contextlib.ExitStack, number: int) -> _Sources:
        """Open the rows that a layer reads."""
        if number:
            return {name: self._open(stack, step) for name, step in self.made_by(number - 1).items()}
        found: _Sources = {}
        for of, name in self._features.items():
            found[of] = self._g.fields.rows_of(name, of), tuple(self._g.features[qualified(of, name)].shape[1:])
        return found

    def _open(self, stack: contextlib.ExitStack, step: int) -> tuple[StoredRows, tuple[int, ...]]:
        field_of = self._making.field_of(step)
        assert field_of is not None
        file = stack.enter_context(contextlib.closing(self._making.open(step, self._g.reader)))
        return StoredRows(file, torch_dtype(field_of.dtype), math.prod(field_of.row_shape)), field_of.row_shape

    # -- kinds of layers -------------------------------------------------------------------------------------------------------

    def _map(
        self,
        number: int,
        step: int,
        kind: NodeType,
        layer: Aggregate,
        own: tuple[StoredRows, tuple[int, ...]],
        costs: LayerCosts,
        label: str,
    ) -> None:
        """Write the rows that a layer aggregates: ``before`` of the rows that the layer gets."""
        assert layer.before is not None
        _, end = self._making.share(step, kind.n)
        if self._making.writes:
            row_bytes = self._piece_row(own[0])
            room = room_in(self._g.budget, self._memory, row_bytes)
            output = Output(self._making, number, step, kind, room, costs, f"{label}: what is aggregated", self._shows)
            with self._g.budget.reserve(HOLDER, room.held), output:
                output.expect((end - output.first) * row_bytes)
                n = max(1, room.piece_bytes // row_bytes)
                for first, stop, rows in self._pieces(own, output.first, end, n):
                    output.write(first, stop, self._timed(layer.before, costs, rows))
                    output.passed((stop - first) * row_bytes)
        self._making.finish(step)

    def _aggregate(
        self,
        number: int,
        step: int,
        kind: NodeType,
        layer: Aggregate,
        own: tuple[StoredRows, tuple[int, ...]],
        passed: tuple[StoredRows, tuple[int, ...]],
        costs: LayerCosts,
        label: str,
    ) -> None:
        g, (rows, shape) = self._g, passed
        _, end = self._making.share(step, kind.n, [g.edge_lists()])
        if not self._making.writes:
            return
        summed = summed_dtype(rows.dtype)
        sums = summed if self._dtype == torch.float32 else torch.float64
        per_row = self._piece_row(own[0]) + sums.itemsize * rows.width
        room = room_in(g.budget, self._memory, per_row)
        output = Output(self._making, number, step, kind, room, costs, label, self._shows)
        with g.budget.reserve(HOLDER, room.held), output:
            with Passes(
                g.edge_lists(),
                rows,
                layer.op,
                sums,
                g.budget,
                room.passes,
                g.options.threads,
                HOLDER,
                output.passed,
                output.first,
                end,
            ) as passes:
                output.expect(passes.total_bytes)
                for block in passes.blocks():
                    found = torch.from_numpy(block.sums).reshape(len(block.sums), *shape)
                    n = max(1, room.piece_bytes // per_row)
                    for first, stop, h_self in self._pieces(own if layer.needs_self else None, block.first, block.stop, n):
                        aggregated = found[first - block.first : stop - block.first].to(self._dtype).to(self._device)
                        output.write(first, stop, self._timed(layer.apply, costs, h_self, aggregated))
                costs.passes = passes.costs

    def _general(
        self,
        number: int,
        step: int,
        kind: NodeType,
        layer: Any,
        sources: _Sources,
        costs: LayerCosts,
        label: str,
    ) -> bool:
        """Write a layer's output of a type, block by block; return False if the layer has none."""
        g = self._g
        into = [g.edge_lists(each.key) for each in g.types.edges_into(kind.name)]
        _, end = self._making.share(step, kind.n, into)
        if not self._making.writes:
            return True  # as other ranks say, unless they have none
        rows = {name: stored for name, (stored, _) in sources.items()}
        room = room_in(g.budget, self._memory, 0)
        output = Output(self._making, number, step, kind, room, costs, label, self._shows)
        with g.budget.reserve(HOLDER, room.held), output:
            output.expect(end - output.first)
            blocks: Iterable[WholeBlock]
            item = self._dtype.itemsize
            blocks = whole_blocks(into, kind, rows, item, output.first, end, g.budget, room.passes, HOLDER)
            if not kind.n and not g.types.is_one:
                blocks = [whole_block(into, kind, rows, 0, 0)]  # by which the width of the type's output is known
            for block in blocks:
                h = {name: self._as_given(each, sources.get(name)) for name, each in block.rows.items()}
                edges = {key: each.map(lambda tensor: tensor.to(self._device)) for key, each in block.edges.items()}
                if g.types.is_one:
                    returned = self._timed(layer, costs, h[ONE_NODE], edges[ONE_EDGE])
                else:
                    of_types = self._timed(layer, costs, h, edges)
                    returned = output.own(of_types, block.n_dst, len(h[kind.name]))
                    if returned is None:
                        return False
                output.write(block.first, block.first + block.n_dst, returned)
                output.passed(block.n_dst)
                costs.blocks += 1
        return True

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
        source = own[0]
        buffers = np.empty((2, min(step, max(1, stop - first)), source.file.row_bytes), np.uint8)
        blocks = ((source.first + low, buffers[k % 2, : min(step, stop - low)]) for k, low in enumerate(range(first, stop, step)))
        for at, found in double_buffer(source.file.read, blocks):
            low = at - source.first
            yield low, low + len(found), self._as_given(found, own)

    def _as_given(self, stored: Any, of: tuple[StoredRows, tuple[int, ...]] | None) -> torch.Tensor:
        """Convert stored rows to those that a layer gets; without ``of`` rows that have no numbers."""
        if of is None:
            return torch.empty(len(stored), 0, dtype=self._dtype, device=self._device)
        source, shape = of
        rows = torch.from_numpy(stored.reshape(-1)).view(source.dtype).reshape(len(stored), *shape)
        return rows.to(self._dtype).to(self._device)

    @staticmethod
    def _timed(function: Any, costs: LayerCosts, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args)
        finally:
            costs.apply_s += time.perf_counter() - begin
