"""Tables of nodes and edges (CSV, Parquet, Arrow) as a dataset: ids that are text or integers with gaps, in bounded memory.

=========================  ======================================================================================
:func:`import_tables`      make a dataset of tables; it keeps the ids of the tables, see ``OutOfCoreGraph.ids``
:class:`NodeTable`         a table with a row for each node: its id, features, labels, split
:class:`EdgeTable`         a table with a row for each edge: the ids of its ends, weights, times
:class:`Column`            columns of a field whose dtype, or whose value of empty cells, is given
=========================  ======================================================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from featstore.errors import MissingExtraError

try:
    import pyarrow.csv
    import pyarrow.parquet  # noqa: F401
except ImportError as error:
    raise MissingExtraError(f"featstore.adapters.datasets.tables needs pyarrow ({error}): pip install pyarrow") from None

from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.tables.columns import Column
from featstore.adapters.datasets.tables.importer import Importer
from featstore.adapters.datasets.tables.reading import Counts
from featstore.adapters.datasets.tables.schema import EdgeTable, NodeTable
from featstore.adapters.datasets.tables.tables import Tables
from featstore.adapters.datasets.writing import catalog_of_new
from featstore.creation.builder import Builder, inputs_of
from featstore.creation.options import CreateOptions
from featstore.creation.steps import BuildSteps, Inputs
from featstore.creation.typed import check_types
from featstore.progress import Progress
from featstore.storage.builddir import BuildDirectory
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, edge_name

__all__ = ["Column", "EdgeTable", "NodeTable", "import_tables"]


def import_tables(
    path: str | os.PathLike[str],
    nodes: NodeTable | Mapping[str, NodeTable] | None = None,
    edges: EdgeTable | Mapping[EdgeKey, EdgeTable] | None = None,
    *,
    missing: str = "error",
    coalesce: bool = False,
    remove_self_loops: bool = False,
    to_undirected: bool = False,
    topology: str = "csc",
    chunk_bytes: int | str | None = None,
    stripes: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    progress: bool = True,
    memory: int | str | None = None,
) -> Report:
    """Make a dataset of tables whose ids are text, or integers with gaps.

    Parameters
    ----------
    path : path-like
        The dataset's directory. Its parent must exist.
    nodes : NodeTable, or mapping of str to NodeTable, optional
        The nodes' table, or those of several types.
    edges : EdgeTable, or mapping of (str, str, str) to EdgeTable, optional
        The edges' table, or those of several types, by the type of the source, the relation and the type of the destination. A
        type of nodes without a table has the nodes that edges name.
    missing : {"error", "drop"}
        What to do with an edge whose end is not in the node table of its type: raise UnknownNameError, or leave it out.
    coalesce, to_undirected : bool
        Remove duplicate edges; add the reverse of each edge, too, for a graph of one type. Not with features of edges.
    remove_self_loops : bool
        Remove edges from a node to itself, with their rows of features.
    topology, chunk_bytes, stripes, overwrite, progress, memory
        See :meth:`featstore.OutOfCoreGraph.create`.

    Returns
    -------
    Report
        Counts of what was read, dropped and made.

    Raises
    ------
    KeyError
        A table has no such column.
    UnknownNameError
        An edge's end is not in the node table of its type; the error has the file, the row and the id.
    ValueError, TypeError
        An argument is wrong. A cell has no value or one that does not fit, or an id occurs twice in a node table: the error has
        the file and the row, which of CSV counts the header as row 1.
    FormatError, CorruptionError, FileNotFoundError
        A file is no such table, is cut short, or does not exist.
    FileExistsError, BusyError, BudgetError, CommittedError, OSError
        See :meth:`featstore.OutOfCoreGraph.create`.

    Notes
    -----
    **Ids** are given in order of first appearance: the rows of a type's node table in their order, so that row ``i`` is node
    ``i``; of a type without one, the ends of edges, row after row, an edge's source before its destination, tables in the order
    of ``edges``. They depend neither on memory nor on the size of blocks. The dataset keeps the names:
    ``g.ids("paper").encode(names)``.

    **Cost.** Each file is read once. A name takes 24 to 48 bytes of memory while it is numbered; where names would take more than
    half of ``memory``, ids are numbered through files, and the columns of ids are read twice more. Edges take 8 bytes, or 16, of
    temporary files beside the dataset, and then what :meth:`featstore.OutOfCoreGraph.from_edge_index` needs. pyarrow parses, in
    threads of its own, in memory of its own beside ``memory``: some blocks, and of Arrow IPC a whole record batch, so write such
    files with batches of some MiB.

    **Interrupted.** After a kill, Ctrl-C, a lack of memory or a full drive, the same call goes on in the middle of a table, as
    long as all files have the same sizes and times; ``memory`` may differ. The dataset and the counts are the same. Another call
    for this ``path`` removes what was left.

    Examples
    --------
    >>> report = import_tables(
    ...     "graph",
    ...     nodes=NodeTable("papers.parquet", id="doi", features={"x": "embedding"}, data={"y": "label"}, split="split"),
    ...     edges=EdgeTable("cites.csv.gz", src="citing", dst="cited", features={"year": "year"}),
    ... )
    """
    started = time.perf_counter()
    options = CreateOptions.of(
        path,
        coalesce=coalesce,
        remove_self_loops=remove_self_loops,
        to_undirected=to_undirected,
        topology=topology,
        chunk_bytes=chunk_bytes,
        stripes=stripes,
        overwrite=overwrite,
        progress=progress,
        memory=memory,
    )
    of_nodes, of_edges = _given(nodes, edges)
    if missing not in ("error", "drop"):
        raise ValueError(f"missing must be 'error' or 'drop', not {missing!r}")
    is_one = list(of_edges) == [ONE_EDGE] and set(of_nodes) <= {ONE_NODE}
    if options.cleaning.to_undirected and not is_one:
        raise ValueError("to_undirected=True is for a graph of one type: give the reverse of a type of edges as another type")
    tables = Tables(of_nodes, of_edges, options.work_bytes)
    importer = Importer(tables, missing, options)
    inputs = inputs_of(Inputs({"files": Inputs.of_files(tables.files), **tables.describe(), "missing": missing}), options)
    with BuildDirectory(options.path, overwrite=options.overwrite, resume=inputs.digest) as build:
        steps = BuildSteps(build.path, build.target, inputs, progress=options.progress)
        steps.begin()
        with Progress("import", tables.n_bytes, options.progress) as bar:
            builder = Builder(build.path, options.work_bytes, bar, steps)
            types, maps = importer.run(builder)
        builder.finish(types, options.form, extra=maps)
        build.commit()
    report = _report(os.path.abspath(options.path), tables.files, importer.counts)
    report.add_shapes(catalog_of_new(options.path))
    report.seconds = time.perf_counter() - started
    return report


def _given(nodes: Any, edges: Any) -> tuple[dict[str, NodeTable], dict[EdgeKey, EdgeTable]]:
    """Check the tables, and name those of a graph of one type as the format does."""
    if nodes is None and edges is None:
        raise TypeError("a dataset is made of tables of nodes, of edges, or both")
    for name, given, kind, example in (
        ("nodes", nodes, NodeTable, "NodeTable('papers.csv', id='doi')"),
        ("edges", edges, EdgeTable, "EdgeTable('cites.csv', src='citing', dst='cited')"),
    ):
        if given is not None and not isinstance(given, (kind, Mapping)):
            found = type(given).__name__
            raise TypeError(f"{name} is a table of files, such as {example}, or a mapping of types to such tables, not {found}")
    if isinstance(nodes, NodeTable) or isinstance(edges, EdgeTable):
        if isinstance(nodes, Mapping) or isinstance(edges, Mapping):
            raise TypeError("nodes and edges are both tables, or both mappings of types to tables")
        nodes = {} if nodes is None else {ONE_NODE: nodes}
        edges = {} if edges is None else {ONE_EDGE: edges}
        if not edges:
            raise TypeError("a graph of one type needs a table of edges; nodes alone are a type: nodes={'node': NodeTable(…)}")
    else:
        nodes, edges = nodes or {}, edges or {}
        ends = {end for key in edges if isinstance(key, tuple) for end in key[::2]}
        check_types([*nodes, *sorted(map(str, ends - set(nodes)))], edges)
        if ONE_NODE in nodes or ONE_NODE in ends:
            raise ValueError(f"{ONE_NODE!r} is the name of nodes without types: give tables alone, or another name")
    for given, kind in ((nodes, NodeTable), (edges, EdgeTable)):
        for key, table in given.items():
            if not isinstance(table, kind):
                raise TypeError(f"type {key!r}: it must be a {kind.__name__}, not {type(table).__name__}")
    return dict(nodes), dict(edges)


def _report(path: str, files: list[str], counts: Counts) -> Report:
    names = {key: edge_name(key) for key in counts.edges}
    notes = [f"{n:,} nodes{_of(name)} have no edge" for name, n in counts.isolated.items() if n]
    notes += [
        f"{n:,} edges{_of(edge_name(key))} left out, as an end is not in its node table" for key, n in counts.unknown.items()
    ]
    notes += [f"{n:,} cells without a value in {name}, filled" for name, n in counts.filled.items()]
    if counts.was_spilled:
        notes.append("ids were numbered through files, as their names did not fit into half of the memory")
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    return Report(
        "table",
        folder,
        path,
        dict(counts.nodes),
        {names[key]: n for key, n in counts.edges.items()},
        counts.edges_read,
        loops_dropped=counts.loops,
        duplicates_dropped=counts.duplicates,
        reverses_added=counts.reverses,
        unlabelled=counts.unlabelled,
        splits=counts.splits,
        notes=notes,
    )


def _of(name: str) -> str:
    return "" if name in (ONE_NODE, edge_name(ONE_EDGE)) else f" of type {name}"
