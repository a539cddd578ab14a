"""Tables in a terminal and a notebook: aligned, escaped, cut where they are long, and never raising."""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from html.parser import HTMLParser
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featstore.display import MOST_CHARACTERS, MOST_ROWS, Display, Shown, ShownAsTables, Stats, Table, described, percent


class Cells(HTMLParser):
    """Texts of the cells of a page, by row; fails where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in {"div", "p", "code", "table", "thead", "tbody", "tr", "td", "th"}
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


texts = st.text(max_size=30).map(lambda text: text if text.isprintable() else repr(text)[1:-1])


@given(rows=st.lists(st.tuples(texts, texts, texts), max_size=8), title=st.text(max_size=20))
def test_html_has_the_same_cells_and_no_markup_of_theirs(rows: list[tuple[str, ...]], title: str) -> None:
    page = Display(title, [Table(("a<b", "n", ""), rows)], ["<script>"]).html()
    assert page.replace("\n", "").isprintable(), "it can be encoded, and moves no cursor"
    found = Cells(page).rows
    assert found == ([["a<b", "n", ""], *map(list, rows)] if rows else [])


def test_columns_are_aligned() -> None:
    table = Table(("name", "bytes", "of"), [("x", "12.0 MiB", "a"), ("longer", "4 B", "")])
    assert table.lines() == ["name       bytes  of", "x       12.0 MiB  a", "longer       4 B"]
    indented = [f"  {line}" for line in table.lines()]
    assert Display("title", [table], ["note"]).text().splitlines() == ["title", *indented, "  note"]
    assert Table(("", ""), [("a", "b")]).lines() == ["a  b"]
    assert Display("title", [Table(("", ""), [])]).text() == "title"


def test_long_tables_and_cells_are_cut() -> None:
    table = Table(("", ""), [(f"row {n}", "x" * 999) for n in range(MOST_ROWS + 2)])
    lines = table.lines()
    assert len(lines) == MOST_ROWS + 1
    assert lines[-1].strip() == "… and 2 more"
    assert max(map(len, lines)) <= MOST_CHARACTERS + 20


def test_rows_that_are_not_shown_are_not_made() -> None:
    made = []

    def rows() -> Iterator[tuple[str, str]]:
        for n in range(1_000_000):
            made.append(n)
            yield str(n), "x"

    table = Table.of_first(("", ""), rows(), 1_000_000)
    assert len(made) <= MOST_ROWS + 1
    assert table.lines()[-1] == f"… and {1_000_000 - MOST_ROWS:,} more"
    assert Table.of_first(("", ""), iter([("a", "b")]), 1).lines() == ["a  b"]


def test_nothing_moves_the_cursor() -> None:
    shown = Display("a\x1b[A", [Table(("\r", ""), [("a\nb", "\x1b[2J")])], ["\u202e"]).text()
    assert shown.splitlines() == ["a\\x1b[A", "  \\r", "  a\\nb  \\x1b[2J", "  \\u202e"]


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (None, "", "none"),
        (True, "", "yes"),
        (False, "", "no"),
        (1234567, "", "1,234,567"),
        (1 << 20, "bytes_read", "1.00 MiB"),
        (1 << 20, "nbytes", "1.00 MiB"),
        (0.123456, "", "0.1235"),
        (123456.7, "", "123,457"),
        ("text", "", "text"),
        ([1, 2], "", "1, 2"),
        ({"a": 1, "bytes": 2}, "", "a: 1, bytes: 2 B"),
        ({}, "", "none"),
        (torch.zeros(2, 3), "", "float32 [2, 3]"),
        (np.zeros(4, np.int64), "", "int64 [4]"),
        (torch.float16, "", "torch.float16"),
        (0.25, "epoch_s", "0.25 s"),
        (Table, "", repr(Table)),
    ],
)
def test_values(value: Any, name: str, text: str) -> None:
    assert described(value, name) == text


def test_percent() -> None:
    assert (percent(1, 3), percent(1, 0)) == ("33.3 %", "")


class Half(ShownAsTables):
    """Shows what its constructor has not set."""

    def __init__(self, size: int = 3, other: int = 4) -> None:
        self.size = size

    def _display(self) -> Display:
        return Display(str(self.missing))  # type: ignore[attr-defined]


class OneLine(Half):
    def __repr__(self) -> str:
        raise ZeroDivisionError


class Plain(Shown):
    def __init__(self, size: int, other: int = 4) -> None:
        self.size = size


def test_an_object_that_cannot_be_shown_says_so() -> None:
    assert repr(Half()) == "<Half, which cannot be shown: AttributeError>"
    assert Half()._repr_html_() == "&lt;Half, which cannot be shown: AttributeError&gt;"
    assert repr(OneLine()) == "<OneLine, which cannot be shown: ZeroDivisionError>"


def test_what_has_a_shape_or_a_type_alone_is_no_array() -> None:
    assert described(SimpleNamespace(shape=(2,))) == "namespace(shape=(2,))"
    assert described(SimpleNamespace(dtype="int")) == "namespace(dtype='int')"


def test_values_of_other_classes_are_one_line() -> None:
    class Lines:
        def __repr__(self) -> str:
            return "first\nsecond"

    class Empty:
        def __repr__(self) -> str:
            return ""

    class Broken:
        def __repr__(self) -> str:
            raise OSError

    assert described(Lines()) == "first …"
    assert described(Empty()) == ""
    assert described(Broken()) == "<Broken, which cannot be shown: OSError>"


def test_the_arguments_that_attributes_have() -> None:
    assert Cells(Plain(5)._repr_html_()).rows == [["size", "5"]]


def test_stats_are_a_dict() -> None:
    values = {"rows": 12345, "bytes_read": 4096, "hits": {"host": 1, "base": 2}, "mode": "direct"}
    stats = Stats(values)
    assert isinstance(stats, dict)
    assert stats == values
    assert json.loads(json.dumps(stats)) == values
    for other in (copy.deepcopy(stats), copy.copy(stats)):
        assert other == values
        assert type(other) is Stats
    assert copy.copy(stats)["hits"] is stats["hits"] is not copy.deepcopy(stats)["hits"]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = pickle.loads(pickle.dumps(stats, protocol))
        assert (type(read), read, list(read)) == (OrderedDict, values, list(values))
    saved = BytesIO()
    torch.save({"stats": stats}, saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True) == {"stats": values}
    assert {**stats} == stats | {} == values
    assert repr(stats).splitlines() == [
        "rows        12,345",
        "bytes_read  4.00 KiB",
        "mode        direct",
        "hits",
        "  host  1",
        "  base  2",
    ]
    assert str(stats) == repr(stats)
    assert ["rows", "12,345"] in Cells(stats._repr_html_()).rows
    assert repr(Stats()) == "{}"


def test_records_are_a_table() -> None:
    record = {"name": "a", "once_s": 0.5, "parts": {"x": 1}, "why": "", "rows": 12345}
    other = {**record, "name": "longer", "more": 3}
    stats = Stats({"n": 1, "auto": {"taken": "a", "estimates": [record, other]}, "none": [], "l": [1]})
    assert repr(stats).splitlines() == [
        "n     1",
        "none  none",
        "l     1",
        "auto",
        "  taken  a",
        "auto: estimates  once_s    rows",
        "  a               0.5 s  12,345",
        "  longer          0.5 s  12,345",
    ]
    assert ["  longer", "0.5 s", "12,345"] in Cells(stats._repr_html_()).rows
    assert repr(Stats({3: {}, "x": [{}], "y": [{"a": {}}]})) == ""  # keys and values that a caller may have put there
