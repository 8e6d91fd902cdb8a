"""Both operation tables offer the same functions with the same parameters."""

from __future__ import annotations

import importlib
import inspect

import pytest

import minidl.cpu as cpu

FUNCTIONS = [name for name in cpu.__all__ if inspect.isfunction(getattr(cpu, name))]


@pytest.fixture(scope="module")
def cuda():
    try:
        return importlib.import_module("minidl.cuda")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("minidl.cuda"):
            raise
        pytest.skip(f"the CUDA table is incomplete: {error}")


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_every_name_of_the_table_exists():
    missing = [name for name in cpu.__all__ if not hasattr(cpu, name)]
    assert not missing and len(set(cpu.__all__)) == len(cpu.__all__)
    assert len(FUNCTIONS) == len(cpu.__all__) - 2  # all but Array and name
    assert cpu.name == "cpu"


def test_the_tables_list_the_same_names_in_the_same_order(cuda):
    assert [name for name in cuda.__all__ if name in cpu.__all__] == cpu.__all__
    assert cuda.name == "cuda"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_agree(cuda, function):
    assert parameters(getattr(cuda, function)) == parameters(getattr(cpu, function))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_operation_says_what_it_does(function):
    assert inspect.getdoc(getattr(cpu, function))
