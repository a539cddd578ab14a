"""Making layouts: of the pack that is there, by one process at a time, once."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cache.belady import Belady
from featstore.pack import makelayout
from featstore.pack.fingerprint import digest_of
from featstore.pack.record import read_record, write_record
from featstore.storage.lock import WRITER_LOCK, FileLock
from tests.pack.test_tiers import layout_bytes, least_in
from tests.storage.test_checkpoint import often
from tests.strategies.test_packed import copied, die_at_each, dying_fsync, killed, pack, run
from tests.strategies.test_superbatch import N, dataset, ondemand, same
from tests.support.loaders import make_loader
from tests.support.refusing import refuses
from tests.support.sampled import covering, one_in

__all__ = ["dataset", "ondemand", "pack"]  # fixtures


def offline(g: featstore.OutOfCoreGraph, path: Path, **options: Any) -> featstore.Pack:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    return featstore.sample_offline(g, sampler, g.node_data["train_idx"], 40, path=path, **options)


def test_an_old_pack_does_not_spoil_one_made_in_its_place(dataset: Path, tmp_path: Path) -> None:
    path = tmp_path / "p"
    with featstore.open(dataset, memory="64MB") as g, offline(g, path) as old:
        offline(g, path, overwrite=True, seed=1).close()
        options: dict[str, Any] = {"strategy": "packed", "features": "x", "cache": 0.1}
        refuses(featstore.StaleError, r"open the new one with featstore\.Pack", lambda: make_loader(g, pack=old, **options))
        assert not list(path.glob("layout-*"))
        x = g.features["x"][:]
        with make_loader(g, pack=path, **options) as loader:
            assert all((batch.x == x[batch.input_ids]).all() for batch in loader)
        for size in (0.1, None):  # the layout is there
            with pytest.raises(featstore.StaleError, match="open the new one"):
                make_loader(g, pack=old, **{**options, "cache": size})


def _replace(dataset: str, path: str, held: Any) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        inner = featstore.NeighborSampler(g, [4, 3], seed=1)

        def sampler(seeds: Any) -> Any:
            if not held.is_set():
                held.set()
                time.sleep(0.5)
            return inner.sample(seeds)

        featstore.sample_offline(g, sampler, np.arange(40), 40, path=path, overwrite=True).close()


@pytest.mark.usefixtures("_program_server")
@pytest.mark.shares_resources  # the resource tracker of multiprocessing, which stays
def test_a_pack_that_is_replaced_while_it_is_waited_for(dataset: Path, tmp_path: Path) -> None:
    """The lock that is granted then is the old directory's."""
    context = multiprocessing.get_context("forkserver")
    path, held = tmp_path / "p", context.Event()
    with featstore.open(dataset, memory="64MB") as g, offline(g, path) as old:
        process = context.Process(target=_replace, args=(str(dataset), str(path), held))
        process.start()
        assert held.wait(240)
        with pytest.raises(featstore.StaleError, match="open the new one"):
            featstore.Loader(g, features="x", strategy=featstore.Packed(old, cache=0.1))
        process.join(240)
        assert process.exitcode == 0
        process.close()
        assert not list(path.glob("layout-*"))


def _train(dataset: str, pack: str, barrier: Any, found: Any) -> None:
    barrier.wait(240)
    batches, stats = run(Path(dataset), Path(pack), cache=0.1)
    found.put((os.getpid(), stats["seconds"].get("pack"), [one[1][3].sum().item() for one in batches[0] + batches[2]]))


@pytest.mark.usefixtures("_program_server")
@pytest.mark.shares_resources  # the resource tracker of multiprocessing, which stays
def test_two_processes_make_one_layout(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any]) -> None:
    """The second waits for the first, and takes what it made: ranks of one training all start."""
    mine = copied(pack, tmp_path)
    context = multiprocessing.get_context("forkserver")
    barrier, found = context.Barrier(3), context.Queue()
    ranks = [context.Process(target=_train, args=(str(dataset), str(mine), barrier, found)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    lock = FileLock(mine / WRITER_LOCK, exclusive=True)  # both find a maker at work
    barrier.wait(240)
    time.sleep(1.5)
    assert not list(mine.glob("layout-*"))
    lock.release()
    results = [found.get(timeout=240) for _ in ranks]
    for rank in ranks:
        rank.join(240)
        assert rank.exitcode == 0
    assert len(list(mine.glob("layout-*"))) == 1
    assert results[0][2] == results[1][2]
    inodes = [path.stat().st_ino for path in sorted(mine.glob("layout-*/*"))]
    batches, _ = run(dataset, mine, cache=0.1)
    assert same(batches[0] + batches[2], ondemand)
    assert [path.stat().st_ino for path in sorted(mine.glob("layout-*/*"))] == inodes


def test_what_is_carried_is_there_whoever_made_the_layout(dataset, pack, tmp_path, monkeypatch) -> None:
    """Others make it while this call waits for them, without the labels that this one is to bring along."""
    mine, locked = copied(pack, tmp_path), makelayout._locked

    def locked_later(*arguments: Any) -> FileLock:
        with monkeypatch.context() as patch:
            patch.setattr(makelayout, "_locked", locked)
            run(dataset, mine, cache=0.1, labels=None, epochs=0)
        assert not list(mine.glob("data-*"))
        return locked(*arguments)

    monkeypatch.setattr(makelayout, "_locked", locked_later)
    _, stats = run(dataset, mine, cache=0.1)
    assert stats["layout"]["made"] is False
    assert len(list(mine.glob("data-*"))) == 1


def test_waiting_is_said_and_interruptible(dataset, pack, tmp_path, monkeypatch, capsys) -> None:
    mine = copied(pack, tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("featstore.pack.makelayout.PATIENCE_S", 0.05)
    naps, sleep = [0], time.sleep

    def interrupted(seconds: float) -> None:
        naps[0] += 1
        if naps[0] == 40:
            raise KeyboardInterrupt
        sleep(seconds)

    with FileLock(mine / WRITER_LOCK, exclusive=True), monkeypatch.context() as patched:
        patched.setattr("time.sleep", interrupted)
        refuses(KeyboardInterrupt, "", lambda: run(dataset, mine, cache=0.1, epochs=0))
    assert capsys.readouterr().err.count("waiting for it") == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, None])
def test_a_layout_in_a_pack_that_cannot_be_written(dataset, pack, tmp_path, ondemand, monkeypatch, code) -> None:
    """It runs, labels and all; only copies of it do not have them. ``None``: others are writing it."""
    mine = copied(pack, tmp_path)
    with featstore.open(dataset, memory="64MB") as g:
        options: dict[str, Any] = {"strategy": "packed", "pack": mine, "features": ["x", "z"], "cache": 0.1}
        make_loader(g, labels=None, **options).close()
    before = sorted(os.listdir(mine))
    really = os.open

    def refused(path: Any, flags: int, *rest: Any, **others: Any) -> int:
        if str(path).startswith(str(mine)) and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            assert code is not None
            raise OSError(code, os.strerror(code), str(path))
        return really(path, flags, *rest, **others)

    with monkeypatch.context() as patched:
        lock = None
        if code is None:
            lock = FileLock(mine / WRITER_LOCK, exclusive=True)
        else:
            patched.setattr("os.open", refused)
        batches, _ = run(dataset, mine, cache=0.1)
        assert same(batches[0] + batches[2], ondemand)
        if code is not None:
            refuses(OSError, os.strerror(code), lambda: run(dataset, mine, cache=0.2))
        if lock is not None:
            lock.release()
    assert sorted(os.listdir(mine)) == before
    run(dataset, mine, cache=0.1)
    assert len(os.listdir(mine)) == len(before) + 1  # carried now


class Scored(featstore.StaticPolicy):
    name = "mine"

    def __init__(self, scores: Any) -> None:
        self._scores = scores

    def scores(self, context: featstore.PolicyContext) -> Any:
        return self._scores() if callable(self._scores) else self._scores


class ByDegree(featstore.StaticPolicy):
    def scores(self, context: featstore.PolicyContext) -> Any:
        return context.out_degree


def test_other_scores_are_another_layout(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any]) -> None:
    mine = copied(pack, tmp_path)
    hits = []
    for number, scores in enumerate((np.arange(N), -np.arange(N), np.arange(N))):
        found, stats = run(dataset, mine, policy=Scored(scores), cache=0.1)
        assert same(found[0] + found[2], ondemand)
        assert len(list(mine.glob("layout-*"))) == min(2, number + 1)
        hits.append(stats["hits"])
    assert hits[0] == hits[2] != hits[1]
    assert run(dataset, mine, policy=Scored(-np.arange(N)))[1]["hits"] == hits[1]  # the one that is there
    assert run(dataset, mine, policy=Scored(np.arange(N)))[1]["hits"] == hits[0]
    with pytest.raises(ValueError, match=r"0 layouts of .* with policy 'mine' that decides as this one"):
        run(dataset, mine, policy=Scored(np.ones(N)))
    rng = np.random.default_rng(1)
    with pytest.raises(featstore.PluginError, match="other scores"):
        run(dataset, mine, policy=Scored(lambda: rng.random(N)), cache=0.1)
    run(dataset, mine, policy=ByDegree, cache=0.1, epochs=0)
    assert len(list(mine.glob("layout-*"))) == 3
    with featstore.PackedGraph(mine, memory="64MB") as there:  # by its scores, where they are known; else by its name
        for policy, size in ((Scored(np.arange(N)), None), (Scored(np.arange(N)), 0.1), (ByDegree, None), (ByDegree, 0.1)):
            options: dict[str, Any] = {"strategy": "packed", "policy": policy, "features": ["x", "z"], "cache": size}
            with make_loader(there, **options) as loader:
                assert len(list(loader)) == 25
        with pytest.raises(OSError, match="degrees are not in the pack"):
            featstore.Loader(there, features=["x", "z"], strategy=featstore.Packed(policy=ByDegree, cache=0.3))


class Planned(Belady):
    """Belady's choices."""

    depth = 1

    def __init__(self, weights: Any = ()) -> None:
        super().__init__()
        self.weights = weights


def test_planned_policies_are_told_by_class_and_public_attributes() -> None:
    def digest(policy: featstore.PlannedPolicy) -> str:
        return digest_of(policy, lambda policy: np.empty(0))

    class Other(Planned):
        depth = 2

    first = Planned(np.arange(3))
    digests = [digest(each) for each in (first, Planned([0, 1]), Planned(np.arange(4)), Planned(np.arange(3.0)), Other())]
    assert len(set(digests)) == 5
    assert digest(Planned(np.arange(3))) == digests[0] != ""
    first.start(5, featstore.PolicyContext(10, 1))
    assert digest(first) == digests[0]
    assert digest(Belady()) == ""


class Interrupt:
    """Makes the ``n``-th filling of a feature's extents end in an error after an episode, or right away."""

    def __init__(self, patched: pytest.MonkeyPatch, n: int, error: BaseException, *, begin: bool = False) -> None:
        really, self.calls = makelayout.fill_extents, 0

        def fill(*arguments: Any, **options: Any) -> None:
            self.calls += 1

            def done(end: int) -> None:
                raise error

            if self.calls == n and begin:
                raise error
            really(*arguments, **options, **({"done": done} if self.calls == n else {}))

        patched.setattr(makelayout, "fill_extents", fill)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


OTHER = [KeyboardInterrupt(), featstore.BudgetError("too little"), SystemExit(1)]


@pytest.mark.parametrize(("error", "begin"), covering(OTHER, [True, False]))
def test_an_interrupted_layout_is_gone_on_with(dataset, pack, tmp_path, ondemand, error, begin) -> None:
    """After a whole feature, or after an episode of the first; twice."""
    mine = copied(pack, tmp_path)
    options: dict[str, Any] = {"memory": "3MB", "cache": 0.01}
    before: dict[str, tuple[int, int]] = {}
    for attempt in range(2):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(type(error)):
            Interrupt(patched, 2 if begin and not attempt else 1, error, begin=begin)
            run(dataset, mine, epochs=0, **options)
        folder = next(mine.glob("layout-*.partial"))
        there = files_of(folder)
        assert ("done.0" in there) == begin
        assert ("extents.0.rows.progress" in there) != begin
        run(dataset, mine, epochs=0, **{**options, "cache": 0.02})  # another, which leaves this one alone
        assert files_of(folder) == there
        before = before or there
        kept = ("plan", "done.0", "extents.0.rows") if begin else ("plan",)
        assert all(there[name] == before[name] for name in kept)
    found, _ = run(dataset, mine, **options)
    assert same(found[0] + found[2], ondemand)
    assert not list(mine.glob("*.partial"))
    finished = next(path for path in mine.glob("layout-*") if path.name + ".partial" == folder.name)
    assert all(files_of(finished)[name] == before[name] for name in kept)


def test_errors_of_the_disk_leave_nothing_of_an_interrupted_layout(dataset, pack, tmp_path, ondemand) -> None:
    for number, error in enumerate((OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "failed"))):
        mine = copied(pack, tmp_path / str(number))
        before = sorted(os.listdir(mine))
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            Interrupt(patched, 2, KeyboardInterrupt(), begin=True)
            run(dataset, mine, epochs=0, cache=0.01)
        assert list(mine.glob("layout-*.partial/done.0"))
        with pytest.MonkeyPatch.context() as patched:
            Interrupt(patched, 1, error, begin=True)
            if error.errno == errno.EIO:
                refuses(OSError, "failed", lambda: run(dataset, mine, epochs=0, cache=0.01))
                assert sorted(os.listdir(mine)) == [*before, WRITER_LOCK]
            else:  # what was there was in the way
                assert same(run(dataset, mine, epochs=1, cache=0.01)[0][0], ondemand[:25])


def test_a_layout_is_gone_on_with_on_a_smaller_disk(dataset: Path, pack: Path, tmp_path: Path, ondemand: list[Any]) -> None:
    """The layout that the first maker had begun does not fit any more; one whose segments share rows does."""
    mine = copied(pack, tmp_path)
    options: dict[str, Any] = {"cache": 0.02, "policy": "frequency"}
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        Interrupt(patched, 2, KeyboardInterrupt(), begin=True)
        run(dataset, mine, epochs=0, **options)
    found, stats = run(dataset, mine, disk="2.5x", **options)
    assert same(found[0] + found[2], ondemand)
    assert stats["hits"]["disk_cache"] > 0
    assert sum(path.stat().st_size for path in mine.glob("layout-*/*")) < 2.5 * N * (33 * 4 + 7)
    assert not list(mine.glob("*.partial"))


def test_a_partial_layout_of_other_rows_is_not_gone_on_with(dataset, pack, tmp_path, ondemand) -> None:
    mine = copied(pack, tmp_path)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        Interrupt(patched, 2, KeyboardInterrupt(), begin=True)
        run(dataset, mine, epochs=0, cache=0.01)
    folder = next(mine.glob("layout-*.partial"))
    record = read_record(str(folder / "begun"), "begun")
    record["features"]["x"][0] = "0" * 32
    (folder / "begun").unlink()
    write_record(str(folder / "begun"), "begun", record)
    (folder / "extents.0.rows").write_bytes(b"of an earlier feature")
    found, _ = run(dataset, mine, cache=0.01)
    assert same(found[0] + found[2], ondemand)


@pytest.mark.parametrize("policy", ["belady", "frequency"])
def test_packs_of_no_batches(dataset: Path, tmp_path: Path, policy: str) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        featstore.sample_offline(g, sampler, [], 100, epochs=2, path=tmp_path / "p").close()
        options: dict[str, Any] = {"features": ["x", "z"], "pack": tmp_path / "p", "cache": 0.1}
        for more in ({}, {"device_cache": 0.1}, {"disk": "3x"}):
            with make_loader(g, strategy="packed", policy=policy, **options, **more) as loader:
                assert [len(loader), len(list(loader)), len(list(loader))] == [0, 0, 0]
        with make_loader(g, strategy="auto", **options) as loader:
            assert list(loader) == []
    with featstore.PackedGraph(tmp_path / "p", memory="64MB") as there:
        with featstore.Loader(there, features=["x", "z"], strategy=featstore.Packed(policy=policy, cache=0.1)) as loader:
            assert list(loader) == []


@pytest.mark.parametrize("options", [{}, {"device_cache": 0.05}, {"labels": None}], ids=["host", "device", "no labels"])
def test_a_planned_layout_says_how_much_disk_it_takes(dataset: Path, pack: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Before anything is filled, to the byte but for records, whatever part of it did not fit."""
    mine = copied(pack, tmp_path)
    given: dict[str, Any] = {"strategy": "packed", "pack": mine, "features": ["x", "z"], "cache": 0.05, "length": 7}
    least = set()
    with featstore.open(dataset, memory="64MB") as g, pytest.MonkeyPatch.context() as patched:
        patched.setattr(makelayout, "fill_extents", None)
        for disk in (40_000, 200_000, 600_000):
            with pytest.raises(OSError, match=r"take .* \(\d+ bytes\) on disk, of which .* may be used") as caught:
                make_loader(g, disk=disk, **given, **options)
            assert caught.value.errno == errno.ENOSPC
            assert "with policy 'belady' each batch has a copy of its own rows" in str(caught.value)
            assert "a static policy such as 'frequency'" in str(caught.value)
            assert not list(Path(mine).glob("layout-*"))
            least.add(least_in(caught.value))
        assert len(least) == 1
        refuses(OSError, "may be used", lambda: make_loader(g, disk=min(least) - 1, **given, **options))
    with featstore.open(dataset, memory="64MB") as g:
        make_loader(g, disk=min(least), **given, **options).close()
    assert min(least) - 20_000 < layout_bytes(mine) <= min(least)


def test_budgets_of_disk_name_what_does_not_fit_where(dataset: Path, tmp_path: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        with pytest.raises(OSError, match=r"the samples would take .* of a disk budget of 1 B") as caught:
            offline(g, tmp_path / "p", disk=1)
        assert caught.value.filename == str(tmp_path / "p")


def test_records_of_another_layout_are_damage(dataset: Path, pack: Path, tmp_path: Path) -> None:
    mine = copied(pack, tmp_path)
    for size in (0.1, 0.2):
        run(dataset, mine, epochs=0, cache=size)
    first, second = sorted(mine.glob("layout-*"))
    (first / "layout").write_bytes((second / "layout").read_bytes())
    refuses(featstore.CorruptionError, "record of another layout", lambda: run(dataset, mine, epochs=0))
    refuses(featstore.CorruptionError, "record of another layout", lambda: featstore.PackedGraph(mine))


def _killed_often(pack: str, folder: str, steps: list[int], dataset: str, policy: str, disk: str | None) -> None:
    """Die at a durable moment, with memory as usual and a checkpoint after every piece of the scan."""

    def make(mine: str, step: int) -> None:
        with pytest.MonkeyPatch.context() as patched:
            often(patched)
            patched.setattr("os.fsync", dying_fsync(step))
            run(Path(dataset), Path(mine), cache=0.01, epochs=0, policy=policy, disk=disk)

    die_at_each(make, pack, folder, steps)


@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize(("policy", "disk"), one_in(2, [("belady", None), ("frequency", "900KB")], names=2))
def test_killed_between_checkpoints_with_memory_as_usual(dataset, pack, tmp_path, ondemand, policy, disk) -> None:
    resumed = 0
    for mine in killed(_killed_often, pack, tmp_path, range(8, 60, 6), str(dataset), policy, disk):
        resumed += bool(list(mine.glob("layout-*.partial/*.progress")))
        found, _ = run(dataset, mine, cache=0.01, policy=policy, disk=disk)
        assert same(found[0] + found[2], ondemand), mine
        assert not list(mine.glob("*.partial"))
    assert resumed
