"""``featstore pack``: epochs sampled offline, and the rows packed that their batches need."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from typing import Any

from featstore.cache.base import get_policy
from featstore.cli.arguments import (
    BATCHES,
    SAMPLING,
    Given,
    add_opening,
    add_path,
    add_sampling,
    add_target,
    check_types,
    disk_size,
    feature_of,
    make_batches,
    make_sampler,
    open_graph,
    positive,
    share_or_size,
    typed,
)
from featstore.cli.output import print_result
from featstore.cli.packs import check_given, describe_pack, layout_text, open_pack, pack_bytes, pack_text, target_of
from featstore.cli.recording import check_target, nodes_with, seeds_of
from featstore.cli.splits import Labelled
from featstore.config import format_size, listed, parse_disk
from featstore.errors import CorruptionError, FormatError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.load.loader import Loader
from featstore.pack.layout import Layout, LayoutOptions, find_layouts, layout_bytes, unfinished_bytes
from featstore.pack.offline import Pack, sample_offline
from featstore.pack.record import RECORD
from featstore.sampling.batch import Sampler
from featstore.storage.calls import NO_SPACE
from featstore.storage.writer import is_drive_full
from featstore.strategies.options import LENGTH
from featstore.strategies.packed import Packed
from featstore.strategies.packsize import PackEstimate, estimate_layout, estimate_pack, layouts_there
from featstore.topology.types import qualified

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "pack", metavar="PACK", help="directory of the pack")
    add_opening(parser)
    add_sampling(parser, max_batches=False)
    parser.add_argument("--edges", action="store_true", help="number the edges, for train --edge-features with this pack")
    parser.add_argument("--feature", default="x", help="feature; with several types of nodes, of all that have it (default: x)")
    add_target(parser)
    parser.add_argument(
        "--seeds", action=Given, metavar="NAME", help="node data with the seeds (default: train_idx or train_mask)"
    )
    parser.add_argument("--epochs", action=Given, type=positive, default=1, help="epochs of samples (default: 1)")
    parser.add_argument(
        "--device-cache",
        type=share_or_size,
        metavar="SIZE",
        help="hottest rows, which will stay on the training device: bytes (1GiB), or a share (10%%; default: none)",
    )
    parser.add_argument(
        "--cache",
        type=share_or_size,
        default=0.1,
        metavar="SIZE",
        help="rows in memory: bytes (1GiB), or a share (10%%; default: 0.1)",
    )
    parser.add_argument(
        "--policy", default="belady", help="which rows stay in memory: belady (default), or a static one: frequency"
    )
    parser.add_argument(
        "--length", type=typed(LENGTH.parse), default="auto", metavar="N", help="batches that are planned together"
    )
    parser.add_argument(
        "--ranks", type=positive, default=1, metavar="N", help="make the layout for N processes that train together (default: 1)"
    )
    parser.add_argument("--disk", type=disk_size, metavar="SIZE", help="most bytes of the pack, or times the features (1.5x)")
    parser.add_argument(
        "--add-layout", action="store_true", help="pack the samples that PACK has, or finish what was interrupted"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a pack that is there")


def run(options: argparse.Namespace) -> int:
    """Make the pack, or add to it."""
    if options.edges and options.add_layout:
        raise ValueError("--edges goes with new samples: --add-layout packs those that the pack has")
    get_policy(options.policy)
    with open_graph(options.path, options) as graph:
        check_types(graph, options)
        if options.target is not None or not options.add_layout:  # samples that are there say their seeds' type
            check_target(graph, options.target)
        if graph.types.is_one:
            feature_of(options, graph)
        result = _pack_dataset(graph, options.pack, make_sampler(graph, options, options.edges), options, show=not options.json)
    print_result(options, result, _describe_pack(result, options.path))
    return 0


def _packed(options: argparse.Namespace, pack: Pack | None = None, disk: int | None = None) -> Packed:
    return Packed(pack, options.cache, options.policy, options.length, disk)


def _asked(options: argparse.Namespace, labels: list[str]) -> dict[str, Any]:
    """Convert the command line's options, and the names of labels in ``g.node_data``, to the arguments of the estimates."""
    return {"packed": _packed(options), "features": [options.feature], "labels": labels, "device_cache": options.device_cache}


def _say(estimate: PackEstimate, show: bool) -> None:
    """Print the files to be written; on stderr if the result is JSON, which has stdout for itself."""
    print(estimate, file=sys.stdout if show else sys.stderr, flush=True)


def _pack_dataset(
    g: OutOfCoreGraph, path: str | os.PathLike[str], sampler: Sampler, options: argparse.Namespace, *, show: bool
) -> dict[str, Any]:
    """Sample epochs, unless ``--add-layout`` uses existing samples, and pack them; return a description.

    After an OSError (the disk, or ``--disk``, is full, or by an estimate does not suffice) existing files are unchanged.
    """
    begin = time.perf_counter()
    estimate: PackEstimate | None = None
    target = os.path.abspath(os.fspath(path))
    if options.add_layout and options.overwrite:
        raise ValueError("--add-layout keeps the samples and --overwrite replaces them: leave one out")
    seed_type = options.target
    if options.add_layout:
        pack = open_pack(target, g.path)
        pack.check(g)
        seed_type = target_of(pack, seed_type)
    labelled: Labelled = g if seed_type is None else g[seed_type]
    labels = [options.labels] if options.labels in labelled.node_data else []  # --seeds needs none
    if not labels and "labels" in getattr(options, "given", ()):
        whose = "the dataset" if seed_type is None else repr(seed_type)
        raise ValueError(f"--labels: {whose} has no {options.labels!r}; it has {listed(sorted(labelled.node_data))}")
    fields = [name if seed_type is None else qualified(seed_type, name) for name in labels]  # in g.node_data
    disk = None if options.disk is None else parse_disk(options.disk, nodes_with(g, options.feature).n_bytes)
    if options.add_layout:
        check_given(pack, options, ["fanouts", "batch_size", "epochs", "seed"])
        if options.seeds is not None:
            raise ValueError(f"--seeds {options.seeds}: --add-layout packs the samples that are there; leave one out")
        for name in sorted({*BATCHES, *SAMPLING} & set(getattr(options, "given", ()))):
            raise ValueError(f"--{name.replace('_', '-')}: --add-layout packs the samples that are there; leave one out")
    elif os.path.lexists(target) and not options.overwrite:
        if not os.path.lexists(os.path.join(target, RECORD)):
            raise ValueError(f"{path} is there already, and is no pack")
        raise ValueError(f"{path} is there already: --add-layout packs its samples, --overwrite samples anew")
    else:
        seeds = seeds_of(labelled, options.labels, options.seeds)
        batches: dict[str, Any] = {"seeds": (seed_type, seeds), "batch_size": options.batch_size, "seed": options.seed}
        if seed_type is None:
            batches = {"seeds": make_batches(g, options, seeds)}
        batches |= {"epochs": options.epochs, "path": target, "disk": disk}
        estimate = estimate_pack(g, sampler, **batches, **_asked(options, fields))
        _say(estimate, show)
        estimate.check()
        pack = sample_offline(g, sampler, **batches, overwrite=options.overwrite, progress=show)
    sampled_s = time.perf_counter() - begin
    with pack:
        before = {each.name for each in find_layouts(pack)}
        made: set[str] = set()
        n_bytes = pack_bytes(target) - unfinished_bytes(pack)  # it may be finished now
        if disk is not None and n_bytes >= disk:
            raise OSError(
                errno.ENOSPC, f"the samples take {format_size(n_bytes)} of a --disk of {format_size(disk)}: give more", target
            )
        room = None
        if disk is not None:  # an existing layout takes its own space
            there = layouts_there(g, pack, [options.feature], _packed(options), options.device_cache)
            sizes = dict[tuple[str, ...], int]()  # of the layouts of each column the largest, as of one there may be smaller ones
            for each in there:
                sizes[each.features] = max(sizes.get(each.features, 0), layout_bytes(pack.file(each.name)))
            room = disk - n_bytes + sum(sizes.values())
        if estimate is None:
            estimate = estimate_layout(g, pack, disk=room, **_asked(options, fields))
            _say(estimate, show)
            estimate.check()
        # The device need not be here, nor have its rows in the memory of this machine: on "meta" a tier is shapes without rows.
        given: dict[str, Any] = {"features": [options.feature], "labels": labels, "device": "meta"}
        given |= {"device_cache": options.device_cache, "rank": 0, "world_size": options.ranks}
        try:
            with Loader(g, strategy=_packed(options, pack, room), **given) as loader:
                stats = loader.stats()
                run = stats.get("layouts", [stats["layout"]] if "layout" in stats else [])
                made |= {layout["name"] for layout in run if layout["made"]}
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "the samples, and what is packed of them, are kept: the same command with --add-layout goes on"
            ) from None
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            if error.filename not in {pack.file(name) for name in before}:  # otherwise the layout exists, within the pack's limit
                more = "make room" if is_drive_full(error) else "give more --disk, more --cache, or --policy frequency,"
                kept = f"the samples are kept: {more} and ask again with --add-layout"
                raise OSError(error.errno, f"{error.strerror}; {kept}", error.filename) from None
        found = describe_pack(pack)
        for each, layout in zip(find_layouts(pack), found["layouts"], strict=True):
            layout["new"] = each.name in made
            layout["damage"] = None if layout["new"] else _seen_damage(g, pack, each)
        return {
            **found,
            "estimate": estimate.to_dict(),
            "sample_s": round(sampled_s, 3),
            "pack_s": round(time.perf_counter() - begin - sampled_s, 3),
        }


def _seen_damage(g: OutOfCoreGraph, pack: Pack, options: LayoutOptions) -> str | None:
    """Describe the damage that opening a layout finds: in its files' sizes, headers, indexes and identities."""
    try:
        Layout(pack, options, g.reader).close()
    except (CorruptionError, FormatError, FileNotFoundError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return f"{text}; remove {pack.file(options.name)}, and --add-layout makes it anew"
    return None


def _describe_pack(result: dict[str, Any], dataset: str) -> str:
    lines = [pack_text(result)]
    for each in result["layouts"]:
        what = "made now" if each["new"] else "was there" if each["damage"] is None else f"DAMAGED: {each['damage']}"
        lines.append(f"  {layout_text(each)}, {what}")
    if not all(each["new"] for each in result["layouts"]):
        lines.append(f"  of what was there sizes and headers were checked; every byte is by: featstore verify {result['path']}")
    if result["unfinished_bytes"]:
        left = format_size(result["unfinished_bytes"])
        lines.append(f"  interrupted layouts hold {left}: ask for them again with --add-layout, or remove layout-*.partial")
    lines.append(f"sampled in {result['sample_s']:.1f} s, packed in {result['pack_s']:.1f} s")
    target = f" --target {result['seed_type']}" if "seed_type" in result else ""
    lines.append(f"train on it: featstore train {dataset}{target} --strategy packed --pack {result['path']}")
    if result["node_data"]:
        lines.append("on a copy of it, where the dataset is not: featstore train COPY")
    return "\n".join(lines)
