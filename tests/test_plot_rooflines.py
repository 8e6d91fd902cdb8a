"""Rooflines say what the rows say: tests read the drawn artists back and compare."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl.profile import plots
from minidl.profile.plots import style
from minidl.profile.runs import COMPUTE, family
from tests.fake_results import NETWORK, fake, names, only, resnet20, scatter, timed_within, widths

matplotlib = pytest.importorskip("matplotlib", reason="pictures need minidl[plot]")


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


def test_passes_that_a_fused_neighbour_mostly_does_are_not_drawn_above_the_roof():
    content = fake()
    done = [row for row in content["rows"] if row["type"] == "BatchNorm2d" and row["pass"] == "forward"]
    for row in done:
        row |= {"ms": row["ms"] / 20, "tflops": row["tflops"] * 20, "roof_share": row["roof_share"] * 20}
    plain = scatter(plots.roofline(only(content)).axes[0])
    fused = plots.roofline(only(content | {"setup": {"fusion": "auto"}}))
    assert len(scatter(fused.axes[0])) == len(plain) - len(done)
    assert f"{len(done)} that a neighbour's kernels mostly do" in " ".join(text.get_text() for text in fused.texts)


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


def test_a_sweep_over_ranks_has_a_network_for_each_point():
    """The file's ceilings are those of its first point: on one rank no all-reduce was measured."""
    content = fake("lenet", 32, 8, ranks=2)
    run = only(content)
    point = {"case": run.case, "setup": content["setup"], "step": content["step"], "ceilings": content["ceilings"]}
    alone = content["ceilings"] | {"all_reduce": None}
    assert plots.communication(only(content | {"ceilings": alone, "points": [point]}))
