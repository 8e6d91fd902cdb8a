"""Real NCCL jobs on the GPUs of this host: the same laws, the same faults, CUDA graphs, and GPUs asked for twice."""

from __future__ import annotations

import json
import re

import pytest

from tests.dist import job
from tests.dist.job import DIFFERENT_CALLS, DIFFERENT_MODELS, FAULTS

RANKS = [n for n in (2, 3, 4, 8) if n <= job.most_ranks()] or [2]

LIMIT = {"MINIDL_TIMEOUT": "12"}  # NCCL takes seconds to connect, on a crowded machine many, and is watched as well

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.multi_gpu]


@pytest.mark.parametrize("engine", ["auto", "nccl", "staged"])
@pytest.mark.parametrize("ranks", RANKS)
def test_laws_hold(ranks, engine, tmp_path):
    answers = job.answers("laws", ranks, tmp_path, "cuda", engine)
    assert [answer["rank"] for answer in answers] == list(range(ranks))
    for answer in answers:
        assert answer["name"] == ("staged" if engine == "staged" else "nccl")
        assert answer["size"] == ranks and answer["count"] > 100
        assert answer["failures"] == {}


def test_an_mpi_adds_arrays_of_gpus_or_is_refused_on_every_rank(tmp_path):
    (tmp_path / "asked").mkdir()
    asked = job.run("joining", 2, tmp_path / "asked", "cuda_mpi")
    assert asked.status == 0, asked.output
    if any(answer["error"] != "no error" for answer in asked.answers):
        expected = (
            "RuntimeError: asking MPI whether it takes arrays of GPUs failed: on ranks 0-1: ValueError: init: engine"
        )
        assert all(answer["error"].startswith(expected) and answer["solo"] for answer in asked.answers), asked.answers
        return
    done = job.run("laws", 2, tmp_path, "cuda", "cuda-mpi")
    assert done.status == 0 and all(answer["failures"] == {} for answer in done.answers), done.output


@pytest.mark.parametrize("ranks", RANKS)
def test_a_captured_step_equals_the_eager_one(ranks, tmp_path):
    devices = [rank % job.gpus() for rank in range(ranks)]
    for answer in job.answers("capture", ranks, tmp_path):
        assert answer["wrong"] == 0 and answer["steps"] == answer["expected"]
        assert answer["name"] == "nccl" and answer["devices"] == devices and answer["nvls"] == ["0"]


@pytest.mark.parametrize("ranks", RANKS)
def test_compiled_training_gives_the_bits_of_eager_training(ranks, tmp_path):
    answers = job.answers("compiled", ranks, tmp_path)
    for answer in answers:
        assert answer["name"] == "nccl" and answer["found"] == answers[0]["found"], "ranks must agree to the bit"
        for case, (eager, compiled) in answer["found"].items():
            assert eager == compiled, case
            losses = [read[0] for read in eager["losses"]]
            assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("ranks", RANKS[:1])
def test_training_within_a_limit_of_memory_gives_the_same_bits(ranks, tmp_path):
    """With batch norms over all ranks, gradients kept, in a ring and in the momentum, and a smaller last batch."""
    answers = job.answers("limited", ranks, tmp_path)
    for answer in answers:
        assert answer["found"] == answers[0]["found"], "ranks must agree to the bit"
        for case, found in answer["found"].items():
            for limited in found["limited"]:
                assert limited["away"] > 0 and limited["result"] == found["free"]["result"], case


@pytest.mark.parametrize("ranks", RANKS)
def test_sums_by_shared_memory_are_those_in_rank_order(ranks, tmp_path):
    """To the bit, whatever the way, size, type and place; and a kernel that waits gives up in time."""
    for answer in job.answers("links", ranks, tmp_path):
        assert answer["links"] and answer["wrong"] == {}
        assert set(answer["replays"].values()) == {0} and max(answer["regions"]) <= 2
        if answer["rank"] == 0:
            assert 0.2 <= answer["seconds"] < 2 and "has waited too long for another rank" in answer["said"]


@pytest.mark.parametrize("ranks", RANKS)
def test_grouping_changes_no_bit_where_gpus_see_each_other(ranks, tmp_path):
    """With NCCL it may: the size of a message decides how it adds. Nor does it matter that messages wait."""
    cases = ["plain", "group_bytes=5000", "group_bytes=1073741824"]
    answers = job.answers("training", ranks, tmp_path, "cuda", *cases)
    for answer in answers:
        assert [answer[case]["waiting"] > 0 for case in cases] == [True, False, False]
    found = {json.dumps([answer[case][key] for key in ("weights", "losses")]) for answer in answers for case in cases}
    assert len(found) == 1


def test_two_ranks_on_one_gpu_are_named_on_every_rank(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "without_gpu", CUDA_VISIBLE_DEVICES="0", MINIDL_SHARE_GPUS="0"):
        assert answer["error"].startswith("RuntimeError: init: ranks 0-1 share GPU ") and answer["solo"]


def test_a_gpu_that_one_rank_lacks_is_missed_by_all(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "hidden_gpu"):
        assert answer["error"].startswith("RuntimeError: binding a GPU to each rank failed: on rank 1: ")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_rank_ends_the_job(fault, tmp_path):
    status, text = FAULTS[fault]
    done = job.run("faults", 2, tmp_path, fault, "cuda")
    assert done.status == status, done.output
    assert text in done.output and done.output.count("ending all ranks") == 1


@pytest.mark.parametrize("fault", DIFFERENT_MODELS)
def test_ranks_with_different_models_are_refused(fault, tmp_path):
    done = job.run("faults", 2, tmp_path, fault, "cuda")
    assert done.status == 1, done.output
    assert DIFFERENT_MODELS[fault] in done.output and done.output.count("ending all ranks") == 1


@pytest.mark.parametrize("fault", DIFFERENT_CALLS)
def test_ranks_that_call_different_things_are_told_which(fault, tmp_path):
    """NCCL compares nothing: it waits for ever, or gives wrong sums, which the ranks find out from each other."""
    theirs, its = DIFFERENT_CALLS[fault]
    done = job.run("faults", 2, tmp_path, fault, "cuda")
    assert done.status == 1, done.output
    lines = [line for line in done.output.splitlines() if re.search(r"collective calls? .*differs?: ", line)]
    assert len(lines) == 1, done.output
    assert f"{theirs}; on rank 1: " in lines[0] and f"{its};" in lines[0]
    assert done.output.count("ending all ranks") == 1 and done.seconds < 45


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("sleeping", "start_all_reduce of 1000 float32 (layer1.0.conv2)"),
        ("missing_replay", "follow (the captured step)"),
        ("compiled_training", "follow (compiled step)"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_what_it_does(fault, call, tmp_path):
    """The host of the rank that waits has long gone on: its GPU waits."""
    done = job.run("faults", 2, tmp_path, fault, "cuda", **LIMIT)
    assert done.status == 124, done.output
    assert done.output.count("ending all ranks") == 1, done.output
    first = next(line for line in done.output.splitlines() if line.startswith("minidl: "))
    assert first.startswith("minidl: rank 0 of 2 (") and f"{call}, for rank 1; ending all ranks" in first
    assert "  rank 1: made " in done.output and "time.sleep(1000)" in done.output
    assert done.after < 45, done.output


@pytest.mark.parametrize(("fault", "culprit"), [("stopped", 0), ("stopped", 1), ("stopped_at_the_end", 1)])
def test_a_stopped_rank_is_named_whoever_it_is(fault, culprit, tmp_path):
    done = job.run("faults", 2, tmp_path, fault, "cuda", str(culprit), **LIMIT)
    # The launcher reports the abort, or that the stopped rank had to be killed, whichever it sees first.
    assert done.status in (124, 9, 137), done.output
    assert f"for rank {culprit}; ending all ranks" in done.output, done.output
    assert f"  rank {culprit}: does not answer: stopped" in done.output, done.output
    assert done.after < 30, done.output


def test_ctrl_c_ends_ranks_that_wait(tmp_path):
    done, seconds = job.interrupted("faults", 2, tmp_path, "sleeping", "cuda")
    assert done.status != 0 and seconds < 20, done.output


def test_a_killed_rank_ends_the_job(tmp_path):
    done = job.run("faults", 2, tmp_path, "killed", "cuda")
    assert done.status != 0, done.output
    assert done.seconds < 45


@pytest.mark.parametrize("name", ["late_rank", "message_never_awaited", "all_exit_with_status"])
def test_what_is_no_fault_ends_in_good_order(name, tmp_path):
    done = job.run("faults", 2, tmp_path, name, "cuda")
    assert done.status == (3 if name == "all_exit_with_status" else 0), done.output
    assert "ending all ranks" not in done.output


def test_rounded_messages_keep_their_bound(tmp_path):
    for answer in job.answers("rounded", 2, tmp_path, "cuda"):
        assert answer["worst"] <= 1 and answer["differ"] > 0 and answer["bytes"] == "bfloat16", answer


def test_group_sizes_are_measured_and_kept(tmp_path):
    program = "from minidl.profile import grouping as g; g.SAMPLES = 2; import sys; from minidl.cli import main; "
    program += "sys.exit(main(['tune', 'comm', '--device', 'cuda']))"
    done = job.run_program(["-c", program], 2, tmp_path, MINIDL_CACHE=str(tmp_path / "cache"))
    assert done.status == 0, done.output
    [record] = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("grouping/*-links.json")]
    assert record["group_bytes"] in [group["bytes"] for group in record["groups"]] and record["ranks"] == 2
    assert record["compute_ms"] > 0 and record["bus_gb_per_s"] > 0
