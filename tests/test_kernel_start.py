"""What a launch hands to the driver, without a GPU: a function of ours stands in for cuLaunchKernelEx."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from minidl.cuda import hopper
from minidl.cuda import launch as launch_module
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.precision import bfloat16
from tests.stand_in import LAUNCH


class _Driver:
    """Stands in for cuLaunchKernelEx: notes sizes, attributes and the bytes behind each argument.

    Attributes:
        waits: the kernel that is loaded next waits for its predecessor.
        widths: bytes of each argument of the kernel that is launched next.
        code: what the launch returns.
    """

    def __init__(self):
        self.calls, self.attributes, self.widths, self.code, self.waits = [], [], (), 0, True
        self._entry = LAUNCH(self._launched)

    @property
    def entry(self):
        return ctypes.cast(self._entry, ctypes.c_void_p).value

    def _launched(self, config, function, arguments, extra):
        assert not extra
        config = config[0]
        self.attributes.append([(a.which, a.value[0]) for a in config.attributes[: config.count]])
        found = [ctypes.string_at(arguments[i], width) for i, width in enumerate(self.widths)]
        self.calls.append((function, tuple(config.sizes), config.stream or 0, found))
        return self.code


@pytest.fixture
def recorder(monkeypatch):
    recorder, loads, grants = _Driver(), [], []

    def load(key, defines):
        loads.append((key, defines))
        return launch_module.Kernel("k", None, 2**40 + 1, recorder.entry, recorder.waits)

    def grant(kernel, shared):
        grants.append(shared)
        kernel.granted = shared

    kernels = launch_module.Kernels(
        lambda: (lambda: 3, lambda: SimpleNamespace(ptr=11)), load, grant, launch_module._failure
    )
    monkeypatch.setattr(launch_module, "_kernels", kernels)
    monkeypatch.setattr(launch_module, "DEBUG", False)
    recorder.loads, recorder.grants = loads, grants
    return recorder


def test_launch_loads_once_and_asks_for_shared_memory_once(recorder):
    one = np.int32(1)
    for shared in (0, 60_000, 60_000, 1_000, 70_000):
        launch("stem", "k", 5, (32, 4), one, None, defines={"A": 1}, shared=shared)
    launch("stem", "k", (0,), 32, one)
    assert recorder.loads == [((3, "stem", "k"), {"A": 1})] and recorder.grants == [60_000, 70_000]
    assert len(recorder.calls) == 5
    function, sizes, stream, _ = recorder.calls[1]
    assert (function, sizes, stream) == (2**40 + 1, (5, 1, 1, 32, 4, 1, 60_000), 11)
    launch("stem", "k", (2, 3, 4), (8, 2, 2), one, defines={"A": 1})
    assert recorder.calls[-1][1] == (2, 3, 4, 8, 2, 2, 0)
    with pytest.raises(TypeError, match="k: argument 7 .* pass a NumPy scalar"):
        launch("stem", "k", 1, 32, 7)


def test_kernels_that_wait_may_begin_early_unless_told_otherwise(recorder):
    early = [(6, 1)]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    launch("stem", "waits", 1, 32)
    with launch_module.overlapping(False):
        launch("stem", "waits", 1, 32)
        with launch_module.overlapping(True):
            launch("stem", "waits", 1, 32)
    recorder.waits = False
    launch("stem", "does not", 1, 32)
    launch("stem", "waits", 1, 32)
    assert recorder.attributes == [early, [], early, [], early]


def test_a_variant_is_its_device_file_name_and_macros(recorder):
    for _ in range(2):
        launch("stem", "k", 1, 32)
        launch("stem", "other", 1, 32)
        launch("other", "k", 1, 32)
        for defines in ({"A": 1}, {"A": 2}, {"B": 1}, {"A": 1, "B": 1}):
            launch("stem", "k", 1, 32, defines=defines)
    assert len(recorder.loads) == 7 and len(recorder.calls) == 14


SCALARS = [
    np.int8(-3), np.uint8(200), np.int16(-5), np.int32(-(2**31)), np.uint32(2**32 - 1), np.int64(-(2**63)),
    np.uint64(2**64 - 1), np.float16(0.1), np.float32(0.1), np.float64(0.1), np.bool_(True), np.complex128(1 + 2j),
]  # fmt: skip


def test_launch_hands_over_the_bytes_of_every_kind_of_argument(recorder):
    structure = np.array([(7, (1, 2))], np.dtype([("size", np.int64), ("axis", [("a", np.int32), ("b", np.int32)])]))
    array = SimpleNamespace(data=SimpleNamespace(ptr=2**47 + 512))
    arguments = [array, None, structure, *SCALARS, array]
    recorder.widths = [8, 8, 16, *(scalar.itemsize for scalar in SCALARS), 8]
    launch("stem", "k", 1, 32, *arguments)
    pointer = (2**47 + 512).to_bytes(8, "little")
    expected = [pointer, bytes(8), structure.tobytes(), *(scalar.tobytes() for scalar in SCALARS), pointer]
    assert recorder.calls[0][3] == expected


NO_NUMBERS = [np.void(b"x" * 64), np.str_("text"), np.clongdouble(1), bfloat16.type(1), np.zeros((4, 4))[:, 1]]


@pytest.mark.parametrize("argument", NO_NUMBERS, ids=lambda a: type(a).__name__)
def test_launch_refuses_what_is_not_so_many_bytes_in_a_row(recorder, argument):
    with pytest.raises(TypeError, match="^k: "):
        launch("stem", "k", 1, 32, argument)
    assert not recorder.calls


TILED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint), *[ctypes.c_int] * 4,
)  # fmt: skip
COLUMNS = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int), ctypes.c_uint,
    ctypes.c_uint, ctypes.POINTER(ctypes.c_uint), *[ctypes.c_int] * 4,
)  # fmt: skip


@pytest.fixture
def encoder(monkeypatch):
    """Stands in for the driver's functions that encode tensor maps: they note what they get and number the maps."""
    calls = []

    def noted(space, facts):
        assert space % 64 == 0, "as the driver asks"
        calls.append(facts)
        ctypes.memset(space, len(calls), 128)
        return encoder.code

    @TILED
    def tiled(space, kind, rank, array, sizes, pitches, box, steps, *rest):
        return noted(space, (kind, array, sizes[:rank], pitches[: rank - 1], box[:rank], steps[:rank], rest))

    @COLUMNS
    def columns(space, kind, rank, array, sizes, pitches, first, last, channels, pixels, steps, *rest):
        found = kind, array, sizes[:rank], pitches[: rank - 1], first[: rank - 2], last[: rank - 2]
        return noted(space, (*found, channels, pixels, steps[:rank], rest))

    encoder = SimpleNamespace(cuTensorMapEncodeTiled=tiled, cuTensorMapEncodeIm2col=columns, calls=calls, code=0)
    monkeypatch.setattr(hopper, "driver", lambda: encoder)
    return encoder


def test_launch_encodes_tensor_maps_of_arrays_where_they_are(recorder, encoder):
    image = View(1, (64, 7, 5, 2), (128, 896, 4480), (64, 128), corners=((-1, -2), (1, 2)), steps=(2, 1), offset=16)
    views = Views((View(0, (32, 100), (128,), (32, 64), neighbours=False), 0), (image, 1), (image, 2))
    arrays = [SimpleNamespace(data=SimpleNamespace(ptr=ptr)) for ptr in (512, 1024, 2048)]
    recorder.widths = [384, 8]
    launch("stem", "k", 1, 32, TensorMaps(views, (arrays[0], arrays[1], None)), arrays[2])
    assert encoder.calls == [
        (7, 512, [32, 100], [128], [32, 64], [1, 1], (0, 3, 2, 0)),
        (9, 1040, [64, 7, 5, 2], [128, 896, 4480], [-1, -2], [1, 2], 64, 128, [1, 2, 1, 1], (0, 3, 3, 0)),
    ]
    maps = b"\1" * 128 + b"\2" * 128 + bytes(128), (2048).to_bytes(8, "little")
    assert recorder.calls[0][3] == list(maps), "no array, no map"
    launch("stem", "k", 1, 32, TensorMaps(views, (arrays[2], arrays[1], None)), arrays[0])
    assert encoder.calls[2][1] == 2048 and recorder.calls[1][3][0][:1] == b"\3"
    encoder.code = 1
    with pytest.raises(RuntimeError, match="tensor map of View.*array at 0x200: CUDA error 1"):
        launch("stem", "k", 1, 32, TensorMaps(views, (arrays[0], arrays[1], None)))
    with pytest.raises(ValueError, match="at most 32 tensor maps, got 33"):
        launch("stem", "k", 1, 32, *[TensorMaps(views, (arrays[0], None, None))] * 11)


def test_an_argument_may_be_made_for_each_launch(recorder):
    made = []

    class Counter:
        def argument(self):
            made.append(len(made))
            return np.array([made[-1]], np.uint64)

    recorder.widths = [8, 8]
    launch("stem", "k", 1, 32, Counter(), Counter())
    assert [int.from_bytes(found, "little") for found in recorder.calls[0][3]] == [0, 1]


def test_a_launch_that_fails_names_the_kernel_and_the_error(recorder, monkeypatch):
    recorder.code = 701
    monkeypatch.setattr(launch_module, "_words", lambda code: f"the driver's word for {code}")
    with pytest.raises(RuntimeError, match="kernel k of stem.cu {'A': 1}, grid .*could not be started: .* for 701"):
        launch("stem", "k", 5, 32, defines={"A": 1})


def test_a_kernel_takes_so_many_arguments_and_no_more(recorder):
    recorder.widths = [4] * 64
    launch("stem", "k", 1, 32, *map(np.int32, range(64)))
    assert recorder.calls[0][3] == [i.to_bytes(4, "little") for i in range(64)]
    with pytest.raises(ValueError, match="k: a kernel takes at most 64 arguments, got 65"):
        launch("stem", "k", 1, 32, *map(np.int32, range(65)))
    with pytest.raises(OverflowError):
        launch("stem", "k", -1, 32)


def test_threads_may_launch_at_the_same_time(recorder):
    recorder.widths = [4, 8]

    def work(number):
        for i in range(200):
            launch("stem", "k", 1, 32, np.int32(number), np.int64(i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted([n.to_bytes(4, "little"), i.to_bytes(8, "little")] for n in range(4) for i in range(200))
    assert sorted(found for *_, found in recorder.calls) == expected


def test_a_launch_beyond_the_limits_of_the_device_names_the_kernel(cuda_ops):
    x = cuda_ops.zeros((64,), np.float32)
    words = np.zeros(4, np.uint32)
    with pytest.raises(RuntimeError, match="assign_kernel of array.cu .*block .2048.*CUDA_ERROR_INVALID_VALUE"):
        launch("array", "assign_kernel", 1, 2048, x, np.int32(1), *words, defines={"ASSIGN": 1})
    with pytest.raises(RuntimeError, match="assign_kernel cannot have 1000000 bytes of shared memory"):
        launch("array", "assign_kernel", 1, 1, x, np.int32(1), *words, defines={"ASSIGN": 1}, shared=1_000_000)
    assert not cuda_ops.to_host(x).any()


def test_threads_launch_on_their_own_streams(cuda_ops):
    import cupy

    ops, results = cuda_ops, {}

    def work(number):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = ops.zeros((1000,), np.float32)
            one = cupy.full((1000,), number, np.float32)
            for _ in range(300):
                x = ops.add(x, one)
            stream.synchronize()
            results[number] = ops.to_host(x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(1, 5):
        np.testing.assert_array_equal(results[number], np.full(1000, 300 * number, np.float32))
