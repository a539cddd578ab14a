"""Gradients of rows pulled from a history, which reach the layers that computed these rows at a later step."""

from __future__ import annotations

import torch

from featstore.sampling.batch import HistoryRows

__all__ = ["pass_on", "sums_dtype"]


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of rows of ``dtype`` are added up: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def pass_on(merged: torch.Tensor, rows: HistoryRows, sums: torch.Tensor) -> None:
    """Add a hook to a batch's backward pass that stores gradients of pulled rows, and passes stored ones to pushed rows.

    Parameters
    ----------
    merged : tensor, shape (n_sources, dim)
        The input of the last layer, with gradients.
    rows : HistoryRows
        Pulled and pushed sources. A source is never both.
    sums : tensor, shape (n_kept, dim)
        The sum of stored gradients for each slot; zero again once it is passed on.
    """

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        sums.index_add_(0, rows.pull_slots, gradient.index_select(0, rows.pull).to(sums.dtype))
        waiting = sums.index_select(0, rows.push_slots).to(gradient.dtype)
        sums.index_fill_(0, rows.push_slots, 0)
        return gradient.index_add(0, rows.push, waiting)

    if len(rows.pull) or len(rows.push):
        merged.register_hook(backward)  # type: ignore[no-untyped-call]
