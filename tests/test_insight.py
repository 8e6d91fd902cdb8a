"""What a user asks of a network or of a layer of their own: a summary, the laws, two backends side by side."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import cli, models
from minidl.bench.compare_backends import TOLERANCES, compare
from minidl.precision import PRECISIONS

f32 = np.float32


# -- summary ----------------------------------------------------------------------------------------------------------


def test_a_summary_tells_shapes_parameters_work_and_saved_bytes(ops):
    graph = m.Graph()
    x = m.Conv2d(3, 4, 3, padding=1, name="conv")(graph.input((8, 8, 3)))
    x = m.Flatten()(m.AdaptiveAvgPool2d(2, name="pool")(m.ReLU()(x)))
    model = m.Model(graph.output(m.Linear(16, 5, name="fc")(x)), device=ops.name, frozen=["conv.bias"])
    summary = model.summary(batch=2)
    by = {layer.name: layer for layer in summary.layers}
    assert by["conv"].output_shape == (2, 8, 8, 4) and by["conv"].parameters == 3 * 9 * 4 + 4
    assert by["conv"].trained == 3 * 9 * 4 and by["fc"].parameters == 85
    assert by["conv"].flop == m.Conv2d(3, 4, 3, padding=1).cost((2, 8, 8, 3)).forward.flop
    # The image, the ReLU's output, the vector before the Linear; a pool keeps only its shape.
    assert [by[name].saved_bytes for name in ("conv", "relu", "pool", "fc")] == [4 * 384, 4 * 512, 0, 4 * 32]
    assert summary.saved_bytes == sum(layer.saved_bytes for layer in summary.layers)
    assert summary.parameters == model.num_parameters == summary.trained + 4
    text = str(summary)
    assert text.splitlines()[2].split()[:2] == ["conv", "Conv2d"] and "2 x 8 x 8 x 4" in text
    assert "197 parameters, 4 of them frozen" in text


def test_a_summary_leaves_the_model_as_it_was(ops, rng):
    """Also between a forward pass and its backward pass."""
    model = m.Model(models.resnet20(10, (16, 16, 3)), device=ops.name)
    x = ops.from_host(rng.standard_normal((4, 16, 16, 3)).astype(f32))
    y = model.forward(x)
    model.backward(y)
    expected = ops.to_host(model.arena.grad)
    again = m.Model(models.resnet20(10, (16, 16, 3)), device=ops.name)
    y = again.forward(x)
    before = again.state_dict()
    assert again.summary(3).batch == 3 and again.training
    again.backward(y)
    np.testing.assert_array_equal(ops.to_host(again.arena.grad), expected)
    for name, values in again.state_dict().items():
        np.testing.assert_array_equal(values, before[name])
    with pytest.raises(ValueError, match="batch must be an integer of at least 1"):
        again.summary(0)


# -- laws of one's own layers -----------------------------------------------------------------------------------------


class Square(m.Layer):
    """A layer as its author might write it, with faults to choose from."""

    accepts_add = False

    def __init__(self, fault: str = ""):
        super().__init__()
        self.fault, self.calls = fault, 0

    def output_shape(self, shape):
        return shape if self.fault != "shape" else (*shape, 1)

    def compute(self, x):
        self.calls += 1
        if self.fault == "writes":
            x += 1
        if self.fault == "keeps":
            self.store.save("elsewhere", {"x": x})
        self.save(x=x)
        return x * x + (1e-3 * self.calls if self.fault == "forgets" else 0)

    def backward_data(self, dy, add=None):
        x = self.saved().x
        if self.fault == "spoils":
            dy *= 2
        dx = dy * x * (2.0 if self.fault != "slope" else 1.9)
        return dx.astype(np.float32) if self.fault != "one element" else self._but_one(dx)

    @staticmethod
    def _but_one(dx):
        if dx.size:
            dx.reshape(-1)[3] = 0
        return dx


def test_a_sound_layer_obeys_the_laws():
    m.check_layer(Square(), (3, 4, 5))


def test_a_layer_may_save_nothing():
    class Twice(m.Layer):
        def output_shape(self, shape):
            return shape

        def compute(self, x):
            return 2 * x

        def backward_data(self, dy, add=None):
            return 2 * dy

    m.check_layer(Twice(), (3, 4, 5))
    with pytest.raises(RuntimeError, match="backward without a forward pass"):
        Twice().backward(np.ones((3, 4, 5), f32))
    with pytest.raises(ValueError, match="shapes must be one shape for each input"):
        m.check_layer(Twice())


FAULTS = {
    "slope": "input 0: gradient says",
    "one element": "input 0: gradient says",
    "writes": "input 0 was written to",
    "spoils": "gradient of the output was written to",
    "keeps": r"forward\(grad=False\) saved something",
    "forgets": "forward repeated gives other bits",
}


class Weighted(m.Layer):
    """A factor for each channel; its author may forget what is added."""

    def __init__(self, *faults: str):
        super().__init__()
        self.faults, self.accepts_add = faults, "add" in faults
        self.declare("w", (3,), lambda rng, shape: np.ones(shape, np.float32), product=False)
        if "twice" in faults:
            self.declare("w", (3,), lambda rng, shape: np.ones(shape, np.float32), product=False)

    def output_shape(self, shape):
        return shape

    def compute(self, x):
        self.save(x=x)
        return None if "nothing" in self.faults else x * self.params["w"]

    def backward_weight(self, dy):
        grad = self.grad("w")
        total = (dy * (self.saved().y if "unsaved" in self.faults else self.saved().x)).sum((0, 1, 2))
        grad.view[...] = total if grad.first or "first" in self.faults else grad.view + total

    def backward_data(self, dy, add=None):
        if "no gradient" in self.faults:
            return None
        return dy * (self.params["w"].astype(np.float64) if "wide" in self.faults else self.params["w"])


OWN_FAULTS = {
    "first": (AssertionError, r"w: the gradient of a second micro-batch is not added; see `first` of grad\('w'\)"),
    "add": (AssertionError, r"backward\(dy, add\) is not the gradient plus add"),
    "nothing": (ValueError, "weighted: compute gives NoneType None, output_shape says"),
    "no gradient": (AssertionError, "the gradient of input 0 is NoneType None, expected float32 of shape"),
    "wide": (AssertionError, "the gradient of input 0 is float64 array of shape"),
    "unsaved": (AttributeError, "nothing was saved as 'y'; saved: x"),
    "twice": (ValueError, "parameter 'w' is declared twice; give it another name"),
}


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_what_an_author_forgets_is_told(fault):
    m.check_layer(Weighted(), (2, 4, 4, 3))
    error, words = OWN_FAULTS[fault]
    with pytest.raises(error, match=words):
        m.check_layer(Weighted(fault), (2, 4, 4, 3))


def test_a_layer_written_as_elsewhere_is_told_how_it_is_written_here():
    class Unmade(m.Layer):
        def __init__(self):
            self.size = 3

    with pytest.raises(AttributeError, match=r"Unmade has no bound yet; call super\(\).__init__\(name\)"):
        m.check_layer(Unmade(), (2, 3))

    class Other(m.Layer):
        def forward(self, x):
            return x

    with pytest.raises(TypeError, match=r"Other: forward must be that of Layer.*; define compute\(x\) in its place"):
        Other()

    class Around(m.ReLU):
        def forward(self, *x, grad=True):
            return super().forward(*x, grad=grad)

    m.check_layer(Around(), (2, 3))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        m.check_layer(Square(fault), (3, 4, 5))


def test_an_output_of_another_shape_than_told_is_refused_as_often_as_it_comes():
    graph = m.Graph()
    model = m.Model(graph.output(Square("shape")(graph.input((4, 5, 6)))))
    x, told = np.ones((3, 4, 5, 6), f32), r"square: compute gives float32 array .*, output_shape says \(3, 4, 5, 6, 1\)"
    for call in (model, model, lambda x: model(x, grad=False), lambda x: m.check_layer(Square("shape"), x.shape)):
        with pytest.raises(ValueError, match=told):
            call(x)


def test_a_wrong_parameter_gradient_is_found():
    class Skewed(m.Linear):
        def backward_weight(self, dy):
            super().backward_weight(dy)
            self.params.gradients()["bias"][...] *= 1.1

    with pytest.raises(AssertionError, match="bias: gradient says"):
        m.check_layer(Skewed(4, 3), (5, 4))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: m.Conv2d(64, 64, 3, padding=1), (8, 28, 28, 64)), (m.Softmax, (8, 100)), (m.SiLU, (4, 30, 30, 64))],
    ids=["conv", "softmax", "silu"],
)
def test_wrong_gradients_are_found_in_large_and_in_small_slopes(make, shape):
    """What is let pass is what rounding of the outputs explains, and no more."""
    layer = make()
    right = layer.backward_data
    m.check_layer(layer, shape)
    layer.backward_data = lambda dy, add=None: right(dy) * np.float32(0.75)
    with pytest.raises(AssertionError, match="input 0: gradient says"):
        m.check_layer(layer, shape)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(TypeError, match="layer must be a Layer"):
        m.check_layer(np.tanh, (2, 3))
    model = m.Model(models.mlp(3, (4, 4, 1), (5,)))
    with pytest.raises(RuntimeError, match="check_layer on a layer of a model"):
        m.check_layer(model.layers[1], (2, 16))
    with pytest.raises(ValueError, match=r"x must have shape \(N, 4\)"):
        m.check_layer(m.Linear(4, 3), (2, 5))
    with pytest.raises(ValueError, match="shapes must be a tuple for each input, batch first, got 2"):
        m.check_layer(m.Linear(4, 3), 2, 4)


# -- two backends -----------------------------------------------------------------------------------------------------


def pair(**right):
    build = lambda: models.resnet20(10, (16, 16, 3))  # noqa: E731
    return m.Model(build()), m.Model(build(), seed=1, **right)


def test_equal_backends_do_not_differ(cpu_ops):
    found = compare(*pair(), batch=2)
    assert len(found) > 200 and all(d.relative == 0 for d in found)


@pytest.mark.parametrize("name", ["densenet121", "unet"])
def test_layers_that_leave_work_to_the_next_are_compared_by_what_that_makes(name, cpu_ops):
    """Concatenations with room for more, poolings that leave the mask of a ReLU."""
    options = {"width": 4, "depth": 2} if name == "unet" else {}
    both = [m.Model(models.build(name, (32, 32, 3), 2, **options)) for _ in range(2)]
    assert all(d.relative == 0 for d in compare(*both, batch=2))


def test_the_layer_that_differs_is_named_and_no_other(cpu_ops, monkeypatch):
    left, right = pair()
    broken = right.graph["layer2.1.conv1"].layer
    forward, backward = broken.compute, broken.backward_data
    monkeypatch.setattr(broken, "compute", lambda x: forward(x) * f32(1.01))
    monkeypatch.setattr(broken, "backward_data", lambda dy, add=None: backward(dy) * f32(1.02))
    wrong = [(d.layer, d.what, round(d.relative, 4)) for d in compare(left, right, batch=2) if d.relative]
    assert wrong == [("layer2.1.conv1", "output", 0.01), ("layer2.1.conv1", "input gradient", 0.02)]


def test_precisions_differ_by_their_rounding(cpu_ops):
    found = compare(*pair(precision="bf16"), batch=2)
    assert 1e-4 < max(d.relative for d in found) < 2e-2


def test_cpu_and_gpu_agree(cuda_ops):
    for mode, bound in (("fp32", 1e-4), ("bf16", 2e-2)):
        found = compare(*pair(device="cuda", precision=mode), batch=4)
        first = next((d for d in found if not d.relative <= bound), None)
        assert first is None, first


def test_every_precision_has_a_tolerance():
    assert set(TOLERANCES) == set(PRECISIONS)


def test_the_command_names_what_differs(capsys):
    common = ["compare-backends", "--model", "lenet", "--batch", "2", "--right", "cpu:bf16"]
    assert cli.main(common) == 0
    assert "all within 0.02" in capsys.readouterr().out
    assert cli.main([*common, "--tolerance", "1e-7"]) == 1
    assert "first beyond 1e-07: output of conv1" in capsys.readouterr().out
    assert cli.main([*common, "--tolerance", "0"]) == 1, "0 asks for the same bits"
    assert cli.main([*common[:-1], "cpu:fp32", "--tolerance", "0"]) == 0
    assert "all within 0\n" in capsys.readouterr().out
    for value in ("-1", "nan"):
        with pytest.raises(SystemExit):
            cli.main([*common, "--tolerance", value])
        assert "--tolerance must be a number of at least 0, got" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["compare-backends", "--right", "tpu:fp32"])
    assert "--right must be DEVICE:PRECISION" in capsys.readouterr().err
