"""Limits from the smallest on: what is told is enough, nothing that has a plan is refused, more memory is no slower."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.cuda.launch import dry_run
from minidl.fusion import PLANS, fuse
from minidl.memory import Infeasible, limit_memory, problem, validate
from minidl.memory.gaps import NO_WINDOW, WINDOW
from minidl.memory.planner import Planner, StepPlanner
from minidl.memory.record import blank, record
from minidl.memory.simulate import Link
from minidl.memory.times import CEILINGS, link_of, modelled
from minidl.step import EagerStep
from tests.memory_cases import small_graph
from tests.memory_engine import DryEngine

OPTIONS = {"engine": DryEngine, "least": 2048}


def _model(name: str, image: int, fusion: str = "none", **options) -> m.Model:
    model = m.Model(blank(small_graph(name, image)), device="cuda", precision="bf16", **options)
    fuse(model, fusion)
    return model


def _smallest(model, batch: int, **options) -> int:
    with pytest.raises(Infeasible) as told:
        limit_memory(model, batch, 1000, **OPTIONS | options)
    return told.value.needed


@pytest.mark.parametrize("fusion", ["none", "bnff"])
@pytest.mark.parametrize(("name", "image", "batch"), [("resnet20", 32, 16), ("dense", 16, 16), ("unet", 32, 4)])
def test_the_smallest_limit_that_is_told_is_enough_and_so_is_any_above(name, image, batch, fusion):
    """Whatever was tried on the way; and it is close to what no plan can do without."""
    with dry_run():
        model = _model(name, image, fusion)
        needed = _smallest(model, batch)
        for part in (1, 1.001, 1.01, 1.05):
            memory = limit_memory(model, batch, int(needed * part), **OPTIONS)
            assert memory.script.held <= memory.limit
            validate(memory.script.trace, memory.script.plan, memory.script.operations)
        floor = problem(memory.script.trace, NO_WINDOW, 2048).floor
        assert floor <= needed <= 1.05 * floor
        with pytest.raises(Infeasible) as told:
            limit_memory(model, batch, needed - 1, **OPTIONS)
        assert told.value.needed == needed


def test_what_is_reserved_counts_in_the_smallest_limit():
    with dry_run():
        model, reserve = _model("resnet20", 32), 3 << 20
        needed = _smallest(model, 16, reserve=reserve)
        assert needed == _smallest(model, 16) + reserve
        memory = limit_memory(model, 16, needed, reserve=reserve, **OPTIONS)
        assert memory.script.held <= needed - reserve
        with pytest.raises(Infeasible, match="reserved for others: 3.0 MiB"):
            limit_memory(model, 16, needed - 1, reserve=reserve, **OPTIONS)


@pytest.mark.parametrize(("name", "image", "batch"), [("unet", 64, 4), ("densenet121", 64, 8), ("resnet20", 32, 32)])
def test_windows_are_taken_where_they_make_a_step_faster(name, image, batch):
    """Memory that a copy may take longer is memory that another tensor does not stay in."""
    trace = record(blank(small_graph(name, image)), batch, precision="bf16")
    times, link = modelled(trace, CEILINGS["H200"]), link_of(CEILINGS["H200"])
    wide, tight = problem(trace, WINDOW, 4096), problem(trace, NO_WINDOW, 4096)
    for limit in (wide.floor, int(1.05 * wide.floor), (wide.floor + wide.peak) // 2):
        plan, run = StepPlanner(trace, times, link, least=4096).best(limit)
        assert plan.peak <= limit
        assert run.total_ms <= min(Planner(p, times, link).best(limit)[1].total_ms for p in (wide, tight))


def test_where_the_host_is_small_more_is_made_again():
    """The fastest plan moves more than the host has room for; another one does not."""
    with dry_run():
        model, link = _model("resnet20", 32), Link(1e4, 1e4, 0)
        free = limit_memory(model, 16, "50%", link=link, **OPTIONS)
        assert free.script.host_bytes
        room = free.script.host_bytes // 2
        memory = limit_memory(model, 16, "50%", link=link, host_limit=room, **OPTIONS)
        assert memory.script.host_bytes <= memory.store.engine.host_bytes <= room
        assert memory.script.plan.rebuilt_bytes > free.script.plan.rebuilt_bytes
        with pytest.raises(Infeasible, match=r"host memory must be at least .*, got '1.0 KiB'"):
            limit_memory(model, 16, "50%", link=link, host_limit=1024, rebuild=False, **OPTIONS)


@pytest.mark.parametrize("frozen", [("conv1.*",), ("conv1.*", "bn1.*"), ("layer1.*",)])
@pytest.mark.parametrize("fusion", PLANS)
def test_networks_that_are_frozen_in_part_have_plans(frozen, fusion):
    """The first batch norm that learns keeps a count that nobody reads; its output is made again without."""
    with dry_run():
        model = _model("resnet20", 32, fusion, frozen=frozen)
        optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
        smallest = _smallest(model, 16)
        for limit in (smallest, (2 * smallest + limit_memory(model, 16, 1.0, **OPTIONS).need) // 3):
            memory = limit_memory(model, 16, limit, **OPTIONS)
            for samples in (16, 5, 16):
                _step(model, optimizer, loss, samples)
        assert memory.script.rebuilds


def _step(model, optimizer, loss, samples: int, accumulate: int = 1) -> None:
    x = model.ops.zeros((samples, *model.graph.nodes[0].shape), model.precision.storage)
    labels = model.ops.zeros((samples,), np.dtype(np.int32))
    EagerStep(model, optimizer, loss, accumulate=accumulate)(x, labels)


def test_a_smaller_batch_may_move_whatever_the_largest_may():
    """Also what has become smaller than what is worth it."""
    with dry_run():
        model = m.Model(blank(models.build("resnet20", (32, 32, 3), 10)), device="cuda", precision="bf16")
        least = 16 * 32 * 32 * 16 * 2  # the first stage of 16 samples
        needed = _smallest(model, 16, least=least, rebuild=False)
        memory = limit_memory(model, 16, needed, **OPTIONS | {"least": least, "rebuild": False})
        for samples in range(1, 16):
            with memory.step(samples):
                pass


@pytest.mark.parametrize("samples", [6, 10, 11, 5, 1])
def test_micro_batches_of_any_size_run_as_planned(samples):
    """The second one's labels begin amid 16 bytes: kernels would copy what the plan has no room for."""
    with dry_run():
        model = _model("resnet20", 32)
        optimizer, loss = m.SGD(model, 0.1, 0.9), m.SoftmaxCrossEntropy()
        limit_memory(model, 8, "60%", **OPTIONS)
        for _ in range(2):
            _step(model, optimizer, loss, samples, accumulate=2)
