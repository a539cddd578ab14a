"""Historical embeddings: a table of inputs of the last layer, kept so that their nodes need not be expanded again (OUTRE)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget, Reservation
from featstore.cache.base import get_policy
from featstore.cache.select import top_rows
from featstore.config import check_at_least, check_flag
from featstore.display import Display, Shown, Table, described
from featstore.errors import BusyError, OptionError
from featstore.gather.device import record_here, settle
from featstore.load.lategradients import pass_on, sums_dtype
from featstore.sampling.batch import HistoryRows
from featstore.sampling.batches import check_seeds
from featstore.sampling.foreign import check_same_graph, graph_id
from featstore.sampling.historical import PushTimes
from featstore.sampling.labor import LaborSampler
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.scratch import EMPTY

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph
    from featstore.strategies.base import Strategy

__all__ = ["BatchHistory", "History", "check_history"]

HOLDER = "historical embeddings"
POLICY = "degree"  # chooses the nodes, if a share of them is kept
SCORING_BYTES = 8  # a node of the graph, while nodes are chosen
VERSION = 1


class History(Shown):
    """Embeddings of some nodes, kept from the input of a model's last layer, and used in place of computing them again.

    A loader that has a history prunes its batches. A node of the seeds' own hop is not expanded if it was computed in one of the
    last steps: no neighbours of it are drawn, and none of their features are read.
    :meth:`~featstore.load.history.BatchHistory.merge` inserts the node's kept row (the node is pulled), and keeps the rows that
    the batch has computed (these nodes are pushed).

    Parameters
    ----------
    dim : int
        Width of the rows that enter the last layer.
    nodes : float, integer array or tensor, boolean mask, or "auto"
        Nodes that may be kept: a share of all, in ``(0, 1]``, with highest out-degree; or ids, or a mask over all nodes.
        ``"auto"``: the first loader chooses the nodes, and their number, by the I/O that they save (section 4.4).
    staleness : int
        Steps of training for which a row is used after it was pushed; then it is computed and pushed again. 0: never, as without
        a history. The paper counts from 1.
    dtype : torch.dtype
        Dtype of the table, to which rows are converted.
    gradients : bool
        Whether gradients of pulled rows reach the layers below: they are added up, and passed on when their node is computed the
        next time. False: these gradients are lost, as in the paper, and the history takes at most half of the memory.

    Raises
    ------
    ValueError, TypeError
        A value is out of range, or of the wrong type.

    Notes
    -----
    The table is on the loader's device, with one row a kept node. With ``gradients`` each node has a second row for the
    gradients that wait, at least in float32. On the CPU the graph's budget counts both rows, from the first loader on until the
    history is gone. The host also has 24 bytes a kept node. Seeds are always computed, and pushed if they are kept.

    A node that many neighbours pull is computed seldom. Without its gradients, the layers below learn from the other nodes
    alone; this costs more accuracy than the age of the rows (docs/decisions/0015-late-gradients.md). With a gradient scaler,
    gradients that wait keep the scale that they had.

    A step is a batch that was merged. Batches that are sampled ahead, but never run, do not change the history: after a loop
    that ended early, an error or a new epoch, training goes on from the last merged batch. Save :meth:`state_dict` with the
    states of the model and the loader.

    References
    ----------
    Sheng et al.: OUTRE, VLDB 2024, section 4.3. Fey et al.: GNNAutoScale, ICML 2021.

    Examples
    --------
    >>> history = featstore.History(dim=256, nodes=0.2)
    >>> loader = featstore.Loader(g, sampler, seeds, history=history)
    >>> for batch in loader:
    ...     h = batch.x
    ...     for layer, block in zip(layers, batch.blocks):
    ...         if block is batch.blocks[-1]:
    ...             h = batch.history.merge(h)
    ...         h = layer(h, block)
    """

    def __init__(
        self,
        dim: int,
        nodes: float | str | torch.Tensor | npt.NDArray[Any] | Sequence[int] = 0.2,
        staleness: int = 15,
        dtype: torch.dtype = torch.float32,
        gradients: bool = True,
    ) -> None:
        self.dim, self.staleness = check_at_least("dim", dim, 1), check_at_least("staleness", staleness, 0, 2**62)
        self.gradients = check_flag("gradients", gradients)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point torch.dtype, not {dtype!r}")
        self._is_auto = isinstance(nodes, str) and nodes == "auto"
        if self._is_auto:
            nodes = EMPTY  # until nodes are chosen
        if isinstance(nodes, (bool, int, np.integer, str)):
            raise TypeError(f"nodes must be a share such as 0.2, ids, a mask or 'auto', not {nodes!r}")
        if isinstance(nodes, (float, np.floating)):
            nodes = float(nodes)
            if not 0 < nodes <= 1:
                raise ValueError(f"nodes must be a share above 0 and at most 1, or ids, not {nodes}")
        else:
            check_seeds(nodes, what="node")
        self.dtype = dtype
        self._nodes: Any = nodes
        self._split: Mapping[str, Any] | None = None
        self.times = PushTimes(self.staleness)
        self._table: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None  # gradients that wait, if they are kept
        self._held: Reservation | None = None
        self._num_nodes = -1  # number of nodes of the graph, once known
        self._graph: str | None = None  # id of the graph, once known
        self._lock = threading.Lock()
        self._is_taken = False  # by a loader
        self._run: object = None  # the epoch whose batches are merged
        self._is_running = False
        self._delivered = -1  # step of the last batch that was delivered
        self._n_pulled = self._n_pushed = 0

    def __repr__(self) -> str:
        nodes = self._nodes if isinstance(self._nodes, float) else f"<{len(self._nodes)} ids>"
        nodes = "'auto'" if self._is_auto else nodes
        options = f"staleness={self.staleness}, dtype={self.dtype}, gradients={self.gradients}"
        return f"History(dim={self.dim}, nodes={nodes}, {options})"

    def _display(self) -> Display:
        counts = [(name, described(value, name)) for name, value in self.stats().items() if name != "split"]
        return Display(repr(self), [Table(("", ""), counts)])

    def __reduce__(self) -> NoReturn:
        raise TypeError("a History cannot be pickled or copied: save its state_dict(), and load it into another one")

    def __len__(self) -> int:
        """Number of kept nodes; 0 before a loader has the history."""
        return len(self.times.nodes)

    @property
    def step(self) -> int:
        """Number of batches that were merged."""
        return self.times.step

    def stats(self) -> dict[str, Any]:
        """Return ``nodes`` and ``bytes`` of the tables, and the numbers of rows ``pulled`` and ``pushed``.

        If a loader chose the nodes, the dict also has ``split``: ``alpha``, the share of ``bytes`` for embeddings; ``beta``, the
        cost of sampling an edge in reads of a row; and the ``curve`` of reads that are ``saved`` an epoch at each ``alpha``. If
        memory was too short for the choice, ``why`` gives the reason.
        """
        n_bytes = sum(each.nbytes for each in (self._table, self._sums) if each is not None)
        found = {"nodes": len(self), "bytes": n_bytes, "pulled": self._n_pulled, "pushed": self._n_pushed}
        return found if self._split is None else {**found, "split": dict(self._split)}

    # The state of training.

    def state_dict(self) -> dict[str, Any]:
        """Return the kept nodes, their rows and gradients, the step of each push, and the step of training; for ``torch.save``.

        The tensors share memory with the history: save or copy them before training goes on.

        Raises
        ------
        ValueError
            The history has no table, because it had no loader yet.
        """
        if self._table is None:
            raise ValueError("the history has no table yet: it gets one from its first loader")
        nodes, pushed = torch.from_numpy(self.times.nodes), torch.from_numpy(self.times.pushed)
        state = {"version": VERSION, "num_nodes": self._num_nodes, "graph": self._graph, "step": self.times.step}
        return state | {"nodes": nodes, "pushed": pushed, "table": self._table, "gradients": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned, with its kept nodes.

        Raises
        ------
        ValueError
            The state is not that of a history, is of another graph, or has rows of another width or dtype; or only one of state
            and history has gradients.
        BusyError
            An epoch of the history's loader is running.
        BudgetError
            The table is larger than the present one, and does not fit.
        """
        if state.get("version") != VERSION or "table" not in state:
            raise ValueError(f"not a history's state: {sorted(state)}")
        nodes, pushed, table, step = (state[name] for name in ("nodes", "pushed", "table", "step"))
        if table.shape != (len(nodes), self.dim) or table.dtype != self.dtype:
            raise ValueError(
                f"the state has rows of {tuple(table.shape)[1:]} and {table.dtype}, the history of ({self.dim},) and {self.dtype}"
            )
        sums = state.get("gradients")
        if (sums is not None) != self._has_sums or (sums is not None and sums.shape != table.shape):
            raise ValueError("of state and history one has gradients, the other none: see gradients= and staleness=")
        if self._num_nodes not in (-1, state["num_nodes"]):
            raise ValueError(f"the state is of a graph of {state['num_nodes']} nodes, the loader's has {self._num_nodes}")
        check_same_graph(state, self._graph)
        ids, when = nodes.cpu().numpy().astype(np.int64), pushed.cpu().numpy().astype(np.int64)
        wrong = len(when) != len(ids) or bool((np.diff(ids) <= 0).any()) or bool((when >= step).any())
        if wrong or (len(ids) and not (ids[0] >= 0 and ids[-1] < state["num_nodes"])):
            raise ValueError("the state's nodes, steps and rows do not fit each other; was it changed after it was taken?")
        with self._lock:
            self.check_idle()
            device = table.device if self._table is None else self._table.device
            if self._held is not None:
                self._held.resize(self._bytes(len(ids), device))
            self._table = torch.empty_like(table, device=device).copy_(table)
            self._sums = None if sums is None else self._zeros(len(ids), device).copy_(sums)
            settle(device)
            self.times.nodes, self.times.pushed, self.times.step = ids, when, int(step)
            self._num_nodes, self._run = int(state["num_nodes"]), None
            self._graph = state.get("graph")

    # Calls of the loader.

    def attach(self, g: OutOfCoreGraph) -> None:
        """Attach the history to one loader, until :meth:`detach`.

        Raises
        ------
        BusyError
            Another loader has the history.
        ValueError
            The nodes are not nodes of the graph, or the history's state is of another graph.
        """
        with self._lock:
            if self._is_taken:
                raise BusyError("another loader has this history: close it first, or give each loader one of its own")
            if self._num_nodes not in (-1, g.num_nodes):
                raise OptionError("history", f"it is of a graph of {self._num_nodes} nodes, this one has {g.num_nodes}")
            check_same_graph({"graph": self._graph}, graph_id(g))
            if not isinstance(self._nodes, float):
                try:
                    check_seeds(self._nodes, g.num_nodes, what="node")
                except (ValueError, IndexError) as error:
                    raise OptionError("history", f"its nodes: {error}") from None
            self._is_taken = True

    def detach(self) -> None:
        """Detach the history from its loader; may be called again. The table stays."""
        self._is_taken = self._is_running = False

    def make(self, g: OutOfCoreGraph, device: torch.device) -> None:
        """Make the table on ``device``, or move it there; the graph's budget counts its host memory.

        Raises
        ------
        BudgetError
        """
        n = self._count(g.num_nodes) if self._table is None else len(self)
        n_bytes = self._bytes(n, device)
        held = self._held
        if held is None or held.budget is not g.budget:
            held = self._reserve(g.budget, n_bytes)
        else:
            held.resize(n_bytes)
        try:
            if self._table is None:
                nodes = self._choose(g, n)
                self._table = torch.zeros((n, self.dim), dtype=self.dtype, device=device)
                self._sums = self._zeros(n, device) if self._has_sums else None
                self.times.nodes, self.times.pushed = nodes, np.full(n, -1)
            elif self._table.device != device:
                if self._table.is_cuda:
                    torch.cuda.synchronize(self._table.device)  # a loop may have pushed in any stream
                self._table = self._table.to(device)
                self._sums = None if self._sums is None else self._sums.to(device)
            settle(device)
        except BaseException:
            if held is not self._held:
                held.release()
            raise
        if self._held is not None and held is not self._held:
            self._held.release()
        self._held, self._num_nodes, self._graph = held, g.num_nodes, graph_id(g)

    @property
    def is_open(self) -> bool:
        """Whether a loader has to choose the nodes."""
        return self._is_auto and self._table is None

    @property
    def node_bytes(self) -> int:
        """Bytes of a kept node with its rows, if the table is on the host."""
        return self._bytes(1, torch.device("cpu"))

    def keep(self, nodes: npt.NDArray[np.int64], g: OutOfCoreGraph, device: torch.device, split: Mapping[str, Any]) -> int:
        """Make the table for the nodes that a loader has chosen, and record the ``split``; return the bytes of the table.

        Raises
        ------
        BudgetError
        """
        self._nodes, self._split = nodes, split
        self.make(g, device)
        return self._bytes(len(nodes), device)

    def forget(self) -> None:
        """Undo :meth:`keep`, because its loader could not be made."""
        if self._split is None or self.times.step:
            return
        self._nodes, self._split, self._table, self._sums, self._num_nodes = EMPTY, None, None, None, -1
        self._graph = None
        self.times.nodes = self.times.pushed = EMPTY
        if self._held is not None:
            self._held.release()
            self._held = None

    def needed_bytes(self, g: OutOfCoreGraph, device: torch.device) -> int:
        """Compute the bytes that :meth:`make` needs, temporary ones included."""
        if self._table is not None:
            return self._bytes(len(self), device)
        scoring = SCORING_BYTES * g.num_nodes if isinstance(self._nodes, float) else 0
        return self._bytes(self._count(g.num_nodes), device) + scoring

    def _reserve(self, budget: Budget, n_bytes: int) -> Reservation:
        return budget.reserve(HOLDER, n_bytes, owner=self)

    def _count(self, num_nodes: int) -> int:
        if isinstance(self._nodes, float):
            return round(self._nodes * num_nodes)
        return len(check_seeds(self._nodes, num_nodes, what="node"))

    def _bytes(self, n: int, device: torch.device) -> int:
        width = self.dtype.itemsize + (sums_dtype(self.dtype).itemsize if self._has_sums else 0)
        on_host = n * self.dim * width if device.type == "cpu" else 0
        return on_host + n * PushTimes.NODE_BYTES

    @property
    def _has_sums(self) -> bool:
        return self.gradients and self.staleness > 0

    def _zeros(self, n: int, device: torch.device) -> torch.Tensor:
        return torch.zeros((n, self.dim), dtype=sums_dtype(self.dtype), device=device)

    def _choose(self, g: OutOfCoreGraph, n: int) -> npt.NDArray[np.int64]:
        if not isinstance(self._nodes, float):
            return np.sort(check_seeds(self._nodes, g.num_nodes, what="node").numpy())
        with g.policy_inputs(self.dim * self.dtype.itemsize) as inputs:
            policy: Any = get_policy(POLICY)
            return top_rows(inputs.scores(policy), n)

    def check_idle(self) -> None:
        """Raise BusyError while an epoch runs: a second one would prune its batches by the same steps."""
        if self._is_running:
            raise BusyError("an epoch with this history is running: finish or close its iterator first")

    def begin(self, run: object) -> None:
        """Note that an epoch begins; from now on only its batches are merged."""
        self._run, self._is_running, self._delivered = run, True, -1

    def end(self, run: object) -> None:
        """Note that an epoch is over; its last delivered batch may still be merged."""
        if self._run is run:
            self._is_running = False

    def deliver(self, batch: BatchHistory) -> None:
        """Note the step of the batch that is delivered to the loop."""
        self._delivered = batch.rows.step

    def check_merged(self) -> None:
        """Raise ValueError if the last delivered batch was not merged."""
        if self._delivered >= self.times.step:
            raise ValueError(
                "history: the batch before was not merged: call h = batch.history.merge(h) before the last layer of every batch, "
                "or make the loader without history"
            )

    def merge(self, rows: HistoryRows, n_sources: int, run: object, h: torch.Tensor) -> torch.Tensor:
        """See :meth:`~featstore.load.history.BatchHistory.merge`."""
        table, times = self._table, self.times
        if table is None:
            raise ValueError("the history has no table")
        if run is not self._run:
            raise ValueError("this batch is of an epoch that is over, and another one has begun: it cannot be merged any more")
        if rows.step != times.step:
            raise ValueError(
                "this batch was merged already: merge is called once a batch"
                if rows.step < times.step
                else "a batch before this one was not merged"
            )
        record_here(table, self._sums)
        n_kept = n_sources - len(rows.pull)
        if h.ndim != 2 or tuple(h.shape) != (n_kept, self.dim):
            raise ValueError(
                f"merge takes what enters the last layer, of shape ({n_kept}, {self.dim}), not {tuple(h.shape)}: "
                "the output of the layer before, a row a destination of its block"
            )
        if h.device != table.device:
            raise ValueError(f"the history is on {table.device}, where its loader delivers batches, and h is on {h.device}")
        merged = h
        if len(rows.pull):
            pulled = table.index_select(0, rows.pull_slots).to(h.dtype)
            is_kept = torch.ones(n_sources, dtype=torch.bool, device=h.device).index_fill_(0, rows.pull, False)
            kept = is_kept.nonzero().flatten()
            merged = h.new_empty((n_sources, self.dim)).index_copy_(0, kept, h).index_copy_(0, rows.pull, pulled)
        with torch.no_grad():
            table.index_copy_(0, rows.push_slots, merged.detach().index_select(0, rows.push).to(table.dtype))
        if self._sums is not None and merged.requires_grad:
            pass_on(merged, rows, self._sums)
        times.pushed[rows.push_slots.cpu().numpy()] = rows.step
        times.step = rows.step + 1
        self._n_pulled += len(rows.pull)
        self._n_pushed += len(rows.push)
        return merged


@dataclass(frozen=True, eq=False)
class BatchHistory:
    """The rows that a batch pulls from a history and pushes to it.

    Parameters
    ----------
    rows : HistoryRows
        Positions and slots of these rows, on the batch's device.
    n_sources : int
        Number of sources of the last block.
    """

    rows: HistoryRows
    n_sources: int
    _owner: History
    _run: object

    def merge(self, h: torch.Tensor) -> torch.Tensor:
        """Compute the input of the last layer, and keep its computed rows. Call it once a batch, before asking for the next one.

        Parameters
        ----------
        h : tensor, shape (n_kept, dim)
            Rows of the destinations of the last block but one, on the loader's device.

        Returns
        -------
        tensor, shape (n_src, dim)
            One row for each source of the last block; ``h`` itself if nothing is pulled. Gradients of computed rows pass to
            ``h``. Gradients of pulled rows wait until their node is computed, and are added then (:class:`History`,
            ``gradients``).

        Raises
        ------
        ValueError
            ``h`` has another shape, or is on another device; the batch was merged already, or is of an epoch that is over.

        Notes
        -----
        Rows are pushed as they are now, detached. Apply dropout after this call rather than before, so that no zeros are kept.
        """
        return self._owner.merge(self.rows, self.n_sources, self._run, h)

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> BatchHistory:
        """Make the same object with ``move(tensor)`` in place of each tensor."""
        return BatchHistory(self.rows.map(move), self.n_sources, self._owner, self._run)


def check_history(history: object, strategy: Strategy, sampler: object, device: torch.device | None = None) -> None:
    """Raise OptionError or TypeError unless a loader with this strategy, sampler and device can have a history.

    Parameters
    ----------
    sampler : Sampler
        None if the strategy has batches of its own.
    device : torch.device, optional
    """
    if not isinstance(history, History):
        raise TypeError(f"history must be a featstore.History, not {history!r}")
    if sampler is None:
        raise OptionError("history", "a pack's batches were sampled before training, whole: it goes with batches sampled now")
    if not strategy.takes_history:
        raise OptionError(
            "history", f"strategy {strategy.name!r} does not say that it runs batches in their order (takes_history)"
        )
    name = type(sampler).__name__
    if not isinstance(sampler, (NeighborSampler, LaborSampler)) or type(sampler) not in (NeighborSampler, LaborSampler):
        raise OptionError(
            "history", f"it goes with NeighborSampler and LaborSampler, whose nodes draw for themselves, not {name}"
        )
    if sampler.disjoint:
        raise OptionError("history", "it has one row a node, and a disjoint batch has a node several times: leave disjoint out")
    if not sampler.redraw:
        raise OptionError("history", "it needs a sampler whose nodes draw anew in every hop (redraw=True)")
    if isinstance(sampler, LaborSampler) and sampler.importance_sampling:
        raise OptionError("history", "with importance_sampling a node's draws depend on the others' of its hop: leave it out")
    if history.is_open and device is not None and device.type != "cpu":
        raise OptionError(
            "history",
            f"nodes='auto' divides the host's memory, and on {device} the table takes the device's: give a share or ids",
        )
    if len(sampler.fanouts) < 2:
        raise OptionError("history", "it needs two hops at least: with one there is nothing to save")
