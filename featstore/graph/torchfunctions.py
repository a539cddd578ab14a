"""A feature store in torch: the functions that take one, those that select rows; and compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["torch_function", "uncompiled"]

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Let code that ``torch.compile`` compiles call a function as it is: the graph breaks, and nothing in it is traced.

    Traced, NumPy's calls become torch's, and the memory of one call's tensors serves the next.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            # Here, not at definition: it imports the compiler, which takes seconds.
            return cast(T, torch.compiler.disable(function)(*args, **kwargs))  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return call


class Rows(Protocol):
    """What is asked of a feature store here."""

    ndim: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> torch.Tensor: ...
    def take(self, rows: Any, out: torch.Tensor | None = None) -> torch.Tensor: ...


@uncompiled
def torch_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Do what ``func`` does to a tensor for a feature store among its arguments.

    Raises
    ------
    TypeError
        It is not defined for a store: neither ``index_select`` nor ``embedding``; or for such arguments.
    IndexError, CorruptionError, OSError, BudgetError, ClosedError
        As :meth:`~featstore.FeatureStore.take`.
    """
    if getattr(func, "__name__", None) == "index_select":  # by name: PyG puts a function of its own in the place of torch's
        return _index_select(*args, **kwargs)
    if func is torch.nn.functional.embedding:
        return _embedding(*args, **kwargs)
    name = getattr(func, "__name__", func)
    raise TypeError(
        f"{name} is not defined for a FeatureStore: rows are read by store[ids], torch.index_select(store, 0, ids) or "
        "torch.nn.functional.embedding(ids, store); call it on what they return"
    )


def _torch_ids(function: str, ids: Any, n: int) -> npt.NDArray[np.integer[Any]]:
    """Return ids as torch's own functions take them: int32 or int64, never counted from the end."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function} wants an int32 or int64 tensor of ids")
    array: npt.NDArray[np.integer[Any]] = ids.detach().cpu().numpy()
    if array.size and array.min() < 0:
        position = int((array.reshape(-1) < 0).argmax())
        found = int(array.reshape(-1)[position])
        raise IndexError(f"row {found} at position {position} is out of range for {n} rows: {function} takes no negative ids")
    return array


def _index_select(input: Rows, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if dim not in (0, -input.ndim):
        raise TypeError(f"only dimension 0 of a FeatureStore can be selected from, not {dim}")
    if not isinstance(index, torch.Tensor) or index.ndim > 1:
        raise TypeError("index_select wants a 1-D int32 or int64 tensor of ids")
    return input.take(_torch_ids("index_select", index, len(input)).reshape(-1), out=out)


def _embedding(
    input: torch.Tensor,
    weight: Rows,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None:
        raise TypeError("max_norm would change stored rows; a FeatureStore is read-only")
    return weight[_torch_ids("embedding", input, len(weight))]
