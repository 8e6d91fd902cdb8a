"""Keeping, moving or rebuilding: exact within its model, never worse than moving alone, found out from times."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.memory_policies import cheap, geeps, static, vdnn
from minidl import models
from minidl.cuda.device import BUILT_IN
from minidl.fusion import fuse_graph
from minidl.memory import Infeasible, Joint, Link, best, check, pin, problem, record
from minidl.memory.joint import KEEP, LARGEST_GROUP, OFFLOAD, PAIRED_GROUP, REBUILD
from minidl.memory.rebuild import recipes
from minidl.memory.times import CEILINGS, link_of, measured, modelled
from minidl.precision import precision
from tests.memory_cases import random_trace, real_trace

NETWORKS = [("resnet20", 32, 4), ("resnet50", 64, 2), ("vgg16_bn", 32, 2), ("unet", 32, 2), ("densenet121", 32, 2)]


def _times(trace) -> list[float]:
    return [1e-3 + (step.bytes + step.flop / 10) * 1e-9 for step in trace.steps]


def _cost(plan, price, times) -> float:
    rebuilt = sum(times[r] for d in plan.chosen("recompute") for r in d.recipe)
    return 2 * price * plan.moved_bytes + rebuilt


def _cheapest(joint: Joint, capacity: int, price: float, times) -> float:
    """Over all combinations of choices that stay within the limit."""
    gaps = joint.problem.gaps
    own: dict[int, tuple] = {}
    for run in joint.runs:
        own |= dict(zip(run, joint.usable(run), strict=True))
    ways = [[dict(zip(run, row, strict=True)) for row in joint._ways(run, joint.usable(run))] for run in joint.runs]
    ways += [[{i: KEEP}, {i: OFFLOAD}] for i in joint.apart]
    least = np.inf
    for parts in itertools.product(*ways):
        picked = {i: choice for part in parts for i, choice in part.items()}
        choices = [picked[i] for i in range(len(gaps))]
        cost = sum(
            2 * price * gap.bytes if c == OFFLOAD else own[i].ms if c == REBUILD else 0.0
            for i, (gap, c) in enumerate(zip(gaps, choices, strict=True))
        )
        if cost < least and _fits(joint, choices, own, capacity):
            least = cost
    return least


def _fits(joint: Joint, choices, own, capacity: int) -> bool:
    """The limit at every step of the whole training step, block by block only where tensors have to be back."""
    p = joint.problem
    usage = p.usage.copy()
    need_of: dict[int, int] = {}
    for run in joint.runs:
        picked = [choices[i] for i in run]
        needs = joint._needs(run, np.array([picked]), [own[i] for i in run])[0]
        for i, choice, need in zip(run, picked, needs, strict=True):
            gap = p.gaps[i]
            need_of[i] = int(need)
            if choice == OFFLOAD:
                usage[gap.start : joint._fetch(i, need, joint.begin[run[0]])] -= gap.bytes
            elif choice == REBUILD:
                usage[gap.start : min(need, gap.stop + 1)] -= gap.bytes
                usage[need] += own[i].beside
    for i, need in need_of.items():
        for s in own[i].sources if choices[i] == REBUILD else ():
            inside = joint.block.get(s) == joint.block[i]  # whose needs have been moved for it
            if not (inside or choices[s] == KEEP or need >= p.gaps[s].back):
                return False
    return bool((usage <= capacity).all())


@pytest.mark.parametrize("largest", [LARGEST_GROUP, PAIRED_GROUP])
def test_the_joint_plan_is_the_cheapest_combination(largest, rng):
    mixed, linked = 0, 0
    for _ in range(120):
        trace = random_trace(rng, int(rng.integers(3, 9)), jitter=2)
        p = problem(trace, (int(rng.integers(0, 2)), int(rng.integers(0, 2))), least=0)
        times = rng.uniform(0.1, 3, len(trace)).tolist()
        joint = Joint(p, times, granule=1, largest=largest)
        linked += len(joint.bits)
        for price in (0.01, 0.1):
            limit = int(rng.integers(p.floor, p.peak + 1))
            plan = joint.solve(limit, price)
            check(trace, plan)
            assert _cost(plan, price, times) == pytest.approx(_cheapest(joint, limit, price, times))
            mixed += bool(plan.chosen("recompute")) and bool(plan.chosen("offload"))
    assert mixed > 5 and linked > 5


@pytest.mark.parametrize(("name", "image", "batch"), NETWORKS)
def test_the_joint_plan_never_costs_more_than_moving_alone(name, image, batch):
    trace = real_trace(name, image, batch)
    p, times = problem(trace, least=4096), _times(trace)
    joint = Joint(p, times)
    for share in (0.0, 0.3, 0.7):
        limit = int(p.floor + share * (p.peak - p.floor))
        moved = pin(p, limit)
        for price in (1e-9, 1e-8, 1e-7):
            plan = joint.solve(limit, price)
            assert check(trace, plan).peak <= limit
            assert _cost(plan, price, times) <= 2 * price * moved.moved_bytes * (1 + 1e-9)
        assert joint.solve(limit, 0.0).rebuilt_bytes == 0, "moving is free"


def test_a_recipe_makes_its_tensor_from_saved_ones():
    trace = real_trace("resnet50")
    p = problem(trace, least=4096)
    found = recipes(p, [1.0] * len(trace))
    at = {trace.tensors[gap.tensor].name: (gap, r) for gap, r in zip(p.gaps, found, strict=True)}
    names = lambda r: [trace.steps[s].title for s in r.steps]  # noqa: E731
    sources = lambda r: {trace.tensors[p.gaps[s].tensor].name for s in r.sources}  # noqa: E731
    relu = at["layer1.1.relu1:y"][1]
    assert names(relu) == ["layer1.1.bn1 forward", "layer1.1.relu1 forward"] and relu.elementwise
    assert sources(relu) == {"layer1.1.conv1:y"} and relu.ms == 2
    conv = at["layer1.1.conv2:y"][1]
    assert names(conv) == ["layer1.1.conv2 forward"] and not conv.elementwise
    assert sources(conv) == {"layer1.1.relu1:y"}
    out = at["layer1.1.relu_out:y"][1]
    assert names(out)[-1] == "layer1.1.relu_out forward"
    assert sources(out) == {"layer1.1.conv3:y", "layer1.0.relu_out:y"}
    assert "input:x" not in at, "the batch is the caller's"


@pytest.mark.parametrize(("name", "image", "batch"), NETWORKS)
def test_pairs_of_blocks_meet_any_limit_that_can_be_met(name, image, batch):
    trace = real_trace(name, image, batch)
    p = problem(trace, least=4096)
    paired = Joint(p, _times(trace), largest=PAIRED_GROUP)
    for share in (0.0, 0.1, 0.5, 1.0):
        plan = paired.solve(int(p.floor + share * (p.peak - p.floor)), 1e-7)
        assert check(trace, plan).peak <= plan.capacity


def test_pairs_of_blocks_make_block_outputs_again():
    """Of two residual blocks the output of one need not travel, also where that of the other is made again or moved."""
    trace = real_trace("resnet152", 64, 8)
    p, times = problem(trace, least=1 << 15), _times(trace)
    limit = int(p.floor + 0.1 * (p.peak - p.floor))
    alone, paired = (Joint(p, times, largest=size).solve(limit, 1e-6) for size in (LARGEST_GROUP, PAIRED_GROUP))
    assert paired.moved_bytes < 0.5 * alone.moved_bytes

    def outputs(plan):
        return {trace.tensors[d.tensor].name for d in plan.chosen("recompute")} & {
            f"layer3.{k}.relu_out:y" for k in range(36)
        }

    assert len(outputs(paired)) > 10


def test_tensors_are_made_again_from_those_that_other_blocks_keep():
    """A join from the join before, which stays; and what is made of something that is back before it is needed."""
    graph = models.build("resnet50", (64, 64, 3), 10)
    fuse_graph(graph, "gradients", precision("bf16"), BUILT_IN["H200"])
    trace = record(graph, 8, precision="bf16")
    p, times = problem(trace, least=1 << 15), _times(trace)
    joint = Joint(p, times)
    plan = joint.solve(p.floor + (p.peak - p.floor) // 3, 1e-6)
    check(trace, plan)
    choice = {d.tensor: d.choice for d in plan.decisions}
    kept, back = 0, 0
    for i, gap in enumerate(p.gaps):
        if choice[gap.tensor] == "recompute":
            for s in (s for s in joint.recipes[i].sources if joint.block[s] != joint.block[i]):
                kept += choice[p.gaps[s].tensor] == "keep"
                back += p.gaps[s].back <= gap.back
    assert kept > 5 and back > 1 and plan.moved_bytes < 0.1 * plan.rebuilt_bytes


def test_slow_links_rebuild_and_fast_ones_move():
    """The planner finds out from times and rates which way is cheaper."""
    trace = real_trace("resnet50")
    p, times = problem(trace, least=4096), _times(trace)
    limit = p.floor + (p.peak - p.floor) // 3
    slow, _ = best(p, limit, times, Link(0.01, 0.01, 0))
    fast, run = best(p, limit, times, Link(1e6, 1e6, 0))
    assert slow.rebuilt_bytes > 10 * slow.moved_bytes and fast.rebuilt_bytes == 0
    assert run.total_ms == pytest.approx(run.compute_ms, rel=1e-3)


def test_the_best_plan_is_no_slower_than_any_it_tried():
    trace = real_trace("resnet50")
    p, times, link = problem(trace, least=4096), _times(trace), Link(5, 5, 0)
    for share in (0.1, 0.5):
        limit = int(p.floor + share * (p.peak - p.floor))
        plan, run = best(p, limit, times, link)
        _, moved = best(p, limit, times, link, rebuild=False)
        check(trace, plan)
        # The bound adds up the same times in another order.
        assert run.bound_ms * (1 - 2.0**-48) <= run.total_ms <= moved.total_ms


# -- other policies ---------------------------------------------------------------------------------------------------


def _static_by_force(p, capacity: int, beta: int) -> int | None:
    """Most bytes pinned over all subsets, from the definition of level 0."""
    trace, gaps = p.trace, p.gaps
    assert len(gaps) <= 12
    index = {gap.tensor: i for i, gap in enumerate(gaps)}
    other = np.array([step.workspace for step in trace.steps], np.int64)
    touched = np.zeros((len(gaps), len(trace)), np.int64)
    for i, tensor in enumerate(trace.tensors):
        for t in range(len(trace)):
            if i in index:
                touched[index[i], t] = tensor.bytes if t in tensor.touches else 0
            elif tensor.resident or tensor.touches[0] <= t <= tensor.touches[-1]:
                other[t] += tensor.bytes
    pinned = (np.arange(1 << len(gaps))[:, None] >> np.arange(len(gaps))) & 1
    sizes = pinned @ np.array([gap.bytes for gap in gaps], np.int64)
    need = sizes + (other + beta * ((1 - pinned) @ touched)).max(axis=1)
    fits = need <= capacity
    return int(sizes[fits].max()) if fits.any() else None


@pytest.mark.parametrize("beta", [1, 2])
def test_static_pinning_is_the_best_and_the_greedy_no_better(beta, rng):
    feasible = compared = 0
    for _ in range(800):
        p = problem(random_trace(rng, int(rng.integers(2, 9)), jitter=2), least=0)
        limit = int(rng.integers(p.floor, 2 * p.peak + 1))
        most = _static_by_force(p, limit, beta) if p.gaps else 0
        if most is None:
            for policy in (static, geeps):
                with pytest.raises(Infeasible, match="buffer"):
                    policy(p, limit, beta)
            continue
        feasible += 1
        assert static(p, limit, beta).kept_bytes == most
        try:
            assert geeps(p, limit, beta).kept_bytes <= most
            compared += 1
        except Infeasible:
            pass  # the greedy wants its buffer before it has pinned anything
    assert feasible > 300 and compared > 150


@pytest.mark.parametrize(("name", "image", "batch"), NETWORKS)
def test_no_policy_keeps_more_than_the_programme(name, image, batch):
    trace = real_trace(name, image, batch)
    p = problem(trace, least=4096)
    joint = Joint(p, _times(trace))
    for share in (0.2, 0.6, 0.95):
        limit = int(p.floor + share * (p.peak - p.floor))
        kept = pin(p, limit).kept_bytes
        for policy in (static, geeps, vdnn, lambda p, c: vdnn(p, c, "conv"), lambda p, c: cheap(p, c, joint)):
            try:
                plan = policy(p, limit)
            except Infeasible:
                continue
            if plan.peak <= limit:
                check(trace, plan)
                assert plan.rebuilt_bytes or plan.kept_bytes <= kept


def test_vdnn_moves_what_convolutions_read():
    trace = real_trace("vgg16_bn", 32, 2)
    p = problem(trace, least=64)
    moved = {trace.tensors[d.tensor].name for d in vdnn(p, 1 << 40, "conv").chosen("offload")}
    assert "features.0:y" not in moved and "features.2:y" in moved  # read by batch norm; by the next convolution
    assert vdnn(p, 1 << 40).kept_bytes == 0
    cheap_plan = cheap(p, 1 << 40, Joint(p, _times(trace)))
    assert cheap_plan.moved_bytes == 0 and cheap_plan.rebuilt_bytes > 0


# -- times ------------------------------------------------------------------------------------------------------------


def test_modelled_times_are_the_roofline_and_a_launch():
    trace = real_trace("resnet50")
    times = modelled(trace, CEILINGS["H200"], share=0.5)
    conv = next(t for t, s in enumerate(trace.steps) if s.title == "layer1.0.conv1 forward")
    step = trace.steps[conv]
    least = max(step.flop / 50.9e9, step.traffic / 4264e6)
    assert times[conv] == pytest.approx(2 * least + 0.0015)
    relu = next(t for t, s in enumerate(trace.steps) if s.title == "layer1.0.relu1 forward")
    assert trace.steps[relu].traffic == trace.steps[relu].bytes, "reads and writes"
    assert times[relu] == pytest.approx(2 * trace.steps[relu].bytes / 4264e6 + 0.0015)
    assert link_of(CEILINGS["H200"]).out_gb_per_s == pytest.approx(50.7)
    with pytest.raises(ValueError, match="share must be a number in"):
        modelled(trace, CEILINGS["H200"], share=1.5)
    with pytest.raises(ValueError, match="device_to_host_gb_per_s"):
        link_of({"copy_gb_per_s": 1.0})


def test_measured_times_come_from_result_rows_scaled_to_the_batch():
    trace = real_trace("resnet20", 32, 4)
    keys = {(step.name, step.pass_name) for step in trace.steps}
    rows = [
        {"arm": "minidl", "layer": n, "pass": p, "ms": 2.0, "timings": {"graph_step": {"ms": 1.0}}} for n, p in keys
    ]
    content = {"setup": {"model": "resnet20", "precision": "fp32", "batch": 2}, "rows": rows}
    times = measured(trace, content)
    updates = sum(step.name == "optimizer" for step in trace.steps)
    assert (
        times[0] == 2.0 and sum(times) == pytest.approx(2.0 * len(keys)) and times[-1] == pytest.approx(2.0 / updates)
    )
    idle = {(s.name, s.pass_name) for s in trace.steps if s.bytes == 0}
    assert ("layer1.0.add", "backward_data") in idle, "both gradients are the one that came"
    working = [row for row in rows if (row["layer"], row["pass"]) not in idle]
    assert sum(measured(trace, {**content, "rows": working})) == pytest.approx(2.0 * len(working))
    with pytest.raises(ValueError, match="none for"):
        measured(trace, {**content, "rows": working[1:]})
    with pytest.raises(ValueError, match="times: model must be 'resnet20'"):
        measured(trace, {**content, "setup": {"model": "vgg16"}})
