"""What users type after ``minidl bench``: what cannot be is one clear line, and no measurement is lost."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from minidl import cli
from minidl.bench import layers
from minidl.bench.run import bench_network
from minidl.bench.setup import Setup
from minidl.dist.communicator import SOLO
from minidl.profile import results
from minidl.profile.timing import Budget

CEILINGS = {"copy_gb_per_s": 20.0, "matrix_tflops": {"fp32": 0.1, "bf16": 0.1}, "vector_tflops": {"fp32": 0.1}}


@pytest.fixture(scope="module")
def content():
    """A small network on the CPU, as its result file holds it."""
    options = layers.Options(budget=Budget(samples=3, seconds=0.01, least=2, sample_ms=0.1))
    found = bench_network(Setup("lenet", 2, "fp32", "cpu"), SOLO, CEILINGS, options=options, seconds=0.05)
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture
def known_ceilings(monkeypatch):
    """Nothing is measured for ceilings."""
    from minidl.profile import ceilings

    monkeypatch.setattr(ceilings, "find", lambda ops, comm, **options: CEILINGS | {"all_reduce": None})


def run_cli(capsys, *words):
    """Status, stdout and stderr of ``minidl bench``."""
    try:
        status = cli.main(["bench", *map(str, words)])
    except SystemExit as stop:
        status = stop.code
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize(("words", "message"), [
    (["layers", "--layer", "Conv3d(3, 4, 3)", "--input", "2x8x8x3"], "unknown layer 'Conv3d'"),
    (["layers", "--layer", "Conv2d(3, 4, 3)", "--input", "2x8x8x5"], "x must have shape"),
    (["layers", "--layer", "Conv2d(3, 4, 9)", "--input", "2x8x8x3"], "conv2d"),
    (["layers", "--layer", "ReLU()"], "--input must be the shape of the layer's input, such as 32x56x56x64"),
    (["layers", "--input", "1x2x2x3"], "--input must be left out without --layer"),
    (["layers", "--layer", "ReLU()", "--input", "1x2x2x3", "--fusion", "auto"], "--fusion must be left out"),
    (["layers", "--layer", "ReLU()", "--input", "1x2x2x3", "--batch", "4"], "--batch must be left out with --layer"),
    (["layers", "--layer", "ReLU()", "--input", "1x2x2x3", "--trace", "t"], "--trace must be left out with --layer"),
    (["layers", "--torch", "m:n", "--no-capture"], "--no-capture must be left out with --torch"),
    (["layers", "--torch", "m:n", "--kernels"], "--kernels must be left out with --torch"),
    (["layers", "--model", "lenet", "--samples", "1"], "--samples must be an integer of at least 2"),
    (["layers", "--model", "resnet51"], "unknown model 'resnet51'"),
    (["layers", "--model", "vgg16", "--image-size", "16"], "enlarge the image"),
    (["layers", "--model", "resnet20", "--batch", "0"], "--batch"),
    (["layers", "--model", "resnet20", "--device", "cpu", "--energy"], "--energy must be with a GPU"),
    (["layers", "--json", f"{__file__}/rows.json"], f"{__file__} is a file"),
    (["layers", "--csv", "/"], "--csv must be a file, there already or to be made, got '/'; / is a folder"),
    (["model", "--model", "lenet", "mlp", "--trace", "t.json"], "--trace must be with one model"),
    (["model", "--model", "lenet", "--batch", "2", "4", "2"], "--batch must be a list without repetitions"),
    (["layers", "--model", "lenet", "--ways", "replayed"], "--ways must be cold or hot on this device"),
    (["layers", "--layer", "ReLU()", "--input", "1x2x2x3", "--ways", "replayed"], "--ways must be cold or hot"),
    (["layers", "--json", "r.out", "--csv", "./r.out"], "--csv must be another file than --json, got './r.out'"),
    (["layers", "--model", "lenet", "--seconds", "0"], "minidl bench: --seconds must be a number above 0"),
    (["layers", "--model", "lenet", "--group-mb", "-1"], "minidl bench: --group-mb must be a number of at least 0"),
    (["model", "--model", "lenet", "--precision", "tf32", "--device", "cpu"], "on the cpu, got 'tf32'"),
    (["layers", "--model", "lenet", "--precision", "tf32x3"], "on the cpu, got 'tf32x3'"),
    (["layers", "--precision", "tf32x3", "--peer", "torch"], "--peer must be left out with --precision tf32x3"),
    (["layers", "--precision", "tf32x3", "--torch", "m:n"], "--torch must be left out with --precision tf32x3"),
])  # fmt: skip
def test_what_cannot_be_measured_is_one_clear_line(words, message, capsys, known_ceilings):
    device = [] if "--device" in words else ["--device", "cpu"]
    status, _, err = run_cli(capsys, *words, *device)
    assert status == 2 and err.startswith("minidl bench: ") and err.count("\n") == 1 and message in err, err


def test_a_gpu_that_is_not_there_is_one_clear_line(capsys, monkeypatch):
    from minidl import backend

    def missing(name):
        raise RuntimeError("no CUDA device was found")

    monkeypatch.setattr(backend, "open_device", missing)
    for verb in ("layers", "model", "ceilings"):
        status, _, err = run_cli(capsys, verb, "--device", "cuda")
        assert (status, err) == (2, "minidl bench: --device cuda: no CUDA device was found\n")


def test_files_that_are_no_results_are_one_clear_line(capsys, content, tmp_path):
    good = tmp_path / "good.json"
    results.write(good, content)
    foreign = {
        "missing.json": (None, "missing.json"),
        "text.json": ("not JSON", "not a result file, for it is not JSON"),
        "trace.json": ('{"traceEvents": []}', "JSON, but not a result file of minidl"),
        "later.json": ('{"schema": 2, "rows": []}', "schema 2; this minidl reads schema 1"),
        "cut.json": (good.read_text()[:-200], "not JSON"),
    }
    for name, (text, message) in foreign.items():
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        for words in (["show", path], ["compare", good, path], ["compare", path, good]):
            status, _, err = run_cli(capsys, *words)
            assert status == 2 and name in err and message in err and err.count("\n") == 1, err
    other = tmp_path / "conv.json"
    row = {"case": "a", "pass": "forward", "dtype": "bf16", "arm": "minidl", "ms": 1.0, "spread": 0.0}
    results.write(other, results.result("bench_conv", [row | {"floor_ms": None, "peers": {}}], {"gpu": "x"}))
    assert "a result file of bench_conv, which has no table of layers" in run_cli(capsys, "show", other)[2]
    status, _, err = run_cli(capsys, "show", good, "--view", "comm")
    assert status == 2 and "good.json: no gradient messages: measured on one rank" in err


def test_files_of_two_machines_or_shapes_are_one_clear_line(capsys, content, tmp_path):
    good, far, wide = (tmp_path / f"{name}.json" for name in ("good", "far", "wide"))
    results.write(good, content)
    results.write(far, content | {"machine": {"gpu": "NVIDIA A100"}})
    rows = [row | {"input_shapes": [[9, 9, 9, 9]]} for row in content["rows"]]
    results.write(wide, content | {"rows": rows})
    for other, message in ((far, "say --any-machine"), (wide, "these are two different measurements")):
        status, _, err = run_cli(capsys, "compare", good, other)
        assert status == 2 and message in err and err.count("\n") == 1
    assert run_cli(capsys, "compare", good, far, "--any-machine")[0] == 0
    assert run_cli(capsys, "compare", good, good, "--strict")[0] == 0


def test_what_torch_does_in_one_call_is_said_beside_its_times(capsys, known_ceilings, monkeypatch):
    """With stand-ins for the adapter, which cannot be imported without torch."""
    times = lambda case, mode, device, sets, budget: {"forward": 0.5, "backward_data": 1.0}  # noqa: E731
    monkeypatch.setitem(sys.modules, "minidl.bench.torch_calls", SimpleNamespace(JOINT="in one call", peer_ms=times))
    common = ["layers", "--device", "cpu", "--peer", "torch", "--view", "peers", "--ways", "hot", "--input", "2x4x4x4"]
    status, out, _ = run_cli(capsys, *common, "--layer", "BatchNorm2d(4)")
    assert status == 0 and "warning: in one call" in out and "bwd, both gradients" in out
    assert "in one call" not in run_cli(capsys, *common, "--layer", "ReLU()")[1]


def test_a_view_that_does_not_apply_loses_no_measurement(capsys, known_ceilings, tmp_path):
    path = tmp_path / "relu.json"
    status, out, _ = run_cli(capsys, "layers", "--device", "cpu", "--layer", "ReLU()", "--input", "2x4x4x4",
                             "--view", "kernels", "--json", path)  # fmt: skip
    assert status == 0 and "this run: no kernels: none were noted" in out and path.exists()


def test_result_files_may_be_compressed(tmp_path):
    """Same content, a fifth of the size, the same bytes whenever it is written; what is broken is no result file."""
    rows = [{name: None for name in results.REQUIRED} | {"case": f"layer {i}", "peers": {}} for i in range(200)]
    content = results.result("bench_conv", rows, {"gpu": None})
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    for path in (plain, packed):
        results.write(path, content)
    assert results.load(packed) == results.load(plain)
    assert packed.stat().st_size < plain.stat().st_size / 5
    data = packed.read_bytes()
    results.write(packed, content)
    assert packed.read_bytes() == data
    for broken in (data[:-20], data[:3] + b"x" * 40):
        packed.write_bytes(broken)
        with pytest.raises(ValueError, match=r"a\.json\.gz: not a result file"):
            results.load(packed)


def test_defaults_of_several_words_stand_as_they_are_typed(capsys):
    for words in (["layers"], ["model"]):
        status, out, _ = run_cli(capsys, *words, "--help")
        assert status == 0 and "(default: [" not in out
    assert "(default: 32)" in out


def test_the_help_of_a_layer_names_what_is_left_out(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    _, out, _ = run_cli(capsys, "layers", "--help")
    (line,) = [line for line in out.splitlines() if "measure one layer instead" in line]
    assert "--seconds" in line and "--no-capture" in line


@pytest.mark.parametrize("words", [["bench"], ["tune"]])
def test_words_that_want_another_list_those_there_are(words, capsys):
    assert cli.main(words) == 2
    assert {"bench": "ceilings", "tune": "comm"}[words[0]] in capsys.readouterr().out
