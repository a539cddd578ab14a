"""The nodes and the classes that ``featstore train`` trains with: splits by the names of node data, labels as class ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from featstore.config import listed
from featstore.creation.source import dtype_name
from featstore.sampling.batches import check_seeds

__all__ = ["SPLITS", "Labelled", "class_ids", "count_classes", "no_seeds", "split_seeds", "unknown_splits", "unlabelled"]

# The names that node data of a split may have; the first existing one counts. OGB's name is valid.
SPLITS = {
    "train": ("train_idx", "train_mask"),
    "val": ("val_idx", "valid_idx", "val_mask", "valid_mask"),
    "test": ("test_idx", "test_mask"),
}
MOST_CLASSES = 100_000  # ids beyond are numbers of something else, and the model's last layer has a row for each id up to them


class Labelled(Protocol):
    """Nodes with node data: a graph, or one type of nodes of it."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def node_data(self) -> Mapping[str, Any]: ...


def split_seeds(g: Labelled, split: str, labels: str) -> torch.Tensor | None:
    """Get the labelled nodes of a split, from the first existing name in :data:`SPLITS`; None if no name exists.

    A node has no label if all entries of its row are NaN, or negative in labels that are whole numbers. Errors are those of
    :func:`~featstore.sampling.batches.check_seeds`, and ValueError for labels without an entry for each node.
    """
    ids = _split_nodes(g, split)
    return None if ids is None else ids[_is_labelled(_labels_of(g, labels)[ids])]


def unlabelled(g: Labelled, labels: str) -> dict[str, tuple[int, int]]:
    """Count the nodes of each split that :func:`split_seeds` leaves out, and all nodes of the split; omit complete splits."""
    counts = {}
    for split in SPLITS:
        ids, seeds = _split_nodes(g, split), split_seeds(g, split, labels)
        if ids is not None and seeds is not None and len(seeds) < len(ids):
            counts[split] = len(ids) - len(seeds), len(ids)
    return counts


def _split_nodes(g: Labelled, split: str) -> torch.Tensor | None:
    for name in SPLITS.get(split, ()):
        if name in g.node_data:
            chosen = g.node_data[name]
            return check_seeds(chosen.bool() if name.endswith("mask") else chosen, g.num_nodes, what=f"{name!r}: seed")
    return None


def _labels_of(g: Labelled, name: str) -> torch.Tensor:
    y: torch.Tensor = g.node_data[name]
    if len(y) != g.num_nodes:
        raise ValueError(f"labels: {name!r} has {len(y)} entries for {g.num_nodes} nodes")
    return y


def _is_labelled(y: torch.Tensor) -> torch.Tensor:
    """Mark the rows that have a label, shape (n,)."""
    rows = y.flatten(1) if y.ndim > 1 else y[:, None]
    known = ~rows.isnan()
    if not rows.is_floating_point() or bool((rows == rows.floor())[known].all()):
        known &= rows >= 0
    return known.any(1)


def count_classes(g: Labelled, labels: str) -> int:
    """Count the classes of a model: one more than the largest class id among a graph's labels.

    ValueError: labels are not one number a node, or not whole numbers, or beyond :data:`MOST_CLASSES`.
    """
    y = _labels_of(g, labels)
    what, own = f"labels: {labels!r}", "for other tasks write a loop over featstore.Loader, which delivers any labels"
    if not len(y):
        return 0
    if y.numel() != len(y):
        raise ValueError(f"{what} has shape {tuple(y.shape)}; training takes one class id a node, of shape (n,) or (n, 1): {own}")
    most = -1
    for part in torch.split(y.reshape(-1), 1 << 20):  # in parts, so that temporary arrays are small
        if part.is_floating_point():
            broken = part[((part != part.floor()) & ~part.isnan()) | part.isinf()]
            if len(broken):
                text = f"{what} has {dtype_name(y.dtype)} values such as {broken[0].item():.6g}, which are no class ids"
                raise ValueError(f"{text}: training classifies nodes, by whole numbers from 0; {own}")
            part = part.nan_to_num(nan=-1)
        most = max(most, int(part.max()))
    if most >= MOST_CLASSES:
        raise ValueError(
            f"{what} has class ids up to {most}; training takes ids from 0 to {MOST_CLASSES - 1}: number the classes from 0, and "
            "keep a negative number where a node has none"
        )
    return most + 1


def class_ids(y: torch.Tensor) -> torch.Tensor:
    """Convert labels that :func:`count_classes` accepts to int64, shape (n,), negative for nodes without a label."""
    return (y.nan_to_num(nan=-1) if y.is_floating_point() else y).reshape(-1).to(torch.int64)


def unknown_splits(names: Iterable[str]) -> list[str]:
    """List the names that end in ``_idx`` or ``_mask``, as a split's do, but belong to no split."""
    known = {name for names in SPLITS.values() for name in names}
    return sorted(name for name in names if name.endswith(("_idx", "_mask")) and name not in known)


def no_seeds(seeds: torch.Tensor | None, there: Iterable[str]) -> str:
    """Explain why :func:`split_seeds` found no training seeds."""
    if seeds is None:
        return (
            f"the dataset has no training seeds: node data 'train_idx' or 'train_mask' is needed; it has {listed(sorted(there))}"
        )
    return "the dataset has no training seeds: its 'train_idx' or 'train_mask' names no node with a label"
