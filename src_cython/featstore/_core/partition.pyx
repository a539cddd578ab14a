"""Streaming partitioning (FENNEL, LDG) of a graph whose lists come block by block. The kernels are in kernels/partition.c.

FENNEL: Tsourakakis et al., WSDM 2014; over several passes Nishimura and Ugander, KDD 2013; with a term for training nodes OUTRE,
VLDB 2024, section 5.2. LDG: Stanton and Kliot, KDD 2012.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

cimport cython

from featstore._core.ids cimport Ids, check_block


cdef extern from "kernels/partition.h" nogil:
    ctypedef struct fs_placer:
        const int64_t *indptr
        int64_t n_nodes
        int32_t *part
        const uint8_t *is_train
        const int32_t *group
        int64_t width
        int64_t leaves
        double exponent
        int is_ldg
        const double *scale
        const double *train_scale
        const int64_t *cap
        int64_t *size
        int64_t *trained
        double *load
        int64_t *count
        int32_t *touched
        int64_t *inside
        int32_t *winner
        int64_t node
        int is_open
        int64_t n_touched
    void fs_weigh_part(fs_placer *, int64_t) noexcept
    void fs_tournament(fs_placer *, int64_t) noexcept
    void fs_place(fs_placer *, const void *, int, int64_t, int64_t) noexcept
    int64_t fs_inside(const int64_t *, int64_t, const int32_t *, const int32_t *, const void *, int, int64_t, int64_t,
                      int64_t *) noexcept
    int64_t fs_cross(const int64_t *, int64_t, const int32_t *, const int32_t *, const void *, int, int64_t, int64_t, void *,
                     int) noexcept
    void fs_list_starts(const int64_t *, const int32_t *, int64_t, int64_t *, int64_t *) noexcept
    int64_t fs_move_lists(const char *, int64_t, int64_t, const int64_t *, const int64_t *, int64_t, int64_t, char *, int64_t,
                          int64_t, int) noexcept


cdef int64_t _leaves(int64_t width) noexcept:
    cdef int64_t leaves = 1
    while leaves < width:
        leaves *= 2
    return leaves


def table_bytes(int64_t n_groups, int64_t width):
    """Return the bytes that a :class:`Placer` allocates."""
    return 44 * n_groups * width + 16 + 4 * n_groups * _leaves(width)


@cython.final
cdef class Placer:
    """Puts nodes into parts, in the order of their ids. One owner thread.

    Parameters
    ----------
    indptr : int64 array, shape (N + 1,)
        Checked: ascends from 0.
    part : int32 array, shape (N,)
        The part of each node, -1 where it has none yet; changed in place. Parts of group ``g`` are ``g * width`` ….
    width : int
        Parts of a group.
    gamma : float
    scale, train_scale : float64 array, shape (n_groups,)
        A part of ``s`` nodes and ``t`` training nodes weighs ``scale * s**(gamma - 1) + train_scale * t**(gamma - 1)``.
    cap : int64 array, shape (n_groups,)
        Most nodes of a part; together they have room for the group.
    is_train : uint8 array, shape (N,), optional
    group : int32 array, shape (N,), optional
        One group without it.
    ldg : bool
        Score by ``n * (1 - s / cap)`` in place of ``n - weight``.

    Raises
    ------
    ValueError
        Arrays that do not fit each other, a part or group out of range, caps without room.
    """

    cdef fs_placer state
    cdef int64_t n_groups
    cdef const int64_t[::1] indptr_view, cap_view
    cdef int32_t[::1] part_view
    cdef const int32_t[::1] group_view
    cdef const uint8_t[::1] train_view
    cdef const double[::1] scale_view, train_scale_view

    def __cinit__(self, const int64_t[::1] indptr not None, int32_t[::1] part not None, int64_t width, double gamma,
                  const double[::1] scale not None, const double[::1] train_scale not None, const int64_t[::1] cap not None,
                  const uint8_t[::1] is_train=None, const int32_t[::1] group=None, bint ldg=False):
        cdef int64_t n = part.shape[0], n_parts
        self.n_groups = scale.shape[0]
        if indptr.shape[0] != n + 1 or (is_train is not None and is_train.shape[0] != n) or (
                group is not None and group.shape[0] != n):
            raise ValueError("indptr, part, is_train and group disagree in length")
        if self.n_groups < 1 or train_scale.shape[0] != self.n_groups or cap.shape[0] != self.n_groups or (
                group is None and self.n_groups != 1):
            raise ValueError("scale, train_scale and cap have an entry a group")
        if width < 1 or width > INT32_MAX // self.n_groups:
            raise ValueError(f"{self.n_groups} groups of {width} parts are too many")
        n_parts = self.n_groups * width
        self.indptr_view, self.part_view, self.group_view, self.train_view = indptr, part, group, is_train
        self.scale_view, self.train_scale_view, self.cap_view = scale, train_scale, cap
        self.state.n_nodes, self.state.width, self.state.leaves = n, width, _leaves(width)
        self.state.exponent, self.state.is_ldg = gamma - 1, ldg
        self.state.indptr = &indptr[0]
        self.state.part = &part[0] if n else NULL
        self.state.is_train = &is_train[0] if is_train is not None and n else NULL
        self.state.group = &group[0] if group is not None and n else NULL
        self.state.scale, self.state.train_scale, self.state.cap = &scale[0], &train_scale[0], &cap[0]
        self.state.size = <int64_t *>calloc(n_parts, sizeof(int64_t))
        self.state.trained = <int64_t *>calloc(n_parts, sizeof(int64_t))
        self.state.load = <double *>calloc(n_parts, sizeof(double))
        self.state.count = <int64_t *>calloc(n_parts + 1, sizeof(int64_t))
        self.state.inside = <int64_t *>calloc(n_parts, sizeof(int64_t))
        self.state.touched = <int32_t *>calloc(n_parts + 2, sizeof(int32_t))
        self.state.winner = <int32_t *>calloc(self.n_groups * self.state.leaves, sizeof(int32_t))
        if (self.state.size == NULL or self.state.trained == NULL or self.state.load == NULL or self.state.count == NULL
                or self.state.inside == NULL or self.state.touched == NULL or self.state.winner == NULL):
            raise MemoryError(f"no memory for {n_parts} parts")
        self._count_nodes()
        self.begin()

    def __dealloc__(self):  # what was not allocated is NULL
        free(self.state.size)
        free(self.state.trained)
        free(self.state.load)
        free(self.state.count)
        free(self.state.inside)
        free(self.state.touched)
        free(self.state.winner)

    cdef int _count_nodes(self) except -1:
        """Count what the parts hold already, and check that what they will hold fits the caps."""
        cdef fs_placer *s = &self.state
        cdef int64_t node, group, part, bad = -1
        cdef int64_t *members = <int64_t *>calloc(self.n_groups, sizeof(int64_t))
        if members == NULL:
            raise MemoryError(f"no memory for {self.n_groups} groups")
        try:
            with nogil:
                for node in range(s.n_nodes):
                    group = s.group[node] if s.group != NULL else 0
                    part = s.part[node]
                    if not 0 <= group < self.n_groups or (part != -1 and not group * s.width <= part < (group + 1) * s.width):
                        bad = node
                        break
                    members[group] += 1
                    if part >= 0:
                        s.size[part] += 1
                        s.trained[part] += s.is_train != NULL and s.is_train[node] != 0
            if bad >= 0:
                raise ValueError(f"the part or the group of node {bad} is out of range")
            for group in range(self.n_groups):
                if s.cap[group] < (members[group] + s.width - 1) // s.width:
                    raise ValueError(f"{s.width} parts of {s.cap[group]} nodes have no room for {members[group]}")
        finally:
            free(members)
        with nogil:
            for part in range(self.n_groups * s.width):
                fs_weigh_part(s, part)
            for group in range(self.n_groups):
                fs_tournament(s, group)
        return 0

    def begin(self):
        """Begin a pass, with node 0: every node is taken out of its part, if it has one, and put into the best."""
        cdef int64_t i
        self.state.node = self.state.is_open = self.state.n_touched = 0
        for i in range(self.n_groups * self.state.width):
            self.state.inside[i] = 0
        for i in range(self.n_groups * self.state.width + 1):
            self.state.count[i] = 0

    @property
    def node(self):
        """The node whose list comes next; ``N`` when the pass is over."""
        return self.state.node

    def place(self, block, int id_bytes, int64_t first):
        """Read a block of neighbour ids, those at positions ``first`` … of the file, and place every node whose list ends in it.

        Blocks come in order, without gaps. The ids are nodes: **not** checked. A graph without edges has one block, an empty one.
        """
        cdef Ids ids
        if not first <= self.state.indptr[self.state.n_nodes]:
            raise ValueError(f"no block begins at {first}")
        ids = Ids(block, id_bytes)
        with nogil:
            fs_place(&self.state, ids.data, ids.wide, first, ids.n)

    def sizes(self, int64_t[::1] size not None, int64_t[::1] trained not None, int64_t[::1] inside not None):
        """Write what each part holds: nodes, training nodes, and neighbours that were there when its nodes came, in this pass."""
        cdef int64_t i, n = self.n_groups * self.state.width
        if size.shape[0] != n or trained.shape[0] != n or inside.shape[0] != n:
            raise ValueError(f"there are {n} parts")
        for i in range(n):
            size[i], trained[i], inside[i] = self.state.size[i], self.state.trained[i], self.state.inside[i]


def edges_inside(const int64_t[::1] offsets not None, int64_t first_node, const int32_t[::1] part not None, block, int id_bytes,
                 int64_t first):
    """Count the edges of a block whose ends are in one part.

    Parameters
    ----------
    offsets : int64 array, shape (k + 1,)
        Ascends; the edges of node ``first_node + i`` are ``offsets[i] … offsets[i + 1]``.
    first_node : int
    part : int32 array, shape (N,)
    block : buffer
        Neighbour ids of the edges ``first …``, which lie between the first and the last of ``offsets``.
    id_bytes : {4, 8}
    first : int

    Returns
    -------
    int
    """
    cdef Ids ids = Ids(block, id_bytes)
    cdef int64_t found = 0
    check_block(offsets, first_node, part.shape[0], first, ids.n)
    if ids.n:
        with nogil:
            fs_inside(&offsets[0], 0, &part[first_node], &part[0], ids.data, ids.wide, first, ids.n, &found)
    return found


def cross_edges(const int64_t[::1] offsets not None, int64_t first_node, const int32_t[::1] part not None, block, int id_bytes,
                int64_t first, counts):
    """Count, for each node, the edges of a block that lead from it into another part.

    Parameters
    ----------
    offsets, first_node, part, block, id_bytes, first
        As for :func:`edges_inside`.
    counts : writable buffer of int32 or int64, shape (N,)
        Added to.
    """
    cdef Ids ids = Ids(block, id_bytes), target = Ids(counts, 0, True)
    cdef int64_t n_nodes = part.shape[0]
    if target.n != n_nodes:
        raise ValueError(f"counts must be {n_nodes} numbers of 4 or 8 bytes, not {target.n}")
    check_block(offsets, first_node, n_nodes, first, ids.n)
    if ids.n:
        with nogil:
            fs_cross(&offsets[0], 0, &part[first_node], &part[0], ids.data, ids.wide, first, ids.n, target.data, target.wide)


def list_starts(const int64_t[::1] degree not None, const int32_t[::1] part not None, int64_t[::1] next not None,
                int64_t[::1] starts=None):
    """Say where the lists of some nodes begin if lists lie by part, and by node within each part.

    Parameters
    ----------
    degree : int64 array, shape (n,)
        Of nodes in ascending order; later calls go on with later nodes.
    part : int32 array, shape (n,)
        Theirs.
    next : int64 array, shape (n_parts,)
        Where the next list of each part begins; goes on with each list.
    starts : int64 array, shape (n,), optional
        Receives where each node's list begins.

    Raises
    ------
    ValueError
        A part is out of range; arrays that do not fit each other.
    """
    cdef int64_t n = part.shape[0], n_parts = next.shape[0], i, bad = -1
    if degree.shape[0] != n or (starts is not None and starts.shape[0] != n):
        raise ValueError("degrees, parts and starts have an entry a node")
    if not n:
        return
    with nogil:
        for i in range(n):
            if not 0 <= part[i] < n_parts:
                bad = i
                break
        if bad < 0:
            fs_list_starts(&degree[0], &part[0], n, &next[0], NULL if starts is None else &starts[0])
    if bad >= 0:
        raise ValueError(f"the part of node {bad} is not in [0, {n_parts})")


def move_lists(block, int64_t first, const int64_t[::1] indptr not None, const int64_t[::1] starts not None, int64_t node,
               window, int64_t begin, int id_bytes):
    """Copy the lists of some nodes that lie in a block of the file to their places in a window of those in another order.

    Parameters
    ----------
    block : buffer
        Neighbour ids at positions ``first`` ….
    indptr : int64 array, shape (n + 1,)
        Ascends: where the lists of ``n`` nodes in a row begin in the file, and where the last one ends.
    starts : int64 array, shape (n,)
        Where each list begins in the other order, see :func:`list_starts`.
    node : int
        Of the ``n``: what the call for the block before returned; 0 at first.
    window : writable buffer
        Of the other order from position ``begin`` on.

    Returns
    -------
    int
        Node to go on with; ``n`` where the block may have lists of nodes after them.
    """
    cdef Ids source, target
    cdef int64_t n = starts.shape[0]
    if indptr.shape[0] != n + 1 or node < 0 or begin < 0 or first < 0:
        raise ValueError("indptr and starts disagree in length, or a position is negative")
    if not n:
        return 0
    source, target = Ids(block, id_bytes), Ids(window, id_bytes, True)
    with nogil:
        node = fs_move_lists(<const char *>source.data, first, source.n, &indptr[0], &starts[0], n, node,
                             <char *>target.data, begin, target.n, id_bytes)
    return node


def group_by_part(const int32_t[::1] part not None, const int64_t[::1] nodes, int64_t[::1] offsets not None,
                  int64_t[::1] out not None):
    """Sort nodes by part, stably, by counting.

    Parameters
    ----------
    part : int32 array, shape (N,)
    nodes : int64 array, shape (k,), or None
        All nodes where it is None.
    offsets : int64 array, shape (n_parts + 1,)
        Receives where each part's nodes begin in ``out``.
    out : int64 array, shape (k,)

    Returns
    -------
    int
        Position of the first node whose part, or whose id, is out of range; then nothing else is of use. -1 if there is none.
    """
    cdef int64_t i, node, n = part.shape[0] if nodes is None else nodes.shape[0], n_parts = offsets.shape[0] - 1, bad = -1
    cdef int64_t total = part.shape[0], begin, count
    if n_parts < 0 or out.shape[0] != n:
        raise ValueError("offsets have an entry more than there are parts, out one a node")
    with nogil:
        for i in range(n_parts + 1):
            offsets[i] = 0
        for i in range(n):
            node = i if nodes is None else nodes[i]
            if not 0 <= node < total or not 0 <= part[node] < n_parts:
                bad = i
                break
            offsets[part[node]] += 1
        if bad < 0:
            begin = 0
            for i in range(n_parts + 1):
                count = offsets[i]
                offsets[i] = begin
                begin += count
            for i in range(n):
                node = i if nodes is None else nodes[i]
                out[offsets[part[node]]] = node
                offsets[part[node]] += 1
            for i in range(n_parts, 0, -1):
                offsets[i] = offsets[i - 1]
            offsets[0] = 0
    return bad
