"""Traces obey the Trace Event Format: complete slices that nest, arrows that pair up, names for all that is shown."""

from __future__ import annotations

import gzip
import json
import os
from itertools import groupby

import pytest

from minidl.profile.results import result
from minidl.profile.trace import chrome_trace, write_trace

LAYERS = ("conv1", "conv2", "fc")


def row(layer, pass_name, **more):
    needed = {
        "case": "net/b1",
        "dtype": "fp32",
        "arm": "minidl",
        "ms": 1.0,
        "spread": 0.0,
        "floor_ms": 0.5,
        "peers": {},
    }
    return needed | {"layer": layer, "pass": pass_name, "flop": None, "bytes": None} | more


def spans_of(rank):
    """One step of three layers; conv1 and conv2 share a message."""
    at, spans = 0.0, []

    def span(layer, pass_name, ms, lane="compute", start=None):
        nonlocal at
        spans.append({"rank": rank, "lane": lane, "layer": layer, "pass": pass_name, "start_ms": start or at, "ms": ms})
        at += ms if start is None else 0.0

    for layer in LAYERS:
        span(layer, "forward", 0.1 + 0.01 * rank)
    span("loss", "forward", 0.05)
    for layer in reversed(LAYERS):
        span(layer, "backward_weight", 0.3)
        if layer == "fc":
            span("fc", "message", 0.02, "host", start=at)
            span("fc", "all_reduce", 0.5, "messages", start=at)
        span(layer, "backward_data", 0.2)
    span("conv2+conv1", "all_reduce", 0.4, "messages", start=at)
    span("conv2+conv1", "wait", 0.4)
    span("optimizer", "update", 0.1)
    return spans


@pytest.fixture
def content():
    rows = [row(layer, "forward", flop=7, bytes=3) for layer in LAYERS]
    rows += [row("conv1", "all_reduce", wire_bytes=12.0, message_bytes=99), row("fc", "all_reduce", wire_bytes=4.0)]
    memory = [{"rank": rank, "t_ms": t, "bytes": 1000 * (rank + 1)} for rank in (1, 0) for t in (0.5, 0.1)]
    more = {"spans": spans_of(0) + spans_of(1), "memory": memory, "setup": {"model": "net", "device": "cuda"}}
    return result("layers", rows, {"gpu": "NVIDIA H200"}, **more)


def of_phase(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def assert_well_formed(trace):
    """What the format demands of every trace."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert {event["ph"] for event in trace["traceEvents"]} <= set("XMCsf")
    assert all({"name", "ph", "pid", "ts"} <= event.keys() and event["ts"] >= 0 for event in trace["traceEvents"])
    slices = of_phase(trace, "X")
    for event in slices:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["dur"] >= 0
    lane = lambda e: (e["pid"], e["tid"])  # noqa: E731
    ends = lambda e: round(1e3 * (e["ts"] + e["dur"]))  # noqa: E731
    for _, events in groupby(sorted(slices, key=lambda e: (*lane(e), e["ts"], -e["dur"])), lane):
        open_ = []
        for event in events:
            while open_ and ends(open_[-1]) <= round(1e3 * event["ts"]):
                open_.pop()
            assert not open_ or ends(event) <= ends(open_[-1]), (open_[-1], event)
            open_.append(event)
    starts, finishes = ({e["id"]: e for e in of_phase(trace, phase)} for phase in "sf")
    assert len(starts) == len(of_phase(trace, "s")) and len(finishes) == len(of_phase(trace, "f"))
    assert starts.keys() == finishes.keys()
    for number, start in starts.items():
        finish = finishes[number]
        assert start["ts"] <= finish["ts"] and start["pid"] == finish["pid"] and start["name"] == finish["name"]
        for end in (start, finish):  # each end lies in a slice of its lane, to which viewers bind it
            assert any(lane(e) == lane(end) and e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in slices), end
    named = {lane(e) for e in of_phase(trace, "M") if e["name"] == "thread_name"}
    assert {lane(event) for event in slices} <= named


def test_two_ranks(content):
    trace = chrome_trace(content)
    assert_well_formed(trace)
    slices = of_phase(trace, "X")
    assert len(slices) == len(content["spans"])
    for span, event in zip(content["spans"], slices, strict=True):
        assert event["name"] == f"{span['layer']} {span['pass']}" and event["pid"] == span["rank"]
        assert (event["ts"], event["dur"]) == pytest.approx((1e3 * span["start_ms"], 1e3 * span["ms"]), abs=2e-3)
    names = {(e["pid"], e["args"]["name"]) for e in of_phase(trace, "M") if e["name"] == "thread_name"}
    assert names == {(rank, lane) for rank in (0, 1) for lane in ("compute", "messages", "host")}
    processes = [(e["pid"], e["args"]["name"]) for e in of_phase(trace, "M") if e["name"] == "process_name"]
    assert processes == [(0, "rank 0"), (1, "rank 1")]
    assert trace["displayTimeUnit"] == "ms"
    assert trace["baseTimeNanoseconds"] > 1_700_000_000 * 10**9


def test_figures_of_the_row_stand_in_the_slice(content):
    found = {(e["pid"], e["name"]): e["args"] for e in of_phase(chrome_trace(content), "X")}
    expected = {"layer": "fc", "pass": "forward", "flop": 7, "bytes": 3, "floor_ms": 0.5}
    assert found[0, "fc forward"] == found[1, "fc forward"] == expected
    assert found[0, "fc backward_weight"] == {"layer": "fc", "pass": "backward_weight"}  # no row, no figures
    # A message's own figures stand in the row of its last layer.
    assert found[1, "conv2+conv1 all_reduce"]["message_bytes"] == 99


def test_arrows_lead_from_each_gradient_to_its_message(content):
    trace = chrome_trace(content)
    slices = of_phase(trace, "X")

    def holder(event):
        (found,) = (
            e for e in slices
            if (e["pid"], e["tid"]) == (event["pid"], event["tid"]) and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        )  # fmt: skip
        return found["pid"], found["name"]

    finishes = {e["id"]: e for e in of_phase(trace, "f")}
    arrows = {(*holder(start), holder(finishes[start["id"]])[1]) for start in of_phase(trace, "s")}
    message = {"conv1": "conv2+conv1", "conv2": "conv2+conv1", "fc": "fc"}
    assert arrows == {
        (rank, f"{layer} backward_weight", f"{message[layer]} all_reduce") for rank in (0, 1) for layer in LAYERS
    }
    assert all(event["bp"] == "e" for event in finishes.values())


def test_a_gradient_is_carried_once(content):
    """Two steps in one trace: each message takes the gradients of its own step."""
    later = [span | {"start_ms": span["start_ms"] + 10} for span in content["spans"]]
    trace = chrome_trace(content | {"spans": content["spans"] + later})
    assert_well_formed(trace)
    finishes = {e["id"]: e["ts"] for e in of_phase(trace, "f")}
    assert len(finishes) == 2 * 2 * len(LAYERS)
    assert all(finishes[start["id"]] - start["ts"] < 5e3 for start in of_phase(trace, "s"))


def test_memory_is_a_counter_of_each_rank_in_order_of_time(content):
    found = [(e["pid"], e["ts"], e["args"]["bytes"]) for e in of_phase(chrome_trace(content), "C")]
    assert found == [(0, 100, 1000), (0, 500, 1000), (1, 100, 2000), (1, 500, 2000)]
    assert not of_phase(chrome_trace(content | {"memory": None}), "C")


def compute(*times):
    return [
        {"rank": 0, "lane": "compute", "layer": f"l{i}", "pass": "forward", "start_ms": start, "ms": ms}
        for i, (start, ms) in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("times", "tracks"),
    [
        ([(0.0, 0.1), (0.1, 0.2), (0.1 + 0.2, 0.1)], 1),  # 0.1 + 0.2 ends after 0.3 in binary
        ([(0.0, 1.0), (0.2, 0.3), (0.5, 0.5), (0.6, 0.1)], 1),  # nested
        ([(0.0, 0.1004), (0.1, 0.2)], 1),  # less than the clock resolves
        ([(0.0, 1.0), (0.2, 0.8009)], 1),
        ([(0.0, 1.0), (0.9995, 0.0003), (0.9996, 1.0)], 1),
        ([(0.0, 1.0), (0.5, 1.0)], 2),  # side by side
        ([(0.0, 1.0), (0.5, 1.0), (0.6, 0.1), (0.7, 2.0), (1.5, 0.1)], 3),
        ([(-0.5, 1.0), (0.5, 1.0)], 1),  # a rank's clock may start before the step
        ([(0.3, 0.0), (0.3, 0.0), (0.3, 0.1)], 1),
    ],
)
def test_slices_of_a_lane_nest_or_go_to_lanes_of_their_own(times, tracks):
    trace = chrome_trace({"spans": compute(*times), "rows": []})
    assert_well_formed(trace)
    slices = of_phase(trace, "X")
    assert len({e["tid"] for e in slices}) == tracks
    for (_, ms), event in zip(times, slices, strict=True):
        assert event["dur"] == pytest.approx(1e3 * ms, abs=1.001)  # cut by no more than the clock resolves


def test_what_is_no_span_is_refused(content):
    for spans in ([], None):
        with pytest.raises(ValueError, match="holds no spans; a trace is made of what minidl bench layers"):
            chrome_trace(content | {"spans": spans})
    good = content["spans"][0]
    for bad, message in [
        ({k: v for k, v in good.items() if k != "lane"}, r"span 1 is none \(KeyError\('lane'\)\)"),
        (good | {"ms": None}, "span 1 is none .* the file is damaged"),
        (good | {"ms": -1.0}, "span 1, conv1 forward: starts at 0.0 ms and takes -1.0 ms"),
        (good | {"start_ms": float("nan")}, "span 1, conv1 forward: starts at nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            chrome_trace(content | {"spans": [good, bad]})


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_holds_the_trace(tmp_path, content, name):
    path = tmp_path / "new" / name
    write_trace(path, content)
    data = path.read_bytes()
    assert json.loads(gzip.decompress(data) if name.endswith(".gz") else data) == chrome_trace(content)
    write_trace(path, content)
    assert path.read_bytes() == data and [p.name for p in path.parent.iterdir()] == [name]


def test_a_failed_write_leaves_what_was_there(tmp_path, content, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_trace(path, content)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"] and path.read_text() == "old"
