"""Training of a GraphSAGE over a dataset, of one type or several, with accuracies and a table of where time and rows went."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from tqdm import tqdm

from featstore.budget import MemoryReport
from featstore.cli.checkpoints import Checkpoints
from featstore.cli.model import HeteroSizes, ModelSizes, Sizes, save_model
from featstore.cli.recording import check_target
from featstore.cli.splits import SPLITS, Labelled, class_ids, count_classes, no_seeds, split_seeds
from featstore.config import check_place, format_size, listed
from featstore.gather.device import check_device
from featstore.load.heterobatch import HeteroMiniBatch
from featstore.load.loader import Loader
from featstore.load.minibatch import MiniBatch
from featstore.pack.packgraph import PackedGraph
from featstore.progress import is_seen, make_bar
from featstore.sampling.batch import Sampler
from featstore.sampling.batches import Batches
from featstore.strategies.ondemand import OnDemand
from featstore.strategies.registry import get_strategy
from featstore.topology.types import qualified

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = [
    "Epoch",
    "TrainResult",
    "check_fields",
    "describe_epoch",
    "describe_training",
    "edge_rows",
    "evaluate",
    "stage_table",
    "train",
]

N_LOSSES = 50


@dataclass
class Epoch:
    """Result of an epoch: mean loss, accuracy on the seeds of each split (None where there are none), seconds of training."""

    epoch: int
    loss: float
    val_accuracy: float | None
    test_accuracy: float | None
    seconds: float


@dataclass
class TrainResult:
    """Epochs, the losses of the first 50 batches, the training loader's statistics with the seconds of computing, and memory.

    ``memory`` is who holds the budget after the last epoch, and what of it is on loan.
    """

    epochs: list[Epoch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    compute_s: float = 0.0
    memory: MemoryReport = field(default_factory=lambda: MemoryReport({}, 0, 0))

    def to_dict(self) -> dict[str, Any]:
        """Convert the record to plain containers, for JSON."""
        return asdict(self)


def edge_rows(batch: MiniBatch, names: Sequence[str]) -> list[torch.Tensor] | None:
    """Collect the rows of each block's edges, float32, the columns of all features side by side; None if none are named."""
    if not names:
        return None
    blocks = zip(*(batch.edge_features[name] for name in names), strict=True)
    return [
        torch.cat([rows.float().flatten(1) if rows.ndim > 1 else rows.float()[:, None] for rows in each], 1) for each in blocks
    ]


def scores_of(model: torch.nn.Module, batch: Any, edge_features: Sequence[str] = ()) -> torch.Tensor:
    """Compute a model's class scores of a batch's seeds, shape (n_seeds, n_out)."""
    scores: torch.Tensor
    if isinstance(batch, HeteroMiniBatch):
        given = {kind: rows.float() for kind, rows in batch.x.items()}
        some = next(iter(given.values()))
        x = {kind: given.get(kind, some.new_empty(len(ids), 0)) for kind, ids in batch.input_ids.items()}
        scores = model(x, batch.blocks)
    elif edge_features or batch.history is not None:
        scores = model(batch.x.float(), batch.blocks, batch.history, edge_rows(batch, edge_features))
    else:
        scores = model(batch.x.float(), batch.blocks)
    return scores


def evaluate(model: torch.nn.Module, loader: Loader, progress: bool = False, edge_features: Sequence[str] = ()) -> float:
    """Measure the share of a loader's seeds whose class is predicted right, each from its sampled neighbourhood."""
    was_training = model.training
    model.eval()
    right = total = 0
    try:
        with torch.inference_mode():
            for batch in _bar(loader, "evaluate", len(loader)) if progress else loader:
                right += int((scores_of(model, batch, edge_features).argmax(1) == class_ids(batch.y)).sum())
                total += len(batch.seeds)
    finally:
        model.train(was_training)
    return right / total if total else float("nan")


def check_fields(
    g: OutOfCoreGraph | PackedGraph, feature: str, labels: str, edge_features: Sequence[str] = (), target: str | None = None
) -> None:
    """Raise ValueError, with the existing names, unless a graph has these features and labels, and the type ``target``."""
    is_pack = isinstance(g, PackedGraph)
    where = f". Where its dataset is: featstore pack DATASET {g.path} --add-layout" if is_pack else ""
    if edge_features and isinstance(g, PackedGraph):
        text = f"edge features: {g.path} is a pack, and rows of edges stay in its dataset"
        raise ValueError(f"{text}: featstore train DATASET --strategy packed --pack {g.path}")
    check_target(g, target)
    if target is not None:
        if edge_features:
            raise NotImplementedError("edge features are not built for training on a graph of several types: leave them out")
        classified = g[target]
        if labels not in classified.node_data:
            more = where and f"{where} --labels {labels}"
            raise ValueError(f"labels: {target!r} has no {labels!r}; it has {listed(sorted(classified.node_data))}{more}")
        if not any(qualified(kind, feature) in g.features for kind in g.node_types):
            more = where and f"{where} --feature {feature}"
            raise ValueError(f"feature: no node type has {feature!r}; there is {listed(sorted(g.features))}{more}")
        return
    if not isinstance(g, PackedGraph):
        for name in edge_features:
            if name not in g.edge_features:
                raise ValueError(f"edge features: the dataset has no {name!r}; it has {listed(sorted(g.edge_features))}")
    for what, name, there in (("feature", feature, g.features), ("labels", labels, g.node_data)):
        if name not in there:
            text = f"--{what}: the {'pack' if is_pack else 'dataset'} has no {name!r}; it has {listed(sorted(there))}"
            raise ValueError(text + (where and f"{where} --{what} {name}"))


def _sizes(
    g: OutOfCoreGraph | PackedGraph,
    feature: str,
    edge_features: tuple[str, ...],
    target: str | None,
    hidden: int,
    n_out: int,
    n_layers: int,
) -> Sizes:
    """Find the sizes of the model for a graph; ValueError if a feature has no rows of numbers."""
    widths: dict[str, int] = {}
    for kind in ("",) if target is None else g.node_types:
        name = qualified(kind, feature) if kind else feature
        shape = tuple(g.features[name].shape) if name in g.features else (0, 0)
        if len(shape) != 2:
            raise ValueError(f"feature {name!r} has shape {shape}; GraphSAGE wants one row of numbers a node")
        widths[kind] = shape[1]
    if target is not None:
        return HeteroSizes(feature, widths, tuple(g.edge_types), target, hidden, n_out, n_layers)
    n_edge = 0 if isinstance(g, PackedGraph) else sum(math.prod(g.edge_features[name].shape[1:]) for name in edge_features)
    return ModelSizes(feature, widths[""], hidden, n_out, n_layers, edge_features, n_edge)


def _row_bytes(g: OutOfCoreGraph | PackedGraph, feature: str, target: str | None) -> int:
    """Count the bytes of a row that batches gather; 0 if types have rows of several sizes."""
    names = [feature] if target is None else [qualified(kind, feature) for kind in g.node_types]
    found = {store.nbytes // max(1, len(store)) for name, store in g.features.items() if name in names and len(store)}
    return found.pop() if len(found) == 1 else 0


def train(
    g: OutOfCoreGraph | PackedGraph,
    sampler: Sampler | None,
    n_layers: int,
    *,
    feature: str = "x",
    labels: str = "y",
    target: str | None = None,
    edge_features: Sequence[str] = (),
    hidden: int = 256,
    dropout: float = 0.5,
    lr: float = 0.003,
    epochs: int = 2,
    batch_size: int = 1000,
    seed: int = 0,
    batches: Callable[[torch.Tensor], Batches] | None = None,
    max_batches: int | None = None,
    max_seconds: float | None = None,
    held_out: Sequence[str] = ("val", "test"),
    progress: bool | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    loader_options: Mapping[str, Any] | None = None,
    save: str | os.PathLike[str] | None = None,
    checkpoints: Checkpoints | None = None,
) -> TrainResult:
    """Train a :class:`GraphSAGE` on the ``train`` split, and measure accuracy on ``val`` and ``test`` after every epoch.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
        A graph with features (float, one row of numbers a node), class ids as labels, and node data of splits (:data:`SPLITS`).
        The splits ``val`` and ``test`` may be missing. A pack in place of its dataset trains in its own batches, with the labels
        that it carries. Accuracy is then not measured, since that would need sampling. Types whose rows no layout of it has are
        types without the feature.
    sampler : Sampler or None
        Sampler of ``n_layers`` hops; None with a PackedGraph.
    feature, labels : str
        Labels are class ids from 0, one a node; a node whose label is negative or NaN is left out. In a graph of several types
        the feature is that of each type which has it.
    target : str, optional
        The type of nodes that are classified, in a graph of several types; seeds and labels are its node data.
    edge_features : sequence of str
        Features of edges whose means the layers take in, too. The sampler numbers its edges (``edges=True``).
    hidden, dropout, lr, epochs, batch_size, seed : number
        Adam; one batch of the loader a step; the seed of weights, dropout and the order of the seeds.
    batches : callable, optional
        ``batches(seeds)`` returns the batches of the training seeds; by default random ones of ``batch_size``. Accuracy is
        always measured in random batches. Not called with a pack.
    max_batches, max_seconds : number, optional
        Stop an epoch after this number of batches; stop training after this number of seconds. The current epoch is then
        evaluated, and is the last one.
    held_out : sequence of str
        Splits on which accuracy is measured after every epoch, of ``"val"`` and ``"test"``.
    progress : bool, optional
        Show bars on stderr; by default on a terminal and in a notebook.
    on_epoch : callable, optional
        Called with every :class:`Epoch` when it is done.
    loader_options : mapping, optional
        Further arguments of the training :class:`~featstore.Loader`; the model is on its ``device``.
    save : path-like, optional
        Write the trained model to this file, which :func:`~featstore.cli.model.load_model` reads.
    checkpoints : Checkpoints, optional
        A checkpoint is written after every whole epoch. Training goes on from an existing one, up to ``epochs`` in all, as if it
        had not been interrupted: losses, accuracies and weights are the same, bit for bit.

    Raises
    ------
    ValueError
        Training seeds, labels or features are missing; labels are no class ids; a pack's seed has no label; the checkpoint is of
        another training. Errors of loading pass through.

    Notes
    -----
    Sets torch's random state. With the same seed the losses are the same, bit for bit, with any cache, reader and number of
    threads.
    """
    show = is_seen() if progress is None else progress
    is_pack = isinstance(g, PackedGraph)
    if save is not None:
        check_place("the model", save)  # a training may take days
    check_fields(g, feature, labels, edge_features, target)
    classified = cast(Labelled, g if target is None else g[target])
    options = dict(loader_options or {})
    device = check_device(options.get("device", "cpu"))
    names = tuple(edge_features)
    sizes = _sizes(g, feature, names, target, hidden, count_classes(classified, labels), n_layers)
    seeds = {} if isinstance(g, PackedGraph) else {split: split_seeds(classified, split, labels) for split in SPLITS}
    if not is_pack and (seeds["train"] is None or not len(seeds["train"])):
        raise ValueError(no_seeds(seeds["train"], classified.node_data))

    def of_type(ids: torch.Tensor) -> Any:
        return ids if target is None else (target, ids)

    torch.manual_seed(seed)
    model = sizes.make(dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    common: dict[str, Any] = {"batch_size": batch_size, "features": [feature], "labels": labels, "seed": seed}
    common |= {"edge_features": list(names)} if names else {}
    if checkpoints is not None:
        has_name = sampler is not None and type(sampler).__repr__ is not object.__repr__
        what: dict[str, Any] = {"sampler": repr(sampler) if has_name else type(sampler).__name__, "sizes": asdict(sizes)}
        what |= {"labels": labels, "dropout": dropout, "lr": lr, "batch size": batch_size, "seed": seed}
        checkpoints.check(what | {"max batches": max_batches, "history": repr(options.get("history"))})
    # The training loader makes the cache; evaluation reads through it, on demand.
    kept = {name: value for name, value in options.items() if name in ("prefetch", "threads", "device")}
    kept["strategy"] = OnDemand(cache=None)
    result = TrainResult()
    evaluate_s = 0.0
    deadline = float("inf") if max_seconds is None else time.perf_counter() + max_seconds
    strategy = get_strategy(options.get("strategy", "auto"))
    if not is_pack and getattr(strategy, "pack", None) is None:
        assert seeds["train"] is not None
        options |= {"sampler": sampler, "seeds": of_type(seeds["train"]) if batches is None else batches(seeds["train"])}
        has_size = batches is None
    else:
        has_size = False  # a pack has its own batches
    of_training = {name: value for name, value in common.items() if has_size or name != "batch_size"}
    with Loader(g, **of_training, **options) as loader:
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        parts |= {} if options.get("history") is None else {"history": options["history"]}
        if checkpoints is not None:
            checkpoints.restore(parts, device)
            result.epochs += [Epoch(**each) for each in checkpoints.epochs]
            result.losses += checkpoints.losses
        for epoch in range(len(result.epochs), epochs):
            begin = time.perf_counter()
            loss = _train_epoch(
                model, optimizer, loader, result, f"epoch {epoch}" if show else None, max_batches, deadline, names
            )
            done = Epoch(epoch, loss, None, None, time.perf_counter() - begin)
            begin = time.perf_counter()
            for split in held_out:
                ids = seeds.get(split)
                if ids is not None and len(ids):
                    with Loader(g, sampler, of_type(ids), shuffle=False, **common, **kept) as held_out_loader:
                        setattr(done, f"{split}_accuracy", evaluate(model, held_out_loader, show, names))
            evaluate_s += time.perf_counter() - begin
            result.epochs.append(done)
            if on_epoch is not None:
                on_epoch(done)
            if time.perf_counter() > deadline:
                break
            if checkpoints is not None:
                loader.set_epoch(epoch + 1)  # also if max_batches cut this epoch short
                checkpoints.save(parts, device, list(map(asdict, result.epochs)), result.losses)
        stats, result.memory = loader.stats(), g.budget.report()
    if save is not None:
        save_model(save, model, sizes)
    stats["seconds"]["compute"] = result.compute_s
    stats["seconds"]["evaluate"] = evaluate_s
    stats["row_bytes"] = _row_bytes(g, feature, target)
    result.stats = stats
    return result


def _train_epoch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    result: TrainResult,
    title: str | None,
    max_batches: int | None,
    deadline: float,
    edge_features: Sequence[str],
) -> float:
    """Train one epoch, and return the mean loss."""
    total, count = 0.0, 0
    n_batches = len(loader) if max_batches is None else min(max_batches, len(loader))
    bar = None if title is None else _bar(loader, title, n_batches)
    for n_done, batch in enumerate(loader if bar is None else bar, 1):
        start = time.perf_counter()
        classes = class_ids(batch.y)
        if n_without := int((classes < 0).sum()):  # a pack may have been sampled from any nodes
            raise ValueError(f"labels: {n_without} of the {len(classes)} seeds of batch {batch.index} have no label")
        loss = torch.nn.functional.cross_entropy(scores_of(model, batch, edge_features), classes)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        value = loss.item()
        result.compute_s += time.perf_counter() - start
        if len(result.losses) < N_LOSSES:
            result.losses.append(value)
        total += value * len(batch.seeds)
        count += len(batch.seeds)
        if bar is not None:
            bar.set_postfix(loss=f"{value:.3f}", refresh=False)
        if (max_batches is not None and n_done >= max_batches) or time.perf_counter() > deadline:
            break
    if bar is not None:
        bar.close()
    return total / max(1, count)


def _bar(loader: Loader, title: str, n_batches: int) -> tqdm[MiniBatch]:
    return make_bar(loader, total=n_batches, desc=title, unit="batch", leave=False)


def describe_epoch(epoch: Epoch) -> str:
    """Format one line about an epoch."""
    parts = [f"epoch {epoch.epoch}: loss {epoch.loss:.4f}"]
    parts += [
        f"{name} {value:.4f}" for name, value in (("val", epoch.val_accuracy), ("test", epoch.test_accuracy)) if value is not None
    ]
    return ", ".join([*parts, f"{epoch.seconds:.1f} s"])


def describe_training(result: TrainResult) -> str:
    """Format a training's seconds, rows and memory as text."""
    estimated = f"\n\n{beside_estimate(result)}" if "auto" in result.stats else ""
    return f"{stage_table(result.stats)}\n\n{result.memory}{estimated}"


def beside_estimate(result: TrainResult) -> str:
    """Describe the choice of ``strategy="auto"``, and its estimate beside the measured epoch."""
    stats = result.stats
    auto, taken, n = stats["auto"], stats["auto"]["taken"], max(1, len(result.epochs))
    lines = [f"taken: {taken['strategy']} ({taken['policy']}): {auto['reason']}"]
    if "epoch_s" in taken:
        seconds = sum(epoch.seconds for epoch in result.epochs) / n
        lines += [
            f"{'an epoch':<36}{'estimate':>14}{'actual':>14}",
            f"{'seconds of data preparation':<36}{taken['epoch_s']:>14.3g}",
            f"{'seconds with the model':<36}{'':>14}{seconds:>14.3g}",
            f"{'seconds that the loop waited':<36}{'':>14}{stats['seconds'].get('wait', 0.0) / n:>14.3g}",
            f"{'rows loaded':<36}{taken['rows_loaded']:>14,}{stats['rows_loaded'] // n:>14,}",
        ]
    return "\n".join(lines)


def stage_table(stats: Mapping[str, Any]) -> str:
    """Format two tables as text: seconds by stage, and rows, bytes and share by tier.

    Stages have the names of Ginex (VLDB 2022), figure 14: inspect, switch, data preparation, cache update, transfer, compute.
    Stages overlap; the loop lost only the seconds of "loop waited for a batch".
    """
    seconds = stats["seconds"]
    looks_ahead = "plan" in seconds
    names = {
        "sample": "inspect: sampling ahead" if looks_ahead else "sampling (all threads)",
        "plan": "inspect: planning the cache",
        "switch": "switch: neighbour to feature cache",
        "load": "data preparation: run files",
        "gather": "data preparation: gather",
        "update": "cache update",
        "labels": "labels",
        "transfer": "copy to the device",
        "wait": "loop waited for a batch",
        "compute": "compute: forward, backward, step",
        "evaluate": "evaluation",
        "presample": "sampling ahead for counts",
        "cache": "filling the cache",
        "auto": "choosing a strategy",
    }
    lines = [f"{'stage':<36}{'seconds':>10}"]
    shown = {name: text for name, text in names.items() if name in seconds} | {
        name: name for name in seconds if name not in names
    }
    lines += [f"{text:<36}{seconds[name]:>10.2f}" for name, text in shown.items()]
    rows, row_bytes = max(1, stats["rows"]), stats.get("row_bytes", 0)
    lines += ["", f"{'tier':<12}{'rows':>14}{'bytes':>14}{'share':>9}"]
    for tier, n in stats["hits"].items():
        size = format_size(n * row_bytes) if row_bytes or not n else ""  # unknown where types have rows of several sizes
        lines.append(f"{tier:<12}{n:>14,}{size:>14}{n / rows:>9.1%}")
    if stats["hits_lost"]:
        lines.append(f"{stats['hits_lost']:,} planned hits lost: others took the cache's memory back")
    lines.append(
        f"{stats['reads']:,} reads of {format_size(stats['bytes_read'])} for {format_size(stats['bytes_requested'])} of rows"
    )
    return "\n".join(lines)
