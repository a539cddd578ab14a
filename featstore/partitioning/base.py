"""The contract of partitioners and their registry.

To add a partitioner: subclass :class:`Partitioner`, decorate it with :func:`register_partitioner` (or name the class in the
entry-point group ``featstore.partitioners``), and run ``featstore.testing.PartitionerContract`` over it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget, Reservation
from featstore.config import check_at_least
from featstore.errors import ClosedError, FeatstoreError, OptionError, PluginError
from featstore.gather.buffers import huge_array
from featstore.progress import Progress
from featstore.registry import Registry, error_text, read_only
from featstore.topology.base import Topology, huge_bytes
from featstore.topology.crossedges import blocks_in
from featstore.topology.listblocks import ListBlock

__all__ = ["GraphStream", "Partitioner", "available_partitioners", "get_partitioner", "options_of", "register_partitioner"]

HOLDER = "partitioning"  # in the budget's report
_PIECE_NODES = 1 << 16


class GraphStream:
    """A graph as a partitioner sees it: degrees in memory, neighbour ids block by block from the file.

    All arrays are read-only.

    Attributes
    ----------
    num_nodes, num_edges, n_parts, seed : int
    is_train : uint8 array, shape (num_nodes,), or None
        1 for training nodes.
    """

    _passes: tuple[Generator[ListBlock, None, None], ...] = ()  # that have begun
    _held: tuple[Reservation, ...] = ()
    _is_over = False

    def __init__(
        self, topology: Topology, n_parts: int, is_train: npt.NDArray[np.uint8] | None, seed: int, budget: Budget, bar: Progress
    ) -> None:
        self._topology, self._budget, self._bar = topology, budget, bar
        self.num_nodes, self.num_edges = topology.num_nodes, topology.num_edges
        self.n_parts, self.seed = n_parts, seed
        self.is_train = None if is_train is None else read_only(is_train)
        self._read_indptr: npt.NDArray[np.int64] | None = None

    @property
    def indptr(self) -> npt.NDArray[np.int64]:
        """The offset of each node's in-neighbours, int64 ``[num_nodes + 1]``.

        The offsets of a chunked topology are read at first use, and counted in the budget as long as this object lives.
        """
        if self._read_indptr is None:
            self._read_indptr = self._topology.resident_offsets
        if self._read_indptr is None:
            n_bytes = 8 * (self.num_nodes + 1)
            self._budget.reserve(HOLDER, huge_bytes(n_bytes), owner=self)
            self._read_indptr = huge_array(n_bytes).view(np.int64)
            for first, offsets in self._topology.offset_pieces(_PIECE_NODES):
                self._read_indptr[first : first + len(offsets)] = offsets
        return read_only(self._read_indptr)

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Read the adjacency once: yield ``(first, ids)``, the neighbour ids at positions ``first …``, int32 or int64.

        Blocks come in order and without gaps, and may begin or end within a list. A graph without edges has one empty block. The
        ids are checked. The array is reused for the next block.
        """
        if not self.num_edges:
            yield 0, np.empty(0, self._topology.id_dtype)
        for block in self.list_blocks():
            yield block.first_edge, block.ids

    def list_blocks(self) -> Iterator[ListBlock]:
        """Read the adjacency once, as :meth:`blocks`, with the nodes whose lists each block holds."""
        found = self._read()
        self._passes = (*self._passes, found)
        return found

    def _read(self) -> Generator[ListBlock, None, None]:
        if self._is_over:
            raise ClosedError("the partitioner's assign has returned, and its graph is not read any more")
        for block in blocks_in(self._topology, self._budget, HOLDER):
            yield replace(block, offsets=read_only(block.offsets), ids=read_only(block.ids))
            self._bar.add(block.ids.nbytes)

    def close(self) -> None:
        """End the passes that have begun, and give the memory back that was reserved: a partitioner may have kept either."""
        self._is_over = True
        for each in self._passes:
            each.close()
        for held in self._held:
            held.release()

    def reserve(self, n_bytes: int) -> Reservation:
        """Reserve memory in the graph's budget; a context manager. For all memory that grows with nodes, edges or parts.

        BudgetError: the bytes are not available; the error names the least budget that suffices.
        """
        held = self._budget.reserve(HOLDER, check_at_least("n_bytes", n_bytes, 0))
        self._held = (*self._held, held)
        return held


class Partitioner(ABC):
    """Contract of a method that divides nodes into parts.

    A partitioner with options is a dataclass; its fields are options of :func:`featstore.partition`.
    """

    _registered: ClassVar[str]

    @property
    def name(self) -> str:
        """The registered name, or the name of the class."""
        return str(type(self).__dict__.get("_registered") or type(self).__qualname__)

    @property
    def n_passes(self) -> int:
        """Number of times that :meth:`assign` reads the adjacency; for progress bars."""
        return 1

    def check(self, n_parts: int) -> None:
        """Raise ValueError if the options do not allow ``n_parts`` parts; called before anything is read."""

    @abstractmethod
    def assign(self, graph: GraphStream) -> npt.NDArray[Any]:
        """Assign every node a part: integers in ``[0, graph.n_parts)``, shape (num_nodes,).

        A pure function of the graph, ``graph.is_train``, ``graph.seed`` and the options. Parts may be empty.
        """


PartitionerType = TypeVar("PartitionerType", bound=type[Partitioner])

PARTITIONERS = Registry(
    "partitioner",
    Partitioner,  # type: ignore[type-abstract]
    "featstore.partitioning",
    "partitioners",
    "Partitioner",
)


def register_partitioner(name: str) -> Callable[[PartitionerType], PartitionerType]:
    """Register the decorated partitioner class under ``name``.

    Raises
    ------
    TypeError
        The class is not a subclass of Partitioner, or the name is not a string.
    ValueError
        The name is empty or taken.

    Examples
    --------
    >>> @register_partitioner("stripes")
    ... class Stripes(Partitioner):
    ...     def assign(self, graph):
    ...         return np.arange(graph.num_nodes) % graph.n_parts
    """
    return cast(Callable[[PartitionerType], PartitionerType], PARTITIONERS.register(name))


def available_partitioners() -> list[str]:
    """Return the names that :func:`featstore.partition` knows, sorted; imports no plug-in."""
    return PARTITIONERS.names()


def get_partitioner(method: str | Partitioner | type[Partitioner], options: dict[str, Any]) -> Partitioner:
    """Get a partitioner by its registered name, the name of an entry point, or a class; an instance is returned as it is.

    ``options`` are given by name; None leaves an option to the partitioner. ValueError, PluginError: no partitioner has that
    name; the class cannot be instantiated. OptionError: the partitioner has no such option; the error lists its options. Or an
    instance was given with options. TypeError: ``method`` is no name, partitioner or class.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(method, Partitioner):
        if given:
            raise OptionError(next(iter(given)), f"{method.name!r} was made with its options")
        PARTITIONERS.check_name(method)
        return method
    if isinstance(method, str):
        cls = PARTITIONERS.find(method)
    elif isinstance(method, type) and issubclass(method, Partitioner):
        cls = method
    else:
        raise TypeError(f"a method is a name, a partitioner, a class of one, or an array of parts, not {method!r}")
    known = options_of(cls)
    for name in given:
        if name not in known:
            what = ", ".join(known) or "no options"
            raise OptionError(name, f"method {method if isinstance(method, str) else cls.__qualname__!r} has {what}")
    try:
        inspect.signature(cls).bind(**given)
    except (TypeError, ValueError) as error:
        raise PluginError(f"partitioner {cls.__module__}.{cls.__qualname__} cannot be made: {error_text(error)}") from error
    try:
        made = cls(**given)
    except (FeatstoreError, ValueError, TypeError):
        raise  # the error of an option
    except Exception as error:
        raise PluginError(f"partitioner {cls.__module__}.{cls.__qualname__} cannot be made: {error_text(error)}") from error
    PARTITIONERS.check_name(made)
    return made


def options_of(cls: type[Partitioner]) -> tuple[str, ...]:
    """Return the names of a partitioner's options."""
    return tuple(field.name for field in fields(cls) if field.init) if is_dataclass(cls) else ()
