"""Batches are the same whatever the strategy, and in every version; with caches of a given size, so is what is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.digests.table import TABLE, entry, make_graph, train
from tests.support.frozen import SAMPLERS, STRATEGIES


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_graph(tmp_path_factory.mktemp("digests"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_losses_and_loads_of_every_strategy(graph: Path, sampler: str) -> None:
    """Digests and counts are those of the table; losses are those on demand, bit for bit."""
    found = {name: train(graph, sampler, name) for name in STRATEGIES}
    first = found["ondemand"]
    assert len(set(first.losses)) == len(first.losses) > 10
    for name, each in found.items():
        assert each.digests == first.digests, f"{name} has other batches"
        assert each.losses == first.losses, f"{name} has other losses"
    table = json.loads(TABLE.read_text())
    assert entry(found) == table[sampler], "a change of what batches hold: if it is meant, python -m tests.digests.table"
    assert table.keys() == SAMPLERS.keys()
