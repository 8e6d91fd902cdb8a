# cython: language_level=3, boundscheck=False, wraparound=False
"""Kernel launches without CuPy's conversions: arguments are laid out here and go to the driver's cuLaunchKernelEx."""

cimport numpy as cnp
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
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

    cdef int start(self, Config *config, tuple args) except -1:
        """The driver's error code, 0 for a launch."""
        cdef uintptr_t values[MOST][WORDS]
        cdef void *arguments[MOST]
        cdef Py_ssize_t i, count = len(args)
        cdef object argument, data
        cdef cnp.dtype kind
        cdef list kept = None
        cdef int code
        if count > MOST:
            raise ValueError(f"{self.name}: a kernel takes at most {MOST} arguments, got {count}")
        for i in range(count):
            argument = args[i]
            arguments[i] = &values[i][0]
            if argument is None:
                (<uintptr_t *>arguments[i])[0] = 0
            elif cnp.PyArray_Check(argument):
                arguments[i] = self._bytes(<cnp.ndarray>argument)
            elif PyArray_CheckScalar(argument):
                kind = cnp.PyArray_DescrFromScalar(argument)
                if cnp.PyTypeNum_ISEXTENDED(kind.type_num) or kind.itemsize > 8 * WORDS:
                    raise TypeError(
                        f"{self.name}: argument {argument!r} ({kind}) is no plain number; pass an array of it"
                    )
                PyArray_ScalarAsCtype(argument, arguments[i])
            elif isinstance(argument, (int, float, complex)):
                raise plain_number(self.name, argument)
            elif (data := getattr(argument, "data", None)) is not None:
                (<uintptr_t *>arguments[i])[0] = data.ptr
            else:
                data = argument.argument()
                kept = [data] if kept is None else [*kept, data]
                arguments[i] = self._bytes(<cnp.ndarray?>data)
        with nogil:
            code = self._launch(config, <void *>self.function, arguments, NULL)
        return code

    cdef void *_bytes(self, cnp.ndarray structure) except NULL:
        if not cnp.PyArray_IS_C_CONTIGUOUS(structure):
            raise TypeError(f"{self.name}: an argument of shape {(<object>structure).shape} does not lie in one piece")
        return cnp.PyArray_DATA(structure)


cdef class Kernels:
    """The kernels that are loaded, by device, file, name and macros.

    Args:
        attach: gives two functions, of which the first tells the current device's number, the second the current
            stream; called once, before the first launch.
        load: (device, file, name), macros -> the `Kernel`.
        grant: kernel, bytes: raises its limit of dynamic shared memory, and ``granted``.
    """

    cdef dict _loaded
    cdef object _attach, _load, _grant, _device, _stream

    def __init__(self, attach, load, grant):
        self._loaded, self._attach, self._load, self._grant = {}, attach, load, grant

    def start(
        self, str stem, str name, tuple grid, tuple block, tuple args, dict defines, unsigned int shared,
        bint overlapping,
    ):
        """Launch on the current stream; the driver's error code, 0 for a launch. An empty grid starts nothing.

        Args:
            args: arrays with ``data.ptr`` (their address), None (a null pointer), NumPy scalars and arrays (their
                bytes), or what gives such an array by ``argument()``.
            overlapping: a kernel that waits may begin while the one before it ends.

        Raises:
            TypeError: for a plain Python number, whose width in C would be a guess.
        """
        cdef Config config
        cdef Py_ssize_t i
        cdef Kernel kernel
        for i in range(3):
            config.sizes[i] = grid[i] if i < len(grid) else 1
            config.sizes[3 + i] = block[i] if i < len(block) else 1
            if config.sizes[i] == 0:
                return 0
        if self._device is None:
            self._device, self._stream = self._attach()
        device = self._device()
        key = _key(device, stem, name, defines)
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load((device, stem, name), defines)
        kernel = <Kernel?>found
        if shared > kernel.granted:
            self._grant(kernel, shared)
        config.shared, config.stream = shared, <void *><uintptr_t>self._stream().ptr
        config.attributes, config.count = &_overlapping, overlapping and kernel.waits
        return kernel.start(&config, args)


cdef tuple _key(device, str stem, str name, dict defines):
    """One flat tuple, which is made and hashed in half the time of pairs."""
    cdef Py_ssize_t position = 0, i = 3
    cdef PyObject *macro
    cdef PyObject *value
    cdef tuple key = PyTuple_New(3 + 2 * len(defines))
    Py_INCREF(device)
    PyTuple_SET_ITEM(key, 0, device)
    Py_INCREF(stem)
    PyTuple_SET_ITEM(key, 1, stem)
    Py_INCREF(name)
    PyTuple_SET_ITEM(key, 2, name)
    while PyDict_Next(defines, &position, &macro, &value):
        Py_INCREF(<object>macro)
        PyTuple_SET_ITEM(key, i, <object>macro)
        Py_INCREF(<object>value)
        PyTuple_SET_ITEM(key, i + 1, <object>value)
        i += 2
    return key


def plain_number(str name, argument):
    """The error for a plain number among the arguments of the kernel ``name``."""
    return TypeError(
        f"{name}: argument {argument!r} is a Python {type(argument).__name__}, whose width in C would be a guess; "
        "pass a NumPy scalar"
    )
