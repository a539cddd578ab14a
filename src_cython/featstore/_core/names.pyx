"""Names of nodes: their hashes, and the table in memory that numbers distinct ones in order of first appearance."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from featstore._core.bits cimport fs_fetch
from featstore._core.xxh3 cimport (
    FS_POLY_PRIME,
    FS_XXH_SHORT,
    fs_poly61,
    fs_secret,
    fs_secret_init,
    fs_xxh3_best,
    fs_xxh3_fn,
    fs_xxh3_short,
)

cdef enum:
    SLOTS_AHEAD = 32  # keys whose slots are fetched ahead, and of half of them what the slots lead to
    KEYS_AHEAD = 16


def hash_names(const int64_t[::1] offsets not None, const uint8_t[::1] data not None, uint64_t point,
               uint64_t[:, :] out not None):
    """Write two hashes of name ``i``, ``data[offsets[i]:offsets[i + 1]]``, to ``out[i]``.

    The first is its xxh3_64. The second is the value at ``point``, below 2**61 - 1, of the polynomial modulo 2**61 - 1 whose
    coefficients are the name's length plus 1 and its bytes, 7 by 7: two names of L bytes agree at L / 7 + 1 points at most.
    """
    cdef int64_t i, n = out.shape[0], begin, length, n_bytes = data.shape[0], bad = -1
    cdef fs_secret secret
    cdef fs_xxh3_fn fn = fs_xxh3_best()
    if offsets.shape[0] != n + 1 or out.shape[1] != 2:
        raise ValueError("there is one offset more than there are names, and out has two hashes a name")
    if point >= FS_POLY_PRIME:
        raise ValueError(f"the point must be below {FS_POLY_PRIME}")
    if n == 0:
        return
    cdef const uint8_t *base = &data[0] if n_bytes else NULL
    cdef uint8_t nothing = 0
    if base == NULL:
        base = &nothing  # all names are empty
    with nogil:
        fs_secret_init(&secret, 0)
        for i in range(n):
            begin = offsets[i]
            length = offsets[i + 1] - begin
            if begin < 0 or length < 0 or begin + length > n_bytes:
                bad = i
                break
            if length <= FS_XXH_SHORT:
                out[i, 0] = fs_xxh3_short(base + begin, <size_t>length, 0)
            else:
                out[i, 0] = fn(base + begin, <size_t>length, &secret)
            out[i, 1] = fs_poly61(base + begin, <size_t>length, point)
    if bad >= 0:
        raise ValueError(f"name {bad} does not lie within the {n_bytes} bytes of names")


def number_keys(uint32_t[::1] slots not None, uint64_t[:, ::1] held not None, int64_t n, const uint64_t[:, ::1] keys not None,
                int64_t[::1] ids not None, int64_t[::1] firsts not None, bint adds):
    """Write the number of each key to ``ids``; new keys get the next numbers, or −1 unless ``adds``.

    Parameters
    ----------
    slots : uint32 array, shape (a power of two,)
        Numbers plus 1, by the first word of their keys; 0: free.
    held : uint64 array, shape (room, 2)
        Keys by number, the first ``n`` of them in use.
    keys : uint64 array, shape (k, 2)
    ids : int64 array, shape (k,)
    firsts : int64 array, shape (k,)
        Gets the positions of the new keys.

    Returns
    -------
    (int, int)
        Keys that were numbered, and new ones among them. Fewer than k: ``held`` or two thirds of the slots are full.
    """
    cdef int64_t i = 0, k = keys.shape[0], found, n_new = 0, room = held.shape[0]
    cdef uint64_t mask = <uint64_t>slots.shape[0] - 1, at, most = <uint64_t>slots.shape[0] // 3 * 2
    cdef uint32_t slot
    if slots.shape[0] < 4 or <uint64_t>slots.shape[0] & mask or slots.shape[0] > <int64_t>1 << 32:
        raise ValueError("the number of slots must be a power of two, from 4 to 2**32")
    if keys.shape[1] != 2 or held.shape[1] != 2 or ids.shape[0] != k or firsts.shape[0] != k or n < 0 or n > room:
        raise ValueError("keys are pairs, with an id and a position each, and no more are held than there is room for")
    if <uint64_t>n > most:
        raise ValueError("too few slots for the keys")
    with nogil:
        while i < k:
            if i + SLOTS_AHEAD < k:
                fs_fetch(&slots[<int64_t>(keys[i + SLOTS_AHEAD, 0] & mask)])
            if i + KEYS_AHEAD < k:
                slot = slots[<int64_t>(keys[i + KEYS_AHEAD, 0] & mask)]
                if slot:
                    fs_fetch(&held[<int64_t>slot - 1, 0])
            at = keys[i, 0] & mask
            found = -1
            while True:
                slot = slots[<int64_t>at]
                if slot == 0:
                    break
                if held[<int64_t>slot - 1, 0] == keys[i, 0] and held[<int64_t>slot - 1, 1] == keys[i, 1]:
                    found = <int64_t>slot - 1
                    break
                at = (at + 1) & mask
            if found < 0 and adds:
                if n == room or <uint64_t>n >= most:
                    break
                found = n
                held[n, 0] = keys[i, 0]
                held[n, 1] = keys[i, 1]
                n += 1
                slots[<int64_t>at] = <uint32_t>n
                firsts[n_new] = i
                n_new += 1
            ids[i] = found
            i += 1
    return i, n_new


def fill_slots(uint32_t[::1] slots not None, const uint64_t[:, ::1] held not None):
    """Put the numbers of all keys of ``held``, which are distinct, into slots that are free."""
    cdef int64_t i, n = held.shape[0]
    cdef uint64_t mask = <uint64_t>slots.shape[0] - 1, at
    if slots.shape[0] < 4 or <uint64_t>slots.shape[0] & mask or held.shape[1] != 2 or n > slots.shape[0] // 3 * 2:
        raise ValueError("the number of slots must be a power of two, and a half more than the keys")
    with nogil:
        for i in range(n):
            if i + SLOTS_AHEAD < n:
                fs_fetch(&slots[<int64_t>(held[i + SLOTS_AHEAD, 0] & mask)])
            at = held[i, 0] & mask
            while slots[<int64_t>at]:
                at = (at + 1) & mask
            slots[<int64_t>at] = <uint32_t>(i + 1)


def copy_names(const int64_t[::1] begins not None, const int64_t[::1] lengths not None, const uint8_t[::1] data not None,
               uint8_t[::1] out not None):
    """Write ``data[begins[i]:begins[i] + lengths[i]]`` of every name to ``out``, one after the other, which they fill."""
    cdef int64_t i, n = begins.shape[0], n_bytes = data.shape[0], done = 0, room = out.shape[0], bad = -1
    if lengths.shape[0] != n:
        raise ValueError("each name has a begin and a length")
    cdef const uint8_t *source = &data[0] if n_bytes else NULL
    cdef uint8_t *target = &out[0] if room else NULL
    with nogil:
        for i in range(n):
            if lengths[i] < 0 or begins[i] < 0 or begins[i] > n_bytes - lengths[i] or lengths[i] > room - done:
                bad = i
                break
            if i + KEYS_AHEAD < n and 0 <= begins[i + KEYS_AHEAD] < n_bytes:
                fs_fetch(source + begins[i + KEYS_AHEAD])
            if lengths[i]:
                memcpy(target + done, source + begins[i], <size_t>lengths[i])
            done += lengths[i]
    if bad >= 0:
        raise ValueError(f"name {bad} does not lie within the {n_bytes} bytes of names, or there is no room for it")
    if done != room:
        raise ValueError(f"the names have {done} bytes, and there is room for {room}")
