"""What would keep a compiled kernel from running on a device, or from running as it is meant to."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from minidl.cuda import machine_code, nvrtc
from minidl.cuda.device import DeviceRecord

REGISTERS = 65536  # of a multiprocessor, on every architecture claimed
# ptxas waits for each product of a warpgroup, or ignores setmaxnreg. (C7519 says that it has put in an arrival, which
# waits for nothing but registers that are being written: NVRTC 13.0 where 13.1 sees that there are none.)
SERIALISED = re.compile(r"\(C75(?!19)\d\d\)[^\n]*")


def may_spill() -> int:
    """Bytes of a thread that may lie in memory for want of registers: before NVRTC 13.3 those of ten that the warps of
    conv2d_both.cu lack, which make the gradient of 512 filters; 13.0 lacks two to six for variants of three others."""
    return 0 if nvrtc.version() >= (13, 3) else 40


def problems_of(kernel, threads: int, shared: int, device: DeviceRecord) -> Iterator[str]:
    """What would keep a compiled kernel from running on this device, or from running as it is meant to.

    Args:
        threads: of all blocks that are to be on a multiprocessor at once.
        shared: bytes of shared memory that a launch asks for.
    """
    if kernel.spill_bytes > may_spill():
        yield f"spills {kernel.spill_bytes} bytes with {kernel.registers} registers"
    if kernel.shared_bytes + shared > device.shared_per_block:
        yield f"wants {kernel.shared_bytes} + {shared} bytes of shared memory of {device.shared_per_block}"
    # Registers are given to whole warps, in units of eight per thread.
    if -(-threads // 32) * 32 * (-(-kernel.registers // 8) * 8) > REGISTERS:
        yield f"wants {kernel.registers} registers for each of {threads} threads"


# What reads or writes global memory on sm_90, by the operation's lowest 9 bits; the others are its operands' kinds:
# LD, LDG, ST, STG, ATOM, RED, ATOMG, LDGSTS, UTMALDG, UTMASTG, UTMAREDG, UBLKCP.
_GLOBAL = [0x180, 0x181, 0x185, 0x186, 0x18A, 0x18E, 0x1A8, 0x1AE, 0x1B4, 0x1B5, 0x1B6, 0x1BA]
# Touches no memory; kernels that meet other GPUs, before which a stream waits for another one anyway.
WITHOUT_WAIT = {"spin", "all_reduce"}


def hasty(stem, name, opcodes) -> str | None:
    """What is wrong about when a kernel of sm_90 waits for the one before it, by the order of its code."""
    waits = np.flatnonzero(opcodes == machine_code.WAIT)
    touches = np.flatnonzero(np.isin(opcodes & 0x1FF, _GLOBAL))
    if stem in WITHOUT_WAIT:
        return "waits, and is listed as one that does not" if waits.size else None
    if waits.size != 1:
        return f"waits for its predecessor {waits.size} times: call await_predecessor() once, on every path"
    if touches.size and touches[0] < waits[0]:
        return "may touch global memory before await_predecessor()"
    if (opcodes[: waits[0]] == machine_code.LET_IN).any():
        return "lets the next kernel in before await_predecessor()"
    if (opcodes[: waits[0]] == machine_code.EXIT).any():
        return "may end before await_predecessor(), and let those behind it begin too early"
    return None


def check_report(stem: str, report, threads: int, shared: int, device: DeviceRecord) -> None:
    """Of one kernel compiled for sm_90: it fits, nothing makes its products wait, it waits for what is before it."""
    (kernel,) = report.kernels
    found = [*problems_of(kernel, threads, shared, device), *SERIALISED.findall(report.log)]
    if problem := hasty(stem, kernel.name, dict(machine_code.kernels(report.image))[kernel.name]):
        found.append(problem)
    assert not found, found
