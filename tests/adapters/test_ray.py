"""Ray: workers on two nodes train as two processes of gloo do, also after one is lost; Parquet becomes rows, and rows Parquet."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.errors import MissingExtraError
from featstore.registry import adapter
from tests.support import rays
from tests.support.programs import run_program
from tests.support.ranks import held_port
from tests.support.refusing import refuses

ROOT = Path(__file__).resolve().parents[2]
OF_RAY = [r"`use_\w+` is deprecated"]  # options of Ray Data, which sets them itself


@contextmanager
def environment(**more: str) -> Iterator[dict[str, str]]:
    """Yield an environment in which Ray keeps all it writes in a folder of its own, whose path is short enough for sockets.

    It refuses no work where the machine's memory or drive is nearly full, and waits for one that is busy.
    """
    with tempfile.TemporaryDirectory(prefix="fs", dir="/tmp", ignore_cleanup_errors=True) as folder:
        own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        own |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_local_fs_capacity_threshold": "1"}
        own |= {"RAY_gcs_server_request_timeout_seconds": "300"}
        yield {**os.environ, **own, "PYTHONPATH": str(ROOT), **more}


def start(way: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, rays.__file__, way, str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a program and return its output; its time is bounded."""
    try:
        printed, errors = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return printed


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make(path: Path) -> None:
    rng = np.random.default_rng(0)
    x, edges = rng.standard_normal((rays.N, 8)).astype(np.float32), rng.integers(0, rays.N, (2, 4 * rays.N))
    data = {"y": rng.integers(0, 3, rays.N), "train_idx": np.arange(rays.N)}
    featstore.OutOfCoreGraph.from_edge_index(path, edges, rays.N, {"x": x}, data, memory="16MiB", progress=False).close()


def train_by_gloo(folder: Path, environment: dict[str, str]) -> None:
    """Train in two processes of torch's own group."""
    with held_port() as port:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        for process in [start("gloo", folder, {**environment, "RANK": str(rank)}) for rank in range(2)]:
            finish(process)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.usefixtures("_program_server", "one_thread")
def test_tables_become_a_dataset_and_train_as_without_ray(tmp_path: Path) -> None:
    """Real Ray in the ordinary suite, in some fifteen seconds of processors; what trains in workers of Ray is marked stress."""
    with environment(RAY_prestart_worker_first_driver="0") as own:
        done = run_program(rays.__file__, "small", tmp_path, cwd=tmp_path, ignored=OF_RAY, **own)
    assert done.returncode == 0, done.stderr
    x, y, _, pairs = rays.arrays()
    with featstore.open(tmp_path / "g", memory="16MiB", threads=1) as g:
        assert np.array_equal(g.features["x"][:].numpy(), x)
        assert np.array_equal(g.node_data["y"].numpy(), y)
        assert np.array_equal(np.concatenate([each.numpy() for each in g.edges()], 1), pairs[:, np.lexsort(pairs)])
        model, optimizer, loader = rays.setup(g, {})
        with loader:
            expected = list(rays.steps(model, optimizer, loader))
    n_steps = rays.EPOCHS * rays.N // rays.BATCH
    assert len(expected) == n_steps
    assert lines(tmp_path / "ray") == expected
    metrics = json.loads(done.stdout.splitlines()[-1])
    assert (metrics["epoch"], metrics["batch"], metrics["step"]) == (rays.EPOCHS, 0, n_steps)
    last = [float.fromhex(loss) for *_, loss in expected[-rays.EVERY :]]
    assert metrics["loss"] == pytest.approx(np.mean(last), rel=1e-6)


@pytest.mark.stress  # a hundred seconds of processors, most of them imports in Ray's processes
def test_workers_train_as_processes_of_gloo_and_go_on_after_one_is_lost(tmp_path: Path) -> None:
    make(tmp_path / "g")
    shutil.copytree(tmp_path / "g", tmp_path / "copy")
    with environment() as own:
        found = json.loads(finish(start("train", tmp_path, own)).splitlines()[-1])
        train_by_gloo(tmp_path, own)
    n_steps = -(-rays.N // (2 * rays.BATCH))
    for rank in range(2):
        here, expected = lines(tmp_path / f"ray-{rank}"), lines(tmp_path / f"gloo-{rank}")
        assert len(expected) == rays.EPOCHS * n_steps
        # Of the steps after the last checkpoint some ranks had recorded one; all others ran once.
        again = here[: -(len(expected) - rays.EVERY)]
        assert again[: rays.EVERY] == expected[: rays.EVERY]
        assert again == expected[: len(again)]
        assert here[len(again) :] == expected[rays.EVERY :]
        assert lines(tmp_path / f"prepared-{rank}") == lines(tmp_path / f"alone-{rank}")
        assert [each[:2] for each in expected[:n_steps]] == lines(tmp_path / f"alone-{rank}")[0]
    assert {each["drive"] for _, each in lines(tmp_path / "machines")} == {"g", "copy"}
    assert lines(tmp_path / "config") == [{"given": 7}] * 4
    assert [each["step"] for each in found["metrics"]] == list(range(2, rays.EPOCHS * n_steps + 1, rays.EVERY))
    assert [each["epoch"] for each in found["metrics"]][-1] == rays.EPOCHS
    whole = [[float.fromhex(loss) for *_, loss in lines(tmp_path / f"gloo-{rank}")] for rank in range(2)]
    first = np.mean([losses[:2] for losses in whole])
    assert found["metrics"][0]["loss"] == pytest.approx(first, rel=1e-12)
    assert found["files"] == ["featstore"]


@pytest.mark.stress
def test_a_node_is_lost_and_another_takes_its_place(tmp_path: Path) -> None:
    make(tmp_path / "g")
    with environment() as own:
        found = json.loads(finish(start("lose", tmp_path, own)).splitlines()[-1])
        train_by_gloo(tmp_path, own)
    for rank in range(2):
        here, expected = lines(tmp_path / f"ray-{rank}"), lines(tmp_path / f"gloo-{rank}")
        again = here[: -(len(expected) - rays.EVERY)]
        assert again == expected[: len(again)]
        assert here[len(again) :] == expected[rays.EVERY :]
    assert len(set(lines(tmp_path / "nodes"))) == 3
    assert [each["epoch"] for each in found["metrics"]][-1] == rays.EPOCHS


@pytest.mark.stress
def test_the_example_trains_and_goes_on_under_its_name(tmp_path: Path) -> None:
    make(tmp_path / "g")
    script = ROOT / "examples" / "train_ray.py"
    more = ["--batch-size", "50", "--hidden", "8", "--every", "3", "--memory", "16MiB"]
    with environment() as own:
        for epochs in ("1", "2"):
            command = [sys.executable, script, tmp_path / "g", "--storage", tmp_path / "runs", "--epochs", epochs, *more]
            done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stderr
            found = re.findall(r"^epoch (\d), batch (\d): loss [0-9.]+$", done.stdout, re.MULTILINE)
    assert found == [("0", "6"), ("1", "0"), ("1", "4"), ("2", "0")], "the second call went on where the first had ended"


@pytest.mark.stress
def test_parquet_becomes_a_dataset_and_rows_parquet(tmp_path: Path) -> None:
    with environment() as own:
        found = json.loads(finish(start("data", tmp_path, own)).splitlines()[-1])
    for name in ("sorted", "edges", "out", "inferred", "rows"):
        assert found[name] is True, name
    assert "ValueError: column 'node' must hold 0 … n - 1, each once: sorted, 0 is where 1 belongs" in found["twice"]
    assert found["missing"].startswith("KeyError: \"the dataset has no column 'z'")
    assert "column 't'" in found["texts"]
    assert "TypeError" in found["texts"]
    assert "ValueError: column 't'" in found["ragged"]
    assert not (tmp_path / "wrong").exists()
    assert found["directories"] == ["a", "b", "c"]
    assert "ValueError: path: no directory for Machine(node_id='node'" in found["elsewhere"]
    assert found["no path"] == "TypeError: path must be a path, a mapping of machines to paths or a callable, not a int"
    assert found["no setup"] == "TypeError: setup must be a callable, not a int"
    assert found["no epochs"].startswith("ValueError: epochs must be")
    assert found["never"].startswith("ValueError: checkpoint_every must be")


class Rows:
    """A stand-in of a Ray ``Dataset``: rows in order only where that was asked for."""

    def __init__(self, columns: dict[str, Any], parent: Any = None) -> None:
        self._columns, self.context = columns, parent or SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def columns(self) -> list[str]:
        return list(self._columns)

    def select_columns(self, names: list[str]) -> Any:
        assert len(set(names)) == len(names)
        return Rows({name: self._columns[name] for name in names}, self.context)

    def iter_batches(self, *, batch_size: int, batch_format: str) -> Iterator[dict[str, Any]]:
        assert (batch_format, self.context.execution_options.preserve_order) == ("numpy", True)
        n = len(next(iter(self._columns.values())))
        for first in range(0, n, batch_size):
            yield {name: np.asarray(column[first : first + batch_size]) for name, column in self._columns.items()}


@pytest.mark.parametrize("dtypes", [("int64", "int64"), ("int32", "int32"), ("uint64", "int32"), ("uint8", "int64")])
def test_two_columns_become_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtypes: tuple[str, str]) -> None:
    """In blocks, in their order; the option of the caller's dataset is as it was, also after an error."""
    data = pytest.importorskip("featstore.adapters.ray.data")
    monkeypatch.setattr(data, "BATCH_BYTES", 16 * 7)
    pairs = np.random.default_rng(0).integers(0, 50, (2, 300))
    given = Rows({"to": pairs[1].astype(dtypes[1]), "from": pairs[0].astype(dtypes[0]), "w": np.ones(300)})
    made = data.edges(given, "from", "to")
    first = next(made)
    assert first.shape == (2, 7)
    assert first.dtype == (dtypes[0] if dtypes[0] == dtypes[1] else "int64")
    made.close()
    assert not given.context.execution_options.preserve_order
    blocks, path = data.edges(given, "from", "to"), tmp_path / "g"
    with featstore.OutOfCoreGraph.from_edge_index(path, blocks, 50, {}, memory="16MiB", progress=False) as g:
        assert np.array_equal(np.concatenate([each.numpy() for each in g.edges()], 1), pairs[:, np.lexsort(pairs)])
        placed = np.concatenate([each.numpy() for _, each in g.edges(edge_pos=True)])
    assert np.array_equal(placed, np.lexsort((np.arange(300), *pairs))), "edges have the numbers of their rows"
    assert np.array_equal(np.concatenate(list(data.edges(given, "to", "to")), 1), pairs[[1, 1]])
    refuses(KeyError, "no column 'z'; it has 'to', 'from', 'w'", lambda: data.edges(given, "from", "z"))
    for wrong in (np.ones(9), np.array([1, None, 2]), np.ones((4, 2), int)):
        other = Rows({"to": wrong, "from": np.arange(len(wrong))})
        refuses(
            TypeError,
            "column 'to' must hold an integer in each row, not ",
            lambda other=other: list(data.edges(other, "from", "to")),
        )
        assert not other.context.execution_options.preserve_order


def test_ray_is_imported_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("featstore.adapters.ray")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("ray", "ray.data", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"featstore\.adapters\.ray needs ray .*: pip install 'ray\[data,train\]'"):
        adapter("ray")
