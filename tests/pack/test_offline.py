"""Offline samples: the batches of the loader, from any sampler; whole or not there; bounded on disk."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.sampling.batch import Block, SampledBatch
from featstore.sampling.foreign import as_sampled
from featstore.testing.faults import random_flips
from tests.support import pyg
from tests.support.loaders import make_loader
from tests.support.refusing import refuses


def fields(batch: Any) -> list[Any]:
    blocks = [part for b in batch.blocks for part in (b.src.tolist(), b.dst.tolist(), b.n_src, b.n_dst)]
    return [batch.index, batch.input_ids.tolist(), *blocks]


def test_the_loaders_batches(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with featstore.Loader(g, sampler, small.train_idx, batch_size=40, features="x", seed=3) as loader:
            expected = [fields(batch) for _ in range(2) for batch in loader]
        for threads in (1, 3):
            options = {"epochs": 2, "path": tmp_path / f"p{threads}", "seed": 3, "threads": threads}
            with featstore.sample_offline(g, sampler, small.train_idx, 40, **options) as pack:
                assert (pack.epochs, pack.n_batches, len(pack), pack.num_nodes) == (2, 8, 16, 1000)
                assert [fields(pack.batch(i, g.pool)) for i in range(16)] == expected
                assert pack.lengths.tolist() == [len(one[1]) for one in expected]
                counts = np.zeros(1000, np.int64)
                for one in expected:
                    counts[one[1]] += 1
                assert (pack.counts() == counts).all()
                pack.check(g)
        assert sorted(os.listdir(tmp_path)) == ["p1", "p3"]
        with featstore.sample_offline(g, sampler, small.train_idx[:0], 40, path=tmp_path / "none") as empty:
            assert len(empty) == 0
        with pytest.raises(FileExistsError, match="a pack exists here"):
            featstore.sample_offline(g, sampler, small.train_idx, 40, path=tmp_path / "p1")
        featstore.sample_offline(g, sampler, small.train_idx[:40], 40, path=tmp_path / "p1", overwrite=True).close()
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes").touch()
        with pytest.raises(FileExistsError, match="is not a pack"):
            featstore.sample_offline(g, sampler, small.train_idx, 40, path=tmp_path / "mine", overwrite=True)
    with featstore.Pack(tmp_path / "p1") as pack:
        assert len(pack) == 1


class DGLBlock:
    def __init__(self, src: Any, dst: Any, n_src: int, n_dst: int) -> None:
        self._edges, self._n = (src, dst), (n_src, n_dst)

    def edges(self) -> tuple[Any, Any]:
        return self._edges

    def num_src_nodes(self) -> int:
        return self._n[0]

    def num_dst_nodes(self) -> int:
        return self._n[1]


def test_samples_of_other_makes(small: SimpleNamespace, tmp_path: Path) -> None:
    """Two hops written by hand: seeds 5 and 7; 5 ← 9, 7 ← 5; then 9 ← 3."""
    ids = torch.tensor([5, 7, 9, 3])
    inner, outer = (torch.tensor([0, 2]), torch.tensor([1, 0])), (torch.tensor([0, 2, 3]), torch.tensor([1, 0, 2]))
    sampled = pyg.SamplerOutput(ids, *outer, edge=None, num_sampled_nodes=[2, 1, 1], num_sampled_edges=[2, 1])
    forms = {
        "pairs": (ids, [(*outer, 4, 3), (*inner, 3, 2)]),
        "dgl": (ids, ids[:2], [DGLBlock(*outer, 4, 3), DGLBlock(*inner, 3, 2)]),
        "pyg": sampled,
        "pyg batch": pyg.Data(n_id=ids, edge_index=torch.stack(outer), num_sampled_nodes=[2, 1, 1], num_sampled_edges=[2, 1]),
    }
    with featstore.open(small.path, memory="64MB") as g:
        for name, form in forms.items():
            method = SimpleNamespace(sample=lambda *_, form=form, **__: form)
            for number, sampler in enumerate([[form], lambda seeds, form=form: form, method]):
                seeds = () if isinstance(sampler, list) else ([5, 7], 2)
                with featstore.sample_offline(g, sampler, *seeds, path=tmp_path / f"{name}{number}", shuffle=False) as pack:
                    batch = pack.batch(0, g.pool)
                    assert batch.input_ids.tolist() == [5, 7, 9, 3]
                    assert batch.seeds.tolist() == [5, 7]
                    assert [(b.src.tolist(), b.dst.tolist(), b.n_src, b.n_dst) for b in batch.blocks] == [
                        ([2, 0, 3], [0, 1, 2], 4, 3),
                        ([2, 0], [0, 1], 3, 2),
                    ]
        wrong = [
            (torch.tensor([5, 5, 9, 3]), forms["pairs"][1]),
            (torch.tensor([5, 7, 9, 1000]), forms["pairs"][1]),
            (ids.float(), forms["pairs"][1]),
            (ids, [(*outer, 4, 2), (*inner, 3, 2)]),
            (ids, [(torch.tensor([0, 2, 4]), outer[1], 4, 3), (*inner, 3, 2)]),
            (ids, [(outer[0], torch.tensor([1, 0, 3]), 4, 3), (*inner, 3, 2)]),
            (ids, [(outer[0][:2], outer[1], 4, 3), (*inner, 3, 2)]),
            (ids, []),
            replace(sampled, num_sampled_edges=[2, 2]),
            pyg.HeteroSamplerOutput({"paper": ids}, {}, {}, {}, num_sampled_nodes={}, num_sampled_edges={}),
            pyg.HeteroData(paper={"n_id": ids}),
            pyg.Data(n_id=ids, num_sampled_nodes=[2, 1, 1], num_sampled_edges=[2, 1]),  # of a graph without edge_index
            ids,
        ]
        for sample in wrong:
            refuses(featstore.PluginError, "", lambda: featstore.sample_offline(g, [sample], path=tmp_path / "wrong"))
        with pytest.raises(ValueError, match="only an iterable"):
            featstore.sample_offline(g, lambda seeds: sampled, path=tmp_path / "wrong")
        refuses(ValueError, "epochs", lambda: featstore.sample_offline(g, [sampled], epochs=0, path=tmp_path / "wrong"))
    assert not list(tmp_path.glob("wrong*"))


def test_loaders_of_other_makes(small: SimpleNamespace, tmp_path: Path) -> None:
    """PyG's loader is run through, though it can be called with positions among its seeds; it does not sample for others."""
    sampler = pyg.HopSampler(small.indptr, small.indices, [3])
    loader = pyg.NodeLoader(pyg.data_of(small.indptr, small.indices), sampler, torch.tensor([5, 7, 11, 2]), batch_size=2)
    with featstore.open(small.path, memory="64MB") as g:
        with featstore.sample_offline(g, loader, epochs=2, path=tmp_path / "p") as pack:
            ids = [batch.n_id.tolist() for batch in loader]
            assert [nodes[:2] for nodes in ids] == [[5, 7], [11, 2]]
            assert [pack.ids(number).tolist() for number in range(len(pack))] == ids * 2
        for given in [{"seeds": [5, 7], "batch_size": 2}, {"seeds": [5, 7]}, {"batch_size": 2}]:
            for iterable in (loader, [loader([0, 1])]):
                with pytest.raises(ValueError, match="has seeds and batches of its own"):
                    featstore.sample_offline(g, iterable, path=tmp_path / "wrong", **given)
        for iterable in (loader, [loader([0, 1])]):
            with pytest.raises(TypeError, match=r"has seeds and batches of its own.*sample_offline"):
                featstore.Loader(g, iterable, [5, 7], 2)
        uncounted = loader([0, 1])
        for name in ("num_sampled_nodes", "num_sampled_edges"):
            uncounted[name] = None  # as PyG's without pyg-lib
            with pytest.raises(featstore.PluginError, match="without num_sampled_nodes"):
                featstore.sample_offline(g, [uncounted], path=tmp_path / "wrong")
            del uncounted[name]
            with pytest.raises(featstore.PluginError, match="without num_sampled_nodes"):
                featstore.sample_offline(g, [uncounted], path=tmp_path / "wrong")
    assert not list(tmp_path.glob("wrong*"))


OUTER, INNER = (torch.tensor([2, 0, 3]), torch.tensor([0, 1, 2])), (torch.tensor([2, 0]), torch.tensor([0, 1]))
NODES = torch.tensor([5, 7, 9, 3])


def by_hand(ids: Any = NODES, n_seeds: Any = 2, **changes: Any) -> SampledBatch:
    """The two hops of :func:`test_samples_of_other_makes`, with changes to the outer block, or other ``blocks``."""
    outer = {"src": OUTER[0], "dst": OUTER[1], "n_src": 4, "n_dst": 3, **changes}
    blocks = outer.pop("blocks", None)
    if blocks is None:
        blocks = (Block(**outer), Block(*INNER, 3, 2))
    return SampledBatch(99, 99, ids, n_seeds, blocks)


WRONG: dict[str, Any] = {
    "an id beyond 32 bits": by_hand(torch.tensor([5, 7, 2**32 + 9, 3])),
    "a negative id": by_hand(torch.tensor([5, 7, -1, 3])),
    "a node twice": by_hand(torch.tensor([5, 7, 5, 3])),
    "ids of floats": by_hand(NODES.float()),
    "ids of complex numbers": by_hand(NODES.to(torch.complex64)),
    "ids of objects": by_hand(np.array([5, 7, None, 3], object)),
    "ragged ids": by_hand([[5], [7, 9], 3]),
    "no ids": by_hand(None),
    "ids of two dimensions": by_hand(NODES[None]),
    "ids beyond 63 bits": by_hand(np.array([5, 7, 2**64 - 1, 3], np.uint64)),
    "fewer sources than nodes": by_hand(n_src=3),
    "more destinations than sources": by_hand(n_dst=5),
    "a size that is a float": by_hand(n_src=4.0),
    "a size that is a string": by_hand(n_src="4"),
    "no size": by_hand(n_dst=None),
    "sources and destinations of two lengths": by_hand(src=OUTER[0][:2]),
    "a source beyond": by_hand(src=torch.tensor([2, 0, 4])),
    "a negative source": by_hand(src=torch.tensor([2, -1, 3])),
    "a destination beyond": by_hand(dst=torch.tensor([0, 1, 3])),
    "edge positions of another length": by_hand(edge_pos=torch.arange(2)),
    "edge positions in one block of two": by_hand(edge_pos=torch.arange(3)),
    "weights of another length": by_hand(weight=torch.rand(2)),
    "weights of integers": by_hand(weight=torch.arange(3)),
    "weights of half precision": by_hand(weight=torch.rand(3).half()),
    "weights of two dimensions": by_hand(weight=torch.rand(3, 1)),
    "weights in one block of two": by_hand(weight=torch.rand(3)),
    "other seeds than destinations": by_hand(n_seeds=3),
    "more seeds than nodes": by_hand(n_seeds=5, blocks=()),
    "negative seeds": by_hand(n_seeds=-1, blocks=()),
    "blocks of None": by_hand(blocks=(None,)),
    "None for blocks": SampledBatch(0, 0, NODES, 2, None),  # type: ignore[arg-type]
    "blocks that are short": (NODES, [(*OUTER, 4), (*INNER, 3)]),
    "none of both": (None, None),
    "nothing": None,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_batch_is_refused(small: SimpleNamespace, tmp_path: Path, what: str) -> None:
    """By name, before anything is made of it, and with what was there as it was."""
    with featstore.open(small.path, memory="64MB") as g:
        kept = featstore.sample_offline(g, [by_hand()], path=tmp_path / "p")
        with kept, pytest.raises(featstore.PluginError):
            featstore.sample_offline(g, [WRONG[what]], path=tmp_path / "p", overwrite=True)
        for strategy in ("ondemand", "superbatch"):
            if what.endswith("in one block of two") and strategy == "ondemand":
                continue  # nothing is stored
            options: dict[str, Any] = {"strategy": strategy}
            if strategy == "superbatch":
                options |= {"cache": 0.1, "length": 2}
            sampler = SimpleNamespace(sample=lambda *_, **__: WRONG[what])
            options |= {"batch_size": 2, "features": "x", "shuffle": False}
            # A superbatch's loader samples a batch when it is made, to see how large they are.
            with pytest.raises(featstore.PluginError), make_loader(g, sampler, [5, 7], **options) as loader:
                list(loader)
    assert os.listdir(tmp_path) == ["p"]
    with featstore.Pack(tmp_path / "p") as pack:
        assert pack.ids(0).tolist() == [5, 7, 9, 3]


def test_forms_that_are_brought_into_one(small: SimpleNamespace, tmp_path: Path) -> None:
    shuffled = torch.tensor([2, 0, 1])
    forms = {
        "int32": by_hand(NODES.int(), src=OUTER[0].to(torch.int16), dst=OUTER[1].to(torch.uint8)),
        "numpy": by_hand(NODES.numpy(), n_seeds=np.int32(2), src=OUTER[0].numpy(), n_src=np.int64(4)),
        "list": by_hand(NODES.tolist(), blocks=[((OUTER[0]).tolist(), OUTER[1].tolist(), 4, 3), (*INNER, 3, 2)]),
        "strided": by_hand(torch.stack([NODES, NODES], 1)[:, 0]),
        "unsorted": by_hand(src=OUTER[0][shuffled], dst=OUTER[1][shuffled]),
        "numpy scalars": by_hand(n_seeds=torch.tensor(2)),
    }
    with featstore.open(small.path, memory="64MB") as g:
        expected = fields(as_sampled(by_hand(), g.num_nodes, 0, 0))
        for name, form in forms.items():
            with featstore.sample_offline(g, [form], path=tmp_path / name) as pack:
                assert fields(pack.batch(0, g.pool)) == expected, name
        for name, form in {"empty": ([], [([], [], 0, 0)]), "features alone": by_hand(blocks=())}.items():
            with featstore.sample_offline(g, [form], path=tmp_path / name) as pack:
                batch = pack.batch(0, g.pool)
                assert (len(batch.input_ids), batch.n_seeds) == ((0, 0) if name == "empty" else (4, 2))


def test_arguments_of_sampling_offline(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MB") as g:
        with pytest.raises(TypeError, match="str does neither"):
            featstore.sample_offline(g, "sampler", small.train_idx, 40, path=tmp_path / "p")
        refuses(TypeError, "int does neither", lambda: featstore.Loader(g, 3, small.train_idx, features="x"))
    assert not os.listdir(tmp_path)


def test_another_graph_is_stale(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        pack = featstore.sample_offline(g, sampler, small.train_idx, 40, path=tmp_path / "p")
    with pack, featstore.OutOfCoreGraph.create(tmp_path / "same", small.indptr, small.indices, progress=False) as other:
        refuses(featstore.StaleError, "another graph", lambda: pack.check(other))


def test_disk_budget_and_tight_memory(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with pytest.raises(OSError, match="disk budget") as caught:
            featstore.sample_offline(g, sampler, small.train_idx, 40, path=tmp_path / "p", disk="2KB")
        assert caught.value.errno == errno.ENOSPC
        assert not os.listdir(tmp_path)
        featstore.sample_offline(g, sampler, small.train_idx, 40, path=tmp_path / "p", disk="1MB").close()
        size = sum(path.stat().st_size for path in (tmp_path / "p").iterdir())
        assert size < 1_000_000


def test_damage_is_found(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with featstore.sample_offline(g, sampler, small.train_idx, 40, path=tmp_path / "p") as pack:
            expected = [fields(pack.batch(i, g.pool)) for i in range(len(pack))]
        for name in ("samples", "pack"):
            found = 0
            for where in random_flips(tmp_path / "p" / name, 100, seed=1):
                try:
                    with featstore.Pack(tmp_path / "p") as pack:
                        assert [fields(pack.batch(i, g.pool)) for i in range(len(pack))] == expected, where
                except (featstore.CorruptionError, featstore.FormatError):
                    found += 1
            assert found > 90
        other = tmp_path / "q"
        featstore.sample_offline(g, sampler, small.train_idx, 40, path=other).close()
        os.replace(other / "samples", tmp_path / "p" / "samples")
        refuses(featstore.CorruptionError, "not the samples", lambda: featstore.Pack(tmp_path / "p"))


def test_a_pack_of_no_seeds_has_no_batches(tmp_path: Path) -> None:
    x = np.zeros((100, 4), np.float32)
    with featstore.OutOfCoreGraph.create(tmp_path / "g", np.arange(101), np.arange(100), {"x": x}, progress=False) as g:
        sampler = featstore.NeighborSampler(g, [2])
        pack = featstore.sample_offline(g, sampler, np.arange(0), 10, path=tmp_path / "p", progress=False)
        with featstore.Loader(g, strategy=featstore.Packed(pack)) as loader:
            assert (len(loader), list(loader)) == (0, [])
