"""Batches from parts: each seed once, macro-batch by macro-batch; every strategy; packs; memory; fewer rows."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, StaleError
from featstore.estimate.batchsize import measure
from featstore.storage.update import Update
from featstore.strategies.packsize import estimate_pack
from featstore.strategies.profile import Profile, least_batches, pack_trace, profile_batches
from tests.support.refusing import refuses

N, DEGREE, COMMUNITIES = 3_000, 8, 30


def planted(path: Path, mixed: float = 0.1, seed: int = 0) -> tuple[Path, np.ndarray]:
    """Create communities with shuffled ids, whose members have as many neighbours as their community's number tells."""
    rng = np.random.default_rng(seed)
    community = rng.permutation(np.arange(N) % COMMUNITIES)
    members = [np.flatnonzero(community == c) for c in range(COMMUNITIES)]
    degrees = 1 + community * 2 * DEGREE // COMMUNITIES
    lists = [
        np.sort(np.where(rng.random(d) < mixed, rng.integers(0, N, d), rng.choice(members[c], d)))
        for c, d in zip(community, degrees, strict=True)
    ]
    x = rng.standard_normal((N, 256)).astype(np.float32)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    featstore.OutOfCoreGraph.create(path, indptr, np.concatenate(lists), {"x": x}, {"y": community}, progress=False).close()
    return path, community


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path, community = planted(tmp_path_factory.mktemp("of") / "g")
    with featstore.open(path) as g:
        featstore.partition(g, 3, "random", name="few")
        featstore.partition(g, method=community, name="planted")
    return path, community


class Nodes:
    """The part of a graph that batches ask for."""

    path = "nowhere"

    def __init__(self, n: int) -> None:
        self.num_nodes = n

    def refuse_types(self, what: str) -> None:
        """It has none."""

    def parts(self) -> dict[str, Any]:
        return {}


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(1, 20),
    st.none() | st.just("auto") | st.integers(1, 12),
    st.booleans(),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_macro_batches_by_sets(part: list[int], size: int, macro: Any, drop_last: bool, epoch: int, random: Any) -> None:
    n = len(part)
    ids = random.sample(range(n), k=random.randint(0, n))
    g: Any = Nodes(n)
    leaves_none = drop_last and 0 < len(ids) < size
    with pytest.warns(featstore.FeatstoreWarning, match="leaves no batch") if leaves_none else nullcontext():
        batches = featstore.PartitionBatches(g, ids, size, np.array(part), macro, drop_last=drop_last)
    seeded = {part[v] for v in ids}
    if macro in (None, "auto") and ids:  # half of them, or the fewest that hold two batches of seeds, if all parts had as many
        mean = len(ids) / len(seeded)
        fewest = next((m for m in range(1, len(seeded)) if m * mean >= 2 * size), len(seeded))
        assert batches.macro == max(fewest, -(-len(seeded) // 2))
    order = batches.epoch(epoch)
    found = [order.seeds(k).tolist() for k in range(len(order))]
    assert len(order) == len(batches) == (len(ids) // size if drop_last else -(-len(ids) // size))
    assert all(len(seeds) == size for seeds in found[: None if drop_last else -1])
    flat = [v for seeds in found for v in seeds]
    whole = featstore.PartitionBatches(g, ids, size, np.array(part), macro)
    everything = [v for k in range(len(whole)) for v in whole.epoch(epoch).seeds(k).tolist()]
    assert flat == everything[: len(flat)]
    assert sorted(everything) == sorted(ids)
    # Seeds of a macro-batch lie together: all of the parts of one come before all of the next.
    left = list(everything)
    seen: set[int] = set()
    while left:
        parts: list[int] = []
        members: set[int] = set()
        for v in left:
            if part[v] not in parts:
                if len(parts) == batches.macro:
                    break
                parts.append(part[v])
                members |= {u for u in ids if part[u] == part[v]}
        assert not seen & set(parts)
        assert len(parts) == batches.macro or len(seen) + len(parts) == len(seeded)
        assert set(left[: len(members)]) == members
        seen |= set(parts)
        left = left[len(members) :]


@pytest.mark.parametrize(
    ("n_parts", "size", "macro", "reason"),
    [
        (1_000, 120, 40, "one batch of seeds, which is in 40 parts"),
        (1_000, 106, 36, "one batch of seeds, which is in 36 parts"),
        (1_000, 105, 500, "half, because a batch of seeds is in 35 parts, and fewer than 36 cost accuracy; of 1143 parts fewer"),
        (1_000, 2_000, 667, "one batch of seeds"),
        (1_000, 9_999, 1_000, "one batch of seeds"),
        (19, 2_999, 19, "half, because"),
        (1, 5, 1, "half, because"),
    ],
)
def test_a_macro_batch_is_one_batch_of_seeds_where_these_are_of_many_parts(n_parts, size, macro, reason) -> None:
    """Parts of two or three seeds, or of more: one batch where many parts hold it, else half; and why."""
    nodes: Any = Nodes(N)
    batches = featstore.PartitionBatches(nodes, np.arange(N), size, np.arange(N) % n_parts)
    assert batches.macro == macro
    assert batches.macro_reason.startswith(reason)
    assert f"macro={macro} (auto), " in repr(batches)
    stated = featstore.PartitionBatches(nodes, np.arange(N), size, np.arange(N) % n_parts, macro)
    assert stated.macro_reason == "as stated"
    assert f"macro={macro}, " in repr(stated)
    assert stated.digest() == batches.digest()
    if n_parts * size == 120_000:  # what it is for: the next batch is of other parts
        order = batches.epoch(0)
        assert not set((order.seeds(0) % n_parts).tolist()) & set((order.seeds(1) % n_parts).tolist())


def test_a_seed_a_part_is_the_most() -> None:
    """No parts are recommended if not even so many would hold a batch."""
    nodes: Any = Nodes(100)
    batches = featstore.PartitionBatches(nodes, np.arange(100), 35, np.arange(100))
    assert batches.macro == 70
    assert batches.macro_reason.endswith("fewer than 36 cost accuracy")


def test_macro_is_a_number_or_auto() -> None:
    nodes: Any = Nodes(9)
    with pytest.raises(ValueError, match="macro must be a number of parts, or 'auto', not 'all'"):
        featstore.PartitionBatches(nodes, np.arange(9), 3, np.arange(9), "all")


def test_epochs_are_functions_of_seed_and_epoch(data: Any) -> None:
    with featstore.open(data[0]) as g:
        ids = np.arange(0, N, 2)
        one, same = (featstore.PartitionBatches(g, ids, 50, seed=3) for _ in range(2))
        other = featstore.PartitionBatches(g, ids, 50, seed=4)
        five = featstore.PartitionBatches(g, np.arange(N), 50, macro=5)
        still = featstore.PartitionBatches(g, ids, 50, shuffle=False)
        copy = pickle.loads(pickle.dumps(one))

    def order(batches: Any, epoch: int) -> list[int]:
        return torch.cat([batches.epoch(epoch).seeds(k) for k in range(len(batches))]).tolist()

    assert order(one, 5) == order(same, 5) == order(copy, 5)
    assert one.digest() == same.digest() == copy.digest() != other.digest()
    assert len({tuple(order(one, epoch)) for epoch in range(4)} | {tuple(order(other, 0))}) == 5
    assert order(still, 0) == order(still, 1) == sorted(ids.tolist(), key=lambda v: (data[1][v], v))
    # Which parts come together differs from epoch to epoch: here ten batches are a macro-batch of five parts.
    macros = [{frozenset(data[1][order(five, e)[k : k + 500]].tolist()) for k in range(0, N, 500)} for e in range(3)]
    assert all(len(parts) == 5 for each in macros for parts in each)
    assert macros[0] != macros[1] != macros[2]
    one.check(N)
    refuses(ValueError, "of a graph of 3000 nodes, not of 10", lambda: one.check(10))


def test_where_the_parts_come_from(data: Any) -> None:
    path, community = data
    ids = np.arange(200)
    with featstore.open(path) as g:
        last = featstore.PartitionBatches(g, ids, 10)
        assert "parts" not in g.memory_report()
        for parts in ("planted", g.parts()["planted"], community, torch.from_numpy(community), community.tolist()):
            assert featstore.PartitionBatches(g, ids, 10, parts).digest() == last.digest()
        mask = np.zeros(N, bool)
        mask[:200] = True
        assert featstore.PartitionBatches(g, mask, 10).digest() == last.digest()
        few = featstore.PartitionBatches(g, ids, 10, "few")
        assert few.digest() != last.digest()
        assert (few.macro, last.macro) == (2, COMMUNITIES // 2)
        assert featstore.PartitionBatches(g, ids, 10, macro=1000).macro == COMMUNITIES
        options = "batch_size=10, macro=2 (auto), shuffle=True, seed=0, drop_last=False"
        assert repr(few) == f"PartitionBatches(<200 ids in {len(few.part_numbers)} parts>, {options})"
        assert repr(few.epoch(1)) == f"<{len(few)} batches of up to 10 seeds, {few.macro} parts at a time>"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"parts": np.zeros(N - 1, int)}, ValueError, "one entry a node"),
        ({"parts": np.zeros(N)}, TypeError, "must be integers"),
        ({"parts": np.full(N, -1)}, ValueError, "node 0 is in part -1"),
        ({"parts": np.full(N, 2**31)}, ValueError, "node 0 is in part 2147483648"),
        ({"parts": "other"}, ValueError, "keeps no parts 'other'; there is 'few', 'planted'"),
        ({"ids": [1, 1]}, ValueError, "look like a mask"),
        ({"ids": [N]}, IndexError, "not a node"),
        ({"ids": np.ones(3, bool)}, ValueError, "one entry a node"),
    ],
)
def test_bad_input_is_named(data: Any, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with featstore.open(data[0]) as g, pytest.raises(error, match=text):
        featstore.PartitionBatches(**{"g": g, "ids": np.arange(9), "batch_size": 3, **arguments})


def test_no_parts_and_stale_ones(tmp_path: Path) -> None:
    path, community = planted(tmp_path / "g")
    with featstore.open(path) as g:
        refuses(ValueError, "keeps no parts: make some with", lambda: featstore.PartitionBatches(g, [1], 1))
        featstore.partition(g, method=community, name="a")
    with Update(path) as update:
        update.add([], extra={"parts/a": {**update.catalog.extra["parts/a"], "made_of": {}}})
        update.commit()
    with featstore.open(path) as g, pytest.raises(StaleError):
        featstore.PartitionBatches(g, [1], 1)


def test_batch_size_beside_batches_is_refused(data: Any) -> None:
    with featstore.open(data[0]) as g:
        sampler, batches = featstore.NeighborSampler(g, [3]), featstore.PartitionBatches(g, np.arange(50), 10)
        refuses(ValueError, "batch_size goes with ids", lambda: featstore.Loader(g, sampler, batches, batch_size=10))
        for call in (featstore.sample_offline, estimate_pack):
            refuses(ValueError, "batch_size goes with ids", lambda: call(g, sampler, batches, 10))
            refuses(ValueError, "batch_size", lambda: call(g, sampler, np.arange(50)))


def test_packs_of_them(data: Any, tmp_path: Path) -> None:
    with featstore.open(data[0], memory="64MiB") as g:
        sampler, batches = (
            featstore.NeighborSampler(g, [4, 3], seed=1),
            featstore.PartitionBatches(g, np.arange(0, N, 3), 40, seed=2),
        )
        estimate = estimate_pack(g, sampler, batches, path=tmp_path / "pack", packed=featstore.Packed(None, cache=0.1))
        with featstore.sample_offline(g, sampler, batches, epochs=2, path=tmp_path / "pack", progress=False) as pack:
            assert (pack.record["batch_size"], pack.record["seed"], pack.record["batches"]) == (40, 2, 25)
            assert 0.5 < estimate.samples_bytes / (tmp_path / "pack" / "samples").stat().st_size < 2
            with featstore.Loader(g, strategy=featstore.Packed(pack, cache=0.1)) as loader:
                for epoch in range(2):
                    found = {batch.index: batch for batch in loader}
                    order = batches.epoch(epoch)
                    for k in range(25):
                        expected = sampler.sample(order.seeds(k), epoch=epoch, index=k)
                        assert torch.equal(found[k].input_ids, expected.input_ids)
                        assert torch.equal(found[k].x, g.features["x"][expected.input_ids])


def test_an_epoch_asks_for_fewer_rows(data: Any) -> None:
    with featstore.open(data[0], memory="64MiB") as g:
        sampler, ids = featstore.NeighborSampler(g, [5, 5]), np.arange(N)
        rows = {}
        for name, batches in {
            "random": featstore.RandomBatches(ids, 100),
            "fennel": featstore.PartitionBatches(g, ids, 100, featstore.partition(g, COMMUNITIES, keep=False), 2),
            "shuffled": featstore.PartitionBatches(g, ids, 100, featstore.partition(g, COMMUNITIES, "random", keep=False), 2),
        }.items():
            order = batches.epoch(0)
            rows[name] = sum(len(sampler.sample(order.seeds(k), 0, k).input_ids) for k in range(len(order)))
    assert rows["fennel"] < 0.75 * rows["random"]
    assert rows["shuffled"] > 0.95 * rows["random"]


def test_several_batches_are_measured(data: Any) -> None:
    with featstore.open(data[0], memory="64MiB") as g:
        sampler, ids = featstore.NeighborSampler(g, [8, 8]), np.arange(N)
        batches = featstore.PartitionBatches(g, ids, 100, macro=1)
        drawn = featstore.Loader(g, sampler, batches)._runner.context.batches
        sizes = [len(drawn.epoch(e).sample(k).input_ids) for e in range(4) for k in range(len(drawn))]
        assert max(sizes) > 1.3 * np.mean(sizes)
        batch = measure(g, drawn)
        assert batch.n_rows * 17 // 16 >= max(sizes)
        assert torch.equal(drawn.epoch(0).sample(0).input_ids, drawn.sampled(0).sample(0).input_ids)
        one = measure(g, featstore.Loader(g, sampler, ids, 100)._runner.context.batches)
        assert one.n_rows == len(sampler.sample(featstore.RandomBatches(ids, 100).epoch(0).seeds(0), 0, 0).input_ids)


@pytest.mark.filterwarnings("ignore:strategy 'streamed':featstore.PerformanceWarning")
@pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed"])
def test_an_epoch_runs_in_the_least_that_is_named(data: Any, strategy: str) -> None:
    memory, named = 1 << 20, 0
    while True:
        try:
            with featstore.open(data[0], memory=memory) as g:
                batches = featstore.PartitionBatches(g, np.arange(N), 100, macro=1)
                with featstore.Loader(g, featstore.NeighborSampler(g, [8, 8]), batches, strategy=strategy) as loader:
                    for _ in range(2):
                        rows = [len(batch.input_ids) for batch in loader]
            break
        except BudgetError as error:
            assert error.needed > memory
            memory, named = error.needed, named + 1
    assert max(rows) > 1.3 * min(rows)
    assert named == 1


def test_auto_looks_at_several_macro_batches(data: Any) -> None:
    assert [profile_batches(n, together) for n, together in ((100, 1), (100, 2), (400, 20), (30, 20), (5, 2))] == [
        12,
        12,
        80,
        30,
        5,
    ]
    with featstore.open(data[0], memory="64MiB") as g:
        batches = featstore.PartitionBatches(g, np.arange(N), 20, macro=2)
        assert batches.run_length == 10
        with featstore.Loader(g, featstore.NeighborSampler(g, [3]), batches, strategy="auto") as loader:
            assert loader.stats()["auto"]["taken"]
        assert featstore.RandomBatches([1], 1).run_length == 1


class Counting:
    """A sampler that notes which batches it samples."""

    fanouts = (3,)

    def __init__(self, g: Any) -> None:
        self._real, self.sampled = featstore.NeighborSampler(g, [3]), list[int]()

    def sample(self, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
        if epoch == 0:
            self.sampled.append(index)
        return self._real.sample(seeds, epoch=epoch, index=index)


@pytest.mark.parametrize(
    ("strategy", "ahead"),
    [
        (featstore.Auto(cache=0.1), range(40)),  # four macro-batches of ten
        (featstore.Streamed(cache=0.1), range(40)),
        (featstore.Superbatch(cache=0.1), {0, *(k * 149 // 8 for k in range(1, 9))}),  # nine batches, spread over all
        (featstore.OnDemand(cache=0.1), {0, *(k * 149 // 8 for k in range(1, 9))}),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
@pytest.mark.parametrize("shared", [True, False])
def test_whatever_measured_one_batch_measures_several(data: Any, strategy: Any, ahead: Any, shared: bool) -> None:
    """Counted: which batches are sampled before the loop begins; of random batches the first, or the first eight."""
    with featstore.open(data[0], memory="64MiB") as g:
        batches: Any = featstore.PartitionBatches(g, np.arange(N), 20, macro=2)
        if not shared:
            batches = featstore.RandomBatches(np.arange(N), 20)
        sampler: Any = Counting(g)
        with featstore.Loader(g, sampler, batches, strategy=strategy) as loader:
            before = sorted(set(sampler.sampled))
            spread = sorted({0, *(k * 149 // 8 for k in range(1, 9))})
            if not shared:
                assert before == (list(range(len(before))) if len(before) > 1 else [0])
                assert len(before) == {"auto": 18, "streamed": 8}.get(strategy.name, 1)
            elif len(ahead) == 40:
                assert before == sorted({*ahead, *spread})  # measured for the memory first, then judged
            else:
                assert before == sorted(ahead) == spread
            assert sum(1 for _ in loader) == 150


def test_a_pack_of_them_is_judged_by_several_macro_batches(data: Any, tmp_path: Path) -> None:
    with featstore.open(data[0], memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3])
        alike = featstore.PartitionBatches(g, np.arange(N), 20, macro=4)
        for name, batches, together, n in (
            ("alike", alike, 20, 80),
            ("random", featstore.RandomBatches(np.arange(N), 20), 1, 18),
        ):
            with featstore.sample_offline(g, sampler, batches, path=tmp_path / name, progress=False) as pack:
                assert (pack.run_length, pack.record["together"], len(pack_trace(pack))) == (together, together, n)
                del pack.record["together"]  # as packs have it that were made elsewhere
                assert pack.run_length == 2
                assert len(pack_trace(pack)) == 18
            with featstore.Loader(g, strategy=featstore.Auto(pack=tmp_path / name, cache=0.1)) as loader:
                assert loader.stats()["auto"]["taken"]


def test_a_small_disk_holds_as_many_batches_as_fit(data: Any) -> None:
    """Whatever their sizes: by brute force over the sizes of the files. The first batch says nothing about the others."""
    from featstore.plan.samples import sample_bytes

    with featstore.open(data[0], memory="64MiB") as g:
        batches = featstore.PartitionBatches(g, np.arange(N), 100, macro=1, shuffle=False)  # from few neighbours to many
        with featstore.Loader(g, featstore.NeighborSampler(g, [8, 8]), batches) as loader:
            context = loader._runner.context
            order = context.batches.epoch(0)
            sizes = [sample_bytes(order.sample(k), N) for k in range(30)]
            assert sizes[-1] > 1.25 * sizes[0]
            counts = set()
            for room in (sizes[0] + 200, *(sum(sizes[:k]) + 100 + more for k in (2, 5, 7) for more in (-200, 0, 40, 2000))):
                profile = Profile(context, f"{g.path}.runs", 8 * room, most=8)
                file = Path(profile._runs.path) / "profile"
                assert file.stat().st_size == profile.n_bytes <= room
                n = profile.n_sampled
                assert n == 8 or sum(sizes[: n + 1]) + 128 > room
                counts.add(n)
                profile.close()
            assert counts >= {1, 2, 5, 7}
            assert least_batches() == least_batches(2) == 8
            assert (least_batches(3), least_batches(400)) == (12, 128)
