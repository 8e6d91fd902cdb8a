"""The scripts that start training: on one host, on the hosts of a file (here one), as a job of a played Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import with_commands

pytestmark = pytest.mark.mpi

SCRIPTS = Path(__file__).parents[2] / "scripts"
OPTIONS = ["--model", "lenet", "--data", "synthetic", "--epochs", "1", "--device", "cpu", "--image-size", "16"]


def run(folder: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(SCRIPTS.parent), **environment}
    command = [str(SCRIPTS / script), *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=90)


def test_one_host(tmp_path):
    done = run(tmp_path, "one_host.sh", *OPTIONS, RANKS="2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks (shm, cpu)" in done.stdout and (tmp_path / "runs" / "train" / "metrics.csv").exists()


def test_hosts_of_a_file(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# of one rack\nlocalhost\n\n")
    done = run(tmp_path, "hostfile.sh", str(hosts), "2", *OPTIONS, "--message-dtype", "bf16", MINIDL_ENGINE="mpi")
    assert done.returncode == 0, done.stderr
    assert "2 ranks (mpi, cpu); with bf16 messages, checkpoints" in done.stdout, "variables of minidl go along"


def test_what_is_missing_is_told(tmp_path):
    done = run(tmp_path, "hostfile.sh", "hosts")
    assert done.returncode != 0 and "ranks on each host" in done.stderr


def job_of_slurm(folder: Path, status: int, *arguments: str) -> tuple[int, list[str], str]:
    """(status of the job, what srun was given, what scontrol was): both note it, and srun ends as it is told."""
    ends = {"srun": status, "scontrol": 0}
    tools = {name: f'#!/bin/sh\necho "$@" > {folder}/{name}.txt\nexit {end}\n' for name, end in ends.items()}
    (folder / "scontrol.txt").unlink(missing_ok=True)
    environment = with_commands(folder / "tools", tools) | {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}
    command = ["bash", str(SCRIPTS / "slurm.sbatch"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)
    queued = folder / "scontrol.txt"
    return done.returncode, (folder / "srun.txt").read_text().split(), queued.read_text() if queued.exists() else ""


def test_a_job_of_slurm_goes_back_into_the_queue_when_its_time_is_up_and_only_then(tmp_path):
    status, given, queued = job_of_slurm(tmp_path, 138, "/data/imagenet")
    assert status == 138 and queued.split() == ["requeue", "77"]
    assert given[:3] == ["--mpi=pmix", "minidl", "train"] and "--resume" not in given
    assert given[given.index("--batch") + 1] == "2048" and float(given[given.index("--lr") + 1]) == 0.8
    assert given[given.index("--data-path") + 1] == "/data/imagenet"
    (tmp_path / "runs" / "resnet50").mkdir(parents=True)
    (tmp_path / "runs" / "resnet50" / "checkpoint-00000012.safetensors").touch()
    for status in (0, 1, 124):
        assert job_of_slurm(tmp_path, status, "/data/imagenet")[::2] == (status, "")
    assert job_of_slurm(tmp_path, 138, "/data/imagenet")[1][-1] == "--resume"


def test_a_job_of_slurm_asks_for_the_signal_that_training_stops_at():
    told = (SCRIPTS / "slurm.sbatch").read_text()
    assert "#SBATCH --signal=USR1@" in told and "#SBATCH --requeue" in told
