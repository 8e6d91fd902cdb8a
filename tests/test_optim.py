"""Laws of the optimizer on whole models: PyTorch's formulas, groups, decay, state."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.sharded import ShardedSGD
from tests.small_steps import batches, small_model

f32 = np.float32


def model_and_batch(ops, rng, **options):
    model = m.Model(models.mlp(3, (4, 4, 2), (5,)), device=ops.name, **options)
    x = ops.from_host(rng.standard_normal((4, 4, 4, 2)).astype(f32))
    return model, x, ops.from_host(rng.integers(0, 3, 4).astype(np.int32))


def gradients(model):
    return {
        f"{la.name}.{n}": model.ops.to_host(g).astype(np.float64)
        for la in model.layers if la.specs
        for n, g in la.params.gradients().items()
    }  # fmt: skip


@pytest.mark.parametrize(
    ("momentum", "decay", "nesterov"), [(0, 0, False), (0.9, 0, False), (0.9, 0.01, False), (0.9, 0.01, True)]
)
def test_three_steps_follow_the_formulas(momentum, decay, nesterov, ops, rng):
    model, x, labels = model_and_batch(ops, rng)
    groups = [m.ParameterGroup("fc2.*", lr_scale=0.5, weight_decay=0.1)]
    optimizer = m.SGD(model, 0.2, momentum, decay, nesterov, groups=groups)
    weights = {k: v.astype(np.float64) for k, v in model.state_dict().items()}
    velocity = {k: np.zeros_like(v) for k, v in weights.items()}
    loss = m.SoftmaxCrossEntropy()
    for lr in (0.2, 0.1, 0.1):
        optimizer.set_lr(lr)
        loss.forward(model.forward(x), labels)
        model.backward(loss.backward())
        for name, g in gradients(model).items():
            in_group = name.startswith("fc2.")
            g = g + (0.1 if in_group else decay) * weights[name]
            velocity[name] = momentum * velocity[name] + g
            d = g + momentum * velocity[name] if nesterov else velocity[name] if momentum else g
            weights[name] = weights[name] - lr * (0.5 if in_group else 1.0) * d
        optimizer.step()
    for name, expected in weights.items():
        np.testing.assert_allclose(model.state_dict()[name], expected, rtol=1e-5, atol=1e-6)


def test_norm_and_bias_can_be_exempt_from_decay(ops, rng):
    model, x, labels = model_and_batch(ops, rng)
    optimizer = m.SGD(model, 1.0, weight_decay=0.5, decay_norm_and_bias=False)
    before = model.state_dict()
    model.forward(x)
    model.backward(ops.zeros((4, 3), f32))
    optimizer.step()
    after = model.state_dict()
    for name, values in before.items():
        factor = 1.0 if name.endswith("bias") else 0.5
        np.testing.assert_allclose(after[name], factor * values, rtol=1e-6)


def test_working_copies_are_the_rounded_masters(ops, rng):
    model, x, labels = model_and_batch(ops, rng, precision="bf16")
    optimizer = m.SGD(model, 0.1)
    loss = m.SoftmaxCrossEntropy()
    loss.forward(model.forward(ops.cast(x, model.precision.storage)), labels)
    model.backward(loss.backward())
    optimizer.step()
    master = ops.to_host(model.arena.master)
    np.testing.assert_array_equal(ops.to_host(model.arena.working), master.astype(model.precision.storage))


def test_impossible_settings_are_refused(cpu_ops, rng):
    model, _, _ = model_and_batch(cpu_ops, rng)
    with pytest.raises(ValueError, match="lr"):
        m.SGD(model, -1)
    with pytest.raises(ValueError, match="momentum must be"):
        m.SGD(model, 0.1, nesterov=True)
    with pytest.raises(ValueError, match="momentum must be below 1"):
        m.SGD(model, 0.1, 1.0)
    with pytest.raises(ValueError, match="lr must be a number"):
        m.SGD(model, "0.1")
    for scale in (0.0, "dynamic"):
        with pytest.raises(ValueError, match="loss_scale must be a number above 0, finite"):
            m.SGD(model, 0.1, loss_scale=scale)
    with pytest.raises(TypeError, match="groups must be ParameterGroups"):
        m.SGD(model, 0.1, groups=["fc1.*"])
    with pytest.raises(TypeError, match=r"groups must be a sequence .*; write groups=\[ParameterGroup"):
        m.SGD(model, 0.1, groups=m.ParameterGroup("*"))
    with pytest.raises(TypeError, match="ParameterGroup: pattern must be a text, got int 3"):
        m.ParameterGroup(3)
    with pytest.raises(ValueError, match="lr_scale of fc1"):
        m.SGD(model, 0.1, groups=[m.ParameterGroup("fc1.*", lr_scale=-1)])
    with pytest.raises(ValueError, match="unknown parameter pattern 'conv"):
        m.SGD(model, 0.1, groups=[m.ParameterGroup("conv*")])


def test_gradients_are_shared_out_or_a_ring_but_not_both(cpu_ops):
    def model():
        return m.Model(models.build("resnet20", (8, 8, 3), 4))

    with pytest.raises(ValueError, match="updates within the backward pass together with sharded momentum"):
        ShardedSGD(model(), 0.1).update_in_backward()
    ring = m.SGD(model(), 0.1)
    ring.update_in_backward()
    with pytest.raises(ValueError, match="updates within the backward pass together with sharded momentum"):
        ShardedSGD(ring.model, 0.1)


@pytest.mark.parametrize(("before", "after"), [("fp16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16"), ("fp16", "fp16")])
def test_a_loss_scale_goes_only_to_optimizers_that_have_one(before, after):
    """Another would divide gradients of a loss that is not scaled, or skip all steps as the last one was."""
    states = {}
    for precision in (before, after):
        model = small_model("resnet20", precision, "cpu")
        states[precision] = m.SGD(model, 0.05, 0.9, **({"loss_scale": 512.0} if precision == before == "fp16" else {}))
    one, other = states[before], m.SGD(small_model("resnet20", after, "cpu"), 0.05, 0.9)
    one.control[3] = float(one.scales_loss)  # the last step overflowed
    other.load_state_dict(one.state_dict())
    scale, overflowed = float(other.control[2]), float(other.control[3])
    if after == "fp16":
        assert (scale, overflowed) == ((512.0, 1.0) if before == "fp16" else (65536.0, 0.0))
    else:
        assert (scale, overflowed) == (1.0, 0.0)


def test_momentum_that_was_collected_is_that_of_its_step():
    """Also where a loss is scaled, on one rank."""
    model = small_model("resnet20", "fp16", "cpu")
    optimizer, loss = ShardedSGD(model, 0.05, 0.9), m.SoftmaxCrossEntropy()
    seen = []
    for x, labels in batches(model, "resnet20", 2):
        loss.forward(model.forward(x), labels)
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()
        optimizer.collect()
        seen.append(optimizer.state_dict())
    assert any((seen[0][key] != seen[1][key]).any() for key in seen[0] if key.startswith("momentum"))
