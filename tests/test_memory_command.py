"""``minidl plan`` from its options to its last line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minidl import cli, models
from minidl.memory import Plan, Trace, check, problem
from minidl.memory.limit import host_budget, parse_limit
from minidl.memory.record import blank, record
from minidl.memory.visits import candidates, visiting
from minidl.precision import PRECISIONS
from minidl.profile.results import result, write

SMALL = ["plan", "--model", "resnet20", "--batch", "256"]


def _run(capsys, *options: str) -> str:
    assert cli.main([*SMALL, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GB", 8 * 10**9), ("8 GiB", 8 << 30), ("1.5kib", 1536), ("25%", 250), (0.25, 250), ("0.5", 500), (1, 1000),
        ("2048", 2048), (4096, 4096), ("100b", 100),
    ],
)  # fmt: skip
def test_limits_are_sizes_or_parts(text, count):
    assert parse_limit(text, 1000) == count


@pytest.mark.parametrize("text", ["", "much", "0", "-1GB", "8XB", "nan", "inf", "0%", "1.2.3", None, "1e400"])
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ValueError, match="memory: limit must be above 0: a size"):
        parse_limit(text, 1000)


def _system(tmp_path, files: dict[str, str]) -> int | None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_budget(tmp_path)


def test_host_memory_is_what_the_machine_and_the_control_groups_leave(tmp_path):
    gib = 1 << 30
    assert host_budget(tmp_path) is None
    machine = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 << 20} kB\n"}
    assert _system(tmp_path, machine) == int(0.8 * 100 * gib)
    inner = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "5\n",
        "sys/fs/cgroup/job/memory.max": f"{20 * gib}\n",
        "sys/fs/cgroup/job/memory.current": f"{15 * gib}\n",
        "sys/fs/cgroup/job/memory.stat": f"anon 7\ninactive_file {4 * gib}\nactive_file {1 * gib}\n",
    }
    assert _system(tmp_path, inner) == int(0.8 * 10 * gib), "the group around it counts, page cache does not"
    old = {
        "proc/self/cgroup": "3:cpu,memory:/job\n1:name=x:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * gib}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * gib}\n",
    }
    assert _system(tmp_path, old) == int(0.8 * 6 * gib), "a container sees the mount only"


def test_too_little_host_memory_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main([*SMALL, "--limit", "40%", "--no-rebuild", "--host", "1MB"])
    needed = re.search(r"--host must be at least .* \((\d+) bytes\)", capsys.readouterr().err)[1]
    _run(capsys, "--limit", "40%", "--no-rebuild", "--host", needed)


def test_the_plan_that_is_written_fits_the_trace_that_is_written(capsys, tmp_path):
    out = _run(capsys, "--limit", "40%", "--json", str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace.json"))
    trace = Trace.from_json((tmp_path / "trace.json").read_text())
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert check(trace, plan).peak <= plan.capacity == int(0.4 * problem(trace).peak)
    assert trace.facts["model"] == "resnet20" and trace.facts["batch"] == 256
    for word in ("smallest limit", "host memory", "predicted step", "least for this plan", "GB/s", "layer1.0"):
        assert word in out


def test_no_limit_to_speak_of_changes_nothing(capsys):
    out = _run(capsys, "--limit", "100%")
    assert "1.00 times" in out and "rebuilding 0.00 ms, waiting for transfers 0.00 ms" in out


def test_a_limit_too_small_is_one_line_with_the_remedy(capsys):
    with pytest.raises(SystemExit):
        cli.main([*SMALL, "--limit", "1MB"])
    error = capsys.readouterr().err
    found = re.search(r"the smallest feasible limit is (\d+) bytes", error)
    assert found and "alone needs" in error and error.count("\n") == 1
    assert cli.main([*SMALL, "--limit", found[1]]) == 0
    with pytest.raises(SystemExit):
        cli.main([*SMALL, "--limit", str(int(found[1]) - 1)])


def test_the_fusion_that_is_predicted_fastest_is_planned_unless_one_is_named(capsys):
    options = ["plan", "--model", "resnet50", "--batch", "16", "--precision", "bf16", "--limit", "600MiB"]

    def told(*more: str) -> str:
        assert cli.main([*options, *more]) == 0
        return capsys.readouterr().out

    line = re.search(r"^fusion (\w+): predicted ([\d.]+) ms", told(), re.MULTILINE)
    alone = {}
    for how in ("auto", "elementwise", "none"):
        out = told("--fusion", how)
        assert not out.startswith("fusion")
        alone[how] = float(re.search(r"predicted step +([\d.]+) ms", out)[1])
    assert alone[line[1]] == float(line[2]) == min(alone.values()) < max(alone.values())


def test_a_ring_of_several_ranks_holds_what_is_under_way(capsys):
    def state(*more: str) -> float:
        assert (
            cli.main(["plan", "--model", "resnet50", "--batch", "2", "--limit", "100%", "--fusion", "none", *more]) == 0
        )
        return float(re.search(r"([\d.]+) MiB of it parameters", capsys.readouterr().out)[1])

    ring = "--gradients", "ring"
    kept, alone, two = state(), state(*ring), state(*ring, "--ranks", "2")
    assert alone < kept - 80, "of 97 MiB of gradients a message stays"
    assert alone < two <= kept
    assert state("--ranks", "2") == kept


def test_visiting_momentum_may_be_in_a_hurry_as_in_training(capsys):
    """Where there is no room for it as long as its copies take to hide; else that is faster."""
    options = ["--batch", "64", "--precision", "bf16", "--fusion", "none", "--gradients", "ring", "--host-momentum"]
    trace = record(blank(models.build("vgg16", (224, 224, 3), 1000)), 64, precision="bf16", gradients="ring")
    hurried = problem(visiting(trace, candidates(trace)), (0, 0))
    predicted = []
    for limit in (hurried.floor, 3 * hurried.floor // 2):
        assert cli.main(["plan", "--model", "vgg16", *options, "--limit", str(limit)]) == 0
        told = capsys.readouterr().out
        assert f"smallest limit        {hurried.floor / 2**30:.2f} GiB" in told
        predicted.append(float(re.search(r"predicted step +([\d.]+) ms", told)[1]))
    assert predicted[0] > 1.5 * predicted[1]
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", "vgg16", *options, "--limit", str(hurried.floor - 1)])


def test_only_moving_is_an_option(capsys):
    out = _run(capsys, "--limit", "40%", "--no-rebuild", "--link", "1000")
    assert "rebuilding 0.00 ms" in out and "1000.0 GB/s out" in out


def test_times_come_from_a_result_file(capsys, tmp_path):
    _run(capsys, "--limit", "50%", "--trace", str(tmp_path / "trace.json"))
    trace = Trace.from_json((tmp_path / "trace.json").read_text())
    keys = dict.fromkeys((s.name, s.pass_name) for s in trace.steps)
    common = {"case": "resnet20", "dtype": "fp32", "arm": "minidl", "spread": 0, "floor_ms": None, "peers": {}}
    rows = [{**common, "layer": n, "pass": p, "ms": 1.0} for n, p in keys]
    ceilings = {"machine": "a GPU", "device_to_host_gb_per_s": 20.0, "host_to_device_gb_per_s": 25.0}
    setup = {"model": "resnet20", "precision": "fp32", "batch": 256}
    write(tmp_path / "layers.json", result("layers", rows, {"gpu": "a GPU"}, ceilings=ceilings, setup=setup))
    out = _run(capsys, "--limit", "50%", "--times", str(tmp_path / "layers.json"))
    assert "measured in layers.json" in out and "20.0 GB/s out, 25.0 GB/s in" in out
    assert f"the {len(keys):.2f} ms without a limit" in out


def test_alternatives_are_what_they_say(capsys, tmp_path):
    out = _run(capsys, "--limit", "200MB", "--alternatives")
    largest = int(re.search(r"largest batch +(\d+) under a plan", out)[1])
    pieces, each = map(int, re.search(r"accumulation +(\d+) micro-batches of (\d+)", out).groups())
    assert pieces * each >= 256 and each < 256 < largest

    def told(batch: int, limit: str) -> str:
        assert cli.main(["plan", "--model", "resnet20", "--batch", str(batch), "--limit", limit]) == 0
        return capsys.readouterr().out

    assert "1.00 times" in told(each, "200MB"), "a micro-batch needs no plan"
    told(largest, "200MB")
    with pytest.raises(SystemExit):
        told(int(1.05 * largest) + 1, "200MB")


def test_what_fits_needs_no_micro_batches(capsys):
    out = _run(capsys, "--batch", "2", "--limit", "1GB", "--alternatives")
    assert re.search(r"accumulation +not needed", out) and "micro-batches" not in out


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_of_any_precision_is_planned(capsys, precision):
    assert cli.main([*SMALL, "--precision", precision]) == 0
    assert f", {precision}: " in capsys.readouterr().out


def test_options_that_cannot_be_are_refused(capsys):
    for options, told in (
        (["--device", "L40"], "one with known rates"),
        (["--batch", "0"], "--batch must be an integer of at least 1"),
        (["--ranks", "0"], "--ranks must be an integer of at least 1, got 0"),
        (["--share", "2"], "share must be a number in"),
        (["--link", "0"], "out_gb_per_s must be a number above 0"),
        (["--model", "resnet51"], "unknown model 'resnet51'; did you mean"),
    ):
        with pytest.raises(SystemExit):
            cli.main([*SMALL, *options])
        assert told in capsys.readouterr().err


def test_the_picture_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    _run(capsys, "--limit", "40%", "--plot", str(tmp_path / "memory.png"))
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_the_example_of_the_page_runs(capsys):
    page = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    exec(compile(example, "docs/memory.md", "exec"), {})
    assert 1 < float(capsys.readouterr().out) < 2


def test_the_commands_of_the_page_parse():
    page = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
    commands = re.findall(r"^minidl (plan .*?)(?: +#.*)?$", page, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        cli.parser().parse_args(command.split())


def test_json_is_json(capsys, tmp_path):
    _run(capsys, "--limit", "60%", "--json", str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text())["kind"] == "memory_plan"
