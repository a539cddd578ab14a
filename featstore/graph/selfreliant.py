"""Self-reliant parts: the training nodes of each of several processes, whose neighbourhoods are the only nodes that it needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["SelfReliantParts"]


@dataclass(frozen=True, eq=False)
class SelfReliantParts:
    """Training nodes by part; a part also has the in-neighbours of its training nodes, within some hops.

    Attributes
    ----------
    num_nodes : int
        Of the graph.
    hops : int
        Hops of in-neighbours that belong to a part.
    train_nodes : int64 tensor, shape (n_train,)
        By part, ascending within each; each training node is in one part.
    offsets : int64 array, shape (n_parts + 1,)
        Where the training nodes of each part begin.
    n_nodes : int64 array, shape (n_parts,)
        Nodes of each part: its training nodes and their in-neighbours, which may be training nodes of other parts.
    """

    num_nodes: int
    hops: int
    train_nodes: torch.Tensor
    offsets: npt.NDArray[np.int64]
    n_nodes: npt.NDArray[np.int64]

    def __repr__(self) -> str:
        return f"SelfReliantParts({self.n_parts} parts, {self.hops} hops, {len(self.train_nodes)} training nodes)"

    @property
    def n_parts(self) -> int:
        """Number of parts; some may be empty."""
        return len(self.n_nodes)

    def part(self, i: int) -> torch.Tensor:
        """Get the training nodes of part ``i``, ascending: int64, a view. IndexError if there is no such part."""
        if not 0 <= i < self.n_parts:
            raise IndexError(f"part {i} is not in [0, {self.n_parts})")
        return self.train_nodes[int(self.offsets[i]) : int(self.offsets[i + 1])]
