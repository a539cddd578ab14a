"""The catalog: what it says survives, what was damaged is found before LMDB sees it, commits are whole, locks hold."""

from __future__ import annotations

import errno
import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash

from featstore.errors import CorruptionError, FeatstoreError, FormatError, VersionError
from featstore.storage import catalog as cataloging
from featstore.storage.catalog import CATALOG_FILE, Catalog, FieldPart, FieldRecord, read_catalog, write_catalog
from featstore.storage.catalogvalues import pack_value, unpack_value
from featstore.storage.directory import open_directory
from featstore.storage.format import file_bytes, sums_bytes
from featstore.storage.layout import choose_layout
from featstore.storage.lock import READERS_LOCK, WRITER_LOCK
from featstore.storage.update import Update
from featstore.storage.writer import FileRecord
from featstore.testing.faults import forked
from tests.support.cases import each
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses
from tests.support.rowfiles import PAGE

pytestmark = pytest.mark.usefixtures("_program_server")

DATASET = {
    "id": "0" * 32, "generation": 1, "num_nodes": 10, "num_edges": 0, "topology": "csc", "created_by": "test",
}  # fmt: skip


def file_record(name: str, n_rows: int = 10, row_bytes: int = 4, generation: int = 1) -> FileRecord:
    layout = choose_layout(row_bytes)
    n_bytes = file_bytes(layout, n_rows)
    return FileRecord(name, "feature", "ab" * 16, generation, n_rows, "float32", layout, n_bytes, sums_bytes(n_bytes))


def sample(n_fields: int = 2) -> Catalog:
    names = [f"x{i}" for i in range(n_fields)]
    files = {f"node.{name}.1.rows": file_record(f"node.{name}.1.rows") for name in names}
    fields = {
        f"node/_/{name}": FieldRecord(
            f"node/_/{name}", "feature", "float32", (10,), 1, (FieldPart(f"node.{name}.1.rows", 0, 10),)
        )
        for name in names
    }
    return Catalog(dict(DATASET), files, fields)


def add_field(update: Update, name: str) -> None:
    with update.writer(f"node.{name}", choose_layout(4), kind="feature", dtype="float32") as out:
        out.write(np.zeros((10, 4), np.uint8))
        file = out.commit()
    update.add(
        [file], [FieldRecord(f"node/_/{name}", "feature", "float32", (10,), file.generation, (FieldPart(file.name, 0, 10),))]
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (WRITER_LOCK, READERS_LOCK):
        (tmp_path / name).touch()
    write_catalog(tmp_path, sample())
    return tmp_path


# --- round trip -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_fields", [0, 1, 2, 300])
def test_round_trip(tmp_path: Path, n_fields: int) -> None:
    catalog = sample(n_fields)
    write_catalog(tmp_path, catalog)
    assert read_catalog(tmp_path) == catalog
    assert os.listdir(tmp_path / "catalog.lmdb") == ["data.mdb"]


def test_a_field_of_several_files(tmp_path: Path) -> None:
    files = {name: file_record(name, n) for name, n in (("a", 4), ("b", 0), ("c", 6))}
    parts = (FieldPart("a", 0, 4), FieldPart("b", 4, 0), FieldPart("c", 4, 6))
    catalog = Catalog(dict(DATASET), files, {"edge/u,r,v/w": FieldRecord("edge/u,r,v/w", "feature", "float32", (10,), 3, parts)})
    write_catalog(tmp_path, catalog)
    assert read_catalog(tmp_path) == catalog


def test_it_is_an_lmdb_environment_with_checked_json_values(root: Path) -> None:
    with lmdb.open(str(root / "catalog.lmdb"), readonly=True, lock=False) as env, env.begin() as transaction:
        entries = dict(transaction.cursor())
    assert set(entries) == {b"dataset", b"file/node.x0.1.rows", b"file/node.x1.1.rows", b"node/_/x0", b"node/_/x1"}
    for key, value in entries.items():
        assert struct.unpack("<Q", value[:8])[0] == xxhash.xxh3_64_intdigest(key + value[8:])
    value = json.loads(entries[b"dataset"][8:])
    assert (value["format"], value["requires"]) == (1, [])
    data = (root / CATALOG_FILE).read_bytes()
    assert data[-PAGE:][:8] == b"FEATCTLG"
    assert data[-PAGE:][24:40] == xxhash.xxh3_128_digest(data[:-PAGE])


def test_two_may_read_at_once_and_nothing_stays_open(root: Path) -> None:
    with cataloging._Environment((root / CATALOG_FILE).read_bytes()[:-PAGE], "x"):
        assert read_catalog(root) == sample()


# --- damage ---------------------------------------------------------------------------------------------------------------------


def flips_found(path: Path, bits: list[int]) -> int:
    """Flip each bit in turn; assert that each is found, and that the file reads again when it is back."""
    good = path.read_bytes()
    for bit in bits:
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError) as caught:
            read_catalog(path.parent.parent)
        assert caught.value.filename == str(path)
    path.write_bytes(good)
    assert read_catalog(path.parent.parent) == sample()
    return len(bits)


def random_bits(path: Path, n: int) -> list[int]:
    return [int(bit) for bit in np.random.default_rng(5).integers(0, 8 * path.stat().st_size, n)]


def test_any_flipped_bit_is_found(root: Path) -> None:
    path = root / CATALOG_FILE
    edges = [page * PAGE * 8 + bit for page in range(path.stat().st_size // PAGE) for bit in (*range(0, 192, 5), PAGE * 8 - 1)]
    assert flips_found(path, edges + random_bits(path, 300)) > 300


@pytest.mark.stress
def test_ten_thousand_flipped_bits_are_found(root: Path) -> None:
    assert flips_found(root / CATALOG_FILE, random_bits(root / CATALOG_FILE, 10_000)) == 10_000


def test_truncation_at_every_page_and_around(root: Path) -> None:
    path = root / CATALOG_FILE
    good = path.read_bytes()
    for page in range(len(good) // PAGE + 1):
        for n_bytes in {max(0, page * PAGE - 1), page * PAGE, page * PAGE + 1, page * PAGE + 100}:
            if n_bytes == len(good):
                continue
            path.write_bytes(good[:n_bytes] if n_bytes < len(good) else good + bytes(n_bytes - len(good)))
            with pytest.raises(CorruptionError):
                read_catalog(root)
    path.write_bytes(good)
    assert read_catalog(root) == sample()


def test_without_its_digest_damage_would_pass_lmdb_by(root: Path) -> None:
    """The control of the flips above: resealed, they reach LMDB, and the values' own checksums are left to find them."""
    path = root / CATALOG_FILE
    body = path.read_bytes()[:-PAGE]
    at = body.rindex(b'"num_nodes":10')
    path.write_bytes(cataloging._seal(body.replace(b'"num_nodes":10', b'"num_nodes":11')))
    assert at > 0
    with pytest.raises(CorruptionError, match="entry b'dataset' is damaged"):
        read_catalog(root)


def test_a_meta_page_that_counts_more_pages_than_there_are(root: Path) -> None:
    """Sealed with a right digest, yet LMDB would map pages beyond the end: SIGBUS, if it were let."""
    path = root / CATALOG_FILE
    body = path.read_bytes()[:-PAGE]
    path.write_bytes(cataloging._seal(body[:-PAGE]))
    with pytest.raises(CorruptionError, match="lacks pages"):
        read_catalog(root)
    path.write_bytes(cataloging._seal(bytes(len(body))))
    with pytest.raises(FormatError, match="not an LMDB environment"):
        read_catalog(root)
    path.write_bytes(cataloging._seal(body))
    assert read_catalog(root) == sample()


def fuzz(root: Path, n: int, seed: int) -> dict[str, int]:
    """Change a few bytes of LMDB's pages and seal them with a right digest, as an attacker would; count what reading says."""
    path = root / CATALOG_FILE
    body = path.read_bytes()[:-PAGE]
    good = read_catalog(root)
    rng = np.random.default_rng(seed)
    used = np.flatnonzero(np.frombuffer(body, np.uint8))
    counts: dict[str, int] = {}
    for _ in range(n):
        damaged = bytearray(body)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.choice(used)) if rng.random() < 0.7 else int(rng.integers(len(body)))
            damaged[at] = int(rng.choice([0, 1, 2, 4, 8, 127, 128, 255, rng.integers(256)]))
        path.write_bytes(cataloging._seal(bytes(damaged)))
        try:
            outcome = "same" if read_catalog(root) == good else "different"
        except FeatstoreError as error:
            outcome = type(error).__name__
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def fuzz_some(folder: str, n: int) -> None:
    """In a child, which a fault in LMDB would kill: small and large catalogs, with branch and overflow pages."""
    for n_fields in (1, 2, 300):
        root = Path(folder) / str(n_fields)
        root.mkdir()
        write_catalog(root, sample(n_fields))
        counts = fuzz(root, n, n_fields)
        assert counts.get("CorruptionError", 0) > n // 10, counts
        assert set(counts) <= {"CorruptionError", "FormatError", "VersionError", "same"}, counts
    many = {f"file{i:03}": file_record(f"file{i:03}", 1) for i in range(200)}
    parts = tuple(FieldPart(name, i, 1) for i, name in enumerate(many))
    root = Path(folder) / "overflow"
    root.mkdir()
    write_catalog(
        root, Catalog(dict(DATASET), many, {"node/_/x": FieldRecord("node/_/x", "feature", "float32", (200,), 1, parts)})
    )
    assert set(fuzz(root, n, 0)) <= {"CorruptionError", "FormatError", "VersionError", "same"}


def test_hostile_pages_under_a_right_digest(tmp_path: Path) -> None:
    run_in_fork(fuzz_some, str(tmp_path), 150)


@pytest.mark.stress
def test_many_hostile_pages_under_a_right_digest(tmp_path: Path) -> None:
    run_in_fork(fuzz_some, str(tmp_path), 5000, timeout_s=1800)


def crash_unchecked(folder: str) -> None:
    """The control: without the check of its pages LMDB is given what kills it."""
    cataloging.check_environment = lambda body, path: None
    root = Path(folder)
    write_catalog(root, sample(300))

    def attempt() -> None:
        for seed in range(20):
            fuzz(root, 100, seed)

    assert forked(attempt) is not None


def test_hostile_pages_would_kill_lmdb(tmp_path: Path) -> None:
    run_in_fork(crash_unchecked, str(tmp_path))


def test_an_older_copy_of_a_value_under_another_key(root: Path) -> None:
    """Values are bound to their keys."""
    value = pack_value(b"node/_/x0", {"a": 1})
    assert unpack_value(b"node/_/x0", value, "p") == {"a": 1}
    with pytest.raises(CorruptionError):
        unpack_value(b"node/_/x1", value, "p")


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "link", "empty", "huge", "permission"])
def test_something_else_in_its_place(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / CATALOG_FILE
    path.unlink()
    expected: type[Exception] = FormatError
    if kind == "missing":
        expected = FileNotFoundError
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "empty":
        path.touch()
        expected = CorruptionError
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)  # nothing of that size may be allocated
    else:
        real = os.open

        def deny(name: Any, *arguments: Any, **options: Any) -> int:  # root may read anything, so the refusal is scripted
            if name == str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
            return real(name, *arguments, **options)

        path.touch()
        monkeypatch.setattr(os, "open", deny)
        expected = PermissionError
    with pytest.raises(expected):
        read_catalog(root)


def test_a_directory_without_one_is_no_dataset(tmp_path: Path) -> None:
    with open_directory(tmp_path) as opened:
        refuses(FormatError, "is not a dataset: it has no catalog", lambda: read_catalog(opened))
    refuses(FormatError, "is not a dataset: it has no catalog", lambda: read_catalog(tmp_path))
    refuses(FileNotFoundError, "absent", lambda: read_catalog(tmp_path / "absent"))


def test_the_directory_of_the_catalog_may_not_be_a_link(root: Path) -> None:
    (root / "catalog.lmdb").rename(root / "elsewhere")
    (root / "catalog.lmdb").symlink_to(root / "elsewhere")
    with pytest.raises(FormatError, match="symbolic link"):
        read_catalog(root)


# --- values from outside --------------------------------------------------------------------------------------------------------


def rewrite(root: Path, key: str, change: dict[str, Any]) -> None:
    """Write the sample's catalog with some values of one entry changed and everything properly checksummed."""
    entries = sample()._entries()
    entries.setdefault(key, {})
    entries[key] = {name: value for name, value in {**entries[key], **change}.items() if value is not ...}

    class Forged(Catalog):
        def _entries(self) -> dict[str, dict[str, Any]]:
            return entries

    write_catalog(root, Forged({}))


F, X = "file/node.x0.1.rows", "node/_/x0"


PART = {"file": "node.x0.1.rows", "first": 0, "rows": 10}
HOSTILE: list[tuple[str, type[FeatstoreError], dict[str, list[Any]]]] = [
    ("dataset", VersionError, {"format": [2], "requires": [["striping"]], "topology": ["coo"]}),
    ("dataset", FormatError, {"topology": ["chunked"], "adjacency": [["a"], {"a": 1}], "num_nodes": [-1, 2**64]}),
    ("dataset", FormatError, {"num_edges": ["many", True], "generation": [0], "format": [...], "id": [3]}),
    (F, FormatError, {"rows": [2**61, 11], "bytes": [4096], "sums_bytes": [0], "row_bytes": [0, 2**40], "group_bytes": [2**61]}),
    (F, FormatError, {"dtype": ["object"], "id": ["../../etc/passwd"], "kind": ["k" * 33, "ü"], "sums": ["/etc/passwd"]}),
    (X, FormatError, {"shape": [[], [10, 2**61], [10, 2], [9]], "dtype": ["int32", "complex64"], "generation": [None]}),
    (X, FormatError, {"role": [...], "parts": [[], [3], None, [PART | {"file": "absent"}], [PART | {"first": 1}]]}),
    (X, FormatError, {"parts": [[PART | {"rows": 9}]]}),
]
CHANGES = [(key, {name: value}, error) for key, error, table in HOSTILE for name, value in each(table)]
CHANGES += [("dataset", {"topology": "chunked", "chunk_bytes": n_bytes}, FormatError) for n_bytes in (5000, 0)]
CHANGES += [(key, {}, FormatError) for key in ("file//etc/passwd", "file/../x")]


@pytest.mark.parametrize(("key", "change", "error"), CHANGES)
def test_hostile_values_are_refused(root: Path, key: str, change: dict[str, Any], error: type[FeatstoreError]) -> None:
    rewrite(root, "dataset", {})
    assert read_catalog(root) == sample()  # control
    rewrite(root, key, change)
    with pytest.raises(error, match=r"data\.mdb|catalog names a file outside"):
        read_catalog(root)


ANYTHING = (None, True, -1, 0, 2**40, 2**70, 1.5, "", "x", "../x", [], {}, [1], ["a"], {"a": 1}, ...)


def test_any_value_is_refused_or_read(root: Path) -> None:
    """Each value of each entry replaced by others, and removed: the error names the catalog."""
    entries, refused = sample()._entries(), 0
    for key, entry in entries.items():
        for name in entry:
            for value in ANYTHING:
                rewrite(root, key, {name: value})
                try:
                    read_catalog(root)
                except (FormatError, CorruptionError) as error:
                    assert "data.mdb" in str(error) or "names a file outside" in str(error), (key, name, value)
                    refused += 1
    assert refused > 8 * sum(len(entry) for entry in entries.values())


def test_unknown_keys_of_later_releases_are_left_alone(root: Path) -> None:
    rewrite(root, X, {"later": [1, 2]})
    assert read_catalog(root) == sample()
    rewrite(root, "pack/7", {"anything": 1})
    assert read_catalog(root) == replace(sample(), extra={"pack/7": {"anything": 1}})
    with Update(root) as update:  # an update keeps them, and files that only they may refer to
        add_field(update, "new")
        catalog = replace(update.catalog, files={**update.catalog.files, "later": file_record("later")})
        update.catalog = catalog
        update.commit()
    assert read_catalog(root).extra == {"pack/7": {"anything": 1}}
    assert "later" in read_catalog(root).files


def test_values_that_are_no_json_objects() -> None:
    for text in (b"[1]", b"3", b"{", b"\xff", b"[" * 5000):
        data = struct.pack("<Q", xxhash.xxh3_64_intdigest(b"k" + text)) + text
        with pytest.raises(FormatError):
            unpack_value(b"k", data, "p")
    with pytest.raises(CorruptionError):
        unpack_value(b"k", b"abc", "p")


def test_lmdb_errors_become_ours() -> None:
    assert isinstance(cataloging._translate(lmdb.CorruptedError("x"), "p"), CorruptionError)
    found = cataloging._translate(lmdb.MapFullError("x"), "p")
    assert (type(found), found.filename) == (OSError, "p")
