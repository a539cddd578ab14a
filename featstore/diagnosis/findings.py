"""Findings of the doctor, each with its cause and its remedy, and the report that lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from featstore.display import Display, ShownAsTables, Table, printable

__all__ = ["FAILING", "Diagnosis", "Finding", "brief"]

FAILING = "dmesg has what the drive reported; restore the file from a copy"  # the remedy where a drive fails to read or write

Status = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor looked at.

    Parameters
    ----------
    name : str
    status : {"ok", "note", "warning", "error"}
        A note is no fault, and may explain a speed. A warning costs speed or memory. With an error training fails.
    text : str
        What was found.
    cause : str
        Why it is so; empty if all is well.
    remedy : str
        What to change; empty if nothing.
    values : dict
        The figures, for programs; JSON values.
    """

    name: str
    status: Status
    text: str
    cause: str = ""
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Diagnosis(ShownAsTables):
    """The doctor's report: findings in the order in which they were made. Its text is a table.

    Parameters
    ----------
    path : str
        The directory that was looked at.
    findings : tuple of Finding

    Notes
    -----
    ``diagnosis["io_uring"]`` is the finding of that name. Iterating yields all of them.
    """

    path: str
    findings: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, name: str) -> Finding:
        for each in self.findings:
            if each.name == name:
                return each
        raise KeyError(f"no finding {name!r}; there is {', '.join(repr(each.name) for each in self.findings)}")

    @property
    def warnings(self) -> list[Finding]:
        """Findings that cost speed or memory."""
        return [each for each in self.findings if each.status == "warning"]

    @property
    def errors(self) -> list[Finding]:
        """Findings with which training fails."""
        return [each for each in self.findings if each.status == "error"]

    def as_dict(self) -> dict[str, Any]:
        """Get all as JSON values: the path, the numbers of errors and warnings, the findings."""
        counts = {"errors": len(self.errors), "warnings": len(self.warnings)}
        return {"path": self.path, **counts, "findings": [asdict(each) for each in self.findings]}

    def _verdict(self) -> str:
        n = len(self.errors) + len(self.warnings)
        return f"{n} thing{'s are' if n > 1 else ' is'} in the way" if n else "nothing is in the way"

    def __repr__(self) -> str:
        lines, margin = [self.path], f"  {'':<8} {'':<13} "
        for each in self.findings:
            lines.append(f"  {each.status:<8} {each.name:<13} {each.text}")
            lines += [f"{margin}because: {each.cause}"] * bool(each.cause) + [f"{margin}→ {each.remedy}"] * bool(each.remedy)
        return "\n".join(map(printable, [*lines, self._verdict()]))

    def _display(self) -> Display:
        rows = [(each.status, each.name, each.text, each.cause, each.remedy) for each in self.findings]
        return Display(self.path, [Table(("status", "", "found", "because", "change"), rows)], [self._verdict()])


def brief(error: OSError) -> str:
    """Write an error of the operating system in one line: its file, if it has one, and what is wrong."""
    what = error.strerror or str(error)
    return " ".join((f"{os.fsdecode(error.filename)}: {what}" if error.filename is not None else what).split())
