"""Packs of features whose types do not share rows: a layout each, and the batches of other strategies, bit for bit."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore import Auto, HeteroMiniBatch, Loader, NeighborSampler, OnDemand, PackedGraph, Superbatch
from featstore.cli.packs import describe_pack
from featstore.errors import BudgetError
from featstore.pack.layout import Layout, LayoutOptions, find_layouts, layout_bytes
from featstore.pack.offline import Pack
from featstore.strategies.packsize import estimate_layout, estimate_pack
from tests.load.test_heterobatch import same
from tests.support.pinned import pin_machine
from tests.support.refusing import refuses
from tests.support.sampled import covering
from tests.support.typed import TypedArrays, academic, check_batch, random_types

pytestmark = pytest.mark.shares_resources
SEEDS = ("paper", np.arange(0, 1500, 3))
MIXED = ["x", "z", "year"]
WIDTHS = {"paper/x": 32, "author/x": 96, "paper,institution/z": 36, "paper/year": 64}  # bytes of a row
N_OF = {"paper/x": 1500, "author/x": 750, "paper,institution/z": 1575, "paper/year": 1500}


def drawn_graph() -> TypedArrays:
    """Draw a graph in which papers' ``x`` and ``year`` have the same rows, authors' ``x`` and ``z`` of two types have others."""
    graph, rng = academic(papers=1500), np.random.default_rng(3)
    graph.features["author"] = {"x": rng.standard_normal((750, 24)).astype(np.float32)}
    graph.features["paper"] |= {"year": rng.integers(0, 99, (1500, 8)), "z": rng.standard_normal((1500, 9)).astype(np.float32)}
    graph.features["institution"] = {"z": rng.standard_normal((75, 9)).astype(np.float32)}
    graph.edge_features = {("paper", "cites", "paper"): {"w": rng.standard_normal((12000, 2)).astype(np.float32)}}
    return graph


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    return drawn_graph()


FORMS = ["csc", "chunked"]


@pytest.fixture(scope="module", params=FORMS)
def g(tmp_path_factory: Any, graph: TypedArrays, request: Any) -> Any:
    options = {"topology": "chunked", "chunk_bytes": "4KiB"} if request.param == "chunked" else {}
    with graph.create(tmp_path_factory.mktemp("mag") / "mag", memory="64MiB", **options) as opened:
        assert {name: len(store) for name, store in opened.columns.items()} == N_OF
        yield opened


def sample(g: Any, path: Path, n_epochs: int = 2, **options: Any) -> Pack:
    return featstore.sample_offline(
        g, NeighborSampler(g, [5, 5], edges=True), SEEDS, 50, n_epochs, path, progress=False, **options
    )


@pytest.fixture(scope="module")
def pack(g: Any, tmp_path_factory: Any) -> Any:
    """A pack without layouts of all features; tests may add layouts of some."""
    with sample(g, tmp_path_factory.mktemp("packs") / "p") as made:
        yield made


def run(g: Any, strategy: Any, n: int = 2, **options: Any) -> tuple[list[HeteroMiniBatch], dict[str, Any]]:
    """Run epochs, in the order of (epoch, index); return the batches on the CPU, and the loader's counts."""
    is_of_pack = isinstance(g, PackedGraph) or getattr(strategy, "pack", None) is not None
    given = () if is_of_pack else (NeighborSampler(g, [5, 5], edges=True), SEEDS, 50)
    with Loader(g, *given, strategy=strategy, **{"features": MIXED, **options}) as loader:
        found = [batch for _ in range(n) for batch in sorted(loader, key=lambda each: each.index)]
        return [batch.to("cpu") for batch in found], loader.stats()


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a machine that does not change."""
    pin_machine(monkeypatch)


@pytest.fixture(scope="module")
def wanted(g: Any) -> list[HeteroMiniBatch]:
    return run(g, OnDemand(cache=None))[0]


def bytes_of(pack: Pack) -> int:
    return sum(layout_bytes(pack.file(each.name)) for each in find_layouts(pack))


STRATEGIES: dict[str, Callable[[Pack], Any]] = {
    "nothing in memory": lambda pack: featstore.Packed(pack, cache=0),
    "belady": lambda pack: featstore.Packed(pack, cache=0.1),
    "all": lambda pack: featstore.Packed(pack, cache=1.0),
    "short": lambda pack: featstore.Packed(pack, cache="60KiB", length=3),
    "frequency": lambda pack: featstore.Packed(pack, cache=0.1, policy="frequency"),
    "degree": lambda pack: featstore.Packed(pack, cache="30KB", policy="degree"),
    "segments": lambda pack: featstore.Packed(pack, cache=0.02, policy="frequency", disk="8x"),
    "chosen": lambda pack: featstore.Packed(pack),
    "auto": lambda pack: Auto(pack=pack),
    "on a disk": lambda pack: Auto(pack=pack, disk="10x", cache=0.05),
}


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize(("name", "on_device", "g"), covering(STRATEGIES, [None, "15KB"], FORMS), indirect=["g"])
def test_batches_are_those_of_the_graph(
    g: Any, graph: TypedArrays, tmp_path: Path, name: str, on_device: Any, wanted: list[HeteroMiniBatch], device: str
) -> None:
    with sample(g, tmp_path / "p") as pack:
        strategy = STRATEGIES[name](pack)
        found, stats = run(g, strategy, device=device, device_cache=on_device)
        for batch in found:
            check_batch(graph, batch, edges=True)
        assert same(found, wanted)
        hits = stats["hits"]
        n_rows = sum(len(rows) for batch in found for of_types in batch.features.values() for rows in of_types.values())
        assert stats["rows"] == sum(hits.values()) == n_rows
        if isinstance(strategy, featstore.Packed):
            made = {layout["name"]: layout["made"] for layout in stats["layouts"]}
            assert made == dict.fromkeys((each.name for each in find_layouts(pack)), True)
            assert len(made) == 3
            assert not hits["base"]
            assert hits["packed"]
            assert bool(hits.get("disk_cache")) == (name == "segments")
            assert bool(hits.get("device")) == (on_device is not None)
            assert bool(hits["host"]) == (name != "nothing in memory")
        if name in ("belady", "auto") and on_device is None:
            assert stats.get("auto", {"taken": {"strategy": "packed"}})["taken"]["strategy"] == "packed"
        assert pack.verify(progress=False)["others"] == []
        held = g.memory_report()
        assert not {"device cache", "device map", "layout tables"} & held.keys()
        again, stats = run(g, strategy, 3, device=device, device_cache=on_device)
        assert same(again[: len(wanted)], wanted)
        assert same(again[len(wanted) :], wanted[: len(wanted) // 2])  # epoch 2 is the pack's epoch 0
        assert not any(layout["made"] for layout in stats.get("layouts", []))


def test_bytes_are_those_of_the_rows(g: Any, pack: Pack) -> None:
    """Of a static cache, every row that is neither in memory nor on the device is read once from its extents."""
    for on_device in (None, 0.1):
        strategy = featstore.Packed(pack, cache=0.1, policy="degree")
        with Loader(g, strategy=strategy, features=MIXED, device_cache=on_device) as loader:
            first, before = list(loader), loader.stats()
            list(loader)
            stats = loader.stats()
        tables = [in_extents(g, pack, each) for each in find_layouts(pack) if bool(each.device_rows) == bool(on_device)]
        assert len(tables) == 3
        asked = sum(n_rows * width for n_rows, width in tables)
        assert stats["bytes_requested"] - before["bytes_requested"] == asked
        assert stats["bytes_requested"] - before["bytes_requested"] <= stats["bytes_read"] - before["bytes_read"]
        assert len(first) == 10


def in_extents(g: Any, pack: Pack, options: LayoutOptions) -> tuple[int, int]:
    """Count the rows in the extents of a pack's second epoch, and the bytes of a row."""
    layout = Layout(pack, options, g.reader)
    try:
        return int(layout.tables.n_packed[pack.n_batches :].sum()), sum(WIDTHS[name] for name in options.features)
    finally:
        layout.close()


def capacities(g: Any) -> dict[str, int]:
    return {name: 0 if store.cache is None else store.cache.capacity for name, store in g.columns.items()}


@pytest.mark.parametrize(("size", "g"), covering([0.1, "20KiB", "200KiB", 1.0], FORMS), indirect=["g"])
def test_a_size_is_divided_by_shares_of_the_rows(g: Any, tmp_path: Path, size: Any) -> None:
    """Of any size, so that it names the same layouts whatever batch is measured; other strategies divide bytes by one."""
    with sample(g, tmp_path / "p", 1) as pack:
        Loader(g, strategy=featstore.Packed(pack, cache=size), features=MIXED).close()
        found = {name: each.capacity for each in find_layouts(pack) for name in each.features}
        assert capacities(g) == found
        with Loader(g, NeighborSampler(g, [5, 5], edges=True), SEEDS, 50, strategy=Superbatch(cache=size), features=MIXED):
            assert (capacities(g) == found) == isinstance(size, float)
        with Loader(g, strategy=featstore.Packed(pack, cache=0, policy="degree"), features=MIXED, device_cache=size) as loader:
            held = loader.stats()["device_cache"]
        on_device = {name: each.device_rows for each in find_layouts(pack) if each.policy == "degree" for name in each.features}
        assert held["bytes"] == sum(n * WIDTHS[name] for name, n in on_device.items())
        shares = [n / N_OF[name] for name, n in on_device.items()]
        assert max(shares) - min(shares) < 2 / 750
        if isinstance(size, str):
            assert held["bytes"] <= featstore.config.parse_size(size)
        else:
            assert all(n == round(size * N_OF[name]) for name, n in on_device.items())


def test_layouts_of_a_column_are_those_of_its_own_loader(g: Any, tmp_path: Path, wanted: list[HeteroMiniBatch]) -> None:
    """A layout that was made for the features of one column is run with those of others."""
    with sample(g, tmp_path / "p") as pack:
        strategy = featstore.Packed(pack, cache=0.1)
        (alone,) = (run(g, strategy, 1, features={"author": "x"})[1]["layout"],)
        assert alone["made"]
        found, stats = run(g, strategy)
        assert same(found, wanted)
        assert {each["name"]: each["made"] for each in stats["layouts"]}.pop(alone["name"]) is False
        assert sum(each["made"] for each in stats["layouts"]) == 2
        found, stats = run(g, strategy, features={"author": "x"})
        assert stats["layout"] == {"name": alone["name"], "made": False}
        described = describe_pack(pack)["layouts"]
        assert sorted(each["features"] for each in described) == [
            ["author/x"],
            ["paper/x", "paper/year"],
            ["paper/z", "institution/z"],
        ]


def test_a_pack_says_which_layouts_it_has(g: Any, tmp_path: Path, wanted: list[HeteroMiniBatch]) -> None:
    """Without ``cache=`` there must be one layout of each column, and all must have planned as many batches together."""
    with sample(g, tmp_path / "p") as pack:
        run(g, featstore.Packed(pack, cache=0.1, length=4), 1, features={"author": "x"})
        refuses(ValueError, r"0 layouts of \['paper/x', 'paper/year'\]", lambda: run(g, featstore.Packed(pack)))
        run(g, featstore.Packed(pack, cache=0.2, length=4))
        refuses(ValueError, r"2 layouts of \['author/x'\]", lambda: run(g, featstore.Packed(pack)))
        assert same(run(g, featstore.Packed(pack, cache="auto", length=4))[0], wanted)
        assert len(find_layouts(pack)) == 4
    with sample(g, tmp_path / "q") as pack:
        run(g, featstore.Packed(pack, cache=0.1, length=4), 1, features={"author": "x"})
        run(g, featstore.Packed(pack, cache=0.1, length=3), 1, features={"paper": ["x", "year"]})
        refuses(
            ValueError,
            "layouts that plan 3, 4 batches together",
            lambda: run(g, featstore.Packed(pack), features={"paper": ["x", "year"], "author": "x"}),
        )


def test_a_run_begins_anywhere(g: Any, pack: Pack) -> None:
    strategy = featstore.Packed(pack, cache=0.1, length=4)
    with Loader(g, strategy=strategy, features=MIXED) as loader:
        whole = list(loader)
    for n in (1, 5):
        with Loader(g, strategy=strategy, features=MIXED) as loader:
            rest = iter(loader)
            first = [next(rest) for _ in range(n)]
            state = loader.state_dict()
            del rest
        with Loader(g, strategy=strategy, features=MIXED) as loader:
            loader.load_state_dict(state)
            assert same(whole, first + list(loader))


@pytest.mark.parametrize("policy", ["belady", "frequency"])
def test_a_copy_without_the_dataset(g: Any, pack: Pack, tmp_path: Path, policy: str, wanted: list[HeteroMiniBatch]) -> None:
    strategy = featstore.Packed(cache=0.15, policy=policy)
    with Loader(g, strategy=featstore.Packed(pack, cache=0.15, policy=policy), features=MIXED):
        shutil.copytree(pack.path, tmp_path / "copy")
    with PackedGraph(tmp_path / "copy", memory="32MiB") as there:
        found, stats = run(there, strategy)
        assert same(found, wanted)
        assert stats["hits"]["host"] > 0
        assert not any(each["made"] for each in stats["layouts"])


def test_the_disk_is_of_all_layouts(g: Any, tmp_path: Path, wanted: list[HeteroMiniBatch]) -> None:
    """A planned policy's layouts need what they need, together; a static one's share rows where an extent each takes more."""
    with sample(g, tmp_path / "p") as pack:
        run(g, featstore.Packed(pack, cache=0.1), 1)
        whole = bytes_of(pack)
    with sample(g, tmp_path / "q") as pack:
        with pytest.raises(OSError, match="disk") as caught:
            run(g, featstore.Packed(pack, cache=0.1, disk=whole // 2))
        assert caught.value.errno == errno.ENOSPC
        n_there = len(find_layouts(pack))
        assert n_there < 3  # those that had room are kept, and used when there is more disk
        found, stats = run(g, featstore.Packed(pack, cache=0.1, disk=whole + 40_000))
        assert same(found, wanted)
        assert sum(each["made"] for each in stats["layouts"]) == 3 - n_there
        assert bytes_of(pack) == whole
        for options in ({"cache": 0.1}, {}):
            refuses(OSError, "made with more disk", lambda more=options: run(g, featstore.Packed(pack, disk=whole - 1, **more)))
        assert same(run(g, featstore.Packed(pack, disk=whole))[0], wanted)
    with sample(g, tmp_path / "r") as pack:
        run(g, featstore.Packed(pack, cache=0.02, policy="degree"), 1)
        whole = bytes_of(pack)
        for part in (0.8, 0.5):
            found, stats = run(g, featstore.Packed(pack, cache=0.02, policy="degree", disk=int(part * whole)))
            assert same(found, wanted)
            assert stats["hits"]["disk_cache"] > 0
            run_ones = [pack.file(each["name"]) for each in stats["layouts"]]
            assert sum(map(layout_bytes, run_ones)) <= part * whole


@pytest.mark.usefixtures("rates")
def test_the_largest_layouts_that_fit_are_run(g: Any, tmp_path: Path, wanted: list[HeteroMiniBatch]) -> None:
    """``"auto"`` takes all layouts of a size together, as memory allows, and makes none where there are some."""
    with sample(g, tmp_path / "p") as pack:
        for size in (0.05, 0.3):
            run(g, featstore.Packed(pack, cache=size), 1)
        for memory, share in (("64MiB", 0.3), (None, 0.05)):
            if memory is None:  # what is left holds the small ones alone
                held = g.budget.reserve("others", g.budget.available - 1_000_000)
            try:
                found, stats = run(g, featstore.Packed(pack, cache="auto"))
            finally:
                if memory is None:
                    held.release()
            assert same(found, wanted)
            assert not any(each["made"] for each in stats["layouts"])
            names = {each["name"] for each in stats["layouts"]}
            rows = {name: each.capacity for each in find_layouts(pack) if each.name in names for name in each.features}
            if memory is not None:
                assert rows == {name: round(share * n) for name, n in N_OF.items()}
        found, stats = run(g, Auto(pack=pack))
        assert same(found, wanted)
        assert stats["auto"]["taken"]["strategy"] == "packed"
        assert not any(each["made"] for each in stats["layouts"])
        assert len(find_layouts(pack)) == 6


def test_too_little_memory_is_said_before(g: Any, pack: Pack) -> None:
    g.cache_neighbors(0)  # lists that an earlier test's loader kept would be given back
    held = g.budget.reserve("others", g.budget.available - 200_000)
    with held, pytest.raises(BudgetError) as caught:
        run(g, featstore.Packed(pack, cache=0.25))
    assert caught.value.needed is not None
    assert caught.value.needed > g.budget.total


@pytest.mark.parametrize(("policy", "on_device"), covering(["belady", "frequency", "degree"], [None, 0.1]))
def test_estimates(g: Any, tmp_path: Path, policy: str, on_device: Any) -> None:
    sampler, packed = NeighborSampler(g, [5, 5], edges=True), featstore.Packed(cache=0.1, policy=policy)
    asked: dict[str, Any] = {"features": MIXED, "packed": packed, "device_cache": on_device}
    expected = estimate_pack(g, sampler, SEEDS, 50, 2, labels=["paper/y"], **asked)
    assert expected.features_bytes == sum(N_OF[name] * width for name, width in WIDTHS.items())
    with sample(g, tmp_path / "p") as pack:
        later = estimate_layout(g, pack, labels=["paper/y"], **asked)
        strategy = featstore.Packed(pack, cache=0.1, policy=policy)
        Loader(g, strategy=strategy, features={"author": "x"}, device_cache=on_device).close()
        rest = estimate_layout(g, pack, labels=["paper/y"], **asked)
        Loader(g, strategy=strategy, features=MIXED, device_cache=on_device).close()
        n_bytes = bytes_of(pack)
        for each in expected, later:
            assert 0.6 * n_bytes < (each.layout_bytes or 0) < 1.7 * n_bytes
        assert 0 < (rest.layout_bytes or 0) < (later.layout_bytes or 0)
        assert estimate_layout(g, pack, labels=["paper/y"], **asked).total_bytes == 0


def test_types_without_nodes_and_features_without_rows(tmp_path: Path) -> None:
    """Columns of no rows have no layout; some batches need no row of a column."""
    for seed in range(8):
        graph, rng = random_types(seed, most=20), np.random.default_rng(seed)
        for width, (kind, n) in enumerate(graph.n.items()):
            graph.features[kind] = {"x": rng.standard_normal((n, 2 + width)).astype(np.float32)}
        with graph.create(tmp_path / f"g{seed}") as g:
            sampler, seeds = NeighborSampler(g, [3, 2], edges=True), ("t0", np.arange(graph.n["t0"]))
            with Loader(g, sampler, seeds, 2, strategy=OnDemand(cache=None)) as loader:
                wanted = list(loader)
            with featstore.sample_offline(g, sampler, seeds, 2, path=tmp_path / f"p{seed}", progress=False) as pack:
                for cache in (0.3, 0, "auto"):
                    with Loader(g, strategy=featstore.Packed(pack, cache=cache)) as loader:
                        found = list(loader)
                    for batch in found:
                        check_batch(graph, batch, edges=True)
                    assert same(found, wanted)
                assert pack.verify(progress=False)["others"] == []


@pytest.mark.parametrize("on_device", [None, 0.1])
def test_a_subgraph_for_each_seed(g: Any, tmp_path: Path, on_device: Any) -> None:
    """Rows are planned and gathered once, and delivered for each copy of a node."""
    sampler = NeighborSampler(g, [5, 5], edges=True, disjoint=True)
    with Loader(g, sampler, SEEDS, 50, features=MIXED, strategy=OnDemand(cache=None)) as loader:
        plain = list(loader)
    with featstore.sample_offline(g, sampler, SEEDS, 50, path=tmp_path / "p", progress=False) as pack:
        found, stats = run(g, featstore.Packed(pack, cache=0.1), 1, device_cache=on_device)
        assert same(found, plain)
        assert not stats["hits"]["base"]


def test_edge_features_come_from_the_dataset(g: Any, pack: Pack) -> None:
    found, _ = run(g, featstore.Packed(pack, cache=0.1), 1, edge_features="w")
    assert same(found, run(g, OnDemand(cache=None), 1, edge_features="w")[0])


def test_damage_of_one_layout_is_found(g: Any, tmp_path: Path) -> None:
    with sample(g, tmp_path / "p") as pack:
        run(g, featstore.Packed(pack, cache=0.1), 1)
        layout = next(each for each in find_layouts(pack) if each.features == ("author/x",))
        (path,) = Path(pack.file(layout.name)).glob("extents.*.rows")
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 255]))
        with pytest.raises(featstore.CorruptionError, match="extents"):
            pack.verify(progress=False)
        with pytest.raises(featstore.CorruptionError):
            run(g, featstore.Packed(pack, cache=0.1))
