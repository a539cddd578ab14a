"""Pictures of what was planned; matplotlib, the extra ``plot``, is imported only when a picture is asked for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from featstore.cli.output import print_result
from featstore.config import format_size
from featstore.estimate.choice import Choice
from featstore.estimate.misscurve import MissCurve
from featstore.estimate.redundancy import Redundancy
from featstore.estimate.savedio import Split
from featstore.plotting import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_estimates", "draw_miss_curve", "draw_redundancy", "draw_split", "print_drawn"]

MARKERS = "osD^vP<>Xh"
STYLES = {"static": "--", "online": "-", "planned": "-"}
LEAST_TICK_GAP = 0.12  # of the axis: labels closer than that would overlap


def print_drawn(options: argparse.Namespace, result: dict[str, Any], text: str, draw: Callable[[str], None]) -> None:
    """Draw ``--plot`` if requested, with a title that begins with the dataset's name, and print the result."""
    if options.plot is not None:
        draw(os.path.basename(os.path.abspath(options.path)))
        text += f"\ndrawn: {options.plot}"
    print_result(options, {**result, "plot": options.plot}, text)


def _short(number: float) -> str:
    """Format a count briefly, for an axis: 950, 12.5 k, 1.76 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def draw_miss_curve(curve: MissCurve, path: str | os.PathLike[str], row_bytes: int, title: str = "") -> None:
    """Draw rows loaded against cache size, a line a policy, and write the picture to ``path``, whose ending says the format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9.5, 5.8), layout="constrained", dpi=130)
    axes: Axes = figure.add_subplot()
    shares = 100 * np.array(curve.sizes) / curve.n
    # The legend reads from top to bottom as the lines end: worst first.
    order = {name: i for i, name in enumerate(sorted(each.policy for each in curve.curves))}
    for each in curve.curves[::-1]:
        i = order[each.policy]  # a policy keeps its colour, wherever it ends
        is_planned = each.kind == "planned"
        axes.plot(
            shares,
            each.rows_loaded,
            STYLES[each.kind],
            color="black" if each.policy == "belady" else COLORS[i % len(COLORS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            linewidth=2.4 if is_planned else 1.5,
            label=f"{each.policy} ({each.kind})",
            zorder=3 if is_planned else 2,
        )
    axes.axhline(curve.n_distinct, color="0.45", linestyle=":", label=f"each row once: {_short(curve.n_distinct)}")
    axes.set_xscale("log")
    most = max([curve.n_distinct, *(max(each.rows_loaded) for each in curve.curves)])
    room = most - curve.n_distinct
    # The axis begins at 0, unless most of the picture below the unavoidable loads would then be empty.
    bottom = 0.0 if curve.n_distinct < 0.3 * most else max(0.0, curve.n_distinct - 0.08 * room)
    axes.set_ylim(bottom, max(most + 0.04 * room, 1.02 * curve.n_distinct))
    axes.set_xlabel("size of the cache: share of the rows, rows, memory", labelpad=8)
    axes.set_ylabel("rows loaded in the recorded batches")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    _label_sizes(axes, shares, curve, row_bytes)
    percent = curve.n_accesses / 100
    relative = axes.secondary_yaxis("right", functions=(lambda y: np.asarray(y) / percent, lambda y: np.asarray(y) * percent))
    relative.set_ylabel("% of the rows asked for")
    axes.grid(axis="both", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    asked = f"{curve.n_batches:,} batches ask for {_short(curve.n_accesses)} rows, {_short(curve.n_distinct)} distinct"
    axes.set_title(f"{title}\n{asked}" if title else asked, fontsize=11)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, title="in the order in which lines end")
    figure.savefig(os.fspath(path))


def draw_estimates(choices: Sequence[Choice], path: str | os.PathLike[str], title: str = "") -> None:
    """Draw seconds for all epochs, and bytes moved in one, against the memory of the host tier: a line a strategy.

    ``choices`` are for the same workload, one for each size. An impossible strategy, such as a layout without a pack, is dashed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    choices = sorted(choices, key=lambda choice: choice.workload.capacity)
    first = choices[0].workload
    figure = Figure(figsize=(11.5, 5.2), layout="constrained", dpi=130)
    panels = figure.subplots(1, 2)
    shares = [100 * max(1, choice.workload.capacity) / max(1, choice.workload.n_rows) for choice in choices]
    for i, each in enumerate(choices[0].estimates):
        series = [choice.estimates[i] for choice in choices]
        name = each.strategy if each.policy == "none" else f"{each.strategy} ({each.policy})"
        why = next((at.impossible for at in series if at.impossible), "")
        label = f"{name}: {why.split(',')[0].split(' of a disk')[0]}" if why else name
        look: dict[str, Any] = {
            "color": COLORS[i % len(COLORS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": "--" if why else "-",
            "linewidth": 1.8,
            "markersize": 5,
        }
        panels[0].plot(shares, [at.total_s(first.epochs) for at in series], label=label, **look)
        panels[1].plot(shares, [at.moved_bytes or np.nan for at in series], **look)
    taken = [choice.taken.total_s(first.epochs) for choice in choices]
    panels[0].plot(shares, taken, "o", markersize=12, markerfacecolor="none", color="black", label="taken by strategy=auto")
    epochs = f"{first.epochs} {'epoch' if first.epochs == 1 else 'epochs'}"
    for axes, what in zip(panels, (f"seconds for {epochs}, what is done once included", "bytes moved in an epoch"), strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(shares, [f"{share:.3g} %" for share in shares], fontsize=8.5)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("rows in memory, share of all")
        axes.set_title(what, fontsize=10.5)
        axes.grid(axis="both", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    for axes, form in zip(panels, (lambda value, _: f"{value:,.4g} s", lambda value, _: f"{_short(value)}B"), strict=True):
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(form))
        axes.yaxis.set_minor_formatter(NullFormatter())
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=4)
    figure.savefig(os.fspath(path))


def _label_sizes(axes: Axes, shares: Any, curve: MissCurve, row_bytes: int) -> None:
    """Put share, rows and memory under the sizes whose labels do not overlap; always under the last one."""
    logs = np.log10(shares)
    span = max(1e-9, float(logs[-1] - logs[0]))
    chosen: list[int] = []
    for i in range(len(shares) - 1, -1, -1):
        if not chosen or (logs[chosen[-1]] - logs[i]) / span >= LEAST_TICK_GAP:
            chosen.append(i)
    n_bytes = curve.cache_bytes(row_bytes)
    labels = [f"{shares[i]:.3g} %\n{_short(curve.sizes[i])} rows\n{format_size(n_bytes[i])}" for i in chosen]
    axes.set_xticks(shares[chosen], labels, fontsize=8.5)
    axes.set_xticks([], minor=True)


def draw_redundancy(found: Redundancy, path: str | os.PathLike[str], title: str = "") -> None:
    """Draw rows requested a seed, a group of bars for each way of making batches, a bar a sampler."""
    from matplotlib.figure import Figure

    labels, samplers = (list(dict.fromkeys(getattr(way, name) for way in found.ways)) for name in ("label", "sampler"))
    figure = Figure(figsize=(9.5, 1.6 + 0.35 * len(found.ways)), layout="constrained", dpi=130)
    axes: Axes = figure.add_subplot()
    height = 0.8 / len(samplers)
    for i, sampler in enumerate(samplers):
        ways = [way for way in found.ways if way.sampler == sampler]
        places = [labels.index(way.label) - 0.4 + (i + 0.5) * height for way in ways]
        bars = axes.barh(places, [way.ratio for way in ways], 0.92 * height, color=COLORS[i % len(COLORS)], label=sampler)
        texts = [f"{way.ratio:.1f}" + ("" if way is found.ways[0] else f"  ({found.against(way) - 1:+.0%})") for way in ways]
        axes.bar_label(bars, texts, padding=4, fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.set_xlabel("rows requested a seed (redundancy ratio)")
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    counted = f"{found.n_counted:,} of {found.n_batches:,} batches of {found.batch_size:,} seeds"
    axes.set_title(f"{title}\n{counted}" if title else counted, fontsize=11)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, title="sampler")
    figure.savefig(os.fspath(path))


def draw_split(split: Split, path: str | os.PathLike[str], title: str = "") -> None:
    """Draw reads saved an epoch against the embeddings' share of the memory, and mark the share that is taken.

    See Sheng et al.: OUTRE, VLDB 2024, figure 5, whose red lines are the sum.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9.5, 5.2), layout="constrained", dpi=130)
    axes: Axes = figure.add_subplot()
    parts = {"embeddings": split.embeddings, "rows of features": split.features, "lists of neighbours": split.lists}
    for i, (name, saved) in enumerate(parts.items()):
        if any(saved):
            axes.plot(split.alphas, saved, color=COLORS[i], linewidth=1.5, label=name)
    axes.plot(split.alphas, split.benefits, color="black", linewidth=2.4, label="all together")
    chosen = f"taken: {split.alpha:.2f}, {split.nodes[split.taken]:,} embeddings"
    axes.axvline(split.alpha, color="0.45", linestyle="--", label=chosen)
    axes.plot([split.alpha], [split.benefits[split.taken]], "o", color="black", markersize=7)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"share of {format_size(split.n_bytes)} that embeddings have")
    axes.set_ylabel("reads saved an epoch, in rows")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.grid(axis="both", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=11)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(os.fspath(path))
