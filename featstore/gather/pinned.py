"""Page-locked memory, which a CUDA device reads by itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from typing import Any

import numpy as np
import torch

from featstore._core.buffers import Block

__all__ = ["PinnedBlock", "pinned_block"]

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


class PinnedBlock(Block):
    """A block whose pages CUDA has locked: copies from it to a device run beside the host and beside computing.

    It is locked by way of the device that is current, and unlocked by way of the same one, whichever thread drops it.

    Raises
    ------
    RuntimeError
        CUDA refuses.

    References
    ----------
    cudaHostRegister, in the CUDA runtime API's section on memory management.
    """

    _pid = -1  # of the process that locked it

    def __init__(self, nbytes: int) -> None:
        self._address = int(np.frombuffer(self, np.uint8).ctypes.data)
        cuda: Any = torch.cuda
        runtime = cuda.cudart()
        self._unregister = runtime.cudaHostUnregister
        self._on_its_device = cuda.device(cuda.current_device())
        self._pid = os.getpid()  # before, so that Ctrl-C leaves no lock behind
        code = runtime.cudaHostRegister(self._address, self.nbytes, PORTABLE)
        if int(code):
            self._pid = -1
            _forget_error()
            cuda.check_error(int(code))

    def __del__(self) -> None:
        # Only what was locked, and not in a child, which has no CUDA, nor at the interpreter's exit, when CUDA may be gone: the
        # lock ends with the process. On another device than its own it could fail, or make a context there.
        if self._pid == os.getpid() and not sys.is_finalizing():
            with self._on_its_device:
                self._unregister(self._address)


def _forget_error() -> None:
    """Take an error that was answered for out of CUDA's memory: the next kernel of this thread would raise it as its own.

    torch does not bind ``cudaGetLastError``; a kernel's launch calls it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


_warned = threading.Event()


def pinned_block(nbytes: int, device: torch.device) -> Block:
    """Return a block locked for all CUDA devices; an ordinary one, with one warning a process, where CUDA refuses.

    ``device`` spares the first device a context that nobody asked for.
    """
    with torch.cuda.device(device):
        try:
            return PinnedBlock(nbytes)
        except RuntimeError as error:
            if not _warned.is_set():
                _warned.set()
                warnings.warn(
                    f"CUDA does not pin {nbytes} bytes ({error}): batches are copied to the device from ordinary memory, "
                    "by way of the driver's own, which is slower and holds the thread that copies; see ulimit -l, and the "
                    "memory limit of the container",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return Block(nbytes)
