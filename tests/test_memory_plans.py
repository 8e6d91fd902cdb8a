"""What looks at memory plans trusts nobody: over-budget plans, wrong claims and missing waits are found."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from minidl.memory import (
    Joint,
    Link,
    Operation,
    Plan,
    Race,
    Trace,
    Violation,
    best,
    check,
    pin,
    problem,
    program,
    timeline,
    validate,
    widen,
)
from tests.memory_cases import random_trace, real_trace, without

NETWORKS = [("resnet20", 32, 4), ("resnet50", 64, 2), ("unet", 32, 2)]


def _plans(rng, count: int = 25) -> list[tuple[Trace, Plan]]:
    found = []
    while len(found) < count:
        state = bool(rng.integers(0, 2))
        trace = random_trace(rng, int(rng.integers(4, 12)), jitter=3, tied=True, state=state)
        p = problem(trace, (int(rng.integers(0, 2)), int(rng.integers(0, 2))), least=0, state=state)
        plan = pin(p, int(rng.integers(p.floor, p.peak + 1)))
        if plan.moved_bytes:
            found += [(trace, plan), (trace, widen(trace, plan))]
    return found


@functools.cache
def _joint(name: str, image: int, batch: int, share: float = 0.3) -> tuple[Trace, Plan]:
    """A plan that both moves and rebuilds, at a price between the extremes."""
    trace = real_trace(name, image, batch)
    p = problem(trace, least=4096)
    joint = Joint(p, [1e-3 + (step.bytes + step.flop / 10) * 1e-9 for step in trace.steps])
    for price in np.geomspace(1e-10, 1e-7, 24):
        plan = joint.solve(int(p.floor + share * (p.peak - p.floor)), price)
        if len(plan.chosen("offload")) > 3 and len(plan.chosen("recompute")) > 3:
            return trace, widen(trace, plan)
    raise AssertionError("no price makes a mixed plan")


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_plan_over_its_limit_is_refused_at_its_fullest_step(rng):
    for trace, plan in _plans(rng):
        assert check(trace, plan).peak == plan.peak <= plan.capacity
        tight = dataclasses.replace(plan, capacity=plan.peak - 1)
        with pytest.raises(Violation, match="over the limit of .* by 1 bytes") as told:
            check(trace, tight)
        assert check(trace, plan).device[told.value.step] == plan.peak


def test_keeping_one_more_tensor_than_fits_is_refused(rng):
    """A planted plan: the best one, with the largest moved tensor kept after all."""
    planted = 0
    for trace, plan in _plans(rng):
        largest = max(plan.chosen("offload"), key=lambda d: trace.tensors[d.tensor].bytes)
        size = trace.tensors[largest.tensor].bytes
        decisions = [dataclasses.replace(d, choice="keep") if d is largest else d for d in plan.decisions]
        device = check(trace, plan).device
        if max(device[largest.gone : largest.fetch]) + size > plan.capacity:
            planted += 1
            with pytest.raises(Violation, match="over the limit"):
                check(trace, dataclasses.replace(plan, decisions=tuple(decisions)))
    assert planted > 10


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"moved_bytes": 1}, "plan says moved_bytes 1, walking it gives"),
        ({"kept_bytes": -1}, "plan says kept_bytes"),
        ({"peak": 0}, "plan says peak 0"),
        ({"trace": "another"}, "plan again"),
    ],
)
def test_claims_are_checked(change, told, rng):
    trace, plan = _plans(rng, 2)[0]
    with pytest.raises(Violation, match=told):
        check(trace, dataclasses.replace(plan, **change))


@pytest.mark.parametrize("field", ["leave", "gone", "fetch", "back"])
def test_a_decision_that_is_no_gap_is_refused(field, rng):
    for trace, plan in _plans(rng, 6):
        d = plan.chosen("offload")[0]
        for value in (-2, len(trace) + 1, d.back + 1 if field != "back" else d.leave):
            wrong = dataclasses.replace(d, **{field: value})
            decisions = tuple(wrong if other is d else other for other in plan.decisions)
            with pytest.raises(Violation):
                check(trace, dataclasses.replace(plan, decisions=decisions))


def test_a_touch_of_what_is_away_is_refused(rng):
    """The same plan on a step that reads a tensor once more, in its gap."""
    for trace, plan in _plans(rng, 10):
        d = plan.chosen("offload")[0]
        tensor = trace.tensors[d.tensor]
        tensors = list(trace.tensors)
        tensors[d.tensor] = dataclasses.replace(tensor, touches=tuple(sorted({*tensor.touches, d.gone})))
        other = dataclasses.replace(trace, tensors=tuple(tensors))
        with pytest.raises(Violation, match=tensor.name):
            check(other, dataclasses.replace(plan, trace=other.digest))


def test_rebuilding_from_what_is_away_is_refused():
    trace, plan = _joint("resnet50", 64, 2)
    made = plan.chosen("recompute")
    assert made
    refused = 0
    for d in made:
        sources = {i for r in d.recipe for i, t in enumerate(trace.tensors) if r in t.touches and t.first < r}
        for other in plan.chosen("offload"):
            if other.tensor in sources and other.back <= d.back:
                touched = [t for t in trace.tensors[other.tensor].touches if t > other.leave][0]
                late = dataclasses.replace(other, fetch=touched, back=touched)
                if touched > d.back:
                    decisions = tuple(late if x is other else x for x in plan.decisions)
                    with pytest.raises(Violation, match="is rebuilt from|away"):
                        check(trace, dataclasses.replace(plan, decisions=decisions))
                    refused += 1
    assert refused


def test_plans_and_traces_survive_json(rng):
    for trace, plan in [*_plans(rng, 4), _joint("resnet20", 32, 4)]:
        assert Trace.from_json(trace.to_json()) == trace
        assert Trace.from_json(trace.to_json()).digest == trace.digest
        assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="not a memory plan"):
        Plan.from_json(trace.to_json())
    with pytest.raises(ValueError, match="not a memory trace"):
        Trace.from_json(plan.to_json())


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_timeline_obeys_its_queues_and_its_bound(rng):
    for trace, plan in _plans(rng):
        times = rng.uniform(0.1, 2, len(trace)).tolist()
        link = Link(*(rng.uniform(1e-5, 1e-3, 2)), latency_ms=0.0)
        run = timeline(trace, plan, times, link)
        assert run.compute_ms == pytest.approx(sum(times))
        assert run.total_ms >= run.bound_ms * (1 - 1e-9) and run.exposed_ms >= -1e-9
        for queue in ("compute", "out", "in"):
            entries = [e for e in run.entries if e.queue == queue]
            assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in zip(entries, entries[1:], strict=False))
        moved = {trace.tensors[d.tensor].name: d for d in plan.chosen("offload")}
        at = {(e.queue, e.name): e for e in run.entries}
        step = [at["compute", s.title] for s in trace.steps]
        for name, d in moved.items():
            assert d.leave < 0 or step[d.leave].end_ms <= at["out", name].start_ms + 1e-9
            assert at["out", name].end_ms <= step[d.gone].start_ms + 1e-9
            assert at["out", name].end_ms <= at["in", name].start_ms + 1e-9
            assert step[d.fetch - 1].end_ms <= at["in", name].start_ms + 1e-9
            assert at["in", name].end_ms <= step[d.back].start_ms + 1e-9


def test_wider_windows_and_faster_links_never_cost_time(rng):
    faster = 0
    for trace, plan in _plans(rng, 30)[::2]:
        times = rng.uniform(0.1, 2, len(trace)).tolist()
        slow, quick = Link(1e-5, 1e-5, 0), Link(1e-4, 1e-4, 0)
        plain = timeline(trace, plan, times, slow).total_ms
        wide = timeline(trace, widen(trace, plan), times, slow).total_ms
        assert timeline(trace, plan, times, quick).total_ms <= plain + 1e-9
        faster += wide < plain - 1e-9
        assert check(trace, widen(trace, plan)).peak <= plan.capacity
    assert faster


def test_no_window_could_be_a_step_wider(rng):
    """A copy begins behind the start of its own absence, or behind a step that has no room for its tensor."""
    stopped = 0
    for trace, plan in _plans(rng, 30)[::2]:
        before = {d.tensor: d for d in plan.chosen("offload")}
        wide = widen(trace, plan)
        device = check(trace, wide).device
        for d in wide.chosen("offload"):
            size, old = trace.tensors[d.tensor].bytes, before[d.tensor]
            assert (d.leave, d.back) == (old.leave, old.back) and d.fetch <= old.fetch and d.gone >= old.gone
            if d.fetch > old.gone + 1:
                assert device[d.fetch - 1] + size > plan.capacity
                stopped += 1
            if d.gone < d.fetch - 1:
                assert device[d.gone] + size > plan.capacity
                stopped += 1
    assert stopped > 10


def test_nothing_moved_takes_no_longer():
    trace = real_trace("resnet20", 32, 4)
    p = problem(trace, least=4096)
    times = [1.0] * len(trace)
    plan, run = best(p, p.peak, times)
    assert not plan.moved_bytes and not plan.rebuilt_bytes
    assert run.total_ms == run.compute_ms == run.bound_ms == len(trace) and run.exposed_ms == 0


def test_times_must_be_one_for_each_step():
    trace = real_trace("resnet20", 32, 4)
    with pytest.raises(ValueError, match=f"times_ms must be {len(trace)} numbers"):
        timeline(trace, pin(problem(trace), 1 << 40), [1.0])
    with pytest.raises(ValueError, match="in_gb_per_s must be a number above 0"):
        Link(1, 0)


# -- order ------------------------------------------------------------------------------------------------------------


def test_every_deleted_wait_is_caught_on_random_steps(rng):
    waits = 0
    for trace, plan in _plans(rng, 40):
        operations = program(trace, plan)
        validate(trace, plan, operations)
        for k, operation in enumerate(operations):
            if operation.kind == "wait":
                waits += 1
                with pytest.raises(Race, match="may start before"):
                    validate(trace, plan, without(operations, k))
    assert waits > 200


@pytest.mark.parametrize(("name", "image", "batch"), NETWORKS)
def test_every_deleted_wait_is_caught_on_real_networks(name, image, batch):
    trace, joint = _joint(name, image, batch)
    p = problem(trace, least=4096)
    moved = widen(trace, pin(p, p.floor + (p.peak - p.floor) // 3))
    for plan in (joint, moved):
        operations = program(trace, plan)
        validate(trace, plan, operations)
        waits = [k for k, operation in enumerate(operations) if operation.kind == "wait"]
        assert waits
        for k in waits[:: max(len(waits) // 80, 1)]:
            with pytest.raises(Race, match="may start before"):
                validate(trace, plan, without(operations, k))


def test_work_that_is_missing_twice_or_out_of_order_is_caught(rng):
    for trace, plan in _plans(rng, 6):
        operations = program(trace, plan)
        for k, operation in enumerate(operations):
            if operation.kind != "wait":
                with pytest.raises(Race):
                    validate(trace, plan, without(operations, k))
        with pytest.raises(Race, match="twice"):
            validate(trace, plan, [*operations, Operation("compute", "step", 0)])
        with pytest.raises(Race, match="which is no work issued before it"):
            validate(trace, plan, [Operation("in", "wait", 5), *operations])
        steps = [k for k, o in enumerate(operations) if o.kind == "step"]
        swapped = list(operations)
        swapped[steps[0]], swapped[steps[1]] = swapped[steps[1]], swapped[steps[0]]
        with pytest.raises(Race):
            validate(trace, plan, swapped)
