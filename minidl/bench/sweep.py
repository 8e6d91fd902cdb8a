"""``minidl bench sweep file.toml``: one benchmark over a grid of its options, each point a process of its own.

`EXAMPLE` is such a file. A process per point keeps one point's memory, clocks and failures out of the next. Each
point's result stays in a folder beside the output, so that a sweep that was cut short goes on where it stopped: what
the same options gave with the same source code is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from minidl import checks
from minidl.profile import results

VERBS = ("layers", "model")
EXAMPLE = """\
verb = "layers"            # or "model"
[fixed]                    # options of the verb, as in its --help
model = "resnet20"
device = "cpu"
[grid]                     # of these each value with each
batch = [32, 64]
precision = ["fp32"]
ranks = [1, 2]             # more than one: started by python -m minidl.launch
"""
_OWN = ("json", "csv", "trace")  # files that the sweep writes, or that points would overwrite for each other
_IN_KEY = ("model", "layer", "input", "batch", "image_size", "precision", "ranks")  # case, dtype and ranks tell these
_FOUND = ("setup", "step", "ceilings", "warnings", "commit", "date", "seconds")
_LAST_LINES = 5
_PATIENCE_S = 10.0
_SOURCES = {".py", ".pyx", ".h", ".cu", ".cuh", ".so"}

ParserOf = Callable[[str], argparse.ArgumentParser]
Program = Callable[[int], Sequence[str]]
Outcome = dict[str, Any] | RuntimeError  # a result file's content, or why there is none


@dataclass(frozen=True)
class Point:
    """One combination.

    Attributes:
        options: what varies, by name.
        words: the verb and its options on the command line.
        label: model and varied options, for people.
    """

    options: dict[str, Any]
    words: tuple[str, ...]
    ranks: int
    label: str

    @property
    def name(self) -> str:
        """Of the point's part file: the same for the same arguments."""
        return hashlib.sha256(json.dumps([self.ranks, *self.words]).encode()).hexdigest()[:16]


def program(ranks: int) -> list[str]:
    """The command line before the verb."""
    launcher = ["-m", "minidl.launch", "-n", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "minidl", "bench"]


# -- reading the grid -------------------------------------------------------------------------------------------------


def read(path: str | Path, parser_of: ParserOf) -> list[Point]:
    """The points of a sweep, the last name of the grid varying fastest.

    Args:
        parser_of: the parser of a verb's options, ``--json`` among them.

    Raises:
        OSError: when the file cannot be read.
        ValueError: for what is no sweep, an option that the verb does not have, or a value that it refuses; naming
            the file.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: not TOML ({error})") from error
    try:
        return _points(content, parser_of)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _points(content: Mapping[str, Any], parser_of: ParserOf) -> list[Point]:
    for name in content:
        if name not in ("verb", "fixed", "grid"):
            raise checks.unknown("entry", name, ("verb", "fixed", "grid"))
    verb, fixed, grid = content.get("verb"), content.get("fixed", {}), content.get("grid", {})
    if verb not in VERBS:
        raise checks.bad_value("", "verb", f"one of {', '.join(VERBS)}", verb)
    if not isinstance(fixed, dict) or not isinstance(grid, dict):
        raise ValueError("fixed and grid must be tables: [fixed], [grid]")
    parser = parser_of(verb)
    known = {a.dest: a for a in parser._actions if a.dest != "help"}  # argparse has no public list of options
    for name in (*fixed, *grid):
        if name in _OWN:
            raise ValueError(f"{name!r} cannot be set: the sweep itself writes the points' results")
        if name != "ranks" and name not in known:
            raise checks.unknown("option", name, {"ranks", *known} - set(_OWN))
    for name, values in grid.items():
        if name in fixed:
            raise ValueError(f"{name!r} stands in fixed and in grid")
        if not isinstance(values, list) or not values or any(v in values[:i] for i, v in enumerate(values)):
            raise checks.bad_value("", f"grid.{name}", "a list of different values", values)
    chosen = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [_point(verb, fixed, varied, known, parser) for varied in chosen]


def _point(
    verb: str,
    fixed: Mapping[str, Any],
    varied: dict[str, Any],
    known: Mapping[str, argparse.Action],
    parser: argparse.ArgumentParser,
) -> Point:
    """One point, its values accepted by the verb's parser."""
    options = {**fixed, **varied}
    ranks = checks.at_least("", "ranks", options.pop("ranks", 1), 1)
    words = [word for name, value in options.items() for word in _words(known[name], name, value)]
    told = {"model": fixed["model"]} if "model" in fixed else {}
    label = " ".join(str(v) if name == "model" else f"{name} {v}" for name, v in (told | varied).items()) or verb
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args([*words, "--json", "part.json"])
    except SystemExit as error:
        reason = complaint.getvalue().strip().rpartition("error: ")[2] or "not accepted"
        raise ValueError(f"{label}: {reason}") from error
    return Point(varied, (verb, *words), ranks, label)


def _words(action: argparse.Action, name: str, value: Any) -> list[str]:
    """An option as it is typed."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, (str, int, float)) for v in values):
        raise checks.bad_value("", name, "text, a number, true or false", value)
    if isinstance(value, bool) != (action.nargs == 0):
        raise checks.bad_value("", name, "true or false" if action.nargs == 0 else "a value", value)
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    if isinstance(value, bool):
        return flags[:1] if value else flags[1:] if isinstance(action, argparse.BooleanOptionalAction) else []
    several, repeated = action.nargs in ("+", "*"), isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and not (several or repeated):
        raise checks.bad_value("", name, "one value", value, "what is to vary stands in [grid]")
    words = [str(v) for v in values]
    if not flags:
        return words
    return [flags[0], *words] if isinstance(value, list) and several else [f"{flags[0]}={word}" for word in words]


# -- measuring --------------------------------------------------------------------------------------------------------


def _source() -> str:
    """A digest of this package's code: equal commits may hold different changes."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(p for p in folder.rglob("*") if p.suffix in _SOURCES and p.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _kept(part: Path, point: Point, source: str) -> dict[str, Any] | None:
    """What an earlier sweep measured at this point with this code; None where there is nothing of it, or not all."""
    try:
        content = results.load(part)
    except (OSError, ValueError):
        return None
    made = content.get("sweep")
    same = isinstance(made, dict) and made.get("words") == [*point.words] and made.get("ranks") == point.ranks
    return content if same and made.get("source") == source else None


def _measure(point: Point, part: Path, source: str, program: Program, limit: float | None) -> dict[str, Any]:
    """Run one point and keep its result.

    Raises:
        RuntimeError: when it fails, with the last lines it said.
    """
    part.unlink(missing_ok=True)  # a result left from before must not pass for this run's
    log, started = part.with_suffix(".log"), time.perf_counter()
    command = [*program(point.ranks), *point.words, "--json", str(part)]
    with log.open("w") as said:
        status = _supervise(command, said, limit)
    if status != 0:
        reason = f"took more than {limit:g} s" if status is None else f"exit status {status}"
        raise RuntimeError("\n".join([reason, *_last_lines(log)]))
    try:
        content = results.load(part)
    except (OSError, ValueError) as error:
        raise RuntimeError("\n".join([f"it left no result: {error}", *_last_lines(log)])) from error
    made = {"words": [*point.words], "ranks": point.ranks, "source": source, "seconds": time.perf_counter() - started}
    results.write(part, content | {"sweep": made})
    log.unlink()
    return content | {"sweep": made}


def _supervise(command: Sequence[str], said: Any, limit: float | None) -> int | None:
    """The exit status; None when the time was up. Whatever ends this function ends the point's processes, too."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process and its children to end, then make them."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(log: Path) -> list[str]:
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-_LAST_LINES:]


# -- merging ----------------------------------------------------------------------------------------------------------


def _merged(points: Sequence[Point], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One result file of all points that were measured, of the verb's own benchmark; spans and memory stay in the
    parts.
    """
    parts = [(point, part) for point, part in zip(points, outcomes, strict=True) if isinstance(part, dict)]
    first = parts[0][1]
    rows = [_row(row, point) for point, part in parts for row in part["rows"]]
    told = [f"{point.label}: {said}" for point, part in parts for said in part.get("warnings") or ()]
    commits = {str(part.get("commit")) for _, part in parts}
    if len(commits) > 1:
        told.append(f"the points were measured at different commits: {', '.join(sorted(commits))}")
    common = {key: first.get(key) for key in ("ceilings", "conventions")}
    records = [record for pair in zip(points, outcomes, strict=True) for record in _records(*pair)]
    return results.result(first["benchmark"], rows, first["machine"], **common, points=records, warnings=told)


def _row(row: results.Row, point: Point) -> results.Row:
    """A row with the options that varied, and a case that no other point has."""
    columns = {name: value for name, value in point.options.items() if row.get(name) is None}
    return row | columns | {"case": _case(row["case"], point)}


def _case(case: str, point: Point) -> str:
    """A case with the options that varied and that nothing else of a row tells."""
    return case + "".join(f", {name}={value}" for name, value in point.options.items() if name not in _IN_KEY)


def _records(point: Point, outcome: Outcome) -> list[dict[str, Any]]:
    """A point's setup and step, or what went wrong; several where its process measured several networks."""
    asked = {"options": point.options, "command": shlex.join(point.words), "ranks": point.ranks}
    if isinstance(outcome, RuntimeError):
        return [asked | dict.fromkeys(_FOUND) | {"error": str(outcome)}]
    made = {key: outcome.get(key) for key in _FOUND} | {"seconds": outcome["sweep"]["seconds"], "error": None}
    inner = outcome.get("points") or [{"case": outcome["rows"][0]["case"]}]
    return [asked | made | own | {"case": _case(own["case"], point)} for own in inner]


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``minidl bench sweep``."""
    parser.epilog = f"FILE.toml, for example:\n\n{indent(EXAMPLE, '  ')}"
    parser.add_argument("file", metavar="FILE.toml", help="the verb, its fixed options and the grid of the others")
    parser.add_argument("--json", metavar="PATH", help="the merged result file; default: FILE.json")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier sweep measured")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up on a point that takes longer")


def run(args: argparse.Namespace, parser_of: ParserOf, program: Program = program) -> int:
    """``minidl bench sweep``: the exit status, 1 when a point failed, 130 when interrupted.

    Args:
        parser_of: the parser of a verb's options.
        program: the command line before the verb for so many ranks.

    Raises:
        OSError, ValueError: from `read`; also when parts were measured on different machines.
    """
    if args.timeout is not None:
        checks.number("", "--timeout", args.timeout, "of seconds above 0", lambda t: t > 0)
    points = read(args.file, parser_of)
    out = Path(args.json) if args.json else Path(args.file).with_suffix(".json")
    folder = out.with_name(f"{out.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        outcomes = _sweep(points, folder, args, program)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the points in {folder} are kept: run the same command to go on", file=sys.stderr)
        return 130
    failed = sum(not isinstance(outcome, dict) for outcome in outcomes)
    if failed < len(points):
        results.write(out, _merged(points, outcomes))
        print(f"wrote {out}: {len(points) - failed} of {len(points)} points")
    else:
        print(f"no point succeeded; {out} is not written", file=sys.stderr)
    return int(failed > 0)


def _sweep(points: Sequence[Point], folder: Path, args: argparse.Namespace, program: Program) -> list[Outcome]:
    """What became of each point."""
    source, outcomes, machine = _source(), [], None
    for i, point in enumerate(points, 1):
        print(f"{i}/{len(points)} {point.label} ... ", end="", flush=True)
        part, started = folder / f"{point.name}.json", time.perf_counter()
        content = None if args.fresh else _kept(part, point, source)
        took = "kept" if content is not None else None
        try:
            content = content or _measure(point, part, source, program, args.timeout)
        except RuntimeError as error:
            print(f"failed after {time.perf_counter() - started:.1f} s", flush=True)
            print("  " + str(error).replace("\n", "\n  "), file=sys.stderr, flush=True)
            outcomes.append(error)
            continue
        print(took or f"{content['sweep']['seconds']:.1f} s", flush=True)
        here = results.machine_name(content["machine"])
        if machine not in (None, here):
            raise ValueError(
                f"{folder}: {point.label} was measured on {here}, the points before it on {machine}; "
                f"measure all on one with --fresh, or keep them apart with another --json"
            )
        machine = here
        outcomes.append(content)
    return outcomes
