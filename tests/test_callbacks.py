"""Callbacks and metrics of a Trainer: told alike on all ranks, kept in checkpoints, and what they do."""

from __future__ import annotations

import csv

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, data, models
from minidl.callbacks import Callback, EarlyStop, KeepBest, TensorBoard
from minidl.train import Trainer


def trainer(output=None, *, epochs=3, callbacks=(), metrics=None, device="cpu", lr=0.05):
    net = m.Model(models.build("mlp", (4, 4, 3), 3), device=device)
    options = {"shape": (4, 4, 3), "num_classes": 3}
    sets = [data.dataset("synthetic", None, split, n=n, **options) for split, n in (("train", 24), ("test", 12))]
    loaders = [data.Loader(s, 8, transfer=net.ops.uploader()) for s in sets]
    return Trainer(
        net, m.SGD(net, lr), m.SoftmaxCrossEntropy(), *loaders, schedule=lambda step: lr, epochs=epochs, output=output,
        report_every=2, callbacks=callbacks, metrics=metrics,
    )  # fmt: skip


class Scripted:
    """A metric whose value of each epoch is known beforehand: the column test_figure."""

    def __init__(self, figures):
        self.figures, self.trainer = figures, None

    def reset(self):
        pass

    def update(self, logits, labels):
        pass

    def value(self):
        return self.figures[self.trainer.train_loader.epoch - 1]


def scripted(figures, *arguments, callbacks, **options):
    """A trainer of these figures."""
    metric = Scripted(figures)
    metric.trainer = trainer(*arguments, metrics={"figure": metric}, callbacks=callbacks, **options)
    return metric.trainer


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def begin(self, trainer):
        self.calls.append("begin")

    def report(self, trainer, record):
        self.calls.append(("report", record["step"], sorted(record)))

    def epoch(self, trainer, row):
        self.calls.append(("epoch", row["step"], row["test_accuracy"]))

    def finish(self, trainer):
        self.calls.append("finish")


def test_callbacks_are_told_what_happens_in_order(ops):
    recorder = Recorder()
    run = trainer(epochs=2, callbacks=[recorder], device=ops.name)
    row = run.fit()
    names = [call if isinstance(call, str) else call[:2] for call in recorder.calls]
    expected = ["begin", ("report", 2), ("report", 3), ("epoch", 3), ("report", 4), ("report", 6), ("epoch", 6)]
    assert names == [*expected, "finish"], "each once, at the end of an epoch too"
    assert recorder.calls[1][2] == ["loss", "lr", "step"]
    assert recorder.calls[-2][2] == row["test_accuracy"]


def test_metrics_count_over_the_test_set(ops, tmp_path):
    metrics = {"top2": m.TopK(2), "iou": m.Confusion()}
    run = trainer(tmp_path, metrics=metrics, device=ops.name)
    row = run.fit()
    logits, labels = [], []
    run.model.eval()
    for batch in run.test_loader:
        logits.append(ops.to_host(run.model.forward(batch.images, grad=False)))
        labels.append(ops.to_host(batch.labels))
    logits, labels = np.concatenate(logits), np.concatenate(labels)
    assert row["test_top2"] == np.mean([label in x.argsort()[-2:] for x, label in zip(logits, labels, strict=True)])
    found = logits.argmax(axis=1)
    iou = [np.sum((found == k) & (labels == k)) / np.sum((found == k) | (labels == k)) for k in range(3)]
    assert row["test_iou"] == pytest.approx(np.mean(iou), rel=1e-12)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 3 and float(rows[-1]["test_iou"]) == row["test_iou"]


def test_the_best_epoch_is_kept(tmp_path):
    keep = KeepBest("test_figure")
    run = scripted([0.5, 0.8, 0.8, float("nan")], tmp_path, epochs=4, callbacks=[keep])
    weights = {}
    save = run.save
    run.save = lambda path=None: weights.setdefault(run.step, run.model.state_dict()) and None or save(path)
    run.fit()
    tensors, state = checkpoint.load(tmp_path / "best.safetensors")
    assert keep.best == 0.8 and state["step"] == 6, "the first of equal ones"
    for name, values in weights[6].items():
        np.testing.assert_array_equal(tensors[f"model.{name}"], values)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    again = trainer(tmp_path, epochs=4)
    again.resume(tmp_path / "best.safetensors")
    assert again.step == 6


@pytest.mark.parametrize(("metric", "mode", "figures", "best"), [
    ("loss", None, [3, 1, 2], 1), ("accuracy", None, [3, 1, 4], 4), ("figure", "min", [3, 1, 2], 1),
    ("test_loss", "max", [3, 1, 2], 3), ("figure", "max", [float("nan"), 1, 0], 1),
])  # fmt: skip
def test_what_is_better_follows_the_mode(metric, mode, figures, best):
    keep = KeepBest(metric, mode)
    for figure in figures:
        keep.improved({metric: figure})
    assert keep.best == best


def test_the_best_checkpoint_holds_what_the_others_know_by_then(tmp_path):
    callbacks = [KeepBest("test_figure"), EarlyStop("test_figure", patience=3, mode="max")]
    scripted([1.0, 0.5, 2.0], tmp_path, callbacks=callbacks).fit()
    found = checkpoint.load(tmp_path / "best.safetensors")[1]["callbacks"]["EarlyStop(test_figure)"]
    assert found == {"best": 2.0, "waited": 0}


def test_training_ends_when_nothing_gets_better(tmp_path):
    figures = [1.0, 0.9, 0.95, 0.89, 0.9, 0.2, 0.1]
    run = scripted(figures, tmp_path, epochs=7, callbacks=[EarlyStop("test_figure", 2, "min", min_delta=0.05)])
    row = run.fit()
    assert row["epoch"] == 3 and "test_figure has not become better than 0.9 for 2 epochs" in run.ended
    again = scripted(figures, tmp_path, epochs=7, callbacks=[EarlyStop("test_figure", 2, "min")])
    again.resume(tmp_path)
    assert again.fit() == {} and again.step == run.step, "it has ended"
    patient = scripted(figures, tmp_path, epochs=7, callbacks=[EarlyStop("test_figure", 4, "min")])
    patient.resume(tmp_path)
    assert patient.fit()["epoch"] == 6 and patient.ended is None, "0.2 came after three epochs of waiting"
    run.callbacks[0].patience = 4
    assert run.fit()["epoch"] == 6 and run.ended is None, "the same trainer goes on, too"


def test_a_resumed_run_remembers_its_best(tmp_path):
    figures = [0.9, 0.5, 0.6]
    scripted(figures, tmp_path, epochs=1, callbacks=[KeepBest("test_figure")]).fit()
    second = scripted(figures, tmp_path, callbacks=[KeepBest("test_figure"), EarlyStop()])
    second.resume(tmp_path)
    second.fit()
    assert checkpoint.load(tmp_path / "best.safetensors")[1]["step"] == 3
    assert second.callbacks[0].best == 0.9


def test_curves_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trainer(tmp_path, epochs=2, callbacks=[TensorBoard()])
    row = run.fit()
    # As after a crash: the last epoch's curves are there, its checkpoint is not.
    checkpoint.latest(tmp_path).unlink()
    second = trainer(tmp_path, epochs=2, callbacks=[TensorBoard()])
    second.resume(tmp_path)
    second.fit()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/lr", "epoch/test_accuracy", "epoch/train_loss"} <= set(events.Tags()["scalars"])
    accuracy, losses = events.Scalars("epoch/test_accuracy"), events.Scalars("train/loss")
    assert [event.step for event in accuracy] == [3, 6]
    assert accuracy[-1].value == pytest.approx(row["test_accuracy"])
    steps = [event.step for event in losses]
    assert steps == sorted(steps) and steps[-1] == 6


def test_a_missing_tensorboard_names_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'minidl\[tensorboard\]'"):
        TensorBoard()


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="callbacks must be of different keys"):
        trainer(callbacks=[EarlyStop(), EarlyStop(patience=3)])
    with pytest.raises(TypeError, match="callbacks must be callbacks.Callback objects, got type .*EarlyStop"):
        trainer(callbacks=[EarlyStop])
    with pytest.raises(TypeError, match="metrics must be a dictionary of metrics by name, got list"):
        trainer(metrics=[m.TopK(2)])
    with pytest.raises(ValueError, match="unknown mode of KeepBest 'best'"):
        KeepBest(mode="best")
    with pytest.raises(ValueError, match="patience must be an integer of at least 1"):
        EarlyStop(patience=0)
    with pytest.raises(RuntimeError, match="KeepBest: the trainer has no output folder; pass output="):
        trainer(callbacks=[KeepBest()]).fit()
    with pytest.raises(ValueError, match="file of KeepBest.test_loss. must be another than that of KeepBest.test_acc"):
        trainer(tmp_path, callbacks=[KeepBest("test_loss"), KeepBest("test_accuracy")]).fit()
    with pytest.raises(ValueError, match="unknown metric of KeepBest 'test_acc'; did you mean 'test_accuracy'"):
        trainer(tmp_path, callbacks=[KeepBest("test_acc")]).fit()
    run = trainer()
    with pytest.raises(ValueError, match="metrics must be left out without a test_loader"):
        Trainer(
            run.model, run.optimizer, run.loss, run.train_loader, schedule=run.schedule, epochs=1,
            metrics={"top2": m.TopK(2)},
        )  # fmt: skip
