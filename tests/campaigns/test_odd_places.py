"""Places that cannot be written, and other odd ones: reads are bit-exact, writes work or are refused by the right error.

Every operation is called on each place, with its input and its output there, and nothing but its result is left, there or in the
temporary directory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.checks import BadStateError, Prepared, digest, report
from tests.campaigns.drives import needs_mounts, own_mounts, run
from tests.campaigns.operations import SCENARIOS, epoch, leftovers, own_stripes, state
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

NOBODY = 65534
BASE = Path("/mnt")  # which is the test's own, and which any user may enter
TEMPORARY = Path("/var/tmp")  # where run files go that cannot lie beside the dataset
# Operations that put a new directory in the place of the one that is there.
REPLACING = {"replace", "edges replace", "replace stripes", "pack again", "part again"}
REPLACING |= {name for name in SCENARIOS if name.startswith("import ")}


@dataclass(frozen=True)
class Place:
    """A place that ``root`` is at while it is ``mounted``.

    ``refused``: what writing is refused with, if it is. ``replacing``: the same of what replaces a directory. ``is_read``: it may
    be read.
    """

    mounted: Callable[[Path], contextlib.AbstractContextManager[None]]
    refused: int = 0
    replacing: int = 0
    is_read: bool = True


@contextlib.contextmanager
def over(root: Path, *options: str) -> Iterator[None]:
    """Mount something over ``root``."""
    run("mount", *options, root)
    try:
        yield
    except BaseException:  # what holds a file open may be in its traceback
        run("umount", "--lazy", root)
        raise
    run("umount", root)


@contextlib.contextmanager
def read_only(root: Path) -> Iterator[None]:
    with over(root, "--bind", os.fspath(root)):
        run("mount", "-o", "remount,bind,ro", root)
        yield


@contextlib.contextmanager
def squashed(root: Path, where: Path | None = None) -> Iterator[None]:
    """An image of what is there."""
    image = BASE / "image"
    run("mksquashfs", root, image, "-quiet", "-no-progress", "-noappend")
    with over(where or root, "-t", "squashfs", "-o", "loop,ro", os.fspath(image)):
        yield
    image.unlink()


@contextlib.contextmanager
def layers(root: Path, make: str = "") -> Iterator[None]:
    """A container's layers: an image, and what is written to a file system over it."""
    lower, upper = BASE / "lower", BASE / "upper"
    for each in (lower, upper):
        each.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(squashed(root, lower))
        file = BASE / "file"
        run("truncate", "-s", "64M", file)
        if make:
            run(*make.split(), file)
        stack.enter_context(over(upper, "-t", *(("ext4", "-o", "loop", os.fspath(file)) if make else ("tmpfs", "tmpfs"))))
        for name in ("new", "work"):
            (upper / name).mkdir()
        which = f"lowerdir={lower},upperdir={upper}/new,workdir={upper}/work"
        stack.enter_context(over(root, "-t", "overlay", "-o", which, "overlay"))
        own_stripes(root)  # of links with other inodes
        yield


@contextlib.contextmanager
def without_programs(root: Path) -> Iterator[None]:
    kept = BASE / "kept"
    shutil.copytree(root, kept, symlinks=True)
    with over(root, "-t", "tmpfs", "-o", "noexec,nosuid,nodev", "tmpfs"):
        shutil.copytree(kept, root, symlinks=True, dirs_exist_ok=True)
        own_stripes(root)
        yield
    shutil.rmtree(kept)


@contextlib.contextmanager
def of_another_user(root: Path, is_read: bool = True) -> Iterator[None]:
    mode = root.stat().st_mode
    root.chmod(0o755 if is_read else 0o700)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        root.chmod(mode)


PLACES = {
    "read-only": Place(read_only, errno.EROFS),
    "squashfs": Place(squashed, errno.EROFS),
    "overlay on tmpfs": Place(layers, replacing=errno.EXDEV),
    "overlay on ext4": Place(functools.partial(layers, make="mkfs.ext4 -q -F"), replacing=errno.EXDEV),
    "noexec": Place(without_programs),
    "another user's": Place(of_another_user, errno.EACCES),
    "another user's, unreadable": Place(functools.partial(of_another_user, is_read=False), errno.EACCES, is_read=False),
}


def call_at(ready: Prepared, name: str, place: Place) -> bool:
    """Call an operation at a place, and check what is there; return whether it was refused."""
    where, root = f"{ready.name}: {name}", ready.root
    ready.fresh()
    before, refused = digest(root), (ready.name in REPLACING and place.replacing) or place.refused
    error: OSError | None = None
    with place.mounted(root):
        if place.is_read and state(root) != ready.old:
            raise BadStateError(f"{where}: it is not what it was")
        try:
            ready.call()
        except OSError as caught:
            error = caught
        if place.is_read:
            if state(root) != (ready.new if error is None else ready.old):
                raise BadStateError(f"{where}: {error!r}: it is neither as it was nor as it is to be")
            if left := leftovers(root, ready.template):
                raise BadStateError(f"{where}: {error!r}: {left} is left")
            if place.refused and ready.name in ("epoch", "epoch by turns", "epoch streamed"):
                epoch(root, run_dir=None)
    if error is not None and (error.errno != refused or not str(error.filename).startswith(str(root))):
        raise BadStateError(f"{where}: {error!r}") from error
    if error is not None and error.errno == errno.EXDEV and "remove it first" not in str(error):
        raise BadStateError(f"{where}: nobody learns what to do: {error!r}") from error
    if place.refused and digest(root) != before:
        raise BadStateError(f"{where}: {error!r}: something was written")
    if refused and error is None and (ready.scenario.commits or not place.is_read):
        raise BadStateError(f"{where}: it was not refused")
    if left_over := os.listdir(TEMPORARY):
        raise BadStateError(f"{where}: {error!r}: {left_over} is left in {TEMPORARY}")
    return error is not None


def call_each(names: list[str], places: list[str]) -> None:
    """Call each operation at each place; in the child."""
    own_mounts()
    for each in (BASE, TEMPORARY):
        run("mount", "-t", "tmpfs", "-o", f"mode={'1777' if each == TEMPORARY else '755'}", "tmpfs", each)
    n_refused = dict.fromkeys(places, 0)
    for name in names:
        ready = Prepared(name, BASE / "template", BASE / "data")
        for place in places:
            n_refused[place] += call_at(ready, place, PLACES[place])
        shutil.rmtree(ready.template)
    for place in places:
        report("odd places", place=place, operations=len(names), refused=n_refused[place])


def call_where_it_may(name: str) -> None:
    """The control, in the child: a place that was to refuse, and does not; and one that loses what is written."""

    @contextlib.contextmanager
    def as_it_is(root: Path) -> Iterator[None]:
        yield

    own_mounts()
    for each in (BASE, TEMPORARY):
        run("mount", "-t", "tmpfs", "tmpfs", each)
    ready = Prepared(name, BASE / "template", BASE / "data")
    with pytest.raises(BadStateError, match="something was written"):
        call_at(ready, "control", Place(as_it_is, errno.EROFS))
    ready.call = lambda: None  # type: ignore[method-assign]
    with pytest.raises(BadStateError, match="neither as it was nor as it is to be"):
        call_at(ready, "control", PLACES["overlay on tmpfs"])


def needs_places() -> None:
    needs_mounts("ext4")
    if shutil.which("mksquashfs") is None:
        pytest.skip("images need mksquashfs")
    kinds: Any = subprocess.run(["cat", "/proc/filesystems"], capture_output=True, text=True, check=True).stdout.split()
    if not {"overlay", "squashfs"} <= set(kinds):
        pytest.skip("the kernel has no overlay or no squashfs")


def test_some_operations_at_odd_places() -> None:
    needs_places()
    run_in_fork(call_each, ["update", "epoch", "import replace"], list(PLACES))


def test_a_place_that_is_none_is_noticed() -> None:
    needs_places()
    run_in_fork(call_where_it_may, "update")


@pytest.mark.stress
@pytest.mark.parametrize("place", PLACES)
def test_every_operation_at_odd_places(place: str) -> None:
    needs_places()
    run_in_fork(call_each, list(SCENARIOS), [place], timeout_s=3000)
