"""Both operation tables offer the same functions with the same parameters."""

from __future__ import annotations

import inspect

import pytest

from minidl import cpu, cuda

FUNCTIONS = [name for name in cpu.__all__ if inspect.isfunction(getattr(cpu, name))]


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_tables_have_the_same_names():
    assert set(FUNCTIONS) | {"Array", "name"} == set(cpu.__all__) == set(cuda.__all__)
    assert (cpu.name, cuda.name) == ("cpu", "cuda") and len(FUNCTIONS) > 100


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_agree(function):
    assert parameters(getattr(cuda, function)) == parameters(getattr(cpu, function))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_operation_says_what_it_does(function):
    assert inspect.getdoc(getattr(cpu, function))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_on_a_gpu_too_or_where_that_stands(function):
    text = inspect.getdoc(getattr(cuda, function))
    assert text
    if text.startswith("As `minidl."):
        own = getattr(cpu, function)
        assert text.startswith(f"As `{own.__module__}.{own.__name__}`")
