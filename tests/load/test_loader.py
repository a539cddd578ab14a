"""The loader over a graph in memory that keeps a ledger as the real one does; test_train.py runs it over datasets on disk."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
import time
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.errors import BudgetError, ClosedError
from featstore.load.minibatch import MiniBatch
from featstore.load.stages import Stages
from tests.support.fake_graph import N, Sampler, graph, loader
from tests.support.refusing import refuses


def content(batch: MiniBatch) -> tuple:
    blocks = [(b.src.tolist(), b.dst.tolist(), b.n_src, b.n_dst) for b in batch.blocks]
    rows = {name: rows.numpy().tobytes() for name, rows in batch.features.items()}
    return batch.index, batch.seeds.tolist(), batch.input_ids.tolist(), blocks, rows, batch.y.tolist()


def test_a_batch():
    g = graph()
    for batch in loader(g, features=["x", "h"]):
        assert torch.equal(batch.input_ids[: len(batch.seeds)], batch.seeds)
        assert torch.equal(batch.x, g.features["x"].rows[batch.input_ids])
        assert torch.equal(batch.features["h"], g.features["h"].rows[batch.input_ids])
        assert list(batch.features) == ["x", "h"]
        assert torch.equal(batch.y, batch.seeds % 7)
        assert batch.blocks[0].n_src == len(batch.input_ids)
    assert batch.index == 12
    assert "index=12, seeds=10" in repr(batch)


def test_moving_a_batch():
    g = graph()
    batch = next(iter(loader(g)))
    same = batch.to("cpu")
    assert same.x is batch.x
    assert content(same) == content(batch)
    there = batch.to("meta")
    assert {t.device.type for t in (there.x, there.y, there.seeds, there.input_ids, there.blocks[0].src)} == {"meta"}
    assert batch.nbytes == sum(
        t.numel() * t.element_size()
        for t in (batch.input_ids, batch.x, batch.y, batch.seed_index, batch.seed_positions, *batch.blocks[0].tensors)
    )


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_delivered_on_a_device(prefetch):
    """On it, in order; and nothing of a batch stays in host memory once it is transferred."""
    g = graph()
    batches = loader(g, device="meta", features=["x", "h"], prefetch=prefetch)
    resting = g.budget.used
    got = list(batches)
    assert [batch.index for batch in got] == list(range(13))
    for batch in got:
        there = [batch.seeds, batch.input_ids, batch.y, batch.blocks[0].src, *batch.features.values()]
        assert {tensor.device.type for tensor in there} == {"meta"}
        assert list(batch.features) == ["x", "h"]
    assert g.budget.used == resting
    assert batches.stats()["seconds"].keys() == {"sample", "gather", "labels", "transfer", *(["wait"] if prefetch else [])}


def test_a_device_takes_batches_off_the_host_of_any_epoch():
    """The loop may hold every batch of the epoch, which the host's memory has no room for."""
    g = graph(12_000)
    kept = list(loader(g, device="meta", prefetch=4))
    assert len(kept) == 13
    assert g.budget.peak <= 12_000
    refuses(BudgetError, "", lambda: list(loader(graph(12_000), prefetch=4)))


@pytest.mark.parametrize("error", [RuntimeError("out of memory on the device"), KeyboardInterrupt(), StopIteration()])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_a_transfer(error, prefetch, monkeypatch):
    g = graph()
    move = MiniBatch.to

    def to(self, *where, **how):
        if self.index == 3 and failing:
            raise error
        return move(self, *where, **how)

    failing = [True]
    monkeypatch.setattr(MiniBatch, "to", to)
    batches = loader(g, device="meta", prefetch=prefetch, shuffle=False)
    resting = g.budget.used
    iterator = iter(batches)
    assert [next(iterator).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises((type(error), RuntimeError)) as caught:
        next(iterator)
    assert error in (caught.value, caught.value.__cause__)
    assert threads() == 0
    error.__traceback__ = caught.value.__traceback__ = None
    del caught
    refuses(StopIteration, "", lambda: next(iterator))
    failing.clear()
    assert [batch.index for batch in batches] == list(range(13))
    assert g.budget.used == resting


@cache
def contents(shuffle: bool) -> list[tuple]:
    return [content(batch) for batch in loader(graph(), threads=1, prefetch=0, shuffle=shuffle)]


@given(
    threads=st.integers(1, 4), prefetch=st.integers(0, 4), memory=st.sampled_from([10**8, 40_000, 12_000]), shuffle=st.booleans()
)
def test_batches_do_not_depend_on_how_they_are_made(threads, prefetch, memory, shuffle):
    g = graph(memory)
    got = [content(batch) for batch in loader(g, threads=threads, prefetch=prefetch, shuffle=shuffle)]
    assert got == contents(shuffle)
    assert g.budget.peak <= memory


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [0, 1, 19, 20, 21, 60])
def test_every_seed_once(n, drop_last):
    g = graph()
    seeds = torch.randperm(N, generator=torch.Generator().manual_seed(n))[:n]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if drop_last and 0 < n < 20 else "error", featstore.FeatstoreWarning)
        batches = loader(g, seeds=seeds, drop_last=drop_last)
    got = [batch.seeds.clone() for batch in batches]
    assert len(got) == len(batches) == (n // 20 if drop_last else -(-n // 20))
    if not drop_last:
        assert sorted(torch.cat(got).tolist() if got else []) == sorted(seeds.tolist())
    assert all(len(part) == 20 for part in got[:-1])


def test_order_is_a_function_of_seed_and_epoch():
    g = graph()

    def orders(**options):
        batches = loader(g, **options)
        return [[batch.seeds.tolist() for batch in batches] for _ in range(3)]

    first = orders(seed=5)
    assert orders(seed=5) == first
    assert first[0] != first[1] != first[2]
    assert orders(seed=6) != first
    plain = orders(shuffle=False)
    assert plain[0] == plain[1]
    assert [seed for seeds in plain[0] for seed in seeds] == list(range(0, N, 2))
    again = loader(g, seed=5)
    again.set_epoch(2)
    assert [batch.seeds.tolist() for batch in again] == first[2]


def test_two_iterators_at_once():
    g = graph()
    batches = loader(g)
    both = list(zip(batches, batches, strict=True))
    fresh = loader(g)
    want = [[content(batch) for batch in fresh] for _ in range(2)]
    assert [content(a) for a, _ in both] == want[0]  # an iterator is an epoch
    assert [content(b) for _, b in both] == want[1]


@pytest.mark.parametrize("stop", [0, 1, 5, 12, 13])
def test_resume(stop):
    g = graph()
    straight = loader(g, seed=3)
    want = [content(batch) for _ in range(2) for batch in straight]
    first = loader(g, seed=3)
    got = []
    for batch in first:
        got.append(content(batch))
        if len(got) >= stop:
            break
    if stop == 0:
        got = []
        first = loader(g, seed=3)
    state = first.state_dict()
    second = loader(g, seed=3)
    second.load_state_dict(state)
    assert second.state_dict() == state
    while len(got) < len(want):
        got += [content(batch) for batch in second]
    assert got == want


def test_state_of_another_loader():
    g = graph()
    state = loader(g).state_dict()
    for options in ({"batch_size": 21}, {"seed": 1}, {"shuffle": False}, {"seeds": torch.arange(3)}, {"drop_last": True}):
        refuses(ValueError, "other seeds", lambda: loader(g, **options).load_state_dict(state))
    refuses(ValueError, "not a loader's state, .*: it has none", lambda: loader(g).load_state_dict({}))
    refuses(ValueError, "it has 'bias', 'weight'", lambda: loader(g).load_state_dict(torch.nn.Linear(1, 1).state_dict()))
    refuses(TypeError, "the dict that state_dict.. returned, not a NoneType", lambda: loader(g).load_state_dict(None))
    loader(g, threads=1, prefetch=0).load_state_dict(state)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error", "x.rows"), RuntimeError("policy"), KeyboardInterrupt()])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_sampler(error, prefetch):
    g = graph()
    sampler = Sampler(g.pool)
    sampler.fail = error
    batches = loader(g, sampler=sampler, prefetch=prefetch)
    iterator = iter(batches)
    assert [next(iterator).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error
    refuses(StopIteration, "", lambda: next(iterator))
    sampler.fail = None
    assert [batch.index for batch in batches] == list(range(13))


def test_errors_of_the_gather():
    g = graph()
    g.features["x"].rows = g.features["x"].rows[:100]
    refuses(IndexError, "", lambda: list(loader(g)))


@pytest.fixture(autouse=True)
def others():
    """Know the threads that are there before a test begins: they are no matter of its."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


OTHERS: set[threading.Thread] = set()


def threads() -> int:
    """Return how many threads of the library a test has running."""
    return sum(thread.name.startswith("featstore") and thread not in OTHERS for thread in threading.enumerate())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_leaving_early_leaves_nothing(device):
    g = graph()
    batches = loader(g, device=device)
    resting = g.budget.used
    for _ in batches:
        assert threads() == (3 if device == "cpu" else 4)  # where nothing is to be transferred, no thread is there to do it
        break
    assert threads() == 0
    del _
    assert g.budget.used == resting
    iterator = iter(batches)
    next(iterator)
    del iterator
    assert threads() == 0

    def body():
        for batch in batches:
            raise ZeroDivisionError(batch.index)

    refuses(ZeroDivisionError, "", body)
    assert threads() == 0


def test_collected_in_a_cycle():
    g = graph()
    iterator = iter(loader(g))
    next(iterator)
    holder = {"iterator": iterator}
    holder["self"] = holder
    del iterator, holder
    gc.collect()
    assert threads() == 0


@pytest.mark.parametrize("how", ["closed", "dropped", "dropped, no thread begins"])
def test_an_epoch_is_over_when_no_thread_gathers(monkeypatch, how):
    """However long that takes: its rows would go to a cache that is another epoch's by then. A finaliser does not wait for it."""
    monkeypatch.setattr("featstore.load.epoch.FINALIZER_JOIN_S", 0.01)
    g, number, inside, may_end = graph(), itertools.count(), threading.Event(), threading.Event()
    gather, over = g.features["x"].gather, Stages.over
    ended = []

    def slow(ids, *args, **options):
        if next(number) == 1:  # of the second batch
            inside.set()
            assert may_end.wait(60)
        return gather(ids, *args, **options)

    monkeypatch.setattr(g.features["x"], "gather", slow)
    monkeypatch.setattr(Stages, "over", lambda stages, run: (ended.append(threads()), over(stages, run)))
    iterator = iter(loader(g))
    next(iterator)
    assert inside.wait(60)
    if how == "closed":
        threading.Timer(0.1, may_end.set).start()
        iterator.close()
        assert ended == [0]
    elif how.endswith("begins"):

        def refused(thread):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            refuses(RuntimeError, "new thread", iterator.begin()._finalizer)
        assert len(ended) == 1
        assert ended[0] >= 1  # that which gathers; another may still be on its way out
        may_end.set()
        while threads():
            time.sleep(0.01)
    else:
        del iterator
        assert not ended
        may_end.set()
        while not ended:
            time.sleep(0.01)
        assert ended == [1]  # which waits for the others


def test_close():
    g = graph()
    with loader(g) as batches:
        iterator = iter(batches)
        next(iterator)
    assert threads() == 0
    refuses(ClosedError, "", lambda: next(iterator))
    refuses(ClosedError, "", lambda: iter(batches))
    batches.close()
    assert g.budget.used == 0


def test_ctrl_c_while_waiting():
    g = graph()
    blocked = threading.Event()
    release = threading.Event()

    class Slow(Sampler):
        def sample(self, seeds, epoch=0, index=0):
            if index == 2:
                blocked.set()
                release.wait(30)
            return super().sample(seeds, epoch, index)

    main = threading.main_thread().ident

    def interrupt():
        blocked.wait(30)
        # Only once the main thread waits for the blocked batch: the pipeline's third.
        pipeline = iterator.begin()._pipeline
        while not pipeline._waiting or pipeline.position != 2:
            blocked.wait(0.001)
        signal.pthread_kill(main, signal.SIGINT)
        release.set()

    batches = loader(g, sampler=Slow(g.pool))
    iterator = iter(batches)
    killer = threading.Thread(target=interrupt)
    killer.start()
    refuses(KeyboardInterrupt, "", lambda: list(iterator))
    killer.join()
    assert threads() == 0
    assert [batch.index for batch in batches] == list(range(13))


def run_within(memory: int) -> list[int] | BudgetError:
    """The batches of an epoch within ``memory``, or what the loader says against it."""
    batches = []
    try:
        for batch in loader(graph(memory), prefetch=1):
            batches.append(batch.index)
    except BudgetError as error:
        return error
    return batches


def test_a_budget_too_small_names_the_least():
    """The named memory is enough for the batch that raised it; a later, larger batch names more, and soon all is well."""
    failures = 0
    for memory in range(6_300, 22_000, 500):
        outcome = run_within(memory)
        for _ in range(4):
            if isinstance(outcome, list):
                break
            failures += 1
            assert (outcome.needed or 0) > memory
            memory = outcome.needed or 0
            outcome = run_within(memory)
        assert outcome == list(range(13))
        assert memory < 30_000
    assert failures


def test_no_thread_keeps_memory_from_another():
    """Threads that lose the processor at any moment: what two batches need is always enough."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            assert sum(1 for _batch in loader(graph(12_000), prefetch=4, threads=4)) == 13
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"features": ["x", "z"]}, ValueError, "no 'z'; it has .*'h', 'x'"),
        ({"features": ["x", "x"]}, ValueError, "twice"),
        ({"labels": "z"}, ValueError, "labels=None"),
        ({"labels": "few"}, ValueError, f"'few' has 3 entries for {N} nodes; give an entry a node, or an array"),
        ({"cache": 1.5}, ValueError, "share of the rows"),
        ({"cache": "some"}, ValueError, "not a size"),
        ({"seeds": [0.5]}, TypeError, "integers"),
        (
            {"seeds": featstore.RandomBatches([1, 2, 3], 2), "batch_size": None, "drop_last": True},
            ValueError,
            "drop_last goes with",
        ),
        ({"seeds": [[1, 2]]}, ValueError, "one-dimensional"),
        ({"seeds": [1, 0, 1]}, ValueError, "seeds of 0 and 1 alone look like a mask: 1 is at positions 0 and 2"),
        ({"seeds": [1, N]}, IndexError, f"seed {N} at position 1"),
        ({"seeds": [-1]}, IndexError, "seed -1 at position 0"),
        ({"seeds": np.array([3, 2**63], np.uint64)}, IndexError, f"seed {2**63} at position 1"),
        ({"seeds": torch.ones(3, dtype=torch.bool)}, ValueError, "mask"),
    ],
)
def test_bad_arguments(options, error, message):
    g = graph()
    refuses(error, message, lambda: loader(g, **options))
    gc.collect()
    assert g.budget.used == 0


KINDS = (list, tuple, lambda ids: np.array(ids, np.uint8), lambda ids: torch.tensor(ids).int(), lambda ids: np.array(ids, ">i8"))


@pytest.mark.parametrize("kind", [*KINDS, lambda ids: np.isin(np.arange(N), ids)])
def test_kinds_of_seeds(kind):
    (batch,) = loader(graph(), seeds=kind([2, 4, 8]), shuffle=False)
    assert batch.seeds.tolist() == [2, 4, 8]


@pytest.mark.parametrize("labels", [None, [], ()])
def test_no_features_no_labels(labels):
    batch = next(iter(loader(graph(), features=[], labels=labels)))
    assert batch.features == {}
    assert batch.labels == {}
    assert batch.y is None
    with pytest.raises(AttributeError, match="no x"):
        _ = batch.x


@pytest.mark.parametrize("names", [["y", "wide"], ("wide", "y"), ["wide"]])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_labels_by_name(names, device):
    """All that were named, unchanged; ``y`` is the first."""
    g = graph()
    g.node_data["wide"] = torch.where(torch.arange(3 * N) % 5 == 0, torch.nan, 0.5).reshape(N, 3)
    for batch in loader(g, labels=names, device=device):
        assert list(batch.labels) == list(names)
        assert batch.y is batch.labels[names[0]]
        assert {rows.device.type for rows in batch.labels.values()} == {device}
        if device == "cpu":
            for name, rows in batch.labels.items():
                assert rows.dtype == g.node_data[name].dtype
                np.testing.assert_array_equal(rows.numpy(), g.node_data[name][batch.seeds].numpy())
            there = batch.to("meta")
            assert {name: (t.device.type, t.shape) for name, t in there.labels.items()} == {
                name: ("meta", rows.shape) for name, rows in batch.labels.items()
            }
            of_seeds = batch.seed_index, batch.seed_positions, *batch.labels.values()
            parts = (batch.input_ids, batch.x, *of_seeds, *batch.blocks[0].tensors)
            assert batch.nbytes == sum(t.nbytes for t in parts)


def test_labels_by_default():
    """``y`` where there is one; only a name that was given is an error."""
    g = graph()
    assert list(next(iter(loader(g, seeds=[1, 2]))).labels) == ["y"]
    del g.node_data["y"]
    assert next(iter(loader(g, seeds=[1, 2]))).labels == {}
    refuses(ValueError, "labels: the graph has no 'y'", lambda: loader(g, seeds=[1, 2], labels="y"))
    refuses(ValueError, "labels: 'few' has 3 entries", lambda: loader(g, seeds=[1, 2], labels=["few"]))


@pytest.mark.parametrize("seeds", [torch.arange(19), np.arange(500) < 19])
def test_a_batch_that_is_left_out_is_said(seeds):
    """``drop_last`` with fewer seeds than a batch; no seeds at all are no mistake."""
    with pytest.warns(featstore.FeatstoreWarning, match="drop_last=True leaves no batch: 19 seeds are fewer than batch_size=20"):
        batches = loader(graph(), seeds=seeds, drop_last=True)
    assert list(batches) == []
    assert list(loader(graph(), seeds=seeds[:0] if len(seeds) == 19 else seeds & False, drop_last=True)) == []


def test_stats():
    g = graph()
    batches = loader(g, features=["x", "h"])
    assert batches.stats()["rows"] == 0
    g.features["x"].gather(torch.arange(5), None, {})  # not the loader's
    n = sum(len(batch.input_ids) for batch in batches)
    stats = batches.stats()
    assert stats["batches"] == 13
    assert stats["rows"] == stats["rows_loaded"] == 2 * n
    assert stats["hits"] == {"host": 0, "base": 2 * n}
    assert stats["reads"] == 2 * 13
    assert stats["bytes_requested"] == n * (6 * 4 + 3)
    assert stats["bytes_read"] == 2 * stats["bytes_requested"]
    assert stats["prefetch"] == 2
    assert set(stats["seconds"]) >= {"sample", "gather", "wait", "labels"}
    assert all(seconds >= 0 for seconds in stats["seconds"].values())
