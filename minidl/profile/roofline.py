"""Least times and achieved rates: what a pass must cost at the ceilings of its machine, and how near it comes.

Three ceilings bound a pass: the rate of the units that it computes with, the bandwidth of memory times its arithmetic
intensity (Williams, Waterman and Patterson 2009), and for an all-reduce the bandwidth of the network.

Units: FLOP (2 per multiply-add), bytes, milliseconds, 10^12 FLOP/s, 10^9 bytes/s. What is not known is None, and so is
what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Ceilings = Mapping[str, Any]


def floor(
    flop: float | None, moved: float | None, ceilings: Ceilings | None, dtype: str, matrix: bool
) -> tuple[float | None, str | None]:
    """(least milliseconds, what bounds them: "compute" or "memory"; None for no work) of a pass.

    Args:
        flop, moved: floating-point operations and least bytes of device memory.
        ceilings: a record of `minidl.profile.ceilings`.
        dtype: name of a precision.
        matrix: the FLOP are those of products, for matrix units. Others run on vector units, in float32 whatever the
            storage.
    """
    if flop is None or moved is None or ceilings is None:
        return None, None
    if matrix:
        rate = matrix_rate(ceilings, dtype)
    else:
        rate = (ceilings.get("vector_tflops") or {}).get("fp32")
    compute, memory = _ms(flop, rate, 1e9), _ms(moved, ceilings.get("copy_gb_per_s"), 1e6)
    if compute is None or memory is None:
        return None, None
    if compute == memory == 0.0:
        return 0.0, None
    return (compute, "compute") if compute > memory else (memory, "memory")


def matrix_rate(ceilings: Ceilings, dtype: str) -> float | None:
    """10^12 FLOP/s of products in the precision ``dtype``; those of tf32x3 are three of TF32 each."""
    rates = ceilings.get("matrix_tflops") or {}
    rate = rates.get("tf32" if dtype == "tf32x3" else dtype)
    return rate / 3 if rate and dtype == "tf32x3" else rate


def network_floor(wire: float | None, ceilings: Ceilings | None) -> float | None:
    """Least milliseconds of an all-reduce with ``wire`` bytes per rank: at the bus bandwidth, without latency."""
    if wire is None or ceilings is None:
        return None
    return _ms(wire, (ceilings.get("all_reduce") or {}).get("bus_gb_per_s"), 1e6)


def _ms(work: float, rate: float | None, per_ms: float) -> float | None:
    """``work`` at ``rate``, whose unit makes ``per_ms`` of it in a millisecond; no work takes no time at any rate."""
    if work == 0:
        return 0.0
    return work / (rate * per_ms) if rate else None


def wire_bytes(gradient_bytes: float, ranks: int) -> float:
    """What each rank sends in a ring all-reduce of ``gradient_bytes``: 2(n-1)/n of them."""
    return 2 * (ranks - 1) * gradient_bytes / ranks


def communication_intensity(flop: float | None, wire: float | None) -> float | None:
    """FLOP of a layer's three passes per byte that its all-reduce sends; None where nothing is sent.

    A convolution with N·P·Q output pixels on n ranks has 0.75·N·P·Q·n/(n-1) with float32 gradients, whatever its
    channels and its kernel.
    """
    return flop / wire if flop is not None and wire else None


def achieved(flop: float | None, moved: float | None, ms: float | None) -> tuple[float | None, float | None]:
    """(TFLOP/s, GB/s) of so much work in ``ms``; None for what is not known, and for work that took no time here."""
    return _rate(flop, ms, 1e9), _rate(moved, ms, 1e6)


def _rate(work: float | None, ms: float | None, per_ms: float) -> float | None:
    return work / (ms * per_ms) if work is not None and ms else None


def fill(row: dict[str, Any], ceilings: Ceilings | None, *, matrix: bool) -> None:
    """Set what follows from a row's own figures: intensity, floor, bound, share of the roof, achieved rates.

    Args:
        row: a row of a layer and a pass, with flop, bytes, ms and dtype; an all_reduce row with wire_bytes and, where
            the transfer alone was timed, transfer_ms.
        ceilings: of the row's machine; None: not known.
        matrix: the layer's FLOP are those of products; see `floor`.
    """
    ms = row.get("ms")
    if row["pass"] == "all_reduce":
        transfer_ms = row.get("transfer_ms")
        least = network_floor(row.get("wire_bytes"), ceilings)
        bound = "network" if least else None
        row["bus_gb_per_s"] = _rate(row.get("wire_bytes"), ms if transfer_ms is None else transfer_ms, 1e6)
    else:
        flop, moved = row.get("flop"), row.get("bytes")
        least, bound = floor(flop, moved, ceilings, row["dtype"], matrix)
        row["intensity"] = flop / moved if flop is not None and moved else None
        row["tflops"], row["gb_per_s"] = achieved(flop, moved, ms)
    row |= {"floor_ms": least, "bound": bound, "roof_share": least / ms if least is not None and ms else None}
