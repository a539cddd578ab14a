"""The hostile datasets: nothing outside a directory is opened or changed, nothing is run, and little memory is taken.

A folder beside the subject is watched with inotify(7), so an open that fails later is seen as well as one that succeeds. What a
subject's files declare is bounded in address space by a limit of the process, and in memory by its high-water mark.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from featstore.adapters.datasets import graphbolt, igb, npz, ogb
from featstore.adapters.datasets.arrays import Archive, open_array
from featstore.adapters.datasets.csvfiles import count_lines, read_ints, read_records
from featstore.cli.model import load_model
from featstore.errors import BudgetError, FeatstoreError
from featstore.load.statefile import read_state
from featstore.storage.catalog import CATALOG_FILE
from featstore.storage.format import Header
from featstore.storage.layout import PAGE_BYTES
from tests.campaigns.damage import Damage, _put, catalog_of, entries_of, files_of, is_named, namesakes
from tests.campaigns.damage_subjects import OPEN, SUBJECTS
from tests.campaigns.fuzz_targets import section_file
from tests.pack.test_hostile_packs import arrays_of, forge, places, replaced

__all__ = ["Meter", "Watch", "code", "depths", "escapes", "names", "sizes"]

PATIENCE_S = 60
ROOM_BYTES = 512 << 20  # of address space beyond what a process has: what is declared below is more
NOISE_BYTES = 12 << 20  # of memory that a reading takes whatever it reads: buffers of the budget, the interpreter's arenas
HUGE = (2**31, 2**33, 2**40, 2**62)


class Watch:
    """Opens, reads, writes and changes in a folder, as the kernel tells of them."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0
        for path in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
            assert libc.inotify_add_watch(self._fd, os.fsencode(path), 0xFFF) >= 0  # IN_ALL_EVENTS

    def events(self) -> list[str]:
        """Name what has happened since the last call."""
        found = []
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                _, mask, _, n = struct.unpack_from("iIII", data, at)
                name = data[at + 16 : at + 16 + n].rstrip(b"\0").decode("utf-8", "replace")
                found.append(f"{mask:#x} {name}")
                at += 16 + n

    def close(self) -> None:
        os.close(self._fd)


class Meter:
    """The memory that a call takes at its peak, above what there is before."""

    @staticmethod
    def _status(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def __enter__(self) -> Meter:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self._before = self._status("VmRSS")
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self._status("VmSize") + ROOM_BYTES, self._limits[1]))
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._limits)
        self.n_bytes = max(0, self._status("VmHWM") - self._before)


class Hostile:
    """A subject in a folder of its own, a folder that it has no business in, and what came of the cases so far."""

    def __init__(self, folder: Path, name: str) -> None:
        self.subject = SUBJECTS[name]
        self.path, self.outside = folder / "in" / name, folder / "outside"
        self.path.parent.mkdir(parents=True)
        self.outside.mkdir()
        self.subject.make(self.path, 1)
        self.whole = self.subject.digest(self.path)
        self.files = files_of(self.path)
        self.n_bytes = sum(map(len, self.files.values()))
        self.counts = Counter[str]()
        self.wrong = list[str]()

    def attempt(self, what: str, changed: Iterable[str], *, may_read: bool = False, may_lack: bool = False) -> None:
        """Read and check the subject: one of both must refuse it, unless it may be read, and what is read is what it was.

        An error must name one of the ``changed`` files, or what contradicts it.
        """
        one = Damage("a whole file", "", dict.fromkeys(changed), is_sealed=True)
        names = namesakes(self.path, one, self.files)
        watch, found = Watch(self.outside), list[str]()
        signal.alarm(PATIENCE_S)
        try:
            read = attempt(lambda: found.append(self.subject.digest(self.path)), names, may_lack=may_lack)
            checked = attempt(lambda: self.subject.check(self.path), names, may_lack=may_lack)
            for said in (read, checked):
                self.note(said, what)
            if read == checked == "read" and not may_read:
                self.note("READ", what)
            if found not in ([], [self.whole]) and checked == "read":
                self.note("OTHER data", what)
        finally:
            signal.alarm(0)
            if events := watch.events():
                self.note(f"ESCAPE {events[:4]}", what)
            watch.close()

    def note(self, said: str, what: str) -> None:
        self.counts[said.split()[0]] += 1
        if said.split()[0] not in ("refused", "read"):
            self.wrong.append(f"{what}: {said[:300]}")


def attempt(call: Callable[[], object], names: Iterable[str], *, may_lack: bool = False) -> str:
    """Call, and say whether it read, or was refused by an error that names one of some files."""
    try:
        call()
    except BudgetError as error:
        return "refused" if may_lack else f"FOREIGN {error!r}"
    except (FeatstoreError, OSError) as error:
        return "refused" if is_named(error, names) else f"UNNAMED {error!r} {getattr(error, 'filename', '')}"
    except Exception as error:
        return f"FOREIGN {error!r}"
    return "read"


# --- other things in the place of files -----------------------------------------------------------------------------------------


def _as_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _as_relative_link(path: Path, target: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))


def _as_fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


def _as_device(path: Path, target: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except PermissionError:  # a link to it, where only root makes devices
        path.symlink_to("/dev/zero")


def _as_socket(path: Path, target: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def _as_directory(path: Path, target: Path) -> None:
    path.mkdir()


SWAPS = (_as_link, _as_relative_link, _as_fifo, _as_device, _as_socket, _as_directory)


def escapes(name: str, folder: str) -> Hostile:
    """Put links, FIFOs, devices, sockets and folders in the place of each file and folder of a subject."""
    there = Hostile(Path(folder), name)
    for each in there.files:
        path, target = there.path / each, there.outside / "target"
        for swap in SWAPS:
            target.write_bytes(there.files[each])
            path.unlink()
            swap(path, target)
            there.attempt(f"{each} {swap.__name__}", [each])
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(there.files[each])
    for path in [each for each in there.path.rglob("*") if each.is_dir()]:
        inside = str(path.relative_to(there.path))
        held = [each for each in there.files if each.startswith(f"{inside}/")]
        shutil.copytree(path, there.outside / "folder")
        shutil.move(path, there.path.parent / "aside")
        path.symlink_to(there.outside / "folder")
        there.attempt(f"{path.name} as a link to a folder", [inside, *held])
        path.unlink()
        shutil.move(there.path.parent / "aside", path)
        shutil.rmtree(there.outside / "folder")
    assert there.subject.digest(there.path) == there.whole
    return there


def hard_links(folder: str) -> Hostile:
    """Have every file of a dataset be a hard link of one outside, and change the dataset: the other names keep their bytes."""
    import featstore

    there = Hostile(Path(folder), "dataset")
    for each, data in there.files.items():
        (there.outside / each).parent.mkdir(exist_ok=True)
        (there.outside / each).write_bytes(data)
        (there.path / each).unlink()
        os.link(there.outside / each, there.path / each)
    there.attempt("hard links", there.files, may_read=True)
    with featstore.open(there.path, **OPEN) as g:
        g.features["wide"].update(np.arange(5), np.zeros((5, 8000), np.uint8), progress=False)
        g.features["x"].update(np.arange(100), np.zeros((100, 9), np.float32), progress=False)
        featstore.partition(g, 3, "random", progress=False)
        g.add_feature("more", np.zeros((g.num_nodes, 2)), progress=False)
    for each, data in there.files.items():
        there.note("read" if (there.outside / each).read_bytes() == data else "ESCAPE written", each)
    return there


# --- names that lead elsewhere --------------------------------------------------------------------------------------------------

NAMES = (
    "../outside/target",
    "../../outside/target",
    "a/../../../outside/target",
    "link/target",
    "x\0y",
    "\ud800",
    "n" * 5000,
    "",
    ".",
    "..",
    "/",
    "//",
)


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key.replace(old, new): _renamed(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value


def names(name: str, folder: str) -> Hostile:
    """Let a catalog, and the records of a pack, name files elsewhere; a link within leads there, too."""
    there = Hostile(Path(folder), name)
    (there.path / "link").symlink_to(there.outside)
    for new in (*NAMES, str(there.outside / "target")):
        for each, data in there.files.items():
            if name == "pack" and (isinstance(record := _record(there.path / each), dict)):
                texts = [at for at in places(record) if isinstance(_at(record, at), str) and at[-1] in ("file", "name")]
                for at in texts:
                    (there.outside / "target").write_bytes(there.files.get(str(_at(record, at)), b""))
                    _write_record(there.path / each, replaced(record, at, new))
                    may_read = at[0] == "types" or "features" in at
                    there.attempt(f"{each} {at} = {new!r}", [each, os.path.join(os.path.dirname(each), new)], may_read=may_read)
                    _put(there.path / each, data)
        if CATALOG_FILE in there.files:
            entries = entries_of(there.files[CATALOG_FILE])
            for file in [key[5:] for key in entries if key.startswith("file/")]:
                (there.outside / "target").write_bytes(there.files[file])
                (there.outside / "target.sums").write_bytes(there.files[file + ".sums"])
                try:
                    forged = catalog_of(_renamed(entries, file, new))
                except (ValueError, UnicodeEncodeError):  # no key of a catalog
                    continue
                _put(there.path / CATALOG_FILE, forged)
                there.attempt(f"{file} = {new!r}", [CATALOG_FILE, new, new.partition("/")[0]])
            _put(there.path / CATALOG_FILE, there.files[CATALOG_FILE])
    return there


def _record(path: Path) -> Any:
    try:
        arrays, _ = arrays_of(path)
        return json.loads(arrays[0].tobytes())
    except Exception:
        return None


def _at(record: Any, at: tuple[Any, ...]) -> Any:
    for each in at:
        record = record[each]
    return record


def _write_record(path: Path, record: Any) -> None:
    arrays, file_id = arrays_of(path)
    arrays[0] = np.frombuffer(json.dumps(record).encode(), np.uint8)
    forge(path, arrays, file_id)


# --- sizes that are not so ------------------------------------------------------------------------------------------------------


def sizes(name: str, folder: str, step: int) -> Hostile:
    """Let every number of a catalog, of records and of headers be huge: it is refused before anything of that size is made."""
    there = Hostile(Path(folder), name)
    there.attempt("as it is", [], may_read=True)
    for number, (what, path, data) in enumerate(_declared(there)):
        if number % step:
            continue
        _put(there.path / path, data)
        with Meter() as meter:
            there.attempt(what, [path], may_read=True, may_lack=True)
        _put(there.path / path, there.files[path])
        if meter.n_bytes > 2 * there.n_bytes + NOISE_BYTES:
            there.note(f"MEMORY {meter.n_bytes}", what)
    return there


def _declared(there: Hostile) -> Iterator[tuple[str, str, bytes]]:
    for path, data in there.files.items():
        if path == CATALOG_FILE:
            entries = entries_of(data)
            for key, entry in entries.items():
                for at in places(entry):
                    if at and type(_at(entry, at)) is int:
                        for huge in HUGE:
                            yield f"{key} {at} = {huge}", path, catalog_of({**entries, key: replaced(entry, at, huge)})
        elif isinstance(record := _record(there.path / path), dict):
            for at in places(record):
                if type(_at(record, at)) is int:
                    for huge in HUGE:
                        _write_record(there.path / path, replaced(record, at, huge))
                        forged = (there.path / path).read_bytes()
                        _put(there.path / path, data)
                        yield f"{path} {at} = {huge}", path, forged
        elif data[:8] == b"FEATSTOR":
            Header.unpack(data[:PAGE_BYTES], path)
            for at in range(64, 104, 8):
                for huge in HUGE:
                    yield f"{path} header {at} = {huge}", path, data[:at] + struct.pack("<Q", huge) + data[at + 8 :]
        elif data[-96:-88] == b"FSSECT\0\0":
            for at in (-32, -24):
                for huge in HUGE:
                    end = len(data) + at
                    yield f"{path} tail {at} = {huge}", path, data[:end] + struct.pack("<Q", huge) + data[end + 8 :]


# --- depth, and files that unpack to much ---------------------------------------------------------------------------------------


def _npy(shape: str, body: bytes = b"", descr: str = "<i8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def _archive(**members: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members.items():
            made.writestr(name.replace("__", "/"), data)
    return held.getvalue()


def _gzipped(data: bytes, times: int) -> bytes:
    """Compress many times the same piece, without ever having all of it."""
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(data) for _ in range(times)), packer.flush()])


def depths(folder: str) -> Hostile:
    """Give the importers, and readers of JSON, texts of great depth, shapes of great size, and little that unpacks to much."""
    where = Path(folder)
    there = Hostile(where, "mapped")

    def check(what: str, name: str, data: bytes, read: Callable[[Path], object], allowed: int | None = None) -> None:
        path = where / name
        path.write_bytes(data)
        signal.alarm(PATIENCE_S)
        with Meter() as meter:
            said = attempt(lambda: read(path), [str(path)], may_lack=True)
        signal.alarm(0)
        there.note(said, what)
        if meter.n_bytes > (2 * len(data) if allowed is None else allowed) + NOISE_BYTES:
            there.note(f"MEMORY {meter.n_bytes} for {len(data)} bytes", what)

    deep = b"[" * 200_000
    for text in (deep, b'{"a":' * 200_000, b'{"map":[["a",' * 50_000):
        data = section_file([np.frombuffer(text, np.uint8)], "state")
        check("depth of a state", "state", data, lambda path: read_state(str(path), "state"))
    tensor = b'{"map": [["a", {"tensor": 1, "shape": [4294967296], "dtype": "float64"}]]}'
    data = section_file([np.frombuffer(tensor, np.uint8), np.zeros(0, np.uint8)], "state")
    check("a tensor without values", "state", data, lambda path: read_state(str(path), "state"))
    widths = {"feature": "x", "n_in": 2**20, "hidden": 2**20, "n_out": 9, "n_layers": 2}
    for changed in ({}, {"n_layers": 2**40}, {"n_in": 2**62}, {"hidden": -1}):
        text = json.dumps({"sizes": widths | changed, "weights": ["a", "b"]}).encode()
        data = section_file([np.frombuffer(text, np.uint8), *[np.zeros(1, np.float32)] * 2], "model")
        check("sizes of a model", "model", data, load_model)
    for shape in (
        "(4611686018427387903,)",
        "(2, 1000000000000)",
        "(0, 2305843009213693951)",
        "(" + "1," * 5000 + ")",
        "(" * 9000,
    ):
        check("shape of an array", "x.npy", _npy(shape), lambda path: list(open_array("x", path).blocks(4096)))
        check("shape of a member", "x.npz", _archive(**{"x.npy": _npy(shape)}), _drained)
    zeros = _npy(f"({96 << 20},)", bytes(96 << 20), "|u1")
    check("an archive that unpacks to much", "x.npz", _archive(**{"x.npy": zeros}), _drained, 16 << 20)
    for data in (_gzipped(bytes(1 << 20), 160), _gzipped(b"1," * (1 << 19), 160), _gzipped(b'"' + b"1" * (1 << 20), 160)):
        for read in (count_lines, read_records, read_ints):
            check(f"{read.__name__} of a long line", "x.csv.gz", data, read, 96 << 20)  # blocks that pyarrow reads ahead
    for text in (b"graph: " + b"[" * 20_000, b"a: &a [x]\n" + b"b: &b [*a,*a]\n" * 9_000, _laughs(), b"graph: " + b"9" * 100_000):
        check("depth of YAML", "metadata.yaml", text, lambda path: graphbolt(path, where / "out"), 100 * len(text) + (64 << 20))
    return there


def _drained(path: Path) -> None:
    archive = Archive(path)
    for name in archive.names:
        for _ in archive.rows(name).blocks(4096):
            pass


def _laughs() -> bytes:
    lines = [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [b"a%d: &a%d [%s]" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 30)]
    return b"\n".join(lines)


# --- code -----------------------------------------------------------------------------------------------------------------------


class _Touching:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def payloads(canary: Path) -> dict[str, bytes]:
    """Make files that run code when they are read without care."""
    loaded = pickle.dumps(_Touching(canary))
    objects = io.BytesIO()
    np.save(objects, np.array([_Touching(canary)], dtype=object), allow_pickle=True)
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as made:
        made.writestr("archive/data.pkl", loaded)
        made.writestr("archive/version", "3")
    tag = f'!!python/object/apply:builtins.open ["{canary}", "w"]'
    return {
        "pickle": loaded,
        "npy": objects.getvalue(),
        "npz": _archive(
            **{"x.npy": objects.getvalue(), "edge_index.npy": objects.getvalue(), "num_nodes_list.npy": objects.getvalue()}
        ),
        "pt": held.getvalue(),
        "yaml": f"graph: {tag}".encode(),
        "yaml new": tag.replace("apply", "new").encode(),
    }


def code(folder: str) -> Hostile:
    """Give the importers files that run code when they are read without care."""
    where = Path(folder)
    there = Hostile(where, "mapped")
    canary = there.outside / "ran"
    for kind, data in payloads(canary).items():
        for name, put, call in _readers(where, data):
            put()
            held = [str(each) for each in (where / "data").rglob("*") if each.is_file()]
            watch = Watch(there.outside)
            said = attempt(call, held)
            there.note("READ" if said == "read" else said, f"{kind} by {name}")
            if watch.events() or canary.exists():
                there.note("ESCAPE code ran", f"{kind} by {name}")
                canary.unlink(missing_ok=True)
            watch.close()
    return there


def _readers(where: Path, data: bytes) -> Iterator[tuple[str, Callable[[], None], Callable[[], object]]]:
    def putter(*paths: str) -> Callable[[], None]:
        def put() -> None:
            shutil.rmtree(where / "data", ignore_errors=True)
            for path in ("metadata.yaml", *paths):
                (where / "data" / path).parent.mkdir(parents=True, exist_ok=True)
                (where / "data" / path).write_bytes(data)

        return put

    def bolt(form: str) -> Callable[[], None]:
        def put() -> None:
            putter("edges")()
            text = f"graph: {{nodes: [{{num: 3}}], edges: [{{format: {form}, path: edges}}]}}"
            (where / "data" / "metadata.yaml").write_text(text)

        return put

    target = where / "out"
    yield "open_array", putter("x"), lambda: list(open_array("x", where / "data" / "x").blocks(4096))
    yield "Archive", putter("x.npz"), lambda: Archive(where / "data" / "x.npz").small("x")
    yield "npz", putter("x.npz"), lambda: npz(where / "data" / "x.npz", target, progress=False)
    yield "graphbolt", putter(), lambda: graphbolt(where / "data", target, progress=False)
    for form in ("numpy", "torch", "csv"):
        yield f"graphbolt {form}", bolt(form), lambda: graphbolt(where / "data", target, progress=False)
    yield "ogb", putter("raw/data.npz"), lambda: ogb(where / "data", target, progress=False)
    split = ("raw/edge_index_dict.npz", "raw/num_nodes_dict.npz", "raw/num_edges_dict.npz", "split/s/split_dict.pt")
    yield "ogb of types", putter(*split), lambda: ogb(where / "data", target, progress=False)
    files = ("processed/paper/node_feat.npy", "processed/paper__cites__paper/edge_index.npy")
    yield "igb", putter(*files), lambda: igb(where / "data", target, progress=False)
    yield "state", putter("state"), lambda: read_state(str(where / "data" / "state"), "state")
