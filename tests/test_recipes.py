"""The recipes in scripts/ run as they are, on a few generated images; the job goes on where its time ran out."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from minidl import checkpoint, cli
from minidl.data import cifar10
from tests.commands import MINIDL, with_commands

ROOT = Path(__file__).parents[1]
RECIPES = {path.stem: path for path in (ROOT / "scripts").glob("*.toml")}


def rows(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def photographs(folder, count, side=40):
    """``count`` training and two test images in each of two classes that differ in colour."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    rng = np.random.default_rng(3)
    for split, number in (("train", count), ("val", 2)):
        for label in (0, 1):
            (folder / split / f"class{label}").mkdir(parents=True)
            for i in range(number):
                pixels = rng.integers(0, 128, (side, side, 3)) + np.array([100 * label, 0, 100 - 100 * label])
                image.fromarray(pixels.astype(np.uint8)).save(folder / split / f"class{label}" / f"{i}.jpg")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50_imagenet", "resnet50_imagenet_lars"])
def test_imagenet_recipes_run_on_a_folder(name, tmp_path):
    data = photographs(tmp_path / "photographs", 8)
    output = tmp_path / "run"
    small = ["--image-size", "32", "--batch", "8", "--epochs", "2", "--warmup", "1", "--workers", "1"]
    command = ["train", "--config", str(RECIPES[name]), "--data-path", str(data), "--output", str(output), *small]
    assert cli.main(command) == 0
    assert len(rows(output)) == 2 and (output / "best.safetensors").exists()
    settings = checkpoint.load(checkpoint.latest(output))[1]["settings"]
    assert settings["model"] == "resnet50" and settings["precision"] == "bf16"


def test_the_cifar_recipe_runs_on_images_like_those(tmp_path):
    command = ["train", "--config", str(RECIPES["resnet20_cifar10"]), "--output", str(tmp_path)]
    assert cli.main([*command, "--data", "synthetic", "--samples", "256", "--epochs", "1"]) == 0
    assert len(rows(tmp_path)) == 1 and (tmp_path / "best.safetensors").exists()


@pytest.fixture
def patches(tmp_path, monkeypatch):
    """Patches of photographs, in files of CIFAR-10's format that are a twentieth as long."""
    pytest.importorskip("skimage", reason="needs scikit-image")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("photograph_patches")
    for module, name in ((script, "RECORDS"), (importlib.import_module("minidl.data.cifar10"), "_RECORDS")):
        monkeypatch.setattr(sys.modules[module.__name__], name, 500)
    script.main([str(tmp_path / "patches")])
    return tmp_path / "patches"


def test_patches_of_photographs_are_read_as_cifar10(patches):
    for split, each in (("train", 250), ("test", 50)):
        images = cifar10(patches, split)
        assert images.images.shape == (10 * each, 32, 32, 3)
        np.testing.assert_array_equal(np.bincount(images.labels), np.full(10, each))
    grey = np.isin(images.labels, [1, 4, 5])  # the brick, the grass, the gravel
    planes = images.images.reshape(len(images.images), -1, 3)
    colourless = (planes == planes[..., :1]).all((1, 2))
    assert colourless[grey].all() and colourless[~grey].mean() < 0.1  # the retina has a black border


@pytest.mark.slow
def test_the_cifar_recipe_learns_from_such_files(patches, tmp_path):
    command = ["train", "--config", str(RECIPES["resnet20_cifar10"]), "--data-path", str(patches), "--model", "lenet"]
    small = [
        "--batch",
        "50",
        "--lr",
        "0.02",
        "--schedule",
        "cosine",
        "--epochs",
        "6",
        "--output",
        str(tmp_path / "run"),
    ]
    assert cli.main([*command, *small]) == 0
    assert float(rows(tmp_path / "run")[-1]["test_accuracy"]) > 0.5


@pytest.mark.slow
def test_the_segmentation_recipe_finds_the_coins(tmp_path, capsys):
    pytest.importorskip("skimage", reason="needs scikit-image")
    assert cli.main(["train", "--config", str(RECIPES["unet_coins"]), "--output", str(tmp_path)]) == 0
    assert float(rows(tmp_path)[-1]["test_iou"]) > 0.95
    assert "test iou 0.9" in capsys.readouterr().out


def test_every_recipe_is_run_and_says_how():
    assert set(RECIPES) == {"resnet50_imagenet", "resnet50_imagenet_lars", "resnet20_cifar10", "unet_coins"}
    for path in RECIPES.values():
        assert f"minidl train --config scripts/{path.name}" in path.read_text()
        assert tomllib.loads(path.read_text())["output"].startswith("runs/")


# Runs what the job step would, but the first time sends the signal of a time that is nearly up, after the first report.
SRUN = """#!/bin/bash
shift
"$@" & child=$!
if [ ! -e {folder}/interrupted ]; then
    until [ -s {folder}/run/metrics.jsonl ] || ! kill -0 $child 2>/dev/null; do sleep 0.1; done
    touch {folder}/interrupted
    kill -USR1 $child
fi
wait $child
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a bash script")
def test_the_slurm_job_puts_itself_back_and_goes_on(tmp_path):
    data = photographs(tmp_path / "photographs", 100, side=24)
    # Long enough that the signal comes before the end on a busy machine, too: 250 steps.
    small = "--model resnet20 --image-size 16 --epochs 10 --workers 1 --precision fp32 --warmup 0 --batch 8 --lr 0.02"
    scripts = {
        "srun": SRUN.format(folder=tmp_path),
        "scontrol": f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n',
        "minidl": MINIDL.replace('"$@"', f'"$@" {small}'),
    }
    environment = with_commands(tmp_path / "commands", scripts)
    environment |= {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "42"}
    job = ["bash", str(ROOT / "scripts" / "slurm.sbatch"), str(data), str(tmp_path / "run")]

    def submit():
        return subprocess.run(job, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    first = submit()
    assert first.returncode == 138, first.stdout + first.stderr
    assert (tmp_path / "requeued").read_text() == "requeue 42\n" and "--resume" in first.stdout
    stopped = checkpoint.load(checkpoint.latest(tmp_path / "run"))[1]["step"]
    assert 0 < stopped < 250
    second = submit()
    assert second.returncode == 0, second.stdout + second.stderr
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"
    assert [int(row["epoch"]) for row in rows(tmp_path / "run")][-1] == 9 and rows(tmp_path / "run")[-1][
        "step"
    ] == "250"
