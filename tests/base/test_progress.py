"""Progress bars: in a notebook as on a terminal, and within an epoch of ``featstore train``."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from featstore import progress
from featstore.cli.main import main
from featstore.progress import Progress, is_seen, make_bar, note

pytestmark = pytest.mark.usefixtures("one_thread")

KERNEL, SHELL = {"IPKernelApp": {}}, {"TerminalIPythonApp": {}}


def use_ipython(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None) -> None:
    """Have the process run under IPython with this configuration; None: it was imported, and runs nothing."""
    shell = None if config is None else SimpleNamespace(config=config)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_no_bar_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not is_seen()
    with Progress("reading", 100, show=True) as bar:
        bar.add(100)
    note("a line")


@pytest.mark.parametrize(("config", "is_notebook"), [(KERNEL, True), (SHELL, False), (None, False)])
def test_a_notebook_shows_text_bars(monkeypatch, capsys, config, is_notebook) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda name: None)  # ipywidgets is not there
    assert not is_seen()
    use_ipython(monkeypatch, config)
    assert is_seen() == is_notebook
    with Progress("reading", 100, show=True) as bar:
        bar.add(100)
    note("a line")
    shown = capsys.readouterr().err
    assert ("reading: 100%" in shown) == ("a line" in shown) == is_notebook
    with Progress("reading", 100, show=False) as bar:
        bar.add(100)
    note("a line", show=False)
    assert capsys.readouterr().err == ""


def test_a_notebook_with_widgets_shows_those_of_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Widget(tqdm):  # type: ignore[type-arg]
        pass

    monkeypatch.setattr(progress, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Widget))
    for config, is_widget in ((KERNEL, True), (SHELL, False)):
        use_ipython(monkeypatch, config)
        with make_bar(range(3), desc="sampling") as bar:
            assert isinstance(bar, Widget) == is_widget
            assert list(bar) == [0, 1, 2]
    assert "sampling" in capsys.readouterr().err


def test_train_shows_batches_their_rate_and_the_time_left(small, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(tqdm, "__init__", with_every_update(tqdm.__init__))
    command = ["train", str(small.path), "--epochs", "2", "--batch-size", "50", "--hidden", "8", "--fanouts", "3,2"]
    for more, of in (([], 6), (["--max-batches", "4"], 4)):
        assert main([*command, *more]) == 0
        shown = capsys.readouterr().err
        for epoch in range(2):
            for done in range(of):
                assert f"| {done}/{of} [" in shown.split(f"epoch {epoch}:", 1)[1]
        assert "batch/s" in shown or "s/batch" in shown
        assert "loss=" in shown
        assert "<" in shown  # the time left
    assert main([*command, "--json"]) == 0
    assert capsys.readouterr().err == ""


def with_every_update(init: Any) -> Any:
    """Return a bar's constructor that draws every update, however fast they come."""

    def init_eager(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "mininterval": 0, "miniters": 1})

    return init_eager
