"""Files of a pack that say what is not so, under right checksums: an error that names a file, or what was packed."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from featstore.errors import BudgetError, CorruptionError, FormatError
from featstore.pack.layout import find_layouts
from featstore.pack.offline import Pack
from featstore.storage.format import file_seed
from featstore.storage.sections import SectionFile, SectionWriter
from tests.pack.test_pack_damage import delivered, files, make_pack, verify

Arrays = list[npt.NDArray[Any]]
RECORDS = ("pack", "layout", "begun", "done", "node_data")
TABLES = ("samples", "plan", "fill", "device", "shared", "node_data")
GONE = object()
VALUES = (None, True, -1, 0, 2**40, 2**70, 1.5, "", "x", "../x", [], {}, [1], ["a"], {"a": 1}, GONE)
KINDS = (np.float32, np.float64, np.int64, np.uint64, np.uint8)
NUMBERS = (-(2**31), -1, 0, 1, 10**6, 2**31 - 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A pack, and all that it delivers."""
    pack = make_pack(tmp_path_factory.mktemp("made"), 1)
    return pack, delivered(pack)


def kind_of(path: Path) -> str:
    name = path.name.split("-")[0].split(".")[0]
    return "node_data" if name == "data" else name


def arrays_of(path: Path) -> tuple[Arrays, str]:
    file = SectionFile(path, kind_of(path))
    try:
        return [file[number].copy() for number in range(len(file))], file.file_id
    finally:
        file.close()


def forge(path: Path, arrays: Arrays, file_id: str) -> None:
    """Put a file of other arrays in the place of one, with its id and right checksums."""
    path.unlink()
    with SectionWriter(path, kind_of(path)) as writer:
        writer._id = bytes.fromhex(file_id)
        writer._seed = file_seed(kind_of(path), writer._id, 0)
        for array in arrays:
            writer.append(array)
        writer.finish().close()


def check(pack: Path, what: str, whole: list[bytes] | None, *, is_huge: bool = False, reads: Any = (verify, delivered)) -> None:
    """Assert that both ways to read a pack name a file of it, or come to an end; then with ``whole``, where that is known."""
    for read in reads:
        try:
            found = read(pack)
        except (CorruptionError, FormatError, FileNotFoundError) as error:
            path = Path(str(error.filename))
            assert pack in path.parents, f"{what}: {error!r}"
            assert path.is_file() or isinstance(error, FileNotFoundError), f"{what}: {error!r}"
        except BudgetError as error:
            assert is_huge, f"{what}: {error!r}"
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        else:
            assert found is None or whole is None or found == whole, f"{what}: other data"


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    names = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for name in names:
        yield from places(value[name], (*at, name))


def replaced(record: Any, at: tuple[Any, ...], by: Any) -> Any:
    if not at:
        return by
    record = copy.deepcopy(record)
    inner = record
    for name in at[:-1]:
        inner = inner[name]
    if by is GONE:
        del inner[at[-1]]
    else:
        inner[at[-1]] = by
    return record


def of_records(pack: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for path in files(pack):
        if kind_of(path) not in RECORDS:
            continue
        (text, *arrays), file_id = arrays_of(path)
        record = json.loads(text.tobytes())
        for at in places(record):
            # Labels that a pack does not carry are no damage: it may never have had them.
            values = [value for value in VALUES if at or value is not GONE]
            for value in values if at[:1] != ("node_data",) or len(at) > 2 else ():
                forged = np.frombuffer(json.dumps(replaced(record, at, value)).encode(), np.uint8)
                where = path.relative_to(pack)

                def change(folder: Path, where: Path = where, new: Arrays = [forged, *arrays], file_id: str = file_id) -> None:  # noqa: B006
                    forge(folder / where, new, file_id)

                yield f"{where} {at} = {'nothing' if value is GONE else value!r}", change


def altered(arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    arrays, number = [array.copy() for array in arrays], rng.randrange(len(arrays))
    array, how = arrays[number], rng.choice(["lost", "again", "half", "double", "kind", "value", "value", "value"])
    if how == "lost":
        del arrays[number]
    elif how == "again":
        arrays.insert(number, array)
    elif how == "half":
        arrays[number] = array[: len(array) // 2]
    elif how == "double":
        arrays[number] = np.concatenate([array, array])
    elif how == "kind":
        arrays[number] = array.astype(rng.choice(KINDS))
    elif len(array):
        array[rng.randrange(len(array))] = np.array(rng.choice(NUMBERS)).astype(array.dtype)
    return f"array {number}: {how}", arrays


def test_what_stands_in_records(made: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    sample_records(*made, tmp_path, 30)


@pytest.mark.stress
def test_all_that_may_stand_in_records(made: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    sample_records(*made, tmp_path, 10**6)


def sample_records(pack: Path, whole: list[bytes], folder: Path, most: int, reads: Any = (verify, delivered)) -> None:
    cases = list(of_records(pack))
    assert len(cases) > 1000
    rng = random.Random(1)
    for what, change in rng.sample(cases, min(most, len(cases))):
        shutil.copytree(pack, folder / "p")
        change(folder / "p")
        check(folder / "p", what, whole, is_huge=str(2**40) in what or str(2**70) in what, reads=reads)
        shutil.rmtree(folder / "p")


@pytest.mark.parametrize("each", [3, pytest.param(200, marks=pytest.mark.stress)])
def test_what_stands_in_tables(made: tuple[Path, list[bytes]], tmp_path: Path, each: int) -> None:
    """Other values may be other data, which ``verify`` finds: here only their errors are looked at."""
    sample_tables(made[0], tmp_path, each)


def sample_tables(pack: Path, folder: Path, each: int, reads: Any = (verify, delivered)) -> None:
    rng = random.Random(2)
    for path in files(pack):
        if kind_of(path) not in TABLES:
            continue
        arrays, file_id = arrays_of(path)
        for _ in range(each):
            what, new = altered(arrays, rng)
            shutil.copytree(pack, folder / "p")
            forge(folder / "p" / path.relative_to(pack), new, file_id)
            check(folder / "p", f"{path.name} {what}", None, reads=reads)
            shutil.rmtree(folder / "p")


def test_tables_that_changed_places(made: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """Within a layout, and between two: the error names one of the two files."""
    shutil.copytree(made[0], tmp_path / "p")
    with Pack(tmp_path / "p") as pack:
        one, other = (tmp_path / "p" / options.name for options in find_layouts(pack))
    pairs = [(one / "plan", one / "fill"), (one / "plan", other / "plan"), (one / "fill", other / "fill")]
    pairs += [(one / "layout", other / "layout"), (one / "plan", tmp_path / "p" / "samples"), (one / "begun", one / "layout")]
    for first, second in pairs:
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(b)
        second.write_bytes(a)
        for read in (verify, delivered):
            with pytest.raises((CorruptionError, FormatError)) as caught:
                read(tmp_path / "p")
            assert os.fspath(caught.value.filename) in (os.fspath(first), os.fspath(second))
        first.write_bytes(a)
        second.write_bytes(b)
    check(tmp_path / "p", "put back", made[1])
