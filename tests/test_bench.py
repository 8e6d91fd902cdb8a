"""Laws of the per-layer benchmark: every pass is there, figures follow from each other, errors are one clear line."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import minidl as m
from minidl import backend, models
from minidl import layers as layer_types
from minidl.bench import layers, network
from minidl.bench.isolated import Case, Passes, cases
from minidl.bench.run import bench_layer, bench_network, beyond_roof, merged, new_step
from minidl.bench.setup import Setup, layer_case, parse_layer, parse_shape
from minidl.cuda.launch import dry_run
from minidl.dist.communicator import SOLO
from minidl.precision import bfloat16, precision
from minidl.profile import results, timer
from minidl.profile.cost import PassCost
from minidl.profile.plots import style
from minidl.profile.runs import FAMILIES, NotInFile, family, runs
from minidl.profile.steps import COMPUTE, SpanTime, StepTimes
from minidl.profile.timing import Budget, Timing
from minidl.profile.views import VIEWS, default_view, footer, networks, tables, view

QUICK = layers.Options(budget=Budget(samples=3, seconds=0.01, least=2, sample_ms=0.1))
CEILINGS = {"copy_gb_per_s": 20.0, "matrix_tflops": {"fp32": 0.1, "bf16": 0.1}, "vector_tflops": {"fp32": 0.1}}


@pytest.fixture(scope="module")
def content():
    """A whole small network on the CPU, as its result file holds it."""
    setup = Setup("resnet20", 2, "fp32", "cpu", image_size=16)
    found = bench_network(setup, SOLO, CEILINGS, options=QUICK, seconds=0.05)
    return json.loads(json.dumps(found, allow_nan=False))


def rows_by_key(content):
    return {(row["layer"], row["pass"]): row for row in content["rows"]}


# -- rows -------------------------------------------------------------------------------------------------------------


def test_every_pass_of_every_layer_has_a_row(content):
    rows = rows_by_key(content)
    graph = models.build("resnet20", (16, 16, 3), 10)
    for case in cases(graph, 2):
        cost = {p: case.cost(p, 4) for p in ("forward", "backward_data", "backward_weight")}
        for name, work in cost.items():
            asked = work != PassCost() and (name != "backward_data" or case.needs_input_grad)
            asked = asked and (name != "backward_weight" or case.layer.has_backward_weight)
            assert ((case.layer.name, name) in rows) == asked, (case.layer.name, name)
    assert ("conv1", "backward_data") not in rows, "nobody asks for the gradient of the images"
    assert {("loss", "forward"), ("optimizer", "update"), ("step", "unaccounted"), ("step", "step")} <= rows.keys()
    assert len(rows) == len(content["rows"]), "no row twice"


def test_every_row_knows_the_same_things(content):
    keys = {frozenset(row) for row in content["rows"]}
    assert len(keys) == 1
    for row in content["rows"]:
        assert row["ms"] == row["timings"][row["timing"]]["ms"] and row["spread"] >= 0
        assert row["timings"]["step"]["n"] >= network.FEWEST
        assert row["timings"]["graph_step"] is None and row["timings"]["replayed"] is None, "the CPU has no graphs"


def test_derived_figures_follow_from_measured_ones(content):
    for row in content["rows"]:
        if row["flop"] is None or row["pass"] == "step":
            continue
        assert row["tflops"] == pytest.approx(row["flop"] / row["ms"] * 1e-9)
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] * 1e-6)
        assert row["intensity"] == pytest.approx(row["flop"] / row["bytes"])
        assert row["floor_ms"] == pytest.approx(max(row["bytes"] / 20e6, row["flop"] / 0.1e9))
        assert row["roof_share"] == pytest.approx(row["floor_ms"] / row["ms"])


def test_the_steps_work_is_the_sum_of_its_rows(content):
    rows = [row for row in content["rows"] if row["pass"] not in ("step", "unaccounted")]
    whole = rows_by_key(content)["step", "step"]
    for key in ("flop", "bytes"):
        assert whole[key] == sum(row[key] for row in rows)


def test_within_steps_layers_and_the_rest_make_up_the_step():
    step_ms, parts = [10.0, 12.0, 11.0], {("a", "forward"): [4.0, 5.0, 4.0], ("b", "forward"): [5.0, 6.0, 6.0]}
    rest = [1.0, 1.0, 1.0]
    kind = network.joined(SOLO, *[[made(ms, parts, rest, i) for i, ms in enumerate(step_ms)]] * 2, None)
    assert kind.plain.ms == 11 and kind.unaccounted.ms == 1 and kind.passes["a", "forward"].ms == 4
    assert sum(t.ms for t in kind.passes.values()) + kind.unaccounted.ms == kind.plain.ms


def made(ms, parts, rest, i):
    return StepTimes(ms, [SpanTime(*key, COMPUTE, 0.0, samples[i]) for key, samples in parts.items()])


def test_saved_bytes_add_up_to_what_the_store_holds(content):
    model = m.Model(models.build("resnet20", (16, 16, 3), 10))
    x = model.ops.zeros((2, 16, 16, 3), "float32")
    model.forward(x)
    saved = sum(row["saved_bytes"] or 0 for row in content["rows"])
    assert saved == model.store.saved_bytes > 0


def test_parameters_add_up_to_the_models(content):
    counted = {row["layer"]: row["parameters"] for row in content["rows"] if row["parameters"]}
    assert sum(counted.values()) == content["setup"]["parameters"]


def test_equal_layers_are_measured_once_and_keep_their_own_steps(content):
    rows = rows_by_key(content)
    a, b = rows["layer1.1.conv1", "forward"], rows["layer1.2.conv1", "forward"]
    assert a["timings"]["cold"] == b["timings"]["cold"]
    assert a["timings"]["step"]["samples_ms"] != b["timings"]["step"]["samples_ms"]


def test_the_gradient_added_at_a_fan_out_is_work_of_its_layer(content):
    rows = rows_by_key(content)
    n = 2 * 16 * 16 * 16
    # layer1.1's input is also read by the addition, whose gradient comes first: conv1 adds it to its own.
    plain, adding = rows["layer1.1.conv2", "backward_data"], rows["layer1.1.conv1", "backward_data"]
    assert adding["flop"] == plain["flop"] + n and adding["bytes"] == plain["bytes"] + 4 * n


# -- isolated passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, shape", [
    ("Conv2d(4, 6, 3, padding=1)", "2x5x5x4"),
    ("ConvTranspose2d(4, 6, 2, stride=2)", "2x5x5x4"),
    ("Linear(7, 3)", "5x7"),
    ("BatchNorm2d(4)", "3x4x4x4"),
    ("BatchNorm2d(4, affine=False)", "3x4x4x4"),
    ("ReLU()", "2x3x3x4"),
    ("MaxPool2d(2)", "2x4x4x3"),
    ("AdaptiveAvgPool2d(1)", "2x4x4x3"),
    ("Dropout(0.5)", "2x4x4x3"),
    ("Pad(1)", "2x4x4x3"),
])  # fmt: skip
def test_isolated_passes_compute_what_the_layer_computes(text, shape, ops):
    """Timed calls are the real ones: gradients equal those of forward and backward through the layer's own door."""
    case = layer_case(text, [shape])
    passes = Passes(case, ops, precision("fp32"), timer(ops), 1 << 30)
    calls = passes.calls()
    other = parse_layer(text).to(ops.name)
    if case.layer.specs:
        other.load_state_dict(case.layer.state_dict())
    if text.startswith("Dropout"):
        other.random.step = case.layer.random.step - 1
    y = other.forward(*passes.x[0])
    dx = other.backward(passes.dy[0])
    close(ops, calls["forward"][0](), y)
    close(ops, calls["backward_data"][0]()[0], dx)
    if case.layer.specs:
        calls["backward_weight"][0]()
        for name, gradient in other.params.gradients().items():
            close(ops, case.layer.params.gradients()[name], gradient)


def close(ops, a, b):
    a, b = ops.to_host(a), ops.to_host(b)
    assert a.shape == b.shape and abs(a - b).max() <= 1e-6 * max(1, abs(b).max())


def test_a_join_adds_what_further_readers_gave(cpu_ops):
    layer = m.Add()
    case = Case(1, layer, ((2, 3, 3, 4), (2, 3, 3, 4)), (True, False))
    passes = Passes(case, cpu_ops, precision("fp32"), timer(cpu_ops), 1 << 30)
    first, second = passes.calls()["backward_data"][0]()
    assert (first == passes.dy[0] + passes.adds[0]).all() and (second == passes.dy[0]).all()
    assert case.cost("backward_data", 4) == PassCost(72, 3 * 72 * 4)


def test_the_slowest_rank_counts():
    def measured(ms):
        return {"forward": ("hot", {"hot": Timing((ms, ms)).record()})}

    comm = SimpleNamespace(size=3, share=lambda own: [measured(2.0), measured(5.0), measured(3.0)])
    row = {"timing": "hot", "timings": {"hot": Timing((2.0, 2.0)).record()}}
    joined = layers._joined({"forward": row}, comm)["forward"]
    assert joined["ms"] == 5 and joined["slowest_rank"] == 1 and joined["rank_ms"] == [2, 5, 3]


def test_nothing_is_left_of_a_layer_that_was_measured(ops):
    """What is kept would count as memory of the steps that are measured next."""
    case = layer_case("Conv2d(4, 6, 3)", ["2x9x9x4"])
    before = dict(vars(case.layer))
    layers.measure([case], "t", ops=ops, precision=precision("fp32"), options=QUICK)
    assert vars(case.layer) == before


def test_peers_stand_beside_the_pass_they_did(cpu_ops):
    def rival(case, mode, device, sets):
        return {"forward": 0.5, "backward_data": None}

    options = layers.Options(("hot",), QUICK.budget, peers={"rival": rival})
    rows = layers.measure(
        [layer_case("ReLU()", ["2x4x4x8"])], "t", ops=cpu_ops, precision=precision("fp32"), options=options
    )
    assert {row["pass"]: row["peers"] for row in rows} == {"forward": {"rival": 0.5}, "backward_data": {}}


NORM_KERNELS = [
    "batch_norm.batch_norm_stats_kernel",
    "batch_norm_merge.batch_norm_moments_kernel",
    "batch_norm.batch_norm_apply_kernel",
]


def test_kernels_are_named_in_order_without_a_gpu():
    ops = backend.get_ops("cuda")
    with dry_run():
        layer, x = m.BatchNorm2d(64).to("cuda"), ops.empty((8, 14, 14, 64), bfloat16)
        rows = layers.kernel_rows(ops, lambda: layer.forward(x), timed=False)
    assert rows == [{"name": name, "ms": None} for name in NORM_KERNELS]


def test_kernels_are_named_in_order_and_timed_on_request(cuda_ops):
    case = layer_case("BatchNorm2d(64)", ["8x14x14x64"])
    passes = Passes(case, cuda_ops, precision("bf16"), timer(cuda_ops), 1 << 30)
    call = passes.calls()["forward"][0]
    for timed in (False, True):
        rows = layers.kernel_rows(cuda_ops, call, timed=timed)
        assert [row["name"] for row in rows] == NORM_KERNELS
        assert all(0 < row["ms"] < 1 if timed else row["ms"] is None for row in rows)


# -- tables -----------------------------------------------------------------------------------------------------------


LACKING = {"comm": "measured on one rank", "kernels": "none were noted", "peers": "nothing was measured beside"}


def only(content):
    (run,) = runs(content, "file.json")
    return run


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_shows_what_a_file_has_and_says_what_it_lacks(name, content):
    run = only(content)
    if name in LACKING:
        with pytest.raises(NotInFile, match=f"file.json: no .*: {LACKING[name]}"):
            view(run, name)
        return
    title, columns, cells = view(run, name)
    assert cells and all(len(line) == len(columns) for line in cells)
    if name != "networks":
        assert "resnet20" in title
    if name in ("time", "memory"):
        assert any(line[0] == "layer3.2.conv2" for line in cells)


def test_shares_of_the_table_are_of_the_times_within_the_step(content):
    run = only(content)
    _, columns, cells = view(run, "time")
    within, share = columns.index("in step"), columns.index("share")
    total = sum(float(line[within]) for line in cells if line[0] != "step")
    assert total == pytest.approx(
        sum(row["timings"]["step"]["ms"] for row in run.rows if row["pass"] != "step"), rel=0.01
    )
    for line in cells:
        if line[0] != "step":
            assert float(line[share].rstrip("%")) == pytest.approx(100 * float(line[within]) / total, abs=0.1)


def test_absorbed_work_stays_a_line():
    content = {"benchmark": "layers", "setup": {"model": "net", "ranks": 1}, "rows": []}
    for layer, ms, where in (("conv2", 1.0, None), ("bn1", 0.0, "conv2")):
        row = layers.empty_row("net", layer, "forward", precision("bf16"), "cuda", 1)
        content["rows"].append(
            row | {"index": len(content["rows"]), "ms": ms, "in": where, "type": "X", "output_shape": [1, 2]}
        )
    cells = [line[3] for line in view(only(content), "time")[2]]
    assert cells == ["1.000", "in conv2"]


def test_layers_measured_alone_are_told_apart_by_their_case():
    content = {"benchmark": "layers", "rows": []}
    for case in ("ReLU/2x2x2x2", "ReLU/4x4x4x4"):
        row = layers.empty_row(case, "relu", "forward", precision("fp32"), "cpu", 1)
        content["rows"].append(row | {"index": 1, "ms": 1.0, "type": "ReLU", "output_shape": [2]})
    assert [line[0] for line in view(only(content), "time")[2]] == ["ReLU/2x2x2x2", "ReLU/4x4x4x4"]


def test_shares_add_up_to_one_and_name_the_kinds(content):
    found = only(content).shares()
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) > -0.05
    assert {"convolution", "batch norm", "ReLU", "joins", "pooling", "linear", "loss", "optimizer"} <= found.keys()
    assert family(rows_by_key(content)["conv1", "forward"]) == "convolution"


def test_every_layer_is_of_a_kind_that_has_a_colour_and_a_shape():
    named = {kind for kinds in FAMILIES.values() for kind in kinds}
    without = {"Dropout", "Flatten", "Pad", "StochasticDepth", "Upsample"}  # together: other
    assert named == (set(layer_types.__all__) - without) | {"CSBConv2d", "CSBLinear"}
    assert {*FAMILIES, "other"} <= style.TYPES.keys() & style.SHAPES.keys()


def with_batch(content, batch):
    """The same file as if it were of another batch."""
    setup = content["setup"] | {"batch": batch}
    rows = [row | {"case": f"resnet20/16x16/b{batch}", "input_shapes": [[batch, 16, 16, 3]]} for row in content["rows"]]
    return content | {"setup": setup, "rows": rows}


def test_a_step_is_resized_for_each_batch(cpu_ops):
    setups = [Setup("mlp", batch, "fp32", "cpu", image_size=8) for batch in (3, 5)]
    step = new_step(setups[0], SOLO)
    for setup in setups:
        shared = bench_network(setup, SOLO, CEILINGS, isolated=False, seconds=0.01, step=step)
        own = bench_network(setup, SOLO, CEILINGS, isolated=False, seconds=0.01)
        work = ("case", "layer", "pass", "flop", "bytes", "input_shapes", "output_shape", "saved_bytes", "parameters")
        assert [[row[key] for key in work] for row in shared["rows"]] == [
            [row[key] for key in work] for row in own["rows"]
        ]


@pytest.mark.parametrize(("rate", "told"), [(1e-3, []), (1e9, ["the loss became nan: where values are NaN"])])
def test_a_network_that_diverges_while_it_is_measured_is_told_of(cpu_ops, rate, told):
    setup = Setup("mlp", 3, "fp32", "cpu", image_size=8)
    step = new_step(setup, SOLO)
    step.optimizer.set_lr(rate)
    warnings = bench_network(setup, SOLO, CEILINGS, isolated=False, seconds=0.01, step=step)["warnings"]
    assert [line.partition(",")[0] for line in warnings if "loss" in line] == told


def test_networks_merge_into_one_file_that_shows_all_of_them(content):
    both = merged([content, with_batch(content, 4)])
    assert len(both["rows"]) == 2 * len(content["rows"])
    found = runs(both, "both.json")
    assert [run.point["setup"]["batch"] for run in found] == [2, 4] == [run.rank_batch for run in found]
    assert all(run.record["images_per_s"] > 0 for run in found)
    assert (default_view(found), default_view(found[:1])) == ("networks", "time")
    _, columns, cells = networks(found)
    assert [line[columns.index("batch")] for line in cells] == ["2", "4"]
    shown, reasons = tables(found, ["networks", "time", "comm"])
    assert len(shown) == 1 + 2 and len(reasons) == 2 and all("both.json (resnet20" in text for text in reasons)
    assert not any(line.startswith("eager step") for line in footer(both)), "whose step would that be?"


def test_networks_whose_energy_was_measured_show_it_by_image(content):
    assert "mJ/image" not in networks(runs(content, "x.json"))[1]
    known = with_batch(content, 4)
    next(row for row in known["rows"] if row["pass"] == "step")["energy_mj"] = 88.0
    _, columns, cells = networks(runs(merged([content, known]), "both.json"))
    assert [line[columns.index("mJ/image")] for line in cells] == ["-", "22"]


def test_what_messages_add_to_a_step_is_beside_it(content):
    """Not only what waits for them: passes beside a message are slower, too."""
    several = json.loads(json.dumps(with_batch(content, 4)))
    several["step"]["eager_compute_only"] = several["step"]["eager"] | {"ms": several["step"]["eager"]["ms"] / 1.25}
    assert "messages add" not in networks(runs(content, "x.json"))[1]
    _, columns, cells = networks(runs(merged([content, several]), "both.json"))
    assert [line[columns.index("messages add")] for line in cells] == ["-", "25.0%"]


def test_a_view_of_what_no_network_has_is_one_line(content):
    whole = only(content | {"rows": [row for row in content["rows"] if row["pass"] == "forward"]})
    with pytest.raises(NotInFile, match=r"file.json: no networks: no row of a whole step; run minidl bench model"):
        networks([whole])
    with pytest.raises(ValueError, match="unknown view 'times'; did you mean 'time'"):
        view(whole, "times")


@pytest.mark.parametrize(("timing", "bound", "share", "warned"), [
    ("replayed", "memory", 1.3, True), ("cold", "memory", 1.3, True), ("hot", "memory", 1.3, False),
    ("graph_step", "memory", 1.3, False), ("step", "memory", 1.3, False), ("step", "compute", 1.3, True),
    ("cold", "compute", 1.1, False), ("cold", None, None, False),
])  # fmt: skip
def test_passes_beyond_their_roof_tell_that_the_ceilings_are_too_low(timing, bound, share, warned):
    """Only where no cache can be why: it beats memory's roof."""
    row = layers.empty_row("net", "conv1", "forward", precision("fp32"), "cpu", 1) | {"timing": timing, "bound": bound}
    found = beyond_roof([row | {"roof_share": 0.9}, row | {"roof_share": share}], CEILINGS)
    assert bool(found) == warned
    if warned:
        assert "beat the roof: 1, most of all conv1 forward by 30%" in found[0] and "--remeasure" in found[0]


@pytest.mark.parametrize(
    ("date", "advised"), [("2020-01-01T00:00:00+00:00", True), ("2999-01-01T00:00:00+00:00", False)]
)
def test_ceilings_that_are_too_low_are_in_the_warnings(cpu_ops, date, advised):
    """What this run has just measured it need not measure again."""
    text, slow = "ReLU()", CEILINGS | {"copy_gb_per_s": 1e-6, "date": date}
    setup = {"precision": "fp32", "device": "cpu", "ranks": 1}
    content = bench_layer(layer_case(text, ["2x8x8x3"]), text, setup, SOLO, slow, options=QUICK)
    (line,) = [line for line in footer(content) if "beat the roof" in line]
    assert ("--remeasure" in line) == advised


def test_notes_say_what_the_figures_mean(content):
    text = "\n".join(footer(content))
    assert "2 per multiply-add" in text and "images/s" in text and "layers account for" in text
    assert "exposed" not in text
    two = content | {"rows": [row | {"ranks": 2} for row in content["rows"]]}
    assert "exposed: for how long computing stood still" in "\n".join(footer(two))


@pytest.mark.parametrize(
    ("cost", "words"),
    [(0.08, "+8.0%"), (0.03, "less than can be told (spread 6.6%)"), (-0.04, "less than can be told (spread 6.6%)")],
)
def test_what_timing_costs_is_told_where_it_is_more_than_steps_vary(content, cost, words):
    eager = content["step"]["eager"] | {"spread": 0.066}
    step = content["step"] | {"eager": eager, "eager_profiling_overhead": cost}
    assert f"; timing them costs {words}" in footer(content | {"step": step})[0]


def test_little_work_is_told_in_figures_and_not_as_nothing(content):
    _, columns, cells = view(only(content), "roof")
    for row, line in zip([row for row in content["rows"] if row["flop"] is not None], cells, strict=False):
        for column, key, unit in (("GFLOP", "flop", 1e9), ("MB", "bytes", 1e6)):
            assert float(line[columns.index(column)]) == pytest.approx(row[key] / unit, rel=5e-3)


# -- what users type --------------------------------------------------------------------------------------------------


def test_a_layer_alone_has_its_passes(cpu_ops):
    text = "Conv2d(3, 4, 3)"
    setup = {"precision": "fp32", "device": "cpu", "ranks": 1}
    content = bench_layer(layer_case(text, ["2x8x8x3"]), text, setup, SOLO, CEILINGS, options=QUICK)
    assert [row["pass"] for row in content["rows"]] == ["forward", "backward_weight", "backward_data"]
    assert all(row["case"] == "Conv2d(3, 4, 3)/2x8x8x3" for row in content["rows"])
    assert results.REQUIRED and view(only(content), "roof")[2]


@pytest.mark.parametrize("text, words", [
    ("Conv3d(3, 4, 3)", "unknown layer 'Conv3d'"),
    ("Conv2d(3, 4", "literal arguments"),
    ("Conv2d(3, open('x'), 3)", "literal arguments"),
    ("__import__('os').system('true')", "literal arguments"),
    ("Conv2d(3)", "--layer Conv2d(3)"),
    ("Conv2d(3, 4, 3, colour=1)", "colour"),
    ("Conv2d(3, -4, 3)", "out_channels"),
])  # fmt: skip
def test_bad_layers_are_refused_by_name(text, words):
    with pytest.raises(ValueError, match=None) as caught:
        parse_layer(text)
    assert words in str(caught.value), caught.value


@pytest.mark.parametrize("text", ["", "32", "0x3", "axb", "3x-1", "3,4"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError, match="--input"):
        parse_shape(text)


def test_impossible_setups_are_refused(cpu_ops):
    with pytest.raises(ValueError, match="unknown model"):
        Setup("resnet51", 2, "fp32", "cpu").graph()
    with pytest.raises(ValueError, match="--batch"):
        Setup("resnet20", 0, "fp32", "cpu").graph()
    with pytest.raises(ValueError, match="tf32"):
        bench_network(Setup("resnet20", 2, "tf32", "cpu"), SOLO, None)
    with pytest.raises(ValueError, match="conv2d: x must have shape"):
        layer_case("Conv2d(3, 4, 3)", ["2x8x8x5"])
    with pytest.raises(ValueError, match="one for each of 2"):
        layer_case("Add()", ["2x8x8x5"])


def test_layers_can_be_named_without_parentheses():
    assert repr(parse_layer("ReLU")) == "ReLU()"
