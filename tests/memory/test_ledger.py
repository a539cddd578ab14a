"""The ledger beside what the library has mapped: what nobody reserved is not there, and what was released is gone at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import featstore
from featstore._core.buffers import mapped_bytes
from tests.memory.sizes import DIM, N
from tests.support.frozen import STRATEGIES, THREADS, make_dataset, make_loader_of, make_pack
from tests.support.sampled import covering

pytestmark = pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")

MEMORY = 16_000_000  # one and a half times the features
SAMPLERS = ("neighbor", "window")  # which draws an epoch's 60 batches in twenty windows
CASES = covering([strategy for strategy in STRATEGIES if strategy != "packed"], SAMPLERS, [""])
CASES += [("packed", "neighbor", "")]
CASES += [(strategy, "neighbor", "degree") for strategy in ("superbatch", "ginex", "streamed")]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("ledger") / "graph", N, DIM)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Whoever is in a cycle keeps what it has: the collector of cycles may not run for hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def given_back(g: featstore.OutOfCoreGraph) -> int:
    """Count the bytes that cut caches still map: their pages are the system's again, and the budget's."""
    n_bytes = 0
    for store in g.features.values():
        if store.cache is not None:
            whole = store.cache.array
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            n_bytes += whole.nbytes - store.cache.array.nbytes
    return n_bytes


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize(("strategy", "sampler", "policy"), CASES)
def test_the_ledger_has_what_is_mapped(graph: Path, tmp_path: Path, strategy: str, sampler: str, policy: str) -> None:
    options = {"policy": policy} if policy else {}
    pack = make_pack(tmp_path / "pack", graph, sampler, "many_idx") if strategy == "packed" else None
    before = mapped_bytes()
    with featstore.open(graph, memory=MEMORY, threads=THREADS) as g:
        with make_loader_of(g, sampler, STRATEGIES[strategy](pack, **options), "many_idx") as loader:
            for epoch in range(2):
                for batch in loader:
                    mapped, report = mapped_bytes() - before - given_back(g), g.memory_report()
                    assert mapped > 1_000_000, "nothing is counted"
                    assert mapped <= report.used, f"epoch {epoch}, batch {batch.index}: {mapped} bytes are mapped\n{report}"
