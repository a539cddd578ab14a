"""The last stage: a batch is copied to its device, and joined there with the rows that the device holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from featstore.gather.counters import StageTimer
from featstore.gather.device import Apart
from featstore.load.disjoint import Places
from featstore.load.minibatch import LoadedBatch

__all__ = ["Assembled", "Transfer", "numbered"]


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number: ``"cuda"`` is the device that is current in this thread now."""
    has_none = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if has_none else device


class Assembled(NamedTuple):
    """The host's part of a batch.

    Parameters
    ----------
    batch : LoadedBatch
        Of a feature of which the device holds rows it has only the other rows.
    apart : mapping of str to Apart
        The features of which the device holds rows.
    places : mapping of str to Places
        For each feature where the rows that are delivered are among the gathered ones; empty: they are the same.
    """

    batch: LoadedBatch
    apart: Mapping[str, Apart]
    places: Mapping[str, Places]


class Transfer:
    """Deliver assembled batches on a device. Thread-safe; :meth:`receive` is the loop's part.

    Parameters
    ----------
    device : torch.device
    timer : StageTimer
        Measures the stage ``transfer``.

    Attributes
    ----------
    device : torch.device
        A CUDA device has its number.

    Notes
    -----
    Copies to a CUDA device run in a stream of their own, from pinned memory (:meth:`BufferPool.copied_to`), beside the work of
    the host and of other streams. The call returns when they are complete. The host memory of the assembled batch then goes
    back to its pool, and the batch may be used in any stream.
    """

    def __init__(self, device: torch.device, timer: StageTimer) -> None:
        cuda: Any = torch.cuda
        self.device = numbered(device)
        self._stream = cuda.Stream(self.device) if device.type == "cuda" else None
        self._timer = timer

    def __call__(self, position: int, assembled: Assembled) -> LoadedBatch:
        """Copy batch ``position`` to the device, and join all of its rows there."""
        with self._timer.time("transfer"):
            if self._stream is None:
                batch = self._move(assembled)
            else:
                try:
                    with torch.cuda.stream(self._stream):
                        batch = self._move(assembled)
                finally:  # even after an error: copies that have begun read host memory until they are over
                    self._stream.synchronize()
        return batch

    def _move(self, assembled: Assembled) -> LoadedBatch:
        batch, apart, places = assembled
        rows = {
            name: apart[name].together() if name in apart else rows.to(self.device, non_blocking=True)
            for name, rows in batch.gathered.items()
        }
        rows = {name: places[name].of(each) if name in places else each for name, each in rows.items()}
        return batch.with_gathered({}).to(self.device, non_blocking=True).with_gathered(rows)

    def receive(self, batch: LoadedBatch) -> None:
        """Record a delivered batch with the current stream of the loop's thread; that thread calls this."""
        if self._stream is not None:
            # The memory belongs to the copying stream. Else that could reuse it for a later batch while the loop still computes.
            batch.record_stream(torch.cuda.current_stream(self.device))
