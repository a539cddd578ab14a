"""Page-locked memory, which a CUDA device reads by itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import numpy as np
import torch

from featstore._core.buffers import Arena
from featstore.errors import warn

__all__ = ["PinnedArena"]

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


class PinnedArena(Arena):
    """An arena whose pages CUDA has locked: copies from it to a device run beside the host and beside computing.

    The arena is locked through ``device``, and unlocked through the same device, whichever thread drops it. The process uses
    this device already; on another device the call would create a context. If CUDA refuses, the arena is ordinary memory, and a
    RuntimeWarning says so once a process. See cudaHostRegister in the CUDA runtime API.
    """

    _pid = -1  # of the process that locked it

    def __new__(cls, nbytes: int, device: torch.device) -> PinnedArena:
        return Arena.__new__(cls, nbytes)

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        try:
            with torch.cuda.device(device):
                self._lock(torch.cuda)
        except RuntimeError as error:
            _warn(nbytes, error)

    def _lock(self, cuda: Any) -> None:
        self._address = int(np.frombuffer(self, np.uint8).ctypes.data)
        runtime = cuda.cudart()
        self._unregister = runtime.cudaHostUnregister
        self._pid = os.getpid()  # before, so that Ctrl-C leaves no lock behind
        code = runtime.cudaHostRegister(self._address, self.nbytes, PORTABLE)
        if int(code):
            self._pid = -1
            _forget_error()
            cuda.check_error(int(code))

    def __del__(self) -> None:
        # Only if it was locked; not in a forked child, which has no CUDA; not at the interpreter's exit, when CUDA may be gone:
        # the lock ends with the process. Through another device the call could fail, or create a context there.
        if self._pid == os.getpid() and not sys.is_finalizing():
            with torch.cuda.device(self._device):
                self._unregister(self._address)


def _forget_error() -> None:
    """Clear a handled error from CUDA's state: the next kernel of this thread would otherwise raise it.

    torch does not bind ``cudaGetLastError``, but the launch of a kernel calls it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


_warned = threading.Event()


def _warn(nbytes: int, error: RuntimeError) -> None:
    if not _warned.is_set():
        _warned.set()
        warn(
            f"CUDA does not pin {nbytes} bytes ({error}): batches are copied to the device from ordinary memory, by way of the "
            "driver's own, which is slower and holds the thread that copies; see ulimit -l, and the container's memory limit",
            RuntimeWarning,
        )
