"""A matrix on disk without a graph: a dataset whose nodes are the matrix's rows, without edges."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from featstore.creation.source import ArrayLike, open_source
from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["create"]

_STEP = 1 << 16  # nodes


def create(
    path: str | os.PathLike[str],
    x: ArrayLike,
    *,
    node_data: Mapping[str, ArrayLike] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    memory: int | str | None = None,
) -> OutOfCoreGraph:
    """Write a matrix to disk and open it; ``create(path, x)["x"]`` is indexed like ``x``.

    Parameters
    ----------
    path : path-like
        The dataset's directory. Its parent must exist.
    x : array, shape (n, …)
        A NumPy array or memmap, a torch tensor, a list, the path of a ``.npy`` file, or ``(shape, dtype, iterable of row
        blocks)``: the feature ``x``. It is streamed.
    node_data, overwrite, progress, memory
        See :meth:`OutOfCoreGraph.create`. Labels are ``node_data={"y": y}``.

    Returns
    -------
    OutOfCoreGraph
        A graph with ``n`` nodes and no edges. ``featstore.open(path)["x"]`` opens the matrix again.

    Raises
    ------
    TypeError, ValueError, FormatError, CorruptionError, FileExistsError, BusyError, BudgetError, CommittedError, OSError
        See :meth:`OutOfCoreGraph.create`, which also takes several features, and edges.

    Notes
    -----
    The adjacency without edges takes 16 bytes a row on disk, and 8 a row in memory once a sampler uses it.

    Examples
    --------
    >>> with featstore.create("m", np.eye(3, dtype=np.float32)) as m:
    ...     m["x"][[2, 0]]
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    if isinstance(x, Mapping):
        raise TypeError("x must be one array, not a mapping: OutOfCoreGraph.create takes several features")
    n = open_source("x", x).n_rows
    return OutOfCoreGraph.create(
        path,
        ((n + 1,), np.int64, _zeros(n + 1)),
        np.empty(0, np.int64),
        {"x": x},
        node_data,
        overwrite=overwrite,
        progress=progress,
        memory=memory,
    )


def _zeros(n: int) -> Iterator[npt.NDArray[np.int64]]:
    for first in range(0, n, _STEP):
        yield np.zeros(min(_STEP, n - first), np.int64)
