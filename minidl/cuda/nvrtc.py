"""Compiles the `.cu` files of this folder and those in it with NVRTC, without a GPU, and keeps the results on disk.

Own binding and own cache because a framework's cache key rarely covers the text of included headers and its options fix
flush-to-zero. Here the key is everything that the result depends on: the source with its headers as text, the defines,
the architecture, the options and NVRTC's version.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from minidl import cache, checks
from minidl.cuda.compiler import Library, Process

Defines = Mapping[str, int | str]

FOLDER = Path(__file__).parent
# NVRTC before 13.1 takes a generic lambda inside a kernel for host code unless told otherwise. Headers are not compiled
# ahead: all that is read takes 20 ms of a variant's 200, what remains is optimising and assembling.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--generate-line-info", "--ptxas-options=-v")
NO_CACHE = "--no-cache"
NEWEST = (9, 0)  # the newest architecture that the kernels are compiled for exactly
# Older ones make each product of a warpgroup, on that architecture, wait for the one before it (ptxas C7515, with all
# kernels that have such products; 12.6 and 12.8 tried).
LEAST_FOR_HOPPER = (12, 9)
LEAST_JOBS = 16  # of a process: 98 kernels took one 3.3 s, four to eight 1.2 s and sixteen 1.5 s


@dataclass(frozen=True)
class KernelReport:
    """The assembler's word on one kernel: registers per thread; bytes of spilling, stack and static shared memory."""

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """The outcome of one compilation.

    Attributes:
        image: a cubin, or PTX text where the target is virtual; the driver loads both.
        log: what the compiler and the assembler wrote.
        kernels: the assembler's report per kernel; empty for PTX.
    """

    image: bytes
    log: str
    kernels: tuple[KernelReport, ...]


def target(arch: tuple[int, int]) -> str:
    """NVRTC's name for a compute capability: exact where known, else PTX that the driver finishes.

    Compute capability 9.0 gets ``sm_90a``: the image is for this very device, so architecture-specific instructions
    (wgmma) cost no portability.
    """
    if arch < (8, 0):
        raise RuntimeError(f"compute capability {arch[0]}.{arch[1]} is too old: minidl's kernels need 8.0 or newer")
    if arch > NEWEST:
        return f"compute_{NEWEST[0]}{NEWEST[1]}"
    return f"sm_{arch[0]}{arch[1]}" + ("a" if arch == (9, 0) else "")


# ---------------------------------------------------------------------------------------------------- source text

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[ \t]*(?://.*)?$', re.MULTILINE)


@functools.cache
def sources() -> Mapping[str, Path]:
    """Every kernel file and header by its name, which no other folder may have as well."""
    return {path.name: path for kind in ("*.cu", "*.cuh") for path in FOLDER.rglob(kind)}


def source_of(stem: str) -> str:
    """The text of ``<stem>.cu`` with each header in place of its first ``#include "..."``.

    ``stem`` may be the path of a file elsewhere, with its suffix; headers are then looked for beside it first.

    Raises:
        FileNotFoundError: there is no such file, or a header that it includes is nowhere.
    """
    if stem.endswith(".cu"):
        if not Path(stem).is_file():
            raise FileNotFoundError(f"there is no kernel file {stem}")
        return _expand(Path(stem).name, Path(stem).parent, set())
    if f"{stem}.cu" not in sources():
        raise FileNotFoundError(f"minidl has no kernel file {stem}.cu; name one of your own by its path, ending in .cu")
    return _expand(f"{stem}.cu", None, set())


def _expand(filename: str, folder: Path | None, seen: set[str], by: str = "") -> str:
    seen.add(filename)
    path = folder / filename if folder and (folder / filename).exists() else sources().get(filename)
    if path is None:
        raise FileNotFoundError(f'{by} includes "{filename}", which is neither beside it nor a header of minidl')
    parts, start, text = [f'#line 1 "{filename}"\n'], 0, path.read_text(encoding="utf-8")
    for match in _INCLUDE.finditer(text):
        parts.append(text[start : match.start()])
        start = match.end()
        if match[1] not in seen:
            # The line numbers of compile errors and profilers stay those of the files as written.
            line = text.count("\n", 0, match.end()) + 2
            parts.append(_expand(match[1], folder, seen, filename) + f'\n#line {line} "{filename}"')
    return "".join([*parts, text[start:]])


# -------------------------------------------------------------------------------------------------------- binding


@functools.cache
def _library() -> Library:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError) as error:
        raise checks.missing_extra("NVRTC, the CUDA run-time compiler,", "cuda13", error) from error
    return Library(path)


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's version (major, minor).

    Raises:
        ImportError: when the library is not installed, naming the extra that brings it.
    """
    return _library().version()


@functools.cache
def _common_options() -> tuple[str, ...]:
    """Beside a driver, newer versions keep a cache of their own, and what comes from it lacks the assembler's words."""
    return (*OPTIONS, NO_CACHE) if _library().knows(NO_CACHE) else OPTIONS


def _options(arch: str, defines: Defines) -> list[str]:
    defined = (f"-D{key}={value}" for key, value in sorted(defines.items()))
    return [f"--gpu-architecture={arch}", *_common_options(), *defined]


def compile(source: str, name: str, arch: str, defines: Defines | None = None) -> Compiled:
    """Compile CUDA C++ ``source`` for ``arch`` (as `target` names it), past the cache.

    Raises:
        RuntimeError: when it does not compile, with the variant and the compiler's log.
        ImportError: when NVRTC is not installed.
    """
    image, log = _library().compile(*_job(source, name, arch, defines or {}))
    return Compiled(image, log, _reports(log))


def _job(source: str, name: str, arch: str, defines: Defines) -> tuple[str, str, list[str], bool]:
    """The arguments of `Library.compile`."""
    if arch == target(NEWEST):
        _tell_if_old()
    return source, name, _options(arch, defines), arch.startswith("sm_")


@functools.cache
def _tell_if_old() -> None:
    if version() < LEAST_FOR_HOPPER:
        warnings.warn(
            f"NVRTC {'.'.join(map(str, version()))} makes kernels for compute capability 9.0 (H100, H200) wait for "
            "each matrix product, so that they are slow: pip install 'nvidia-cuda-nvrtc-cu12>=12.9'",
            stacklevel=2,
        )


_REPORT = re.compile(
    r"Function properties for (?P<name>\w+)\s*(?:ptxas\s*\.)?\s*"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\s*"
    r"ptxas info\s*: Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)


def _reports(log: str) -> tuple[KernelReport, ...]:
    reports = []
    for match in _REPORT.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        spill = int(match["stores"]) + int(match["loads"])
        size = int(shared[1]) if shared else 0
        reports.append(KernelReport(match["name"], int(match["registers"]), spill, int(match["stack"]), size))
    return tuple(reports)


# ------------------------------------------------------------------------------------------------------ disk cache

_MAGIC = b"minidl kernel 1\n"
_temporary: tempfile.TemporaryDirectory | None = None


def cache_directory() -> Path:
    """Where compiled kernels are kept: `minidl.cache.folder`.

    Where that cannot be written, a directory that lives as long as the process, with one warning.
    """
    global _temporary
    path = cache.folder()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
        problem = "not writable"
    except OSError as error:
        problem = str(error)
    if _temporary is None:
        _temporary = tempfile.TemporaryDirectory(prefix="minidl-cache-")
        warnings.warn(
            f"kernel cache {path} cannot be used ({problem}): kernels are compiled anew by every process; "
            "set MINIDL_CACHE to a directory that can be written",
            stacklevel=2,
        )
    return Path(_temporary.name)


def cache_key(source: str, arch: str, defines: Defines) -> str:
    """SHA-256 over all that a compilation depends on, in hexadecimal."""
    parts = [source, *_options(arch, defines), *map(str, version())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _store(path: Path, compiled: Compiled) -> None:
    notes = json.dumps({"log": compiled.log, "kernels": [asdict(kernel) for kernel in compiled.kernels]}).encode()
    payload = len(notes).to_bytes(8, "little") + notes + compiled.image
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        # Other ranks see the whole file or none; of two that compile at once the later replaces equal bytes.
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(path: Path) -> Compiled | None:
    """The stored result, or None when it is absent or not what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, payload = data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if not data.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
        return None
    size = int.from_bytes(payload[:8], "little")
    notes = json.loads(payload[8 : 8 + size])
    return Compiled(payload[8 + size :], notes["log"], tuple(KernelReport(**kernel) for kernel in notes["kernels"]))


def _place(stem: str, source: str, arch: str, defines: Defines) -> Path:
    return cache_directory() / f"{Path(stem).stem}-{arch}-{cache_key(source, arch, defines)[:40]}.cubin"


def is_built(stem: str, arch: str, defines: Defines) -> bool:
    """Whether the disk cache holds one variant of ``<stem>.cu``."""
    return _place(stem, source_of(stem), arch, defines).exists()


def build(stem: str, arch: str, defines: Defines | None = None) -> Compiled:
    """One variant of ``<stem>.cu``, from the disk cache when it is there.

    Raises:
        RuntimeError: when it does not compile, with the variant and the compiler's log.
        ImportError: when NVRTC is not installed.
    """
    defines = defines or {}
    source = source_of(stem)
    path = _place(stem, source, arch, defines)
    compiled = _load(path)
    if compiled is None:
        compiled = compile(source, f"{Path(stem).stem}.cu", arch, defines)
        _store(path, compiled)
    return compiled


def compile_all(
    variants: Iterable[tuple[str, Sequence[tuple[str, int | str]]]], arch: str, processes: int | None = None
) -> list[Compiled]:
    """Build many (stem, defines) variants, those that the disk cache lacks by several processes.

    Args:
        processes: at most so many, this one included; default: one for each core.

    Raises:
        RuntimeError, ImportError: as `build`.
    """
    variants = [(stem, dict(defines)) for stem, defines in variants]
    missing = {}
    for stem, defines in variants:
        source = source_of(stem)
        path = _place(stem, source, arch, defines)
        if not path.exists():
            missing[path] = _job(source, f"{Path(stem).stem}.cu", arch, defines)
    count = min(processes or len(os.sched_getaffinity(0)), len(missing) // LEAST_JOBS)
    if count > 1:
        _compile_beside(missing, count - 1)
    return [build(stem, arch, defines) for stem, defines in variants]


def _compile_beside(jobs: Mapping[Path, tuple], helpers: int) -> None:
    """Each of ``jobs`` into its file of the cache, by this process and as many others.

    They take jobs once they are up, which may take longer than all that there is to do: nobody waits for them.
    """
    library, todo, started = _library(), deque(jobs), []

    def take() -> Path | None:
        with suppress(IndexError):
            return todo.popleft()

    def work(compiler: Library | Process) -> None:
        try:
            while (path := take()) is not None:
                image, log = compiler.compile(*jobs[path])
                _store(path, Compiled(image, log, _reports(log)))
        finally:
            todo.clear()  # there are none, or one failed

    def help_out() -> None:
        with Process(library.path) as process:
            started.append(process)
            if todo and process.wait():
                work(process)

    with ThreadPoolExecutor(helpers) as pool:
        helping = [pool.submit(help_out) for _ in range(helpers)]
        try:
            work(library)
        finally:
            todo.clear()
            for future in helping:
                future.cancel()
            for process in started:
                if not process.ready:
                    process.stop()
    for future in helping:
        if not future.cancelled():
            future.result()
