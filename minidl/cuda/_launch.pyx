# cython: language_level=3, boundscheck=False, wraparound=False
# Over 500 lines: what is called again reaches into the C structures of launches.
"""Kernel launches without CuPy's conversions: arguments are laid out here and go to the driver's cuLaunchKernelEx.

And calls of operations that are made again with arrays elsewhere (`Calls`): what `minidl.cuda.prepared` is about.
"""

cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

cnp.import_array()

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int *) except? -1

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

# cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col
ctypedef int (*EncodeTiled)(
    void *map, int kind, uint32_t rank, void *array, const uint64_t *sizes, const uint64_t *pitches,
    const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill
) noexcept nogil
ctypedef int (*EncodeColumns)(
    void *map, int kind, uint32_t rank, void *array, const uint64_t *sizes, const uint64_t *pitches,
    const int *first, const int *last, uint32_t channels, uint32_t pixels, const uint32_t *steps, int interleave,
    int swizzle, int promotion, int fill
) noexcept nogil

cdef enum:
    MAP = 128  # bytes of a tensor map
    MAPS = 32  # of a kernel: as much as its arguments may take
    ALIGNMENT = 64  # of what the driver writes
    MOST = 64  # arguments of a kernel
    WORDS = 2  # of 8 bytes, of the widest scalar
    KEY = 4096  # bytes that tell one call of an operation from another
    ARRAYS = 128  # of a call
    ALIGNED = 128  # bytes: up to here an operation may see how an array is aligned
    MOST_CALLS = 4096  # of an operation that are known
    OVERLAPPING = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

MOST_ARRAYS = ARRAYS

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


cdef class Map:
    """A tensor map but for the array's address.

    Args:
        entry: address of the driver's function: cuTensorMapEncodeIm2col where there are ``corners``, else
            cuTensorMapEncodeTiled.
        kind, sizes, pitches, box, corners, steps, swizzle, promotion: as that takes them.
        offset: bytes from the array's address.
        what: for errors.
    """

    cdef void *_entry
    cdef bint _columns
    cdef int _kind, _swizzle, _promotion
    cdef int[3] _first, _last
    cdef uint32_t _rank
    cdef uint32_t[5] _box, _steps
    cdef uint64_t[5] _sizes, _pitches
    cdef Py_ssize_t _offset
    cdef object _what

    def __init__(
        self, uintptr_t entry, int kind, tuple sizes, tuple pitches, tuple box, corners, tuple steps,
        Py_ssize_t offset, int swizzle, int promotion, what,
    ):
        cdef int i
        self._entry, self._kind, self._swizzle, self._promotion = <void *>entry, kind, swizzle, promotion
        self._rank, self._columns, self._offset, self._what = len(sizes), corners is not None, offset, what
        for i in range(<int>len(sizes)):
            self._sizes[i], self._steps[i] = sizes[i], steps[i]
        for i in range(<int>len(pitches)):
            self._pitches[i] = pitches[i]
        for i in range(<int>len(box)):
            self._box[i] = box[i]
        if self._columns:
            for i in range(<int>len(corners[0])):
                self._first[i], self._last[i] = corners[0][i], corners[1][i]

    cdef int encode(self, void *space, uintptr_t address) except -1:
        """Write the map of the array at ``address``; zeros without an array."""
        cdef int code
        cdef void *array = <void *>(address + self._offset)
        if address == 0:
            memset(space, 0, MAP)
            return 0
        if self._columns:
            code = (<EncodeColumns>self._entry)(
                space, self._kind, self._rank, array, self._sizes, self._pitches, self._first, self._last,
                self._box[0], self._box[1], self._steps, 0, self._swizzle, self._promotion, 0,
            )
        else:
            code = (<EncodeTiled>self._entry)(
                space, self._kind, self._rank, array, self._sizes, self._pitches, self._box, self._steps, 0,
                self._swizzle, self._promotion, 0,
            )
        if code:
            raise RuntimeError(f"tensor map of {self._what}, array at {address:#x}: CUDA error {code}")
        return 0


cdef class Start:
    """A kernel with its sizes and arguments, to be started as often as one likes with its arrays here or there.

    Attributes:
        arrays: those among the arguments and in tensor maps, in order, until `place` says where addresses come from.
        what: file, macros, sizes: for errors.
    """

    cdef readonly list arrays
    cdef readonly tuple what
    cdef Kernel _kernel
    cdef Config _config
    cdef int _count, _pointers
    cdef uintptr_t _values[MOST][WORDS]
    cdef void *_elsewhere[MOST]  # the bytes of an argument that are not among the values
    cdef int _pointer[MOST]  # which one an argument is, or -1
    cdef int _sources[MOST]
    cdef Py_ssize_t _offsets[MOST]
    cdef list _structures, _maps, _made
    cdef int _encoded

    def __init__(self, Kernel kernel, tuple args, tuple what):
        cdef Py_ssize_t i, count = len(args)
        cdef object argument
        cdef cnp.dtype kind
        self._kernel, self.what, self.arrays = kernel, what, []
        self._structures, self._maps, self._made = [], [], []
        if count > MOST:
            raise ValueError(f"{kernel.name}: a kernel takes at most {MOST} arguments, got {count}")
        self._count = <int>count
        for i in range(count):
            argument = args[i]
            self._elsewhere[i], self._pointer[i] = NULL, -1
            if argument is None:
                self._values[i][0] = 0
            elif cnp.PyArray_Check(argument):
                self._elsewhere[i] = self._bytes(<cnp.ndarray>argument)
                self._structures.append(argument)
            elif PyArray_CheckScalar(argument):
                kind = cnp.PyArray_DescrFromScalar(argument)
                if cnp.PyTypeNum_ISEXTENDED(kind.type_num) or kind.itemsize > 8 * WORDS:
                    raise TypeError(
                        f"{kernel.name}: argument {argument!r} ({kind}) is no plain number; pass an array of it"
                    )
                PyArray_ScalarAsCtype(argument, &self._values[i][0])
            elif isinstance(argument, (int, float, complex)):
                raise plain_number(kernel.name, argument)
            elif hasattr(argument, "data"):
                self._pointer[i] = self._array(argument)
            elif (views := getattr(argument, "views", None)) is not None:
                which = [-1 if one is None else self._array(one) for one in argument.arrays]
                self._maps.append((i, [(map, which[array]) for map, array in views.maps]))
                self._encoded += len(views.maps)
            else:
                self._made.append((i, argument.argument))
        if self._encoded > MAPS:
            raise ValueError(f"{kernel.name}: a kernel takes at most {MAPS} tensor maps, got {self._encoded}")

    cdef int _array(self, array) except -1:
        cdef int i = self._pointers
        if i == MOST:
            raise ValueError(f"{self._kernel.name}: a kernel takes at most {MOST} arrays")
        self._sources[i], self._offsets[i] = i, 0
        self.arrays.append(array)
        self._pointers += 1
        return i

    def place(self, list places):
        """Say of each of ``arrays`` among how many addresses its own is, and how many bytes it lies behind that."""
        cdef int i
        for i in range(self._pointers):
            self._sources[i], self._offsets[i] = places[i]
        self.arrays = None

    cdef int run(self, const uintptr_t *addresses, void *stream, bint overlapping) except -1:
        """The driver's error code, 0 for a launch."""
        cdef uintptr_t values[MOST][WORDS]
        cdef void *arguments[MOST]
        cdef Config config = self._config
        cdef Kernel kernel = self._kernel
        cdef list kept = None
        cdef char encoded[MAPS * MAP + ALIGNMENT]
        cdef char *space = encoded + (-<uintptr_t>encoded) % ALIGNMENT
        cdef int i, code
        config.stream = stream
        config.attributes, config.count = &_overlapping, overlapping and kernel.waits
        memcpy(values, self._values, self._count * sizeof(values[0]))
        for i in range(self._count):
            arguments[i] = &values[i][0] if self._elsewhere[i] is NULL else self._elsewhere[i]
            if self._pointer[i] >= 0:
                values[i][0] = self._address(self._pointer[i], addresses)
        for position, maps in self._maps:
            arguments[<int>position] = space
            for map, pointer in maps:
                (<Map>map).encode(space, 0 if pointer < 0 else self._address(pointer, addresses))
                space += MAP
        for position, make in self._made:
            structure = make()
            kept = [structure] if kept is None else [*kept, structure]
            arguments[<int>position] = self._bytes(<cnp.ndarray?>structure)
        with nogil:
            code = kernel._launch(&config, <void *>kernel.function, arguments, NULL)
        return code

    cdef uintptr_t _address(self, int pointer, const uintptr_t *addresses) noexcept:
        return addresses[self._sources[pointer]] + self._offsets[pointer]

    cdef void *_bytes(self, cnp.ndarray structure) except NULL:
        if not cnp.PyArray_IS_C_CONTIGUOUS(structure):
            shape = (<object>structure).shape
            raise TypeError(f"{self._kernel.name}: an argument of shape {shape} does not lie in one piece")
        return cnp.PyArray_DATA(structure)


cdef class Kernels:
    """The kernels that are loaded, by device, file, name and macros.

    Args:
        attach: gives two functions, of which the first tells the current device's number, the second the current
            stream; called once, before the first launch.
        load: (device, file, name), macros -> the `Kernel`.
        grant: kernel, bytes: raises its limit of dynamic shared memory, and ``granted``.
        failure: `Start`, the driver's error code -> the error to raise.
        overlapping: a kernel that waits may begin while the one before it ends.

    Attributes:
        watched: somebody sees to each launch by itself.
    """

    cdef public bint overlapping, watched
    cdef dict _loaded
    cdef object _attach, _load, _grant, _failure, _device, _stream

    def __init__(self, attach, load, grant, failure, bint overlapping=True):
        self._loaded, self._attach, self._load, self._grant, self._failure = {}, attach, load, grant, failure
        self.overlapping, self.watched = overlapping, False

    def prepared(self, str stem, str name, tuple grid, tuple block, tuple args, dict defines, unsigned int shared):
        """The `Start` of a kernel, which is loaded; None for an empty grid.

        Args:
            args: arrays with ``data.ptr`` (their address), None (a null pointer), NumPy scalars and arrays (their
                bytes), what has ``arrays`` and ``views.maps``, each a `Map` and which of the arrays it is of (by value,
                one after the other), or what gives such bytes for each launch by ``argument()``.

        Raises:
            TypeError: for a plain Python number, whose width in C would be a guess.
        """
        cdef Py_ssize_t i
        cdef Kernel kernel
        cdef Start start
        if 0 in grid:
            return None
        device = self._current()
        key = _key(device, stem, name, defines)
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load((device, stem, name), defines)
        kernel = <Kernel?>found
        if shared > kernel.granted:
            self._grant(kernel, shared)
        start = Start(kernel, args, (stem, name, defines, grid, block, shared))
        for i in range(3):
            start._config.sizes[i] = grid[i] if i < len(grid) else 1
            start._config.sizes[3 + i] = block[i] if i < len(block) else 1
        start._config.shared = shared
        return start

    cdef object _current(self):
        """The current device's number."""
        if self._device is None:
            self._device, self._stream = self._attach()
        return self._device()

    def start(self, Start start):
        """Start it with its arrays where they are, on the current stream."""
        cdef uintptr_t addresses[MOST]
        cdef int i
        for i in range(start._pointers):
            addresses[i] = start.arrays[i].data.ptr
        self._start(start, addresses, <void *><uintptr_t>self._stream().ptr)

    cdef int _start(self, Start start, const uintptr_t *addresses, void *stream) except -1:
        cdef int code = start.run(addresses, stream, self.overlapping)
        if code:
            raise self._failure(start, code)
        return 0


cdef class Call:
    """What an operation does with inputs of certain sizes, wherever these lie: arrays to be made, launches, a result.

    Args:
        made: (function, shape, dtype) of each array.
        starts: each a `Start` that is placed: among the inputs, and behind them what is made.
        result: an array's place; None; a tuple of these; or what makes it of the arrays.
    """

    cdef readonly list made, starts
    cdef readonly object result

    def __init__(self, list made, list starts, result):
        self.made, self.starts, self.result = made, starts, result

    cdef object run(self, list arrays, uintptr_t *addresses, Kernels kernels):
        """Make what is to be made, behind the inputs among ``arrays`` and ``addresses``; start; the result."""
        cdef Py_ssize_t count = len(arrays)
        for make, shape, dtype in self.made:
            array = make(shape, dtype)
            arrays.append(array)
            addresses[count] = array.data.ptr
            count += 1
        self._start(addresses, kernels)
        return _built(self.result, arrays)

    def start(self, list arrays, Kernels kernels):
        """Only start: ``arrays`` has what was made, too."""
        cdef uintptr_t addresses[ARRAYS]
        cdef Py_ssize_t i
        for i in range(len(arrays)):
            addresses[i] = arrays[i].data.ptr
        self._start(addresses, kernels)

    cdef int _start(self, const uintptr_t *addresses, Kernels kernels) except -1:
        cdef Start start
        cdef void *stream
        if self.starts:
            stream = <void *><uintptr_t>kernels._stream().ptr
            for start in self.starts:
                kernels._start(start, addresses, stream)
        return 0


cdef object _built(result, list arrays):
    if result is None:
        return None
    kind = type(result)
    if kind is int:
        return arrays[result]
    if kind is tuple:
        return tuple([_built(part, arrays) for part in result])
    return result(arrays)


cdef struct Door:
    Py_ssize_t size, arrays
    uintptr_t addresses[ARRAYS]
    char key[KEY]


cdef class Calls:
    """The calls of one operation that are known, by what it may decide by.

    Args:
        function: the operation.
        launch: the module whose ``_kernels`` are in use.
        recording: -> not None where nothing is to be prepared.
        prepare: function, arguments, their arrays -> the `Call`, or None where it cannot be made again; its result.
        array: -> the class of arrays.
    """

    cdef public object prepare
    cdef dict _known
    cdef object _function, _launch, _recording, _class_of, _array

    def __init__(self, function, launch, recording, prepare, array):
        self._function, self._launch, self._recording, self._class_of = function, launch, recording, array
        self.prepare, self._known = prepare, {}

    def forget(self):
        """Prepare everything anew."""
        self._known, self._array = {}, None

    def __call__(self, tuple args, dict named):
        cdef Door door
        cdef Kernels kernels = self._launch._kernels
        cdef list arrays = []
        cdef Call call
        if kernels.watched or self._recording() is not None:
            return self._function(*args, **named)
        if self._array is None:
            self._array = self._class_of()
        door.size = door.arrays = 0
        if not _put(&door, kernels._current()):
            return self._function(*args, **named)
        if not (self._sees(&door, args, arrays) and self._sees(&door, named, arrays)):
            return self._function(*args, **named)
        key = PyBytes_FromStringAndSize(door.key, door.size)
        known = self._known.get(key, self)
        if known is None:
            return self._function(*args, **named)
        if known is not self:
            call = <Call>known
            return call.run(arrays, door.addresses, kernels)
        if len(self._known) >= MOST_CALLS:
            self._known = {}
        known, result = self.prepare(self._function, args, named, arrays)
        self._known[key] = known
        return result

    cdef bint _sees(self, Door *door, item, list arrays) except -1:
        """Add to the key what an operation may see of an argument but its address; false where it may see more."""
        cdef cnp.dtype dtype
        cdef Py_ssize_t size
        cdef const char *text
        cdef double number
        cdef uintptr_t address
        cdef int i
        if item is None:
            return _tag(door, b"n")
        if isinstance(item, self._array):
            shape, dtype, address = item.shape, item.dtype, item.data.ptr
            if door.arrays == ARRAYS or not _tag(door, b"a") or not _numbers(door, shape):
                return False
            if not item._c_contiguous and not (_tag(door, b"s") and _numbers(door, item.strides)):
                return False
            door.addresses[door.arrays] = address
            i = 0
            while door.addresses[i] != address:  # that two arguments are one array may matter
                i += 1
            door.arrays += 1
            arrays.append(item)
            return _number(door, (<int64_t>dtype.type_num << 32) | i << 8 | <int64_t>(address & (ALIGNED - 1)))
        kind = type(item)
        if kind is bool:
            return _tag(door, b"t" if item else b"f")
        if kind is int:
            return _tag(door, b"i") and _put(door, item)
        if kind is float:
            number = item
            return _tag(door, b"d") and _bytes(door, <const char *>&number, sizeof(number))
        if kind is str:
            text = PyUnicode_AsUTF8AndSize(item, &size)
            return _tag(door, b"u") and _number(door, size) and _bytes(door, text, size)
        if kind is tuple or kind is list:
            if not (_tag(door, b"(" if kind is tuple else b"[") and _number(door, len(item))):
                return False
            for part in item:
                if not self._sees(door, part, arrays):
                    return False
            return True
        if kind is dict:
            if not (_tag(door, b"{") and _number(door, len(item))):
                return False
            for name, part in (<dict>item).items():
                if not (self._sees(door, name, arrays) and self._sees(door, part, arrays)):
                    return False
            return True
        if isinstance(item, cnp.dtype):
            return _tag(door, b"y") and _number(door, (<cnp.dtype>item).type_num)
        fields = getattr(kind, "__dataclass_fields__", None)
        if fields is None or not (_tag(door, b"c") and _number(door, <int64_t><uintptr_t><PyObject *>kind)):
            return False
        for name in fields:
            if not self._sees(door, getattr(item, name), arrays):
                return False
        return True


cdef inline bint _bytes(Door *door, const char *source, Py_ssize_t size) noexcept:
    if door.size + size > KEY:
        return False
    memcpy(&door.key[door.size], source, size)
    door.size += size
    return True


cdef inline bint _tag(Door *door, char tag) noexcept:
    return _bytes(door, &tag, 1)


cdef inline bint _number(Door *door, int64_t number) noexcept:
    return _bytes(door, <const char *>&number, sizeof(number))


cdef bint _put(Door *door, item) except -1:
    """A Python integer; false where it is too large."""
    cdef int overflow = 0
    cdef int64_t number = PyLong_AsLongLongAndOverflow(item, &overflow)
    return not overflow and _number(door, number)


cdef bint _numbers(Door *door, tuple numbers) except -1:
    if not _number(door, len(numbers)):
        return False
    for number in numbers:
        if not _put(door, number):
            return False
    return True


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
