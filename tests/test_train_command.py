"""``minidl train`` as a user types it: it trains and resumes, and whatever is wrong is one clear line."""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import subprocess
import sys

import pytest

from minidl import checkpoint, cli, data, dist, training
from minidl.bench.setup import device_of
from minidl.dist.communicator import SOLO
from minidl.train import Trainer
from tests.commands import ROOT
from tests.test_train import table, trainer


def run_cli(capsys, *arguments):
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_trains_and_resumes(tmp_path, capsys):
    common = ("train", "--device", "cpu", "--model", "mlp", "--output", str(tmp_path))
    status, out, err = run_cli(capsys, *common, "--epochs", "2")
    assert status == 0 and err == ""
    lines = out.splitlines()
    assert lines[0].startswith("mlp: ") and lines[-3].startswith("test accuracy 0.")
    status, out, _ = run_cli(capsys, *common, "--epochs", "3", "--resume")
    assert status == 0 and "epoch 3/3" in out and "epoch 2/3" not in out
    status, out, _ = run_cli(capsys, *common, "--epochs", "1", "--resume")
    assert status == 0 and "nothing left to do" in out and "at epoch 3;" in out


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_keep_nobody_from_training(closed, tmp_path):
    """As daemons and some batch systems start their jobs."""
    options = "train --device cpu --model mlp --data synthetic --samples 64 --epochs 1 --output out"
    command = f"{shlex.quote(sys.executable)} -m minidl {options} {closed}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    checkpoint.load(checkpoint.latest(tmp_path / "out"))


def test_a_recipe_may_have_any_letters_wherever_it_is_read(tmp_path):
    """TOML is UTF-8 whatever the language of the machine."""
    (tmp_path / "recipe.toml").write_text('# für Münzen\nmodel = "mlp"\noutput = "läuft"\n', encoding="utf-8")
    command = [sys.executable, "-X", "utf8=0", "-m", "minidl", "train", "--config", "recipe.toml", "--epochs", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--epochs must be" in done.stderr, done.stderr


@pytest.mark.parametrize("began", [None, "", "elsewhere/checkpoint-00000005.safetensors"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_lost_rank_lets_the_others_go_on_where_their_run_was_and_not_with_what_lay_there(
    began, saved, tmp_path, monkeypatch
):
    """A run lost before its first checkpoint begins where it had begun, whatever another has left in the folder."""
    checkpoint.save(checkpoint.step_path(tmp_path, 9), {}, {})  # of another run, or of this one where it resumes
    resumed = []

    def once(a, verb):
        resumed.append(a.resume)
        if len(resumed) == 1:
            if saved:
                checkpoint.save(checkpoint.step_path(tmp_path, 2), {}, {})
            raise dist.RankLost("share: the process of another rank is gone; shrink")
        return {}, None

    monkeypatch.setattr(training, "_trained_once", once)
    monkeypatch.setattr(dist, "shrink", lambda: SOLO)
    training.trained(argparse.Namespace(resume=began, output=str(tmp_path), verb="train"))
    assert resumed == [began, "" if saved else began]


@pytest.mark.parametrize("optimizer", ["adamw", "lars", "lamb"])
def test_the_command_trains_with_every_optimizer(optimizer, tmp_path, capsys):
    options = ("--optimizer", optimizer, "--label-smoothing", "0.1", "--clip-norm", "1", "--schedule", "poly:2")
    common = ("train", "--device", "cpu", "--model", "mlp", "--output", str(tmp_path))
    status, out, err = run_cli(capsys, *common, *options, "--epochs", "1")
    assert status == 0 and err == "" and "test accuracy" in out
    status, _, err = run_cli(capsys, *common, "--epochs", "2", "--resume")
    assert status == 2 and f"optimizer: '{optimizer}' there, 'sgd' here" in err
    if optimizer != "lars":
        status, _, err = run_cli(capsys, *common, "--optimizer", optimizer, "--momentum", "0.9")
        assert status == 2 and f"--momentum is for sgd and lars, not for {optimizer}" in err


def test_each_optimizer_has_a_learning_rate_of_its_own(tmp_path, capsys):
    """Batch-normalised networks stay at chance for an epoch where AdamW takes the rate of SGD."""
    rates = {"sgd": 0.1, "adamw": 0.001, "lars": 1.0, "lamb": 0.01}
    fixed = ("--device", "cpu", "--model", "mlp", "--epochs", "1", "--schedule", "constant", "--warmup", "0")
    fixed += ("--data", "synthetic", "--image-size", "4", "--samples", "32", "--batch", "16")
    for verb, share in (("train", 1), ("prune", 0.5)):
        for name, rate in rates.items():
            status, _, _ = run_cli(capsys, verb, *fixed, "--optimizer", name, "--output", str(tmp_path))
            [row] = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
            assert status == 0 and float(row["lr"]) == pytest.approx(share * rate), (verb, name)


def test_the_command_augments_unless_told_not_to(tmp_path, capsys, monkeypatch):
    seen = []
    real = data.Loader
    monkeypatch.setattr(
        data, "Loader", lambda *a, **options: seen.append(options.get("augment")) or real(*a, **options)
    )
    common = ("train", "--device", "cpu", "--model", "mlp", "--epochs", "1", "--output", str(tmp_path))
    for flags, wanted in (((), data.digits().augment), (("--no-augment",), None)):
        assert run_cli(capsys, *common, *flags)[0] == 0
        assert seen == [wanted, None], "training images only"
        seen.clear()
    assert data.digits().augment is not None
    status, _, err = run_cli(capsys, *common, "--resume")
    assert status == 2 and "augment: False there, True here" in err


def test_the_command_mixes_changes_colours_and_keeps_the_best(tmp_path, capsys):
    size = ("--data", "synthetic", "--image-size", "8", "--samples", "40", "--classes", "3", "--batch", "20")
    options = ("--mixup", "0.4", "--color-jitter", "0.2", "--keep-best", "--keep", "1", "--patience", "1")
    common = ("train", "--device", "cpu", "--model", "mlp", "--lr", "1e-6", "--warmup", "0", "--output", str(tmp_path))
    status, out, err = run_cli(capsys, *common, *size, *options, "--epochs", "60")
    assert status == 0 and err == ""
    assert "ended after epoch" in out and "test_loss has not become better than" in out
    assert (tmp_path / "best.safetensors").exists() and len(list(tmp_path.glob("checkpoint-*"))) == 1
    settings = checkpoint.load(tmp_path / "best.safetensors")[1]["settings"]
    assert (settings["mixup"], settings["color_jitter"]) == (0.4, 0.2)
    status, out, _ = run_cli(capsys, *common, *size, *options, "--epochs", "60", "--resume")
    assert status == 0 and "nothing left to do: test_loss" in out and "--patience" in out
    status, _, err = run_cli(capsys, *common, *size, "--mixup", "0.2", "--resume")
    assert status == 2 and "mixup: 0.4 there, 0.2 here" in err
    status, _, err = run_cli(capsys, *common, *size, "--resume")
    assert status == 2 and "color_jitter: 0.2 there, None here; mixup: 0.4 there, None here" in err


def test_the_command_tells_iou_of_label_maps_and_top5_of_many_classes(tmp_path, capsys):
    common = ("train", "--device", "cpu", "--data", "synthetic", "--epochs", "1", "--batch", "4", "--samples", "8")
    unet = ("--model", "unet", "--model-options", "width=2 depth=2", "--image-size", "16", "--classes", "3")
    status, out, _ = run_cli(capsys, *common, *unet, "--output", str(tmp_path / "unet"))
    assert status == 0 and "test iou 0." in out and float(table(tmp_path / "unet" / "metrics.csv")[0]["test_iou"]) > 0
    many = ("--model", "mlp", "--image-size", "4", "--classes", "100")
    status, out, _ = run_cli(capsys, *common, *many, "--output", str(tmp_path / "many"))
    assert status == 0 and "test top5 0." in out


ERRORS = {
    ("--model", "resnet81"): "unknown model 'resnet81'; did you mean",
    ("--data", "imagenet"): "unknown data set 'imagenet'",
    ("--data", "cifar10", "--data-path", "nowhere"): "nowhere",
    ("--precision", "fp8"): "unknown precision 'fp8'",
    ("--device", "cpu", "--precision", "tf32"): "tf32",
    ("--image-size", "64"): "--image-size is for --data synthetic",
    ("--data-path", "x"): "has no files",
    (
        "--model-options",
        "width",
    ): "--model-options: text must be NAME=NUMBER words, such as 'width=16 depth=3', got 'width'",
    ("--model-options", "widht=3"): "resnet20: options must be arguments that this model has, got ['widht']",
    ("--mixup", "0"): "MixUp: alpha must be a number in (0, 1]",
    ("--color-jitter", "0.1"): "ColorJitter: images must have shape (n, H, W, 3)",
    ("--data", "folder"): "--data folder needs --data-path DIR, the folder of its files",
    ("--config", "nothere.toml"): "there is no file nothere.toml",
    ("--loader", "dali"): "DaliLoader: dataset must be an ImageFolder",
    ("--profile-every", "5"): "--profile-every is for --profile",
    ("--profile", "--profile-every", "0"): "profile: every must be an integer of at least 1",
    ("--keep", "0"): "keep must be an integer of at least 1",
    ("--patience", "0"): "patience must be an integer of at least 1",
    ("--batch", "0"): "batch must be",
    ("--lr", "-1"): "lr must be",
    ("--epochs", "0"): "--epochs must be an integer of at least 1, got 0",
    ("--output", ""): "--output must be a folder, got ''",
    ("--output", __file__): f"output must be a folder, there already or to be made, got '{__file__}'",
    ("--output", "/proc/x"): "output must be a folder, there already or to be made, got '/proc/x'; /proc cannot be",
    ("--device", "cpu", "--memory-limit", "1GB"): "--memory-limit is for GPUs; this run is on the CPU",
    ("--schedule", "spiral"): "spiral",
    ("--data", "synthetic", "--samples", "0"): "n must be",
    ("--data", "synthetic", "--image-size", "0"): "shape must be",
    ("--seed", "99999999999999999999"): "seed must be",
    ("--model", "mlp", "--sync-batch-norm"): "sync_batch_norm",
    ("--resume", "nowhere.safetensors"): "nowhere.safetensors",
    ("--freeze", "*"): "Trainer: the model has no weights that are trained; freeze fewer of them",
    ("--model", "lenet"): "conv2: x must have shape (N, H, W, C), at least as large as the kernel",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_wrong_arguments_are_one_clear_line(arguments, tmp_path, capsys):
    status, out, err = run_cli(capsys, "train", "--output", str(tmp_path), *arguments)
    assert status == 2 and (out == "" or "--color-jitter" in arguments), "told before the work starts"
    assert err.startswith("minidl train: ") and err.count("\n") == 1
    assert ERRORS[arguments] in err


@pytest.mark.parametrize(("verb", "names"), [(["train"], "train"), (["bench", "layers"], "bench layers")])
def test_an_option_that_a_verb_does_not_have_is_told_with_the_usage_of_that_verb(verb, names, capsys):
    status, _, err = run_cli(capsys, *verb, "--modle", "mlp")
    assert status == 2 and err.startswith(f"usage: minidl {names}")
    assert f"minidl {names}: error: unrecognized arguments: --modle mlp; did you mean --model?\n" in err


def test_an_interrupt_is_one_clear_line_with_the_way_on(tmp_path, capsys, monkeypatch):
    train = ("train", "--device", "cpu", "--model", "mlp", "--output", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        status, _, err = run_cli(capsys, *train)
        assert (status, err.count("\n")) == (130, 1) and err.startswith("minidl train: interrupted") and ";" not in err
    assert run_cli(capsys, *train, "--epochs", "1")[0] == 0
    monkeypatch.setattr(checkpoint.os, "fsync", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    newest = checkpoint.latest(tmp_path)
    status, _, err = run_cli(capsys, *train, "--epochs", "2", "--resume")
    assert status == 130 and err.endswith(f"; --resume goes on from {newest}\n") and err.count("\n") == 1
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == [newest.name], "nothing half-written stays"


def test_a_truncated_checkpoint_is_one_clear_line(tmp_path, capsys):
    trainer(tmp_path, epochs=1).fit()
    path = checkpoint.latest(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    status, _, err = run_cli(capsys, "train", "--device", "cpu", "--output", str(tmp_path), "--resume")
    assert status == 2 and path.name in err and "truncated or damaged" in err


def test_without_a_verb_all_are_listed(capsys):
    status, out, _ = run_cli(capsys)
    assert status == 2 and "train a network" in out and "compare-backends" in out


def test_info_names_what_is_here(capsys):
    status, out, _ = run_cli(capsys, "info")
    assert status == 0 and "NumPy" in out and "Python" in out


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    from minidl import cuda, dist

    def missing():
        raise RuntimeError("no driver")

    monkeypatch.setattr(cuda, "require_device", missing)
    with pytest.raises(ValueError, match="--device cuda: no driver"):
        device_of("cuda", dist.SOLO)


def test_a_job_that_cannot_be_joined_is_one_clear_line(capsys, monkeypatch):
    from minidl import dist

    def alone(device, **options):
        raise RuntimeError("init: this process was started as one of 2 ranks, but sees only itself")

    monkeypatch.setattr(dist, "init", alone)
    status, _, err = run_cli(capsys, "train")
    assert status == 2 and err.startswith("minidl train: init: this process") and err.count("\n") == 1


def test_training_starts_from_weights_and_leaves_the_frozen_ones(tmp_path, capsys):
    digits = ("train", "--device", "cpu", "--model", "mlp", "--epochs", "1")
    assert run_cli(capsys, *digits, "--output", str(tmp_path / "dense"))[0] == 0
    start = ("--start", str(tmp_path / "dense"), "--output", str(tmp_path / "tuned"))
    status, out, err = run_cli(capsys, *digits, *start, "--freeze", "fc1.*", "fc2.weight")
    assert status == 0 and err == "" and "--start" not in out
    old, new = (checkpoint.load(checkpoint.latest(tmp_path / name))[0] for name in ("dense", "tuned"))
    same = [name for name in old if name.startswith("model.") and (old[name] == new[name]).all()]
    assert sorted(same) == ["model.fc1.bias", "model.fc1.weight", "model.fc2.weight"]
    synthetic = ("--data", "synthetic", "--image-size", "8", "--samples", "32", "--model", "mlp", "--batch", "8")
    status, _, err = run_cli(capsys, *digits, *start, "--model", "lenet", *synthetic[:-4], "--image-size", "32")
    assert status == 2 and "weights do not fit the model" in err and "missing" in err
    status, out, _ = run_cli(capsys, *digits, *start, *synthetic)
    assert status == 0 and "mismatched: fc1.weight" in out and "begins anew" in out
    status, _, err = run_cli(capsys, *digits, *start, "--freeze", "fc7.*")
    assert status == 2 and "unknown parameter pattern 'fc7.*'" in err
