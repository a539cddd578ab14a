"""The loader over datasets on disk, and training: bits, budgets, ends of processes, accuracy."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.sage import GraphSAGE, SageLayer, mean_of_neighbors
from featstore.cli.training import describe_epoch, evaluate, stage_table, train
from featstore.errors import BudgetError
from featstore.sampling.batch import Block
from tests.support.loaders import flat, make_loader
from tests.support.refusing import refuses

pytestmark = pytest.mark.usefixtures("one_thread")

N, CLASSES, DIM = 800, 4, 16


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> SimpleNamespace:
    """A dataset in which features are weak and neighbours of a node are mostly of its class."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, CLASSES, N)
    x = (1.2 * np.eye(CLASSES, DIM)[y] + rng.standard_normal((N, DIM))).astype(np.float32)
    src = rng.integers(0, N, 20 * N)
    dst = rng.integers(0, N, 20 * N)
    keep = (y[src] == y[dst]) | (rng.random(20 * N) < 0.05)
    order = rng.permutation(N)
    y[order[:5]] = -1
    node_data = {"y": y, "train_idx": order[:500], "val_mask": np.isin(np.arange(N), order[500:650]), "test_idx": order[650:]}
    path = tmp_path_factory.mktemp("planted") / "graph"
    edges = np.stack([src, dst])[:, keep]
    featstore.OutOfCoreGraph.from_edge_index(path, edges, N, {"x": x}, node_data, progress=False).close()
    return SimpleNamespace(path=path, x=x, y=y, train_idx=order[:500])


def run(
    path: Path,
    loader_options: dict | None = None,
    *,
    sampler_seed: int = 0,
    memory: str = "64MiB",
    backend: str = "auto",
    **options,
):
    options = {"hidden": 16, "epochs": 2, "batch_size": 64, "lr": 0.02, "progress": False, **options}
    with featstore.open(path, memory=memory, backend=backend) as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=sampler_seed)
        return train(g, sampler, 2, loader_options=flat(loader_options), **options)


@pytest.mark.parametrize("trains", [True, False])
def test_evaluation_is_without_dropout(planted, trains):
    """And leaves the model in the mode in which it was."""
    model, modes = GraphSAGE(DIM, 8, CLASSES, 1, 0.5).train(trains), []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    with featstore.open(planted.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [4])
        with featstore.Loader(g, sampler, planted.train_idx[5:105], 50, labels="y", strategy="ondemand") as loader:
            assert 0 <= evaluate(model, loader) <= 1
    assert (modes, model.training) == ([False, False], trains)


def test_mean_of_neighbors():
    block = Block(torch.tensor([0, 3, 3, 2]), torch.tensor([0, 0, 2, 2]), 4, 3)
    h = torch.arange(8.0).reshape(4, 2)
    want = torch.stack([(h[0] + h[3]) / 2, torch.zeros(2), (h[3] + h[2]) / 2])
    assert torch.equal(mean_of_neighbors(h, block), want)


@pytest.mark.parametrize("n_out", [2, 9])  # below and above the rows' width
def test_a_layer_of_means_is_the_layer_of_their_block(n_out):
    block = Block(torch.tensor([0, 3, 3, 2]), torch.tensor([0, 0, 2, 2]), 4, 3)
    layer, h = SageLayer(5, n_out), torch.arange(20.0).reshape(4, 5)
    rows = layer.of_neighbors(h) if layer.is_narrower else h
    torch.testing.assert_close(layer.of_mean(h[:3], mean_of_neighbors(rows, block)), layer(h, block))


@pytest.mark.parametrize("hidden", [2, 9])  # below and above the features' width: the two orders of projecting and averaging
def test_model_against_plain_loops(hidden):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    n_src, n_dst, n_seeds, n_in = 12, 7, 3, 5

    def block(n_edges, src, dst):
        drawn = torch.from_numpy(np.sort(rng.integers(0, dst - 1, n_edges)))
        return Block(torch.from_numpy(rng.integers(0, src, n_edges)), drawn, src, dst)

    blocks = [block(20, n_src, n_dst), block(6, n_dst, n_seeds)]
    model = GraphSAGE(n_in, hidden, 3, 2).double().eval()
    x = torch.from_numpy(rng.standard_normal((n_src, n_in)))
    h = x.numpy()
    with torch.no_grad():
        for i, b in enumerate(blocks):
            layer = model.layers[i]
            rows = []
            for v in range(b.n_dst):
                drawn = [h[u] for u, d in zip(b.src.tolist(), b.dst.tolist(), strict=True) if d == v]
                mean = np.mean(drawn, axis=0) if drawn else np.zeros(h.shape[1])
                rows.append(
                    layer.of_self.weight.numpy() @ h[v] + layer.of_self.bias.numpy() + layer.of_neighbors.weight.numpy() @ mean
                )
            h = np.array(rows)
            if i == 0:
                h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)
                h = np.maximum(h, 0)
        np.testing.assert_allclose(model(x, blocks).numpy(), h, rtol=1e-9)


def test_model_of_no_layers():
    refuses(ValueError, "n_layers", lambda: GraphSAGE(3, 4, 2, 0))


def test_learns_and_reports(planted):
    result = run(planted.path, {"policy": "degree", "cache": 0.2}, epochs=4)
    last = result.epochs[-1]
    assert last.test_accuracy > 0.85
    assert last.val_accuracy > 0.85
    assert last.loss < result.epochs[0].loss
    assert result.stats["batches"] == 4 * 8
    assert result.stats["hits"]["host"] > 0
    assert sum(result.stats["hits"].values()) == result.stats["rows"]
    table = stage_table(result.stats)
    for text in ("gather", "forward, backward, step", "host", "base", "reads of"):
        assert text in table
    host = next(line for line in table.splitlines() if line.startswith("host"))
    assert host.split()[3] in ("KiB", "MiB")
    several = stage_table({**result.stats, "row_bytes": 0})  # as of types with rows of several sizes
    host = next(line for line in several.splitlines() if line.startswith("host"))
    assert len(host.split()) == 3
    assert "test 0." in describe_epoch(last)
    assert result.to_dict()["epochs"][0]["epoch"] == 0


def test_stops_after_so_many_batches(planted):
    result = run(planted.path, max_batches=3)
    assert len(result.losses) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [({"feature": "z"}, "feature: the dataset has no 'z'"), ({"labels": "z"}, "labels: the dataset has no 'z'")],
)
def test_missing_fields(planted, options, message):
    refuses(ValueError, message, lambda: run(planted.path, **options))


def test_unsuitable_datasets(tmp_path):
    fields = {"x": np.zeros((5, 2), np.float32), "flat": np.zeros(5, np.float32)}
    with featstore.OutOfCoreGraph.from_edge_index(
        tmp_path / "g", [[0], [1]], 5, fields, {"y": np.zeros(5, np.int64)}, progress=False
    ) as g:
        sampler = featstore.NeighborSampler(g, [2])
        refuses(ValueError, "one row of numbers", lambda: train(g, sampler, 1, feature="flat"))
        refuses(ValueError, "no training seeds", lambda: train(g, sampler, 1))


def test_frequency_counts_the_first_epoch(small):
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [5, 5])
        counts = np.zeros(small.num_nodes, np.int64)
        for batch in featstore.Loader(g, sampler, small.train_idx, 40, features=[]):
            counts[batch.input_ids.numpy()] += 1
        loader = featstore.Loader(
            g, sampler, small.train_idx, 40, features=["x"], strategy=featstore.OnDemand(policy="frequency", cache=0.1)
        )
        best = np.sort(np.lexsort((np.arange(small.num_nodes), -counts))[:100])
        assert np.flatnonzero(g.features["x"].cache.map.slot_of_row >= 0).tolist() == best.tolist()
        assert loader.stats()["seconds"]["presample"] > 0
        sum(1 for _ in loader)
        assert loader.stats()["hits"]["host"] == counts[best].sum()


def test_cache_sizes(small):
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [5])

        def rows(**options):
            make_loader(g, sampler, small.train_idx, 40, **options).close()
            return [g.features[name].cache.capacity for name in ("x", "h") if g.features[name].cache is not None]

        assert rows(features=["x", "h"], cache=0.25, policy="lru") == [250, 250]
        assert rows(features=["x", "h"], cache=1.0) == [1000, 1000]
        both = rows(features=["x", "h"], cache=80_000)
        assert both[0] == both[1] == (80_000 - 2 * 4000) // 700
        assert rows(features=["x", "h"], cache="10MB") == [1000, 1000]
        caught = refuses(BudgetError, "", lambda: rows(cache="100B"))
        assert caught.value.needed == 4100
        with pytest.raises(ValueError, match="one cache"):
            rows(features=["x", "h"], policy=featstore.get_policy("lru"), cache=0.5)
        refuses(ValueError, "no policy", lambda: rows(policy="magic"))


def test_an_unfinished_iterator_does_not_keep_the_interpreter(small):
    code = f"""
        import featstore, numpy
        g = featstore.open({os.fspath(small.path)!r}, memory="64MiB")
        loader = featstore.Loader(g, featstore.NeighborSampler(g, [5]), numpy.arange(500), 10)
        iterator = iter(loader)
        next(iterator)
        print("reached the end")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "reached the end\n"
    assert done.stderr == ""


def test_a_loader_in_a_forked_child(small):
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [5])
        want = [batch.input_ids.tolist() for batch in featstore.Loader(g, sampler, small.train_idx, 40)]
        iterator = iter(featstore.Loader(g, sampler, small.train_idx, 40))
        next(iterator)
        pid = os.fork()
        if pid == 0:
            got = [batch.input_ids.tolist() for batch in featstore.Loader(g, sampler, small.train_idx, 40)]
            os._exit(0 if got == want else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert next(iterator).input_ids.tolist() == want[1]
        del iterator


def test_a_damaged_page_reaches_the_loop(small, tmp_path):
    import shutil

    path = tmp_path / "graph"
    shutil.copytree(small.path, path)
    (rows,) = path.glob("node.x.*.rows")
    with rows.open("r+b") as file:
        file.seek(4096 + 5000)
        byte = file.read(1)[0]
        file.seek(4096 + 5000)
        file.write(bytes([byte ^ 1]))
    with featstore.open(path, memory="64MiB") as g:
        sampler, seeds = featstore.NeighborSampler(g, [5]), np.arange(1000)
        refuses(featstore.CorruptionError, r"node\.x", lambda: featstore.Loader(g, sampler, seeds, 50))
        loader = featstore.Loader(g, sampler, seeds, 50, strategy=featstore.OnDemand(cache=0))
        refuses(featstore.CorruptionError, r"node\.x", lambda: list(loader))


def test_closing_the_graph_ends_the_loop(small):
    g = featstore.open(small.path, memory="64MiB")
    iterator = iter(featstore.Loader(g, featstore.NeighborSampler(g, [5]), np.arange(1000), 5))
    next(iterator)
    g.close()
    refuses(featstore.ClosedError, "", lambda: list(iterator))


def test_an_automatic_cache_does_not_depend_on_what_was_used_before(tmp_path: Path) -> None:
    """Rows that are read once, at first use, are no part of every batch."""
    n = 50_000
    rng = np.random.default_rng(0)
    featstore.OutOfCoreGraph.create(
        tmp_path / "g",
        np.arange(n + 1) * 2,
        rng.integers(0, n, 2 * n),
        {"x": rng.standard_normal((n, 8), np.float32)},
        {"y": np.arange(n)},
        progress=False,
    ).close()
    slots = []
    for used_before in (False, True):
        with featstore.open(tmp_path / "g", memory="5MB", threads=2) as g:
            if used_before:
                assert g.topology.num_edges == 2 * n
                assert len(g.node_data["y"]) == n
            sampler = featstore.NeighborSampler(g, [2, 2])
            with featstore.Loader(
                g, sampler, np.arange(500), batch_size=100, strategy=featstore.OnDemand(policy="degree")
            ) as loader:
                cache = g.features["x"].cache
                slots.append(0 if cache is None else cache.capacity)
                assert sum(len(batch.seeds) for batch in loader) == 500
    assert slots[0] > 0
    assert abs(slots[0] - slots[1]) < slots[1] // 20
