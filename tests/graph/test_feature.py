"""FeatureStore: a tensor by NumPy's rules, bit for bit, for every dtype, width, backend and cache."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import featstore
from featstore.errors import BudgetError, ClosedError, CorruptionError
from featstore.graph.feature import FeatureStore

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.bool,
]  # fmt: skip
N = 301


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits: NaN payloads, infinities, denormals and negative zeros among them."""
    rng = np.random.default_rng(sum(shape))
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def make(path: Path, **features: torch.Tensor) -> Path:
    n = len(next(iter(features.values())))
    featstore.OutOfCoreGraph.create(path, np.zeros(n + 1, np.int64), np.empty(0, np.int64), features, progress=False).close()
    return path


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    return random_tensor((N, 7), torch.float32)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, values: torch.Tensor) -> Path:
    return make(tmp_path_factory.mktemp("data") / "g", x=values)


@pytest.fixture(scope="module", params=["plain", "pread", "static", "lru", "one row"])
def store(request: pytest.FixtureRequest, dataset: Path) -> Any:
    with featstore.open(dataset, memory="64MB", backend="pread" if request.param == "pread" else "auto") as g:
        if request.param == "static":
            g.cache("x", budget="6KB", policy="degree")
        elif request.param == "lru":
            g.cache("x", budget="6KB", policy="lru")
        elif request.param == "one row":
            g.cache("x", budget=f"{4 * N + 80}B", policy="sieve")
        yield g.features["x"]


@pytest.fixture(scope="module")
def plain(dataset: Path) -> Any:
    """A store for what is refused before anything is looked up in a cache."""
    with featstore.open(dataset, memory="64MB") as g:
        yield g.features["x"]


index_arrays = st.lists(st.integers(-N, N - 1), max_size=60).flatmap(
    lambda ids: st.sampled_from(
        [
            ids,
            np.array(ids, np.int64),
            np.array(ids, ">i4"),
            np.array(ids, np.int16),
            np.array([i % N for i in ids], np.uint16),
            np.array([i % N for i in ids], np.uint64),
            np.repeat(np.array(ids, np.int64), 2)[::2],
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(ids, dtype=torch.int32),
        ]
    )
)


@given(index=index_arrays)
def test_arrays_of_ids(store: FeatureStore, values: torch.Tensor, index: Any) -> None:
    expected = values[torch.as_tensor(np.asarray(index).astype(np.int64)).reshape(-1)]
    assert same(store[index], expected)
    assert same(store.take(index), expected)
    out = torch.empty_like(expected)
    assert store.take(index, out=out) is out
    assert same(out, expected)


@given(
    index=st.one_of(
        st.slices(N),
        st.integers(-N, N - 1),
        st.integers(-N, N - 1).map(np.int32),
        st.integers(-N, N - 1).map(torch.tensor),
        st.integers(-N, N - 1).map(np.array),
        st.just(Ellipsis),
        st.tuples(st.slices(N)),
        st.tuples(st.integers(-N, N - 1), st.just(Ellipsis)),
    )
)
def test_ints_and_slices(store: FeatureStore, values: torch.Tensor, index: Any) -> None:
    where = index
    if isinstance(index, torch.Tensor):
        where = int(index)
    expected = torch.from_numpy(values.numpy()[where].copy())
    assert same(store[index], expected)


@settings(max_examples=25)
@given(mask=st.lists(st.booleans(), min_size=N, max_size=N), kind=st.sampled_from([np.array, torch.tensor, list]))
def test_masks(store: FeatureStore, values: torch.Tensor, mask: list[bool], kind: Any) -> None:
    assert same(store[kind(mask)], values[torch.tensor(mask)])


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (4, 0), (1, 1, 5)])
def test_the_index_shape_leads(store: FeatureStore, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    ids = np.random.default_rng(0).integers(0, N, shape)
    assert same(store[ids], values[torch.as_tensor(ids)])
    assert same(store[torch.as_tensor(ids)], values[torch.as_tensor(ids)])


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ([0, N], IndexError, f"row {N} at position 1"),
        ([0, 1, -N - 1], IndexError, f"row {-N - 1} at position 2"),
        (N, IndexError, f"row {N}"),
        (-N - 1, IndexError, f"row {-N - 1}"),
        (np.array([5, np.iinfo(np.int64).min]), IndexError, "row -9223372036854775808 at position 1"),
        (np.array([5, 2**63], np.uint64), IndexError, "row 9223372036854775808 at position 1"),
        ([2**70], IndexError, f"row {2**70} at position 0"),
        ([-1, 2**63], IndexError, f"row {2**63} at position 1"),
        (np.array([1.0]), TypeError, "integers"),
        ([float("nan")], TypeError, "integers"),
        (torch.tensor([1.0]), TypeError, "integers"),
        (np.array([1j]), TypeError, "integers"),
        (["a"], TypeError, "integers"),
        ("a", TypeError, "integers"),
        ([None], TypeError, "integers"),
        ([[1], [2, 3]], TypeError, "index array"),
        (1.5, TypeError, "integers"),
        ({"a": 1}, TypeError, "integers"),
        (np.zeros(N - 1, bool), IndexError, "mask"),
        (np.zeros((N, 1), bool), IndexError, "mask"),
        (True, IndexError, "a single truth value is no mask"),
        (np.array(True), IndexError, "a single truth value is no mask"),
        ([torch.tensor([0]), torch.tensor([0, 1])], TypeError, "not an index array"),
        ([torch.tensor(0), 1], TypeError, "not an index array"),
        ((0, 7), IndexError, "7 is out of range for axis 1"),
        ((..., [0, -8]), IndexError, "-8 is out of range for axis 1"),
        ((..., ...), IndexError, "one ellipsis"),
        ((0, slice(None), slice(None)), IndexError, "3 axes are indexed, and there are 2"),
        ((..., 0, slice(None), slice(None)), IndexError, "axes are indexed, and there are 2"),
        ((N, slice(None)), IndexError, f"row {N}"),
    ],
)
def test_what_is_no_index(plain: FeatureStore, index: Any, error: type[Exception], words: str) -> None:
    before = plain.stats()["reads"]
    with pytest.raises(error if error is not IndexError else (IndexError, TypeError), match=words):
        plain[index]
    assert plain.stats()["reads"] == before  # before any I/O


def test_it_is_a_dataset_that_is_not_added_to(plain: FeatureStore) -> None:
    """Datasets are joined by ``+``, which of a tensor would be a sum."""
    assert isinstance(plain, Dataset)
    for add in (lambda: plain + 1, lambda: plain + plain, lambda: plain + plain[:]):
        with pytest.raises(TypeError, match="is not computed with"):
            add()


def test_blocks_have_a_row_at_least(plain: FeatureStore) -> None:
    for rows, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="rows must be"):
            plain.blocks(rows)
    assert [(first, len(block)) for first, block in plain.blocks(1)] == [(row, 1) for row in range(N)]


def test_out_must_fit(plain: FeatureStore) -> None:
    before = plain.stats()["reads"]
    for out, error in [
        (torch.empty(3, 7, dtype=torch.float64), TypeError),
        (np.empty((3, 7), np.float32), TypeError),
        (torch.empty(2, 7), ValueError),
        (torch.empty(3, 8), ValueError),
        (torch.empty(7, 3).T, ValueError),
        (torch.empty(6, 7)[::2], ValueError),
        (torch.empty(3, 7, device="meta"), ValueError),
        (torch.empty(3, 7, requires_grad=True), ValueError),
    ]:
        with pytest.raises(error, match="out must"):
            plain.take([1, 2, 3], out=out)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        plain.take(3)
    with pytest.raises(ValueError, match="coalesce_gap"):
        plain.take([1], coalesce_gap=-1)
    assert plain.stats()["reads"] == before


def test_memory_that_cannot_be_written_is_refused(plain: FeatureStore, tmp_path: Path) -> None:
    (tmp_path / "frozen").write_bytes(b"\0" * 28)
    frozen = np.memmap(tmp_path / "frozen", np.float32, "r", shape=(1, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, once a process
        out = torch.from_numpy(frozen)
    with pytest.raises(ValueError, match="read-only"):
        plain.take([1], out=out)


def test_empty_reads_nothing(store: FeatureStore) -> None:
    before = store.stats()
    for index in ([], slice(5, 5), np.zeros(N, bool), np.empty((0, 3), np.int64), torch.empty(0, dtype=torch.long)):
        assert store[index].numel() == 0
    after = store.stats()
    assert (after["reads"], after["bytes_read"]) == (before["reads"], before["bytes_read"])


@pytest.mark.parametrize("row", [(), (1,), (5,), (2, 3), (1500,)], ids=str)
def test_every_dtype_and_width(tmp_path: Path, row: tuple[int, ...]) -> None:
    of_dtype = {str(dtype).removeprefix("torch."): random_tensor((60, *row), dtype) for dtype in DTYPES}
    with featstore.open(make(tmp_path / "g", **of_dtype), memory="64MB") as g:
        for name, values in of_dtype.items():
            x = g.features[name]
            assert (x.shape, x.dtype, x.ndim, len(x), x.nbytes) == (values.shape, values.dtype, values.ndim, 60, values.nbytes)
            ids = torch.randint(-60, 60, (100,))
            assert same(x[ids], values[ids]), name
            assert same(x[:], values), name
            assert same(x[7], values[7]), name


def test_torch_functions(store: FeatureStore, values: torch.Tensor) -> None:
    ids = torch.tensor([5, 0, 5, 300])
    assert same(torch.index_select(store, 0, ids), values[ids])
    assert same(torch.index_select(store, -2, ids), values[ids])
    out = torch.empty(4, 7)
    assert torch.index_select(store, 0, ids, out=out) is out
    assert same(out, values[ids])
    assert same(torch.nn.functional.embedding(ids.reshape(2, 2), store), values[ids.reshape(2, 2)])
    assert same(torch.nn.functional.embedding(ids, store, padding_idx=0), values[ids])
    for call in (
        lambda: torch.add(store, 1),
        lambda: torch.matmul(store, torch.zeros(7)),
        lambda: torch.index_select(store, 1, ids),
        lambda: torch.index_select(store, 0, ids.float()),
        lambda: torch.nn.functional.embedding(ids, store, max_norm=1.0),
        lambda: torch.nn.functional.embedding(torch.ones(N, dtype=torch.bool), store),
    ):
        with pytest.raises(TypeError):
            call()
    for negative in (torch.tensor([3, -1]), torch.tensor([3, -1], dtype=torch.int32)):
        for table in (values, store):  # as torch itself
            with pytest.raises(IndexError):
                torch.index_select(table, 0, negative)
            with pytest.raises(IndexError):
                torch.nn.functional.embedding(negative, table)


def test_sequence_and_array_protocols(store: FeatureStore, values: torch.Tensor) -> None:
    assert same(torch.stack(list(store)), values)
    assert np.asarray(store).tobytes() == values.numpy().tobytes()
    assert np.asarray(store[:0], np.float64).dtype == np.float64
    assert (store.size(), store.size(0), store.dim(), store.numel()) == (values.shape, N, 2, values.numel())
    assert "shape=(301, 7)" in repr(store)


def test_a_store_is_not_searched(plain: FeatureStore) -> None:
    with pytest.raises(TypeError, match="searched"):
        assert 1.0 in plain


@pytest.mark.shares_resources  # the store, and so its threads, outlive the test
def test_take_async(store: FeatureStore, values: torch.Tensor) -> None:
    futures = [store.take_async([i, i + 1]) for i in range(20)]
    assert all(isinstance(future, Future) for future in futures)
    for i, future in enumerate(futures):
        assert same(future.result(), values[i : i + 2])
    with pytest.raises(IndexError, match="row 999"):
        store.take_async([999])


@pytest.mark.shares_resources
def test_the_ids_of_take_async_may_be_used_again(store: FeatureStore, values: torch.Tensor) -> None:
    for kind in (torch.as_tensor, np.asarray):
        for k in range(30):
            ids = kind(np.arange(k, k + 250, dtype=np.int64) % N)
            future = store.take_async(ids)
            ids[:] = 1 << 40
            assert same(future.result(), values[torch.arange(k, k + 250) % N])


def test_a_single_element_of_any_stride(tmp_path: Path) -> None:
    with featstore.open(make(tmp_path / "g", x=torch.arange(N)), memory="64MB") as g:
        out = torch.empty(4, dtype=torch.int64)
        assert g.features["x"].take([3], out=out[1::4]).item() == 3
        assert out[1] == 3


@pytest.mark.parametrize("policy", [None, "lru", "degree"])
def test_ids_in_the_memory_of_out(tmp_path: Path, policy: str | None) -> None:
    values = torch.arange(N).flip(0)
    with featstore.open(make(tmp_path / "g", x=values), memory="64MB") as g:
        if policy is not None:
            g.cache("x", "4KB", policy=policy)
        for n in (1, 100, 5000):
            memory = torch.empty(n + 1, dtype=torch.int64)
            for ids, out in ((memory[:n], memory[:n]), (memory[1:], memory[:n]), (memory[:n], memory[1:])):
                ids.copy_(torch.arange(n) * 7 % N)
                g.features["x"].take(ids, out=out)
                assert torch.equal(out, values[torch.arange(n) * 7 % N])
                assert torch.equal(g.features["x"][:], values)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")  # on one core
@pytest.mark.shares_resources  # the resource tracker of multiprocessing, which stays
@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize("method", ["fork", "forkserver"])  # which pickles as spawn does, but need not import torch
def test_dataloader_workers(dataset: Path, values: torch.Tensor, method: str) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        x = g.features["x"]
        assert same(x[:5], values[:5])  # so that the parent's queue exists
        n_workers = 2 if method == "fork" else 1
        as_dataset = DataLoader(x, batch_size=50, num_workers=n_workers, multiprocessing_context=method)
        assert same(torch.cat(list(as_dataset)), values)
        if method == "fork":
            as_collate = DataLoader(range(N), batch_size=50, collate_fn=x, num_workers=1, multiprocessing_context=method)
            assert same(torch.cat(list(as_collate)), values)
        assert same(x[:], values)  # the parent is unharmed


def test_pickle_is_path_and_options(dataset: Path, values: torch.Tensor) -> None:
    with featstore.open(dataset, memory="64MB", backend="pread", verify="off") as g:
        data = pickle.dumps(g.features["x"])
        assert len(data) < 1000
        other = pickle.load(io.BytesIO(data))
        assert same(other[:], values)
        assert other.stats()["backend"] == "pread"


def test_stats_say_how_and_why(dataset: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        stats = g.features["x"].stats()
        assert stats["backend"] == "io_uring"
        assert stats["reason"]
        assert stats["mode"].startswith(("direct", "buffered: "))
        g.features["x"][[1, 2]]
        after = g.features["x"].stats()
        assert (after["rows_loaded"], after["bytes_requested"]) == (stats["rows_loaded"] + 2, stats["bytes_requested"] + 56)


def test_closed(dataset: Path) -> None:
    g = featstore.open(dataset, memory="64MB")
    x = g.features["x"]
    g.close()
    for ids in ([1], []):
        with pytest.raises(ClosedError):
            x[ids]
    g.close()
    for used in (False, True):
        g = featstore.open(dataset, memory="64MB")
        x = g.features["x"]
        if used:
            x.take_async([1]).result()
        g.close()
        with pytest.raises(ClosedError):
            x.take_async([1])


def test_a_cache_replaced_beside_a_gather(dataset: Path, values: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        x = g.features["x"]
        for policy in ("degree", "lru"):
            for new in ("sieve", None):
                g.cache("x", budget="6KB", policy=policy)
                old = x.cache
                plan = old.plan

                def replacing(rows: Any, array: Any, new: str | None = new, plan: Any = plan) -> Any:
                    monkeypatch.undo()
                    g.cache("x", budget=0 if new is None else "4KB", policy=new or "lru")
                    return plan(rows, array)

                monkeypatch.setattr(old, "plan", replacing)
                assert same(x[::3], values[::3])
                assert (x.cache is None) == (new is None)
                assert same(x[::3], values[::3])


def test_the_gap_counts_behind_a_cache(tmp_path: Path) -> None:
    values = random_tensor((64, 1024), torch.float32)  # a page a row
    with featstore.open(make(tmp_path / "g", x=values), memory="64MB") as g:
        x = g.features["x"]
        for gap in (0, 4096):
            g.cache("x", budget="100KB", policy="lru")
            before = x.stats()["reads"]
            assert same(x.take(range(0, 64, 2), coalesce_gap=gap), values[::2])
            reads = x.stats()["reads"] - before
            assert reads == 32 if gap == 0 else reads <= 4


def test_a_child_has_the_whole_budget_for_buffers(tmp_path: Path) -> None:
    values = random_tensor((2000, 1024), torch.float32)
    with featstore.open(make(tmp_path / "g", x=values), memory="14MB") as g:
        x = g.features["x"]
        kept = x[:2000]
        with g.pool._lock:  # as another thread might
            pid = os.fork()
            if pid == 0:
                g.pool.trim()
                os._exit(0 if same(x[:2000], kept) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        del kept
        assert same(x[:2000], values)


def test_memory_handed_out_goes_after_close(dataset: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        pool = g.pool
        tensor = pool.tensor((1 << 20,), torch.uint8)
        returned = pool._returned
    assert pool._returned is not returned
    del tensor
    assert pool._returned.empty()


def test_an_error_leaves_the_cache_right(tmp_path: Path) -> None:
    values = torch.arange(40_000, dtype=torch.float32).reshape(4000, 10)
    path = make(tmp_path / "g", x=values)
    data_file = max((p for p in path.rglob("*") if p.is_file() and not p.name.endswith((".sums", ".mdb"))), key=os.path.getsize)
    with featstore.open(path, memory="64MB") as g:
        g.cache("x", budget="1MB", policy="lru")
        x = g.features["x"]
        assert same(x[:100], values[:100])
        with open(data_file, "r+b") as file:
            file.seek(4096 + 20 * 4096 + 9)
            file.write(b"\xff")
        with pytest.raises(CorruptionError):
            x[:4000]
        good = torch.cat([torch.arange(0, 1500), torch.arange(3000, 4000)])
        assert same(x[good], values[good])
        assert same(x[good], values[good])


def test_pooled_memory_comes_back_with_the_last_view(tmp_path: Path) -> None:
    values = random_tensor((5000, 256), torch.float32)
    with featstore.open(make(tmp_path / "g", x=values), memory="24MB") as g:
        x = g.features["x"]
        ids = torch.arange(4000)
        first = x[ids]
        view = first.numpy()[10:20]
        address = first.data_ptr()
        del first
        again = x[ids]
        assert again.data_ptr() != address  # the view still holds it
        assert view.tobytes() == values[10:20].numpy().tobytes()
        del view
        third = x[ids]
        assert third.data_ptr() == address
        held = [third, again]
        while g.budget.available > 5 << 20:
            held.append(x[ids])
            assert len(held) < 10  # they count
        with pytest.raises(BudgetError, match="batch buffers") as caught:
            x[ids]
        assert caught.value.needed > g.budget.total
        held.clear()
        assert same(x[ids], values[ids])
        assert g.budget.peak <= g.budget.total
