"""Optimizers: one kernel over flat slices of the arenas, waiting for each gradient message in the order they started.

Learning rate, loss scale and the overflow flag live in a small array on the device, which the kernel reads: the host
decides nothing inside a step, so a whole step can be captured and replayed.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import checkpoint, checks, legality
from minidl.dist.agree import require_same
from minidl.layers import RowParallelConv2d
from minidl.model import Model
from minidl.profile import PassCost
from minidl.scalars import GOOD_STEPS, GROWTH_INTERVAL, LOSS_SCALE, LR, MOMENTUM, NONFINITE, SIZE, SKIPPED_STEPS
from minidl.segments import ALIGN, Message, Segment, by_name, flattened

FIRST_LOSS_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000
TOUCHED = 20  # bytes of an update for each parameter: weight and momentum twice, the gradient


def __getattr__(name: str) -> None:
    raise checks.elsewhere(name, globals(), module=__name__)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose full name matches ``pattern`` (``fnmatch``): another learning rate or weight decay.

    Attributes:
        lr_scale: factor on the learning rate.
        weight_decay: instead of the optimizer's; None keeps that.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            remedy = 'such as "layer1.*"'
            raise checks.bad_dtype("ParameterGroup", "pattern", "a text", checks.describe(self.pattern), remedy)


@dataclass(frozen=True)
class Visit:
    """Momentum of elements ``begin`` to ``end`` of the arena that lies on the host between updates.

    Attributes:
        here: the array on the device, for use within the update.
        host: the one on the host, for use between steps.
    """

    begin: int
    end: int
    here: Callable[[], Any]
    host: Callable[[], np.ndarray]


def _runs(messages: Iterable[Message]) -> Iterator[tuple[int, int]]:
    """Where stretches of neighbouring messages begin and end."""
    begin = end = 0
    for message in messages:
        if message.begin != end:
            if begin < end:
                yield begin, end
            begin = message.begin
        end = message.end
    if begin < end:
        yield begin, end


def _finite(who: str, argument: str, value: float) -> None:
    checks.number(who, argument, value, "of at least 0, finite", lambda v: 0 <= v < math.inf)


class SGD(checks.Told):
    """Stochastic gradient descent with momentum, as torch.optim.SGD computes it.

        g = grad + weight_decay·w;  v = momentum·v + g;  w -= lr·(g + momentum·v if nesterov else v)

    Args:
        model: whose trainable parameters are updated.
        lr: learning rate; change it between steps through `set_lr`.
        momentum, weight_decay, nesterov: as above.
        decay_norm_and_bias: False exempts biases and batch-norm parameters (one-dimensional, in no product) from decay.
        groups: exceptions by name; the first pattern that matches counts.
        loss_scale: first scale of the loss, for float16; it then doubles after 2000 good steps and halves on overflow.
        clip_value: bounds every gradient by ±this.
        clip_norm: scales all gradients down together where their norm is larger, that of the joined batch of all ranks
            (Pascanu, Mikolov and Bengio, ICML 2013). All messages must then have arrived before the update.

    With float16 a step whose gradients overflow changes nothing; which it is, is decided on the device.
    """

    def __init__(
        self,
        model: Model,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        decay_norm_and_bias: bool = True,
        groups: Sequence[ParameterGroup] = (),
        loss_scale: float = FIRST_LOSS_SCALE,
        clip_value: float | None = None,
        clip_norm: float | None = None,
    ):
        who = type(self).__name__
        for argument, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            _finite(who, argument, value)
        for argument, limit in (("clip_value", clip_value), ("clip_norm", clip_norm)):
            if limit is not None:
                checks.number(who, argument, limit, "above 0, finite", lambda v: 0 < v < math.inf)
        if momentum >= 1:
            raise checks.bad_value(who, "momentum", "below 1, or the velocity grows without end", momentum)
        if nesterov and momentum == 0:
            raise checks.bad_value(who, "momentum", "positive with nesterov=True", momentum)
        remedy = "parameters of one model are updated together; freeze with Model(frozen=...)"
        checks.instance(who, "model", model, Model, "a Model", remedy)
        checks.number(who, "loss_scale", loss_scale, "above 0, finite", lambda v: 0 < v < math.inf)
        self.model, self.arena, self.ops = model, model.arena, model.ops
        self.nesterov, self.clip_value, self.clip_norm = nesterov, clip_value, clip_norm
        self.weight_decay, self.decay_norm_and_bias = weight_decay, decay_norm_and_bias
        if not isinstance(groups, Iterable):
            remedy = "write groups=[ParameterGroup(pattern, ...)]"
            raise checks.bad_dtype(who, "groups", "a sequence of ParameterGroups", checks.describe(groups), remedy)
        self.groups = tuple(groups)
        self._check_groups()
        self.scales_loss = model.precision.loss_scaling
        control = np.zeros(SIZE, np.float32)
        control[[LR, MOMENTUM]] = lr, momentum
        control[LOSS_SCALE] = loss_scale if self.scales_loss else 1.0
        control[GROWTH_INTERVAL] = _GROWTH_INTERVAL
        self.control = self.ops.from_host(control)
        self._lr = float(lr)
        self.velocity = self.ops.zeros((self._state_size,), np.dtype(np.float32)) if momentum else None
        self._visits: tuple[Visit, ...] = ()
        self.segment_of, self.segments = self.arena.table(self._row)
        legality.refuse(who, **self.parts())
        require_same(model.comm, "optimizer", [f"{who}, lr {lr:g}, momentum {momentum:g}", SGD.plan(self)])

    def _check_groups(self) -> None:
        names = [s.full_name for s in self._trained]
        who = type(self).__name__
        for group in self.groups:
            checks.instance(who, "groups", group, ParameterGroup, "ParameterGroups", "ParameterGroup(pattern, ...)")
            _finite(who, f"lr_scale of {group.pattern}", group.lr_scale)
            if group.weight_decay is not None:
                _finite(who, f"weight_decay of {group.pattern}", group.weight_decay)
            if not fnmatch.filter(names, group.pattern):
                raise checks.unknown("parameter pattern", group.pattern, names)

    def _row(self, segment: Segment) -> tuple[float, float, float, float]:
        """One row of the segment table: learning-rate scale, weight decay, momentum scale, unused."""
        group = next((g for g in self.groups if fnmatch.fnmatchcase(segment.full_name, g.pattern)), None)
        # The values of a sparse weight are one-dimensional, too, but enter products.
        exempt = len(segment.shape) == 1 and not segment.product and not self.decay_norm_and_bias
        decay = 0.0 if exempt else self.weight_decay
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        return (group.lr_scale if group else 1.0), decay, 1.0, 0.0

    @property
    def _trained(self) -> list[Segment]:
        return [s for s in self.arena.segments if s.trainable]

    @property
    def _state_size(self) -> int:
        """Elements of the momentum that this rank keeps."""
        return self.arena.trainable_size

    @property
    def _histories(self) -> list[Any]:
        """The arrays that remember earlier gradients, each as long as the trained part of the arena."""
        return [self.velocity] if self.velocity is not None else []

    def _velocity_of(self, begin: int, end: int) -> Any:
        """The momentum of a part of the arena, None without momentum."""
        if self.velocity is None:
            return None
        place = begin
        for visit in self._visits:
            if visit.begin <= begin < visit.end:
                return visit.here()[begin - visit.begin : end - visit.begin]
            place -= visit.end - visit.begin if visit.end <= begin else 0
        return self.velocity[place : place + end - begin]

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        raise AttributeError(f"{type(self).__name__}: lr cannot be set so; call set_lr({lr!r})", name="lr", obj=self)

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step.

        Raises:
            ValueError: when it is negative or not finite.
        """
        who = type(self).__name__
        _finite(who, "lr", lr)
        if lr != self._lr and self.arena.updating:
            raise checks.order(who, "the learning rate changes when part of a step is done", "set it before backward")
        if lr != self._lr:
            self.ops.assign(self.control[LR : LR + 1], [lr])
            self._lr = float(lr)

    @property
    def loss_scale(self) -> Any:
        """Device array float32[1] to pass to the loss's `backward`; None where no scaling is needed."""
        return self.control[LOSS_SCALE : LOSS_SCALE + 1] if self.scales_loss else None

    @property
    def skipped_steps(self) -> int:
        """Steps left out because their gradients overflowed; after `load_state_dict` those of an earlier run count too.

        Waits for the device.
        """
        return int(self.ops.to_host(self.control)[SKIPPED_STEPS])

    def plan(self) -> str:
        """What must be alike on all ranks, in words."""
        return (
            f"{type(self).__name__}, weight_decay {self.weight_decay}, decay_norm_and_bias {self.decay_norm_and_bias}, "
            f"nesterov {self.nesterov}, clip_value {self.clip_value}, clip_norm {self.clip_norm}, "
            f"groups {list(self.groups)}, control {self.ops.to_host(self.control).tolist()}"
        )

    def cost(self) -> PassCost:
        """Least work of one `step` of all trained parameters: FLOP of the formula, and bytes of memory that it moves.

        Those are of gradients, weights, momentum and the copy that products read. With loss scaling all gradients are
        tested before the first is used: they are read twice. Clipping is not counted, nor who shares the momentum.
        """
        total = PassCost()
        for s in self._trained:
            decay = self._row(s)[1]
            steps = 1 + bool(decay) + (self.velocity is not None) + self.nesterov
            copy = self.model.precision.storage.itemsize if s.product and self._mixed else 0
            total += PassCost(2 * steps * s.size, (12 + 8 * (self.velocity is not None) + copy) * s.size)
            if self.scales_loss:
                total += PassCost(2 * s.size, 4 * s.size)
        return total

    @property
    def _mixed(self) -> bool:
        """Whether products read a rounded copy of the weights."""
        return self.arena.working is not self.arena.master

    def step(self) -> None:
        """`update` all parameters, then what the host has to do between two steps."""
        self.update()
        self.after_step()

    def after_step(self) -> None:
        """What the host does after every step; called by a compiled step after each replay, which is of `update`."""

    def update(self) -> None:
        """Update all parameters: group by group as messages arrive, or after all of them.

        On one rank no message is under way, and groups would be more kernels for nothing; loss scaling and `clip_norm`
        look at all gradients first.
        """
        messages, whole = self.arena.finished(), (0, self.arena.trainable_size)
        if not self.scales_loss and self.clip_norm is None:
            self._begin()
            alone = self.arena.comm.size == 1 and not self.arena.slots
            for begin, end in _runs(messages) if alone else (message.own for message in messages):
                self._apply(begin, end)
            return
        for _ in messages:
            pass
        if self.scales_loss:
            with self.model.profiler.span("optimizer", "update"):
                self.ops.find_nonfinite(self.arena.grad, self.control)
        self._condition(*whole)
        if self.clip_norm is not None:
            with self.model.profiler.span("optimizer", "update"):
                square = self.ops.gradient_square(self.arena.grad)
                self.ops.clip_norm(self.arena.grad, square, self.clip_norm, self.control)
        self._begin()
        self._update(*whole)
        if self.scales_loss:
            with self.model.profiler.span("optimizer", "update"):
                self.ops.update_loss_scale(self.control)

    @contextmanager
    def early(self, *, rehearse: bool = False) -> Iterator[None]:
        """Within, on one rank, updates that need no more than a message's gradients are beside the backward pass, where
        such work may be (`minidl.cuda.beside`); `update` does the others. No bit changes.

        Args:
            rehearse: keep their places beside it, but leave all to `update`.
        """
        if type(self) is not SGD or self.scales_loss or self.clip_norm is not None or not self.arena.read_at_the_end:
            yield
            return

        def apply(begin: int, end: int) -> bool:
            with self.ops.aside(0, TOUCHED * (end - begin), 4) as beside:
                if updates := beside and not rehearse:
                    self._apply(begin, end)
            return updates

        with self.arena.update_early(apply):
            yield

    def _begin(self) -> None:
        """Before the first update of a step, when it is known whether the gradients overflowed."""

    def _apply(self, begin: int, end: int) -> None:
        if begin < end:  # nothing is left of a message whose tiles are updated
            self._condition(begin, end)
            self._update(begin, end)

    def _condition(self, begin: int, end: int) -> None:
        """What is done to gradients before anything uses them."""
        if self.clip_value is not None:
            with self.model.profiler.span("optimizer", "update"):
                self.ops.clip_values(self.arena.gradient(begin, end), self.clip_value, self.control)

    def _update(self, begin: int, end: int) -> None:
        arena, part = self.arena, slice(begin, end)
        with self.model.profiler.span("optimizer", "update"):
            self.ops.sgd_update(
                arena.master[part],
                None if arena.adds else arena.gradient(begin, end),
                self._velocity_of(begin, end),
                arena.working[part] if self._mixed else None,
                self.segment_of[begin // ALIGN : end // ALIGN],
                self.segments,
                self.control,
                nesterov=self.nesterov,
            )

    def parts(self) -> dict[str, object]:
        """What takes part in this optimizer's steps, by the names of `minidl.legality`."""
        arena, several = self.arena, self.model.comm.size > 1
        return {
            "ring": arena.slots > 0, "in_momentum": arena.adds, "sharded": arena.sharded and several,
            "rounded": arena.wire is not arena.grad,
            "scaled": self.scales_loss, "clipped": self.clip_value is not None or self.clip_norm is not None,
            "rows": any(isinstance(layer, RowParallelConv2d) and layer.group.size > 1 for layer in self.model.layers),
            "filters": any(layer.parted for layer in self.model.layers),
        }  # fmt: skip

    def update_in_backward(self, slots: int | None = None) -> None:
        """From now on update each message's layers within the backward pass; gradients then need ``slots`` messages.

        Weights, momentum and checkpoints stay those of `step` after the backward pass, bit for bit; `step` finishes the
        last messages. ResNet-152 then holds 4 % of its gradients on one rank, VGG-16 12 %: a huge dense layer's are
        made, and updated, in tiles. An error within a backward pass leaves weights of two steps behind: go on from a
        checkpoint.

        Args:
            slots: messages held at once; default: 1 on one rank, 2 on several, where one is under way meanwhile.

        Raises:
            ValueError: where the whole gradient decides on each update, as `minidl.legality` has it.
        """
        legality.refuse(type(self).__name__, **self.parts() | {"ring": True})
        self.arena.ring(slots if slots is not None else 1 if self.arena.comm.size == 1 else 2, self._apply)

    def gradients_in_momentum(self) -> None:
        """From now on backward passes add gradients to the momentum itself: they need no memory of their own.

        When a backward pass begins, the momentum becomes ``momentum·v + weight_decay·w``; each layer adds its gradient,
        micro-batches and ranks theirs, and the update is ``w -= lr·v``. Checkpoints are those of gradients apart. So
        are the bits on one rank without micro-batches, but for layers that add several sums to an element (sparse ones
        on the CPU). With ``u = 2^-24`` and n addends the momentum of a step then differs by at most
        ``(n + 3) u`` times the sum of the magnitudes of ``momentum·v``, ``weight_decay·w`` and all addends. An error
        within a backward pass leaves a momentum that is refused from then on: go on from a checkpoint.

        Raises:
            ValueError: without momentum, with nesterov, or what `minidl.legality` names.
        """
        who = type(self).__name__
        legality.refuse(who, **self.parts() | {"in_momentum": True})
        if self.velocity is None or self.nesterov:
            expected = "positive, and nesterov=False, for gradients to be added to it"
            raise checks.bad_value(who, "momentum", expected, "nesterov" if self.nesterov else 0)
        self.arena.add_to(self.velocity, self._begin_sums)

    def _begin_sums(self) -> None:
        """The momentum that gradients are added to; that of one rank, as messages add up those of all."""
        size = self.arena.trainable_size
        with self.model.profiler.span("optimizer", "update"):
            if self.arena.comm.rank == 0:
                tables = self.segment_of, self.segments, self.control
                self.ops.sgd_begin(self.arena.master[:size], self.velocity, *tables)
            else:
                self.velocity.fill(0)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Momentum by parameter name, and the control array, as host copies.

        Raises:
            RuntimeError: when the momentum holds gradients of an unfinished step.
        """
        if self.arena.half_added:
            raise checks.order(type(self).__name__, "the momentum holds gradients of half a step", "call step() first")
        state = {"control": self.ops.to_host(self.control)}
        if self.velocity is not None:
            state |= by_name(self._whole_velocity(), self._trained, "momentum.")
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`. Momentum stays what this optimizer was made with.

        Raises:
            ValueError: when the names do not match this optimizer.
        """
        remedy = f"it is not that of {type(self).__name__} with these options"
        with self.arena.restoring():
            checkpoint.match(self.state_dict(), state, "optimizer state", remedy)
        control = np.array(state["control"])
        own = self.ops.to_host(self.control)
        # Of a loss scale only where both have one: else it is 1.
        scaled = self.scales_loss and control[LOSS_SCALE] != 1
        for field in (MOMENTUM, GROWTH_INTERVAL, *(() if scaled else (LOSS_SCALE, NONFINITE, GOOD_STEPS))):
            control[field] = own[field]
        self.ops.copy_into(self.control, self.ops.from_host(control))
        self._lr = float(state["control"][LR])
        if self.velocity is not None:
            self._set_velocity(flattened(state, self._trained, self.arena.trainable_size, "momentum."))

    def _whole_velocity(self) -> np.ndarray:
        kept = self.ops.to_host(self.velocity)
        for visit in self._visits:
            kept = np.concatenate((kept[: visit.begin], visit.host(), kept[visit.begin :]))
        return kept

    def _set_velocity(self, whole: np.ndarray) -> None:
        away = np.zeros(whole.size, np.bool_)
        for visit in self._visits:
            visit.host()[:] = whole[visit.begin : visit.end]
            away[visit.begin : visit.end] = True
        self.ops.copy_into(self.velocity, self.ops.from_host(whole[~away]))

    def host_momentum(self, visits: Sequence[Visit]) -> None:
        """Keep the momentum of ``visits``, in ascending order, on the host, all other on the device; as it is.

        Raises:
            ValueError: for another optimizer than plain `SGD` with momentum, or one that does not update in backward.
        """
        if visits and (type(self) is not SGD or self.velocity is None or not self.arena.slots):
            expected = "SGD with momentum after update_in_backward()"
            raise checks.bad_value(type(self).__name__, "optimizer", expected, "another")
        whole = self._whole_velocity()
        self._visits, self.velocity = tuple(visits), None
        size = whole.size - sum(visit.end - visit.begin for visit in visits)
        self.velocity = self.ops.zeros((size,), np.dtype(np.float32))
        self._set_velocity(whole)

    def collect(self) -> None:
        """Before `state_dict` is called on one rank only: bring together what lies on several; a collective."""
