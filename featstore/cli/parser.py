"""The commands by name, and the parser without them. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version

__all__ = ["COMMANDS", "make_parser"]

COMMANDS = {
    "create": "make a dataset from .npy files",
    "info": "print what a dataset, or a pack, holds",
    "verify": "check every byte of a dataset, or of a pack, against its checksums, and its structure",
    "convert": "store the adjacency in another form: in chunks, or with its offsets apart (csc)",
    "partition": "divide the nodes into parts with few edges between them, for partition batches",
    "plan": "find out ahead what training would load, to choose a policy and a budget",
    "pack": "sample epochs ahead, once, and pack the rows that their batches need",
    "train": "train a GraphSAGE on a dataset within a memory budget",
    "aggregate": "make a feature of each node's in-neighbours' rows: their mean, sum or normalised sum",
    "infer": "compute the class scores of every node by a trained model",
    "bench": "measure the drive under a dataset, and gathers from it",
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser without its commands."""
    parser = argparse.ArgumentParser(
        prog="featstore", description="Features and adjacency of graphs larger than memory, on an SSD.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"featstore {_release()}")
    return parser


def _release() -> str:
    try:
        return version("featstore")
    except PackageNotFoundError:
        return "(not installed)"
