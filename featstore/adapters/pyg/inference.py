"""PyG's convolutions as layers of :func:`featstore.infer`, which run in blockwise passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_geometric.nn import GCNConv, SAGEConv

from featstore.inference.layers import Aggregate

__all__ = ["inference_layer"]


def inference_layer(conv: Any, then: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Aggregate:
    """Convert a convolution to an :class:`~featstore.Aggregate`, a layer that declares its aggregation.

    Parameters
    ----------
    conv : SAGEConv or GCNConv
        ``SAGEConv`` with ``aggr`` of ``"mean"`` or ``"sum"``, without projection; ``GCNConv`` with self loops and
        normalisation, which adds. Both without normalised outputs and edge weights, and from source to target.
    then : callable, optional
        Function after the convolution, row by row: normalisation, activation.

    Raises
    ------
    ValueError
        Another convolution, a subclass of these, or other options; the message shows how :func:`featstore.infer` takes it as
        ``layer(h, block)``.

    Notes
    -----
    If the output is narrower than the input, rows are multiplied before they are aggregated, which commutes. Hamilton et al.,
    NeurIPS 2017 (GraphSAGE); Kipf, Welling, ICLR 2017 (GCN).
    """
    finish = (lambda rows: rows) if then is None else then
    kind = type(conv) if getattr(conv, "flow", None) == "source_to_target" else None  # a subclass may compute something else
    if kind is GCNConv and conv.normalize and conv.add_self_loops and not conv.improved and conv.aggr in ("add", "sum"):
        return _of_gcn(conv, finish)
    if kind is SAGEConv and conv.aggr in ("mean", "sum") and not conv.normalize and not conv.project:
        return _of_sage(conv, finish)
    reason = f"{conv!r} has no blockwise form with its options"
    if isinstance(conv, GCNConv):  # it needs the degrees of sources, and takes no pair
        raise ValueError(
            f"{reason}: only GCNConv itself, with normalize=True, add_self_loops=True, improved=False and defaults, has one"
        )
    raise ValueError(
        f"{reason}: give infer lambda h, block: conv((h, h[: block.n_dst]), torch.stack([block.src, block.dst])), and in it what "
        "follows the convolution"
    )


def _of_gcn(conv: GCNConv, finish: Callable[[torch.Tensor], torch.Tensor]) -> Aggregate:
    bias, is_narrower = conv.bias, conv.out_channels < conv.in_channels

    def apply(_: None, aggregated: torch.Tensor) -> torch.Tensor:
        rows = aggregated if is_narrower else conv.lin(aggregated)
        return finish(rows if bias is None else rows + bias)

    return Aggregate(apply, "gcn", conv.lin if is_narrower else None, needs_self=False)


def _of_sage(conv: SAGEConv, finish: Callable[[torch.Tensor], torch.Tensor]) -> Aggregate:
    has_root = conv.root_weight

    def apply(h_self: torch.Tensor, aggregated: torch.Tensor) -> torch.Tensor:
        rows = conv.lin_l(aggregated)
        return finish(rows + conv.lin_r(h_self) if has_root else rows)

    return Aggregate(apply, str(conv.aggr), needs_self=has_root)
