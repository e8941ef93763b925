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


@pytest.fixture
def main_of(monkeypatch: pytest.MonkeyPatch):
    """The `main` of an example, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return lambda name: runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def test_the_trainer_of_the_example_lowers_both_losses(main_of, tmp_path: Path) -> None:
    history = main_of("trainer_run")(str(tmp_path))
    warmup, sparse = ([entry for entry in history if entry["stage"] == stage] for stage in ("warmup", "sparse"))
    assert (len(warmup), len(sparse)) == (4, 2)
    assert warmup[-1]["indexer_loss"] < 0.7 * warmup[0]["indexer_loss"]
    assert warmup[-1]["loss"] == pytest.approx(warmup[0]["loss"], rel=0.01), "the model itself is frozen"
    assert sparse[-1]["loss"] < 0.95 * warmup[0]["loss"]


def test_the_accelerate_loop_of_the_example_trains_alike_for_one_and_four_micro_batches(main_of) -> None:
    loop = main_of("accelerate_loop")
    one, four = loop(1), loop(4)
    assert one.keys() == four.keys()
    assert max(float((four[name] - one[name]).abs().max()) for name in one) < 1e-5


def test_the_adapters_of_the_example_teach_the_indexers_and_come_back_from_a_file(main_of, tmp_path: Path) -> None:
    losses = main_of("lora_indexer")(str(tmp_path))
    assert losses[14] < losses[0] and (tmp_path / "adapter_model.safetensors").exists()


def test_the_comparison_with_the_stock_model_differs_by_rounding(main_of) -> None:
    logits, gradients = main_of("compare_with_stock")()
    assert logits < 1e-4 and gradients < 1e-4
