"""The table of any torch module: a row for each pass of each leaf, with minidl's count of its work."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.bench.layers import empty_row
from minidl.precision import precision
from minidl.profile.timing import Budget

torch = pytest.importorskip("torch", reason="needs torch as a peer")
from minidl.bench import torch_table  # noqa: E402
from minidl.bench.torch_calls import Operands  # noqa: E402
from minidl.bench.torch_twin import TorchGraph  # noqa: E402

QUICK = Budget(samples=2, seconds=0.0, least=2, sample_ms=0.01)


class Odd(torch.nn.Module):
    """A leaf that minidl has nothing like: two outputs, one of integers, and an option."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, *, shift):
        return {"y": x * self.scale + shift, "n": torch.arange(3)}


class Block(torch.nn.Module):
    """A residual block with an in-place ReLU used twice, and what stands between layers."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = torch.nn.BatchNorm2d(4)
        self.relu = torch.nn.ReLU(inplace=True)
        self.odd = Odd()
        self.mish = torch.nn.Mish()
        self.flat = torch.nn.Flatten()
        self.fc = torch.nn.Linear(4 * 25, 7)

    def forward(self, x):
        y = self.relu(self.bn(self.conv(x)))
        y = self.relu(y + self.odd(y, shift=torch.ones(1))["y"])
        return self.fc(self.flat(self.mish(y)))


def table(module, x, **options):
    options = {"budget": QUICK, "ways": ("hot",)} | options
    return torch_table.bench_module(module, x, **options)


def test_the_table_of_a_module_has_a_row_for_each_pass_of_each_leaf_in_order(rng):
    module = Block()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    images = rng.standard_normal((2, 5, 5, 3)).astype(np.float32)
    rows = table(module, images, case="block", ceilings=None)
    found = [(row["layer"], row["pass"]) for row in rows]
    three = ("forward", "backward_data", "backward_weight")
    assert found == [
        ("conv", "forward"), ("conv", "backward_weight"),  # nobody asks for the gradient of the images
        *(("bn", name) for name in three), *(("relu", name) for name in three[:2]),
        *(("odd", name) for name in three), *(("relu", name) for name in three[:2]),
        *(("mish", name) for name in three[:2]), *(("flat", name) for name in three[:2]),
        *(("fc", name) for name in three), ("step", "unaccounted"), ("step", "step"),
    ]  # fmt: skip
    assert [row["index"] for row in rows[:-2]] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7]
    keys = empty_row("", "", "", precision("fp32"), "cpu", 1).keys()
    assert all(row.keys() == keys and row["arm"] == "torch" and row["case"] == "block" for row in rows)
    json.dumps(rows, allow_nan=False)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed"
    assert module.relu.inplace
    first, second = ([row for row in rows if row["index"] == i] for i in (2, 4))
    assert [row["ms"] for row in first] == [row["ms"] for row in second], "equal leaves are measured once"

    by = {(row["index"], row["pass"]): row for row in rows}
    conv, bn = m.Conv2d(3, 4, 3, padding=1, bias=False).cost((2, 5, 5, 3)), m.BatchNorm2d(4).cost((2, 5, 5, 4))
    assert by[0, "forward"]["input_shapes"] == [[2, 5, 5, 3]] and by[0, "forward"]["output_shape"] == [2, 5, 5, 4]
    assert (by[0, "backward_weight"]["flop"], by[0, "backward_weight"]["bytes"]) == (
        conv.backward_weight.flop, conv.backward_weight.bytes
    )  # fmt: skip
    joint = bn.backward_data + bn.backward_weight
    assert (by[1, "backward_data"]["flop"], by[1, "backward_data"]["bytes"]) == (joint.flop, joint.bytes)
    assert by[1, "backward_weight"]["ms"] == 0.0 and by[1, "backward_weight"]["in"] == "bn"
    assert by[3, "forward"]["flop"] is by[3, "forward"]["bytes"] is by[5, "backward_data"]["flop"] is None
    assert by[3, "forward"]["type"] == "Odd" and by[3, "forward"]["parameters"] == 1
    assert rows[-1]["flop"] is None, "not all of the step's work is known"
    work = [row for row in rows[:-2] if row["in"] is None]
    assert all(row["ms"] > 0 and row["timing"] == "hot" and row["timings"]["hot"]["n"] == 2 for row in work)
    assert rows[-2]["ms"] == pytest.approx(rows[-1]["ms"] - sum(row["ms"] for row in work))


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_the_table_of_a_twin_has_minidls_work(mode):
    graph = models.build("unet", (16, 16, 3), 5, width=4)
    images = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    rows = table(TorchGraph(graph), images, precision=mode)
    shapes = graph.shapes((2, 16, 16, 3))
    itemsize = precision(mode).storage.itemsize
    seen = {}
    for row in rows[:-2]:
        total = seen.setdefault(row["index"], [0, 0])
        for i, key in enumerate(("flop", "bytes")):
            total[i] += row[key] or 0
    for node, (flop, moved) in zip(graph.nodes[1:], seen.values(), strict=True):
        whole = node.layer.cost(*(shapes[i] for i in node.inputs), itemsize=itemsize)
        asked = whole.total if node.index > 1 else whole.forward + whole.backward_weight
        assert (flop, moved) == (asked.flop, asked.bytes), node.name
    assert {row["dtype"] for row in rows} == {mode}
    work = [row for row in rows[:-2] if row["in"] is None]
    assert rows[-1]["flop"] == sum(row["flop"] for row in work)


def test_a_single_module_is_measured_as_a_layer_inside_a_network():
    ceilings = {"copy_gb_per_s": 10.0, "matrix_tflops": {"fp32": 1.0}, "vector_tflops": {"fp32": 0.1}}
    rows = table(torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), ceilings=ceilings)
    assert [row["pass"] for row in rows] == ["forward", "backward_data", "backward_weight", "unaccounted", "step"]
    assert rows[0]["layer"] == "Conv2d" and rows[0]["case"] == "Conv2d/2x3x8x8"
    cost = m.Conv2d(3, 4, 3).cost((2, 8, 8, 3))
    assert rows[-1]["flop"] == cost.total.flop
    assert rows[0]["floor_ms"] == pytest.approx(max(cost.forward.flop / 1e9, cost.forward.bytes / 1e7))
    assert rows[0]["bound"] == "memory" and rows[0]["roof_share"] == pytest.approx(rows[0]["floor_ms"] / rows[0]["ms"])
    inplace = table(torch.nn.ReLU(inplace=True), torch.randn(4, 5))
    assert [row["pass"] for row in inplace] == ["forward", "backward_data", "unaccounted", "step"]


@pytest.mark.parametrize(
    "module, x",
    [
        (torch.nn.Conv2d(3, 4, 3, padding="same"), torch.randn(1, 3, 5, 5)),
        (torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), torch.randn(1, 3, 5, 5)),
        (torch.nn.AdaptiveAvgPool2d((None, 2)), torch.randn(1, 3, 5, 5)),
        (torch.nn.Embedding(10, 3), torch.tensor([[1, 2], [3, 4]])),
        (torch.nn.Conv2d(3, 4, 3), torch.randn(3, 5, 5)),
        (torch.nn.MultiheadAttention(4, 2, batch_first=True), (torch.randn(2, 3, 4),) * 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_minidl_has_no_layer_for_is_timed_without_flop(module, x):
    rows = table(module, x)
    assert len(rows) >= 3 and all(row["flop"] is None and row["bytes"] is None for row in rows)
    assert all(row["ms"] > 0 for row in rows if row["in"] is None and row["pass"] != "unaccounted")


def test_other_numbers_of_axes_have_the_work_of_their_elements():
    norm = table(torch.nn.BatchNorm1d(3), torch.randn(4, 3, 6))
    assert norm[0]["flop"] == m.BatchNorm2d(3).cost((24, 3)).forward.flop and norm[0]["input_shapes"] == [[4, 3, 6]]
    rows = table(torch.nn.Linear(6, 5), torch.randn(2, 3, 4, 6))
    assert rows[0]["flop"] == m.Linear(6, 5).cost((24, 6)).forward.flop
    assert rows[0]["input_shapes"] == [[2, 3, 4, 6]] and rows[0]["output_shape"] == [2, 3, 4, 5]


@pytest.mark.parametrize("make", [lambda: torch.nn.LSTM(3, 4), lambda: torch.nn.MultiheadAttention(3, 1)])
def test_gradients_of_modules_with_ways_of_their_own_reach_all_parameters(make):
    module = make()
    args = [torch.randn(5, 2, 3).requires_grad_() for _ in range(1 if isinstance(module, torch.nn.LSTM) else 3)]
    found = Operands(module, args).gradients(inputs=True, parameters=True)
    assert len(found) == len(args) + len(list(module.parameters()))
    assert all(g is not None and g.isfinite().all() for g in found)


def test_operands_ask_for_nothing_that_has_no_gradient():
    one = Operands(torch.nn.ReLU(), [torch.randn(3)])
    assert one.inputs == () and one.parameters == () and one.outputs() == ()


# -- modules by name ------------------------------------------------------------------------------------


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A working directory with a file of modules."""
    (tmp_path / "peer_nets.py").write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Linear(2, 3)\n"
        "def needs(width):\n    return torch.nn.Linear(2, width)\n"
        "ready = torch.nn.ReLU()\nnumber = 3\n"
        "class Family:\n    small = staticmethod(build)\n"
    )
    monkeypatch.chdir(tmp_path)


def test_modules_are_loaded_by_name(nets):
    assert isinstance(torch_table.load("peer_nets:build"), torch.nn.Linear)
    assert isinstance(torch_table.load("peer_nets:ready"), torch.nn.ReLU)
    assert isinstance(torch_table.load("peer_nets:Family.small"), torch.nn.Linear)
    assert isinstance(torch_table.load("torch.nn:ReLU"), torch.nn.ReLU)


@pytest.mark.parametrize(
    "spec, kind, message",
    [
        ("resnet18", ValueError, "MODULE:NAME.*got 'resnet18'"),
        ("peer_nets:", ValueError, "MODULE:NAME"),
        ("no_such_package_at_all:net", ValueError, "no_such_package_at_all cannot be imported"),
        ("peer_nets:biuld", ValueError, "unknown name in peer_nets 'biuld'; did you mean 'build'"),
        ("peer_nets:needs", TypeError, "width.*takes no arguments"),
        ("peer_nets:number", TypeError, "a torch.nn.Module, or a function that returns one"),
    ],
)
def test_a_name_that_leads_to_no_module_is_refused(nets, spec, kind, message):
    with pytest.raises(kind, match=message):
        torch_table.load(spec)


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Kept ceilings, so that a test does not measure the machine."""
    from minidl.profile import ceilings

    record = {"copy_gb_per_s": 10.0, "matrix_tflops": {"fp32": 1.0}, "vector_tflops": {"fp32": 0.1}, "device": "cpu"}
    monkeypatch.setattr(ceilings, "find", lambda ops, comm=None, **options: record)
    (tmp_path / "peer_command_nets.py").write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.SiLU())\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(**changes):
    """Options of ``minidl bench layers --torch``, as its parser leaves them."""
    usual = {
        "torch": "peer_command_nets:build", "batch": 2, "image_size": 8, "precision": "fp32",
        "device": "cpu", "ways": ["hot"], "remeasure": False, "samples": 3,
    }  # fmt: skip
    return argparse.Namespace(**usual | changes)


def test_the_command_makes_the_content_of_a_result_file(home):
    from minidl.profile import results, views
    from minidl.profile.runs import runs

    results.write(home / "out.json", torch_table.bench_command(given()))
    content = results.load(home / "out.json")
    assert content["benchmark"] == "layers"
    assert content["setup"] == {
        "model": "peer_command_nets:build", "batch": 2, "precision": "fp32", "device": "cpu", "ranks": 1,
        "image_size": 8, "classes": None, "torch": torch.__version__,
    }  # fmt: skip
    whole = content["rows"][-1]["timings"]
    assert content["step"]["eager"] == whole["step"] and content["step"]["graph"] == whole["graph_step"]
    assert content["step"]["exposed_ms"] == 0.0 and content["step"]["compute_only"] is None
    assert content["step"]["images_per_s"] == pytest.approx(2e3 / content["rows"][-1]["ms"])
    assert [row["type"] for row in content["rows"][:-2]] == ["Conv2d"] * 2 + ["ReLU"] * 2 + ["SiLU"] * 2
    assert content["rows"][0]["case"] == "torch build/8x8/b2" and content["rows"][0]["roof_share"] > 0
    found = runs(content, "out.json")
    shown, lacking = views.tables(found, views.VIEWS)
    assert len(shown) + len(lacking) == len(views.VIEWS)
    for _, columns, cells in shown:
        assert cells and all(len(line) == len(columns) for line in cells)


@pytest.mark.parametrize("option", ["image_size", "batch", "samples"])
def test_sizes_that_cannot_be_are_refused(home, option):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} must be an integer of at least"):
        torch_table.bench_command(given(**{option: -1}))
