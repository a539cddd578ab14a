"""Every ``>>>`` of the package's docstrings runs and prints what it shows, each docstring in a folder of its own."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.graphbolt import load
from tests.support.programs import OF_PYG, run_in_fork

N, DIM = 1000, 16
pytestmark = pytest.mark.usefixtures("_program_server")

ROOT = Path(__file__).resolve().parents[2]
# Examples name a reader's memory and device; a machine of tests has less, and often no GPU.
INSTEAD = {'"cuda"': '"cpu"', '"8GiB"': '"1MiB"', '"4GiB"': '"64MiB"'}


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield the module, the object's name and the text of each docstring with examples."""
    for path in sorted((ROOT / "featstore").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ">>> " in (
                text := ast.get_docstring(node) or ""
            ):
                yield module, getattr(node, "name", module), text


def names_that_readers_have(folder: Path, text: str) -> dict[str, Any]:
    """Make the dataset and the objects that examples use without making them."""
    rng = np.random.default_rng(0)
    idx = rng.permutation(N)[:400]
    indptr, indices = np.arange(0, 10 * N + 1, 10), rng.integers(0, N, 10 * N)
    x = rng.standard_normal((N, DIM), np.float32)
    featstore.OutOfCoreGraph.create(
        folder / "graph", indptr, indices, {"x": x}, node_data={"train_idx": idx}, progress=False
    ).close()
    g = featstore.open(folder / "graph", memory="64MiB", threads=1, backend="pread")
    sampler = featstore.NeighborSampler(g, [5, 5])
    names = {"featstore": featstore, "np": np, "torch": torch, "g": g, "x": g.features["x"], "sampler": sampler}
    names |= dict.fromkeys(("ids", "idx", "seeds", "train_idx"), g.node_data["train_idx"])
    names |= layers_of() | {"datapipe": SimpleNamespace(fetch_feature=lambda store, node_feature_keys: store)}
    if "import_tables" in text:
        tables(folder)
    if 'create("' in text or "import_tables" in text:
        shutil.rmtree(folder / "graph")  # the example makes it
    return names


def tables(folder: Path) -> None:
    """Write the tables that are imported."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    names = [f"10.1000/{node}" for node in range(40)]
    rows = [*np.ones((40, DIM), np.float32)]
    papers = {"doi": names, "embedding": rows, "label": np.arange(40) % 4, "split": ["train"] * 40}
    pyarrow.parquet.write_table(pa.table(papers), folder / "papers.parquet")
    cites = {"citing": names[1:], "cited": names[:-1], "year": np.arange(39)}
    with pa.CompressedOutputStream(folder / "cites.csv.gz", "gzip") as file:
        pyarrow.csv.write_csv(pa.table(cites), file)


def layers_of() -> dict[str, Any]:
    """Make the layers of a model of PyG's kind: ``conv`` alone, ``model`` for whole features, and ``layers`` for blocks."""

    class Layer(torch.nn.Module):
        def __init__(self, dim: int, out: int) -> None:
            super().__init__()
            self.of_self = self.lin_r = torch.nn.Linear(dim, out)
            self.of_neighbors = self.lin_l = torch.nn.Linear(dim, out)

        def forward(self, h: torch.Tensor, edges: Any) -> torch.Tensor:
            if isinstance(edges, featstore.Block):
                src, dst, n = edges.src, edges.dst, edges.n_dst
            else:
                (src, dst), n = edges, len(h)
            return self.of_self(h[:n]) + self.of_neighbors(h.new_zeros(n, h.shape[1]).index_add_(0, dst, h[src]))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(DIM, 256), Layer(256, 4)])

        def forward(self, h: torch.Tensor, edges: Any) -> torch.Tensor:
            for layer in self.layers:
                h = layer(h, edges)
            return h

    model = Model()
    return {"conv": Layer(DIM, 4), "model": model, "layers": model.layers}


class Checker(doctest.OutputChecker):
    """An example that shows nothing may print anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def run_all(folder: str) -> None:
    """Run each docstring's examples in a folder of its own; AssertionError names all that fail."""
    warnings.simplefilter("error")
    for message in OF_PYG:
        warnings.filterwarnings("ignore", message)
    load("stand-in")
    printed: list[str] = []
    runner = doctest.DocTestRunner(Checker())
    for number, (module, name, text) in enumerate(docstrings()):
        for shown, here in INSTEAD.items():
            text = text.replace(shown, here)
        at = Path(folder, str(number))
        at.mkdir()
        os.chdir(at)
        names = {**vars(importlib.import_module(module)), **names_that_readers_have(at, text)}
        g = names["g"]
        test = doctest.DocTestParser().get_doctest(text, names, name, module, 0)
        assert test.examples, name
        runner.run(test, out=printed.append)
        g.close()
    print(*printed)
    assert runner.tries > 60
    assert not runner.failures


def test_examples_run(tmp_path: Path) -> None:
    run_in_fork(run_all, str(tmp_path))
