"""What a benchmark runs: a network or one layer, its size, precision, device and ranks."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minidl import backend, checks, dist, layers, models
from minidl.bench.isolated import Case
from minidl.dist.communicator import Communicator
from minidl.dist.world import ENGINES
from minidl.graph import Graph
from minidl.layer import Layer


def add_images(p: argparse.ArgumentParser) -> None:
    """The options that tell a `Setup` what images a network is for."""
    p.add_argument("--image-size", type=int, help="side of the images; default: usual for the network")
    p.add_argument("--classes", type=int, help="number of classes; default: usual for the network")


@dataclass(frozen=True)
class Setup:
    """One network to be measured.

    Attributes:
        batch: samples of each rank.
        image_size: side of the square images; None: what is usual for the network.
        classes: None: likewise.
        fusion: how batch norms are run, see `minidl.fusion.fuse`.
    """

    model: str
    batch: int
    precision: str
    device: str
    ranks: int = 1
    image_size: int | None = None
    classes: int | None = None
    fusion: str = "none"

    @property
    def image(self) -> int:
        return models.usual_task(self.model, self.image_size)[0]

    @property
    def num_classes(self) -> int:
        return models.usual_task(self.model, None, self.classes)[1]

    @property
    def title(self) -> str:
        return f"{self.model}/{self.image}x{self.image}/b{self.batch}"

    def graph(self) -> Graph:
        """A new graph of the network.

        Raises:
            ValueError: for an unknown model, or images or classes that it cannot take.
        """
        checks.at_least("", "--batch", self.batch, 1)
        checks.at_least("", "--image-size", self.image, 1)
        checks.at_least("", "--classes", self.num_classes, 1)
        return models.build(self.model, (self.image, self.image, 3), self.num_classes)

    def record(self) -> dict[str, Any]:
        """As it stands in result files."""
        return {
            "model": self.model, "batch": self.batch, "precision": self.precision, "device": self.device,
            "ranks": self.ranks, "image_size": self.image, "classes": self.num_classes,
            "fusion": self.fusion,
        }  # fmt: skip


def join(device: str, *, elastic: bool = False) -> Any:
    """The communicator; a launcher and an MPI that do not belong together are the user's to mend, in one line."""
    try:
        return dist.init(device, elastic=elastic)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def device_of(wanted: str, comm: Communicator) -> str:
    """The device that `dist.init` settled on; for one rank alone with ``"auto"``, a GPU if there is a usable one.

    Raises:
        ValueError: when a GPU is asked for and there is none.
    """
    if wanted == "auto" and comm.size > 1:
        return "cuda" if comm.name in ENGINES["cuda"] else "cpu"
    if wanted == "cpu":
        return "cpu"
    try:
        backend.open_device("cuda")
    except (ImportError, RuntimeError) as error:
        if wanted == "cuda":
            raise ValueError(f"--device cuda: {error}") from error
        return "cpu"
    return "cuda"


def parse_layer(text: str) -> Layer:
    """The layer that ``text`` constructs: ``"Conv2d(64, 128, 3, padding=1)"``. Only literals, nothing is executed.

    Raises:
        ValueError: for anything else, an unknown layer, or arguments it does not take.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        name = call.func.id if isinstance(call, ast.Call) else call.id
        positional = [ast.literal_eval(node) for node in getattr(call, "args", [])]
        named = {word.arg: ast.literal_eval(word.value) for word in getattr(call, "keywords", [])}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise checks.bad_value("", "--layer", "a layer with literal arguments, Conv2d(64, 64, 3)", text) from error
    known = {n: getattr(layers, n) for n in layers.__all__}
    if name not in known:
        raise checks.unknown("layer", name, known)
    try:
        return known[name](*positional, **named)
    except TypeError as error:
        raise ValueError(f"--layer {text}: {error}") from error


def parse_shape(text: str) -> tuple[int, ...]:
    """``"32x56x56x64"`` as (32, 56, 56, 64).

    Raises:
        ValueError: for anything but positive sizes joined by x.
    """
    sizes = text.lower().split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes) or len(sizes) < 2:
        raise checks.bad_value("", "--input", "NxHxWxC or NxC, such as 32x56x56x64", text)
    return tuple(map(int, sizes))


def layer_case(text: str, inputs: Sequence[str]) -> Case:
    """A layer alone on inputs of the given shapes.

    Raises:
        ValueError: from `parse_layer` and `parse_shape`, and for shapes that the layer cannot take.
    """
    layer = parse_layer(text)
    shapes = tuple(map(parse_shape, inputs))
    if len(shapes) != (layer.num_inputs or max(len(shapes), 1)):
        raise checks.bad_value("", "--input", f"one for each of {layer.num_inputs or 'its'} inputs", len(shapes))
    layer.output_shape(*shapes)
    return Case(1, layer, shapes)
