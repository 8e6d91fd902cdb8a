"""Trainer: epochs over a loader, evaluation, checkpoints, resuming. The same on one rank and on many."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl import checkpoint, checks, legality, resuming
from minidl.average import WeightAverage
from minidl.callbacks import Callback, KeepBest, Metric, StepWatch
from minidl.compile import CompiledStep, NotCapturable, obstacle
from minidl.data import Batch, Loader
from minidl.dist import abort
from minidl.dist.agree import on_rank_0, require_same
from minidl.fusion import Plan, fuse, fuse_by_default
from minidl.loss import Loss, Sums, Totals
from minidl.metrics import TopK
from minidl.model import Model
from minidl.nonfinite import GradientWatch
from minidl.optim import SGD
from minidl.profile import Profiler
from minidl.progress import MetricsLog, Progress, progress
from minidl.shapes import ceil_div
from minidl.step import EagerStep, require_parts
from minidl.stopping import StopRequest


@dataclass
class _Running:
    """Sums of the steps that were not read yet, and of those that were."""

    pending: list[Totals] = field(default_factory=list)
    sums: Sums = Sums()

    def collect(self) -> float:
        """Read what is pending; the mean loss of just that."""
        read = Sums()
        for totals in self.pending:
            read = read.plus(totals.read())
        self.pending.clear()
        self.sums = self.sums.plus(read)
        return read.mean_loss


class Trainer:
    """Trains a model with a loader, on all ranks of the model's communicator alike.

    Args:
        model, optimizer, loss: share one communicator.
        train_loader: this rank's shards (`minidl.data.Loader` with the communicator's rank and size).
        test_loader: evaluated after each epoch, joined exactly over ranks; None: no evaluation.
        schedule: learning rate of a step, counted from 0; a function of the step alone.
        epochs: to train in all, counting those before a resume.
        output: folder for metrics and checkpoints, of one run at a time; None writes nothing.
        keep: newest checkpoints to keep.
        metrics: counted over the test set, by name: ``{"iou": Confusion(comm=comm)}`` makes a column ``test_iou``.
        callbacks: told what happens, in this order, of an epoch `KeepBest` last; see `minidl.callbacks`.
        report_every: steps between readings of the loss (a reading waits for the device).
        settings: JSON-able facts about the run, kept in the checkpoints and compared on resume.
        profile: told of every step, such as `minidl.bench.training.TrainingProfile`.
        compile: run steps as a CUDA graph (`minidl.compile.CompiledStep`), with the same bits. None: on GPUs, unless
            something forbids it, which is then told; False: never; True: or refuse.
        accumulate: micro-batches of a step, see `minidl.step.EagerStep`.
        watch_gradients: look for NaN in every layer's gradients before they are summed, and wait for every step, to
            tell which rank and layer made the first (`minidl.nonfinite`).
        average: taken after every step, evaluated in the place of the weights, and kept in checkpoints beside them.
        fusion: how batch norms run, as `minidl.fusion.fuse` takes it. None: as they were told to; on GPUs ``"auto"``
            where nobody told them.
        display: shows how far an epoch is; None: a bar on a terminal with rich, else a line now and then, on rank 0.

    Attributes:
        sums: what the loss counted in the part of an epoch before `fit` was stopped, or went on.
        stopped: the signal that ended `fit` before its time.
        ended: why a callback ended it (`stop`).
        parts: what of the table of `minidl.legality` takes part, in words.

    Raises:
        ValueError: parts that do not belong together, or differ between ranks; training would then go wrong in silence.
            An output that is no folder.
        TypeError: parts of another kind, settings that JSON cannot hold.
        FloatingPointError: from `fit`, when the training loss is not finite, or gradients that are watched.
    """

    def __init__(
        self,
        model: Model,
        optimizer: SGD,
        loss: Loss,
        train_loader: Loader,
        test_loader: Loader | None = None,
        *,
        schedule: Callable[[int], float],
        epochs: int,
        output: str | Path | None = None,
        keep: int = 2,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        report_every: int = 20,
        settings: dict[str, Any] | None = None,
        profile: StepWatch | None = None,
        compile: bool | None = None,
        accumulate: int = 1,
        watch_gradients: bool = False,
        average: WeightAverage | None = None,
        fusion: str | Path | Plan | None = None,
        display: Progress | None = None,
    ):
        require_parts("Trainer", model, optimizer, loss, accumulate)
        self.model, self.optimizer, self.loss, self.accumulate = model, optimizer, loss, int(accumulate)
        self.train_loader, self.test_loader = train_loader, test_loader
        self.schedule, self.average = schedule, average
        self.epochs = checks.at_least("Trainer", "epochs", epochs, 1)
        self.output = Path(output) if output is not None else None
        self.keep = checks.at_least("Trainer", "keep", keep, 1)
        self.report_every = checks.at_least("Trainer", "report_every", report_every, 1)
        self.settings = settings or {}
        checkpoint.require_json(self.settings, "settings")
        self.profile = profile or StepWatch()
        self.step = 0
        self.sums = Sums()
        self._trained = False  # this rank, since running statistics were averaged
        self.stopped: signal.Signals | None = None
        self.ended: str | None = None
        self._wish: str | None = None
        if not isinstance(metrics or {}, Mapping):
            given, remedy = checks.describe(metrics), 'write {"iou": Confusion(comm=comm)}'
            raise checks.bad_dtype("Trainer", "metrics", "a dictionary of metrics by name", given, remedy)
        self.metrics = {f"test_{name}": metric for name, metric in (metrics or {}).items()}
        self.callbacks = list(callbacks)
        self.comm = model.comm
        self.display = display or progress(self.comm.rank)
        self.log: MetricsLog | None = None
        self._check_parts()
        parts = optimizer.parts() | {"checkpoints": output is not None, "watched": watch_gradients}
        legality.refuse("Trainer", **parts)
        self._watch = GradientWatch(model.arena) if watch_gradients else None
        self.compile = compile
        if fusion is None:
            fuse_by_default(model)
        else:
            fuse(model, fusion, batch=ceil_div(train_loader.batch, self.comm.size * self.accumulate))
        self._step = self._choose_step()
        parts |= {"compiled": isinstance(self._step, CompiledStep), "accumulated": self.accumulate > 1}
        self.parts = legality.described(**parts)
        require_same(self.comm, "training plan", self._plan())
        on_rank_0(self.comm, self._check_output)

    def _check_parts(self) -> None:
        """Refuse parts of another kind, and those that were made for another model or another rank."""
        remedy = "bench.training.TrainingProfile(path) is one"
        checks.instance("Trainer", "profile", self.profile, StepWatch, "a callbacks.StepWatch", remedy)
        checks.instance("Trainer", "display", self.display, Progress, "a progress.Progress")
        if self.average is not None:
            remedy = "WeightAverage(model, decay) is one"
            checks.instance("Trainer", "average", self.average, WeightAverage, "a WeightAverage", remedy)
            if self.average.model is not self.model:
                raise checks.bad_value("Trainer", "average", "of the model", "another model's")
        if not callable(self.schedule):
            given, remedy = checks.describe(self.schedule), "for a fixed rate pass schedule.Constant(rate)"
            raise checks.bad_dtype("Trainer", "schedule", "a function of the step", given, remedy)
        for argument, loader in self._loaders().items():
            if loader is not None and not hasattr(loader, "rank"):
                remedy = "ArrayDataset holds arrays, Loader cuts them into batches"
                raise checks.bad_dtype("Trainer", argument, "a data.Loader", type(loader).__name__, remedy)
            if loader is not None and (loader.rank, loader.size) != (self.comm.rank, self.comm.size):
                expected = f"of rank {self.comm.rank} of {self.comm.size}, like the model's communicator"
                got = f"rank {loader.rank} of {loader.size}"
                raise checks.bad_value(
                    "Trainer", argument, expected, got, "make it with rank=comm.rank, size=comm.size"
                )
            if loader is not None and loader.dtype != (stored := self.model.precision.storage):
                remedy = "make it with dtype=model.precision.storage"
                raise checks.bad_dtype("Trainer", f"images of {argument}", str(stored), loader.dtype, remedy)
        for callback in self.callbacks:
            checks.instance("Trainer", "callbacks", callback, Callback, "callbacks.Callback objects")
        keys = [callback.key for callback in self.callbacks]
        if len(set(keys)) < len(keys):
            raise checks.bad_value("Trainer", "callbacks", "of different keys", keys)
        if not any(segment.trainable for segment in self.model.arena.segments):
            raise checks.impossible("Trainer", "the model has no weights that are trained", "freeze fewer of them")
        if self.metrics and self.test_loader is None:
            raise checks.bad_value("Trainer", "metrics", "left out without a test_loader", sorted(self.metrics))
        for metric in self.metrics.values():
            checks.instance("Trainer", "metrics", metric, Metric, "metrics such as Confusion(comm=comm)")
            if isinstance(metric, TopK):
                metric.require(self.model.graph.output_node.shape[-1])

    def _choose_step(self) -> EagerStep | CompiledStep:
        reason = obstacle(self.model, self.optimizer)
        if self.compile is None and reason is not None and self.model.ops.name == "cuda":
            self._tell_eager(reason)
        wanted = self.compile or (self.compile is None and reason is None)
        kind = CompiledStep if wanted else EagerStep
        return kind(self.model, self.optimizer, self.loss, accumulate=self.accumulate)

    def _tell_eager(self, reason: str) -> None:
        if self.comm.rank == 0:
            print(f"steps run eagerly, not as a CUDA graph: {reason}", flush=True)

    def _loaders(self) -> dict[str, Loader | None]:
        return {"train_loader": self.train_loader, "test_loader": self.test_loader}

    def _plan(self) -> list[str]:
        """What decides on the steps: ranks that differ here would wait for ever, or drift apart in silence."""
        loaders = self._loaders().items()
        return [
            f"epochs {self.epochs}, report_every {self.report_every}, output {self.output is not None}",
            f"{type(self._step).__name__} of {self.accumulate} micro-batches, watched {self._watch is not None}",
            *(f"{argument} {loader.plan() if loader is not None else None}" for argument, loader in loaders),
            f"schedule {checks.wording(self.schedule)}",
            *(f"learning rate {self._rate(step):.7g} in step {step}" for step in self._sampled_steps()),
            f"optimizer {self.optimizer.plan()}, average {self.average and self.average.decay}",
            f"loss {self.loss.plan()}",
            f"metrics {list(self.metrics)}, callbacks {[callback.key for callback in self.callbacks]}",
            f"random seed {self.model.random.seed}",
            f"parts {self.parts}, profile {type(self.profile).__name__}",
        ]

    def _sampled_steps(self) -> list[int]:
        """0, 1, 10, 100, ... and the last."""
        last = self.epochs * len(self.train_loader) - 1
        return sorted({0, last, *(10**power for power in range(len(str(last))))} & set(range(last + 1)))

    def _rate(self, step: int) -> float:
        good = "of at least 0, finite"
        return checks.number("Trainer", f"schedule({step})", self.schedule(step), good, lambda v: 0 <= v < math.inf)

    def _check_output(self) -> None:
        if self.output is not None:
            checkpoint.require_place("Trainer", "output", self.output, "folder")

    @property
    def figures(self) -> list[str]:
        """Names of what an epoch is told by, as in metrics.csv."""
        names = [name for name in MetricsLog.COLUMNS if self.loss.classifies or not name.endswith("accuracy")]
        return [n for n in [*names, *self.metrics] if self.test_loader is not None or not n.startswith("test_")]

    def fit(self) -> dict[str, float]:
        """Train to the last epoch; the last epoch's figures, named as in metrics.csv.

        With an output folder, SIGTERM or SIGUSR1 on any rank ends it early on all: after a step, with a checkpoint and
        no figures.

        What another run left in the output folder is replaced; its checkpoints, where it went further than this one
        has come, move into ``previous/`` with its metrics.
        """
        row: dict[str, float] = {}
        self.stopped = self.ended = self._wish = None  # of an earlier call: another goes on
        resuming.agree(self)
        for callback in self.callbacks:
            callback.begin(self)
        on_rank_0(self.comm, self._open_output)  # not before a callback could refuse: it moves what lies there
        self._heed()
        with StopRequest(self.comm) if self.output is not None else nullcontext() as request:
            while self.train_loader.epoch < self.epochs and self.stopped is None and self.ended is None:
                try:
                    row = self._epoch(request)
                except BaseException:
                    self.display.finish()  # a bar would go on drawing, and hide the cursor for good
                    raise
        for callback in self.callbacks:
            callback.finish(self)
        self.profile.finish(self)
        return row

    def stop(self, reason: str) -> None:
        """End `fit` after this epoch; for callbacks, on any rank."""
        self._wish = reason

    def _heed(self) -> None:
        """Let the ranks agree whether one of them wants to end."""
        if self.callbacks:
            wishes = self.comm.share(self._wish, "wish to end")
            self.ended = next((reason for reason in wishes if reason is not None), None)

    def _open_output(self) -> None:
        if self.output is None:
            return
        records = [*MetricsLog.FILES, *(c.file for c in self.callbacks if isinstance(c, KeepBest))]
        previous = checkpoint.set_aside(self.output, self.step, records)
        if previous is not None:
            print(f"{self.output}: checkpoints of another run moved to {previous}", flush=True)
        self.log = MetricsLog(self.output, step=self.step, epoch=self.train_loader.epoch, metrics=list(self.metrics))

    def _epoch(self, request: StopRequest | None) -> dict[str, float]:
        epoch = self.train_loader.epoch
        done = self.train_loader.state()["next_batch"]
        self.display.start(f"epoch {epoch + 1}/{self.epochs}", len(self.train_loader), done)
        running, images, started = _Running(sums=self.sums), 0, time.perf_counter()
        for batch in self.train_loader:
            running.pending.append(self._train(batch))
            images += batch.global_size
            note = f"loss {self._read(running):.4f}" if self.step % self.report_every == 0 else ""
            self.display.advance(note)
            self.stopped = request.agreed() if request is not None else None
            if self.stopped is not None:
                return self._stop_here(running)
        if running.pending:
            self._read(running)
        seconds, self.sums = time.perf_counter() - started, Sums()
        loss, accuracy = running.sums.mean_loss, running.sums.accuracy
        row = {
            "epoch": epoch, "step": self.step, "lr": self.optimizer.lr, "train_loss": loss, "train_accuracy": accuracy,
            "seconds": round(seconds, 3), "images_per_s": round(images / seconds, 1),
        }  # fmt: skip
        right = f"accuracy {accuracy:.4f}  " if self.loss.classifies else ""
        summary = f"loss {loss:.4f}  {right}{row['images_per_s']:.0f} images/s"
        if self.test_loader is not None:
            row["test_loss"], row["test_accuracy"] = self.evaluate()
            row |= {name: metric.value() for name, metric in self.metrics.items()}
            for name in ("test_accuracy" if self.loss.classifies else "test_loss", *self.metrics):
                summary += f"  {name.replace('_', ' ')} {row[name]:.4f}"
        row = {name: row[name] for name in self.figures}
        self.display.finish(summary)
        if self.log is not None:
            self.log.epoch(row)
        self._tell_epoch(row)
        if self.output is not None:
            self.save()
        return row

    def _tell_epoch(self, row: dict[str, float]) -> None:
        if self.callbacks:
            row = self.comm.share(row)[0]  # the ranks' clocks differ
            for callback in sorted(self.callbacks, key=lambda one: isinstance(one, KeepBest)):
                callback.epoch(self, row)  # KeepBest last: it writes the state of the others
            self._heed()

    def _stop_here(self, running: _Running) -> dict[str, float]:
        """In the middle of an epoch, for somebody who resumes."""
        if running.pending:
            self._read(running)
        self.sums = running.sums
        path = self.save()
        self.display.finish(f"stopped by {self.stopped.name} after step {self.step}; {path}")
        return {}

    def _train(self, batch: Batch) -> Totals:
        """One step."""
        abort.context["step"] = self.step
        self.optimizer.set_lr(self.schedule(self.step))
        self.model.train()
        # Whether a batch is the last, smaller one, all ranks know; their parts of one may differ by a sample.
        smaller = batch.global_size != self.train_loader.batch
        with self.profile.step(self, None if smaller else len(batch.images)):
            totals = self._take_step(batch, smaller)
        if self._watch is not None:
            self._watch.check(self.comm, self.step)
        if self.average is not None:
            self.average.update()
        self._trained |= len(batch.images) > 0
        self.step += 1
        return totals

    def _take_step(self, batch: Batch, smaller: bool) -> Totals:
        try:
            return self._step(batch.images, batch.labels, batch.first_sample, eager=smaller)
        except NotCapturable as error:
            if self.compile:
                raise
            self._tell_eager(str(error))
            self._step = EagerStep(self.model, self.optimizer, self.loss, accumulate=self.accumulate)
            return self._step(batch.images, batch.labels, batch.first_sample)

    def _read(self, running: _Running) -> float:
        loss = running.collect()
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"training loss is {loss} at or before step {self.step}; lower the learning rate, or warm it up; "
                "--watch-gradients (watch_gradients=True) tells whose values are the first"
            )
        record = {"step": self.step, "loss": loss, "lr": self.optimizer.lr}
        if self.log is not None:
            self.log.report(record)
        for callback in self.callbacks:
            callback.report(self, record)
        return loss

    def observe(self, profiler: Profiler) -> None:
        """Let ``profiler`` see every pass and message from now on."""
        self._step.observe(profiler)

    def evaluate(self, loader: Loader | None = None) -> tuple[float, float]:
        """(mean loss, accuracy) over a whole loader, counted exactly over all ranks; `metrics` count along."""
        loader = loader or self.test_loader
        if loader is None:
            raise checks.order("Trainer", "nothing to evaluate on", "pass a loader")
        training = self.model.training
        self._average_buffers()
        self.model.eval()
        running = _Running()
        for metric in self.metrics.values():
            metric.reset()
        with self.average.applied() if self.average is not None else nullcontext():
            for batch in loader:
                totals, logits = self._step.evaluate(batch.images, batch.labels)
                running.pending.append(totals)
                for metric in self.metrics.values():
                    metric.update(logits, batch.labels)
            running.collect()
        self.model.train(training)
        return running.sums.mean_loss, running.sums.accuracy

    def _average_buffers(self) -> None:
        self.model.average_buffers(self._trained)
        self._trained = False

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, path: Path | None = None) -> Path:
        """Write a checkpoint (rank 0; the others wait). Everything a bit-exact continuation needs is in it.

        Args:
            path: default: named by the step, in the output folder.

        Raises:
            OSError: on every rank, when rank 0 could not write.
        """
        if path is None and self.output is None:
            raise checks.order("Trainer", "it has no output folder", "pass output=")
        self.optimizer.collect()
        self._average_buffers()  # ranks see different shards; a resumed run starts from one copy
        path = path or checkpoint.step_path(self.output, self.step)
        on_rank_0(self.comm, lambda: self._write(path))
        return path

    def _write(self, path: Path) -> None:
        try:
            checkpoint.save(path, *resuming.held(self))
            if self.output is not None:
                checkpoint.prune(self.output, self.keep)
        except OSError as error:
            raise OSError(f"{path}: {error}") from error

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint, bit for bit with the same number of ranks.

        Args:
            path: a checkpoint file, or a folder whose newest one, as rank 0 sees it, is taken: other hosts may see what
                was just written later.

        Raises:
            FileNotFoundError: nothing there.
            ValueError: a damaged or foreign file, or one of another model, data set or setting; ranks that read
                different ones.
        """
        path = Path(path)
        resuming.restore(self, on_rank_0(self.comm, lambda: checkpoint.latest(path) if path.is_dir() else path))
