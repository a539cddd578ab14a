"""Arguments that several commands share: kinds of values, opening a dataset, sampling from it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from typing import Any

from featstore.cli.packs import is_pack
from featstore.config import parse_cache_size, parse_disk, parse_size
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore
from featstore.sampling.neighbor import NeighborSampler
from featstore.strategies.registry import STRATEGIES

__all__ = [
    "Given",
    "add_opening",
    "add_sampling",
    "as_options",
    "disk_size",
    "feature_of",
    "make_sampler",
    "open_graph",
    "opening",
    "positive",
    "positive_or_auto",
    "share_or_size",
    "share_size_or_auto",
    "size",
    "spellings_of",
]


def size(text: str) -> int:
    """Parse bytes: a number, or one with a unit."""
    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def disk_size(text: str) -> int | str:
    """Parse bytes of disk; a multiple of the features, such as ``1.5x``, stays text."""
    try:
        parse_disk(text, 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text if text.strip().lower().endswith("x") else size(text)


def share_or_size(text: str) -> float | str:
    """Check the size of a cache, whose unit stays; on a command line 0.1 is a share, as the float is in Python."""
    if "." in text and text.replace(".", "", 1).isdigit():
        return float(text)
    try:
        found = parse_cache_size(text, of="what is cached")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found if isinstance(found, float) else text


def share_size_or_auto(text: str) -> float | str:
    return text if text == "auto" else share_or_size(text)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def positive_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive(text)


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


def add_opening(parser: argparse.ArgumentParser) -> None:
    """Add what :func:`open_graph` wants to know."""
    parser.add_argument("--memory", type=size, metavar="SIZE", help="budget, such as 4GiB (default: half of what is available)")
    parser.add_argument("--backend", choices=["auto", "io_uring", "pread"], default="auto", help="how files are read")
    parser.add_argument("--verify", choices=["always", "open", "off"], help="when checksums are checked (default: always)")
    parser.add_argument("--threads", type=positive, help="threads (default: all processors)")


def add_sampling(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, max_batches: bool = True) -> dict[str, Any]:
    """Add what says which batches an epoch has; return the options' names and defaults."""
    actions = [
        parser.add_argument("--labels", action=Given, default="y", help="node data with classes (default: y)"),
        parser.add_argument(
            "--fanouts", action=Given, type=_fanouts, default=[10, 10], help="neighbours a hop, seeds' first (default: 10,10)"
        ),
        parser.add_argument("--batch-size", action=Given, type=positive, default=1000, help="seeds a batch (default: 1000)"),
        parser.add_argument("--seed", action=Given, type=int, default=0, help="of weights, order and sampling (default: 0)"),
        parser.add_argument(
            "--neighbor-cache",
            type=share_or_size,
            metavar="SIZE",
            help="cache of neighbour lists: bytes (1GiB), or a share of the memory (0.125, 12.5%%)",
        ),
    ]
    if max_batches:
        actions.append(parser.add_argument("--max-batches", type=positive, help="stop each epoch after so many batches"))
    return {action.dest: action.default for action in actions}


def spellings_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return a command's options by the names that they have in Python."""
    named = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    return {name: option for name, option in named.items() if name not in ("help", "json")}


def as_options(text: str, spellings: Mapping[str, str]) -> str:
    """Return a message in which ``name=``, ``name='value'`` and names with an underscore are options, as on a command line."""

    def option(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if name not in spellings or (value is None and "_" not in name):
            return found[0]
        value = "" if value in (None, "", "True", "False") else f" {value}"
        return f"{spellings[name]}{value}"

    pattern = r"(?<![\w/.\-'\"])(?P<name>[a-z_]+)\b(?:=(?P<quote>'?)(?P<value>[\w.]*)(?P=quote))?(?![\w/=])"
    found = re.sub(r"(--[\w-]+) \(\1\)", r"\1", re.sub(pattern, option, text))
    return re.sub(rf"'({'|'.join([*STRATEGIES, 'auto'])})'", r"\1", found) if "--strategy" in found else found


def open_graph(path: str | os.PathLike[str], options: argparse.Namespace) -> OutOfCoreGraph:
    """Open a dataset as :func:`add_opening`'s options say; ValueError where a pack is given in its place."""
    if is_pack(path):
        raise ValueError(f"{os.fspath(path)} is a pack, and a dataset is asked for here: only train and verify take packs")
    return OutOfCoreGraph.open(path, **opening(options))


def opening(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("memory", "backend", "verify", "threads")}


def make_sampler(graph: OutOfCoreGraph, options: argparse.Namespace) -> NeighborSampler:
    """Make the neighbour cache and the sampler that :func:`add_sampling`'s options describe."""
    wanted = options.neighbor_cache
    if isinstance(wanted, float):
        if not 0 < wanted < 1:
            raise ValueError(f"--neighbor-cache as a share of the memory must lie between 0 and 1, not {wanted}")
        wanted = int(wanted * graph.budget.total)
    if wanted is not None:
        graph.cache_neighbors(f"{min(parse_size(wanted), graph.budget.available)}B")
    return NeighborSampler(graph, options.fanouts, seed=options.seed)


def feature_of(options: argparse.Namespace, graph: OutOfCoreGraph) -> FeatureStore:
    """Return the feature that is planned for; from now on ``options.disk`` is in bytes."""
    if options.feature not in graph.features:
        raise ValueError(f"--feature: the dataset has no {options.feature!r}; it has {sorted(graph.features)}")
    store = graph.features[options.feature]
    options.disk = None if options.disk is None else parse_disk(options.disk, store.nbytes)
    return store
