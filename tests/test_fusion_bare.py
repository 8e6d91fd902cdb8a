"""ReLUs without a batch norm: the convolution below does their work, gradients are masked where they are made.

And summed there for biases, which are the one thing that differs from separate passes, by rounding.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import minidl as m
from minidl import fusion, models
from minidl.bench.step import TrainingStep
from minidl.compile import CompiledStep
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.fusion import cost
from minidl.fusion.plans import candidates, fingerprint
from minidl.memory.record import blank
from minidl.precision import precision as parse
from minidl.step import EagerStep
from tests.test_compile import assert_same as assert_same_state
from tests.test_compile import batches, take
from tests.test_fusion import close, fused, preactivation, residual, run
from tests.test_fusion_tune import BF16, FP32, H200, assert_same_in_every_way
from tests.tolerance import assert_same_arrays

SUMMED = 2.0**-13  # of the largest sum: 640 numbers of n 2^-24, three times as large together as they add up to


def bare(width=12, first=3, window=(3, 2, 1)):
    """ReLUs over convolutions: two in a row, one that a pooling reads, one that two convolutions read, and the last."""
    graph = m.Graph()

    def rectified(x, name, kernel=3, **options):
        x = m.Conv2d(x.shape[-1], width, kernel, padding=kernel // 2, name=f"{name}.conv", **options)(x)
        return m.ReLU(name=f"{name}.relu")(x)

    x = rectified(rectified(graph.input((8, 8, first)), "a"), "b")
    x = rectified(m.MaxPool2d(*window, name="pool")(x), "c")
    x = m.Add(name="add")(rectified(x, "d"), rectified(x, "e", 1, bias=False))
    x = rectified(m.MaxPool2d(2, name="pool2")(m.ReLU(name="over a sum")(x)), "f")
    return graph.output(m.Linear(4 * width, 5, name="fc")(m.Flatten()(x)))


def wide():
    """The same with channels in multiples of eight, which Hopper's kernels take."""
    return bare(24)


def pooled():
    """A network's first batch norm, whose ReLU a pooling reads."""
    graph = m.Graph()
    x = m.Conv2d(3, 8, 3, padding=1, bias=False, name="stem")(graph.input((8, 8, 3)))
    x = m.MaxPool2d(3, 2, 1, name="pool")(m.ReLU(name="relu")(m.BatchNorm2d(8, name="bn")(x)))
    return graph.output(m.Linear(128, 5, name="fc")(m.Flatten()(x)))


def apart():
    """The same with windows side by side, whose pixels' sums are those of the windows."""
    return bare(24, window=(2,))


def joined(width=16):
    """Biases of convolutions whose output is read as it is: by a convolution, by one over a concatenation of them."""
    graph = m.Graph()
    x = m.Conv2d(3, width, 3, padding=1, name="first")(graph.input((8, 8, 3)))
    x = m.ReLU(name="relu")(m.BatchNorm2d(width, name="bn")(m.Conv2d(width, width, 3, padding=1, name="second")(x)))
    y = m.ConvTranspose2d(width, 8, 2, stride=2, name="up")(m.MaxPool2d(2, name="pool")(x))
    x = m.Concat(name="concat")(x, y, m.Conv2d(width, 24, 1, name="third")(x))
    x = m.Conv2d(width + 32, 8, 3, padding=1, name="last")(x)
    return graph.output(m.Linear(512, 5, name="fc")(m.Flatten()(x)))


def assert_same(a, b, bound):
    """The same bits, but for biases, whose gradients kernels sum in another order on the way."""
    biases = {name for name in a if name.endswith(".bias")}
    close({name: a[name] for name in biases}, {name: b[name] for name in biases}, bound)
    assert_same_arrays(*({name: value for name, value in found.items() if name not in biases} for found in (a, b)))


@pytest.mark.parametrize("frozen", [(), ("a.*", "b.*", "c.*"), ("*.weight",)], ids=["all", "top", "biases"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("build", [bare, wide, apart])
def test_every_plan_gives_the_same_bits(ops, build, precision, frozen):
    plain, *others = (
        run(fused(build, how, ops, precision=precision, frozen=frozen)) for how in (*fusion.PLANS, "auto")
    )
    for other in others:
        assert_same(plain, other, SUMMED if ops.name == "cuda" and precision != "fp32" else 0.0)


@pytest.mark.parametrize("build", [bare, wide])
def test_every_way_of_every_one_gives_the_same_bits(ops, build):
    """Every eleventh combination of all that there are."""
    sites = fusion.find_sites(build())
    plain = run(fused(build, "none", ops, precision="bf16"), steps=1)
    ways = [candidates(site) for site in sites]
    for chosen in itertools.islice(itertools.product(*ways), 0, None, 41):
        plan = fusion.Plan(dict(zip((s.name for s in sites), chosen, strict=True)), fingerprint(sites))
        found = run(fused(build, plan, ops, precision="bf16"), steps=1)
        assert_same(plain, found, SUMMED if ops.name == "cuda" else 0.0)


@pytest.mark.parametrize("how", ["none", "gradients"])
def test_what_is_not_finite_goes_where_it_goes_unfused(ops, how, rng):
    def gradients(how):
        model = fused(wide, how, ops, precision="bf16", input_grad=True)
        x = rng.standard_normal((4, 8, 8, 3)).astype(model.precision.storage)
        x[0, 2, 3], x[1, 5, 5] = np.nan, np.inf
        y = model.forward(ops.from_host(x))
        dx = model.backward(ops.from_host(np.ones(y.shape, x.dtype)))
        return {name: ops.to_host(a).astype(np.float32) for name, a in (("y", y), ("dx", dx))}

    rng = np.random.default_rng(3)
    found = gradients(how)
    rng = np.random.default_rng(3)
    assert_same_arrays(gradients("none"), found)
    assert np.isnan(found["y"]).any() and np.isfinite(found["dx"][2]).all()


def test_sites_of_bare_relus():
    graph = bare()
    sites = {site.name: site for site in fusion.find_sites(graph)}
    assert list(sites) == ["a.relu", "b.relu", "c.relu", "d.relu", "e.relu", "f.relu"]
    assert all(site.kind == "bare" and site.producer == name.replace("relu", "conv") for name, site in sites.items())
    takers = [site.taker for site in sites.values()]
    assert takers == ["b.conv", "pool", "d.conv", None, None, None]
    assert candidates(sites["b.relu"]) == ["none", "rectified", "gradients", "rectified+gradients"]
    assert candidates(sites["d.relu"]) == ["none", "rectified"]
    plan = cost.heuristic(graph, list(sites.values()), FP32, H200)
    assert plan.sites["b.relu"] == "gradients" and plan.sites["d.relu"] == "none", "12 channels suit no kernel"
    graph = wide()
    plan = cost.heuristic(graph, fusion.find_sites(graph), BF16, H200)
    assert set(plan.sites.values()) == {"rectified+gradients", "rectified"}


def test_passes_over_bare_relus_are_counted():
    (site, *_) = fusion.find_sites(wide())
    passes = {way: fusion.site_cost(site, way, 1, 1)[:2] for way in candidates(site)}
    assert passes == {"none": (2, 3), "rectified": (0, 3), "gradients": (2, 1), "rectified+gradients": (0, 1)}


def test_no_pass_of_a_bare_relu_is_left(cpu_ops, monkeypatch):
    """But over the sum."""
    calls = {"relu": [], "relu_backward": []}
    for name, sizes in calls.items():
        own = getattr(cpu_ops, name)
        counted = lambda *a, own=own, sizes=sizes, **o: sizes.append(a[0].shape[1]) or own(*a, **o)  # noqa: E731
        monkeypatch.setattr(cpu_ops, name, counted)
    run(fused(bare, "gradients", cpu_ops), steps=1)
    assert calls == {"relu": [4], "relu_backward": [2, 4, 4, 4]}  # f; the sum; d and e


def test_an_output_under_a_pooling_is_kept_for_its_mask_alone(cpu_ops):
    """All others are kept by the layers above them too; where the pooling masks, by nobody."""
    kept = {}
    for how in fusion.PLANS:
        model = fused(bare, how, cpu_ops)
        model.forward(np.zeros((3, 8, 8, 3), np.float32))
        kept[how] = model.store.saved_bytes
    assert kept["none"] == kept["elementwise"] == kept["statistics"]
    assert kept["gradients"] == kept["bnff"] == kept["none"] - 3 * 8 * 8 * 12 * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_for_biases_change_nothing_else(ops, precision):
    """Below convolutions and concatenations, where they are taken in every plan."""
    models = [fused(joined, "gradients", ops, precision=precision) for _ in range(2)]
    for layer in models[0].layers:
        layer.sums = False
    plain, found = map(run, models)
    assert_same(plain, found, SUMMED if ops.name == "cuda" and precision == "bf16" else 0.0)


def test_nobody_adds_up_what_no_bias_is_to_have():
    def adding(frozen):
        return {layer.name for layer in m.Model(joined(), frozen=frozen).layers if getattr(layer, "sums", False)}

    assert adding(()) == adding(("up.bias",)) == {"second", "last"}
    assert adding(("first.bias",)) == {"last"} and adding(("up.bias", "third.bias")) == {"second"}


@pytest.mark.parametrize(("build", "gradients", "whole"), [(bare, 3, "bdf"), (apart, 3, "df"), (joined, 2, "ls")])
def test_biases_take_the_sums_that_a_gradient_came_with(cpu_ops, monkeypatch, build, gradients, whole):
    """Two parts of them, as kernels leave some; the rows of whole gradients are read where there are none."""
    summed, read, own, add_up = [], [], cpu_ops.conv2d_backward_data_summed, cpu_ops.channel_sum

    def in_two(*operands, **options):
        dx, _ = own(*operands, **options)
        summed.append(dx)
        return dx, np.stack([part.reshape(-1, dx.shape[3]).sum(0) for part in (dx[:2], dx[2:])])

    plain = run(fused(build, "none", cpu_ops), steps=1)
    monkeypatch.setattr(cpu_ops, "conv2d_backward_data_summed", in_two)
    monkeypatch.setattr(cpu_ops, "channel_sum", lambda dy, **o: read.append(len(dy.reshape(-1, 1))) or add_up(dy, **o))
    assert_same(plain, run(fused(build, "gradients", cpu_ops), steps=1), SUMMED)
    assert len(summed) == gradients and sum(values > 2 * 24 for values in read) == len(whole)


def test_no_bias_of_vgg_reads_a_gradient_of_images(monkeypatch):
    """On an H200, but the last convolution's: that gradient comes from a pooling that no convolution reads."""
    from minidl import cuda as ops

    read, own = [], ops.channel_sum
    monkeypatch.setattr(ops, "channel_sum", lambda dy, **o: read.append(dy.size // dy.shape[-1]) or own(dy, **o))
    with dry_run(BUILT_IN["H200"]):
        step = TrainingStep(blank(models.build("vgg16", (224, 224, 3), 1000)), batch=2, device="cuda", precision="bf16")
        fusion.fuse(step.model, "auto")
        step()
    of_images = [2 * 14 * 14] + [2 * side * side for side in (14, 14, 28, 28, 28, 56, 56, 56, 112, 112, 224, 224)]
    assert len(read) == 3 + len(of_images) and read[3] == of_images[0]
    assert all(48 * rows < pixels for rows, pixels in zip(read[4:], of_images[1:], strict=True))


def test_inference_is_the_same(ops, rng):
    x = rng.standard_normal((3, 8, 8, 3)).astype(np.float32)
    found = []
    for how in ("none", "gradients"):
        model = fused(bare, how, ops)
        model.eval()
        found.append(ops.to_host(model.forward(ops.from_host(x))))
        assert not model.store.saved_bytes
    np.testing.assert_array_equal(*found)


def test_a_folded_convolution_does_the_work_of_the_relu_above(cpu_ops, rng, monkeypatch):
    """But not over a sum, nor where the batch norm is the output or has other readers."""
    calls, own = [], cpu_ops.relu
    monkeypatch.setattr(cpu_ops, "relu", lambda x: calls.append(x.shape) or own(x))
    for build, left in ((pooled, 0), (residual, 2), (preactivation, 3)):
        model = m.Model(build()).eval()
        x = rng.standard_normal((2, *model.graph.nodes[0].shape)).astype(np.float32)
        before = model.forward(x)
        calls.clear()
        fusion.fold(model)
        np.testing.assert_allclose(model.forward(x), before, rtol=1e-4, atol=1e-5)
        assert len(calls) == left
        assert not any(layer.folded for layer in model.train().layers)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["none", "elementwise", "bnff"])
def test_folding_has_the_bits_of_a_relu_apart(ops, how, precision, rng):
    """Of networks whose ReLUs keep a ReLU's class to themselves."""

    class Apart(m.ReLU):
        pass

    x, found = rng.standard_normal((4, 8, 8, 3)), []
    for relu in (m.ReLU, Apart):
        graph = m.Graph()
        y = graph.input((8, 8, 3))
        for i in range(3):
            y = m.Conv2d(y.shape[-1], 16, 3, padding=1, bias=False, name=f"c{i}")(y)
            y = relu(name=f"r{i}")(m.BatchNorm2d(16, name=f"b{i}")(y))
        model = m.Model(graph.output(y), device=ops.name, precision=precision)
        fusion.fuse(model, how)
        fusion.fold(model.eval())
        found.append(ops.to_host(model.forward(ops.from_host(x.astype(model.precision.storage)))))
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("build", [wide, pooled])
def test_pieces_compute_the_same_in_every_way(ops, build):
    assert_same_in_every_way(ops, build())


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_compiled_steps_of_vgg_have_the_bits_of_eager_ones(precision, cuda_ops):
    """And those of unfused ones, before biases have met sums of another order: one step."""
    steps = []
    for kind, how in ((EagerStep, "auto"), (CompiledStep, "auto"), (CompiledStep, "gradients"), (EagerStep, "none")):
        graph = models.build("vgg16", (32, 32, 3), 4)
        for layer in graph.layers:
            if isinstance(layer, m.Dropout):
                layer.p = 0.0
        model = m.Model(graph, device=cuda_ops.name, precision=precision, seed=1)
        fusion.fuse(model, how)
        steps.append(kind(model, m.SGD(model, 0.01, 0.9), m.SoftmaxCrossEntropy()))
    assert steps[1].model.modes() != steps[3].model.modes() or precision == "tf32"
    for number, batch in enumerate(zip(*(batches(step, 5) for step in steps), strict=True)):
        losses = [take(step, x, labels, number) for step, (x, labels) in zip(steps, batch, strict=True)]
        assert losses[0] == losses[1] == losses[2]
        assert losses[3] == losses[0] or number and np.isclose(losses[3], losses[0], rtol=2.0**-6).all()
    assert_same_state(steps[0], steps[1])
    assert_same_state(steps[0], steps[2])
    assert parse(precision) == steps[0].model.precision
