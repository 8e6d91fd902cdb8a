"""Runs a worker script as real MPI ranks, bounded in time, and collects what it leaves behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from minidl.dist import mpiexec

__all__ = ["FAULTS", "Job", "missing", "run", "run_alone"]

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"
TIMEOUT_SECONDS = 20.0

# How a rank can fail (functions of workers/faults.py): the status of the job, and what somebody must have said.
FAULTS = {
    "uncaught_exception": (1, "ZeroDivisionError: broken on purpose"),
    "exception_while_a_message_is_awaited": (1, "ZeroDivisionError: broken on purpose"),
    "exception_through_finally_close": (1, "ZeroDivisionError: broken on purpose"),
    "exception_in_thread": (1, "uncaught exception in thread loader-3"),
    "interrupt": (130, "KeyboardInterrupt"),
    "exit_with_status": (3, "sys.exit(3) called from"),
    "exit_with_text": (1, "sys.exit('no data') called from"),
    "ends_without_a_word": (1, "os._exit(0) called"),
    "early_end": (1, "(all_reduce), but rank 1 ended after"),
    "early_end_while_a_message_is_awaited": (1, "(start_all_reduce), but rank 1 ended after"),
    "early_close": (1, "(all_reduce), but rank 1 ended after"),
    "other_size": (1, "call 4, start_all_reduce of 900 float32 (conv1)"),
    "other_dtype": (1, "call 4, all_reduce of 1000 int32"),
    "other_order": (1, "start_all_reduce of 1000 float32 (conv2)"),
    "other_call": (1, "share"),
    "other_root": (1, "broadcast of 1000 float32 from rank 1"),
    "blocking_or_not": (1, "start_all_reduce of 1000 float32"),
    "sleeping": (124, "waits for"),
    "stopped": (124, "does not answer"),
}


@dataclass(frozen=True)
class Job:
    """How a job ended: exit status, all output, wall time, and the JSON that each rank wrote."""

    status: int
    output: str
    seconds: float
    answers: list[dict]


def missing() -> str:
    """Why no MPI job can run here; empty when one can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py"
    try:
        mpiexec.find()
    except ImportError as error:
        return f"needs an MPI: {error}"
    return ""


def run(worker: str, ranks: int, out: Path, *arguments: str, **environment: str) -> Job:
    """Run ``workers/<worker>.py OUT arguments...`` as ``ranks`` processes."""
    return _run(mpiexec.find().command(ranks, _program(worker, out, arguments)), out, environment)


def run_alone(worker: str, out: Path, *arguments: str, **environment: str) -> Job:
    """Run it as one process without a launcher."""
    return _run(_program(worker, out, arguments), out, environment)


def _program(worker: str, out: Path, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, str(WORKERS / f"{worker}.py"), str(out), *arguments]


def _run(command: list[str], out: Path, environment: dict[str, str]) -> Job:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # The thread count of whoever runs the tests is not that of a user's job.
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    started = time.monotonic()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**inherited, "PYTHONPATH": path, **environment},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{command} still running after {TIMEOUT_SECONDS} s; it said:\n{output}") from None
    answers = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    return Job(process.returncode, output, time.monotonic() - started, answers)
