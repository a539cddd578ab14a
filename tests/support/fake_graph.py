"""A graph for loaders without files: its features are functions of the ids, and batches are counted in a small pool."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import numpy as np
import torch

from featstore.budget import Budget
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import Tier
from featstore.load.loader import Loader
from featstore.sampling.batch import Block, SampledBatch
from featstore.storage.rowfile import ReadStats
from featstore.topology.types import Types
from tests.support.loaders import make_loader

N = 500


class Pool:
    """Tensors whose bytes a budget counts while they live."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def tensor(self, source: torch.Tensor) -> torch.Tensor:
        reservation = self._budget.reserve("batches", source.numel() * source.element_size())
        tensor = source.clone()
        weakref.finalize(tensor, reservation.release)
        return tensor

    def trim(self) -> None:
        """Nothing is idle."""


class Store:
    """A feature in memory that counts as a store does."""

    cache = None

    def __init__(self, rows: torch.Tensor, pool: Pool) -> None:
        self.rows, self.pool = rows, pool
        self.shape, self.dtype = rows.shape, rows.dtype

    def gather(self, ids: torch.Tensor, plan: None, tiers: object, counts: GatherCounts | None = None) -> torch.Tensor:
        rows = self.pool.tensor(self.rows[ids])
        if counts is not None:
            counts.count(Tier.BASE, len(ids))
            counts.read.add(ReadStats(len(ids), 1, rows.nbytes, 2 * rows.nbytes))
        return rows


class Sampler:
    """One hop: every seed gets a few distinct nodes, drawn from (epoch, index, seed)."""

    fanouts = (3,)

    def __init__(self, pool: Pool, n: int = N) -> None:
        self.pool, self.n = pool, n
        self.calls: list[tuple[int, int]] = []
        self.fail: BaseException | None = None

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        self.calls.append((epoch, index))
        if self.fail is not None and index == 3:
            raise self.fail
        drawn = (seeds[:, None] * 7919 + torch.arange(1, 4) * (1 + epoch * 31 + index)) % self.n
        nodes = list(dict.fromkeys([*seeds.tolist(), *drawn.flatten().tolist()]))
        number = {node: k for k, node in enumerate(nodes)}
        src = torch.tensor([number[node] for node in drawn.flatten().tolist()], dtype=torch.int64)
        dst = torch.arange(len(seeds)).repeat_interleave(3)
        block = Block(self.pool.tensor(src), self.pool.tensor(dst), len(nodes), len(seeds))
        return SampledBatch(index, epoch, self.pool.tensor(torch.tensor(nodes, dtype=torch.int64)), len(seeds), (block,))


def graph(memory: int = 10**8) -> SimpleNamespace:
    budget = Budget(memory)
    pool = Pool(budget)
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((N, 6), dtype=np.float32))
    h = torch.from_numpy(rng.integers(0, 255, (N, 3), dtype=np.uint8))
    return SimpleNamespace(
        path="fake",
        num_nodes=N,
        num_edges=10 * N,
        types=Types.one(N, 10 * N),
        own_part=None,
        topology_bytes=lambda: 0,
        features={"x": Store(x, pool), "h": Store(h, pool)},
        node_data={"y": torch.arange(N) % 7, "few": torch.arange(3)},
        budget=budget,
        pool=pool,
        options=SimpleNamespace(threads=2),
        reader=SimpleNamespace(
            held_bytes=0, least_bytes=lambda total: 0, trim=lambda: None, make_do=lambda: None, made_do=lambda: None
        ),
        data_bytes=lambda name: 0,
        locked=contextlib.nullcontext,
    )


def loader(g: SimpleNamespace, **options) -> Loader:
    options = {"seeds": torch.arange(0, N, 2), "batch_size": 20, **options}
    sampler = options.pop("sampler", None) or Sampler(g.pool)
    return make_loader(g, sampler, **options)
