"""Several processes that train together: what a loader says of them, and the default budget of each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import featstore
from featstore import config
from featstore.config import Options
from tests.support.fake_graph import graph, loader


@contextmanager
def group(rank: int, world_size: int) -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_each_loader_of_several_ranks_warns() -> None:
    with group(1, 2):
        for _ in range(2):
            with pytest.warns(
                featstore.RanksWarning, match=r"rank 1 of 2 processes .* seeds\[1::2\]\[: len\(seeds\) // 2\]"
            ) as said:
                loader(graph())
            assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", featstore.RanksWarning)
            assert len(list(loader(graph()))) == 13
    assert issubclass(featstore.RanksWarning, featstore.FeatstoreWarning)


def test_one_process_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here: without a group, in a group of one, and where torch has none or it was never imported."""
    loader(graph())
    with group(0, 1):
        loader(graph())
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_available=lambda: False))  # type: ignore[misc]
    loader(graph())
    monkeypatch.delitem(sys.modules, "torch.distributed")
    loader(graph())
    assert "torch.distributed" not in sys.modules


@pytest.mark.parametrize(
    ("environment", "n"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "32"}, 4),  # torchrun
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, 2),  # Lightning
        ({"WORLD_SIZE": "8", "RANK": "3"}, 1),  # of other machines, for all that is known
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "-2"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": ""}, 1),
    ],
)
def test_the_default_budget_is_divided(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], n: int) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(config, "available_memory", lambda: 24 << 30)
    assert Options.resolve().memory == (12 << 30) // n
    assert Options.resolve("1GiB").memory == 1 << 30  # what is given is each process's
