"""The forms in which graphs, stores, types and packs show themselves: fields, bytes, caches, memory; nothing is read for it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.config import format_size
from featstore.display import MOST_ROWS, Shown
from featstore.graph import showing
from featstore.testing.faults import forked
from tests.support.typed import TypedArrays, academic


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
        assert re.search(r"^ +paper +3,000$", repr(g), re.MULTILINE)
        assert re.search(r"^ +author, writes, paper +9,000$", repr(g), re.MULTILINE)
        assert paper.features._repr_html_().startswith("<div><p><code>features of paper</code>")
        assert paper.node_data._repr_html_().startswith("<div><p><code>node data of paper</code>")
        assert "features[&#x27;x&#x27;]" in paper._repr_html_()
        assert "features['paper/x']" in repr(g)


def test_names_are_escaped(tmp_path: Path) -> None:
    features = {"<script>": np.zeros((3, 2), np.float32), "a&b": np.zeros((3, 1), np.float32)}
    none = np.empty(0, np.int64)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(4, np.int64), none, features, progress=False) as g:
        for page in (g._repr_html_(), g.features._repr_html_(), g.features["<script>"]._repr_html_()):
            assert "<script>" not in page
            assert "a&b" not in page


HOSTILE = "<script>alert(1)&<b>"


def objects(g: featstore.OutOfCoreGraph, seeds: Any, feature: str = "x") -> Iterator[Any]:
    """Make objects of all kinds that show themselves, with a loader before, in the middle of, and after an epoch."""
    yield from (g, g.features, g.node_data, g.edge_features, g.budget, g.memory_report(), *g.features.values())
    sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
    yield sampler
    with featstore.Loader(g, sampler, seeds, batch_size=3, strategy="ondemand", features=feature) as loader:
        for _ in range(2):
            yield from (loader, loader.stats())
            for batch in loader:
                yield from (batch, *loader.stats().values(), loader)
        yield from (loader, loader.stats())
    yield loader


def test_hostile_names(tmp_path: Path) -> None:
    n, rows = 12, np.zeros((12, 2), np.float32)
    pairs = np.stack([np.arange(n), (np.arange(n) + 1) % n])
    path = tmp_path / HOSTILE
    typed = TypedArrays(
        {HOSTILE: n}, {(HOSTILE, HOSTILE, HOSTILE): pairs}, {HOSTILE: {HOSTILE: rows}}, {HOSTILE: {"y": rows[:, 0]}}
    )
    plain = featstore.OutOfCoreGraph.from_edge_index(
        path, pairs, n, features={HOSTILE: rows}, node_data={"y": rows[:, 0]}, edge_features={HOSTILE: rows}, progress=False
    )
    n_shown = 0
    with plain as one, typed.create(tmp_path / "t") as several:
        views = [several[HOSTILE], several[HOSTILE, HOSTILE, HOSTILE], several[HOSTILE].features, several[HOSTILE].node_data]
        of_one, of_several = objects(one, np.arange(n), HOSTILE), objects(several, (HOSTILE, np.arange(n)), HOSTILE)
        for shown in chain(of_one, views, of_several):
            assert "cannot be shown" not in repr(shown)
            assert "\x1b" not in repr(shown)
            page = shown._repr_html_() if isinstance(shown, Shown) else ""
            assert set(re.findall("<[^>]*>", re.sub(' style="text-align: (left|right)"', "", page))) <= TAGS
            n_shown += HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in page
    assert n_shown > 10, "and the names are there"


TAGS = {f"<{end}{tag}>" for tag in ("div", "p", "code", "table", "thead", "tbody", "tr", "td", "th") for end in ("", "/")}


def kinds(base: type[Shown]) -> Iterator[type[Shown]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_objects_that_were_not_made() -> None:
    importlib.import_module("featstore._public")
    found = {kind for kind in kinds(Shown) if kind.__module__.startswith("featstore.") and not inspect.isabstract(kind)}
    public = (featstore.OutOfCoreGraph, featstore.PackedGraph, featstore.FeatureStore, featstore.Loader, featstore.Pack)
    assert found > {*public, featstore.History, featstore.SampledBatch, featstore.Block, featstore.RandomBatches}
    for kind in found:
        half = kind.__new__(kind)  # type: ignore[call-overload]
        assert isinstance(repr(half), str)
        assert half._repr_html_()
        if kind in public:
            assert "cannot be shown" in repr(half) or "not made" in repr(half)


def test_nothing_is_opened_or_read(small: SimpleNamespace) -> None:
    def in_child() -> None:
        opened = []
        is_watched, here = False, threading.get_ident()  # threads of a loader open and import

        def hear(event: str, _: object) -> None:
            if is_watched and event in EVENTS and threading.get_ident() == here:
                opened.append(event)

        sys.addaudithook(hear)
        with featstore.open(small.path, memory="64MiB") as g:
            g.cache("x", budget="50KB", policy="lru")
            for shown in objects(g, small.train_idx[:9]):
                before = [store.stats()["reads"] for store in g.features.values()]
                is_watched = True
                assert repr(shown)
                if isinstance(shown, Shown):
                    assert shown._repr_html_()
                is_watched = False
                if not isinstance(shown, featstore.Loader):  # whose threads read on
                    assert [store.stats()["reads"] for store in g.features.values()] == before
        assert not opened

    assert forked(in_child) is None


EVENTS = {"open", "os.listdir", "os.scandir", "mmap.__new__", "socket.connect", "subprocess.Popen", "import"}


def test_of_many_fields_the_first_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    describe = showing._store_row
    monkeypatch.setattr(showing, "_store_row", lambda *given: made.append(given) or describe(*given))
    features = {f"x{n}": np.zeros((2, 1), np.float32) for n in range(3 * MOST_ROWS)}
    none = np.empty(0, np.int64)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(3, np.int64), none, features, progress=False) as g:
        assert f"… and {2 * MOST_ROWS} more" in repr(g)
        assert len(made) <= MOST_ROWS + 1
        assert f"… and {2 * MOST_ROWS} more" in g.features._repr_html_()


def test_sampled_batches_and_histories(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        for options in ({}, {"disjoint": True}, {"edges": True}):
            sampled = featstore.NeighborSampler(g, [3, 2], seed=1, **options).sample(torch.arange(5))
            page = sampled._repr_html_()
            assert ">input_ids</td>" in page
            assert ">blocks[1]</td>" in page
            assert (">copies.batch</td>" in page) == ("disjoint" in options)
            assert (">edge_pos</td>" in sampled.blocks[0]._repr_html_()) == ("edges" in options)
            assert not hasattr(sampled, "__dict__")
        history = featstore.History(8, nodes=0.5)
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.Loader(g, sampler, small.train_idx, batch_size=50, history=history, strategy="ondemand") as loader:
            assert f">{len(history)}</td>" in history._repr_html_()
            assert repr(history) in repr(loader)


def test_packs(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.sample_offline(g, sampler, small.train_idx, 50, path=tmp_path / "p") as pack:
            assert repr(pack) == f"Pack({str(tmp_path / 'p')!r}, epochs=1, batches={pack.n_batches})"
            size = format_size((tmp_path / "p" / "samples").stat().st_size)
            assert f">{size}</td>" in pack._repr_html_()
            with featstore.Loader(g, strategy=featstore.Packed(pack)) as loader:
                assert len(next(iter(loader)).seeds) == 50
                assert f"Pack({str(tmp_path / 'p')!r}" in repr(loader)
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
