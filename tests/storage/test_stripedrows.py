"""Chunks read from several files: the same batches as from one, side by side, and each file at its rate."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.errors import CorruptionError, FormatError
from featstore.gather.fileturns import FileTurns
from featstore.sampling import window
from featstore.sampling.window import EpochWindow
from featstore.storage import stripedrows
from featstore.storage.rowfile import RowFile
from featstore.storage.stripedrows import StripedRows
from featstore.testing.faults import flipped
from featstore.topology.chunks import ChunkedTopology
from tests.graph.test_convert import N, make, opened
from tests.sampling.test_epochwide import batches_of, window_of
from tests.sampling.test_neighbor import same
from tests.storage.test_stripes import chunk_files
from tests.support.loaders import make_loader
from tests.support.refusing import refuses


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One graph with its chunks in 1, 2, 3 and 4 files; a test must not change them."""
    root = tmp_path_factory.mktemp("forms")
    drives = [root / f"drive-{k}" for k in range(3)]
    paths = []
    for each in drives:
        each.mkdir()
    for k in range(4):
        paths.append(root / f"files-{k + 1}")
        make(paths[-1], topology="chunked", chunk_bytes=4096, stripes=drives[:k]).close()
    return SimpleNamespace(paths=paths, one=paths[0], three=paths[2])


@pytest.fixture
def many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch-wide sampler takes 256 nodes at once, so that several ranges lie in each file."""
    monkeypatch.setattr(window, "LEAST_BITS", 8)
    monkeypatch.setattr(window, "MOST_BITS", 8)


def chunks_of(g: featstore.OutOfCoreGraph) -> Any:
    assert isinstance(g.topology, ChunkedTopology)
    return g.topology.chunks


@pytest.fixture
def both(forms: SimpleNamespace) -> Iterator[list[tuple[Any, Any]]]:
    with contextlib.ExitStack() as stack:
        graphs = [stack.enter_context(opened(path)) for path in forms.paths]
        yield [(chunks_of(graphs[0]), chunks_of(g)) for g in graphs[1:]]


def test_rows_are_those_of_the_one_file(both: list[tuple[Any, Any]]) -> None:
    @given(data=st.data(), number=st.integers(0, 2), piece=st.sampled_from([1, 7, 1 << 16]), room=st.sampled_from([0, 20, 999]))
    def check(data: st.DataObject, number: int, piece: int, room: int) -> None:
        same_rows(*both[number], data, piece, room)

    check()


def same_rows(one: Any, several: Any, data: st.DataObject, piece: int, room: int) -> None:
    assert isinstance(one, RowFile)
    assert isinstance(several, StripedRows)
    n = one.n_rows
    assert (several.n_rows, several.row_bytes) == (n, one.row_bytes)
    edges = sorted({0, n - 1, *(int(row) + d for row in several.first_rows[1:] for d in (-1, 0, 1))})
    row = st.one_of(st.sampled_from(edges), st.integers(0, n - 1))
    first = data.draw(row)
    count = data.draw(st.one_of(st.integers(0, min(50, n - first)), st.just(n - first)))
    assert np.array_equal(several.read(first, count), one.read(first, count))
    rows = np.array(data.draw(st.lists(row, max_size=200)), np.int64)
    found, expected = (np.full((len(rows), one.row_bytes), 99, np.uint8) for _ in range(2))
    one.gather(rows, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stripedrows, "_LEAST_ROWS", piece)
        patch.setattr(several, "_budget", Budget(32 * room))
        several.gather(rows, found)
    assert np.array_equal(found, expected)
    n_pages = n * one.row_bytes // 4096
    numbers = np.array(data.draw(st.lists(st.integers(1, n_pages), min_size=1, max_size=40, unique=True).map(sorted)), np.int64)
    pages = [np.empty((len(numbers), 4096), np.uint8) for _ in range(2)]
    for file, out in zip((one, several), pages, strict=True):
        file.read_pages(numbers, out)
    assert np.array_equal(*pages)
    file, at = several.place(first)
    assert np.array_equal(file.read(at, 1), one.read(first, 1))
    assert several.files[int(several.file_of(np.array([first]))[0])] is file


def test_rows_out_of_range_and_files_that_do_not_fit(both: list[tuple[Any, Any]]) -> None:
    for one, several in both:
        for first, n in ((several.n_rows, 1), (several.n_rows - 1, 2), (0, several.n_rows + 1)):
            refuses(IndexError, "", lambda: several.read(first, n))
        out = np.empty((2, several.row_bytes), np.uint8)
        for row in (-1, several.n_rows):
            refuses(IndexError, "", lambda: several.gather(np.array([0, row]), out))
        refuses(FormatError, "cannot hold row", lambda: StripedRows(several.files, 3 * one.n_rows, Budget(1 << 20)))


def test_pages_are_read_once_however_many_rows_are_asked_for(forms: SimpleNamespace) -> None:
    """Pages are kept if there is memory for them, and read again if there is none."""
    with featstore.open(forms.one, memory="64MiB") as a, featstore.open(forms.three, memory="64MiB") as b:
        one, several = chunks_of(a), chunks_of(b)
        rows = np.random.default_rng(0).integers(0, one.n_rows, 200_000)
        found = [np.empty((len(rows), 4), np.uint8) for _ in range(2)]
        for chunks, out in zip((one, several), found, strict=True):
            chunks.gather(rows, out)
        assert np.array_equal(*found)
        read = sum(file.stats.bytes_read for file in several.files)
        n_pages = sum(file.n_bytes // 4096 for file in several.files)
        assert read <= n_pages * 4096 < one.n_bytes + 3 * 4096
        with b.budget.reserve("all of it", b.budget.available):
            several.gather(rows, found[0])
            assert b.budget.peak <= b.budget.total
        assert np.array_equal(*found)
        assert sum(file.stats.bytes_read for file in several.files) > 3 * read
        assert b.memory_report().get("all of it", 0) == 0


def test_a_damaged_file_fails_a_gather_when_no_other_is_read(forms: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file and the page; it comes when the reads of the other files are over."""
    path, under_way = chunk_files(forms.three)[1], []
    real = RowFile.gather

    def gather(self: RowFile, *arguments: Any) -> Any:
        under_way.append(self.path)
        try:
            return real(self, *arguments)
        finally:
            under_way.remove(self.path)

    monkeypatch.setattr(RowFile, "gather", gather)
    for number in range(3):
        path = chunk_files(forms.three)[number]
        with flipped(path, 5000), opened(forms.three) as g:
            chunks = chunks_of(g)
            rows = np.concatenate([int(first) + np.arange(600) for first in chunks.first_rows])
            caught = refuses(CorruptionError, "", lambda: chunks.gather(rows, np.empty((len(rows), 4), np.uint8)))
            assert (caught.value.path, caught.value.offset) == (str(path), 4096)
            assert not under_way


def test_each_file_is_read_for_its_own_rows_alone(forms: SimpleNamespace) -> None:
    """By the kernel's count, and by what the files count."""

    def kernel() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split(":")[1]) for line in lines if line.startswith("rchar"))

    def read_of(files: list[RowFile]) -> list[int]:
        return [file.stats.bytes_read for file in files]

    with featstore.open(forms.three, memory="64MiB", backend="pread", verify="off") as g:
        chunks = chunks_of(g)
        sizes = [file.n_rows * chunks.row_bytes for file in chunks.files]
        list(g.topology.blocks())
        before, counts = kernel(), read_of(chunks.files)
        list(g.topology.blocks())
        read = kernel() - before
        assert [now - count for now, count in zip(read_of(chunks.files), counts, strict=True)] == sizes
        assert sum(sizes) <= read <= sum(sizes) + 4096  # and what is read of /proc
        # Of one file's nodes no other file is read, but where a list goes on in the next one.
        for number in range(3):
            nodes = np.flatnonzero(g.topology.files_of(np.arange(N)) == number)[:-1]
            counts = read_of(chunks.files)
            sum(1 for _ in g.topology.lists(nodes))
            grown = [now > count for now, count in zip(read_of(chunks.files), counts, strict=True)]
            assert grown == [number == k for k in range(3)]


@pytest.mark.parametrize("memory", ["9MiB", "64MiB"])
@pytest.mark.parametrize("backend", ["pread", "auto"])
def test_samplers_draw_the_same(forms: SimpleNamespace, memory: str, backend: str) -> None:
    """With pages of offsets that come and go, and all of them there."""
    expected: list[Any] = []
    for path in forms.paths:
        with featstore.open(path, memory=memory, backend=backend, threads=2) as g:
            found = [
                sampler.sample(torch.arange(index * 50, index * 50 + 50), 1, index)
                for sampler in (
                    featstore.NeighborSampler(g, [5, 3, -1], seed=3),
                    featstore.NeighborSampler(g, [4, 0, 2], replace=True, redraw=False),
                    featstore.LaborSampler(g, [5, 5], importance_sampling=1),
                    featstore.LayerSampler(g, [30, 40], seed=2),
                )
                for index in range(4)
            ]
            expected = expected or found
            assert all(same(one, two) for one, two in zip(expected, found, strict=True))
            assert g.budget.peak <= g.budget.total


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.usefixtures("many_ranges")
def test_epochs_are_the_same(forms: SimpleNamespace, threads: int) -> None:
    expected: list[Any] = []
    for path in forms.paths:
        with featstore.open(path, memory="64MiB", threads=threads) as g:
            sampler = featstore.EpochSampler(g, [4, 3], seed=3, window=100)
            with featstore.Loader(g, sampler, g.node_data["train_idx"], 90, seed=1, threads=threads) as loader:
                found = [each.input_ids.clone() for _ in range(2) for each in sorted(loader, key=lambda each: each.index)]
        expected = expected or found
        assert len(found) == len(expected)
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_what_is_packed_ahead_is_the_same(forms: SimpleNamespace, tmp_path: Path) -> None:
    """Within the same budget, of which each file that is read takes a queue."""
    rows = []
    for path in (forms.one, forms.three):
        with opened(path, "24MiB") as g:
            options: dict[str, Any] = {"strategy": "streamed", "features": "x", "run_dir": tmp_path}
            with make_loader(g, featstore.NeighborSampler(g, [4, 4]), seeds=torch.arange(0, N, 3), **options) as loader:
                rows.append([(batch.index, batch.input_ids.clone(), batch.x.clone()) for batch in loader])
            assert g.budget.peak <= g.budget.total
    for one, two in zip(*rows, strict=True):
        assert one[0] == two[0]
        assert all(torch.equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))


@given(
    file_of=st.lists(st.integers(0, 4), max_size=60),
    n_workers=st.integers(1, 6),
    order=st.lists(st.integers(0, 5), min_size=200, max_size=200),
)
def test_turns_keep_every_file_busy(file_of: list[int], n_workers: int, order: list[int]) -> None:
    """Each piece once, in order within a file; no file has two workers more than another that has pieces left."""
    turns = FileTurns(np.array(file_of, np.int64))
    at: dict[int, int] = {}
    taken: list[int] = []
    for worker in (each % n_workers for each in order):
        number = turns.take(worker)
        at.pop(worker, None)
        left = Counter(file_of) - Counter(file_of[each] for each in taken)
        if number is None:
            assert not left
            continue
        busy = Counter(at.values())
        assert busy[file_of[number]] == min(busy[file] for file in left)
        assert left[file_of[number]] == max(left[file] for file in left if busy[file] == busy[file_of[number]])
        at[worker] = file_of[number]
        taken.append(number)
    if len(file_of) < 100:
        taken += list(iter(lambda: turns.take(0), None))
    assert sorted(taken) == list(range(len(file_of)))
    for file in set(file_of):
        mine = [number for number in taken if file_of[number] == file]
        assert mine == sorted(mine)


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.usefixtures("many_ranges")
def test_a_slow_file_holds_up_no_other(forms, tmp_path, monkeypatch, slow) -> None:
    """A read of one file, for a range of its own, ends only when all ranges of the others are done in that hop."""
    path = str(chunk_files(forms.three)[slow])
    lock, all_others = threading.Lock(), threading.Event()
    left: dict[int, int] = {}
    n_waited, late = 0, []
    read, draw = RowFile.read, EpochWindow._draw

    def slow_read(self: RowFile, row: int, *arguments: Any) -> Any:
        nonlocal n_waited
        if self.path == path and threading.current_thread().name.startswith(("featstore-draw", "featstore-read")):
            topology = g.topology
            chunk = (int(topology.chunks.first_rows[slow]) + row) // topology.directory.chunk_words
            first = topology.directory.first_node[chunk] >> 8 << 8  # of the range
            if int(topology.files_of(np.array([first]))[0]) == slow:
                n_waited += 1
                if not all_others.wait(60):
                    late.append(dict(left))
        return read(self, row, *arguments)

    def counted(self: EpochWindow, workers: Any, hop: int, groups: Any, worker: int, number: int) -> None:
        node = np.array([groups[number][0] << self._shape.shift])
        files = self._topology.files_of(np.array([group[0] for group in groups]) << self._shape.shift)
        with lock:
            if hop not in left:
                left[hop] = int((files != slow).sum())
                assert left[hop] > 4
                assert int((files == slow).sum()) > 1
                all_others.clear()
        draw(self, workers, hop, groups, worker, number)
        if int(self._topology.files_of(node)[0]) != slow:
            with lock:
                left[hop] -= 1
                if not left[hop]:
                    all_others.set()

    batches = batches_of(np.arange(N), 200)
    with featstore.open(forms.one, memory="64MiB", threads=2) as g:
        alone = featstore.NeighborSampler(g, [3, 2], seed=3)
        expected = [alone.sample(torch.from_numpy(seeds), 0, k) for k, seeds in enumerate(batches)]
    monkeypatch.setattr(RowFile, "read", slow_read)
    monkeypatch.setattr(EpochWindow, "_draw", counted)
    with featstore.open(forms.three, memory="64MiB", threads=2) as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=3)
        with window_of(sampler, g, batches, tmp_path, n_workers=2) as drawn:
            assert drawn._shape.shift == 8
            drawn.draw()
            assert all(same(drawn.sample(k), batch) for k, batch in enumerate(expected))
    assert n_waited >= 2
    assert left == {0: 0, 1: 0}
    assert not late, late
