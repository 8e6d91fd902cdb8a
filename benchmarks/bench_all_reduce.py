"""All-reduce between ranks of one host, in one run and in turn: on CPUs shared memory beside MPI, on GPUs links beside
NCCL.

``python benchmarks/bench_all_reduce.py --ranks 2 --json out.json``, or under mpiexec; ``--device cuda`` on GPUs. The
arms on CPUs: minidl's engine in shared memory, on arrays that lie there (as gradients do) and on any array (copied in
and out), its MPI engine (which compares what the ranks call before it sends), and as peer mpi4py's in-place Allreduce
bare. On GPUs: the ways of `minidl.dist.ipc`, each where it can be taken, on gradients' memory, and as peer NCCL's call
bare; calls are replayed in a CUDA graph, on parts of an array larger than the cache in turn; then what starting a
message costs the host outside of graphs. A sample is a few calls one after another on float32, and the slowest rank's
time counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.ranks import all_reduces

from benchmarks.device import wait
from minidl import checks, dist, launch
from minidl.cuda import all_reduce as kernels
from minidl.cuda.capture import Room
from minidl.dist import ipc
from minidl.dist.communicator import place
from minidl.dist.nccl import NCCLCommunicator
from minidl.dist.shm import ShmCommunicator
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show
from minidl.profile.timing import Timing, slowest

ARMS, PEER = ("shm", "shm-copied", "mpi"), "mpi4py"
FAR = float("inf")
ROUTES = {
    "flagged": ipc.Routes(FAR, 0, 0),
    "one-shot": ipc.Routes(0, FAR, 0),
    **{f"two-shot-{blocks}": ipc.Routes(0, 0, FAR, blocks) for blocks in (8, 16, 32, 64)},
}
LARGEST = {"flagged": kernels.SLOT_DATA_BYTES, "one-shot": kernels.MAILBOX_BYTES}
HOST_CALLS = 20  # started one after another
ROTATED_BYTES = 256 << 20  # beyond the cache of any GPU
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100 << 20)
LINK_SIZES = (1 << 10, *SIZES[:2], 32 << 10, *SIZES[2:4], 512 << 10, SIZES[4], 2 << 20, SIZES[5], 8 << 20, *SIZES[6:])


def calls_of(size: int) -> int:
    """All-reduces of a sample."""
    return max(1, min(50, (4 << 20) // size))


def sample(comm: dist.Communicator, reduce: Callable[[np.ndarray], None], array: np.ndarray, calls: int) -> float:
    """Milliseconds per call on this rank."""
    comm.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        reduce(array)
    return (time.perf_counter() - started) * 1e3 / calls


def measure(comm: ShmCommunicator, size: int, samples: int) -> dict[str, Timing]:
    """Milliseconds of each arm; a collective."""
    from mpi4py import MPI

    array, calls = np.zeros(size // 4, np.float32), calls_of(size)
    array[:] = 0  # the system hands out the pages now
    arms = {
        "shm": (comm.all_reduce, place(comm, array)),
        "shm-copied": (comm.all_reduce, array),
        "mpi": (comm.control.all_reduce, array),
        "mpi4py": (lambda array: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array), array),
    }
    for reduce, message in arms.values():
        reduce(message)
    own = {name: [] for name in arms}
    for _ in range(samples):
        for name, (reduce, message) in arms.items():
            own[name].append(sample(comm, reduce, message, calls))
    return {name: slowest(comm, samples) for name, samples in own.items()}


def measure_links(comm: NCCLCommunicator, arena: Any, size: int, samples: int) -> dict[str, Timing]:
    """As `measure`, on GPUs. ``arena``: float32, placed, of `ROTATED_BYTES`."""
    import cupy

    nccl, room, count = comm._nccl, Room(), size // 4
    stream = room.stream
    calls = max(2, min(20, (64 << 20) // size))
    parts = [arena[i * count : (i + 1) * count] for i in range(max(1, arena.size // count))]
    turns = [parts[i % len(parts)] for i in range(calls)]

    def bare(part: Any) -> None:
        pointer = part.data.ptr
        comm._inline.allReduce(pointer, pointer, part.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)

    def captured(call: Callable[[Any], None]) -> Callable[[], None]:
        return room.capture(lambda: [call(part) for part in turns])[0]

    graphs = {"nccl": captured(bare)}
    for name, routes in ROUTES.items():
        if size <= LARGEST.get(name, FAR):
            comm.links.routes = routes
            graphs[name] = captured(comm.all_reduce)
    comm.links.routes = ipc.Routes()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    own: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(samples + 1):
        for name, replay in graphs.items():
            stream.synchronize()
            comm.barrier()
            begin.record(stream)
            replay()
            end.record(stream)
            end.synchronize()
            own[name].append(cupy.cuda.get_elapsed_time(begin, end) / calls)
    return {name: slowest(comm, taken[1:]) for name, taken in own.items()}


def host_us(comm: NCCLCommunicator, arena: Any, torch: bool) -> dict[str, float]:
    """Microseconds of the host for each message that it starts, 1 KiB and 4 MiB, of the slowest rank; a collective.

    Args:
        torch: those of torch.distributed, by which DDP sends its buckets, as well.
    """
    found = {}
    for size in (1 << 10, 4 << 20):
        part = arena[: size // 4]
        starts = dict.fromkeys(("links", "nccl"), partial(comm.start_all_reduce, part))
        if torch:
            starts["torch.distributed"] = _by_torch(part)
        for name, start in starts.items():
            comm.links.routes = ipc.ROUTES.get(name, ipc.Routes())
            times = [_start_us(comm, start) for _ in range(15)]
            found[f"{name}, {size >> 10} KiB"] = max(comm.share(statistics.median(times)))
    comm.links.routes = ipc.Routes()
    return found


def _start_us(comm: NCCLCommunicator, start: Callable[[], Any]) -> float:
    wait("cuda")
    comm.barrier()
    started = time.perf_counter()
    works = [start() for _ in range(HOST_CALLS)]
    us = (time.perf_counter() - started) / HOST_CALLS * 1e6
    for work in works:
        work.wait()
    return us


def _by_torch(part: Any) -> Callable[[], Any]:
    from torch import distributed, from_dlpack

    return partial(distributed.all_reduce, from_dlpack(part), async_op=True)


def rows_of(size: int, ranks: int, times: dict[str, Timing], peer_name: str) -> list[dict]:
    """Rows of the result file: ours, each with the bare call beside it."""
    peer = times[peer_name]
    rows = []
    for arm in (arm for arm in times if arm != peer_name):
        rows.append(
            {
                "case": f"{size} bytes/{ranks} ranks", "pass": "all_reduce", "dtype": "fp32", "arm": arm,
                "ms": times[arm].ms, "min_ms": times[arm].min_ms, "spread": times[arm].spread, "floor_ms": None,
                "bytes": size, "ranks": ranks, "peers": {peer_name: peer.ms}, "peers_min": {peer_name: peer.min_ms},
            }
        )  # fmt: skip
    return rows


def table_of_links(rows: list[dict]) -> Iterator[list[str]]:
    """A line for each size: microseconds of all ways, the bare call and its time over that of the fastest way."""
    for size in dict.fromkeys(row["bytes"] for row in rows):
        found = {row["arm"]: row for row in rows if row["bytes"] == size}
        peer = next(iter(found.values()))["peers"]["nccl"]
        best = min(row["ms"] for row in found.values())
        cells = [f"{found[name]['ms'] * 1e3:.1f}" if name in found else "" for name in ROUTES]
        yield [f"{size >> 10:,}", *cells, f"{peer * 1e3:.1f}", f"{peer / best:.2f}"]


def on_gpus(options: argparse.Namespace) -> None:
    """Measure all sizes on GPUs and show them; a collective.

    Raises:
        ValueError: where the GPUs do not see each other's memory.
    """
    import cupy

    comm = dist.init("cuda")
    if getattr(comm, "links", None) is None:
        raise checks.impossible("bench_all_reduce", "the GPUs of all ranks do not see each other's memory")
    arena, rows = comm.place(cupy.zeros(ROTATED_BYTES // 4, np.float32)), []
    for size in (size for size in LINK_SIZES if size <= options.largest):
        rows += rows_of(size, comm.size, measure_links(comm, arena, size, options.samples), "nccl")
    if options.torch:
        from benchmarks import ddp

        ddp.join(comm, "cuda")
    host = host_us(comm, arena, options.torch)
    if options.torch:
        ddp.leave()
    if comm.rank == 0:
        columns = ["KiB", *ROUTES, "nccl", "nccl / best"]
        notes = [f"host, us for each message started: {', '.join(f'{k} {v:.1f}' for k, v in host.items())}"]
        show(f"all-reduce on {comm.size} GPUs, microseconds", columns, list(table_of_links(rows)), notes=notes)
        if options.json:
            write(Path(options.json), result("bench_all_reduce", rows, machine_record(), host_us=host))
    comm.close()


def main() -> None:
    """Measure all sizes and show them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="where no launcher started it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--torch", action="store_true", help="on GPUs: torch.distributed's time of the host, as well")
    parser.add_argument("--json", help="result file")
    options = parser.parse_args()
    if dist.launched_size() == 1:
        sys.exit(launch.main(["-n", str(options.ranks), *sys.argv]))
    if options.device == "cuda":
        on_gpus(options)
        return
    comm = ShmCommunicator(dist.init("cpu", "mpi"))
    rows = []
    for size in (size for size in SIZES if size <= options.largest):
        rows += rows_of(size, comm.size, measure(comm, size, options.samples), PEER)
    if comm.rank == 0:
        content = result("bench_all_reduce", rows, machine_record())
        print_tables(content, all_reduces)
        if options.json:
            write(Path(options.json), content)
    comm.close()


if __name__ == "__main__":
    main()
