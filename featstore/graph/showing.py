"""The tables by which graphs and stores show themselves; nothing is read for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from featstore.cache.table import FeatureCache
from featstore.config import format_size
from featstore.display import Display, Table, described, percent
from featstore.topology.types import Types

__all__ = ["cache_text", "show_graph", "show_store", "show_type"]

FIELDS = ("", "dtype", "shape", "bytes", "cache")


def cache_text(cache: FeatureCache | None) -> str:
    """Describe a host cache in a line: its policy, rows, bytes and share of hits; "none" without one."""
    if cache is None:
        return "none"
    counts = cache.stats()
    asked = counts["hits"] + counts["misses"]
    policy = "planned" if cache.policy is None else cache.policy.name
    hits = f", {percent(counts['hits'], asked)} hits" if asked else ""
    return f"{policy}, {counts['cached']:,} of {cache.n:,} rows, {format_size(cache.nbytes)}{hits}"


def show_store(store: Any, title: str, is_closed: bool) -> Display:
    """Show a :class:`~featstore.FeatureStore`."""
    if is_closed:
        return Display(title)
    rows = [
        ("bytes", f"{format_size(store.nbytes)}, {format_size(store.row_bytes)} a row"),
        ("reads", store.source.mode),
        ("cache", cache_text(store.cache)),
    ]
    return Display(title, [Table(("", ""), rows)])


def _store_row(name: str, store: Any, cache: FeatureCache | None) -> tuple[str, ...]:
    cached = "" if cache is None else cache_text(cache)
    return name, str(store.dtype).removeprefix("torch."), str(list(store.shape)), format_size(store.nbytes), cached


def _data_rows(fields: Any) -> Iterator[tuple[str, ...]]:
    for name in fields:
        dtype, shape, n_bytes = fields.described(name)
        yield f"node_data[{name!r}]", dtype, str(list(shape)), format_size(n_bytes), ""


def _type_tables(types: Types) -> list[Table]:
    """Show how many nodes and edges of each type there are, if nodes have types."""
    if types.is_one:
        return []
    nodes = [(f"  {name}", described(each.n)) for name, each in types.nodes.items()]
    edges = [(f"  {', '.join(key)}", described(each.n_edges)) for key, each in types.edges.items()]
    return [Table(("nodes", ""), nodes), Table(("edges", ""), edges)]


def show_graph(g: Any, title: str) -> Display:
    """Show an open graph or pack: its fields, caches and memory; of a closed one the title."""
    if g.closed:
        return Display(title)
    columns, edge_features = g.columns, getattr(g, "edge_features", {})
    rows = chain(
        (_store_row(f"features[{name!r}]", store, columns[g.column_of(name)].cache) for name, store in g.features.items()),
        _data_rows(g.node_data),
        (_store_row(f"edge_features[{name!r}]", store, store.cache) for name, store in edge_features.items()),
    )
    fields = Table.of_first(FIELDS, rows, len(g.features) + len(g.node_data) + len(edge_features))
    memory = g.memory_report()
    used, total = format_size(memory.used), format_size(memory.total)
    notes = [f"memory: {used} of {total} held, {format_size(memory.on_loan)} of them on loan"]
    lists = getattr(g, "neighbor_cache", None)
    if lists is not None:
        notes.append(f"neighbour lists in memory: {lists!r}")
    return Display(title, [*_type_tables(g.types), fields], notes)


def show_type(title: str, features: Mapping[str, Any], node_data: Any = ()) -> Display:
    """Show the fields of a type of nodes or of edges."""
    of_features = (_store_row(f"features[{name!r}]", store, store.cache) for name, store in features.items())
    rows = chain(of_features, _data_rows(node_data))
    return Display(title, [Table.of_first(FIELDS, rows, len(features) + len(node_data))])
