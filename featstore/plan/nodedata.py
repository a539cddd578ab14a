"""Node data that a pack carries, so that a copy of it has the labels that its batches are trained with."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from featstore.errors import CorruptionError, FormatError
from featstore.graph.source import dtype_name, torch_dtype
from featstore.plan.offline import Pack
from featstore.storage.format import DTYPES
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["NodeData", "carried", "carried_bytes", "carry", "is_carried", "load_carried"]

KIND, PREFIX = "node_data", "data-"


@dataclass(frozen=True)
class NodeData:
    """An array with an entry a node.

    Parameters
    ----------
    name : str
    tensor : Tensor, shape (num_nodes, …)
    made_of : str
        The id of the file that it is from.
    """

    name: str
    tensor: torch.Tensor
    made_of: str


def _path(pack: Pack, name: str) -> str:
    return pack.file(PREFIX + hashlib.blake2b(name.encode(), digest_size=8).hexdigest())


def is_carried(pack: Pack, data: NodeData) -> bool:
    """Whether a pack has this data already, and no earlier version of it."""
    try:
        return bool(carried(pack)[data.name]["made_of"] == data.made_of)
    except KeyError:
        return False


def carried_bytes(pack: Pack, graph: Any, name: str | None) -> int:
    """Return about how many bytes carrying some node data of a graph would take; 0 where a pack has it."""
    if name is None or is_carried(pack, NodeData(name, graph.node_data[name], graph.identity()[f"node/_/{name}"])):
        return 0
    return int(graph.node_data[name].nbytes) + 4096


def carry(pack: Pack, data: NodeData, disk: DiskBudget | None = None) -> str:
    """Write node data into a pack, durably, instead of any earlier version; return its path. The caller holds the pack's lock.

    Raises
    ------
    OSError
        The disk, or ``disk``, is full, or failed; the pack then carries no data of this name.
    """
    tensor = data.tensor.contiguous()
    dtype = dtype_name(tensor.dtype)
    record = {"format": 1, "name": data.name, "dtype": dtype, "shape": list(tensor.shape), "made_of": data.made_of}
    path = _path(pack, data.name)
    if os.path.exists(f"{path}.tmp"):  # of a writer that was killed
        os.unlink(f"{path}.tmp")
    try:
        with SectionWriter(path, KIND, disk) as writer:
            writer.append(np.frombuffer(json.dumps(record).encode(), np.uint8))
            writer.append(tensor.reshape(-1).view(torch.uint8).numpy())
            writer.finish(durable=True).close()
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # it may have its name, and not be durable
        raise
    return path


def carried(pack: Pack) -> dict[str, dict[str, Any]]:
    """Return the record of all node data that a pack carries, by name.

    Raises
    ------
    CorruptionError, FormatError
    """
    found = {}
    for file_name in sorted(os.listdir(pack.path)):
        if file_name.startswith(PREFIX) and not file_name.endswith(".tmp"):
            file = SectionFile(pack.file(file_name), KIND)
            try:
                record = json.loads(file[0].tobytes())
                n_items = int(np.prod(record["shape"], dtype=np.int64))
                fits = record["shape"][0] == pack.num_nodes and n_items * DTYPES[record["dtype"]][1] == file.lengths[1]
            except (ValueError, KeyError, IndexError, TypeError) as error:
                if isinstance(error, CorruptionError):
                    raise
                raise CorruptionError(f"the record is none of node data: {error!r}", file.path) from None
            finally:
                file.close()
            if not fits:
                raise FormatError(f"{file.path}: {record['dtype']} of shape {record['shape']}, for {pack.num_nodes} nodes")
            found[str(record["name"])] = record
    return found


def load_carried(pack: Pack, record: dict[str, Any]) -> torch.Tensor:
    """Read node data that :func:`carried` has found.

    Raises
    ------
    CorruptionError, FormatError, OSError
    """
    file = SectionFile(_path(pack, record["name"]), KIND)
    try:
        data = file[1]
    finally:
        file.close()
    return torch.from_numpy(data.copy()).view(torch_dtype(record["dtype"])).reshape(record["shape"])
