"""The command line: results, --json, and errors of one line."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from featstore.cli import run
from featstore.cli.main import _interrupts_end, main
from featstore.cli.parser import COMMANDS
from featstore.storage.calls import close_quietly
from featstore.storage.catalog import read_catalog
from tests.support.graphs import skewed_dataset

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Arrays of a graph of 6 nodes as .npy files."""
    arrays = {
        "indptr": np.array([0, 2, 3, 3, 5, 6, 6]),
        "indices": np.array([1, 2, 0, 5, 4, 3], np.int32),
        "edge_index": np.array([[1, 2, 0, 5, 4, 3], [0, 0, 1, 3, 3, 4]]),
        "x": np.arange(12, dtype=np.float32).reshape(6, 2),
        "y": np.array([0, 1, 0, 1, 0, 1]),
        "train_idx": np.array([0, 1, 3]),
        "test_mask": np.array([False, False, True, False, True, True]),
    }
    paths = {name: tmp_path / f"{name}.npy" for name in arrays}
    for name, array in arrays.items():
        np.save(paths[name], array)
    return paths


def create(files: dict[str, Path], path: Path, *more: str) -> int:
    data = [f"{name}={files[name]}" for name in ("y", "train_idx", "test_mask")]
    csc = ["--indptr", str(files["indptr"]), "--indices", str(files["indices"])]
    return main(["create", str(path), *csc, "--features", f"x={files['x']}", "--node-data", *data, *more])


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=500, check=False, env={**os.environ, **environment})


def result(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_create_and_info(files, tmp_path, capsys):
    assert create(files, tmp_path / "g", "--json") == 0
    made = result(capsys)
    assert made["num_nodes"] == made["num_edges"] == 6
    assert made["features"] == {"x": {"shape": [6, 2], "dtype": "float32", "bytes": 48}}
    assert set(made["node_data"]) == {"y", "train_idx", "test_mask"}
    assert made["seconds"] >= 0
    assert main(["info", str(tmp_path / "g"), "--json", "--memory", "16MiB", "--backend", "pread"]) == 0
    info = result(capsys)
    assert info["budget"] == 16 << 20
    assert info["reader"]["x"]["backend"] == "pread"
    assert info["disk_bytes"] == made["disk_bytes"] > 0
    assert main(["info", str(tmp_path / "g")]) == 0
    text = capsys.readouterr().out
    assert "6 nodes, 6 edges" in text
    assert "x: float32 [6, 2], 48 B" in text
    with featstore.open(tmp_path / "g") as g:
        assert torch.equal(g.features["x"][:], torch.arange(12.0).reshape(6, 2))


def test_create_from_edges(files, tmp_path, capsys):
    edges = ["--edge-index", str(files["edge_index"]), "--num-nodes", "6"]
    assert main(["create", str(tmp_path / "g"), *edges, "--features", f"x={files['x']}", f"z={files['x']}", "--json"]) == 0
    assert set(result(capsys)["features"]) == {"x", "z"}
    create(files, tmp_path / "h")
    with featstore.open(tmp_path / "g") as g, featstore.open(tmp_path / "h") as h:
        assert np.array_equal(g.topology.indptr, h.topology.indptr)


@pytest.mark.parametrize("option", ["coalesce", "remove_self_loops", "to_undirected"])
def test_create_cleans_edges(files, tmp_path, capsys, option):
    edges = np.array([[0, 1, 1, 5, 2], [1, 0, 1, 4, 2]]).repeat(2, 1)
    np.save(tmp_path / "edges.npy", edges)
    line = ["create", str(tmp_path / "g"), "--edge-index", str(tmp_path / "edges.npy"), "--num-nodes", "6", "--json"]
    assert main([*line, f"--{option.replace('_', '-')}"]) == 0
    made = featstore.OutOfCoreGraph.from_edge_index(tmp_path / "h", edges, 6, progress=False, **{option: True})
    with made as h, featstore.open(tmp_path / "g") as g:
        assert result(capsys)["num_edges"] == h.num_edges != edges.shape[1]
        assert torch.equal(next(g.edges()), next(h.edges()))


def test_overwrite(files, tmp_path, capsys):
    assert create(files, tmp_path / "g") == 0
    assert create(files, tmp_path / "g") == 2
    assert create(files, tmp_path / "g", "--overwrite") == 0
    assert "made in" in capsys.readouterr().out


def test_verify(files, tmp_path, capsys):
    create(files, tmp_path / "g")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "g"), "--json"]) == 0
    assert result(capsys)["ok"] is True
    assert main(["verify", str(tmp_path / "g")]) == 0
    assert "all as they were written" in capsys.readouterr().out
    (rows,) = (tmp_path / "g").glob("node.x.*.rows")
    with rows.open("r+b") as file:
        file.seek(4100)
        file.write(b"\x55")
    assert main(["verify", str(tmp_path / "g")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "node.x" in captured.err


def test_train(small, capsys):
    options = ["--epochs", "2", "--batch-size", "50", "--hidden", "8", "--fanouts", "3,2", "--lr", "0.01", "--memory", "64MiB"]
    assert main(["train", str(small.path), *options, "--cache", "0", "--json"]) == 0
    first = result(capsys)
    assert len(first["epochs"]) == 2
    assert len(first["losses"]) == 12
    assert first["epochs"][0]["test_accuracy"] is None
    more = ["--policy", "lru", "--cache", "0.1", "--neighbor-cache", "1MiB", "--prefetch", "1", "--threads", "1"]
    assert main(["train", str(small.path), *options, *more, "--json"]) == 0
    second = result(capsys)
    assert second["losses"] == first["losses"]
    assert second["stats"]["hits"]["host"] > 0 == first["stats"]["hits"]["host"]
    assert main(["train", str(small.path), *options, "--json"]) == 0  # all rows fit, so by default all are in memory
    default = result(capsys)
    assert default["losses"] == first["losses"]
    assert default["stats"]["hits"]["base"] == 0
    assert main(["train", str(small.path), *options, "--max-batches", "2", "--cache", "40KB"]) == 0
    captured = capsys.readouterr()
    for text in ("epoch 1: loss", "gather", "host", "cache of 'x'", "64.00 MiB are held"):
        assert text in captured.out
    assert captured.err == ""


def test_numbers_below_zero_need_no_equals_sign(small, capsys):
    """Two hops of all neighbours."""
    options = ["--epochs", "1", "--batch-size", "50", "--hidden", "8", "--memory", "64MiB", "--json"]
    losses = []
    for fanouts in (["--fanouts", "-1,-1"], ["--fanouts=-1,-1"], ["--fanouts", "1000,1000"]):
        assert main(["train", str(small.path), *options, *fanouts]) == 0
        losses.append(result(capsys)["losses"])
    assert losses[0] == losses[1] == losses[2]


def test_train_by_layers(small, tmp_path, capsys):
    """Other batches, of fewer nodes; the same losses under every strategy; what goes with the sampler alone is refused."""
    options = ["--epochs", "1", "--batch-size", "50", "--hidden", "8", "--fanouts", "3,2", "--memory", "64MiB"]
    command = ["train", str(small.path), *options]
    assert main([*command, "--json"]) == 0
    usual = result(capsys)
    assert main([*command, "--sampler", "labor", "--batch-dependency", "4", "--json"]) == 0
    layers = result(capsys)
    assert layers["losses"] != usual["losses"]
    assert layers["stats"]["rows"] < usual["stats"]["rows"]
    more = ["--sampler", "labor", "--batch-dependency", "4", "--strategy", "superbatch", "--cache", "0.2", "--length", "3"]
    assert main([*command, *more, "--json"]) == 0
    assert result(capsys)["losses"] == layers["losses"]
    more = ["--sampler", "epoch", "--draws", "labor", "--batch-dependency", "4", "--window", "2"]
    assert main([*command, *more, "--json"]) == 0
    assert result(capsys)["losses"] == layers["losses"]
    dependency = "--batch-dependency goes with --sampler labor or --draws labor, not"
    for arguments, message in [
        (["--batch-dependency", "4"], f"{dependency} neighbor"),
        (["--sampler", "epoch", "--batch-dependency", "4"], f"{dependency} epoch"),
        ([*more, "--importance-sampling", "1"], "--importance-sampling goes with --sampler labor, not epoch"),
        (["--draws", "labor"], "--draws goes with --sampler epoch, not neighbor"),
        (["--sampler", "labor", "--window", "2"], "--window goes with --sampler epoch, not labor"),
        (["--sampler", "labor", "--weight", "w"], "--weight goes with --sampler neighbor or shadow, not labor"),
        (["--weight", "w"], "the graph has no edge feature 'w'"),
    ]:
        assert main([*command, *arguments]) != 0
        assert message in capsys.readouterr().err
    pack = str(tmp_path / "pack")
    assert main(["pack", str(small.path), pack, "--sampler", "labor", "--batch-size", "50", "--fanouts", "3,2"]) == 0
    capsys.readouterr()
    assert main(["train", pack, "--sampler", "labor"]) != 0
    assert "--sampler goes with a dataset" in capsys.readouterr().err


def test_train_looking_ahead(small, tmp_path, capsys):
    """The losses of training on demand; the stages of figure 14; run files where they are asked for, and gone afterwards."""
    options = ["--batch-size", "50", "--hidden", "8", "--fanouts", "3,2", "--memory", "64MiB", "--neighbor-cache", "0.1"]
    command = ["train", str(small.path), *options]
    assert main([*command, "--strategy", "ondemand", "--cache", "0", "--json"]) == 0
    plain = result(capsys)
    assert "plan" not in plain["stats"]["seconds"]
    assert 0 < plain["memory"]["peak"] <= plain["memory"]["total"] == 64 << 20
    assert plain["memory"]["holders"]["neighbor cache"]["bytes"] > 0
    ahead = ["--strategy", "superbatch", "--cache", "0.2", "--length", "2", "--run-dir", str(tmp_path / "runs")]
    assert main([*command, *ahead, "--disk", "10MB", "--json"]) == 0
    planned = result(capsys)
    assert planned["losses"] == plain["losses"]
    assert planned["stats"]["rows_loaded"] < plain["stats"]["rows_loaded"]
    assert planned["stats"]["seconds"].keys() >= {"sample", "plan", "load", "gather", "update", "wait", "compute", "evaluate"}
    assert not (tmp_path / "runs").exists()
    assert main([*command, *ahead, "--max-batches", "3"]) == 0
    text = capsys.readouterr().out
    stages = [
        "inspect: sampling",
        "inspect: planning",
        "preparation: run files",
        "preparation: gather",
        "cache update",
        "compute",
    ]
    assert sorted(map(text.index, stages)) == [text.index(stage) for stage in stages]
    assert main([*command, *ahead, "--disk", "1KB"]) == 2
    assert "disk budget" in capsys.readouterr().err


def test_bench(tmp_path, capsys):
    path = skewed_dataset(tmp_path / "g", 1000, 10, narrow=3)
    assert main(["bench", str(path), "--rows", "200", "--runs", "2", "--json"]) == 0
    measured = result(capsys)
    kept = read_catalog(path).extra["drive/speed"]
    assert measured["drive"].items() >= {name: kept[name] for name in ("iops", "bandwidth", "write_bandwidth")}.items()
    assert measured["drive"]["gap_bytes"] >= 4096
    assert main(["info", str(path), "--json"]) == 0
    assert result(capsys)["drive"] == kept
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{kept['iops']:,.0f} random reads/s; GB/s: {kept['bandwidth'] / 1e9:.2f} read" in shown
    assert "copies " not in shown  # nobody has measured them
    assert "tables " not in shown
    assert main(["plan", str(path), "--explain", "--fanouts", "4,3", "--batch-size", "100", "--sizes", "10%"]) == 0
    capsys.readouterr()
    assert main(["info", str(path), "--json"]) == 0
    copies = read_catalog(path).extra["copy/speed"]
    tables = read_catalog(path).extra["tables/speed"]
    described = result(capsys)
    assert (described["copies"], described["tables"]) == (copies, tables)
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{copies['copy_bandwidth'] / 1e9:.2f} alone" in shown
    assert f"{1e9 * tables['planned_table_s']:.0f} where they change" in shown
    assert measured["feature"] == "x"  # the largest
    assert measured["rows"] == 200
    for each in (measured["gather"], measured["memory"]):
        assert each["rows_per_s"] == pytest.approx(200 / each["seconds"])
    assert measured["gather"]["reads_per_s"] > 0
    assert measured["memory"]["reads_per_s"] == 0
    assert main(["bench", str(path), "--rows", "5000", "--runs", "1", "--feature", "z"]) == 0
    text = capsys.readouterr().out
    assert "feature 'z'" in text
    assert "1,000 rows a gather" in text
    assert "drive: random reads" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "{tmp}/nowhere"], "nowhere: no such file or directory; "),
        (["verify", "{tmp}/nowhere"], "featstore import make one"),
        (["info", "{tmp}"], "{tmp}"),
        (["train", "{small}", "--policy", "magic"], "no policy"),
        (["train", "{small}", "--labels", "z"], "featstore: --labels: the dataset has no 'z'"),
        (["train", "{small}", "--feature", "z"], "feature: the dataset has no 'z'"),
        (["train", "{small}", "--memory", "100KB"], "budget"),
        (["train", "{small}", "--cache", "5.0"], "share of the rows"),
        (["train", "{small}", "--cache", "0.1", "--policy", "belady"], "it takes a static policy or an online policy"),
        (["train", "{small}", "--strategy", "superbatch", "--cache", "7.5"], "--cache: a share of the rows"),
        (
            ["create", "{small}", "--edge-index", "{tmp}/edges.npy", "--num-nodes", "3"],
            "overwrite=True (--overwrite) replaces it",
        ),
        (["plan", "{small}", "--simulate", "--epochs", "1"], "--epochs goes with --explain"),
        (["plan", "{small}", "--simulate", "--length", "4"], "--length goes with --explain"),
        (["plan", "{small}", "--simulate", "--measure"], "--measure goes with --explain"),
        (["plan", "{small}", "--explain", "--policies", "lru"], "--policies goes with --simulate"),
        (["train", "{small}", "--strategy", "superbatch", "--policy", "lru"], "it takes a planned policy"),
        (["train", "{small}", "--length", "5"], "--length: goes with --strategy ginex, packed, streamed or superbatch"),
        (["train", "{small}", "--save", "{tmp}/nowhere/model"], "the folder of the model"),
        (["train", "{small}", "--save", "{tmp}"], "a directory in place of the model"),
        (["info", ""], "an empty path; '.' is the working directory"),
        (["create", "", "--indptr", "{tmp}/x.npy", "--indices", "{tmp}/x.npy"], "an empty path"),
        (["train", "{small}", "--neighbor-cache", "1.5"], "--neighbor-cache as a share of the memory"),
        (["bench", "{small}", "--feature", "z"], "no feature 'z'"),
        (["train", "{small}", "--device", "meta"], "meta"),
        (["partition", "{small}", "--array", "{tmp}/empty.npy"], "No data left in file"),
        (["create", "{tmp}/g"], "give either --indptr and --indices"),
        (["create", "{tmp}/g", "--indptr", "{tmp}/x.npy"], "give either --indptr and --indices"),
        (["create", "{tmp}/g", "--edge-index", "{tmp}/x.npy"], "--num-nodes"),
        (["create", "{tmp}/g", "--indptr", "{tmp}/x.npy", "--indices", "{tmp}/x.npy"], "x.npy: no such file"),
        (["create", "{tmp}/g", "--edge-index", "{tmp}/x.npy", "--num-nodes", "3", "--features", "a=b", "a=c"], "given twice"),
    ],
)
def test_errors_are_one_line(small, tmp_path, capsys, arguments, message):
    names = {"tmp": tmp_path, "small": small.path}
    np.save(tmp_path / "edges.npy", np.zeros((2, 1), np.int64))
    (tmp_path / "empty.npy").touch()
    assert main([text.format(**names) for text in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("featstore: ")
    assert captured.err.count("\n") == 1
    assert message.format(**names) in captured.err


def test_too_many_open_files_say_what_the_limit_is_raised_by(small, capsys, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "x.rows")

    monkeypatch.setattr(featstore.OutOfCoreGraph, "open", refuse)
    assert main(["aggregate", str(small.path)]) == 2
    words = "x.rows: Too many open files; ulimit -n raises the limit that featstore doctor shows\n"
    assert capsys.readouterr().err == f"featstore: {words}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["unpack", "g"], "invalid choice"),
        (["pack", "g"], "PACK"),
        (["plan", "g"], "one of the arguments --simulate --explain --redundancy --history is required"),
        (["info"], "DATASET"),
        (["info", "g", "--memory", "lots"], "not a size"),
        (["info", "g", "--threads", "0"], "not a positive number"),
        (["train", "g", "--fanouts", "a"], "not a list of numbers"),
        (["train", "g", "--length", "0"], "not a positive number"),
        (["create", "g", "--features", "x.npy"], "NAME=FILE.npy"),
        (["info", "g", "--memory"], "featstore info: --memory: expected one argument"),
        (["info", "g", "--memry", "1GiB"], "unrecognized arguments: --memry 1GiB (did you mean --memory?)"),
        (["info", "g", "--mem=1GiB"], "unrecognized arguments: --mem=1GiB (did you mean --memory?)"),
        (["info", "g", "--zzz"], "featstore info: unrecognized arguments: --zzz; see featstore info --help"),
        (["info", "g", "h"], "unrecognized arguments: h; see"),
    ],
)
def test_what_argparse_refuses(capsys, arguments, message):
    """In one line, which says where help is."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    command = "featstore" if arguments[:1] in ([], ["unpack"]) else f"featstore {arguments[0]}"
    assert said.startswith(f"{command}: ")
    assert said.endswith(f"; see {command} --help\n")
    assert said.count("\n") == 1


def test_help_and_version(capsys):
    for arguments in (
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("create", "info", "verify", "partition", "plan", "train", "aggregate", "infer", "bench")),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    assert "DATASET" in capsys.readouterr().out


def test_help_and_the_release_are_there_at_once():
    """Without torch, numpy, or anything else that takes time to import; the help is what the commands' own parser prints."""
    code = (
        "import sys\nfrom featstore.cli.main import main\ntry:\n    main([{!r}])\n"
        "finally:\n    print({{'torch', 'numpy'}} & {{*sys.modules}}, file=sys.stderr)"
    )
    for option in ("--help", "--version"):
        done = python("-c", code.format(option))
        assert done.returncode == 0
        assert done.stderr == "set()\n"
        if option == "--help":
            assert done.stdout == run.command_parser().format_help()


def test_shells_complete_what_shtab_is_told():
    """The pages name the parser; it knows all commands and which arguments are paths; shtab is not needed."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "command-line.md").read_text()
    (name,) = re.findall(r"shtab --shell=bash ([\w.]+)", page)
    module, _, function = name.rpartition(".")
    parser = getattr(importlib.import_module(module), function)()
    (commands,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    assert list(commands.choices) == list(COMMANDS)
    for command in commands.choices.values():
        paths = [each for each in command._actions if each.metavar in ("DATASET", "FILE", "PACK", "DIR")]
        assert "DATASET" in [each.metavar for each in paths]
        assert all(each.complete["bash"] == "_shtab_compgen_files" for each in paths)


def test_ctrl_c_while_torch_is_imported(tmp_path):
    """One line and 130, as later."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n")
    path = os.pathsep.join([os.fspath(tmp_path), os.path.dirname(os.path.dirname(featstore.__file__))])
    done = python("-m", "featstore.cli", "info", "nowhere", PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "featstore: interrupted\n")


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_ctrl_c_is_handled_as_before_once_all_is_imported(before):
    """And meanwhile, if it is ignored."""
    at_first = signal.signal(signal.SIGINT, before)
    try:
        with _interrupts_end():
            assert (signal.getsignal(signal.SIGINT) == before) == (before == signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, at_first)


def test_importing_the_package_imports_what_is_used():
    code = (
        "import sys, featstore\nassert 'torch' not in sys.modules\nassert {*featstore.__all__} <= {*dir(featstore)}\n"
        "assert 'torch' not in sys.modules\nfor name in featstore.__all__: getattr(featstore, name)\n"
        "featstore.plan.trace\nfrom featstore import *\nLoader, open\n"
        "import featstore.testing, featstore.cache.table\nassert not {'hypothesis', 'torch_geometric'} & {*sys.modules}\n"
        "try:\n    featstore.nothing\nexcept AttributeError as error:\n    print(error)"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("module 'featstore' has no attribute 'nothing'\n", "")


def test_as_a_program():
    done = python("-m", "featstore.cli", "info", "nowhere")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("closed", "status", "path"), [("2", 2, "nowhere"), ("1", 0, ""), ("1", 2, "nowhere")])
def test_an_output_that_was_closed_before(small, closed, status, path):
    """Text for it goes nowhere: not to the other one, and into no file."""
    command = f"{sys.executable} -m featstore.cli info {path or small.path} {closed}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == status
    assert done.stdout == ""
    assert done.stderr.startswith("featstore: ") == (closed == "1" and status == 2), done.stderr


def test_a_reader_that_went_away(small):
    command = f"{sys.executable} -m featstore.cli info {small.path} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=500, check=False)
    assert done.stderr == ""
    read, write = os.pipe()
    close_quietly(read)
    try:
        done = subprocess.run([*command.split()[:-2]], stdout=write, stderr=subprocess.PIPE, text=True, timeout=500, check=False)
    finally:
        close_quietly(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")  # and not 1, which is for damage


@pytest.mark.parametrize("command", ["plan {} --simulate --sizes 10% --policies lru", "convert {} --topology csc", "info {}"])
def test_paths_in_json_are_absolute(small, monkeypatch, capsys, command):
    monkeypatch.chdir(small.path.parent)
    assert main([*command.format(small.path.name).split(), "--json"]) == 0
    assert result(capsys)["path"] == str(small.path)


def test_partition(small, tmp_path, capsys):
    path = tmp_path / "g"
    shutil.copytree(small.path, path)
    assert main(["partition", str(path), "7", "--passes", "2", "--json"]) == 0
    made = result(capsys)
    assert (made["name"], made["method"], made["parts"], made["options"]["passes"]) == ("fennel-7", "fennel", 7, 2)
    assert 0 <= made["cut"] <= 1 <= made["balance"]
    with featstore.open(path) as g:
        parts = g.parts()["fennel-7"].load()
        assert len(parts) == g.num_nodes
        train = next((name for name in ("train_idx", "train_mask") if name in g.node_data), None)
        assert (made["train_nodes"] > 0) == (train is not None)
        np.save(tmp_path / "parts.npy", parts.numpy() * 2)
    assert main(["partition", str(path), "--array", str(tmp_path / "parts.npy"), "--name", "mine"]) == 0
    text = capsys.readouterr().out
    assert "13 parts by array, kept as mine" in text
    assert "empty parts    6" in text
    assert main(["partition", str(path), "6", "--levels", "3,2", "--gamma", "2", "--start", "ranges", "--json"]) == 0
    assert result(capsys)["options"] == {"passes": 3, "gamma": 2.0, "start": "ranges", "levels": [3, 2], "seed": 0}
    hops = ["partition", str(path), "5", "--hops", "2", "--visits", "3", "--seed", "1"]
    assert main([*hops, "--method", "ldg", "--json"]) == 0
    made = result(capsys)
    assert (made["name"], made["hops"], made["options"]) == ("ldg-5-hops-2", 2, {"hops": 2, "visits": 3, "seed": 1})
    with featstore.open(path) as g:
        kept = g.parts()["ldg-5-hops-2"].self_reliant()
        assert made["part_nodes"] == kept.n_nodes.tolist()
    assert (made["train_nodes"], made["empty_parts"]) == (len(kept.train_nodes), 0)
    assert main(hops) == 0
    nodes = made["part_nodes"]
    assert f"nodes a part   {sum(nodes) // 5:,} on average, {max(nodes):,} at most" in capsys.readouterr().out
    assert main(["info", str(path), "--json"]) == 0
    assert result(capsys)["parts"]["mine"] == {"parts": 13, "method": "array"}
    for arguments, text in (
        ([], "PARTS is needed"),
        (["6", "--levels", "2,2"], "--levels: 2 times 2 parts are 4, not 6"),
        (["6", "--method", "ranges", "--gamma", "2"], "--gamma: method 'ranges' has no options"),
        (["6", "--train", "nothing"], "--train: the dataset has no node data 'nothing'"),
        (["--array", str(tmp_path / "parts.npy"), "--method", "ldg"], "need no method"),
        (["6", "--method", "fennel", "--hops", "2"], "--hops: method 'fennel' has passes"),
        (["6", "--method", "lgd"], "no partitioner is named 'lgd'"),
    ):
        assert main(["partition", str(path), *arguments]) == 2
        assert text in capsys.readouterr().err
    bare = tmp_path / "bare"
    featstore.OutOfCoreGraph.from_edge_index(bare, [[0, 1], [1, 2]], 3, node_data={"y": np.zeros(3, int)}, progress=False).close()
    assert main(["partition", str(bare), "2", "--hops", "1"]) == 2
    assert "--hops divides training nodes: --train says which of the node data ['y'] has them" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "pack p.pack", "aggregate", "plan --simulate", "partition 3"])
def test_commands_for_one_type_refuse_several(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    nodes = {kind: featstore.Nodes(9, {"x": np.ones((9, 2), np.float32)}, {"y": np.zeros(9, int)}) for kind in ("a", "b")}
    featstore.OutOfCoreGraph.create(tmp_path / "g", nodes=nodes, edges={}, progress=False).close()
    name, *options = command.split()
    options = [str(tmp_path / each) if each == "p.pack" else each for each in options]
    assert main([name, str(tmp_path / "g"), *options]) == 2
    said = capsys.readouterr().err
    assert "the node types 'a', 'b'" in said
    assert said.count("\n") == 1
