"""How far a result may be from its float64 reference: one rounding at the store plus float32 accumulation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from minidl.precision import bfloat16, float16

# Half a unit in the last place of each storage type, relative to the value.
STORE = {np.dtype(np.float32): 2.0**-24, float16: 2.0**-11, bfloat16: 2.0**-8, np.dtype(np.float64): 2.0**-53}
TF32 = 2.0**-11  # operands rounded to ten explicit mantissa bits


def draw(rng: np.random.Generator, shape, dtype, *, scale: float = 1.0, offset: float = 0.0) -> np.ndarray:
    """Normal values already rounded to ``dtype``, so that a reference sees what the code under test sees."""
    return (rng.standard_normal(shape) * scale + offset).astype(dtype)


def draw_integers(rng: np.random.Generator, shape, dtype, *, limit: int = 3) -> np.ndarray:
    """Whole numbers of at most ``limit``: float32 holds their products' sums exactly (up to 2**24), in any order and
    with any rounding, so that a kernel must give the bits of the reference."""
    return rng.integers(-limit, limit + 1, shape).astype(dtype)


def draw_few(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    """Whole numbers, most of them 0: sums that 16-bit types hold exactly, too."""
    return (draw_integers(rng, shape, np.float32, limit=1) * (rng.random(shape) < 0.2)).astype(dtype)


def rounded(x: np.ndarray) -> np.ndarray:
    """What TF32 holds of float32, ten bits after the leading one, to nearest; no value lies half way."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def assert_same_arrays(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """The same names, and under each the same values; one NaN is as good as another."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def assert_close(actual, expected, dtype=np.float32, *, terms: int = 1, scale: float | None = None, tf32: bool = False):
    """Assert ``|actual - expected|`` within one rounding to ``dtype`` plus float32 accumulation of ``terms`` terms.

    ``scale``: magnitude of one summed term (default: the largest expected value over sqrt(terms)). The accumulation
    bound is statistical: rounding errors of a fixed-order sum grow like sqrt(terms), with a factor of eight for safety.
    """
    actual = np.asarray(actual, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return
    if scale is None:
        scale = float(np.max(np.abs(expected), initial=0.0)) / max(terms, 1) ** 0.5
    unit = TF32 if tf32 else 2.0**-24
    bound = 1.01 * STORE[np.dtype(dtype)] * np.abs(expected) + 8 * unit * max(terms, 1) ** 0.5 * scale + 1e-30
    if np.dtype(dtype) == float16:
        bound += 2.0**-25  # half of the smallest subnormal
    wrong = ~(np.abs(actual - expected) <= bound) & ~(np.isnan(actual) & np.isnan(expected)) & ~(actual == expected)
    if wrong.any():
        where = np.unravel_index(np.argmax(np.where(wrong, np.abs(actual - expected) / bound, 0)), wrong.shape)
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.size} elements differ; worst at {tuple(map(int, where))}: "
            f"{actual[where]!r}, expected {expected[where]!r}, bound {bound[where]:.3g}"
        )
