"""Options from TOML files: the command line wins, words and values that cannot be are named."""

from __future__ import annotations

import csv

import pytest

from minidl import cli
from minidl.config import use_config


def parsed(tmp_path, text, *more):
    path = tmp_path / "run.toml"
    path.write_text(text)
    top = cli.parser()
    use_config(cli._verb(top, "train"), path)
    return top.parse_args(["train", *more])


def test_a_files_words_are_the_options_and_the_command_line_wins(tmp_path):
    text = 'model = "unet"\nbatch = 96\nweight-decay = 1e-3\nsync_batch_norm = true\naugment = false\nresume = ""\n'
    a = parsed(tmp_path, text, "--batch", "8", "--augment")
    assert (a.model, a.batch, a.weight_decay, a.sync_batch_norm, a.resume) == ("unet", 8, 1e-3, True, "")
    assert a.augment is True and a.lr is None and a.freeze == []
    assert parsed(tmp_path, 'freeze = "fc.*"').freeze == ["fc.*"]
    assert parsed(tmp_path, 'freeze = ["conv1.*", "bn1.*"]').freeze == ["conv1.*", "bn1.*"]
    a = parsed(tmp_path, "keep-best = true\nresume = false")
    assert (a.keep_best, a.resume) == ("test_accuracy", None)
    assert parsed(tmp_path, text).batch == 96 and parsed(tmp_path, text).augment is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch = ", "not TOML"),
        ("bacth = 8", "did you mean 'batch'"),
        ("help = true", "unknown option 'help'"),
        ('config = "other.toml"', "unknown option 'config'; known: "),
        ('batch = "many"', "batch must be of the kind int, got 'many'"),
        ("batch = 1.5", "batch must be of the kind int, got 1.5"),
        ("batch = true", "batch must be a text or a number, got True"),
        ("batch = [1, 2]", "batch must be a text or a number"),
        ('device = "tpu"', "device must be one of auto, cpu, cuda, got 'tpu'"),
        ("freeze = [1]", "freeze must be a text or a list of texts, got"),
        ('profile = "yes"', "profile must be true or false"),
        ("augment = 1", "augment must be true or false"),
    ],
)
def test_what_cannot_be_is_named_with_the_file(tmp_path, text, words):
    with pytest.raises(ValueError, match=rf"run\.toml.*{words}"):
        parsed(tmp_path, text)


def test_training_takes_its_options_from_a_file(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('model = "resnet20"\ndata = "synthetic"\nimage-size = 8\nsamples = 32\nepochs = 1\nbatch = 16\n')
    options = ["train", "--config", str(path), "--device", "cpu", "--output", str(tmp_path / "run")]
    assert cli.main(options) == 0
    (row,) = csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines())
    assert row["step"] == "2"
    with pytest.raises(SystemExit):
        cli.main(["train", "--config", str(tmp_path / "none.toml")])
    assert "none.toml" in capsys.readouterr().err
