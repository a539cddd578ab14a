"""States of training in files: what was written is read, tensors of every dtype and shape included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from featstore.errors import FormatError
from featstore.load.statefile import read_state, write_state
from tests.support.refusing import refuses

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    path = str(tmp_path / "state")
    given = {str(shape): torch.arange(24)[: int(np.prod(shape))].reshape(shape).to(dtype) for shape in SHAPES}
    write_state(path, "training", {"of": given})
    found = read_state(path, "training")["of"]
    for name, tensor in given.items():
        assert found[name].dtype == dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_values(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    state: dict[str, Any] = {"a": [1, 2.5, None, "b", True], "numbered": {0: {"step": 1}, 1.5: []}, "tuple": (1, (2,))}
    write_state(path, "training", state)
    assert read_state(path, "training") == {**state, "tuple": [1, [2]]}
    before = Path(path).read_bytes()
    for wrong, words in (({("a", 1): 2}, "keys are texts and numbers"), (np.int64(3), "not JSON"), ({1, 2}, "not JSON")):
        refuses(TypeError, words, lambda wrong=wrong: write_state(path, "training", {"x": wrong}))
    assert Path(path).read_bytes() == before
    refuses(FormatError, "", lambda: read_state(path, "another kind"))
