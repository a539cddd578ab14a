"""Fingerprint of a policy. Policies that choose different rows have different fingerprints, and so different layouts."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from featstore.cache.base import Policy, StaticPolicy
from featstore.errors import PluginError

__all__ = ["digest_bytes", "digest_of", "same_scores"]

_PLAIN = (numbers.Number, str, bytes, type(None), list, tuple, dict)


def digest_of(policy: Policy, scores_of: Callable[[StaticPolicy], npt.NDArray[Any]]) -> str:
    """Compute a digest of a policy's state, which decides a layout together with policy name, pack and sizes of the tiers.

    The digest of the library's own policies is "": their names suffice. For other static policies it is a digest of their checked
    scores, ``scores_of(policy)``. For other planned policies it covers the full name of their class and their public attributes,
    class attributes such as ``version`` included. So two planned policies of one class that decide differently need a public
    attribute (a number, text, an array, a list or dictionary of numbers or text) that differs. PluginError: the attributes cannot
    be read.
    """
    if _is_own(policy):
        return ""
    if isinstance(policy, StaticPolicy):
        return _of_scores(scores_of(policy))
    try:
        return _of_attributes(policy)
    except Exception as error:
        raise PluginError(f"policy {policy.name!r}: its attributes cannot be read: {type(error).__name__}: {error}") from error


def digest_bytes(policy: Policy, n: int) -> int:
    """Count the bytes of the scores of ``n`` rows that :func:`digest_of` reads; 0 if it reads none."""
    return policy.score_bytes * n if isinstance(policy, StaticPolicy) and not _is_own(policy) else 0


def _is_own(policy: Policy) -> bool:
    return type(policy).__module__.startswith("featstore.cache.")


def _of_attributes(policy: Policy) -> str:
    kind = type(policy)
    state = xxhash.xxh3_64(f"{kind.__module__}.{kind.__qualname__}".encode())
    for name in sorted(name for name in dir(policy) if not name.startswith("_")):
        if isinstance(getattr(kind, name, None), property):
            continue  # computed from other attributes
        value = getattr(policy, name)
        if isinstance(value, _PLAIN):
            state.update(f"\0{name}={value!r}".encode())
        elif hasattr(value, "__array__"):
            array = np.ascontiguousarray(value)
            state.update(f"\0{name}={array.dtype}{array.shape}".encode() + array.tobytes())
    return state.hexdigest()


def _of_scores(scores: npt.NDArray[Any]) -> str:
    state = xxhash.xxh3_64(str(scores.dtype).encode())
    state.update(np.ascontiguousarray(scores).data)
    return state.hexdigest()


def same_scores(scores_of: Callable[[StaticPolicy], npt.NDArray[Any]], digest: str) -> Callable[[StaticPolicy], npt.NDArray[Any]]:
    """Wrap ``scores_of`` so that it raises PluginError unless the scores are those that ``digest`` was made of."""

    def checked(policy: StaticPolicy) -> npt.NDArray[Any]:
        scores = scores_of(policy)
        if digest and _of_scores(scores) != digest:
            raise PluginError(f"policy {policy.name!r} gave other scores when it was asked again; they must not change")
        return scores

    return checked
