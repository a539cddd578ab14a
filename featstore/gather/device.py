"""The tier ``DEVICE``: rows of a feature as one tensor on the training device, where batches are assembled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.rows import copy_rows
from featstore.gather.buffers import BufferPool, as_bytes
from featstore.gather.plan import DeviceRows

__all__ = ["OUT_OF_MEMORY", "Apart", "DeviceArray", "Read", "available_bytes", "check_device", "record_here", "settle"]

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError  # torch 2.2 has it under this name alone

Int64s = npt.NDArray[np.int64]
Read = Callable[[Int64s, npt.NDArray[np.uint8]], None]


def check_device(device: torch.device | str) -> torch.device:
    """Check that batches can be delivered to a device; return it as a ``torch.device``.

    ValueError if the text names no device. RuntimeError, with advice, if the device is not available in this process.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={str(device)!r} is not a device: {str(error).splitlines()[0]}") from None
    shown = f"device={str(found)!r}"
    if found.type == "cuda":
        if not torch.cuda.is_available():
            why = "torch finds no GPU that it can use; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
            if torch.version.cuda is None and torch.version.hip is None:
                why = f"this torch ({torch.__version__}) was built without it; install a CUDA build of torch"
            raise RuntimeError(f"{shown}: CUDA is not available: {why}, or use device='cpu'")
        n_devices = torch.cuda.device_count()
        if found.index is not None and found.index >= n_devices:
            raise RuntimeError(f"{shown}: the highest number of a CUDA device here is {n_devices - 1}")
        return found
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RuntimeError(f"{shown} is not available: {str(error).splitlines()[0]}; use device='cpu'") from None
    return found


def available_bytes(device: torch.device) -> int | None:
    """Count the bytes that torch could allocate on a CUDA device now; None for other devices, which the budget covers."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def settle(device: torch.device) -> None:
    """Wait until the current stream of a CUDA device has finished its work, before other streams use the results."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def record_here(*tensors: torch.Tensor | None) -> None:
    """Keep the memory of dropped tensors on a CUDA device until the current stream is done with them."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class DeviceArray:
    """Rows of one feature on the training device, where batches are assembled. Filled rows do not change.

    ``device`` is any device of torch; ``cpu`` stands in for one in tests. ``pool`` has the host memory in which batches are
    assembled. Its budget pays for the rows if the device is the CPU. ``n_threads`` threads copy if the device is the CPU.
    """

    def __init__(
        self,
        n_rows: int,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        pool: BufferPool,
        n_threads: int = 1,
    ) -> None:
        self._shape, self._dtype, self._device, self._pool = row_shape, dtype, device, pool
        self._n_threads = n_threads
        self._row_bytes = dtype.itemsize * math.prod(row_shape)
        n_bytes = n_rows * self._row_bytes
        # Owned: if Ctrl-C comes before the caller has this object, its bytes go back with it.
        self._held = pool.budget.reserve("device cache", n_bytes if device.type == "cpu" else 0, owner=self)
        try:
            self.rows = torch.empty((n_rows, *row_shape), dtype=dtype, device=device)
        except BaseException:
            self._held.release()
            raise

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def fill(self, rows: Int64s, step: int, read: Read, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Load row ``rows[i]`` into slot ``i``; return whether all were loaded. On the device ``meta`` nothing is read.

        ``read(rows, out)`` reads ``step`` rows at once into uint8 ``[k, row_bytes]``. ``go_on()`` is called before each read;
        False ends the loading.
        """
        for first in range(0, 0 if self._device.type == "meta" else len(rows), step):
            if not go_on():
                return False
            chunk = rows[first : first + step]
            if self._device.type == "cpu":
                read(chunk, self._bytes(self.rows[first : first + len(chunk)]))
                continue
            held = self._pool.tensor((len(chunk), *self._shape), self._dtype)
            read(chunk, self._bytes(held))
            self.rows[first : first + len(chunk)] = held.to(self._device)
        settle(self._device)  # batches are assembled in another stream
        return True

    def _bytes(self, rows: torch.Tensor) -> npt.NDArray[np.uint8]:
        return as_bytes(rows, self._row_bytes)

    def memory_for(self, part: DeviceRows) -> torch.Tensor | None:
        """Take host memory to assemble a batch in if the device is the CPU; None for a device with its own memory."""
        if self._device.type != "cpu":
            return None
        return self._pool.tensor(self._batch_shape(part), self._dtype)

    def _batch_shape(self, part: DeviceRows) -> tuple[int, ...]:
        return (len(part.positions) + len(part.others), *self._shape)

    def assemble(self, part: DeviceRows, others: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Assemble a batch on the device: the tier's rows, and ``others``, the rows that the host assembled.

        ``out`` is from :meth:`memory_for`; on the CPU rows are copied straight to it. On other devices copies may still run in
        the current stream after the call. Keep ``part`` and ``others`` until that stream has passed them. May run beside
        gathers into the same pool or cache: it reads only its arguments and the tier, which does not change.
        """
        if self._device.type == "cpu":
            assert out is not None
            copy_rows(self._bytes(self.rows), part.slots, self._bytes(out), part.positions, self._n_threads)
            copy_rows(self._bytes(others), None, self._bytes(out), part.others, self._n_threads)
            return out
        return self._on_device(part, others)

    def _on_device(self, part: DeviceRows, others: torch.Tensor) -> torch.Tensor:
        device = self.rows.device
        out = torch.empty(self._batch_shape(part), dtype=self._dtype, device=device)
        slots, positions, places = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in (part.slots, part.positions, part.others)
        )
        if len(slots):
            out.index_copy_(0, positions, self.rows.index_select(0, slots))
        if len(places):
            out.index_copy_(0, places, others.to(device, non_blocking=True))
        return out

    def close(self) -> None:
        self.rows = self.rows[:0].clone()
        self._held.release()


@dataclass(frozen=True)
class Apart:
    """A batch's rows of one feature before the device's rows are added; see :meth:`DeviceArray.assemble`."""

    tier: DeviceArray
    part: DeviceRows
    others: torch.Tensor
    out: torch.Tensor | None

    def together(self) -> torch.Tensor:
        """Assemble the whole batch on the device."""
        return self.tier.assemble(self.part, self.others, self.out)
