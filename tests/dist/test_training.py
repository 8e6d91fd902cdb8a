"""N ranks equal one rank on the joined batch: the same losses, the same weights, within float32 rounding."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from tests.dist import job

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    done = job.run_alone("training", tmp_path_factory.mktemp("alone"), "cpu", "0")
    assert done.status == 0, done.output
    return done.answers[0]


def assert_equal_training(answers, alone):
    for answer in answers:
        for (loss, count), (expected, labels) in zip(answer["losses"], alone["losses"], strict=True):
            assert count == labels
            assert abs(loss - expected) <= 2e-5 * (1 + abs(expected))
        np.testing.assert_allclose(answer["weights"], alone["weights"], rtol=2e-4, atol=2e-5)
        assert answer["test"][1] == alone["test"][1] and answer["metrics"] == alone["metrics"]
        assert answer["top2"] == alone["top2"] == alone["metrics"][1]
        assert answer["weights"] == answers[0]["weights"], "ranks must agree to the bit"


@pytest.mark.parametrize(("ranks", "group_bytes"), [(2, 0), (2, 1 << 20), (3, 0), (4, 600)])
def test_n_ranks_equal_one(ranks, group_bytes, alone, tmp_path):
    done = job.run("training", ranks, tmp_path, "cpu", str(group_bytes))
    assert done.status == 0, done.output
    assert len(done.answers) == ranks
    assert_equal_training(done.answers, alone)
    losses = [loss for loss, _ in alone["losses"]]
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4]), "it must have learnt, or equality says little"


@pytest.mark.parametrize("engine", ["shm", "mpi"])
def test_a_ring_of_gradients_changes_no_bit(engine, tmp_path):
    """Updates within the backward pass, with messages of three ranks under way; from one slot to more than needed."""
    weights = []
    for slots in (0, 1, 2, 9):
        out = tmp_path / str(slots)
        out.mkdir()
        done = job.run("training", 3, out, "cpu", "0", "0", str(slots), MINIDL_ENGINE=engine)
        assert done.status == 0, done.output
        assert all(answer["weights"] == done.answers[0]["weights"] for answer in done.answers)
        weights.append(done.answers[0]["weights"])
    assert weights[0] == weights[1] == weights[2] == weights[3]


@pytest.mark.parametrize("engine", ["shm", "mpi"])
def test_messages_that_wait_change_no_bit(engine, tmp_path):
    """Beside the sums of batch norms over all ranks, which now come before them."""
    found = []
    for recipe in ("sgd", "waits"):
        out = tmp_path / recipe
        out.mkdir()
        done = job.run("training", 3, out, "cpu", "0", "0", "0", recipe, MINIDL_ENGINE=engine)
        assert done.status == 0, done.output
        assert all((answer["waiting"] > 0) == (recipe == "waits") for answer in done.answers)
        found += [[answer["weights"], answer["losses"]] for answer in done.answers]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (3, 4)])
def test_n_ranks_with_micro_batches_equal_one_without(ranks, parts, tmp_path):
    """The last batch has two samples: some ranks, and some micro-batches, have none."""
    (tmp_path / "alone").mkdir()
    alone = job.run_alone("training", tmp_path / "alone", "cpu", "0", "1")
    together = job.run("training", ranks, tmp_path, "cpu", "0", str(parts))
    assert alone.status == together.status == 0, alone.output + together.output
    assert_equal_training(together.answers, alone.answers[0])


@pytest.mark.parametrize("recipe", ["lamb", "lars", "mixed"])
def test_adaptive_optimizers_clipping_weighted_losses_and_mixed_images_of_n_ranks_equal_one(recipe, tmp_path):
    folders = [tmp_path / str(ranks) for ranks in (1, 3)]
    for folder in folders:
        folder.mkdir()
    alone = job.run_alone("training", folders[0], "cpu", "0", "0", "0", recipe)
    done = job.run("training", 3, folders[1], "cpu", "600", "0", "0", recipe)
    assert alone.status == done.status == 0, alone.output + done.output
    assert_equal_training(done.answers, alone.answers[0])


def test_in_shared_memory_the_size_of_messages_changes_no_bit(tmp_path):
    """Sums are in rank order, in place or copied, for any grouping; three ranks, whose sums depend on the order."""
    weights = []
    for group_bytes in (0, 600, 1 << 20):
        out = tmp_path / str(group_bytes)
        out.mkdir()
        done = job.run("training", 3, out, "cpu", str(group_bytes), MINIDL_ENGINE="shm")
        assert done.status == 0, done.output
        weights.append(done.answers[0]["weights"])
    assert weights[0] == weights[1] == weights[2]


@pytest.mark.parametrize("device", job.DEVICES)
def test_two_ranks_resume_to_the_same_bits(device, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    done = job.run("resuming", 2, tmp_path, str(folder), device)
    assert done.status == 0, done.output
    for answer in done.answers:
        assert answer["step"] == 8 and answer["whole"] == answer["parts"] == done.answers[0]["whole"]
        assert answer["stopped"] == [signal.SIGUSR1, 3, 3], "one rank's signal stops all after the same step"
        assert answer["weights"][0] == answer["weights"][1] == done.answers[0]["weights"][0]


@pytest.mark.parametrize("ranks,granularity", [(2, "weight"), (3, "weight"), (2, "filter"), (3, "2:4")])
def test_ranks_prune_alike_and_send_the_elements_only(ranks, granularity, tmp_path):
    (tmp_path / "alone").mkdir()
    alone = job.run_alone("pruning", tmp_path / "alone", granularity)
    together = job.run("pruning", ranks, tmp_path, granularity)
    assert alone.status == together.status == 0, alone.output + together.output
    [expected] = alone.answers
    for answer in together.answers:
        assert answer == together.answers[0], "ranks must agree to the bit"
        assert answer["masks"] == expected["masks"] and answer["sent"] == expected["sent"]
        assert abs(answer["loss"] - expected["loss"]) <= 2e-5 * (1 + abs(expected["loss"]))
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(answer["weights"][name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    elements = len(expected["weights"]["sparse.weight"])
    assert elements < 0.25 * 64 * 192 and elements <= expected["sent"]["sparse"] < elements + 64
    kept = {name: sum(mask) / len(mask) for name, mask in expected["masks"].items()}
    if granularity == "filter":  # the last layer's outputs are the network's
        assert kept.keys() == {"fc1.weight", "fc1.bias"} and max(kept.values()) < 0.22
    else:
        most = 0.51 if granularity == "2:4" else 0.21
        assert kept.keys() == {"fc1.weight", "fc2.weight"} and max(kept.values()) < most


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_equal_one_cpu(alone, tmp_path):
    done = job.run("training", 2, tmp_path, "cuda", "0")
    assert done.status == 0, done.output
    assert_equal_training(done.answers, alone)


@pytest.mark.parametrize(("engine", "ranks"), [("mpi", 2), ("shm", 3)])
def test_rounded_messages_keep_their_bound(engine, ranks, tmp_path):
    done = job.run("rounded", ranks, tmp_path, "cpu", engine)
    assert done.status == 0, done.output
    for answer in done.answers:
        assert answer["worst"] <= 1 and answer["differ"] > 0 and answer["bytes"] == "bfloat16", answer
