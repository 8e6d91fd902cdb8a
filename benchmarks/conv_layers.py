"""What bench_conv.py and its neighbours import: every distinct convolution of the networks that they measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from minidl import models
from minidl.graph import Graph
from minidl.layers import Conv2d


@dataclass(frozen=True)
class Layer:
    """A square convolution: images of size x size, ``count`` times in its network; padded by half of its kernel."""

    network: str
    batch: int
    size: int
    channels: int
    filters: int
    kernel: int
    stride: int
    count: int
    groups: int = 1

    @property
    def name(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        groups = f" in {self.groups}" if self.groups > 1 else ""
        return f"{self.network} {self.kernel}x{self.kernel}{stride} {self.channels}-{self.filters}{groups} @{self.size}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def out_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the input, of the output and of the filters."""
        n, c, k, r = self.batch, self.channels, self.filters, self.kernel
        return (n, self.size, self.size, c), (n, self.out_size, self.out_size, k), (k, r, r, c // self.groups)

    @property
    def flop(self) -> int:
        return 2 * self.batch * self.out_size**2 * self.filters * self.channels // self.groups * self.kernel**2

    def bytes(self, itemsize: int) -> int:
        """Of the images on both sides; of a fully connected layer the weights, too, which are most of them."""
        weights = self.channels * self.filters if self.connected else 0
        return itemsize * (self.batch * (self.size**2 * self.channels + self.out_size**2 * self.filters) + weights)

    @property
    def connected(self) -> bool:
        """A fully connected layer: images of one pixel."""
        return self.size == 1


def _resnet18(batch: int = 256) -> list[Layer]:
    layers = [Layer("ResNet-18", batch, 224, 3, 64, 7, 2, 1), Layer("ResNet-18", batch, 56, 64, 64, 3, 1, 4)]
    for width, size in ((128, 56), (256, 28), (512, 14)):
        layers.append(Layer("ResNet-18", batch, size, width // 2, width, 3, 2, 1))
        layers.append(Layer("ResNet-18", batch, size, width // 2, width, 1, 2, 1))
        layers.append(Layer("ResNet-18", batch, size // 2, width, width, 3, 1, 3))
    return layers


def _resnet50(batch: int = 256) -> list[Layer]:
    """Stride in the 3x3 convolution of a stage's first block."""
    layers = [Layer("ResNet-50", batch, 224, 3, 64, 7, 2, 1)]
    channels, size = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        stride = 1 if width == 64 else 2
        inner = size // stride
        layers.append(Layer("ResNet-50", batch, size, channels, width, 1, 1, 1))
        layers.append(Layer("ResNet-50", batch, size, width, width, 3, stride, 1))
        layers.append(Layer("ResNet-50", batch, size, channels, 4 * width, 1, stride, 1))
        layers.append(Layer("ResNet-50", batch, inner, width, 4 * width, 1, 1, blocks))
        layers.append(Layer("ResNet-50", batch, inner, 4 * width, width, 1, 1, blocks - 1))
        layers.append(Layer("ResNet-50", batch, inner, width, width, 3, 1, blocks - 1))
        channels, size = 4 * width, inner
    return _merged(layers)


def _vgg16(batch: int = 64) -> list[Layer]:
    layers, channels, size = [], 3, 224
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers.append(Layer("VGG-16", batch, size, channels, width, 3, 1, 1))
            channels = width
        size //= 2
    return _merged(layers)


def _unet(batch: int = 32) -> list[Layer]:
    """Padded 3x3 convolutions, five levels; the way up reads the skip and the upsampled half side by side."""
    layers, widths, size = [], (64, 128, 256, 512, 1024), 256
    channels = 3
    for level, width in enumerate(widths):
        layers.append(Layer("U-Net", batch, size >> level, channels, width, 3, 1, 1))
        layers.append(Layer("U-Net", batch, size >> level, width, width, 3, 1, 1 if level == 4 else 2))
        if level < 4:
            layers.append(Layer("U-Net", batch, size >> level, 2 * width, width, 3, 1, 1))
        channels = width
    return _merged([*layers, Layer("U-Net", batch, size, widths[0], 2, 1, 1, 1)])


def _inverted(label: str, build: Callable[[], Graph], depthwise: bool, batch: int = 128) -> list[Layer]:
    """The depthwise convolutions of a network, or all others but the gates of squeeze and excitation."""
    graph, layers = build(), []
    for node in graph.nodes:
        if isinstance(node.layer, Conv2d) and (node.layer.groups > 1) == depthwise:
            size, _, channels = graph.nodes[node.inputs[0]].shape
            kernel, stride = node.layer.kernel_size[0], node.layer.stride[0]
            layers.append(Layer(label, batch, size, channels, node.shape[-1], kernel, stride, 1, node.layer.groups))
    return _merged([layer for layer in layers if not layer.connected])


def _grouped(batch: int = 128) -> list[Layer]:
    """ResNeXt-50 32x4d and 32x8d's, AlexNet's, ShuffleNet's, and widths of groups that fill no vector."""
    layers, size = [], 56
    for width, blocks in ((128, 3), (256, 4), (512, 6), (1024, 3)):
        if width > 128:
            layers.append(Layer("ResNeXt", batch, size, width, width, 3, 2, 1, 32))
            size //= 2
        layers.append(Layer("ResNeXt", batch, size, width, width, 3, 1, blocks - (width > 128), 32))
    layers.append(Layer("ResNeXt", batch, 7, 2048, 2048, 3, 1, 2, 32))
    layers.append(Layer("AlexNet", batch, 27, 96, 256, 5, 1, 1, 2))
    layers.append(Layer("AlexNet", batch, 13, 384, 384, 3, 1, 1, 2))
    layers.append(Layer("ShuffleNet", batch, 28, 240, 240, 1, 1, 1, 3))
    layers += [Layer("odd", batch, 28, channels, channels, 3, 1, 1, 32) for channels in (64, 192, 320, 384)]
    return layers


def _connected(batch: int | None = None) -> list[Layer]:
    """The fully connected layers of VGG-16 and ResNet-50."""
    sizes = [("VGG-16", 64, 25088, 4096), ("VGG-16", 64, 4096, 4096), ("VGG-16", 64, 4096, 1000)]
    sizes += [("ResNet-50", 256, 2048, 1000), ("ResNet-50", 32, 2048, 1000)]
    return [
        Layer(f"Linear of {name}{'' if batch else f'/b{images}'}", batch or images, 1, c, k, 1, 1, 1)
        for name, images, c, k in sizes
    ]


def _merged(layers: list[Layer]) -> list[Layer]:
    counts: dict[Layer, int] = {}
    for layer in layers:
        key = replace(layer, count=0)
        counts[key] = counts.get(key, 0) + layer.count
    return [replace(key, count=count) for key, count in counts.items()]


NETWORKS: dict[str, Callable[..., list[Layer]]] = {
    "resnet18": _resnet18, "resnet50": _resnet50, "vgg16": _vgg16, "unet": _unet,
    "mobilenet_v2": partial(_inverted, "MobileNetV2", models.mobilenet_v2, True),
    "mobilenet_v2_1x1": partial(_inverted, "MobileNetV2", models.mobilenet_v2, False),
    "efficientnet_b0": partial(_inverted, "EfficientNet-B0", models.efficientnet_b0, True),
    "efficientnet_b0_1x1": partial(_inverted, "EfficientNet-B0", models.efficientnet_b0, False),
    "grouped": _grouped, "connected": _connected,
}  # fmt: skip
