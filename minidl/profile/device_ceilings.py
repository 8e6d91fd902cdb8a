"""What a GPU can do at most: memory, second-level cache, matrix and vector units, and the link to the host."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from minidl.cuda import ceiling
from minidl.cuda.device import current_device, import_cupy
from minidl.precision import bfloat16, float16, float32
from minidl.profile.inputs import noise
from minidl.profile.timing import Budget, Call, DeviceTimer, Timing

COPY_BYTES = 1 << 30
LINK_BYTES = 256 << 20
MATRIX_SIZE = 8192
FMA_STEPS = 8192
L2_REPEATS = 64
BUDGET = Budget(samples=15, seconds=0.5, rest=2.0)

# The storage of each precision's operands, and cuBLAS's name for the way that it computes with them.
MATRIX_KINDS = {
    "bf16": (bfloat16, "CUDA_R_16BF", "CUBLAS_COMPUTE_32F"),
    "fp16": (float16, "CUDA_R_16F", "CUBLAS_COMPUTE_32F"),
    "tf32": (float32, "CUDA_R_32F", "CUBLAS_COMPUTE_32F_FAST_TF32"),
    "fp32": (float32, "CUDA_R_32F", "CUBLAS_COMPUTE_32F"),
}


def measure(ops: ModuleType, begin: Callable[[str], None]) -> dict[str, Any]:
    """The figures of CuPy's current device, of this rank.

    Args:
        begin: told what is measured next; returns when all ranks have come as far.
    """
    timer = DeviceTimer()
    begin("copy bandwidth")
    figures: dict[str, Any] = {"copy_gb_per_s": copy_bandwidth(ops, timer)}
    begin("bandwidth of the second-level cache")
    figures["l2_gb_per_s"] = l2_bandwidth(ops, timer)
    figures |= matrix_rates(ops, timer, begin)
    begin("vector rate, fp32")
    figures["vector_tflops"] = {"fp32": vector_rate(timer)}
    begin("host link")
    figures |= host_link()
    # Otherwise the pool would hold for good what was wanted for seconds.
    import_cupy().get_default_memory_pool().free_all_blocks()
    return figures


def _gb_per_s(moved: int, timing: Timing) -> float:
    return moved / (timing.ms * 1e6)


def _tflops(flop: int, timing: Timing) -> float:
    return flop / (timing.ms * 1e9)


def copy_bandwidth(ops: ModuleType, timer: DeviceTimer) -> float:
    """GB/s, read plus written, of the faster of two copies of a gigabyte within device memory.

    One is the driver's, outside any graph (as a node of a graph it takes a slower path); the other is our kernel's.
    """
    size = min(COPY_BYTES, current_device().memory_bytes // 16)
    source = noise(ops, (size // float32.itemsize,), float32)
    target = ops.empty(source.shape, float32)
    driver = timer.hot(lambda: target.data.copy_from_device_async(source.data, source.nbytes), BUDGET)
    kernel = timer.replayed([lambda: ops.copy_into(target, source)] * 4, BUDGET)
    return _gb_per_s(2 * source.nbytes, min(driver, kernel, key=lambda timing: timing.ms))


def l2_bandwidth(ops: ModuleType, timer: DeviceTimer) -> float:
    """GB/s, read plus written, of copies within a quarter of the second-level cache."""
    size = ceiling.l2_copy_bytes(current_device().l2_bytes // 8)
    source = noise(ops, (size // float32.itemsize,), float32)
    target = ops.empty(source.shape, float32)
    timing = timer.hot(lambda: ceiling.l2_copy(target, source, L2_REPEATS), BUDGET)
    return _gb_per_s(2 * size * L2_REPEATS, timing)


def vector_rate(timer: DeviceTimer) -> float:
    """TFLOP/s of float32 multiply-adds outside the matrix units."""
    output = ceiling.fma_output()
    timing = timer.hot(lambda: ceiling.fused_multiply_adds(output, FMA_STEPS), BUDGET)
    return _tflops(ceiling.fma_flop(output, FMA_STEPS), timing)


def matrix_rates(ops: ModuleType, timer: DeviceTimer, begin: Callable[[str], None]) -> dict[str, Any]:
    """TFLOP/s of square matrix products of random numbers per precision, and whose kernels they were.

    cuBLAS's where it is installed; else our own, as a 1×1 convolution.
    """
    try:
        from cupy_backends.cuda.libs import cublas

        product, by = _cublas_product(cublas), "cublas"
    except ImportError:
        product, by = _convolution(ops), "minidl conv2d"
    n, rates = MATRIX_SIZE, {}
    for name, (storage, *_) in MATRIX_KINDS.items():
        begin(f"matrix rate, {name}")
        a, b = (noise(ops, (n * n,), storage, seed) for seed in (1, 2))
        rates[name] = _tflops(2 * n**3, timer.hot(product(name, a, b), BUDGET))
    return {"matrix_tflops": rates, "matrix_by": dict.fromkeys(rates, by)}


def _cublas_product(cublas: ModuleType) -> Callable[[str, Any, Any], Call]:
    """A maker of calls that multiply two square matrices with cuBLAS."""
    cupy = import_cupy()
    handle, one, zero = cupy.cuda.device.get_cublas_handle(), np.ones(1, np.float32), np.zeros(1, np.float32)
    transposed, plain = cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N

    def make(name: str, a: Any, b: Any) -> Call:
        storage, kind, compute = MATRIX_KINDS[name]
        kind, compute, n = getattr(cupy.cuda.runtime, kind), getattr(cublas, compute), MATRIX_SIZE
        out = cupy.empty(n * n, storage)
        # Both operands run along the summed index, as in a convolution of channels-last images with its filters.
        left, right = (a.data.ptr, kind, n), (b.data.ptr, kind, n)
        target = (out.data.ptr, kind, n)
        scales, algorithm = (one.ctypes.data, zero.ctypes.data), cublas.CUBLAS_GEMM_DEFAULT
        return lambda: cublas.gemmEx(
            handle, transposed, plain, n, n, n, scales[0], *left, *right, scales[1], *target, compute, algorithm
        )

    return make


def _convolution(ops: ModuleType) -> Callable[[str, Any, Any], Call]:
    """A maker of calls that multiply two square matrices with our own kernels."""
    point = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}

    def make(name: str, a: Any, b: Any) -> Call:
        x, w = (matrix.reshape(MATRIX_SIZE, 1, 1, MATRIX_SIZE) for matrix in (a, b))
        return lambda: ops.conv2d(x, w, **point, tf32=name == "tf32")

    return make


def host_link() -> dict[str, float]:
    """GB/s from and to pinned memory of the host: one way, the other, and the sum of both at once."""
    cupy = import_cupy()
    runtime, size = cupy.cuda.runtime, LINK_BYTES
    # Not from CuPy's pool, which would keep half a gigabyte pinned.
    hosts = [cupy.cuda.PinnedMemory(size) for _ in range(2)]
    devices = [cupy.empty(size, np.uint8) for _ in range(2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()

    def upload() -> None:
        runtime.memcpyAsync(devices[0].data.ptr, hosts[0].ptr, size, runtime.memcpyHostToDevice, streams[0].ptr)

    def download() -> None:
        runtime.memcpyAsync(hosts[1].ptr, devices[1].data.ptr, size, runtime.memcpyDeviceToHost, streams[1].ptr)

    def timed(*transfers: Call) -> Timing:
        return _concurrently(cupy, streams, transfers)

    return {
        "host_to_device_gb_per_s": _gb_per_s(size, timed(upload)),
        "device_to_host_gb_per_s": _gb_per_s(size, timed(download)),
        "both_ways_gb_per_s": _gb_per_s(2 * size, timed(upload, download)),
    }


def _concurrently(cupy: ModuleType, streams: list[Any], transfers: tuple[Call, ...]) -> Timing:
    """From the start of all ``transfers``, each on its own of the two streams, to the end of the last."""
    start, stop, joined = cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.Event(disable_timing=True)
    first, second = streams

    def sample() -> float:
        start.record(first)
        second.wait_event(start)
        for transfer in transfers:
            transfer()
        joined.record(second)
        first.wait_event(joined)
        stop.record(first)
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop)

    sample()
    return BUDGET.take(sample)
