"""What is installed and what works on this machine, as plain facts: the content of ``minidl info``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from minidl.dist import mpiexec
from minidl.dist.nccl import load_nccl
from minidl.dist.threads import available_cores

__all__ = ["Fact", "facts"]


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
        text = str(error).strip().split("\n")[0] or type(error).__name__
        return Fact(name, text, False, remedy)


def _package(name: str) -> Callable[[], str]:
    def probe() -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise RuntimeError("not installed") from None

    return probe


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.machine()}"


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
    from cupy.cuda import nvrtc

    return ".".join(str(part) for part in nvrtc.getVersion())


def _gpus() -> str:
    import cupy

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


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl() -> str:
    number = load_nccl().get_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# In a process of its own: starting MPI twice is not allowed, and a broken library may end the process.
_ASK_MPI = """
from mpi4py import MPI
level = ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"][
    [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE].index(MPI.Query_thread())]
print("minidl:", MPI.Get_library_version().splitlines()[0].strip("\\0 ,"), "| thread level", level)
"""
_RANK_VARIABLES = ("PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_", "SLURM_", "MV2_COMM")


def _mpi_library() -> str:
    # Without what makes a child of a rank look like one.
    alone = {key: value for key, value in os.environ.items() if not key.startswith(_RANK_VARIABLES)}
    told = subprocess.run([sys.executable, "-c", _ASK_MPI], capture_output=True, text=True, timeout=30, env=alone)
    answers = [line for line in told.stdout.splitlines() if line.startswith("minidl:")]
    if not answers:
        raise RuntimeError((told.stderr.strip().splitlines() or [f"ended with status {told.returncode}"])[-1])
    answer = " ".join(answers[0].removeprefix("minidl:").split())
    if not answer.endswith("MULTIPLE"):
        raise RuntimeError(answer)
    return answer


def _mpiexec() -> str:
    found = mpiexec.find()
    return f"{found.path} ({found.family}, {found.version})"


_GPU_EXTRA = "pip install 'minidl[cuda13]' (or 'minidl[cuda12]')"
_PROBES: list[tuple[str, Callable[[], str], str]] = [
    ("Python", _python, ""),
    ("NumPy", _numpy, "pip install numpy"),
    ("CPU kernels", _cpu_kernels, "build them: pip install --no-build-isolation -e ."),
    ("thread pools", _openmp, "pip install threadpoolctl"),
    ("cores", _cores, ""),
    ("CuPy", _cupy, _GPU_EXTRA),
    ("NVRTC", _nvrtc, _GPU_EXTRA),
    ("GPUs", _gpus, "a GPU and its driver; the CPU kernels need neither"),
    ("NCCL", _nccl, _GPU_EXTRA),
    ("mpi4py", _package("mpi4py"), "pip install 'minidl[mpi]'"),
    ("MPI library", _mpi_library, "an MPI with MPI_THREAD_MULTIPLE: pip install 'minidl[mpi-wheel]'"),
    ("mpiexec", _mpiexec, "pip install 'minidl[mpi-wheel]'"),
    ("ml_dtypes", _package("ml_dtypes"), "pip install ml_dtypes"),
    ("safetensors", _package("safetensors"), "pip install safetensors"),
    ("rich", _package("rich"), "pip install 'minidl[cli]'"),
    ("scikit-learn", _package("scikit-learn"), "pip install scikit-learn"),
]
