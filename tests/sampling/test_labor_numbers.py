"""The numbers of layer-neighbour sampling in plain Python: uniform, independent, and drifting where batches depend."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.sampling.test_draws import chi_square_limit
from tests.sampling.test_neighbor import M64, splitmix

Int64s = npt.NDArray[np.int64]


def chain(*parts: int) -> int:
    key = 0
    for part in parts:
        key = splitmix(key, part)
    return key


M32 = 2**32 - 1


def oracle_number(key: int, source: int) -> int:
    x = source & M32
    if source >> 32:
        x ^= splitmix(key, source >> 32) & M32
    for more, shift, factor in (
        (key & M32, 17, 0xED5AD4BB),
        (key >> 32, 11, 0xAC4C1B51),
        (splitmix(key, 0) & M32, 15, 0x31848BAB),
    ):
        x = (x + more) & M32
        x = (x ^ x >> shift) * factor & M32
    return x ^ x >> 14


def number_of(seed: int, epoch: int, index: int, hop: int, source: int, dependency: int = 1) -> int:
    """A source's number: it stays for as many batches as ``dependency``, from a batch of the source's own on."""
    phase = oracle_number(chain(seed, epoch, M64, hop), source) * dependency >> 32
    return oracle_number(chain(seed, epoch, (index + phase) // dependency, hop), source)


def numbers(key: int, ids: Int64s) -> npt.NDArray[np.uint32]:
    """The oracle's numbers of many sources below 2**32 at once."""
    x = ids.astype(np.uint32)
    for more, shift, factor in (
        (key & M32, 17, 0xED5AD4BB),
        (key >> 32, 11, 0xAC4C1B51),
        (splitmix(key, 0) & M32, 15, 0x31848BAB),
    ):
        x = x + np.uint32(more)
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x ^ x >> np.uint32(14)


def kolmogorov(share: npt.NDArray[Any]) -> float:
    """Largest distance to the uniform distribution, times the root of the number of values; above 2.3 once in 50,000 times."""
    ordered, n = np.sort(share), len(share)
    steps = np.arange(n + 1) / n
    return float(max((ordered - steps[:-1]).max(), (steps[1:] - ordered).max()) * math.sqrt(n))


def drifting(ids: Int64s, index: int, dependency: int, seed: int = 3) -> npt.NDArray[np.uint32]:
    """The numbers of batch ``index`` as :func:`number_of` has them, of many sources."""
    phase = numbers(chain(seed, 0, M64, 1), ids).astype(np.uint64) * np.uint64(dependency) >> np.uint64(32)
    era = (np.uint64(index) + phase) // np.uint64(dependency)
    found = np.zeros(len(ids), np.uint32)
    for each in np.unique(era):
        found[era == each] = numbers(chain(seed, 0, int(each), 1), ids[era == each])
    return found


def test_numbers_of_many_are_those_of_one() -> None:
    ids = np.array([0, 1, 77, 2**31 - 1, 2**32 - 1])
    assert numbers(M64 // 3, ids).tolist() == [oracle_number(M64 // 3, int(each)) for each in ids]
    assert drifting(ids, 1000, 7).tolist() == [number_of(3, 0, 1000, 1, int(each), 7) for each in ids]


@pytest.mark.parametrize(
    "ids", [np.arange(200_000), np.arange(200_000) * 4096 % 2**31, 2**31 - 1 - np.arange(200_000) * 3], ids=str
)
def test_numbers_are_uniform_and_independent(ids: Int64s) -> None:
    """Alone, in pairs of neighbouring sources, of hops, of batches and of seeds, and the bits of each."""
    key = chain(0, 0, 5, 1)
    plain = numbers(key, ids)
    others = [numbers(chain(*parts), ids) for parts in ((0, 0, 5, 2), (0, 0, 6, 1), (0, 1, 5, 1), (1, 0, 5, 1))]
    limit = chi_square_limit(32 * 32 - 1)
    assert kolmogorov(plain / 2**32) < 2.3
    for other in (np.roll(plain, 1), np.roll(plain, 16), *others):
        assert kolmogorov(other / 2**32) < 2.3
        counts = np.bincount((plain >> 27) * 32 + (other >> 27), minlength=1024)
        expected = len(ids) / 1024
        assert float(((counts - expected) ** 2).sum() / expected) < limit
        ones = np.unpackbits((plain ^ other).view(np.uint8).reshape(-1, 4), axis=1).mean(axis=0)
        assert abs(ones - 0.5).max() < 4.5 * 0.5 / math.sqrt(len(ids))


@pytest.mark.parametrize("dependency", [2, 5, 64])
def test_numbers_drift_and_stay_uniform(dependency: int) -> None:
    ids = np.arange(40_000)
    batches = [drifting(ids, index, dependency) for index in range(2 * dependency + 1)]
    for each in batches[:: max(1, dependency // 4)]:
        assert kolmogorov(each / 2**32) < 2.3
    changed = [a != b for a, b in itertools.pairwise(batches)]
    sigma = math.sqrt((1 - 1 / dependency) / (dependency * len(ids)))
    assert all(abs(each.mean() - 1 / dependency) < 4.5 * sigma for each in changed)
    assert (sum(each.astype(int) for each in changed[:dependency]) == 1).all()  # once in every so many batches, each
    later = batches[0] == batches[dependency // 2]
    assert abs(later.mean() - (1 - dependency // 2 / dependency)) < 4.5 * 0.5 / math.sqrt(len(ids))
    correlation = np.corrcoef(batches[0], batches[dependency])[0, 1]
    assert abs(correlation) < 4.5 / math.sqrt(len(ids))
