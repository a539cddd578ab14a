"""Historical embeddings whose table is on a CUDA device: rows, memory, states and gradients are those of the CPU's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import featstore
from tests.load.test_history import NODES, STRATEGIES, Training, history_of, make, path

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
