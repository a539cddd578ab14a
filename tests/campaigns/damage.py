"""The damage campaign: what happens to a file's bytes is found by an error that names it, or changes nothing that is read.

``python -m tests.campaigns.damage`` runs it whole; ``python -m tests.campaigns.damage dataset 4711`` runs one damage again, in
this process, and shows what came of it. A damage is a function of its subject and its number alone.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from featstore.errors import BudgetError, FeatstoreError
from featstore.storage import catalog as cataloging
from featstore.storage.catalog import CATALOG_FILE, Catalog, write_catalog
from featstore.storage.catalogvalues import unpack_value
from featstore.storage.format import SUMS_PER_PAGE, Header, page_sum, sums_page
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.sections import MAGIC as SECTIONS_MAGIC
from tests.campaigns.damage_subjects import SUBJECTS, Subject, kind_of
from tests.pack.test_hostile_packs import VALUES, altered, arrays_of, forge, places, replaced
from tests.support.programs import run_ranks

__all__ = ["Report", "damage", "outcome", "run", "without_sums"]

WORKERS = 2
PATIENCE_S = 60  # for one damage; then it counts as a hang
Files = dict[str, bytes]
SEALED = 3  # one damage in so many has right sums
# What may come of it. "harmless": what is read is the same, bit for bit; "not read": so it is whatever stands in these bytes.
# A file whose sums are right is another file, and its values may be other data. LACK is a failure: a file that tells sizes that
# it has not is damaged, and not too large for the memory.
GOOD = ("found", "found by the check", "harmless", "not read")
GOOD_SEALED = (*GOOD, "other data")
LACK = "EXPLAINED AS LACK OF MEMORY"
# Draws that leave every file as it was, or do what an earlier one did: not tried, nor counted.
NO_DAMAGE = ("no change", "repeat")


@dataclass(frozen=True)
class Damage:
    """A damage: the new bytes of the files that it changes, None where one is gone."""

    what: str
    kind: str
    changed: dict[str, bytes | None]
    is_sealed: bool = False


# --- damages whose sums are wrong -----------------------------------------------------------------------------------------------


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at // PAGE_BYTES * PAGE_BYTES if rng.random() < 0.3 else at :]


def _grow(data: bytearray, rng: random.Random) -> None:
    n = rng.choice((1, 8, 100, PAGE_BYTES, 2 * PAGE_BYTES))
    data += rng.choice((bytes(n), rng.randbytes(n), bytes(data[-n:])))


def _exchange(data: bytearray, rng: random.Random) -> None:
    """Exchange two blocks of equal size: pages, sectors or words."""
    size = rng.choice([each for each in (PAGE_BYTES, 512, 8, 1) if len(data) >= 2 * each] or [0])
    if size:
        a, b = (rng.randrange(len(data) // size) * size for _ in range(2))
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _lose(data: bytearray, rng: random.Random) -> None:
    """Put zeros where a page or a sector was to be written."""
    size = rng.choice((512, PAGE_BYTES))
    at = rng.randrange(len(data)) // size * size
    n = min(size, len(data) - at)
    data[at : at + n] = bytes(n)


CHANGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bits flipped": _flip,
    "cut": _cut,
    "longer": _grow,
    "blocks exchanged": _exchange,
    "a write lost": _lose,
}
OTHERS = ("an older copy", "an older page", "another file", "gone")


def _unsealed(files: Files, older: Files, rng: random.Random) -> Damage:
    kind = rng.choice(sorted({kind_of(name) for name in files}))
    name = rng.choice(sorted(name for name in files if kind_of(name) == kind))
    alike = sorted(each for each in older if kind_of(each) == kind)
    what = rng.choice((*CHANGES, *CHANGES, *(OTHERS if alike else OTHERS[2:])))
    data = bytearray(files[name])
    if what in CHANGES and data:
        CHANGES[what](data, rng)
        return Damage(what, kind, {name: bytes(data)})
    if what == "an older copy":
        by = name if name in older else rng.choice(alike)
        new: dict[str, bytes | None] = {name: older[by]}
        if name + ".sums" in files and by + ".sums" in older and rng.random() < 0.5:
            new[name + ".sums"] = older[by + ".sums"]
        return Damage(what, kind, new)
    if what == "an older page":
        page = rng.randrange(max(1, len(data) // PAGE_BYTES)) * PAGE_BYTES
        old = older[name if name in older else rng.choice(alike)][page : page + PAGE_BYTES]
        data[page : page + len(old)] = old
        return Damage(what, kind, {name: bytes(data)})
    if what == "another file":
        other = rng.choice(sorted(files))
        return Damage(what, kind, {name: files[other], **({other: files[name]} if rng.random() < 0.5 else {})})
    return Damage("gone", kind, {name: None})


# --- damages whose sums are right -----------------------------------------------------------------------------------------------


def _sealed_rows(name: str, files: Files, rng: random.Random) -> dict[str, bytes | None]:
    """Change a row file behind its header, or the header, and make its side file anew."""
    data = bytearray(files[name])
    seed = Header.unpack(files[name][:PAGE_BYTES], name).seed
    part = bytearray(data[PAGE_BYTES:])
    if len(part) >= 8 and rng.random() < 0.9:
        how = rng.randrange(4)
        if how == 0:
            _exchange(part, rng)
        elif how == 1:
            _flip(part, rng)
        else:
            width = rng.choice((4, 8))
            value = rng.choice((-1, 0, 1, 2**31 - 1, -(2**31), 10**6, rng.getrandbits(30)))
            at = rng.randrange(len(part) // width) * width
            part[at : at + width] = value.to_bytes(width, "little", signed=True)
        data[PAGE_BYTES:] = part
    else:
        at = rng.randrange(8, 108)
        data[at] = rng.choice((0, 1, 255, data[at] ^ 1))
        data[PAGE_BYTES - 8 : PAGE_BYTES] = struct.pack("<Q", page_sum(bytes(data[: PAGE_BYTES - 8]), 0))
    sums = np.array([page_sum(data[at : at + PAGE_BYTES], seed) for at in range(0, len(data), PAGE_BYTES)], np.uint64)
    table = b"".join(
        sums_page(sums[first : first + SUMS_PER_PAGE], index, seed)
        for index, first in enumerate(range(0, len(sums), SUMS_PER_PAGE))
    )
    return {name: bytes(data), name + ".sums": table}


def entries_of(data: bytes) -> dict[str, dict[str, Any]]:
    """Read the entries of a catalog as they are on disk."""
    with cataloging._Environment(cataloging._unseal(data, "catalog"), "catalog") as environment:
        with environment.env.begin() as transaction, transaction.cursor() as cursor:
            pairs = [(bytes(key), bytes(value)) for key, value in cursor]
    return {key.decode(): unpack_value(key, value, "catalog") for key, value in pairs}


def catalog_of(entries: dict[str, dict[str, Any]]) -> bytes:
    """Write a catalog of any entries, with right sums; return its bytes."""

    class Forged(Catalog):
        def _entries(self) -> dict[str, dict[str, Any]]:
            return entries

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write_catalog(folder, Forged({}))
        return (Path(folder) / CATALOG_FILE).read_bytes()


def _sealed_catalog(name: str, files: Files, rng: random.Random) -> dict[str, bytes | None]:
    """Change a value of an entry, or bytes of LMDB's own pages."""
    if rng.random() < 0.3:
        body = bytearray(files[name][:-PAGE_BYTES])
        used = np.flatnonzero(np.frombuffer(body, np.uint8))
        for _ in range(rng.randint(1, 3)):
            body[int(rng.choice(used)) if rng.random() < 0.7 else rng.randrange(len(body))] = rng.choice((0, 1, 4, 127, 128, 255))
        return {name: cataloging._seal(bytes(body))}
    entries = entries_of(files[name])
    key = rng.choice(sorted(entries))
    at = rng.choice([each for each in places(entries[key]) if each])
    entries[key] = replaced(entries[key], at, rng.choice(VALUES))
    return {name: catalog_of(entries)}


def _sealed_sections(name: str, files: Files, rng: random.Random) -> dict[str, bytes | None]:
    """Change an array of a file of sections, or a value of its JSON."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / Path(name).name
        path.write_bytes(files[name])
        arrays, file_id = arrays_of(path)
        if arrays and arrays[0].dtype == np.uint8 and arrays[0].tobytes()[:1] == b"{" and rng.random() < 0.7:
            record = json.loads(arrays[0].tobytes())
            new = replaced(record, rng.choice(list(places(record))), rng.choice(VALUES[:-1]))
            arrays[0] = np.frombuffer(json.dumps(new).encode(), np.uint8)
        else:
            _, arrays = altered(arrays, rng)
        forge(path, arrays, file_id)
        return {name: path.read_bytes()}


def _sealed(files: Files, rng: random.Random) -> Damage:
    sealers: dict[str, Callable[[str, Files, random.Random], dict[str, bytes | None]]] = {}
    for name, data in files.items():
        if name == CATALOG_FILE:
            sealers[name] = _sealed_catalog
        elif data[-104 + 8 : -104 + 16] == SECTIONS_MAGIC:
            sealers[name] = _sealed_sections
        elif name + ".sums" in files:
            sealers[name] = _sealed_rows
    kind = rng.choice(sorted({kind_of(name) for name in sealers}))
    name = rng.choice(sorted(name for name in sealers if kind_of(name) == kind))
    return Damage("values under right sums", kind, sealers[name](name, files, rng), True)


def damage(subject: str, files: Files, older: Files, number: int) -> Damage:
    """Make damage ``number`` of a subject with ``files``, of which ``older`` is an earlier generation."""
    rng = random.Random(f"{subject} {number}")
    older = {name: data for name, data in older.items() if kind_of(name) not in SUBJECTS[subject].without_older}
    return _sealed(files, rng) if is_sealed(number) and subject != "mapped" else _unsealed(files, older, rng)


def is_sealed(number: int) -> bool:
    """Tell whether a damage has right sums."""
    return number % SEALED == 0


# --- what comes of it -----------------------------------------------------------------------------------------------------------


def outcome(subject: Subject, path: Path, whole: str, one: Damage, files: Iterable[str], verify: str = "always") -> str:
    """Read a subject of ``files`` with damage ``one``, and let the library check it; say what came of the damage."""
    is_sealed, names = one.is_sealed, namesakes(path, one, files)

    def attempt(call: Callable[[], object]) -> tuple[object, str | None]:
        try:
            return call(), None
        except BudgetError as error:
            return None, f"{LACK}: {error!r}"
        except (FeatstoreError, OSError) as error:
            is_found = _is_ours(error) and is_named(error, names)
            return None, "found" if is_found else f"NOT NAMED: {error!r} {getattr(error, 'filename', '')}"
        except Exception as error:
            return None, f"FOREIGN: {error!r}"

    found, said = attempt(lambda: subject.digest(path, verify))
    if said == "found":
        return said
    _, checked = attempt(lambda: subject.check(path))
    bad = next((each for each in (said, checked) if each not in (None, "found")), None)
    if bad is not None:
        return bad
    is_other = found is not None and found != whole
    if is_other and not is_sealed:
        return "WRONG"
    return "found by the check" if checked or found is None else "other data" if is_other else "harmless"


# What an error may name instead of a damaged file whose own sums are right, by the kinds of both: the two contradict each other,
# and nothing says which of them was changed. "" is the directory, "*" every file.
INSTEAD: dict[str, tuple[str, ...]] = {
    "catalog": ("", "*"),  # an entry is wrong in itself, which the text says; or it does not fit the file that it describes
    "edge.indptr": ("edge.indices", "edge.out_degree"),  # whose lists it bounds
    "edge.indices": ("edge.out_degree",),  # which counts the ids
    "edge.chunks": ("edge.out_degree",),
    "edge.chunk_directory": ("edge.chunks", "edge.out_degree"),
    "ids.names": ("ids.hashes",),  # of which the hashes are
    "ids.offsets": ("ids.hashes",),  # between which the names are
    "ids.hashes": ("ids.buckets",),  # which say where hashes are
    "blocks-node": ("patch-node",),  # of whose rows this is the table
    "cache.neighbors": ("cache.neighbors",),  # arrays of one cache
    # A directory without its record is no pack; it has the ids of samples and data, and as many nodes as a layout has rows.
    "pack": ("", "samples", "data", "layout"),
    "plan": ("layout",),  # whose pages it counts
    "samples": ("plan",),  # which is that of the samples
    "device": ("plan",),  # a list of rows beside it
    "fill": ("plan", "device"),  # rows that a batch does not find there
    "shared": ("plan", "layout"),  # rows that plans take from it, and how many there are
    # Marks are those of a record; another layout is taken in place of one that is of other data; it has the ids of its tables.
    "layout": ("done", "layout", "plan", "fill", "device", "shared"),
}
# Damages that may leave a whole file, of another time or kind; or none.
CONTRADICTING = ("an older copy", "an older page", "another file", "gone")


def namesakes(path: Path, one: Damage, files: Iterable[str]) -> set[str]:
    """List what an error about a damage may name: a damaged file or its pair, or what contradicts it."""
    damaged = {each.removesuffix(".sums") for each in one.changed}
    found = {f"{path}/{each}" for each in damaged}
    if one.is_sealed or one.what in CONTRADICTING:
        kinds = {kind_of(each) for each in damaged}
        stand_ins = {each for kind in kinds for each in INSTEAD.get(kind, ())}
        found |= {f"{path}/{each}" for each in files if stand_ins & {kind_of(each), "*"}}
        if "" in stand_ins:
            found.add(str(path))
    return found


def is_named(error: Exception, names: Iterable[str]) -> bool:
    """Tell whether an error names one of some files; a name ends where a longer one would go on, but for a pair's."""
    text = f"{error} {getattr(error, 'filename', None)}"
    return any(re.search(re.escape(each) + r"(?![\w/-])", text) for each in names)


def _is_ours(error: Exception) -> bool:
    return isinstance(error, (FeatstoreError, FileNotFoundError))


def changed_by(one: Damage, files: Files) -> dict[str, bytes | None]:
    """List the files that a damage changes, with their bytes then: none, if it puts there what is there."""
    return {name: data for name, data in sorted(one.changed.items()) if files.get(name) != data}


def key_of(changed: dict[str, bytes | None]) -> str:
    """Digest what a damage changes: damages of the same key are one damage."""
    found = hashlib.blake2b(digest_size=12)
    for name, data in changed.items():
        for part in (name.encode(), b"gone" if data is None else b"bytes", data or b""):
            found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def inverted(old: bytes, new: bytes | None) -> bytes:
    """Invert each byte that a damage changed, took away or added."""
    new = new or b""
    longer = bytearray(max(old, new, key=len))
    n = min(len(old), len(new))
    differs = np.ones(len(longer), bool)
    differs[:n] = np.frombuffer(old[:n], np.uint8) != np.frombuffer(new[:n], np.uint8)
    longer[:n] = old[:n]
    return bytes(np.frombuffer(longer, np.uint8) ^ np.where(differs, 255, 0).astype(np.uint8))


@dataclass
class Report:
    """Damages by what came of them, and those of each kind of file; the first damages that are failures, by number."""

    counts: Counter[str]
    kinds: Counter[str]
    failures: dict[int, str]

    @property
    def drawn(self) -> int:
        return sum(self.counts.values())

    @property
    def n(self) -> int:
        """Distinct damages, each of which changes bytes."""
        return self.drawn - sum(self.counts[each] for each in NO_DAMAGE)

    def __str__(self) -> str:
        shown = ", ".join(f"{n:,} {what}" for what, n in self.counts.most_common())
        failed = "".join(f"\n  {number}: {what[:300]}" for number, what in sorted(self.failures.items())[:20])
        return f"{self.n:,} damages of {self.drawn:,} draws, to {len(self.kinds)} kinds of files: {shown}{failed}"


def files_of(path: Path) -> Files:
    """Read every file that may be damaged."""
    found = sorted(each for each in path.rglob("*") if each.is_file() and each.suffix not in (".lock", ".json"))
    return {str(each.relative_to(path)): each.read_bytes() for each in found}


def work(rank: int, name: str, folder: str, first: int, stop: int, verify: str, checked: bool) -> None:
    """Do the damages ``first + rank``, ``first + rank + WORKERS``, … to a copy of a subject, and note what came of each.

    In a process of its own. What it does is in the file ``at``, so that whoever survives it knows which damage killed it.
    """
    where, subject = Path(folder), SUBJECTS[name]
    copy = where / f"copy-{rank}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(where / "whole", copy)
    files, older, whole = files_of(copy), files_of(where / "older"), subject.digest(copy)
    seen = set[str]()
    if not checked:
        without_sums()

    def came_of(one: Damage, changed: dict[str, bytes | None]) -> str:
        for each, data in changed.items():
            _put(copy / each, data)
        try:
            return outcome(subject, copy, whole, one, files, verify)
        finally:
            for each in changed:
                _put(copy / each, files.get(each))

    def attempt(one: Damage, changed: dict[str, bytes | None]) -> str:
        came = came_of(one, changed)
        if came == "harmless" and not one.is_sealed and checked:
            others = {each: inverted(files.get(each, b""), data) for each, data in changed.items()}
            return "not read" if came_of(one, dict(others)) == "harmless" else came
        return came

    with open(where / f"at-{rank}", "r+b") as file, open(where / f"log-{rank}", "a") as log:
        at = mmap.mmap(file.fileno(), 8)
        for number in range(first, stop, WORKERS):
            if is_sealed(number) and not checked:  # its sums cannot be made
                continue
            at[:] = struct.pack("<q", number)
            signal.alarm(PATIENCE_S)
            one = damage(name, files, older, number)
            changed = changed_by(one, files)
            key = key_of(changed)
            came = "no change" if not changed else "repeat" if key in seen else attempt(one, changed)
            seen.add(key)
            signal.alarm(0)
            log.write(json.dumps([number, one.kind, came, one.what, key]) + "\n")
            log.flush()
        at[:] = struct.pack("<q", -1)


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(data)


def run(name: str, n: int, folder: Path, first: int = 0, verify: str = "always", *, checked: bool = True) -> Report:
    """Do ``n`` damages to a subject, in processes of which each may die; ``checked=False`` leaves out the comparison of sums."""
    where = folder / name
    where.mkdir()
    for which, seed in (("older", 1), ("whole", 2)):
        (where / f"made-{which}").mkdir()
        SUBJECTS[name].make(where / f"made-{which}" / "it", seed)
        (where / f"made-{which}" / "it").rename(where / which)
    todo = {rank: first + rank for rank in range(WORKERS)}
    for rank in todo:
        (where / f"at-{rank}").write_bytes(struct.pack("<q", todo[rank]))
    report, seen = Report(Counter(), Counter(), {}), set[str]()
    while todo:
        ended = run_ranks(_work_from, WORKERS, name, str(where), todo, first + n, verify, checked, timeout_s=6 * 3600)
        for rank, (status, printed) in enumerate(ended):
            at = struct.unpack("<q", (where / f"at-{rank}").read_bytes())[0]
            if rank not in todo:
                continue
            if status == 0 and at == -1:
                del todo[rank]
                continue
            assert at >= todo[rank], f"a worker ended before a damage: {status}\n{printed}"
            came = "HANG" if status == -signal.SIGALRM else f"DEAD: {status}"
            report.counts[came.partition(":")[0]] += 1
            report.failures[at] = f"{came} {printed[-2000:]}"
            todo[rank] = at + WORKERS
    for rank in range(WORKERS):
        for line in (where / f"log-{rank}").read_text().splitlines():
            number, kind, came, what, key = json.loads(line)
            came = "repeat" if key in seen and came != "no change" else came  # of another worker's, or of one that died
            seen.add(key)
            good = GOOD_SEALED if is_sealed(number) else GOOD
            report.counts[came.partition(":")[0]] += 1
            report.kinds[kind] += came not in NO_DAMAGE
            if came not in (*good, *NO_DAMAGE):
                report.failures[number] = f"{what} in {kind}: {came}"
    shutil.rmtree(where)
    return report


def _work_from(rank: int, name: str, folder: str, todo: dict[int, int], stop: int, verify: str, checked: bool) -> None:
    if rank in todo:
        work(rank, name, folder, todo[rank], stop, verify, checked)


class _Equal:
    """Equal to everything: the result of a checksum that nobody compares."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def without_sums() -> None:
    """Take the comparison of checksums out of this process; row files besides need ``verify="off"``."""
    from types import SimpleNamespace

    from featstore.storage import catalogvalues, sections

    for module in (cataloging, catalogvalues, sections):
        hashes = dict.fromkeys(("xxh3_64_intdigest", "xxh3_128_digest"), lambda *_: _Equal())
        in_pieces = SimpleNamespace(update=lambda data: None, intdigest=_Equal)
        module.xxhash = SimpleNamespace(**hashes, xxh3_64=lambda seed: in_pieces)  # type: ignore[attr-defined]


def show(name: str, number: int) -> None:
    """Do one damage in this process, so that an error shows its stack."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        where, subject = Path(folder), SUBJECTS[name]
        for which, seed in (("older", 1), ("whole", 2)):
            (where / which).mkdir()
            subject.make(where / which / "it", seed)
        path = where / "whole" / "it"
        whole, files = subject.digest(path), files_of(path)
        one = damage(name, files, files_of(where / "older" / "it"), number)
        for each, data in one.changed.items():
            old = files.get(each, b"")
            at = next(
                (i for i, (a, b) in enumerate(zip(old, data or b"", strict=False)) if a != b), min(len(old), len(data or b""))
            )
            print(f"{each}: {len(old)} bytes, now {None if data is None else len(data)}; the first other byte is {at}")
            _put(path / each, data)
        print(one.what, one.kind, "->", outcome(subject, path, whole, one, files))
        for call in (subject.digest, subject.check):
            try:
                call(path)
            except Exception as error:
                if re.search("Corruption|Format", type(error).__name__) is None:
                    raise
                print(f"{call}: {error!r}")


# Draws of the whole campaign, and the distinct damages that these must be at least: many draws repeat an earlier one.
WHOLE = {"run": 115_000, "typed": 57_000, "dataset": 57_000, "pack": 3_000, "tables": 22_000}
DISTINCT = {"run": 36_000, "typed": 27_000, "dataset": 27_000, "pack": 1_900, "tables": 9_000}


def main(arguments: list[str]) -> None:
    if len(arguments) == 2 and arguments[1].isdigit():
        show(arguments[0], int(arguments[1]))
        return
    from tests.support.programs import start_server

    start_server()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name, n in WHOLE.items():
            begin = time.perf_counter()
            report = run(name, n, Path(folder))
            print(f"{name}: {report}\n  {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
