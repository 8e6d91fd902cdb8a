"""Convolutions shared by ranks, without ranks: who needs which rows, what is refused, what they cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import minidl as m
from minidl import dist, models
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.fusion import fold
from minidl.layers import ChannelParallelConv2d, RowParallelConv2d
from minidl.layers.row_plan import Axis, Rows, plan, share
from tests.parts import Part
from tests.tolerance import assert_same_arrays

AXES = [Axis(*sizes) for sizes in itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2))]


def cases():
    for axis, height, parts in itertools.product(AXES, (7, 8, 12, 13), (1, 2, 3, 4)):
        out = (height + 2 * axis.padding - axis.reach - 1) // axis.stride + 1
        if parts <= min(height, out):
            yield axis, height, parts, out


def needed(axis, out_rows, height):
    """Input rows that output rows read, tap by tap."""
    taps = {p * axis.stride - axis.padding + r * axis.dilation for p in range(*out_rows) for r in range(axis.kernel)}
    return {row for row in taps if 0 <= row < height}


def test_every_rank_gets_the_rows_that_it_needs_and_no_rank_sends_for_nothing():
    seen = set()
    for axis, height, parts, out in cases():
        plans = [plan(height, axis, parts, part) for part in range(parts)]
        seen.add(plans[0].aligned)
        assert [p.rows for p in plans] == [share(height, parts, i) for i in range(parts)]
        assert [p.out for p in plans] == [share(out, parts, i) for i in range(parts)]
        for i, p in enumerate(plans):
            for halo, sizes in ((p.forward, "rows"), (p.backward, "out")):
                for other, rows in halo.receives.items():
                    theirs = getattr(plans[other], sizes)
                    assert other != i and rows.count and rows & theirs == rows
                    mirror = plans[other].forward if halo is p.forward else plans[other].backward
                    assert mirror.sends[i] == rows
                assert sum(len((q.forward if halo is p.forward else q.backward).receives) for q in plans) == sum(
                    len((q.forward if halo is p.forward else q.backward).sends) for q in plans
                )
            read = needed(axis, p.out, height)
            held = {row for rows in (p.rows, *p.forward.receives.values()) for row in range(*rows)}
            assert read <= held, (axis, height, parts, i)
            strips = {row for strip in p.forward.strips for row in range(*strip.target)}
            edge = {row for row in range(*p.out) if needed(axis, (row, row + 1), height) - set(range(*p.rows))}
            assert edge <= strips <= set(range(*p.out))
            if p.aligned and axis.stride == 1:
                assert edge == strips, "rows that need nobody else's are computed once"
    assert seen == {True, False}


def test_gradients_come_from_all_output_rows_that_touch_a_row():
    for axis, height, parts, out in cases():
        for part in range(parts):
            p = plan(height, axis, parts, part)
            held = {row for rows in (p.out, *p.backward.receives.values()) for row in range(*rows)}
            for row in range(*p.rows):
                touching = {q for q in range(out) if row in needed(axis, (q, q + 1), height)}
                assert touching <= held, (axis, height, parts, part, row)


def test_rows_of_the_padding_are_nobodys():
    p = plan(8, Axis(3, 1, 1, 1), 2, 0)
    assert p.aligned and p.rows == p.out == Rows(0, 4)
    assert p.forward.receives == {1: Rows(4, 5)} and p.forward.sends == {1: Rows(3, 4)}
    assert [strip.target for strip in p.forward.strips] == [Rows(3, 4)]
    assert [strip.source for strip in p.forward.strips] == [Rows(2, 5)]
    assert plan(8, Axis(3, 1, 1, 1), 1, 0).forward.strips == ()


def test_one_rank_alone_is_a_plain_convolution(rng):
    x, plain = rng.standard_normal((2, 7, 5, 3)).astype("float32"), m.Conv2d(3, 4, 3, stride=2, padding=1)
    y = plain.forward(x)
    dx = plain.backward(np.ones_like(y))
    for layer in (
        RowParallelConv2d(3, 4, 3, stride=2, padding=1, height=7),
        ChannelParallelConv2d(3, 4, 3, stride=2, padding=1),
    ):
        layer.load_state_dict(plain.state_dict())
        np.testing.assert_array_equal(layer.forward(x), y)
        np.testing.assert_array_equal(layer.backward(np.ones_like(y)), dx)
        for name, view in layer.params.gradients().items():
            np.testing.assert_array_equal(view, plain.params.gradients()[name])


def test_the_parts_start_as_the_whole_and_cost_as_much(cpu_ops):
    whole = m.Conv2d(3, 7, 3, padding=1, name="conv")
    parts = [ChannelParallelConv2d(3, 7, 3, padding=1, group=Part(i, 3), name="conv") for i in range(3)]
    starts = [part.state_dict() for part in parts]
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(np.concatenate([start[name] for start in starts]), value)
    shape = (2, 9, 6, 3)
    flop = [part.cost(shape).forward.flop for part in parts]
    assert sum(flop) == whole.cost(shape).forward.flop and len(set(flop)) == 2
    rows = [RowParallelConv2d(3, 7, 3, padding=1, height=9, group=Part(i, 3)) for i in range(3)]
    assert sum(part.cost((2, 3, 6, 3)).forward.flop for part in rows) == whole.cost(shape).forward.flop


def test_each_pass_asks_for_the_edge_rows_only(cpu_ops):
    group = Part(1, 3)
    layer = RowParallelConv2d(3, 4, 3, padding=1, height=24, group=group, name="conv")
    y = layer.forward(np.zeros((2, 8, 5, 3), "float32"))
    layer.backward(y)
    (forward, sends, receives), (backward, gradients, others) = group.sent
    assert forward == "halo of conv" and sends == receives == {0: (2, 1, 5, 3), 2: (2, 1, 5, 3)}
    assert backward == "halo of the gradient of conv" and gradients == others == {0: (2, 1, 5, 4), 2: (2, 1, 5, 4)}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_kernels_of_a_gpu_take_what_the_layers_give_them(rank):
    with dry_run(BUILT_IN["H200"]):
        from minidl.backend import get_ops

        ops, group = get_ops("cuda"), Part(rank, 3)
        layers = [
            (RowParallelConv2d(16, 24, 3, padding=1, height=30, group=group), 10),
            (RowParallelConv2d(16, 24, 3, height=30, group=group), 10),
            (ChannelParallelConv2d(16, 24, 3, padding=1, group=group), 30),
        ]
        for layer, height in layers:
            x = ops.empty((2, height, 20, 16), m.precision.bfloat16)
            y = layer.forward(x)
            assert layer.backward(y).shape == x.shape


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RowParallelConv2d(3, 4, 3, height=4, group=Part(0, 3)), ValueError, "height must be enough for a row"),
        (lambda: RowParallelConv2d(3, 4, 3, height=0), ValueError, "height must be an integer of at least 1"),
        (lambda: ChannelParallelConv2d(3, 2, 3, group=Part(0, 3)), ValueError, "out_channels must be at least one for"),
        (
            lambda: RowParallelConv2d(3, 4, 3, height=8, group=Part(1, 2)).output_shape((1, 8, 8, 3)),
            ValueError,
            r"x must have shape \(N, 4, W, C\), got \(1, 8, 8, 3\); rank 1 of 2 holds rows 4 to 7",
        ),
        (lambda: m.BatchNorm2d(3, sync=2), TypeError, "sync must be True, False or a communicator, got 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("kind", [RowParallelConv2d, ChannelParallelConv2d])
def test_batch_norms_fold_into_convolutions_that_hold_all_filters(kind, rng, cpu_ops):
    graph = m.Graph()
    options = {"height": 8} if kind is RowParallelConv2d else {}
    conv = kind(3, 4, 3, padding=1, name="conv", **options)
    graph.output(m.BatchNorm2d(4, name="bn")(conv(graph.input((8, 6, 3)))))
    model, x = m.Model(graph), rng.standard_normal((2, 8, 6, 3)).astype("float32")
    model.forward(x)
    expected = model.eval().forward(x)
    assert fold(model) == (["bn"] if kind is RowParallelConv2d else [])
    np.testing.assert_allclose(model.forward(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", range(4))
def test_a_network_by_rows_has_the_same_names_weights_and_shapes(rank, cpu_ops):
    whole = models.unet(3, (64, 48, 3), width=4, depth=3)
    part = models.by_rows(whole, Part(rank, 4))
    assert [node.name for node in part.nodes] == [node.name for node in whole.nodes]
    for own, node in zip(part.nodes, whole.nodes, strict=True):
        assert own.shape == (node.shape[0] // 4, *node.shape[1:]) and own.layer is not node.layer or own.index == 0
    kinds = {type(node.layer).__name__ for node in part.nodes[1:]}
    assert "RowParallelConv2d" in kinds and all(
        node.layer.sync.size == 4 for node in part.nodes[1:] if isinstance(node.layer, m.BatchNorm2d)
    )
    one = m.Model(models.by_rows(models.unet(3, (64, 48, 3), width=4, depth=3), dist.SOLO), seed=5)
    assert_same_arrays(one.state_dict(), m.Model(whole, seed=5).state_dict())


@pytest.mark.parametrize(
    ("make", "ranks", "layer"),
    [
        (lambda: models.unet(2, (32, 32, 3), width=2, depth=3), 3, "down1.maxpool_conv.0"),
        (
            lambda: models.unet(2, (16, 16, 3), width=2, depth=3),
            4,
            "down2.maxpool_conv.1.double_conv.0|down3.maxpool_conv.0",
        ),
        (lambda: models.resnet18(10, (64, 64, 3)), 2, "maxpool"),
        (lambda: models.vgg16(10, (64, 64, 3)), 2, "avgpool"),
    ],
)
def test_networks_whose_rows_cannot_be_shared_are_refused_alike_on_every_rank(make, ranks, layer):
    told = set()
    for rank in range(ranks):
        with pytest.raises(ValueError, match=f"^({layer}): (rows|height) must be") as error:
            models.by_rows(make(), Part(rank, ranks))
        told.add(str(error.value))
    assert len(told) == 1


def test_a_model_must_add_up_the_gradients_of_rows(cpu_ops):
    graph = m.Graph()
    graph.output(RowParallelConv2d(3, 4, 3, padding=1, height=8, group=Part(0, 2))(graph.input((4, 8, 3))))
    with pytest.raises(RuntimeError, match="sums over the group, which nobody adds up; give Model a communicator"):
        m.Model(graph)
