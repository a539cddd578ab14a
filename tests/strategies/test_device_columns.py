"""Rows on the device of features whose types do not share rows: a tier each, under every strategy; no batch differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import featstore
from featstore import Auto, HeteroMiniBatch, Loader, NeighborSampler, OnDemand, Superbatch
from featstore.errors import BudgetError
from featstore.strategies import devicefill
from featstore.strategies.devicecache import rows_of_columns
from featstore.strategies.devicefill import FilledLater
from tests.load.test_heterobatch import same
from tests.support.sampled import covering
from tests.support.typed import TypedArrays, academic

pytestmark = [
    pytest.mark.shares_resources,
    pytest.mark.filterwarnings("ignore:strategy '(streamed|auto)':featstore.PerformanceWarning"),
]
SEEDS = ("paper", np.arange(0, 1500, 3))
WIDTHS = {"paper/x": 32, "author/x": 96, "paper/year": 64}  # papers' features have the same rows
N_OF = {"paper/x": 1500, "author/x": 750, "paper/year": 1500}
STRATEGIES: dict[str, Any] = {
    "on demand": OnDemand(cache=None),
    "degree": OnDemand(cache=0.1, policy="degree"),
    "lru": OnDemand(cache=0.1, policy="lru"),
    "belady": Superbatch(cache=0.1, length=4),
    "fixed": Superbatch(cache=0.1, policy="degree", length=4),
    "ginex": featstore.Ginex(cache=0.1, length=4),
    "streamed": featstore.Streamed(cache=0.1, length=4),
    "auto": Auto(),
}


@pytest.fixture(scope="module")
def graph() -> TypedArrays:
    found, rng = academic(papers=1500), np.random.default_rng(3)
    found.features["author"] = {"x": rng.standard_normal((750, 24)).astype(np.float32)}
    found.features["paper"]["year"] = rng.integers(0, 99, (1500, 8))
    return found


FORMS = ["csc", "chunked"]


@pytest.fixture(scope="module", params=FORMS)
def g(tmp_path_factory: Any, graph: TypedArrays, request: Any) -> Any:
    options = {"topology": "chunked", "chunk_bytes": "4KiB"} if request.param == "chunked" else {}
    with graph.create(tmp_path_factory.mktemp("mag") / "mag", memory="64MiB", **options) as opened:
        yield opened


def loader(g: Any, strategy: Any, **options: Any) -> Loader:
    given = {"features": ["x", "year"], "labels": None, **options}
    return Loader(g, NeighborSampler(g, [5, 5], edges=True), SEEDS, 50, strategy=strategy, **given)


def ordered(batches: list[HeteroMiniBatch]) -> list[HeteroMiniBatch]:
    return [batch.to("cpu") for batch in sorted(batches, key=lambda each: each.index)]


@pytest.fixture(scope="module")
def wanted(g: Any) -> list[HeteroMiniBatch]:
    with loader(g, OnDemand(cache=None)) as made:
        return [batch for _ in range(2) for batch in ordered(list(made))]


def best(g: Any, n_rows: dict[str, int]) -> dict[str, Any]:
    """Find the nodes of highest degree of each type, by type."""
    degrees, found = g.short_degrees(), {}
    for kind, n in n_rows.items():
        of = g.types.nodes[kind]
        found[kind] = np.argsort(-degrees[of.first : of.stop].astype(np.int64), kind="stable")[:n]
    return found


def n_held(batches: list[HeteroMiniBatch], held: dict[str, Any]) -> int:
    """Count the rows of batches that a device holds, of papers two features."""
    times = {"paper": 2, "author": 1}
    return sum(times[kind] * int(np.isin(batch.input_ids[kind], rows).sum()) for batch in batches for kind, rows in held.items())


@pytest.mark.parametrize(("name", "g"), covering(STRATEGIES, FORMS), indirect=["g"])
def test_batches_whatever_the_device_holds(g: Any, name: str, wanted: list[HeteroMiniBatch], device: str) -> None:
    """No room for a row of papers, a share, and all rows."""
    for size, rows in (("100B", {"paper": 1}), (0.1, {"paper": 150, "author": 75}), ("1GiB", {"paper": 1500, "author": 750})):
        with loader(g, STRATEGIES[name], device=device, device_cache=size) as made:
            found = [batch for _ in range(2) for batch in ordered(list(made))]
            stats = made.stats()
        assert same(found, wanted)
        n_bytes = sum(n * {"paper": 96, "author": 96}[kind] for kind, n in rows.items())
        assert stats["device_cache"] == {"rows": sum(rows.values()), "bytes": n_bytes}
        assert stats["hits"]["device"] == n_held(found, best(g, rows))
        assert sum(stats["hits"].values()) == stats["rows"]
        if size == "1GiB":
            assert stats["hits"]["device"] == stats["rows"]
        assert not {"device cache", "device map"} & g.memory_report().keys()


@pytest.mark.parametrize("name", ["on demand", "degree", "fixed", "streamed", "auto"])
def test_tiers_that_are_filled_later(
    graph: TypedArrays, tmp_path: Any, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devicefill, "free_bytes", lambda *given: 100_000)
    graph.create(tmp_path / "g").close()
    with featstore.open(tmp_path / "g", memory="4MiB") as g:
        with loader(g, OnDemand(cache=None)) as made:
            plain = ordered(list(made))
        strategy = Auto(cache=0.1) if name == "auto" else STRATEGIES[name]
        with loader(g, strategy, device=device, device_cache=featstore.DeviceCache("auto", reserve=0)) as made:
            assert made.stats()["device_cache"]["why"] == "no step is done yet"
            batches = []
            for batch in made:
                batches.append(batch)
                if len(batches) == 2:
                    on_device = made._runner.context.on_device
                    assert isinstance(on_device, FilledLater)
                    tiers = on_device.join()
            assert same(ordered(batches), plain)
            assert [tier is not None for tier in tiers] == [True, True], made.stats()["device_cache"]
            shares = [len(tier) / n for tier, n in zip(tiers, (1500, 750), strict=True) if tier is not None]
            assert 0.3 < shares[0] < 0.6
            assert abs(shares[0] - shares[1]) < 2 / 750
            before = made.stats()["hits"].get("device", 0)
            del batch, batches
            found = ordered(list(made))
            rows = dict(zip(("paper", "author"), on_device.n_rows, strict=True))
            assert made.stats()["hits"]["device"] - before == n_held(found, best(g, rows))
            assert made.stats()["device_cache"] == {"rows": sum(on_device.n_rows), "bytes": on_device.nbytes}
        assert not {"device cache", "device map"} & g.memory_report().keys()


def test_what_does_not_fit(g: Any, device: str) -> None:
    with pytest.raises(BudgetError, match="a device cache of one row takes 96 bytes, not 90"):
        loader(g, OnDemand(), device=device, device_cache="90B")
    with featstore.open(g.path, memory="1MiB") as small:
        small.budget.total = small.budget.used + 20_000  # on a GPU the maps of rows do not fit
        with pytest.raises(BudgetError) as caught:
            loader(small, OnDemand(cache=None), device=device, device_cache=1.0)
        assert not {"device cache", "device map"} & small.memory_report().keys()
        assert (caught.value.needed or 0) > small.budget.total
        small.budget.total = caught.value.needed or 0
        with loader(small, OnDemand(cache=None), device=device, device_cache=1.0) as made:  # which is enough
            assert len(list(made)) == 10


def test_rows_of_columns() -> None:
    columns = [(1000, {"a": 8, "b": 24}), (100, {"c": 64}), (0, {"d": 4})]
    assert rows_of_columns(0.1, columns) == (100, 10, 0)
    assert rows_of_columns(1.0, columns) == (1000, 100, 0)
    assert rows_of_columns("38400B", columns) == (1000, 100, 0)
    assert rows_of_columns(19_200, columns) == (500, 50, 0)
    assert rows_of_columns(1 << 40, columns) == (1000, 100, 0)
    assert rows_of_columns(40, columns) == (1, 0, 0)
    assert rows_of_columns(0, columns) == (0, 0, 0)
    with pytest.raises(BudgetError, match="takes 32 bytes, not 31"):
        rows_of_columns(31, columns)
    assert rows_of_columns(64, columns[:1]) == (2,)
