"""How laws are dealt among the processes of `make sanitize`, and what their ends mean: without a GPU."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
TOOL = """#!/bin/sh
[ "$1 $2 $3 $4" = "--tool memcheck --error-exitcode 9" ] || exit 3
"""


@pytest.fixture
def few(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return pytest.importorskip("sanitize").Few


@pytest.mark.parametrize(("cases", "jobs"), [(1, 1), (2, 3), (5, 4)])
def test_every_law_has_its_cases_and_each_is_of_one_process(few, cases, jobs, tmp_path):
    counts = {f"tests/a.py::test_{i}": count for i, count in enumerate((1, 2, 3, 7, 40, 5, 11))}
    ran = []
    hook = SimpleNamespace(pytest_runtest_protocol=lambda item, nextitem: ran.append((item, nextitem)))
    config, dealt = SimpleNamespace(hook=hook), []
    for index in range(jobs):
        names = [f"{law}[{i}]" for law, count in counts.items() for i in range(count)]
        items = [SimpleNamespace(nodeid=name, config=config) for name in names]
        plugin = few(cases, tmp_path, index / jobs)
        plugin.pytest_collection_modifyitems(items)
        # Each comes to a share of its own first: only the last finds all taken.
        share = items[: len(items) // jobs] if index < jobs - 1 else items
        ran.clear()
        assert plugin.pytest_runtestloop(SimpleNamespace(items=share))
        mine, following = [item for item, _ in ran], [item for _, item in ran]
        assert following == [*mine[1:], None][: len(mine)], "fixtures stay for a case of another process"
        dealt += [item.nodeid for item in mine]
    assert len(set(dealt)) == len(dealt)
    for law, count in counts.items():
        taken = sorted(int(name.partition("[")[2][:-1]) for name in dealt if name.startswith(law + "["))
        assert len(taken) == min(cases, count)
        gaps = [(later - one) % count for one, later in zip(taken, [*taken[1:], taken[0]], strict=True)]
        assert max(gaps) - min(gaps) <= 1, "not evenly"


def test_cases_that_start_what_no_other_does_are_taken_too(few, tmp_path):
    law = "tests/test_cuda_conv2d.py::test_textbook_kernels_equal_the_definition"
    items = [SimpleNamespace(nodeid=f"{law}[{name}-{i}]") for name in ("tiled", "direct") for i in range(9)]
    few(0, tmp_path).pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [f"{law}[direct-0]"]


RACE = """tests/test_a.py::test_b[c] ========= Error: Race reported between Write access at f(int)+0x10 in {}:87
=========     and Read access at f(int)+0x20 in {}:85 [24 hazards]
=========     and Read access at f(int)+0x30 in {}:85 [12 hazards]
========= {}
PASSED [ 3%]
"""


def test_races_are_told_but_where_racecheck_sees_no_barrier(few):
    races = sys.modules["sanitize"].races
    text = RACE.format("csb.cu", "csb.cu", "csb.cu", "") + RACE.format("hopper.cuh", "hopper.cuh", "csb_rows.cu", "")
    (one,) = races(text + RACE.replace("Error", "Warning").format(*["csb.cu"] * 3, ""))
    assert one.startswith("Error: Race reported between Write") and one.count("csb.cu:85") == 2
    assert len(races(RACE.format("mma.cuh", "conv2d_stem.cuh", "conv2d_stem.cuh", ""))) == 1
    assert len(races(RACE.format("hopper.cuh", "hopper.cuh", "conv2d_stem.cuh", ""))) == 1, (
        "every access has to be known"
    )
    assert not races("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")


def test_kernels_that_no_case_starts_are_told(few):
    sanitize = sys.modules["sanitize"]
    for path in (ROOT / "minidl" / "cuda").rglob("*.cu*"):
        text = path.read_text()
        assert len(sanitize.KERNEL.findall(text)) == text.count("__global__"), path
    assert "adaptive_pool2d" not in sanitize.kernels() and "conv2d_hopper_kernel" in sanitize.kernels()


@pytest.mark.parametrize(
    ("does", "wrong", "told"),
    [
        ("echo 'a PASSED '", False, "memcheck: 2 cases of laws passed"),
        ("echo 'a PASSED '; echo 'started: sgd_update'", False, "sgd_begin soft_cross"),
        ("exit 0", True, "is there a GPU?"),
        ("echo 'a PASSED '; echo 'ERROR tests/b.py::c'; exit 1", True, "ERROR tests/b.py::c"),
        ("echo 'a PASSED '; echo '========= Invalid read'; exit 9", True, "Invalid read"),
        ("echo 'a PASSED '; echo 'tests/b.py::c '; sleep 60", True, "not done after 1 s, in tests/b.py::c"),
        ("echo 'cases: 3'; echo 'a PASSED '", True, "3 of 3 cases were not reached"),
    ],
)
def test_what_a_process_finds_is_told(does, wrong, told, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL + does)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, ROOT / "scripts" / "sanitize.py", "--tool", "memcheck", "--jobs", "2", "--seconds", "1"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert bool(done.returncode) == wrong and told in done.stdout, done.stdout + done.stderr
