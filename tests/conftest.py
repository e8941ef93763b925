"""Fixtures and settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "csakit", derandomize=True, deadline=None, max_examples=20, suppress_health_check=list(HealthCheck), database=None
)
settings.load_profile("csakit")


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest):
    """Each backend of the ops in turn, forced."""
    import csakit

    with csakit.backend(request.param):
        yield request.param
