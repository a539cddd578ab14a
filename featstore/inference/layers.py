"""Layers as inference takes them, and what tells one model from another where a killed run is gone on with."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import xxhash

from featstore.config import check_flag
from featstore.graph.passes import check_op
from featstore.sampling.batch import Block

__all__ = ["Aggregate", "Layer", "fingerprint"]

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Aggregate:
    """A layer that says what it aggregates: blockwise passes run it, with no gather and no tensor of a row an edge.

    For node v it computes ``apply(h_v, aggregated)``, where ``aggregated`` is the mean, sum or normalised sum of ``before(h_u)``
    over v's in-neighbours u. If ``before`` makes rows narrower, passes are faster by as much.

    Parameters
    ----------
    apply : callable
        Given ``h_self``, Tensor of shape (n, …), the rows of some nodes, and ``aggregated``, Tensor of shape (n, …), returns the
        layer's output for them, a floating-point Tensor of shape (n, …). It is called for a few thousand nodes at a time.
    op : {"mean", "sum", "gcn"}
        As :meth:`featstore.OutOfCoreGraph.aggregate` defines them.
    before : callable, optional
        Given rows of some nodes, returns what is aggregated of them. By default the rows themselves.
    needs_self : bool
        False: ``apply`` gets None in place of ``h_self``, whose rows are not read then.

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


def fingerprint(layers: Iterable[Layer]) -> str | None:
    """Return what tells layers from others: their weights, their code, what they refer to; None where that is not known."""
    digest = xxhash.xxh3_128()
    try:
        for layer in layers:
            _add(digest, layer, [])
    except _Unknown:
        return None
    return digest.hexdigest()


class _Unknown(Exception):
    """Something that no fingerprint can be taken of."""


def _add(digest: xxhash.xxh3_128, value: Any, path: list[int]) -> None:
    """Add a value, and what it refers to."""
    if id(value) in path:  # it refers to itself
        return
    path = [*path, id(value)]
    digest.update(f"{type(value).__module__}.{type(value).__qualname__};".encode())
    if isinstance(value, (*_PLAIN, torch.dtype, torch.device, torch.Size)):
        digest.update(repr(value).encode())
    elif isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        digest.update(f"{dense.dtype} {tuple(dense.shape)};".encode())
        digest.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, torch.nn.Module):
        digest.update(f"{value!r} {value.training};".encode())
        for each in value.modules():
            _add_code(digest, type(each).forward, path)
        for name, tensor in value.state_dict().items():
            digest.update(name.encode())
            _add(digest, tensor, path)
    elif isinstance(value, Aggregate):
        _add(digest, [value.apply, value.before, value.op, value.needs_self], path)
    elif isinstance(value, types.MethodType):
        _add(digest, value.__self__, path)
        _add(digest, value.__func__, path)
    elif isinstance(value, functools.partial):
        _add(digest, [value.func, list(value.args), value.keywords], path)
    elif isinstance(value, types.FunctionType):
        _add_code(digest, value, path)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(digest, each, path)
    elif isinstance(value, dict):
        for key, each in value.items():
            _add(digest, key, path)
            _add(digest, each, path)
    elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
        digest.update(getattr(value, "__name__", "").encode())
    else:
        raise _Unknown


def _add_code(digest: xxhash.xxh3_128, function: Any, path: list[int]) -> None:
    """Add a function's code, its defaults, and the values of the names that it uses."""
    if not isinstance(function, types.FunctionType):
        raise _Unknown
    code = function.__code__
    is_library = function.__module__.split(".")[0] == "torch"  # its code does not change between runs
    digest.update(code.co_code)
    if is_library:
        return
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            digest.update(constant.co_code)
        elif not isinstance(constant, frozenset):
            _add(digest, constant, path)
    for each in function.__defaults__ or ():
        _add(digest, each, path)
    for cell in function.__closure__ or ():
        _add(digest, cell.cell_contents, path)
    for name in code.co_names:
        if name in function.__globals__:
            digest.update(name.encode())
            _add(digest, function.__globals__[name], path)
