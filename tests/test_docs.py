"""The pages: their code runs as it is written, the site is built without a warning, links lead somewhere.

A page is one run in one empty folder, its blocks in their order and, of Python, in one namespace, which begins with
what the text takes as given (given.py). Words behind the language of a block say what it takes: ``gpu``, or ``ranks=N``
of a job of its own, ``elastic`` where those may go on without one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidl.cuda import nvrtc
from minidl.dist import mpiexec
from tests.commands import MINIDL, PYTHON, with_commands
from tests.conftest import CUDA
from tests.given import GIVEN

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> list[tuple[str, list[str], str]]:
    """(language, what it takes, text) of the blocks of code of a page."""
    found = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(language, marks.split(), text) for language, marks, text in found]


@pytest.fixture
def shell(tmp_path):
    """Runs commands in an empty folder, where ``minidl`` and ``python`` are those of the tests."""
    environment = with_commands(tmp_path / "commands", {"python": PYTHON, "minidl": MINIDL})
    environment |= {"PYTHONSAFEPATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(text: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-ec", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.fixture
def run_page(shell, tmp_path, monkeypatch, capsys):
    """Runs the blocks of a page in an empty folder; (what Python printed, what the commands did)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(tmp_path)

    def run(page: str, device: str = "cpu") -> tuple[str, list[subprocess.CompletedProcess]]:
        if not (ROOT / "docs" / page).exists():
            pytest.skip("the pages are not here")
        names: dict = {"__name__": page} | (GIVEN[page](device) if page in GIVEN else {})
        commands = []
        for language, marks, text in blocks(ROOT / "docs" / page):
            ranks = {int(mark.removeprefix("ranks=")) for mark in marks if mark.startswith("ranks=")}
            assert language in ("python", "sh") and len(marks) <= len(ranks) + 1, (language, marks)
            if "gpu" in marks and device == "cpu":
                continue
            if language == "python" and not ranks:
                exec(compile(text, page, "exec"), names)
                continue
            if "elastic" in marks and mpiexec.find().family != "Open MPI":
                continue
            if ranks:
                (tmp_path / "ranks.py").write_text(text)
                text = f"python -m minidl.launch -n {ranks.pop()} {'--elastic' * ('elastic' in marks)} ranks.py"
            done = shell(text)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            commands.append(done)
        return capsys.readouterr().out, commands

    return run


@pytest.mark.slow
@pytest.mark.mpi
def test_the_first_hour_runs_as_it_is_written(run_page, tmp_path):
    for extra in ("mpi4py", "sklearn", "matplotlib", "onnx"):
        pytest.importorskip(extra, reason=f"needs {extra}")
    printed, commands = run_page("first_hour.md")
    assert any(re.search(r"signal:? 9", done.stdout + done.stderr, re.IGNORECASE) for done in commands)
    assert "(4, 16, 16, 8) (4, 16, 16, 3) (8, 3, 3, 3)" in printed
    assert "conv2d: x must have shape (N, H, W, 3)" in printed
    share = int(re.search(r"(\d+)% of the weights are left", printed).group(1))
    assert 10 <= share < 20
    assert int(re.search(r"of the stripes (\d+)% are told apart", printed).group(1)) > 80
    assert (tmp_path / "resnet20.onnx").exists() and list((tmp_path / "plots").glob("*.png"))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_kernel_of_ones_own_is_compiled_and_obeys_the_laws(device, run_page):
    try:
        nvrtc.version()
    except ImportError as error:
        pytest.skip(f"needs NVRTC: {error}")
    printed, _ = run_page("own_kernel.md")
    assert "49 microseconds" in printed and "squared_relu_backward" in printed and "SquaredReLU" in printed
    assert "the GPU agrees to the bit" in printed or device == "cpu"


@pytest.mark.slow
@pytest.mark.mpi
def test_the_run_on_a_cluster_runs_as_it_is_written(run_page, tmp_path):
    for extra in ("mpi4py", "sklearn"):
        pytest.importorskip(extra, reason=f"needs {extra}")
    printed, commands = run_page("cluster.md")
    assert re.search(r"status 138 checkpoint-\d+\.safetensors$", printed, re.MULTILINE)
    told = "".join(done.stdout + done.stderr for done in commands)
    assert "epoch 2/2" in told and "ranks differ in optimizer" in told and "lr 0.2" in told
    assert (tmp_path / "one.json").exists()


@pytest.mark.slow
def test_the_roofline_page_runs_as_it_is_written(run_page, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    printed, _ = run_page("roofline.md")
    assert len(re.findall(r" ms, roof \d+%, gain [\d.]+ ms$", printed, re.MULTILINE)) == 5
    assert list((tmp_path / "plots").glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("page", GIVEN)
def test_the_code_of_a_page_runs_as_it_is_written(page, device, run_page):
    for extra in TAKEN.get(page, ()):
        pytest.importorskip(extra, reason=f"needs {extra}")
    printed, _ = run_page(page, device)
    assert re.search(TOLD[page], printed), printed


# Packages that the code of a page that is no tutorial takes, and what it prints.
TAKEN = {"breadth.md": ("tensorboardX",), "sparse.md": ("sklearn", "bitarray", "scipy")}
TOLD = {
    "breadth.md": r"\n1 0\.\d+\n(.*\n)*100 loaded; 2 mismatched: fc.bias",
    "fusion.md": r"",
    "memory.md": r"^1\.\d+\n",
    "sparse.md": r"@(.*\n)*.*3/3",
}


def test_all_code_is_run():
    """By the test above, or by one of its own."""
    with_code = {page.name for page in PAGES if blocks(page)}
    of_their_own = {"first_hour.md", "own_kernel.md", "cluster.md", "roofline.md", "distributed.md", "benchmarks.md"}
    assert with_code == {*GIVEN, *of_their_own}


@pytest.mark.slow
@pytest.mark.mpi
def test_the_code_of_several_ranks_runs_as_it_is_written(run_page):
    printed, commands = run_page("distributed.md")
    assert len(commands) >= 1 and re.search(r"^0\.\d+ \[\('fc', 0\.0\)", printed, re.MULTILINE), printed


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
