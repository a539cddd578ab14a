"""``featstore train``: a GraphSAGE trained on a dataset, or on a pack in its place."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from featstore.cache.base import get_policy
from featstore.cli.arguments import (
    BATCHES,
    BUILT_IN,
    SAMPLING,
    Given,
    add_opening,
    add_path,
    add_sampling,
    add_strategy_options,
    add_target,
    check_types,
    make_batches,
    make_sampler,
    n_layers,
    open_graph,
    opening,
    positive,
    share_or_size,
    size,
    strategy_of,
    typed,
)
from featstore.cli.checkpoints import Checkpoints
from featstore.cli.output import print_result
from featstore.cli.packs import check_given, check_layout, fanouts_of, is_pack, open_pack, target_of
from featstore.cli.planhistory import staleness
from featstore.cli.recording import check_target, nodes_with
from featstore.cli.splits import SPLITS, Labelled, count_classes, unknown_splits, unlabelled
from featstore.cli.training import Epoch, TrainResult, check_fields, describe_epoch, describe_training, train
from featstore.gather.device import check_device
from featstore.graph.dataset import OutOfCoreGraph
from featstore.load.history import History
from featstore.load.threads import STAGES
from featstore.pack.offline import Pack
from featstore.pack.packgraph import PackedGraph
from featstore.progress import Bar, is_seen
from featstore.sampling.batches import Batches
from featstore.sampling.partitionbatches import PartitionBatches
from featstore.strategies.devicecache import DeviceCache, rows_of_columns
from featstore.strategies.options import options_of
from featstore.strategies.registry import available_strategies, find_strategy

__all__ = ["PATH", "add_arguments", "run", "train_as_asked"]

PATH = "directory of the dataset, or of a pack in its place"


def _device(text: str) -> str:
    try:
        check_device(text)
    except (RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error).replace("device='cpu'", "--device cpu")) from None
    return text


@typed
def _share(text: str) -> float | str:
    if text == "auto":
        return text
    share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 < share <= 1:
        raise ValueError(f"a share is above 0 and at most 1, such as 0.2 or 20%, or auto, not {text}")
    return share


def add_arguments(parser: argparse.ArgumentParser, named: str | None = None) -> None:
    """Add the arguments of :func:`train_as_asked`, and the options of a named plug-in."""
    add_opening(parser)
    add_sampling(parser)
    parser.add_argument("--feature", default="x", help="feature; with several types of nodes, of all that have it (default: x)")
    add_target(parser)
    parser.add_argument(
        "--edge-features",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="features of edges that the layers average beside the neighbours' rows",
    )
    parser.add_argument(
        "--unlabelled", choices=("skip", "error"), default="skip", help="what to do with nodes without a label (default: skip)"
    )
    parser.add_argument("--hidden", type=positive, default=256, help="width of the hidden layers (default: 256)")
    parser.add_argument("--epochs", type=positive, default=2, help="(default: 2)")
    add_path(parser, "--save", metavar="FILE", help="write the trained model there, for featstore infer")
    add_path(
        parser,
        "--checkpoint",
        metavar="DIR",
        help="keep the state of the training there after every epoch, for --resume: model, optimizer, order and random state",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the state in --checkpoint, up to --epochs in all; begin if there is none",
    )
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of Adam (default: 0.003)")
    parser.add_argument("--dropout", type=float, default=0.5, help="(default: 0.5)")
    parser.add_argument(
        "--strategy",
        action=Given,
        choices=available_strategies(),
        default="auto",
        help="(default: auto, with --policy or --edge-policy ondemand; packed on a pack)",
    )
    plug_ins = [name for name in available_strategies() if name == named and name not in BUILT_IN]
    add_strategy_options(parser.add_argument_group("the strategy's options, and which take them"), [*BUILT_IN, *plug_ins])
    parser.add_argument(
        "--history",
        type=_share,
        metavar="SHARE",
        help="use embeddings of earlier steps, of this share of the nodes (0.2, 20%%) or of those that save most (auto), in "
        "place of expanding them",
    )
    parser.add_argument(
        "--staleness", action=Given, type=staleness, default=15, help="steps that --history uses one for (default: 15)"
    )
    parser.add_argument(
        "--prefetch",
        type=_batches_ahead,
        default=2,
        metavar="N",
        help="batches made ahead, or auto: more while the loop waits and memory is free (default: 2)",
    )
    parser.add_argument(
        "--stage-threads",
        type=_stage_threads,
        metavar="STAGE=N,…",
        help="threads by stage, such as sample=2,gather=1,read=1 (default: those of --threads)",
    )
    parser.add_argument("--device", type=_device, default="cpu", help="where batches go and the model is (default: cpu)")
    parser.add_argument(
        "--device-cache",
        type=share_or_size,
        metavar="SIZE",
        help="rows that stay on the device: bytes (1GiB), a share of the rows (10%%), or auto; with --pack those of its layout",
    )
    parser.add_argument("--device-policy", metavar="NAME", help="a static policy that chooses those rows (default: degree)")
    parser.add_argument(
        "--device-reserve", type=size, metavar="SIZE", help="bytes of the device that --device-cache auto leaves (default: 1GiB)"
    )


def named_strategy(arguments: Sequence[str]) -> str | None:
    """Find the strategy that a command line names, if any, before its options are known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--strategy", nargs="?")
    name: str | None = parser.parse_known_args(arguments)[0].strategy
    return name


def run(options: argparse.Namespace) -> int:
    """Train, and print the costs of every epoch."""
    result = train_as_asked(options.path, options, quiet=options.json)
    print_result(options, result.to_dict(), f"\n{describe_training(result)}")
    return 0


def _loader_options(options: argparse.Namespace) -> dict[str, Any]:
    if options.strategy == "packed" and options.pack is None:
        raise ValueError(
            "--strategy packed runs the samples of a pack: make one with featstore pack DATASET PACK, then give --pack PACK"
        )
    for name in ("edge_cache", "edge_policy"):
        if getattr(options, name) is not None and not options.edge_features:
            raise ValueError(f"--{name.replace('_', '-')} goes with --edge-features, which names what is read of edges")
    is_policy_given = options.policy is not None or options.edge_policy is not None
    if is_policy_given and options.strategy == "auto" and "strategy" not in getattr(options, "given", ()):
        options.strategy = "ondemand"  # auto chooses policies itself
    given = {"epochs": options.epochs} if "epochs" in options_of(find_strategy(options.strategy)) else {}
    strategy = strategy_of(options, options.strategy, **given)
    history = None
    if options.history is not None:
        history = History(options.hidden, options.history, options.staleness)
    elif "staleness" in getattr(options, "given", ()):
        raise ValueError("--staleness goes with --history")
    given = {name: getattr(options, name) for name in ("prefetch", "device", "device_cache")}
    if options.stage_threads is not None:
        given["threads"] = options.stage_threads
    if options.device_policy is not None or options.device_reserve is not None:
        given["device_cache"] = _device_cache(options)
    return {"strategy": strategy, "history": history, **given}


def _device_cache(options: argparse.Namespace) -> DeviceCache:
    """Make the device tier of the options, if a policy or a reserve was given."""
    if options.device_cache is None:
        raise ValueError("--device-policy and --device-reserve go with --device-cache: give its size, or auto")
    if options.device_reserve is not None and options.device_cache != "auto":
        raise ValueError("--device-reserve goes with --device-cache auto: a size leaves what it does not take")
    reserve = {} if options.device_reserve is None else {"reserve": options.device_reserve}
    return DeviceCache(options.device_cache, policy=options.device_policy, **reserve)


def _batches_ahead(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _stage_threads(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        stage, _, number = part.partition("=")
        if stage not in STAGES or stage in found or not number.isdecimal() or not int(number):
            raise argparse.ArgumentTypeError(
                f"{text!r}: write each of {', '.join(STAGES)} once at most, as sample=2,gather=1,read=1"
            )
        found[stage] = int(number)
    return found


def _in_place_of_its_dataset(path: str | os.PathLike[str], options: argparse.Namespace) -> None:
    """Set the options to train on the pack ``path``; ValueError if an option needs the dataset."""
    name = os.fspath(path)
    if options.pack is not None:
        raise ValueError(f"--pack goes with a dataset: {name} is itself a pack; leave one out")
    if "strategy" in getattr(options, "given", ()) and options.strategy != "packed":
        raise ValueError(f"--strategy {options.strategy} needs a dataset: {name} is a pack, which runs its own batches")
    unused = [option for option in ("neighbor_cache", "neighbor_policy") if getattr(options, option) is not None]
    unused += sorted({*SAMPLING} & set(getattr(options, "given", ())))
    for option in unused:
        raise ValueError(f"--{option.replace('_', '-')} goes with a dataset: {name} is a pack, from which nothing is sampled")
    options.pack, options.strategy = name, "packed"


def train_as_asked(path: str | os.PathLike[str], options: argparse.Namespace, *, quiet: bool = False) -> TrainResult:
    """Open a dataset, or a pack in its place, and train on it with the options of :func:`add_arguments`.

    Prints a line an epoch unless ``quiet``. Makes torch use deterministic algorithms, so that losses are the same, bit for bit,
    whatever the cache and the strategy, and with a pack's dataset or without.
    """
    is_alone = is_pack(path)
    if is_alone:
        _in_place_of_its_dataset(path, options)
    if options.pack is not None:
        for name in sorted({*BATCHES} & set(getattr(options, "given", ()))):
            raise ValueError(f"--{name} goes with batches that are drawn now: {options.pack} is a pack, which runs its own")
    loader_options = _loader_options(options)
    if options.resume and options.checkpoint is None:
        raise ValueError("--resume goes with --checkpoint, which names the directory of the state to go on from")
    with ExitStack() as stack:
        checkpoints = None
        if options.checkpoint is not None:
            checkpoints = stack.enter_context(Checkpoints(options.checkpoint, options.resume))
            _say_resumed(checkpoints, options)
        graph: OutOfCoreGraph | PackedGraph
        graph = PackedGraph(path, **opening(options)) if is_alone else open_graph(path, options)
        stack.enter_context(cast(AbstractContextManager[Any], graph))
        check_types(graph, options)
        if options.pack is not None:
            pack = _checked_pack(stack, graph, options)
            loader_options["strategy"] = replace(loader_options["strategy"], pack=pack)
        check_fields(graph, options.feature, options.labels, options.edge_features, options.target)
        sampler = None if isinstance(graph, PackedGraph) else make_sampler(graph, options, bool(options.edge_features))
        classified = cast(Labelled, graph if options.target is None else cast(Any, graph)[options.target])
        _say_unused_splits(classified)
        if isinstance(graph, OutOfCoreGraph):
            _say_unlabelled(classified, options.labels, options.unlabelled)
        if options.device.startswith("cuda"):
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA refuses deterministic products without it
        torch.use_deterministic_algorithms(True)
        batches = None  # a pack's own, or, of several types, the loader's
        if not isinstance(graph, PackedGraph) and options.target is None:
            batches = partial(_make_batches, graph, options)
        return train(
            graph,
            sampler,
            n_layers(options),
            feature=options.feature,
            labels=options.labels,
            target=options.target,
            edge_features=options.edge_features,
            hidden=options.hidden,
            dropout=options.dropout,
            lr=options.lr,
            epochs=options.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            batches=batches,
            max_batches=options.max_batches,
            progress=is_seen() and not quiet,
            on_epoch=None if quiet else _say,
            save=options.save,
            checkpoints=checkpoints,
            loader_options=loader_options,
        )


def _checked_pack(stack: ExitStack, graph: OutOfCoreGraph | PackedGraph, options: argparse.Namespace) -> Pack:
    """Open ``--pack``, make sure, before training, that it is one of this dataset and model, and evaluate as it was sampled."""
    dataset = "DATASET" if isinstance(graph, PackedGraph) else graph.path
    pack = stack.enter_context(open_pack(options.pack, dataset))
    if isinstance(graph, OutOfCoreGraph):
        pack.check(graph)
    if options.target is not None or isinstance(graph, OutOfCoreGraph):
        check_target(graph, options.target)
    options.target = target_of(pack, options.target)  # in place of its dataset a pack says which it is
    check_given(pack, options, ["fanouts", "batch_size"])
    check_fields(graph, options.feature, options.labels, target=options.target)
    options.fanouts = fanouts_of(pack) or options.fanouts
    options.batch_size = pack.record["batch_size"] or options.batch_size
    if isinstance(graph, PackedGraph) and "fanouts" not in getattr(options, "given", ()):
        options.fanouts = [-1] * pack.n_hops  # a model needs only their number
    if len(pack) and pack.n_hops != (n := n_layers(options)):
        option = {"layer": "layer-sizes", "shadow": "layers"}.get(options.sampler, "fanouts")
        what = f"is {n}" if option == "layers" else f"has {n}: give {pack.n_hops} numbers"
        raise ValueError(f"{options.pack} has samples of {pack.n_hops} hops, --{option} {what}")
    if options.strategy == "packed" and options.cache is None:
        wanted, nodes = options.device_cache, nodes_with(graph, options.feature)
        n_device: Sequence[int | None] = [None] * len(nodes.each)
        if wanted not in (None, "auto"):
            n_device = rows_of_columns(wanted, nodes.columns)
        policy = get_policy(options.policy or "belady").name
        for part, n_rows in zip(nodes.each, n_device, strict=True):
            if part.n:
                check_layout(pack, options.feature, part, policy, dataset, n_rows, wanted)
    return pack


def _make_batches(graph: OutOfCoreGraph, options: argparse.Namespace, seeds: torch.Tensor) -> Batches:
    """Make the batches of seeds, and print a line about the chosen macro-batches."""
    batches = make_batches(graph, options, seeds)
    if isinstance(batches, PartitionBatches) and options.macro is None:
        print(f"featstore: --macro {batches.macro}: {batches.macro_reason}", file=sys.stderr, flush=True)
    return batches


def _say_resumed(checkpoints: Checkpoints, options: argparse.Namespace) -> None:
    if options.resume:
        done = len(checkpoints.epochs)
        text = f"going on after {done} of {max(done, options.epochs)} epochs" if done else "no epoch is trained yet"
        print(f"featstore: {checkpoints.path}: {text}", file=sys.stderr, flush=True)


def _say_unused_splits(graph: Labelled) -> None:
    """Print a line about node data that looks like a split but has no split's name, and is not used."""
    unused = unknown_splits(graph.node_data)
    if unused:
        names = "; ".join(f"{split}: {', '.join(names)}" for split, names in SPLITS.items())
        text = f"featstore: node data not used as a split: {', '.join(unused)}. Names of splits are {names}"
        print(text, file=sys.stderr, flush=True)


def _say_unlabelled(graph: Labelled, labels: str, what: str) -> None:
    """Print a line about nodes of splits without a label, which are not used. ``"error"``: raise it."""
    count_classes(graph, labels)  # errors of the labels themselves come first
    left_out = unlabelled(graph, labels)
    if left_out:
        counts = ", ".join(f"{n:,} of {of:,} of {split}" for split, (n, of) in left_out.items())
        said = f"nodes without a label in {labels!r} (negative, NaN)"
        if what == "error":
            raise ValueError(f"{said}: {counts}; --unlabelled skip leaves them out")
        print(f"featstore: {said} are left out: {counts}", file=sys.stderr, flush=True)


def _say(epoch: Epoch) -> None:
    Bar.write(describe_epoch(epoch), file=sys.stdout)
    sys.stdout.flush()
