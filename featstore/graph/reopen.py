"""Pickles of feature stores: a path and options, with which the unpickling process opens the dataset once."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from featstore.config import Options
from featstore.errors import ClosedError
from featstore.graph.base import StoredGraph
from featstore.graph.feature import FeatureStore
from featstore.graph.snapshot import fingerprint_of
from featstore.storage.catalog import current_catalog

__all__ = ["reduced"]

_reopened: weakref.WeakValueDictionary[tuple[int, str, Options], Any] = weakref.WeakValueDictionary()
_reopened_lock = threading.Lock()


def reduced(graph: StoredGraph, name: str, of: str = "features") -> tuple[Callable[..., FeatureStore], tuple[Any, ...]]:
    """Reduce a feature's store for pickling, as ``__reduce__`` does."""
    if graph.closed:
        raise ClosedError(f"{graph.path} is closed")
    of_part = graph.place_of_view() if graph.is_view else ()
    return _reopen_store, (type(graph), graph.path, graph.options, name, of, *of_part)


def _is_current(graph: StoredGraph) -> bool:
    """Check whether the dataset at a graph's path is still the one that the graph has open."""
    try:
        return fingerprint_of(current_catalog(graph.path)) == graph.fingerprint()
    except (OSError, ValueError):
        return False  # opening the dataset again raises the error, or waits for the process that replaces it


def _reopen_store(
    open_graph: Callable[[str, Options], Any], path: str, options: Options, name: str, of: str, *of_part: Any
) -> FeatureStore:
    """Unpickle a store; all stores of one dataset in a process share one graph, and so its memory."""
    key = os.getpid(), path, options
    with _reopened_lock:
        graph = _reopened.get(key)
        if graph is None or graph.closed or not _is_current(graph):
            graph = _reopened[key] = open_graph(path, options)
        if of_part:
            graph = graph.part_again(*of_part)
        stores: Mapping[str, FeatureStore] = getattr(graph, of)
        return stores[name]
