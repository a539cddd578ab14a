"""Neighbour lists that a loader keeps in memory by itself, and estimates of an epoch with fewer of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from featstore.config import format_size
from featstore.errors import BudgetError
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.cost import random_read_s
from featstore.graph.dataset import OutOfCoreGraph
from featstore.pack.sampledlists import table_bytes, worth_keeping
from featstore.sampling.epochwide import EpochSampler
from featstore.sampling.hops import HopSampler
from featstore.sampling.sampledbatches import Drawn
from featstore.storage.drive import DriveSpeed
from featstore.strategies.caches import room_for_caches
from featstore.strategies.context import Context
from featstore.strategies.memory import FRACTIONS, SAMPLED_AHEAD, Memory, ask

__all__ = ["ALL_IN_MEMORY", "AS_THEY_ARE", "EXPECTED", "Lists", "keep_lists", "may_keep_lists", "with_lists"]

ALL_IN_MEMORY = "all in memory"
SHARES = (3 / 4, 1 / 2, 1 / 4)  # of all lists: sizes for which an epoch is estimated, if lists take much of the caches' memory
EXPECTED = 10  # epochs to come, unless they are given
FEW = 1 / 8  # lists that take at most this part of the caches' memory are kept without estimates


@dataclass(frozen=True)
class Lists:
    """Neighbour lists that are in memory now, on loan.

    Parameters
    ----------
    text : str
        How many lists are in memory, or why none are.
    whole : int
        Bytes of all lists.
    held : int
        Bytes in memory.
    table : int
        Bytes of the table of the lists' offsets, which is a part of ``held`` unless all lists are in memory.
    are_few : bool
        The lists take so little memory that no epoch is estimated with fewer.
    """

    text: str
    whole: int = 0
    held: int = 0
    table: int = 0
    are_few: bool = True

    def fewer(self, context: Context) -> list[int]:
        """List the smaller sizes, in bytes, with which an epoch is estimated; empty for few lists."""
        if self.are_few:
            return []
        sizes = [0]
        if not _in_sequence(context):
            sizes += [self.table + int(share * self.whole) for share in SHARES]
        return [n_bytes for n_bytes in sizes if n_bytes < self.held]

    def drawn(self, context: Context) -> Context:
        """Make a context that draws batches one by one if all lists are in memory, and has the text on the lists.

        Drawing many at once would compute twice as much then, and save no read.
        """
        graph, batches, text = context.graph, context.batches, self.text
        if isinstance(graph, OutOfCoreGraph) and isinstance(batches, Drawn):
            cache = graph.neighbor_cache
            if cache is not None and cache.whole:  # also one of the user's
                batches, text = batches.alone(), ALL_IN_MEMORY
        return replace(context, batches=batches, lists=text)

    def at_once(self, context: Context, run_dir: str | None) -> Context | None:
        """Make a context whose batches are drawn many at once, in passes over the lists; None if they cannot be drawn so.

        The lists then take no memory. ``run_dir``: see :meth:`Drawn.at_once`.
        """
        batches = context.batches
        if not self.whole or (self.held and self.are_few) or not isinstance(batches, Drawn):
            return None
        drawn = batches.at_once(run_dir)
        return None if drawn is None else replace(context, batches=drawn)

    def more_read_s(self, n_bytes: int, context: Context, instead: Context, batch: BatchSize, speed: DriveSpeed) -> float:
        """Estimate the additional seconds of reading lists for one batch of ``instead``, with ``n_bytes`` of lists in memory."""
        return self._read_s(n_bytes, instead, batch, speed) - self._read_s(self.held, context, batch, speed)

    def sample_read_s(self, context: Context, batch: BatchSize, speed: DriveSpeed) -> float:
        """Estimate the seconds for which sampling one batch keeps the drive busy with random reads."""
        return 0.0 if _in_sequence(context) or not self.whole else self._read_s(self.held, context, batch, speed)

    def _read_s(self, n_bytes: int, context: Context, batch: BatchSize, speed: DriveSpeed) -> float:
        """Estimate the seconds of reading lists for one batch, with ``n_bytes`` of lists in memory."""
        if not _in_sequence(context):
            return self._random_read_s(n_bytes, context.graph.topology.num_lists, batch, speed)
        if n_bytes:
            return 0.0
        windows = context.batches.windows(int(FRACTIONS[SAMPLED_AHEAD] * context.budget.total), (batch.n_rows, batch.n_edges))
        passes = len(context.batches.fanouts or [-1]) * (1 if windows is None else windows.n)
        return passes * self.whole / speed.bandwidth / max(1, len(context.batches))

    def _random_read_s(self, n_bytes: int, n_nodes: int, batch: BatchSize, speed: DriveSpeed) -> float:
        """Estimate the seconds of random reads of lists for one batch, with ``n_bytes`` of lists in memory.

        The lists in memory are the most requested ones: if a half is missing, a quarter of the requests miss. Lists are taken
        to be read as rows of their mean length.
        """
        missing = 1 - self._part(n_bytes)
        return random_read_s(round(missing**2 * lists_of(batch)), 1, n_nodes, max(1, self.whole // max(1, n_nodes)), speed)

    def _part(self, n_bytes: int) -> float:
        return 1.0 if n_bytes >= self.whole > 0 else max(0, n_bytes - self.table) / max(1, self.whole)

    def resized(self, n_bytes: int, context: Context) -> Lists:
        """Keep ``n_bytes`` of lists in memory instead, on loan; none if there is no memory."""
        graph, numbered = _drawn_from(context)
        try:
            with context.timer.time("cache"):
                graph.cache_neighbors(n_bytes, edges=numbered)
        except BudgetError as error:  # other holders took the memory first
            return Lists(f"on the drive: {error.reason}", self.whole)
        graph.neighbor_lists.lend()
        text = f"{format_size(n_bytes)} of {format_size(self.whole)} in memory"
        if n_bytes >= self.whole:
            text = ALL_IN_MEMORY
        elif not n_bytes and _in_sequence(context):
            text = "on the drive, read in sequence: rows and plans use the memory better"
        elif not n_bytes:
            text = "on the drive: rows and plans use the memory better"
        return Lists(text, self.whole, n_bytes, self.table, self.are_few)


AS_THEY_ARE = Lists("as the graph has them")


def keep_lists(context: Context, caches: int, epochs: int, *, estimated: bool = True) -> Lists:
    """Keep neighbour lists in memory, on loan, for batches that are drawn from lists.

    All lists are kept if they fit beside the batches, else those that the default policy scores highest. Lists that are read in
    sequence are kept all or not at all. None are kept if sampling would read less than their bytes.

    Parameters
    ----------
    context : Context
        Its ``batch`` is known.
    caches : int
        Bytes of the caches of features whose size was given.
    epochs : int
        Epochs to come.
    estimated : bool
        An epoch is estimated with fewer lists, too. If not, lists that are read in sequence are kept only if they are few.
    """
    graph, numbered = _drawn_from(context)
    memory = Memory(context, plans=True)  # the strategy is not chosen yet: one with plans takes more memory
    room = max(0, memory.left_for_caches(room_for_caches(context)[0], context.prefetch)[0] - caches)
    whole, n_lists = graph.neighbor_lists.most_bytes(numbered), epochs * len(context.batches) * lists_of(memory.batch)
    n_bytes, why = worth_keeping(whole, table_bytes(graph.topology), room, n_lists, in_sequence=_in_sequence(context))
    are_few = n_bytes <= FEW * room
    if not (why or estimated or are_few) and _in_sequence(context):
        why = f"on the drive, read in sequence: they would take {format_size(n_bytes)} of {format_size(room)}"
    if why:
        return Lists(why, whole)
    return Lists("", whole, 0, table_bytes(graph.topology), are_few).resized(n_bytes, context)


def with_lists(context: Context, caches: int) -> Context:
    """Keep neighbour lists in memory as :func:`keep_lists` does, for a strategy that no other one chose; return the context."""
    if context.lists is not None:
        return context
    if not may_keep_lists(context):
        return AS_THEY_ARE.drawn(context)
    try:
        measured, memory = ask(context, caches=caches)
    except BudgetError:  # the strategy asks again, and its error counts all that it needs
        return context
    if not memory.suffices:
        return measured
    return keep_lists(measured, caches, EXPECTED, estimated=False).drawn(measured)


def may_keep_lists(context: Context) -> bool:
    """Return whether batches are drawn from lists that the graph does not keep in memory, without a history.

    Lists that a running ``sample_offline`` keeps stay in memory from now on, as the choice builds on them.
    """
    graph, batches = context.graph, context.batches
    if not isinstance(graph, OutOfCoreGraph) or graph.neighbor_lists.adopt() or context.has_history:
        return False
    return isinstance(batches, Drawn) and isinstance(batches.sampler, (HopSampler, EpochSampler))


def _drawn_from(context: Context) -> tuple[OutOfCoreGraph, bool]:
    """Return the graph whose lists batches are drawn from, and whether the sampler numbers edges.

    Called only if :func:`may_keep_lists` is true.
    """
    graph, batches = context.graph, context.batches
    assert isinstance(graph, OutOfCoreGraph)
    assert isinstance(batches, Drawn)
    assert isinstance(batches.sampler, (HopSampler, EpochSampler))
    return graph, batches.sampler.edges


def lists_of(batch: BatchSize) -> int:
    """Count the lists that a batch is drawn from: in each hop, those of its targets."""
    return max(0, batch.n_stored - batch.n_edges)


def _in_sequence(context: Context) -> bool:
    """Return whether lists that are not in memory are read in sequential passes."""
    batches = context.batches
    return batches.lists is not None or (isinstance(batches, Drawn) and isinstance(batches.sampler, EpochSampler))
