"""Ranks that go on without a lost one, with an MPI that lets them; elsewhere it is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from minidl import checkpoint, launch
from minidl.dist import mpiexec
from tests.dist import job

pytestmark = pytest.mark.mpi

TOLERANT = not job.missing() and mpiexec.find().family == "Open MPI"
tolerant = pytest.mark.skipif(not TOLERANT, reason="needs Open MPI")

LOSES_A_RANK = """
import os, signal, sys
from minidl import cli
from minidl.train import Trainer
train = Trainer._train
def until_it_is_killed(self, batch):
    if (self.step, self.comm.size, self.comm.rank) == ({step}, 3, {rank}):
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self, batch)
Trainer._train = until_it_is_killed
sys.exit(cli.main())
"""
TRAIN = "--device cpu --data synthetic --model lenet --samples 48 --batch 12 --lr 0.02 --schedule constant --workers 0"


def run(program, out, ranks=3):
    return job.run_command(mpiexec.find().command(ranks, [sys.executable, *program], elastic=True), out)


@tolerant
@pytest.mark.parametrize("way", ["message", "computing", "exchange", "group", "share"])
def test_whatever_they_do_the_others_are_told_and_go_on(way, tmp_path):
    done = run([str(job.WORKERS / "shrinking.py"), str(tmp_path), way], tmp_path)
    assert done.status == 0 and [answer["old"] for answer in done.answers] == [0, 2], done.output
    for place, answer in enumerate(done.answers):
        assert (answer["rank"], answer["size"], answer["world"]) == (place, 2, True)
        assert "the process of another rank is gone" in answer["told"] and answer["total"] == 101.0
    assert "minidl: 2 ranks go on of 3" in done.output and "ending all ranks" not in done.output
    assert done.after < 15


@tolerant
@pytest.mark.parametrize(("step", "lost"), [(6, 0), (6, 2), (1, 1)])
def test_training_goes_on_from_the_newest_checkpoint_and_equals_one_rank(step, lost, tmp_path):
    """Four steps an epoch: killed in the second one, or before there is any checkpoint, rank 0 as well."""
    told = ["train", *TRAIN.split(), "--epochs", "3"]
    done = run(["-c", LOSES_A_RANK.format(step=step, rank=lost), *told, "--elastic", "--output", str(tmp_path / "run")],
               tmp_path)  # fmt: skip
    assert done.status == 0, done.output
    assert "2 ranks go on of 3" in done.output
    assert ("from the newest checkpoint" if step > 4 else "anew") in done.output, done.output
    alone = job.run_program(["-m", "minidl", *told, "--output", str(tmp_path / "alone")], 1, tmp_path)
    assert alone.status == 0, alone.output
    (found, state), (expected, whole) = (
        checkpoint.load(checkpoint.latest(tmp_path / name)) for name in ("run", "alone")
    )
    assert state["step"] == whole["step"] == 12
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


@tolerant
def test_a_rank_that_fails_by_itself_still_ends_all(tmp_path):
    program = "from minidl import dist; comm = dist.init('cpu', elastic=True); comm.barrier()\n"
    program += "if comm.rank: 1 // 0\ncomm.barrier()"
    done = run(["-c", program], tmp_path, 2)
    assert done.status != 0 and done.output.count("ending all ranks") == 1 and "ZeroDivisionError" in done.output


def test_an_mpi_that_would_end_the_others_is_refused_on_every_rank(tmp_path):
    """Open MPI that was not told, MPICH in any case."""
    for answer in job.answers("joining", 2, tmp_path, "elastic"):
        error = answer["error"]
        assert error.startswith("RuntimeError: joining ranks that go on without a lost one failed: on ranks 0-1: Value")
        assert "elastic: " in error and "mpiexec --with-ft ulfm" in error
        assert ("was not started to go on" if TOLERANT else "ends the ranks that are left") in error
        assert answer["gpus"].endswith("elastic on cpu by engine shm; it is for the cpu, by mpi") and answer["shrink"]
        assert answer["some"].startswith("ValueError: ranks differ in elastic, first in entry 0: on rank 0: False")


def test_where_it_cannot_apply_it_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    from minidl import dist

    with pytest.raises(ValueError, match="init: elastic must be left out on one rank"):
        dist.init("cpu", elastic=True)
    with pytest.raises(RuntimeError, match="shrink: a lost rank ends this job; join it with"):
        dist.shrink()
    other = mpiexec.Launcher("mpiexec", "MPICH", "5.0")
    monkeypatch.setattr(mpiexec, "find", lambda: other)
    (tmp_path / "x.py").touch()
    assert launch.main(["-n", "2", "--elastic", str(tmp_path / "x.py")]) == 2
    assert "elastic: MPICH ends the ranks that are left when one is lost" in capsys.readouterr().err
