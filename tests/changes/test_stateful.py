"""Random changes, against NumPy arrays: whatever is added, updated and removed, each reader has the commit that it opened."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import featstore
from featstore.errors import BusyError
from tests.campaigns.checks import report

N, E = 1100, 2000
EDGE = ("_", "_", "_")
NAMES = st.sampled_from(["a", "b", "c"])
WIDTHS = {"a": (np.float32, (250,)), "b": (np.int16, ()), "c": (np.uint8, (4096, 1))}


class Changes(RuleBasedStateMachine):
    """One handle writes; others are opened in between and keep what they saw."""

    form: dict[str, Any] = {}  # noqa: RUF012
    updates_a_step = 1
    n_updates = n_reads = 0  # of all examples

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.rng, self.n = np.random.default_rng(0), N
        self.now: dict[str, dict[str, np.ndarray]] = {"features": {}, "edge_features": {}, "node_data": {}}
        edges = self.rng.integers(0, N, (2, E))
        featstore.OutOfCoreGraph.from_edge_index(self.folder / "g", edges, N, progress=False, **self.form).close()
        self.g = self.open()
        self.readers: list[tuple[Any, dict[str, dict[str, np.ndarray]]]] = []

    def open(self) -> Any:
        return featstore.open(self.folder / "g", memory="32MiB", backend="pread")

    def rows(self, name: str, n: int) -> np.ndarray:
        dtype, width = WIDTHS[name]
        return self.rng.integers(0, 100, (n, *width)).astype(dtype)

    def of(self, of: str) -> dict[str, Any]:
        return {"type": EDGE} if of == "edge_features" else {}

    @rule(of=st.sampled_from(["features", "edge_features", "node_data"]), name=NAMES, overwrite=st.booleans())
    def add(self, of: str, name: str, overwrite: bool) -> None:
        rows = self.rows(name, E if of == "edge_features" else self.n)
        other = {"features": "node_data", "node_data": "features"}.get(of, "")
        taken = name in self.now.get(other, {}) or (name in self.now[of] and not overwrite)
        add = self.g.add_data if of == "node_data" else self.g.add_feature
        if taken:
            with pytest.raises(ValueError, match=name):
                add(name, rows, overwrite=overwrite, progress=False, **self.of(of))
            return
        add(name, rows, overwrite=overwrite, progress=False, **self.of(of))
        self.now[of] = {**self.now[of], name: rows}

    @rule(
        of=st.sampled_from(["features", "edge_features", "node_data"]),
        name=NAMES,
        n=st.sampled_from([1, 2, 5, 40, 600]),
        begin=st.integers(0, N - 1),
        together=st.booleans(),
    )
    def update(self, of: str, name: str, n: int, begin: int, together: bool) -> None:
        if name not in self.now[of]:
            return
        with self.reading():
            for _ in range(self.updates_a_step):
                rows = self.now[of][name].copy()
                ids = (begin + np.arange(n)) % len(rows) if together else self.rng.integers(-len(rows), len(rows), n)
                new = self.rows(name, n)
                rows[ids] = new
                if of == "node_data":
                    self.g.update_data(name, ids, new, progress=False)
                else:
                    getattr(self.g, of)[name].update(ids, new, progress=False)
                self.now[of] = {**self.now[of], name: rows}
                type(self).n_updates += 1

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let a thread compare gathers of the last reader with its commit, until the block ends, and once more."""
        if not self.readers:
            yield
            return
        (reader, seen), ended, rng = self.readers[-1], threading.Event(), np.random.default_rng(len(self.readers))

        def read() -> None:
            while True:
                is_last = ended.is_set()
                for of in ("features", "edge_features"):
                    for name, rows in seen[of].items():
                        ids = rng.integers(0, len(rows), 100)
                        assert np.array_equal(getattr(reader, of)[name][ids].numpy(), rows[ids])
                type(self).n_reads += 1
                if is_last:
                    return

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(read)
            try:
                yield
            finally:
                ended.set()
            found.result()

    @rule(of=st.sampled_from(["features", "edge_features", "node_data"]), name=NAMES)
    def remove(self, of: str, name: str) -> None:
        remove = self.g.remove_data if of == "node_data" else self.g.remove_feature
        if name not in self.now[of]:
            with pytest.raises(KeyError, match=name):
                remove(name, **self.of(of))
            return
        remove(name, **self.of(of))
        self.now[of] = {key: rows for key, rows in self.now[of].items() if key != name}

    @precondition(lambda self: self.n < 4 * N)
    @rule(n=st.sampled_from([1, 3, 50, 900]))
    def append(self, n: int) -> None:
        given = {of: {name: self.rows(name, n) for name in self.now[of]} for of in ("features", "node_data")}
        found = self.g.append_nodes(n, given["features"], given["node_data"], progress=False)
        assert found == range(self.n, self.n + n)
        if self.readers or n == 3:  # this handle has the old nodes until it is opened again
            with pytest.raises(BusyError, match="open it again"):
                self.g.add_data("d", [1], progress=False)
        self.g.close()
        self.g, self.n = self.open(), self.n + n
        for of, new in given.items():
            self.now[of] = {name: np.concatenate([rows, new[name]]) for name, rows in self.now[of].items()}

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def open_another(self) -> None:
        self.readers.append((self.open(), {of: dict(rows) for of, rows in self.now.items()}))

    @precondition(lambda self: self.readers)
    @rule()
    def close_one(self) -> None:
        self.readers.pop(0)[0].close()

    @rule()
    def reopen(self) -> None:
        self.g.close()
        self.g = self.open()

    @rule()
    def verify(self) -> None:
        self.g.verify(progress=False)

    @precondition(lambda self: self.readers)
    @rule(name=NAMES)
    def an_old_handle_changes_nothing_that_it_has_not_seen(self, name: str) -> None:
        reader, seen = self.readers[0]
        rows = seen["features"].get(name)
        if rows is not None and self.now["features"].get(name) is not rows:
            with pytest.raises(BusyError, match="open it again"):
                reader.features[name].update([0], rows[:1], progress=False)

    @invariant()
    def every_reader_has_its_commit(self) -> None:
        assert self.g.num_nodes == self.n
        for g, expected in [(self.g, self.now), *self.readers]:
            for of, fields in expected.items():
                found = getattr(g, of)
                assert set(found) == set(fields)
                for name, rows in fields.items():
                    ids = self.rng.integers(0, len(rows), 30)
                    assert np.array_equal(found[name][ids].numpy(), rows[ids])
                    assert np.array_equal(found[name][-70:].numpy(), rows[-70:])

    def teardown(self) -> None:
        for reader, _ in self.readers:
            reader.close()
        self.g.close()
        shutil.rmtree(self.folder)


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


class InChunks(Changes):
    form: dict[str, Any] = {"topology": "chunked", "chunk_bytes": 4096}  # noqa: RUF012


TestChangesInChunks = InChunks.TestCase
TestChangesInChunks.settings = settings(max_examples=4, stateful_step_count=25, deadline=None)


class ManyUpdates(Changes):
    updates_a_step = 30

    @initialize()
    def begin_with_fields(self) -> None:
        self.add("features", "a", False)
        self.add("edge_features", "b", False)
        self.add("node_data", "c", False)
        self.open_another()


@pytest.mark.stress
class TestManyChanges(ManyUpdates.TestCase):
    """More than 10,000 updates, most of them beside a thread that reads."""

    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)

    @classmethod
    def tearDownClass(cls) -> None:
        report("random changes", updates=ManyUpdates.n_updates, reads_beside=ManyUpdates.n_reads)
        assert ManyUpdates.n_updates >= 10_000
        assert ManyUpdates.n_reads >= 10_000
