"""Graphs of several types, as arrays and as datasets, and the batches that they must give."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import featstore

__all__ = ["CITES", "EMPLOYS", "REV", "WRITES", "TypedArrays", "academic", "check_batch", "random_types", "reached"]

Key = tuple[str, str, str]

WRITES, REV, CITES = ("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper")
EMPLOYS = ("institution", "employs", "author")


@dataclass
class TypedArrays:
    """A graph of several types in memory: nodes of each type, features and data by type, edges ``[2, E]`` by type."""

    n: dict[str, int]
    edges: dict[Key, np.ndarray]
    features: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    data: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    edge_features: dict[Key, dict[str, np.ndarray]] = field(default_factory=dict)
    _pairs: dict[Key, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False, compare=False)

    def has(self, key: Key, src: np.ndarray, dst: np.ndarray) -> bool:
        """Tell whether there is an edge of a type from each of ``src`` to the ``dst`` beside it."""
        edges, width = self.edges[key], max(1, self.n[key[2]])
        if key not in self._pairs or self._pairs[key][0] is not edges:
            self._pairs[key] = edges, np.unique(edges[0].astype(np.int64) * width + edges[1])
        there, asked = self._pairs[key][1], src * width + dst
        at = np.searchsorted(there, asked)
        return not len(asked) or bool((at < len(there)).all() and (there[at] == asked).all())

    def draw(self, name: str, seed: int, dtype: Any = np.float32, **widths: int) -> TypedArrays:
        """Give types of nodes a feature of random rows of these widths; return the graph."""
        rng = np.random.default_rng(seed)
        for kind, width in widths.items():
            self.features.setdefault(kind, {})[name] = rng.standard_normal((self.n[kind], width)).astype(dtype)
        return self

    def create(self, path: Path, **options: Any) -> featstore.OutOfCoreGraph:
        """Write the graph as a dataset."""
        nodes = {kind: featstore.Nodes(n, self.features.get(kind), self.data.get(kind)) for kind, n in self.n.items()}
        edges = {key: featstore.Edges(pairs, self.edge_features.get(key)) for key, pairs in self.edges.items()}
        return featstore.OutOfCoreGraph.create(path, nodes=nodes, edges=edges, progress=False, **options)


def random_types(seed: int, n_types: int = 3, n_relations: int = 4, most: int = 40) -> TypedArrays:
    """Draw a graph of some types: self relations, relations that differ in their name alone, types without nodes or edges."""
    rng = np.random.default_rng(seed)
    kinds = [f"t{i}" for i in range(n_types)]
    n = {kind: int(rng.integers(0, most)) for kind in kinds}
    n[kinds[0]] += 3
    graph = TypedArrays(n, {})
    for number in range(n_relations):
        src, dst = (kinds[int(i)] for i in rng.integers(0, n_types, 2))
        n_edges = int(rng.integers(0, 5 * most)) if n[src] and n[dst] else 0
        ends = [rng.integers(0, max(1, n[end]), n_edges) for end in (src, dst)]
        key = src, f"r{number}", dst
        graph.edges[key] = np.stack(ends).astype(np.int64)
        graph.edge_features[key] = {"w": rng.standard_normal((n_edges, 2)).astype(np.float32)}
    for kind in kinds:
        graph.features[kind] = {"x": rng.standard_normal((n[kind], 4)).astype(np.float32)}
        graph.data[kind] = {"y": rng.integers(0, 5, n[kind])}
    return graph


def academic(seed: int = 0, papers: int = 3000) -> TypedArrays:
    """Draw a graph of papers, authors and institutions, in which papers alone have features, as MAG240M's."""
    rng = np.random.default_rng(seed)
    n = {"paper": papers, "author": papers // 2, "institution": papers // 20}

    def pairs(src: str, dst: str, n_edges: int) -> np.ndarray:
        return np.stack([(n[src] * rng.random(n_edges) ** 2).astype(np.int64), rng.integers(0, n[dst], n_edges)])

    writes = pairs("author", "paper", 3 * papers)
    edges = {
        WRITES: writes,
        REV: writes[::-1].copy(),
        CITES: pairs("paper", "paper", 8 * papers),
        EMPLOYS: pairs("institution", "author", papers),
    }
    features = {"paper": {"x": rng.standard_normal((papers, 16)).astype(np.float16)}}
    data = {"paper": {"y": rng.integers(0, 7, papers)}, "author": {"y": rng.integers(0, 3, n["author"])}}
    return TypedArrays(n, edges, features, data)


def reached(graph: TypedArrays, seed_type: str, seeds: np.ndarray, depth: int) -> list[dict[Key, set[tuple[int, int, int]]]]:
    """Find what each hop draws if all lists are taken whole, by sets: (source, destination, number) of each edge, by type."""
    have = {kind: set[int]() for kind in graph.n}
    have[seed_type] |= set(seeds.tolist())
    hops = []
    for _ in range(depth):
        found = {}
        for key, pairs in graph.edges.items():
            takes = np.isin(pairs[1], np.fromiter(have[key[2]], np.int64, len(have[key[2]])))
            found[key] = {(int(s), int(d), int(i)) for i, (s, d) in enumerate(pairs.T) if takes[i]}
        for key, drawn in found.items():
            have[key[0]] |= {source for source, _, _ in drawn}
        hops.append(found)
    return hops


def check_batch(graph: TypedArrays, batch: featstore.HeteroMiniBatch, *, edges: bool) -> None:
    """Check that a batch is of the graph: distinct nodes, edges that there are, rows and labels of its nodes."""
    for kind, ids in batch.input_ids.items():
        found = ids.numpy()
        assert len(np.unique(found)) == len(found)
        assert not len(found) or (found.min() >= 0 and found.max() < graph.n[kind])
        assert sum(batch.num_sampled_nodes[kind]) == len(found)
    assert batch.seeds.equal(batch.input_ids[batch.seed_type][: len(batch.seeds)])
    for hop in batch.blocks:
        assert list(hop) == list(graph.edges)
        for key, block in hop.items():
            src, dst = batch.input_ids[key[0]].numpy(), batch.input_ids[key[2]].numpy()
            assert block.n_src <= len(src)
            assert block.n_dst <= len(dst)
            if len(block.src):
                assert int(block.src.max()) < block.n_src
                assert int(block.dst.max()) < block.n_dst
                assert bool((block.dst.diff() >= 0).all())
            ends = src[block.src.numpy()], dst[block.dst.numpy()]
            if edges:
                assert block.edge_pos is not None
                assert np.array_equal(graph.edges[key][:, block.edge_pos.numpy()], np.stack(ends))
            else:
                assert graph.has(key, *ends)
    for name, of_types in batch.features.items():
        for kind, rows in of_types.items():
            assert np.array_equal(rows.numpy(), graph.features[kind][name][batch.input_ids[kind].numpy()])
    for name, hops in batch.edge_features.items():
        for hop, blocks in zip(hops, batch.blocks, strict=True):
            for key, rows in hop.items():
                assert np.array_equal(rows.numpy(), graph.edge_features[key][name][blocks[key].edge_pos.numpy()])
    for name, rows in batch.labels.items():
        given = batch.seeds[batch.seed_index].numpy()
        assert np.array_equal(rows.numpy(), graph.data[batch.seed_type][name][given])
