"""First inputs of the fuzz targets, from files that the library writes; ``python -m tests.campaigns.fuzz_seeds`` makes them."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import torch

import featstore
from featstore.cli.sage import GraphSAGE
from featstore.storage.catalog import CATALOG_FILE, write_catalog
from featstore.storage.layout import PAGE_BYTES
from tests.campaigns.damage import entries_of
from tests.campaigns.damage_subjects import SUBJECTS
from tests.campaigns.fuzz_targets import CORPUS, ENTRY
from tests.storage.test_catalog import sample

META = """graph:
  nodes: [{type: a, num: 3}]
  edges: [{type: "a:to:a", format: numpy, path: edges.npy}]
feature_data: [{domain: node, type: a, name: x, format: numpy, path: x.npy}]
tasks:
- name: t
  train_set: [{type: a, data: [{name: seeds, format: numpy, path: ids.npy}, {name: labels, format: numpy, path: ids.npy}]}]
- name: links
  test_set: [{type: "a:to:a", data: [{name: seeds, format: numpy, path: pairs.npy}, {name: at, format: numpy, path: ids.npy}]}]
"""


def records() -> dict[str, list[bytes]]:
    """Take files of each kind from small datasets, packs and runs."""
    found: dict[str, list[bytes]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder)
        for name in ("dataset", "typed", "run", "pack"):
            (root / f"in-{name}").mkdir()
            SUBJECTS[name].make(root / f"in-{name}" / name, 1)
        at = {name: root / f"in-{name}" / name for name in ("dataset", "typed", "run", "pack")}
        found["header"] = [(at["dataset"] / name).read_bytes()[:128] for name in ("node.x.1.rows", "node.h.1.rows")]
        found["catalog_values"] = [
            json.dumps(entries_of((at[name] / CATALOG_FILE).read_bytes())).encode() for name in ("dataset", "typed")
        ]
        (root / "small").mkdir()
        write_catalog(root / "small", sample(2))
        found["lmdb_pages"] = [(root / "small" / CATALOG_FILE).read_bytes()[:-PAGE_BYTES]]
        found["pack_record"] = [record_of(at["pack"] / "pack")]
        found["layout_record"] = [record_of(next(at["pack"].glob("layout-*")) / "layout")]
        found["plan"] = [(at["run"] / "plan").read_bytes()]
        found["sections"] = [(at["run"] / "trace").read_bytes()]
        found["samples"] = [(at["run"] / "samples").read_bytes()]
        found["chunks"] = [small_chunks(root / "chunks")]
    return found


def record_of(path: Path) -> bytes:
    data = path.read_bytes()
    where = struct.unpack_from("<Q", data, len(data) - 96 + 72)[0]
    entry = np.frombuffer(data[where : where + 32], ENTRY)[0]
    return data[int(entry["offset"]) : int(entry["offset"] + entry["items"])]


def small_chunks(path: Path) -> bytes:
    rng = np.random.default_rng(0)
    featstore.OutOfCoreGraph.from_edge_index(
        path, rng.integers(0, 40, (2, 1500)), 40, topology="chunked", chunk_bytes=PAGE_BYTES, progress=False
    ).close()
    directory, words = (
        np.fromfile(path / f"edge.{name}.1.rows", np.uint8)[PAGE_BYTES:] for name in ("chunk_directory", "chunks")
    )
    n_rows = int(np.flatnonzero(directory.view(np.int64)[: 3 * 170].reshape(-1, 3)[:, 1] == 1500)[0]) + 1
    head = struct.pack("<BBBHxxx", 1, n_rows - 1, 40, 1500)
    return head + directory[: 24 * n_rows].tobytes() + words.tobytes()


def texts() -> dict[str, list[bytes]]:
    """Write the inputs that are text, and arrays."""
    plain, archive, columns = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(plain, np.arange(6, dtype=np.int32).reshape(3, 2))
    np.save(columns, np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    np.savez_compressed(archive, edge_index=np.arange(6).reshape(2, 3), num=np.array([3]))
    sizes = {"feature": "x", "n_in": 1, "hidden": 1, "n_out": 1, "n_layers": 1}
    names = list(GraphSAGE(1, 1, 1, 1, 0.0, 0).state_dict())
    model = json.dumps({"format": 1, "sizes": sizes, "weights": names}).encode() + b"\0" + bytes(16)
    tensor = {"tensor": 1, "shape": [1], "dtype": "float64"}
    state = json.dumps({"map": [["a", 1], [2, tensor], ["c", [None, True]]]}).encode() + b"\0" + bytes(8)
    return {
        "csv": [b"p1,2\n3,4\n", b'z\xef\xbb\xbf1.5,nan\r\n"2",\n', b"pa,b\nTrue,x"],
        "npy": [plain.getvalue(), columns.getvalue(), b"r" + bytes(11)],
        "npz": [archive.getvalue(), b"s" + plain.getvalue(), b"z" + columns.getvalue()],
        "ogb_csv": [b"=", b"0,1\n\x001,2\n3,4\n\x00=\x002\n\x001\n"],
        "graphbolt": [META.encode(), b"graph: {nodes: [{num: 3}], edges: [{format: csv, path: edges.csv}]}"],
        "sizes": [b"4GiB", b"25%", b"1.5x", b"400 MB", b"0.1", b"paper=30"],
        "model": [model],
        "state": [state],
    }


def write(found: dict[str, list[bytes]]) -> None:
    for name, data in found.items():
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        for number, each in enumerate(data):
            (CORPUS / name / f"seed-{number}").write_bytes(each)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(records())
    write(texts())
