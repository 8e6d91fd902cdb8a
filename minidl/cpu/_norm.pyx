# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Group norm, layer norm and softmax over float32 rows of channels, with several threads.

Rows (r, c) of any pitch belong to samples of ``pixels`` rows; sums are taken over chunks of at most ``chunk`` rows of a
sample, so their bits do not depend on the number of threads.
"""

from cython.parallel cimport prange

cdef extern from "_norm.h" nogil:
    void minidl_moment_sums(
        const float *x, Py_ssize_t pitch, const float *pivot, Py_ssize_t rows, Py_ssize_t channels, double *first,
        double *second)
    void minidl_product_sums(
        const float *dy, Py_ssize_t dy_pitch, const float *x, Py_ssize_t x_pitch, const float *mean, Py_ssize_t rows,
        Py_ssize_t channels, float *first, float *second)
    void minidl_row_product_sums(
        const float *dy, Py_ssize_t dy_pitch, const float *x, Py_ssize_t x_pitch, const float *mean,
        const float *rstd, Py_ssize_t rows, Py_ssize_t channels, float *first, float *second)
    void minidl_affine_rows(
        const float *x, Py_ssize_t pitch, const float *mean, const float *scale, const float *shift, Py_ssize_t rows,
        Py_ssize_t channels, float *y)
    void minidl_norm_backward_rows(
        const float *dy, Py_ssize_t dy_pitch, const float *x, Py_ssize_t x_pitch, const float *mean,
        const float *slope, const float *first, const float *second, const float *add, Py_ssize_t add_pitch,
        Py_ssize_t rows, Py_ssize_t channels, float *dx)
    void minidl_softmax_row(const float *x, float *y, Py_ssize_t channels)
    void minidl_softmax_backward_row(const float *dy, const float *y, float *dx, Py_ssize_t channels)
    void minidl_layer_norm_row(
        const float *x, const float *gamma, const float *beta, float eps, float *mean, float *rstd, float *y,
        Py_ssize_t channels)
    void minidl_layer_norm_backward_row(
        const float *dy, const float *x, const float *gamma, float mean, float rstd, const float *add, float *dx,
        Py_ssize_t channels)

cdef Py_ssize_t SPAN = 16384  # elements per task of the elementwise loops, at least


cdef Py_ssize_t rows_per_task(Py_ssize_t channels) noexcept nogil:
    return max(SPAN // max(channels, 1), 1)


def moment_sums(const float[:, :] x, Py_ssize_t pixels, Py_ssize_t chunk, double[:, :, ::1] sums):
    """sums[task] = the sums of (x - p) and (x - p)^2 over a chunk whose first row is p; chunks of sample 0, 1, ..."""
    cdef Py_ssize_t tasks = sums.shape[0], channels = x.shape[1], pitch = x.strides[0] // 4, i, first
    cdef Py_ssize_t chunks = (pixels + chunk - 1) // chunk
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        first = i // chunks * pixels + i % chunks * chunk
        minidl_moment_sums(
            &x[first, 0], pitch, &x[first, 0], min(chunk, pixels - i % chunks * chunk), channels, &sums[i, 0, 0],
            &sums[i, 1, 0]
        )


def product_sums(
    const float[:, :] dy, const float[:, :] x, const float[:, ::1] mean, Py_ssize_t pixels, Py_ssize_t chunk,
    float[:, :, ::1] sums,
):
    """sums[task] = the sums of dy and dy * (x - mean of the sample) over a chunk."""
    cdef Py_ssize_t tasks = sums.shape[0], channels = x.shape[1], i, first
    cdef Py_ssize_t dy_pitch = dy.strides[0] // 4, x_pitch = x.strides[0] // 4
    cdef Py_ssize_t chunks = (pixels + chunk - 1) // chunk
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        first = i // chunks * pixels + i % chunks * chunk
        minidl_product_sums(
            &dy[first, 0], dy_pitch, &x[first, 0], x_pitch, &mean[i // chunks, 0],
            min(chunk, pixels - i % chunks * chunk), channels, &sums[i, 0, 0], &sums[i, 1, 0]
        )


def row_product_sums(
    const float[:, :] dy, const float[:, :] x, const float[:, ::1] moments, Py_ssize_t chunk, float[:, :, ::1] sums
):
    """sums[task] = the sums of dy and dy * (x - mean of the row) * rstd of the row over a chunk."""
    cdef Py_ssize_t tasks = sums.shape[0], channels = x.shape[1], rows = x.shape[0], i
    cdef Py_ssize_t dy_pitch = dy.strides[0] // 4, x_pitch = x.strides[0] // 4
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        minidl_row_product_sums(
            &dy[i * chunk, 0], dy_pitch, &x[i * chunk, 0], x_pitch, &moments[0, i * chunk], &moments[1, i * chunk],
            min(chunk, rows - i * chunk), channels, &sums[i, 0, 0], &sums[i, 1, 0]
        )


def affine_rows(
    const float[:, :] x, const float[:, ::1] mean, const float[:, ::1] scale, const float[:, ::1] shift,
    Py_ssize_t pixels, float[:, ::1] y,
):
    """y = (x - mean) * scale + shift, the three per sample and channel."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], pitch = x.strides[0] // 4, i, s
    cdef Py_ssize_t span = min(rows_per_task(channels), pixels), spans = (pixels + span - 1) // span
    cdef Py_ssize_t tasks = rows // pixels * spans, first
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        s = i // spans
        first = s * pixels + i % spans * span
        minidl_affine_rows(
            &x[first, 0], pitch, &mean[s, 0], &scale[s, 0], &shift[s, 0], min(span, pixels - i % spans * span),
            channels, &y[first, 0]
        )


def norm_backward_rows(
    const float[:, :] dy, const float[:, :] x, const float[:, ::1] mean, const float[:, ::1] slope,
    const float[:, ::1] first_sum, const float[:, ::1] second_sum, const float[:, :] add, Py_ssize_t pixels,
    float[:, ::1] dx,
):
    """dx = dy * slope - first_sum - (x - mean) * second_sum, values per sample and channel; plus ``add`` if given."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], i, s, first
    cdef Py_ssize_t dy_pitch = dy.strides[0] // 4, x_pitch = x.strides[0] // 4
    cdef bint has_add = add is not None
    cdef Py_ssize_t add_pitch = add.strides[0] // 4 if has_add else 0
    cdef Py_ssize_t span = min(rows_per_task(channels), pixels), spans = (pixels + span - 1) // span
    cdef Py_ssize_t tasks = rows // pixels * spans
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        s = i // spans
        first = s * pixels + i % spans * span
        minidl_norm_backward_rows(
            &dy[first, 0], dy_pitch, &x[first, 0], x_pitch, &mean[s, 0], &slope[s, 0], &first_sum[s, 0],
            &second_sum[s, 0], &add[first, 0] if has_add else NULL, add_pitch, min(span, pixels - i % spans * span),
            channels, &dx[first, 0]
        )


def softmax(const float[:, :] x, float[:, ::1] y):
    """y = softmax of each row."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], span = rows_per_task(channels), i, r
    cdef Py_ssize_t tasks = (rows + span - 1) // span
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        for r in range(i * span, min((i + 1) * span, rows)):
            minidl_softmax_row(&x[r, 0], &y[r, 0], channels)


def softmax_backward(const float[:, :] dy, const float[:, :] y, float[:, ::1] dx):
    """dx = y * (dy - sum of dy * y), row by row."""
    cdef Py_ssize_t rows = y.shape[0], channels = y.shape[1], span = rows_per_task(channels), i, r
    cdef Py_ssize_t tasks = (rows + span - 1) // span
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        for r in range(i * span, min((i + 1) * span, rows)):
            minidl_softmax_backward_row(&dy[r, 0], &y[r, 0], &dx[r, 0], channels)


def layer_norm(
    const float[:, :] x, const float[::1] gamma, const float[::1] beta, float eps, float[:, ::1] moments,
    float[:, ::1] y,
):
    """y = (x - mean) * rstd * gamma + beta, row by row; moments (2, rows) = mean, rstd. gamma, beta: may be None."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], span = rows_per_task(channels), i, r
    cdef Py_ssize_t tasks = (rows + span - 1) // span
    cdef const float *g = &gamma[0] if gamma is not None else NULL
    cdef const float *b = &beta[0] if beta is not None else NULL
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        for r in range(i * span, min((i + 1) * span, rows)):
            minidl_layer_norm_row(&x[r, 0], g, b, eps, &moments[0, r], &moments[1, r], &y[r, 0], channels)


def layer_norm_backward(
    const float[:, :] dy, const float[:, :] x, const float[::1] gamma, const float[:, ::1] moments,
    const float[:, :] add, float[:, ::1] dx,
):
    """The gradient of the input, plus ``add`` if given."""
    cdef Py_ssize_t rows = x.shape[0], channels = x.shape[1], span = rows_per_task(channels), i, r
    cdef Py_ssize_t tasks = (rows + span - 1) // span
    cdef bint has_add = add is not None
    cdef const float *g = &gamma[0] if gamma is not None else NULL
    for i in prange(tasks, nogil=True, schedule="static", use_threads_if=tasks > 1):
        for r in range(i * span, min((i + 1) * span, rows)):
            minidl_layer_norm_backward_row(
                &dy[r, 0], &x[r, 0], g, moments[0, r], moments[1, r], &add[r, 0] if has_add else NULL, &dx[r, 0],
                channels
            )
