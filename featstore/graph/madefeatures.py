"""Features that a dataset gets of its others: aggregated over neighbours, or a model's outputs."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from featstore.errors import BudgetError, BusyError, CommittedError
from featstore.graph.aggregate import aggregate, default_name
from featstore.graph.feature import FeatureStore
from featstore.graph.opened import Opened
from featstore.graph.passes import Rows
from featstore.graph.snapshot import Snapshot
from featstore.graph.topology import Topology
from featstore.storage.catalog import NODE, Catalog

__all__ = ["MadeFeatures"]


class MadeFeatures(Opened):
    """An opened dataset that makes features of its own."""

    _snapshot: Snapshot

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """The adjacency."""

    def aggregate(
        self,
        feature: str,
        op: str = "mean",
        *,
        hops: int = 1,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        overwrite: bool = False,
        memory: int | str | None = None,
        progress: bool = True,
    ) -> FeatureStore:
        """Make a feature of each node's in-neighbours' rows, out of core, and add it to the dataset.

        Training on it saves a hop of sampling and gathering: PaGraph's preprocessing.

        Parameters
        ----------
        feature : str
            Of any dtype and row shape.
        op : {"mean", "sum", "gcn"}
            Over the list of in-neighbours N(v), in which a repeated edge counts each time. ``"sum"``: Σ x_u. ``"mean"``: Σ x_u
            divided by the length of the list, 0 where it is empty. ``"gcn"``: s_v · Σ s_u x_u over N(v) and v itself, where s_v =
            1/√(d_v + 1); v counts exactly once, whatever edges lead from v to v, and d_v are the in-edges from other nodes.
            Where edges have a direction, s_u and s_v are both made of in-degrees, as in PyG's ``gcn_norm``.
        hops : int
            Aggregate so often, each time what came of it before. Between hops there are float64 fields.
        name : str, optional
            Of the new feature; by default ``x_mean``, and ``x_mean2`` for two hops.
        dtype : torch.dtype or str, optional
            Of the new feature, a floating-point one: by default the feature's own, float64 for integers and bools.
        overwrite : bool
            Replace a feature of that name. Stores of it that were handed out go on reading the old one, whose file is removed
            when the graph is closed.
        memory : int or str, optional
            Most bytes to hold, within the graph's budget; by default nearly all that it has left.
        progress : bool
            Show a progress bar, with the time left, on a terminal and in a notebook.

        Returns
        -------
        FeatureStore
            ``g.features[name]``, ready to be used; other handles have it when they are opened again.

        Raises
        ------
        KeyError, ValueError, TypeError
            No such feature; no such op, a name that is taken or none, no floating-point dtype.
        BudgetError
            Too little memory for the sums of one node; names what does.
        BusyError
            Somebody else is writing the dataset, or has changed it since it was opened; or a loader uses the feature that is to
            be replaced.
        CommittedError
            The feature is in the dataset, but making that durable, or opening it, failed.
        CorruptionError, OSError
            Reading or writing failed. The dataset is as it was, and nothing is left.

        Notes
        -----
        Sums are made in float64, in ascending order of the neighbours, and rounded once, to ``dtype``: bit for bit what SciPy's
        product ``csr_array((ones, indices, indptr)) @ x`` has in float64. int64 beyond 2⁵³ is rounded first.

        Blocks of nodes whose sums fit the memory, 8 bytes a number, take turns; each reads the feature once, in sequence. The
        graph's threads add; how many they are changes no bit.

        All is added in one commit. After a kill or Ctrl-C, the same call goes on where the last one was, but for the last
        seconds. The dataset's writer lock is held meanwhile. Needs disk for the new feature, and between hops for two float64
        fields.

        Examples
        --------
        >>> g.aggregate("x", op="mean", name="x_mean")
        FeatureStore('x_mean', shape=(1000, 16), dtype=torch.float32, backend='io_uring')

        References
        ----------
        Bai et al.: PaGraph. IEEE TPDS 2021, section 5.1 (PP). Kipf, Welling: Semi-Supervised Classification with Graph
        Convolutional Networks. ICLR 2017, equation 2 (gcn).
        """
        self._check_open()
        with self._or_closed():
            aggregate(self, feature, op, hops, name, dtype, overwrite, memory, progress)
        return self.features[default_name(feature, op, hops) if name is None else name]

    @property
    def catalog(self) -> Catalog:
        """The commit that is open, and what this handle has added to it."""
        return self._snapshot.catalog

    def rows_of(self, name: str) -> Rows:
        """Return a feature's rows as passes over them want them."""
        store = self.features[name]
        file = self._snapshot.file_of(self._snapshot.catalog.by_role("feature")[name])
        return Rows(file, store.dtype, math.prod(store.shape[1:]))

    def check_replaceable(self, name: str) -> None:
        """Raise BusyError where a loader uses the cache of a feature."""
        with self.locked():
            store = self._stores.get(name)
            if store is not None and store.cache is not None and store.cache.in_use:
                raise BusyError(f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch")

    def adopt_feature(self, catalog: Catalog, name: str) -> None:
        """Use a feature that was just committed.

        Raises
        ------
        CommittedError, BudgetError, BusyError
            The feature is in the dataset, but cannot be opened; or a loader has begun to use the one that it replaces.
        """
        key = f"{NODE}/{name}"
        with self.locked():
            try:
                self._snapshot.adopt(catalog, key, [part.file for part in catalog.fields[key].parts])
            except OSError as error:
                what = f"the feature {name!r} is in {self.path}, but opening it failed"
                raise CommittedError(what, self.path, error) from error
            except BudgetError as error:
                raise BudgetError(
                    f"the feature {name!r} is in the dataset, but opening it failed: {error.reason}", error.needed
                ) from error
            if name in self._stores:
                self._drop_cache(self._stores[name])
            self._open_feature(name)

    @abstractmethod
    def _open_feature(self, name: str) -> None:
        """Make the store of a feature of the snapshot, in place of an earlier one."""
