"""The contract suite of strategies: with any strategy, a loader's batches are those of the sampler, bit for bit.

Batches are compared with the sampler's draws and with rows of arrays in memory, so the reference needs no strategy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import json
import math
import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.estimate.cost import Machine, Workload
from featstore.estimate.length import Length
from featstore.sampling.foreign import checked_sampler
from featstore.sampling.scratch import SCRATCH
from featstore.storage.drive import DriveSpeed
from featstore.strategies.estimates import estimate_of
from featstore.strategies.options import options_of
from featstore.strategies.registry import find_strategy
from featstore.testing.contractgraph import ContractGraph, contract_graph

__all__ = ["SAMPLERS", "ContractGraph", "StrategyContract", "contract_graph"]

AMPLE = "64MB"
LITTLE = 400_000  # bytes: less than any strategy needs, so that an error says how much
BATCH, SEED, N_EPOCHS = 30, 3, 2
PATIENCE_S = 30.0  # for threads on their way out
NONSENSE: tuple[Any, ...] = (object(), -1, "", "no such thing", math.nan, 1j)


def _callable(g: Any) -> Any:
    """Make a sampler as in another library: a function of the seeds, which knows neither epoch nor batch."""
    sampler = featstore.NeighborSampler(g, [3, 2], seed=5)

    def draw(seeds: torch.Tensor) -> Any:
        sampled = sampler.sample(seeds)
        return sampled.input_ids, [(block.src, block.dst, block.n_src, block.n_dst) for block in sampled.blocks]

    return draw


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "neighbor": lambda g: featstore.NeighborSampler(g, [4, 3], seed=1),
    "with replacement": lambda g: featstore.NeighborSampler(g, [5, 2], replace=True, seed=2),
    "by layer": lambda g: featstore.LaborSampler(g, [4, 3], batch_dependency=3, seed=4),
    "by importance": lambda g: featstore.LayerSampler(g, [20, 30], seed=4, skip=True),
    "induced": lambda g: featstore.ShadowSampler(g, [4, 3], layers=3, seed=4),
    "epoch-wide": lambda g: featstore.EpochSampler(g, [4, 3], seed=1),
    "in windows": lambda g: featstore.EpochSampler(g, [3, -1, 2], seed=1, window=2),
    "callable": _callable,
    "numbered": lambda g: featstore.NeighborSampler(g, [4, 3], seed=1, edges=True),
    "disjoint": lambda g: featstore.NeighborSampler(g, [4, 3], seed=1, edges=True, disjoint=True),
}


@cache
def _reference(sampler: str, epoch: int) -> list[featstore.SampledBatch]:
    """Sample the batches of an epoch, by their index, in memory that no graph counts."""
    graph = contract_graph()
    with featstore.open(graph.path, memory=AMPLE) as g:
        draw = checked_sampler(SAMPLERS[sampler](g), g.num_nodes, g)
        order = featstore.RandomBatches(graph.seeds, BATCH, seed=SEED).epoch(epoch)
        return [copy.deepcopy(draw.sample(order.seeds(k), epoch=epoch, index=k)) for k in range(len(order))]


def _check(
    batch: featstore.MiniBatch,
    sampler: str,
    epoch: int,
    features: Sequence[str],
    edge_features: Sequence[str] = (),
    device: str = "cpu",
) -> int:
    """Compare a batch with the reference of its index; return the index."""
    graph, expected = contract_graph(), _reference(sampler, epoch)
    found_on = {tensor.device.type for tensor in batch._tensors()}
    assert found_on == {device}, f"batch {batch.index} is on {found_on}"
    batch = batch.to("cpu")
    assert 0 <= batch.index < len(expected), f"a batch says that it is number {batch.index} of {len(expected)}"
    sampled, where = expected[batch.index], f"batch {batch.index} of epoch {epoch}"
    assert torch.equal(batch.input_ids, sampled.nodes), f"{where} has other ids: other samples, or another batch's index"
    assert torch.equal(batch.seeds, sampled.seeds), f"{where} has other seeds"
    numbers = None if sampled.copies is None else sampled.copies.batch.tolist()
    assert numbers == (None if batch.batch is None else batch.batch.tolist()), f"{where} has nodes of other subgraphs"
    assert len(batch.blocks) == len(sampled.blocks), f"{where} has {len(batch.blocks)} blocks"
    for block, other in zip(batch.blocks, sampled.blocks, strict=True):
        assert (block.n_src, block.n_dst) == (other.n_src, other.n_dst), f"{where} has a block of another size"
        assert torch.equal(block.src, other.src) and torch.equal(block.dst, other.dst), f"{where} has other edges"  # noqa: PT018
        assert block.edge_arrays.keys() == other.edge_arrays.keys(), f"{where} has {list(block.edge_arrays)} of its edges"
        for name, values in other.edge_arrays.items():
            assert torch.equal(block.edge_arrays[name], values), f"{where} has another {name}"
    assert list(batch.features) == list(features), f"{where} has the features {list(batch.features)}"
    for name in features:
        rows = torch.from_numpy(graph.features[name])[sampled.nodes]
        assert batch.features[name].dtype == rows.dtype, f"{where}: {name!r} is of {batch.features[name].dtype}"
        assert torch.equal(batch.features[name], rows), f"{where} has wrong rows of {name!r}"
    assert list(batch.edge_features) == list(edge_features), f"{where} has the edge features {list(batch.edge_features)}"
    for name in edge_features:
        rows = torch.from_numpy(graph.edge_features[name])
        for block, found in zip(sampled.blocks, batch.edge_features[name], strict=True):
            assert block.edge_pos is not None
            assert torch.equal(found, rows[block.edge_pos]), f"{where} has wrong rows of the edge feature {name!r}"
    assert batch.y is not None
    assert torch.equal(batch.y, torch.from_numpy(graph.y)[sampled.seeds]), f"{where} has wrong labels"
    return batch.index


def _check_all(order: Sequence[int], sampler: str, epoch: int) -> None:
    n = len(_reference(sampler, epoch))
    assert sorted(order) == list(range(n)), f"epoch {epoch} has {n} batches; delivered were {list(order)}"


def _wait_for_threads(before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := [thread.name for thread in threading.enumerate() if thread not in before]:
        assert time.monotonic() < deadline, f"threads that go on: {left}"
        gc.collect()
        time.sleep(0.01)


class StrategyContract(ABC):
    """Tests of a strategy's contract. Subclass it, name the class ``Test…``, and write :meth:`strategy`.

    Attributes
    ----------
    registered_name : str, optional
        The strategy's registered name; the command line trains with it.
    caches : sequence
        Values of the option ``cache``, if the strategy has one.
    """

    registered_name: ClassVar[str | None] = None
    caches: ClassVar[Sequence[Any]] = (None, 0.1, "30kB", "auto", 1.0)

    @abstractmethod
    def strategy(self, **options: Any) -> featstore.Strategy:
        """Make the strategy; ``options`` are added to the options that the suite is to run with."""

    def loader(self, g: Any, sampler: str, strategy: featstore.Strategy, **options: Any) -> featstore.Loader:
        """Make a loader of the strategy over the seeds of ``contract_graph``; override it if batches come otherwise.

        ``sampler`` is a key of ``SAMPLERS``; ``options`` are the loader's.
        """
        seeds = contract_graph().seeds
        return featstore.Loader(g, SAMPLERS[sampler](g), seeds, BATCH, strategy=strategy, seed=SEED, **options)

    def command(self) -> list[str]:
        """List the options that ``featstore train --strategy <name>`` needs."""
        return []

    # What tests share.

    @contextlib.contextmanager
    def _loader(
        self, strategy: featstore.Strategy | None = None, sampler: str = "neighbor", memory: int | str = AMPLE, **options: Any
    ) -> Iterator[featstore.Loader]:
        threads = options.setdefault("threads", 2)
        with featstore.open(contract_graph().path, memory=memory, threads=threads) as g:
            with self.loader(g, sampler, strategy or self.strategy(), **options) as loader:
                yield loader
            assert g.budget.peak <= g.budget.total

    def _run(self, strategy: featstore.Strategy | None = None, sampler: str = "neighbor", **options: Any) -> list[list[int]]:
        """Run two epochs, check every batch; return the indexes of each epoch in their order."""
        with self._loader(strategy, sampler, **options) as loader:
            features, of_edges = options.get("features", ("x",)), options.get("edge_features", ())
            check = partial(
                _check, sampler=sampler, features=features, edge_features=of_edges, device=options.get("device", "cpu")
            )
            orders = [[check(batch, epoch=epoch) for batch in loader] for epoch in range(N_EPOCHS)]
            assert len(loader) == len(orders[0])
            self._check_device(loader, options.get("device_cache", 0))
        for epoch, order in enumerate(orders):
            _check_all(order, sampler, epoch)
        return orders

    def _check_device(self, loader: featstore.Loader, share: float) -> None:
        """Check that rows on the device serve a run: some requests if a share of the rows is there, all if all rows are."""
        stats = loader.stats()
        hits = stats["hits"].get("device", 0)
        assert sum(stats["hits"].values()) == stats["rows"], (
            f"{stats['rows']} rows were delivered, and counted are {stats['hits']}"
        )
        assert (hits > 0) == (share > 0), f"with device_cache={share} the device serves {hits} of {stats['rows']} rows"
        assert share < 1 or hits == stats["rows"], f"the device has all rows, and serves {hits} of {stats['rows']}"

    # Batches.

    def test_batches_of_every_sampler(self) -> None:
        for sampler in SAMPLERS:
            self._run(sampler=sampler)

    def test_batches_with_every_cache(self) -> None:
        if "cache" not in options_of(type(self.strategy())):
            return
        orders = [self._run(self.strategy(cache=size), features=("x", "z")) for size in self.caches]
        assert all(order == orders[0] for order in orders), "the order of batches depends on the cache"

    def test_batches_with_any_threads(self) -> None:
        orders = [self._run(threads=threads, prefetch=prefetch) for threads, prefetch in ((1, 0), (2, 0), (1, 2), (2, 2))]
        assert all(order == orders[0] for order in orders), "the order of batches depends on threads"

    def test_any_features(self) -> None:
        for features in (("x", "z"), ("z",), ()):
            self._run(features=features)

    def test_batches_with_rows_on_the_device(self) -> None:
        """Check that batches do not depend on the device's rows, and that these rows are read from the device."""
        orders = [self._run(features=("x", "z"), device_cache=share) for share in (0, 0.2, 1.0)]
        assert all(order == orders[0] for order in orders), "the order of batches depends on the device's rows"

    def test_batches_on_a_gpu(self) -> None:
        """Check batches, rows of edges and merged rows on a GPU, for any rows on the device; skipped without a GPU."""
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU here")
        orders = [self._run(features=("x", "z"), device_cache=share, device="cuda") for share in (0, 0.2, 1.0)]
        orders.append(self._run(features=("x", "z")))
        assert all(order == orders[0] for order in orders), "the order of batches depends on the device, or on its rows"
        self._run(sampler="numbered", edge_features=("w",), device="cuda")
        if vars(type(self.strategy())).get("takes_history", False):
            on_gpu, expected = self._with_history(self.strategy(), "cuda"), self._with_history(featstore.OnDemand())
            assert on_gpu == expected, "with a history batches or rows on a GPU differ from those on demand"

    def test_batches_with_features_of_edges(self) -> None:
        """Check that rows of edges are those of the edge ids, with any cache of them."""
        sizes = (None, 0.3, "60kB", 1.0) if "edge_cache" in options_of(type(self.strategy())) else ()
        strategies = [self.strategy(edge_cache=size) for size in sizes] or [self.strategy()]
        orders = [self._run(strategy, "numbered", edge_features=("w",)) for strategy in strategies]
        assert all(order == orders[0] for order in orders), "the order of batches depends on the cache of edges"

    def test_batches_with_a_history(self) -> None:
        """Check batches and merged rows with a history against those on demand, over epochs and a break; or its refusal."""
        strategy = self.strategy()
        if not vars(type(strategy)).get("takes_history", False):  # its base class's says nothing of it
            refused = None
            try:
                self._with_history(strategy)
            except featstore.OptionError as error:
                refused = error.option
            assert refused == "history", "a loader takes a history, and its strategy's class does not say that it runs in order"
            return
        found, expected = self._with_history(strategy), self._with_history(featstore.OnDemand())
        assert found == expected, "with a history batches or rows differ from those on demand"

    def _with_history(self, strategy: featstore.Strategy, device: str = "cpu") -> list[Any]:
        history, found = featstore.History(2, 0.5, staleness=3), list[Any]()
        with self._loader(strategy, history=history, device=device) as loader:
            for n_batches in (len(loader), 2, len(loader)):
                for _, batch in zip(range(n_batches), loader, strict=False):
                    assert batch.history is not None
                    h = torch.full((batch.blocks[-2].n_dst, 2), float(history.step), device=device)
                    merged = batch.history.merge(h)
                    found.append((batch.index, batch.input_ids.tolist(), merged.tolist()))
            assert loader.stats()["history"]["pulled"] > 0
        return found

    # Memory.

    def test_little_memory(self) -> None:
        """Check batches in the memory that an error names; in somewhat less or more they are right, or an error names more."""
        for sampler in ("neighbor", "epoch-wide"):
            expected = self._run(sampler=sampler)
            least = self._run_in_the_least(LITTLE, sampler, expected)
            for memory in (least * 7 // 8, least * 5 // 4):
                self._run_in_the_least(memory, sampler, expected)

    def _run_in_the_least(self, memory: int, sampler: str, expected: list[list[int]]) -> int:
        """Run in ``memory``, or in the memory that the first error names; return the bytes that sufficed."""
        for _ in range(2):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", featstore.PerformanceWarning)  # in so little memory it is in place
                    orders = self._run(sampler=sampler, memory=memory)
            except featstore.BudgetError as error:
                refusal = error
            else:
                assert orders == expected, "the order of batches depends on the memory"
                return memory
            assert refusal.needed is not None, f"an error names no memory that would do: {refusal}"
            assert refusal.needed > memory, f"{memory} bytes were refused, and {refusal.needed} would do: {refusal}"
            memory = refusal.needed
        raise AssertionError(f"an error named a memory that did not do; now it is {memory} bytes: {refusal}")

    def test_nothing_is_held_after_close(self) -> None:
        """Check that memory is given back, all threads end and no run file is left; feature caches stay with the graph."""
        path, before = contract_graph().path, set(threading.enumerate())
        with featstore.open(path, memory=AMPLE, threads=2) as g:
            held = []
            for take in (1, 100, 0, 100):
                loader = self.loader(g, "neighbor", self.strategy(), features=("x", "z"), threads=2)
                batches = iter(loader)
                for _, batch in zip(range(take), batches, strict=False):
                    del batch
                loader.close()
                del loader, batches
                _wait_for_threads(before)
                held.append(self._held(g))
            more = {holder: n_bytes for each in held[2:] for holder, n_bytes in each.items() if n_bytes > held[1].get(holder, 0)}
            assert not more, f"held after close, and more each time: {more}"
        with featstore.open(path, memory=AMPLE, threads=2) as g:
            with featstore.Loader(g, SAMPLERS["neighbor"](g), contract_graph().seeds, BATCH, features=("x", "z")) as other:
                for batch in other:
                    del batch
            del other
            usual = self._held(g)
        beside = {holder: n_bytes for holder, n_bytes in held[1].items() if n_bytes > usual.get(holder, 0)}
        assert not beside, f"held after close, beyond what a loader on demand leaves: {beside}"
        runs = f"{path}.runs"
        assert not os.path.exists(runs) or not os.listdir(runs), f"run files are left: {os.listdir(runs)}"

    def _held(self, g: Any) -> dict[str, int]:
        """Report the bytes held, by holder, without caches of features, idle buffers and the scratch of samplers."""
        for name in g.features:
            if g.features[name].cache is not None:
                g.cache(name, budget=0)
        gc.collect()
        g.pool.trim()
        g.reader.trim()  # its queues rest between reads: how many there are depends on which threads met
        return {holder: n_bytes for holder, n_bytes in g.memory_report().items() if n_bytes and holder != SCRATCH}

    # Epochs.

    def test_an_iterator_that_is_never_begun_holds_nothing(self) -> None:
        with self._loader() as loader:
            g = loader._g
            before, threads = g.memory_report(), set(threading.enumerate())
            iterators = [iter(loader) for _ in range(3)]
            assert g.memory_report() == before, "an iterator holds memory before its first batch"
            assert set(threading.enumerate()) == threads, "an iterator has threads before its first batch"
            _check_all([_check(batch, "neighbor", 0, ("x",)) for batch in loader], "neighbor", 0)
            del iterators
            _check_all([_check(batch, "neighbor", 1, ("x",)) for batch in loader], "neighbor", 1)

    def test_an_epoch_may_be_left(self) -> None:
        """Check that after an abandoned epoch the next one is whole, and the same one again, too."""
        n = len(_reference("neighbor", 0))
        with self._loader() as loader:
            for take in (1, n - 1):
                loader.set_epoch(0)
                left = iter(loader)
                for _ in range(take):
                    _check(next(left), "neighbor", 0, ("x",))
                del left
                _check_all([_check(batch, "neighbor", 1, ("x",)) for batch in loader], "neighbor", 1)

    def test_training_resumes_in_the_middle(self) -> None:
        n, orders = len(_reference("neighbor", 0)), self._run()
        for epoch, take in ((0, 1), (1, n - 2), (0, n)):
            with self._loader() as loader:
                loader.set_epoch(epoch)
                batches = iter(loader)
                order = [_check(next(batches), "neighbor", epoch, ("x",)) for _ in range(take)]
                state = json.loads(json.dumps(loader.state_dict()))
                del batches
            with self._loader(prefetch=0, threads=1) as loader:
                loader.load_state_dict(state)
                if take == n:
                    epoch, order = epoch + 1, []
                order += [_check(batch, "neighbor", epoch, ("x",)) for batch in loader]
            assert order == orders[epoch], f"resumed after {take} batches of epoch {epoch}, batches run in another order"

    def test_an_error_in_the_loop_leaves_nothing(self) -> None:
        before = set(threading.enumerate())
        with contextlib.suppress(EOFError):  # which nothing of the library raises
            with self._loader() as loader:
                for batch in loader:
                    raise EOFError(batch.index)
        _wait_for_threads(before)

    # Options.

    def test_options_are_declared(self) -> None:
        strategy = self.strategy()
        cls = type(strategy)
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen, f"{cls.__qualname__} is not frozen: @dataclass(frozen=True)"  # type: ignore[attr-defined]
        declared = options_of(cls)
        for field in dataclasses.fields(cls):
            assert field.name in declared, f"field {field.name!r} is not declared by featstore.options.option"
        for name, (_, help, _) in declared.items():
            assert help, f"option {name!r} says nothing of itself"
        assert strategy == self.strategy(), "strategies of the same options differ"
        assert hash(strategy) == hash(self.strategy()), "strategies of the same options have different hashes"
        assert cls() == cls(), f"{cls.__qualname__} cannot be made with its defaults"

    def test_bad_values_name_their_option(self) -> None:
        for name, (_, _, default) in options_of(type(self.strategy())).items():
            refused = [value for value in NONSENSE if value != default and self._refuses(name, value)]
            assert refused, f"option {name!r} takes anything, an object() too"

    def _refuses(self, name: str, value: Any) -> bool:
        """Tell whether an option refuses a value; an error that does not name the option fails."""
        try:
            type(self.strategy())(**{name: value})
        except (ValueError, TypeError) as error:
            message = str(error)
        else:
            return False
        assert name in message, f"the error of {name}={value!r} does not name the option: {message}"
        return True

    # By name, and by what it would take.

    def test_its_estimate_can_be_compared(self) -> None:
        if self.registered_name is not None:
            machine = Machine(DriveSpeed(90_000, 2.5e9, 3e9, 1.5e9), 8e9)
            for capacity in (0, 1000):
                hits = 30 * capacity
                workload = Workload(10_000, 400, 50, 100_000, capacity, hits, 100_000 - hits, 0.5, 0.2, 50)
                estimate_of(self.registered_name, workload, machine)  # checks what it returns

    def test_its_estimate_is_a_length_of_its_superbatches(self) -> None:
        told = list[Length | None]()
        strategy = self.strategy()
        cls, run = type(strategy), type(strategy).run

        def estimating(self: featstore.Strategy, context: featstore.Context) -> featstore.Runner:
            told.append(self.estimate_length(context))
            return run(self, context)

        with mock.patch.object(cls, "run", estimating), self._loader(strategy) as loader:
            n = len(loader)
        for length in told:
            if length is not None:
                assert 1 <= length.n_batches <= n, f"{length.n_batches} batches of {n}"
                assert length.passes == -(-n // length.n_batches), f"{length.passes} superbatches of {length.n_batches} of {n}"

    def test_it_is_found_by_its_name(self) -> None:
        if self.registered_name is not None:
            assert self.registered_name in featstore.available_strategies()
            assert find_strategy(self.registered_name) is type(self.strategy()), "the name leads to another class"
            assert self.strategy().name == self.registered_name

    def test_the_command_line_trains_with_it(self) -> None:
        if self.registered_name is None:
            return
        line = ["train", contract_graph().path, "--strategy", self.registered_name, "--epochs", "1", "--hidden", "4", "--json"]
        line += ["--memory", AMPLE, "--threads", "2", "--batch-size", str(BATCH), "--fanouts", "4,3", *self.command()]
        was, n_threads, out = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), io.StringIO()
        torch.set_num_threads(1)  # the model is tiny
        try:
            with contextlib.redirect_stdout(out):
                code = main(line)
        finally:
            torch.use_deterministic_algorithms(was)
            torch.set_num_threads(n_threads)
        assert code == 0, f"featstore {' '.join(line)} fails"
        losses = json.loads(out.getvalue())["losses"]
        assert len(losses) == len(_reference("neighbor", 0))
        assert all(map(math.isfinite, losses)), f"losses {losses}"


def failures(suite: StrategyContract, names: Iterable[str] = ()) -> dict[str, BaseException]:
    """Run the tests of a suite, all or some; return the failing ones and their errors; skip tests that cannot run here."""
    found: dict[str, BaseException] = {}
    for name in names or [name for name in dir(suite) if name.startswith("test_")]:
        try:
            getattr(suite, name)()
        except pytest.skip.Exception:
            continue
        except Exception as error:
            found[name] = error
    return found
