"""The pages: the first hour runs as it is written, the site is built without a warning, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the blocks of code of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Runs commands in an empty folder, where ``minidl`` and ``python`` are those of the tests."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, start in (("python", ""), ("minidl", "-m minidl")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
        (commands / name).chmod(0o755)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}
    environment |= {"PYTHONSAFEPATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(text: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-ec", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.mark.slow
@pytest.mark.mpi
def test_the_first_hour_runs_as_it_is_written(shell, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    for extra in ("sklearn", "matplotlib", "onnx"):
        pytest.importorskip(extra, reason=f"needs {extra}")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "first_hour"}
    for language, text in blocks(ROOT / "docs" / "first_hour.md"):
        if language == "python":
            exec(compile(text, "first_hour.md", "exec"), names)
            continue
        assert language == "sh", language
        done = shell(text)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        if "killed.py" in text:
            assert re.search(r"signal:? 9", done.stdout + done.stderr, re.IGNORECASE), done.stdout + done.stderr
    printed = capsys.readouterr().out
    assert "(4, 16, 16, 8) (4, 16, 16, 3) (8, 3, 3, 3)" in printed
    assert "conv2d: x must have shape (N, H, W, 3)" in printed
    share = int(re.search(r"(\d+)% of the weights are left", printed).group(1))
    assert 10 <= share < 20
    assert (tmp_path / "resnet20.onnx").exists() and list((tmp_path / "plots").glob("*.png"))


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("myst_parser", reason="needs the extra docs")
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference.html").read_text()
    for name in ("Conv2d", "BatchNorm2d", "Model", "SGD", "Loader", "export_onnx"):
        assert name in reference


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
