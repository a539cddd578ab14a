"""A training with a history that is killed with SIGKILL goes on, in another process, from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from featstore.testing.faults import forked
from tests.load.test_history import BATCH, NODES, SEEDS, STRATEGIES, Training, history_of, make, path
from tests.support.programs import run_in_fork
from tests.support.sampled import one_in

pytestmark = pytest.mark.usefixtures("_program_server")

__all__ = ["path"]  # a fixture

STALENESS, EPOCHS = 3, 4
A_EPOCH = -(-len(SEEDS) // BATCH)
FIRST, SECOND = A_EPOCH + 2, 2 * A_EPOCH + 3  # steps of the checkpoints: in the middle of an epoch each


def _save(training: Training, loader: featstore.Loader, history: featstore.History, file: str) -> None:
    state = {"loader": loader.state_dict(), "history": history.state_dict()}
    torch.save(state, f"{file}.tmp")
    os.replace(f"{file}.tmp", file)
    Path(f"{file}.json").write_text(json.dumps({"step": training.replay.step, "pulled": training.n_pulled}))


def _check_table(training: Training, history: featstore.History) -> None:
    """Compare the whole table with the dictionary: (node, step of its latest push), bit for bit."""
    state = history.state_dict()
    pushed = training.replay.pushed
    assert state["nodes"].tolist() == NODES.tolist()
    assert state["pushed"].tolist() == [pushed.get(node, -1) for node in NODES.tolist()]
    expected = [[node, pushed[node]] if node in pushed else [0, 0] for node in NODES.tolist()]
    assert torch.equal(state["table"], torch.tensor(expected, dtype=torch.float64))
    assert state["step"] == training.replay.step == history.step


def _train(dataset: str, file: str, strategy: str, since: int, saved_at: int, killed_at: int, is_merged: bool) -> None:
    """Train from step ``since``; save before step ``saved_at``; die at ``killed_at``, which has its batch, merged or not.

    Every batch is compared with a dictionary that has replayed all steps that count: those before the checkpoint, and from then
    on those of this process. ``killed_at`` of -1: train to the end of the last epoch.
    """
    with featstore.open(dataset, memory="32MiB") as g:
        training, history = Training(g, STALENESS), history_of(STALENESS, nodes=NODES if not since else 0.3)
        for step in range(since):
            epoch, index = divmod(step, A_EPOCH)
            training.replay.batch(training.order.epoch(epoch).seeds(index), epoch, index)
        with make(g, history, strategy=STRATEGIES[strategy], prefetch=3, threads=3) as loader:
            if since:
                saved = torch.load(file)
                history.load_state_dict(saved["history"])
                loader.load_state_dict(saved["loader"])
                _check_table(training, history)
            for epoch in range(since // A_EPOCH, EPOCHS):
                for batch in loader:
                    if training.replay.step == killed_at and not is_merged:
                        os.kill(os.getpid(), signal.SIGKILL)
                    training.check(batch, epoch)
                    if training.replay.step == saved_at:
                        _save(training, loader, history, file)
                    if training.replay.step == killed_at + 1 and is_merged:
                        os.kill(os.getpid(), signal.SIGKILL)
            assert training.replay.step == EPOCHS * A_EPOCH
            assert training.n_pulled > 0
            _check_table(training, history)


def _killed_twice(dataset: str, file: str, strategy: str, later: int, is_merged: bool) -> None:
    """Train in three processes, forks of this one, of which two die; in the child."""
    for since, saved_at in ((0, FIRST), (FIRST, SECOND)):
        killed_by = forked(lambda: _train(dataset, file, strategy, since, saved_at, saved_at + later, is_merged))
        assert killed_by == signal.SIGKILL
        said = json.loads(Path(f"{file}.json").read_text())
        assert said["step"] == saved_at
        assert said["pulled"] > 0
        assert torch.load(file)["history"]["step"] == saved_at
        assert np.max(torch.load(file)["history"]["pushed"].numpy()) < saved_at
    assert forked(lambda: _train(dataset, file, strategy, SECOND, -1, -1, False)) is None


@pytest.mark.parametrize(
    ("strategy", "later", "is_merged"),
    one_in(3, [("superbatch", 4, True), ("ondemand", 0, False), ("streamed", 2, False)], names=3),
)
def test_the_latest_push_before_the_checkpoint_counts(
    path: Path, tmp_path: Path, strategy: str, later: int, is_merged: bool
) -> None:
    """Killed twice: whatever was pushed between a checkpoint and the kill is pushed anew, and pulled nowhere."""
    run_in_fork(_killed_twice, str(path), str(tmp_path / "training.pt"), strategy, later, is_merged)
