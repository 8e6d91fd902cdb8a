"""Choosing a fusion plan by measuring: the pieces that are timed, the choice, and the plan that is kept."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import minidl as m
from minidl import fusion, models
from minidl.backend import get_ops
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.dist.simulated import AlphaBeta, SimulatedCommunicator, VirtualClock
from minidl.fusion import chain, cost
from minidl.fusion.clock import DeviceClock
from minidl.fusion.contest import Whole, can_run_alone, winner
from minidl.fusion.groups import groups
from minidl.fusion.map import between, measure_map, points
from minidl.fusion.measure import measure
from minidl.fusion.piece import Piece, cut
from minidl.fusion.plans import candidates, modes_of, modes_on, switches, way_of
from minidl.fusion.tune import tune
from minidl.layers.parallel_conv2d import ChannelParallelConv2d
from minidl.precision import precision
from minidl.profile.results import load
from minidl.profile.timing import Budget, Timing
from tests.test_fusion import BOUND, preactivation, residual, stack, wide

ROOT = Path(__file__).parents[1]
H200 = cost.Machine(4.2e9, cost.HOPPER)
BF16, FP32 = precision("bf16"), precision("fp32")


class Fake:
    """A clock whose times are random numbers of what is timed: equal work, equal time; it runs no whole network."""

    def __init__(self, seed=0):
        self.seed, self.asked = seed, []

    def whole(self, graph, batch, variants):
        return None

    def __call__(self, cut, which, variants):
        self.asked += [(cut.key, which, on) for on in variants]
        return [self._time(cut, which, on) for on in variants]

    def _time(self, cut, which, on):
        place = {member.layer.name: i for i, member in enumerate(cut.members)}
        words = [repr(cut.key), which, *sorted(f"{place[name]} {word}" for name, word in on)]
        ms = 1 + np.random.default_rng([self.seed, *"".join(words).encode()]).random()
        return Timing((ms, ms))


# -- the dynamic programme ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_elimination_equals_trying_everything(seed):
    """Chains, and graphs with cycles as residual blocks make them."""
    rng = np.random.default_rng(seed)
    options = {f"s{i}": [f"w{k}" for k in range(rng.integers(1, 4))] for i in range(rng.integers(1, 7))}
    names = list(options)
    scopes = [(name,) for name in names] + list(itertools.pairwise(names))
    scopes += [tuple(rng.choice(names, size=min(3, len(names)), replace=False)) for _ in range(seed % 3)]
    terms = [
        chain.Term(scope, {ways: rng.random() for ways in itertools.product(*(options[name] for name in scope))})
        for scope in scopes
    ]
    everything = [dict(zip(names, ways, strict=True)) for ways in itertools.product(*options.values())]
    least = min(chain.total(ways, terms) for ways in everything)
    assert chain.total(chain.best(options, terms), terms) == pytest.approx(least, rel=1e-12)


def test_of_equals_the_first_is_taken_and_lone_sites_are_chosen_alone():
    assert chain.best({"a": ["x", "y"], "b": ["x", "y"]}, [chain.Term(("b",), {("x",): 2.0, ("y",): 1.0})]) == {
        "a": "x",
        "b": "y",
    }
    assert chain.best({}, []) == {}


# -- pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [stack, residual, wide, preactivation])
def test_a_piece_computes_the_same_in_every_way(ops, build):
    assert_same_in_every_way(ops, build())


def assert_same_in_every_way(ops, graph):
    """In 16 bits against the same piece in float32: what is fused errs no more."""
    for group in groups(graph, 2, BF16, H200, everything=True):
        exact, narrow = (
            {ways: outcome(Piece(cut(graph, group.sites, 2), ops, mode, 0), group, ways) for ways in group.ways}
            for mode in (FP32, BF16)
        )
        plain = group.ways[0]
        for ways in group.ways[1:]:
            for a, b in zip(exact[plain], exact[ways], strict=True):
                assert np.abs(a - b).max() <= 4 * BOUND * np.abs(a).max(), (group.names, ways)
            errors = [distance(exact[plain], narrow[which]) for which in (plain, ways)]
            assert 0 < errors[1] <= 1.25 * errors[0], (group.names, ways)


def outcome(piece, group, ways):
    """What a piece gives outwards, forward and backward, as float64 arrays."""
    arrays = []
    for which in ("forward", "backward"):
        arrays += piece.calls(which, group.on(ways, "forward") | group.on(ways, "backward"))[0]()
    return [np.asarray(piece.ops.to_host(array), np.float64) for array in arrays]


def distance(exact, found):
    errors = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(exact, found, strict=True)]
    return np.sqrt(np.mean(np.square(errors)))


def test_a_piece_holds_what_the_modes_reach_and_belongs_to_nobody(cpu_ops):
    model = m.Model(residual())
    before = model.modes()
    sites = {site.name: site for site in fusion.find_sites(model.graph)}
    found = cut(model.graph, (sites["main1.bn"], sites["side1.bn"]), 3)
    names = [member.layer.name for member in found.members]
    assert names == ["main1.conv", "main1.bn", "side1.conv", "side1.bn", "add1", "relu1", "main2.conv"]
    assert found.operands == ((3, 6, 6, 8), (3, 6, 6, 8))
    # The gradients of the 3x3 convolution below are no mode's; those of the 1x1 one are.
    assert [member.back for member in found.members] == [False, True, True, True, True, True, True]
    assert [member.layer.name for member in found.members if member.outside] == ["relu1", "main2.conv"]
    piece = Piece(found, cpu_ops, FP32, 0)
    piece.calls("backward", switches(sites["main1.bn"], "elementwise"))[0]()
    assert model.modes() == before
    assert not any(
        layer.bound or layer is member.layer for layer, member in zip(piece.layers, found.members, strict=True)
    )
    assert not model.state_dict()["main1.bn.running_mean"].any()


class Watched(m.ReLU):
    """A layer of a kind that nobody knows."""


def watched():
    graph = stack()
    graph.replace("relu1", Watched(name="other"))
    return graph


def test_layers_that_may_talk_to_other_ranks_are_not_timed():
    graph = watched()
    sites = fusion.find_sites(graph)
    assert cut(graph, [sites[1]], 2) is None and cut(graph, [sites[2]], 2) is not None
    clock = Fake()
    plan = tune(graph, 2, FP32, H200, clock, everything=True)
    assert [record["timed"] for record in plan.evidence] == [True, False, True]
    assert plan.sites["bn1"] == "elementwise", "by the model"


def test_a_clock_times_every_candidate_of_a_network(cpu_ops):
    quick = Budget(samples=2, seconds=0.01, sample_ms=0.01)
    plan = tune(residual(), 2, FP32, cost.Machine.of(None), DeviceClock(cpu_ops, FP32, quick, quick), everything=True)
    rows = [row for record in plan.evidence for row in record["rows"]]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows) and len(rows) == 10


# -- candidates ---------------------------------------------------------------------------------------------------


def test_candidates_are_the_sets_of_modes_that_a_site_can_have():
    sites = {site.name: site for site in fusion.find_sites(preactivation())}
    assert candidates(sites["bn0"]) == ["none", "statistics"]
    assert candidates(sites["bn1"]) == [
        "none", "elementwise", "elementwise+gradients", "elementwise+prologue", "elementwise+gradients+prologue"
    ]  # fmt: skip
    assert candidates(sites["post0"]) == ["none", "elementwise", "statistics", "elementwise+statistics"]
    for site in sites.values():
        for way in candidates(site):
            assert way_of(reversed(modes_of(way))) == way


def test_the_model_rules_out_what_only_moves_more_bytes():
    graph = models.build("resnet50", (224, 224, 3), 10)
    for group in groups(graph, 256, BF16, H200):
        assert group.timed and not [ways for ways in group.timed if "none" in ways or "statistics" in ways]
    for group in groups(graph, 256, FP32, H200):  # no kernel does anything on the way
        pooled = any(site.pooled for site in group.sites)
        assert group.timed == (("elementwise" + pooled * "+pooled",) * len(group.sites),)
        assert all(set(same) <= {"none", "elementwise", "elementwise+pooled"} for same in group.same.values())


def test_equal_pieces_are_timed_once(monkeypatch):
    clock, cuts = Fake(), []
    monkeypatch.setattr("minidl.fusion.measure.cut", lambda *args: cuts.append(cut(*args)) or cuts[-1])
    plan = tune(models.build("resnet50", (224, 224, 3), 10), 4, BF16, H200, clock)
    assert len(clock.asked) == len(set(clock.asked)) and len(plan.evidence) == 49
    pieces = {key for key, _, _ in clock.asked}
    assert pieces <= {cut.key for cut in cuts} and len(pieces) < len(cuts) / 2


# -- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "seed"), [("resnet50", 0), ("densenet121", 1), ("vgg16_bn", 0), ("vgg16_bn", 1)])
def test_the_plan_is_never_predicted_slower_than_a_fixed_one(name, seed):
    graph = models.build(name, (64, 64, 3), 10)
    found = groups(graph, 8, BF16, H200)
    terms = measure(graph, 8, found, Fake(seed)).terms
    sites = fusion.find_sites(graph)
    plan = tune(graph, 8, BF16, H200, Fake(seed))
    least = chain.total(plan.sites, terms)
    for how in fusion.PLANS:
        assert least <= chain.total(fusion.choose(sites, how).sites, terms)
    for site in sites:
        for way in candidates(site):
            assert least <= chain.total(plan.sites | {site.name: way}, terms) + 1e-9


def test_modes_that_meet_in_a_kernel_are_timed_together():
    """What a convolution normalises as it reads, and the statistics of what it writes."""

    def clock(cut, which, variants):
        both = lambda on: {("relu0", "deferred"), ("conv1", "statistics")} <= on  # noqa: E731
        return [Timing((10.0 - len(on) + 5.0 * both(on),) * 2) for on in variants]

    graph = m.Graph()
    x = graph.input((8, 8, 8))
    for i in range(3):
        x = m.Conv2d(8, 8, 3, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(8, name=f"bn{i}")(x))
    graph.output(x)
    site, above = fusion.find_sites(graph)[:2]
    assert site.taker == above.producer
    found = groups(graph, 2, BF16, H200, everything=True)
    (term,) = [t for t in measure(graph, 2, found, clock).terms if t.sites == (site.name, above.name)]
    both = ("elementwise+prologue", "elementwise+statistics")
    assert term.ms[both] == pytest.approx(5.0) and ("elementwise", "elementwise") not in term.ms


def test_the_heuristic_needs_no_clock_and_no_batch():
    for name in ("resnet50", "unet"):
        graph = models.build(name, (64, 64, 3), 10)
        sites = fusion.find_sites(graph)
        plan = cost.heuristic(graph, sites, BF16, H200)
        assert plan == cost.heuristic(graph, sites, BF16, H200)
        for site in sites:
            times = {w: cost.predict(graph, site, w, 64, BF16, H200).ms for w in candidates(site)}
            assert times[plan.sites[site.name]] == min(times.values())
        ways = cost.heuristic(graph, sites, FP32, H200).sites
        assert ways == {s.name: "elementwise+pooled" if s.pooled else "elementwise" for s in sites}


def among(way, measured):
    """A way without modes that a file does not know, being older than they are."""
    known = {mode for one in measured for part in one.split(" and ") for mode in modes_of(part)}
    return way_of(set(modes_of(way)) & known)


def test_the_model_chooses_as_the_measurements_do():
    """Of five networks on an H200: no fixed plan is a hundredth faster, nor would choosing for each be by much."""
    found = {}
    for path in sorted((ROOT / "benchmarks" / "results" / "h200").glob("bench_fusion*.json*")):
        for row in load(path)["rows"]:
            if row["part"] == "sites":
                found.setdefault(row["case"], {}).setdefault(row["site"], {}).setdefault(row["arm"], []).append(row)
    assert len(found) >= 5
    for case, measured in found.items():
        name, image, _ = case.split("/")
        size = int(image.split("x")[0])
        graph = models.build(name, (size, size, 3), 2 if name == "unet" else 1000)
        sites = {site.name: site for site in fusion.find_sites(graph)}
        plans = {how: fusion.choose(list(sites.values()), how).sites for how in fusion.PLANS}
        plans["auto"] = cost.heuristic(graph, list(sites.values()), BF16, H200).sites
        ms = dict.fromkeys([*plans, "best"], 0.0)
        for group, ways in measured.items():
            took = {way: rows[0]["count"] * sum(row["ms"] for row in rows) for way, rows in ways.items()}
            ms["best"] += min(took.values())
            for how, plan in plans.items():
                runs = (cost.runs_as(graph, sites[one], plan[one], BF16, H200) for one in group.split(" and "))
                ms[how] += took[" and ".join(among(way, ways) for way in runs)]
        assert ms["auto"] <= 1.01 * min(ms[how] for how in fusion.PLANS), (case, ms)
        assert ms["auto"] <= 1.02 * ms["best"], (case, ms)


def test_the_model_chooses_as_the_map_does():
    """At each size and number of channels that were measured on an H200."""
    measured = {}
    for row in load(ROOT / "benchmarks" / "results" / "h200" / "bench_fusion_map.json.gz")["rows"]:
        measured.setdefault((row["kernel"], row["size"], row["channels"]), {})[row["arm"]] = row["ms"]
    assert set(measured) == set(points(256, 2))
    for point, ms in measured.items():
        graph = between(*point)
        way = among(cost.heuristic(graph, fusion.find_sites(graph), BF16, H200).sites["bn"], ms)
        assert ms[way] <= 1.04 * min(ms.values()), (point, way)


def test_statistics_that_a_piece_does_not_see_are_the_models():
    """Those of a concatenation are joined outside: the measured plan joins them, however it measures the rest."""
    graph = models.build("densenet121", (64, 64, 3), 10)
    for seed in range(2):
        plan = tune(graph, 8, BF16, H200, Fake(seed), everything=True)
        joined = [site for site in fusion.find_sites(graph) if site.joined]
        assert joined and all("joined" in modes_of(plan.sites[site.name]) for site in joined)


# -- the contest ----------------------------------------------------------------------------------------------------


TURNS = 12


class Racing(Fake):
    """Whole networks take random times, too: each its own, and all together another from turn to turn."""

    def whole(self, graph, batch, variants):
        self.ran = variants
        rng = np.random.default_rng(self.seed)
        times, clock = 1 + rng.random(len(variants)), 1 + rng.random(TURNS)
        return [Timing(tuple(ms * clock)) for ms in times]


@pytest.mark.parametrize("seed", range(4))
def test_of_plans_that_ran_as_a_whole_the_fastest_is_taken(seed):
    """Where each turn is another's equal, but for its clock."""
    graph = models.build("resnet50", (64, 64, 3), 10)
    sites, clock = fusion.find_sites(graph), Racing(seed)
    plan = tune(graph, 8, BF16, H200, clock)
    found = groups(graph, 8, BF16, H200)
    terms = measure(graph, 8, found, Fake(seed)).terms
    composed = tune(graph, 8, BF16, H200, Fake(seed))
    assert composed.contest == [] and plan.evidence == composed.evidence
    known = {how: fusion.choose(sites, how) for how in fusion.PLANS}
    known |= {"auto": cost.heuristic(graph, sites, BF16, H200), "composed": composed}
    ran = dict(zip((row["plan"] for row in plan.contest), clock.ran, strict=True))
    assert next(iter(ran)) == "auto" and len(set(ran.values())) == len(ran)
    assert all(modes_on(sites, known[how]) == on for how, on in ran.items())
    fastest = min(plan.contest, key=lambda row: row["ms"])
    assert plan.sites == known[fastest["plan"]].sites
    assert all(row["turns"] == TURNS and row["ahead"] in (0, TURNS) for row in plan.contest)
    # Who did not run is behind by a twentieth in what was measured, or is one of those who did.
    limit = 1.05 * chain.total(composed.sites, terms)
    for how, other in known.items():
        alike = [group.runs(other) for group in found]
        twins = [h for h in ran if alike == [group.runs(known[h]) for group in found]]
        assert how in ran or twins or chain.total(other.sites, terms) > limit


def timings(seed, turns=TURNS, noise=0.0, **gains):
    """A contest on a clock that drifts by a tenth, where each plan's times have noise of their own."""
    rng = np.random.default_rng(seed)
    clock = 20 * np.exp(0.1 * np.sin(np.arange(turns) + rng.random()))
    own = lambda: np.exp(noise * rng.standard_normal(turns))  # noqa: E731
    return {name: Timing(tuple(clock / gain * own())) for name, gain in {"auto": 1.0, **gains}.items()}


def test_what_is_faster_in_every_turn_wins_however_the_clock_drifts():
    for seed in range(20):
        assert winner(timings(seed, bnff=1.004, gradients=1.002, composed=0.999)) == "bnff"
        assert winner(timings(seed, bnff=0.996)) == "auto"


def test_noise_takes_the_place_of_the_default_in_one_case_of_forty_at_most():
    taken = sum(winner(timings(seed, noise=0.03, bnff=1.0)) != "auto" for seed in range(2000))
    assert 0.01 <= taken / 2000 <= 0.025 + 3 * (0.025 / 2000) ** 0.5
    assert winner(timings(0, turns=5, bnff=2.0)) == "auto", "five turns tell no more than one in 32"
    assert winner(timings(0, turns=6, bnff=2.0)) == "bnff"


def test_a_gain_beyond_the_noise_is_found():
    found = [winner(timings(seed, noise=0.01, bnff=1.03)) for seed in range(100)]
    assert found.count("bnff") >= 95


def test_a_network_runs_as_a_whole_without_its_model_noticing(ops):
    model = m.Model(residual(), device=ops.name)
    before, modes = model.state_dict(), model.modes()
    clock = DeviceClock(ops, FP32, whole=Budget(samples=2, seconds=0.01, sample_ms=1e-4))
    sites = fusion.find_sites(model.graph)
    variants = [modes_on(sites, fusion.choose(sites, how)) for how in ("none", "elementwise")]
    timings = clock.whole(model.graph, 2, variants)
    assert len(timings) == 2 and all(timing.ms > 0 for timing in timings)
    assert model.modes() == modes and all((model.state_dict()[name] == x).all() for name, x in before.items())


@pytest.mark.parametrize("name", ["resnet20", "densenet121", "unet", "mobilenet_v2", "efficientnet_b0"])
def test_every_model_of_the_library_runs_as_a_whole(name):
    """In a dry run, as kernels are compiled ahead."""
    graph = models.build(name, (32, 32, 3), 2)
    assert can_run_alone(graph)
    with dry_run(BUILT_IN["H200"]) as log:
        sites, network = fusion.find_sites(graph), Whole(graph, 2, get_ops("cuda"), BF16)
        for how in fusion.PLANS:
            network(modes_on(sites, fusion.choose(sites, how)))
    assert log.variants


def test_layers_that_may_talk_to_other_ranks_are_not_run_as_a_whole(cpu_ops):
    graph = watched()
    assert can_run_alone(stack()) and not can_run_alone(graph)
    comm, shared, spread = SimulatedCommunicator(2, AlphaBeta(1e-3, 1e6), clock=VirtualClock()), stack(), stack()
    shared.replace("bn1", m.BatchNorm2d(7, sync=comm, affine=False, name="other"))
    assert can_run_alone(shared), "its twin keeps to itself"
    options = {"stride": 2, "padding": 1, "bias": False, "name": "other"}
    spread.replace("conv1", ChannelParallelConv2d(6, 7, 3, **options, group=comm))
    assert not can_run_alone(spread)
    clock = DeviceClock(cpu_ops, FP32, Budget(samples=2, seconds=0.01, sample_ms=1e-4))
    assert clock.whole(graph, 2, [frozenset()]) is None


def test_without_room_for_a_whole_network_the_composed_plan_is_taken(cpu_ops, monkeypatch):
    def full(*_):
        raise MemoryError("no bytes left")

    monkeypatch.setattr("minidl.fusion.clock.Whole", full)
    clock = DeviceClock(cpu_ops, FP32, Budget(samples=2, seconds=0.01, sample_ms=0.01))
    plan = tune(residual(), 2, FP32, cost.Machine.of(None), clock)
    assert plan.contest == [] and plan.evidence


# -- the map --------------------------------------------------------------------------------------------------------


def test_the_map_shows_the_fastest_way_at_each_point(tmp_path, cpu_ops):
    pytest.importorskip("matplotlib", reason="pictures need minidl[plot]")
    from minidl.profile import plots
    from minidl.profile.plots.fusion import fastest

    where = [(1, 7, 64), (1, 14, 64), (3, 7, 64), (3, 7, 128)]
    rows = measure_map(cpu_ops, 2, BF16, H200, Fake(3), where=where)
    best = fastest(rows)
    assert list(best) == where
    for point in where:
        graph = between(*point)
        (site,) = fusion.find_sites(graph)
        ways = {cost.runs_as(graph, site, way, BF16, H200) for way in candidates(site)}
        assert {r["arm"] for r in rows if (r["kernel"], r["size"], r["channels"]) == point} == ways
    for point, row in best.items():
        times = {r["arm"]: r["ms"] for r in rows if (r["kernel"], r["size"], r["channels"]) == point}
        assert row["ms"] == min(times.values()) == times[row["arm"]]
    figure = plots.fusion(rows, "title", "machine")
    plain = {(r["kernel"], r["size"], r["channels"]): r["ms"] for r in rows if r["arm"] == "elementwise"}
    for kernel in (1, 3):
        (panel,) = [axes for axes in figure.axes if axes.get_title(loc="left") == f"{kernel}x{kernel} filters"]
        gains = [plain[point] / row["ms"] for point, row in best.items() if point[0] == kernel]
        assert sorted(text.get_text() for text in panel.texts) == sorted(f"{gain:.2f}" for gain in gains)
    plots.save(figure, tmp_path / "map.svg")
    assert (tmp_path / "map.svg").stat().st_size > 1000


def test_points_of_the_map_are_no_larger_than_networks_have_them():
    for batch in (1, 32, 256):
        found = list(points(batch, 2))
        assert len(set(found)) == len(found) and (1, 7, 64) in found
        assert all(batch * size**2 * channels * 2 <= 1 << 30 for _, size, channels in found)
