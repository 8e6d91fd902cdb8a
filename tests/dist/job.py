"""Runs a worker script as real MPI ranks, bounded in time, and collects what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from minidl import backend
from minidl.dist import mpiexec

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])]
WORKERS = Path(__file__).parent / "workers"
TIMEOUT_SECONDS = 60.0

# How a rank can fail (functions of workers/faults.py): the status of the job, and what somebody must have said.
FAULTS = {
    "uncaught_exception": (1, "ZeroDivisionError: broken on purpose"),
    "exception_behind_another_hook": (1, "ZeroDivisionError: broken on purpose"),
    "exception_while_a_message_is_awaited": (1, "ZeroDivisionError: broken on purpose"),
    "exception_through_finally_close": (1, "ZeroDivisionError: broken on purpose"),
    "exception_in_thread": (1, "uncaught exception in thread loader-3"),
    "interrupt": (130, "KeyboardInterrupt"),
    "exit_with_status": (3, "sys.exit(3) called from"),
    "exit_with_text": (1, "sys.exit('no data') called from"),
    "ends_without_a_word": (1, "os._exit(0) called"),
    "nan_on_one_rank": (1, "not finite before they are summed: on rank 0: finite; on rank 1: in layer fc"),
    "early_end": (1, "(all_reduce), but rank 1 ended after"),
    "early_end_while_a_message_is_awaited": (1, "(start_all_reduce), but rank 1 ended after"),
    "early_close": (1, "(all_reduce), but rank 1 ended after"),
}

# Those that the engines on the CPU know of by themselves: ranks that call different things, and a rank that does not
# come (`LIMIT_SECONDS` is then what a collective may take).
DIFFERENT_CALLS = {
    "other_size": ("start_all_reduce of 1000 float32 (conv1)", "start_all_reduce of 900 float32 (conv1)"),
    "other_dtype": ("all_reduce of 1000 float32", "all_reduce of 1000 int32"),
    "other_order": ("start_all_reduce of 1000 float32 (conv1)", "start_all_reduce of 1000 float32 (conv2)"),
    "other_call": ("all_reduce of 1000 float32", "share"),
    "other_matter": ("share (plan)", "share (weights)"),
    "other_root": ("broadcast of 1000 float32 from rank 0", "broadcast of 1000 float32 from rank 1"),
    "blocking_or_not": ("start_all_reduce of 1000 float32", "all_reduce of 1000 float32"),
}
LIMIT_SECONDS = 1.0

# Ranks that build different things are refused, all of them, in words that name the first difference.
DIFFERENT_MODELS = {
    "other_model": "ValueError: ranks differ in parameter plan, first in entry 1: on rank",
    "other_weights": "ValueError: ranks differ in starting weights",
    "forgotten_communicator": "ValueError: SoftmaxCrossEntropy: comm must be given where there are several ranks",
    "other_rate": "ValueError: ranks differ in optimizer, first in entry 0: on rank",
    "other_rows": "height=8 over 1 ranks",
    "filters_of_others": "ValueError: ranks differ in parameter plan, first in entry 3: on rank",
    "other_batch": "ValueError: ranks differ in training plan, first in entry",
    "other_order_of_samples": "ValueError: ranks differ in training plan, first in entry 2: on rank",
    "other_place_of_gradients": "ValueError: ranks differ in training plan, first in entry",
    "other_weights_read": "ValueError: ranks differ in where training starts, first in entry 0: on rank",
    "other_number_of_steps": "ValueError: ranks differ in training plan, first in entry 0: on rank",
}


@dataclass(frozen=True)
class Job:
    """How a job ended: exit status, all output, wall time, and the JSON that each rank wrote.

    ``after``: seconds since the last rank came to the matter (its file ``.at``), without the start of the job.
    """

    status: int
    output: str
    seconds: float
    answers: list[dict]
    after: float = 0.0


@functools.cache
def missing() -> str:
    """Why no MPI job can run here; empty when one can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py"
    try:
        mpiexec.find()
    except ImportError as error:
        return f"needs an MPI: {error}"
    return ""


@functools.cache
def gpus() -> int:
    """How many there are on this machine."""
    try:
        backend.get_ops("cuda").require_device()
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return 0


def most_ranks() -> int:
    """That can be on GPUs here: one on each, or two where they may share one."""
    return max(gpus(), 2 if gpus() and os.environ.get("MINIDL_SHARE_GPUS") == "1" else 0)


def run(worker: str, ranks: int, out: Path, *arguments: str, **environment: str) -> Job:
    """Run ``workers/<worker>.py OUT arguments...`` as ``ranks`` processes."""
    return run_command(mpiexec.find().command(ranks, _program(worker, out, arguments)), out, **environment)


def answers(worker: str, ranks: int, out: Path, *arguments: str, **environment: str) -> list[dict]:
    """What each rank of such a job answers, which must end well; one rank is a process without a launcher."""
    alone = run_alone(worker, out, *arguments, **environment) if ranks == 1 else None
    done = alone or run(worker, ranks, out, *arguments, **environment)
    assert done.status == 0 and len(done.answers) == ranks, done.output
    return done.answers


def run_program(program: list[str], ranks: int, out: Path, **environment: str) -> Job:
    """Run ``python program...`` as ``ranks`` processes."""
    return run_command(mpiexec.find().command(ranks, [sys.executable, *program]), out, **environment)


def run_alone(worker: str, out: Path, *arguments: str, **environment: str) -> Job:
    """Run it as one process without a launcher."""
    return run_command(_program(worker, out, arguments), out, **environment)


def run_command(command: list[str], out: Path, **environment: str) -> Job:
    """Run the command line of a job."""
    begun = time.monotonic()
    with started(command, **environment) as process:
        output = finish(process)
    return _ended(process, output, out, begun)


def interrupted(worker: str, ranks: int, out: Path, *arguments: str, **environment: str) -> tuple[Job, float]:
    """Like `run`, with Ctrl-C in the launcher's terminal when all are there; the job, and its seconds since then."""
    begun = time.monotonic()
    with started(mpiexec.find().command(ranks, _program(worker, out, arguments)), **environment) as process:
        while len(list(out.glob("*.at"))) < ranks and time.monotonic() < begun + TIMEOUT_SECONDS:
            time.sleep(0.02)
        time.sleep(0.2)
        since = time.monotonic()
        process.send_signal(signal.SIGINT)
        output = finish(process)
    return _ended(process, output, out, begun), time.monotonic() - since


def _program(worker: str, out: Path, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, str(WORKERS / f"{worker}.py"), str(out), *arguments]


@contextlib.contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen]:
    """The process of a job's launcher, to be waited for by `finish`; it is gone afterwards."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # The thread count of whoever runs the tests is not that of a user's job.
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
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
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def finish(process: subprocess.Popen) -> str:
    """All output of a started job, which must end in time."""
    try:
        return process.communicate(timeout=TIMEOUT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{process.args} still running after {TIMEOUT_SECONDS} s; it said:\n{output}") from None


def _ended(process: subprocess.Popen, output: str, out: Path, begun: float) -> Job:
    seconds, there = time.monotonic() - begun, [path.stat().st_mtime for path in out.glob("*.at")]
    answers = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    return Job(process.returncode, output, seconds, answers, time.time() - max(there) if there else seconds)
