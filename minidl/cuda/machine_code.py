"""What the machine code of kernels says about them: which of them wait for the kernel before.

The launcher asks the code itself, so that no list of kernels that wait has to be kept in step with them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np

_ELF, _TEXT = b"\x7fELF", b".text."
WAIT = 0x82E  # ACQBULK, what the assembler makes of griddepcontrol.wait for sm_90
LET_IN = 0x82D  # PREEXIT, of griddepcontrol.launch_dependents
EXIT = 0x94D
_INSTRUCTION = np.dtype([("low", "<u8"), ("high", "<u8")])
_OPCODE = 0xFFF
_ENTRY = re.compile(r"^[^\n]*\.entry\s+(\w+)(.*?)^\}", re.DOTALL | re.MULTILINE)


def waiting(image: bytes) -> frozenset[str]:
    """The kernels of a cubin, or of PTX text, that call await_predecessor() (common.cuh)."""
    if image.startswith(_ELF):
        return frozenset(name for name, opcodes in kernels(image) if (opcodes == WAIT).any())
    return frozenset(name for name, body in _ENTRY.findall(image.decode()) if "griddepcontrol.wait" in body)


def kernels(image: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """The kernels of a cubin (sm_70 to sm_90): names, and the operations, 12 bits each, in order of their addresses."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<3H", image, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", image, start + size * i) for i in range(count)]  # name, offset, bytes
    for label, offset, length in sections:
        label += sections[names][1]
        name = image[label : image.index(b"\0", label)]
        if name.startswith(_TEXT):
            code = np.frombuffer(image, _INSTRUCTION, length // _INSTRUCTION.itemsize, offset)
            yield name.removeprefix(_TEXT).decode(), (code["low"] & _OPCODE).astype(np.uint16)
