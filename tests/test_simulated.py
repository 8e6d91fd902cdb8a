"""The cluster that is not there: times by the model, schedules exactly, and training as on one rank."""

from __future__ import annotations

import time

import numpy as np
import pytest

import minidl as m
from minidl.dist import Communicator, Work
from minidl.dist.simulated import AlphaBeta, SimulatedCommunicator, VirtualClock
from minidl.step import EagerStep

LINK = AlphaBeta(latency=1e-3, bandwidth=1e6)


def virtual(size=4, link=LINK):
    return SimulatedCommunicator(size, link, clock=VirtualClock())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_model_counts_a_rings_bytes(ranks):
    assert LINK.all_reduce(9000, ranks) == (0 if ranks == 1 else pytest.approx(1e-3 + 2 * (ranks - 1) / ranks * 9e-3))
    assert LINK.all_gather(9000, ranks) == (0 if ranks == 1 else pytest.approx(1e-3 + (ranks - 1) * 9e-3))


def test_it_is_a_communicator_whose_ranks_are_twins():
    comm = virtual(3)
    assert isinstance(comm, Communicator) and comm.name == "simulated"
    array = np.arange(5, dtype="float32")
    comm.all_reduce(array)
    np.testing.assert_array_equal(array, 3 * np.arange(5))
    assert isinstance(work := comm.start_all_reduce(array), Work)
    work.wait()
    np.testing.assert_array_equal(array, 9 * np.arange(5))
    assert comm.all_gather(array).shape == (3, 5) and comm.share("x") == ["x"] * 3
    comm.broadcast(array, 2)
    comm.barrier()


def test_messages_follow_each_other_and_only_waiting_exposes_them():
    comm = virtual(2)  # a message of n bytes takes 1 ms + n us
    clock = comm.clock
    first = comm.start_all_reduce(np.zeros(1000, "uint8"), name="fc")  # until 2 ms
    clock.advance(0.5e-3)
    second = comm.start_all_reduce(np.zeros(3000, "uint8"), name="conv")  # from 2 to 6 ms
    assert (second.issued, second.begin, second.end) == pytest.approx((0.5e-3, 2e-3, 6e-3))
    clock.advance(4.5e-3)
    first.wait()
    assert first.exposed == 0 and clock.now() == pytest.approx(5e-3)
    second.wait()
    second.wait()
    assert second.exposed == pytest.approx(1e-3) and clock.now() == pytest.approx(6e-3)
    assert [message.name for message in comm.messages] == ["fc", "conv"]


def test_blocking_calls_do_not_wait_behind_messages():
    comm = virtual(2)
    work = comm.start_all_reduce(np.zeros(10**6, "uint8"))  # a second
    comm.all_reduce(np.zeros(1000, "uint8"))
    assert comm.clock.now() == pytest.approx(2e-3) and comm.blocked == pytest.approx(2e-3)
    work.wait()
    assert comm.clock.now() == pytest.approx(1.001)


def test_real_time_is_at_least_the_models():
    comm = SimulatedCommunicator(2, AlphaBeta(latency=0.02, bandwidth=1e12))
    started = time.perf_counter()
    work = comm.start_all_reduce(np.zeros(8, "float32"))
    assert time.perf_counter() - started < 0.015, "starting does not wait"
    work.wait()
    assert time.perf_counter() - started >= 0.02


def network():
    graph = m.Graph()
    x = m.Conv2d(2, 4, 3, padding=1, name="conv1")(graph.input((6, 6, 2)))
    x = m.Conv2d(4, 4, 3, padding=1, name="conv2")(m.ReLU()(x))
    return graph.output(m.Linear(144, 3, name="fc")(m.Flatten()(x)))


@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_training_on_twins_is_training_alone(group_bytes, cpu_ops):
    """With a power of two of ranks, to the bit: the sum and the division by all labels are exact."""
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((4, 6, 6, 2)).astype("float32"), rng.integers(0, 3, 4).astype("int32")
    ends = []
    for comm in (m.dist.SOLO, virtual(4)):
        model = m.Model(network(), comm=comm, group_bytes=group_bytes)
        loss, optimizer = m.SoftmaxCrossEntropy(comm=comm), m.SGD(model, 0.1)
        for _ in range(3):
            loss.forward(model.forward(images), labels)
            model.backward(loss.backward(optimizer.loss_scale))
            optimizer.step()
        ends.append(model.state_dict())
    for name, weights in ends[0].items():
        np.testing.assert_array_equal(weights, ends[1][name])
    assert [message.name for message in comm.messages[: len(model.arena.messages)]] == (
        ["fc+conv2+conv1"] if group_bytes else ["fc", "conv2", "conv1"]
    )
    assert comm.messages[-1].exposed > 0, "no compute passes on this clock, so all of it shows"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_of_micro_batches_only_the_last_sends_gradients(accumulate, cpu_ops):
    comm, rng = virtual(4), np.random.default_rng(0)
    model = m.Model(network(), comm=comm, group_bytes=0)
    step = EagerStep(model, m.SGD(model, 0.1), m.SoftmaxCrossEntropy(comm=comm), accumulate=accumulate)
    for _ in range(2):
        comm.messages.clear()
        step(rng.standard_normal((6, 6, 6, 2)).astype("float32"), rng.integers(0, 3, 6).astype("int32"))
        sent = [message for message in comm.messages if message.name in ("fc", "conv2", "conv1")]
        assert [message.name for message in sent] == ["fc", "conv2", "conv1"]
        assert sum(message.nbytes for message in sent) == model.arena.grad.nbytes


@pytest.mark.parametrize("arguments", [dict(latency=-1, bandwidth=1), dict(latency=0, bandwidth=0)])
def test_impossible_links_are_refused(arguments):
    with pytest.raises(ValueError, match="AlphaBeta: (latency|bandwidth) must be"):
        AlphaBeta(**arguments)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="size must be"):
        SimulatedCommunicator(0, LINK)
    with pytest.raises(ValueError, match="local_size must be at most"):
        SimulatedCommunicator(2, LINK, local_size=3)


def test_rounded_messages_are_half_as_long_and_keep_their_bound(cpu_ops):
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((4, 6, 6, 2)).astype("float32"), rng.integers(0, 3, 4).astype("int32")
    found = {}
    for dtype in ("fp32", "bf16"):
        comm = virtual(4)
        model = m.Model(network(), comm=comm, group_bytes=0, message_dtype=dtype)
        loss = m.SoftmaxCrossEntropy(comm=comm)
        loss.forward(model.forward(images), labels)
        model.backward(loss.backward())
        for _ in model.arena.finished():
            pass
        found[dtype] = model.arena.grad.copy(), [message.nbytes for message in comm.messages]
    (exact, whole), (rounded, half) = found["fp32"], found["bf16"]
    assert [2 * n for n in half] == whole
    assert rounded.dtype == np.float32 and (exact != rounded).any()
    u = 2.0**-8
    assert (np.abs(rounded - exact) <= u * 2 * np.abs(exact) * (1 + 2 * u)).all()


def test_one_rank_rounds_nothing_and_other_dtypes_are_refused(cpu_ops):
    model = m.Model(network(), message_dtype="bf16")
    assert model.arena.wire is model.arena.grad
    with pytest.raises(ValueError, match="unknown message_dtype 'fp16'"):
        m.Model(network(), message_dtype="fp16")
