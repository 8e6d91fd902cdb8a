"""The table of a network's layers as two real ranks measure it, by the command that README.md shows."""

from __future__ import annotations

import csv
import json
import resource

import pytest

from minidl import models
from minidl.layers import Flatten
from minidl.profile.results import load
from tests.dist import job

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(the job, its result file, the folder of its files, processor seconds), the machine's ceilings included."""
    folder = tmp_path_factory.mktemp("bench")
    files = {name: str(folder / f"two.{name}") for name in ("json", "csv", "trace")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    command = ["-m", "minidl", "bench", "layers", "--model", "resnet20", "--batch", "32", "--device", "cpu", *options]
    before = processor_seconds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "TIMEOUT_SECONDS", 180.0)
        done = job.run_program(command, 2, folder / "none", MINIDL_CACHE=str(folder / "cache"))
    assert done.status == 0, done.output
    return done, load(files["json"]), folder, processor_seconds() - before


def processor_seconds():
    """Of all processes that this one has started and awaited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_it_takes_less_than_a_minute(measured):
    """On two idle cores, that is: other programs lengthen the wall time, and not that of the processors."""
    assert 3 < measured[3] / 2 < 60


def test_two_ranks_make_one_table(measured):
    done, content, *_ = measured
    lines = done.output.splitlines()
    (title,) = (line for line in lines if line.startswith("resnet20"))
    assert "batch 64 on 2 ranks" in title
    layers = [layer for layer in models.build("resnet20", (32, 32, 3), 10).layers if not isinstance(layer, Flatten)]
    shown = [line.split()[0] for line in lines if line and line.split()[0] in {layer.name for layer in layers}]
    assert shown == [layer.name for layer in layers], "each once, in network order; a view takes no time"
    assert content["setup"]["ranks"] == 2 and len(content["step"]["rank_ms"]) == 2
    assert {len(row["rank_ms"]) for row in content["rows"] if row["rank_ms"]} == {2}


def test_every_gradient_travels_once_and_the_sum_closes(measured):
    _, content, *_ = measured
    rows = {(row["layer"], row["pass"]): row for row in content["rows"]}
    messages = [row for row in rows.values() if row["pass"] == "all_reduce"]
    carriers = [row for row in messages if row["in"] is None]
    assert {row["in"] for row in messages} - {None} == {row["layer"] for row in carriers}
    nbytes = 4 * content["setup"]["parameters"]
    assert sum(row["wire_bytes"] for row in messages) == nbytes, "2 (n - 1) / n is 1"
    assert nbytes <= sum(row["message_bytes"] for row in carriers) < 1.01 * nbytes, "arrays begin at whole 256 bytes"
    for row in carriers:
        assert row["ms"] > 0 and row["transfer_ms"] > 0 and row["wait_ms"] >= 0 and row["exposed_ms"] >= 0
    parts = [row for row in rows.values() if row["timings"]["step"] and row["pass"] != "step"]
    assert content["step"]["eager_accounted"] > 0.8
    assert {"loss", "optimizer", "step"} <= {row["layer"] for row in parts}


def test_table_and_trace_have_both_ranks(measured):
    _, content, folder, _ = measured
    with (folder / "two.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(content["rows"])
    events = json.loads((folder / "two.trace").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["name"] for event in spans if event["pid"] == 0} == {e["name"] for e in spans if e["pid"] == 1}
