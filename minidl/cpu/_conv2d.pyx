# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Runs the convolution kernels of `_conv2d.h`: fills their records and spreads their tasks over threads.

Arrays come as NumPy arrays with unit channel stride; what goes into the records is planned in `conv2d_plan.py`.
"""

cimport numpy as cnp
from cython.parallel cimport prange, threadid
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc

from minidl.precision import bfloat16, float16, float32

cnp.import_array()


cdef extern from "_conv2d.h" nogil:
    enum: LANES, FLOAT32, BFLOAT16, FLOAT16
    ctypedef struct Conv2dTensor:
        char *data
        int64_t dtype, image, row, pixel
    ctypedef struct Conv2dWindow:
        Conv2dTensor source
        int64_t height, width, top, left, step_y, step_x, span_y, phase, total, channels, blocks
        int64_t fold, fold_step, line
    ctypedef struct Conv2dClass:
        int64_t row, col, rows, cols, taps
        const int64_t *offsets
        const int64_t *tap_rows
        const float *weights
    ctypedef struct Conv2dApply:
        Conv2dWindow window
        Conv2dTensor out, add
        const float *bias
        int64_t depthwise, out_step_y, out_step_x, out_total, out_channels, out_blocks, all_blocks
        int64_t images, images_per_task, rows, rows_per_task, row_blocks, splits, class_count
        const Conv2dClass *classes
    ctypedef struct Conv2dReduce:
        Conv2dWindow window
        Conv2dTensor grad
        int64_t depthwise, out_total, out_channels, out_blocks, all_blocks
        int64_t images, images_per_unit, rows, cols, rows_per_unit, row_blocks, units, chunks, splits, taps
        const int64_t *offsets
        const int64_t *tap_rows
        const int64_t *tap_cols
        float *partial
    ctypedef struct Conv2dFilter:
        int64_t out_stride, in_stride, group_stride, taps
        const int64_t *positions
    ctypedef struct Conv2dKernels:
        const char *name
        int64_t width
        void (*apply)(const Conv2dApply *, int64_t, float *) noexcept nogil
        void (*reduce)(const Conv2dReduce *, int64_t, float *) noexcept nogil
        void (*channel_sum)(const char *, int64_t, int64_t, int64_t, int64_t, double *) noexcept nogil
    const Conv2dKernels *conv2d_kernels(int)
    int conv2d_max_threads()
    void conv2d_pack_filter(
        const Conv2dFilter *, const char *, int64_t, int64_t, int64_t, int64_t, float *) noexcept nogil
    void conv2d_unpack_filter(
        const Conv2dFilter *, float *, int64_t, int64_t, int64_t, int64_t, int64_t, float *, int) noexcept nogil


cdef const Conv2dKernels *kernels = conv2d_kernels(0)
cdef dict DTYPES = {float32: FLOAT32, bfloat16: BFLOAT16, float16: FLOAT16}


def instruction_sets():
    """Names of the kernel sets that this processor can run, best first."""
    cdef int i = 0
    names = []
    while conv2d_kernels(i) != NULL:
        names.append(conv2d_kernels(i).name.decode())
        i += 1
    return names


def use_instruction_set(name):
    """Run these kernels from now on (the best are chosen at import)."""
    global kernels
    kernels = conv2d_kernels(instruction_sets().index(name))


def block_width():
    """Output channels that a kernel computes at a time."""
    return kernels.width


def max_threads():
    """Threads that a parallel loop may use: the cores, unless OMP_NUM_THREADS or a runtime says less."""
    return conv2d_max_threads()


cdef inline float *aligned(cnp.ndarray array) noexcept:
    """The first 64-byte boundary in a float32 array: vectors that straddle two cache lines load at half speed."""
    return <float *>((<uintptr_t>cnp.PyArray_DATA(array) + 63) & ~<uintptr_t>63)


cdef Conv2dTensor tensor(cnp.ndarray array) except *:
    """The record of an (N, H, W, C) array with unit channel stride; zeros and NULL for None."""
    cdef Conv2dTensor t
    cdef cnp.npy_intp size
    t.data, t.dtype, t.image, t.row, t.pixel = NULL, FLOAT32, 0, 0, 0
    if array is not None:
        assert array.ndim == 4
        size = array.itemsize
        assert array.shape[3] == 1 or array.strides[3] == size, "channels must lie side by side"
        t.data, t.dtype = <char *>cnp.PyArray_DATA(array), DTYPES[array.dtype]
        t.image, t.row, t.pixel = array.strides[0] // size, array.strides[1] // size, array.strides[2] // size
    return t


cdef Conv2dWindow window(plan, cnp.ndarray source) except *:
    cdef Conv2dWindow w
    w.source = tensor(source)
    w.height, w.width = source.shape[1], source.shape[2]
    w.top, w.left, w.step_y, w.step_x = plan.top, plan.left, plan.step_y, plan.step_x
    w.span_y, w.phase = plan.span_y, plan.phase
    w.total, w.channels, w.blocks = source.shape[3], plan.channels, plan.blocks
    w.fold, w.fold_step, w.line = plan.fold, plan.fold_step, plan.line_floats
    return w


cdef struct Filter:  # where the filters of one class of outputs lie in a KRSC array, and their packed copy
    Conv2dFilter record
    int64_t total, channels, blocks, inputs, width, depthwise
    float *packed


cdef Filter filter_of(plan, const int64_t[:, ::1] taps, float *packed) except *:
    """``taps`` is the plan's and lives as long."""
    cdef Filter f
    f.record.out_stride, f.record.in_stride = plan.filter_out_stride, plan.filter_in_stride
    f.record.group_stride = plan.filter_group_stride
    f.record.taps = taps.shape[1]
    f.record.positions = &taps[0, 0] if taps.shape[1] else NULL
    f.total, f.channels, f.depthwise = plan.out_total, plan.out_channels, plan.depthwise
    f.width, f.blocks = plan.width, plan.out_blocks
    f.inputs = 1 if f.depthwise else plan.channels
    f.packed = packed
    return f


cdef int64_t block_size(const Filter *f) noexcept nogil:
    return f.record.taps * f.inputs * f.width


cdef int64_t count_of(const Filter *f, int64_t block) noexcept nogil:
    """Output channels of a block."""
    cdef int64_t inside = block % f.blocks * f.width
    return min(f.width, f.channels - inside, f.total - block // f.blocks * f.channels - inside)


cdef int64_t lanes(const Filter *f, int64_t block) noexcept nogil:
    """Output channels of a block with those that fill up its last vector."""
    return f.width // 2 if not f.depthwise and 2 * count_of(f, block) <= f.width else f.width


cdef int64_t start(const Filter *f, int64_t block) noexcept nogil:
    """Position of a block's first filter."""
    return block // f.blocks * f.record.group_stride + block % f.blocks * f.width * f.record.out_stride


cdef void pack(const Filter *f, const char *filters, int64_t dtype, int64_t block) noexcept nogil:
    conv2d_pack_filter(
        &f.record, filters + start(f, block) * (4 if dtype == 0 else 2), dtype, f.inputs, count_of(f, block),
        lanes(f, block), f.packed + block * block_size(f))


cdef void unpack(
    const Filter *f, int64_t chunks, int64_t all_blocks, int64_t block, float *filters, bint accumulate
) noexcept nogil:
    conv2d_unpack_filter(
        &f.record, f.packed + block * block_size(f), chunks, all_blocks * block_size(f), f.inputs,
        count_of(f, block), lanes(f, block), filters + start(f, block), accumulate)


def apply(
    plan, tasks, cnp.ndarray source, cnp.ndarray filters, cnp.ndarray out, cnp.ndarray bias, cnp.ndarray add,
    cnp.ndarray packed, cnp.ndarray scratch,
):
    """out = convolution of source (+ bias) (+ add).

    filters: KRSC, dense, any storage dtype; bias: float32, padded by a block of zeros; packed and scratch
    (threads, floats): float32 work space.
    """
    cdef Conv2dApply p
    cdef Conv2dClass *classes
    cdef Filter *parts
    cdef const int64_t[:, ::1] taps
    cdef float *work = aligned(scratch)
    cdef float *weights = aligned(packed)
    cdef const char *data = <const char *>cnp.PyArray_DATA(filters)
    cdef int64_t pitch = scratch.shape[1], task, count = tasks.count
    cdef int64_t dtype = DTYPES[filters.dtype]
    cdef int threads = scratch.shape[0]
    p.window = window(plan, source)
    p.out, p.add = tensor(out), tensor(add)
    p.bias = <float *>cnp.PyArray_DATA(bias) if bias is not None else NULL
    p.depthwise, p.out_step_y, p.out_step_x = plan.depthwise, plan.out_step_y, plan.out_step_x
    p.out_total, p.out_channels = plan.out_total, plan.out_channels
    p.images, p.images_per_task = source.shape[0], tasks.images
    p.rows, p.rows_per_task, p.row_blocks = plan.rows, tasks.rows, tasks.row_blocks
    p.splits, p.class_count = tasks.splits, len(plan.classes)
    p.out_blocks, p.all_blocks = plan.out_blocks, plan.all_blocks
    classes = <Conv2dClass *>malloc(p.class_count * sizeof(Conv2dClass))
    parts = <Filter *>malloc(p.class_count * sizeof(Filter))
    try:
        if classes == NULL or parts == NULL:
            raise MemoryError
        for i, c in enumerate(plan.classes):
            taps = c.taps
            parts[i] = filter_of(plan, taps, weights)
            classes[i].row, classes[i].col, classes[i].rows, classes[i].cols = c.row, c.col, c.rows, c.cols
            classes[i].taps, classes[i].weights = taps.shape[1], weights
            if taps.shape[1]:
                classes[i].offsets, classes[i].tap_rows = &taps[1, 0], &taps[2, 0]
            weights += p.all_blocks * block_size(&parts[i])
        p.classes = classes
        # All classes in one loop: every loop waits for its last thread, which costs most where cores are shared.
        for task in prange(p.class_count * p.all_blocks, nogil=True, num_threads=threads):
            pack(&parts[task // p.all_blocks], data, dtype, task % p.all_blocks)
        for task in prange(count, nogil=True, schedule="dynamic", num_threads=threads):
            kernels.apply(&p, task, work + threadid() * pitch)
    finally:
        free(classes)
        free(parts)


def reduce(
    plan, units, cnp.ndarray source, cnp.ndarray grad, cnp.ndarray filters, cnp.ndarray partial, cnp.ndarray scratch,
    bint accumulate,
):
    """filters (+)= gradient of the filters: sums over chunks of units of outputs, added up in the chunks' order."""
    cdef Conv2dReduce p
    cdef const int64_t[:, ::1] taps = plan.classes[0].taps
    cdef Filter f = filter_of(plan, taps, aligned(partial))
    cdef float *work = aligned(scratch)
    cdef float *target = <float *>cnp.PyArray_DATA(filters)
    cdef int64_t pitch = scratch.shape[1], task
    cdef int threads = scratch.shape[0]
    p.window = window(plan, source)
    p.grad = tensor(grad)
    p.depthwise, p.out_total, p.out_channels = plan.depthwise, plan.out_total, plan.out_channels
    p.out_blocks, p.all_blocks = f.blocks, plan.all_blocks
    p.images, p.images_per_unit = grad.shape[0], units.images
    p.rows, p.cols = grad.shape[1], grad.shape[2]
    p.rows_per_unit, p.row_blocks = units.rows, units.row_blocks
    p.units, p.chunks, p.splits = units.count, units.chunks, units.splits
    p.taps = f.record.taps
    if p.taps:
        p.offsets, p.tap_rows, p.tap_cols = &taps[1, 0], &taps[2, 0], &taps[3, 0]
    p.partial = f.packed
    for task in prange(p.chunks * p.splits, nogil=True, schedule="dynamic", num_threads=threads):
        kernels.reduce(&p, task, work + threadid() * pitch)
    for task in prange(p.all_blocks, nogil=True, schedule="dynamic", num_threads=threads):
        unpack(&f, p.chunks, p.all_blocks, task, target, accumulate)


def channel_sum(cnp.ndarray rows, double[:, ::1] partial, int64_t block, int threads):
    """partial[i] += sum over the i-th block of rows; rows: (R, C), unit channel stride, any pitch."""
    cdef const char *data = <const char *>cnp.PyArray_DATA(rows)
    cdef int64_t size = rows.itemsize, pitch = rows.strides[0] // size, dtype = DTYPES[rows.dtype]
    cdef int64_t count = rows.shape[0], channels = rows.shape[1], i
    for i in prange(partial.shape[0], nogil=True, num_threads=threads):
        kernels.channel_sum(
            data + i * block * pitch * size, dtype, pitch, min(block, count - i * block), channels, &partial[i, 0])
