"""Laws of the per-layer benchmark that time a GPU, which they need to themselves: its figures close, and are stable."""

from __future__ import annotations

import time

import pytest

import minidl as m
from minidl.bench import layers
from minidl.bench.run import bench_network
from minidl.bench.setup import Setup, layer_case
from minidl.dist.communicator import SOLO
from minidl.precision import precision
from minidl.profile import results
from minidl.profile.compare import compare_results
from minidl.profile.ratio import FASTER, SAME, SLOWER


@pytest.mark.alone
def test_the_energy_of_each_pass_is_about_its_time_times_a_boards_power(cuda_ops):
    from minidl.profile.energy import Meter

    meter = Meter(cuda_ops)
    if meter.reason is not None:
        pytest.skip(meter.reason)
    options = layers.Options(("replayed",), layers.budget_on("cuda", 5), energy=meter.energy_per_call)
    case = layer_case("Conv2d(256, 256, 3, padding=1)", ["64x28x28x256"])
    rows = layers.measure([case], "t", ops=cuda_ops, precision=precision("bf16"), options=options)
    assert {row["pass"] for row in rows} == {"forward", "backward_data", "backward_weight"}
    for row in rows:
        assert 200 < row["energy_mj"] / row["ms"] < 1000, "an idle H100 or H200 draws some 100 W, and 700 at most"


@pytest.mark.alone
@pytest.mark.parametrize(("model", "batch"), [("resnet50", 256), ("unet", 32)])
def test_a_gpu_network_closes_eager_and_captured(model, batch, cuda_ops):
    """These keep the GPU busy; eagerly, smaller batches wait for the host now and then, for some hosts more often."""
    found = bench_network(Setup(model, batch, "bf16", "cuda"), SOLO, None, isolated=False, seconds=1.0)
    assert found["step"]["graph_accounted"] >= 0.95
    assert found["step"]["eager_accounted"] >= 0.95
    rows = [row for row in found["rows"] if row["pass"] != "step"]
    watched = found["step"]["eager"]["ms"] * (1 + found["step"]["eager_profiling_overhead"])
    for way, step_ms in (("graph_step", found["step"]["graph"]["ms"]), ("step", watched)):
        assert sum(row["timings"][way]["ms"] for row in rows) == pytest.approx(step_ms, rel=0.05)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "text"), [(m.BatchNorm2d, "BatchNorm2d(256)"), (m.Conv2d, "Conv2d(256, 256, 3, padding=1)")]
)
def test_a_planted_slowdown_of_a_layer_is_found_on_a_gpu_and_noise_is_not(kind, text, cuda_ops, monkeypatch):
    """Also of a convolution, which would take the GPU to its limit of power, where clocks come and go."""
    from minidl.cuda.spin import spin

    delay = [0.0]
    compute = kind.compute

    def delayed(self, x):
        y = compute(self, x)
        if delay[0]:
            spin(delay[0])
        return y

    def measured():
        case, options = layer_case(text, ["128x28x28x256"]), layers.Options(("replayed",))
        rows = layers.measure([case], "t", ops=cuda_ops, precision=precision("bf16"), options=options)
        return results.result("layers", rows)

    def verdicts(a, b):
        return {row.key[2]: row.verdict for row in compare_results(a, b).rows}

    monkeypatch.setattr(kind, "compute", delayed)
    end = time.perf_counter() + 4
    while time.perf_counter() < end:  # clocks rise; after 2 s this norm is 2 % slower for good, at an equal clock
        measured()
    a, b = measured(), measured()
    delay[0] = 0.05e-3 * next(row["ms"] for row in a["rows"] if row["pass"] == "forward")
    c = measured()
    assert set(verdicts(a, b).values()) == {SAME}
    assert verdicts(b, c) == verdicts(a, b) | {"forward": SLOWER} and verdicts(c, b)["forward"] == FASTER
