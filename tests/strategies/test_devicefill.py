"""``device_cache="auto"``: sized after the first step, filled beside the loop, given back whatever happens meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.errors import OptionError
from featstore.gather.device import OUT_OF_MEMORY
from featstore.strategies import devicefill
from featstore.strategies.devicefill import FilledLater, free_bytes, make_tiers
from tests.strategies.test_devicecache import BATCH, STRATEGIES, WIDTH, N, arrays, check, dataset
from tests.support.loaders import make_loader

__all__ = ["arrays", "dataset"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore:strategy 'streamed':featstore.PerformanceWarning")

AUTO = featstore.DeviceCache("auto", reserve=0)


def loader(g: featstore.OutOfCoreGraph, options: dict[str, Any]) -> featstore.Loader:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    common: dict[str, Any] = {"features": list(g.features), "labels": None, "device_cache": AUTO}
    return make_loader(g, sampler, np.arange(0, N, 2), BATCH, **(common | options))


def tier_of(made: featstore.Loader) -> Any:
    """Wait until the tier is there, or it is known why there is none."""
    on_device = made._runner.context.on_device
    assert isinstance(on_device, FilledLater)
    return next(iter(on_device.join()), None)


@pytest.mark.parametrize("name", STRATEGIES)
def test_batches_before_and_after_it_is_there(dataset: Path, arrays: dict[str, torch.Tensor], name: str, device: str) -> None:
    """The first step decides; plans that were made before are run as they are; the next epoch has all of it."""
    options = {**STRATEGIES[name], "device": device}
    if options.get("cache") is None:
        options["cache"] = 0.1  # "auto" would leave nothing to the device, which the budget stands for
    with featstore.open(dataset, memory="2MiB") as g, loader(g, options) as made:
        assert made.stats()["device_cache"] == {"rows": 0, "bytes": 0, "why": "no step is done yet"}
        batches = []
        for batch in made:
            batches.append(batch)
            if len(batches) == 2:
                tier = tier_of(made)
        check(batches, arrays, device)
        assert tier is not None, made.stats()["device_cache"]
        assert 0 < len(tier) <= N
        first = made.stats()["hits"].get("device", 0)
        assert first > 0 or name in ("belady", "fixed", "ginex", "streamed")  # whose epoch may be planned by then
        del batch, batches
        again = list(made)
        check(again, arrays, device)
        stats = made.stats()
        with g.policy_inputs(WIDTH) as inputs:
            top = np.argsort(-inputs.context.out_degree, kind="stable")[: len(tier)]
        n_device = sum(int(np.isin(each.input_ids.cpu().numpy(), top).sum()) for each in again)
        assert stats["hits"]["device"] - first == len(arrays) * n_device
        assert stats["device_cache"] == {"rows": len(tier), "bytes": len(tier) * WIDTH}
        on_host = len(tier) * WIDTH if device == "cpu" else 0
        assert g.memory_report().get("device cache", 0) == on_host
        assert g.budget.peak <= 2 << 20


def test_epochs_of_one_batch_size_it_too(dataset: Path, arrays: dict[str, torch.Tensor], device: str) -> None:
    """A step is done once the loop asks for more, be it the epoch's end."""
    with featstore.open(dataset, memory="2MiB") as g:
        sampler, seeds = featstore.NeighborSampler(g, [4, 3], seed=1), np.arange(BATCH)
        options: dict[str, Any] = {"features": list(g.features), "labels": None, "device": device, "device_cache": AUTO}
        with featstore.Loader(g, sampler, seeds, BATCH, **options) as made:
            assert len(list(made)) == 1
            assert len(tier_of(made)) > 0
            list(made)
            assert made.stats()["hits"]["device"] > 0
        assert made.stats()["device_cache"] == {"rows": 0, "bytes": 0, "why": "the loader is closed"}


@pytest.mark.parametrize("name", ["degree", "fixed"])
def test_a_static_host_cache_is_made_anew_beside_it(
    dataset: Path, arrays: dict[str, torch.Tensor], name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":  # which has room for all rows
        monkeypatch.setattr(devicefill, "rows_left", lambda *given: ((N // 5,), 0))
    options = {**STRATEGIES[name], "device": device}
    with featstore.open(dataset, memory="1MiB") as g, loader(g, options) as made:
        for number, _ in enumerate(made):
            if number == 1:
                tier = tier_of(made)
        check(list(made), arrays, device)
        for feature in g.features:
            cache = g.features[feature].cache
            assert not ((cache.map.slot_of_row >= 0) & (tier.map.slot_of_row >= 0)).any()
            assert cache.n_cached == min(cache.capacity, N - len(tier))


def test_no_room(dataset: Path, arrays: dict[str, torch.Tensor], device: str) -> None:
    cache = "auto" if device == "cpu" else featstore.DeviceCache("auto", reserve="100TiB")  # by default a reserve of 1 GiB
    with featstore.open(dataset, memory="16MiB") as g, loader(g, {"device_cache": cache, "device": device}) as made:
        batches = list(made)
        assert tier_of(made) is None
        check(batches, arrays, device)
        assert made.stats()["device_cache"]["why"].startswith("there is no room: ")
        assert "device" not in made.stats()["hits"]


@pytest.mark.parametrize("error", [featstore.BudgetError("no", 1), OUT_OF_MEMORY("CUDA out of memory")])
def test_a_tier_that_does_not_fit_after_all(
    dataset: Path, arrays: dict[str, torch.Tensor], error: Exception, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise error

    monkeypatch.delattr(torch, "OutOfMemoryError", raising=False)  # as in torch 2.2
    monkeypatch.setattr(devicefill, "make_tiers", refuse)
    with featstore.open(dataset, memory="16MiB") as g, loader(g, {"device": device}) as made:
        batches: list[featstore.MiniBatch] = []

        def run() -> None:
            for batch in made:
                batches.append(batch)
                if len(batches) == 2:
                    assert tier_of(made) is None

        with pytest.warns(featstore.PerformanceWarning, match="device_cache='auto': it did not fit: ") as said:
            run()
        assert len(said) == 1
        assert said[0].filename == __file__  # the loop's
        check(batches, arrays, device)
        check(list(made), arrays, device)  # and no more warnings, which would be errors
        assert made.stats()["device_cache"]["why"].startswith("it did not fit")


def test_damage_is_raised_in_the_loop(
    dataset: Path, arrays: dict[str, torch.Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory goes back, and the next epoch goes on without a tier."""

    def fails(*args: Any) -> Any:
        raise featstore.CorruptionError("bad page", "x", 4096)

    with featstore.open(dataset, memory="16MiB") as g, loader(g, {"device": device}) as made:
        monkeypatch.setattr("featstore.strategies.domain.Domain.read", fails)
        with pytest.raises(featstore.CorruptionError, match="bad page"):
            for number, _ in enumerate(made):
                if number == 1:
                    tier_of(made)
        assert "device cache" not in g.memory_report()
        assert "device map" not in g.memory_report()
        check(list(made), arrays, device)


@pytest.mark.parametrize("how", ["close", "interrupt", "drop"])
def test_the_memory_goes_back_while_it_fills(dataset: Path, how: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing more is read from the moment on at which the tier is given up."""
    reading, n_reads = threading.Event(), []

    def slowly(domain: Any, name: str, rows: Any, out: Any) -> None:
        n_reads.append(len(rows))
        reading.set()
        for _ in range(60_000):
            if tier._is_over:
                return
            threading.Event().wait(0.001)
        raise AssertionError("the loader is not closed")

    monkeypatch.setattr("featstore.strategies.domain.Domain.read", slowly)
    with featstore.open(dataset, memory="16MiB") as g:
        made = loader(g, {"device": device})
        tier = made._runner.context.on_device
        assert isinstance(tier, FilledLater)

        def leave() -> None:
            iterator = iter(made)
            next(iterator)
            next(iterator)
            assert reading.wait(60)
            assert g.memory_report()["device cache" if device == "cpu" else "device map"] > 0
            if how == "interrupt":
                raise KeyboardInterrupt

        try:
            leave()
        except KeyboardInterrupt:
            assert how == "interrupt"
        if how == "drop":
            del made, leave
            gc.collect()
        else:
            made.close()
        assert len(n_reads) == 1 < len(g.features)
        assert "device cache" not in g.memory_report()
        assert "device map" not in g.memory_report()
        assert not any(thread.name == "featstore-device" for thread in threading.enumerate())


def interrupted_at(step: int, call: Any, *files: str) -> bool:
    """Whether Ctrl-C came: at line event ``step`` of these files."""
    left, before = step, sys.gettrace()

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        left -= event == "line"
        if not left:
            sys.settrace(before)
            raise KeyboardInterrupt
        return watch

    try:
        sys.settrace(watch)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.stress)])
def test_the_memory_goes_back_wherever_ctrl_c_comes(dataset: Path, every: int) -> None:
    """At lines of making a tier, those included at which nobody has the tier yet."""
    files = "cache/devicetier.py", "gather/device.py", "strategies/devicefill.py"
    with featstore.open(dataset, memory="16MiB") as g, loader(g, {"device_cache": 0}) as made:
        context, step = made._runner.context, 1
        while interrupted_at(step, lambda: made_tier(context), *files):
            step += every
            gc.collect()
            assert not {"device cache", "device map"} & g.memory_report().keys(), f"after {step} lines"
    assert step > 50


def made_tier(context: featstore.Context) -> None:
    tiers = make_tiers(context, featstore.DeviceCache().static_policy, [N // 10])
    assert tiers is not None
    for tier in tiers:
        assert tier is not None
        tier.close()


def test_what_a_device_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Total, less torch's peak, other processes' bytes, and the reserve: not equation 1 as printed."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 25)  # so that others have 45
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 35)
    assert free_bytes(torch.device("cuda", 0), Budget(1), 3) == 100 - 35 - 45 - 3
    budget = Budget(100)
    with budget.reserve("a step", 60):
        pass
    assert free_bytes(torch.device("cpu"), budget, 50) == -10


def test_the_device_is_the_one_that_was_current(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``"cuda"`` is resolved in the thread that makes the loader: in the one that fills the tier another device is current."""
    asked: list[tuple[torch.device, str]] = []

    def memory(device: torch.device) -> tuple[int, int]:
        asked.append((device, threading.current_thread().name))
        return 0, 100

    here = threading.get_ident()
    for name, stand_in in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "current_device": lambda: 3 if threading.get_ident() == here else 0,
        "Stream": lambda device: SimpleNamespace(device=device),
        "mem_get_info": memory,
        "memory_reserved": lambda device: 0,
        "max_memory_reserved": lambda device: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with featstore.open(dataset, memory="16MiB") as g:
        for device in ("cuda", "cuda:1"):
            with loader(g, {"device": device}) as made:
                context = made._runner.context
                assert context.on_device is not None
                context.on_device.step_done(context)
                assert tier_of(made) is None
                assert made.stats()["device_cache"]["why"].startswith("there is no room: ")
    assert asked == [(torch.device("cuda", number), "featstore-device") for number in (3, 1)]


def test_a_pack_takes_no_size_of_its_own(dataset: Path, tmp_path: Path, device: str) -> None:
    with featstore.open(dataset, memory="16MiB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        featstore.sample_offline(g, sampler, np.arange(0, N, 2), BATCH, path=tmp_path / "p", progress=False).close()
        with pytest.raises(OptionError, match="device_cache: the layout of a pack is made for so many rows on the device"):
            featstore.Loader(g, labels=None, device=device, device_cache="auto", strategy=featstore.Packed(tmp_path / "p"))


def test_scores_of_another_graph_are_said_in_the_loop(dataset: Path, arrays: dict[str, torch.Tensor], device: str) -> None:
    """Before a row is read by them; the next epoch goes on without a tier."""

    class Other(featstore.StaticPolicy):
        name = "degrees of another graph"

        def scores(self, context: Any) -> Any:
            return np.arange(N - 1)

    with featstore.open(dataset, memory="16MiB") as g:
        cache = featstore.DeviceCache("auto", policy=Other(), reserve=0)
        with loader(g, {"device_cache": cache, "device": device}) as made:
            with pytest.raises(featstore.PluginError, match=rf"must be {N} real numbers.* of shape \({N - 1},\)"):
                for number, _ in enumerate(made):
                    if number == 1:
                        tier_of(made)
            check(list(made), arrays, device)
            assert made.stats()["device_cache"]["rows"] == 0
        assert not {"device cache", "device map"} & g.memory_report().keys()
