"""``python -m benchmarks.papers PAPER [--figure N | --table N]``: a paper's figures and tables, measured here.

Without a number, all of the paper's are; ``--list`` says which there are. By default graphs are small (``--scale 14``: 16,384
nodes), which shows how a figure comes about and takes seconds to minutes. ``--scale 22`` is the size at which the project
promises something. Each is printed as a table; ``--out`` appends its points as JSON lines, ``--plot`` draws it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from benchmarks.papers.figures.common import REAL_SCALE, Paper, Setting, as_text, draw
from benchmarks.tools.harness import Report, arguments, machine, scratch

PAPERS = ("ginex", "diskgnn", "outre", "pagraph", "insitu")
SIZES = {  # what single figures take; those of 0 follow from the scale
    "batches": 0,
    "threads": 16,
    "seconds": 20,
    "seeds": 1,
    "first_seed": 0,
    "hidden": 64,
    "layers": 3,
    "epochs": 3,
    "passes": 3,
    "hops": 2,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("paper", choices=PAPERS)
    own.add_argument("--figure", type=int, action="append", default=[], metavar="N")
    own.add_argument("--table", type=int, action="append", default=[], metavar="N")
    own.add_argument("--list", action="store_true", help="say what there is, and what stands for what a CPU cannot show")
    own.add_argument("--scale", type=int, default=14, help="nodes of generated graphs are 2 to this power")
    own.add_argument("--graph", action="append", default=[], metavar="NAME", help="this real graph of --graphs alone")
    own.add_argument("--plot", type=Path, metavar="DIR", help="draw each figure into this folder")
    args = arguments(__doc__ or "", argv, own=own, **SIZES)
    if args.tiny:
        args.scale = min(args.scale, 12)
    if not any(word.startswith("--runs") for word in argv or sys.argv):
        args.runs = 3 if args.scale >= REAL_SCALE else 1
    return args


def chosen(args: argparse.Namespace, paper: Paper) -> list[str]:
    """Choose the figures that the command line asks for: all, if it names none."""
    asked = [f"figure {n}" for n in args.figure] + [f"table {n}" for n in args.table]
    for what in asked:
        if what not in paper.shown:
            raise SystemExit(f"{paper.name} has no {what} here; --list says what there is")
        if paper.shown[what].measure is None:
            raise SystemExit(f"{paper.name}, {what}, is not measured: {paper.shown[what].instead}")
    return asked or [what for what, shown in paper.shown.items() if shown.measure is not None and args.only in what]


def main() -> None:
    """Measure, print and draw."""
    args = parse()
    paper: Paper = importlib.import_module(f"benchmarks.papers.figures.{args.paper}").PAPER
    if args.list:
        print(paper.contents())
        return
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"# {machine()}", file=sys.stderr, flush=True)
    report = Report(args.out, silent=True, tiny=args.tiny, promises=args.scale >= REAL_SCALE)
    with scratch(args, args.paper) as folder:
        setting = Setting(args, report, folder, args.paper)
        for what in chosen(args, paper):
            shown, before, begin = paper.shown[what], len(report.lines), time.perf_counter()
            assert shown.measure is not None
            setting.what = what
            shown.measure(setting)
            title = f"{paper.title}, {what}: {shown.title}" + (f" ({shown.instead})" if shown.instead else "")
            lines = report.lines[before:]
            print(as_text(title, lines), flush=True)
            print(f"# {what}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
            if args.plot is not None:
                draw(title, lines, args.plot / f"{args.paper}-{what.replace(' ', '-')}.png")
    if report.failed:
        print(f"{report.failed} targets missed", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
