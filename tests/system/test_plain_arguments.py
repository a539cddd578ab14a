"""Integers and booleans of any make, at every door: NumPy's and torch's are as Python's; all else is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.estimate.redundancy import redundancy
from featstore.inference.layers import Aggregate
from tests.support.refusing import refuses

pytestmark = pytest.mark.shares_resources  # the graph outlives a test, and opens files in it

N = 60


@pytest.fixture(scope="module")
def g(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("data") / "g"
    indptr, indices = np.arange(0, 3 * N + 1, 3), np.arange(3 * N) % N
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": np.ones((N, 4), np.float32)}, progress=False).close()
    with featstore.open(path, memory="16MiB") as opened:
        featstore.partition(opened, 4, name="p", progress=False)
        yield opened


def neighbor(g: Any, **options: Any) -> Any:
    return featstore.NeighborSampler(g, [2], **options)


def load(g: Any, **options: Any) -> None:
    with featstore.Loader(g, neighbor(g), **({"seeds": np.arange(9), "batch_size": 3, "labels": None} | options)) as loader:
        assert sum(len(batch.seeds) for batch in loader) == 9
        loader.state_dict()


def load_from(g: Any, epoch: Any) -> None:
    with featstore.Loader(g, neighbor(g), np.arange(9), 3, labels=None) as loader:
        loader.set_epoch(epoch)
        assert repr(loader.state_dict()["epoch"]) == "2"


def offline(g: Any, **options: Any) -> None:
    options = {"batch_size": 3, "overwrite": True, "progress": False} | options
    featstore.sample_offline(g, neighbor(g), np.arange(9), path=f"{g.path}.pack", **options)
    featstore.Pack(f"{g.path}.pack")  # its record can be read


def made(g: Any, **options: Any) -> None:
    edges = np.array([[0, 1], [1, 2]])
    options = {"num_nodes": 3, "overwrite": True, "progress": False} | options
    featstore.OutOfCoreGraph.from_edge_index(f"{g.path}.made", edges, **options).close()


def partition(g: Any, **options: Any) -> None:
    featstore.partition(g, **{"n_parts": 4, "name": "q", "progress": False} | options)
    shown = repr(g.parts().get("q"))
    assert "np." not in shown
    assert "tensor" not in shown


def aggregate(g: Any, **options: Any) -> None:
    g.aggregate("x", name="a", **{"overwrite": True, "progress": False} | options)


def infer(g: Any, **options: Any) -> None:
    featstore.infer(g, [Aggregate(lambda h, mean: mean)], "x", "i", **{"overwrite": True, "progress": False} | options)


def opened(g: Any, **options: Any) -> None:
    featstore.open(g.path, memory="16MiB", **options).close()


SAMPLERS: dict[str, Callable[..., Any]] = {
    "neighbor": neighbor,
    "labor": lambda g, **options: featstore.LaborSampler(g, [2], **options),
    "layer": lambda g, **options: featstore.LayerSampler(g, [2], **options),
    "shadow": lambda g, **options: featstore.ShadowSampler(g, [2], **options),
    "epoch": lambda g, **options: featstore.EpochSampler(g, [2], **options),
    "epoch labor": lambda g, **options: featstore.EpochSampler(g, [2], draws="labor", **options),
}
random_batches = lambda g, **options: featstore.RandomBatches(np.arange(9), **{"batch_size": 3} | options).digest()  # noqa: E731
partition_batches = lambda g, **options: featstore.PartitionBatches(  # noqa: E731
    g, np.arange(9), **{"batch_size": 3, "parts": "p"} | options
).digest()
part_batches = lambda g, **options: featstore.PartBatches(  # noqa: E731
    featstore.partition(g, 3, "ldg", np.arange(9), hops=1, keep=False, progress=False),
    np.arange(9),
    **{"batch_size": 3} | options,
).digest()
redundant = lambda g, **options: redundancy(  # noqa: E731
    g, np.arange(9), **{"batch_size": 3, "samplers": {"s": neighbor(g)}, "parts": ["p"]} | options
)
lookahead = lambda g, strategy, **options: load(g, strategy=strategy(cache=0.5, **options))  # noqa: E731
cache_neighbors = lambda g, **options: g.cache_neighbors("8KiB", **{"progress": False} | options)  # noqa: E731

# Door and argument: what takes it, a value that is right, and the least one; None where there is no least.
INTEGERS: dict[str, tuple[Callable[[Any, Any], Any], int, int | None]] = {
    "Loader/batch_size": (lambda g, n: load(g, batch_size=n), 2, 1),
    "Loader/seed": (lambda g, n: load(g, seed=n), 3, 0),
    "Loader/prefetch": (lambda g, n: load(g, prefetch=n), 1, 0),
    "Loader/threads": (lambda g, n: load(g, threads=n), 2, 1),
    "Loader of a stage/threads": (lambda g, n: load(g, threads={"gather": n}), 2, 1),
    "set_epoch/epoch": (load_from, 2, 0),
    "Superbatch/number of batches": (lambda g, n: lookahead(g, featstore.Superbatch, length=n), 2, 1),
    "sample_offline/batch_size": (lambda g, n: offline(g, batch_size=n), 2, 1),
    "sample_offline/epochs": (lambda g, n: offline(g, epochs=n), 2, 1),
    "sample_offline/seed": (lambda g, n: offline(g, seed=n), 2, 0),
    "sample_offline/threads": (lambda g, n: offline(g, threads=n), 2, 1),
    "from_edge_index/num_nodes": (lambda g, n: made(g, num_nodes=n), 5, 0),
    "partition/n_parts": (lambda g, n: partition(g, n_parts=n), 3, 1),
    "partition/seed": (lambda g, n: partition(g, seed=n), 3, 0),
    "partition/passes": (lambda g, n: partition(g, passes=n), 2, 1),
    "partition of ldg/passes": (lambda g, n: partition(g, method="ldg", passes=n), 2, 1),
    "aggregate/hops": (lambda g, n: aggregate(g, hops=n), 2, 1),
    "open/threads": (lambda g, n: opened(g, threads=n), 2, 1),
    "cache/seed": (lambda g, n: g.cache("x", "5KiB", policy="random", seed=n), 2, 0),
    "cache_neighbors/seed": (lambda g, n: cache_neighbors(g, seed=n), 2, 0),
    "take/coalesce_gap": (lambda g, n: g.features["x"].take([1], coalesce_gap=n), 4096, 0),
    "History/dim": (lambda g, n: featstore.History(n), 4, 1),
    "History/staleness": (lambda g, n: featstore.History(4, staleness=n), 4, 0),
    "simulate/capacity": (lambda g, n: featstore.simulate([[0, 1], [2, 0]], n), 4, 0),
    "simulate/seed": (lambda g, n: featstore.simulate([[0, 1], [2, 0]], 1, "random", seed=n), 4, 0),
    "partition/hops": (lambda g, n: partition(g, method="ldg", train_idx=np.arange(9), hops=n), 2, 1),
    "partition/visits": (lambda g, n: partition(g, method="ldg", train_idx=np.arange(9), hops=1, visits=n), 2, 0),
    "PartBatches/batch_size": (lambda g, n: part_batches(g, batch_size=n), 3, 1),
    "PartBatches/seed": (lambda g, n: part_batches(g, seed=n), 2, 0),
    "RandomBatches/batch_size": (lambda g, n: random_batches(g, batch_size=n), 2, 1),
    "RandomBatches/seed": (lambda g, n: random_batches(g, seed=n), 2, 0),
    "PartitionBatches/batch_size": (lambda g, n: partition_batches(g, batch_size=n), 2, 1),
    "PartitionBatches/seed": (lambda g, n: partition_batches(g, seed=n), 2, 0),
    "PartitionBatches/macro": (lambda g, n: partition_batches(g, macro=n), 2, 1),
    "redundancy/batch_size": (lambda g, n: redundant(g, batch_size=n), 2, 1),
    "redundancy/seed": (lambda g, n: redundant(g, seed=n), 2, 0),
    "redundancy/macro": (lambda g, n: redundant(g, macro=n), 2, 1),
    "redundancy/n_batches": (lambda g, n: redundant(g, n_batches=n), 2, 1),
    **{f"{name}/seed": (lambda g, n, make=make: make(g, seed=n), 3, 0) for name, make in SAMPLERS.items()},
    "labor/batch_dependency": (lambda g, n: SAMPLERS["labor"](g, batch_dependency=n), 2, 1),
    "labor/importance_sampling": (lambda g, n: SAMPLERS["labor"](g, importance_sampling=n), 1, -1),
    "shadow/layers": (lambda g, n: SAMPLERS["shadow"](g, layers=n), 3, 1),
    "epoch/window": (lambda g, n: SAMPLERS["epoch"](g, window=n), 3, 1),
    "neighbor/fan": (lambda g, n: featstore.NeighborSampler(g, [n]), 3, -1),
    "layer/layer": (lambda g, n: featstore.LayerSampler(g, [n]), 3, 1),
}
TYPES: list[Callable[[int], Any]] = [np.int64, np.int32, np.uint16, torch.tensor, np.array]
NOT_INTEGERS: list[Callable[[int], Any]] = [
    lambda n: True,
    lambda n: np.bool_(True),
    lambda n: torch.tensor(True),
    lambda n: str(n),
    lambda n: "no",
    lambda n: float(n),
    lambda n: torch.tensor(float(n)),
    lambda n: np.array([n]),
    lambda n: torch.tensor([n]),
]


@pytest.mark.parametrize("door", INTEGERS)
def test_integers(g: Any, door: str) -> None:
    use, good, least = INTEGERS[door]
    name = door.split("/")[1]
    for kind in TYPES:
        use(g, kind(good))
    for make in NOT_INTEGERS:
        refuses((TypeError, ValueError), name, lambda: use(g, make(good)))
    for low in (least - 1, np.int64(least - 1), -(2**40)):
        refuses(ValueError, name, lambda: use(g, low))


@pytest.mark.parametrize(
    ("door", "value"),
    [
        ("aggregate/hops", 2**31),
        ("partition/n_parts", 2**31),
        ("labor/batch_dependency", 2**32 + 1),
        ("neighbor/fan", 2**31),
        ("layer/layer", 2**31),
        ("neighbor/seed", 2**64),
    ],
)
def test_integers_that_are_too_large(g: Any, door: str, value: int) -> None:
    """Before anything is allocated."""
    refuses(ValueError, door.split("/")[1], lambda: INTEGERS[door][0](g, value))


FLAGS: dict[str, Callable[[Any, Any], Any]] = {
    "Loader/shuffle": lambda g, flag: load(g, shuffle=flag),
    "Loader/drop_last": lambda g, flag: load(g, drop_last=flag),
    "RandomBatches/shuffle": lambda g, flag: random_batches(g, shuffle=flag),
    "RandomBatches/drop_last": lambda g, flag: random_batches(g, drop_last=flag),
    "PartBatches/shuffle": lambda g, flag: part_batches(g, shuffle=flag),
    "PartBatches/drop_last": lambda g, flag: part_batches(g, drop_last=flag),
    "PartitionBatches/shuffle": lambda g, flag: partition_batches(g, shuffle=flag),
    "PartitionBatches/drop_last": lambda g, flag: partition_batches(g, drop_last=flag),
    "sample_offline/shuffle": lambda g, flag: offline(g, shuffle=flag),
    "sample_offline/drop_last": lambda g, flag: offline(g, drop_last=flag),
    "sample_offline/overwrite": lambda g, flag: offline(g, overwrite=flag),
    "sample_offline/progress": lambda g, flag: offline(g, progress=flag),
    "from_edge_index/overwrite": lambda g, flag: made(g, overwrite=flag),
    "from_edge_index/progress": lambda g, flag: made(g, progress=flag),
    "partition/keep": lambda g, flag: partition(g, keep=flag),
    "partition/keep_lists": lambda g, flag: partition(g, keep_lists=flag),
    "partition/progress": lambda g, flag: partition(g, progress=flag),
    "aggregate/overwrite": lambda g, flag: aggregate(g, overwrite=flag),
    "aggregate/progress": lambda g, flag: aggregate(g, progress=flag),
    "infer/overwrite": lambda g, flag: infer(g, overwrite=flag),
    "infer/progress": lambda g, flag: infer(g, progress=flag),
    "Aggregate/needs_self": lambda g, flag: Aggregate(max, needs_self=flag),
    "cache_neighbors/edges": lambda g, flag: cache_neighbors(g, edges=flag),
    "cache_neighbors/save": lambda g, flag: cache_neighbors(g, save=flag),
    "cache_neighbors/progress": lambda g, flag: cache_neighbors(g, progress=flag),
    "verify/progress": lambda g, flag: g.verify(progress=flag),
    "convert/progress": lambda g, flag: featstore.convert(g.path, "csc", progress=flag),
    "History/gradients": lambda g, flag: featstore.History(4, gradients=flag),
    **{
        f"{kind}/{name}": lambda g, flag, kind=kind, name=name: SAMPLERS[kind](g, **{name: flag})
        for kind, names in {
            "neighbor": ["replace", "redraw", "edges"],
            "labor": ["layer_dependency", "redraw", "edges"],
            "layer": ["skip", "replace", "edges"],
            "shadow": ["replace", "edges"],
            "epoch": ["replace", "redraw", "edges"],
            "epoch labor": ["layer_dependency", "redraw", "edges"],
        }.items()
        for name in names
    },
}


@pytest.mark.parametrize("door", FLAGS)
def test_flags(g: Any, door: str) -> None:
    for flag in (np.bool_(True), np.bool_(False)):
        if (door, bool(flag)) not in {
            ("sample_offline/overwrite", False),
            ("from_edge_index/overwrite", False),
            ("aggregate/overwrite", False),
            ("infer/overwrite", False),
            ("partition/keep", False),
        }:
            FLAGS[door](g, flag)
    for wrong in ("no", "yes", 1, 0, None, np.int64(1), torch.tensor(True), []):
        refuses(TypeError, f"{door.split('/')[1]} must be True or False", lambda: FLAGS[door](g, wrong))
