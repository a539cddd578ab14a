"""The way into the command line.

This file imports nothing that takes time: help on the commands and the release are there at once, and Ctrl-C ends as it does
later, with one line.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from featstore._compiled import importing
from featstore.cli.parser import COMMANDS, make_parser

__all__ = ["main"]

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status.

    0; 1 if a dataset or a pack is damaged; 2 if the command cannot be carried out; 130 after Ctrl-C; 141 if
    the reader of its output has gone.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of few characters gets escapes for others, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    if not arguments or arguments[0] not in COMMANDS:
        parser = make_parser()
        commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
        for name, text in COMMANDS.items():
            commands.add_parser(name, help=text)
        parser.parse_args(arguments)  # prints help, the release, or an error, and exits
    with _interrupts_end(), importing():
        from featstore.cli.run import run
    return run(arguments)


def _open_streams() -> None:
    """Open the null device in place of an output that was closed before: the next file would take its number, and its text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


@contextmanager
def _interrupts_end() -> Iterator[None]:
    """Let Ctrl-C end the process at once while modules are imported, which might turn it into another error."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C is ignored, or handled elsewhere
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second signal would print the message again
        os.write(2, b"featstore: interrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
