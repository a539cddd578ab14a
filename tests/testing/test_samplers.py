"""The contract of samplers: those of the library and of the documentation keep it, faulty ones are found."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.testing import SamplerContract
from featstore.testing.contractgraph import contract_graph
from featstore.testing.loading import SAMPLERS

PAGE = Path(__file__).parents[2] / "docs" / "add-a-sampler.md"


class TestNeighbor(SamplerContract):
    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return SAMPLERS["numbered"](g)


class TestLabor(SamplerContract):
    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return SAMPLERS["by layer"](g)


class TestLayer(SamplerContract):
    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return SAMPLERS["by importance"](g)


class TestShadow(SamplerContract):
    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return SAMPLERS["induced"](g)


class TestEpochWide(SamplerContract):
    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return SAMPLERS["in windows"](g)


class TestCallable(SamplerContract):
    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return SAMPLERS["callable"](g)


def of_the_page(name: str) -> Any:
    """Make a class that docs/add-a-sampler.md shows."""
    text = PAGE.read_text()
    imports = re.findall(r"^from featstore\.sampling.*$", text, re.MULTILINE)
    (shown,) = re.findall(rf"^class {name}\b.*?(?=\n\n\nwith )", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"np": np, "torch": torch, "featstore": featstore}
    exec("\n".join([*imports, shown]), names)
    return names[name]


class TestOfThePage(SamplerContract):
    """DropEdge, as docs/add-a-sampler.md has it."""

    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return of_the_page("DropEdge")(featstore.NeighborSampler(g, [5, 5], edges=True), keep=0.8)


class TestExpandOfThePage(SamplerContract):
    """RunSampler, as docs/add-a-sampler.md has it."""

    def make(self, g: featstore.OutOfCoreGraph) -> Any:
        return of_the_page("RunSampler")(g, [3, -1])

    def test_runs_of_lists(self, contract_g: featstore.OutOfCoreGraph) -> None:
        """Runs, of lists in memory, of some in memory and of none, are those of the file."""
        graph, seeds = contract_g, self._seeds()[0]
        src, dst = torch.cat(list(graph.edges()), dim=1)
        lists = [src[dst == v].tolist() for v in seeds]
        found, n_cached = [], []
        for n_bytes in (0, 20_000, 1 << 20):
            graph.cache_neighbors(n_bytes, progress=False)
            n_cached.append(0 if graph.neighbor_cache is None else graph.neighbor_cache.n_cached)
            found.append(copy.deepcopy(self.make(graph).sample(seeds, epoch=0, index=0)))
        assert 0 == n_cached[0] < n_cached[1] < n_cached[2] == graph.num_nodes
        block = found[0].blocks[-1]
        places = set()
        for v, neighbours in enumerate(lists):
            run = found[0].nodes[block.src[block.dst == v]].tolist()
            assert len(run) == min(3, len(neighbours))
            runs = [neighbours[k : k + len(run)] for k in range(len(neighbours) - len(run) + 1)]
            places.add(runs.index(run))
        assert len(places) > 1
        for batch in found[1:]:
            assert all(map(torch.equal, batch.tensors, found[0].tensors))


class Right:
    """Neighbours of the library's sampler; the faulty ones differ in one thing."""

    def __init__(self, g: featstore.OutOfCoreGraph) -> None:
        self.graph, self.sampler = g, featstore.NeighborSampler(g, [3, 2])
        self.rng = np.random.default_rng(0)

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        return self.sampler.sample(seeds, epoch, index)


class GoesOn(Right):
    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        return self.sampler.sample(seeds, epoch, int(self.rng.integers(1 << 30)))


class Sorts(Right):
    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        return self.sampler.sample(seeds.sort().values, epoch, index)


class Writes(Right):
    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        found = self.sampler.sample(seeds, epoch, index)
        seeds.zero_()
        return found


class Invents(Right):
    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
        found = self.sampler.sample(seeds, epoch, index)
        loops = torch.arange(found.n_seeds)
        return found.input_ids, [(loops, loops, len(found.input_ids), found.n_seeds)]


FAULTS = {
    GoesOn: ["test_a_batch_is_a_function_of_its_key", "test_batches_from_threads"],
    Sorts: ["test_batches_fit_their_seeds_and_the_graph", "test_few_seeds"],
    Writes: ["test_neither_seeds_nor_batches_change"],
    Invents: ["test_batches_fit_their_seeds_and_the_graph"],
}


def failures(cls: type[Right], tmp_path: Path) -> list[str]:
    """The tests of the contract that a sampler does not pass."""

    class Suite(SamplerContract):
        def make(self, g: featstore.OutOfCoreGraph) -> Any:
            return cls(g)

    suite, found = Suite(), []
    more: dict[str, dict[str, Any]] = {
        "test_few_seeds": {"nodes": [5, 899, 3]},
        "test_every_strategy_delivers_them": {"strategy": "superbatch", "tmp_path": tmp_path},
    }
    with featstore.open(contract_graph().path, memory="64MB") as g:
        for name in (each for each in dir(suite) if each.startswith("test_")):
            try:
                getattr(suite, name)(contract_g=g, **more.get(name, {}))
            except AssertionError:
                found.append(name)
    return found


@pytest.mark.parametrize("cls", [Right, *FAULTS])
def test_faults_are_found_and_right_ones_pass(cls: type[Right], tmp_path: Path) -> None:
    found = failures(cls, tmp_path)
    assert set(found) >= set(FAULTS.get(cls, []))
    assert bool(found) == (cls in FAULTS)
