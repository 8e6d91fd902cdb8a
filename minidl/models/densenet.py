"""DenseNet-121 (Huang et al., "Densely Connected Convolutional Networks", CVPR 2017), with torchvision's names."""

from __future__ import annotations

from minidl.graph import Graph, Node, scope
from minidl.initializers import kaiming_normal
from minidl.layers import AdaptiveAvgPool2d, AvgPool2d, BatchNorm2d, Concat, Conv2d, Flatten, Linear, MaxPool2d, ReLU
from minidl.models.blocks import network

_GROWTH = 32
_BOTTLENECK = 4  # a 1×1 convolution first reduces to this many times the growth


def _norm_relu(x: Node, index: str) -> Node:
    return ReLU(name=f"relu{index}")(BatchNorm2d(x.shape[-1], name=f"norm{index}")(x))


def _conv(x: Node, channels: int, kernel: int, name: str, stride: int = 1) -> Node:
    return Conv2d(
        x.shape[-1], channels, kernel, stride, kernel // 2, bias=False, weight_init=kaiming_normal("in"), name=name
    )(x)


def _dense_layer(x: Node) -> Node:
    """32 new channels from all channels so far, and all of them concatenated."""
    y = _conv(_norm_relu(x, "1"), _BOTTLENECK * _GROWTH, 1, "conv1")
    y = _conv(_norm_relu(y, "2"), _GROWTH, 3, "conv2")
    return Concat()(x, y)


@network
def densenet121(num_classes: int = 1000, image_shape: tuple[int, int, int] = (224, 224, 3)) -> Graph:
    """Four dense blocks of 6, 12, 24 and 16 layers with growth 32; transitions halve channels and image."""
    graph = Graph()
    depths = (6, 12, 24, 16)
    with scope("features"):
        x = _conv(graph.input(image_shape), 2 * _GROWTH, 7, "conv0", stride=2)
        x = MaxPool2d(3, 2, 1, name="pool0")(_norm_relu(x, "0"))
        for block, depth in enumerate(depths, start=1):
            for i in range(1, depth + 1):
                with scope(f"denseblock{block}.denselayer{i}"):
                    x = _dense_layer(x)
            if block < len(depths):
                with scope(f"transition{block}"):
                    x = _conv(_norm_relu(x, ""), x.shape[-1] // 2, 1, "conv")
                    x = AvgPool2d(2, name="pool")(x)
        x = _norm_relu(x, "5")
    x = Flatten()(AdaptiveAvgPool2d(1, name="avgpool")(x))
    return graph.output(Linear(x.shape[-1], num_classes, name="classifier")(x))
