"""Sharded features in gloo groups: the bits that all rows in one file give, and what happens when a machine is lost."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import featstore
from featstore import Auto, Ginex, LaborSampler, Loader, NeighborSampler, OnDemand, Streamed, Superbatch
from featstore.distributed import Sharded, exchange
from featstore.errors import BudgetError, ClosedError, CorruptionError
from tests.support.programs import run_program, run_ranks
from tests.support.ranks import end, group, torchrun, two_forks

pytestmark = [pytest.mark.usefixtures("_program_server"), pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")]

ROOT = Path(__file__).resolve().parents[2]
N, BATCH = 3000, 40
SEEDS = np.random.default_rng(2).permutation(N)[:800]
KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "bytes": (np.uint8, (1,)),
    "floats": (np.float32, (8,)),
    "halves": (np.float16, (3, 5)),
    "wide": (np.int64, (700,)),
    "flags": (np.bool_, (13,)),
    "one": (np.float64, ()),
}


def values(kind: str) -> np.ndarray:
    dtype, shape = KINDS[kind]
    return np.random.default_rng(1).integers(0, 256 if kind != "flags" else 2, (N, *shape)).astype(dtype)


def put(path: Path, features: dict[str, np.ndarray]) -> None:
    """Make a dataset of rows without edges."""
    n = len(next(iter(features.values())))
    nothing = np.zeros(n + 1, np.int64)
    featstore.OutOfCoreGraph.create(path, nothing, nothing[:0], features, progress=False).close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``graph``, without features; ``whole``, with all; ``rows-w-k``, rank k's of w; ``listed-k``, rows of shuffled ids."""
    rng, made = np.random.default_rng(0), tmp_path_factory.mktemp("shards")
    pairs = np.stack([(N * rng.random(10 * N) ** 2).astype(np.int64), rng.integers(0, N, 10 * N)])
    features = {kind: values(kind) for kind in KINDS}
    for name, given in (("graph", {}), ("whole", features)):
        featstore.OutOfCoreGraph.from_edge_index(made / name, pairs, N, given, progress=False).close()
    for world, bounds in BOUNDS.items():
        for k, (low, high) in enumerate(itertools.pairwise(bounds)):
            put(made / f"rows-{world}-{k}", {kind: each[low:high] for kind, each in features.items()})
    for k, ids in enumerate(listed()):
        put(made / f"listed-{k}", {"floats": features["floats"][ids]})
    return made


BOUNDS = {2: [0, 1100, N], 3: [0, 700, 1900, N]}


def listed() -> list[np.ndarray]:
    ids = np.random.default_rng(4).permutation(N)
    return [ids[:500], ids[500:1700], ids[1700:]]


@contextlib.contextmanager
def opened(rank: int, world: int, folder: Path, meets: Path, kinds: Any = ("floats",), **options: Any) -> Iterator[Any]:
    """Be a rank of ``world`` whose graph has these features, sharded."""
    with group(rank, world, meets), contextlib.ExitStack() as stack:
        part = stack.enter_context(featstore.open(folder / f"rows-{world}-{rank}", memory="32MiB", threads=2))
        g = stack.enter_context(featstore.open(folder / "graph", memory="64MiB", threads=2))
        for kind in kinds:
            stack.enter_context(Sharded(g, kind, part.features[kind], range(*BOUNDS[world][rank:][:2]), **options))
        yield g


def succeed(found: list[tuple[int, str]]) -> list[str]:
    for status, printed in found:
        assert status == 0, printed
    return [printed for _, printed in found]


# -- rows ----------------------------------------------------------------------------------------------------------------------


def read_all_ways(rank: int, world: int, folder: Path, meets: Path) -> None:
    rng = np.random.default_rng(rank)
    low, high = BOUNDS[world][rank:][:2]
    with opened(rank, world, folder, meets, KINDS) as g, featstore.open(folder / "whole", memory="64MiB") as whole:
        held = {kind: g.memory_report()[f"sharding {kind!r}"] for kind in KINDS}
        assert max(held.values()) <= g.budget.total // 16
        for kind in KINDS:
            x, want = g.features[kind], torch.from_numpy(values(kind))
            assert isinstance(x, Sharded)
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
            assert torch.equal(x[:], want)
            assert torch.equal(x[:], whole.features[kind][:])
            assert torch.equal(x[5:2999:7], want[5:2999:7])
            assert torch.equal(x[-1], want[-1])
            assert torch.equal(x[[]], want[[]])
            before = x.stats()["remote"]["rows"]
            ids = rng.integers(-N, N, (30, 7))
            assert torch.equal(x[ids], want[ids])
            assert x.stats()["remote"]["rows"] - before == ((ids % N < low) | (ids % N >= high)).sum()
            mask = rng.random(N) < 0.2
            assert torch.equal(x[mask], want[torch.from_numpy(mask)])
            out = torch.empty((50, *want.shape[1:]), dtype=want.dtype)
            ids = rng.integers(0, N, 50)
            assert torch.equal(x.take(ids, out=out, coalesce_gap=0), want[ids])
            assert torch.equal(x.take_async(ids).result(), want[ids])
            assert torch.equal(torch.index_select(x, 0, torch.from_numpy(ids)), want[ids])
            with pytest.raises(IndexError, match=f"{N}"):
                x[[0, N]]
            assert torch.equal(x[ids], want[ids])
            with ThreadPoolExecutor(4) as threads:
                asked = [rng.integers(0, N, 200) for _ in range(20)]
                found = threads.map(x.__getitem__, asked)
                assert all(torch.equal(a, want[b]) for a, b in zip(found, asked, strict=True))
            for policy in ("lru", "random"):
                g.cache(kind, budget=0.2, policy=policy)
                for _ in range(3):
                    assert torch.equal(x[ids], want[ids])
                assert x.stats()["cache"]["hits"] > 0
            g.cache(kind, budget=0)
        assert held == {kind: g.memory_report()[f"sharding {kind!r}"] for kind in KINDS}
        assert x.stats()["mode"] == "sharded"


@pytest.mark.parametrize("world", [2, 3])
def test_rows_are_those_of_one_file(folder: Path, tmp_path: Path, world: int) -> None:
    succeed(run_ranks(read_all_ways, world, world, folder, tmp_path))


WAYS: dict[str, tuple[Any, Any]] = {
    "ondemand": (NeighborSampler, lambda: OnDemand(cache=0.1, policy="lru")),
    "degree": (LaborSampler, lambda: OnDemand(cache=0.1, policy="degree")),
    "superbatch": (NeighborSampler, lambda: Superbatch(length=3, cache=0.1)),
    "ginex": (LaborSampler, lambda: Ginex(length=4, cache=0.1)),
    "auto": (NeighborSampler, lambda: Auto(cache=0.1)),
}


def train_all_ways(rank: int, world: int, folder: Path, meets: Path) -> None:
    with (
        opened(rank, world, folder, meets, ("floats", "halves")) as g,
        featstore.open(folder / "whole", memory="64MiB", threads=2) as whole,
    ):
        for way, (sampler, strategy) in WAYS.items():
            graphs: list[Any] = [g, whole]
            options: dict[str, Any] = {"features": ("floats", "halves"), "strategy": strategy()}
            loaders = [Loader(each, sampler(each, [4, 3], seed=3), SEEDS, BATCH, **options) for each in graphs]
            for _ in range(2):
                n = 0
                for batch, same in zip(*loaders, strict=True):
                    assert batch.index == same.index
                    assert all(map(torch.equal, batch._tensors(), same._tensors())), way
                    n += 1
                assert n == len(loaders[0])
            stats = loaders[0].stats()
            assert stats["rows_loaded"] > 0
            assert stats["hits"]["host"] > 0
            if way == "auto":
                assert stats["auto"]["taken"] == {"strategy": "superbatch", "policy": "belady"}
            for loader in loaders:
                loader.close()
        with pytest.raises(
            ValueError, match=r"the rows of 'floats' cannot be packed: the rows of 'floats' on .* machines is not"
        ):
            Loader(g, sampler(g, [4, 3]), SEEDS, BATCH, features="floats", strategy=Streamed(length=3, cache=0.1))
        assert g.features["floats"].stats()["remote"]["rows"] > 0


@pytest.mark.parametrize("world", [2, 3])
def test_batches_are_those_of_one_machine_bit_for_bit(folder: Path, tmp_path: Path, world: int) -> None:
    succeed(run_ranks(train_all_ways, world, world, folder, tmp_path))


def read_listed(rank: int, folder: Path, meets: Path) -> None:
    """Three machines: two ranks on the first, one that has no rows, one on each of the others."""
    machine = [0, 0, None, 1, 2][rank]
    want = torch.from_numpy(values("floats"))
    with group(rank, 5, meets), featstore.open(folder / "graph", memory="64MiB") as g, contextlib.ExitStack() as stack:
        rows, ids = None, np.empty(0, np.int64)
        if machine is not None:
            rows = stack.enter_context(featstore.open(folder / f"listed-{machine}", memory="32MiB")).features["floats"]
            ids = listed()[machine]
        with Sharded(g, "floats", rows, ids) as x:
            assert torch.equal(x[:], want)
            some = np.random.default_rng(rank).integers(0, N, 700)
            assert torch.equal(x[some], want[some])
            assert x.stats()["remote"]["rows"] == N - len(ids) + (~np.isin(some, ids)).sum()
            held = g.memory_report()["sharding 'floats'"]
            assert N * 4 < held <= g.budget.total // 16 + N * 4
            found: list[Any] = [None] * 5
            dist.all_gather_object(found, (x.source.fingerprint, x.stats()["remote"]["rows"], None))
            assert len({each[0] for each in found}) == 1
            assert len(found[0][0]) == 32
            dist.barrier()
            answered: list[Any] = [None] * 5
            dist.all_gather_object(answered, x.stats()["remote"]["answered_rows"])
            assert sum(answered) == sum(each[1] for each in found)
            assert answered[0]
            assert answered[1], "ranks with the same rows share the questions"
            assert not answered[2]
        assert "floats" not in g.features
        assert "sharding 'floats'" not in g.memory_report()


def test_listed_ids_ranks_of_one_machine_and_a_rank_without_rows(folder: Path, tmp_path: Path) -> None:
    succeed(run_ranks(read_listed, 5, folder, tmp_path))


def test_one_process_alone(folder: Path) -> None:
    threads = threading.active_count()
    with featstore.open(folder / "whole", memory="64MiB") as g:
        x = Sharded(g, "x", g.features["floats"], range(N))
        assert torch.equal(x[::3], torch.from_numpy(values("floats"))[::3])
        assert x.stats()["remote"] == {"rows": 0, "bytes": 0, "questions": 0, "wait_s": 0.0, "answered_rows": 0}
        with pytest.raises(TypeError, match="the sharded feature 'x' belongs to its process, and is not pickled"):
            x.__reduce__()
        with pytest.raises(ValueError, match="the rows of 'x' are in no file of"):
            g.aggregate("x", progress=False)
        with pytest.raises(ValueError, match="the rows of 'x' are in no file of"):
            featstore.infer(g, [lambda block, rows: rows], "x", progress=False)
        with pytest.raises(ValueError, match=r"'x' is a feature that was attached to .*: close it, or take another name"):
            g.aggregate("floats", name="x", progress=False)
        x.close()
        x.close()
        assert "sharding 'x'" not in g.memory_report()
        with pytest.raises(ClosedError, match="closed"):
            x[0]
        with pytest.raises(KeyError, match="no feature 'x'"):
            g.features["x"]
    assert threading.active_count() == threads


@pytest.mark.parametrize("together", [two_forks, pytest.param(torchrun, marks=pytest.mark.stress)])
def test_the_guides_program(tmp_path: Path, together: Callable[[Path, list[str]], str]) -> None:
    """Two ranks train on the shares that the page makes."""
    page = (ROOT / "docs/guide/machines.md").read_text()
    making, script, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    first = (ROOT / "docs/guide/README.md").read_text()
    (graph,) = re.findall(r"```python\n(.*?)```", first, re.DOTALL)
    (tmp_path / "make.py").write_text(graph + making + script)
    done = run_program(tmp_path / "make.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert together(tmp_path, [os.fspath(tmp_path / "train_shards.py")]).count("'answered_rows': ") == 2


# -- bad input -----------------------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "name": (lambda a: a | {"name": 7}, TypeError, "name must be the name of a feature, not 7"),
    "taken": (lambda a: a | {"name": "x"}, ValueError, "has 'x' already: take another name"),
    "data": (lambda a: a | {"name": "y"}, ValueError, "has 'y' already: take another name"),
    "rows": (
        lambda a: a | {"rows": np.zeros((5, 8))},
        TypeError,
        "rows must be a feature of an open dataset, or None, not a ndarray",
    ),
    "fewer ids": (lambda a: a | {"ids": range(9)}, ValueError, "9 ids are given for 10 rows"),
    "no rows": (lambda a: a | {"rows": None}, ValueError, "10 ids are given for 0 rows"),
    "step": (lambda a: a | {"ids": range(0, 20, 2)}, ValueError, "ids must be a range of step 1, or an array"),
    "beyond": (lambda a: a | {"ids": range(5, 15)}, ValueError, r"ids range\(5, 15\) are out of range for the graph's 10 nodes"),
    "listed beyond": (lambda a: a | {"ids": [*range(9), 10]}, ValueError, "ids are from 0 to 10, out of range"),
    "negative": (lambda a: a | {"ids": [*range(9), -1]}, ValueError, "ids are from -1 to 8, out of range"),
    "twice": (lambda a: a | {"ids": [*range(9), 0]}, ValueError, r"row 0 is on rank 0 \(.*\) twice"),
    "fractions": (lambda a: a | {"ids": np.arange(10.0)}, TypeError, "ids must be a range, or a 1-D array of integers"),
    "2-D": (lambda a: a | {"ids": [[*range(10)]]}, TypeError, "ids must be a range, or a 1-D array of integers"),
    "missing": (lambda a: a | {"rows": None, "ids": ()}, ValueError, "no rank has rows of 'z'"),
    "timeout": (lambda a: a | {"timeout": 0}, ValueError, r"seconds from 0\.001 to 10,000,000, not 0"),
    "timeout too little": (lambda a: a | {"timeout": 1e-6}, ValueError, r"timeout must .* from 0\.001 to 10,000,000, not 1e-06"),
    "timeout too much": (lambda a: a | {"timeout": 1e12}, ValueError, r"timeout must .* to 10,000,000, not 1000000000000\.0"),
    "timeout without end": (lambda a: a | {"timeout": float("inf")}, ValueError, r"timeout must .* to 10,000,000, not inf"),
    "timeout that is none": (lambda a: a | {"timeout": float("nan")}, ValueError, r"timeout must .* to 10,000,000, not nan"),
    "timeout's type": (lambda a: a | {"timeout": "1s"}, TypeError, "timeout must be a number of seconds, not '1s'"),
}


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("ten") / "g"
    indptr, indices = np.arange(11), np.arange(10)
    x = np.arange(20.0).reshape(10, 2)
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, {"y": np.arange(10)}, progress=False).close()
    with featstore.open(path, memory="32MiB") as g:
        yield g


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.shares_resources
def test_wrong_arguments(ten: Any, what: str) -> None:
    change, error, message = WRONG[what]
    used = ten.budget.used
    given = change({"g": ten, "name": "z", "rows": ten.features["x"], "ids": range(10)})
    with pytest.raises(error, match=message):
        Sharded(**given)
    assert list(ten.features) == ["x"]
    assert ten.budget.used == used


@pytest.mark.shares_resources
def test_rows_of_a_part_are_no_share(ten: Any, tmp_path: Path) -> None:
    with featstore.open(ten.path, memory="64MiB") as g:
        given: Any = np.stack([np.arange(9), np.arange(1, 10)])
        with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", given, 10, {"x": np.eye(10)}, progress=False) as whole:
            featstore.partition(whole, 2, "ldg", [3, 8], hops=1, progress=False)
            featstore.export(whole, tmp_path / "part", 0, progress=False)
            with pytest.raises(ValueError, match="rows are those of part 0 of 'ldg-2-hops-1', which has not all rows"):
                Sharded(g, "z", whole.part(0, progress=False).features["x"], range(10))
        with (
            featstore.open(tmp_path / "part") as part,
            pytest.raises(ValueError, match="rows are those of part 0 of 'ldg-2-hops-1', which has not all rows"),
        ):
            Sharded(g, "z", part.features["x"], range(10))


@pytest.mark.shares_resources
def test_what_cannot_be_sharded(ten: Any, tmp_path: Path) -> None:
    for timeout in (np.float32(5), np.int64(5), np.float64(0.001), 10_000_000):
        Sharded(ten, "z", ten.features["x"], range(10), timeout=timeout).close()
    with pytest.raises(TypeError, match="a sharded feature is one of an OutOfCoreGraph, not of a str"):
        Sharded("g", "z", ten.features["x"], range(10))  # type: ignore[arg-type]
    with (
        Sharded(ten, "z", ten.features["x"], range(10)) as z,
        pytest.raises(ValueError, match="not a feature that is sharded already"),
    ):
        Sharded(ten, "w", z, range(10))
    typed = featstore.OutOfCoreGraph.create(tmp_path / "typed", nodes={"a": featstore.Nodes(10)}, edges={}, progress=False)
    with typed, pytest.raises(NotImplementedError, match="a sharded feature is for a graph of one type"):
        Sharded(typed, "z", ten.features["x"], range(10))
    with pytest.raises(ClosedError):
        Sharded(typed, "z", ten.features["x"], range(10))


def disagree(rank: int, folder: Path, meets: Path) -> None:
    with group(rank, 2, meets), featstore.open(folder / "graph", memory="64MiB") as g:
        with (
            featstore.open(folder / f"rows-2-{rank}", memory="32MiB") as part,
            featstore.open(folder / "whole", memory="64MiB") as whole,
        ):
            x, ids, used = part.features["floats"], range(*BOUNDS[2][rank:][:2]), g.budget.used
            both = {0: ("a", x, ids), 1: ("b", x, ids)}
            with pytest.raises(ValueError, match="but the names differ: 'a' on rank 0, 'b' on rank 1"):
                Sharded(g, *both[rank])
            for other in ("halves", "one"):
                with pytest.raises(
                    ValueError, match=r"rows of 'x' differ between ranks: float32 \[8\] on rank 0, float.* on rank 1"
                ):
                    Sharded(g, "x", x if rank == 0 else part.features[other], ids)
            nodes = {0: (g, x, ids), 1: (whole, whole.features["floats"], range(N))}[rank]
            with pytest.raises(
                ValueError, match=r"row 0 is on rank . \(.*\) and on rank ., \(?.*which have different rows|row 0 is on"
            ):
                Sharded(nodes[0], "x", *nodes[1:])
            with pytest.raises(ValueError, match="rows 0 to 1099 are on no rank"):
                Sharded(g, "x", x if rank else None, ids if rank else ())
            lists = np.arange(ids.start, ids.stop)
            lists[0] = lists[0] if rank == 0 else 5
            with pytest.raises(ValueError, match=r"row 5 is on rank 1 \(.*\) and on rank 0 \(.*\), which have different rows"):
                Sharded(g, "x", x, lists)
            if rank == 0:
                with pytest.raises(ValueError, match="2 ids are given for 1100 rows"):
                    Sharded(g, "x", x, range(2))
            else:
                with pytest.raises(RuntimeError, match="rank 0 of 2 failed: ValueError: 2 ids are given for 1100 rows"):
                    Sharded(g, "x", x, ids)
            full = g.budget.reserve("the test", g.budget.available) if rank else contextlib.nullcontext()
            wanted: tuple[type[Exception], str] = RuntimeError, "rank 1 of 2 failed: BudgetError"
            if rank:
                wanted = BudgetError, "sharding 'x' needs"
            with full, pytest.raises(wanted[0], match=wanted[1]):
                Sharded(g, "x", x, ids)
            assert g.budget.used == used
            assert not list(g.features)
            with Sharded(g, "x", x, ids) as made:
                assert torch.equal(made[:], torch.from_numpy(values("floats")))


def test_ranks_that_disagree(folder: Path, tmp_path: Path) -> None:
    """Each refusal comes on all ranks, and they can try again."""
    succeed(run_ranks(disagree, 2, folder, tmp_path))


# -- lost machines -------------------------------------------------------------------------------------------------------------


def read_until_one_is_lost(rank: int, folder: Path, meets: Path, how: str, way: str) -> None:
    """Rank 2 is lost in the middle of an epoch of the others."""
    timeout = 300.0 if how == "killed" else 60.0  # a busy machine keeps a rank that goes on waiting, too
    try:
        with opened(rank, 3, folder, meets, timeout=timeout) as g:
            if rank == 2:
                (meets / "pid").write_text(str(os.getpid()))
                while sum((meets / f"began-{other}").exists() for other in range(2)) < 2:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            sampler, strategy = WAYS[way]
            loader = Loader(
                g, sampler(g, [4, 3], seed=3), SEEDS, BATCH, features="floats", strategy=strategy(), rank=0, world_size=1
            )
            try:
                while True:
                    for _ in loader:
                        (meets / f"began-{rank}").touch()
            finally:
                begin = time.monotonic()
                loader.close()
                assert time.monotonic() - begin < 60
    except OSError as error:
        print(json.dumps([type(error).__name__, str(error)]))
    end(int((meets / "pid").read_text()))
    assert not [each.name for each in threading.enumerate() if each.name.startswith("featstore")]


@pytest.mark.parametrize(("how", "way"), [("killed", "ondemand"), ("killed", "superbatch"), ("stopped", "ginex")])
def test_a_lost_machine_is_named(folder: Path, tmp_path: Path, how: str, way: str) -> None:
    """By at least one of the others; if one is faster, the other hears it from that one."""
    *others, (status, of_lost) = run_ranks(read_until_one_is_lost, 3, folder, tmp_path, how, way)
    assert status == -signal.SIGKILL, of_lost
    # After the line of JSON may be one of torch's or the system's.
    said = [json.loads([line for line in printed.splitlines() if line.startswith('["')][-1]) for printed in succeed(others)]
    for kind, text in said:
        assert "the rows of 'floats': rank 2 (" in text or "has left: " in text
        assert "rank 2 (" in text, text
        assert kind in ("ConnectionError", "TimeoutError")
    assert any(kind == ("ConnectionError" if how == "killed" else "TimeoutError") for kind, _ in said)


def read_damaged(rank: int, folder: Path, damaged: Path, meets: Path) -> None:
    want = torch.from_numpy(values("floats"))
    with group(rank, 2, meets), featstore.open(folder / "graph", memory="64MiB") as g:
        with featstore.open(damaged if rank else folder / "rows-2-0", memory="32MiB") as part:
            with Sharded(g, "floats", part.features["floats"], range(*BOUNDS[2][rank:][:2])) as x:
                dist.barrier()
                if rank == 0:
                    with pytest.raises(CorruptionError, match=r"rank 1 \(.*\) could not read rows: checksum") as raised:
                        x[:]
                    host, _, path = raised.value.path.partition(":")
                    assert host
                    assert path.startswith(str(damaged))
                    assert raised.value.offset is not None
                    assert torch.equal(x[2900:], want[2900:]), "rows of other pages come"
                    assert torch.equal(x[:1100], want[:1100])
                    sampler = NeighborSampler(g, [4, 3])
                    with Loader(
                        g, sampler, SEEDS, BATCH, features="floats", strategy="superbatch", rank=0, world_size=1
                    ) as loader:
                        with pytest.raises(CorruptionError, match="rank 1"):
                            list(loader)
                dist.barrier()


def test_damaged_rows_are_reported_where_they_are_asked_for(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    put(damaged, {"floats": values("floats")[1100:]})
    with featstore.open(damaged, memory="32MiB") as part:
        path = part.features["floats"].source.path
    with open(path, "r+b") as file:
        file.seek(3 * 4096 + 100)
        old = file.read(1)
        file.seek(3 * 4096 + 100)
        file.write(bytes([old[0] ^ 1]))
    succeed(run_ranks(read_damaged, 2, folder, damaged, tmp_path))


def leave_by_an_error(rank: int, folder: Path, meets: Path, block: str) -> None:
    """Rank 1 ends with an error; whichever ``with`` block sees it, in an epoch or not, rank 0 hears of it at once."""
    exchange._HURRY_S = 20.0  # type: ignore[misc] - a busy machine may take longer to notice
    with group(rank, 2, meets):
        part = featstore.open(folder / f"rows-2-{rank}", memory="32MiB")
        g = featstore.open(folder / "graph", memory="64MiB")
        x = Sharded(g, "x", part.features["floats"], range(*BOUNDS[2][rank:][:2]), timeout=300.0)
        begin = time.monotonic()
        if rank == 1:
            with pytest.raises(ZeroDivisionError), g if block == "graph" else x:
                assert len(x[:]) == N
                options: dict[str, Any] = {"strategy": Superbatch(length=3, cache=0.1), "rank": 0, "world_size": 1}
                loader = Loader(g, NeighborSampler(g, [4, 3]), SEEDS, BATCH, **options)
                batches = iter(loader)
                assert len(next(batches).x)
                if block != "loop":
                    loader.close()
                raise ZeroDivisionError("in the loop")
            if block == "loop":
                with pytest.raises((ClosedError, ConnectionError)):
                    list(batches)
                loader.close()
        else:
            with pytest.raises(ConnectionError, match=r"rank 1 \(.*\) has left: ZeroDivisionError: in the loop"):
                while True:
                    x[1000:1200]
        g.close()
        part.close()
        assert time.monotonic() - begin < 120
        assert not [each.name for each in threading.enumerate() if each.name.startswith("featstore-shards")]


@pytest.mark.parametrize("block", ["feature", "graph", "loop"])
def test_the_others_hear_of_an_error(folder: Path, tmp_path: Path, block: str) -> None:
    succeed(run_ranks(leave_by_an_error, 2, folder, tmp_path, block))


def interrupt(rank: int, folder: Path, meets: Path) -> None:
    """Ctrl-C while rank 0 waits for a rank that does not answer."""
    try:
        with opened(rank, 2, folder, meets, timeout=300.0) as g:
            if rank:
                while not (meets / "opened").exists():  # what this rank still sends for that would be stopped, too
                    time.sleep(0.01)
                (meets / "part").write_text(str(os.getpid()))
                os.replace(meets / "part", meets / "pid")  # the other one reads it as soon as it is there
                os.kill(os.getpid(), signal.SIGSTOP)
            (meets / "opened").touch()
            stopped = meets / "pid"
            while not stopped.exists() or "T (stopped)" not in Path(f"/proc/{stopped.read_text()}/status").read_text():
                time.sleep(0.01)
            begin = time.monotonic()
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                g.features["floats"][:]
            assert time.monotonic() - begin < 60
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        end(int((meets / "pid").read_text()))
        assert time.monotonic() - begin < 120
        assert not [each.name for each in threading.enumerate() if each.name.startswith("featstore-shards")]


def test_ctrl_c_ends_a_wait(folder: Path, tmp_path: Path) -> None:
    (status, printed), _ = run_ranks(interrupt, 2, folder, tmp_path)
    assert status == 0, printed


def fork(rank: int, folder: Path, meets: Path) -> None:
    """A forked child reads its parent's own rows, asks nobody, and ends without closing anything of its parent's."""
    want = torch.from_numpy(values("floats"))
    with opened(rank, 2, folder, meets) as g:
        x, low = g.features["floats"], BOUNDS[2][rank]
        assert torch.equal(x[:], want)
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                assert torch.equal(x[low : low + 50], want[low : low + 50])
                with pytest.raises(ClosedError, match="a forked process cannot ask other ranks"):
                    x[:]
                g.close()
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(x[:], want)


def test_a_forked_process(folder: Path, tmp_path: Path) -> None:
    succeed(run_ranks(fork, 2, folder, tmp_path))
