"""The shape of the house: imports go one way, files stay small enough to hold in the head."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minidl"

# From the ground up. A module may import only from levels below its own (or from its own folder).
LEVELS = [
    {"extensions", "cache", "checks", "shapes"},
    {"precision", "scalars", "checkpoint"},
    {"cpu", "cuda"},
    {"backend", "initializers"},
    {"legality", "random", "schedule", "dist", "store", "value", "progress", "config"},
    {"messages"},
    {"profile"},
    {"segments"},
    {"params"},
    {"layer"},
    {"graph", "laws"},
    {"layers"},
    {"models", "data", "summary"},
    {"model"},
    {"fusion"},
    {"loss", "nonfinite", "optim", "stopping"},
    {"adaptive", "average", "interchange", "memory", "metrics", "sparse", "sharded", "step", "onnx", "torch_bridge"},
    {"compile", "callbacks", "predict", "resuming"},
    {"public", "train"},
    {"__init__"},
    {"bench"},
    {"prediction", "training"},
    {"launch", "pruning"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}
LONGEST = 500


def sources():
    return sorted(path for path in PACKAGE.rglob("*.py") if "build" not in path.parts)


def area(module: str) -> str:
    """``minidl.layers.conv2d`` -> ``layers``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_the_list_of_the_house_names_every_module_from_the_ground_up():
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = text.partition("```\nminidl/\n")[2].partition("```")[0]
    named = [word.removesuffix(".py").removesuffix("/") for line in block.splitlines() for word in line[:41].split()]
    assert sorted(named) == sorted(set(LEVEL) - {"__main__", "__init__"})
    levels = [LEVEL[name] for name in named]
    assert levels == sorted(levels), [(name, LEVEL[name]) for name in named]


def imports(path: Path):
    """(imported module, at import time) for every import statement."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "minidl" else [node.module]
        for name in names:
            yield name, id(node) in top


def test_every_module_has_a_level():
    unknown = {area(".".join(p.relative_to(ROOT).with_suffix("").parts)) for p in sources()} - set(LEVEL)
    assert not unknown, f"give these a level: {unknown}"


def test_imports_go_one_way():
    upward = []
    for path in sources():
        own = area(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, _ in imports(path):
            if name.startswith("minidl") and area(name) != own and LEVEL[area(name)] >= LEVEL[own]:
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not upward, upward


def test_optional_packages_are_imported_only_inside_functions():
    optional = {
        "scipy",
        "bitarray",
        "cupy",
        "mpi4py",
        "rich",
        "sklearn",
        "matplotlib",
        "torch",
        "cuda",
        "threadpoolctl",
        "pynvml",
    }
    eager = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        for name, at_top in imports(path)
        if at_top and name.split(".")[0] in optional
    ]
    assert not eager, eager


def test_layers_know_no_engine():
    engines = ("cupy", "mpi4py", "minidl.cpu", "minidl.cuda", "minidl.dist.mpi", "minidl.dist.nccl")
    bad = [
        f"{path.name}: {name}"
        for path in [*(PACKAGE / "layers").glob("*.py"), PACKAGE / "layer.py", PACKAGE / "model.py"]
        for name, _ in imports(path)
        if name.startswith(engines)
    ]
    assert not bad, bad


def test_kernel_files_have_one_name_each():
    names = [path.name for path in (PACKAGE / "cuda").rglob("*.cu*")]
    assert len(names) == len(set(names)), "an #include and a launch name a file without its folder"


def test_kernel_files_that_sources_speak_of_exist():
    there, lost = {path.name for path in PACKAGE.rglob("*.cu*")}, []
    for path in [
        *sources(),
        *PACKAGE.rglob("*.cu*"),
        *PACKAGE.rglob("*.pyx"),
        *(ROOT / "tests" / "emulator").iterdir(),
    ]:
        if path.is_file():
            lost += [(path.name, name) for name in re.findall(r"\b\w+\.cuh?\b", path.read_text()) if name not in there]
    assert not lost, lost


def test_files_stay_readable():
    long = []
    for path in [*sources(), *PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.pyx")]:
        lines = path.read_text().splitlines()
        excused = any("500 lines" in line for line in lines[:30])
        if len(lines) > LONGEST and not excused:
            long.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    assert not long, f"split these, or say why in their first comment: {long}"


def test_every_public_function_and_class_has_a_docstring():
    missing = []
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            named = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if named and ast.get_docstring(node) is None:
                missing.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not missing, missing
