"""Packs on the command line: recognizing, opening and describing them, and checking what is asked of one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from featstore.config import format_size
from featstore.pack.layout import LayoutOptions, find_layouts, layout_bytes, layout_rows, unfinished_bytes
from featstore.pack.nodedata import named
from featstore.pack.offline import Pack
from featstore.pack.record import RECORD, SAMPLES
from featstore.strategies.domain import Domain
from featstore.topology.types import EdgeKey, Types, edge_name, qualified

__all__ = [
    "check_given",
    "check_layout",
    "describe_pack",
    "describe_types",
    "fanouts_of",
    "fanouts_text",
    "is_pack",
    "layout_text",
    "may_be_pack",
    "open_pack",
    "pack_bytes",
    "pack_text",
    "target_of",
    "types_lines",
]

Fanouts = list[int] | dict[EdgeKey, list[int]]


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


def describe_types(types: Types) -> dict[str, Any]:
    """Count the nodes and edges of each type, by its name; empty without named types."""
    if types.is_one:
        return {}
    return {
        "node_types": {name: each.n for name, each in types.nodes.items()},
        "edge_types": {edge_name(key): each.n_edges for key, each in types.edges.items()},
    }


def types_lines(result: Mapping[str, Any]) -> list[str]:
    """Format :func:`describe_types`' result as lines."""
    lines = [f"  node type  {name}: {n:,} nodes" for name, n in result.get("node_types", {}).items()]
    return lines + [f"  edge type  {name}: {n:,} edges" for name, n in result.get("edge_types", {}).items()]


def target_of(pack: Pack, target: str | None) -> str | None:
    """Get the type of a pack's seeds, None if nodes have no types; ValueError if ``target`` is another one."""
    if target is not None and target != pack.seed_type:
        seeds = "have no type" if pack.seed_type is None else f"are of type {pack.seed_type!r}"
        raise ValueError(
            f"--target {target}: the seeds of {pack.path} {seeds}; name a pack of that type, which featstore pack --target makes"
        )
    return pack.seed_type


def fanouts_of(pack: Pack) -> Fanouts | None:
    """Get the fan-outs of a pack's samples, one a hop; by type of edges if types have their own. None if they are not known."""
    if pack.types.is_one:
        found: list[int] | None = pack.record["fanouts"]
        return found
    recorded = pack.record["fanouts_of_types"]
    of_types: dict[EdgeKey, list[int]] = {key: recorded[edge_name(key)] for key in pack.types.edges if edge_name(key) in recorded}
    first = next(iter(of_types.values()), None)
    return first if all(each == first for each in of_types.values()) else of_types


def fanouts_text(fanouts: Fanouts | Mapping[str, list[int]]) -> str:
    """Format fan-outs, of all edges or by type, as text."""
    if isinstance(fanouts, list):
        return ",".join(map(str, fanouts))
    names = {name if isinstance(name, str) else edge_name(name): each for name, each in fanouts.items()}
    return " ".join(f"{name}={','.join(map(str, each))}" for name, each in names.items())


def _features(layout: LayoutOptions) -> list[str]:
    """Name the features whose rows a layout holds, each with its type if nodes have types."""
    if layout.rows is None:
        return list(layout.features)
    return [qualified(kind.name, each.rpartition("/")[2]) for each in layout.features for kind in layout.rows.kinds]


def describe_pack(pack: Pack) -> dict[str, Any]:
    """Describe a pack in plain containers."""
    fanouts = fanouts_of(pack)
    if isinstance(fanouts, dict):
        fanouts_entry: Any = {edge_name(key): each for key, each in fanouts.items()}
    else:
        fanouts_entry = fanouts
    return {
        "path": pack.path,
        "num_nodes": pack.num_nodes,
        **describe_types(pack.types),
        **({} if pack.seed_type is None else {"seed_type": pack.seed_type}),
        "epochs": pack.epochs,
        "batches": pack.n_batches,
        "batch_size": pack.record["batch_size"],
        "hops": pack.n_hops,
        "fanouts": fanouts_entry,
        "seed": pack.record["seed"],
        "nodes": int(pack.lengths.sum()),
        "layouts": [
            {
                "name": each.name,
                "features": _features(each),
                "policy": each.policy,
                "capacity": each.capacity,
                "device_rows": each.device_rows,
                "length": each.superbatch,
                "restart": each.restart,
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
        f"{result['path']}: {result['epochs']} x {result['batches']:,} batches of {result['nodes']:,} nodes in all, "
        f"{format_size(result['disk_bytes'])} on disk"
    )


def layout_text(layout: Mapping[str, Any]) -> str:
    """Format a layout of :func:`describe_pack`'s result as part of a line."""
    on_device = f", {layout['device_rows']:,} on the device" * bool(layout["device_rows"])
    of_ranks = f", for ranks of {layout['restart']:,} batches" * bool(layout["restart"])
    what = f"{layout['policy']}, {layout['capacity']:,} rows in memory{on_device}{of_ranks}"
    return f"layout of {', '.join(layout['features'])}: {what}"


def check_given(pack: Pack, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError if a given option differs from the pack's record of its samples."""
    given = getattr(options, "given", ())
    for name in names:
        made, wanted = fanouts_of(pack) if name == "fanouts" else pack.record[name], getattr(options, name)
        if name in given and made is not None and made != wanted:
            option = f"--{name.replace('_', '-')} {_shown(wanted)}"
            raise ValueError(f"{option}: the samples of {pack.path} were made with {_shown(made)}; leave it out")


def _shown(value: Any) -> str:
    return fanouts_text(value) if isinstance(value, (list, dict)) else str(value)


def check_layout(
    pack: Pack,
    feature: str,
    part: Domain,
    policy: str,
    dataset: str,
    n_device: int | None = None,
    device_cache: float | str | None = None,
) -> None:
    """Raise ValueError, with advice, unless the pack has exactly one layout of a feature with this policy.

    ``part`` is a part of what :func:`featstore.cli.recording.nodes_with` found of ``feature``. With ``n_device``, a layout with
    this number of rows on the device, as ``device_cache`` requests.
    """
    found = [
        each
        for each in find_layouts(pack)
        if (each.features, each.policy, each.rows) == (tuple(part.stores), policy, layout_rows(part.rows))
        and n_device in (None, each.device_rows)
        and not each.restart
    ]
    if len(found) == 1:
        return
    which = ", ".join(
        f"{each.capacity:,} rows in memory" + f" and {each.device_rows:,} on the device" * bool(each.device_rows)
        for each in found
    )
    there = f"{len(found)} layouts of {feature} with policy {policy} ({which})" if found else "no such layout"
    raise ValueError(
        f"{pack.path} has {there}: --cache SIZE says which to take or to make, or make one with: "
        f"featstore pack {dataset} {pack.path} --add-layout --policy {policy}"
        f"{'' if feature == 'x' else f' --feature {feature}'}"
        f"{'' if device_cache is None else f' --device-cache {device_cache}'}"
    )
