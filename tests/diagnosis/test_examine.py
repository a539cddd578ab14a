"""The doctor's whole report: on this machine, under a filter of system calls, in memory, over layers, in a control group."""

from __future__ import annotations

import ctypes
import errno
import html
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import featstore
from featstore import Diagnosis, Finding
from featstore.testing.faults import deny_syscalls
from featstore.testing.limits import MemoryGroup, memory_group
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

NAMES = ["io_uring", "file system", "direct I/O", "memory", "processors", "open files", "disk", "shared memory"]
NAMES += ["packages", "devices"]
X = np.arange(30_000, dtype=np.float32).reshape(3000, 10)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    featstore.OutOfCoreGraph.create(tmp_path / "g", np.zeros(3001, int), [], {"x": X}, progress=False).close()
    return str(tmp_path / "g")


def look(path: str, **options: object) -> Diagnosis:
    """Look without measuring; whatever is no fault needs no cause, and all else has a cause and a remedy."""
    found = featstore.doctor(path, rates=False, **options)  # type: ignore[arg-type]
    for each in found:
        assert bool(each.cause) == bool(each.remedy) == (each.status != "ok"), each
        assert all(len(text) <= 200 for text in (each.text, each.cause, each.remedy)), f"a notebook would cut {each}"
    return found


def reason(path: str) -> str:
    with featstore.open(path, memory="64MiB") as g:
        assert np.array_equal(g.features["x"][:].numpy(), X)
        return str(g.features["x"].stats()["reason"])


def test_a_dataset_here(dataset: str) -> None:
    found = look(dataset, memory="64MiB")
    assert [each.name for each in found] == [*NAMES, "dataset"]
    assert found.errors == []
    assert found["memory"].values["memory"] == 64 << 20
    assert found["direct I/O"].values["mode"].startswith("direct")
    assert len(found) == len(NAMES) + 1
    with pytest.raises(KeyError, match="no finding 'ring'; there is 'io_uring', 'file system'"):
        found["ring"]
    assert reason(dataset) == "the kernel allows it"
    assert os.listdir(os.path.dirname(dataset)) == ["g"]


def test_by_default_the_directory_that_the_process_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert featstore.doctor(rates=False).path == str(tmp_path)
    assert featstore.doctor("~", rates=False).path == os.path.expanduser("~")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("missing", ["g", "a/b/g"])
def test_a_place_that_is_not_there_yet(tmp_path: Path, missing: str) -> None:
    found = featstore.doctor(tmp_path / missing, rates=False)
    assert found.path == str(tmp_path)
    assert (found["place"].status, found["place"].text) == ("note", f"of {tmp_path}, the nearest directory that is there")
    assert found["place"].cause.startswith(f"{tmp_path / missing} is not there yet")
    assert "place" not in [each.name for each in featstore.doctor(tmp_path, rates=False)]
    assert os.listdir(tmp_path) == []


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(FileNotFoundError):
        featstore.doctor(tmp_path / "link")
    with pytest.raises(NotADirectoryError, match="not a directory: give a dataset, a pack, or a directory"):
        featstore.doctor(tmp_path / "file")
    with pytest.raises(ValueError, match="not a size"):
        featstore.doctor(tmp_path, "much")


def test_a_damaged_dataset_is_a_finding(dataset: str) -> None:
    (Path(dataset) / "catalog.lmdb" / "data.mdb").write_bytes(bytes(8192))
    found = look(dataset)
    assert [each.name for each in found.errors] == ["dataset"]
    assert found["dataset"].text == "is damaged"


def test_how_it_is_shown() -> None:
    ring = Finding("io_uring", "warning", "refused", "a <filter>", "allow it")
    found = Diagnosis("/g", (ring, Finding("packages", "ok", "torch 2")))
    assert str(found).splitlines() == [
        "/g",
        "  warning  io_uring      refused",
        "                         because: a <filter>",
        "                         → allow it",
        "  ok       packages      torch 2",
        "1 thing is in the way",
    ]
    shown = found._repr_html_()
    assert "a &lt;filter&gt;" in shown
    assert "1 thing is in the way" in html.unescape(shown)
    assert found.as_dict()["warnings"] == 1
    assert str(Diagnosis("/g", ())).endswith("nothing is in the way")
    assert str(Diagnosis("/g", (ring, Finding("memory", "error", "much", "why", "less")))).endswith("2 things are in the way")


# -- what is in the way, really ------------------------------------------------------------------------------------------------


def filtered(path: str) -> None:
    deny_syscalls(["io_uring_setup"])
    found = look(path)
    assert found.warnings[0] is found["io_uring"]
    assert "Operation not permitted" in found["io_uring"].text
    assert "seccomp filter" in found["io_uring"].cause
    assert "docker run --security-opt seccomp=profile.json" in found["io_uring"].remedy
    assert found["dataset"].status == "ok"
    assert "io_uring was refused" in reason(path)
    assert "featstore doctor says why" in reason(path)
    with pytest.raises(OSError, match="featstore doctor says why") as caught:
        featstore.open(path, memory="64MiB", backend="io_uring")
    assert caught.value.errno == errno.EPERM
    os.environ["FEATSTORE_BACKEND"] = "io_uring"
    assert [each.name for each in look(path).errors] == ["io_uring"]


def test_under_a_filter_that_refuses_rings(dataset: str) -> None:
    run_in_fork(filtered, dataset)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no tmpfs here")
def test_in_memory(dataset: str) -> None:
    place = Path("/dev/shm") / f"featstore-doctor-test-{os.getpid()}"
    try:
        shutil.copytree(dataset, place)
        for path in (place, place.parent):
            found = look(str(path))["file system"]
            assert (found.status, found.values["file_system"]) == ("warning", "tmpfs")
            assert "lies in memory" in found.cause
            assert found.remedy == "keep datasets on a drive"
        assert reason(str(place)).endswith("direct I/O was refused: featstore doctor says why")
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def squashed(dataset: str, tmp_path: Path) -> Path:
    """A folder with a squashfs of the dataset, and the directories of an overlay."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    if shutil.which("mksquashfs") is None:
        pytest.skip("mksquashfs is not there: squashfs-tools has it")
    folder = tmp_path / "layers"
    for name in ("image/lower", "lower", "upper", "work", "merged"):
        (folder / name).mkdir(parents=True)
    shutil.move(dataset, folder / "image" / "g")
    subprocess.run(["mksquashfs", folder / "image", folder / "squash", "-quiet", "-no-progress"], check=True, capture_output=True)
    mount = ["mount", "-t", "squashfs", "-o", "loop,ro", folder / "squash", folder / "lower"]
    overlay = f"mount -t overlay overlay -o {overlay_options(folder)} {folder / 'merged'}"
    tried = subprocess.run(["unshare", "-m", "sh", "-c", f'"$@" && {overlay}', "sh", *mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no overlay over squashfs can be mounted: {tried.stderr.strip()}")
    return folder


def overlay_options(folder: Path) -> str:
    return f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"


def pretend_much() -> None:
    """Let the machine have much memory and room left, in a fork."""
    much = SimpleNamespace(total=1 << 40, available=1 << 40)
    psutil.virtual_memory = lambda: much
    shutil.disk_usage = lambda path: (1 << 40, 0, 1 << 40)  # type: ignore[assignment]


def over_layers(folder: Path) -> None:
    """In a fork, whose mounts are its own and go with it."""
    pretend_much()
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, recursive_private = 0x20000, 0x4000 | 0x40000
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(None, b"/", None, recursive_private, None) == 0
    subprocess.run(["mount", "-t", "squashfs", "-o", "loop,ro", folder / "squash", folder / "lower"], check=True)
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", overlay_options(folder), folder / "merged"], check=True)
    for place, kind in (("merged", "overlay over squashfs"), ("lower", "squashfs")):
        path = os.path.realpath(folder / place / "g")
        found = look(path)
        assert [each.name for each in found.warnings] == ["direct I/O"]
        assert found["file system"].text.startswith(f"{kind} at ")
        assert "a container's layers" in found["file system"].cause
        why = "takes O_DIRECT and refuses to read" if place == "merged" else "O_DIRECT refused"
        assert why in found["direct I/O"].cause
        assert found["direct I/O"].cause.endswith(f": {kind} at {os.path.dirname(path)}")
        assert "docker run -v /mnt/ssd:/data" in found["direct I/O"].remedy
        assert found["dataset"].status == "ok"
        assert reason(path) == "the kernel allows it; direct I/O was refused: featstore doctor says why"


def test_on_an_overlay_over_squashfs(squashed: Path) -> None:
    run_in_fork(over_layers, squashed)


def in_a_group(group: MemoryGroup, path: str) -> None:
    group.enter()
    pretend_much()
    found = look(path, memory="4GiB")
    assert [each.name for each in found.errors] == ["memory"]
    assert "a control group allows 1.00 GiB; memory=4.00 GiB" in found["memory"].text
    assert "exceeds the 1.00 GiB that the control group allows" in found["memory"].cause
    words = re.match(r"memory='([^']*)' keeps within the control group's limit", found["memory"].remedy)
    assert words is not None
    assert look(path, memory=words[1])["memory"].status == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")
def test_in_a_control_group_of_one_gibibyte(dataset: str) -> None:
    with memory_group(1 << 30) as group:
        run_in_fork(in_a_group, group, dataset)
