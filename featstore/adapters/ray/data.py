"""Rows between Ray Data and a dataset: columns as input of ``create``, features as a Ray ``Dataset``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import ray.data
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from featstore.config import listed
from featstore.creation.source import dtype_name
from featstore.graph.feature import FeatureStore

__all__ = ["columns", "edges", "rows"]

BATCH_BYTES = 16 << 20
Column = tuple[tuple[int, ...], np.dtype[Any], Iterator[npt.NDArray[Any]]]


def _array(name: str, column: Any) -> npt.NDArray[Any]:
    """Make a column's batch an array: lists of one length become its rows; ValueError if lengths differ."""
    array = np.asarray(column)
    if array.dtype != object:
        return array
    found = [np.asarray(row) for row in array]
    if len({(row.shape, row.dtype) for row in found}) > 1 or any(row.dtype == object for row in found):
        raise ValueError(f"column {name!r} has no array of one shape and dtype in each row")
    return np.stack(found)


def columns(dataset: ray.data.Dataset, names: str | Sequence[str], *, id: str | None = None) -> dict[str, Column]:
    """Make columns of a Ray ``Dataset`` the features, or the node data, of a dataset to be created.

    Parameters
    ----------
    dataset : ray.data.Dataset
        A row a node, such as ``ray.data.read_parquet(…)``.
    names : str or sequence of str
        Columns of numbers, or of arrays or lists of one shape.
    id : str, optional
        The column of the nodes' numbers, by which Ray sorts the rows first. They must be ``0 … n - 1``, each once. By default row
        ``i`` of the ``Dataset`` is node ``i``.

    Returns
    -------
    dict of str to (shape, dtype, iterable of row blocks)
        Give it to ``OutOfCoreGraph.create(…, features=)``, ``from_edge_index`` or ``node_data=``. Each can be read once.

    Raises
    ------
    KeyError
        There is no such column.
    TypeError
        A column's dtype cannot be stored.
    ValueError
        The rows of a column are no arrays of one shape and dtype. While a dataset is created: the ids are not ``0 … n - 1``.

    Notes
    -----
    Rows are streamed to this process, a pass over each column; it holds a few batches of up to 16 MiB. A sort by ``id`` runs
    once, in Ray's object store, which spills to disk.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    _check_columns(dataset, [*wanted, *([] if id is None else [id])])
    n = dataset.count()
    if id is not None:
        dataset = dataset.select_columns(list(dict.fromkeys([id, *wanted]))).sort(id).materialize()
    return {name: _column(dataset, name, n, id) for name in wanted}


def edges(dataset: ray.data.Dataset, source: str, destination: str) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Make two columns of a Ray ``Dataset`` the edges of a dataset to be created.

    Parameters
    ----------
    dataset : ray.data.Dataset
        A row an edge, such as ``ray.data.read_parquet(…)``.
    source, destination : str
        Columns of the ids of the nodes at which edges begin and end: integers.

    Returns
    -------
    iterator of integer arrays, shape (2, k)
        Give it to ``OutOfCoreGraph.from_edge_index``, which sorts the edges in bounded memory. It can be read once. Edges are
        numbered in the order of the rows.

    Raises
    ------
    KeyError
        There is no such column.
    TypeError
        While a dataset is created: a column is not of integers, or lacks values.

    Notes
    -----
    Edges are streamed to this process, which holds a few batches of up to 16 MiB. ``from_edge_index`` checks that ids are nodes.
    """
    _check_columns(dataset, [source, destination])
    return _edge_blocks(dataset, source, destination)


def _edge_blocks(dataset: ray.data.Dataset, source: str, destination: str) -> Iterator[npt.NDArray[np.integer[Any]]]:
    selected = dataset.select_columns(list(dict.fromkeys([source, destination])))
    with contextlib.closing(_in_order(selected, BATCH_BYTES // 16)) as batches:
        for batch in batches:
            ends = [np.asarray(batch[name]) for name in (source, destination)]
            for name, each in zip((source, destination), ends, strict=True):
                if each.ndim != 1 or each.dtype.kind not in "iu":
                    raise TypeError(f"column {name!r} must hold an integer in each row, not {each.dtype} {list(each.shape[1:])}")
            yield np.stack(ends if ends[0].dtype == ends[1].dtype else [each.astype(np.int64) for each in ends])


def _check_columns(dataset: ray.data.Dataset, names: Sequence[str]) -> None:
    there = dataset.columns() or []
    for name in names:
        if name not in there:
            raise KeyError(f"the dataset has no column {name!r}; it has {listed(there)}")


def _in_order(dataset: ray.data.Dataset, size: int) -> Generator[Mapping[str, npt.NDArray[Any]], None, None]:
    """Yield batches of ``size`` rows in the order of the dataset."""
    options = dataset.context.execution_options  # shared with the caller's dataset
    before, options.preserve_order = options.preserve_order, True
    try:
        yield from dataset.iter_batches(batch_size=size, batch_format="numpy")
    finally:
        options.preserve_order = before


def _column(dataset: ray.data.Dataset, name: str, n: int, id: str | None) -> Column:
    first = _array(name, dataset.select_columns([name]).take_batch(1, batch_format="numpy")[name])
    dtype_name(first.dtype, of=f"column {name!r}")
    return (n, *first.shape[1:]), first.dtype, _blocks(dataset, name, first, id)


def _blocks(dataset: ray.data.Dataset, name: str, like: npt.NDArray[Any], id: str | None) -> Iterator[npt.NDArray[Any]]:
    """Yield a column's rows in order."""
    selected = dataset.select_columns([name] if id in (None, name) else [id, name])
    n_done, size = 0, max(1, BATCH_BYTES // max(1, like[:1].nbytes))
    with contextlib.closing(_in_order(selected, size)) as batches:
        for batch in batches:
            rows = _array(name, batch[name])
            if rows.shape[1:] != like.shape[1:] or rows.dtype != like.dtype:
                raise ValueError(
                    f"column {name!r} has rows of {like.dtype} {like.shape[1:]}, and from row {n_done} on of {rows.dtype} "
                    f"{rows.shape[1:]}"
                )
            if id is not None:
                _check_ids(id, np.asarray(batch[id]), n_done)
            n_done += len(rows)
            yield rows


def _check_ids(id: str, ids: npt.NDArray[Any], first: int) -> None:
    wrong = np.flatnonzero(ids != np.arange(first, first + len(ids)))
    if len(wrong):
        raise ValueError(
            f"column {id!r} must hold 0 … n - 1, each once: sorted, {ids[wrong[0]]} is where {first + wrong[0]} belongs"
        )


def rows(feature: FeatureStore, name: str, *, id: str = "id", batch_size: int | None = None) -> ray.data.Dataset:
    """Return the rows of a feature as a Ray ``Dataset``, which ``write_parquet`` writes.

    Parameters
    ----------
    feature : FeatureStore
        ``g.features["x"]``, or what :func:`featstore.infer` returned.
    name : str
        The column of rows.
    id : str
        The column of the rows' numbers.
    batch_size : int, optional
        Rows read at once; by default 16 MiB of them.

    Returns
    -------
    ray.data.Dataset
        It is lazy. Tasks on this machine open the feature's dataset, and read its rows as they are asked for.

    Raises
    ------
    TypeError
        The feature is of bfloat16, which Arrow lacks: store it as float32.
    ValueError
        Both columns have one name.

    Notes
    -----
    Each of Ray's processes that reads has the memory of the feature's graph: open it with ``memory=`` for one of them.
    """
    if str(feature.dtype) == "torch.bfloat16":
        raise TypeError("rows of bfloat16 have no form in Arrow: store the feature as float32")
    if name == id:
        raise ValueError(f"name and id are both {name!r}: the columns need a name each")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    if batch_size is None:
        batch_size = max(1, BATCH_BYTES // max(1, feature[:1].nbytes))

    def read(batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        return {id: batch["id"], name: feature[batch["id"]].numpy()}

    return ray.data.range(len(feature)).map_batches(read, batch_size=batch_size, scheduling_strategy=here)
