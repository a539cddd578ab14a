"""Samplers of other makes under every strategy: the same batches as on demand, whatever form they come in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.sampling.batch import SampledBatch
from featstore.sampling.foreign import as_sampled
from tests.support import pyg
from tests.support.loaders import make_loader
from tests.support.refusing import refuses

STRATEGIES: dict[str, dict[str, Any]] = {
    "ondemand": {},
    "superbatch": {"length": 3, "cache": 0.1},
    "superbatch, its length chosen": {"strategy": "superbatch", "cache": 0.1},
    "superbatch, serial": {"strategy": "ginex", "length": 3, "cache": 0.1},
    "streamed": {"length": 3, "cache": 0.1},
    "auto": {"cache": 0.1},
}


def tensors(batch: Any) -> list[torch.Tensor | None]:
    parts = [part for block in batch.blocks for part in (block.src, block.dst, block.edge_pos, block.weight)]
    return [batch.seeds, batch.input_ids, batch.x, batch.y, *parts]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in ((p, q) for x, y in zip(a, b, strict=True) for p, q in zip(x, y, strict=True))
    )


def forms(sampler: featstore.NeighborSampler) -> dict[str, Any]:
    """The batches of ``sampler`` as others return them, and with more than it gives."""

    def pair(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        batch = sampler.sample(seeds, epoch=epoch, index=index)
        return batch.input_ids.int(), [(b.src.numpy(), b.dst.numpy(), b.n_src, b.n_dst) for b in batch.blocks]

    def with_edges(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        batch = sampler.sample(seeds, epoch=epoch, index=index)
        blocks = tuple(replace(b, edge_pos=7 * b.src + b.dst + 2**33) for b in batch.blocks)
        return replace(batch, blocks=blocks)

    def weighted(dtype: torch.dtype, with_edges: bool, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        batch = methods["edge positions"](seeds, epoch, index) if with_edges else sampler.sample(seeds, epoch=epoch, index=index)
        weights = (1 / (1 + b.src + 3 * b.dst).to(dtype) for b in batch.blocks)
        return replace(batch, blocks=tuple(replace(b, weight=w) for b, w in zip(batch.blocks, weights, strict=True)))

    def features_alone(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        return SampledBatch(index, epoch, seeds, len(seeds), ())

    methods = {
        "pairs": pair,
        "edge positions": with_edges,
        "no blocks": features_alone,
        "weights": partial(weighted, torch.float32, False),
        "positions and weights": partial(weighted, torch.float64, True),
    }
    return {name: SimpleNamespace(sample=method) for name, method in methods.items()}


def pyg_forms(small: SimpleNamespace) -> dict[str, Any]:
    """Callables that return what PyG's samplers and its loaders return."""
    sampler = pyg.HopSampler(small.indptr, small.indices, [4, 3])
    loader = pyg.NodeLoader(pyg.data_of(small.indptr, small.indices), sampler, batch_size=40)  # of all nodes: positions are ids
    return {
        "PyG output": lambda seeds: sampler.sample_from_nodes(pyg.NodeSamplerInput(None, seeds)),
        "PyG batch": lambda seeds: loader(seeds),
    }


FORMS = ["pairs", "edge positions", "weights", "positions and weights", "no blocks", "a callable", "PyG output", "PyG batch"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form(small: SimpleNamespace, tmp_path: Path, form: str) -> None:
    """As it comes, from run files, and of a pack: other strategies are given it as the contract suite's callable is."""
    with featstore.open(small.path, memory="64MB") as g:
        own = featstore.NeighborSampler(g, [4, 3], seed=1)
        # One that is only called cannot know the batch's number: the seeds are all that its draws depend on.
        callables = {"a callable": lambda seeds: own.sample(seeds), **pyg_forms(small)}
        sampler = callables[form] if form in callables else forms(own)[form]
        found = {}
        for name in ("ondemand", "superbatch"):
            options = {"strategy": name, "seed": 5, "batch_size": 40, "features": "x", **STRATEGIES[name]}
            with make_loader(g, sampler, small.train_idx, **options) as loader:
                found[name] = [tensors(batch) for _ in range(2) for batch in loader]
        with featstore.sample_offline(g, sampler, small.train_idx, 40, 2, tmp_path / "p", seed=5) as pack:
            options = {"strategy": "packed", "cache": 0.1, "features": "x", "shuffle": False}
            with make_loader(g, pack=pack, **options) as loader:
                found["packed"] = [tensors(batch) for _ in range(2) for batch in loader]
        expected = found.pop("ondemand")
        assert len(expected) == 16
        assert all(torch.equal(batch[2], torch.from_numpy(small.x)[batch[1]]) for batch in expected)
        if form == "pairs":
            options = {"seed": 5, "batch_size": 40, "features": "x"}
            assert same(
                [tensors(batch) for _ in range(2) for batch in make_loader(g, own, small.train_idx, **options)][:8],
                expected[:8],
            )
        assert [name for name, batches in found.items() if not same(batches, expected)] == []


def test_pyg_layers_see_what_pyg_would_leave_them(small: SimpleNamespace) -> None:
    """A block is what PyG's ``trim_to_layer`` leaves a layer; a PyG convolution gives the same rows either way."""
    seeds = torch.from_numpy(small.train_idx[:60])
    x = torch.from_numpy(small.x)
    torch.manual_seed(0)
    convolutions = [pyg.SAGEConv(25, 16), pyg.SAGEConv(16, 8), pyg.SAGEConv(8, 4)]
    sampler = pyg.HopSampler(small.indptr, small.indices, [4, 3, 2])
    for name, sample in {
        "output": sampler.sample_from_nodes(pyg.NodeSamplerInput(None, seeds)),
        "batch": next(iter(pyg.NodeLoader(pyg.data_of(small.indptr, small.indices), sampler, seeds, batch_size=60))),
    }.items():
        batch = as_sampled(sample, small.num_nodes, 0, 0)
        nodes = sample.node if name == "output" else sample.n_id
        assert torch.equal(batch.input_ids, nodes)
        assert torch.equal(batch.seeds, seeds)
        edges = torch.stack([sample.row, sample.col]) if name == "output" else sample.edge_index
        trimmed, rows = x[nodes], x[batch.input_ids]
        for layer, (convolution, block) in enumerate(zip(convolutions, batch.blocks, strict=True)):
            counts = sample.num_sampled_nodes, sample.num_sampled_edges
            trimmed, edges, _ = pyg.trim_to_layer(layer, *counts, trimmed, edges)
            assert len(trimmed) == block.n_src
            assert sorted(edges.T.tolist()) == sorted(torch.stack([block.src, block.dst]).T.tolist())
            trimmed = convolution(trimmed, edges).relu()
            rows = convolution((rows, rows[: block.n_dst]), torch.stack([block.src, block.dst])).relu()
            torch.testing.assert_close(trimmed[: block.n_dst], rows)


def test_subgraphs_of_pyg_without_counts_are_refused(small: SimpleNamespace) -> None:
    """Blocks cannot be told from a k-hop subgraph, whose hops are not counted; nor from samples of several node types."""
    seeds = torch.from_numpy(small.train_idx[:5])
    edges = pyg.data_of(small.indptr, small.indices).edge_index
    nodes, local, _, _ = pyg.k_hop_subgraph(seeds, 2, edges, relabel_nodes=True)
    with pytest.raises(featstore.PluginError, match="Data without num_sampled_nodes"):
        as_sampled(pyg.Data(n_id=nodes, edge_index=local), small.num_nodes, 0, 0)
    typed = pyg.HeteroSamplerOutput({"paper": nodes}, {}, {}, {}, num_sampled_nodes={"paper": [5]}, num_sampled_edges={})
    for sample in (typed, pyg.HeteroData(paper={"n_id": nodes})):
        with pytest.raises(featstore.PluginError):
            as_sampled(sample, small.num_nodes, 0, 0)


def test_pyg_has_no_sampler_of_its_own_interface(small: SimpleNamespace) -> None:
    """PyG's samplers are asked by another method, and its loaders have seeds of their own: both are refused by name."""
    sampler = pyg.HopSampler(small.indptr, small.indices, [4, 3])
    with featstore.open(small.path, memory="64MB") as g:
        with pytest.raises(TypeError, match="HopSampler does neither"):
            featstore.Loader(g, sampler, small.train_idx, batch_size=40)
        loader = pyg.NodeLoader(pyg.data_of(small.indptr, small.indices), sampler, batch_size=40)
        with pytest.raises(TypeError, match="NodeLoader has seeds and batches of its own"):
            featstore.Loader(g, loader, small.train_idx, batch_size=40)
        with pytest.raises(TypeError, match=r"such as featstore.NeighborSampler\(g, fanouts=.*, not \[5, 5\]"):
            featstore.Loader(g, [5, 5], small.train_idx, batch_size=40)


@pytest.mark.parametrize("as_input", [np.asarray, torch.from_numpy])
def test_an_id_beyond_64_bits_is_shown_as_it_was_given(as_input: Any) -> None:
    ids = np.array([1, 2**63 + 7], np.uint64)
    with pytest.raises(featstore.PluginError, match="returned id 9223372036854775815, which does not fit"):
        as_sampled((as_input(ids), [([0], [0], 2, 1)]), 300, 0, 0)


@pytest.mark.parametrize("strategy", ["superbatch", "streamed"])
def test_batches_of_different_shapes_are_refused(small: SimpleNamespace, strategy: str) -> None:
    """Stored batches must be alike; the error says what was returned."""
    with featstore.open(small.path, memory="64MB") as g:
        own = featstore.NeighborSampler(g, [4, 3], seed=1)

        def sample(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
            batch = own.sample(seeds, epoch=epoch, index=index)
            return batch if index % 4 else replace(batch, blocks=(), n_seeds=len(batch.input_ids))

        options: dict[str, Any] = {"strategy": strategy, "length": 8, "batch_size": 40, "features": "x", "cache": 0.1}
        with (
            make_loader(g, SimpleNamespace(sample=sample), small.train_idx, **options) as loader,
            pytest.raises(featstore.PluginError, match="a batch of 2 blocks"),
        ):
            list(loader)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_that_a_sampler_uses_again(small: SimpleNamespace, strategy: str) -> None:
    """A batch has memory of its own: the sampler's next batch does not change it, nor does the loop change the sampler's."""
    with featstore.open(small.path, memory="64MB") as g:
        own = featstore.NeighborSampler(g, [4, 3], seed=1)
        kept = torch.zeros(8, small.num_nodes, dtype=torch.int64)

        def sample(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
            batch = own.sample(seeds, epoch=epoch, index=index)
            seeds.fill_(-1)
            ids = kept[index % 2, : len(batch.input_ids)].copy_(batch.input_ids)
            return replace(batch, input_ids=ids)

        usual: dict[str, Any] = {"seed": 5, "batch_size": 40, "features": "x", "threads": 1}
        options = {"strategy": strategy, **usual, **STRATEGIES[strategy]}
        for shuffle in (True, False):
            with make_loader(g, own, small.train_idx, shuffle=shuffle, **usual) as loader:
                expected = [tensors(batch) for _ in range(2) for batch in loader]
            again = SimpleNamespace(sample=sample)
            with make_loader(g, again, small.train_idx, shuffle=shuffle, **options) as loader:
                assert same([tensors(batch) for _ in range(2) for batch in loader], expected)


def test_a_loop_that_changes_its_batches(small: SimpleNamespace) -> None:
    """The seeds of a loader, and what a sampler keeps, are not the loop's."""

    def sample(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        return SampledBatch(index, epoch, seeds, len(seeds), ())

    with featstore.open(small.path, memory="64MB") as g:
        loader = featstore.Loader(
            g, SimpleNamespace(sample=sample), small.train_idx, batch_size=40, features="x", shuffle=False, prefetch=0
        )
        for _ in range(2):
            found = []
            for batch in loader:
                found.append(batch.seeds.clone())
                batch.input_ids.zero_()
            assert torch.equal(torch.cat(found), torch.as_tensor(small.train_idx))


@pytest.mark.parametrize("kind", ["backwards", "read-only", "big-endian", "every other", "expanded", "uint16", "list"])
def test_arrays_of_any_layout(small: SimpleNamespace, kind: str) -> None:
    def sample(seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        ids = seeds.numpy()
        edges: Any = np.zeros(3, np.int64)
        if kind == "backwards":
            ids = ids[::-1]
        elif kind == "read-only":
            ids.flags.writeable = False
        elif kind == "big-endian":
            ids = ids.astype(">i4")
        elif kind == "every other":
            ids = np.repeat(ids, 2)[::2]
        elif kind == "expanded":
            edges = torch.zeros(1, dtype=torch.int32).expand(3)
        elif kind == "uint16":
            ids = ids.astype(np.uint16)
        else:
            ids, edges = ids.tolist(), [0, 0, 0]
        return ids, [(edges, edges, len(ids), len(ids))]

    with featstore.open(small.path, memory="64MB") as g:
        loader = featstore.Loader(g, SimpleNamespace(sample=sample), small.train_idx, batch_size=40, features="x", labels=None)
        found = []
        for batch in loader:
            assert torch.equal(batch.x, torch.from_numpy(small.x)[batch.input_ids])
            found.append(batch.input_ids)
        assert torch.equal(torch.cat(found).sort().values, torch.as_tensor(small.train_idx).sort().values)


def test_subgraphs_of_other_samplers(small: SimpleNamespace) -> None:
    """Repeats of a node are distinct rows where a sampler says which subgraph each is of, as PyG's disjoint samples do."""
    with featstore.open(small.path) as g:
        own = featstore.NeighborSampler(g, [3, 2], redraw=False, disjoint=True)
        seeds = torch.arange(0, 60, 3)

        def as_pyg(seeds: torch.Tensor) -> Any:
            batch = own.sample(seeds)
            assert batch.copies is not None
            outer = batch.blocks[0]
            counts = [batch.n_seeds, *(block.n_src - block.n_dst for block in reversed(batch.blocks))]
            edges = [len(block.src) for block in reversed(batch.blocks)]
            n_edges = [edges[0], edges[1] - edges[0]]
            return SimpleNamespace(
                node=batch.nodes,
                row=outer.src,
                col=outer.dst,
                batch=batch.copies.batch,
                num_sampled_nodes=counts,
                num_sampled_edges=n_edges,
            )

        expected = own.sample(seeds)
        for form in (as_pyg, lambda seeds: own.sample(seeds)):
            found = as_sampled(form(seeds), g.num_nodes, 0, 0)
            assert found.copies is not None
            assert len(found.tensors) == len(expected.tensors)
            assert all(map(torch.equal, found.tensors, expected.tensors))
        sample = as_pyg(seeds)
        numbers, node = sample.batch, sample.node
        for change, text in [
            ({"batch": numbers + 1}, "beginning with the seeds'"),
            ({"row": sample.row.flip(0)}, "an edge between two subgraphs"),
            ({"batch": numbers[:-1]}, "a number a node"),
            ({"batch": torch.cat([numbers[:20], numbers[20:] + 20])}, "a node of subgraph .* and 20 seeds"),
            ({"batch": torch.cat([numbers[:20], -numbers[20:] - 1])}, "subgraph"),
            ({"node": torch.cat([node[:1], node[:1], node[2:]])}, "a seed twice"),
            ({"batch": None}, "a node twice"),
        ]:
            refuses(
                featstore.PluginError,
                text,
                lambda change=change: as_sampled(SimpleNamespace(**{**vars(sample), **change}), g.num_nodes, 0, 0),
            )
        copies = expected.copies
        assert copies is not None
        for rows, text in [
            (copies.rows + 1000, "copies of node number"),
            (copies.rows - 1, "copies of node number"),
            (copies.rows.float(), "1-D integers"),
        ]:
            bad = replace(expected, copies=replace(copies, rows=rows))
            refuses(featstore.PluginError, text, lambda bad=bad: as_sampled(bad, g.num_nodes, 0, 0))
        # A Data whose nodes have an attribute of this name, and are distinct, has one subgraph.
        plain = featstore.NeighborSampler(g, [3], redraw=False).sample(seeds)
        (block,) = plain.blocks
        data = SimpleNamespace(
            n_id=plain.input_ids,
            edge_index=torch.stack([block.src, block.dst]),
            num_sampled_nodes=[20, block.n_src - 20],
            num_sampled_edges=[len(block.src)],
            batch=plain.input_ids % 3,
        )
        assert as_sampled(data, g.num_nodes, 0, 0).copies is None
