"""``featstore doctor``: what on this machine is in the way of reading at the drive's speed, and what to change."""

from __future__ import annotations

import argparse

from featstore.cli.arguments import memory_size
from featstore.cli.output import print_result
from featstore.diagnosis.examine import doctor

__all__ = ["DEFAULT_PATH", "PATH", "add_arguments", "run"]

PATH = "a dataset, a pack, or a directory where one is to be (default: here)"
DEFAULT_PATH = "."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory", type=memory_size, metavar="SIZE", help="the budget that is to be given (default: half of what is available)"
    )
    parser.add_argument("--no-rates", action="store_true", help="do not measure the drive, which writes 64 MiB for a second")


def run(options: argparse.Namespace) -> int:
    """Look at everything, and print what was found; 1 if something is an error, and OSError if there is no such directory."""
    found = doctor(options.path, options.memory, rates=not options.no_rates)
    print_result(options, found.as_dict(), str(found))
    return int(bool(found.errors))
