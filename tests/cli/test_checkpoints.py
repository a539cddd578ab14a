"""``featstore train --checkpoint --resume``: killed anywhere, a training goes on as if it had not been, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli import training
from featstore.cli.checkpoints import KIND, NAME, Checkpoints
from featstore.cli.main import main
from featstore.cli.model import load_model
from featstore.errors import BusyError, CorruptionError, FormatError, VersionError
from featstore.storage.sections import SectionWriter
from featstore.testing.faults import Fault, flipped, forked, sweep
from tests.support.graphs import skewed_dataset
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses

pytestmark = pytest.mark.usefixtures("_program_server", "one_thread")

EPOCHS = 3
SMALL = ["--batch-size", "50", "--hidden", "8", "--fanouts", "3,2", "--memory", "64MiB", "--json"]
SHORT = ["--max-batches", "2"]
FILE_OPERATIONS = ("open", "write", "fsync", "rename", "close", "mkdir", "unlink")
WAYS = {  # whose states differ: batches are functions of seed, epoch and index, by whatever sampler and strategy
    "on demand": [],
    "dropout on": ["--dropout", "0.9", "--max-batches", "4"],
    "a history": ["--history", "30%", "--staleness", "4"],
    "a history that is chosen": ["--history", "auto", "--memory", "4MiB"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 training nodes, 8 batches an epoch; validation nodes, too."""
    return skewed_dataset(tmp_path_factory.mktemp("resume") / "g", 1200, 9)


def train(path: Path | str, folder: Path | str, *more: str, epochs: int = EPOCHS, save: str = "model") -> int:
    """Train up to ``epochs`` with a checkpoint in ``folder``, which also takes the model."""
    where = ["--checkpoint", f"{folder}/kept", "--save", f"{folder}/{save}"]
    return main(["train", str(path), *SMALL, "--epochs", str(epochs), *where, *more])


def outcome(folder: Path | str, shown: str, save: str = "model") -> dict[str, Any]:
    """Read the results of a training: losses, accuracies and weights, without times."""
    found = json.loads(shown)
    model, sizes = load_model(f"{folder}/{save}")
    return {
        "epochs": [{name: value for name, value in each.items() if name != "seconds"} for each in found["epochs"]],
        "losses": found["losses"],
        "sizes": sizes,
        "weights": {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()},
    }


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_bit_for_bit(way: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    assert train(data, tmp_path / "whole", *WAYS[way]) == 0
    whole = outcome(tmp_path / "whole", capsys.readouterr().out)
    assert len(whole["epochs"]) == EPOCHS
    assert whole["epochs"][0]["val_accuracy"] is not None
    parts = tmp_path / "parts"
    for epochs in range(1, EPOCHS + 1):
        torch.manual_seed(epochs)  # whatever it is where the process begins
        assert train(data, parts, *WAYS[way], "--resume", epochs=epochs) == 0
        shown = capsys.readouterr()
        done = "no epoch is trained yet" if epochs == 1 else f"going on after {epochs - 1} of {epochs} epochs"
        assert shown.err == f"featstore: {parts}/kept/{NAME}: {done}\n"
        found = outcome(parts, shown.out)
        assert found["epochs"] == whole["epochs"][:epochs]
    assert found == whole
    assert train(data, parts, *WAYS[way], "--resume", epochs=1, save="again") == 0  # nothing is left to do
    shown = capsys.readouterr()
    assert f"going on after {EPOCHS} of {EPOCHS} epochs" in shown.err
    assert outcome(parts, shown.out, "again") == whole


def test_another_strategy_goes_on_with_the_same_batches(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoint of a training on demand; the rest looks ahead, from a pack, and on the pack in place of its dataset."""
    pack = str(tmp_path / "pack")
    assert main(["pack", str(data), pack, "--batch-size", "50", "--fanouts", "3,2", "--epochs", str(EPOCHS), "--json"]) == 0
    runs = {"whole": (data, []), "ahead": (data, ["--strategy", "superbatch"]), "prefetch": (data, ["--prefetch", "0"])}
    packed = {"packed": (data, ["--strategy", "packed", "--pack", pack]), "alone": (Path(pack), [])}
    for ways in (runs, packed):
        results = []
        for name, (path, more) in ways.items():
            (tmp_path / name).mkdir()
            first = next(iter(ways.values()))
            capsys.readouterr()
            if name == next(iter(ways)):
                assert train(path, tmp_path / name, *more) == 0
            elif name != "alone":  # which cannot measure accuracies
                assert train(first[0], tmp_path / name, *first[1], epochs=1) == 0
                capsys.readouterr()
                assert train(path, tmp_path / name, *more, "--resume") == 0
            else:
                assert train(path, tmp_path / name, epochs=1) == 0
                capsys.readouterr()
                assert train(path, tmp_path / name, "--resume") == 0
            found = outcome(tmp_path / name, capsys.readouterr().out)
            found["epochs"] = [each["loss"] for each in found["epochs"]]
            results.append(found)
        assert all(each == results[0] for each in results)


def _quiet(path: str, folder: str, *more: str, epochs: int = 2) -> None:
    """Train in this process; its result goes to a file."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/shown", "w") as file:
        os.dup2(file.fileno(), 1)
        assert train(path, folder, *more, epochs=epochs) == 0


def _killed_anywhere(path: str, folder: str, step: int) -> None:
    """Kill a training at each ``step``-th call below its checkpoint's directory, in a fork; another goes on; in the child."""
    assert forked(lambda: _quiet(path, f"{folder}/whole", *SHORT)) is None
    whole = outcome(f"{folder}/whole", Path(f"{folder}/whole/shown").read_text())
    n_killed, seen = 0, set()
    for k, fault in enumerate(sweep(folder, FILE_OPERATIONS, "kill", step=step)):
        each = f"{folder}/{k}"
        os.makedirs(f"{each}/kept")
        fault.directory = f"{each}/kept"
        with fault:
            killed_by = forked(lambda each=each: _quiet(path, each, *SHORT))  # type: ignore[misc]
        assert killed_by == (signal.SIGKILL if fault.fired else None)
        n_killed += bool(fault.fired)
        if not fault.fired:
            break
        if os.path.exists(f"{each}/kept/{NAME}"):
            with Checkpoints(f"{each}/kept", resume=True) as there:
                seen.add(len(there.epochs))
        assert forked(lambda each=each: _quiet(path, each, *SHORT, "--resume")) is None  # type: ignore[misc]
        assert outcome(each, Path(f"{each}/shown").read_text()) == whole
        assert sorted(os.listdir(f"{each}/kept")) == [NAME, "lock"]
    assert n_killed > 80 // step
    assert seen == {0, 1, 2} if step == 1 else len(seen) > 1


@pytest.mark.parametrize("step", [53, pytest.param(1, marks=pytest.mark.stress)])
def test_a_kill_leaves_a_checkpoint(data: Path, tmp_path: Path, step: int) -> None:
    run_in_fork(_killed_anywhere, str(data), str(tmp_path), step, timeout_s=3000 if step == 1 else 500)


def _failing(path: str, folder: str) -> None:
    """Have writes, flushes and renames of the second checkpoint fail; in the child."""
    assert train(path, folder, epochs=1) == 0
    kept = f"{folder}/kept"
    before = Path(kept, NAME).read_bytes()
    for operation, error in (("write", "ENOSPC"), ("write", "EIO"), ("fsync", "EIO"), ("rename", "EIO"), ("close", "EIO")):
        with featstore.open(path) as g, Checkpoints(kept, resume=True) as checkpoints, Fault(kept, operation, error) as fault:
            try:
                training.train(g, featstore.NeighborSampler(g, [3, 2]), 2, batch_size=50, hidden=8, checkpoints=checkpoints)
            except OSError as raised:
                assert str(raised.filename).startswith(f"{kept}/{NAME}"), raised
                assert raised.errno is not None
            else:
                raise AssertionError((operation, error))
        assert fault.fired == 1
        assert Path(kept, NAME).read_bytes() == before
        assert sorted(os.listdir(kept)) == [NAME, "lock"]


def test_a_write_that_fails_keeps_the_one_before(data: Path, tmp_path: Path) -> None:
    run_in_fork(_failing, str(data), str(tmp_path))


def _in_an_epoch(path: str, folder: str) -> None:
    """Kill a training in the middle of its second epoch, not at a call of its checkpoint; in the child."""
    assert forked(lambda: _quiet(path, f"{folder}/whole")) is None
    class_ids, n_batches = training.class_ids, 0

    def kill(y: torch.Tensor) -> torch.Tensor:
        nonlocal n_batches
        n_batches += 1
        if n_batches == 17:  # 8 of the first epoch, 4 of its validation
            os.kill(os.getpid(), signal.SIGKILL)
        return class_ids(y)

    def killed() -> None:
        training.class_ids = kill
        _quiet(path, f"{folder}/killed")

    assert forked(killed) == signal.SIGKILL
    with Checkpoints(f"{folder}/killed/kept", resume=True) as there:
        assert [each["epoch"] for each in there.epochs] == [0]
    assert forked(lambda: _quiet(path, f"{folder}/killed", "--resume")) is None
    results = [outcome(f"{folder}/{name}", Path(f"{folder}/{name}/shown").read_text()) for name in ("whole", "killed")]
    assert results[0] == results[1]


def test_killed_in_the_middle_of_an_epoch(data: Path, tmp_path: Path) -> None:
    run_in_fork(_in_an_epoch, str(data), str(tmp_path))


def test_a_kill_while_the_model_is_saved(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training is done; the file that it left half written is in nobody's way."""
    assert train(data, tmp_path, epochs=1) == 0
    whole = outcome(tmp_path, capsys.readouterr().out)
    os.rename(tmp_path / "model", tmp_path / "model.tmp")
    assert train(data, tmp_path, "--resume", epochs=1) == 0
    assert outcome(tmp_path, capsys.readouterr().out) == whole
    assert not (tmp_path / "model.tmp").exists()


def test_what_is_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(data, tmp_path, epochs=1) == 0
    kept = tmp_path / "kept" / NAME
    capsys.readouterr()
    for more, said in (
        ([], f"{kept}: a checkpoint is there: --resume goes on from it; or remove it, or name another directory"),
        (["--resume", "--hidden", "9"], f"{kept} is of a training with sizes"),
        (
            ["--resume", "--lr", "0.5"],
            f"{kept} is of a training with lr 0.003, and now it is 0.5: give the same, or name another",
        ),
        (
            ["--resume", "--fanouts", "4,2"],
            "with sampler 'NeighborSampler(fanouts=[3, 2], replace=False, seed=0)', and now it is",
        ),
        (["--resume", "--seed", "1"], "with sampler"),
        (["--resume", "--max-batches", "2"], "with max batches None, and now it is 2"),
        (["--resume", "--history", "20%"], "with history"),
        (["--resume", "--batches", "partition"], ""),
    ):
        assert train(data, tmp_path, *more) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("featstore: ")
        assert said in line
    assert main(["train", str(data), "--resume"]) == 2
    assert "--resume goes with --checkpoint" in capsys.readouterr().err
    other = skewed_dataset(tmp_path / "other", 1200, 9)
    assert train(other, tmp_path, "--resume") == 2
    assert "of another graph" in capsys.readouterr().err
    with Checkpoints(tmp_path / "kept", resume=True), pytest.raises(BusyError, match="held by another"):
        Checkpoints(tmp_path / "kept", resume=True)
    refuses(FileNotFoundError, "", lambda: Checkpoints(tmp_path / "none" / "kept"))
    (tmp_path / "file").write_text("")
    refuses(NotADirectoryError, "", lambda: Checkpoints(tmp_path / "file"))


def test_a_damaged_checkpoint_is_said(data: Path, tmp_path: Path) -> None:
    assert train(data, tmp_path, epochs=1) == 0
    file = tmp_path / "kept" / NAME
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"no checkpoint", (tmp_path / "model").read_bytes()):
        file.write_bytes(damaged)
        refuses((CorruptionError, FormatError), re.escape(str(file)), lambda: Checkpoints(tmp_path / "kept", resume=True))
    file.write_bytes(whole)
    for offset in range(0, len(whole), len(whole) // 97):
        with flipped(file, offset, offset % 8), pytest.raises((CorruptionError, FormatError, VersionError)):
            Checkpoints(tmp_path / "kept", resume=True)
    for record in (
        b"{",
        b"[]",
        b'{"map": []}',
        b'{"map": [["version", 2]]}',
        b'{"map": [["a", {"tensor": 7, "dtype": "float32"}]]}',
    ):
        with SectionWriter(file, KIND) as writer:
            writer.append(np.frombuffer(record, np.uint8))
            writer.finish().close()
        refuses(FormatError, re.escape(str(file)), lambda: Checkpoints(tmp_path / "kept", resume=True))
    file.write_bytes(whole)
    Checkpoints(tmp_path / "kept", resume=True).close()
