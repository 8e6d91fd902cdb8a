"""Laws of training: resuming is bit-exact; errors are one clear line; progress and metrics tell the truth."""

from __future__ import annotations

import csv
import json
import resource
from types import SimpleNamespace

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, data, models, schedule
from minidl.callbacks import KeepBest
from minidl.dist.communicator import SOLO
from minidl.progress import MetricsLog, progress
from minidl.train import Trainer
from tests.tolerance import assert_same_arrays

f32 = np.float32


def trainer(output=None, *, epochs=2, seed=0, device="cpu", precision="fp32", model="resnet20", lr=0.05, **options):
    graph = models.build(model, (8, 8, 3), 4)
    net = m.Model(graph, device=device, precision=precision, seed=seed)
    options_of_data = {"shape": (8, 8, 3), "num_classes": 4}
    sets = [data.dataset("synthetic", None, s, n=n, **options_of_data) for s, n in (("train", 40), ("test", 12))]
    loaders = [
        data.Loader(s, 8, seed=seed, shuffle=i == 0, dtype=net.precision.storage, transfer=net.ops.uploader())
        for i, s in enumerate(sets)
    ]
    return Trainer(
        net, m.SGD(net, lr, 0.9, 1e-4), m.SoftmaxCrossEntropy(), *loaders,
        schedule=lambda step: lr / (1 + step / 10), epochs=epochs, output=output, report_every=2, **options,
    )  # fmt: skip


def table(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def final(run):
    return {**run.model.state_dict(), **run.optimizer.state_dict()}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_interrupted_run_resumes_to_the_same_bits(precision, ops, tmp_path):
    options = {"device": ops.name, "precision": precision}
    whole = trainer(tmp_path / "whole", **options)
    whole.fit()

    first = trainer(tmp_path / "parts", **options)
    steps = 0
    for batch in first.train_loader:  # killed in the middle of the first epoch, just after a checkpoint
        first._train(batch)
        steps += 1
        if steps == 3:
            first.save()
            break
    second = trainer(tmp_path / "parts", **options)
    second.resume(tmp_path / "parts")
    assert second.step == 3
    second.fit()
    assert_same_arrays(final(whole), final(second))


def test_training_twice_gives_the_same_bits(ops):
    runs = [trainer(device=ops.name) for _ in range(2)]
    rows = [run.fit() for run in runs]
    assert rows[0]["test_loss"] == rows[1]["test_loss"]
    assert_same_arrays(final(runs[0]), final(runs[1]))


def test_the_gpu_follows_the_cpu_step_by_step(cuda_ops):
    """Each step starts from the CPU's state, so that what is compared is the step and not what training makes of it.

    The loss is continuous in the weights and agrees in every step. The update is not: an activation within rounding of
    zero may pass a ReLU on one device alone, which moves the whole update by a per cent or so, rarely.
    """
    cpu, gpu = trainer(device="cpu", seed=5), trainer(device=cuda_ops.name, seed=5)
    loss_error, update_error = [], []
    for _ in range(2):
        for batch, same in zip(cpu.train_loader, gpu.train_loader, strict=True):
            before = cpu.model.state_dict()
            gpu.model.load_state_dict(before)
            gpu.optimizer.load_state_dict(cpu.optimizer.state_dict())
            expected = cpu._train(batch).loss
            loss_error.append(abs(gpu._train(same).loss - expected) / expected)
            after, found = cpu.model.state_dict(), gpu.model.state_dict()
            whole = lambda state: np.concatenate([(state[k] - before[k]).ravel() for k in before])  # noqa: B023, E731
            update = whole(after)
            update_error.append(np.linalg.norm(whole(found) - update) / np.linalg.norm(update))
    assert len(loss_error) >= 8 and max(loss_error) < 3e-6, loss_error
    assert np.median(update_error) < 2e-5 and max(update_error) < 3e-2, update_error


def test_the_test_set_is_counted_exactly(cpu_ops):
    run = trainer()
    logits, labels = [], []
    run.fit()
    run.model.eval()
    for batch in run.test_loader:
        logits.append(run.model.forward(batch.images))
        labels.append(batch.labels)
    logits, labels = np.concatenate(logits), np.concatenate(labels)
    loss, accuracy = run.evaluate()
    assert accuracy == np.mean(logits.argmax(axis=1) == labels) and len(labels) == 12
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    expected = np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(12), labels])
    assert abs(loss - expected) < 1e-5


def test_metrics_and_checkpoints_are_written_and_pruned(tmp_path):
    run = trainer(tmp_path, epochs=4)
    run.fit()
    rows = table(tmp_path / "metrics.csv")
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2, 3]
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == run.step == 20
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert len(kept) == 2 and checkpoint.latest(tmp_path).name == kept[-1]


def test_a_new_run_is_not_mixed_with_a_longer_one_of_before(tmp_path, capsys):
    trainer(tmp_path, epochs=3).fit()
    before = (tmp_path / "metrics.csv").read_text()
    capsys.readouterr()
    short = trainer(tmp_path, epochs=1, seed=1)
    short.fit()
    assert f"checkpoints of another run moved to {tmp_path / 'previous'}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [checkpoint.step_path(tmp_path, short.step).name]
    assert [row["epoch"] for row in table(tmp_path / "metrics.csv")] == ["0"]
    assert len(list((tmp_path / "previous").glob("checkpoint-*"))) == 2
    assert (tmp_path / "previous" / "metrics.csv").read_text() == before
    again = trainer(tmp_path, epochs=2, seed=1)
    again.resume(tmp_path)
    assert again.step == short.step
    again.fit()
    assert "moved" not in capsys.readouterr().out
    assert [row["epoch"] for row in table(tmp_path / "metrics.csv")] == ["0", "1"]


def test_a_run_that_is_refused_leaves_the_one_before_and_its_best_is_kept(tmp_path):
    trainer(tmp_path, epochs=1, callbacks=[KeepBest()]).fit()
    there = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match="unknown metric"):
        trainer(tmp_path, epochs=1, seed=1, callbacks=[KeepBest("accuracy")]).fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    best = (tmp_path / "best.safetensors").read_bytes()
    trainer(tmp_path, epochs=1, seed=1, callbacks=[KeepBest()]).fit()
    assert (tmp_path / "previous" / "best.safetensors").read_bytes() == best
    assert (tmp_path / "best.safetensors").read_bytes() != best


def test_going_on_from_an_earlier_checkpoint_leaves_the_later_ones_behind(tmp_path):
    run = trainer(tmp_path, epochs=2)
    run.fit()
    branch = trainer(tmp_path, epochs=2)
    branch.resume(checkpoint.step_path(tmp_path, run.step // 2))
    branch.fit()
    assert_same_arrays(final(run), final(branch))
    assert [path.name for path in (tmp_path / "previous").glob("checkpoint-*")] == [
        checkpoint.step_path(tmp_path, run.step).name
    ]


def test_metrics_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (2, 4, 6):
        log.report({"step": step})
        log.epoch({"epoch": step // 2 - 1, "step": step})
    log = MetricsLog(tmp_path, step=4, epoch=2)
    assert [json.loads(line)["step"] for line in log.lines.read_text().splitlines()] == [2, 4]
    assert [row["epoch"] for row in table(log.table)] == ["0", "1"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run = trainer(tmp_path, epochs=1, settings={"model": "resnet20"})
    run.fit()
    with pytest.raises(ValueError, match="model: 'resnet20' there, 'resnet18' here"):
        trainer(tmp_path, settings={"model": "resnet18"}).resume(tmp_path)
    with pytest.raises(ValueError, match="does not fit"):
        trainer(tmp_path, model="mlp").resume(tmp_path)
    with pytest.raises(ValueError, match="of another run: seed: 0 there, 1 here"):
        trainer(tmp_path, seed=1, settings={"model": "resnet20"}).resume(tmp_path)
    with pytest.raises(FileNotFoundError):
        trainer(tmp_path).resume(tmp_path / "nowhere")


def test_a_diverging_run_says_so(cpu_ops):
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="lower the learning rate"):
        trainer(lr=1e30).fit()


def test_progress_is_lines_off_a_terminal_and_silent_off_rank_0(capsys):
    for rank in (0, 1):
        shown = progress(rank)
        shown.start("epoch 1/1", 2)
        shown.advance("loss 1")
        shown.finish("done")
    assert capsys.readouterr().out == "epoch 1/1  done\n"


def test_progress_is_a_bar_behind_a_launcher_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("MINIDL_TERMINAL", "100")
    shown = progress()
    shown.start("epoch 1/1", 2)
    shown.advance("loss 1.5")
    shown.bar.refresh()
    shown.finish("done")
    out = capsys.readouterr().out
    assert "━" in out and "1/2" in out and "loss 1.5" in out and "epoch 1/1  done" in out


def test_parts_that_do_not_belong_together_are_refused():
    run = trainer()
    parts = lambda **other: Trainer(  # noqa: E731
        **{"model": run.model, "optimizer": run.optimizer, "loss": run.loss, "train_loader": run.train_loader,
           "schedule": run.schedule, **other}, epochs=1,
    )  # fmt: skip
    parts()
    with pytest.raises(ValueError, match="another model's"):
        parts(optimizer=trainer().optimizer)
    with pytest.raises(ValueError, match=r"SoftmaxCrossEntropy\(comm=comm\)"):
        parts(loss=m.SoftmaxCrossEntropy(comm=type(run.comm)()))
    with pytest.raises(ValueError, match="train_loader must be .*rank 0 of 1"):
        parts(train_loader=data.Loader(run.train_loader.dataset, 8, rank=1, size=2))
    with pytest.raises(TypeError, match=r"images of train_loader must be float32, got float16; .*dtype=model"):
        parts(train_loader=data.Loader(run.train_loader.dataset, 8, dtype=np.float16))
    with pytest.raises(TypeError, match=r"train_loader must be a data.Loader, got tuple; ArrayDataset"):
        parts(train_loader=(np.zeros((4, 8, 8, 3)), np.zeros(4)))
    with pytest.raises(TypeError, match=r"schedule must be a function of the step, got .*schedule.Constant"):
        parts(schedule=0.1)
    for argument, value, text in (
        ("model", run.model.graph, "a Model, got Graph .*Model\\(graph"),
        ("optimizer", "sgd", "an optimizer, got str 'sgd'; SGD"),
        ("loss", "mse", "a Loss, got str 'mse'; SoftmaxCrossEntropy"),
        ("loss", m.MSELoss, "a Loss, got type"),
        ("average", 0.9, "a WeightAverage, got float 0.9; WeightAverage"),
        ("profile", True, "a callbacks.StepWatch, got bool True; bench.training.TrainingProfile"),
        ("display", True, "a progress.Progress, got bool True"),
        ("callbacks", [print], "callbacks.Callback objects, got builtin_function"),
        ("callbacks", [KeepBest], "callbacks.Callback objects, got type"),
        ("metrics", {"top": m.TopK}, r"metrics such as Confusion\(comm=comm\), got type"),
        ("metrics", {"top": 5}, r"metrics such as .* got int 5"),
    ):
        with pytest.raises(TypeError, match=f"Trainer: {argument} must be {text}"):
            parts(test_loader=run.test_loader, **{argument: value})
    with pytest.raises(ValueError, match="TopK: k must be at most the number of classes, 4, got 5"):
        parts(test_loader=run.test_loader, metrics={"top": m.TopK()})


class Others:
    """A communicator of two ranks whose other rank holds ``plan``, or as rank 0 failed with ``failure``."""

    size, local_rank, local_size, name = 2, 0, 2, "others"

    def __init__(self, rank=0, plan=None, failure=None):
        self.rank, self.plan, self.failure = rank, plan, failure

    def share(self, value, name=""):
        if self.plan is not None and value is not None:
            return [value, self.plan if isinstance(value, list) else b"other"]
        return [(None, self.failure) if value == (None, None) else value, value]


def on_rank(run, comm):
    """A trainer of the parts of ``run`` on ``comm``."""
    run.model.comm = run.loss.comm = comm
    for loader in (run.train_loader, run.test_loader):
        loader.rank, loader.size = comm.rank, comm.size
    return Trainer(
        run.model, run.optimizer, run.loss, run.train_loader, run.test_loader,
        schedule=run.schedule, epochs=run.epochs, report_every=run.report_every, output=run.output,
    )  # fmt: skip


def shift(images, labels, draw):
    return images, labels


# What rank 0 does otherwise than rank 1, and what is then told of rank 1.
UNEQUAL = {
    "epochs 2,": lambda run: setattr(run, "epochs", 3),
    "augment None": lambda run: setattr(run.train_loader, "augment", data.Compose(data.RandomCrop(1), shift)),
    "shift [-0.0, -0.0, -0.0]": lambda run: setattr(run.test_loader, "_shift", run.test_loader._shift + 1),
    "schedule <function trainer.<locals>.<lambda>>": lambda run: setattr(run, "schedule", schedule.Constant(0.05)),
    "learning rate 0.02631579 in step 9": lambda run: setattr(run, "schedule", decaying_until(9)),
    "weight_decay 0.0001": lambda run: setattr(run.optimizer, "weight_decay", 0.0),
    "ignore_index -100": lambda run: setattr(run.loss, "ignore_index", 255),
    "random seed 0": lambda run: setattr(run.model.random, "seed", 1),
}


def decaying_until(last):
    """The schedule of `trainer` up to step ``last``, under its name."""
    lr = lambda step: 0.05 / (1 + step / 10) if step < last else 0.0  # noqa: E731
    lr.__qualname__ = "trainer.<locals>.<lambda>"
    return lr


@pytest.mark.parametrize("words", UNEQUAL)
def test_ranks_that_would_not_train_alike_are_refused(words):
    theirs, run = trainer()._plan(), trainer()
    UNEQUAL[words](run)
    with pytest.raises(ValueError, match="ranks differ in training plan") as error:
        on_rank(run, Others(plan=theirs))
    assert words in str(error.value).split("on rank 1: ")[1]


def test_ranks_whose_augmentation_lies_elsewhere_in_memory_train_alike():
    plans = []
    for _ in range(2):
        run = trainer()
        run.train_loader.augment = data.Compose(data.RandomCrop(1), lambda images, labels, draw: (images, labels))
        plans.append(run._plan())
    assert plans[0] == plans[1] and "RandomCrop(padding=1" in str(plans[0]) and "0x" not in str(plans[0])


def test_a_schedule_that_gives_no_rate_is_refused_at_the_door():
    run = trainer(epochs=1)
    run.schedule = [0.1, 0.1, 0.1, 0.1, None].__getitem__
    with pytest.raises(ValueError, match=r"Trainer: schedule\(4\) must be a number of at least 0, finite, got None"):
        on_rank(run, SOLO)


def test_an_output_that_is_no_folder_is_refused_at_the_door_on_every_rank(tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"Trainer: output must be a folder.*/file is a file$") as error:
            trainer(output)
        with pytest.raises(ValueError) as told:
            on_rank(trainer(), Others(rank=1, failure=(ValueError, str(error.value))))
        assert str(told.value) == str(error.value)
    trainer(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists(), "made when there is something to write"


def test_rank_0_alone_cannot_open_its_output_and_all_ranks_say_so(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minidl.train.MetricsLog", full)
    full.FILES = MetricsLog.FILES
    with pytest.raises(OSError, match="No space left on device"):
        trainer(tmp_path).fit()
    run = on_rank(trainer(), Others(rank=1))
    run.comm.failure = OSError, "No space left on device"
    with pytest.raises(OSError, match="No space left on device"):
        run.fit()


def test_settings_that_no_checkpoint_holds_are_refused_at_the_door():
    with pytest.raises(TypeError, match=r"settings\['crop'\] must be .*got tuple"):
        trainer(settings={"crop": (1, 2)})


def test_all_ranks_go_on_from_the_newest_checkpoint_that_rank_0_sees(tmp_path):
    """A file that was just written, or removed, may be seen by another host only later."""
    trainer(tmp_path, epochs=2).fit()
    seen = checkpoint.step_path(tmp_path, 5)
    assert seen.exists() and checkpoint.latest(tmp_path) != seen
    run = trainer(tmp_path)
    told = lambda value, name="": [(seen, None), value] if name == "of rank 0" else [value, value]  # noqa: E731
    run.comm = SimpleNamespace(rank=1, size=2, share=told)
    run.resume(tmp_path)
    assert run.step == 5


def test_ranks_that_go_on_from_different_checkpoints_are_refused(tmp_path):
    trainer(tmp_path, epochs=1).fit()
    run = trainer(tmp_path)
    run.comm = Others(plan=["step 10"])
    with pytest.raises(ValueError, match="where training starts, .* on rank 0: step 5; on rank 1: step 10"):
        run.resume(tmp_path)


def test_metrics_that_were_left_half_written_are_dropped(tmp_path):
    log = MetricsLog(tmp_path)
    log.report({"step": 2})
    log.epoch({"epoch": 0, "step": 2})
    with log.lines.open("a") as lines, log.table.open("a") as rows:
        lines.write('{"step": 3, "lo')
        rows.write("1,4")
    log = MetricsLog(tmp_path, step=4, epoch=3)
    assert log.lines.read_text() == '{"step": 2}\n' and [row["epoch"] for row in table(log.table)] == ["0"]


def recorded(folder):
    """A log of four steps in two epochs."""
    log = MetricsLog(folder)
    for step in (1, 2, 3, 4):
        log.report({"step": step, "loss": 0.5})
    for epoch in (0, 1):
        log.epoch({"epoch": epoch, "step": 2 * epoch + 2})
    return log


def test_a_full_disk_leaves_the_metrics_that_a_resumed_run_would_have_cut(tmp_path):
    log = recorded(tmp_path)
    before = [file.read_bytes() for file in (log.lines, log.table)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            MetricsLog(tmp_path, step=2, epoch=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_bytes() for file in (log.lines, log.table)] == before
    MetricsLog(tmp_path, step=2, epoch=1)
    assert len(log.lines.read_text().splitlines()) == 2 and len(table(log.table)) == 1


def test_who_reads_the_metrics_while_they_grow_goes_on_reading_when_the_run_is_resumed(tmp_path):
    log = recorded(tmp_path)
    with log.lines.open() as lines, log.table.open() as rows:
        assert len(lines.readlines()) == 4 and len(rows.readlines()) == 3
        resumed = MetricsLog(tmp_path, step=4, epoch=2)
        resumed.report({"step": 5, "loss": 0.25})
        resumed.epoch({"epoch": 2, "step": 6})
        assert [json.loads(line)["step"] for line in lines] == [5] and len(rows.readlines()) == 1


def test_a_checkpoint_that_no_trainer_wrote_is_refused(tmp_path):
    checkpoint.save(tmp_path / "mine.safetensors", {"a": np.zeros(3, f32)}, {"step": 1})
    with pytest.raises(ValueError, match="mine.safetensors is a checkpoint, but not a Trainer's"):
        trainer().resume(tmp_path / "mine.safetensors")


def test_an_optimizer_keeps_its_own_momentum(cpu_ops):
    net = m.Model(models.mlp(4, (2, 2, 1)))
    resumed = m.SGD(net, 0.2, momentum=0.5)
    resumed.load_state_dict(m.SGD(net, 0.1, momentum=0.9).state_dict())
    assert resumed.lr == f32(0.1) and resumed.state_dict()["control"][1] == 0.5


def test_a_display_is_finished_when_training_fails(cpu_ops):
    run = trainer()
    finished = []
    run.display.finish = lambda summary="": finished.append(summary)
    run._train = lambda batch: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert finished == [""]


@pytest.mark.parametrize("model", ["mlp", "vgg16"])
def test_a_network_refuses_options_it_does_not_have(model):
    with pytest.raises(ValueError, match="sync_batch_norm"):
        models.build(model, (32, 32, 3), 4, sync_batch_norm=True)


def test_evaluation_leaves_the_mode_as_it_was():
    run = trainer()
    for mode in (True, False):
        run.model.train(mode)
        run.evaluate()
        assert run.model.training is mode


def test_a_loss_that_counts_no_right_answers_tells_no_accuracy(tmp_path, capsys):
    graph = m.Graph()
    graph.output(m.Conv2d(3, 2, 1, name="conv")(graph.input((4, 4, 3))))
    model = m.Model(graph)
    images = np.random.default_rng(0).standard_normal((6, 4, 4, 3), dtype=np.float32)
    loader = data.Loader(data.ArrayDataset(images, (images[..., 0] > 0).astype(np.uint8), 2), 3)
    options = {"schedule": lambda step: 0.1, "epochs": 1, "output": tmp_path, "metrics": {"accuracy_of": m.Confusion()}}
    parts = (model, m.SGD(model, 0.1), m.DiceLoss(), loader, loader)
    row = Trainer(*parts, **options).fit()
    assert [name for name in row if "accuracy" in name] == ["test_accuracy_of"] and "train_loss" in row
    out = capsys.readouterr().out
    assert "  accuracy" not in out and f"test loss {row['test_loss']:.4f}  test accuracy of" in out
    assert table(tmp_path / "metrics.csv")[0]["test_accuracy"] == ""
    with pytest.raises(ValueError, match="unknown metric of KeepBest 'test_accuracy'"):
        Trainer(*parts, **options | {"epochs": 2}, callbacks=[KeepBest()]).fit()
