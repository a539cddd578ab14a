"""Stores of an open dataset as features of GraphBolt's pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from dgl import graphbolt as gb

from featstore.config import refuse_path
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore

__all__ = ["StoreFeature", "features"]

FeatureKey = tuple[str, str | None, str]  # GraphBolt's: domain, type, name


@dataclass
class _Rows:
    """Rows that are being read, as GraphBolt waits for them."""

    future: Future[torch.Tensor]
    device: torch.device

    def wait(self) -> torch.Tensor:
        return self.future.result().to(self.device)


class StoreFeature(gb.Feature):  # type: ignore[misc]  # of a package without types
    """A store of an open dataset as a feature of GraphBolt's, which reads a batch's rows from disk.

    Rows go through the store: many reads in flight, checksums, the cache of ``g.cache``, and memory within the graph's budget.
    They are on the device of the ids that ask for them.

    Parameters
    ----------
    store : FeatureStore
        ``g.features["x"]``, ``g["paper"].features["x"]``, ``g.edge_features["w"]``.
    metadata : mapping of str to object, optional
        What :meth:`metadata` returns, as of GraphBolt's own features.

    Attributes
    ----------
    store : FeatureStore
        The store that is read; after :meth:`update` the one with the new rows.

    Raises
    ------
    TypeError
        ``store`` is not a store.

    Notes
    -----
    It pickles as its store does, as path and options. GraphBolt's own caches are made over it, as over any feature.

    Examples
    --------
    >>> store = gb.BasicFeatureStore({("node", None, "x"): StoreFeature(g.features["x"])})
    >>> datapipe = datapipe.fetch_feature(store, node_feature_keys=["x"])
    """

    def __init__(self, store: FeatureStore, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if not isinstance(store, FeatureStore):
            raise TypeError(f"a feature is made of a store, such as g.features['x'], not of a {type(store).__name__}")
        self.store = store
        self._metadata = dict(metadata or {})

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Read rows, on the device of their ids, or all rows; see :meth:`featstore.FeatureStore.take`."""
        return self.store[:] if ids is None else self.store.take(ids.cpu()).to(ids.device)

    def read_async(self, ids: torch.Tensor) -> Iterator[_Rows]:
        """Start reading rows; yield one future, whose ``wait()`` returns them on the device of their ids.

        Ids are checked, and an IndexError is raised, with the first ``next()``. What fails later is raised by ``wait()``.
        """
        yield _Rows(self.store.take_async(ids.cpu()), ids.device)

    def read_async_num_stages(self, ids_device: torch.device) -> int:
        """Get how often :meth:`read_async` yields, which is once for ids on any device."""
        return 1

    def size(self) -> torch.Size:
        """Get the shape of a row."""
        return self.store.shape[1:]

    def count(self) -> int:
        """Get the number of rows."""
        return len(self.store)

    def metadata(self) -> dict[str, Any]:
        """Get what was given as ``metadata``, else an empty dict."""
        return self._metadata

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Change rows, or all rows, in the dataset, in one commit; this feature reads the new ones from then on.

        Each call is a commit, so change many rows at once. A cache of the feature is dropped. Errors are those of
        :meth:`featstore.FeatureStore.update`, with a NotImplementedError for rows that no file of the dataset has.
        """
        rows = slice(None) if ids is None else ids.cpu()
        self.store = self.store.update(rows, value.cpu(), progress=False)

    def is_pinned(self) -> bool:
        """Tell that rows are not in pinned memory."""
        return False

    def pin_memory_(self) -> StoreFeature:
        """Refuse by a NotImplementedError: all rows would be in memory."""
        raise self._stay("pin_memory_()")

    def to(self, device: torch.device | str) -> StoreFeature:
        """Return the feature itself for ``"cpu"``; else refuse by a NotImplementedError, as :meth:`pin_memory_`."""
        if str(device) != "cpu":
            raise self._stay(f"to({str(device)!r})")
        return self

    def _stay(self, call: str) -> NotImplementedError:
        return NotImplementedError(
            f"{call}: rows of {self.store.name!r} stay on disk, and a batch's are read to the device of its ids; "
            "dgl.graphbolt.gpu_cached_feature(feature, n_bytes) keeps some on a GPU, and g.cache(name, budget=) in memory"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store!r})"


def features(g: OutOfCoreGraph) -> dict[FeatureKey, StoreFeature]:
    """Make a feature of each store of a dataset, by the keys of GraphBolt's feature stores.

    Parameters
    ----------
    g : OutOfCoreGraph
        It stays open as long as features are read.

    Returns
    -------
    dict of tuple (domain, type, name) to StoreFeature
        For ``dgl.graphbolt.BasicFeatureStore``. The domain is ``"node"`` or ``"edge"``. The type is None in a graph without
        types, else ``"paper"``, or for edges ``"author:writes:paper"``.

    Raises
    ------
    TypeError, ClosedError
        ``g`` is not a dataset that is open.
    ValueError
        Two types of edges have one name in GraphBolt, as there are colons in their names.

    Notes
    -----
    Row ``i`` of edges is that of the edge that was given as the ``i``-th of its type: GraphBolt's original edge id, where its
    graph was made of the same edges. Nothing is read. Labels are in memory, and so is ``gb.TorchBasedFeature(g.node_data["y"])``.

    Examples
    --------
    >>> datapipe = datapipe.fetch_feature(gb.BasicFeatureStore(features(g)), node_feature_keys=["x"])
    """
    refuse_path(g)
    if not isinstance(g, OutOfCoreGraph):
        raise TypeError(f"features are made of an OutOfCoreGraph, not of a {type(g).__name__}")
    g.check_open()
    if g.types.is_one:
        of_types: list[tuple[str, str | None, Mapping[str, FeatureStore]]]
        of_types = [("node", None, g.features), ("edge", None, g.edge_features)]
    else:
        of_types = [("node", kind, g[kind].features) for kind in g.node_types]
        of_types += [("edge", ":".join(kind), g[kind].features) for kind in g.edge_types]
    found: dict[FeatureKey, StoreFeature] = {}
    for domain, kind, stores in of_types:
        for name, store in stores.items():
            if (domain, kind, name) in found:
                raise ValueError(f"two types of edges are {kind!r} in GraphBolt: name relations and nodes without colons")
            found[domain, kind, name] = StoreFeature(store)
    return found
