"""Two result files side by side: which rows became slower, which faster, which stayed, and how sure that is.

What the verdicts mean and what they rest on: `minidl.profile.ratio`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from minidl import checks
from minidl.profile.ratio import (
    FASTER,
    SAME,
    SLOWER,
    THRESHOLD,
    UNCLEAR,
    Interval,
    drift,
    ratio_of_medians,
    ratio_of_spreads,
    verdict_of,
)
from minidl.profile.results import Row, load, machine_name
from minidl.profile.tables import show

KEY = ("case", "layer", "pass", "dtype", "arm", "ranks")

_WORST_FIRST = (SLOWER, UNCLEAR, SAME, FASTER)
_ENOUGH_ROWS = 8
_REMAINDER = "unaccounted"  # the step less the sum of its layers: a difference of medians, which nothing timed

Key = tuple[Any, ...]


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowVerdict:
    """One row that both files hold.

    Attributes:
        key: the values of `KEY`.
        a_ms, b_ms: the files' medians; None where not measured.
        interval: of the ratio; None where nothing is known of the noise.
        notes: what a reader should know of this verdict.
    """

    key: Key
    a_ms: float | None
    b_ms: float | None
    interval: Interval | None
    verdict: str
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """B over A; above 1: B is slower."""
        if self.interval is not None:
            return self.interval.ratio
        return self.b_ms / self.a_ms if self.a_ms and self.b_ms else None


@dataclass(frozen=True)
class Comparison:
    """Two result files, row by row.

    Attributes:
        names: the two files.
        rows: those in both, worst first.
        only_a, only_b: keys of the rows that one file alone holds.
        changes: what else differs between the runs (commit, versions, ...), a line each.
        restless: by how much the medians of both runs usually drifted, together; a fraction that widened each interval.
    """

    names: tuple[str, str]
    threshold: float
    rows: tuple[RowVerdict, ...]
    only_a: tuple[Key, ...]
    only_b: tuple[Key, ...]
    changes: tuple[str, ...]
    restless: float

    @property
    def counts(self) -> dict[str, int]:
        """How many rows have each verdict, and how many are missing from the other file."""
        verdicts = [row.verdict for row in self.rows]
        counts = {verdict: verdicts.count(verdict) for verdict in _WORST_FIRST}
        return counts | {"only in A": len(self.only_a), "only in B": len(self.only_b)}

    def exit_status(self, strict: bool = False) -> int:
        """1 when a row is SLOWER, else 0; with ``strict`` also 1 for what is UNCLEAR or missing."""
        bad = [SLOWER] + [UNCLEAR, "only in A", "only in B"] * strict
        return int(any(self.counts[name] for name in bad))


def compare(a: str | Path, b: str | Path, *, threshold: float = THRESHOLD, any_machine: bool = False) -> Comparison:
    """Compare result file ``b`` with ``a``, the reference. See `compare_results`.

    Raises:
        OSError: when a file cannot be read.
    """
    names = str(a), str(b)
    return compare_results(load(a), load(b), names=names, threshold=threshold, any_machine=any_machine)


def compare_results(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    names: tuple[str, str] = ("A", "B"),
    threshold: float = THRESHOLD,
    any_machine: bool = False,
) -> Comparison:
    """Compare the contents of two result files.

    Args:
        threshold: the least change that matters, a fraction.
        any_machine: compare although the machines (or devices) differ; each row then says so.

    Raises:
        ValueError: for different benchmarks or machines, for files without a common row, for a row whose shapes differ,
            and for damaged rows, naming file and row.
    """
    checks.number("compare", "threshold", threshold, "above 0 and below 1", lambda t: 0 < t < 1)
    _same_benchmark(a, b, names)
    other = _other_machine(a, b, names, any_machine)
    rows_a, rows_b = _by_key(a, names[0]), _by_key(b, names[1])
    common = [key for key in rows_a if key in rows_b]
    if not common:
        raise ValueError(
            f"{names[0]} and {names[1]} have no row in common; the first holds {_first(rows_a)}, the second "
            f"{_first(rows_b)}; rows are matched by {', '.join(KEY)}"
        )
    for key in common:
        _same_work(key, rows_a[key], rows_b[key], names, any_machine)
    old, new = (
        [_measured(rows[key], key, name) for key in common] for rows, name in zip((rows_a, rows_b), names, strict=True)
    )
    restless = math.hypot(_usual_drift(old), _usual_drift(new))
    verdicts = []
    for key, first, second in zip(common, old, new, strict=True):
        verdict, interval, notes = _judge(first, second, threshold, restless)
        verdicts.append(RowVerdict(key, first.ms, second.ms, interval, verdict, notes + other))
    verdicts.sort(key=lambda row: (_WORST_FIRST.index(row.verdict), -(row.ratio or 0.0)))
    only_a = tuple(key for key in rows_a if key not in rows_b)
    only_b = tuple(key for key in rows_b if key not in rows_a)
    return Comparison(names, threshold, tuple(verdicts), only_a, only_b, _changes(a, b), math.expm1(restless))


@dataclass(frozen=True)
class _Measured:
    """What one file says of the time of a row; equal when it is one and the same measurement."""

    ms: float | None
    spread: float | None
    samples: tuple[float, ...]
    way: str | None
    host: str | None  # the neighbour that did this layer's work, so that its time is in the neighbour's row


def _is_time(value: float) -> bool:
    return 0 <= value < math.inf


def _measured(row: Row, key: Key, file: str) -> _Measured:
    """A row's main timing, its numbers checked."""
    who, way = f"{file}: {_words(key)}", row.get("timing")

    def figure(name: str) -> float | None:
        value = row[name]
        return None if value is None else checks.number(who, name, value, "of at least 0", _is_time)

    samples = ((row.get("timings") or {}).get(way) or {}).get("samples_ms") or ()
    samples = tuple(checks.number(who, "samples_ms", v, "of at least 0", _is_time) for v in samples)
    return _Measured(figure("ms"), figure("spread"), samples if len(samples) > 1 else (), way, row.get("in"))


def _usual_drift(rows: Sequence[_Measured]) -> float:
    """The median drift of a file's rows; 0 where they are too few to know what is usual."""
    drifts = [drift(row.samples) for row in rows if row.samples]
    return median(drifts) if len(drifts) >= _ENOUGH_ROWS else 0.0


def _judge(
    a: _Measured, b: _Measured, threshold: float, restless: float
) -> tuple[str, Interval | None, tuple[str, ...]]:
    """Verdict, interval and notes."""
    if a == b or (a.host and a.host == b.host):
        notes = (f"in {a.host}",) if a.host else ("measured in neither",) if a.ms is None else ()
        return SAME, Interval(1.0, 1.0, 1.0, "identical") if a.ms else None, notes
    obstacle = _obstacle(a, b)
    if obstacle:
        return UNCLEAR, None, (obstacle,)
    if a.samples and b.samples:
        interval = ratio_of_medians(a.samples, b.samples, restless)
        notes = (f"drift {100 * interval.drift:.1f} % within a run",) * (interval.drift > threshold)
    else:
        interval, notes = ratio_of_spreads(a.ms, a.spread, b.ms, b.spread), ("by spread, without samples",)
    verdict = verdict_of(interval, threshold)
    if verdict == UNCLEAR and (interval.low > 1 + threshold or interval.high < 1 / (1 + threshold)):
        notes = ("changed at 95 %, not at 99 %", *notes)
    return verdict, interval, notes


def _obstacle(a: _Measured, b: _Measured) -> str | None:
    """Why the two give no interval, if they do not."""
    if a.host or b.host:
        return " / ".join(f"in {m.host}" if m.host else "a row of its own" for m in (a, b))
    for m, side in ((a, "A"), (b, "B")):
        if not m.ms:
            return f"not measured in {side}" if m.ms is None else f"0 ms in {side}"
    if a.way != b.way:
        return f"timed in two ways: {a.way} / {b.way}"
    if not (a.samples and b.samples) and None in (a.spread, b.spread):
        return "neither samples nor spread"
    return None


# -- what may be compared ---------------------------------------------------------------------------------------------


def _by_key(content: Mapping[str, Any], name: str) -> dict[Key, Row]:
    """The rows that were timed, by what names them."""
    rows: dict[Key, Row] = {}
    for row in content["rows"]:
        key = tuple(row.get(part) for part in KEY)
        if not all(part is None or isinstance(part, (str, int)) for part in key):
            raise ValueError(f"{name}: a row named {key}, of which not all is text or a number; the file is damaged")
        if row["pass"] == _REMAINDER:
            continue
        if key in rows:
            raise ValueError(f"{name}: two rows of {_words(key)}; nothing tells which of them to compare")
        rows[key] = row
    return rows


def _same_benchmark(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> None:
    kinds = a["benchmark"], b["benchmark"]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{names[0]} is of benchmark {kinds[0]!r}, {names[1]} of {kinds[1]!r}; compare files of one benchmark"
        )


def _other_machine(
    a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], any_machine: bool
) -> tuple[str, ...]:
    """A note for every row when the machines differ and may."""
    machines = machine_name(a["machine"]), machine_name(b["machine"])
    if machines[0] == machines[1]:
        return ()
    if not any_machine:
        raise ValueError(
            f"{names[0]} was measured on {machines[0]}, {names[1]} on {machines[1]}; a difference would be the "
            f"machines': measure both on one, or say --any-machine"
        )
    return ("other machine",)


def _same_work(key: Key, a: Row, b: Row, names: tuple[str, str], any_machine: bool) -> None:
    """One key must mean one piece of work on one device."""
    for what in ("input_shapes", "output_shape", *([] if any_machine else ["device"])):
        old, new = a.get(what), b.get(what)
        if old is not None and new is not None and old != new:
            raise ValueError(
                f"{_words(key)}: {what} {old} in {names[0]}, {new} in {names[1]}; these are two different measurements"
            )


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """What else differs between the two runs and may explain a difference."""
    old = {"commit": a.get("commit"), "command": a.get("command")} | dict(a["machine"])
    new = {"commit": b.get("commit"), "command": b.get("command")} | dict(b["machine"])
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    return tuple(f"{name}: {old.get(name)} -> {new.get(name)}" for name in names)


def _words(key: Key) -> str:
    *words, ranks = key
    return " ".join([*(str(word) for word in words if word is not None), *([f"{ranks} ranks"] if ranks else [])])


def _first(rows: Iterable[Key]) -> str:
    key = next(iter(rows), None)
    return repr(_words(key)) if key else "no row at all"


# -- the table and the command ----------------------------------------------------------------------------------------


def table(comparison: Comparison, every: bool = True) -> tuple[list[str], list[list[str]]]:
    """Header and rows of text, worst first; rows that one file alone holds stand before those that stayed the same.

    Args:
        every: also the rows that are SAME.
    """
    keys = [row.key for row in comparison.rows] + [*comparison.only_a, *comparison.only_b]
    used = [i for i, _ in enumerate(KEY) if any(key[i] is not None for key in keys)]
    header = [*(KEY[i] for i in used), "A ms", "B ms", "change", "95 % interval", "verdict", "notes"]

    def line(key: Key, figures: Sequence[str], verdict: str, notes: str = "") -> list[str]:
        return [*("-" if key[i] is None else str(key[i]) for i in used), *figures, verdict, notes]

    judged = [line(row.key, _figures(row), row.verdict, ", ".join(row.notes)) for row in comparison.rows]
    bad = [text for text, row in zip(judged, comparison.rows, strict=True) if row.verdict in (SLOWER, UNCLEAR)]
    missing = [line(key, ["-"] * 4, "only in A") for key in comparison.only_a]
    missing += [line(key, ["-"] * 4, "only in B") for key in comparison.only_b]
    shown = (SAME, FASTER) if every else (FASTER,)
    good = [text for text, row in zip(judged, comparison.rows, strict=True) if row.verdict in shown]
    return header, bad + missing + good


def _figures(row: RowVerdict) -> list[str]:
    """The two medians, the change and its interval as text."""
    change, known = "-" if row.ratio is None else _percent(row.ratio), row.interval
    interval = "-" if known is None else f"{_percent(known.low)} to {_percent(known.high)}"
    return [*("-" if ms is None else f"{ms:.4g}" for ms in (row.a_ms, row.b_ms)), change, interval]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``minidl bench compare``."""
    parser.add_argument("a", metavar="A.json", help="the reference")
    parser.add_argument("b", metavar="B.json", help="what is compared with it")
    parser.add_argument(
        "--threshold", type=float, default=100 * THRESHOLD, metavar="PERCENT", help="the least change that matters"
    )
    parser.add_argument("--any-machine", action="store_true", help="compare although the machines differ")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for UNCLEAR and missing rows, too")
    parser.add_argument("--all", action="store_true", help="also list the rows that are SAME")


def run(args: argparse.Namespace) -> int:
    """``minidl bench compare``: print the table, what else differs, and one line of counts; the exit status."""
    checks.number("", "--threshold", args.threshold, "of percent above 0 and below 100", lambda p: 0 < p < 100)
    found = compare(args.a, args.b, threshold=args.threshold / 100, any_machine=args.any_machine)
    title = f"B {found.names[1]} against A {found.names[0]}; {args.threshold:g} % matters"
    header, rows = table(found, every=args.all)
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items() if count)
    restless = f"the machine was restless: a row usually drifted by {100 * found.restless:.1f} % within these runs"
    notes = [restless] * (found.restless > found.threshold) + [
        *(f"differs: {change}" for change in found.changes),
        counts,
    ]
    if rows:
        show(title, header, rows, notes=notes)
    else:
        print("\n".join([title, *notes]))
    return found.exit_status(args.strict)
