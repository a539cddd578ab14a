"""The chunked topology against NumPy: what its file holds, lists in any order and in sequence, and what is damaged in it."""

from __future__ import annotations

import itertools
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.budget import Budget
from featstore.errors import BudgetError, CorruptionError, FeatstoreError
from featstore.storage.format import file_seed, page_sum, sums_page
from featstore.testing.faults import flipped, random_flips, truncated
from featstore.topology.base import Topology
from featstore.topology.chunkformat import Directory, parse_chunk_bytes
from featstore.topology.chunks import ChunkedTopology
from featstore.topology.offsetpages import OffsetPages
from tests.support.array_graphs import ArrayFile, ArrayGraph, chunked
from tests.support.taking import take_back

Int64s = npt.NDArray[np.int64]

# Degrees of consecutive nodes: empty lists, many of them, lists that fill a chunk exactly, that span several.
DEGREES = st.lists(
    st.one_of(
        st.integers(0, 5).map(lambda d: [d]),
        st.integers(1, 2500).map(lambda n: [0] * n),
        st.sampled_from([500, 503, 504, 1005, 1006, 1007, 1008, 2000, 5000]).map(lambda d: [d]),
    ),
    max_size=12,
).map(lambda runs: [degree for run in runs for degree in run])


def graph_with(degrees: list[int], dtype: Any, seed: int = 0) -> tuple[Int64s, npt.NDArray[Any]]:
    indptr = np.cumsum([0, *degrees]).astype(np.int64)
    n = max(1, len(degrees))
    ids = np.random.default_rng(seed).integers(0, n, indptr[-1])
    order = np.lexsort((ids, np.repeat(np.arange(len(degrees)), degrees)))
    return indptr, ids[order].astype(dtype)


def lists_of(blocks: Any) -> dict[int, list[int]]:
    """The lists that blocks hold, by node, checking what a block promises."""
    found: dict[int, list[int]] = {}
    last = 0
    for block in blocks:
        assert len(block.ids)
        assert block.first_edge >= last
        last = block.first_edge + len(block.ids)
        assert block.offsets[0] <= block.first_edge
        assert last <= block.offsets[-1]
        for k in range(len(block.offsets) - 1):
            low, high = max(block.offsets[k], block.first_edge), min(block.offsets[k + 1], last)
            if low < high:
                found.setdefault(block.first_node + k, []).extend(
                    block.ids[low - block.first_edge : high - block.first_edge].tolist()
                )
    return found


def asked_of(topology: Topology, nodes: Int64s, block_bytes: int = 1 << 20) -> dict[int, list[int]]:
    """The lists of ``nodes`` as they come, in pieces put together."""
    found: dict[int, list[int]] = {}
    before = -1
    for lists in topology.lists(nodes, block_bytes):
        assert (np.diff(lists.where) > 0).all()
        assert lists.where[0] >= before
        before = int(lists.where[-1])
        assert lists.ids.nbytes <= max(block_bytes // 2, 4096)
        for k, at, degree in zip(lists.where.tolist(), lists.at.tolist(), lists.degree.tolist(), strict=True):
            found.setdefault(int(nodes[k]), []).extend(lists.ids[max(0, at) : max(0, at + degree)].tolist())
    return found


@given(
    degrees=DEGREES,
    dtype=st.sampled_from([np.int32, np.int64]),
    block_bytes=st.sampled_from([1, 8192, 1 << 15, 1 << 20]),
    data=st.data(),
)
def test_lists_of_either_form_equal_numpy(degrees: list[int], dtype: Any, block_bytes: int, data: st.DataObject) -> None:
    """Every third node, some, one, none: short lists many at once, long ones in pieces; ids of others are not given."""
    indptr, ids = graph_with(degrees, dtype)
    n = len(degrees)
    some = data.draw(st.lists(st.integers(0, n - 1), unique=True).map(sorted)) if n else []
    for topology in (ArrayGraph(indptr, ids).topology, chunked(indptr, ids, 4096, Budget(1 << 24))):
        for nodes in (np.arange(0, n, 3), np.array(some, np.int64), np.arange(n)[-1:], np.arange(0)):
            had = asked_of(topology, nodes, block_bytes)
            assert all(had.get(v, []) == ids[indptr[v] : indptr[v + 1]].tolist() for v in nodes.tolist())
            assert set(had) <= set(nodes.tolist())


def test_scattered_lists_come_many_at_once() -> None:
    """Not one by one, which would take longer than reading them."""
    indptr, ids = graph_with([1000] * 4000, np.int32)
    graph = ArrayGraph(indptr, ids)
    nodes = np.arange(0, 4000, 40)
    assert len(list(graph.topology.lists(nodes, 1 << 20))) <= 1 + 2 * len(nodes) * 4096 * 2 // (1 << 19)
    assert len(graph.file.streams) == 1
    assert len(graph.file.streams[0]) <= 2 * len(nodes)


@pytest.mark.parametrize("chunk_bytes", [1 << 14, 1 << 17])
@pytest.mark.parametrize("block_bytes", [1 << 13, 1 << 20])
def test_nodes_in_ranges_read_little_more_than_at_once(chunk_bytes: int, block_bytes: int) -> None:
    """A chunk that two ranges share is not read whole by both; also where a list goes on from one chunk to the next."""
    indptr, ids = graph_with([30] * 5000 + [20_000] + [0] * 300 + [7] * 9000 + [9000, 3] * 8, np.int32)
    topology, n = chunked(indptr, ids, chunk_bytes, Budget(1 << 24)), len(indptr) - 1
    file: Any = topology.chunks
    for n_ranges in (1, 7, 40):
        file.n_read = 0
        ends = np.linspace(0, n, n_ranges + 1).astype(int)
        found: dict[int, list[int]] = {}
        for first, stop in itertools.pairwise(ends):
            found |= asked_of(topology, np.arange(first, stop), block_bytes)
        assert all(found.get(v, []) == ids[indptr[v] : indptr[v + 1]].tolist() for v in range(n))
        assert file.n_read <= file.n_rows + 3 * n_ranges * 1024 + 4 * 64 * topology.directory.n_chunks


@pytest.mark.parametrize("nodes", [[5, 900, 2500], [2500]])
def test_an_id_that_is_no_node_is_named_where_it_lies(nodes: list[int]) -> None:
    indptr, ids = graph_with([700] * 3000, np.int32)
    bad = int(indptr[2500]) + 3
    ids[bad] = 3000
    with pytest.raises(CorruptionError, match=f"edge {bad} leads to node 3000 of 3000"):
        asked_of(ArrayGraph(indptr, ids).topology, np.array(nodes))


@pytest.mark.usefixtures("small_pieces")
@given(
    degrees=DEGREES,
    dtype=st.sampled_from([np.int32, np.int64]),
    chunk_bytes=st.sampled_from([4096, 8192, 1 << 16]),
    step=st.sampled_from([1 << 20, 997, 1008]),
    data=st.data(),
)
def test_all_that_is_asked_equals_numpy(degrees: list[int], dtype: Any, chunk_bytes: int, step: int, data: st.DataObject) -> None:
    indptr, ids = graph_with(degrees, dtype)
    n = len(degrees)
    topology = chunked(indptr, ids, chunk_bytes, Budget(1 << 24), step)
    assert topology.id_dtype == dtype
    nodes = np.random.default_rng(1).permutation(n)
    starts, found = topology.offsets(nodes)
    assert np.array_equal(starts, indptr[nodes])
    assert np.array_equal(found, np.diff(indptr)[nodes])
    assert np.array_equal(topology.degrees(), np.diff(indptr))
    assert topology.largest_degree == max(degrees, default=0)
    for n_nodes in (1 + n // 3, 4096):
        pieces = list(topology.offset_pieces(n_nodes))
        assert [first for first, _ in pieces] == list(range(0, n, n_nodes))
        for first, offsets in pieces:
            assert np.array_equal(offsets, indptr[first : first + n_nodes + 1])
    positions = np.random.default_rng(2).permutation(len(ids))[:3000]
    before, out = positions.copy(), np.empty(len(positions), dtype)
    topology.read_edges(positions, out)
    assert np.array_equal(out, ids[before])
    assert np.array_equal(positions, before)
    block_bytes = data.draw(st.sampled_from([1, 8192, 16384, 1 << 17, 1 << 23]))
    scanned = [(first, block.copy()) for first, block in topology.scan(block_bytes)]
    assert np.array_equal(np.concatenate([block for _, block in scanned] or [ids]), ids)
    assert all(np.array_equal(ids[first : first + len(block)], block) for first, block in scanned)
    want = {v: ids[indptr[v] : indptr[v + 1]].tolist() for v in range(n) if degrees[v]}
    assert lists_of(topology.blocks(block_bytes)) == want
    # Every third node, the last one, one alone, none: all of its edges, in as few chunks as hold them.
    for chosen in (np.arange(0, n, 3), np.arange(n)[-1:], np.arange(n)[n // 2 : n // 2 + 1], np.arange(0)):
        had = asked_of(topology, chosen, block_bytes)
        assert all(had.get(v, []) == want.get(v, []) for v in chosen.tolist())


def test_chunks_without_a_node_of_them_are_not_read() -> None:
    indptr, ids = graph_with([10] * 3000, np.int32)
    topology = chunked(indptr, ids, 4096, Budget(1 << 24))
    file: Any = topology.chunks
    words = 1024
    assert topology.directory.n_chunks > 30
    for nodes, n_chunks in (([0], 1), ([0, 1], 1), ([0, 2999], 2), ([], 0), ([1500], 1)):
        file.n_read = 0
        pieces = list(topology.lists(np.array(nodes, np.int64)))
        assert len(pieces) <= n_chunks + 1  # and one more, where the list goes on there
        assert file.n_read <= (n_chunks + 1) * words
    long, ids = graph_with([3, 5000, 2, 0, 0, 9], np.int32)
    topology = chunked(long, ids, 4096, Budget(1 << 24))
    assert asked_of(topology, np.array([1]))[1] == ids[3:5003].tolist()
    assert set(asked_of(topology, np.array([5]))) == {5}  # where node 1's began is not known: its chunk was not read


def test_threads_share_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that drive out each other's pages, and a ledger that takes them all, change no answer."""
    monkeypatch.setattr("featstore.topology.offsetpages._LEAST_PAGES", 3)
    indptr, ids = graph_with([1] * 60_000, np.int32)
    budget = Budget(64 * 4096 * 6)
    topology = chunked(indptr, ids, 16384, budget)

    def look(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            nodes = rng.integers(0, 60_000, int(rng.integers(1, 9)))
            assert np.array_equal(topology.offsets(nodes)[0], indptr[nodes])

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(look, seed) for seed in range(8)]
        with take_back(budget, 1):  # whose cache of pages grows meanwhile
            assert budget.on_loan == 0
        for each in running:
            each.result()


def test_sizes_of_chunks() -> None:
    assert parse_chunk_bytes("4KiB") == 4096
    assert parse_chunk_bytes("512MiB") == 512 << 20
    for wrong in (0, 1, 4095, 4097, "10KB", "2GiB", "6000"):
        with pytest.raises(ValueError, match="multiple of 4096"):
            parse_chunk_bytes(wrong)
    with pytest.raises(TypeError, match="chunk_bytes is an int or a string"):
        parse_chunk_bytes(4096.0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("at", [1, 100, 199])
def test_edges_out_of_range_are_named(at: int) -> None:
    """Whichever piece they are in; the positions are left as they were given."""
    indptr, ids = graph_with([2, 3], np.int32)
    topology = chunked(indptr, ids, 4096, Budget(1 << 20))
    for bad in (5, -1, 2**62):
        positions = np.arange(200) % 5
        positions[at] = bad
        before = positions.copy()
        with pytest.raises(IndexError, match=f"edge {bad} is out of range for 5"):
            topology.read_edges(positions, np.empty(200, np.int32))
        assert np.array_equal(positions, before)


# -- damage ----------------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_a_hostile_directory_is_refused(data: st.DataObject) -> None:
    """Any entry changed to anything: an error with path and offset, or a directory that keeps all reads inside the file."""
    indptr, ids = graph_with([3, 1500, 0, 0, 700, 2, 1100], np.int32)
    good = chunked(indptr, ids, 4096, Budget(1 << 20)).directory
    rows = np.stack([good.first_node, good.first_edge, good.first_start], axis=1)
    n_words = int(good.ids_at[-1] + good.n_edges[-1])
    n_words = -(-n_words // 1024) * 1024
    Directory(rows, 7, len(ids), 4, 4096, n_words, "d")
    row, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 2))
    rows[row, column] = data.draw(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-5, 4000)))
    try:
        found = Directory(rows, 7, len(ids), 4, 4096, n_words, "d")
    except CorruptionError as error:
        assert (error.path, error.offset) == ("d", 4096)
        return
    assert (found.n_nodes >= 0).all()
    assert (found.n_edges >= 0).all()
    assert int((found.ids_at + found.n_edges).max()) <= n_words


@given(data=st.data())
def test_hostile_words_of_chunks_never_crash(data: st.DataObject) -> None:
    """Without checksums: an error that names the page, or ids and offsets that are in range; never a hang or a crash."""
    indptr, ids = graph_with([3, 1500, 0, 0, 700, 2, 1100, *[1] * 300], np.int32)
    topology = chunked(indptr, ids, 4096, Budget(1 << 20))
    file: Any = topology.chunks
    words = file.rows.view(np.int32)
    at = data.draw(st.one_of(st.integers(0, len(words) - 1), st.integers(0, 40)))
    words[at] = data.draw(st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2000)))
    n = len(indptr) - 1

    def look() -> None:
        starts, degrees = topology.offsets(np.arange(n))
        assert (starts >= 0).all()
        assert (degrees >= 0).all()
        assert (starts + degrees <= len(ids)).all()

    def walk(block_bytes: int) -> None:
        for block in topology.blocks(block_bytes):
            assert (np.diff(block.offsets) >= 0).all()
            assert block.ids.min() >= 0
            assert block.ids.max() < n

    calls: list[Callable[[], Any]] = [look, lambda: walk(1 << 20), lambda: walk(4096), topology.degrees]
    for call in calls:
        try:
            call()
        except CorruptionError as error:
            assert error.path == "indices.bin"
            assert error.offset is not None
            assert error.offset % 4096 == 0


@pytest.fixture
def copy(small: SimpleNamespace, tmp_path: Path) -> Path:
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", small.indptr, small.indices, progress=False, topology="chunked", chunk_bytes=4096, memory="16MiB"
    ).close()
    return tmp_path / "g"


def read_all(root: Path, verify: str = "always") -> Any:
    with featstore.open(root, memory="16MiB", backend="pread", verify=verify, threads=1) as g:
        t = g.topology
        return *(a.tolist() for a in t.offsets(np.arange(g.num_nodes))), *lists_of(t.blocks()).items()


@pytest.mark.parametrize("name", ["edge.chunks.1.rows", "edge.chunk_directory.1.rows", "edge.chunks.1.rows.sums"])
def test_flipped_bits_and_short_files_are_found(copy: Path, name: str) -> None:
    expected = read_all(copy)
    for _ in random_flips(copy / name, 40, seed=1):
        try:
            assert read_all(copy) == expected  # padding, and entries of pages that are not there
        except FeatstoreError as error:
            assert name.removesuffix(".sums") in str(error)
        with pytest.raises(CorruptionError), featstore.open(copy, memory="16MiB", backend="pread") as g:
            g.verify(progress=False)
    n_bytes = (copy / name).stat().st_size
    for size in {0, 100, 4096, 8192, n_bytes - 4096, n_bytes + 4096} - {n_bytes}:
        with truncated(copy / name, size), pytest.raises(CorruptionError) as caught:
            featstore.open(copy, memory="16MiB", backend="pread")
        assert caught.value.path == str(copy / name)
    assert read_all(copy) == expected


@pytest.mark.parametrize("memory", ["16MiB", "1GiB"])
def test_pages_of_offsets_are_verified(copy: Path, memory: str) -> None:
    """A begin that is plausible, and wrong: nothing but the checksum tells."""
    path = copy / "edge.chunks.1.rows"
    with featstore.open(copy, memory=memory) as g:
        expected = g.topology.offsets(np.arange(50))[0].tolist()
    node = next(k for k in range(2, 50) if expected[k] % 2 == 0 and expected[k] + 1 < expected[k + 1])
    with flipped(path, 4096 + 64 + 4 * node, 0):
        with featstore.open(copy, memory=memory) as g, pytest.raises(CorruptionError, match="checksum") as caught:
            g.topology.offsets(np.arange(50))
        assert (caught.value.path, caught.value.offset) == (str(path), 4096)
        with featstore.open(copy, memory=memory, verify="off") as g:
            assert g.topology.offsets(np.arange(50))[0].tolist() != expected


def rewrite(copy: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """Change a file and its checksums, as a writer that errs would: nothing but the structure tells."""
    path = copy / name
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    header = data[:4096]
    kind, file_id = bytes(header[16:48]).rstrip(b"\0").decode(), bytes(header[48:64])
    seed = file_seed(kind, file_id, struct.unpack_from("<Q", header, 64)[0])
    sums = [page_sum(bytes(data[at : at + 4096]), seed) for at in range(0, len(data), 4096)]
    pages = [sums_page(np.array(sums[k : k + 511], np.uint64), k // 511, seed) for k in range(0, len(sums), 511)]
    (copy / f"{name}.sums").write_bytes(b"".join(pages))


def swap_chunks(data: bytearray) -> None:
    data[4096:8192], data[8192:12288] = data[8192:12288], data[4096:8192]


def last_id(data: bytearray) -> None:
    at = 4096 + 4096 + 64 + 4 * struct.unpack_from("<Q", data, 8192 + 24)[0]
    struct.pack_into("<i", data, at, 10**6)


def later_begin(data: bytearray) -> None:
    struct.pack_into("<i", data, 4096 + 64 + 4, 900)


def first_of_next(data: bytearray) -> None:
    struct.pack_into("<q", data, 4096 + 24, 1)


@pytest.mark.parametrize(
    ("name", "change", "message", "offset"),
    [
        ("edge.chunks.1.rows", swap_chunks, "another chunk is in the place of chunk 0|does not ascend", 4096),
        ("edge.chunks.1.rows", last_id, "not a node|leads to node 1000000", 8192),
        ("edge.chunks.1.rows", later_begin, "does not ascend|cannot begin", 4096),
        ("edge.chunk_directory.1.rows", first_of_next, "entry of chunk", 4096),
    ],
)
def test_wrong_structure_with_right_sums_is_found(copy: Path, name: str, change: Any, message: str, offset: int) -> None:
    rewrite(copy, name, change)
    calls: list[Callable[[featstore.OutOfCoreGraph], Any]] = [
        lambda g: g.verify(progress=False),
        lambda g: list(g.topology.blocks()),
        lambda g: list(g.topology.blocks(4096)),
        lambda g: g.cache_neighbors("1MiB"),
    ]
    for call in calls:
        with featstore.open(copy, memory="16MiB") as g, pytest.raises(CorruptionError, match=message) as caught:
            call(g)
        assert (caught.value.path, caught.value.offset) == (str(copy / name), offset)


def test_an_older_copy_is_found(copy: Path, small: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copy(copy / "edge.chunks.1.rows", tmp_path / "old")
    featstore.convert(copy, "chunked", chunk_bytes=8192, memory="64MiB", progress=False)
    featstore.convert(copy, "chunked", chunk_bytes=4096, memory="64MiB", progress=False)
    shutil.copy(tmp_path / "old", copy / "edge.chunks.3.rows")
    with pytest.raises(CorruptionError, match="older copy") as caught:
        featstore.open(copy, memory="16MiB")
    assert caught.value.path == str(copy / "edge.chunks.3.rows")


def test_making_chunks_needs_room_for_one(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"chunks of 512.00 MiB needs more memory") as caught:
        featstore.OutOfCoreGraph.create(
            tmp_path / "g", [0, 0], [], topology="chunked", chunk_bytes="512MiB", memory="100MiB", progress=False
        )
    assert caught.value.needed == (512 << 20) + (8 << 20)
    with pytest.raises(ValueError, match="is of topology='chunked'"):
        featstore.OutOfCoreGraph.create(tmp_path / "g", [0, 0], [], progress=False, chunk_bytes=4096)
    assert not (tmp_path / "g").exists()


def test_the_reads_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is longer than a chunk, and its degree, are known from the chunk in which it begins."""
    indptr, ids = graph_with([1, 20_000, 1], np.int64)
    topology = chunked(indptr, ids, 4096, Budget(1 << 20))
    assert isinstance(topology, ChunkedTopology)
    assert isinstance(topology.chunks, ArrayFile)
    before = topology.chunks.n_gathers
    assert [a.tolist() for a in topology.offsets(np.array([1]))] == [[1], [20_000]]
    assert topology.chunks.n_gathers == before + 1
    assert OffsetPages.held_bytes(3, topology.directory.n_chunks, 8, 1 << 20) >= 4 * 2
