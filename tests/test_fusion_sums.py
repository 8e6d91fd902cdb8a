"""Residual sums under any plan: made once for all who read them, by a pass that owns the work; the same numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import minidl as m
from minidl import fusion, models
from minidl.cuda.launch import dry_run
from minidl.memory.record import blank, record_step
from tests.test_fusion import BOUND, close, fused, run


def _normed(x, name: str, kernel: int = 3):
    x = m.Conv2d(x.shape[-1], 8, kernel, padding=kernel // 2, bias=False, name=f"{name}.conv")(x)
    return m.BatchNorm2d(8, name=f"{name}.bn")(x)


def chained():
    """As inverted residuals: each sum is read by a convolution and by the next sum, the last by who takes no notes."""
    graph = m.Graph()
    x = _normed(graph.input((6, 6, 3)), "stem")
    for i in range(3):
        x = m.Add(name=f"add{i}")(x, _normed(m.ReLU(name=f"relu{i}")(_normed(x, f"in{i}")), f"out{i}", 1))
    return graph.output(m.Linear(288, 5, name="fc")(m.Flatten(name="flat")(x)))


def crossed():
    """Sums and ReLUs of sums whose other readers, and other summands, take nothing unfinished."""
    graph = m.Graph()
    x = m.ReLU(name="relu")(_normed(graph.input((6, 6, 3)), "stem"))
    y = m.Add(name="add0")(m.AvgPool2d(3, 1, 1, name="pool")(x), _normed(x, "a"))
    y = m.ReLU(name="relu0")(y)
    z = m.Add(name="add1")(_normed(y, "b"), m.AvgPool2d(3, 1, 1, name="blur")(y))
    w = m.Concat(name="join")(z, m.AvgPool2d(3, 1, 1, name="more")(z))
    return graph.output(m.Linear(16 * 36, 5, name="fc")(m.Flatten(name="flat")(w)))


def ending():
    """A network whose output is a sum."""
    graph = m.Graph()
    x = _normed(graph.input((6, 6, 3)), "stem")
    return graph.output(m.Add(name="add")(_normed(x, "a"), x))


NETWORKS = [chained, crossed, ending]


@pytest.mark.parametrize("build", [chained, crossed])
def test_every_plan_computes_the_same(ops, build):
    plain, *others = (run(fused(build, how, ops)) for how in fusion.PLANS)
    for other in others:
        close(plain, other, BOUND)


_MAKES = {"apply", "join"}  # kernels that make what a batch norm gives, alone or within a sum


class _Count:
    def __init__(self):
        self.kernels = Counter()

    def allocated(self, array) -> None:
        pass

    def launched(self, name, arguments) -> None:
        self.kernels[name] += 1


@pytest.mark.parametrize("how", fusion.PLANS)
@pytest.mark.parametrize("build", [*NETWORKS, lambda: models.build("mobilenet_v2", (32, 32, 3), 5)])
def test_each_batch_norm_is_applied_once(build, how):
    """Forward: however many layers read the sum that it is a part of."""
    with dry_run() as log:
        model = m.Model(blank(build()), device="cuda")
        fusion.fuse(model, how)
        x = model.ops.zeros((4, *model.graph.nodes[0].shape), np.dtype(np.float32))
        log.watcher = count = _Count()
        model.forward(x)
    norms = sum(isinstance(layer, m.BatchNorm2d) for layer in model.layers)
    applied = sum(
        n for name, n in count.kernels.items() if name.startswith("batch_norm") and _MAKES & {*name.split("_")}
    )
    assert applied <= norms and (how != "none" or applied == norms)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", fusion.PLANS)
@pytest.mark.parametrize("build", NETWORKS)
def test_all_work_is_some_pass_of_some_layer(build, how, precision):
    """Else no profile would tell it and no memory plan could hold it; `record` refuses it."""
    with dry_run():
        model = m.Model(blank(build()), device="cuda", precision=precision)
        fusion.fuse(model, how)
        for input_grad in (False, True):
            trace = record_step(model.graph.unbound(), 4, precision=precision, input_grad=input_grad).trace
            assert {step.name for step in trace.steps} <= {node.name for node in model.graph.nodes} | {
                "loss",
                "optimizer",
            }
