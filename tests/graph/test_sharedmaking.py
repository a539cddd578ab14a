"""Features that several ranks make together: the bits of one process, going on after a lost rank, errors that reach all ranks."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import featstore
from featstore.creation import steps
from featstore.graph import passes
from featstore.graph.derive import making
from featstore.graph.derive.sharedmaking import divided
from featstore.graph.openfields import OpenFields
from featstore.storage.lock import FileLock
from tests.support.programs import run_ranks
from tests.support.ranks import group
from tests.support.refusing import refuses
from tests.support.typed import REV, academic
from tests.support.whole_graph import skewed_graph

pytestmark = pytest.mark.usefixtures("_program_server")

N, WIDTH = 1500, 300
LITTLE = 2_600_000  # memory for a few blocks of a rank's rows
WAYS: dict[str, dict[str, Any]] = {
    "two": {"op": "mean", "hops": 2},
    "gcn": {"op": "gcn"},
    "sum": {"op": "sum", "dtype": "float64"},
}


def make(path: Path, n: int = N) -> Path:
    x = np.random.default_rng(0).standard_normal((n, WIDTH)).astype(np.float32)
    featstore.OutOfCoreGraph.create(path, *skewed_graph(n, 6, [1], n // 2), {"x": x}, progress=False).close()
    return path


def alone(path: Path, way: str) -> torch.Tensor:
    with featstore.open(path, memory="32MiB", threads=1) as g:
        return g.aggregate("x", name="alone", overwrite=True, progress=False, **WAYS[way])[:]


def make_together(rank: int, n_ranks: int, path: Path, folder: Path, way: str) -> None:
    with group(rank, n_ranks, folder), featstore.open(path, memory="8MiB", threads=1) as g:
        found = g.aggregate("x", name="made", progress=False, **WAYS[way])
        assert torch.equal(found[:], g.features["alone"][:])
        assert g.budget.peak <= 8 << 20


def ran(results: list[tuple[int, str]], expected: list[int] | None = None) -> None:
    for (status, printed), wanted in zip(results, expected or [0] * len(results), strict=True):
        assert status == wanted, printed


@pytest.mark.parametrize(("way", "n_ranks", "n"), [("two", 2, N), ("gcn", 3, N), ("sum", 2, N), ("two", 3, 2)])
def test_ranks_make_the_bits_of_one(tmp_path: Path, way: str, n_ranks: int, n: int) -> None:
    """Whatever their number, also where it is larger than that of nodes; in one file and one commit."""
    path = make(tmp_path / "g", n)
    expected, before = alone(path, way), sorted(os.listdir(path))
    ran(run_ranks(make_together, n_ranks, n_ranks, path, tmp_path, way))
    with featstore.open(path, memory="32MiB") as g:
        assert torch.equal(g.features["made"][:], expected)
        g.verify(progress=False)
    added = set(os.listdir(path)) - set(before)
    assert {each.split(".")[1] for each in added} == {"made"}, "nothing is left of the making"


def make_typed(rank: int, path: Path, folder: Path) -> None:
    with group(rank, 2, folder), featstore.open(path, memory="32MiB") as g:
        found = g.aggregate("x", edge_type=REV, name="made", progress=False)
        assert torch.equal(found[:], g["author"].features["alone"][:])


def test_a_type_of_several(tmp_path: Path) -> None:
    with academic(papers=300).create(tmp_path / "g") as g:
        g.aggregate("x", edge_type=REV, name="alone", progress=False)
    ran(run_ranks(make_typed, 2, tmp_path / "g", tmp_path))


# -- lost ranks ----------------------------------------------------------------------------------------------------------------


def lose(rank: int, path: Path, folder: Path, lost: int) -> None:
    """A rank is killed as it begins the second block of its rows; the other's error is torch's."""
    if rank == lost:  # the other one keeps its rows when it has all
        steps.CHECKPOINT_S = -1e9  # type: ignore[misc]
    begun, real = [0], passes.Passes._summed

    def summed(self: Any, first: int, stop: int) -> Any:
        begun[0] += 1
        if rank == lost and begun[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, first, stop)

    passes.Passes._summed = summed  # type: ignore[method-assign]
    with group(rank, 2, folder), featstore.open(path, memory="16MiB", threads=1) as g:
        refuses(RuntimeError, "peer", lambda: g.aggregate("x", name="made", memory=LITTLE, progress=False, hops=2))
        assert "made" not in g.features


def go_on(rank: int, n_ranks: int, path: Path, folder: Path) -> None:
    """Count the rows that are summed, for the test."""
    rows, real = [0], passes.Passes._summed

    def summed(self: Any, first: int, stop: int) -> Any:
        rows[0] += stop - first
        return real(self, first, stop)

    passes.Passes._summed = summed  # type: ignore[method-assign]
    with group(rank, n_ranks, folder), featstore.open(path, memory="16MiB", threads=1) as g:
        g.aggregate("x", name="made", memory=LITTLE, progress=False, hops=2)
    (folder / f"rows-{rank}").write_text(str(rows[0]))


@pytest.mark.parametrize(("lost", "n_ranks"), [(1, 2), (0, 2), (1, 1), (1, 3)])
def test_what_a_lost_rank_had_not_made_is_made_by_the_next_call(tmp_path: Path, lost: int, n_ranks: int) -> None:
    """And what the others had is not, by as many ranks; by more or fewer what rank 0 had is not."""
    path = make(tmp_path / "g")
    expected = alone(path, "two")
    status = [-signal.SIGKILL if rank == lost else 0 for rank in range(2)]
    ran(run_ranks(lose, 2, path, tmp_path, lost), status)
    assert (path / "making.made" / "part-1").is_dir()
    (tmp_path / "store").unlink(missing_ok=True)
    ran(run_ranks(go_on, n_ranks, n_ranks, path, tmp_path))
    with featstore.open(path, memory="32MiB") as g:
        assert torch.equal(g.features["made"][:], expected)
        shares, before = (np.diff(divided(N, [g.edge_lists()], n)) for n in (n_ranks, 2))
    made = [int((tmp_path / f"rows-{rank}").read_text()) for rank in range(n_ranks)]
    if n_ranks == 2:
        assert made[1 - lost] == shares[1 - lost], "all of its rows of the first hop were there"
        assert shares[lost] < made[lost] < 2 * shares[lost], "a block of them"
    else:
        assert made == [2 * N - before[0]] if n_ranks == 1 else [shares[0], 2 * shares[1], 2 * shares[2]]
    assert not (path / "making.made").exists()


def test_rows_of_a_rank_that_still_runs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of an earlier call that has not ended yet keeps its folder: the next call waits for its lock."""
    path = make(tmp_path / "g")
    ran(run_ranks(lose, 2, path, tmp_path, 0), [-signal.SIGKILL, 0])
    part = path / "making.made" / "part-1"
    monkeypatch.setattr(making, "PATIENCE_S", 0.1)
    with featstore.open(path, memory="32MiB") as g:
        with FileLock(f"{part}.lock", exclusive=True), pytest.raises(featstore.BusyError, match=r"part-1\.lock"):
            g.aggregate("x", name="made", progress=False, hops=2)
        assert part.is_dir()
        g.aggregate("x", name="made", progress=False, hops=2)
    assert not part.parent.exists()


# -- errors --------------------------------------------------------------------------------------------------------------------


def fail(rank: int, path: Path, folder: Path, how: str) -> None:
    with group(rank, 2, folder), featstore.open(path, memory="32MiB", threads=1) as g:

        def call(**options: Any) -> Any:
            return g.aggregate("x", name="made", progress=False, **options)

        if how == "arguments":
            refuses(ValueError, "differ in: op$", lambda: call(op="sum" if rank else "mean"))
        elif how == "memory" and rank:
            refuses(featstore.BudgetError, "", lambda: call(memory="1KiB"))
        elif how == "memory":
            refuses(RuntimeError, "rank 1 of 2 failed: ", call)
        elif how == "opening":  # once it is committed: the others know, and no rank waits for another
            with patch.object(OpenFields, "adopt_feature", cannot) if rank else nullcontext():
                refuses(OSError if rank else RuntimeError, "too many", call)
        elif how == "alone":
            torch.distributed.barrier()
            if not rank:
                call(rank=0, world_size=1)
            torch.distributed.barrier()
            refuses(ValueError, "rank=0, world_size=1 works alone", lambda: call(rank=rank, world_size=3))
            return
        torch.distributed.barrier()
        left = [each for each in os.listdir(path) if each.startswith("making")]
        torch.distributed.barrier()  # before a rank begins anew
        assert left == ["making.made"] * (how == "memory")
        assert torch.equal(call(overwrite=how == "opening")[:], g.features["alone"][:]), "all of them work together again"


def cannot(*given: Any) -> None:
    raise OSError("too many open files")


@pytest.mark.parametrize("how", ["arguments", "memory", "opening", "alone"])
def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path, how: str) -> None:
    path = make(tmp_path / "g", 200)
    with featstore.open(path) as g:
        g.aggregate("x", name="alone", progress=False)
    ran(run_ranks(fail, 2, path, tmp_path, how))


def apart(rank: int, path: Path, folder: Path) -> None:
    if rank:
        path = Path(shutil.copytree(path, folder / "copy"))
    with group(rank, 2, folder), featstore.open(path, memory="32MiB") as g:
        words = "another directory"
        refuses(ValueError if rank else RuntimeError, words, lambda: g.aggregate("x", progress=False))
    assert not [each for each in os.listdir(path) if each.startswith("making")]


def test_ranks_of_two_copies_of_a_dataset_are_refused(tmp_path: Path) -> None:
    ran(run_ranks(apart, 2, make(tmp_path / "g", 100), tmp_path))


def test_ranks_need_a_process_group(tmp_path: Path) -> None:
    with featstore.open(make(tmp_path / "g", 50)) as g:
        refuses(ValueError, "no process group", lambda: g.aggregate("x", rank=0, world_size=2, progress=False))
        refuses(ValueError, "go together", lambda: g.aggregate("x", rank=0, progress=False))
        assert len(g.aggregate("x", rank=0, world_size=1, progress=False)) == 50


def test_destinations_are_divided_by_nodes_and_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a count by hand; in pieces as in one."""
    path = make(tmp_path / "g")
    with featstore.open(path) as g:
        degrees = np.asarray(g.in_degree).astype(np.int64)
        of_node = 1 + degrees.sum() // N
        ends = np.cumsum(degrees + of_node)
        for n_ranks in (1, 2, 3, 7):
            bounds = divided(N, [g.edge_lists()], n_ranks)
            assert (bounds[0], bounds[-1], len(bounds)) == (0, N, n_ranks + 1)
            targets = [ends[-1] * rank // n_ranks for rank in range(1, n_ranks)]
            assert bounds[1:-1] == [int((ends < target).sum()) + 1 for target in targets]
            with monkeypatch.context() as patch:
                patch.setattr("featstore.graph.derive.sharedmaking._PIECE", 61)
                assert divided(N, [g.edge_lists()], n_ranks) == bounds
    assert divided(10, [], 3) == [0, 3, 6, 10]
    assert divided(2, [], 4) == [0, 1, 1, 1, 2]
    assert divided(0, [], 2) == [0, 0, 0]
