"""Shares of ranks: together all batches of one process, as many for each, none repeated, also where ranks join or leave."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featstore.errors import FeatstoreWarning, PluginError
from featstore.ranks import check_ranks
from featstore.sampling.batches import RandomBatches, says_where_given
from featstore.sampling.partitionbatches import PartitionBatches
from featstore.sampling.shares import ShareOfBatches
from tests.support.refusing import refuses

SIZES = st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 7))


class Own:
    """A user's batches, of sizes of their own, which do not say where their seeds were given."""

    batch_size, nbytes = 9, 0

    def __init__(self, sizes: list[int]) -> None:
        ids = torch.arange(sum(sizes))
        self.parts = list(ids.split(sizes)) if sizes else []

    def __len__(self) -> int:
        return len(self.parts)

    def check(self, num_nodes: int) -> None:
        """Any number will do."""

    def digest(self) -> str:
        return "own"

    def epoch(self, epoch: int) -> Any:
        parts = self.parts

        class Order:
            def __len__(self) -> int:
                return len(parts)

            def seeds(self, index: int) -> torch.Tensor:
                return parts[index].clone()

        return Order()


def as_given(batches: Any) -> torch.Tensor:
    """The seeds in the order in which a user gave them."""
    numbers = batches._numbers
    return batches.seeds if numbers is None else batches.seeds[np.argsort(numbers)]


def steps(shares: list[ShareOfBatches], epoch: int, first: int = 0) -> list[list[list[int]]]:
    """The rows of each rank's batches, step by step; also check that numbers and counts fit each other."""
    n = len(shares[0])
    assert all(len(share) == n for share in shares)
    orders = [share.epoch(epoch) for share in shares]
    assert all(len(order) == n * len(shares) for order in orders)
    found = []
    for step in range(first, n):
        numbers = [share.number(step) for share in shares]
        assert numbers == list(range(step * len(shares), (step + 1) * len(shares)))
        rows = [order.positions(number).tolist() for order, number in zip(orders, numbers, strict=True)]
        sizes = [len(each) for each in rows]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        for order, number, each in zip(orders, numbers, rows, strict=True):
            given = order.given(number)
            assert torch.equal(given, as_given(shares[0].made_of)[each])
            seeds = order.seeds(number).tolist()
            assert sorted(seeds) == sorted(set(given.tolist()))
            assert list(dict.fromkeys(given.tolist())) == seeds
        found.append(rows)
    return found


def fits(n: int, size: int, ranks: int) -> bool:
    return not 0 < n % (size * ranks) < ranks


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, shuffle=st.booleans(), drop_last=st.booleans(), repeats=st.booleans(), epoch=st.integers(0, 3))
@pytest.mark.filterwarnings("ignore::featstore.FeatstoreWarning")
def test_together_they_have_each_seed_once(
    sizes: tuple[int, int, int], shuffle: bool, drop_last: bool, repeats: bool, epoch: int
) -> None:
    n, size, ranks = sizes
    ids = np.arange(n) // 2 + 2 if repeats else np.arange(n) + 2
    batches = RandomBatches(ids, size, shuffle, 5, drop_last)
    if not (drop_last or fits(n, size, ranks)):
        refuses(ValueError, "fewer than" if n < ranks else "batch_size=", lambda: ShareOfBatches(batches, 0, ranks))
        if n >= ranks:
            better = next(each for each in range(size, n + 1) if fits(n, each, ranks))
            with pytest.raises(ValueError, match=f"batch_size={better} divides"):
                ShareOfBatches(batches, 0, ranks)
            ShareOfBatches(RandomBatches(ids, better), 0, ranks)
        return
    shares = [ShareOfBatches(batches, rank, ranks) for rank in range(ranks)]
    found, order = steps(shares, epoch), batches.epoch(epoch)
    rows = [row for ranks_rows in found for each in ranks_rows for row in each]
    assert len(rows) == len(set(rows))
    assert len(rows) == (n // (size * ranks) * size * ranks if drop_last else n)
    for step, each in enumerate(found[:-1]):
        assert each == [order.positions(step * ranks + rank).tolist() for rank in range(ranks)]
    assert {share.digest() for share in shares} == {batches.digest()}


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, others=st.integers(1, 7), n_parts=st.integers(0, 5), data=st.data())
def test_other_ranks_go_on(sizes: tuple[int, int, int], others: int, n_parts: int, data: Any) -> None:
    """Batches of some ranks, and of others after them, have each seed once, at random or by parts.

    Batches of a step that is neither the last one nor had begun are those of one process.
    """
    n, size, ranks = sizes
    if not (fits(n, size, ranks) and fits(n, size, others)) or not n:
        return
    batches: Any = RandomBatches(np.arange(n), size, seed=1)
    if n_parts:
        part = np.random.default_rng(n).integers(0, n_parts, n)
        batches = PartitionBatches(
            SimpleNamespace(num_nodes=n, refuse_types=lambda what: None), np.arange(n), size, part, macro=2, seed=1
        )  # type: ignore[arg-type]
    before = steps([ShareOfBatches(batches, rank, ranks) for rank in range(ranks)], 2)
    n_steps = data.draw(st.integers(0, len(before) - 1))
    done = [row for step in before[:n_steps] for each in step for row in each]
    shares = [ShareOfBatches(batches, rank, others) for rank in range(others)]
    first = n_steps * ranks // others
    left = n - len(done)
    of_step = min(others - n_steps * ranks % others, len(batches) - n_steps * ranks)
    if n_steps * ranks % others and min(of_step * size, left) < others:
        refuses(ValueError, f"after batch {n_steps * ranks} of an epoch", lambda: shares[0].resume(2, n_steps * ranks))
        assert steps(shares, 2)  # as if it had not been asked for
        return
    for share in shares:
        share.resume(2, n_steps * ranks)
    found, order = steps(shares, 2, first), batches.epoch(2)
    after = [row for step in found for each in step for row in each]
    assert sorted(done + after) == list(range(n))
    for step, each in list(enumerate(found, first))[bool(n_steps * ranks % others) : -1]:
        assert each == [order.positions(step * others + rank).tolist() for rank in range(others)]
    assert sorted(row for step in steps(shares, 3) for each in step for row in each) == list(range(n))


def test_batches_of_a_users_own() -> None:
    own = Own([4, 9, 1, 7, 2])
    shares = [ShareOfBatches(own, rank, 2) for rank in range(2)]
    assert [len(share) for share in shares] == [3, 3]
    found = [[share.epoch(0).seeds(share.number(step)).tolist() for share in shares] for step in range(3)]
    assert found[0] == [list(range(4)), list(range(4, 13))]
    assert found[2] == [[21], [22]]
    assert not says_where_given(shares[0].epoch(0))
    assert not hasattr(shares[0], "n_seeds")
    short = ShareOfBatches(Own([3, 3, 1]), 1, 2)
    with pytest.raises(PluginError, match="step 1 of an epoch has 1 seeds for 2 ranks"):
        short.epoch(0).seeds(short.number(1))


def test_seeds_that_are_no_ids() -> None:
    own = Own([4, 4])
    own.parts = [torch.tensor([1.5, 2.5]), torch.tensor([3.5, 4.5])]
    share = ShareOfBatches(own, 0, 2)
    refuses(TypeError, "seeds must be integers, not float32", lambda: share.epoch(0).seeds(0))
    assert ShareOfBatches(own, 0, 1).epoch(0) is not None


def test_what_they_say_of_themselves() -> None:
    share = ShareOfBatches(RandomBatches(np.arange(51), 8), 1, 3)
    assert (share.batch_size, share.n_seeds, share.run_length, share.repeats) == (8, 51, 1, False)
    assert repr(share).endswith("rank 1 of 3")
    own = Own([4, 4])
    own.run_length = 7  # type: ignore[attr-defined]
    assert ShareOfBatches(own, 0, 2).run_length == 4
    assert [share.resume(1, n) for n in (3, 4, 4, 6)] == [False, True, False, True]
    refuses(IndexError, "not a node", lambda: share.check(50))
    for again in (copy.copy(share), pickle.loads(pickle.dumps(ShareOfBatches(RandomBatches(np.arange(51), 8), 1, 3)))):
        assert repr(again) == repr(share)
        assert torch.equal(again.epoch(1).seeds(4), share.epoch(1).seeds(4))
    with pytest.warns(FeatstoreWarning, match="leaves no batch"):
        assert len(ShareOfBatches(RandomBatches(np.arange(20), 8, drop_last=True), 0, 3)) == 0


@pytest.mark.parametrize(
    ("rank", "world_size", "error", "text"),
    [
        (2, 2, ValueError, "from 0 to world_size - 1, not 2 of 2"),
        (-1, 2, ValueError, "not -1 of 2"),
        (0, 0, ValueError, "not 0 of 0"),
        (1, None, ValueError, "go together"),
        (None, 2, ValueError, "go together"),
        (0.5, 2, TypeError, "rank"),
        (0, True, TypeError, "world_size"),
    ],
)
def test_ranks_that_there_are_not(rank: Any, world_size: Any, error: type[Exception], text: str) -> None:
    refuses(error, text, lambda: check_ranks(rank, world_size))
    assert check_ranks(None, None) == (0, 1)
    assert check_ranks(None, None, (3, 4)) == (3, 4)
    assert check_ranks(0, 1, (3, 4)) == (0, 1)
