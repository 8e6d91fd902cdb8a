"""`init` joins the ranks of a job, `world` is what it joined; one process alone is a world too."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from math import inf
from types import ModuleType

from minidl import checks
from minidl.dist import abort, watchdog
from minidl.dist.agree import by_value, require_same, together
from minidl.dist.communicator import SOLO, Communicator
from minidl.dist.elastic import require as require_tolerance
from minidl.dist.host import HostCommunicator
from minidl.dist.mpi import MPICommunicator
from minidl.dist.shm import ShmCommunicator
from minidl.dist.threads import cap_threads, ranks_sharing_cores, sleep_where_cores_are_short

_DEVICES = ("auto", "cpu", "cuda")
ENGINES = {"cpu": ("auto", "shm", "mpi"), "cuda": ("auto", "nccl", "staged", "cuda-mpi")}
ENGINE = "MINIDL_ENGINE"  # for programs that do not say
START_SECONDS = 60.0  # that ranks may come apart at least, whatever the watchdog's limit: some load from slower disks

# Number of ranks as told by Open MPI, by MPICH, Intel MPI and others with its process manager, by MVAPICH2, and by
# srun (SLURM_NTASKS is also set in a batch script's own single process, this one is not).
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

_world: Communicator = SOLO
_device: str | None = None  # of the last init, until the communicator is closed
# Of ranks that could not be joined: by it they tell of that with one voice. The next `init` closes it, or the end.
_refused: MPICommunicator | None = None


def world() -> Communicator:
    """The communicator over all ranks: that of `init`, `SOLO` before it and after its communicator was closed."""
    return SOLO if getattr(_world, "closed", False) else _world


def given(comm: Communicator | None, who: str) -> Communicator:
    """``comm``; where there is none `SOLO`, which has to be said where there are several ranks: gradients that one part
    of a step divides by the samples of all ranks, and another sums over one, would be wrong without an error.

    Raises:
        ValueError: naming ``who`` was given none.
        TypeError: for what is no communicator.
    """
    if comm is None and world().size > 1:
        remedy = "pass what dist.init() gave, or dist.SOLO for what this rank does alone"
        raise checks.bad_value(who, "comm", "given where there are several ranks", comm, remedy)
    if comm is None:
        return SOLO
    return checks.instance(who, "comm", comm, Communicator, "a communicator", "dist.init() gives one")


def init(device: str = "auto", engine: str = "", *, elastic: bool = False) -> Communicator:
    """Join the ranks of this job and return the communicator over them; a collective.

    A process that no MPI launcher started is alone and gets `SOLO`; neither MPI nor a GPU is touched then. With more
    ranks the CPU threads are shared out, a failing rank ends the job from now on (`minidl.dist.abort`), and with
    ``"cuda"`` each rank is bound to a GPU of its own.

    Args:
        device: where the arrays to be sent live: ``"cpu"``, ``"cuda"`` (NCCL), or ``"auto"``: cuda where every rank has
            a GPU, cpu where none has.
        engine: how arrays travel. Those of the cpu: ``"shm"`` (memory that the ranks of a host share, MPI between
            hosts), ``"mpi"``, or ``"auto"``: shm where every host has the same number of ranks, two at least, and room
            for it, else mpi. Those of GPUs: ``"nccl"``, ``"auto"``: NCCL, and by memory that the GPUs of a host share
            where that is faster (`minidl.dist.ipc`), ``"staged"``: through the host, as on the cpu, or ``"cuda-mpi"``:
            MPI, if it takes them as they are. Default: $MINIDL_ENGINE, else auto.
        elastic: experimental, on the cpu and by mpi only: the others may go on without a rank that is lost, see
            `minidl.dist.elastic`.

    Raises:
        ValueError: for another device or engine, or one of another device, for shm where hosts have different numbers
            of ranks, or with ``"auto"`` when only some ranks have a GPU.
        ImportError: under a launcher without mpi4py.
        RuntimeError: when the job cannot be joined, on all ranks alike; when called again for another device.
            With ``elastic``: where MPI ends with the first rank that is lost.
    """
    global _world, _device
    engine = engine or os.environ.get(ENGINE) or "auto"
    if device not in _DEVICES:
        raise checks.unknown("device", device, _DEVICES)
    if engine not in (known := sorted({name for names in ENGINES.values() for name in names})):
        raise checks.unknown("engine", engine, known)
    if getattr(_world, "closed", False):
        _world, _device = SOLO, None
    if _world is SOLO:  # nothing is joined yet, or this process is alone and may change its mind
        size = launched_size()
        if elastic and size == 1:
            raise checks.bad_value("init", "elastic", "left out on one rank", elastic, "start it with minidl.launch")
        _world, _device = (SOLO, device) if size == 1 else _join(device, engine, _load_mpi(size), elastic)
    elif device not in ("auto", _device):
        raise checks.order("init", f"called for {device} after {_device}", "close the communicator first")
    return _world


def shrink() -> Communicator:
    """The ranks that are left of `world` after `minidl.dist.elastic.RankLost`; a collective of them.

    Models, losses and loaders of the communicator before are to be made anew.

    Raises:
        RuntimeError: where the ranks were not joined with ``elastic``.
    """
    global _world
    if not getattr(_world, "elastic", False):
        raise checks.order("shrink", "a lost rank ends this job", "join it with dist.init('cpu', elastic=True)")
    before = _world.size
    _world = comm = _world.shrink()
    _install(comm)
    abort.end_hard()  # MPI's own end was seen to hang where a rank is lost
    if comm.rank == 0:
        print(f"minidl: {comm.size} ranks go on of {before}", file=sys.stderr, flush=True)
    return comm


def launched_size() -> int:
    """The number of ranks that this process was started as one of; 1 when no launcher started it."""
    sizes = [int(os.environ.get(variable) or 1) for variable in _SIZE_VARIABLES]
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        sizes.append(mpi.COMM_WORLD.size)
    return max(sizes)


def _load_mpi(size: int) -> ModuleType:
    """The module ``mpi4py.MPI``, having joined the ``size`` ranks that were launched."""
    sleep_where_cores_are_short()
    try:
        MPI = _join_all_ranks_that_were_started()
    except (ImportError, RuntimeError) as error:
        extra = "mpi" if isinstance(error, ModuleNotFoundError) else "mpi-wheel"  # which brings an MPI library too
        what = f"this process was started as one of {size} ranks, and mpi4py, which joins them,"
        raise checks.missing_extra(what, extra, error) from error
    _take_back_signals()
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ,")
    if MPI.COMM_WORLD.size == 1:
        raise checks.order(
            "init",
            f"this process was started as one of {size} ranks, but mpi4py's MPI library ({library}) sees only itself",
            "start the job with that library's own mpiexec (with srun: --mpi=pmix or --mpi=pmi2)",
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise checks.order(
            "init",
            f"messages run beside the program in threads, for which {library} offers no MPI_THREAD_MULTIPLE",
            "use an MPI library built with it, and leave mpi4py.rc.thread_level alone",
        )
    return MPI


def _join_all_ranks_that_were_started() -> ModuleType:
    """mpi4py, whose import starts MPI, which returns when all ranks have come.

    A rank that ended before it came is waited for without end, and MPICH's launcher does not tell. MPI keeps the
    interpreter for itself meanwhile, so the end comes from `faulthandler`: it names this function.
    """
    seconds = max(watchdog.limit(), START_SECONDS)
    if seconds < inf:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        from mpi4py import MPI
    finally:
        faulthandler.cancel_dump_traceback_later()
    return MPI


def _take_back_signals() -> None:
    """From MPICH, which takes SIGUSR1: the word of a batch system that time is up would be lost before training."""
    handler = signal.getsignal(signal.SIGUSR1)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, handler)


def _install(comm: MPICommunicator) -> None:
    calls = comm.roll_call
    abort.install(comm.rank, comm.size, comm.mpi.COMM_WORLD.Abort, lambda: calls.calls, calls.alike)


def _join(device: str, engine: str, mpi: ModuleType, elastic: bool) -> tuple[Communicator, str]:
    global _refused
    if _refused is not None:
        _refused.close()
    _refused = comm = MPICommunicator(mpi, elastic=elastic)
    _install(comm)
    atexit.register(_part)
    sharing = ranks_sharing_cores(comm)
    together(comm, "sharing the cores between ranks", lambda: cap_threads(sharing))
    device = _agree_on_device(comm, device)
    require_same(comm, "elastic", [str(elastic)])
    if elastic:
        together(comm, "joining ranks that go on without a lost one", lambda: _require_elastic(mpi, device, engine))
        engine = "mpi"
    _agree_on_engine(comm, engine, device)
    joined = _on_host(comm, engine) if device == "cpu" else _on_gpus(comm, engine)
    _refused = None
    return joined, device


def _require_elastic(mpi: ModuleType, device: str, engine: str) -> None:
    if device != "cpu" or engine not in ("auto", "mpi"):
        raise checks.impossible("init", f"elastic on {device} by engine {engine}", "it is for the cpu, by mpi")
    require_tolerance(mpi)


def _agree_on_engine(comm: Communicator, engine: str, device: str) -> None:
    told = comm.share(engine)
    if len(set(told)) > 1:
        raise ValueError(f"init: {by_value(f'engine {name}' for name in told)}; all ranks need the same")
    if engine not in ENGINES[device]:
        raise checks.bad_value("init", "engine", f"one of {', '.join(ENGINES[device])} on {device}", engine)


def _on_gpus(comm: MPICommunicator, engine: str) -> Communicator:
    """The engine for arrays of GPUs, each rank bound to its own."""
    from minidl.dist.cuda_mpi import on_device
    from minidl.dist.nccl import NCCLCommunicator, bind_device
    from minidl.dist.staged import DeviceCopies, StagedCommunicator

    device = bind_device(comm)
    if engine == "cuda-mpi":
        return on_device(comm, device)
    if engine == "staged":
        return StagedCommunicator(_on_host(comm, "auto"), DeviceCopies(device))
    return NCCLCommunicator(comm, device, direct=engine == "auto")


def _on_host(comm: MPICommunicator, engine: str) -> HostCommunicator:
    """The engine for arrays of the host; the same everywhere."""
    sizes = set(comm.share(comm.local_size))
    if engine == "mpi" or (engine == "auto" and (len(sizes) > 1 or min(sizes) < 2)):
        return comm
    try:
        return ShmCommunicator(comm)
    except RuntimeError as error:
        if engine == "shm":
            raise
        if comm.rank == 0:
            print(f"minidl: {error}; sums go by MPI, which is slower", file=sys.stderr, flush=True)
        return comm


def _agree_on_device(comm: Communicator, device: str) -> str:
    wanted = comm.share(_find_device() if device == "auto" else device)
    if len(set(wanted)) > 1:
        raise ValueError(f"init: device {device!r}: {by_value(wanted)}; all ranks need the same")
    return wanted[0]


def _find_device() -> str:
    try:
        import cupy
    except ImportError:
        return "cpu"
    return "cuda" if cupy.cuda.is_available() else "cpu"


def _part() -> None:
    """At the normal end of the program."""
    status = abort.departure().code
    (_refused or world()).close()
    abort.end_now(status)
