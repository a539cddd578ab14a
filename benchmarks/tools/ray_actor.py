"""A Ray actor that has rows in memory, asked from another raylet: an engine that rows of other machines could come by.

:func:`cluster` starts two raylets, each with an address of its own: over the loopback device, or at the ends of a link
(``tools.delayed_link``). The actor runs on the second, the process that asks at the first. It asks for pieces of rows, as large
and as many at a time as :class:`featstore.distributed.Sharded` does, or for a whole call at once. An answer of more than 100 kB
comes through Ray's object stores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.delayed_link import Link
from featstore.distributed.exchange import Sizes

__all__ = ["asking", "cluster", "piece_rows", "why_not"]

ADDRESSES = ("127.0.0.2", "127.0.0.3")  # on the loopback device; Ray takes 127.0.0.1 for any other address of the machine
PORT = 26379
STORE_BYTES = 256 << 20
OWNER = "rows"  # a resource that the second raylet alone has
START_S = 120.0

Uint8s = npt.NDArray[np.uint8]


def why_not() -> str:
    """Tell why no actor can be asked here; "" if one can."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed"


@contextlib.contextmanager
def cluster(joined: Link | None = None) -> Iterator[dict[str, Any]]:
    """Two raylets; yields what :func:`asking` takes. All processes of Ray end with it."""
    addresses = ADDRESSES if joined is None else joined.addresses
    head = ["--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=1"]
    other = [f"--address={addresses[0]}:{PORT}", "--num-cpus=1", f"--resources={json.dumps({OWNER: 1})}"]
    with (
        tempfile.TemporaryDirectory(prefix="fs", dir="/tmp", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as ends,
    ):
        own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        for end, words in enumerate((head, other)):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words]
            command += [f"--node-ip-address={addresses[end]}", f"--object-store-memory={STORE_BYTES}"]
            before = [] if joined is None else joined.command(end)
            log = ends.enter_context((Path(folder) / f"raylet-{end}").open("w+"))
            started = subprocess.Popen([*before, *command], env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
            ends.callback(_end, started)
            _wait(started, Path(log.name))
        yield {"address": f"{addresses[0]}:{PORT}", "node": addresses[0], "environment": own}


def _wait(raylet: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in (text := log.read_text()):
        if raylet.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a raylet does not start: {text}")
        time.sleep(0.05)


def _end(raylet: subprocess.Popen[bytes]) -> None:
    """Let ``ray start`` end what it started; what then still runs ends with its raylet."""
    raylet.terminate()
    try:
        raylet.wait(30)
    except subprocess.TimeoutExpired:
        raylet.kill()
        raylet.wait()


def piece_rows(row_bytes: int) -> int:
    """Rows that :class:`featstore.distributed.Sharded` asks for at once, if its memory suffices."""
    return Sizes(row_bytes, Sizes.PIECE_BYTES, Sizes.MOST_ANSWERS, 0).piece_rows


@contextlib.contextmanager
def asking(at: dict[str, Any], path: str) -> Iterator[Callable[[npt.NDArray[np.int64], Uint8s, int], None]]:
    """Connect to a :func:`cluster` and start the actor; yields a function that reads rows of these ids, so many a request."""
    os.environ.update(at["environment"])
    import ray

    class Rows:  # here, so that Ray sends its code: a worker would have to find this module, and import torch for it
        def __init__(self) -> None:
            self._rows = np.load(path)

        def rows(self, ids: npt.NDArray[np.int64]) -> Uint8s:
            return self._rows.take(ids, 0)  # type: ignore[no-any-return]

    ray.init(address=at["address"], _node_ip_address=at["node"], log_to_driver=False, logging_level="error")
    try:
        actor = ray.remote(resources={OWNER: 1})(Rows).remote()

        def ask(ids: npt.NDArray[np.int64], out: Uint8s, step: int) -> None:
            under_way = deque[tuple[int, Any]]()
            for begin in range(0, len(ids), step):
                if len(under_way) == Sizes.MOST_ANSWERS:
                    take(out, *under_way.popleft())
                under_way.append((begin, actor.rows.remote(ids[begin : begin + step])))
            while under_way:
                take(out, *under_way.popleft())

        def take(out: Uint8s, begin: int, answer: Any) -> None:
            found = ray.get(answer)
            out[begin : begin + len(found)] = found

        yield ask
    finally:
        ray.shutdown()
