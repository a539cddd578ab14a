"""Files of sections that say what is not so, under right checksums: an error with the file's name, or what was stored."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from featstore.budget import Budget
from featstore.errors import CorruptionError
from featstore.gather.buffers import BufferPool
from featstore.gather.plan import Tier
from featstore.pack.record import read_record, write_record
from featstore.plan.planfile import PlanFile
from featstore.plan.samples import SampleFile, SampleWriter
from featstore.sampling.batch import Block, SampledBatch
from featstore.storage.format import DTYPES, file_seed
from featstore.storage.sections import SectionFile, SectionWriter

Arrays = list[npt.NDArray[Any]]
WORDS = st.integers(-3, 12) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**16, 2**16 + 2, 2**31, 2**62])
UNSIGNED = st.integers(0, 40) | st.integers(0, 2**64 - 1)
KINDS = st.sampled_from([np.int32, np.int64, np.uint64, np.float32, np.float64])
MEMORY = 1 << 20  # what is made of such a file has room there


def small(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Make an array, which cannot be a large one."""
    assert int(np.prod(shape)) * np.dtype(dtype).itemsize <= MEMORY
    return np.empty(shape, dtype)


TAIL = struct.Struct("<8sII32s16sQQQ")  # docs/format.md
WIDTHS = {code: width for name, (code, width) in DTYPES.items() if name != "bfloat16"} | {64: 8}
CODES = st.sampled_from(sorted(WIDTHS))
ENTRIES = st.tuples(UNSIGNED, UNSIGNED, CODES | UNSIGNED)  # offset, items, dtype


@st.composite
def indices(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int]:
    """Entries of an index, and the bytes before it: arrays that follow one another, those with one entry changed, and any."""
    if draw(st.booleans()):
        return draw(st.lists(ENTRIES, max_size=3)), draw(st.integers(0, 200))
    entries, end = [], 0
    for items, code in draw(st.lists(st.tuples(st.integers(0, 9), CODES), max_size=4)):
        entries.append((end, items, code))
        end += items * WIDTHS[code]
    if entries and draw(st.booleans()):
        changed = draw(st.integers(0, len(entries) - 1))
        entries[changed] = draw(st.sampled_from(entries) | ENTRIES)
    return entries, end + draw(st.sampled_from((0, 0, 0, 1)))


@given(drawn=indices())
def test_any_index_under_right_checksums(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[tuple[int, int, int]], int]
) -> None:
    entries, filled = drawn
    path, file_id = tmp_path_factory.mktemp("index") / "file", bytes(range(16))
    seed, data, index = file_seed("test", file_id, 0), bytes(range(filled)), b""
    for number, (offset, items, code) in enumerate(entries):
        part = data[offset : offset + items * WIDTHS.get(code, 0)]
        index += struct.pack("<4Q", offset, items, code, xxhash.xxh3_64_intdigest(part, (seed + number) % 2**64))
    index_sum = xxhash.xxh3_64_intdigest(index, (seed + 2**64 - 1) % 2**64)
    tail = TAIL.pack(b"FSSECT\0\0", 1, 0x01020304, b"test", file_id, len(entries), filled, index_sum)
    path.write_bytes(data + index + tail + struct.pack("<Q", xxhash.xxh3_64_intdigest(tail)))
    end, is_good = 0, True
    for offset, items, code in entries:
        is_good = is_good and offset == end and code in WIDTHS
        end = offset + items * WIDTHS.get(code, 0)
    is_good = is_good and end == filled
    if not is_good:
        with pytest.raises(CorruptionError, match="cannot be where the index says"):
            SectionFile(path, "test")
        return
    file = SectionFile(path, "test")
    file.verify()
    for number, (offset, items, code) in enumerate(entries):
        assert file.read(number, small).tobytes() == data[offset : offset + items * WIDTHS[code]]
    file.close()


def altered(data: st.DataObject, arrays: Arrays) -> Arrays:
    """Arrays of which one or two are others."""
    arrays = [array.copy() for array in arrays]
    for _ in range(data.draw(st.integers(1, 2))):
        k = data.draw(st.integers(0, len(arrays) - 1))
        if len(arrays[k]) and data.draw(st.booleans()):
            arrays[k][data.draw(st.integers(0, len(arrays[k]) - 1))] = np.int64(data.draw(WORDS)).astype(arrays[k].dtype)
        else:
            arrays[k] = np.array(data.draw(st.lists(WORDS, max_size=9)), np.int64).astype(data.draw(KINDS))
    return arrays


def stored(path: Path, kind: str, arrays: Arrays) -> SectionFile:
    with SectionWriter(path, kind) as writer:
        for array in arrays:
            writer.append(array)
        return writer.finish()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """The arrays of two batches."""
    block = Block(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 1]), 3, 2)
    writer = SampleWriter(tmp_path_factory.mktemp("samples") / "file", 100)
    for index in range(2):
        writer.add(SampledBatch(index, 0, torch.tensor([5, 6, 7]), 2, (block,)))
    file = writer.finish()
    arrays = [np.array(file[k]) for k in range(len(file))]
    file.close()
    return arrays


@given(data=st.data())
def test_any_samples_under_right_checksums(
    tmp_path_factory: pytest.TempPathFactory, samples: Arrays, data: st.DataObject
) -> None:
    file = stored(tmp_path_factory.mktemp("samples") / "file", "samples", altered(data, samples))
    pool = BufferPool(Budget(MEMORY))
    try:
        opened = SampleFile(file)
        for number in range(len(opened)):
            batch = opened.batch(number, pool)
            assert np.array_equal(opened.ids(number), batch.input_ids)
            for block in batch.blocks:
                assert all(0 <= number < block.n_src for number in block.src.tolist())
                assert all(0 <= number < block.n_dst for number in block.dst.tolist())
    except CorruptionError as error:
        assert error.path == str(file.path)
    finally:
        file.close()


PLAN = [np.array(values, np.int32) for values in ([0, -1, 2, -1], [1, 3], [1], [4], [8])]


@pytest.mark.parametrize("tier", [Tier.BASE, Tier.PACKED])
@given(data=st.data())
def test_any_plan_under_right_checksums(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tier: Tier) -> None:
    ids = np.array([3, 5, 9, 11], np.int64)
    file = stored(tmp_path_factory.mktemp("plan") / "file", "plan", altered(data, PLAN))
    plans = PlanFile(file, tier)
    try:
        plan = plans.plan(0, ids, small)
        assert sum(len(part.positions) for part in plan.parts) == len(ids)
        assert np.isin(plans.misses(0, ids, small), ids).all()
    except CorruptionError as error:
        assert error.path == str(file.path)
    finally:
        file.close()


VALUES = st.none() | st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.lists(st.integers(), max_size=2) | st.just({})
FIELDS = {"num_nodes": 9, "epochs": 1, "batches": 2, "samples": "ab", "made_of": {}, "together": 2}
OTHERS = {"batch_size": None, "drop_last": False, "fanouts": [3, -1], "seed": 0}


@given(name=st.sampled_from(sorted(FIELDS)), value=VALUES)
def test_any_field_of_a_record(tmp_path_factory: pytest.TempPathFactory, name: str, value: Any) -> None:
    path, record = str(tmp_path_factory.mktemp("record") / "pack"), {"format": 1, **OTHERS, **FIELDS, name: value}
    write_record(path, "pack", record)
    if isinstance(value, type(FIELDS[name])) and not (isinstance(value, int) and not 0 <= value < 2**62):
        assert read_record(path, "pack") == record
    else:
        with pytest.raises(CorruptionError, match=f"the record's {name} is "):
            read_record(path, "pack")


@pytest.mark.parametrize("text", [b"", b"[1]", b"7", b"\xff", b"[" * 200_000])
def test_records_that_are_no_objects(tmp_path: Path, text: bytes) -> None:
    stored(tmp_path / "pack", "pack", [np.frombuffer(text, np.uint8)]).close()
    with pytest.raises(CorruptionError, match="not a JSON object"):
        read_record(str(tmp_path / "pack"), "pack")


def test_the_controls(tmp_path: Path, samples: Arrays) -> None:
    """Unaltered files are read."""
    file = stored(tmp_path / "samples", "samples", samples)
    batch = SampleFile(file).batch(1, BufferPool(Budget(MEMORY)))
    assert (batch.index, batch.input_ids.tolist(), batch.blocks[0].src.tolist()) == (1, [5, 6, 7], [0, 1, 2, 2])
    file.close()
    file = stored(tmp_path / "plan", "plan", PLAN)
    plan = PlanFile(file).plan(0, np.array([3, 5, 9, 11], np.int64))
    assert [list(itertools.chain(part.addresses)) for part in plan.parts] == [[0, 2], [5, 11]]
    file.close()
