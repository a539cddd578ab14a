"""Running a command: its arguments, and its errors as one line. Imports all of the library."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from featstore.cli import (
    aggregate,
    bench,
    convert,
    create,
    doctor,
    export,
    importing,
    infer,
    info,
    pack,
    partition,
    plan,
    train,
    verify,
)
from featstore.cli.arguments import add_path
from featstore.cli.output import advice_on_damage, one_line
from featstore.cli.parser import COMMANDS, USER_ERROR, Parser, make_parser, with_values
from featstore.errors import CorruptionError, FeatstoreError

__all__ = ["command_parser", "run"]

PIPE_CLOSED = 128 + signal.SIGPIPE  # as a shell names the status of a program that the signal ended

_MODULES: tuple[Any, ...] = (
    *(create, importing, info, verify, convert, partition, export, plan),
    *(pack, train, aggregate, infer, doctor, bench),
)


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit status, as :func:`~featstore.cli.main.main` does."""
    try:
        arguments = with_values(arguments)
        options, unknown = command_parser(arguments).parse_known_args(arguments)
        if unknown:
            options.parser.refuse(unknown)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone; without this the interpreter complains at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt as error:
        print(f"featstore: interrupted{f'; {error}' if error.args else ''}", file=sys.stderr)
        return 130
    except CorruptionError as error:
        print(f"featstore: {one_line(error)}{advice_on_damage(error)}", file=sys.stderr)
        return 1
    except (FeatstoreError, OSError, ValueError, TypeError, LookupError, RuntimeError, MemoryError, EOFError) as error:
        if os.environ.get("FEATSTORE_TRACEBACK"):
            raise
        print(f"featstore: {one_line(error)}", file=sys.stderr)
        return USER_ERROR


def command_parser(arguments: Sequence[str] = ()) -> Parser:
    """Make the parser of all commands, with the options of a named plug-in; ``shtab`` makes completions from it."""
    parser = make_parser()
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for (name, text), module in zip(COMMANDS.items(), _MODULES, strict=True):
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        if module is importing:  # FOLDER comes before DATASET
            importing.add_source(made)
        default = getattr(module, "DEFAULT_PATH", None)
        optional = {} if default is None else {"nargs": "?", "default": default}
        add_path(made, "path", metavar="DATASET", help=getattr(module, "PATH", "directory of the dataset"), **optional)
        made.add_argument("--json", action="store_true", help="print the result as one JSON object")
        if module is train:
            train.add_arguments(made, train.named_strategy(arguments))
        elif module is importing:
            importing.add_arguments(made, importing.named_source(arguments))
        else:
            module.add_arguments(made)
        made.set_defaults(run=module.run, parser=made)
    return parser
