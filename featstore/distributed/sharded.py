"""Features whose rows lie on several machines: each rank gives the rows that its machine has, and reads them all."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping, Sequence
from numbers import Real
from types import TracebackType
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from featstore.budget import Reservation
from featstore.display import Stats
from featstore.distributed.exchange import Exchange, Sizes
from featstore.distributed.owners import Claim, Owners
from featstore.distributed.rows import ShardedRows
from featstore.gather.arrays import as_array
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.feature import FeatureStore
from featstore.ranks import Meeting, gloo_group

__all__ = ["Sharded"]

Int64s = npt.NDArray[np.int64]

ROOM: Final = 16  # the buffers take at most this part of the memory, if rows are not too wide
LEAST_TIMEOUT: Final = 1e-3  # gloo counts in milliseconds
MOST_TIMEOUT: Final = 10_000_000
_PIECE_IDS: Final = 1 << 17  # ids that ranks tell each other at once


class Sharded(FeatureStore):
    """A feature of a graph whose rows lie on several machines, as one :class:`~featstore.FeatureStore`.

    All ranks of torch's process group make it together. Each gives the rows that its machine has, and answers the questions of
    the others in threads of its own, until all have closed theirs. The feature is one of the graph's: loaders, caches and
    indexing use it as any other. Strategies that pack need the rows in one file, and refuse it by name.

    Parameters
    ----------
    g : OutOfCoreGraph
        The graph, of one type, whose nodes the rows belong to. It has no feature of this name. Its budget counts the buffers.
    name : str
        The feature's name in ``g.features``; the same on all ranks.
    rows : FeatureStore or None
        The rows of this machine, a feature of another open dataset, which is closed after this feature; all its rows count, so
        it is not one of a part. None: this machine has none.
    ids : range of step 1, or integer array, shape (len(rows),)
        Ids of these rows. Together the ranks have each id of the graph once. Ranks with the same file and the same ids, such as
        those of one machine, count as one, and read these rows themselves.
    timeout : float
        Seconds after which a rank is lost that answers nothing; also how long :meth:`close` waits for the other ranks. From
        0.001 to 10,000,000, about 116 days.

    Raises
    ------
    ValueError
        On all ranks: rows are missing or on two machines, the ranks' rows differ in dtype or shape, or their names do. On the
        rank: ``ids`` are not those of ``rows``, or the graph has a feature of this name.
    RuntimeError
        Another rank could not take part; the error names it, and its own.
    TypeError, NotImplementedError, BudgetError, ClosedError

    Notes
    -----
    Reading raises ConnectionError at once if the machine that has a row is lost, TimeoutError if it answers nothing for
    ``timeout`` seconds, and the error of that machine, such as CorruptionError, if it cannot read its rows. Each names the rank
    and its machine. After a machine is lost, only rows of this one can be read.

    Memory: up to a sixteenth of the graph's, and no more than 9 MiB and 2 MiB for each other rank if rows are narrower than 16
    KiB; and 4 bytes a node (8 from 2^31 nodes on) if a rank gives a list of ids. A question asks for 512 KiB of rows, and 16
    are under way at a time. Closing is collective: close it, or the graph, before the process group is destroyed.
    """

    def __init__(
        self, g: OutOfCoreGraph, name: str, rows: FeatureStore | None, ids: range | Any, *, timeout: float = 60.0
    ) -> None:
        with Meeting() as meeting:
            timeout = _check_timeout(timeout)
            claim, own_ids = _check(g, name, rows, ids)
            said = meeting.meet({**claim, "rank": meeting.rank, "host": socket.gethostname()})
            row_shape, dtype = _agreed(said)
            row_bytes = math.prod(row_shape) * dtype.itemsize
            owners = Owners([Claim(*map(each.get, ("rank", "host", "n", "first", "same"))) for each in said], g.num_nodes)
            held, group = g.budget.reserve(f"sharding {name!r}", 0), None
            try:
                sizes = self._hold(g, meeting, held, owners, row_bytes)
                if meeting.world_size > 1:
                    group = _connect(timeout)
                self._learn(owners, meeting, group, own_ids)
                exchange, local = None, None if rows is None else rows.source
                if group is not None:
                    hosts = [each["host"] for each in said]
                    exchange = Exchange(group, meeting.rank, hosts, local, sizes, timeout, f"the rows of {name!r}")
                source = ShardedRows(
                    name, owners, meeting.rank, local, exchange, sizes.piece_rows, row_bytes, _fingerprint(said), g.budget, held
                )
                super().__init__(name, source, (g.num_nodes, *row_shape), dtype, g.reader, g.pool, g.options.threads)
                meeting.end()
            except BaseException:
                held.release()
                if group is not None:
                    dist.destroy_process_group(group)
                raise
        self._graph, self._rows = g, source
        try:
            if exchange is not None:
                exchange.start()
            g.attach(self, source.leave)
        except BaseException as error:
            source.leave(error)
            raise

    @staticmethod
    def _hold(g: OutOfCoreGraph, meeting: Meeting, held: Reservation, owners: Owners, row_bytes: int) -> Sizes:
        """Hold the memory of buffers, which all ranks size alike, and of the numbers of rows."""
        n, n_ranks = g.num_nodes, meeting.world_size
        room = g.budget.total // ROOM if n_ranks > 1 else 0
        wanted = meeting.meet(Sizes.within(room, row_bytes, n_ranks, n))
        sizes = Sizes(row_bytes, min(piece for piece, _ in wanted), min(answers for _, answers in wanted), n)
        held.resize(owners.n_bytes + (sizes.bytes_of(n_ranks) if n_ranks > 1 else 0))
        meeting.meet()  # before other ranks wait for one that has no memory
        return sizes

    @staticmethod
    def _learn(owners: Owners, meeting: Meeting, group: Any, ids: range | Int64s) -> None:
        """Let all ranks know which ids each owner's rows have."""
        if not owners.is_listed:
            return
        for owner, (claim, *_) in enumerate(owners.claims):
            for done in range(0, claim.n, _PIECE_IDS):
                k = min(_PIECE_IDS, claim.n - done)
                if claim.first is not None:
                    part = np.arange(claim.first + done, claim.first + done + k)
                elif claim.rank == meeting.rank:
                    part = np.array(ids[done : done + k])
                else:
                    part = np.empty(k, np.int64)
                if group is not None and claim.first is None:
                    dist.broadcast(torch.from_numpy(part), claim.rank, group)
                owners.learn(owner, done, part)
        owners.check()

    def stats(self) -> Stats:
        """Report as :meth:`featstore.FeatureStore.stats` does, and ``remote``, the rows that came from other ranks.

        ``reads`` counts questions to other ranks, too, and ``bytes_read`` the bytes that came from them. ``remote`` has their
        ``rows``, ``bytes`` and ``questions``, ``wait_s``, the seconds that gathers waited for them, and ``answered_rows``, the
        rows that other ranks have got from this one.
        """
        remote = self._rows.remote
        counts = {"rows": remote.rows, "bytes": remote.bytes_read, "questions": remote.reads, "wait_s": remote.waited_s}
        found = super().stats()
        found["remote"] = {**counts, "answered_rows": self._rows.answered_rows}
        return found

    def close(self, *, keep_source: bool = False) -> None:
        """Wait until all ranks close the feature, and answer them meanwhile; then the graph has it no longer.

        Raises TimeoutError, which names the ranks that did not close it within ``timeout``; it is closed here all the same. May
        be called again. Ends without waiting in a forked process.
        """
        try:
            super().close(keep_source=keep_source)
        finally:
            self._graph.detach(self)

    def __enter__(self) -> Sharded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._rows.leave(error)
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"the sharded feature {self.name!r} belongs to its process, and is not pickled: make it in each rank")


def _check_timeout(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not LEAST_TIMEOUT <= (seconds := float(timeout)) <= MOST_TIMEOUT:
        raise ValueError(f"timeout must be a number of seconds from {LEAST_TIMEOUT:g} to {MOST_TIMEOUT:,}, not {timeout!r}")
    return seconds


def _connect(timeout: float) -> Any:
    """Make the group of the ranks; RuntimeError, which names ``timeout``, if they do not find each other within it."""
    try:
        return gloo_group(timeout)
    except RuntimeError as error:
        raise RuntimeError(f"no connection to all ranks, within timeout={timeout:g} s: {error}") from error


def _check(g: OutOfCoreGraph, name: str, rows: FeatureStore | None, ids: Any) -> tuple[dict[str, Any], range | Int64s]:
    """Check the arguments of one rank; return what it tells the others, and the ids of its rows."""
    if not isinstance(g, OutOfCoreGraph):
        raise TypeError(f"a sharded feature is one of an OutOfCoreGraph, not of a {type(g).__name__}")
    g.check_open()
    g.refuse_types("a sharded feature")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be the name of a feature, not {name!r}")
    g.check_new(name)
    if rows is not None and not isinstance(rows, FeatureStore):
        raise TypeError(f"rows must be a feature of an open dataset, or None, not a {type(rows).__name__}")
    if isinstance(rows, Sharded):
        raise ValueError("rows must be those of this machine, not a feature that is sharded already")
    if rows is not None and rows.own_part is not None:
        raise ValueError(
            f"rows are those of {rows.own_part}, which has not all rows of its feature: give a dataset of the share's rows alone"
        )
    found = _check_ids(ids, g.num_nodes)
    n = 0 if rows is None else len(rows)
    if len(found) != n:
        raise ValueError(f"{len(found)} ids are given for {n} rows: ids= has one for each of rows=")
    claim: dict[str, Any] = {"name": name, "num_nodes": g.num_nodes, "n": n, "first": None, "same": "", "kind": None}
    if rows is not None:
        rows.source.check_open()
        claim["kind"] = tuple(rows.shape[1:]), rows.dtype
        digest = ""
        if isinstance(found, range):
            claim["first"] = found.start
        else:
            digest = xxhash.xxh3_128_hexdigest(found.data)
        if rows.source.fingerprint:
            claim["same"] = f"{rows.source.fingerprint} {digest}"
    return claim, found


def _check_ids(ids: Any, n: int) -> range | Int64s:
    if isinstance(ids, range):
        if len(ids) and ids.step != 1:
            raise ValueError(f"ids must be a range of step 1, or an array, not {ids!r}")
        if len(ids) and not 0 <= ids[0] <= ids[-1] < n:
            raise ValueError(f"ids {ids!r} are out of range for the graph's {n} nodes")
        return ids
    array = as_array("ids", ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"ids must be a range, or a 1-D array of integers, not {array.dtype} of shape {array.shape}")
    if array.size and not 0 <= array.min() <= array.max() < n:
        raise ValueError(f"ids are from {array.min()} to {array.max()}, out of range for the graph's {n} nodes")
    return np.ascontiguousarray(array, np.int64)


def _agreed(said: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], torch.dtype]:
    """Check that the ranks mean the same feature; return the shape of a row, and the dtype. ValueError otherwise."""
    for what, text in (("name", "names"), ("num_nodes", "numbers of nodes")):
        found = {each[what]: each["rank"] for each in reversed(said)}
        if len(found) > 1:
            told = ", ".join(f"{value!r} on rank {rank}" for value, rank in sorted(found.items(), key=lambda item: item[1]))
            raise ValueError(f"ranks make a sharded feature together, but the {text} differ: {told}")
    kinds: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    for each in said:
        if each["kind"] is not None:
            kinds.setdefault(each["kind"], each["rank"])
    if not kinds:
        raise ValueError(f"no rank has rows of {said[0]['name']!r}: each gives those of its machine as rows=")
    if len(kinds) > 1:
        told = ", ".join(f"{_kind(*kind)} on rank {rank}" for kind, rank in kinds.items())
        raise ValueError(f"rows of {said[0]['name']!r} differ between ranks: {told}")
    (kind,) = kinds
    return kind


def _kind(row_shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(row_shape)}"


def _fingerprint(said: Sequence[Mapping[str, Any]]) -> str:
    """Identify the rows of all ranks; "" if those of one cannot be."""
    shares = sorted({(each["same"], each["first"] or 0, each["n"]) for each in said if each["n"]})
    if not all(same for same, *_ in shares):
        return ""
    return xxhash.xxh3_128_hexdigest(json.dumps(shares).encode())
