"""MobileNetV2 (Sandler et al., "Inverted Residuals and Linear Bottlenecks", CVPR 2018), with torchvision's names."""

from __future__ import annotations

from minidl import checks
from minidl.graph import Graph, Node, scope
from minidl.layers import AdaptiveAvgPool2d, Add, Dropout, Flatten, Linear, ReLU6
from minidl.models.blocks import conv_norm, divisible, network

# expansion, channels, blocks, stride of the first
_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


def _inverted_residual(x: Node, channels: int, stride: int, expansion: int) -> Node:
    """Widen by 1×1, filter channel by channel, narrow by 1×1 without an activation; added to ``x`` where it fits."""
    y, index = x, 0
    with scope("conv"):
        if expansion != 1:
            with scope(f"{index}"):
                y = conv_norm(y, expansion * x.shape[-1], activation=ReLU6)
            index += 1
        with scope(f"{index}"):
            y = conv_norm(y, y.shape[-1], 3, stride, groups=y.shape[-1], activation=ReLU6)
        y = conv_norm(y, channels, names=(f"{index + 1}", f"{index + 2}", ""))
    return Add()(x, y) if stride == 1 and x.shape[-1] == channels else y


@network
def mobilenet_v2(
    num_classes: int = 1000,
    image_shape: tuple[int, int, int] = (224, 224, 3),
    width: float = 1.0,
    dropout: float = 0.2,
) -> Graph:
    """Seventeen inverted residuals between a strided 3×3 and a 1×1 convolution; ``width`` scales all channels."""
    checks.number("mobilenet_v2", "width", width, "above 0, finite", lambda v: 0 < v < float("inf"))
    graph = Graph()
    x = graph.input(image_shape)
    with scope("features"):
        with scope("0"):
            x = conv_norm(x, divisible(32 * width), 3, 2, activation=ReLU6)
        index = 1
        for expansion, channels, depth, stride in _STAGES:
            for i in range(depth):
                with scope(f"{index}"):
                    step = stride if i == 0 else 1
                    x = _inverted_residual(x, divisible(channels * width), step, expansion)
                index += 1
        with scope(f"{index}"):
            x = conv_norm(x, divisible(1280 * max(1.0, width)), activation=ReLU6)
    x = Flatten()(AdaptiveAvgPool2d(1, name="avgpool")(x))
    with scope("classifier"):
        x = Dropout(dropout, name="0")(x)
        return graph.output(Linear(x.shape[-1], num_classes, name="1")(x))
