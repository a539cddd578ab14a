"""Spill files, beside lists: values come back in the order of writing; files go when they are read, and with their owner."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.creation.extsort import PairSorter
from featstore.errors import CorruptionError
from featstore.idmaps.numbering import SpilledNumbers
from featstore.sampling import orderedweights
from featstore.sampling.orderedweights import weights_in_order
from featstore.storage import spill
from featstore.storage.spill import SpillFile, SpillFiles
from tests.sampling.test_orderedweights import ONE, create

RECORD = np.dtype([("at", "<i8"), ("hashes", "<u8", 2)])
INT = np.dtype("<i4")


@given(
    dtype=st.sampled_from([INT, np.dtype("<f8"), RECORD]),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.booleans()), max_size=30),
    at_once=st.integers(1, 12),
)
def test_equal_lists_in_any_order_of_writes_and_reads(
    tmp_path_factory: Any, dtype: np.dtype[Any], steps: list[tuple[int, int, bool]], at_once: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("spill"), np.random.default_rng(0)
    with SpillFiles(str(folder), dtype, 3) as files:
        expected: list[list[bytes]] = [[], [], []]
        for number, n, is_read in steps:
            if is_read:
                n = min(n, len(expected[number]))
                if n:
                    assert [each.tobytes() for each in files[number].take(n)] == expected[number][:n]
                    del expected[number][:n]
            else:
                values = np.frombuffer(rng.bytes(n * dtype.itemsize), dtype)
                files[number].append(values)
                expected[number] += [each.tobytes() for each in values]
        for file, values_left in zip(files, expected, strict=True):
            blocks = list(file.drain(at_once))
            assert all(len(block) == at_once for block in blocks[:-1])
            assert [each.tobytes() for block in blocks for each in block] == values_left
            assert not os.path.exists(file.path) or not file.n_written
    assert not list(folder.iterdir())


def test_values_of_any_form_are_converted(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 1) as files:
        files[0].append(np.arange(10)[::3])
        files[0].append(np.empty(0, np.int64))
        assert files[0].take(4).tolist() == [0, 3, 6, 9]
        assert files[0].take(0).tolist() == []


def test_files_that_another_object_wrote_are_read_and_written_on(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 1) as files:
        files[0].append(np.arange(5))
        other = SpillFile(files[0].path, INT, 5)
        other.append(np.arange(5, 8))
        assert np.concatenate(list(other.drain(3))).tolist() == [*range(8)]
        assert not list(tmp_path.iterdir())


def test_all_files_go_with_their_owner(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 300) as files, SpillFiles(str(tmp_path), INT, 2) as others:
        before = len(os.listdir("/proc/self/fd"))
        for file in files:
            file.append(np.arange(3))
        assert len(os.listdir("/proc/self/fd")) == before
        others[1].append(np.arange(3))
        assert len(list(tmp_path.iterdir())) == 301
        next(files[7].drain(1))
        next(iter(files[8].drain(3)))
        files.close()
        assert [str(each) for each in tmp_path.iterdir()] == [others[1].path]
        files.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    with SpillFiles(str(tmp_path), INT, 1) as files:
        files[0].append(np.arange(9))
        os.truncate(files[0].path, 20)
        with pytest.raises(CorruptionError, match="the file ends 4 bytes early"):
            list(files[0].drain(3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at_once", [1, 3, 9])
@pytest.mark.parametrize("again", [False, True])
def test_values_that_are_not_those_written(tmp_path: Path, at_once: int, again: bool) -> None:
    """Each bit of a file, whoever reads it: a file that is whole is read, and one of another's digest."""
    with SpillFiles(str(tmp_path), INT, 1) as files:
        for first in (0, 4):
            files[0].append(np.arange(first, first + 4 + first // 4))
        whole, digest = Path(files[0].path).read_bytes(), files[0].digest
        for bit in range(8 * len(whole) + 1):
            data = bytearray(whole)
            if bit < 8 * len(whole):
                data[bit // 8] ^= 1 << bit % 8
            Path(files[0].path).write_bytes(data)
            file = SpillFile(files[0].path, INT, 9, digest)
            if not again:
                file = SpillFile(str(tmp_path / "other"), INT)
                file.append(np.frombuffer(whole, INT))
                Path(file.path).write_bytes(data)
            if data == whole:
                assert np.concatenate([*file.drain(at_once)]).tolist() == [*range(9)]
                continue
            with pytest.raises(CorruptionError, match="not what was written") as caught:
                list(file.drain(at_once))
            assert caught.value.path == file.path
            file.remove()


def weights(folder: Path) -> Any:
    with featstore.open(folder / "g", memory="32MiB", threads=1) as g:
        return np.concatenate(
            [*weights_in_order(g.edge_features["w"], g.types.edges[ONE], g.topology.edge_ids, folder, g.budget)]
        )


def pairs(folder: Path) -> Any:
    """Sort so many pairs in so little memory that their files are split."""
    dst, src = np.random.default_rng(3).integers(0, 20, (2, 120))
    with PairSorter(20, 1 << 20, folder, 4) as sorter:
        sorter.block_pairs, sorter._cap = 30, 9
        sorter.add(np.sort(dst), src)
        return np.concatenate([np.stack(each) for each in sorter.sorted()], axis=1)  # type: ignore[arg-type]


def names(folder: Path) -> Any:
    rng = np.random.default_rng(4)
    hashes = rng.integers(0, 1 << 63, (60, 2)).astype(np.uint64)[rng.integers(0, 60, 120)]
    hashes[:, 0] <<= np.uint64(1)  # the first bits divide them among files
    with SpilledNumbers(str(folder), 1 << 20) as numbers, PairSorter(120, 1 << 20, folder) as sorter:
        numbers.collect(hashes)
        numbers.number(sorter.add, sorter.sorted)
        found = [numbers.add(hashes)[0], *(each for both in numbers.sorted_hashes(numbers.n) for each in both)]
        return np.concatenate([each.view(np.int64) for each in found])


@pytest.mark.parametrize("user", [weights, pairs, names])
def test_a_damaged_file_is_found_by_whoever_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: Any) -> None:
    """A bit of one write flips before it is read: an id may lie beyond its range then, or be another one within it."""
    create(tmp_path / "g", 900, 1)
    for name, value in (("_IDS_A_PART", 4), ("_MOST_IDS", 7), ("_MEMORY_FRACTION", 0)):
        monkeypatch.setattr(orderedweights, name, value)
    expected, append, written = user(tmp_path), SpillFile.append, list[str]()
    for number in range(20):
        rng, n_left = random.Random(number), [random.Random(number).randrange(60)]

        def damaging(
            file: SpillFile, values: Any, rng: random.Random = rng, n_left: list[int] = n_left, append: Any = append
        ) -> None:
            before = file.n_written
            append(file, values)
            n_left[0] -= 1
            if n_left[0] == -1 and len(values):
                at, width = Path(file.path), file.dtype.itemsize
                data = bytearray(at.read_bytes())
                data[rng.randrange(before * width, len(data))] ^= 1 << rng.randrange(8)
                at.write_bytes(data)
                written.append(file.path)

        with monkeypatch.context() as patch:
            patch.setattr(SpillFile, "append", damaging)
            n = len(written)
            try:
                assert np.array_equal(user(tmp_path), expected), number
                assert len(written) == n
            except CorruptionError as error:
                assert error.path == written[-1]
        assert os.listdir(tmp_path) == ["g"]
    assert len(written) > 8


def test_a_write_that_fails_late_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some file systems report it when the file is closed."""

    def close_fd(fd: int, path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    with SpillFiles(str(tmp_path), INT, 2) as files:
        files[1].append(np.arange(2))
        with monkeypatch.context() as patch:
            patch.setattr(spill, "close_fd", close_fd)
            with pytest.raises(OSError, match="Input/output error") as raised:
                files[1].append(np.arange(2))
        assert raised.value.filename == files[1].path
        assert raised.value.filename.endswith("-1.tmp")
        assert files[1].n_written == 2
        files[1].append(np.arange(5, 9))  # in its place
        assert np.concatenate(list(files[1].drain(4))).tolist() == [0, 1, 5, 6, 7, 8]
        with monkeypatch.context() as patch:
            patch.setattr(spill, "close_fd", close_fd)
            with pytest.raises(OSError, match="Input/output error"):
                files[0].append(np.arange(2))
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
