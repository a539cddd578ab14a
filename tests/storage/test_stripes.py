"""Chunks in several files on several drives: made, converted, copied, moved, damaged, removed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.errors import CorruptionError, FormatError
from featstore.graph.convert import convert
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage.catalog import read_catalog, write_catalog
from featstore.storage.update import Update
from featstore.testing.faults import flipped, truncated
from tests.graph.test_convert import make, opened
from tests.support.refusing import refuses

IN_CHUNKS: dict[str, Any] = {"topology": "chunked", "chunk_bytes": 4096}


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "drive-0", tmp_path / "drive-1"]
    for each in made:
        each.mkdir()
    return made


@pytest.fixture
def root(tmp_path: Path, drives: list[Path]) -> Path:
    make(tmp_path / "g", **IN_CHUNKS, stripes=drives).close()
    return tmp_path / "g"


def chunk_files(root: Path) -> list[Path]:
    return [root / part.file for part in read_catalog(root).fields["edge/_,_,_/chunks"].parts]


def stripes(root: Path) -> set[str]:
    """Links in a dataset's directory, each of which leads to a stripe with its mark and one file."""
    links = {name for name in os.listdir(root) if name.startswith("featstore-stripe-")}
    for name in links:
        entries = set(os.listdir(root / name))
        assert {entry.split("-")[0] for entry in entries} == {"owner"} | {each for each in entries if each.startswith("edge.")}
        assert len(entries) == 3
    return links


def held(drives: list[Path]) -> set[str]:
    return {name for drive in drives for name in os.listdir(drive)}


def to(root: Path, topology: str, **options: Any) -> bool:
    return convert(root, topology, memory="64MiB", progress=False, **options)


def whole(root: Path) -> int:
    """Verify a dataset; return its edges."""
    with opened(root) as g:
        g.verify(progress=False)
        return g.num_edges


@pytest.mark.parametrize(("chunk_bytes", "n_stripes"), [(4096, 1), (4096, 5), (65536, 2), (1 << 20, 2)])
def test_files_together_are_the_one_file(tmp_path: Path, drives: list[Path], chunk_bytes: int, n_stripes: int) -> None:
    """Whatever made them; equal shares of the chunks; more stripes than chunks leave some of them empty."""
    directories = (drives * 3)[:n_stripes]
    options: dict[str, Any] = {"topology": "chunked", "chunk_bytes": chunk_bytes}
    make(tmp_path / "one", **options).close()
    make(tmp_path / "made", **options, stripes=directories).close()
    make(tmp_path / "converted").close()
    assert to(tmp_path / "converted", **options, stripes=directories)
    with opened(tmp_path / "one") as g:
        degrees = g.topology.degrees()
        targets = np.repeat(np.arange(g.num_nodes), degrees)
        sources = np.concatenate([ids.copy() for _, ids in g.topology.scan()])
    OutOfCoreGraph.from_edge_index(
        tmp_path / "edges", [sources, targets], len(degrees), **options, stripes=directories, memory="32MiB", progress=False
    ).close()
    (one,) = chunk_files(tmp_path / "one")
    expected = one.read_bytes()[4096:]
    n_chunks = -(-len(expected) // chunk_bytes)
    for name in ("made", "converted", "edges"):
        files = chunk_files(tmp_path / name)
        data = [file.read_bytes()[4096:] for file in files]
        assert b"".join(data) == expected
        shares = [-(-len(each) // chunk_bytes) for each in data]
        assert sum(shares) == n_chunks
        assert max(shares) - min(shares) <= 1 + n_chunks // 100, shares
        assert [file.resolve().parent.parent for file in files] == [(tmp_path / name).parent, *directories]
        assert {file.parent.name for file in files[1:]} == stripes(tmp_path / name)
        assert whole(tmp_path / name) == len(sources)
        assert to(tmp_path / name, "csc")
        assert not stripes(tmp_path / name)
    assert held(drives) == set()


def test_graphs_of_nothing(tmp_path: Path, drives: list[Path]) -> None:
    for n in (0, 3):
        with OutOfCoreGraph.create(
            tmp_path / "g", np.zeros(n + 1, np.int64), [], topology="chunked", stripes=drives, overwrite=True, progress=False
        ) as g:
            g.verify(progress=False)
            assert list(g.topology.blocks()) == []
            assert g.topology.degrees().tolist() == [0] * n
    assert to(tmp_path / "g", "chunked")
    assert held(drives) == set()


def test_a_graph_stays_the_same_graph(root: Path, drives: list[Path]) -> None:
    with opened(root) as g:
        identity = g.fingerprint()
        parts = featstore.partition(g, 5, "ldg", progress=False).clone()
    assert not to(root, "chunked", chunk_bytes=4096, stripes=drives)
    assert to(root, "chunked", chunk_bytes=4096, stripes=drives[:1])
    assert to(root, "chunked", chunk_bytes=4096, stripes=[os.path.relpath(drives[1]), drives[1]])
    assert not to(root, "chunked", chunk_bytes=4096, stripes=[drives[1], drives[1]])
    assert (len(os.listdir(drives[0])), len(os.listdir(drives[1]))) == (0, 2)
    with opened(root) as g:
        assert g.fingerprint() == identity
        assert torch.equal(g.parts()["ldg-5"].load(), parts)
        g.aggregate("x", "sum", name="s", progress=False)  # another commit keeps the stripes
    assert held(drives) == stripes(root)
    whole(root)


def test_what_is_refused(root: Path, tmp_path: Path, drives: list[Path]) -> None:
    (tmp_path / "file").touch()
    (root / "inside").mkdir()
    (tmp_path / "link").symlink_to(root / "inside")
    before = held(drives)
    for topology, given, error, match in (
        ("csc", drives, ValueError, "stripes is of topology='chunked'"),
        ("chunked", str(drives[0]), TypeError, "stripes is a list"),
        ("chunked", [tmp_path / "none"], FileNotFoundError, "none"),
        ("chunked", [tmp_path / "file"], NotADirectoryError, "file"),
        ("chunked", [drives[0], root], ValueError, "lies within the dataset"),
        ("chunked", [tmp_path / "link"], ValueError, "lies within the dataset"),
    ):
        refuses(error, match, lambda: to(root, topology, stripes=given))
        refuses(error, match, lambda: make(root, topology=topology, stripes=given))
    assert held(drives) == before == stripes(root)
    assert sorted(os.listdir(tmp_path)) == ["drive-0", "drive-1", "file", "g", "link"]


@pytest.mark.parametrize("how", ["create", "convert"])
def test_names_are_durable_before_what_needs_them(tmp_path, drives, monkeypatch, how) -> None:
    """The link before the stripe, the stripe and its file before the catalog that names it."""
    root, steps = tmp_path / "g", list[tuple[str, str]]()

    def watch(name: str, path_of: Any) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            found = real(*arguments, **options)
            steps.append((name, path_of(arguments)))
            return found

        monkeypatch.setattr(os, name, call)

    if how == "convert":
        make(root).close()
    watch("fsync", lambda arguments: os.readlink(f"/proc/self/fd/{arguments[0]}"))
    watch("symlink", lambda arguments: os.fspath(arguments[1]))
    watch("mkdir", lambda arguments: os.fspath(arguments[0]))
    watch("rename", lambda arguments: os.fspath(arguments[1]))
    if how == "convert":
        assert to(root, "chunked", chunk_bytes=4096, stripes=drives[:1])
    else:
        make(root, **IN_CHUNKS, stripes=drives[:1]).close()
    (name,) = stripes(root)
    made_in, target = next(path for step, path in steps if step == "symlink").rpartition("/")[0], str(drives[0] / name)
    link, flush, mkdir = steps.index(("symlink", f"{made_in}/{name}")), ("fsync", made_in), ("mkdir", target)
    assert flush in steps[link : steps.index(mkdir)]
    catalog = next(k for k, (step, path) in enumerate(steps) if step == "rename" and path.endswith("data.mdb"))
    assert ("fsync", str(drives[0])) in steps[steps.index(mkdir) : catalog]
    for file in (chunk_files(root)[1].name, f"{chunk_files(root)[1].name}.sums"):
        named = next(k for k, (step, path) in enumerate(steps) if step == "rename" and path.endswith(f"{name}/{file}"))
        assert any(step == "fsync" and path.startswith(f"{target}/{file}.") for step, path in steps[:named])
        assert ("fsync", target) in steps[named:catalog]


def test_a_replaced_dataset_takes_its_stripes_with_it(root: Path, drives: list[Path]) -> None:
    before = stripes(root)
    assert held(drives) == before
    with opened(root) as g:  # goes on reading what it has open
        expected = [ids.copy() for _, ids in g.topology.scan()]
        make(root, seed=1, **IN_CHUNKS, stripes=drives).close()
        assert held(drives) == stripes(root)
        assert not held(drives) & before
        assert all(np.array_equal(one, two) for one, (_, two) in zip(expected, g.topology.scan(), strict=True))
    make(root).close()
    assert held(drives) == set()


def test_stripes_stay_while_somebody_reads_them(root: Path, drives: list[Path]) -> None:
    with opened(root):
        assert to(root, "csc")
        assert len(held(drives)) == 2
    with Update(root):
        pass
    assert held(drives) == set() == stripes(root)


def test_a_stripe_that_cannot_be_removed_is_tried_again(root, tmp_path, drives, monkeypatch) -> None:
    rmdir = os.rmdir

    def fail(path: str) -> None:
        raise OSError(5, "the drive failed", path)

    def fail_first(path: str) -> None:
        (fail if path.endswith(min(held(drives))) else rmdir)(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", fail_first)
        first = min(held(drives))
        assert to(root, "csc")
        assert held(drives) == {first}
    with Update(root):
        pass
    assert held(drives) == set()
    to(root, "chunked", chunk_bytes=4096, stripes=drives)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", fail)
        make(root).close()
        assert len(held(drives)) == 2
        assert len(os.listdir(tmp_path)) == 4  # the old directory, as nothing else says where the stripes are
    make(root).close()
    assert held(drives) == set()
    assert len(os.listdir(tmp_path)) == 3


def test_a_missing_stripe_is_named(root: Path, tmp_path: Path, drives: list[Path]) -> None:
    (name,) = os.listdir(drives[1])
    drives[1].rename(tmp_path / "elsewhere")
    for call in (lambda: opened(root), lambda: to(root, "csc")):
        caught = refuses(FileNotFoundError, r"a stripe of the dataset .* is missing", call)
        assert caught.value.filename == str(drives[1] / name)
    shutil.copytree(root, tmp_path / "copy", symlinks=True)
    refuses(FileNotFoundError, "is missing", lambda: opened(tmp_path / "copy"))
    # The drive is mounted elsewhere: the user leads the link there.
    (root / name).unlink()
    (root / name).symlink_to(tmp_path / "elsewhere" / name)
    whole(root)
    (root / name).unlink()
    caught = refuses(FileNotFoundError, "", lambda: opened(root))
    assert caught.value.filename.startswith(str(root / name))
    (root / name).symlink_to(tmp_path)
    refuses(FormatError, "symbolic link within a dataset", lambda: opened(root))
    with pytest.warns(UserWarning, match="stays"):
        make(root).close()  # it can still be replaced
    assert os.listdir(tmp_path / "elsewhere") == [name]


@pytest.mark.parametrize("suffix", ["", ".sums"])
def test_other_files_in_a_stripe_are_found(root: Path, tmp_path: Path, suffix: str) -> None:
    paths = [Path(f"{file}{suffix}") for file in chunk_files(root)]
    for size in (0, paths[1].stat().st_size - 4096):
        with truncated(paths[1], size), pytest.raises(CorruptionError, match="shorter") as caught:
            opened(root)
        assert caught.value.path == str(paths[1])
    paths[2].rename(tmp_path / "renamed")
    missing = refuses(FileNotFoundError, "", lambda: opened(root))
    assert missing.value.filename == str(paths[2])
    (tmp_path / "renamed").rename(paths[2])
    whole(root)


def test_swapped_and_older_stripes_are_found(root: Path, drives: list[Path]) -> None:
    make(root, **IN_CHUNKS, stripes=[*drives, *drives]).close()
    files = chunk_files(root)
    old = {file: (file.read_bytes(), Path(f"{file}.sums").read_bytes()) for file in files[1:4]}
    assert len({len(data) for data, _ in old.values()}) < 3
    one, two = next((a, b) for a in old for b in old if a != b and len(old[a][0]) == len(old[b][0]))
    for file, other in ((one, two), (two, one)):  # two stripes of one dataset, changed for each other
        file.write_bytes(old[other][0])
        Path(f"{file}.sums").write_bytes(old[other][1])
    caught = refuses(CorruptionError, "another file, or an older copy, is in its place", lambda: opened(root))
    assert caught.value.path == str(min(one, two, key=str))
    make(root, **IN_CHUNKS, stripes=[*drives, *drives]).close()
    again = chunk_files(root)[files.index(one)]
    again.write_bytes(old[one][0])  # of an earlier dataset with the same content
    caught = refuses(CorruptionError, "another file, or an older copy, is in its place", lambda: opened(root))
    assert caught.value.path == str(again)


def test_flipped_bits_are_named_with_file_and_page(root: Path) -> None:
    rng = np.random.default_rng(0)
    for file in chunk_files(root):
        for at in rng.integers(4096, file.stat().st_size, 4).tolist():
            with flipped(file, at), opened(root) as g:
                for read in (lambda g=g: g.verify(progress=False), lambda g=g: list(g.topology.blocks())):
                    caught = refuses(CorruptionError, "", read)
                    assert (caught.value.path, caught.value.offset) == (str(file), at // 4096 * 4096)
    whole(root)


def test_catalogs_that_cut_chunks_are_refused(root: Path) -> None:
    """A file that begins within a chunk, and chunks in no file."""
    catalog = read_catalog(root)
    key = "edge/_,_,_/chunks"
    chunks = catalog.fields[key]
    bad = replace(catalog, dataset={**catalog.dataset, "chunk_bytes": 4096 * 4096})
    write_catalog(root, bad)
    with opened(root) as g, pytest.raises(FormatError, match="cannot hold row"):
        g.topology.degrees()
    with opened(root) as g, pytest.raises(FormatError, match="cannot hold row"):
        g.verify(progress=False)
    write_catalog(root, replace(catalog, fields={**catalog.fields, key: replace(chunks, parts=(), shape=(0,))}))
    with opened(root) as g, pytest.raises(FormatError, match="lies in no file"):
        g.topology.degrees()
    write_catalog(root, catalog)
    assert "stripes" in (root / "catalog.lmdb" / "data.mdb").read_bytes().decode("latin1")
    whole(root)


def test_the_command_line(tmp_path: Path, drives: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: Any) -> dict[str, Any]:
        assert main([str(each) for each in (*arguments, "--json")]) == 0
        return json.loads(capsys.readouterr().out)

    root, rng = tmp_path / "g", np.random.default_rng(0)
    np.save(tmp_path / "edges.npy", rng.integers(0, 500, (2, 9000)))
    given = ("--edge-index", tmp_path / "edges.npy", "--num-nodes", 500, "--topology", "chunked", "--chunk-bytes", "4KiB")
    made = run("create", root, *given, "--stripe", drives[0], "--stripe", drives[1])
    files = chunk_files(root)
    sizes = {str(file.resolve().parent): file.stat().st_size for file in files[1:]}
    assert made["stripes"] == sizes
    in_all = [path.stat().st_size for path in (*root.iterdir(), *(each for file in files[1:] for each in file.parent.iterdir()))]
    assert made["disk_bytes"] == sum(in_all) - sum((root / name).stat().st_size for name in ("catalog.lmdb", *stripes(root)))
    assert main(["info", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "topology   chunked, chunks of 4.00 KiB in 3 files" in shown
    assert all(f"stripe     {path}: " in shown for path in sizes)
    assert run("verify", root)["ok"]
    found = run("convert", root, *given[4:], "--stripe", drives[0])
    assert (found["converted"], len(found["stripes"])) == (True, 1)
    assert "stripes" not in run("convert", root, "--topology", "chunked")
    assert held(drives) == set()
    assert main(["convert", str(root), "--topology", "csc", "--stripe", str(drives[0])]) == 2
    assert "stripes is of topology='chunked'" in capsys.readouterr().err
