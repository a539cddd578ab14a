"""The commands by name, and the parser without them. Imports nothing that takes time."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

__all__ = ["COMMANDS", "USER_ERROR", "Parser", "make_parser", "with_values"]

USER_ERROR = 2

COMMANDS = {
    "create": "make a dataset from .npy files",
    "import": "make a dataset from the files of a published data set",
    "info": "print what a dataset, or a pack, holds",
    "verify": "check every byte of a dataset, or of a pack, against its checksums, and its structure",
    "convert": "store the adjacency in another form: in chunks, or with its offsets apart (csc)",
    "partition": "divide the nodes into parts with few edges between them, for partition batches",
    "export": "write a self-reliant part as a dataset of its own, for another machine; or all fields and edges as plain files",
    "plan": "find out ahead what training would load, to choose a policy and a budget",
    "pack": "sample epochs ahead, once, and pack the rows that their batches need",
    "train": "train a GraphSAGE on a dataset within a memory budget",
    "aggregate": "make a feature of each node's in-neighbours' rows: their mean, sum or normalised sum",
    "infer": "compute the class scores of every node by a trained model",
    "doctor": "say what on this machine is in the way of reading fast, and what to change",
    "bench": "measure the drive under a dataset, and gathers from it",
}


class Parser(argparse.ArgumentParser):
    """An argument parser, and those of its commands, whose errors are one line, as all others of the command line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and the command for help, and exit."""
        self.exit(USER_ERROR, f"{self.prog}: {message.removeprefix('argument ')}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error that names unknown arguments, and an option that was probably meant."""
        name = unknown[0].partition("=")[0]
        close = get_close_matches(name, self._option_string_actions, 1) if name.startswith("-") else []
        meant = f" (did you mean {close[0]}?)" if close else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")


def with_values(arguments: Sequence[str]) -> list[str]:
    """Rewrite ``--option -1,-1`` as ``--option=-1,-1``, since a parser would take the numbers for options."""
    joined: list[str] = []
    for each in arguments:
        if re.match(r"-[\d.]", each) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={each}"
        else:
            joined.append(each)
    return joined


def make_parser() -> Parser:
    """Make the parser without its commands."""
    parser = Parser(
        prog="featstore", description="Features and adjacency of graphs larger than memory, on an SSD.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"featstore {_release()}")
    return parser


def _release() -> str:
    try:
        return version("featstore")
    except PackageNotFoundError:
        return "(not installed)"
