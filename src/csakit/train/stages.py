"""What a stage makes of the optimizer: its parameter groups, learning rates and gradient clipping.

Which parameters train is the model's own `requires_grad`, set by model.set_stage. Indexer and backbone never share a
group: they have learning rates of their own and are clipped apart, so that the indexer's gradient cannot shrink the
backbone's. A stage starts with an optimizer of its own, which holds state for what trains and nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from csakit.train.config import PARTS, StageConfig


def part_of(name: str) -> str:
    """The part a parameter belongs to, by its name in the model."""
    return "indexer" if ".indexer." in name else "backbone"


def make_optimizer(model: nn.Module, stage: StageConfig) -> torch.optim.AdamW:
    """AdamW over what trains, in one group for each part, with and without weight decay (vectors have none).

    Raises: ValueError when nothing trains.
    """
    groups: dict[tuple[str, bool], dict[str, list]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups.setdefault((part_of(name), parameter.ndim > 1), {"params": [], "names": []})
            group["params"].append(parameter)
            group["names"].append(name)
    if not groups:
        raise ValueError("model: expected parameters that train, got none with requires_grad")
    return torch.optim.AdamW(
        [{**group, "part": part, "weight_decay": stage.weight_decay if decays else 0.0} for (part, decays), group in groups.items()],
        betas=(0.9, 0.95),
    )


def learning_rate(stage: StageConfig, part: str, step: int) -> float:
    """The learning rate of a part at a step, counted from 0: a linear rise over `ramp` steps, then the schedule.

    It stays (constant), or falls to `floor` of the peak, along half a cosine (cosine) or a line (linear).
    """
    peak = stage.indexer_learning_rate if part == "indexer" else stage.learning_rate
    if step < stage.ramp:
        return peak * (step + 1) / (stage.ramp + 1)
    progress = (step - stage.ramp) / max(1, stage.steps - stage.ramp)
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[stage.schedule]
    return peak * (stage.floor + (1 - stage.floor) * left)


def set_learning_rates(optimizer: torch.optim.Optimizer, stage: StageConfig, step: int) -> dict[str, float]:
    """Give every group its learning rate of this step, and return them by part."""
    rates = {}
    for group in optimizer.param_groups:
        rates[group["part"]] = group["lr"] = learning_rate(stage, group["part"], step)
    return rates


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float) -> dict[str, float]:
    """Clip the gradient of each part to its own norm of at most `largest`, and return the norms before by part."""
    norms = {}
    for part in PARTS:
        parameters = [parameter for group in optimizer.param_groups if group["part"] == part for parameter in group["params"]]
        if parameters:
            norms[part] = float(nn.utils.clip_grad_norm_(parameters, largest))
    return norms
