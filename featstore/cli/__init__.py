"""Command line: ``featstore create | info | verify | plan | pack | train | bench``.

This file imports nothing that takes time: help on the commands and the release are there at once, and Ctrl-C ends as it does
later, with one line.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

__all__ = ["COMMANDS", "main", "make_parser"]

COMMANDS = {
    "create": "make a dataset from .npy files",
    "info": "print what a dataset holds",
    "verify": "check every byte of a dataset, or of a pack, against its checksums, and its structure",
    "plan": "find out ahead what training would load, to choose a policy and a budget",
    "pack": "sample epochs ahead, once, and pack the rows that their batches need",
    "train": "train a GraphSAGE on a dataset within a memory budget",
    "bench": "measure the device under a dataset, and gathers from it",
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status.

    0; 1 where a dataset or a pack is damaged; 2 where what was asked for cannot be done; 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] not in COMMANDS:
        parser = make_parser()
        commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
        for name, text in COMMANDS.items():
            commands.add_parser(name, help=text)
        parser.parse_args(arguments)  # help, the release, or an error: none of them comes back
    with _interrupts_end():
        from featstore.cli.commands import run
    return run(arguments)


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


@contextmanager
def _interrupts_end() -> Iterator[None]:
    """Have Ctrl-C end the process at once, while modules are imported, which might make another error of it: nothing is begun."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # it is ignored, or others see to it
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would say it again
        os.write(2, b"featstore: interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
