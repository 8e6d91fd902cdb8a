"""The CUDA infrastructure without a GPU: dry runs, the kernel cache, and how kernels walk their arrays."""

from __future__ import annotations

import dataclasses
import pwd
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from minidl.cuda import array, device, nvrtc
from minidl.cuda.launch import dry_run, launch
from minidl.cuda.norm.batch_norm import MOST_ROWS_PER_THREAD, cut_rows
from minidl.cuda.rows import rows, vector_width, walk, walk_channels
from minidl.precision import bfloat16, float16, float32


def _nvrtc_reason() -> str | None:
    try:
        nvrtc.version()
    except ImportError as error:
        return str(error)
    return None


needs_nvrtc = pytest.mark.skipif(_nvrtc_reason() is not None, reason=f"needs NVRTC: {_nvrtc_reason()}")
TRIVIAL = '#include "scale.cuh"\nextern "C" __global__ void k(float* x) { x[threadIdx.x] *= SCALE; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty kernel cache and a folder of sources with one kernel, ``trivial``, that includes one header."""
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "trivial.cu").write_text(TRIVIAL)
    (sources / "scale.cuh").write_text("#define SCALE 2.0f\n")
    monkeypatch.setattr(nvrtc, "sources", lambda: {path.name: path for path in sources.iterdir()})
    return sources


# ------------------------------------------------------------------------------------------------------------ dry run


def test_dry_run_needs_neither_a_gpu_nor_cupy():
    script = """
import sys
sys.modules["cupy"] = None  # any import of CuPy fails
import numpy as np
from minidl import cuda
from minidl.cuda.launch import dry_run
with dry_run() as log:
    x = cuda.empty((256, 112, 112, 64), np.float32)
    assert cuda.Array is np.ndarray and isinstance(x, cuda.Array)
    cuda.batch_norm_apply(x, *cuda.batch_norm_finalize(cuda.batch_norm_stats(x), 1e-5)[:1], relu=True)
    cuda.synchronize()
assert len(log.launches) == 4, log.launches
try:
    cuda.require_device()
except ImportError as error:
    assert "minidl[cuda" in str(error)
else:
    raise AssertionError("CuPy is blocked")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_dry_run_records_variants_once_whatever_the_order_of_defines():
    with dry_run() as log:
        launch("stem", "k", (2, 3), 64, np.int32(1), defines={"A": 1, "B": 2}, shared=16)
        launch("stem", "k", 7, (32, 2), np.int32(1), defines={"B": 2, "A": 1})
        launch("stem", "k", (0, 3), 64, np.int32(1))
    first, second = log.launches
    assert (first.grid, first.block, first.shared) == ((2, 3), (64,), 16)
    assert (second.grid, second.block) == ((7,), (32, 2))
    assert log.variants == [("stem", (("A", 1), ("B", 2)))]


def test_dry_run_belongs_to_its_thread_and_ends():
    seen = []
    with dry_run(device.BUILT_IN["L40"]) as outer:
        thread = threading.Thread(target=lambda: seen.append(device.active_dry_run()))
        thread.start()
        thread.join()
        with dry_run() as inner:
            launch("stem", "k", 1, 32)
        assert device.current_device() is device.BUILT_IN["L40"]
    assert seen == [None] and device.active_dry_run() is None
    assert len(inner.launches) == 1 and not outer.launches


@pytest.mark.parametrize("number", [1, 1.0, True])
def test_launch_refuses_plain_numbers(number):
    with dry_run(), pytest.raises(TypeError, match="pass a NumPy scalar"):
        launch("stem", "k", 1, 32, np.int32(1), number)


@pytest.mark.parametrize(
    "sizes", [{"block": 2048}, {"block": 0}, {"grid": (1, 65536)}, {"shared": 256 * 1024}], ids=lambda s: next(iter(s))
)
def test_dry_run_holds_to_the_limits_of_the_device(sizes):
    with dry_run(), pytest.raises(AssertionError):
        launch("stem", "k", sizes.get("grid", 1), sizes.get("block", 32), shared=sizes.get("shared", 0))


@pytest.mark.parametrize("record", device.BUILT_IN.values(), ids=device.BUILT_IN)
def test_device_record_survives_json(record):
    assert device.DeviceRecord.from_json(record.to_json()) == record


# ---------------------------------------------------------------------------------------------- compiling and caching


def test_target_is_exact_where_known_and_portable_beyond():
    assert [nvrtc.target(arch) for arch in ((8, 0), (8, 9), (9, 0))] == ["sm_80", "sm_89", "sm_90a"]
    assert nvrtc.target((10, 0)) == nvrtc.target((12, 1)) == "compute_90"
    with pytest.raises(RuntimeError, match="7.0 is too old"):
        nvrtc.target((7, 0))


def test_source_includes_each_header_once_and_keeps_line_numbers(tmp_path):
    (tmp_path / "a.cu").write_text('// one\n#include "b.cuh"\n#include "c.cuh"\nint four;\n')
    (tmp_path / "b.cuh").write_text('#include "c.cuh"\nint b;\n')
    (tmp_path / "c.cuh").write_text("int c;\n")
    text = nvrtc.source_of(str(tmp_path / "a.cu"))
    assert text.count("int c;") == text.count("int b;") == 1
    assert text.index("int c;") < text.index("int b;") < text.index("int four;")
    assert '"b.cuh"' in text and "#include" not in text
    head = text[: text.index("int four;")]
    directive = [line for line in head.splitlines() if line.startswith("#line") and '"a.cu"' in line][-1]
    assert int(directive.split()[1]) + head[head.rindex(directive) :].count("\n") - 1 == 4


@needs_nvrtc
def test_a_kernel_elsewhere_finds_its_own_headers_first_and_ours_behind(tmp_path, monkeypatch):
    (tmp_path / "own.cu").write_text('#include "grid.cuh"\n#include "common.cuh"\nOWN\n')
    (tmp_path / "grid.cuh").write_text("MINE\n")
    text = nvrtc.source_of(str(tmp_path / "own.cu"))
    assert "MINE" in text and "struct Place" not in text and "#define DEVICE" in text and text.endswith("OWN\n")
    if _nvrtc_reason() is None:
        monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "cache"))
        (tmp_path / "own.cu").write_text('extern "C" __global__ void k(float* x) { *x = SCALE; }\n')
        assert nvrtc.build(str(tmp_path / "own.cu"), "sm_80", {"SCALE": 2}).kernels[0].name == "k"
        [cubin] = (tmp_path / "cache").iterdir()
        assert cubin.name.startswith("own-sm_80-")


def test_a_kernel_or_header_that_is_nowhere_is_named(tmp_path):
    for own in ("own.cu", "join.cu"):  # minidl has a join.cu
        with pytest.raises(FileNotFoundError, match=f"there is no kernel file {tmp_path / own}"):
            nvrtc.source_of(str(tmp_path / own))
    with pytest.raises(FileNotFoundError, match=r"minidl has no kernel file own\.cu; name one of your own by its path"):
        nvrtc.source_of("own")
    (tmp_path / "own.cu").write_text('#include "mine.cuh"  // helpers\n')
    (tmp_path / "mine.cuh").write_text('#include "common.cuh" // T, load, store\n#include "lost.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r'mine\.cuh includes "lost\.cuh", which is neither beside it nor'):
        nvrtc.source_of(str(tmp_path / "own.cu"))
    (tmp_path / "lost.cuh").write_text("FOUND\n")
    text = nvrtc.source_of(str(tmp_path / "own.cu"))
    assert "FOUND" in text and "#define DEVICE" in text and "#include" not in text


def test_cache_key_covers_header_defines_and_architecture(cache):
    def key(arch="sm_80", **defines):
        return nvrtc.cache_key(nvrtc.source_of("trivial"), arch, defines)

    before = key()
    assert key() == before and key(A=1, B=2) == key(B=2, A=1)
    (cache / "scale.cuh").write_text("#define SCALE 3.0f\n")
    assert len({before, key(), key("sm_90a"), key(A=1), key(A=2)}) == 5


@needs_nvrtc
def test_cache_is_hit_and_a_damaged_file_is_compiled_anew(cache, monkeypatch):
    compiled, genuine = [], nvrtc.compile
    monkeypatch.setattr(nvrtc, "compile", lambda *a: compiled.append(a) or genuine(*a))
    assert not nvrtc.is_built("trivial", "sm_80", {})
    first = nvrtc.build("trivial", "sm_80")
    assert nvrtc.is_built("trivial", "sm_80", {}) and not nvrtc.is_built("trivial", "sm_80", {"VEC": 2})
    assert nvrtc.build("trivial", "sm_80") == first and len(compiled) == 1
    (file,) = nvrtc.cache_directory().iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole[:-5] + b"wrong", b"x" + whole[1:]):
        file.write_bytes(damaged)
        count = len(compiled)
        again = nvrtc.build("trivial", "sm_80")
        assert len(compiled) == count + 1 and (again.image, again.kernels) == (first.image, first.kernels)
        assert nvrtc.build("trivial", "sm_80") == again and len(compiled) == count + 1


@needs_nvrtc
def test_cache_never_shows_half_a_file(cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc.os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            nvrtc.build("trivial", "sm_80")
    assert not list(nvrtc.cache_directory().iterdir())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: nvrtc.build("trivial", "sm_80"), range(4)))
    assert len({result.image for result in results}) == 1 and len(list(nvrtc.cache_directory().iterdir())) == 1


class Slow:
    """NVRTC in this process, so slow that others come to take part."""

    def __init__(self, library):
        self.path, self.library = library.path, library

    def __call__(self):
        return self

    def compile(self, *job):
        time.sleep(0.2)
        return self.library.compile(*job)


@needs_nvrtc
def test_processes_compile_what_this_one_would_each_variant_once(cache, monkeypatch):
    count = 3 * nvrtc.LEAST_JOBS
    variants = [("trivial", (("N", i % count),)) for i in range(2 * count)]
    source = nvrtc.source_of("trivial")
    expected = [nvrtc.compile(source, "trivial.cu", "sm_80", dict(defines)) for _, defines in variants]
    started, genuine = [], nvrtc.Process
    monkeypatch.setattr(nvrtc, "Process", lambda path: started.append(genuine(path)) or started[-1])
    monkeypatch.setattr(nvrtc, "_library", Slow(nvrtc._library()))
    built = nvrtc.compile_all(variants, "sm_80", 3)
    assert [(each.image, each.kernels) for each in built] == [(each.image, each.kernels) for each in expected]
    assert len(started) == 2 and len(list(nvrtc.cache_directory().iterdir())) == count
    assert any(process.ready for process in started), "this one was slow enough for others to come"
    assert all(process._process.returncode is not None for process in started), "none is left behind"
    assert nvrtc.compile_all(variants, "sm_80", 3) == built and len(started) == 2, "the cache had them all"


@needs_nvrtc
def test_an_error_in_a_process_that_compiles_is_raised_here(cache):
    (cache / "trivial.cu").write_text("int x = nonsense;")
    with pytest.raises(RuntimeError, match=r"trivial.cu does not compile .*sm_80(.|\n)*trivial.cu\(1\)(.|\n)*nonsense"):
        nvrtc.compile_all([("trivial", (("N", i),)) for i in range(2 * nvrtc.LEAST_JOBS)], "sm_80", 2)
    with nvrtc.Process(nvrtc._library().path) as process:
        assert process.wait()
        with pytest.raises(RuntimeError, match="trivial.cu does not compile"):
            process.compile("int x = nonsense;", "trivial.cu", [], True)
        process.stop()
        with pytest.raises(RuntimeError, match="the process that compiled trivial.cu ended with status -9"):
            process.compile("", "trivial.cu", [], True)


def test_cache_that_cannot_be_written_is_replaced_with_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(nvrtc, "_temporary", None)
    with pytest.warns(UserWarning, match="MINIDL_CACHE"):
        directory = nvrtc.cache_directory()
    assert directory.is_dir() and nvrtc.cache_directory() == directory
    nvrtc._temporary.cleanup()


def test_who_has_no_home_gets_no_folder_of_that_name(tmp_path, monkeypatch):
    """As in containers that are run as a user nobody has made."""

    def unknown(number):
        raise KeyError(number)

    for name in ("MINIDL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(nvrtc, "_temporary", None)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="set MINIDL_CACHE"):
        assert nvrtc.cache_directory().is_dir()
    nvrtc._temporary.cleanup()
    assert not list(tmp_path.iterdir())


@needs_nvrtc
def test_compile_error_names_file_line_variant_and_reason():
    with pytest.raises(RuntimeError) as error:
        nvrtc.compile('#line 7 "broken.cu"\nint x = nonsense;\n', "broken.cu", "sm_80", {"VEC": 4})
    assert all(text in str(error.value) for text in ("broken.cu(7)", "-DVEC=4", "sm_80", "nonsense"))


@needs_nvrtc
@pytest.mark.parametrize("version", [(12, 8), (12, 9), (13, 0)])
def test_a_compiler_that_makes_products_wait_is_told_of(version, monkeypatch, recwarn):
    """Once, by who compiles for Hopper, whose kernels alone have such products."""
    monkeypatch.setattr(nvrtc, "version", lambda: version)
    nvrtc._tell_if_old.cache_clear()
    for arch in ("sm_80", "sm_90a", "sm_90a"):
        nvrtc.compile("int x;", "fine.cu", arch)
        told = [str(warning.message) for warning in recwarn]
        assert len(told) == (version < nvrtc.LEAST_FOR_HOPPER and arch == "sm_90a"), told
    assert all("NVRTC 12.8 " in text and "cu12>=12.9" in text for text in told)
    nvrtc._tell_if_old.cache_clear()


@needs_nvrtc
def test_report_counts_registers_shared_memory_and_spills():
    source = """
extern "C" __global__ void tidy(float* x) { __shared__ float s[32]; s[threadIdx.x] = x[0]; x[threadIdx.x] = s[31]; }
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) x[(63 - i) * 1024 + threadIdx.x] = v[i] * v[63 - i];
}"""
    reports = {kernel.name: kernel for kernel in nvrtc.compile(source, "report.cu", "sm_80").kernels}
    assert reports["tidy"].shared_bytes == 128 and reports["tidy"].spill_bytes == 0 < reports["tidy"].registers
    assert reports["spilling"].spill_bytes > 0 and reports["spilling"].registers <= 32


# ------------------------------------------------------------------------------------------------- walks over arrays


def _pitched(count, channels, pitch, offset, dtype):
    return np.empty((count, pitch), dtype)[:, offset : offset + channels]


def _rows(plan, rows):
    """The rows that the threads of one column take: groups of ``unroll`` steps, strided over the grid."""
    step = plan.block[1]
    group = plan.unroll * step
    for block in range(plan.grid[0]):
        for lane in range(step):
            for first in range(block * group + lane, rows, plan.grid[0] * group):
                yield from range(first, min(first + group, rows), step)


def _visits(plan, which=0):
    """The element offsets that the threads of a walk touch in array ``which``, after Share in common.cuh."""
    walk = plan.argument[0]
    size, pitch = int(walk["size"]), int(walk["pitch"][which])
    for by in range(plan.grid[1]):
        for tx in range(plan.block[0]):
            column = by * plan.block[0] + tx
            if column >= walk["columns"]:
                continue
            rows = int(walk["rows"]) + (column < walk["last"])
            for row in _rows(plan, rows):
                start = row * pitch + column * plan.vec
                yield from range(start, start + plan.vec)
    yield from range(size // plan.vec * plan.vec, size)


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [0, 1, 7, 255, 2048, 5003])
def test_dense_walk_visits_each_element_once(size, dtype):
    x = np.empty(size, dtype)
    with dry_run():
        plan = walk(x, x, unroll=4)
    assert sorted(_visits(plan)) == list(range(size))
    assert (0 in plan.grid) == (size == 0)


@pytest.mark.parametrize(
    "channels, pitch, offset", [(8, 8, 0), (3, 3, 0), (24, 40, 8), (6, 11, 5), (4100, 4104, 4), (1, 9, 2)]
)
@pytest.mark.parametrize("count", [0, 1, 37])
@pytest.mark.parametrize("lasting", [False, True])
def test_channel_walk_visits_each_element_once(count, channels, pitch, offset, lasting):
    x = _pitched(count, channels, pitch, offset, float16)
    out = np.empty((count, channels), float16)
    with dry_run(dataclasses.replace(device.BUILT_IN["A100"], multiprocessors=1)):
        plan = walk_channels(x, out, lasting=lasting, unroll=4)
    groups = -(-count // (4 * plan.block[1]))
    assert plan.grid[0] < groups if lasting and groups > 3 else plan.grid[0] == groups
    expected = [row * pitch + channel for row in range(count) for channel in range(channels)]
    assert sorted(_visits(plan)) == expected
    assert sorted(_visits(plan, 1)) == list(range(count * channels))
    assert np.prod(plan.block) <= 1024 and channels % plan.vec == 0


@pytest.mark.parametrize("dtypes", [(float32,), (bfloat16,), (bfloat16, float32), (np.dtype(np.uint8), float16)])
def test_vector_width_is_the_widest_aligned_one(dtypes):
    cases = [(64, 64, 0), (64, 80, 16), (64, 80, 4), (12, 32, 2), (5, 16, 0), (16, 17, 0), (8, 24, 1)]
    for channels, pitch, offset in cases:
        arrays = [_pitched(5, channels, pitch, offset, dtype) for dtype in dtypes]
        starts = [(x.ctypes.data + row * x.strides[0], x.itemsize) for x in arrays for row in range(5)]

        def fits(width, channels=channels, starts=starts):
            return channels % width == 0 and all(start % min(16, width * size) == 0 for start, size in starts)

        width = vector_width(*arrays)
        assert fits(width) and width * min(x.itemsize for x in arrays) <= 16
        wider = 2 * width * min(x.itemsize for x in arrays) <= 16 and fits(2 * width)
        assert not wider, (channels, pitch, offset)


def test_rows_refuses_what_is_not_pitched():
    x = np.empty((4, 6, 8), float32)
    assert rows(x) == (24, 8, 8) and rows(x[..., 2:5]) == (24, 3, 8)
    for bad in (x.transpose(0, 2, 1), x[:, 1:4], x[..., ::2]):
        with pytest.raises(ValueError, match="pitch"):
            rows(bad)
        with dry_run():
            assert array.as_rows(bad).flags.c_contiguous


# --------------------------------------------------------------------------------------- the cut of batch-norm's sums


@pytest.mark.parametrize(
    "count, channels", [(1, 1), (49, 2048), (1000, 3), (12_544, 2048), (802_816, 64), (5_000_000, 17)]
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_cut_depends_on_the_shape_alone_and_bounds_its_sums(count, channels, itemsize):
    widths = [v for v in (1, 2, 4, 8) if channels % v == 0 and v * itemsize <= 16]
    cuts = {
        (vec, pitch): cut_rows(count, channels, itemsize, vec, pitch, 0)
        for vec in widths
        for pitch in (channels, channels + 8)
    }
    ((chunk_rows, lanes),) = {(int(cut.argument["chunk_rows"][0]), cut.block[1]) for cut in cuts.values()}
    assert chunk_rows % lanes == 0 and chunk_rows <= lanes * MOST_ROWS_PER_THREAD
    for (vec, _), cut in cuts.items():
        assert (cut.chunks - 1) * chunk_rows < count <= cut.chunks * chunk_rows and cut.grid[0] == cut.chunks
        # Every vector of channels has a thread, no tile is empty, and a tile has a thread per channel.
        assert (cut.grid[1] - 1) * cut.block[0] < channels // vec <= cut.grid[1] * cut.block[0]
        assert np.prod(cut.block) <= 256 and cut.block[0] <= 32 and vec <= lanes


def _emulated_stats(x, cut):
    """batch_norm_stats_kernel and batch_norm_merge_kernel, operation by operation, for one channel."""
    f32, lanes, chunk_rows = np.float32, cut.block[1], int(cut.argument["chunk_rows"][0])
    chunks = []
    for start in range(0, len(x), chunk_rows):
        chunk = x[start : start + chunk_rows].astype(f32)
        means, squares, counts = [], [], []
        for lane in range(min(lanes, len(chunk))):
            mine = chunk[lane::lanes]
            deviation = mine - mine[0]
            total = np.cumsum(deviation, dtype=f32)[-1]
            offset = total / f32(len(mine))
            squares.append(max(np.cumsum(deviation * deviation, dtype=f32)[-1] - total * offset, f32(0)))
            means.append((mine[0] - chunk[0]) + offset)
            counts.append(f32(len(mine)))
        means, squares, counts = np.array(means), np.array(squares), np.array(counts)
        mean = np.cumsum(counts * means, dtype=f32)[-1] / f32(len(chunk))
        m2 = np.cumsum(squares + counts * (means - mean) ** 2, dtype=f32)[-1]
        chunks.append((len(chunk), float(chunk[0]) + float(mean), float(m2)))
    counts, means, m2 = np.array(chunks).T
    deviation = means - means[0]
    shift = (counts * deviation).sum() / len(x)
    return means[0] + shift, m2.sum() + ((counts * deviation**2).sum() - (counts * deviation).sum() * shift)


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e2, 1e4])
@pytest.mark.parametrize("outlier", [False, True], ids=["", "outlier"])
def test_statistics_survive_a_mean_far_from_zero(ratio, outlier, rng):
    """The algorithm of the kernels in float32, with the worst pivot: variance to 1e-5 where raw moments lose it all."""
    x = (rng.standard_normal(20_000) + ratio).astype(np.float32)
    if outlier:
        x[0] = 0.0
    mean, m2 = _emulated_stats(x, cut_rows(len(x), 64, 4, 4, 64, 0))
    exact = x.astype(np.float64)
    assert abs(mean - exact.mean()) <= 1e-6 * max(exact.std(), ratio * 1e-3)
    assert abs(m2 / len(x) - exact.var()) <= 1e-5 * exact.var()
