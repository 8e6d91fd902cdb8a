"""What is packaged is what is there: sources, versions, extras; and what the README promises, holds."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import minidl
from minidl.extensions import require_built

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
SOURCES = [
    path for path in (ROOT / "minidl").rglob("*.py") if not path.stem.startswith("__") and "build" not in path.parts
]
BUILT = {".so", ".pyd", ".pyc", ".c", ".html"}  # what a build leaves in the tree


def test_the_version_is_the_same_in_both_places():
    assert PROJECT["project"]["version"] == minidl.__version__


def test_every_file_of_the_package_is_package_data():
    """A kernel or header of a new suffix would otherwise be missing from wheels, and only there."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    files = [path for path in (ROOT / "minidl").rglob("*") if path.is_file() and path.suffix not in BUILT | {".py"}]
    left_out = [path for path in files if not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)]
    assert not left_out
    for suffix in (".cu", ".cuh", ".h", ".pyx"):
        assert any(path.suffix == suffix for path in files), f"no {suffix} left: drop it from package-data and here"


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in (ROOT / "minidl").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_what_layers_on_the_cpu_need_is_required_and_all_else_an_extra():
    required = {_name(line) for line in PROJECT["project"]["dependencies"]}
    assert required == {"numpy", "ml_dtypes", "safetensors"}
    extras = PROJECT["project"]["optional-dependencies"]
    optional = {"cli", "data", "dali", "tensorboard", "plot", "energy", "onnx", "compress", "docs", "dev"}
    assert {"cuda12", "cuda13", "nvrtc", "mpi", "mpi-wheel"} | optional == set(extras)
    assert not required & {_name(line) for lines in extras.values() for line in lines}


def _name(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def test_errors_name_extras_that_exist():
    """`minidl.checks.missing_extra` and remedies send users to pip; what they type has to work."""
    named = set()
    for path in [ROOT / "README.md", *(ROOT / "minidl").rglob("*.py")]:
        text = path.read_text()
        for group in re.findall(r"(?:minidl|\.)\[([\w,-]+)\]", text) + re.findall(r'extra\([^)]*?, "([\w-]+)"', text):
            named |= set(group.split(","))
    assert {"cuda13", "mpi-wheel", "cli", "data"} <= named <= set(PROJECT["project"]["optional-dependencies"])


def test_the_environment_of_make_installs_extras_that_exist():
    extras = re.search(r"extras=([\w,-]+);", MAKEFILE)[1].split(",")
    extras += re.findall(r"(?:mpi|cuda)=([\w-]+)", MAKEFILE)
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])


def test_importing_needs_no_optional_package():
    """With those blocked, and warnings as errors, a layer runs both ways. Nor does the CPU wait for a GPU's table."""
    script = """
import sys
for name in "cupy cuda mpi4py threadpoolctl rich scipy bitarray sklearn matplotlib Cython setuptools torch".split():
    sys.modules[name] = None  # importing it fails
import numpy as np
import minidl as m
layer = m.Conv2d(3, 8, 3, padding=1)
y = layer.forward(np.ones((2, 5, 5, 3), np.float32))
assert layer.backward(np.ones_like(y)).shape == (2, 5, 5, 3)
assert not [name for name in sys.modules if name.startswith("minidl.cuda")]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60, cwd=ROOT)


def test_a_copy_that_is_not_built_is_told_so_and_how_to_build_it(tmp_path):
    """And not that something could not be imported from a partially initialised module."""
    for source in (ROOT / "minidl").glob("**/*.py"):
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    for source in (ROOT / "minidl").glob("*/_*.pyx"):
        (tmp_path / source.relative_to(ROOT)).touch()
    command = [sys.executable, "-c", "import minidl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    told = done.stderr.splitlines()[-1]
    assert "its compiled modules are missing" in told and f"make -C {tmp_path} build PYTHON={sys.executable}" in told
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "minidl"  # as pip writes it
    script.write_text("from minidl.cli import main\nmain()\n")
    for program in (["-m", "minidl"], [str(script)]):
        command = [sys.executable, *program, "doctor"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
        assert done.returncode == 2 and done.stderr == f"minidl: {told.removeprefix('ImportError: ')}\n"


def test_what_a_newer_commit_has_to_compile_is_named(tmp_path):
    (tmp_path / "memory").mkdir()
    for name in ("_old", "_loops"):
        (tmp_path / "memory" / f"{name}.pyx").touch()
    (tmp_path / "memory" / f"_old{EXTENSION_SUFFIXES[0]}").touch()
    with pytest.raises(ImportError, match=r"not built for Python \d.\d+: memory/_loops is missing"):
        require_built(tmp_path)
    (tmp_path / "memory" / f"_loops{EXTENSION_SUFFIXES[-1]}").touch()
    require_built(tmp_path)


def _python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_example_of_the_readme_prints_what_it_says(capsys):
    example = _python_blocks()[0]
    exec(compile(example, "README.md", "exec"), {})
    promised = re.search(r"print\(.*\)  # (.*)", example)[1]
    assert capsys.readouterr().out.strip() == promised
    assert len([line for line in example.splitlines() if line.strip()]) <= 12


def test_the_second_example_of_the_readme_runs(rng):
    """It trains one step, on arrays that the text leaves to the reader."""
    images = rng.standard_normal((4, 32, 32, 3)).astype("float32")
    names = {"images": images, "labels": rng.integers(0, 10, 4).astype("int32")}
    exec(compile(_python_blocks()[1], "README.md", "exec"), names)
    assert names["totals"].loss > 0 and names["model"].num_parameters > 0


def test_make_lists_its_targets():
    declared = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    described = re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE)
    assert sorted(declared) == sorted(described)
    for target in ("train", "test", "test-gpu", "test-mpi", "lint", "bench"):
        assert target in described


def test_the_script_and_the_command_are_one(tmp_path):
    arguments = ["--data", "synthetic", "--model", "nothing", "--output", tmp_path]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and "unknown model 'nothing'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", [".ci/run", "scripts/train.py"])
def test_programs_are_executable(name):
    assert (ROOT / name).stat().st_mode & 0o111 == 0o111


def test_the_readme_shows_what_the_result_files_say():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_result_files_follow_the_schema_and_name_no_machine_path():
    files = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
    assert files
    for path in files:
        content = json.loads(path.read_text())
        assert content["schema"] == 1 and content["command"] and content["machine"] and content["rows"], path
        for row in content["rows"]:
            assert {"case", "pass", "dtype", "arm", "ms", "spread", "floor_ms", "peers"} <= row.keys(), path
        assert not re.search(r"[ =]/", content["command"]), f"{path}: an absolute path in the command"


def test_names_are_imported_when_the_first_is_asked_for():
    script = """
import sys
import minidl
assert "numpy" not in sys.modules
from minidl import Conv2d
assert Conv2d is minidl.public.Conv2d and minidl.interchange.import_weights and minidl.Model
assert set(minidl.__all__) | {"__version__"} <= set(dir(minidl))
assert not hasattr(minidl, "__wrapped__") and not hasattr(minidl, "nothing")
names = {}
exec("from minidl import *", names)
assert set(minidl.__all__) <= set(names)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    """The package itself imports none of them: none may lean on another having come before."""
    stems = sorted({path.relative_to(ROOT / "minidl").parts[0].removesuffix(".py") for path in SOURCES})
    for stem in stems:
        subprocess.run([sys.executable, "-c", f"import minidl.{stem}"], check=True)
