"""Contracts of cache policies and their registry.

A policy decides over arrays, once a batch. The cache table holds the rows. ``row`` is a row of the field, ``slot`` an index into
the cache array. To add a policy: subclass one of the three kinds, decorate with :func:`register_policy` (or name the class
in the entry-point group ``featstore.policies``), and run the kind's contract suite of ``featstore.testing`` over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import numpy.typing as npt

from featstore.errors import PluginError
from featstore.gather.arrays import as_array
from featstore.lazy import lazy
from featstore.registry import Registry, error_text, plugin_errors, read_only, whole_number

__all__ = ["OnlinePolicy", "Policy", "PolicyContext", "StaticPolicy", "available_policies", "get_policy", "register_policy"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PolicyContext:
    """Read-only arrays that a policy may use; the graph itself is not among them.

    Providers run at first use, so an unused array costs nothing.

    Parameters
    ----------
    n : int
        Rows (nodes).
    row_bytes : int
        Bytes of one row.
    in_degree_of, out_degree_of, counts_of, parts_of : callable, optional
        Providers of the arrays of these names; None if the context lacks the array.
    seed : int
        Seed of randomised policies.
    cross_out_degree_of : callable, optional
        Provider of ``cross_out_degree``; None if the context lacks the array.
    is_there_of : callable, optional
        Provider of ``is_there``; None if all rows are there.
    """

    n: int
    row_bytes: int
    in_degree_of: Callable[[], npt.NDArray[Any]] | None = None
    out_degree_of: Callable[[], npt.NDArray[Any]] | None = None
    counts_of: Callable[[], npt.NDArray[Any]] | None = None
    parts_of: Callable[[], npt.NDArray[Any]] | None = None
    seed: int = 0
    cross_out_degree_of: Callable[[], npt.NDArray[Any]] | None = None
    is_there_of: Callable[[], npt.NDArray[Any]] | None = None

    def _get(self, what: str, provider: Callable[[], npt.NDArray[Any]] | None, hint: str) -> npt.NDArray[Any]:
        if provider is None:
            raise ValueError(f"the policy needs {what}, which is not known here: {hint}")
        array = as_array(what, provider())
        if array.shape != (self.n,):
            raise ValueError(f"{what} must have shape ({self.n},), not {array.shape}")
        return read_only(array)

    def forget(self) -> None:
        """Drop the arrays made so far; the next access calls the provider again."""
        for field in fields(self):
            if field.name.endswith("_of"):
                self.__dict__.pop(field.name.removesuffix("_of"), None)

    @lazy
    def in_degree(self) -> npt.NDArray[Any]:
        """In-degree of every node, integer [n]."""
        return self._get("in_degree", self.in_degree_of, "open a dataset with a topology")

    @lazy
    def out_degree(self) -> npt.NDArray[Any]:
        """Out-degree of every node, integer [n]."""
        return self._get("out_degree", self.out_degree_of, "open a dataset with a topology")

    @lazy
    def counts(self) -> npt.NDArray[Any]:
        """Accesses of every row in a profiled run, integer [n]."""
        return self._get(
            "counts", self.counts_of, "pass counts=, or use the policy through a Loader, which samples an epoch to count"
        )

    @lazy
    def parts(self) -> npt.NDArray[Any]:
        """Partition of every node, integer [n]."""
        return self._get("parts", self.parts_of, "pass parts=")

    @lazy
    def cross_out_degree(self) -> npt.NDArray[Any]:
        """Out-edges of every node into other parts, integer [n]."""
        hint = "divide the dataset with featstore.partition, or pass parts="
        return self._get("cross_out_degree", self.cross_out_degree_of, hint)

    @lazy
    def is_there(self) -> npt.NDArray[Any] | None:
        """Whether anybody may ask for a row, bool [n]; None: for all. Other rows are not chosen, whatever their score."""
        return None if self.is_there_of is None else self._get("is_there", self.is_there_of, "pass no is_there_of")


class Policy(ABC):
    """Base of the policy kinds. A policy given by name is instantiated without arguments; an instance serves one cache."""

    _registered: ClassVar[str]

    @property
    def name(self) -> str:
        """The registered name, or the name of the class; messages use it."""
        return str(type(self).__dict__.get("_registered") or type(self).__qualname__)


class StaticPolicy(Policy):
    """Policy that chooses rows once, by score; the cache does not change afterwards."""

    score_bytes: ClassVar[int] = 8
    """Bytes a row that :meth:`scores` allocates, which are counted meanwhile; 0 where it returns an array of the context."""
    needs_parts: ClassVar[bool] = False
    """Whether :meth:`scores` asks for ``cross_out_degree``: there are scores only where nodes are divided into parts."""
    needs_counts: ClassVar[bool] = False
    """Whether :meth:`scores` asks for ``counts``."""
    list_score_bytes: ClassVar[int | None] = None
    """As :attr:`score_bytes`, of :meth:`list_scores`; None: the same."""
    from_degrees: ClassVar[bool] = False
    """Whether a row's score follows from its own in- and out-degree alone. :meth:`list_scores` may then be asked for a run of
    rows at a time, with a context of these rows. A subclass does not inherit it."""

    @abstractmethod
    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Compute one score per row, shape (n,), integer or floating, no NaN.

        The cache holds the rows of highest score; of equal scores the lower row wins.
        The context's arrays belong to the dataset: they may be returned, but not written to.
        """

    def list_scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Compute one score per node for a cache of neighbour lists, which differ in length; by default call :meth:`scores`.

        The context's ``counts`` are then edges drawn from each node's list.
        """
        return self.scores(context)

    @property
    def goes_by_degrees(self) -> bool:
        """Whether the policy's own class sets :attr:`from_degrees`: a subclass with other scores may need all rows at once."""
        return bool(type(self).__dict__.get("from_degrees", False))


class OnlinePolicy(Policy):
    """Policy that admits and evicts rows as batches arrive: one call of each hook a batch, in the order hit, victims, insert.

    The first ``capacity`` missed rows of a batch are admitted. A policy that evicts new rows early sets :attr:`groups`. The table
    then calls :meth:`victims` and :meth:`insert` several times a batch.

    Slots are numbered ``0 … capacity-1``. The table fills free slots first, and asks for one victim for each slot that is
    lacking. A hook without work (no hits, no victims, nothing to insert) is not called. If the cache shrinks, the table asks for
    all occupied slots in the order of eviction. Then it calls :meth:`start` and :meth:`insert`. Hooks run under the cache's
    lock, one at a time. Their arrays are valid during the call only, and may not be written to.
    """

    slot_bytes: ClassVar[int] = 0
    """Bytes of state a slot, for sizing a cache ahead; :attr:`nbytes` is what counts afterwards."""
    groups: int = 1
    """Where a batch's new rows need more than free slots and one part of so many of all, they come in by such parts: ``victims``
    and ``insert`` are called once a part. Rows of an earlier part can then be victims of a later one."""

    @property
    def nbytes(self) -> int:
        """Bytes held now: proportional to ``capacity``, whatever the number of rows. Read after :meth:`start`."""
        return 0

    @abstractmethod
    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with an empty cache of ``capacity`` (≥ 1) slots; forget all earlier state."""

    @abstractmethod
    def hit(self, slots: Int32s) -> None:
        """Record hits: a batch requested the rows in ``slots`` (distinct), in this order."""

    @abstractmethod
    def victims(self, n: int) -> Int32s:
        """Choose ``n`` (1 … number of occupied slots) distinct occupied slots to empty; they count as empty from now on."""

    @abstractmethod
    def insert(self, rows: Int64s, slots: Int32s) -> None:
        """Record admissions: ``rows`` (distinct, absent before) took ``slots`` (distinct, empty before), in this order."""

    def _check(self) -> None:
        """Assert the invariants of the policy's state, if any; the contract suite calls this after every step."""


PolicyType = TypeVar("PolicyType", bound=type[Policy])

POLICIES = Registry("policy", Policy, "featstore.cache", "policies", "StaticPolicy, OnlinePolicy or PlannedPolicy")


def register_policy(name: str) -> Callable[[PolicyType], PolicyType]:
    """Register the decorated policy class under ``name``.

    Raises
    ------
    TypeError
        The class is not a subclass of a policy kind, or the name is not a string.
    ValueError
        The name is empty or taken. (Running a notebook cell again, which defines the same class of ``__main__`` anew, is no
        clash.)

    Examples
    --------
    >>> @register_policy("lowest-rows")
    ... class LowestRows(StaticPolicy):
    ...     def scores(self, context):
    ...         return -np.arange(context.n)
    """
    return cast(Callable[[PolicyType], PolicyType], POLICIES.register(name))


def available_policies() -> list[str]:
    """Return the names that :func:`get_policy` knows, sorted; imports no plug-in."""
    return POLICIES.names()


def get_policy(policy: str | Policy | type[Policy]) -> Policy:
    """Get a policy instance for a name, a class or an instance.

    Parameters
    ----------
    policy : str, Policy, or subclass of Policy
        A registered name, or the name of an entry point of the group ``featstore.policies``, which is loaded. A class is
        instantiated without arguments. An instance is returned as it is; it may serve one cache only.

    Raises
    ------
    ValueError
        No policy has that name; the message lists the names.
    TypeError
        Neither a name, a policy nor a policy class.
    PluginError
        The entry point cannot be loaded, is ambiguous or is no policy, the class cannot be instantiated, or the policy's name is
        no text. The message names the policy.
    """
    if isinstance(policy, Policy):
        return _checked(policy)
    if isinstance(policy, str):
        cls = POLICIES.find(policy)
    elif isinstance(policy, type) and issubclass(policy, Policy):
        cls = policy
    else:
        raise TypeError(f"a policy is a name, a policy instance or a policy class, not {policy!r}")
    try:
        made = cls()
    except Exception as error:
        label = policy if isinstance(policy, str) else cls.__qualname__
        raise PluginError(
            f"policy {label!r} ({cls.__module__}.{cls.__qualname__}) cannot be made: {error_text(error)}"
        ) from error
    return _checked(made)


# Numbers that a policy says of itself, which sizes of caches are computed with.
_NUMBERS = {"score_bytes": 0, "list_score_bytes": 0, "slot_bytes": 0, "groups": 1}


def _checked(policy: Policy) -> Policy:
    """Check what a policy says of itself: a name that is text, and numbers; return the policy."""
    label = POLICIES.check_name(policy)
    for attribute, least in _NUMBERS.items():
        if not hasattr(type(policy), attribute):  # the policy is of another kind
            continue
        with plugin_errors(label, attribute):
            value: Any = getattr(policy, attribute)
        if value is not None or attribute != "list_score_bytes":
            whole_number(label, attribute, value, least)
    for attribute in ("needs_parts", "needs_counts", "from_degrees"):
        if hasattr(type(policy), attribute):
            with plugin_errors(label, attribute):
                value = getattr(policy, attribute)
            if not isinstance(value, bool):
                raise PluginError(f"{label}: {attribute} must be True or False, not a {type(value).__name__}")
    return policy
