"""Every parser of the library as a function of bytes, which returns nothing and raises what no input may bring about.

Checksums would hide the parsers from a fuzzer, so a target makes them right before it parses. An error that the library promises
for damaged or hostile input is swallowed; anything else is a defect. Inputs are small, and so is what they may allocate.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import io
import json
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from featstore.adapters.datasets import ogb
from featstore.adapters.datasets.arrays import Archive, open_array
from featstore.adapters.datasets.csvfiles import CsvSource, count_lines, read_ints, read_records
from featstore.adapters.datasets.graphbolt import _Metadata
from featstore.budget import Budget
from featstore.cli.model import KIND as MODEL
from featstore.cli.model import load_model
from featstore.config import parse_cache_size, parse_disk, parse_memory, parse_size
from featstore.creation.source import Source
from featstore.creation.typed import nodes_of_type
from featstore.errors import BudgetError, CorruptionError, FormatError
from featstore.gather.buffers import BufferPool
from featstore.graph.savedparts import kept_parts
from featstore.idmaps.idmap import map_of, maps_of
from featstore.load.statefile import read_state
from featstore.pack.record import read_record
from featstore.plan.planfile import PlanFile
from featstore.plan.samples import SampleFile
from featstore.storage import catalog as cataloging
from featstore.storage.catalogvalues import unpack_value
from featstore.storage.format import Header, file_seed
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.sections import SectionFile
from featstore.topology.chunkformat import Directory, parse_chunk_bytes
from featstore.topology.chunks import ChunkedTopology
from featstore.topology.types import Types
from tests.support.array_graphs import ArrayFile

__all__ = ["CORPUS", "TARGETS", "inputs", "sealed_sections"]

CORPUS = Path(__file__).with_name("corpus")
MOST_BYTES = 1 << 16  # of an input
MEMORY = 1 << 24  # that a target may allocate
DAMAGE = (CorruptionError, FormatError)
Target = Callable[[bytes], None]


@functools.cache
def scratch() -> Path:
    """Make this process's folder for inputs that are read as files, in memory."""
    return Path(tempfile.mkdtemp(prefix="featstore-fuzz-", dir="/dev/shm"))


def put(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


# --- datasets -------------------------------------------------------------------------------------------------------------------


def header(data: bytes) -> None:
    """The header page of a row file; with a right sum, but for every 16th input."""
    page = data[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
    if data[-1:] != b"\x0f":
        page = page[: PAGE_BYTES - 8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(page[: PAGE_BYTES - 8]))
    with contextlib.suppress(*DAMAGE):
        found = Header.unpack(page, "row file")
        if found.pack() != page:
            raise AssertionError("a header is not what it was parsed to")


def lmdb_pages(data: bytes) -> None:
    """The pages of a catalog under a right digest: LMDB reads what passes, and must survive it."""
    body = data[: len(data) // PAGE_BYTES * PAGE_BYTES]
    path = scratch() / cataloging.CATALOG_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(cataloging._seal(body))
    with contextlib.suppress(*DAMAGE):
        cataloging.read_catalog(scratch())


def catalog_values(data: bytes) -> None:
    """The JSON objects of a catalog, and what else is read from it when a dataset is opened."""
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError):
        unpacked_value(data)
        return
    if not isinstance(entries, dict) or not all(isinstance(each, dict) for each in entries.values()):
        return
    with contextlib.suppress(*DAMAGE):
        catalog = cataloging._parse(entries, "/nowhere/catalog.lmdb/data.mdb")
        types = Types.of_entry(catalog.dataset, "catalog")
        for of in maps_of(catalog):
            map_of(catalog, of, types.nodes[of].n if of in types.nodes else -1, "catalog")
        kept_parts(catalog, lambda kept, role: torch.empty(0))


def unpacked_value(text: bytes) -> None:
    """A value of a catalog with a right sum."""
    with contextlib.suppress(*DAMAGE):
        unpack_value(b"k", struct.pack("<Q", xxhash.xxh3_64_intdigest(b"k" + text)) + text, "catalog")


def chunks(data: bytes) -> None:
    """A directory of chunks and the chunks: lists found, edges read, in either width of ids."""
    if len(data) < 8:
        return
    id_bytes, n_rows, n_nodes, n_edges = (8, 4)[data[0] & 1], 1 + data[1] % 6, data[2], struct.unpack_from("<H", data, 3)[0]
    rows = np.frombuffer(data[8 : 8 + 24 * n_rows].ljust(24 * n_rows, b"\0"), np.int64).reshape(-1, 3)
    body = data[8 + 24 * n_rows :]
    words = np.frombuffer(body + bytes(-len(body) % PAGE_BYTES), np.int64 if id_bytes == 8 else np.int32)
    with contextlib.suppress(CorruptionError):
        files: Any = ArrayFile(words)
        made = Directory(rows.copy(), n_nodes, n_edges, id_bytes, PAGE_BYTES, len(words), "directory")
        topology = ChunkedTopology(n_nodes, n_edges, made, files, Budget(MEMORY))
        try:
            starts, degrees = topology.offsets(np.arange(n_nodes, dtype=np.int64))
            assert (degrees >= 0).all()
            assert not n_nodes or (starts >= 0).all()
            assert not n_nodes or int((starts + degrees).max()) <= n_edges
            out = np.empty(n_edges, topology.id_dtype)
            topology.read_edges(np.arange(n_edges, dtype=np.int64), out)
            topology.check_ids(0, out)
        finally:
            topology.close()


# --- files of sections ----------------------------------------------------------------------------------------------------------

TAIL = struct.Struct("<8sII32s16sQQQ")
ENTRY = np.dtype([("offset", "<u8"), ("items", "<u8"), ("dtype", "<u8"), ("sum", "<u8")])
WIDTHS = {1: 1, 2: 1, 3: 1, 4: 2, 5: 4, 6: 8, 7: 2, 9: 4, 10: 8, 64: 8}


def sealed_sections(data: bytes, kind: str) -> bytes:
    """Make every checksum of a file of sections right, and its tail one of its kind; of other bytes, a file of them all."""
    if len(data) < TAIL.size + 8:
        return section_file([np.frombuffer(data, np.uint8)], kind)
    _, _, _, _, file_id, n, where, _ = TAIL.unpack_from(data, len(data) - TAIL.size - 8)
    seed, end = file_seed(kind, file_id, 0), len(data) - TAIL.size - 8
    body = bytearray(data[:end])
    index_sum = 0
    if where <= end and n * 32 == end - where:
        index = np.frombuffer(body[where:], ENTRY).copy()
        for number in range(min(n, 500)):
            offset, items, code = (int(index[name][number]) for name in ("offset", "items", "dtype"))
            stop = offset + items * WIDTHS.get(code, 1)
            if stop <= end:
                index["sum"][number] = xxhash.xxh3_64_intdigest(bytes(body[offset:stop]), (seed + number) % 2**64)
        body[where:] = index.tobytes()
        index_sum = xxhash.xxh3_64_intdigest(index.tobytes(), (seed - 1) % 2**64)
    tail = TAIL.pack(b"FSSECT\0\0", 1, 0x01020304, kind.encode(), file_id, n, where, index_sum)
    return bytes(body) + tail + struct.pack("<Q", xxhash.xxh3_64_intdigest(tail))


def section_file(arrays: list[Any], kind: str, file_id: bytes = bytes(16)) -> bytes:
    """Make a file of sections."""
    codes = {
        np.dtype(np.uint8): 2,
        np.dtype(np.int32): 5,
        np.dtype(np.int64): 6,
        np.dtype(np.float32): 9,
        np.dtype(np.uint64): 64,
    }
    body, index = b"", np.zeros(len(arrays), ENTRY)
    for number, array in enumerate(arrays):
        data = array.tobytes()
        index[number] = (len(body), len(array), codes[array.dtype], 0)
        body += data
    tail = TAIL.pack(b"", 0, 0, b"", file_id, len(arrays), len(body), 0)
    return sealed_sections(body + index.tobytes() + tail + bytes(8), kind)


@contextlib.contextmanager
def sections(data: bytes, kind: str) -> Iterator[SectionFile]:
    file = SectionFile(put(kind, sealed_sections(data, kind)), kind)
    try:
        yield file
    finally:
        file.close()


def any_sections(data: bytes) -> None:
    """The index and the arrays of a file of sections."""
    with contextlib.suppress(*DAMAGE), sections(data, "trace") as file:
        for number in range(len(file)):
            file[number]
        if len(file):
            file.run(0, len(file))
        file.verify()


def samples(data: bytes) -> None:
    """Sampled batches."""
    with contextlib.suppress(*DAMAGE, BudgetError), sections(data, "samples") as file:
        found, pool = SampleFile(file), BufferPool(Budget(MEMORY))
        for number in range(len(found)):
            found.ids(number)
            batch = found.batch(number, pool)
            for block in batch.blocks:
                assert not len(block.src) or 0 <= int(block.src.min()) <= int(block.src.max()) < block.n_src
                assert not len(block.dst) or 0 <= int(block.dst.min()) <= int(block.dst.max()) < block.n_dst


def plan(data: bytes) -> None:
    """Plans of batches; of a batch of as many rows as a plan has."""
    with contextlib.suppress(*DAMAGE), sections(data, "plan") as file:
        found = PlanFile(file, n_slots=100)
        for number in range(len(found)):
            n = int(file.lengths[5 * number])
            ids = np.arange(min(n, 1 << 20), dtype=np.int64)
            made = found.plan(number, ids)
            for part in made.parts:
                positions = np.asarray(part.positions)
                assert not len(positions) or 0 <= int(positions.min()) <= int(positions.max()) < max(1, n)


def _record(kind: str) -> Target:
    def target(data: bytes) -> None:
        path = put(kind, section_file([np.frombuffer(data, np.uint8)], kind))
        with contextlib.suppress(*DAMAGE):
            record = read_record(str(path), kind)
            if "node_types" in record:
                Types.of_entry(record, str(path))

    target.__doc__ = f"The JSON record of a {kind}."
    return target


def state(data: bytes) -> None:
    """A state of training: JSON, and tensors of eight bytes each."""
    text, _, rest = data.partition(b"\0")
    arrays = [np.frombuffer(each, np.uint8) for each in (text, *(rest[i : i + 8] for i in range(0, min(len(rest), 64), 8)))]
    with contextlib.suppress(*DAMAGE):
        read_state(str(put("state", section_file(arrays, "state"))), "state")


def model(data: bytes) -> None:
    """A model of ``featstore train``: JSON, and weights."""
    text, _, rest = data.partition(b"\0")
    n = len(rest) // 16 * 4
    weights = [np.frombuffer(rest[: 4 * n], np.float32)[i::4] for i in range(4)]
    path = put("model", section_file([np.frombuffer(text, np.uint8), *(np.ascontiguousarray(each) for each in weights)], MODEL))
    with contextlib.suppress(*DAMAGE):
        load_model(path)


# --- imports --------------------------------------------------------------------------------------------------------------------

# An id that is no node, and a dtype that the format lacks, have errors of their own.
WRONG_FILE = (*DAMAGE, IndexError, TypeError, BudgetError, OSError)


@contextlib.contextmanager
def naming_files(*errors: type[BaseException]) -> Iterator[None]:
    """Swallow errors that name a file of the scratch folder."""
    try:
        yield
    except errors as error:
        if str(scratch()) not in f"{error} {getattr(error, 'filename', '')}":
            raise


def drain(source: Source) -> None:
    for block in source.blocks(1 << 12):
        assert block.nbytes <= MEMORY


def csv(data: bytes) -> None:
    """A CSV file, plain or gzipped, in each way of reading one."""
    name, text = ("fuzz.csv.gz", gzip.compress(data[1:], 1, mtime=0)) if data[:1] == b"z" else ("fuzz.csv", data[1:])
    if data[:1] == b"g":
        name = "fuzz.csv.gz"
    path = put(name, text)
    for read in (lambda: drain(CsvSource(path, count_lines(path))), lambda: read_ints(path), lambda: read_records(path)):
        with naming_files(*DAMAGE):
            read()


def npy(data: bytes) -> None:
    """An array file: one with NumPy's header, or a raw one."""
    path = put("fuzz.npy", data)
    with naming_files(*DAMAGE, TypeError):
        drain(open_array("x", path, raw=("int32", None), n_rows=3) if data[:1] == b"r" else open_array("x", path))


def npz(data: bytes) -> None:
    """An archive of arrays; other bytes become its only member."""
    if data[:2] != b"PK":
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED if data[:1] == b"z" else zipfile.ZIP_STORED) as archive:
            archive.writestr(zipfile.ZipInfo("x.npy"), data[1:])
        data = held.getvalue()
    path = put("fuzz.npz", data)
    with naming_files(*DAMAGE):
        archive = Archive(path)
        for name in archive.names:
            with naming_files(*DAMAGE, TypeError):
                archive.small(name)
            with naming_files(*DAMAGE, TypeError):
                rows = archive.rows(name, wider=True)
                drain(rows)
                if len(rows.shape) == 2 and rows.shape[0] == 2:
                    for block in rows.columns(1 << 12):
                        assert block.nbytes <= MEMORY


OGB_FILES = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list", "species")


def ogb_csv(data: bytes) -> None:
    """A folder of OGB in CSV: files in the order of OGB_FILES, parted by a zero byte; what is left out is as it should be."""
    good = (b"0,1\n1,2\n2,0\n", b"1,2\n3,4\n5,6\n", b"0\n1\n2\n", b"3\n", b"3\n", b"1\n1\n1\n")
    raw = scratch() / "ogb" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    given = data.split(b"\0")
    for number, name in enumerate(OGB_FILES):
        text = given[number] if number < len(given) and given[number] != b"=" else good[number]
        (raw / f"{name}.csv.gz").write_bytes(gzip.compress(text, 1, mtime=0))
    with naming_files(*WRONG_FILE):
        _use(*ogb_module()._csv(str(raw), (None, None)))


def ogb_module() -> Any:
    import sys

    return sys.modules[ogb.__module__]


def _use(nodes: dict[Any, Any], edges: dict[Any, Any]) -> None:
    for of in edges.values():
        for block in of.edges.stream():
            assert block.nbytes <= MEMORY
        for source in of.features.values():
            drain(source)
    for of in nodes.values():
        for source in (*of.features.values(), *of.data.values()):
            if isinstance(source, Source):
                drain(source)


def graphbolt(data: bytes) -> None:
    """GraphBolt's metadata.yaml, beside files that it may name."""
    folder = scratch() / "bolt"
    if not folder.exists():
        folder.mkdir()
        np.save(folder / "edges.npy", np.array([[0, 1, 2], [1, 2, 0]]))
        np.save(folder / "x.npy", np.zeros((3, 2), np.float32))
        np.save(folder / "ids.npy", np.arange(3))
        np.save(folder / "pairs.npy", np.array([[0, 1], [1, 2], [2, 0]]))
        (folder / "edges.csv").write_text("0,1\n1,2\n")
    (folder / "metadata.yaml").write_bytes(data)
    with naming_files(*WRONG_FILE):
        meta = _Metadata(folder)
        nodes, edges = meta.nodes(), {}
        if sum(each.n for each in nodes.values()) > MEMORY // 64:
            return
        from featstore.adapters.datasets.writing import FoundEdges

        for key, each in meta.edges(nodes).items():
            edges[key] = FoundEdges(each)
        meta.add_features(nodes, edges)
        meta.add_tasks(None, nodes, str(folder))
        _use(nodes, edges)


# --- the command line -----------------------------------------------------------------------------------------------------------


def sizes(data: bytes) -> None:
    """Sizes, shares and counts of the command line."""
    text = data.decode("utf-8", "surrogateescape")
    parsers: list[Callable[[str], Any]] = [parse_size, parse_memory, parse_cache_size, parse_chunk_bytes]
    parsers += [lambda each: parse_disk(each, 1 << 30), nodes_of_type]
    for parse in parsers:
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            found = parse(text)
            assert isinstance(found, tuple) or found >= 0


TARGETS: dict[str, Target] = {
    "header": header,
    "lmdb_pages": lmdb_pages,
    "catalog_values": catalog_values,
    "chunks": chunks,
    "sections": any_sections,
    "samples": samples,
    "plan": plan,
    "pack_record": _record("pack"),
    "layout_record": _record("layout"),
    "state": state,
    "model": model,
    "csv": csv,
    "npy": npy,
    "npz": npz,
    "ogb_csv": ogb_csv,
    "graphbolt": graphbolt,
    "sizes": sizes,
}


def inputs(target: str) -> list[bytes]:
    """Read a target's corpus: one file an input."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def forget_scratch() -> None:
    """Remove this process's folder."""
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()
