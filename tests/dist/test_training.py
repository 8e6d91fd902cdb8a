"""N ranks equal one rank on the joined batch: the same losses, the same weights, within float32 rounding."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from tests.dist import job

pytestmark = pytest.mark.mpi


RECIPES = ["recipe=lamb", "recipe=lars", "recipe=mixed"]
RINGS = [f"slots={slots}" for slots in (1, 2, 9)]  # from one to more than are needed
# What each number of ranks trains by each engine, in one job.
CASES = {
    ("", 1): ["plain", "parts=1", "parts=1,recipe=lamb", *RECIPES],
    ("", 2): ["plain", "group_bytes=1048576", "parts=2"],
    ("shm", 3): [
        "plain", "group_bytes=600", "group_bytes=1048576", "parts=4", "parts=4,recipe=lamb", "recipe=waits", *RINGS,
        *(f"group_bytes=600,{recipe}" for recipe in RECIPES),
    ],
    ("mpi", 3): ["plain", "recipe=waits", *RINGS],
    ("", 4): ["group_bytes=600"],
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What all ranks found in a case of such a job, which runs when the first of its cases is asked for."""
    answers = {}

    def found(case, engine, ranks):
        if (engine, ranks) not in answers:
            out, command = tmp_path_factory.mktemp("training"), ["cpu", *CASES[engine, ranks]]
            answers[engine, ranks] = job.answers("training", ranks, out, *command, MINIDL_ENGINE=engine)
        return [answer[case] for answer in answers[engine, ranks]]

    return found


def assert_equal_training(answers, alone):
    for answer in answers:
        for (loss, count), (expected, labels) in zip(answer["losses"], alone["losses"], strict=True):
            assert count == labels
            assert abs(loss - expected) <= 2e-5 * (1 + abs(expected))
        np.testing.assert_allclose(answer["weights"], alone["weights"], rtol=2e-4, atol=2e-5)
        assert answer["test"][1] == alone["test"][1] and answer["metrics"] == alone["metrics"]
        assert answer["top2"] == alone["top2"] == alone["metrics"][1]
        assert answer["weights"] == answers[0]["weights"], "ranks must agree to the bit"


@pytest.mark.parametrize(
    ("case", "engine", "ranks"),
    [("plain", "", 2), ("group_bytes=1048576", "", 2), ("plain", "mpi", 3), ("group_bytes=600", "", 4)],
)
def test_n_ranks_equal_one(case, engine, ranks, trained):
    [alone] = trained("plain", "", 1)
    assert_equal_training(trained(case, engine, ranks), alone)
    losses = [loss for loss, _ in alone["losses"]]
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4]), "it must have learnt, or equality says little"


@pytest.mark.parametrize("engine", ["shm", "mpi"])
def test_a_ring_of_gradients_changes_no_bit(engine, trained):
    """Updates within the backward pass, with messages of three ranks under way."""
    whole = trained("plain", engine, 3)[0]["weights"]
    for case in RINGS:
        assert all(answer["weights"] == whole for answer in trained(case, engine, 3)), case


@pytest.mark.parametrize("engine", ["shm", "mpi"])
def test_messages_that_wait_change_no_bit(engine, trained):
    """Beside the sums of batch norms over all ranks, which now come before them."""
    at_once, waiting = (trained(case, engine, 3) for case in ("plain", "recipe=waits"))
    assert all(answer["waiting"] == 0 for answer in at_once) and all(answer["waiting"] > 0 for answer in waiting)
    first = at_once[0]
    for answer in (*at_once, *waiting):
        assert answer["weights"] == first["weights"] and answer["losses"] == first["losses"]


@pytest.mark.parametrize(
    ("case", "engine", "ranks"), [("parts=2", "", 2), ("parts=4", "shm", 3), ("parts=4,recipe=lamb", "shm", 3)]
)
def test_n_ranks_with_micro_batches_equal_one_without(case, engine, ranks, trained):
    """The last batch has two samples: some ranks, and some micro-batches, have none. One loss has class weights."""
    [alone] = trained(",".join(["parts=1", *case.split(",")[1:]]), "", 1)
    assert_equal_training(trained(case, engine, ranks), alone)


@pytest.mark.parametrize("recipe", RECIPES)
def test_adaptive_optimizers_clipping_weighted_losses_and_mixed_images_of_n_ranks_equal_one(recipe, trained):
    [alone] = trained(recipe, "", 1)
    assert_equal_training(trained(f"group_bytes=600,{recipe}", "shm", 3), alone)


def test_in_shared_memory_the_size_of_messages_changes_no_bit(trained):
    """Sums are in rank order, in place or copied, for any grouping; three ranks, whose sums depend on the order."""
    found = [trained(case, "shm", 3)[0]["weights"] for case in ("plain", "group_bytes=600", "group_bytes=1048576")]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("device", job.DEVICES)
def test_two_ranks_resume_to_the_same_bits(device, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    answers = job.answers("resuming", 2, tmp_path, str(folder), device)
    for answer in answers:
        assert answer["step"] == 8 and answer["whole"] == answer["parts"] == answers[0]["whole"]
        assert answer["stopped"] == [signal.SIGUSR1, 3, 3], "one rank's signal stops all after the same step"
        assert answer["weights"][0] == answer["weights"][1] == answers[0]["weights"][0]


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_equal_one_cpu(trained, tmp_path):
    answers = job.answers("training", 2, tmp_path, "cuda", "plain")
    [alone] = trained("plain", "", 1)
    assert_equal_training([answer["plain"] for answer in answers], alone)


@pytest.mark.parametrize(("engine", "ranks"), [("mpi", 2), ("shm", 3)])
def test_rounded_messages_keep_their_bound(engine, ranks, tmp_path):
    for answer in job.answers("rounded", ranks, tmp_path, "cpu", engine):
        assert answer["worst"] <= 1 and answer["differ"] > 0 and answer["bytes"] == "bfloat16", answer
