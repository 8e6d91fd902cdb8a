"""Predictions of a trained network, from its checkpoint alone.

predictor = Predictor("runs/pets")
probabilities = predictor.predict(["a.jpg", "b.jpg"])
print(predictor.classes[probabilities[0].argmax()], probabilities[0].max())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidl import checkpoint, checks, models
from minidl.data import Dataset, ImageFiles, Loader
from minidl.dist.communicator import Communicator
from minidl.graph import Graph
from minidl.model import Model
from minidl.precision import precision as parse_precision

_WHO = "Predictor"


@dataclass(frozen=True)
class Predicted:
    """This rank's part of one batch.

    Attributes:
        first_sample: position of its first image in the data set.
        probabilities: (n, classes) float32; of a network that answers for each pixel (n, height, width, classes).
        labels: (n,) or (n, height, width) int32, as the data set has them.
    """

    first_sample: int
    probabilities: np.ndarray
    labels: np.ndarray


class Predictor:
    """The network of a `Trainer`'s checkpoint in evaluation mode; images are scaled as in the run that wrote it.

    Averaged weights, where the run had any, take the place of the others, as in its evaluation.

    Args:
        path: a checkpoint, or a folder whose newest one is taken.
        network: its name, as for `minidl.models.build`, or a function of ``num_classes`` and ``image_shape``; None: the
            one that the checkpoint names, as those of ``minidl train`` do.
        device: "cpu" or "cuda".
        precision: None: that of the training, but float32 on the CPU in place of TF32.
        comm: of the ranks that share the work; may be left out where there is one.

    Attributes:
        path: the checkpoint.
        classes: names of the classes; numbers where the data set had no names.
        shape: (height, width, channels) of the images.
        settings: of the run, as the Trainer was given them.
        model: the network.

    Raises:
        FileNotFoundError: no such file, or a folder without checkpoints.
        ValueError: a checkpoint that names no network, or does not fit the one that is given.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        network: str | Callable[..., Graph] | None = None,
        device: str = "cpu",
        precision: str | None = None,
        comm: Communicator | None = None,
    ):
        self.path = checkpoint.latest(path) if Path(path).is_dir() else Path(path)
        tensors, state = checkpoint.load(self.path)
        if "task" not in state:
            remedy = "minidl.sparse.resized reads a shrunk network, load_compressed a .mdz (docs/sparse.md)"
            what = "has weights only and does not say what its network is for, as checkpoints of a Trainer do"
            raise ValueError(f"{self.path} {what}; {remedy}")
        self.settings: dict[str, Any] = state.get("settings", {})
        self._task: dict[str, Any] = state["task"]
        self.shape: tuple[int, int, int] = tuple(self._task["shape"])
        self.classes: list[str] = self._task["classes"] or [str(i) for i in range(self._task["outputs"])]
        if precision is None:
            trained = parse_precision(self._task["precision"])
            precision = "fp32" if trained.tf32 and device == "cpu" else trained.name
        graph = self._graph(network)
        self.model = Model(graph, device=device, precision=precision, comm=comm).eval()
        weights = checkpoint.evaluated(tensors)
        checkpoint.match(self.model.state_dict(), weights, str(self.path), "--model names the network")
        self.model.load_state_dict(weights)

    def _graph(self, network: str | Callable[..., Graph] | None) -> Graph:
        outputs = self._task["outputs"]
        options = models.parse_options(self.settings.get("model_options")) if network is None else {}
        network = network or self.settings.get("model")
        if network is None:
            remedy = "pass network= (--model), or settings={'model': 'mynet:build'} to the Trainer"
            raise ValueError(f"{self.path} does not name its network; {remedy}")
        return models.build(network, self.shape, outputs, **options)

    def files(self, paths: Sequence[str | Path]) -> ImageFiles:
        """The images of files and folders, cut as in the evaluation of the run."""
        return ImageFiles(paths, self.shape, margin=self._task["margin"], classes=self.classes)

    def batches(self, dataset: Dataset, batch: int = 64, *, workers: int = 4) -> Iterator[Predicted]:
        """Predict on a data set, a batch after the other; each rank has a part of each batch.

        Args:
            batch: images of a batch, over all ranks.
            workers: threads that decode.

        Raises:
            ValueError: images of another shape than the network takes.
        """
        comm, ops, task = self.model.comm, self.model.ops, self._task
        # Before means and deviations of other channels are refused.
        if (found := tuple(Loader(dataset, 1).recipe()["shape"])) != self.shape:
            raise checks.bad_shape(_WHO, "images", f"{self.shape}, as in training", found)
        loader = Loader(
            dataset, batch, rank=comm.rank, size=comm.size, shuffle=False, mean=task["mean"], std=task["std"],
            dtype=self.model.precision.storage, workers=workers, transfer=ops.uploader(),
            normalise=ops.normalise if ops.name == "cuda" else None,
        )  # fmt: skip
        for part in loader:
            logits = ops.to_host(self.model.forward(part.images, grad=False))
            yield Predicted(part.first_sample, _softmax(logits), ops.to_host(part.labels))

    def predict(self, images: Sequence[str | Path] | Dataset, batch: int = 64, *, workers: int = 4) -> np.ndarray:
        """Probabilities (n, classes) float32 of image files, folders of some, or a data set; on all ranks those of all.

        They are the softmax of what the network answers; of one that answers for each pixel (n, height, width,
        classes).

        Raises:
            TypeError: one path in the place of a list; what is no data set.
            ValueError: files that cannot be decoded, images of another shape than the network takes.
        """
        if not (isinstance(images, str | Path) or hasattr(images, "__len__")):
            raise checks.bad_dtype(_WHO, "images", "a list of paths or a data set", checks.describe(images))
        listed = isinstance(images, Sequence) and all(isinstance(path, str | Path) for path in images)
        paths = listed or isinstance(images, str | Path)
        dataset = self.files(images) if paths else images
        own = [(part.first_sample, part.probabilities) for part in self.batches(dataset, batch, workers=workers)]
        if damaged := getattr(dataset, "damaged", None):
            raise ValueError(checks.some(damaged.values()))
        parts = sorted((part for rank in self.model.comm.share(own) for part in rank), key=lambda part: part[0])
        return np.concatenate([probabilities for _, probabilities in parts if len(probabilities)])


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float32."""
    logits = logits.astype(np.float32)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
