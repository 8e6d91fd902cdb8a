"""Blocks that several networks share, as functions from node to node."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from minidl import checks
from minidl.graph import Graph, Node, scope
from minidl.initializers import Initializer, kaiming_normal
from minidl.layer import Layer
from minidl.layers import AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Mul, ReLU, Sigmoid

Activation = Callable[..., Layer]
P = ParamSpec("P")


def network(build: Callable[P, Graph]) -> Callable[P, Graph]:
    """``build``, which names itself when it is given an argument that it has not, and tells where weights come from."""

    @wraps(build)
    def named(*args: P.args, **options: P.kwargs) -> Graph:
        if unknown := options.keys() - inspect.signature(build).parameters:
            weights = unknown & {"pretrained", "weights"}
            remedy = "interchange.import_weights(model, path) reads weights from a file" if weights else None
            raise checks.unexpected(build.__name__, sorted(unknown), remedy)
        return build(*args, **options)

    return named


def conv_norm(
    x: Node,
    channels: int,
    kernel: int = 1,
    stride: int = 1,
    *,
    groups: int = 1,
    activation: Activation | None = None,
    names: tuple[str, str, str] = ("0", "1", "2"),
) -> Node:
    """A convolution that keeps the image size at stride 1, batch norm and, where given, an activation.

    Args:
        names: of the three layers.
    """
    conv = Conv2d(
        x.shape[-1], channels, kernel, stride, kernel // 2, groups=groups, bias=False,
        weight_init=kaiming_normal("out"), name=names[0],
    )  # fmt: skip
    y = BatchNorm2d(channels, name=names[1])(conv(x))
    return y if activation is None else activation(name=names[2])(y)


def depthwise_separable(
    x: Node, channels: int, kernel: int = 3, stride: int = 1, *, activation: Activation | None = ReLU
) -> Node:
    """A filter of its own for every channel, then a 1×1 convolution (Howard et al., "MobileNets", 2017).

    Layers: ``depthwise.0``, ``.1``, ``.2`` and ``pointwise.0``, ``.1``, ``.2``: convolution, batch norm, activation.
    """
    with scope("depthwise"):
        x = conv_norm(x, x.shape[-1], kernel, stride, groups=x.shape[-1], activation=activation)
    with scope("pointwise"):
        return conv_norm(x, channels, activation=activation)


def squeeze_excitation(
    x: Node,
    squeeze_channels: int,
    *,
    activation: Activation = ReLU,
    gate: Activation = Sigmoid,
    weight_init: Initializer | None = None,
) -> Node:
    """Scales every channel by a gate that two 1×1 convolutions make of its mean (Hu, Shen and Sun, CVPR 2018).

    Layers: ``avgpool``, ``fc1``, ``activation``, ``fc2``, ``scale_activation``, ``mul``; the names of torchvision.
    """
    y = AdaptiveAvgPool2d(1, name="avgpool")(x)
    y = activation(name="activation")(Conv2d(x.shape[-1], squeeze_channels, 1, weight_init=weight_init, name="fc1")(y))
    y = gate(name="scale_activation")(Conv2d(squeeze_channels, x.shape[-1], 1, weight_init=weight_init, name="fc2")(y))
    return Mul(name="mul")(x, y)


def divisible(channels: float, by: int = 8) -> int:
    """``channels`` rounded to a multiple of ``by``, at least ``by`` and less than a tenth below."""
    rounded = max(by, int(channels + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * channels else rounded
