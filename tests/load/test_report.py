"""What loaders and batches show: statistics with advice, tables of a batch, a picture."""

from __future__ import annotations

import builtins
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import featstore
from featstore.config import format_size
from featstore.errors import MissingExtraError
from featstore.load.report import ADVICE, LoaderStats, advice_on
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
        ({"hidden": 0.2, "superbatch": {"batches": 3, "of": 9}}, 2, "Reading rows bounds", ["more memory="]),
        (
            {"hidden": 0.2, "seconds": {"sample": 1.0, "gather": 2.0, "read": 0.3}},
            2,
            "Copying rows that are in memory",
            ["float16"],
        ),
        ({"hidden": 0.2, "seconds": {"sample": 5.0, "gather": 2.0}}, 2, "Sampling bounds", ["cache_neighbors", "EpochSampler"]),
        ({"hidden": 0.2, "seconds": {"transfer": 5.0, "wait": 9.0}}, 2, "Copies to the device", ["device_cache="]),
        ({"hidden": 0.2, "seconds": {"mine": 5.0}}, 2, "mine bounds", []),
        ({"hidden": 0.2, "bytes_read": 9000}, 2, "Reading", ["9.0 times", "'streamed' or 'packed'"]),
        ({"prefetch": 1}, 2, "The loop", ["1 batches are made ahead, not 2"]),
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
            again = pickle.loads(pickle.dumps(found))
            assert (type(again), again, repr(again)) == (LoaderStats, found, repr(found))
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
            for _ in loader:
                pass
            figure = loader.plot(tmp_path / "stats.png")
            assert (tmp_path / "stats.png").read_bytes().startswith(b"\x89PNG")
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
