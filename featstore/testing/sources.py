"""The contract of row sources, as a test suite for authors of row sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from featstore.errors import ClosedError
from featstore.gather.plan import Addresses
from featstore.gather.sources import RowSource
from featstore.storage.rowfile import ReadStats

__all__ = ["RowSourceContract"]

Uint8s = npt.NDArray[np.uint8]
WIDTHS = (1, 400, 4096, 5000)
N = 700
_out_of_range = pytest.raises((IndexError, ValueError))


class RowSourceContract(ABC):
    """Tests of a row source: derive a class named ``Test…`` from it, and write :meth:`make`.

    Attributes
    ----------
    absent : type of OSError, optional
        The error of gathers if the rows are not here: only the attributes of such a source are tested.
    """

    absent: type[OSError] | None = None

    @abstractmethod
    def make(self, rows: Uint8s, folder: Path) -> RowSource:
        """Make a new source of ``rows``, shape (n, row_bytes), that may keep files in the empty ``folder``."""

    def _made(self, folder: Path, row_bytes: int = 400, seed: int = 0) -> tuple[Uint8s, RowSource]:
        rows = np.random.default_rng(seed).integers(0, 256, (N, row_bytes), dtype=np.uint8)
        folder.mkdir()
        return rows, self.make(rows, folder)

    @pytest.mark.parametrize("row_bytes", WIDTHS)
    def test_rows_come_where_they_are_wanted(self, row_bytes: int, tmp_path: Path) -> None:
        """Check every byte of the rows at any addresses, no other byte of the output, and the reported reads."""
        rows, source = self._made(tmp_path / "rows", row_bytes)
        assert source.row_bytes == row_bytes
        assert source.mode
        assert source.path
        rng, cost, first = np.random.default_rng(1), ReadStats(), 0
        ids = rng.integers(0, N, 300)
        wanted: list[Addresses] = [ids, ids.astype(np.int32), np.sort(ids), ids[:0], range(N), range(5, 90), range(7, 7)]
        if source.in_order:
            wanted = [range(N)] * N
        for number, addresses in enumerate(wanted):
            taken = range(source.n_rows) if source.in_order else addresses
            if source.in_order and not taken:
                assert first == N, "the rows have ended too early"
                break
            k = len(taken)
            positions = None if number % 2 else rng.permutation(k + 3)[:k]
            out = np.full((k + 3, row_bytes), 0xA5, np.uint8)
            want = out.copy()
            want[slice(k) if positions is None else positions] = rows[first:][np.asarray(taken, np.int64)]
            if self.absent is not None:
                with pytest.raises(self.absent, match=source.path):
                    source.gather(taken, out, positions)
                continue
            cost.add(source.gather(taken, out, positions, (None, 0, 1 << 20)[number % 3]))
            assert np.array_equal(out, want)
            first += k * source.in_order
        assert source.stats == cost
        source.close()

    def test_what_is_no_row_is_refused(self, tmp_path: Path) -> None:
        """Check that wrong addresses are refused, and that right calls still work afterwards."""
        rows, source = self._made(tmp_path / "rows")
        n = source.n_rows
        out = np.zeros((n + 1, 400), np.uint8)
        wrong: list[Addresses] = [range(n + 1), np.arange(n + 1)]
        if not source.in_order:
            wrong += [range(n - 1, n + 1), range(-1, 3), np.array([0, n]), np.array([-1, 2]), np.array([1 << 40])]
        for addresses in wrong if self.absent is None else []:
            with _out_of_range:
                source.gather(addresses, out)
        if self.absent is None and not source.in_order:  # rows that come once are consumed by then
            with _out_of_range:
                source.gather(np.arange(2), out, np.array([0, len(out)]))
        if self.absent is None:
            source.gather(range(n), out)
            assert np.array_equal(out[:n], rows[:n])
        source.close()

    def test_a_closed_source_says_so(self, tmp_path: Path) -> None:
        _, source = self._made(tmp_path / "rows")
        source.check_open()
        n = source.n_rows
        source.close()
        source.close()
        for addresses in (range(n), np.arange(n)):
            with pytest.raises(self.absent or ClosedError):
                source.gather(addresses, np.zeros((n, 400), np.uint8))

    def test_identities_differ(self, tmp_path: Path) -> None:
        """Check that fingerprints of different sources differ, so that files made of one do not pass for another's."""
        sources = [self._made(tmp_path / str(seed), seed=seed)[1] for seed in range(2)]
        assert sources[0].fingerprint != sources[1].fingerprint or not sources[0].fingerprint
        for source in sources:
            source.close()

    def test_threads_gather_at_once(self, tmp_path: Path) -> None:
        rows, source = self._made(tmp_path / "rows")
        is_ordered = source.in_order or self.absent is not None

        def is_right(seed: int) -> bool:
            ids = np.random.default_rng(seed).integers(0, N, 50)
            out = np.zeros((50, 400), np.uint8)
            source.gather(ids, out)
            return np.array_equal(out, rows[ids])

        with ThreadPoolExecutor(4) as threads:
            assert is_ordered or all(threads.map(is_right, range(100)))
        source.close()
