"""Steps on several ranks as the benchmark measures them, on CPU ranks; and the table that is made of its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.dist import job

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "benchmarks" / "bench_scaling.py")


@pytest.fixture
def tables():
    """benchmarks/pages/ranks.py as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from pages import ranks

        return ranks
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.mpi
def test_every_arm_has_a_row_beside_the_step_without_messages(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "TIMEOUT_SECONDS", 90.0)
    out = tmp_path / "out" / "scaling.json"
    arms = ["shm/near", "mpi/0/hold", "shm/bf16/1"]
    options = ["--device", "cpu", "--cases", "lenet/4", "resnet20/2/sync", "--arms", *arms, "--peers"]
    done = job.run_program([SCRIPT, *options, "--blocks", "2", "--steps", "1", "--json", str(out)], 2, tmp_path)
    assert done.status == 0, done.output
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert [row["arm"] for row in rows] == 2 * arms
    assert [row["case"] for row in rows[::3]] == ["lenet/32x32/b4", "resnet20/32x32/b2, synchronised"]
    for row in rows:
        assert row["efficiency"] == pytest.approx(row["alone_ms"] / row["ms"], rel=1e-5)
        assert row["exposed_ms"] == pytest.approx(row["ms"] - row["alone_ms"], abs=1e-5 * row["ms"])
        batch = 2 * int(row["case"].partition("/b")[2].partition(",")[0])
        assert row["images_per_s"] == pytest.approx(batch / row["ms"] * 1e3, rel=1e-5)
        assert (row["exposed_by_events_ms"] is None) == (row["arm"] != arms[0])
    assert rows[1]["messages"] > rows[0]["messages"] >= 1 and rows[2]["message_dtype"] == "bf16"
    assert rows[4]["messages"] > rows[4]["waiting"] > 0 == rows[3]["waiting"] == rows[5]["waiting"]
    assert [row["group"] for row in rows[:3]] == ["near", "0", "1"]
    table = tables.scaling([content])
    assert all(table.count(f"| {row['arm']} |") == 2 for row in rows[:3])


@pytest.mark.mpi
def test_what_it_cannot_measure_is_refused(tmp_path):
    done = job.run_program([SCRIPT, "--device", "cpu", "--peers", "--cases", "lenet"], 2, tmp_path)
    assert done.status != 0 and "--cases must be MODEL/BATCH" in done.output


def test_what_no_arm_means_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_scaling

    with pytest.raises(ValueError, match="unknown engine of an arm 'links'"):
        bench_scaling.Arm.parse("links", "cpu")
    for wrong in ("shm/x", "shm/1/4", "shm/fp32/bf16", "shm/soon/hold"):
        with pytest.raises(ValueError, match="--arms must be ENGINE"):
            bench_scaling.Arm.parse(wrong, "cpu")


def test_a_peer_that_was_left_out_leaves_its_columns_empty(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_scaling

    row = {
        "case": "net/b1", "arm": "links", "messages": 1, "ms": 2.0, "spread": 0.0, "images_per_s": 10.0, "ranks": 2,
        "efficiency": 0.9, "exposed_ms": 0.2, "exposed_range_ms": 0.1, "exposed_by_events_ms": None,
        "peers": {"torch-ddp": 3.0}, "peer_images_per_s": {"torch-ddp": 5.0}, "peer_efficiency": {"torch-ddp": 0.5},
        "peer_exposed_ms": {"torch-ddp": 1.5},
    }  # fmt: skip
    bench_scaling.table([row, row | {"arm": "nccl", "peers": {}}], list(bench_scaling.PEERS))
    with_peer, without = capsys.readouterr().out.splitlines()[-2:]
    assert "links" in with_peer and "50.00%" in with_peer and "nccl" in without and "50.00%" not in without


def test_tables_begin_with_the_worst(tables):
    row = {
        "case": "net/b1", "dtype": "bf16", "ranks": 2, "images_per_s": 10.0, "exposed_ms": 1.0, "ms": 2.0,
        "peers": {"torch-ddp": 3.0}, "peer_images_per_s": {"torch-ddp": 5.0}, "peer_efficiency": {"torch-ddp": 0.5},
        "peer_exposed_ms": {"torch-ddp": 1.5},
    }  # fmt: skip
    rows = [row | {"arm": "good", "efficiency": 0.9}, row | {"arm": "bad", "efficiency": 0.6, "peers": {}}]
    later = [rows[0] | {"case": "net/b1", "ranks": 4}, rows[1] | {"case": "net/b16"}, rows[1] | {"case": "net/b2"}]
    lines = [line.split(" | ") for line in tables.scaling([{"rows": rows + later}]).splitlines()[2:]]
    assert [line[2] for line in lines[:3]] == ["DDP", "bad", "good"], "of a run the worst efficiency first"
    assert [line[-1] for line in lines[:3]] == [" |", " |", "1.50 |"]
    assert [(line[0], line[1]) for line in lines[3:]] == [
        ("| net/b1 bf16", "4"), ("| net/b1 bf16", "4"), ("| net/b2 bf16", "2"), ("| net/b16 bf16", "2")
    ]  # fmt: skip
    sums = [
        {"bytes": size, "ranks": 2, "arm": arm, "ms": ms, "peers": {"nccl": 0.01}}
        for size, arm, ms in ((1024, "a", 0.002), (1024, "b", 0.004), (4096, "a", 0.02), (4096, "b", 0.0125))
    ]
    lines = tables.sums_of_gpus([{"rows": sums}]).splitlines()[-2:]
    assert "| b | 10.0 | 0.80 |" in lines[0] and "| a | 10.0 | 5.00 |" in lines[1]
