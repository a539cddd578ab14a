"""Seeds that repeat, and labels beside them: against the table of nodes and labels, for every strategy and sampler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import PluginError
from featstore.gather.arrays import find_ids, first_seen
from tests.support.graphs import make_graph
from tests.support.refusing import refuses
from tests.support.sampled import covering

pytestmark = pytest.mark.shares_resources  # one graph for many tests

N, ROWS, SIZE = 400, 900, 64
RNG = np.random.default_rng(3)
NODES = RNG.integers(0, N // 2, ROWS)  # in a batch of 64 some repeat, in an epoch most
VALUES = RNG.random((ROWS, 3), np.float32)
STRATEGIES = ["ondemand", featstore.Superbatch(cache=0.1, length=4), "ginex", featstore.Streamed(cache=0.1, length=5), "auto"]


@pytest.fixture(scope="module")
def g(tmp_path_factory: pytest.TempPathFactory) -> Iterator[featstore.OutOfCoreGraph]:
    path = tmp_path_factory.mktemp("repeats") / "g"
    indptr, indices = make_graph(N, 8)
    x = np.arange(N, dtype=np.float32)[:, None].repeat(4, 1)
    data = {"y": np.arange(N) % 7, "z": np.arange(N, dtype=np.float32)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, data, progress=False).close()
    with featstore.open(path, memory="64MiB") as opened:
        yield opened


def sampler_of(g: featstore.OutOfCoreGraph, kind: str) -> Any:
    if kind == "own":
        neighbor = featstore.NeighborSampler(g, [3, 2])
        return lambda seeds: neighbor.sample(seeds, 0, 0)
    classes = {"neighbor": featstore.NeighborSampler, "labor": featstore.LaborSampler, "epoch": featstore.EpochSampler}
    return classes[kind](g, [3, 2])


def check(batch: featstore.MiniBatch, nodes: Any = NODES) -> np.ndarray:
    """Each given seed has its place among the distinct ones; return where the seeds were given."""
    positions = batch.seed_positions.numpy()
    given = batch.seeds[batch.seed_index].numpy()
    assert np.array_equal(given, np.asarray(nodes)[positions])
    seen = list(dict.fromkeys(given.tolist()))  # each once, in order of first appearance
    assert batch.seeds.tolist() == seen
    assert torch.equal(batch.input_ids[: len(seen)], batch.seeds)
    assert torch.equal(batch.x[:, 0], batch.input_ids.float())
    return positions


@pytest.mark.parametrize(("strategy", "kind"), covering(STRATEGIES, ["neighbor", "labor", "epoch", "own"]))
def test_rows_of_a_table_are_those_of_their_seeds(g: featstore.OutOfCoreGraph, strategy: Any, kind: str) -> None:
    with featstore.Loader(g, sampler_of(g, kind), NODES, SIZE, labels=VALUES, strategy=strategy) as loader:
        assert len(loader) == -(-ROWS // SIZE)
        seen: list[np.ndarray] = []
        for _ in range(2):
            found = []
            for batch in loader:
                positions = check(batch)
                assert len(batch.seeds) < len(positions) or len(positions) < SIZE
                assert np.array_equal(batch.y.numpy(), VALUES[positions])
                found.append(positions)
            seen.append(np.concatenate(found))
            assert np.array_equal(np.sort(seen[-1]), np.arange(ROWS))
        assert not np.array_equal(*seen)


def test_batches_are_the_same_for_every_strategy(g: featstore.OutOfCoreGraph) -> None:
    first: dict[int, featstore.MiniBatch] = {}
    for strategy in STRATEGIES:
        with featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, labels=VALUES, strategy=strategy) as loader:
            for batch in loader:
                same = first.setdefault(batch.index, batch)
                for name in ("input_ids", "x", "y", "seed_index", "seed_positions"):
                    assert torch.equal(getattr(batch, name), getattr(same, name)), name


def test_node_data_by_name_has_a_row_for_each_given_seed(g: featstore.OutOfCoreGraph) -> None:
    with featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, labels=["y", "z"], strategy="ondemand") as loader:
        for batch in loader:
            given = NODES[check(batch)]
            assert np.array_equal(batch.y.numpy(), given % 7)
            assert np.array_equal(batch.labels["z"].numpy(), given)


@pytest.mark.parametrize("shuffle", [True, False])
def test_partitions_keep_where_seeds_were_given(g: featstore.OutOfCoreGraph, shuffle: bool) -> None:
    parts = np.arange(N) % 9
    batches = featstore.PartitionBatches(g, NODES, SIZE, parts, macro=3, shuffle=shuffle)
    with featstore.Loader(g, sampler_of(g, "neighbor"), batches, labels={"t": VALUES[:, 0], "w": VALUES}) as loader:
        found = []
        for batch in loader:
            found.append(check(batch))
            assert list(batch.labels) == ["t", "w"]
            assert np.array_equal(batch.labels["t"].numpy(), VALUES[found[-1], 0])
            assert np.array_equal(batch.labels["w"].numpy(), VALUES[found[-1]])
        assert np.array_equal(np.sort(np.concatenate(found)), np.arange(ROWS))


def test_without_repeats_places_count_up(g: featstore.OutOfCoreGraph) -> None:
    """Also where labels lie beside a mask: a row for each true node."""
    mask = torch.arange(N) % 3 == 1
    nodes = mask.nonzero()[:, 0].numpy()
    rows = torch.arange(len(nodes)) * 10
    with featstore.Loader(g, sampler_of(g, "neighbor"), mask, SIZE, labels=rows) as loader:
        for batch in loader:
            positions = check(batch, nodes)
            assert torch.equal(batch.seed_index, torch.arange(len(batch.seeds)))
            assert torch.equal(batch.y, torch.from_numpy(positions) * 10)
    with featstore.Loader(g, sampler_of(g, "neighbor"), [5, 3], SIZE, shuffle=False) as loader:
        (batch,) = loader
        assert (batch.seed_index.tolist(), batch.seed_positions.tolist(), batch.y.tolist()) == ([0, 1], [0, 1], [5, 3])


def test_a_batch_takes_its_places_along(g: featstore.OutOfCoreGraph) -> None:
    with featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, labels=VALUES) as loader:
        batch = next(iter(loader))
        there = batch.to("meta")
    assert {t.device.type for t in (there.seed_index, there.seed_positions)} == {"meta"}
    assert there.seed_index.shape == batch.seed_index.shape
    assert batch.nbytes >= batch.x.nbytes + batch.y.nbytes + 2 * 8 * SIZE


def test_an_epoch_goes_on_in_the_middle(g: featstore.OutOfCoreGraph) -> None:
    def loader() -> featstore.Loader:
        return featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, labels=VALUES, drop_last=True)

    with loader() as whole, loader() as first, loader() as second:
        wanted = [batch.seed_positions.tolist() for batch in whole]
        assert sum(map(len, wanted)) == ROWS // SIZE * SIZE
        running = iter(first)
        found = [next(running).seed_positions.tolist() for _ in range(4)]
        second.load_state_dict(first.state_dict())
        assert found + [batch.seed_positions.tolist() for batch in second] == wanted


def test_a_history_takes_each_seed_once(g: featstore.OutOfCoreGraph) -> None:
    options: dict[str, Any] = {"labels": VALUES, "history": featstore.History(5, nodes=0.5)}
    with featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, **options) as loader:
        for batch in loader:
            assert np.array_equal(batch.y.numpy(), VALUES[check(batch)])
            batch.history.merge(torch.ones(batch.blocks[-2].n_dst, 5))


class Fixed:
    """Batches that say what seeds they have, and nothing else."""

    batch_size, nbytes = 3, 0

    def __len__(self) -> int:
        return 2

    def check(self, num_nodes: int) -> None: ...

    def digest(self) -> str:
        return "fixed"

    def epoch(self, epoch: int) -> Fixed:
        return self

    def seeds(self, index: int) -> torch.Tensor:
        return torch.tensor([1, 2, 3]) + 10 * index


def test_batches_that_do_not_say_where_their_seeds_were(g: featstore.OutOfCoreGraph) -> None:
    with featstore.Loader(g, sampler_of(g, "neighbor"), Fixed()) as loader:
        for batch in loader:
            assert batch.seed_positions is None
            assert batch.seed_index.tolist() == [0, 1, 2]
            assert batch.y.tolist() == [(10 * batch.index + k) % 7 for k in (1, 2, 3)]
    wanted = "Fixed does not say where its seeds were given"
    refuses(ValueError, wanted, lambda: featstore.Loader(g, sampler_of(g, "neighbor"), Fixed(), labels=VALUES))


@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(ROWS).bfloat16(),
        torch.arange(ROWS, dtype=torch.float32).requires_grad_(),
        torch.arange(2 * ROWS)[::2],
        np.arange(ROWS, dtype=">i4"),
        np.arange(ROWS)[::-1],
        np.broadcast_to(np.int16(3), (ROWS,)),
        np.where(np.arange(ROWS) % 3, 0.5, np.nan),
    ],
    ids=["bfloat16", "needs a gradient", "strided", "big-endian", "backwards", "read-only", "NaN"],
)
def test_labels_of_any_kind(g: featstore.OutOfCoreGraph, rows: Any) -> None:
    expected = rows.detach() if isinstance(rows, torch.Tensor) else torch.from_numpy(rows.astype(rows.dtype.newbyteorder("=")))
    with featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, labels=rows, strategy="ondemand") as loader:
        for batch in loader:
            wanted = expected[batch.seed_positions]
            assert batch.y.dtype == wanted.dtype
            torch.testing.assert_close(batch.y, wanted, rtol=0, atol=0, equal_nan=True)
            assert not batch.y.requires_grad


@pytest.mark.parametrize("nodes", [NODES, np.random.default_rng(0).permutation(N)[:200]])
def test_a_sampler_that_sorts_its_seeds_keeps_their_labels(g: featstore.OutOfCoreGraph, nodes: Any) -> None:
    neighbor = featstore.NeighborSampler(g, [3, 2])
    values = VALUES[: len(nodes)]
    with featstore.Loader(g, lambda seeds: neighbor.sample(seeds.sort().values), nodes, SIZE, labels=values) as loader:
        for batch in loader:
            assert torch.equal(batch.seeds, batch.seeds.sort().values)
            assert np.array_equal(nodes[batch.seed_positions], batch.seeds[batch.seed_index].numpy())
            assert np.array_equal(batch.y.numpy(), values[batch.seed_positions])
            assert nodes is NODES or torch.equal(batch.seed_index, torch.arange(len(batch.seeds)))


@pytest.mark.parametrize("nodes", [NODES, np.random.default_rng(0).permutation(N)[:200]])
def test_a_sampler_that_leaves_seeds_out_leaves_their_labels_out(g: featstore.OutOfCoreGraph, nodes: Any) -> None:
    neighbor, values = featstore.NeighborSampler(g, [3, 2]), VALUES[: len(nodes)]
    with featstore.Loader(g, lambda seeds: neighbor.sample(seeds[2:]), nodes, SIZE, labels=values, shuffle=False) as loader:
        for batch in loader:
            given = nodes[batch.index * SIZE :][:SIZE]
            left_out = list(dict.fromkeys(given.tolist()))[:2]
            assert np.array_equal(batch.seeds[batch.seed_index].numpy(), given[~np.isin(given, left_out)])
            assert np.array_equal(nodes[batch.seed_positions], batch.seeds[batch.seed_index].numpy())
            assert np.array_equal(batch.y.numpy(), values[batch.seed_positions])


def test_a_sampler_of_seeds_of_its_own_has_their_node_data_alone(g: featstore.OutOfCoreGraph) -> None:
    neighbor = featstore.NeighborSampler(g, [3, 2])

    def other(seeds: torch.Tensor) -> Any:
        return neighbor.sample(seeds + N // 2)

    with featstore.Loader(g, other, NODES, SIZE, strategy="ondemand") as loader:
        for batch in loader:
            assert torch.equal(batch.y, batch.seeds % 7)
            assert batch.seed_positions is None
    with featstore.Loader(g, other, NODES, SIZE, labels=VALUES, strategy="ondemand") as loader:
        refuses(PluginError, "batch 0: the sampler returned seeds that it was not given", lambda: next(iter(loader)))


class Said(Fixed):
    """Batches of a user's that say where their seeds were given, rightly or not."""

    n_seeds = 6

    def __init__(self, given: Any = (3, 3, 1), positions: Any = (0, 5, 2)) -> None:
        self._given, self._positions = np.array(given), np.array(positions, np.int32)

    def given(self, index: int) -> Any:
        return self._given

    def positions(self, index: int) -> Any:
        return self._positions

    def seeds(self, index: int) -> torch.Tensor:
        return torch.tensor([3, 1])


def test_batches_that_say_where_their_seeds_were(g: featstore.OutOfCoreGraph) -> None:
    with featstore.Loader(g, sampler_of(g, "neighbor"), Said(), labels=np.arange(6) * 10, strategy="ondemand") as loader:
        for batch in loader:
            assert (batch.seeds.tolist(), batch.seed_index.tolist()) == ([3, 1], [0, 0, 1])
            assert (batch.seed_positions.tolist(), batch.y.tolist()) == ([0, 5, 2], [0, 50, 20])
            assert batch.seed_positions.dtype == torch.int64


def test_a_loop_may_change_the_positions_that_it_gets(g: featstore.OutOfCoreGraph) -> None:
    """They are not the memory of the batches, the library's or a user's."""
    own = Said([3, 1], [5, 2])
    own._positions = own._positions.astype(np.int64)
    for batches in (own, featstore.RandomBatches(np.arange(50), 10), featstore.RandomBatches(np.arange(50), 10, shuffle=False)):
        with featstore.Loader(g, sampler_of(g, "neighbor"), batches, strategy="ondemand") as loader:
            seen = []
            for batch in loader:
                seen.append(batch.seed_positions.clone())
                batch.seed_positions.zero_()
        assert torch.cat(seen).unique().tolist() == ([2, 5] if batches is own else list(range(50)))


@pytest.mark.parametrize(
    ("given", "positions", "text"),
    [
        ([3, 3, 1], [0, 1], r"batch 0: Said gave seeds of shape \(3,\), and positions of \(2,\)"),
        ([3, 1], [0, -1], "none below 0"),
        ([3, 1], [0, 6], "labels: 'y' has no rows for the positions"),
        ([3, 5], [0, 1], "seeds that it was not given"),
    ],
)
def test_batches_that_contradict_themselves(g: featstore.OutOfCoreGraph, given: Any, positions: Any, text: str) -> None:
    with featstore.Loader(
        g, sampler_of(g, "neighbor"), Said(given, positions), labels=np.arange(6), strategy="ondemand"
    ) as loader:
        refuses(PluginError, text, lambda: next(iter(loader)))


def test_an_attribute_of_that_name_says_nothing(g: featstore.OutOfCoreGraph) -> None:
    batches: Any = Fixed()
    batches.positions = torch.arange(3)
    with featstore.Loader(g, sampler_of(g, "neighbor"), batches, strategy="ondemand") as loader:
        assert next(iter(loader)).seed_positions is None
    batches.n_seeds = 3
    with featstore.Loader(g, sampler_of(g, "neighbor"), batches, labels=np.arange(3), strategy="ondemand") as loader:
        used = g.budget.used
        for _ in range(2):  # an epoch that could not begin is the next one still
            refuses(PluginError, "Fixed has no given and positions", lambda: next(iter(loader)))
            assert (g.budget.used, loader._runner.memory._n_running, loader._stages._orders) == (used, 0, {})


def test_labels_in_a_memory_map_stay_there(g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", VALUES)
    mapped = np.load(tmp_path / "y.npy", mmap_mode="r")
    with featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, labels=mapped, strategy="ondemand") as loader:
        assert np.shares_memory(loader._labels._given["y"], mapped)
        for batch in loader:
            assert np.array_equal(batch.y.numpy(), VALUES[batch.seed_positions])


def test_an_order_is_made_once_an_epoch(g: featstore.OutOfCoreGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs beside it; and none stays when all epochs are over."""
    made: list[int] = []
    really = featstore.RandomBatches.epoch
    monkeypatch.setattr(featstore.RandomBatches, "epoch", lambda self, epoch: made.append(epoch) or really(self, epoch))
    with featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, strategy="ondemand") as loader:
        made.clear()
        running = [iter(loader) for _ in range(4)]
        for _ in zip(*running, strict=True):
            pass
        assert sorted(made) == [0, 1, 2, 3]
        assert not loader._stages._orders


@pytest.mark.parametrize(
    ("labels", "error", "text"),
    [
        (VALUES[1:], ValueError, "labels: 'y' has 899 rows for 900 seeds"),
        ({"t": VALUES, "u": VALUES[:2]}, ValueError, "labels: 'u' has 2 rows for 900 seeds"),
        (torch.tensor(3), TypeError, "labels: 'y' has no rows"),
        ({"t": 3}, TypeError, "labels: 't' has no rows"),
        ({"t": "y"}, TypeError, "a mapping of names to rows"),
        ({3: VALUES}, TypeError, "a mapping of names to rows"),
        ([1, 2], TypeError, r"labels must be given by name.*np.array\(labels\)"),
        (torch.empty(ROWS, device="meta"), TypeError, "labels: 'y' is no dense tensor with values: torch.strided on meta"),
        (torch.eye(ROWS).to_sparse(), TypeError, "labels: 'y' is no dense tensor"),
        ({"w": torch.zeros(N)}, ValueError, r"labels: 'w' has 400 rows for 900 seeds; for a mask of seeds give labels\[mask\]"),
        (np.array(["a"] * ROWS), TypeError, "labels: 'y'"),
    ],
)
def test_labels_that_fit_no_seeds(g: featstore.OutOfCoreGraph, labels: Any, error: type[Exception], text: str) -> None:
    used = g.budget.used
    refuses(error, text, lambda: featstore.Loader(g, sampler_of(g, "neighbor"), NODES, SIZE, labels=labels))
    assert g.budget.used == used


def test_a_pack_has_each_seed_once(g: featstore.OutOfCoreGraph, tmp_path: Path) -> None:
    sampler, path = featstore.NeighborSampler(g, [3, 2]), tmp_path / "pack"
    refuses(ValueError, "a pack's seeds must be distinct", lambda: featstore.sample_offline(g, sampler, NODES, SIZE, path=path))
    assert not path.exists()
    with featstore.sample_offline(g, sampler, np.unique(NODES), SIZE, path=path, progress=False) as pack:
        refuses(
            ValueError, "a pack does not say where", lambda: featstore.Loader(g, labels=VALUES, strategy=featstore.Packed(pack))
        )
        with featstore.Loader(g, strategy=featstore.Packed(pack)) as loader:
            batch = next(iter(loader))
            assert batch.seed_positions is None
            assert torch.equal(batch.seed_index, torch.arange(len(batch.seeds)))


def test_zeros_and_ones_that_repeat_are_a_mask(g: featstore.OutOfCoreGraph) -> None:
    for ids in ([0, 1, 1, 0], np.ones(5, np.uint8), [0, 0]):
        refuses(
            ValueError,
            "look like a mask: . is at positions . and .; a mask of 0 and 1 must be given as booleans",
            lambda ids=ids: featstore.RandomBatches(ids, 2),
        )
    assert featstore.RandomBatches([1, 0], 2).n_seeds == 2


@pytest.mark.parametrize("kind", ["random", "parts"])
def test_batches_know_whether_seeds_repeat(g: featstore.OutOfCoreGraph, kind: str) -> None:
    def batches(ids: Any, size: int = 2, **options: Any) -> Any:
        if kind == "random":
            return featstore.RandomBatches(ids, size, **options)
        return featstore.PartitionBatches(g, ids, size, np.arange(N) % 9, **options)

    for ids, repeats in (([7, 3, 7], True), ([7, 3, 5], False), (np.arange(N) < 3, False), ([], False), ([1, 0], False)):
        found = batches(ids)
        assert (found.repeats, found.n_seeds) == (repeats, 3 if len(ids) > 2 else len(ids))
        assert (len(found), len(batches(ids, drop_last=True))) == (-(-found.n_seeds // 2), found.n_seeds // 2)


@given(st.lists(st.integers(0, 9), unique=True, max_size=10), st.lists(st.integers(0, 9), max_size=20))
def test_ids_are_found_where_they_are(distinct: list[int], ids: list[int]) -> None:
    number, there = find_ids(np.array(distinct, np.int64), np.array(ids, np.int64))
    assert there.tolist() == [each in distinct for each in ids]
    assert number[there].tolist() == [distinct.index(each) for each in ids if each in distinct]


@given(st.lists(st.integers(0, 9), max_size=40))
def test_first_seen_is_what_a_dictionary_keeps(ids: list[int]) -> None:
    first, number = first_seen(np.array(ids, np.int64))
    distinct = list(dict.fromkeys(ids))
    assert [ids[at] for at in first] == distinct
    assert first.tolist() == sorted(first.tolist())
    assert [distinct[k] for k in number] == ids
