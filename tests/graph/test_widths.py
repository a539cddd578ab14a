"""Rows of widths that fill pages badly: whatever reads or writes them gives NumPy's rows, up to the last group, which is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.storage.layout import choose_layout
from tests.support.graphs import make_graph

N = 1003
WIDTHS = [300, 602, 768, 1200, 1536, 2100, 4100, 5732, 10_000]  # bytes
STRATEGIES = {
    "on demand": lambda _: featstore.OnDemand(policy="sieve", cache=0.1),
    "superbatch": lambda _: featstore.Superbatch(cache=0.1, length=2),
    "streamed": lambda _: featstore.Streamed(cache=0.1, length=2),
    "streamed by degree": lambda _: featstore.Streamed(cache=0.1, policy="degree"),
    "packed": lambda pack: featstore.Packed(pack, cache=0.1),
    "packed, shared rows": lambda pack: featstore.Packed(pack, cache=0.1, policy="frequency"),
}


def rows_of(width: int, n: int = N, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed + width).integers(0, 256, (n, width), dtype=np.uint8)


@pytest.mark.parametrize("width", WIDTHS)
def test_whatever_reads_and_writes_them(width: int, tmp_path: Path) -> None:
    x, rng = rows_of(width), np.random.default_rng(1)
    indptr, indices = make_graph(N, 6)
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, {"x": x}, progress=False).close()
    layout = choose_layout(width)
    file_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*.rows") if "x" in file.name)
    assert N * width <= file_bytes <= N * width * 32 / 31 + layout.group_bytes + 8192
    with featstore.open(tmp_path / "g", memory="64MiB", threads=2) as g:

        def check() -> None:
            store = g.features["x"]
            assert np.array_equal(store.numpy(), x)
            ids = rng.integers(0, len(x), 200)
            assert np.array_equal(store[torch.from_numpy(ids)].numpy(), x[ids])
            for rows in (None, 7):
                assert np.array_equal(np.concatenate([block.numpy() for _, block in store.blocks(rows=rows)]), x)
            assert np.array_equal(store[len(x) - 3 :].numpy(), x[-3:])

        check()
        sampler, seeds = featstore.NeighborSampler(g, [3, 2]), torch.arange(0, N, 3)
        pack = featstore.sample_offline(g, sampler, seeds, 50, path=tmp_path / "pack", progress=False)
        for name, strategy in STRATEGIES.items():
            given = {"strategy": strategy(pack)} if "packed" in name else {"strategy": strategy(None), "batch_size": 50}
            with featstore.Loader(g, *(() if "packed" in name else (sampler, seeds)), **given) as loader:
                for batch in loader:
                    assert np.array_equal(batch.x.numpy(), x[batch.input_ids.numpy()]), name
        pack.close()
        changed = np.concatenate([rng.choice(N, 40, replace=False), [0, N - 1]])
        changed = np.unique(changed)
        x = x.copy()
        x[changed] = rows_of(width, len(changed), 5)
        g.features["x"].update(torch.from_numpy(changed), torch.from_numpy(x[changed]), progress=False)
        check()
        more = rows_of(width, 29, 7)
        g.append_nodes(len(more), features={"x": more}, progress=False)
        g.verify(progress=False)
    x = np.concatenate([x, more])
    with featstore.open(tmp_path / "g", memory="64MiB", threads=2) as g:
        check()


@pytest.mark.parametrize("width", [1200, 2100, 5732])
def test_types_that_share_a_file(width: int, tmp_path: Path) -> None:
    """Rows of the second type begin within a group, those of the first end there."""
    x = {"a": rows_of(width, 401), "p": rows_of(width, 333, 1)}
    edges = {("a", "to", "p"): np.stack([np.arange(401) % 401, np.arange(401) % 333])}
    nodes = {kind: featstore.Nodes(len(rows), {"x": rows}) for kind, rows in x.items()}
    featstore.OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges=edges, progress=False).close()
    for change in ("none", "update", "append"):
        with featstore.open(tmp_path / "g", memory="64MiB", threads=2) as g:
            for kind, rows in x.items():
                store = g[kind].features["x"]
                assert np.array_equal(np.concatenate([block.numpy() for _, block in store.blocks(rows=50)]), rows), change
                ids = np.random.default_rng(2).permutation(len(rows))[:99]
                assert np.array_equal(store[torch.from_numpy(ids)].numpy(), rows[ids]), change
            if change == "none":
                x["p"] = x["p"].copy()
                x["p"][[0, 5, 332]] = rows_of(width, 3, 2)
                g["p"].features["x"].update(torch.tensor([0, 5, 332]), torch.from_numpy(x["p"][[0, 5, 332]]), progress=False)
            elif change == "update":
                more = rows_of(width, 17, 3)
                g.append_nodes(len(more), features={"x": more}, type="a", progress=False)
                x["a"] = np.concatenate([x["a"], more])
            else:
                g.verify(progress=False)
