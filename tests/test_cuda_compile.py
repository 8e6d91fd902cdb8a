"""Every kernel that the CUDA table would launch compiles for the architectures minidl claims, and fits them.

Each operation runs in a dry run, for an imagined device, over dtypes and shapes that reach its variants: large and
small, odd channel counts, pitched and misaligned arrays, every option. No GPU is needed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from math import prod

import numpy as np
import pytest

from minidl import cuda as ops
from minidl.cuda import machine_code, nvrtc
from minidl.cuda.convolution import conv2d_hopper, conv2d_hopper_tiles, conv2d_stem
from minidl.cuda.convolution.conv2d_family import TEXTBOOK, Choice, family
from minidl.cuda.convolution.conv2d_family import kernel as forced
from minidl.cuda.convolution.conv2d_halo import HALO_TILES
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.cuda.norm.signs import signs_pitch
from minidl.cuda.sparse.csb_routes import route
from minidl.precision import bfloat16, float16, float32
from tests import kernel_calls, weight_tiles
from tests.kernel_calls import PROCESSES, STORAGE, parameters
from tests.kernel_checks import SERIALISED, check_report, hasty, problems_of
from tests.variants import NEEDS_NVRTC, as_bfloat16, covering, covering_each, distinct

# (N, H, W, C), K, kernel, stride, padding, dilation, groups
CONVOLUTIONS = [
    ((256, 224, 224, 3), 64, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    ((256, 56, 56, 64), 64, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((256, 56, 56, 64), 256, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((256, 56, 56, 256), 512, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    ((256, 28, 28, 128), 128, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    ((256, 7, 7, 2048), 512, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((32, 7, 7, 512), 512, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 9, 11, 12), 20, (3, 2), (1, 2), (2, 0), (2, 1), 1),
    ((1, 5, 5, 7), 13, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((4, 14, 14, 6), 10, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((4, 14, 14, 256), 64, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((4, 14, 14, 512), 128, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((8, 14, 14, 128), 128, (3, 3), (1, 1), (1, 1), (1, 1), 32),
    ((8, 14, 14, 64), 64, (3, 3), (2, 2), (1, 1), (1, 1), 2),
    ((8, 14, 14, 384), 384, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    ((8, 14, 14, 9), 15, (3, 3), (1, 1), (1, 1), (1, 1), 3),
    ((8, 28, 28, 96), 96, (3, 3), (1, 1), (1, 1), (1, 1), 96),
    ((8, 28, 28, 96), 192, (5, 5), (2, 2), (2, 2), (1, 1), 96),
    ((8, 28, 28, 7), 7, (3, 3), (2, 2), (1, 1), (1, 1), 7),
    ((512, 1, 1, 2048), 1000, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((64, 1, 1, 25088), 4096, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((33, 1, 1, 600001), 5, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((0, 8, 8, 16), 16, (3, 3), (1, 1), (1, 1), (1, 1), 1),
]


def _convolve(x, filters, kernel, stride, padding, dilation, groups, tf32=0) -> None:
    where = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "tf32": tf32}
    w = ops.empty((filters, *kernel, x.shape[-1] // groups), x.dtype)
    bias, input_bias, db = parameters(filters, x.shape[-1], filters)
    y = ops.conv2d(x, w, bias, **where)
    assert ops.conv2d_stats(x, w, bias, **where)[1].shape == (1 + 2 * filters,)
    unfinished = ops.conv2d_stats(x, w, bias, **where, finish=False)[1]
    mean, variance = parameters(filters, filters)
    ops.batch_norm_finalize(unfinished, 1e-5, running_mean=mean, running_var=variance)
    dy = ops.empty(y.shape, y.dtype)
    dx = ops.conv2d_backward_data(dy, w, x.shape, **where)
    assert dx.shape == x.shape
    ops.conv2d_backward_data(dy, w, x.shape, bias=input_bias, add=x, **where)
    ops.conv2d(x, w, bias, relu=True, **where)
    ops.conv2d_backward_data_summed(dy, w, x.shape, **where)
    ops.conv2d_backward_data_summed(dy, w, x.shape, add=x, mask=x, **where)
    spaced = ops.conv2d_adds_spaced(x.shape, w, **where)
    half = ops.empty((x.shape[0], -(-x.shape[1] // 2), -(-x.shape[2] // 2), x.shape[3]), x.dtype) if spaced else x
    ops.conv2d_backward_data(dy, w, x.shape, add=half, **where)
    moments = ops.empty((2, x.shape[-1]), np.float32)
    signs = ops.empty((*x.shape[:3], signs_pitch(x.shape[3])), np.uint8)
    for below, add in (({}, None), ({"y": x}, x), ({"y": x, "signs": signs}, half)):
        masked, parts = ops.conv2d_backward_data_masked(dy, w, x, moments, input_bias, **below, add=add, **where)
        assert masked.shape == x.shape
        if parts is not None:
            assert ops.batch_norm_backward_sums(parts, moments, dbeta=input_bias).shape == moments.shape
    if x.dtype != float32 and ops.conv2d_takes_pair(x.shape, w, **where):
        pair = {"y": x, "signs": signs, "other": (x, moments), "add": half}
        parts = ops.conv2d_backward_data_masked(dy, w, x, moments, input_bias, **pair, **where)[1]
        assert parts.shape[0] == parts.shape[2] == 2
    facts = ops.empty((2, filters), np.float32), bias, bias
    assert ops.conv2d_backward_data_masked(x, w, y, *facts, transposed=True, **where)[0].shape == y.shape
    ops.conv2d_backward_weight(dy, x, out=ops.empty(w.shape, np.float32), **where)
    ops.conv2d_backward_weight(dy, x, out=ops.empty(w.shape, np.float32), accumulate=True, **where)
    norm = moments, input_bias, input_bias
    ops.conv2d(x, w, bias, norm=norm, **where)
    ops.conv2d_stats(x, w, norm=norm, **where)
    ops.conv2d_backward_weight(dy, x, norm=norm, out=ops.empty(w.shape, np.float32), **where)
    sums = ops.empty((2, filters), np.float64), ops.empty((1,), np.float64)
    for below in (None, norm) if ops.conv2d_makes_both(x.shape, w, **where) else (norm,):
        out = ops.empty(w.shape, np.float32)
        dx, parts = ops.conv2d_backward_both(dy, y, facts[0], bias, *sums, w, x, norm=below, out=out, **where)
        assert dx.shape == x.shape and (below is not None or parts is None)
    for count, add in itertools.product(range(3), (None, x, half)):
        if ops.conv2d_makes_both(x.shape, w, below=count, add=add is not None, **where):
            named = dict.fromkeys(("below", "other")[:count], (x, moments)) | {"add": add, **where}
            out = ops.empty(w.shape, np.float32)
            ops.conv2d_backward_both(dy, y, facts[0], bias, *sums, w, x, out=out, **named)
    ops.channel_sum(dy, out=db)


def call_conv2d() -> None:
    for dtype, tf32 in ((float32, 0), (float32, 1), (float32, 3), (bfloat16, 0), (float16, 0)):
        for shape, *rest in CONVOLUTIONS:
            if dtype == float16 and rest[-1] == 1:  # takes what bfloat16 takes; what lies below has it, too
                continue
            _convolve(ops.empty(shape, dtype), *rest, tf32=tf32)
            with family("generic"):
                _convolve(ops.empty(shape, dtype), *rest, tf32=tf32)
        wide = ops.empty((2, 8, 8, 96), dtype)
        for start in (0, 4, 2, 1):
            _convolve(wide[..., start : start + 32], 48, (3, 3), (1, 1), (1, 1), (1, 1), 1, tf32=tf32)
        x, w = ops.empty((4, 14, 14, 256), dtype), ops.empty((64, 1, 1, 256), dtype)
        norm = ops.empty((2, 256), float32), *parameters(256, 256)
        where = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "tf32": tf32}
        for other in ((None,) * 3, norm):
            names = dict(zip(("add_moments", "add_gamma", "add_beta"), other, strict=True))
            for statistics in (False, True):
                z, _, y, _ = ops.conv2d_join(x, *norm, x, w, **names, **where, statistics=statistics)
                assert z.shape == x.shape and y.shape == (4, 14, 14, 64)
        ops.conv2d_makes_join(x.shape, w, **where)
        if dtype == bfloat16:  # filters that do not stay, both ways
            _convolve(ops.empty((128, 14, 14, 256), dtype), 1024, (1, 1), (1, 1), (0, 0), (1, 1), 1, tf32=tf32)
            x, w = ops.empty((128, 14, 14, 1024), dtype), ops.empty((256, 1, 1, 1024), dtype)
            norm = ops.empty((2, 1024), float32), *parameters(1024, 1024)
            ops.conv2d_join(x, *norm, x, w, **where, statistics=True)
    for name in TEXTBOOK:
        with family(name):
            _convolve(ops.empty((2, 9, 11, 12), float32), 20, (3, 2), (1, 2), (2, 0), (2, 1), 1)


# (N, H, W, C), K, kernel, stride, padding of images with few channels
STEMS = [
    ((256, 224, 224, 3), 64, (7, 7), (2, 2), (3, 3)),
    ((64, 224, 224, 3), 64, (3, 3), (1, 1), (1, 1)),
    ((64, 224, 224, 3), 32, (3, 3), (2, 2), (1, 1)),
    ((64, 227, 227, 3), 96, (11, 11), (4, 4), (0, 0)),
    ((16, 128, 191, 3), 40, (5, 5), (1, 1), (2, 2)),
    ((4, 64, 64, 4), 64, (11, 11), (1, 1), (5, 5)),
    ((4, 64, 64, 4), 130, (7, 7), (2, 2), (3, 3)),
    ((512, 28, 28, 1), 20, (5, 5), (1, 1), (0, 0)),
    ((2, 15, 31, 2), 9, (2, 3), (3, 4), (1, 0)),
]


def call_conv2d_stem() -> None:
    for dtype, (shape, filters, kernel, stride, padding) in zip(itertools.cycle((bfloat16, float16)), STEMS):
        where = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1}
        x, w = ops.empty(shape, dtype), ops.empty((filters, *kernel, shape[-1]), dtype)
        y = ops.conv2d_stats(x, w, *parameters(filters), **where)[0]
        ops.conv2d(x, w, relu=True, **where)
        ops.conv2d_backward_weight(y, x, out=ops.empty(w.shape, np.float32), **where)
        moved = ops.empty(x.size + 1, dtype)[1:].reshape(shape)
        pitched = ops.empty((*y.shape[:-1], filters + 1), dtype)[..., 1:]
        ops.conv2d(moved, w, **where)
        ops.conv2d_backward_weight(pitched, moved, out=ops.empty(w.shape, np.float32), accumulate=True, **where)
        with forced(Choice("stem", "registers")):
            ops.conv2d_stats(x, w, *parameters(filters), **where)
            ops.conv2d(x, w, relu=True, **where)
            ops.conv2d(moved, w, **where)
        if filters % 16 == 0:
            size = shape[0], *((side - 1) // 2 + 1 for side in y.shape[1:3]), filters
            above = (
                ops.empty((2, filters), float32),
                None,
                ops.empty((2, filters), np.float64),
                ops.empty(1, np.float64),
            )
            facts, windows = (ops.empty(size, np.uint8), y, *above, x), {"pooling": conv2d_stem.POOLING}
            out = ops.empty(w.shape, np.float32)
            ops.conv2d_backward_weight_pooled(ops.empty(size, dtype), *facts, out=out, **windows, **where)
    for shape, filters, kernel, stride, padding in STEMS:
        where = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1, "tf32": 1}
        x, w = ops.empty(shape, float32), ops.empty((filters, *kernel, shape[-1]), float32)
        ops.conv2d(x, w, *parameters(filters), **where)
        ops.conv2d(x, w, relu=True, **where)
        ops.conv2d(ops.empty(x.size + 1, float32)[1:].reshape(shape), w, **where)


def call_conv2d_thin() -> None:
    where = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    few = [(64, 2, 0), (64, 2, 8), (40, 7, 4), (72, 8, 0), (130, 15, 1), (520, 16, 0), (3, 33, 1)]
    few += [(24, 144, 0), (144, 32, 8), (200, 25, 1), (24, 264, 8), (40, 240, 0), (48, 50, 8)]  # of 16-bit types
    for (dtype, tf32), (channels, filters, moved) in itertools.product(
        ((bfloat16, 0), (float16, 0), (float32, 0), (float32, 1)), few
    ):
        if min(channels, filters) > 16 and dtype == float32:
            continue
        x, dy = (ops.empty((300, 16, 16, c + moved), dtype)[..., moved:] for c in (channels, filters))
        w, bias = ops.empty((filters, 1, 1, channels), dtype), ops.empty(filters, np.float32)
        with family("thin"):
            ops.conv2d(x, w, bias, relu=moved == 1, **where, tf32=tf32)
            if min(channels, filters) > 32:
                continue
            ops.conv2d_backward_data(dy, w, x.shape, add=x if moved else None, **where, tf32=tf32)
            ops.conv2d_backward_weight(dy, x, out=ops.empty(w.shape, np.float32), **where, tf32=tf32)
            if (channels, filters, moved) in ((64, 2, 0), (72, 8, 0)) and dtype != float32:
                norm = ops.empty((2, channels), np.float32), *parameters(channels, channels)
                ops.conv2d(x, w, bias, norm=norm, **where)
                ops.conv2d_backward_weight(dy, x, norm=norm, out=ops.empty(w.shape, np.float32), **where)


def call_conv2d_small() -> None:
    where = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    for dtype, (n, channels, filters) in itertools.product(
        kernel_calls.STORAGE, [(128, 480, 20), (128, 20, 480), (9, 3, 5), (256, 64, 10)]
    ):
        x, w, dy = (ops.empty(s, dtype) for s in ((n, 1, 1, channels), (filters, 1, 1, channels), (n, 1, 1, filters)))
        with family("small"):
            ops.conv2d(x, w, *parameters(filters), **where)
            ops.conv2d_backward_data(dy, w, x.shape, add=x, **where)
            ops.conv2d_backward_weight(dy, x, out=ops.empty(w.shape, np.float32), **where)


# (M, K), side of a block, samples
SPARSE = [
    ((2048, 2048), 64, 4096), ((256, 2304), 128, 784), ((1000, 2048), 256, 50), ((37, 53), 2, 9), ((20, 30), 64, 0),
    ((2048, 4096), 64, 16), ((2048, 4096), 64, 32), ((2048, 4096), 64, 64), ((256, 2304), 64, 12544),
    ((256, 64), 64, 4096), ((512, 128), 64, 4096), ((8192, 8192), 64, 64),
]  # fmt: skip


def call_csb() -> None:
    _sparse_products()
    with route("generic"):
        _sparse_products()


def _sparse_products() -> None:
    for dtype, ((m, k), side, n), last in itertools.product(STORAGE, SPARSE, (False, True)):
        indptr = ops.empty(-(-m // side) * -(-k // side) + 1, np.int32)
        indices, values = ops.empty(m * k // 10, np.uint16), ops.empty(m * k // 10, dtype)
        pattern, where = (indptr, indices), ((m, k), side)
        x, dy = (ops.empty((n, f) if last else (f, n), dtype) for f in (k, m))
        y = ops.csb_matmul(*pattern, values, x, *where, features_last=last, bias=ops.empty(m, np.float32), relu=True)
        assert y.shape == dy.shape and y.dtype == dtype
        assert ops.csb_matmul(*pattern, values, dy, *where, features_last=last, transposed=True).shape == x.shape
        assert ops.csb_pick(*pattern, ops.csb_expand(*pattern, values, *where), *where).shape == values.shape
        wide = ops.empty((x.shape[0], x.shape[1] + 3), dtype)[:, 1 : 1 + x.shape[1]]
        ops.csb_matmul(*pattern, values, wide, *where, features_last=last)
        if dtype == float32:
            for split in ("tf32x3", "bf16x3"):
                ops.csb_matmul(*pattern, values, wide, *where, features_last=last, split=split)
            few = ops.empty(m * k // 50, np.uint16), ops.empty(m * k // 50, dtype)
            ops.csb_matmul(indptr, *few, dy, *where, features_last=last, transposed=True, split="tf32x3")


def call_csb_conv2d() -> None:
    cases = itertools.product(STORAGE, [(64, 64, 3, 1), (70, 40, 3, 2), (8, 300, 5, 1)], (8, 64, 256))
    for dtype, (c, k, size, stride), side in cases:
        shape = k, size * size * (-(-c // side) * side)
        indptr = ops.empty(-(-k // side) * (shape[1] // side) + 1, np.int32)
        pattern, values = (indptr, ops.empty(1000, np.uint16)), ops.empty(1000, dtype)
        geometry = {"kernel": (size, size), "stride": (stride, stride), "padding": (1, 1), "dilation": (1, 1)}
        x = ops.empty((16, 28, 28, c), dtype)
        dy = ops.csb_conv2d(*pattern, values, x, shape, side, **geometry, bias=ops.empty(k, np.float32))
        dx = ops.csb_conv2d_backward_data(*pattern, values, dy, x.shape, shape, side, **geometry)
        assert dy.shape[3] == k and dx.shape == x.shape
        out = ops.empty(1000, np.float32)
        ops.csb_conv2d_backward_weight(*pattern, dy, x, shape, side, **geometry, out=out)
        if dtype == float32:
            ops.csb_conv2d(*pattern, values, x, shape, side, **geometry, tf32=1)


def call_csb_sampled() -> None:
    for dtype, ((m, k), side, n), last in itertools.product(STORAGE, SPARSE, (False, True)):
        indptr = ops.empty(-(-m // side) * -(-k // side) + 1, np.int32)
        indices, out = ops.empty(m * k // 10, np.uint16), ops.empty(m * k // 10, np.float32)
        x, dy = (ops.empty((n, f) if last else (f, n), dtype) for f in (k, m))
        wide = ops.empty((x.shape[0], x.shape[1] + 3), dtype)[:, 1 : 1 + x.shape[1]]
        for operand, accumulate in ((x, False), (wide, True)):
            ops.csb_sampled(
                indptr, indices, dy, operand, (m, k), side, features_last=last, out=out, accumulate=accumulate
            )
        if dtype == float32:
            ops.csb_sampled(indptr, indices, dy, wide, (m, k), side, features_last=last, out=out, split="bf16x3")


CALLS: dict[str, Callable[[], None]] = kernel_calls.CALLS | {
    name.removeprefix("call_"): function for name, function in globals().items() if name.startswith("call_")
}


def _compiled(variants, arch):
    """What compiling each variant told."""
    return dict(zip(variants, nvrtc.compile_all(variants, arch, PROCESSES), strict=True))


def _kernel(compiled, launch):
    return next(k for k in compiled[launch.stem, launch.defines].kernels if k.name == launch.name)


def _all_problems(launches, compiled, device) -> set[str]:
    """Of those launches whose variants are among ``compiled``."""
    problems = {note for report in compiled.values() for note in SERIALISED.findall(report.log)}
    for launch in launches:
        if (launch.stem, launch.defines) in compiled:
            for problem in problems_of(_kernel(compiled, launch), prod(launch.block), launch.shared, device):
                problems.add(f"{launch.stem}.cu {launch.name} {dict(launch.defines)} {launch.block}: {problem}")
    return problems


@functools.cache
def _launches(name: str) -> dict[str, list]:
    """What all calls launch on a device, by the file of the kernel."""
    found: dict[str, list] = {}
    for call in CALLS.values():
        with dry_run(BUILT_IN[name]) as log:
            call()
        assert log.launches, call.__name__
        for launch in log.launches:
            found.setdefault(launch.stem, []).append(launch)
    return found


FILES = sorted(path.stem for name, path in nvrtc.sources().items() if name.endswith(".cu"))


def _largest(launches, compiled) -> set:
    """Of each kernel the one among ``compiled`` whose blocks take most registers."""
    found: dict[tuple, list] = {}
    for launch in launches:
        if (variant := (launch.stem, launch.defines)) in compiled:
            registers = _kernel(compiled, launch).registers * int(np.prod(launch.block))
            found.setdefault((launch.stem, launch.name), []).append((registers, variant))
    return {max(group, key=lambda entry: (entry[0], str(entry)))[1] for group in found.values()}


@pytest.mark.slow
@pytest.mark.parametrize("stem", FILES)
@NEEDS_NVRTC
def test_every_variant_compiles_and_fits(stem):
    """Of a file's kernels for Hopper, whichever operation launches them, so many variants of float32 and bfloat16 that
    each value of a macro meets each of any other; as float16, and for sm_80, those of them that take most registers of
    each kernel; for sm_80 and 86 further what only these launch, where two values meet for the first time.

    MINIDL_EVERY_VARIANT=1 compiles all for Hopper, and what is launched on the others alone. That was done once: of 180
    kernels 13 had a variant that took more registers, at most 25 more; float16 took 3 more at most, sm_80 11, and sm_86
    13 more than sm_80. None was near a limit.
    """
    device, arch = BUILT_IN["H200"], nvrtc.target((9, 0))
    launches = _launches("H200").get(stem, [])
    tiles = itertools.chain(*_covering_tiles().values(), *weight_tiles.covering_tiles().values())  # of other laws
    compiled = _compiled(covering(distinct(launches), tiles), arch)
    largest = _largest(launches, compiled)
    known = {(launch.stem, launch.defines) for launch in launches}
    halves = _compiled([v for v in known if v not in compiled and as_bfloat16(v) in largest], arch)
    problems = _all_problems(launches, compiled | halves, device)
    for (file, defines), report in (compiled | halves).items():
        for kernel, opcodes in machine_code.kernels(report.image):
            if problem := hasty(file, kernel, opcodes):
                problems.add(f"{file}.cu {kernel} {dict(defines)}: {problem}")

    launches = _launches("A100").get(stem, [])
    ampere = _compiled(covering(distinct(launches, known), compiled) + list(_largest(launches, compiled)), "sm_80")
    # Of what is compiled for others only: shared memory is the same on all.
    problems |= _all_problems(launches, compiled | ampere, BUILT_IN["A100"])
    known |= {(launch.stem, launch.defines) for launch in launches}

    launches = _launches("RTX 3090").get(stem, [])
    reports = compiled | ampere
    reports |= _compiled(covering(distinct(launches, known), reports), "sm_86")
    problems |= _all_problems(launches, reports, BUILT_IN["RTX 3090"])
    assert not problems, "\n".join(sorted(problems))


@NEEDS_NVRTC
def test_the_assembler_makes_the_same_of_sm_86_and_sm_89():
    for stem in ("batch_norm", "conv2d", "csb"):
        file, defines = max(distinct(_launches("L40")[stem]), key=str)
        older, newer = (nvrtc.build(file, arch, dict(defines)).kernels for arch in ("sm_86", "sm_89"))
        assert older == newer


HASTY = {
    "": "waits for its predecessor 0 times",
    "if (x[0] > 0.0f) return; await_predecessor();": "may touch global memory before",
    "if (threadIdx.x) await_predecessor(); else await_predecessor();": "waits for its predecessor 2 times",
    "if (threadIdx.x > 31) return; await_predecessor();": "may end before",
    "let_next_in(); await_predecessor(); x[0] = 1.0f;": "lets the next kernel in before",
    "await_predecessor(); let_next_in(); x[0] = 1.0f;": None,
    "__shared__ float s; s = 1.0f; await_predecessor(); x[1] = s;": None,
}


@pytest.mark.parametrize("body", HASTY)
@NEEDS_NVRTC
def test_a_kernel_that_does_not_wait_in_time_is_found(body):
    source = nvrtc.source_of("spin") + f'extern "C" __global__ void k(float* x) {{ {body} x[0] = x[2]; }}'
    image = nvrtc.compile(source, "k.cu", nvrtc.target((9, 0))).image
    opcodes = dict(machine_code.kernels(image))
    found, expected = hasty("k", "k", opcodes["k"]), HASTY[body]
    assert found is None if expected is None else expected in found, found
    assert hasty("spin", "spin", opcodes["spin"]) is None
    assert "listed" in (hasty("spin", "k", opcodes["k"]) or "") or body == ""


# Before the name may stand a macro, and attributes whose own brackets nest once.
_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:[A-Z]+\s+)?(?:__\w+__\((?:[^()]|\([^()]*\))*\)\s+)*(\w+)\(')


def test_every_kernel_is_launched_by_a_call():
    """Only of what is launched the law above says that it fits and spills nothing."""
    launched = {(of.stem, of.name) for name in ("A100", "H200") for of in itertools.chain(*_launches(name).values())}
    written = {(stem, kernel) for stem in FILES for kernel in _ENTRY.findall(nvrtc.source_of(stem))}
    assert written == launched


WHOLE = (*conv2d_hopper_tiles.TILES, conv2d_hopper_tiles.SMALL)


def _tiles_of_hopper():
    """Whole ones and those that clusters cut, of plain convolutions and of those that normalise their input."""
    deep = convolution("test", (4, 16, 16, 256), (256, 1, 1, 256), (1, 1), (0, 0), (1, 1), 1)
    for parts, normalized in itertools.product(conv2d_hopper_tiles.PARTS, (False, True)):
        yield from conv2d_hopper_tiles.candidates(deep, False, BUILT_IN["H200"], normalized, parts)
    yield from HALO_TILES


def _planned_for(tile) -> dict:
    """A tile's variants, and their launches: with and without strides, both directions, TF32 and bfloat16."""
    device, planned = BUILT_IN["H200"], {}
    for code, backward, (kernel, stride) in itertools.product((0, 1), (False, True), ((1, 1), (3, 1), (3, 2))):
        c = 64 * tile.parts
        shape, filters, pair = (4, 16, 16, c), (c, kernel, kernel, c), (stride, stride)
        conv = convolution("test", shape, filters, pair, (kernel // 2,) * 2, (1, 1), 1)
        launches = []
        if code and kernel == 1 and tile in WHOLE:
            for parts in (2, 4) if backward else (1, 8):
                launches += conv2d_hopper.plan(conv, code, backward, (c, 0), False, device, (tile, 1), parts=parts)
        if tile in conv2d_hopper_tiles.candidates(conv, backward, device, parts=tile.parts, code=code):
            launches += conv2d_hopper.plan(conv, code, backward, (c, c), True, device, (tile, 1))
            if code and backward:
                signed = {"masked": conv2d_hopper.SIGNED}
                for spaced in {False, conv2d_hopper.adds_spaced(conv, code)}:
                    signed["spaced"] = spaced
                    launches += conv2d_hopper.plan(conv, code, True, (c, c, c, 32), True, device, (tile, 1), **signed)
        if code and not backward and tile in conv2d_hopper_tiles.candidates(conv, False, device, True, tile.parts):
            strided = convolution("test", shape, filters, (2, 2), (kernel // 2,) * 2, (1, 1), 1)
            for one, how in itertools.product({conv, strided}, (1, 2)):
                launches += conv2d_hopper.plan(one, code, False, (c, 0), False, device, (tile, 1), normalized=how)
        if code == 1 and kernel == 3 and tile in (*WHOLE, *conv2d_hopper_tiles.SWAPPED, conv2d_hopper_tiles.PAIRED):
            # A last stage that begins early.
            tailed, more = convolution("test", (4, 16, 16, 112), (112, 3, 3, 112), pair, (1, 1), (1, 1), 1), {}
            if backward:
                more["masked"] = conv2d_hopper.SIGNED
            launches += conv2d_hopper.plan(tailed, 1, backward, (112,) * 4, True, device, (tile, 1), **more)
        if code == 1 and kernel == 3 and tile in WHOLE:
            wide = 2 * tile.columns
            split = convolution("test", (4, 16, 16, wide), (wide, 3, 3, wide // 2), pair, (1, 1), (1, 1), 2)
            launches += conv2d_hopper.plan(split, code, backward, (wide, wide), True, device, (tile, 1))
        for launch in launches:
            planned[launch.stem, tuple(launch.defines.items())] = launch
    return planned


@functools.cache
def _covering_tiles() -> dict[str, list]:
    return covering_each({tile.name: _planned_for(tile) for tile in _tiles_of_hopper()})


@pytest.mark.parametrize("tile", dict.fromkeys(_tiles_of_hopper()), ids=lambda tile: tile.name)
@NEEDS_NVRTC
def test_every_tile_of_hopper_compiles_and_fits(tile):
    """Whichever tile sizes or a tuner choose: each with each option that it can have, and two options in some tile.

    float16 is another word in the instructions, and takes the same registers and shared memory.
    """
    device, planned = BUILT_IN["H200"], _planned_for(tile)
    for launch in planned.values():
        assert launch.shared <= device.shared_per_block and launch.block == tile.threads
    variants = _covering_tiles()[tile.name]
    reports = nvrtc.compile_all(variants, nvrtc.target(device.arch), PROCESSES)
    for variant, report in zip(variants, reports, strict=True):
        check_report("conv2d_hopper", report, tile.threads * tile.resident, planned[variant].shared, device)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_launch_keeps_to_the_limits_of_the_device(name):
    """Grid, block and dynamic shared memory; the dry run itself asserts them."""
    assert all(0 not in launch.grid for launch in itertools.chain(*_launches(name).values()))


# Of the table, but without a kernel.
SERVICES = {"Array", "name", "require_device", "from_dlpack", "uploader", "aside", "rejoin"}


def test_every_operation_of_the_table_is_called():
    """A new operation joins this test, or this test fails."""
    text = "".join(inspect.getsource(function) for function in (*CALLS.values(), _convolve, _sparse_products))
    for name in ops.__all__:
        if name not in SERVICES:
            assert f"ops.{name}(" in text, f"no dry run calls {name}"
