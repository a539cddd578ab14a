"""Ranks of a gloo group in forks, one of which may be lost; and programs that torchrun starts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.support.programs import run_program

__all__ = ["end", "group", "held_port", "torchrun", "two_forks"]

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def group(rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """Be a rank of a gloo group, which meets by a file in ``folder``."""
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a port that the kernel gives to nobody else while the context lasts, and that a server may listen on.

    A port that was found and let go of may be another's before the server comes. Here a socket stays bound and does not listen:
    Linux lets one that names the port bind beside it, where both have ``SO_REUSEADDR``, as torch's stores do.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def end(pid: int) -> None:
    """Kill a process, which may be dead or dying, and wait until it holds no lock."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [])
        os.close(process)


def torchrun(folder: Path, command: list[str]) -> str:
    """Run a script in two processes of torchrun; return what they printed."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def two_forks(folder: Path, command: list[str]) -> str:
    """Run it in two forks, whose environment is what torchrun gives."""
    common = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": os.fspath(ROOT)}

    def one(rank: int) -> subprocess.CompletedProcess[str]:
        return run_program(*command, cwd=folder, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port), **common)

    with held_port() as port, ThreadPoolExecutor(2) as pool:
        done = list(pool.map(one, range(2)))
    assert not any(each.returncode for each in done), [each.stderr for each in done]
    return "".join(each.stdout for each in done)
