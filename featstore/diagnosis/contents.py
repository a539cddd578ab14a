"""A dataset, or a pack, opened within a budget; and the rates of the drive, timed on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from featstore.budget import Budget
from featstore.config import Options, available_memory, format_size
from featstore.diagnosis.findings import FAILING, Finding, brief
from featstore.errors import BudgetError, BusyError, CorruptionError, FeatstoreError, VersionError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.pack.offline import Pack
from featstore.pack.record import RECORD, SAMPLES
from featstore.storage.calls import CANNOT_WRITE
from featstore.storage.catalog import CATALOG_DIRECTORY
from featstore.storage.drive import measure_drive
from featstore.storage.reader import Reader
from featstore.storage.rundir import runs_directory

__all__ = ["holds_dataset", "holds_pack", "opened", "rates"]

RESTORE = "featstore verify checks every byte; restore what is damaged from a copy"
SLOW_IOPS = 5000  # of a disk with heads, or a volume across a network
LEAST_BYTES, MOST_BYTES = 1 << 25, 1 << 28  # to measure with where no dataset can be opened


def holds_dataset(path: str) -> bool:
    """Tell whether a directory holds a dataset, whole or damaged."""
    return os.path.lexists(os.path.join(path, CATALOG_DIRECTORY))


def holds_pack(path: str) -> bool:
    """Tell whether a directory holds a pack, whole or damaged."""
    return any(os.path.lexists(os.path.join(path, name)) for name in (RECORD, SAMPLES))


@contextmanager
def opened(path: str, memory: int, backend: str) -> Iterator[tuple[Finding | None, OutOfCoreGraph | None]]:
    """Open what a directory holds, as training does; yield what was found, and the dataset if it can be read.

    Of a directory without dataset and pack both are None.
    """
    if not holds_dataset(path):
        yield (_pack(path) if holds_pack(path) else None), None
        return
    try:
        graph = OutOfCoreGraph.open(path, memory, backend, progress=False)
    except (FeatstoreError, OSError) as error:
        yield _unopened("dataset", error), None
        return
    with graph:
        n_bytes = sum(each.n_bytes for each in graph.catalog.files.values())
        values = {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges, "bytes": n_bytes}
        text = f"opens: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {format_size(n_bytes)}"
        yield Finding("dataset", "ok", text, values=values), graph


def _pack(path: str) -> Finding:
    try:
        with Pack(path) as pack:
            values = {"epochs": pack.record["epochs"], "batches": pack.record["batches"]}
            text = f"opens: {values['batches']:,} batches an epoch"
    except (FeatstoreError, OSError) as error:
        return _unopened("pack", error)
    return Finding("pack", "ok", text, values=values)


def _unopened(what: str, error: Exception) -> Finding:
    """Say why a dataset or a pack does not open."""
    cause = brief(error) if isinstance(error, OSError) else " ".join(str(error).split())
    if isinstance(error, BudgetError):
        needed = error.needed or 0
        remedy = f"memory={format_size(needed)!r} or more is needed to open it"
        return Finding(what, "error", "does not open within the memory", cause, remedy, {"needed": needed})
    if isinstance(error, BusyError):
        return Finding(what, "note", "is being written", cause, "look again when the other process is done")
    if isinstance(error, VersionError):
        return Finding(what, "error", "does not open", cause, "install the release that made it, or a newer one")
    if isinstance(error, (CorruptionError, FeatstoreError, FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return Finding(what, "error", "is damaged", cause, f"{RESTORE}, or make the {what} anew")
    return Finding(
        what, "error", "does not open", cause, "make its files readable for this user; ulimit -n 65536 if too many are open"
    )


@contextmanager
def _measuring(graph: OutOfCoreGraph | None, backend: str) -> Iterator[Reader]:
    """Lend the reader of a dataset, or one made for the purpose."""
    if graph is not None:
        yield graph.reader
        return
    options = Options.resolve(min(MOST_BYTES, max(LEAST_BYTES, available_memory() // 2)), backend, "off")
    reader = Reader(options, Budget(options.memory), "the doctor's reader")
    try:
        yield reader
    finally:
        reader.close()


def rates(path: str, graph: OutOfCoreGraph | None, backend: str) -> Finding:
    """Measure the drive as strategies do: on a dataset's features if they are large, else on a scratch file."""
    is_there = holds_dataset(path) or holds_pack(path)
    run_dir = runs_directory(path) if is_there else path
    place = os.path.dirname(run_dir) if is_there else path
    try:
        with _measuring(graph, backend) as reader:
            sources = [] if graph is None else [store.source for store in graph.features.values()]
            speed = measure_drive(reader, run_dir, sources)
    except BudgetError as error:
        return Finding("drive", "warning", "not measured", error.reason, "give more memory, or measure no rates")
    except CorruptionError as error:
        return Finding("drive", "error", "not measured", brief(error), RESTORE)
    except OSError as error:
        if error.errno == errno.EIO:
            return Finding("drive", "error", "not measured", brief(error), FAILING)
        cause = f"{place} may not be written" if error.errno in CANNOT_WRITE else brief(error)
        return Finding("drive", "warning", "not measured", cause, "give a directory that may be written, with room for 64 MiB")
    values = asdict(speed)
    of = f"reads {speed.bandwidth / 1e9:.2f} GB/s, writes {speed.write_bandwidth / 1e9:.2f} GB/s"
    text = f"{of}, {speed.iops:,.0f} random reads a second"
    if os.stat(place).st_dev != os.stat(path).st_dev:
        text += f"; with a scratch file at {place}, as files of runs"
    if speed.iops < SLOW_IOPS:
        cause = "few random reads a second, as of a disk with heads, or a volume across a network"
        remedy = 'strategy="streamed" and "packed" read in sequence; a local NVMe drive does 50,000 and more'
        return Finding("drive", "warning", text, cause, remedy, values)
    return Finding("drive", "ok", text, values=values)
