"""A moving average of the weights in training: evaluated in their place, and kept in checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import cli, data, models, schedule
from minidl.fusion import fold
from minidl.interchange import import_weights
from minidl.train import Trainer
from tests.small_steps import batches, small_model
from tests.tolerance import assert_same_arrays

STEPS = 10  # of two epochs


def trainer(output, ops, decay=0.8, epochs=2):
    """LAMB, with a rate that rises and falls."""
    model = m.Model(models.build("resnet20", (8, 8, 3), 4), device=ops.name, seed=1)
    sets = [
        data.dataset("synthetic", None, split, shape=(8, 8, 3), num_classes=4, n=n)
        for split, n in (("train", 40), ("test", 12))
    ]
    loaders = [data.Loader(s, 8, seed=2, shuffle=i == 0, transfer=model.ops.uploader()) for i, s in enumerate(sets)]
    average = None if decay is None else m.WeightAverage(model, decay)
    return Trainer(
        model, m.LAMB(model, 0.02), m.SoftmaxCrossEntropy(label_smoothing=0.1), *loaders, average=average,
        schedule=schedule.OneCycle(0.02, STEPS), epochs=epochs, output=output,
    )  # fmt: skip


def state_of(run):
    state = {**run.model.state_dict(), **run.optimizer.state_dict()}
    return state | {f"average.{key}": value for key, value in run.average.state_dict().items()}


def test_an_interrupted_run_goes_on_to_the_same_bits(ops, tmp_path):
    whole = trainer(tmp_path / "whole", ops)
    expected = whole.fit()
    first = trainer(tmp_path / "parts", ops)
    for batch in first.train_loader:
        first._train(batch)
        if first.step == 3:
            first.save()
            break
    second = trainer(tmp_path / "parts", ops)
    second.resume(tmp_path / "parts")
    found = second.fit()
    assert found["test_loss"] == expected["test_loss"]
    assert_same_arrays(state_of(second), state_of(whole))


def test_the_average_is_evaluated_and_training_takes_no_notice(ops, tmp_path):
    with_one, without = trainer(None, ops), trainer(None, ops, decay=None)
    row, plain = with_one.fit(), without.fit()
    for name, values in without.model.state_dict().items():
        np.testing.assert_array_equal(with_one.model.state_dict()[name], values)
    assert row["train_loss"] == plain["train_loss"] and row["test_loss"] != plain["test_loss"]
    assert plain["test_loss"] == without.evaluate()[0]
    without.model.load_state_dict(without.model.state_dict() | with_one.average.state_dict())
    assert row["test_loss"] == without.evaluate()[0]


def test_who_starts_from_the_checkpoint_has_what_was_evaluated(cpu_ops, tmp_path):
    run = trainer(tmp_path, cpu_ops)
    row = run.fit()
    again = trainer(None, cpu_ops, decay=None)
    assert import_weights(again.model, tmp_path).complete
    assert again.evaluate()[0] == row["test_loss"]


def test_what_cannot_be_averaged_is_refused(cpu_ops, tmp_path, capsys):
    run = trainer(tmp_path / "run", cpu_ops, decay=None, epochs=1)
    run.fit()
    with pytest.raises(ValueError, match="averaged weights does not fit: .* missing"):
        trainer(None, cpu_ops).resume(tmp_path / "run")
    trainer(tmp_path / "averaged", cpu_ops, epochs=1).fit()
    with pytest.raises(ValueError, match="of another run: average: averaged weights there, none here"):
        trainer(None, cpu_ops, decay=None).resume(tmp_path / "averaged")
    with pytest.raises(ValueError, match='Trainer: average must be of the model, got "another model\'s"'):
        Trainer(
            run.model, run.optimizer, run.loss, run.train_loader, schedule=lambda step: 0.1, epochs=1,
            average=m.WeightAverage(trainer(None, cpu_ops).model),
        )  # fmt: skip
    with pytest.raises(SystemExit):
        cli.main(["prune", "--average", "0.9", "--device", "cpu", "--output", str(tmp_path / "refused")])
    assert "--average is for minidl train" in capsys.readouterr().err


def test_the_command_averages_and_goes_on_with_the_same_decay_only(tmp_path, capsys):
    options = ["--model", "mlp", "--epochs", "1", "--optimizer", "lamb", "--lr", "0.01", "--device", "cpu"]
    options += ["--output", str(tmp_path), "--average"]
    assert cli.main(["train", *options, "0.99"]) == 0
    options[3] = "2"
    assert cli.main(["train", *options, "0.99", "--resume"]) == 0
    with pytest.raises(SystemExit):
        cli.main(["train", *options, "0.9", "--resume"])
    assert "average: 0.99 there, 0.9 here" in capsys.readouterr().err


def test_a_folded_model_predicts_with_the_weights_that_it_has(cpu_ops):
    """Folded before the block, or within it."""
    model = small_model("resnet20", "fp32", "cpu")
    optimizer, loss, average = m.SGD(model, 0.05, 0.9), m.SoftmaxCrossEntropy(), m.WeightAverage(model, 0.5)
    for x, labels in batches(model, "resnet20", 3):
        loss.forward(model.forward(x), labels)
        model.backward(loss.backward())
        optimizer.step()
        average.update()
    model.eval()
    own = model.forward(x).copy()
    with average.applied():
        averaged = model.forward(x).copy()
    fold(model)
    with average.applied():
        assert np.array_equal(model.forward(x), averaged)
        fold(model)
    assert np.array_equal(model.forward(x), own) and not np.allclose(own, averaged)
