"""Weight sharing: the weights of a layer take a few values, which go on being trained.

S. Han, H. Mao, W. Dally, "Deep compression", ICLR 2016, section 3: k-means in one dimension from centroids that lie
evenly between the smallest and the largest weight; then the gradient of a centroid is the sum of its members'.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist.agree import require_same_arrays
from minidl.model import Model
from minidl.optim import SGD
from minidl.precision import float32

MOST_CLUSTERS = 255  # beside zero, in a byte
_CODES = "codes."
_ROUNDS = 50


@dataclass(frozen=True)
class SharedWeight:
    """A weight as ``codebook[codes]``.

    Attributes:
        codes: uint8, in the weight's shape; 0 is zero: what was pruned.
        codebook: float32; its first element is 0, the others rise.
    """

    codes: np.ndarray
    codebook: np.ndarray

    def dense(self) -> np.ndarray:
        """The weight, float32."""
        return self.codebook[self.codes]


def share_weights(weights: Mapping[str, np.ndarray], clusters: int = 32) -> dict[str, SharedWeight]:
    """The values that each array's nonzeros can best share, by k-means; zeros stay zero.

    Args:
        weights: float32 arrays by name, each with a codebook of its own.
        clusters: values beside zero, 1 to 255. Arrays that have no more distinct values keep those, exactly.

    Raises:
        ValueError: a number of clusters that is none, weights that are not finite.
        TypeError: arrays that are not float32.
        ImportError: SciPy is not installed.
    """
    if checks.at_least("share_weights", "clusters", clusters, 1) > MOST_CLUSTERS:
        raise checks.bad_value("share_weights", "clusters", f"at most {MOST_CLUSTERS}", clusters)
    found = {}
    for name, weight in weights.items():
        if weight.dtype != float32:
            raise checks.bad_dtype("share_weights", name, "float32", weight.dtype)
        if not np.isfinite(weight).all():
            raise checks.bad_value("share_weights", name, "finite", "NaN or infinity")
        found[name] = _share(weight, clusters)
    return found


def _share(weight: np.ndarray, clusters: int) -> SharedWeight:
    values = weight[weight != 0]
    centres = np.unique(values)
    if centres.size > clusters:
        centres = _k_means(values, clusters)
    codes = np.zeros(weight.shape, np.uint8)
    between = (centres[1:].astype(np.float64) + centres[:-1]) / 2
    codes[weight != 0] = 1 + np.searchsorted(between, values)
    return SharedWeight(codes, np.concatenate([np.zeros(1, float32), centres]))


def _k_means(values: np.ndarray, clusters: int) -> np.ndarray:
    """At most so many centroids, float32, rising and none of them zero; those that nobody is near are left out."""
    try:
        from scipy.cluster.vq import kmeans2
    except ImportError as error:
        raise checks.missing_extra("weight sharing", "compress", error) from error
    values = values.astype(np.float64)
    start = np.linspace(values.min(), values.max(), clusters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of empty clusters: pruning left a gap around zero
        centres, member = kmeans2(values[:, None], start[:, None], iter=_ROUNDS, minit="matrix")
    centres = np.unique(centres[np.unique(member), 0].astype(float32))
    return centres[centres != 0]


class SharedSGD(SGD):
    """`SGD` that trains what weights share: members of a cluster move together, and zeros stay.

    Args:
        shared: by weight name, from `share_weights`; the weights are set to what it says.
        others: as `SGD`.

    The sums over members are taken on the host, in float64 and in the order in which they lie; steps run eagerly.

    Raises:
        ValueError: as `SGD`; a name that is not trained, codes of another shape, ranks that differ.
        TypeError: what is no `SharedWeight`.
    """

    def __init__(self, model: Model, lr: float, *args: Any, shared: Mapping[str, SharedWeight], **options: Any):
        super().__init__(model, lr, *args, **options)
        trained = {s.full_name: s for s in self.arena.segments if s.trainable}
        for name, one in shared.items():
            if name not in trained:
                raise checks.unknown("trained parameter", name, trained)
            checks.instance(
                "SharedSGD", name, one, SharedWeight, "a SharedWeight", "share_weights makes them of weights"
            )
            if one.codes.shape != trained[name].shape:
                raise checks.bad_shape("SharedSGD", name, str(trained[name].shape), one.codes.shape)
        require_same_arrays(model.comm, "shared weights", {name: one.dense() for name, one in shared.items()})
        self._tied = [(trained[name], one.codes.reshape(-1)) for name, one in shared.items()]
        self._set({name: one.dense() for name, one in shared.items()})

    def _set(self, weights: Mapping[str, np.ndarray]) -> None:
        host = self.ops.to_host(self.arena.master).copy()
        for segment, _ in self._tied:
            host[segment.offset : segment.offset + segment.size] = weights[segment.full_name].reshape(-1)
        self.ops.copy_into(self.arena.master, self.ops.from_host(host))
        self.arena.refresh_working()

    def update(self) -> None:
        """As `SGD.update`; not within a captured step, as the host adds up."""
        super().update()

    def update_in_backward(self, slots: int | None = None) -> None:
        """As `SGD.update_in_backward`.

        Raises:
            ValueError: as there; on one rank, where the gradient of a shared weight is made in tiles.
        """
        tiled = next((s.full_name for s, _ in self._tied if s.rows and self.arena.comm.size == 1), None)
        if tiled is not None:
            text = f"updates within the backward pass: {tiled} is updated in tiles, its values by sums over all of it"
            raise checks.impossible("SharedSGD", text, "leave one of the two out")
        super().update_in_backward(slots)

    def gradients_in_momentum(self) -> None:
        """Refused: gradients of shared weights are added up by themselves."""
        text = "gradients added to the momentum: those of shared weights are added up by themselves"
        raise checks.impossible("SharedSGD", text, "leave one of the two out")

    def _condition(self, begin: int, end: int) -> None:
        for segment, codes in self._tied:
            if begin <= segment.offset < end:
                gradient = self.arena.gradient(segment.offset, segment.offset + segment.size)
                sums = np.bincount(codes, weights=self.ops.to_host(gradient))
                sums[0] = 0
                self.ops.copy_into(gradient, self.ops.from_host(sums.astype(float32)[codes]))
        super()._condition(begin, end)

    def shared(self) -> dict[str, SharedWeight]:
        """The weights as they are now, by name."""
        host, found = self.ops.to_host(self.arena.master), {}
        for segment, codes in self._tied:
            values = host[segment.offset : segment.offset + segment.size]
            codebook = np.zeros(int(codes.max(initial=0)) + 1, float32)
            codebook[codes] = values
            found[segment.full_name] = SharedWeight(codes.reshape(segment.shape).copy(), codebook)
        return found

    def state_dict(self) -> dict[str, np.ndarray]:
        """`SGD.state_dict` and the codes."""
        codes = {f"{_CODES}{s.full_name}": codes.reshape(s.shape).copy() for s, codes in self._tied}
        return super().state_dict() | codes

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`, with the codes of it; load the model's state first."""
        super().load_state_dict(state)
        self._tied = [(s, np.array(state[f"{_CODES}{s.full_name}"]).reshape(-1)) for s, _ in self._tied]
