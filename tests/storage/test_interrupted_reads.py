"""Ctrl-C while a read gives its queue back: the queue is there for the next read, and closing does not wait for it."""

from __future__ import annotations

import pytest

from featstore._core.io import Engine
from featstore.budget import Budget
from featstore.config import Options
from featstore.storage.reader import Reader

MEMORY = 64 << 20


def test_a_queue_of_another_is_not_given_back() -> None:
    """Ctrl-C may come when a queue was chosen and is not yet borrowed; meanwhile another thread borrows it."""
    reader = Reader(Options(memory=MEMORY), Budget(MEMORY))
    with reader.engine() as engine:
        reader._return(engine, object())
        with reader.engine() as other:
            assert other is not engine
    reader.close()


@pytest.mark.parametrize("is_done", [False, True])
def test_a_queue_is_given_back_though_ctrl_c_strikes_then(monkeypatch: pytest.MonkeyPatch, is_done: bool) -> None:
    """It strikes before the queue was given back, or when that is done and the call has not returned."""
    budget = Budget(MEMORY)
    reader = Reader(Options(memory=MEMORY), budget)
    return_engine, struck = Reader._return, 0

    def interrupted(self: Reader, engine: Engine, token: object) -> None:
        nonlocal struck
        struck += 1
        if struck > 1 or is_done:
            return_engine(self, engine, token)
        if struck == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Reader, "_return", interrupted)
    with pytest.raises(KeyboardInterrupt), reader.engine() as lost:
        pass
    assert struck == 2
    with reader.engine() as engine:
        assert engine is lost
        with reader.engine() as other:  # were it there twice, two reads would share it
            assert other is not engine
    monkeypatch.undo()
    reader.close()
    assert budget.used == 0
