"""Packing that is killed in the middle of a pass goes on from its last checkpoint; what is read is what the kernel counts."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.gather.sources import ExtentSource
from featstore.storage import extents as module
from featstore.storage import rowfile
from featstore.storage.extents import ExtentMap, ExtentWriter, episodes
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.ordered import Ordered, piece_layout
from featstore.storage.pagestream import PageStream
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.writer import FileRecord
from featstore.testing.faults import Fault
from tests.storage.test_extents import make_reader, open_file, write_base
from tests.storage.test_reader import pages_of
from tests.strategies.test_packed import copied, pack
from tests.strategies.test_superbatch import dataset
from tests.support.kernel_counts import kernel_bytes
from tests.support.loaders import make_loader
from tests.support.programs import run_in_fork
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("_program_server")

__all__ = ["dataset", "pack"]  # fixtures

MEMORY = 32 << 20
BASE_BYTES = 20 << 20


class Case:
    """A base file, batches of its rows and, before them, pieces of rows in an order of their own."""

    def __init__(self, folder: Path, width: int, n_pieces: int) -> None:
        self.folder, self.n = folder, BASE_BYTES // width
        rng = np.random.default_rng(width)
        self.rows = rng.integers(0, 256, (self.n, width), dtype=np.uint8)
        known = folder / "record"
        if not known.exists():
            known.write_bytes(pickle.dumps(write_base(folder, self.rows)))
        self.record: FileRecord = pickle.loads(known.read_bytes())
        self.layout = piece_layout(width, 1 << 20)
        shared = rng.permutation(self.n)[: n_pieces * self.layout.group_rows]
        size = self.layout.group_rows
        self.pieces = [shared[k * size : (k + 1) * size] for k in range(n_pieces)]
        self.batches = [np.sort(rng.permutation(self.n)[: self.n // 5]) for _ in range(6)]
        self.extents = ExtentMap(np.array([len(ids) for ids in (*self.pieces, *self.batches)]), width)

    def fill(self, reader: Reader, base: RowFile, name: str) -> FileRecord:
        ordered = Ordered(len(self.pieces), lambda piece: self.pieces[piece], self.layout)
        assert len(episodes(self.extents, MEMORY, 8)) == 1  # memory as usual: one pass
        with ExtentWriter(self.folder / name, self.extents, resumable=True, ordered=ordered) as writer:
            writer.fill(base, lambda k: self.batches[k - len(self.pieces)], MEMORY)
            return writer.finish(durable=True)


def often(patched: pytest.MonkeyPatch) -> None:
    """Checkpoints after every piece of the scan."""
    for name, value in (("CHECKPOINT_S", 0.0), ("CHECKPOINT_COST", 0.0), ("_STEP", 1)):
        patched.setattr(module, name, value)


def _killed(folder: str, width: int, n_pieces: int, operation: str, k: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        often(patched)
        case = Case(Path(folder), width, n_pieces)
        reader = make_reader()
        base = open_file(reader, case.folder, case.record)
        (case.folder / "made").mkdir(exist_ok=True)
        with Fault(case.folder / "made", operation, "kill", k):
            case.fill(reader, base, "made/e.rows")


KILLS = [("write", 60, 0.95), ("fsync", 21, 0.95), ("rename", 14, 0.6), ("fsync", 45, 0.6)]  # of which call, the share


@pytest.mark.parametrize(("rows", "kill"), covering([(512, 0), (100, 3), (70_000, 1)], KILLS), ids=str)
def test_killed_in_the_middle_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int], kill: tuple[str, int, float]
) -> None:
    """At most ``share`` of the pass is scanned again; what is made is what an undisturbed one makes."""
    (width, n_pieces), (operation, k, share) = rows, kill
    case = Case(tmp_path, width, n_pieces)
    scanned: list[int] = []

    class Counted(PageStream):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            scanned.append(self.total_bytes)

    reader = make_reader()
    base = open_file(reader, tmp_path, case.record)
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_in_fork(_killed, str(tmp_path), width, n_pieces, operation, k)
    with monkeypatch.context() as patched:
        patched.setattr(rowfile, "PageStream", Counted)
        case.fill(reader, base, "whole.rows")
        made = case.fill(reader, base, "made/e.rows")
    assert scanned[0] > 16 << 20
    assert scanned[1] <= share * scanned[0]
    folder = tmp_path / "made"
    assert (folder / made.name).read_bytes()[PAGE_BYTES:] == (tmp_path / "whole.rows").read_bytes()[PAGE_BYTES:]
    file = open_file(reader, folder, made)
    source = ExtentSource(file, case.extents, len(case.pieces) + np.arange(len(case.batches)), 1 << 20)
    for ids in case.batches:
        out = np.zeros((len(ids), width), np.uint8)
        source.gather(np.arange(len(ids)), out, None)  # checked against its sums
        assert (out == case.rows[ids]).all()
    source.close()
    for each in (file, base):
        each.close()
    reader.close()
    assert sorted(path.name for path in folder.iterdir()) == ["e.rows", "e.rows.sums"]


def test_an_undisturbed_pass_checkpoints_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, 512, 0)
    taken: list[int] = []
    monkeypatch.setattr(ExtentWriter, "_checkpoint", lambda self, packer, episode: taken.append(1))
    monkeypatch.setattr(module, "_STEP", 1)
    reader = make_reader()
    base = open_file(reader, tmp_path, case.record)
    case.fill(reader, base, "a")
    assert not taken
    monkeypatch.setattr(module, "CHECKPOINT_S", 0.0)
    case.fill(reader, base, "b")
    assert taken
    base.close()
    reader.close()


@pytest.mark.parametrize("backend", ["io_uring", "pread"])
def test_the_kernel_counts_what_extents_take(tmp_path: Path, backend: str) -> None:
    """Bytes fetched from the device are those of the rows, and at most a page an extent more; our count is the kernel's."""
    case = Case(tmp_path, 400, 0)
    reader = make_reader(backend)
    base = open_file(reader, tmp_path, case.record)
    before = kernel_bytes()
    made = case.fill(reader, base, "e.rows")
    scanned = case.record.n_bytes
    assert scanned - PAGE_BYTES <= kernel_bytes() - before <= 1.02 * scanned  # one pass over the features, and their sums
    file = open_file(reader, tmp_path, made)
    if file.mode != "direct":
        pytest.fail(f"{tmp_path} is on a file system without direct reads, whose counts say nothing: give --basetemp another")
    before = kernel_bytes()
    source = ExtentSource(file, case.extents, np.arange(len(case.batches)), 1 << 20)  # reads at once
    for ids in case.batches:
        out = np.empty((len(ids), 400), np.uint8)
        source.gather(np.arange(len(ids)), out, None)
        assert (out == case.rows[ids]).all()
    counted, taken = source.stats.bytes_read, kernel_bytes() - before
    rows = sum(len(ids) for ids in case.batches) * 400
    assert rows <= counted <= rows + PAGE_BYTES * len(case.batches)
    assert abs(taken - counted) <= 0.002 * counted
    source.close()
    for each in (file, base):
        each.close()
    reader.close()


@pytest.mark.parametrize("policy", ["belady", "frequency"])
def test_a_loader_of_a_pack_reads_what_it_says(dataset: Path, pack: Path, tmp_path: Path, policy: str) -> None:
    """Missed rows, up to a page an extent, and the batches' blocks and plans, which the page cache may hold."""
    mine = copied(pack, tmp_path)
    options: dict[str, Any] = {"strategy": "packed", "pack": mine, "policy": policy, "features": "x"}
    with featstore.open(dataset, memory="64MB") as g:
        make_loader(g, cache=0.1, **options).close()
        blocks = sum(path.stat().st_size for path in (mine / "samples", *mine.glob("layout-*/plan"), *mine.glob("layout-*/fill")))
        with make_loader(g, **options) as loader:
            before = kernel_bytes()
            for _ in loader:
                pass
            taken, stats = kernel_bytes() - before, loader.stats()
    missed = stats["rows_loaded"] * 33 * 4
    assert missed <= stats["bytes_read"] <= missed + PAGE_BYTES * (stats["batches"] + 1)
    assert stats["bytes_read"] <= taken <= stats["bytes_read"] + blocks + PAGE_BYTES


def test_a_streamed_loader_counts_what_it_reads_to_pack(dataset: Path, tmp_path: Path) -> None:
    """The features once, as far as rows are missed, and each extent once; beside them only run files are read."""
    with featstore.open(dataset, memory="64MB") as g:
        g.cache_neighbors("1MB", policy="degree")  # all lists: sampling reads nothing
        x = g.features["x"]
        sampler = featstore.NeighborSampler(g, [4, 4], seed=1)
        seeds = g.node_data["train_idx"]
        options: dict[str, Any] = {"strategy": "streamed", "features": "x", "cache": 0.05, "length": 100}
        with make_loader(g, sampler, seeds, batch_size=32, run_dir=tmp_path, **options) as loader:
            before = kernel_bytes()
            used = [batch.input_ids.numpy() for batch in loader]
            taken, stats = kernel_bytes() - before, loader.stats()
        missed = stats["rows_loaded"] * x.row_bytes
        pages = pages_of(x.source.layout, np.unique(np.concatenate(used)))  # the cache is empty at first: each is missed once
        assert stats["hits"]["packed"] == stats["rows_loaded"] > len(x) // 2
    packing = stats["bytes_read"] - missed
    assert pages * PAGE_BYTES <= packing <= x.nbytes * 1.3 + PAGE_BYTES * (len(used) + 2)
    assert stats["bytes_read"] <= taken
