"""CuPy and the driver without a GPU: arrays at addresses where nothing lies, and launches that are written down."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from minidl.cuda import launch as launch_module

MEMORY = 512  # bytes that arrays begin at multiples of


class Attribute(ctypes.Structure):
    _fields_ = [("which", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)


class Array:
    """What of a CuPy array the operations ask for; its elements are nowhere."""

    next = 2**40  # address of the next one

    def __init__(self, shape, dtype=np.float32):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        self.dtype = np.dtype(dtype)
        steps = np.cumprod([self.dtype.itemsize, *(max(n, 1) for n in shape[:0:-1])])[::-1][: len(shape)]
        # What it looks like, over a single element that nobody reads.
        self._form = as_strided(np.empty(1, self.dtype), shape, tuple(map(int, steps)), writeable=False)
        self._first = self._form.__array_interface__["data"][0]
        self._address = Array.next if self.size else 0
        Array.next += -(-max(self.nbytes, 1) // MEMORY) * MEMORY

    def _view(self, form):
        view = object.__new__(Array)
        view.dtype, view._form, view._first = self.dtype, form, self._first
        view._address = self._address if form.size else 0
        return view

    shape, strides, size, ndim, nbytes, itemsize, flags = (
        property(lambda self, name=name: getattr(self._form, name))
        for name in ("shape", "strides", "size", "ndim", "nbytes", "itemsize", "flags")
    )
    _c_contiguous = property(lambda self: self._form.flags.c_contiguous)

    @property
    def data(self):
        behind = self._form.__array_interface__["data"][0] - self._first if self.size else 0
        return SimpleNamespace(ptr=self._address + behind)

    def __len__(self):
        return len(self._form)

    def __getitem__(self, at):
        return self._view(self._form[at])

    def reshape(self, *shape):
        form = self._form.reshape(*shape)
        assert form.base is not None, "a copy"
        return self._view(form)

    def ravel(self):
        return self.reshape(-1)

    def view(self, dtype):
        assert np.dtype(dtype).itemsize == self.itemsize
        view = self._view(self._form)
        view.dtype = np.dtype(dtype)
        return view


class Driver(launch_module.Kernels):
    """The kernels that are loaded, and the driver that starts them.

    Attributes:
        calls: file, kernel and macros, sizes and stream, and the bytes of each argument, of every launch.
        code: what the next launches return.
    """

    def __init__(self):
        device, stream = lambda: 0, lambda: SimpleNamespace(ptr=11)
        super().__init__(lambda: (device, stream), self._loaded, self._granted, launch_module._failure)

    def __new__(cls):
        self = super().__new__(cls)
        self.calls, self.code, self._variants, self._widths = [], 0, [], {}
        self._entry = LAUNCH(self._launched)
        return self

    def _loaded(self, key, defines):
        self._variants.append((*key, tuple(sorted(defines.items()))))
        entry = ctypes.cast(self._entry, ctypes.c_void_p).value
        return launch_module.Kernel(key[2], None, len(self._variants), entry, True)

    @staticmethod
    def _granted(kernel, shared):
        kernel.granted = shared

    def prepared(self, stem, name, grid, block, args, defines, shared):
        planned = super().prepared(stem, name, grid, block, args, defines, shared)
        self._widths[0, stem, name, tuple(sorted(defines.items()))] = [_width(argument) for argument in args]
        return planned

    def _launched(self, config, function, arguments, extra):
        variant, config = self._variants[function - 1], config[0]
        found = [ctypes.string_at(arguments[i], width) for i, width in enumerate(self._widths[variant])]
        self.calls.append((variant, tuple(config.sizes), config.stream, found))
        return self.code


def _width(argument) -> int:
    if argument is None or isinstance(argument, Array):
        return 8
    if hasattr(argument, "views"):
        return 128 * len(argument.views.maps)
    return argument.nbytes if hasattr(argument, "nbytes") else argument.argument().nbytes


TILED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64)


@TILED
def _encoded(space, kind, rank, address):
    ctypes.memset(space, 0, 128)
    ctypes.memmove(space, address.to_bytes(8, "little"), 8)
    return 0


def _stream_id(stream, number):
    number._obj.value = 7
    return 0


def _read(properties):
    return {
        "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132,
        "sharedMemPerBlockOptin": 227 * 1024, "l2CacheSize": 60 * 2**20, "totalGlobalMem": 143156 * 2**20,
    }  # fmt: skip


def install(monkeypatch) -> Driver:
    """Let the CUDA table run on these from here on."""
    from minidl.cuda import array, device, hopper, prepared
    from minidl.cuda.convolution import conv2d_tuned, tickets

    runtime = SimpleNamespace(
        getDevice=lambda: 0, getDeviceProperties=_read, streamIsCapturing=lambda stream: 0, CUDARuntimeError=OSError
    )
    stream = SimpleNamespace(ptr=11, synchronize=lambda: None)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    cupy = SimpleNamespace(
        ndarray=Array, zeros=Array, cuda=cuda, asnumpy=lambda x: np.zeros(x.shape, x.dtype),
        array=lambda host, order: Array(host.shape, host.dtype), ascontiguousarray=lambda x: Array(x.shape, x.dtype),
    )  # fmt: skip
    driver = SimpleNamespace(
        cuTensorMapEncodeTiled=_encoded, cuTensorMapEncodeIm2col=_encoded, cuStreamGetId=_stream_id
    )
    for module in (array, device, prepared, tickets, conv2d_tuned):
        monkeypatch.setattr(module, "import_cupy", lambda: cupy)
    for module in (hopper, tickets):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(tickets, "_zeros", lambda: SimpleNamespace(ptr=2**39))
    monkeypatch.setattr(device, "_live", {})
    monkeypatch.setattr(launch_module, "DEBUG", False)
    kernels = Driver()
    monkeypatch.setattr(launch_module, "_kernels", kernels)
    monkeypatch.setattr(conv2d_tuned, "_installed", conv2d_tuned.NOTHING)
    # Plans are kept, and with them what the driver encodes maps with: here they are not to be.
    monkeypatch.setattr(hopper.Views, "maps", property(hopper.Views.maps.func))
    return kernels
