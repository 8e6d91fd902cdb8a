"""Updates within the backward pass: the same bits with a few messages' gradients in memory, or a refusal."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.cuda.launch import dry_run
from minidl.segments import ring_places
from minidl.sparse import CubicSchedule, PrunedSGD, Pruning
from minidl.step import EagerStep
from tests.conftest import CUDA
from tests.small_steps import batches, bits, small_model

CASES = [("resnet20", "fp32"), ("resnet20", "bf16"), ("unet", "fp32"), ("lenet", "fp32")]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("group_bytes", [0, 30_000])
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_ring_gives_the_same_bits(name, precision, group_bytes, device):
    def trained(slots: int | None) -> dict[str, bytes]:
        model = small_model(name, precision, device, group_bytes=group_bytes)
        optimizer = m.SGD(model, 0.05, 0.9, 1e-4)
        if slots is not None:
            optimizer.update_in_backward(slots)
            sizes = [message.end - message.begin for message in model.arena.messages]
            worst = max(sum(sizes[i : i + slots]) for i in range(len(sizes)))
            assert worst <= model.arena.grad.size <= min(1.25 * worst, model.arena.trainable_size)
        return bits(model, optimizer, name)

    kept = trained(None)
    for slots in (1, 2, 5):
        assert trained(slots) == kept


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("group_bytes", [0, 30_000, 1 << 20])
def test_a_huge_dense_layer_is_updated_in_tiles_with_the_same_bits(group_bytes, precision, device, monkeypatch):
    """Of sizes that leave padding, a last tile of fewer rows, and tiles alone in their message or not."""
    monkeypatch.setattr("minidl.layers.linear.TILE_BYTES", 4 * 300 * 128)

    def network() -> m.Graph:
        graph = m.Graph()
        y = m.Flatten()(m.ReLU()(m.Conv2d(3, 8, 3, padding=1, name="conv")(graph.input((32, 32, 3)))))
        y = m.ReLU(name="r1")(m.Linear(8 * 32 * 32, 300, name="fc1")(y))  # tiles of 128, 128 and 44 rows
        y = m.ReLU(name="r2")(m.Linear(300, 333, name="fc2")(y))
        return graph.output(m.Linear(333, 10, name="fc3", bias=False)(y))

    def trained(slots: int | None) -> dict[str, bytes]:
        model = m.Model(network(), device=device, precision=precision, seed=5, group_bytes=group_bytes)
        optimizer = m.SGD(model, 0.05, 0.9, 1e-4)
        if slots is not None:
            optimizer.update_in_backward(slots)
            assert set(model.arena.tiled) == {"fc1", "fc2"}
            assert model.arena.grad.size < 0.5 * model.arena.trainable_size
        return bits(model, optimizer, "lenet")

    kept = trained(None)
    for slots in (1, 2, 5):
        assert trained(slots) == kept


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("plan", ["none", "bnff"])
@pytest.mark.parametrize("name", ["resnet20", "unet", "resnet50"])
def test_what_a_layer_leaves_to_the_one_below_is_of_weights_before_their_update(name, plan, device):
    """Each layer is updated before the next one runs, to which batch norms leave their last pass: on a GPU where the
    plan says so."""

    def trained(ring: bool) -> dict[str, bytes]:
        model = small_model(name, "bf16", device, group_bytes=0)
        m.fusion.fuse(model, plan)
        for layer in model.layers:
            if isinstance(layer, m.BatchNorm2d) and device == "cpu":
                layer.lazy = True
        optimizer = m.SGD(model, 0.05, 0.9, 1e-4)
        if ring:
            optimizer.update_in_backward(1)
        return bits(model, optimizer, name, steps=2)

    assert trained(True) == trained(False)


@pytest.mark.parametrize("plan", ["none", "bnff"])
@pytest.mark.parametrize(("accumulate", "options"), [(1, {}), (2, {"clip_value": 0.1}), (1, {"clip_norm": 1.0})])
def test_updates_may_be_early_where_gradients_are_kept(plan, accumulate, options):
    """Of all messages, once what they have lent is read, unless all gradients are looked at first."""

    def trained(early: bool) -> tuple[dict[str, bytes], list[int], list[int]]:
        model, updates, behind = small_model("resnet20", "bf16", "cpu", group_bytes=0), [], []
        m.fusion.fuse(model, plan)
        for i, layer in enumerate(model.layers):
            layer.lazy = isinstance(layer, m.BatchNorm2d) and i % 3 == 0
        optimizer = m.SGD(model, 0.05, 0.9, 1e-4, **options)
        own = optimizer._update
        optimizer._update = lambda begin, end: updates.append(end - begin) or own(begin, end)
        finished = model.arena.finished
        model.arena.finished = lambda: behind.append(sum(not m.updated for m in model.arena.messages)) or finished()

        def make(*parts):
            step = EagerStep(*parts, accumulate=accumulate)

            def take(x, labels):
                with optimizer.early() if early else nullcontext():
                    return step(x, labels)

            return take

        return bits(model, optimizer, "resnet20", make=make), updates, behind

    (kept, whole, _), (found, parts, behind) = trained(False), trained(True)
    assert found == kept and len(whole) == 3 and sum(parts) == sum(whole)
    count = len(small_model("resnet20", "bf16", "cpu", group_bytes=0).arena.messages)
    clipped = "clip_norm" in options
    assert behind == [count if clipped else 0] * 3 and len(parts) == (3 if clipped else 3 * count)


def test_what_is_sent_or_looked_at_is_held_whole(monkeypatch):
    monkeypatch.setattr("minidl.layers.linear.TILE_BYTES", 4 * 300 * 128)
    model = m.Model(models.mlp(10, (32, 32, 3), (512,)))
    optimizer = m.SGD(model, 0.05, 0.9)
    optimizer.update_in_backward()
    assert model.arena.tiled
    part = model.arena.grad.size
    model.arena.watch(lambda layer: None)
    assert not model.arena.tiled and model.arena.grad.size > part
    bits(model, optimizer, "lenet")


def test_pruning_and_a_ring_give_the_same_bits():
    def trained(ring: bool) -> dict[str, bytes]:
        model = small_model("resnet20", "fp32", "cpu", group_bytes=30_000)
        optimizer = PrunedSGD(model, 0.05, 0.9, pruning=Pruning(CubicSchedule(0.5, 1, 2, frequency=1)))
        if ring:
            optimizer.update_in_backward(1)
        return bits(model, optimizer, "resnet20")

    assert trained(True) == trained(False)


def test_neighbours_never_share_a_place(rng):
    for _ in range(50):
        sizes, slots = rng.integers(1, 100, int(rng.integers(1, 30))).tolist(), int(rng.integers(1, 6))
        places = ring_places(sizes, slots)
        for i in range(len(sizes)):
            for j in range(max(i - slots + 1, 0), i):
                assert places[i] + sizes[i] <= places[j] or places[j] + sizes[j] <= places[i]


def test_gradients_of_large_networks_take_a_few_per_cent():
    """On one rank; and a ring is never larger than what it replaces."""
    for name, least in (("resnet50", 0.85), ("resnet152", 0.9), ("vgg16", 0.85)):
        with dry_run():
            graph = models.build(name, (224, 224, 3), 1000)
            for layer in graph.layers:
                layer.specs = [
                    dataclasses.replace(spec, init=lambda rng, shape: np.zeros(shape)) for spec in layer.specs
                ]
            arena = m.Model(graph, device="cuda").arena
            for slots in (4, 1):
                arena.ring(slots, lambda begin, end: None)
                assert arena.grad.size <= arena.trainable_size
        assert 1 - arena.grad.size / arena.trainable_size > least


def test_what_a_ring_cannot_do_is_refused():
    model = small_model("resnet20", "fp32", "cpu")
    optimizer, loss = type("Nameable", (m.SGD,), {})(model, 0.05, 0.9), m.SoftmaxCrossEntropy()
    with pytest.raises(ValueError, match="slots must be an integer of at least 1, got 0"):
        optimizer.update_in_backward(0)
    optimizer.update_in_backward()
    x, labels = next(batches(model, "resnet20", 1))

    def dy():
        loss.forward(model.forward(x), labels)
        return loss.backward()

    for options in ({"accumulate": True}, {"send": False}):
        with pytest.raises(RuntimeError, match="micro-batches add up what a ring of slots does not hold"):
            model.backward(dy(), **options)
    with pytest.raises(RuntimeError, match="update before backward"):
        optimizer.step()
    with pytest.raises(ValueError, match="updates within the backward pass together with micro-batches"):
        EagerStep(model, optimizer, loss, accumulate=2)
    model.backward(dy())
    with pytest.raises(RuntimeError, match="Nameable: the learning rate changes when part of a step is done"):
        optimizer.set_lr(0.01)
    with pytest.raises(RuntimeError, match="they are gone when their update is done"):
        model.layers[0].params.gradients()
    optimizer.step()
    optimizer.set_lr(0.01)
    half = small_model("resnet20", "fp16", "cpu")
    with pytest.raises(ValueError, match="updates within the backward pass together with loss scaling"):
        m.SGD(half, 0.05).update_in_backward()


def test_an_error_in_the_backward_pass_leaves_the_ring_usable():
    model = small_model("resnet20", "fp32", "cpu", group_bytes=0)
    optimizer = m.SGD(model, 0.05, 0.9)
    optimizer.update_in_backward()
    layer = model.graph["layer2.1.conv1"].layer

    def fail(*args, **kwargs):
        raise FloatingPointError("on purpose")

    layer.backward_data = fail
    with pytest.raises(FloatingPointError):
        bits(model, optimizer, "resnet20", 1)
    with pytest.raises(RuntimeError, match="update before backward"):
        optimizer.step()
    del layer.backward_data
    bits(model, optimizer, "resnet20", 2)
