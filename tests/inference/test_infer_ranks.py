"""Outputs of a model that several ranks compute together: the bits of one process, after a lost rank, too; layers that differ."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore import Aggregate
from featstore.creation import steps
from featstore.sampling.batch import Block
from tests.support.programs import run_ranks
from tests.support.ranks import group
from tests.support.refusing import refuses
from tests.support.typed import academic
from tests.support.whole_graph import skewed_graph

pytestmark = pytest.mark.usefixtures("_program_server")

N, WIDTH = 1200, 40
LITTLE = 2_400_000  # memory for a few blocks of a rank's rows


class Mean(torch.nn.Module):
    """A layer of any kind, with weights, which counts the rows that it makes; it may kill its process."""

    def __init__(self, width: int, lost_at: int = -1) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 24)
        with torch.no_grad():  # whole numbers: products have the same bits whatever the number of rows
            for each in self.parameters():
                each.copy_(torch.from_numpy(np.random.default_rng(width).integers(-2, 3, each.shape)))
        self.calls = self.rows = 0
        self.lost_at = lost_at

    def forward(self, h: torch.Tensor, block: Block) -> torch.Tensor:
        if self.calls == self.lost_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls, self.rows = self.calls + 1, self.rows + block.n_dst
        total = torch.zeros(block.n_dst, h.shape[1]).index_add_(0, block.dst, h[block.src])
        found: torch.Tensor = self.linear(total + h[: block.n_dst]).relu()
        return found


def layers(lost_at: int = -1) -> list[Any]:
    """All kinds: a block, an Aggregate with rows made before, and one without a node's own."""
    inner = Mean(24)
    return [
        Mean(WIDTH, lost_at),
        Aggregate(lambda h, mean: torch.relu(h[:, :8] + mean), "mean", before=lambda h: inner.linear(h)[:, :8]),
        Aggregate(lambda h, total: total * 0.5, "gcn", needs_self=False),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    x = np.random.default_rng(1).integers(-3, 4, (N, WIDTH)).astype(np.float32)
    featstore.OutOfCoreGraph.create(tmp_path / "g", *skewed_graph(N, 8, [5], 600), {"x": x}, progress=False).close()
    with featstore.open(tmp_path / "g", memory="32MiB", threads=1) as g:
        featstore.infer(g, layers(), out="alone", memory=LITTLE, progress=False)
    return tmp_path / "g"


def ran(results: list[tuple[int, str]], expected: list[int] | None = None) -> None:
    for (status, printed), wanted in zip(results, expected or [0] * len(results), strict=True):
        assert status == wanted, printed


def infer_together(rank: int, n_ranks: int, path: Path, folder: Path, resume: str | None) -> None:
    torch.set_num_threads(1)
    with group(rank, n_ranks, folder), featstore.open(path, memory="32MiB", threads=1) as g:
        model = layers()
        found = featstore.infer(g, model, out="made", memory=LITTLE, resume=resume, progress=False)
        assert torch.equal(found[:], g.features["alone"][:])
    (folder / f"rows-{rank}").write_text(str(model[0].rows))


@pytest.mark.parametrize(("n_ranks", "resume"), [(2, None), (3, "model")])
def test_ranks_make_the_bits_of_one(path: Path, tmp_path: Path, n_ranks: int, resume: str | None) -> None:
    before = set(os.listdir(path))
    ran(run_ranks(infer_together, n_ranks, n_ranks, path, tmp_path, resume))
    rows = [int((tmp_path / f"rows-{rank}").read_text()) for rank in range(n_ranks)]
    assert sum(rows) == N
    assert min(rows) > N / n_ranks / 4
    assert {each.split(".")[1] for each in set(os.listdir(path)) - before} == {"made"}, "nothing is left of the making"
    with featstore.open(path) as g:
        g.verify(progress=False)


def by_type(h: Any, blocks: Any) -> dict[str, torch.Tensor]:
    """Sum the rows of all sources for papers and authors; no other type has an output."""
    if not blocks:
        return {}  # of institutions, at which no edges end
    kind = next(iter(blocks))[2]
    n_dst = next(iter(blocks.values())).n_dst
    total = h[kind][:n_dst].sum(1, keepdim=True) if h[kind].shape[1] else torch.zeros(n_dst, 1)
    for (source, _, _), block in blocks.items():
        if h[source].shape[1]:
            total = total.index_add(0, block.dst, h[source].sum(1, keepdim=True)[block.src])
    return {kind: total}


def infer_types(rank: int, path: Path, folder: Path) -> None:
    with group(rank, 2, folder), featstore.open(path, memory="32MiB", threads=1) as g:
        found = featstore.infer(g, [by_type, by_type], {"paper": "x"}, out="made", progress=False)
        for kind, store in found.items():
            assert torch.equal(store[:], g[kind].features["alone"][:])
        assert {"paper", "author"} <= set(found)


def test_several_types(tmp_path: Path) -> None:
    with academic(papers=300).create(tmp_path / "g", memory="32MiB") as g:
        featstore.infer(g, [by_type, by_type], {"paper": "x"}, out="alone", progress=False)
    ran(run_ranks(infer_types, 2, tmp_path / "g", tmp_path))


def lose(rank: int, path: Path, folder: Path, lost: int) -> None:
    if rank == lost:  # the other one keeps its rows when it has all
        steps.CHECKPOINT_S = -1e9  # type: ignore[misc]
    torch.set_num_threads(1)
    with group(rank, 2, folder), featstore.open(path, memory="32MiB", threads=1) as g:
        model = layers(1 if rank == lost else -1)
        options: dict[str, Any] = {"out": "made", "memory": LITTLE, "resume": "model", "progress": False}
        refuses(RuntimeError, "peer", lambda: featstore.infer(g, model, **options))
        assert "made" not in g.features


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_lost_rank_had_not_made_is_made_by_the_next_call(path: Path, tmp_path: Path, lost: int) -> None:
    ran(run_ranks(lose, 2, path, tmp_path, lost), [-signal.SIGKILL if rank == lost else 0 for rank in range(2)])
    (tmp_path / "store").unlink(missing_ok=True)
    ran(run_ranks(infer_together, 2, 2, path, tmp_path, "model"))
    rows = [int((tmp_path / f"rows-{rank}").read_text()) for rank in range(2)]
    assert rows[1 - lost] == 0, "all of its rows of the layer were there"
    assert 0 < rows[lost] < N / 2


def differ(rank: int, path: Path, folder: Path, how: str) -> None:
    def other(h: torch.Tensor, block: Block) -> torch.Tensor:
        if how == "fails" and rank:
            raise ArithmeticError("of this rank")
        return h[: block.n_dst, : 4 + rank]

    model: list[Any] = [Mean(WIDTH), other]
    if how == "weights" and rank:
        with torch.no_grad():
            model[0].linear.bias.fill_(7)
    errors: dict[str, Any] = {
        "weights": (ValueError, "differ in: weights or train/eval modes$"),
        "widths": (ValueError, r"\[\[4\], \"float32\"\] and \[\[5\], \"float32\"\]"),
        "fails": (ArithmeticError, "of this rank") if rank else (RuntimeError, "rank 1 of 2 failed: ArithmeticError: of this"),
    }
    with group(rank, 2, folder), featstore.open(path, memory="32MiB", threads=1) as g:
        before = sorted(os.listdir(path))
        torch.distributed.barrier()
        refuses(*errors[how], lambda: featstore.infer(g, model, out="made", progress=False))
        torch.distributed.barrier()
        assert sorted(os.listdir(path)) == before, "without resume= nothing is kept"


@pytest.mark.parametrize("how", ["weights", "widths", "fails"])
def test_layers_that_differ_or_fail_on_one_rank(path: Path, tmp_path: Path, how: str) -> None:
    ran(run_ranks(differ, 2, path, tmp_path, how))
