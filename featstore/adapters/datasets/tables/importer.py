"""One import of tables: they are read, once or with names numbered through files, and edges are sorted at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from featstore.adapters.datasets.tables.columns import names_of
from featstore.adapters.datasets.tables.pairs import Pairs
from featstore.adapters.datasets.tables.reading import Counts, Reading, names_of_ends
from featstore.adapters.datasets.tables.stepfiles import StepFiles
from featstore.adapters.datasets.tables.tables import Tables
from featstore.creation.build import write_pairs
from featstore.creation.builder import Builder
from featstore.creation.extsort import PairSorter
from featstore.creation.options import CreateOptions
from featstore.idmaps.numbering import MemoryNumbers, Numbers, Room, SpilledNumbers, TableFullError
from featstore.progress import Progress
from featstore.topology.types import EdgeKey, Types, edge_name

__all__ = ["Importer"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


class Importer:
    """Make a dataset of tables; see :func:`featstore.adapters.datasets.tables.import_tables`.

    ``counts`` are those of what was read, when all is done.
    """

    def __init__(self, tables: Tables, missing: str, options: CreateOptions) -> None:
        self._tables, self._missing, self._options, self._memory = tables, missing, options, options.work_bytes
        # Loops are left out while edges are read, with their rows of features.
        self._cleaning = replace(options.cleaning, remove_self_loops=False)
        self._cleaning.refuse_rows({name: each for table in tables.edges.values() for name, each in table.features.items()})
        self.counts = Counts()

    def run(self, builder: Builder) -> tuple[Types, dict[str, Any]]:
        """Write all files; return the types, and the catalog's entries of the maps of ids. An earlier call is gone on with."""
        files, steps = StepFiles(self._tables, builder), builder.steps
        if steps.is_done(files.last_step):
            builder.progress.add(self._tables.n_bytes)
        else:
            try:
                room = Room(self._memory // 2)
                numbers = {name: MemoryNumbers(room) for name in self._tables.types}
                self._read(builder, files, numbers, Counts(), keeps=True)
            except TableFullError:
                steps.restart()
                self._read_through_files(builder, files)
            pa.default_memory_pool().release_unused()  # edges are sorted in all of the memory
        read = steps.more["read"]
        self.counts = Counts.of_json(read["counts"])
        self._register(builder, files, read)
        return self._write_edges(builder, read), read["maps"]

    def _read(self, builder: Builder, files: StepFiles, numbers: Mapping[str, Numbers], counts: Counts, *, keeps: bool) -> None:
        drop_loops = self._options.cleaning.remove_self_loops
        with contextlib.ExitStack() as stack:
            reading = Reading(self._tables, builder, files, numbers, counts, self._missing, drop_loops=drop_loops, keeps=keeps)
            stack.callback(reading.close)
            stack.enter_context(builder.steps.leaving())
            reading.run()

    def _read_through_files(self, builder: Builder, files: StepFiles) -> None:
        """Read the tables with names numbered through files. Before all are read, no later call could go on with that."""
        types = self._tables.types
        with contextlib.ExitStack() as stack:
            share = self._memory // (2 * len(types))
            spilled = {name: stack.enter_context(SpilledNumbers(builder.directory, share)) for name in types}
            for name, hashes in self._all_hashes():
                spilled[name].collect(hashes)
            for each in spilled.values():
                sorter = stack.enter_context(PairSorter(max(1, each.total), share // 2, builder.directory))
                each.number(sorter.add, sorter.sorted)
            self._read(builder, files, spilled, Counts(was_spilled=True), keeps=False)

    def _all_hashes(self) -> Iterator[tuple[str, UInt64s]]:
        """Yield the hashes of all names, in the order in which they are numbered."""
        tables = self._tables
        for name, table in tables.nodes.items():
            for _, block in tables.blocks(table, {table.id: tables.kinds[name]}, {}, None):
                yield name, names_of(block, table.id, tables.kinds[name]).hashes()
        for key, edge_table in tables.edges.items():
            for _, block in tables.blocks(edge_table, tables.ends(key), {}, None):
                for name, _, hashes in names_of_ends(tables, key, block):
                    yield name, hashes

    def _register(self, builder: Builder, files: StepFiles, read: Mapping[str, Any]) -> None:
        """Make all files that were read the builder's, with the fields that they hold."""
        tables, n_nodes = self._tables, self.counts.nodes
        for name in tables.types:
            builder.files.update((each.name, each) for each in files.maps(name))
        for like, names in files.shared.items():
            shapes = {name: (n_nodes[name], *like[2]) for name in names}
            builder.register_feature(like[0], files.made("feature", like), shapes)
        for name, table in tables.nodes.items():
            for of, (role, each) in tables.fields(table).items():
                if role == "data":
                    shape = (n_nodes[name], *each.shape)
                    builder.register(f"node/{name}/{of}", "data", files.made("data", name, of), shape)
            for place, of in enumerate(read["splits"].get(name, ())):
                file = files.made("split", name, place)
                builder.register(f"node/{name}/{of}", "data", file, (file.n_rows,))
        for (key, edge_table), n_edges in zip(tables.edges.items(), read["n_kept"], strict=True):
            for of, (_, each) in tables.fields(edge_table).items():
                shape = (n_edges, *each.shape)
                builder.register(f"edge/{edge_name(key)}/{of}", "feature", files.made("edge", key, of), shape)

    def _write_edges(self, builder: Builder, read: Mapping[str, Any]) -> Types:
        steps, counts, cleaning, form = builder.steps, self.counts, self._cleaning, self._options.form
        n_kept = dict(zip(self._tables.edges, read["n_kept"], strict=True))
        n_all = sum(n_kept.values())
        laid_out = Types.of(counts.nodes, n_kept)
        kinds = list(laid_out.edges.values())

        def shifted(n: int) -> Iterator[tuple[Int64s, Int64s]]:
            with contextlib.closing(Pairs(builder.directory, read["pairs"])) as pairs:
                for number, src, dst in pairs.read(n):
                    src += kinds[number].src.first
                    dst += kinds[number].first_list
                    yield src, dst

        begins = np.array([*(each.first_list for each in kinds), laid_out.num_lists])
        stored = np.zeros(len(kinds), np.int64)
        steps.more.setdefault("stored by type", stored.tolist())

        def count(lists: Int64s) -> None:
            np.add(stored, np.diff(np.searchsorted(lists, begins)), out=stored)
            steps.more["stored by type"] = stored.tolist()

        with Progress("sort edges", cleaning.work_bytes(n_all, 24), self._options.progress) as bar:
            before, builder.progress = builder.progress, bar
            try:
                n_lists = laid_out.num_lists
                write_pairs(builder, shifted, laid_out.num_nodes, n_all, form, cleaning, num_lists=n_lists, stored=count)
            finally:
                builder.progress = before
        if Pairs.name in steps.kept:
            steps.drop([Pairs.name])
        n_stored: dict[EdgeKey, int] = dict(zip(n_kept, steps.more["stored by type"], strict=True))
        counts.edges = n_stored
        counts.reverses = n_all if cleaning.to_undirected else 0
        counts.duplicates = n_all + counts.reverses - sum(n_stored.values())
        return Types.of(counts.nodes, n_stored)
