"""Laws of the benchmark's rows between ranks: each rank's times, messages of several layers, waiting."""

from __future__ import annotations

from collections import Counter

import pytest

from minidl import models
from minidl.bench import network
from minidl.bench.isolated import cases
from minidl.bench.rows import Table, network_rows
from minidl.bench.step import TrainingStep
from minidl.profile.steps import COMPUTE, SpanTime, StepTimes
from minidl.profile.timing import Timing
from tests.parts import Twins

CEILINGS = {"copy_gb_per_s": 20.0, "matrix_tflops": {"fp32": 0.1, "bf16": 0.1}, "vector_tflops": {"fp32": 0.1}}


def measured(group_bytes):
    """A step of two ranks, and its rows."""
    step = TrainingStep(models.build("mlp", (4, 4, 1), 3), batch=2, device="cpu", comm=Twins(), group_bytes=group_bytes)
    times = network.measure(step, seconds=0.01)
    found = cases(models.build("mlp", (4, 4, 1), 3), 2)
    ceilings = CEILINGS | {"all_reduce": {"bus_gb_per_s": 1.0}}
    table = Table("mlp", step, 2, found, (), times, {}, ceilings, lambda nbytes: Timing((nbytes * 1e-6,) * 3))
    return step, network_rows(table)


def test_a_ranks_samples_and_noise_are_its_own():
    """Dropout goes by global sample: those of a rank begin behind the batches of the ranks before."""
    steps, begun, expected = [], [], []
    for rank in (0, 1):
        comm = Twins()
        comm.rank = rank
        steps.append(TrainingStep(models.build("mlp", (4, 4, 1), 3), batch=5, device="cpu", comm=comm))
        steps[-1].eager = lambda x, labels, first: begun.append((x, labels, first))
        steps[-1]()
        steps[-1].model.expect = expected.append
        steps[-1].resize(7)
        steps[-1]()
    (x, labels, _), (more, _, _), (other, other_labels, _), _ = begun
    assert [first for *_, first in begun] == [0, 0, 5, 7] and expected == [7, 7], "messages are cut for the batch"
    assert len(x) == 5 and len(more) == 7
    assert (x != other).any() and (labels != other_labels).any()


@pytest.fixture(scope="module")
def two_ranks():
    return measured(1 << 20)


def test_a_pass_within_a_step_is_the_slowest_ranks_and_all_ranks_stand_beside():
    fast, slow = ([StepTimes(ms, [SpanTime("a", "forward", COMPUTE, 0.0, ms)])] * 2 for ms in (1.0, 3.0))

    class Pair:
        def share(self, own, name=""):
            plain, watched, silent, passes, unaccounted, accounted, mark_ms = own
            return [own, ([3.0] * 2, [3.0] * 2, silent, network._by_pass(slow), unaccounted, 0.5, 0.25)]

    kind = network.joined(Pair(), fast, fast, None)
    assert kind.passes["a", "forward"].ms == 3.0 and kind.pass_ranks["a", "forward"] == [1.0, 3.0]
    assert kind.ranks == [1.0, 3.0] and kind.plain.ms == 3.0
    assert (kind.accounted, kind.mark_ms) == (0.5, 0.25), "each of the rank where it is worst"


def test_rows_within_a_step_say_what_each_rank_took(two_ranks):
    for row in two_ranks[1]:
        if row["pass"] in ("forward", "backward_data", "backward_weight", "update"):
            assert len(row["rank_ms"]) == 2 and row["rank_ms"][row["slowest_rank"]] == max(row["rank_ms"])


def test_one_message_of_several_layers_is_one_rows_work(two_ranks):
    step, rows = two_ranks
    messages = [row for row in rows if row["pass"] == "all_reduce"]
    with_gradients = [layer.name for layer in step.model.layers if layer.specs]
    assert [row["layer"] for row in messages] == with_gradients
    carrier = with_gradients[0]  # the last to be ready in the backward pass
    carried = {row["layer"]: row["in"] for row in messages}
    assert carried.pop(carrier) is None and set(carried.values()) == {carrier}
    assert all(row["ms"] == 0 for row in messages if row["in"])
    whole = next(row for row in messages if row["in"] is None)
    nbytes = 4 * step.model.arena.trainable_size
    assert whole["message_bytes"] == nbytes and whole["message_layers"] == len(with_gradients)
    assert whole["ms"] == pytest.approx(nbytes * 1e-6)
    assert whole["floor_ms"] == pytest.approx(nbytes * 1e-6), "2(n-1)/n is 1 with two ranks"
    assert whole["bound"] == "network" and whole["transfer_ms"] is not None and whole["exposed_ms"] >= 0


def test_a_message_of_each_layer_has_the_bytes_of_its_gradients():
    step, rows = measured(0)
    expected = Counter()
    for segment in step.model.arena.segments:
        expected[segment.layer] += 4 * (segment.stop - segment.offset)
    messages = [row for row in rows if row["pass"] == "all_reduce"]
    assert len(messages) > 1 and {row["layer"]: row["message_bytes"] for row in messages} == expected
    assert all(row["ms"] == pytest.approx(row["message_bytes"] * 1e-6) for row in messages)


def test_communication_intensity_is_each_layers_own(two_ranks):
    step, rows = two_ranks
    for row in rows:
        if row["pass"] != "all_reduce":
            continue
        size = row["parameters"]
        assert row["wire_bytes"] == 4 * size
        own = [r for r in rows if r["layer"] == row["layer"] and r["pass"] != "all_reduce"]
        assert row["communication_intensity"] == pytest.approx(sum(r["flop"] for r in own) / (4 * size))


def test_the_wait_for_other_ranks_losses_is_a_row(two_ranks):
    assert ("loss", "wait") in {(row["layer"], row["pass"]) for row in two_ranks[1]}


def test_transfer_wait_and_exposed_of_a_message():
    ranks = [{("m", "all_reduce"): [2.0, 2.0], ("m", "wait"): [0.5, 0.5]},
             {("m", "all_reduce"): [5.0, 3.0], ("m", "wait"): [0.1, 0.1]}]  # fmt: skip
    message = network._message("m", ranks)
    assert (message.transfer, message.wait, message.exposed) == (2.0, 2.0, 0.5)


def test_factors_are_a_row_of_what_they_send(monkeypatch):
    """Two ranks of two samples each: one gives the other its rows of x and dy, 48 + 128 elements and 16 of padding."""
    monkeypatch.setattr("minidl.model.most_rows", lambda inputs, *others: 4 * (inputs == 48))
    step = TrainingStep(models.build("mlp", (4, 4, 3), 3), batch=2, device="cpu", comm=Twins(), group_bytes=1 << 20)
    found, times = cases(models.build("mlp", (4, 4, 3), 3), 2), network.measure(step, seconds=0.01)
    table = Table("mlp", step, 2, found, (), times, {}, CEILINGS, lambda nbytes: Timing((1.0,) * 3))
    messages = {row["layer"]: row for row in network_rows(table) if row["pass"] == "all_reduce"}
    first, *others = (row for row in messages.values() if row["in"] is None)
    inputs, outputs = step.model.layers[1].in_features, step.model.layers[1].out_features
    width = -(-(inputs + outputs) // 64) * 64
    assert first["factors"] and first["wire_bytes"] == 2 * 4 * width and first["message_bytes"] == 4 * 4 * width
    assert first["ms"] == first["transfer_ms"] < 1.0 and first["exposed_ms"] >= 0
    assert others and not any("factors" in row for row in others)
