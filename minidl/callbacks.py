"""What looks on while a `Trainer` trains: keeps the best checkpoint, ends in time, draws curves, or what you write.

class Announce(Callback):
    def epoch(self, trainer, row):
        print(row["epoch"], row["test_accuracy"])

Trainer(..., callbacks=[KeepBest(), EarlyStop(patience=5), Announce()])
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from minidl import checks


class Callback:
    """Base class of all callbacks; every method may be left out.

    All ranks call them alike, with the same figures, so a callback may use collectives; files are rank 0's.
    ``trainer`` is the `Trainer`; its `stop` ends training after the epoch.
    """

    @property
    def key(self) -> str:
        """Names it in checkpoints; of its own within a trainer."""
        return type(self).__name__

    def begin(self, trainer: Any) -> None:
        """Before the first step, also when going on from a checkpoint."""

    def report(self, trainer: Any, record: Mapping[str, float]) -> None:
        """After a reading of the loss, every few steps: ``step``, ``loss`` and ``lr``."""

    def epoch(self, trainer: Any, row: Mapping[str, float]) -> None:
        """After an epoch and its evaluation, before its checkpoint: the figures of a row of metrics.csv."""

    def finish(self, trainer: Any) -> None:
        """After the last step; not when training failed."""

    def state(self) -> dict[str, Any]:
        """What has to be in a checkpoint, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""


class _Watching(Callback):
    """Follows one figure of the epochs.

    Args:
        metric: its name in metrics.csv.
        mode: "min" or "max", which is better; None: "min" for losses.
        least: by how much a better figure must differ.
    """

    def __init__(self, metric: str, mode: str | None, least: float = 0.0):
        if mode not in (None, "min", "max"):
            raise checks.unknown(f"mode of {type(self).__name__}", mode, ("min", "max"))
        self.metric = metric
        self._sign = 1 if (mode or ("min" if metric.endswith("loss") else "max")) == "min" else -1
        good = "of at least 0"
        self._least = checks.number(type(self).__name__, "min_delta", least, good, lambda value: 0 <= value < inf)
        self.best: float | None = None

    @property
    def key(self) -> str:
        return f"{type(self).__name__}({self.metric})"

    def begin(self, trainer: Any) -> None:
        """Refuses a figure that no epoch will have."""
        if self.metric not in trainer.figures:
            raise checks.unknown(f"metric of {type(self).__name__}", self.metric, trainer.figures)

    def improved(self, row: Mapping[str, float]) -> bool:
        """Whether the figure is the best so far, which is then remembered; NaN never is."""
        value = float(row[self.metric])
        better = value == value if self.best is None else self._sign * value < self._sign * self.best - self._least
        if better:
            self.best = value
        return better

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]


class KeepBest(_Watching):
    """Keeps the checkpoint of the best epoch in the trainer's output folder.

    Args:
        metric, mode: what is best: a column of metrics.csv; "min", "max", or None for "min" of losses.
        file: its name; the usual checkpoints come and go beside it.

    Attributes:
        best: the figure; None before the first epoch.
    """

    def __init__(self, metric: str = "test_accuracy", mode: str | None = None, file: str = "best.safetensors"):
        super().__init__(metric, mode)
        self.file = file

    def begin(self, trainer: Any) -> None:
        super().begin(trainer)
        if trainer.output is None:
            raise checks.order("KeepBest", "the trainer has no output folder", "pass output=")
        for other in trainer.callbacks:
            if other is not self and isinstance(other, KeepBest) and other.file == self.file:
                expected = f"another than that of {other.key}"
                raise checks.bad_value("KeepBest", f"file of {self.key}", expected, self.file, "pass file=")

    def epoch(self, trainer: Any, row: Mapping[str, float]) -> None:
        if self.improved(row):
            trainer.save(trainer.output / self.file)


class EarlyStop(_Watching):
    """Ends training when a figure has not become better for some epochs.

    Args:
        metric, mode: as for `KeepBest`.
        patience: epochs without a better figure after which training ends.
        min_delta: by how much a better figure must differ.
    """

    def __init__(self, metric: str = "test_loss", patience: int = 5, mode: str | None = None, min_delta: float = 0.0):
        super().__init__(metric, mode, min_delta)
        self.patience = checks.at_least("EarlyStop", "patience", patience, 1)
        self.waited = 0

    def begin(self, trainer: Any) -> None:
        super().begin(trainer)
        self._decide(trainer)  # a run that ended this way does not begin again

    def epoch(self, trainer: Any, row: Mapping[str, float]) -> None:
        self.waited = 0 if self.improved(row) else self.waited + 1
        self._decide(trainer)

    def _decide(self, trainer: Any) -> None:
        if self.waited >= self.patience:
            best = "NaN" if self.best is None else f"{self.best:.4g}"
            trainer.stop(f"{self.metric} has not become better than {best} for {self.waited} epochs")

    def state(self) -> dict[str, Any]:
        return super().state() | {"waited": self.waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.waited = state["waited"]


class TensorBoard(Callback):
    """Writes event files for TensorBoard: loss and learning rate by step, all figures of an epoch by its last step.

    Args:
        folder: default: ``tensorboard`` in the trainer's output folder. Going on from a checkpoint, what an interrupted
            run drew after it is dropped.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path | None = None):
        with checks.needs("TensorBoard", "tensorboard"):
            from tensorboardX import SummaryWriter
        self.folder, self._make, self._writer = folder, SummaryWriter, None

    def begin(self, trainer: Any) -> None:
        if self.folder is None and trainer.output is None:
            raise checks.order("TensorBoard", "the trainer has no output folder", "pass a folder")
        if trainer.comm.rank == 0:
            folder = Path(self.folder if self.folder is not None else trainer.output / "tensorboard")
            following = trainer.step + 1 if trainer.step else 0
            # Files are named by the second: a suffix, or two runs within one would share a name.
            self._writer = self._make(str(folder), purge_step=following, filename_suffix=f".{following}")

    def report(self, trainer: Any, record: Mapping[str, float]) -> None:
        self._draw({"train/loss": record["loss"], "train/lr": record["lr"]}, record["step"])

    def epoch(self, trainer: Any, row: Mapping[str, float]) -> None:
        figures = {f"epoch/{name}": value for name, value in row.items() if name not in ("epoch", "step", "lr")}
        self._draw(figures, row["step"])

    def _draw(self, figures: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def finish(self, trainer: Any) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class StepWatch:
    """Looks at the steps of a training run, as `minidl.bench.training.TrainingProfile` does; this one sees nothing."""

    def step(self, trainer: Any, samples: int | None) -> AbstractContextManager[None]:
        """Around each step of ``samples`` samples on this rank; None where the batch is a last, smaller one."""
        return nullcontext()

    def finish(self, trainer: Any) -> Path | None:
        """After the last step, on all ranks; a file that was written."""


@runtime_checkable
class Metric(Protocol):
    """What is counted over the test set: those of `minidl.metrics`."""

    def reset(self) -> None: ...

    def update(self, logits: Any, labels: Any) -> None: ...

    def value(self) -> float:
        """Over all ranks; a collective."""
