"""linux414-calls within 400 MB: the losses of features in memory, under every policy and backend; and what is learnt.

The graph lies in ``../shared/data`` beside the checkout; where it does not, these tests are skipped, and say so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import featstore
from featstore.cli.sage import GraphSAGE
from featstore.cli.splits import split_seeds
from featstore.cli.training import train
from tests.loaders import flat, row_policies

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
N_LOSSES = 50

pytestmark = [
    pytest.mark.skipif(not (DATA / "linux414-calls.npz").is_file(), reason=f"no linux414-calls in {DATA}"),
    pytest.mark.usefixtures("deterministic"),
]


@pytest.fixture(scope="module")
def real_graph() -> ModuleType:
    """The example that builds and trains."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import real_graph
    finally:
        sys.path.pop(0)
    return real_graph


def losses_in_memory(g: featstore.OutOfCoreGraph, x: torch.Tensor) -> list[float]:
    """The first losses with all features in one tensor, without a feature store, a cache or threads."""
    sampler = featstore.NeighborSampler(g, [10, 10])
    loader = featstore.Loader(g, sampler, split_seeds(g, "train", "y"), 1000, features=[], prefetch=0)
    y = g.node_data["y"]
    torch.manual_seed(0)
    model = GraphSAGE(x.shape[1], 256, int(y.max()) + 1, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for batch in loader:
        rows = torch.index_select(x, 0, batch.input_ids)
        loss = torch.nn.functional.cross_entropy(model(rows, batch.blocks), y[batch.seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == N_LOSSES:
            break
    return losses


@pytest.mark.stress
def test_losses_are_those_of_a_tensor_in_memory(real_graph, tmp_path):
    path = tmp_path / "linux"
    real_graph.build(DATA, "linux414-calls", path)
    graphs = real_graph.import_graphs(DATA)
    x = torch.from_numpy(graphs.features(graphs.load("linux414-calls")[2]))
    with featstore.open(path) as g:
        want = losses_in_memory(g, x)
    del x
    runs = [("auto", {"policy": policy}) for policy in row_policies()]
    runs += [(backend, {}) for backend in ("io_uring", "pread")]
    for backend, options in runs:
        policy = options.get("policy")
        if policy is not None and isinstance(featstore.get_policy(policy), featstore.PlannedPolicy):
            options["strategy"] = "superbatch"
        with featstore.open(path, memory="400MB", backend=backend) as g:
            sampler = featstore.NeighborSampler(g, [10, 10])
            result = train(
                g, sampler, 2, epochs=1, max_batches=N_LOSSES, held_out=(), progress=False, loader_options=flat(options)
            )
            assert g.budget.peak <= 400_000_000
        assert result.losses == want, (backend, options)


@pytest.mark.stress
def test_accuracy(real_graph, tmp_path):
    result = real_graph.main([str(DATA), "--dataset", str(tmp_path / "linux")])
    assert result.epochs[-1].test_accuracy >= 0.65
