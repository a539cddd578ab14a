"""The contract of samplers, as a test suite for authors of samplers.

Examples
--------
>>> class TestMine(SamplerContract):
...     def make(self, g):
...         return Mine(g)
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import featstore
from featstore.sampling.batch import CheckedSampler, SampledBatch
from featstore.sampling.foreign import checked_sampler
from featstore.testing.contractgraph import contract_graph

__all__ = ["SamplerContract"]

BATCH, SEED = 30, 3
KEYS = [(0, 0), (0, 1), (1, 0), (3, 7)]  # epoch and index


def _same(one: SampledBatch, other: SampledBatch) -> bool:
    shapes = [(one.n_seeds, *((b.n_src, b.n_dst, *b.edge_arrays) for b in one.blocks)) for one in (one, other)]
    return shapes[0] == shapes[1] and all(map(torch.equal, one.tensors, other.tensors))


class SamplerContract(ABC):
    """Tests of a sampler: derive a class named ``Test…`` from it, and write :meth:`make`.

    Attributes
    ----------
    of_the_graph : bool
        Every edge of a block is an edge of the graph. False for a sampler that adds others, such as loops or paths.
    """

    of_the_graph: ClassVar[bool] = True

    @abstractmethod
    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        """Make a new sampler of a graph."""

    @pytest.fixture
    def contract_g(self) -> Iterator[featstore.OutOfCoreGraph]:
        with featstore.open(contract_graph().path, memory="64MB", threads=2) as g:
            yield g

    def _checked(self, g: featstore.OutOfCoreGraph) -> CheckedSampler:
        return checked_sampler(self.make(g), g.num_nodes, g)

    @staticmethod
    def _seeds() -> list[torch.Tensor]:
        order = featstore.RandomBatches(contract_graph().seeds, BATCH, seed=SEED).epoch(0)
        return [order.seeds(k) for k in range(len(order))]

    def _epoch(self, sampler: CheckedSampler, epoch: int = 0) -> list[SampledBatch]:
        """Copies of an epoch's batches."""
        return [copy.deepcopy(sampler.sample(seeds, epoch=epoch, index=k)) for k, seeds in enumerate(self._seeds())]

    def test_batches_fit_their_seeds_and_the_graph(self, contract_g: featstore.OutOfCoreGraph) -> None:
        """Check that a batch begins with its seeds, in their order, that blocks fit each other, and that edges exist."""
        sampler = self._checked(contract_g)
        src, dst = torch.cat(list(contract_g.edges()), dim=1).numpy()
        there = np.unique(src * contract_g.num_nodes + dst)
        for seeds, batch in zip(self._seeds(), self._epoch(sampler), strict=True):
            assert torch.equal(batch.seeds, seeds), (
                "the first nodes of a batch are its seeds, in the order in which they are given"
            )
            ids = batch.nodes.numpy()
            for hop, block in enumerate(batch.blocks):
                keys = ids[block.src.numpy()] * contract_g.num_nodes + ids[block.dst.numpy()]
                assert not self.of_the_graph or np.isin(keys, there).all(), f"block {hop} has edges that the graph has not"

    @pytest.mark.parametrize("nodes", [[], [0], [5, 899, 3]])
    def test_few_seeds(self, contract_g: featstore.OutOfCoreGraph, nodes: list[int]) -> None:
        """Check no seeds, one and three, of any kind of node."""
        batch = self._checked(contract_g).sample(torch.tensor(nodes, dtype=torch.int64, device="cpu"), epoch=0, index=0)
        assert batch.seeds.tolist() == nodes

    def test_a_batch_is_a_function_of_its_key(self, contract_g: featstore.OutOfCoreGraph) -> None:
        """Check that batches depend on seeds, epoch and index alone: not on earlier ones, nor on the object."""
        sampler, seeds = self._checked(contract_g), self._seeds()[0]
        first = {key: copy.deepcopy(sampler.sample(seeds, epoch=key[0], index=key[1])) for key in KEYS}
        for again in (sampler, self._checked(contract_g)):
            for epoch, index in reversed(KEYS):
                assert _same(again.sample(seeds, epoch=epoch, index=index), first[epoch, index]), (
                    f"the batch of epoch {epoch}, index {index} is another one the second time: key draws with (seed, epoch, "
                    "index), not with a generator that goes on from batch to batch"
                )

    def test_batches_from_threads(self, contract_g: featstore.OutOfCoreGraph) -> None:
        """Check that several threads at once sample what one samples."""
        sampler, parts = self._checked(contract_g), self._seeds()
        expected = self._epoch(sampler)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda k: sampler.sample(parts[k], epoch=0, index=k), [*reversed(range(len(parts)))] * 4))
        assert all(_same(batch, expected[batch.index]) for batch in found), "threads at once sample other batches than one"

    def test_neither_seeds_nor_batches_change(self, contract_g: featstore.OutOfCoreGraph) -> None:
        """Check that seeds are left as they are, and that a batch is not written to by later ones.

        Loaders copy the batches of samplers that are not the library's, so those may use one memory for all.
        """
        sampler, parts = self.make(contract_g), self._seeds()
        checked, given = checked_sampler(sampler, contract_g.num_nodes, contract_g), [seeds.clone() for seeds in parts]
        kept = [checked.sample(seeds, epoch=0, index=k) for k, seeds in enumerate(given)]
        expected = self._epoch(self._checked(contract_g))
        assert all(map(_same, kept, expected)), "a batch changes when the next one is sampled"
        draw = partial(sampler.sample, epoch=0, index=0) if hasattr(sampler, "sample") else sampler
        for seeds in given:
            draw(seeds)
        assert all(map(torch.equal, given, parts)), "the sampler changes its seeds"

    @pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed", "packed"])
    def test_every_strategy_delivers_them(self, strategy: str, contract_g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
        """Check that loaders deliver the sampler's batches with the rows of their nodes: on demand, planned and of a pack."""
        expected, x = self._epoch(self._checked(contract_g)), torch.from_numpy(contract_graph().features["x"])
        sampler, seeds = self.make(contract_g), contract_graph().seeds
        options: dict[str, Any] = {"sampler": sampler, "seeds": seeds, "batch_size": BATCH, "seed": SEED, "strategy": strategy}
        if strategy == "packed":
            pack = featstore.sample_offline(contract_g, sampler, seeds, BATCH, path=tmp_path / "pack", seed=SEED, progress=False)
            options = {"strategy": featstore.Packed(pack)}
        with featstore.Loader(contract_g, **options) as loader:
            n = 0
            for batch in loader:
                sampled, n = expected[batch.index], n + 1
                blocks = (batch.seeds, batch.input_ids, *(each for block in batch.blocks for each in block.tensors))
                wanted = (sampled.seeds, *sampled.tensors)
                assert all(map(torch.equal, blocks, wanted)), f"{strategy}: batch {batch.index} is not the sampler's"
                assert torch.equal(batch.x, x[sampled.nodes]), f"{strategy}: batch {batch.index} has wrong rows"
            assert n == len(expected)
