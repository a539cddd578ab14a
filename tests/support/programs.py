"""Programs and campaigns, each in a process of its own: forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featstore.testing import faults

__all__ = [
    "FORGET_FEATSTORE",
    "OF_LIGHTNING",
    "OF_PYG",
    "require_asking",
    "run_beside",
    "run_in_fork",
    "run_program",
    "run_ranks",
    "start_server",
]

OF_PYG = ["`torch.jit.script` is deprecated"]  # what PyG warns of when it is imported
OF_LIGHTNING = [r"`isinstance\(treespec", "Your `IterableDataset` has `__len__` defined"]  # and Lightning when it is used

# A line of a program after which the library is imported anew, as by another interpreter; torch is there.
FORGET_FEATSTORE = "import sys; [sys.modules.pop(each) for each in [*sys.modules] if each.split('.')[0] == 'featstore']; "

_FORKS = multiprocessing.get_context("forkserver")
_LIBRARY = contextlib.ExitStack()  # the fault library's file, which is there as long as the server
_asked_for = True  # whether the test that runs asks for the server; where no test runs, as in a fork, nobody need


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_server() -> None:
    """Start the process that is forked; it stays until this one ends. It has the fault library, and one thread."""
    _FORKS.set_forkserver_preload(["tests.support.preloaded", "tests.support.programs"])
    library = _LIBRARY.enter_context(faults.fault_library())
    preloaded = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    no_threads = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # of Arrow, which PyG imports
    with _environment(**no_threads, LD_PRELOAD=preloaded, **{faults._LOADED: library}):
        multiprocessing.forkserver.ensure_running()


def require_asking(is_asked_for: bool) -> None:
    """Let forks of a test fail unless it asks for the server by its fixture, even where an earlier test has started it.

    Else the server that the first such test of a process starts is another one: without the fault library, and begun within the
    test, where it counts as left behind. Which test is the first depends on how workers share them.
    """
    global _asked_for
    _asked_for = is_asked_for


def _start(process: Any) -> Any:
    assert _asked_for, "mark a test that forks the server: @pytest.mark.usefixtures('_program_server')"
    process.start()
    return process


def run_program(
    script: str | os.PathLike[str],
    *arguments: object,
    cwd: str | os.PathLike[str],
    ignored: Sequence[str] = (),
    starts_programs: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python -W error script arguments`` would in ``cwd``, and return what it printed and its exit status.

    Where ``script`` is ``"-m"``, the first of the arguments is a module's name.
    Warnings whose message begins like one of ``ignored`` are no errors. What the import of featstore and of torch
    does is not seen here, nor what happens when an interpreter ends. Drives are measured on a small file, as in other tests.
    Where it ``starts_programs``, those that it runs by ``subprocess`` as ``[sys.executable, script, ...]`` are forks, too, as are
    those of ``[sys.executable, "-m", module, ...]``.
    """
    line = [os.fspath(script), *map(str, arguments)]
    target = _program_with_children if starts_programs else _program
    with _printed() as printed:
        status = _fork(target, line, os.fspath(cwd), list(ignored), {**os.environ, **environment}, printed)
        return subprocess.CompletedProcess(line, status, *(each.read_text() for each in printed))


def run_in_fork(function: Callable[..., None], *arguments: Any, timeout_s: float = 500) -> None:
    """Call ``function(*arguments)`` and raise AssertionError, with its output, unless it returns.

    As :func:`featstore.testing.faults.run_in_child` does with its faults, but in a fork of the server: for campaigns that do
    not care what an interpreter's start does, nor how much memory one holds then.
    """
    __tracebackhide__ = True
    with _printed() as printed:
        name = function.__module__, function.__qualname__
        status = _fork(_call, *name, arguments, timeout_s, os.getcwd(), dict(os.environ), printed)
        if status:
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            shown = "".join(each.read_text() for each in printed)
            raise AssertionError(f"{function.__qualname__} in the child: {how}\n{shown}")


def run_ranks(function: Callable[..., None], world_size: int, *arguments: Any, timeout_s: float = 500) -> list[tuple[int, str]]:
    """Call ``function(rank, *arguments)`` in forks of the server, at once; return each one's exit status and what it printed."""
    name, started = (function.__module__, function.__qualname__), list[Any]()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_printed()) for _ in range(world_size)]
        try:
            for rank, printed in enumerate(files):
                call = (*name, (rank, *arguments), timeout_s, os.getcwd(), dict(os.environ), printed)
                started.append(_start(_FORKS.Process(target=_call, args=call)))
            return [
                (_joined(each), "".join(file.read_text() for file in printed))
                for each, printed in zip(started, files, strict=True)
            ]
        finally:
            for each in started:
                if each.is_alive():  # the run of the tests was interrupted
                    each.kill()
                    each.join()
                each.close()


@contextlib.contextmanager
def run_beside(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any]]:
    """Call ``function(link, *arguments)`` in a fork of the server while the context lasts, and kill it then.

    Yields the other end of ``link``, a connection of :mod:`multiprocessing`, and the process.
    """
    link, there = _FORKS.Pipe()
    process = _start(_FORKS.Process(target=function, args=(there, *arguments)))
    there.close()
    try:
        yield link, process
    finally:
        process.kill()
        process.join()
        process.close()
        link.close()


def _joined(process: Any) -> int:
    process.join()
    return int(process.exitcode)


@contextlib.contextmanager
def _printed() -> Iterator[tuple[Path, Path]]:
    """Yield files for what a child prints, and for its errors."""
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        yield Path(folder) / "stdout", Path(folder) / "stderr"


def _fork(target: Callable[..., None], *arguments: Any) -> int:
    """Run ``target`` in a fork of the server and return its exit status."""
    process = _start(_FORKS.Process(target=target, args=arguments))
    try:
        process.join()
    finally:
        if process.is_alive():  # the run of the tests was interrupted
            process.kill()
            process.join()
    status = process.exitcode
    process.close()
    assert status is not None
    return status


def _begin(cwd: str, ignored: list[str], environment: dict[str, str], printed: tuple[Path, Path]) -> None:
    """Let the fork be what a new process would be."""
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
        warnings.filterwarnings("ignore", message=message)


def _program(line: list[str], cwd: str, ignored: list[str], environment: dict[str, str], printed: tuple[Path, Path]) -> None:
    _begin(cwd, ignored, environment, printed)
    _run_script(line)


def _run_script(line: list[str]) -> None:
    from featstore.storage import drive

    drive.SCRATCH_BYTES = 1 << 20
    if line[0] == "-m":
        sys.argv[:] = line[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(line[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = line
        sys.path.insert(0, os.path.dirname(os.path.abspath(line[0])))
        runpy.run_path(line[0], run_name="__main__")


# A program that starts others has threads, which no fork may have. It runs in a fork of this fork, which forks what it asks for.


@dataclass
class _Request:
    """A program to start: its words, where, what precedes it, and the paths of its pipes or files."""

    line: list[str]
    cwd: str
    environment: dict[str, str]
    prepare: Callable[[], None] | None
    stdin: str
    stdout: str


def _program_with_children(line: list[str], cwd: str, ignored: list[str], environment: dict[str, str], printed: Any) -> None:
    _begin(cwd, ignored, environment, printed)
    context = multiprocessing.get_context("fork")
    requests, asks = context.Pipe()
    program = context.Process(target=_asking, args=(asks, requests, line))
    program.start()
    asks.close()
    children = dict[int | None, Any]()
    with contextlib.suppress(EOFError):  # it has ended
        while True:
            asked = requests.recv()
            if isinstance(asked, _Request):
                child = context.Process(target=_child, args=(asked,))
                child.start()
                children[child.pid] = child
                requests.send(child.pid)
            else:
                children[asked].join()
                requests.send(children[asked].exitcode)
    program.join()
    if program.exitcode < 0:
        os.kill(os.getpid(), -program.exitcode)
    sys.exit(program.exitcode)


def _child(request: _Request) -> None:
    for number, path in enumerate((request.stdin, request.stdout)):
        fd = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0)  # noqa: SIM115 - multiprocessing gives a child none
    if request.prepare is not None:
        request.prepare()
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    warnings.resetwarnings()  # it prints them
    _run_script(request.line)


def _moved(command: Sequence[str]) -> tuple[Sequence[str], Callable[[], None] | None]:
    """Return a command without what has it run in another network namespace, and what moves a fork there."""
    if list(command[:2]) == ["unshare", "--net"]:
        return command[2:], functools.partial(_enter_network, "")
    if list(command[:3]) == ["ip", "netns", "exec"]:
        return command[4:], functools.partial(_enter_network, command[3])
    return command, None


def _enter_network(name: str) -> None:
    """Enter the network namespace of this name, or one without a link."""
    system, new_network = ctypes.CDLL(None, use_errno=True), 0x40000000  # CLONE_NEWNET
    if name:
        with open(f"/run/netns/{name}") as namespace:
            failed = system.setns(namespace.fileno(), new_network)
    else:
        failed = system.unshare(new_network)
    if failed:
        raise OSError(ctypes.get_errno(), "no other network namespace")


class _Forks:
    """Maker of a program's children, in place of :mod:`subprocess`, where they are scripts of this Python."""

    def __init__(self, asks: Any) -> None:
        self._asks = asks
        self._run, self._popen = subprocess.run, subprocess.Popen

    def start(self, command: Sequence[str], options: dict[str, Any], stdin: str, stdout: str) -> int:
        environment = options.get("env") or dict(os.environ)
        self._asks.send(_Request(list(command[1:]), os.getcwd(), environment, options.get("preexec_fn"), stdin, stdout))
        return int(self._asks.recv())

    def wait(self, pid: int) -> int:
        self._asks.send(pid)
        return int(self._asks.recv())

    def run(self, command: Sequence[str], *more: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
        if more or not self._is_known(command, options):
            return self._run(command, *more, **options)
        with tempfile.NamedTemporaryFile("r") as printed:
            status = self.wait(self.start(command, options, os.devnull, printed.name))
            done = subprocess.CompletedProcess(command, status, printed.read())
        if options.get("check"):
            done.check_returncode()
        return done

    def popen(self, command: Sequence[str], *more: Any, **options: Any) -> Any:
        script, prepare = _moved(command)
        if more or not self._is_known(script, options):
            return self._popen(command, *more, **options)
        return _Piped(self, script, options if prepare is None else {**options, "preexec_fn": prepare})

    def _is_known(self, command: Sequence[str], options: dict[str, Any]) -> bool:
        is_script = command[0] == sys.executable and (command[1] == "-m" or os.fspath(command[1]).endswith(".py"))
        path = (options.get("env") or os.environ).get("PYTHONPATH")
        is_of_tree = path == os.environ.get("PYTHONPATH")  # whose library this fork has imported
        return bool(is_script and is_of_tree and options.get("stdout") == subprocess.PIPE and options.get("text"))


class _Piped:
    """A child whose output is a pipe, and its input too where that is asked for, as a ``Popen``."""

    def __init__(self, forks: _Forks, command: Sequence[str], options: dict[str, Any]) -> None:
        self._forks = forks
        self.returncode: int | None = None
        self.stdin: Any = None
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/stdin", f"{folder}/stdout"]
            for path in paths:
                os.mkfifo(path)
            if options.get("stdin") != subprocess.PIPE:
                paths[0] = os.devnull
            self._pid = forks.start(command, options, *paths)
            if paths[0] != os.devnull:
                self.stdin = open(paths[0], "w")  # noqa: SIM115 - the program does not close it
            self.stdout = open(paths[1])  # noqa: SIM115

    def communicate(self) -> tuple[str, None]:
        with self.stdout:
            said = self.stdout.read()
        self.wait()
        return said, None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._forks.wait(self._pid)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self._pid, signal.SIGKILL)


def _asking(asks: Any, requests: Any, line: list[str]) -> None:
    """Run the program; what it runs of Python is asked for."""
    requests.close()
    forks = _Forks(asks)
    subprocess.run, subprocess.Popen = forks.run, forks.popen
    _run_script(line)


def _call(
    module: str,
    name: str,
    arguments: tuple[Any, ...],
    timeout_s: float,
    cwd: str,
    environment: dict[str, str],
    printed: tuple[Path, Path],
) -> None:
    _begin(cwd, [], environment, printed)
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    try:
        function(*arguments)
    except SystemExit as error:  # its status might say that all was well
        raise AssertionError(f"{name} ended the process") from error
