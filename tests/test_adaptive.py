"""Adaptive optimizers, state of all, clipping and averaged weights on whole models."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.adaptive import EPS
from tests.reference import adaptive as reference
from tests.test_optim import gradients, model_and_batch

f32 = np.float32

OPTIMIZERS = {
    "adamw": lambda model, **o: m.AdamW(model, 1e-2, **o),
    "lamb": lambda model, **o: m.LAMB(model, 1e-2, **o),
    "lars": lambda model, **o: m.LARS(model, 0.5, 0.9, 1e-2, **o),
}


def step(model, optimizer, x, labels, ops):
    loss = m.SoftmaxCrossEntropy()
    loss.forward(model.forward(x), labels)
    model.backward(loss.backward(optimizer.loss_scale))
    found = gradients(model)
    optimizer.step()
    return found


@pytest.mark.parametrize("grouped", [0, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_follow_the_formulas(name, grouped, ops, rng):
    """With a message for each layer, and with one for all."""
    model, x, labels = model_and_batch(ops, rng, group_bytes=grouped)
    optimizer = OPTIMIZERS[name](model, decay_norm_and_bias=False)
    weights = {k: v.astype(np.float64) for k, v in model.state_dict().items()}
    moments = {k: (np.zeros_like(v), np.zeros_like(v)) for k, v in weights.items()}
    for t in range(1, 4):
        for key, g in step(model, optimizer, x, labels, ops).items():
            trust = not key.endswith("bias")
            decay = 1e-2 if trust else 0.0
            if name == "lars":
                w, buffer = reference.lars(weights[key], g, moments[key][0], 0.5, decay, 0.9, 1e-3, trust)
                weights[key], moments[key] = w, (buffer, buffer)
                continue
            eps = 1e-8 if name == "adamw" else 1e-6
            w, *both = reference.adam(
                weights[key], g, *moments[key], 1e-2, decay, (0.9, 0.999), eps, t, trust and name == "lamb"
            )
            weights[key], moments[key] = w, tuple(both)
    for key, expected in weights.items():
        np.testing.assert_allclose(model.state_dict()[key], expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["sgd", *OPTIMIZERS])
def test_state_resumes_bit_for_bit(name, precision, ops, rng):
    make = OPTIMIZERS.get(name, lambda model: m.SGD(model, 0.1, 0.9))
    model, x, labels = model_and_batch(ops, rng, precision=precision)
    x = ops.cast(x, model.precision.storage)
    optimizer = make(model)
    for _ in range(2):
        step(model, optimizer, x, labels, ops)
    state, kept = model.state_dict(), optimizer.state_dict()
    for _ in range(2):
        step(model, optimizer, x, labels, ops)
    again, _, _ = model_and_batch(ops, rng, precision=precision)
    resumed = make(again)
    resumed.set_lr(0.7)
    again.load_state_dict(state)
    resumed.load_state_dict(kept)
    assert resumed.lr == f32(optimizer.lr)
    for _ in range(2):
        step(again, resumed, x, labels, ops)
    for key, values in model.state_dict().items():
        np.testing.assert_array_equal(values, again.state_dict()[key])
    with pytest.raises(ValueError, match="does not fit"):
        m.SGD(again, 0.1).load_state_dict(kept)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_clipped_norm_is_that_of_all_gradients_together(precision, ops, rng):
    model, x, labels = model_and_batch(ops, rng, precision=precision)
    x = ops.cast(x, model.precision.storage)
    optimizer = m.SGD(model, 1.0, clip_norm=0.05)
    before = model.state_dict()
    found = step(model, optimizer, x, labels, ops)
    scale = 2.0**16 if precision == "fp16" else 1.0
    norm = np.sqrt(sum(np.sum((g / scale) ** 2) for g in found.values()))
    assert norm > 0.05
    after = model.state_dict()
    moved = {key: before[key] - after[key] for key in before}
    assert np.sqrt(sum(np.sum(d.astype(np.float64) ** 2) for d in moved.values())) == pytest.approx(0.05, rel=1e-4)
    for key, g in found.items():
        np.testing.assert_allclose(moved[key], g / scale * 0.05 / norm, rtol=2e-3, atol=1e-6)


def test_a_step_that_overflows_does_not_spoil_those_that_follow_when_norms_are_clipped(ops, rng):
    """No pass writes what lies between the parameters: a NaN there would make every later step one that overflows."""
    model, x, labels = model_and_batch(ops, rng, precision="fp16")
    optimizer = m.SGD(model, 1.0, clip_norm=0.05)
    for images in (np.full(x.shape, np.nan, f32), ops.to_host(x)):
        step(model, optimizer, ops.from_host(images.astype(model.precision.storage)), labels, ops)
    assert optimizer.skipped_steps == 1


def test_clipped_values_bound_each_step(ops, rng):
    model, x, labels = model_and_batch(ops, rng)
    optimizer = m.SGD(model, 1.0, clip_value=1e-3)
    before = model.state_dict()
    found = step(model, optimizer, x, labels, ops)
    after = model.state_dict()
    for key, g in found.items():
        np.testing.assert_allclose(before[key] - after[key], np.clip(g, -1e-3, 1e-3), rtol=1e-3, atol=1e-7)


def test_averaged_weights_stand_in_inside_the_block_only(ops, rng):
    model, x, labels = model_and_batch(ops, rng, precision="bf16")
    x = ops.cast(x, model.precision.storage)
    optimizer, average = m.SGD(model, 0.1), m.WeightAverage(model, 0.75)
    expected = {k: v.astype(np.float64) for k, v in model.state_dict().items()}
    for _ in range(3):
        step(model, optimizer, x, labels, ops)
        average.update()
        expected = {k: 0.75 * v + 0.25 * model.state_dict()[k] for k, v in expected.items()}
    own = model.state_dict()
    with average.applied():
        for key, values in model.state_dict().items():
            np.testing.assert_allclose(values, expected[key], rtol=1e-5, atol=1e-6)
        master = ops.to_host(model.arena.master)
        np.testing.assert_array_equal(ops.to_host(model.arena.working), master.astype(model.precision.storage))
        with pytest.raises(RuntimeError, match="update inside applied"):
            average.update()
    for key, values in model.state_dict().items():
        np.testing.assert_array_equal(values, own[key])
    again = m.WeightAverage(model, 0.75)
    again.load_state_dict(average.state_dict())
    for key, values in again.state_dict().items():
        np.testing.assert_array_equal(values, average.state_dict()[key])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_train(name, ops, rng):
    model, x, labels = model_and_batch(ops, rng)
    optimizer, seen = OPTIMIZERS[name](model, groups=[m.ParameterGroup("fc1.*", lr_scale=2.0)]), []
    for _ in range(60):
        loss = m.SoftmaxCrossEntropy()
        seen.append(loss.forward(model.forward(x), labels).loss)
        model.backward(loss.backward())
        optimizer.step()
    assert seen[-1] < (0.99 if name == "lars" else 0.7) * seen[0]


REFUSED = {
    "betas": (lambda model: m.AdamW(model, betas=(0.9, 1.0)), r"AdamW: betas must be a number in \[0, 1\), got 1.0"),
    "one beta": (lambda model: m.AdamW(model, betas=(0.9,)), "AdamW: betas must be a pair"),
    "eps": (lambda model: m.LAMB(model, eps=0), "LAMB: eps must be a number above 0"),
    "trust": (
        lambda model: m.LARS(model, 0.1, trust_coefficient=0),
        "LARS: trust_coefficient must be a number above 0",
    ),
    "momentum": (lambda model: m.LARS(model, 0.1, momentum=0), "LARS: momentum must be a number in"),
    "rate": (lambda model: m.AdamW(model, -1), "AdamW: lr must be a number of at least 0"),
    "norm": (lambda model: m.SGD(model, 0.1, clip_norm=0), "SGD: clip_norm must be a number above 0"),
    "value": (lambda model: m.AdamW(model, clip_value=-1), "AdamW: clip_value must be a number above 0"),
    "decay": (lambda model: m.WeightAverage(model, 1.0), r"decay must be a number in \[0, 1\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_settings_are_refused(case, cpu_ops, rng):
    make, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        make(m.Model(models.mlp(3, (4, 4, 2), (5,))))


@pytest.mark.parametrize(
    ("kind", "option"), [(m.AdamW, "momentum"), (m.AdamW, "nesterov"), (m.LAMB, "momentum"), (m.LARS, "nesterov")]
)
def test_options_of_others_are_refused_in_the_name_of_the_class(kind, option, cpu_ops):
    """Of LAMB in that of AdamW, whose constructor it has."""
    with pytest.raises(TypeError, match=rf"^{kind.__init__.__qualname__}\(\) .*'{option}'"):
        kind(m.Model(models.mlp(3, (4, 4, 2), (5,))), 0.1, **{option: 0.9})


@pytest.mark.parametrize("kind", [m.AdamW, m.LAMB, m.LARS])
def test_signatures_tell_the_options_that_all_optimizers_have(kind):
    common, own = (inspect.signature(one).parameters for one in (m.SGD, kind))
    names = [name for name, p in common.items() if p.kind is p.KEYWORD_ONLY]
    assert {name: own[name].default for name in names if name != "decay_norm_and_bias"} == {
        name: common[name].default for name in names if name != "decay_norm_and_bias"
    }
    assert not [p for p in own.values() if p.kind is p.VAR_KEYWORD]


def test_lamb_has_an_eps_of_its_own(cpu_ops):
    model = m.Model(models.mlp(3, (4, 4, 2), (5,)))
    found = [float(make(model, 0.1).record[EPS]) for make in (m.AdamW, m.LAMB)]
    assert found == [np.float32(1e-8), np.float32(1e-6)]
