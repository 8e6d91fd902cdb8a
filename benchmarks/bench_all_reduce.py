"""All-reduce between CPU ranks of one host, shared memory beside MPI, in one run and in turn.

``python benchmarks/bench_all_reduce.py --ranks 2 --json out.json``, or under mpiexec. The arms: minidl's engine in
shared memory, on arrays that lie there (as gradients do) and on any array (copied in and out), its MPI engine (which
compares what the ranks call before it sends), and as peer mpi4py's in-place Allreduce bare. A sample is a few calls one
after another on float32, and the slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl import dist, launch
from minidl.dist.communicator import place
from minidl.dist.shm import ShmCommunicator
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show

ARMS, PEER = ("shm", "shm-copied", "mpi"), "mpi4py"
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 100 << 20)


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


def measure(comm: ShmCommunicator, size: int, samples: int) -> dict[str, list[float]]:
    """Milliseconds of each arm, sample by sample; a collective."""
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
    return {name: [max(times) for times in zip(*comm.share(own[name]), strict=True)] for name in arms}


def rows_of(size: int, ranks: int, times: dict[str, list[float]]) -> list[dict]:
    """Rows of the result file: ours, each with the bare call beside it."""
    peer = times[PEER]
    rows = []
    for arm in ARMS:
        low, median, high = statistics.quantiles(times[arm], n=4, method="inclusive")
        rows.append(
            {
                "case": f"{size} bytes/{ranks} ranks", "pass": "all_reduce", "dtype": "fp32", "arm": arm, "ms": median,
                "min_ms": min(times[arm]), "spread": (high - low) / median, "floor_ms": None, "bytes": size,
                "ranks": ranks, "peers": {PEER: statistics.median(peer)}, "peers_min": {PEER: min(peer)},
            }
        )  # fmt: skip
    return rows


def table_of(rows: list[dict]) -> Iterator[list[str]]:
    """A line for each size; the gain is that of arrays in shared memory over the bare call."""
    for first in range(0, len(rows), len(ARMS)):
        ours = rows[first : first + len(ARMS)]
        figures = [figure for row in ours for figure in (row["min_ms"], row["ms"])]
        peer = ours[0]["peers_min"][PEER], ours[0]["peers"][PEER]
        gain = f"{peer[0] / ours[0]['min_ms']:.2f}"
        yield [f"{ours[0]['bytes'] >> 10:,}", *(f"{figure:.4f}" for figure in (*figures, *peer)), gain]


def main() -> None:
    """Measure all sizes and show them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="where no launcher started it")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--chunk", type=int, default=0, help="bytes that travel at once in shared memory")
    parser.add_argument("--json", help="result file")
    options = parser.parse_args()
    if dist.launched_size() == 1:
        sys.exit(launch.main(["-n", str(options.ranks), __file__, *sys.argv[1:]]))
    base = dist.init("cpu", "mpi")
    comm = ShmCommunicator(base, options.chunk)
    rows = []
    for size in (size for size in SIZES if size <= options.largest):
        rows += rows_of(size, comm.size, measure(comm, size, options.samples))
    if comm.rank == 0:
        columns = ["KiB", *(f"{arm} {what}" for arm in (*ARMS, PEER) for what in ("min", "median")), "gain by minima"]
        show(f"all-reduce, {comm.size} ranks, milliseconds", columns, list(table_of(rows)))
        if options.json:
            write(Path(options.json), result("bench_all_reduce", rows, machine_record()))
    comm.close()


if __name__ == "__main__":
    main()
