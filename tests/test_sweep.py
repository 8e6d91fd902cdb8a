"""Sweeps: every combination once, each in a process of its own; what was measured is kept, what fails is told."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from textwrap import indent

import pytest

from minidl import cli
from minidl.bench import sweep
from minidl.bench.run import bench_network
from minidl.bench.setup import Setup
from minidl.dist.communicator import SOLO
from minidl.profile import plots, results
from minidl.profile.results import load
from minidl.profile.runs import runs

# Stands for `minidl bench`: notes that it was run, and writes what the verb would.
FAKE = """
import argparse, json, os, signal, sys, time
p = argparse.ArgumentParser()
for name in ("verb", "--model", "--batch", "--precision", "--device", "--json"):
    p.add_argument(name)
p.add_argument("--kernels", action="store_true")
ranks = int(sys.argv.pop(1))
a = p.parse_args()
with open(os.environ["FAKE_LOG"], "a") as log:
    print(ranks, a.verb, a.model, a.batch, a.precision, file=log)
behaviour = os.environ.get("FAKE_" + (a.batch or ""), "")
if behaviour == "fail":
    print("line one\\n\\nminidl bench: no memory for 64 samples", file=sys.stderr)
    sys.exit(2)
if behaviour == "silent":
    sys.exit(0)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour in ("hang", "stubborn"):
    time.sleep(60)
if behaviour == "several":
    inner = [{"case": f"{a.model}/b{b}", "setup": {"batch": b}, "step": {}} for b in (1, 2)]
row = {"case": f"{a.model}/b{a.batch}", "layer": "conv1", "pass": "forward", "dtype": a.precision or "fp32",
       "arm": "minidl", "ms": 1.0, "spread": 0.0, "floor_ms": None, "peers": {}, "ranks": ranks, "batch": None}
machine = {"gpu": behaviour[8:] if behaviour.startswith("machine") else "NVIDIA H200"}
more = {"points": inner} if behaviour == "several" else {"setup": {"model": a.model, "batch": int(a.batch)}, "step": {}}
content = {"schema": 1, "benchmark": a.verb, "commit": "c0ffee", "machine": machine, "rows": [row], "spans": [1],
           "ceilings": {"copy": 1}, "conventions": "c", "warnings": ["hot"] * (a.batch == "32"), **more}
os.makedirs(os.path.dirname(a.json), exist_ok=True)
with open(a.json, "w") as file:
    json.dump(content, file)
"""


def parser_of(verb):
    parser = argparse.ArgumentParser(prog=f"minidl bench {verb}")
    parser.add_argument("--model", nargs="+" if verb == "model" else None)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--device")
    parser.add_argument("--input", action="append")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--no-capture", action="store_true")
    parser.add_argument("--augment", action=argparse.BooleanOptionalAction)
    for name in ("--json", "--csv", "--trace"):
        parser.add_argument(name)
    return parser


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where sweeps run; ``log`` in it lists the processes that ran."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path


def program(folder):
    return lambda ranks: [sys.executable, str(folder / "fake.py"), str(ranks)]


def toml(folder, text):
    path = folder / "grid.toml"
    path.write_text(text)
    return path


GRID = 'verb = "layers"\n[fixed]\nmodel = "resnet20"\n[grid]\nbatch = [32, 64]\nranks = [1, 2]\n'


def run(folder, text=GRID, *words):
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return sweep.run(parser.parse_args([str(toml(folder, text)), *words]), parser_of, program(folder))


def processes(folder):
    """The points that ran since the last question."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.write_text("")
    return lines


# -- reading ----------------------------------------------------------------------------------------------------------


def read(folder, text):
    return sweep.read(toml(folder, text), parser_of)


def words_of(folder, text):
    return [point.words for point in read(folder, text)]


def test_the_grid_is_every_combination_once(folder):
    points = read(folder, GRID)
    assert [(p.options, p.ranks) for p in points] == [
        ({"batch": batch, "ranks": ranks}, ranks) for batch in (32, 64) for ranks in (1, 2)
    ]
    assert points[3].words == ("layers", "--model=resnet20", "--batch=64")
    assert points[3].label == "resnet20 batch 64 ranks 2"
    assert len({p.name for p in points}) == 4  # ranks are part of it
    assert [p.name for p in points] == [p.name for p in read(folder, GRID)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("image_size = 64", ["--image-size=64"]),
        ("batch = -1", ["--batch=-1"]),
        ("kernels = true", ["--kernels"]),
        ("kernels = false", []),
        ("no_capture = true", ["--no-capture"]),
        ("no_capture = false", []),
        ("augment = true", ["--augment"]),
        ("augment = false", ["--no-augment"]),
        ('input = ["1x2", "3x4"]', ["--input=1x2", "--input=3x4"]),
    ],
)
def test_options_are_typed_as_the_verb_reads_them(folder, line, words):
    assert words_of(folder, f'verb = "layers"\n[fixed]\n{line}') == [("layers", *words)]


def test_lists_are_for_options_that_take_several(folder):
    assert words_of(folder, 'verb = "model"\n[fixed]\nmodel = ["a", "b"]') == [("model", "--model", "a", "b")]
    found = words_of(folder, 'verb = "model"\n[grid]\nmodel = [["a", "b"], ["c"], "d"]')
    assert [words[1:] for words in found] == [("--model", "a", "b"), ("--model", "c"), ("--model=d",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("verb = ", "not TOML"),
        ("", "verb must be one of layers, model, got None"),
        ('verb = "layer"', "verb must be one of layers, model, got 'layer'"),
        ('verb = "layers"\nfix = 1', "unknown entry 'fix'; did you mean 'fixed'"),
        ('verb = "layers"\ngrid = 1', "fixed and grid must be tables"),
        ('verb = "layers"\n[grid]\nbacth = [1]', "unknown option 'bacth'; did you mean 'batch'"),
        ('verb = "layers"\n[fixed]\nimage-size = 1', "unknown option 'image-size'; did you mean 'image_size'"),
        ('verb = "layers"\n[fixed]\njson = "x"', "'json' cannot be set"),
        ('verb = "layers"\n[fixed]\ntrace = "x"', "'trace' cannot be set"),
        ('verb = "layers"\n[fixed]\nbatch = 1\n[grid]\nbatch = [1]', "'batch' stands in fixed and in grid"),
        ('verb = "layers"\n[grid]\nbatch = []', r"grid.batch must be a list of different values, got \[\]"),
        ('verb = "layers"\n[grid]\nbatch = 32', "grid.batch must be a list of different values, got 32"),
        ('verb = "layers"\n[grid]\nbatch = [1, 2, 1]', r"a list of different values, got \[1, 2, 1\]"),
        ('verb = "layers"\n[grid]\nbatch = [1, "x"]', "batch x: argument --batch: invalid int value: 'x'"),
        ('verb = "layers"\n[grid]\nprecision = ["fp8"]', "precision fp8: argument --precision: invalid choice"),
        ('verb = "layers"\n[fixed]\nbatch = [1, 2]', r"batch must be one value, got \[1, 2\]; what is to vary stands"),
        ('verb = "layers"\n[fixed]\nkernels = 1', "kernels must be true or false, got 1"),
        ('verb = "layers"\n[fixed]\nbatch = true', "batch must be a value, got True"),
        ('verb = "layers"\n[fixed]\nbatch = {a = 1}', "batch must be text, a number, true or false"),
        ('verb = "layers"\n[grid]\nranks = [0]', "ranks must be an integer of at least 1, got 0"),
        ('verb = "layers"\n[fixed]\nranks = "2"', "ranks must be an integer of at least 1, got '2'"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_runs(folder, text, message):
    with pytest.raises(ValueError, match=rf"grid\.toml: .*{message}"):
        run(folder, text)
    assert processes(folder) == [] and sorted(p.name for p in folder.iterdir()) == ["fake.py", "grid.toml", "log"]


def test_ranks_are_started_by_the_launcher():
    from minidl.launch import _parser

    assert sweep.program(1) == [sys.executable, "-m", "minidl", "bench"]
    command = sweep.program(3)
    assert command[:3] == [sys.executable, "-m", "minidl.launch"]
    options = _parser().parse_args([*command[3:], "layers", "--batch=1", "--json", "x"])
    assert (options.ranks, options.module, options.script) == (3, True, "minidl")
    assert options.arguments == ["bench", "layers", "--batch=1", "--json", "x"]


def test_the_verbs_own_parsers_know_what_the_documentation_names(folder, capsys):
    from minidl.bench.command import parser_of as real

    assert len(sweep.read(toml(folder, sweep.EXAMPLE), real)) == 4
    with pytest.raises(SystemExit):
        cli.main(["bench", "sweep", "--help"])
    assert indent(sweep.EXAMPLE, "  ") in capsys.readouterr().out
    page = Path(__file__).parents[1] / "docs" / "benchmarks.md"
    assert f"```toml\n{sweep.EXAMPLE}```" in page.read_text()
    for verb in sweep.VERBS:
        assert len(sweep.read(toml(folder, f'verb = "{verb}"\n[grid]\nprecision = ["fp32", "bf16"]'), real)) == 2


# -- running ----------------------------------------------------------------------------------------------------------


def test_a_sweep_merges_the_rows_of_all_points(folder, capsys):
    assert run(folder, GRID.replace("ranks =", "kernels = [false, true]\nranks =")) == 0
    ran = [f"{ranks} layers resnet20 {batch} None" for batch in (32, 64) for _ in range(2) for ranks in (1, 2)]
    assert processes(folder) == ran
    content = load(folder / "grid.json")
    assert (content["benchmark"], content["machine"]["gpu"], len(content["rows"])) == ("layers", "NVIDIA H200", 8)
    keys = {(row["case"], row["ranks"]) for row in content["rows"]}
    assert (
        len(keys) == 8 and ("resnet20/b64, kernels=True", 2) in keys
    )  # what no column of the key tells, the case does
    for row, point in zip(content["rows"], content["points"], strict=True):
        options = point["options"]
        assert {name: row[name] for name in options} == options
        assert point["case"] == row["case"]
        assert point["setup"] == {"model": "resnet20", "batch": options["batch"]} and point["ranks"] == options["ranks"]
        assert point["error"] is None and point["seconds"] > 0
    assert content["points"][-1]["command"] == "layers --model=resnet20 --batch=64 --kernels"
    assert content["ceilings"] == {"copy": 1} and "spans" not in content
    assert "resnet20 batch 32 kernels False ranks 1: hot" in content["warnings"] and len(content["warnings"]) == 4
    told = capsys.readouterr().out
    assert "2/8 resnet20 batch 32 kernels False ranks 2 ... " in told and " s\n" in told
    assert told.endswith("grid.json: 8 of 8 points\n")


def test_what_was_measured_is_kept_and_only_that(folder, capsys, monkeypatch):
    assert run(folder, GRID, "--json", str(folder / "out" / "x.json")) == 0
    assert len(processes(folder)) == 4
    first = load(folder / "out" / "x.json")
    parts = sorted((folder / "out" / "x.json.parts").iterdir())
    assert len(parts) == 4 and {p.suffix for p in parts} == {".json"}
    capsys.readouterr()

    wider = GRID.replace("[32, 64]", "[16, 32, 64]")
    assert run(folder, wider, "--json", str(folder / "out" / "x.json")) == 0
    assert [line.split()[3] for line in processes(folder)] == ["16", "16"]  # new points only
    assert capsys.readouterr().out.count("... kept\n") == 4
    assert load(folder / "out" / "x.json")["rows"][2:] == first["rows"]

    parts[0].write_text(parts[0].read_text()[:-100])  # cut short
    stripped = json.loads(parts[1].read_text())
    del stripped["sweep"]  # its sweep was killed before it looked at it
    parts[1].write_text(json.dumps(stripped))
    assert run(folder, GRID, "--json", str(folder / "out" / "x.json")) == 0
    assert len(processes(folder)) == 2
    assert run(folder, GRID, "--json", str(folder / "out" / "x.json"), "--fresh") == 0
    assert len(processes(folder)) == 4
    monkeypatch.setattr(sweep, "_source", lambda: "other code")
    assert run(folder, GRID, "--json", str(folder / "out" / "x.json")) == 0
    assert len(processes(folder)) == 4


def test_the_digest_of_the_code_changes_with_the_code(folder, monkeypatch):
    package = folder / "minidl"
    (package / "bench").mkdir(parents=True)
    monkeypatch.setattr(sweep, "__file__", str(package / "bench" / "sweep.py"))
    digests = []
    for name, text in [("a.py", "1"), ("a.py", "2"), ("b.cu", "2"), ("notes.txt", "x")]:
        (package / name).write_text(text)
        digests.append(sweep._source())
    assert len(set(digests)) == 3 and digests[2] == digests[3]  # text is no code


def test_a_point_that_fails_is_told_and_the_others_go_on(folder, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_64", "fail")
    monkeypatch.setenv("FAKE_128", "silent")
    assert run(folder, GRID.replace("64]", "64, 128, 256]").replace("[1, 2]", "[1]")) == 1
    told = capsys.readouterr()
    assert "2/4 resnet20 batch 64 ranks 1 ... failed after" in told.out and "2 of 4 points" in told.out
    assert "  exit status 2\n  line one\n  minidl bench: no memory for 64 samples\n" in told.err
    assert "  it left no result: " in told.err
    content = load(folder / "grid.json")
    assert [row["batch"] for row in content["rows"]] == [32, 256]
    assert [(p["options"]["batch"], p["error"] is None) for p in content["points"]] == [
        (32, True), (64, False), (128, False), (256, True),
    ]  # fmt: skip
    assert "no memory for 64 samples" in content["points"][1]["error"] and content["points"][1]["setup"] is None
    processes(folder)
    monkeypatch.delenv("FAKE_64")
    monkeypatch.delenv("FAKE_128")
    assert run(folder, GRID.replace("64]", "64, 128, 256]").replace("[1, 2]", "[1]")) == 0
    assert [line.split()[3] for line in processes(folder)] == ["64", "128"]  # failures are tried again


def test_a_result_left_from_before_does_not_pass_for_a_failed_run(folder, monkeypatch):
    assert run(folder) == 0
    monkeypatch.setenv("FAKE_64", "silent")
    assert run(folder, GRID, "--fresh") == 1
    assert {row["batch"] for row in load(folder / "grid.json")["rows"]} == {32}


def test_nothing_is_written_when_no_point_succeeds(folder, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_32", "fail")
    monkeypatch.setenv("FAKE_64", "fail")
    assert run(folder) == 1
    assert "no point succeeded" in capsys.readouterr().err and not (folder / "grid.json").exists()


@pytest.mark.parametrize("how", ["hang", "stubborn"])  # the second does not end when asked to
def test_a_point_that_hangs_is_ended(folder, monkeypatch, capsys, how):
    monkeypatch.setenv("FAKE_32", how)
    monkeypatch.setattr(sweep, "_PATIENCE_S", 0.5)
    started = time.perf_counter()
    assert run(folder, GRID.replace("[1, 2]", "[1]").replace(", 64]", "]"), "--timeout", "1.5") == 1
    assert time.perf_counter() - started < 30  # not the 60 that it sleeps
    assert "took more than 1.5 s" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--timeout must be a number of seconds above 0, got 0.0"):
        run(folder, GRID, "--timeout", "0")


def test_an_interrupted_sweep_ends_its_process_and_goes_on_later(folder, monkeypatch, capsys):
    started = []

    class Interrupted(sweep.subprocess.Popen):
        def wait(self, timeout=None):
            if len(started) < 2:
                started.append(self)
            if len(started) == 2 and timeout is None:
                started.append(None)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(sweep.subprocess, "Popen", Interrupted)
    monkeypatch.setenv("FAKE_64", "hang")
    assert run(folder, GRID.replace("[1, 2]", "[1]")) == 130
    assert "run the same command to go on" in capsys.readouterr().err
    assert started[1].returncode is not None and started[1].returncode < 0  # by the signal
    monkeypatch.undo()
    monkeypatch.setenv("FAKE_LOG", str(folder / "log"))
    processes(folder)
    assert run(folder, GRID.replace("[1, 2]", "[1]")) == 0
    assert [line.split()[3] for line in processes(folder)] == ["64"]


def test_points_of_two_machines_are_not_mixed(folder, monkeypatch):
    monkeypatch.setenv("FAKE_64", "machine NVIDIA A100")
    message = r"batch 64 ranks 1 was measured on NVIDIA A100, the points before it on NVIDIA H200; .*--fresh"
    with pytest.raises(ValueError, match=message):
        run(folder)
    assert not (folder / "grid.json").exists()


def test_a_point_may_hold_several_networks(folder, monkeypatch):
    monkeypatch.setenv("FAKE_64", "several")
    assert run(folder, GRID.replace("ranks = [1, 2]", "kernels = [true]")) == 0
    points = load(folder / "grid.json")["points"]
    assert [p["case"] for p in points] == [
        "resnet20/b32, kernels=True", "resnet20/b1, kernels=True", "resnet20/b2, kernels=True",
    ]  # fmt: skip
    assert [(p["options"]["batch"], p["setup"]["batch"]) for p in points] == [(32, 32), (64, 1), (64, 2)]


# -- what becomes of the file -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept():
    """The merged file of two batches, one of which two options were tried at, and a point that failed."""
    ceilings = {"copy_gb_per_s": 20.0, "matrix_tflops": {"fp32": 0.1}, "vector_tflops": {"fp32": 0.1}}
    points, outcomes = [], []
    for batch, group_mb in ((2, 0), (2, 4), (4, 4), (8, 4)):
        options = {"batch": batch, "group_mb": group_mb}
        points.append(sweep.Point(options, ("model", f"--batch={batch}"), 1, f"batch {batch}"))
        content = bench_network(Setup("lenet", batch, "fp32", "cpu"), SOLO, ceilings, isolated=False, seconds=0.01)
        outcomes.append(content | {"sweep": {"seconds": 1.0}} if batch < 8 else RuntimeError("no memory"))
    return json.loads(json.dumps(sweep._merged(points, outcomes)))


def test_a_sweeps_file_is_shown_network_by_network(swept, tmp_path, capsys):
    path = tmp_path / "grid.json"
    results.write(path, swept)
    assert cli.main(["bench", "show", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.count("lenet 32×32, group_mb=0 ") == 1 and told.count("lenet 32×32, group_mb=4 ") == 2
    assert cli.main(["bench", "show", str(path), "--view", "time"]) == 0
    assert capsys.readouterr().out.count("milliseconds, within the eager step") == 3
    found = runs(swept, "grid.json")
    assert [run.point["options"]["group_mb"] for run in found] == [0, 4, 4]
    assert all(run.record["eager"]["ms"] == run.step["ms"] for run in found)


def test_a_sweeps_file_is_compared_and_drawn(swept, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need minidl[plot]")
    path = tmp_path / "grid.json"
    results.write(path, swept)
    assert cli.main(["bench", "compare", str(path), str(path), "--strict"]) == 0
    written, reasons = plots.make([path], output=tmp_path / "out")
    kinds = [name.stem for name in written]
    assert "grid-lenet-32x32-group-mb-4-fp32-1-rank-layers" in kinds and "grid-share" in kinds
    assert any("no scaling: it takes one network" in text for text in reasons)
