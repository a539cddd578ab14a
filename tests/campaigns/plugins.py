"""Plug-ins that lie: for each kind that users may write, a right one, and all the ways in which its contract can be broken.

A lie must end in an error that names the plug-in, or in what the right plug-in gives, bit for bit. The plug-in's own exception
may arrive as it was raised: its traceback ends in the plug-in. What no check can tell, another answer that the contract allows,
is marked: rows and labels must then be those of the ids that were delivered.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import featstore
from featstore.errors import FeatstoreError
from featstore.graph.feature import FeatureStore
from featstore.sampling.batch import NodeCopies, SampledBatch
from featstore.storage.reader import MAX_ENGINES
from featstore.storage.rowfile import ReadStats
from featstore.strategies.base import Batch
from tests.support.graphs import make_graph
from tests.support.library_threads import remaining
from tests.support.loaders import make_loader

__all__ = ["KINDS", "Case", "Graph", "Outcome", "attempt", "cases", "opened"]

N, BATCH, N_BATCHES = 200, 8, 5
NAME = "Liar"  # what every class that lies is called
INDPTR, INDICES = make_graph(N, 40.0)
ROWS = np.random.default_rng(0).standard_normal((N, 5)).astype(np.float32)
EDGE_ROWS = np.random.default_rng(1).standard_normal((len(INDICES), 2)).astype(np.float32)
LABELS = np.arange(N) % 7
SEEDS = np.random.default_rng(2).permutation(N)[: BATCH * N_BATCHES]
ASKED = [np.random.default_rng(each).integers(0, N, 40) for each in range(12)]


class OwnError(Exception):
    """The exception of a plug-in's author."""


class Unspeakable(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class NoArray:
    """Breaks when it is turned into an array, or into a number."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise OwnError("no array")

    def __len__(self) -> int:
        raise OwnError("no length")

    def __index__(self) -> int:
        raise OwnError("no number")

    def __iter__(self) -> Any:
        raise OwnError("no iterator")


class WrongError(Exception):
    """A result is wrong."""


def expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise WrongError(what)


def raising(error: Callable[[], BaseException]) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error()

    return call


ERRORS: dict[str, Callable[[], BaseException]] = {
    "its own error": lambda: OwnError("of mine"),
    "an error without words": Unspeakable,
    "KeyError": lambda: KeyError("x"),
    "IndexError": lambda: IndexError("x"),
    "AttributeError": lambda: AttributeError("x"),
    "AssertionError": AssertionError,
    "StopIteration": lambda: StopIteration(3),
    "RecursionError": RecursionError,
}

# What is answered where something else is asked for.
NO_ANSWERS: dict[str, Any] = {
    "None": None,
    "a number": 3,
    "a negative number": -5,
    "NaN": float("nan"),
    "a huge number": 2**80,
    "text": "many",
    "an object": object(),
    "a dictionary": {},
    "a class": OwnError,
    "an empty tuple": (),
    "what cannot be read": NoArray(),
}

# What becomes of an array of integers, an entry for each of something, in [0, limit).
RIGHT_FORMS = {"a list", "a tensor", "read-only", "strided", "of another byte order", "narrower or wider"}
Array = Any
ARRAYS: dict[str, Callable[[Array, int], Any]] = {
    "a list": lambda a, limit: a.tolist(),
    "a tensor": lambda a, limit: torch.from_numpy(a.copy()),
    "read-only": lambda a, limit: read_only(a),
    "strided": lambda a, limit: np.repeat(a, 2)[::2],
    "of another byte order": lambda a, limit: a.astype(a.dtype.newbyteorder(">")),
    "narrower or wider": lambda a, limit: a.astype(np.int16 if a.dtype.itemsize > 2 else np.int64),
    "floats": lambda a, limit: a.astype(np.float64),
    "NaN in floats": lambda a, limit: np.full(a.shape, np.nan),
    "bool": lambda a, limit: np.ones(a.shape, bool),
    "complex": lambda a, limit: a.astype(complex),
    "objects": lambda a, limit: np.array([object()] * len(a), object),
    "texts": lambda a, limit: np.array(["x"] * len(a)),
    "dates": lambda a, limit: np.full(a.shape, np.datetime64("2020-01-01")),
    "two dimensions": lambda a, limit: a.reshape(-1, 1),
    "no dimension": lambda a, limit: np.array(3),
    "more than asked for": lambda a, limit: np.concatenate([a, a[:1], a[:1]]),
    "fewer than asked for": lambda a, limit: a[:-1],
    "nothing": lambda a, limit: a[:0],
    "out of range": lambda a, limit: changed(a, limit),
    "far out of range": lambda a, limit: changed(a.astype(np.int64), 2**62),
    "beyond int64": lambda a, limit: changed(a.astype(np.uint64), 2**63 + 5),
    "wraps round in 32 bits": lambda a, limit: changed(a.astype(np.int64), 2**32),
    "negative": lambda a, limit: changed(a, -1),
    "repeated": lambda a, limit: np.zeros_like(a),
    "ragged": lambda a, limit: [[1], [1, 2]],
    "a generator": lambda a, limit: (each for each in a.tolist()),
    "a tensor that needs a gradient": lambda a, limit: torch.from_numpy(a.astype(np.float32)).requires_grad_(),
    "a sparse tensor": lambda a, limit: torch.from_numpy(a.copy()).to_sparse(),
    "a tensor without values": lambda a, limit: torch.empty(len(a), dtype=torch.int64, device="meta"),
    **{name: (lambda a, limit, value=value: value) for name, value in NO_ANSWERS.items()},
    **{name: raising(error) for name, error in ERRORS.items()},
}


def read_only(array: Array) -> Array:
    found = array.copy()
    found.flags.writeable = False
    return found


def changed(array: Array, value: int) -> Array:
    found = array.copy()
    found[len(found) // 2] = value
    return found


@dataclass(frozen=True)
class Case:
    """A lie: ``make()`` gives the plug-in, an object or a class. ``other``: what is answered is a right answer to something."""

    kind: str
    name: str
    make: Callable[[], Any]
    other: bool = False


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def liar(base: type, **members: Any) -> type:
    """Make a class of the name that errors must have."""
    return type(NAME, (base,), {"__module__": "somewhere", **members})


def attributes(kind: str, base: type, *names: str) -> Iterator[Case]:
    """Lie in attributes: a value that is none, a property that raises."""
    for name in names:
        for what, value in NO_ANSWERS.items():
            yield Case(kind, f"{name} is {what}", lambda name=name, value=value: liar(base, **{name: value}))
        for what, error in ERRORS.items():
            yield Case(
                kind, f"{name} raises {what}", lambda name=name, error=error: liar(base, **{name: property(raising(error))})
            )


def methods(kind: str, base: type, *names: str) -> Iterator[Case]:
    """Lie in methods: they raise, take nothing, are not there; an answer is looked at by other tables."""
    for name in names:
        for what, error in ERRORS.items():
            yield Case(kind, f"{name} raises {what}", lambda name=name, error=error: liar(base, **{name: raising(error)}))
        yield Case(kind, f"{name} takes nothing", lambda name=name: liar(base, **{name: taking_nothing(name)}))
        yield Case(kind, f"{name} is None", lambda name=name: liar(base, **{name: None}))


def taking_nothing(name: str) -> Callable[[], None]:
    def call() -> None: ...

    call.__qualname__ = f"{NAME}.{name}"  # as Python says it of a method
    return call


def answers(kind: str, base: type, method: str, wanted: Callable[[Any], Array] = np.asarray, limit: int = N) -> Iterator[Case]:
    """Lie in the array that a method returns."""
    for what, spoil in ARRAYS.items():
        other = what == "repeated" and kind == "partitioner"

        def answer(self: Any, *given: Any, spoil: Any = spoil) -> Any:
            return spoil(wanted(getattr(base, method)(self, *given)), limit)

        yield Case(kind, f"{method} returns {what}", lambda answer=answer: liar(base, **{method: answer}), other)


def made_wrongly(kind: str, base: type) -> Iterator[Case]:
    yield Case(kind, "cannot be made", lambda: liar(base, __init__=raising(ERRORS["its own error"])))
    yield Case(kind, "needs arguments", lambda: liar(base, __init__=lambda self, size: None))
    for what, value in (("None", None), ("a number", 3), ("an error", property(raising(ERRORS["KeyError"])))):
        yield Case(kind, f"its name is {what}", lambda value=value: liar(base, name=value))


# --- the graph, and what must be as before --------------------------------------------------------------------------------------


class Graph:
    """An open dataset, a folder, and what is held."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        featstore.OutOfCoreGraph.create(
            folder / "g", INDPTR, INDICES, {"x": ROWS}, {"y": LABELS}, edge_features={"w": EDGE_ROWS}, progress=False
        ).close()
        self.g = featstore.open(folder / "g", memory="16MB", threads=2)
        self.engines = [self.g.reader.engine(1) for _ in range(MAX_ENGINES)]
        for each in self.engines:
            each.__enter__()
        for each in self.engines:
            each.__exit__(None, None, None)
        self.right: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        self.g.cache("x", 0)
        self.g.cache_neighbors(0, progress=False)
        self.g.pool.trim()
        return {
            "memory": {key: size for key, size in self.g.memory_report().items() if key != "sampler scratch"},
            "threads": sorted(each.name for each in threading.enumerate()),
            "files": sorted(os.listdir(self.folder)),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def close(self) -> None:
        self.g.close()


# --- policies -------------------------------------------------------------------------------------------------------------------


class Static(featstore.StaticPolicy):
    def scores(self, context: featstore.PolicyContext) -> Any:
        return np.array(context.out_degree)


def of_rows(graph: Graph, policy: Any) -> Any:
    """Read through a cache of a policy, filled once or row by row; its memory is taken back in between."""
    graph.g.cache("x", "2600B", policy=policy)
    store, found = graph.g.features["x"], []
    for ids in ASKED:
        found.append(store[ids].numpy())
        expect(np.array_equal(found[-1], ROWS[ids]), "wrong rows")
    return found


def of_lists(graph: Graph, policy: Any) -> Any:
    """Sample through a cache of neighbour lists."""
    graph.g.cache_neighbors("20000B", policy=policy, progress=False)
    sampler = featstore.NeighborSampler(graph.g, [4, 3], seed=3)
    return [[each.numpy() for each in sampler.sample(torch.arange(n, n + 9)).tensors] for n in range(0, 100, 9)]


def statics(kind: str) -> Iterator[Case]:
    yield from answers(kind, Static, "scores")
    if kind == "lists":
        yield from answers(kind, Static, "list_scores")
    yield from made_wrongly(kind, Static)
    yield from methods(kind, Static, "scores")
    names = ("list_score_bytes", "from_degrees") if kind == "lists" else ()
    yield from attributes(kind, Static, "score_bytes", "needs_parts", "needs_counts", *names)
    kept: list[Array] = []

    def keeps(self: Any, context: Any) -> Any:
        kept.append(np.array(context.out_degree))
        for each in kept[:-1]:
            each[:] = -1
        return kept[-1]

    def writes(self: Any, context: Any) -> Any:
        context.out_degree[:] = 0
        return context.out_degree

    yield Case(kind, "changes what it returned before", lambda: liar(Static, scores=keeps))
    yield Case(kind, "writes to the degrees", lambda: liar(Static, scores=writes))
    yield Case(
        kind,
        "scores differ each time",
        lambda: liar(Static, scores=lambda self, context: np.random.default_rng().random(context.n)),
    )


class Fifo(featstore.OnlinePolicy):
    def start(self, capacity: int, context: featstore.PolicyContext) -> None:
        self.capacity, self.order = capacity, list[int]()

    def hit(self, slots: Any) -> None:
        pass

    def victims(self, n: int) -> Any:
        found, self.order = self.order[:n], self.order[n:]
        return np.array(found, np.int32)

    def insert(self, rows: Any, slots: Any) -> None:
        self.order += slots.tolist()


def onlines() -> Iterator[Case]:
    kind = "online"
    yield from answers(kind, Fifo, "victims")
    yield from made_wrongly(kind, Fifo)
    yield from methods(kind, Fifo, "start", "hit", "victims", "insert")
    yield from attributes(kind, Fifo, "nbytes", "slot_bytes", "groups")
    kept: list[Array] = []

    def keeps(self: Any, n: int) -> Any:
        kept.append(Fifo.victims(self, n))
        for each in kept[:-1]:
            each[:] = 10**6
        return kept[-1]

    def second(self: Any, n: int) -> Any:
        self.times = getattr(self, "times", 0) + 1
        return Fifo.victims(self, n) if self.times < 2 else np.zeros(n, np.int32)

    def writes(self: Any, *arrays: Any) -> None:
        for each in arrays:
            each.fill(0)

    yield Case(kind, "changes victims later", lambda: liar(Fifo, victims=keeps))
    yield Case(
        kind, "evicts what is not there", lambda: liar(Fifo, insert=lambda self, rows, slots: self.order.extend([7] * len(rows)))
    )
    yield Case(kind, "evicts the same again", lambda: liar(Fifo, victims=lambda self, n: np.arange(n)))
    yield Case(kind, "differs the second time", lambda: liar(Fifo, victims=second))
    yield Case(kind, "writes to hits", lambda: liar(Fifo, hit=writes))
    yield Case(kind, "writes to rows and slots", lambda: liar(Fifo, insert=writes))
    yield Case(kind, "calls the cache again", lambda: liar(Fifo, hit=lambda self, slots: self.victims(1) and None))


# --- samplers -------------------------------------------------------------------------------------------------------------------


class Sampler:
    fanouts = (4, 3)

    def __init__(self) -> None:
        self.own = featstore.NeighborSampler(OPEN.g, [4, 3], seed=3, edges=True)

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        return self.own.sample(seeds, epoch, index)


def delivered(graph: Graph, loader: featstore.Loader[Any]) -> Any:
    """Run two epochs; rows, edges' rows and labels are those of the ids that come."""
    found = []
    with loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                ids = batch.input_ids.numpy()
                expect(np.array_equal(batch.x.numpy(), ROWS[ids]), "wrong rows")
                expect(np.array_equal(batch.y.numpy(), LABELS[batch.seeds.numpy()]), "wrong labels")
                arrays = [ids, batch.seeds.numpy(), batch.x.numpy(), batch.y.numpy()]
                for block, rows in zip(batch.blocks, batch.edge_features.get("w", ()), strict=False):
                    expect(np.array_equal(rows.numpy(), EDGE_ROWS[block.edge_pos.numpy()]), "wrong rows of edges")
                    arrays.append(rows.numpy())
                found.append([batch.index, *arrays, *(each.numpy().copy() for block in batch.blocks for each in block.tensors)])
                del batch
    return [[each if isinstance(each, int) else each.copy() for each in batch] for batch in found]


OPTIONS: dict[str, Any] = {"features": "x", "labels": "y", "batch_size": BATCH, "seed": 1}


def sampled(**options: Any) -> Callable[[Graph, Any], Any]:
    def use(graph: Graph, sampler: Any) -> Any:
        made = sampler() if isinstance(sampler, type) else sampler
        return delivered(graph, make_loader(graph.g, made, SEEDS, **OPTIONS, **options))

    return use


def answer_of(spoil: Callable[[SampledBatch], Any], at: int = 0) -> Callable[[], Any]:
    """A sampler whose batches are spoiled from number ``at`` on."""

    def sample(self: Any, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
        batch = Sampler.sample(self, seeds, epoch, index)
        return spoil(batch) if index >= at else batch

    return lambda: liar(Sampler, sample=sample)


def with_block(**given: Any) -> Callable[[SampledBatch], Any]:
    """Exchange fields of the outermost block."""

    def spoil(batch: SampledBatch) -> Any:
        block = batch.blocks[0]
        values = {name: value(getattr(block, name)) for name, value in given.items()}
        return replace(batch, blocks=(replace(block, **values), *batch.blocks[1:]))

    return spoil


def samplers(kind: str = "sampler") -> Iterator[Case]:
    for what, value in NO_ANSWERS.items():
        yield Case(kind, f"returns {what}", answer_of(lambda batch, value=value: value, 2))
        yield Case(
            kind,
            f"blocks are {what}",
            answer_of(lambda batch, value=value: replace(batch, blocks=value), 2),
            what == "an empty tuple",
        )
        yield Case(
            kind, f"a block is {what}", answer_of(lambda batch, value=value: replace(batch, blocks=(value, batch.blocks[1])), 2)
        )
        yield Case(kind, f"copies are {what}", answer_of(lambda batch, value=value: replace(batch, copies=value), 2))
        for name in ("n_src", "n_dst"):
            yield Case(kind, f"{name} is {what}", answer_of(with_block(**{name: lambda _, value=value: value}), 2))
        yield Case(kind, f"n_seeds is {what}", answer_of(lambda batch, value=value: replace(batch, n_seeds=value), 2))
        yield Case(kind, f"its index is {what}", answer_of(lambda batch, value=value: replace(batch, index=value), 2))
        yield Case(
            kind,
            f"a pair with {what}",
            answer_of(lambda batch, value=value: (batch.input_ids, value), 2),
            what == "an empty tuple",
        )
        if what != "a class":  # which is called
            yield Case(kind, f"sample is {what}", lambda value=value: liar(Sampler, sample=value))
        for name in ("fanouts", "disjoint", "graph", "num_nodes"):
            yield Case(kind, f"{name} is {what}", lambda name=name, value=value: liar(Sampler, **{name: value}))
        for name in ("node", "row", "edge_index", "num_sampled_nodes", "num_sampled_edges", "batch"):
            yield Case(kind, f"in PyG's form {name} is {what}", answer_of(pyg(name, value), 2), name == "batch")
        yield Case(
            kind, f"DGL's block gives {what}", answer_of(lambda batch, value=value: (batch.input_ids, None, [dgl(value)]), 2)
        )
    for what, spoil in ARRAYS.items():
        for name in ("src", "dst", "edge_pos", "weight"):
            lies = with_block(**{name: lambda a, spoil=spoil: spoil(np.arange(20) if a is None else a.numpy(), N)})
            other = name == "edge_pos" or (name in ("src", "dst") and what == "repeated")
            yield Case(kind, f"{name} is {what}", answer_of(lies, 2), other)
        lies = lambda batch, spoil=spoil: replace(batch, input_ids=spoil(batch.input_ids.numpy(), N))  # noqa: E731
        yield Case(kind, f"ids are {what}", answer_of(lies, 2))
        copies = lambda batch, spoil=spoil: replace(  # noqa: E731
            batch, copies=NodeCopies(spoil(np.arange(len(batch.input_ids)), N), spoil(np.arange(len(batch.input_ids)), N))
        )
        yield Case(kind, f"copies have {what}", answer_of(copies, 2))
    yield from methods(kind, Sampler, "sample")
    yield Case(kind, "has no sample", lambda: object.__new__(liar(object)))
    yield Case(kind, "a hop is missing", answer_of(lambda batch: replace(batch, blocks=batch.blocks[1:]), 2))
    yield Case(kind, "a hop too many", answer_of(lambda batch: replace(batch, blocks=batch.blocks[:1] + batch.blocks), 2))
    yield Case(kind, "hops in another order", answer_of(lambda batch: replace(batch, blocks=batch.blocks[::-1]), 2))
    yield Case(kind, "it has no hops", answer_of(lambda batch: replace(batch, blocks=()), 2), True)
    yield Case(kind, "edges in another order", answer_of(with_block(src=lambda a: a.flip(0), dst=lambda a: a.flip(0)), 2), True)
    yield Case(kind, "another batch", answer_of(lambda batch: OTHER.own.sample(batch.seeds, 9, 9), 2), True)
    yield Case(
        kind,
        "other seeds",
        answer_of(lambda batch: OTHER.own.sample(batch.seeds + 1 - 2 * (batch.seeds == N - 1), 0, 0), 2),
        True,
    )
    yield Case(kind, "other epochs", answer_of(lambda batch: replace(batch, epoch=7), 2))
    kept: list[SampledBatch] = []

    def keeps(batch: SampledBatch) -> Any:
        kept.append(batch)
        for each in kept[:-1]:
            for tensor in each.tensors:
                tensor.fill_(10**6)
        return batch

    def writes(self: Any, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
        batch = Sampler.sample(self, seeds, epoch, index)
        seeds.fill_(3)
        return batch

    yield Case(kind, "changes batches later", answer_of(keeps))
    yield Case(kind, "writes to the seeds", lambda: liar(Sampler, sample=writes))


def pyg(name: str, value: Any) -> Callable[[SampledBatch], Any]:
    def spoil(batch: SampledBatch) -> Any:
        blocks = batch.blocks
        edges = [len(blocks[1].src), len(blocks[0].src) - len(blocks[1].src)]
        nodes = [batch.n_seeds, blocks[1].n_src - batch.n_seeds, len(batch.input_ids) - blocks[1].n_src]
        given = {
            "node": batch.input_ids,
            "row": blocks[0].src,
            "col": blocks[0].dst,
            "num_sampled_nodes": nodes,
            "num_sampled_edges": edges,
            name: value,
        }
        return type(NAME, (SimpleNamespace,), {})(**given)

    return spoil


def dgl(value: Any) -> Any:
    return SimpleNamespace(edges=lambda: value, num_src_nodes=lambda: value, num_dst_nodes=lambda: value)


# --- strategies -----------------------------------------------------------------------------------------------------------------


class Epoch(featstore.EpochRun):
    threads = 2  # type: ignore[assignment]

    def __init__(self, context: featstore.Context, epoch: int) -> None:
        self.context, self.order = context, context.batches.epoch(epoch)

    def batch(self, position: int) -> Any:
        return Batch(position, self.order.sample(position))


class Runner(featstore.Runner):
    epoch_class: Any = Epoch

    def prepare(self, epoch: int, start: int) -> Any:
        return self.epoch_class(self.context, epoch)


class Strategy(featstore.Strategy):
    def run(self, context: featstore.Context) -> Any:
        return Runner(context)


def of_strategy(graph: Graph, strategy: Any) -> Any:
    loader = featstore.Loader(graph.g, Sampler(), SEEDS, **OPTIONS, strategy=strategy)
    try:
        loader.stats()
        return delivered(graph, loader)
    finally:
        loader.close()


def with_runner(**members: Any) -> Callable[[], Any]:
    made = type("ItsRunner", (Runner,), members)
    return lambda: liar(Strategy, run=lambda self, context: made(context))


def with_epoch(**members: Any) -> Callable[[], Any]:
    return with_runner(epoch_class=type("ItsEpoch", (Epoch,), members))


def batches(spoil: Callable[[Any, Batch], Any]) -> Callable[[], Any]:
    return with_epoch(batch=lambda self, position: spoil(self, Epoch.batch(self, position)))


def within(spoil: Callable[[SampledBatch], Any]) -> Callable[[], Any]:
    return batches(lambda self, batch: Batch(batch.position, spoil(batch.sampled)))


def strategies(kind: str = "strategy") -> Iterator[Case]:
    yield from made_wrongly(kind, Strategy)
    yield from methods(kind, Strategy, "run", "batches")
    from featstore.gather.plan import BatchPlan, Changeset, DeviceRows, Tier, TierRows

    nothing = np.empty(0, np.int64)
    for what, value in NO_ANSWERS.items():
        yield Case(kind, f"run returns {what}", lambda value=value: liar(Strategy, run=lambda self, context: value))
        yield Case(kind, f"brings {what} for batches", lambda value=value: liar(Strategy, batches=lambda self, *_, **__: value))
        yield Case(kind, f"prepares {what}", with_runner(prepare=lambda self, epoch, start, value=value: value))
        yield Case(kind, f"statistics are {what}", with_runner(stats=lambda self, value=value: value))
        for name in ("context", "memory", "prefetch"):

            def made(self: Any, context: Any, name: str = name, value: Any = value) -> None:
                Runner.__init__(self, context)
                setattr(self, name, value)

            yield Case(kind, f"{name} is {what}", with_runner(__init__=made), name == "prefetch")
        yield Case(kind, f"threads are {what}", with_epoch(threads=value))
        for name in ("batch", "plan", "may_begin", "passed", "release"):
            yield Case(kind, f"{name} returns {what}", with_epoch(**{name: lambda self, *_, value=value: value}))
        yield Case(kind, f"a plan is {what}", with_epoch(plan=lambda self, name, batch, value=value: (value, {})))
        yield Case(kind, f"sources are {what}", with_epoch(plan=lambda self, name, batch, value=value: (None, value)))
        yield Case(
            kind,
            f"a source is {what}",
            with_epoch(
                plan=planned(
                    lambda at, value=value: BatchPlan(len(at), (TierRows(Tier.PACKED, range(len(at)), at),)), {Tier.PACKED: value}
                )
            ),
        )
        yield Case(kind, f"parts are {what}", with_epoch(plan=planned(lambda at, value=value: BatchPlan(len(at), value))))
        yield Case(kind, f"a batch of {what}", within(lambda sample, value=value: value))
        yield Case(
            kind,
            f"the plans of a batch are {what}",
            batches(lambda self, batch, value=value: Batch(batch.position, batch.sampled, value)),
        )
        yield Case(
            kind,
            f"the edge plans of a batch are {what}",
            batches(lambda self, batch, value=value: Batch(batch.position, batch.sampled, None, value)),
        )
        yield Case(kind, f"ids of {what}", within(lambda sample, value=value: replace(sample, input_ids=value)))
        yield Case(
            kind, f"blocks of {what}", within(lambda sample, value=value: replace(sample, blocks=value)), what == "an empty tuple"
        )
        yield Case(kind, f"as many seeds as {what}", within(lambda sample, value=value: replace(sample, n_seeds=value)))
        yield Case(kind, f"position {what}", batches(lambda self, batch, value=value: Batch(value, batch.sampled)))
        yield Case(kind, f"index {what}", within(lambda sample, value=value: replace(sample, index=value)))
    for name in ("prepare", "stats", "close"):
        for what, error in ERRORS.items():
            yield Case(kind, f"{name} of the runner raises {what}", with_runner(**{name: raising(error)}))
    for name in ("batch", "plan", "may_begin", "passed", "release", "stop", "close", "__init__"):
        for what, error in ERRORS.items():
            yield Case(kind, f"{name} of the epoch raises {what}", with_epoch(**{name: raising(error)}))
    for name in ("batch", "threads"):
        yield Case(
            kind,
            f"the epoch has no {name}",
            lambda name=name: liar(
                Strategy,
                run=lambda self, context: type(
                    "ItsRunner",
                    (Runner,),
                    {
                        "epoch_class": type(
                            "ItsEpoch",
                            (featstore.EpochRun,),
                            {each: getattr(Epoch, each) for each in ("batch", "threads", "__init__") if each != name},
                        )
                    },
                )(context),
            ),
        )
    yield Case(
        kind,
        "runners have no prepare",
        lambda: liar(Strategy, run=lambda self, context: type("ItsRunner", (featstore.Runner,), {})(context)),
    )
    for what, spoil in ARRAYS.items():
        tensor = lambda a, spoil=spoil: as_tensor(spoil(a.numpy(), N))  # noqa: E731
        yield Case(
            kind, f"ids are {what}", within(lambda sample, tensor=tensor: replace(sample, input_ids=tensor(sample.input_ids)))
        )
        yield Case(
            kind,
            f"sources of edges are {what}",
            within(lambda sample, tensor=tensor: with_block(src=tensor)(sample)),
            what == "repeated",
        )
        plan = lambda ids, spoil=spoil: BatchPlan(len(ids), (TierRows(Tier.BASE, spoil(ids, N)),))  # noqa: E731
        yield Case(kind, f"addresses are {what}", with_epoch(plan=by_ids(plan)))
        plan = lambda ids, spoil=spoil: BatchPlan(len(ids), (TierRows(Tier.BASE, ids, spoil(np.arange(len(ids)), len(ids))),))  # noqa: E731
        yield Case(kind, f"positions are {what}", with_epoch(plan=by_ids(plan)))

        def admits(ids: Any, spoil: Any = spoil) -> Any:
            changes = Changeset(ids[:3], spoil(np.arange(3), N), np.arange(3, dtype=np.int32), nothing)
            return BatchPlan(len(ids), (TierRows(Tier.BASE, ids),), changes)

        yield Case(kind, f"changes are {what}", with_epoch(plan=by_ids(admits)))
    wrong: dict[str, Callable[[Any], Any]] = {
        "of fewer rows": lambda ids: BatchPlan(len(ids) - 1, (TierRows(Tier.BASE, ids[:-1]),)),
        "of more rows": lambda ids: BatchPlan(len(ids) + 1, (TierRows(Tier.BASE, np.append(ids, 0)),)),
        "without parts": lambda ids: BatchPlan(len(ids), ()),
        "of half of the rows": lambda ids: BatchPlan(len(ids), (TierRows(Tier.BASE, ids[: len(ids) // 2]),)),
        "of other rows": lambda ids: BatchPlan(len(ids), (TierRows(Tier.BASE, (ids + 1) % N),)),
        "of rows in another order": lambda ids: BatchPlan(len(ids), (TierRows(Tier.BASE, ids[::-1].copy()),)),
        "twice": lambda ids: BatchPlan(len(ids), (TierRows(Tier.BASE, ids), TierRows(Tier.BASE, ids))),
        "of a cache that is not there": lambda ids: BatchPlan(len(ids), (TierRows(Tier.HOST, np.zeros(len(ids), np.int32)),)),
        "of extents that are not there": lambda ids: BatchPlan(len(ids), (TierRows(Tier.PACKED, range(len(ids))),)),
        "of rows on no device": lambda ids: BatchPlan(
            len(ids),
            (TierRows(Tier.BASE, ids),),
            None,
            DeviceRows(np.zeros(1, np.int32), np.zeros(1, np.int64), np.arange(1, len(ids))),
        ),
        "of a tier that is none": lambda ids: BatchPlan(len(ids), (TierRows(77, ids),)),  # type: ignore[arg-type]
    }
    for what, plan in wrong.items():
        yield Case(kind, f"a plan {what}", with_epoch(plan=by_ids(plan)))
    yield Case(kind, "batches come again", with_epoch(batch=lambda self, position: Epoch.batch(self, 0)))
    yield Case(
        kind,
        "batches in another order",
        with_epoch(batch=lambda self, position: Batch(position, self.order.sample(N_BATCHES - 1 - position))),
        True,
    )
    yield Case(kind, "another epoch", with_epoch(__init__=lambda self, context, epoch: Epoch.__init__(self, context, epoch + 1)))
    yield Case(
        kind,
        "writes to plans' ids",
        with_epoch(plan=lambda self, name, batch: (batch.sampled.input_ids.sort(), (None, {}))[1]),
        True,
    )


def planned(plan: Callable[[Any], Any], sources: Any = None) -> Callable[..., Any]:
    return lambda self, name, batch: (plan(np.arange(len(batch.sampled.input_ids))), sources or {})


def by_ids(plan: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, name, batch: (plan(batch.sampled.input_ids.numpy().copy()), {})


def as_tensor(value: Any) -> Any:
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):
        return value


# --- partitioners ---------------------------------------------------------------------------------------------------------------


class Partitioner(featstore.Partitioner):
    def assign(self, graph: featstore.GraphStream) -> Any:
        found = np.arange(graph.num_nodes) % graph.n_parts
        for first, ids in graph.blocks():
            found[0] = (first + int(ids.sum())) % graph.n_parts
        return found.astype(np.int32)


def of_parts(graph: Graph, method: Any) -> Any:
    before = dict(graph.g.parts())
    try:
        parts = featstore.partition(graph.g, 5, method, keep=False, progress=False)
    except BaseException:
        expect(dict(graph.g.parts()) == before, "parts are kept")
        raise
    first = parts.clone()
    for change in AFTERWARDS:  # what a plug-in does once its answer was taken
        with suppress(featstore.ClosedError):
            change()
    expect(torch.equal(parts, first), "parts changed afterwards")
    parts += 0  # a result that may be written to
    return [parts.numpy().copy()]


AFTERWARDS: list[Callable[[], Any]] = []


def partitioners(kind: str = "partitioner") -> Iterator[Case]:
    yield from answers(kind, Partitioner, "assign", limit=5)
    yield from made_wrongly(kind, Partitioner)
    yield from methods(kind, Partitioner, "assign", "check")
    yield from attributes(kind, Partitioner, "n_passes")

    def keeps(self: Any, graph: Any) -> Any:
        found = Partitioner.assign(self, graph)
        AFTERWARDS.append(lambda: found.fill(3))
        return found

    def begins(self: Any, graph: Any) -> Any:
        HELD.append(graph.blocks())
        next(HELD[-1])
        return Partitioner.assign(self, graph)

    def later(self: Any, graph: Any) -> Any:
        blocks = graph.blocks()
        AFTERWARDS.append(lambda: list(blocks))
        return Partitioner.assign(self, graph)

    def write(name: str) -> Callable[..., Any]:
        def assign(self: Any, graph: Any) -> Any:
            if name == "indptr":
                graph.indptr[:] = 0
            for _, ids in graph.blocks():
                ids.fill(0)
            return Partitioner.assign(self, graph)

        return assign

    def reserves(self: Any, graph: Any) -> Any:
        HELD.append(graph.reserve(1000))
        return Partitioner.assign(self, graph)

    yield Case(kind, "changes parts later", lambda: liar(Partitioner, assign=keeps))
    yield Case(kind, "leaves a pass unfinished", lambda: liar(Partitioner, assign=begins))
    yield Case(kind, "reads afterwards", lambda: liar(Partitioner, assign=later))
    yield Case(kind, "writes to ids", lambda: liar(Partitioner, assign=write("ids")))
    yield Case(kind, "writes to indptr", lambda: liar(Partitioner, assign=write("indptr")))
    yield Case(kind, "keeps memory", lambda: liar(Partitioner, assign=reserves))
    for what, value in NO_ANSWERS.items():
        if what == "a huge number":
            continue  # that much memory is not there, which the right partitioner would be told, too
        yield Case(
            kind,
            f"reserves {what}",
            lambda value=value: liar(
                Partitioner, assign=lambda self, graph: (graph.reserve(value).release(), Partitioner.assign(self, graph))[1]
            ),
        )


HELD: list[Any] = []


# --- row sources ----------------------------------------------------------------------------------------------------------------


class Source:
    path, mode, fingerprint, in_order = "rows of a Liar", "memory", "", False
    n_rows, row_bytes = N, 20

    def __init__(self) -> None:
        self.rows, self.stats = ROWS.view(np.uint8).copy(), ReadStats()

    def gather(self, addresses: Any, out: Any, positions: Any = None, gap_bytes: Any = None) -> Any:
        out[slice(len(addresses)) if positions is None else positions] = self.rows[np.asarray(addresses)]
        return ReadStats(len(addresses))

    def check_open(self) -> None:
        pass

    def close(self) -> None:
        pass


def of_source(graph: Graph, source: Any) -> Any:
    made, g = source() if isinstance(source, type) else source, graph.g
    store = FeatureStore("x", made, ROWS.shape, torch.float32, g.reader, g.pool, n_threads=2)
    found = []
    try:
        for ids in ASKED:
            given = ids.copy()
            found.append(store[given].numpy().copy())
            expect(np.array_equal(given, ids), "the ids that were asked for changed")
        for first in range(0, N, 50):
            found.append(store[first : first + 50].numpy().copy())
        found.append(store.take(torch.from_numpy(ASKED[0])).numpy().copy())
        str(store), repr(store), store.stats()
    finally:
        store.close()
    return found


def sources(kind: str = "source") -> Iterator[Case]:
    for what, value in NO_ANSWERS.items():

        def gather(self: Any, *given: Any, value: Any = value) -> Any:
            Source.gather(self, *given)
            return value

        yield Case(kind, f"gather returns {what}", lambda gather=gather: liar(Source, gather=gather))
        for name in ("rows", "reads", "bytes_read", "waited_s"):

            def costs(self: Any, *given: Any, name: str = name, value: Any = value) -> Any:
                return replace(Source.gather(self, *given), **{name: value})

            yield Case(kind, f"the cost has {what} for {name}", lambda costs=costs: liar(Source, gather=costs))
    yield from attributes(kind, Source, "n_rows", "row_bytes", "path", "mode", "fingerprint", "in_order", "stats")
    yield from methods(kind, Source, "gather", "check_open", "close")
    for name in ("gather", "close", "check_open", "path", "mode", "n_rows", "row_bytes", "in_order", "fingerprint"):
        yield Case(
            kind,
            f"has no {name}",
            lambda name=name: type(
                NAME,
                (),
                {key: value for key, value in vars(Source).items() if key != name and not key.startswith("__")}
                | {"__init__": Source.__init__},
            ),
        )
    for what, n in (("fewer rows", N - 1), ("more rows", N + 1), ("no rows", 0)):
        yield Case(kind, f"says that it has {what}", lambda n=n: liar(Source, n_rows=n), n > N)
    for n in (19, 21, 1, 0):
        yield Case(kind, f"says that rows have {n} bytes", lambda n=n: liar(Source, row_bytes=n))

    def writes(self: Any, addresses: Any, out: Any, positions: Any = None, gap_bytes: Any = None) -> Any:
        found = Source.gather(self, addresses, out, positions)
        for each in (addresses, positions):
            if isinstance(each, np.ndarray):
                each.sort()
        return found

    yield Case(kind, "writes to the addresses", lambda: liar(Source, gather=writes))


# --- all of them ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """``use(graph, plug-in)`` gives arrays; ``right()`` a plug-in that does not lie. ``own_errors``: its own pass."""

    use: Callable[[Graph, Any], Any]
    right: Callable[[], Any]
    lies: Callable[[], Iterator[Case]]
    own_errors: bool = False


KINDS = {
    "rows": Kind(of_rows, lambda: Static, lambda: statics("rows")),
    "lists": Kind(of_lists, lambda: Static, lambda: statics("lists")),
    "online": Kind(of_rows, lambda: Fifo, onlines),
    "sampler": Kind(sampled(edge_features="w"), lambda: Sampler, samplers, True),
    "strategy": Kind(of_strategy, lambda: Strategy, strategies, True),
    "partitioner": Kind(of_parts, lambda: Partitioner, partitioners),
    "source": Kind(of_source, lambda: Source, sources, True),
}

OPEN: Graph
OTHER: Sampler


def opened(folder: Path) -> Graph:
    """Make and open the graph of a campaign, and learn what the right plug-ins give."""
    global OPEN, OTHER
    OPEN = Graph(folder)
    OTHER = Sampler()
    OPEN.right[""] = OTHER.own.sample(torch.arange(50))  # its scratch is there from now on
    for name, kind in KINDS.items():
        OPEN.right[name] = kind.use(OPEN, kind.right())
        assert same(kind.use(OPEN, kind.right()), OPEN.right[name]), name
    return OPEN


def cases() -> list[Case]:
    return [case for kind in KINDS.values() for case in kind.lies()]


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, np.ndarray):
        return bool(found.dtype == expected.dtype and np.array_equal(found, expected))
    return bool(found == expected)


def is_own(error: BaseException) -> bool:
    """Tell whether an exception was raised by the plug-in itself: the last frame of its traceback is here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == __file__


def said(error: BaseException, kind: Kind) -> str:
    """Judge an error: "named", "own", or what is wrong with it."""
    try:
        text = str(error)
    except RuntimeError:
        text = ""
    links, link = [], error
    while link is not None:
        links.append(link)
        link = link.__cause__  # type: ignore[assignment]
    if isinstance(error, (FeatstoreError, TypeError, ValueError)) and re.search(rf"\b{NAME}\b", text):
        return "named"
    if kind.own_errors and any(is_own(each) for each in links):
        return "own"
    return f"{type(error).__name__}: {text}"


def attempt(graph: Graph, case: Case) -> tuple[str, str]:
    """Let a plug-in lie; return what came of it, and what is wrong with that ("" for nothing)."""
    kind, found, wrong = KINDS[case.kind], "", ""
    before = graph.state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = kind.use(graph, case.make())
    except WrongError as error:
        found, wrong = "wrong", str(error)
    except Exception as error:
        found = said(error, kind)
        if found not in ("named", "own"):
            found, wrong = "unnamed", found
    else:
        if same(got, graph.right[case.kind]):
            found = "harmless"
        elif case.other:
            found = "another right answer"
        else:
            found, wrong = "wrong", "another result than the right plug-in's"
        del got
    AFTERWARDS.clear()

    def changes() -> list[str]:
        after = graph.state()
        after["descriptors"] = max(after["descriptors"], before["descriptors"])  # idle queues may have been given back
        found = [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
        if found:  # an error, and with its traceback what it held, may not be collected yet
            gc.collect()
        return found

    left = remaining(changes, 10)  # threads end
    HELD.clear()
    if left:
        wrong += " left: " + "; ".join(left)
    return found, wrong
