"""Operations that are prepared: a call that is made again hands the driver just what it would hand over alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from minidl import cuda as ops
from minidl.cuda import launch as launch_module
from minidl.cuda import prepared
from minidl.cuda.convolution import conv2d_tuned
from minidl.cuda.convolution.conv2d_family import Choice, Question, family
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN, unprepared
from minidl.precision import bfloat16, float32
from tests import kernel_calls, stand_in, test_cuda_compile

CALLS = kernel_calls.CALLS | {
    name.removeprefix("call_"): call for name, call in vars(test_cuda_compile).items() if name.startswith("call_")
}
ASIDE = {"all_reduce", "ceiling", "spin", "csb", "csb_conv2d", "csb_sampled"}  # of which nothing is prepared
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


@pytest.fixture
def driver(monkeypatch):
    return stand_in.install(monkeypatch)


@pytest.fixture
def runs(monkeypatch):
    """How often each operation has been run, not started from what is known of it."""
    counts, genuine = {}, prepared._prepare

    def counted(operation, *rest):
        counts[operation.__name__] = counts.get(operation.__name__, 0) + 1
        return genuine(operation, *rest)

    for calls in prepared._known:
        monkeypatch.setattr(calls, "prepare", counted)
    return counts


def _calls(driver, work, address):
    """What the driver gets of some work whose arrays begin at an address."""
    driver.calls.clear()
    stand_in.Array.next = address
    work()
    return list(driver.calls)


@pytest.mark.parametrize("name", sorted(CALLS.keys() - ASIDE))
def test_calls_made_again_are_those_of_the_operation_itself(driver, name):
    first = _calls(driver, CALLS[name], 2**40)
    again = _calls(driver, CALLS[name], 2**41 + 2**20)
    with unprepared():
        alone = _calls(driver, CALLS[name], 2**41 + 2**20)
        before = _calls(driver, CALLS[name], 2**40)
    assert len(again) == len(alone) > 0
    assert again == alone and first == before


def test_an_operation_decides_once_for_each_shape_type_setting_and_alignment(driver, runs):
    x, w = ops.empty((2, 8, 8, 64), bfloat16), ops.empty((64, 3, 3, 64), bfloat16)
    for _ in range(3):
        ops.conv2d(ops.empty(x.shape, bfloat16), w, **CONV)
    assert runs == {"conv2d": 1}
    other = ops.empty((2, 8, 8, 96), bfloat16)
    for call in (
        lambda: ops.conv2d(ops.empty((3, 8, 8, 64), bfloat16), w, **CONV),
        lambda: ops.conv2d(ops.empty(x.shape, float32), ops.empty(w.shape, float32), **CONV),
        lambda: ops.conv2d(x, w, **(CONV | {"padding": (0, 1)})),
        lambda: ops.conv2d(x, w, relu=True, **CONV),
        lambda: ops.conv2d(other[..., :64], w, **CONV),
        lambda: ops.conv2d(ops.empty(x.size + 1, bfloat16)[1:].reshape(x.shape), w, **CONV),
        lambda: ops.conv2d(x, w, ops.empty(64, float32), **CONV),
    ):
        before = runs["conv2d"]
        call()
        call()
        assert runs["conv2d"] == before + 1
    ops.add(x, x)
    ops.add(x, ops.empty(x.shape, bfloat16))
    ops.add(x, x)
    assert runs["add"] == 2, "one array twice, or two"
    ops.activate(x, "leaky_relu", 0.0)
    ops.activate(x, "leaky_relu", -0.0)
    ops.activate(x, "relu", 0.0)
    assert runs["activate"] == 3


def test_what_is_wrong_is_refused_every_time(driver):
    x, w = ops.empty((2, 8, 8, 64), bfloat16), ops.empty((64, 3, 3, 64), bfloat16)
    for _ in range(2):
        ops.conv2d(x, w, **CONV)
        with pytest.raises(ValueError, match=r"conv2d: w.*64 / 1"):
            ops.conv2d(x, ops.empty((64, 3, 3, 32), bfloat16), **CONV)
        with pytest.raises(TypeError, match="conv2d: w .*bfloat16.*float32"):
            ops.conv2d(x, ops.empty(w.shape, float32), **CONV)
        with pytest.raises(ValueError, match="unknown activation"):
            ops.activate(x, "rely")
    driver.calls.clear()
    with pytest.raises(TypeError):
        ops.conv2d(x, w, **CONV, dilute=1)
    assert not driver.calls


def test_a_launch_that_fails_names_the_kernel_each_time(driver, monkeypatch):
    monkeypatch.setattr(launch_module, "_words", lambda code: f"the driver's word for {code}")
    x = ops.empty((2, 8, 8, 64), bfloat16)
    for code in (0, 701, 701):
        driver.code = code
        if code:
            with pytest.raises(RuntimeError, match="kernel activate_kernel of activation.cu .*for 701"):
                ops.relu(x)
        else:
            ops.relu(x)


def test_nothing_is_prepared_where_it_could_matter(driver, runs):
    x, w = ops.empty((2, 8, 8, 64), bfloat16), ops.empty((64, 3, 3, 64), bfloat16)
    seen = []

    def observer(stem, name, defines):
        seen.append(name)
        return unprepared()

    ops.conv2d(x, w, **CONV)
    hopper = driver.calls[-1][0]
    with family("generic"):
        ops.conv2d(x, w, **CONV)
    assert driver.calls[-1][0] != hopper
    with launch_module.observed(observer):
        ops.conv2d(x, w, **CONV)
    assert seen == [hopper[2]] and driver.calls[-1][0] == hopper
    with launch_module.dry_run() as log:
        ops.relu(ops.empty(x.shape, bfloat16))
    assert len(log.launches) == 1 and runs == {"conv2d": 1}


def test_another_table_of_kernels_is_heeded(driver):
    x, w = ops.empty((2, 8, 8, 64), bfloat16), ops.empty((64, 3, 3, 64), bfloat16)
    ops.conv2d(x, w, **CONV)
    before = driver.calls[-1][0]
    question = Question("forward", convolution("", x.shape, w.shape, **CONV), 1, False)
    conv2d_tuned.install(conv2d_tuned.Table(BUILT_IN["H200"].name, {question: Choice("generic")}))
    ops.conv2d(x, w, **CONV)
    assert driver.calls[-1][0] != before


def test_an_operation_that_works_elsewhere_is_run_each_time(driver):
    kept, ran = ops.empty(8, float32), []

    @prepared.prepared
    def to_kept(x):
        ran.append(x)
        launch_module.launch("array", "k", 1, 32, kept, x)
        return x

    @prepared.prepared
    def of_object(x):
        ran.append(x)

    for _ in range(3):
        assert to_kept(kept[:4]) is not None
    assert len(ran) == 3 and len(driver.calls) == 3
    for _ in range(3):
        of_object(SimpleNamespace(array=kept))
    assert len(ran) == 6


def test_threads_may_make_the_same_call_at_the_same_time(driver):
    x = ops.empty((4, 64), float32)
    found = {}

    def work(number):
        mine = [ops.empty((4, 64), float32) for _ in range(100)]
        found[number] = [(one.data.ptr, ops.relu(one).data.ptr) for one in mine]

    ops.relu(x)
    driver.calls.clear()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = {tuple(int.from_bytes(part, "little") for part in call[3][:2]) for call in driver.calls}
    assert pairs == {pair for one in found.values() for pair in one} and len(driver.calls) == 400


@pytest.mark.gpu
def test_results_have_the_bits_of_the_operation_itself(cuda_ops, rng):
    """And inputs may lie elsewhere, and change, from call to call."""
    import cupy

    for shape in ((2, 9, 7, 64), (2, 9, 7, 24)):
        for _ in range(3):
            x = cupy.asarray(rng.standard_normal(shape), np.float32).astype(bfloat16)
            w = cupy.asarray(rng.standard_normal((32, 3, 3, shape[-1])), np.float32).astype(bfloat16)
            results = []
            for alone in (False, True):
                with unprepared() if alone else launch_module.overlapping(True):
                    y, stats = ops.conv2d_stats(x, w, **CONV, finish=False)
                    moments, count = ops.batch_norm_finalize(stats, 1e-5)
                    z = ops.batch_norm_apply(y, moments, relu=True)
                    dx = ops.conv2d_backward_data(z, w, x.shape, add=x, **CONV)
                    gradient = ops.empty(w.shape, np.float32)
                    ops.conv2d_backward_weight(z, x, out=gradient, **CONV)
                    results.append([a.view(np.uint8).get() for a in (y, moments, count, z, dx, gradient)])
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(one, other)
