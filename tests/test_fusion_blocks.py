"""Laws of batch norms over concatenations, under poolings and under one sum: as in separate passes, in fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import fusion, models
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16
from minidl.store import tensor_key
from tests.test_fusion import BOUND, close, fused, run


def dense():
    """Two dense blocks: concatenations of concatenations, which batch norms read, but for the last of a block."""
    graph = m.Graph()
    x = graph.input((6, 6, 3))
    x = m.Conv2d(3, 16, 3, padding=1, bias=False, name="stem")(x)
    for block in range(2):
        for i in range(3):
            with m.scope(f"{block}.{i}"):
                y = m.ReLU(name="relu1")(m.BatchNorm2d(x.shape[-1], name="norm1")(x))
                y = m.Conv2d(x.shape[-1], 16, 1, bias=False, name="conv1")(y)
                y = m.ReLU(name="relu2")(m.BatchNorm2d(16, name="norm2")(y))
                x = m.Concat()(x, m.Conv2d(16, 8, 3, padding=1, bias=False, name="conv2")(y))
        if block == 0:
            x = m.Conv2d(x.shape[-1], 16, 1, bias=False, name="between")(m.AvgPool2d(2, name="pool")(x))
    return graph.output(m.Linear(9 * 40, 5, name="fc")(m.Flatten()(m.ReLU(name="last")(x))))


def pooling():
    """Max poolings over batch norms: windows that overlap, leave pixels out, dilate; one without parameters."""
    graph = m.Graph()
    x = graph.input((22, 22, 3))
    windows = [(3, 2, 1, 1), (2, 3, 0, 1), (2, 1, 1, 2)]
    for i, window in enumerate(windows):
        x = m.Conv2d(x.shape[-1], 8 * (i + 1), 3, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(8 * (i + 1), name=f"bn{i}", affine=i != 1)(x))
        x = m.MaxPool2d(*window, name=f"pool{i}")(x)
    return graph.output(m.Linear(384, 5, name="fc")(m.Flatten()(x)))


def skipping():
    """A U-Net of one level: a pooling reads the ReLU that is passed by, too."""
    graph = m.Graph()

    def block(x, name, width):
        x = m.Conv2d(x.shape[-1], width, 3, padding=1, bias=False, name=f"{name}.conv")(x)
        return m.ReLU(name=f"{name}.relu")(m.BatchNorm2d(width, name=f"{name}.bn")(x))

    skip = block(graph.input((6, 6, 3)), "down", 8)
    x = block(m.MaxPool2d(2, name="pool")(skip), "bottom", 16)
    x = m.Concat(name="join")(skip, m.ConvTranspose2d(16, 8, 2, stride=2, name="up")(x))
    return graph.output(m.Linear(288, 5, name="fc")(m.Flatten()(block(x, "top", 8))))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [dense, pooling, skipping])
def test_every_plan_computes_the_same(ops, build, precision):
    plain, *others = (run(fused(build, how, ops, precision=precision)) for how in fusion.PLANS)
    for taken in others:
        close(plain, taken, BOUND if precision == "fp32" else 2.0**-6)


@pytest.mark.parametrize("how", ["elementwise", "gradients"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_pooled_batch_norm_is_that_of_separate_passes(ops, precision, how):
    """Backward but for the rounding of a pixel's gradient, which the sums then do not see."""
    apart, pooled = (run(fused(pooling, plan, ops, precision=precision)) for plan in ("none", how))
    close(apart, pooled, {"fp32": BOUND, "bf16": 2.0**-6, "fp16": 2.0**-9}[precision])


def test_what_is_pooled_is_not_written(cpu_ops, monkeypatch):
    model, calls = fused(pooling, "elementwise", cpu_ops), []
    for name in ("batch_norm_max_pool2d", "batch_norm_max_pool2d_backward", "batch_norm_activate_backward_stats"):
        own = getattr(cpu_ops, name)
        monkeypatch.setattr(cpu_ops, name, lambda *a, own=own, name=name, **o: calls.append(name) or own(*a, **o))
    run(model, steps=1)
    assert calls.count("batch_norm_max_pool2d") == calls.count("batch_norm_max_pool2d_backward") == 2
    assert calls.count("batch_norm_activate_backward_stats") == 1  # of the one without parameters


def test_what_was_pooled_is_masked_and_summed_by_the_convolution_above():
    """No pass of its own reads it for that, also where a projection reads the pooling beside."""
    from minidl import cuda as ops

    found = {}
    for how in ("statistics", "gradients"):
        with dry_run() as log:
            model = fused(lambda: models.build("resnet50", (64, 64, 3), 10), how, ops, precision="bf16")
            loss = m.SoftmaxCrossEntropy()
            loss.forward(model.forward(ops.empty((4, 64, 64, 3), bfloat16)), ops.empty((4,), np.int32))
            before = len(log.launches)
            model.backward(loss.backward())
        names = [launch.name for launch in log.launches[before:]]
        at = names.index("batch_norm_max_pool2d_backward")
        found[how] = names[at - 2 : at]
        (site,) = (site for site in fusion.find_sites(model.graph) if site.pooled)
        assert site.masking == ("layer1.0.conv1",) and site.passed_on is None
    assert found["statistics"] == ["batch_norm_backward_stats_kernel", "batch_norm_backward_merge_kernel"]
    assert found["gradients"][1] == "batch_norm_backward_merge_kernel" and "stats" not in found["gradients"][0]


def test_what_a_sum_of_two_batch_norms_wants_is_taken_by_the_convolution_above(monkeypatch):
    """Of both, where that is of 1x1: no pass reads the masked gradient for the second one's."""
    from minidl import cuda as ops

    passes = {"batch_norm_backward_stats_kernel", "batch_norm_backward_apply_stats_kernel"}
    makes = ops.conv2d_makes_both

    def launches(name):
        with dry_run() as log:
            model = fused(lambda: models.build(name, (64, 64, 3), 10), "bnff", ops, precision="bf16")
            loss = m.SoftmaxCrossEntropy()
            loss.forward(model.forward(ops.empty((4, 64, 64, 3), bfloat16)), ops.empty((4,), np.int32))
            before = len(log.launches)
            model.backward(loss.backward())
        return [(launch.name, dict(launch.defines)) for launch in log.launches[before:]]

    for name, most in (("resnet50", 4), ("resnet18", 0)):
        found = launches(name)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "conv2d_takes_pair", lambda *_, **__: False)
            patch.setattr(ops, "conv2d_makes_both", lambda *a, below=0, **n: below < 2 and makes(*a, below=below, **n))
            apart = launches(name)
        taken, none = (
            sum(defines.get("MASKED") == 5 or (kernel == "conv2d_both_wide_kernel" and defines["BELOW"] == 2)
                for kernel, defines in one)
            for one in (found, apart)
        )  # fmt: skip
        assert (taken, none) == (most, 0), name
        assert sum(k in passes for k, _ in apart) - sum(k in passes for k, _ in found) == most, name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("how", ["none", "statistics", "bnff"])
@pytest.mark.parametrize("build", [dense, skipping])
def test_buffers_that_concatenations_share_change_no_bit(ops, build, how, precision):
    apart, shared = (fused(build, how, ops, precision=precision) for _ in range(2))
    for layer in apart.layers:
        if hasattr(layer, "room"):
            layer.room, layer.continues = 0, False
    close(run(apart), run(shared), 0.0)


def skipping_twice(first=True, **window):
    """Two readers beside the pooling, which stands before them or between; of images of odd sizes it drops a line."""
    graph = m.Graph()
    x = m.Conv2d(3, 8, 3, padding=1, bias=False, name="conv")(graph.input((7, 5, 3)))
    skip = m.ReLU(name="relu")(m.BatchNorm2d(8, name="bn")(x))
    if first:
        pooled = m.MaxPool2d(2, name="pool", **window)(skip)
    before = m.Conv2d(8, 4, 3, padding=1, name="before")(skip)
    if not first:
        pooled = m.MaxPool2d(2, name="pool", **window)(skip)
    pooled = m.Conv2d(8, 4, 1, name="above")(pooled)
    behind = m.Concat(name="join")(skip, m.Conv2d(8, 4, 1, name="behind")(skip), before)
    flat = m.Linear(7 * 5 * 16, 5, name="fc0")(m.Flatten(name="flat0")(behind))
    shape = pooled.shape[0] * pooled.shape[1] * pooled.shape[2]
    return graph.output(m.Add(name="sum")(flat, m.Linear(shape, 5, name="fc1")(m.Flatten(name="flat1")(pooled))))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("how", ["elementwise", "gradients"])
@pytest.mark.parametrize(
    "build",
    [skipping, skipping_twice, lambda: skipping_twice(ceil_mode=True), lambda: skipping_twice(first=False)],
    ids=["concatenated", "first", "overhanging", "between"],
)
def test_pooling_beside_other_readers_is_that_of_a_pass_of_its_own(ops, build, how, precision):
    """But for the order of the batch norm's sums."""
    apart, beside = (fused(build, how, ops, precision=precision) for _ in range(2))
    for layer in apart.layers:
        if isinstance(layer, m.ReLU):
            layer.tiles = None
    close(run(apart), run(beside), {"fp32": BOUND, "bf16": 2.0**-7, "fp16": 2.0**-10}[precision])


def test_what_is_pooled_beside_others_is_not_read_for_that(cpu_ops, monkeypatch):
    names = ("batch_norm_max_tiles", "batch_norm_max_tiles_backward_stats", "batch_norm_max_tiles_backward_apply")
    calls, others = [], ("max_pool2d", "max_pool2d_backward")
    for name in (*names, *others):
        own = getattr(cpu_ops, name)
        monkeypatch.setattr(cpu_ops, name, lambda *a, own=own, name=name, **o: calls.append(name) or own(*a, **o))
    for build, expected in (
        (skipping, names),
        (skipping_twice, names),
        (lambda: skipping_twice(first=False), (names[0], *others)),  # another reader's kernel adds what comes from it
        (lambda: skipping_twice(stride=1), others),  # windows that overlap
    ):
        calls.clear()
        run(fused(build, "elementwise", cpu_ops), steps=1)
        assert sorted(set(calls)) == sorted(expected) and len(calls) <= len(expected) + 1
    calls.clear()
    run(fused(skipping, "none", cpu_ops), steps=1)
    assert calls == list(others)


def test_what_a_concatenation_continues_is_written_into_its_buffer(cpu_ops, monkeypatch):
    copied = _copies(cpu_ops, monkeypatch)
    model = fused(skipping, "elementwise", cpu_ops)
    copied.clear()
    x = np.ones((2, 6, 6, 3), np.float32)
    model.forward(x)
    assert not copied, "the convolution writes the other part there"
    model.forward(x, grad=False)
    assert copied == [], "nobody waits for a buffer that nothing keeps"


def _copies(ops, monkeypatch):
    """Where ``copy_into`` copies anything: the channels, of each call to come."""
    copied, own = [], ops.copy_into

    def copy_into(out, x):
        if tensor_key(out) != tensor_key(x):
            copied.append(x.shape[-1])
        own(out, x)

    monkeypatch.setattr(ops, "copy_into", copy_into)
    return copied


def test_concatenations_of_a_block_lie_in_one_buffer(cpu_ops, monkeypatch):
    model, copied = fused(dense, "statistics", cpu_ops), _copies(cpu_ops, monkeypatch)
    model.forward(np.ones((2, 6, 6, 3), np.float32))
    assert copied == 2 * [16, 8], "what lies in no buffer yet; convolutions write the rest there"
    rooms = [(layer.room, layer.continues) for layer in model.layers if isinstance(layer, m.Concat)]
    assert rooms == 2 * [(16, False), (8, True), (0, True)]


def test_two_that_continue_one_concatenation_do_not_share_its_buffer(ops):
    graph = m.Graph()
    x = graph.input((4, 4, 8))
    x = m.Concat(name="first")(x, m.Conv2d(8, 8, 1, name="a")(x))
    left = m.Concat(name="left")(x, m.Conv2d(16, 8, 1, name="b")(x))
    right = m.Concat(name="right")(x, m.Conv2d(16, 8, 1, name="c")(x))
    model = m.Model(graph.output(m.Add(name="add")(left, right)), device=ops.name)
    assert not any(layer.room or layer.continues for layer in model.layers if isinstance(layer, m.Concat))


def test_a_transposed_convolution_masks_the_gradient_that_it_alone_gives(cpu_ops, monkeypatch):
    (site,) = (s for s in fusion.find_sites(skipping()) if s.name == "bottom.bn")
    assert site.taker == "up" and not site.sole and site.passed_on is None
    taken, own = [], cpu_ops.conv2d_backward_data_masked
    monkeypatch.setattr(
        cpu_ops, "conv2d_backward_data_masked", lambda *a, **o: taken.append(o.get("transposed", False)) or own(*a, **o)
    )
    run(fused(skipping, "gradients", cpu_ops), steps=1)
    assert taken == [True]


def test_statistics_of_a_concatenation_are_taken_once(cpu_ops, monkeypatch):
    """Of the block's first part, once for itself and once for the concatenations; of what is added, by convolutions."""
    taken, own = [], cpu_ops.batch_norm_stats
    monkeypatch.setattr(cpu_ops, "batch_norm_stats", lambda x, **o: taken.append(x.shape[-1]) or own(x))
    run(fused(dense, "statistics", cpu_ops), steps=1)
    assert sorted(taken) == [16] * 4
    taken.clear()
    run(fused(dense, "elementwise", cpu_ops), steps=1)
    assert sorted(taken) == 8 * [16] + 2 * [24] + 2 * [32]


def projected(crossed):
    """A block and its projection, which comes behind it as in a ResNet, or before and stands second all the same."""
    graph = m.Graph()

    def norm(x, channels, name, kernel=3):
        conv = m.Conv2d(channels, 16, kernel, padding=kernel // 2, bias=False, name=f"{name}.conv")(x)
        return m.BatchNorm2d(16, name=f"{name}.bn")(conv)

    x = m.ReLU(name="relu0")(norm(graph.input((6, 6, 24)), 24, "stem"))
    side = norm(x, 16, "side", 1) if crossed else None
    main = norm(x, 16, "main")
    x = m.ReLU(name="relu1")(m.Add(name="add")(main, side or norm(x, 16, "side", 1)))
    x = m.ReLU(name="relu2")(norm(x, 16, "last"))
    return graph.output(m.Linear(36 * 16, 5, name="fc")(m.Flatten()(x)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("crossed", [False, True])
def test_the_sums_of_two_batch_norms_below_one_sum(ops, crossed, precision):
    """The bits of passes of their own, where no convolution masks the gradient on the way."""
    found = [
        run(fused(lambda: projected(crossed), how, ops, precision=precision)) for how in ("elementwise", "gradients")
    ]
    close(*found, 0.0 if ops.name == "cpu" or precision == "fp32" else 2.0**-6)


@pytest.mark.parametrize("crossed", [False, True])
def test_a_projection_behind_its_block_takes_the_sums_of_both(cpu_ops, crossed, monkeypatch):
    calls, own = [], cpu_ops.batch_norm_backward_apply_stats
    monkeypatch.setattr(cpu_ops, "batch_norm_backward_apply_stats", lambda *a: calls.append(1) or own(*a))
    run(fused(lambda: projected(crossed), "gradients", cpu_ops), steps=1)
    assert len(calls) == (not crossed)
