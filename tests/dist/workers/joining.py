"""What `init` answers on this rank: ``joining.py OUT NAME``; the answer goes to OUT/<rank>.json."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from minidl.dist import SOLO, init, require_same, require_same_arrays, roll_call, shrink, world


def rank() -> int:
    return int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


def error_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def once():
    before = world() is SOLO
    comm = init("cpu")
    same = init("cpu") is comm and init("auto") is comm and world() is comm
    other = error_of(init, "cuda")
    comm.close()
    closed = error_of(comm.barrier)
    after = world() is SOLO
    again = init("cpu")
    total = np.ones(3)
    again.all_reduce(total)
    start = dict(before=before, same=same, other=other)
    return dict(start, closed=closed, after=after, total=total.tolist(), size=again.size)


def again():
    """Parted and joined anew, while what rank 0 told the next one is under way: that one listens no more."""
    sums = []
    for number in range(3):
        comm = init("cpu", "mpi" if number % 2 else "shm")
        comm.all_reduce(total := np.full(3, number))
        sums.append(int(total.sum()))
        calls = comm.roll_call
        calls._compare = partial(tell_late, calls, calls._compare)
        comm.close()
    return dict(sums=sums)


def tell_late(calls, compare):
    """As the last thing before it listens no more itself."""
    if calls._comm.rank == 0 and threading.current_thread() is threading.main_thread():
        time.sleep(0.3)
        for _ in range(5):
            calls._tell(1, (roll_call._PASSED, calls._calls_so_far()))
    compare()


def without_mpi4py():
    sys.modules["mpi4py"] = None
    return dict(error=error_of(init))


def without_threads():
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    return dict(error=error_of(init))


def without_threadpoolctl():
    if rank() == 1:
        sys.modules["threadpoolctl"] = None
    return dict(error=error_of(init, "cpu"))


def without_shared_memory():
    """Rank 1 finds none at first."""
    from minidl.dist import shm

    if rank() == 1:

        def none(*_):
            raise OSError(28, "No space left on device")

        shm._open_file = none
    comm = init("cpu")
    comm.all_reduce(total := np.ones(3))
    comm.close()
    return dict(name=comm.name, total=total.tolist(), error=error_of(init, "cpu", "shm"))


def engines():
    """Told differently, told wrongly, and told to use MPI."""
    different = error_of(init, "cpu", "mpi" if rank() == 1 else "shm")
    comm = init("cpu", "mpi")
    name = comm.name
    comm.close()
    return dict(different=different, unknown=error_of(init, "cpu", "smh"), name=name, auto=init("cpu").name)


def without_gpu():
    return dict(error=error_of(init, "cuda"), solo=world() is SOLO)


def elastic():
    """Where nobody told MPI to go on without a lost rank."""
    answer = dict(error=error_of(partial(init, elastic=True), "cpu"))
    answer["gpus"] = error_of(partial(init, elastic=True), "cpu", "shm").split("ValueError: init: ")[-1]
    answer["some"] = error_of(partial(init, elastic=rank() == 1), "cpu")
    init("cpu")
    return answer | dict(shrink="a lost rank ends this job" in error_of(shrink))


def cuda_mpi():
    return dict(error=error_of(init, "cuda", "cuda-mpi"), solo=world() is SOLO)


def one_rank_without_gpu():
    """The others have one, here a pretended one."""
    if rank() != 1:
        runtime = SimpleNamespace(getDeviceCount=lambda: 1, deviceGetPCIBusId=lambda index: f"0000:0{rank()}")
        cuda = SimpleNamespace(runtime=runtime, Device=lambda index: SimpleNamespace(use=lambda: None))
        sys.modules["cupy"] = SimpleNamespace(cuda=cuda)
    return without_gpu()


def hidden_gpu():
    """Rank 1 is not shown its own."""
    if rank() == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return without_gpu()


def different_devices():
    return dict(error=error_of(init, "cuda" if rank() == 1 else "cpu"), solo=world() is SOLO)


def threads():
    from threadpoolctl import threadpool_info

    init("cpu")
    blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    sleeps = os.environ.get("MPIR_CVAR_ENABLE_HEAVY_YIELD")
    return dict(blas=blas, omp=os.environ.get("OMP_NUM_THREADS"), cores=len(os.sched_getaffinity(0)), sleeps=sleeps)


def bound_threads():
    """As if the launcher had bound each rank to a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank() % len(cores)]})
    return threads()


def different_plans():
    comm = init("cpu")
    plan = ["conv1.weight (64, 3, 7, 7)", "fc.weight (1000, 512)", "fc.bias (1000,)"]
    if comm.rank == 1:
        plan[1] = "fc.weight (10, 512)"
    shape = error_of(require_same, comm, "parameter plan", plan)
    length = error_of(require_same, comm, "parameter plan", plan[: 2 if comm.rank == 0 else 3])
    weights = {"conv1.weight": np.arange(9.0), "fc.weight": np.zeros((3, 2), "float32")}
    if comm.rank == 0:
        weights["fc.weight"][2, 1] = -0.0  # equal in value, not in bits
    return dict(shape=shape, length=length, weights=error_of(require_same_arrays, comm, "starting weights", weights))


def errors_leave_ranks_in_step():
    comm = init("cpu")
    halves = np.ones(4, "float16")
    found = [error_of(getattr(comm, call), halves) for call in ("all_reduce", "start_all_reduce")]
    read_only = np.ones(4)
    read_only.flags.writeable = False
    found.append(error_of(comm.all_reduce, read_only))
    comm.all_reduce(total := np.ones(4))
    return dict(errors=found, total=total.tolist())


out, name = sys.argv[1:]
answer = globals()[name]()
Path(out, f"{rank()}.json").write_text(json.dumps(answer))
