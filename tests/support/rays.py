"""Programs that tests run under Ray: ``python rays.py WAY FOLDER``; it prints what it found as JSON, and leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import featstore

N, BATCH, EPOCHS, EVERY = 400, 25, 2, 2
LOST = 3  # the step at which a worker is killed, once


def setup(g: Any, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    loader = featstore.Loader(g, featstore.NeighborSampler(g, [3, 2], seed=1), np.arange(N), BATCH, strategy="ondemand")
    return model, torch.optim.Adam(model.parameters(), lr=0.01), loader


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch.x[: len(batch.seeds)]), batch.y)


def seen(batch: Any) -> list[Any]:
    return [batch.index, hashlib.sha256(batch.input_ids.numpy().tobytes() + batch.x.numpy().tobytes()).hexdigest()[:16]]


def record(folder: str, name: str, value: Any) -> None:
    with open(f"{folder}/{name}", "a") as file:
        file.write(json.dumps(value) + "\n")


def steps(model: Any, optimizer: Any, loader: Any) -> Iterator[list[Any]]:
    """Train without Ray; yield what was seen in each step, and its loss."""
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            yield [*seen(batch), loss.item().hex()]


def gloo(folder: str) -> None:
    """Train in torch's own process group: the losses of this rank, step by step."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    with featstore.open(f"{folder}/g", memory="16MiB", threads=1) as g:
        bare, optimizer, loader = setup(g, {})
        for step in steps(torch.nn.parallel.DistributedDataParallel(bare), optimizer, loader):
            record(folder, f"gloo-{rank}", step)
        loader.close()
    torch.distributed.destroy_process_group()


@contextmanager
def cluster(*nodes: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Start a raylet for each of ``nodes``, and connect; yield the cluster and its nodes."""
    import ray
    from ray.cluster_utils import Cluster

    started = Cluster()
    try:
        found = [started.add_node(include_dashboard=False, object_store_memory=100 << 20, **options) for options in nodes]
        ray.init(address=started.address, log_to_driver=False, logging_level="error")
        yield started, found
    finally:
        ray.shutdown()
        started.shutdown()


@contextmanager
def raylet(n_cpus: int) -> Iterator[None]:
    """Start one raylet, and connect."""
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=n_cpus, object_store_memory=100 << 20, **options)
    try:
        yield
    finally:
        ray.shutdown()


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, labels, an order of the nodes, and pairs of nodes."""
    rng = np.random.default_rng(0)
    x, y, order = rng.standard_normal((N, 8)).astype(np.float32), rng.integers(0, 3, N), rng.permutation(N)
    return x, y, order, rng.integers(0, N, (2, 3 * N))


def table(x: np.ndarray, y: np.ndarray, ids: np.ndarray) -> Any:
    import pyarrow as pa

    lists = pa.FixedSizeListArray.from_arrays(pa.array(x[ids].reshape(-1)), x.shape[1])
    return pa.table({"x": lists, "y": y[ids], "node": ids})


def small(folder: str) -> None:
    """Tables become a dataset, and Ray Train's local mode, which starts no workers, trains on it."""
    import pyarrow as pa
    import ray.data
    import ray.train
    import ray.train.torch

    from featstore.adapters.ray import columns, edges, training

    def recorded_loss(model: Any, batch: Any) -> torch.Tensor:
        value = loss_of(model, batch)
        record(folder, "ray", [*seen(batch), value.item().hex()])
        return value

    with raylet(1):
        ray.data.DataContext.get_current().enable_progress_bars = False
        x, y, order, pairs = arrays()
        fields = columns(ray.data.from_arrow(table(x, y, order)), ["x", "y"], id="node")
        given = edges(ray.data.from_arrow(pa.table({"from": pairs[0], "to": pairs[1]})), "from", "to")
        options: dict[str, Any] = {"memory": "16MiB", "progress": False}
        made = {"features": {"x": fields["x"]}, "node_data": {"y": fields["y"]}}
        featstore.OutOfCoreGraph.from_edge_index(f"{folder}/g", given, N, **made, **options).close()
        trainer = ray.train.torch.TorchTrainer(
            training(f"{folder}/g", setup, recorded_loss, epochs=EPOCHS, checkpoint_every=EVERY, memory="16MiB", threads=1),
            scaling_config=ray.train.ScalingConfig(num_workers=0),
        )
        print(json.dumps(trainer.fit().metrics))


def train(folder: str) -> None:
    """Two workers on two nodes, each with its directory; one is killed, once."""
    import ray.train
    import ray.train.torch

    from featstore.adapters.ray import Machine, training

    def directory(machine: Machine) -> str:
        record(folder, "machines", [machine.node_id, dict(machine.labels)])
        return f"{folder}/{machine.labels['drive']}"

    def prepared_setup(g: Any, config: dict[str, Any]) -> Any:
        model, optimizer, loader = setup(g, config)
        rank = ray.train.get_context().get_world_rank()
        record(folder, f"alone-{rank}", [seen(batch) for batch in loader])
        loader.set_epoch(0)
        prepared = ray.train.torch.prepare_data_loader(loader)
        record(folder, f"prepared-{rank}", [seen(batch) for batch in prepared])
        loader.set_epoch(0)
        record(folder, "config", config)
        return model, optimizer, loader

    def recorded_loss(model: Any, batch: Any) -> torch.Tensor:
        value = loss_of(model, batch)
        rank = ray.train.get_context().get_world_rank()
        if rank == 1 and batch.index // 2 == LOST and not os.path.exists(f"{folder}/killed"):
            assert ray.train.get_all_reported_checkpoints()  # waits until the last one is Ray's
            Path(f"{folder}/killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        record(folder, f"ray-{rank}", [*seen(batch), value.item().hex()])
        return value

    with cluster({"num_cpus": 1, "labels": {"drive": "g"}}, {"num_cpus": 1, "labels": {"drive": "copy"}}):
        trainer = ray.train.torch.TorchTrainer(
            training(directory, prepared_setup, recorded_loss, epochs=EPOCHS, checkpoint_every=EVERY, memory="16MiB", threads=1),
            train_loop_config={"given": 7},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=f"{folder}/runs", name="run", failure_config=ray.train.FailureConfig(max_failures=1)
            ),
        )
        result = trainer.fit()
        metrics = [dict(each) for _, each in result.best_checkpoints]
        print(json.dumps({"metrics": metrics, "files": sorted(os.listdir(result.checkpoint.path))}))


def lose(folder: str) -> None:
    """Two workers on two of three nodes; the node of one is taken away, and the third takes its place."""
    import ray.train
    import ray.train.torch

    from featstore.adapters.ray import Machine, training

    def recorded_loss(model: Any, batch: Any) -> torch.Tensor:
        value = loss_of(model, batch)
        rank, here = ray.train.get_context().get_world_rank(), Machine.here().node_id
        if rank == 1 and batch.index // 2 == LOST and not os.path.exists(f"{folder}/lost"):
            assert ray.train.get_all_reported_checkpoints()  # waits until the last one is Ray's
            Path(f"{folder}/lost.part").write_text(here)
            os.replace(f"{folder}/lost.part", f"{folder}/lost")
            time.sleep(600)  # the node goes meanwhile
        record(folder, f"ray-{rank}", [*seen(batch), value.item().hex()])
        record(folder, "nodes", here)
        return value

    def take_away(nodes: list[Any]) -> None:
        while not os.path.exists(f"{folder}/lost"):
            time.sleep(0.1)
        lost = Path(f"{folder}/lost").read_text()
        started.remove_node(next(each for each in nodes if each.node_id == lost), allow_graceful=False)

    with cluster({"num_cpus": 0}, *[{"num_cpus": 1}] * 3) as (started, nodes):
        watcher = threading.Thread(target=take_away, args=(nodes,), daemon=True)
        watcher.start()
        trainer = ray.train.torch.TorchTrainer(
            training(f"{folder}/g", setup, recorded_loss, epochs=EPOCHS, checkpoint_every=EVERY, memory="16MiB", threads=1),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=f"{folder}/runs", name="run", failure_config=ray.train.FailureConfig(max_failures=1)
            ),
        )
        print(json.dumps({"metrics": [dict(each) for _, each in trainer.fit().best_checkpoints]}))
        watcher.join(60)


def data(folder: str) -> None:
    """Parquet becomes a dataset, and a feature Parquet."""
    import pyarrow as pa
    import pyarrow.parquet
    import ray
    import ray.data

    from featstore.adapters.ray import Machine, columns, edges, rows, training
    from featstore.adapters.ray.training import _directory

    with raylet(2):
        ray.data.DataContext.get_current().enable_progress_bars = False
        x, y, order, pairs = arrays()
        os.mkdir(f"{folder}/parquet")
        os.mkdir(f"{folder}/edges")
        for number, part in enumerate(np.array_split(order, 5)):
            pyarrow.parquet.write_table(table(x, y, part), f"{folder}/parquet/{number}.parquet")
        nodes = ray.data.read_parquet(f"{folder}/parquet")
        for number, part in enumerate(np.array_split(pairs, 4, axis=1)):
            pyarrow.parquet.write_table(pa.table({"from": part[0], "to": part[1]}), f"{folder}/edges/{number}.parquet")
        found: dict[str, Any] = {}
        options: dict[str, Any] = {"memory": "16MiB", "progress": False}
        fields = columns(nodes, ["x", "y"], id="node")
        with featstore.OutOfCoreGraph.from_edge_index(
            f"{folder}/sorted",
            edges(ray.data.read_parquet(f"{folder}/edges"), "from", "to"),
            N,
            {"x": fields["x"]},
            {"y": fields["y"]},
            **options,
        ) as g:
            stored = torch.cat(list(g.edges()), 1).numpy()
            found["edges"] = bool((stored == pairs[:, np.lexsort(pairs)]).all())
            found["sorted"] = bool((g.features["x"][:].numpy() == x).all() and (g.node_data["y"].numpy() == y).all())
            rows(g.features["x"], "x", id="node", batch_size=150).write_parquet(f"{folder}/out")
            h = featstore.infer(g, [lambda x, block: 2 * x[: block.n_dst]], "x", "h", progress=False)
            rows(h, "h").write_parquet(f"{folder}/inferred")
        out = pyarrow.parquet.read_table(f"{folder}/out").sort_by("node").to_pandas()
        found["out"] = bool((np.stack(list(out["x"])) == x).all() and (out["node"] == np.arange(N)).all())
        out = pyarrow.parquet.read_table(f"{folder}/inferred").sort_by("id").to_pandas()
        found["inferred"] = bool((np.stack(list(out["h"])) == 2 * x).all())
        with featstore.create(f"{folder}/rows", columns(ray.data.range(N), "id")["id"], **options) as g:
            found["rows"] = bool((g["x"][:].numpy() == np.arange(N)).all())
        here, any_loss = Machine.here(), loss_of
        others = Machine("node", "host", "address", {})
        found["directories"] = [
            _directory({here.node_id: "a", here.hostname: "b"}, here),
            _directory({here.hostname: "b", here.address: "c"}, here),
            _directory({here.address: "c"}, here),
        ]
        refused = {
            "elsewhere": lambda: _directory({here.address: "c"}, others),
            "no path": lambda: training(7, setup, any_loss, epochs=1),  # type: ignore[arg-type]
            "no setup": lambda: training("g", 7, any_loss, epochs=1),  # type: ignore[arg-type]
            "no epochs": lambda: training("g", setup, any_loss, epochs=0),
            "never": lambda: training("g", setup, any_loss, epochs=1, checkpoint_every=0),
        }
        for name, attempt in refused.items():
            try:
                found[name] = repr(attempt())
            except (TypeError, ValueError) as error:
                found[name] = f"{type(error).__name__}: {error}"
        wrong = {"twice": lambda: columns(nodes.union(nodes), "x", id="node"), "missing": lambda: columns(nodes, "z")}
        wrong["texts"] = lambda: columns(ray.data.from_items([{"t": "a"}]), "t")
        wrong["ragged"] = lambda: columns(ray.data.from_items([{"t": [1, 2]}, {"t": [3]}]), "t")
        for name, make in wrong.items():
            try:
                for column in make().values():
                    featstore.create(f"{folder}/wrong", column, **options).close()
                found[name] = None
            except (ValueError, KeyError, TypeError) as error:
                found[name] = f"{type(error).__name__}: {error}"
        print(json.dumps(found))


if __name__ == "__main__":
    {"gloo": gloo, "small": small, "train": train, "lose": lose, "data": data}[sys.argv[1]](sys.argv[2])
