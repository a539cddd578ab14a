"""``featstore plan --history``: how a loader would divide its memory between rows and historical embeddings (OUTRE, figure 5)."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any, cast

from featstore.cli.arguments import Given, feature_of, make_batches, make_sampler, open_graph, positive, typed
from featstore.cli.plots import draw_split, print_drawn
from featstore.cli.recording import check_target, seeds_of
from featstore.config import format_size
from featstore.estimate.savedio import Split
from featstore.load.history import History
from featstore.load.loader import Loader
from featstore.plotting import check_plot
from featstore.strategies.registry import get_strategy

__all__ = ["add_history_arguments", "check_unused", "plan_history", "staleness"]

STRATEGIES = ("ondemand", "superbatch", "ginex", "streamed")
OWN = ("hidden", "staleness", "strategy")
# Options of the other plans, for recording and simulation.
_OTHERS = (
    "epochs",
    "length",
    "measure",
    "device_cache",
    "trace",
    "save_trace",
    "disk",
    "policies",
    "sizes",
    "all",
    "max_batches",
)


@typed
def staleness(text: str) -> int:
    """Parse a number of steps, from 0."""
    if int(text) < 0:
        raise ValueError(f"staleness is a number of steps, not {text}")
    return int(text)


def add_history_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``--history`` alone takes."""
    group = parser.add_argument_group("with --history: the training whose memory is divided")
    group.add_argument("--hidden", action=Given, type=positive, default=256, help="width of an embedding (default: 256)")
    group.add_argument(
        "--staleness", action=Given, type=staleness, default=15, help="steps that an embedding is used for (default: 15)"
    )
    group.add_argument(
        "--strategy",
        action=Given,
        choices=STRATEGIES,
        default="superbatch",
        help="whose cache has the rest of the memory; with ginex lists of neighbours have it in turn (default: superbatch)",
    )


def check_unused(options: argparse.Namespace) -> None:
    """Raise ValueError if an option of ``--history`` was given without it."""
    for name in OWN:
        if name in getattr(options, "given", ()):
            raise ValueError(f"--{name} goes with --history")


def plan_history(options: argparse.Namespace) -> int:
    """Let a loader divide its memory as for training, without training; print and draw the scan."""
    given = getattr(options, "given", ())
    for name in _OTHERS:
        if name in given or (name != "sizes" and getattr(options, name)):
            raise ValueError(
                f"--{name.replace('_', '-')} does not go with --history, which counts an epoch whole, in the memory of --memory"
            )
    check_plot(options.plot)
    with open_graph(options.path, options) as graph:
        feature_of(options, graph)
        check_target(graph, options.target)
        sampler = make_sampler(graph, options)
        batches = make_batches(graph, options, seeds_of(graph, options.labels, options.seeds))
        history = History(options.hidden, "auto", options.staleness)
        strategy = replace(cast(Any, get_strategy(options.strategy)), cache="auto")
        with Loader(graph, sampler, batches, features=options.feature, labels=None, strategy=strategy, history=history) as loader:
            stats = loader.stats()
        found = stats["history"]["split"]
        memory, node_bytes = graph.budget.total, history.node_bytes
    if "why" in found:
        raise ValueError(f"{found['why']}; --memory is {format_size(memory)}: give more")
    split = Split.from_dict(found)
    result = {"path": os.path.abspath(options.path), "feature": options.feature, "strategy": options.strategy, "memory": memory}
    result |= {"dim": options.hidden, "staleness": options.staleness, "node_bytes": node_bytes, "split": found}
    result["seconds"] = stats["seconds"]["split"]
    text = (
        f"{options.path}: feature {options.feature!r}, embeddings of {format_size(node_bytes)} for {options.staleness} steps, "
        f"strategy {options.strategy}\n"
        f"{format_size(split.n_bytes)} of {format_size(memory)} are divided; reads that are saved an epoch, "
        f"an edge sampled counted as {split.beta:.3g}\n{split.table()}\n"
        f"taken: {split.alpha:.0%} for {found['nodes']:,} embeddings"
    )
    title = f"feature {options.feature!r}, strategy {options.strategy}"
    print_drawn(options, result, text, lambda name: draw_split(split, options.plot, f"{name}, {title}"))
    return 0
