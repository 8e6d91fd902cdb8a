"""Laws of the layers: gradients equal central differences, doors refuse what they must, a layer alone is complete."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl.laws import check_gradients, spread

SMOOTH = {
    "linear": (lambda: m.Linear(7, 5), [(3, 7)]),
    "linear without bias": (lambda: m.Linear(7, 5, bias=False), [(3, 7)]),
    "conv": (lambda: m.Conv2d(3, 4, 3, padding=1), [(2, 5, 6, 3)]),
    "conv strided dilated": (lambda: m.Conv2d(2, 3, (3, 2), (2, 1), (1, 2), (1, 2)), [(2, 7, 5, 2)]),
    "conv grouped": (lambda: m.Conv2d(4, 6, 3, groups=2, bias=False), [(2, 5, 5, 4)]),
    "conv depthwise": (lambda: m.Conv2d(5, 5, 3, padding=1, groups=5), [(2, 4, 5, 5)]),
    "conv over rows, one rank": (
        lambda: m.layers.RowParallelConv2d(3, 4, 3, padding=1, height=5), [(2, 5, 6, 3)],
    ),
    "conv over channels, one rank": (lambda: m.layers.ChannelParallelConv2d(3, 4, 3, padding=1), [(2, 5, 6, 3)]),
    "conv transpose": (lambda: m.ConvTranspose2d(3, 4, 2, stride=2), [(2, 3, 4, 3)]),
    "conv transpose padded": (lambda: m.ConvTranspose2d(4, 2, 3, 2, 1, 1, groups=2), [(2, 3, 4, 4)]),
    "conv transpose padded beyond its stride": (
        lambda: m.ConvTranspose2d(4, 2, (2, 3), (1, 2), 0, (2, 3), dilation=(3, 4)), [(2, 1, 3, 4)],
    ),
    "batch norm": (lambda: m.BatchNorm2d(3), [(4, 5, 3, 3)]),
    "batch norm of vectors": (lambda: m.BatchNorm2d(3), [(9, 3)]),
    "batch norm without affine": (lambda: m.BatchNorm2d(3, affine=False), [(4, 3, 3, 3)]),
    "average pooling": (lambda: m.AvgPool2d(3, 2, 1), [(2, 5, 6, 3)]),
    "average pooling, ceil": (
        lambda: m.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), [(2, 6, 6, 3)],
    ),
    "adaptive pooling": (lambda: m.AdaptiveAvgPool2d((3, 2)), [(2, 5, 7, 3)]),
    "global pooling": (lambda: m.AdaptiveAvgPool2d(1), [(2, 5, 7, 3)]),
    "flatten": (lambda: m.Flatten(), [(2, 3, 2, 4)]),
    "pad": (lambda: m.Pad((1, 2, 0, 3)), [(2, 3, 2, 4)]),
    "crop": (lambda: m.Pad((-1, 0, 1, -1)), [(2, 4, 3, 4)]),
    "relu6": (lambda: m.ReLU6(), [(2, 3, 2, 5)]),
    "leaky relu": (lambda: m.LeakyReLU(0.2), [(2, 3, 2, 5)]),
    "sigmoid": (lambda: m.Sigmoid(), [(2, 3, 2, 5)]),
    "tanh": (lambda: m.Tanh(), [(2, 3, 2, 5)]),
    "silu": (lambda: m.SiLU(), [(2, 3, 2, 5)]),
    "gelu": (lambda: m.GELU(), [(2, 3, 2, 5)]),
    "gelu by tanh": (lambda: m.GELU("tanh"), [(2, 3, 2, 5)]),
    "hardswish": (lambda: m.Hardswish(), [(2, 3, 2, 5)]),
    "softmax": (lambda: m.Softmax(), [(2, 3, 2, 5)]),
    "group norm": (lambda: m.GroupNorm(2, 6), [(2, 3, 4, 6)]),
    "group norm of vectors": (lambda: m.GroupNorm(2, 6), [(3, 6)]),
    "instance norm": (lambda: m.GroupNorm(3, 3, affine=False), [(2, 4, 3, 3)]),
    "layer norm": (lambda: m.LayerNorm(6), [(2, 3, 4, 6)]),
    "layer norm without affine": (lambda: m.LayerNorm(7, elementwise_affine=False), [(3, 7)]),
    "upsample": (lambda: m.Upsample(scale_factor=2), [(2, 3, 4, 3)]),
    "upsample, bilinear": (lambda: m.Upsample(scale_factor=(1.5, 2), mode="bilinear"), [(2, 3, 4, 3)]),
    "upsample to a size": (lambda: m.Upsample((5, 3), mode="bilinear", align_corners=True), [(2, 3, 4, 3)]),
    "mul": (lambda: m.Mul(), [(2, 3, 2, 4), (2, 3, 2, 4)]),
    "gate": (lambda: m.Mul(), [(2, 3, 2, 4), (2, 1, 1, 4)]),
    "add": (lambda: m.Add(), [(2, 3, 2, 4), (2, 3, 2, 4)]),
    "concat": (lambda: m.Concat(), [(2, 3, 2, 4), (2, 3, 2, 1), (2, 3, 2, 3)]),
    "relu": (lambda: m.ReLU(), [(2, 3, 2, 5)]),
    "max pooling": (lambda: m.MaxPool2d(2), [(2, 4, 6, 3)]),
    "max pooling, overlapping": (lambda: m.MaxPool2d(3, 2, 1), [(1, 5, 5, 2)]),
    "max pooling, ceil and dilated": (lambda: m.MaxPool2d(2, 2, 0, 2, ceil_mode=True), [(1, 6, 5, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("case", [*SMOOTH, "dropout"])
def test_every_layer_obeys_the_laws_and_stays_as_it_was(case, ops):
    make, shapes = SMOOTH.get(case, (lambda: m.Dropout(0.4), [(4, 6)]))
    layer = make()
    before = layer.to(ops.name).state_dict()
    m.check_layer(layer, *shapes, device=ops.name)
    for name, values in layer.state_dict().items():
        np.testing.assert_array_equal(values, before[name])


def test_batch_norm_in_evaluation_mode_has_constant_statistics(ops, rng):
    layer = m.BatchNorm2d(3).to(ops.name)
    state = layer.state_dict()
    state["running_mean"] = rng.standard_normal(3).astype(np.float32)
    state["running_var"] = rng.uniform(0.5, 2, 3).astype(np.float32)
    layer.load_state_dict(state)
    layer.training = False
    check_gradients(layer, ops, [spread(rng, (2, 3, 4, 3))], rng)


@pytest.mark.parametrize("case", [c for c in SMOOTH if len(SMOOTH[c][1]) == 1])
def test_add_is_added_to_the_input_gradient(case, ops, rng):
    make, [shape] = SMOOTH[case]
    x = ops.from_host(spread(rng, shape))
    layer = make()
    dy = ops.from_host(rng.standard_normal(layer.output_shape(shape)).astype(np.float32))
    add = rng.standard_normal(shape).astype(np.float32)
    layer.forward(x)
    alone = ops.to_host(layer.backward(dy))
    layer.forward(x)
    added = ops.to_host(layer.backward(dy, add=ops.from_host(add)))
    np.testing.assert_allclose(added, alone + add, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", SMOOTH)
def test_overflow_and_nan_are_no_news(case, ops, dtype, rng):
    """They are ordinary in training in 16 bits, where the loss scale reacts to them: nobody is warned (a warning is an
    error here)."""
    make, shapes = SMOOTH[case]
    layer = make().to(ops.name, dtype)
    for large in (np.nan, np.inf, -np.inf, 6e4):
        inputs = [spread(rng, shape).astype(dtype) for shape in shapes]
        for x in inputs:
            x.reshape(-1)[-1:] = large
        y = layer.forward(*map(ops.from_host, inputs))
        layer.backward(y)


def trained(ops, make, shape, frozen):
    """Gradients of the parameters and of the input, of a layer some of whose parameters are frozen."""
    graph = m.Graph()
    layer = make()
    layer.name = "layer"
    graph.output(layer(graph.input(shape[1:])))
    model = m.Model(graph, device=ops.name, seed=2, frozen=frozen, input_grad=True)
    rng = np.random.default_rng(3)
    y = model.forward(ops.from_host(spread(rng, shape)))
    dx = model.backward(ops.from_host(rng.standard_normal(y.shape).astype(np.float32)))
    gradients = layer.params.gradients()
    return {name: ops.to_host(array) for name, array in (gradients | {"dx": dx}).items()}


@pytest.mark.parametrize(
    "case", [c for c, (make, shapes) in SMOOTH.items() if len(make().specs) > 1 and not shapes[1:]]
)
def test_a_frozen_parameter_leaves_the_gradients_of_others_alone(case, ops):
    make, [shape] = SMOOTH[case]
    whole = trained(ops, make, shape, ())
    for one in [spec.name for spec in make().specs]:
        found = trained(ops, make, shape, [f"layer.{one}"])
        assert found.keys() == whole.keys() - {one}
        for name, array in found.items():
            np.testing.assert_array_equal(array, whole[name], err_msg=name)


def test_sixteen_bit_layers_stay_near_their_float32_selves(ops, rng):
    from minidl.precision import bfloat16, float16

    x = spread(rng, (2, 6, 5, 3))
    reference = m.Conv2d(3, 8, 3, padding=1)
    y = ops.to_host(reference.forward(ops.from_host(x)))
    for dtype, bound in ((bfloat16, 2.0**-7), (float16, 2.0**-10)):
        layer = m.Conv2d(3, 8, 3, padding=1)
        z = layer.forward(ops.from_host(x.astype(dtype)))
        assert z.dtype == dtype
        assert np.abs(ops.to_host(z).astype(np.float32) - y).max() <= 4 * bound * np.abs(y).max()
        dx = layer.backward(z)
        assert dx.dtype == dtype
        assert all(g.dtype == np.float32 for g in layer.params.gradients().values())


# -- a layer alone --------------------------------------------------------------------------------


def test_layers_alone_start_with_the_same_weights_every_time():
    a, b = m.Conv2d(3, 4, 3), m.Conv2d(3, 4, 3)
    np.testing.assert_array_equal(a.state_dict()["weight"], b.state_dict()["weight"])
    c = m.Conv2d(3, 4, 3)
    c.seed = 1
    assert not np.array_equal(a.state_dict()["weight"], c.state_dict()["weight"])


def test_dlpack_arrays_are_answered_in_kind(rng):
    class Borrowed:
        """Stands for another library's array: it speaks DLPack and is no NumPy array."""

        __module__ = __name__

        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __dlpack__(self, **kwargs):
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    import sys

    module = sys.modules[__name__.split(".")[0]]
    module.from_dlpack = lambda array: Borrowed(np.asarray(array))
    try:
        x = rng.standard_normal((2, 3, 4)).astype(np.float32)
        layer = m.ReLU()
        y = layer.forward(Borrowed(x))
        assert isinstance(y, Borrowed)
        np.testing.assert_array_equal(y.array, np.maximum(x, 0))
        dx = layer.backward(Borrowed(np.ones_like(x)))
        assert isinstance(dx, Borrowed)
        np.testing.assert_array_equal(dx.array, (x > 0).astype(np.float32))
    finally:
        del module.from_dlpack


def test_moving_a_layer_keeps_its_weights():
    layer = m.Conv2d(3, 4, 3)
    before = layer.state_dict()
    layer.to(precision="bf16")
    after = layer.state_dict()
    np.testing.assert_array_equal(before["weight"], after["weight"])
    assert layer.params["weight"].dtype == np.dtype("bfloat16")


def test_a_layer_alone_uses_the_communicator_it_is_given(cpu_ops, rng):
    class Doubling:
        rank, size = 0, 2

        def start_all_reduce(self, array, span=None, name=""):
            array *= 2
            self.sent = array.size
            return self

        def wait(self):
            self.waited = True

    layer = m.Linear(4, 3)
    x, dy = rng.standard_normal((2, 4)).astype(np.float32), rng.standard_normal((2, 3)).astype(np.float32)
    layer.forward(x)
    layer.backward(dy)
    alone = {name: g.copy() for name, g in layer.params.gradients().items()}
    layer = m.Linear(4, 3)
    layer.comm = Doubling()
    layer.forward(x)
    layer.backward(dy)
    assert layer.comm.waited and layer.comm.sent >= 15
    for name, gradient in layer.params.gradients().items():
        np.testing.assert_allclose(gradient, 2 * alone[name], rtol=1e-6)


# -- doors ------------------------------------------------------------------------------------------

f32 = np.float32
DOORS = {
    "channels": (lambda: m.Conv2d(3, 4, 3), np.zeros((2, 8, 8, 5), f32), ValueError, r"conv2d: x .*\(N, H, W, 3\)"),
    "nchw": (lambda: m.Conv2d(3, 4, 3), np.zeros((2, 3, 8, 8), f32), ValueError, r"permute\(0, 2, 3, 1\)"),
    "rank": (lambda: m.Conv2d(3, 4, 3), np.zeros((8, 8, 3), f32), ValueError, "NHWC"),
    "small image": (lambda: m.Conv2d(3, 4, 5), np.zeros((2, 4, 8, 3), f32), ValueError, "at least as large"),
    "double": (lambda: m.Conv2d(3, 4, 3), np.zeros((2, 8, 8, 3)), TypeError, "float32.*got float64.*astype"),
    "integers": (lambda: m.ReLU(), np.zeros((2, 3), np.int32), TypeError, "int32"),
    "list": (lambda: m.ReLU(), [1.0, 2.0], TypeError, "list"),
    "images to linear": (lambda: m.Linear(4, 3), np.zeros((2, 2, 2, 1), f32), ValueError, "Flatten"),
    "features": (lambda: m.Linear(4, 3), np.zeros((2, 5), f32), ValueError, r"\(N, 4\)"),
    "one value per channel": (lambda: m.BatchNorm2d(3), np.zeros((1, 1, 1, 3), f32), ValueError, "more than one"),
    "empty training batch": (lambda: m.BatchNorm2d(3), np.zeros((0, 4, 4, 3), f32), ValueError, "more than one"),
    "channels of a group norm": (lambda: m.GroupNorm(2, 4), np.zeros((1, 4, 4, 3), f32), ValueError, r"\(N, H, W, 4\)"),
    "channels of a layer norm": (lambda: m.LayerNorm(4), np.zeros((2, 3), f32), ValueError, r"\(N, \.\.\., 4\)"),
    "nothing left": (
        lambda: m.Upsample(scale_factor=0.2),
        np.zeros((1, 4, 4, 3), f32),
        ValueError,
        "at least as large",
    ),
    "softmax of numbers": (lambda: m.Softmax(), np.zeros(3, f32), ValueError, "at least one channel"),
    "cropped away": (lambda: m.Pad(-2), np.zeros((1, 4, 4, 3), f32), ValueError, "larger than the cropping"),
}


@pytest.mark.parametrize("case", DOORS)
def test_doors_say_what_is_wrong(case):
    make, x, error, text = DOORS[case]
    with pytest.raises(error, match=text):
        make().forward(x)


CONSTRUCTORS = {
    "negative channels": (lambda: m.Conv2d(-3, 4, 3), "in_channels"),
    "zero kernel": (lambda: m.Conv2d(3, 4, 0), "kernel_size"),
    "negative padding": (lambda: m.Conv2d(3, 4, 3, padding=-1), "padding"),
    "groups": (lambda: m.Conv2d(3, 4, 3, groups=2), "multiple of groups"),
    "float kernel": (lambda: m.Conv2d(3, 4, 2.5), "kernel_size"),
    "triple": (lambda: m.Conv2d(3, 4, (1, 2, 3)), "kernel_size"),
    "output padding": (lambda: m.ConvTranspose2d(3, 4, 2, 2, output_padding=2), "output_padding"),
    "dropout": (lambda: m.Dropout(1.0), "p must be"),
    "eps": (lambda: m.BatchNorm2d(3, eps=0), "eps"),
    "no momentum": (lambda: m.BatchNorm2d(3, momentum=None), "momentum must be a number in"),
    "depth": (lambda: m.StochasticDepth(1.0), "p must be"),
    "dropout of text": (lambda: m.Dropout("0.5"), "p must be a number in"),
    "half a pixel": (lambda: m.Pad(1.5), "padding must be an integer"),
    "padding with text": (lambda: m.Pad(1, "0"), "value must be a number"),
    "initializer of another shape": (
        lambda: m.Linear(2, 2, weight_init=lambda rng, shape: np.zeros(3)).to("cpu"),
        "weight: starting values must",
    ),
    "momentum": (lambda: m.BatchNorm2d(3, momentum=2), "momentum"),
    "pool padding": (lambda: m.MaxPool2d(2, padding=2), "half the kernel"),
    "slope": (lambda: m.LeakyReLU(-0.1), "negative_slope must be a number of at least 0"),
    "approximation": (lambda: m.GELU("erf"), "unknown approximation of GELU 'erf'; .*known: none, tanh"),
    "groups of channels": (lambda: m.GroupNorm(3, 4), r"num_channels must be a multiple of num_groups \(3\), got 4"),
    "no eps": (lambda: m.LayerNorm(4, eps=0), "eps must be a number above 0"),
    "size and factor": (lambda: m.Upsample(2, 2), "size must be given, or scale_factor"),
    "neither": (lambda: m.Upsample(), "size must be given, or scale_factor"),
    "mode": (lambda: m.Upsample(2, mode="cubic"), "unknown mode of Upsample 'cubic'"),
    "corners": (lambda: m.Upsample(2, align_corners=True), "align_corners must be False in mode 'nearest'"),
    "three factors": (lambda: m.Upsample(scale_factor=(1, 2, 3)), "scale_factor must be a number or a pair"),
    "negative factor": (lambda: m.Upsample(scale_factor=-1), "scale_factor must be a number above 0"),
    "pad": (lambda: m.Pad((1, 2)), "left, right, top, bottom"),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_constructors_refuse_what_cannot_be(case):
    make, text = CONSTRUCTORS[case]
    with pytest.raises(ValueError, match=text):
        make()


def test_joins_refuse_what_does_not_fit():
    a, b = np.zeros((2, 3, 3, 4), f32), np.zeros((2, 3, 3, 5), f32)
    with pytest.raises(ValueError, match="add: second input"):
        m.Add().forward(a, b)
    with pytest.raises(ValueError, match="number of inputs must be '2', got 1|number of inputs"):
        m.Add().forward(a)
    with pytest.raises(ValueError, match=r"mul: second input must have shape \(2, 3, 3, 4\) like .*or \(2, 1, 1, 4\)"):
        m.Mul().forward(a, b)
    with pytest.raises(ValueError, match="got .*; the gate comes second$"):
        m.Mul().forward(a[:, :1, :1], a)
    with pytest.raises(ValueError, match="every input"):
        m.Concat().forward(a, np.zeros((2, 3, 4, 4), f32))
    with pytest.raises(TypeError, match="one dtype"):
        m.Concat().forward(a, b.astype(np.float16))


def test_the_gradient_is_checked_at_the_door(rng):
    layer = m.Conv2d(3, 4, 3)
    with pytest.raises(RuntimeError, match="forward"):
        layer.backward(np.zeros((1, 2, 2, 4), f32))
    layer.forward(np.zeros((1, 4, 4, 3), f32))
    with pytest.raises(ValueError, match=r"dy must have shape \(1, 2, 2, 4\)"):
        layer.backward(np.zeros((1, 2, 2, 5), f32))
    with pytest.raises(TypeError, match="dy must be float32"):
        layer.backward(np.zeros((1, 2, 2, 4)))


def test_weights_refuse_another_dtype_and_name_the_remedy():
    layer = m.Conv2d(3, 4, 3)
    layer.forward(np.zeros((1, 4, 4, 3), f32))
    with pytest.raises(TypeError, match=r"float16.*\.to\(precision='float16'\)"):
        layer.forward(np.zeros((1, 4, 4, 3), np.float16))
    with pytest.raises(ValueError, match="got 'tf32x3'"):
        layer.to("cpu", "tf32x3")
    layer.forward(np.zeros((1, 4, 4, 3), f32))  # what is refused changes nothing


def test_grad_false_saves_nothing():
    layer = m.Conv2d(3, 4, 3)
    layer.forward(np.zeros((1, 4, 4, 3), f32), grad=False)
    assert layer.store.saved_bytes == 0
    with pytest.raises(RuntimeError):
        layer.backward(np.zeros((1, 2, 2, 4), f32))


def test_stochastic_depth_keeps_or_drops_whole_samples(ops, dtype):
    layer, ones = m.StochasticDepth(0.25), ops.from_host(np.ones((64, 3, 2, 5), dtype))
    y, dx = (ops.to_host(a).astype(f32) for a in (layer.forward(ones), layer.backward(ones)))
    kept = y[:, 0, 0, 0] > 0
    assert 0 < kept.sum() < 64
    np.testing.assert_array_equal(y, np.where(kept[:, None, None, None], f32(dtype.type(f32(4 / 3))), f32(0)) + 0 * y)
    np.testing.assert_array_equal(dx, y)
    assert layer.training and (ops.to_host(layer.forward(ones)).astype(f32)[:, 0, 0, 0] > 0).tolist() != kept.tolist()
    layer.training = False
    assert layer.forward(ones) is ones


# -- wrong use -------------------------------------------------------------------------------------------------------


def test_backward_checks_against_the_forward_pass_it_goes_back_through(ops, rng):
    layer = m.Conv2d(3, 4, 3, padding=1).to(ops.name)
    x, small = (ops.from_host(spread(rng, (n, 8, 8, 3))) for n in (4, 2))
    y = layer(x)
    expected = ops.to_host(layer.backward(y))
    layer(x)
    other = layer.forward(small, grad=False)  # inference in between changes nothing
    with pytest.raises(ValueError, match=r"dy must have shape \(4, 8, 8, 4\), got \(2, 8, 8, 4\)"):
        layer.backward(other)
    np.testing.assert_array_equal(ops.to_host(layer.backward(y)), expected)


@pytest.mark.parametrize("make", [lambda: m.Conv2d(3, 3, 1), lambda: m.ReLU(), lambda: m.Pad(0)])
def test_the_gradient_to_add_is_checked_at_the_door(make, ops):
    layer = make().to(ops.name)
    y = layer(ops.zeros((2, 4, 4, 3), np.dtype(np.float32)))
    with pytest.raises(ValueError, match=r"add must have shape \(2, 4, 4, 3\), got \(2, 2, 2, 3\)"):
        layer.backward(y, add=ops.zeros((2, 2, 2, 3), np.dtype(np.float32)))
    with pytest.raises(TypeError, match="add must be float32, got float16"):
        layer.backward(y, add=ops.zeros((2, 4, 4, 3), np.dtype(np.float16)))
    with pytest.raises(TypeError, match="add must be a NumPy"):
        layer.backward(y, add=[1.0])
    layer.backward(y, add=y)


def test_a_join_takes_no_gradient_to_add(cpu_ops):
    layer, x = m.Add(), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="several inputs"):
        layer.backward(layer(x, x), add=x)


def test_forward_passes_that_nobody_goes_back_through_are_forgotten(cpu_ops, rng):
    layer = m.Linear(7, 5)
    for _ in range(3):
        layer(spread(rng, (3, 7)))
    assert layer.store.saved_bytes == 3 * 7 * 4
    layer.backward(np.zeros((3, 5), np.float32))
    with pytest.raises(RuntimeError, match="without a forward pass"):
        layer.backward(np.zeros((3, 5), np.float32))


def test_a_gradient_without_a_pass_to_go_back_through_is_not_refused_for_its_shape(cpu_ops):
    graph = m.Graph()
    model = m.Model(graph.output(m.Linear(7, 5, name="fc")(graph.input((7,)))))
    optimizer, x = m.SGD(model, 0.1), np.zeros((4, 7), np.float32)
    for before in (lambda y: (model.backward(y), optimizer.step()), lambda y: None):
        before(model(x))
        dy = model(x[:2], grad=False)
        with pytest.raises(RuntimeError, match="fc: backward without a forward pass to go back through"):
            model.backward(dy)


def test_layers_are_called_with_the_options_of_forward(cpu_ops):
    layer, x = m.Linear(7, 5), np.ones((3, 7), np.float32)
    np.testing.assert_array_equal(layer(x, grad=False), layer(x))
    layer(x, grad=False)
    assert layer.store.saved_bytes == x.nbytes, "of the call before"
    with pytest.raises(TypeError, match="argument 'grad'"):
        layer(m.Graph().input((7,)), grad=False)


def test_a_failed_backward_pass_leaves_the_layer_usable(cpu_ops, rng, monkeypatch):
    layer, x = m.Linear(7, 5), spread(rng, (3, 7))
    y = layer(x)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(m.Linear, "backward_data", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        layer.backward(y)
    layer.backward(layer(x))


def test_an_input_that_is_refused_leaves_no_trace(cpu_ops):
    layer = m.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match="NCHW"):
        layer(np.zeros((1, 3, 8, 8), np.float16))
    assert layer(np.zeros((1, 8, 8, 3), np.float32)).dtype == np.float32


def test_inputs_that_are_none_scalar_or_masked(cpu_ops):
    with pytest.raises(ValueError, match="number of inputs must be at least 1, got 0"):
        m.Concat()()
    with pytest.raises(ValueError, match="dropout: x must have shape"):
        m.Dropout()(np.zeros((), np.float32))
    with pytest.raises(ValueError, match="concat: every input must have shape"):
        m.Concat()(np.zeros((), np.float32), np.zeros((), np.float32))
    with pytest.raises(TypeError, match=r"masked array; fill it"):
        m.ReLU()(np.ma.masked_array(np.zeros(3, np.float32), mask=[0, 1, 0]))
    with pytest.raises(ValueError, match="Conv2d: name must be a string"):
        m.Conv2d(3, 4, 3, name=5)
