"""The batches of one of several processes that train together: each takes a batch a step of those that one process would take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from featstore.errors import FeatstoreWarning, PluginError, warn
from featstore.gather.arrays import first_seen
from featstore.sampling.batches import (
    Batches,
    CutBatches,
    DerivedBatches,
    DerivedSeeds,
    EpochSeeds,
    run_length_of,
    says_where_given,
    underlying,
)
from featstore.sampling.hops import as_ids
from featstore.sampling.partbatches import PartBatches
from featstore.sampling.scratch import EMPTY

__all__ = ["ShareOfBatches", "ShareOfEpoch"]

MOST_NODES = 2**63 - 1  # the sampler knows how many there are


class ShareOfBatches(DerivedBatches):
    """The batches of one rank: number ``p * world_size + rank`` is its batch ``p`` of an epoch.

    All ranks have as many batches. A step is the batches of all ranks with one ``p``; the seeds of the last step, which may be
    fewer, are divided anew, so that sizes in a step differ by one at most. No seed is left out, unless the batches leave out a
    last one that is not full (``drop_last``); none is repeated.

    Parameters
    ----------
    batches : Batches
        Those that one process has.
    rank, world_size : int

    Raises
    ------
    ValueError
        The last step has fewer seeds than there are ranks.
    """

    def __init__(self, batches: Batches, rank: int, world_size: int) -> None:
        super().__init__(batches)
        self.rank, self.world_size = rank, world_size
        n, drops = len(batches), bool(getattr(batches, "drop_last", False))
        self._n_steps = n // world_size if drops else -(-n // world_size)
        self._resumed: tuple[int, int] | None = None  # an epoch, and how many of its batches are done
        cut = underlying(batches)
        self._divides = not isinstance(cut, PartBatches)  # a part's seeds are its rank's alone
        if isinstance(cut, CutBatches) and self._divides:
            n_seeds, size = cut.n_seeds, cut.batch_size
            if drops and n and not self._n_steps:
                warn(
                    f"drop_last=True leaves no batch: {n_seeds} seeds are no batch of {size} for each of {world_size} ranks, "
                    "and every epoch is empty",
                    FeatstoreWarning,
                )
            last = n_seeds - (self._n_steps - 1) * size * world_size
            if not drops and 0 < last < world_size:
                raise ValueError(self._too_few(n_seeds, size, last))

    def _too_few(self, n_seeds: int, size: int, last: int) -> str:
        ranks = self.world_size
        if n_seeds < ranks:
            return f"seeds: {n_seeds} are fewer than the {ranks} ranks: take fewer ranks"
        better = next(each for each in range(size + 1, n_seeds + 1) if not 0 < n_seeds % (each * ranks) < ranks)
        return (
            f"seeds: {n_seeds} in batches of {size} leave {last} for the last step of {ranks} ranks: batch_size={better} divides "
            "them, and drop_last=True leaves them out"
        )

    def __repr__(self) -> str:
        return f"{self.made_of!r}, rank {self.rank} of {self.world_size}"

    def __len__(self) -> int:
        return self._n_steps

    def number(self, position: int) -> int:
        """Compute the number, among the batches of all ranks, of this rank's batch ``position``."""
        return position * self.world_size + self.rank

    @property
    def run_length(self) -> int:
        """Consecutive similar batches, see :class:`Batches`: of those of all ranks, each has its part."""
        length = run_length_of(self.made_of)
        return 1 if length == 1 else max(2, -(-length // self.world_size))

    def resume(self, epoch: int, n_done: int) -> bool:
        """Let ``epoch`` go on after the first ``n_done`` batches, of any number of ranks; return whether batches are others now.

        If they end within a step, the seeds of its other batches are divided anew. ValueError: these are fewer than the ranks.
        """
        step, begun = divmod(n_done, self.world_size)
        before, self._resumed = self._resumed, (epoch, n_done) if begun and step < self._n_steps else None
        if self._resumed is not None:
            try:
                self.epoch(epoch).seeds(self.number(step))
            except PluginError as error:
                self._resumed = before
                raise ValueError(f"the state is after batch {n_done} of an epoch: {error}") from None
        return self._resumed != before

    def n_done(self, epoch: int, position: int) -> int:
        """Count the batches of all ranks that are done where ``position`` comes next; an epoch may have gone on within a step."""
        n_done = position * self.world_size
        return max(n_done, self._resumed[1]) if self._resumed is not None and self._resumed[0] == epoch else n_done

    def epoch(self, epoch: int) -> ShareOfEpoch:
        """See :class:`Batches`; batches of the epoch are asked for by their number among those of all ranks."""
        resumed = self._resumed
        n_done = resumed[1] if resumed is not None and resumed[0] == epoch else 0
        order, n = self.made_of.epoch(epoch), len(self.made_of)
        return ShareOfEpoch(order, n, self.world_size, self._n_steps, n_done, divides=self._divides)


class ShareOfEpoch(DerivedSeeds):
    """The seeds of an epoch's batches by their number, :class:`EpochSeeds`, those of the last step divided evenly.

    Parameters
    ----------
    order : EpochSeeds
        Of one process.
    n : int
        Its batches.
    ranks, n_steps : int
    n_done : int
        Batches that are done; the rest of a step that has begun is divided, too.
    divides : bool
        False: each batch stays as it is.
    """

    def __init__(self, order: EpochSeeds, n: int, ranks: int, n_steps: int, n_done: int = 0, *, divides: bool = True) -> None:
        super().__init__(order)
        self._divides = divides
        self._n, self._ranks, self._n_steps, self._n_done = n, ranks, n_steps, n_done

    def __len__(self) -> int:
        return self._n_steps * self._ranks

    def seeds(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        if not self._is_divided(index):
            return self._of(self.made_of.seeds, index)
        # Batches that are joined and divided may each have had a node that repeats.
        seeds = self._part(self.made_of.given if says_where_given(self) else self.made_of.seeds, index).numpy()
        return torch.from_numpy(seeds[first_seen(seeds)[0]])

    def given(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        return self._part(self.made_of.given, index)

    def positions(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        return self._part(self.made_of.positions, index)

    def _is_divided(self, index: int) -> bool:
        """Tell whether a batch is of the last step, or of one that had begun: the seeds of all its ranks are divided anew."""
        if not self._divides:
            return False
        step = index // self._ranks
        return step == self._n_steps - 1 or step * self._ranks < self._n_done < (step + 1) * self._ranks

    def _of(self, what: Any, index: int) -> torch.Tensor:
        return torch.from_numpy(as_ids(what(index), MOST_NODES))

    def _part(self, what: Any, index: int) -> torch.Tensor:
        """Get what ``what`` has for a batch, or its part of what it has for those of its step that are to be divided."""
        if not self._is_divided(index):
            return self._of(what, index)
        step, number = divmod(index, self._ranks)
        first, stop = max(step * self._ranks, self._n_done), min((step + 1) * self._ranks, self._n)
        whole = np.concatenate([EMPTY, *(self._of(what, each).numpy() for each in range(first, stop))])
        if len(whole) < self._ranks:
            raise PluginError(
                f"step {step} of an epoch has {len(whole)} seeds for {self._ranks} ranks: take another batch size, or fewer ranks"
            )
        return torch.from_numpy(np.array_split(whole, self._ranks)[number])
