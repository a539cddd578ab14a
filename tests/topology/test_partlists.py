"""Lists of a macro-batch in memory: the same samples, fewer ids from the file, read in sequence, within the memory."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore._core import nearby
from featstore.errors import BudgetError, CorruptionError
from featstore.pack.batches import PackBatches
from featstore.sampling.macrolists import HOLDER, macro_lists
from featstore.sampling.sampledbatches import Drawn
from featstore.topology.base import huge_bytes
from tests.sampling.test_partitionbatches import COMMUNITIES, N, planted
from tests.support.refusing import refuses
from tests.support.sampled import one_in

SIZE = 100


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, community = planted(tmp_path_factory.mktemp("of") / "g")
    with featstore.open(made) as g:
        featstore.partition(g, method=community, name="planted", keep_lists=True)
        featstore.partition(g, method=community, name="without")
    return made


def samplers(g: Any) -> list[Any]:
    return [
        featstore.NeighborSampler(g, [5, 4]),
        featstore.NeighborSampler(g, [-1, 3], replace=True),
        featstore.LaborSampler(g, [5, 4]),
        featstore.LaborSampler(g, [4, 4], batch_dependency=3, importance_sampling=1),
        featstore.LayerSampler(g, [30, 40], seed=2),
    ]


def sampled(epoch: Any) -> list[list[list[int]]]:
    batches = [epoch.sample(k) for k in range(len(epoch))]
    return [[batch.input_ids.tolist(), *(block.src.tolist() for block in batch.blocks)] for batch in batches]


def caches(g: Any) -> list[int | None]:
    """No static cache, a small one, and one of everything."""
    return [None, huge_bytes(8 * N) + 12_288, g.topology.nbytes + 4096]


def test_the_same_samples_and_fewer_ids_from_the_file(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        batches = featstore.PartitionBatches(g, np.arange(N), SIZE, "planted", macro=4)
        for static in caches(g):
            if static is not None:
                g.cache_neighbors(static)
            for sampler, again in zip(samplers(g), samplers(g), strict=True):
                want = sampled(Drawn(sampler, batches).epoch(1))
                lists = macro_lists(g, again, batches)
                lists.use(lists.useful_bytes)
                drawn = Drawn(again, batches, lists)
                assert sampled(drawn.epoch(1)) == want
                without, read = (each.stats()["edge_rows_read"] for each in (sampler, again))
                assert read < 0.5 * without or read == without == 0
                drawn.close()
                assert HOLDER not in g.memory_report()


@pytest.mark.parametrize("macro", [5, 15])  # 15: two macro-batches, so an epoch's last lists are there when the next begins
def test_what_comes_from_the_file_is_what_is_beyond_the_macro_batch(path: Path, macro: int) -> None:
    """Counted: edges of destinations of other parts are read from the file, all others are at hand; in every epoch."""
    with featstore.open(path, memory="64MiB") as g:
        part = g.parts()["planted"].load().numpy()
        sampler = featstore.NeighborSampler(g, [3, 3])
        batches = featstore.PartitionBatches(g, np.arange(N), SIZE, "planted", macro=macro)
        lists = macro_lists(g, sampler, batches)
        lists.use(lists.useful_bytes)
        drawn, expected = Drawn(sampler, batches, lists), 0
        for number in (0, 1, 2, 0):
            epoch, order = drawn.epoch(number), batches.epoch(number)
            for k in range(len(epoch)):
                near = np.isin(part, order.parts_of(order.macro_of(k)))
                batch = epoch.sample(k)
                expected += sum(int((~near[batch.input_ids[block.dst].numpy()]).sum()) for block in batch.blocks)
                assert 0 < sampler.stats()["edge_rows_read"] == expected


def test_lists_are_read_in_sequence_once_a_macro_batch(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 3])
        batches = featstore.PartitionBatches(g, np.arange(N), SIZE, "planted", macro=10)
        drawn = Drawn(sampler, batches, macro_lists(g, sampler, batches))
        drawn.lists.use(drawn.lists.useful_bytes)
        nodes, ids = drawn.lists._lists._files
        sum(1 for _ in sampled(drawn.epoch(0)))
        assert (nodes.stats.rows, ids.stats.rows) == (N, g.num_edges)
        assert ids.stats.reads <= COMMUNITIES + 3 * 2  # a part is one read, those side by side are read together


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed", "auto", "ginex"])
def test_a_loader_uses_lists_that_are_kept(path: Path, strategy: str, request: pytest.FixtureRequest) -> None:
    if strategy != "auto":  # here all lists of the graph would fit in memory
        request.getfixturevalue("no_kept_lists")
    found, read = {}, {}
    for name in ("without", "planted"):
        with featstore.open(path, memory="64MiB") as g:
            sampler = featstore.NeighborSampler(g, [5, 4])
            batches = featstore.PartitionBatches(g, np.arange(N), SIZE, name, macro=4)
            with featstore.Loader(g, sampler, batches, labels=None, strategy=strategy, threads=1) as loader:
                held = g.memory_report().get(HOLDER, 0)
                assert (held > 0) == (name == "planted" and strategy != "auto")
                found[name] = [batch.input_ids.tolist() for _ in range(2) for batch in loader]
            assert HOLDER not in g.memory_report()
            read[name] = sampler.stats()["edge_rows_read"]
    assert found["planted"] == found["without"]
    if strategy in ("ginex", "auto"):  # all lists are in memory while it samples, or once some batches were measured
        assert read["planted"] == read["without"]
    else:
        assert read["planted"] < 0.6 * read["without"]


def test_packs_are_sampled_with_lists_at_hand(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featstore.pack.offline.lists_kept", lambda *given: nullcontext())  # here all would fit in memory
    found, read = {}, {}
    for name in ("without", "planted"):
        with featstore.open(path, memory="64MiB") as g:
            sampler = featstore.NeighborSampler(g, [5, 4])
            batches = featstore.PartitionBatches(g, np.arange(N), SIZE, name, macro=4)
            with featstore.sample_offline(g, sampler, batches, epochs=2, path=tmp_path / name, progress=False, threads=1) as pack:
                found[name] = [sampled(PackBatches(pack, g.pool, shuffle=False).epoch(e)) for e in range(2)]
            assert HOLDER not in g.memory_report()
            read[name] = sampler.stats()["edge_rows_read"]
    assert found["planted"] == found["without"]
    assert read["planted"] < 0.6 * read["without"]


def test_as_many_threads_as_there_are(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [5, 4])
        batches = featstore.PartitionBatches(g, np.arange(N), 20, "planted", macro=1)
        want = sampled(Drawn(sampler, batches).epoch(0))
        drawn = Drawn(sampler, batches, macro_lists(g, sampler, batches))
        drawn.lists.use(drawn.lists.useful_bytes)
        epoch, found = drawn.epoch(0), dict[int, Any]()

        def some(first: int) -> None:
            for k in range(first, len(epoch), 6):
                batch = epoch.sample(k)
                found[k] = [batch.input_ids.tolist(), *(block.src.tolist() for block in batch.blocks)]

        threads = [threading.Thread(target=some, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[k] for k in range(len(epoch))] == want
        assert len(drawn.lists._slots) <= 2
        drawn.close()


def test_memory_is_on_loan_and_comes_back(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [5, 4])
        batches = featstore.PartitionBatches(g, np.arange(N), SIZE, "planted", macro=4)
        drawn = Drawn(sampler, batches, macro_lists(g, sampler, batches))
        lists = drawn.lists
        useful = lists.useful_bytes
        lists.use(useful)
        epoch, order = drawn.epoch(0), batches.epoch(0)
        want = epoch.sample(3).input_ids.tolist()
        with lists.of(0, order, 3) as nearby:
            assert nearby is not None
            assert len(nearby) == int(np.isin(g.parts()["planted"].load(), order.parts_of(order.macro_of(3))).sum())
            other = g.budget.reserve("other", g.budget.available + useful // 2)  # what is not in use goes
            assert g.memory_report()[HOLDER] == useful // 2
            assert (len(lists._slots), lists._n_slots) == (1, 1)
            with lists.of(0, order, len(order) - 1) as more:
                assert more is None  # the only memory is in use
            refuses(BudgetError, "", lambda: g.budget.reserve("more", g.budget.available + 1))
        other.resize(other.n_bytes + useful // 2)
        assert HOLDER not in g.memory_report()
        with lists.of(0, order, 3) as nearby:
            assert nearby is None
        assert epoch.sample(3).input_ids.tolist() == want  # from the file
        other.release()
        drawn.epoch(1)
        assert g.memory_report()[HOLDER] == useful
        drawn.close()


def test_little_memory_holds_some_parts(path: Path) -> None:
    read = []
    with featstore.open(path, memory="64MiB") as g:
        batches = featstore.PartitionBatches(g, np.arange(N), SIZE, "planted", macro=6)
        for part in (1, 2, 4, 1_000):
            sampler = featstore.NeighborSampler(g, [5, 4])
            drawn = Drawn(sampler, batches, macro_lists(g, sampler, batches))
            drawn.lists.use(drawn.lists.useful_bytes // part)
            sampled(drawn.epoch(0))
            read.append(sampler.stats()["edge_rows_read"])
            drawn.close()
    assert read == sorted(read)
    assert len(set(read)) == 4


@pytest.mark.filterwarnings("ignore:strategy '(superbatch|ginex)'. superbatches have 1 of:featstore.PerformanceWarning")
@pytest.mark.parametrize("strategy", one_in(3, ["superbatch", "ondemand", "ginex"]))
def test_no_more_memory_is_needed(path: Path, strategy: str) -> None:
    """Within any budget that suffices without lists, but for where their parts begin; and the budget holds."""
    ran = 0
    for memory in range(1 << 20, 6 << 20, 600_000):
        outcome = {}
        for name, more in (("without", 0), ("planted", 16 * (COMMUNITIES + 1))):
            try:
                with featstore.open(path, memory=memory + more) as g:
                    sampler = featstore.NeighborSampler(g, [5, 4])
                    batches = featstore.PartitionBatches(g, np.arange(0, N, 3), SIZE, name, macro=4)
                    with featstore.Loader(g, sampler, batches, labels=None, strategy=strategy) as loader:
                        outcome[name] = sum(len(batch.input_ids) for batch in loader)
                    assert g.budget.peak <= g.budget.total
            except BudgetError:
                outcome[name] = 0
        assert outcome["planted"] >= outcome["without"]
        assert not outcome["without"] or outcome["planted"] == outcome["without"]
        ran += outcome["without"] > 0
    assert ran > 3


def test_lists_that_are_of_no_use(path: Path, tmp_path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g, featstore.open(path) as other:
        sampler = featstore.NeighborSampler(g, [3])
        seeds = np.arange(N)
        batches = featstore.PartitionBatches(g, seeds, SIZE, "planted")
        assert macro_lists(g, sampler, batches) is not None
        assert macro_lists(other, sampler, batches) is None  # memory is that of one graph
        assert macro_lists(g, sampler, featstore.RandomBatches(seeds, SIZE)) is None
        assert macro_lists(g, sampler, featstore.PartitionBatches(g, seeds, SIZE, "without")) is None
        assert macro_lists(g, sampler, featstore.PartitionBatches(g, seeds, SIZE, np.zeros(N, np.int32))) is None
        assert macro_lists(g, sampler, featstore.PartitionBatches(g, seeds[:0], SIZE, "planted")) is None


def test_damage_is_found(tmp_path: Path) -> None:
    path, community = planted(tmp_path / "g")
    with featstore.open(path) as g:
        featstore.partition(g, method=community, name="planted", keep_lists=True)
    for role in ("part_nodes", "part_indices"):
        file = next(path.glob(f"{role}.*.rows"))
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[4096] ^= 1
        for verify in ("always", "off"):  # without checksums a node that is there twice, or not at all, is found
            file.write_bytes(bytes(changed[:4096]) + b"\xff" * 4 + bytes(changed[4100:]))
            with featstore.open(path, verify=verify) as g:
                sampler = featstore.NeighborSampler(g, [3])
                batches = featstore.PartitionBatches(g, np.arange(N), SIZE, "planted", macro=COMMUNITIES)
                drawn = Drawn(sampler, batches, macro_lists(g, sampler, batches))
                drawn.lists.use(drawn.lists.useful_bytes)
                refuses(CorruptionError, "", lambda: drawn.epoch(0).sample(0))
        file.write_bytes(whole)


@given(st.data(), st.sampled_from([np.int32, np.int64]))
def test_lists_at_hand_by_brute_force(data: Any, dtype: Any) -> None:
    n = data.draw(st.integers(1, 30))
    degrees = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), np.int64)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    ids = np.arange(100, 100 + indptr[-1]).astype(dtype)
    near = np.array(data.draw(st.permutations(range(n))), np.int64)[: data.draw(st.integers(0, n))]
    starts, table = degrees[near].copy(), np.empty(nearby.table_entries(len(near)), np.int32)
    hand = np.concatenate([np.empty(0, dtype), *(ids[indptr[v] : indptr[v + 1]] for v in near)]).astype(dtype)
    assert nearby.enter_lists(near, starts, table) == len(hand)
    nodes, base = np.arange(n), int(indptr[-1])
    place = np.where(np.arange(n) % 5 == 4, 7, ~indptr[:-1])  # some are in the cache
    before = place.copy()
    nearby.find_lists(near, starts, table, base, nodes, place)
    found = np.isin(nodes, near) & (before < 0)
    assert np.array_equal(place[~found], before[~found])
    assert (~place[found] >= base).all()
    wanted = [(v, k) for v in nodes[before < 0] for k in range(degrees[v])]
    positions = np.array([~place[v] + k for v, k in wanted], np.int64)
    n_far = nearby.count_far(positions, base, len(hand))
    assert n_far == sum(not found[v] for v, _ in wanted)
    out, far = np.full(len(positions), -1, dtype), np.empty(n_far, np.int64)
    nearby.take_near(positions, base, hand, ids.itemsize, out, far)
    nearby.put_far(positions, base, ids[far], ids.itemsize, out)
    assert out.tolist() == [ids[indptr[v] + k] for v, k in wanted]


def test_kernels_refuse_what_does_not_fit() -> None:
    nodes, starts, table = np.array([3, 4]), np.array([1, 1]), np.empty(4, np.int32)
    refuses(ValueError, "node 3 occurs twice", lambda: nearby.enter_lists(np.array([3, 3]), starts.copy(), table))
    for size in (2, 3, 5):
        refuses(ValueError, "a power of two", lambda: nearby.enter_lists(nodes, starts.copy(), np.empty(size, np.int32)))
    refuses(ValueError, "have one length", lambda: nearby.enter_lists(nodes, starts[:1], table))
    nearby.enter_lists(nodes, starts, table)
    refuses(ValueError, "one length", lambda: nearby.find_lists(nodes, starts, table, 9, nodes, starts[:1].copy()))
    positions, ids, out = np.array([8, 9, 10]), np.zeros(2, np.int32), np.zeros(3, np.int32)
    refuses(IndexError, "beyond the 1 ids", lambda: nearby.count_far(positions, 9, 1))
    for bad in ((positions, 9, ids, 4, out[:2], np.empty(1, np.int64)), (positions, 9, ids, 4, out, np.empty(0, np.int64))):
        refuses(ValueError, "an id a position", lambda: nearby.take_near(*bad))
    refuses(ValueError, "ids of 8 bytes", lambda: nearby.take_near(positions, 9, ids, 8, out, np.empty(1, np.int64)))
    refuses(TypeError, "bytes-like", lambda: nearby.take_near(positions, 9, [7], 4, out, np.empty(1, np.int64)))
    refuses(ValueError, "an id a position", lambda: nearby.put_far(positions, 9, ids, 4, out))


def test_batches_know_their_macro_batch() -> None:
    class Nodes:
        num_nodes, path = 40, "nowhere"

        def refuse_types(self, what: str) -> None:
            """It has none."""

    g: Any = Nodes()
    part = np.arange(40, dtype=np.int32) // 10 * 3  # parts 0, 3, 6, 9
    for macro, size in ((1, 3), (2, 7), (3, 40), (4, 1)):
        batches = featstore.PartitionBatches(g, np.arange(40), size, part, macro)
        assert batches.kept is None
        order = batches.epoch(2)
        seen = [order.parts_of(m).tolist() for m in range(-(-4 // macro))]
        assert sorted(p for parts in seen for p in parts) == [0, 3, 6, 9]
        for k in range(len(order)):
            seeds = order.seeds(k)
            middle = seeds[len(seeds) // 2]
            assert part[middle] in order.parts_of(order.macro_of(k))
        assert torch.equal(order.seeds(0), batches.epoch(2).seeds(0))
