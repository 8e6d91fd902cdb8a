"""Comparing result files: the verdicts are right as often as they claim, and nothing incomparable is compared."""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections import Counter

import numpy as np
import pytest

from minidl.profile import compare as module
from minidl.profile.compare import compare, compare_results, table
from minidl.profile.ratio import FASTER, SAME, SLOWER, UNCLEAR, ratio_of_medians, ratio_of_spreads, verdict_of
from minidl.profile.results import result, write
from minidl.profile.timing import Timing

MACHINE = {"gpu": "NVIDIA H200", "count": 1, "cupy": "14.2.0"}
TRIALS = 200


def noise(rng, n=25, sigma=0.01, correlation=0.0, outliers=0.05):
    """Milliseconds as machines give them: 1 % of noise, neighbours alike, now and then a sample far too long."""
    steps = rng.normal(size=n)
    for i in range(1, n):
        steps[i] = correlation * steps[i - 1] + math.sqrt(1 - correlation**2) * steps[i]
    late = np.where(rng.random(n) < outliers, 1 + rng.exponential(0.2, n), 1.0)
    return list(np.round(1.7 * (1 + sigma * steps) * late, 7))


@functools.cache
def verdicts(change, trials=TRIALS, seed=0, **kwargs):
    """How often each verdict falls where B takes ``change`` times as long as A."""
    rng = np.random.default_rng(seed)
    pairs = [(noise(rng, **kwargs), noise(rng, **kwargs)) for _ in range(trials)]
    return Counter(verdict_of(ratio_of_medians(a, [change * x for x in b])) for a, b in pairs)


# -- the statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("correlation", "share"), [(0.0, 0.95), (0.3, 0.9), (0.5, 0.85)])
def test_a_planted_slowdown_is_found_in_both_directions(seed, correlation, share):
    slower = verdicts(1.05, seed=seed, correlation=correlation)
    faster = verdicts(1 / 1.05, seed=seed, correlation=correlation)
    assert slower[SLOWER] >= share * TRIALS and not slower[FASTER] and not slower[SAME], slower
    assert faster[FASTER] >= share * TRIALS and not faster[SLOWER] and not faster[SAME], faster


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("correlation", "most"), [(0.0, 0.9), (0.5, 0.5)])
def test_noise_is_the_same_in_most_and_hardly_ever_a_change(seed, correlation, most):
    found = verdicts(1.0, seed=seed, correlation=correlation)
    assert found[SLOWER] + found[FASTER] <= 0.02 * TRIALS and found[SAME] >= most * TRIALS, found


@pytest.mark.parametrize("sigma", [0.05, 0.2])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_more_noise_gives_unclear_and_no_wrong_verdict(sigma, correlation):
    calm, none = (verdicts(1.0, sigma=s, correlation=correlation) for s in (0.01, sigma))
    slow = verdicts(1.05, sigma=sigma, correlation=correlation)
    assert none[UNCLEAR] > calm[UNCLEAR] and none[UNCLEAR] >= 0.5 * TRIALS, none
    assert none[SLOWER] + none[FASTER] <= 0.02 * TRIALS, none
    assert slow[UNCLEAR] >= 0.5 * TRIALS and slow[FASTER] + slow[SAME] <= 0.02 * TRIALS, slow


@pytest.mark.parametrize("n", [2, 3, 5, 7, 13, 25])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_interval_holds_the_truth_as_often_as_it_says(n, correlation):
    rng, held = np.random.default_rng(n), 0
    for _ in range(TRIALS):
        interval = ratio_of_medians(*(noise(rng, n=n, correlation=correlation) for _ in "ab"))
        held += interval.low <= 1 <= interval.high
    # Three standard deviations of counting below 95 %; fewer than five neighbours cannot show how alike they are.
    promised = 0.95 if correlation == 0 or n >= 5 else 0.85
    assert held / TRIALS >= promised - 3 * math.sqrt(promised * (1 - promised) / TRIALS)


def test_a_larger_change_than_the_threshold_needs_to_be_certain():
    """At a change of exactly the threshold both SAME and SLOWER are wrong to claim more than rarely."""
    found = verdicts(1.02)
    assert found[UNCLEAR] >= 0.9 * TRIALS and found[SLOWER] <= 0.05 * TRIALS, found


def test_clocks_that_fall_within_a_run_are_seen():
    rng = np.random.default_rng(1)
    a, b = noise(rng), noise(rng)
    fallen = [x * (1.0 if i < 13 else 1.1) for i, x in enumerate(b)]
    interval = ratio_of_medians(a, fallen)
    assert verdict_of(interval) == UNCLEAR and interval.drift > 0.05
    assert verdict_of(ratio_of_medians(a, [1.1 * x for x in b])) == SLOWER


def test_a_restless_machine_makes_lucky_rows_unclear():
    """Rows that happened to be steady cannot be trusted where all the others drifted."""
    rng = np.random.default_rng(4)
    load = [np.where(np.arange(25) < 12, 1.0, 1.0 + by) for by in rng.uniform(0.2, 0.6, 20)]
    drifting = [row(list(np.array(noise(rng)) * by), layer=f"l{i}") for i, by in enumerate(load)]
    a, b = row(noise(rng), layer="lucky"), slowed(1.15, layer="lucky")
    assert compare_results(content(a), content(b)).rows[0].verdict == SLOWER
    found = compare_results(content(a, *drifting), content(b, *drifting))
    assert [r.verdict for r in found.rows if r.key[1] == "lucky"] == [UNCLEAR] and found.restless > 0.2
    calm = [row(noise(rng), layer=f"l{i}") for i in range(20)]
    found = compare_results(content(a, *calm), content(b, *calm))
    assert [r.verdict for r in found.rows if r.key[1] == "lucky"] == [SLOWER] and found.restless < 0.01


@pytest.mark.parametrize("seed", range(2))
def test_whole_files_of_noise_and_of_a_planted_slowdown(seed):
    rng = np.random.default_rng(seed)
    a, b = (content(*(row(noise(rng), layer=f"l{i}") for i in range(100))) for _ in "ab")
    slow = [row([1.05 * x for x in r["timings"]["hot"]["samples_ms"]], layer=r["layer"]) for r in b["rows"]]
    same, slower = compare_results(a, b).counts, compare_results(a, content(*slow)).counts
    assert same[SAME] >= 80 and same[SLOWER] + same[FASTER] <= 2, same
    assert slower[SLOWER] >= 95 and not slower[FASTER] and not slower[SAME], slower


@pytest.mark.parametrize("n", [2, 5, 24])
def test_b_against_a_is_the_reverse_of_a_against_b(n):
    rng = np.random.default_rng(n)
    a, b = noise(rng, n=n), noise(rng, n=n + 3)
    there, back = ratio_of_medians(a, b), ratio_of_medians(b, a)
    assert there.ratio * back.ratio == pytest.approx(1, rel=1e-12)
    assert (there.low * back.high, there.high * back.low) == pytest.approx((1, 1), rel=1e-12)
    assert there == ratio_of_medians(a, b)  # the seed is fixed
    scaled = ratio_of_medians([1e-3 * x for x in a], [1e-3 * x for x in b])  # nor do units matter
    assert scaled.ratio == pytest.approx(there.ratio)


def test_spreads_alone_are_trusted_no_more_than_the_samples():
    rng = np.random.default_rng(3)
    found = Counter()
    for _ in range(TRIALS):
        a, b = (Timing(tuple(noise(rng, n=7))) for _ in "ab")
        found[verdict_of(ratio_of_spreads(a.ms, a.spread, b.ms, b.spread))] += 1
    assert found[SLOWER] + found[FASTER] <= 0.02 * TRIALS, found
    wide = ratio_of_spreads(1.0, 0.2, 1.1, 0.2)
    assert (wide.ratio, wide.basis) == (pytest.approx(1.1), "spread") and wide.low < 1 < wide.high


def test_samples_of_nothing_do_not_break_the_logarithm():
    assert verdict_of(ratio_of_medians([0.0, 0.0, 1.0, 1.0], [1.0, 1.1, 1.0, 1.1])) == UNCLEAR
    calm = ratio_of_medians([0.0, *[1.0] * 24], [*[1.0] * 24, 1.1])
    assert (calm.ratio, verdict_of(calm)) == (1.0, SAME)


# -- files ------------------------------------------------------------------------------------------------------------


def row(samples=None, layer="conv1", **more):
    samples = noise(np.random.default_rng(0)) if samples is None else samples
    record = Timing(tuple(samples)).record()
    named = {"case": "resnet20/32x32/b32", "layer": layer, "pass": "forward", "dtype": "fp32", "arm": "minidl"}
    figures = {"ms": record["ms"], "spread": record["spread"], "floor_ms": None, "peers": {}, "ranks": 1}
    timings = {"timing": "hot", "timings": {"replayed": None, "hot": record}}
    return named | figures | timings | {"device": "cuda", "input_shapes": [[32, 32, 32, 3]], "in": None} | more


def content(*rows, machine=MACHINE, benchmark="layers", **more):
    return result(benchmark, rows, machine, **more)


def slowed(by, seed=1, **more):
    return row([by * x for x in noise(np.random.default_rng(seed))], **more)


def test_every_row_gets_its_verdict_worst_first():
    names = ["same", "slow", "slowest", "fast"]
    a = content(*(row(layer=name) for name in names))
    b = content(*(slowed(by, layer=name) for name, by in zip(names, (1.0, 1.1, 1.3, 0.8), strict=True)))
    found = compare_results(a, b)
    assert [(r.key[1], r.verdict) for r in found.rows] == [
        ("slowest", SLOWER), ("slow", SLOWER), ("same", SAME), ("fast", FASTER),
    ]  # fmt: skip
    for judged, by in zip(found.rows, (1.3, 1.1, 1.0, 0.8), strict=True):
        assert judged.interval.low < by < judged.interval.high and judged.interval.basis == "samples"
        assert judged.ratio == pytest.approx(judged.b_ms / judged.a_ms, rel=1e-6)
    assert found.counts == {SLOWER: 2, UNCLEAR: 0, SAME: 1, FASTER: 1, "only in A": 0, "only in B": 0}


def test_a_file_against_itself_is_all_same():
    unknown = {"timing": None, "timings": {}}
    file = content(
        row(layer="few", samples=[1.0, 3.0]),
        row(layer="wild", samples=noise(np.random.default_rng(2), sigma=0.3)),
        row(layer="absorbed", ms=0.0, spread=0.0, **{"in": "conv2"}, **unknown),
        row(layer="unmeasured", ms=None, spread=None, **unknown),
        row(layer="old", spread=None, **unknown),
        row(layer="older", spread=0.4, **unknown),
    )
    found = compare_results(file, json.loads(json.dumps(file)))
    assert {r.verdict for r in found.rows} == {SAME} and len(found.rows) == 6
    assert found.exit_status(strict=True) == 0 and found.changes == ()


@pytest.mark.parametrize(
    ("a", "b", "note"),
    [
        (row(), row(ms=None), "not measured in B"),
        (row(ms=0.0), row(), "0 ms in A"),
        (row(), row(**{"in": "conv2", "ms": 0.0}), "a row of its own / in conv2"),
        (row(), slowed(2.0, timing="cold"), "timed in two ways: hot / cold"),
        (row(timings={}, spread=None), slowed(2.0), "neither samples nor spread"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_gives_no_interval_is_unclear_and_says_why(a, b, note):
    (judged,) = compare_results(content(a), content(b)).rows
    assert (judged.verdict, judged.interval, judged.notes) == (UNCLEAR, None, (note,))


def test_rows_without_samples_are_judged_by_their_spread():
    plain = [{k: v for k, v in r.items() if k not in ("timing", "timings")} for r in (row(), slowed(1.2))]
    (judged,) = compare_results(content(plain[0]), content(plain[1])).rows
    assert (judged.verdict, judged.interval.basis) == (SLOWER, "spread")
    assert judged.notes == ("by spread, without samples",)


def test_the_remainder_of_a_step_is_no_measurement():
    rest = {"pass": "unaccounted", "layer": "step"}
    found = compare_results(content(row(), row(**rest)), content(row(), slowed(3.0, **rest)), threshold=0.02)
    assert [r.verdict for r in found.rows] == [SAME] and not found.only_a


def test_rows_of_one_file_are_listed_and_the_exit_status_counts_them_when_strict():
    found = compare_results(content(row(), row(layer="old")), content(row(), row(layer="new"), row(layer="newer")))
    assert ([key[1] for key in found.only_a], [key[1] for key in found.only_b]) == (["old"], ["new", "newer"])
    assert (found.exit_status(), found.exit_status(strict=True)) == (0, 1)
    header, rows = table(found)
    listed = [line[header.index("verdict")] for line in rows]
    assert listed == ["only in A", "only in B", "only in B", "SAME"]


@pytest.mark.parametrize(("by", "status", "strict"), [(1.0, 0, 0), (1.2, 1, 1), (0.8, 0, 0), (1.02, 0, 1)])
def test_exit_status(by, status, strict):
    found = compare_results(content(row()), content(slowed(by)))
    assert (found.exit_status(), found.exit_status(strict=True)) == (status, strict)


def test_the_threshold_is_the_users():
    a, b = content(row()), content(slowed(1.05))
    assert compare_results(a, b, threshold=0.02).rows[0].verdict == SLOWER
    assert compare_results(a, b, threshold=0.1).rows[0].verdict == SAME
    for wrong in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="threshold must be a number above 0 and below 1"):
            compare_results(a, b, threshold=wrong)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "message"),
    [
        (content(row(), benchmark="model"), r"A is of benchmark 'layers', B of 'model'"),
        (content(row(), machine={"gpu": "NVIDIA A100"}), r"on NVIDIA H200, B on NVIDIA A100; .* --any-machine"),
        (content(row(layer="fc")), r"no row in common; .*conv1 forward fp32 minidl 1 ranks', the second .* fc forward"),
        (content(), r"the second no row at all"),
        (
            content(row(input_shapes=[[64, 32, 32, 3]])),
            r"conv1 forward .*: input_shapes \[\[32, .* in B; these are two",
        ),
        (content(row(output_shape=[1])), None),  # the other file does not know the shape
        (content(row(device="cpu")), r"conv1 .*: device cuda in A, cpu in B"),
        (content(row(), row()), r"B: two rows of resnet20/32x32/b32 conv1 forward fp32 minidl 1 ranks"),
        (content(row(layer=["conv1"])), r"B: a row named .* the file is damaged"),
        (content(row(ms="fast")), r"B: .*conv1.*: ms must be a number of at least 0, got 'fast'"),
        (content(row(timings={"hot": {"samples_ms": [1.0, -1.0]}})), r"samples_ms must be a number of at least 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(b, message):
    a = content(row())
    if message is None:
        assert compare_results(a, b).rows
        return
    with pytest.raises(ValueError, match=message):
        compare_results(a, b)


def test_other_machines_may_be_compared_when_asked_for_and_each_row_says_so():
    a = content(row(), row(layer="fc"))
    b = content(row(device="cpu"), slowed(2.0, layer="fc"), machine={"cpu": "EPYC", "cores": 2})
    found = compare_results(a, b, any_machine=True)
    assert [(r.verdict, r.notes) for r in found.rows] == [(SLOWER, ("other machine",)), (SAME, ("other machine",))]


# -- the command ------------------------------------------------------------------------------------------------------


def command(*words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(word) for word in words]))


def test_the_command_prints_and_returns_the_status(tmp_path, capsys):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write(a, content(row(), row(layer="fc"), commit="0123"))
    write(b, content(row(), slowed(1.3, layer="fc"), commit="4567"))
    assert command(a, b) == 1
    told = capsys.readouterr().out
    assert "SLOWER" in told and "fc" in told and "conv1" not in told  # what stayed is not listed
    assert "differs: commit: 0123 -> 4567" in told and told.endswith("1 SLOWER, 1 SAME\n")
    assert command(a, b, "--all") == 1 and "conv1" in capsys.readouterr().out
    assert command(b, a, "--strict") == 0 and "FASTER" in capsys.readouterr().out
    assert command(a, b, "--threshold", "50") == 0
    with pytest.raises(ValueError, match="--threshold must be a number of percent above 0 and below 100, got 0.0"):
        command(a, b, "--threshold", "0")


def test_foreign_files_are_refused_by_name(tmp_path):
    good, foreign = tmp_path / "good.json", tmp_path / "foreign.json"
    write(good, content(row()))
    foreign.write_text('{"traceEvents": []}')
    for pair in ((good, foreign), (foreign, good)):
        with pytest.raises(ValueError, match="foreign.json: JSON, but not a result file"):
            compare(*pair)
    with pytest.raises(OSError, match="missing.json"):
        compare(good, tmp_path / "missing.json")


def test_the_median_is_the_files_median():
    """The ratio shown beside two medians is theirs."""
    a, b = (noise(np.random.default_rng(seed), n=25) for seed in (5, 6))
    assert ratio_of_medians(a, b).ratio == pytest.approx(statistics.median(b) / statistics.median(a), rel=1e-12)
