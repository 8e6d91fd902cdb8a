"""Trains one network in a way of sharing its work: ``hybrid.py OUT DEVICE WAY RANKS_OF_A_GROUP``.

Losses and weights go to OUT.

``rows``: a group shares the rows of its images; ``rows-group``: its batch norms look at the group's images only;
``channels``: a group shares the filters. Different groups have different images. One process alone is the reference;
with the way ``data`` its ranks share out the images only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist, models
from minidl.layers import ChannelParallelConv2d
from minidl.layers.row_plan import share

IMAGES, HEIGHT, WIDTH, CLASSES, STEPS = 4, 24, 8, 3, 6


def pixels(sync):
    """Labels of pixels; pools and a transposed convolution in between, whose windows lie within the rows of a rank."""
    graph = m.Graph()
    x = m.Conv2d(3, 6, 3, padding=1, name="conv1")(graph.input((HEIGHT, WIDTH, 3)))
    x = m.ReLU(name="relu1")(m.BatchNorm2d(6, sync=sync, name="bn1")(x))
    x = m.MaxPool2d(2, name="pool")(x)
    y = m.Conv2d(6, 6, 3, padding=1, bias=False, name="conv2")(x)
    y = m.BatchNorm2d(6, sync=sync, name="bn2")(m.Add(name="add")(y, x))
    y = m.AvgPool2d(2, name="down")(m.ReLU(name="relu2")(y))
    y = m.ConvTranspose2d(6, 4, 2, stride=2, name="up")(y)
    return graph.output(m.Conv2d(10, CLASSES, 1, name="head")(m.Concat(name="concat")(x, y)))


def by_channels(group):
    graph = m.Graph()
    x = ChannelParallelConv2d(3, 7, 3, padding=1, group=group, name="conv1")(graph.input((HEIGHT, WIDTH, 3)))
    x = m.MaxPool2d(2, name="pool")(m.ReLU(name="relu1")(m.BatchNorm2d(7, sync=True, name="bn1")(x)))
    x = ChannelParallelConv2d(7, 5, 3, padding=1, group=group, name="conv2")(x)
    return graph.output(m.Conv2d(5, CLASSES, 1, name="head")(m.ReLU(name="relu2")(x)))


def main(out: Path, device: str, way: str, ranks: int) -> None:
    comm = dist.init(device)
    group = comm.split(comm.rank // ranks)
    peers = comm.split(comm.rank % ranks)  # those of the same place in other groups
    if way == "channels":
        graph, joint = by_channels(group), peers
    else:
        graph, joint = models.by_rows(pixels(way == "rows"), group), comm
    model = m.Model(graph, device=device, comm=joint, seed=3, group_bytes=0)
    loss, optimizer = m.SoftmaxCrossEntropy(comm=joint), m.SGD(model, 0.1, momentum=0.9)
    images = share(IMAGES, peers.size, peers.rank)
    parts = (group.size, group.rank) if way != "channels" else (1, 0)
    rows, halves = share(HEIGHT, *parts), share(HEIGHT // 2, *parts)
    losses = []
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        x = rng.standard_normal((IMAGES, HEIGHT, WIDTH, 3)).astype("float32")
        labels = x.reshape(IMAGES, HEIGHT // 2, 2, WIDTH // 2, 2, CLASSES).mean((2, 4)).argmax(-1).astype("int32")
        x = np.ascontiguousarray(x[slice(*images), slice(*rows)])
        labels = np.ascontiguousarray(labels[slice(*images), slice(*halves)])
        logits = model.forward(model.ops.from_host(x))
        losses.append(loss.forward(logits, model.ops.from_host(labels)).loss)
        model.backward(loss.backward())
        optimizer.step()
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    answer = {"losses": losses, "weights": weights, "place": group.rank, "parts": group.size}
    Path(out, f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]))
