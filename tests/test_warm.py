"""Compiling ahead: every kernel that a training step launches, found on shapes."""

from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import minidl as m
from minidl import cli, training
from minidl.bench import conv_tuning, warm
from minidl.bench.step import TrainingStep
from minidl.cuda.ahead import kernels_of
from minidl.cuda.convolution import conv2d_tuned
from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_tuned import Table
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import observed
from minidl.precision import PRECISIONS


def kernels(device, precision="bf16", fusion="none"):
    graph = m.models.build("resnet20", (32, 32, 3), 10)
    return kernels_of(lambda: warm.walk(graph, 4, precision, fusion), device)


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled, by how many processes; of these nothing is there yet but the first."""
    calls = []
    monkeypatch.setattr(
        warm.nvrtc, "compile_all", lambda kernels, arch, processes: calls.append((kernels, arch, processes))
    )
    first = kernels(BUILT_IN["H100"], fusion="auto")[0]
    monkeypatch.setattr(warm.nvrtc, "is_built", lambda stem, arch, defines: (stem, tuple(defines.items())) == first)
    return calls


def test_the_kernels_of_a_step_are_those_of_its_parts_each_once():
    found = kernels(BUILT_IN["H200"])
    stems = {stem for stem, _ in found}
    assert {"conv2d_hopper", "conv2d_stem", "batch_norm", "activation", "loss", "optim", "channel_sum"} <= stems
    assert len(set(found)) == len(found)
    assert not any(stem.endswith("hopper") for stem, _ in kernels(BUILT_IN["A100"]))
    assert set(kernels(BUILT_IN["H200"], fusion="elementwise")) != set(found)


def test_the_command_tells_what_it_compiled(compiled, capsys):
    words = ["warm", "--model", "resnet20", "--batch", "4", "--gpu", "H100", "--processes", "3"]
    assert cli.main(words) == 0
    ((missing, arch, processes),) = compiled
    assert missing == kernels(BUILT_IN["H100"], fusion="auto")[1:] and arch == "sm_90a" and processes == 3
    out = capsys.readouterr().out
    assert f"{len(missing) + 1} kernels" in out and f"{len(missing)} compiled in " in out


@pytest.mark.parametrize(("local_rank", "compiling"), [(0, 1), (1, 0)])
def test_one_rank_of_each_host_compiles_and_all_wait(compiled, monkeypatch, local_rank, compiling):
    monkeypatch.setattr(warm, "this_gpu", lambda: BUILT_IN["H100"])
    waited = []
    ranks = SimpleNamespace(local_rank=local_rank, barrier=lambda: waited.append(len(compiled)))
    built = warm.compile_for_ranks(m.models.build("mlp", (28, 28, 1), 10), 4, "bf16", "none", ranks)
    assert (built is not None, len(compiled), waited) == (bool(compiling), compiling, [compiling])


def test_training_compiles_for_the_batch_of_a_micro_batch_of_a_rank(monkeypatch):
    asked = []
    monkeypatch.setattr(warm, "compile_for_ranks", lambda *given: asked.append(given))
    options = SimpleNamespace(batch=100, accumulate=3, precision="bf16", fusion="auto")
    training._compile_ahead(options, None, SimpleNamespace(size=4, rank=0))
    ((_, batch, *_),) = asked
    assert batch == 9  # of 100: 25 samples of a rank, by at most 9


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_has_kernels_to_compile(compiled, precision):
    assert cli.main(["warm", "--model", "mlp", "--gpu", "H200", "--precision", precision]) == 0
    assert compiled[0][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "H100", "--step"), "--step must be without --gpu, got '?--gpu H100"),
        (("--gpu", "H100", "--processes", "0"), "--processes must be an integer of at least 1, got 0"),
        (("--gpu", "H100", "--batch", "0"), "--batch must be an integer of at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(compiled, words, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(["warm", "--model", "resnet20", *words])
    assert re.search(message, capsys.readouterr().err) and not compiled


def test_without_a_gpu_one_must_be_named(compiled, monkeypatch, capsys):
    def none():
        raise RuntimeError("no usable GPU")

    monkeypatch.setattr(warm, "current_device", none)
    with pytest.raises(SystemExit):
        cli.main(["warm"])
    assert "no usable GPU; name the GPU to compile for: --gpu H200" in capsys.readouterr().err


def test_tuned_kernels_are_compiled_too(monkeypatch):
    h200 = BUILT_IN["H200"]
    (question, *_) = conv_tuning.of_network(m.models.build("resnet20", (32, 32, 3), 10), 4, "bf16", h200)
    found = Table(h200.name, {question: Choice("generic", "64x64")})  # the stem's forward pass
    monkeypatch.setattr(warm, "current_device", lambda: h200)
    monkeypatch.setattr(conv2d_tuned, "load", lambda: found)
    before = set(kernels(h200))
    conv2d_tuned.install(None)
    try:
        assert warm.this_gpu() == h200
        added = [dict(defines) for stem, defines in set(kernels(h200)) - before if stem == "conv2d"]
    finally:
        conv2d_tuned.install(None)
    assert [(defines["TILE_M"], defines["TILE_N"]) for defines in added] == [(64, 64)]


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_real_step_launches_nothing_else(cuda_ops, precision):
    from minidl.cuda.device import current_device

    known, seen = set(kernels(current_device(), precision)), set()

    @contextmanager
    def note(stem, name, defines):
        seen.add((stem, tuple(sorted(defines.items()))))
        yield

    with observed(note):
        step = TrainingStep(m.models.build("resnet20", (32, 32, 3), 10), batch=4, device="cuda", precision=precision)
        step()
        step.model.eval()
        step.model.forward(step.x)
    assert seen and seen <= known, seen - known
