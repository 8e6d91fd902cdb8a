# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Inner loops of planning: holes for pieces of memory, options that others beat, the recurrence over units kept."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint8_t
from libc.string cimport memmove

import numpy as np

cnp.import_array()

ctypedef fused Cost:
    int64_t
    double

ctypedef fused Way:
    uint8_t
    uint16_t
    uint32_t


cdef struct Placed:
    int64_t offset, top, begin, end


def first_fit(const int64_t[::1] order, const int64_t[::1] sizes, const int64_t[::1] begin, const int64_t[::1] end):
    """Offsets of pieces placed one after the other, each as low as it finds room.

    Args:
        order: numbers of the pieces to place; the offsets of others stay -1.
        sizes: bytes.
        begin, end: of each piece's life, both included.

    Returns:
        (pieces,) int64.
    """
    found = np.full(sizes.shape[0], -1, np.int64)
    cdef int64_t[::1] offsets = found
    cdef char[::1] memory = np.empty(max(order.shape[0], 1) * sizeof(Placed), np.int8)
    cdef Placed *placed = <Placed *> &memory[0]  # in order of offset
    cdef Py_ssize_t n, j, i, at, count = 0
    cdef int64_t size, floor
    with nogil:
        for n in range(order.shape[0]):
            i = order[n]
            size = sizes[i]
            if size == 0:
                offsets[i] = 0
                continue
            floor = 0
            for j in range(count):
                if placed[j].begin > end[i] or placed[j].end < begin[i]:
                    continue
                if placed[j].offset - floor >= size:
                    break
                if placed[j].top > floor:
                    floor = placed[j].top
            offsets[i] = floor
            at = count
            while at > 0 and placed[at - 1].offset > floor:
                at -= 1
            memmove(placed + at + 1, placed + at, (count - at) * sizeof(Placed))
            placed[at].offset, placed[at].top = floor, floor + size
            placed[at].begin, placed[at].end = begin[i], end[i]
            count += 1
    return found


def unbeaten(
    const int64_t[::1] order,
    const int64_t[::1] most,
    const Cost[::1] cost,
    const int64_t[::1] needs,
    const int64_t[::1] gives,
):
    """Of options in ``order`` those that none before is as good as: as much room, no higher cost, the same bits."""
    left = np.empty(order.shape[0], np.int64)
    cdef int64_t[::1] kept = left
    cdef Py_ssize_t n, j, count = 0
    cdef int64_t i, other
    with nogil:
        for n in range(order.shape[0]):
            i = order[n]
            for j in range(count - 1, -1, -1):
                other = kept[j]
                if most[other] >= most[i] and cost[other] <= cost[i]:
                    if needs[other] == needs[i] and gives[other] == gives[i]:
                        break
            else:
                kept[count] = i
                count += 1
    return left[:count]


def relax(const Cost[::1] before, Cost added, Cost[::1] behind, Way[::1] ways, Way way):
    """Where ``before[m] + added`` is below ``behind[m]`` it takes its place, and ``way`` that of ``ways[m]``."""
    cdef Py_ssize_t m
    cdef Cost value
    with nogil:
        for m in range(before.shape[0]):
            value = before[m] + added
            if value < behind[m]:
                behind[m] = value
                ways[m] = way
