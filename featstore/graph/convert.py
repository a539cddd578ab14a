"""Conversion of a dataset's adjacency to another form."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from featstore.config import check_flag, user_path
from featstore.creation.topologyfiles import Form, WrittenField, lists_in_order, open_topology_files
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.opentopology import stored_ids, stored_pieces
from featstore.progress import Progress
from featstore.storage.catalog import EDGE, Catalog
from featstore.storage.layout import RowLayout
from featstore.storage.stripes import stripe_directory
from featstore.storage.update import Update, sweep
from featstore.storage.writer import RowFileWriter

__all__ = ["convert"]

_PIECE_NODES = 1 << 16
_BLOCK_BYTES = 4 << 20
_BUFFER_BYTES = 16 << 20  # for two writers, blocks of ids and pieces of offsets


def convert(
    path: str | os.PathLike[str],
    topology: str,
    *,
    chunk_bytes: int | str | None = None,
    stripes: Sequence[str | os.PathLike[str]] = (),
    memory: int | str | None = None,
    progress: bool = True,
) -> bool:
    """Store the adjacency of a dataset in another form, in one commit.

    Parameters
    ----------
    path : path-like
        The dataset's directory.
    topology : {"csc", "chunked"}
        See :meth:`OutOfCoreGraph.create`.
    chunk_bytes : int or str, optional
        Size of a chunk, for ``"chunked"``: a multiple of 4 KiB, at most 1 GiB; 1 MiB by default.
    stripes : sequence of path-like
        Directories on other drives, each of which takes a share of the chunks. See :meth:`OutOfCoreGraph.create`.
    memory : int or str, optional
        Most memory to hold: a chunk and about 32 MiB are needed. The default is that of :func:`featstore.open`.
    progress : bool
        Show a progress bar, on a terminal and in a notebook.

    Returns
    -------
    bool
        False if the adjacency has this form already; nothing is written then.

    Raises
    ------
    ValueError, TypeError
        The form is unknown, the size of a chunk is not possible, or a stripe lies within the dataset.
    BusyError
        Another process or handle is writing the dataset.
    BudgetError
        ``memory`` is too little; the error names the least that works.
    CommittedError
        The new form is in place, but making that durable failed.
    FileNotFoundError, CorruptionError, FormatError, VersionError, OSError
        The dataset or a stripe's directory does not exist; the dataset is damaged; the disk is full or failed. The dataset is as
        it was.

    Notes
    -----
    The adjacency is read once, in sequence, and written once, beside the old one: the disk must hold both. The old files are
    removed at the end, or by the next writer if the dataset is open elsewhere. If the conversion fails or is killed, the old
    form stays. The graph is the same: kept parts, saved neighbour caches, packs and samplers stay valid. Open graphs go on
    reading the old files.

    Examples
    --------
    >>> featstore.convert("graph", "chunked", chunk_bytes="8MiB")
    True
    """
    root = os.path.abspath(user_path(path))
    form, progress = Form.of(topology, chunk_bytes, stripes, root), check_flag("progress", progress)
    with Update(root) as update:
        catalog = update.catalog
        is_same = (catalog.topology, catalog.chunk_bytes) == (form.topology, form.chunk_bytes)
        if is_same and _directories(root, catalog) == [os.path.realpath(each) for each in form.stripes]:
            return False
        with OutOfCoreGraph.open(root, memory=memory) as g:
            with g.budget.reserve("convert", form.chunk_bytes + _BUFFER_BYTES):
                fields = _write(g, update, form, progress)
        gone = {f"{EDGE}/{name}" for name in ("indptr", "indices", "chunks", "chunk_directory")} & set(catalog.fields)
        update.add(
            (file for each in fields for file in each.files),
            [each.record(update.generation) for each in fields],
            dataset={"chunk_bytes": None, **form.entry(), "adjacency": catalog.adjacency()},
            drop_fields=gone,
        )
        _sweep(root, update.commit())
    return True


def _directories(root: str, catalog: Catalog) -> list[str]:
    """List the directories that contain the stripes of the chunks."""
    chunks = catalog.fields.get(f"{EDGE}/chunks")
    found = (stripe_directory(root, part.file) for part in (chunks.parts if chunks is not None else ()))
    return [os.path.realpath(os.path.dirname(each)) for each in found if each is not None]


def _sweep(root: str, catalog: Catalog) -> None:
    """Remove the old files, unless a process reads them: then the next writer does. The conversion is complete either way."""
    with contextlib.suppress(OSError):
        sweep(root, catalog)


def _write(g: OutOfCoreGraph, update: Update, form: Form, progress: bool) -> list[WrittenField]:
    """Write the files of the new form, each list as it is stored."""

    def open_writer(name: str, layout: RowLayout, dtype: str, stripe: str) -> RowFileWriter:
        return update.writer(f"edge.{name}", layout, kind=name, dtype=dtype, stripe=stripe)

    snapshot = g.snapshot
    id_bytes, ids = stored_ids(snapshot, lambda: g.topology, _BLOCK_BYTES)
    with (
        Progress("convert", g.num_edges * id_bytes, progress) as bar,
        open_topology_files(form, g.types.num_lists, g.num_edges, id_bytes, open_writer, update.stripe) as files,
    ):
        pieces = stored_pieces(snapshot, lambda: g.topology, _PIECE_NODES)
        for begins, some in lists_in_order((offsets[:-1] for _, offsets in pieces), ids):
            files.write(begins, some)
            bar.add(some.nbytes)
        return files.finish()
