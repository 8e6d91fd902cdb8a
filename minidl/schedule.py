"""Learning-rate schedules: small frozen functions from the training step (0, 1, 2, ...) to the learning rate.

None of them remembers anything, so a resumed run needs the step alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minidl import checks

Schedule = Callable[[int], float]

_FORMS = (
    "constant", "step:30,60,80", "step:30,60,80:0.1", "cosine", "cosine:0.001", "poly", "poly:0.9", "poly:2:0.0001",
    "onecycle", "onecycle:0.3",
)  # fmt: skip


@dataclass(frozen=True)
class Constant:
    """``lr`` at every step."""

    lr: float

    def __post_init__(self) -> None:
        _rate("Constant", "lr", self.lr)

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class Step:
    """``lr * gamma ** (number of milestones reached)``; a milestone is reached at its own step.

    Args:
        lr: before the first milestone.
        milestones: steps, rising.
        gamma: factor at each, above 0.
    """

    lr: float
    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _rate("Step", "lr", self.lr)
        if not isinstance(self.milestones, Iterable):
            raise checks.bad_value("Step", "milestones", "a sequence of steps, such as (30, 60)", self.milestones)
        milestones = tuple(checks.at_least("Step", "milestones", step, 0) for step in self.milestones)
        if list(milestones) != sorted(set(milestones)):
            raise checks.bad_value("Step", "milestones", "rising", self.milestones)
        checks.number("Step", "gamma", self.gamma, "above 0, finite", lambda v: 0 < v < math.inf)
        object.__setattr__(self, "milestones", milestones)

    def __call__(self, step: int) -> float:
        return self.lr * self.gamma ** bisect_right(self.milestones, step)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from ``lr`` at step 0 down to ``final`` at ``total_steps``, and ``final`` from there on.

    ``final + (lr - final) * (1 + cos(pi * step / total_steps)) / 2`` (Loshchilov and Hutter, "SGDR", ICLR 2017, without
    restarts).

    Args:
        lr: learning rate at the start.
        total_steps: at least 1.
        final: learning rate at the end.
    """

    lr: float
    total_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _rate("Cosine", "lr", self.lr)
        checks.at_least("Cosine", "total_steps", self.total_steps, 1)
        _rate("Cosine", "final", self.final)

    def __call__(self, step: int) -> float:
        progress = min(step / self.total_steps, 1.0)
        return _between(self.lr, self.final, progress)


@dataclass(frozen=True)
class Polynomial:
    """``final + (lr - final) * (1 - step / total_steps) ** power``, and ``final`` from ``total_steps`` on.

    Args:
        lr: learning rate at the start.
        total_steps: at least 1.
        power: above 0; 1 is a straight line, 2 is usual with LARS, 0.9 in segmentation.
        final: learning rate at the end.
    """

    lr: float
    total_steps: int
    power: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _rate("Polynomial", "lr", self.lr)
        checks.at_least("Polynomial", "total_steps", self.total_steps, 1)
        checks.number("Polynomial", "power", self.power, "above 0, finite", lambda v: 0 < v < math.inf)
        _rate("Polynomial", "final", self.final)

    def __call__(self, step: int) -> float:
        left = max(1 - step / self.total_steps, 0.0)
        return self.final + (self.lr - self.final) * left**self.power


@dataclass(frozen=True)
class OneCycle:
    """Half a cosine from ``lr / start_factor`` up to ``lr``, then one down to ``lr / start_factor / end_factor``.

    Smith and Topin, "Super-convergence", 2017, with cosines as in torch.optim.lr_scheduler.OneCycleLR.

    Args:
        lr: the highest learning rate, at step ``rise * total_steps - 1``.
        total_steps: at least 2; the last is ``total_steps - 1``.
        rise: fraction of the steps that go up, in (0, 1).
        start_factor, end_factor: at least 1.
    """

    lr: float
    total_steps: int
    rise: float = 0.3
    start_factor: float = 25.0
    end_factor: float = 1e4

    def __post_init__(self) -> None:
        _rate("OneCycle", "lr", self.lr)
        checks.at_least("OneCycle", "total_steps", self.total_steps, 2)
        checks.number("OneCycle", "rise", self.rise, "in (0, 1)", lambda v: 0 < v < 1)
        for name in ("start_factor", "end_factor"):
            value = getattr(self, name)
            checks.number("OneCycle", name, value, "of at least 1, finite", lambda v: 1 <= v < math.inf)

    def __call__(self, step: int) -> float:
        low, top, last = self.lr / self.start_factor, self.rise * self.total_steps - 1, self.total_steps - 1
        if step < top:
            return _between(low, self.lr, step / top)
        progress = min((step - top) / (last - top), 1.0) if last > top else 1.0
        return _between(self.lr, low / self.end_factor, progress)


def _between(start: float, end: float, progress: float) -> float:
    """Half a cosine from ``start`` to ``end``."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Warmup:
    """A straight line from ``start`` at step 0 to what ``schedule`` gives at ``steps``; ``schedule`` from there on.

    The schedule's own clock is not shifted: after the warm-up it is where it would have been without (Goyal et al.,
    "Accurate, large minibatch SGD", 2017).

    Args:
        schedule: from the step to the learning rate, such as `Cosine`.
        steps: of the optimizer, not epochs; at least 0.
        start: learning rate at step 0.
    """

    schedule: Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        remedy = "Constant(lr) and others make one"
        checks.function("Warmup", "schedule", self.schedule, "a function of the step", remedy)
        checks.at_least("Warmup", "steps", self.steps, 0)
        _rate("Warmup", "start", self.start)

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.schedule(step)
        return self.start + (self.schedule(self.steps) - self.start) * step / self.steps


def parse(spec: str, *, lr: float, epochs: int, steps_per_epoch: int, warmup: float | None = 0.0) -> Schedule:
    """The schedule of a command-line word.

    Args:
        spec: ``constant``; ``step:30,60,80`` with milestones in epochs, ``step:30,60,80:0.2`` with another factor than
            0.1; ``cosine``, or ``cosine:0.001`` to end there and not at 0; ``poly``, ``poly:POWER`` or
            ``poly:POWER:END``; ``onecycle``, or ``onecycle:RISE`` with the fraction of the steps that go up.
        lr: learning rate after the warm-up.
        epochs: of the whole run, warm-up included.
        steps_per_epoch: steps in an epoch.
        warmup: epochs of linear warm-up from 0, fractions allowed; None: one, of a single epoch a tenth.

    Raises:
        ValueError: an unknown word, numbers that do not parse or are out of range, a warm-up longer than the run, or
            as long where the schedule ends at 0.
    """
    if warmup is None:
        warmup = 1.0 if epochs > 1 else 0.1
    if not 0 <= warmup <= epochs:
        raise checks.bad_value("learning-rate schedule", "warmup", f"in [0, {epochs}], the epochs of the run", warmup)
    try:
        schedule = _parse(spec, lr, epochs, steps_per_epoch)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"learning-rate schedule {spec!r}: {error}") from error
    steps = round(warmup * steps_per_epoch)
    if steps and not schedule(steps) and lr:
        raise checks.bad_value("learning-rate schedule", "warmup", f"shorter than the run, as {spec} ends at 0", warmup)
    return Warmup(schedule, steps) if steps else schedule


def _parse(spec: str, lr: float, epochs: int, steps_per_epoch: int) -> Schedule:
    name, *arguments = spec.split(":")
    match name, arguments:
        case "constant", []:
            return Constant(lr)
        case "step", [milestones, *gamma] if len(gamma) <= 1:
            steps = tuple(round(float(epoch) * steps_per_epoch) for epoch in milestones.split(","))
            return Step(lr, steps, *map(float, gamma))
        case "cosine", [*final] if len(final) <= 1:
            return Cosine(lr, epochs * steps_per_epoch, *map(float, final))
        case "poly", [*numbers] if len(numbers) <= 2:
            return Polynomial(lr, epochs * steps_per_epoch, *map(float, numbers))
        case "onecycle", [*rise] if len(rise) <= 1:
            return OneCycle(lr, epochs * steps_per_epoch, *map(float, rise))
    raise ValueError(f"expected one of the forms {', '.join(_FORMS)}")


def _rate(who: str, argument: str, value: float) -> None:
    checks.number(who, argument, value, "of at least 0, finite", lambda v: 0 <= v < math.inf)
