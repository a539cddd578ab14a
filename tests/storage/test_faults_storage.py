"""Damage, death and full disks: what is stored is found whole, found damaged, or harmless; never silently wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import CorruptionError, FeatstoreError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.storage.catalog import CATALOG_FILE
from featstore.testing.faults import Fault, random_flips, truncated
from tests.support.programs import run_in_fork
from tests.support.rowfiles import snapshot

pytestmark = pytest.mark.usefixtures("_program_server")

# A file of each kind: what it is called, and what reading it gives.
KINDS: dict[str, tuple[str, Callable[[OutOfCoreGraph], Any]]] = {
    "feature": ("node.x.1.rows", lambda g: (g.features["x"][:], g.features["x"][np.arange(999, -1, -3)])),
    "grouped feature": ("node.h.1.rows", lambda g: (g.features["h"][:], g.features["h"][np.arange(999, -1, -3)])),
    "node data": ("node.y.1.rows", lambda g: (g.node_data["y"],)),
    "offsets": ("edge.indptr.1.rows", lambda g: (torch.from_numpy(g.topology.indptr.copy()),)),
    "neighbour ids": ("edge.indices.1.rows", lambda g: tuple(torch.from_numpy(ids.copy()) for _, ids in g.topology.scan())),
    "out-degrees": ("edge.out_degree.1.rows", lambda g: (cached_rows(g),)),
    "checksums": ("node.x.1.rows.sums", lambda g: (g.features["x"][:], g.features["x"][np.arange(999, -1, -3)])),
    "catalog": (CATALOG_FILE, lambda g: tuple(g.features[name][:] for name in g.features)),
}


def cached_rows(g: OutOfCoreGraph) -> torch.Tensor:
    """The rows that the degree policy keeps."""
    g.cache("x", "30KB")
    cache = g.features["x"].cache
    return torch.from_numpy(cache.map.slot_of_row.copy())


@pytest.fixture
def copy(small: SimpleNamespace, tmp_path: Path) -> Path:
    """A copy of the small dataset, to be damaged."""
    return Path(shutil.copytree(small.path, tmp_path / "g"))


def read(root: Path, kind: str, verify: str = "always") -> Any:
    with featstore.open(root, memory="16MiB", backend="pread", verify=verify, threads=1) as g:
        return KINDS[kind][1](g)


def same(found: Any, expected: Any) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def flip(root: Path, kind: str, n: int, seed: int = 0, verify: str = "always") -> tuple[int, int, int]:
    """Flip ``n`` random bits, one at a time; return how many were found, harmless, and silently wrong."""
    path = root / KINDS[kind][0]
    expected = read(root, kind)
    found = harmless = wrong = 0
    for _ in random_flips(path, n, seed):
        try:
            rows = read(root, kind, verify)
        except FeatstoreError as error:
            found += path.name.removesuffix(".sums") in str(error)
        else:
            harmless += same(rows, expected)
            wrong += not same(rows, expected)
    assert same(read(root, kind), expected)
    return found, harmless, wrong


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_are_found_or_harmless(copy: Path, kind: str) -> None:
    found, harmless, wrong = flip(copy, kind, 40)
    assert (found + harmless, wrong) == (40, 0)
    assert found > 0


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_flipped_bits_are_found_or_harmless(copy: Path, kind: str) -> None:
    found, harmless, wrong = flip(copy, kind, 10_000, seed=1)
    assert (found + harmless, wrong) == (10_000, 0)
    assert found > 9_000  # what is left: entries of pages that were not read, padding


def test_without_checksums_flipped_bits_are_silently_wrong(copy: Path) -> None:
    """The control."""
    assert flip(copy, "feature", 40, verify="off")[2] > 20


def verify_finds(root: Path, n: int, seed: int = 0) -> None:
    with featstore.open(root, memory="16MiB", backend="pread", verify="off") as g:
        for name in sorted(snapshot(root)):
            if name.endswith(".lock"):
                continue
            for _ in random_flips(root / name, n, seed):
                with pytest.raises(CorruptionError) as caught:
                    g.verify()
                assert caught.value.filename == str(root / name)
        g.verify()


def test_verify_finds_every_flipped_bit(copy: Path) -> None:
    verify_finds(copy, 8)


@pytest.mark.stress
def test_verify_finds_every_one_of_many_flipped_bits(copy: Path) -> None:
    verify_finds(copy, 1000, seed=2)


def sizes(path: Path) -> Iterator[int]:
    """Every page boundary and the bytes beside it, every field of the header, and more than there is."""
    n_bytes = path.stat().st_size
    header = (0, 1, 8, 12, 16, 48, 64, 72, 80, 88, 96, 104, 106, 108, 4088)
    pages = (page + step for page in range(0, n_bytes + 1, 4096) for step in (-1, 0, 1))
    yield from sorted({size for size in (*header, *pages, n_bytes + 100, n_bytes + 4096) if size >= 0 and size != n_bytes})


@pytest.mark.parametrize("name", sorted({name for name, _ in KINDS.values()}))
def test_truncation_at_every_boundary_is_found(copy: Path, name: str) -> None:
    path = copy / name
    for size in sizes(path):
        with truncated(path, size), pytest.raises(CorruptionError) as caught:
            featstore.open(copy, memory="16MiB", backend="pread")
        assert caught.value.filename == str(path)
        assert caught.value.offset is not None
    featstore.open(copy, memory="16MiB", backend="pread").close()


@pytest.mark.parametrize("backend", ["io_uring", "pread"])
@pytest.mark.parametrize("verify", ["always", "off"])
def test_files_that_shrink_while_they_are_open(copy: Path, backend: str, verify: str) -> None:
    """Reads end with an error, and at once; what is whole again is readable again."""
    with featstore.open(copy, memory="16MiB", backend=backend, verify=verify) as g:
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("node.x.1.rows", lambda: g.features["x"][:]),
            ("node.x.1.rows", lambda: g.features["x"][[999, 5]]),
            ("node.y.1.rows", lambda: g.node_data["y"]),
            ("edge.indptr.1.rows", lambda: g.topology),
        ]
        for name, call in calls:
            for size in (0, 4096, 4100, (copy / name).stat().st_size - 1):
                with truncated(copy / name, size):
                    with pytest.raises(CorruptionError) as caught:
                        call()
                    assert caught.value.filename == str(copy / name)
            call()
        g.verify()


def reads_end(folder: str) -> None:
    """One read of 0 bytes is tried again; a file that ended is an error after a few; in the child."""
    root, always = Path(folder), 1 << 30
    with featstore.open(root, memory="16MiB", backend="pread", threads=1) as g:
        x, n = g.features["x"][:], g.num_nodes
        with Fault(root, "read", "end") as fault:
            assert torch.equal(g.features["x"][np.arange(n)], x)
        assert fault.fired == 1
        with Fault(root, "read", "end", times=always) as fault:
            with pytest.raises(CorruptionError, match="ends before"):
                g.features["x"][[5]]
        assert 1 < fault.fired < 10
        path = root / "node.x.1.rows"
        for size in (4096, 5000):
            with truncated(path, size), Fault(root, "read", "EIO", k=1000) as fault:
                with pytest.raises(CorruptionError) as caught:
                    g.features["x"][[n - 1]]
            assert caught.value.filename == str(path)
            assert 0 < fault.calls < 10
        with Fault(root, "read", "end", times=always) as fault, pytest.raises(CorruptionError, match="bytes early"):
            g.verify(progress=False)  # through another function
        assert fault.fired == 1
        g.verify(progress=False)
        assert torch.equal(g.features["x"][:], x)


def test_reads_of_nothing_end(copy: Path) -> None:
    run_in_fork(reads_end, str(copy))
