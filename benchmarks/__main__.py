"""``python -m benchmarks``: every ``bench_*.py``, each in a process of its own; arguments are passed on to all.

Figures of the papers that carry a promise of the project (``python -m benchmarks.papers``) run after them, at the promise's size.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROMISED = {  # by paper
    "diskgnn": ("--table", "7"),
    "outre": ("--table", "3", "--figure", "5"),
    "pagraph": ("--figure", "13", "--figure", "17", "--figure", "21"),
}


def main() -> int:
    """Run all benchmarks and return the number that failed or missed a target."""
    folder, failed = Path(__file__).parent, []
    jobs = {script.name: [str(script)] for script in sorted(folder.glob("bench_*.py"))}
    jobs |= {
        f"papers {name}": [str(folder / "papers" / "__main__.py"), name, "--scale", "22", *of] for name, of in PROMISED.items()
    }
    for name, words in jobs.items():
        print(f"# {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, *words, *sys.argv[1:]], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed or missed a target: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
