"""The spans of a result file as a trace for chrome://tracing and https://ui.perfetto.dev (Trace Event Format, JSON).

A process is a rank, a thread is a lane of it (compute, messages, host). An arrow leads from the weight gradient of a
layer to the all-reduce that carries it. Times are microseconds from the start of the step; each rank's clock is its
own, so slices of two ranks are only as aligned as the barrier before the step left them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from minidl.profile.results import Row, write

_LANES = ("compute", "messages", "host")
_TRACKS = 16  # thread numbers of one lane: parts of it that run side by side
_RESOLUTION_NS = 1000  # two readings of a GPU's clock; what overlaps by less does not overlap
_FIGURES = ("flop", "bytes", "wire_bytes", "message_bytes", "floor_ms", "bound")

Event = dict[str, Any]


@dataclass
class _Slice:
    """A span in whole nanoseconds, which neither adding nor rounding pushes over its neighbour."""

    rank: int
    lane: str
    layer: str
    pass_name: str
    start: int
    end: int
    track: int = 0

    @property
    def place(self) -> dict[str, int]:
        lane = _LANES.index(self.lane) if self.lane in _LANES else len(_LANES)
        return {"pid": self.rank, "tid": lane * _TRACKS + self.track}


def chrome_trace(content: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of a result file's content, from its ``spans``, ``memory`` and ``rows``.

    Raises:
        ValueError: when it holds no spans, or one that is none, naming it.
    """
    spans = content.get("spans")
    if not spans:
        raise ValueError("the result holds no spans; a trace is made of what minidl bench layers or model measured")
    slices = [_slice(span, i) for i, span in enumerate(spans)]
    memory = [(int(at["rank"]), _nanoseconds(at["t_ms"]), int(at["bytes"])) for at in content.get("memory") or ()]
    zero = min([0, *(s.start for s in slices), *(at for _, at, _ in memory)])
    for s in slices:
        s.start, s.end = s.start - zero, s.end - zero
    _untangle(slices)
    rows = {(row.get("layer"), row["pass"]): row for row in reversed(content["rows"])}  # the first of a name stays
    events = _names(slices, content)
    events += [_complete(s, rows) for s in slices]
    events += _flows(slices)
    events += [
        {"name": "memory", "ph": "C", "pid": rank, "ts": (at - zero) / 1e3, "args": {"bytes": used}}
        for rank, at, used in sorted(memory)
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": _base(content),
        "otherData": {key: str(content[key]) for key in ("benchmark", "command", "commit", "date") if content.get(key)},
    }


def write_trace(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write the trace, whole or not at all, compressed when ``path`` ends in .gz; folders are made.

    Raises:
        ValueError: from `chrome_trace`; nothing is then written.
    """
    write(path, json.dumps(chrome_trace(content), separators=(",", ":"), allow_nan=False).encode())


# -- slices -----------------------------------------------------------------------------------------------------------


def _nanoseconds(ms: float) -> int:
    return round(ms * 1e6)


def _slice(span: Mapping[str, Any], index: int) -> _Slice:
    """A checked span."""
    try:
        start, ms = float(span["start_ms"]), float(span["ms"])
        found = _Slice(int(span["rank"]), str(span["lane"]), str(span["layer"]), str(span["pass"]), 0, 0)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"span {index} is none ({error!r}): {dict(span)}; the file is damaged") from error
    if not (math.isfinite(start) and math.isfinite(ms) and ms >= 0):
        raise ValueError(f"span {index}, {found.layer} {found.pass_name}: starts at {start} ms and takes {ms} ms")
    found.start, found.end = _nanoseconds(start), _nanoseconds(start + ms)
    return found


def _untangle(slices: Sequence[_Slice]) -> None:
    """Give each slice a track of its lane on which slices contain each other or follow each other, as viewers demand.

    Slices that run side by side (messages on several streams) come to lie on several tracks. Those that overlap by no
    more than the clock resolves are cut instead.
    """
    lanes: dict[tuple[int, str], list[list[_Slice]]] = {}
    for s in sorted(slices, key=lambda s: (s.rank, s.lane, s.start, -s.end)):
        tracks = lanes.setdefault((s.rank, s.lane), [])  # of each track the slices still open, innermost last
        s.track = next((i for i, open_ in enumerate(tracks) if _fits(open_, s)), len(tracks))
        if s.track == len(tracks):
            tracks.append([])
        if s.track >= _TRACKS:
            raise ValueError(f"rank {s.rank}: more than {_TRACKS} spans side by side on lane {s.lane!r}")
        tracks[s.track].append(s)


def _fits(open_: list[_Slice], s: _Slice) -> bool:
    """Close the slices that end before ``s``; whether it then lies within the innermost of those still open."""
    while open_ and (open_[-1].end <= s.start or _touches(open_[-1], s)):
        ended = open_.pop()
        ended.end = min(ended.end, s.start)
    if open_ and 0 < s.end - open_[-1].end <= _RESOLUTION_NS:
        s.end = open_[-1].end
    return not open_ or s.end <= open_[-1].end


def _touches(before: _Slice, s: _Slice) -> bool:
    return before.end < s.end and before.end - s.start <= _RESOLUTION_NS


# -- events -----------------------------------------------------------------------------------------------------------


def _complete(s: _Slice, rows: Mapping[tuple[str | None, str], Row]) -> Event:
    # The figures of a message stand in the row of its last layer, whose gradient completes it.
    row = rows.get((s.layer, s.pass_name)) or rows.get((s.layer.split("+")[-1], s.pass_name)) or {}
    figures = {name: row[name] for name in _FIGURES if row.get(name) is not None}
    return {
        "name": f"{s.layer} {s.pass_name}", "cat": s.pass_name, "ph": "X", **s.place, "ts": s.start / 1e3,
        "dur": (s.end - s.start) / 1e3, "args": {"layer": s.layer, "pass": s.pass_name, **figures},
    }  # fmt: skip


def _flows(slices: Iterable[_Slice]) -> list[Event]:
    """Arrows from the last weight gradient of a layer to the all-reduce that carries it."""
    events: list[Event] = []
    ready: dict[tuple[int, str], _Slice] = {}
    for s in sorted(slices, key=lambda s: (s.start, s.pass_name == "all_reduce")):
        if s.pass_name == "backward_weight":
            ready[s.rank, s.layer] = s
        if s.pass_name != "all_reduce":
            continue
        for layer in s.layer.split("+"):
            source = ready.pop((s.rank, layer), None)
            if source is not None:
                arrow = {"name": "gradient", "cat": "gradient", "id": len(events) // 2}
                leaves = max(source.start, min(source.end - 1, s.start))  # a moment within the slice: it binds to that
                events.append(arrow | {"ph": "s", **source.place, "ts": leaves / 1e3})
                events.append(arrow | {"ph": "f", "bp": "e", **s.place, "ts": s.start / 1e3})
    return events


def _names(slices: Iterable[_Slice], content: Mapping[str, Any]) -> list[Event]:
    """Names and order of ranks and lanes."""

    def named(what: str, place: Mapping[str, int], **args: Any) -> Event:
        return {"name": what, "ph": "M", "ts": 0, **place, "args": args}

    places = {(s.rank, s.place["tid"]): s for s in slices}
    setup = content.get("setup") or {}
    label = ", ".join(str(setup[key]) for key in ("model", "precision", "device") if setup.get(key))
    events = []
    for rank in sorted({rank for rank, _ in places}):
        place = {"pid": rank, "tid": 0}
        events += [named("process_name", place, name=f"rank {rank}"), named("process_labels", place, labels=label)]
        events.append(named("process_sort_index", place, sort_index=rank))
    for (_, thread), s in sorted(places.items()):
        name = s.lane if s.track == 0 else f"{s.lane} {s.track + 1}"
        events += [named("thread_name", s.place, name=name), named("thread_sort_index", s.place, sort_index=thread)]
    return events


def _base(content: Mapping[str, Any]) -> int:
    """The moment of the run in nanoseconds since 1970, to the second that the file knows; 0 where it knows none."""
    try:
        return int(datetime.fromisoformat(content["date"]).timestamp()) * 10**9
    except (KeyError, TypeError, ValueError):
        return 0
