"""Progress of training: the epoch and the batch that come next, saved and restored by all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featstore.config import listed
from featstore.pack.packgraph import Graph
from featstore.sampling.foreign import check_same_graph, graph_id
from featstore.sampling.sampledbatches import SampledBatches

__all__ = ["Position", "TrainingState"]


@dataclass
class Position:
    """A batch that comes next, by the epoch and the rank's own count."""

    epoch: int
    batch: int


class TrainingState:
    """The beginning of a loader's next epoch, and the progress of the one that was begun last.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
    batches : SampledBatches

    Attributes
    ----------
    next : Position
        Where the next ``for`` loop begins.
    """

    def __init__(self, g: Graph, batches: SampledBatches) -> None:
        self._g, self._batches = g, batches
        self.next = self._running = Position(0, 0)
        self._first = 0  # the batch with which the running epoch began

    def begun(self, position: Position) -> None:
        """Follow the epoch that begins at ``position``, which it moves with each batch that it delivers."""
        self.next, self._running, self._first = Position(position.epoch + 1, 0), position, position.batch

    def go_on(self, epoch: int, n_done: int) -> None:
        """Let the next loop run ``epoch`` after its first ``n_done`` batches, those of all ranks together."""
        start = self._batches.resume(epoch, n_done)
        if start >= len(self._batches) > 0:  # these ranks leave out what others would have run
            epoch, start = epoch + 1, 0
        self.next = self._running = Position(epoch, start)
        self._first = start

    def to_dict(self, ahead: int = 0) -> dict[str, Any]:
        """Return the epoch and the batch after the last one delivered, and whose they are; the same on all ranks.

        ``ahead``: batches, the last ones delivered, that do not count.
        """
        epoch, batch = self._running.epoch, max(self._first, self._running.batch - ahead)
        if batch >= len(self._batches) > 0:
            epoch, batch = epoch + 1, 0
        done, digest = self._batches.n_done(epoch, batch), self._batches.digest()
        return {"version": 1, "epoch": epoch, "batch": done, "batches": digest, "graph": graph_id(self._g)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`to_dict` returned; ValueError: it is of other batches or of another graph."""
        if not isinstance(state, Mapping):
            raise TypeError(f"a loader's state is the dict that state_dict() returned, not a {type(state).__name__}")
        if state.get("version") != 1:
            raise ValueError(f"not a loader's state, which state_dict() returns: it has {listed(sorted(map(str, state)))}")
        if state["batches"] != self._batches.digest():
            raise ValueError(
                "the state is of a loader with other seeds, batch_size, shuffle, seed or drop_last, or whose batches of a pack "
                "ran in another order (policy, length, world_size)"
            )
        check_same_graph(state, graph_id(self._g))
        self.go_on(int(state["epoch"]), int(state["batch"]))
