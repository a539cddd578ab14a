"""Interrupted runs of layers: what one left is gone on with by name alone, compared before, and removed where it is of no use."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import Aggregate
from featstore.creation import steps
from featstore.inference.layers import digest_of_weights
from featstore.sampling.batch import Block
from tests.support.whole_graph import skewed_graph

N, WIDTH = 700, 24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    x = np.random.default_rng(1).standard_normal((N, WIDTH))
    features = {"x": x.astype(np.float32), "x64": x, "half": x.astype(np.float16)}
    featstore.OutOfCoreGraph.create(tmp_path / "g", *skewed_graph(N, 8, [5], 1_000), features, progress=False).close()
    return tmp_path / "g"


class Scaled(torch.nn.Module):
    """Multiplies rows by what its attributes, buffers, modules and methods say."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.norm = 1.0, torch.nn.BatchNorm1d(WIDTH)
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        self.eval()

    def change(self, h: torch.Tensor, /, *, power: int = 1) -> torch.Tensor:
        return h**power

    def forward(self, h: torch.Tensor, block: Block) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.change(h[: block.n_dst].float()) * self.slope * self.weight + self.shift)
        return found


class Stops(torch.nn.Module):
    """Copies rows; the first time it raises KeyboardInterrupt."""

    calls = 0

    def forward(self, h: torch.Tensor, block: Block) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            raise KeyboardInterrupt
        return h[: block.n_dst] + 0


def set_weight(module: Scaled) -> None:
    with torch.no_grad():
        module.weight.fill_(3)


CHANGES: dict[str, Callable[[Scaled, pytest.MonkeyPatch], Any]] = {
    "attribute": lambda module, patch: setattr(module, "slope", 3.0),
    "method": lambda module, patch: patch.setattr(Scaled, "change", lambda self, h: h.tanh()),
    "keyword default": lambda module, patch: patch.setattr(Scaled.change, "__kwdefaults__", {"power": 2}),
    "hook": lambda module, patch: module.register_forward_hook(lambda module, given, found: found * 2),
    "non-persistent buffer": lambda module, patch: module.get_buffer("shift").fill_(3),
    "mode of an inner module": lambda module, patch: module.norm.train(),
    "weight": lambda module, patch: set_weight(module),
}


@pytest.mark.filterwarnings("ignore:layers. a BatchNorm1d is in training mode:featstore.FeatstoreWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["block", "aggregate"])
def test_without_a_name_nothing_is_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch, change: str, form: str) -> None:
    monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)
    module, before = Scaled(), sorted(os.listdir(path))
    block = Block(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 0, N)
    first: Any = module if form == "block" else Aggregate(lambda h, mean: module(h, block), before=lambda h: h * module.slope)
    with featstore.open(path, memory="64MiB") as g:
        layers = [first, Stops()]
        with pytest.raises(KeyboardInterrupt):
            featstore.infer(g, layers, progress=False)
        assert sorted(os.listdir(path)) == before, "nothing is kept"
        CHANGES[change](module, monkeypatch)
        found = featstore.infer(g, layers, progress=False)
        module.norm.reset_running_stats()
        expected = featstore.infer(g, [first], out="expected", progress=False)
        assert not torch.equal(found[:], g.features["x"][:])
        if change != "mode of an inner module":
            assert torch.equal(found[:], expected[:])


def interrupted(g: Any, layers: Any, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        featstore.infer(g, [*layers, Stops()], progress=False, **options)


@pytest.mark.filterwarnings("ignore:layers. a BatchNorm1d is in training mode:featstore.FeatstoreWarning")
def test_what_a_named_run_left_of_something_else_is_removed_and_said(path: Path) -> None:
    module = Scaled()
    other = Scaled()
    other.get_buffer("shift").fill_(3)
    of_two = [module, lambda h, block: h[: block.n_dst]]
    with featstore.open(path, memory="64MiB") as g:
        for layers, options, words in (
            ([module], {}, r"making 'h' from the start: an earlier call did not finish, and a call without resume="),
            ([module], {"resume": "b"}, r"left differs in: resume$"),
            ([module], {"resume": "a", "features": "half"}, r"differs in: adjacency and feature$"),
            ([module], {"resume": "a", "features": "x64", "dtype": "float32"}, r"differs in: adjacency and feature$"),
            (of_two, {"resume": "a"}, r"differs in: number of layers, forms of layers, weights"),
            ([Aggregate(lambda h, mean: mean)], {"resume": "a"}, r"differs in: forms of layers, weights"),
            ([module], {"resume": "a", "dtype": "float64"}, r"differs in: dtype$"),
            ([other], {"resume": "a"}, r"differs in: weights or train/eval modes$"),
            ([Scaled().train()], {"resume": "a"}, r"differs in: weights or train/eval modes$"),
        ):
            interrupted(g, [module], resume="a")
            assert (path / "making.h" / "state").exists()
            with pytest.warns(UserWarning, match=words) as caught:
                interrupted(g, layers, **options)
            assert caught[0].filename == __file__
            shutil.rmtree(path / "making.h", ignore_errors=True)
        g.aggregate("x", name="h", progress=False)


@pytest.mark.parametrize(
    "bind",
    [
        lambda module: module,
        lambda module: module.forward,
        lambda module: functools.partial(lambda inner, h, block: inner(h, block), module),
        lambda module: lambda h, block: module(h, block),
        lambda module: lambda h, block, inner=module: inner(h, block),
        lambda module: Aggregate(lambda h, mean: module.norm(h)),
        lambda module: Aggregate(lambda h, mean: h, before=module.norm),
    ],
)
def test_weights_are_compared_where_a_layer_is_bound_to_a_module(bind: Any) -> None:
    def digest(module: Scaled) -> str:
        return digest_of_weights([bind(module), bind(module)])

    changed = Scaled()
    with torch.no_grad():
        changed.norm.weight.fill_(2)
    assert digest(Scaled()) == digest(Scaled()) != digest(changed)
    changed = Scaled()
    changed.norm.train()
    assert digest(Scaled()) != digest(changed)


def test_the_same_weights_under_other_names_are_another_model() -> None:
    first, second = torch.nn.Module(), torch.nn.Module()
    first.left = second.right = torch.nn.Linear(2, 2)
    assert digest_of_weights([lambda h, block: first.left(h)]) != digest_of_weights([lambda h, block: second.right(h)])


def test_a_layer_may_name_what_is_not_there_yet() -> None:
    def layers(is_there: bool) -> list[Any]:
        if is_there:
            later = torch.ones(2)
        return [lambda h, block: h * later]

    assert digest_of_weights(layers(False)) != digest_of_weights(layers(True))


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)])
def test_the_same_bytes_in_another_shape_or_dtype_are_another_model(other: torch.Tensor) -> None:
    def digest(weight: torch.Tensor) -> str:
        return digest_of_weights([lambda h, block, weight=weight: h @ weight])

    assert digest(torch.zeros(2, 3)) == digest(torch.zeros(2, 3)) != digest(other)


def test_rows_of_another_shape_than_the_interrupted_run_left_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CHECKPOINT_S", -1e9)
    for width, dtype, error, words in (
        (8, torch.float32, ValueError, r"not \(\d+, 16\), as the rows that the interrupted call left: another name for resume="),
        (16, torch.float64, TypeError, r"not float32, as the rows that the interrupted call left"),
    ):
        blocks: list[int] = []

        def stops(h: torch.Tensor, block: Block, blocks: list[int] = blocks) -> torch.Tensor:
            blocks.append(block.n_dst)
            if len(blocks) == 2:
                raise KeyboardInterrupt
            return h[: block.n_dst, :16]

        def other(h: torch.Tensor, block: Block, width: int = width, dtype: torch.dtype = dtype) -> torch.Tensor:
            return h[: block.n_dst, :width].to(dtype)

        with featstore.open(path, memory="64MiB") as g:
            with pytest.raises(KeyboardInterrupt):
                featstore.infer(g, [stops], memory="2700KiB", resume="a", progress=False)
            with pytest.raises(error, match=words):
                featstore.infer(g, [other], memory="2700KiB", resume="a", progress=False)


@pytest.mark.parametrize("resume", ["", True, 3])
def test_a_name_to_resume_is_a_word(path: Path, resume: Any) -> None:
    with featstore.open(path, memory="64MiB") as g, pytest.raises(TypeError, match="resume must be a name of this model"):
        featstore.infer(g, [Scaled()], resume=resume, progress=False)


def test_what_nobody_can_go_on_with_is_removed_by_the_next_that_makes_a_feature(path: Path) -> None:
    with featstore.open(path, memory="64MiB") as g:
        featstore.infer(g, [Scaled()], out="made", progress=False)
        for features, out in (("x", "usable"), ("made", "stale"), ("x", "damaged")):
            interrupted(g, [Scaled()], features=features, out=out, resume="a")
        os.truncate(path / "making.damaged" / "state", 4096)
        (path / "making.unnamed").mkdir()
        (path / "making.unnamed" / "step-1.rows.0.tmp").write_bytes(b"rows")
        (path / "making.txt").write_text("mine")
        featstore.infer(g, [Aggregate(lambda h, mean: mean)], out="made", overwrite=True, progress=False)
        left = {name for name in os.listdir(path) if name.startswith("making")}
        assert left == {"making.usable", "making.stale", "making.txt"}, "the feature 'made' was there until this was done"
        g.aggregate("x", progress=False)
        assert {name for name in os.listdir(path) if name.startswith("making")} == {"making.usable", "making.txt"}
        stops = Stops()
        stops.calls = 1
        found = featstore.infer(g, [Scaled(), stops], out="usable", resume="a", progress=False)
        assert torch.equal(found[:], featstore.infer(g, [Scaled()], progress=False)[:])
