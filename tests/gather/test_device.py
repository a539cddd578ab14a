"""A batch put together by a device's operations has the bits of one that the host's copies put together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from featstore.budget import Budget
from featstore.gather.buffers import BufferPool
from featstore.gather.device import DeviceArray
from featstore.gather.plan import DeviceRows

ROWS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((1,), torch.int8),
    ((100,), torch.uint8),
    ((1433,), torch.float32),
    ((5000,), torch.int64),
    ((7,), torch.float16),
    ((2, 5), torch.bfloat16),
    ((), torch.float32),
    ((5,), torch.bool),
    ((3,), torch.float64),
    ((3,), torch.complex64),
]


def any_bits(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of any bits, NaNs among them; of booleans 0 and 1."""
    n_bytes = n * math.prod(shape) * dtype.itemsize
    if not n_bytes:
        return torch.empty((n, *shape), dtype=dtype)
    raw = np.random.default_rng(n_bytes).integers(0, 2 if dtype == torch.bool else 256, n_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(n, *shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.reshape(-1).view(torch.uint8).cpu() for t in (a, b)))


@pytest.mark.parametrize(("shape", "dtype"), ROWS)
def test_a_batch_is_the_same_bits_either_way(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    pool, rng = BufferPool(Budget(1 << 26)), np.random.default_rng(1)
    rows = any_bits(40, shape, dtype)
    host, array = (DeviceArray(40, shape, dtype, torch.device(each), pool) for each in ("cpu", device))
    host.rows.copy_(rows)
    array.rows.copy_(rows)
    for n_held, n_others in ((0, 0), (0, 5), (30, 0), (30, 17)):
        order = rng.permutation(n_held + n_others)
        part = DeviceRows(rng.permutation(40)[:n_held].astype(np.int64), order[:n_held], order[n_held:])
        others = any_bits(n_others, shape, dtype)
        assert same(array._on_device(part, others), host.assemble(part, others, host.memory_for(part)))
    host.close()
    array.close()
