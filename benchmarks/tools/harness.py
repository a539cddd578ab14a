"""Harness of all benchmarks: paired runs, child processes, timed epochs, figures as JSON lines, the kernel's byte counts.

A figure is one line ``{"name", "value", "unit", "reference", "ratio", "runs", "machine"}``: the median of at least three runs, in
which both sides took turns in one process, and the median of the ratios of those pairs, because a shared machine drifts more than
the sides differ. ``target`` and ``met`` stand beside it where the project promises something. A figure whose reference could not
be measured has no ratio, and ``missing`` names the reference.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Runs a module of this tree with the library of another one, whose own benchmarks may have other names.
BESIDE = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import featstore
sys.path[0] = sys.argv.pop(1)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
PAGE_BYTES = 4096
BASE_BYTES = 448 << 20  # of the interpreter and torch, in a control group
GROUP_BYTES = 1 << 30  # memory control group that the sides of an epoch run in
MARGIN_BYTES = 64_000_000  # of resident memory beyond a budget
LEAST_BATCHES = 4  # of an epoch that is cut, so that its second half is steady
COMMIT = (("rev-parse", "--short=8", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
PLACES = ("--out", "--plot", "--scratch", "--folder", "--graphs", "--beside", "--keep")  # say nothing of what is measured
PAUSE_S = 0.05  # an OpenMP team spins for milliseconds after its loop: the next side must not pay for that


@functools.cache
def processor() -> str:
    """The processor's name; clouds give several the same, so its family and model number follow where the kernel tells them."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, value in reversed(lines)}
    numbers = [f"{title} {fields[name]}" for title, name in (("family", "cpu family"), ("model", "model")) if name in fields]
    return " ".join([fields.get("model name") or platform.machine(), *([f"({', '.join(numbers)})"] if numbers else [])])


@functools.cache
def machine() -> str:
    """One line about this machine: processor, cores, memory, kernel."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, Linux {platform.release()}"


@functools.cache
def commit() -> str:
    """The commit that is checked out, ``+`` behind it if files differ from it; empty where git cannot tell."""
    git = ["git", "-C", os.fspath(Path(__file__).parent)]
    try:
        done = [subprocess.run([*git, *what], capture_output=True, text=True, check=True).stdout for what in COMMIT]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done[0].strip() + ("+" if done[1].strip() else "")


def command() -> str:
    """Tell how this program was called, behind ``python -m benchmarks.``, without what a machine's folders are named."""
    program, words, skipped = Path(sys.argv[0]), [], False
    name = program.parent.name + ("" if program.stem == "__main__" else f".{program.stem}")
    for word in sys.argv[1:]:
        option = word.partition("=")[0]
        if not skipped and option not in PLACES:
            words.append(f'"{word}"' if " " in word else word)
        elif option == "--graphs":
            words.append("--graphs DIR")
        skipped = not skipped and word in PLACES and word != "--keep"
    return " ".join([name, *words])


# -- running -------------------------------------------------------------------------------------------------------------------


def alternate(runs: int, sides: Mapping[str, Callable[[], float | None]], warm_up: int = 0) -> dict[str, list[float]]:
    """Run the sides in turn, ``runs`` times each: A B B A …, since what runs first may find another machine than what follows.

    Parameters
    ----------
    runs : int
        Counted runs of each side; at least three for a figure that is quoted.
    sides : mapping of str to callable
        What a callable returns is its result (operations a second, bytes…); where it returns None, its seconds are.
    warm_up : int
        Rounds before, not counted.

    Returns
    -------
    dict of str to list of float
        One result a run, in order, so that results of equal index are pairs.
    """
    results: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, runs):
        for name, side in list(sides.items())[:: -1 if (number + warm_up) % 2 else 1]:
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            result = side()
            seconds = time.perf_counter() - start
            if number >= 0:
                results[name].append(seconds if result is None else result)
    return results


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios of the pairs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


# -- epochs in child processes -------------------------------------------------------------------------------------------------


def run_child(
    module: str, job: Mapping[str, Any], limit_bytes: int | None = None, tree: Path | None = None, most_s: float | None = None
) -> dict[str, Any]:
    """Run a job in a process of its own, with its files out of the page cache, and return what it found.

    Parameters
    ----------
    module : str
        The benchmark's name, ``__spec__.name`` there; it calls :func:`answer` at its end.
    job : mapping
        Goes to the child as JSON; ``drop`` lists the files and folders that are dropped from the page cache.
    limit_bytes : int, optional
        Limit of a memory control group around the child, page cache included.
    tree : Path, optional
        A checkout whose library the child imports, in place of this interpreter's.
    most_s : float, optional
        Seconds after which the child is killed: subprocess.TimeoutExpired.
    """
    from featstore.testing.limits import memory_group

    for path in job["drop"]:
        drop_from_page_cache(Path(path))
    with nullcontext() if limit_bytes is None else memory_group(limit_bytes) as group:
        run = ["-m", module] if tree is None else ["-c", BESIDE, os.fspath(tree), os.fspath(ROOT), module]
        command = [sys.executable, *run, "--child", json.dumps(job)]
        enter = None if group is None else group.enter
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=enter, timeout=most_s)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def answer(child: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """In a child of :func:`run_child`, do the job and print what was found; return whether this process is one."""
    is_child = sys.argv[1:2] == ["--child"]
    if is_child:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    return is_child


def timed_epoch(
    batches: Iterable[Any],
    rows_of: Callable[[Any], Any],
    *,
    most: int = 0,
    limit_s: float = 0,
    compute_s: float = 0,
    note: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Go through the batches of an epoch as a training loop does.

    Parameters
    ----------
    batches : iterable
    rows_of : callable
        Takes a batch and returns its features, a tensor of 4-byte elements of shape (n, d); it is timed as ``lookup_s``.
    most : int
        Stop after so many batches; 0 for all.
    limit_s : float
        Stop after the batch that ends later than this, at least :data:`LEAST_BATCHES` batches; 0 for no limit.
    compute_s : float
        Seconds that the loop sleeps after each batch, as if a device computed.
    note : callable
        What it returns stands in each mark.

    Returns
    -------
    dict
        ``loop_s``, ``compute_s`` (slept in all), ``lookup_s``, ``kernel_bytes``, ``rows``, ``batches``, and ``marks``: of each
        batch's end ``seconds``, ``lookup_s`` and ``checksum`` so far, and what ``note`` returned.
    """
    import torch

    lookup_s = slept_s = 0.0
    checksum = n_rows = 0
    marks: list[dict[str, Any]] = []
    read_before, start = bytes_read_by_kernel(), time.perf_counter()
    for batch in batches:
        at = time.perf_counter()
        x = rows_of(batch)
        lookup_s += time.perf_counter() - at
        checksum ^= int(x[:: max(1, len(x) // 64)].view(torch.int32).sum())
        n_rows += len(x)
        seconds = time.perf_counter() - start
        marks.append({"seconds": seconds, "lookup_s": lookup_s, "checksum": checksum, **note()})
        if len(marks) == most or (limit_s and len(marks) >= LEAST_BATCHES and seconds > limit_s):
            break
        if compute_s:
            at = time.perf_counter()
            time.sleep(compute_s)
            slept_s += time.perf_counter() - at
    return {
        "loop_s": time.perf_counter() - start,
        "compute_s": slept_s,
        "lookup_s": lookup_s,
        "kernel_bytes": bytes_read_by_kernel() - read_before,
        "rows": n_rows,
        "batches": len(marks),
        "marks": marks,
    }


def whole_epoch(costs: list[float], n_batches: int) -> float:
    """Cost of an epoch: what it came to, or, of a run that was cut, what it came to and the rest at the rate of its second half.

    The first half of a run that was cut has the filling of caches, the page cache included, which is not stretched.

    Parameters
    ----------
    costs : list of float
        Cost so far at the end of each batch that ran.
    n_batches : int
        Batches of a whole epoch.
    """
    n, middle = len(costs), len(costs) // 2
    if n >= n_batches:
        return costs[-1]
    rate = (costs[-1] - (costs[middle - 1] if middle else 0.0)) / (n - middle)
    return costs[-1] + rate * (n_batches - n)


# -- figures -------------------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Prints figures as JSON lines, to stdout, unless it is silent, and to ``out`` where one is given."""

    out: Path | None = None
    failed: int = 0
    silent: bool = False
    tiny: bool = False
    promises: bool = True  # whether targets stand in the lines, and count
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def n_figures(self) -> int:
        """Count the figures so far."""
        return len(self.lines)

    def figure(
        self,
        name: str,
        values: list[float] | float,
        unit: str,
        *,
        reference: str | None = None,
        references: list[float] | None = None,
        ratio: float | None = None,
        target: str | None = None,
        **more: Any,
    ) -> float | None:
        """Print one figure and return its ratio.

        Parameters
        ----------
        name, unit : str
        values : list of float
            One a run; the median is the figure.
        reference : str, optional
            What the ratio is to. Where it could not be measured (neither ``references`` nor ``ratio`` is given), the line has no
            reference, no ratio and no target, and ``missing`` names the reference.
        references : list of float, optional
            The reference's runs, each paired with one of ``values``; the ratio is ``values / references``.
        ratio : float, optional
            The ratio, where it is not that of pairs.
        target : str, optional
            ``">= 0.95"`` or ``"<= 1.1"``: what the project promises of the ratio (of the value where there is no ratio).
        **more
            Stands in the line as it is.
        """
        series = values if isinstance(values, list) else [values]
        if references is not None:
            ratio = median_ratio(series, references)
        is_missing = reference is not None and ratio is None
        line: dict[str, Any] = {
            "name": name,
            "value": _short(statistics.median(series)),
            "unit": unit,
            "reference": None if is_missing else reference,
            "ratio": None if ratio is None else _short(ratio),
            "runs": [_short(value) for value in series],
        }
        if references is not None:
            line["reference_runs"] = [_short(value) for value in references]
        if is_missing:
            line["missing"] = reference
        elif target is not None and self.promises:
            relation, bound = target.split()
            found = statistics.median(series) if ratio is None else ratio
            line["target"] = target
            line["met"] = bool(found >= float(bound) if relation == ">=" else found <= float(bound))
            self.failed += not line["met"]
        line |= more
        line |= {"machine": machine(), "commit": commit(), "command": command(), "date": time.strftime("%Y-%m-%d")}
        if self.tiny:
            line["tiny"] = True
        self.lines.append(line)
        text = json.dumps(line)
        if not self.silent:
            print(text, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(text + "\n")
        return ratio


def within(report: Report, title: str, runs: list[dict[str, Any]], memory: int, **more: Any) -> None:
    """Report the peak resident memory of runs beyond what imports took, their ``peak``, beside the budget and 64 MB."""
    report.figure(
        f"{title}, peak resident memory beyond import",
        [float(each["peak"]) for each in runs],
        "B",
        reference="budget + 64 MB",
        references=[float(memory + MARGIN_BYTES)] * len(runs),
        target="<= 1.0",
        budget=memory,
        **more,
    )


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def arguments(
    description: str,
    argv: list[str] | None = None,
    *,
    real_graphs: str = "",
    own: argparse.ArgumentParser | None = None,
    **defaults: Any,
) -> argparse.Namespace:
    """Parse what every benchmark takes; keyword arguments add integer options with their defaults, ``_`` written ``-``.

    ``real_graphs`` names the figures that need a folder of real graphs; :func:`main` says that they are left out without one.
    ``own`` has options beside these, of a parser without ``--help``.
    """
    parser = argparse.ArgumentParser(description=description, parents=[] if own is None else [own])
    parser.add_argument("--runs", type=int, help="counted runs of each side (default: 3, and 1 with --tiny)")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: shows that it runs, measures nothing")
    parser.add_argument("--only", default="", help="only figures whose group's name contains this")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(os.environ.get("FEATSTORE_SCRATCH", "build/bench")),
        help="folder for generated data; on the drive that is to be measured ($FEATSTORE_SCRATCH)",
    )
    folder = os.environ.get("FEATSTORE_GRAPHS")
    parser.add_argument(
        "--graphs",
        type=Path,
        metavar="DIR",
        default=Path(folder) if folder else None,
        help="a folder of real graphs, for the benchmarks that take them ($FEATSTORE_GRAPHS)",
    )
    parser.set_defaults(real_graphs=real_graphs)
    parser.add_argument("--keep", action="store_true", help="keep the generated data for the next call")
    for name, value in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    args = parser.parse_args(argv)
    args.runs = args.runs or (1 if args.tiny else 3)
    return args


@contextmanager
def scratch(args: argparse.Namespace, name: str) -> Iterator[Path]:
    """A folder for one benchmark's data, removed afterwards unless ``--keep`` was given."""
    folder = args.scratch.absolute() / (name + ("-tiny" if args.tiny else ""))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def main(run: Callable[[argparse.Namespace, Report], None], args: argparse.Namespace) -> None:
    """Run a benchmark's body; exit with status 1 where a target was missed at full size."""
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"# {machine()}", file=sys.stderr, flush=True)
    if args.real_graphs and args.graphs is None and not args.tiny:
        print(f"# left out without --graphs or $FEATSTORE_GRAPHS: {args.real_graphs}", file=sys.stderr, flush=True)
    report = Report(args.out, tiny=args.tiny)
    run(args, report)
    if not report.n_figures:
        print(f"nothing was measured: --only {args.only!r} names no group, or what it needs is not there", file=sys.stderr)
    if report.failed and not args.tiny:
        print(f"{report.failed} targets missed", file=sys.stderr)
        raise SystemExit(1)


# -- the kernel's counts -------------------------------------------------------------------------------------------------------


def io_bytes() -> tuple[int, int]:
    """Bytes that this process, all threads, had read from storage and written to it so far, by the kernel's count."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def bytes_read_by_kernel() -> int:
    """Bytes that were read."""
    return io_bytes()[0]


def status(field: str) -> int:
    """A figure of /proc/self/status in bytes: ``VmRSS`` is resident memory now, ``VmHWM`` the most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status holds no {field}")


def reset_peak() -> None:
    """Make this process's ``VmHWM`` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def drop_from_page_cache(path: Path) -> None:
    """Ask the kernel to forget the cached pages of a file, or of all files below a folder; needs no privilege."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
