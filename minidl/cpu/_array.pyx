# cython: language_level=3, boundscheck=False, wraparound=False
"""Memory of large arrays: blocks that are kept when their array dies and handed to the next array of that size.

A training step allocates the same sizes again and again. Returned to the operating system in between, each page is
cleared and mapped anew on its first touch, which costs several times as much as a pass of batch norm over it.
Not for use without the global interpreter lock, which guards the pool.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport uintptr_t
from libc.string cimport memmove


cdef struct Idle:
    void *memory
    Py_ssize_t nbytes


cdef uintptr_t ALIGNMENT = 256  # what the widest vector loads and views into parameter arenas ask for
cdef Idle *idle = NULL          # oldest first; plain C, because blocks die while the interpreter shuts down, too
cdef Py_ssize_t idle_count = 0
cdef Py_ssize_t idle_capacity = 0
cdef Py_ssize_t idle_bytes = 0
cdef Py_ssize_t used_bytes = 0
cdef Py_ssize_t peak_bytes = 0


cdef Idle remove(Py_ssize_t at) noexcept:
    global idle_count, idle_bytes
    cdef Idle found = idle[at]
    idle_count -= 1
    idle_bytes -= found.nbytes
    memmove(idle + at, idle + at + 1, (idle_count - at) * sizeof(Idle))
    return found


cdef void evict(Py_ssize_t limit) noexcept:
    """Give the oldest idle blocks back to the system until at most ``limit`` bytes stay."""
    while idle_bytes > limit:
        PyMem_RawFree(remove(0).memory)


cdef void give_back(Idle block) noexcept:
    """Keep a dead block. Idle memory never exceeds what has been in use at one time."""
    global idle, idle_count, idle_capacity, idle_bytes
    cdef void *larger
    if idle_count == idle_capacity:
        larger = PyMem_RawRealloc(idle, (2 * idle_capacity + 64) * sizeof(Idle))
        if larger == NULL:
            PyMem_RawFree(block.memory)
            return
        idle = <Idle *>larger
        idle_capacity = 2 * idle_capacity + 64
    idle[idle_count] = block
    idle_count += 1
    idle_bytes += block.nbytes
    evict(peak_bytes)


cdef Idle take(Py_ssize_t nbytes):
    """The youngest idle block that fits with at most an eighth to spare (it may still be in a cache), or a new one."""
    cdef Py_ssize_t at
    cdef Idle block
    for at in range(idle_count - 1, -1, -1):
        if nbytes <= idle[at].nbytes <= nbytes + nbytes // 8:
            return remove(at)
    block.nbytes = nbytes
    block.memory = PyMem_RawMalloc(nbytes + ALIGNMENT)
    if block.memory == NULL:
        evict(0)
        block.memory = PyMem_RawMalloc(nbytes + ALIGNMENT)
    if block.memory == NULL:
        raise MemoryError(f"no memory for an array of {nbytes} bytes")
    return block


cdef class Block:
    """``nbytes`` of aligned, undefined memory as a buffer, which returns to the pool when its last array is gone."""

    cdef Idle block
    cdef readonly Py_ssize_t nbytes

    def __cinit__(self, Py_ssize_t nbytes):
        global used_bytes, peak_bytes
        self.block = take(nbytes)
        self.nbytes = nbytes
        used_bytes += self.block.nbytes
        peak_bytes = max(peak_bytes, used_bytes)

    def __dealloc__(self):
        global used_bytes
        if self.block.memory != NULL:
            used_bytes -= self.block.nbytes
            give_back(self.block)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef uintptr_t start = (<uintptr_t>self.block.memory + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        PyBuffer_FillInfo(buffer, self, <void *>start, self.nbytes, 0, flags)


def pool_bytes():
    """Bytes of large arrays: (in use, idle, most that were in use at one time)."""
    return used_bytes, idle_bytes, peak_bytes


def release_idle():
    """Give all idle blocks back to the system and forget the peak."""
    global peak_bytes
    evict(0)
    peak_bytes = used_bytes
