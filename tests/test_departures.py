"""When messages start: the rule by hand and at random, and a backward pass that follows it."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.dist.simulated import AlphaBeta, SimulatedCommunicator
from minidl.messages.neighbourhood import Neighbour, cut, departures
from minidl.sharded import ShardedSGD

FLOP = 10**9  # products bound a layer of so many and few bytes


def layers(*told):
    """(name, bytes sent, bytes moved, FLOP)."""
    return [Neighbour(name, sent, flop, moved) for name, sent, moved, flop in told]


def test_by_hand():
    found = layers(
        ("fc", 10, 0, FLOP), ("norm3", 0, 1000, 1), ("c", 10, 0, FLOP), ("short", 0, 400, 1), ("norm2", 0, 900, 1),
        ("b", 10, 0, FLOP), ("norm1", 0, 500, 1), ("a", 10, 0, FLOP),
    )  # fmt: skip
    apart = [("fc",), ("c",), ("b",), ("a",)]
    assert departures(found, apart, 2) == {"fc": "norm3", "c": "norm2", "b": "norm1"}
    assert departures(found, [("fc", "c"), ("b", "a")], 2) == {"c": "norm2"}
    assert departures(found, [("fc", "c", "b", "a")], 2) == {}
    assert departures(found[:1] + found[2:4] + found[5:], apart, 2) == {"fc": "short", "c": "norm1", "b": "norm1"}


def test_a_pass_lets_one_message_go_and_the_last_one_all():
    sent = [(name, 1, 0, FLOP) for name in "dcb"]
    found = layers(*sent, ("norm2", 0, 1000, 1), ("norm1", 0, 1000, 1), ("a", 1, 0, FLOP))
    expected = {"d": "norm2", "c": "norm1", "b": "norm1"}
    assert departures(found, [(name,) for name in "dcba"], 4) == expected


def test_nothing_waits_where_it_would_end_late_or_nothing_comes():
    late = layers(("b", 1 << 20, 0, 1), ("norm", 0, 1 << 20, 1), ("a", 1, 1, 1))
    assert departures(late, [("b",), ("a",)], 2) == {}
    assert departures(layers(("b", 1, 1000, 1), ("a", 1, 0, FLOP)), [("b",), ("a",)], 2) == {}, "no long pass behind it"
    below = layers(("b", 1, 0, FLOP), ("a", 1, 0, FLOP), ("frozen norm", 0, 1 << 20, 1))
    assert departures(below, [("b",), ("a",)], 2) == {}, "nothing goes back through what is below the last message"
    assert departures([], [], 2) == departures(below, [], 2) == {}


def test_messages_keep_their_order_and_start_once_complete(rng):
    waited = 0
    for _ in range(200):
        count = int(rng.integers(1, 40))
        draws = rng.integers(0, (3, 1 << 20, 2), (count, 3)) * (1000, 1, FLOP)
        found = layers(*((str(i), *map(int, row)) for i, row in enumerate(draws)))
        found.append(Neighbour("end", 10, 0, 0))
        messages = cut([(one.name, one.nbytes) for one in found if one.nbytes], int(rng.integers(0, 5000)))
        before = departures(found, messages, 2)
        places = {one.name: i for i, one in enumerate(found)}
        last = 0
        for names in messages:
            ready = places[names[-1]]
            start = places[before.get(names[-1], names[-1])]
            assert start >= max(ready, last) and (start == ready or found[start].moves(2))
            last = start
        waited += len(before)
    assert waited > 500


def network():
    graph = m.Graph()
    x = graph.input((16, 16, 3))
    for i in range(3):
        x = m.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(8, name=f"bn{i}")(x))
    return graph.output(m.Linear(8, 4, name="fc")(m.Flatten()(m.AvgPool2d(16)(x))))


def trained(rng_seed=0, *, waits, frozen=(), slots=0, micro=1, sharded=False):
    """(weights after two steps, for each message the layers whose backward pass had begun when it started)."""
    rng = np.random.default_rng(rng_seed)
    comm = SimulatedCommunicator(2, AlphaBeta(0.0, float("inf")))
    model = m.Model(network(), comm=comm, seed=1, group_bytes=0, frozen=frozen)
    arena = model.arena
    if waits:
        arena.departures = model.departures(32)
        arena.connect(comm, 0)
    optimizer = (ShardedSGD if sharded else m.SGD)(model, 0.1, momentum=0.9)
    if slots:
        optimizer.update_in_backward(slots)
    begun, seen = [], []
    for layer in model.layers:
        enter = layer.backward
        layer.backward = lambda dy, add=None, _enter=enter, _name=layer.name: begun.append(_name) or _enter(dy, add)
    start = arena._start
    arena._start = lambda message: seen.append((message.layers, message.before, begun[-1])) or start(message)
    loss = m.SoftmaxCrossEntropy(comm=comm)
    for _ in range(2):
        for part in range(micro):
            x = rng.standard_normal((2, 16, 16, 3)).astype(np.float32)
            loss.forward(model.forward(x, new_step=not part), rng.integers(0, 4, 2))
            model.backward(loss.backward(), accumulate=part > 0, send=part == micro - 1)
        optimizer.step()
    return model.state_dict(), seen, model


@pytest.mark.parametrize(
    "options", [{}, {"micro": 2}, {"frozen": ["conv0.*", "bn0.*"]}, {"frozen": ["conv1.*"]}, {"sharded": True}]
)
def test_a_backward_pass_follows_the_rule_and_no_bit_changes(options):
    soon, _, _ = trained(waits=False, **options)
    held, seen, model = trained(waits=True, **options)
    assert all((soon[name] == held[name]).all() for name in soon)
    order = [message.layers for message in model.arena.messages]
    assert [message for message, _, _ in seen] == 2 * order
    layers = [layer.name for layer in reversed(model.layers)]
    waited = 0
    for message, before, at in seen:
        assert at == (layers[layers.index(before) - 1] if before else message[-1])
        waited += bool(before)
    assert waited >= 4


def test_a_ring_wants_its_slots_back():
    soon, _, _ = trained(waits=False, slots=2)
    held, seen, model = trained(waits=True, slots=2)
    assert all((soon[name] == held[name]).all() for name in soon)
    assert not any(before for _, before, _ in seen) and model.arena.slots == 2


def test_a_failed_pass_leaves_nothing_waiting(monkeypatch):
    comm = SimulatedCommunicator(2, AlphaBeta(0.0, float("inf")))
    model = m.Model(network(), comm=comm, group_bytes=0)
    model.arena.departures = model.departures(32)
    model.arena.connect(comm, 0)
    x, dy = np.ones((2, 16, 16, 3), np.float32), np.ones((2, 4), np.float32)
    model.forward(x)
    first = next(layer for layer in model.layers if layer.name == "bn2")
    with monkeypatch.context() as patch:
        patch.setattr(first, "backward_data", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.backward(dy)
    comm.messages.clear()
    model.forward(x)
    model.backward(dy)
    assert len(comm.messages) == len(model.arena.messages)
    assert len(list(model.arena.finished())) == len(model.arena.messages)


def test_ranks_that_would_start_messages_elsewhere_are_another_plan(monkeypatch):
    told = []
    monkeypatch.setattr("minidl.model.require_same", lambda comm, what, plan: told.append(plan))
    monkeypatch.setattr("minidl.model.by_kernels", lambda comm: True)
    comm = SimulatedCommunicator(2, AlphaBeta(0.0, float("inf")))
    m.Model(network(), comm=comm, group_bytes=0)
    assert any(line.startswith("message ") and " before " in line for line in told[0])


def test_a_pass_bears_a_message_half_of_which_it_hides():
    """By the samples of a step: 8 bytes of the pass for each of the message, where a sum takes 12 to 20."""
    found = layers(("b", 100, 0, FLOP), ("norm", 0, 400, 1), ("a", 1, 0, 100 * FLOP))
    messages = [("b",), ("a",)]
    for samples, waits in ((1, False), (63, False), (64, True), (256, True), (float("inf"), True), (0, False)):
        assert departures(found, messages, 2, samples) == ({"b": "norm"} if waits else {}), samples


def test_a_message_behind_one_that_waits_does_not_overtake_it():
    found = layers(("c", 10, 0, FLOP), ("b", 200, 0, FLOP), ("norm", 0, 400, 1), ("a", 1, 0, 100 * FLOP))
    assert departures(found, [("c",), ("b",), ("a",)], 2) == {"c": "norm", "b": "norm"}


class Uneven(SimulatedCommunicator):
    """Rank 1 has 3 samples."""

    links = object()

    def share(self, value, name=""):
        return [value, min(value, 3) if isinstance(value, int) else value]


def test_ranks_wait_by_the_samples_of_the_one_that_has_least():
    model = m.Model(models.resnet20(), comm=Uneven(2, AlphaBeta(0.0, float("inf"))), group_bytes=0)

    def waiting():
        return {message.layers[-1]: message.before for message in model.arena.messages if message.before}

    def by_rule(samples):
        return model.departures(samples)([message.layers for message in model.arena.messages])

    assert waiting() == by_rule(32) and by_rule(3) != by_rule(32)
    before = model.modes()
    model.expect(32)
    assert waiting() == by_rule(3) and model.modes() != before, "another graph"


class Moving(Uneven):
    """Its sums are fastest in memory of its own."""

    def place(self, array):
        return array.copy()


@pytest.mark.parametrize(("message_dtype", "in_momentum"), [("fp32", False), ("fp32", True), ("bf16", False)])
def test_what_is_expected_moves_no_array(message_dtype, in_momentum):
    """Gradients in the momentum lie where the optimizer looks for them."""
    comm = Moving(2, AlphaBeta(0.0, float("inf")))
    model = m.Model(models.resnet20(), comm=comm, group_bytes=0, message_dtype=message_dtype)
    optimizer = m.SGD(model, 0.1, momentum=0.9)
    if in_momentum:
        optimizer.gradients_in_momentum()
    arrays = model.arena.grad, model.arena.wire, optimizer.velocity
    messages = [(message.begin, message.end, message.before) for message in model.arena.messages]
    model.expect(8)
    assert model.arena.grad is arrays[0] and model.arena.wire is arrays[1] and optimizer.velocity is arrays[2]
    assert (arrays[0] is arrays[2]) == in_momentum
    after = [(message.begin, message.end, message.before) for message in model.arena.messages]
    assert [one[:2] for one in after] == [one[:2] for one in messages] and after != messages


def test_a_ring_stays_a_ring_whatever_is_expected():
    _, _, model = trained(waits=True, slots=2)
    model.comm.links = object()
    model.expect(1000)
    assert model.arena.slots == 2 and not any(message.before for message in model.arena.messages)
