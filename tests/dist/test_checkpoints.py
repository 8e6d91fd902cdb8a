"""Checkpoints of several ranks: what is left when writing one fails, when a signal stops a job, and who may go on."""

from __future__ import annotations

import functools
import signal
import sys
import time

import numpy as np
import pytest

from minidl import checkpoint
from minidl.dist import mpiexec
from tests.dist import job

pytestmark = pytest.mark.mpi

TRAIN = "-m minidl train --data synthetic --model lenet --samples 48 --batch 12 --lr 0.02 --workers 0"


def saving(way, folder, device, tmp_path):
    out = tmp_path / way
    out.mkdir()
    return job.run("saving", 2, out, str(folder), way, device)


def resumes(folder, device, tmp_path):
    """From step 2, on all ranks."""
    done = saving("resume", folder, device, tmp_path)
    assert done.status == 0, done.output
    return [answer["step"] for answer in done.answers] == [2, 2]


@pytest.mark.parametrize("device", job.DEVICES)
def test_a_full_disk_ends_all_ranks_with_one_message_and_leaves_the_checkpoint_before(device, tmp_path):
    folder = tmp_path / "runs"
    done = saving("full", folder, device, tmp_path)
    assert done.status == 1 and done.answers == [], done.output
    assert "File too large" in done.output and done.output.count("ending all ranks") == 1, done.output
    assert done.output.startswith("minidl: ranks 0-1 of 2 (") or "\nminidl: ranks 0-1 of 2 (" in done.output
    assert done.after < 10
    assert [path.name for path in folder.glob("*.safetensors")] == ["checkpoint-00000002.safetensors"]
    assert not list(folder.glob("*.partial")) and resumes(folder, device, tmp_path)


@pytest.mark.parametrize("device", job.DEVICES)
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(device, tmp_path):
    folder = tmp_path / "runs"
    done = saving("killed", folder, device, tmp_path)
    assert done.status != 0 and done.answers == [], done.output
    assert done.after < 10
    assert len(list(folder.glob(".*.partial"))) == 1, "it was killed in the midst"
    assert checkpoint.latest(folder).name == "checkpoint-00000002.safetensors"
    assert resumes(folder, device, tmp_path)


def trained(tmp_path, name, ranks, epochs, *options):
    told = ["--device", "cpu", "--schedule", "constant", "--warmup", "1", "--epochs", str(epochs)]
    told += ["--output", str(tmp_path / name), *options]
    done = job.run_program([*TRAIN.split(), *told], ranks, tmp_path)
    assert done.status == 0, done.output
    return checkpoint.load(checkpoint.latest(tmp_path / name))


def test_another_number_of_ranks_goes_on_with_the_same_global_batch(tmp_path):
    """One begins, three go on, two end it: the losses and weights of one rank all the way, up to the order of sums."""
    whole, state = trained(tmp_path, "whole", 1, 3)
    for epochs, ranks in enumerate((1, 3, 2), start=1):
        parts, found = trained(tmp_path, "parts", ranks, epochs, *["--resume"] * (epochs > 1))
    assert whole.keys() == parts.keys() and found["step"] == state["step"] == 12
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    begun = checkpoint.load(tmp_path / "whole" / "checkpoint-00000008.safetensors")[0]
    assert any(np.abs(begun[name] - value).max() > 1e-3 for name, value in whole.items()), "the last epoch trained"


def test_a_rank_that_never_has_a_sample_changes_nothing(tmp_path):
    """Nor its running statistics, which are those of the beginning: three ranks train on batches of two as two do."""
    options = "--model resnet20 --image-size 8 --samples 14 --batch 2".split()
    two, three = (trained(tmp_path, f"of{ranks}", ranks, 1, *options)[0] for ranks in (2, 3))
    assert any("running_var" in name for name in two)
    for name, value in two.items():
        np.testing.assert_allclose(three[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


@functools.cache
def handed_on(number):
    """Whether this launcher hands a signal on to what it runs. (Open MPI 4.1.6 was seen not to hand on SIGUSR1.)"""
    rank = f"import signal, sys, time; signal.signal({number}, lambda *_: sys.exit('came')); print('ready', flush=True)"
    command = mpiexec.find().command(1, [sys.executable, "-c", f"{rank}; time.sleep(5)"])
    with job.started(command) as process:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        return "came" in job.finish(process)


@pytest.mark.parametrize("device", job.DEVICES)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_the_job_with_a_checkpoint(number, device, tmp_path):
    if number == signal.SIGTERM and mpiexec.find().family == "Open MPI":
        pytest.skip("it kills its ranks on SIGTERM before they can act")
    if not handed_on(number):
        pytest.skip(f"{mpiexec.find().version} hands {number.name} on to no rank")
    options = [*TRAIN.split(), "--device", device, "--epochs", "100000", "--output", str(tmp_path / "runs")]
    with job.started(mpiexec.find().command(2, [sys.executable, *options])) as process:
        since = time.monotonic()
        while not list((tmp_path / "runs").glob("*.safetensors")):
            assert time.monotonic() - since < job.TIMEOUT_SECONDS and process.poll() is None
            time.sleep(0.05)
        stopped = time.monotonic()
        process.send_signal(number)
        output = job.finish(process)
    assert time.monotonic() - stopped < 10
    assert f"stopped by {number.name} after step" in output and "ending all ranks" not in output, output
    assert process.returncode != 0, "a batch system takes it for stopped, and not for done"
    _, state = checkpoint.load(checkpoint.latest(tmp_path / "runs"))
    assert f"after step {state['step']}" in output
