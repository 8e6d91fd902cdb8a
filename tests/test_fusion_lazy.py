"""The mode ``lazy``, of batch norms that leave their last backward pass to the convolution below: where it may be."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import fusion, models
from minidl.backend import open_device
from minidl.fusion.plans import candidates, modes_of, way_of
from tests.test_fusion import close, fused, run


def test_a_batch_norm_may_be_lazy_over_a_1x1_convolution_alone():
    """Without stride, bias, groups, and where no mask is owed. Whether it adds to others' gradients is told."""

    def site(above=lambda x: m.ReLU()(x), before=lambda x: None, after=lambda x: None, **options):
        graph = m.Graph()
        x = m.Conv2d(3, 8, 1, name="first")(graph.input((6, 6, 3)))
        others = [before(x)]
        options = {"kernel_size": 1, "bias": False} | options
        y = above(m.BatchNorm2d(16, name="bn")(m.Conv2d(8, 16, **options, name="below")(x)))
        y = m.Conv2d(16, 4, 3, padding=1, name="above")(y)
        others.append(after(x))
        graph.output(m.Concat()(y, *filter(None, others)) if any(others) else y)
        return {found.name: found for found in fusion.find_sites(graph)}["bn"]

    assert site().lazy == "bn" and "lazy" in modes_of(fusion.choose([site()], "bnff").sites["bn"])
    assert site(above=lambda x: x).lazy == "bn", "nothing is owed"
    assert site(above=lambda x: m.Add()(x, x)).lazy == "bn"
    assert site(before=lambda x: m.ReLU()(x)).lazy == "bn" and not site(before=lambda x: m.ReLU()(x)).adds
    assert site(after=lambda x: m.ReLU()(x)).lazy == "bn" and site(after=lambda x: m.ReLU()(x)).adds
    for other in (
        {"kernel_size": 3, "padding": 1}, {"stride": 2}, {"bias": True}, {"groups": 2}, {"padding": 1},
        {"above": lambda x: m.SiLU()(x)}, {"above": lambda x: m.Sigmoid()(m.ReLU()(x))},
    ):  # fmt: skip
        assert site(**other).lazy is None, other
        assert "lazy" not in {mode for way in candidates(site(**other)) for mode in modes_of(way)}


def test_of_two_lazy_batch_norms_under_a_sum_the_second_takes_its_own_sums():
    """So there it spares two passes, everywhere else three; of what is pooled one, as its gradient is written once."""
    for site in fusion.find_sites(models.build("resnet50", (64, 64, 3), 10)):
        if site.lazy:
            way = fusion.choose([site], "gradients").sites[site.name]
            lazy = way_of({*modes_of(way), "lazy"})
            spared = fusion.site_cost(site, way, 1, 2).backward - fusion.site_cost(site, lazy, 1, 2).backward
            second = site.partner and site.first_back and site.kind == "join"
            assert spared == (1 if site.pooled else 2 if second else 3), site


def bottlenecks():
    """Three residual blocks: their inputs are read by a projection, by a sum, and by a projection with a stride."""
    graph = m.Graph()

    def norm(x, width, name, kernel=1, stride=1):
        options = {"stride": stride, "padding": kernel // 2, "bias": False}
        x = m.Conv2d(x.shape[-1], width, kernel, **options, name=f"{name}.conv")(x)
        return m.BatchNorm2d(width, name=f"{name}.bn")(x)

    def block(x, width, name, stride=1):
        y = m.ReLU(name=f"{name}.relu1")(norm(x, 8, f"{name}.1"))
        y = m.ReLU(name=f"{name}.relu2")(norm(y, 8, f"{name}.2", 3, stride))
        side = x if x.shape[-1] == width else norm(x, width, f"{name}.side", 1, stride)
        return m.ReLU(name=f"{name}.relu")(m.Add(name=f"{name}.add")(norm(y, width, f"{name}.3"), side))

    x = m.ReLU(name="relu0")(norm(graph.input((6, 6, 3)), 16, "stem", 3))
    x = block(block(block(x, 32, "a"), 32, "b"), 64, "c", 2)
    return graph.output(m.Linear(9 * 64, 5, name="fc")(m.Flatten()(x)))


@pytest.mark.parametrize("how", ["elementwise", "gradients", "bnff"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_convolutions_that_add_to_gradients_may_make_both_of_their_own(ops, how, precision, monkeypatch):
    """On a CPU by the same passes, with the same bits."""
    told, own = [], ops.conv2d_backward_both
    if ops.name == "cpu":
        monkeypatch.setattr(ops, "conv2d_makes_both", lambda _, w, **geometry: w.shape[1:3] == (1, 1))

    def both(*args, **named):
        told.append({name for name in ("norm", "below", "other", "add") if named.get(name) is not None})
        return own(*args, **named)

    monkeypatch.setattr(ops, "conv2d_backward_both", both)
    steps = []
    for lazy in (False, True):
        model = fused(bottlenecks, how, ops, precision=precision)
        for layer in model.layers:
            if isinstance(layer, m.BatchNorm2d):
                layer.lazy = lazy and not layer.name.startswith(("stem", "c.side"))
        steps.append(run(model))
    exact = ops.name == "cpu" or precision == "fp32"
    close(*steps, 0.0 if exact else 2.0**-6)
    if ops.name == "cpu":
        expected = [{"below", "other", "add"}, {"below", "add"}] if how != "elementwise" else [set()]
        assert all(what in told for what in expected), told


def trained_once(graph, set_modes=lambda model: None):
    """Gradients of a network's weights on images of 6x6x4, float32 on the CPU."""
    model, rng = m.Model(graph, seed=1), np.random.default_rng(0)
    set_modes(model)
    y = model.forward(rng.standard_normal((3, 6, 6, 4), np.float32))
    model.backward(rng.standard_normal(y.shape, np.float32))
    return {s.full_name: model.arena.gradient(s.offset, s.offset + s.size).copy() for s in model.arena.segments}


def over(build):
    graph = m.Graph()
    y = m.Flatten()(build(graph.input((6, 6, 4))))
    return graph.output(m.Linear(y.shape[0], 5, name="l")(y))


def test_one_that_is_lazy_by_hand_leaves_its_pass_to_any_layer_below(monkeypatch):
    """A batch norm, a sum of two convolutions of which a kernel makes both gradients of one."""
    monkeypatch.setattr(open_device("cpu"), "conv2d_makes_both", lambda shape, w, **k: w.shape[1:3] == (1, 1))

    def two_norms(x):
        return m.BatchNorm2d(4, name="bn")(m.BatchNorm2d(4, name="b1")(m.Conv2d(4, 4, 1, bias=False, name="c")(x)))

    def of_a_sum(x):
        a = m.Conv2d(4, 4, 3, padding=1, bias=False, name="c0")(x)
        q = m.Conv2d(4, 8, 3, padding=1, bias=False, name="q")(a)
        return m.BatchNorm2d(8, name="bn")(m.Add()(m.Conv2d(4, 8, 1, bias=False, name="p")(a), q))

    def lazy(model):
        model.graph["bn"].layer.lazy = True

    for build in (two_norms, of_a_sum):
        plain, found = trained_once(over(build)), trained_once(over(build), lazy)
        for name, gradient in plain.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-4, err_msg=f"{build.__name__} {name}")


def test_a_transposed_convolution_masks_beside_other_readers():
    def build(x):
        relu = m.ReLU()(m.BatchNorm2d(4, name="bn")(m.Conv2d(4, 4, 1, bias=False, name="c")(x)))
        return m.Add()(m.ConvTranspose2d(4, 4, 1, bias=False, name="t")(relu), m.Conv2d(4, 4, 1, name="d")(relu))

    def masking(model):
        model.graph["t"].layer.masks = model.graph["bn"].layer.deferred = True

    plain, found = trained_once(over(build)), trained_once(over(build), masking)
    for name, gradient in plain.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-4, err_msg=name)
