"""``featstore export``: a self-reliant part as a dataset of its own, or all fields and edges as plain files."""

from __future__ import annotations

import argparse
import time

from featstore.cli.arguments import add_opening, add_path, open_graph, size
from featstore.cli.convert import describe_form, form_text
from featstore.cli.output import print_result
from featstore.partitioning.export import export
from featstore.registry import adapter
from featstore.storage.catalog import TOPOLOGIES, current_catalog

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "output", metavar="PATH", help="directory of the new dataset, or of the files")
    add_opening(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--part", type=int, metavar="N", help="number of the part, from 0, that becomes a dataset of its own")
    what.add_argument("--form", choices=["npy", "parquet"], help="write features, node data and edges as files of this form")
    parser.add_argument("--no-edges", action="store_true", help="with --form: neither edges nor their features")
    parser.add_argument("--name", help="name of the kept parts (default: the self-reliant ones that were kept last)")
    parser.add_argument("--topology", choices=TOPOLOGIES, help="form of the new adjacency (default: that of the dataset)")
    parser.add_argument("--chunk-bytes", type=size, metavar="SIZE", help="with chunked: size of a chunk, a multiple of 4KiB")
    parser.add_argument("--overwrite", action="store_true", help="with --part: replace a dataset that is there")


def run(options: argparse.Namespace) -> int:
    """Export the part, or the files, and print what there is."""
    begin = time.perf_counter()
    if options.form is not None:
        return _run_files(options, begin)
    if options.no_edges:
        raise ValueError("--no-edges is for --form: a part has edges")
    form = {"topology": options.topology, "chunk_bytes": options.chunk_bytes}
    with open_graph(options.path, options) as graph:
        part = export(
            graph, options.output, options.part, options.name, **form, overwrite=options.overwrite, progress=not options.json
        )
    catalog = current_catalog(options.output)
    result = {
        "path": options.output,
        "part": part.number,
        "name": part.name,
        "hops": part.hops,
        "nodes": part.n_nodes,
        "train_nodes": part.n_train,
        "dropped": part.n_dropped,
        "edges": catalog.num_edges,
        **describe_form(options.output, catalog),
        "seconds": round(time.perf_counter() - begin, 3),
    }
    text = (
        f"{options.output}: {part}, {part.n_nodes:,} nodes ({part.n_train:,} to train on), {catalog.num_edges:,} edges, "
        f"{form_text(result)}; {part.n_dropped:,} nodes dropped; {result['seconds']:.1f} s"
    )
    print_result(options, result, text)
    return 0


def _run_files(options: argparse.Namespace, begin: float) -> int:
    """Write the files, and list them."""
    for name in ("name", "topology", "chunk_bytes", "overwrite"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} is for --part: leave it out")
    with open_graph(options.path, options) as graph:
        files = adapter("datasets").export(
            graph, options.output, options.form, edges=not options.no_edges, progress=not options.json
        )
    result = {"path": options.output, "files": files, "seconds": round(time.perf_counter() - begin, 3)}
    print_result(
        options, result, "\n".join([f"{options.output}:", *(f"  {each}" for each in files), f"{result['seconds']:.1f} s"])
    )
    return 0
