"""Contracts of cache policies and their registry.

A policy decides over arrays, once a batch. The cache table holds the rows. ``row`` is a row of the field, ``slot`` an index into
the cache array. To add a policy: subclass one of the three kinds, decorate with :func:`register_policy` (or name the class
in the entry-point group ``featstore.policies``), and run the kind's contract suite of ``featstore.testing`` over it.

Names resolve in this order: what this process registered (built-in policies are the modules of this package, imported at the
first look-up), then the entry point of that name. Only that one is imported, so a broken plug-in disturbs no other policy.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from featstore.errors import PluginError

__all__ = [
    "OnlinePolicy",
    "Policy",
    "PolicyContext",
    "StaticPolicy",
    "available_policies",
    "get_policy",
    "register_policy",
]

ENTRY_POINT_GROUP = "featstore.policies"

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PolicyContext:
    """The arrays that a policy may use: never the graph. Providers run at first use, so an unused array costs nothing.

    Parameters
    ----------
    n : int
        Rows (nodes).
    row_bytes : int
        Bytes of one row.
    in_degree_of, out_degree_of, counts_of, parts_of : callable, optional
        Return the array; None if the context does not have it.
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


class Policy(ABC):
    """Base of the policy kinds. Asked for by name, a class is made without arguments; an instance serves one cache."""

    _registered: ClassVar[str]

    @property
    def name(self) -> str:
        """The registered name, or the name of the class; messages use it."""
        return str(type(self).__dict__.get("_registered") or type(self).__qualname__)


class StaticPolicy(Policy):
    """Policy that chooses rows once, by score; the cache does not change afterwards."""

    score_bytes: ClassVar[int] = 8
    """Bytes a row that :meth:`scores` allocates, counted in the budget meanwhile; 0 where it returns an array of the context."""

    @abstractmethod
    def scores(self, context: PolicyContext) -> npt.NDArray[Any]:
        """Return one score a row, shape (n,), integer or floating, no NaN. The highest stay; among equals the lower row wins.

        The context's arrays belong to the dataset: they may be returned, but not written to.
        """


class OnlinePolicy(Policy):
    """Policy that admits and evicts rows as batches arrive: one call of each hook a batch, in the order hit, victims, insert.

    Slots are numbered ``0 … capacity-1``. The table fills free slots first, and asks for as many victims as slots are lacking. A
    hook without work (no hits, no victims, nothing to insert) is not called. If the cache shrinks, it asks for all rows in the
    order of eviction, then calls :meth:`start` and :meth:`insert`. Hooks run under the cache's lock, one at a time. The arrays
    given to them are valid during the call only, and may not be written to.
    """

    slot_bytes: ClassVar[int] = 0
    """Bytes of state a slot, for sizing a cache ahead; :attr:`nbytes` is what counts afterwards."""

    @property
    def nbytes(self) -> int:
        """Bytes held now: proportional to ``capacity``, whatever the number of rows. Read after :meth:`start`."""
        return 0

    @abstractmethod
    def start(self, capacity: int, context: PolicyContext) -> None:
        """Begin with an empty cache of ``capacity`` (≥ 1) slots; forgets everything earlier."""

    @abstractmethod
    def hit(self, slots: Int32s) -> None:
        """The rows in ``slots`` (distinct) were asked for, in this order."""

    @abstractmethod
    def victims(self, n: int) -> Int32s:
        """Choose ``n`` (1 … number of occupied slots) distinct occupied slots to empty; they are empty from now on."""

    @abstractmethod
    def insert(self, rows: Int64s, slots: Int32s) -> None:
        """``rows`` (distinct, absent before) were put into ``slots`` (distinct, empty before), in this order."""

    def _check(self) -> None:
        """Assert the invariants of the policy's state, where it has any; the contract suite calls this after every step."""


PolicyType = TypeVar("PolicyType", bound=type[Policy])

_lock = threading.RLock()
_policies: dict[str, type[Policy]] = {}
_builtins_loaded = False


def _load_builtins() -> None:
    """Import the modules of this package once: each registers the policies that it defines."""
    global _builtins_loaded
    if _builtins_loaded:
        return
    # Not under _lock: another thread may hold one of these modules' import locks and wait for _lock to register.
    package = importlib.import_module("featstore.cache")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"featstore.cache.{module.name}")
    _builtins_loaded = True


def register_policy(name: str) -> Callable[[PolicyType], PolicyType]:
    """Class decorator: make a policy known under ``name``.

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
    if not isinstance(name, str):
        raise TypeError(f"a policy's name is a string, not {type(name).__name__}; write @register_policy('name')")
    if not name:
        raise ValueError("a policy's name cannot be empty")

    def decorate(cls: PolicyType) -> PolicyType:
        if not (isinstance(cls, type) and issubclass(cls, Policy)):
            raise TypeError(f"{cls!r} is not a subclass of StaticPolicy, OnlinePolicy or PlannedPolicy")
        if not cls.__module__.startswith("featstore.cache."):
            _load_builtins()  # so that a clash with a built-in name shows here, where it is made
        with _lock:
            known = _policies.get(name)
            redefined = (
                known is not None and known.__module__ == cls.__module__ == "__main__" and known.__qualname__ == cls.__qualname__
            )
            if known is not None and known is not cls and not redefined:
                raise ValueError(f"a policy named {name!r} is registered already: {known.__module__}.{known.__qualname__}")
            if known is cls:
                raise ValueError(f"{cls.__qualname__} is registered under {name!r} already")
            _policies[name] = cls
            cls._registered = name
        return cls

    return decorate


def _entry_points() -> dict[str, list[importlib.metadata.EntryPoint]]:
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        points = found.setdefault(point.name, [])
        if all(point.value != other.value for other in points):  # a distribution may be found twice on sys.path
            points.append(point)
    return found


def available_policies() -> list[str]:
    """Return the names that :func:`get_policy` knows, sorted; imports no plug-in."""
    _load_builtins()
    with _lock:
        return sorted({*_policies, *_entry_points()})


def _load_entry_point(name: str) -> type[Policy]:
    points = _entry_points().get(name, [])
    if not points:
        raise ValueError(f"no policy is named {name!r}; there are {', '.join(map(repr, available_policies()))}")
    described = " and ".join(
        f"{point.name} = {point.value}" + (f" of {point.dist.name} {point.dist.version}" if point.dist is not None else "")
        for point in points
    )
    where = f"entry point {ENTRY_POINT_GROUP}: {described}"
    if len(points) > 1:
        raise PluginError(f"several installed packages provide the policy {name!r}: {where}; uninstall all but one")
    try:
        cls = points[0].load()
    except Exception as error:
        raise PluginError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise PluginError(f"{where} is not a subclass of StaticPolicy, OnlinePolicy or PlannedPolicy, but {cls!r}")
    with _lock:
        if _policies.get(name) is not cls:  # loading it may have run its own @register_policy
            if name in _policies:
                raise PluginError(f"{where} registers another class under its name: {_policies[name]!r}")
            register_policy(name)(cls)
    return cls


def get_policy(policy: str | Policy | type[Policy]) -> Policy:
    """Return an instance of a policy.

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
        no text; names it.
    """
    if isinstance(policy, Policy):
        return _named(policy)
    if isinstance(policy, str):
        _load_builtins()
        cls = _policies.get(policy) or _load_entry_point(policy)
    elif isinstance(policy, type) and issubclass(policy, Policy):
        cls = policy
    else:
        raise TypeError(f"a policy is a name, a policy instance or a policy class, not {policy!r}")
    try:
        made = cls()
    except Exception as error:
        label = policy if isinstance(policy, str) else cls.__qualname__
        raise PluginError(f"policy {label!r} ({cls.__module__}.{cls.__qualname__}) cannot be made: {error}") from error
    return _named(made)


def _named(policy: Policy) -> Policy:
    """Return a policy whose name is text, as messages and layouts need it."""
    label = f"policy {type(policy).__module__}.{type(policy).__qualname__}"
    try:
        name: Any = policy.name
    except Exception as error:
        raise PluginError(f"{label}: name raised {type(error).__name__}: {error}") from error
    if not isinstance(name, str):
        raise PluginError(f"{label}: name must be text, not {type(name).__name__}")
    return policy
