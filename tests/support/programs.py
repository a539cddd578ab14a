"""Python programs, each in a process of its own: forked from one that has imported torch, which takes a second and more."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["OF_PYG", "run_program", "start_server"]

OF_PYG = ["`torch.jit.script` is deprecated"]  # what PyG warns of when it is imported

_FORKS = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the process that programs are forked from; it stays until this one ends. Its torch has one thread."""
    _FORKS.set_forkserver_preload(["torch", "numpy", "featstore", "tests.support.programs"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def run_program(
    script: str | os.PathLike[str],
    *arguments: object,
    cwd: str | os.PathLike[str],
    ignored: Sequence[str] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python -W error script arguments`` would in ``cwd``, and return what it printed and its exit status.

    Messages of ``DeprecationWarning`` that begin like one of ``ignored`` are no errors. What the import of featstore and of torch
    does is not seen here, nor what happens when an interpreter ends.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        printed = Path(folder) / "stdout", Path(folder) / "stderr"
        line = [os.fspath(script), *map(str, arguments)]
        process = _FORKS.Process(target=_run, args=(line, os.fspath(cwd), list(ignored), {**os.environ, **environment}, printed))
        process.start()
        try:
            process.join()
        finally:
            if process.is_alive():  # the run of the tests was interrupted
                process.kill()
                process.join()
        status = process.exitcode
        process.close()
        assert status is not None
        return subprocess.CompletedProcess(line, status, *(each.read_text() for each in printed))


def _run(line: list[str], cwd: str, ignored: list[str], environment: dict[str, str], printed: tuple[Path, Path]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate((os.devnull, *printed)):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(fd, number)
        os.close(fd)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    for message in ignored:
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
    sys.argv[:] = line
    sys.path.insert(0, os.path.dirname(os.path.abspath(line[0])))
    runpy.run_path(line[0], run_name="__main__")
