# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Products with matrices in Compressed Sparse Blocks: packs the dense operand and spreads blocks over threads."""

from cython.parallel cimport prange, threadid
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, uint16_t
from libc.stdlib cimport free, malloc

cdef extern from "_csb.h" nogil:
    enum: CSB_DEPTH, CSB_STREAM
    int MINIDL_HAS_AVX512
    ctypedef struct CsbMatrix:
        const int32_t *indptr
        const uint16_t *indices
        const float *values
        ptrdiff_t rows, columns, side, block_rows, block_columns
    ctypedef struct CsbScratch:
        uint16_t *items
        float *values
        float *outputs
    ctypedef struct CsbProduct:
        CsbMatrix a
        int transposed, features_last, relu, avx512
        ptrdiff_t features, taps, lanes, pitch
        const float *bias
        float *y
    ctypedef struct CsbAxis:
        ptrdiff_t size, grid, taps, multiply, start, step, divide
    ctypedef struct CsbWindow:
        CsbAxis down, across
        ptrdiff_t pitch, channels, room
        const float *zeros
    void minidl_csb_gather(
        const float *x, const CsbWindow *w, ptrdiff_t sample, ptrdiff_t samples, ptrdiff_t lanes, float *to)
    void minidl_csb_pack(
        const float *x, ptrdiff_t pitch, int features_last, ptrdiff_t samples, ptrdiff_t lanes, ptrdiff_t first,
        ptrdiff_t last, ptrdiff_t tile, float *to)
    void minidl_csb_product(
        const CsbProduct *p, const float *x, ptrdiff_t step, ptrdiff_t tile, ptrdiff_t block, ptrdiff_t first,
        ptrdiff_t last, ptrdiff_t sample, ptrdiff_t total, CsbScratch *scratch)
    void minidl_csb_sampled(
        const CsbMatrix *a, const float *dy, const float *x, ptrdiff_t depth, ptrdiff_t tiles, ptrdiff_t at, int first,
        float *out)

cdef extern from "stdlib.h" nogil:
    void *aligned_alloc(size_t alignment, size_t size)

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #else
    #define omp_get_max_threads() 1
    #endif
    """
    int omp_get_max_threads() nogil

DEPTH = CSB_DEPTH  # samples that a sampled product's tile holds, at most
STREAM = CSB_STREAM  # lanes up to which a product's samples must lie as packed

cdef ptrdiff_t STRIP = 256  # features of a packing task
cdef ptrdiff_t PIECE = 8  # tiles that share one decoding of a block, or one packing
cdef bint avx512 = MINIDL_HAS_AVX512


def max_threads():
    """Threads that a parallel loop may use: the cores, unless OMP_NUM_THREADS or a runtime says less."""
    return omp_get_max_threads()


def take_avx512(bint wanted):
    """Whether single samples run on AVX-512 from now on: where it is there and ``wanted``. For laws of either way."""
    global avx512
    avx512 = wanted and MINIDL_HAS_AVX512
    return avx512


cdef CsbMatrix matrix(const int32_t[::1] indptr, const uint16_t[::1] indices, tuple shape, ptrdiff_t side):
    cdef CsbMatrix a
    a.indptr, a.indices, a.values = &indptr[0], &indices[0] if indices.shape[0] else NULL, NULL
    a.rows, a.columns = shape
    a.side = side
    a.block_rows, a.block_columns = (a.rows + side - 1) // side, (a.columns + side - 1) // side
    return a


cdef void pack(
    const float *x, ptrdiff_t pitch, bint features_last, ptrdiff_t features, ptrdiff_t samples, ptrdiff_t lanes,
    float *to, int threads
) noexcept nogil:
    """All ``samples`` samples from x on, as [tile][feature][lanes]."""
    cdef ptrdiff_t strips = (features + STRIP - 1) // STRIP, some = PIECE * lanes, task, sample, first
    for task in prange((samples + some - 1) // some * strips, schedule="static", num_threads=threads):
        sample = task // strips * some
        first = task % strips * STRIP
        minidl_csb_pack(
            x + sample * (pitch if features_last else 1), pitch, features_last, min(some, samples - sample), lanes,
            first, min(first + STRIP, features), features * lanes, to + sample * features
        )


cdef CsbAxis axis(tuple numbers):
    cdef CsbAxis a
    a.size, a.grid, a.taps, a.multiply, a.start, a.step, a.divide = numbers
    return a


cdef CsbWindow window(tuple axes, ptrdiff_t pitch, ptrdiff_t channels, ptrdiff_t room, const float[::1] zeros):
    cdef CsbWindow w
    w.down, w.across = axis(axes[0]), axis(axes[1])
    w.pitch, w.channels, w.room = pitch, channels, room
    w.zeros = &zeros[0]
    return w


cdef void gather(
    const float *x, const CsbWindow *w, ptrdiff_t sample, ptrdiff_t end, ptrdiff_t lanes, ptrdiff_t features,
    float *to, int threads
) noexcept nogil:
    """Samples ``sample`` to ``end`` of a convolution, as [tile][feature][lanes]."""
    cdef ptrdiff_t tile
    for tile in prange((end - sample + lanes - 1) // lanes, schedule="static", num_threads=threads):
        minidl_csb_gather(x, w, sample + tile * lanes, end, lanes, to + tile * features * lanes)


cdef CsbScratch *scratches(int threads, ptrdiff_t outputs, ptrdiff_t items) except NULL:
    """One for each thread; `release` frees them."""
    cdef CsbScratch *all = <CsbScratch *>malloc(threads * sizeof(CsbScratch))
    cdef size_t size = outputs * sizeof(float) + items * (sizeof(float) + sizeof(uint16_t))
    cdef int i
    if all == NULL:
        raise MemoryError
    for i in range(threads):
        # Vectors that straddle two cache lines load at half speed.
        all[i].outputs = <float *>aligned_alloc(64, (size + 63) // 64 * 64)
        if all[i].outputs == NULL:
            release(all, i)
            raise MemoryError
        all[i].values = all[i].outputs + outputs
        all[i].items = <uint16_t *>(all[i].values + items)
    return all


cdef void release(CsbScratch *all, int threads) noexcept:
    cdef int i
    for i in range(threads):
        free(all[i].outputs)
    free(all)


cdef void multiply(
    const CsbProduct *p, const float *x, ptrdiff_t step, ptrdiff_t tile, ptrdiff_t blocks, ptrdiff_t sample,
    ptrdiff_t end, CsbScratch *scratch, int threads
) noexcept nogil:
    """All outputs of samples ``sample`` to ``end``, whose tiles lie ``tile`` apart and their features ``step``."""
    cdef ptrdiff_t tiles = (end - sample + p.lanes - 1) // p.lanes, pieces, task
    # Pieces as large as a scratch holds, unless some threads would then have nothing to do.
    cdef ptrdiff_t piece = max(1, min(PIECE, tiles * blocks // (4 * threads)))
    pieces = (tiles + piece - 1) // piece
    for task in prange(blocks * pieces, schedule="dynamic", num_threads=threads):
        minidl_csb_product(
            p, x, step, tile, task // pieces, task % pieces * piece, min((task % pieces + 1) * piece, tiles), sample,
            end, &scratch[threadid()]
        )


def product(
    const int32_t[::1] indptr, const uint16_t[::1] indices, const float[::1] values, tuple shape, ptrdiff_t side,
    const float[:, :] x, bint transposed, bint features_last, const float[::1] bias, bint relu,
    ptrdiff_t lanes, bint direct, float[::1] packed, float[:, ::1] y, int threads, tuple axes=None,
    const float[::1] zeros=None
):
    """y = A x (or transposed), for x and y (features, samples), or (samples, features) with features_last.

    ``axes``: of a convolution, the numbers of a CsbAxis down and across: then x and y are pixels; ``zeros``: as many as
    x has channels.

    ``packed`` has room for some whole tiles of ``lanes`` samples, which are packed unless ``direct``: then whole tiles
    are read where they are, features first or a single sample.
    """
    cdef CsbProduct p
    p.a = matrix(indptr, indices, shape, side)
    p.a.values = &values[0] if values.shape[0] else NULL
    p.transposed, p.features_last, p.relu, p.avx512, p.lanes = transposed, features_last, relu, avx512, lanes
    p.bias = &bias[0] if bias is not None else NULL
    p.y, p.pitch = &y[0, 0], y.shape[1]
    cdef CsbWindow w
    p.taps = axes[0][2] * axes[1][2] if axes is not None else 1
    p.features = y.shape[1] if features_last else y.shape[0]
    cdef ptrdiff_t features = p.taps * p.a.rows if transposed else p.a.columns
    cdef ptrdiff_t blocks = p.a.block_columns // p.taps if transposed else p.a.block_rows
    cdef ptrdiff_t samples = y.shape[0] if features_last else y.shape[1], sample = 0, count
    cdef ptrdiff_t pitch = x.strides[0] // <ptrdiff_t>sizeof(float), step = 1 if features_last else pitch
    cdef ptrdiff_t chunk = packed.shape[0] // max(features, 1) // lanes * lanes
    cdef const float *data = &x[0, 0] if features else NULL
    cdef ptrdiff_t fullest = 0, block  # nonzeros of a block that are sorted
    if transposed and lanes > CSB_STREAM:
        for block in range(indptr.shape[0] - 1):
            fullest = max(fullest, indptr[block + 1] - indptr[block])
    cdef CsbScratch *scratch = scratches(threads, PIECE * side * lanes, fullest)
    cdef bint gathered = axes is not None
    if gathered:
        w = window(axes, pitch, x.shape[1], features // p.taps, zeros)
    with nogil:
        if direct:
            sample = samples // lanes * lanes
            multiply(&p, data, step, lanes, blocks, 0, sample, scratch, threads)
        while sample < samples:
            count = min(chunk, samples - sample)
            if gathered:
                gather(data, &w, sample, sample + count, lanes, features, &packed[0], threads)
            elif features:
                pack(data + sample * (pitch if features_last else 1), pitch, features_last, features, count, lanes,
                     &packed[0], threads)
            multiply(&p, &packed[0], lanes, features * lanes, blocks, sample, sample + count, scratch, threads)
            sample += count
    release(scratch, threads)


def sampled(
    const int32_t[::1] indptr, const uint16_t[::1] indices, tuple shape, ptrdiff_t side, const float[:, :] dy,
    const float[:, :] x, bint features_last, ptrdiff_t depth, float[::1] packed, bint accumulate, float[::1] out,
    int threads, tuple axes=None, const float[::1] zeros=None
):
    """out[i] (+)= sum over samples of dy[row of i] x[column of i], for the nonzeros i of the pattern.

    ``axes``, ``zeros``: as in `product`, of x.
    """
    cdef CsbMatrix a = matrix(indptr, indices, shape, side)
    cdef ptrdiff_t samples = dy.shape[0] if features_last else dy.shape[1]
    cdef ptrdiff_t left = dy.strides[0] // <ptrdiff_t>sizeof(float), right = x.strides[0] // <ptrdiff_t>sizeof(float)
    cdef ptrdiff_t chunk = packed.shape[0] // (a.rows + a.columns) // depth * depth
    cdef ptrdiff_t sample, count, tiles, task
    cdef float *second = &packed[0] + chunk * a.rows
    cdef CsbWindow w
    cdef bint gathered = axes is not None
    if gathered:
        w = window(axes, right, x.shape[1], a.columns // (axes[0][2] * axes[1][2]), zeros)
    for sample in range(0, samples, chunk):
        count = min(chunk, samples - sample)
        tiles = (count + depth - 1) // depth
        with nogil:
            pack(&dy[0, 0] + sample * (left if features_last else 1), left, features_last, a.rows, count, depth,
                 &packed[0], threads)
            if gathered:
                gather(&x[0, 0], &w, sample, sample + count, depth, a.columns, second, threads)
            else:
                pack(&x[0, 0] + sample * (right if features_last else 1), right, features_last, a.columns, count,
                     depth, second, threads)
            for task in prange(a.block_rows * a.block_columns, schedule="dynamic", num_threads=threads):
                minidl_csb_sampled(&a, &packed[0], second, depth, tiles, task, not accumulate and sample == 0, &out[0])
