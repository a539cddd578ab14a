"""Layer-neighbour sampling: which sources the destinations of a hop take.

The kernels are in kernels/labor.c and kernels/importance.c.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython

from featstore._core.ids cimport Ids, check_length, check_width
from featstore._core.sampler cimport Hops, fs_hop


cdef extern from "kernels/labor.h" nogil:
    ctypedef struct fs_numbers:
        int changes
    ctypedef struct fs_layer:
        const void *records
        int wide
        int64_t n_dst
        int64_t fanout
        fs_numbers numbers
        int64_t next_dst
        int64_t next_position
        int64_t stop_dst
        int64_t stop_position
        const int64_t *starts
        int64_t *edge_pos
        int64_t n_used
        int64_t n_chosen
    ctypedef int64_t (*fs_take_fn)(const void *, int, int64_t, const fs_numbers *, uint32_t, void *) noexcept
    ctypedef int64_t (*fs_take_places_fn)(const void *, int, int64_t, const fs_numbers *, uint32_t, void *, int64_t,
                                          int64_t *) noexcept
    enum:
        FS_PIECE
        FS_SPARE
    void fs_make_kept() noexcept
    fs_take_fn fs_choose_take(int) noexcept
    fs_take_places_fn fs_choose_take_places(int) noexcept
    void fs_set_numbers(fs_numbers *, uint64_t, uint64_t, uint64_t, uint32_t) noexcept
    void fs_expect(const int64_t *, const int64_t *, int64_t, int64_t, int64_t *, int64_t *, int64_t *) noexcept
    int64_t fs_turn(fs_layer *, const int64_t *, const int64_t *, int64_t *, int64_t) noexcept
    int fs_choose(fs_layer *, const int64_t *, const int64_t *, const void *, void *, int64_t, int64_t *, fs_take_fn,
                  fs_take_places_fn) noexcept
    int fs_number_chosen(fs_hop *, const void *, int, const int64_t *) noexcept

cdef extern from "kernels/importance.h" nogil:
    ctypedef struct fs_source:
        double weight
    int fs_number_sources(fs_hop *, void *, int) noexcept
    double fs_weigh(const void *, int, const int64_t *, int64_t, int64_t, fs_source *, int64_t) noexcept
    int64_t fs_keep(void *, int, int64_t *, int64_t, int64_t, fs_source *, int64_t, const int64_t *, const fs_numbers *,
                    int64_t *) noexcept


# Room that a list of chosen ids needs beyond what is in it, so that a hop goes on.
STEP = FS_PIECE + FS_SPARE

fs_make_kept()


cdef int64_t _total(const int64_t *counts, int64_t n, int64_t most) except -1:
    """Return the sum of the edges of ``n`` destinations, which is not above ``most``."""
    cdef int64_t i, total = 0
    with nogil:
        for i in range(n):
            if counts[i] < 0 or counts[i] > most - total:
                total = -1
                break
            total += counts[i]
    if total < 0:
        raise ValueError("counts are not those of the hop")
    return total


@cython.final
cdef class Layer:
    """One hop: destinations go through their neighbours' numbers, then what they take is numbered. One owner thread.

    Call :meth:`turn`, read what it asks for, and :meth:`choose`, until :attr:`done`; then :meth:`number`.

    Parameters
    ----------
    hops : Hops
        Whose first ``n_dst`` nodes are the destinations; their places and degrees are known.
    n_dst, fanout : int
        ``fanout`` -1 takes all.
    early, late, phase, turn : int
        Keys of the sources' numbers: ``late``'s where the number under ``phase`` is ``turn`` or more, else ``early``'s.
    records : buffer of int32 or int64, or None
        Neighbour ids in memory, all in range.
    id_bytes : int
    level : int
        Widest vector form to use, if the processor has it: 0 none, 1 AVX2, 2 AVX-512. All take the same.

    Attributes
    ----------
    n_expected : int
        Edges that are expected; as many as there are where no destination compares numbers.
    n_ids : int
        Ids of all lists.
    n_missing : int
        Those of them that are in the file.
    """

    cdef Hops hops
    cdef fs_layer layer
    cdef fs_take_fn take
    cdef fs_take_places_fn take_places
    cdef int id_bytes
    cdef bint is_numbering
    cdef Ids records
    cdef readonly int64_t n_expected, n_ids, n_missing

    def __cinit__(self, Hops hops not None, int64_t n_dst, int64_t fanout, uint64_t early, uint64_t late, uint64_t phase,
                  uint32_t turn, records, int id_bytes, int level=2):
        check_width(id_bytes)
        hops._check_dst(n_dst)
        hops._end_hop()
        self.hops, self.id_bytes = hops, id_bytes
        self.take, self.take_places = fs_choose_take(level), fs_choose_take_places(level)
        self.layer.wide = id_bytes == 8
        self.layer.n_dst, self.layer.fanout = n_dst, fanout
        fs_set_numbers(&self.layer.numbers, early, late, phase, turn)
        with nogil:
            fs_expect(hops.hop.degree, hops.hop.place, n_dst, fanout, &self.n_expected, &self.n_ids, &self.n_missing)
        if records is None:
            if self.n_ids != self.n_missing:
                raise ValueError("lists in memory, and no records")
        else:
            self.records = Ids(records, id_bytes)
            self.layer.records = self.records.data

    @property
    def done(self):
        """Whether all lists were gone through."""
        return self.layer.next_dst >= self.layer.n_dst

    @property
    def n_chosen(self):
        """Edges so far."""
        return self.layer.n_chosen

    def turn(self, int64_t[::1] positions not None):
        """Begin the next turn: write the positions in the file of the ids that it needs; return how many.

        Parameters
        ----------
        positions : int64 array
            As many ids are read at once at the most; at least one where any list is in the file.
        """
        cdef int64_t n, room = positions.shape[0]
        self._check_hops()
        if not room and self.n_missing:
            raise ValueError("no room for a position")
        with nogil:
            n = fs_turn(&self.layer, self.hops.hop.degree, self.hops.hop.place, &positions[0] if room else NULL, room)
        return n

    def choose(self, found, chosen, int64_t[::1] counts not None, const int64_t[::1] starts=None, int64_t[::1] edge_pos=None):
        """Go through the lists of a turn; return True when it is over, False when ``chosen`` needs more room.

        Parameters
        ----------
        found : buffer of int32 or int64
            The ids at the turn's positions, all in range.
        chosen : writable buffer of int32 or int64
            Ids of what is taken, in order; the first :attr:`n_chosen` of an earlier one belong in one with more room.
            :data:`STEP` entries more than those are enough to go on.
        counts : int64 array, shape (n_dst,)
            Receives how many each destination takes.
        starts : int64 array, shape (at least n_dst,), optional
            The first edge of each destination's list.
        edge_pos : int64 array, as long as ``chosen``, optional
            Receives the number of each edge that is taken, where ``starts`` is given; grows as ``chosen`` does.
        """
        cdef Ids source, target
        cdef int wants
        self._check_hops()
        if counts.shape[0] != self.layer.n_dst:
            raise ValueError(f"counts has {counts.shape[0]} entries for {self.layer.n_dst} destinations")
        source = Ids(found, self.id_bytes)
        self._check_found(source.n)
        target = Ids(chosen, self.id_bytes, True)
        check_length("chosen", target.n, self.layer.n_chosen)
        if edge_pos is not None:
            if starts is None or starts.shape[0] < self.layer.n_dst or edge_pos.shape[0] < target.n or not target.n:
                raise ValueError(f"edge_pos needs {target.n} entries, and the starts of {self.layer.n_dst} lists")
            if self.layer.n_dst:
                self.layer.starts, self.layer.edge_pos = &starts[0], &edge_pos[0]
        with nogil:
            wants = fs_choose(&self.layer, self.hops.hop.degree, self.hops.hop.place, source.data, target.data, target.n,
                              &counts[0] if counts.shape[0] else NULL, self.take, self.take_places)
        self.layer.starts = self.layer.edge_pos = NULL
        return not wants

    cdef int _check_hops(self) except -1:
        """Refuse to go on where the hops have begun another batch."""
        if self.hops._n_lists() < self.layer.n_dst:
            raise ValueError("the destinations are gone: another batch was begun")
        return 0

    cdef int _check_found(self, int64_t n) except -1:
        """Refuse ids that are fewer than the turn's positions."""
        cdef int64_t needed = self.layer.n_used, i = self.layer.next_dst, position = self.layer.next_position, end
        with nogil:
            while i <= self.layer.stop_dst and i < self.layer.n_dst and self.layer.fanout:
                end = self.hops.hop.degree[i] if i < self.layer.stop_dst else self.layer.stop_position
                if self.hops.hop.place[i] < 0:
                    needed += end - position
                i, position = i + 1, 0
        if n < needed:
            raise ValueError(f"{needed} ids expected, not {n}")
        return 0

    def number(self, chosen, const int64_t[::1] counts not None, int64_t[::1] src not None,
               int64_t[::1] dst not None):
        """Number what was taken: return True when it is done, False when the hops need more room (:meth:`Hops.attach`).

        Parameters
        ----------
        chosen, counts
            What :meth:`choose` wrote.
        src, dst : int64 array, shape (n_chosen,)
            Output: local numbers.
        """
        cdef fs_hop *hop = &self.hops.hop
        cdef int64_t n = self.layer.n_chosen
        cdef int wants
        cdef Ids ids
        if not self.done:
            raise ValueError("lists are left to go through")
        if counts.shape[0] != self.layer.n_dst:
            raise ValueError(f"counts has {counts.shape[0]} entries for {self.layer.n_dst} destinations")
        if src.shape[0] != n or dst.shape[0] != n:
            raise ValueError(f"the hop has {n} edges; src has room for {src.shape[0]}, dst for {dst.shape[0]}")
        if not self.is_numbering:
            _total(&counts[0] if counts.shape[0] else NULL, counts.shape[0], n)
            hop.n_dst, hop.n_edges = self.layer.n_dst, n
            hop.next_dst = hop.drawn = hop.gathered = hop.numbered = 0
            self.is_numbering = True
        if n == 0:
            return True
        ids = Ids(chosen, self.id_bytes)
        if ids.n < n:
            raise ValueError(f"{n} chosen ids expected, not {ids.n}")
        hop.src, hop.dst = &src[0], &dst[0]
        with nogil:
            wants = fs_number_chosen(hop, ids.data, ids.wide, &counts[0])
        hop.src = hop.dst = NULL
        if wants:
            self.hops._check_room()
        return not wants


@cython.final
cdef class Importance:
    """Importance probabilities of one hop, and what its destinations take with them. One owner thread.

    Make it after :meth:`Layer.choose` has listed whole lists (``fanout`` -1). Call :meth:`number` until it is done, :meth:`weigh`
    and :meth:`keep`; then :meth:`Layer.number`.

    Parameters
    ----------
    layer : Layer
        Gone through; its numbers are those that sources have here.
    sources : Hops
        Begun anew; numbers the sources of the hop, whichever are taken.
    fanout : int
        At least 1.
    listed : writable buffer of int32 or int64
        What :meth:`Layer.choose` wrote. Held, and written over, until :meth:`keep`.
    counts : int64 array, shape (n_dst,)
        The same.

    Attributes
    ----------
    n_sources : int
    """

    cdef Layer layer
    cdef Hops sources
    cdef Ids listed
    cdef int64_t[::1] counts
    cdef double[:, ::1] weights
    cdef int64_t fanout, n_numbered, n_weighed

    def __cinit__(self, Layer layer not None, Hops sources not None, int64_t fanout, listed, int64_t[::1] counts not None):
        cdef int64_t total
        if fanout < 1:
            raise ValueError(f"a fan-out of at least 1 is weighed, not {fanout}")
        if sources is layer.hops or sources.hop.n_nodes or not sources.hop.nodes:
            raise ValueError("sources are numbered in hops of their own, which were begun without seeds")
        if not layer.done or layer.is_numbering:
            raise ValueError("the layer's lists are gone through first")
        if counts.shape[0] != layer.layer.n_dst:
            raise ValueError(f"counts has {counts.shape[0]} entries for {layer.layer.n_dst} destinations")
        total = _total(&counts[0] if counts.shape[0] else NULL, counts.shape[0], layer.layer.n_chosen)
        if total != layer.layer.n_chosen:
            raise ValueError("counts are not those of the hop")
        self.listed = Ids(listed, layer.id_bytes, True)
        if self.listed.n < total:
            raise ValueError(f"{total} listed ids expected, not {self.listed.n}")
        self.layer, self.sources, self.fanout, self.counts = layer, sources, fanout, counts
        self.n_numbered = self.n_weighed = -1
        sources.hop.n_edges, sources.hop.numbered = total, 0

    @property
    def n_sources(self):
        """Sources so far."""
        return self.sources.hop.n_nodes

    def number(self):
        """Number the sources: return True when it is done, False when their hops need more room (:meth:`Hops.attach`)."""
        cdef int wants
        self._check_held()
        with nogil:
            wants = fs_number_sources(&self.sources.hop, self.listed.data, self.listed.wide)
        if wants:
            self.sources._check_room()
        else:
            self.n_numbered = self.sources.hop.n_nodes
        return not wants

    def weigh(self, double[:, ::1] weights not None, int steps, double least):
        """Find the probabilities.

        Parameters
        ----------
        weights : float64 array, shape (n_sources, 2)
            Receives one over the probability of each source, and what this class keeps beside it.
        steps : int
            Of the fixed-point iteration; negative: until one lowers the expected number of sources by less than ``least`` of it.

        Returns
        -------
        list of float
            Expected number of sources before each step.
        """
        cdef int64_t n = self.sources.hop.n_nodes, t
        cdef fs_source *sources
        cdef double expected, before = 0
        self._check_held()
        if self.sources.hop.numbered < self.sources.hop.n_edges:
            raise ValueError("sources are left to number")
        if weights.shape[0] != n or weights.shape[1] != 2:
            raise ValueError(f"weights of shape ({n}, 2) expected, not ({weights.shape[0]}, {weights.shape[1]})")
        self.weights = weights
        sources = <fs_source *>&weights[0, 0] if n else NULL
        with nogil:
            for t in range(n):
                sources[t].weight = 1
        self.n_weighed = n
        found = []
        while n and len(found) != steps:
            with nogil:
                expected = fs_weigh(self.listed.data, self.listed.wide, &self.counts[0], self.counts.shape[0], self.fanout,
                                    sources, n)
            found.append(expected)
            if steps < 0 and len(found) > 1 and before - expected < least * before:
                break
            before = expected
        return found

    def keep(self, int64_t[::1] edge_pos=None):
        """Keep what is taken: ``listed``, ``counts`` and ``edge_pos`` are then as :meth:`Layer.choose` leaves them."""
        cdef int64_t n = self.sources.hop.n_nodes, kept = 0
        self._check_held()
        if self.n_weighed != n:
            raise ValueError("these sources have no probabilities yet")
        if edge_pos is not None and edge_pos.shape[0] < self.layer.layer.n_chosen:
            raise ValueError(f"edge_pos has {edge_pos.shape[0]} entries for {self.layer.layer.n_chosen} edges")
        if n:
            with nogil:
                kept = fs_keep(self.listed.data, self.listed.wide, &self.counts[0], self.counts.shape[0], self.fanout,
                               <fs_source *>&self.weights[0, 0], n, self.sources.hop.nodes, &self.layer.layer.numbers,
                               &edge_pos[0] if edge_pos is not None else NULL)
        self.layer.layer.n_chosen = kept
        self.listed = None

    cdef int _check_held(self) except -1:
        """Refuse to go on where the list was written over, or the sources are gone."""
        if self.listed is None:
            raise ValueError("what is taken was kept already")
        if self.sources.hop.n_edges != self.layer.layer.n_chosen or self.n_numbered not in (-1, self.sources.hop.n_nodes):
            raise ValueError("the sources are gone: another batch was begun")
        return 0
