"""On a GPU (papers.device): hits against ``index_select``, copies of host rows, waiting.

Without CUDA nothing is measured, and stderr says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.tools.harness import Report, alternate
from featstore.cli.sage import GraphSAGE

WIDTHS = (32, 128, 768)  # float32 a row
CALLS, CLASSES, LEARNING_RATE, HIDDEN = 20, 16, 0.003, 256


def have_cuda() -> bool:
    """Return whether there is a GPU; where there is none, say what is skipped."""
    if torch.cuda.is_available():
        return True
    print("skipped, no GPU: hits against index_select, pinned copies, an epoch's waiting", file=sys.stderr)
    return False


def rate(call: Callable[[], object], n_bytes: int) -> float:
    """Return bytes a second of calls in a row."""
    call()  # compiles, and allocates
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return CALLS * n_bytes / (time.perf_counter() - begin)


def placing(args: argparse.Namespace, report: Report) -> None:
    """Rows of the tier, and rows of the host, to their places in a batch on the device. Indices are on the device already."""
    n, k = (1 << 12, 1 << 9) if args.tiny else (1 << 20, 1 << 17)
    device, rng = torch.device("cuda", torch.cuda.current_device()), np.random.default_rng(0)
    chosen = torch.from_numpy(rng.integers(0, n, k))
    slots, positions = chosen.to(device), torch.from_numpy(rng.permutation(k)).to(device)
    for width in WIDTHS:
        host = torch.empty((n, width), dtype=torch.float32, pin_memory=True).normal_()
        staging = torch.empty((k, width), dtype=torch.float32, pin_memory=True)
        rows, out, n_bytes = host.to(device), torch.empty((k, width), device=device), 4 * width * k
        want = torch.empty_like(out).index_copy_(0, positions, rows.index_select(0, slots))

        def copies(host: Any = host, staging: Any = staging, out: Any = out) -> None:
            torch.cuda.synchronize()  # before staging is written anew
            torch.index_select(host, 0, chosen, out=staging)
            out.index_copy_(0, positions, staging.to(device, non_blocking=True))

        sides: dict[str, Callable[[], object]] = {
            "index_select": lambda rows=rows, out=out: torch.index_select(rows, 0, slots, out=out),
            "two passes": lambda rows=rows, out=out: out.index_copy_(0, positions, rows.index_select(0, slots)),
            "pinned copies": copies,
        }
        for name in sides.keys() - {"index_select"}:
            out.zero_()
            sides[name]()
            assert torch.equal(out, want), name
        results = alternate(
            args.runs,
            {name: lambda call=call, n_bytes=n_bytes: rate(call, n_bytes) for name, call in sides.items()},
        )
        for name, reference, target in (
            ("two passes", "index_select", ">= 0.45"),
            ("pinned copies", "index_select", None),
        ):
            report.figure(
                f"rows of {4 * width} B to a batch on the GPU, {name}",
                results[name],
                "B/s",
                reference=reference,
                references=results[reference],
                target=None if args.tiny else target,
                gpu=torch.cuda.get_device_name(device),
            )


def waiting(args: argparse.Namespace, report: Report, path: Path, seeds: npt.NDArray[np.int64], batch_size: int) -> None:
    """The share of an epoch, with a GraphSAGE on the GPU, for which its loop waits."""
    with featstore.open(path, memory="3GiB") as g:
        g.cache_neighbors()
        fanouts = [10, 10]
        model = GraphSAGE(g.features["x"].shape[1], HIDDEN, CLASSES, len(fanouts)).to("cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        options: dict[str, Any] = {"labels": None, "device": "cuda", "device_cache": 0.2, "prefetch": "auto"}
        shares, epoch_s = [], []
        with featstore.Loader(g, featstore.NeighborSampler(g, fanouts), seeds, batch_size, **options) as loader:
            for number in range(1 + args.runs):
                begin, waited = time.perf_counter(), loader.stats()["seconds"].get("wait", 0.0)
                for batch in loader:
                    scores = model(batch.x, batch.blocks)
                    labels = batch.input_ids[: len(scores)] % CLASSES
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(scores, labels).backward()
                    optimizer.step()
                    torch.cuda.synchronize()  # else the loop waits for its own computing in the next batch's name
                if number:  # the first one compiles
                    epoch_s.append(time.perf_counter() - begin)
                    shares.append((loader.stats()["seconds"]["wait"] - waited) / epoch_s[-1])
    report.figure(
        "share of an epoch on the GPU, 20% on the device, that it waits",
        shares,
        "of the epoch",
        epoch_s=epoch_s,
        gpu=torch.cuda.get_device_name(),
    )
