"""``strategy="auto"`` against every fixed strategy: R22, host caches of 2, 10 and 50 % of the rows, one and twenty epochs.

Two whole epochs are timed without a model, the loader's making included. What an epoch after these takes is the median of the
second epochs of all runs of that strategy at that budget which loaded as many rows, whoever chose it: one alone, of less than a
second, differs from the next by more than the sides may. ``alone`` has the ratio with the others taken to be like each run's
own second epoch, ``second_epochs`` what was pooled. All run in one process, each with the dataset opened anew: every fixed
strategy once, then auto and those that came within a half of the best in turn, ``--runs`` times, each going first every other
time; the best is the one of the least median. The drive is measured before, once a dataset, as a user's would be. With a pack,
frozen layouts are among the fixed ones, packing included. ``estimates`` has the seconds that were expected, once and of an epoch.
``$FEATSTORE_R22`` names a folder that ``tools.r22`` filled; ``--only 10`` runs one budget.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.tools.harness import Report, arguments, main, scratch

SHARES = (0.02, 0.1, 0.5)
EPOCHS = (1, 20)
FIXED: tuple[tuple[str, str], ...] = (
    ("streamed", "belady"),
    ("ondemand", "degree"),
    ("ondemand", "frequency"),
    ("ondemand", "sieve"),
    ("superbatch", "belady"),
)
FROZEN: tuple[tuple[str, str], ...] = (("packed", "belady"), ("packed", "frequency"))
NEAR = 1.5  # times the best: may be the best when it is timed again


class Bench:
    """The workload and its pack."""

    def __init__(self, args: argparse.Namespace, report: Report, folder: Path) -> None:
        import featstore
        from benchmarks.tools import r22
        from featstore.storage.drive import drive_speed

        self.args, self.report, self.folder, self.featstore = args, report, folder, featstore
        source = Path(os.environ.get("FEATSTORE_R22", folder)) if not args.tiny else folder
        self.work = r22.scaled(source, args.scale)
        self.batch_size = r22.batch_size(args.scale)
        with self.open() as g:
            drive_speed(g.reader, g.path, [store.source for store in g.features.values()])
            self.seeds = g.node_data["seeds"][: args.batches * self.batch_size]
            featstore.sample_offline(
                g, self.sampler(g), self.seeds, self.batch_size, path=folder / "pack", progress=False, overwrite=True
            ).close()

    def open(self) -> Any:
        """Open the dataset, with all neighbour lists in memory."""
        g = self.featstore.open(self.work.dataset(), memory=self.args.memory << 20)
        g.cache_neighbors(min(8 * g.num_nodes + 6 * self.work.n_edges, g.budget.available // 4))
        return g

    def sampler(self, g: Any) -> Any:
        """The same batches whoever asks."""
        return self.featstore.NeighborSampler(g, [10, 10, 10], seed=0)

    def time(self, share: float, **options: Any) -> dict[str, Any]:
        """Make a loader and run two epochs."""
        frozen = "pack" in options
        with self.open() as g:
            name = options["strategy"]
            fields: dict[str, Any] = {"cache": share, **{key: value for key, value in options.items() if key != "strategy"}}
            if name not in ("ondemand", "packed"):
                fields["run_dir"] = self.folder / "runs"
            given: dict[str, Any] = {"features": "x", "labels": None}
            if not frozen:
                given |= {"sampler": self.sampler(g), "seeds": self.seeds, "batch_size": self.batch_size}
            begin = time.perf_counter()
            from featstore.strategies.registry import find_strategy

            strategy = find_strategy(name)(**fields)
            with self.featstore.Loader(g, strategy=strategy, **given) as loader:
                made_s = time.perf_counter() - begin
                epochs: list[float] = []
                for _ in range(2):
                    start = time.perf_counter()
                    n_batches = 0
                    for batch in loader:
                        assert len(batch.x) == len(batch.input_ids)
                        n_batches += 1
                    assert n_batches == len(loader)
                    epochs.append(time.perf_counter() - start)
                stats = loader.stats()
        result = {
            "taken": f"{options['strategy']} ({options.get('policy')})",
            "made_s": made_s,
            "epochs": epochs,
            "seconds": stats["seconds"],
            "rows_loaded": stats["rows_loaded"],
        }
        if "auto" in stats:
            taken = stats["auto"]["taken"]
            result["taken"] = f"{taken['strategy']} ({taken['policy']})"
            result["estimates"] = {
                f"{each['strategy']} ({each['policy']})": [round(each["once_s"], 3), round(each["epoch_s"], 3)]
                for each in stats["auto"]["estimates"]
            }
        return result

    def repack(self) -> Path:
        """A pack without layouts: packing is counted each time."""
        for layout in (self.folder / "pack").glob("layout-*"):
            shutil.rmtree(layout)
        return self.folder / "pack"


class Seconds:
    """Second epochs by strategy and rows loaded, and seconds of many epochs from them."""

    def __init__(self) -> None:
        self.second: dict[tuple[str, int], list[float]] = {}

    def add(self, result: dict[str, Any]) -> dict[str, Any]:
        """Note a result, and return it."""
        self.second.setdefault(self._key(result), []).append(result["epochs"][1])
        return result

    def _key(self, result: dict[str, Any]) -> tuple[str, int]:
        return result["taken"], result["rows_loaded"]

    def total(self, result: dict[str, Any], epochs: int) -> float:
        """Return the seconds of so many epochs: two as they were, the others as the median of such second epochs."""
        if epochs == 1:
            return alone(result, epochs)
        return alone(result, 2) + (epochs - 2) * statistics.median(self.second[self._key(result)])


def alone(result: dict[str, Any], epochs: int) -> float:
    """Return the seconds of so many epochs: the first as it was, the others as the second."""
    return result["made_s"] + result["epochs"][0] + (epochs - 1) * result["epochs"][-1]


def compare(bench: Bench, share: float) -> None:
    """Time every fixed strategy once, then auto and the best of them in turn, and print the ratios of those pairs."""
    fixed: dict[str, dict[str, Any]] = {}
    seconds = Seconds()

    def one(strategy: str, policy: str) -> dict[str, Any]:
        options = {"pack": bench.repack()} if strategy == "packed" else {}
        return seconds.add(bench.time(share, strategy=strategy, policy=policy, **options))

    def auto(epochs: int, frozen: bool) -> dict[str, Any]:
        options = {"pack": bench.repack()} if frozen else {}
        result = bench.time(share, strategy="auto", epochs=epochs, **options)
        # With a pack, whatever runs gets its samples from a file: its epochs are not those of fresh samples.
        result["taken"] += ", samples of a pack" if frozen and not result["taken"].startswith("packed") else ""
        return seconds.add(result)

    for strategy, policy in (*FIXED, *FROZEN):
        fixed[f"{strategy} ({policy})"] = one(strategy, policy)
    for what, names in (("fresh", FIXED), ("frozen", (*FIXED, *FROZEN))):
        against = {f"{strategy} ({policy})": (strategy, policy) for strategy, policy in names}
        near: dict[int, list[str]] = {}
        for epochs in EPOCHS:
            once = {each: alone(fixed[each], epochs) for each in against}
            near[epochs] = [each for each in against if once[each] <= NEAR * min(once.values())]
        ours: dict[int, list[dict[str, Any]]] = {epochs: [] for epochs in EPOCHS}
        theirs: dict[str, list[dict[str, Any]]] = {name: [] for names in near.values() for name in names}
        for number in range(bench.args.runs):
            for side in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
                if side == "ours":
                    for epochs in EPOCHS:
                        ours[epochs].append(auto(epochs, what == "frozen"))
                else:
                    for name in theirs:
                        theirs[name].append(one(*against[name]))
        for epochs in EPOCHS:
            totals = {each: [seconds.total(run, epochs) for run in theirs[each]] for each in near[epochs]}
            name = min(totals, key=lambda each: statistics.median(totals[each]))
            by_itself = [alone(a, epochs) / alone(b, epochs) for a, b in zip(ours[epochs], theirs[name], strict=True)]
            bench.report.figure(
                f"auto, {what} samples, {share:.0%} of the rows, {epochs} {'epoch' if epochs == 1 else 'epochs'}",
                [seconds.total(each, epochs) for each in ours[epochs]],
                "s",
                reference=f"the best fixed strategy, {name}",
                references=totals[name],
                target="<= 1.15",
                alone=round(statistics.median(by_itself), 4),
                second_epochs={
                    f"{taken}, {rows} rows": [round(each, 4) for each in found] for (taken, rows), found in seconds.second.items()
                },
                auto=ours[epochs],
                fixed={
                    each: {
                        "total_s": alone(fixed[each], epochs),
                        **{key: fixed[each][key] for key in ("made_s", "epochs", "rows_loaded")},
                    }
                    for each in against
                },
            )


def run(args: argparse.Namespace, report: Report) -> None:
    """All budgets."""
    with scratch(args, "auto") as folder:
        bench = Bench(args, report, folder)
        try:
            for share in SHARES:
                if args.only in ("", f"{100 * share:g}"):
                    compare(bench, share)
        finally:
            shutil.rmtree(folder / "pack", ignore_errors=True)


if __name__ == "__main__":
    options = arguments(__doc__ or "", scale=22, memory=3072, batches=60)
    if options.tiny:
        options.scale, options.memory, options.batches = 12, 128, 12
    main(run, options)
