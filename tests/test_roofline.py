"""Least times, bounds and intensities against numbers computed by hand."""

from __future__ import annotations

import pytest

import minidl as m
from minidl.profile.roofline import achieved, communication_intensity, fill, floor, network_floor, wire_bytes

CEILINGS = {
    "copy_gb_per_s": 4000.0,
    "matrix_tflops": {"bf16": 800.0, "fp16": 790.0, "tf32": 400.0, "fp32": None},
    "vector_tflops": {"fp32": 50.0},
    "all_reduce": {"ranks": 8, "engine": "nccl", "latency_us": 20.0, "bus_gb_per_s": 400.0, "points": []},
}


def test_the_larger_of_arithmetic_and_memory_is_the_floor():
    # 8e9 FLOP at 800e12 a second take 0.01 ms, 4e6 bytes at 4000e9 a second 0.001 ms.
    assert floor(8e9, 4e6, CEILINGS, "bf16", matrix=True) == (pytest.approx(0.01), "compute")
    assert floor(8e9, 80e6, CEILINGS, "bf16", matrix=True) == (pytest.approx(0.02), "memory")
    assert floor(8e9, 4e6, CEILINGS, "tf32", matrix=True) == (pytest.approx(0.02), "compute")


def test_work_outside_products_runs_on_vector_units_in_float32():
    for dtype in ("bf16", "fp16", "tf32", "fp32"):
        assert floor(8e9, 4e6, CEILINGS, dtype, matrix=False) == (pytest.approx(0.16), "compute")


def test_products_of_three_take_three_times_as_long():
    assert floor(8e9, 4e6, CEILINGS, "tf32x3", matrix=True) == (pytest.approx(0.06), "compute")
    assert floor(8e9, 4e6, CEILINGS | {"matrix_tflops": {"tf32": None}}, "tf32x3", matrix=True) == (None, None)


def test_what_is_not_known_gives_no_floor():
    assert floor(8e9, 4e6, CEILINGS, "fp32", matrix=True) == (None, None)
    assert floor(8e9, 4e6, None, "bf16", matrix=True) == (None, None)
    assert floor(8e9, 4e6, CEILINGS | {"copy_gb_per_s": None}, "bf16", matrix=True) == (None, None)
    assert floor(8e9, 4e6, CEILINGS | {"vector_tflops": {"fp32": None}}, "bf16", matrix=False) == (None, None)
    assert floor(None, 4e6, CEILINGS, "bf16", matrix=True) == (None, None)
    assert floor(8e9, None, CEILINGS, "bf16", matrix=True) == (None, None)


def test_a_rate_that_is_not_needed_need_not_be_known():
    assert floor(0, 4e6, CEILINGS, "fp32", matrix=True) == (pytest.approx(0.001), "memory")
    assert floor(0, 0, CEILINGS, "bf16", matrix=True) == (0.0, None)


def test_a_ring_sends_every_byte_twice_but_for_ones_own_part():
    assert wire_bytes(800, 1) == 0
    assert wire_bytes(800, 2) == 800
    assert wire_bytes(800, 8) == 1400


def test_network_floor_and_communication_intensity():
    assert network_floor(1400e6, CEILINGS) == pytest.approx(3.5)
    assert network_floor(0, CEILINGS) == 0.0
    assert network_floor(1400e6, CEILINGS | {"all_reduce": None}) is None
    assert network_floor(None, CEILINGS) is None and network_floor(1.0, None) is None
    assert communication_intensity(2800, 1400) == 2.0
    assert communication_intensity(2800, 0) is None and communication_intensity(None, 1400) is None


def test_achieved_rates():
    assert achieved(8e9, 4e6, 0.02) == (pytest.approx(400.0), pytest.approx(200.0))
    assert achieved(None, 4e6, 0.02) == (None, pytest.approx(200.0))
    assert achieved(8e9, 4e6, 0.0) == (None, None), "a pass that a neighbour does has no rate of its own"
    assert achieved(8e9, 4e6, None) == (None, None)


def test_fill_sets_the_derived_columns_of_a_pass():
    row = {"pass": "forward", "dtype": "bf16", "flop": 8e9, "bytes": 4e6, "ms": 0.02, "layer": "conv1"}
    fill(row, CEILINGS, matrix=True)
    assert row == {
        "pass": "forward", "dtype": "bf16", "flop": 8e9, "bytes": 4e6, "ms": 0.02, "layer": "conv1",
        "intensity": 2000.0, "tflops": pytest.approx(400.0), "gb_per_s": pytest.approx(200.0),
        "floor_ms": pytest.approx(0.01), "bound": "compute", "roof_share": pytest.approx(0.5),
    }  # fmt: skip


def test_fill_without_ceilings_or_time_leaves_what_is_not_known_none():
    row = {"pass": "forward", "dtype": "bf16", "flop": 8e9, "bytes": 4e6, "ms": 0.0}
    fill(row, CEILINGS, matrix=True)
    assert row["floor_ms"] == pytest.approx(0.01) and row["bound"] == "compute"
    assert row["roof_share"] is None and row["tflops"] is None and row["gb_per_s"] is None
    row = {"pass": "forward", "dtype": "bf16", "flop": 0, "bytes": 0, "ms": 0.5}
    fill(row, None, matrix=False)
    assert row["intensity"] is None and row["floor_ms"] is None and row["bound"] is None and row["roof_share"] is None


def test_fill_holds_an_all_reduce_against_the_network():
    row = {"pass": "all_reduce", "dtype": "bf16", "wire_bytes": 1400e6, "ms": 14.0, "transfer_ms": 7.0, "flop": None}
    fill(row, CEILINGS, matrix=True)
    assert row["floor_ms"] == pytest.approx(3.5) and row["bound"] == "network"
    assert row["roof_share"] == pytest.approx(0.25) and row["bus_gb_per_s"] == pytest.approx(200.0)
    row |= {"transfer_ms": None}
    fill(row, CEILINGS, matrix=True)
    assert row["bus_gb_per_s"] == pytest.approx(100.0)
    row |= {"wire_bytes": 0, "ms": 0.0}
    fill(row, CEILINGS, matrix=True)
    assert row["floor_ms"] == 0.0 and row["bound"] is None and row["roof_share"] is None


# -- the layers' own costs, batch 32 on each of 8 ranks ----------------------------------------------------------------

RANKS = 8


def conv(*arguments, **options):
    return m.Conv2d(*arguments, bias=False, **options)


# layer, input shape | forward: GFLOP, MB in float32, FLOP/byte | MB on the wire, FLOP per wire byte, float32 and 16-bit
TABLE = {
    "stem": (conv(3, 64, 7, stride=2, padding=3), (32, 224, 224, 3), 7.55, 122.1, 61.9, 0.07, 344_064, 688_128),
    "stage 1, 3x3": (conv(64, 64, 3, padding=1), (32, 56, 56, 64), 7.40, 51.5, 143.6, 0.26, 86_016, 172_032),
    "stage 1, 1x1": (conv(64, 256, 1), (32, 56, 56, 64), 3.29, 128.5, 25.6, 0.11, 86_016, 172_032),
    "stage 3, 3x3": (conv(256, 256, 3, padding=1), (32, 14, 14, 256), 7.40, 15.2, 486.6, 4.13, 5_376, 10_752),
    "stage 4, 3x3": (conv(512, 512, 3, padding=1), (32, 7, 7, 512), 7.40, 15.9, 466.5, 16.52, 1_344, 2_688),
    "stage 4, 1x1": (conv(2048, 512, 1), (32, 7, 7, 2048), 3.29, 20.3, 162.4, 7.34, 1_344, 2_688),
    "fc": (m.Linear(2048, 1000, bias=False), (32, 2048), 0.13, 8.6, 15.3, 14.34, 27, 55),
}


@pytest.mark.parametrize("name", TABLE)
def test_layers_of_resnet50_by_hand(name):
    layer, shape, gflop, megabytes, intensity, wire, *intensities = TABLE[name]
    cost, (weight,) = layer.cost(shape, itemsize=4), layer.specs
    elements = 1
    for size in weight.shape:
        elements *= size
    assert cost.forward.flop / 1e9 == pytest.approx(gflop, abs=0.005)
    assert cost.forward.bytes / 1e6 == pytest.approx(megabytes, abs=0.05)
    assert cost.forward.intensity == pytest.approx(intensity, abs=0.05)
    assert wire_bytes(4 * elements, RANKS) / 1e6 == pytest.approx(wire, abs=0.005)
    for itemsize, expected in zip((4, 2), intensities, strict=True):
        found = communication_intensity(cost.total.flop, wire_bytes(itemsize * elements, RANKS))
        assert found == pytest.approx(expected, abs=0.5)


def test_batch_norm_by_hand():
    """Three passes over a large tensor, seven operations an element: memory is what it waits for."""
    cost = m.BatchNorm2d(256).cost((32, 56, 56, 256), itemsize=4).forward
    assert cost.flop / 1e9 == pytest.approx(0.18, abs=0.005)
    assert cost.bytes / 1e6 == pytest.approx(308, abs=0.5)
    assert floor(cost.flop, cost.bytes, CEILINGS, "fp32", matrix=False)[1] == "memory"


@pytest.mark.parametrize("channels, filters, kernel", [(3, 64, 7), (64, 64, 3), (512, 2048, 1), (13, 17, 5)])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_channels_and_kernels_cancel_in_the_communication_intensity_of_a_convolution(channels, filters, kernel, ranks):
    """0.75 · N·P·Q · n/(n-1) with float32 gradients."""
    layer, shape = conv(channels, filters, kernel, stride=2, padding=kernel // 2), (6, 28, 20, channels)
    n, p, q, _ = layer.output_shape(shape)
    wire = wire_bytes(4 * filters * kernel * kernel * channels, ranks)
    found = communication_intensity(layer.cost(shape).total.flop, wire)
    assert found == pytest.approx(0.75 * n * p * q * ranks / (ranks - 1), rel=1e-12)
