"""Draws by weight, one edge at a time in Python: word for word as the library draws, and the exact probability of each set."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

M64 = 2**64 - 1
FLT_MIN = float(np.finfo(np.float32).tiny)
MOST = float(np.finfo(np.float64).max)
SERIES = (1 / 21, 1 / 19, 1 / 17, 1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)


def splitmix(state: int, output: int) -> int:
    """Output number ``output`` of SplitMix64, by stepping its published form."""
    z = (state + (output + 1) * 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def uniform(word: int) -> float:
    return (word >> 12) * 2.0**-52


def exponential(v: float) -> float:
    """-log(1 - v), in the operations and the order of the kernel."""
    (bits,) = struct.unpack("<q", struct.pack("<d", 1 - v))
    exponent = (bits >> 52) - 1023
    (fraction,) = struct.unpack("<d", struct.pack("<q", (bits & (2**52 - 1)) | 0x3FF << 52))
    if fraction > 1.4142135623730951:
        fraction, exponent = fraction / 2, exponent + 1
    s = (fraction - 1) / (fraction + 1)
    p = 0.0
    for number, term in enumerate(SERIES):
        p = p * (s * s) + term if number else term
    return -(exponent * 0.6931471805599453 + 2 * s * p)


def single(x: float) -> float:
    """Round to float32."""
    return float(np.float32(x))


def alias_table(weights: Sequence[float]) -> list[tuple[float, int]]:
    """Make the columns of a list: the share of each that is its own edge's, and the other edge, ~ of which is a heavy one's."""
    n, most, total = len(weights), max(weights, default=0.0), 0.0
    if most == 0:
        return [(0.0, i) for i in range(n)]
    for w in weights:
        total += w / most
    shares = [max(w / most * (n / total), FLT_MIN) if w else 0.0 for w in weights]
    light, heavy = [i for i in range(n) if shares[i] <= 1], [i for i in range(n) if shares[i] > 1]
    table, last = [(0.0, 0)] * n, 0
    rest = shares[heavy[0]] if heavy else 0.0
    while heavy:
        last = heavy[0]
        if rest > 1 and light:
            i = light.pop(0)
            table[i] = single(shares[i]), last
            rest -= 1 - shares[i]
            continue
        heavy.pop(0)
        if rest > 1 or not heavy:
            table[last] = 1.0, ~last
            rest = shares[heavy[0]] if heavy else 0.0
        else:
            table[last] = single(rest), ~heavy[0]
            rest = shares[heavy[0]] - (1 - rest)
    for i in light:
        table[i] = float(shares[i] > 0), last
    return table


def shares_of(table: list[tuple[float, int]]) -> list[float]:
    """Recover the weights, up to a factor, in the order of additions of the kernel."""
    shares, rest = [least for least, _ in table], 0.0
    lights = [i for i, (_, other) in enumerate(table) if other >= 0]
    for j, (least, other) in enumerate(table):
        if other < 0:
            shares[j] = least + rest
            while lights and table[lights[0]][1] == j:
                shares[j] += 1 - table[lights.pop(0)][0]
            rest = 1 - least
    return shares


def weighted_positions(key: int, weights: Sequence[float], fanout: int, replace: bool = False) -> list[int]:
    """Draw positions of a list of these weights; ``key`` is the list's."""
    d = len(weights)
    if fanout == 0:
        return []
    if fanout == -1 or (d <= fanout and not replace):
        return [i for i, w in enumerate(weights) if w > 0]
    if max(weights, default=0.0) == 0:
        return []
    table = alias_table(weights)

    def trial(t: int) -> int:
        product = splitmix(key, t) * d
        column, share = product >> 64, uniform(product & M64)
        least, other = table[column]
        return column if share < least else ~other if other < 0 else other

    if replace:
        return sorted(trial(t) for t in range(fanout))
    drawn: list[int] = []
    for t in range((4 * fanout + d // 8 + 7) // 8 * 8 if fanout <= 64 else 0):
        edge = trial(t)
        if len(drawn) < fanout and edge not in drawn:
            drawn.append(edge)
    if len(drawn) < fanout:
        own = splitmix(key, M64)
        keys = [(exponential(uniform(splitmix(own, i))) / q, i) for i, q in enumerate(shares_of(table)) if q and i not in drawn]
        drawn += [i for _, i in sorted((min(each, MOST), i) for each, i in keys)[: fanout - len(drawn)]]
    return sorted(drawn)


def set_probabilities(weights: Sequence[float], k: int) -> dict[frozenset[int], float]:
    """Compute the probability of each set of ``k``, drawn one after the other in proportion to the weights that are left."""
    of_size = {frozenset[int](): 1.0}
    for _ in range(k):
        more: dict[frozenset[int], float] = {}
        for drawn, probability in of_size.items():
            left = [(i, w) for i, w in enumerate(weights) if i not in drawn and w > 0]
            total = sum(w for _, w in left)
            for i, w in left:
                more[drawn | {i}] = more.get(drawn | {i}, 0.0) + probability * w / total
        of_size = more
    return of_size
