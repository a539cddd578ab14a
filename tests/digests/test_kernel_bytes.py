"""Bytes that an epoch of each strategy reads, by the kernel's count.

Of single reads, scans, stripes, extents and edges see test_bytes_agree_with_the_kernel (tests/storage/test_reader.py),
test_the_kernel_counts_what_extents_take (tests/storage/test_checkpoint.py) and test_bytes_are_those_that_the_kernel_read
(tests/strategies/test_edge_caches.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import featstore
from tests.support.frozen import STRATEGIES, THREADS, make_dataset, make_loader_of, make_pack
from tests.support.kernel_counts import kernel_bytes
from tests.support.sampled import covering

# Beside the features, those which look ahead read samples and plans back from run files: ids of 4 bytes, edges, next positions.
RUN_FILE_BYTES = {"superbatch": 24, "ginex": 24, "streamed": 24, "auto": 24}  # at most so many a row that is asked for


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("kernel") / "graph", 20_000, 64)


@pytest.mark.parametrize(("strategy", "sampler"), covering(STRATEGIES, ["neighbor", "epoch"]))
def test_an_epoch_reads_what_its_stats_say(graph: Path, tmp_path: Path, strategy: str, sampler: str) -> None:
    """All neighbour lists are in memory, so that sampling reads nothing."""
    pack = make_pack(tmp_path / "pack", graph, sampler) if strategy == "packed" else None
    with featstore.open(graph, memory="24MB", threads=THREADS) as g:
        if g.features["x"].stats()["mode"] != "direct":
            pytest.fail(f"{graph} is on a file system without direct reads, whose counts say nothing: give --basetemp another")
        g.cache_neighbors("4MB", progress=False)
        others = list[int]()
        with make_loader_of(g, sampler, STRATEGIES[strategy](pack, cache=0.1)) as loader:
            for _ in range(3):  # the kernel also counts pages of the program, where memory is short: one epoch of several agrees
                before, told = kernel_bytes(), loader.stats()
                assert sum(1 for _ in loader) == len(loader)
                taken, stats = kernel_bytes() - before, loader.stats()
                read, rows = stats["bytes_read"] - told["bytes_read"], stats["rows"] - told["rows"]
                assert read >= (stats["rows_loaded"] - told["rows_loaded"]) * 256 > 0
                others.append(taken - read)
        assert min(others) >= 0
        assert min(others) <= RUN_FILE_BYTES.get(strategy, 0) * rows
