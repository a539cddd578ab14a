"""``python -m benchmarks``: every script of the topics' folders, each in a process of its own; arguments are passed on to all.

Figures of the papers that carry a promise of the project (``python -m benchmarks.papers``) run after them, at the promise's size.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.results import TOPICS

LONG = {"choices.convergence", "choices.defaults", "sizes.papers100m"}  # run by themselves, with options of their own
PROMISED = {  # by paper
    "diskgnn": ("--table", "7"),
    "outre": ("--table", "3", "--figure", "5"),
    "pagraph": ("--figure", "13", "--figure", "17", "--figure", "21"),
}


def scripts() -> list[str]:
    """Name all that run: ``rows.gather``, …, topic by topic."""
    folder = Path(__file__).parent
    paths = [path for topic in TOPICS for path in sorted((folder / topic).glob("[!_]*.py"))]
    return [name for path in paths if (name := f"{path.parent.name}.{path.stem}") not in LONG]


def main() -> int:
    """Run all benchmarks and return the number that failed or missed a target."""
    failed = []
    jobs = [[name] for name in scripts()] + [["papers", name, "--scale", "22", *of] for name, of in PROMISED.items()]
    for module, *words in jobs:
        name = " ".join([module, *words[:1]])
        print(f"# {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *words, *sys.argv[1:]], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed or missed a target: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
