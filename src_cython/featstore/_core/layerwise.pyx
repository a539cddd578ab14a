"""Layer-wise sampling: lists in pieces, importance of sources, what a layer takes. The kernels are in kernels/layerwise.c."""

from libc.stdint cimport int32_t, int64_t, uint64_t

cimport cython

from featstore._core.ids cimport Ids, check_width
from featstore._core.sampler cimport Hops, fs_hop


cdef extern from "kernels/layerwise.h" nogil:
    ctypedef struct fs_layer:
        const void *records
        int wide
        int64_t n_dst
        int64_t fanout
        int64_t next_dst
        int64_t next_position
        int64_t stop_dst
        int64_t stop_position
        int64_t n_used
    void fs_expect(const int64_t *, const int64_t *, int64_t, int64_t, int64_t *, int64_t *, int64_t *) noexcept
    int64_t fs_turn(fs_layer *, const int64_t *, const int64_t *, int64_t *, int64_t) noexcept
    int64_t fs_take_lists(fs_layer *, const int64_t *, const int64_t *, const void *, void *, int32_t *, int64_t) noexcept
    int fs_number_sources(fs_hop *, void *, int) noexcept
    void fs_accumulate(const void *, int, const int32_t *, int64_t, const int64_t *, int, double *, int64_t *) noexcept
    void fs_set_certain(const fs_hop *, const int64_t *, double *, int64_t) noexcept
    void fs_draw_distinct(const int64_t *, double *, int64_t, int64_t, uint64_t) noexcept
    void fs_draw_again(double *, int64_t, int64_t, uint64_t, double *, int64_t *) noexcept
    int64_t fs_take_edges(const void *, int, const int32_t *, int64_t, const int64_t *, int, const int64_t *, const double *,
                          int64_t, int64_t *, int64_t *, float *, const int64_t *, int64_t, int64_t *) noexcept
    int64_t fs_keep_members(const fs_hop *, const void *, int, int32_t *, int64_t, int32_t *, const int64_t *, int64_t,
                            int64_t *) noexcept


@cython.final
cdef class Lists:
    """The whole lists of a batch's first nodes, in pieces. One owner thread.

    Call :meth:`turn`, read what it asks for, and :meth:`take` until it returns 0; again, until :attr:`done`.

    Parameters
    ----------
    hops : Hops
        Its first ``n_dst`` nodes are located; they stay while lists are taken.
    n_dst : int
    records : buffer of int32 or int64, or None
        Neighbour ids in memory.
    id_bytes : int

    Attributes
    ----------
    n_ids, n_missing : int
        Ids of all lists, and those of them that lie in the file.
    n_dst : int
    """

    cdef fs_layer layer
    cdef readonly Hops hops
    cdef Ids records
    cdef readonly int id_bytes
    cdef readonly int64_t n_ids, n_missing
    cdef int64_t position  # of the first id of the last piece, in its list

    def __cinit__(self, Hops hops not None, int64_t n_dst, records, int id_bytes):
        cdef int64_t expected
        check_width(id_bytes)
        hops._check_dst(n_dst)
        hops._end_hop()
        self.hops, self.id_bytes = hops, id_bytes
        self.layer.wide, self.layer.n_dst, self.layer.fanout = id_bytes == 8, n_dst, -1
        with nogil:
            fs_expect(hops.hop.degree, hops.hop.place, n_dst, -1, &expected, &self.n_ids, &self.n_missing)
        if records is None:
            if self.n_ids != self.n_missing:
                raise ValueError("lists in memory, and no records")
        else:
            self.records = Ids(records, id_bytes)
            self.layer.records = self.records.data

    @property
    def n_dst(self):
        return self.layer.n_dst

    @property
    def done(self):
        """Whether all lists were taken."""
        return self.layer.next_dst >= self.layer.n_dst

    def rewind(self):
        """Begin with the first list again."""
        self.layer.next_dst = self.layer.next_position = self.layer.stop_dst = self.layer.stop_position = self.layer.n_used = 0

    def turn(self, int64_t[::1] positions not None):
        """Write the positions in the file of the next ids to read, as many as there is room for; return how many."""
        cdef int64_t n, room = positions.shape[0]
        self._check()
        if not room and self.n_missing:
            raise ValueError("no room for a position")
        with nogil:
            n = fs_turn(&self.layer, self.hops.hop.degree, self.hops.hop.place, &positions[0] if room else NULL, room)
        return n

    def take(self, found, listed, int32_t[::1] owners not None):
        """Copy the turn's next ids, and the numbers of the nodes in whose lists they are; return how many, 0 at its end.

        Parameters
        ----------
        found : buffer of int32 or int64
            The ids at all of the turn's positions, in range.
        listed : writable buffer of int32 or int64
        owners : int32 array
            As long as ``listed``.
        """
        cdef Ids source, target
        cdef int64_t n, room = owners.shape[0], position = self.layer.next_position
        self._check()
        source, target = Ids(found, self.id_bytes), Ids(listed, self.id_bytes, True)
        if target.n != room or room < 1:
            raise ValueError(f"room for {target.n} ids and {room} owners")
        if source.n < self._left():
            raise ValueError(f"{self._left()} ids expected, not {source.n}")
        with nogil:
            n = fs_take_lists(&self.layer, self.hops.hop.degree, self.hops.hop.place, source.data, target.data, &owners[0], room)
        if n:
            self.position = position
        return n

    cdef int _check(self) except -1:
        if self.hops._n_lists() < self.layer.n_dst:
            raise ValueError("the nodes are gone: another batch was begun")
        return 0

    cdef Ids _piece(self, listed, int64_t n, bint writable=False):
        """Hold ``n`` ids or more that :meth:`take` has written."""
        cdef Ids piece = Ids(listed, self.id_bytes, writable)
        if piece.n < n:
            raise ValueError(f"{n} ids of {self.id_bytes} bytes expected")
        return piece

    cdef int _check_starts(self, const int64_t[::1] starts) except -1:
        if starts is None or starts.shape[0] < self.layer.n_dst:
            raise ValueError(f"edge_pos needs the starts of {self.layer.n_dst} lists")
        return 0

    cdef int64_t _left(self) except -1:
        """Ids of the file that the turn has taken and will take."""
        cdef int64_t needed = self.layer.n_used, i = self.layer.next_dst, position = self.layer.next_position, end
        with nogil:
            while i <= self.layer.stop_dst and i < self.layer.n_dst:
                end = self.hops.hop.degree[i] if i < self.layer.stop_dst else self.layer.stop_position
                if self.hops.hop.place[i] < 0:
                    needed += end - position
                i, position = i + 1, 0
        return needed


@cython.final
cdef class Candidates:
    """The sources of one layer's lists: numbered, weighed, drawn; then the edges to those that are taken. One owner thread.

    For each piece of the lists call :meth:`begin`, :meth:`number` and :meth:`accumulate`; then :meth:`draw`; then for each piece,
    numbered again where there are several, :meth:`take_edges`; and at last :meth:`number_edges`.

    Parameters
    ----------
    sources : Hops
        Begun anew, without seeds.
    lists : Lists
    is_mean : bool
        Edges count one over the degree of their destination.

    Attributes
    ----------
    n_edges : int
        Edges to what is taken, once drawn.
    """

    cdef Hops sources
    cdef Lists lists
    cdef bint is_mean, is_drawn
    cdef int64_t n_tallied, n_emitted
    cdef readonly int64_t n_edges

    def __cinit__(self, Hops sources not None, Lists lists not None, bint is_mean):
        if sources is lists.hops or sources.hop.n_nodes or not sources.hop.nodes:
            raise ValueError("sources are numbered in hops of their own, which were begun without seeds")
        self.sources, self.lists, self.is_mean = sources, lists, is_mean
        sources.hop.n_edges = sources.hop.numbered = 0

    @property
    def n_sources(self):
        """Sources so far."""
        return self.sources.hop.n_nodes

    def begin(self, int64_t n):
        """Begin to number a piece of ``n`` ids."""
        self.sources.hop.n_edges, self.sources.hop.numbered = n, 0

    def number(self, listed):
        """Turn the piece's ids into numbers, in place: True when it is done, False when the sources' hops need more room."""
        cdef Ids piece = self.lists._piece(listed, self.sources.hop.n_edges, True)
        cdef int wants
        with nogil:
            wants = fs_number_sources(&self.sources.hop, piece.data, piece.wide)
        if wants:
            self.sources._check_room()
        return not wants

    def accumulate(self, listed, const int32_t[::1] owners not None, double[::1] importance not None,
                   int64_t[::1] n_edges not None):
        """Add a numbered piece to the importance and the number of edges of each source; entries of new ones are set to 0.

        Parameters
        ----------
        importance, n_edges : float64 and int64 array, shape (n_sources,) or more
        """
        cdef Ids piece
        cdef int64_t n = self.sources.hop.n_edges, n_sources = self.sources.hop.n_nodes, t
        if self.sources.hop.numbered < n or owners.shape[0] < n:
            raise ValueError("the piece is not numbered")
        if importance.shape[0] < n_sources or n_edges.shape[0] < n_sources:
            raise ValueError(f"no room for {n_sources} sources")
        piece = self.lists._piece(listed, n)
        if n:
            with nogil:
                for t in range(self.n_tallied, n_sources):
                    importance[t] = 0
                    n_edges[t] = 0
                fs_accumulate(piece.data, piece.wide, &owners[0], n, self.lists.hops.hop.degree, self.is_mean, &importance[0],
                              &n_edges[0])
        self.n_tallied = n_sources

    def draw(self, double[::1] importance not None, const int64_t[::1] n_edges not None, int64_t size, uint64_t key,
             bint takes_own, double[::1] upto, int64_t[::1] drawn):
        """Draw ``size`` sources; ``importance`` receives the factor of each that is taken, and 0 for the rest.

        Parameters
        ----------
        takes_own : bool
            Sources that are nodes of the batch are taken beside these.
        upto, drawn : float64 array, shape (n_sources,), and int64 array, shape (size,), or None
            Scratch for draws with replacement; without: none.
        """
        cdef int64_t n = self.sources.hop.n_nodes, t, total = 0
        if self.is_drawn or self.n_tallied != n or importance.shape[0] < n or n_edges.shape[0] < n or size < 1:
            raise ValueError("sources are tallied first, and drawn once")
        if upto is not None and (upto.shape[0] < n or drawn is None or drawn.shape[0] < size):
            raise ValueError(f"no room for {n} sums and {size} draws")
        if n:
            with nogil:
                if takes_own:
                    fs_set_certain(&self.lists.hops.hop, self.sources.hop.nodes, &importance[0], n)
                if upto is None:
                    fs_draw_distinct(self.sources.hop.nodes, &importance[0], n, size, key)
                else:
                    fs_draw_again(&importance[0], n, size, key, &upto[0], &drawn[0])
                for t in range(n):
                    if importance[t] > 0:
                        total += n_edges[t]
        self.n_edges, self.is_drawn = total, True

    def take_edges(self, listed, const int32_t[::1] owners not None, const double[::1] factors not None,
                   int64_t[::1] src not None, int64_t[::1] dst not None, float[::1] weights not None,
                   const int64_t[::1] starts=None, int64_t[::1] edge_pos=None):
        """Add the edges of the piece taken last, numbered, to those taken: ids of sources, numbers of destinations, weights.

        Parameters
        ----------
        factors : float64 array, shape (n_sources,)
            What :meth:`draw` wrote.
        src, dst, weights : int64, int64 and float32 array, shape (n_edges,)
        starts : int64 array, shape (at least n_dst,), optional
            The first edge of each destination's list.
        edge_pos : int64 array, shape (n_edges,), optional
            Output, where ``starts`` is given: the number of each edge among all edges.
        """
        cdef Ids piece
        cdef const int64_t *first_edges = NULL
        cdef int64_t *numbers = NULL
        cdef int64_t n = self.sources.hop.n_edges
        if not self.is_drawn or self.sources.hop.numbered < n or self.sources.hop.n_nodes != self.n_tallied:
            raise ValueError("the piece is not numbered, or names other sources than were drawn from")
        if owners.shape[0] < n or factors.shape[0] < self.n_tallied:
            raise ValueError(f"owners of {n} ids and factors of {self.n_tallied} sources expected")
        if src.shape[0] != self.n_edges or dst.shape[0] != self.n_edges or weights.shape[0] != self.n_edges:
            raise ValueError(f"room for {self.n_edges} edges expected")
        if edge_pos is not None:
            self.lists._check_starts(starts)
            if edge_pos.shape[0] != self.n_edges:
                raise ValueError(f"room for {self.n_edges} numbers of edges expected")
        if not n or not self.n_edges:
            return
        if edge_pos is not None:
            first_edges, numbers = &starts[0], &edge_pos[0]
        piece = self.lists._piece(listed, n)
        self._check_left(piece, n, factors)
        with nogil:
            self.n_emitted = fs_take_edges(piece.data, piece.wide, &owners[0], n, self.lists.hops.hop.degree, self.is_mean,
                                           self.sources.hop.nodes, &factors[0], self.n_emitted, &src[0], &dst[0], &weights[0],
                                           first_edges, self.lists.position, numbers)

    def number_edges(self, int64_t[::1] src not None):
        """Number the edges' sources in the batch, in place: True when it is done, False when its hops need more room."""
        cdef fs_hop *hop = &self.lists.hops.hop
        cdef int wants
        if self.n_emitted != self.n_edges or src.shape[0] != self.n_edges:
            raise ValueError("edges are left to take")
        if self.is_drawn:  # the first call
            hop.n_edges, hop.numbered, self.is_drawn = self.n_edges, 0, False
        if not self.n_edges:
            return True
        with nogil:
            wants = fs_number_sources(hop, &src[0], 1)
        if wants:
            self.lists.hops._check_room()
        return not wants

    cdef int _check_left(self, Ids piece, int64_t n, const double[::1] factors) except -1:
        """Refuse a piece that was taken before: there is no room for its edges."""
        if n > self.n_edges - self.n_emitted:
            n = self._count(piece, n, factors)
            if n > self.n_edges - self.n_emitted:
                raise ValueError("more edges than were drawn")
        return 0

    cdef int64_t _count(self, Ids piece, int64_t n, const double[::1] factors) except -1:
        cdef int64_t e, t, found = 0
        with nogil:
            for e in range(n):
                t = (<int64_t *>piece.data)[e] if piece.wide else (<int32_t *>piece.data)[e]
                found += factors[t] > 0
        return found


def keep_members(Lists lists not None, listed, int32_t[::1] owners not None, int64_t n, int32_t[::1] numbers not None,
                 const int64_t[::1] starts=None, int64_t[::1] edge_pos=None):
    """Write the numbers of those ids of the piece taken last that are nodes of the batch; return how many.

    Their owners come first then. ``starts`` and ``edge_pos`` are as for :meth:`Candidates.take_edges`, with room for ``n`` edges.
    """
    cdef Ids piece
    cdef const int64_t *first_edges = NULL
    cdef int64_t *edges = NULL
    cdef int64_t kept = 0
    if owners.shape[0] < n or numbers.shape[0] < n:
        raise ValueError(f"room for {n} numbers expected")
    if edge_pos is not None:
        lists._check_starts(starts)
        if edge_pos.shape[0] < n:
            raise ValueError(f"room for the numbers of {n} edges expected")
        if n > 0:
            first_edges, edges = &starts[0], &edge_pos[0]
    piece = lists._piece(listed, n)
    if n > 0:
        with nogil:
            kept = fs_keep_members(&lists.hops.hop, piece.data, piece.wide, &owners[0], n, &numbers[0], first_edges,
                                   lists.position, edges)
    return kept
