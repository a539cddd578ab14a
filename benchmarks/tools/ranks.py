"""Ranks side by side, each a process of a module that calls :func:`benchmarks.tools.harness.answer`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["answers", "line_of", "start_ranks", "tell"]

FAILED = "a rank has failed; its error is above"


@contextmanager
def start_ranks(
    module: str,
    jobs: Iterable[Mapping[str, Any]],
    *,
    before: Callable[[int], list[str]] = lambda rank: [],
    more: Callable[[int], dict[str, str]] = lambda rank: {},
    stdin: int | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a rank of ``module`` (``__spec__.name`` there) for each job, and end those that still run afterwards.

    ``before(rank)`` are words before a rank's command, ``more(rank)`` variables of its environment beside this process's.
    ``stdin=subprocess.PIPE`` lets ranks be told something.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, job in enumerate(jobs):
            command = [*before(rank), sys.executable, "-m", module, "--child", json.dumps(job)]
            env = {**os.environ, **more(rank)}
            started.append(subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, env=env))
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()


def answers(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait for all ranks; return what each found. RuntimeError: one has failed."""
    said = [each.communicate()[0] for each in ranks]
    if any(each.returncode for each in ranks):
        raise RuntimeError(FAILED)
    return [json.loads(each.splitlines()[-1]) for each in said]


def line_of(rank: subprocess.Popen[str]) -> str:
    """Read the next line of a rank that runs on. RuntimeError: it has failed."""
    assert rank.stdout is not None
    if not (text := rank.stdout.readline()):
        raise RuntimeError(FAILED)
    return text


def tell(ranks: list[subprocess.Popen[str]], text: str) -> None:
    """Write a line to each rank."""
    for each in ranks:
        assert each.stdin is not None
        each.stdin.write(f"{text}\n")
        each.stdin.flush()
