"""Timers against calls of known duration, and the statistics of what they take."""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from minidl.profile import timing
from minidl.profile.timing import Budget, HostTimer, Timing, balanced, input_sets, timer

QUICK = Budget(samples=7, seconds=0.5)


# -- statistics --------------------------------------------------------------------------------------------------------


def test_median_quartiles_and_least_by_hand():
    found = Timing((5.0, 1.0, 4.0, 2.0, 3.0))
    assert found.ms == 3.0 and found.min_ms == 1.0
    assert found.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Timing((2.0, 1.0)).ms == 1.5


def test_one_outlier_moves_neither_median_nor_spread_much():
    calm = Timing(tuple([1.0, 1.1, 0.9] * 5))
    disturbed = Timing((*calm.samples_ms[1:], 1000.0))
    assert disturbed.ms == pytest.approx(calm.ms, rel=0.1) and disturbed.spread < 0.3


def test_the_95th_percentile_takes_twenty_samples():
    assert Timing(tuple(map(float, range(1, 20)))).p95_ms is None
    assert Timing(tuple(map(float, range(1, 21)))).p95_ms == pytest.approx(19.05)


def test_samples_of_no_length_have_no_spread():
    assert Timing((0.0, 0.0, 0.0)).spread == 0.0


def test_a_record_is_json_and_keeps_the_order_of_samples():
    samples = (3.00000004, 1.0, 2.0)
    record = json.loads(json.dumps(Timing(samples).record()))
    assert record == {
        "ms": 2.0, "min_ms": 1.0, "p95_ms": None, "spread": pytest.approx(0.5), "n": 3, "samples_ms": [3.0, 1.0, 2.0],
    }  # fmt: skip


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what tests add to ``now``."""
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds):
        clock.slept.append(seconds)
        clock.now += seconds

    clock.slept = []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    return clock


def taken(budget, clock, seconds_each):
    """How many samples of so many seconds the budget takes."""

    def sample():
        clock.now += seconds_each
        return 1e3 * seconds_each

    return len(budget.take(sample).samples_ms)


def test_a_budget_ends_with_its_samples_or_with_its_time(clock):
    assert taken(Budget(samples=25, seconds=1.0), clock, 0.001) == 25
    assert taken(Budget(samples=25, seconds=1.0), clock, 0.1) in (10, 11)
    assert taken(Budget(samples=25, seconds=1.0, least=5), clock, 10.0) == 5
    assert taken(Budget(samples=25, seconds=1.0, least=1), clock, 10.0) == 2, "one sample has no spread"


def test_a_sample_may_be_followed_by_a_rest_in_proportion_that_is_never_long(clock):
    assert taken(Budget(samples=3, seconds=1.0), clock, 0.001) == 3 and clock.slept == []
    assert taken(Budget(samples=3, seconds=1.0, rest=2.0), clock, 0.001) == 3
    assert clock.slept == pytest.approx([0.002] * 3)
    clock.slept.clear()
    assert taken(Budget(samples=9, seconds=0.25, least=2, rest=2.0), clock, 0.1) == 3, "rests count as time"
    assert clock.slept == pytest.approx([0.02] * 3)


@pytest.mark.parametrize("size", [1, 1000, 1 << 20, 5 << 20, 1 << 30])
def test_nothing_of_a_set_is_in_the_cache_when_its_turn_comes_again(size):
    cache = 8 << 20
    sets = input_sets(size, cache)
    assert sets >= 2 and (sets - 1) * size >= 2 * cache
    assert sets == 2 or (sets - 2) * size < 2 * cache, "no more than are needed"


# -- the processor -----------------------------------------------------------------------------------------------------


def nap():
    time.sleep(0.02)


def test_a_sleep_of_known_length_is_timed_right():
    host = HostTimer()
    host.cache_bytes = 1 << 20
    for found in (host.hot(nap, QUICK), host.cold(nap, QUICK)):
        # The least of the samples: the system may wake a sleeper late, but not early.
        assert 20.0 <= found.ms and found.min_ms == pytest.approx(20.0, rel=0.03)


def test_short_calls_are_repeated_within_a_sample_and_long_ones_are_not(clock):
    calls = []

    def lasting(seconds):
        calls.append(seconds)
        clock.now += seconds

    host, budget = HostTimer(), Budget(samples=5, seconds=1.0, sample_ms=3.9)
    found = host.hot(lambda: lasting(1e-4), budget)
    assert found.samples_ms == pytest.approx([0.1] * 5) and len(calls) == 2 + 5 * 39
    calls.clear()
    found = host.hot(lambda: lasting(0.01), budget)
    assert found.samples_ms == pytest.approx([10.0] * 5) and len(calls) == 2 + 5


@pytest.mark.parametrize("n", range(1, 14))
def test_turns_are_balanced_in_place_and_in_who_ran_before(n):
    orders = balanced(n)
    assert all(sorted(order) == list(range(n)) for order in orders)
    times = len(orders) // n
    places = Counter((place, who) for order in orders for place, who in enumerate(order))
    behind = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(places.values()) == {times} and len(places) == n * n
    assert len(behind) == n * (n - 1) and set(behind.values()) <= {times}


def test_rivals_are_timed_in_turns_each_long_enough(clock):
    calls = []

    def lasting(name, seconds):
        calls.append(name)
        clock.now += seconds

    short, long = (partial(lasting, name, seconds) for name, seconds in (("s", 1e-3), ("l", 1e-2)))
    found = HostTimer().in_turns([[short], [long, long]], Budget(samples=3, seconds=1e9, sample_ms=2.0))
    assert [timing.samples_ms for timing in found] == [pytest.approx((1.0,) * 3), pytest.approx((10.0,) * 3)]
    s, l = "sss", "llll"  # the first call of each, or the first of both, is not counted  # noqa: E741
    assert "".join(calls) == "ss" + l + s + l + s + l + l + s + s + l
    assert len(HostTimer().in_turns([[long]], Budget(samples=9, seconds=0.0, least=4))[0].samples_ms) == 4


def test_overwriting_the_cache_is_not_in_the_time():
    host = HostTimer()
    host.cache_bytes = 64 << 20
    assert host.cold(lambda: None, QUICK).min_ms < 0.1, "filling 128 MiB takes a hundred times as long"


def test_a_cold_call_finds_the_cache_overwritten_each_time(monkeypatch):
    events = []

    class Scratch:
        def fill(self, value):
            events.append("overwritten")

    host = HostTimer()
    monkeypatch.setattr(timing.np, "zeros", lambda size, dtype: events.append(size) or Scratch())
    host.cold(lambda: events.append("called"), Budget(samples=3, least=3))
    assert events == [2 * host.cache_bytes, "called"] + ["overwritten", "called"] * 3


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_within_samples_and_the_collector_is_left_as_it_was(collecting):
    before = gc.isenabled()
    seen = []
    try:
        gc.enable() if collecting else gc.disable()
        HostTimer().hot(lambda: seen.append(gc.isenabled()), Budget(samples=3, seconds=0.1, sample_ms=0.1))
        assert seen and not any(seen[-3:])
        with pytest.raises(ZeroDivisionError):
            HostTimer._quietly(Budget(), lambda: 1 / 0)
        assert gc.isenabled() == collecting
    finally:
        gc.enable() if before else gc.disable()


def test_nothing_is_replayed_on_a_processor(cpu_ops):
    assert isinstance(timer(cpu_ops), HostTimer) and timer(cpu_ops).replayed([nap]) is None


# -- the GPU -----------------------------------------------------------------------------------------------------------

SPIN_SECONDS = 1e-3


def ways(device, call):
    return {
        "replayed": device.replayed([call] * 3, QUICK),
        "hot": device.hot(call, QUICK),
        "cold": device.cold(call, QUICK),
    }


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_of_known_duration_is_timed_right(cuda_ops):
    from minidl.cuda.spin import spin

    for way, found in ways(timer(cuda_ops), lambda: spin(SPIN_SECONDS)).items():
        assert found.ms == pytest.approx(1e3 * SPIN_SECONDS, rel=0.03), way


@pytest.mark.gpu
@pytest.mark.alone
def test_operands_that_rotate_or_are_cold_come_from_memory(cuda_ops):
    """16 MB fit into the second-level cache several times, and are read faster from there."""
    device = timer(cuda_ops)
    shape = 64, 256, 256
    number = input_sets(2 * 4 * math.prod(shape), device.cache_bytes)
    sets = [cuda_ops.from_host(np.ones(shape, np.float32)) for _ in range(number)]
    rotated = device.replayed([lambda x=x: cuda_ops.relu(x) for x in sets], QUICK).ms
    resident = device.replayed([lambda: cuda_ops.relu(sets[0])] * len(sets), QUICK).ms
    cold = device.cold(lambda: cuda_ops.relu(sets[0]), QUICK).ms
    assert resident < 0.95 * rotated
    assert cold > resident


@pytest.mark.gpu
@pytest.mark.alone
def test_the_hosts_launching_time_is_counted_only_where_the_host_launches(cuda_ops):
    """A host that sleeps for half a millisecond before each launch delays `hot` calls and no others."""
    from minidl.cuda.spin import spin

    def call():
        time.sleep(5e-4)
        spin(1e-4)

    found = ways(timer(cuda_ops), call)
    assert found["replayed"].ms == pytest.approx(0.1, rel=0.1)
    assert found["cold"].ms == pytest.approx(0.1, rel=0.1)
    assert found["hot"].ms > 0.5
