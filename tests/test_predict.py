"""``minidl predict`` and `Predictor`: a checkpoint alone tells the classes of images, as the run's evaluation did."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import minidl
from minidl import checkpoint, cli, data, models, schedule
from minidl.average import WeightAverage
from minidl.data import ImageFiles, ImageFolder, Loader
from minidl.dist import mpiexec
from minidl.predict import Predictor
from minidl.train import Trainer
from tests.commands import ROOT
from tests.conftest import CUDA
from tests.tolerance import assert_close

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

COLOURS = {"cat": (200, 60, 60), "dog": (60, 200, 60), "owl": (60, 60, 200)}


def run_cli(capsys, *arguments):
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A folder of photographs in three colours, and a run that was trained on it, with averaged weights."""
    root, rng = tmp_path_factory.mktemp("pets"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for name, colour in COLOURS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = np.clip(rng.normal(colour, 40, (40 + 5 * i, 50, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    common = ["train", "--device", "cpu", "--model", "lenet", "--data", "folder", "--data-path", str(root)]
    common += ["--image-size", "16", "--batch", "6", "--lr", "0.02", "--average", "0.5", "--output", str(root / "run")]
    assert cli.main([*common, "--epochs", "2", "--keep-best"]) == 0
    return root


def accuracy_of(run, best=False):
    """Of its last epoch, or of its best one."""
    found = [float(row["test_accuracy"]) for row in csv.DictReader((run / "metrics.csv").read_text().splitlines())]
    return f"accuracy {max(found) if best else found[-1]:.4f}"


def test_files_and_folders_are_classified(pets, tmp_path, capsys):
    shutil.copy(pets / "val" / "cat" / "0.png", tmp_path / "mine.png")
    paths = (tmp_path / "mine.png", pets / "val" / "dog")
    status, out, err = run_cli(capsys, "predict", pets / "run", *paths, "--top", 2)
    *lines, last = out.splitlines()
    assert status == 0 and err == "" and len(lines) == 4 and lines[0].startswith(str(tmp_path / "mine.png") + "  ")
    for line in lines:
        _, *guesses = line.split("  ")
        (first, p), (second, q) = (guess.split(" ") for guess in guesses)
        assert first != second and {first, second} <= set(COLOURS) and 1 >= float(p) >= float(q)
    assert last.startswith("4 images by ") and "of 3 whose class is known" in last, "its folder names the dogs"


@pytest.mark.parametrize("way", ["folder", "files", "data", "best"])
def test_the_accuracy_is_that_of_the_evaluation(pets, capsys, way):
    images = {
        "folder": [pets / "val"],
        "files": sorted((pets / "val").glob("*/*.png")),
        "data": ["--data-path", pets],
        "best": [pets / "val"],
    }[way]
    where = pets / "run" / "best.safetensors" if way == "best" else pets / "run"
    status, out, _ = run_cli(capsys, "predict", where, *images, "--batch", 4)
    assert status == 0 and accuracy_of(pets / "run", best=way == "best") in out


def test_tables_hold_what_is_printed(pets, tmp_path, capsys):
    files = (tmp_path / "out.csv", tmp_path / "out.json")
    status, out, _ = run_cli(
        capsys, "predict", pets / "run", pets / "val", "--top", 9, "--csv", files[0], "--json", files[1]
    )
    rows, content = list(csv.DictReader(files[0].read_text().splitlines())), json.loads(files[1].read_text())
    assert status == 0 and f"wrote {files[0]}" in out and content["classes"] == list(COLOURS)
    assert len(rows) == len(content["images"]) == 9
    for row, image in zip(rows, content["images"], strict=True):
        assert (row["file"], row["label"], row["class"]) == (image["file"], image["label"], image["top"][0]["class"])
        assert float(row["probability"]) == image["top"][0]["probability"]
        assert row["class_3"] == image["top"][2]["class"], "as many as there are, when more are asked for"
        assert sum(guess["probability"] for guess in image["top"]) == pytest.approx(1, abs=1e-5)


def test_names_of_files_that_are_no_text_are_printed_and_written_as_they_are(pets, tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9.png"
    shutil.copy(pets / "val" / "cat" / "0.png", os.fsdecode(name))
    command = [sys.executable, "-m", "minidl", "predict", str(pets / "run"), name]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    for more in ((), ("--csv", str(tmp_path / "out.csv"))):
        done = subprocess.run([*command, *more], env=environment, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert name in ((tmp_path / "out.csv").read_bytes() if more else done.stdout)


def test_one_damaged_file_costs_no_other_its_prediction(pets, tmp_path, capsys):
    shutil.copytree(pets / "val", tmp_path / "new")
    (tmp_path / "new" / "dog" / "1.png").write_text("no image")
    table = tmp_path / "out.csv"
    status, out, err = run_cli(capsys, "predict", pets / "run", tmp_path / "new", "--csv", table)
    rows = {row["file"]: row["class"] for row in csv.DictReader(table.read_text().splitlines())}
    assert status == 1 and "8 images" in out and "1 damaged" in out and "dog/1.png cannot be decoded" in err
    assert [file for file, name in rows.items() if not name] == [str(tmp_path / "new" / "dog" / "1.png")]
    with pytest.raises(ValueError, match=r"dog/1\.png cannot be decoded"):
        Predictor(pets / "run").predict([tmp_path / "new"])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_probabilities_are_the_softmax_of_the_evaluated_network(pets, device):
    """Averaged, scaled and cut as in the run: by another road, from the parts."""
    predictor = Predictor(pets / "run", device=device)
    found = predictor.predict(sorted((pets / "val").glob("*/*.png")), batch=9)
    folder = ImageFolder(pets / "val", 16)
    np.testing.assert_array_equal(found, predictor.predict(folder, batch=9))
    model = minidl.Model(models.lenet(3, (16, 16, 3)), device=device).eval()
    tensors, _ = checkpoint.load(checkpoint.latest(pets / "run"))
    state = {
        name.partition(".")[2]: v
        for part in ("model.", "average.")
        for name, v in tensors.items()
        if name.startswith(part)
    }
    model.load_state_dict(state)
    [batch] = Loader(folder, 9, shuffle=False)
    logits = model.ops.to_host(model.forward(model.ops.from_host(batch.images), grad=False))
    powers = np.exp(np.float64(logits))
    assert_close(found, powers / powers.sum(1, keepdims=True), np.float32, terms=16)
    assert predictor.classes == list(COLOURS) and predictor.model.training is False


def test_one_path_is_no_list_of_paths(pets):
    """The letters of a name are paths, too, and "/" is a folder with everything in it."""
    predictor, path = Predictor(pets / "run"), pets / "val" / "dog" / "1.png"
    for one in (path, str(path)):
        for call in (predictor.predict, predictor.files):
            with pytest.raises(TypeError, match=r"paths must be a list of paths, got '/.*1\.png'; pass \[path\]"):
                call(one)
    with pytest.raises(TypeError, match="images must be a list of paths or a data set, got NoneType None"):
        predictor.predict(None)
    assert predictor.predict([path]).shape == (1, 3)


def test_without_images_it_is_the_run_s_own_test_set(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    common = ("train", "--device", "cpu", "--model", "mlp", "--output", tmp_path, "--epochs", 1)
    assert run_cli(capsys, *common)[0] == 0
    status, out, _ = run_cli(capsys, "predict", tmp_path)
    assert status == 0 and out.startswith("359 images by ") and accuracy_of(tmp_path) in out
    Image.fromarray(np.zeros((30, 20, 3), np.uint8)).save(tmp_path / "colour.png")
    status, out, _ = run_cli(capsys, "predict", tmp_path, tmp_path / "colour.png")
    assert status == 0 and out.splitlines()[0].split("  ")[1][0].isdigit(), "grey values of a coloured file"


@pytest.mark.mpi
def test_ranks_share_the_work_and_agree_with_one(pets, tmp_path, capsys):
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    table = tmp_path / "two.csv"
    program = [sys.executable, "-m", "minidl", "predict", str(pets / "run"), str(pets / "val"), "--device", "cpu"]
    command = mpiexec.find().command(2, [*program, "--batch", "5", "--csv", str(table)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("9 images by") == 1, done.stderr
    run_cli(capsys, "predict", pets / "run", pets / "val", "--device", "cpu", "--csv", tmp_path / "one.csv")
    one, two = (list(csv.DictReader(path.read_text().splitlines())) for path in (tmp_path / "one.csv", table))
    assert [(row["file"], row["class"]) for row in one] == [(row["file"], row["class"]) for row in two]
    for row, other in zip(one, two, strict=True):
        assert float(row["probability"]) == pytest.approx(float(other["probability"]), rel=1e-4)


def trained(path, **options):
    """A checkpoint of a `Trainer` that is used from Python."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8, 6, 5, 3), dtype=np.float32)
    dataset = data.ArrayDataset(images, np.arange(8) % 2, 2, mean=(0.1,) * 3, classes=["no", "yes"])
    model = minidl.Model(models.mlp(2, (6, 5, 3)))
    parts = (minidl.SGD(model, lr=0.1), minidl.SoftmaxCrossEntropy(), Loader(dataset, 4))
    Trainer(model, *parts, schedule=schedule.Constant(0.1), epochs=1, output=path, **options).fit()
    return model.eval(), dataset


def test_a_checkpoint_of_python_has_to_name_its_network(tmp_path):
    model, dataset = trained(tmp_path)
    with pytest.raises(ValueError, match=r"does not name its network; pass network= \(--model\), or settings="):
        Predictor(tmp_path)
    for network in ("mlp", models.mlp):
        predictor = Predictor(tmp_path, network=network)
        assert predictor.classes == ["no", "yes"] and predictor.shape == (6, 5, 3)
        logits = model.forward(dataset.images - np.float32(0.1), grad=False)
        np.testing.assert_array_equal(predictor.predict(dataset, 8).argmax(1), logits.argmax(1))
    for network, words in (
        (lambda: models.mlp(2, (6, 5, 3)), "got '<function .*>'$"),
        (models.mlp(2, (6, 5, 3)), "got '<.*Graph object>'; pass the function, not its result"),
    ):
        told = f"network must be a function of num_classes and image_shape, as models.resnet20, {words}"
        with pytest.raises(ValueError, match=told):
            Predictor(tmp_path, network=network)
    with pytest.raises(TypeError, match="result must be a Graph that knows its output, got NoneType"):
        Predictor(tmp_path, network=lambda num_classes, image_shape: None)
    with pytest.raises(ValueError, match=r"does not fit: .*--model names the network"):
        Predictor(tmp_path, network="resnet20")
    with pytest.raises(ValueError, match=r"images must have shape \(6, 5, 3\), as in training, got \(2, 2, 3\)"):
        predictor.predict(data.ArrayDataset(np.zeros((1, 2, 2, 3), np.float32), np.zeros(1, int), 2))
    with pytest.raises(ValueError, match=r"images must have shape \(6, 5, 3\), as in training, got \(6, 5, 1\)"):
        predictor.predict(data.ArrayDataset(np.zeros((1, 6, 5, 1), np.float32), np.zeros(1, int), 2))
    trained(tmp_path / "named", settings={"model": "mlp"})
    assert len(Predictor(tmp_path / "named").predict(dataset)) == 8
    checkpoint.save(tmp_path / "other.safetensors", {}, {})
    with pytest.raises(ValueError, match=r"has weights only .* minidl\.sparse\.resized .* load_compressed a \.mdz"):
        Predictor(tmp_path / "other.safetensors")


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_the_precision_is_that_of_the_training(tmp_path, capsys, mode):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    common = ("train", "--device", "cpu", "--model", "mlp", "--epochs", 1, "--precision", mode, "--output", tmp_path)
    assert run_cli(capsys, *common)[0] == 0
    assert Predictor(tmp_path).model.precision.name == mode
    assert accuracy_of(tmp_path) in run_cli(capsys, "predict", tmp_path, "--device", "cpu")[1]
    assert Predictor(tmp_path, precision="fp32").model.precision.name == "fp32"
    path = checkpoint.latest(tmp_path)
    tensors, state = checkpoint.load(path)
    checkpoint.save(path, tensors, state | {"task": state["task"] | {"precision": "tf32x3"}})
    assert Predictor(tmp_path).model.precision.name == "fp32", "the CPU has no TF32"


def test_averaged_weights_are_those_that_predict(tmp_path):
    model, dataset = trained(tmp_path, settings={"model": "mlp"})
    other = minidl.Model(models.mlp(2, (6, 5, 3)), seed=1)
    tensors, state = checkpoint.load(checkpoint.latest(tmp_path))
    tensors |= {f"average.{name}": values for name, values in WeightAverage(other).state_dict().items()}
    checkpoint.save(tmp_path / "averaged.safetensors", tensors, state)
    found = Predictor(tmp_path / "averaged.safetensors").model.state_dict()
    for name, values in other.state_dict().items():
        np.testing.assert_array_equal(found[name], values)


ERRORS = {
    ("photo.png",): "photo.png is an image; write minidl predict CHECKPOINT photo.png",
    ("nowhere",): "there is no checkpoint nowhere",
    ("RUN", "nowhere.png"): "there is no image or folder nowhere.png",
    ("RUN", "RUN/metrics.csv"): "metrics.csv is not an image; expected a folder or a file of .bmp",
    ("RUN", "RUN"): "no images under",
    ("RUN", "x.png", "--data", "digits"): "--data and --data-path are for test sets",
    ("RUN",): "the test set of folder needs --data-path DIR",
    ("RUN", "--data", "synthetic"): "synthetic images have no test set",
    ("RUN", "--data", "folders"): "unknown data set 'folders'; did you mean 'folder'?",
    ("RUN", "--top", "0"): "--top must be an integer of at least 1",
    ("RUN", "--model", "vgg17"): "unknown model 'vgg17'",
}


@pytest.mark.parametrize("words", ERRORS)
def test_what_is_wrong_is_one_clear_line(words, pets, capsys):
    arguments = [word.replace("RUN", str(pets / "run")) for word in words]
    status, out, err = run_cli(capsys, "predict", *arguments)
    assert (
        status == 2
        and out == ""
        and ERRORS[words] in err
        and err.count("\n") == 1
        and err.startswith("minidl predict: ")
    )


@pytest.fixture(scope="module")
def coins(tmp_path_factory):
    """A run of a small U-Net."""
    pytest.importorskip("skimage", reason="needs scikit-image")
    folder = tmp_path_factory.mktemp("coins")
    unet = ["--model", "unet", "--model-options", "width=2 depth=2", "--data", "coins", "--image-size", "24"]
    assert cli.main(["train", "--device", "cpu", "--epochs", "1", *unet, "--output", str(folder)]) == 0
    return folder


def test_a_network_that_answers_for_pixels_writes_masks(coins, tmp_path, capsys):
    [row] = csv.DictReader((coins / "metrics.csv").read_text().splitlines())
    status, out, _ = run_cli(capsys, "predict", coins, "--masks", tmp_path / "masks")
    expected = f"accuracy {float(row['test_accuracy']):.4f} of pixels, mean IoU {float(row['test_iou']):.4f}"
    assert status == 0 and expected in out, "as in the evaluation of the run"
    found = Predictor(coins).predict(data.coins("test", size=24))
    assert found.shape[1:] == (24, 24, 2) and np.allclose(found.sum(-1), 1, atol=1e-6)
    masks = sorted((tmp_path / "masks").glob("*.png"), key=lambda path: int(path.stem))
    assert len(masks) == len(found)
    for path, probabilities in zip(masks, found, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(path)), probabilities.argmax(-1))
    assert Image.open(masks[0]).getpalette()[:9] == [0, 0, 0, 128, 0, 0, 0, 128, 0], "colours of Pascal VOC"


def test_labels_of_pixels_are_no_test_set_of_whole_images(tmp_path, capsys):
    pytest.importorskip("skimage", reason="needs scikit-image")
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    common = ("train", "--device", "cpu", "--model", "mlp", "--output", tmp_path, "--epochs", 1)
    assert run_cli(capsys, *common)[0] == 0
    status, _, err = run_cli(capsys, "predict", tmp_path, "--data", "coins")
    assert status == 2 and "answers for whole images, and the data set has a label for each pixel; --data" in err


def test_masks_are_of_files_that_can_be_told_apart(coins, tmp_path, capsys):
    for name in ("a/one.png", "b/one.png", "b/two.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((30, 20, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "b" / "three.png").write_text("no image")
    masks = tmp_path / "masks"
    status, out, err = run_cli(capsys, "predict", coins, tmp_path / "b", "--masks", masks)
    assert status == 1 and out.startswith("2 images by ") and "1 damaged" in out and "three.png cannot be" in err
    assert sorted(path.name for path in masks.iterdir()) == ["one.png", "two.png"]
    status, _, err = run_cli(capsys, "predict", coins, tmp_path / "a", tmp_path / "b", "--masks", masks)
    assert status == 2 and "two images are called one" in err


def test_options_of_the_other_kind_of_network_are_refused(coins, pets, tmp_path, capsys):
    for words, told in {
        (coins, "--top", 2): "--top, --csv and --json are for networks that classify images",
        (coins, "--csv", tmp_path / "x.csv"): "--top, --csv and --json are for networks",
        (coins, pets / "val"): "this network answers for each pixel; --masks DIR writes",
        (pets / "run", pets / "val", "--masks", tmp_path): "--masks is for networks that answer for each pixel",
    }.items():
        status, out, err = run_cli(capsys, "predict", *words)
        assert (status, out) == (2, "") and told in err


def test_files_are_cut_to_any_shape(tmp_path):
    pixels = np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    same, _ = ImageFiles([tmp_path / "a.png"], (40, 30, 3))[0]
    np.testing.assert_array_equal(same, pixels)
    middle, label = ImageFiles([tmp_path], (20, 30, 3))[0]
    np.testing.assert_array_equal(middle, pixels[10:30])
    assert label == -1
    with pytest.raises(ValueError, match=r"shape must have shape \(height, width, 1 or 3\)"):
        ImageFiles([tmp_path], (8, 8, 4))
