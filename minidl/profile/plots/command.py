"""``minidl plot``: pictures of result files."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minidl import checkpoint, checks
from minidl.profile.plots.bars import bars
from minidl.profile.plots.communication import communication
from minidl.profile.plots.layers import layers, series
from minidl.profile.plots.memory import memory
from minidl.profile.plots.roofline import roofline
from minidl.profile.plots.scaling import apart, scaling
from minidl.profile.plots.share import share
from minidl.profile.plots.style import save
from minidl.profile.results import load
from minidl.profile.runs import COMPUTE, NotInFile, Run, runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OF_ONE: dict[str, Callable[..., Figure]] = {
    "roofline": roofline,
    "communication": communication,
    "bars": bars,
    "memory": memory,
}
_OF_SEVERAL: dict[str, tuple[Callable[..., Figure], Callable[..., Iterable[tuple[str, Sequence[Run]]]]]] = {
    "layers": (layers, series),
    "scaling": (scaling, apart),
    "share": (share, lambda runs: [("", runs)]),
}
KINDS = (*_OF_ONE, *_OF_SEVERAL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``minidl plot``."""
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="result files of minidl bench")
    parser.add_argument("--kind", default="all", choices=[*KINDS, "all"], help="which picture; all: those there can be")
    parser.add_argument("--output", default="plots", metavar="FOLDER", help="where pictures go")
    parser.add_argument("--format", default="svg", choices=["svg", "png"])
    parser.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=COMPUTE,
        help="a pass to draw in the roofline; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Make the pictures and say what was written and what was not; the exit status.

    Raises:
        OSError, ValueError: a file that cannot be read, or that has nothing for the picture asked for.
        ImportError: without matplotlib.
    """
    passes = tuple(args.passes or COMPUTE)
    if args.passes and args.kind not in ("roofline", "all"):
        raise checks.bad_value("", "--pass", "left out, for it is of the roofline", f"--kind {args.kind}")
    checkpoint.require_place("", "--output", args.output, "folder")
    written, left_out = make(args.files, args.kind, args.output, args.format, passes)
    for path in written:
        print(f"wrote {path}")
    for reason in left_out:
        print(reason)
    return 0


def make(
    files: Sequence[str | Path],
    kind: str = "all",
    output: str | Path = "plots",
    format: str = "svg",
    passes: Sequence[str] = COMPUTE,
) -> tuple[list[Path], list[str]]:
    """Pictures of result files: those written, and for each that could not be, why.

    Raises:
        OSError: a file that cannot be read or written.
        ValueError: no result file; a kind (other than all) that no file allows; nothing to draw at all.
    """
    if kind not in (*KINDS, "all"):
        raise checks.unknown("kind of plot", kind, (*KINDS, "all"))
    names = _names([Path(file) for file in files])
    found = {file: runs(load(file), str(file)) for file in names}
    kinds = KINDS if kind == "all" else (kind,)
    written: list[Path] = []
    reasons: list[str] = []

    def attempt(name: str, draw: Callable[[], Figure]) -> None:
        try:
            figure = draw()
        except NotInFile as error:
            reasons.append(str(error))
            return
        path = Path(output) / f"{name}.{format}"
        save(figure, path)
        written.append(path)

    for file, name in names.items():
        for one in found[file]:
            own = name if len(found[file]) == 1 else f"{name}-{_slug(_words(one))}"
            for k in (k for k in kinds if k in _OF_ONE):
                options = {"passes": passes} if k == "roofline" else {}
                attempt(f"{own}-{k}", lambda: _OF_ONE[k](one, **options))  # noqa: B023  (called at once)
    together = [one for file in names for one in found[file]]
    alone = next(iter(names.values())) if len(names) == 1 else ""
    for k in (k for k in kinds if k in _OF_SEVERAL):
        draw, groups = _OF_SEVERAL[k]
        pictures = list(groups(together))
        if not pictures:
            reasons.append(f"{', '.join(map(str, names))}: no {k}: no network with its step; run minidl bench model")
        for words, members in pictures:
            attempt("-".join(filter(None, [alone, _slug(words), k])), lambda: draw(members))  # noqa: B023
    if not written:
        raise ValueError(_nothing([str(file) for file in names], kind, reasons))
    return written, reasons


def _nothing(files: Sequence[str], kind: str, reasons: Sequence[str]) -> str:
    """Why there is no picture at all, in one line."""
    if kind == "all" or not reasons:
        return f"{', '.join(files)}: nothing to draw; make the file with minidl bench layers, or see why with --kind"
    return reasons[0] + (f" (and {len(reasons) - 1} more like it)" if len(reasons) > 1 else "")


def _names(files: Sequence[Path]) -> dict[Path, str]:
    """What to call the pictures of each file: its name without .json or .json.gz, after its folder where equal."""
    stems = {file: file.name.removesuffix(".gz").removesuffix(".json") for file in files}
    alike = Counter(stems.values())
    names = {file: stem if alike[stem] == 1 else f"{file.parent.name}-{stem}" for file, stem in stems.items()}
    if len(set(names.values())) < len(names):
        raise ValueError(f"{', '.join(map(str, names))}: pictures would have the same names; plot them one by one")
    return names


def _words(run: Run) -> str:
    """A run in the name of a file."""
    ranks = f"{run.ranks} rank{'s' * (run.ranks > 1)}"
    return " ".join([run.case or "layers", run.dtype, *([run.arm] if run.arm != "minidl" else []), ranks])


def _slug(words: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", words.replace("×", "x")).strip("-")
