"""Mini-batches: one global order, cut into one shard per rank, prepared ahead by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidl import checks, cpu
from minidl.data.augment import Augmentation, Draw
from minidl.data.counter import random_words, shuffled
from minidl.data.dataset import Dataset, per_channel
from minidl.data.mixup import MixUp
from minidl.precision import Precision, bfloat16, float16, float32, precision

_AUGMENT_STREAM = 0xDA7A1000
_WHO = "Loader"


@dataclass(frozen=True)
class Batch(checks.Told):
    """This rank's part of one global batch.

    Attributes:
        images: (n, H, W, C) in the loader's dtype, dense; n is 0 when the batch has fewer samples than there are ranks.
        labels: (n,) or (n, H, W) int32; of mixed images (n, num_classes) float32.
        first_sample: position of ``images[0]`` in the epoch, counted over all ranks.
        global_size: samples of the whole batch, over all ranks.
    """

    images: Any
    labels: Any
    first_sample: int
    global_size: int

    def __iter__(self) -> Iterator[Any]:
        """``for images, labels in loader``."""
        return iter((self.images, self.labels))


def shard(count: int, rank: int, size: int) -> tuple[int, int]:
    """Where rank ``rank`` of ``size`` starts and stops in ``count`` samples: contiguous, the first ranks one more."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


class Loader:
    """Iterates over one epoch of this rank's shards; the next ``for`` loop runs the next epoch.

    The samples of global batch ``i`` depend on (seed, epoch) only. Each rank takes a contiguous shard of it, and all
    ranks see the same number of batches, so their all-reduces stay in step; joining the shards in rank order gives the
    batch of a single rank, augmentation included.

    A loop that was left early goes on where it stopped when iterated again, as does one that was restored from
    :meth:`state`. One iteration is alive at a time.

    Args:
        dataset: see :class:`~minidl.data.Dataset`.
        batch: samples of a global batch, over all ranks.
        rank, size: this rank and how many there are.
        seed: of the order and of the augmentation.
        shuffle: a new order each epoch, instead of the data set's own.
        drop_last: leave out a last, smaller batch.
        augment: see :mod:`minidl.data.augment`; gets the images as the data set gives them.
        mix: mixes the augmented images and their labels in pairs; for data sets of one label an image.
        mean, std: per channel, of images scaled to [0, 1]; the images become ``(image - mean) / std``. Default: those
            of the data set, where it has them.
        dtype: storage dtype of the images: float32, bfloat16 or float16; or that of a precision, such as "bf16".
        workers: threads that prepare batches ahead, each a batch at a time; 0 prepares them when they are asked for.
            Results do not depend on it.
        prefetch: batches prepared ahead, at most; at least one per worker.
        transfer: takes a NumPy array to where the network wants it. Called in the thread that iterates, with the images
            and then the labels of each batch; when the next batch is already prepared it is called for that one before
            the current batch is handed out. Its methods ``start`` and ``wait``, if it has them, let that copy run
            beside the step, see `minidl.cuda.transfer.Uploader`. Staging memory must hold two batches.
        normalise: normalises and rounds what ``transfer`` returned, as the ``normalise`` of an operation table does;
            then images travel as the data set gives them. None: the workers normalise, with the same result.

    Raises:
        ValueError: an argument out of range, an empty data set, an item of another shape than the first.
        TypeError: an item's image or label of another kind than the protocol allows.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augmentation | None = None,
        mix: MixUp | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: Any = np.float32,
        workers: int = 1,
        prefetch: int = 2,
        transfer: Callable[[np.ndarray], Any] | None = None,
        normalise: Callable[[Any, Any, Any, np.dtype], Any] | None = None,
    ):
        self.dataset = dataset
        self.samples = checks.at_least(_WHO, "len(dataset)", len(dataset), 1)
        self.batch = checks.at_least(_WHO, "batch", batch, 1)
        self.size = checks.at_least(_WHO, "size", size, 1)
        self.rank = checks.at_least(_WHO, "rank", rank, 0)
        if rank >= size:
            raise checks.bad_value(_WHO, "rank", f"below size ({size})", rank)
        self.seed = checks.at_least(_WHO, "seed", seed, 0)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        if drop_last and batch > self.samples:
            expected = f"at most {self.samples}, the size of the data set, with drop_last"
            raise checks.bad_value(_WHO, "batch", expected, batch)
        named = isinstance(dtype, str | Precision)
        self.dtype = precision(dtype).storage if named else np.dtype(dtype)
        if self.dtype not in (float32, bfloat16, float16):
            raise checks.bad_dtype(_WHO, "dtype", "float32, bfloat16 or float16", self.dtype)
        self.workers = checks.at_least(_WHO, "workers", workers, 0)
        self.prefetch = max(checks.at_least(_WHO, "prefetch", prefetch, 1), self.workers)
        for name, function, remedy in (
            ("augment", augment, "RandomHorizontalFlip(), Compose(...) and others make one"),
            ("transfer", transfer, "model.ops.uploader() makes one"),
            ("normalise", normalise, "model.ops.normalise is one"),
        ):
            if function is not None:
                checks.function(_WHO, name, function, "a function of images", remedy)
        if mix is not None and not isinstance(mix, MixUp):
            raise checks.bad_dtype(_WHO, "mix", "a MixUp", checks.describe(mix), "MixUp(num_classes, alpha) makes one")
        self.augment, self.mix, self.transfer, self.normalise = augment, mix, transfer, normalise
        self.epoch = 0
        self._next = 0  # the batch of this epoch that is handed out next
        self._iteration: object | None = None
        self._image, self._label = _check_first(dataset[0])
        if mix is not None and self._label.ndim:
            raise checks.bad_value(_WHO, "mix", "None for a data set of label maps", mix)
        classes = getattr(dataset, "num_classes", None)
        if mix is not None and classes not in (None, mix.num_classes):
            raise checks.bad_value(_WHO, "mix", f"of {classes} classes, like the data set", mix)
        mean = getattr(dataset, "mean", None) if mean is None else mean
        std = getattr(dataset, "std", None) if std is None else std
        self._scale, self._shift = _affine(self._image, mean, std)
        self._mean, self._std = ([float(v) for v in values] if values is not None else None for values in (mean, std))
        self._placed: tuple[Any, Any] | None = None  # the two where the images are normalised

    def __len__(self) -> int:
        """Global batches in an epoch, the same on every rank."""
        whole, rest = divmod(self.samples, self.batch)
        return whole + (rest > 0 and not self.drop_last)

    def state(self) -> dict[str, int | bool]:
        """Where the loader stands: JSON, for :meth:`restore`. The same on every rank and for any number of ranks."""
        return {"epoch": self.epoch, "next_batch": self._next, **self._identity()}

    def plan(self) -> str:
        """What all ranks must share, in words: :meth:`state`, and how the images are augmented, normalised, rounded."""
        normal = f"scale {self._scale.tolist()}, shift {self._shift.tolist()}"
        items = f", items {self.dataset.fingerprint}" if hasattr(self.dataset, "fingerprint") else ""
        augmented = f"augment {checks.wording(self.augment)}, mix {self.mix}"
        return f"{self.state()}{items}, {augmented}, dtype {self.dtype}, {normal}"

    def recipe(self) -> dict[str, Any]:
        """How this loader makes inputs of images, and what the classes are called: JSON, for `minidl.predict`."""
        classes = getattr(self.dataset, "classes", None)
        return {
            "shape": list(self._image.shape),
            "margin": float(getattr(self.dataset, "margin", 1.0)),
            "mean": self._mean,
            "std": self._std,
            "classes": None if classes is None else [str(name) for name in classes],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where :meth:`state` was taken, in the middle of an epoch too.

        Raises:
            ValueError: the state is of another order of samples (seed, batch, data set size, shuffle or drop_last).
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise checks.bad_value(_WHO, f"state[{name!r}]", f"{own!r} as in this loader", state.get(name))
        self.epoch = checks.at_least(_WHO, "state['epoch']", state.get("epoch", -1), 0)
        following = checks.at_least(_WHO, "state['next_batch']", state.get("next_batch", -1), 0)
        if following > len(self):
            raise checks.bad_value(_WHO, "state['next_batch']", f"at most {len(self)}", following)
        self._next = following

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current epoch, as :class:`Batch` objects."""
        self._iteration = token = object()
        return self._run(token)

    def _identity(self) -> dict[str, int | bool]:
        """What fixes the order of the samples."""
        return {
            "seed": self.seed,
            "batch": self.batch,
            "samples": self.samples,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _run(self, token: object) -> Iterator[Batch]:
        epoch, first = self.epoch, self._next
        prepared = self._prepared(epoch, range(first, len(self)))
        try:
            for index, batch in enumerate(prepared, first):
                self._require(token)
                self._next = index + 1
                yield batch
            self._require(token)
            self.epoch, self._next = epoch + 1, 0
        finally:
            prepared.close()

    def _require(self, token: object) -> None:
        if self._iteration is not token:
            raise checks.order(_WHO, "this iteration was ended by a newer one", "use one loader for each loop")

    def _prepared(self, epoch: int, indices: range) -> Iterator[Batch]:
        """Batches in order, transferred, with up to ``prefetch`` of them being prepared by the workers."""
        order = shuffled(self.samples, self.seed, epoch) if self.shuffle else np.arange(self.samples)
        if self.workers == 0:
            yield from (self._arrived(self._started(self._make(order, epoch, index))) for index in indices)
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="minidl-loader")
        waiting: deque[Future] = deque()
        todo = iter(indices)

        def refill() -> None:
            while len(waiting) < self.prefetch and (index := next(todo, None)) is not None:
                waiting.append(pool.submit(self._make, order, epoch, index))

        try:
            refill()
            ahead = None  # the next batch, when its transfer has already started
            while waiting or ahead is not None:
                batch = ahead if ahead is not None else self._started(waiting.popleft().result())
                refill()
                batch, ahead = self._arrived(batch), None
                if self.transfer is not None and waiting and _succeeded(waiting[0]):
                    ahead = self._started(waiting.popleft().result())
                    refill()
                yield batch
        finally:
            self._wait()  # memory of a batch that nobody will see must not be handed out while a copy writes to it
            pool.shutdown(wait=True, cancel_futures=True)

    def _started(self, batch: Batch) -> Batch:
        """The batch as its transfer returns it, which may still be under way."""
        if self.transfer is None:
            return batch
        start = getattr(self.transfer, "start", self.transfer)
        images = start(batch.images)
        return replace(batch, images=images, labels=start(batch.labels))

    def _wait(self) -> None:
        wait = getattr(self.transfer, "wait", None)
        if wait is not None:
            wait()

    def _arrived(self, batch: Batch) -> Batch:
        """A batch whose transfer was started, ready for the network."""
        self._wait()
        if self.normalise is None:
            return batch
        if self._placed is None:
            place = self.transfer or np.asarray
            self._placed = place(self._scale), place(self._shift)
        return replace(batch, images=self.normalise(batch.images, *self._placed, self.dtype))

    def _make(self, order: np.ndarray, epoch: int, index: int) -> Batch:
        """This rank's shard of global batch ``index``: fetched, augmented, and normalised unless that comes later."""
        begin = index * self.batch
        count = min(self.batch, self.samples - begin)
        start, stop = shard(count, self.rank, self.size)
        images, labels = self._shard(order, begin + start, begin + stop, epoch)
        if self.normalise is None:
            images = np.ascontiguousarray(cpu.normalise(images, self._scale, self._shift, self.dtype))
        return Batch(images, labels, begin + start, count)

    def _shard(self, order: np.ndarray, start: int, stop: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples at positions ``start .. stop`` of an epoch: augmented, mixed."""
        if self.mix is None:
            images, labels = self._augmented(order[start:stop], epoch)
            return np.ascontiguousarray(images), np.ascontiguousarray(labels, np.int32)
        first, last = self.mix.span(start, stop, self.samples)
        own = np.arange(start, stop)
        other = np.where(own ^ 1 < self.samples, own ^ 1, own)
        shares = self.mix.shares(self.seed, epoch, order[start:stop])
        return self.mix(*self._augmented(order[first:last], epoch), np.stack([own, other]) - first, shares)

    def _augmented(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        draw = self._draw(indices, epoch)
        if self.augment is None:
            return self._fetch(indices)
        if hasattr(self.augment, "fetch"):
            return self.augment.fetch(self.dataset, indices, draw)
        return self.augment(*self._fetch(indices), draw)

    def _draw(self, indices: np.ndarray, epoch: int) -> Draw:
        return lambda stream: random_words(self.seed, epoch, _AUGMENT_STREAM + stream, indices)

    def _fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items at ``indices``, stacked."""
        if hasattr(self.dataset, "take"):
            images, labels = self.dataset.take(indices)
            for argument, found, first in (("images", images, self._image), ("labels", labels, self._label)):
                if found.shape != (len(indices), *first.shape):
                    expected = f"{(len(indices), *first.shape)}"
                    raise checks.bad_shape(_WHO, f"{argument} of dataset.take", expected, found.shape)
            return images, labels
        images = np.empty((len(indices), *self._image.shape), self._image.dtype)
        labels = np.empty((len(indices), *self._label.shape), np.int32)
        for row, index in enumerate(indices):
            image, label = _pair(self._item(int(index)), index)
            _require_same(f"image of item {index}", image, self._image)
            _require_same(f"label of item {index}", label, self._label)
            images[row], labels[row] = image, label
        return images, labels

    def _item(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"{_WHO}: it was item {index} of the data set")
            raise


def _pair(item: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Image and label of an item."""
    if not (isinstance(item, Sequence) and len(item) == 2):
        raise checks.bad_dtype(_WHO, f"dataset[{index}]", "a pair (image, label)", type(item).__name__)
    return np.asarray(item[0]), np.asarray(item[1])


def _succeeded(future: Future) -> bool:
    return future.done() and future.exception() is None


def _require_same(argument: str, found: np.ndarray, first: np.ndarray) -> None:
    """The shape of item 0, and its dtype up to the width of integers."""
    if found.shape != first.shape:
        raise checks.bad_shape(_WHO, argument, f"{first.shape}, like item 0", found.shape)
    if found.dtype != first.dtype and not (found.ndim < 3 and found.dtype.kind in "iu"):
        raise checks.bad_dtype(_WHO, argument, f"{first.dtype}, like item 0", found.dtype)


def _check_first(item: Any) -> tuple[np.ndarray, np.ndarray]:
    """The first item of a data set, checked against the protocol."""
    image, label = _pair(item, 0)
    if image.dtype not in (np.float32, np.uint8):
        raise checks.bad_dtype(_WHO, "image of item 0", "float32 or uint8", image.dtype)
    if image.ndim != 3:
        raise checks.bad_shape(_WHO, "image of item 0", "(height, width, channels)", image.shape)
    if label.dtype.kind not in "iu":
        raise checks.bad_dtype(_WHO, "label of item 0", "an integer or an array of integers", label.dtype)
    if label.shape not in ((), image.shape[:2]):
        raise checks.bad_shape(_WHO, "label of item 0", f"() or {image.shape[:2]}, like the image", label.shape)
    return image, label


def _affine(
    image: np.ndarray, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(scale, shift), float32 per channel: to [0, 1] if the images are uint8, then ``(x - mean) / std``."""
    channels = image.shape[2]
    values = {"mean": (0.0,) * channels if mean is None else mean, "std": (1.0,) * channels if std is None else std}
    for name, value in values.items():
        per_channel(_WHO, name, value, channels)
    mean, std = np.asarray(values["mean"], np.float64), np.asarray(values["std"], np.float64)
    if not (std > 0).all():
        raise checks.bad_value(_WHO, "std", "positive", values["std"])
    unit = 255.0 if image.dtype == np.uint8 else 1.0
    return (1 / (unit * std)).astype(np.float32), (-mean / std).astype(np.float32)
