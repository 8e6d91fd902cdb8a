"""Fixtures: the operation tables, so that every law is written once and holds on each of them."""

from __future__ import annotations

import functools
import os
import re
import zlib

if "PYTEST_XDIST_WORKER" in os.environ:  # before NumPy is loaded: workers with all cores each stand in each other's way
    _SHARED_CORES = {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # on shared cores a thread that spins keeps those it waits for from running
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    for _name, _value in _SHARED_CORES.items():
        os.environ.setdefault(_name, _value)

from types import SimpleNamespace

import numpy as np
import pytest

from minidl import backend
from minidl.cuda import prepared
from minidl.precision import bfloat16, float16, float32
from tests import emulator
from tests.dist import job


def _cuda_reason() -> str | None:
    try:
        backend.get_ops("cuda").require_device()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


_NO_CUDA = _cuda_reason()
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(_NO_CUDA is not None, reason=f"needs a GPU: {_NO_CUDA}")]
)


def _decided_anew(method):
    """Where a test puts something else in the place of what operations decide by, no prepared call may go on."""

    @functools.wraps(method)
    def then_forget(*args, **named):
        method(*args, **named)
        prepared.forget()

    return then_forget


for _change in ("setattr", "undo"):
    setattr(pytest.MonkeyPatch, _change, _decided_anew(getattr(pytest.MonkeyPatch, _change)))


def pytest_runtest_setup(item):
    if item.get_closest_marker("mpi") and job.missing():
        pytest.skip(job.missing())
    if item.get_closest_marker("multi_gpu") and job.most_ranks() < 2:
        pytest.skip(f"needs two GPUs, found {job.gpus()} (MINIDL_SHARE_GPUS=1: ranks share one)")
    # Workers of pytest-xdist share one GPU: what one of them times is then another's work too.
    if item.get_closest_marker("alone") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("times the GPU: run it without -n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Slow ones come first: at the end of a run no worker waits long for another.

    Without a GPU, of the half of all tests that need one the first of each file says so for the others; and of laws on
    kernels that run on the processor there is one case of each.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if _NO_CUDA is None:
        return
    first, laws = {}, {}
    left_out = {
        item for item in items if item.get_closest_marker("gpu") and first.setdefault(item.path, item) is not item
    }
    for item in items:
        if getattr(item, "callspec", _NO_CASE).params.get("ops") is _EMULATED:
            laws.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for law, cases in laws.items():
        able = [item for item in cases if not re.search("fp16|float16", item.callspec.id)]
        one = zlib.crc32(law.encode()) % max(len(able), 1)
        left_out |= {*cases} - {*able[one : one + 1]}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # of pytest-xdist the controller alone
        config.pluginmanager.register(_Failures(config))


class _Failures:
    """Names a test as soon as it fails: a run that is cut off has said so far what it found."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.config.pluginmanager.getplugin("terminalreporter").write_line(f" {report.nodeid}: failed")


_EMULATED = "emulated"
_NO_CASE = SimpleNamespace(params={})
_NOT_EMULATED = {"test_conv2d_ops"}  # whose kernels have laws of their own on the emulator


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Every law with ``ops`` runs on each table; without a GPU, those of operations on the kernels' source too."""
    if "ops" not in metafunc.fixturenames or _sets_ops(metafunc):
        return
    file, tables = metafunc.module.__name__.rpartition(".")[2], ["cpu", CUDA]
    if _NO_CUDA is not None and file.endswith("_ops") and file not in _NOT_EMULATED:
        tables.append(_EMULATED)
    metafunc.parametrize("ops", tables, indirect=True)


def _sets_ops(metafunc):
    return any("ops" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))


@pytest.fixture
def ops(request):
    """An operation table."""
    if request.param != _EMULATED:
        yield backend.get_ops(request.param)
        return
    with emulator.table() as table:
        yield table


@pytest.fixture
def cpu_ops():
    return backend.get_ops("cpu")


@pytest.fixture(params=[CUDA])
def cuda_ops(request):
    return backend.get_ops(request.param)


@pytest.fixture
def hopper(cuda_ops):
    """The CUDA table with its convolutions on Hopper's kernels."""
    from minidl.cuda.convolution.conv2d_family import family
    from minidl.cuda.device import current_device

    if current_device().arch != (9, 0):
        pytest.skip("needs compute capability 9.0")
    with family("hopper"):
        yield cuda_ops


@pytest.fixture(params=["hopper", "generic"])
def forced_ops(request, cuda_ops):
    """The CUDA table with its convolutions on one family of kernels."""
    from minidl.cuda.convolution.conv2d_family import family

    if request.param == "hopper":
        request.getfixturevalue("hopper")
    with family(request.param):
        yield cuda_ops


@pytest.fixture(params=[float32, bfloat16, float16], ids=["fp32", "bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture
def rng(request):
    """Numbers that differ from test to test and stay the same from run to run."""
    return np.random.default_rng([len(request.node.name), *request.node.name.encode()])
