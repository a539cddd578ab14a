"""``featstore verify PACK`` and ``Pack.verify``: every byte counts, every file counts, and what is left over harms nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from featstore.errors import CorruptionError, FormatError, StaleError
from featstore.pack.layout import find_layouts
from featstore.pack.record import read_record, write_record
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.testing.faults import flipped, truncated
from tests.support.graphs import skewed_dataset
from tests.support.loaders import make_loader
from tests.support.refusing import refuses

FANOUTS = ["--fanouts", "4,3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset ``g`` and its pack ``p`` with every kind of file: two features, planned and static, shared rows, a device."""
    folder = tmp_path_factory.mktemp("made")
    with featstore.open(skewed_dataset(folder / "g", 500, 24, narrow=3), memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.sample_offline(g, sampler, g.node_data["train_idx"], 20, 2, folder / "p", progress=False) as pack:
            options: dict[str, Any] = {"strategy": "packed", "pack": pack}
            make_loader(g, features=["x", "z"], cache=0.2, length=3, **options).close()
            static = {"policy": "frequency", "cache": 0.02, "device_cache": 0.02, "disk": "4.5x"}
            make_loader(g, features="x", **static, **options).close()
            assert pack.verify(progress=False) == {
                "files": sum(path.is_file() and path.suffix != ".lock" for path in (folder / "p").rglob("*")),
                "bytes": sum(path.stat().st_size for path in (folder / "p").rglob("*") if path.is_file()),
                "layouts": 2,
                "node_data": ["y"],
                "unfinished_bytes": 0,
                "others": [],
            }
    names = {path.name for path in (folder / "p").rglob("*")}
    assert names >= {"pack", "samples", "layout", "plan", "fill", "device", "shared", "begun", "done.0", "done.1"}
    assert names >= {"extents.0.rows", "extents.1.rows", "extents.0.rows.sums"}
    return folder


@pytest.fixture
def pack(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "p", tmp_path / "p")
    return tmp_path / "p"


def files(pack: Path) -> list[Path]:
    return sorted(path for path in pack.rglob("*") if path.is_file() and path.suffix != ".lock")


def verify(pack: Path) -> dict[str, Any]:
    with featstore.Pack(pack) as opened:
        return opened.verify(progress=False)


def assert_damaged(pack: Path, path: Path) -> None:
    caught = refuses((CorruptionError, FormatError), "", lambda: verify(pack))
    assert os.fspath(path) in str(caught.value)


def test_any_flipped_bit_is_found(made: Path) -> None:
    """In every file, at its ends and at some places between them."""
    rng = np.random.default_rng(0)
    for path in files(made / "p"):
        size = path.stat().st_size
        for offset in {0, max(0, size - 97), size - 1, *rng.integers(0, size, 1).tolist()}:
            with flipped(path, offset, offset % 8):
                assert_damaged(made / "p", path)
    verify(made / "p")


def test_files_that_are_cut_off_longer_empty_or_links(pack: Path) -> None:
    for path in files(pack):
        size = path.stat().st_size
        for n_bytes in {0, size // 2, size - 1}:
            with truncated(path, n_bytes):
                assert_damaged(pack, path)
        with path.open("ab") as file:
            file.write(b"\0")
        assert_damaged(pack, path)
        os.truncate(path, size)
        elsewhere = path.with_name("elsewhere")
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        assert_damaged(pack, path)
        elsewhere.replace(path)
    verify(pack)


def test_a_missing_file_is_named(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in files(pack):
        aside = pack.parent / "aside"
        path.rename(aside)
        assert main(["verify", str(pack)]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        if path.name == "pack":
            assert f"{pack} is not a pack: it has no record" in said
        else:
            assert f"{path}: no such file or directory; " in said
            assert "remove this file" not in said
        aside.rename(path)


def test_the_command_line(made: Path, pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(pack)]) == 0
    assert "2 layouts, node data y), all as they were written" in capsys.readouterr().out
    assert main(["verify", str(pack), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["files"] == len(files(pack))
    layout = next(pack.glob("layout-*"))
    for path, advice in (
        (layout / "extents.0.rows", f"; remove {layout}, and featstore pack DATASET {pack} --add-layout"),
        (layout / "plan", f"; remove {layout}, and "),
        (pack / "samples", "--overwrite"),
        (next(pack.glob("data-*")), "; remove this file, and featstore pack"),
    ):
        with flipped(path, 4097 if path.name.startswith("extents") else 1):
            assert main(["verify", str(pack)]) == 1
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.startswith(f"featstore: {path}: ")
            assert captured.err.count("\n") == 1
            assert advice in captured.err
            if path.suffix == ".rows":
                assert "at byte 4096" in captured.err
    # What the advice says mends it.
    with (layout / "extents.0.rows").open("r+b") as file:
        file.seek(4100)
        file.write(b"damage")
    assert main(["verify", str(pack)]) == 1
    record = read_record(str(layout / "layout"), "layout")
    shutil.rmtree(layout)
    assert main(["verify", str(pack)]) == 0
    again = {"policy": record["policy"], "cache": record["capacity"] / 500}
    again["features"] = [each["name"] for each in record["features"]]
    with featstore.open(made / "g", memory="64MB") as g:
        static = {"device_cache": 0.02, "disk": "4.5x"} if record["device_rows"] else {"length": 3}
        make_loader(g, strategy="packed", pack=pack, **again, **static).close()
    assert layout.exists()
    assert verify(pack)["layouts"] == 2
    assert main(["verify", str(pack.parent)]) == 2  # neither a pack nor a dataset
    assert main(["verify", str(pack.parent / "nowhere")]) == 2


def test_what_interrupted_packing_left_is_no_damage(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = next(pack.glob("layout-*"))
    partial = pack / "layout-0123456789abcdef.partial"
    shutil.copytree(layout, partial)
    os.truncate(partial / "plan", 10)
    (pack / "data-0123456789abcdef.tmp").write_bytes(b"half")
    (pack / "README").write_text("ours")
    (layout / "notes").write_text("ours")
    found = verify(pack)
    assert found["unfinished_bytes"] == 4 + sum(path.stat().st_size for path in partial.iterdir())
    assert found["others"] == ["README", f"{layout.name}/notes"]
    assert main(["verify", str(pack)]) == 0
    said = capsys.readouterr().out
    assert "of interrupted packing" in said
    assert f"README, {layout.name}/notes" in said
    (pack / "layout-0123456789abcdea").mkdir()
    assert main(["verify", str(pack)]) == 1
    assert "layout-0123456789abcdea/layout: no such file" in capsys.readouterr().err


def test_a_pack_that_was_replaced_meanwhile(made: Path, pack: Path) -> None:
    with featstore.open(made / "g", memory="64MB") as g, featstore.Pack(pack) as opened:
        sampler = featstore.NeighborSampler(g, [2], seed=3)
        seeds = g.node_data["train_idx"]
        featstore.sample_offline(g, sampler, seeds, 20, 1, pack, overwrite=True, progress=False).close()
        refuses(StaleError, "another pack was made here", lambda: opened.verify(progress=False))
    assert verify(pack)["layouts"] == 0


def test_a_bar_of_bytes(pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["verify", str(pack)]) == 0
    shown = capsys.readouterr().err
    assert "verify: 100%" in shown
    assert "B/s]" in shown


def rewritten(path: Path, kind: str, change: Callable[[list[np.ndarray]], None]) -> str:
    """Write a file of sections again, changed, with checksums of its own; return its id."""
    file = SectionFile(path, kind)
    arrays = [file[number].copy() for number in range(len(file))]
    file.close()
    change(arrays)
    path.unlink()
    with SectionWriter(path, kind) as writer:
        for array in arrays:
            writer.append(array)
        new = writer.finish()
    new.close()
    return new.file_id


def wrong_slot(arrays: list[np.ndarray]) -> None:
    slots = next(each for each in arrays[::5] if np.count_nonzero(each >= 0) > 1)
    hits = np.flatnonzero(slots >= 0)
    slots[hits[:2]] = slots[hits[1::-1]]


def beyond(arrays: list[np.ndarray]) -> None:
    slots = next(each for each in arrays[::5] if (each >= 0).any())
    slots[slots >= 0] = 10_000


def not_ascending(arrays: list[np.ndarray]) -> None:
    missed = next(each for each in arrays[1::5] if len(each) > 1)
    missed[:2] = missed[1::-1]


def admitted_twice(arrays: list[np.ndarray]) -> None:
    slots = next(each for each in arrays[3::5] if len(each) > 1)
    slots[0] = slots[1]


@pytest.mark.parametrize("change", [wrong_slot, beyond, not_ascending, admitted_twice])
def test_plans_are_followed(pack: Path, change: Callable[[list[np.ndarray]], None]) -> None:
    for options in layouts(pack):
        if change is admitted_twice and not options.superbatch:
            continue
        folder = pack / options.name
        record = read_record(str(folder / "layout"), "layout")
        shutil.copytree(folder, pack.parent / "kept")
        record["tables"]["plan"] = rewritten(folder / "plan", "plan", change)
        (folder / "layout").unlink()
        write_record(str(folder / "layout"), "layout", record)
        caught = refuses(CorruptionError, r"does not find its rows|names a slot beyond", lambda: verify(pack))
        assert caught.value.path == str(folder / "plan")
        shutil.rmtree(folder)
        (pack.parent / "kept").rename(folder)
    verify(pack)


def test_a_superbatch_finds_nothing_of_the_one_before(pack: Path) -> None:
    """A plan that takes a row from where the superbatch before had left it: each begins with an empty cache."""
    (options,) = (each for each in layouts(pack) if each.superbatch)
    folder = pack / options.name
    record = read_record(str(folder / "layout"), "layout")
    with featstore.Pack(pack) as opened:
        ids = [opened.ids(number) for number in range(options.superbatch + 1)]

    def stale(arrays: list[np.ndarray]) -> None:
        slot_of: dict[int, int] = {}
        for number, batch in enumerate(ids[:-1]):
            positions, slots = arrays[5 * number + 2 : 5 * number + 4]
            slot_of = {row: slot for row, slot in slot_of.items() if slot not in slots}
            slot_of |= dict(zip(batch[positions].tolist(), slots.tolist(), strict=True))
        first = 5 * options.superbatch
        missed = arrays[first + 1]
        at = next(k for k, position in enumerate(missed) if int(ids[-1][position]) in slot_of)
        arrays[first][missed[at]] = slot_of[int(ids[-1][missed[at]])]
        arrays[first + 1] = np.delete(missed, at)

    record["tables"]["plan"] = rewritten(folder / "plan", "plan", stale)
    (folder / "layout").unlink()
    write_record(str(folder / "layout"), "layout", record)
    refuses(CorruptionError, f"the plan of batch {options.superbatch} does not find its rows", lambda: verify(pack))


@pytest.mark.parametrize(("table", "change"), [("device", lambda a: a[1].sort()), ("fill", lambda a: a[0].__iadd__(1))])
def test_tiers_hold_what_plans_say(pack: Path, table: str, change: Callable[[list[np.ndarray]], None]) -> None:
    (options,) = (each for each in layouts(pack) if each.policy == "frequency")
    folder = pack / options.name
    record = read_record(str(folder / "layout"), "layout")
    record["tables"][table] = rewritten(folder / table, table, change)
    (folder / "layout").unlink()
    write_record(str(folder / "layout"), "layout", record)
    refuses(CorruptionError, "does not find its rows", lambda: verify(pack))


def same_node_twice(arrays: list[np.ndarray]) -> None:
    arrays[1][0] = arrays[1][1]


def no_node(arrays: list[np.ndarray]) -> None:
    arrays[1][0] = 500


def another_place(arrays: list[np.ndarray]) -> None:
    arrays[0][0] = 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (same_node_twice, "a node twice"),
        (no_node, "has nodes beyond the graph's 500"),
        (another_place, "says that it is batch 1 of epoch 0"),
    ],
)
def test_samples_are_samples(pack: Path, change: Callable[[list[np.ndarray]], None], match: str) -> None:
    record = read_record(str(pack / "pack"), "pack")
    record["samples"] = rewritten(pack / "samples", "samples", change)
    (pack / "pack").unlink()
    write_record(str(pack / "pack"), "pack", record)
    for path in pack.glob("layout-*"):
        shutil.rmtree(path)
    caught = refuses(CorruptionError, match, lambda: verify(pack))
    assert caught.value.path == str(pack / "samples")


def layouts(pack: Path) -> Iterator[Any]:
    with featstore.Pack(pack) as opened:
        yield from find_layouts(opened)


def test_files_of_other_layouts_are_no_substitutes(pack: Path) -> None:
    one, other = (pack / each.name for each in layouts(pack))
    for name in ("plan", "fill", "done.0", "begun", "extents.0.rows", "extents.0.rows.sums"):
        kept = (one / name).read_bytes()
        shutil.copyfile(other / name, one / name)
        caught = refuses(CorruptionError, "", lambda: verify(pack))
        assert str(one / name) in str(caught.value)
        (one / name).write_bytes(kept)
    verify(pack)
