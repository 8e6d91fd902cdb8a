"""Commands that the pages tell readers to type are commands: verbs and options exist, and take what they are given."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import minidl
from minidl import cli, launch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
STARTS = re.compile(r"^(?:(?:mpirun|mpiexec|srun|python -m minidl\.launch)\s+(?:-n \d+\s+)?(?:-m )?)?minidl (?=[a-z])")
SCRIPT = re.compile(r"(benchmarks/bench_\w+\.py)(.*)")


def commands(page: Path) -> tuple[list[str], list[str]]:
    """(lines of blocks, inline code) of a page; lines that go on are joined, comments and ellipses cut off."""
    text = page.read_text().replace("\\\n", " ")
    parts = re.split(r"^```.*$", text, flags=re.MULTILINE)
    lines = [line.strip().removeprefix("! ") for block in parts[1::2] for line in block.splitlines()]
    inline = [" ".join(code.split()) for prose in parts[::2] for code in re.findall(r"`([^`]+)`", prose)]
    return [re.split(r"\s#|\s\.\.\.", line)[0] for line in lines], inline


def verb_of(words: list[str]) -> argparse.ArgumentParser:
    """The parser of a verb, or of a verb below it."""
    parser = cli.parser()
    for word in words:
        below = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not below:
            break
        assert word in below[0], f"no verb {word} in {sorted(below[0])}"
        parser = below[0][word]
    return parser


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_pages_can_be_typed(page, capsys):
    lines, inline = commands(page)
    for line in filter(STARTS.match, lines):
        words = shlex.split(line[STARTS.match(line).end() :])
        if "--help" not in words:
            try:
                cli.parser().parse_args(words)
            except SystemExit:
                pytest.fail(f"{line}: {capsys.readouterr().err.strip()}")
    for code in (code for code in inline if STARTS.match(code) and "--" in code):
        words = [word for word in code[STARTS.match(code).end() :].split() if word != "..."]
        known = {option for action in verb_of(words)._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= known, code


def test_some_commands_were_found():
    found = [line for page in PAGES for part in commands(page) for line in part if STARTS.match(line)]
    assert len(found) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_benchmarks_of_pages_have_these_options(page):
    for line in (line for part in commands(page) for line in part):
        for name, rest in SCRIPT.findall(line):
            script = ROOT / name
            assert script.is_file(), line
            imported = re.findall(r"^import (\w+)$", script.read_text(), re.MULTILINE)
            own = [script, *(script.with_name(f"{stem}.py") for stem in imported)]
            source = "".join(path.read_text() for path in own if path.is_file())
            rest, *recipe = rest.split(" --recipe ")  # behind which options of minidl train follow
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest):
                assert f'"{option}"' in source, f"{line}: {option}"
            trained = {option for action in verb_of(["train"])._actions for option in action.option_strings}
            assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", " ".join(recipe))) <= trained, line


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "minidl", "doctor"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


MISTYPED = {
    ("trian",): "minidl: error: argument VERB: invalid choice: 'trian' (choose from ",
    ("bench", "layer"): "did you mean layers?",
    ("train", "--device", "cpuu"): "did you mean cpu?",
    ("train", "--bathc", "3"): "did you mean --batch?",
}


@pytest.mark.parametrize("words", MISTYPED)
def test_what_was_mistyped_is_guessed(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and MISTYPED[words] in err and "did you mean" in err


@pytest.mark.parametrize(
    ("words", "runs"),
    [(["minidl", "train"], ["-m", "minidl"]), (["-m", "a.b"], ["-m", "a.b"]), (["here.py"], ["here.py"])],
)
def test_the_launcher_starts_scripts_modules_and_the_command(words, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    started = []
    monkeypatch.setattr("minidl.dist.mpiexec.find", lambda: FakeMPI(started))
    monkeypatch.setattr(os, "execv", lambda *_: None)
    launch.main(["-n", "2", *words])
    assert started[0][1 : 1 + len(runs)] == runs
    assert launch.main(["-n", "2", "nowhere.py"]) == 2
    assert "there is no script nowhere.py; -m runs a module" in capsys.readouterr().err


class FakeMPI:
    """Notes what it is to start."""

    family, path = "none", "nowhere"

    def __init__(self, started):
        self.started = started

    def command(self, ranks, program, elastic):
        self.started.append(program)
        return program


def test_the_command_tells_its_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"minidl {minidl.__version__}\n"


@pytest.mark.parametrize("program", ["minidl.cli", "minidl.launch"])
def test_ctrl_c_while_modules_are_imported_is_one_line(program, monkeypatch, capsys):
    """The heavy ones are imported within `main`, and an interrupt there is answered as one later is."""
    heavy = f"import sys, {program}; assert not {{'numpy', 'mpi4py', 'minidl.dist'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", heavy], check=True)
    main = importlib.import_module(program).main

    def interrupt(*_):
        raise KeyboardInterrupt

    if program == "minidl.cli":
        monkeypatch.setattr(importlib, "import_module", interrupt)
        with pytest.raises(SystemExit) as stop:
            main(["train"])
        assert (stop.value.code, capsys.readouterr().err) == (130, "minidl train: interrupted\n")
    else:
        monkeypatch.setattr("minidl.dist.mpiexec.find", interrupt)
        assert main(["-n", "1", "x.py"]) == 130
        assert capsys.readouterr().err == "minidl.launch: interrupted\n"
