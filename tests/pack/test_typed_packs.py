"""Packs of graphs of several types: the batches of the other strategies, bit for bit, from layouts of a column's rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore import Auto, HeteroMiniBatch, LaborSampler, Loader, NeighborSampler, OnDemand, PackedGraph
from featstore.cli.packs import describe_pack
from featstore.errors import BudgetError, BusyError, CorruptionError, StaleError, VersionError
from featstore.pack.layout import find_layouts, layout_bytes
from featstore.pack.offline import Pack
from featstore.pack.record import read_record, write_record
from featstore.storage.sections import SectionFile
from featstore.strategies.packsize import estimate_layout, estimate_pack
from tests.load.test_heterobatch import same, tensors
from tests.pack.test_hostile_packs import arrays_of, forge, sample_records, sample_tables
from tests.support.refusing import refuses
from tests.support.sampled import covering
from tests.support.typed import TypedArrays, academic, check_batch, random_types

pytestmark = pytest.mark.shares_resources
SEEDS = ("paper", np.arange(0, 1500, 3))
N_COLUMN = 1500 + 750 + 75


def shared(seed: int = 0) -> TypedArrays:
    """Draw a graph whose types share ``x``, of which papers have also a feature of their own width."""
    graph = academic(seed, papers=1500).draw("x", 3, np.float16, institution=16, author=16)
    rng = np.random.default_rng(4)
    graph.features["paper"]["year"] = rng.integers(0, 99, (1500, 8))
    graph.edge_features = {("paper", "cites", "paper"): {"w": rng.standard_normal((12000, 2)).astype(np.float32)}}
    return graph


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    return shared()


@pytest.fixture(scope="module")
def g(tmp_path_factory: Any, graph: TypedArrays) -> Any:
    with graph.create(tmp_path_factory.mktemp("mag") / "mag", memory="64MiB") as opened:
        yield opened


def sample(g: Any, path: Path, make: Any = NeighborSampler, **options: Any) -> Pack:
    sampler = make(g, [5, 5], edges=True)
    return featstore.sample_offline(g, sampler, SEEDS, 50, 2, path, progress=False, **options)


@pytest.fixture(scope="module")
def pack(g: Any, tmp_path_factory: Any) -> Any:
    with sample(g, tmp_path_factory.mktemp("packs") / "p") as made:
        yield made


def epochs(g: Any, strategy: Any, n: int = 3, **options: Any) -> list[HeteroMiniBatch]:
    """Run epochs; in the order of (epoch, index)."""
    is_of_pack = isinstance(g, PackedGraph) or getattr(strategy, "pack", None) is not None
    given = () if is_of_pack else (NeighborSampler(g, [5, 5], edges=True), SEEDS, 50)
    with Loader(g, *given, strategy=strategy, **options) as loader:
        return [batch for _ in range(n) for batch in sorted(loader, key=lambda each: each.index)]


STRATEGIES: dict[str, Callable[[Pack], Any]] = {
    "belady": lambda pack: featstore.Packed(pack, cache=0.1),
    "short": lambda pack: featstore.Packed(pack, cache="20KiB", length=3),
    "frequency": lambda pack: featstore.Packed(pack, cache=0.1, policy="frequency"),
    "degree": lambda pack: featstore.Packed(pack, cache=0.1, policy="degree"),
    "segments": lambda pack: featstore.Packed(pack, cache=0.02, policy="frequency", disk="10x"),
    "chosen": lambda pack: featstore.Packed(pack),
    "auto": lambda pack: Auto(pack=pack),
    "on a disk": lambda pack: Auto(pack=pack, disk="10x", cache=0.05),
}


FEATURES = ["x", {"paper": "x", "institution": ["x"]}, {"paper": ["x"], "author": "x"}, {"paper": "year"}]


@pytest.mark.parametrize(("name", "features"), covering(STRATEGIES, FEATURES))
def test_batches_are_those_of_the_graph(g: Any, graph: TypedArrays, tmp_path: Path, name: str, features: Any) -> None:
    wanted = epochs(g, OnDemand(cache=None), 2, features=features)
    with sample(g, tmp_path / "p") as pack:
        strategy = STRATEGIES[name](pack)
        with Loader(g, strategy=strategy, features=features) as loader:
            found = [batch for _ in range(2) for batch in sorted(loader, key=lambda each: each.index)]
            hits = loader.stats()["hits"]
        for batch in found:
            check_batch(graph, batch, edges=True)
        assert same(found, wanted)
        if isinstance(strategy, featstore.Packed):
            assert hits["packed"]
            assert not hits["base"]
            assert bool(hits.get("disk_cache")) == (name == "segments")
        assert pack.verify(progress=False)["others"] == []
        again = epochs(g, strategy, 3, features=features)
        assert same(again[: len(wanted)], wanted)
        assert same(again[len(wanted) :], epochs(g, strategy, 1, features=features))  # epoch 2 is the pack's epoch 0


@pytest.mark.parametrize("make", [NeighborSampler, LaborSampler])
@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_any_types(tmp_path_factory: Any, make: Any, seed: int) -> None:
    """Types without nodes or edges, relations of a type to itself, some of the types asked for."""
    graph, folder = random_types(seed, most=20), tmp_path_factory.mktemp("g")
    rng = np.random.default_rng(seed)
    having = [kind for kind in graph.n if rng.random() < 0.7] or list(graph.n)
    with graph.create(folder / "g") as g:
        sampler, seeds = make(g, [3, 2], edges=True), ("t0", np.arange(graph.n["t0"]))
        options: dict[str, Any] = {"features": dict.fromkeys(having, "x"), "edge_features": "w"}
        with Loader(g, sampler, seeds, 3, strategy=OnDemand(cache=None), **options) as loader:
            wanted = list(loader)
        with featstore.sample_offline(g, sampler, seeds, 3, 1, folder / "p", progress=False) as pack:
            with Loader(g, strategy=featstore.Packed(pack, cache=0.3, length=2), **options) as loader:
                found = list(loader)
            assert pack.verify(progress=False)["others"] == []
        for batch in found:
            check_batch(graph, batch, edges=True)
        assert same(found, wanted)


def test_chunked_lists(graph: TypedArrays, g: Any, tmp_path: Path) -> None:
    with graph.create(tmp_path / "g", topology="chunked", chunk_bytes="4KiB") as chunked, sample(chunked, tmp_path / "p") as pack:
        assert same(epochs(chunked, featstore.Packed(pack, cache=0.1), 2), epochs(g, OnDemand(cache=None), 2))


@pytest.mark.parametrize("policy", ["belady", "frequency"])
def test_rows_on_the_device(g: Any, pack: Pack, device: Any, policy: str) -> None:
    wanted = epochs(g, OnDemand(cache=None), 2)
    found = epochs(g, featstore.Packed(pack, cache=0.05, policy=policy), 2, device_cache=0.1, device=device)
    assert {batch.x["author"].device.type for batch in found} == {torch.device(device).type}
    assert same(wanted, [batch.to("cpu") for batch in found])


def test_two_epochs_at_once(g: Any, pack: Pack, tmp_path: Path) -> None:
    """The second epoch has no caches: it reads the rows of the features' own file, which a copy of the pack has not."""
    wanted = epochs(g, OnDemand(cache=None), 2)
    strategy = featstore.Packed(pack, cache=0.1)
    with Loader(g, strategy=strategy) as loader:
        pairs = list(zip(loader, loader, strict=True))
        assert loader.stats()["epochs_beside"] == 1
    found = [sorted((pair[k] for pair in pairs), key=lambda batch: batch.index) for k in range(2)]
    assert same(wanted, [*found[0], *found[1]])
    shutil.copytree(pack.path, tmp_path / "copy")
    with PackedGraph(tmp_path / "copy", memory="32MiB") as there, Loader(there, strategy=featstore.Packed(cache=0.1)) as loader:
        first = iter(loader)
        next(first)
        refuses(BusyError, "middle of an epoch", lambda: next(iter(loader)))
        del first


@pytest.mark.parametrize("policy", ["belady", "frequency", "degree"])
def test_errors_name_a_memory_that_suffices(graph: TypedArrays, g: Any, tmp_path: Path, policy: str) -> None:
    sample(g, tmp_path / "p").close()
    memory, n_refused = 64 << 10, 0
    while True:
        try:
            with featstore.open(g.path, memory=memory) as small:
                strategy = featstore.Packed(tmp_path / "p", cache=0.2, policy=policy)
                with Loader(small, strategy=strategy, prefetch=0) as loader:
                    for batch in loader:
                        check_batch(graph, batch, edges=True)
            break
        except BudgetError as error:
            assert error.needed is not None
            assert error.needed > memory
            memory, n_refused = error.needed, n_refused + 1
    assert 0 < n_refused <= 3


def test_an_epoch_goes_on_within_a_superbatch(g: Any, pack: Pack) -> None:
    """Plans of the batches before are run first: they leave the rows in the cache that later ones find there."""
    strategy = featstore.Packed(pack, cache=0.2, length=10)
    with Loader(g, strategy=strategy) as loader:
        whole = list(loader)
    with Loader(g, strategy=strategy) as loader:
        rest = iter(loader)
        first = [next(rest) for _ in range(4)]
        state = loader.state_dict()
        del rest
    with Loader(g, strategy=strategy) as loader:
        loader.load_state_dict(state)
        assert same(whole, first + list(loader))


def test_a_copy_without_the_dataset(g: Any, pack: Pack, tmp_path: Path) -> None:
    wanted = epochs(g, OnDemand(cache=None), 2)
    with Loader(g, strategy=featstore.Packed(pack, cache=0.1)):
        shutil.copytree(pack.path, tmp_path / "copy")
    with PackedGraph(tmp_path / "copy", memory="32MiB") as there:
        assert (there.node_types, there.edge_types) == (g.node_types, g.edge_types)
        assert there["paper"].num_nodes == 1500
        assert {"paper/x", "author/x", "institution/x"} <= {*there.features}
        assert there.features["author/x"].shape == (750, 16)
        assert torch.equal(there["paper"].node_data["y"], g["paper"].node_data["y"])
        with pytest.raises(FileNotFoundError, match="not in the pack"):
            _ = there["author"].features["x"][[1]]
        refuses(KeyError, "no node type 'venue'", lambda: there["venue"])
        assert same(wanted, epochs(there, featstore.Packed(cache=0.1), 2))
        for edge_features in ("w", {("paper", "cites", "paper"): "w"}):
            with pytest.raises(ValueError, match="a pack has no rows of edges"):
                Loader(there, strategy="packed", edge_features=edge_features)


def test_edge_features_come_from_the_dataset(g: Any, graph: TypedArrays, pack: Pack) -> None:
    found = epochs(g, featstore.Packed(pack, cache=0.1), 1, edge_features="w")
    for batch in found:
        check_batch(graph, batch, edges=True)
        assert list(batch.edge_features["w"][0]) == [("paper", "cites", "paper")]
    assert same(found, epochs(g, OnDemand(cache=None), 1, edge_features="w"))


def test_a_pack_says_its_types(g: Any, pack: Pack) -> None:
    assert pack.types == g.types
    assert pack.seed_type == "paper"
    assert pack.n_hops == 2
    record = pack.record
    assert (record["format"], record["fanouts"]) == (2, None)
    assert record["fanouts_of_types"] == {",".join(key): [5, 5] for key in g.edge_types}
    assert describe_pack(pack)["hops"] == 2


def test_a_pack_of_one_type_is_as_before(tmp_path: Path) -> None:
    indptr, indices = np.array([0, 1, 2]), np.array([1, 0])
    x = np.eye(2, dtype=np.float32)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, {"x": x}, progress=False) as g:
        with featstore.sample_offline(g, NeighborSampler(g, [1]), [0, 1], 1, path=tmp_path / "p", progress=False) as pack:
            Loader(g, strategy=featstore.Packed(pack, cache=0.5)).close()
            assert pack.record["format"] == 1
            assert pack.types.is_one
            assert pack.seed_type is None
            assert not {"node_types", "seed_type", "num_edges"} & {*pack.record}
            (layout,) = find_layouts(pack)
            assert layout.rows is None
            assert "types" not in read_record(f"{pack.file(layout.name)}/layout", "layout")


def test_sizes_are_of_the_columns_rows(g: Any, tmp_path: Path) -> None:
    """Papers' years are 1,500 rows, ``x`` is of all 2,325 nodes, and of these the column has the rows of all three types."""
    with sample(g, tmp_path / "p") as pack:
        for features, n in ("x", N_COLUMN), ({"paper": "year"}, 1500), ({"author": "x"}, N_COLUMN):
            before = {each.name for each in find_layouts(pack)}
            Loader(g, strategy=featstore.Packed(pack, cache=0.1, policy="frequency"), features=features).close()
            (made,) = [each for each in find_layouts(pack) if each.name not in before]
            assert made.capacity == round(0.1 * n)
            assert made.rows is not None
            assert made.rows.n == n


@pytest.mark.parametrize("policy", ["belady", "frequency", "degree"])
@pytest.mark.parametrize("features", ["x", {"paper": "year"}, {"paper": "x"}])
def test_estimates(g: Any, tmp_path: Path, policy: str, features: Any) -> None:
    sampler, packed = NeighborSampler(g, [5, 5], edges=True), featstore.Packed(cache=0.1, policy=policy)
    asked: dict[str, Any] = {"features": features, "packed": packed}
    expected = estimate_pack(g, sampler, SEEDS, 50, 2, labels=["paper/y"], **asked)
    with sample(g, tmp_path / "p") as pack:
        assert abs(expected.samples_bytes / (tmp_path / "p" / "samples").stat().st_size - 1) < 0.1
        later = estimate_layout(g, pack, labels=["paper/y"], **asked)
        Loader(g, strategy=featstore.Packed(pack, cache=0.1, policy=policy), features=features).close()
        (made,) = find_layouts(pack)
        n_bytes = layout_bytes(pack.file(made.name))
        for each in expected, later:
            assert 0.6 * n_bytes < (each.layout_bytes or 0) < 1.3 * n_bytes
        assert estimate_layout(g, pack, labels=["paper/y"], **asked).total_bytes == 0


def test_batches_without_features(g: Any, pack: Pack) -> None:
    for strategy in (featstore.Packed(pack), Auto(pack=pack)):
        assert same(epochs(g, strategy, 1, features=[]), epochs(g, OnDemand(), 1, features=[]))


def test_seeds_of_another_type(g: Any, graph: TypedArrays, tmp_path: Path) -> None:
    mask = np.zeros(750, bool)
    mask[5:700:7] = True
    sampler = NeighborSampler(g, {("paper", "rev_writes", "author"): [3]})
    with featstore.sample_offline(g, sampler, ("author", mask), 20, path=tmp_path / "p", progress=False) as pack:
        with Loader(g, strategy=featstore.Packed(pack, cache=0.1)) as loader:
            found = list(loader)
        assert pack.seed_type == "author"
    for batch in found:
        check_batch(graph, batch, edges=False)
        assert batch.seed_type == "author"
        assert len(batch.y) == len(batch.seeds)
    assert sorted(torch.cat([batch.seeds for batch in found]).tolist()) == np.flatnonzero(mask).tolist()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"seeds": np.arange(3)}, TypeError, r"\(type, ids\)"),
        ({"seeds": None}, TypeError, r"\(type, ids\)"),
        ({"seeds": ("venue", [1])}, ValueError, "no node type 'venue'"),
        ({"seeds": ("author", [750])}, IndexError, "seed 750"),
        ({"seeds": ("author", [7, 7])}, ValueError, "must be distinct"),
        ({"seeds": ("author", featstore.RandomBatches(torch.arange(9), 3))}, ValueError, "batch_size goes with ids"),
        ({"sampler": lambda seeds: None}, NotImplementedError, "several types of edges"),
        ({"sampler": [1, 2]}, NotImplementedError, "several types of edges"),
        ({"batch_size": None}, ValueError, "batch_size"),
    ],
)
def test_arguments_that_do_not_fit(g: Any, tmp_path: Path, change: dict[str, Any], error: Any, text: str) -> None:
    given = {"sampler": NeighborSampler(g, [2]), "seeds": ("paper", np.arange(9)), "batch_size": 3, **change}
    refuses(error, text, lambda: featstore.sample_offline(g, **given, path=tmp_path / "p", progress=False))
    assert not (tmp_path / "p").exists()
    if change.keys() & {"seeds", "sampler"} and change.get("seeds", 1) is not None:
        refuses(
            error if "sampler" not in change or callable(change["sampler"]) else ValueError, "", lambda: estimate_pack(g, **given)
        )


def test_loaders_of_a_pack_take_no_seeds(g: Any, pack: Pack) -> None:
    with pytest.raises(ValueError, match="takes no sampler and no seeds"):
        Loader(g, NeighborSampler(g, [2]), ("paper", [1]), strategy=featstore.Packed(pack, cache=0.1))
    with pytest.raises(ValueError, match="needs a sampler and seeds"):
        Loader(g, NeighborSampler(g, [2]), strategy="ondemand")
    with pytest.raises(ValueError, match="beside the seeds"):
        Loader(g, strategy=featstore.Packed(pack, cache=0.1), labels=np.arange(500))


@pytest.mark.parametrize("make", [featstore.Packed, Auto])
def test_packs_of_other_graphs(g: Any, pack: Pack, tmp_path: Path, make: Any) -> None:
    indptr, indices = np.array([0, 1, 2]), np.array([1, 0])
    x = np.eye(2, dtype=np.float32)
    strange = shared(1)
    with featstore.OutOfCoreGraph.create(tmp_path / "one", indptr, indices, {"x": x}, progress=False) as one:
        with featstore.sample_offline(one, NeighborSampler(one, [1]), [0, 1], 1, path=tmp_path / "p", progress=False) as other:
            refuses(StaleError, "another graph", lambda: Loader(g, strategy=make(pack=other, cache=0.5)))
        refuses(StaleError, "another graph", lambda: Loader(one, strategy=make(pack=pack, cache=0.5)))
    with strange.create(tmp_path / "strange") as there:
        refuses(StaleError, "another graph", lambda: Loader(there, strategy=make(pack=pack, cache=0.5)))


# -- damage and hostile files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> tuple[Path, list[bytes]]:
    """A pack with layouts of two columns, and all that it delivers."""
    folder = tmp_path_factory.mktemp("whole")
    with academic_with_z().create(folder / "g", memory="64MiB") as g:
        with featstore.sample_offline(
            g, NeighborSampler(g, [3, 2], edges=True), ("paper", np.arange(0, 300, 3)), 10, 2, folder / "p", progress=False
        ) as pack:
            for features, options in ASKED:
                Loader(g, strategy=featstore.Packed(pack, **options), features=features).close()
    return folder / "p", delivered(folder / "p")


ASKED: list[tuple[Any, dict[str, Any]]] = [
    ("x", {"cache": 0.2, "length": 3}),
    ({"author": "z"}, {"cache": 0.05, "policy": "frequency", "disk": "30x"}),
]


def academic_with_z() -> TypedArrays:
    return academic(papers=300).draw("x", 5, np.float16, institution=16).draw("z", 6, author=9)


def delivered(pack: Path) -> list[bytes]:
    found: list[bytes] = []
    with PackedGraph(pack, memory="64MB") as g:
        for features, options in ASKED:
            strategy = featstore.Packed(policy=options.get("policy", "belady"))
            with Loader(g, strategy=strategy, features=features, shuffle=False, prefetch=0) as loader:
                found += [each.numpy().tobytes() for batch in loader for each in tensors(batch)]
    return found


def verify(pack: Path) -> None:
    with featstore.Pack(pack) as opened:
        assert opened.verify(progress=False)["others"] == []


def test_what_stands_in_records(whole: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    sample_records(*whole, tmp_path, 60, (verify, delivered))


@pytest.mark.stress
def test_all_that_may_stand_in_records(whole: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    sample_records(*whole, tmp_path, 10**6, (verify, delivered))


@pytest.mark.parametrize("each", [6, pytest.param(200, marks=pytest.mark.stress)])
def test_what_stands_in_tables(whole: tuple[Path, list[bytes]], tmp_path: Path, each: int) -> None:
    sample_tables(whole[0], tmp_path, each, (verify, delivered))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed_type": "venue"}, "no type of nodes"),
        ({"seed_type": "author"}, "not of type 'author'"),
        ({"num_edges": 7}, "cannot be used"),
        ({"node_types": [["paper", 450], ["author", 15]]}, "cannot be used"),
        ({"node_types": [["author", 300], ["paper", 150], ["institution", 15]]}, "not of type 'paper'|are not parts of"),
        ({"edge_types": [["author", "writes", "paper", 4500]]}, "nodes were expected"),
        ({"edge_types": [["paper", name, "paper", 1500] for name in "abc"]}, "8 blocks, for 3 types of edges"),
    ],
)
def test_records_that_contradict_the_samples(whole: Any, tmp_path: Path, change: dict[str, Any], text: str) -> None:
    shutil.copytree(whole[0], tmp_path / "p")
    record = read_record(str(tmp_path / "p" / "pack"), "pack")
    (tmp_path / "p" / "pack").unlink()
    write_record(str(tmp_path / "p" / "pack"), "pack", {**record, **change})
    with pytest.raises(CorruptionError, match=text):
        verify(tmp_path / "p")


def test_a_later_release(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "p")
    record = read_record(str(tmp_path / "p" / "pack"), "pack")
    (tmp_path / "p" / "pack").unlink()
    write_record(str(tmp_path / "p" / "pack"), "pack", {**record, "format": 3})
    with pytest.raises(VersionError, match="pack format 3; this release reads up to 2"):
        Pack(tmp_path / "p")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sources", "a source of"),
        ("destinations", "a destination of"),
        ("numbers", "a number of another type"),
        ("sizes", "a hop"),
    ],
)
def test_verify_finds_edges_of_other_types(whole: Any, tmp_path: Path, what: str, text: str) -> None:
    """Edges change places between two types: each batch is one of a graph of one type, and none of this graph."""
    shutil.copytree(whole[0], tmp_path / "p")
    arrays, file_id = arrays_of(tmp_path / "p" / "samples")
    n_blocks = int(arrays[0][3])
    begins = [2 + 3 * k for k in range(n_blocks)]  # of each block's counts, sources and numbers
    edge = next(k for k in range(n_blocks - 4, n_blocks) if len(arrays[begins[k] + 1]))  # of the seeds' own hop
    counts, sources, numbers = (arrays[begins[edge] + i] for i in range(3))
    if what == "sources":
        sources[0] = int(np.flatnonzero((arrays[1] >= 300) != (arrays[1][sources[0]] >= 300))[0])
    elif what == "destinations":  # to a block of the outer hop that goes to authors
        at = begins[1]
        first = int(np.flatnonzero(arrays[1] < 300)[0])
        arrays[at], arrays[at + 1] = np.zeros_like(arrays[at]), np.array([first], np.int32)
        arrays[at][first], arrays[at + 2] = 1, np.array([9000 // 10], np.int64)
    elif what == "numbers":
        numbers[0] = numbers[0] + 10**6
    else:
        arrays[0][5 + 2 * (n_blocks - 1) + 1] += 0
        arrays[0][5 + 2 * 1] += 1
    del counts
    forge(tmp_path / "p" / "samples", arrays, file_id)
    SectionFile(tmp_path / "p" / "samples", "samples").close()
    with pytest.raises(CorruptionError, match=text):
        verify(tmp_path / "p")
