"""Arguments of the wrong kind: an error that names the argument, before anything is made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import PluginError
from featstore.estimate.redundancy import redundancy
from featstore.sampling.batches import check_seeds
from featstore.sampling.foreign import as_sampled
from featstore.storage import rundir
from tests.support.pyg import NodeSamplerInput
from tests.support.refusing import refuses

from featstore.adapters import pyg  # isort: skip  # after PyG

N = 60


def create(path: Path, features: Any, **options: Any) -> featstore.OutOfCoreGraph:
    indptr = np.arange(0, 3 * N + 1, 3)
    indices = np.arange(3 * N) % N
    return featstore.OutOfCoreGraph.create(path, indptr, indices, features, progress=False, **options)


@pytest.fixture(scope="module")
def g(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("data") / "g"
    create(path, {"x": np.ones((N, 4), np.float32)}, node_data={"y": np.zeros(N)}).close()
    with featstore.open(path, memory="16MiB") as opened:
        yield opened


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": np.ones((N, 4))}, "features must be a mapping of names to arrays"),
        ({"features": {}, "node_data": [1]}, "node_data must be a mapping of names to arrays"),
        ({"features": {}, "edge_features": torch.ones(3)}, "edge_features must be a mapping of names to arrays"),
        ({"features": {"x": np.ones(N), "z": np.full(N, "a")}}, "feature 'z': dtype <U1 cannot be stored"),
        ({"features": {"x": torch.ones(N, dtype=torch.complex64)}}, "feature 'x': dtype torch.complex64 cannot be stored"),
    ],
)
def test_of_create(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    refuses(TypeError, message, lambda: create(tmp_path / "g", **options))
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: featstore.NeighborSampler(g, 5), "fanouts must be a sequence of integers"),
        (lambda g: featstore.NeighborSampler(g, [3], seed=None), "seed must be an integer"),
    ],
)
def test_of_samplers_and_stores(g: Any, make: Callable[[Any], object], message: str) -> None:
    refuses(TypeError, message, lambda: make(g))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": 3}, r"labels must be given by name, of 'y', not as a int"),
        ({"features": None}, r"features must be given by name, of 'x', not as a NoneType"),
        ({"features": [torch.zeros(N)]}, "features must be given by name"),
        ({"seeds": 5}, "seeds must be an array of ids, a boolean mask or batches, not a int"),
        ({"seeds": 5, "batch_size": None}, "seeds must be an array of ids"),
        ({"seeds": "y"}, r"seeds must be ids, a mask or batches, not a name: node data are g.node_data\['y'\]"),
        ({"seeds": ("paper", [1, 2])}, "a type goes with the ids of a graph of several types; give the ids alone"),
    ],
)
def test_of_loaders(g: Any, options: dict[str, Any], message: str) -> None:
    given = {"seeds": np.arange(9), "batch_size": 3, "features": "x", "labels": None} | options
    refuses(TypeError, message, lambda: featstore.Loader(g, featstore.NeighborSampler(g, [2]), **given))


PATHS: dict[str, Callable[[Any, str], object]] = {
    "NeighborSampler": lambda g, path: featstore.NeighborSampler(path, [3]),  # type: ignore[arg-type]
    "LaborSampler": lambda g, path: featstore.LaborSampler(path, [3]),  # type: ignore[arg-type]
    "Loader": lambda g, path: featstore.Loader(path, sampler(g), np.arange(9)),  # type: ignore[arg-type]
    "NeighborLoader": lambda g, path: pyg.NeighborLoader(path, [3]),
    "stores": lambda g, path: pyg.stores(path),
    "infer": lambda g, path: featstore.infer(path, [lambda h, block: h]),  # type: ignore[call-overload]
    "partition": lambda g, path: featstore.partition(path, 3),  # type: ignore[call-overload]
    "sample_offline": lambda g, path: featstore.sample_offline(path, sampler(g), np.arange(9), 3),  # type: ignore[arg-type]
    "PartitionBatches": lambda g, path: featstore.PartitionBatches(path, np.arange(9), 3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("door", PATHS)
def test_a_path_in_place_of_a_graph_is_told_how_to_open_it(g: Any, door: str) -> None:
    for path in (g.path, Path(g.path)):
        refuses(TypeError, r"g must be an open graph, not a path: featstore\.open\('", lambda: PATHS[door](g, path))  # type: ignore[arg-type]


def test_names_of_other_libraries_are_translated(g: Any) -> None:
    batch = next(iter(featstore.Loader(g, sampler(g), np.arange(9), labels=None, features=[])))
    for found, name, words in (
        (g, "edge_index", r"g\.edges\(\)"),
        (g, "num_features", r"\.shape\[1\]"),
        (g, "x", r"features\['x'\]"),
        (g.features["x"], "mean", r"store\[ids\]"),
        (g.features["x"], "index_select", r"store\[ids\]"),
        (batch, "edge_index", r"batch\.to_pyg\(\)"),
        (batch, "input_nodes", r"batch\.input_ids"),
        (batch, "x", r"features=\[\]"),  # which is no missing name, but a property that says why
    ):
        refuses(AttributeError, words, lambda: getattr(found, name))
    for found in (g, g.features["x"], batch):
        refuses(AttributeError, f"'{type(found).__name__}' object has no attribute 'nothing'$", lambda: found.nothing)


def test_assignments_say_what_changes_a_dataset(g: Any) -> None:
    def assign(to: Any, key: Any) -> None:
        to[key] = torch.ones(N)

    refuses(TypeError, r"node data 'z' to the dataset: g\.add_data does", lambda: assign(g.node_data, "z"))
    refuses(TypeError, r"feature 'z' to the dataset: g\.add_feature does", lambda: assign(g.features, "z"))
    refuses(TypeError, r"edge feature 'z' to the dataset: g\.add_feature does", lambda: assign(g.edge_features, "z"))
    refuses(TypeError, r"store\.update\(ids, rows\)", lambda: assign(g.features["x"], 0))


@pytest.mark.parametrize("index", ["a", {1, 2}, (k for k in range(3)), 1.5])
def test_what_is_no_index_is_named_by_its_type(g: Any, index: Any) -> None:
    refuses(TypeError, f"integers or a boolean mask, not {type(index).__name__}$", lambda: g.features["x"][index])


def sampler(g: Any) -> featstore.NeighborSampler:
    return featstore.NeighborSampler(g, [2])


# Each takes a graph and ids of its nodes, or a mask over them.
DOORS: dict[str, Callable[[Any, Any], object]] = {
    "store[ids]": lambda g, ids: g.features["x"][ids],
    "store[ids,]": lambda g, ids: g.features["x"][ids,],
    "take": lambda g, ids: g.features["x"].take(ids),
    "take_async": lambda g, ids: g.features["x"].take_async(ids).result(),
    "gather": lambda g, ids: g.features["x"].gather(ids),
    "collate_fn": lambda g, ids: g.features["x"](ids),
    "index_select": lambda g, ids: torch.index_select(g.features["x"], 0, ids),
    "embedding": lambda g, ids: torch.nn.functional.embedding(ids, g.features["x"]),
    "sample": lambda g, ids: sampler(g).sample(ids),
    "Loader": lambda g, ids: featstore.Loader(g, sampler(g), ids, 9, labels=None),
    "NeighborLoader": lambda g, ids: pyg.NeighborLoader(g, [2], input_nodes=ids, batch_size=9),
    "pyg.Sampler": lambda g, ids: pyg.Sampler(sampler(g)).sample_from_nodes(NodeSamplerInput(None, ids)),
    "NodeStore": lambda g, ids: pyg.stores(g)[0].get_tensor(None, "y", ids),
    "RandomBatches": lambda g, ids: featstore.RandomBatches(ids, 9),
    "PartitionBatches": lambda g, ids: featstore.PartitionBatches(g, ids, 9, np.arange(N) % 3),
    "PartBatches": lambda g, ids: featstore.PartBatches(
        featstore.partition(g, 1, "ldg", np.arange(N), hops=1, keep=False, progress=False), ids, 9
    ),
    "History": lambda g, ids: featstore.History(4, nodes=ids),
    "partition": lambda g, ids: featstore.partition(g, 3, train_idx=ids, keep=False, progress=False),
    "sample_offline": lambda g, ids: featstore.sample_offline(
        g, sampler(g), ids, 9, path=f"{g.path}.pack", overwrite=True, progress=False
    ),
    "redundancy": lambda g, ids: redundancy(g, ids, 9, {"s": sampler(g)}),
    "simulate": lambda g, ids: featstore.simulate([ids], 9, "lru", n=N),
}
TORCH_ONLY = {"index_select", "embedding"}  # by their own contract


@pytest.mark.parametrize("door", DOORS)
def test_a_mask_of_uint8_is_never_ids(g: Any, door: str) -> None:
    """In torch it selects rows; as ids it would be rows 0 and 1, again and again."""
    mask = (torch.arange(N) % 3 == 0).to(torch.uint8)
    for given in (mask, torch.tensor([0, 1], dtype=torch.uint8)):
        words = (
            r"an int32 or int64 tensor"
            if door in TORCH_ONLY
            else r"torch\.uint8 may be a mask or ids; .*\.bool\(\), ids as \.long\(\)"
        )
        refuses(TypeError, words, lambda: DOORS[door](g, given))


def test_a_list_of_uint8_tensors_is_no_index(g: Any) -> None:
    refuses(TypeError, r"torch\.uint8", lambda: g.features["x"][[torch.tensor(1, dtype=torch.uint8)]])


@pytest.mark.parametrize("door", sorted(DOORS.keys() - {"gather", "take_async", "pyg.Sampler"} - TORCH_ONLY))
def test_uint8_of_numpy_are_ids_and_masked_ones_are_none(g: Any, door: str) -> None:
    ids = np.array([3, 5, 1], np.uint8)
    DOORS[door](g, ids)
    DOORS[door](g, np.ma.masked_array(ids, mask=False))  # nothing is lost
    with pytest.raises(TypeError, match=r"1 values of a masked array are masked.*filled\(value\)"):
        DOORS[door](g, np.ma.masked_array(ids, mask=[False, True, False]))


def test_repeated_seeds_are_named_without_advice_that_loses_some() -> None:
    with pytest.raises(ValueError, match=r"^seeds must be distinct: 7 is at positions 1 and 3$"):
        check_seeds([0, 7, 2, 7, 9, 7])  # of nodes that are parted or kept, not of losses
    with pytest.raises(
        ValueError, match=r"0 is at positions 1 and 2; a mask of 0 and 1 must be given as booleans: \.astype\(bool\)$"
    ):
        featstore.RandomBatches(np.array([1, 0, 0], np.uint8), 2)


MASKED = np.ma.masked_array(np.arange(N), mask=np.arange(N) == 4)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"features": {"x": MASKED}}, "feature 'x'"),
        ({"features": {"x": ((N,), "int64", [np.arange(4), MASKED[4:]])}}, "feature 'x'"),
        ({"features": {"x": [np.ones(2), *(np.ma.masked_equal([1.0, 2.0], 2.0) for _ in range(N - 1))]}}, "feature 'x'"),
        ({"features": {}, "node_data": {"y": MASKED}}, "node data 'y'"),
        (
            {"features": {}, "edge_features": {"w": np.ma.masked_array(np.ones(3 * N), mask=np.arange(3 * N) == 4)}},
            "edge feature 'w'",
        ),
    ],
)
def test_masked_arrays_are_not_stored(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    refuses(TypeError, f"^{name}: .* masked, and masks are not kept", lambda: create(tmp_path / "g", **options))
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("indptr", "indices", "name"),
    [
        (np.ma.masked_array([0, 1, 2], mask=[0, 1, 0]), [0, 1], "indptr"),
        ([0, 1, 2], np.ma.masked_array([0, 1], mask=[0, 1]), "indices"),
        (None, np.ma.masked_array([[0, 1], [1, 0]], mask=[[0, 1], [0, 0]]), "edge_index"),
        (None, [np.ma.masked_array([0, 1], mask=[0, 1]), np.array([1, 0])], "edge_index"),
        (None, iter([np.ma.masked_array([[0, 1], [1, 0]], mask=[[0, 1], [0, 0]])]), "edge_index"),
    ],
)
def test_masked_edges_are_not_stored(tmp_path: Path, indptr: Any, indices: Any, name: str) -> None:
    path = tmp_path / "g"
    with pytest.raises(TypeError, match=f"^(block 0 of )?{name}: .* masked, and masks are not kept"):
        if indptr is None:
            featstore.OutOfCoreGraph.from_edge_index(path, indices, 2, progress=False)
        else:
            featstore.OutOfCoreGraph.create(path, indptr, indices, progress=False)
    assert not path.exists()


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda g: featstore.partition(g, method=MASKED % 3, progress=False), "the parts"),
        (lambda g: g.cache("x", "5KiB", policy="frequency", counts=MASKED), "counts"),
        (lambda g: featstore.PartitionBatches(g, np.arange(9), 3, MASKED % 3), "parts"),
        (lambda g: as_sampled((np.ma.masked_array([0, 1], mask=[0, 1]), [([], [], 2, 2)]), N, 0, 0), "ids"),
    ],
)
def test_masked_arrays_of_nodes(g: Any, use: Callable[[Any], object], name: str) -> None:
    refuses((TypeError, PluginError), f"{name}: .* masked, and masks are not kept", lambda: use(g))


def test_run_files_where_no_directory_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, where a parent that others remove is made again."""
    monkeypatch.setattr(rundir, "_MOST_TRIES", 3)
    refuses(FileNotFoundError, "/proc", lambda: rundir.RunDirectory("/proc"))


def test_the_package_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "featstore", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("featstore ")
