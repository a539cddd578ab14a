"""A fork in the middle of an epoch: the child lets go of the loop in any way, and the parent goes on as if it had not been."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.sampled import covering

N, BATCH, SEED = 1500, 40, 3
X = torch.from_numpy(np.random.default_rng(3).standard_normal((N, 17)).astype(np.float32))
STRATEGIES: dict[str, dict[str, Any]] = {
    "ondemand": {"policy": "lru"},
    "superbatch": {"strategy": "superbatch", "length": 3},
    "serial": {"strategy": "ginex", "length": 3},
    "streamed": {"strategy": "streamed", "length": 3},
    "streamed, its length chosen": {"strategy": "streamed"},
    "packed": {"strategy": "packed", "disk": "50MB"},
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "g"
    idx = np.random.default_rng(0).permutation(N)[:800]
    with featstore.OutOfCoreGraph.create(
        path, *make_graph(N, 8.0), {"x": X.numpy()}, {"train_idx": idx}, progress=False, memory="64MB"
    ) as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        featstore.sample_offline(g, sampler, idx, BATCH, epochs=3, seed=SEED, disk="50MB", progress=False).close()
    return path


def in_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child, and assert that it came to its end."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(60)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def check(batch: featstore.MiniBatch) -> None:
    assert torch.equal(batch.x, X[batch.input_ids])


@pytest.mark.shares_resources  # a child's copies of threads and descriptors are none of ours
@pytest.mark.parametrize(("strategy", "way"), covering(STRATEGIES, ["drops", "closes", "caches"]))
def test_the_parent_goes_on(dataset: Path, strategy: str, way: str) -> None:
    held: dict[str, Any] = {}

    def child() -> None:
        g = held["g"]
        if way == "drops":
            held.clear()
        elif way == "closes":
            held["running"].close()
            held["loader"].close()
            with pytest.raises(featstore.ClosedError):
                next(held["running"])
        else:  # a cache that followed the parent's plans does not in the child
            g.cache("x", budget="50KB", policy="lru")
        gc.collect()
        for _ in range(2):
            assert torch.equal(g.features["x"][:500], X[:500])
        del g

    with featstore.open(dataset, memory="64MB") as held["g"]:
        options = {"labels": None, "cache": 0.1, **STRATEGIES[strategy]}
        if strategy == "packed":
            held["loader"] = make_loader(held["g"], pack=f"{dataset}.pack", **options)
        else:
            sampler = featstore.NeighborSampler(held["g"], [4, 3], seed=1)
            held["loader"] = make_loader(held["g"], sampler, held["g"].node_data["train_idx"], BATCH, **options)
        for epoch in range(2):
            held["running"], n = iter(held["loader"]), 0
            for batch in held["running"]:
                check(batch)
                n += 1
                if epoch == 0 and n in (2, 9):
                    del batch
                    in_child(child)
            assert n == 20
        held["loader"].close()
