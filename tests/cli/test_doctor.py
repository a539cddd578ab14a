"""The command: its table, its JSON, its exit status."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.diagnosis import contents, process

NAMES = ["io_uring", "file system", "direct I/O", "memory", "processors", "open files", "disk", "shared memory"]
NAMES += ["packages", "devices"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    x = np.arange(30_000, dtype=np.float32).reshape(3000, 10)
    featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(3001, int), [], {"x": x}, progress=False).close()
    return tmp_path / "g"


@pytest.fixture
def ample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be memory and room, however little the machine has left and however busy its drive is."""
    monkeypatch.setattr(contents, "SLOW_IOPS", 0)
    monkeypatch.setattr(process, "available_memory", lambda: 1 << 50)
    monkeypatch.setattr(process, "memory_limit", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (1 << 40, 0, 1 << 40))


@pytest.mark.usefixtures("ample")
def test_nothing_is_in_the_way_here(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(dataset))
    assert main(["doctor", str(dataset), "--memory", "64MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(dataset)
    of_findings = [line for line in lines[1:-1] if line[2] != " "]
    assert [line[11:24].strip() for line in of_findings] == [*NAMES, "dataset", "drive"]
    assert {line.split()[0] for line in of_findings} <= {"ok", "note"}
    assert lines[-1] == "nothing is in the way"
    assert sorted(os.listdir(dataset)) == before
    assert os.listdir(dataset.parent) == ["g"]


@pytest.mark.usefixtures("ample")
def test_of_a_directory_where_a_dataset_is_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """By default the one that the shell is in; as JSON, with the figures."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["errors"], found["warnings"]) == (str(tmp_path), 0, 0)
    assert [set(each) for each in found["findings"]] == [{"name", "status", "text", "cause", "remedy", "values"}] * 11
    values = {each["name"]: each["values"] for each in found["findings"]}
    assert list(values) == [*NAMES, "drive"]
    assert values["io_uring"] == {"kernel": os.uname().release, "usable": True}
    assert values["direct I/O"]["mode"].startswith("direct")
    assert values["drive"]["iops"] > 0
    assert values["drive"]["bandwidth"] > 0
    assert values["processors"]["processors"] == len(os.sched_getaffinity(0))
    assert values["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("path", "words"), [("link", "no such file"), ("file", "not a directory: give a dataset")])
def test_of_no_directory(tmp_path: Path, path: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    assert main(["doctor", str(tmp_path / path)]) == 2
    assert words in capsys.readouterr().err


def test_a_place_that_is_not_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "new"), "--no-rates"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the nearest directory that is there" in said


def test_an_error_is_an_exit_status(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(dataset), "--no-rates", "--memory", "64KiB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["findings"] if each["status"] == "error"] == ["dataset"]
    assert found["errors"] == 1
    (dataset / "catalog.lmdb" / "data.mdb").write_bytes(b"")
    assert main(["doctor", str(dataset), "--no-rates"]) == 1
    assert "is damaged" in capsys.readouterr().out


def test_a_terminal_without_arrows_and_a_path_that_writes_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that the terminal lacks, or that would move its cursor, are escaped."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    path = tmp_path / "\x1b[31m\nnext line"
    path.mkdir()
    assert main(["doctor", str(path), "--no-rates", "--memory", "1TiB"]) == 1
    text = written.getvalue()
    assert b"\\u2192 " in text
    assert b"\\x1b[31m\\nnext line" in text
    assert b"\x1b" not in text
