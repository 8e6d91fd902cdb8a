"""After a mistake, or an error in the middle of a pass: nothing half-done counts, and training can go on."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

import minidl as m
from tests.small_steps import batches, small_model, state


class Steps:
    """Passes over the same batch, and what each leaves."""

    def __init__(self, make=m.SGD, *args, **options):
        self.model = small_model("resnet20", "fp32", "cpu", group_bytes=0)
        self.optimizer = make(self.model, *args, **options)
        self.loss = m.SoftmaxCrossEntropy()
        self.x, self.labels = next(batches(self.model, "resnet20", 1))

    def back(self, **how):
        self.loss.forward(self.model.forward(self.x), self.labels)
        self.model.backward(self.loss.backward(), **how)

    @contextmanager
    def failing(self):
        """A layer in the middle fails to go back."""

        def fail(*args, **options):
            raise FloatingPointError

        layer = self.model.graph["layer2.1.conv1"].layer
        layer.backward_data = fail
        with pytest.raises(FloatingPointError):
            yield
        del layer.backward_data

    @property
    def weights(self):
        """But for running statistics, which see forward passes of steps that fail."""
        return self.model.ops.to_host(self.model.arena.master).tobytes()

    @property
    def bits(self):
        return {name: array.tobytes() for name, array in state(self.model, self.optimizer).items()}


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_second_backward_pass_before_the_update_is_refused_and_the_update_still_works(slots):
    plain, ring = Steps(m.SGD, 0.05, 0.9), Steps(m.SGD, 0.05, 0.9)
    ring.optimizer.update_in_backward(slots)
    for steps in (plain, ring):
        steps.back()
        with pytest.raises(RuntimeError, match=r"call optimizer\.step\(\)"):
            steps.back()
        steps.optimizer.step()
        steps.back()
        steps.optimizer.step()
    assert plain.weights == ring.weights


def test_after_an_error_a_ring_goes_on_from_a_checkpoint_at_any_rate():
    steps, other = Steps(m.SGD, 0.05, 0.9), Steps(m.SGD, 0.05, 0.9)
    for one in (steps, other):
        one.optimizer.update_in_backward()
        one.back()
        one.optimizer.step()
    kept = steps.model.state_dict(), steps.optimizer.state_dict()
    with steps.failing():
        steps.back()
    with pytest.raises(RuntimeError, match="backward"):
        steps.optimizer.step()
    steps.model.load_state_dict(kept[0])
    steps.optimizer.load_state_dict(kept[1])
    for one in (steps, other):
        one.optimizer.set_lr(0.04)
        one.back()
        one.optimizer.step()
    assert steps.bits == other.bits


@pytest.mark.parametrize("make", [m.SGD, m.AdamW, m.LAMB, m.LARS])
def test_a_refused_update_changes_nothing(make):
    steps = Steps(make, 0.01)
    before = steps.bits
    with pytest.raises(RuntimeError, match="before backward"):
        steps.optimizer.step()
    assert steps.bits == before


def test_a_failed_load_does_not_make_a_spoilt_momentum_good():
    steps = Steps(m.SGD, 0.05, 0.9)
    steps.optimizer.gradients_in_momentum()
    kept = steps.optimizer.state_dict()
    with steps.failing():
        steps.back()
    with pytest.raises(ValueError, match="momentum"):
        steps.optimizer.load_state_dict({"control": kept["control"]})
    with pytest.raises(RuntimeError, match="pass that failed"):
        steps.back()
    steps.optimizer.load_state_dict(kept)
    steps.back()
    steps.optimizer.step()


def test_micro_batches_begin_anew_after_one_that_failed():
    steps, other = Steps(m.SGD, 0.05, 0.9), Steps(m.SGD, 0.05, 0.9)
    steps.back(send=False)
    with steps.failing():
        steps.back(accumulate=True)
    with pytest.raises(RuntimeError, match="from its first micro-batch on"):
        steps.back(accumulate=True)
    for one in (steps, other):
        one.back(send=False)
        one.back(accumulate=True)
        one.optimizer.step()
    assert steps.weights == other.weights
