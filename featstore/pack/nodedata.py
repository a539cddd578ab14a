"""Node data that a pack carries, so that a copy of it has the labels that its batches are trained with.

Each array has its own file. The pack's record names each file with its id. A file that the record does not name is not read. If a
named file is missing or has another id, that is an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from featstore.creation.source import dtype_name, torch_dtype
from featstore.errors import CorruptionError, FeatstoreError, FormatError, StaleError, VersionError
from featstore.pack.record import NODE_DATA, RECORD, OfflineSamples, fits, is_file_name, write_record
from featstore.storage.format import DTYPES
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.topology.types import ONE_NODE, Types

__all__ = [
    "NODE_DATA_KIND",
    "NODE_DATA_PREFIX",
    "Carrier",
    "NodeData",
    "carried",
    "carried_bytes",
    "data_of",
    "field_key",
    "is_carried",
    "load_carried",
    "named",
]

NODE_DATA_KIND, NODE_DATA_PREFIX = "node_data", "data-"
DESCRIPTION = {"name": str, "dtype": str, "shape": [int], "made_of": str}


@dataclass(frozen=True)
class NodeData:
    """An array with an entry a node; ``made_of`` is the id of its file in the dataset."""

    name: str
    tensor: torch.Tensor
    made_of: str


def named(pack: OfflineSamples) -> dict[str, dict[str, str]]:
    """Read the ``file`` and ``id`` of all node data, by name, from a pack's record on disk.

    FormatError: an entry of the record can be no file of node data. StaleError: another pack was made in this one's place.
    """
    record = pack.check_in_place()
    path, found = pack.file(RECORD), record.get(NODE_DATA)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: the record has no {NODE_DATA!r}", path)
    for name, entry in found.items():
        strings = isinstance(entry, dict) and sorted(entry) == ["file", "id"] and all(isinstance(v, str) for v in entry.values())
        if not strings or not entry["file"].startswith(NODE_DATA_PREFIX) or not is_file_name(entry["file"]):
            raise FormatError(f"{path}: node data {name!r} is in {entry!r}, which is not a file of node data", path)
    return found


def is_carried(pack: OfflineSamples, data: NodeData) -> bool:
    """Tell whether a pack has this very version of the data already, in a valid file."""
    entry = named(pack).get(data.name)
    if entry is None:
        return False
    try:
        return bool(_described(pack, data.name, entry)["made_of"] == data.made_of)
    except VersionError:
        raise
    except (CorruptionError, FormatError, FileNotFoundError):
        return False


def field_key(types: Types, name: str) -> str:
    """Compute the key in a graph's fingerprint of a field of nodes, given by its name among those of all types."""
    return f"node/{ONE_NODE}/{name}" if types.is_one else f"node/{name}"


def data_of(pack: OfflineSamples, graph: Any, names: Iterable[str]) -> list[NodeData]:
    """Read node data of the graph that a pack is of, by their names in ``graph.node_data``."""
    made_of = graph.fingerprint()
    return [NodeData(name, graph.node_data[name], made_of[field_key(pack.types, name)]) for name in names]


def carried_bytes(pack: OfflineSamples, graph: Any, names: Iterable[str]) -> int:
    """Estimate the bytes that carrying node data of a graph would take; data that the pack has already count 0."""
    return sum(int(each.tensor.nbytes) + 4096 for each in data_of(pack, graph, names) if not is_carried(pack, each))


class Carrier:
    """Writer of node data into a pack: first the files, then their names and ids in the pack's record, which is the commit.

    A context manager; leaving it without :meth:`commit` removes the files. The caller holds the pack's writer lock. ``disk``
    pays for the files, and for the growth of the record.
    """

    def __init__(self, pack: OfflineSamples, disk: DiskQuota | None = None) -> None:
        self._pack, self._disk = pack, disk
        self._before = named(pack)
        self._new: dict[str, dict[str, str]] = {}

    def write(self, data: NodeData) -> None:
        """Write node data, durably, into a file that the record does not name yet."""
        pack, tensor = self._pack, data.tensor.contiguous()
        dtype = dtype_name(tensor.dtype)
        record = {"format": 1, "name": data.name, "dtype": dtype, "shape": list(tensor.shape), "made_of": data.made_of}
        path = pack.file(NODE_DATA_PREFIX + uuid.uuid4().hex[:16])  # a new name: the old file stays until the commit
        try:
            with SectionWriter(path, NODE_DATA_KIND, self._disk) as writer:
                writer.append(np.frombuffer(json.dumps(record).encode(), np.uint8))
                writer.append(tensor.reshape(-1).view(torch.uint8).numpy())
                file = writer.finish(durable=True)
                file.close()
        except BaseException:
            _remove(path)  # the rename may be done, but not durable
            raise
        entry = {"file": os.path.basename(path), "id": file.file_id}
        self._new[data.name] = entry
        if self._disk is not None:
            grown = len(json.dumps({data.name: entry})) - len(json.dumps({data.name: self._before.get(data.name, "")}))
            self._disk.take(max(0, grown), pack.file(RECORD))

    def commit(self) -> None:
        """Name the written files in the record, then remove files that the record does not name any more.

        After an OSError the record is the old or the new one; no file that it names is removed.
        """
        if not self._new:
            return
        pack = self._pack
        record = pack.check_in_place()
        path = pack.file(RECORD)
        _remove(f"{path}.tmp")
        write_record(path, RECORD, {**record, NODE_DATA: {**self._before, **self._new}})
        self._new = {}
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        files = {entry["file"] for entry in named(self._pack).values()}
        for name in os.listdir(self._pack.path):
            if name.startswith(NODE_DATA_PREFIX) and name not in files:
                _remove(self._pack.file(name))

    def __enter__(self) -> Carrier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._new:
            # A commit may have failed after its rename. An unreadable record may name the files; a later commit cleans up.
            with contextlib.suppress(OSError, FeatstoreError):
                self._remove_unnamed()


def carried(pack: OfflineSamples) -> dict[str, dict[str, Any]]:
    """Describe all node data that a pack carries, by name: ``dtype``, ``shape``, ``made_of``, ``file``, ``id``."""
    return {name: _described(pack, name, entry) for name, entry in sorted(named(pack).items())}


def _described(pack: OfflineSamples, name: str, entry: Mapping[str, str]) -> dict[str, Any]:
    """Check that a file of node data is the one that the record names, and return its description."""
    n = _n_nodes(pack, name)
    file = _open(pack, name, entry)
    try:
        record = json.loads(file[0].tobytes())
        if not fits(record, DESCRIPTION):
            raise ValueError(f"it is {record!r:.100}")
        n_bytes = math.prod(record["shape"]) * DTYPES[record["dtype"]][1]
        is_right = record["shape"][0] == n and n_bytes == file.lengths[1] and record["name"] == name
    except (ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"the record is not one of node data: {error!r}", file.path) from None
    finally:
        file.close()
    if not is_right:
        raise CorruptionError(f"{record['dtype']} of shape {record['shape']}, for {n} nodes", file.path)
    return {**record, **entry}


def _n_nodes(pack: OfflineSamples, name: str) -> int:
    """Count the nodes of the type that a field is of; CorruptionError if the pack has no such type."""
    kind = ONE_NODE if pack.types.is_one else name.rpartition("/")[0]
    if kind not in pack.types.nodes:
        raise CorruptionError(f"node data {name!r} are of no type of nodes", pack.file(RECORD))
    return pack.types.nodes[kind].n


def _open(pack: OfflineSamples, name: str, entry: Mapping[str, str]) -> SectionFile:
    file = SectionFile(pack.file(entry["file"]), NODE_DATA_KIND)
    if file.file_id != entry["id"]:
        file.close()
        raise CorruptionError(f"this is not the file of node data {name!r} that the pack's record names", file.path)
    return file


def load_carried(pack: OfflineSamples, record: Mapping[str, Any]) -> torch.Tensor:
    """Read node data that :func:`carried` has found; StaleError if the pack carries another version since then."""
    name, entry = record["name"], {key: record[key] for key in ("file", "id")}
    try:
        file = _open(pack, name, entry)
    except (CorruptionError, FormatError, FileNotFoundError):
        if named(pack).get(name) != entry:
            raise StaleError(f"{pack.path}: node data {name!r} was replaced since the pack was opened; open it again") from None
        raise
    try:
        data = file[1]
        if data.dtype != np.uint8:
            raise CorruptionError(f"node data {name!r} are not bytes but {data.dtype}", file.path)
    finally:
        file.close()
    return torch.from_numpy(data.copy()).view(torch_dtype(record["dtype"])).reshape(record["shape"])


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
