"""Parts of all the papers' figures: a list of them, the graphs that they are measured on, and how they are shown.

A module a paper has a :class:`Paper`, and a function a figure that measures it. Figures are lines of the harness with three more
fields: ``panel`` (a graph, mostly), ``side`` (a line or a bar of the figure) and ``at`` (its place along the axis, or a column of
the table). Those are what the printed table and the picture are made of.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import featstore
from benchmarks.tools.harness import Report, run_child
from benchmarks.tools.r22 import Workload, generate
from benchmarks.tools.realgraphs import loading
from featstore.plan.trace import Trace, record

REAL_GRAPHS = {"linux414-calls": 1000, "cnr-2000": 1000, "ego-twitter": 200}  # seeds a batch
REAL_SCALE = 22  # where targets hold
BASE_BYTES = 400 << 20  # of the interpreter and torch, in a control group

Int64s = npt.NDArray[np.int64]
Measure = Callable[["Setting"], None]


@dataclass(frozen=True)
class Shown:
    """A figure or table: what the paper shows in it, how it is measured, and what stands for what is not here."""

    what: str
    title: str
    measure: Measure | None
    instead: str = ""


@dataclass
class Paper:
    """A paper's figures and tables, in the order in which they are declared."""

    name: str
    title: str
    shown: dict[str, Shown] = field(default_factory=dict)

    def shows(self, what: str, title: str, instead: str = "") -> Callable[[Measure], Measure]:
        """Declare that a function measures ``what`` (``"figure 5"``); ``instead``: what stands for what this machine lacks."""

        def declare(measure: Measure) -> Measure:
            self.shown[what] = Shown(what, title, measure, instead)
            return measure

        return declare

    def leaves_out(self, what: str, title: str, why: str) -> None:
        """Declare that nothing measures ``what``, and why."""
        self.shown[what] = Shown(what, title, None, why)

    def contents(self) -> str:
        """Return a line a figure."""
        lines = [self.title]
        for shown in self.shown.values():
            note = f" ({shown.instead})" if shown.instead else ""
            lines.append(f"  {'  ' if shown.measure else '- '}{shown.what:<10} {shown.title}{note}")
        return "\n".join([*lines, "A line that begins with - is not measured."])


@dataclass(frozen=True)
class Graph:
    """An adjacency, and how it is trained on; ``more`` is the real graph's file, None of a generated one."""

    name: str
    indptr: Int64s
    ids: npt.NDArray[np.int32]
    seeds: Int64s
    batch_size: int
    more: Any = None
    module: Any = None  # that loads real graphs

    def blocks(self) -> Iterator[npt.NDArray[np.float32]] | None:
        """Yield the graph's own features; None where it has none."""
        return self.module.feature_blocks(self.more) if self.more is not None and "x_shape" in self.more else None


class Setting:
    """Setting of a figure: options, a folder, graphs; its lines go to a report.

    Parameters
    ----------
    args : argparse.Namespace
        Those of ``python -m benchmarks.papers``.
    report : Report
    folder : Path
        On the drive to be measured. Generated graphs stay there from figure to figure.
    paper : str
    """

    def __init__(self, args: argparse.Namespace, report: Report, folder: Path, paper: str) -> None:
        self.args, self.report, self.folder, self.paper = args, report, folder, paper
        self.what = ""

    # -- lines -------------------------------------------------------------------------------------------------------------

    def row(
        self, panel: str, side: str, at: float | str, values: list[float] | float, unit: str, of: str | None = None, **more: Any
    ) -> None:
        """Report a point of the figure; ``of`` names the reference, whose runs or ratio are in ``more``."""
        name = ", ".join(each for each in (self.paper, self.what, panel, side, str(at)) if each)
        self.report.figure(name, values, unit, reference=of, panel=panel, side=side, at=at, **more)

    # -- graphs ------------------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> int:
        """2 to this power are the nodes of generated graphs."""
        return int(self.args.scale)

    @property
    def batch_size(self) -> int:
        """1,000 seeds at scale 22; elsewhere as many that a batch touches about the same share of the nodes, 20 at least."""
        return max(20, 1000 >> (REAL_SCALE - self.scale)) if self.scale < REAL_SCALE else 1000

    def workload(self, dim: int = 128) -> Workload:
        """Make R-MAT once, with 200,000 seeds at scale 22 and in proportion elsewhere, 400 at least."""
        source = os.environ.get("FEATSTORE_R22") if self.scale == REAL_SCALE and dim == 128 else None
        n_seeds = max(400, round(200_000 * 2.0 ** (self.scale - REAL_SCALE)))
        return generate(source or self.folder, self.scale, seeds=n_seeds, dim=dim)

    def rmat(self) -> Graph:
        """R-MAT in memory."""
        work = self.workload()
        arrays = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
        return Graph(f"R{self.scale}", *arrays, np.array(work.seeds), self.batch_size)

    def real_graphs(self) -> Iterator[Graph]:
        """Yield the real graphs of the folder ``--graphs`` that ``--graph`` names: by default three of them."""
        real = loading(self.args.graphs)
        for name in (self.args.graph or REAL_GRAPHS) if real is not None else ():
            if (self.args.graphs / f"{name}.npz").exists():
                indptr, ids, z = real.load(name)
                seeds = np.flatnonzero(z["train_mask"]) if "train_mask" in z else np.flatnonzero(np.diff(indptr) > 0)
                yield Graph(name, indptr, ids, seeds, REAL_GRAPHS.get(name, self.batch_size), z, real)

    def graphs(self) -> Iterator[Graph]:
        """Yield R-MAT, unless ``--graph`` names real graphs, and the real graphs that are there."""
        if not self.args.graph:
            yield self.rmat()
        yield from self.real_graphs()

    def labelled(self) -> Graph:
        """Return a graph with labels and features to train on: linux414-calls where it is there, or a planted one."""
        for graph in self.real_graphs():
            if graph.more is not None and "y" in graph.more and graph.blocks() is not None:
                return graph
        return planted(self)

    def dataset(self, graph: Graph) -> Path:
        """Create the dataset of an adjacency alone, once."""
        path = self.folder / f"{graph.name}-adjacency".replace(" ", "-")
        if not path.exists():
            featstore.OutOfCoreGraph.create(path, graph.indptr, graph.ids, progress=False).close()
        return path

    def trace(self, graph: Graph, fanouts: list[int], batch_size: int | None = None, most: int = 200) -> Trace:
        """Sample an epoch, or its first ``most`` batches, and return the rows of each."""
        import torch

        size = batch_size or graph.batch_size
        seeds = torch.from_numpy(np.random.default_rng(0).permutation(graph.seeds)[: most * size])
        with featstore.open(self.dataset(graph), memory="3GiB") as g:
            g.cache_neighbors()
            return record(featstore.NeighborSampler(g, fanouts), seeds.split(size), g.num_nodes)

    # -- epochs ------------------------------------------------------------------------------------------------------------

    def child(self, module: Any, job: dict[str, Any], limit_bytes: int | None = None) -> dict[str, Any]:
        """Let a module's ``child`` do a job in a process of its own within so much memory; in this one at the smallest size."""
        if self.args.tiny:
            return dict(module.child(job))
        return run_child(module.__spec__.name, job, limit_bytes)


def planted(setting: Setting) -> Graph:
    """Make communities whose nodes' classes are known from their neighbours' rows: something that a model can learn."""
    n, rng = max(4000, 1 << setting.scale), np.random.default_rng(0)
    members = rng.permutation(n // 50 * 50).reshape(-1, 50)
    n = members.size
    inside = np.where(rng.random((n, 8)) < 0.8, members.repeat(50, 0)[np.arange(n)[:, None], rng.integers(0, 50, (n, 8))], -1)
    inside[inside < 0] = rng.integers(0, n, np.count_nonzero(inside < 0))
    lists = np.empty_like(inside)
    lists[members.reshape(-1)] = inside
    y = np.empty(n, np.int64)
    y[members] = (np.arange(len(members)) % 4)[:, None]
    x = np.eye(4, dtype=np.float32).repeat(4, 1)[y] + rng.standard_normal((n, 16), dtype=np.float32)
    is_train = rng.random(n) < 0.3
    more = {"y": y, "train_mask": is_train, "test_mask": ~is_train, "x_shape": x.shape}
    ids = np.sort(lists, 1).astype(np.int32).reshape(-1)
    return Graph("planted", np.arange(0, 8 * n + 1, 8), ids, np.flatnonzero(is_train), setting.batch_size, more, _Planted(x))


class _Planted:
    """Stands for the module that loads real graphs."""

    def __init__(self, x: npt.NDArray[np.float32]) -> None:
        self._x = x

    def feature_blocks(self, _: Any) -> Iterator[npt.NDArray[np.float32]]:
        yield self._x


# -- what is shown -------------------------------------------------------------------------------------------------------------


def panels_of(lines: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group lines by panel and unit."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault((line.get("panel", ""), line["unit"]), []).append({"side": line["name"], "at": "", **line})
    return found


def as_text(title: str, lines: list[dict[str, Any]]) -> str:
    """Return the lines of a figure as tables: one a panel and unit, a row a side, a column a place."""
    text = [title]
    for (panel, unit), each in panels_of(lines).items():
        places = list(dict.fromkeys(str(line["at"]) for line in each))
        cells: dict[str, dict[str, str]] = {}
        for line in each:
            row = cells.setdefault(line["side"], {})
            row[str(line["at"])] = f"{line['value']:.4g}" if abs(line["value"]) < 1e4 else f"{line['value']:,.0f}"
        first = max(len(side) for side in [*cells, f"{panel}, {unit}"]) + 2
        widths = [max(len(place), *(len(row.get(place, "")) for row in cells.values())) + 2 for place in places]
        text.append(f"{f'{panel}, {unit}':<{first}}" + "".join(f"{p:>{w}}" for p, w in zip(places, widths, strict=True)))
        for side, row in cells.items():
            text.append(f"{side:<{first}}" + "".join(f"{row.get(p, ''):>{w}}" for p, w in zip(places, widths, strict=True)))
        text.append("")
    return "\n".join(text)


def draw(title: str, lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the lines of a figure: a panel a panel and unit, lines where places are numbers, bars where they are names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = panels_of(lines)
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", squeeze=False)
    for ax, ((panel, unit), each) in zip(axes[0], panels.items(), strict=True):
        sides = list(dict.fromkeys(line["side"] for line in each))
        places = list(dict.fromkeys(line["at"] for line in each))
        is_line = len(places) > 1 and all(isinstance(place, (int, float)) for place in places)
        for k, side in enumerate(sides):
            points = [(line["at"], line["value"]) for line in each if line["side"] == side]
            if is_line:
                ax.plot(*zip(*points, strict=True), "o-", label=side)
            else:
                at = [places.index(place) + (k - (len(sides) - 1) / 2) / (len(sides) + 1) for place, _ in points]
                ax.bar(at, [value for _, value in points], 1 / (len(sides) + 1), label=side)
        if not is_line:
            ax.set_xticks(range(len(places)), [str(place) for place in places], rotation=20, ha="right", fontsize="small")
        ax.set(title=panel, ylabel=unit, ylim=(0, None))
        ax.legend(fontsize="x-small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)
