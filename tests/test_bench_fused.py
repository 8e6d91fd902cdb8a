"""Laws of the rows of fused networks: work that a neighbour does stays a row, and says whose kernels do it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from minidl import models
from minidl.bench import network
from minidl.bench.isolated import cases
from minidl.bench.launches import Launches, absorbed, launches
from minidl.bench.rows import Table, network_rows
from minidl.bench.run import bench_network
from minidl.bench.setup import Setup
from minidl.bench.step import TrainingStep
from minidl.cuda.launch import dry_run
from minidl.dist.communicator import SOLO
from minidl.fusion import fuse
from minidl.profile.compare import compare_results
from minidl.profile.results import result
from minidl.profile.runs import runs
from minidl.profile.spans import GraphProfiler
from minidl.profile.views import view


def dry(plan, model="resnet20", size=32):
    """(graph, kernels by layer and pass, absorbed passes) of a step that nobody runs."""
    with dry_run():
        step = TrainingStep(models.build(model, (size, size, 3), 10), batch=4, device="cuda", precision="bf16")
        chosen = fuse(step.model, plan)
        kernels = launches(step)
        return step.model.graph, kernels, absorbed(step.model.graph, chosen, kernels)


def test_kernels_are_noted_under_the_pass_that_launches_them():
    graph, kernels, none = dry("none")
    assert none == {}
    for layer in graph.layers:
        assert kernels[layer.name, "forward"] or type(layer).__name__ == "Flatten", layer.name
        if layer.specs:
            assert kernels[layer.name, "backward_weight"], layer.name
    assert all(name.startswith("conv2d") for name in kernels["layer1.0.conv2", "forward"])
    assert kernels["optimizer", "update"] and kernels["loss", "forward"]


def test_launches_are_noted_beside_another_profiler():
    class Beside:
        def __init__(self):
            self.seen, self.graphs = [], []

        @contextmanager
        def span(self, layer, pass_name, stream=None):
            self.seen.append((layer, pass_name))
            yield

        @contextmanager
        def capturing(self):
            yield "marks"

        def launching(self, piece):
            self.graphs.append(piece)

    beside = Beside()
    noted = Launches(beside)
    assert isinstance(noted, GraphProfiler)
    with dry_run():
        step = TrainingStep(models.build("resnet20", (32, 32, 3), 10), batch=4, device="cuda", precision="bf16")
        expected = launches(step)
        step.observe(noted)
        step()  # outside: nobody notes
        assert not any(noted.found.values())
        with noted.noting():
            step()
    assert noted.found == expected and beside.seen == [*expected] * 2
    with noted.capturing() as marks:
        noted.launching(marks)
    assert beside.graphs == ["marks"]


@pytest.mark.parametrize("model", ["resnet20", "unet", "densenet121", "efficientnet_b0"])
@pytest.mark.parametrize("plan", ["elementwise", "statistics", "gradients", "bnff"])
def test_every_pass_without_kernels_has_a_layer_with_kernels_that_does_it(plan, model):
    _, before, _ = dry("none", model)
    graph, kernels, found = dry(plan, model)
    lost = {key for key in before if before[key] and not kernels[key]}
    assert lost and lost <= found.keys()
    names = {layer.name for layer in graph.layers}
    for (layer, pass_name), host in found.items():
        assert host in names
        passes = ("forward",) if pass_name == "forward" else ("backward_data", "backward_weight")
        assert any(kernels.get((host, p)) for p in passes)
        if host == layer:
            assert pass_name == "backward_data"
            assert any(kernel.startswith("conv2d_both") for kernel in kernels[host, "backward_weight"])


def test_who_does_the_work_by_hand():
    _, _, found = dry("elementwise")
    assert found["layer1.0.relu1", "backward_data"] == "layer1.0.bn1"
    assert found["layer1.0.add", "forward"] == "layer1.0.relu_out"
    _, _, found = dry("gradients", "resnet50", 64)
    assert found["layer1.0.relu1", "backward_data"] == "layer1.0.conv2"
    assert found["layer1.0.relu_out", "backward_data"] == "layer1.1.conv1", "the last to add to the join's gradient"
    assert found["relu", "backward_data"] == found["maxpool", "backward_data"] == "bn1", (
        "whose sums are of what is pooled"
    )
    assert found["relu", "forward"] == "maxpool", "which normalises what it reads"
    _, kernels, found = dry("gradients", "vgg16")
    (first, second), pools = [[f"features.{i}" for i in pair] for pair in ((0, 2), (3, 4))]
    assert found["features.1", "forward"] == first and found["features.1", "backward_data"] == second
    assert found[pools[0], "backward_data"] == pools[1]
    assert not kernels[pools[0], "forward"] and len(kernels[pools[1], "backward_data"]) == 1, "the one above masks"
    assert len(kernels["features.30", "backward_data"]) == 2, "mask, then scatter: no convolution is above"
    _, _, found = dry("bnff", "resnet50", 64)
    assert found["layer1.0.relu1", "forward"] == "layer1.0.conv2", "which normalises what it reads"
    for name in ("layer1.1.bn3", "layer1.1.conv3"):
        assert found[name, "backward_data"] == "layer1.1.conv3", "which makes both its gradients at once"


@pytest.fixture(scope="module")
def fused_rows():
    """Rows of a small network in a plan, on the CPU, whose layers are told which passes a GPU would not launch."""
    graph = models.build("resnet20", (16, 16, 3), 4)
    step = TrainingStep(models.build("resnet20", (16, 16, 3), 4), batch=2, device="cpu")
    plan = fuse(step.model, "elementwise")
    _, kernels, found = dry("elementwise")
    times = network.measure(step, seconds=0.01)
    return network_rows(Table("n", step, 2, cases(graph, 2), (), times, {}, None, None, plan.sites, kernels, found))


def test_absorbed_passes_are_rows_of_no_time_that_say_where_it_went(fused_rows):
    rows = {(row["layer"], row["pass"]): row for row in fused_rows}
    one = rows["layer1.0.relu1", "backward_data"]
    assert (one["in"], one["ms"], one["timing"], one["kernels"]) == ("layer1.0.bn1", 0.0, None, [])
    assert one["flop"] > 0 and one["roof_share"] is None
    assert rows["layer1.0.bn1", "backward_data"]["ms"] > 0
    assert rows["layer1.0.bn1", "forward"]["plan"] == "elementwise" and rows["fc", "forward"]["plan"] is None
    assert all(row["timing"] == "step" for row in fused_rows if row["ms"] and row["in"] is None)


def test_tables_and_comparisons_show_whose_work_it_is(fused_rows):
    content = result("model", fused_rows, {"cpu": "this one"})
    (run,) = runs(content, "f.json")
    _, columns, lines = view(run, "time")
    cells = {line[0]: dict(zip(columns, line, strict=True)) for line in lines}
    assert cells["layer1.0.relu1"]["bwd-data"] == "in layer1.0.bn1"
    verdicts = {row.key: row for row in compare_results(content, content).rows}
    (notes,) = (row.notes for key, row in verdicts.items() if key[1:3] == ("layer1.0.relu1", "backward_data"))
    assert notes == ("in layer1.0.bn1",)


def test_a_fused_network_on_a_gpu(cuda_ops):
    found = bench_network(Setup("resnet20", 4, "bf16", "cuda", fusion="gradients"), SOLO, None, seconds=0.1)
    rows = {(row["layer"], row["pass"]): row for row in found["rows"]}
    _, kernels, hosts = dry("gradients")
    for key, host in hosts.items():
        assert key not in rows or (rows[key]["in"], rows[key]["ms"]) == (host, 0.0)
    for key, names in kernels.items():
        if key in rows and rows[key]["kernels"] is not None and key[0] not in ("loss", "optimizer"):
            assert [kernel["name"] for kernel in rows[key]["kernels"]] == names, key


@pytest.mark.alone
def test_the_energy_of_a_step_is_about_its_power_times_its_time(cuda_ops):
    from minidl.profile.energy import Meter

    meter = Meter(cuda_ops)
    if meter.reason is not None:
        pytest.skip(meter.reason)
    setup = Setup("resnet50", 64, "bf16", "cuda")
    found = bench_network(setup, SOLO, None, isolated=False, seconds=0.2, energy=meter.energy_per_call)
    watts = found["step"]["energy_mj"] / found["step"]["graph"]["ms"]
    assert 100 < watts < 1000, "a GPU at work draws more than an idle one, and no more than its board may"
