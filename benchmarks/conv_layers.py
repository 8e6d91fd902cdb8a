"""What bench_conv.py and its neighbours import: every distinct convolution of the networks that they measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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


def _of(label: str, build: Callable[[], Graph], usual: int, batch: int = 0, *, depthwise: bool = False) -> list[Layer]:
    """The depthwise convolutions of a network, or all others but the gates of squeeze and excitation.

    ``usual``: images of a training step, where no ``batch`` is given.
    """
    graph, counts = build(), Counter()
    for node in graph.nodes:
        if isinstance(node.layer, Conv2d) and (node.layer.groups > 1) == depthwise:
            size, _, channels = graph.nodes[node.inputs[0]].shape
            sizes = size, channels, node.shape[-1], node.layer.kernel_size[0], node.layer.stride[0]
            counts[sizes, node.layer.groups] += size > 1
    return [Layer(label, batch or usual, *sizes, n, groups) for (sizes, groups), n in counts.items() if n]


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


NETWORKS: dict[str, Callable[..., list[Layer]]] = {
    "resnet18": partial(_of, "ResNet-18", models.resnet18, 256),
    "resnet50": partial(_of, "ResNet-50", models.resnet50, 256),
    "vgg16": partial(_of, "VGG-16", models.vgg16, 64),
    "unet": partial(_of, "U-Net", models.unet, 32),
    "mobilenet_v2": partial(_of, "MobileNetV2", models.mobilenet_v2, 128, depthwise=True),
    "mobilenet_v2_1x1": partial(_of, "MobileNetV2", models.mobilenet_v2, 128),
    "efficientnet_b0": partial(_of, "EfficientNet-B0", models.efficientnet_b0, 128, depthwise=True),
    "efficientnet_b0_1x1": partial(_of, "EfficientNet-B0", models.efficientnet_b0, 128),
    "grouped": _grouped, "connected": _connected,
}  # fmt: skip
