"""OutOfCoreGraph: what was created is opened; pickles, forks, budgets."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.config import format_size, parse_disk
from featstore.errors import BudgetError, BusyError, ClosedError
from featstore.graph import snapshot as snapshots
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage.catalog import read_catalog
from featstore.storage.lock import READERS_LOCK, FileLock
from featstore.storage.update import Update

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(small: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the small dataset, to be damaged."""
    return Path(shutil.copytree(small.path, tmp_path / "g"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of datasets are made here, and fsync would take most of the time; test_format sees that it is called."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def names(root: Path, kind: str) -> Path:
    """The file of a kind of field in the small dataset."""
    (record,) = (item for item in read_catalog(root).files.values() if kind in item.name)
    return root / record.name


# --- what is there --------------------------------------------------------------------------------------------------------------


def test_everything_is_as_it_was_created(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        assert (g.num_nodes, g.num_edges) == (small.num_nodes, len(small.indices))
        assert (list(g.features), list(g.node_data)) == (["h", "x"], ["train_idx", "y"])
        assert torch.equal(g.features["x"][:], torch.from_numpy(small.x))
        assert torch.equal(g.features["h"][:], torch.from_numpy(small.h))
        assert torch.equal(g.node_data["y"], torch.from_numpy(small.y))
        assert torch.equal(g.node_data["train_idx"], torch.from_numpy(small.train_idx))
        np.testing.assert_array_equal(g.topology.indptr, small.indptr)
        found = np.empty(len(small.indices), g.topology.id_dtype)
        g.topology.read_edges(np.arange(len(small.indices)), found)
        np.testing.assert_array_equal(found, small.indices)
        assert g.neighbor_cache is None
        assert repr(g).splitlines()[0] == f"OutOfCoreGraph({str(small.path)!r}, num_nodes=1000, num_edges={len(small.indices)})"
        assert "x" in g.features
        assert "z" not in g.features
        assert len(g.features) == 2
        assert repr(g.features) == "{'h': float16 [1000, 300], 'x': float32 [1000, 25]}"
        assert repr(g.node_data) == "{'train_idx': int64 [300], 'y': int64 [1000]}"
        assert repr(g.edge_features) == "{}"


def test_fields_are_shown_without_being_read(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        assert "int64 [1000]" in repr(g.node_data)
        assert "node data" not in g.memory_report()
        assert repr(g.budget) == f"Budget({format_size(g.budget.used)} of 64.00 MiB held, at most {format_size(g.budget.peak)})"


def test_completion_shows_public_names(small: SimpleNamespace) -> None:
    """All that the class and the documentation name, and nothing that is there for loaders and samplers."""
    with featstore.open(small.path, memory="64MiB") as g:
        shown = {name for name in dir(g) if not name.startswith("__")}
        assert all(hasattr(g, name) for name in dir(g))
        of_class = set(re.findall(r"^    ([a-z_, ]+) : ", featstore.OutOfCoreGraph.__doc__ or "", re.MULTILINE))
        assert {each for names in of_class for each in names.split(", ")} <= shown
        pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs" / "guide").glob("*.md")])
        assert set(re.findall(r"\bg\.([a-z_]+)", pages)) <= shown
        assert not {name for name in shown if name.startswith("_")}
        assert not shown & {"locked", "make_cache", "cache_for_planner", "snapshot", "policy_inputs"}
    packages = {"adapters", "distributed", "testing"}
    assert {name for name in dir(featstore) if not name.startswith("__")} <= {*featstore.__all__, *packages}
    assert {*featstore.__all__, "__version__"} <= set(dir(featstore))
    assert "budget" not in dir(featstore)


def test_every_dtype_as_node_data(tmp_path: Path) -> None:
    """As a feature each is read in test_feature.py."""
    data: dict[str, torch.Tensor] = {}
    for dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        x = torch.randint(0, 2, (20, 3)).to(getattr(torch, dtype))
        forms = {"one": x[:, 0], "more": x[:7], "none": x[:0], "cube": x.reshape(5, 4, 3)}
        data |= {f"{name}_{dtype}": values for name, values in forms.items()}
    with OutOfCoreGraph.create(tmp_path / "g", np.zeros(21, np.int64), [], {}, data) as g:
        for name, expected in data.items():
            assert g.node_data[name].dtype == expected.dtype
            assert torch.equal(g.node_data[name], expected), name
        g.verify()


def test_an_empty_graph(tmp_path: Path) -> None:
    with OutOfCoreGraph.create(tmp_path / "g", [0], [], {"x": np.zeros((0, 3))}, {"y": np.zeros(0)}) as g:
        assert (g.num_nodes, g.num_edges) == (0, 0)
        assert g.features["x"][[]].shape == (0, 3)
        assert len(g.node_data["y"]) == 0
        assert g.topology.indptr.tolist() == [0]
        g.cache("x", "1MB")
        g.cache_neighbors("1MB")
        assert g.features["x"][:].shape == (0, 3)
        g.verify()


def test_node_data_is_read_once_and_counted(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        assert "node data" not in g.memory_report()
        y = g.node_data["y"]
        assert g.node_data["y"] is y
        assert g.memory_report()["node data"] == y.nbytes
    assert g.memory_report() == {}


def test_missing_names_say_what_there_is(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        with pytest.raises(KeyError, match=r"no feature 'z'; there is 'h', 'x'"):
            g.features["z"]
        with pytest.raises(KeyError, match=r"no node data 'x'; there is 'train_idx', 'y'"):
            g.node_data["x"]
        with pytest.raises(KeyError):
            g.cache("z", 10)


def test_attributes_of_other_libraries_name_the_field(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        with pytest.raises(AttributeError, match=r"no attribute 'x'; it has features\['x'\]"):
            _ = g.x
        with pytest.raises(AttributeError, match=r"no attribute 'train_idx'; it has node_data\['train_idx'\]"):
            _ = g.train_idx
        with pytest.raises(AttributeError, match="'OutOfCoreGraph' object has no attribute 'num_features'"):
            _ = g.num_features
    for arguments in ({}, {"memory": "64MiB"}):
        with pytest.raises(TypeError, match=r"featstore.open\(path"):
            featstore.OutOfCoreGraph(small.path, **arguments)


def test_a_property_that_fails_does_so_with_its_own_error(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(g: featstore.OutOfCoreGraph) -> None:
        raise AttributeError("of its own")

    monkeypatch.setattr(featstore.OutOfCoreGraph, "node_types", property(fails))
    with featstore.open(small.path, memory="64MiB") as g, pytest.raises(AttributeError, match="of its own"):
        _ = g.node_types


# --- closing --------------------------------------------------------------------------------------------------------------------


def test_a_closed_graph_says_so(small: SimpleNamespace) -> None:
    g = featstore.open(small.path, memory="64MiB")
    x, held = g.features["x"], g.features["x"][:5]
    g.cache("x", "50KB", "lru")
    g.cache_neighbors()
    g.close()
    g.close()
    assert g.closed
    assert torch.equal(held, torch.from_numpy(small.x[:5]))
    calls: list[Callable[[], Any]] = [
        lambda: x[0],
        lambda: g.node_data["y"],
        lambda: g.topology,
        lambda: g.cache("x", "50KB"),
        lambda: g.cache_neighbors(),
        lambda: g.verify(),
        lambda: pickle.dumps(g),
        lambda: pickle.dumps(x),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert g.memory_report() == {}
    assert "closed" in repr(g)


# --- while somebody writes ------------------------------------------------------------------------------------------------------


def test_a_replaced_dataset_goes_on_until_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "g"
    with OutOfCoreGraph.create(path, np.zeros(5001, np.int64), [], {"x": np.zeros((5000, 4))}, {"y": np.zeros(3)}) as old:
        with OutOfCoreGraph.create(path, np.zeros(5001, np.int64), [], {"x": np.ones((5000, 4))}, overwrite=True) as new:
            assert float(new.features["x"][:].sum()) == 20_000
        assert float(old.features["x"][:].sum()) == 0
        assert old.node_data["y"].tolist() == [0, 0, 0]
        assert old.topology.num_edges == 0
        shutil.rmtree(path)
        assert float(old.features["x"][[4999]].sum()) == 0


def test_an_open_dataset_keeps_what_a_reader_may_use_and_a_closed_one_does_not(copy: Path) -> None:
    """A temporary file is no reader's."""
    for name in ("left.tmp", "node.gone.1.rows"):
        (copy / name).touch()
    with featstore.open(copy, memory="64MiB"):
        with Update(copy):
            assert not (copy / "left.tmp").exists()
            assert (copy / "node.gone.1.rows").exists()
    with Update(copy):
        assert not (copy / "node.gone.1.rows").exists()


def test_reading_beside_a_writer_and_a_sweeper(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Update(copy), featstore.open(copy, memory="64MiB") as g:
        g.verify()
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "OPEN_PATIENCE_S", 0.0)
        with FileLock(copy / READERS_LOCK, exclusive=True), pytest.raises(BusyError):
            featstore.open(copy)
    sweeper = FileLock(copy / READERS_LOCK, exclusive=True)
    with monkeypatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: sweeper.release())
        featstore.open(copy, memory="64MiB").close()  # waits until the sweeper is done
        assert not sweeper.is_held
    (copy / READERS_LOCK).unlink()  # as on media that were never written to
    featstore.open(copy, memory="64MiB").close()


def test_a_dataset_that_a_dying_builder_moved_aside_is_found(copy: Path) -> None:
    copy.rename(copy.with_name(f"g.old-{'0' * 32}"))
    with featstore.open(copy, memory="64MiB") as g:
        g.verify()


# --- budgets --------------------------------------------------------------------------------------------------------------------


def test_a_budget_too_small_to_read_anything(small: SimpleNamespace) -> None:
    with pytest.raises(BudgetError, match="would do") as caught:
        featstore.open(small.path, memory=1000)
    assert caught.value.needed is not None
    with pytest.raises(ValueError, match="not a size"):
        featstore.open(small.path, memory="lots")
    with pytest.raises(ValueError, match="backend"):
        featstore.open(small.path, backend="carrier pigeon")
    with pytest.raises(ValueError, match="verify"):
        featstore.open(small.path, verify="never")


def test_node_data_and_offsets_beyond_the_budget(tmp_path: Path) -> None:
    n = 2_000_000
    path = tmp_path / "g"
    OutOfCoreGraph.create(path, np.zeros(n + 1, np.int64), [], {}, {"y": np.zeros(n, np.int64)}).close()
    with featstore.open(path, memory="8MiB") as g:
        for call in (lambda: g.node_data["y"], lambda: g.topology):
            before = g.memory_report()
            with pytest.raises(BudgetError) as caught:
                call()
            assert caught.value.needed > 16_000_000
            assert g.memory_report() == before


# --- other processes ------------------------------------------------------------------------------------------------------------


def test_a_graph_pickles_as_path_and_options(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="32MiB", backend="pread", verify="off", threads=1) as g:
        g.cache("x", "10KB")
        data = pickle.dumps(g)
        assert len(data) < 500
        with pickle.loads(data) as other:
            assert (other.path, other.options) == (g.path, g.options)
            assert other.features["x"].cache is None
            assert torch.equal(other.features["x"][:], g.features["x"][:])


def test_stores_that_travel_share_one_graph(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="32MiB") as g:
        x, h = pickle.loads(pickle.dumps((g.features["x"], g.features["h"])))
        assert torch.equal(x[[1, 2]], g.features["x"][[1, 2]])
        assert torch.equal(h[[1, 2]], g.features["h"][[1, 2]])
        graph = x._reopen.args[0]
        assert graph is h._reopen.args[0]
        graph.close()
        again = pickle.loads(pickle.dumps(g.features["x"]))
        assert again._reopen.args[0] is not graph
        assert torch.equal(again[[0]], g.features["x"][[0]])
        again._reopen.args[0].close()


def test_a_store_that_travels_is_of_the_dataset_that_is_there(tmp_path: Path) -> None:
    """Also beside one that travelled when another dataset was at the path."""

    def make(value: float) -> OutOfCoreGraph:
        x = np.full((10, 3), value, np.float32)
        empty = np.empty(0, np.int64)
        return OutOfCoreGraph.create(
            tmp_path / "g", np.zeros(11, np.int64), empty, {"x": x}, overwrite=True, progress=False, memory="32MiB"
        )

    with make(1) as first:
        before = pickle.loads(pickle.dumps(first.features["x"]))
        with make(2) as second:
            after = pickle.loads(pickle.dumps(second.features["x"]))
            assert after[0].tolist() == [2, 2, 2]
            assert before[0].tolist() == [1, 1, 1]
            assert pickle.loads(pickle.dumps(second.features["x"]))._reopen.args[0] is after._reopen.args[0]
            after._reopen.args[0].close()
        before._reopen.args[0].close()


def _child(g: OutOfCoreGraph, ids: list[int], queue: Any) -> None:
    torch.set_num_threads(1)
    rows = g.features["x"][ids].numpy().tobytes()
    queue.put((rows, g.node_data["y"][ids].tolist(), g.topology.degrees()[ids].tolist(), g.num_nodes))


@pytest.mark.shares_resources  # the resource tracker that spawn starts stays
@pytest.mark.parametrize(("method", "used"), [("fork", True), ("fork", False), ("spawn", True)])
def test_a_graph_in_another_process(small: SimpleNamespace, method: str, used: bool) -> None:
    """Forked with queues running, or pickled into a fresh interpreter; the parent goes on unharmed."""
    context = multiprocessing.get_context(method)
    ids = [5, 999, 0, 5]
    with featstore.open(small.path, memory="64MiB") as g:
        if used:
            g.cache("x", "10KB", "lru")
            assert len(g.features["x"][ids]) == len(g.node_data["y"][ids]) == len(ids)
            assert g.topology.num_nodes == 1000
        queue = context.SimpleQueue()
        children = [context.Process(target=_child, args=(g, ids, queue)) for _ in range(1 + (method == "fork"))]
        for child in children:
            child.start()
        expected = (small.x[ids].tobytes(), small.y[ids].tolist(), np.diff(small.indptr)[ids].tolist(), 1000)
        for _ in children:
            assert queue.get() == expected
        for child in children:
            child.join()
            assert child.exitcode == 0
        assert torch.equal(g.features["x"][ids], torch.from_numpy(small.x[ids]))
        queue.close()
    FileLock(Path(small.path) / READERS_LOCK, exclusive=True).release()


def test_a_graph_that_nobody_closed_makes_no_noise_at_exit(small: SimpleNamespace) -> None:
    script = "import sys, featstore"
    for backend in ("io_uring", "pread"):
        script += f"; sys.modules['kept {backend}'] = g = featstore.open({str(small.path)!r}, backend={backend!r})"
        script += "; g.features['x'][[1]]; g.node_data['y']"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_threads_of_one_graph_load_its_data_once(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        found: list[Any] = []
        barrier = threading.Barrier(8)

        def load() -> None:
            barrier.wait()
            found.append((g.node_data["y"], g.topology))

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(y) for y, _ in found}) == len({id(topology) for _, topology in found}) == 1


def test_sizes_and_threads_as_users_write_them(small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open(small.path, memory=np.int64(40 << 20)) as g:  # NumPy's integers are integers
        assert g.budget.total == 40 << 20
    for wrong in (np.int32(-1), True, 1e9):
        with pytest.raises((ValueError, TypeError), match="memory"):
            featstore.open(small.path, memory=wrong)  # type: ignore[arg-type]
    for text, n_bytes in (("1.5x", 1500), ("0.1X", 100), (" 2 x ", 2000), ("1.5KB", 1500), ("0x", 0), (7, 7)):
        assert parse_disk(text, 1000) == n_bytes
    assert parse_disk("0.3x", 10**18) == 3 * 10**17  # exactly
    for text in ("x", "-1x", "1.5 xB", "1.x", "1e3x", "fast"):
        with pytest.raises(ValueError, match="or a multiple of the features"):
            parse_disk(text, 1000)
    with pytest.raises(ValueError, match="not a size"):
        featstore.open(small.path, memory="1.5x")
    monkeypatch.setenv("FEATSTORE_THREADS", "abc")
    with pytest.raises(ValueError, match="FEATSTORE_THREADS must be a number of threads, not 'abc'"):
        featstore.open(small.path)
    featstore.open(small.path, threads=1).close()


def test_checking_all_pages_at_open_stays_within_a_small_budget(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="5MB", verify="open") as g:
        assert g.budget.peak <= g.budget.total
        assert torch.equal(g.features["x"][:], torch.from_numpy(small.x))
