"""Command-line arguments that several commands and examples share: opening a dataset, sampling from it, training on it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch
from tqdm import tqdm

from featstore.cache.base import available_policies, get_policy
from featstore.config import parse_cache_size, parse_disk, parse_size
from featstore.gather.device import check_device
from featstore.graph.dataset import OutOfCoreGraph
from featstore.plan.offline import Pack
from featstore.plan.packgraph import PackedGraph
from featstore.run.options import TAKEN_BY, check_options, check_policy, check_superbatch
from featstore.run.packs import check_given, check_layout, is_pack, open_pack
from featstore.run.precache import device_rows
from featstore.run.strategies import STRATEGIES
from featstore.run.train import SPLITS, Epoch, TrainResult, check_fields, describe_epoch, train, unknown_splits
from featstore.sampling.neighbor import NeighborSampler

__all__ = [
    "add_opening",
    "add_packing",
    "add_sampling",
    "add_training",
    "as_options",
    "disk_size",
    "make_sampler",
    "open_graph",
    "positive",
    "size",
    "spellings_of",
    "train_as_asked",
]


# -- kinds of values


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


def _share_or_size(text: str) -> float | str:
    """Check the size of a cache, whose unit stays; on a command line 0.1 is a share, as the float is in Python."""
    if "." in text and text.replace(".", "", 1).isdigit():
        return float(text)
    try:
        found = parse_cache_size(text, of="what is cached")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found if isinstance(found, float) else text


def _share_size_or_auto(text: str) -> float | str:
    return text if text == "auto" else _share_or_size(text)


def _device(text: str) -> str:
    try:
        check_device(text)
    except (RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error).replace("device='cpu'", "--device cpu")) from None
    return text


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _positive_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def _fanouts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 10,10") from None


class _Given(argparse.Action):
    """Stores a value, and in ``given`` that it was asked for: a default is not."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {*getattr(namespace, "given", ()), self.dest}


# -- arguments


def add_opening(parser: argparse.ArgumentParser) -> None:
    """Add what :func:`open_graph` wants to know."""
    parser.add_argument("--memory", type=size, metavar="SIZE", help="budget, such as 4GiB (default: half of what is available)")
    parser.add_argument("--backend", choices=["auto", "io_uring", "pread"], default="auto", help="how files are read")
    parser.add_argument("--verify", choices=["always", "open", "off"], help="when checksums are checked (default: always)")
    parser.add_argument("--threads", type=positive, help="threads (default: all processors)")


def add_sampling(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, max_batches: bool = True) -> dict[str, Any]:
    """Add what says which batches an epoch has; return the options' names and defaults."""
    actions = [
        parser.add_argument("--labels", action=_Given, default="y", help="node data with classes (default: y)"),
        parser.add_argument(
            "--fanouts", action=_Given, type=_fanouts, default=[10, 10], help="neighbours a hop, seeds' first (default: 10,10)"
        ),
        parser.add_argument("--batch-size", action=_Given, type=positive, default=1000, help="seeds a batch (default: 1000)"),
        parser.add_argument("--seed", action=_Given, type=int, default=0, help="of weights, order and sampling (default: 0)"),
        parser.add_argument(
            "--neighbor-cache",
            type=_share_or_size,
            metavar="SIZE",
            help="cache of neighbour lists: bytes (1GiB), or a share of the memory (0.125, 12.5%%)",
        ),
    ]
    if max_batches:
        actions.append(parser.add_argument("--max-batches", type=positive, help="stop each epoch after so many batches"))
    return {action.dest: action.default for action in actions}


def add_packing(parser: argparse.ArgumentParser) -> None:
    """Add what :func:`~featstore.run.packs.pack_dataset` wants to know, beside opening and sampling."""
    parser.add_argument("--feature", default="x", help="feature (default: x)")
    parser.add_argument(
        "--seeds", action=_Given, metavar="NAME", help="node data with the seeds (default: train_idx or train_mask)"
    )
    parser.add_argument("--epochs", action=_Given, type=positive, default=1, help="epochs of samples (default: 1)")
    parser.add_argument("--policy", default="belady", help="of the rows in memory: belady (default), or a static one: frequency")
    parser.add_argument(
        "--feature-cache",
        type=_share_or_size,
        default=0.1,
        metavar="SIZE",
        help="rows in memory: bytes (1GiB), or a share (10%%, 0.1; default: 0.1)",
    )
    parser.add_argument(
        "--device-cache",
        type=_share_or_size,
        metavar="SIZE",
        help="hottest rows, which will stay on the training device: bytes (1GiB), or a share (10%%; default: none)",
    )
    parser.add_argument(
        "--superbatch", type=_positive_or_auto, metavar="N", help="batches that belady plans at once (default: auto)"
    )
    parser.add_argument("--disk", type=disk_size, metavar="SIZE", help="most bytes of the pack, or times the features (1.5x)")
    parser.add_argument(
        "--add-layout", action="store_true", help="pack the samples that PACK has, or finish what was interrupted"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a pack that is there")


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add what :func:`train_as_asked` wants to know, opening and sampling included."""
    add_opening(parser)
    add_sampling(parser)
    parser.add_argument("--feature", default="x", help="feature (default: x)")
    parser.add_argument("--hidden", type=positive, default=256, help="width of the hidden layers (default: 256)")
    parser.add_argument("--epochs", type=positive, default=2, help="(default: 2)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of Adam (default: 0.003)")
    parser.add_argument("--dropout", type=float, default=0.5, help="(default: 0.5)")
    parser.add_argument(
        "--strategy",
        action=_Given,
        choices=[*STRATEGIES, "auto"],
        default="ondemand",
        help="(default: ondemand; packed on a pack)",
    )
    parser.add_argument("--policy", help=f"policy of the feature cache, none or one of {', '.join(available_policies())}")
    parser.add_argument(
        "--feature-cache", type=_share_size_or_auto, metavar="SIZE", help="bytes (1GiB), a share of the rows (10%%, 0.1), or auto"
    )
    parser.add_argument("--prefetch", type=int, default=2, help="batches made ahead (default: 2)")
    parser.add_argument("--pack", metavar="PACK", help="train on the samples of a pack, in its batches (--strategy packed, auto)")
    parser.add_argument("--device", type=_device, default="cpu", help="where batches go and the model is (default: cpu)")
    parser.add_argument(
        "--device-cache",
        type=_share_or_size,
        metavar="SIZE",
        help="rows of a pack that stay on the device: bytes (1GiB), or a share of the rows (10%%; with --pack)",
    )
    ahead = parser.add_argument_group("looking ahead (--strategy superbatch, streamed)")
    ahead.add_argument("--superbatch", type=_positive_or_auto, metavar="N", help="batches a superbatch (default: auto)")
    ahead.add_argument(
        "--no-overlap", dest="overlap", action="store_const", const=False, help="sample a superbatch when the one before has run"
    )
    ahead.add_argument(
        "--disk",
        type=disk_size,
        metavar="SIZE",
        help="most bytes of run files, or a multiple of the features (1.5x; default: a quarter of the free disk); "
        "with --pack, of the layout (default: no bound)",
    )
    ahead.add_argument("--run-dir", metavar="DIR", help="where run files go (default: DATASET.runs)")


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


# -- what is done with them


def open_graph(path: str | os.PathLike[str], options: argparse.Namespace) -> OutOfCoreGraph:
    """Open a dataset as :func:`add_opening`'s options say; ValueError where a pack is given in its place."""
    if is_pack(path):
        raise ValueError(f"{os.fspath(path)} is a pack, and a dataset is asked for here: only train and verify take packs")
    return OutOfCoreGraph.open(path, **_opening(options))


def _opening(options: argparse.Namespace) -> dict[str, Any]:
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


def _loader_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ["strategy", "feature_cache", "prefetch", "device"]
    if options.policy == "none" and options.strategy != "ondemand":
        raise ValueError(f"--policy none, no cache, goes with --strategy ondemand, not {options.strategy}")
    if options.device_cache is not None and options.pack is None:
        raise ValueError("--device-cache goes with --pack: rows stay on the device for the batches of a pack")
    if options.strategy == "packed" and options.pack is None:
        raise ValueError(
            "--strategy packed runs the samples of a pack: make one with featstore pack DATASET PACK, then give --pack PACK"
        )
    given = [name for name in TAKEN_BY if name != "epochs" and getattr(options, name) is not None]  # --epochs: of training
    check_options(options.strategy, dict.fromkeys(given, True))
    if options.strategy == "packed":
        check_superbatch(options.superbatch, get_policy(options.policy or "belady"))
    names += [name for name in given if name not in ("policy", "pack")]
    if options.strategy == "auto":
        names.append("epochs")
    policy = None if options.policy == "none" else options.policy
    if options.policy == "none" and options.feature_cache is not None:
        raise ValueError("--policy none is no cache; leave it out, or leave out --feature-cache")
    return {"policy": policy, **{name: getattr(options, name) for name in names}}


def _in_place_of_its_dataset(path: str | os.PathLike[str], options: argparse.Namespace) -> None:
    """Have the pack ``path`` trained on; ValueError where an option needs its dataset."""
    name = os.fspath(path)
    if options.pack is not None:
        raise ValueError(f"--pack goes with a dataset: {name} is itself a pack; leave one out")
    if "strategy" in getattr(options, "given", ()) and options.strategy != "packed":
        raise ValueError(f"--strategy {options.strategy} needs a dataset: {name} is a pack, which runs its own batches")
    if options.neighbor_cache is not None:
        raise ValueError(f"--neighbor-cache goes with a dataset: {name} is a pack, from which nothing is sampled")
    options.pack, options.strategy = name, "packed"


def train_as_asked(path: str | os.PathLike[str], options: argparse.Namespace, *, quiet: bool = False) -> TrainResult:
    """Open a dataset, or a pack in its place, and train on it as :func:`add_training`'s options say.

    Prints a line an epoch unless ``quiet``.

    Notes
    -----
    Makes torch use deterministic algorithms, so that losses are the same, bit for bit, whatever the cache and the strategy, and
    with the dataset of a pack or without.
    """
    is_alone = is_pack(path)
    if is_alone:
        _in_place_of_its_dataset(path, options)
    loader_options = _loader_options(options)
    with ExitStack() as stack:
        graph: OutOfCoreGraph | PackedGraph
        graph = PackedGraph(path, **_opening(options)) if is_alone else open_graph(path, options)
        stack.enter_context(cast(AbstractContextManager[Any], graph))
        if options.pack is not None:
            loader_options["pack"] = _checked_pack(stack, graph, options)
        sampler = None if isinstance(graph, PackedGraph) else make_sampler(graph, options)
        _say_unused_splits(graph)
        if options.device.startswith("cuda"):
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it deterministic products are refused there
        torch.use_deterministic_algorithms(True)
        return train(
            graph,
            sampler,
            len(options.fanouts),
            feature=options.feature,
            labels=options.labels,
            hidden=options.hidden,
            dropout=options.dropout,
            lr=options.lr,
            epochs=options.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            max_batches=options.max_batches,
            progress=sys.stderr.isatty() and not quiet,
            on_epoch=None if quiet else _say,
            loader_options=loader_options,
        )


def _checked_pack(stack: ExitStack, graph: OutOfCoreGraph | PackedGraph, options: argparse.Namespace) -> Pack:
    """Open ``--pack``, make sure, before training, that it is one of this dataset and model, and evaluate as it was sampled."""
    dataset = "DATASET" if isinstance(graph, PackedGraph) else graph.path
    pack = stack.enter_context(open_pack(options.pack, dataset))
    if isinstance(graph, OutOfCoreGraph):
        pack.check(graph)
    check_given(pack, options, ["fanouts", "batch_size"])
    check_fields(graph, options.feature, options.labels)
    options.fanouts = pack.record["fanouts"] or options.fanouts
    options.batch_size = pack.record["batch_size"] or options.batch_size
    if isinstance(graph, PackedGraph) and "fanouts" not in getattr(options, "given", ()):
        options.fanouts = options.fanouts[:1] * pack.n_hops  # how many they are is all that a model wants to know
    if len(pack) and pack.n_hops != len(options.fanouts):
        raise ValueError(
            f"{options.pack} has samples of {pack.n_hops} hops, --fanouts has {len(options.fanouts)}: give {pack.n_hops} numbers"
        )
    if options.strategy == "packed" and options.feature_cache is None:
        wanted, store = options.device_cache, graph.features[options.feature]
        n_device = None
        if wanted is not None:
            n_device = device_rows(wanted, graph.num_nodes, {options.feature: store.nbytes // max(1, len(store))})
        policy = check_policy("packed", options.policy).name
        check_layout(pack, [options.feature], policy, dataset, n_device, wanted)
    return pack


def _say_unused_splits(graph: OutOfCoreGraph | PackedGraph) -> None:
    """Print a line about node data that looks like a split and has no name of one: nothing is trained or measured on it."""
    unused = unknown_splits(graph.node_data)
    if unused:
        names = "; ".join(f"{split}: {', '.join(names)}" for split, names in SPLITS.items())
        text = f"featstore: node data not used as a split: {', '.join(unused)}. Names of splits are {names}"
        print(text, file=sys.stderr, flush=True)


def _say(epoch: Epoch) -> None:
    tqdm.write(describe_epoch(epoch), file=sys.stdout)
    sys.stdout.flush()
