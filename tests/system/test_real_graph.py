"""linux414-calls within 400 MB: what is learnt.

The graph lies in ``../shared/data`` beside the checkout; where it does not, these tests are skipped, and say so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"

pytestmark = [
    pytest.mark.skipif(not (DATA / "linux414-calls.npz").is_file(), reason=f"no linux414-calls in {DATA}"),
    pytest.mark.usefixtures("deterministic"),
]


@pytest.fixture(scope="module")
def real_graph() -> ModuleType:
    """The example that builds and trains."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import real_graph
    finally:
        sys.path.pop(0)
    return real_graph


@pytest.mark.stress
def test_accuracy(real_graph, tmp_path):
    result = real_graph.main([str(DATA), "--dataset", str(tmp_path / "linux")])
    assert result.epochs[-1].test_accuracy >= 0.65
