"""Pinning is optimal for its model: brute force on small steps, a MILP on real networks, and what follows from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest

from minidl.memory import Infeasible, Step, Tensor, Trace, check, pin, pinning, problem
from minidl.memory.gaps import blocks
from minidl.memory.pinning import LARGEST_BLOCK, MOST_UNITS, Options, choose, crossing, granule_of
from tests.memory_cases import random_trace, real_trace
from tests.reference.pinning import brute_force, milp, model

NETWORKS = [("resnet20", 32, 4), ("resnet50", 64, 2), ("vgg16_bn", 32, 2), ("unet", 32, 2), ("densenet121", 32, 2)]


def _limits(floor: int, peak: int, count: int) -> list[int]:
    return sorted({floor + (peak - floor) * i // count for i in range(count + 1)})


@pytest.mark.parametrize("kind", ["chain", "residual", "tied", "state"])
def test_the_plan_moves_as_few_bytes_as_any_subset(kind, rng):
    seen = 0
    for _ in range(120):
        state, layers = kind == "state", int(rng.integers(1, 7 if kind == "state" else 11))
        trace = random_trace(rng, layers, jitter=0 if kind == "chain" else 3, tied=kind == "tied", state=state)
        window = int(rng.integers(0, 2)), int(rng.integers(0, 2))
        p = problem(trace, window, least=0, state=state)
        for limit in _limits(p.floor, p.peak, 3):
            plan = pin(p, limit)
            assert check(trace, plan).peak <= limit
            assert plan.proven and plan.moved_bytes == brute_force(trace, limit, window, state)
            seen += 0 < plan.moved_bytes < sum(gap.bytes for gap in p.gaps)
    assert seen > 50, "the instances were trivial"


def _with_skips(rng) -> Trace:
    """A chain two of whose early tensors are read once more far down, as the skips of a U-Net are."""
    trace = random_trace(rng, 12)
    tensors = list(trace.tensors)
    for at in rng.choice([i for i, t in enumerate(tensors) if t.saved][:6], 2, replace=False):
        touches = {*tensors[at].touches, trace.loss - 2}
        tensors[at] = dataclasses.replace(tensors[at], touches=tuple(sorted(touches)), bytes=5)
    return dataclasses.replace(trace, tensors=tuple(tensors))


@pytest.mark.parametrize("most", [6, 0])
def test_gaps_that_tie_blocks_together_are_decided_apart(most, rng, monkeypatch):
    """Exactly while they are few; by force (feasible, not proven, never better than the best) where they are many."""
    monkeypatch.setattr(pinning, "LARGEST_BLOCK", 3)
    monkeypatch.setattr(pinning, "MOST_CROSSING", most)
    crossed = 0
    for _ in range(30):
        trace = _with_skips(rng)
        p = problem(trace, least=0)
        crossing = bool(pinning.crossing(p.gaps))
        crossed += crossing
        for limit in _limits(p.floor, p.peak, 3):
            plan, least = pin(p, limit), brute_force(trace, limit)
            check(trace, plan)
            assert plan.proven == (most > 0 or not crossing)
            assert plan.moved_bytes == least if plan.proven else plan.moved_bytes >= least
    assert crossed > 15


@pytest.mark.parametrize("linked", [False, True])
def test_choosing_options_is_exact_also_among_those_that_are_left(linked, rng):
    """The recurrence alone, on tables of any numbers: equal to all combinations, pruned or not."""
    for _ in range(150):
        tables, awaited = [], []
        count = int(rng.integers(1, 5))
        given = int(rng.integers(0, 2)) if linked else 0  # bit 0; bit k + 1 is block k's
        for k in range(count):
            n = int(rng.integers(2, 7))
            needs = linked * (rng.integers(0, 2 << k, n) & rng.integers(0, 2 << k, n))
            bits = {"needs": needs, "gives": linked * rng.integers(0, 2, n) << (k + 1)}
            bits["needs"][0] = 0
            tables.append(
                Options(rng.integers(0, 6, n), rng.integers(-1, 12, n), rng.integers(0, 50, n), np.arange(n), **bits)
            )
            tables[k].most[0], tables[k].kappa[0] = 99, 0  # something always fits
        if linked:
            behind = [int(np.bitwise_or.reduce(t.needs)) for t in tables]
            awaited = [int(np.bitwise_or.reduce([0, *behind[k + 1 :]])) for k in range(count)]
        least = np.inf
        for picked in itertools.product(*(range(len(t.kappa)) for t in tables)):
            inside, cost, fits, kept = 0, 0, True, given
            for table, i in zip(tables, picked, strict=True):
                fits &= inside <= table.most[i]
                inside, cost = inside + table.kappa[i], cost + table.cost[i]
                if linked:
                    fits &= not table.needs[i] & ~kept
                    kept |= int(table.gives[i])
            least = min(least, cost) if fits else least
        for some in (tables, [table.pruned() for table in tables]):
            cost, codes = choose(some, 40, given, awaited)
            assert cost == least and len(codes) == count


def test_a_granule_bounds_what_rounding_costs(rng):
    """cost(C, g) <= optimum(C - n g) with n candidates; and never over the limit."""
    compared = 0
    for _ in range(80):
        trace = random_trace(rng, int(rng.integers(2, 10)), jitter=2)
        p = problem(trace, least=0)
        limit, granule = int(rng.integers(p.floor, p.peak + 1)), int(rng.integers(2, 6))
        plan = pin(p, limit, granule)
        check(trace, plan)
        less = limit - granule * len(p.gaps)
        if less >= p.floor:
            assert plan.moved_bytes <= brute_force(trace, less)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("granule", [None, 3])
def test_more_memory_never_moves_more(granule, rng):
    for _ in range(12):
        p = problem(random_trace(rng, 9, jitter=2), least=0)
        moved = [pin(p, limit, granule).moved_bytes for limit in _limits(p.floor, p.peak, 16)]
        assert moved == sorted(moved, reverse=True)
        assert granule or moved[-1] == 0


@pytest.mark.parametrize(("name", "image", "batch"), NETWORKS)
def test_no_milp_finds_better_on_real_networks(name, image, batch):
    pytest.importorskip("scipy")
    trace = real_trace(name, image, batch)
    p = problem(trace, least=4096)
    proven, (*limits, last, _) = 0, _limits(p.floor, p.peak, 3)
    for limit in (*limits, last):
        plan = pin(p, limit)
        check(trace, plan)
        patience = 30 if limit == last and not proven else 2  # for a busy machine
        moved, bound, exact = milp(trace, limit, model(trace, least=4096), seconds=patience)
        assert plan.proven and bound <= plan.moved_bytes and (moved is None or plan.moved_bytes <= moved)
        assert not exact or plan.moved_bytes == moved
        proven += exact
    assert proven, "the MILP proved nothing, so this law saw nothing"


@pytest.mark.parametrize(("name", "image", "batch"), NETWORKS)
def test_candidates_and_base_load_are_those_of_the_definition(name, image, batch):
    trace = real_trace(name, image, batch)
    p, m = problem(trace, least=4096), model(trace, least=4096)
    assert [gap.tensor for gap in p.gaps] == m.tensors
    assert (p.usage == m.full).all()
    assert (p.base == m.full - m.sizes @ m.absent).all()


def test_blocks_are_nested(rng):
    for _ in range(50):
        gaps = problem(random_trace(rng, 15, jitter=3, tied=True), least=0).gaps
        runs = blocks(gaps)
        assert sorted(i for run in runs for i in run) == list(range(len(gaps)))
        for outer, inner in zip(runs, runs[1:], strict=False):
            assert max(gaps[i].start for i in outer) <= min(gaps[i].start for i in inner)
            assert min(gaps[i].stop for i in outer) >= max(gaps[i].stop for i in inner)


def test_residual_networks_have_small_blocks():
    sizes = {len(run) for run in blocks(problem(real_trace("resnet50"), least=1 << 15).gaps)}
    assert 1 < max(sizes) <= 6
    unet = problem(real_trace("unet", 32), least=64)
    assert max(len(run) for run in blocks(unet.gaps)) > LARGEST_BLOCK
    names = [unet.trace.tensors[unet.gaps[i].tensor].name for i in crossing(unet.gaps)]
    assert len(names) <= 4 and all(name.startswith(("inc.", "down")) and ".5:y" in name for name in names), names


def test_equal_bytes_are_taken_from_those_absent_longest():
    sizes = [10] * 6
    tensors = [Tensor(f"t{k}", "activation", s, (k, 14 - k), saved=True) for k, s in enumerate(sizes)]
    trace = Trace(tuple(Step(f"s{t}", "forward") for t in range(15)), tuple(tensors), 7)
    p = problem(trace, (0, 0), least=0)
    for kept in range(1, 7):
        plan = pin(p, 10 * kept)
        assert [d.tensor for d in plan.chosen("offload")] == list(range(6 - kept))


def test_tensors_without_bytes_and_small_ones_stay():
    tensors = (
        Tensor("nothing", "activation", 0, (0, 8), saved=True),
        Tensor("small", "activation", 9, (1, 7), saved=True),
        Tensor("large", "activation", 10, (1, 7), saved=True),
        Tensor("unsaved", "activation", 50, (1, 7)),
        Tensor("short", "activation", 50, (3, 5), saved=True),
    )
    trace = Trace(tuple(Step(f"s{t}", "forward") for t in range(9)), tensors, 4)
    assert [trace.tensors[gap.tensor].name for gap in problem(trace, (1, 1), least=10).gaps] == ["large"]
    empty = dataclasses.replace(trace, tensors=tensors[:1])
    plan = pin(problem(empty, least=0), 0)
    assert plan.decisions == () and plan.peak == 0 and check(empty, plan).peak == 0


def test_a_tensor_that_several_layers_save_is_counted_and_moved_once():
    trace = real_trace("resnet20", 32, 4)
    by_name = {t.name: t for t in trace.tensors}
    shared = by_name["layer1.0.relu_out:y"]  # kept by the ReLU and by the next convolution, read by the join as well
    size = 4 * 32 * 32 * 16 * 4
    assert shared.bytes == size and len(shared.touches) == 5
    p = problem(trace, least=size)
    plan = pin(p, p.floor)
    assert sum(trace.tensors[d.tensor].name == shared.name for d in plan.decisions) == 1
    assert check(trace, plan).moved_out == plan.moved_bytes


def test_parameters_and_momentum_may_travel_too():
    """VGG's first dense layer holds most of its parameters; momentum is idle until the update."""
    trace = real_trace("vgg16", 32, 2)
    fixed, free = problem(trace, least=1 << 20), problem(trace, least=1 << 20, state=True)
    assert free.floor < fixed.floor and free.peak == fixed.peak
    plan = pin(free, fixed.floor - 1)
    check(trace, plan)
    moved = {trace.tensors[d.tensor].name for d in plan.chosen("offload")}
    assert any(name.endswith(":momentum") for name in moved)
    by_name = {trace.tensors[g.tensor].name: g for g in free.gaps}
    weight, momentum = by_name["classifier.0.weight:weight"], by_name["classifier.0:momentum"]
    assert trace.steps[weight.leave].title == "classifier.0 forward"
    assert trace.steps[weight.back].title == "classifier.0 backward_data"
    assert momentum.leave == -1 and trace.steps[momentum.back].pass_name == "update"


def test_a_limit_too_small_names_the_step_its_tensors_and_what_is_enough():
    trace = real_trace("resnet20", 32, 4)
    p = problem(trace, least=4096)
    with pytest.raises(Infeasible, match="the smallest feasible limit is") as told:
        pin(p, p.floor - 1)
    error = told.value
    step = trace.steps[error.step]
    largest = max((t for t in trace.tensors if error.step in t.touches and not t.resident), key=lambda t: t.bytes)
    assert step.title in str(error) and largest.name in str(error) and str(p.floor) in str(error)
    assert error.needed == p.floor
    assert check(trace, pin(p, error.needed)).peak <= error.needed
    for limit in ("1GB", None, float("inf")):
        with pytest.raises(ValueError, match="memory: capacity must be a number of bytes, got"):
            pin(p, limit)


def test_enough_memory_gives_an_empty_plan():
    p = problem(real_trace("resnet50"), least=4096)
    plan = pin(p, p.peak)
    assert plan.moved_bytes == 0 and not plan.chosen("offload") and plan.peak == p.peak


def test_the_granule_depends_on_sizes_only():
    assert granule_of([]) == 1 and granule_of([0, 0]) == 1
    assert granule_of([12, 18, 30]) == 6
    odd = [(1 << 28) + 2 * k + 1 for k in range(50)]
    granule = granule_of(odd)
    assert sum(odd) // granule <= MOST_UNITS and granule % (256 << 10) == 0
    with pytest.raises(ValueError, match="granule must be an integer of at least 1, got 0"):
        pin(problem(real_trace("resnet20", 32, 4), least=4096), 1 << 40, 0)


def test_a_thousand_layers_are_planned_in_seconds():
    rng = np.random.default_rng(7)
    trace = random_trace(rng, 1000, jitter=3)
    tensors = [dataclasses.replace(t, bytes=int(rng.integers(1, 1 << 26))) if t.saved else t for t in trace.tensors]
    p = problem(dataclasses.replace(trace, tensors=tuple(tensors)), least=0)
    assert math.gcd(*(gap.bytes for gap in p.gaps)) == 1  # nothing to divide by: the general case
    start = time.perf_counter()
    plan = pin(p, p.floor + (p.peak - p.floor) // 3, most_units=65536)
    took = time.perf_counter() - start
    check(p.trace, plan)
    assert took < 20, "goal: 2 s on a core of its own; benchmarks/bench_pinning.py measures it"
