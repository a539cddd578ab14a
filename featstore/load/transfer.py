"""The last stage: a batch goes to the device that it is delivered on, and is put together with the rows that the device holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from featstore.gather.counters import Stopwatch
from featstore.gather.device import Apart
from featstore.load.minibatch import MiniBatch

__all__ = ["Transfer", "numbered"]


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number: ``"cuda"`` is the one that is current now and here, not in another thread or later."""
    has_none = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if has_none else device


class Transfer:
    """Deliver assembled batches on a device. Thread-safe; :meth:`receive` is the loop's part.

    Parameters
    ----------
    device : torch.device
    watch : Stopwatch
        Gets ``transfer``.

    Attributes
    ----------
    device : torch.device
        With its number, where CUDA has several.

    Notes
    -----
    To a CUDA device copies run in a stream of their own, from pinned memory (:meth:`BufferPool.copied_to`), beside whatever the
    host and other streams do. The call returns when they are complete: then host memory is not read any more, and goes back to
    its pool with the assembled batch, and the batch may be used in any stream.
    """

    def __init__(self, device: torch.device, watch: Stopwatch) -> None:
        cuda: Any = torch.cuda
        self.device = numbered(device)
        self._stream = cuda.Stream(self.device) if device.type == "cuda" else None
        self._watch = watch

    def __call__(self, position: int, assembled: tuple[MiniBatch, Mapping[str, Apart]]) -> MiniBatch:
        """Return batch ``position`` on the device, with all of its rows.

        ``assembled``: the batch in host memory, and features of which the device holds rows; it has the others of those.
        """
        with self._watch.time("transfer"):
            if self._stream is None:
                batch = self._move(*assembled)
            else:
                try:
                    with torch.cuda.stream(self._stream):
                        batch = self._move(*assembled)
                finally:  # whatever failed: what was begun reads the host's memory until it is over
                    self._stream.synchronize()
        return batch

    def _move(self, batch: MiniBatch, apart: Mapping[str, Apart]) -> MiniBatch:
        features = {
            name: apart[name].together() if name in apart else rows.to(self.device, non_blocking=True)
            for name, rows in batch.features.items()
        }
        moved = replace(batch, features={}).to(self.device, non_blocking=True)
        return replace(moved, features=features)

    def receive(self, batch: MiniBatch) -> None:
        """Take over a delivered batch into the stream that is current in the loop's thread, which calls this."""
        if self._stream is not None:
            # Its memory is the copying stream's, which would else take it for a later batch while this one is still computed on.
            batch.record_stream(torch.cuda.current_stream(self.device))
