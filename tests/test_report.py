"""The pages made from result files show what is in the files, whatever files there are."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from minidl.bench import command
from minidl.bench.run import bench_network, merged
from minidl.bench.setup import Setup
from minidl.dist.communicator import SOLO
from minidl.profile.results import write

pytest.importorskip("matplotlib", reason="pictures need minidl[plot]")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report():
    """benchmarks/report.py as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def forget(pages):
    for kept in (pages.measured, pages.campaigns, pages._every):
        kept.cache_clear()


@pytest.fixture
def pages(report):
    forget(report.layers)
    yield report.layers
    forget(report.layers)


@pytest.fixture(scope="module")
def content():
    """Two batches of a small network, as `minidl bench model` writes them."""
    setups = [Setup("lenet", batch, "fp32", "cpu") for batch in (2, 4)]
    ceilings = {"copy_gb_per_s": 20.0, "matrix_tflops": {"fp32": 0.1}, "vector_tflops": {"fp32": 0.1}}
    return merged([bench_network(s, SOLO, ceilings, isolated=False, seconds=0.01) for s in setups])


def on_two_ranks(content):
    return on_ranks(content, 2)


def on_ranks(content, ranks):
    """The same as if several ranks had measured it."""
    changed = json.loads(json.dumps(content))
    for part in (*changed["rows"], *(point["setup"] for point in changed["points"])):
        part["ranks"] = ranks
    carrier = next(row for row in changed["rows"] if row["layer"] == "conv1" and row["pass"] == "forward")
    message = {"pass": "all_reduce", "wire_bytes": 1000.0, "exposed_ms": 5.0, "ms": 6.0, "flop": None, "bytes": None}
    changed["rows"].insert(0, carrier | message)
    return changed


def cells(text, line):
    """The cells of the line that begins with ``line``."""
    return [[c.strip() for c in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith(f"| {line} |")]


def test_a_line_for_each_network_and_a_page_with_each_layer(pages, content, tmp_path):
    write(tmp_path / "cpu" / "bench_model_small.json", content)
    overview = pages.overview(tmp_path)
    assert [line[1:4] for line in cells(overview, "lenet 32×32")] == [["2", "1", "fp32"], ["4", "1", "fp32"]]
    assert "(layers/lenet.md)" in overview
    page = pages.page(tmp_path, "lenet")
    (head, *layers) = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert "share, b2 | share, b4 | roof, b2 | roof, b4 | FLOP/B, b2 | FLOP/B, b4" in head
    names = [row["layer"] for row in content["rows"] if row["case"].endswith("b2") and row["index"] is not None]
    assert [line.split(" | ")[0].strip("| ") for line in layers] == [
        *dict.fromkeys(names), "loss", "optimizer", "unaccounted",
    ]  # fmt: skip
    shares = [float(cell.rstrip("%")) for line in layers if (cell := line.split("|")[4].strip())]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    rows = [row for row in content["rows"] if row["case"].endswith("b2") and row["layer"] == "conv1"]
    roof = sum(row["floor_ms"] for row in rows) / sum(row["timings"]["step"]["ms"] for row in rows)
    assert cells(page, "conv1")[0][5] == f"{roof:.0%}"
    assert content["command"] in page and "benchmarks/results/cpu/bench_model_small.json" in page


def test_the_energy_of_a_layer_is_shown_where_it_was_measured(pages, content, tmp_path):
    write(tmp_path / "cpu" / "bench_model_a.json", content)
    assert "mJ/image" not in pages.page(tmp_path, "lenet")
    forget(pages)
    powered = json.loads(json.dumps(content))
    for row in powered["rows"]:
        if row["layer"] == "conv1" and row["case"].endswith("b4"):
            row["energy_mj"] = 6.0  # of each of its two passes, on four images
    write(tmp_path / "cpu" / "bench_model_a.json", powered)
    page = pages.page(tmp_path, "lenet")
    (head,), (conv1,), (relu1,) = (cells(page, name) for name in ("layer", "conv1", "relu1"))
    assert head[-1] == "mJ/image, b4" and conv1[-1] == "3.00" and relu1[-1] == ""


def test_a_file_that_is_dropped_in_is_shown(pages, content, tmp_path):
    write(tmp_path / "cpu" / "bench_model_a.json", content)
    assert "Over ranks" not in pages.page(tmp_path, "lenet")
    write(tmp_path / "cpu-x2" / "bench_model_b.json", on_two_ranks(content))
    forget(pages)
    page = pages.page(tmp_path, "lenet")
    assert "## Over ranks: lenet 32×32, batch 2 on each" in page
    over = page[page.index("## Over ranks: lenet 32×32, batch 2") :]
    head, line = cells(over, "layers")[0], cells(over, "conv1")[0]
    assert head == ["layers", "share, 1 rank", "share, 2 ranks", "exposed, 2 ranks", "FLOP/wire B, 2 ranks"]
    flop = sum(row["flop"] or 0 for row in content["rows"] if row["layer"] == "conv1" and row["case"].endswith("b2"))
    assert line[4] == f"{flop / 1000:,.0f}" and float(line[3].rstrip("%")) > 0
    assert cells(over, "relu1")[0][3:] == ["", ""], "no message, no intensity"
    assert "`mpirun -n 2 " in page


def test_the_newest_of_the_same_measurement_counts(pages, content, tmp_path):
    for name, date, ms in (("b", "2026-01-01", 111.0), ("a", "2026-02-01", 222.0)):
        write(tmp_path / "cpu" / f"bench_model_{name}.json", with_steps_of(content, ms, date))
    assert "222.0" in pages.overview(tmp_path) and "111.0" not in pages.overview(tmp_path)


def test_a_step_stands_beside_the_fastest_way_of_pytorch_that_a_run_had(report):
    """A later run without that way would look better for it."""

    def run(date, ms, **peers):
        peers = {f"torch-{name}": theirs for name, theirs in peers.items()}
        row = {"case": "net/8x8/b2", "dtype": "bf16", "arm": "compiled, auto", "ms": ms, "images_per_s": 1.0}
        return {"date": date, "machine": {"cores": 2}, "rows": [row | {"peers": peers}]}

    runs = [run("1", 4.0, graph=12.0), run("2", 4.0, graph=12.0, **{"compile-graph": 6.0}), run("3", 3.0, graph=12.0)]
    for some, speed, theirs in ((runs[:1], "3.00", "12.0"), (runs, "1.50", "6.0"), (runs[::2], "4.00", "12.0")):
        (line,) = cells(report.speed.training(some), "net/8x8/b2")
        assert speed in line and theirs in line, line


def with_steps_of(content, ms, date):
    changed = json.loads(json.dumps(content)) | {"date": date}
    for row in changed["rows"]:
        row["ms"] = ms if row["pass"] == "step" else row["ms"]
    return changed


def test_ranks_are_compared_within_a_campaign(pages, content, tmp_path):
    """What was measured on one rank months later stands in the table of one rank, and makes no scaling."""
    write(tmp_path / "cpu-x1" / "bench_model.json", with_steps_of(content, 100.0, "2026-01-02T10:00:00+00:00"))
    several = with_steps_of(on_two_ranks(content), 125.0, "2026-01-02T12:00:00+00:00")
    write(tmp_path / "cpu-x2" / "bench_model.json", several)
    write(tmp_path / "cpu" / "bench_model.json", with_steps_of(content, 50.0, "2026-03-01T00:00:00+00:00"))
    alone, over = pages.overview(tmp_path).split("Over ranks")
    assert {line[4] for line in cells(alone, "lenet 32×32")} == {"50.000"}
    assert {(line[2], line[4]) for line in cells(over, "lenet 32×32")} == {("1", "100.0"), ("2", "125.0")}
    assert "measured 2026-03-01 at" in alone and "measured 2026-01-02 at" in over
    ((_, (runs,)),) = pages.of_networks(tmp_path).values()
    efficiencies = [curve.efficiency[-1] for curve in pages.curves(runs, ["weak"])]
    assert efficiencies == pytest.approx([0.8, 0.8])


def test_an_earlier_campaign_is_shown_while_it_knows_what_no_later_one_does(pages, content, tmp_path):
    def campaign(day, ms, *ranks):
        for n in ranks:
            found = with_steps_of(
                on_ranks(content, n) if n > 1 else content, ms * n, f"2026-01-0{day}T10:0{n}:00+00:00"
            )
            write(tmp_path / f"cpu-x{n}" / f"bench_model_{day}.json", found)
        forget(pages)

    campaign(1, 100.0, 1, 2, 3)
    campaign(2, 50.0, 1, 2)
    _, new, old = pages.overview(tmp_path).split("Over ranks")
    steps = lambda text: {(line[2], line[4]) for line in cells(text, "lenet 32×32")}  # noqa: E731
    assert steps(new) == {("1", "50.000"), ("2", "100.0")} and len(steps(old)) == 3
    page = pages.page(tmp_path, "lenet")
    assert page.count("## Over ranks: lenet 32×32, batch 2 on each") == 2
    assert page.index("Measured 2026-01-02") < page.index("Measured 2026-01-01")
    campaign(2, 50.0, 3)
    assert pages.overview(tmp_path).count("Over ranks") == 1, "all of it was measured again"


def test_every_picture_of_a_page_can_be_drawn(pages, content, tmp_path):
    write(tmp_path / "cpu" / "bench_model_a.json", content)
    write(tmp_path / "cpu-x2" / "bench_model_b.json", on_two_ranks(content))
    drawn = {f"{name}.png": figure() for name, _, figure in pages.pictures(tmp_path)}
    assert set(re.findall(r"\(([^)]*\.png)\)", pages.page(tmp_path, "lenet"))) == drawn.keys()
    kinds = ("share", "over-batches", "over-ranks", "weak", "strong")
    assert drawn.keys() == {f"lenet-fp32-{kind}.png" for kind in kinds}


def test_ranks_of_different_commits_make_no_scaling(pages, content, tmp_path):
    """What differs may be the code: no picture of efficiency, and a sentence beside the tables."""
    write(tmp_path / "cpu" / "bench_model_a.json", content | {"commit": "a" * 40})
    write(tmp_path / "cpu-x2" / "bench_model_b.json", on_two_ranks(content) | {"commit": "a" * 40})
    told = "different commits (1: aaaaaaa; 2: bbbbbbb) and do not tell scaling"
    drawn = lambda: {name.rpartition("-")[2] for name, *_ in pages.pictures(tmp_path)}  # noqa: E731
    assert {"weak", "strong"} <= drawn() and "do not tell scaling" not in pages.overview(tmp_path)
    write(tmp_path / "cpu-x2" / "bench_model_b.json", on_two_ranks(content) | {"commit": "b" * 40})
    forget(pages)
    assert not {"weak", "strong"} & drawn()
    write(tmp_path / "cpu-x4" / "bench_model_b.json", on_ranks(content, 4) | {"commit": "b" * 40})
    forget(pages)
    assert not {"weak", "strong"} & drawn(), "from two ranks to four it would seem to scale better"
    told = told.replace(")", "; 4: bbbbbbb)")
    assert told in pages.overview(tmp_path) and told in pages.page(tmp_path, "lenet")


def test_without_files_the_page_says_so(pages, tmp_path):
    assert pages.overview(tmp_path) == "Nothing was recorded yet."


def test_the_recorded_pages_show_no_picture_that_is_not_there():
    shown = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / link).is_file(), f"{page}: {link}"
            shown += 1
    assert shown > 20


def test_a_page_without_its_marks_is_an_error(report):
    made = report.between("a <!-- x: made by benchmarks/report.py --> old <!-- end of x --> b", "x", "new")
    assert "old" not in made and made.startswith("a <!-- x") and made.endswith("b") and "\n\nnew\n\n" in made
    with pytest.raises(ValueError, match="lacks the marks <!-- x: made"):
        report.between("text", "x", "new")


def test_every_option_of_every_verb_is_documented():
    """In words, or by what can be chosen: the list is --help's."""
    for verb in command.VERBS:
        for action in command.parser_of(verb)._actions:
            assert action.help or action.choices, (verb, action)


def test_every_table_of_speed_has_its_command(report):
    page = (ROOT / "docs" / "speed.md").read_text()
    listed = report.speed.commands().splitlines()[2:]
    for line in listed:
        _, file, head, _, command, _ = (cell.strip() for cell in line.split("|"))
        assert f"| {head} |" in page, head
        assert (ROOT / "benchmarks" / "results" / file.strip("`")).is_file() and len(command) > 10
    assert len(listed) >= len(report.speed.TABLES)


def test_the_table_of_the_readme_is_sorted_and_has_each_step_once(report):
    lines = [line.split("|")[1:-1] for line in report.speed.headline().splitlines()[2:]]
    speeds = [float(line[3]) for line in lines]
    assert speeds == sorted(speeds) and speeds[0] < 1
    names = [(line[0], line[1], line[2].split(":")[0]) for line in lines]
    assert len(set(names)) == len(names) and 8 <= len(names) <= 24
    for line, speed in zip(lines, speeds, strict=True):
        if line[0].strip().startswith("training step:"):
            theirs, ours = map(float, re.search(r"([\d.]+) ms, here ([\d.]+)", line[2]).groups())
            assert theirs / ours == pytest.approx(speed, rel=0.02)
        else:
            assert float(line[4].partition(":")[0]) <= speed, "the worst is worse than the mean"


def test_without_files_each_part_says_so(report, monkeypatch, tmp_path):
    monkeypatch.setattr("pages.files.RESULTS", tmp_path)
    monkeypatch.setattr("pages.speed.RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    nothing = {"Nothing was recorded yet."}
    for page, parts in report.PARTS.items():
        for name, make in parts.items():
            assert set(make().split("\n\n")) == nothing, (page, name)


def test_the_sample_has_one_layer_of_each_type_and_closes(pages, content, tmp_path):
    assert pages.sample(tmp_path, "lenet", "fp32") == "Nothing was recorded yet."
    forget(pages)
    whole = json.loads(json.dumps(on_two_ranks(content)))
    setup = whole.pop("points")[1]
    rows = [row for row in whole["rows"] if row["case"] == setup["case"]]
    write(tmp_path / "cpu-x2" / "bench_layers.json", whole | setup | {"rows": rows})
    lines = [
        [c.strip() for c in row.split("|")[1:-1]] for row in pages.sample(tmp_path, "lenet", "fp32").splitlines()[4:]
    ]
    types = [line[1] for line in lines if line[1]]
    assert len(types) == len(set(types)) and {"Conv2d", "Linear", "ReLU"} <= set(types)
    assert [line[0] for line in lines if not line[1]] == ["optimizer update", "unaccounted", "step"]
    step = next(row["ms"] for row in rows if row["pass"] == "step")
    assert float(lines[-1][6]) == pytest.approx(step, rel=1e-3)


def test_what_a_plan_gains_is_told_of_turns_in_pairs(report):
    """A clock that drifts from turn to turn makes times spread, not gains."""
    clock = (1.0, 1.3, 0.9, 1.1)
    steps = {"none": 30.0, "bnff": 21.0, "auto": 20.0, "adaptive": 21.0}
    rows = [
        {"case": "net/8x8/b2", "dtype": "bf16", "part": "steps", "arm": arm, "ms": ms, "spread": 0.2}
        | {"turns_ms": [ms * tick for tick in clock], "device_bytes": 1e8 * ms}
        for arm, ms in steps.items()
    ]
    file = {"rows": rows, "machine": {"gpu": "H200"}, "date": "2026-01-01", "commit": "0"}
    head, _, line = (
        [cell.strip() for cell in text.split("|")[1:-1]] for text in report.fusion.fused_steps([file]).splitlines()
    )
    found = dict(zip(head, line, strict=True))
    assert found["best fixed / auto"] == "1.050, 4 of 4" and found["best fixed / adaptive"] == "1.000, 0 of 4"
    assert found["none / chosen"] == "1.43" and found["GB"] == "3.0 → 2.1"


def test_a_benchmark_prints_what_its_pages_show_of_its_file(report, capsys):
    files = sys.modules["pages.files"]
    lines = files.table(["network", "ms"], [["a", "1.5"], ["", "12.5"]])
    files.print_tables({}, lambda _: f"{lines}\n\n{files.NOTHING}", lambda _: files.NOTHING, lambda _: "## title")
    assert capsys.readouterr().out == "\nnetwork    ms\na         1.5\n         12.5\n## title\n"
