"""Making a dataset of several types of nodes and edges."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.config import check_at_least, listed
from featstore.creation.build import write_pairs
from featstore.creation.builder import Builder, inputs_of
from featstore.creation.cleaning import Cleaning
from featstore.creation.inputedges import CscInput, PairInput
from featstore.creation.inputfields import Field, check_edge_rows, check_field_name, open_fields, total_bytes
from featstore.creation.options import CreateOptions
from featstore.creation.source import ArrayLike, Source
from featstore.creation.steps import BuildSteps, Inputs
from featstore.progress import Progress
from featstore.storage.builddir import BuildDirectory
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, EdgeType, Types, edge_name

__all__ = ["Edges", "Nodes", "check_types", "create_typed", "nodes_and_edges", "nodes_of_type", "refuse_one_type"]

Int64s = npt.NDArray[np.int64]

_MOST_NAME_BYTES = 250  # of an edge type: a key of the catalog has at most 511, up to 240 of them a field's name


@dataclass(frozen=True, eq=False)
class Nodes:
    """A type of nodes: their number, and what is stored of them. See :meth:`featstore.OutOfCoreGraph.create`.

    Parameters
    ----------
    n : int
    features : mapping of str to array, shape (n, …), optional
        Any widths and dtypes; a type may have none.
    data : mapping of str to array, shape (any, …), optional
        Labels, masks, index sets.
    """

    n: int
    features: Mapping[str, ArrayLike] | None = field(default=None, repr=False)
    data: Mapping[str, ArrayLike] | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Edges:
    """A type of edges, with features of its edges. See :meth:`featstore.OutOfCoreGraph.create`.

    Parameters
    ----------
    edges : integer array, shape (2, num_edges), iterable of such blocks, or tuple (indptr, indices)
        Sources and destinations, or the sources of each destination, as ids within their types.
    features : mapping of str to array, shape (num_edges, …), optional
        Row ``i`` is that of edge ``i`` in the order of ``edges``.
    """

    edges: Any = field(repr=False)
    features: Mapping[str, ArrayLike] | None = field(default=None, repr=False)


def nodes_of_type(text: str) -> tuple[str, int]:
    """Parse ``TYPE=NUMBER``, a type of nodes and their number as commands take them."""
    name, _, n = text.partition("=")
    if not (name and n.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not TYPE=NUMBER, such as paper=3000")
    return name, int(n)


def refuse_one_type(arrays: Mapping[str, Any], cleaning: Cleaning) -> None:
    """Refuse arguments of a graph of one type beside those of several types: TypeError for arrays, ValueError for cleaning."""
    if given := [name for name, value in arrays.items() if value is not None]:
        raise TypeError(
            f"{', '.join(given)} cannot be given with nodes and edges: these hold the fields and the edges of each type, such as "
            'nodes={"paper": featstore.Nodes(n, features={"x": x})}'
        )
    if not cleaning.is_none:
        raise ValueError(f"{cleaning.given}=True cannot be given with nodes and edges: clean the edges of each type before")


def nodes_and_edges(
    edge_index: Mapping[Any, Any],
    num_nodes: Any,
    features: Any = None,
    node_data: Any = None,
    edge_features: Any = None,
) -> tuple[dict[str, Nodes], dict[Any, Edges]]:
    """Make the arguments of :func:`create_typed` of mappings by type: pairs of edges, numbers of nodes, and fields.

    TypeError for what is no mapping; ValueError for fields of a type that is not there.
    """

    def by_type(argument: str, given: Any, types: Mapping[Any, Any]) -> dict[Any, Any]:
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise TypeError(f"{argument} must be a mapping of types, as edge_index is one, not {type(given).__name__}")
        if unknown := [key for key in given if key not in types]:
            raise ValueError(f"{argument}: {unknown[0]!r} is none of the types {listed(types)}")
        return dict(given)

    counts = by_type("num_nodes", num_nodes, num_nodes)
    rows, data = by_type("features", features, counts), by_type("node_data", node_data, counts)
    of_edges = by_type("edge_features", edge_features, edge_index)
    # A tuple is sources and destinations here, and not (indptr, indices).
    pairs = {key: list(given) if isinstance(given, tuple) else given for key, given in edge_index.items()}
    nodes = {name: Nodes(n, rows.get(name), data.get(name)) for name, n in counts.items()}
    return nodes, {key: Edges(given, of_edges.get(key)) for key, given in pairs.items()}


@contextlib.contextmanager
def _of(what: str) -> Iterator[None]:
    """Say of which type an argument is wrong."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:
        if type(error) not in (TypeError, ValueError, IndexError):
            raise  # a FormatError names its file
        raise type(error)(f"{what}: {error}") from error


def _of_nodes(name: object) -> contextlib.AbstractContextManager[None]:
    return _of(f"node type {name!r}")


def _of_edges(key: object) -> contextlib.AbstractContextManager[None]:
    return _of(f"edge type {key!r}")


def _check_nodes(nodes: Any) -> dict[str, Nodes]:
    if not isinstance(nodes, Mapping) or not nodes:
        raise TypeError('nodes must be a mapping of types to featstore.Nodes, such as {"paper": featstore.Nodes(n)}')
    for name, given in nodes.items():
        with _of_nodes(name):
            _check_type_name(name)
            if not isinstance(given, Nodes):
                raise TypeError(f"it must be a featstore.Nodes, not {type(given).__name__}")
            check_at_least("n", given.n, 0)
    return dict(nodes)


def _check_edges(edges: Any, nodes: Mapping[str, Nodes]) -> dict[EdgeKey, Edges]:
    if not isinstance(edges, Mapping):
        raise TypeError(
            'edges must be a mapping of (source, relation, destination) to edges, such as {("author", "writes", "paper"): '
            f"edge_index}}, not {type(edges).__name__}"
        )
    _check_edge_keys(edges, nodes)
    return {key: given if isinstance(given, Edges) else Edges(given) for key, given in edges.items()}


def _check_edge_keys(edges: Iterable[Any], nodes: Collection[Any]) -> None:
    for key in edges:
        with _of_edges(key):
            if not isinstance(key, tuple) or len(key) != 3:
                raise TypeError("the name of an edge type is a tuple (source, relation, destination)")
            for part in key:
                _check_type_name(part)
            for end in (key[0], key[2]):
                if end not in nodes:
                    raise ValueError(f"there is no node type {end!r}; there is {listed(nodes)}")
            if len(edge_name(key).encode()) > _MOST_NAME_BYTES:
                raise ValueError(f"the name of an edge type has at most {_MOST_NAME_BYTES} bytes")


def check_types(nodes: Collection[Any], edges: Iterable[Any]) -> None:
    """Check names of types of nodes, and of edges between them; TypeError or ValueError names a wrong one."""
    for name in nodes:
        with _of_nodes(name):
            _check_type_name(name)
    _check_edge_keys(edges, nodes)


def _check_type_name(name: object) -> None:
    check_field_name(name, "a type")
    if "," in str(name):
        raise ValueError(f"a type's name has no comma: {name!r}")


class _Lists:
    """The edges of a type as sources' ids and numbers of lists; ``n_edges`` of them were read."""

    def __init__(self, given: Any, kind: EdgeType) -> None:
        self._kind = kind
        self.n_edges = 0
        self._given: CscInput | PairInput
        if isinstance(given, tuple) and len(given) == 2:
            self._given = csc = CscInput(*given, kind.src.n)
            if csc.num_nodes != kind.dst.n:
                raise ValueError(
                    f"indptr has {csc.num_nodes + 1} entries for {kind.dst.n} nodes of type {kind.dst.name!r}; a tuple is "
                    "(indptr, indices), and sources and destinations are given as np.stack([sources, destinations])"
                )
            csc.check_offsets()
        else:
            self._given = PairInput(given, kind.src.n, kind.dst.n)
        self.n_known = self._given.num_edges

    def pairs(self, n: int, block_bytes: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield the next sources and lists, at most ``n``."""
        kind, given = self._kind, self._given
        for src, dst in given.blocks(n) if isinstance(given, PairInput) else given.pairs(n, block_bytes):
            self.n_edges += len(src)
            yield src + kind.src.first, dst + kind.first_list


def create_typed(
    options: CreateOptions, nodes: Mapping[str, Nodes], edges: Mapping[EdgeKey, Any], inputs: Inputs | None = None
) -> None:
    """Write a dataset of several types; see :meth:`featstore.OutOfCoreGraph.create`, which also opens it.

    ``inputs`` as of :func:`~featstore.creation.build.from_edge_index`.
    """
    form, cleaning = options.form, options.cleaning
    assert cleaning.is_none
    node_types = _check_nodes(nodes)
    edge_types = _check_edges(edges, node_types)
    counts = {name: int(each.n) for name, each in node_types.items()}
    laid_out = Types.of(counts, dict.fromkeys(edge_types, 0))  # the ranges of lists do not depend on the numbers of edges
    if ONE_NODE in counts and not laid_out.is_one:
        raise ValueError(f"{ONE_NODE!r} is the name of nodes without types, whose edges are {ONE_EDGE!r}: give another name")
    kinds = laid_out.edges
    of_nodes: dict[str, list[Field]] = {}
    for name, given in node_types.items():
        with _of_nodes(name):
            of_nodes[name] = open_fields(given.features, given.data, None, counts[name])
    of_edges: dict[EdgeKey, list[Field]] = {}
    lists: dict[EdgeKey, _Lists] = {}
    for key, each in edge_types.items():
        with _of_edges(key):
            of_edges[key] = open_fields(None, None, each.features, 0)
            lists[key] = _Lists(each.edges, kinds[key])
            n_edges = lists[key].n_known
            if n_edges is not None:
                check_edge_rows(of_edges[key], n_edges)
    known = [each.n_known for each in lists.values() if each.n_known is not None]
    n_known = sum(known) if len(known) == len(lists) else None
    total = sum(map(total_bytes, (*of_nodes.values(), *of_edges.values())))

    n_read: dict[str, int] = {}  # edges, by type

    def check(_: int) -> None:
        if not n_read:  # otherwise an earlier call has read them
            n_read.update((edge_name(key), each.n_edges) for key, each in lists.items())
        for key, fields in of_edges.items():
            with _of_edges(key):
                check_edge_rows(fields, n_read[edge_name(key)])

    inputs = inputs_of(inputs, options)
    with BuildDirectory(options.path, overwrite=options.overwrite, resume=inputs.digest) as build:
        steps = BuildSteps(build.path, build.target, inputs, progress=options.progress)
        steps.begin()
        n_read = steps.more.setdefault("read", n_read)
        with Progress("create", total + cleaning.work_bytes(n_known or 0, 24), options.progress) as bar:
            builder = Builder(build.path, options.work_bytes, bar, steps)

            def pairs(n: int) -> Iterator[tuple[Int64s, Int64s]]:
                for key, each in lists.items():
                    with _of_edges(key):
                        yield from each.pairs(n, builder.block_bytes)

            write_pairs(builder, pairs, laid_out.num_nodes, n_known, form, cleaning, check, laid_out.num_lists)
            shared: dict[tuple[str, str, tuple[int, ...]], dict[str, Source]] = {}
            for name, fields in of_nodes.items():
                for _, role, of, source in fields:
                    if role == "feature":
                        shared.setdefault((of, source.dtype, source.shape[1:]), {})[name] = source
                    else:
                        with _of_nodes(name):
                            builder.add(f"node/{name}", role, of, source)
            for (of, _, _), sources in shared.items():
                builder.add_feature(of, sources, _of_nodes)
            for key, fields in of_edges.items():
                with _of_edges(key):
                    for _, role, of, source in fields:
                        builder.add(f"edge/{edge_name(key)}", role, of, source)
        builder.finish(Types.of(counts, {key: n_read[edge_name(key)] for key in lists}), form)
        build.commit()
