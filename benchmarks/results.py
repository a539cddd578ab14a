"""Kept results: ``benchmarks/results`` has the figures of each processor, for docs/performance.md's table and plots.

    python -m benchmarks.results keep build/bench.jsonl    # the newest line of each figure, by processor
    python -m benchmarks.results write                     # the table between the marks in docs/performance.md, bounds, plots

Figures of ``--tiny``, and of a tree that differs from its commit, are refused. The table counts the bounds of each topic that
were met; docs/bounds.md has all. A plot has all bounds of a topic, and how far from each every processor came.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
KEPT, PAGE, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md", ROOT / "docs" / "plots"
BOUNDS = ROOT / "docs" / "bounds.md"
BEGIN, END = "<!-- made by `python -m benchmarks.results write` -->", "<!-- until here -->"
TOPICS = ("rows", "sampling", "epochs", "choices", "sizes", "papers", "machines", "data")  # folders, in the order of the table
MOST_BARS = 40  # of a plot
HEAD = """# Bounds: what was promised, and what was measured?

`python -m benchmarks.results write` makes this page of the figures in `benchmarks/results`. A figure is the median of its runs,
beside the reference that took turns with it, or a value in its unit where there is no reference. In brackets are the number of
runs and the commit that ran. Bold: missed. `python -m benchmarks.` goes before a command. [Performance](performance.md) says
what limits each part, and what you can turn. Targets that no script keeps are in [Measurements](measurements.md#targets).
"""
Line = dict[str, Any]


def processor(line: Line) -> str:
    """Name the processor of a figure's machine; clouds name several alike, so its family and model belong to it."""
    return re.sub(r", \d+ cores.*", "", line["machine"])


def file_of(name: str) -> Path:
    """Find the file of a processor's figures."""
    return KEPT / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".jsonl")


def topic_of(line: Line) -> str:
    """Find the topic of a figure by the folder that its command names; KeyError: it is none of them."""
    topic = re.split(r"[. ]", line["command"], maxsplit=1)[0]
    if topic not in TOPICS:
        raise KeyError(f"{line['command']}: a benchmark of no topic; name its folder in TOPICS")
    return topic


def key_of(line: Line) -> tuple[str, str]:
    """Make the key of a figure: its name, and what it is beside."""
    return line["name"], line["reference"] or ""


def read(path: Path) -> list[Line]:
    """Read lines of figures."""
    return [json.loads(text) for text in path.read_text().splitlines() if text]


def keep(paths: Iterable[Path]) -> dict[Path, int]:
    """Add figures to those that are kept, in place of older ones of the same name; count the new lines of each file.

    Raises
    ------
    ValueError
        A figure is of ``--tiny``, or its commit is not known or not what ran.
    """
    found: dict[Path, dict[tuple[str, str], Line]] = defaultdict(dict)
    for path in paths:
        for line in read(path):
            if line.get("tiny") or not line.get("commit") or line["commit"].endswith("+"):
                raise ValueError(f"{path}: {line['name']!r} is of --tiny, or of a tree that differs from its commit: run it anew")
            topic_of(line)
            found[file_of(processor(line))][key_of(line)] = line
    for path, lines in found.items():
        before = {key_of(line): line for line in read(path)} if path.exists() else {}
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(line)}\n" for _, line in sorted({**before, **lines}.items())))
    return {path: len(lines) for path, lines in found.items()}


def measured(line: Line) -> float:
    """Get what a bound is of: the ratio, or the value where there is none."""
    return float(line["value"] if line["ratio"] is None else line["ratio"])


def distance(line: Line) -> float:
    """Compute how many times better than its bound a figure is; below 1 it is missed."""
    relation, bound = line["target"].split()
    ours, theirs = measured(line), float(bound)
    if ours == theirs:
        return 1.0
    worse, better = (ours, theirs) if relation == "<=" else (theirs, ours)
    return better / worse if worse else float("inf")


def table(kept: dict[str, list[Line]]) -> str:
    """Format how many bounds of each topic a processor met, with the commits."""
    rows = [["bounds met, of all", *kept], ["---"] * (1 + len(kept))]
    for topic in TOPICS:
        cells = []
        for lines in _of_topic(topic, kept).values():
            commits = sorted({line["commit"] for line in lines.values()})
            met = sum(line["met"] for line in lines.values())
            cells.append(f"{met} of {len(lines)} ({', '.join(commits)})" if lines else "")
        if any(cells):
            rows.append([f"[{topic}](bounds.md#{topic})", *cells])
    return _format(rows)


def bounds(kept: dict[str, list[Line]]) -> str:
    """Format all bounds, a table a topic, with what each processor measured."""
    text = [HEAD]
    for topic in TOPICS:
        of_names = _of_topic(topic, kept)
        found = {each: line for lines in of_names.values() for each, line in lines.items()}
        if not found:
            continue
        rows = [["what", "beside", "promised", *of_names, "command"], ["---"] * (4 + len(of_names))]
        for each, line in sorted(found.items()):
            cells = [_cell(lines[each]) if each in lines else "" for lines in of_names.values()]
            rows.append([line["name"], line["reference"] or line["unit"], line["target"], *cells, f"`{line['command']}`"])
        text.append(f"## {topic.capitalize()}\n\n![{topic}](plots/bounds-{topic}.svg)\n\n{_format(rows)}\n")
    return "\n".join(text)


def _of_topic(topic: str, kept: dict[str, list[Line]]) -> dict[str, dict[tuple[str, str], Line]]:
    """Select the bounds of a topic, by processor and figure."""
    return {
        name: {key_of(line): line for line in lines if "target" in line and topic_of(line) == topic}
        for name, lines in kept.items()
    }


def _cell(line: Line) -> str:
    value = f"{measured(line):.3g}"
    return f"{value if line['met'] else f'**{value}**'} ({len(line['runs'])}, {line['commit']})"


def _format(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(topic: str, kept: dict[str, list[Line]], path: Path) -> None:
    """Draw how many times better than its bound each figure of a topic is, a marker a processor."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    of_names = _of_topic(topic, kept)
    shown = sorted({each for lines in of_names.values() for each in lines})[:MOST_BARS]
    with mpl.rc_context({"svg.hashsalt": "featstore", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 1.2 + 0.24 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for name, lines in of_names.items():
            at = [(distance(lines[each]), number) for number, each in enumerate(shown) if each in lines]
            if at:
                axes.plot(*zip(*[(min(16.0, max(1 / 16, x)), y) for x, y in at], strict=True), "o", label=name)
        axes.axvline(1.0, color="grey", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlim(1 / 20, 20)
        axes.set_xticks([2.0**k for k in range(-4, 5)], [f"1/{2**-k}" if k < 0 else f"{2**k}" for k in range(-4, 5)])
        axes.set_yticks(range(len(shown)), [name if len(name) < 70 else f"{name[:67]}…" for name, _ in shown])
        axes.invert_yaxis()
        axes.set_xlabel("times better than promised (left of 1: missed)")
        axes.legend(loc="lower right")
        figure.savefig(path, metadata={"Date": None})


def write() -> list[Path]:
    """Write the table and the plots; return the files."""
    kept = {processor(lines[0]): lines for path in sorted(KEPT.glob("*.jsonl")) if (lines := read(path))}
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} lacks the marks {BEGIN} and {END}, between which the table goes")
    PAGE.write_text(f"{before}{BEGIN}\n{table(kept)}\n{END}{after}")
    BOUNDS.write_text(bounds(kept))
    made = [PAGE, BOUNDS]
    for topic in TOPICS:
        if any("target" in line and topic_of(line) == topic for lines in kept.values() for line in lines):
            made.append(PLOTS / f"bounds-{topic}.svg")
            plot(topic, kept, made[-1])
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Keep figures, or write what is made of those that are kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    keeping = commands.add_parser("keep", help="add figures, which benchmarks wrote with --out")
    keeping.add_argument("paths", nargs="+", type=Path, metavar="JSONL")
    commands.add_parser("write", help="write docs/performance.md's table, docs/bounds.md and the plots")
    args = parser.parse_args(argv)
    try:
        if args.what == "keep":
            for path, n in keep(args.paths).items():
                print(f"{n} figures: {path.relative_to(ROOT)}")
        else:
            for path in write():
                print(path.relative_to(ROOT))
    except (ValueError, KeyError) as error:
        parser.error(str(error.args[0]))


if __name__ == "__main__":
    main()
