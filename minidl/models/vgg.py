"""VGG-16 (Simonyan and Zisserman, "Very Deep Convolutional Networks", ICLR 2015), with torchvision's names."""

from __future__ import annotations

from minidl.graph import Graph, scope
from minidl.initializers import kaiming_normal
from minidl.layers import AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Dropout, Flatten, Linear, MaxPool2d, ReLU
from minidl.models.blocks import network

_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # width, convolutions; a 2×2 pooling after each


@network
def vgg16(
    num_classes: int = 1000, image_shape: tuple[int, int, int] = (224, 224, 3), batch_norm: bool = False
) -> Graph:
    """Thirteen 3×3 convolutions and three fully connected layers."""
    graph = Graph()
    x = graph.input(image_shape)
    with scope("features"):
        index = 0
        for width, depth in _BLOCKS:
            for _ in range(depth):
                x = Conv2d(x.shape[-1], width, 3, padding=1, weight_init=kaiming_normal("out"), name=f"{index}")(x)
                index += 1
                if batch_norm:
                    x = BatchNorm2d(width, name=f"{index}")(x)
                    index += 1
                x = ReLU(name=f"{index}")(x)
                index += 1
            x = MaxPool2d(2, name=f"{index}")(x)
            index += 1
    x = Flatten()(AdaptiveAvgPool2d(7, name="avgpool")(x))
    with scope("classifier"):
        for index in (0, 3):
            x = ReLU(name=f"{index + 1}")(Linear(x.shape[-1], 4096, name=f"{index}")(x))
            x = Dropout(0.5, name=f"{index + 2}")(x)
        x = Linear(4096, num_classes, name="6")(x)
    return graph.output(x)


@network
def vgg16_bn(num_classes: int = 1000, image_shape: tuple[int, int, int] = (224, 224, 3)) -> Graph:
    """VGG-16 with a batch norm after every convolution."""
    return vgg16(num_classes, image_shape, batch_norm=True)
