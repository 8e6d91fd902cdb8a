"""Sums by memory that GPUs share, each way beside sums in rank order on the host: ``links.py OUT``.

What differs in any bit goes to OUT, and how the ways end that are not meant to: a rank that does not come, memory that
nobody refers to any more.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import cupy
import numpy as np

from minidl.backend import get_ops
from minidl.cuda import all_reduce as kernels
from minidl.dist import init, ipc
from minidl.precision import bfloat16

ALL = float("inf")
WAYS = {
    "flagged": ipc.Routes(ALL, 0, 0),
    "one_shot": ipc.Routes(0, ALL, 0),
    "two_shot": ipc.Routes(0, 0, ALL),
    "two_shot of a block": ipc.Routes(0, 0, ALL, blocks=1),
    "as usual": ipc.Routes(),
}
DTYPES = ["float32", bfloat16, "float16", "float64", "int32", "int64"]
SIZES = [1, 2, 3, 31, 64, 1000, 1001, 4099, 70001, 262144, 1048577]
comm, ops = init("cuda"), get_ops("cuda")


@functools.cache
def drawn(rank: int, size: int, dtype) -> np.ndarray:
    values = np.random.default_rng(100 * size + rank).standard_normal(size) * 100
    return values.astype(dtype)


@functools.cache
def expected(size: int, dtype) -> np.ndarray:
    """The sum in rank order, 16-bit types in float32 and rounded once."""
    wide = np.float32 if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)
    total = drawn(0, size, dtype).astype(wide)
    for rank in range(1, comm.size):
        total = total + drawn(rank, size, dtype).astype(wide)
    return total.astype(dtype)


def fits(way: str, nbytes: int) -> bool:
    return nbytes <= {"flagged": kernels.SLOT_DATA_BYTES, "one_shot": kernels.MAILBOX_BYTES}.get(way, ALL)


def sums() -> dict[str, int]:
    """Elements that differ, of arrays at odd and even places, three times in a row."""
    wrong: dict[str, int] = {}
    arenas = {}
    for dtype in DTYPES:
        dtype = np.dtype(dtype)
        arenas[dtype] = comm.place(cupy.zeros(SIZES[-1] + 64, dtype))
    for (way, routes), dtype, size in itertools.product(WAYS.items(), DTYPES, SIZES):
        dtype = np.dtype(dtype)
        if not fits(way, size * dtype.itemsize):
            continue
        comm.links.routes = routes
        want = expected(size, dtype)
        for begin in (0, 1, 32):
            arena = arenas[dtype]
            part, behind = arena[begin : begin + size], ops.to_host(arena[begin + size : begin + size + 1]).tobytes()
            for started in (True, False, True):
                ops.copy_into(part, ops.from_host(drawn(comm.rank, size, dtype)))
                if started:
                    comm.start_all_reduce(part).wait()
                else:
                    comm.all_reduce(part)
                differ = int((ops.to_host(part).view(np.uint8) != want.view(np.uint8)).sum())
                differ += ops.to_host(arena[begin + size : begin + size + 1]).tobytes() != behind
                if differ:
                    wrong[f"{way} {dtype} {size} at {begin}"] = differ
    comm.links.routes = ipc.Routes()
    return wrong


def elsewhere() -> dict[str, int]:
    """Elements that differ where each rank's array begins at another place."""
    wrong = {}
    for dtype, size in itertools.product(("float32", bfloat16), (1000, 40_000, 262_144)):
        dtype = np.dtype(dtype)
        if not fits("one_shot", size * dtype.itemsize):
            continue
        for way in ("one_shot", "as usual"):
            comm.links.routes = WAYS[way]
            array = ops.empty((size + 8,), dtype)[comm.rank : comm.rank + size]
            ops.copy_into(array, ops.from_host(drawn(comm.rank, size, dtype)))
            comm.all_reduce(array)
            differ = int((ops.to_host(array).view(np.uint8) != expected(size, dtype).view(np.uint8)).sum())
            if differ:
                wrong[f"{way} {dtype} {size} at {comm.rank}"] = differ
    comm.links.routes = ipc.Routes()
    return wrong


def gathers() -> dict[str, int]:
    wrong = {}
    for dtype, size in itertools.product(("float32", "uint8", bfloat16, "float64"), (1, 3, 8, 1000, 4096, 70001)):
        dtype = np.dtype(dtype)
        out = ops.to_host(comm.all_gather(ops.from_host(drawn(comm.rank, size, dtype))))
        want = np.stack([drawn(rank, size, dtype) for rank in range(comm.size)])
        if differ := int((out.view(np.uint8) != want.view(np.uint8)).sum()):
            wrong[f"gather {dtype} {size}"] = differ
    return wrong


def replays(way: str) -> int:
    """Elements that differ after replays of a graph, eager calls between them."""
    comm.links.routes = WAYS[way]
    stream, size, wrong = cupy.cuda.Stream(non_blocking=True), 100_000, 0
    values = comm.place(cupy.zeros(size, np.float32))
    step = cupy.zeros(1, np.float32)

    def work():
        step.__iadd__(1)
        values[...] = step * (comm.rank + 1)
        comm.start_all_reduce(values[: size // 2]).wait()
        comm.start_all_reduce(values[size // 2 :]).wait()

    cupy.cuda.Device().synchronize()  # both are zero before the stream, which waits for nobody, adds to them
    with stream:
        work()
        stream.synchronize()
        stream.begin_capture()
        work()
        graph = stream.end_capture()
        for replay in range(6):
            if replay == 3:
                work()
            graph.launch(stream)
            if replay == comm.rank:
                time.sleep(0.05)  # now one is late, now the other
            stream.synchronize()
            count = replay + 2 + (replay >= 3)
            wrong += int((values != count * comm.size * (comm.size + 1) // 2).sum())
    comm.links.routes = ipc.Routes()
    return wrong


def memory() -> list[int]:
    """Regions after many placed arrays that nobody keeps."""
    counts = []
    for _ in range(5):
        array = comm.place(cupy.zeros(1000, np.float32))
        comm.all_reduce(array)
        del array
        counts.append(len(comm.links._regions))
    return counts


def given_up() -> tuple[float, str]:
    """A call that the other ranks never make: seconds until the kernel ends, and what the engine says then."""
    links = ipc.connect(comm._control)  # which no watchdog looks at
    short = replace(links._lanes["inline"].channel, limit_ns=200_000_000)
    began = time.monotonic()
    if comm.rank == 0:
        kernels.flagged(cupy.ones(10, np.float32), short)
        cupy.cuda.get_current_stream().synchronize()
    seconds = time.monotonic() - began
    try:
        links.check()
        said = ""
    except RuntimeError as error:
        said = str(error)
    links.close(comm.barrier)
    return seconds, said


answer = {"rank": comm.rank, "links": comm.links is not None}
if comm.links is not None:
    answer |= {
        "wrong": sums() | elsewhere() | gathers(),
        "replays": {way: replays(way) for way in WAYS if fits(way, 200_000)},
    }
    answer |= {"regions": memory()}
    answer["seconds"], answer["said"] = given_up()
Path(sys.argv[1], f"{comm.rank}.json").write_text(json.dumps(answer))
comm.barrier()
comm.close()
