"""Optimizer groups, learning rates, clipping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from csakit.train.config import StageConfig
from csakit.train.stages import clip_gradients, learning_rate, make_optimizer, set_learning_rates


class Toy(nn.Module):
    """A backbone with a matrix and a vector, and an indexer with the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"linear": nn.Linear(2, 2), "indexer": nn.Linear(2, 2)})


def test_indexer_and_backbone_matrices_and_vectors_have_groups_of_their_own():
    optimizer = make_optimizer(Toy(), StageConfig(weight_decay=0.1))
    groups = {(group["part"], group["weight_decay"]): group["names"] for group in optimizer.param_groups}
    assert groups == {
        ("backbone", 0.1): ["layer.linear.weight"],
        ("backbone", 0.0): ["layer.linear.bias"],
        ("indexer", 0.1): ["layer.indexer.weight"],
        ("indexer", 0.0): ["layer.indexer.bias"],
    }


def test_what_does_not_train_is_not_in_the_optimizer():
    model = Toy()
    model.layer["linear"].requires_grad_(False)
    assert [name for group in make_optimizer(model, StageConfig()).param_groups for name in group["names"]] == [
        "layer.indexer.weight",
        "layer.indexer.bias",
    ]
    with pytest.raises(ValueError, match="expected parameters that train"):
        make_optimizer(model.requires_grad_(False), StageConfig())


def test_the_learning_rate_rises_in_a_line_falls_in_a_cosine_and_ends_at_its_floor():
    stage = StageConfig(steps=110, ramp=10, learning_rate=1.0, indexer_learning_rate=2.0, floor=0.1)
    rates = [learning_rate(stage, "backbone", step) for step in range(110)]
    assert rates[0] == pytest.approx(1 / 11) and rates[9] == pytest.approx(10 / 11) and rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and 0.1 < rates[-1] < 0.101
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [learning_rate(stage, "indexer", step) for step in range(110)] == pytest.approx([2 * rate for rate in rates])


def test_a_schedule_stays_at_the_peak_or_falls_in_a_line():
    stage = StageConfig(steps=110, ramp=10, learning_rate=1.0, floor=0.2, schedule="constant")
    assert [learning_rate(stage, "backbone", step) for step in range(10, 110)] == [1.0] * 100
    falling = [learning_rate(replace(stage, schedule="linear"), "backbone", step) for step in range(10, 110)]
    assert falling == pytest.approx([1 - 0.008 * step for step in range(100)])


@pytest.mark.parametrize("steps, ramp", [(1, 0), (1, 10), (5, 5), (3, 10)])
def test_a_stage_shorter_than_its_ramp_has_learning_rates_above_zero(steps, ramp):
    stage = StageConfig(steps=steps, ramp=ramp, learning_rate=1.0)
    assert all(0 < learning_rate(stage, "backbone", step) <= 1 for step in range(steps))


def test_each_part_gets_its_own_learning_rate():
    optimizer = make_optimizer(Toy(), StageConfig())
    rates = set_learning_rates(optimizer, StageConfig(ramp=0, learning_rate=0.5, indexer_learning_rate=0.25), 0)
    assert rates == {"backbone": 0.5, "indexer": 0.25}
    assert {(group["part"], group["lr"]) for group in optimizer.param_groups} == {("backbone", 0.5), ("indexer", 0.25)}


def test_a_large_indexer_gradient_does_not_shrink_the_backbones():
    model = Toy()
    optimizer = make_optimizer(model, StageConfig())
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 100.0 if "indexer" in name else 0.1)
    before = model.layer["linear"].weight.grad.clone()
    norms = clip_gradients(optimizer, 1.0)
    assert torch.equal(model.layer["linear"].weight.grad, before)
    indexer = torch.cat([parameter.grad.flatten() for parameter in model.layer["indexer"].parameters()])
    assert indexer.norm() == pytest.approx(1.0, rel=1e-5)
    assert norms == {"backbone": pytest.approx(0.1 * 6**0.5), "indexer": pytest.approx(100 * 6**0.5)}
