"""Kernels that begin while those before them end: who may, that they do, and that no bit depends on it."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl.compile import CompiledStep
from minidl.cuda import nvrtc
from minidl.cuda.capture import capture
from minidl.cuda.device import current_device
from minidl.cuda.launch import launch, overlapping
from minidl.cuda.machine_code import waiting
from minidl.cuda.spin import spin
from minidl.step import EagerStep
from tests import cuda_graphs
from tests.small_steps import bits, small_model
from tests.test_launch import needs_nvrtc

# step_kernel: each thread reads what other blocks wrote last time, and what lies where it will write; then it is slow,
# each block by another time; then it writes. A reader that comes too early, or a writer, changes the result.
SOURCE = """
#include "common.cuh"

DEVICE u64 now() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// The next kernel may begin at once, as behind few of the library: the wait must hold then, too.
extern "C" __global__ void step_kernel(const u32* __restrict__ x, u32* __restrict__ y, int size, int factor, u64 slow) {
#if WAITS
    await_predecessor();
    let_next_in();
#endif
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 value = 3u * x[i64(i) * factor % size] + y[i];
    const u64 begun = now();
    while (now() - begun < slow * (blockIdx.x % 4));
    y[i] = value;
}

// when[0]: a thread begins; when[1]: its wait is over; when[2]: it ends, a while later.
extern "C" __global__ void clock_kernel(u64* when, u64 slow) {
    const u64 begun = now();
    await_predecessor();
    let_next_in();
    when[0] = begun, when[1] = now();
    while (now() - begun < slow);
    when[2] = now();
}

extern "C" __global__ void silent_kernel(u64* when) { when[0] = now(); }
"""


@pytest.fixture
def kernels(tmp_path):
    """The path of the kernels above."""
    path = tmp_path / "overlap.cu"
    path.write_text(SOURCE)
    return str(path)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "compute_90"])
def test_the_code_itself_says_which_kernels_wait(kernels, arch):
    names = {"step_kernel", "clock_kernel", "silent_kernel"}
    assert waiting(nvrtc.build(kernels, arch, {"WAITS": 1}).image) == names - {"silent_kernel"}
    assert waiting(nvrtc.build(kernels, arch, {"WAITS": 0}).image) == {"clock_kernel"}
    assert not waiting(nvrtc.build(kernels, "sm_80", {"WAITS": 1}).image), "older ones have no such instruction"


SIZE, BLOCK, FACTOR = 64 * 1024, 128, 4099


def _expected(rounds: int) -> list[np.ndarray]:
    x, y = np.arange(SIZE, dtype=np.uint32), np.ones(SIZE, np.uint32)
    order = np.arange(SIZE, dtype=np.int64) * FACTOR % SIZE
    for _ in range(rounds):
        y = np.uint32(3) * x[order] + y
        x = np.uint32(3) * y[order] + x
    return [x, y]


@pytest.mark.parametrize("way", ["stream", "graph"])
@pytest.mark.parametrize("waits", [(1, 1), (1, 0), (0, 0)], ids=["both wait", "one waits", "none waits"])
def test_each_kernel_sees_all_that_those_before_it_wrote(cuda_ops, kernels, waits, way):
    """Two buffers, each read where the other is written: thousands of kernels in a chain, some slower than others."""
    rounds, replays = 500, 4
    x, y = cuda_ops.from_host(np.arange(SIZE, dtype=np.uint32)), cuda_ops.from_host(np.ones(SIZE, np.uint32))

    def chain():
        for i in range(rounds):
            for pair, wait in (((x, y), waits[0]), ((y, x), waits[1])):
                slow = np.uint64(i % 3 * 1500)
                sizes = np.int32(SIZE), np.int32(FACTOR), slow
                launch(kernels, "step_kernel", SIZE // BLOCK, BLOCK, *pair, *sizes, defines={"WAITS": wait})

    chain()  # loads the kernels, which a capture must not
    if way == "stream":
        for _ in range(replays):
            chain()
    else:
        graph, _ = capture(chain)
        for _ in range(replays):
            graph.launch()
    cuda_ops.synchronize()
    for found, expected in zip((x, y), _expected(rounds * (1 + replays)), strict=True):
        np.testing.assert_array_equal(cuda_ops.to_host(found), expected)


@pytest.mark.parametrize("way", ["stream", "graph"])
def test_what_another_stream_did_is_waited_for_as_a_whole(cuda_ops, kernels, way):
    """Fork and join by events, thousands of times: a side reads what was just written, and is read behind the join."""
    import cupy

    rounds, replays = 300, 4
    host = [np.arange(SIZE, dtype=np.uint32) + i for i in range(3)]
    x, y, z = map(cuda_ops.from_host, host)
    side = cupy.cuda.Stream(non_blocking=True)
    events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]

    def step(source, target, slow):
        sizes = np.int32(SIZE), np.int32(FACTOR), np.uint64(slow)
        launch(kernels, "step_kernel", SIZE // BLOCK, BLOCK, source, target, *sizes, defines={"WAITS": 1})

    def chain():
        main = cupy.cuda.get_current_stream()
        for i in range(rounds):
            step(x, y, i % 3 * 1500)
            events[0].record(main)
            side.wait_event(events[0])
            with side:
                step(y, z, (i + 1) % 3 * 2000)
            events[1].record(side)
            step(y, x, 0)
            main.wait_event(events[1])
            step(z, y, 500)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        chain()
        launched = chain if way == "stream" else capture(chain, stream)[0].launch
        for _ in range(replays):
            launched()
        stream.synchronize()
    order = np.arange(SIZE, dtype=np.int64) * FACTOR % SIZE
    three = np.uint32(3)
    a, b, c = host
    for _ in range(rounds * (1 + replays)):
        b = three * a[order] + b
        c = three * b[order] + c
        a = three * b[order] + a
        b = three * c[order] + b
    for found, expected in zip((x, y, z), (a, b, c), strict=True):
        np.testing.assert_array_equal(cuda_ops.to_host(found), expected)


@pytest.mark.parametrize("way", ["stream", "graph"])
def test_kernels_begin_before_those_before_them_end_and_wait_for_them(cuda_ops, kernels, way):
    if current_device().arch < (9, 0):
        pytest.skip("kernels of this device cannot begin early")
    count = 50

    def clocks(wanted):
        when = cuda_ops.zeros((count, 3), np.uint64)

        def chain():
            spin(5e-3)  # all are launched by the time that the first begins
            for row in when:
                launch(kernels, "clock_kernel", 1, 1, row, np.uint64(20_000), defines={"WAITS": 1})

        with overlapping(wanted):
            chain()
            if way == "graph":
                graph, _ = capture(chain)
                graph.launch()
        cuda_ops.synchronize()
        return cuda_ops.to_host(when).astype(np.int64)

    early, late = clocks(True), clocks(False)
    for when in (early, late):
        assert (when[1:, 1] >= when[:-1, 2]).all(), "whoever waits goes on when the one before has ended"
    assert (late[1:, 0] >= late[:-1, 2]).all(), "told not to, each begins behind the last"
    # Within a graph one run on an H200 took every other one so early.
    assert (early[1:, 0] < early[:-1, 2]).mean() > 0.4, "else, while the last still runs"


def test_a_graph_holds_early_edges_between_kernels_that_wait_only(cuda_ops, kernels):
    if current_device().arch < (9, 0):
        pytest.skip("kernels of this device cannot begin early")
    import cupy

    when = cuda_ops.zeros((3,), np.uint64)
    more = cuda_ops.zeros((3,), np.uint64)

    def work():
        launch(kernels, "silent_kernel", 1, 1, when, defines={"WAITS": 1})
        launch(kernels, "clock_kernel", 1, 1, when, np.uint64(0), defines={"WAITS": 1})
        launch(kernels, "clock_kernel", 1, 1, when, np.uint64(0), defines={"WAITS": 1})
        launch(kernels, "silent_kernel", 1, 1, when, defines={"WAITS": 1})
        cupy.cuda.runtime.memcpyAsync(more.data.ptr, when.data.ptr, 24, 3, cupy.cuda.get_current_stream().ptr)
        launch(kernels, "clock_kernel", 1, 1, when, np.uint64(0), defines={"WAITS": 1})

    work()
    for wanted, expected in ((True, [True, True, False, False, False]), (False, [False] * 5)):
        with overlapping(wanted):
            graph, _ = capture(work)
        assert cuda_graphs.overlaps(graph.graph) == expected
        graph.launch()
    cuda_ops.synchronize()


@pytest.mark.parametrize("make", [EagerStep, CompiledStep])
@pytest.mark.parametrize("name", ["resnet20", "unet", "mobilenet_v2"])
def test_no_bit_of_a_step_depends_on_who_begins_early(cuda_ops, name, make):
    def run(wanted):
        with overlapping(wanted):
            model = small_model(name, "bf16", "cuda")
            return bits(model, m.SGD(model, 0.05, 0.9, 1e-4), name, steps=6, make=make)

    assert run(True) == run(False)
