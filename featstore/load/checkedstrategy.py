"""Strategies of other packages, whose answers are checked before anything uses them.

The library's own runners and epochs are passed on as they are. A strategy's own exceptions arrive as they were raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.errors import FeatstoreError, PluginError
from featstore.gather.plan import BatchPlan, Changeset, DeviceRows, EdgePlan, Tier, TierRows
from featstore.gather.sources import RowSource
from featstore.pack.typedsamples import untyped
from featstore.registry import error_text, is_plugin, whole_number
from featstore.sampling.batch import SampledBatch
from featstore.sampling.foreign import as_sampled
from featstore.sampling.sampledbatches import SampledBatches
from featstore.strategies.base import Batch, EpochRun, Runner, Strategy
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory
from featstore.topology.types import Types

__all__ = ["checked_batches", "checked_epoch", "checked_runner", "checked_stats"]

Ints = npt.NDArray[Any]


def _check(strategy: str, value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise PluginError(f"strategy {strategy!r}: {what} must be a {kind.__name__}, not a {type(value).__name__}")


def checked_batches(strategy: Strategy, batches: SampledBatches | None) -> SampledBatches | None:
    """Check what a strategy's ``batches`` returned."""
    if batches is not None:
        _check(strategy.name, batches, SampledBatches, "what batches returns")
    return batches


def checked_runner(strategy: Strategy, runner: Runner) -> Runner:
    """Check what a strategy's ``run`` returned; PluginError unless it is a runner with all that the loader uses."""
    name = strategy.name
    _check(name, runner, Runner, "what run returns")
    if is_plugin(runner):
        _check(name, runner.context, Context, "the runner's context")
        _check(name, runner.memory, Memory, "the runner's memory")
        whole_number(f"strategy {name!r}", "the runner's prefetch", runner.prefetch)
    return runner


def checked_stats(strategy: Strategy, runner: Runner) -> Mapping[str, Any]:
    """Get a runner's entries of the statistics; PluginError unless they are a mapping."""
    found = runner.stats()
    _check(strategy.name, found, Mapping, "what stats returns")
    return found


def checked_epoch(strategy: Strategy, run: EpochRun, context: Context, types: Types | None, start: int) -> EpochRun:
    """Check what a runner's ``prepare`` returned, and wrap it so that each of its answers is checked."""
    _check(strategy.name, run, EpochRun, "what prepare returns")
    return _CheckedEpoch(strategy.name, run, context, types, start) if is_plugin(run) else run


class _CheckedEpoch(EpochRun):
    def __init__(self, strategy: str, run: EpochRun, context: Context, types: Types | None, start: int) -> None:
        self._next = start
        self._label, self._run, self._context, self._types = f"strategy {strategy!r}", run, context, types
        self._threads = whole_number(self._label, "the epoch's threads", run.threads, 1)

    @property
    def threads(self) -> int:
        return self._threads

    def batch(self, position: int) -> Batch:
        batch = self._run.batch(position)
        if isinstance(batch, Batch) and isinstance(batch.sampled, SampledBatch):  # the loader's own check refuses the others
            where = f"{self._label}: the batch at {position}"
            try:
                self._check_batch(batch)
            except PluginError as error:
                raise PluginError(f"{where}: {error}") from error.__cause__
            except (FeatstoreError, OSError, MemoryError):
                raise  # as where memory is short, which other holders may give back
            except Exception as error:
                raise PluginError(f"{where} cannot be read: {error_text(error)}") from error
        return batch

    def _check_batch(self, batch: Batch) -> None:
        """Check a batch as a sampler's is; plans of nodes and edges are looked at when they are asked for."""
        sampled = batch.sampled
        for name in ("index", "epoch"):
            whole_number("it", name, getattr(sampled, name))
        for tensor in sampled.tensors:
            if not (isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()):
                raise PluginError("it has what is no tensor of numbers one beside the other in host memory")
        if sampled.input_ids.dtype != torch.int64:
            raise PluginError(f"its ids are {sampled.input_ids.dtype}, not int64")
        for block in sampled.blocks:
            if not block.src.dtype == block.dst.dtype == torch.int64:
                raise PluginError("its edges are not int64")
            if len(block.dst) > 1 and bool((block.dst[1:] < block.dst[:-1]).any()):
                raise PluginError("the destinations of its edges do not ascend")
        types = self._types
        if sampled.history is None:  # with one, blocks lack the nodes that are pulled, see SampledBatch
            as_sampled(sampled if types is None else untyped(sampled, types), self._context.graph.num_nodes, 0, 0)
        if batch.plans is not None and not isinstance(batch.plans, Mapping):
            raise PluginError(f"its plans are a {type(batch.plans).__name__}, not a mapping of features to plans")
        edge_plans: Any = batch.edge_plans
        if not isinstance(edge_plans, Mapping) or not all(isinstance(each, EdgePlan) for each in edge_plans.values()):
            raise PluginError("its edge_plans are no mapping of edge features to an EdgePlan")

    def plan(self, name: str, batch: Batch) -> tuple[BatchPlan | None, Mapping[Tier, RowSource]]:
        answer: Any = self._run.plan(name, batch)
        where = f"{self._label}: the plan of {name!r} for the batch at {batch.position}"
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
            raise PluginError(f"{where} must be a pair of a BatchPlan, or None, and a mapping of row sources by tier")
        plan, tiers = answer
        if plan is not None:
            try:
                self._check_plan(name, plan, tiers, batch)
            except PluginError as error:
                raise PluginError(f"{where}: {error}") from error.__cause__
            except (FeatstoreError, OSError, MemoryError):
                raise
            except Exception as error:
                raise PluginError(f"{where} cannot be read: {error_text(error)}") from error
        return plan, tiers

    def _check_plan(self, name: str, plan: Any, tiers: Mapping[Tier, Any], batch: Batch) -> None:
        """Check that a plan has each row of the batch once, at the address that it has in its tier."""
        if not isinstance(plan, BatchPlan):
            raise PluginError(f"it must be a BatchPlan, not a {type(plan).__name__}")
        nodes, pool = self._context.nodes, self._context.graph.pool
        rows = batch.rows_of(nodes.rows_of(name), pool)
        if plan.device is not None:
            rows = self._on_host(plan.device, rows)
        if plan.n_rows != len(rows):
            raise PluginError(f"it is of {plan.n_rows!r} rows, and the batch has {len(rows)}")
        is_planned = np.zeros(len(rows), bool)
        cache = nodes.stores[name].cache
        for part in plan.parts:
            if not isinstance(part, TierRows) or not isinstance(part.tier, Tier):
                raise PluginError(f"a {type(part).__name__} is no TierRows with a Tier")
            addresses = np.asarray(part.addresses)
            at = np.arange(len(addresses)) if part.positions is None else part.positions
            _check_ints("addresses", addresses, len(at))
            _check_ints("positions", at, len(addresses))
            if (at.dtype, addresses.dtype.kind) != (np.dtype(np.int64), "i"):
                raise PluginError(f"positions are {at.dtype} and addresses {addresses.dtype}, not int64 and signed integers")
            if not (at.flags.c_contiguous and addresses.flags.c_contiguous):
                raise PluginError("positions and addresses must lie one beside the other in memory")
            if len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(rows):
                raise PluginError(f"positions {at.min()} to {at.max()} are not all of the {len(rows)} rows")
            if is_planned[at].any() or len(np.unique(at)) < len(at):
                raise PluginError("a row is planned twice")
            is_planned[at] = True
            if part.tier == Tier.BASE:
                expected: Any = rows[at]
            elif part.tier == Tier.HOST:
                expected = None if cache is None else self._on_host_cache(cache, rows[at], addresses)
            else:
                source = tiers.get(part.tier)
                if not callable(getattr(source, "gather", None)):
                    raise PluginError(f"there is no row source of its tier {part.tier.name}")
                continue
            if expected is None or not np.array_equal(expected, addresses):
                raise PluginError(f"rows of its tier {part.tier.name} do not lie at its addresses")
        if not is_planned.all():
            raise PluginError(f"row {int(np.flatnonzero(~is_planned)[0])} of the batch is not planned")
        if plan.changes is not None:
            self._check_changes(plan.changes, rows)

    def _on_host_cache(self, cache: Any, rows: Ints, addresses: Ints) -> Ints:
        """Find where rows lie in the host cache; those whose memory was given back since are read, whatever their address was."""
        with cache.pinned():
            found: Ints = cache.map.lookup(rows)
            return np.where(addresses >= cache.capacity, addresses, found) if cache.is_cut else found

    def _on_host(self, device: Any, rows: Ints) -> Ints:
        """Check which rows a plan takes from the device; return the others."""
        if not isinstance(device, DeviceRows) or self._context.on_device is None:
            raise PluginError("it names rows on the device, which holds none, or without DeviceRows")
        for name in ("slots", "positions", "others"):
            _check_ints(name, getattr(device, name))
        both = np.concatenate([device.positions, device.others])
        if len(device.slots) != len(device.positions) or not np.array_equal(np.sort(both), np.arange(len(rows))):
            raise PluginError("rows on the device and the others do not make up the batch")
        return rows[device.others]

    def _check_changes(self, changes: Any, rows: Ints) -> None:
        if not isinstance(changes, Changeset):
            raise PluginError(f"its changes must be a Changeset, not a {type(changes).__name__}")
        n = len(changes.in_rows)
        for name, dtype in {"in_rows": np.int64, "in_positions": np.int64, "in_slots": np.int32, "out_rows": np.int64}.items():
            array = getattr(changes, name)
            _check_ints(name, array, None if name == "out_rows" else n)
            if array.dtype != dtype:
                raise PluginError(f"{name} are {array.dtype}, not {np.dtype(dtype).name}")
        at = changes.in_positions
        if n and not (0 <= int(at.min()) <= int(at.max()) < len(rows) and np.array_equal(rows[at], changes.in_rows)):
            raise PluginError("its changes admit rows that are not at their positions in the batch")

    def may_begin(self, position: int) -> bool:
        return bool(self._run.may_begin(position)) or position <= self._next  # else the loop would wait for ever

    def passed(self, position: int) -> None:
        self._next = position + 1
        self._run.passed(position)

    def release(self) -> bool:
        return bool(self._run.release())

    def stop(self) -> None:
        self._run.stop()

    def close(self) -> None:
        self._run.close()


def _check_ints(name: str, array: Any, n: int | None = None) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu" or n not in (None, len(array)):
        what = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
        raise PluginError(f"{name} must be {'' if n is None else f'{n} '}integers in an array, not {what}")
