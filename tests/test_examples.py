"""The examples run, and the code in the README is code that runs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_picture_of_the_readme_shows_another_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["teacher_picture.py", str(tmp_path / "teacher.svg")])
    runpy.run_path(str(ROOT / "examples/teacher_picture.py"), run_name="__main__")
    assert float(re.search(r"= (\d\.\d+) nats", capsys.readouterr().out)[1]) > 0.1
    assert (tmp_path / "teacher.svg").read_text().startswith("<?xml")


def test_the_first_code_of_the_readme_trains_an_indexer() -> None:
    """It runs as it stands, and its loss reaches the indexer's tensors and no other."""
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    tensors = {n: t for n, t in names.items() if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad}
    assert all(t.grad is not None and t.grad.isfinite().all() and t.grad.any() for t in tensors.values()), tensors.keys()
    assert len(tensors) >= 5
