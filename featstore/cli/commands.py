"""The commands: their arguments, and what they do. Imports all of the library; :mod:`featstore.cli` is the way in."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from featstore.cache.base import available_policies, get_policy
from featstore.cli import COMMANDS, make_parser
from featstore.config import format_size, parse_disk
from featstore.errors import CorruptionError, FeatstoreError, FormatError, StaleError, VersionError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.device import device_speed
from featstore.graph.feature import FeatureStore
from featstore.graph.progress import Bar
from featstore.plan.auto import choose, copy_bandwidth, observe
from featstore.plan.cost import ONLINE, Machine
from featstore.plan.misscurve import DEFAULT_SIZES, Step, miss_curve, parse_sizes
from featstore.plan.offline import Pack
from featstore.plan.plots import check_plot, draw_estimates, draw_miss_curve
from featstore.plan.trace import Trace
from featstore.run.actual import kept_runs, runs_table
from featstore.run.arguments import (
    add_opening,
    add_packing,
    add_sampling,
    add_training,
    as_options,
    disk_size,
    make_sampler,
    open_graph,
    positive,
    size,
    spellings_of,
    train_as_asked,
)
from featstore.run.measure import measure, measure_table
from featstore.run.packs import advice_on_damage, describe_pack, describe_verified, may_be_pack, pack_dataset
from featstore.run.recording import record_epoch, seeds_of
from featstore.run.train import describe_training
from featstore.storage.catalog import CATALOG_DIRECTORY
from featstore.storage.rundir import DiskBudget, RunDirectory
from featstore.storage.writer import free_bytes, is_drive_full

__all__ = ["run"]

USER_ERROR = 2


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit status: 0, 1 (a dataset is damaged), 2 (what was asked for cannot be done)."""
    spellings: dict[str, str] = {}
    try:
        options = _parser().parse_args(arguments)
        spellings = options.spellings
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone; without this the interpreter complains at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as error:
        print(f"featstore: interrupted{f'; {error}' if error.args else ''}", file=sys.stderr)
        return 130
    except CorruptionError as error:
        print(f"featstore: {_one_line(error)}{advice_on_damage(error)}", file=sys.stderr)
        return 1
    except (FeatstoreError, OSError, ValueError, TypeError, LookupError) as error:
        if os.environ.get("FEATSTORE_TRACEBACK"):
            raise
        print(f"featstore: {as_options(_one_line(error), spellings)}", file=sys.stderr)
        return USER_ERROR


def _one_line(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None and error.strerror == os.strerror(errno.ENOENT):
        return f"{os.fsdecode(error.filename)}: no such file or directory"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        name = os.fsdecode(error.filename)
        return f"{name}: {_drive_full(error, name) if is_drive_full(error) else error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return " ".join(str(error.strerror).split())
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def _drive_full(error: OSError, path: str) -> str:
    """Say that the drive is full, and how much is free now that what was written is gone again."""
    text = str(error.strerror).replace(os.strerror(errno.ENOSPC), "the drive is full")
    free = free_bytes(path)
    return text if free is None or "free" in text else text.replace("full", f"full ({format_size(free)} are free now)", 1)


# -- what is asked
# ------------------------------------------------------------------------------------------------------------------


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE.npy")
    return name, path


def _parser() -> argparse.ArgumentParser:
    parser = make_parser()
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, path: str = "directory of the dataset") -> argparse.ArgumentParser:
        text = COMMANDS[name]
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        made.set_defaults(run=run)
        made.add_argument("path", metavar="DATASET", help=path)
        made.add_argument("--json", action="store_true", help="print the result as one JSON object")
        return made

    create = command("create", _create)
    create.add_argument("--indptr", metavar="FILE", help="CSC offsets, integer [N+1]; with --indices")
    create.add_argument("--indices", metavar="FILE", help="in-neighbours, integer [E]")
    create.add_argument("--edge-index", metavar="FILE", help="instead of those: edges, integer [2, E], sources then destinations")
    create.add_argument("--num-nodes", type=int, metavar="N", help="with --edge-index: number of nodes")
    create.add_argument(
        "--features", type=_named_path, nargs="+", action="extend", default=[], metavar="NAME=FILE", help="[N, …]"
    )
    create.add_argument(
        "--node-data",
        type=_named_path,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FILE",
        help="labels, masks, index sets",
    )
    create.add_argument("--memory", type=size, metavar="SIZE", help="most memory to use")
    create.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")

    add_opening(command("info", _info))
    command("verify", _verify, "directory of the dataset, or of a pack")

    plan = command("plan", _plan)
    add_opening(plan)
    what = plan.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulate", action="store_true", help="rows loaded against cache size, for all policies")
    what.add_argument("--explain", action="store_true", help="estimated seconds of every strategy, and which strategy=auto takes")
    plan.add_argument("--epochs", type=positive, help="with --explain: epochs to come (default: 1)")
    plan.add_argument("--superbatch", type=positive, metavar="N", help="with --explain: batches a superbatch")
    plan.add_argument(
        "--measure", action="store_true", help="with --explain: measure the drive again, whatever the catalog says (once a day)"
    )
    plan.add_argument("--feature", default="x", help="feature (default: x)")
    sampling = plan.add_argument_group("what is recorded: an epoch of featstore train, which takes the same options")
    plan.set_defaults(sampling=add_sampling(sampling))
    sampling.add_argument("--seeds", metavar="NAME", help="node data with the seeds (default: train_idx or train_mask)")
    sampling.add_argument("--save-trace", metavar="FILE", help="keep the recorded trace")
    sampling.add_argument("--disk", type=disk_size, metavar="SIZE", help="most bytes of trace and run files, or 0.5x the feature")
    plan.add_argument("--trace", metavar="FILE", help="simulate a recorded trace, of featstore.plan.trace or --save-trace")
    plan.add_argument(
        "--sizes",
        default=DEFAULT_SIZES,
        help="cache sizes: shares of the rows (5%%), rows (20000) or memory (1GiB), with commas between "
        f"(default: {DEFAULT_SIZES.replace('%', '%%')})",
    )
    plan.add_argument("--policies", metavar="NAMES", help=f"of {','.join(available_policies())} (default: all)")
    plan.add_argument("--plot", metavar="FILE", help="draw them, such as curve.png (needs matplotlib)")

    pack = command("pack", _pack)
    pack.add_argument("pack", metavar="PACK", help="directory of the pack")
    add_opening(pack)
    add_sampling(pack, max_batches=False)
    add_packing(pack)

    where = "directory of the dataset, or of a pack in its place"
    add_training(command("train", _train, where))

    bench = command("bench", _bench)
    add_opening(bench)
    bench.add_argument("--feature", help="feature to read (default: the largest)")
    bench.add_argument("--rows", type=positive, default=50_000, help="rows a gather (default: 50000)")
    bench.add_argument("--runs", type=positive, default=3, help="runs, of which the median counts (default: 3)")
    for each in commands.choices.values():
        each.set_defaults(spellings=spellings_of(each))
    return parser


def _print(options: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    print(json.dumps(result) if options.json else text)


# -- commands
# -----------------------------------------------------------------------------------------------------------------------


def _create(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    common: dict[str, Any] = {
        "features": _mapping("--features", options.features),
        "node_data": _mapping("--node-data", options.node_data),
        "overwrite": options.overwrite,
        "progress": not options.json,
        "memory": options.memory,
    }
    if options.edge_index is not None:
        if options.indptr is not None or options.indices is not None or options.num_nodes is None:
            raise ValueError("--edge-index goes with --num-nodes, and without --indptr and --indices")
        graph = OutOfCoreGraph.from_edge_index(options.path, options.edge_index, options.num_nodes, **common)
    elif options.indptr is not None and options.indices is not None and options.num_nodes is None:
        graph = OutOfCoreGraph.create(options.path, options.indptr, options.indices, **common)
    else:
        raise ValueError("give either --indptr and --indices, or --edge-index and --num-nodes")
    with graph:
        result = {**_describe(graph), "seconds": round(time.perf_counter() - begin, 3)}
    _print(options, result, f"{_description(result)}\nmade in {result['seconds']:.1f} s")
    return 0


def _mapping(option: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    made: dict[str, str] = {}
    for name, path in pairs:
        if name in made:
            raise ValueError(f"{option}: {name!r} is given twice")
        made[name] = path
    return made


def _describe(graph: OutOfCoreGraph) -> dict[str, Any]:
    features = {
        name: {"shape": list(store.shape), "dtype": str(store.dtype).removeprefix("torch."), "bytes": store.nbytes}
        for name, store in graph.features.items()
    }
    data = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in graph.node_data.items()
    }
    disk = sum(entry.stat().st_size for entry in os.scandir(graph.path) if entry.is_file(follow_symlinks=False))
    return {
        "path": graph.path,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        "features": features,
        "node_data": data,
        "disk_bytes": disk,
    }


def _description(result: dict[str, Any]) -> str:
    lines = [
        result["path"],
        f"  {result['num_nodes']:,} nodes, {result['num_edges']:,} edges, {format_size(result['disk_bytes'])} on disk",
    ]
    for what in ("features", "node_data"):
        for name, field in result[what].items():
            size = f", {format_size(field['bytes'])}" if "bytes" in field else ""
            lines.append(f"  {what.replace('_', ' '):<10} {name}: {field['dtype']} {field['shape']}{size}")
    return "\n".join(lines)


def _info(options: argparse.Namespace) -> int:
    with open_graph(options.path, options) as graph:
        result = _describe(graph)
        result["budget"] = graph.budget.total
        readers = {name: store.stats() for name, store in graph.features.items()}
        result["reader"] = {name: {key: stats[key] for key in ("backend", "reason", "mode")} for name, stats in readers.items()}
    lines = [_description(result), f"  budget     {format_size(result['budget'])}"]
    lines += [f"  reader     {name}: {r['backend']}, {r['mode']} ({r['reason']})" for name, r in result["reader"].items()]
    _print(options, result, "\n".join(lines))
    return 0


def _verify(options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    path = os.path.abspath(options.path)
    result: dict[str, Any] = {"path": path, "ok": True}
    try:
        if is_there := may_be_pack(path):
            with Pack(path) as pack:
                result |= pack.verify(progress=not options.json)
            text = describe_verified(result)
        else:
            is_there = os.path.isdir(os.path.join(path, CATALOG_DIRECTORY))
            with OutOfCoreGraph.open(path) as graph:
                result |= graph.verify(progress=not options.json)
            text = f"{path}: {result['files']} files, {format_size(result['bytes'])}, all as they were written"
    except (CorruptionError, FormatError, FileNotFoundError) as error:
        if not is_there or isinstance(error, (VersionError, StaleError)):
            raise
        # It was there, and is no longer what it was.
        print(f"featstore: {_one_line(error)}{advice_on_damage(error)}", file=sys.stderr)
        return 1
    result["seconds"] = round(time.perf_counter() - begin, 3)
    _print(options, result, text)
    return 0


def _explain(options: argparse.Namespace) -> int:
    if options.policies is not None:
        raise ValueError("--policies goes with --simulate")
    if options.plot is not None:
        check_plot(options.plot)
    show = sys.stderr.isatty() and not options.json
    with open_graph(options.path, options) as graph:
        store = _feature(options, graph)
        row_bytes = store.nbytes // max(1, len(store))
        begin = time.perf_counter()
        with _trace(options, graph, show) as trace:
            if not trace.n_accesses:
                raise ValueError("the trace asks for no rows")
            sample_s = 0.0 if options.trace is not None else (time.perf_counter() - begin) / graph.options.threads
            ahead = min(graph.budget.total // 16, store.nbytes // 4)  # as a loader of this budget reads ahead
            machine = Machine(
                device_speed(graph, disk=options.disk, again=options.measure),
                copy_bandwidth(row_bytes, graph.options.threads, graph.budget),
            )
            with graph.policy_inputs(row_bytes) as inputs:
                choices = [
                    choose(
                        observe(
                            trace,
                            row_bytes=row_bytes,
                            capacity=rows,
                            budget=graph.budget,
                            sample_s=sample_s,
                            superbatch=options.superbatch,
                            epochs=options.epochs or 1,
                            disk_bytes=options.disk,
                            ahead_bytes=ahead,
                            out_degree=inputs.context.out_degree,
                            online=ONLINE,
                        ),
                        machine,
                    )
                    for rows in parse_sizes(options.sizes, graph.num_nodes, row_bytes)
                ]
        runs = kept_runs(graph.path)
    listed = [each.to_dict() for each in choices]
    result = {"path": os.fspath(options.path), "feature": options.feature, "choices": listed, "plot": options.plot}
    result["runs"] = [each.to_dict() for each in runs]
    unknown = "\nseconds of sampling are not known from a trace file, and are left out" if options.trace is not None else ""
    text = f"{options.path}: feature {options.feature!r}, rows of {format_size(row_bytes)}{unknown}\n\n"
    text += "\n\n".join([*(each.table() for each in choices), *([runs_table(runs)] if runs else [])])
    if options.plot is not None:
        draw_estimates(choices, options.plot, f"{os.path.basename(os.path.abspath(options.path))}, feature {options.feature!r}")
        text += f"\ndrawn: {options.plot}"
    _print(options, result, text)
    return 0


def _feature(options: argparse.Namespace, graph: OutOfCoreGraph) -> FeatureStore:
    """Return the feature that is planned for; from now on ``options.disk`` is in bytes."""
    if options.feature not in graph.features:
        raise ValueError(f"--feature: the dataset has no {options.feature!r}; it has {sorted(graph.features)}")
    store = graph.features[options.feature]
    options.disk = None if options.disk is None else parse_disk(options.disk, store.nbytes)
    return store


def _plan(options: argparse.Namespace) -> int:
    if options.explain:
        return _explain(options)
    for name, why in _EXPLAINING.items():
        if getattr(options, name):
            raise ValueError(f"--{name} goes with --explain: {why}; leave it out")
    if options.plot is not None:
        check_plot(options.plot)
    policies = None if options.policies is None else [name.strip() for name in options.policies.split(",")]
    for name in policies or []:
        get_policy(name)
    show = sys.stderr.isatty() and not options.json
    with open_graph(options.path, options) as graph:
        store = _feature(options, graph)
        row_bytes = store.nbytes // max(1, len(store))
        sizes = parse_sizes(options.sizes, graph.num_nodes, row_bytes)
        with _trace(options, graph, show) as trace, graph.policy_inputs(row_bytes, seed=options.seed) as inputs:
            with _Countdown(show) as countdown:
                curve = miss_curve(
                    trace,
                    sizes,
                    policies,
                    in_degree=lambda: inputs.context.in_degree,
                    out_degree=lambda: inputs.context.out_degree,
                    seed=options.seed,
                    budget=graph.budget,
                    on_step=countdown.step,
                )
    result = {"path": os.fspath(options.path), "feature": options.feature, **curve.to_dict(row_bytes), "plot": options.plot}
    text = f"{options.path}: feature {options.feature!r}, rows of {format_size(row_bytes)}\n{curve.table(row_bytes)}"
    if options.plot is not None:
        draw_miss_curve(curve, options.plot, row_bytes, f"{os.path.basename(graph.path)}, feature {options.feature!r}")
        text += f"\ndrawn: {options.plot}"
    _print(options, result, text)
    return 0


@contextmanager
def _trace(options: argparse.Namespace, graph: OutOfCoreGraph, show: bool) -> Iterator[Trace]:
    """Open the trace that was named, or record one, which is kept or goes with the run files."""
    with ExitStack() as stack:
        if options.trace is not None:
            recording = [name for name in _RECORDING if name != "disk" or not options.explain]  # --explain: run files, too
            given = [name for name in recording if getattr(options, name) is not None]
            given += [name for name, usual in options.sampling.items() if name != "seed" and getattr(options, name) != usual]
            if given:
                raise ValueError(f"--{given[0].replace('_', '-')} is for recording: leave it out, or leave out --trace")
            trace = Trace.open(options.trace)
            stack.callback(trace.close)
            if trace.n != graph.num_nodes:
                raise ValueError(
                    f"{options.trace} is a trace over {trace.n} rows, and the dataset has {graph.num_nodes}; "
                    "record one of this dataset with --save-trace"
                )
        else:
            path = options.save_trace
            if path is None:
                runs = RunDirectory(f"{graph.path}.runs")
                stack.callback(runs.close)
                path = runs.file("trace")
            elif os.path.exists(path):
                raise FileExistsError(errno.EEXIST, "a file is there already; use it with --trace, or remove it", path)
            trace = record_epoch(
                graph,
                make_sampler(graph, options),
                seeds_of(graph, options.labels, options.seeds),
                path,
                batch_size=options.batch_size,
                seed=options.seed,
                max_batches=options.max_batches,
                disk=DiskBudget(options.disk, "the trace", path if options.save_trace is not None else graph.path),
                progress=show,
            )
            stack.callback(trace.close)
        yield trace


_RECORDING = ("seeds", "save_trace", "disk")
_EXPLAINING = {
    "measure": "a simulation needs no drive",
    "epochs": "one epoch is simulated",
    "superbatch": "a simulation plans all of the trace at once",
}


class _Countdown:
    """A bar over simulations that says how much time is left; nothing where it is not shown."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._bar: Bar | None = None

    def step(self, step: Step) -> None:
        if not self._show:
            return
        if self._bar is None:
            form = "{desc}: {percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}{postfix}]"
            self._bar = Bar(total=step.total, desc="simulating", bar_format=form, leave=False, file=sys.stderr)
        self._bar.n = step.done
        left = "" if step.left_s is None else f", about {Bar.format_interval(step.left_s)} left"
        self._bar.set_postfix_str(f"{step.policy}, {step.capacity:,} rows{left}")

    def __enter__(self) -> _Countdown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _pack(options: argparse.Namespace) -> int:
    get_policy(options.policy)
    with open_graph(options.path, options) as graph:
        _feature(options, graph)
        result = pack_dataset(graph, options.pack, make_sampler(graph, options), options, show=not options.json)
    _print(options, result, describe_pack(result, options.path))
    return 0


def _train(options: argparse.Namespace) -> int:
    result = train_as_asked(options.path, options, quiet=options.json)
    _print(options, result.to_dict(), f"\n{describe_training(result)}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    with open_graph(options.path, options) as graph:
        names = list(graph.features)
        if not names:
            raise ValueError(f"{options.path}: the dataset has no features")
        name = options.feature or max(names, key=lambda each: graph.features[each].nbytes)
        store = graph.features[name]
        if not len(store):
            raise ValueError(f"{options.path}: feature {name!r} has no rows")
        result = measure(store, options.rows, options.runs, np.random.default_rng(0))
    _print(options, result, measure_table(result))
    return 0
