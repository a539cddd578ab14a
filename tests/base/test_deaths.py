"""Finalizers, which run while objects die, where CPython drops Ctrl-C and every other error."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import weakref
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch

import featstore
from featstore.budget import Living
from featstore.errors import MissingExtraError
from featstore.sampling.scratch import SCRATCH
from tests.support import pyg  # noqa: F401  before the adapter imports PyG, whose warnings are errors here
from tests.support.loaders import make_loader


def test_an_object_whose_init_was_interrupted_dies_quietly() -> None:
    found = {}
    for module in pkgutil.walk_packages(featstore.__path__, "featstore."):
        if module.name.endswith("__main__"):
            continue
        with contextlib.suppress(MissingExtraError):  # DGL, which is not installed here
            for name, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if cls.__module__.startswith("featstore.") and "__del__" in vars(cls):
                    found[name] = cls
    assert {"FileLock", "PinnedArena"} <= set(found)
    for name, cls in found.items():
        cls.__new__(cls, *([4096, torch.device("cpu")] if name == "PinnedArena" else [])).__del__()


class Thing:
    pass


def test_living_objects_are_listed_until_they_die() -> None:
    things, living = [Thing() for _ in range(3)], Living[Thing]()
    for thing in (*things, things[0]):
        living.add(thing)
    assert list(living) == things
    iterator = iter(living)
    del things[1], thing
    assert len(list(iterator)) == 3
    del iterator
    assert list(living) == things
    first = weakref.ref(things[0])
    things.clear()
    assert first() is None
    assert list(living) == []


def test_no_python_code_runs_when_a_closed_loader_dies(small: SimpleNamespace, tmp_path: Path) -> None:
    """An interrupt would be lost there, and the collector, in which much time may pass, runs that first."""
    calls = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "hypothesis" not in frame.f_code.co_filename:  # which counts collections
            calls.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    with featstore.open(small.path, memory="64MiB") as g:
        seeds, path = np.arange(500), tmp_path / "pack"
        featstore.sample_offline(g, featstore.NeighborSampler(g, [5]), seeds, 100, path=path, progress=False).close()
        sampled: dict[str, Any] = {"seeds": seeds, "batch_size": 100}
        for options in (
            sampled,
            sampled | {"strategy": "superbatch", "length": 4},
            sampled | {"strategy": "ginex", "cache": 0.1},
            sampled | {"strategy": "streamed", "cache": 0.1},
            {"strategy": "packed", "pack": path, "cache": 0.1},
        ):
            given = {} if "pack" in options else {"sampler": featstore.NeighborSampler(g, [5])}
            loader: Any = make_loader(g, **given, **options)
            for _ in range(2):
                assert sum(1 for _ in loader) == 5
            loader.close()
            gc.collect()
            alive = weakref.ref(loader)
            sys.setprofile(record)
            try:
                del loader, given
                gc.collect()
            finally:
                sys.setprofile(None)
            assert alive() is None
            assert calls == [], options
            assert SCRATCH not in g.budget.report()
        assert g.budget.required(idle=True) == 0
