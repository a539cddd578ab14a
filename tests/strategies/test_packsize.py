"""The size of a pack on disk is estimated and said before it is written, and refused where the drive cannot hold it."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.config import format_size
from featstore.errors import BudgetError
from featstore.plan.samples import SampleWriter, sample_bytes
from featstore.sampling.batch import Block, HistoryRows, NodeCopies, SampledBatch
from featstore.storage.writer import free_bytes
from featstore.strategies.packed import Packed
from featstore.strategies.packsize import PackEstimate, estimate_layout, estimate_pack
from tests.support.graphs import skewed_dataset
from tests.support.loaders import make_loader, strategy_of
from tests.support.refusing import refuses

N = 6000
SAMPLING = ["--fanouts", "5,3", "--batch-size", "50"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("of") / "g", N, 64, narrow=5)


def sampler_of(g: Any) -> featstore.NeighborSampler:
    return featstore.NeighborSampler(g, [5, 3], seed=1)


def size(pack: Path, *patterns: str) -> int:
    return sum(path.stat().st_size for pattern in patterns for path in pack.glob(pattern) if path.is_file())


def asked(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an estimate that flat options of a loader come to."""
    rest = {"cache": 0.1, **options, "strategy": "packed"}
    return {"packed": strategy_of(rest), **rest}


@pytest.mark.parametrize(
    ("options", "n_batches"),
    [
        ({}, 3),
        ({"cache": 0.3}, 40),
        ({"cache": "2%", "length": 10}, 40),
        ({"features": ["x", "z"]}, 3),
        ({"policy": "frequency"}, 40),
        ({"policy": "degree", "features": ["x", "z"]}, 40),
        ({"policy": "random"}, 3),
        ({"policy": "frequency", "device_cache": "5%"}, 3),
        ({"device_cache": 0.05}, 40),
        ({"cache": 0}, 3),
    ],
)
def test_an_estimate_is_about_what_is_written(data: Path, tmp_path: Path, options: dict[str, Any], n_batches: int) -> None:
    with featstore.open(data, memory="64MB") as g:
        seeds = g.node_data["train_idx"]
        batch_size = -(-len(seeds) // n_batches)
        estimate = estimate_pack(g, sampler_of(g), seeds, batch_size, 2, tmp_path / "p", labels="y", **asked(options))
        assert not os.listdir(tmp_path)
        with featstore.sample_offline(g, sampler_of(g), seeds, batch_size, 2, tmp_path / "p", progress=False) as pack:
            again = estimate_layout(g, pack, labels="y", **asked(options))
            make_loader(g, strategy="packed", pack=pack, **{"cache": 0.1, **options}).close()
            assert estimate_layout(g, pack, labels="y", **asked(options)).total_bytes == 0  # it is there
    assert estimate.n_batches == again.n_batches == 2 * n_batches
    assert estimate.n_looked_at == again.n_looked_at == min(n_batches, 8)
    assert 0.9 < estimate.samples_bytes / size(tmp_path / "p", "pack", "samples") < 1.1
    assert again.samples_bytes == 0
    for each in (estimate, again):
        assert 0.75 < each.layout_bytes / size(tmp_path / "p", "layout-*/*") < 1.35
        assert size(tmp_path / "p", "data-*") <= each.node_data_bytes < size(tmp_path / "p", "data-*") + 5000
    assert estimate.free_bytes == pytest.approx(free_bytes(str(tmp_path)), rel=0.5)


def test_bytes_of_samples_are_those_of_the_file(tmp_path: Path) -> None:
    src, dst = torch.tensor([2, 0, 3]), torch.tensor([0, 1, 2])
    history = HistoryRows(4, *(torch.arange(n) for n in (1, 1, 2, 2)))
    copies = NodeCopies(torch.tensor([0, 1, 2, 3, 3]), torch.tensor([0, 1, 2, 0, 2]))
    edges = [((), None, None), ((torch.arange(3),), None, None), ((None, torch.rand(3)), history, None)]
    edges += [((torch.arange(3), torch.rand(3).double()), None, copies), ((), history, copies)]
    for number, (arrays, *more) in enumerate(edges):
        n_src = 4 if more[1] is None else 5
        batch = SampledBatch(0, 0, torch.tensor([5, 7, 9, 3]), 3, (Block(src, dst, n_src, 3, *arrays),), *more)
        for num_nodes in (10, 2**31):
            path = tmp_path / f"{num_nodes} {number}"
            with SampleWriter(path, num_nodes) as writer:
                for _ in range(3):
                    writer.add(batch)
                writer.finish().close()
            assert path.stat().st_size == 3 * sample_bytes(batch, num_nodes) + 96


def test_what_cannot_be_estimated(data: Path, tmp_path: Path) -> None:
    with featstore.open(data, memory="64MB") as g:
        seeds = g.node_data["train_idx"]
        batch = sampler_of(g).sample(seeds[:5])
        refuses(ValueError, "list has seeds of its own", lambda: estimate_pack(g, [batch], seeds, 50))
        refuses(BudgetError, "one row", lambda: estimate_pack(g, sampler_of(g), seeds, 50, packed=Packed(cache="10B")))
        refuses(ValueError, "has no unit", lambda: estimate_pack(g, sampler_of(g), seeds, 50, packed=Packed(cache="0.1")))
        assert estimate_pack(g, sampler_of(g), seeds[:0], 50).total_bytes < 5000
        held = g.budget.reserve("others", g.budget.available - 320_000)
        with held:
            estimate = estimate_pack(g, sampler_of(g), seeds, 50, packed=Packed(cache=0.01))
        assert estimate.layout_bytes is None
        assert estimate.samples_bytes > 0
        assert "a layout of unknown size" in str(estimate)


def test_memory_that_is_short_shortens_the_look(data: Path) -> None:
    with featstore.open(data, memory="64MB") as g:
        seeds = g.node_data["train_idx"]
        whole = estimate_pack(g, sampler_of(g), seeds, 50, packed=Packed(cache=0))
        used = g.budget.used
        longest = len(sampler_of(g).sample(seeds[:50]).input_ids)

        class Sampler:
            """Leaves room for three batches."""

            n = 0

            def sample(self, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
                if self.n == 3:
                    self.held = g.budget.reserve("others", g.budget.available - 4 * longest)
                self.n += 1
                return sampler_of(g).sample(seeds, epoch=epoch, index=index)

        sampler = Sampler()
        short = estimate_pack(g, sampler, seeds, 50, packed=Packed(cache=0))
        sampler.held.release()
        assert short.n_looked_at == 3 < whole.n_looked_at
        assert short.samples_bytes == pytest.approx(whole.samples_bytes, rel=0.1)
        assert g.budget.used == used


def estimate_of(total: int, free: int | None) -> PackEstimate:
    return PackEstimate("p", total // 4, total - total // 4, 0, 100, 10, 8, free)


def test_what_cannot_fit_is_refused() -> None:
    for total, free, fits in ((1000, 1000, True), (1000, 500, True), (1000, 499, False), (1000, None, True), (1000, 0, False)):
        estimate = estimate_of(total, free)
        assert estimate.fits is fits
        if fits:
            estimate.check()
        else:
            caught = refuses(OSError, r"needs about 1000 B \(250 B of samples, 750 B of layout\), and .* free", estimate.check)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "p")
    assert "which may not suffice" in str(estimate_of(1000, 900))
    assert "suffice" not in str(estimate_of(1000, 1000))


def test_a_planned_layout_beyond_its_disk_is_refused() -> None:
    """One of a static policy is made to fit; even half of the estimate must be too much."""
    for allowed, fits in ((None, True), (750, True), (375, True), (374, False), (0, False)):
        estimate = replace(estimate_of(1000, None), allowed_bytes=allowed)
        assert estimate.fits is fits
        assert ("may be used" in str(estimate)) == (allowed is not None)
        if fits:
            estimate.check()
        else:
            with pytest.raises(
                OSError, match=r"needs about 750 B, and .* may be used: .* static policy such as 'frequency'"
            ) as caught:
                estimate.check()
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "p")


def no_sampling(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("sampling began")


def test_the_command_refuses_a_planned_layout_beyond_its_disk(data, tmp_path, capsys, monkeypatch) -> None:
    command = ["pack", str(data), str(tmp_path / "p"), *SAMPLING]
    monkeypatch.setattr("featstore.cli.pack.sample_offline", no_sampling)
    for more, is_refused in (
        (["--disk", "0.1x"], True),
        (["--disk", "90x"], False),
        (["--disk", "0.1x", "--policy", "frequency"], False),
    ):
        if is_refused:
            assert main([*command, *more]) == 2
            assert "a static policy such as 'frequency', whose batches share rows" in capsys.readouterr().err
        else:
            refuses(ZeroDivisionError, "sampling began", lambda: main([*command, *more]))
    assert not (tmp_path / "p").exists()


def test_the_command_says_it_before_it_samples(data, tmp_path, capsys, monkeypatch) -> None:
    pack = tmp_path / "p"
    for quiet in ([], ["--json"]):
        with monkeypatch.context() as patched:
            patched.setattr("featstore.cli.pack.sample_offline", no_sampling)
            refuses(ZeroDivisionError, "sampling began", lambda: main(["pack", str(data), str(pack), *SAMPLING, *quiet]))
        captured = capsys.readouterr()
        said = captured.err if quiet else captured.out
        assert said.count("\n") == 1
        assert said.startswith(f"{pack}: will write about ")
        for text in ("of samples", "of layout", "of labels", f"for {format_size(N * 256)} of features", "free on the drive"):
            assert text in said
    assert main(["pack", str(data), str(pack), *SAMPLING, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"]["total_bytes"] == pytest.approx(found["disk_bytes"], rel=0.3)
    assert main(["pack", str(data), str(pack), "--add-layout", "--policy", "frequency"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith(f"{pack}: will write about ")
    assert "of samples" not in said


@pytest.mark.parametrize("quiet", [[], ["--json"]])
def test_a_drive_that_is_too_full_is_refused_before_any_work(data, tmp_path, capsys, monkeypatch, quiet) -> None:
    monkeypatch.setattr("featstore.strategies.packsize.free_bytes", lambda path: 100_000)
    assert main(["pack", str(data), str(tmp_path / "p"), *SAMPLING, *quiet]) == 2
    captured = capsys.readouterr()
    error = captured.err.splitlines()[-1]
    assert error.startswith(f"featstore: {tmp_path / 'p'}: the pack needs about ")
    assert f"{format_size(100_000)} are free on the drive: make room" in error
    assert not os.listdir(tmp_path)
    monkeypatch.undo()
    assert main(["pack", str(data), str(tmp_path / "p"), *SAMPLING]) == 0
    before = sorted(os.listdir(tmp_path / "p"))
    monkeypatch.setattr("featstore.strategies.packsize.free_bytes", lambda path: 100_000)
    adding = ["--add-layout", "--policy", "frequency"]
    assert main(["pack", str(data), str(tmp_path / "p"), *adding, *quiet]) == 2
    assert "the pack needs about" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "p")) == before


def test_a_layout_that_the_drive_cannot_hold_is_refused_before_copying(data, tmp_path, monkeypatch) -> None:
    """Its tables tell its size is known to the byte; what is there stays as it is."""

    def copying(*_: Any, **__: Any) -> Any:
        raise AssertionError("copying began")

    with featstore.open(data, memory="64MB") as g:
        with featstore.sample_offline(
            g, sampler_of(g), g.node_data["train_idx"], 50, path=tmp_path / "p", progress=False
        ) as pack:
            before = sorted(os.listdir(tmp_path / "p"))
            options: dict[str, Any] = {"strategy": "packed", "pack": pack, "cache": 0.1}
            with monkeypatch.context() as patched:
                patched.setattr("featstore.pack.makelayout.free_bytes", lambda path: 500_000)
                patched.setattr("featstore.pack.makelayout.fill_extents", copying)
                with pytest.raises(OSError, match=r"the layout takes .* more, and 488.28 KiB are free") as caught:
                    make_loader(g, **options)
            assert caught.value.errno == errno.ENOSPC
            assert sorted({*os.listdir(tmp_path / "p")} - {"writer.lock"}) == [name for name in before if name != "writer.lock"]
            make_loader(g, **options).close()
            needed = size(tmp_path / "p", "layout-*/extents*")
        with featstore.sample_offline(
            g, sampler_of(g), g.node_data["train_idx"], 50, path=tmp_path / "q", progress=False
        ) as pack:
            monkeypatch.setattr("featstore.pack.makelayout.free_bytes", lambda path: needed + 100_000)
            featstore.Loader(g, strategy=featstore.Packed(pack, cache=0.1)).close()
