"""``minidl predict``: classes of images, or of their pixels, from a checkpoint; the accuracy where they are known."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidl import checkpoint, checks, data, models
from minidl.bench.setup import device_of, join
from minidl.data import Dataset, ImageFiles
from minidl.data.folder import SUFFIXES, pillow
from minidl.metrics import Confusion
from minidl.predict import Predictor
from minidl.progress import Progress, progress

_EXAMPLES = """examples:
  minidl predict runs/pets photo.jpg other.png           the class and its probability for each image
  minidl predict runs/pets photos/ --top 3 --csv out.csv a whole folder, as a table
  minidl predict runs/pets/best.safetensors pets/val     folders named after classes: also the accuracy
  minidl predict runs/train                              evaluate on the test set of the run
  minidl predict runs/coins photo.png --masks masks      the class of each pixel, by a segmentation network
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl predict``."""
    p.usage, p.epilog = "minidl predict CHECKPOINT [IMAGE_OR_FOLDER ...] [options]", _EXAMPLES
    p.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or an output folder, whose newest one is used"
    )
    p.add_argument(
        "images", nargs="*", default=[], metavar="IMAGE_OR_FOLDER",
        help="image files and folders; default: the test set of the run",
    )  # fmt: skip
    p.add_argument("--data", help="use the test set of this data set, named as in minidl train")
    p.add_argument("--data-path", metavar="DIR", help="folder of the data set's files")
    p.add_argument("--top", type=int, default=1, metavar="K", help="report the K most likely classes")
    p.add_argument("--csv", metavar="FILE", help="write a row for each image")
    p.add_argument("--json", metavar="FILE", help="write the same as JSON")
    p.add_argument(
        "--masks", metavar="DIR", help="write the class of each pixel as PNG files, by a segmentation network"
    )
    p.add_argument("--model", help=f"the network, if the checkpoint does not name it: {models.CHOICES}")
    p.add_argument("--batch", type=int, default=64, help="images at a time, over all ranks")
    p.add_argument("--workers", type=int, default=4, help="threads that decode images")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a GPU if there is one")
    p.add_argument("--precision", help="default: as in training; on the CPU fp32 in place of tf32")


@dataclass(frozen=True)
class _Row:
    """What was predicted for one image."""

    position: int
    name: str
    label: int  # -1: not known
    classes: list[int]  # the likeliest first
    probabilities: list[float]
    error: str | None = None


def run(a: argparse.Namespace) -> int:
    """Predict as the options say; the exit status, 1 where an image could not be decoded."""
    checks.at_least("", "--top", a.top, 1)
    checks.at_least("", "--batch", a.batch, 1)
    if a.images and (a.data or a.data_path):
        raise ValueError("--data and --data-path are for test sets; leave them out to predict on image files")
    if Path(a.checkpoint).suffix.lower() in SUFFIXES:
        raise ValueError(f"{a.checkpoint} is an image; write minidl predict CHECKPOINT {a.checkpoint}")
    comm = join(a.device)
    device = device_of(a.device, comm)
    predictor = Predictor(a.checkpoint, network=a.model, device=device, precision=a.precision, comm=comm)
    of_pixels = len(predictor.model.output_node.shape) != 1
    _require_fitting(a, of_pixels)
    dataset = predictor.files(a.images) if a.images else _test_set(a, predictor)
    if of_pixels:
        return _run_on_pixels(a, predictor, dataset)
    rows = _rows(a, predictor, dataset, progress(comm.rank) if a.csv or a.json else Progress())
    if comm.rank == 0:
        _report(a, predictor, rows)
    return int(any(row.error for row in rows))


def _require_fitting(a: argparse.Namespace, of_pixels: bool) -> None:
    """Refuse options that are for networks of the other kind."""
    if not of_pixels and a.masks is not None:
        raise ValueError("--masks is for networks that answer for each pixel; this one answers for whole images")
    if of_pixels and (a.csv is not None or a.json is not None or a.top != 1):
        raise ValueError("--top, --csv and --json are for networks that classify images; this one answers for pixels")
    if of_pixels and a.images and a.masks is None:
        raise ValueError("this network answers for each pixel; --masks DIR writes a picture of the classes")


def _test_set(a: argparse.Namespace, predictor: Predictor) -> Dataset:
    """The test set that the options name, or that of the run."""
    name = a.data or predictor.settings.get("data")
    if name is None:
        raise ValueError("no images to predict on: name files or folders, or a data set by --data")
    if name == "synthetic":
        raise ValueError("synthetic images have no test set to predict on; name files or folders")
    if data.needs_path(name) and a.data_path is None:
        raise ValueError(f"the test set of {name} needs --data-path DIR; or name image files or folders")
    size = {"size": predictor.shape[0]} if name in ("folder", "coins") else {}
    return data.dataset(name, a.data_path, "test", **size)


def _rows(a: argparse.Namespace, predictor: Predictor, dataset: Dataset, display: Progress) -> list[_Row]:
    """The predictions of all ranks, in the order of the images."""
    top, files = min(a.top, len(predictor.classes)), getattr(dataset, "files", None)
    damaged = dataset.damaged if isinstance(dataset, ImageFiles) else {}
    display.start("predict", -(-len(dataset) // a.batch))
    own = []
    for part in predictor.batches(dataset, a.batch, workers=a.workers):
        if part.labels.ndim != 1:
            reason = "this network answers for whole images, and the data set has a label for each pixel"
            raise checks.impossible("", reason, "--data names another")
        order = np.argsort(-part.probabilities, axis=-1, kind="stable")[:, :top]
        for i, classes in enumerate(order):
            place = part.first_sample + i
            name = str(files[place]) if files is not None else str(place)
            chosen = [float(f"{value:.6g}") for value in part.probabilities[i, classes]]
            own.append(_Row(place, name, int(part.labels[i]), classes.tolist(), chosen, damaged.get(place)))
        display.advance()
    display.finish()
    return sorted((row for rows in predictor.model.comm.share(own) for row in rows), key=lambda row: row.position)


def _report(a: argparse.Namespace, predictor: Predictor, rows: list[_Row]) -> None:
    """What was found, in files or as lines."""
    for row in rows:
        if row.error is not None:
            print(row.error, file=sys.stderr)
    if a.csv is not None:
        # As the names of files are: bytes, in whatever letters.
        checkpoint.write_whole(a.csv, _as_csv(predictor, rows).encode(errors="surrogateescape"))
    if a.json is not None:
        checkpoint.write_whole(a.json, _as_json(predictor, rows).encode())
    if a.images and a.csv is None and a.json is None:
        for row in rows:
            if row.error is None:
                guesses = zip(row.classes, row.probabilities, strict=True)
                print(row.name, *(f"{predictor.classes[number]} {value:.4f}" for number, value in guesses), sep="  ")
    print(_summary(predictor, rows))
    for path in filter(None, (a.csv, a.json)):
        print(f"wrote {path}")


def _summary(predictor: Predictor, rows: list[_Row]) -> str:
    """``359 images by runs/train/checkpoint-00000690.safetensors, accuracy 0.9694``."""
    good = [row for row in rows if row.error is None]
    known = [row for row in good if row.label >= 0]
    text = f"{len(good)} image{'s' * (len(good) != 1)} by {predictor.path}"
    if len(good) < len(rows):
        text += f", {len(rows) - len(good)} damaged"
    if known:
        accuracy = sum(row.label == row.classes[0] for row in known) / len(known)
        text += f", accuracy {accuracy:.4f}" + (f" of {len(known)} whose class is known" * (len(known) < len(good)))
    return text


def _as_csv(predictor: Predictor, rows: list[_Row]) -> str:
    """One row for each image: file, label where it is known, then classes and probabilities, the likeliest first."""
    names, top = predictor.classes, max((len(row.classes) for row in rows), default=1)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    more = [f"{column}_{k}" for k in range(2, top + 1) for column in ("class", "probability")]
    writer.writerow(["file", "label", "class", "probability", *more])
    for row in rows:
        guesses: list[Any] = [""] * 2 * top
        if row.error is None:
            guesses[::2], guesses[1::2] = [names[number] for number in row.classes], row.probabilities
        writer.writerow([row.name, names[row.label] if row.label >= 0 else "", *guesses])
    return text.getvalue()


def _as_json(predictor: Predictor, rows: list[_Row]) -> str:
    """An object with a line for each image."""
    names, lines = predictor.classes, []
    for row in rows:
        guesses = zip(row.classes, row.probabilities, strict=True)
        told: dict[str, Any] = {"top": [{"class": names[number], "probability": value} for number, value in guesses]}
        if row.error is not None:
            told = {"error": row.error}
        lines.append(json.dumps({"file": row.name, "label": names[row.label] if row.label >= 0 else None} | told))
    head = json.dumps({"checkpoint": str(predictor.path), "classes": names})
    return f'{head[:-1]}, "images": [\n' + ",\n".join(lines) + "\n]}\n"


def _run_on_pixels(a: argparse.Namespace, predictor: Predictor, dataset: Dataset) -> int:
    """Predict the class of each pixel: pictures of them, and how many are right; the exit status."""
    comm, classes = predictor.model.comm, len(predictor.classes)
    damaged = dataset.damaged if isinstance(dataset, ImageFiles) else {}
    stems = _stems(dataset) if a.masks is not None else []
    display = progress(comm.rank)
    display.start("predict", -(-len(dataset) // a.batch))
    counts, failed, done = np.zeros((classes, classes), np.int64), {}, 0
    for part in predictor.batches(dataset, a.batch, workers=a.workers):
        found = part.probabilities.argmax(-1)
        if part.labels.shape == found.shape:
            known = (part.labels >= 0) & (part.labels < classes)
            pairs = part.labels[known] * classes + found[known]
            counts += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
        for place, picture in enumerate(found, part.first_sample):
            if place in damaged:
                failed[place] = damaged[place]
                continue
            done += 1
            if a.masks is not None:
                _write_mask(Path(a.masks) / f"{stems[place]}.png", picture)
        display.advance()
    display.finish()
    told = comm.share((done, failed, counts))
    failed = {place: words for _, each, _ in told for place, words in each.items()}
    if comm.rank == 0:
        for words in failed.values():
            print(words, file=sys.stderr)
        print(_summary_of_pixels(predictor, sum(each for each, _, _ in told), len(failed), sum(c for _, _, c in told)))
        if a.masks is not None:
            print(
                f"wrote {a.masks}/*.png, {predictor.shape[0]} x {predictor.shape[1]} pixels with the numbers of classes"
            )
    return int(bool(failed))


def _summary_of_pixels(predictor: Predictor, done: int, damaged: int, counts: np.ndarray) -> str:
    text = f"{done} image{'s' * (done != 1)} by {predictor.path}" + f", {damaged} damaged" * (damaged > 0)
    if counts.any():
        accuracy, iou = np.trace(counts) / counts.sum(), np.nanmean(Confusion.iou(counts))
        text += f", accuracy {accuracy:.4f} of pixels, mean IoU {iou:.4f}"
    return text


def _stems(dataset: Dataset) -> list[str]:
    """Names of the pictures of all images.

    Raises:
        ValueError: two images of one name.
    """
    if not hasattr(dataset, "files"):
        return [str(place) for place in range(len(dataset))]
    stems = [Path(file).stem for file in dataset.files]
    if len(set(stems)) < len(stems):
        twice = next(stem for stem in stems if stems.count(stem) > 1)
        raise ValueError(f"two images are called {twice}, and so would be their masks; predict on one folder at a time")
    return stems


def _write_mask(path: Path, classes: np.ndarray) -> None:
    """A picture whose pixels are the numbers of classes, each shown in a colour of its own."""
    if classes.max(initial=0) > 255:
        raise ValueError(f"{path}: a picture holds 256 classes; minidl.predict.Predictor tells of more")
    picture = pillow().fromarray(classes.astype(np.uint8))
    picture.putpalette(_palette())
    text = io.BytesIO()
    picture.save(text, "png")
    checkpoint.write_whole(path, text.getvalue())


def _palette() -> bytes:
    """Colours of 256 classes as Pascal VOC has them: 0 is black, and the low bits of a number make the large steps."""
    numbers = np.arange(256)
    colours = np.zeros((256, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((numbers >> channel & 1) << (7 - bit)).astype(np.uint8)
        numbers >>= 3
    return colours.tobytes()
