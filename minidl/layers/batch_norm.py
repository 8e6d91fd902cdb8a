"""Batch normalisation."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist.communicator import Communicator
from minidl.initializers import Initializer, ones
from minidl.layers.affine_norm import AffineNorm
from minidl.profile import Cost, PassCost
from minidl.value import (
    GatedGradient,
    MaskedGradient,
    Normalized,
    NormGradient,
    Origin,
    PooledGradient,
    TiledGradient,
    Value,
    finished,
    materialize,
)


class BatchNorm2d(AffineNorm):
    """Normalises each channel over batch and image (Ioffe and Szegedy 2015), then scales and shifts it.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics.
        affine: learn a scale (weight) and a shift (bias) per channel.
        sync: in training, use the statistics of the joined batch of all ranks of the model, or of those of a
            communicator (`Communicator.split`), such as the ranks that share the rows of their images.
        weight_init: starting scales; default: ones.

    Shapes:
        x (N, H, W, C) or (N, C) → the same; weight, bias, running_mean, running_var (C,) float32.

    Statistics are merged pairwise as (count, mean, squared deviations) (Chan et al. 1983); the running variance is the
    unbiased one, as in PyTorch. In evaluation mode the running statistics are constants, also for `backward`.

    Raises:
        ValueError: in training with a single value per channel, whose variance says nothing.
    """

    accepts_masked = True
    accepts_unfinished = True  # for the statistics that may come with a finished one
    modes = ("training", "deferred", "lazy")
    # Modes of a fusion plan: whoever reads the output normalises it in a kernel of its own; the convolution below makes
    # its gradients of what this one's is made of.
    deferred = False
    lazy = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        *,
        sync: bool | Communicator = False,
        weight_init: Initializer = ones,
        name: str | None = None,
    ):
        super().__init__(num_features, eps, affine, name, weight_init)
        self.num_features = checks.at_least(self.name, "num_features", num_features, 1)
        self.momentum = checks.number(self.name, "momentum", momentum, "in [0, 1]", lambda v: 0 <= v <= 1)
        if not isinstance(sync, bool | Communicator):
            raise checks.bad_dtype(self.name, "sync", "True, False or a communicator", repr(sync))
        self.sync = sync
        self.buffer_specs = {
            "running_mean": np.zeros(num_features, np.float32),
            "running_var": np.ones(num_features, np.float32),
        }

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._images_or_vectors(shape, self.num_features)

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        """As in `Layer.cost`, in the present mode: in evaluation the running statistics are constants.

        Per element: mean 1, squared deviations 3, ``(x − mean)·scale + shift`` 3 (2 if not affine);
        ``Σ dy`` 1, ``Σ dy·(x − mean)`` 3; ``slope·(dy − a − (x − mean)·b)`` 5, in evaluation ``slope·dy`` 1.
        """
        n, affine = prod(shape), self.affine
        x, vector = n * itemsize, 4 * self.num_features
        moments, parameters = 2 * vector, 2 * vector if affine else 0
        sums = 2 * vector if self.training else 0
        # Running statistics are read; in training, written too. Either way the moments are kept for backward.
        buffers = 4 * vector if self.training else 2 * vector
        statistics = PassCost(4 * n, x) if self.training else PassCost()
        backward_data = PassCost(5 * n, 3 * x + moments) if self.training else PassCost(n, 2 * x + vector)
        return Cost(
            forward=statistics + PassCost((3 if affine else 2) * n, 2 * x + parameters + buffers + moments),
            backward_data=backward_data + PassCost(0, sums + parameters // 2),
            backward_weight=PassCost(4 * n, 2 * x + moments + 2 * vector) if affine or self.training else PassCost(),
        )

    @property
    def _joined(self) -> Communicator | None:
        """The ranks whose batches are one batch, if there are several."""
        comm = self.comm if self.sync is True else self.sync or None
        return comm if comm is not None and comm.size > 1 else None

    def compute(self, x: Any) -> Any:
        if self.folded is not None:
            return x  # and whether the convolution did the work of the ReLU above, too
        stats = None
        if isinstance(x, Value):
            stats, x = x.stats, materialize(self.ops, x).array
        moments, count = self._batch_moments(x, stats) if self.training else (self._running_moments(), None)
        self.save(x=x, moments=moments, count=count)
        return self._normalized(x, moments)

    def recompute(self, saved: SimpleNamespace, x: Any) -> Any:
        if isinstance(x, Value):
            x = materialize(self.ops, x).array
        return self._normalized(x, saved.moments)

    def _normalized(self, x: Any, moments: Any) -> Any:
        affine = self._affine
        if self.deferred:
            return Value(origin=Origin((Normalized(x, moments, *affine, owner=self.name),)))
        return self.ops.batch_norm_apply(x, moments, *affine)

    def _batch_moments(self, x: Any, stats: Any) -> tuple[Any, Any]:
        """Moments and count of the batch, from its statistics where they came with ``x``."""
        if prod(x.shape[:-1]) <= 1 and self._joined is None and not (self._bound and x.shape[0] == 0):
            text = f"training needs more than one value per channel, got x of shape {x.shape}"
            raise checks.impossible(self.name, text, "use a larger batch or evaluation mode")
        if stats is None:
            stats = self.ops.batch_norm_stats(x, finish=False)
        if self._joined is not None:
            stats = self._joined.all_gather(self.ops.batch_norm_merge(stats))
        return self.ops.batch_norm_finalize(stats, self.eps, **self.buffers, momentum=self.momentum)

    def _running_moments(self) -> Any:
        return self.ops.batch_norm_eval_moments(self.buffers["running_mean"], self.buffers["running_var"], self.eps)

    def backward_weight(self, dy: Any) -> None:
        # Parameter gradients are the sums over this rank alone: their message adds up the ranks.
        kept, gradients = self.saved(), self._gradients()
        ops, x, moments = self.ops, kept.x, kept.moments
        if _owes_gate(dy):
            facts = dy.sums, dy.gate, dy.dmean, prod(x.shape[1:-1])
            kept.sums = ops.batch_norm_gate_backward_stats(*facts, moments, **gradients)
        elif isinstance(dy, TiledGradient) and dy.array is None:
            facts = dy.dy, dy.add, x, moments, *self._affine
            kernel = {"kernel": dy.window["kernel"]}
            kept.sums = ops.batch_norm_max_tiles_backward_stats(*facts, **kernel, **gradients)
        elif isinstance(dy, PooledGradient) and dy.array is None:
            kept.sums, dy.array = ops.batch_norm_join_backward_stats(dy.dy, dy.y, dy.largest, moments, **gradients)
        elif isinstance(dy, MaskedGradient) and (parts := dy.parts_of(self.name)) is not None:
            kept.sums = ops.batch_norm_backward_sums(parts, moments, **gradients)
        elif not _owes_mask(dy):
            kept.sums = ops.batch_norm_backward_stats(finished(ops, dy), x, moments, **gradients)
        elif dy.term is not None:
            facts = dy.dy, x, moments, *self._affine
            kept.sums = ops.batch_norm_activate_backward_stats(*facts, *dy.function[:2], **gradients)
        else:
            kept.sums, dy.array = ops.batch_norm_join_backward_stats(dy.dy, dy.y, x, moments, **gradients)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        kept = self.saved()
        sums = kept.sums if kept.count is not None else None  # running statistics are constants
        if sums is not None and self._joined is not None:
            self._joined.all_reduce(sums)
        weight, bias = self._affine
        facts = kept.x, kept.moments, weight, sums, kept.count
        under = kept.x, kept.moments, weight, bias, sums, kept.count  # an activation, which is made again
        if isinstance(dy, PooledGradient):
            if self.lazy and sums is not None and add is None:
                return self._left(dy, *facts)
            dx = NormGradient(dy, *facts).finish(self.ops)
        elif isinstance(dy, TiledGradient) and dy.array is None:
            dx = self.ops.batch_norm_max_tiles_backward_apply(dy.dy, dy.add, *under, kernel=dy.window["kernel"])
        elif _owes_gate(dy):
            dx = self.ops.batch_norm_gate_backward_apply(dy.dy, dy.gate, dy.dmean, *under, *dy.function[:2])
        elif _owes_mask(dy):
            assert dy.term is not None, "backward_weight has masked the gradient of a join"
            return self.ops.batch_norm_activate_backward_apply(dy.dy, *under, *dy.function[:2], add=add)
        else:
            if isinstance(dy, MaskedGradient) and dy.other is not None:
                other, dy.other = dy.other, None  # the second batch norm to come takes nobody's sums
                if dy.norm == self.name and sums is not None and add is None and not self.lazy:
                    dx, dy.parts = self.ops.batch_norm_backward_apply_stats(dy.array, *facts, other.raw, other.moments)
                    dy.norm = other.owner
                    return dx
            dy = finished(self.ops, dy)
            if self.lazy and sums is not None and add is None:
                return self._left(dy, *facts)
            return self.ops.batch_norm_backward_apply(dy, *facts, add=add)
        return dx if add is None else self.ops.add(dx, add)

    def _left(self, dy: Any, x: Any, moments: Any, weight: Any, sums: Any, count: Any) -> NormGradient:
        """What the layer below finishes: this one's parameters must not be updated before."""
        left = NormGradient(dy)
        left.facts = x, moments, self.params.lend("weight", left), sums, count
        return left

    def describe(self) -> str:
        sync = ", sync=True" if self.sync is True else f", sync over {self.sync.size} ranks" if self.sync else ""
        return f"{self.num_features}{self._options(momentum=(self.momentum, 0.1))}{sync}"


def _owes_mask(dy: Any) -> bool:
    """Whether a gradient's mask has still to be applied."""
    return isinstance(dy, MaskedGradient) and not isinstance(dy, GatedGradient | NormGradient) and dy.array is None


def _owes_gate(dy: Any) -> bool:
    """Whether a gradient is one of an activation's input whose gate has still to be applied."""
    return isinstance(dy, GatedGradient) and dy.behind and dy.array is None
