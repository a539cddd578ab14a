"""One graph in both forms: converted there and back, and everything that takes a graph, on chunks as on CSC."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.cli.main import main
from featstore.errors import BudgetError, BusyError, CorruptionError
from featstore.graph.convert import convert
from featstore.storage.catalog import read_catalog
from featstore.storage.update import Update
from featstore.topology.base import CscTopology
from featstore.topology.chunks import ChunkedTopology
from tests.support.sampled import fewer_examples
from tests.support.typed import random_types

N = 3000


def make(path: Path, seed: int = 0, **options: Any) -> featstore.OutOfCoreGraph:
    """A graph with long lists, isolated nodes and more."""
    rng = np.random.default_rng(seed)
    degrees = np.minimum(rng.pareto(1.1, N) * 3, 3 * N).astype(np.int64)
    degrees[rng.random(N) < 0.3] = 0
    degrees[7] = 9000
    indptr = np.r_[0, np.cumsum(degrees)]
    ids = (rng.random(indptr[-1]) ** 2 * N).astype(np.int64)
    x = rng.random((N, 5), dtype=np.float32)
    data = {"y": rng.integers(0, 4, N), "train_idx": np.flatnonzero(degrees)[:400]}
    return featstore.OutOfCoreGraph.create(
        path, indptr, ids, {"x": x}, data, overwrite=True, progress=False, memory="64MiB", **options
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same graph in both forms; a test must not change them."""
    root = tmp_path_factory.mktemp("pair")
    make(root / "csc").close()
    make(root / "chunked", topology="chunked", chunk_bytes=4096).close()
    return SimpleNamespace(csc=root / "csc", chunked=root / "chunked")


def opened(path: Path, memory: str = "64MiB") -> featstore.OutOfCoreGraph:
    return featstore.open(path, memory=memory, backend="pread", threads=2)


def payloads(root: Path) -> dict[str, bytes]:
    """Rows of every file of the adjacency, without the page that names the file."""
    catalog = read_catalog(root)
    return {
        key: (root / record.parts[0].file).read_bytes()[4096:]
        for key, record in catalog.fields.items()
        if record.role == "topology"
    }


def files_in(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if ".rows" in name or name.endswith(".tmp")}


def named(root: Path) -> set[str]:
    return {name for record in read_catalog(root).files.values() for name in (record.name, record.sums_name)}


@fewer_examples(0.3)
@given(
    degrees=st.lists(st.sampled_from([0, 0, 0, 1, 2, 5, 1008, 3000]), max_size=30),
    chunk_bytes=st.sampled_from([4096, 8192, 1 << 20]),
    rest=st.sampled_from([0, 2000]),
)
def test_there_and_back_is_byte_identical(
    degrees: list[int], chunk_bytes: int, rest: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("there") / "g"
    degrees = [*degrees, *[0] * rest]
    n = len(degrees)
    indptr = np.cumsum([0, *degrees])
    ids = np.random.default_rng(0).integers(0, max(1, n), indptr[-1])
    featstore.OutOfCoreGraph.create(root, indptr, ids, progress=False, memory="32MiB").close()
    before, identity = payloads(root), read_catalog(root).adjacency()
    assert convert(root, "chunked", chunk_bytes=chunk_bytes, memory="64MiB", progress=False)
    made = payloads(root)
    with opened(root) as g:
        g.verify(progress=False)
        assert isinstance(g.topology, ChunkedTopology)
        assert np.array_equal(g.topology.degrees(), degrees)
    direct = root.parent / "direct"
    featstore.OutOfCoreGraph.create(
        direct, indptr, ids, topology="chunked", chunk_bytes=chunk_bytes, progress=False, memory="32MiB"
    ).close()
    assert payloads(direct) == made
    if n:
        edges = np.stack([ids, np.repeat(np.arange(n), degrees)])[:, np.random.default_rng(1).permutation(len(ids))]
        featstore.OutOfCoreGraph.from_edge_index(
            direct, edges, n, topology="chunked", chunk_bytes=chunk_bytes, overwrite=True, progress=False, memory="32MiB"
        ).close()
        assert payloads(direct) == made
    assert not convert(root, "chunked", chunk_bytes=chunk_bytes, progress=False)
    assert convert(root, "csc", memory="64MiB", progress=False)
    assert payloads(root) == before
    assert read_catalog(root).adjacency() == identity
    assert files_in(root) == named(root)
    with opened(root) as g:
        g.verify(progress=False)


@fewer_examples(0.3)
@given(seed=st.integers(0, 999), n_relations=st.integers(0, 5), chunk_bytes=st.sampled_from([4096, 1 << 20]))
def test_types_there_and_back(seed: int, n_relations: int, chunk_bytes: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root, graph = tmp_path_factory.mktemp("typed") / "g", random_types(seed, n_relations=n_relations, most=300)
    graph.create(root).close()
    before, dataset = payloads(root), read_catalog(root).dataset
    assert convert(root, "chunked", chunk_bytes=chunk_bytes, memory="64MiB", progress=False)
    graph.create(root.parent / "direct", topology="chunked", chunk_bytes=chunk_bytes).close()
    assert payloads(root.parent / "direct") == payloads(root)
    with opened(root) as g:
        g.verify(progress=False)
        degrees = [np.bincount(pairs[1], minlength=graph.n[key[2]]) for key, pairs in graph.edges.items()]
        assert np.array_equal(g.topology.degrees(), np.concatenate([*degrees, np.empty(0, np.int64)]))
    assert convert(root, "csc", memory="64MiB", progress=False)
    assert payloads(root) == before
    after = read_catalog(root).dataset
    assert [after.get(name) for name in ("node_types", "edge_types")] == [dataset[name] for name in ("node_types", "edge_types")]


def test_what_was_made_of_a_graph_stays_valid(tmp_path: Path) -> None:
    """Saved caches, kept parts, packs and samplers are about the same graph, whatever form it has."""
    root = tmp_path / "g"
    with make(root) as g:
        g.cache_neighbors("40KB", save=True)
        cached = g.neighbor_cache
        assert cached is not None
        parts = featstore.partition(g, 5, "ldg", progress=False).clone()
        pack = featstore.sample_offline(
            g, featstore.NeighborSampler(g, [3, 2]), torch.arange(0, N, 5), 50, path=tmp_path / "p", progress=False
        )
        pack.close()
        identity, old_files = g.fingerprint(), files_in(root)
        sampler = featstore.NeighborSampler(g, [4, 4])
        assert convert(root, "chunked", chunk_bytes=4096, memory="64MiB", progress=False)
        # The open graph goes on with the files that it has; they stay until nobody has them open.
        assert old_files <= files_in(root)
        before = sampler.sample(torch.arange(100))
    with opened(root) as g:
        assert g.fingerprint() == identity
        g.cache_neighbors("40KB")
        again = g.neighbor_cache
        assert np.array_equal(again.records, cached.records)
        kept = g.parts()["ldg-5"]
        assert not kept.is_stale
        assert torch.equal(kept.load(), parts)
        assert torch.equal(featstore.NeighborSampler(g, [4, 4]).sample(torch.arange(100)).input_ids, before.input_ids)
        with featstore.Loader(g, features="x", labels="y", strategy=featstore.Packed(tmp_path / "p", cache=0.1)) as loader:
            for batch in loader:
                assert torch.equal(batch.x, g.features["x"][batch.input_ids])
    with Update(root):
        pass
    assert files_in(root) == named(root)
    make(root, seed=1).close()  # another graph
    with opened(root) as g:
        assert g.fingerprint() != identity
        with pytest.raises(featstore.StaleError):
            featstore.Pack(tmp_path / "p").check(g)


def test_converting_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "g").close()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert convert(tmp_path / "g", "chunked", memory="64MiB")
    assert "convert: 100%" in capsys.readouterr().err


def test_what_is_refused(pair: SimpleNamespace, tmp_path: Path) -> None:
    for options, message in (
        ({"topology": "coo"}, "must be one of"),
        ({"topology": "csc", "chunk_bytes": 4096}, "is of topology='chunked'"),
        ({"topology": "chunked", "chunk_bytes": 4095}, "multiple of 4096"),
        ({"topology": "chunked", "chunk_bytes": "2GiB"}, "multiple of 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(pair.csc, **options)
    with pytest.raises(FileNotFoundError):
        convert(tmp_path / "none", "csc")
    with pytest.raises(BudgetError, match="convert needs"):
        convert(pair.csc, "chunked", chunk_bytes="256MiB", memory="64MiB", progress=False)
    with Update(pair.csc), pytest.raises(BusyError):
        convert(pair.csc, "chunked", progress=False)
    assert read_catalog(pair.csc).topology == "csc"
    assert files_in(pair.csc) == named(pair.csc)


@pytest.mark.parametrize("name", ["edge.indptr.1.rows", "edge.indices.1.rows"])
def test_a_damaged_graph_is_not_converted(tmp_path: Path, name: str) -> None:
    make(tmp_path / "g").close()
    path = tmp_path / "g" / name
    data = bytearray(path.read_bytes())
    data[4096 + 5000] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptionError) as caught:
        convert(tmp_path / "g", "chunked", memory="64MiB", progress=False)
    assert caught.value.path == str(path)
    assert read_catalog(tmp_path / "g").topology == "csc"
    assert files_in(tmp_path / "g") == named(tmp_path / "g")


@pytest.mark.parametrize("cached", [None, "60KB", "1MiB"])
def test_samplers_draw_the_same(pair: SimpleNamespace, cached: str | None) -> None:
    with opened(pair.csc) as a, opened(pair.chunked) as b:
        assert isinstance(a.topology, CscTopology)
        if cached is not None:
            a.cache_neighbors(cached)
            b.cache_neighbors(cached)
            assert b.neighbor_cache.whole == (cached == "1MiB")
        for make_sampler in (
            lambda g: featstore.NeighborSampler(g, [5, 3, -1], seed=3),
            lambda g: featstore.NeighborSampler(g, [4, 0, 2], replace=True, redraw=False),
            lambda g: featstore.LaborSampler(g, [5, 5], importance_sampling=1),
            lambda g: featstore.LayerSampler(g, [30, 40], seed=2),
        ):
            one, two = make_sampler(a), make_sampler(b)
            for index in range(4):
                x, y = (s.sample(torch.arange(index * 50, index * 50 + 50), 1, index) for s in (one, two))
                assert torch.equal(x.input_ids, y.input_ids)
                for p, q in zip(x.blocks, y.blocks, strict=True):
                    assert torch.equal(p.src, q.src)
                    assert torch.equal(p.dst, q.dst)


def test_caches_partitions_and_policies(pair: SimpleNamespace) -> None:
    with opened(pair.csc) as a, opened(pair.chunked) as b:
        for method in ("fennel", "ldg", "ranges", "random"):
            one, two = (
                featstore.partition(g, 6, method, train_idx=g.node_data["train_idx"], keep=False, progress=False) for g in (a, b)
            )
            assert torch.equal(one, two)
        for policy, options in (("in_out_ratio", {}), ("degree", {}), ("cross_partition", {"parts": one}), ("random", {})):
            for g in (a, b):
                g.cache_neighbors("50KB", policy, progress=False, **options)
            assert np.array_equal(a.neighbor_cache.records, b.neighbor_cache.records)
            assert np.array_equal(a.neighbor_cache.offset_of_node, b.neighbor_cache.offset_of_node)
        for g in (a, b):
            g.cache("x", "10%", "in_out_ratio")
        assert "partitioning" not in b.memory_report()


def test_partition_batches_and_the_quality_of_parts(pair: SimpleNamespace, tmp_path: Path) -> None:
    with make(tmp_path / "g", topology="chunked", chunk_bytes=8192) as g, opened(pair.csc) as a:
        parts = featstore.partition(g, 8, progress=False)
        kept = g.parts()["fennel-8"]
        assert torch.equal(kept.load(), featstore.partition(a, 8, keep=False, progress=False))
        judged = [featstore.partitioning.assign.judge(each, parts, 8, progress=False) for each in (g, a)]
        assert repr(judged[0]) == repr(judged[1])
        batches = featstore.PartitionBatches(g, torch.arange(0, N, 2), 100, parts=kept, macro=2)
        with featstore.Loader(
            g, featstore.NeighborSampler(g, [3]), batches, features="x", strategy=featstore.OnDemand(cache=None)
        ) as loader:
            assert sum(len(batch.seeds) for batch in loader) == N // 2


def test_the_whole_adjacency_for_pyg(pair: SimpleNamespace) -> None:
    pytest.importorskip("torch_geometric")
    from featstore.adapters.pyg import stores

    with opened(pair.csc) as a, opened(pair.chunked) as b:
        for layout in ("csc", "coo"):
            one, two = (stores(g)[1][None, layout] for g in (a, b))
            assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))


def test_info_convert_and_create_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: Any) -> dict[str, Any]:
        assert main([str(each) for each in (*arguments, "--json")]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    root = tmp_path / "g"
    np.save(tmp_path / "indptr.npy", [0, 2, 2, 3])
    np.save(tmp_path / "indices.npy", [1, 2, 0])
    given = ("--indptr", tmp_path / "indptr.npy", "--indices", tmp_path / "indices.npy")
    made = run("create", root, *given, "--topology", "chunked", "--chunk-bytes", "8KiB")
    assert (made["topology"], made["chunk_bytes"]) == ("chunked", 8192)
    found = run("convert", root, "--topology", "csc")
    assert (found["converted"], found["topology"], "chunk_bytes" in found) == (True, "csc", False)
    assert not run("convert", root, "--topology", "csc")["converted"]
    assert "chunk_bytes" not in run("info", root)
    assert main(["convert", str(root), "--topology", "chunked"]) == 0
    assert "chunked, chunks of 1.00 MiB; converted in" in capsys.readouterr().out
    assert main(["info", str(root)]) == 0
    assert "topology   chunked, chunks of 1.00 MiB" in capsys.readouterr().out
    assert run("verify", root)["ok"]
    assert main(["convert", str(root), "--topology", "chunked", "--chunk-bytes", "5000"]) == 2
    assert "multiple of 4096" in capsys.readouterr().err


def test_opening_holds_nothing_of_the_nodes(tmp_path: Path) -> None:
    """A graph whose offsets alone are beyond its budget is made of a stream, opened and sampled."""
    n = 4_000_000
    shown = []

    def indptr() -> Any:
        for first in range(0, n, 1 << 16):
            yield np.minimum(np.arange(first, min(first + (1 << 16), n)) // 4, 1_000_000)
        yield np.array([1_000_000])

    def ids() -> Any:
        for first in range(0, 1_000_000, 1 << 16):
            yield np.arange(first, min(first + (1 << 16), 1_000_000), dtype=np.int64) * 3 % n

    with featstore.OutOfCoreGraph.create(
        tmp_path / "g",
        ((n + 1,), "int64", indptr()),
        ((1_000_000,), "int64", ids()),
        topology="chunked",
        memory="16MiB",
        progress=False,
    ) as g:
        sampler = featstore.NeighborSampler(g, [5, 5])
        batch = sampler.sample(torch.arange(3, n, 40_000))
        shown = [int(batch.input_ids[k]) for k in batch.blocks[-1].src[:3]]
        assert g.budget.peak <= g.budget.total < 8 * n
        g.verify(progress=False)
    assert shown[0] == 0
