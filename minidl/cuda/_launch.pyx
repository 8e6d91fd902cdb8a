# cython: language_level=3, boundscheck=False, wraparound=False
"""Kernel launches without CuPy's conversions: arguments are laid out here and go to the driver's cuLaunchKernelEx."""

cimport numpy as cnp
from libc.stdint cimport uintptr_t

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    bint PyArray_CheckScalar(object)
    void PyArray_ScalarAsCtype(object scalar, void *ctype)

# The driver's function and what it reads, as in its ABI: no header of the toolkit is needed to build.
cdef struct Attribute:  # CUlaunchAttribute
    int which
    int padding
    int value[16]

cdef struct Config:  # CUlaunchConfig
    unsigned int sizes[6]  # of the grid, of a block
    unsigned int shared
    void *stream
    const Attribute *attributes
    unsigned int count

ctypedef int (*LaunchKernel)(const Config *config, void *function, void **arguments, void **extra) noexcept nogil

cdef enum:
    MOST = 64  # arguments of a kernel
    WORDS = 2  # of 8 bytes, of the widest scalar
    OVERLAPPING = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

cdef Attribute _overlapping
_overlapping.which = OVERLAPPING
_overlapping.value[0] = 1


cdef class Kernel:
    """A loaded kernel and the dynamic shared memory that it has been granted so far.

    Args:
        name: for errors.
        module: whatever keeps the code loaded.
        function: the driver's handle (CUfunction).
        entry: address of cuLaunchKernelEx.
        waits: it calls await_predecessor() (common.cuh), so it may be started before its predecessor has ended.
    """

    cdef public unsigned int granted
    cdef readonly str name
    cdef readonly uintptr_t function
    cdef readonly bint waits
    cdef object _module
    cdef LaunchKernel _launch

    def __init__(self, str name, object module, uintptr_t function, uintptr_t entry, bint waits):
        self.name, self.function, self._module, self.granted, self.waits = name, function, module, 0, waits
        self._launch = <LaunchKernel>entry

    def start(self, tuple grid, tuple block, tuple args, unsigned int shared, uintptr_t stream, bint overlapping):
        """The driver's error code, 0 for a launch.

        Args:
            overlapping: a kernel that waits may begin while the one before it ends.
            args: arrays with ``data.ptr`` (their address), None (a null pointer), NumPy scalars and arrays (their
                bytes), or what gives such an array by ``argument()``.

        Raises:
            TypeError: for a plain Python number, whose width in C would be a guess.
        """
        cdef Config config
        cdef uintptr_t values[MOST][WORDS]
        cdef void *arguments[MOST]
        cdef Py_ssize_t i, count = len(args)
        cdef object argument, data
        cdef list kept = None
        cdef int code
        if count > MOST:
            raise ValueError(f"{self.name}: a kernel takes at most {MOST} arguments, got {count}")
        for i in range(3):
            config.sizes[i] = grid[i] if i < len(grid) else 1
            config.sizes[3 + i] = block[i] if i < len(block) else 1
        config.shared, config.stream = shared, <void *>stream
        config.attributes, config.count = &_overlapping, overlapping and self.waits
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
            code = self._launch(&config, <void *>self.function, arguments, NULL)
        return code


def plain_number(str name, argument):
    """The error for a plain number among the arguments of the kernel ``name``."""
    return TypeError(
        f"{name}: argument {argument!r} is a Python {type(argument).__name__}, whose width in C would be a guess; "
        "pass a NumPy scalar"
    )
