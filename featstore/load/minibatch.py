"""The mini-batch that a loader delivers to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from featstore.config import no_attribute
from featstore.display import Display, ShownAsTables
from featstore.gather.buffers import memory_errors
from featstore.load.history import BatchHistory
from featstore.load.report import show_batch
from featstore.registry import adapter
from featstore.sampling.batch import Block

__all__ = ["LoadedBatch", "MiniBatch", "Move"]

Self = TypeVar("Self", bound="LoadedBatch")
Move = Callable[[torch.Tensor], torch.Tensor]
_PYGS = "batch_size e_id edge_attr edge_index edge_index_dict edge_weight n_id num_nodes x_dict"
_ELSEWHERE: Final = {
    **dict.fromkeys(_PYGS.split(), "PyG's batches have it: batch.to_pyg(), or a featstore.adapters.pyg.NeighborLoader"),
    "cuda": "batch.to('cuda') copies it",
    "input_nodes": "these are batch.input_ids",
    "output_nodes": "these are batch.seeds",
}


class LoadedBatch(ShownAsTables, ABC):
    """Base of batches of one type of nodes and of several: labels of their seeds, and tensors that move together."""

    labels: dict[str, torch.Tensor]
    history: BatchHistory | Any

    if not TYPE_CHECKING:  # for a type checker __getattr__ would define every name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property failed: with the error of its own
                return object.__getattribute__(self, name)
            raise no_attribute(self, name, _ELSEWHERE.get(name, ""))

    @property
    def y(self) -> torch.Tensor | Any:  # Any: type checkers ask for no test for None
        """The first of the labels; None if there are none."""
        return next(iter(self.labels.values()), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; ``seeds`` is a part of ``input_ids``."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def to(self: Self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Copy the batch to ``device``; tensors that are there already are shared.

        The memory of a batch on the CPU is not pinned, so a copy from it has been read when the call returns, even with
        ``non_blocking``.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: Self) -> Self:
        """Copy the batch to pinned memory, from which copies to an accelerator may run beside computing."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Prevent reuse of the memory of a batch on a CUDA device before ``stream`` is done with it.

        The loader calls this for the stream that is current when it delivers the batch. Call it for every other stream that
        uses the batch.
        """
        for tensor in self._tensors():
            tensor.record_stream(stream)

    @property
    @abstractmethod
    def gathered(self) -> Mapping[str, torch.Tensor]:
        """The rows of each feature as they were gathered, by the name of its store."""

    @abstractmethod
    def with_gathered(self: Self, rows: dict[str, torch.Tensor]) -> Self:
        """Make the batch with ``rows`` in place of :attr:`gathered`."""

    @abstractmethod
    def _tensors(self) -> list[torch.Tensor]:
        """List all tensors."""

    @abstractmethod
    def _map(self: Self, move: Move) -> Self:
        """Make the batch with ``move(tensor)`` in place of each tensor."""


@dataclass(eq=False, repr=False)
class MiniBatch(LoadedBatch):
    """One batch of a :class:`~featstore.Loader`: a sampled neighbourhood with its features.

    Attributes
    ----------
    seeds : int64 tensor, shape (n_seeds,)
        The nodes of the loss, each once: the first of ``input_ids``.
    input_ids : int64 tensor, shape (n,)
        Nodes of the batch; distinct, unless there is a subgraph for each seed.
    blocks : tuple of Block
        One bipartite block a hop, outermost first, which is the order in which layers use them.
    features : dict of str to tensor, shape (n, …)
        Row ``k`` of each belongs to ``input_ids[k]``.
    labels : dict of str to tensor, shape (n_given, …)
        Row ``k`` of each belongs to ``seeds[seed_index[k]]``, which is ``seeds[k]`` where no seed repeats.
    index : int
        The batch's number in the epoch, which does not depend on the order in which batches run.
    seed_index : int64 tensor, shape (n_given,)
        The position in ``seeds`` of each seed of the batch as it was given: ``0, 1, …`` where no seed repeats. The loss is that
        of ``out[batch.seed_index]`` and ``batch.y``.
    seed_positions : int64 tensor, shape (n_given,), or None
        Where each of these seeds is among all that the loader was given (of a mask: among its true nodes). None: of a pack, or
        of batches that do not say.
    edge_features : dict of str to tuple of tensors
        One tensor a block, of shape (n_edges, …): its row ``k`` belongs to the ``k``-th edge of the block.
    batch : int64 tensor, shape (n,), or None
        Of a sampler with ``disjoint=True``: the number of the seed whose subgraph each node is of; ``input_ids`` then has a node
        once in each subgraph that reaches it.
    history : BatchHistory or None
        The rows that the batch pulls and pushes, if its loader has a :class:`~featstore.History`. The last block then has more
        sources than the block before has destinations, and ``input_ids`` begins with the destinations of that block.
    """

    seeds: torch.Tensor
    input_ids: torch.Tensor
    blocks: tuple[Block, ...]
    features: dict[str, torch.Tensor]
    labels: dict[str, torch.Tensor]
    index: int
    seed_index: torch.Tensor
    seed_positions: torch.Tensor | None = None
    edge_features: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    batch: torch.Tensor | None = None
    history: BatchHistory | Any = None  # Any: type checkers ask for no test for None; a loop knows whether it has a history

    @property
    def x(self) -> torch.Tensor:
        """The first feature."""
        for tensor in self.features.values():
            return tensor
        raise AttributeError("this loader was made with features=[]: its batches have no x")

    @property
    def gathered(self) -> Mapping[str, torch.Tensor]:
        """See :class:`LoadedBatch`."""
        return self.features

    def with_gathered(self, rows: dict[str, torch.Tensor]) -> MiniBatch:
        """See :class:`LoadedBatch`."""
        return replace(self, features=rows)

    def _tensors(self) -> list[torch.Tensor]:
        of_edges = (rows for blocks in self.edge_features.values() for rows in blocks)
        of_blocks = (each for block in self.blocks for each in block.tensors)
        of_history = () if self.history is None else self.history.rows.tensors
        more = (each for each in (self.seed_positions, self.batch) if each is not None)
        of_seeds = self.seed_index, *self.labels.values(), *more
        return [self.input_ids, *self.features.values(), *of_seeds, *of_blocks, *of_edges, *of_history]

    def to_pyg(self) -> Any:
        """Return the batch as a ``torch_geometric.data.Data``; see :func:`featstore.adapters.pyg.to_data`.

        Raises
        ------
        MissingExtraError
            torch_geometric is not installed.
        OptionError
            A feature or a label has a name that PyG's batches use.
        """
        with memory_errors():
            return adapter("pyg").to_data(self)

    def _map(self, move: Move) -> MiniBatch:
        input_ids = move(self.input_ids)
        return MiniBatch(
            seeds=input_ids[: len(self.seeds)],
            input_ids=input_ids,
            blocks=tuple(block.map(move) for block in self.blocks),
            features={name: move(tensor) for name, tensor in self.features.items()},
            labels={name: move(tensor) for name, tensor in self.labels.items()},
            index=self.index,
            seed_index=move(self.seed_index),
            seed_positions=None if self.seed_positions is None else move(self.seed_positions),
            edge_features={name: tuple(map(move, blocks)) for name, blocks in self.edge_features.items()},
            batch=None if self.batch is None else move(self.batch),
            history=None if self.history is None else self.history.map(move),
        )

    def _display(self) -> Display:
        head = f"index={self.index}, seeds={len(self.seeds)}, nodes={len(self.input_ids)}, hops={len(self.blocks)}"
        tensors = {"input_ids": self.input_ids}
        tensors |= {f"features[{name!r}]": tensor for name, tensor in self.features.items()}
        tensors |= {f"labels[{name!r}]": tensor for name, tensor in self.labels.items()}
        for name, of_blocks in self.edge_features.items():
            tensors |= {f"edge_features[{name!r}][{hop}]": rows for hop, rows in enumerate(of_blocks)}
        tensors |= {} if self.batch is None else {"batch": self.batch}
        blocks = {f"blocks[{hop}]": block for hop, block in enumerate(self.blocks)}
        return show_batch(f"MiniBatch({head})", tensors, blocks)
