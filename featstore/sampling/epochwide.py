"""Sampling a whole epoch at a time: one hop of all batches in one pass over the neighbour lists (in-situ sampling)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from featstore.budget import Reservation
from featstore.config import check_at_least, parse_size
from featstore.display import Display, Table, options_of
from featstore.sampling.batch import CheckedSampler, SampledBatch
from featstore.sampling.labor import LaborSampler
from featstore.sampling.listaccess import parse_access
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.typed import Fanouts
from featstore.sampling.window import EpochWindow, Seeds, drawn_bytes, has_places, is_wide, least_bytes, useful_bytes
from featstore.sampling.windowed import Coming, Cut, WindowedBatches, Windows, disk_of
from featstore.storage.rundir import runs_directory
from featstore.topology.types import EdgeKey

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["EpochSampler", "draws_at_once"]


def draws_at_once(sampler: object) -> TypeGuard[NeighborSampler | LaborSampler]:
    """Tell whether :class:`EpochSampler` draws a sampler's batches: neither by weight, nor by importance, nor disjoint ones."""
    if type(sampler) is LaborSampler:
        return not sampler.importance_sampling
    return type(sampler) is NeighborSampler and sampler.weight is None and not sampler.disjoint


class EpochSampler(CheckedSampler):
    """Sample many batches at once, hop by hop, each hop in one pass over the neighbour lists.

    The batches equal those of :class:`NeighborSampler`, or with ``draws="labor"`` those of :class:`LaborSampler`, with the same
    options, bit for bit. For a loader that takes an epoch's batches in order, the sampler draws a window of batches at a time. In
    each hop the nodes of all batches that draw are sorted, and their lists are read in sequence. Every node draws under its own
    batch's key, for this hop and all later ones. So a list is read once a hop for a window, and not once a batch. In a graph of
    several types, this one pass is over the lists of all types of edges. :meth:`sample` draws one batch alone, and reads as the
    other sampler does.

    Parameters
    ----------
    g, fanouts, replace, seed, redraw
        See :class:`NeighborSampler`.
    draws : str
        ``"neighbor"``: every node draws for itself. ``"labor"``: nodes share the neighbours that they take.
    batch_dependency, layer_dependency
        See :class:`LaborSampler`; only with ``draws="labor"``. Only :class:`LaborSampler` offers importance sampling: it needs
        the lists of all nodes of a hop at once, and a pass has a part of them at a time.
    window : int or "auto"
        Batches drawn at once. ``"auto"``: the whole epoch, or as many batches as ``disk`` and the memory are likely to hold. Once
        ``disk`` was too small for them, it is fewer. In a loader that keeps all lists in memory, batches are drawn one by one:
        passes would read nothing there, and compute twice as much.
    disk : int, str or None
        Most bytes of run files at once, for samples that do not fit the memory; None: a quarter of the free disk.
    run_dir : path-like or None
        Directory for run files. They go into a directory of their own there, which is removed afterwards, or after a crash by
        the next run. None: ``<dataset>.runs`` beside the dataset, or the temporary directory if that cannot be written.
    access : {"auto", "pass", "random"}
        Way of reading lists that are not in memory. ``"pass"``: whole lists, in the order of the file. ``"random"``: the sampler
        first draws which neighbours are taken, then reads only the pages that hold them, once for all batches of the window that
        draw together. ``"auto"``: the cheaper way on this drive, chosen anew in every hop for each range of nodes.
    edges : bool
        Fill ``edge_pos`` of the blocks. Each batch then looks up the starts of its nodes' lists. With ``draws="neighbor"`` the
        numbers are drawn once more. With ``"labor"`` logs also hold a neighbour's place in its list, which doubles their memory.

    Raises
    ------
    ValueError
        The errors of the sampler with the same batches; ``draws`` or ``access`` is another word; an option does not go with the
        draws (``replace`` and ``access="random"`` with ``"labor"``); ``window`` is below 1.

    Notes
    -----
    The cost of a window's hop: read the lists that its batches need, once in the order of the file, or fewer pages (``access``);
    sort the nodes that draw; write their draws in logs by batch. Lists in the neighbour cache are not read. With several windows,
    the next window is drawn while batches of the current one are taken, each in half of the memory. The first window of a
    loader's next epoch is drawn ahead, too. Batches that are requested again, or out of turn, are sampled alone. Thread-safe.

    References
    ----------
    Song et al., In situ neighborhood sampling for large-scale GNN training, DaMoN 2024, sections 2.2 and 2.3.

    Examples
    --------
    >>> sampler = EpochSampler(g, fanouts=[20, 15, 10])
    >>> loader = featstore.Loader(g, sampler, seeds, batch_size=1000, strategy="streamed")
    """

    def __init__(
        self,
        g: OutOfCoreGraph,
        fanouts: Sequence[int] | Mapping[EdgeKey, Sequence[int]],
        replace: bool = False,
        seed: int = 0,
        redraw: bool = True,
        *,
        draws: str = "neighbor",
        batch_dependency: int = 1,
        layer_dependency: bool = False,
        window: int | str = "auto",
        disk: int | str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        access: str = "auto",
        edges: bool = False,
    ) -> None:
        self.draws = draws
        self.hops: NeighborSampler | LaborSampler  # whose batches these are
        if draws == "labor":
            if replace:
                raise ValueError("replace goes with draws='neighbor', not 'labor'")
            if parse_access(access) == "random":
                raise ValueError("access='random' goes with draws='neighbor', not 'labor', which goes through whole lists")
            access = "pass"
            self.hops = LaborSampler(g, fanouts, batch_dependency, seed, layer_dependency, redraw, edges=edges)
        elif draws == "neighbor":
            for name, is_given in (("batch_dependency", batch_dependency != 1), ("layer_dependency", layer_dependency)):
                if is_given:
                    raise ValueError(f"{name} goes with draws='labor', not 'neighbor'")
            self.hops = NeighborSampler(g, fanouts, replace, seed, redraw, edges)
        else:
            raise ValueError(f"draws is 'neighbor' or 'labor', not {draws!r}")
        self.edges = self.hops.edges
        if isinstance(window, str):
            if window != "auto":
                raise ValueError(f"window is a number of batches or 'auto', not {window!r}")
        else:
            window = check_at_least("window", window, 1)
        self.window = window
        self.access = parse_access(access)
        # Seconds of reads, bytes of lists, ids read alone and spilled bytes of each window; a deque, whose append is atomic.
        self._windows: deque[tuple[float, int, int, int]] = deque()
        self.disk = None if disk is None else parse_size(disk, "disk")
        self.run_dir = os.path.abspath(runs_directory(g.path, run_dir))

    @classmethod
    def of(cls, hops: NeighborSampler | LaborSampler, run_dir: str) -> EpochSampler:
        """Make a sampler of the batches of ``hops``, with which it shares memory; only if :func:`draws_at_once` is true of it."""
        options: dict[str, Any] = {"replace": hops.replace} if isinstance(hops, NeighborSampler) else {"draws": "labor"}
        found = cls(hops.graph, hops.given_fanouts, **options, run_dir=run_dir)
        found.hops, found.edges = hops, hops.edges
        return found

    def __repr__(self) -> str:
        _, options = repr(self.hops).split("(", 1)
        draws = "" if self.draws == "neighbor" else f", draws={self.draws!r}"
        return f"{type(self).__name__}({options[:-1]}{draws}, window={self.window!r})"

    def _display(self) -> Display:
        options = {**dict(options_of(self.hops)), **dict(options_of(self))}
        return Display(type(self).__name__, [Table(("", ""), list(options.items()))])

    def __reduce__(self) -> tuple[Any, ...]:
        hops = self.hops
        options: dict[str, Any] = {"seed": hops.seed, "redraw": hops.redraw, "draws": self.draws, "edges": hops.edges}
        if isinstance(hops, LaborSampler):
            options |= {"batch_dependency": hops.batch_dependency, "layer_dependency": hops.layer_dependency}
        else:
            options |= {"replace": hops.replace}
        options |= {"window": self.window, "disk": self.disk, "run_dir": self.run_dir, "access": self.access}
        return partial(type(self), **options), (self.graph, hops.given_fanouts)

    @property
    def graph(self) -> OutOfCoreGraph:
        """The graph that the sampler draws from."""
        return self.hops.graph

    @property
    def reach(self) -> int:
        """Hops from the seeds whose lists are read."""
        return self.hops.reach

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Neighbours that a node draws in each hop, the seeds' own first; of several types of edges together, at most."""
        return self.hops.fanouts

    @property
    def fanouts_of_types(self) -> Fanouts | None:
        """The fan-outs of each type of edges in a graph of several types; else None."""
        return self.hops.fanouts_of_types

    @property
    def threads(self) -> int:
        """Number of threads that draw at a time."""
        return self.graph.options.threads

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        """Sample one batch alone; see :meth:`NeighborSampler.sample`."""
        return self.hops.sample(seeds, epoch, index)

    def trim(self) -> bool:
        """Give back the scratch of threads that do not sample now, except for one; return whether any was held."""
        return self.hops.trim()

    def stats(self) -> dict[str, float]:
        """Return the totals of :meth:`NeighborSampler.stats`, and totals of finished windows.

        ``windows``: their number. ``passes_s``: seconds that their threads waited for lists. ``list_bytes``: bytes read in passes
        over lists. ``drawn_reads``: ids read alone. ``spilled_bytes``: bytes in run files.
        """
        windows = list(self._windows)
        names = ("passes_s", "list_bytes", "drawn_reads", "spilled_bytes")
        sums = {name: sum(each[k] for each in windows) for k, name in enumerate(names)}
        return {**self.hops.stats(), "windows": len(windows), **sums}

    def count(self, window: EpochWindow) -> None:
        """Add a finished window to the totals."""
        self._windows.append((window.passes_s, window.list_bytes, window.drawn_reads, window.spilled_bytes))

    def coming(self, seeds_of: Callable[[int], Seeds]) -> Coming:
        """Make the drawer of the next epoch's first window; ``seeds_of(epoch)`` returns its batches' seeds."""
        return Coming(seeds_of)

    def windowed(
        self,
        seeds: Seeds | Callable[[int], Any],
        epoch: int,
        start: int,
        stop: int,
        memory: Reservation | None = None,
        coming: Coming | None = None,
    ) -> WindowedBatches:
        """Draw the batches ``start … stop - 1`` of an epoch in windows, for a caller that takes them roughly in order.

        ``seeds(index)`` returns a batch's seeds: pure, thread-safe. The windows use ``memory``; without it they reserve a part of
        the free memory. ``coming`` draws the next epoch's first window, in half of that memory; ``stop`` is then the epoch's end.
        """
        return WindowedBatches(self, seeds if isinstance(seeds, Seeds) else Seeds(seeds), epoch, start, stop, memory, coming)

    def memory_bytes(self, n_batches: int, n_seeds: int) -> tuple[int, int]:
        """Return the least and the most useful memory, in bytes, to draw an epoch of so many batches and seeds a batch."""
        n = n_batches if isinstance(self.window, str) else min(self.window, n_batches)
        width = 8 if is_wide(self.graph) else 4
        targets, edges = self.expected(n_seeds)
        drawn = drawn_bytes(edges, targets, width, has_places(self.hops))
        fanouts = self.hops.list_fanouts
        useful = useful_bytes(self.graph, fanouts, n, drawn, targets, self.threads)
        return least_bytes(self.graph, fanouts, 1 if isinstance(self.window, str) else n, width == 8), useful

    def windows(self, n_batches: int, n_seeds: int, n_bytes: int, batch: tuple[int, int]) -> Windows | None:
        """Cut an epoch into windows within ``n_bytes`` of memory; None if the user set ``window``, or there are no batches.

        ``batch``: nodes and edges of a sampled batch.
        """
        if not isinstance(self.window, str) or not n_batches:
            return None
        return Cut(self, n_batches, n_seeds, batch).windows(n_bytes, disk_of(self))

    def expected(self, n_seeds: int) -> tuple[int, int]:
        """Estimate the lists of a batch that are drawn from, and the edges drawn: the maximum, by mean degree for whole lists.

        In a graph of several types: for seeds of one of them, the maximum over all. With ``draws="labor"`` the number of
        neighbours that a node takes is random: this is the maximum of its mean.
        """
        types = self.graph.types
        drawn = [(types.edges[key], fanouts) for key, fanouts in self.hops.drawn_of_types.items()]
        most_lists = most_edges = 0
        for of_seeds in types.nodes:
            n = {name: min(n_seeds, kind.n) if name == of_seeds else 0 for name, kind in types.nodes.items()}
            lists = edges = 0
            for hop in range(len(self.fanouts)):
                lists, found = sum(n[kind.dst.name] for kind, fanouts in drawn if any(fanouts)), dict.fromkeys(n, 0)
                for kind, fanouts in drawn:
                    each = kind.n_edges // max(1, kind.n_lists) + 1 if fanouts[hop] < 0 else fanouts[hop]
                    most = n[kind.dst.name] * each
                    most = most if self.hops.replace else min(most, kind.n_edges)  # a node's list is taken once
                    found[kind.src.name] += most
                edges += sum(found.values())
                n = {name: min(kind.n, n[name] + found[name]) for name, kind in types.nodes.items()}
            most_lists, most_edges = max(most_lists, lists), max(most_edges, edges)
        return most_lists, most_edges
