"""The strategy keeps featstore's contract for strategies, and does what it is for."""

from typing import Any

import numpy as np
import pytest
from featstore_shared_rows import SharedRows, by_shared_rows

import featstore
from featstore.testing import StrategyContract


class TestSharedRows(StrategyContract):
    registered_name = "shared_rows"  # through the entry point of the installed package

    def strategy(self, **options: Any) -> SharedRows:
        return SharedRows(**{"length": 5, **options})


def test_the_order_is_that_of_shared_rows() -> None:
    ids = [np.array(each) for each in ([1, 2, 3], [7, 8], [3, 7], [1, 2, 9])]
    assert by_shared_rows(ids) == [0, 3, 1, 2]
    assert by_shared_rows(ids[:1]) == [0]
    assert by_shared_rows([]) == []


def test_fewer_rows_are_loaded(tmp_path: Any) -> None:
    """Two groups of nodes with neighbours of their own, in turn: in the order that shares rows a small cache has them."""
    n = 400
    indices = (np.arange(n)[:, None] + 2 * np.arange(1, 21)) % n  # even nodes have even neighbours
    x = np.arange(4 * n, dtype=np.float32).reshape(n, 4)
    featstore.OutOfCoreGraph.create(
        tmp_path / "g", np.arange(0, 20 * n + 1, 20), indices.ravel(), {"x": x}, progress=False
    ).close()
    seeds = np.concatenate([np.arange(first, first + 40, 4) for first in (0, 201, 2, 203)])
    loaded = {}
    with featstore.open(tmp_path / "g", memory="64MB") as g:
        for strategy in (featstore.OnDemand(cache=0.1, policy="lru"), SharedRows(cache=0.1, length=4)):
            sampler = featstore.NeighborSampler(g, [-1])
            with featstore.Loader(g, sampler, seeds, 10, labels=None, strategy=strategy, shuffle=False) as loader:
                order = [batch.index for batch in loader]
                loaded[strategy.name] = loader.stats()["rows_loaded"]
            assert order == ([0, 1, 2, 3] if type(strategy) is featstore.OnDemand else [0, 2, 1, 3])
    assert loaded["shared_rows"] < loaded["ondemand"]


@pytest.mark.parametrize("length", [0, -1, "many", 1.5])
def test_a_window_is_a_number_of_batches(length: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="length"):
        SharedRows(length=length)
