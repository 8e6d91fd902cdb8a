"""U-Net (Ronneberger et al., MICCAI 2015) as usual today: padded convolutions with batch norm, logits per pixel."""

from __future__ import annotations

from minidl import checks
from minidl.graph import Graph, Node, scope
from minidl.layers import BatchNorm2d, Concat, Conv2d, ConvTranspose2d, MaxPool2d, Pad, ReLU
from minidl.models.blocks import network


def _double_conv(x: Node, width: int) -> Node:
    """Two times 3×3 convolution, batch norm, ReLU."""
    with scope("double_conv"):
        for i in (0, 3):
            x = Conv2d(x.shape[-1], width, 3, padding=1, bias=False, name=f"{i}")(x)
            x = ReLU(name=f"{i + 2}")(BatchNorm2d(width, name=f"{i + 1}")(x))
    return x


@network
def unet(
    num_classes: int = 2,
    image_shape: tuple[int, int, int] = (256, 256, 3),
    width: int = 64,
    depth: int = 4,
) -> Graph:
    """Encoder and decoder of ``depth`` levels, ``width`` to ``width·2**depth`` channels, joined by skip connections.

    Images of any size: where a level's height or width is odd, pooling drops its last row or column, and on the way up
    the image is padded with zeros to the size of the skip.

    Raises:
        ValueError: when the image is smaller than 2**depth, so that nothing is left at the bottom.
    """
    step = 1 << checks.at_least("unet", "depth", depth, 0)
    if min(image_shape[:2]) < step:
        raise checks.bad_shape("unet", "images", f"(H, W, C) with H and W of at least {step}", image_shape)
    graph = Graph()
    x = graph.input(image_shape)
    with scope("inc"):
        x = _double_conv(x, width)
    skips = []
    for level in range(1, depth + 1):
        skips.append(x)
        with scope(f"down{level}.maxpool_conv"):
            x = MaxPool2d(2, name="0")(x)
            with scope("1"):
                x = _double_conv(x, width << level)
    for level in range(1, depth + 1):
        channels = x.shape[-1] // 2
        with scope(f"up{level}"):
            x = ConvTranspose2d(x.shape[-1], channels, 2, stride=2, name="up")(x)
            skip = skips.pop()
            right, bottom = skip.shape[1] - x.shape[1], skip.shape[0] - x.shape[0]
            if right or bottom:
                x = Pad((0, right, 0, bottom), name="pad")(x)
            x = Concat()(skip, x)
            with scope("conv"):
                x = _double_conv(x, channels)
    with scope("outc"):
        x = Conv2d(x.shape[-1], num_classes, 1, name="conv")(x)
    return graph.output(x)
