"""Ways to break the library, which tests must notice: see :mod:`tests.mutations.campaign`.

The files ``*.txt`` beside this one list them, one for the files of each room. A line ``== mechanism: file`` begins those of a
mechanism in a file. Each of them is a line
``name @ tests``, or two if it is long; ``- `` and the text in the file, and ``+ `` and what takes its place, line for line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTATIONS", "Mutation", "read_mutations"]


@dataclass(frozen=True)
class Mutation:
    """One way to break the library.

    Parameters
    ----------
    name : str
    mechanism : str
        What is broken.
    file : str
        Path in the tree.
    old, new : str
        ``old`` is in the file exactly once; ``new`` takes its place.
    tests : tuple of str
        The quickest tests that should notice, as pytest takes them.
    """

    name: str
    mechanism: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether the core has to be built anew."""
        return self.file.startswith("src_cython/") and not self.tests[0].startswith("tests/core/test_played_ring.py")

    def changed(self, text: str) -> str:
        """Return the file's text with the mutation in it.

        Raises
        ------
        ValueError
            The text is not there, or more than once.
        """
        count = text.count(self.old)
        if count != 1 or self.old == self.new:
            raise ValueError(
                f"mutation {self.name!r}: {self.file} has its text {count} times, not once; adapt tests/mutations/*.txt"
            )
        return text.replace(self.old, self.new)


def read_mutations(table: Path) -> Iterator[Mutation]:
    """Yield the mutations of a file."""
    mechanism = file = ""
    lines = table.read_text().splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("== "):
            mechanism, _, file = line.removeprefix("== ").rpartition(": ")
            continue
        if " @ " not in line:
            line += f" {lines.pop(0)}"
        name, _, tests = line.partition(" @ ")
        texts = {"-": list[str](), "+": list[str]()}
        while lines and lines[0][:1] in texts:
            text = lines.pop(0)
            texts[text[0]].append(text[2:])
        named = tuple(f"tests/{test}" for test in tests.split())
        yield Mutation(name, mechanism, file, "\n".join(texts["-"]), "\n".join(texts["+"]), named)


MUTATIONS = tuple(each for table in sorted(Path(__file__).parent.glob("*.txt")) for each in read_mutations(table))
