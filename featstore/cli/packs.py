"""Packs on the command line: recognizing, opening and describing them, and checking what is asked of one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from featstore.config import format_size
from featstore.pack.layout import find_layouts, layout_bytes, unfinished_bytes
from featstore.pack.nodedata import named
from featstore.pack.offline import Pack
from featstore.pack.record import RECORD, SAMPLES

__all__ = [
    "check_given",
    "check_layout",
    "describe_pack",
    "is_pack",
    "layout_text",
    "may_be_pack",
    "open_pack",
    "pack_bytes",
    "pack_text",
]


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Tell whether a directory holds a pack; a dataset is none."""
    return os.path.lexists(os.path.join(os.fspath(path), RECORD))


def may_be_pack(path: str) -> bool:
    """Tell whether a directory holds a pack, or the files of a pack whose record is missing."""
    return is_pack(path) or os.path.lexists(os.path.join(path, SAMPLES))


def open_pack(path: str | os.PathLike[str], dataset: str) -> Pack:
    """Open a pack; ValueError, with the command that makes one, if there is none."""
    try:
        return Pack(path)
    except (FileNotFoundError, NotADirectoryError):
        name = os.fspath(path)
        raise ValueError(f"{name}: no pack is there; make one with: featstore pack {dataset} {name}") from None


def pack_bytes(path: str) -> int:
    """Sum the bytes of all files in a pack's directory."""
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def describe_pack(pack: Pack) -> dict[str, Any]:
    """Describe a pack in plain containers."""
    return {
        "path": pack.path,
        "num_nodes": pack.num_nodes,
        "epochs": pack.epochs,
        "batches": pack.n_batches,
        "batch_size": pack.record["batch_size"],
        "hops": pack.n_hops,
        "fanouts": pack.record["fanouts"],
        "seed": pack.record["seed"],
        "rows": int(pack.lengths.sum()),
        "layouts": [
            {
                "name": each.name,
                "features": list(each.features),
                "policy": each.policy,
                "capacity": each.capacity,
                "device_rows": each.device_rows,
                "length": each.superbatch,
                "bytes": layout_bytes(pack.file(each.name)),
            }
            for each in find_layouts(pack)
        ],
        "node_data": sorted(named(pack)),
        "disk_bytes": pack_bytes(pack.path),
        "unfinished_bytes": unfinished_bytes(pack),
    }


def pack_text(result: Mapping[str, Any]) -> str:
    """Format :func:`describe_pack`'s result, without its layouts, as a line."""
    return (
        f"{result['path']}: {result['epochs']} x {result['batches']:,} batches, {result['rows']:,} rows asked for, "
        f"{format_size(result['disk_bytes'])} on disk"
    )


def layout_text(layout: Mapping[str, Any]) -> str:
    """Format a layout of :func:`describe_pack`'s result as part of a line."""
    on_device = f", {layout['device_rows']:,} on the device" * bool(layout["device_rows"])
    return f"layout of {', '.join(layout['features'])}: {layout['policy']}, {layout['capacity']:,} rows in memory{on_device}"


def check_given(pack: Pack, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError if a given option differs from the pack's record of its samples."""
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
    """Raise ValueError, with advice, unless the pack has exactly one layout of these features and this policy.

    With ``n_device``, a layout with this number of rows on the device, as ``device_cache`` requests.
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
        f"{pack.path} has {there}: --cache SIZE says which to take or to make, or make one with: "
        f"featstore pack {dataset} {pack.path} --add-layout --policy {policy}"
        f"{''.join(f' --feature {name}' for name in features if name != 'x')}"
        f"{'' if device_cache is None else f' --device-cache {device_cache}'}"
    )
