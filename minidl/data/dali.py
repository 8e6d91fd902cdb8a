"""Photographs decoded and scaled by NVIDIA DALI: on a GPU, decoding leaves the CPU's cores to others.

The samples of a batch, their boxes and which of them are mirrored are those of a `Loader` with the same arguments; the
pixels differ by what two decoders and two ways of scaling make of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.data.augment import Augmentation, Compose, Draw, RandomHorizontalFlip, RandomResizedCrop, shifted
from minidl.data.folder import Box, ImageFolder
from minidl.data.loader import Loader
from minidl.shapes import ceil_div

_WHO = "DaliLoader"


class DaliLoader(Loader):
    """A `Loader` of an image folder whose photographs DALI decodes, cuts, scales and mirrors.

    Args:
        dataset: a `minidl.data.ImageFolder`.
        batch, rank, size, seed, shuffle, drop_last, mean, std, dtype, workers, prefetch: as for `Loader`; the workers
            read files.
        augment: None, or a `RandomResizedCrop` and perhaps a `RandomHorizontalFlip` after it.
        device: "cuda", where the GPU decodes as far as it can, or "cpu".
        threads: of DALI.

    Raises:
        ImportError: DALI is not installed.
        TypeError: a data set that is no image folder.
        ValueError: an augmentation that DALI is not told how to do, or mixed images.
    """

    def __init__(
        self,
        dataset: ImageFolder,
        batch: int,
        *,
        augment: Augmentation | None = None,
        device: str = "cuda",
        threads: int = 4,
        **options: Any,
    ):
        if not isinstance(dataset, ImageFolder):
            raise checks.bad_dtype(_WHO, "dataset", "an ImageFolder", type(dataset).__name__)
        if options.get("mix") is not None:
            raise checks.bad_value(_WHO, "mix", "None", options["mix"], "take a Loader to mix images")
        self.crop, self.flip = _steps(augment)
        ops = backend.get_ops(device)
        most = ceil_div(batch, options.get("size", 1))
        decoder = _Decoder(ops, dataset.size, most, checks.at_least(_WHO, "threads", threads, 1))
        super().__init__(dataset, batch, augment=augment, transfer=decoder, normalise=ops.normalise, **options)

    def _shard(self, order: np.ndarray, start: int, stop: int, epoch: int) -> tuple[Any, np.ndarray]:
        """The samples as files: `_Decoder` makes images of them."""
        indices = order[start:stop]
        draw, count = self._draw(indices, epoch), len(indices)
        where = _Boxes(self.dataset)
        if self.crop is not None and count:
            boxes, labels = self.crop.fetch(where, indices, draw)
        else:
            items = [where.view(int(i), self.dataset.centre) for i in indices]
            boxes, labels = np.array([box for box, _ in items]), np.array([label for _, label in items], np.int32)
        content = [np.fromfile(self.dataset.root / self.dataset.files[i], np.uint8) for i in indices]
        left, top, right, bottom = boxes.reshape(count, 4).T.astype(np.float32)
        corners = np.stack([np.stack([top, left], axis=1), np.stack([bottom, right], axis=1)])
        return _Files(content, corners, _mirrored(self.flip, count, shifted(draw, 1))), labels


def _steps(augment: Augmentation | None) -> tuple[RandomResizedCrop | None, RandomHorizontalFlip | None]:
    steps = augment.steps if isinstance(augment, Compose) else () if augment is None else (augment,)
    kinds = tuple(type(step) for step in steps)
    if kinds not in ((), (RandomResizedCrop,), (RandomResizedCrop, RandomHorizontalFlip)):
        expected = "None, or RandomResizedCrop and then perhaps RandomHorizontalFlip"
        raise checks.bad_value(_WHO, "augment", expected, augment, "take a Loader for others")
    return (*steps, None, None)[:2]


def _mirrored(flip: RandomHorizontalFlip | None, count: int, draw: Draw) -> np.ndarray:
    """(count,) int32: which samples are mirrored, as an image of two pixels tells."""
    pixels = np.broadcast_to(np.array([0, 1], np.uint8).reshape(1, 1, 2, 1), (count, 1, 2, 1))
    if flip is not None:
        pixels, _ = flip(pixels, np.zeros(count), draw)
    return pixels[:, 0, 0, 0].astype(np.int32)


class _Boxes:
    """In place of an image folder: the part of each photograph in place of its pixels."""

    def __init__(self, dataset: ImageFolder):
        self.dataset = dataset

    def view(self, index: int, box: Box) -> tuple[np.ndarray, int]:
        return np.array(box(*self.dataset.extent(index))), int(self.dataset.labels[index])


@dataclass(frozen=True)
class _Files:
    """Photographs as they lie on the disk, what part of each is meant, and whether it is mirrored.

    Attributes:
        corners: (2, n, 2) float32: (top, left), then (bottom, right).
    """

    content: list[np.ndarray]
    corners: np.ndarray
    mirrored: np.ndarray


class _Decoder:
    """A loader's transfer: files become images on the device, other arrays travel there as usual."""

    def __init__(self, ops: Any, size: int, most: int, threads: int):
        self.ops, self.shape = ops, (size, size, 3)
        self._uploader = ops.uploader()
        self._pipeline = _pipeline(size, most, threads, ops.name == "cuda")
        self._pending: list[Any] = []

    def __call__(self, array: Any) -> Any:
        started = self.start(array)
        self.wait()
        return started

    def start(self, array: Any) -> Any:
        """An array on the device that holds the images, or the values of ``array``, after `wait`."""
        if not isinstance(array, _Files):
            return getattr(self._uploader, "start", self._uploader)(array)
        images = self.ops.empty((len(array.content), *self.shape), np.dtype(np.uint8))
        if array.content:
            fed = {
                "files": array.content, "starts": list(array.corners[0]), "ends": list(array.corners[1]),
                "mirrored": list(array.mirrored),
            }  # fmt: skip
            for name, values in fed.items():
                self._pipeline.feed_input(name, values)
            self._pipeline.schedule_run()
            self._pending.append(images)
        return images

    def wait(self) -> None:
        while self._pending:
            self._receive(self._pending.pop(0))
        if hasattr(self._uploader, "wait"):
            self._uploader.wait()

    def _receive(self, images: Any) -> None:
        """Copy DALI's images. Its memory goes back in the order of the stream that they are bound to."""
        try:
            (found,) = self._pipeline.share_outputs(**self._stream())
        except RuntimeError as error:
            raise ValueError(f"DALI cannot decode a photograph of this batch: {str(error).splitlines()[0]}") from error
        self.ops.copy_into(images, self.ops.from_dlpack(found.as_tensor()))
        self._pipeline.release_outputs()

    def _stream(self) -> dict[str, Any]:
        if self.ops.name == "cpu":
            return {}
        import cupy

        return {"cuda_stream": cupy.cuda.get_current_stream()}


def _pipeline(size: int, most: int, threads: int, gpu: bool) -> Any:
    """Files to (size, size, 3) uint8, a batch at a time."""
    with checks.needs("NVIDIA DALI", "dali"):
        from nvidia.dali import Pipeline, fn, types
    device = None
    if gpu:
        import cupy

        device = cupy.cuda.runtime.getDevice()
    # One batch under way: the loader asks for the next when it has the one before.
    pipeline = Pipeline(batch_size=most, num_threads=threads, device_id=device, prefetch_queue_depth=1)
    with pipeline:
        files, starts, ends, mirrored = (
            fn.external_source(name=name, no_copy=False) for name in ("files", "starts", "ends", "mirrored")
        )
        images = fn.decoders.image(
            files, device="mixed" if gpu else "cpu", output_type=types.RGB, adjust_orientation=False
        )
        images = fn.resize(
            images, size=[size, size], roi_start=starts, roi_end=ends, interp_type=types.INTERP_LINEAR, antialias=True
        )
        pipeline.set_outputs(fn.flip(images, horizontal=mirrored))
    pipeline.build()
    return pipeline
