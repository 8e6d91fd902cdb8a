"""What all pictures share: colours, headings, files, and the command that draws them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from minidl import cli
from minidl.profile import plots, result, write
from minidl.profile.plots import style
from minidl.profile.runs import COMPUTE
from tests.fake_results import MACHINE, edited, fake, only, resnet20

matplotlib = pytest.importorskip("matplotlib", reason="pictures need minidl[plot]")

from matplotlib.colors import to_hex, to_rgb  # noqa: E402

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
    assert made == own | {"one-resnet20-32x32-bf16-1-rank-layers.svg"}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(plots.KINDS) and sum(line.startswith("wrote ") for line in lines) == 5
    assert [line for line in lines if line.startswith(f"{path}: no communication roofline: measured on one rank")]
    assert [line for line in lines if line.startswith(f"{path}: no scaling: ")]


def test_files_that_are_drawn_one_by_one_keep_their_pictures(save_as, tmp_path):
    made = [set(plots.make([save_as(name, resnet20())], output=tmp_path)[0]) for name in ("a.json", "b.json")]
    assert not made[0] & made[1]


def test_each_run_of_a_file_has_its_own_pictures(save_as, tmp_path):
    content = resnet20()
    content["rows"] += [row | {"arm": "torch"} for row in content["rows"]]
    command(save_as("a.json", content), "--kind", "bars", "--format", "png", "--output", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "a-resnet20-32x32-b64-bf16-1-rank-bars.png", "a-resnet20-32x32-b64-bf16-torch-1-rank-bars.png"
    }  # fmt: skip
    with pytest.raises(plots.NotInFile, match="the samples of the memory are those of resnet20 32×32, batch 64, bf16$"):
        plots.memory(plots.runs(content, "a.json")[1])


def test_files_of_one_name_in_two_folders(save_as, tmp_path):
    one, two = (save_as(name, fake("lenet", 32, 8, ranks=n)) for name, n in (("h200/r.json", 1), ("x2/r.json", 2)))
    written, _ = plots.make([one, two], output=tmp_path / "out", format="svg")
    names = {path.name for path in written}
    assert {"h200-r-bars.svg", "x2-r-bars.svg", "x2-r-communication.svg", "scaling.svg", "share.svg"} <= names


def test_a_compressed_file_gives_its_pictures_the_same_names(save_as, tmp_path):
    content = fake("lenet", 32, 8)
    made = [
        {path.name for path in plots.make([save_as(name, content)], output=tmp_path / "out", format="svg")[0]}
        for name in ("r.json", "r.json.gz")
    ]
    assert made[0] == made[1] and "r-bars.svg" in made[0]


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


@pytest.mark.parametrize("words", [
    ["fuse", "--device", "cpu", "--map"],
    ["plan", "--model", "nowhere:network", "--plot"],
    ["simulate", "nowhere.json", "--plot"],
])  # fmt: skip
def test_a_picture_that_cannot_be_is_refused_before_the_work(words, tmp_path, capsys, monkeypatch):
    """What is asked for would fail, or take long: it is not begun."""

    def refused(path):
        with pytest.raises(SystemExit) as stop:
            cli.main([*words, str(path)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    option = words[-1]
    assert f"{option} must be a name that ends with .svg or .png, got" in refused(tmp_path / "picture.zzz")
    assert f"{option} must be a file" in refused(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'minidl[plot]'" in refused(tmp_path / "picture.svg")


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
    with pytest.raises(ValueError, match="--output must be a folder, there already or to be made, .*x.json is a file"):
        command(path, "--output", tmp_path / "x.json")
    row = {"case": "a", "pass": "forward", "dtype": "bf16", "arm": "minidl", "ms": 1.0, "spread": 0.0}
    foreign = save_as("conv.json", result("bench_conv", [row | {"floor_ms": None, "peers": {}}], MACHINE))
    with pytest.raises(ValueError, match="conv.json: no roofline: it has no measured ceilings"):
        command(foreign, "--kind", "roofline")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"plots is not available .* pip install 'minidl\[plot\]'"):
        command(path, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
