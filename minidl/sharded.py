"""Momentum on one rank each: the state of the optimizer, shared out (Rajbhandari et al., "ZeRO", SC 2020, stage 1)."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from minidl import checks, legality
from minidl.model import Model
from minidl.optim import SGD


class ShardedSGD(SGD):
    """`SGD` whose momentum is shared out: each rank keeps that of its part of every gradient message.

    A rank gets the sum of its part of the gradients (reduce-scatter), updates it and gives it to the others
    (all-gather): the bytes of the all-reduce, but the second half travels after the update instead of beside the
    backward pass. It saves 4 (1 - 1/n) bytes per parameter. Where sums do not depend on how they are made (shared
    memory on one host), the weights have the bits of `SGD`.

    Args:
        model, options: as `SGD`. The model sends its gradients this way from now on.

    Raises:
        ValueError: with clipping, a ring of gradients, or on several ranks in float16: see `minidl.legality`.
    """

    def __init__(self, model: Model, *args: Any, **options: Any):
        if isinstance(model, Model):
            clipped = any(options.get(name) is not None for name in ("clip_value", "clip_norm"))
            scaled = model.precision.loss_scaling and model.comm.size > 1
            legality.refuse("ShardedSGD", sharded=True, scaled=scaled, clipped=clipped)
            model.arena.shard()
        self._collected: np.ndarray | None = None
        super().__init__(model, *args, **options)
        own = [message.own for message in self.arena.messages]
        places = accumulate((end - begin for begin, end in own), initial=0)
        # Where the momentum of each own part begins, by the part's beginning in the arena.
        self._place_of = {begin: place for (begin, _), place in zip(own, places, strict=False)}

    @property
    def _state_size(self) -> int:
        return sum(end - begin for begin, end in (message.own for message in self.arena.messages))

    def _velocity_of(self, begin: int, end: int) -> Any:
        if self.velocity is None:
            return None
        place = self._place_of[begin]
        return self.velocity[place : place + end - begin]

    def update(self) -> None:
        """Update the own parts as messages arrive, and take those of the others."""
        if self.scales_loss:  # one rank alone
            self._collected = None
            super().update()
            return
        arena, self._collected, works = self.arena, None, []
        for message in arena.finished():
            if message.own[0] < message.own[1]:  # a message of few chunks has none for some ranks
                self._update(*message.own)
            part = arena.master[message.begin : message.end]
            works.append(arena.comm.start_all_gather(part, message.cuts, name=message.name))
        for message, work in zip(arena.messages, works, strict=True):
            with self.model.profiler.span(message.name, "wait"):
                work.wait()
            if self._mixed:
                self._round(message.begin, message.own[0])
                self._round(message.own[1], message.end)

    def _round(self, begin: int, end: int) -> None:
        """What another rank has updated, for products."""
        if begin < end:
            self.ops.copy_into(self.arena.working[begin:end], self.arena.master[begin:end])

    def collect(self) -> None:
        """Bring the momentum of all ranks together for `state_dict`; a collective."""
        if self.velocity is None:
            return
        whole = self.ops.zeros((self.arena.trainable_size,), np.dtype(np.float32))
        for message in self.arena.messages:
            begin, end = message.own
            if begin < end:
                self.ops.copy_into(whole[begin:end], self._velocity_of(begin, end))
            part = whole[message.begin : message.end]
            self.arena.comm.start_all_gather(part, message.cuts, name=message.name).wait()
        self._collected = self.ops.to_host(whole)

    def _whole_velocity(self) -> np.ndarray:
        if self._collected is None:
            raise checks.order(
                "ShardedSGD", "the momentum lies on several ranks", "call collect() on all of them first"
            )
        return self._collected

    def load_state_dict(self, state: Any) -> None:
        """As `SGD.load_state_dict`, on all ranks, of any number of ranks; a collective."""
        self.collect()
        super().load_state_dict(state)

    def _set_velocity(self, whole: np.ndarray) -> None:
        for message in self.arena.messages:
            begin, end = message.own
            if begin < end:
                self.ops.copy_into(self._velocity_of(begin, end), self.ops.from_host(whole[begin:end]))
        self._collected = None
