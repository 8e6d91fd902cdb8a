"""Names in backquotes lead somewhere: modules, functions, and members of classes that docstrings and pages refer to."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "minidl").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOTTED = re.compile(r"(?<!`)`(minidl(?:\.\w+)+)(?=[`(])")
MEMBER = re.compile(r"(?<!`)`([A-Z]\w+)\.([a-z_]\w*)")
FILE = re.compile(r"`((?:minidl|tests|benchmarks|docs|scripts)/[\w/.-]+\.\w+)`")
ABSENT = {"minidl.CrossEntropyLoss"}  # an example of a name that is not there


@pytest.fixture(scope="module")
def members():
    """By class of the library: its own names, those set on instances too, and the classes it is based on."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names, bases = found.setdefault(node.name, (set(), set()))
                bases |= {base.id for base in node.bases if isinstance(base, ast.Name)}
                for part in ast.walk(node):
                    match part:
                        case ast.FunctionDef() | ast.ClassDef():
                            names.add(part.name)
                        case ast.Name():
                            names.add(part.id)
                        case ast.Attribute():
                            names.add(part.attr)
    return found


def has(members, kind: str, name: str) -> bool:
    """Whether a class, or one below it, has the name; of classes of others nothing is known."""
    if kind not in members:
        return True
    names, bases = members[kind]
    return name in names or any(base in members and has(members, base, name) for base in bases)


def exists(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for i, part in enumerate(parts[count:], count):
            if isinstance(found, type):
                return i == len(parts) - 1  # members of classes are another law
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_is_there(path, members):
    text = path.read_text()
    assert [name for name in DOTTED.findall(text) if name not in ABSENT and not exists(name)] == []
    assert [f"{kind}.{name}" for kind, name in MEMBER.findall(text) if not has(members, kind, name)] == []
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []


def test_the_law_sees_what_is_missing(members):
    assert not exists("minidl.train.Trainers") and not exists("minidl.nothing") and exists("minidl.train.Trainer.fit")
    assert not has(members, "Arena", "rings") and has(members, "PrunedSGD", "update_in_backward")
