"""How long idle OpenMP threads spin: our choice where the user made none, and nothing else sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import os
before = dict(os.environ)
import minidl.cpu
assert os.environ == before
"""


def spin_count(**environment):
    """What GNU's runtime says that it took from its environment when minidl loaded it."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**own, "OMP_DISPLAY_ENV": "verbose", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if found is None:
        pytest.skip("not built with GNU's OpenMP")
    return int(found[1])


def test_idle_threads_spin_briefly_unless_the_user_says_otherwise():
    from minidl.cpu.openmp import SPIN_COUNT

    assert spin_count() == SPIN_COUNT
    assert spin_count(GOMP_SPINCOUNT="77") == 77
    assert spin_count(OMP_WAIT_POLICY="passive") == 0
    assert spin_count(OMP_WAIT_POLICY="active") > 1000 * SPIN_COUNT
