"""Parts kept in the dataset: one commit, at once and for others; stale ones; kills, faults and damage."""

from __future__ import annotations

import errno
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore._core.partition import list_starts, move_lists
from featstore.errors import BusyError, ClosedError, CommittedError, CorruptionError, FormatError, StaleError
from featstore.graph.savedparts import read_parts
from featstore.storage.update import Update
from featstore.testing.faults import OPERATIONS, forked, sweep
from tests.partitioning.test_partitioning import Arrays, arrays, graphs, make
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses

pytestmark = pytest.mark.usefixtures("_program_server", "small_pieces")

LISTS = ("part_nodes", "part_offsets", "part_indices")

N = 600
STEMS = ("parts.", "train_nodes.", "cross_out_degree.", "part_nodes.", "part_offsets.", "part_indices.")


@pytest.fixture
def g(tmp_path: Path) -> Any:
    with make(tmp_path / "g") as graph:
        yield graph


def files_of(g: featstore.OutOfCoreGraph) -> set[str]:
    return {path.name for path in Path(g.path).iterdir() if path.name.startswith(STEMS)}


def test_parts_show_themselves(g: Any) -> None:
    featstore.partition(g, 9, train_idx=np.arange(0, N, 3), name="mine")
    kept = g.parts()["mine"]
    assert repr(kept).startswith("KeptParts(name='mine', n_parts=9, n_train=200, method='fennel', options={'passes': 3, ")
    page = kept._repr_html_()
    assert page.startswith("<div><p><code>KeptParts(&#x27;mine&#x27;)</code></p><table>")
    for name, shown in (("n_parts", "9"), ("method", "fennel"), ("options", "passes: 3, gamma: 1.5"), ("hops", "none")):
        assert re.search(f"<tr><td[^>]*>{name}</td><td[^>]*>{shown}", page)
    assert "_read" not in repr(kept) + page


def test_kept_at_once_and_for_others(g: Any) -> None:
    train = np.arange(0, N, 3)
    first = featstore.partition(g, 9, train_idx=train)
    second = featstore.partition(g, 4, "random", seed=5, name="mine")
    unkept = featstore.partition(g, 5, "random", keep=False)
    assert len(unkept) == N
    with featstore.open(g.path) as other:
        for graph in (g, other):
            kept = graph.parts()
            assert list(kept) == ["fennel-9", "mine"]  # the latest last
            assert (kept["fennel-9"].n_parts, kept["fennel-9"].n_train, kept["fennel-9"].method) == (9, 200, "fennel")
            assert kept["fennel-9"].options == {"passes": 3, "gamma": 1.5, "start": None, "levels": None, "seed": 0}
            assert kept["mine"].options == {"seed": 5}
            assert not kept["mine"].is_stale
            assert torch.equal(kept["fennel-9"].load(), first)
            assert torch.equal(kept["mine"].load(), second)
            assert kept["mine"].train_nodes().tolist() == []
            found = kept["fennel-9"].train_nodes().tolist()
            assert found == sorted(train.tolist(), key=lambda v: (int(first[v]), v))
    assert featstore.open(g.path).verify(progress=False)["files"] == len(files_of(g)) // 2 + 3


def test_a_name_is_replaced_and_others_stay(g: Any) -> None:
    featstore.partition(g, 9, name="a", train_idx=[1])
    before, old = files_of(g), g.parts()["a"]
    featstore.partition(g, 9, "ranges", name="b")
    again = featstore.partition(g, 5, "random", name="a")
    assert list(g.parts()) == ["b", "a"]
    assert torch.equal(g.parts()["a"].load(), again)
    refuses(StaleError, "replaced since they were listed", lambda: old.load())
    g.close()
    with featstore.open(g.path) as other, Update(g.path):  # which sweeps nothing that is read
        assert torch.equal(other.parts()["a"].load(), again)
    with Update(g.path):
        pass
    assert not before & files_of(g)


def test_another_handle_sees_what_was_kept_when_it_opens_again(g: Any) -> None:
    with featstore.open(g.path) as other:
        featstore.partition(g, 3)
        assert other.parts() == {}
        featstore.partition(other, 4)
        assert list(other.parts()) == ["fennel-4"]
        assert list(g.parts()) == ["fennel-3"]
    with featstore.open(g.path) as third:
        assert list(third.parts()) == ["fennel-3", "fennel-4"]
        assert pickle.loads(pickle.dumps(third)).parts().keys() == third.parts().keys()


def test_parts_of_another_adjacency_are_stale(g: Any) -> None:
    featstore.partition(g, 3)
    with Update(g.path) as update:  # as a release that appends edges would
        update.add([], extra={"parts/fennel-3": {**update.catalog.extra["parts/fennel-3"], "made_of": {"indices": "another"}}})
        update.commit()
    with featstore.open(g.path) as other:
        assert other.parts()["fennel-3"].is_stale
        for load in (other.parts()["fennel-3"].load, other.parts()["fennel-3"].cross_out_degree):
            refuses(StaleError, "partition it again", load)
        featstore.partition(other, 3)
        assert not other.parts()["fennel-3"].is_stale


def test_a_replaced_dataset_keeps_nothing(g: Any, tmp_path: Path) -> None:
    featstore.partition(g, 3)
    make(tmp_path / "other", seed=1).close()
    with featstore.open(tmp_path / "other") as other:
        indptr, indices = other.topology.indptr.copy(), np.concatenate([ids.copy() for _, ids in other.topology.scan()])
    featstore.OutOfCoreGraph.create(g.path, indptr, indices, overwrite=True, progress=False).close()
    refuses(BusyError, "replaced since it was opened", lambda: featstore.partition(g, 4))
    assert list(g.parts()) == ["fennel-3"]
    assert len(g.parts()["fennel-3"].load()) == N  # of what it has open
    with featstore.open(g.path) as new:
        assert new.parts() == {}


def test_somebody_else_is_writing(g: Any) -> None:
    with Update(g.path), pytest.raises(BusyError):
        featstore.partition(g, 3)
    assert g.parts() == {}


def test_entries_of_later_releases_and_nonsense(g: Any) -> None:
    featstore.partition(g, 3)
    with Update(g.path) as update:
        entry = update.catalog.extra["parts/fennel-3"]
        update.add(
            [],
            extra={
                "parts/later": {"kind": "overlapping"},
                "parts/lost": {**entry, "files": {"parts": "nothing.rows"}},
                "parts/other": {**entry, "files": {"parts": next(iter(update.catalog.files))}},
                "parts/few": {**entry, "n_parts": 1},
                "parts/earlier": {**entry, "files": {"parts": entry["files"]["parts"]}},
                "parts/swapped": {**entry, "files": {**entry["files"], "cross_out_degree": entry["files"]["parts"]}},
            },
        )
        update.commit()
    with featstore.open(g.path) as other:
        assert set(other.parts()) == {"fennel-3", "lost", "other", "few", "earlier", "swapped"}
        for name, text in (("lost", "no file of parts"), ("other", "no file of parts"), ("few", r"beyond \[0, 1\)")):
            refuses(FormatError, text, lambda: other.parts()[name].load())
        with pytest.raises(FormatError) as caught:
            other.parts()["few"].load()
        assert caught.value.filename == os.path.join(g.path, entry["files"]["parts"])
        assert len(other.parts()["earlier"].load()) == N
        for name in ("earlier", "swapped"):
            with pytest.raises(FormatError, match="no file of cross_out_degree with 600 rows: partition it again"):
                other.parts()[name].cross_out_degree()


def lists_in_part_order(g: Any, name: str) -> list[tuple[int, list[int]]]:
    """Return nodes and their lists as the files have them, part by part."""
    kept = g.parts()[name]
    nodes, offsets, ids = (read_parts(g.snapshot, g.budget, kept, role).tolist() for role in LISTS)
    k = kept.n_parts + 1
    degrees, found = g.topology.degrees().tolist(), []
    for p in range(kept.n_parts):
        at = offsets[k + p]
        for v in nodes[offsets[p] : offsets[p + 1]]:
            found.append((v, ids[at : at + degrees[v]]))
            at += degrees[v]
        assert at == offsets[k + p + 1]
    assert (offsets[0], offsets[k - 1], offsets[k], offsets[-1]) == (0, g.num_nodes, 0, g.num_edges)
    return found


def lists_of(g: Any, parts: torch.Tensor) -> list[tuple[int, list[int]]]:
    """Return all lists by part, ascending by node within each, of the adjacency."""
    indptr, indices = arrays(g)
    order = sorted(range(g.num_nodes), key=lambda v: (int(parts[v]), v))
    return [(v, indices[indptr[v] : indptr[v + 1]].tolist()) for v in order]


@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (1, 4), (600, 1), (600, 7), (600, 2_000)])
def test_lists_in_part_order(tmp_path: Path, n: int, k: int) -> None:
    with make(tmp_path / "g", n) as g:
        assert not g.parts()
        parts = featstore.partition(g, k, "random", seed=2, keep_lists=True)
        name = f"random-{k}"
        assert g.parts()[name].has_lists
        assert lists_in_part_order(g, name) == lists_of(g, parts)
        featstore.partition(g, k, "random", seed=2, name="without")
        assert not g.parts()["without"].has_lists
        with pytest.raises(FormatError, match="no file of part_indices"):
            read_parts(g.snapshot, g.budget, g.parts()["without"], "part_indices")
    with featstore.open(tmp_path / "g") as g:
        assert lists_in_part_order(g, name) == lists_of(g, parts)
        g.verify(progress=False)
        with pytest.raises(ValueError, match="keep_lists goes with keep=True"):
            featstore.partition(g, k, "random", keep=False, keep_lists=True)


def test_lists_are_put_in_order_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.topology.partorder._PIECE_NODES", 7)
    with make(tmp_path / "g") as g:
        parts = featstore.partition(g, 9, "random", seed=2, keep_lists=True)
        assert lists_in_part_order(g, "random-9") == lists_of(g, parts)


def test_lists_are_put_in_order_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window at a time: a pass each, in the memory that is counted."""
    n = 6_000
    make(tmp_path / "g", n, 60).close()
    with featstore.open(tmp_path / "g", memory="16MiB") as g:
        n_bytes, used = g.topology.nbytes, g.budget.used + 1
    assert n_bytes > 1 << 20
    with featstore.open(tmp_path / "g", memory=used + 80 * n) as g:
        scan, scans = g.topology.scan, []
        monkeypatch.setattr(g.topology, "scan", lambda *args: (scans.append(args), scan(*args))[1])
        g.budget._peak = g.budget.used
        parts = featstore.partition(g, 20, "random", keep_lists=True)
        assert len(scans) >= 4
        assert g.budget.peak <= g.budget.total
        assert "partitioning" not in g.memory_report()
    with featstore.open(tmp_path / "g", memory="64MiB") as g:
        assert lists_in_part_order(g, "random-20") == lists_of(g, parts)


@given(graphs(), st.data(), st.integers(1, 9), st.integers(1, 40), st.sampled_from([np.int32, np.int64]))
def test_lists_in_any_blocks_and_windows(graph: Any, data: Any, step: int, room: int, ids: Any) -> None:
    indptr, indices = graph
    n, k = len(indptr) - 1, 4
    parts = np.array(data.draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n)), np.int32)
    degrees, sizes, starts = np.diff(indptr), np.zeros(k, np.int64), np.full(n, -7)
    middle = data.draw(st.integers(0, n))
    for some in (slice(0, middle), slice(middle, n)):
        list_starts(degrees[some], parts[some], sizes)
    assert sizes.tolist() == np.bincount(parts, degrees, k).astype(int).tolist()
    following = np.cumsum(sizes) - sizes
    for some in (slice(0, middle), slice(middle, n)):
        list_starts(degrees[some], parts[some], following, starts[some])
    assert following.tolist() == np.cumsum(sizes).tolist()
    order = sorted(range(n), key=lambda v: (parts[v], v))
    want = [u for v in order for u in indices[indptr[v] : indptr[v + 1]].tolist()]
    assert starts[order].tolist() == (np.cumsum(degrees[order]) - degrees[order]).tolist()
    found: list[int] = []
    for begin in range(0, len(indices), room):
        window, node = np.full(min(room, len(indices) - begin), -9, ids), 0
        for block in Arrays(indptr, indices, step, ids).blocks(0):
            node = move_lists(block.ids, block.first_edge, indptr, starts, node, window, begin, block.ids.itemsize)
        found += window.tolist()
    assert found == want


def test_what_does_not_fit_is_refused() -> None:
    indptr, ids = np.array([0, 1, 2]), np.zeros(2, np.int32)
    degrees, following, starts = np.ones(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    for parts in ([0, 2], [-1, 0]):
        refuses(ValueError, r"is not in \[0, 2\)", lambda: list_starts(degrees, np.array(parts, np.int32), following, starts))
    for arguments in ((degrees[:1], ids, following, starts), (degrees, ids, following, starts[:1])):
        refuses(ValueError, "have an entry a node", lambda: list_starts(*arguments))
    for first, node, begin, width in ((-1, 0, 0, 4), (0, -1, 0, 4), (0, 0, -1, 4), (0, 0, 0, 3)):
        with pytest.raises(ValueError, match=r"negative|ids have 4 or 8"):
            move_lists(ids, first, indptr, starts, node, ids.copy(), begin, width)


@pytest.mark.parametrize("role", ["parts", "train_nodes", "cross_out_degree"])
def test_damage_is_found(g: Any, role: str) -> None:
    featstore.partition(g, 3, train_idx=[4])
    name = next(name for name in files_of(g) if name.startswith(f"{role}.") and name.endswith(".rows"))
    path = Path(g.path) / name
    data = bytearray(path.read_bytes())
    data[4096 + 17] ^= 1
    path.write_bytes(data)
    with featstore.open(g.path) as other:
        kept = other.parts()["fennel-3"]
        with pytest.raises(CorruptionError):
            {"parts": kept.load, "train_nodes": kept.train_nodes, "cross_out_degree": kept.cross_out_degree}[role]()
    refuses(CorruptionError, "", lambda: g.verify(progress=False))


def test_a_closed_graph(g: Any) -> None:
    featstore.partition(g, 3)
    kept = g.parts()["fennel-3"]
    g.close()
    for call in (g.parts, kept.load, kept.cross_out_degree, lambda: featstore.partition(g, 3)):
        refuses(ClosedError, "", call)


def kept_or_not(path: str) -> list[str]:
    with featstore.open(path) as g:
        for kept in g.parts().values():
            assert len(kept.load()) == N
            assert kept.n_train == len(kept.train_nodes())
            assert len(kept.cross_out_degree()) == N
            assert lists_in_part_order(g, kept.name) == lists_of(g, kept.load())
        g.verify(progress=False)
        return list(g.parts())


def fail_each(folder: str, step: int) -> None:
    """Fail every ``step``-th call of each operation once; in the child."""
    for call, error in (("fsync", "EIO"), ("write", "ENOSPC"), ("rename", "EIO"), ("open", "EMFILE")):
        os.mkdir(f"{folder}/{call}")
        fail_each_of(f"{folder}/{call}", call, error, step)


def fail_each_of(folder: str, call: str, error: str, step: int) -> None:
    make(Path(folder) / "g").close()
    path, n_failed, there = str(Path(folder) / "g"), 0, list[str]()
    for fault in sweep(folder, call, error, step=step):
        name = f"parts-{fault.k}"
        with featstore.open(path) as g:
            with fault:
                try:
                    featstore.partition(g, 4, train_idx=[1, 5], name=name, keep_lists=True)
                    there.append(name)
                except CommittedError as failure:
                    assert failure.errno == getattr(errno, error)
                    there.append(name)
                except OSError as failure:
                    assert failure.errno == getattr(errno, error)
                    n_failed += 1
            # Only opening what is kept may fail after the commit.
            assert set(g.parts()) <= set(there)
        assert kept_or_not(path) == there
    assert n_failed > 2


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.stress)])
def test_a_failed_call_leaves_the_last_commit(tmp_path: Path, step: int) -> None:
    run_in_fork(fail_each, str(tmp_path), step, timeout_s=1800 if step == 1 else 500)


def drawn(path: str) -> int:
    """Return the seed of the parts that are kept, whole."""
    with featstore.open(path) as g:
        kept = g.parts()["mine"]
        seed: int = kept.options["seed"]
        assert torch.equal(kept.load(), featstore.partition(g, 4, "random", seed=seed, keep=False))
        assert kept.train_nodes().sort().values.tolist() == [1, 5]
        assert kept.has_lists
        assert lists_in_part_order(g, "mine") == lists_of(g, kept.load())
        return seed


def kill_each(folder: str, step: int) -> None:
    """Kill a partitioning at every ``step``-th system call; in the child."""
    path, n_killed = str(Path(folder) / "g"), 0
    make(Path(path)).close()

    def attempt(seed: int) -> None:
        with featstore.open(path) as g:
            featstore.partition(g, 4, "random", train_idx=[1, 5], name="mine", seed=seed, keep_lists=True)

    attempt(0)
    for fault in sweep(folder, OPERATIONS, "kill", step=step):
        before = drawn(path)
        with fault:
            killed = forked(lambda seed=fault.k: attempt(seed))  # type: ignore[misc]
        assert drawn(path) in (before, fault.k)
        assert killed is not None or drawn(path) == fault.k
        n_killed += killed is not None
        attempt(0)  # starts over
        with Update(path):  # sweeps what nothing names
            assert len(list(Path(path).glob("*.tmp"))) == 0
        assert len([each for each in Path(path).iterdir() if each.name.startswith(STEMS)]) == 12
    assert n_killed >= 60 // step


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.stress)])
def test_a_kill_leaves_the_last_commit(tmp_path: Path, step: int) -> None:
    run_in_fork(kill_each, str(tmp_path), step, timeout_s=1800 if step == 1 else 500)
