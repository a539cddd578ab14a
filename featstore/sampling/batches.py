"""Batches of seeds: the division of an epoch's seeds into batches, the same for every strategy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import check_at_least, check_flag
from featstore.display import Display, Shown, Table
from featstore.errors import FeatstoreWarning, warn
from featstore.gather.arrays import first_seen, id_array, refuse_mask
from featstore.topology.part import Part

__all__ = [
    "UNKNOWN_RUN",
    "Batches",
    "CutBatches",
    "CutSeeds",
    "DerivedBatches",
    "DerivedSeeds",
    "EpochSeeds",
    "RandomBatches",
    "as_batches",
    "check_given",
    "check_seeds",
    "refuse_repeats",
    "run_length_of",
    "says_where_given",
    "underlying",
    "warn_of_none",
]

UNKNOWN_RUN = 2  # consecutive similar batches if unknown: one batch then does not represent all


def check_seeds(
    seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int],
    num_nodes: int | None = None,
    *,
    what: str = "seed",
) -> torch.Tensor:
    """Convert ``seeds`` to a one-dimensional int64 CPU tensor of distinct nodes; a mask gives its true nodes.

    ``what`` names one seed in errors. Without ``num_nodes`` neither the upper bound nor a mask's length is checked. TypeError:
    the seeds are not integers. ValueError: they are not one-dimensional, a mask has another length, or a seed occurs twice.
    IndexError: a seed is no node; the message names the first such seed and its position.
    """
    return _checked(seeds, num_nodes, what, may_repeat=False)[0]


def check_given(
    seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int], num_nodes: int | None = None
) -> tuple[torch.Tensor, bool]:
    """Convert seeds as :func:`check_seeds`, but they may repeat; return also whether one does.

    ValueError as there, and for zeros and ones that repeat: they are a mask that lacks its dtype.
    """
    return _checked(seeds, num_nodes, "seed", may_repeat=True)


def _checked(seeds: Any, num_nodes: int | None, what: str, *, may_repeat: bool) -> tuple[torch.Tensor, bool]:
    given = id_array(f"{what}s", seeds)
    if given.ndim != 1:
        raise ValueError(f"{what}s must be one-dimensional, not of shape {given.shape}")
    if given.dtype.kind == "b":
        if num_nodes is not None and len(given) != num_nodes:
            raise ValueError(f"a mask of {what}s must have one entry a node ({num_nodes}), not {len(given)}")
        return torch.from_numpy(np.flatnonzero(given)), False
    if given.dtype.kind not in "iu" and len(given):
        raise TypeError(f"{what}s must be integers, not {given.dtype}")
    most = np.iinfo(np.int64).max if num_nodes is None else num_nodes - 1
    bad = np.flatnonzero((given < 0) | (given > most))
    if len(bad):
        nodes = f"nodes 0 … {most}" if num_nodes else "none"
        there = "no node" if num_nodes is None else f"not a node: the graph has {nodes}"
        raise IndexError(f"{what} {given[bad[0]]} at position {bad[0]} is {there}")
    checked = given.astype(np.int64)
    refuse_mask(f"{what}s", checked)
    ordered = np.sort(checked)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice) and not may_repeat:
        first, again = np.flatnonzero(checked == ordered[twice[0]])[:2]
        raise ValueError(f"{what}s must be distinct: {ordered[twice[0]]} is at positions {first} and {again}")
    return torch.from_numpy(checked), len(twice) > 0


def refuse_repeats(batches: Any) -> None:
    """Raise ValueError if a seed of these batches occurs more than once: a pack does not keep which rows it was given for."""
    if getattr(batches, "repeats", False):
        raise ValueError("a pack's seeds must be distinct: give each once (seeds.unique()), or run a strategy without a pack")


class EpochSeeds(Protocol):
    """The batches of one epoch; immutable.

    Notes
    -----
    Seeds that repeat, and labels that are given beside the seeds, need two more methods: ``given(index)``, the seeds of a batch
    as they were given, int64, of which ``seeds`` has each once, in order of first appearance; and ``positions(index)``, where
    these are among the seeds of all batches as the user gave them, int64.
    """

    def __len__(self) -> int:
        """Batches."""
        ...

    def seeds(self, index: int) -> torch.Tensor:
        """Get the seeds of batch ``index``: int64, distinct, a copy."""
        ...


class Batches(Protocol):
    """Contract of batches of seeds: the seeds of each batch are a pure function of the object's options and the epoch.

    Attributes
    ----------
    batch_size : int
        Maximum seeds of a batch.
    nbytes : int
        Memory that the batches take, two epochs' orders included; the loader counts it.

    Notes
    -----
    The optional attribute ``run_length`` is the number of consecutive batches whose seeds are neighbours, so that they are
    similar. 1: each batch is drawn from all seeds, so the size of one batch stands for all. Otherwise, and without the attribute,
    the loader measures several batches. The optional attribute ``repeats`` says whether a seed occurs more than once, in a batch
    or in different ones; without it none does. ``n_seeds``, optional too, is the number of seeds as they were given.
    """

    @property
    def batch_size(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int:
        """Batches of an epoch."""
        ...

    def check(self, num_nodes: int) -> None:
        """Raise ValueError or IndexError unless the seeds are nodes of a graph of ``num_nodes`` nodes."""
        ...

    def digest(self) -> str:
        """Compute a text that differs for different batches."""
        ...

    def epoch(self, epoch: int) -> EpochSeeds:
        """Get the batches of ``epoch``; the same for the same arguments, in any process."""
        ...


class DerivedBatches:
    """Base of batches that are made of others; all that these say of themselves, such as ``n_seeds``, holds here, too."""

    def __init__(self, batches: Batches) -> None:
        self.made_of = batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "made_of":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.made_of, name)

    def __len__(self) -> int:
        return len(self.made_of)

    def check(self, num_nodes: int) -> None:
        """See :class:`Batches`."""
        self.made_of.check(num_nodes)

    def digest(self) -> str:
        """See :class:`Batches`."""
        return self.made_of.digest()


class DerivedSeeds:
    """Base of an epoch's seeds that are made of others; they say where they were given if the others do."""

    def __init__(self, order: EpochSeeds) -> None:
        self.made_of: Any = order

    def __len__(self) -> int:
        return len(self.made_of)


def underlying(batches: Any) -> Any:
    """Get what derived batches, or derived seeds of an epoch, are made of in the end."""
    while isinstance(batches, (DerivedBatches, DerivedSeeds)):
        batches = batches.made_of
    return batches


def says_where_given(order: Any) -> bool:
    """Tell whether the seeds of an epoch say where they were given, see :class:`EpochSeeds`."""
    return all(callable(getattr(underlying(order), name, None)) for name in ("given", "positions"))


def warn_of_none(n_seeds: int, batch_size: int, drop_last: bool) -> None:
    """Warn if ``drop_last`` leaves no batch."""
    if drop_last and 0 < n_seeds < batch_size:
        warn(
            f"drop_last=True leaves no batch: {n_seeds} seeds are fewer than batch_size={batch_size}, and every epoch is empty",
            FeatstoreWarning,
        )


class CutBatches(Shown):
    """Base of batches of seeds that the user gives, cut in an order that each epoch draws.

    Attributes
    ----------
    batch_size : int
    shuffle : bool
    seed : int
    drop_last : bool
    seeds : int64 tensor, shape (n_seeds,)
        As given, or in another order; set by the class that cuts them, as is ``repeats``.
    repeats : bool
        Whether one of the seeds occurs more than once.
    """

    seeds: torch.Tensor
    repeats: bool
    _numbers: npt.NDArray[np.int64] | None = None  # the position of each of the seeds where they were given in another order

    def __init__(self, batch_size: int, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.batch_size, self.seed = check_at_least("batch_size", batch_size, 1), check_at_least("seed", seed, 0)
        self.shuffle, self.drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)

    @property
    def n_seeds(self) -> int:
        """Seeds as they were given."""
        return len(self.seeds)

    def _display(self) -> Display:
        counts = [("seeds", f"{self.n_seeds:,}"), ("batches", f"{len(self):,}")]
        return Display(type(self).__name__, [Table(("", ""), counts), *super()._display().tables])

    def __len__(self) -> int:
        n = len(self.seeds)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def check_in(self, part: Part, n_hops: int, some: slice = slice(None)) -> None:
        """Raise IndexError, which names a seed, unless a part has all lists of ``n_hops`` hops from ``some`` of the seeds."""
        part.check_seeds(self.seeds.numpy()[some], n_hops, None if self._numbers is None else self._numbers[some])

    def _generator(self, epoch: int) -> np.random.Generator:
        """Make the generator that is keyed with the seed and an epoch."""
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch,))))


class RandomBatches(CutBatches):
    """Seeds cut into batches, shuffled anew each epoch.

    Parameters
    ----------
    ids : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,)
        Nodes; they may repeat, as in a table of nodes and times. A batch samples each of its nodes once.
    batch_size : int
        Seeds a batch; at least 1.
    shuffle : bool
        A new order each epoch, drawn by a generator keyed with (``seed``, epoch); otherwise the order of ``ids``.
    seed : int
        Not negative.
    drop_last : bool
        Leave out a last batch that is not full.

    Raises
    ------
    TypeError, ValueError, IndexError
        Seeds that are not integers; zeros and ones that repeat, which are a mask; ``batch_size`` or ``seed`` out of range.
    """

    run_length = 1

    def __init__(
        self,
        ids: torch.Tensor | npt.NDArray[Any] | Sequence[int],
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, shuffle, seed, drop_last)
        self.seeds, self.repeats = check_given(ids)
        is_mask = getattr(ids, "dtype", None) in (torch.bool, np.dtype(bool))
        self._mask_length = len(ids) if is_mask else None
        warn_of_none(len(self.seeds), self.batch_size, self.drop_last)

    def __repr__(self) -> str:
        options = f"shuffle={self.shuffle}, seed={self.seed}, drop_last={self.drop_last}"
        return f"RandomBatches(<{len(self.seeds)} ids>, batch_size={self.batch_size}, {options})"

    @property
    def nbytes(self) -> int:
        """Bytes of the seeds, and of two epochs' orders."""
        return 8 * len(self.seeds) * (3 if self.shuffle else 1)

    def check(self, num_nodes: int) -> None:
        """See :class:`Batches`."""
        if self._mask_length not in (None, num_nodes):
            raise ValueError(f"a mask of seeds must have one entry a node ({num_nodes}), not {self._mask_length}")
        if len(self.seeds) and int(self.seeds.max()) >= num_nodes:
            check_given(self.seeds, num_nodes)

    def digest(self) -> str:
        """See :class:`Batches`."""
        text = f"{self.batch_size} {self.shuffle} {self.seed} {self.drop_last} {len(self.seeds)} "
        return hashlib.blake2b(text.encode() + self.seeds.numpy().tobytes(), digest_size=16).hexdigest()

    def epoch(self, epoch: int) -> EpochSeeds:
        """See :class:`Batches`."""
        order = None
        if self.shuffle:
            order = torch.from_numpy(self._generator(epoch).permutation(len(self.seeds)))
        return CutSeeds(self.seeds, order, self.batch_size, len(self), self.repeats)


class CutSeeds:
    """Seeds cut into batches, in their order or in that of their positions in ``order``; immutable.

    ``numbers`` has the position of each of ``seeds`` among those that the user gave; by default they are in that order.
    """

    def __init__(
        self,
        seeds: torch.Tensor,
        order: torch.Tensor | None,
        batch_size: int,
        n_batches: int,
        repeats: bool = False,
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._seeds, self._order, self._batch_size, self._n_batches = seeds, order, batch_size, n_batches
        self._repeats, self._numbers = repeats, numbers

    def __repr__(self) -> str:
        return f"<{self._n_batches} batches of up to {self._batch_size} seeds>"

    def __len__(self) -> int:
        return self._n_batches

    def seeds(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        given = self.given(index)
        return given[torch.from_numpy(first_seen(given.numpy())[0])] if self._repeats else given

    def given(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        # With NumPy, which raises MemoryError for lack of memory; torch raises RuntimeError. A copy, as samplers may change it.
        return torch.from_numpy(self._seeds.numpy()[self._places(index)])

    def positions(self, index: int) -> torch.Tensor:
        """See :class:`EpochSeeds`."""
        places = self._places(index)
        return torch.from_numpy(places.copy() if self._numbers is None else self._numbers[places])

    def _places(self, index: int) -> npt.NDArray[np.int64]:
        first = index * self._batch_size
        last = min(first + self._batch_size, len(self._seeds))
        return np.arange(first, last) if self._order is None else self._order.numpy()[first:last]


def run_length_of(batches: Any) -> int:
    """Get the number of consecutive similar batches: 1 if each is drawn from all seeds, 2 if unknown."""
    return int(getattr(batches, "run_length", UNKNOWN_RUN))


def as_batches(
    seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int] | Batches,
    batch_size: int | None,
    default: int | None = None,
    **options: Any,
) -> Batches:
    """Make random batches of ids or of a mask; batches that are given as ``seeds`` are returned as they are.

    ``batch_size`` (by default ``default``) and ``options`` of :class:`RandomBatches` apply to ids. ValueError: a batch size is
    given with batches, or none is known for ids. TypeError: ``seeds`` are neither. Other errors are those of
    :class:`RandomBatches`.
    """
    if isinstance(seeds, str):
        raise TypeError(f"seeds must be ids, a mask or batches, not a name: node data are g.node_data[{seeds!r}]")
    if isinstance(seeds, tuple) and seeds and isinstance(seeds[0], str):
        raise TypeError("seeds: a type goes with the ids of a graph of several types; give the ids alone")
    if isinstance(seeds, (torch.Tensor, np.ndarray, Sequence)):
        size = default if batch_size is None else batch_size
        if size is None:
            raise ValueError("batch_size is needed beside ids")
        return RandomBatches(seeds, size, **options)
    if not hasattr(seeds, "epoch"):
        raise TypeError(f"seeds must be an array of ids, a boolean mask or batches, not a {type(seeds).__name__}")
    if batch_size is not None:
        raise ValueError("batch_size goes with ids: the batches that are given as seeds have their own")
    if options.get("drop_last"):
        raise ValueError("drop_last goes with ids: batches that are given as seeds say themselves which they are")
    return seeds
