"""Sizes of caches: a share is a float or percent, bytes have a unit, and what is neither is refused and said."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore import config
from featstore.cache.sizes import in_proportion
from featstore.cli.main import main
from featstore.config import parse_cache_size, parse_memory
from tests.support.cases import each
from tests.support.loaders import make_loader

SIZES: dict[float, list[Any]] = {
    0.1: [0.1, "10%"],
    0.125: [" 12.5 % "],
    0.5: [np.float32(0.5), np.float64(0.5)],
    1.0: ["100%", 1.0],
    0: [0, "0", "0%", 0.0, "0B"],
    5000: [np.int64(5000), "5000"],
    512: ["0.5KiB"],
} | {4096: [4096], 10: ["10B"], 1000: ["1KB"], 2**30: ["1GiB"]}


@pytest.mark.parametrize(("parsed", "size"), each(SIZES))
def test_what_is_a_size(size: Any, parsed: int | float) -> None:
    found = parse_cache_size(size)
    assert (found, type(found)) == (parsed, type(parsed))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("0.1", "cache='0.1' has no unit and would be a cache of 0 bytes: probably '10%' is meant"),
        ("1", "probably '100%' is meant"),
        (1, "cache=1 has no unit and would be a cache of 1 bytes: probably '100%' is meant"),
        (10, "probably '10%' or '10MiB' is meant"),
        ("10", "probably '10%' or '10MiB' is meant"),
        (512, "probably '512MiB' is meant; write a share of the rows as '10%' or as a float, bytes with a unit ('512B')"),
        (4095, "has no unit"),
        (1.5, "cache as a share of the rows must lie in (0, 1], not 1.5"),
        ("150%", "must lie in (0, 1], not 150%"),
        (-0.1, "must lie in (0, 1]"),
        (float("nan"), "must lie in (0, 1]"),
        (-1, "cannot be negative"),
        ("-5%", "not a size"),
        ("10 percent", "not a size"),
    ],
)
def test_what_is_none(size: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_cache_size(size, "cache")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("memory", lambda g, size: featstore.open(g.path, memory=size)),
        ("memory", lambda g, size: featstore.OutOfCoreGraph.create(f"{g.path}.other", [0], [], memory=size)),
        ("memory", lambda g, size: g.aggregate("x", "mean", memory=size)),
        ("chunk_bytes", lambda g, size: featstore.convert(g.path, "chunked", chunk_bytes=size)),
        ("budget", lambda g, size: g.cache("x", size)),
        ("budget", lambda g, size: g.cache_neighbors(size)),
        ("disk", lambda g, size: featstore.EpochSampler(g, [2], disk=size)),
        ("disk", lambda g, size: featstore.sample_offline(g, featstore.NeighborSampler(g, [2]), [1], 1, disk=size)),
        ("disk", lambda g, size: featstore.Superbatch(disk=size)),
        ("cache", lambda g, size: featstore.OnDemand(cache=size)),
        ("device_cache", lambda g, size: featstore.DeviceCache(size)),
        ("reserve", lambda g, size: featstore.DeviceCache("10%", reserve=size)),
    ],
)
def test_the_argument_is_named(small: SimpleNamespace, name: str, call: Any) -> None:
    with featstore.open(small.path, memory="64MB") as g:
        for size, error in (("lots", ValueError), (-3, ValueError), ([1], TypeError)):
            with pytest.raises(error, match=rf"^{name}\b"):
                call(g, size)


def test_memory_is_a_share_of_the_machines(
    small: SimpleNamespace, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what it has in all, or of a memory cgroup's limit, whichever is less."""
    machine, group = 200 << 30, 10 << 30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=machine, available=machine // 2))
    for limits, total in (((), machine), (((group, 1), (machine, 2)), group), (((2 * machine, 3),), machine)):
        monkeypatch.setattr(config, "_cgroup_limits", lambda limits=limits: iter(limits))
        for share, part in (("5%", 20), ("100%", 1), ("12.5 %", 8)):
            assert parse_memory(share) == total // part
    monkeypatch.setattr(config, "_cgroup_limits", lambda: iter(()))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 << 30, available=1 << 30))
    with featstore.open(small.path, memory="12.5%") as g:
        assert g.budget.total == 256 << 20
    assert main(["info", str(small.path), "--memory", "12.5%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"] == 256 << 20
    rows = {"features": {"x": small.x}, "progress": False}
    featstore.OutOfCoreGraph.create(tmp_path / "g", small.indptr, small.indices, memory="25%", **rows).close()
    for size in ("0%", "100.1%"):
        with pytest.raises(ValueError, match=r"^memory as a share of the machine's memory must lie above 0% and at most at 100%"):
            featstore.open(small.path, memory=size)
    with pytest.raises(
        ValueError, match=r"^memory: not a size: '5 percent'.*; or a share of the machine's memory, such as '25%'"
    ):
        featstore.open(small.path, memory="5 percent")


@pytest.mark.parametrize("size", [True, None, [1], 1j])
def test_what_is_not_even_a_number(size: Any) -> None:
    with pytest.raises(TypeError):
        parse_cache_size(size)


def test_shares_and_forgotten_units_everywhere(small: SimpleNamespace, tmp_path: Any) -> None:
    """In ``g.cache``, ``g.cache_neighbors`` and both caches of a loader."""
    with featstore.open(small.path, memory="64MB") as g:
        for policy in ("degree", "lru"):
            for share in ("10%", 0.1):
                g.cache("x", share, policy)
                assert g.features["x"].cache.capacity == 100
        g.cache("x", "0%")
        assert g.features["x"].cache is None
        for share in ("50%", 0.5):
            g.cache_neighbors(share)
            assert g.neighbor_cache is not None
        g.cache_neighbors(0.0)
        assert g.neighbor_cache is None
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 40, "features": "x", "strategy": "superbatch", "length": 3}
        with make_loader(g, sampler, small.train_idx, cache="10%", **options) as loader:
            next(iter(loader))
            assert g.features["x"].cache.capacity == 100
        pack = featstore.sample_offline(g, sampler, small.train_idx, 40, path=tmp_path / "p", progress=False)
        packed: dict[str, Any] = {"strategy": "packed", "pack": pack, "features": "x"}
        with pack, make_loader(g, cache="10%", device_cache="5%", **packed) as loader:
            next(iter(loader))
            assert g.memory_report()["device cache"] == 50 * 100
            assert len(loader.stats()["hits"]) > 1
            for call in (
                lambda size: g.cache("x", size),
                lambda size: g.cache_neighbors(size),
                lambda size: featstore.Loader(g, sampler, small.train_idx, 40, strategy=featstore.OnDemand(cache=size)),
                lambda size: featstore.Loader(g, sampler, small.train_idx, strategy=featstore.Auto(cache=size)),
                lambda size: make_loader(g, cache=0.1, device_cache=size, **packed),
            ):
                for size in ("0.1", 10):
                    with pytest.raises(ValueError, match=r"has no unit and would be a cache of .*probably '10%'"):
                        call(size)


def test_the_command_line_takes_percent(small: SimpleNamespace, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    training = ["--epochs", "1", "--hidden", "8", "--batch-size", "100", "--fanouts", "3,2", "--max-batches", "2"]
    sizes = ["--cache", "10%", "--neighbor-cache", "10%"]
    assert main(["train", str(small.path), *training, *sizes, "--policy", "lru"]) == 0
    packing = ["--batch-size", "100", "--fanouts", "3,2", "--cache", "10%", "--device-cache", "5%"]
    assert main(["pack", str(small.path), str(tmp_path / "p"), *packing]) == 0
    assert "100 rows in memory, 50 on the device" in capsys.readouterr().out
    for option in ("--cache", "--neighbor-cache", "--device-cache"):
        with pytest.raises(SystemExit):
            main(["train", str(small.path), option, "10"])
        assert f": {option}: '10' has no unit" in capsys.readouterr().err


@given(st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 50)), min_size=1, max_size=6))
def test_bytes_in_proportion(n_bytes: int, columns: list[tuple[int, int]]) -> None:
    """None gets more than it can use, nothing is left that one could use, and the others' bytes are as their weights."""
    wholes, weights = (list(each) for each in zip(*columns, strict=True))
    for given_weights in (None, weights):
        found = in_proportion(n_bytes, wholes, given_weights)
        used = wholes if given_weights is None or not any(weights) else weights
        assert all(0 <= part <= whole for part, whole in zip(found, wholes, strict=True))
        assert sum(found) <= n_bytes
        cut = [at for at in range(len(wholes)) if found[at] < wholes[at] and used[at]]
        if cut:
            assert n_bytes - sum(found) <= len(wholes)
        for one in cut:
            for other in cut:
                assert abs(found[one] * used[other] - found[other] * used[one]) <= max(used[one], used[other]) * len(wholes)
