"""The arrays of a graph that a policy may use."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.cache.select import check_scores, scores_there
from featstore.errors import FeatstoreError, PluginError
from featstore.gather.arrays import as_array
from featstore.registry import error_text
from featstore.topology.noderows import NodeRows

__all__ = ["Given", "PolicyInputs", "policy_scores"]

# An array that a policy may use, or a callable that makes the array when a policy asks for it.
Given: TypeAlias = "npt.ArrayLike | Callable[[], npt.NDArray[Any]] | None"


def policy_scores(policy: StaticPolicy, context: PolicyContext, *, of_lists: bool) -> npt.NDArray[Any]:
    """Score a context's rows, or their neighbour lists; PluginError if the policy raises or returns invalid scores."""
    try:
        scores = as_array("scores", (policy.list_scores if of_lists else policy.scores)(context))
    except (FeatstoreError, OSError, MemoryError):
        raise
    except Exception as error:
        raise PluginError(f"policy {policy.name!r}: scores failed: {error_text(error)}") from error
    return scores_there(context, check_scores(policy, scores, context.n))


class PolicyInputs:
    """Arrays that are made when a policy first asks for them, and counted in the budget; a context manager.

    The budget counts the arrays until the block is left. If the policy failed because an array could not be made (a damaged
    file, the budget, an argument not given), leaving the block raises that error instead of the PluginError. ``in_degree`` and
    ``out_degree`` make arrays of 8 bytes a node. ``cross_out_degree`` makes a tensor that the budget counts while it lives.
    ``counts`` and ``parts`` are given by the user. They have an entry a node, of which policies see those of ``rows``; the
    other arrays have an entry a row.
    """

    def __init__(
        self,
        rows: NodeRows,
        row_bytes: int,
        budget: Budget,
        in_degree: Callable[[], npt.NDArray[Any]],
        out_degree: Callable[[], npt.NDArray[Any]],
        counts: Given,
        parts: Given,
        seed: int,
        cross_out_degree: Callable[[], torch.Tensor] | None = None,
        is_there: Callable[[], npt.NDArray[Any]] | None = None,
    ) -> None:
        self._rows, self._n = rows, rows.n
        self._tensors: list[torch.Tensor] = []
        self._given = {"counts": counts, "parts": parts}
        self._failure: Exception | None = None
        self._held = budget.reserve("policy inputs", 0)
        self.context = PolicyContext(
            rows.n,
            row_bytes,
            self._noting(lambda: self._counted(in_degree)),
            self._noting(lambda: self._counted(out_degree)),
            self._noting(lambda: self._of_user("counts")),
            self._noting(lambda: self._of_user("parts")),
            seed,
            None if cross_out_degree is None else self._noting(lambda: self._array("cross_out_degree", cross_out_degree())),
            None if is_there is None else self._noting(lambda: self._counted(is_there)),
        )

    def _array(self, name: str, given: Any) -> npt.NDArray[Any]:
        """View an array or a tensor as an array; a tensor is kept alive, as the budget counts it while it lives."""
        if isinstance(given, torch.Tensor):
            self._tensors.append(given)
        return as_array(name, given)

    def _of_user(self, name: str) -> npt.NDArray[Any]:
        given = self._given[name]
        if given is None:
            raise ValueError(f"the policy needs {name}: pass {name}=")
        if self._rows.kinds:
            self._held.resize(self._held.n_bytes + 8 * self._n)
        array = self._rows.select(self._array(name, given() if callable(given) else given))
        if array.shape != (self._n,):
            raise ValueError(f"{name} must have shape ({self._n},), not {array.shape}")
        return array

    def _noting(self, provide: Callable[[], npt.NDArray[Any]]) -> Callable[[], npt.NDArray[Any]]:
        """Wrap a provider of an array so that its failure is remembered and not reported as the policy's."""

        def call() -> npt.NDArray[Any]:
            try:
                return provide()
            except Exception as error:
                self._failure = error
                raise

        return call

    def _counted(self, make: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        self._held.resize(self._held.n_bytes + 8 * self._n)
        return make()

    def scores(self, policy: StaticPolicy, *, of_lists: bool = False) -> npt.NDArray[Any]:
        """Compute checked scores of rows, or of neighbour lists, by a policy."""
        n, n_bytes = self._n, policy.list_score_bytes if of_lists else None
        self._held.resize(self._held.n_bytes + (policy.score_bytes if n_bytes is None else n_bytes) * n)
        return policy_scores(policy, self.context, of_lists=of_lists)

    def __enter__(self) -> PolicyInputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.context.forget()  # a cache keeps its policy's context
        self._held.release()
        self._tensors.clear()
        if self._failure is not None and isinstance(error, PluginError):
            raise self._failure from None
