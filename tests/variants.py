"""Which variants of kernels a law compiles, where all would take too long."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping

import pytest

from minidl.cuda import nvrtc
from minidl.cuda.device import Launch

Variant = tuple[str, tuple[tuple[str, int | str], ...]]


def _nvrtc_reason() -> str | None:
    try:
        nvrtc.version()
    except ImportError as error:
        return f"needs NVRTC: {error}"
    return None


NEEDS_NVRTC = pytest.mark.skipif(_nvrtc_reason() is not None, reason=str(_nvrtc_reason()))
EVERY = os.environ.get("MINIDL_EVERY_VARIANT", "0") not in ("", "0")


def distinct(launches: Iterable[Launch], known: Iterable[Variant] = ()) -> list[Variant]:
    """The variants launched that are not ``known``, each once; of float16 only what is not there for bfloat16, too."""
    every = dict.fromkeys((launch.stem, launch.defines) for launch in launches)
    twins = every.keys() | known
    return [v for v in every if v not in known and ((twin := as_bfloat16(v)) == v or twin not in twins)]


def as_bfloat16(variant: Variant) -> Variant:
    stem, defines = variant
    return stem, tuple((key, 1 if key.endswith("DTYPE") and value == 2 else value) for key, value in defines)


def covering(variants: Iterable[Variant], known: Iterable[Variant] = ()) -> list[Variant]:
    """So few of ``variants`` that any two macros of a file meet there with any two values they have in one of them.

    What is wrong with a variant is nearly always one value's fault, or that of two together (D. Kuhn, D. Wallace,
    A. Gallo, "Software fault interactions and implications for software testing", IEEE TSE 30(6), 2004). A macro that
    is not defined is a value, too. Of variants that bring as many new pairs the one with the largest numbers is taken,
    which mostly takes most registers. All are, where the environment has MINIDL_EVERY_VARIANT=1.

    Args:
        known: compiled in any case: their pairs are covered.
    """
    variants, known = list(variants), list(known)
    if EVERY:
        return variants
    macros: dict[str, dict[str, None]] = {}
    for stem, defines in (*variants, *known):
        macros.setdefault(stem, {}).update(dict.fromkeys(key for key, _ in defines))

    def pairs(variant: Variant) -> set:
        stem, defines = variant
        values = dict.fromkeys(macros[stem]) | dict(defines)
        return {(stem, *pair) for pair in itertools.combinations([("stem", stem), *values.items()], 2)} | {stem}

    covered = set().union(*map(pairs, known))
    rest, chosen = {variant: pairs(variant) for variant in variants}, []
    while rest := {variant: new for variant, facts in rest.items() if (new := facts - covered)}:
        chosen.append(max(rest, key=lambda variant: (len(rest[variant]), _size(variant))))
        covered |= rest[chosen[-1]]
    return chosen


def covering_each(groups: Mapping[str, Iterable[Variant]]) -> dict[str, list[Variant]]:
    """Of each group, as `covering` chooses of all together where a group's name is the value of one more macro."""
    named = ((stem, (("", name), *rest)) for name, variants in groups.items() for stem, rest in variants)
    chosen: dict[str, list[Variant]] = {name: [] for name in groups}
    for stem, ((_, name), *rest) in covering(named):
        chosen[name].append((stem, tuple(rest)))
    return chosen


def _size(variant: Variant) -> float:
    return sum(math.log2(1 + value) for _, value in variant[1] if isinstance(value, int) and value > 0)
