"""What is installed and what works on this machine, as plain facts: what ``minidl doctor`` tells first."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_tuned
from minidl.dist import mpiexec
from minidl.dist.nccl import load_nccl
from minidl.dist.threads import available_cores


@dataclass(frozen=True)
class Fact:
    """One line of the report: what was looked at, what was found, and, unless ``ok``, what to do about it."""

    name: str
    value: str
    ok: bool
    remedy: str = ""


def facts() -> list[Fact]:
    """Look at everything; never raises, and initialises neither MPI nor a GPU context beyond asking for its name."""
    return [_look(*probe) for probe in _PROBES]


def _look(name: str, probe: Callable[[], str], remedy: str) -> Fact:
    try:
        return Fact(name, probe(), True)
    except Exception as error:
        text = str(error).strip().split("\n")[0].partition("; install it with")[0] or type(error).__name__
        return Fact(name, text, False, remedy)


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError("not installed") from None


def _numpy() -> str:
    import numpy

    blas = numpy.show_config("dicts")["Build Dependencies"]["blas"]
    return f"{numpy.__version__}, BLAS {blas.get('name', 'unknown')} {blas.get('version', '')}".rstrip()


def _cpu_kernels() -> str:
    importlib.import_module("minidl.cpu")
    built = sorted(name.rpartition("._")[2] for name in sys.modules if name.startswith("minidl.cpu._"))
    return f"{len(built)} extension modules: {', '.join(built)}"


def _openmp() -> str:
    from threadpoolctl import threadpool_info

    pools = [f"{pool['user_api']} {pool['num_threads']} ({pool['prefix']})" for pool in threadpool_info()]
    return ", ".join(pools) or "no thread pool loaded"


def _cores() -> str:
    told = os.environ.get("OMP_NUM_THREADS")
    limit = f", OMP_NUM_THREADS={told}" if told else ""
    return f"{len(available_cores())} of {os.cpu_count()} for this process{limit}"


def _cupy() -> str:
    import cupy

    version = cupy.cuda.runtime.runtimeGetVersion()
    return f"{cupy.__version__}, CUDA runtime {_cuda_version(version)}"


def _nvrtc() -> str:
    found, least = (".".join(map(str, version)) for version in (nvrtc.version(), nvrtc.LEAST_FOR_HOPPER))
    old = nvrtc.version() < nvrtc.LEAST_FOR_HOPPER
    return found + f", for H100 and H200 better {least} or newer" * old


def _driver() -> str:
    path = shutil.which("nvidia-smi")
    if path is None:
        raise RuntimeError("no nvidia-smi")
    asked = [path, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    lines = [line.strip() for line in told.stdout.splitlines() if line.strip()]
    if told.returncode != 0 or not lines:
        raise RuntimeError((lines or told.stderr.strip().splitlines() or ["nvidia-smi lists no GPU"])[0])
    version, _, name = lines[0].partition(", ")
    return f"{version}, {len(lines)} x {name}"


def _gpus() -> str:
    try:
        import cupy
    except ImportError:
        raise RuntimeError("not asked, for CuPy is missing") from None
    runtime = cupy.cuda.runtime
    driver = runtime.driverGetVersion()
    if driver == 0:
        raise RuntimeError("no CUDA driver")
    names = []
    for index in range(runtime.getDeviceCount()):
        found = runtime.getDeviceProperties(index)
        arch, gib = f"sm_{found['major']}{found['minor']}", found["totalGlobalMem"] / 2**30
        names.append(f"{index}: {found['name'].decode()}, {gib:.0f} GiB, {arch}")
    return f"{'; '.join(names)} (driver for CUDA {_cuda_version(driver)})"


def _tuned() -> str:
    _gpus()  # its words where there is none
    table = conv2d_tuned.load()
    return f"of {len(table.choices)} passes of convolutions" if table.choices else "none: the models of time choose"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl() -> str:
    number = load_nccl().get_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# Asked without MPI_Init, which for a process outside a launcher may be refused (Open MPI as root) or take seconds; in a
# process of its own, because a broken library may end the process.
_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print("minidl:", MPI.Get_library_version().splitlines()[0].strip("\\0 ,"))
"""
_RANK_VARIABLES = ("PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_", "SLURM_", "MV2_COMM")


def _ask(program: str) -> str:
    """What a process of its own answers."""
    # Without what makes a child of a rank look like one.
    alone = {key: value for key, value in os.environ.items() if not key.startswith(_RANK_VARIABLES)}
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env=alone)
    answers = [line for line in told.stdout.splitlines() if line.startswith("minidl:")]
    if not answers:
        said = [line.strip() for line in told.stderr.splitlines() if line.strip()]
        raise RuntimeError((said or [f"mpi4py ended with status {told.returncode}"])[-1])
    return " ".join(answers[0].removeprefix("minidl:").split())


# Only Open MPI answers before it is started.
_ASK_CUDA_AWARE = """
import ctypes
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
library = ctypes.CDLL(MPI.__file__)
known = "Open MPI" in MPI.Get_library_version() and hasattr(library, "MPIX_Query_cuda_support")
print("minidl:", ("yes" if library.MPIX_Query_cuda_support() else "no") if known else "it does not say")
"""


def _mpiexec() -> str:
    found = mpiexec.find()
    return f"{found.path} ({found.family}, {found.version})"


def _shared_memory() -> str:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / 2**20
    if free < _SHARED_MIB:
        raise RuntimeError(f"{free:.0f} MiB free in {folder}")
    return f"{free:,.0f} MiB free in {folder}"


_SHARED_MIB = 256  # gradients of a few ranks
_PYTHON = f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.machine()}"
_BY_NCCL = "arrays of GPUs go by NCCL unless MINIDL_ENGINE is staged or cuda-mpi"
_GPU_EXTRA = "pip install 'minidl[cuda13]' (or 'minidl[cuda12]')"
_PROBES: list[tuple[str, Callable[[], str], str]] = [
    ("Python", lambda: _PYTHON, ""),
    ("NumPy", _numpy, "pip install numpy"),
    ("CPU kernels", _cpu_kernels, "build them: pip install --no-build-isolation -e ."),
    ("thread pools", _openmp, "pip install threadpoolctl"),
    ("cores", _cores, ""),
    ("CuPy", _cupy, _GPU_EXTRA),
    ("NVRTC", _nvrtc, _GPU_EXTRA),
    ("driver", _driver, "a GPU and its driver; the CPU kernels need neither"),
    ("GPUs", _gpus, "CuPy and a driver, see above"),
    ("tuned kernels", _tuned, "CuPy and a driver, see above"),
    ("NCCL", _nccl, _GPU_EXTRA),
    ("mpi4py", partial(_package, "mpi4py"), "pip install 'minidl[mpi]'"),
    ("MPI library", lambda: _ask(_ASK_MPI), "an MPI that mpi4py can load: pip install 'minidl[mpi-wheel]'"),
    ("CUDA-aware MPI", lambda: f"{_ask(_ASK_CUDA_AWARE)}; {_BY_NCCL}", "an MPI that mpi4py can load, see above"),
    ("mpiexec", _mpiexec, "pip install 'minidl[mpi-wheel]'"),
    ("shared memory", _shared_memory, "CPU ranks sum slower without room for gradients: docker run --shm-size=8g"),
    ("ml_dtypes", partial(_package, "ml_dtypes"), "pip install ml_dtypes"),
    ("safetensors", partial(_package, "safetensors"), "pip install safetensors"),
    ("rich", partial(_package, "rich"), "pip install 'minidl[cli]'"),
    ("scikit-learn", partial(_package, "scikit-learn"), "pip install 'minidl[data]'"),
    ("scikit-image", partial(_package, "scikit-image"), "pip install 'minidl[data]'"),
    ("Pillow", partial(_package, "pillow"), "pip install 'minidl[data]'"),
    ("matplotlib", partial(_package, "matplotlib"), "pip install 'minidl[plot]'"),
]
