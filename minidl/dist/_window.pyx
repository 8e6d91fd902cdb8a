# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Collectives of the ranks of one host through memory that they share.

All work goes in *phases*. In a phase a rank writes into its slot, tells that it has arrived, waits for all others, and
reads. Slots and results exist twice and are used in turn: who writes in phase t + 2 has waited for all to arrive in
phase t + 1, by when they had read what was written in phase t.
"""

cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

cdef extern from "_window.h" nogil:
    int NAME_BYTES
    ctypedef struct minidl_call:
        uint64_t code
        uint64_t place
        uint64_t number
        char *name
    ctypedef struct minidl_flag:
        uint64_t arrived
        minidl_call *call
    ctypedef void (*minidl_sum)(void *result, const void *const *inputs, int size, Py_ssize_t n) noexcept
    void minidl_arrive(minidl_flag *mine, uint64_t phase)
    int minidl_await(const minidl_flag *flags, int size, uint64_t phase, int spins)
    int minidl_same_call(const minidl_flag *flags, int size, int parity)
    int minidl_same_place(const minidl_flag *flags, int size, int parity)
    void minidl_sum_float32(void *, const void *const *, int, Py_ssize_t) noexcept
    void minidl_sum_float64(void *, const void *const *, int, Py_ssize_t) noexcept
    void minidl_sum_int32(void *, const void *const *, int, Py_ssize_t) noexcept
    void minidl_sum_int64(void *, const void *const *, int, Py_ssize_t) noexcept
    void minidl_sum_bfloat16(void *, const void *const *, int, Py_ssize_t) noexcept

cdef enum:
    MOST_RANKS = 1024
    PAGE = 4096
    BLOCK_DOUBLES = 1024  # 8 KiB, which stay in the first cache
    LINE = 64  # bytes: no two ranks write into one cache line

PAGE_BYTES = PAGE
SUMMABLE = ("float32", "float64", "int32", "int64", "bfloat16")
cdef minidl_sum[5] SUMS = [
    minidl_sum_float32, minidl_sum_float64, minidl_sum_int32, minidl_sum_int64, minidl_sum_bfloat16
]


class Mismatch(RuntimeError):
    """The ranks of a channel are at different calls: ``calls`` has the (code, number, name) of each, in rank order."""

    def __init__(self, calls):
        super().__init__("ranks make different calls")
        self.calls = calls


def channel_bytes(int size, Py_ssize_t chunk):
    """Bytes of shared memory that a `Channel` needs."""
    return size * PAGE + (2 * size + 2) * chunk


def parts(int rank, int size, Py_ssize_t chunk):
    """The (start, length) of what a rank writes, which should lie near it; rank 0's includes the sums."""
    own = [(rank * PAGE, PAGE), (size * PAGE + 2 * rank * chunk, 2 * chunk)]
    return own if rank else [*own, (size * PAGE + 2 * size * chunk, 2 * chunk)]


def add_rows(cnp.ndarray rows, cnp.ndarray out, int kind):
    """``out`` = the sum of the two or more ``rows``, in their order and as channels add; both dense."""
    cdef const void *inputs[MOST_RANKS]
    cdef Py_ssize_t n = cnp.PyArray_SIZE(out), row
    cdef int count = rows.shape[0]
    assert 2 <= count <= MOST_RANKS and cnp.PyArray_SIZE(rows) == count * n
    for row in range(count):
        inputs[row] = <char *>cnp.PyArray_DATA(rows) + row * cnp.PyArray_NBYTES(out)
    with nogil:
        SUMS[kind](cnp.PyArray_DATA(out), inputs, count, n)


cdef class Channel:
    """One rank's end of a piece of shared memory.

    Args:
        memory: writeable buffer of at least `channel_bytes` bytes, zero at first, shared by all ranks.
        rank, size: this rank among those that share it.
        chunk: bytes that travel at once, a multiple of the page.
        spins: times that a wait looks at a flag before it gives its core to others.
        direct: largest number of bytes that every rank adds up by itself, where it saves a phase; with two ranks all.
    """

    cdef unsigned char[::1] memory
    cdef minidl_flag *flags
    cdef char *slots
    cdef char *results
    cdef readonly int rank, size
    cdef readonly Py_ssize_t chunk, direct
    cdef int spins
    cdef uint64_t phase
    cdef readonly bint broken

    def __init__(self, unsigned char[::1] memory, int rank, int size, Py_ssize_t chunk, int spins, Py_ssize_t direct):
        assert chunk % PAGE == 0 and memory.shape[0] >= channel_bytes(size, chunk) and 2 <= size <= MOST_RANKS
        self.memory = memory
        self.flags = <minidl_flag *>&memory[0]
        self.slots = <char *>&memory[0] + size * PAGE
        self.results = self.slots + 2 * size * chunk
        self.rank, self.size, self.chunk, self.spins, self.direct = rank, size, chunk, spins, direct
        self.phase = 0
        self.broken = False

    def all_reduce(self, cnp.ndarray array, int kind, uint64_t code, uint64_t number, bytes name):
        """Replace ``array`` (dense, of dtype SUMMABLE[kind]) by the sum over all ranks, added in rank order.

        Raises:
            Mismatch: on all ranks, when they are at different calls.
        """
        self.begin(code, number, name)
        with nogil:
            self.sum_copied(
                <char *>cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array), cnp.PyArray_ITEMSIZE(array), SUMS[kind], True
            )
        self.broken = False

    def all_reduce_placed(
        self, cnp.ndarray array, const uint64_t[::1] bases, Py_ssize_t offset, int kind, uint64_t code, uint64_t number,
        bytes name,
    ):
        """`all_reduce` of arrays that lie in a region which all ranks see: nothing is copied.

        Args:
            bases: addresses of the ranks' parts of the region.
            offset: of the array in this rank's part. Where the others' differ, sums go as in `all_reduce`.
        """
        cdef Py_ssize_t n = cnp.PyArray_NBYTES(array), itemsize = cnp.PyArray_ITEMSIZE(array)
        cdef char *data = <char *>cnp.PyArray_DATA(array)
        self.begin(code, number, name, <uint64_t>offset + 1)
        with nogil:
            self.meet(True)
            self.phase += 1
            if minidl_same_place(self.flags, self.size, (self.phase - 1) & 1):
                self.sum_placed(&bases[0], offset, n, itemsize, SUMS[kind])
                self.meet(False)
            else:
                self.sum_copied(data, n, itemsize, SUMS[kind], False)
        self.broken = False

    def reduce_part(self, cnp.ndarray part, int kind, uint64_t code, uint64_t number, bytes name):
        """First half of an all-reduce of at most one chunk: this rank's share of the sum, as shared bytes."""
        cdef minidl_sum function = SUMS[kind]
        cdef Py_ssize_t itemsize = cnp.PyArray_ITEMSIZE(part), n = cnp.PyArray_NBYTES(part)
        assert n <= self.chunk
        self.begin(code, number, name)
        with nogil:
            memcpy(self.slot(self.phase & 1, self.rank), cnp.PyArray_DATA(part), n)
            self.meet(True)
            self.add_slice(self.phase & 1, n, itemsize, function)
        self.broken = False
        begin, end = self.slice_of(self.rank, n)
        start = self.sums(self.phase & 1) - <char *>&self.memory[0]
        return self.memory[start + begin:start + end]

    def collect_part(self, cnp.ndarray part):
        """Second half of `reduce_part`: overwrite ``part`` by the shares of all ranks."""
        self.broken = True
        with nogil:
            self.phase += 1
            self.meet(False)
            memcpy(cnp.PyArray_DATA(part), self.sums((self.phase - 1) & 1), cnp.PyArray_NBYTES(part))
        self.broken = False

    def all_gather(self, cnp.ndarray array, cnp.ndarray out, uint64_t code, uint64_t number, bytes name):
        """Fill ``out`` (size, ...) with the bytes of all ranks' arrays."""
        cdef Py_ssize_t n = cnp.PyArray_NBYTES(array), first = 0, m
        cdef char *source = <char *>cnp.PyArray_DATA(array)
        cdef char *target = <char *>cnp.PyArray_DATA(out)
        cdef int other
        self.begin(code, number, name)
        with nogil:
            while True:
                m = min(self.chunk, n - first)
                memcpy(self.slot(self.phase & 1, self.rank), source + first, m)
                self.meet(first == 0)
                for other in range(self.size):
                    memcpy(target + other * n + first, self.slot(self.phase & 1, other), m)
                first += m
                if first >= n:
                    break
                self.phase += 1
        self.broken = False

    def broadcast(self, cnp.ndarray array, int root, uint64_t code, uint64_t number, bytes name):
        """Overwrite ``array`` by the bytes of rank ``root``'s."""
        cdef Py_ssize_t n = cnp.PyArray_NBYTES(array), first = 0, m
        cdef char *data = <char *>cnp.PyArray_DATA(array)
        self.begin(code, number, name)
        with nogil:
            while True:
                m = min(self.chunk, n - first)
                if self.rank == root:
                    memcpy(self.slot(self.phase & 1, root), data + first, m)
                self.meet(first == 0)
                if self.rank != root:
                    memcpy(data + first, self.slot(self.phase & 1, root), m)
                first += m
                if first >= n:
                    break
                self.phase += 1
        self.broken = False

    def barrier(self, uint64_t code, uint64_t number):
        """Return when all ranks have come this far."""
        self.begin(code, number, b"")
        with nogil:
            self.meet(True)
        self.broken = False

    # -- phases -------------------------------------------------------------------------------------------------------

    cdef begin(self, uint64_t code, uint64_t number, bytes name, uint64_t place=0):
        """Enter the first phase of a call and note which."""
        if self.broken:
            raise RuntimeError("an earlier call on this channel was interrupted")
        self.broken = True  # until the call is through
        self.phase += 1
        cdef minidl_call *call = &self.flags[self.rank].call[self.phase & 1]
        cdef Py_ssize_t length = min(len(name), NAME_BYTES)
        call.code, call.place, call.number = code, place, number
        memset(call.name, 0, NAME_BYTES)
        memcpy(call.name, <const char *>name, length)

    cdef int meet(self, bint first) except -1 nogil:
        """Arrive and wait for all; in the ``first`` phase of a call, make sure that it is the same everywhere."""
        cdef int spins = self.spins
        minidl_arrive(&self.flags[self.rank], self.phase)
        while minidl_await(self.flags, self.size, self.phase, spins):
            spins = 0
            with gil:
                PyErr_CheckSignals()
        if first and not minidl_same_call(self.flags, self.size, self.phase & 1):
            with gil:
                raise Mismatch(self.calls())
        return 0

    cdef list calls(self):
        cdef minidl_call *call
        cdef int other
        told = []
        for other in range(self.size):
            call = &self.flags[other].call[self.phase & 1]
            told.append((call.code, call.number, call.name[:NAME_BYTES].rstrip(b"\0")))
        return told

    # -- sums ---------------------------------------------------------------------------------------------------------

    cdef char *slot(self, int parity, int rank) noexcept nogil:
        return self.slots + (2 * rank + parity) * self.chunk

    cdef char *sums(self, int parity) noexcept nogil:
        return self.results + parity * self.chunk

    cdef Py_ssize_t length(self, Py_ssize_t k, Py_ssize_t n) noexcept nogil:
        """Bytes of chunk ``k`` of an array of ``n``."""
        return min(self.chunk, n - k * self.chunk)

    cdef (Py_ssize_t, Py_ssize_t) slice_of(self, int rank, Py_ssize_t n) noexcept nogil:
        """The bytes of a chunk of ``n`` that ``rank`` adds up."""
        cdef Py_ssize_t each = ((n + self.size - 1) // self.size + LINE - 1) // LINE * LINE
        return min(rank * each, n), min((rank + 1) * each, n)

    cdef int add(
        self, int parity, Py_ssize_t first, Py_ssize_t last, Py_ssize_t itemsize, minidl_sum function, char *out
    ) except -1 nogil:
        """Add up bytes ``first`` to ``last`` of all slots into ``out``."""
        cdef const void *inputs[MOST_RANKS]
        cdef int other
        for other in range(self.size):
            inputs[other] = self.slot(parity, other) + first
        function(out, inputs, self.size, (last - first) // itemsize)
        return 0

    cdef int add_slice(
        self, int parity, Py_ssize_t n, Py_ssize_t itemsize, minidl_sum function
    ) except -1 nogil:
        """Add up this rank's slice of a chunk of ``n`` bytes from the slots into the result."""
        cdef (Py_ssize_t, Py_ssize_t) mine = self.slice_of(self.rank, n)
        return self.add(parity, mine[0], mine[1], itemsize, function, self.sums(parity) + mine[0])

    cdef int sum_copied(
        self, char *data, Py_ssize_t n, Py_ssize_t itemsize, minidl_sum function, bint opening
    ) except -1 nogil:
        """Through the slots; ``opening``: with the first phase of the call."""
        cdef bint again
        if self.size == 2 or n <= self.direct:
            again = self.sum_all(data, n, itemsize, function, opening)
        else:
            again = self.sum_slices(data, n, itemsize, function, opening)
        if again:
            self.phase += 1
            self.sum_copied(data, n, itemsize, function, False)
        return 0

    cdef bint scattered(self) noexcept nogil:
        """Whether arrays of this call lie in a region on some ranks, which start afresh when they learn it."""
        return not minidl_same_place(self.flags, self.size, self.phase & 1)

    cdef int sum_placed(
        self, const uint64_t *bases, Py_ssize_t offset, Py_ssize_t n, Py_ssize_t itemsize, minidl_sum function
    ) except -1 nogil:
        """Add up this rank's slice, block by block, and write it to all ranks."""
        cdef const void *inputs[MOST_RANKS]
        cdef double block[BLOCK_DOUBLES]
        cdef Py_ssize_t first, m
        cdef (Py_ssize_t, Py_ssize_t) mine = self.slice_of(self.rank, n)
        cdef int other
        first = mine[0]
        while first < mine[1]:
            m = min(<Py_ssize_t>sizeof(block), mine[1] - first)
            for other in range(self.size):
                inputs[other] = <char *>bases[other] + offset + first
            function(block, inputs, self.size, m // itemsize)
            for other in range(self.size):
                memcpy(<char *>bases[other] + offset + first, block, m)
            first += m
        return 0

    cdef int sum_all(
        self, char *data, Py_ssize_t n, Py_ssize_t itemsize, minidl_sum function, bint opening
    ) except -1 nogil:
        """Every rank adds up everything: one phase for each chunk. Returns 1 where it has to be done again."""
        cdef Py_ssize_t first = 0, m
        while True:
            m = min(self.chunk, n - first)
            memcpy(self.slot(self.phase & 1, self.rank), data + first, m)
            self.meet(opening and first == 0)
            if opening and first == 0 and self.scattered():
                return 1
            self.add(self.phase & 1, 0, m, itemsize, function, data + first)
            first += m
            if first >= n:
                return 0
            self.phase += 1

    cdef int sum_slices(
        self, char *data, Py_ssize_t n, Py_ssize_t itemsize, minidl_sum function, bint opening
    ) except -1 nogil:
        """Each rank adds up its slice. Within a phase: a chunk into the slot, the sum of the last, the last but one out.

        The sum of a chunk is written in the phase after its slots, and read in the phase after that. Returns 1 where it
        has to be done again.
        """
        cdef Py_ssize_t chunks = (n + self.chunk - 1) // self.chunk, k
        cdef uint64_t start = self.phase
        for k in range(chunks + 2):
            # Chunk j uses the slots and the result of parity start + j.
            if k < chunks:
                memcpy(self.slot((start + k) & 1, self.rank), data + k * self.chunk, self.length(k, n))
            if 0 < k <= chunks:
                self.add_slice((start + k - 1) & 1, self.length(k - 1, n), itemsize, function)
            if k > 1:
                memcpy(data + (k - 2) * self.chunk, self.sums((start + k) & 1), self.length(k - 2, n))
            if k <= chunks:
                self.phase = start + k
                self.meet(opening and k == 0)
            if opening and k == 0 and self.scattered():
                return 1
        return 0
