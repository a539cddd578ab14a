"""A state of training in a file: mappings, sequences, numbers, texts and tensors. Every byte is checked when read; no pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from featstore.errors import FormatError
from featstore.storage.sections import SectionFile, replacing

__all__ = ["read_state", "write_state"]


def _packed(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Convert a state to JSON values; its tensors are added to ``tensors``, and replaced by their index there."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors), "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, (str, int, float, type(None)))), None)
        if wrong is not None:
            raise TypeError(f"a state's keys are texts and numbers, not {wrong!r}")
        return {"map": [[key, _packed(each, tensors)] for key, each in value.items()]}  # whose keys may be numbers
    return [_packed(each, tensors) for each in value] if isinstance(value, (list, tuple)) else value


def _unpacked(value: Any, file: SectionFile) -> Any:
    if isinstance(value, list):
        return [_unpacked(each, file) for each in value]
    if not isinstance(value, dict):
        return value
    if "map" in value:
        return {key: _unpacked(each, file) for key, each in value["map"]}
    found, dtype = torch.from_numpy(file[value["tensor"]].copy()), getattr(torch, value["dtype"])
    if not len(found):  # of which torch makes no view in a wider dtype
        if math.prod(value["shape"]):
            raise ValueError(f"a tensor of shape {value['shape']} without values")
        return torch.empty(value["shape"], dtype=dtype, device="cpu")
    return found.view(dtype).reshape(value["shape"])


def write_state(path: str, kind: str, state: Mapping[str, Any]) -> None:
    """Replace the file by a state: written under another name, flushed, and renamed; after an OSError the file is as it was.

    CommittedError: the new file is in place, but a power cut may undo that.
    """
    tensors: list[torch.Tensor] = []
    record = json.dumps(_packed(state, tensors)).encode()
    with replacing(path, kind) as writer:
        writer.append(np.frombuffer(record, np.uint8))
        for tensor in tensors:
            writer.append(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())


def read_state(path: str, kind: str) -> dict[str, Any]:
    """Read what :func:`write_state` wrote, with tensors on the CPU and tuples as lists.

    FormatError: the file is of another kind, or holds no state. CorruptionError: it is damaged.
    """
    file = SectionFile(path, kind)
    try:
        state: dict[str, Any] = _unpacked(json.loads(file[0].tobytes()), file)
        state.keys()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise FormatError(f"{path}: no state of a training: {error}", path) from error
    finally:
        file.close()
    return state
