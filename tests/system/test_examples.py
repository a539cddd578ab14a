"""The examples run, at small sizes, each as a program of its own."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from tests.support.programs import OF_PYG, run_program
from tests.support.ranks import held_port
from tests.support.sampled import covering

pytestmark = pytest.mark.usefixtures("_program_server")

ROOT = Path(__file__).resolve().parents[2]

GRAPHS = """
import numpy as np

def load(name):
    z = np.load(__file__.replace("graphs.py", name + ".npz"))
    return z["indptr"], z["indices"], z

def feature_blocks(z, rows=65536):
    n, d = (int(v) for v in z["x_shape"])
    ptr, col, val = z["x_indptr"], z["x_indices"], z["x_data"]
    for lo in range(0, n, rows):
        hi = min(lo + rows, n)
        block = np.zeros((hi - lo, d), np.float32)
        for v in range(lo, hi):
            block[v - lo, col[ptr[v]:ptr[v + 1]]] = val[ptr[v]:ptr[v + 1]]
        yield block
"""


def run(script: str, *arguments: object, cwd: Path) -> str:
    """Run an example and return what it printed."""
    done = run_program(
        ROOT / "examples" / script, *arguments, cwd=cwd, ignored=OF_PYG, PYTHONPATH=os.fspath(ROOT), OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def planted(path: Path) -> None:
    """Make a graph of three classes that a model learns."""
    rng = np.random.default_rng(0)
    n = 600
    y = rng.integers(0, 3, n)
    x = (2 * np.eye(3, 8)[y] + rng.standard_normal((n, 8))).astype(np.float32)
    order = rng.permutation(n)
    data = {"y": y, "train_idx": order[:400], "test_idx": order[400:]}
    edges = rng.integers(0, n, (2, 3000))
    featstore.OutOfCoreGraph.from_edge_index(path, edges, n, {"x": x}, data, progress=False).close()


def test_train_sage(tmp_path):
    planted(tmp_path / "g")
    options = ["--memory", "64MiB", "--batch-size", 50, "--hidden", 16, "--lr", 0.02]
    printed = run("train_sage.py", tmp_path / "g", *options, cwd=tmp_path)
    assert "epoch 1: loss" in printed
    assert float(printed.split("test accuracy ")[-1].split(",")[0]) > 0.7


def torchrun(folder: Path, command: list[str]) -> str:
    """Run a script in two processes of torchrun; return what they printed."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]
    environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def two_forks(folder: Path, command: list[str]) -> str:
    """Run it in two forks, whose environment is what torchrun gives."""
    common = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": os.fspath(ROOT)}

    def one(rank: int) -> subprocess.CompletedProcess[str]:
        return run_program(*command, cwd=folder, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port), **common)

    with held_port() as port, ThreadPoolExecutor(2) as pool:
        done = list(pool.map(one, range(2)))
    assert not any(each.returncode for each in done), [each.stderr for each in done]
    return "".join(each.stdout for each in done)


@pytest.mark.parametrize("together", [two_forks, pytest.param(torchrun, marks=pytest.mark.stress)])
def test_train_ddp(tmp_path, together):
    """Two processes train, and one goes on from their checkpoint; another trains from the start by itself."""
    planted(tmp_path / "g")
    options = ["--memory", "64MiB", "--batch-size", "25", "--hidden", "16", "--lr", "0.02", "--every", "3"]
    common = [os.fspath(tmp_path / "g"), *options, "--checkpoint", "train.pt"]
    printed = together(tmp_path, [os.fspath(ROOT / "examples" / "train_ddp.py"), *common, "--epochs", "1"])
    assert printed.count("epoch 0: loss") == 1
    printed = run("train_ddp.py", *common, "--epochs", 2, cwd=tmp_path)
    assert "going on with batch 0 of epoch 1" in printed
    alone = run("train_ddp.py", tmp_path / "g", *options, cwd=tmp_path)
    for each in (printed, alone):
        assert float(each.split("epoch 1: loss")[1].split("test accuracy ")[1]) > 0.7
    assert sorted(os.listdir(tmp_path)) == ["g", "train.pt"]


TERMINATED = """
import os, runpy, signal, sys
import torch

save = torch.save


def save_and_end(state, path):
    save(state, path)
    if state["loader"]["batch"] == 3:
        print(sorted(os.listdir()), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)


torch.save = save_and_end
sys.argv[0] = sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_train_ddp_leaves_no_run_files_where_torchrun_ends_it(tmp_path):
    """By SIGTERM, in the middle of an epoch, as all others are when one process is lost."""
    planted(tmp_path / "g")
    (tmp_path / "terminated.py").write_text(TERMINATED)
    options = ["--memory", "64MiB", "--batch-size", 25, "--hidden", 16, "--every", 3, "--checkpoint", "train.pt"]
    with held_port() as port:
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [tmp_path / "terminated.py", ROOT / "examples" / "train_ddp.py", tmp_path / "g", *options]
        done = run_program(*command, cwd=tmp_path, PYTHONPATH=os.fspath(ROOT), **ranks)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "['g', 'g.runs', 'terminated.py', 'train.pt.tmp']\n"
    assert sorted(os.listdir(tmp_path)) == ["g", "terminated.py", "train.pt.tmp"]


def test_epoch_sampling(tmp_path):
    printed = run("epoch_sampling.py", "--nodes", 5000, cwd=tmp_path)
    assert re.search(r"NeighborSampler: 1 batches .* MB read\nEpochSampler: 1 batches .* MB read", printed)


def test_partition_batches(tmp_path):
    printed = run("partition_batches.py", "--nodes", 3000, "--batch-size", 50, "--epochs", 3, "--macro", 2, cwd=tmp_path)
    found = re.findall(r"^(\w+) +([\d.]+) rows a seed, test accuracy ([\d.]+), ", printed, re.MULTILINE)
    (random, random_rows, random_accuracy), (partition, rows, accuracy) = found
    assert (random, partition) == ("random", "partition")
    assert float(rows) < 0.75 * float(random_rows)
    assert min(float(random_accuracy), float(accuracy)) > 0.7  # guessing: 0.2
    assert not [*tmp_path.iterdir()]


def test_history(tmp_path):
    printed = run("history.py", "--nodes", 2000, "--batch-size", 50, "--hidden", 32, cwd=tmp_path)
    found = re.findall(r"^(\w+) +([\d.]+) rows a seed, test accuracy ([\d.]+)", printed, re.MULTILINE)
    (without, all_rows, accuracy_without), (name, rows, accuracy) = found
    assert (without, name) == ("without", "history")
    assert float(rows) < 0.9 * float(all_rows)
    assert min(float(accuracy), float(accuracy_without)) > 0.7  # guessing: 0.2


@pytest.mark.parametrize("options", [["--strategy", "superbatch"], ["--loader", "stores"]], ids=str)
def test_pyg(tmp_path, options):
    common = [tmp_path / "g", "--nodes", 3000, "--batch-size", 100, "--memory", "64MiB", "--num-workers", 0]
    printed = run("pyg.py", *common, *options, cwd=tmp_path)
    assert "epoch 2: loss" in printed
    assert float(printed.split("test accuracy ")[-1]) > 0.7


def test_hetero(tmp_path):
    common = [tmp_path / "g", "--papers", 1500, "--memory", "64MiB", "--batch-size", 200, "--epochs", 2]
    printed = run("hetero.py", *common, cwd=tmp_path)
    again = run("hetero.py", *common, "--features", "memory", cwd=tmp_path)
    losses = [re.findall(r"loss ([0-9.]+)|accuracy ([0-9.]+)", each) for each in (printed, again)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_real_graph_of_a_folder(tmp_path):
    """A folder of the same form as the real graphs'."""
    rng = np.random.default_rng(0)
    n, d = 400, 30
    y = rng.integers(0, 4, n)
    words = [np.unique(np.r_[y[v], rng.integers(4, d, 3)]) for v in range(n)]
    degrees = rng.integers(0, 6, n)
    splits = np.arange(n) % 5
    np.savez(
        tmp_path / "toy.npz",
        indptr=np.r_[0, np.cumsum(degrees)],
        indices=rng.integers(0, n, degrees.sum()).astype(np.int32),
        x_shape=np.array([n, d]),
        x_indptr=np.r_[0, np.cumsum([len(w) for w in words])],
        x_indices=np.concatenate(words),
        x_data=np.ones(sum(map(len, words)), np.float32),
        y=y,
        train_mask=splits < 3,
        val_mask=splits == 3,
        test_mask=splits == 4,
    )
    (tmp_path / "graphs.py").write_text(GRAPHS)
    common = [tmp_path, "--graph", "toy", "--memory", "64MiB", "--hidden", 16, "--batch-size", 40, "--lr", 0.02, "--epochs", 3]
    printed = run("real_graph.py", *common, "--dataset", tmp_path / "kept", cwd=tmp_path)
    assert (tmp_path / "kept").is_dir()
    assert "epoch 2: loss" in printed
    assert run("real_graph.py", *common, "--cache", "0", cwd=tmp_path).split(", ")[1:3] == printed.split(", ")[1:3]
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {"graphs.py", "kept", "toy.npz"}


NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(book, timeout=120, resources={"metadata": {"path": "."}}).execute()
print(json.dumps([cell.get("outputs", []) for cell in book.cells]))
"""


def test_the_tour_runs_from_top_to_bottom(tmp_path):
    """A notebook, kept without outputs: the model learns, and the statistics are a table and a picture."""
    path = ROOT / "examples" / "tour.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]
    places = {name: os.fspath(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    environment = {**os.environ, **places, "PYTHONPATH": os.fspath(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NOTEBOOK, os.fspath(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in json.loads(done.stdout) for output in cell]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert len(re.findall(r"epoch \d: loss [\d.]+", printed)) == 3
    assert float(printed.split("test accuracy ")[1]) > 0.7  # guessing: 0.25
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds


@pytest.mark.stress  # .ci/run and make stress run the demo itself, which fails where losses differ
def test_demo(tmp_path):
    printed = run("demo.py", "--folder", tmp_path / "demo", "--nodes", 20_000, "--memory", 48 << 20, cwd=tmp_path)
    assert "identical to the last bit" in printed
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    left = {path.name for path in (tmp_path / "demo").iterdir()}
    assert left == {"demo.png", "featstore.json", "memmap.json", "memmap1.json"}
    kinds = ("featstore", "memmap", "memmap1")
    ours, theirs, single = (json.loads((tmp_path / "demo" / f"{kind}.json").read_text()) for kind in kinds)
    assert ours["losses"] == theirs["losses"]
    assert 0 < len(single["losses"]) <= len(ours["losses"])
    assert ours["losses"][: len(single["losses"])] == single["losses"]
    assert "np.memmap, 16 threads" in printed
    assert "np.memmap, 1 thread" in printed
    assert ours["memory"]["peak"] <= 48 << 20
    assert ours["epochs"][-1]["test_accuracy"] > 0.15  # guessing: 0.06


@pytest.mark.parametrize(
    ("losses", "kind_of_theirs"), covering([[2.5, 1.75, 1.5], [2.5, 1.75], [2.5, 1.5], []], ["memmap", "memmap1"])
)
def test_the_demo_fails_where_losses_differ(tmp_path, monkeypatch, capsys, losses, kind_of_theirs):
    """What the runs have must be identical, and there must be something: else the exit status says so."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "examples"))
    import demo

    def run(kind, *_):
        stats = {"batches": 3, "seconds": {"gather": 0.1}, "hits": {"host": 1, "base": 1}, "rows": 2, "epochs": 1}
        found = losses if kind == kind_of_theirs else [2.5, 1.75, 1.5]
        return {"seconds": 1.0, "stats": stats, "epochs": [], "losses": found}

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "stage_table", lambda stats: "")
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    arguments = ["--folder", os.fspath(tmp_path / "demo"), "--nodes", "2000"]
    is_same = bool(losses) and losses == [2.5, 1.75, 1.5][: len(losses)]
    if is_same:
        demo.main(arguments)
    else:
        with pytest.raises(SystemExit, match="differ") as caught:
            demo.main(arguments)
        assert caught.value.code != 0
    printed = capsys.readouterr().out
    assert ("identical to the last bit" in printed) == is_same
    # What continuous integration looks for in the demo's output, which it runs after the tests.
    ci = (ROOT / ".ci" / "run").read_text()
    assert ci.index("make test") < ci.index("make demo") < ci.index("grep")
    pattern = ci.split("grep -q '")[1].split("'")[0]
    assert bool(re.search(pattern, printed)) == is_same
    assert not re.search(pattern, printed.replace("are identical", "are NOT IDENTICAL"))


@pytest.mark.parametrize("n_threads", [1, 16])
def test_the_demo_s_map_has_the_rows(tmp_path, monkeypatch, n_threads):
    """Every count of ids, so that the threads' parts end anywhere: rows are those of the file, in order."""
    monkeypatch.syspath_prepend(os.fspath(ROOT / "examples"))
    import demo

    x = np.random.default_rng(0).standard_normal((300, 5), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    store = demo.MapStore(tmp_path / "x.npy", n_threads)
    for n in (0, 1, 15, 64, 65, 300, 1_000):
        ids = torch.from_numpy(np.random.default_rng(n).integers(0, 300, n))
        tally = demo.Tally()
        assert torch.equal(store.gather(ids, None, {}, tally), torch.from_numpy(x)[ids])


@pytest.fixture
def r22(monkeypatch):
    monkeypatch.syspath_prepend(os.fspath(ROOT / "benchmarks"))
    return importlib.import_module("r22")


@pytest.mark.parametrize("scale", [2, 11, 12])
def test_the_reference_workload(tmp_path, r22, scale):
    """R-MAT: in-CSC without duplicates, seeds with in-edges, the same from the same seed, features by the rule."""
    work = r22.generate(tmp_path / "a", scale)
    n = work.num_nodes
    indptr, indices = np.array(work.indptr), np.array(work.indices)
    keys = np.repeat(np.arange(n), np.diff(indptr)) * n + indices
    drawn = np.concatenate(list(r22.rmat_chunks(scale, work.n_drawn, 22))).astype(np.int64)
    assert np.array_equal(keys, np.unique(drawn))
    assert len(keys) == work.n_edges == indptr[-1]
    assert (np.diff(indptr)[work.seeds] > 0).all()
    assert len(np.unique(work.seeds)) == len(work.seeds) == min(200_000, int((np.diff(indptr) > 0).sum()))
    again = r22.generate(tmp_path / "b", scale)
    assert np.array_equal(again.indices, indices)
    assert np.array_equal(again.seeds, work.seeds)
    rows = np.concatenate(list(work.feature_blocks(100)))
    assert np.array_equal(np.load(work.feature_file()), rows)
    with featstore.open(work.dataset()) as g:
        ids = np.array([n - 1, 0, n // 2])
        assert np.array_equal(g.features["x"][ids].numpy(), rows[ids])
        assert g.num_edges == work.n_edges
    assert r22.generate(tmp_path / "a", scale) == work


def test_rmat_is_skewed_as_it_should(r22):
    """The top bits of source and destination, before ids are permuted, have the probabilities of the recursion: degrees tell."""
    scale, n_edges = 10, 400_000
    drawn = np.concatenate(list(r22.rmat_chunks(scale, n_edges, 1))).astype(np.int64)
    degrees = np.sort(np.bincount(drawn >> scale, minlength=1 << scale))[::-1]
    # A destination with k zero bits of ten has probability 0.76^k 0.24^(10-k).
    ones = np.array([bin(v).count("1") for v in range(1 << scale)])
    want = np.sort(n_edges * 0.76 ** (scale - ones) * 0.24**ones)[::-1]
    assert abs(degrees[0] / want[0] - 1) < 0.05
    assert abs(degrees[:11].sum() / want[:11].sum() - 1) < 0.05
    assert abs(degrees[:176].sum() / want[:176].sum() - 1) < 0.02


def test_infer(tmp_path):
    found = re.findall(r"accuracy at all nodes ([\d.]+)%", run("infer.py", cwd=tmp_path))
    assert len(found) == 2
    assert all(float(each) > 90 for each in found)
