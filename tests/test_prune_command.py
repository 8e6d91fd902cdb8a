"""``minidl prune``: starts from a trained network, resumes, and leaves what it says; the recipe runs."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, cli, models
from minidl.sparse import load_compressed, resized
from tests.dist import job
from tests.tolerance import assert_same_arrays

ROOT = Path(__file__).parents[1]
SMALL = [
    "--data",
    "synthetic",
    "--image-size",
    "8",
    "--classes",
    "4",
    "--samples",
    "48",
    "--batch",
    "16",
    "--device",
    "cpu",
]
needs_libraries = pytest.mark.skipif(
    find_spec("scipy") is None or find_spec("bitarray") is None, reason="needs minidl[compress]"
)


def prune(folder, *options, epochs=4):
    assert (
        cli.main(["prune", *SMALL, "--epochs", str(epochs), "--prune-every", "2", "--output", str(folder), *options])
        == 0
    )


def tensors(folder):
    return checkpoint.load(checkpoint.latest(folder))[0]


@needs_libraries
def test_it_goes_on_from_a_trained_network_and_writes_a_small_file(tmp_path, capsys):
    assert cli.main(["train", *SMALL, "--epochs", "1", "--output", str(tmp_path / "dense")]) == 0
    prune(tmp_path / "pruned", "--start", str(tmp_path / "dense"), "--compress", "--lr", "1e-9", "--exclude", "fc.*")
    told = capsys.readouterr().out
    dense, found = tensors(tmp_path / "dense"), tensors(tmp_path / "pruned")
    masks = {k.removeprefix("optimizer.mask."): v for k, v in found.items() if k.startswith("optimizer.mask.")}
    assert "conv1.weight" not in masks and "fc.weight" not in masks and len(masks) == 20
    for name, mask in masks.items():
        assert abs(mask.mean() - 0.1) <= 0.5 / mask.size + 1e-9
        np.testing.assert_allclose(found[f"model.{name}"], mask * dense[f"model.{name}"], atol=1e-6)
    assert "90.0% dropped" in told and "layer3.0.downsample.0" in told.split("as Compressed Sparse Blocks: ")[1]
    path = tmp_path / "pruned" / "model.mdz"
    assert f"wrote {path}" in told and "times smaller" in told
    state = load_compressed(path)
    for name, mask in masks.items():
        assert not state[name][~mask].any() and np.unique(state[name]).size <= 33
    assert path.stat().st_size < sum(v.nbytes for v in state.values()) / 10
    m.Model(models.resnet20(4, (8, 8, 3))).load_state_dict(state)


def test_the_command_that_the_last_line_names_trains_on(tmp_path, capsys):
    """More epochs alone would move the default end of pruning, and a resumed run keeps its schedule."""
    prune(tmp_path, epochs=2)
    options = re.search(r"next: the same with (.*) trains on;", capsys.readouterr().out)[1].split()
    assert cli.main(["prune", *SMALL, "--prune-every", "2", "--output", str(tmp_path), *options]) == 0
    assert "epoch 4/4" in capsys.readouterr().out
    prune(tmp_path, "--prune-end", "1", "--resume", epochs=4)
    assert capsys.readouterr().out.splitlines()[1].endswith("is at epoch 4; raise --epochs to go on")
    with pytest.raises(SystemExit):  # the masks would be lost
        cli.main(["train", *SMALL, "--lr", "0.05", "--output", str(tmp_path), "--epochs", "5", "--resume"])
    assert re.search(r"of another run: pruning: \WPruning.* there, None here\n$", capsys.readouterr().err)


@pytest.mark.parametrize("granularity", ["weight", "filter"])
def test_a_resumed_run_prunes_as_one_that_was_not_stopped(tmp_path, granularity):
    options = ["--granularity", granularity, "--sparsity", "0.5", "--prune-end", "3", "--schedule", "constant"]
    prune(tmp_path / "whole", *options)
    prune(tmp_path / "parts", *options, "--epochs", "3")
    prune(tmp_path / "parts", *options, "--resume")
    assert_same_arrays(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))
    with pytest.raises(SystemExit):
        prune(tmp_path / "parts", *options, "--sparsity", "0.6", "--resume")


@pytest.mark.parametrize("granularity", ["filter", "layer"])
def test_filters_and_layers_leave_a_smaller_network(tmp_path, capsys, granularity):
    prune(tmp_path, "--granularity", granularity, "--sparsity", "0.5")
    told = capsys.readouterr().out
    state, facts = checkpoint.load(tmp_path / "shrunk.safetensors")
    graph = resized(models.resnet20(4, (8, 8, 3)), state)
    model = m.Model(graph)
    model.load_state_dict(state)
    assert model.num_parameters < 0.6 * m.Model(models.resnet20(4, (8, 8, 3))).num_parameters
    assert f"shrunk: {model.num_parameters:,} of" in told
    assert f"test accuracy {facts['test_accuracy']:.4f}; wrote" in told.split("shrunk:")[1]
    *_, last = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert float(last["test_accuracy"]) == pytest.approx(facts["test_accuracy"])


def test_a_network_of_other_widths_is_shrunk_as_it_was_trained(tmp_path):
    options = ["--granularity", "filter", "--sparsity", "0.5", "--model", "unet", "--model-options", "width=8 depth=2"]
    assert cli.main(["prune", *SMALL, *options, "--sync-batch-norm", "--epochs", "1", "--output", str(tmp_path)]) == 0
    state, _ = checkpoint.load(tmp_path / "shrunk.safetensors")
    whole, small = (models.unet(4, (8, 8, 3), width=8, depth=2) for _ in range(2))
    assert m.Model(resized(small, state)).num_parameters < 0.6 * m.Model(whole).num_parameters


@pytest.mark.parametrize(
    "granularity,columns,rows", [("kernel", 5, 20), ("filter", 5, 11), ("layer", 1, 9), ("2:4", 1, 20)]
)
def test_a_scan_trains_nothing(tmp_path, capsys, granularity, columns, rows):
    assert cli.main(["train", *SMALL, "--epochs", "1", "--output", str(tmp_path / "dense")]) == 0
    before = capsys.readouterr().out.split("test accuracy ")[-1].split()[0]
    sparsity = "0.5" if granularity == "2:4" else "0.9"
    prune(tmp_path / "none", "--scan", "--start", str(tmp_path / "dense"), "--granularity", granularity, "--exclude",
          "fc.*", "--sparsity", sparsity)  # fmt: skip
    told = capsys.readouterr().out
    assert f"with none {before}" in told and not (tmp_path / "none").exists()
    table = [line.split() for line in told.splitlines() if line.startswith("layer")]
    assert len(table) == rows and {len(line) for line in table} == {1 + columns}


@pytest.mark.parametrize(("options", "words"), [
    (["--sparsity", "90"], r"--sparsity must be a number in \[0, 1\), such as 0.9 for 90 %, got 90.0"),
    (["--granularity", "filtre"], "unknown granularity 'filtre'; did you mean 'filter'"),
    (["--granularity", "2:4"], "schedule must be one that ends at 0.5"),
    (["--prune-end", "9"], r"--prune-end must be from --prune-begin \(0\) to --epochs \(4\), got 9.0"),
    (["--include", "fcc.*"], "unknown parameter pattern"),
    (["--shard-momentum"], "--shard-momentum is for minidl train"),
    (["--compress", "--clusters", "256"], "clusters must be at most 255"),
    (["--clusters", "8"], "--clusters must be left out without --compress, got 8"),
    (["--share-epochs", "0"], "--share-epochs must be left out without --compress, got 0"),
    (["--scan", "--compress"], "--compress must be left out with --scan, which trains nothing"),
    (["--scan"], "--scan needs --start, the network to look at"),
    (["--batch", "0"], "--batch must be an integer of at least 1, got 0"),
    (["--start", "nowhere"], "there is no file nowhere"),
])  # fmt: skip
def test_what_cannot_be_pruned_is_one_line(tmp_path, capsys, options, words):
    with pytest.raises(SystemExit) as ended:
        prune(tmp_path, *options)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error), error


def test_two_ranks_prune_as_one(tmp_path):
    options = ["prune", *SMALL, "--epochs", "2", "--prune-every", "2", "--granularity", "filter", "--sparsity", "0.5"]
    program = ["-m", "minidl", *options, "--sync-batch-norm"]
    done = job.run_program([*program, "--output", str(tmp_path / "two")], 2, tmp_path)
    assert done.status == 0, done.output
    assert done.output.count("shrunk: ") == 1
    cli.main([*options, "--sync-batch-norm", "--output", str(tmp_path / "one")])
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        if ".mask." in name:
            np.testing.assert_array_equal(value, two[name], err_msg=name)


def test_the_benchmark_of_small_networks_runs(tmp_path):
    path = tmp_path / "rows.json"
    options = "--model resnet20 --image-size 8 --batch 4 --rounds 2 --steps 1 --sparsity 0.5 --device cpu".split()
    program = [sys.executable, str(ROOT / "benchmarks" / "bench_shrink.py"), *options, "--json", str(path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dense, *small = json.loads(path.read_text())["rows"]
    assert dense["flop_ratio"] == dense["bytes_ratio"] == 1 and [r["arm"] for r in small] == [
        "filter 50%",
        "filter:8 50%",
    ]
    for row in small:
        assert row["flop_ratio"] < 0.4 and row["bytes_ratio"] < 0.75 and row["ms"] > 0
        assert row["peers"].keys() == {"dense", "masked"}


@needs_libraries
@pytest.mark.slow
def test_the_recipe_runs(tmp_path):
    path = tmp_path / "rows.json"
    program = [sys.executable, str(ROOT / "scripts" / "prune_resnet20.py"), "--data", "synthetic", "--samples", "16",
               "--batch", "8", "--epochs", "1", "--prune-epochs", "1", "--share-epochs", "1", "--rounds", "2",
               "--device", "cpu", "--only", "weight", "filter", "--json", str(path)]  # fmt: skip
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    arms = {row["arm"]: row for row in rows if row["pass"] == "step"}
    assert list(arms) == ["dense", "weight 90%", "weight 90% global", "filter 30%", "filter:8 30%", "filter:8 50%"]
    assert arms["filter:8 50%"]["flop_ratio"] < 0.4 < arms["filter 30%"]["flop_ratio"] < 0.7
    assert all(row["ms"] > 0 and row["peers"]["dense"] > 0 for row in arms.values())
    (file,) = [row for row in rows if row["pass"] == "file"]
    assert file["ratio"] > 10 and "times smaller" in done.stdout
