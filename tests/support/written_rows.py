"""Small row files for tests of the readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.config import Options
from featstore.storage.format import sums_seed
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.writer import FileRecord, RowFileWriter


def write_rows(directory: Path, rows: npt.NDArray[np.uint8], layout: RowLayout | None = None) -> FileRecord:
    """Write ``rows`` as ``directory/rows.bin``."""
    layout = choose_layout(rows.shape[1]) if layout is None else layout
    with RowFileWriter(directory, "rows.bin", layout, kind="feature", dtype="uint8") as writer:
        writer.write(rows)
        return writer.commit()


@contextmanager
def opened(directory: Path, record: FileRecord, memory: int = 1 << 30, **options: Any) -> Iterator[tuple[RowFile, Reader]]:
    """Open what :func:`write_rows` wrote; afterwards the budget must be empty."""
    budget = Budget(memory)
    reader = Reader(Options(memory=memory, **options), budget)
    try:
        file = open_record(reader, directory, record)
        try:
            yield file, reader
        finally:
            file.close()
    finally:
        reader.close()
    assert budget.used == 0, budget.report()


def open_record(reader: Reader, directory: Path, record: FileRecord) -> RowFile:
    """Open a row file by its record."""
    return reader.open(
        directory / record.name, layout=record.layout, n_rows=record.n_rows, seed=record.seed, sums_seed=sums_seed(record.seed)
    )
