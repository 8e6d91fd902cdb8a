"""Jobs on GPUs may take longer: starting CUDA and NCCL takes seconds by itself."""

from __future__ import annotations

import pytest

from tests.dist import job


@pytest.fixture(autouse=True)
def patient(request, monkeypatch):
    if request.node.get_closest_marker("multi_gpu"):
        monkeypatch.setattr(job, "TIMEOUT_SECONDS", 90.0)
