"""Images mixed in pairs, and their labels with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minidl import checks
from minidl.data.counter import random_words

_STREAM = 0xDA7A2000
_TRIES = 32  # pairs of numbers drawn, at most, until one fits; with alpha = 1 every second does


@dataclass(frozen=True)
class MixUp:
    """Every image becomes ``λ·image + (1 − λ)·partner``, its label the same mixture of two classes.

    Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018. λ comes from Beta(alpha, alpha) by the
    sample's own random words. Partners are the neighbours 2i and 2i + 1 of the shuffled epoch, augmented as themselves;
    the last of an odd number stays alone. All this depends on seed, epoch and sample, not on ranks or workers.

    Bytes are rounded to bytes again. Labels become float32 (n, num_classes), which `SoftmaxCrossEntropy` takes.

    Args:
        num_classes: of the labels.
        alpha: in (0, 1]; the larger, the more is mixed. The paper's choice for ImageNet is 0.2, for CIFAR-10 1.
    """

    num_classes: int
    alpha: float = 0.2

    def __post_init__(self) -> None:
        checks.at_least("MixUp", "num_classes", self.num_classes, 2)
        checks.number("MixUp", "alpha", self.alpha, "in (0, 1]", lambda value: 0 < value <= 1)

    def span(self, start: int, stop: int, count: int) -> tuple[int, int]:
        """The positions of ``count`` that ``start .. stop`` and their partners take, in whole pairs."""
        return start - start % 2, min(stop + stop % 2, count)

    def shares(self, seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
        """λ of the samples ``indices``: float32, each from Beta(alpha, alpha).

        By Jöhnk's method ("Erzeugung von betaverteilten und gammaverteilten Zufallszahlen", Metrika 8, 1964): u^(1/α)
        over its sum with v^(1/α), of the first pair whose sum is at most 1.
        """
        words = np.stack([random_words(seed, epoch, _STREAM + i, indices) for i in range(_TRIES // 2)], axis=1)
        unit = (words.reshape(len(indices), _TRIES, 2) + 0.5) / 2.0**32
        u, v = np.moveaxis(np.log(unit) / self.alpha, -1, 0)
        fits = np.logaddexp(u, v) <= 0
        fits[:, -1] = True
        first = fits.argmax(axis=1)[:, None]
        difference = np.take_along_axis(v - u, first, axis=1)[:, 0]
        return (1 / (1 + np.exp(np.minimum(difference, 700.0)))).astype(np.float32)

    def __call__(
        self, images: np.ndarray, labels: np.ndarray, partner: np.ndarray, shares: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mix rows of a batch.

        Args:
            images: (n, H, W, C) uint8 or float32; labels: (n,) integers.
            partner: (2, k), of each result the row of its image and that of its partner.
            shares: (k,) of `shares`.

        Returns:
            images (k, H, W, C) of the same dtype; labels (k, num_classes) float32.

        Raises:
            ValueError: for a label that is no class.
        """
        if labels.size and not (0 <= labels.min() and labels.max() < self.num_classes):
            expected = f"in 0..{self.num_classes - 1}"
            raise checks.bad_value("MixUp", "labels", expected, [int(labels.min()), int(labels.max())])
        one, other = partner
        share = shares.reshape(-1, 1, 1, 1)
        mixed = share * images[one] + (1 - share) * images[other]
        if images.dtype == np.uint8:
            mixed = np.rint(mixed)
        target = np.zeros((len(one), self.num_classes), np.float32)
        row = np.arange(len(one))
        target[row, labels[one]] = shares
        target[row, labels[other]] += 1 - shares
        return mixed.astype(images.dtype), target
