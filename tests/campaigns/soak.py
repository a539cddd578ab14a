"""Training, evaluation, changes and reopening, on every strategy in turn, for hours: rows are right, and nothing grows.

After each round the whole folder that it works in is looked at, with its own temporary directory: nothing but the dataset and a
pack may be there, and in these nothing that they do not name.

``python -m tests.campaigns.soak --seconds 7200`` says each minute what a round took and what the process holds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import featstore
from featstore.cli.sage import GraphSAGE
from featstore.cli.training import evaluate, scores_of
from featstore.storage.catalog import read_catalog
from tests.campaigns.checks import report
from tests.campaigns.operations import LOCKS
from tests.campaigns.races import resident_bytes
from tests.support.directory_size import bytes_at_one_moment
from tests.support.library_threads import tasks
from tests.support.planted import CLASSES, make_planted

__all__ = ["GrownError", "Round", "growth", "soak"]

MEMORY = "24MiB"
N_NODES, N_WORDS = 6000, 100
BATCH, FANOUTS = 100, [8, 5]
UPDATED = 300  # rows a round
STRATEGIES = ("ondemand", "superbatch", "ginex", "streamed", "packed", "auto")
SAMPLERS = (featstore.NeighborSampler, featstore.EpochSampler, featstore.LaborSampler)
WARM_UP = 1 / 4  # of the rounds: caches of Python, of torch and of the allocator fill
MOST_BYTES = 12 << 20  # what resident memory may grow by
MOST_DISK = 1.05  # times that the dataset may grow in any round, and the folder between quarters of the rounds
TEMPORARY = "temporary"  # the temporary directory, in the folder
OF_TORCH = ("torchinductor_",)  # what torch leaves in the temporary directory


@dataclass(frozen=True)
class Round:
    """Holdings of a process after a round: all that must not grow."""

    strategy: str
    seconds: float
    descriptors: int
    threads: int
    resident: int
    dataset: int  # bytes of its files
    disk: int  # bytes of all files of the folder


class GrownError(AssertionError):
    """Something grew from round to round, or was left."""


class Soak:
    """A dataset that is trained on and changed, round after round, and what it should have."""

    def __init__(self, folder: Path, seed: int, n_nodes: int, strategies: Sequence[str]) -> None:
        planted = make_planted(folder / "graph", n_nodes, N_WORDS, seed)
        self.strategies = strategies
        self.path, self.pack = planted.path, folder / "graph.pack"
        self.x, self.y = planted.x, planted.y
        self.train, self.test = planted.train_idx, planted.test_idx
        self.rng = np.random.default_rng(seed)
        self.model = GraphSAGE(N_WORDS, 16, CLASSES, len(FANOUTS))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def strategy(self, name: str, g: featstore.OutOfCoreGraph, sampler: Any) -> Any:
        """Make a strategy; packed layouts are of a pack of this state."""
        if name != "packed":
            return name
        featstore.sample_offline(g, sampler, self.train, BATCH, path=self.pack, overwrite=True, progress=False).close()
        return featstore.Packed(self.pack)

    def round(self, number: int) -> str:
        """Open, train, evaluate, change, and look at what the next one will see; return the strategy's name."""
        name = self.strategies[number % len(self.strategies)]
        make = SAMPLERS[number // len(self.strategies) % len(SAMPLERS)]
        with featstore.open(self.path, memory=MEMORY) as g:
            sampler = make(g, FANOUTS, seed=number)
            strategy = self.strategy(name, g, sampler)
            options: dict[str, Any] = {"features": "x", "labels": "y", "strategy": strategy}
            given = () if name == "packed" else (sampler, self.train, BATCH)
            with featstore.Loader(g, *given, shuffle=True, seed=number, **options) as loader:
                for batch in loader:
                    if not np.array_equal(batch.x.numpy(), self.x[batch.input_ids.numpy()]):
                        raise AssertionError(f"round {number}, {name}, {make.__name__}: rows of batch {batch.index} are wrong")
                    self.optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(scores_of(self.model, batch), batch.y).backward()
                    self.optimizer.step()
            with featstore.Loader(
                g, featstore.NeighborSampler(g, FANOUTS), self.test[:500], BATCH, features="x", labels="y"
            ) as seen:
                evaluate(self.model, seen)
        self.change(number)
        return name

    def change(self, number: int) -> None:
        """Update rows; now and then add a feature and remove it, and leave a loop half-way."""
        ids = self.rng.choice(len(self.x), UPDATED, replace=False)
        rows = np.roll(self.x[ids], 1, 0)
        with featstore.open(self.path, memory=MEMORY) as g:
            g.features["x"].update(ids, rows, progress=False)
            self.x[ids] = rows
            if number % 3 == 0:
                g.add_feature("other", self.x[:, :4].copy(), progress=False)
                g.remove_feature("other")
            with featstore.Loader(g, featstore.NeighborSampler(g, FANOUTS), self.train, BATCH, features="x") as loader:
                next(iter(loader))


def left(folder: Path) -> list[str]:
    """List the files and folders that nobody has use for between rounds, without their contents."""
    there = {each.relative_to(folder).as_posix() for each in folder.iterdir()} - {"graph", "graph.pack", TEMPORARY}
    there |= {f"{TEMPORARY}/{name}" for name in os.listdir(folder / TEMPORARY) if not name.startswith(OF_TORCH)}
    files = read_catalog(folder / "graph").files.values()
    known = LOCKS | {"catalog.lmdb"} | {name for each in files for name in (each.name, each.sums_name)}
    there |= {f"graph/{name}" for name in set(os.listdir(folder / "graph")) - known}
    there |= {f"graph/catalog.lmdb/{name}" for name in set(os.listdir(folder / "graph" / "catalog.lmdb")) - {"data.mdb"}}
    if (folder / "graph.pack").exists():
        with featstore.Pack(folder / "graph.pack") as pack:
            there |= {f"graph.pack/{name}" for name in pack.verify(progress=False)["others"]}
    return sorted(there)


def held(strategy: str, seconds: float, folder: Path) -> Round:
    """Look at what this process holds."""
    resident = resident_bytes()
    disk = bytes_at_one_moment(folder / "graph"), bytes_at_one_moment(folder)
    return Round(strategy, seconds, len(os.listdir("/proc/self/fd")), len(tasks()), resident, *disk)


def growth(rounds: Sequence[Round]) -> list[str]:
    """Say what grew: the dataset in any round; else the least of the last quarter of the rounds is compared with the second's."""
    quarter = max(1, int(len(rounds) * WARM_UP))
    early, late = rounds[quarter : 2 * quarter], rounds[-quarter:]

    def least(of: Sequence[Round], name: str) -> int:
        return min(getattr(each, name) for each in of)

    found = [
        f"{name}: {least(early, name)}, then {least(late, name)}"
        for name in ("descriptors", "threads")
        if least(late, name) > least(early, name)
    ]
    if least(late, "resident") > least(early, "resident") + MOST_BYTES:
        found.append(f"resident memory: {least(early, 'resident') >> 20} MiB, then {least(late, 'resident') >> 20}")
    if least(late, "disk") > MOST_DISK * least(early, "disk"):
        found.append(f"folder: {least(early, 'disk') >> 10} KiB, then {least(late, 'disk') >> 10}")
    if (most := max(rounds, key=lambda each: each.dataset)).dataset > MOST_DISK * rounds[0].dataset:
        found.append(f"dataset: {rounds[0].dataset >> 10} KiB, and {most.dataset >> 10} after round {rounds.index(most)}")
    return found


def soak(
    folder: Path,
    *,
    seconds: float = 0,
    seed: int = 0,
    n_nodes: int = N_NODES,
    strategies: Sequence[str] = STRATEGIES,
    after: Callable[[int], None] = lambda number: None,
    say: Callable[[Round], None] = lambda each: None,
) -> list[Round]:
    """Run rounds for ``seconds``, and at least four of each strategy; ``after`` is called after each.

    Raises
    ------
    GrownError
        Descriptors, threads, resident memory, the dataset's bytes or the folder's grew; or a round left something in the folder.
    """
    (folder / TEMPORARY).mkdir()
    temporary, tempfile.tempdir = tempfile.gettempdir(), os.fspath(folder / TEMPORARY)
    try:
        return _soak(folder, seconds, Soak(folder, seed, n_nodes, strategies), after, say)
    finally:
        tempfile.tempdir = temporary


def _soak(
    folder: Path, seconds: float, under_test: Soak, after: Callable[[int], None], say: Callable[[Round], None]
) -> list[Round]:
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    begin, rounds, least = time.monotonic(), list[Round](), 4 * len(under_test.strategies)
    while time.monotonic() - begin < seconds or len(rounds) < least or len(rounds) % least:
        at = time.monotonic()
        name = under_test.round(len(rounds))
        after(len(rounds))
        if there := left(folder):
            raise GrownError(f"after round {len(rounds)}, {name}, is left: {there}")
        rounds.append(held(name, time.monotonic() - at, folder))
        say(rounds[-1])
    found = growth(rounds)
    report("soak", seconds=round(time.monotonic() - begin), rounds=len(rounds), grown=found, last=asdict(rounds[-1]))
    if found:
        raise GrownError("; ".join(found))
    return rounds


def main() -> None:
    """Soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    last = time.monotonic()

    def say(each: Round) -> None:
        nonlocal last
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(each, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        rounds = soak(Path(folder), seconds=args.seconds, seed=args.seed, say=say)
    print(f"{len(rounds)} rounds, nothing grew: {rounds[-1]}")


if __name__ == "__main__":
    main()
