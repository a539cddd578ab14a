"""One way to break the library, which tests must notice: see :mod:`tests.mutations`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutation"]


@dataclass(frozen=True)
class Mutation:
    """One way to break the library.

    Parameters
    ----------
    name : str
    mechanism : str
        What is broken, as docs/contributing.md lists it.
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
        return self.file.startswith("src_cython/") and not self.tests[0].startswith("tests/test_played_ring.py")

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
                f"mutation {self.name!r}: {self.file} has its text {count} times, not once; adapt tests/mutation_table*.py"
            )
        return text.replace(self.old, self.new)
