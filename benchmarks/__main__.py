"""``python -m benchmarks``: every ``bench_*.py``, each in a process of its own; arguments are passed on to all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run all benchmarks and return the number that failed or missed a target."""
    failed = []
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"# {script.name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, script, *sys.argv[1:]], check=False).returncode:
            failed.append(script.name)
    if failed:
        print(f"failed or missed a target: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
