"""Graphs of several types in any memory: an epoch ends with the same batches, or an error names more memory before it begins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore import BudgetError, Loader, NeighborSampler, OnDemand, Streamed, Superbatch
from tests.support.sampled import covering
from tests.support.typed import academic

pytestmark = [pytest.mark.shares_resources, pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")]

MEMORIES = np.geomspace(300_000, 12_000_000, 10).astype(int).tolist()
ROUNDS = 3  # until what the error names suffices
STRATEGIES = {
    "ondemand": OnDemand(),
    "superbatch": Superbatch(),
    "streamed": Streamed(),
    "auto": featstore.Auto(),
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: Any) -> Callable[[str], tuple[Any, str]]:
    """Papers and authors whose rows are of one form, or of two; and the digest of an epoch of them."""
    return cache(partial(made, tmp_path_factory.mktemp("g")))


def made(folder: Path, form: str) -> tuple[Any, str]:
    graph = academic(papers=12_000).draw("x", 0, paper=64, author=64 if form == "shared" else 24)
    path = folder / form
    graph.create(path).close()
    return path, epoch_of(path, "64MiB", OnDemand(cache=None))


def epoch_of(path: Any, memory: Any, strategy: Any) -> str:
    """Run an epoch; return the digest of its batches, in their order."""
    with featstore.open(path, memory=memory, threads=2) as g:
        sampler = NeighborSampler(g, [4, 3], redraw=False)
        with Loader(g, sampler, ("paper", np.arange(0, 12_000, 6)), 200, strategy=strategy) as loader:
            found = {batch.index: digest(batch) for batch in loader}
        assert g.memory_report().peak <= g.budget.total
    return " ".join(found[index] for index in sorted(found))


def digest(batch: Any) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in batch._tensors():
        found.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(("name", "form"), covering(STRATEGIES, ["shared", "mixed"]))
def test_an_epoch_ends_or_raises_at_any_memory(datasets: Callable[[str], tuple[Any, str]], form: str, name: str) -> None:
    path, expected = datasets(form)
    n_ran = n_refused = 0
    for memory in MEMORIES:
        for _ in range(ROUNDS):
            try:
                assert epoch_of(path, memory, STRATEGIES[name]) == expected
                n_ran += 1
                break
            except BudgetError as error:
                assert error.needed is not None
                assert error.needed > memory
                memory, n_refused = error.needed, n_refused + 1
        else:
            pytest.fail(f"what the errors name does not suffice after {ROUNDS} rounds: {memory}")
    assert n_ran
    assert n_refused
