"""Sizes of the library that one must know to change it: files that speak of budgets, classes, lines; counted over tracked files.

Run ``python -m benchmarks.tools.house_counts``, with another checkout's folder as its argument if that one is to be counted.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BUDGETS = re.compile(r"BudgetError|[Bb]udget|reserve\(|\bloan")
CLASS = re.compile(r"^\s*class ", re.MULTILINE)


def files(root: Path, folder: str, *endings: str) -> Iterator[str]:
    """Yield the texts of the tracked files below a folder."""
    names = subprocess.run(["git", "ls-files", "-z", folder], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, names.split("\0")):
        if name.endswith(endings):
            yield (root / name).read_text()


def main() -> None:
    """Print a line a count."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    counts = {
        "files of the library that speak of budgets": sum(bool(BUDGETS.search(text)) for text in files(root, "featstore", "")),
        "classes of the library": sum(len(CLASS.findall(text)) for text in files(root, "featstore", ".py")),
        "lines of the library": sum(text.count("\n") for text in files(root, "featstore", "")),
        "lines of the core": sum(text.count("\n") for text in files(root, "src_cython", "")),
        "lines of the tests": sum(text.count("\n") for text in files(root, "tests", "")),
        "lines of the benchmarks": sum(text.count("\n") for text in files(root, "benchmarks", "")),
    }
    for what, count in counts.items():
        print(f"{count:>8,}  {what}")


if __name__ == "__main__":
    main()
