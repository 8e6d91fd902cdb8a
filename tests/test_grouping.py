"""What a message should carry: chosen from planted times, kept for one machine and engine, read by Model."""

from __future__ import annotations

import json

import pytest

import minidl as m
from minidl import models
from minidl.backend import get_ops
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.dist import SOLO
from minidl.messages.neighbourhood import FEW
from minidl.profile import grouping
from tests.dist import job
from tests.parts import Twins


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "cache"))


def record(ops, comm, size):
    return grouping._identity(ops, comm) | {"group_bytes": size, "beside": {}}


def planted(*steps):
    return [{"bytes": 1 << i, "step_ms": step} for i, step in enumerate(steps)]


def test_the_smallest_of_the_fastest_groups_is_chosen():
    assert grouping.choose(planted(9.0, 5.0, 4.0, 3.95, 6.0)) == 4
    assert grouping.choose(planted(1.0, 1.0, 1.0)) == 1
    assert grouping.choose(planted(3.0, 2.0, 1.0)) == 4


def test_steps_that_messages_make_faster_tell_of_a_busy_machine():
    quiet = {"compute_ms": 10.0, "groups": [{"exposed_ms": -0.1}, {"exposed_ms": 3.0}]}
    assert not grouping.disturbed(quiet)
    assert grouping.disturbed(quiet | {"groups": [{"exposed_ms": -0.6}]})


def test_what_was_kept_is_used_and_nothing_else(cpu_ops):
    comm = Twins()
    assert grouping.group_bytes(cpu_ops, comm) == grouping.DEFAULT_BYTES == 4 << 20
    grouping.write(grouping._path(record(cpu_ops, comm, 1)), record(cpu_ops, comm, 12345))
    assert grouping.group_bytes(cpu_ops, comm) == 12345
    assert grouping.group_bytes(cpu_ops, SOLO) == 4 << 20, "one rank sends nothing"
    linked = Twins()
    linked.links = object()
    assert grouping.group_bytes(cpu_ops, linked) == 4 << 20, "messages wait: what comes next does not tell"
    assert grouping._path(record(cpu_ops, linked, 1)) != grouping._path(record(cpu_ops, comm, 1)), "nor is it NCCL's"
    other = Twins()
    other.name = "another"
    assert grouping.group_bytes(cpu_ops, other) == 4 << 20, "another engine"
    path = grouping._path(record(cpu_ops, comm, 1))
    path.write_text(json.dumps(record(cpu_ops, comm, 7) | {"version": -1}))
    assert grouping.group_bytes(cpu_ops, comm) == 4 << 20


def test_a_model_takes_what_was_kept_unless_told(cpu_ops):
    comm = Twins()
    grouping.write(grouping._path(record(cpu_ops, comm, 1)), record(cpu_ops, comm, 64))
    assert m.Model(models.lenet(), comm=comm).arena.group_bytes == 64
    assert m.Model(models.lenet(), comm=comm, group_bytes=0).arena.group_bytes == 0
    assert m.Model(models.lenet()).arena.group_bytes == 4 << 20


def test_one_rank_alone_is_refused(cpu_ops):
    with pytest.raises(ValueError, match="tune comm: ranks must be at least 2, got 1; start it with"):
        grouping.measure(cpu_ops, SOLO)


def test_on_gpus_products_and_passes_that_the_memory_bounds_take_turns_and_stand_apart():
    found = {}
    with dry_run(BUILT_IN["H200"]) as log:
        for kind, compute in grouping._kernels(get_ops("cuda")).items():
            compute()
            found[kind] = [launch.stem.split("_")[0] for launch in log.launches]
            log.launches.clear()
    assert found == {"both": ["conv2d", "activation"], "products": ["conv2d"], "memory": ["activation"]}


def test_where_nothing_was_kept_gpus_send_larger_messages_than_cpus(cpu_ops, monkeypatch):
    monkeypatch.setattr(grouping, "kept", lambda ops, comm: None)
    assert grouping.group_bytes(get_ops("cuda"), Twins()) == 25 << 20
    assert grouping.group_bytes(cpu_ops, Twins()) == 4 << 20
    assert grouping.group_bytes(get_ops("cuda"), SOLO) == 4 << 20


def test_layers_without_a_cost_are_cut_as_well(cpu_ops):
    class Plain(m.Layer):
        def output_shape(self, shape):
            return shape

    graph = m.Graph()
    x = m.Linear(8, 4, name="fc1")(graph.input((8,)))
    graph.output(m.Linear(4, 2, name="fc2")(Plain(name="plain")(x)))
    found = m.Model(graph, comm=Twins()).neighbours()
    assert [(layer.name, layer.flop > 0) for layer in found] == [("fc2", True), ("plain", False), ("fc1", True)]
    assert found[1].bytes == 2 * 4 * 4 * FEW, "every array once, forward and back"


@pytest.mark.mpi
def test_the_command_measures_and_keeps(tmp_path):
    program = "from minidl.profile import grouping as g; g.SAMPLES = 2; import sys; from minidl.cli import main; "
    done = job.run_program(["-c", program + "sys.exit(main(['tune', 'comm']))"], 2, tmp_path)
    assert done.status == 0, done.output
    assert "messages of " in done.output and "alpha-beta: " in done.output
    (path,) = (tmp_path / "cache" / "grouping").glob("*-shm.json")
    kept = json.loads(path.read_text())
    assert (
        kept["ranks"] == 2 and kept["engine"] == "shm" and kept["group_bytes"] in [g["bytes"] for g in kept["groups"]]
    )
    assert kept["latency_us"] >= 0 and kept["bus_gb_per_s"] > 0 and f"kept in {path}" in done.output.replace("\n", "")
