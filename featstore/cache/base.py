"""Contracts of cache policies and their registry.

A policy decides, over arrays and once a batch; the cache table holds the rows. ``row`` is a row of the field, ``slot`` an index into
the cache array. To add a policy: subclass one of the three kinds, decorate with :func:`register_policy` (or name the class in the
entry-point group ``featstore.policies``), and run the kind's contract suite of ``featstore.testing`` over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["OnlinePolicy", "PolicyContext", "StaticPolicy"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may know of the rows: arrays, never the graph. Providers run at first use, so an unused array costs nothing.

    Parameters
    ----------
    n : int
        Rows (nodes).
    row_bytes : int
        Bytes of one row.
    in_degree_of, out_degree_of, counts_of, parts_of : callable, optional
        Return the array; None where the context cannot know it.
    seed : int
        Seed of randomised policies.
    """

    n: int
    row_bytes: int
    in_degree_of: Callable[[], npt.NDArray[Any]] | None = None
    out_degree_of: Callable[[], npt.NDArray[Any]] | None = None
    counts_of: Callable[[], npt.NDArray[Any]] | None = None
    parts_of: Callable[[], npt.NDArray[Any]] | None = None
    seed: int = 0

    def _get(self, what: str, provider: Callable[[], npt.NDArray[Any]] | None, hint: str) -> npt.NDArray[Any]:
        if provider is None:
            raise ValueError(f"the policy needs {what}, which is not known here: {hint}")
        array = np.asarray(provider())
        if array.shape != (self.n,):
            raise ValueError(f"{what} must have shape ({self.n},), not {array.shape}")
        return array

    @cached_property
    def in_degree(self) -> npt.NDArray[Any]:
        """In-degree of every node, integer [n]."""
        return self._get("in_degree", self.in_degree_of, "open a dataset with a topology")

    @cached_property
    def out_degree(self) -> npt.NDArray[Any]:
        """Out-degree of every node, integer [n]."""
        return self._get("out_degree", self.out_degree_of, "open a dataset with a topology")

    @cached_property
    def counts(self) -> npt.NDArray[Any]:
        """Accesses of every row in a profiled run, integer [n]."""
        return self._get(
            "counts", self.counts_of, "pass counts=, or use the policy through a Loader, which samples an epoch to count"
        )

    @cached_property
    def parts(self) -> npt.NDArray[Any]:
        """Partition of every node, integer [n]."""
        return self._get("parts", self.parts_of, "pass parts=")


class StaticPolicy(ABC):
    """Rows are chosen once, by score; the cache does not change afterwards."""

    @abstractmethod
    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return one score a row, shape (n,), no NaN; the highest stay (of equals the lowest row)."""


class OnlinePolicy(ABC):
    """Rows come and go as batches arrive; one call of each hook a batch, in the order hit, victims, insert.

    Slots are numbered ``0 … capacity-1``; the table fills free slots first and asks for victims only when none are left.
    """

    @abstractmethod
    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with an empty cache of ``capacity`` slots; forgets everything earlier."""

    @abstractmethod
    def hit(self, slots: Int32s) -> None:
        """The rows in ``slots`` (distinct) were asked for, in this order."""

    @abstractmethod
    def victims(self, n: int) -> Int32s:
        """Choose ``n`` (1 … number of occupied slots) distinct occupied slots to empty; they are empty from now on."""

    @abstractmethod
    def insert(self, rows: Int64s, slots: Int32s) -> None:
        """``rows`` (distinct, absent before) were put into ``slots`` (distinct, empty before), in this order."""
