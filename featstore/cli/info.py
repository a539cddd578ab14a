"""``featstore info``: what a dataset, or a pack, holds."""

from __future__ import annotations

import argparse
import os
from typing import Any

from featstore.cli.arguments import add_opening, open_graph
from featstore.cli.convert import describe_form, form_text
from featstore.cli.output import print_result
from featstore.cli.packs import describe_pack, describe_types, fanouts_text, layout_text, may_be_pack, pack_text, types_lines
from featstore.config import format_size, listed
from featstore.estimate import copies, tablespeed
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore
from featstore.idmaps.idmap import map_of, maps_of
from featstore.pack.offline import Pack
from featstore.storage.drive import kept_speed
from featstore.topology.types import ONE_NODE

__all__ = ["PATH", "add_arguments", "describe", "description", "run"]

PATH = "directory of the dataset, or of a pack"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_opening(parser)


def describe(graph: OutOfCoreGraph) -> dict[str, Any]:
    """Describe a dataset in plain containers."""
    catalog = graph.snapshot.catalog
    features, edge_features = (
        {
            name: {"shape": list(store.shape), "dtype": str(store.dtype).removeprefix("torch."), "bytes": _bytes(graph, store)}
            for name, store in stores.items()
        }
        for stores in (graph.features, graph.edge_features)
    )
    fields: Any = graph.node_data  # which describes them without reading them
    described = {name: fields.described(name) for name in fields}
    data = {name: {"shape": shape, "dtype": dtype} for name, (dtype, shape, _) in described.items()}
    for name, inputs in graph.stale_features.items():
        features[name]["stale"] = inputs
    form = describe_form(graph.path, catalog)
    disk = sum(
        entry.stat().st_size
        for folder in (graph.path, *form.get("stripes", ()))
        for entry in os.scandir(folder)
        if entry.is_file(follow_symlinks=False)
    )
    return {
        "path": graph.path,
        "num_nodes": graph.num_nodes,
        "num_edges": graph.num_edges,
        **describe_types(graph.types),
        **form,
        "features": features,
        "node_data": data,
        "edge_features": edge_features,
        **_own_part(graph),
        **_id_maps(graph),
        "parts": {name: {"parts": kept.n_parts, "method": kept.method} for name, kept in graph.parts().items()},
        "disk_bytes": disk,
        "drive": kept_speed(catalog),
        "copies": catalog.extra.get(copies.KEY),
        "tables": catalog.extra.get(tablespeed.KEY),
    }


def _bytes(graph: OutOfCoreGraph, store: FeatureStore) -> int:
    """Count the bytes of the rows that are there: an exported part has those of its nodes alone."""
    part = graph.own_part
    return store.nbytes if part is None else store.nbytes // len(store) * part.n_nodes


def _id_maps(graph: OutOfCoreGraph) -> dict[str, Any]:
    """Describe the maps of names to ids, if there are any."""
    maps = {}
    for of in maps_of(graph.catalog):
        found = map_of(graph.catalog, of, graph.types.nodes[of].n, graph.path) if of in graph.types.nodes else None
        if found is not None:
            maps[of] = {"kind": found.kind, "names": found.n, "bytes": found.n_bytes}
    return {"ids": maps} if maps else {}


def _own_part(graph: OutOfCoreGraph) -> dict[str, Any]:
    part = graph.own_part
    if part is None:
        return {}
    counts = {"nodes": part.n_nodes, "train_nodes": part.n_train, "dropped": part.n_dropped}
    return {"part": {"name": part.name, "number": part.number, "hops": part.hops, **counts}}


def description(result: dict[str, Any]) -> str:
    """Format :func:`describe`'s result as text."""
    lines = [
        result["path"],
        f"  {result['num_nodes']:,} nodes, {result['num_edges']:,} edges, {format_size(result['disk_bytes'])} on disk",
    ]
    lines += types_lines(result)
    if (part := result.get("part")) is not None:
        lines.append(
            f"  part       {part['number']} of {part['name']!r}, {part['hops']} hops: has {part['nodes']:,} of these nodes, "
            f"{part['train_nodes']:,} to train on"
        )
    lines.append(f"  topology   {form_text(result)}")
    lines += [f"  stripe     {stripe}: {format_size(n_bytes)}" for stripe, n_bytes in result.get("stripes", {}).items()]
    for what in ("features", "node_data", "edge_features"):
        for name, field in result[what].items():
            size = f", {format_size(field['bytes'])}" if "bytes" in field else ""
            if "stale" in field:
                size += f", stale: made of an earlier {listed(field['stale'])}"
            lines.append(
                f"  {what.replace('_features', ' data').replace('_', ' '):<10} {name}: {field['dtype']} {field['shape']}{size}"
            )
    for name, ids in result.get("ids", {}).items():
        of = "" if name == ONE_NODE else f"{name}: "
        lines.append(f"  ids        {of}{ids['names']:,} names, {ids['kind']}, {format_size(ids['bytes'])}")
    lines += [f"  parts      {name}: {kept['parts']:,} by {kept['method']}" for name, kept in result["parts"].items()]
    if (drive := result["drive"]) is not None:
        lines.append(
            f"  drive      {_each(drive, 'iops', 1, ',.0f')} random reads/s; GB/s: {_each(drive, 'bandwidth')} read, "
            f"{_each(drive, 'gather_bandwidth')} gathered, {_each(drive, 'write_bandwidth')} written, "
            f"{_each(drive, 'fill_bandwidth')} read and copied in turns; {_each(drive, 'write_overlap', 0.01, '.0f')} % of "
            f"writing beside reading"
        )
    if (copies := result["copies"]) is not None:
        lines.append(
            f"  copies     GB/s of rows of {copies['where']['row_bytes']:,} bytes: {_each(copies, 'copy_bandwidth')} alone, "
            f"{_each(copies, 'batch_bandwidth')} by a batch's plan, {_each(copies, 'fresh_bandwidth')} into fresh memory"
        )
    if (tables := result["tables"]) is not None:
        lines.append(
            f"  tables     ns a row to make a pack's: {_each(tables, 'static_table_s', 1e-9, '.0f')} where rows in memory stay, "
            f"{_each(tables, 'planned_table_s', 1e-9, '.0f')} where they change; {_each(tables, 'missed_table_s', 1e-9, '.0f')} "
            f"more for one that is missed"
        )
    return "\n".join(lines)


def _each(entry: dict[str, Any], name: str, unit: float = 1e9, form: str = ".2f") -> str:
    """Format a rate as text; an older method of measuring has fewer rates."""
    return format(entry[name] / unit, form) if name in entry else "?"


def _packs_description(result: dict[str, Any]) -> str:
    size = "" if result["batch_size"] is None else f" of {result['batch_size']:,} seeds"
    size += f" of type {result['seed_type']!r}" if "seed_type" in result else ""
    fanouts = "" if result["fanouts"] is None else f", fan-outs {fanouts_text(result['fanouts'])}"
    lines = [
        pack_text(result),
        *types_lines(result),
        f"  samples    batches{size}, {result['hops']} hops{fanouts}, seed {result['seed']}, of {result['num_nodes']:,} nodes",
    ]
    for each in result["layouts"]:
        length = f", {each['length']:,} batches planned together" * bool(each["length"])
        lines.append(f"  {layout_text(each)}{length}, {format_size(each['bytes'])}")
    if not result["layouts"]:
        lines.append(f"  no layout: featstore pack DATASET {result['path']} --add-layout makes one")
    lines += [f"  node data  {name}" for name in result["node_data"]]
    if result["unfinished_bytes"]:
        lines.append(f"  interrupted layouts hold {format_size(result['unfinished_bytes'])}; --add-layout goes on with them")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Print a description of the dataset, and of how it is read; or of the pack."""
    if may_be_pack(options.path):
        with Pack(options.path) as pack:
            result = describe_pack(pack)
        print_result(options, result, _packs_description(result))
        return 0
    with open_graph(options.path, options) as graph:
        result = describe(graph)
        result["budget"] = graph.budget.total
        readers = {name: store.stats() for name, store in graph.features.items()}
        result["reader"] = {name: {key: stats[key] for key in ("backend", "reason", "mode")} for name, stats in readers.items()}
    lines = [description(result), f"  budget     {format_size(result['budget'])}"]
    lines += [f"  reader     {name}: {r['backend']}, {r['mode']} ({r['reason']})" for name, r in result["reader"].items()]
    print_result(options, result, "\n".join(lines))
    return 0
