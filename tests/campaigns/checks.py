"""Parts of campaigns: an operation that is ready to be broken, names that are the same in each attempt, states seen before."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featstore.creation import steps
from featstore.errors import CommittedError, FeatstoreError, FeatstoreWarning
from tests.campaigns.operations import ENDED, FULL, MEMORY, SCENARIOS, fresh, leftovers, state, sweep_as_a_writer

__all__ = ["BadStateError", "Prepared", "numbered", "prepared", "report"]


def report(campaign: str, **figures: Any) -> None:
    """Append the figures of a campaign, as a line of JSON, to the file that ``FEATSTORE_CAMPAIGNS`` names, if it names one."""
    path = os.environ.get("FEATSTORE_CAMPAIGNS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps({"campaign": campaign, **figures}) + "\n")


@contextlib.contextmanager
def numbered(seed: int = 1) -> Iterator[None]:
    """Let names and ids of files be the same in each attempt of this seed, so that the same call leaves the same bytes."""
    real, draws = uuid.uuid4, random.Random(seed)
    uuid.uuid4 = lambda: uuid.UUID(int=draws.getrandbits(128), version=4)
    try:
        yield
    finally:
        uuid.uuid4 = real


def digest(root: Path) -> bytes:
    """Digest names and contents of all that lies in ``root``."""
    found = hashlib.blake2b()
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = os.path.join(folder, name)
            # The mark of a stripe has the inode of its link.
            known = "owner" if name.startswith("owner-") else os.path.relpath(path, root)
            found.update(known.encode() + b"\0")
            if os.path.islink(path):
                found.update(os.readlink(path).encode())
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    content = file.read()
                found.update(len(content).to_bytes(8, "little") + content)
    return found.digest()


class BadStateError(AssertionError):
    """Neither the old state nor the new one, or something is left."""


class Prepared:
    """An operation whose old and new state are known; ``root`` is where it is attempted.

    A state is checked once: what has the same names and bytes is the same.
    """

    def __init__(self, name: str, template: Path, root: Path) -> None:
        self.name, self.scenario, self.template, self.root = name, SCENARIOS[name], template, root
        steps.CHECKPOINT_S = -1e9  # type: ignore[misc] - a record wherever one may be
        # A feature whose files were renamed, but not committed, is made again from the start, and this is said.
        warnings.filterwarnings("ignore", "making .* from the start: files are missing")
        self.n_states = 0
        self._known: dict[bytes, bool] = {}
        self.n_left = 0  # calls that left what the next writer sweeps
        self._failed: dict[tuple[bytes, str], tuple[bool, bool]] = {}
        template.mkdir()
        self.scenario.before(template)
        self.old = state(template)
        fresh(template, root)
        self.scenario.call(root)
        self.new = state(root)
        assert (self.new != self.old) == self.scenario.commits
        assert not leftovers(root, template)

    def fresh(self) -> None:
        fresh(self.template, self.root)

    def call(self) -> None:
        """Attempt the operation: the first call after :meth:`fresh`."""
        with numbered():
            self.scenario.call(self.root)

    def is_new(self, where: str, is_done: bool) -> bool:
        """Check what is there after a kill or a power cut: the old state, from which the call goes on, or the new one.

        Raises
        ------
        BadStateError
            It is neither, or damaged; the call was ``is_done``, and what it made is not there; it cannot be made again, or does
            not become the same, bit for bit; the next writer does not sweep what is left.
        """
        found = digest(self.root)
        if found not in self._known:
            self.n_states += 1
            try:
                self._known[found] = self._check(where)
            except (FeatstoreError, FeatstoreWarning, OSError) as error:  # a warning is an error here: work is lost
                raise BadStateError(f"{self.name}: {where}: {error!r}") from error
        if is_done and self.scenario.commits and not self._known[found]:
            raise BadStateError(f"{self.name}: {where}: what was acknowledged is lost")
        return self._known[found]

    def is_new_after(self, error: BaseException | None, where: str, *, may_leave: bool = False) -> bool:
        """Check what is there after a call that failed with ``error``, or did not: the old state, or the new one; nothing else.

        ``may_leave``: something was not removed, as removing it failed or was interrupted; the next writer removes it. Raises
        :class:`BadStateError`.
        """
        how = f"{type(error).__name__} {lack_of(error)} {may_leave}"
        found = digest(self.root), how
        if found not in self._failed:
            self.n_states += 1
            try:
                self._failed[found] = self._check_after(error, where, may_leave)
            except (FeatstoreError, OSError) as bad:
                raise BadStateError(f"{self.name}: {where}: {bad!r}") from bad
            except BadStateError as bad:
                raise bad from error
        is_new, is_left = self._failed[found]
        self.n_left += is_left
        return is_new

    def _check_after(self, error: BaseException | None, where: str, may_leave: bool) -> tuple[bool, bool]:
        where = f"{self.name}: {where}: {error!r}"
        found, scenario = state(self.root), self.scenario
        if error is None or (isinstance(error, CommittedError) and scenario.commits):
            expected = [self.new]
        else:
            expected = [self.old, self.new] if scenario.goes_on or is_interrupt(error) else [self.old]
        if (isinstance(error, CommittedError) or is_interrupt(error)) and scenario.goes_on:
            expected.append(before_labels(self.name, self.new))
        if found not in expected:
            raise BadStateError(f"{where}: {_other(found, expected[0])}")
        left = leftovers(self.root, self.template)
        if lack_of(error) in scenario.resumes:  # it stays, for the next call
            left = {each for each in left if ".tmp-" not in each and not each.startswith("making.") and ".partial" not in each}
        if left and not may_leave:
            raise BadStateError(f"{where}: {left} is left")
        is_left = bool(left)
        if scenario.commits and found == self.old:
            scenario.call(self.root)
            if state(self.root) != self.new:
                raise BadStateError(f"{where}: the next call makes something else: {_other(state(self.root), self.new)}")
            left = leftovers(self.root, self.root)
            if left and scenario.resumes and not may_leave:
                raise BadStateError(f"{where}: after the next call {left} is left")
        sweep_as_a_writer(self.root)  # which removes what could not be removed
        left = {each for each in leftovers(self.root, self.root) - self._linked() if ".tmp-" not in each}
        if left and scenario.commits:
            raise BadStateError(f"{where}: {left} is left")
        return found == self.new, is_left

    def _check(self, where: str) -> bool:
        found = state(self.root)
        if found not in (self.old, self.new, before_labels(self.name, self.new)):
            raise BadStateError(f"{self.name}: {where}: {_other(found, self.old)}, and {_other(found, self.new)}")
        is_new = found == self.new
        if found != self.new or not self.scenario.commits:  # the dead one is not in anyone's way
            self.scenario.call(self.root)
            if state(self.root) != self.new:
                what = _other(state(self.root), self.new)
                raise BadStateError(f"{self.name}: {where}: the next call makes something else: {what}")
        sweep_as_a_writer(self.root)
        left = {each for each in leftovers(self.root, self.root) if not is_empty_runs(self.root / each)}
        if is_new and self.scenario.commits:  # what a builder left is swept by the next one, with the stripes that it links to
            left = {each for each in left - self._linked() if ".tmp-" not in each}
        if left:
            raise BadStateError(f"{self.name}: {where}: {left} is left")
        return is_new

    def _linked(self) -> set[str]:
        """List the stripes of builds that the next builder sweeps."""
        return {each.name for each in self.root.glob("*.tmp-*/featstore-stripe-*")}


def is_empty_runs(path: Path) -> bool:
    """Tell whether a directory of run files is empty, as a kill between its mark's removal and its own leaves it."""
    return (path.suffix == ".runs" or path.name == "runs") and path.is_dir() and not any(path.iterdir())


def prepared(folder: str | os.PathLike[str], name: str) -> Prepared:
    """Make what is there before an operation in ``folder``, and the two states."""
    return Prepared(name, Path(folder) / "template", Path(folder) / "data")


def _other(found: Any, expected: Any) -> str:
    """Say where two states differ first."""
    if type(found) is not type(expected) or not isinstance(found, (list, tuple, dict)):
        return f"{found!r} is not {expected!r}"
    if isinstance(found, dict):
        found, expected = sorted(found.items()), sorted(expected.items())
    if len(found) != len(expected):
        return f"{found!r} is not {expected!r}"
    return next((_other(a, b) for a, b in zip(found, expected, strict=True) if a != b), "the same")


def lack_of(error: BaseException | None) -> str:
    """Say whether a drive, or a quota of it, was full, memory was short, or Ctrl-C came."""
    if isinstance(error, MemoryError):
        return MEMORY
    if is_interrupt(error):
        return ENDED
    if isinstance(error, OSError) and error.errno == errno.EDQUOT:
        return FULL
    return errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def is_interrupt(error: BaseException | None) -> bool:
    return isinstance(error, KeyboardInterrupt)


def before_labels(name: str, new: Any) -> Any:
    """Return the state where a layout is in place, and its labels will come with its next loader."""
    return (*new[:-1], []) if name == "layout" else new
