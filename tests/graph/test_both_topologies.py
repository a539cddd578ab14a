"""Later work beside the chunked topology gives the same on it as on CSC: made features, epoch-wide sampling, kept lists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import featstore
from tests.graph.test_convert import make, opened, pair  # noqa: F401 - a fixture


def test_aggregated_features_and_outputs_of_layers(tmp_path: Path) -> None:
    """Bit for bit, in little memory, so that nodes come in many blocks."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for form in ("csc", "chunked"):
        options = {} if form == "csc" else {"topology": "chunked", "chunk_bytes": 4096}
        with make(tmp_path / form, **options) as g:
            made = {op: g.aggregate("x", op, name=f"x_{op}", memory="3MiB", progress=False)[:] for op in ("mean", "sum", "gcn")}
            layers = [featstore.Aggregate(lambda h, mean: h + 2 * mean), lambda h, block: h[: block.n_dst] * 3]
            made["h"] = featstore.infer(g, layers, "x", "h", memory="4MiB", progress=False)[:]
            found[form] = made
    assert found["csc"].keys() == found["chunked"].keys()
    for name, rows in found["csc"].items():
        assert torch.equal(rows, found["chunked"][name]), name


@pytest.mark.parametrize(("strategy", "window"), [("ondemand", "auto"), ("streamed", 2)])
def test_epoch_wide_batches(pair: SimpleNamespace, strategy: str, window: int | str) -> None:  # noqa: F811
    expected: list[list[torch.Tensor]] = []
    for form, kind in (("csc", featstore.NeighborSampler), ("csc", featstore.EpochSampler), ("chunked", featstore.EpochSampler)):
        with opened(getattr(pair, form)) as g:
            options = {} if kind is featstore.NeighborSampler else {"window": window}
            sampler = kind(g, [4, 3], seed=3, **options)
            with featstore.Loader(g, sampler, g.node_data["train_idx"], 90, strategy=strategy, seed=1) as loader:
                epochs = [[each.input_ids.clone() for each in sorted(loader, key=lambda each: each.index)] for _ in range(2)]
            expected.append([ids for epoch in epochs for ids in epoch])
    for other in expected[1:]:
        assert len(other) == len(expected[0])
        assert all(torch.equal(one, two) for one, two in zip(expected[0], other, strict=True))


@pytest.mark.parametrize("kind", [featstore.NeighborSampler, featstore.EpochSampler])
def test_lists_of_macro_batches(tmp_path: Path, kind: type[featstore.NeighborSampler]) -> None:
    found = []
    for form in ("csc", "chunked"):
        options = {} if form == "csc" else {"topology": "chunked", "chunk_bytes": 8192}
        with make(tmp_path / form, **options) as g:
            idx = g.node_data["train_idx"]
            featstore.partition(g, 12, train_idx=idx, keep_lists=True, progress=False)
            batches = featstore.PartitionBatches(g, idx, 40, macro=4, seed=2)
            with featstore.Loader(g, kind(g, [5, 3], seed=1), batches, labels=None) as loader:
                found.append([batch.input_ids.clone() for batch in loader])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
