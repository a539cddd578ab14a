"""Maps of names to ids against dictionaries and lists, and damaged ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import featstore
from featstore.errors import ClosedError, CorruptionError, FormatError, UnknownNameError
from featstore.idmaps import idmap
from featstore.idmaps.idmap import IDS_KEY, bucket_of, map_of
from featstore.storage.update import Update
from tests.support.names import named_graph

LETTERS = st.text(max_size=5) | st.text(st.sampled_from("ab"), max_size=300)


def check(path: Path, names: Sequence[Any], others: Sequence[Any]) -> None:
    order = {name: number for number, name in enumerate(names)}
    with featstore.open(path, memory="64MiB") as g:
        ids = g.ids()
        assert len(ids) == len(names)
        wanted = [*names, *others, *names[:3]]
        found = ids.encode(wanted, strict=False)
        assert found.dtype is torch.int64
        assert found.tolist() == [order.get(name, -1) for name in wanted]
        back = ids.decode(torch.arange(len(names), device="cpu").flip(0))
        assert list(back if ids.kind == "text" else back.tolist()) == list(names)[::-1]
        missing = [name for name in others if name not in order]
        if missing:
            with pytest.raises(UnknownNameError, match=f"^{len(missing)} of {len(others)} names belong to no node: "):
                ids.encode(others)
        g.verify(progress=False)


@given(names=st.lists(LETTERS, unique=True, min_size=1, max_size=60), others=st.lists(LETTERS, max_size=5))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_text(tmp_path_factory: pytest.TempPathFactory, names: list[str], others: list[str]) -> None:
    check(named_graph(tmp_path_factory.mktemp("named") / "g", names), names, others)


@given(
    names=st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=60),
    others=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_integers(tmp_path_factory: pytest.TempPathFactory, names: list[int], others: list[int]) -> None:
    check(named_graph(tmp_path_factory.mktemp("numbered") / "g", names), names, others)


def test_many_names_of_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    names = list(dict.fromkeys(chr(97 + i % 26) * int(rng.integers(0, 40)) + str(i) for i in range(20_000)))
    names[7], names[8], names[9] = "x" * 5000, "y" * 100_000, ""
    monkeypatch.setattr(idmap, "_BLOCK_BYTES", 1 << 14)
    check(named_graph(tmp_path / "g", names), names, ["y" * 99_999 + "z", "nothing"])


def test_equal_hashes_do_not_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hashes of two bits, names are told apart by themselves."""
    few = idmap.TextKeys.hashes
    monkeypatch.setattr(idmap.TextKeys, "hashes", lambda self: few(self) & np.uint64(3 << 62))
    names = [f"name {i}" for i in range(200)]
    check(named_graph(tmp_path / "g", names), names, ["name 200", "name 7 "])


def test_unknown_names_are_listed(tmp_path: Path) -> None:
    with featstore.open(named_graph(tmp_path / "g", ["a", "b"]), memory="64MiB") as g:
        ids = g.ids("_")
        message = "^3 of 4 names belong to no node: 'c', 'c', 'q{60}'… \\(80 letters\\); encode\\(names, strict=False\\)"
        with pytest.raises(UnknownNameError, match=message) as caught:
            ids.encode(["a", "c", "c", "q" * 80])
        assert isinstance(caught.value, KeyError)
        for wrong in ([2], [-1]):
            with pytest.raises(IndexError, match=rf"ids\[0\] is {wrong[0]}, which has no name: ids are 0 … 1"):
                ids.decode(wrong)
        assert repr(ids) == "IdMap(2 names, text)"
        with pytest.raises(KeyError, match="no node type 'paper'"):
            g.ids("paper")
    with pytest.raises(ClosedError):
        ids.encode(["a"])


def test_a_graph_made_of_ids_has_no_names(tmp_path: Path) -> None:
    featstore.OutOfCoreGraph.create(tmp_path / "g", [0, 0], [], progress=False).close()
    with (
        featstore.open(tmp_path / "g", memory="64MiB") as g,
        pytest.raises(ValueError, match="keeps no names of nodes: it was made of"),
    ):
        g.ids()


def test_nodes_that_came_later_have_no_names(tmp_path: Path) -> None:
    path = named_graph(tmp_path / "g", ["a", "b"], n_more=3)
    check(path, ["a", "b"], ["c"])
    with featstore.open(path, memory="64MiB") as g, pytest.raises(IndexError, match=r"ids\[1\] is 2, which has no name"):
        g.ids().decode([1, 2])


def test_a_converted_dataset_keeps_its_names(tmp_path: Path) -> None:
    path = named_graph(tmp_path / "g", ["a", "b", "c"])
    assert featstore.convert(path, "chunked", progress=False)
    check(path, ["a", "b", "c"], ["d"])


@pytest.mark.parametrize(
    "change", [{"kind": "bytes"}, {"names": 2}, {"files": None}, {"files": {}}, {"files": {"id_names": "edge.indptr.1.rows"}}]
)
def test_a_wrong_entry_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = named_graph(tmp_path / "g", ["a", "b", "c"])
    with Update(path) as update:
        entry = {**update.catalog.extra[f"{IDS_KEY}_"], **change}
        update.add([], extra={f"{IDS_KEY}_": entry})
        update.commit()
    with featstore.open(path, memory="64MiB") as g, pytest.raises(FormatError, match="map of ids cannot be used"):
        g.ids()


@pytest.mark.parametrize("n_buckets", [-1, 0, 3, 6])
def test_a_number_of_buckets_that_is_no_power_of_two_is_named(tmp_path: Path, n_buckets: int) -> None:
    path = named_graph(tmp_path / "g", ["a", "b", "c"])
    with Update(path) as update:
        catalog = update.catalog
    name = catalog.extra[f"{IDS_KEY}_"]["files"]["id_buckets"]
    files = {**catalog.files, name: replace(catalog.files[name], n_rows=n_buckets + 1)}
    assert map_of(catalog, "_", 3, "g") is not None
    with pytest.raises(FormatError, match="g: the catalog's map of ids cannot be used"):
        map_of(replace(catalog, files=files), "_", 3, "g")


def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    path = named_graph(tmp_path / "g", [f"n{i}" for i in range(3000)])
    file = path / "ids.names.2.rows"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with featstore.open(path, memory="64MiB") as g:
        with pytest.raises(CorruptionError, match=r"ids\.names"):
            g.ids().decode(range(3000))
        with pytest.raises(CorruptionError, match=r"ids\.names"):
            g.verify(progress=False)


ASTRAY: list[tuple[str, Callable[[Any], Any], str]] = [  # the first half of rows are begins, the second one ends
    ("buckets", lambda rows: np.roll(rows, len(rows) // 2), "buckets of hashes do not ascend"),
    ("buckets", lambda rows: rows - 1000, "buckets of hashes do not ascend"),
    ("buckets", lambda rows: rows + 1000, "buckets of hashes do not ascend"),
    ("hashes", lambda rows: np.where([True, False], rows, -1), "a hash leads to an id that is no node"),
    ("hashes", lambda rows: np.where([True, False], rows, 3), "a hash leads to an id that is no node"),
    ("offsets", lambda rows: np.roll(rows, len(rows) // 2), "offsets of names do not ascend"),
    ("offsets", lambda rows: rows - 1000, "offsets of names do not ascend"),
    ("offsets", lambda rows: rows + 1000, "offsets of names do not ascend"),
]


def changed(ids: Any, role: str, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a map read other rows of a file than were written, their pages whole; return how many it reads, call by call."""
    plain, read = ids._int64s, list[int]()

    def int64s(record: Any, rows: Any, width: int = 1) -> Any:
        found = plain(record, rows, width)
        if record is not getattr(ids._found, role):
            return found
        read.append(len(rows))
        return change(found)

    monkeypatch.setattr(ids, "_int64s", int64s)
    return read


@pytest.mark.parametrize(("role", "change", "message"), ASTRAY)
def test_rows_that_lead_astray_are_damage(
    tmp_path: Path, role: str, change: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with featstore.open(named_graph(tmp_path / "g", ["aa", "bb", "cc"]), memory="64MiB") as g:
        ids = g.ids()
        changed(ids, role, change, monkeypatch)
        with pytest.raises(CorruptionError, match=message):
            ids.encode(["bb"])


def test_buckets_that_are_too_long_are_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"name {i}" for i in range(200)]
    monkeypatch.setattr(idmap, "_BLOCK_NAMES", 50)
    with featstore.open(named_graph(tmp_path / "g", names), memory="64MiB") as g:
        ids = g.ids()
        read = changed(ids, "hashes", lambda rows: rows, monkeypatch)
        changed(ids, "buckets", lambda rows: np.repeat([0, 200], len(rows) // 2), monkeypatch)
        assert ids.encode(names).tolist() == list(range(200))
    assert sum(read) == 200 * 200
    assert max(read) <= 24 * 50


def test_a_name_that_is_not_utf_8_is_damage(tmp_path: Path) -> None:
    with featstore.open(named_graph(tmp_path / "g", ["a", "\ud800"]), memory="64MiB") as g:
        with pytest.raises(CorruptionError, match="a name is not UTF-8"):
            g.ids().decode([0, 1])
        assert g.ids().decode([0]) == ["a"]


def test_a_name_that_is_longer_than_a_block_is_counted(tmp_path: Path) -> None:
    name = "x" * (3 << 20)
    with featstore.open(named_graph(tmp_path / "g", ["a", name]), memory="64MiB") as g:
        ids, used = g.ids(), g.budget.used
        assert ids.decode([0]) == ["a"]
        assert g.budget.peak < used + 4 * len(name)
        assert ids.decode([1]) == [name]
        assert g.budget.peak >= used + 4 * len(name)


def test_a_map_of_more_names_than_nodes_is_named(tmp_path: Path) -> None:
    path = named_graph(tmp_path / "g", ["a", "b", "c"])
    with Update(path) as update:
        catalog = update.catalog
    with pytest.raises(FormatError, match="g: the catalog's map of ids cannot be used"):
        map_of(catalog, "_", 2, "g")


def test_buckets_are_the_first_bits() -> None:
    hashes = np.array([0, 1 << 62, 1 << 63, (1 << 64) - 1], np.uint64)
    assert bucket_of(hashes, 0).tolist() == [0, 0, 0, 0]
    assert bucket_of(hashes, 2).tolist() == [0, 1, 2, 3]


def test_few_names_take_little_memory(tmp_path: Path) -> None:
    path = named_graph(tmp_path / "g", ["a", "b", "c"])
    with featstore.open(path, memory="8MiB") as g:
        left = g.budget.available
        assert left < 16 << 20
        assert g.ids().encode(["c"]).tolist() == [2]
        assert g.ids().decode([1]) == ["b"]
        assert left - g.budget.available < 1 << 20
