"""The trace says what a step does with memory: as the store keeps it, the profiler sees it, a hand counts it."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.cuda.launch import dry_run
from minidl.memory import Step, Tensor, Trace, problem, record
from minidl.memory.record import blank, record_step
from minidl.profile.spans import SpanRecorder
from tests.memory_cases import real_trace

NETWORKS = [("resnet20", 32, 4), ("resnet50", 32, 2), ("vgg16", 32, 2), ("unet", 32, 2), ("densenet121", 32, 2)]
PASSES = ("forward", "backward_weight", "backward_data", "update")


def _trained(name: str, image: int, batch: int) -> tuple[m.Model, SpanRecorder, int]:
    """One real step on the CPU: the model, its spans, and what the store held between the two passes."""
    classes = 2 if name == "unet" else 10
    spans = SpanRecorder()
    model = m.Model(blank(models.build(name, (image, image, 3), classes)), profiler=spans)
    optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
    loss.profiler = spans
    shape = (batch, image, image) if name == "unet" else (batch,)
    logits = model.forward(np.zeros((batch, image, image, 3), np.float32))
    held = model.store.saved_bytes
    loss.forward(logits, np.zeros(shape, np.int32))
    model.backward(loss.backward())
    optimizer.step()
    return model, spans, held


@pytest.mark.parametrize(("name", "image", "batch"), NETWORKS)
def test_steps_and_saved_bytes_are_those_of_a_real_step(name, image, batch):
    trace = real_trace(name, image, batch)
    model, spans, held = _trained(name, image, batch)
    assert [(s.name, s.pass_name) for s in trace.steps] == [e for e in spans.events if e[1] in PASSES]
    assert trace.steps[trace.loss].title == "loss backward_data"
    assert sum(t.bytes for t in trace.tensors if t.saved) == held
    state = trace.resident_bytes
    assert state["weight"] == state["gradient"] == state["momentum"] >= 4 * model.num_parameters
    assert state["weight"] - 4 * model.num_parameters <= 256 * len(model.arena.segments)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_half_precision_halves_activations_and_adds_a_working_copy(precision):
    def traced(name):
        return record(models.build("resnet20", (32, 32, 3), 10), 8, precision=name)

    trace, whole = traced(precision), traced("fp32")
    by_name = {t.name: t.bytes for t in whole.tensors}
    for tensor in trace.tensors:
        if tensor.name.endswith("conv1:y"):
            assert tensor.bytes * (1 if precision == "fp32" else 2) == by_name[tensor.name]
    assert trace.resident_bytes["working"] == (0 if precision == "fp32" else trace.resident_bytes["weight"] // 2)
    assert trace.resident_bytes["gradient"] == whole.resident_bytes["gradient"], "gradients stay float32"


def _toy() -> m.Graph:
    graph = m.Graph()
    x = graph.input((8, 8, 4))
    y = m.ReLU(name="relu")(m.Conv2d(4, 8, 3, padding=1, bias=False, name="conv")(x))
    z = m.Conv2d(8, 8, 1, bias=False, name="branch")(y)
    z = m.Add(name="add")(z, y)
    return graph.output(m.Linear(8 * 8 * 8, 5, bias=False, name="head")(m.Flatten(name="flat")(z)))


def test_a_small_network_is_traced_as_it_is_counted_by_hand():
    """Views (Flatten), a tensor that three layers read, gradients that meet at the fan-out."""
    trace = record(_toy(), 3, momentum=0)
    titles = [step.title for step in trace.steps]
    assert titles[:8] == [
        "conv forward", "relu forward", "branch forward", "add forward", "flat forward", "head forward",
        "loss forward", "loss backward_data",
    ]  # fmt: skip
    at = {title: t for t, title in enumerate(titles)}
    tensors = {t.name: t for t in trace.tensors}
    size = 3 * 8 * 8 * 8 * 4
    relu = tensors["relu:y"]  # read by branch and add; back: by the branch's weight gradient, then by itself
    assert relu.bytes == size and relu.saved
    assert relu.touches == (
        at["relu forward"], at["branch forward"], at["add forward"], at["branch backward_weight"],
        at["relu backward_data"],
    )  # fmt: skip
    joined = tensors["add:y"]  # flattened: the same memory, saved by the head
    assert joined.bytes == size and joined.saved
    assert joined.touches == (at["add forward"], at["head forward"], at["head backward_weight"])
    assert not tensors["conv:y"].saved, "a ReLU keeps its output, nothing keeps its input"
    assert tensors["conv:y"].touches == (at["conv forward"], at["relu forward"])
    assert tensors["input:x"].given and tensors["input:x"].touches == (0, at["conv backward_weight"])
    assert trace.resident_bytes["momentum"] == 0
    weight = tensors["branch.weight:weight"]
    assert set(weight.touches) >= {at["branch forward"], at["branch backward_data"]} and weight.resident
    assert tensors["branch.weight:gradient"].touches[0] == at["branch backward_weight"]


def test_base_load_of_the_small_network():
    """Everything evicted at the loss: parameters, the batch, what the loss itself holds, and nothing else."""
    trace = record(_toy(), 3, momentum=0)
    p = problem(trace, (0, 0), least=0)
    state = sum(trace.resident_bytes.values())
    held = sum(t.bytes for t in trace.tensors if t.kind == "input" or (not t.resident and trace.loss in t.touches))
    assert p.base[trace.loss] == state + held + trace.steps[trace.loss].workspace
    saved = {"relu:y", "add:y"}
    assert {trace.tensors[g.tensor].name for g in p.gaps} == saved
    assert p.usage[trace.loss] - p.base[trace.loss] == sum(t.bytes for t in trace.tensors if t.name in saved)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_pass_is_seen_to_touch_what_its_layer_reads_and_makes(precision):
    """Whatever way a kernel takes its arrays: as arguments, or behind tensor maps."""
    graph = models.build("resnet50", (64, 64, 3), 10)
    inputs = {node.name: [graph.nodes[i].name for i in node.inputs] for node in graph.nodes}
    trace = record(graph, 4, precision=precision)
    maker = {tensor.name.partition(":")[0]: tensor for tensor in trace.tensors if tensor.name.endswith((":y", ":x"))}
    seen = 0
    for t, step in enumerate(trace.steps):
        if step.pass_name == "forward" and step.layer in ("Conv2d", "BatchNorm2d", "ReLU", "Add"):
            for name in [*inputs[step.name], step.name]:
                if name in maker:
                    seen += 1
                    assert t in maker[name].touches, f"{step.title} and {maker[name].name}"
    assert seen > 300


def test_steps_carry_the_model_work_of_their_layers():
    trace = real_trace("resnet50", 32, 2)
    graph = models.build("resnet50", (32, 32, 3), 10)
    shapes = graph.shapes((2, 32, 32, 3))
    for node in graph.nodes[1:]:
        cost = node.layer.cost(*(shapes[i] for i in node.inputs), itemsize=4)
        found = [s for s in trace.steps if s.name == node.name and s.pass_name == "forward"]
        assert (found[0].flop, found[0].bytes) == (cost.forward.flop, cost.forward.bytes)
        assert found[0].matrix == any(spec.product for spec in node.layer.specs)


def test_batches_far_beyond_this_machine_are_traced_in_little_memory():
    """Nothing is touched: 40 GB of activations cost a process megabytes."""
    code = """
import resource
from minidl import models
from minidl.memory import problem, record
graph = models.build("resnet50", (224, 224, 3), 1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = record(graph, 512)
assert problem(trace).peak > 40e9, problem(trace).peak
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert used < 500_000, used
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


def test_tracing_needs_no_cupy():
    code = """
import sys
sys.modules["cupy"] = None
from minidl import models
from minidl.memory import pin, problem, record
p = problem(record(models.build("resnet20", (32, 32, 3), 10), 64))
assert pin(p, p.floor).moved_bytes
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_outside_a_dry_run_numpy_arrays_are_the_cpus():
    x = np.zeros((1, 4, 4, 3), np.float32)
    assert m.backend.ops_of(x).name == "cpu"
    with dry_run():
        assert m.backend.ops_of(x).name == "cuda"
    assert m.backend.ops_of(x).name == "cpu"


def test_what_cannot_be_traced_is_refused():
    graph = models.build("resnet20", (32, 32, 3), 10)
    with pytest.raises(ValueError, match="batch must be an integer of at least 1, got 0"):
        record(graph, 0)
    with pytest.raises(TypeError, match=r"graph must be a Graph, got Model .*; of a model: model.graph.unbound\(\)"):
        record(m.Model(models.build("mlp", (8, 8, 1), 10)), 2)
    record(graph, 2)
    with pytest.raises(RuntimeError, match="build the graph again"):
        record(graph, 2)
    steps = (Step("a", "forward"), Step("b", "backward_data"))
    with pytest.raises(ValueError, match="loss must be a step in 0..1"):
        Trace(steps, (), 2)
    with pytest.raises(ValueError, match="touches of t must be ascending step numbers"):
        Trace(steps, (Tensor("t", "activation", 1, (1, 0)),), 0)
    with pytest.raises(ValueError, match="bytes of t must be at least 0"):
        Trace(steps, (Tensor("t", "activation", -1, (0, 1)),), 0)


@pytest.mark.parametrize(
    ("name", "batch", "ring", "of_two"), [("resnet50", 256, 0.8, 0.75), ("resnet152", 128, 0.9, 0.9)]
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_ring_saves_what_gradients_take_at_the_worst_moment(name, batch, ring, of_two, precision):
    """With what weight gradients need beside while they are made, such as the partial sums of split products."""

    def taken(slots: int) -> int:
        """Bytes by which gradients and that raise what a step holds at its worst."""
        trace = record_step(models.build(name, (224, 224, 3), 1000), batch, precision=precision, slots=slots).trace
        steps = [replace(s, workspace=0) if s.pass_name == "backward_weight" else s for s in trace.steps]
        tensors = [replace(t, bytes=0) if t.kind == "gradient" else t for t in trace.tensors]
        without = replace(trace, steps=tuple(steps), tensors=tuple(tensors))
        return problem(trace).peak - problem(without).peak

    kept = taken(0)
    assert kept >= {"resnet50": 97, "resnet152": 229}[name] << 20, "one float32 for each parameter"
    assert taken(1) <= (1 - ring) * kept
    assert taken(2) <= (1 - of_two) * kept, "as a double buffer"
