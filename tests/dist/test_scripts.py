"""The scripts that start training on one host, and on the hosts of a file (here one, this one)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist import job

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(job.missing()), reason=job.missing() or "MPI found")]

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
    done = run(tmp_path, "hostfile.sh", str(hosts), "2", *OPTIONS, MINIDL_ENGINE="mpi")
    assert done.returncode == 0, done.stderr
    assert "2 ranks (mpi, cpu)" in done.stdout, "variables of minidl go along"


def test_what_is_missing_is_told(tmp_path):
    done = run(tmp_path, "hostfile.sh", "hosts")
    assert done.returncode != 0 and "ranks on each host" in done.stderr
