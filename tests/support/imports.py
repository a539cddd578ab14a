"""Files in the layouts of published data sets, made by NumPy, pandas and gzip; and what an import must come to."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import featstore
from featstore.adapters.datasets.report import Report
from featstore.creation import steps
from featstore.creation.steps import BuildSteps
from featstore.storage.builddir import BUILD_STATE
from featstore.storage.catalog import read_catalog
from tests.support.refusing import refuses
from tests.support.rowfiles import field

__all__ = [
    "TINY",
    "Folder",
    "Interrupts",
    "assert_same",
    "contents",
    "follow_advice",
    "refused",
    "same_reports",
    "write_csv",
]

TINY: dict[str, Any] = {"progress": False, "memory": "9MiB"}


def assert_same(imported: Path, made: Path) -> None:
    """Assert that two datasets hold the same: types, edges and their numbers, features and data, bit for bit."""
    one, other = read_catalog(imported), read_catalog(made)
    assert (one.num_nodes, one.num_edges) == (other.num_nodes, other.num_edges)
    assert one.fields.keys() == other.fields.keys()
    for key, record in one.fields.items():
        assert (record.role, record.dtype, record.shape) == (
            other.fields[key].role,
            other.fields[key].dtype,
            other.fields[key].shape,
        )
        assert field(imported, key, one).tobytes() == field(made, key, other).tobytes(), key
    with featstore.open(imported, memory="64MiB") as a, featstore.open(made, memory="64MiB") as b:
        assert (a.node_types, a.edge_types) == (b.node_types, b.edge_types)
        a.verify(progress=False)


def refused(error: type[BaseException], words: str, target: Path, call: Any) -> pytest.ExceptionInfo[Any]:
    """Assert that an import raises this error, and leaves nothing beside what was there."""
    before = sorted(os.listdir(target.parent))
    caught = refuses(error, words, call)
    assert sorted(os.listdir(target.parent)) == before
    return caught


def follow_advice(error: BaseException) -> None:
    """Run the command that an error about a file of torch.save names, as a shell would read it."""
    text = str(error)
    exec(shlex.split(text[text.index("python -c ") :])[2], {})


def write_csv(path: Path, rows: Any, **options: Any) -> None:
    """Write rows as OGB does: without a header, gzipped, by pandas."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, header=False, index=False, compression="gzip", **options)


class Folder:
    """A graph of one type in OGB's layout, in both of its forms; its arrays are what an import must come to."""

    def __init__(self, root: Path, n: int = 60, n_edges: int = 500, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.root, self.n, self.n_edges = root, n, n_edges
        self.edges = rng.integers(0, n, (2, n_edges))
        self.edges[1, ::50] = self.edges[0, ::50]  # some self loops
        self.x = rng.standard_normal((n, 7)).astype(np.float32)
        self.y = rng.integers(0, 5, (n, 1))
        self.year = rng.integers(1990, 2020, (n, 1))
        self.weight = rng.random((n_edges, 2)).astype(np.float32)
        self.splits = dict(zip(("train", "valid", "test"), np.split(rng.permutation(n), [n // 2, n // 2 + 7]), strict=True))

    def binary(self, *, compressed: bool = True) -> Folder:
        """Write ``data.npz``."""
        raw = self.root / "raw"
        raw.mkdir(parents=True)
        save = np.savez_compressed if compressed else np.savez
        counts: Any = {"num_nodes_list": np.array([self.n]), "num_edges_list": np.array([self.n_edges])}
        fields: Any = {"node_feat": self.x, "node_year": self.year, "edge_feat": self.weight}
        save(raw / "data.npz", edge_index=self.edges, **fields, **counts)
        save(raw / "node-label.npz", node_label=self.y)
        return self.write_splits()

    def csv(self) -> Folder:
        """Write ``edge.csv.gz`` and the others."""
        raw = self.root / "raw"
        files = {"edge": self.edges.T, "num-node-list": [self.n], "num-edge-list": [self.n_edges], "node-feat": self.x}
        files |= {"node-label": self.y, "node_year": self.year, "edge-feat": self.weight}
        for name, rows in files.items():
            write_csv(raw / f"{name}.csv.gz", rows)
        return self.write_splits()

    def write_splits(self, name: str = "time") -> Folder:
        for split, ids in self.splits.items():
            write_csv(self.root / "split" / name / f"{split}.csv.gz", ids)
        return self

    def make(self, path: Path, **options: Any) -> Path:
        """Make the dataset by the library's own call, of arrays in memory."""
        given: Any = {
            "features": {"x": self.x},
            "node_data": {"node_year": self.year, "y": self.y, **{f"{name}_idx": ids for name, ids in self.splits.items()}},
            "edge_features": {"edge_feat": self.weight},
            "num_nodes": self.n,
            "edge_index": self.edges,
            **options,
        }
        featstore.OutOfCoreGraph.from_edge_index(path, **given, progress=False).close()
        return path


def contents(path: Path) -> dict[str, Any]:
    """All that an import writes, but for ids of files, and what carries them."""
    catalog = read_catalog(path)
    found: dict[str, Any] = {name: (path / name).read_bytes()[4096:] for name in catalog.files}
    found["fields"] = {key: (each.role, each.shape, each.dtype) for key, each in catalog.fields.items()}
    found["dataset"] = {key: value for key, value in catalog.dataset.items() if key != "id"}
    found["extra"] = catalog.extra
    found["names"] = sorted(os.listdir(path))
    return found


class Interrupts:
    """Ctrl-C after each record of an import but the first ``left`` ones; ``records`` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = self.records = 0
        monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)
        record = BuildSteps._record

        def recorded(*args: Any) -> None:
            record(*args)
            if args[0]._recipe is None:  # nothing was recorded
                return
            self.records += 1
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(BuildSteps, "_record", recorded)

    def until_done(self, call: Callable[[], Report], target: Path, n_each: int = 1) -> tuple[Report, int]:
        """Call again and again, ended at every ``n_each``-th record; return the last report and the number of calls."""
        for n_calls in range(1, 400):
            try:
                self.left = n_each - 1
                return call(), n_calls
            except KeyboardInterrupt:
                (left,) = target.parent.glob(f"{target.name}.tmp-*")
                assert (left / BUILD_STATE).exists()
        raise AssertionError("no call gets farther than the one before")


def same_reports(one: Report, other: Report) -> bool:
    return one.to_dict() | {"seconds": 0, "path": ""} == other.to_dict() | {"seconds": 0, "path": ""}
