"""Laws of batch norms over concatenations and under max poolings: as in separate passes, in fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import fusion, models
from minidl.fusion.plans import candidates, modes_of, way_of
from minidl.store import tensor_key
from tests.test_fusion import BOUND, backward_in_evaluation, close, distance, fused, run


def dense():
    """Two dense blocks: concatenations of concatenations, which batch norms read, but for the last of a block."""
    graph = m.Graph()
    x = graph.input((6, 6, 3))
    x = m.Conv2d(3, 16, 3, padding=1, bias=False, name="stem")(x)
    for block in range(2):
        for i in range(3):
            with m.scope(f"{block}.{i}"):
                y = m.ReLU(name="relu1")(m.BatchNorm2d(x.shape[-1], name="norm1")(x))
                y = m.Conv2d(x.shape[-1], 16, 1, bias=False, name="conv1")(y)
                y = m.ReLU(name="relu2")(m.BatchNorm2d(16, name="norm2")(y))
                x = m.Concat()(x, m.Conv2d(16, 8, 3, padding=1, bias=False, name="conv2")(y))
        if block == 0:
            x = m.Conv2d(x.shape[-1], 16, 1, bias=False, name="between")(m.AvgPool2d(2, name="pool")(x))
    return graph.output(m.Linear(9 * 40, 5, name="fc")(m.Flatten()(m.ReLU(name="last")(x))))


def pooling():
    """Max poolings over batch norms: windows that overlap, leave pixels out, dilate; one without parameters."""
    graph = m.Graph()
    x = graph.input((22, 22, 3))
    windows = [(3, 2, 1, 1), (2, 3, 0, 1), (2, 1, 1, 2)]
    for i, window in enumerate(windows):
        x = m.Conv2d(x.shape[-1], 8 * (i + 1), 3, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(8 * (i + 1), name=f"bn{i}", affine=i != 1)(x))
        x = m.MaxPool2d(*window, name=f"pool{i}")(x)
    return graph.output(m.Linear(384, 5, name="fc")(m.Flatten()(x)))


def skipping():
    """A U-Net of one level: a pooling reads the ReLU that is passed by, too."""
    graph = m.Graph()

    def block(x, name, width):
        x = m.Conv2d(x.shape[-1], width, 3, padding=1, bias=False, name=f"{name}.conv")(x)
        return m.ReLU(name=f"{name}.relu")(m.BatchNorm2d(width, name=f"{name}.bn")(x))

    skip = block(graph.input((6, 6, 3)), "down", 8)
    x = block(m.MaxPool2d(2, name="pool")(skip), "bottom", 16)
    x = m.Concat(name="join")(skip, m.ConvTranspose2d(16, 8, 2, stride=2, name="up")(x))
    return graph.output(m.Linear(288, 5, name="fc")(m.Flatten()(block(x, "top", 8))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [dense, pooling, skipping])
def test_every_plan_computes_the_same(ops, build, precision):
    plain, *others = (run(fused(build, how, ops, precision=precision)) for how in fusion.PLANS)
    for taken in others:
        close(plain, taken, BOUND if precision == "fp32" else 2.0**-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_pooled_batch_norm_is_that_of_separate_passes(ops, precision):
    """Backward but for the rounding of a pixel's gradient, which the sums then do not see."""
    apart, pooled = (run(fused(pooling, how, ops, precision=precision)) for how in ("none", "elementwise"))
    close(apart, pooled, {"fp32": BOUND, "bf16": 2.0**-6, "fp16": 2.0**-9}[precision])


def test_what_is_pooled_is_not_written(cpu_ops, monkeypatch):
    model, calls = fused(pooling, "elementwise", cpu_ops), []
    for name in ("batch_norm_max_pool2d", "batch_norm_max_pool2d_backward", "batch_norm_activate_backward_stats"):
        own = getattr(cpu_ops, name)
        monkeypatch.setattr(cpu_ops, name, lambda *a, own=own, name=name, **o: calls.append(name) or own(*a, **o))
    run(model, steps=1)
    assert calls.count("batch_norm_max_pool2d") == calls.count("batch_norm_max_pool2d_backward") == 2
    assert calls.count("batch_norm_activate_backward_stats") == 1  # of the one without parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("how", ["none", "statistics", "bnff"])
@pytest.mark.parametrize("build", [dense, skipping])
def test_buffers_that_concatenations_share_change_no_bit(ops, build, how, precision):
    apart, shared = (fused(build, how, ops, precision=precision) for _ in range(2))
    for layer in apart.layers:
        if hasattr(layer, "room"):
            layer.room, layer.continues = 0, False
    close(run(apart), run(shared), 0.0)


def test_what_a_concatenation_continues_is_written_into_its_buffer(cpu_ops, monkeypatch):
    copied = _copies(cpu_ops, monkeypatch)
    model = fused(skipping, "elementwise", cpu_ops)
    copied.clear()
    x = np.ones((2, 6, 6, 3), np.float32)
    model.forward(x)
    assert not copied, "the convolution writes the other part there"
    model.forward(x, grad=False)
    assert copied == [], "nobody waits for a buffer that nothing keeps"


def _copies(ops, monkeypatch):
    """Where ``copy_into`` copies anything: the channels, of each call to come."""
    copied, own = [], ops.copy_into

    def copy_into(out, x):
        if tensor_key(out) != tensor_key(x):
            copied.append(x.shape[-1])
        own(out, x)

    monkeypatch.setattr(ops, "copy_into", copy_into)
    return copied


def test_concatenations_of_a_block_lie_in_one_buffer(cpu_ops, monkeypatch):
    model, copied = fused(dense, "statistics", cpu_ops), _copies(cpu_ops, monkeypatch)
    model.forward(np.ones((2, 6, 6, 3), np.float32))
    assert copied == 2 * [16, 8], "what lies in no buffer yet; convolutions write the rest there"
    rooms = [(layer.room, layer.continues) for layer in model.layers if isinstance(layer, m.Concat)]
    assert rooms == 2 * [(16, False), (8, True), (0, True)]


def test_two_that_continue_one_concatenation_do_not_share_its_buffer(ops):
    graph = m.Graph()
    x = graph.input((4, 4, 8))
    x = m.Concat(name="first")(x, m.Conv2d(8, 8, 1, name="a")(x))
    left = m.Concat(name="left")(x, m.Conv2d(16, 8, 1, name="b")(x))
    right = m.Concat(name="right")(x, m.Conv2d(16, 8, 1, name="c")(x))
    model = m.Model(graph.output(m.Add(name="add")(left, right)), device=ops.name)
    assert not any(layer.room or layer.continues for layer in model.layers if isinstance(layer, m.Concat))


def test_a_transposed_convolution_masks_the_gradient_that_it_alone_gives(cpu_ops, monkeypatch):
    (site,) = (s for s in fusion.find_sites(skipping()) if s.name == "bottom.bn")
    assert site.taker == "up" and not site.sole and site.passed_on is None
    taken, own = [], cpu_ops.conv2d_backward_data_masked
    monkeypatch.setattr(
        cpu_ops, "conv2d_backward_data_masked", lambda *a, **o: taken.append(o.get("transposed", False)) or own(*a, **o)
    )
    run(fused(skipping, "gradients", cpu_ops), steps=1)
    assert taken == [True]


def test_statistics_of_a_concatenation_are_taken_once(cpu_ops, monkeypatch):
    """Of the block's first part, once for itself and once for the concatenations; of what is added, by convolutions."""
    taken, own = [], cpu_ops.batch_norm_stats
    monkeypatch.setattr(cpu_ops, "batch_norm_stats", lambda x: taken.append(x.shape[-1]) or own(x))
    run(fused(dense, "statistics", cpu_ops), steps=1)
    assert sorted(taken) == [16] * 4
    taken.clear()
    run(fused(dense, "elementwise", cpu_ops), steps=1)
    assert sorted(taken) == 8 * [16] + 2 * [24] + 2 * [32]


# -- squeeze and excitation -------------------------------------------------------------------------------------------


def gated(function=m.SiLU, further=False):
    """A gate over a depthwise convolution, a batch norm and an activation; with ``further`` another layer reads it."""
    graph = m.Graph()
    x = m.Conv2d(3, 16, 3, padding=1, bias=False, name="stem")(graph.input((9, 7, 3)))
    x = m.Conv2d(16, 16, 3, padding=1, groups=8, bias=False, name="depth")(x)
    x = function(name="act")(m.BatchNorm2d(16, name="bn")(x))
    y = models.squeeze_excitation(x, 4, activation=m.SiLU)
    y = m.Add(name="add")(x, y) if further else y
    return graph.output(m.Linear(9 * 7 * 16, 5, name="fc")(m.Flatten()(y)))


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen statistics"])
@pytest.mark.parametrize("function", [m.SiLU, m.Hardswish, m.ReLU6])
def test_a_gated_activation_is_that_of_separate_passes(ops, function, training):
    """Its means, its product, and all gradients: of gate, parameters and input."""
    measure = run if training else backward_in_evaluation
    close(
        *(measure(fused(lambda: gated(function), how, ops).train(training)) for how in ("none", "elementwise")), BOUND
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_a_gated_activation_errs_no_more(ops, precision):
    errors = {"none": [], "elementwise": []}
    for seed in range(8):
        exact = run(fused(gated, "none", ops), seed=seed)
        for how, found in errors.items():
            found.append(distance(exact, run(fused(gated, how, ops, precision=precision), seed=seed)))
    apart, together = (np.sqrt(np.mean(np.square(found))) for found in errors.values())
    assert 0 < together <= 1.15 * apart


def test_what_is_gated_is_not_written_and_one_pass_takes_all_sums(cpu_ops, monkeypatch):
    calls = []
    watched = (
        "batch_norm_means", "batch_norm_gate", "batch_norm_gate_gradient", "batch_norm_gate_backward_stats",
        "batch_norm_gate_backward_apply", "batch_norm_activate", "batch_norm_activate_backward_stats",
        "batch_norm_activate_backward_apply", "adaptive_avg_pool2d", "gate_gradient", "gate_backward",
    )  # fmt: skip
    for name in watched:
        before = getattr(cpu_ops, name)
        monkeypatch.setattr(cpu_ops, name, lambda *a, _n=name, _f=before, **k: calls.append(_n) or _f(*a, **k))
    run(fused(gated, "elementwise", cpu_ops), steps=1)
    assert sorted(calls) == sorted(watched[:5])
    calls.clear()
    run(fused(lambda: gated(further=True), "elementwise", cpu_ops))
    assert not {*calls} & {*watched[:5]}, "somebody else needs what is gated"


def test_a_gated_activation_computes_the_same_for_whoever_reads_it(ops):
    """Set by hand where others read it too."""
    results = []
    for deferred in (False, True):
        model = fused(lambda: gated(further=True), "elementwise", ops)
        model.graph["act"].layer.deferred = deferred
        results.append(run(model))
    close(*results, BOUND)


def test_what_a_gate_costs_by_hand():
    """EfficientNet's first: statistics 1, means 1, product 2; all sums 2, the input's gradient 3. The site counts of these
    what the batch norm takes beyond the 3 + 4 passes that product and means have without it."""
    (gated, *_) = (s for s in fusion.find_sites(models.build("efficientnet_b0", (64, 64, 3), 10)) if s.gated)
    cost = fusion.site_cost(gated, "elementwise+gated", 1, 1)
    assert (cost.forward + 3, cost.backward + 4) == (4, 5)
    for way in candidates(gated):  # each mode spares a pass
        for mode in modes_of(way):
            fewer = way_of(set(modes_of(way)) - {mode})
            if fewer in candidates(gated):
                assert fusion.site_cost(gated, way, 2, 2).bytes < fusion.site_cost(gated, fewer, 2, 2).bytes


@pytest.mark.parametrize("name", ["efficientnet_b0", "densenet121"])
def test_a_plan_changes_nothing_but_modes(name):
    """Not even what has the name of another layer's mode: the gates that leave a gradient to a pooling."""
    model = m.Model(models.build(name, (32, 32, 3), 4))
    before = [dict(vars(layer)) for layer in model.layers]
    for how in fusion.PLANS:
        fusion.fuse(model, how)
        for layer, old in zip(model.layers, before, strict=True):
            assert {key for key, value in vars(layer).items() if value is not old.get(key)} <= {*layer.modes}
