"""Several processes that train together: what a loader says of them, and the default budget of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from featstore import config
from featstore.config import Options, parse_memory
from featstore.ranks import local_job, process_group, sharing_ranks
from tests.support.fake_graph import graph, loader
from tests.support.refusing import refuses


@contextmanager
def group(rank: int, world_size: int) -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_loader_is_that_of_its_rank() -> None:
    """The numbers are those of the process group, unless others are given."""
    with loader(graph()) as whole:
        of_one = {batch.index: batch.seeds.tolist() for batch in whole}
    found: dict[int, list[int]] = {}
    for rank in range(2):
        with group(rank, 2), loader(graph()) as own, loader(graph(), rank=0, world_size=1) as alone:
            assert len(own) == 7
            assert len(alone) == 13
            found |= {batch.index: batch.seeds.tolist() for batch in own}
    assert sorted(found) == list(range(14))
    assert all(found[index] == of_one[index] for index in range(12))
    assert found[12] + found[13] == of_one[12]


def test_one_process_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a group, in a group of one, and where torch has none or it was never imported."""
    assert process_group() is None
    with group(0, 1):
        assert process_group() == (0, 1)
        assert len(loader(graph())) == 13
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_available=lambda: False))  # type: ignore[misc]
    assert len(loader(graph())) == 13
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert len(loader(graph())) == 13
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
    assert Options.resolve("50%").memory == parse_memory("50%", n) == int(Fraction(parse_memory("100%"), 2 * n))  # all processes'


def test_how_many_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, or what the launcher says; one process without a launcher; unknown in a group without one."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert [sharing_ranks(shared) for shared in (False, True, np.False_, np.True_, 1, 3)] == [0, 1, 0, 1, 1, 3]
    with group(0, 1):
        assert sharing_ranks(True) == 1
    with group(0, 2):
        refuses(ValueError, "how many of the group's 2 ranks are on this machine", lambda: sharing_ranks(True))
        assert sharing_ranks(2) == 2
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        assert sharing_ranks(True) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert sharing_ranks(True) == 4
    refuses(ValueError, "shared must be at least 1, not 0", lambda: sharing_ranks(0))
    refuses(TypeError, "shared must be an integer", lambda: sharing_ranks("all"))


def test_what_a_job_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is known by where its group meets; else by the parent, and not by its number alone, as numbers are used again."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    parent = local_job()
    assert parent.split()[0] == str(os.getppid())
    assert int(parent.split()[1]) > 0
    monkeypatch.setattr(os, "getppid", lambda: 0)  # of a container's first process
    assert local_job() == "0 "
    found = set()
    for name in ("MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
        found.add(local_job())
    assert len(found - {"0 "}) == 3
