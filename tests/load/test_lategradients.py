"""Gradients of a history: those of computed rows at once, those of pulled rows when their node is computed again."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.sage import GraphSAGE
from tests.load.test_history import NODES, N, g, path

__all__ = ["g", "path"]  # fixtures

BATCH, DIM = 20, 3
SEEDS = np.arange(0, N, 2)


def history_of(staleness: int, **options: Any) -> featstore.History:
    return featstore.History(**{"dim": DIM, "nodes": NODES, "staleness": staleness, "dtype": torch.float64, **options})


def make(g: featstore.OutOfCoreGraph, history: Any, fanouts: Any = (4, 3), **options: Any) -> featstore.Loader:
    return featstore.Loader(g, featstore.NeighborSampler(g, fanouts, seed=1), SEEDS, BATCH, history=history, seed=7, **options)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("staleness", [1, 3, 1000])
def test_each_row_gets_what_waits_for_its_node(g: featstore.OutOfCoreGraph, staleness: int, gradients: bool, device: str) -> None:
    """Beside a dictionary that keeps what pulled rows were given, by node."""
    waiting: dict[int, torch.Tensor] = {}
    n_late = n_pulled = 0
    with make(g, history_of(staleness, gradients=gradients), device=device) as loader:
        for batch in itertools.chain(loader, loader):
            rows, n_src = batch.history.rows, batch.history.n_sources
            pulled, pushed = rows.pull.tolist(), rows.push.tolist()
            kept = [i for i in range(n_src) if i not in set(pulled)]
            h = torch.rand(len(kept), DIM, dtype=torch.float64, device=device, requires_grad=True)
            before = loader._history._table.clone()
            merged = batch.history.merge(h * 2)
            assert torch.equal(merged[kept], h * 2)
            assert torch.equal(merged[rows.pull], before[rows.pull_slots])
            weight = torch.rand(n_src, DIM, dtype=torch.float64, device=device)
            (merged * weight).sum().backward()
            expected = weight.clone()
            if gradients:
                for place, slot in zip(pushed, rows.push_slots.tolist(), strict=True):
                    late = waiting.pop(slot, None)
                    if late is not None:
                        expected[place] += late
                        n_late += 1
                for place, slot in zip(pulled, rows.pull_slots.tolist(), strict=True):
                    waiting[slot] = waiting.get(slot, 0) + weight[place]
            assert torch.allclose(h.grad, 2 * expected[kept], rtol=1e-14, atol=0)
            table = loader._history._table
            assert not table.requires_grad
            assert torch.equal(table[rows.push_slots], merged.detach()[rows.push])
            others = torch.ones(len(table), dtype=torch.bool, device=device)
            others[rows.push_slots] = False
            assert torch.equal(table[others], before[others])
            n_pulled += len(pulled)
    assert n_pulled
    assert bool(n_late) == gradients  # kept nodes that are seeds are computed, whatever their age


def test_no_gradient_is_lost_or_counted_twice(g: featstore.OutOfCoreGraph, device: str) -> None:
    """With weights that stay and whole neighbourhoods, rows are never old: an epoch's gradients are those without a history."""
    model = GraphSAGE(5, DIM, 3, 2, dropout=0.0).double().to(device)

    def gradients() -> list[torch.Tensor]:
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    def epoch(history: featstore.History | None) -> int:
        with make(g, history, (-1, -1), device=device) as loader:
            for batch in loader:
                scores = model(batch.x.double(), batch.blocks, batch.history)
                torch.nn.functional.cross_entropy(scores, batch.y, reduction="sum").backward()
            return loader.stats()["rows"]

    n_rows = epoch(None)
    plain = gradients()
    history = history_of(4)
    assert epoch(history) < n_rows
    late = history.state_dict()["gradients"]
    assert late.abs().sum() > 0
    without = [a.clone() for a in (parameter.grad for parameter in model.parameters())]
    assert not all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(without, plain, strict=True))
    # What still waits, passed on to the nodes it is for, all computed once more.
    sampler = featstore.NeighborSampler(g, [-1])
    sampled = sampler.sample(torch.from_numpy(NODES))
    block, x = sampled.blocks[0].map(lambda tensor: tensor.to(device)), g.features["x"][sampled.input_ids].double().to(device)
    h = model.norms[0](model.layers[0](x, block)).relu()
    h.backward(late)
    for found, wanted in zip(gradients(), plain, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)


def test_half_precision_rows_have_sums_in_single(g: featstore.OutOfCoreGraph, device: str) -> None:
    history = history_of(3, dtype=torch.float16)
    with make(g, history, device=device) as loader:
        for batch in loader:
            h = torch.ones(batch.blocks[-2].n_dst, DIM, device=device, requires_grad=True)
            (batch.history.merge(h) * 1e-6).sum().backward()
        state = history.state_dict()
        assert state["table"].dtype == torch.float16
        assert state["gradients"].dtype == torch.float32
        assert state["gradients"].max() > 1e-7
        on_host = DIM * (2 + 4) if device == "cpu" else 0
        assert g.memory_report()["historical embeddings"] == len(NODES) * (on_host + 24)


@pytest.mark.parametrize("options", [{"gradients": False}, {"staleness": 0}])
def test_without_gradients_there_is_no_memory_for_them(g: featstore.OutOfCoreGraph, options: dict[str, Any], device: str) -> None:
    history = history_of(**{"staleness": 3, **options})
    with make(g, history, device=device):
        assert history.state_dict()["gradients"] is None
        assert history.stats()["bytes"] == len(NODES) * DIM * 8
        assert g.memory_report()["historical embeddings"] == len(NODES) * ((DIM * 8 if device == "cpu" else 0) + 24)


def test_a_state_brings_what_waits(g: featstore.OutOfCoreGraph, device: str) -> None:
    """A training that goes on from a state has the gradients of one that was never left."""

    def run(loader: featstore.Loader, stop: int, found: list[torch.Tensor]) -> None:
        for batch in loader:
            generator = torch.Generator().manual_seed(batch.index)
            h = torch.rand(batch.blocks[-2].n_dst, DIM, dtype=torch.float64, generator=generator).to(device).requires_grad_()
            batch.history.merge(h).square().sum().backward()
            found.append(h.grad)
            if batch.index + 1 == stop:
                break

    whole: list[torch.Tensor] = []
    with make(g, history_of(2), device=device) as loader:
        run(loader, 100, whole)
    parts: list[torch.Tensor] = []
    with make(g, history := history_of(2), device=device) as loader:
        run(loader, 4, parts)
        saved, place = copy.deepcopy(history.state_dict()), loader.state_dict()
    again = history_of(2)
    again.load_state_dict(saved)
    with make(g, again, device=device) as loader:
        loader.load_state_dict(place)
        run(loader, 100, parts)
    assert len(parts) == len(whole) == 8
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    with pytest.raises(ValueError, match="one has gradients"):
        history_of(2, gradients=False).load_state_dict(saved)
    with pytest.raises(ValueError, match="one has gradients"):
        history_of(2).load_state_dict({**saved, "gradients": None})


def test_a_loop_that_does_not_train(g: featstore.OutOfCoreGraph, device: str) -> None:
    """Without a backward pass, or without gradients at all, nothing is passed on and nothing is lost."""
    with make(g, history := history_of(3), device=device) as loader:
        for batch in loader:
            h = torch.ones(batch.blocks[-2].n_dst, DIM, dtype=torch.float64, device=device)
            h.requires_grad_(batch.index % 2 == 0)
            merged = batch.history.merge(h)
            assert merged.requires_grad == h.requires_grad
        assert not history.state_dict()["gradients"].any()
