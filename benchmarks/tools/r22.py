"""R22, the reference workload: an R-MAT graph with permuted ids, float32 features and 200,000 seeds that have in-edges.

``python -m benchmarks.tools.r22 DIRECTORY`` makes it once (``--scale 12`` for a smoke test) and prints what it holds.
Everything is drawn from ``--seed``, so two machines get the same graph. Memory is bounded: edges are drawn in chunks, spilled
into buckets of destination ids, and sorted a bucket at a time.

References
----------
Chakrabarti, Zhan, Faloutsos: R-MAT: A Recursive Model for Graph Mining. SDM 2004.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PROBABILITIES = (0.57, 0.19, 0.19, 0.05)
CHUNK_EDGES = 1 << 21


@dataclass(frozen=True)
class Workload:
    """One generated workload; its arrays are opened as read-only memmaps."""

    directory: Path
    scale: int
    n_drawn: int
    n_edges: int
    n_seeds: int
    dim: int
    seed: int

    @property
    def num_nodes(self) -> int:
        """2 to the power of ``scale``."""
        return 1 << self.scale

    @property
    def indptr(self) -> npt.NDArray[np.int64]:
        """In-CSC offsets, int64 [N+1]."""
        return np.load(self.directory / "indptr.npy", mmap_mode="r")

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """In-neighbours, int32 [E], ascending in each list, no duplicates."""
        return np.load(self.directory / "indices.npy", mmap_mode="r")

    @property
    def seeds(self) -> npt.NDArray[np.int64]:
        """Distinct nodes that have in-edges, int64 [n_seeds], in random order."""
        return np.load(self.directory / "seeds.npy")

    def rows(self, ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float32]:
        """Feature rows of ``ids``, float32 [k, dim]: a hash of (id, column) in [0, 1), to check without the file."""
        columns = np.arange(self.dim, dtype=np.uint32) * np.uint32(2246822519)
        mixed = ids.astype(np.uint32)[:, None] * np.uint32(2654435761) + columns
        mixed ^= mixed >> np.uint32(15)
        return (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)

    def feature_blocks(self, block_rows: int = 16384) -> Iterator[npt.NDArray[np.float32]]:
        """Yield all feature rows in order, float32 [≤ block_rows, dim] at a time."""
        for first in range(0, self.num_nodes, block_rows):
            yield self.rows(np.arange(first, min(first + block_rows, self.num_nodes)))

    def feature_file(self) -> Path:
        """Write the features as ``x.npy`` (once) for the memmap baseline, and return its path."""
        path = self.directory / "x.npy"
        if not path.exists():
            part = path.with_suffix(".tmp")
            with part.open("wb") as file:
                header = {"descr": "<f4", "fortran_order": False, "shape": (self.num_nodes, self.dim)}
                np.lib.format.write_array_header_1_0(file, header)
                for block in self.feature_blocks():
                    file.write(block.data)
            part.rename(path)
        return path

    def dataset(self) -> Path:
        """Create the featstore dataset (once) with feature ``x`` and node data ``seeds``, and return its path."""
        import featstore

        path = self.directory / "dataset"
        if not path.exists():
            features = {"x": ((self.num_nodes, self.dim), np.dtype(np.float32), self.feature_blocks())}
            node_data = {"seeds": self.seeds}
            featstore.OutOfCoreGraph.create(path, self.indptr, self.indices, features=features, node_data=node_data).close()
        return path


@functools.cache
def _two_level_table() -> npt.NDArray[np.uint8]:
    """Two levels of the recursion at once: 65,536 equally likely draws to ``source bits << 4 | destination bits``."""
    pairs = [(i, j) for i in range(4) for j in range(4)]
    bits = np.array([((i >> 1) << 1 | j >> 1) << 4 | (i & 1) << 1 | (j & 1) for i, j in pairs], np.uint8)
    odds = np.array([PROBABILITIES[i] * PROBABILITIES[j] for i, j in pairs])
    bounds = np.rint(np.r_[0.0, np.cumsum(odds)] * 65536).astype(np.int64)
    return np.repeat(bits, np.diff(bounds))


def rmat_edges(rng: np.random.Generator, scale: int, n: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Draw the sources and destinations of ``n`` R-MAT edges whose ids are not permuted.

    A draw of 16 bits covers two levels, so the probabilities of the 16 joint outcomes hold to 2⁻¹⁶.
    """
    table, source, destination = _two_level_table(), np.zeros(n, np.uint32), np.zeros(n, np.uint32)
    for _ in range((scale + 1) // 2):
        bits = table[rng.integers(0, 65536, n, dtype=np.uint16)]
        source = source << np.uint32(2) | bits >> np.uint8(4)
        destination = destination << np.uint32(2) | bits & np.uint8(3)
    drop = np.uint32(scale % 2)  # an odd scale drew one level too many
    return source >> drop, destination >> drop


def rmat_chunks(scale: int, n_edges: int, seed: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield R-MAT edges with permuted ids as ``destination << scale | source``, uint64, a bounded chunk at a time."""
    of_ids, of_edges = (np.random.Generator(np.random.SFC64(s)) for s in np.random.SeedSequence(seed).spawn(2))
    permutation = of_ids.permutation(1 << scale).astype(np.uint32)
    for first in range(0, n_edges, CHUNK_EDGES):
        source, destination = rmat_edges(of_edges, scale, min(CHUNK_EDGES, n_edges - first))
        yield permutation[destination].astype(np.uint64) << np.uint64(scale) | permutation[source]


def _spill(scale: int, n_edges: int, seed: int, directory: Path) -> int:
    """Write the edges into files by the top bits of the destination; return how many bits."""
    bits = min(scale, (n_edges // CHUNK_EDGES).bit_length())
    files = [(directory / str(bucket)).open("wb") for bucket in range(1 << bits)]
    try:
        for keys in rmat_chunks(scale, n_edges, seed):
            keys.sort()
            cuts = np.searchsorted(keys, np.arange(len(files) + 1, dtype=np.uint64) << np.uint64(2 * scale - bits))
            for bucket, file in enumerate(files):
                file.write(keys[cuts[bucket] : cuts[bucket + 1]].data)
    finally:
        for file in files:
            file.close()
    return bits


def _build(scale: int, n_drawn: int, n_seeds: int, seed: int, directory: Path) -> tuple[int, int]:
    """Write indptr, indices and seeds; return the numbers of edges and seeds."""
    scratch = directory / "spill"
    scratch.mkdir()
    bits = _spill(scale, n_drawn, seed, scratch)
    width = 1 << (scale - bits)
    degrees = np.zeros(1 << scale, np.int64)
    raw = directory / "indices.raw"
    with raw.open("wb") as out:
        for bucket in range(1 << bits):
            keys = np.fromfile(scratch / str(bucket), np.uint64)
            keys.sort()
            keys = keys[np.diff(keys, prepend=~keys[:1]) != 0]
            local = (keys >> np.uint64(scale)).astype(np.int64) - bucket * width
            degrees[bucket * width : (bucket + 1) * width] = np.bincount(local, minlength=width)
            out.write((keys & np.uint64((1 << scale) - 1)).astype(np.int32).data)
    shutil.rmtree(scratch)
    n_edges = int(degrees.sum())
    with raw.open("rb") as source, (directory / "indices.npy").open("wb") as target:
        np.lib.format.write_array_header_1_0(target, {"descr": "<i4", "fortran_order": False, "shape": (n_edges,)})
        shutil.copyfileobj(source, target, 1 << 22)
    raw.unlink()
    np.save(directory / "indptr.npy", np.r_[0, np.cumsum(degrees)])
    candidates = np.flatnonzero(degrees)
    of_seeds = np.random.default_rng(np.random.SeedSequence(seed).spawn(3)[2])
    seeds = of_seeds.choice(candidates, min(n_seeds, len(candidates)), replace=False)
    np.save(directory / "seeds.npy", seeds.astype(np.int64))
    return n_edges, len(seeds)


def generate(
    directory: str | Path, scale: int = 22, edges: int | None = None, seeds: int = 200_000, dim: int = 128, seed: int = 22
) -> Workload:
    """Make the workload in a folder of ``directory`` named by its parameters, or load it if it is there.

    Parameters
    ----------
    directory : path-like
        Cache of generated workloads.
    scale : int
        The graph has ``2 ** scale`` nodes; at most 31.
    edges : int, optional
        Edges drawn, before duplicates are removed; by default 64,000,000 at scale 22 and in proportion to the nodes elsewhere.
    seeds : int
        Training seeds; fewer where fewer nodes have in-edges.
    dim : int
        float32 features a node.
    seed : int
        Of everything random.

    Returns
    -------
    Workload

    Notes
    -----
    Needs about 40 bytes of memory a node and 200 MB beside, and 8 bytes of disk a drawn edge while it works.
    """
    if not 1 <= scale <= 31:
        raise ValueError(f"scale must be 1 … 31, not {scale}")
    n_drawn = round(64_000_000 * 2.0 ** (scale - 22)) if edges is None else edges
    parent = Path(directory)
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"rmat{scale}-{n_drawn}-{seeds}-{dim}-{seed}"
    if not folder.exists():
        build = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=parent))
        try:
            n_edges, n_seeds = _build(scale, n_drawn, seeds, seed, build)
            held = {"scale": scale, "n_drawn": n_drawn, "n_edges": n_edges, "n_seeds": n_seeds, "dim": dim, "seed": seed}
            (build / "workload.json").write_text(json.dumps(held))
            build.rename(folder)
        except BaseException:
            shutil.rmtree(build, ignore_errors=True)
            raise
    return Workload(directory=folder, **json.loads((folder / "workload.json").read_text()))


def scaled(directory: str | Path, scale: int) -> Workload:
    """Make R22 at another scale: the same share of the nodes are seeds."""
    return generate(directory, scale, seeds=max(1, round(200_000 * 2.0 ** (scale - 22))))


def batch_size(scale: int) -> int:
    """Return the seeds of a batch that is to R22 at another scale as 1,000 are to R22."""
    return max(1, 1000 >> (22 - scale))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the R-MAT reference workload.")
    parser.add_argument("directory", type=Path, help="cache folder")
    parser.add_argument("--scale", type=int, default=22, help="nodes are 2 to this power")
    parser.add_argument("--edges", type=int, help="edges drawn (default: 64 M at scale 22, in proportion)")
    parser.add_argument("--seeds", type=int, default=200_000, help="training seeds")
    parser.add_argument("--dim", type=int, default=128, help="float32 features a node")
    parser.add_argument("--seed", type=int, default=22, help="of everything random")
    parser.add_argument("--dataset", action="store_true", help="also create the featstore dataset")
    options = parser.parse_args()
    start = time.perf_counter()
    work = generate(options.directory, options.scale, options.edges, options.seeds, options.dim, options.seed)
    result = {"directory": str(work.directory), "nodes": work.num_nodes, "edges": work.n_edges, "seeds": work.n_seeds}
    if options.dataset:
        result["dataset"] = str(work.dataset())
    print(json.dumps({**result, "seconds": round(time.perf_counter() - start, 2)}))


if __name__ == "__main__":
    main()
