"""Layers for inference, and the digest of a model that is compared before an interrupted run is resumed."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import xxhash
from torch.nn.parameter import is_lazy

from featstore.config import check_flag
from featstore.graph.passes import check_op
from featstore.sampling.batch import Block
from featstore.topology.types import EdgeKey

__all__ = ["Aggregate", "Layer", "TypedLayer", "checked", "digest_of_weights", "forms_of", "training_module"]


_CHANGING = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)  # their outputs, while they train


@dataclass(frozen=True)
class Aggregate:
    """A layer that declares its aggregation: it runs in blockwise passes, without a gather or a tensor of a row an edge.

    For node v it computes ``apply(h_v, aggregated)``, where ``aggregated`` is the mean, sum or normalised sum of ``before(h_u)``
    over v's in-neighbours u. If ``before`` makes rows narrower, passes are faster by as much.

    Parameters
    ----------
    apply : callable
        ``apply(h_self, aggregated)`` returns the layer's output for some nodes, a floating-point Tensor of shape (n, …).
        ``h_self`` has the nodes' rows, ``aggregated`` their aggregates, both Tensors of shape (n, …). It is called for a few
        thousand nodes at a time.
    op : {"mean", "sum", "gcn"}
        The aggregation, as defined by :meth:`featstore.OutOfCoreGraph.aggregate`.
    before : callable, optional
        ``before(rows)`` returns the rows to aggregate, for rows of some nodes. By default the rows themselves.
    needs_self : bool
        False: ``apply`` gets None in place of ``h_self``, and the nodes' own rows are not read.

    Examples
    --------
    >>> layer = Aggregate(lambda h_self, h_neigh: conv.lin_r(h_self) + conv.lin_l(h_neigh), "mean")
    """

    apply: Callable[[Any, torch.Tensor], torch.Tensor]
    op: str = "mean"
    before: Callable[[torch.Tensor], torch.Tensor] | None = None
    needs_self: bool = True

    def __post_init__(self) -> None:
        check_op(self.op)
        check_flag("needs_self", self.needs_self)
        for name, value in (("apply", self.apply), ("before", self.before)):
            if not callable(value) and not (name == "before" and value is None):
                raise TypeError(f"{name} must be callable, not {value!r}")


Layer: TypeAlias = Aggregate | Callable[[torch.Tensor, Block], torch.Tensor]
TypedLayer: TypeAlias = Callable[[dict[str, torch.Tensor], dict[EdgeKey, Block]], Mapping[str, torch.Tensor]]


def checked(layers: Any, *, typed: bool = False) -> list[Any]:
    """Check that :func:`featstore.infer` can run the layers; return them as a list. TypeError or ValueError otherwise.

    ``typed``: over a graph of several types.
    """
    if not isinstance(layers, Iterable):
        advice = _advice(layers, typed)
        raise TypeError(f"layers must be a sequence, not {_named(layers)}: give the model's layers in order, {advice}")
    found = list(layers)
    if not found:
        raise ValueError("layers: at least one is needed")
    for number, layer in enumerate(found):
        if not isinstance(layer, Aggregate) and not callable(layer):
            raise TypeError(f"layer {number} must be an Aggregate or callable, not {layer!r}")
        if typed and isinstance(layer, Aggregate):
            raise TypeError(f"layer {number} is an Aggregate, which is for graphs of one type: give a layer that takes blocks")
        if _is_pygs(layer):
            raise TypeError(f"layer {number} is {_named(layer)} of PyG, which takes no block: give {_advice(layer, typed)}")
    return found


def _named(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _is_pygs(value: Any) -> bool:
    """Tell whether a layer is PyG's own, which is called with ``edge_index``; a user's subclass may take a block."""
    return type(value).__module__.startswith(("torch_geometric.nn.conv.", "torch_geometric.nn.models."))


def _advice(value: Any, typed: bool) -> str:
    if typed and _is_pygs(value):
        edges = "{key: torch.stack([block.src, block.dst]) for key, block in blocks.items()}"
        return f"lambda h, blocks: conv(h, {edges}) of each HeteroConv, with what follows it"
    if _is_pygs(value):
        return "featstore.adapters.pyg.inference_layer(conv, then) of each conv; then is what follows it, such as torch.relu"
    return "each with what follows it, such as its activation"


def forms_of(layers: Iterable[Layer]) -> list[Any]:
    """Describe the form of each layer: its steps, without its code."""
    return [[each.op, each.before is not None, each.needs_self] if isinstance(each, Aggregate) else "block" for each in layers]


def digest_of_weights(layers: Iterable[Layer]) -> str:
    """Compute a digest of the parameters, buffers and train/eval modes of the modules that layers are, or are bound to.

    A function is bound to the values in its closure, defaults and partial arguments. Code and other values are not in the digest.
    """
    digest, seen = xxhash.xxh3_128(), set[int]()
    for number, layer in enumerate(layers):
        for function in (layer.apply, layer.before) if isinstance(layer, Aggregate) else (layer,):
            digest.update(f"{number};".encode())
            _add(digest, function, seen)
    return digest.hexdigest()


def training_module(layers: Iterable[Layer]) -> str | None:
    """Find a module with dropout or batch statistics in training mode among those that layers are, or are bound to."""
    values: list[Any] = [*layers]
    seen = set[int]()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Aggregate):
            values += [value.apply, value.before]
        elif isinstance(value, torch.nn.Module):
            for each in value.modules():
                if each.training and (isinstance(each, _CHANGING) or _drops(each)):
                    return type(each).__name__
        else:
            values += _bound(value)
    return None


def _drops(module: torch.nn.Module) -> bool:
    share = getattr(module, "dropout", None)
    return isinstance(share, float) and share > 0


def _add(digest: xxhash.xxh3_128, value: Any, seen: set[int]) -> None:
    """Add the weights of a module, of a tensor, or of the values that a callable is bound to."""
    if isinstance(value, torch.Tensor):
        if is_lazy(value):
            return
        digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
        dense = (value.to_dense() if value.layout != torch.strided else value).detach().cpu().contiguous()
        digest.update(dense.reshape(-1).view(torch.uint8).numpy().data)
    elif id(value) in seen:
        return
    elif isinstance(value, torch.nn.Module):
        seen.add(id(value))
        digest.update(f"{[each.training for each in value.modules()]};".encode())
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            digest.update(f"{name};".encode())
            _add(digest, tensor, seen)
    elif bound := _bound(value):
        seen.add(id(value))
        for each in bound:
            _add(digest, each, seen)


def _bound(value: Any) -> list[Any]:
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if not isinstance(value, types.FunctionType):
        return []
    found = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            found.append(cell.cell_contents)
    return found
