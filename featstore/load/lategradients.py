"""Gradients of rows that are pulled from a history, on their way to the layers that have once computed them."""

from __future__ import annotations

import torch

from featstore.sampling.batch import HistoryRows

__all__ = ["pass_on", "sums_dtype"]


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of rows of ``dtype`` are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def pass_on(merged: torch.Tensor, rows: HistoryRows, sums: torch.Tensor) -> None:
    """Have the backward pass of a batch add gradients of pulled rows to ``sums``, and give computed rows what waits for them.

    Parameters
    ----------
    merged : tensor, shape (n_sources, dim)
        What enters the last layer, with gradients.
    rows : HistoryRows
        A source is pulled or pushed, never both.
    sums : tensor, shape (n_kept, dim)
        A row a slot; zero again once it was given on.
    """

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        sums.index_add_(0, rows.pull_slots, gradient.index_select(0, rows.pull).to(sums.dtype))
        waiting = sums.index_select(0, rows.push_slots).to(gradient.dtype)
        sums.index_fill_(0, rows.push_slots, 0)
        return gradient.index_add(0, rows.push, waiting)

    if len(rows.pull) or len(rows.push):
        merged.register_hook(backward)  # type: ignore[no-untyped-call]
