"""Sparse layers: gradients, agreement with dense layers under a mask, their place in graphs and arenas."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl.sparse import CSBConv2d, CSBLinear, CSBPattern
from tests.tolerance import draw

f32 = np.float32


def masked(rng, shape, density=0.3):
    weight = draw(rng, shape, f32)
    weight[rng.random(shape) >= density] = 0
    return weight


def linear(rng, bias=True):
    return CSBLinear.from_dense(masked(rng, (11, 17)), draw(rng, 11, f32) if bias else None, blocksize=8)


def conv(rng, stride=1):
    return CSBConv2d.from_dense(masked(rng, (9, 1, 1, 14)), draw(rng, 9, f32), stride=stride, blocksize=8)


def wide(rng, **geometry):
    return CSBConv2d.from_dense(masked(rng, (9, 3, 2, 5)), draw(rng, 9, f32), blocksize=(4, 4), **geometry)


LAYERS = {
    "linear": (linear, (5, 17)),
    "linear without bias": (lambda rng: linear(rng, bias=False), (5, 17)),
    "conv": (conv, (2, 5, 4, 14)),
    "conv strided": (lambda rng: conv(rng, (2, 3)), (2, 5, 7, 14)),
    "conv 3x2": (wide, (2, 5, 4, 5)),
    "conv 3x2 strided": (lambda rng: wide(rng, stride=(2, 3), padding=1, dilation=(1, 2)), (2, 5, 7, 5)),
}


@pytest.mark.parametrize("case", LAYERS)
def test_sparse_layers_obey_the_laws_of_layers(case, ops, rng):
    make, shape = LAYERS[case]
    m.check_layer(make(rng), shape, device=ops.name)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "conv", "conv 3x3"])
def test_equals_the_dense_layer_with_zeros(ops, rng, kind, stride):
    bias = draw(rng, 40, f32)
    if kind == "linear":
        weight, x = masked(rng, (40, 70), 0.1), draw(rng, (30, 70), f32)
        dense, sparse = m.Linear(70, 40), CSBLinear.from_dense(ops.from_host(weight), ops.from_host(bias))
    else:
        size = 3 if "3x3" in kind else 1
        weight, x = masked(rng, (40, size, size, 70), 0.1), draw(rng, (3, 6, 5, 70), f32)
        geometry = {"stride": stride, "padding": size // 2}
        dense = m.Conv2d(70, 40, size, **geometry)
        sparse = CSBConv2d.from_dense(ops.from_host(weight), ops.from_host(bias), **geometry)
    dense.to(ops.name).load_state_dict({"weight": weight, "bias": bias})
    dy = draw(rng, dense.output_shape(x.shape), f32)
    found = []
    for layer in (dense, sparse):
        y = layer.forward(ops.from_host(x))
        dx = layer.backward(ops.from_host(dy))
        gradients = {name: ops.to_host(g) for name, g in layer.params.gradients().items()}
        found.append((ops.to_host(y), ops.to_host(dx), gradients["bias"], gradients["weight"]))
    *expected, full = found[0]
    *got, values = found[1]
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(values, sparse.at_pattern(full), rtol=1e-4, atol=1e-4)
    stored = sparse.matrix.toarray() if kind == "linear" else sparse.filters()
    np.testing.assert_array_equal(ops.to_host(stored), weight)


def test_sixteen_bit_layers_stay_near_their_float32_selves(ops, rng, dtype):
    weight, x = masked(rng, (40, 70)), draw(rng, (30, 70), dtype)
    layer = CSBLinear.from_dense(weight, draw(rng, 40, f32))
    exact = CSBLinear.from_dense(weight, layer.specs[1].init(None, (40,)))
    y = layer.forward(ops.from_host(x))
    z = exact.forward(ops.from_host(x.astype(f32)))
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[np.dtype(dtype).name]
    difference = np.abs(ops.to_host(y).astype(f32) - ops.to_host(z))
    assert y.dtype == dtype and difference.max() <= 8 * unit * np.abs(ops.to_host(z)).max()
    assert layer.backward(y).dtype == dtype
    assert all(g.dtype == f32 for g in layer.params.gradients().values())


def test_two_backward_passes_accumulate(ops, rng):
    layer = linear(rng)
    graph = m.Graph()
    graph.output(layer(graph.input((17,))))
    model = m.Model(graph, device=ops.name)
    x, dy = ops.from_host(draw(rng, (5, 17), f32)), ops.from_host(draw(rng, (5, 11), f32))
    model.forward(x)
    model.backward(dy)
    once = ops.to_host(model.arena.grad).copy()
    for message in model.arena.messages:
        message.work = None
    model.forward(x)
    model.backward(dy, accumulate=True)
    np.testing.assert_allclose(ops.to_host(model.arena.grad), 2 * once, rtol=1e-5, atol=1e-6)


def test_arena_and_messages_hold_the_elements_only(cpu_ops, rng):
    graph = m.Graph()
    layer = CSBLinear.from_dense(masked(rng, (512, 512), 0.1))
    graph.output(layer(graph.input((512,))))
    model = m.Model(graph)
    [message] = model.arena.messages
    assert layer.pattern.nnz <= message.end - message.begin < layer.pattern.nnz + 64
    optimizer = m.SGD(model, 0.1, 0.9)
    assert optimizer.velocity.size < 512 * 512 * 0.11
    assert model.state_dict()["csblinear.weight"].shape == (layer.pattern.nnz,)


def test_the_data_of_the_matrix_are_the_parameter(cpu_ops, rng):
    layer = linear(rng)
    layer.to("cpu").matrix.data[:] = 1
    assert (layer.state_dict()["weight"] == 1).all()


def test_costs_count_elements_and_their_indices(rng):
    layer = linear(rng)
    nnz, index = layer.pattern.nnz, layer.pattern.nbytes
    cost = layer.cost((5, 17), itemsize=2)
    assert cost.forward.flop == 2 * 5 * nnz + 5 * 11 and cost.backward_data.flop == 2 * 5 * nnz
    assert cost.backward_data.bytes == 2 * 5 * (11 + 17) + 2 * nnz + index
    assert cost.backward_weight.bytes == 2 * 5 * (11 + 17) + 4 * nnz + index + 4 * 11
    strided = conv(rng, (2, 3))
    pixels = 2 * 3 * 3
    cost = strided.cost((2, 5, 7, 14))
    assert cost.forward.flop == 2 * pixels * strided.pattern.nnz + pixels * 9
    weight = 4 * strided.pattern.nnz + strided.pattern.nbytes
    assert cost.backward_data.bytes == 4 * (pixels * 9 + 2 * 5 * 7 * 14) + weight


def test_ranks_with_other_patterns_have_other_descriptions(rng):
    mask = np.zeros((20, 30), bool)
    mask[0, :5] = True
    a = CSBLinear.from_dense(np.ones((20, 30), f32), mask=mask)
    b = CSBLinear.from_dense(np.ones((20, 30), f32), mask=mask[::-1].copy())
    assert repr(a) != repr(b) and "elements=5" in repr(a)


def test_decay_of_products_reaches_sparse_values(cpu_ops, rng):
    layer = linear(rng)
    graph = m.Graph()
    graph.output(layer(graph.input((17,))))
    model = m.Model(graph)
    optimizer = m.SGD(model, 0.5, weight_decay=0.5, decay_norm_and_bias=False)
    before = layer.state_dict()
    model.forward(np.zeros((2, 17), f32))
    model.backward(np.zeros((2, 11), f32))
    optimizer.step()
    np.testing.assert_allclose(layer.state_dict()["weight"], 0.75 * before["weight"], rtol=1e-6)
    np.testing.assert_array_equal(layer.state_dict()["bias"], before["bias"])


def test_doors(rng):
    with pytest.raises(TypeError, match="csblinear: pattern must be a CSBPattern.*from_dense"):
        CSBLinear(np.ones((3, 3), f32))
    with pytest.raises(ValueError, match="both at least 1"):
        CSBLinear(CSBPattern([0], [], (0, 3), 64))
    with pytest.raises(ValueError, match=r"\(N, 17\), got \(2, 3, 17\); put a Flatten"):
        linear(rng).forward(np.zeros((2, 3, 17), f32))
    with pytest.raises(ValueError, match=r"\(N, H, W, 14\)"):
        conv(rng).forward(np.zeros((2, 3, 4, 13), f32))
    with pytest.raises(ValueError, match=r"weight must have shape \(K, R, S, C\), none of them 0, got \(4, 3, 2\)"):
        CSBConv2d.from_dense(np.ones((4, 3, 2), f32))
    with pytest.raises(ValueError, match="mask must have shape"):
        CSBConv2d.from_dense(np.ones((4, 3, 3, 2), f32), mask=np.ones((4, 2), bool))
    with pytest.raises(ValueError, match="9 taps of whole blocks of 8 columns.*see from_dense"):
        CSBConv2d(CSBPattern([0] * 7, [], (8, 45), 8), kernel_size=3)
    with pytest.raises(ValueError, match="without elements in columns of a tap from 5 on"):
        CSBConv2d(CSBPattern([0, 1, 1], [7], (8, 16), 8), kernel_size=(1, 2), in_channels=5)
    with pytest.raises(ValueError, match="at least as large as the kernel"):
        wide(rng).forward(np.zeros((1, 2, 4, 5), f32))
    with pytest.raises(ValueError, match="stride"):
        conv(rng, 0)
    with pytest.raises(ValueError, match=r"csblinear: dense must have shape \(3, 2\) like the weight, got \(2, 3\)"):
        CSBLinear.from_dense(np.ones((3, 2), f32)).at_pattern(np.ones((2, 3), f32))
    for shape in [(4, 3, 3, 1), (4, 2, 3, 3), (4, 18)]:
        with pytest.raises(ValueError, match=r"csbconv2d: dense must have shape \(4, 3, 3, 2\) like the weight, got"):
            CSBConv2d.from_dense(np.ones((4, 3, 3, 2), f32)).at_pattern(np.ones(shape, f32))
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\), got \(4,\)"):
        CSBLinear.from_dense(np.ones((3, 2), f32), np.ones(4, f32))
