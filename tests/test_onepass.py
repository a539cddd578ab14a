"""The kernel that places rows in one pass: the bits of torch's two passes, for every width and type.

It runs on a CUDA device, or anywhere with ``TRITON_INTERPRET=1``, where Triton is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from featstore.budget import Budget
from featstore.errors import PerformanceWarning
from featstore.gather import device as device_module
from featstore.gather.buffers import BufferPool
from featstore.gather.device import OUT_OF_MEMORY, DeviceArray, one_pass
from featstore.gather.plan import DeviceRows

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHERE = "cpu" if INTERPRETED else "cuda"
NEEDS_TRITON = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="there is no GPU here, and TRITON_INTERPRET is not 1"
    ),
]
ROWS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((1,), torch.int8),
    ((3,), torch.uint8),
    ((4,), torch.int8),
    ((100,), torch.uint8),
    ((512,), torch.uint8),
    ((1433,), torch.float32),
    ((5000,), torch.int64),  # wider than a tile
    ((7,), torch.float16),
    ((2, 5), torch.bfloat16),
    ((), torch.float32),
    ((5,), torch.bool),
    ((3,), torch.float64),
    ((3,), torch.complex64),
    ((0,), torch.float32),
]


def any_bits(n: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Rows of any bits, NaNs among them; of booleans 0 and 1."""
    n_bytes = n * math.prod(shape) * dtype.itemsize
    if not n_bytes:
        return torch.empty((n, *shape), dtype=dtype, device=device)
    raw = np.random.default_rng(n_bytes).integers(0, 2 if dtype == torch.bool else 256, n_bytes, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(n, *shape).to(device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.reshape(-1).view(torch.uint8).cpu() for t in (a, b)))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("shape", "dtype"), ROWS)
class TestPlaces:
    pytestmark = NEEDS_TRITON

    def test_the_bits_of_two_passes(self, shape: tuple[int, ...], dtype: torch.dtype, index: torch.dtype) -> None:
        """Repeated slots, no slots; what is not a place of theirs stays."""
        from featstore.gather.onepass import place_rows

        rows = any_bits(50, shape, dtype, WHERE)
        rng = np.random.default_rng(0)
        for n in (0, 1, 2, 37, 300):
            slots = torch.from_numpy(rng.integers(0, 50, n)).to(WHERE)
            positions = torch.from_numpy(rng.permutation(n + 9)[:n]).to(WHERE)
            out = any_bits(n + 9, shape, dtype, WHERE)
            want = out.clone().index_copy_(0, positions, rows.index_select(0, slots))
            place_rows(rows, slots.to(index), out, positions.to(index))
            assert same(out, want)

    def test_rows_that_begin_anywhere(self, shape: tuple[int, ...], dtype: torch.dtype, index: torch.dtype) -> None:
        """A view of later rows is aligned to its own type alone: words are no wider than that allows."""
        from featstore.gather.onepass import place_rows

        rows = any_bits(50, shape, dtype, WHERE)[1:]
        out = torch.zeros_like(any_bits(51, shape, dtype, WHERE))[1:]
        slots = torch.arange(48, -1, -1, device=WHERE, dtype=index)
        place_rows(rows, slots, out, torch.arange(49, device=WHERE, dtype=index))
        assert same(out[:49], rows.flip(0))


@pytest.mark.parametrize("way", ["two passes", pytest.param("one pass", marks=NEEDS_TRITON)])
@pytest.mark.parametrize(("shape", "dtype"), ROWS[:-1])  # a row of a feature has a byte at least
def test_a_batch_is_the_same_bits_either_way(way: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Put together by the device's operations, and by the host's copies: the same."""
    budget = Budget(1 << 26)
    pool, rng = BufferPool(budget), np.random.default_rng(1)
    rows = any_bits(40, shape, dtype)
    host = DeviceArray(40, shape, dtype, CPU, pool)
    host.rows.copy_(rows)
    array = DeviceArray(40, shape, dtype, torch.device("cuda" if way == "one pass" and not INTERPRETED else "cpu"), pool)
    array.rows.copy_(rows)
    array._place = None
    if way == "one pass":
        from featstore.gather.onepass import place_rows

        array._place = place_rows
    for n_held, n_others in ((0, 0), (0, 5), (30, 0), (30, 17)):
        order = rng.permutation(n_held + n_others)
        part = DeviceRows(rng.permutation(40)[:n_held].astype(np.int64), order[:n_held], order[n_held:])
        others = any_bits(n_others, shape, dtype)
        assert same(array._on_device(part, others), host.assemble(part, others, host.memory_for(part)))
    host.close()
    array.close()


class TestChoice:
    """Which way is taken, with stand-ins for CUDA and Triton."""

    @pytest.fixture(autouse=True)
    def _anew(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        one_pass.cache_clear()
        empty, tensor = torch.arange, torch.tensor  # on the CPU, whatever device is asked for
        monkeypatch.setattr(device_module.torch, "arange", lambda *a, device, **k: empty(*a, **k))
        monkeypatch.setattr(device_module.torch, "tensor", lambda *a, device: tensor(*a))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        yield
        one_pass.cache_clear()

    def test_a_kernel_that_works_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def place(source: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, positions: torch.Tensor) -> None:
            out.index_copy_(0, positions, source.index_select(0, slots))

        monkeypatch.setitem(sys.modules, "featstore.gather.onepass", SimpleNamespace(place_rows=place))
        assert one_pass(torch.device("cuda", 0)) is place
        assert one_pass(CPU) is None

    def test_without_triton_two_passes_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "featstore.gather.onepass", None)
        assert one_pass(torch.device("cuda", 0)) is None

    @pytest.mark.parametrize(
        ("error", "said"), [(OSError("no C compiler\nat all"), "OSError: no C compiler"), (None, "wrong rows")]
    )
    def test_one_that_does_not_work_is_said_once(self, error, said, monkeypatch) -> None:
        def place(*tensors: torch.Tensor) -> None:
            if error is not None:
                raise error

        monkeypatch.setitem(sys.modules, "featstore.gather.onepass", SimpleNamespace(place_rows=place))
        with pytest.warns(
            PerformanceWarning, match=f"cuda:0: Triton's kernel does not work here .*{said}.*two passes do"
        ) as found:
            assert [one_pass(torch.device("cuda", 0)) for _ in range(2)] == [None, None]
        assert len(found) == 1

    def test_no_memory_for_the_trial_is_no_reason_to_do_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def place(*tensors: torch.Tensor) -> None:
            raise OUT_OF_MEMORY("CUDA out of memory")

        monkeypatch.delattr(torch, "OutOfMemoryError", raising=False)  # as in torch 2.2
        monkeypatch.setitem(sys.modules, "featstore.gather.onepass", SimpleNamespace(place_rows=place))
        with pytest.raises(OUT_OF_MEMORY):
            one_pass(torch.device("cuda", 0))
