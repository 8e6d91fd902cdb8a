"""The files of results, and the tables that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from minidl.profile.results import load as results_of
from minidl.profile.tables import Cells, markdown, show

__all__ = [
    "NOTHING", "RESULTS", "ROOT", "File", "Row", "everywhere", "load", "machine_of", "machines", "print_tables",
    "results_of", "table",
]  # fmt: skip

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

NOTHING = "Nothing was recorded yet."

Row = dict[str, Any]
File = dict[str, Any]  # the content of one


def load(machine: str, benchmark: str) -> list[File]:
    """The result files of a machine that this benchmark made; their names begin with its."""
    found = map(results_of, sorted((RESULTS / machine).glob(f"{benchmark}*.json*")))
    return [file for file in found if file["benchmark"] == benchmark]


def everywhere(benchmark: str) -> list[File]:
    """The result files of all machines that this benchmark made."""
    return [file for machine in machines() for file in load(machine, benchmark)]


def machines() -> list[str]:
    """The folders of results, one for each machine."""
    return sorted(path.name for path in RESULTS.iterdir())


def machine_of(file: File) -> str:
    """In a word: the GPU, or how many cores."""
    machine = file["machine"]
    return machine.get("gpu") or f"CPU, {machine.get('cores', 2)} cores"


def table(columns: Sequence[str], rows: Cells, words: Container[int] = (0,)) -> str:
    """In Markdown, as `minidl.profile.tables.markdown`; a sentence where there is no row."""
    return markdown(columns, rows, words) if rows else NOTHING


def print_tables(file: File, *tables: Callable[[list[File]], str]) -> None:
    """Print what pages would show of this file alone; nothing of the tables for which it has no row."""
    for part in "\n\n".join(make([file]) for make in tables).split("\n\n"):
        lines = [line[2:-2].split(" | ") for line in part.splitlines()]
        if part.startswith("| "):
            show("", lines[0], lines[2:])
        elif part != NOTHING:
            print(part)
