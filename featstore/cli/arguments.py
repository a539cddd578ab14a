"""Arguments that several commands share: kinds of values, opening a dataset, sampling from it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from featstore.cache.base import StaticPolicy, get_policy
from featstore.cli.packs import is_pack
from featstore.cli.recording import seeds_of
from featstore.config import listed, parse_disk, parse_memory, parse_size, user_path
from featstore.errors import OptionError
from featstore.estimate.savedio import edges_drawn
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore
from featstore.graph.neighborlists import NEIGHBOR_POLICY
from featstore.sampling.batch import Sampler
from featstore.sampling.batches import Batches, RandomBatches
from featstore.sampling.epochwide import EpochSampler
from featstore.sampling.labor import LaborSampler
from featstore.sampling.layer import LayerSampler
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.partitionbatches import PartitionBatches
from featstore.sampling.shadow import ShadowSampler
from featstore.strategies.base import Strategy
from featstore.strategies.options import CACHE, DISK, PACK, RUN_DIR, options_of
from featstore.strategies.registry import available_strategies, find_strategy
from featstore.topology.types import EdgeKey

__all__ = [
    "BATCHES",
    "BUILT_IN",
    "SAMPLING",
    "Given",
    "add_making",
    "add_opening",
    "add_path",
    "add_sampling",
    "add_strategy_options",
    "add_target",
    "cache_neighbors",
    "check_feature",
    "check_types",
    "disk_size",
    "edge_type",
    "feature_of",
    "make_batches",
    "make_labor",
    "make_sampler",
    "memory_size",
    "n_layers",
    "open_graph",
    "opening",
    "positive",
    "share_or_size",
    "size",
    "strategy_of",
    "typed",
]

PATH_COMPLETION = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}  # shtab.FILE, which includes directories
BATCHES = ("batches", "parts", "macro")  # options of batches of seeds
# Options of what is drawn, which a pack has behind it.
SAMPLING = ("sampler", "draws", "window", "batch_dependency", "importance_sampling", "layer_sizes", "layers", "weight")
BUILT_IN = ("ondemand", "superbatch", "ginex", "streamed", "packed", "auto")


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap ``parse`` so that the argument parser reports its ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


size, memory_size = typed(parse_size), typed(parse_memory)


disk_size = typed(DISK.parse)


share_or_size = typed(CACHE.parse)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _steps(text: str) -> int:
    if not (text.isdigit() or text == "-1"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor -1")
    return int(text)


def _fanouts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 10,10") from None


class Given(argparse.Action):
    """Stores a value, and in ``given`` that it was asked for: a default is not."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {*getattr(namespace, "given", ()), self.dest}


def add_path(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *names: str, **options: Any) -> None:
    """Add a path argument; its ``~`` is expanded even if the shell leaves it (``--save=~/model``)."""
    added: Any = parser.add_argument(*names, type=user_path, **options)
    added.complete = PATH_COMPLETION


def add_opening(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`open_graph`."""
    parser.add_argument(
        "--memory",
        type=memory_size,
        metavar="SIZE",
        help="budget: bytes (4GiB), or a share of the machine's memory (5%%); default: half of what is available",
    )
    parser.add_argument("--backend", choices=["auto", "buffered", "io_uring", "pread"], default="auto", help="how files are read")
    parser.add_argument("--verify", choices=["always", "open", "off"], help="when checksums are checked (default: always)")
    parser.add_argument("--threads", type=positive, help="threads (default: all processors)")


def add_making(parser: argparse.ArgumentParser, feature: str | None, help_text: str) -> None:
    """Add the arguments of commands that make a feature of another one: those of opening the dataset, and ``--feature``."""
    add_opening(parser)
    parser.add_argument("--feature", default=feature, help=help_text)
    parser.add_argument("--overwrite", action="store_true", help="replace a feature that has the name")


def check_feature(graph: OutOfCoreGraph, name: str) -> None:
    """Raise ValueError if the dataset has no feature of the name given by ``--feature``; NotImplementedError if it has types."""
    graph.refuse_types("this command")
    if name not in graph.features:
        raise ValueError(f"--feature: the dataset has no {name!r}; it has {listed(sorted(graph.features))}")


def edge_type(text: str) -> EdgeKey:
    """Parse the name of a type of edges, SOURCE,RELATION,DESTINATION."""
    parts = text.split(",")
    if len(parts) != 3 or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not SOURCE,RELATION,DESTINATION, such as author,writes,paper")
    return parts[0], parts[1], parts[2]


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the type of the seeds, in a graph of several types."""
    parser.add_argument("--target", metavar="TYPE", help="type of the nodes that are classified, in a graph of several types")


def check_types(graph: object, options: argparse.Namespace) -> None:
    """Raise NotImplementedError for options of sampling that are for a graph of one type, if it has several."""
    if not isinstance(graph, OutOfCoreGraph) or graph.types.is_one:
        return
    for name, is_given in (
        ("--batches partition", options.batches != "random"),
        ("--parts", options.parts is not None),
        ("--macro", options.macro is not None),
    ):
        if is_given:
            graph.refuse_types(name)


def _window(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def add_sampling(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, max_batches: bool = True) -> dict[str, Any]:
    """Add the options that define an epoch's batches; return the options' names and defaults."""
    actions: list[argparse.Action] = []

    def add(name: str, help: str, **options: Any) -> None:
        actions.append(parser.add_argument(name, help=help, **options))

    add_given = partial(add, action=Given)
    steps = {"type": positive, "metavar": "N"}
    add_given("--labels", "node data with classes (default: y)", default="y")
    add_given("--fanouts", "neighbours a hop, seeds' first; -1: all of them (default: 10,10)", type=_fanouts, default=[10, 10])
    add_given(
        "--sampler",
        "neighbor (default); labor: nodes share their neighbours, so that fewer rows are read; layer: --layer-sizes nodes a "
        "layer, by importance; shadow: one subgraph for all --layers; epoch: as neighbor (or --draws labor), but an epoch's "
        "batches are drawn at once, which reads a file of neighbour lists in sequence",
        choices=["neighbor", "labor", "layer", "shadow", "epoch"],
        default="neighbor",
    )
    sizes = "nodes of each layer, the seeds' first, such as 512,512 (with --sampler layer, which has no fan-outs)"
    add_given("--layer-sizes", sizes, type=_fanouts)
    add_given("--layers", "layers of the model (with --sampler shadow; default: as many as there are fan-outs)", **steps)
    draws = "whose batches are drawn at once: those of neighbor (default) or labor (with --sampler epoch)"
    add_given("--draws", draws, choices=["neighbor", "labor"])
    window = "batches drawn at once (with --sampler epoch; default: auto, the epoch or what memory and disk hold)"
    add_given("--window", window, type=_window, metavar="N")
    dependency = "batches that share their neighbours, too (with --sampler labor or --draws labor; default: 1, none)"
    add_given("--batch-dependency", dependency, **steps)
    add_given(
        "--importance-sampling",
        "steps that find neighbours to share; -1: until they converge (with --sampler labor; default: 0, none)",
        type=_steps,
        metavar="N",
    )
    add_given("--weight", "edge feature by which neighbours are drawn (with --sampler neighbor or shadow)", metavar="NAME")
    add_given(
        "--batches",
        "random (default), or partition: seeds of few parts, so that fewer rows are read (see featstore partition)",
        choices=["random", "partition"],
        default="random",
    )
    add_given("--parts", "parts that the dataset keeps (with --batches partition; default: the last)", metavar="NAME")
    macro = "parts that are mixed: fewer save rows, and may cost accuracy (with --batches partition; default: auto)"
    add_given("--macro", macro, **steps)
    add_given("--batch-size", "seeds a batch (default: 1000)", type=positive, default=1000)
    add_given("--seed", "of weights, order and sampling (default: 0)", type=int, default=0)
    lists = "cache of neighbour lists: bytes (1GiB), or a share of the memory (0.125, 12.5%%)"
    add("--neighbor-cache", lists, type=share_or_size, metavar="SIZE")
    policy = f"which lists it holds: a static policy, such as cross_partition (default: {NEIGHBOR_POLICY})"
    add("--neighbor-policy", policy, metavar="NAME")
    if max_batches:
        add("--max-batches", "stop each epoch after so many batches", type=positive)
    return {action.dest: action.default for action in actions}


# Fields without an option: the command line trains a given number of epochs.
_NOT_GIVEN = {"epochs"}


def add_strategy_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, names: Sequence[str], **defaults: Any
) -> None:
    """Add the options of some strategies, as their fields declare them; an option not given is None, or its default here."""
    taken: dict[str, list[str]] = {}
    for name in names:
        for option in options_of(find_strategy(name)):
            taken.setdefault(option, []).append(name)
    for option, by in taken.items():
        if option in _NOT_GIVEN:
            continue
        kind, help, default = options_of(find_strategy(by[0]))[option]
        default = defaults.get(option, default)
        is_common = all(options_of(find_strategy(each))[option][2] == default for each in by)
        shown = f"; default: {default}" if is_common and default is not None else ""
        goes_with = f"{', '.join(by)}{shown}" if len(names) > 1 else shown.removeprefix("; ")
        text = f"{help} ({goes_with})" if goes_with else help
        added: Any = parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=typed(kind.parse),
            metavar=kind.metavar,
            default=defaults.get(option),
            help=text.replace("%", "%%"),
        )
        if kind in (PACK, RUN_DIR):
            added.complete = PATH_COMPLETION


def strategy_of(options: argparse.Namespace, name: str, **given: Any) -> Strategy:
    """Make the strategy of the options of :func:`add_strategy_options`, with the further options ``given``.

    OptionError: an option was given that the strategy does not take.
    """
    cls = find_strategy(name)
    names = available_strategies()
    takers: dict[str, list[str]] = {}
    for each in names:
        if each in BUILT_IN or each == name:
            for option in options_of(find_strategy(each)):
                takers.setdefault(option, []).append(each)
    for option, by in takers.items():
        value = getattr(options, option, None)
        if value is None or option in _NOT_GIVEN:
            continue
        if name not in by:
            *others, last = by
            those = f"{', '.join(others)} or {last}" if others else last
            raise OptionError(option, f"goes with --strategy {those}, not {name}")
        given[option] = value
    return cls(**given)


def open_graph(path: str | os.PathLike[str], options: argparse.Namespace) -> OutOfCoreGraph:
    """Open a dataset by the options of :func:`add_opening`; ValueError if a pack is given in its place."""
    if is_pack(path):
        raise ValueError(f"{os.fspath(path)} is a pack, and a dataset is asked for here: only info, train and verify take packs")
    return OutOfCoreGraph.open(path, progress=not getattr(options, "json", False), **opening(options))


def opening(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("memory", "backend", "verify", "threads")}


def make_sampler(graph: OutOfCoreGraph, options: argparse.Namespace, edges: bool = False) -> Sampler:
    """Make the neighbour cache and the sampler of :func:`add_sampling`'s options; ``edges``: the sampler numbers edges."""
    by_layers = options.sampler == "labor" or options.draws == "labor"
    for name, fits, takers in (
        ("window", options.sampler == "epoch", "--sampler epoch"),
        ("draws", options.sampler == "epoch", "--sampler epoch"),
        ("batch_dependency", by_layers, "--sampler labor or --draws labor"),
        ("importance_sampling", options.sampler == "labor", "--sampler labor"),
        ("layer_sizes", options.sampler == "layer", "--sampler layer"),
        ("layers", options.sampler == "shadow", "--sampler shadow"),
        ("weight", options.sampler in ("neighbor", "shadow"), "--sampler neighbor or shadow"),
    ):
        if getattr(options, name) is not None and not fits:
            raise ValueError(f"--{name.replace('_', '-')} goes with {takers}, not {options.sampler}")
    if options.sampler == "layer":
        if options.layer_sizes is None:
            raise ValueError("--sampler layer needs --layer-sizes: the number of nodes of each layer, such as 512,512")
        if "fanouts" in getattr(options, "given", ()):
            raise ValueError("--fanouts goes with other samplers, not layer, which takes --layer-sizes")
    sampler = _sampler(graph, options, edges)
    cache_neighbors(graph, options, sampler)
    return sampler


def _sampler(graph: OutOfCoreGraph, options: argparse.Namespace, edges: bool) -> Sampler:
    if options.sampler == "labor":
        return make_labor(graph, options, edges)
    if options.sampler == "layer":
        return LayerSampler(graph, options.layer_sizes, options.seed, edges=edges)
    if options.sampler == "shadow":
        return ShadowSampler(graph, options.fanouts, options.layers, seed=options.seed, edges=edges, weight=options.weight)
    if options.sampler == "epoch":
        return EpochSampler(
            graph,
            options.fanouts,
            seed=options.seed,
            draws=options.draws or "neighbor",
            batch_dependency=options.batch_dependency or 1,
            window=options.window or "auto",
            edges=edges,
        )
    return NeighborSampler(graph, options.fanouts, seed=options.seed, edges=edges, weight=options.weight)


def n_layers(options: argparse.Namespace) -> int:
    """Count the blocks of the batches of :func:`make_sampler`."""
    if options.sampler == "layer":
        return len(options.layer_sizes)
    fanouts = options.fanouts  # a pack may have some of each type of edges, for as many hops each
    return options.layers or len(next(iter(fanouts.values())) if isinstance(fanouts, dict) else fanouts)


def make_labor(graph: OutOfCoreGraph, options: argparse.Namespace, edges: bool = False) -> LaborSampler:
    """Make a layer-neighbour sampler, whatever the value of ``--sampler``."""
    return LaborSampler(
        graph,
        options.fanouts,
        options.batch_dependency or 1,
        options.seed,
        importance_sampling=options.importance_sampling or 0,
        edges=edges,
    )


def cache_neighbors(graph: OutOfCoreGraph, options: argparse.Namespace, sampler: Sampler) -> None:
    """Make the neighbour cache of ``--neighbor-cache``, ``--neighbor-policy`` and, for some policies, ``--parts``.

    A policy that needs counts gets the edges that ``sampler`` draws in the first epoch.
    """
    wanted, policy = options.neighbor_cache, options.neighbor_policy
    if policy is not None and wanted is None:
        raise ValueError("--neighbor-policy goes with --neighbor-cache, which says how much memory the lists have")
    policy = NEIGHBOR_POLICY if policy is None else policy
    if isinstance(wanted, float):
        if not 0 < wanted < 1:
            raise ValueError(f"--neighbor-cache as a share of the memory must lie between 0 and 1, not {wanted}")
        wanted = int(wanted * graph.budget.total)
    if wanted is not None:
        chosen = get_policy(policy)
        parts = options.parts if isinstance(chosen, StaticPolicy) and chosen.needs_parts else None
        with ExitStack() as stack:
            counts = None
            if isinstance(chosen, StaticPolicy) and chosen.needs_counts:
                graph.refuse_types(f"--neighbor-policy {policy}, which counts drawn edges,")
                stack.enter_context(graph.budget.reserve("edges drawn", 8 * graph.num_nodes))
                seeds = seeds_of(graph, options.labels, getattr(options, "seeds", None))
                batches: Batches = RandomBatches(seeds, options.batch_size, seed=options.seed)
                if options.batches != "random":
                    batches = make_batches(graph, options, seeds)
                counts = edges_drawn(sampler, batches, graph.num_nodes)
                graph.pool.trim()
            size = f"{min(parse_size(wanted), graph.budget.available)}B"
            graph.cache_neighbors(size, chosen.name, counts=counts, parts=parts, edges=getattr(sampler, "edges", False))


def make_batches(graph: OutOfCoreGraph, options: argparse.Namespace, seeds: torch.Tensor) -> Batches:
    """Make the batches of seeds of :func:`add_sampling`'s options.

    ValueError: the dataset keeps no parts, or none of that name; an option goes with partition batches alone.
    """
    if options.batches == "random":
        for name in ("parts", "macro"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} goes with --batches partition, not random")
        return RandomBatches(seeds, options.batch_size, seed=options.seed)
    return PartitionBatches(graph, seeds, options.batch_size, options.parts, options.macro, seed=options.seed)


def feature_of(options: argparse.Namespace, graph: OutOfCoreGraph) -> FeatureStore:
    """Get the feature to plan for, and convert ``options.disk`` to bytes."""
    check_feature(graph, options.feature)
    store = graph.features[options.feature]
    options.disk = None if options.disk is None else parse_disk(options.disk, store.nbytes)
    return store
