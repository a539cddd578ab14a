"""``featstore pack``: sample epochs offline and pack what their batches need, and the checks of a pack that is trained on."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from featstore.cache.base import get_policy
from featstore.config import format_size, parse_disk
from featstore.errors import CorruptionError, FormatError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.plan.layout import PREFIX as LAYOUT
from featstore.plan.layout import Layout, LayoutOptions, find_layouts, unfinished_bytes
from featstore.plan.nodedata import PREFIX as NODE_DATA
from featstore.plan.nodedata import named
from featstore.plan.offline import RECORD, SAMPLES, Pack, sample_offline
from featstore.run.loader import Loader
from featstore.run.options import parse_planning
from featstore.run.packsize import PackEstimate, estimate_layout, estimate_pack
from featstore.run.precache import cache_bytes
from featstore.run.recording import seeds_of
from featstore.sampling.batch import Sampler
from featstore.storage.writer import is_drive_full

__all__ = [
    "advice_on_damage",
    "check_given",
    "check_layout",
    "describe_pack",
    "describe_verified",
    "is_pack",
    "may_be_pack",
    "open_pack",
    "pack_dataset",
]


def _size_of(pack: str) -> int:
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(pack) for name in names)


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a pack; a dataset is none."""
    return os.path.lexists(os.path.join(os.fspath(path), RECORD))


def may_be_pack(path: str) -> bool:
    """Whether a directory holds a pack, or what is left of one whose record is missing."""
    return is_pack(path) or os.path.lexists(os.path.join(path, SAMPLES))


def open_pack(path: str | os.PathLike[str], dataset: str) -> Pack:
    """Open a pack, or say how one is made.

    Raises
    ------
    ValueError
        There is none.
    """
    try:
        return Pack(path)
    except (FileNotFoundError, NotADirectoryError):
        name = os.fspath(path)
        raise ValueError(f"{name}: no pack is there; make one with: featstore pack {dataset} {name}") from None


def check_given(pack: Pack, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError where an option was given that is not what the pack's record says of its samples."""
    given = getattr(options, "given", ())
    for name in names:
        made, wanted = pack.record[name], getattr(options, name)
        if name in given and made is not None and made != wanted:
            option = f"--{name.replace('_', '-')} {_shown(wanted)}"
            raise ValueError(f"{option}: the samples of {pack.path} were made with {_shown(made)}; leave it out")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def check_layout(
    pack: Pack,
    features: Sequence[str],
    policy: str,
    dataset: str,
    n_device: int | None = None,
    device_cache: float | str | None = None,
) -> None:
    """Raise ValueError, which says what to do, unless the pack has exactly one layout of these features and this policy.

    With ``n_device``: one that has so many rows on the device, as ``device_cache`` asks for.
    """
    found = [
        each
        for each in find_layouts(pack)
        if sorted(each.features) == sorted(features) and each.policy == policy and n_device in (None, each.device_rows)
    ]
    if len(found) == 1:
        return
    which = ", ".join(
        f"{each.capacity:,} rows in memory" + f" and {each.device_rows:,} on the device" * bool(each.device_rows)
        for each in found
    )
    there = f"{len(found)} layouts of {', '.join(features)} with policy {policy} ({which})" if found else "no such layout"
    raise ValueError(
        f"{pack.path} has {there}: --feature-cache SIZE says which to take or to make, or make one with: "
        f"featstore pack {dataset} {pack.path} --add-layout --policy {policy}"
        f"{''.join(f' --feature {name}' for name in features if name != 'x')}"
        f"{'' if device_cache is None else f' --device-cache {device_cache}'}"
    )


def _check_packing(g: OutOfCoreGraph, options: argparse.Namespace) -> None:
    """Raise what the packing would raise about its options, before epochs are sampled for it."""
    store = g.features[options.feature]
    width = {options.feature: store.nbytes // max(1, len(store))}
    asked: dict[str, Any] = {"superbatch": options.superbatch, "overlap": None, "disk": None, "run_dir": None}
    parse_planning(g, store.nbytes, "packed", options.policy, **asked)
    if g.num_nodes:
        cache_bytes(options.feature_cache, g.num_nodes, width, get_policy("belady"), g.budget, g.budget.available)


def _asked(options: argparse.Namespace, labels: str | None) -> dict[str, Any]:
    """Return the arguments of the estimates that the options of the command line come to."""
    names = ["feature_cache", "device_cache", "policy", "superbatch"]
    return {"features": [options.feature], "labels": labels, **{name: getattr(options, name) for name in names}}


def _say(estimate: PackEstimate, show: bool) -> None:
    """Print what will be written: where the result is JSON, which has stdout for itself, on stderr."""
    print(estimate, file=sys.stdout if show else sys.stderr, flush=True)


def pack_dataset(
    g: OutOfCoreGraph,
    path: str | os.PathLike[str],
    sampler: Sampler,
    options: argparse.Namespace,
    *,
    show: bool,
) -> dict[str, Any]:
    """Sample epochs, unless ``--add-layout`` takes the samples that are there, and pack them; return what was made.

    Raises
    ------
    FileExistsError
        Something is there, and neither ``--add-layout`` nor ``--overwrite`` was given.
    OSError
        The disk, or ``--disk``, is full, or an estimate says that it cannot suffice; what was there before is as it was.
    """
    begin = time.perf_counter()
    estimate: PackEstimate | None = None
    disk = None if options.disk is None else parse_disk(options.disk, g.features[options.feature].nbytes)
    target = os.path.abspath(os.fspath(path))
    if options.add_layout and options.overwrite:
        raise ValueError("--add-layout keeps the samples and --overwrite replaces them: leave one out")
    labels = options.labels if options.labels in g.node_data else None  # --seeds needs none
    if labels is None and "labels" in getattr(options, "given", ()):
        raise ValueError(f"--labels: the dataset has no {options.labels!r}; it has {sorted(g.node_data)}")
    if options.add_layout:
        pack = open_pack(target, g.path)
        pack.check(g)
        check_given(pack, options, ["fanouts", "batch_size", "epochs", "seed"])
        if options.seeds is not None:
            raise ValueError(f"--seeds {options.seeds}: --add-layout packs the samples that are there; leave one out")
    elif os.path.lexists(target) and not options.overwrite:
        if not os.path.lexists(os.path.join(target, RECORD)):
            raise ValueError(f"{path} is there already, and is no pack")
        raise ValueError(f"{path} is there already: --add-layout packs its samples, --overwrite samples anew")
    else:
        _check_packing(g, options)
        seeds = seeds_of(g, options.labels, options.seeds)
        asked = {**_asked(options, labels), "seed": options.seed}
        estimate = estimate_pack(g, sampler, seeds, options.batch_size, options.epochs, target, disk=disk, **asked)
        _say(estimate, show)
        estimate.check()
        pack = sample_offline(
            g,
            sampler,
            seeds,
            options.batch_size,
            options.epochs,
            target,
            seed=options.seed,
            overwrite=options.overwrite,
            disk=disk,
            progress=show,
        )
    sampled_s = time.perf_counter() - begin
    with pack:
        before = {each.name for each in find_layouts(pack)}
        made: set[str] = set()
        n_bytes = _size_of(target) - unfinished_bytes(pack)  # which may be what is finished now
        if disk is not None and n_bytes >= disk:
            raise OSError(
                errno.ENOSPC, f"the samples take {format_size(n_bytes)} of a --disk of {format_size(disk)}: give more", target
            )
        if estimate is None:
            estimate = estimate_layout(g, pack, disk=None if disk is None else disk - n_bytes, **_asked(options, labels))
            _say(estimate, show)
            estimate.check()
        given: dict[str, Any] = {"features": [options.feature], "labels": labels, "feature_cache": options.feature_cache}
        left = None if disk is None else disk - n_bytes
        given |= {"policy": options.policy, "superbatch": options.superbatch, "disk": left}
        # The device need not be here, nor have its rows in the memory of this machine: on "meta" a tier is shapes without rows.
        given |= {"device_cache": options.device_cache, "device": "meta"}
        try:
            with Loader(g, strategy="packed", pack=pack, **given) as loader:
                if loader.made_layout is not None:
                    made.add(loader.made_layout)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "the samples, and what is packed of them, are kept: the same command with --add-layout goes on"
            ) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if error.filename not in {pack.file(name) for name in before}:  # else it is there, within what the pack may take
                more = "make room" if is_drive_full(error) else "give more --disk, or more --feature-cache,"
                kept = f"the samples are kept: {more} and ask again with --add-layout"
                raise OSError(error.errno, f"{error.strerror}; {kept}", error.filename) from None
        return {
            "path": target,
            "epochs": pack.epochs,
            "batches": pack.n_batches,
            "rows": int(pack.lengths.sum()),
            "layouts": [
                {
                    "features": list(each.features),
                    "policy": each.policy,
                    "capacity": each.capacity,
                    "device_rows": each.device_rows,
                    "new": each.name in made,
                    "damage": None if each.name in made else _seen_damage(g, pack, each),
                }
                for each in find_layouts(pack)
            ],
            "node_data": sorted(named(pack)),
            "estimate": estimate.to_dict(),
            "disk_bytes": _size_of(target),
            "unfinished_bytes": unfinished_bytes(pack),
            "sample_s": round(sampled_s, 3),
            "pack_s": round(time.perf_counter() - begin - sampled_s, 3),
        }


def _seen_damage(g: OutOfCoreGraph, pack: Pack, options: LayoutOptions) -> str | None:
    """Return what opening a layout finds wrong: its files' sizes, headers, indexes, and whether they are its own."""
    try:
        Layout(pack, options, g.reader).close()
    except (CorruptionError, FormatError, FileNotFoundError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return f"{text}; remove {pack.file(options.name)}, and --add-layout makes it anew"
    return None


def describe_pack(result: dict[str, Any], dataset: str) -> str:
    """Return as text what was made, and how to train on it."""
    lines = [
        f"{result['path']}: {result['epochs']} x {result['batches']:,} batches, {result['rows']:,} rows asked for, "
        f"{format_size(result['disk_bytes'])} on disk"
    ]
    for each in result["layouts"]:
        what = "made now" if each["new"] else "was there" if each["damage"] is None else f"DAMAGED: {each['damage']}"
        rows = f"{each['capacity']:,} rows in memory" + f", {each['device_rows']:,} on the device" * bool(each["device_rows"])
        lines.append(f"  layout of {', '.join(each['features'])}: {each['policy']}, {rows}, {what}")
    if not all(each["new"] for each in result["layouts"]):
        lines.append(f"  of what was there sizes and headers were checked; every byte is by: featstore verify {result['path']}")
    if result["unfinished_bytes"]:
        left = format_size(result["unfinished_bytes"])
        lines.append(f"  interrupted layouts hold {left}: ask for them again with --add-layout, or remove layout-*.partial")
    lines.append(f"sampled in {result['sample_s']:.1f} s, packed in {result['pack_s']:.1f} s")
    lines.append(f"train on it: featstore train {dataset} --strategy packed --pack {result['path']}")
    if result["node_data"]:
        lines.append("on a copy of it, where the dataset is not: featstore train COPY")
    return "\n".join(lines)


def describe_verified(result: dict[str, Any]) -> str:
    """Return as text what of a pack was checked, and what of its directory was not."""
    what = f"samples, {result['layouts']} layout{'s' * (result['layouts'] != 1)}"
    what += f", node data {', '.join(result['node_data'])}" if result["node_data"] else ""
    lines = [f"{result['path']}: {result['files']} files, {format_size(result['bytes'])} ({what}), all as they were written"]
    if result["unfinished_bytes"]:
        left = format_size(result["unfinished_bytes"])
        lines.append(f"  not checked: {left} of interrupted packing, which --add-layout goes on with; or remove layout-*.partial")
    if result["others"]:
        lines.append(f"  not checked, for they are none of a pack's files: {', '.join(result['others'])}")
    return "\n".join(lines)


def advice_on_damage(error: BaseException) -> str:
    """Return what to do about a damaged or missing file of a pack, as the end of a line; nothing where it is no pack's."""
    found = os.fsdecode(error.filename or "") if isinstance(error, OSError) else str(error).split(": ")[0].split(" is ")[0]
    folders = [found, os.path.dirname(found), os.path.dirname(os.path.dirname(found))]
    path = next((folder for folder in folders if may_be_pack(folder)), None)
    if path is None:
        return ""
    name = found.removeprefix(os.path.join(path, "")).split(os.sep)[0]
    if name.startswith(LAYOUT):
        return f"; remove {os.path.join(path, name)}, and featstore pack DATASET {path} --add-layout makes it anew"
    if name.startswith(NODE_DATA):
        first = "remove this file, and " if os.path.lexists(found) else ""
        return f"; {first}featstore pack DATASET {path} --add-layout writes it anew"
    return f"; take another copy of the pack, or sample anew: featstore pack DATASET {path} --overwrite"
