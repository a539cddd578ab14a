"""``featstore plan``: what training would load, found out ahead."""

from __future__ import annotations

import argparse
import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace

import torch
from tqdm import tqdm

from featstore.cache.base import available_policies, get_policy
from featstore.cli.arguments import (
    Given,
    add_opening,
    add_path,
    add_sampling,
    add_target,
    cache_neighbors,
    check_types,
    disk_size,
    make_batches,
    make_labor,
    make_sampler,
    open_graph,
    positive,
    share_or_size,
)
from featstore.cli.planhistory import add_history_arguments, check_unused, plan_history
from featstore.cli.plots import draw_estimates, draw_miss_curve, draw_redundancy, print_drawn
from featstore.cli.recording import TracedBatches, check_target, rows_asked_for, seeds_among_all, seeds_of
from featstore.config import format_size, parse_disk, parse_size
from featstore.estimate.batchsize import ROW_BYTES, BatchSize
from featstore.estimate.choice import Choice, chosen_mask, observe
from featstore.estimate.copies import copy_speed
from featstore.estimate.cost import ONLINE, SAMPLE_BYTES, Machine, Workload
from featstore.estimate.misscurve import DEFAULT_SIZES, Step, miss_curve, parse_sizes
from featstore.estimate.redundancy import N_BATCHES, redundancy
from featstore.estimate.tablespeed import table_speed
from featstore.gather.device import check_device
from featstore.graph.dataset import OutOfCoreGraph
from featstore.plan.trace import Trace, record
from featstore.plotting import check_plot
from featstore.progress import Bar, is_seen, make_bar
from featstore.sampling.neighbor import NeighborSampler
from featstore.storage.drive import drive_speed
from featstore.storage.rundir import DiskQuota, RunDirectory, runs_directory
from featstore.strategies.auto import Auto
from featstore.strategies.context import Chosen, Context
from featstore.strategies.devicecache import DeviceCache
from featstore.strategies.devicefill import SIZED_LATER, rows_left
from featstore.strategies.domain import Domain
from featstore.strategies.estimates import choose, estimate_lengths
from featstore.strategies.memory import AHEAD, FRACTIONS
from featstore.strategies.profile import DISK_FRACTION, profile_batches
from featstore.strategies.superbatchepoch import most_ahead
from featstore.topology.noderows import NodeRows

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_opening(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulate", action="store_true", help="rows loaded against cache size, for all policies")
    what.add_argument("--explain", action="store_true", help="estimated seconds of every strategy, and which strategy=auto takes")
    what.add_argument(
        "--redundancy",
        action="store_true",
        help="rows requested a seed by random batches, contiguous ranges and kept parts, with neighbour sampling and with labor",
    )
    what.add_argument(
        "--history",
        action="store_true",
        help="reads that the memory saves, divided between the feature's rows and embeddings of earlier steps, and what "
        "featstore train --history auto takes",
    )
    parser.add_argument("--epochs", type=positive, help=f"with --explain: epochs to come (default: {Auto.epochs})")
    parser.add_argument("--length", type=positive, metavar="N", help="with --explain: batches a superbatch")
    parser.add_argument(
        "--device-cache",
        type=share_or_size,
        metavar="SIZE",
        help="with --explain: rows on the device, as of featstore train; auto: what is free there now, less 1GiB",
    )
    parser.add_argument("--device", action=Given, default="cpu", help="with --device-cache: the device (default: cpu)")
    parser.add_argument(
        "--measure", action="store_true", help="with --explain: measure the drive again, whatever the catalog says (once a day)"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"with --redundancy: count all batches of an epoch (default: {N_BATCHES} of them, or --max-batches)",
    )
    parser.add_argument("--feature", action=Given, default="x", help="feature (default: x)")
    add_target(parser)
    sampling = parser.add_argument_group("what is recorded: an epoch of featstore train, which takes the same options")
    parser.set_defaults(sampling=add_sampling(sampling))
    sampling.add_argument("--seeds", metavar="NAME", help="node data with the seeds (default: train_idx or train_mask)")
    add_path(sampling, "--save-trace", metavar="FILE", help="keep the recorded trace")
    sampling.add_argument("--disk", type=disk_size, metavar="SIZE", help="most bytes of trace and run files, or 0.5x the feature")
    add_path(parser, "--trace", metavar="FILE", help="simulate a recorded trace, of featstore.plan.trace or --save-trace")
    parser.add_argument(
        "--sizes",
        action=Given,
        default=DEFAULT_SIZES,
        help="cache sizes: shares of the rows (5%%), rows (20000) or memory (1GiB), with commas between "
        f"(default: {DEFAULT_SIZES.replace('%', '%%')})",
    )
    policies = ", ".join(available_policies())
    parser.add_argument("--policies", metavar="NAMES", help=f"with commas between, of {policies} (default: all)")
    add_path(parser, "--plot", metavar="FILE", help="draw them, such as curve.png (needs matplotlib)")
    add_history_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Simulate policies, estimate every strategy, count the rows requested per seed, or divide memory with embeddings."""
    if "device" in getattr(options, "given", ()) and options.device_cache is None:
        raise ValueError("--device goes with --device-cache, which says how many rows the device holds")
    if options.history:
        return plan_history(options)
    check_unused(options)
    if options.redundancy:
        return _redundancy(options)
    if options.all:
        raise ValueError("--all goes with --redundancy: an epoch is recorded whole, or as far as --max-batches says")
    if options.explain:
        return _explain(options)
    for name, why in _EXPLAINING.items():
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} goes with --explain: {why}; leave it out")
    check_plot(options.plot)
    policies = None if options.policies is None else [name.strip() for name in options.policies.split(",")]
    for name in policies or []:
        get_policy(name)
    show = is_seen() and not options.json
    with open_graph(options.path, options) as graph:
        check_types(graph, options)
        check_target(graph, options.target)
        store, rows = rows_asked_for(graph, options.feature)
        options.disk = None if options.disk is None else parse_disk(options.disk, store.nbytes)
        row_bytes = store.nbytes // max(1, len(store))
        sizes = parse_sizes(options.sizes, rows.n, row_bytes)
        with _trace(options, graph, rows, show) as trace, graph.policy_inputs(row_bytes, seed=options.seed, rows=rows) as inputs:
            with _countdown() if show else nullcontext() as on_step:
                curve = miss_curve(
                    trace,
                    sizes,
                    policies,
                    in_degree=lambda: inputs.context.in_degree,
                    out_degree=lambda: inputs.context.out_degree,
                    seed=options.seed,
                    budget=graph.budget,
                    on_step=on_step,
                )
    result = {"path": os.path.abspath(options.path), "feature": options.feature, **curve.to_dict(row_bytes)}
    text = f"{options.path}: feature {options.feature!r}, rows of {format_size(row_bytes)}\n{curve.table(row_bytes)}"

    def draw(name: str) -> None:
        draw_miss_curve(curve, options.plot, row_bytes, f"{name}, feature {options.feature!r}")

    print_drawn(options, result, text, draw)
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.policies is not None:
        raise ValueError("--policies goes with --simulate")
    check_plot(options.plot)
    show = is_seen() and not options.json
    with open_graph(options.path, options) as graph:
        check_types(graph, options)
        check_target(graph, options.target)
        store, rows = rows_asked_for(graph, options.feature)
        options.disk = None if options.disk is None else parse_disk(options.disk, store.nbytes)
        row_bytes = store.nbytes // max(1, len(store))
        begin = time.perf_counter()
        with _trace(options, graph, rows, show) as trace:
            if not trace.n_accesses:
                raise ValueError("the trace asks for no rows")
            sample_s = 0.0 if options.trace is not None else (time.perf_counter() - begin) / graph.options.threads
            ahead = min(int(graph.budget.total * FRACTIONS[AHEAD]), most_ahead(store.nbytes))  # as a loader reads ahead
            sources = [each.source for each in graph.features.values()]
            with make_bar(total=3, desc="measuring", leave=False, disable=not show) as bar:
                drive = drive_speed(graph.reader, graph.path, sources, disk=options.disk, again=options.measure)
                bar.update()
                copies = copy_speed(graph.path, row_bytes, graph.options.threads, graph.budget, again=options.measure)
                bar.update()
                tables = table_speed(graph.path, rows.n, graph.budget, again=options.measure)
            machine = Machine(drive, **asdict(copies), **asdict(tables))
            sizes = parse_sizes(options.sizes, rows.n, row_bytes)
            device = check_device(options.device)
            on_device = {size: _on_device(options, graph, device, row_bytes, rows.n, size) for size in sizes}
            most = max(on_device.values(), default=0)
            of_nodes = 2 * graph.num_nodes * bool(rows.kinds)  # degrees of all nodes, of which the rows' are taken
            with graph.budget.reserve("cost model", (2 + bool(most)) * rows.n + 8 * most + of_nodes):
                degrees = rows.select(graph.short_degrees())
                workloads = [
                    observe(
                        trace,
                        row_bytes=row_bytes,
                        capacity=size,
                        budget=graph.budget,
                        sample_s=sample_s,
                        epochs=options.epochs or Auto.epochs,
                        disk_bytes=options.disk,
                        ahead_bytes=ahead,
                        out_degree=degrees,
                        online=ONLINE,
                        device_rows=on_device[size],
                        device_on_host=device.type == "cpu",
                        on_device=chosen_mask(degrees, on_device[size]) if on_device[size] else None,
                    )
                    for size in sizes
                ]
                del degrees
            nodes = Domain.of_rows(graph, {store.name: store}, {store.name: rows})
            choices = [_choice(options, graph, nodes, each, machine) for each in workloads]
            if options.device_cache == "auto":
                choices = [replace(each, note=SIZED_LATER) for each in choices]
    result = {"path": os.path.abspath(options.path), "feature": options.feature, "choices": [each.to_dict() for each in choices]}
    unknown = "\nseconds of sampling are not known from a trace file, and are left out" if options.trace is not None else ""
    text = f"{options.path}: feature {options.feature!r}, rows of {format_size(row_bytes)}{unknown}\n\n"
    text += "\n\n".join(each.table() for each in choices)
    title = f"feature {options.feature!r}"
    print_drawn(options, result, text, lambda name: draw_estimates(choices, options.plot, f"{name}, {title}"))
    return 0


def _choice(options: argparse.Namespace, graph: OutOfCoreGraph, nodes: Domain, workload: Workload, machine: Machine) -> Choice:
    """Choose a strategy for the rows of ``nodes`` as a loader does, with superbatches as long as disk and memory allow."""
    n_batches, n = workload.n_batches, workload.n_accesses // workload.n_batches
    # A trace has no edges; each row was drawn by at least one.
    batch = BatchSize(n, n, ROW_BYTES * n, ROW_BYTES * n, n)
    disk, sampled = options.disk, 0
    if disk is not None:  # a loader's samples for the choice are there, too
        sampled = min(int(disk * DISK_FRACTION), profile_batches(n_batches) * SAMPLE_BYTES * n)
    batches, threads = TracedBatches(n_batches, n, options.batch_size), graph.options.threads
    domains = nodes, Domain.of_edges(graph, ())
    chosen = Chosen(misses=workload.misses, profile_bytes=sampled)
    has_types = not graph.types.is_one
    context = Context(graph, batches, *domains, threads, threads, batch=batch, chosen=chosen, has_types=has_types)
    cache = workload.capacity / nodes.n if workload.capacity else None
    lengths = estimate_lengths(context, {"cache": cache, "length": options.length or "auto", "disk": disk})
    return choose(workload, machine, lengths, has_types=has_types)


def _on_device(
    options: argparse.Namespace, graph: OutOfCoreGraph, device: torch.device, row_bytes: int, n: int, capacity: int
) -> int:
    """Choose the rows, of ``n``, that a device would hold besides ``capacity`` rows in memory."""
    if options.device_cache is None:
        return 0
    cache = DeviceCache(options.device_cache)
    if cache.size != "auto":
        return cache.rows(n, {options.feature: row_bytes})
    reserve = parse_size(cache.reserve) + (capacity * row_bytes if device.type == "cpu" else 0)
    return rows_left(device, graph.budget, reserve, [(n, row_bytes)])[0][0]


def _redundancy(options: argparse.Namespace) -> int:
    given = getattr(options, "given", ())
    for name in _CACHING:
        if name in given or (name not in ("sizes", "feature") and getattr(options, name)):
            raise ValueError(f"--{name.replace('_', '-')} does not go with --redundancy, which counts rows whatever the cache")
    for name in sorted(_DRAWING & set(given)):
        why = "all batches are counted" if name == "batches" else "both samplers are counted, each batch by itself"
        raise ValueError(f"--{name.replace('_', '-')} does not go with --redundancy: {why}; leave it out")
    if options.all and options.max_batches is not None:
        raise ValueError("--all and --max-batches: leave one out")
    check_plot(options.plot)
    show = is_seen() and not options.json
    with open_graph(options.path, options) as graph, ExitStack() as stack:
        graph.refuse_types("plan --redundancy")
        check_target(graph, options.target)
        samplers = {"neighbor": NeighborSampler(graph, options.fanouts, seed=options.seed), "labor": make_labor(graph, options)}
        cache_neighbors(graph, options, samplers["neighbor"])
        bar: tqdm[int] | None = None

        def on_batch(done: int, total: int) -> None:
            nonlocal bar
            if show and bar is None:
                bar = stack.enter_context(make_bar(total=total, desc="sampling", unit="batch", leave=False))
            if bar is not None:
                bar.update(done - bar.n)

        found = redundancy(
            graph,
            seeds_of(graph, options.labels, options.seeds),
            options.batch_size,
            samplers,
            parts=None if options.parts is None else [options.parts],
            macro=options.macro,
            seed=options.seed,
            n_batches=None if options.all else options.max_batches or N_BATCHES,
            on_batch=on_batch,
        )
    fanouts = ",".join(map(str, options.fanouts))
    result = {"path": os.path.abspath(options.path), "fanouts": options.fanouts, "seed": options.seed, **found.to_dict()}
    text = f"{options.path}: fan-outs {fanouts}\n{found.table()}"
    if found.n_counted < found.n_batches:
        text += "\n--all counts every batch"
    print_drawn(options, result, text, lambda name: draw_redundancy(found, options.plot, f"{name}, fan-outs {fanouts}"))
    return 0


@contextmanager
def _trace(options: argparse.Namespace, graph: OutOfCoreGraph, rows: NodeRows, show: bool) -> Iterator[Trace]:
    """Open the named trace, or record one, which is kept or removed with the run files."""
    with ExitStack() as stack:
        if options.trace is not None:
            recording = [name for name in _RECORDING if name != "disk" or not options.explain]  # --explain: run files, too
            given = [name for name in recording if getattr(options, name) is not None]
            given += [name for name, usual in options.sampling.items() if name != "seed" and getattr(options, name) != usual]
            if given:
                raise ValueError(f"--{given[0].replace('_', '-')} is for recording: leave it out, or leave out --trace")
            trace = Trace.open(options.trace)
            stack.callback(trace.close)
            if trace.n != rows.n:
                raise ValueError(
                    f"{options.trace} is a trace over {trace.n} rows, and the dataset has {rows.n}; "
                    "record one of this dataset with --save-trace"
                )
        else:
            path = options.save_trace
            if path is None:
                runs = RunDirectory(runs_directory(graph.path))
                stack.callback(runs.close)
                path = runs.file("trace")
            elif os.path.exists(path):
                raise FileExistsError(errno.EEXIST, "a file is there already; use it with --trace, or remove it", path)
            disk = DiskQuota(options.disk, "the trace", path if options.save_trace is not None else graph.path)
            sampler = make_sampler(graph, options)
            batches = make_batches(graph, options, seeds_among_all(graph, options.target, options.labels, options.seeds))
            with graph.budget.reserve("loader order", batches.nbytes):
                order = batches.epoch(0)
                numbers = range(len(order))[: options.max_batches]
                bar = make_bar(numbers, desc="sampling", unit="batch", leave=False, disable=not show)
                trace = record(sampler, (order.seeds(index) for index in bar), graph.num_nodes, path, disk=disk, rows=rows)
            stack.callback(trace.close)
        yield trace


_RECORDING = ("seeds", "save_trace", "disk")
_CACHING = ("epochs", "length", "measure", "device_cache", "trace", "save_trace", "disk", "policies", "sizes", "feature")
_DRAWING = {"sampler", "draws", "window", "batch_dependency", "batches", "layer_sizes", "layers", "weight"}
_EXPLAINING = {
    "measure": "a simulation needs no drive",
    "epochs": "one epoch is simulated",
    "length": "a simulation plans all of the trace at once",
    "device_cache": "a simulation is of the host's cache",
}


@contextmanager
def _countdown() -> Iterator[Callable[[Step], None]]:
    """Yield a callback that shows simulations as a bar with the time left."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}{postfix}]"
    with ExitStack() as stack:
        bar: tqdm[int] | None = None

        def show(step: Step) -> None:
            nonlocal bar
            if bar is None:
                bar = stack.enter_context(make_bar(total=step.total, desc="simulating", bar_format=form, leave=False))
            bar.n = step.done
            left = "" if step.left_s is None else f", about {Bar.format_interval(step.left_s)} left"
            bar.set_postfix_str(f"{step.policy}, {step.capacity:,} rows{left}")

        yield show
