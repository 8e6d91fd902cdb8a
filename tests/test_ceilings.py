"""Ceilings: what a record holds, whose figures count, how all-reduces are fitted, and how records are kept."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from minidl import cuda
from minidl.cuda import ceiling
from minidl.cuda.launch import dry_run
from minidl.dist import SOLO
from minidl.profile import all_reduce, ceilings, device_ceilings
from minidl.profile.all_reduce import fit, sweep
from minidl.profile.ceilings import cache_path, describe, find, measure, slowest
from minidl.profile.timing import Budget
from tests.dist import job

PRECISIONS = ["bf16", "fp16", "tf32", "fp32"]
FIGURES = {
    "copy_gb_per_s", "l2_gb_per_s", "matrix_tflops", "matrix_by", "vector_tflops", "host_to_device_gb_per_s",
    "device_to_host_gb_per_s", "both_ways_gb_per_s", "all_reduce",
}  # fmt: skip
IDENTITY = {"version", "machine", "device", "ranks", "ranks_per_host", "threads", "date"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ceilings"


@pytest.fixture
def small(monkeypatch):
    """Measurements of a fraction of a second."""
    monkeypatch.setattr(ceilings, "LARGEST_MATRIX", 256)
    monkeypatch.setattr(ceilings, "BUDGET", Budget(samples=3, seconds=0.1))


# -- the processor -----------------------------------------------------------------------------------------------------


def test_the_record_of_a_processor(cpu_ops, small):
    told = []
    record = measure(cpu_ops, progress=told.append)
    assert record.keys() == FIGURES | IDENTITY and record == json.loads(json.dumps(record))
    assert record["device"] == "cpu" and record["ranks"] == 1 and record["all_reduce"] is None
    rates = record["matrix_tflops"]
    assert list(rates) == PRECISIONS and rates["tf32"] is None
    assert rates["bf16"] == rates["fp16"] == rates["fp32"] > 0, "the CPU table converts"
    assert "fp32" in record["matrix_by"]["bf16"] and record["matrix_by"]["tf32"] is None
    assert record["copy_gb_per_s"] > 0 and record["host_to_device_gb_per_s"] is None
    assert told == ["copy bandwidth", "matrix rate, fp32"]


class Clock:
    """A timer on which a call takes as long as it is told."""

    cache_bytes = 1 << 20

    def __init__(self, *milliseconds):
        self.milliseconds = list(milliseconds)

    def hot(self, call, budget):
        call()
        return SimpleNamespace(min_ms=self.milliseconds.pop(0))


def test_matrices_grow_until_they_are_large_or_slow():
    """128, 256, ... cubed; the best rate of all counts."""
    assert ceilings._host_matrix(Clock(1.0, 1.0, 1.0, 1.0, 60.0)) == pytest.approx(2 * 1024**3 / 1e9)
    assert ceilings._host_matrix(Clock(1.0, 70.0)) == pytest.approx(2 * 128**3 / 1e9)
    assert ceilings._host_matrix(Clock(1.0, 7.0, 63.0)) == pytest.approx(2 * 256**3 / 7e9)


@pytest.mark.parametrize(("matrix", "convolution", "by"), [(2.0, 1.0, "numpy"), (1.0, 3.0, "minidl conv2d")])
def test_the_faster_of_two_products_is_a_processors_ceiling(cpu_ops, monkeypatch, matrix, convolution, by):
    monkeypatch.setattr(ceilings, "_host_copy", lambda ops, timer: 1.0)
    ran = []
    monkeypatch.setattr(ceilings, "_host_matrix", lambda timer: ran.append("numpy") or matrix)
    monkeypatch.setattr(ceilings, "_host_convolution", lambda ops, timer: ran.append("conv2d") or convolution)
    record = measure(cpu_ops)
    assert ran == ["conv2d", "numpy"], "its threads wait busily after a product"
    assert record["matrix_tflops"]["fp32"] == record["vector_tflops"]["fp32"] == max(matrix, convolution)
    assert record["matrix_by"]["fp32"] == by and record["matrix_by"]["bf16"].startswith(by)


def test_a_convolution_counts_its_products(cpu_ops, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert ceilings._host_convolution(cpu_ops, Clock(2.0)) == pytest.approx(2 * 4 * 28**2 * 128**2 * 9 / 2e9)


def test_a_copy_counts_what_is_read_and_what_is_written(cpu_ops, monkeypatch):
    copied = []
    table = type("Table", (), {"empty": cpu_ops.empty, "copy_into": lambda out, x: copied.append((out, x))})
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rate = ceilings._host_copy(table, Clock(1.0))
    assert len(copied) == 3, "each thread copies its part"
    sizes = [array.nbytes for pair in copied for array in pair]
    assert (
        sum(sizes) == pytest.approx(4 * Clock.cache_bytes, rel=1e-4) and len({id(out.base) for out, _ in copied}) == 1
    )
    assert rate == pytest.approx(sum(sizes) / 1e6)


# -- many ranks --------------------------------------------------------------------------------------------------------


def test_the_slowest_rank_counts_for_each_figure():
    fast = {"copy": 10.0, "link": None, "rates": {"bf16": 8.0, "tf32": None}, "by": {"bf16": "cublas"}}
    slow = {"copy": 11.0, "link": None, "rates": {"bf16": 7.0, "tf32": None}, "by": {"bf16": "minidl"}}
    joined = {"copy": 10.0, "link": None, "rates": {"bf16": 7.0, "tf32": None}, "by": {"bf16": "cublas / minidl"}}
    assert slowest([fast, slow]) == joined
    assert slowest([fast]) == fast and slowest([fast, fast]) == fast


class Ring:
    """Two ranks, of which this is one: messages take a planted latency and bandwidth, and the other's twice as long."""

    rank, size, local_rank, local_size, name = 0, 2, 0, 2, "planted"
    latency, bandwidth, slowness = 2e-3, 0.5e9, 2.0

    def __init__(self, clock):
        self.clock = clock

    def barrier(self):
        pass

    def all_reduce(self, array):
        self.clock.now += self.latency + 2 * (self.size - 1) / self.size * array.nbytes / self.bandwidth

    def share(self, value, name=""):
        return [value, [self.slowness * each for each in value]]


@pytest.fixture
def ring(monkeypatch):
    clock = type("Clock", (), {"now": 0.0})
    monkeypatch.setattr(all_reduce, "time", type("time", (), {"perf_counter": lambda: clock.now}))
    return Ring(clock)


def test_a_sweep_finds_planted_latency_and_bandwidth_of_the_slowest_rank(cpu_ops, ring):
    told = []
    found = sweep(cpu_ops, ring, told.append)
    assert found["latency_us"] == pytest.approx(4000.0) and found["bus_gb_per_s"] == pytest.approx(0.25)
    assert found["ranks"] == 2 and found["engine"] == "planted"
    for point in found["points"]:
        assert point["ms"] == pytest.approx(2 * (2.0 + point["bytes"] / 0.5e6))
        assert point["bus_gb_per_s"] == pytest.approx(point["bytes"] / point["ms"] / 1e6)
    assert told[0] == "all-reduce of 4 KiB" and len(told) == len(found["points"])


def test_a_sweep_covers_four_kilobytes_to_a_quarter_of_a_gigabyte(cpu_ops, ring):
    ring.bandwidth = 100e9
    assert [point["bytes"] for point in sweep(cpu_ops, ring, str)["points"]] == [4096 * 4**i for i in range(9)]
    assert all_reduce.SIZES[-1] == 256 << 20


def test_slow_networks_are_not_asked_for_their_largest_messages(cpu_ops, ring):
    ring.bandwidth = 0.1e9
    found = sweep(cpu_ops, ring, str)
    assert 1 << 20 <= found["points"][-1]["bytes"] < 256 << 20
    assert found["bus_gb_per_s"] == pytest.approx(0.05) and ring.clock.now < 20


@pytest.mark.parametrize("latency_us, gb_per_s", [(12.0, 300.0), (0.0, 1.0), (500.0, 0.1)])
def test_a_line_is_fitted_exactly(latency_us, gb_per_s):
    points = [(wire, latency_us / 1e3 + wire / (gb_per_s * 1e6)) for wire in (4096.0, 1e5, 1e6, 1e8)]
    found = fit(points)
    assert found == (pytest.approx(latency_us, abs=1e-6), pytest.approx(gb_per_s))


def test_every_size_counts_alike_in_a_fit():
    """One message of each size off by a tenth moves the line by about a tenth, whether it is small or large."""
    sizes = np.array([4096.0 * 4**i for i in range(9)])
    exact = 0.02 + sizes / 200e6
    for i in range(9):
        ms = exact.copy()
        ms[i] *= 1.1
        latency_us, gb_per_s = fit(list(zip(sizes, ms, strict=True)))
        assert latency_us == pytest.approx(20, rel=0.1) and gb_per_s == pytest.approx(200, rel=0.1)


def test_no_latency_is_negative():
    latency_us, gb_per_s = fit([(1e3, 0.0005), (1e6, 1.0), (1e8, 100.0)])
    assert latency_us == 0.0 and gb_per_s == pytest.approx(1.0, rel=0.5)


def test_where_times_do_not_grow_each_end_tells_its_own():
    """Smallest message 1 ms; largest 100 MB in 0.25 ms."""
    assert fit([(1e3, 1.0), (1e6, 0.5), (1e8, 0.25)]) == (pytest.approx(1000.0), pytest.approx(400.0))


@pytest.mark.mpi
def test_ranks_measure_together_and_share_one_record(tmp_path):
    first, second = job.answers("ceilings", 2, tmp_path, MINIDL_CACHE=str(tmp_path / "cache"))
    assert first["measured"] == second["measured"] == first["found"] == second["found"]
    record = first["measured"]
    assert record["ranks"] == record["ranks_per_host"] == 2 and record["all_reduce"]["engine"] == "shm"
    assert [point["bytes"] for point in record["all_reduce"]["points"]] == [4096, 65536, 1 << 20]
    assert first["told"] and not second["told"], "rank 0 speaks for all"
    (kept,) = (tmp_path / "cache" / "ceilings").iterdir()
    assert json.loads(kept.read_text()) == record and "2-ranks" in kept.name


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def measurements(monkeypatch):
    """Counts measurements, and makes each another record."""
    made = []

    def measured(ops, comm=SOLO, *, progress=None):
        made.append(ceilings.identity(ops, comm) | {"copy_gb_per_s": float(len(made))})
        return made[-1]

    monkeypatch.setattr(ceilings, "measure", measured)
    return made


def test_a_machine_is_measured_once(cpu_ops, measurements, cache):
    first = find(cpu_ops)
    assert find(cpu_ops) == first and len(measurements) == 1
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_it_is_measured_again_when_asked(cpu_ops, measurements):
    find(cpu_ops)
    again = find(cpu_ops, remeasure=True)
    assert len(measurements) == 2 and find(cpu_ops) == again == measurements[1] and len(measurements) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"null", b"{}"])
def test_a_damaged_file_is_replaced(damage, cpu_ops, measurements, cache):
    find(cpu_ops)
    (path,) = cache.iterdir()
    path.write_bytes(damage)
    assert find(cpu_ops) == measurements[1] == find(cpu_ops) and len(measurements) == 2


@pytest.mark.parametrize("key, value", [("machine", "another"), ("ranks", 3), ("version", 0), ("threads", 99)])
def test_the_record_of_another_machine_is_not_taken(key, value, cpu_ops, measurements, cache):
    record = find(cpu_ops)
    (path,) = cache.iterdir()
    path.write_text(json.dumps(record | {key: value}))
    assert find(cpu_ops) == measurements[1]


def test_a_home_that_cannot_be_written_only_costs_time(cpu_ops, measurements, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "file" / "below"))
    assert find(cpu_ops) == measurements[0] and find(cpu_ops) == measurements[1]


def test_where_records_are_kept(monkeypatch, tmp_path):
    identity = {"machine": "NVIDIA H200", "device": "cuda", "ranks": 4, "ranks_per_host": 2, "threads": None}
    monkeypatch.setenv("MINIDL_CACHE", "/chosen")
    assert str(cache_path(identity)) == "/chosen/ceilings/nvidia-h200-cuda-4-ranks-2-per-host.json"
    monkeypatch.delenv("MINIDL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_path(identity).is_relative_to("/xdg/minidl/ceilings")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path(identity).is_relative_to(tmp_path / ".cache" / "minidl")


def test_each_setting_has_a_file_of_its_own():
    identity = {"machine": "a", "device": "cpu", "ranks": 2, "ranks_per_host": 2, "threads": 2}
    others = [{"machine": "b"}, {"device": "cuda"}, {"ranks": 4}, {"ranks_per_host": 1}, {"threads": 1}]
    assert len({cache_path(identity | other) for other in [{}, *others]}) == 6


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_record_in_words():
    rates = {"bf16": 774.04, "fp16": None, "tf32": 402.0, "fp32": 0.0671}
    record = dict.fromkeys(FIGURES) | {
        "copy_gb_per_s": 4230.0, "matrix_tflops": rates, "matrix_by": dict.fromkeys(rates, "cublas"),
        "vector_tflops": {"fp32": 60.0},
        "all_reduce": {"ranks": 4, "engine": "nccl", "latency_us": 21.3, "bus_gb_per_s": 355.0, "points": []},
    }  # fmt: skip
    assert describe(record) == [
        ("copy, read and written", "4,230.0 GB/s", ""),
        ("matrix product, bf16", "774.0 TFLOP/s", "cublas"),
        ("matrix product, tf32", "402.0 TFLOP/s", "cublas"),
        ("matrix product, fp32", "67.1 GFLOP/s", "cublas"),
        ("vector units, fp32", "60.0 TFLOP/s", ""),
        ("all-reduce, bus bandwidth", "355.0 GB/s", "nccl, 4 ranks"),
        ("all-reduce, latency", "21.3 us", "nccl, 4 ranks"),
    ]


# -- the GPU, imagined -------------------------------------------------------------------------------------------------


class Millisecond:
    """A timer on which every call takes a millisecond."""

    def hot(self, call, budget):
        call()
        return SimpleNamespace(ms=1.0)

    def replayed(self, calls, budget):
        return min((self.hot(call, budget) for call in calls), key=lambda timing: timing.ms)


def test_without_cublas_our_own_kernels_make_the_products(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    monkeypatch.setattr(device_ceilings, "MATRIX_SIZE", 512)
    with dry_run() as log:
        found = device_ceilings.matrix_rates(cuda, Millisecond(), lambda what: None)
    assert found["matrix_by"] == dict.fromkeys(PRECISIONS, "minidl conv2d")
    assert found["matrix_tflops"] == dict.fromkeys(PRECISIONS, 2 * 512**3 / 1e9)
    products = {(launch.stem, launch.defines) for launch in log.launches if launch.stem.startswith("conv2d")}
    assert len(products) == 4, "each precision has a kernel of its own"


def test_cublas_adds_up_in_float32_and_rounds_to_tf32_only_where_asked(monkeypatch):
    named = SimpleNamespace(CUDA_R_16BF="bf16", CUDA_R_16F="fp16", CUDA_R_32F="fp32")
    array = SimpleNamespace(data=SimpleNamespace(ptr=1))
    table = SimpleNamespace(device=SimpleNamespace(get_cublas_handle=lambda: 7), runtime=named)
    cupy = SimpleNamespace(cuda=table, empty=lambda size, dtype: array)
    monkeypatch.setattr(device_ceilings, "import_cupy", lambda: cupy)
    calls = []
    cublas = SimpleNamespace(
        CUBLAS_OP_T="T", CUBLAS_OP_N="N", CUBLAS_GEMM_DEFAULT=-1, CUBLAS_COMPUTE_32F="strict",
        CUBLAS_COMPUTE_32F_FAST_TF32="tf32", gemmEx=lambda *arguments: calls.append(arguments),
    )  # fmt: skip
    make = device_ceilings._cublas_product(cublas)
    for name in PRECISIONS:
        make(name, array, array)()
    # handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, compute, algorithm
    assert [(call[8], call[11], call[15], call[17]) for call in calls] == [
        ("bf16", "bf16", "bf16", "strict"),
        ("fp16", "fp16", "fp16", "strict"),
        ("fp32", "fp32", "fp32", "tf32"),
        ("fp32", "fp32", "fp32", "strict"),
    ]
    n = device_ceilings.MATRIX_SIZE
    assert all(call[3:6] == (n, n, n) and call[9] == call[12] == call[16] == n for call in calls)


def test_vector_and_cache_rates_count_the_work_of_what_was_launched():
    with dry_run() as log:
        rate = device_ceilings.vector_rate(Millisecond())
        bandwidth = device_ceilings.l2_bandwidth(cuda, Millisecond())
    (fma,) = [launch for launch in log.launches if launch.name == "fma_kernel"]
    (copy,) = [launch for launch in log.launches if launch.name == "l2_copy_kernel"]
    threads = fma.grid[0] * fma.block[0]
    assert threads == 132 * 2048, "every thread that the device holds"
    assert rate == pytest.approx(2 * 8 * device_ceilings.FMA_STEPS * threads / 1e9)
    with dry_run():
        size = ceiling.l2_copy_bytes(60 * 2**20 // 8)
    assert size % (4 * 16 * copy.grid[0] * copy.block[0]) == 0 and 2 * size < 30 * 2**20, "it fits"
    assert bandwidth == pytest.approx(2 * size * device_ceilings.L2_REPEATS / 1e6)


# -- the GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_record_of_a_gpu(cuda_ops):
    record = measure(cuda_ops)
    assert record.keys() == FIGURES | IDENTITY and record == json.loads(json.dumps(record))
    rates = record["matrix_tflops"]
    assert list(rates) == PRECISIONS and rates["bf16"] > rates["tf32"] > rates["fp32"] > 0
    assert rates["fp16"] == pytest.approx(rates["bf16"], rel=0.2)
    if record["matrix_by"]["fp32"] == "cublas":
        assert rates["fp32"] < 1.02 * record["vector_tflops"]["fp32"], "strict products run on the vector units"
    assert record["l2_gb_per_s"] > record["copy_gb_per_s"]
    ways = [record[f"{way}_gb_per_s"] for way in ("host_to_device", "device_to_host")]
    assert 0.95 * max(ways) < record["both_ways_gb_per_s"] < 1.05 * sum(ways)


@pytest.mark.gpu
def test_the_kernels_of_ceilings_compute_what_they_say(cuda_ops, rng):
    output = ceiling.fma_output()
    ceiling.fused_multiply_adds(output, 64, 0.5, 3.0)
    found = cuda_ops.to_host(output).reshape(-1, 256)
    # x -> x/2 + 3 draws near to 6 from any start, so 64 steps leave 6 in each of eight chains.
    assert np.array_equal(found, np.full_like(found, 48.0))
    ceiling.fused_multiply_adds(output, 32, 1.0, 0.25)
    starts = np.arange(256) % 32
    assert np.array_equal(cuda_ops.to_host(output)[:256], 8.0 * starts + sum(range(8)) + 8 * 32 * 0.25)
    size = ceiling.l2_copy_bytes(1 << 20)
    source = cuda_ops.from_host(rng.integers(0, 256, size).astype(np.uint8))
    target = cuda_ops.zeros(size, np.uint8)
    ceiling.l2_copy(target, source, 2)
    assert np.array_equal(cuda_ops.to_host(target), cuda_ops.to_host(source))
