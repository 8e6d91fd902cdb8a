"""Laws of squeeze and excitation over a batch norm and an activation: as in separate passes, in fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import fusion, models
from minidl.fusion.plans import candidates, modes_of, way_of
from tests.test_fusion import BOUND, backward_in_evaluation, close, distance, fused, run


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
    """EfficientNet's first: statistics 1, means 1, product 2; all sums 2, the input's gradient 3. The site counts what
    the batch norm takes beyond the 3 + 4 passes that product and means have without it."""
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
