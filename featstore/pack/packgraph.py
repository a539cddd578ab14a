"""A pack in place of its dataset: the parts of a graph that a loader needs if every row of its plans is in the pack."""

from __future__ import annotations

import errno
import math
import os
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch

from featstore.budget import Budget
from featstore.config import Options
from featstore.creation.source import torch_dtype
from featstore.errors import FormatError
from featstore.gather.sources import AbsentRows
from featstore.graph.base import StoredGraph
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.fields import Fields
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.pack.layout import layout_records, rows_of_record
from featstore.pack.nodedata import carried, field_key, load_carried
from featstore.pack.offline import Pack
from featstore.storage.format import DTYPES
from featstore.topology.noderows import NodeRows, RowsOfTypes
from featstore.topology.types import Types, qualified

__all__ = ["Graph", "PackedGraph"]

Graph: TypeAlias = "OutOfCoreGraph | PackedGraph"


class PackedGraph(StoredGraph):
    """A pack opened by its own record, so that ``Loader(g, strategy="packed")`` runs on a machine without the dataset.

    Parameters
    ----------
    pack : Pack or path-like
        A pack with at least one layout.
    memory, backend, verify, threads
        As for :func:`featstore.open`.

    Attributes
    ----------
    num_nodes : int
    types : Types
    node_types, edge_types : list
        As of :class:`featstore.OutOfCoreGraph`.
    features : mapping of str to FeatureStore
        The features of the pack's layouts. Reading a row by its number raises FileNotFoundError: the pack has batches, not rows.
    node_data : mapping of str to Tensor
        The labels of the loaders that made the layouts. Each is read whole, checked and counted at first use.

    Raises
    ------
    FileNotFoundError, CorruptionError, FormatError
        There is no pack, it is damaged, or it has no layout.
    """

    def __init__(
        self,
        pack: Pack | str | os.PathLike[str],
        memory: int | str | None = None,
        backend: str = "auto",
        verify: str | None = None,
        threads: int | None = None,
    ) -> None:
        opened = pack if isinstance(pack, Pack) else Pack(pack)
        try:
            path, self.num_nodes, self._types = opened.path, opened.num_nodes, opened.types
            self._identity = dict(opened.record["made_of"])
            fields: dict[str, dict[str, Any]] = {}
            column_rows: dict[str, RowsOfTypes] = {}
            for record in layout_records(opened):
                rows = rows_of_record(opened, record, path)
                for feature in record["features"]:
                    fields[feature["name"]] = feature
                    if rows is not None:
                        column_rows[feature["name"]] = self._joined(column_rows.get(feature["name"]), rows)
            self._carried = carried(opened)
        finally:
            if opened is not pack:
                opened.close()
        if not fields:
            raise FormatError(f"{path} holds samples, but no layout: make one where the dataset is", path)
        for name, record in self._carried.items():
            self._identity[field_key(self.types, name)] = str(record["made_of"])
        super().__init__(path, Options.resolve(memory, backend, verify, threads))
        self.column_rows = column_rows
        for name, field in fields.items():
            shape, dtype = field["shape"], torch_dtype(field["dtype"])
            absent = partial(AbsentRows, path, row_bytes=field["row_bytes"], fingerprint=field["made_of"])
            self.open_store(self.columns, name, absent(shape[0]), shape, dtype)
            for own, n in self._fields_of(name):
                self._identity[field_key(self.types, own)] = field["made_of"]
                if not self.types.is_one:
                    self.open_store(self.type_stores, own, absent(n), (n, *shape[1:]), dtype)
        self.list_features()
        described = {name: (record["dtype"], record["shape"]) for name, record in self._carried.items()}
        self.node_data = Fields("node data", list(self._carried), self.load_data, described.__getitem__)

    def _joined(self, before: RowsOfTypes | None, rows: RowsOfTypes) -> RowsOfTypes:
        """Join the rows of a column that several layouts have, type after type; of two of a type, the later ones."""
        parts = {kind.name: (kind, first) for kind, first in (*(() if before is None else before.parts), *rows.parts)}
        return RowsOfTypes(rows.n, tuple(parts[name] for name in self.types.nodes if name in parts))

    def _fields_of(self, column: str) -> list[tuple[str, int]]:
        """List the features that a column holds, by their names among those of all types, and the rows of each."""
        if self.types.is_one:
            return [(column, self.num_nodes)]
        name = column.rpartition("/")[2]
        return [(qualified(kind.name, name), kind.n) for kind in self.column_rows[column].kinds]

    @property
    def types(self) -> Types:
        """See :attr:`StoredGraph.types`."""
        return self._types

    def _data_bytes(self, name: str) -> int:
        record = self._carried[name]
        n_bytes: int = DTYPES[record["dtype"]][1] * math.prod(record["shape"])
        return n_bytes

    def _read_data(self, name: str) -> torch.Tensor:
        with self.budget.reserve("node data", self._data_bytes(name)), Pack(self.path) as pack:  # for the read data
            return load_carried(pack, self._carried[name])

    def _close_files(self) -> None:
        """Nothing: layouts are closed by the loaders that opened them."""

    def fingerprint(self) -> dict[str, str]:
        """Get the fingerprint of the graph that the pack was made of; see :meth:`featstore.OutOfCoreGraph.fingerprint`."""
        return self._identity

    def policy_inputs(
        self,
        row_bytes: int,
        counts: Given = None,
        parts: Given = None,
        seed: int = 0,
        budget: Budget | None = None,
        rows: NodeRows | None = None,
    ) -> PolicyInputs:
        """See :meth:`featstore.OutOfCoreGraph.policy_inputs`; the pack has no degrees."""
        budget, absent = self.budget if budget is None else budget, self.short_degrees
        rows = NodeRows(self.num_nodes) if rows is None else rows
        return PolicyInputs(rows, row_bytes, budget, absent, absent, counts, parts, seed)

    def short_degrees(self) -> NoReturn:
        """Raise FileNotFoundError: the pack has no degrees. See :meth:`featstore.OutOfCoreGraph.short_degrees`."""
        raise FileNotFoundError(errno.ENOENT, "degrees are not in the pack, and the dataset is not open", self.path)

    def topology_bytes(self) -> int:
        """Return 0: the pack has no adjacency. See :meth:`featstore.OutOfCoreGraph.topology_bytes`."""
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a PackedGraph has no {name!r}: the dataset is not open")
