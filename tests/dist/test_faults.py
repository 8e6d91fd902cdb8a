"""Nothing hangs: every way in which a rank can fail, for real, ends all ranks soon, once and clearly said."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from minidl.dist import mpiexec
from tests.dist import job
from tests.dist.job import DIFFERENT_CALLS, DIFFERENT_MODELS, FAULTS, LIMIT_SECONDS

pytestmark = pytest.mark.mpi

LIMIT = {"MINIDL_TIMEOUT": str(LIMIT_SECONDS)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_rank_ends_the_job(fault, tmp_path):
    status, text = FAULTS[fault]
    done = job.run("faults", 2, tmp_path, fault, "cpu")
    assert done.status == status, done.output
    assert text in done.output
    assert "ending all ranks" in done.output
    assert done.after < 5


def test_the_failing_rank_tells_who_where_and_when(tmp_path):
    done = job.run("faults", 3, tmp_path, "uncaught_exception", "cpu")
    assert "minidl: rank 1 of 3 (" in done.output
    assert ", step 12, layer layer1.0.conv2): uncaught exception" in done.output
    assert "in uncaught_exception" in done.output  # the traceback
    assert "rank 0 of 3" not in done.output


def test_a_rank_that_ends_before_it_joins_is_not_waited_for_without_end(tmp_path):
    """MPI would wait in its start; MPICH's launcher does not end a job of which one process has ended by then."""
    rank = "os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))"
    program = f"import os, sys; {rank} == '1' and sys.exit(3)\n"
    program += "from minidl.dist.world import init; sys.modules['minidl.dist.world'].START_SECONDS = 2.0; init('cpu')"
    done = job.run_program(["-c", program], 3, tmp_path, **LIMIT)
    assert done.status != 0 and done.seconds < 20, done.output
    if mpiexec.find().family == "MPICH":
        assert "_join_all_ranks_that_were_started" in done.output, done.output


def test_a_batch_system_s_signal_before_training_is_not_lost(tmp_path):
    """MPICH was seen to take SIGUSR1 for itself: a job whose time is up would have started to train."""
    program = "import os, signal, time; from minidl import dist; comm = dist.init('cpu')\n"
    program += "comm.barrier(); print('joined', flush=True); comm.rank or os.kill(os.getpid(), signal.SIGUSR1)\n"
    program += "comm.barrier(); print('went on')"
    done = job.run_program(["-c", program], 2, tmp_path)
    assert done.status != 0 and "joined" in done.output and "went on" not in done.output, done.output


def own_processes():
    """Whether this user may start programs that see no processes but their own."""
    unshare = shutil.which("unshare")
    command = [unshare, "--pid", "--fork", "--mount-proc", "true"]
    return unshare is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not own_processes(), reason="needs the right to unshare processes")
def test_ranks_in_containers_of_their_own_do_not_take_each_other_for_dead(tmp_path):
    """Process ids of one say nothing in another: rank 1's is made to be one that rank 0 does not have."""
    program = "import time; from minidl import dist; c = dist.init('cpu'); time.sleep(1); c.barrier(); print('well')"
    start = f'{shlex.quote(sys.executable)} -c "{program}"; exit $?'
    before = "for i in $(seq $((${PMI_RANK:-$OMPI_COMM_WORLD_RANK} * 9))); do /bin/true; done"
    contained = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", f"{before}; {start}"]
    by_network = {"UCX_TLS": "tcp,self", "OMPI_MCA_btl": "tcp,self"}  # else some MPIs go by process ids themselves
    done = job.run_command(mpiexec.find().command(2, contained), tmp_path, **by_network)
    assert done.status == 0 and done.output.count("well") == 2, done.output


def test_a_rank_that_is_late_at_the_end_may_take_its_time(tmp_path):
    done = job.run("faults", 2, tmp_path, "late_rank", "cpu", **LIMIT)
    assert done.status == 0 and "ending all ranks" not in done.output, done.output


@pytest.mark.parametrize(
    "name", ["exit_that_is_caught", "message_never_awaited", "forked_child_fails", "all_exit_with_status"]
)
def test_what_is_no_fault_ends_in_good_order(name, tmp_path):
    done = job.run("faults", 2, tmp_path, name, "cpu")
    assert done.status == (3 if name == "all_exit_with_status" else 0), done.output
    assert "ending all ranks" not in done.output


@pytest.mark.parametrize("engine", ["shm", "mpi"])
@pytest.mark.parametrize("fault", DIFFERENT_CALLS)
def test_ranks_that_call_different_things_are_told_which(fault, engine, tmp_path):
    theirs, its = DIFFERENT_CALLS[fault]
    done = job.run("faults", 2, tmp_path, fault, "cpu", MINIDL_ENGINE=engine)
    assert done.status == 1, done.output
    lines = [line for line in done.output.splitlines() if re.search(r"collective calls? .*differs?: ", line)]
    assert len(lines) == 1, done.output
    assert f"{theirs}; on rank 1: " in lines[0] and f"{its};" in lines[0]
    assert "every rank must make the same calls in the same order" in done.output
    assert done.output.count("ending all ranks") == 1
    assert done.after < 8  # found out at once, or when a rank has waited a little: the limit is ten minutes


@pytest.mark.parametrize("engine", ["shm", "mpi"])
def test_a_rank_that_sends_less_than_the_other_expects_is_named(engine, tmp_path):
    done = job.run("faults", 2, tmp_path, "other_halo", "cpu", MINIDL_ENGINE=engine)
    assert done.status == 1, done.output
    expected = "start_exchange (halo of conv1): message must be the 4000 bytes that are expected of rank 1, got 3600"
    assert expected in done.output and done.output.count("ending all ranks") == 1


@pytest.mark.parametrize("fault", ["other_size", "other_order", "other_call"])
def test_ranks_of_several_hosts_are_told_as_well(fault, tmp_path):
    done = job.run("faults", 4, tmp_path, fault, "cpu", MINIDL_ENGINE="shm", MINIDL_RANKS_PER_HOST="2")
    assert done.status == 1, done.output
    assert re.search(r"collective calls? .*differs?: .*on rank 1: ", done.output), done.output
    assert done.after < 15  # four ranks whose MPI spins on two cores


@pytest.mark.parametrize("engine", ["shm", "mpi"])
def test_a_rank_that_does_not_come_is_named_with_what_it_does(engine, tmp_path):
    done = job.run("faults", 3, tmp_path, "sleeping", "cpu", MINIDL_ENGINE=engine, **LIMIT)
    assert done.status == 124, done.output
    assert done.output.count("ending all ranks") == 1, done.output
    first = done.output.splitlines()[0]
    assert first.startswith("minidl: rank 0 of 3 (") and ", step 12): waits for " in first
    assert "start_all_reduce of 1000 float32 (layer1.0.conv2), for rank 1; ending all ranks" in first
    assert "  rank 1: made " in done.output and re.search(r"the last share( \(.*\))?; in none for", done.output)
    assert "  rank 2: waits in the same call (step 12" in done.output
    assert "time.sleep(1000)" in done.output, "the stack of the rank that sleeps"
    assert LIMIT_SECONDS < done.after < LIMIT_SECONDS + 8


@pytest.mark.parametrize("device", job.DEVICES)
def test_a_slow_rank_is_named_once_and_waited_for(device, tmp_path):
    done = job.run("faults", 3 if device == "cpu" else 2, tmp_path, "slow", device)
    assert done.status == 0, done.output
    said = [line for line in done.output.splitlines() if line.startswith("minidl: ")]
    assert len(said) == 1 and said[0].startswith("minidl: rank 0 of "), done.output
    assert "s in start_all_reduce of 1000 float32 (layer1.0.conv2); not there: 1" in said[0]


@pytest.mark.parametrize("fault", ["device_waits", "device_waits_at_the_end"])
def test_a_device_that_waits_is_seen_whatever_its_host_does(fault, tmp_path):
    done = job.run("faults", 2, tmp_path, fault, "cpu", **LIMIT)
    assert done.status == 124, done.output
    assert done.output.count("ending all ranks") == 1, done.output
    first = done.output.splitlines()[0]
    assert first.startswith("minidl: rank 0 of 2 (") and ", step 12): waits for " in first
    assert "start_all_reduce of 1000 float32 (layer1.0.conv2), for rank 1; ending all ranks" in first
    assert "  rank 1: made " in done.output and "time.sleep(1000)" in done.output
    assert LIMIT_SECONDS < done.after < LIMIT_SECONDS + 8


@pytest.mark.parametrize("fault", ["calls_that_nobody_compares", "calls_found_different_at_leisure"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_that_no_engine_compares_are_found_different_by_the_ranks(ranks, fault, tmp_path):
    """All of them find it out when they leave, at once, each of others; one speaks."""
    done = job.run("faults", ranks, tmp_path, fault, "cpu")
    assert done.status == 1, done.output
    lines = [line for line in done.output.splitlines() if "differs: " in line]
    assert len(lines) == 1 and done.output.count("ending all ranks") == 1, done.output
    theirs, its = (f"start_all_reduce of {size} float32 (conv1)" for size in (1000, 900))
    assert f"{theirs}; " in lines[0] and f"on rank 1: {its}" in lines[0], "whatever the others were known to call"
    assert done.after < 8


@pytest.mark.parametrize(("fault", "culprit"), [("stopped", 0), ("stopped", 1), ("stopped_at_the_end", 1)])
def test_a_stopped_rank_is_named_whoever_it_is(fault, culprit, tmp_path):
    done = job.run("faults", 2, tmp_path, fault, "cpu", str(culprit), **LIMIT)
    # The launcher reports the abort, or that the stopped rank had to be killed, whichever it sees first.
    assert done.status in (124, 9, 137), done.output
    assert f"minidl: rank {1 - culprit} of 2 (" in done.output
    assert f"for rank {culprit}; ending all ranks" in done.output
    assert f"  rank {culprit}: does not answer: stopped" in done.output


def test_a_killed_rank_ends_the_job(tmp_path):
    done = job.run("faults", 2, tmp_path, "killed", "cpu")
    assert done.status != 0, done.output
    assert done.after < 5 and done.answers == []


@pytest.mark.parametrize("fault", ["sleeping", "stopped"])
@pytest.mark.parametrize("engine", ["shm", "mpi"])
def test_ctrl_c_ends_ranks_that_wait(fault, engine, tmp_path):
    """In the launcher's terminal, while one rank sleeps or does not run at all and the others wait for it."""
    done, seconds = job.interrupted("faults", 3, tmp_path, fault, "cpu", MINIDL_ENGINE=engine)
    assert done.status != 0 and seconds < 8, done.output
    if mpiexec.find().family != "Open MPI":  # which kills its ranks before they can say a word
        assert done.output.count("ending all ranks") == 1 and "KeyboardInterrupt" in done.output, done.output


@pytest.mark.parametrize("fault", DIFFERENT_MODELS)
def test_ranks_with_different_models_are_refused(fault, tmp_path):
    done = job.run("faults", 3, tmp_path, fault, "cpu")
    assert done.status == 1, done.output
    assert DIFFERENT_MODELS[fault] in done.output and done.output.count("ending all ranks") == 1


def test_ranks_that_fail_alike_speak_with_one_voice(tmp_path):
    done = job.run("faults", 4, tmp_path, "the_same_error_everywhere", "cpu")
    assert done.status == 1, done.output
    assert done.output.count("ValueError: --lr must be positive") == 1
    assert done.output.startswith("minidl: ranks 0-3 of 4 (")


def test_ranks_that_fail_of_different_things_all_speak(tmp_path):
    done = job.run("faults", 2, tmp_path, "errors_of_their_own", "cpu")
    assert done.status == 1, done.output
    assert "ValueError: rank 0 has its own" in done.output or "ValueError: rank 1 has its own" in done.output
    assert "ranks 0-1" not in done.output


@pytest.mark.parametrize(("options", "engine"), [(["--lr", "-1"], ""), ([], "nccl")], ids=["option", "engine"])
def test_an_error_of_the_command_line_is_one_line(options, engine, tmp_path):
    """Also one for which the ranks cannot be joined."""
    command = ["-m", "minidl", "train", "--device", "cpu", "--model", "mlp", "--data", "synthetic", *options]
    done = job.run_program(command, 3, tmp_path, MINIDL_ENGINE=engine)
    assert done.status == 2, done.output
    said = [line for line in done.output.splitlines() if line.startswith("minidl train: ")]
    assert len(said) == 1 and "of 3" not in said[0], done.output


def test_ranks_that_cannot_be_joined_speak_with_one_voice(tmp_path):
    done = job.run_program(["-c", "from minidl.dist import init; init('cuda')"], 3, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.status == 1, done.output
    assert done.output.startswith("minidl: ranks 0-2 of 3 (") and done.output.count("ending all ranks") == 1
    assert "RuntimeError: binding a GPU to each rank failed: on ranks 0-2: " in done.output
