"""Subjects of the damage campaign: directories that hold every kind of file that the library writes, and how to read them whole.

Each subject is made twice, from other values; the files of the second are the older copies that damage puts back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import mmap
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.cache.planned import PlannedBatch
from featstore.config import Options
from featstore.errors import CorruptionError
from featstore.gather.buffers import BufferPool
from featstore.gather.plan import Changeset
from featstore.gather.sources import ExtentSource
from featstore.plan.planfile import PlanFile, write_plan
from featstore.plan.samples import SampleFile, SampleWriter
from featstore.sampling import listweights
from featstore.storage.checkpoint import read_checkpoint, write_checkpoint
from featstore.storage.extents import ExtentMap, ExtentWriter
from featstore.storage.format import sums_seed
from featstore.storage.layout import PAGE_BYTES, RowLayout, choose_layout
from featstore.storage.pagestream import least_window
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.storage.writer import FileRecord, RowFileWriter
from tests.pack.test_pack_damage import delivered, make_pack
from tests.pack.test_pack_damage import verify as verify_pack
from tests.support.graphs import make_graph
from tests.support.names import add_names

__all__ = ["SUBJECTS", "Subject", "kind_of"]

N, E = 120, 3000
A = 50  # nodes of the first of two types
EDGE = ("a", "to", "p")
OPEN: dict[str, Any] = {"memory": "16MiB", "backend": "pread", "threads": 1}
NEIGHBORS: dict[str, Any] = {"budget": "8KiB", "policy": "degree", "edges": True, "progress": False}
Pieces = Iterator[Any]


@dataclass(frozen=True)
class Subject:
    """A directory to damage.

    ``make(path, seed)`` makes it. ``read(path, verify)`` yields all that can be read from it, as arrays or tensors; ``verify``
    is that of ``featstore.open``. ``check(path)`` is the library's own check of it. Older copies of the kinds ``without_older``
    are not put back.
    """

    make: Callable[[Path, int], None]
    read: Callable[[Path, str], Pieces]
    check: Callable[[Path], object]
    without_older: frozenset[str] = frozenset()

    def digest(self, path: Path, verify: str = "always") -> str:
        """Read everything, and digest it."""
        found = hashlib.blake2b()
        for piece in self.read(path, verify):
            array = (
                piece.contiguous().view(torch.uint8).numpy() if isinstance(piece, torch.Tensor) else np.ascontiguousarray(piece)
            )
            found.update(f"{array.shape}{array.dtype}".encode())
            found.update(array.tobytes())
        return found.hexdigest()


def kind_of(name: str) -> str:
    """Name the kind of a file, by which damages are counted, from its path in its subject."""
    path = Path(name)
    if path.name == "data.mdb":
        return "catalog"
    sums = ".sums" * path.name.endswith(".sums")
    stem = path.name.removesuffix(".sums")
    if stem.endswith(".rows") and not stem.startswith("extents"):
        of = stem.split(".")
        where = of[0].partition("@")[0]
        return (f"{where}.{of[1]}" if where in ("node", "edge", "ids", "cache", "part") else where) + sums
    return stem.split("-")[0].split(".")[0] + sums


# --- datasets -------------------------------------------------------------------------------------------------------------------


def make_dataset(path: Path, seed: int) -> None:
    """Make a dataset of one type: offsets and ids, features of three layouts, patches, kept lists, parts, names."""
    rng = np.random.default_rng(seed)
    features = {
        "x": rng.standard_normal((N, 9)).astype(np.float32),
        "h": rng.integers(0, 255, (N, 700), np.uint8),
        "wide": rng.integers(0, 255, (N, 8000), np.uint8),
    }
    featstore.OutOfCoreGraph.from_edge_index(
        path,
        rng.integers(0, N, (2, E)),
        N,
        features,
        {"y": rng.integers(0, 9, N)},
        edge_features={"w": rng.random((E, 2)).astype(np.float32)},
        overwrite=True,
        progress=False,
    ).close()
    add_names(path, [f"n{i * seed}" for i in range(N)])
    with featstore.open(path, **OPEN) as g:
        g.features["wide"].update(np.arange(7, 90, 9), np.full((10, 8000), seed, np.uint8), progress=False)
        g.cache_neighbors(save=True, **NEIGHBORS)
        featstore.partition(g, 4, train_idx=np.arange(0, N, 3), keep_lists=True, progress=False)


def make_typed(path: Path, seed: int) -> None:
    """Make a dataset of two types of nodes in chunks, with integer names."""
    rng = np.random.default_rng(seed)
    nodes = {
        kind: featstore.Nodes(n, {"x": rng.standard_normal((n, 5)).astype(np.float32)}, {"y": rng.integers(0, 5, n)})
        for kind, n in (("a", A), ("p", N - A))
    }
    given = np.stack([rng.integers(0, A, E), rng.integers(0, N - A, E)])
    edges = {
        EDGE: featstore.Edges(given, {"w": rng.random(E).astype(np.float32)}),
        ("p", "cites", "p"): rng.integers(0, N - A, (2, E)),
    }
    featstore.OutOfCoreGraph.create(
        path, nodes=nodes, edges=edges, topology="chunked", chunk_bytes=4096, overwrite=True, progress=False
    ).close()
    add_names(path, (rng.permutation(10_000)[: N - A] * seed).tolist(), "p")


def read_dataset(path: Path, verify: str) -> Pieces:
    with featstore.open(path, verify=verify, **OPEN) as g:
        yield from _fields(g)
        yield from _names(g.ids())
        for kept in g.parts().values():
            yield from (kept.load(), kept.train_nodes(), kept.cross_out_degree())
        g.cache_neighbors(**NEIGHBORS)
        yield from _drawn(featstore.NeighborSampler(g, [3, 2], seed=1, edges=True), np.arange(0, N, 5))


def read_typed(path: Path, verify: str) -> Pieces:
    with featstore.open(path, verify=verify, **OPEN) as g:
        yield from _fields(g)
        yield from _names(g.ids("p"))
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1, edges=True)
        yield from _drawn(sampler, np.arange(A, N, 5))


def _fields(g: Any) -> Pieces:
    for store in g.features.values():
        yield store[:]
        yield store[np.arange(len(store) - 1, -1, -3)]
    yield from (g.node_data[name] for name in g.node_data)
    yield from (store[:] for store in g.edge_features.values())
    for _, ids in g.topology.scan():
        yield ids
    yield g.topology.offsets_between(0, g.topology.num_lists)
    degrees = np.empty(g.num_nodes, np.int64)
    g.adjacency.read_out_degrees(0, degrees)
    yield degrees


def _names(ids: Any) -> Pieces:
    names = ids.decode(np.arange(len(ids)))
    yield np.frombuffer("\0".join(map(str, list(names) if ids.kind == "text" else names.tolist())).encode(), np.uint8)
    yield ids.encode(names, strict=False)


def _drawn(sampler: Any, seeds: Any) -> Pieces:
    batch = sampler.sample(torch.from_numpy(seeds))
    yield batch.input_ids
    for block in batch.blocks:
        yield from (block.src, block.dst, *block.edge_arrays.values())


def check_dataset(path: Path) -> None:
    with featstore.open(path, verify="off", **OPEN) as g:
        g.verify(progress=False)


# --- packs ----------------------------------------------------------------------------------------------------------------------


def make_one_pack(path: Path, seed: int) -> None:
    """Make a pack with two layouts and the labels that it carries."""
    make_pack(path.parent, seed).rename(path)


def read_pack(path: Path, verify: str) -> Pieces:
    return (np.frombuffer(piece, np.uint8) for piece in delivered(path))


# --- files of a run -------------------------------------------------------------------------------------------------------------

BATCHES = [np.sort(np.random.default_rng(9).permutation(N)[:k]) for k in (40, 0, 31)]
EXTENTS = ExtentMap(np.array([len(each) for each in BATCHES]), 700)


def make_run(path: Path, seed: int) -> None:
    """Make what a superbatch keeps on disk, and a checkpoint: samples, plans, extents, a trace."""
    rng = np.random.default_rng(seed)
    path.mkdir()
    indptr, indices = make_graph(N, 4.0)
    featstore.OutOfCoreGraph.create(path / "g", indptr, indices, progress=False).close()
    with featstore.open(path / "g", **OPEN) as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=seed, edges=True)
        with SampleWriter(path / "samples", N) as samples:
            for number in range(3):
                samples.add(sampler.sample(torch.arange(9 * number, 9 * number + 9), 0, number))
            samples.finish().close()
    shutil.rmtree(path / "g")
    with SectionWriter(path / "plan", "plan") as plans:
        for ids in BATCHES:
            slots = np.where(rng.random(len(ids)) < 0.6, rng.permutation(len(ids)), -1).astype(np.int32)
            at = np.flatnonzero(slots < 0)[::2]
            coming = rng.permutation(len(ids))[: len(at)].astype(np.int32)
            write_plan(plans.append, PlannedBatch(slots, Changeset(ids[at], at, coming, rng.permutation(N)[:5])))
        plans.finish().close()
    with RowFileWriter(path, "base.rows", choose_layout(700), kind="feature", dtype="uint8") as base:
        base.write(rng.integers(0, 255, (N, 700), np.uint8))
        of = base.commit()
    with _reader("always") as reader, _opened(reader, path, of) as rows, ExtentWriter(path / "extents.rows", EXTENTS) as writer:
        writer.fill(rows, lambda b: BATCHES[b], 16 << 20)
        made = writer.finish()
    for name in (of.name, of.sums_name):
        (path / name).unlink()
    write_checkpoint(
        str(path / "progress"), 2, np.array([len(each) for each in BATCHES]), rng.bytes(16), np.zeros(512, np.uint64)
    )
    with SectionWriter(path / "trace", "trace") as trace:
        for ids in BATCHES:
            trace.append(ids)
        trace.finish().close()
    # What the process that wrote the extents knows of them: never damaged.
    (path / "known.json").write_text(json.dumps({"id": made.file_id, "bytes": [made.n_bytes, made.n_sums_bytes]}))


def read_run(path: Path, verify: str) -> Pieces:
    opened = SectionFile(path / "samples", "samples")
    try:
        samples = SampleFile(opened)
        for number in range(len(samples)):
            yield samples.ids(number)
            batch = samples.batch(number, BufferPool(Budget(1 << 24)))
            yield batch.input_ids
            yield np.array([batch.index, batch.epoch, batch.n_seeds])
            for block in batch.blocks:
                yield from (block.src, block.dst, *block.edge_arrays.values())
    finally:
        opened.close()
    opened = SectionFile(path / "plan", "plan")
    try:
        plans = PlanFile(opened, n_slots=N)
        yield plans.n_missed
        for number in range(min(len(plans), len(BATCHES))):
            plan = plans.plan(number, BATCHES[number])
            for part in plan.parts:
                yield from (np.array(part.addresses), part.positions)
            if plan.changes is not None:
                yield from (plan.changes.in_rows, plan.changes.in_slots, plan.changes.out_rows)
    finally:
        opened.close()
    trace = SectionFile(path / "trace", "trace")
    try:
        for number in range(len(trace)):
            yield trace[number]
    finally:
        trace.close()
    known = json.loads((path / "known.json").read_text())
    layout = RowLayout(4096, 1, 4096)
    made = FileRecord("extents.rows", "extents", known["id"], 1, EXTENTS.total_pages, "uint8", layout, *known["bytes"])
    with _reader(verify) as reader, _opened(reader, path, made) as file:
        source = ExtentSource(file, EXTENTS, np.arange(len(BATCHES)), least_window())
        try:
            for ids in BATCHES:
                rows = np.zeros((len(ids), 700), np.uint8)
                if len(ids):
                    source.gather(np.arange(len(ids)), rows, None)
                yield rows
        finally:
            source.close()
    state = read_checkpoint(str(path / "progress"), len(BATCHES), 4096)
    if state is None:  # a writer that finds none begins anew
        raise CorruptionError("no checkpoint that can be used", str(path / "progress"), 0)
    yield from (np.array(state[0]), state[1], np.frombuffer(state[2], np.uint8), state[3])


@contextlib.contextmanager
def _reader(verify: str) -> Iterator[Reader]:
    options = Options.resolve(16 << 20, "pread", verify, 1)
    reader = Reader(options, Budget(options.memory))
    try:
        yield reader
    finally:
        reader.close()


@contextlib.contextmanager
def _opened(reader: Reader, folder: Path, of: FileRecord) -> Iterator[RowFile]:
    seed = of.seed
    file = reader.open(folder / of.name, layout=of.layout, n_rows=of.n_rows, seed=seed, sums_seed=sums_seed(seed))
    try:
        yield file
    finally:
        file.close()


def check_run(path: Path) -> None:
    """Check every byte of the files that say what is in them; there is no such check of a run's extents."""
    for name in ("samples", "plan", "trace"):
        file = SectionFile(path / name, name)
        try:
            file.verify()
        finally:
            file.close()


# --- alias tables of weights ----------------------------------------------------------------------------------------------------

HUB = 900  # edges of one list: beyond those of which all columns are read
ONE_TYPE = ("_", "_", "_")


@functools.cache
def weighted_edges() -> np.ndarray[Any, Any]:
    """Edges in no order, with a long list, as numbered pairs of source and destination."""
    rng = np.random.default_rng(3)
    edges = rng.integers(0, N, (2, E))
    edges[1, rng.permutation(E)[:HUB]] = 7
    return edges


def make_weighted(path: Path, seed: int) -> None:
    weights = np.random.default_rng(seed).pareto(1.0, E) * (np.arange(E) % 5 > 0)  # some are 0
    features = {"edge_features": {"w": weights.astype(np.float32)}}
    featstore.OutOfCoreGraph.from_edge_index(path, weighted_edges(), N, **features, progress=False).close()


@contextlib.contextmanager
def tables_on_the_drive(g: Any) -> Iterator[Any]:
    """Make the weights of a graph's samplers, whose alias tables are in a run file; yield the tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listweights, "_KEPT_FRACTION", 0)
        weights = listweights.ListWeights.of(g, "w", [ONE_TYPE])
    yield weights._tables[0]


def make_tables(path: Path, seed: int) -> None:
    """Make the run file of a sampler by weight. Its weights are those of the seed, which is never damaged."""
    path.mkdir()
    make_weighted(path / "g", seed)
    with featstore.open(path / "g", **OPEN) as g, tables_on_the_drive(g) as tables:
        file = tables._file
        for name in ("columns", "columns.sums"):
            shutil.copy(Path(file.path).parent / name, path)
        known = {"weights": seed, "seed": file.seed, "n": file.n_rows, "bytes": (path / "columns").stat().st_size}
    shutil.rmtree(path / "g")
    (path / "known.json").write_text(json.dumps(known))


def read_tables(path: Path, verify: str) -> Pieces:
    """Draw by the tables: short lists and a long one, few neighbours and many; each drawn edge must be one of its list."""
    known = json.loads((path / "known.json").read_text())
    edges, whole = weighted_edges(), path.with_name(f"{path.name}-g")
    if not whole.exists():
        make_weighted(whole, known["weights"])
    with featstore.open(whole, verify=verify, **OPEN) as g, tables_on_the_drive(g) as tables:
        seed, n = known["seed"], known["n"]
        of: dict[str, Any] = {"layout": RowLayout(8, 1, 8), "n_rows": n, "seed": seed, "n_bytes": known["bytes"]}
        damaged = g.reader.open(path / "columns", sums_seed=sums_seed(seed), **of)
        tables._file.close()
        tables._file = damaged
        for replace in (False, True):
            for fanouts in ([3, 2], [40]):
                sampler = featstore.NeighborSampler(g, fanouts, seed=1, weight="w", replace=replace, edges=True)
                batch = sampler.sample(torch.arange(N))
                ids = batch.input_ids.numpy()
                for block in batch.blocks:
                    numbers = next(iter(block.edge_arrays.values())).numpy()
                    ends = ids[block.src.numpy()], ids[block.dst.numpy()]
                    assert np.array_equal(edges[:, numbers], np.stack(ends)), "neighbours that their lists have not"
                yield batch.input_ids
                for block in batch.blocks:
                    yield from (block.src, block.dst, *block.edge_arrays.values())


# --- the control ----------------------------------------------------------------------------------------------------------------


def make_mapped(path: Path, seed: int) -> None:
    path.mkdir()
    (path / "rows").write_bytes(np.random.default_rng(seed).bytes(3 * PAGE_BYTES))


def read_mapped(path: Path, verify: str) -> Pieces:
    """Map a file that has no checksum, and read it: what is cut off kills the process, and what is changed goes unseen."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with open(path / "rows", "rb") as file:
        at = libc.mmap(None, 3 * PAGE_BYTES, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
    yield np.frombuffer(ctypes.string_at(at, 3 * PAGE_BYTES), np.uint8)
    libc.munmap(at, 3 * PAGE_BYTES)


SUBJECTS = {
    "dataset": Subject(make_dataset, read_dataset, check_dataset),
    "typed": Subject(make_typed, read_typed, check_dataset),
    "pack": Subject(make_one_pack, read_pack, verify_pack),
    # Whoever wrote these files has them open; of a checkpoint, its reader compares the id.
    "run": Subject(make_run, read_run, check_run, frozenset({"samples", "plan", "trace", "progress"})),
    "tables": Subject(make_tables, read_tables, lambda path: None),  # nothing but draws checks them
    "mapped": Subject(make_mapped, read_mapped, lambda path: None),
}
