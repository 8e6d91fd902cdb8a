"""Progress of long work, and the record of it.

On a terminal a bar (rich), else one line each few seconds. `MetricsLog` writes what a run measured as JSON lines and
as a table for spreadsheets; only rank 0 makes either.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minidl import checkpoint

TERMINAL = "MINIDL_TERMINAL"  # set by minidl.launch: the width of the terminal behind mpiexec's pipes
_LINE_SECONDS = 10.0


class Progress:
    """Shows one epoch at a time; this one shows nothing, as on ranks other than 0."""

    def start(self, title: str, total: int, done: int = 0) -> None: ...

    def advance(self, note: str = "") -> None: ...

    def finish(self, summary: str = "") -> None: ...


class Lines(Progress):
    """For logs: a line when an epoch ends, and one every ten seconds within it."""

    def start(self, title: str, total: int, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self.next = time.monotonic() + _LINE_SECONDS

    def advance(self, note: str = "") -> None:
        self.done += 1
        if time.monotonic() >= self.next:
            print(f"{self.title}  {self.done}/{self.total}  {note}".rstrip(), flush=True)
            self.next = time.monotonic() + _LINE_SECONDS

    def finish(self, summary: str = "") -> None:
        if summary:
            print(f"{self.title}  {summary}", flush=True)


class Bar(Progress):
    """A rich progress bar; what an epoch came to stays above it as a line."""

    def __init__(self, width: int | None):
        from rich import progress as rich_progress
        from rich.console import Console

        self.console = Console(force_terminal=True, width=width, highlight=False)
        self.columns = (
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[note]}"),
        )
        self.make = rich_progress.Progress

    def start(self, title: str, total: int, done: int = 0) -> None:
        self.title = title
        self.bar = self.make(*self.columns, console=self.console, transient=True)
        self.bar.start()
        self.task = self.bar.add_task(title, total=total, completed=done, note="")

    def advance(self, note: str = "") -> None:
        self.bar.update(self.task, advance=1, **({"note": note} if note else {}))

    def finish(self, summary: str = "") -> None:
        self.bar.stop()
        if summary:
            self.console.print(f"{self.title}  {summary}", soft_wrap=True)


def progress(rank: int = 0) -> Progress:
    """The display of this process: a bar on a terminal with rich installed, else lines; nothing off rank 0."""
    if rank != 0:
        return Progress()
    width = os.environ.get(TERMINAL)
    if width or (sys.stdout is not None and sys.stdout.isatty()):
        try:
            return Bar(int(width) if width else None)
        except ImportError:
            pass  # rich is an extra; lines tell the same
    return Lines()


class MetricsLog:
    """``metrics.jsonl``, one object per report, and ``metrics.csv``, one row per epoch, in ``folder``.

    Going on from a checkpoint, reports after ``step`` and rows after ``epoch`` of the interrupted run are dropped.

    Args:
        metrics: names of further columns.
    """

    FILES = ("metrics.jsonl", "metrics.csv")
    COLUMNS = (
        "epoch", "step", "lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds", "images_per_s",
    )  # fmt: skip

    def __init__(self, folder: Path, *, step: int = 0, epoch: int = 0, metrics: Sequence[str] = ()):
        self.columns = (*self.COLUMNS, *metrics)
        self.lines, self.table = (folder / name for name in self.FILES)
        kept = [line for line in _lines(self.lines) if _step(line) <= step] if step else []
        _rewrite(self.lines, "".join(f"{line}\n" for line in kept))
        rows = [row for row in csv.DictReader(_lines(self.table)) if _epoch(row) < epoch] if epoch else []
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        _rewrite(self.table, text.getvalue())

    def report(self, record: Mapping[str, Any]) -> None:
        """Append one JSON line."""
        with self.lines.open("a") as file:
            file.write(json.dumps(dict(record)) + "\n")

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Append one row of the table."""
        with self.table.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow({name: row.get(name, "") for name in self.columns})


def _rewrite(path: Path, text: str) -> None:
    """Give a record another content, where it has not got it: whole or not at all, for somebody may be reading it, and
    on a full disk it would otherwise be lost.
    """
    data = text.encode()
    if not path.is_file() or path.read_bytes() != data:
        checkpoint.write_whole(path, data)


def _step(line: str) -> float:
    """The step of a report; infinite for a line that an interrupted run left half-written."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _epoch(row: Mapping[str, Any]) -> float:
    """The epoch of a row; infinite for one that an interrupted run left half-written."""
    complete = None not in row and None not in row.values()
    return int(row["epoch"]) if complete and row.get("epoch", "").isdecimal() else math.inf


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
