"""Batches of one's own in graphs of several types: what they say holds for ids within the type of the seeds."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import Loader, NeighborSampler, RandomBatches
from featstore.sampling.batches import says_where_given
from featstore.sampling.typedbatches import BatchesOfType
from featstore.topology.types import NodeType
from tests.support.typed import academic

pytestmark = pytest.mark.shares_resources


class Runs:
    """Runs of ten consecutive authors, in an order of the epoch's; says no more than it must."""

    batch_size = 10
    nbytes = 0

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n // 10

    def check(self, num_nodes: int) -> None:
        if self.n > num_nodes:
            raise ValueError(f"{self.n} of {num_nodes} nodes")

    def digest(self) -> str:
        return f"runs of {self.n}"

    def epoch(self, epoch: int) -> Any:
        return Order(np.random.default_rng(epoch).permutation(len(self)))


class Order:
    def __init__(self, order: np.ndarray) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def seeds(self, index: int) -> torch.Tensor:
        return torch.arange(10) + 10 * int(self.order[index])


@pytest.fixture(scope="module")
def g(tmp_path_factory: Any) -> Any:
    with academic(papers=800).create(tmp_path_factory.mktemp("g") / "g", memory="64MiB") as opened:
        yield opened


@pytest.mark.parametrize("strategy", ["ondemand", featstore.Superbatch(length=2, cache=0.1), "auto"])
def test_they_are_those_of_the_ids(g: Any, strategy: Any) -> None:
    ids = np.random.default_rng(0).integers(0, 400, 130)  # some repeat
    sampler, labels = NeighborSampler(g, [3, 2]), np.arange(130)
    options = {"labels": labels, "strategy": strategy}
    with (
        Loader(g, sampler, ("author", ids), 40, **options) as plain,
        Loader(g, sampler, ("author", RandomBatches(ids, 40)), **options) as own,
    ):
        for _ in range(2):
            for one, other in zip(plain, own, strict=True):
                assert len(one._tensors()) == len(other._tensors())
                assert all(map(torch.equal, one._tensors(), other._tensors()))
                assert torch.equal(one.y, one.seed_positions)
                assert torch.equal(one.seeds[one.seed_index], torch.from_numpy(ids)[one.seed_positions])
        assert own.state_dict()["epoch"] == 2
    mask = np.zeros(400, bool)
    mask[[3, 5]] = True
    with Loader(g, sampler, ("author", RandomBatches(mask, 2)), labels=None, strategy=strategy) as own:
        assert sorted(next(iter(own)).seeds.tolist()) == [3, 5]


def test_batches_of_a_users_class(g: Any, tmp_path: Path) -> None:
    sampler = NeighborSampler(g, [3, 2])
    with Loader(g, sampler, ("author", Runs(400)), strategy="ondemand") as loader:
        for epoch in range(2):
            for batch in loader:
                assert batch.seed_type == "author"
                assert torch.equal(batch.seeds, Runs(400).epoch(epoch).seeds(batch.index))
                assert batch.seed_positions is None
    with pytest.raises(ValueError, match="401 of 400 nodes"):
        Loader(g, sampler, ("author", Runs(401)), strategy="ondemand")
    with pytest.raises(ValueError, match="rows beside the seeds, and Runs"):
        Loader(g, sampler, ("author", Runs(400)), labels=np.arange(400), strategy="ondemand")
    featstore.sample_offline(g, sampler, ("author", Runs(400)), path=tmp_path / "p", progress=False).close()
    with Loader(g, strategy=featstore.Packed(tmp_path / "p")) as packed:
        assert {tuple(batch.seeds.tolist()) for batch in packed} == {tuple(range(i, i + 10)) for i in range(0, 400, 10)}


class Beyond(Runs):
    def check(self, num_nodes: int) -> None:
        """Check nothing."""


def test_an_id_of_another_type_is_no_seed(g: Any) -> None:
    with (
        pytest.raises(IndexError, match="seed 400 at position 0 is out of range for 400 nodes of 'author'"),
        Loader(g, NeighborSampler(g, [2]), ("author", Beyond(410)), features=[], strategy="ondemand") as loader,
    ):
        list(loader)


@pytest.mark.parametrize(
    ("seeds", "text"), [(torch.tensor([1.5, 2.5]), "float32"), (torch.tensor([True, False]), "bool"), ([[1, 2]], "1-D")]
)
def test_seeds_that_are_no_ids(g: Any, seeds: Any, text: str) -> None:
    own = Runs(20)
    own.epoch = lambda epoch: SimpleNamespace(seeds=lambda index: seeds)
    with (
        pytest.raises((TypeError, ValueError), match=text),
        Loader(g, NeighborSampler(g, [2]), ("author", own), features=[], strategy="ondemand") as loader,
    ):
        list(loader)


def test_what_batches_say_of_themselves() -> None:
    kind = NodeType("b", 100, 50)
    own = BatchesOfType(RandomBatches(np.arange(20), 8, drop_last=True), kind)
    assert (len(own), own.batch_size, own.n_seeds, own.run_length, own.repeats) == (2, 8, 20, 1, False)
    assert own.epoch(0).seeds(0).min() >= 100
    assert own.digest() != own.made_of.digest()
    for again in (copy.copy(own), pickle.loads(pickle.dumps(own))):
        assert repr(again) == repr(own)
        assert again.digest() == own.digest()
    assert not hasattr(BatchesOfType(Runs(10), kind), "n_seeds")
    assert not says_where_given(BatchesOfType(Runs(10), kind).epoch(0))
    assert says_where_given(own.epoch(0))
