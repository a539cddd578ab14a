"""Tables that objects show of themselves: aligned text in a terminal, HTML in a notebook."""

from __future__ import annotations

import copy
import html
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from typing import Any, Final, TypeVar

from featstore.config import format_size

__all__ = ["Display", "Shown", "ShownAsTables", "Stats", "Table", "described", "options_of", "percent", "printable"]

MOST_ROWS: Final = 30  # of one table
MOST_CHARACTERS: Final = 200  # of a cell
NUMBER: Final = re.compile(r"-?\d")  # columns whose cells begin so are aligned at the right

AnyStats = TypeVar("AnyStats", bound="Stats")


def described(value: object, name: str = "") -> str:
    """Describe a value in a few words: numbers with thousands, bytes as sizes, arrays by dtype and shape.

    ``name`` is that of the value: a number whose name begins or ends with ``bytes`` is a size, one whose name ends in ``_s`` is
    of seconds.
    """
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return "none" if value is None else "yes" if value else "no"
    if isinstance(value, int):
        return format_size(value) if name.endswith("bytes") or name.startswith("bytes") else f"{value:,}"
    if isinstance(value, float):
        return (f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}") + " s" * name.endswith("_s")
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {described(each, str(key))}" for key, each in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(described(each) for each in value) or "none"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    try:
        first, *others = repr(value).splitlines() or [""]
    except Exception as error:  # of a class of the user's
        return _unshown(value, error)
    return f"{first} …" if others else first


def percent(part: float, whole: float) -> str:
    """Write a share as a percentage; empty if there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def printable(text: str) -> str:
    """Make a text one line; characters that would move the cursor are escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def _plain(text: str) -> str:
    """Make a text one short line."""
    shown = printable(text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[: MOST_CHARACTERS - 1]}…"


@dataclass(frozen=True)
class Table:
    """Rows of texts, each as long as the header; without a header if all its texts are empty. Long tables are cut.

    ``more`` counts rows that were left out already.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: int = 0

    @classmethod
    def of_first(cls, header: Sequence[str], rows: Iterable[Sequence[str]], n: int) -> Table:
        """Make a table of the first of ``n`` rows; those that would not be shown are not made."""
        first = list(islice(rows, MOST_ROWS))
        return cls(header, first, n - len(first))

    def cells(self) -> list[list[str]]:
        """Get the rows as they are shown."""
        cut = [[_plain(cell) for cell in row] for row in self.rows[:MOST_ROWS]]
        left = len(self.rows) - len(cut) + self.more
        return [*cut, [f"… and {left:,} more", *[""] * (len(self.header) - 1)]] if left else cut

    def right(self) -> list[bool]:
        """Tell which columns have numbers alone, and are aligned at the right."""
        columns = [[row[n] for row in self.rows if row[n]] for n in range(len(self.header))]
        return [n > 0 and bool(column) and all(map(NUMBER.match, column)) for n, column in enumerate(columns)]

    def lines(self) -> list[str]:
        """Write the table as lines of aligned text."""
        header = [list(map(_plain, self.header))] if any(self.header) else []
        rows, right = [*header, *self.cells()], self.right()
        widths = [max((len(row[n]) for row in rows), default=0) for n in range(len(self.header))]
        return ["  ".join(_aligned(*each) for each in zip(row, widths, right, strict=True)).rstrip() for row in rows]

    def html(self) -> str:
        """Write the table as HTML."""
        styles = [f' style="text-align: {"right" if each else "left"}"' for each in self.right()]

        def row(cells: Sequence[str], tag: str) -> str:
            inner = (f"<{tag}{style}>{html.escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True))
            return f"<tr>{''.join(inner)}</tr>"

        head = f"<thead>{row(self.header, 'th')}</thead>" if any(self.header) else ""
        return f"<table>{head}<tbody>{''.join(row(cells, 'td') for cells in self.cells())}</tbody></table>"


def _aligned(cell: str, width: int, is_right: bool) -> str:
    return cell.rjust(width) if is_right else cell.ljust(width)


@dataclass(frozen=True)
class Display:
    """A title, tables and notes: the form in which an object shows itself."""

    title: str = ""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())

    def text(self) -> str:
        """Write all as text; tables are indented below a title."""
        indent = "  " * bool(self.title)
        parts = [[printable(self.title)] if self.title else []]
        parts += [[indent + line for line in table.lines()] for table in self.tables if table.rows]
        parts += [[f"{indent}{printable(note)}" for note in self.notes]]
        return "\n".join(line for part in parts for line in part)

    def html(self) -> str:
        """Write all as HTML; every text is escaped."""
        title = f"<p><code>{html.escape(printable(self.title))}</code></p>" if self.title else ""
        notes = "".join(f"<p>{html.escape(printable(note))}</p>" for note in self.notes)
        return f"<div>{title}{''.join(table.html() for table in self.tables if table.rows)}{notes}</div>"


def options_of(shown: object) -> list[tuple[str, str]]:
    """List the arguments that an object was made with, as far as attributes of the same names have them."""
    names = [name for name in inspect.signature(type(shown)).parameters if hasattr(shown, name)]
    return [(name, described(getattr(shown, name), name)) for name in names]


def _never_raising(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """Wrap a ``__repr__``, so that a debugger can show every object."""

    @wraps(show)
    def shown(self: Any) -> str:
        try:
            return show(self)
        except Exception as error:
            return _unshown(self, error)

    return shown


def _unshown(shown: object, error: Exception) -> str:
    return f"<{type(shown).__name__}, which cannot be shown: {type(error).__name__}>"


class Shown:
    """An object that a notebook shows as tables: by default the arguments that it was made with.

    Neither form raises: of an object that cannot be shown, such as a half-made one, the text says so.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" in cls.__dict__:
            cls.__repr__ = _never_raising(cls.__repr__)  # type: ignore[method-assign,assignment,unused-ignore]

    def _display(self) -> Display:
        return Display(type(self).__name__, [Table(("", ""), options_of(self))])

    def _repr_html_(self) -> str:
        try:
            return self._display().html()
        except Exception as error:
            return html.escape(_unshown(self, error))


class ShownAsTables(Shown):
    """An object whose ``repr`` is a title and tables, too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self._display().text()


class Stats(ShownAsTables, dict[str, Any]):
    """Counts by name, a dict, which shows itself as tables: one of its numbers, and one of each mapping in it.

    It pickles as an ordered dict of the standard library. Programs without this package can read it then, and torch reads
    checkpoints with it, of which it refuses other classes.
    """

    def _display(self) -> Display:
        plain = _rows({name: value for name, value in self.items() if not _is_nested(value)})
        nested = (table for name, value in self.items() if _is_nested(value) for table in _of_nested(str(name), value))
        return Display("", [Table(("", ""), plain if self else [("{}", "")]), *nested])

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __copy__(self: AnyStats) -> AnyStats:
        return self._like(self)

    def __deepcopy__(self: AnyStats, memo: dict[int, Any]) -> AnyStats:
        return self._like(copy.deepcopy(dict(self), memo))

    def _like(self: AnyStats, counts: Mapping[str, Any]) -> AnyStats:
        made = type(self).__new__(type(self))
        made.update(counts)
        made.__dict__.update(self.__dict__)
        return made


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) or _is_records(value)


def _is_plain(value: object) -> bool:
    return not isinstance(value, (Mapping, list)) and not (isinstance(value, str) and not value)


def _is_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _of_nested(name: str, value: Any) -> list[Table]:
    """Make the tables of a mapping, or of a list of mappings, of which the plain values are shown."""
    if isinstance(value, Mapping):
        records = {key: each for key, each in value.items() if _is_records(each)}
        rows = _rows({key: each for key, each in value.items() if key not in records}, "  ")
        of_records = (table for key, each in records.items() for table in _of_nested(f"{name}: {key}", each))
        return [Table((name, ""), rows), *of_records]
    columns = [key for key in value[0] if any(_is_plain(each.get(key, "")) for each in value)]
    cells = ([described(each.get(key, ""), str(key)) for key in columns] for each in value)
    if not columns:
        return []
    return [Table.of_first((name, *map(str, columns[1:])), ((f"  {first}", *others) for first, *others in cells), len(value))]


def _rows(values: Mapping[Any, Any], indent: str = "") -> list[tuple[str, str]]:
    return [(f"{indent}{key}", described(each, str(key))) for key, each in values.items()]
