"""Bars, shares, scaling and memory say what the rows say: tests read the drawn artists back and compare."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl import models
from minidl.profile import plots, result
from minidl.profile.plots import style
from minidl.profile.runs import COMPUTE
from tests.fake_results import MACHINE, fake, only, resnet20, timed_within, widths

matplotlib = pytest.importorskip("matplotlib", reason="pictures need minidl[plot]")

from matplotlib.colors import to_hex  # noqa: E402

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


@pytest.mark.parametrize(("ways", "words"), [(("graph_step",), "captured"), (("step", "graph_step"), "eager")])
def test_memory_says_of_which_step_it_is(ways, words):
    content = resnet20()
    for way in ways:
        content = timed_within(content, way)
    assert plots.memory(only(content)).axes[0].get_xlabel() == f"time of one {words} step, ms"


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
        "resnet50 224×224 bf16 1 rank": [(1, 32), (1, 256)],
        "resnet50 224×224 bf16 b32 over ranks": [(1, 32), (2, 32)],
        "resnet20 32×32 bf16 1 rank": [(1, 64)],
    }
    many = [only(fake("lenet", 32, 2**i)) for i in range(9)]
    with pytest.raises(plots.NotInFile, match="no layers: 9 batch sizes of lenet 32×32, and one picture holds 8"):
        plots.layers(many)


def test_seven_curves_of_scaling_are_too_many_for_one_picture():
    runs = [only(fake("lenet", 32, batch, ranks=ranks)) for batch in range(1, 16, 2) for ranks in (1, 2)]
    with pytest.raises(plots.NotInFile, match="no scaling: .* curves, and one picture holds 6; give fewer files"):
        plots.scaling(runs)
