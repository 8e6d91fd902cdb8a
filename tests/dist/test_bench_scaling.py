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
    arms = ["shm/4", "mpi/0/hold", "shm/bf16/1"]
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
    assert [row["group"] for row in rows[:3]] == ["4", "0", "1"]
    found = [line.split(" | ") for line in tables.ways([content]).splitlines()[2:]]
    assert [line[2:5] for line in found] == [
        [f"{row['exposed_ms']:.2f}" for row in case] for case in (rows[:3], rows[3:])
    ]


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


def made(arm, *, case="net/b1", ranks=2, peers=3.0, efficiency=0.9):
    row = {
        "case": case, "dtype": "bf16", "ranks": ranks, "arm": arm, "images_per_s": 10.0, "exposed_ms": 1.0, "ms": 2.0,
        "efficiency": efficiency, "peers": {}, "peer_images_per_s": {}, "peer_efficiency": {},
    }  # fmt: skip
    if peers:
        row |= {"peers": {"torch-ddp": peers}, "peer_images_per_s": {"torch-ddp": 5.0}}
        row["peer_efficiency"] = {"torch-ddp": 0.5}
    return row


def file(date, *rows, gpu="H200"):
    return {"date": date, "commit": f"c{date}", "machine": {"gpu": gpu}, "rows": list(rows)}


def test_a_network_has_one_line_of_the_newest_run_that_has_ddp(tables):
    """In the order of batches, as numbers, and ranks."""
    old, new = (file(date, made("links", efficiency=date / 10), made("nccl")) for date in (7, 8))
    bare = file(9, made("links", peers=None), made("links", case="net/b16", peers=None), made("links", case="net/b2"))
    more = file(5, made("links", ranks=4, peers=None), made("links", ranks=4, peers=None, efficiency=0.1))
    lines = [line.split(" | ") for line in tables.scaling([new, bare, old, more]).splitlines()[2:]]
    assert [line[:2] for line in lines] == [
        ["| net/b1 bf16", "2"], ["| net/b1 bf16", "4"], ["| net/b2 bf16", "2"], ["| net/b16 bf16", "2"]
    ]  # fmt: skip
    assert lines[0][2:] == ["10", "80.0%", "1.00", "5 (50.0%)", "1.50", "c8 |"]
    assert lines[1][2:] == ["10", "90.0%", "1.00", "", "", "c5 |"], "the first arm is how training runs"


def test_ways_stand_side_by_side_run_by_run(tables):
    arms = [made(arm) for arm in ("links", "nccl", "links/bf16")]
    few, on_cpus = file(1, *arms[:2]), file(2, *(made(arm) for arm in ("shm", "mpi", "mpi/0")), gpu=None)
    gpus, cpus = tables.ways([file(3, *arms), few, on_cpus, file(4, *arms[::-1])]).split("\n\n")
    assert gpus.splitlines()[0].split(" | ")[2:5] == ["links", "nccl", "links/bf16"]
    assert [line.split(" | ")[-1] for line in gpus.splitlines()[2:]] == ["c3 |", "c4 |"] and "mpi/0" in cpus


def test_sums_of_two_and_four_gpus_stand_side_by_side(tables):
    sums = [
        {"bytes": size, "ranks": ranks, "arm": arm, "ms": ms, "peers": {"nccl": 0.01}}
        for size, ranks, arm, ms in (
            (1024, 2, "a", 0.002), (1024, 2, "b", 0.004), (4096, 2, "a", 0.02), (4096, 2, "b", 0.0125),
            (512, 4, "c", 0.01),
        )
    ]  # fmt: skip
    lines = tables.sums_of_gpus([{"rows": sums[:4]}, {"rows": sums[4:]}]).splitlines()[2:]
    assert lines == [
        "| 4 | 12.5 | b | 10.0 | 0.80 |  |  |  |  |",
        "| 1 | 2.0 | a | 10.0 | 5.00 |  |  |  |  |",
        "| 0.5 |  |  |  |  | 10.0 | c | 10.0 | 1.00 |",
    ]
