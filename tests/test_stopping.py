"""Signals of a batch system: training stops after a step, with a checkpoint that goes on to the same bits."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from minidl import cli, stopping
from minidl.callbacks import StepWatch
from minidl.dist.communicator import SOLO
from minidl.train import Trainer
from tests.test_train import final, table, trainer
from tests.tolerance import assert_same_arrays


class Signalling(StepWatch):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number, step):
        self.number, self.at, self.seen = number, step, 0

    @contextlib.contextmanager
    def step(self, trainer, samples):
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), self.number)
        yield

    def finish(self, trainer):
        return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("step", [3, 5, 6])  # 5: the last of an epoch
def test_a_signal_stops_after_a_step_and_resuming_gives_the_same_bits(tmp_path, number, step, monkeypatch):
    monkeypatch.setattr(stopping, "SECONDS", 0.0)  # agree after every step
    before = signal.getsignal(number)
    whole = trainer(tmp_path / "whole")
    whole.fit()
    first = trainer(tmp_path / "parts", profile=Signalling(number, step))
    assert first.fit() == {} and first.stopped == number and first.step == step
    assert signal.getsignal(number) == before
    second = trainer(tmp_path / "parts")
    second.resume(tmp_path / "parts")
    second.fit()
    assert second.stopped is None
    assert_same_arrays(final(whole), final(second))
    rows = [table(tmp_path / name / "metrics.csv") for name in ("whole", "parts")]
    for column in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        expected, found = ([float(row[column]) for row in told] for told in rows)
        assert found == pytest.approx(expected), f"{column} of whole epochs, whenever they were interrupted"


def test_a_second_signal_does_what_it_always_did(monkeypatch):
    monkeypatch.setattr(stopping, "REPEATED_SECONDS", 0.0)
    caught = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        with stopping.StopRequest(SOLO) as request:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not caught
            os.kill(os.getpid(), signal.SIGUSR1)
            assert caught == [signal.SIGUSR1] and request.agreed() == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_both_the_launcher_and_the_batch_system_send_stops_as_one_does(tmp_path, monkeypatch):
    """They come some tens of milliseconds apart: the second would otherwise end the process before its checkpoint."""
    killed = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: killed.append(number))
    try:
        run = trainer(tmp_path, profile=Signalling(signal.SIGTERM, 3))
        plain = run._train

        def again(batch):
            totals = plain(batch)
            if run.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return totals

        monkeypatch.setattr(run, "_train", again)
        monkeypatch.setattr(stopping, "SECONDS", 0.0)
        assert run.fit() == {} and run.stopped == signal.SIGTERM and not killed
        assert (tmp_path / "checkpoint-00000003.safetensors").exists()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_reports_a_stop_as_shells_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stopping, "SECONDS", 0.0)
    options = ["train", "--model", "resnet20", "--data", "synthetic", "--image-size", "8", "--samples", "64"]
    options += ["--epochs", "2", "--batch", "8", "--device", "cpu", "--output", str(tmp_path)]
    plain = Trainer._train

    def signalled(self, batch):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "_train", signalled)
    assert cli.main(options) == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1 after step 5; the same with --resume goes on" in capsys.readouterr().out
    monkeypatch.setattr(Trainer, "_train", plain)
    assert cli.main([*options, "--resume"]) == 0
