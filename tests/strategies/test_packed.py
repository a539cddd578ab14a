"""Frozen packs: the batches of on-demand loading, bit for bit; made whole or not at all; named when stale or damaged."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featstore
from featstore.pack.nodedata import named
from featstore.pack.record import read_record, write_record
from featstore.plan.simulate import simulate
from featstore.plan.trace import Trace
from featstore.testing.faults import forked, sweep
from tests.strategies.test_superbatch import N, dataset, ondemand, same
from tests.support.graphs import make_graph
from tests.support.loaders import make_loader
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses
from tests.support.sampled import one_in

pytestmark = pytest.mark.usefixtures("_program_server")

__all__ = ["dataset", "ondemand"]  # fixtures


@pytest.fixture(scope="module")
def pack(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack") / "p"
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        featstore.sample_offline(g, sampler, g.node_data["train_idx"], 40, epochs=2, path=path, seed=3).close()
    return path


def run(
    dataset: Path, pack: Path, memory: str = "64MB", backend: str = "auto", epochs: int = 2, **options: Any
) -> tuple[list[Any], Any]:
    """Run epochs on any device; copies of batches in the host's memory, in the order of (epoch, index)."""
    device = torch.device(options.get("device", "cpu")).type
    with featstore.open(dataset, memory=memory, backend=backend) as g:
        with make_loader(g, strategy="packed", pack=pack, **{"features": ["x", "z"], "seed": 3, **options}) as loader:
            found = []
            for _ in range(epochs):
                epoch = []
                for batch in loader:
                    assert {t.device.type for t in batch._tensors()} == {device}
                    blocks = [(b.src.to("cpu", copy=True), b.dst.to("cpu", copy=True), b.n_src, b.n_dst) for b in batch.blocks]
                    tensors = [batch.input_ids, batch.seeds, batch.y, batch.x, batch.features["z"]]
                    epoch.append((batch.index, [t.to("cpu", copy=True) for t in tensors], blocks))
                found += [sorted(epoch, key=lambda one: one[0]), [one[0] for one in epoch]]
            stats = loader.stats()
        assert g.budget.peak <= g.budget.total
    return found, stats


@pytest.mark.parametrize("policy", ["belady", "frequency"])
@pytest.mark.parametrize("cache", [0, 0.0004, 0.1, 1.0])
def test_the_same_batches(dataset: Path, pack: Path, ondemand: list[Any], policy: str, cache: float) -> None:
    for backend, prefetch, size in (("io_uring", 2, "auto"), ("pread", 0, 7)):
        options: dict[str, Any] = {"policy": policy, "cache": cache, "prefetch": prefetch}
        if policy == "belady":
            options["length"] = size
        found, stats = run(dataset, pack, backend=backend, **options)
        assert same(found[0] + found[2], ondemand)
        assert stats["hits"]["base"] == 0
        assert stats["hits"]["packed"] + stats["hits"]["host"] == stats["rows"]
        assert {"load", "read", "gather", "pack"} <= stats["seconds"].keys()
        orders = [found[1], found[3]]
        assert sorted(orders[0]) == list(range(25))
        if policy == "frequency" or size == 7:
            assert orders[0] != orders[1]  # shuffled anew
        if policy == "belady" and size == 7:
            starts = [i for i in range(25) if orders[0][i] % 7 == 0]
            assert all(orders[0][i : i + 7] == list(range(orders[0][i], min(orders[0][i] + 7, 25))) for i in starts)
        assert run(dataset, pack, shuffle=False, epochs=1, **options)[0][1] == list(range(25))


def test_loads_are_beladys_and_frequencys(dataset: Path, pack: Path) -> None:
    with featstore.Pack(pack) as opened:
        trace = Trace([opened.ids(i) for i in range(25)], N)
        counts = opened.counts()
    capacity = round(0.1 * N)
    _, stats = run(dataset, pack, epochs=1, cache=0.1, length=25)
    assert stats["rows_loaded"] / 2 == simulate(trace, capacity, "belady").sum()
    _, stats = run(dataset, pack, epochs=1, cache=0.1, length=10)
    parts = [Trace(trace[a:b], N) for a, b in ((0, 10), (10, 20), (20, 25))]
    assert stats["rows_loaded"] / 2 == sum(simulate(part, capacity, "belady").sum() for part in parts)
    _, stats = run(dataset, pack, epochs=1, cache=0.1, policy="frequency")
    hot = np.argsort(-counts, kind="stable")[:capacity]
    assert stats["rows_loaded"] / 2 == sum(len(np.setdiff1d(ids, hot)) for ids in trace) + capacity  # its fill counted


def test_a_loader_lives_as_long_as_its_loop(dataset: Path, pack: Path, tmp_path: Path) -> None:
    """Nobody else holds it, and it closes the pack that it opened."""
    with featstore.open(dataset, memory="64MB") as g:
        options: dict[str, Any] = {"pack": copied(pack, tmp_path), "cache": 0.1, "prefetch": 1}
        indices = []
        for batch in make_loader(g, strategy="packed", **options):
            gc.collect()
            indices.append(batch.index)
        del batch
        assert sorted(indices) == list(range(25))
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("featstore-sample")]


def test_any_static_policy(dataset: Path, pack: Path, ondemand: list[Any]) -> None:
    """A policy that asks for degrees gets the graph's; one that breaks its contract is named."""
    for policy in ("degree", "in_out_ratio", "random"):
        found, stats = run(dataset, pack, policy=policy, cache=0.2, epochs=1)
        assert same(found[0], ondemand[:25])
        assert 0 < stats["hits"]["host"] < stats["rows"]

    class Short(featstore.StaticPolicy):
        name = "short"

        def scores(self, context: featstore.PolicyContext) -> Any:
            return np.zeros(3)

    refuses(featstore.PluginError, "real numbers", lambda: run(dataset, pack, policy=Short, cache=0.2))


def any_graph(data: st.DataObject, path: Path, most_seeds: int) -> tuple[torch.Tensor, np.ndarray, int]:
    """Draw a dataset whose feature ``x`` has any width and dtype; return the bytes of its rows, seeds, and a batch's size."""
    n = data.draw(st.integers(5, 400))
    dtype = data.draw(st.sampled_from(["uint8", "bool", "float16", "bfloat16", "float32", "int64", "float64"]))
    items = data.draw(st.sampled_from([1, 3, 25, 128, 700, 1433]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    kind = getattr(torch, dtype)
    raw = torch.from_numpy(rng.integers(0, 2 if dtype == "bool" else 256, (n, items * kind.itemsize), dtype=np.uint8))
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 6, n))])
    seeds = rng.permutation(n)[: data.draw(st.integers(1, min(n, most_seeds)))]
    size = data.draw(st.integers(1, 12))
    indices = rng.integers(0, n, indptr[-1])
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": raw.view(kind)}, progress=False).close()
    return raw, seeds, size


@settings(max_examples=15)
@given(st.data())
def test_any_width_dtype_and_budget(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    raw, seeds, size = any_graph(data, folder / "g", 40)
    memory = data.draw(st.sampled_from(["40MB", "6MB"]))
    with featstore.open(folder / "g") as g, featstore.open(folder / "g", memory=memory) as tight:
        sampler = featstore.NeighborSampler(g, [3, 2], seed=1)
        with featstore.Loader(g, sampler, seeds, size, labels=None) as loader:
            expected = {batch.index: raw[batch.input_ids] for batch in loader}
        with featstore.sample_offline(g, sampler, seeds, size, path=folder / "p") as pack:
            options: dict[str, Any] = {
                "policy": data.draw(st.sampled_from(["belady", "frequency"])),
                "cache": data.draw(st.sampled_from([1, 0.01, 0.3, 1.0])),
            }
            if options["policy"] == "belady":
                options["length"] = data.draw(st.integers(1, 9))
            if options["cache"] == 1:
                options["cache"] = f"{4 * len(raw) + 8 + raw.shape[1]}B"  # one row
            try:
                with make_loader(tight, strategy="packed", pack=pack, labels=None, **options) as loader:
                    seen = {batch.index: batch.x.clone().view(torch.uint8).reshape(len(batch.x), -1) for batch in loader}
            except featstore.BudgetError:
                assert memory == "6MB"
                return
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[i], expected[i]) for i in seen)


def copied(pack: Path, tmp_path: Path) -> Path:
    """A copy of the pack's samples elsewhere, without its layouts and the labels that were brought with them."""
    target = tmp_path / "copy"
    target.mkdir(parents=True)
    shutil.copy(pack / "samples", target / "samples")
    write_record(str(target / "pack"), "pack", {**read_record(str(pack / "pack"), "pack"), "node_data": {}})
    return target


def test_a_pack_is_copied_reused_and_named_when_stale(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any]) -> None:
    first = copied(pack, tmp_path / "first")
    run(dataset, first, epochs=1)  # it has none: one is made, of the size that the memory gives
    assert len(list(first.glob("layout-*"))) == 1
    mine = copied(pack, tmp_path)
    run(dataset, mine, cache=0.1, epochs=1)
    assert len(list(mine.glob("layout-*"))) == 1
    there = tmp_path / "elsewhere"
    shutil.copytree(mine, there)
    shutil.rmtree(mine)
    found, stats = run(dataset, there)  # the one that it has
    assert same(found[0] + found[2], ondemand)
    assert "pack" not in stats["seconds"]
    other = tmp_path / "other"
    with featstore.open(dataset, memory="64MB") as g:
        arrays = {name: g.features[name][:] for name in g.features}
    rng = np.random.default_rng(0)
    labels = {"y": rng.integers(0, 5, N), "train_idx": np.arange(9)}
    featstore.OutOfCoreGraph.create(other, *make_graph(N, 8.0), arrays, labels, progress=False).close()
    refuses(featstore.StaleError, "another graph", lambda: run(other, there))


def test_arguments(dataset: Path, pack: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"strategy": "packed"}, "^pack: "),
            ({"strategy": "packed", "pack": pack, "sampler": sampler, "seeds": [1]}, "takes no sampler"),
            ({"strategy": "streamed"}, "needs a sampler"),
            ({"strategy": "packed", "pack": pack, "policy": "lru", "cache": 0.1}, "planned policy"),
        ]
        for options, words in wrong:
            refuses(ValueError, words, lambda: make_loader(g, **options))
        refuses(FileNotFoundError, "", lambda: featstore.Loader(g, strategy=featstore.Packed(pack.parent / "none")))
        refuses(featstore.FormatError, "is not a pack", lambda: featstore.Loader(g, strategy=featstore.Packed(dataset)))


def test_disk_budget(dataset: Path, pack: Path, tmp_path: Path) -> None:
    mine = copied(pack, tmp_path)
    for disk in ("1KB", "100KB", "300KB"):
        caught = refuses(OSError, r"disk budget|may be used", lambda: run(dataset, mine, cache=0.01, disk=disk))
        assert caught.value.errno == errno.ENOSPC
        assert sorted(os.listdir(mine)) == ["pack", "samples", "writer.lock"]
    run(dataset, mine, cache=0.01, disk="20MB")
    assert sum(path.stat().st_size for path in mine.rglob("layout-*/*")) <= 20_000_000


def _failing(folder: str, dataset: str, policy: str, disk: str | None, writes_apart: int) -> None:
    mine = Path(folder) / "copy"
    for operation, error, step in (
        ("write", "ENOSPC", writes_apart),
        ("fsync", "EIO", -(-writes_apart // 20)),
        ("rename", "EIO", 1),
    ):
        for fault in sweep(folder, operation, error, step=step):
            with fault:
                try:
                    run(Path(dataset), mine, cache=0.01, epochs=0, policy=policy, disk=disk)
                except OSError:
                    assert fault.fired
            with featstore.Pack(mine) as opened:
                data = [mine / entry["file"] for entry in named(opened).values()]
            assert sorted(mine.glob("data-*")) == [path for path in data if path.exists()]
            for path in data:  # without the record, as the next fault shall find it
                path.unlink(missing_ok=True)
            for path in mine.glob("layout-*"):
                assert not path.name.endswith(".partial")
                shutil.rmtree(path)
            assert sorted(os.listdir(mine)) == ["pack", "samples", "writer.lock"]


SHARING = pytest.mark.parametrize(
    ("policy", "disk"),
    one_in(3, [("frequency", "900KB"), ("belady", None), ("frequency", None)], names=2),
)


@SHARING
@pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.stress)])
def test_a_failing_disk_leaves_nothing(dataset, pack, tmp_path, policy, disk, step) -> None:
    """Every rename fails once, and every sixth flush and 101st write, or every one."""
    (copied(pack, tmp_path) / "writer.lock").touch()
    run_in_fork(_failing, str(tmp_path), str(dataset), policy, disk, step)


def dying_fsync(step: int) -> Callable[[int], None]:
    """``os.fsync``, at whose ``step``-th call the process dies."""
    really, n = os.fsync, 0

    def fsync(fd: int) -> None:
        nonlocal n
        n += 1
        if n == step:
            os.kill(os.getpid(), signal.SIGKILL)
        really(fd)

    return fsync


def die_at_each(make: Callable[[str, int], None], pack: str, folder: str, steps: Sequence[int]) -> None:
    """Make copies of a pack, in forks that die at one step each, until one comes to its end; in the child."""
    for step in steps:
        mine = copied(Path(pack), Path(folder) / str(step))
        if forked(lambda: make(str(mine), step)) is None:
            shutil.rmtree(mine)
            return
    raise AssertionError("no run reached its end")


def killed(make: Callable[..., None], pack: Path, folder: Path, steps: range, *arguments: Any) -> list[Path]:
    """Return copies of a pack whose maker died at a durable moment, one for each of ``steps`` up to that where one did not.

    ``make(pack, folder, steps, *arguments)`` calls :func:`die_at_each`; all makers are forks of one child.
    """
    run_in_fork(make, str(pack), str(folder), [*steps], *arguments)
    return [mine for step in steps if (mine := folder / str(step) / "copy").exists()]


def _killed(pack: str, folder: str, steps: list[int], dataset: str, policy: str, disk: str | None) -> None:
    """Die at a durable moment of packing, in memory that takes several episodes."""

    def make(mine: str, step: int) -> None:
        os.fsync = dying_fsync(step)
        run(Path(dataset), Path(mine), memory="3MB", cache=0.01, epochs=0, policy=policy, disk=disk)

    die_at_each(make, pack, folder, steps)


@SHARING
def test_killed_at_every_durable_moment(dataset, pack, tmp_path, ondemand, policy, disk) -> None:
    """A killed maker is followed by one that goes on; what it makes is what an undisturbed one makes."""
    resumed = 0
    for mine in killed(_killed, pack, tmp_path, range(1, 50, 5), str(dataset), policy, disk):
        kept = [*mine.glob("layout-*.partial/*.progress"), *mine.glob("layout-*.partial/done.?")]
        before = {path.name: path.read_bytes() for path in mine.glob("layout-*.partial/done.?")}
        resumed += bool(kept)
        found, stats = run(dataset, mine, memory="3MB", cache=0.01, policy=policy, disk=disk)
        assert ("disk_cache" in stats["hits"]) == (disk is not None)
        assert same(found[0] + found[2], ondemand), mine
        assert all(next(mine.glob(f"layout-*/{name}")).read_bytes() == data for name, data in before.items())
        assert not list(mine.glob("layout-*/*.progress*"))
        assert not list(mine.glob("*.partial"))
    assert resumed > 1


def test_a_pack_in_place_of_the_dataset(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any]) -> None:
    """Copied to where nothing else is: the same batches, from files of the pack alone."""
    mine = copied(pack, tmp_path)
    refuses(featstore.FormatError, "no layout", lambda: featstore.PackedGraph(mine))
    for policy in ("belady", "frequency"):
        run(dataset, mine, cache=0.1, epochs=0, policy=policy)
    there = tmp_path / "elsewhere"
    shutil.move(mine, there)
    (there / "writer.lock").unlink()
    for backend in ("io_uring", "pread"):
        with featstore.PackedGraph(there, memory="64MB", backend=backend) as g:
            assert sorted(g.features) == ["x", "z"]
            assert list(g.node_data) == ["y"]
            assert g.features["x"].shape == (N, 33)
            refuses(FileNotFoundError, "not in the pack", lambda: g.features["x"][[1]])
            with pytest.raises(AttributeError, match="topology"):
                _ = g.topology
            for policy in ("belady", "frequency"):
                with featstore.Loader(g, features=["x", "z"], strategy=featstore.Packed(policy=policy)) as loader:
                    found = {(epoch, batch.index): batch for epoch in range(2) for batch in loader}
                for number, (index, tensors, blocks) in enumerate(ondemand):
                    batch = found[number // 25, index]
                    assert torch.equal(batch.input_ids, tensors[0])
                    assert torch.equal(batch.x, tensors[3])
                    assert torch.equal(batch.features["z"], tensors[4])
                    assert torch.equal(batch.y, tensors[2])
                    assert all(torch.equal(b.src, other[0]) for b, other in zip(batch.blocks, blocks, strict=True))
                del found, batch
            refuses(OSError, "not in the pack", lambda: featstore.Loader(g, features=["x"], strategy=featstore.Packed(cache=0.2)))
        assert g.budget.used == 0
    assert len(list(there.glob("layout-*"))) == 2


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("policy", ["belady", "frequency"])
def test_memory_for_reading_ahead_is_given_to_batches(tmp_path: Path, policy: str, prefetch: int) -> None:
    n, data = 1500, {"train_idx": np.arange(0, 1500, 2)}
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((n, 300)).astype(np.float32))
    features = {"x": x.numpy(), "z": x[:, :9].numpy()}
    featstore.OutOfCoreGraph.create(tmp_path / "g", *make_graph(n, 8.0), features, data, progress=False).close()
    with featstore.open(tmp_path / "g", memory="40MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        featstore.sample_offline(g, sampler, g.node_data["train_idx"], 30, path=tmp_path / "p", progress=False).close()
        options: dict[str, Any] = {"policy": policy, "cache": 0.05, "prefetch": prefetch, "features": ["x", "z"]}
        with make_loader(g, strategy="packed", pack=tmp_path / "p", labels=None, disk="100MB", **options) as loader:
            sum(1 for _ in loader)
            before = loader.stats()
            window = g.memory_report()["extents read ahead"]
            batches, held, n_batches = iter(loader), [], 0
            g.pool.trim()
            with g.budget.reserve("somebody else", g.budget.available):
                for batch in batches:
                    assert torch.equal(batch.x, x[batch.input_ids])
                    assert torch.equal(batch.features["z"], x[batch.input_ids, :9])
                    n_batches += 1
                    if g.memory_report()["extents read ahead"] == window:
                        held.append(batch)  # until no memory is left but that for reading ahead
                    else:
                        held.clear()
                del batch
            assert n_batches == len(loader)
            assert g.memory_report()["extents read ahead"] == 2 * 8192 < window  # of two features
            after = loader.stats()
            once = before["rows_loaded"] - after["rows_loaded"] + before["rows_loaded"]
            assert once == (75 * 2 if policy == "frequency" else 0)  # a static tier is filled by the first epoch alone
            assert after["bytes_read"] > before["bytes_read"]
            for batch in loader:  # the next epoch, too
                assert torch.equal(batch.x, x[batch.input_ids])


def test_an_epoch_beside_another_one_with_rows_on_the_device(tmp_path: Path) -> None:
    """Epochs that read on demand, while another one follows the plans, take all rows from the host."""
    rng = np.random.default_rng(0)
    x, pairs = rng.standard_normal((600, 8)).astype(np.float32), rng.integers(0, 600, (2, 6000))
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", pairs, 600, features={"x": x}) as g:
        sampler = featstore.NeighborSampler(g, [4, 3])
        featstore.sample_offline(g, sampler, np.arange(300), 50, path=tmp_path / "p", progress=False).close()
        for policy in ("belady", "degree"):
            options = {"strategy": featstore.Packed(tmp_path / "p", cache=0.1, policy=policy), "device_cache": 0.1}
            with featstore.Loader(g, features="x", labels=None, **options) as loader:
                for one, other in zip(loader, loader, strict=True):
                    for batch in (one, other):
                        assert np.array_equal(batch.x.numpy(), x[batch.input_ids.numpy()])
