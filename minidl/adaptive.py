"""Optimizers whose steps adapt to the gradients' history or to the size of each layer's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minidl import checks
from minidl.model import Model
from minidl.optim import FIRST_LOSS_SCALE, SGD, ParameterGroup
from minidl.profile import PassCost
from minidl.scalars import BETA1, BETA2, CORRECTION1, CORRECTION2, EPS, SIZE, STEP, TRUST
from minidl.segments import ALIGN, Segment, by_name, flattened


class _Adaptive(SGD):
    """What these optimizers share: a record of scalars and further moments on the device, trust by segment."""

    _moments: tuple[str, ...] = ()  # names of further arenas, as they stand in the state

    def __init__(
        self, model: Model, lr: float, momentum: float, weight_decay: float, decay_norm_and_bias: bool,
        groups: Sequence[ParameterGroup], loss_scale: float, clip_value: float | None, clip_norm: float | None,
        record: Mapping[int, float],
    ):  # fmt: skip
        super().__init__(
            model, lr, momentum, weight_decay, decay_norm_and_bias=decay_norm_and_bias, groups=groups,
            loss_scale=loss_scale, clip_value=clip_value, clip_norm=clip_norm,
        )  # fmt: skip
        fields = np.zeros(SIZE, np.float32)
        fields[list(record)] = list(record.values())
        self.record = self.ops.from_host(fields)
        size = (self.arena.trainable_size,)
        self.moments = {name: self.ops.zeros(size, np.dtype(np.float32)) for name in self._moments}
        self._local: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def parts(self) -> dict[str, object]:
        return super().parts() | {"adaptive": type(self).__name__, "norms": isinstance(self, LAMB | LARS)}

    @property
    def _histories(self) -> list[Any]:
        return [*super()._histories, *self.moments.values()]

    def _row(self, segment: Segment) -> tuple[float, float, float, float]:
        """As in SGD; the last tells whether the step follows the size of this parameter's weights."""
        rate, decay, momentum, _ = super()._row(segment)
        return rate, decay, momentum, float(segment.product or len(segment.shape) > 1)

    def _tables(self, begin: int, end: int) -> tuple[Any, Any, Any]:
        """(segment of each chunk, segments, bounds in chunks) of the parameters in a slice, numbered from 0."""
        if (begin, end) not in self._local:
            inside = [s for s in self._trained if begin <= s.offset < end]
            bounds = np.array([*(s.offset // ALIGN for s in inside), end // ALIGN], np.int32)
            segment_of = np.repeat(np.arange(len(inside), dtype=np.int32), np.diff(bounds))
            rows = np.array([self._row(s) for s in inside], np.float32).reshape(-1, 4)
            self._local[begin, end] = tuple(map(self.ops.from_host, (segment_of, rows, bounds)))
        return self._local[begin, end]

    def plan(self) -> str:
        return f"{super().plan()}, record {self.ops.to_host(self.record).tolist()}"

    def _working(self, part: slice) -> Any:
        return self.arena.working[part] if self._mixed else None

    def _span(self) -> Any:
        return self.model.profiler.span("optimizer", "update")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Moments by parameter name, the control array and the record, as host copies."""
        state = super().state_dict() | {"record": self.ops.to_host(self.record)}
        for moment, array in self.moments.items():
            state |= by_name(self.ops.to_host(array), self._trained, f"{moment}.")
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`. Betas and coefficients stay what this optimizer was made with.

        Raises:
            ValueError: when the names do not match this optimizer.
        """
        super().load_state_dict(state)
        record = self.ops.to_host(self.record).copy()
        for field in (STEP, CORRECTION1, CORRECTION2):
            record[field] = state["record"][field]
        self.ops.copy_into(self.record, self.ops.from_host(record))
        for moment, array in self.moments.items():
            host = flattened(state, self._trained, self.arena.trainable_size, f"{moment}.")
            self.ops.copy_into(array, self.ops.from_host(host))

    def cost(self) -> PassCost:
        """Least work of `step`, as `SGD.cost`: FLOP of the formula, and what each kernel reads or writes."""
        total = PassCost()
        for s in self._trained:
            copy = self.model.precision.storage.itemsize if s.product and self._mixed else 0
            total += PassCost(self._flop * s.size, (self._bytes + copy) * s.size)
            if self.scales_loss:
                total += PassCost(2 * s.size, 4 * s.size)
        return total

    _flop, _bytes = 0, 0  # of an element


def _betas(who: str, betas: Sequence[float]) -> tuple[float, float]:
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise checks.bad_value(who, "betas", "a pair of numbers in [0, 1)", betas)
    first, second = (checks.number(who, "betas", b, "in [0, 1)", lambda v: 0 <= v < 1) for b in betas)
    return first, second


class AdamW(_Adaptive):
    """Adam with decoupled weight decay, as torch.optim.AdamW computes it.

        m = b1·m + (1 − b1)·g;  v = b2·v + (1 − b2)·g²
        w -= lr·(weight_decay·w + m / (1 − b1^t) / (sqrt(v / (1 − b2^t)) + eps))

    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019. A step skipped on overflow does not count
    in t.

    Args:
        model: whose trainable parameters are updated.
        lr, betas, eps, weight_decay: as above; eps by default 1e-8, of LAMB 1e-6.
        decay_norm_and_bias, groups, loss_scale, clip_value, clip_norm: as in `SGD`.
    """

    _moments = ("first", "second")
    _flop, _bytes, _eps = 16, 28, 1e-8

    def __init__(
        self,
        model: Model,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float | None = None,
        weight_decay: float = 1e-2,
        *,
        decay_norm_and_bias: bool = True,
        groups: Sequence[ParameterGroup] = (),
        loss_scale: float = FIRST_LOSS_SCALE,
        clip_value: float | None = None,
        clip_norm: float | None = None,
    ):
        who = type(self).__name__
        first, second = _betas(who, betas)
        eps = checks.number(
            who, "eps", self._eps if eps is None else eps, "above 0, finite", lambda v: 0 < v < math.inf
        )
        super().__init__(
            model, lr, 0.0, weight_decay, decay_norm_and_bias, groups, loss_scale, clip_value, clip_norm,
            {BETA1: first, BETA2: second, EPS: eps},
        )  # fmt: skip

    def _begin(self) -> None:
        with self._span():
            self.ops.adam_advance(self.control, self.record)

    def _update(self, begin: int, end: int) -> None:
        part, arena = slice(begin, end), self.arena
        with self._span():
            self.ops.adamw_update(
                arena.master[part], arena.grad[part], *(m[part] for m in self.moments.values()), self._working(part),
                self.segment_of[begin // ALIGN : end // ALIGN], self.segments, self.control, self.record,
            )  # fmt: skip


class LAMB(AdamW):
    """AdamW whose step is as long as the weights of each parameter, times the learning rate.

        w -= lr·(‖w‖ / ‖u‖)·u,  u = weight_decay·w + AdamW's direction

    You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020. Biases and
    normalisation parameters take plain steps of AdamW. A parameter's norms need all of it first: three kernels for each
    group of gradients.

    Args:
        others: as `AdamW`.
    """

    _flop, _bytes, _eps = 27, 24 + 16, 1e-6

    def _update(self, begin: int, end: int) -> None:
        part, arena = slice(begin, end), self.arena
        segment_of, segments, bounds = self._tables(begin, end)
        moments, scalars = [m[part] for m in self.moments.values()], (self.control, self.record)
        with self._span():
            norms = self.ops.lamb_moments(
                arena.master[part], arena.grad[part], *moments, segment_of, segments, bounds, *scalars
            )
            self.ops.lamb_update(
                arena.master[part], *moments, self._working(part), segment_of, segments, norms, *scalars
            )


class LARS(_Adaptive):
    """SGD with momentum whose gradients are scaled to the size of each parameter's weights.

        trust = trust_coefficient·‖w‖ / (‖g‖ + weight_decay·‖w‖)
        v = momentum·v + trust·(g + weight_decay·w);  w -= lr·v

    You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017. Biases and parameters of
    normalisations take plain steps of SGD. Three kernels for each group of gradients.

    Args:
        model: whose trainable parameters are updated.
        lr, momentum, weight_decay, trust_coefficient: as above.
        decay_norm_and_bias, groups, loss_scale, clip_value, clip_norm: as in `SGD`.
    """

    _flop, _bytes = 11, 8 + 20

    def __init__(
        self,
        model: Model,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        *,
        decay_norm_and_bias: bool = False,
        groups: Sequence[ParameterGroup] = (),
        loss_scale: float = FIRST_LOSS_SCALE,
        clip_value: float | None = None,
        clip_norm: float | None = None,
    ):
        positive = lambda v: 0 < v < math.inf  # noqa: E731
        checks.number("LARS", "trust_coefficient", trust_coefficient, "above 0, finite", positive)
        checks.number("LARS", "momentum", momentum, "in (0, 1)", lambda v: 0 < v < 1)
        super().__init__(
            model, lr, momentum, weight_decay, decay_norm_and_bias, groups, loss_scale, clip_value, clip_norm,
            {TRUST: trust_coefficient},
        )  # fmt: skip

    def _update(self, begin: int, end: int) -> None:
        part, arena = slice(begin, end), self.arena
        segment_of, segments, bounds = self._tables(begin, end)
        with self._span():
            norms = self.ops.segment_norms(arena.master[part], arena.grad[part], bounds, self.control)
            self.ops.lars_update(
                arena.master[part], arena.grad[part], self.velocity[part], self._working(part), segment_of, segments,
                norms, self.control, self.record,
            )  # fmt: skip
