"""The doctor: everything that is looked at, in the order in which it is reported."""

from __future__ import annotations

import errno
import os

from featstore.config import user_path
from featstore.diagnosis import contents, process
from featstore.diagnosis.findings import Diagnosis, Finding
from featstore.diagnosis.kernel import rings
from featstore.diagnosis.packages import devices, packages
from featstore.diagnosis.places import direct_io, file_system, shared_memory, space

__all__ = ["doctor"]


def doctor(path: str | os.PathLike[str] = ".", memory: int | str | None = None, *, rates: bool = True) -> Diagnosis:
    """Look for what is in the way of reading fast on this machine, and say what to change.

    Parameters
    ----------
    path : path-like
        A dataset, a pack, or a directory where one is to be. If it is not there yet, its nearest parent that is there is looked
        at, which the finding ``place`` says.
    memory : int or str, optional
        The budget that is to be given to ``open``; by default that of ``open``, half of what is available.
    rates : bool
        Measure the drive, too, as ``strategy="auto"`` does: on the features if they are large, else on a scratch file of 64 MiB.

    Returns
    -------
    Diagnosis
        Findings, each with a status, a cause and a remedy; a table when printed. ``diagnosis["io_uring"]`` is one of them:
        ``io_uring``, ``file system``, ``direct I/O``, ``memory``, ``processors``, ``open files``, ``disk``, ``shared memory``,
        ``packages``, ``devices``; ``place`` if ``path`` is not there; ``dataset`` or ``pack`` if there is one; ``drive`` with
        ``rates``.

    Raises
    ------
    FileNotFoundError, NotADirectoryError, PermissionError
        ``path`` is empty, a link to nothing, or no directory that can be read. A damaged dataset is no exception, but a finding.
    ValueError
        ``memory`` is no size, or a variable ``FEATSTORE_…`` has no value that ``open`` takes.

    Notes
    -----
    A ring is made, and a page read by it. A page of the dataset, or of a temporary file, is read past the page cache. The dataset
    is opened within ``memory``, which checks the catalog and the lengths of all files, not every byte. Nothing in it is changed.
    Takes about a second with ``rates``, else some milliseconds.

    Examples
    --------
    >>> import featstore
    >>> print(featstore.doctor("graph", memory="4GiB"))
    """
    given = os.path.abspath(user_path(path))
    path = _nearest_directory(given)
    is_there = contents.holds_dataset(path) or contents.holds_pack(path)
    ring, of_memory = rings(), process.memory(memory)
    found = []
    if path != given:
        text, cause = f"of {path}, the nearest directory that is there", f"{given} is not there yet, or its path is another"
        found.append(Finding("place", "note", text, cause, "look at the path again, if it should be there", {"given": given}))
    found += [ring, file_system(path, is_there), direct_io(path, is_there), of_memory, process.processors()]
    found += [process.descriptors(), space(path, is_there), shared_memory(), packages(), devices()]
    backend = "auto" if ring.status == "ok" else "pread"
    asked, suggested = of_memory.values["memory"], of_memory.values["suggested"]
    budget = min(asked, suggested or asked)
    with contents.opened(path, budget, backend) as (of_contents, graph):
        found += [of_contents] if of_contents is not None else []
        found += [contents.rates(path, graph, backend)] if rates else []
    return Diagnosis(path, tuple(found))


def _nearest_directory(path: str) -> str:
    """Find the directory that is looked at: ``path``, or the nearest parent that is there."""
    try:
        os.listdir(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise
        return _nearest_directory(os.path.dirname(path))
    except NotADirectoryError:
        reason = "not a directory: give a dataset, a pack, or a directory where one is to be"
        raise NotADirectoryError(errno.ENOTDIR, reason, path) from None
    return path
