"""Export of a self-reliant part: a dataset of its own, which a machine without the whole one can train on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.config import check_flag, format_size, parse_memory, user_path
from featstore.creation.build import LEAST_MEMORY, Builder, TopologyWriter
from featstore.creation.source import Source
from featstore.creation.topologyfiles import Form, lists_in_order
from featstore.errors import BudgetError, CorruptionError
from featstore.gather.patchedrows import PatchedRows
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.partadjacency import HOPS_ROLE
from featstore.graph.savedparts import PARTS_KEY, SELF_RELIANT_ROLES, KeptParts, file_of_parts
from featstore.progress import Progress
from featstore.storage.builddir import BuildDirectory
from featstore.storage.catalog import EDGE, NODE, PART, FieldRecord
from featstore.storage.layout import choose_layout
from featstore.storage.rowfile import RowFile
from featstore.topology.part import OUTSIDE, Part, lists_between, lists_bytes, reach
from featstore.topology.types import Types

__all__ = ["export"]

HOLDER: Final = "export"  # in the budget's report
_PIECE_NODES: Final = 1 << 16
_MOST_MEMORY: Final = 1 << 30

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]


def export(
    g: OutOfCoreGraph,
    path: str | os.PathLike[str],
    part: int,
    name: str | None = None,
    *,
    topology: str | None = None,
    chunk_bytes: int | str | None = None,
    overwrite: bool = False,
    memory: int | str | None = None,
    progress: bool = True,
) -> Part:
    """Write one of a dataset's self-reliant parts as a dataset of its own, for another machine.

    Parameters
    ----------
    g : OutOfCoreGraph
    path : path-like
        Directory of the new dataset. Its parent must exist.
    part : int
        Number of the part, such as the rank of the process that will train on it.
    name : str, optional
        Name of the kept parts; by default the self-reliant ones that were kept last. See :func:`featstore.partition`.
    topology : {"csc", "chunked"}, optional
        Form of the new adjacency; by default that of ``g``.
    chunk_bytes : int or str, optional
        Size of a chunk, for ``"chunked"``.
    overwrite : bool
        Replace a dataset at ``path`` in one step, when the new one is complete.
    memory : int or str, optional
        Most bytes to hold, within the graph's budget; by default half of what is available, at most 1 GiB.
    progress : bool
        Show a progress bar, on a terminal and in a notebook.

    Returns
    -------
    Part
        The part: its nodes by their ids, and how many nodes of the graph it is without.

    Raises
    ------
    IndexError, ValueError, StaleError, ClosedError
        There is no such part; see :meth:`OutOfCoreGraph.part`. ``path`` is that of ``g``.
    NotImplementedError
        The graph has several types, or edge features; ``g`` is a part already.
    FileExistsError, FileNotFoundError, NotADirectoryError, BusyError
        ``path`` exists; its parent does not; another process is making or changing a dataset there.
    BudgetError
        ``memory`` is too little; the error names the least that works.
    CommittedError, CorruptionError, OSError
        The dataset is in place, but making its name durable failed; reading or writing failed.

    Notes
    -----
    The new dataset keeps the ids of the graph, and its ``num_nodes``: seeds, batches and node data mean the same nodes, and draws
    are the same bit for bit. What goes by degrees or by shares of the nodes, such as ``History(nodes=0.2)``, sees the part's.
    Another node is an IndexError that names the part. It has the rows of the part's nodes alone, the lists of those whose list
    training needs, all node data (which is indexed by ids), and the kept parts, so that :class:`~featstore.PartBatches` can be
    made of it. Numbers of edges are not in it (``edges=True``), nor saved caches.

    Each list of the part is read twice, each of its rows once, in the order of the files. The call holds a byte a node of the
    graph and 16 to 26 MiB at least. A killed export leaves a directory ``path.tmp-…``, which the next one removes.

    References
    ----------
    PaGraph, TPDS 2021, sections 3.2 and 4.

    Examples
    --------
    >>> featstore.partition(g, 4, "ldg", train_idx, hops=2)             # doctest: +SKIP
    >>> featstore.export(g, "part.2", part=2)                           # doctest: +SKIP
    """
    overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
    if not isinstance(g, OutOfCoreGraph):
        raise TypeError(f"parts of an open dataset are exported, not of a {type(g).__name__}")
    target = os.path.abspath(user_path(path))
    if os.path.realpath(target) == os.path.realpath(g.path):
        raise ValueError(f"path: {target} is the dataset that the part is of")
    number, kept = g.find_part(part, name)
    catalog = g.catalog
    if edge_features := sorted(catalog.by_role("feature", EDGE)):
        raise NotImplementedError(
            f"export does not take edge features, and the dataset has {', '.join(map(repr, edge_features))}"
        )
    chosen = catalog.topology if topology is None else topology
    if chunk_bytes is None and chosen == catalog.topology == "chunked":
        chunk_bytes = catalog.chunk_bytes
    form = Form.of(chosen, chunk_bytes, (), target)
    least = g.num_nodes + lists_bytes(g.topology) + LEAST_MEMORY + form.chunk_bytes
    n_bytes = min(_MOST_MEMORY, max(least, g.budget.available // 2)) if memory is None else parse_memory(memory)
    if n_bytes < least:
        text = f"exporting a part of {g.num_nodes:,} nodes takes more memory than {format_size(n_bytes)}"
        raise BudgetError(f"{text}: {format_size(least)}", least)
    n_edges = 0

    def seen(n: int) -> None:
        nonlocal n_edges
        n_edges += n
        bar.add(n)

    with g.or_closed(), g.budget.reserve(HOLDER, n_bytes - g.num_nodes - lists_bytes(g.topology)):
        with Progress("part", g.num_edges, progress, unit=" edges") as bar:
            hop_of, _ = reach(g.topology, g.train_nodes_of(number, kept), int(kept.hops or 0), g.budget, seen)
            bar.reach(g.num_edges)
        found = Part(kept.name, number, int(kept.hops or 0), hop_of)
        with BuildDirectory(target, overwrite=overwrite) as build:
            _write(g, build.path, found, kept, n_edges, form, n_bytes - least + LEAST_MEMORY, progress)
            build.commit()
    return found


def _write(
    g: OutOfCoreGraph, directory: str, part: Part, kept: KeptParts, n_edges: int, form: Form, memory: int, progress: bool
) -> None:
    """Write all files of the new dataset, and its catalog."""
    catalog, n = g.catalog, g.num_nodes
    fields: list[tuple[str, str, Source]] = []
    for role, records in (("feature", catalog.by_role("feature", NODE)), ("data", catalog.by_role("data", NODE))):
        for name, record in records.items():
            file = g.snapshot.rows_of(record)
            fields.append((role, name, _PartRows(record, file, part) if role == "feature" else _AllRows(record, file)))
    total = sum(each.n_rows * each.row_bytes for _, _, each in fields) + n_edges * g.topology.id_bytes
    with Progress("export", total, progress) as bar:
        builder = Builder(directory, memory, bar)
        _write_lists(g, builder, part, n_edges, form)
        for role, name, source in fields:
            builder.add(NODE, role, name, source)
        entries = {
            f"{PARTS_KEY}{kept.name}": _write_kept(g, builder, kept),
            PART: {
                "name": part.name,
                "number": part.number,
                "hops": part.hops,
                "nodes": part.n_nodes,
                "files": {HOPS_ROLE: _write_hops(builder, part.hop_of)},
            },
        }
        # It has the adjacency's identity, as the draws are the same: a sampler, and the state of training, fit either dataset.
        builder.finish(Types.one(n, n_edges), form, {"adjacency": catalog.adjacency()}, entries)


def _write_lists(g: OutOfCoreGraph, builder: Builder, part: Part, n_edges: int, form: Form) -> None:
    """Write the adjacency: the lists that the part has, as they are, and empty ones for all other nodes."""
    topology, hop_of = g.topology, part.hop_of

    def begins() -> Iterator[Int64s]:
        before = 0
        for first in range(0, len(hop_of), _PIECE_NODES):
            degrees = topology.degrees(first, min(first + _PIECE_NODES, len(hop_of)))
            degrees[~part.has_list(first, first + len(degrees))] = 0
            ends = before + np.cumsum(degrees)
            yield ends - degrees
            before = int(ends[-1])

    ids = (each for _, _, _, each in lists_between(topology, hop_of, 0, part.hops))
    with TopologyWriter(builder, len(hop_of), n_edges, form) as writer:
        for some, block in lists_in_order(begins(), ids):
            writer.write(some, block, None)
        if writer.finish() != n_edges:
            raise CorruptionError(f"the lists of {part} were read twice, and differ", topology.path)


def _write_hops(builder: Builder, hop_of: Uint8s) -> str:
    """Write how many hops each node is from the training nodes; return the name of the file."""
    with builder.writer("part", "hops", choose_layout(1), HOPS_ROLE, "uint8") as writer:
        for first in range(0, len(hop_of), builder.block_bytes):
            writer.write(hop_of[first : first + builder.block_bytes].reshape(-1, 1))
        record = writer.commit()
    builder.files[record.name] = record
    return record.name


def _write_kept(g: OutOfCoreGraph, builder: Builder, kept: KeptParts) -> dict[str, Any]:
    """Write the training nodes of all parts, as they are kept; return the catalog's entry."""
    files = {}
    for role in SELF_RELIANT_ROLES:
        if role == "train_nodes" and not kept.n_train:
            continue
        file = file_of_parts(g.snapshot, kept, role)
        dtype = f"int{8 * file.row_bytes}"
        with builder.writer(role, kept.name, choose_layout(file.row_bytes), role, dtype) as writer:
            for first, n in _runs(file.n_rows, file.row_bytes, builder.block_bytes):
                writer.write(file.read(first, n))
            record = writer.commit()
        builder.files[record.name] = record
        files[role] = record.name
    return {**g.catalog.extra[f"{PARTS_KEY}{kept.name}"], "generation": 1, "files": files}


def _runs(n: int, row_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide ``n`` rows into runs: the first row, and how many."""
    step = max(1, most_bytes // row_bytes)
    for first in range(0, n, step):
        yield first, min(step, n - first)


class _AllRows(Source):
    """All rows of a field."""

    def __init__(self, record: FieldRecord, file: RowFile | PatchedRows) -> None:
        super().__init__(record.name, record.dtype, record.shape)
        self._file = file

    def blocks(self, max_bytes: int) -> Iterator[Uint8s]:
        for first, n in _runs(self.n_rows, self.row_bytes, max_bytes):
            yield self._file.read(first, n)


class _PartRows(Source):
    """The rows of a part's nodes."""

    def __init__(self, record: FieldRecord, file: RowFile | PatchedRows, part: Part) -> None:
        super().__init__(record.name, record.dtype, (part.n_nodes, *record.shape[1:]))
        self._file, self._hop_of = file, part.hop_of

    def blocks(self, max_bytes: int) -> Iterator[Uint8s]:
        step = self._step(max_bytes)
        for first in range(0, len(self._hop_of), _PIECE_NODES):
            nodes = np.flatnonzero(self._hop_of[first : first + _PIECE_NODES] != OUTSIDE) + first
            for begin in range(0, len(nodes), step):
                rows = np.empty((len(nodes[begin : begin + step]), self.row_bytes), np.uint8)
                self._file.gather(nodes[begin : begin + step], rows)
                yield rows
