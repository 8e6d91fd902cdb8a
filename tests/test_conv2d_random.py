"""Convolutions of random geometry on whole numbers: each pass has the bits of the definition, on each operation table.

And an image's result does not depend on its batch, whichever family of kernels is forced.
"""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import current_device
from minidl.precision import bfloat16, float32
from tests.convolutions import Case, both, both_expected, draws, put, same, weight_gradient
from tests.reference import conv2d as reference
from tests.tolerance import draw_integers

MOST = 4e6  # products of a pass


def random_case(seed: int) -> Case:
    """Kernels of 1 to 11, strides and dilations of 1 to 3, images that may be smaller than the filter, any channels."""
    rng = np.random.default_rng(seed)
    while True:
        kernel = rng.choice([1, 2, 3, 4, 5, 7, 11], 2, p=[0.25, 0.1, 0.3, 0.1, 0.1, 0.1, 0.05])
        stride, dilation = (rng.choice([1, 2, 3], 2, p=[0.5, 0.3, 0.2]) for _ in range(2))
        spread = (kernel - 1) * dilation
        padding = rng.integers(0, spread + 1)
        size = rng.integers(1, 24, 2)
        groups = int(rng.choice([1, 1, 1, 2, 3, 8]))
        # Half of them multiples of eight, which other kernels take.
        width, filters = (int(rng.integers(1, 49)) * int(rng.choice([1, 8])) for _ in range(2))
        images = int(rng.integers(1, 5))
        if (size + 2 * padding <= spread).any():
            continue
        x = images, *map(int, size), width * groups
        pairs = {"stride": stride, "padding": padding, "dilation": dilation}
        options = {name: tuple(map(int, pair)) for name, pair in pairs.items()}
        case = Case(f"random-{seed}", x, (filters * groups, *map(int, kernel)), **options, groups=groups)
        if np.prod(case.y) * np.prod(case.w[1:]) < MOST:
            return case


RANDOM = [random_case(seed) for seed in range(40)]


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def test_random_cases_reach_what_they_should():
    """At least one of each; a change of the drawing that loses some is seen."""
    for tells in (
        lambda case: max(case.filters[1:]) == 11,
        lambda case: 3 in case.stride,
        lambda case: 3 in case.dilation and max(case.filters[1:]) > 1,
        lambda case: case.x[0] == 1,
        lambda case: any(size < taps for size, taps in zip(case.x[1:3], case.filters[1:], strict=True)),
        lambda case: case.groups > 1,
        lambda case: case.w[3] % 8 and case.w[0] % 8,
        lambda case: case.w[3] % 8 == 0 == case.w[0] // case.groups % 8,
    ):
        assert sum(bool(tells(case)) for case in RANDOM) >= 2


@by_name(RANDOM)
def test_every_pass_has_the_bits_of_the_definition(ops, case, dtype, rng):
    hosts = draws(rng, case, dtype)
    some = [draw_integers(rng, case.w[0], float32), draw_integers(rng, case.x[3], float32)]
    add, start = draw_integers(rng, case.x, dtype), draw_integers(rng, case.w, float32)
    x, w, dy = put(ops, *hosts)
    same(both(ops, case, x, w, dy), both_expected(case, *hosts, dtype))
    bias, dbias, added = put(ops, *some, add)
    found = both(ops, case, x, w, dy, forward_bias=bias, bias=dbias, add=added)
    same(found, both_expected(case, *hosts, dtype, *some, add))
    expected = reference.conv2d_backward_weight(hosts[2], hosts[0], case.w, **case.options)
    np.testing.assert_array_equal(weight_gradient(ops, case, dy, x), expected)
    np.testing.assert_array_equal(weight_gradient(ops, case, dy, x, start), expected + start)


@by_name(RANDOM)
@pytest.mark.parametrize("tf32", [1, 3])
def test_tf32_has_the_bits_of_the_definition(cuda_ops, case, tf32, rng):
    hosts, options = draws(rng, case, float32), case.options | {"tf32": tf32}
    x, w, dy = put(cuda_ops, *hosts)
    out = cuda_ops.empty(case.w, float32)
    y, dx = cuda_ops.conv2d(x, w, **options), cuda_ops.conv2d_backward_data(dy, w, case.x, **options)
    cuda_ops.conv2d_backward_weight(dy, x, **options, out=out)
    same(map(cuda_ops.to_host, (y, dx)), both_expected(case, *hosts, float32))
    expected = reference.conv2d_backward_weight(hosts[2], hosts[0], case.w, **case.options)
    np.testing.assert_array_equal(cuda_ops.to_host(out), expected)


# (family, type, TF32 products, images of what): the direct kernels and those whose tiles hold several images
BATCHED = [
    ("grouped", bfloat16, 0, Case("grouped", (1, 6, 7, 32), (32, 3, 3), padding=(1, 1), groups=4)),
    ("grouped", bfloat16, 0, Case("grouped-small", (1, 3, 3, 64), (64, 3, 3), stride=(2, 2), padding=(1, 1), groups=8)),
    ("generic", bfloat16, 0, Case("generic", (1, 9, 7, 20), (36, 3, 3), stride=(2, 2), padding=(1, 1))),
    ("generic", float32, 0, Case("exact", (1, 9, 7, 20), (36, 3, 3), padding=(1, 1))),
    ("generic", float32, 1, Case("generic-tf32", (1, 5, 7, 20), (36, 3, 3), padding=(1, 1))),
    ("hopper", float32, 1, Case("hopper-tf32", (1, 5, 7, 24), (40, 3, 3), padding=(1, 1))),
    ("generic", float32, 3, Case("generic-tf32x3", (1, 5, 7, 24), (40, 3, 3), stride=(2, 1), padding=(1, 1))),
    ("direct", float32, 0, Case("direct", (1, 6, 7, 5), (9, 3, 3), padding=(1, 1))),
    ("tiled", float32, 0, Case("tiled", (1, 6, 7, 5), (9, 3, 3), padding=(1, 1))),
    (None, bfloat16, 0, Case("depthwise", (1, 7, 9, 24), (24, 3, 3), padding=(1, 1), groups=24)),
    (None, bfloat16, 0, Case("depthwise-stride-2", (1, 7, 9, 24), (24, 5, 5), (2, 2), (2, 2), groups=24)),
]


@pytest.mark.parametrize(("name", "storage", "tf32", "case"), BATCHED, ids=[batched[3].name for batched in BATCHED])
def test_an_images_result_does_not_depend_on_its_batch(cuda_ops, name, storage, tf32, case, rng):
    if name == "hopper" and current_device().arch != (9, 0):
        pytest.skip("needs compute capability 9.0")
    options = case.options | {"tf32": tf32}
    x, dy = (rng.standard_normal((67, *shape[1:])).astype(storage) for shape in (case.x, case.y))
    x, w, dy = put(cuda_ops, x, rng.standard_normal(case.w).astype(storage), dy)

    def passes(images: slice) -> list[np.ndarray]:
        some = x[images], dy[images]
        y = cuda_ops.conv2d(some[0], w, **options)
        found = [y] if name in ("direct", "tiled") else [
            y, cuda_ops.conv2d_backward_data(some[1], w, some[0].shape, **options)
        ]  # fmt: skip
        return [cuda_ops.to_host(array).view(np.uint16) for array in found]

    def run() -> None:
        whole = passes(slice(None))
        for images in (slice(0, 1), slice(66, 67), slice(5, 38)):
            for a, b in zip(whole, passes(images), strict=True):
                assert np.array_equal(a[images], b)

    if name is None:
        run()
    else:
        with family(name):
            run()
