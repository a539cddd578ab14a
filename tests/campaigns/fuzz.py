"""Coverage-guided fuzzing of one parser with atheris: ``python -m tests.campaigns.fuzz TARGET [options of libFuzzer]``.

``make fuzz`` runs all of them. New inputs go to ``build/fuzz/TARGET``; one that fails is left as ``build/fuzz/crash-…``. It
goes into the corpus together with the mend.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

# Functions of the library count their branches; what it imports (torch, NumPy) does not.
with atheris.instrument_imports(include=["featstore"]):
    from tests.campaigns.fuzz_targets import CORPUS, TARGETS, forget_scratch

FOUND = Path("build") / "fuzz"


def main(arguments: list[str]) -> None:
    name, *options = arguments
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    target = TARGETS[name]
    words = [f"-artifact_prefix={FOUND}/crash-{name}-", "-max_len=65536", "-timeout=60", "-rss_limit_mb=4096", *options]
    atheris.Setup([sys.argv[0], str(FOUND / name), str(CORPUS / name), *words], target)
    try:
        atheris.Fuzz()
    finally:
        forget_scratch()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
