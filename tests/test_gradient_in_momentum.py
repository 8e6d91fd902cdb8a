"""Gradients added to the momentum: no memory of their own, the bits of gradients apart, or a refusal."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.compile import CompiledStep
from minidl.cuda.launch import dry_run
from minidl.fusion import fuse
from minidl.memory import limit_memory, record
from minidl.sparse import CubicSchedule, PrunedSGD, Pruning
from minidl.step import EagerStep
from tests.conftest import CUDA
from tests.memory_cases import small_graph
from tests.memory_engine import DryEngine
from tests.small_steps import batches, bits, small_model, state
from tests.tolerance import assert_same_arrays

CASES = [("resnet20", "fp32"), ("resnet20", "bf16"), ("unet", "fp32"), ("lenet", "bf16")]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_the_bits_are_those_of_gradients_apart(name, precision, device):
    def trained(added: bool) -> dict[str, bytes]:
        model = small_model(name, precision, device, group_bytes=30_000)
        groups = [m.ParameterGroup("*bias", lr_scale=2.0, weight_decay=0.0)]
        optimizer = m.SGD(model, 0.05, 0.9, 1e-2, groups=groups)
        if added:
            optimizer.gradients_in_momentum()
            assert model.arena.grad is optimizer.velocity
        return bits(model, optimizer, name)

    assert trained(True) == trained(False)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("limit", [None, "60%"])
def test_captured_steps_have_the_same_bits(device, limit):
    def trained(added: bool, make) -> dict[str, bytes]:
        model = small_model("resnet20", "bf16", "cuda")
        fuse(model, "none")
        optimizer = m.SGD(model, 0.05, 0.9, 1e-2)
        if added:
            optimizer.gradients_in_momentum()
        if limit is not None and added:
            memory = limit_memory(model, 6, limit, least=1 << 12)
            assert memory.script.plan.rebuilt_bytes or memory.script.plan.moved_bytes
        return bits(model, optimizer, "resnet20", 6, make)

    assert trained(True, CompiledStep) == trained(False, EagerStep)


def test_pruning_gives_the_same_values():
    """All but the sign of zeros, which is that of the masked gradient where it stands alone."""

    def trained(added: bool) -> dict[str, np.ndarray]:
        model = small_model("resnet20", "fp32", "cpu")
        optimizer = PrunedSGD(model, 0.05, 0.9, 1e-2, pruning=Pruning(CubicSchedule(0.5, 1, 2, frequency=1)))
        if added:
            optimizer.gradients_in_momentum()
        bits(model, optimizer, "resnet20")
        return state(model, optimizer)

    assert_same_arrays(trained(True), trained(False))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("parts", [2, 3])
def test_micro_batches_stay_within_the_stated_bound(parts, device):
    """One step from a momentum that is not zero; the addends are what gradients apart hold of each micro-batch."""
    found, addends = {}, []
    for added in (False, True):
        model = small_model("lenet", "fp32", device)
        optimizer = m.SGD(model, 0.05, 0.9, 1e-2)
        bits(model, optimizer, "lenet", 2)
        before = state(model, optimizer)
        loss = m.SoftmaxCrossEntropy()
        step = EagerStep(model, optimizer, loss, accumulate=parts)
        (x, labels), = batches(model, "lenet", 1)  # fmt: skip
        if added:
            optimizer.gradients_in_momentum()
            step(x, labels)
        else:
            count = loss.count(labels, 10)
            for begin, end in step.parts(len(x)):
                loss.forward(model.forward(x[begin:end], new_step=begin == 0), labels[begin:end], count=count)
                model.backward(loss.backward())
                addends.append({s.full_name: _gradient(model, s) for s in model.arena.segments})
                optimizer.step()
                model.load_state_dict({name: before[name] for name in model.state_dict()})
                optimizer.load_state_dict({name: before[name] for name in optimizer.state_dict()})
            step(x, labels)
        found[added] = state(model, optimizer)
    differed = 0
    for s in model.arena.segments:
        old = before[f"momentum.{s.full_name}"].astype(np.float64)
        size = np.abs(0.9 * old) + np.abs(1e-2 * before[s.full_name].astype(np.float64))
        size += sum(np.abs(part[s.full_name]) for part in addends)
        apart, together = (found[a][f"momentum.{s.full_name}"].astype(np.float64) for a in (False, True))
        assert (np.abs(apart - together) <= (parts + 3) * 2.0**-24 * size).all(), s.full_name
        differed += int((apart != together).sum())
    assert differed, "rounding in another order shows somewhere"


def _gradient(model, segment) -> np.ndarray:
    return model.ops.to_host(model.arena.view(segment, model.arena.grad)).astype(np.float64)


def test_a_checkpoint_goes_from_one_way_to_the_other():
    runs = []
    for first, second in ((False, False), (True, False), (False, True)):
        model = small_model("lenet", "fp32", "cpu")
        optimizer = m.SGD(model, 0.05, 0.9, 1e-2)
        if first:
            optimizer.gradients_in_momentum()
        bits(model, optimizer, "lenet", 2)
        other = small_model("lenet", "fp32", "cpu")
        resumed = m.SGD(other, 0.05, 0.9, 1e-2)
        if second:
            resumed.gradients_in_momentum()
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        runs.append(bits(other, resumed, "lenet", 2))
    assert runs[0] == runs[1] == runs[2]


def test_what_cannot_be_is_refused():
    for options, got in (({}, "0"), ({"momentum": 0.9, "nesterov": True}, "'nesterov'")):
        optimizer = m.SGD(small_model("lenet", "fp32", "cpu"), 0.05, **options)
        with pytest.raises(ValueError, match=f"momentum must be positive, and nesterov=False, .* got {got}"):
            optimizer.gradients_in_momentum()
    with pytest.raises(ValueError, match="gradients added to the momentum together with loss scaling"):
        m.SGD(small_model("lenet", "fp16", "cpu"), 0.05, 0.9).gradients_in_momentum()
    with pytest.raises(ValueError, match="gradients added to the momentum together with clipping"):
        m.SGD(small_model("lenet", "fp32", "cpu"), 0.05, 0.9, clip_norm=1.0).gradients_in_momentum()
    model = small_model("lenet", "fp32", "cpu")
    optimizer = m.SGD(model, 0.05, 0.9)
    optimizer.gradients_in_momentum()
    with pytest.raises(ValueError, match="updates within the backward pass together with gradients added"):
        optimizer.update_in_backward()
    with pytest.raises(RuntimeError, match="they are added to the momentum"):
        model.layers[0].params.gradients()


def test_a_momentum_with_half_a_step_in_it_is_not_taken_for_a_whole_one():
    model = small_model("lenet", "fp32", "cpu")
    optimizer, loss = m.SGD(model, 0.05, 0.9), m.SoftmaxCrossEntropy()
    optimizer.gradients_in_momentum()
    bits(model, optimizer, "lenet", 1)
    saved = optimizer.state_dict()
    (x, labels), = batches(model, "lenet", 1)  # fmt: skip
    layer = model.graph["fc2"].layer if "fc2" in [la.name for la in model.layers] else model.layers[-2]

    def dy():
        loss.forward(model.forward(x), labels)
        return loss.backward()

    model.backward(dy())
    with pytest.raises(RuntimeError, match="holds gradients of half a step; call step"):
        optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()

    def fail(*args, **kwargs):
        raise FloatingPointError("on purpose")

    layer.backward_data = fail
    with pytest.raises(FloatingPointError):
        model.backward(dy())
    del layer.backward_data
    with pytest.raises(RuntimeError, match="holds gradients of a backward pass that failed; load_state_dict"):
        model.backward(dy())
    optimizer.load_state_dict(saved)
    model.backward(dy())
    optimizer.step()


def test_a_trace_has_no_gradients_and_a_limit_sees_it():
    kept, none = (record(small_graph("resnet20", 32, width=16), 8, gradients=how) for how in ("keep", "momentum"))
    assert kept.resident_bytes["gradient"] > 0 == none.resident_bytes["gradient"]
    assert kept.resident_bytes["momentum"] == none.resident_bytes["momentum"]
    with pytest.raises(ValueError, match="unknown gradients 'none'"):
        record(small_graph("resnet20", 32, width=16), 8, gradients="none")
    with dry_run():
        need = {}
        for added in (False, True):
            model = m.Model(models.build("resnet20", (32, 32, 3), 10), device="cuda")
            optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
            if added:
                optimizer.gradients_in_momentum()
            memory = limit_memory(model, 8, "60%", engine=DryEngine, least=2048)
            need[added] = memory.need
            x, labels = model.ops.zeros((8, 32, 32, 3), np.dtype(np.float32)), model.ops.zeros((8,), np.dtype(np.int32))
            for _ in range(2):
                with memory.step(8):
                    loss.forward(model.forward(x), labels)
                    model.backward(loss.backward())
                optimizer.step()
        assert need[False] - need[True] == 4 * model.arena.trainable_size
