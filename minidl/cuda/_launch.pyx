# cython: language_level=3, boundscheck=False, wraparound=False
"""Kernel launches without CuPy's conversions: arguments are laid out here and go to the driver's cuLaunchKernel."""

cimport numpy as cnp
from libc.stdint cimport uintptr_t

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    bint PyArray_CheckScalar(object)
    void PyArray_ScalarAsCtype(object scalar, void *ctype)

# The driver's function, by its calling convention: no header of the toolkit is needed to build.
ctypedef int (*LaunchKernel)(
    void *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
    unsigned int block_y, unsigned int block_z, unsigned int shared, void *stream, void **arguments, void **extra
) noexcept nogil

cdef enum:
    MOST = 64  # arguments of a kernel
    WORDS = 2  # of 8 bytes, of the widest scalar


cdef class Kernel:
    """A loaded kernel and the dynamic shared memory that it has been granted so far.

    Args:
        name: for errors.
        module: whatever keeps the code loaded.
        function: the driver's handle (CUfunction).
        entry: address of cuLaunchKernel.
    """

    cdef public unsigned int granted
    cdef readonly str name
    cdef readonly uintptr_t function
    cdef object _module
    cdef LaunchKernel _launch

    def __init__(self, str name, object module, uintptr_t function, uintptr_t entry):
        self.name, self.function, self._module, self.granted = name, function, module, 0
        self._launch = <LaunchKernel>entry

    def start(self, tuple grid, tuple block, tuple args, unsigned int shared, uintptr_t stream):
        """The driver's error code, 0 for a launch.

        Args:
            args: arrays with ``data.ptr`` (their address), None (a null pointer), NumPy scalars and arrays (their
                bytes), or what gives such an array by ``argument()``.

        Raises:
            TypeError: for a plain Python number, whose width in C would be a guess.
        """
        cdef unsigned int sizes[6]
        cdef uintptr_t values[MOST][WORDS]
        cdef void *arguments[MOST]
        cdef Py_ssize_t i, count = len(args)
        cdef object argument, data
        cdef list kept = None
        cdef int code
        if count > MOST:
            raise ValueError(f"{self.name}: a kernel takes at most {MOST} arguments, got {count}")
        for i in range(3):
            sizes[i] = grid[i] if i < len(grid) else 1
            sizes[3 + i] = block[i] if i < len(block) else 1
        for i in range(count):
            argument = args[i]
            arguments[i] = &values[i][0]
            if argument is None:
                (<uintptr_t *>arguments[i])[0] = 0
            elif cnp.PyArray_Check(argument):
                arguments[i] = cnp.PyArray_DATA(<cnp.ndarray>argument)
            elif PyArray_CheckScalar(argument):
                PyArray_ScalarAsCtype(argument, arguments[i])
            elif isinstance(argument, (int, float, complex)):
                raise plain_number(self.name, argument)
            elif (data := getattr(argument, "data", None)) is not None:
                (<uintptr_t *>arguments[i])[0] = data.ptr
            else:
                data = argument.argument()
                kept = [data] if kept is None else [*kept, data]
                arguments[i] = cnp.PyArray_DATA(<cnp.ndarray?>data)
        with nogil:
            code = self._launch(
                <void *>self.function, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], shared,
                <void *>stream, arguments, NULL
            )
        return code


def plain_number(str name, argument):
    """The error for a plain number among the arguments of the kernel ``name``."""
    return TypeError(
        f"{name}: argument {argument!r} is a Python {type(argument).__name__}, whose width in C would be a guess; "
        "pass a NumPy scalar"
    )
