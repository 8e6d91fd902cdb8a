"""A measured fusion plan: kept, found again, refused elsewhere; the command that makes one, and what runs without."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest

import minidl as m
from minidl import cli, data, fusion, models, training
from minidl.fusion import cost, kept
from minidl.fusion.apply import machine_of
from minidl.fusion.groups import groups
from minidl.fusion.piece import Piece, cut
from minidl.fusion.plans import fingerprint
from minidl.train import Trainer
from tests.test_fusion import residual, stack
from tests.test_fusion_tune import FP32, H200, Fake

# -- the plan that is kept ------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_measured_plan_is_kept_and_found_again(cache):
    clock = Fake(1)
    plan = fusion.fuse(m.Model(residual()), "adaptive", batch=8, clock=clock)
    assert clock.asked and plan.setting["batch"] == 8 and plan.setting["precision"] == "fp32"
    (file,) = cache.glob("fusion/*.json")
    again = fusion.fuse(m.Model(residual()), "adaptive", batch=8)
    assert again == plan and again.evidence == fusion.Plan.load(file).evidence
    file.write_text("{")
    model = m.Model(residual())
    assert fusion.fuse(model, "adaptive", batch=8, clock=Fake(1)).sites == plan.sites == model.fusion.sites
    assert fusion.Plan.load(file) == plan


def test_plans_of_another_device_batch_or_precision_are_refused_by_name(cache, tmp_path):
    plan = fusion.fuse(m.Model(residual()), "adaptive", batch=8, clock=Fake())
    path = tmp_path / "plan.json"
    for key, value in (("device", "another GPU"), ("batch", 9), ("precision", "bf16")):
        dataclasses.replace(plan, setting=plan.setting | {key: value}).save(path)
        with pytest.raises(ValueError, match=f"measured for {key} {value!r}, this is"):
            fusion.fuse(m.Model(residual()), path, batch=8)
    dataclasses.replace(plan, setting=None).save(path)  # freed of what it holds for, it is like one written by hand
    assert fusion.fuse(m.Model(residual()), path, batch=9).sites == plan.sites
    with pytest.raises(ValueError, match="another network"):
        fusion.fuse(m.Model(stack()), plan, batch=8)
    with pytest.raises(ValueError, match="batch must be the samples of a step"):
        fusion.fuse(m.Model(residual()), "adaptive")


@pytest.mark.parametrize("way", [None, 3, ["elementwise"]])
def test_a_file_with_ways_that_are_no_words_is_refused(tmp_path, way):
    model, path = m.Model(residual()), tmp_path / "plan.json"
    record = fusion.fuse(model, "none").record()
    path.write_text(json.dumps(record | {"sites": record["sites"] | {"stem.bn": way}}))
    with pytest.raises(ValueError, match="plan.json: not a fusion plan .*the way of stem.bn must be a string"):
        fusion.fuse(model, path)


@pytest.mark.parametrize("how", [None, 3, {"bn": "none"}])
def test_what_is_no_plan_is_refused(how):
    with pytest.raises(TypeError, match="fuse: how must be the name of a plan, a Plan or its file, got"):
        fusion.fuse(m.Model(residual()), how)


class Second:
    """Rank 1 of two, whose rank 0 shares what it was given."""

    name, rank, size, local_rank, local_size = "test", 1, 2, 1, 2

    def __init__(self, value):
        self.value = value

    def share(self, value, name=""):
        return [self.value, value]


def test_all_ranks_follow_rank_0(monkeypatch):
    model = m.Model(residual())
    sites = fusion.find_sites(model.graph)
    plan = fusion.Plan(dict.fromkeys((s.name for s in sites), "elementwise"), fingerprint(sites))
    model.comm = Second((plan, None))
    assert fusion.fuse(model, "adaptive", batch=4, clock=None) == plan
    assert model.graph["stem.bn"].layer.deferred
    model.comm = Second((None, (OSError, "no such plan")))
    with pytest.raises(OSError, match="no such plan"):
        fusion.fuse(model, "adaptive", batch=4)


def test_a_setting_names_the_device(ops):
    found = kept.setting(ops, FP32, 4)
    assert found["device"] and found["precision"] == "fp32" and found["batch"] == 4


# -- the command ----------------------------------------------------------------------------------------------------


SMALL = ["fuse", "--model", "resnet20", "--image-size", "8", "--classes", "10", "--batch", "2", "--precision", "fp32"]


def test_tuning_keeps_a_plan_that_training_takes(cache, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert cli.main([*SMALL, "--device", "cpu", "--tune", "--explain", "--json", str(path)]) == 0
    text = capsys.readouterr()
    assert "regret: the choices are 0.000 ms behind" in text.out and "chosen" in text.out
    assert text.err.startswith("1 of 19: bn1\n")
    plan = fusion.Plan.load(path)
    assert plan.setting["batch"] == 2 and fusion.Plan.load(next(cache.glob("fusion/*.json"))) == plan
    options = ["train", "--model", "resnet20", "--data", "synthetic", "--image-size", "8", "--samples", "20"]
    options += ["--epochs", "1", "--device", "cpu", "--output", str(tmp_path / "run"), "--fusion", str(path)]
    training.train(cli.parser().parse_args([*options, "--batch", "2"]))
    with pytest.raises(ValueError, match="measured for batch 2, this is 4; measure anew"):
        training.train(cli.parser().parse_args([*options, "--batch", "4"]))


@pytest.mark.parametrize("plan", [*fusion.PLANS, "auto"])
def test_explaining_needs_no_gpu(capsys, plan):
    assert cli.main(["fuse", "--explain", "--device", "H200", "--batch", "256", "--plan", plan]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("layer1.0.bn1 ")]
    assert "256x56x56x64" in line and "none" in line
    assert "elementwise+statistics+gradients" in text and "measured" in text and "chosen" in text
    with pytest.raises(SystemExit):
        cli.main(["fuse", "--tune", "--device", "H200"])
    assert "there is no GPU to measure on" in capsys.readouterr().err


def test_memory_that_ways_free_is_what_layers_no_longer_keep(cpu_ops):
    """Of each piece, and together of the network, where every ReLU is read by one convolution."""
    graph = m.Graph()
    x = graph.input((8, 8, 8))
    for i in range(3):
        x = m.Conv2d(8, 8, 3, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(8, name=f"bn{i}")(x))
    graph.output(m.Conv2d(8, 8, 1, name="last")(x))
    found = groups(graph, 4, FP32, H200, everything=True)
    pieces = [Piece(cut(graph, group.sites, 4), cpu_ops, FP32, 0) for group in found]
    for how in fusion.PLANS:
        freed = 0
        for group, piece in zip(found, pieces, strict=True):
            ways = tuple(fusion.choose(group.sites, how).sites.values())
            freed += piece.saved_bytes(frozenset()) - piece.saved_bytes(group.on(ways, "forward"))
        kept = {}
        for one in ("none", how):
            model = m.Model(graph_like(graph))
            fusion.fuse(model, one)
            model.forward(np.zeros((4, 8, 8, 8), np.float32))
            kept[one] = model.store.saved_bytes
        assert kept["none"] - kept[how] == freed
    assert freed == 3 * 4 * 8 * 8 * 8 * 4


def graph_like(graph):
    return copy.deepcopy(graph)


# -- what runs where nobody chose ---------------------------------------------------------------------------------


def test_a_gpu_runs_by_the_model_of_bytes_unless_told_otherwise(ops):
    model = m.Model(residual(), device=ops.name)
    fusion.fuse_by_default(model)
    if ops.name == "cpu":
        assert model.fusion is None
        return
    assert model.fusion == cost.heuristic(model.graph, fusion.find_sites(model.graph), FP32, machine_of(ops))
    fusion.fuse(model, "none")
    fusion.fuse_by_default(model)
    assert set(model.fusion.sites.values()) == {"none"}


def test_the_trainer_fuses_for_the_batch_of_its_loader(cache):
    def trainer(batch, **options):
        model = m.Model(models.build("resnet20", (8, 8, 3), 10))
        loader = data.Loader(data.dataset("synthetic", None, "train", shape=(8, 8, 3), num_classes=10, n=12), batch)
        parts = model, m.SGD(model, 0.1), m.SoftmaxCrossEntropy(), loader
        return Trainer(*parts, schedule=lambda step: 0.1, epochs=1, **options)

    assert trainer(4).model.fusion is None
    assert trainer(4, fusion="elementwise").model.graph["bn1"].layer.deferred
    plan = fusion.fuse(m.Model(models.build("resnet20", (8, 8, 3), 10)), "adaptive", batch=2, clock=Fake())
    assert trainer(4, fusion=plan, accumulate=2).model.fusion == plan
    with pytest.raises(ValueError, match="measured for batch 2, this is 4"):
        trainer(4, fusion=plan)
