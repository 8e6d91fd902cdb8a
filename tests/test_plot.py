"""Pictures show what the rows say: every test reads the drawn artists back and compares them with the file.

The files are made from the networks' own graphs: FLOP and bytes by `Layer.cost`, times by a roofline with scatter. That
generator is what takes this file over 500 lines; the laws are short.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from minidl import models
from minidl.profile import result, write

matplotlib = pytest.importorskip("matplotlib", reason="pictures need minidl[plot]")

from matplotlib.colors import to_hex, to_rgb  # noqa: E402

from minidl.profile import plots  # noqa: E402
from minidl.profile.plots import style  # noqa: E402
from minidl.profile.runs import COMPUTE, family  # noqa: E402

CEILINGS = {
    "machine": "NVIDIA H200", "device": "cuda", "date": "2026-11-21T00:00:00+00:00", "copy_gb_per_s": 4230.0,
    "matrix_tflops": {"bf16": 774.0, "fp16": 760.0, "tf32": 402.0, "fp32": 51.0},
    "matrix_by": {"bf16": "cublas", "fp16": "cublas", "tf32": "cublas", "fp32": "cublas"},
    "vector_tflops": {"fp32": 60.0}, "host_to_device_gb_per_s": 55.5, "device_to_host_gb_per_s": 55.4,
    "both_ways_gb_per_s": 101.0, "all_reduce": None,
}  # fmt: skip
NETWORK = {"ranks": 2, "engine": "nccl", "latency_us": 14.0, "bus_gb_per_s": 310.0, "points": []}
MACHINE = {"host": "x86_64", "cpu": "some processor", "cores": 16, "gpu": "NVIDIA H200", "count": 1}
BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
BACKWARD = ("backward_weight", "backward_data")


class Fake:
    """A result file of ``minidl bench layers`` for a network that was never run."""

    def __init__(self, model="resnet50", size=224, batch=256, dtype="bf16", ranks=1, seed=0, arm="minidl"):
        self.graph = models.build(model, (size, size, 3), 1000 if size >= 224 else 10)
        self.case, self.batch, self.dtype, self.ranks = f"{model}/{size}x{size}/b{batch * ranks}", batch, dtype, ranks
        self.model, self.arm = model, arm
        self.random = np.random.default_rng(seed)
        self.ceilings = CEILINGS | {"all_reduce": NETWORK | {"ranks": ranks} if ranks > 1 else None}
        self.rows, self.spans, self.memory = [], [], []
        self.now, self.network_free, self.held = 0.0, 0.0, 2e9
        self._steps()

    def _steps(self):
        shapes = self.graph.shapes((self.batch, *self.graph.nodes[0].shape))
        nodes = [node for node in self.graph.nodes if node.layer is not None]
        self._sample()
        for node in nodes:
            self._layer(node, shapes, ("forward",))
        logits = np.prod(shapes[-1])
        for name in ("forward", "backward_data"):
            self._row("loss", "SoftmaxCrossEntropy", len(nodes), name, 6 * logits, 8 * logits, shapes[-1:], [], 0)
        for node in reversed(nodes):
            self._layer(node, shapes, BACKWARD)
        parameters = sum(int(np.prod(s.shape)) for node in nodes for s in node.layer.specs)
        self.now = max(self.now, self.network_free)
        self._row("optimizer", "SGD", None, "update", 5 * parameters, 22 * parameters, [], [], parameters)
        measured = self.now
        self.step_ms = 1.04 * measured
        self._row("step", None, None, "unaccounted", None, None, [], [], 0, ms=self.step_ms - measured)
        self._row("step", None, None, "step", None, None, [], [], parameters, ms=self.step_ms)

    def _layer(self, node, shapes, passes):
        layer, inputs, output = node.layer, [shapes[i] for i in node.inputs], shapes[node.index]
        cost = layer.cost(*inputs, itemsize=BYTES[self.dtype])
        parameters = sum(int(np.prod(spec.shape)) for spec in layer.specs)
        left_out = {"backward_data"} if node.inputs == (0,) else set()
        left_out |= set() if parameters else {"backward_weight"}
        for name in passes:
            work = getattr(cost, name)
            if name in left_out:
                continue
            kind = type(layer).__name__
            kept = int(np.prod(inputs[0])) * BYTES[self.dtype] * (kind in ("Conv2d", "BatchNorm2d", "Linear"))
            self._row(layer.name, kind, node.index, name, work.flop, work.bytes, inputs, output, parameters)
            self.held += kept if name == "forward" else -kept if name == passes[-1] else 0
            self._sample()
            if name == "backward_weight" and self.ranks > 1:
                flop = sum(getattr(cost, p).flop for p in {"forward", *BACKWARD} - left_out)
                self._all_reduce(layer.name, kind, node.index, parameters, flop)

    def _rate(self, kind):
        matrix = kind in ("Conv2d", "ConvTranspose2d", "Linear")
        return self.ceilings["matrix_tflops"][self.dtype] if matrix else self.ceilings["vector_tflops"]["fp32"]

    def _row(self, layer, kind, index, name, flop, size, inputs, output, parameters, ms=None, **more):
        floor = bound = None
        if flop is not None and size:
            by = {"compute": 1e-9 * flop / self._rate(kind), "memory": 1e-6 * size / self.ceilings["copy_gb_per_s"]}
            bound = max(by, key=by.get)
            floor = by[bound]
            if ms is None:
                share = {"Conv2d": 0.62, "BatchNorm2d": 0.8, "Linear": 0.5}.get(kind, 0.85)
                bad = 0.3 if self.random.random() < 0.08 else 1.0
                ms = floor / np.clip(share * bad * self.random.lognormal(0, 0.15), 0.05, 0.99) + 0.003
        ms = float(ms or 0.0)
        if name not in ("all_reduce", "step", "unaccounted"):
            self.spans.append(
                {"rank": 0, "lane": "compute", "layer": layer, "pass": name, "start_ms": self.now, "ms": ms}
            )
            self.now += ms
        record = {"ms": ms, "min_ms": ms, "p95_ms": None, "spread": 0.02, "n": 5, "samples_ms": [ms] * 5}
        self.rows.append({
            "case": self.case, "layer": layer, "type": kind, "index": index, "pass": name, "dtype": self.dtype,
            "arm": self.arm, "device": "cuda", "ranks": self.ranks, "input_shapes": [list(map(int, s)) for s in inputs],
            "output_shape": list(map(int, output)), "parameters": parameters, "ms": ms, "spread": 0.02,
            "timing": "replayed",
            "timings": {"replayed": record, "hot": None, "cold": None, "step": None, "graph_step": None},
            "flop": None if flop is None else int(flop), "bytes": None if size is None else int(size),
            "intensity": flop / size if flop is not None and size else None,
            "floor_ms": floor, "bound": bound, "roof_share": floor / ms if floor and ms else None,
            "tflops": 1e-9 * flop / ms if flop and ms else None,
            "gb_per_s": 1e-6 * size / ms if size and ms else None,
            "saved_bytes": None, "wire_bytes": None, "communication_intensity": None, "transfer_ms": None,
            "wait_ms": None, "exposed_ms": None, "bus_gb_per_s": None, "rank_ms": [ms] * self.ranks,
            "slowest_rank": 0, "kernels": None, "plan": None, "in": None, "energy_mj": None, "peers": {},
        } | more)  # fmt: skip

    def _all_reduce(self, layer, kind, index, parameters, flop):
        wire = 2 * (self.ranks - 1) / self.ranks * 4 * parameters
        transfer = (1e-3 * NETWORK["latency_us"] + 1e-6 * wire / NETWORK["bus_gb_per_s"]) * self.random.uniform(1, 1.2)
        self.network_free = max(self.now, self.network_free) + transfer
        exposed = 0.0
        if index < 3:  # the last messages of a step have nothing left to hide behind
            exposed, self.now = self.network_free - self.now, self.network_free
        self._row(layer, kind, index, "all_reduce", None, None, [], [], parameters, ms=transfer, transfer_ms=transfer,
                  wire_bytes=wire, communication_intensity=flop / wire, wait_ms=0.0, exposed_ms=exposed,
                  bus_gb_per_s=1e-6 * wire / transfer)  # fmt: skip

    def _sample(self):
        self.memory.append({"rank": 0, "t_ms": self.now, "bytes": int(self.held)})

    def content(self, **more):
        setup = {
            "model": self.model,
            "batch": self.batch,
            "precision": self.dtype,
            "device": "cuda",
            "ranks": self.ranks,
        }
        step = {
            "eager": None,
            "graph": None,
            "compute_only": None,
            "images_per_s": 1e3 * self.batch * self.ranks / self.step_ms,
        }
        return result("layers", self.rows, MACHINE, setup=setup, ceilings=self.ceilings, conventions="", step=step,
                      spans=self.spans, memory=self.memory, per_rank=[], warnings=[]) | more  # fmt: skip


@cache
def _fake(*args, **options):
    return Fake(*args, **options).content()


def fake(*args, **options):
    """A file of its own, which a test may change."""
    return copy.deepcopy(_fake(*args, **options))


def only(content, name="file.json"):
    (run,) = plots.runs(content, name)
    return run


def resnet20(**options):
    return fake("resnet20", 32, 64, "bf16", **options)


def edited(content, change):
    for row in content["rows"]:
        change(row)
    return content


def scatter(axes):
    """Position, area, face and shape of each point, from the artists."""
    found = []
    for collection in axes.collections:
        if collection.get_label() in style.SHAPES:
            spread = np.broadcast_to(collection.get_sizes(), len(collection.get_offsets()))
            found += [
                (*map(float, place), float(size), to_hex(face), collection.get_label())
                for place, size, face in zip(collection.get_offsets(), spread, collection.get_facecolors(), strict=True)
            ]
    return found


def names(axes):
    """The texts with a leader."""
    return [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]


def widths(axes):
    """Per segment the bars' (start, width) in order from the top."""
    return {
        container.get_label(): [(bar.get_x(), bar.get_width()) for bar in container] for container in axes.containers
    }


# -- roofline ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [fake(), fake("unet", 256, 16, ranks=4)], ids=["resnet50", "unet"])
def test_each_pass_with_flop_is_a_point_of_the_roofline(content):
    run = only(content)
    rows = [row for row in run.rows if row["pass"] in COMPUTE and row["flop"] and row["ms"]]
    drawn = scatter(plots.roofline(run).axes[0])
    expected = [(r["intensity"], r["tflops"], style.PASSES[r["pass"]].lower(), family(r)) for r in rows]
    assert sorted((x, y, color, shape) for x, y, _, color, shape in drawn) == sorted(expected)
    time = {(row["intensity"], row["tflops"]): row["ms"] for row in rows}
    largest = max(time.values())
    for x, y, area, _, _ in drawn:
        assert area == pytest.approx(max(420 * time[x, y] / largest, 9.0))


def test_passes_under_half_of_their_roof_stand_out():
    run = only(fake())
    axes = plots.roofline(run).axes[0]
    low = {(r["intensity"], r["tflops"]) for r in run.rows if r["roof_share"] and r["roof_share"] < 0.5}
    faces = {}
    for collection in axes.collections:
        if collection.get_label() in style.SHAPES:
            faces |= {
                tuple(p): f[3] for p, f in zip(collection.get_offsets(), collection.get_facecolors(), strict=True)
            }
    assert low and len(low) < len(faces) / 2
    assert min(faces[point] for point in low) > 3 * max(alpha for point, alpha in faces.items() if point not in low)


def test_ceilings_are_where_they_were_measured():
    figure = plots.roofline(only(fake()))
    x, y = figure.axes[0].lines[0].get_data()
    assert x[1] == pytest.approx(774e3 / 4230) and list(y[1:]) == [774.0, 774.0]
    assert y[0] == pytest.approx(4.230 * x[0])
    said = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "4,230 GB/s" in said and "774 TFLOP/s" in said and "60 TFLOP/s" in said and "cublas" in said


def longest(run):
    """The five longest passes that are not alike, and how many are like each."""
    found = {}
    for row in sorted((r for r in run.rows if r["pass"] in COMPUTE and r["tflops"]), key=lambda r: -run.ms(r)):
        found.setdefault((row["type"], row["pass"], row["flop"], row["bytes"], tuple(row["output_shape"])), []).append(
            row
        )
    return [(rows[0], len(rows) - 1) for rows in list(found.values())[:5]]


@pytest.mark.parametrize("content", [fake(), fake("unet", 256, 16, ranks=4), resnet20()])
def test_the_five_longest_passes_are_named_once_and_names_do_not_overlap(content):
    run = only(content)
    figure = plots.roofline(run)
    axes = figure.axes[0]
    figure.canvas.draw()
    labels = names(axes)
    for label, (row, others) in zip(labels, longest(run), strict=True):
        share = f"{row['pass'].replace('_', ' ')} {row['ms'] / run.total_ms:.1%}, {row['roof_share']:.0%} of roof"
        like = f", {others} more like it" * bool(others)
        assert label.get_text() == f"{row['layer']}{like}\n{share}"
        assert label.xy == (row["intensity"], row["tflops"])
    assert len({label.get_text() for label in labels}) == 5
    boxes = [matplotlib.text.Text.get_window_extent(label) for label in labels]
    frame = axes.get_window_extent()
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    assert all(frame.x0 <= b.x0 and b.x1 <= frame.x1 and frame.y0 <= b.y0 and b.y1 <= frame.y1 for b in boxes)


def timed_within(content, way="graph_step", by=2.0):
    """Passes of this file also timed within the step, where they take ``by`` times as long, every second four times."""
    for i, row in enumerate(content["rows"]):
        ms = row["ms"] * by * (1 + i % 2)
        row["timings"][way] = row["timings"]["replayed"] | {"ms": ms, "samples_ms": [ms] * 5}
    return content


@pytest.mark.parametrize(("way", "words"), [("graph_step", "the captured step"), ("step", "the eager step")])
def test_pictures_of_the_step_use_times_within_it_and_say_so(way, words):
    plain, run = only(resnet20()), only(timed_within(resnet20(), way))
    row = next(row for row in run.rows if row["pass"] == "forward")
    assert run.ms(row) == row["timings"][way]["ms"] != plain.ms(row) == row["ms"]
    parts = [row for row in run.rows if row["pass"] != "step"]
    assert run.total_ms == pytest.approx(sum(row["timings"][way]["ms"] for row in parts))
    bars, share = plots.bars(run).axes[0], plots.share([run]).axes[0]
    drawn = sum(w for segment in widths(bars).values() for _, w in segment)
    assert drawn == pytest.approx(run.total_ms) and words in bars.get_xlabel()
    convolutions = sum(run.ms(row) for row in parts if row["type"] == "Conv2d")
    assert widths(share)["convolution"][0][1] == pytest.approx(100 * convolutions / run.total_ms)
    assert words in share.get_xlabel()
    roofline = plots.roofline(run)
    sizes = {(x, y): area for x, y, area, *_ in scatter(roofline.axes[0])}
    drawn = [row for row in run.rows if row["pass"] in COMPUTE and row["tflops"]]
    most = max(run.ms(row) for row in drawn)
    places = [(row["intensity"], row["tflops"]) for row in drawn]
    for row, place in zip(drawn, places, strict=True):
        if places.count(place) == 1:
            assert sizes[place] == pytest.approx(max(420 * run.ms(row) / most, 9.0))
    assert words in " ".join(text.get_text() for text in roofline.texts)
    assert "each pass alone, replayed" in roofline.axes[0].get_ylabel(), "where the points stand is another timing"
    assert "each pass alone, replayed" in plots.bars(plain).axes[0].get_xlabel()


def test_a_step_that_its_marks_lengthen_says_so():
    run = only(timed_within(resnet20()))
    said = " ".join(text.get_text() for text in plots.bars(run).texts)
    assert f"lengthen the step to {run.total_ms:#.3g} ms" in said
    assert "lengthen" not in " ".join(text.get_text() for text in plots.bars(only(resnet20())).texts)


def test_one_roof_has_one_name():
    """On a processor products run on the vector units: one line, one label."""
    content = resnet20()
    content["ceilings"]["vector_tflops"] = {"fp32": 774.2}
    said = [text.get_text() for text in plots.roofline(only(content)).axes[0].texts]
    assert not any("other arithmetic" in text for text in said) and sum("774 TFLOP/s" in text for text in said) == 1


def test_the_roofline_of_chosen_passes():
    run = only(resnet20())
    drawn = scatter(plots.roofline(run, ["backward_weight"]).axes[0])
    assert len(drawn) == sum(row["pass"] == "backward_weight" for row in run.rows)
    assert {color for *_, color, _ in drawn} == {style.PASSES["backward_weight"].lower()}


def test_copies_are_counted_in_the_footnote():
    run = only(fake("unet", 256, 16))
    left_out = sum(not row["flop"] for row in run.rows if row["pass"] in COMPUTE)
    assert left_out >= 4  # the skip connections
    notes = " ".join(text.get_text() for text in plots.roofline(run).texts)
    assert f"Not drawn: {left_out} passes" in notes


def test_layers_measured_alone_share_one_roofline():
    content = resnet20()
    content["rows"] = [row | {"case": f"{row['layer']}/alone"} for row in content["rows"] if row["pass"] == "forward"]
    run = only(content)
    figure = plots.roofline(run)
    assert len(scatter(figure.axes[0])) == sum(bool(row["tflops"]) for row in run.rows)
    assert all("/alone" in label.get_text() and "\nforward" in label.get_text() for label in names(figure.axes[0]))
    assert sum(w for _, w in widths(plots.bars(run).axes[0])["forward"]) == pytest.approx(run.total_ms)


# -- communication ----------------------------------------------------------------------------------------------------


def test_points_lie_under_the_network_where_its_bandwidth_is_enough():
    run = only(fake(batch=32, ranks=2))
    axes = plots.communication(run).axes[0]
    messages = [row for row in run.rows if row["pass"] == "all_reduce"]
    expected = []
    for row in messages:
        own = [r for r in run.rows if r["layer"] == row["layer"] and r["pass"] in style.PASSES]
        flop, ms = sum(r["flop"] for r in own), sum(r["ms"] for r in own)
        expected.append((row["communication_intensity"], 1e-9 * flop / ms))
        hides = row["wire_bytes"] / (1e9 * NETWORK["bus_gb_per_s"]) < 1e-3 * ms
        assert hides == (expected[-1][1] < 1e-3 * NETWORK["bus_gb_per_s"] * expected[-1][0])
    drawn = scatter(axes)
    assert np.allclose(sorted((x, y) for x, y, *_ in drawn), sorted(expected))
    x, y = axes.lines[0].get_data()
    assert y[0] == pytest.approx(0.31 * x[0]) and y[-1] == 774.0


def test_messages_that_outlast_their_layer_are_solid():
    run = only(fake(batch=32, ranks=2))
    compute = {}
    for row in run.rows:
        if row["pass"] in ("forward", "backward_data", "backward_weight"):
            compute[row["layer"]] = compute.get(row["layer"], 0) + row["ms"]
    messages = [row for row in run.rows if row["pass"] == "all_reduce"]
    outlast = sum(row["transfer_ms"] > compute[row["layer"]] for row in messages)
    colors = [color for *_, color, _ in scatter(plots.communication(run).axes[0])]
    assert 0 < outlast < len(messages)
    assert colors.count(style.PASSES["communication"].lower()) == outlast


def test_a_message_of_several_layers_is_set_against_all_of_them():
    content = fake(batch=32, ranks=2)
    carrier, other = [row for row in content["rows"] if row["pass"] == "all_reduce"][:2]
    own = [r for r in content["rows"] if r["layer"] in (carrier["layer"], other["layer"]) and r["pass"] != "all_reduce"]
    other |= {"in": carrier["layer"], "ms": 0.0, "transfer_ms": None, "exposed_ms": None}
    x = sum(r["flop"] for r in own) / (carrier["wire_bytes"] + other["wire_bytes"])
    y = 1e-9 * sum(r["flop"] for r in own) / sum(r["ms"] for r in own)
    points = scatter(plots.communication(only(content)).axes[0])
    assert [p for p in points if p[:2] == pytest.approx((x, y))]
    assert len(points) == sum(row["pass"] == "all_reduce" for row in content["rows"]) - 1


# -- bars -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [fake(), fake(batch=32, ranks=2), fake("unet", 256, 16), fake("lenet", 32, 8)],
    ids=["resnet50", "2 ranks", "unet", "lenet"],
)  # fmt: skip
def test_bars_sum_to_the_step_and_segments_to_their_passes(content):
    run = only(content)
    drawn = widths(plots.bars(run).axes[0])
    for segment, bars in drawn.items():
        key, name = ("exposed_ms", "all_reduce") if segment == "communication" else ("ms", segment)
        assert sum(w for _, w in bars) == pytest.approx(sum(row[key] for row in run.rows if row["pass"] == name))
    assert sum(w for bars in drawn.values() for _, w in bars) == pytest.approx(run.step["ms"])
    for bar in zip(*drawn.values(), strict=True):  # segments of a bar follow one another from zero
        assert [start for start, _ in bar] == pytest.approx(
            list(itertools.accumulate((w for _, w in bar), initial=0.0))[:-1]
        )


def test_small_networks_have_a_bar_for_each_layer_in_network_order():
    axes = plots.bars(only(fake("lenet", 32, 8))).axes[0]
    graph = models.build("lenet", (32, 32, 3), 10)
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    assert ticks == [*(layer.name for layer in graph.layers), "loss", "optimizer", "unaccounted"]
    assert axes.yaxis_inverted()


def test_large_networks_are_joined_by_block():
    figure = plots.bars(only(fake()))
    ticks = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    blocks = [f"layer{stage}.{i}" for stage, depth in enumerate((3, 4, 6, 3), 1) for i in range(depth)]
    assert ticks[:4] == ["conv1", "bn1", "relu", "maxpool"] and ticks[4:20] == blocks
    assert ticks[20:] == ["avgpool", "flatten", "fc", "loss", "optimizer", "unaccounted"]
    assert any("joined by block" in text.get_text() for text in figure.texts)


def test_waiting_for_the_other_ranks_losses_is_exposed_communication():
    content = fake("lenet", 32, 8, ranks=2)
    wait = next(row for row in content["rows"] if row["layer"] == "loss") | {"pass": "wait", "ms": 0.5}
    content["rows"].insert(-2, wait)
    run = only(content)
    drawn = widths(plots.bars(run).axes[0])["communication"]
    exposed = [row["exposed_ms"] for row in run.rows if row["pass"] == "all_reduce"]
    assert sum(w for _, w in drawn) == pytest.approx(sum(exposed) + 0.5)
    assert run.shares()["exposed communication"] == pytest.approx((sum(exposed) + 0.5) / run.total_ms)


def test_unaccounted_time_may_be_negative():
    content = resnet20()
    rest, step = content["rows"][-2:]
    rest["ms"], step["ms"] = -0.01, step["ms"] - rest["ms"] - 0.01
    axes = plots.bars(only(content)).axes[0]
    drawn = widths(axes)
    assert drawn["unaccounted"][-1] == (0.0, -0.01) and axes.get_xlim()[0] <= -0.01
    assert sum(w for bars in drawn.values() for _, w in bars) == pytest.approx(step["ms"])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_drawn_as_sampled_with_its_peak_and_phases():
    run = only(fake())
    axes = plots.memory(run).axes[0]
    samples = run.content["memory"]
    x, y = axes.lines[0].get_data()
    assert list(x) == [s["t_ms"] for s in samples] and np.allclose(1e9 * np.array(y), [s["bytes"] for s in samples])
    peak = max(samples, key=lambda s: s["bytes"])
    (dot,) = [line for line in axes.lines if line.get_label() == "peak"]
    assert (dot.get_xdata()[0], 1e9 * dot.get_ydata()[0]) == pytest.approx((peak["t_ms"], peak["bytes"]))
    assert any(f"peak {peak['bytes'] / 1e9:.3g} GB" in text.get_text() for text in axes.texts)
    bands = {to_hex(p.get_facecolor()): (p.get_x(), p.get_x() + p.get_width()) for p in axes.patches}
    spans = run.content["spans"]
    turn = max(s["start_ms"] + s["ms"] for s in spans if s["pass"] == "forward" and s["layer"] != "loss")
    forward, backward = (bands[style.PASSES[name].lower()] for name in ("forward", "backward_data"))
    assert forward[0] == 0.0 and turn <= forward[1] <= backward[0] + 1e-9
    update = next(s for s in spans if s["pass"] == "update")
    assert backward[1] == pytest.approx(update["start_ms"])


def test_the_rank_with_the_highest_peak_is_drawn_strong():
    content = fake()
    content["memory"] += [{**s, "rank": 1, "bytes": 2 * s["bytes"]} for s in content["memory"]]
    figure = plots.memory(only(content))
    strong = max((line for line in figure.axes[0].lines if line.get_label() != "peak"), key=lambda a: a.get_linewidth())
    assert strong.get_label() == "rank 1"
    assert any("rank 1 of 2" in text.get_text() for text in figure.texts)


def test_without_spans_memory_says_that_phases_are_not_marked():
    content = fake() | {"spans": []}
    figure = plots.memory(only(content))
    assert not figure.axes[0].patches and any("no spans" in text.get_text() for text in figure.texts)


# -- scaling and share ------------------------------------------------------------------------------------------------


def scaled(points):
    return [only(fake(batch=batch, ranks=ranks), f"r{ranks}.json") for ranks, batch in points]


def test_scaling_shows_rates_and_efficiency_in_two_panels():
    runs = scaled([(1, 32), (2, 32), (4, 32)])
    rate, efficiency = plots.scaling(runs[::-1]).axes
    curve = next(line for line in rate.lines if line.get_linestyle() == "-" and line.get_marker() == "o")
    expected = [1e3 * 32 * run.ranks / run.step["ms"] for run in runs]
    assert list(curve.get_xdata()) == [1, 2, 4] and np.allclose(curve.get_ydata(), expected)
    ideal = next(line for line in rate.lines if line.get_linestyle() == "--")
    assert np.allclose(ideal.get_ydata(), [expected[0] * n for n in (1, 2, 4)])
    shown = next(line for line in efficiency.lines if line.get_marker() == "o").get_ydata()
    assert np.allclose(shown, [100 * e / (n * expected[0]) for n, e in zip((1, 2, 4), expected, strict=True)])


def test_weak_and_strong_scaling_are_curves_of_their_own():
    axes = plots.scaling(scaled([(1, 32), (2, 32), (4, 32), (1, 128), (2, 64)])).axes[0]
    curves = {c.get_label(): list(c.lines[0].get_xdata()) for c in axes.containers}
    assert curves == {
        "resnet50 224×224, batch 32 per rank, bf16": [1, 2, 4],
        "resnet50 224×224, batch 128 in all, bf16": [1, 2, 4],
    }


def test_scaling_of_a_merged_file_and_of_rows_that_bring_their_rate():
    content = fake(batch=32, ranks=1)
    content["rows"] += fake(batch=32, ranks=2)["rows"]
    assert plots.scaling(plots.runs(content, "sweep.json")).axes
    rows = [
        {"case": f"unet/64x64/b{8 * n}", "pass": "train", "dtype": "fp32", "arm": "minidl", "ranks": n, "ms": 5.0,
         "spread": None, "floor_ms": None, "peers": {}, "images_per_s": 900.0 * n}
        for n in (2, 4)
    ]  # fmt: skip
    axes = plots.scaling(plots.runs(result("bench_learning", rows, MACHINE), "a.json")).axes[0]
    assert list(axes.containers[0].lines[0].get_ydata()) == [1800.0, 3600.0]


def test_shares_sum_to_the_step():
    runs = [only(resnet20()), only(fake("unet", 256, 16)), only(fake(batch=32, ranks=2))]
    axes = plots.share(runs).axes[0]
    drawn = widths(axes)
    for i, run in enumerate(runs):
        assert sum(bars[i][1] for bars in drawn.values()) == pytest.approx(100)
        conv = sum(r["ms"] for r in run.rows if r["type"] in ("Conv2d", "ConvTranspose2d") and r["pass"] in COMPUTE)
        assert drawn["convolution"][i][1] == pytest.approx(100 * conv / run.step["ms"])
    assert drawn["exposed communication"][2][1] > 0 == drawn["exposed communication"][0][1]


# -- layers over batches and ranks ------------------------------------------------------------------------------------


def dots(axes):
    """Per run the values by line."""
    return [{round(y): x for x, y in collection.get_offsets()} for collection in axes.collections]


def test_shares_and_intensities_of_each_layer_over_batches():
    runs = [only(fake("lenet", 32, batch)) for batch in (8, 64)]
    figure = plots.layers(runs)
    share, intensity = figure.axes
    lines = [label.get_text().split()[0] for label in share.get_yticklabels()]
    assert lines == [*(layer.name for layer in runs[0].content and models.build("lenet", (32, 32, 3), 10).layers),
                     "loss", "optimizer", "unaccounted"]  # fmt: skip
    for run, shown, intense in zip(runs, dots(share), dots(intensity), strict=True):
        assert sum(shown.values()) == pytest.approx(100)
        for y, name in enumerate(lines[:-3]):
            rows = [row for row in run.rows if row["layer"] == name]
            assert shown[y] == pytest.approx(100 * sum(row["ms"] for row in rows) / run.total_ms)
            flop, size = (sum(row[key] for row in rows) for key in ("flop", "bytes"))
            assert (y in intense) == bool(flop)
            if flop:
                assert intense[y] == pytest.approx(flop / size)
    assert any("ridge 183" in text.get_text() for text in intensity.texts), "774e3 / 4230"
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == ["batch 8", "batch 64"]


def test_layers_of_large_networks_are_joined_by_block_and_of_small_ones_have_their_type():
    lines = [label.get_text() for label in plots.layers([only(fake())]).axes[0].get_yticklabels()]
    assert "layer3.5" in lines and "conv1  Conv2d" in lines and len(lines) < 40


def test_series_are_of_one_network_over_batches_and_over_ranks():
    runs = scaled([(1, 32), (1, 256), (2, 32)]) + [only(resnet20(), "small.json")]
    found = {words: [(run.ranks, run.rank_batch) for run in members] for words, members in plots.series(runs)}
    assert found == {
        "resnet50 224×224 bf16 1 ranks": [(1, 32), (1, 256)],
        "resnet50 224×224 bf16 b32 over ranks": [(1, 32), (2, 32)],
        "resnet20 32×32 bf16 1 ranks": [(1, 64)],
    }
    many = [only(fake("lenet", 32, 2**i)) for i in range(9)]
    with pytest.raises(plots.NotInFile, match="no layers: 9 batch sizes of lenet 32×32, and one picture holds 8"):
        plots.layers(many)


def test_seven_curves_of_scaling_are_too_many_for_one_picture():
    runs = [only(fake("lenet", 32, batch, ranks=ranks)) for batch in range(1, 16, 2) for ranks in (1, 2)]
    with pytest.raises(plots.NotInFile, match="no scaling: .* curves, and one picture holds 6; give fewer files"):
        plots.scaling(runs)


# -- looks ------------------------------------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes, "A physiologically-based model for simulation of color vision deficiency", 2009.
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color, deficiency):
    """CIE L*a*b* of a colour as a reader with the deficiency sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(np.maximum(xyz / np.array([0.9505, 1.0, 1.089]), 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("palette", ["PASSES", "TYPES"])
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_stay_apart_for_colour_blind_readers(deficiency, palette):
    seen = {name: lab(color, deficiency) for name, color in getattr(style, palette).items()}
    apart = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(seen, 2)}
    assert min(apart.values()) > 10, min(apart, key=apart.get)  # 2.3 is just noticeable side by side


def test_all_pictures_share_the_meaning_of_colours():
    run = only(fake(batch=32, ranks=2))
    axes = plots.bars(run).axes[0]
    assert {c.get_label(): to_hex(c[0].get_facecolor()) for c in axes.containers} == {
        name: color.lower() for name, color in style.PASSES.items()
    }
    assert style.TYPES["exposed communication"] == style.PASSES["communication"]
    assert style.TYPES["unaccounted"] == style.PASSES["unaccounted"]


@pytest.mark.parametrize("kind", ["roofline", "communication", "bars", "memory"])
def test_headings_say_model_batch_dtype_and_machine(kind):
    figure = getattr(plots, kind)(only(fake(batch=32, ranks=2)))
    heading = " ".join(text.get_text() for text in figure.texts)
    for word in ("resnet50 224×224", "batch 64 on 2 ranks", "bf16", "NVIDIA H200"):
        assert word in heading
    figure.canvas.draw()
    page = figure.bbox
    for text in [*figure.texts, *figure.axes[0].texts, *figure.axes[0].get_yticklabels()]:
        box = matplotlib.text.Text.get_window_extent(text, figure.canvas.get_renderer())
        assert 0 <= box.x0 and box.x1 <= page.width and 0 <= box.y0 and box.y1 <= page.height, text


# -- files ------------------------------------------------------------------------------------------------------------


def test_svg_is_the_same_every_time_and_knows_no_date(monkeypatch):
    first = plots.render(plots.roofline(only(resnet20())), "svg")
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30.0)  # the reader's own defaults do not matter
    assert plots.render(plots.roofline(only(resnet20())), "svg") == first
    assert first.startswith(b"<?xml") and b"<dc:date>" not in first
    assert matplotlib.rcParams["font.size"] == 30.0
    figure = plots.bars(only(resnet20()))
    assert plots.render(figure, "png") == plots.render(figure, "png") and plots.render(figure, "png")[1:4] == b"PNG"


def test_a_png_keeps_the_colours_of_single_keys(tmp_path):
    """It has a palette; the key of the update is some twenty pixels wide."""
    from PIL import Image

    plots.save(plots.roofline(only(fake())), tmp_path / "roofline.png")
    found = np.array(Image.open(tmp_path / "roofline.png").convert("RGB")).reshape(-1, 3).astype(int)
    for name in COMPUTE:
        wanted = np.array([round(255 * part) for part in to_rgb(style.PASSES[name])])
        assert np.abs(found - wanted).max(axis=1).min() <= 20, name


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    figure = plots.bars(only(resnet20()))
    path = tmp_path / "new" / "bars.svg"
    plots.save(figure, path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        plots.save(plots.memory(only(fake())), path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["bars.svg"]
    with pytest.raises(ValueError, match="svg or png, got 'jpg'"):
        plots.save(figure, tmp_path / "bars.jpg")


def test_nothing_global_is_touched_and_matplotlib_is_loaded_late():
    code = (
        "import sys; from minidl.profile import plots; assert 'matplotlib' not in sys.modules\n"
        "from minidl.profile.plots import style; style.drawn(lambda: style.page(3, 'a', 'b')[0])()\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the command ------------------------------------------------------------------------------------------------------


def command(*words):
    parser = argparse.ArgumentParser(prog="minidl plot")
    plots.add_arguments(parser)
    return plots.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def save_as(tmp_path):
    def save(name, content):
        path = tmp_path / name
        write(path, content)
        return path

    return save


def test_all_makes_what_the_file_allows_and_says_why_not(save_as, tmp_path, capsys):
    path = save_as("one.json", resnet20())
    assert command(path, "--output", tmp_path / "out") == 0
    made = {p.name for p in (tmp_path / "out").iterdir()}
    own = {f"one-{kind}.svg" for kind in ("roofline", "bars", "memory", "share")}
    assert made == own | {"resnet20-32x32-bf16-1-ranks-layers.svg"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(plots.KINDS) and sum(line.startswith("wrote ") for line in lines) == 5
    assert [line for line in lines if line.startswith(f"{path}: no communication roofline: measured on one rank")]
    assert [line for line in lines if line.startswith(f"{path}: no scaling: ")]


def test_each_run_of_a_file_has_its_own_pictures(save_as, tmp_path):
    content = resnet20()
    content["rows"] += [row | {"arm": "torch"} for row in content["rows"]]
    command(save_as("a.json", content), "--kind", "bars", "--format", "png", "--output", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "a-resnet20-32x32-b64-bf16-1-ranks-bars.png", "a-resnet20-32x32-b64-bf16-torch-1-ranks-bars.png"
    }  # fmt: skip
    with pytest.raises(plots.NotInFile, match="the samples of the memory are those of resnet20 32×32, batch 64, bf16$"):
        plots.memory(plots.runs(content, "a.json")[1])


def test_files_of_one_name_in_two_folders(save_as, tmp_path):
    one, two = save_as("h200/r.json", resnet20()), save_as("x2/r.json", resnet20(ranks=2))
    written, _ = plots.make([one, two], output=tmp_path / "out", format="png")
    names = {path.name for path in written}
    assert {"h200-r-bars.png", "x2-r-bars.png", "x2-r-communication.png", "scaling.png", "share.png"} <= names


def test_long_names_stay_on_the_page():
    content = fake("lenet", 32, 8)
    content["machine"]["gpu"] = "A processor whose makers wrote their whole catalogue into its name " * 2
    figure = plots.bars(only(content))
    assert all(text.get_window_extent().x1 <= figure.bbox.width for text in figure.texts)


def without(key):
    def change(content):
        content[key] = None
        return content

    return change


def no_matrix_rate(content):
    content["ceilings"]["matrix_tflops"]["bf16"] = None
    return content


def no_times(content):
    return edited(content, lambda row: row.update(ms=None, tflops=None, exposed_ms=None))


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("roofline", without("ceilings"), "no roofline: it has no measured ceilings; run minidl bench ceilings"),
        ("roofline", no_matrix_rate, "no roofline: its ceilings have no matrix rate for bf16; run minidl bench"),
        ("roofline", no_times, "no roofline: no forward or backward_data or .* row has both FLOP and time"),
        ("communication", lambda content: content, "no communication roofline: measured on one rank"),
        ("bars", no_times, "no bars: no row of a layer has a time"),
        ("memory", without("memory"), "no memory: it has no samples of the memory"),
        ("scaling", lambda content: content, "no scaling: it takes one network, .* here are runs on 1"),
        ("share", no_times, "no share: no network with both its layers and its step"),
        ("layers", no_times, "no layers: no network with its step; run minidl bench model"),
    ],
)  # fmt: skip
def test_what_a_file_lacks_is_said_in_one_line(save_as, tmp_path, kind, change, why):
    path = save_as("f.json", change(resnet20()))
    with pytest.raises(ValueError, match=f"f.json: {why}") as error:
        command(path, "--kind", kind, "--output", tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_file_that_allows_no_picture_is_one_line_too(save_as, tmp_path):
    content = no_times(resnet20()) | {"memory": [], "ceilings": None}
    content["rows"] += [row | {"arm": "torch"} for row in content["rows"]]
    path = save_as("f.json", content)
    with pytest.raises(ValueError, match=r"f.json: nothing to draw; make the file with minidl bench layers, [^\n]*$"):
        command(path, "--output", tmp_path / "out")
    with pytest.raises(ValueError, match=r"no bars: no row of a layer [^\n]* \(and 1 more like it\)$"):
        command(path, "--kind", "bars", "--output", tmp_path / "out")


def test_a_network_without_measured_bandwidth():
    content = fake(batch=32, ranks=2)
    content["ceilings"]["all_reduce"] = None
    with pytest.raises(plots.NotInFile, match="no bandwidth of all-reduce; run mpiexec -n 2 minidl bench ceilings"):
        plots.communication(only(content))


def test_other_errors(save_as, tmp_path, monkeypatch):
    path = save_as("f.json", resnet20())
    with pytest.raises(ValueError, match="--pass must be left out, .* got '--kind bars'"):
        command(path, "--kind", "bars", "--pass", "forward")
    with pytest.raises(ValueError, match="unknown kind of plot 'bar'; did you mean 'bars'"):
        plots.make([path], "bar")
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match="x.json: JSON, but not a result file"):
        command(tmp_path / "x.json")
    row = {"case": "a", "pass": "forward", "dtype": "bf16", "arm": "minidl", "ms": 1.0, "spread": 0.0}
    foreign = save_as("conv.json", result("bench_conv", [row | {"floor_ms": None, "peers": {}}], MACHINE))
    with pytest.raises(ValueError, match="conv.json: no roofline: it has no measured ceilings"):
        command(foreign, "--kind", "roofline")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"plots is not available .* pip install 'minidl\[plot\]'"):
        command(path, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
