"""Kernels on a CPU, thread by thread as on Hopper, with all that is asynchronous as late as it may be.

No GPU shows what a kernel makes of a copy that comes late: there it comes early nearly always, and racecheck does not
see the copy engine at all. Here the same source is compiled by a C++ compiler, each PTX instruction a function of
ptx.h. For kernels in float32 and bfloat16, without clusters.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl import cuda
from minidl.cuda import launch, nvrtc
from minidl.cuda.device import BUILT_IN, DRY_RUN, DryRun, unprepared
from minidl.cuda.hopper import BYTES, TensorMaps, View
from minidl.cuda.rows import address

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "emulator"
_OPTIONS = ("-std=c++17", "-O1", "-w", "-fPIC")
UNKNOWN = "the emulator does not know"
_ENTRY = 'extern "C" int emulate(const unsigned* shape, int shared, unsigned seed, void** arguments, char* told)'
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16 \{[^}]*\}, (\{?)%\d+, %")
# The function of ptx.h for an instruction that begins like this; operands follow in their order, outputs first.
_FUNCTIONS = {
    r"$": "nothing",
    r"griddepcontrol\.|prefetch\.|setmaxnreg\.|fence\.mbarrier_init|wgmma\.fence": "nothing",
    r"fence\.proxy\.async": "fence",
    r"mbarrier\.init": "barrier_init",
    r"mbarrier\.arrive\.shared": "barrier_arrive",
    r"mbarrier\.arrive\.expect_tx": "barrier_expect",
    r".*mbarrier\.try_wait\.parity\.shared": "barrier_wait",
    r"bar\.sync %0, %1": "named_sync",
    r"bar\.sync %0, 128": "named_sync128",
    r"mov\.u32 %0, %%tid\.x": "thread_number",
    r"mov\.u32 %0, %%ctaid\.x": "block_number",
    r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.tile": "load_box",
    r"cp\.async\.bulk\.tensor\.4d\.shared::cluster\.global\.im2col": "load_pixels",
    r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.tile": "store_box",
    r"cp\.async\.bulk\.tensor\.4d\.global\.shared::cta\.im2col_no_offs": "store_pixels",
    r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier": "load_bytes",
    r"cp\.async\.bulk\.commit_group": "commit_stores",
    r"cp\.async\.bulk\.wait_group\.read": "await_stores",
    r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16 %0, %0": "turn_matrix",
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared": "load_matrices<false>",
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans": "load_matrices<true>",
    r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared": "store_matrices<false>",
    r"stmatrix\.sync\.aligned\.m8n8\.x4\.trans": "store_matrices<true>",
    r"cp\.async\.cg\.shared\.global(\.L2::128B)? \[%0\], \[%1\], 16": "copy_sixteen",
    r"cp\.async\.ca\.shared\.global": "copy_some",
    r"cp\.async\.commit_group": "commit_copies",
    r"cp\.async\.wait_group": "await_copies",
    r"cp\.async\.mbarrier\.arrive\.noinc": "arrive_with_copies",
    r"ld\.global\.nc\.L1::no_allocate\.v[24]\.u32": "load_global",
    r"st\.global\.(cs\.v4\.f32|v[24]\.[uf]32)": "store_global",
    r"ld\.shared\.u16": "load_half",
    r"ld\.shared\.[uf]32": "load_word",
    r"ld\.shared\.v2\.[usf]32": "load_two",
    r"ld\.shared\.v4\.[uf]32": "load_four",
    r"st\.shared\.": "store",
    r".*@wanted st\.shared\.v4\.u32": "store_where",
    r"atom\.global\.relaxed\.gpu\.add\.u32 %0, \[%1\], 1": "take_number",
    r"atom\.global\.acq_rel\.gpu\.inc\.u32": "count_round",
    r"mma\.sync\.aligned\.m16n8k16": "multiply_fragments",
    r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32": "multiply_tf32",
    r"mma\.sync\.aligned\.m16n8k8": "multiply_halves",
    r"wgmma\.commit_group": "commit_products",
    r"wgmma\.wait_group": "await_products",
    r"cvt\.rna\.tf32\.f32": "round_tf32",
    r"cvt\.rn\.bf16x2\.f32": "round_pair",
    r"cvt\.rn\.bf16\.f32": "round_one",
    r"cvt\.rn\.f16x2\.f32": "round_halves",
    r"cvt\.rn\.f16\.f32": "round_half",
    r"cvt\.f32\.f16": "widen_half",
    r"mov\.b32 \{low, high\}, %2; cvt\.f32\.f16 %0, low; cvt\.f32\.f16 %1, high": "widen_halves",
    r"cvt\.rn\.relu\.bf16x2\.f32": "round_rectified",
    r"set\.eq\.u32\.f16x2": "equal_halves",
    r"set\.eq\.u32\.bf16x2": "equal_pair",
    r"set\.gt\.u32\.bf16x2": "greater_pair",
    r"max\.NaN\.bf16x2": "larger_pair",
    r"fma\.rn\.bf16x2": "fma_pair",
    r".*@wanted fma\.rn\.f32 %0, %0, %1, %2": "fma_where",
    r"rcp\.approx\.ftz\.f64": "inverse",
    r"rsqrt\.approx\.ftz\.f64": "inverse_root",
    r"ex2\.approx\.ftz\.f32": "power_of_two",
    r"rcp\.approx\.ftz\.f32": "inverse",
    r"max\.NaN\.f32": "larger",
    r"min\.NaN\.f32": "smaller",
}


def compiler() -> str:
    """The C++ compiler; the test is skipped where there is none."""
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


class Table:
    """The CUDA operations, whose kernels run on this machine's processor, on NumPy's arrays; made by `table`.

    Attributes:
        kernels: names of those that have run.
    """

    name = "cuda"

    def __init__(self, seed: int):
        self._seeds, self.kernels = itertools.count(seed), []

    def __getattr__(self, operation: str) -> Any:
        return getattr(cuda, operation)

    def from_host(self, host: Any, dtype: Any = None) -> np.ndarray:
        return np.array(host, dtype, order="C")

    to_host = from_host

    def launched(self, dry: DryRun, stem: str, name: str, grid: Any, block: Any, args: Any, defines: Any, shared: int):
        """In the place of `minidl.cuda.launch._record`."""
        self.kernels.append(name)
        arguments, counters = [], []
        for argument in args:
            if isinstance(argument, TensorMaps):
                argument = Maps(argument.views, argument.arrays)
            elif hasattr(argument, "argument"):
                argument = np.zeros(2, np.uint32)
                counters.append(argument)
            arguments.append(argument)
        run(stem, name, grid, block, arguments, defines, shared, next(self._seeds))
        assert not any(counter.any() for counter in counters), f"{name} leaves its counter behind"


class _Memory(DryRun):
    """Arrays begin with all bits set, NaN, where nobody asks for more."""

    def made(self, shape: Any, dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def zeroed(self, shape: Any, dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def copied(self, host: Any) -> np.ndarray:
        return np.array(host, order="C")


@contextmanager
def table(seed: int = 0) -> Iterator[Table]:
    """Operations for an H200 that is not there.

    Args:
        seed: of the order in which warps run and copies come.
    """
    compiler()
    found = Table(seed)
    with pytest.MonkeyPatch.context() as patch, unprepared():
        patch.setattr(launch, "_record", found.launched)
        token = DRY_RUN.set(_Memory(BUILT_IN["H200"]))
        try:
            yield found
        finally:
            DRY_RUN.reset(token)


def run(
    stem: str, name: str, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any],
    defines: Mapping[str, Any], shared: int, seed: int,
) -> None:  # fmt: skip
    """Run a kernel, as `minidl.cuda.launch.launch` would on a GPU.

    Args:
        arguments: arrays, None for a null pointer, `Maps`, NumPy's scalars and structures; all in their order.

    Raises:
        AssertionError: the kernel waits for ever, or does what the engine's rules forbid.
        NotImplementedError: it has an instruction that ptx.h has not.
    """
    kept, pointers = [], (ctypes.c_void_p * len(arguments))()
    for i, value in enumerate(arguments):
        if isinstance(value, Maps):
            held = value.words
        elif value is None or (isinstance(value, np.ndarray) and value.dtype.fields is None):
            held = np.array(0 if value is None else value.ctypes.data, np.uint64)
        else:
            held = np.asarray(value)
        kept.append(held)
        pointers[i] = held.ctypes.data
    shape = (ctypes.c_uint * 5)(*(*grid, 1, 1)[:3], *(*block, 1)[:2])
    told = ctypes.create_string_buffer(1024)
    library = ctypes.CDLL(str(_library(stem, name, nvrtc.source_of(stem), tuple(sorted(defines.items())))))
    failed, why = library.emulate(shape, shared, seed, pointers, told), f"{name}: {told.value.decode()}"
    if UNKNOWN in why:
        raise NotImplementedError(why)
    assert not failed, why


def finds(stem: str, right: str, wrong: str, check: Callable[[int], None]) -> bool:
    """Whether a check fails, of some of six seeds, once a kernel's source has ``wrong`` where it has ``right``."""
    own = nvrtc.source_of
    assert right in own(stem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "source_of", lambda of: own(of).replace(right, wrong) if of == stem else own(of))
        for seed in range(6):
            try:
                check(seed)
            except AssertionError:
                return True
    return False


class Maps:
    """The tensor maps of some views over arrays, as ptx.h reads them."""

    def __init__(self, views: Iterable[tuple[View, int]], arrays: Sequence[np.ndarray]):
        self.words = np.array([_words(view, arrays[index]) for view, index in views], np.uint64)


def _words(view: View, array: np.ndarray | None) -> list[int]:
    walks, itemsize = view.corners is not None, {BYTES: 1, 1: 2, 2: 2}.get(view.code, 4)
    kind = len(view.sizes) | itemsize << 8 | (view.swizzled and itemsize > 1) << 16 | walks << 17
    sizes, pitches = ((*numbers, *[0] * 5)[:count] for numbers, count in ((view.sizes, 5), (view.pitches, 4)))
    corners = [number & 0xFFFF for corner in view.corners or () for number in corner]
    box = *map(_packed, (view.box[:4], view.box[4:])), _packed(corners), _packed(view.steps), 0
    first = 0 if array is None else address(array) + view.offset  # there is no array, and nobody asks for it
    return [first, kind, *sizes, *pitches, *box]


def _packed(numbers: Sequence[int]) -> int:
    return sum(number << 16 * i for i, number in enumerate(numbers))


@functools.cache
def _library(stem: str, name: str, source: str, defines: tuple[tuple[str, Any], ...]) -> Path:
    """The compiled kernel, kept beside the other results of builds."""
    instructions = _instructions()
    key = hashlib.sha256(repr((name, source, instructions.parent.name, _FUNCTIONS, defines)).encode()).hexdigest()[:16]
    library = BUILT / f"{stem}-{key}.so"
    if library.exists():
        return library
    macros = [f"-D{macro}={value}" for macro, value in (*defines, ("__CUDA_ARCH__", 900))]
    expanded = subprocess.run(
        [compiler(), "-E", "-x", "c++", *macros, "-"], input=source, text=True, capture_output=True, check=True
    ).stdout
    text = expanded.replace('extern "C" ', "").replace("extern __shared__", "extern")
    text = re.sub(
        r"extern (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];",
        r"static \1* const \2 = reinterpret_cast<\1*>(emulator::shared_memory);", text,
    )  # fmt: skip
    entry = f"{_ENTRY} {{ return emulator::launch({name}, shape, shared, seed, arguments, told); }}\n"
    part = library.with_suffix(f".{os.getpid()}")  # of several processes each has its own until it is whole
    program = f'#include "{instructions}"\n{"".join(_without_assembler(text))}{entry}'
    command = [compiler(), *_OPTIONS, "-shared", "-x", "c++", "-", "-o", str(part)]
    done = subprocess.run(command, input=program, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{stem} does not compile for this machine:\n{done.stderr[:4000]}")
    part.replace(library)
    return library


@functools.cache
def _instructions() -> Path:
    """ptx.h, in a folder of its own for each version. GCC reads it precompiled, in half of the time that a kernel takes
    it else; other compilers do not see that."""
    headers = {path.name: path.read_text() for path in sorted(HERE.glob("*.h"))}
    version = subprocess.run([compiler(), "--version"], text=True, capture_output=True, check=True).stdout
    folder = BUILT / hashlib.sha256(repr((headers, version, _OPTIONS)).encode()).hexdigest()[:16]
    header = folder / "ptx.h"
    if not (folder / "ptx.h.gch").exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{os.getpid()}"  # of several processes each has its own until it is whole
        for name, text in headers.items():
            part.write_text(text)
            part.replace(folder / name)
        subprocess.run([compiler(), *_OPTIONS, "-x", "c++-header", str(header), "-o", str(part)], check=True)
        part.replace(folder / "ptx.h.gch")
    return header


def _without_assembler(text: str) -> Iterator[str]:
    """The pieces of a source in which functions have taken the place of assembler."""
    begin = 0
    for match in re.finditer(r"\basm\s*(?:volatile\s*)?\(", text):
        if match.start() < begin:
            continue
        yield text[begin : match.start()]
        sections, begin = _sections(text, match.end())
        operands = [operand for section in sections[1:3] for operand in _operands(section)]
        yield _call("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0])), operands)
    yield text[begin:]


def _sections(text: str, at: int) -> tuple[list[str], int]:
    """(template, outputs, inputs and so on of a statement from behind its parenthesis on, the place behind it)"""
    sections, depth, quoted, begin = [], 0, False, at
    while True:
        char = text[at]
        if char == '"':
            quoted = not quoted
        elif not quoted and char in "([{":
            depth += 1
        elif not quoted and depth and char in ")]}":
            depth -= 1
        elif not quoted and not depth and char in ":)":
            sections.append(text[begin:at])
            begin = at + 1
            if char == ")":
                return sections, begin
        at += 1


def _operands(section: str) -> list[str]:
    """The expressions of a section of operands."""
    found = []
    for match in re.finditer(r'"[^"]*"\s*\(', section):
        depth, at = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(section[at], 0)
            at += 1
        found.append(section[match.end() : at - 1])
    return found


def _call(template: str, operands: list[str]) -> str:
    """The call that does what an instruction does."""
    template = re.sub(r"\\n|\s+", " ", template).strip(" {")
    template = re.sub(r"^(\.reg \.\w+ [\w, ]+; *)+", "", template)
    if found := _WGMMA.search(template):
        values = int(found[1]) // 2
        name = "multiply_held" if found[2] else "multiply"
        return f"emulator::{name}({operands[0]}, {values}, {', '.join(operands[values:])})"
    for pattern, name in _FUNCTIONS.items():
        if re.match(pattern, template):
            if name == "nothing":
                return "emulator::nothing()"
            if "L2::cache_hint" in template:
                operands = operands[:-1]
            if name == "named_sync128":
                name, operands = "named_sync", [*operands, "128"]
            return f"emulator::{name}({', '.join(operands)})"
    return f'emulator::fail("{UNKNOWN} {template.split(";")[0]}")'
