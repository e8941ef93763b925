"""The whole table of what catches what, run once."""

from __future__ import annotations

import pytest

from csakit import audit


@pytest.fixture(scope="session")
def table() -> audit.Matrix:
    """Both right candidates and every known mistake under every probe."""
    return audit.matrix()
