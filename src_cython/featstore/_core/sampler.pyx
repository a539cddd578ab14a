"""Neighbour sampling: draws, and the numbering of a batch's nodes. The kernels are in kernels/sampler.c."""

from libc.stdint cimport INT64_MAX, UINT32_MAX, int64_t, uint32_t, uint64_t

cimport cython

from featstore._core.ids cimport Ids, check_length, check_width


cdef extern from "kernels/sampler.h" nogil:
    uint64_t fs_absorb(uint64_t, uint64_t) noexcept
    int64_t fs_draw_scratch(int64_t) noexcept
    fs_draw_lanes_fn fs_choose_draw_lanes(int) noexcept
    void fs_count(const int64_t *, const int64_t *, int64_t, int64_t, int, int64_t *, int64_t *, int *) noexcept
    int fs_expand(fs_hop *, fs_draw_lanes_fn) noexcept
    void fs_draw(fs_hop *, fs_draw_lanes_fn) noexcept
    void fs_draw_places(fs_hop *, fs_draw_lanes_fn) noexcept
    int64_t fs_begin_drawn(fs_hop *) noexcept
    void fs_note_drawn(fs_hop *) noexcept
    int64_t fs_fill(fs_hop *, const void *, int, int64_t) noexcept
    int fs_number_all(fs_hop *) noexcept
    int64_t fs_enter(fs_hop *, int64_t) noexcept
    int64_t fs_first_bad(const void *, int, int64_t, int64_t) noexcept


cdef enum:
    LANE_DRAWS = 64
    DRAW_LEVEL = 2

# Numbers of one batch stay below this, so that the table's 32-bit entries last for several batches between two clearings.
MAX_NODES = 2**31


def absorb(uint64_t key, uint64_t x):
    """Return output number ``x`` of the SplitMix64 generator with state ``key``."""
    return fs_absorb(key, x)


def draw_scratch(int64_t fanout):
    """Return how many int64 words of scratch a hop of this fan-out needs."""
    return 0 if fanout <= LANE_DRAWS else fs_draw_scratch(fanout)


@cython.final
cdef class Hops:
    """The nodes of one batch, numbered in order of first appearance, and its hops. One owner thread.

    Memory is the caller's: :meth:`attach` gives room, before the first :meth:`begin` and whenever a method asks for more.

    Parameters
    ----------
    num_nodes : int
        Ids in lists are in ``[0, num_nodes)``.
    exact : bool
        Table entries name ids fully; needs ``num_nodes * copies <= 2**32``.
    draw_level : int
        Widest vector form of the draws to use, if the processor has it: 0 none, 1 AVX2, 2 AVX-512. All draw the same.
    copies : int
        Ids of the batch are in ``[0, num_nodes * copies)``: as many subgraphs, in each of which nodes have ids of their own.
    """

    def __cinit__(self, int64_t num_nodes, bint exact, int draw_level=DRAW_LEVEL, int64_t copies=1):
        if num_nodes < 0 or copies < 1 or num_nodes > INT64_MAX // copies:
            raise ValueError("num_nodes is out of range")
        if exact and num_nodes * copies > <int64_t>UINT32_MAX + 1:
            raise ValueError("num_nodes is out of range")
        self.num_nodes, self.num_ids = num_nodes, num_nodes * copies
        self.hop.exact = exact
        self.hop.base = 1
        self.lists_view = self.list_place_view = self.list_degree_view = None
        self.draw_lanes = fs_choose_draw_lanes(draw_level)

    @property
    def n_nodes(self):
        """Nodes numbered so far."""
        return self.hop.n_nodes

    def attach(self, int64_t[::1] nodes not None, int64_t[::1] place not None, int64_t[::1] degree not None,
               uint64_t[::1] table not None):
        """Work in these arrays from now on; the first ``n_nodes`` entries of the first three are kept, ``table`` must be zeros.

        Parameters
        ----------
        nodes, place, degree : int64 array, shape (capacity,)
            ``place`` is where a node's first neighbour lies: an index into the records in memory, or ``~position`` in the file.
        table : uint64 array, shape (2**k,)
            Twice ``capacity`` entries or more, or as many as there are nodes.
        """
        cdef int64_t capacity = nodes.shape[0], size = table.shape[0], done
        cdef int bits = 0
        if capacity < 1 or place.shape[0] != capacity or degree.shape[0] != capacity or capacity < self.hop.n_nodes:
            raise ValueError("the three arrays of nodes have one length, and room for the nodes numbered so far")
        while (<int64_t>1 << bits) < size and bits < 62:
            bits += 1
        if size != <int64_t>1 << bits or size < 2 or (size < 2 * capacity and size < self.num_ids):
            raise ValueError("the table's size is a power of two and twice the nodes' room, or at least the number of nodes")
        self.nodes_view, self.place_view, self.degree_view, self.table_view = nodes, place, degree, table
        self.hop.nodes, self.hop.table = &nodes[0], &table[0]
        if self.lists_view is None:
            self._expand_nodes()
        self.hop.limit = INT64_MAX if capacity > self.num_ids else capacity
        if self.hop.limit > MAX_NODES:
            self.hop.limit = INT64_MAX if self.num_ids < MAX_NODES else MAX_NODES
        self.hop.shape.mask = <uint64_t>size - 1
        if size >= self.num_ids:  # room for an entry a node: its id is its slot
            self.hop.shape.multiplier, self.hop.shape.shift = 1, 0
        else:
            self.hop.shape.multiplier, self.hop.shape.shift = <uint64_t>0x9E3779B97F4A7C15, 64 - bits
            if self.num_ids != self.num_nodes:  # the copies of a node, which are num_nodes apart, must not share a slot
                self.hop.shape.multiplier = fs_absorb(<uint64_t>self.num_nodes, 0) | 1
        self.hop.base = 1
        with nogil:
            done = fs_enter(&self.hop, self.hop.n_nodes)
        if done >= 0:
            raise RuntimeError("a node is numbered twice")

    cdef int _expand_nodes(self) except -1:
        """Let hops go from the nodes, of which each has one list."""
        self.lists_view = self.list_place_view = self.list_degree_view = None
        self.hop.lists, self.hop.place, self.hop.degree = self.hop.nodes, &self.place_view[0], &self.degree_view[0]
        return 0

    def expand_lists(self, const int64_t[::1] lists not None, const int64_t[::1] place not None,
                     const int64_t[::1] degree not None):
        """Let the hops from here on go from these lists, until :meth:`begin`; drawn nodes are numbered among those of the batch.

        Parameters
        ----------
        lists : int64 array, shape (n,)
            Numbers of lists, which key the draws; a hop's ``dst`` are positions among them.
        place, degree : int64 array, shape (n,)
            Where each list begins, as for :meth:`attach`, and its length.
        """
        if place.shape[0] != lists.shape[0] or degree.shape[0] != lists.shape[0]:
            raise ValueError("lists, their places and their lengths are as many")
        self._end_hop()
        self.lists_view, self.list_place_view, self.list_degree_view = lists, place, degree
        if lists.shape[0]:
            self.hop.lists, self.hop.place, self.hop.degree = &lists[0], &place[0], &degree[0]

    def begin(self, const int64_t[::1] seeds not None):
        """Forget the last batch and number ``seeds`` from 0.

        Returns
        -------
        int
            Position of the first seed out of range, or ``-1``.
        int
            Position of the first seed that repeats an earlier one, or ``-1``.
        """
        cdef int64_t n = seeds.shape[0], i, bad = -1, twice = -1, clear
        self._end_hop()
        if not self.hop.nodes or self.nodes_view.shape[0] < n:
            raise ValueError("no room for the seeds")
        self._expand_nodes()
        if self.num_ids >= MAX_NODES and n > MAX_NODES:
            raise OverflowError("a batch has at most 2**31 nodes")
        if self.hop.base + <uint64_t>self.hop.n_nodes >= MAX_NODES:
            with nogil:
                for clear in range(<int64_t>self.hop.shape.mask + 1):
                    self.hop.table[clear] = 0
            self.hop.base = 1
        else:
            self.hop.base += <uint32_t>self.hop.n_nodes
        self.hop.n_nodes = 0
        if n:
            with nogil:
                bad = fs_first_bad(&seeds[0], 1, n, self.num_ids)
                if bad < 0:
                    for i in range(n):
                        self.hop.nodes[i] = seeds[i]
                    twice = fs_enter(&self.hop, n)
        if bad < 0:
            # A repeated seed leaves entries behind that the next batch must see as outdated, too.
            self.hop.n_nodes = n
        return bad, twice

    def count(self, int64_t n_dst, int64_t fanout, bint replace):
        """Return the edges of a hop over the first ``n_dst`` nodes, how many of them must be read, and whether any is drawn."""
        cdef int64_t n_edges = 0, n_missing = 0
        cdef int any_drawn = 0
        self._check_dst(n_dst)
        with nogil:
            fs_count(self.hop.place, self.hop.degree, n_dst, fanout, replace, &n_edges, &n_missing, &any_drawn)
        return n_edges, n_missing, bool(any_drawn)

    def start(self, int64_t n_dst, int64_t fanout, bint replace, uint64_t key, records, int id_bytes, int64_t[::1] src not None,
              int64_t[::1] dst not None, int64_t[::1] scratch not None, int64_t[::1] positions not None,
              int64_t[::1] edges not None, int64_t[::1] starts=None, int64_t[::1] edge_pos=None, edge_ids=None,
              const int64_t[::1] offsets=None, bint drawn=False):
        """Begin a hop: each of the first ``n_dst`` nodes draws ``fanout`` of its neighbours.

        Parameters
        ----------
        n_dst, fanout, replace, key
            ``fanout`` -1 takes all; ``key`` is the hop's.
        records : buffer of int32 or int64, or None
            Neighbour ids in memory, all in range.
        id_bytes : int
        src, dst : int64 array, shape (n_edges,)
            Output: local numbers. Sizes are those :meth:`count` told.
        scratch : int64 array, shape (draw_scratch(fanout),)
            Empty if nothing is drawn.
        positions, edges : int64 array, shape (n_missing,)
            Receive the positions to read from the file, and whose edges they are.
        starts : int64 array, shape (at least n_dst,), optional
            The first edge of each destination's list; not to be changed until the hop is done.
        edge_pos : int64 array, shape (n_edges,), optional
            Output, where ``starts`` is given: the number of each edge among all edges.
        edge_ids : int32 or int64 array, as long as ``records``, optional
            What an edge whose id is in ``records`` gets in ``edge_pos`` instead; an edge to read gets ``~`` of its number.
        offsets : int64 array, shape (at least n_dst,), optional
            Added to the ids in each destination's list; not to be changed until the hop is done. The sums are ids of the batch.
        drawn : bool
            The neighbours are drawn: ``src`` has where each lies, an index into ``records`` or ``~position`` in the file, and
            ``dst`` its list, ascending. ``fanout``, ``replace``, ``key`` and ``scratch`` are not used.
        """
        cdef int64_t n_edges, n_missing, n_records = 0
        cdef Ids listed = None, numbers = None
        check_width(id_bytes)
        self._check_dst(n_dst)
        self._end_hop()
        if drawn:
            self._begin_drawn(n_dst, src, dst)
        else:
            self._begin_hop(&self.hop, n_dst, fanout, replace, key, scratch)
        n_edges, n_missing = self.hop.n_edges, self.hop.n_missing
        if src.shape[0] != n_edges or dst.shape[0] != n_edges:
            raise ValueError(f"the hop has {n_edges} edges; src has room for {src.shape[0]}, dst for {dst.shape[0]}")
        if positions.shape[0] != n_missing or edges.shape[0] != n_missing:
            raise ValueError(f"the hop lacks {n_missing} edges; positions has room for {positions.shape[0]}")
        if edge_pos is not None and (starts is None or starts.shape[0] < n_dst or edge_pos.shape[0] != n_edges):
            raise ValueError(f"edge_pos needs {n_edges} entries, and the starts of {n_dst} lists")
        if records is None and n_edges != n_missing:
            raise ValueError("lists in memory, and no records")
        if offsets is not None and offsets.shape[0] < n_dst:
            raise ValueError(f"{offsets.shape[0]} offsets, for {n_dst} lists")
        self.hop.records = NULL
        if records is not None:
            listed = Ids(records, id_bytes)
            self.hop.records, n_records = listed.data, listed.n
        if edge_ids is not None:
            numbers = Ids(edge_ids, 0)
            if numbers.n != n_records or edge_pos is None:
                raise ValueError(f"edge_ids has an entry for each of the {n_records} records, and goes with edge_pos")
            self.hop.edge_ids_wide = numbers.wide
            if n_edges:
                self.hop.edge_ids = numbers.data
        self.records, self.edge_ids = listed, numbers  # held while the hop runs
        self.hop.wide, self.hop.n_missing = id_bytes == 8, 0
        self.src_view, self.dst_view, self.scratch_view = src, dst, scratch
        self.positions_view, self.edges_view = positions, edges
        self.starts_view, self.edge_pos_view, self.offsets_view = starts, edge_pos, offsets
        if offsets is not None and n_dst:
            self.hop.offsets = &offsets[0]
        if edge_pos is not None and n_edges:
            self.hop.starts, self.hop.edge_pos = &starts[0], &edge_pos[0]
        self.hop.src = &src[0] if n_edges else NULL
        self.hop.dst = &dst[0] if n_edges else NULL
        self.hop.positions = &positions[0] if n_missing else NULL
        self.hop.edges = &edges[0] if n_missing else NULL
        self.in_hop = True
        with nogil:
            if drawn and self.hop.edge_pos:
                fs_note_drawn(&self.hop)
            if n_missing:
                fs_draw(&self.hop, self.draw_lanes)

    def draw_positions(self, int64_t n_dst, int64_t fanout, bint replace, uint64_t key, const int64_t[::1] place not None,
                       const int64_t[::1] degree not None, int64_t[::1] dst not None, int64_t[::1] scratch not None,
                       int64_t[::1] edge_pos not None, edge_ids=None):
        """Draw again what a hop over the first ``n_dst`` nodes has drawn, and number those edges.

        Parameters
        ----------
        n_dst, fanout, replace, key, scratch
            As for :meth:`start`.
        place, degree : int64 array, shape (at least n_dst,)
            Where the node's list begins, an index into ``edge_ids`` or ``~start`` of its first edge, and its length.
        dst : int64 array, shape (n_edges,)
            Destinations of the hop's edges; written again.
        edge_pos : int64 array, shape (n_edges,)
            Output: the number of each edge among all.
        edge_ids : int32 or int64 array, optional
            What an edge whose list is in memory gets instead; the others then get ``~`` of their number. Without it no list is.

        Returns
        -------
        int
            Edges whose list is not in memory.

        Raises
        ------
        ValueError
            So many edges are not drawn.
        """
        cdef fs_hop hop = self.hop
        cdef Ids numbers
        cdef int64_t i
        cdef bint has_ids = edge_ids is not None
        self._check_dst(n_dst)
        if min(place.shape[0], degree.shape[0]) < n_dst:
            raise ValueError("more destinations than nodes")
        if n_dst == 0:
            return 0
        hop.place, hop.degree = &place[0], &degree[0]
        self._begin_hop(&hop, n_dst, fanout, replace, key, scratch)
        if (not has_ids and hop.n_edges != hop.n_missing) or dst.shape[0] != hop.n_edges or edge_pos.shape[0] != hop.n_edges:
            raise ValueError(f"{hop.n_edges} edges are drawn, and not {edge_pos.shape[0]}")
        if hop.n_edges == 0:
            return 0
        hop.src, hop.dst, hop.edge_pos = &edge_pos[0], &dst[0], &edge_pos[0]
        hop.records = hop.edge_ids = NULL
        if has_ids:
            numbers = Ids(edge_ids, 0)
            hop.wide = hop.edge_ids_wide = numbers.wide
            hop.records = hop.edge_ids = numbers.data  # fetched where ids would be
        with nogil:
            fs_draw_places(&hop, self.draw_lanes)
            if not has_ids:
                for i in range(hop.n_edges):
                    edge_pos[i] = ~edge_pos[i]
        return hop.n_missing

    cdef int _begin_hop(self, fs_hop *hop, int64_t n_dst, int64_t fanout, bint replace, uint64_t key,
                        int64_t[::1] scratch) except -1:
        """Set ``hop`` to the beginning of a hop over its first ``n_dst`` nodes, and count its edges."""
        cdef int any_drawn = 0
        with nogil:
            fs_count(hop.place, hop.degree, n_dst, fanout, replace, &hop.n_edges, &hop.n_missing, &any_drawn)
        check_length("scratch", scratch.shape[0], draw_scratch(fanout) if any_drawn else 0)
        hop.scratch = &scratch[0] if scratch.shape[0] else NULL
        hop.n_dst, hop.fanout, hop.replace, hop.key, hop.is_drawn = n_dst, fanout, replace, key, False
        hop.next_dst = hop.drawn = hop.gathered = hop.numbered = 0
        return 0

    cdef int _begin_drawn(self, int64_t n_dst, int64_t[::1] src, int64_t[::1] dst) except -1:
        """Set the hop to one over the first ``n_dst`` nodes whose neighbours are drawn."""
        cdef int64_t n = src.shape[0], bad = -1
        check_length("dst", dst.shape[0], n)
        self.hop.n_dst, self.hop.n_edges, self.hop.fanout, self.hop.replace, self.hop.scratch = n_dst, n, -1, False, NULL
        self.hop.src, self.hop.dst = &src[0] if n else NULL, &dst[0] if n else NULL
        with nogil:
            bad = fs_begin_drawn(&self.hop)
        if bad >= 0:
            raise ValueError(f"edge {bad} is of list {dst[bad]}, and the hop goes from {n_dst}")
        return 0

    cdef int64_t _n_lists(self):
        """Return how many lists a hop can go from."""
        return self.hop.n_nodes if self.lists_view is None else self.lists_view.shape[0]

    cdef int _check_dst(self, int64_t n_dst) except -1:
        if n_dst < 0 or n_dst > self._n_lists():
            raise ValueError("more destinations than nodes")
        return 0

    def fill(self, ids, int id_bytes):
        """Take the ids read from ``positions``; returns the first that is no node's, or -1."""
        cdef Ids found
        cdef int64_t bad
        self._check_in_hop()
        found = Ids(ids, id_bytes)
        if found.n != self.hop.n_missing:
            raise ValueError(f"{self.hop.n_missing} ids expected")
        with nogil:
            bad = fs_fill(&self.hop, found.data, found.wide, self.num_nodes)
        if bad >= 0:
            self._end_hop()  # src holds what must not be used
        return bad

    def number(self):
        """Go on with the hop: return True when it is done, False when it needs more room (:meth:`attach`)."""
        cdef int wants
        self._check_in_hop()
        with nogil:
            if self.hop.drawn == self.hop.n_edges and self.hop.gathered == self.hop.n_edges:
                wants = fs_number_all(&self.hop)
            else:
                wants = fs_expand(&self.hop, self.draw_lanes)
        if wants:
            self._check_room()
        else:
            self._end_hop()
        return not wants

    cdef int _check_room(self) except -1:
        """Refuse more room to a hop that has all there may be."""
        if self.hop.n_nodes + 256 >= MAX_NODES:
            raise OverflowError("a batch has at most 2**31 nodes")
        return 0

    cdef int _end_hop(self) except -1:
        self.in_hop = False
        self.records = self.edge_ids = None  # and the caller's arrays: they go back to their pool
        self.src_view = self.dst_view = self.scratch_view = self.positions_view = self.edges_view = None
        self.starts_view = self.edge_pos_view = self.offsets_view = None
        self.hop.starts = self.hop.edge_pos = self.hop.offsets = NULL
        self.hop.edge_ids = NULL
        return 0

    cdef int _check_in_hop(self) except -1:
        if not self.in_hop:
            raise ValueError("no hop is under way")
        return 0
