"""The batches of one of several processes that train together: each takes a batch a step of those that one process would take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from featstore.config import check_integer
from featstore.errors import PluginError
from featstore.gather.arrays import first_seen
from featstore.sampling.batches import Batches, CutBatches, EpochSeeds, warn_of_none
from featstore.sampling.hops import as_ids
from featstore.sampling.scratch import EMPTY

__all__ = ["ShareOfBatches", "ShareOfEpoch", "check_ranks"]

MOST_NODES = 2**63 - 1  # the sampler knows how many there are


def check_ranks(rank: int | None, world_size: int | None, group: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the rank and the number of ranks: as given, else those of the process ``group``, else of one process.

    ValueError, TypeError: one of the two is given alone, or is no number of a process.
    """
    if rank is None and world_size is None:
        return group or (0, 1)
    if rank is None or world_size is None:
        raise ValueError(f"rank and world_size go together, not rank={rank!r} and world_size={world_size!r}")
    rank, world_size = check_integer("rank", rank), check_integer("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1, not {rank} of {world_size}")
    return rank, world_size


class ShareOfBatches:
    """The batches of one rank: number ``p * world_size + rank`` is its batch ``p`` of an epoch.

    All ranks have as many batches. A step is the batches of all ranks with one ``p``; the seeds of the last step, which may be
    fewer, are divided anew, so that sizes in a step differ by one at most. No seed is left out, unless the batches leave out a
    last one that is not full (``drop_last``); none is repeated. All else that the batches say of themselves holds here, too.

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
        self.of_all, self.rank, self.world_size = batches, rank, world_size
        n, drops = len(batches), bool(getattr(batches, "drop_last", False))
        self._n_steps = n // world_size if drops else -(-n // world_size)
        self._resumed: tuple[int, int] | None = None  # an epoch, and how many of its batches are done
        cut: Any = getattr(batches, "of_type", batches)
        if isinstance(cut, CutBatches):
            n_seeds, size = cut.n_seeds, cut.batch_size
            warn_of_none(n_seeds, size * world_size, drops and n > 0)
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "of_all":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.of_all, name)

    def __repr__(self) -> str:
        return f"{self.of_all!r}, rank {self.rank} of {self.world_size}"

    def __len__(self) -> int:
        return self._n_steps

    def check(self, num_nodes: int) -> None:
        """See :class:`Batches`."""
        self.of_all.check(num_nodes)

    def digest(self) -> str:
        """See :class:`Batches`; the same for all ranks, and for any number of them."""
        return self.of_all.digest()

    def number(self, position: int) -> int:
        """Compute the number, among the batches of all ranks, of this rank's batch ``position``."""
        return position * self.world_size + self.rank

    def resume(self, epoch: int, n_done: int) -> None:
        """Let ``epoch`` go on after the first ``n_done`` batches, of any number of ranks.

        If they end within a step, the seeds of its other batches are divided anew. ValueError: these are fewer than the ranks.
        """
        self._resumed = (epoch, n_done) if n_done % self.world_size else None
        if n_done % self.world_size:
            try:
                self.epoch(epoch).seeds(self.number(n_done // self.world_size))
            except PluginError as error:
                self._resumed = None
                raise ValueError(f"the state is after batch {n_done} of an epoch: {error}") from None

    def epoch(self, epoch: int) -> ShareOfEpoch:
        """See :class:`Batches`; batches of the epoch are asked for by their number among those of all ranks."""
        resumed = self._resumed
        n_done = resumed[1] if resumed is not None and resumed[0] == epoch else 0
        order, ranks = self.of_all.epoch(epoch), self.world_size
        share = _GivenOfEpoch if callable(getattr(order, "given", None)) else ShareOfEpoch
        return share(order, len(self.of_all), ranks, self._n_steps, n_done)


class ShareOfEpoch:
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
    """

    def __init__(self, order: EpochSeeds, n: int, ranks: int, n_steps: int, n_done: int = 0) -> None:
        self.order: Any = order
        self._n, self._ranks, self._n_steps, self._n_done = n, ranks, n_steps, n_done

    def __len__(self) -> int:
        return self._n_steps * self._ranks

    def seeds(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        seeds = self._part(index, self.order.seeds)
        # Batches that are joined and divided may each have had a node that repeats.
        return torch.from_numpy(seeds.numpy()[first_seen(seeds.numpy())[0]])

    def _part(self, index: int, of: Any) -> torch.Tensor:
        """Get what ``of`` has for batch ``index``, or its part of what it has for all batches of its step."""
        step, number = divmod(index, self._ranks)
        first, stop = max(step * self._ranks, self._n_done), min((step + 1) * self._ranks, self._n)
        if step < self._n_steps - 1 and first == step * self._ranks:
            return torch.from_numpy(as_ids(of(index), MOST_NODES))
        whole = np.concatenate([EMPTY, *(as_ids(of(each), MOST_NODES) for each in range(first, stop))])
        if len(whole) < self._ranks:
            raise PluginError(
                f"step {step} of an epoch has {len(whole)} seeds for {self._ranks} ranks: take another batch size, or fewer ranks"
            )
        return torch.from_numpy(np.array_split(whole, self._ranks)[number])


class _GivenOfEpoch(ShareOfEpoch):
    """The same, of batches that say where their seeds were given."""

    def seeds(self, index: int) -> torch.Tensor:
        given = self.given(index).numpy()
        return torch.from_numpy(given[first_seen(given)[0]])

    def given(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        return self._part(index, self.order.given)

    def positions(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        return self._part(index, self.order.positions)
