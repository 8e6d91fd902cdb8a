"""The laws that tests of convolution kernels share hold of a right table, and each of them notices a wrong one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from minidl.precision import bfloat16, float32
from tests import convolutions
from tests.convolutions import Case, Guarded, both, three

CASE = Case("odd", (2, 6, 5, 6), (4, 3, 2), stride=(2, 1), padding=(1, 0), groups=2)
OPERATIONS = "conv2d", "conv2d_backward_data", "conv2d_backward_weight"


def _off(result, *operands):
    """The last value is wrong, as at an edge that a kernel's last block leaves."""
    result.reshape(-1)[-1] += result.dtype.type(4)


def _off_where_pitched(result, *operands):
    if not all(operand.flags.c_contiguous for operand in operands):
        _off(result)


def _spread(result, *operands):
    """What is not finite reaches every value, as zeros that multiply it would carry it."""
    if not all(np.isfinite(operand.astype(float32)).all() for operand in operands):
        result[...] = np.nan


# a law, whether it is told which passes, the fault that it notices
LAWS = {
    "whole-numbers": (convolutions.exact_on_whole_numbers, True, _off),
    "weights": (convolutions.exact_weight_gradient, False, _off),
    "definition": (convolutions.equals_definition, True, _off),
    "pitched": (convolutions.bits_of_dense_arrays, True, _off_where_pitched),
    "not-finite": (convolutions.keeps_nonfinite_apart, True, _spread),
}


@pytest.mark.parametrize("storage", [float32, bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("passes", [both, three])
@pytest.mark.parametrize("law", LAWS)
def test_a_right_table_keeps_them(cpu_ops, law, passes, storage, rng):
    check, told, _ = LAWS[law]
    check(cpu_ops, CASE, storage, rng, *([passes] if told else []))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("law", LAWS)
def test_a_fault_of_each_operation_is_noticed(cpu_ops, law, operation, rng):
    check, told, fault = LAWS[law]

    def faulty(a, b, *args, **options):
        result = getattr(cpu_ops, operation)(a, b, *args, **options)
        fault(options["out"] if result is None else result, a, b)
        return result

    table = SimpleNamespace(**{name: getattr(cpu_ops, name) for name in (*OPERATIONS, "from_host", "to_host")})
    setattr(table, operation, faulty)
    arguments = table, CASE, float32, rng, *([three] if told else [])
    if law == "weights" and operation != "conv2d_backward_weight":
        check(*arguments)
    else:
        with pytest.raises(AssertionError):
            check(*arguments)


@pytest.mark.parametrize("past", [-1, 24])
def test_a_value_beside_an_array_is_noticed(cpu_ops, past):
    guarded = Guarded(cpu_ops)
    array = guarded((2, 3), float32)
    assert np.isnan(array).all()
    guarded.check(1)
    with pytest.raises(AssertionError):
        guarded.check(2)
    array.base[Guarded._GUARD + past] = 0
    with pytest.raises(AssertionError):
        guarded.check(1)
