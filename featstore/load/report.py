"""Reports of loaders and batches: a loader's statistics with advice on them, tables in a REPL, and a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from featstore.config import format_size
from featstore.display import Display, Stats, Table, described, percent
from featstore.plotting import COLORS, check_matplotlib, check_plot, shown_figure
from featstore.sampling.batch import Block, table_of_blocks, table_of_tensors
from featstore.strategies.lists import ALL_IN_MEMORY

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LoaderStats", "advice_on", "draw_stats", "show_batch", "show_counts"]

HIDDEN_WELL: Final = 0.9  # of loading: the loop hardly waits
READ_MUCH: Final = 4  # times the bytes of the rows: most of each page that is read is of no use
READ_FEW: Final = 0.02  # of the rows, read one by one: fewer take less time than copying the others
_WITHIN: Final = frozenset({"wait", "read", "cache", "presample", "auto", "split"})  # no stages, parts of one, or before an epoch

_COUNTS: Final = {"batches", "rows", "hits", "hits_lost", "epochs_beside", "bytes_requested", "bytes_read"}
_ADVISED: Final = _COUNTS | {"seconds", "hidden", "prefetch"}  # what advice is made of

_GATHER = "Reading rows bounds the epoch ({s:.3g} s of gather): give a larger cache=, or a strategy that samples ahead"
_GATHER_AHEAD = "Reading rows bounds the epoch ({s:.3g} s of gather): give a larger cache=, or more memory="
_PACK_ONCE = "Packing bounds the epoch ({s:.3g} s), in one pass over the features: strategy 'packed' packs once for all epochs"
_COPY = "Copying rows that are in memory bounds the epoch ({s:.3g} s of gather): narrower rows, such as float16, or more threads="
_SAMPLE_IN_MEMORY = "Sampling bounds the epoch ({s:.3g} s), with all lists in memory: more threads=, or smaller fan-outs"
ADVICE: Final = {
    "sample": "Sampling bounds the epoch ({s:.3g} s): g.cache_neighbors(), more threads=, or EpochSampler",
    "transfer": "Copies to the device bound the epoch ({s:.3g} s): keep rows there with device_cache=",
    "labels": "Labels bound the epoch ({s:.3g} s): keep them in memory, such as in node data",
    "edges": "Rows of edges bound the epoch ({s:.3g} s): edge_cache= of a strategy keeps some, edge_features= reads fewer",
    "plan": "Planning bounds the epoch ({s:.3g} s): give more memory=, or more threads=",
    "pack": "Packing bounds the epoch ({s:.3g} s): give more memory=, for fewer passes over the features",
    "load": "Reading samples back bounds the epoch ({s:.3g} s): put run_dir= on a faster drive",
    "update": "Changes of the cache bound the epoch ({s:.3g} s): a policy that changes less, such as 'degree'",
    "switch": "Changing caches over bounds the epoch ({s:.3g} s): more memory=, for fewer superbatches",
}


def advice_on(stats: Mapping[str, Any], asked: int | None = None) -> list[str]:
    """Say what bounds a loader, by its statistics, and what to change, the most important first.

    ``asked`` is the number of batches ahead that was asked for, where it is known. See the guide's page on statistics.
    """
    if not stats["batches"]:
        return ["No batch was made yet."]
    seconds: Mapping[str, float] = stats["seconds"]
    found = []
    before = _WITHIN | {"pack"} if "layout" in stats or "layouts" in stats else _WITHIN  # a pack's layout is made once
    stages = {name: s for name, s in seconds.items() if name not in before}
    if stats["hidden"] >= HIDDEN_WELL or not stages:
        found.append("The loop hardly waits for batches: a faster model, not a faster loader, would make the epoch shorter.")
    else:
        slowest = max(stages, key=lambda name: stages[name])
        looks_ahead = "superbatch" in stats or "layout" in stats or "layouts" in stats
        text = ADVICE.get(slowest, "")
        if slowest == "pack" and stats.get("superbatch", {}).get("passes") == 1:
            text = _PACK_ONCE
        if slowest == "sample" and stats.get("lists") == ALL_IN_MEMORY:
            text = _SAMPLE_IN_MEMORY
        if slowest == "gather":
            is_read = stats["hits"].get("base", 0) > READ_FEW * stats["rows"] or seconds.get("read", 0.0) >= stages["gather"] / 2
            text = _COPY if not is_read else _GATHER_AHEAD if looks_ahead else _GATHER
        found += [f"{text.format(s=stages[slowest])}."] if text else [f"{slowest} bounds the epoch ({stages[slowest]:.3g} s)."]
        in_sequence = "passes" in stats.get("superbatch", {}) or "layout" in stats or "layouts" in stats
        if stats["bytes_read"] > READ_MUCH * stats["bytes_requested"] > 0 and not in_sequence:
            times = stats["bytes_read"] / stats["bytes_requested"]
            found.append(f"{times:.1f} times the bytes asked for were read: strategy 'streamed' or 'packed' reads in sequence.")
    if asked is not None and stats["prefetch"] < asked:
        n = stats["prefetch"]
        found.append(
            f"Memory is short: {n} {'batch is' if n == 1 else 'batches are'} made ahead, not {asked}. Give more memory=."
        )
    if stats["epochs_beside"]:
        n = stats["epochs_beside"]
        found.append(f"{n:,} epochs were read on demand, as another loop had the caches: end or drop that loop first.")
    if stats["hits_lost"]:
        found.append(f"{stats['hits_lost']:,} hits were lost to other loaders: give the cache a size of its own, such as '1GiB'.")
    return found


class LoaderStats(Stats):
    """Statistics of a loader: a dict, which shows itself as tables, with advice on what to change first.

    ``asked`` is the number of batches ahead that was asked for; None with ``prefetch="auto"``.
    """

    def __init__(self, counts: Mapping[str, Any] = {}, asked: int | None = None) -> None:
        super().__init__(counts)
        self._asked = asked

    def _display(self) -> Display:
        shown: dict[str, Any] = {**self}
        notes = [f"→ {each}" for each in advice_on(self, self._asked)] if self.keys() >= _ADVISED else []
        hits, seconds = shown.pop("hits", {}), shown.pop("seconds", {})
        total, longest = sum(hits.values()), max(seconds.values(), default=0.0)
        tables = [Table(("rows by tier", "", ""), [(f"  {tier}", f"{n:,}", percent(n, total)) for tier, n in hits.items()])]
        ordered = sorted(seconds.items(), key=lambda each: -each[1])
        bars = [(f"  {stage}", f"{s:.3f} s", "▪" * round(20 * s / longest) if longest else "") for stage, s in ordered]
        tables.append(Table(("seconds by stage", "", ""), bars))
        shown |= {"hidden": percent(shown["hidden"], 1)} if "hidden" in shown else {}
        shown |= {"auto": _choice(shown["auto"])} if "auto" in shown else {}
        rest = Stats(shown)._display()
        return Display("", [rest.tables[0], *tables, *rest.tables[1:]], notes)


def _choice(auto: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten what ``auto`` chose to what a reader asks first; the dict has the rates, and what each estimate is made of."""
    taken = auto.get("taken") or {}
    found = {"taken": f"{taken.get('strategy')} ({taken.get('policy')})"} if taken else {}
    return {**found, **{name: auto[name] for name in ("reason", "note", "estimates") if auto.get(name)}}


def show_counts(stats: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List what a loader's own ``repr`` shows of its statistics: batches, and shares of the tiers; nothing before the first."""
    hits = {tier: n for tier, n in stats["hits"].items() if n}
    if not stats["batches"]:
        return []
    shares = ", ".join(f"{tier} {percent(n, stats['rows'])}" for tier, n in hits.items())
    read = f"{format_size(stats['bytes_read'])} for {format_size(stats['bytes_requested'])} of rows"
    made = f"{stats['batches']:,} batch{'es' * (stats['batches'] != 1)}"
    return [("made", made), ("rows from", shares or "none"), ("read", read)]


def show_batch(title: str, tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, Block]) -> Display:
    """Show a batch: its tensors by name, and its blocks."""
    return Display(title, [table_of_tensors(tensors), table_of_blocks(blocks)])


def draw_stats(stats: Mapping[str, Any], title: str, path: str | os.PathLike[str] | None) -> Figure:
    """Draw seconds by stage, and rows by tier; write the picture to ``path``, if given, whose ending says the format.

    The figure is none of pyplot's: it takes no backend and needs no closing.

    MissingExtraError: matplotlib is not installed. ValueError, OSError: the picture cannot be written.
    """
    check_matplotlib()
    check_plot(path)
    seconds, hits = stats["seconds"], {tier: n for tier, n in stats["hits"].items() if n}
    figure = shown_figure(figsize=(10, 1.8 + 0.3 * max(len(seconds), len(hits))), layout="constrained", dpi=130)
    of_stages, of_tiers = figure.subplots(1, 2)
    ordered = dict(sorted(seconds.items(), key=lambda each: -each[1]))
    _bars(of_stages, ordered, "seconds by stage", [f"{s:.3g} s" for s in ordered.values()])
    total = sum(hits.values())
    _bars(of_tiers, hits, "rows by tier", [f"{described(n)}, {percent(n, total)}" for n in hits.values()])
    notes = f"{stats['batches']:,} batches, {percent(stats['hidden'], 1)} of loading hidden"
    figure.suptitle(f"{title}\n{notes}", fontsize=11)
    if path is not None:
        figure.savefig(os.fspath(path))
    return figure


def _bars(axes: Axes, values: Mapping[str, float], what: str, labels: list[str]) -> None:
    colors = [COLORS[n % len(COLORS)] for n in range(len(values))]
    axes.bar_label(axes.barh(range(len(values)), list(values.values()), color=colors), labels, padding=4, fontsize=9)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.set_title(what, fontsize=10.5)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
