"""A loader whose dataset is changed meanwhile goes on with the rows and labels of before, and leaves no memory behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.graphs import make_graph

N = 600
STRATEGIES = {
    "on demand, online": featstore.OnDemand(policy="sieve", cache=0.3),
    "on demand, what is left": featstore.OnDemand(policy="degree", cache="auto"),
    "superbatch": featstore.Superbatch(cache=0.3, length=3),
    "superbatch, what is left": featstore.Superbatch(length=3),
    "streamed": featstore.Streamed(cache=0.3, length=3),
    "ginex": featstore.Ginex(),
}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    indptr, indices = make_graph(N, 8)
    x = np.arange(N, dtype=np.float32)[:, None].repeat(40, 1)
    featstore.OutOfCoreGraph.create(tmp_path / "g", indptr, indices, {"x": x}, {"y": np.arange(N)}, progress=False).close()
    return tmp_path / "g"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_and_labels_are_those_of_before_and_no_memory_is_left(dataset: Path, strategy: str) -> None:
    with featstore.open(dataset, memory="32MiB", threads=2) as g:
        sampler, seeds = featstore.NeighborSampler(g, [3, 3]), torch.arange(0, N, 2)
        loader = featstore.Loader(g, sampler, seeds, batch_size=30, strategy=STRATEGIES[strategy])

        def check(batch: featstore.MiniBatch) -> None:
            assert torch.equal(batch.x[:, 0], batch.input_ids.float())
            assert torch.equal(batch.y, batch.seeds)

        for batch in loader:
            check(batch)
        ids = torch.arange(N)
        g.features["x"].update(ids, torch.full((N, 40), -1.0), progress=False)
        g.update_data("y", ids, torch.full((N,), -1), progress=False)
        for _ in range(2):
            for batch in loader:
                check(batch)
        del batch
        again: Any = featstore.Loader(g, sampler, seeds, batch_size=30, strategy=STRATEGIES[strategy])
        for batch in again:
            assert torch.equal(batch.x, torch.full_like(batch.x, -1))
            assert torch.equal(batch.y, torch.full_like(batch.y, -1))
        again.close()
        loader.close()
        del batch, again, loader, check
        gc.collect()
        g.cache("x", budget=0)
        assert "cache of 'x'" not in g.memory_report()


def test_labels_that_were_replaced_count_as_long_as_a_loader_has_them(dataset: Path) -> None:
    with featstore.open(dataset, memory="32MiB", threads=1) as g:
        before = g.data_bytes("y")
        loaders = []
        for k in range(3):
            loaders.append(featstore.Loader(g, featstore.NeighborSampler(g, [2]), torch.arange(N), batch_size=50))
            g.update_data("y", torch.arange(N), torch.full((N,), k), progress=False)
        assert g.memory_report()["node data"] == 3 * before
        loaders[0].close()
        del loaders[1]
        gc.collect()
        assert g.memory_report()["node data"] == before
