"""Randomness of the samplers: counter-based, so that any draw can be made again alone, anywhere, in any order.

``absorb(key, x)`` is output number ``x`` of the SplitMix64 generator whose state is ``key``: with all arithmetic modulo 2⁶⁴,
``mix(key + 0x9E3779B97F4A7C15 · (x + 1))``, where ``mix(z)`` is ``z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27;
z *= 0x94D049BB133111EB; z ^= z >> 31``. It is a bijection in either argument. Keys are chained from the outside in::

    batch = absorb(absorb(absorb(0, seed), epoch), index)
    hop   = absorb(batch, hop number)             # 0 is the seeds' own hop
    node  = absorb(hop, node id)
    word  = absorb(node, draw number)

Draw ``i`` of ``k`` from a list of ``d`` neighbours turns its word into a position by ``below(word, n) = word · n >> 64``:

- with replacement ``below(word, d)``;
- without (``d > k``), by Floyd's method: ``t = below(word, d - k + i + 1)``, or ``d - k + i`` where ``t`` was drawn before.

Where ``d <= k`` without replacement, or the fan-out is -1, the whole list is taken and nothing is drawn.

References
----------
Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
Bentley, Floyd: A sample of brilliance, CACM 30(9), 1987.
"""

from __future__ import annotations

from featstore._core.sampler import absorb

__all__ = ["absorb", "batch_key"]


def batch_key(seed: int, epoch: int, index: int) -> int:
    """Return the key of one batch; all arguments in ``[0, 2**64)``."""
    return absorb(absorb(absorb(0, seed), epoch), index)
