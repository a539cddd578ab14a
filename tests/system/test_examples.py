"""The examples run, at small sizes, each as a program of its own."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from benchmarks.tools import r22
from tests.support.programs import OF_PYG, run_program
from tests.support.ranks import held_port, torchrun, two_forks
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
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], as_version=4)
manager = AsyncKernelManager(transport="ipc", ip="kernel")  # sockets in this folder: a free port may be taken before it is used
NotebookClient(book, manager, timeout=400, startup_timeout=400, resources={"metadata": {"path": "."}}).execute()
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
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in json.loads(done.stdout) for output in cell]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert len(re.findall(r"epoch \d: loss [\d.]+", printed)) == 3
    assert float(printed.split("test accuracy ")[1]) > 0.7  # guessing: 0.25
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds


WAYS = ("memmap", "ondemand", "streamed", "packed")


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(os.fspath(ROOT / "examples"))
    return importlib.import_module("demo")


@pytest.mark.stress  # .ci/run and make stress run the demo itself, which fails where losses differ
def test_demo(tmp_path):
    folder = tmp_path / "demo"
    printed = run("demo.py", "--folder", folder, "--nodes", 20_000, "--memory", 48 << 20, "--seconds", 300, cwd=tmp_path)
    assert "identical to the last bit" in printed
    assert printed.splitlines()[-1].endswith("-m featstore doctor")  # what to do next
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir()} == {"demo.png", *(f"{way}.json" for way in WAYS)}
    found = {way: json.loads((folder / f"{way}.json").read_text()) for way in WAYS}
    theirs = found["memmap"]
    for way, ours in found.items():
        assert ours["losses"] == theirs["losses"]
        assert ours["epochs"][-1]["test_accuracy"] == theirs["epochs"][-1]["test_accuracy"] > 0.15  # guessing: 0.06
        assert ours["stats"]["rows"] == theirs["stats"]["rows"]
        assert ours["memory"]["peak"] <= 48 << 20
        assert ours["resident"]["before"] < ours["resident"]["peak"]
        assert (ours["once_s"] > 0) == (way == "packed")
        assert ours["stats"]["rows_loaded"] <= ours["stats"]["rows"]
        assert ours["steps"] == 2 * ours["batches_an_epoch"] == ours["stats"]["batches"]
    assert theirs["stats"]["rows_loaded"] > 0  # its file was not in the page cache; the others have memory for all rows here
    assert ["superbatch" in ours["stats"] for ours in found.values()] == [False, False, True, False]
    assert ["layout" in ours["stats"] for ours in found.values()] == [False, False, False, True]


def ran(losses, seconds=2.0, loaded=60):
    """Result of the demo: two epochs of three batches, 100 rows of 512 bytes, ``loaded`` by a read of 4 KiB each."""
    stats = {"batches": 6, "rows": 100, "rows_loaded": loaded, "row_bytes": 512, "reads": loaded, "bytes_read": 4096 * loaded}
    stats |= {"seconds": {"compute": 1.0}, "hits": {"host": 100 - loaded, "base": loaded}}
    epochs = [{"epoch": k, "seconds": seconds, "test_accuracy": 0.5 + k / 10} for k in range(2)]
    of = {"batches_an_epoch": 3, "steps": 6, "once_s": 0.0, "unlimited": "", "resident": {"before": 3e8, "peak": 5e8}}
    return {"stats": stats, "epochs": epochs, "losses": losses, "features_bytes": 1 << 30, "budget": 1 << 28, **of}


@pytest.mark.parametrize(("losses", "other"), covering([[2.5, 1.75, 1.5], [2.5, 1.75], [2.5, 1.5], []], WAYS))
def test_the_demo_fails_where_losses_differ(tmp_path, monkeypatch, capsys, demo, losses, other):
    """The batches of the runs must be identical, and there must be something: else the exit status says so."""
    monkeypatch.setattr(demo, "run", lambda kind, *_: ran(losses if kind == other else [2.5, 1.75, 1.5]))
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


def test_the_demo_s_pages_named_at_its_end_exist(demo):
    pages = re.findall(r"[\w/-]+\.md", demo.NEXT)
    assert len(pages) == 6
    assert not [page for page in pages if not (ROOT / page).exists()]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^docs:", makefile, re.MULTILINE)
    assert "build/site/index.html" in demo.NEXT
    assert "build/site/index.html" in makefile


def test_the_demo_s_picture(tmp_path, monkeypatch, demo):
    """Each way's seconds, times, reads and accuracy, an epoch, also of a run that was stopped; and what was not limited."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    results = {
        way: ran([2.5], seconds, loaded) for way, seconds, loaded in zip(WAYS, (8, 4, 2, 1), (90, 60, 40, 20), strict=True)
    }
    results["packed"]["once_s"] = 3.0
    half = results["memmap"]
    half["steps"], half["epochs"] = 3, half["epochs"][:1]  # the loader had made all batches
    demo.draw(results, tmp_path / "demo.png")
    (figure,) = drawn
    seconds, rows, memory = figure.axes
    said = [[text.get_text() for text in axes.texts] for axes in (seconds, rows, memory)]
    assert said[0] == ["8.0 s", "4.0 s: 2.0 ×", "2.0 s: 4.0 ×", "1.0 s: 8.0 ×\n(+ 3.0 s once)"]
    assert said[1] == ["45 reads", "30 reads", "20 reads", "10 reads"]
    assert said[2] == ["500 MB"] * 4
    assert memory.get_legend().texts[0].get_text() == "with all rows in memory"
    assert memory.lines[0].get_xdata()[0] == pytest.approx(300 + (1 << 30) / 1e6)
    assert "8.0 × as fast as a memory map, same losses to the last bit" in figure.get_suptitle()
    assert "in 268 MB" in figure.get_suptitle()
    labels = [label.get_text().split("\n") for label in seconds.get_yticklabels()]
    assert labels[0][:3] == ["np.memmap", "16 threads", "accuracy 0.500"]
    assert labels[3] == ["featstore", "packed", "accuracy 0.600"]
    widths = [[1e6 * bar.get_width() for bar in bars] for bars in rows.containers]  # an epoch of 50 rows
    assert widths[0] == pytest.approx([512 * n for n in (5, 20, 30, 40)])
    assert widths[1] == pytest.approx([512 * n for n in (45, 30, 20, 10)])
    assert widths[2] == pytest.approx([(4096 - 512) * n for n in (45, 30, 20, 10)])
    assert "held to 738 MB" in figure.get_supxlabel()
    assert "fewer reads" not in figure.get_suptitle()
    assert labels[0][-1] == "after 3 of 6 batches"
    assert [container.get_label() for container in seconds.containers] == ["waiting for batches", "computing"]
    results["memmap"]["unlimited"] = "Permission denied"
    results["streamed"]["losses"] = [2.25]
    demo.draw(results, tmp_path / "demo.png")
    assert "all memory of the machine" in drawn[1].get_supxlabel()
    assert "LOSSES DIFFER" in drawn[1].get_suptitle()


def test_the_demo_says_where_the_model_takes_the_time(tmp_path, monkeypatch, capsys, demo):
    """Times of ways that differ by the model's noise alone are not the picture's title."""
    from matplotlib.figure import Figure

    titles: list[tuple[str, str]] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: titles.append((figure.get_suptitle(), figure.axes[0].get_title()))
    )
    results = {way: ran([2.5], 2.0, loaded) for way, loaded in zip(WAYS, (90, 60, 40, 20), strict=True)}
    for computed in (3.0, 3.8):  # of two epochs' 4 s
        for result in results.values():
            result["stats"]["seconds"]["compute"] = computed
        demo.report(results)
        demo.draw(results, tmp_path / "demo.png")
    printed = capsys.readouterr().out
    assert printed.count("took 95% of each epoch") == printed.count("of each epoch or more") == 1
    assert "1.0 × as fast" in titles[0][0]
    assert titles[0][1] == "Seconds an epoch"
    assert "4 × fewer reads than a memory map, same losses" in titles[1][0]
    assert titles[1][1] == "Seconds an epoch, 95% or more of them the model's"


def test_the_demo_says_what_was_not_limited_and_what_was_stopped(capsys, demo):
    results = {way: ran([2.5]) for way in WAYS}
    demo.report(results)
    assert "control group" not in (printed := capsys.readouterr().out)
    assert "stopped" not in printed
    results["memmap"] |= {"unlimited": "Permission denied", "steps": 4}
    demo.report(results)
    printed = capsys.readouterr().out
    assert "(Permission denied): np.memmap had all memory of this machine as page cache" in printed
    assert "16 threads: stopped after 4 of 6 batches" in printed


@pytest.mark.parametrize("n_threads", [1, 16])
def test_the_demo_s_map_has_the_rows(tmp_path, demo, n_threads):
    """Every count of ids, so that the threads' parts end anywhere: rows are those of the file, in order."""
    x = np.random.default_rng(0).standard_normal((300, 5), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    store = demo.MapStore(tmp_path / "x.npy", n_threads)
    for n in (0, 1, 15, 64, 65, 300, 1_000):
        ids = torch.from_numpy(np.random.default_rng(n).integers(0, 300, n))
        counts = demo.GatherCounts()
        assert torch.equal(store.gather(ids, None, {}, counts), torch.from_numpy(x)[ids])
        assert sum(counts.rows.values()) == n


def test_the_demo_s_map_counts_the_pages_that_the_drive_gave(tmp_path, demo):
    """One a row of a page each, all of them at first; none afterwards."""
    x = np.random.default_rng(0).standard_normal((300, 1024), dtype=np.float32)
    # Only clean pages are dropped from the page cache, and os.fsync does nothing in tests.
    with open(os.open(tmp_path / "x.npy", os.O_WRONLY | os.O_CREAT | os.O_DSYNC), "wb") as file:
        np.lib.format.write_array(file, x)
    store = demo.MapStore(tmp_path / "x.npy", 4)
    ids = torch.arange(0, 300, 3)
    first, second = demo.GatherCounts(), demo.GatherCounts()
    for counts in (first, second):
        store.gather(ids, None, {}, counts)
    assert first.rows[demo.Tier.BASE] == 100
    assert 100 <= first.read.reads <= 202  # the header moves rows over two pages each
    assert first.read.bytes_read == mmap.PAGESIZE * first.read.reads
    assert second.rows == {demo.Tier.BASE: 0, demo.Tier.HOST: 100}
    assert second.read.reads == 0


@pytest.mark.parametrize("scale", [2, 11, 12])
def test_the_reference_workload(tmp_path, scale):
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


def test_rmat_is_skewed_as_it_should():
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
