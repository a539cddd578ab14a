"""Reports of loaders and batches: statistics with advice, tables of a batch, a picture."""

from __future__ import annotations

import builtins
import copy
import json
import pickle
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import featstore
from featstore.config import format_size
from featstore.errors import MissingExtraError
from featstore.load.report import ADVICE, LoaderStats, advice_on
from featstore.testing.faults import forked
from tests.support.typed import academic

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "statistics.md"


def stats(**changed: Any) -> dict[str, Any]:
    """Statistics of a loader for which nothing is to change, but for ``changed``."""
    found: dict[str, Any] = {"batches": 9, "rows": 100, "hits": {"host": 60, "base": 40}, "hits_lost": 0, "epochs_beside": 0}
    found |= {"rows_loaded": 40, "reads": 4, "bytes_requested": 1000, "bytes_read": 2000, "prefetch": 2, "hidden": 0.95}
    return found | {"seconds": {"sample": 1.0, "gather": 2.0, "read": 1.5, "wait": 0.1}} | changed


def test_a_loader_that_hides_its_work_needs_nothing() -> None:
    (only,) = advice_on(stats(), 2)
    assert "hardly waits" in only


@pytest.mark.parametrize(
    ("changed", "asked", "first", "words"),
    [
        ({"batches": 0}, 2, "No batch", []),
        ({"hidden": 0.2}, 2, "Reading rows bounds", ["a strategy that samples ahead"]),
        ({"hidden": 0.2, "seconds": {"gather": 2.0}}, 2, "Reading rows bounds", []),  # read is of extents alone
        ({"hidden": 0.2, "hits": {"packed": 99}, "seconds": {"gather": 2.0, "read": 1.5}}, 2, "Reading rows bounds", []),
        ({"hidden": 0.2, "hits": {"packed": 99}, "seconds": {"gather": 2.0, "read": 0.5}}, 2, "Copying rows", []),
        ({"hidden": 0.2, "superbatch": {"batches": 3, "of": 9}}, 2, "Reading rows bounds", ["more memory="]),
        (
            {"hidden": 0.2, "hits": {"host": 99, "base": 1}, "seconds": {"sample": 1.0, "gather": 2.0, "read": 0.3}},
            2,
            "Copying rows that are in memory",
            ["float16"],
        ),
        ({"hidden": 0.2, "seconds": {"sample": 5.0, "gather": 2.0}}, 2, "Sampling bounds", ["cache_neighbors", "EpochSampler"]),
        ({"hidden": 0.2, "seconds": {"sample": 5.0}, "lists": "all in memory"}, 2, "Sampling bounds", ["smaller fan-outs"]),
        ({"hidden": 0.2, "seconds": {"edges": 5.0}}, 2, "Rows of edges bound", ["edge_cache=", "edge_features="]),
        ({"hidden": 0.2, "seconds": {"transfer": 5.0, "wait": 9.0}}, 2, "Copies to the device", ["device_cache="]),
        ({"hidden": 0.2, "seconds": {"mine": 5.0}}, 2, "mine bounds", []),
        ({"hidden": 0.2, "bytes_read": 9000}, 2, "Reading", ["9.0 times", "'streamed' or 'packed'"]),
        ({"prefetch": 1}, 2, "The loop", ["1 batch is made ahead, not 2"]),
        ({"epochs_beside": 3}, 2, "The loop", ["3 epochs were read on demand"]),
        ({"hits_lost": 1234}, 2, "The loop", ["1,234 hits were lost"]),
    ],
)
def test_what_to_change_first(changed: dict[str, Any], asked: int, first: str, words: list[str]) -> None:
    found = advice_on(stats(**changed), asked)
    assert found[0].startswith(first)
    for each in words:
        assert any(each in line for line in found), each
    assert all(line.endswith(".") for line in found)


def test_advice_that_would_not_help_is_not_given() -> None:
    read_much = {"hidden": 0.2, "bytes_read": 9000}
    for in_sequence in ({"superbatch": {"passes": 3}}, {"layout": {"name": "x"}}, {"layouts": []}):
        assert not any("in sequence" in line for line in advice_on(stats(**read_much, **in_sequence)))
    assert not any("made ahead" in line for line in advice_on(stats(prefetch=1), None))
    of_pass = stats(hidden=0.2, bytes_requested=0, bytes_read=9000)  # that filled a cache of all rows
    assert not any("in sequence" in line for line in advice_on(of_pass))
    seconds = {"pack": 5.0, "sample": 1.0}
    for layout in ({"layout": {"name": "x", "made": True}}, {"layouts": []}):  # which were made before the epoch
        assert "Sampling bounds" in advice_on(stats(hidden=0.2, seconds=seconds, **layout))[0]
    of_lists = advice_on(stats(hidden=0.2, seconds={"sample": 5.0}, lists="all in memory"))
    assert "cache_neighbors" not in of_lists[0]
    for passes, words in ((1, "'packed' packs once"), (2, "fewer passes")):
        assert words in advice_on(stats(hidden=0.2, seconds=seconds, superbatch={"passes": passes}))[0]


def test_what_auto_chose_is_short() -> None:
    estimate = {"strategy": "streamed", "policy": "belady", "epoch_s": 0.5, "parts": {"scan": 0.5}, "impossible": ""}
    auto = {"taken": estimate, "reason": "it is quick", "note": "", "estimates": [estimate], "drive": {"iops": 9e5}}
    lines = repr(LoaderStats(stats(auto=auto))).splitlines()
    at = lines.index("auto")
    assert [line.split() for line in lines[at + 1 : at + 5]] == [
        ["taken", "streamed", "(belady)"],
        ["reason", "it", "is", "quick"],
        ["auto:", "estimates", "policy", "epoch_s"],
        ["streamed", "belady", "0.5", "s"],
    ]
    assert "iops" not in "".join(lines)


@pytest.mark.parametrize("gone", [*stats(), "all"])
def test_stats_of_which_some_were_taken_out(gone: str) -> None:
    found = LoaderStats(stats(), 2)
    assert "→" in repr(found)
    for name in stats() if gone == "all" else [gone]:
        del found[name]
    assert "cannot be shown" not in repr(found)
    assert found._repr_html_().startswith("<div>")
    assert (repr(found) == "{}") == (gone == "all")


def test_every_stage_of_the_guide_has_advice_or_needs_none() -> None:
    stages = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", GUIDE.read_text().split("## Stages")[1], re.MULTILINE)
    names = {name for cell in stages for name in re.findall(r"`(\w+)`", cell)}
    assert {"gather", "sample", "wait"} < names
    for name in names - {"wait", "read", "cache", "presample", "auto", "split"}:
        (found, *_) = advice_on(stats(hidden=0.1, seconds={name: 3.0}))
        assert "bound" in found
        assert "3" in found
    assert set(ADVICE) < names


def test_stats_show_themselves(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        options: dict[str, Any] = {"batch_size": 50, "strategy": featstore.OnDemand(cache="100KB", policy="lru")}
        with featstore.Loader(g, sampler, small.train_idx, **options) as loader:
            assert "No batch was made yet" in repr(loader.stats())
            for _ in loader:
                pass
            found = loader.stats()
            assert isinstance(found, dict)
            assert json.loads(json.dumps(found)) == found
            again = copy.deepcopy(found)
            assert (type(again), again, repr(again)) == (LoaderStats, found, repr(found))
            assert pickle.loads(pickle.dumps(found)) == found
            text = repr(found)
            assert str(found) == text
            share = f"{100 * found['hits']['host'] / found['rows']:.1f} %"
            assert re.search(rf"^  host +{found['hits']['host']:,} +{share}$", text, re.MULTILINE)
            assert f"{found['seconds']['gather']:.3f} s" in text
            assert format_size(found["bytes_read"]) in text
            assert text.splitlines()[-1].startswith("→ ")
            page = found._repr_html_()
            assert page.startswith("<div>")
            assert share in page
            shown = repr(loader)
            assert re.search(rf"^ +made +{found['batches']} batches$", shown, re.MULTILINE)
            assert f"host {share}" in shown
            assert "lru, " in shown
            assert "lru, " in loader._repr_html_()


def test_a_loader_is_shown_in_a_forked_child_whose_locks_stay_taken(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.Loader(g, sampler, small.train_idx, batch_size=50, strategy="ondemand") as loader:
            batches = iter(loader)
            batch = next(batches)
            context = loader._runner.context
            locks = context.counts._lock, context.nodes.reads._lock, context.timer._lock, loader._stages.overlap._lock
            is_held, is_over = threading.Event(), threading.Event()

            def hold() -> None:  # as a thread that counts does at the moment of the fork
                with locks[0], locks[1], locks[2], locks[3], g.budget._lock:
                    is_held.set()
                    is_over.wait()

            def in_child() -> None:
                signal.alarm(20)
                lines = repr(loader).splitlines()
                assert lines[0].endswith("batches of 50, of the parent process)")
                assert lines[1].split()[0] == "sampler"
                assert not any("made" in line for line in lines)
                for shown in (loader, g, g.features["x"], batch, sampler, g.memory_report()):
                    assert shown._repr_html_().startswith("<div>")

            holder = threading.Thread(target=hold)
            holder.start()
            is_held.wait()
            try:
                assert forked(in_child) is None
            finally:
                is_over.set()
                holder.join()
            assert re.search(r"^  made +\d+ batch", repr(loader), re.MULTILINE), "and in the parent it is shown whole"


def test_batches_show_their_tensors(small: SimpleNamespace, tmp_path: Path) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.Loader(g, sampler, small.train_idx, batch_size=50, features=["x", "h"], strategy="ondemand") as loader:
            batch = next(iter(loader))
            lines = repr(batch).splitlines()
            assert lines[0].startswith("MiniBatch(index=")
            shown = {line.split()[0]: line.split()[1:] for line in lines[1:]}
            n = len(batch.input_ids)
            n_bytes = format_size(batch.features["h"].nbytes).split()
            assert shown["features['h']"] == ["float16", f"[{n},", "300]", *n_bytes, "cpu"]
            assert shown["labels['y']"][:2] == ["int64", "[50]"]
            assert shown["blocks[0]"] == [f"{len(batch.blocks[0].src):,}", f"{n:,}", f"{batch.blocks[0].n_dst:,}"]
            assert "labels" in batch._repr_html_()
    with academic().create(tmp_path / "g") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.Loader(g, sampler, ("paper", torch.arange(20)), batch_size=7, strategy="ondemand") as loader:
            shown_batch = repr(next(iter(loader)))
            assert shown_batch.startswith("HeteroMiniBatch(")
            assert "features['x']['paper']" in shown_batch
            assert "blocks[1][('author', 'writes', 'paper')]" in shown_batch


@pytest.mark.shares_resources  # matplotlib keeps its fonts open
def test_a_picture(small: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open(small.path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.Loader(g, sampler, small.train_idx, batch_size=50, strategy="ondemand") as loader:
            loader.plot()  # of nothing yet
            had_pyplot = "matplotlib.pyplot" in sys.modules
            for _ in loader:
                pass
            figure = loader.plot(tmp_path / "stats.png")
            assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")
            assert ("matplotlib.pyplot" in sys.modules) == had_pyplot, "which has a state"
            assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook asks for
            assert len(pickle.loads(pickle.dumps(figure)).axes) == 2
            of_stages, of_tiers = figure.axes
            seconds = loader.stats()["seconds"]
            assert {label.get_text() for label in of_stages.get_yticklabels()} == set(seconds)
            assert [bar.get_width() for bar in of_tiers.patches] == [n for n in loader.stats()["hits"].values() if n]
            with pytest.raises(ValueError, match="must end in one of"):
                loader.plot(tmp_path / "stats.doc")
            with pytest.raises(FileNotFoundError):
                loader.plot(tmp_path / "nowhere" / "stats.png")
            found = builtins.__import__

            def without(name: str, *arguments: Any, **options: Any) -> Any:
                if name.startswith("matplotlib"):
                    raise ImportError("no matplotlib")
                return found(name, *arguments, **options)

            monkeypatch.setattr(builtins, "__import__", without)
            with pytest.raises(MissingExtraError, match=r"pip install"):
                loader.plot()
