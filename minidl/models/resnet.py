"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016) and their wider kin.

ResNeXt-50 cuts the 3×3 convolutions into groups (Xie et al., "Aggregated Residual Transformations for Deep Neural
Networks", CVPR 2017), Wide ResNet-50-2 doubles their width (Zagoruyko and Komodakis, "Wide Residual Networks", BMVC
2016). The ImageNet networks are version 1.5: a bottleneck's stride stands in its 3×3 convolution, as in torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from minidl.graph import Graph, Node, scope
from minidl.initializers import kaiming_normal
from minidl.layers import AdaptiveAvgPool2d, Add, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU
from minidl.models.blocks import network

Block = Callable[[Node, int, int, bool], Node]


def _conv(x: Node, channels: int, kernel: int, stride: int, name: str, groups: int = 1) -> Node:
    """A convolution that keeps the image size at stride 1; its bias would be cancelled by the batch norm after it."""
    return Conv2d(
        x.shape[-1], channels, kernel, stride, kernel // 2, groups=groups, bias=False,
        weight_init=kaiming_normal("out"), name=name,
    )(x)  # fmt: skip


def _norm(x: Node, name: str) -> Node:
    return BatchNorm2d(x.shape[-1], name=name)(x)


def _join(x: Node, shortcut: Node, channels: int, stride: int) -> Node:
    """Add the block's input, projected where its shape changed, and apply the block's last ReLU."""
    if stride != 1 or shortcut.shape[-1] != channels:
        with scope("downsample"):
            shortcut = _norm(_conv(shortcut, channels, 1, stride, "0"), "1")
    return ReLU(name="relu_out")(Add()(x, shortcut))


def _basic(x: Node, width: int, stride: int) -> Node:
    y = ReLU(name="relu1")(_norm(_conv(x, width, 3, stride, "conv1"), "bn1"))
    y = _norm(_conv(y, width, 3, 1, "conv2"), "bn2")
    return _join(y, x, width, stride)


def _bottleneck(x: Node, width: int, stride: int, groups: int = 1, group_width: int = 64) -> Node:
    """``group_width``: channels of a group of the 3×3 convolution in the first stage."""
    inner = width * group_width // 64 * groups
    y = ReLU(name="relu1")(_norm(_conv(x, inner, 1, 1, "conv1"), "bn1"))
    y = ReLU(name="relu2")(_norm(_conv(y, inner, 3, stride, "conv2", groups), "bn2"))
    y = _norm(_conv(y, 4 * width, 1, 1, "conv3"), "bn3")
    return _join(y, x, 4 * width, stride)


def _stages(x: Node, block: Block, depths: tuple[int, ...], width: int) -> Node:
    """Stages of blocks; each stage but the first halves the image and doubles the width."""
    for stage, depth in enumerate(depths):
        for i in range(depth):
            with scope(f"layer{stage + 1}.{i}"):
                x = block(x, width << stage, 2 if stage > 0 and i == 0 else 1)
    return x


def _head(graph: Graph, x: Node, num_classes: int) -> Graph:
    x = Flatten()(AdaptiveAvgPool2d(1, name="avgpool")(x))
    return graph.output(Linear(x.shape[-1], num_classes, name="fc")(x))


def _imagenet(
    block: Block,
    depths: tuple[int, ...],
    num_classes: int = 1000,
    image_shape: tuple[int, int, int] = (224, 224, 3),
) -> Graph:
    """7×7 stem with stride 2, 3×3 max pooling with stride 2, four stages from width 64."""
    graph = Graph()
    x = _norm(_conv(graph.input(image_shape), 64, 7, 2, "conv1"), "bn1")
    x = MaxPool2d(3, 2, 1, name="maxpool")(ReLU(name="relu")(x))
    return _head(graph, _stages(x, block, depths, 64), num_classes)


def _named(name: str, block: Block, depths: tuple[int, ...]) -> Callable[..., Graph]:
    function = partial(_imagenet, block, depths)
    function.__name__ = name
    function.__doc__ = f"{name}: {_imagenet.__doc__} Blocks per stage: {depths}."
    return network(function)


resnet18 = _named("resnet18", _basic, (2, 2, 2, 2))
resnet34 = _named("resnet34", _basic, (3, 4, 6, 3))
resnet50 = _named("resnet50", _bottleneck, (3, 4, 6, 3))
resnet101 = _named("resnet101", _bottleneck, (3, 4, 23, 3))
resnet152 = _named("resnet152", _bottleneck, (3, 8, 36, 3))
resnext50_32x4d = _named("resnext50_32x4d", partial(_bottleneck, groups=32, group_width=4), (3, 4, 6, 3))
wide_resnet50_2 = _named("wide_resnet50_2", partial(_bottleneck, group_width=128), (3, 4, 6, 3))


@network
def resnet20(num_classes: int = 10, image_shape: tuple[int, int, int] = (32, 32, 3)) -> Graph:
    """The 20-layer network for small images of section 4.2 of the paper: three stages of three basic blocks, 16 wide.

    Shortcuts that change shape are projections (option B), where the paper's CIFAR networks pad with zeros.
    """
    graph = Graph()
    x = _norm(_conv(graph.input(image_shape), 16, 3, 1, "conv1"), "bn1")
    x = _stages(ReLU(name="relu")(x), _basic, (3, 3, 3), 16)
    return _head(graph, x, num_classes)
