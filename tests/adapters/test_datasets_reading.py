"""Imports of tables that were ended: the same call goes on in the middle of a table, with the ids, rows and counts of one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.adapters.datasets.report import Report
from featstore.adapters.datasets.tables import Column, EdgeTable, NodeTable, import_tables
from featstore.adapters.datasets.tables import importer as module
from featstore.adapters.datasets.tables.files import TableFile
from featstore.adapters.datasets.tables.pairs import Pairs
from featstore.adapters.datasets.tables.reading import Reading
from featstore.creation import steps
from featstore.errors import FormatError
from featstore.idmaps.numbering import Room
from featstore.testing.faults import OPERATIONS, forked, sweep
from tests.support.imports import Interrupts, assert_same, contents, same_reports
from tests.support.programs import run_in_fork

N, N_EDGES = 1500, 9_000
MEMORY = "10MiB"


def write_tables(folder: Path, n: int = N, n_edges: int = N_EDGES) -> None:
    """Papers in two Parquet files of several row groups, with lists and gaps; edges in two CSV files; writers without a table."""
    rng = np.random.default_rng(0)
    for number, part in enumerate(np.array_split(np.arange(n), 2)):
        labels = [None if i % 11 == 0 else int(i % 5) for i in part]
        columns = {"doi": [f"10.1/{i * 7919 % 100_003}-ü" for i in part], "y": labels}
        columns["words"] = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(len(part) * 64, np.float32)), 64)
        columns["split"] = [("train", "test", None, "valid")[i * 4 // n] for i in part]
        pa.parquet.write_table(pa.table(columns), folder / f"papers-{number}.parquet", row_group_size=max(1, n // 5))
    for number in range(2):
        src, dst = rng.integers(0, n, (2, n_edges // 2)) * 7919 % 100_003
        lines = "".join(f"10.1/{s}-ü,10.1/{d}-ü,{w}\n" for s, d, w in zip(src, dst, range(len(src)), strict=True))
        (folder / f"cites-{number}.csv").write_text("from,to,w\n" + lines)
    who, what = rng.integers(-500, 500, n_edges // 3) * 1000, rng.integers(0, n, n_edges // 3) * 7919 % 100_003
    lines = "".join(f"{a},10.1/{p}-ü\n" for a, p in zip(who, what, strict=True))
    (folder / "writes.csv").write_text("who,what\n" + lines)
    pa.parquet.write_table(
        pa.table({"id": ["a", "b"], "words": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(128, np.float32)), 64)}),
        folder / "books.parquet",
    )


def make(folder: Path, target: Path, **options: Any) -> Report:
    data = {"y": Column("y", dtype="int64", fill=-1)}
    nodes = {
        "paper": NodeTable(folder / "papers-*.parquet", "doi", {"x": "words"}, data, split="split"),
        "book": NodeTable(folder / "books.parquet", "id", {"x": "words"}),  # in the file of the papers' rows
    }
    edges = {
        ("paper", "cites", "paper"): EdgeTable(folder / "cites-*.csv", "from", "to", {"w": "w"}),
        ("author", "writes", "paper"): EdgeTable(folder / "writes.csv", "who", "what"),
    }
    given = {"memory": MEMORY, "progress": False, "remove_self_loops": True, **options}
    return import_tables(target, nodes, edges, **given)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables, and the dataset of them; a test must not change them."""
    folder = tmp_path_factory.mktemp("tables")
    write_tables(folder)
    make(folder, folder / "whole")
    return folder


@pytest.mark.parametrize("n_each", [1, 4])
def test_each_call_goes_on_where_the_last_one_stopped(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_each: int
) -> None:
    """In the middle of files; each is ended at one of its first records, so one that began anew would never be done."""
    whole = make(made, made / "whole", overwrite=True)
    interrupts = Interrupts(monkeypatch)
    report, n_calls = interrupts.until_done(lambda: make(made, tmp_path / "g"), tmp_path / "g", n_each)
    assert n_calls == interrupts.records // n_each + 1
    assert interrupts.records >= 12, "several in each file"
    assert same_reports(report, whole)
    assert contents(tmp_path / "g") == contents(made / "whole")
    assert os.listdir(tmp_path) == ["g"]


def test_edges_without_rows_are_recorded_too(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no file of rows grows: they are pairs of ids, which are sorted when all are read."""
    nodes, edges = NodeTable(made / "papers-*.parquet", "doi"), EdgeTable(made / "cites-*.csv", "from", "to")
    whole = import_tables(made / "pairs", nodes, edges, memory=MEMORY, progress=False)
    note, at = Reading._note, []
    monkeypatch.setattr(Reading, "_note", lambda self: (at.append(self._at[0]), note(self)))
    interrupts = Interrupts(monkeypatch)
    report, _ = interrupts.until_done(
        lambda: import_tables(tmp_path / "g", nodes, edges, memory=MEMORY, progress=False), tmp_path / "g"
    )
    assert at.count(1) >= 2
    assert same_reports(report, whole)
    assert contents(tmp_path / "g") == contents(made / "pairs")


def test_names_through_files_go_on_behind_the_tables(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of the attempt in memory are forgotten; the next call reads no table again."""
    monkeypatch.setattr(module, "Room", lambda _: Room(20_000))
    interrupts = Interrupts(monkeypatch)
    skip = steps.Steps.skip

    def ended(self: Any, *args: Any) -> None:
        skip(self, *args)
        raise KeyboardInterrupt

    interrupts.left = 1 << 30
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(steps.Steps, "skip", ended)
        make(made, tmp_path / "g")
    (left,) = tmp_path.glob("g.tmp-*")
    assert (left / Pairs.name).exists()
    n_blocks = [0]
    blocks = TableFile.blocks

    def counted(self: TableFile, *args: Any) -> Any:
        n_blocks[0] += len(args) > 1
        return blocks(self, *args)

    monkeypatch.setattr(TableFile, "blocks", counted)
    report = make(made, tmp_path / "g")
    assert n_blocks[0] == 0
    assert any("through files" in note for note in report.notes)
    assert contents(tmp_path / "g") == contents(made / "whole")


def test_other_inputs_begin_anew(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another time of a file, another option. Another memory is none: it changes blocks alone."""
    folder = tmp_path / "in"
    shutil.copytree(made, folder)
    interrupts = Interrupts(monkeypatch)

    def ended(**options: Any) -> str:
        interrupts.left = 3
        with pytest.raises(KeyboardInterrupt):
            make(folder, tmp_path / "g", **options)
        (left,) = tmp_path.glob("g.tmp-*")
        return left.name

    seen = [ended(), ended(remove_self_loops=False), ended(missing="drop"), ended(topology="chunked")]
    assert len(set(seen)) == 4
    assert ended(memory="24MiB", topology="chunked") == seen[-1]
    os.utime(folder / "cites-1.csv", ns=(1, 1))
    assert ended(topology="chunked") not in seen
    interrupts.left = 1 << 30
    make(folder, tmp_path / "g")
    assert contents(tmp_path / "g") == contents(made / "whole")
    assert sorted(os.listdir(tmp_path)) == ["g", "in"]


def test_another_memory_goes_on(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch)
    for number in range(100):
        interrupts.left = 3
        try:
            make(made, tmp_path / "g", memory=("10MiB", "40MiB", "100MiB")[number % 3])
            break
        except KeyboardInterrupt:
            pass
    assert contents(tmp_path / "g") == contents(made / "whole")


def test_names_that_were_changed_are_found(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch)
    interrupts.left = 8
    with pytest.raises(KeyboardInterrupt):
        make(made, tmp_path / "g")
    (file,) = (each for each in tmp_path.glob("g.tmp-*/ids@paper.names.1.rows.*.tmp") if ".sums." not in each.name)
    data = bytearray(file.read_bytes())
    data[4096:8192] = bytes(4096)
    file.write_bytes(data)
    interrupts.left = 1 << 30
    with pytest.raises(featstore.errors.CorruptionError, match="distinct names instead of"):
        make(made, tmp_path / "g")
    assert not list(tmp_path.glob("g*"))
    make(made, tmp_path / "g")
    assert contents(tmp_path / "g") == contents(made / "whole")


@settings(max_examples=20)
@given(st.data())
def test_files_of_any_lengths_and_ends_anywhere(data: st.DataObject) -> None:
    """Against a dictionary of names in order of first appearance."""
    is_text = data.draw(st.booleans())
    names = st.integers(-30, 30)
    lengths = st.lists(st.lists(st.tuples(names, names), max_size=40), min_size=1, max_size=4)
    files = data.draw(lengths)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        for number, edges in enumerate(files):
            columns = [pa.array([str(edge[k]) if is_text else edge[k] for edge in edges]) for k in range(2)]
            kind = pa.string() if is_text else pa.int64()
            table = pa.table({"s": columns[0].cast(kind), "d": columns[1].cast(kind), "w": np.arange(len(edges))})
            pa.parquet.write_table(table, folder / f"e-{number}.parquet", row_group_size=data.draw(st.integers(1, 50)))
        interrupts = Interrupts(patch)
        edge_table = EdgeTable(folder / "e-*.parquet", "s", "d", {"w": "w"})
        while True:
            interrupts.left = data.draw(st.integers(0, 4))
            try:
                report = import_tables(folder / "g", edges=edge_table, progress=False, memory=MEMORY)
                break
            except KeyboardInterrupt:
                pass
        pairs = [edge for edges in files for edge in edges]
        order = {end: number for number, end in enumerate(dict.fromkeys(end for pair in pairs for end in pair))}
        assert (report.edges_read, report.nodes) == (len(pairs), {"_": len(order)})
        with featstore.open(folder / "g", memory="64MiB") as g:
            found = g.ids().decode(range(len(order)))
            assert [int(each) for each in found] == list(order)
            weights = [w for edges in files for w in range(len(edges))]
            assert g.edge_features["w"][:].tolist() == weights
            src, dst = np.concatenate([np.empty((2, 0), np.int64), *(block.numpy() for block in g.edges())], axis=1)
            assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == sorted((order[s], order[d]) for s, d in pairs)


def kill_each(folder: str, step: int) -> None:
    """Kill an import at every ``step``-th system call, in place of another dataset; in the child."""
    steps.CHECKPOINT_S = -1e9  # type: ignore[misc]
    root, target = Path(folder) / "in", Path(folder) / "g"
    root.mkdir()
    write_tables(root, 200, 900)
    make(root, root / "whole")
    make(root, root / "old", remove_self_loops=False, topology="chunked")
    n_killed = 0
    for fault in sweep(folder, OPERATIONS, "kill", step=step):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(root / "old", target)
        with fault:
            killed = forked(lambda: make(root, target, overwrite=True))
        n_killed += killed is not None
        with featstore.open(target, memory="64MiB", backend="pread") as g:
            g.verify(progress=False)
        make(root, target, overwrite=True)
        assert contents(target) == contents(root / "whole")
        assert {each for each in os.listdir(folder) if each.startswith("g")} == {"g"}, "what was left is removed"
    assert n_killed >= 300 // step
    assert_same(target, root / "whole")


@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize("step", [401, pytest.param(3, marks=pytest.mark.stress)])
def test_killed_in_place_of_another(tmp_path: Path, step: int) -> None:
    run_in_fork(kill_each, str(tmp_path), step, timeout_s=3000 if step == 3 else 500)


@pytest.mark.parametrize(
    ("block_bytes", "n", "remedy"),
    [(1 << 20, 3 << 20, "1.00 MiB .*; give more memory"), (8 << 20, 18 << 20, "8.00 MiB .*; keep")],
)
def test_a_row_that_is_longer_than_a_block(tmp_path: Path, block_bytes: int, n: int, remedy: str) -> None:
    """More memory is no remedy where a block is as long as they get."""
    path = tmp_path / "long.csv"
    path.write_text("a,b\n1," + "x" * n + "\n2,y\n3," + "z" * n + "\n")
    with pytest.raises(FormatError, match=f"long.csv.*a row is longer than the {remedy}"):
        list(TableFile(str(path), None, None, (), block_bytes).blocks({"a": None, "b": None}))


@pytest.mark.parametrize("n_before", [0, 1, 300_000])
@pytest.mark.parametrize("quote", ["", '"'])
def test_rows_that_are_longer_than_the_usual_block(tmp_path: Path, n_before: int, quote: str) -> None:
    """Blocks become longer where the first of them is met: no row twice, none left out, types stay."""
    texts = ["short"] * n_before + ["x" * (3 << 20), "y", "z" * (4 << 20)] + ["short"] * 1000
    path = tmp_path / "long.csv"
    path.write_text("a,b\n" + "".join(f"{number},{quote}{text}{quote}\n" for number, text in enumerate(texts)))
    file = TableFile(str(path), None, None, (), 8 << 20)
    assert file.schema == pa.schema({"a": pa.int64(), "b": pa.string()})
    for begin in (0, n_before + 1):
        blocks = list(file.blocks({"a": None, "b": None}, begin))
        assert [value for block in blocks for value in block.column("a").to_pylist()] == list(range(begin, len(texts)))
        assert [value for block in blocks for value in block.column("b").to_pylist()] == texts[begin:]
        assert blocks[0].first == begin + 2
        assert blocks[-1].end == len(texts)
