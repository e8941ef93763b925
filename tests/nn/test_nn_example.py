"""The example of a single layer runs and learns."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_layer.py"


def test_the_example_of_a_single_layer_overfits_its_indexer(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = runpy.run_path(str(EXAMPLE))["main"]()
    assert after < before / 4
    assert re.fullmatch(rf"KL .*: {before:.4f} before, {after:.4f} after 60 steps\n", capsys.readouterr().out)
    assert len(EXAMPLE.read_text().splitlines()) <= 40
