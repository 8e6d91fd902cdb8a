"""Stops a copy whose compiled modules are missing in its own words, before Python does in others.

A clone that was not built, that was built for another Python, or to which a newer commit brought one more.
"""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def require_built(folder: Path) -> None:
    """Each ``_*.pyx`` one level below ``folder`` has its extension module for this Python beside it.

    Raises:
        ImportError: naming those that have not, and how to build them.
    """
    sources = sorted(folder.glob("*/_*.pyx"))
    missing = [
        f"{source.parent.name}/{source.stem}"
        for source in sources
        if not any(source.with_name(source.stem + suffix).exists() for suffix in EXTENSION_SUFFIXES)
    ]
    if missing:
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        which = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        which = "its compiled modules are" if len(missing) == len(sources) else which
        remedy = f"make -C {folder.parent} build PYTHON={sys.executable}"
        raise ImportError(f"minidl in {folder} is not built for {python}: {which} missing; build with: {remedy}")


try:
    require_built(Path(__file__).parent)
except ImportError as error:
    # The command gets no further than this: its line is written here. "-m" stands there while Python looks for what
    # follows it.
    if [Path(program).name for program in sys.argv[:1]] not in (["minidl"], ["-m"]):
        raise
    print(f"minidl: {error}", file=sys.stderr)
    sys.exit(2)
