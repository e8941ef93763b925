"""`--megatron PATH` (or CSAKIT_MEGATRON=PATH) names a Megatron-LM checkout for the tests that need the real code."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--megatron", metavar="PATH", help="a Megatron-LM checkout that has compressed sparse attention (csa.py)")


@pytest.fixture(scope="session")
def megatron(pytestconfig: pytest.Config):
    """The csa module of the checkout."""
    path = pytestconfig.getoption("--megatron", default=None) or os.environ.get("CSAKIT_MEGATRON")
    if not path:
        pytest.skip("no Megatron-LM checkout: pass --megatron PATH or set CSAKIT_MEGATRON")
    assert (Path(path) / "megatron" / "core").is_dir(), f"{path} is not a Megatron-LM checkout"
    sys.path.insert(0, str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.experimental_attention_variant import csa
    assert Path(csa.__file__).is_relative_to(Path(path).resolve()), f"another Megatron was imported: {csa.__file__}"
    return csa
