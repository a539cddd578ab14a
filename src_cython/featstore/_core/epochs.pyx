"""Epoch-wide sampling: logs of many batches, draws list by list, a batch's hops from its logs.

The kernels are in kernels/epochs.c.
"""

from libc.stdint cimport INT32_MAX, INT64_MAX, UINT32_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

cimport cython

from featstore._core.ids cimport Ids
from featstore._core.sampler cimport Hops, fs_draw_lanes_fn


cdef enum:
    LANE_DRAWS = 64

cdef extern from "kernels/epochs.h" nogil:
    ctypedef struct fs_logs:
        char *arena
        int32_t *next
        int32_t *first
        int32_t *last
        int32_t *fill
        int64_t *length
        int64_t n_logs
        int64_t n_blocks
        int64_t block_words
        int64_t n_free
        int wide
    ctypedef struct fs_numbers:
        pass
    ctypedef int64_t (*fs_take_fn)(const void *, int, int64_t, const fs_numbers *, uint32_t, void *) noexcept
    ctypedef int64_t (*fs_take_places_fn)(const void *, int, int64_t, const fs_numbers *, uint32_t, void *, int64_t,
                                          int64_t *) noexcept
    ctypedef struct fs_pass:
        fs_logs *logs
        const uint64_t *keys
        fs_take_fn take
        fs_take_places_fn take_places
        int numbered
        const int64_t *fanouts
        int64_t n_hops
        int64_t n_batches
        int replace
        const int64_t *nodes
        const int64_t *starts
        const uint32_t *batch
        const uint32_t *place
        int64_t first
        int64_t end
        const int64_t *at
        const int64_t *degree
        const void *ids
        int wide
        int64_t n_ids
        int64_t *positions
        int64_t *holes
        int64_t n_positions
        int64_t most_positions
        int64_t *drawn
        int64_t *scratch
        int64_t hop
        int64_t node
        int64_t target
        int64_t done
    enum:
        FS_TARGET_WORDS
        FS_LEAST_BLOCK
        FS_LANES
        FS_ELSEWHERE
        FS_LEAST_BLOCKS
        FS_KEY_WORDS
    void fs_make_kept() noexcept
    fs_take_fn fs_choose_take(int) noexcept
    fs_take_places_fn fs_choose_take_places(int) noexcept
    fs_draw_lanes_fn fs_choose_draw_lanes(int) noexcept
    int64_t fs_draw_scratch(int64_t) noexcept
    void fs_logs_clear(fs_logs *) noexcept
    void fs_log_copy(const fs_logs *, int64_t, char *) noexcept
    int64_t fs_scatter(fs_logs *, const int64_t *, int64_t, int64_t, int64_t, int64_t, int) noexcept
    int fs_sort_targets(const void *, int, int64_t, int64_t, int64_t, int64_t *, uint32_t *, uint32_t *) noexcept
    int64_t fs_distinct(const int64_t *, int64_t, int64_t, int64_t *, int64_t *) noexcept
    int64_t fs_sort_few(const void *, int, int64_t, int64_t, int64_t, uint32_t *, uint32_t *, int64_t *, int64_t *) noexcept
    int fs_draw_lists(fs_pass *, fs_draw_lanes_fn) noexcept
    void fs_fill_holes(fs_pass *, const void *, int) noexcept
    int64_t fs_count_drawn(const void *, int, int, int64_t, int64_t, int64_t *) noexcept
    int fs_are_counted(const int64_t *, int64_t, int64_t, int64_t *) noexcept
    void fs_order_drawn(const void *, int, int, int64_t, const int64_t *, const int64_t *, int64_t, int64_t *, int64_t *,
                        int64_t *, const int64_t *, int64_t *) noexcept


TARGET_WORDS = FS_TARGET_WORDS
LEAST_BLOCK_WORDS = FS_LEAST_BLOCK
LEAST_BLOCKS = FS_LEAST_BLOCKS
LOG_BYTES = 20  # of a log's entries, beside the arena
BLOCK_BYTES = 4  # of a block's
LEAST_POSITIONS = 2 * FS_LANES * LANE_DRAWS  # of ids to be read, which are listed at once

fs_make_kept()


@cython.final
cdef class Logs:
    """Lists of words that grow side by side, in blocks of one arena. One owner thread.

    Parameters
    ----------
    n_logs : int
    arena : writable buffer of bytes
    block_words : int
        At least ``LEAST_BLOCK_WORDS``; the arena has ``LEAST_BLOCKS`` of them or more.
    wide : bool
        Words are int64, not int32.
    """

    cdef fs_logs logs
    cdef char[::1] view

    def __cinit__(self, int64_t n_logs, char[::1] arena not None, int64_t block_words, bint wide):
        cdef int64_t n_blocks = (
            arena.shape[0] // (block_words * (8 if wide else 4)) if 0 < block_words <= INT32_MAX else 0
        )
        if n_logs < 1 or block_words < FS_LEAST_BLOCK or not LEAST_BLOCKS <= n_blocks <= INT32_MAX:
            raise ValueError(f"{n_logs} logs cannot lie in {n_blocks} blocks of {block_words} words")
        self.view = arena
        self.logs.arena = &arena[0]
        self.logs.n_logs, self.logs.n_blocks, self.logs.block_words, self.logs.wide = n_logs, n_blocks, block_words, wide
        self.logs.next = <int32_t *>calloc(n_blocks, sizeof(int32_t))
        self.logs.first = <int32_t *>calloc(3 * n_logs, sizeof(int32_t))
        self.logs.length = <int64_t *>calloc(n_logs, sizeof(int64_t))
        if self.logs.next == NULL or self.logs.first == NULL or self.logs.length == NULL:
            raise MemoryError
        self.logs.last, self.logs.fill = self.logs.first + n_logs, self.logs.first + 2 * n_logs
        fs_logs_clear(&self.logs)

    def __dealloc__(self):
        free(self.logs.next)
        free(self.logs.first)
        free(self.logs.length)

    @property
    def is_empty(self):
        """Whether no log has a word."""
        return self.logs.n_free == self.logs.n_blocks

    def clear(self):
        """Empty all logs."""
        with nogil:
            fs_logs_clear(&self.logs)

    def length(self, int64_t log):
        """Return the words of a log."""
        self.check(log)
        return self.logs.length[log]

    def copy(self, int64_t log, char[::1] out not None):
        """Copy a log's words into ``out``, bytes of just its length."""
        cdef int64_t n_bytes
        self.check(log)
        n_bytes = self.logs.length[log] * (8 if self.logs.wide else 4)
        if out.shape[0] != n_bytes:
            raise ValueError(f"the log has {n_bytes} bytes, out {out.shape[0]}")
        if n_bytes:
            with nogil:
                fs_log_copy(&self.logs, log, &out[0])

    def scatter(self, const int64_t[::1] lists not None, int64_t first, int64_t end, int64_t batch, int shift, int64_t place=0):
        """Enter ``lists[first:end]``, at places ``place + first …`` of ``batch``, as targets, each into log ``list >> shift``.

        Returns
        -------
        int
            The first position that there was no room for, or ``end``.
        """
        cdef int64_t i
        cdef uint64_t last = 0
        if (not 0 <= first <= end <= lists.shape[0] or not 0 <= batch < INT32_MAX or not 0 <= shift < 63
                or not 0 <= place <= INT32_MAX - end):
            raise ValueError("impossible targets")
        with nogil:
            for i in range(first, end):
                last = max(last, (<uint64_t>lists[i]) >> shift)
        if last >= <uint64_t>self.logs.n_logs:
            raise ValueError("a list has no log")
        if first == end:
            return end
        with nogil:
            first = fs_scatter(&self.logs, &lists[0], first, end, batch, place, shift)
        return first

    cdef int check(self, int64_t log) except -1:
        if not 0 <= log < self.logs.n_logs:
            raise IndexError(f"log {log} of {self.logs.n_logs}")
        return 0


def sort_targets(records, bint wide, int64_t base, int64_t n_range, int64_t[::1] ends not None, uint32_t[::1] batch not None,
                 uint32_t[::1] place not None, int64_t[::1] nodes not None, int64_t[::1] starts not None):
    """Order targets by node.

    Parameters
    ----------
    records : buffer of int32 or int64 words
        Of ``n`` targets, their nodes in ``[base, base + n_range)``.
    wide : bool
    base, n_range : int
        A range that ``ends`` does not cover has fewer than 2³¹ nodes.
    ends : int64 array
        Scratch, an entry more than a range has nodes whose targets are counted.
    batch, place : uint32 array, shape (n,)
        Output, by node.
    nodes, starts : int64 array
        Output: the nodes that have targets, ascending, and where those begin; room for one more than there can be.

    Returns
    -------
    int
        How many nodes have targets.
    """
    cdef Ids words = Ids(records, 8 if wide else 4)
    cdef int64_t n = words.n // FS_TARGET_WORDS, found = 0, room = min(nodes.shape[0], starts.shape[0])
    # Comparing takes less time than passes over a range of many more nodes.
    cdef bint good, few = n_range >= ends.shape[0] or (n < n_range // 64 and n_range <= INT32_MAX)
    if (n_range < 1 or batch.shape[0] < n or place.shape[0] < n or room <= (n if few else min(n, n_range))
            or (few and n_range > INT32_MAX)):
        raise ValueError("no room for the targets")
    if n == 0:
        return 0
    with nogil:
        if few:
            found = fs_sort_few(words.data, wide, n, base, n_range, &batch[0], &place[0], &nodes[0], &starts[0])
            good = found >= 0
        else:
            good = fs_sort_targets(words.data, wide, n, base, n_range, &ends[0], &batch[0], &place[0])
            if good:
                found = fs_distinct(&ends[0], n_range, base, &nodes[0], &starts[0])
    if not good:
        raise ValueError("a target lies outside its range of nodes")
    return found


@cython.final
cdef class Draws:
    """Targets, by list, of one type of edges, that draw from lists as those come by. One owner thread.

    Parameters
    ----------
    logs : Logs
        Gets what target after target draws in a hop, in log ``hop * n_batches + batch``.
    keys : uint64 array, shape (hops * n_batches, 1 or 4)
        Of each hop of each batch: the key of its draws; or, for layer-neighbour sampling, what
        :class:`~featstore._core.labor.Layer` takes: ``early, late, phase, turn``.
    fanouts : int64 array, shape (hops,)
    hops : tuple (first, end)
        Hops in which these targets draw.
    replace : bool
    n_batches : int
    nodes, starts, batch, place : arrays
        As :func:`sort_targets` left them; or of the first two a part: some of the lists, and where their targets begin and end.
    level : int
        Widest vector form to use, see :class:`~featstore._core.sampler.Hops`.
    numbered : bool
        Log the place of each neighbour in its list, too, a word more; for layer-neighbour sampling.
    """

    cdef fs_pass pass_
    cdef fs_draw_lanes_fn draw_lanes
    cdef int64_t first_hop, n_nodes
    cdef tuple views, held

    def __cinit__(self, Logs logs not None, const uint64_t[:, ::1] keys not None, const int64_t[::1] fanouts not None, tuple hops,
                  bint replace, int64_t n_batches, const int64_t[::1] nodes not None, const int64_t[::1] starts not None,
                  const uint32_t[::1] batch not None, const uint32_t[::1] place not None, int level=2, bint numbered=False):
        cdef int64_t n = nodes.shape[0], first_target, n_targets, i
        cdef uint32_t most = 0
        self.first_hop, self.pass_.n_hops = hops
        if not 0 <= self.first_hop < self.pass_.n_hops <= fanouts.shape[0]:
            raise ValueError("no such hops")
        if keys.shape[0] != fanouts.shape[0] * n_batches or logs.logs.n_logs < keys.shape[0] or starts.shape[0] != n + 1 or n < 1:
            raise ValueError("arrays of lengths that disagree")
        first_target, n_targets = starts[0], starts[n]
        if first_target < 0 or batch.shape[0] < n_targets or place.shape[0] < n_targets:
            raise ValueError("arrays of lengths that disagree")
        with nogil:
            for i in range(first_target, n_targets):
                most = max(most, batch[i])
        if n_targets > 0 and most >= n_batches:
            raise ValueError(f"a target of batch {most} of {n_batches}")
        self.views = (logs, keys, fanouts, nodes, starts, batch, place)
        self.pass_.logs = &logs.logs
        self.pass_.keys, self.pass_.fanouts = &keys[0, 0], &fanouts[0]
        if keys.shape[1] == FS_KEY_WORDS:
            self.pass_.take, self.pass_.take_places = fs_choose_take(level), fs_choose_take_places(level)
        elif keys.shape[1] != 1:
            raise ValueError(f"keys of {keys.shape[1]} words")
        elif numbered:
            raise ValueError("draws by key are drawn again for their numbers: their logs hold none")
        self.pass_.numbered = numbered
        self.pass_.replace, self.pass_.n_batches = replace, n_batches
        self.pass_.nodes, self.pass_.starts = &nodes[0], &starts[0]
        self.n_nodes = n
        if n_targets:
            self.pass_.batch, self.pass_.place = &batch[0], &place[0]
        self.draw_lanes = fs_choose_draw_lanes(level)

    @staticmethod
    def scratch(fanouts):
        """Return how many int64 words :meth:`begin` needs for these fan-outs; -1, which takes whole lists, needs none."""
        cdef int64_t fanout, most = 0
        for fanout in fanouts:
            if fanout > LANE_DRAWS:
                most = max(most, fanout + fs_draw_scratch(fanout))
        return most

    def begin(self, int64_t first, int64_t end, const int64_t[::1] at not None, const int64_t[::1] degree not None, ids,
              int id_bytes, int64_t[::1] scratch not None):
        """Take the lists of nodes number ``first … end - 1``, or the parts of them that are in ``ids``.

        Parameters
        ----------
        first, end : int
        at, degree : int64 array, shape (end - first,)
            Where in ``ids`` each list begins, perhaps before it, and its length.
        ids : buffer of int32 or int64
            Checked.
        id_bytes : int
        scratch : int64 array, shape (Draws.scratch(fanouts),)

        Raises
        ------
        OverflowError
            Places in a list are logged, and one is too long for words of 32 bits: more than 2**32 neighbours.
        """
        cdef Ids listed
        cdef int64_t i, longest = 0
        self.check_ids(id_bytes)
        if self.pass_.numbered and not self.pass_.logs.wide:
            with nogil:
                for i in range(degree.shape[0]):
                    longest = max(longest, degree[i])
            if longest > <int64_t>UINT32_MAX + 1:
                raise OverflowError(
                    f"a list of {longest} neighbours is too long for the logs of a graph of less than 2**31 nodes: "
                    "LaborSampler(edges=True) draws the same batches one by one")
        listed = Ids(ids, id_bytes)
        self.take(first, end, at, degree, scratch)
        self.pass_.ids, self.pass_.n_ids, self.pass_.wide = listed.data, listed.n, listed.wide
        self.held = (at, degree, listed, scratch)

    def begin_elsewhere(self, int64_t first, int64_t end, const int64_t[::1] at not None, const int64_t[::1] degree not None,
                        int64_t[::1] positions not None, int64_t[::1] holes not None, int64_t[::1] scratch not None):
        """Take lists that are not in memory: what is drawn of them is listed, to be read and handed to :meth:`fill`.

        Parameters
        ----------
        first, end, degree, scratch :
            As for :meth:`begin`.
        at : int64 array, shape (end - first,)
            The edge with which each list begins.
        positions : int64 array, shape (n,)
            Gets the edges that were drawn, :attr:`n_drawn` of them; ``LEAST_POSITIONS`` at least.
        holes : int64 array, shape (n,)
            Scratch, until the lists are done.
        """
        cdef int64_t i, least = 0
        if positions.shape[0] < LEAST_POSITIONS or holes.shape[0] != positions.shape[0]:
            raise ValueError("no room for positions")
        if self.pass_.take != NULL:
            raise ValueError("layer-neighbour sampling goes through lists: they must be in memory")
        with nogil:
            for i in range(at.shape[0]):
                least = min(least, at[i])
        if least < 0:
            raise ValueError("a list begins before the first edge")
        self.pass_.ids, self.pass_.n_ids, self.pass_.wide = NULL, INT64_MAX, FS_ELSEWHERE
        self.take(first, end, at, degree, scratch)
        self.pass_.positions, self.pass_.holes = &positions[0], &holes[0]
        self.pass_.n_positions, self.pass_.most_positions = 0, positions.shape[0]
        self.held = (at, degree, positions, holes, scratch)

    @property
    def is_full(self):
        """Whether the logs have no room for more."""
        return self.pass_.logs.n_free <= FS_LANES

    @property
    def n_drawn(self):
        """Edges that were drawn elsewhere and wait for :meth:`fill`."""
        return self.pass_.n_positions if self.pass_.wide == FS_ELSEWHERE else 0

    def fill(self, found, int id_bytes):
        """Log the ids of the edges that were drawn elsewhere; ``found`` holds them in that order, checked."""
        cdef Ids ids
        self.check_ids(id_bytes)
        ids = Ids(found, id_bytes)
        if self.pass_.wide != FS_ELSEWHERE or ids.n != self.pass_.n_positions:
            raise ValueError(f"{self.n_drawn} ids were drawn elsewhere")
        with nogil:
            fs_fill_holes(&self.pass_, ids.data, ids.wide)

    cdef int check_ids(self, int id_bytes) except -1:
        if id_bytes not in (4, 8) or (id_bytes == 8 and not self.pass_.logs.wide):
            raise ValueError("ids that the logs' words cannot hold")
        return 0

    cdef int take(self, int64_t first, int64_t end, const int64_t[::1] at, const int64_t[::1] degree,
                  int64_t[::1] scratch) except -1:
        cdef int64_t hop, k, most = 0
        if not 0 <= first <= end <= self.n_nodes or at.shape[0] != end - first or degree.shape[0] != end - first:
            raise ValueError("no such nodes")
        for hop in range(self.first_hop, self.pass_.n_hops):
            k = self.pass_.fanouts[hop]
            if k > LANE_DRAWS:
                most = max(most, k + fs_draw_scratch(k))
        if scratch.shape[0] < most:
            raise ValueError(f"scratch has room for {scratch.shape[0]}, not for {most}")
        self.pass_.first, self.pass_.end = first, end
        if end > first:
            self.pass_.at, self.pass_.degree = &at[0], &degree[0]
        if most:  # draws of the largest fan-out, then what drawing needs
            k = max([self.pass_.fanouts[hop] for hop in range(self.first_hop, self.pass_.n_hops)])
            self.pass_.drawn, self.pass_.scratch = &scratch[0], &scratch[k]
        self.pass_.hop, self.pass_.node, self.pass_.target, self.pass_.done = self.first_hop, first, 0, 0
        return 0

    def go_on(self):
        """Draw; return True when all is done, False where there is no room: empty the logs, and call again.

        Where ids were drawn elsewhere (:attr:`n_drawn`), they must be filled in first, and :attr:`is_full` says whether it is the
        logs that are to be emptied.
        """
        cdef int full
        if self.held is None:
            raise ValueError("no lists are there")
        if self.n_drawn:
            raise ValueError("ids that were drawn are missing")
        with nogil:
            full = fs_draw_lists(&self.pass_, self.draw_lanes)
        if not full:
            self.held = None
        return not full


def replay(Hops hops not None, records, bint wide, int64_t n_dst, counts, array, bint numbered=False, starts=None, places=None,
           owners=None):
    """Begin a hop over a batch's first ``n_dst`` nodes, or lists, with what they have drawn; ``hops.number()`` goes on.

    Parameters
    ----------
    hops : Hops
    records : buffer of int32 or int64 words
        The hop's log of the batch.
    wide : bool
    n_dst : int
    counts : int64 array, shape (n_dst,)
        Output: the edges of each node or list end before this one.
    array : callable
        ``array(n)`` returns the int64 arrays of the hop's ``n`` edges: ``(src, dst)``; with ``starts`` ``(src, dst, edge_pos)``.
    numbered : bool
        The log is of ``numbered`` draws.
    starts : int64 array, shape (at least n_dst,), optional
        The first edge of each destination's list: edges are numbered then, if the log is.
    places, owners : int64 array, shape (n,), optional
        The lists that have drawn, distinct, in the order in which their edges are wanted, and the nodes whose lists they are. By
        default each node has one list, and its number.

    Raises
    ------
    ValueError
        The log is damaged, or the lists in ``places`` are not those that have drawn.
    """
    cdef Ids words
    cdef int64_t n_edges = 0, n_lists = n_dst, i
    cdef const int64_t[::1] order = places, nodes = owners
    cdef const int64_t *order_at = NULL
    cdef const int64_t *nodes_at = NULL
    cdef bint is_good = True
    cdef int64_t[::1] counted = counts
    cdef int64_t[::1] src, dst, edge_pos
    cdef const int64_t[::1] first = starts
    cdef const int64_t *firsts = NULL
    cdef int64_t *numbers = NULL
    cdef int each = 2 if numbered else 1
    if first is not None and (not numbered or first.shape[0] < n_dst):
        raise ValueError("edges are numbered by a log of their places, and by where the lists of all destinations begin")
    if n_dst < 0 or (order is None and n_dst > hops.hop.n_nodes) or counted.shape[0] < n_dst:
        raise ValueError("more destinations than nodes")
    if order is not None:
        n_lists = order.shape[0]
        if nodes is None or nodes.shape[0] != n_lists:
            raise ValueError("each list belongs to a node")
        if n_lists:
            order_at, nodes_at = &order[0], &nodes[0]
        with nogil:
            for i in range(n_lists):
                is_good &= 0 <= order[i] < n_dst and 0 <= nodes[i] < hops.hop.n_nodes
        if not is_good:
            raise ValueError("a list or a node is out of range")
    words = Ids(records, 8 if wide else 4)
    if n_dst:
        with nogil:
            n_edges = fs_count_drawn(words.data, wide, each, words.n, n_dst, &counted[0])
            if order is not None and n_edges >= 0:
                is_good = fs_are_counted(order_at, n_lists, n_edges, &counted[0])
    if n_edges < 0 or (words.n and not n_dst) or not is_good:
        raise ValueError("the log of a hop is damaged")
    if first is None:
        src, dst = array(n_edges)
    else:
        src, dst, edge_pos = array(n_edges)
        if edge_pos.shape[0] != n_edges:
            raise ValueError(f"the hop has {n_edges} edges")
        if n_edges:
            firsts, numbers = &first[0], &edge_pos[0]
    if src.shape[0] != n_edges or dst.shape[0] != n_edges:
        raise ValueError(f"the hop has {n_edges} edges")
    hops._end_hop()
    if n_edges:
        with nogil:
            fs_order_drawn(words.data, wide, each, words.n, order_at, nodes_at, n_lists, &counted[0], &src[0], &dst[0], firsts,
                           numbers)
    hops.hop.n_dst, hops.hop.n_edges, hops.hop.n_missing = n_lists, n_edges, 0
    hops.hop.numbered = 0
    hops.hop.drawn = hops.hop.gathered = n_edges
    hops.src_view, hops.dst_view = src, dst
    hops.hop.src = &src[0] if n_edges else NULL
    hops.hop.dst = &dst[0] if n_edges else NULL
    hops.in_hop = True
