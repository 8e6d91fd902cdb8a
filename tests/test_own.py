"""Networks and data of the user's own, named on the command line as ``MODULE:FUNCTION``."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

import minidl as m
from minidl import data, models
from tests.test_train_command import run_cli

NETWORK = """
import minidl as m

NUMBER = 3


def build(num_classes=4, image_shape=(16, 16, 3), width=8):
    graph = m.Graph()
    x = m.Conv2d(image_shape[-1], width, 3, padding=1, name="conv")(graph.input(image_shape))
    x = m.ReLU(name="relu")(m.BatchNorm2d(width, name="bn")(x))
    x = m.Flatten()(m.AdaptiveAvgPool2d(1, name="pool")(x))
    return graph.output(m.Linear(width, num_classes, name="head")(x))


class Twice(m.Layer):  # without a cost
    def output_shape(self, shape):
        return shape

    def compute(self, x):
        return 2 * x

    def backward_data(self, dy, add=None):
        return 2 * dy


def with_an_own_layer(num_classes=2, image_shape=(6, 6, 3)):
    graph = m.Graph()
    x = m.Flatten()(Twice()(graph.input(image_shape)))
    return graph.output(m.Linear(x.shape[-1], num_classes, name="head")(x))


def without_defaults(num_classes, image_shape):
    return build(num_classes, image_shape)


def fixed():
    return build()


def nothing(num_classes, image_shape):
    return None


def pixels(num_classes, image_shape):
    graph = m.Graph()
    return graph.output(m.Conv2d(3, num_classes, 1, name="conv")(graph.input(image_shape)))


def without_output(num_classes, image_shape):
    graph = m.Graph()
    m.Flatten()(graph.input(image_shape))
    return graph


def broken(num_classes, image_shape):
    return build(num_classes, image_shape, width="8")


def too_large(num_classes, image_shape):
    graph = m.Graph()
    return graph.output(m.Conv2d(1, 3, 40)(graph.input(image_shape)))
"""
SAMPLES = """
import numpy as np
from minidl import data


def colours(split):
    rng = np.random.default_rng(0 if split == "train" else 1)
    labels = rng.integers(0, 3, 96 if split == "train" else 30)
    images = rng.integers(0, 60, (len(labels), 12, 12, 3), dtype=np.uint8)
    images[np.arange(len(labels)), ..., labels] += 150
    return data.ArrayDataset(images, labels, num_classes=3, mean=(0.3,) * 3, std=(0.2,) * 3)


def damaged(split):
    import own_part

    return own_part.read(split)


def untested(split):
    found = colours(split)
    return data.ArrayDataset(*found.take(np.arange(9 if split == "train" else 0)), num_classes=3)


def pairs(split):
    return [(np.zeros((4, 4, 1), np.float32), 0)]
"""
PART = """
def read(split):
    return [].index(split)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a network and data, whose modules nobody else has imported."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("own_network", NETWORK), ("own_samples", SAMPLES), ("own_part", PART)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_network", "own_samples", "own_part"):
        sys.modules.pop(name, None)


def test_an_own_network_learns_own_data(here, capsys):
    options = ("--device", "cpu", "--epochs", "6", "--batch", "12", "--model-options", "width=6", "--output", "runs")
    command = ("train", "--model", "own_network:build", "--data", "own_samples:colours", *options)
    status, out, err = run_cli(capsys, *command)
    assert status == 0 and err == "" and out.startswith("own_network:build: ")
    reached = float(out.partition("\ntest accuracy ")[2].split()[0])
    assert reached > 0.9, out
    status, out, _ = run_cli(capsys, *command, "--resume")
    assert status == 0 and "nothing left to do" in out


def test_a_network_that_labels_pixels_gets_images_with_labels_of_pixels(here, capsys):
    synthetic = ("--data", "synthetic", "--image-size", "8", "--samples", "16", "--batch", "8", "--epochs", "1")
    status, out, err = run_cli(capsys, "train", "--device", "cpu", "--model", "own_network:pixels", *synthetic)
    assert status == 0 and "test iou " in out, err


def test_an_own_network_is_measured_planned_and_fused(here, capsys):
    name = ("--model", "own_network:build")
    speed = ("--device", "cpu", "--batch", "2", "--seconds", "0.01", "--samples", "2", "--ways", "hot")
    status, out, _ = run_cli(capsys, "bench", "layers", *name, *speed, "--json", "own.json")
    assert status == 0 and "16x16x8" in out.replace("\u00d7", "x")
    content = json.loads((here / "own.json").read_text())
    assert {row["layer"] for row in content["rows"]} >= {"conv", "bn", "relu", "pool", "head"}
    assert (content["setup"]["image_size"], content["setup"]["classes"]) == (16, 4)
    status, out, _ = run_cli(capsys, "bench", "layers", "--model", "own_network:with_an_own_layer", *speed)
    assert status == 0 and "twice" in out
    for verb in (("plan", "--batch", "4", "--limit", "100%"), ("fuse", "--device", "H200")):
        status, out, err = run_cli(capsys, *verb, *name)
        assert status == 0 and "own_network:build" in out, err


@pytest.mark.parametrize("name", ["own_network:build", "resnet18", "densenet121", "mobilenet_v2", "unet"])
def test_batch_norms_of_every_network_are_synchronised_when_that_is_asked_for(name, here):
    for sync in (False, True):
        graph = models.build(name, (32, 32, 3), 4, sync_batch_norm=sync)
        norms = [layer for layer in graph.layers if isinstance(layer, m.BatchNorm2d)]
        assert norms and all(layer.sync is sync for layer in norms)


def test_sizes_are_those_asked_for_then_the_functions_then_the_usual(here):
    assert models.usual_task("own_network:build") == (16, 4)
    assert models.usual_task("own_network:build", 32, 7) == (32, 7)
    assert models.usual_task("own_network:without_defaults") == models.usual_task("resnet50") == (224, 1000)
    assert [models.usual_task(name) for name in ("lenet", "mlp", "resnet20", "unet")] == [(32, 10)] * 3 + [(256, 2)]
    assert models.build("own_network:without_defaults", (20, 12, 1), 5).output_node.shape == (5,)


ERRORS = {
    "own_network:biuld": "unknown name in own_network 'biuld'; did you mean 'build'",
    "own_network:": "model must be MODULE:NAME",
    "nowhere_at_all:build": "model nowhere_at_all:build: nowhere_at_all cannot be imported",
    "own_network.py:build": "the name of a module and not of its file, got 'own_network.py:build'; write own_network:b",
    "./nets/own.py:build": "write own:build in the folder nets",
    "own_network:fixed": "model must be a function of num_classes and image_shape",
    "own_network:NUMBER": "model must be a function of num_classes and image_shape",
    "own_network:nothing": "own_network:nothing: result must be a Graph that knows its output, got NoneType",
    "own_network:without_output": "result must be a Graph that knows its output, got Graph .*; return graph.output",
    "own_network:broken": r"got '8' \(own_network.py, line \d+: x = m.Conv2d\(image_shape\[-1\], width, 3",
    "own_network:too_large": r"the padding \(own_network.py, line \d+: return graph.output\(m.Conv2d\(1, 3, 40\)",
    "own_network": "mynet:build names the function build of your mynet.py",
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_network_that_is_none_is_one_clear_line(name, here, capsys):
    status, _, err = run_cli(capsys, "train", "--device", "cpu", "--model", name, "--output", "runs")
    assert status == 2 and err.count("\n") == 1 and re.search(ERRORS[name], err), err


def test_data_that_is_none_is_one_clear_line(here, capsys):
    for name, words in {
        "own_samples:pairs": "own_samples:pairs: result must be a data set with num_classes, got list",
        "own_samples:untested": "result for split='test' must be a data set with images, got 'none'",
        "own_samples:colors": "unknown name in own_samples 'colors'; did you mean 'colours'?",
        "own_samples:damaged": "(own_part.py, line 3: return [].index(split))",
        "own_samples": "mydata:cells names the function cells of your mydata.py",
    }.items():
        status, _, err = run_cli(capsys, "train", "--device", "cpu", "--data", name, "--output", "runs")
        assert status == 2 and err.count("\n") == 1 and words in err
    with pytest.raises(ValueError, match="unknown split 'val'"):
        data.dataset("own_samples:colours", split="val")
    assert np.shape(data.dataset("own_samples:colours", split="test")[0][0]) == (12, 12, 3)
