"""Historical embeddings whose table is on a CUDA device: rows, memory, states and gradients are those of the CPU's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from tests.test_history import NODES, STRATEGIES, Training, history_of, make, path

__all__ = ["path"]  # a fixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")


@pytest.mark.parametrize("strategy", ["ondemand", "superbatch", "streamed"])
def test_every_row_is_the_latest_push(path: Path, strategy: str) -> None:
    """Bit for bit; the host has the steps of pushes alone; a state goes to the CPU and back."""
    with featstore.open(path, memory="32MiB") as g:
        training, history = Training(g), history_of()
        with make(g, history, strategy=STRATEGIES[strategy], device="cuda") as loader:
            training.run(loader, 0)
            training.run(loader, 1, n=3)
            state = copy.deepcopy(history.state_dict())
            assert state["table"].device.type == state["gradients"].device.type == "cuda"
            assert g.memory_report()["historical embeddings"] == len(NODES) * 24
            assert history.stats()["bytes"] == len(NODES) * 2 * 16
        assert training.n_pulled > 0
        for device in ("cpu", "cuda"):
            again, other = history_of(), Training(g)
            other.replay.pushed, other.replay.step = dict(training.replay.pushed), training.replay.step
            again.load_state_dict(state)
            with make(g, again, strategy=STRATEGIES[strategy], device=device) as loader:
                loader.set_epoch(2)
                other.run(loader, 2)
                assert again.state_dict()["table"].device.type == device
                assert other.n_pulled > 0


def test_a_loop_in_a_stream_of_its_own(path: Path) -> None:
    """Its table is zeroed before, though the stream in which the loader is made is busy for long."""
    with featstore.open(path, memory="32MiB") as g:
        training = Training(g)
        torch.cuda._sleep(500_000_000)
        with make(g, history_of(), device="cuda") as loader, torch.cuda.stream(torch.cuda.Stream()):
            training.run(loader, 0)
            training.run(loader, 1)
        assert training.n_pulled > 0


def test_rows_on_another_device_and_a_choice_by_the_hosts_memory_are_refused(path: Path) -> None:
    with featstore.open(path, memory="32MiB") as g:
        with make(g, history_of(), device="cuda") as loader:
            batch = next(iter(loader))
            with pytest.raises(ValueError, match=r"is on cuda.*, and h is on cpu"):
                batch.history.merge(torch.zeros(batch.blocks[-2].n_dst, 2))
        with pytest.raises(featstore.OptionError, match="divides the host's memory, and on cuda"):
            make(g, featstore.History(2, "auto"), device="cuda")


def test_losses_are_those_of_the_cpu(path: Path) -> None:
    """Two layers, three epochs, gradients of pulled rows included; in float64, within rounding of sums in another order."""

    def mean(h: torch.Tensor, block: Any) -> torch.Tensor:
        total = h.new_zeros(block.n_dst, h.shape[1]).index_add(0, block.dst, h[block.src])
        degree = torch.bincount(block.dst, minlength=block.n_dst).clamp(min=1)
        return torch.cat([h[: block.n_dst], total / degree[:, None]], 1)

    losses: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for device, found in losses.items():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(10, 8, dtype=torch.float64), torch.nn.Linear(16, 3, dtype=torch.float64)]
        model = torch.nn.ModuleList(layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with featstore.open(path, memory="32MiB") as g:
            history = history_of(5, dim=8)
            with make(g, history, device=device) as loader:
                for _ in range(3):
                    for batch in loader:
                        h = model[0](mean(batch.x.double(), batch.blocks[0])).relu()
                        scores = model[1](mean(batch.history.merge(h), batch.blocks[1]))
                        loss = torch.nn.functional.cross_entropy(scores, batch.y)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        found.append(loss.item())
                assert history.stats()["pulled"] > 0
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-9)
