"""What graphs, stores, types and packs show of themselves: fields, bytes, caches, memory; nothing is read for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import featstore
from featstore.config import format_size
from tests.support.typed import academic


def test_a_graph(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        lines = [line.split() for line in repr(g).splitlines()]
        assert lines[1] == ["dtype", "shape", "bytes", "cache"]
        shown = {line[0]: line[1:] for line in lines[2:]}
        assert shown["features['x']"] == ["float32", "[1000,", "25]", *format_size(small.x.nbytes).split()]
        assert shown["features['h']"] == ["float16", "[1000,", "300]", *format_size(small.h.nbytes).split()]
        assert shown["node_data['y']"] == ["int64", "[1000]", *format_size(8000).split()]
        assert f"of {format_size(64 << 20)} held" in repr(g)
        g.cache("x", budget="50KB", policy="lru")
        for _ in range(2):
            g.features["x"][:100]
        hits = "lru, 100 of 1,000 rows, "
        assert hits in repr(g)
        assert "50.0 % hits" in repr(g)
        assert hits in g._repr_html_()
        assert hits in repr(g.features["x"])
        g.cache_neighbors("1MiB")
        assert "neighbour lists in memory: NeighborCache(" in repr(g)
        counted = g.features["x"].stats()["reads"], len(g.memory_report())
        for shown_object in (g, g.features, g.node_data, *g.features.values()):
            repr(shown_object)
            assert shown_object._repr_html_().startswith("<div>")
        assert (g.features["x"].stats()["reads"], len(g.memory_report())) == counted
        store = g.features["x"]
    for closed in (g, store):
        assert repr(closed).endswith("closed)")
        assert "closed" in closed._repr_html_()
        assert "\n" not in repr(closed)


def test_a_store(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        x = g.features["x"]
        lines = dict(line.split(maxsplit=1) for line in repr(x).splitlines()[1:])
        assert lines["bytes"] == f"{format_size(x.nbytes)}, 100 B a row"
        assert lines["reads"] == x.stats()["mode"]
        assert lines["cache"] == "none"
        assert x.stats() == dict(x.stats())
        assert "rows_loaded" in repr(x.stats())
        assert "<td" in x.stats()._repr_html_()


def test_types(tmp_path: Path) -> None:
    with academic().create(tmp_path / "g") as g:
        paper, writes = g["paper"], g["author", "writes", "paper"]
        for shown in (g, paper):
            assert shown._repr_html_().count("<tr>") > 1, shown
        assert "num_edges=9000" in writes._repr_html_()
        assert "features[&#x27;x&#x27;]" in paper._repr_html_()
        assert "features['paper/x']" in repr(g)


def test_names_are_escaped(tmp_path: Path) -> None:
    features = {"<script>": np.zeros((3, 2), np.float32), "a&b": np.zeros((3, 1), np.float32)}
    none = np.empty(0, np.int64)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(4, np.int64), none, features, progress=False) as g:
        for page in (g._repr_html_(), g.features._repr_html_(), g.features["<script>"]._repr_html_()):
            assert "<script>" not in page
            assert "a&b" not in page


def test_objects_that_were_not_made() -> None:
    for kind in (featstore.OutOfCoreGraph, featstore.PackedGraph, featstore.FeatureStore, featstore.Loader, featstore.Pack):
        half = object.__new__(kind)
        assert "cannot be shown" in repr(half) or "not made" in repr(half)
        assert half._repr_html_()


def test_packs(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.sample_offline(g, sampler, small.train_idx, 50, path=tmp_path / "p") as pack:
            assert repr(pack) == f"Pack({str(tmp_path / 'p')!r}, epochs=1, batches={pack.n_batches})"
            assert "<td" in pack._repr_html_()
            with featstore.Loader(g, strategy=featstore.Packed(pack)) as loader:
                assert len(next(iter(loader)).seeds) == 50
                assert f"Pack({str(tmp_path / 'p')!r}" in repr(loader).splitlines()[0]
        assert repr(pack).endswith("closed)")
    with featstore.PackedGraph(tmp_path / "p", memory="64MiB") as packed:
        assert "features['x']" in repr(packed)
        assert "absent" in repr(packed.features["x"])
    assert repr(packed).endswith("closed)")


@pytest.mark.parametrize("make", ["NeighborSampler", "LaborSampler", "ShadowSampler", "LayerSampler", "EpochSampler"])
def test_samplers(small: SimpleNamespace, make: str) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = getattr(featstore, make)(g, [3, 2], seed=11)
        assert "seed=11" in repr(sampler)
        page = sampler._repr_html_()
        assert ">seed</td><td" in page
        assert ">11</td>" in page


def test_batches(small: SimpleNamespace) -> None:
    batches = featstore.RandomBatches(torch.arange(70), 20, seed=3)
    page = batches._repr_html_()
    for name, value in (("seeds", 70), ("batches", 4), ("batch_size", 20)):
        assert f">{name}</td>" in page
        assert f">{value}</td>" in page
