"""Randomness of the samplers: counter-based, so that any draw can be repeated alone, anywhere, in any order.

``absorb(key, x)`` is output number ``x`` of the SplitMix64 generator whose state is ``key``: with all arithmetic modulo 2⁶⁴,
``mix(key + 0x9E3779B97F4A7C15 · (x + 1))``, where ``mix(z)`` is ``z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27;
z *= 0x94D049BB133111EB; z ^= z >> 31``. It is a bijection in either argument. Keys are chained from the outside in::

    batch = absorb(absorb(absorb(0, seed), epoch), index)
    hop   = absorb(batch, hop number)             # 0 is the seeds' own hop
    node  = absorb(hop, number of the list)       # the node's id; of several types, a node has several lists
    word  = absorb(node, draw number)

Draw ``i`` of ``k`` from a list of ``d`` neighbours turns its word into a position by ``below(word, n) = word · n >> 64``:

- with replacement ``below(word, d)``;
- without (``d > k``), by Floyd's method: ``t = below(word, d - k + i + 1)``, or ``d - k + i`` if ``t`` was drawn before.

If ``d <= k`` without replacement, or the fan-out is -1, the whole list is taken and nothing is drawn.

By weight, word ``i`` of a list of ``d`` neighbours, ``absorb(node, i)``, is a trial: ``word · d`` has a column of the list's
alias table before the point, and behind it the share that decides between the column's two neighbours. With replacement there are
``k`` trials. Without, there are ``4k + d / 8`` at most (for ``k <= 64``), and those are passed over that draw what is drawn. If
they do not suffice, the smallest of ``-log(1 - u) / weight`` draw the rest, where ``u`` is the uniform number of word
``absorb(absorb(node, 2⁶⁴ - 1), position)``, its 52 high bits (``kernels/weighted.h``).

Layer-neighbour sampling draws a number for each source, not for each edge: ``number(hop, id)``, of 32 bits, whose share of 2³²
is uniform. A destination takes from a list of ``d > k`` neighbours those whose number is below ``floor(k · 2³² / d)``. With all
arithmetic modulo 2³², ``number(key, id)`` is three rounds on the id, keyed with the halves of ``key`` and the low half of
``absorb(key, 0)``::

    x = id + low half;              x ^= x >> 17;  x *= 0xED5AD4BB
    x += high half;                 x ^= x >> 11;  x *= 0xAC4C1B51
    x += low half of absorb(key, 0);  x ^= x >> 15;  x *= 0x31848BAB;  x ^= x >> 14

For ids of more than 32 bits, the low half of ``absorb(key, id >> 32)`` is first xored to the low half of the id.

With importance probabilities a source has a number ``r`` and a weight ``w``, one over its probability. The source is taken if
the double ``w · r`` is below ``c · 2³²``, where ``c`` is the destination's scale (``kernels/importance.c``).

With a batch dependency of ``K`` a source's number stays for ``K`` batches, and each source changes at a time of its own. The
batch's key is then ``absorb(absorb(absorb(0, seed), epoch), (index + phase) // K)``. The phase, in ``[0, K)``, is
``number(phases, id) · K >> 32``, where ``phases`` is the hop's key in batch 2⁶⁴ - 1. So every number is uniform, and independent
of the other sources' numbers. In each batch one number in ``K`` is new.

Layer-wise sampling draws for the sources of a layer, in the order of their first appearance in the lists. A word stands for
``(word >> 11) / 2⁵³``. With replacement, draw ``i`` takes the source in whose share of the summed importance ``absorb(hop, i)``
lies. Without, pivotal sampling decides between source ``id`` and the one before it by ``absorb(hop, id)``
(``kernels/layerwise.c``).

References
----------
Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
Bentley, Floyd: A sample of brilliance, CACM 30(9), 1987.
Balin, Çatalyürek: Layer-neighbor sampling: defusing neighborhood explosion in GNNs, NeurIPS 2023.
Efraimidis, Spirakis: Weighted random sampling with a reservoir, Information Processing Letters 97(5), 2006.
Walker: An efficient method for generating discrete random variables with general distributions, TOMS 3(3), 1977.
Hübschle-Schneider, Sanders: Parallel weighted random sampling, TOMS 48(3), 2022.
Wellons: Prospecting for hash functions, 2018 (triple32).
"""

from __future__ import annotations

from featstore._core.sampler import absorb

__all__ = ["absorb", "batch_key", "source_keys"]

_PHASES = 2**64 - 1  # in place of a batch's index, which is divided by a dependency of 2 at least


def batch_key(seed: int, epoch: int, index: int) -> int:
    """Compute the key of one batch; all arguments in ``[0, 2**64)``."""
    return absorb(absorb(absorb(0, seed), epoch), index)


def source_keys(seed: int, epoch: int, index: int, hop: int, batch_dependency: int) -> tuple[int, int, int, int]:
    """Compute the keys of the sources' numbers in one hop: ``early, late, phase, turn``.

    ``early`` and ``late`` key the numbers before and after a source changes; they are equal if no source has changed. A source
    has changed if its number under ``phase`` is ``turn`` or more.
    """
    era, since = divmod(index, batch_dependency)
    early = absorb(batch_key(seed, epoch, era), hop)
    if since == 0:
        return early, early, 0, 0
    late = absorb(batch_key(seed, epoch, era + 1), hop)
    phase = absorb(batch_key(seed, epoch, _PHASES), hop)
    return early, late, phase, -(-((batch_dependency - since) << 32) // batch_dependency)
