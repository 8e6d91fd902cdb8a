"""EfficientNet-B0 (Tan and Le, "EfficientNet: Rethinking Model Scaling", ICML 2019), with torchvision's names."""

from __future__ import annotations

from minidl import checks
from minidl.graph import Graph, Node, scope
from minidl.initializers import kaiming_normal
from minidl.layers import AdaptiveAvgPool2d, Add, Dropout, Flatten, Linear, SiLU, StochasticDepth
from minidl.models.blocks import conv_norm, squeeze_excitation

# expansion, kernel, stride of the first block, channels, blocks
_STAGES = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)  # fmt: skip
_SQUEEZE = 4  # a block's input channels over those of its squeeze


def _mb_conv(x: Node, channels: int, kernel: int, stride: int, expansion: int, drop: float) -> Node:
    """Widen by 1×1, filter channel by channel, gate, narrow by 1×1; added to ``x`` where it fits, or left out."""
    y, index = x, 0
    with scope("block"):
        if expansion != 1:
            with scope("0"):
                y = conv_norm(y, expansion * x.shape[-1], activation=SiLU)
            index = 1
        with scope(f"{index}"):
            y = conv_norm(y, y.shape[-1], kernel, stride, groups=y.shape[-1], activation=SiLU)
        with scope(f"{index + 1}"):
            squeezed = max(1, x.shape[-1] // _SQUEEZE)
            y = squeeze_excitation(y, squeezed, activation=SiLU, weight_init=kaiming_normal("out"))
        with scope(f"{index + 2}"):
            y = conv_norm(y, channels)
    if stride != 1 or x.shape[-1] != channels:
        return y
    return Add()(x, StochasticDepth(drop, name="stochastic_depth")(y))


def efficientnet_b0(
    num_classes: int = 1000,
    image_shape: tuple[int, int, int] = (224, 224, 3),
    dropout: float = 0.2,
    stochastic_depth: float = 0.2,
) -> Graph:
    """Sixteen gated inverted residuals between a strided 3×3 and a 1×1 convolution.

    Args:
        stochastic_depth: in training, block i of 16 leaves out a sample's branch with i/16 of this probability.
    """
    checks.number("efficientnet_b0", "stochastic_depth", stochastic_depth, "in [0, 1)", lambda p: 0 <= p < 1)
    graph, blocks = Graph(), sum(depth for *_, depth in _STAGES)
    built = 0
    x = graph.input(image_shape)
    with scope("features"):
        with scope("0"):
            x = conv_norm(x, 32, 3, 2, activation=SiLU)
        for stage, (expansion, kernel, stride, channels, depth) in enumerate(_STAGES, start=1):
            for i in range(depth):
                with scope(f"{stage}.{i}"):
                    drop = stochastic_depth * built / blocks
                    x = _mb_conv(x, channels, kernel, stride if i == 0 else 1, expansion, drop)
                built += 1
        with scope(f"{len(_STAGES) + 1}"):
            x = conv_norm(x, 1280, activation=SiLU)
    x = Flatten()(AdaptiveAvgPool2d(1, name="avgpool")(x))
    with scope("classifier"):
        x = Dropout(dropout, name="0")(x)
        return graph.output(Linear(x.shape[-1], num_classes, name="1")(x))
