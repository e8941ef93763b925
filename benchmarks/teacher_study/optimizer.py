"""Muon for the matrices of the blocks, AdamW for the rest, and one schedule for both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by five Newton-Schulz steps, in fp32, all matrices of one shape at once."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = []
                for parameter in parameters:
                    assert parameter.grad is not None
                    buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    buffer.mul_(group["momentum"]).add_(parameter.grad)
                    updates.append(parameter.grad + group["momentum"] * buffer)
                size = group["lr"] * max(1, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonal(torch.stack(updates))):
                    parameter.sub_(update, alpha=size)


def orthogonal(x: Tensor) -> Tensor:
    """The matrices [N, a, b] with their singular values pushed towards 1."""
    wide = x if x.shape[1] <= x.shape[2] else x.mT
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        square = wide @ wide.mT
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide if x.shape[1] <= x.shape[2] else wide.mT


class Optimizers:
    """Both optimizers of a language model as one; `scale` multiplies their learning rates."""

    def __init__(self, model: nn.Module, *, scale: float = 1.0) -> None:
        matrices, rest = [], []
        for name, parameter in model.named_parameters():
            inside = name.startswith("blocks.") and parameter.ndim == 2 and not name.endswith("ape")
            (matrices if inside else rest).append(parameter)
        tables = [p for p in rest if p.ndim == 2 and p.shape[0] > p.shape[1]]
        others = [p for p in rest if not any(p is table for table in tables)]
        self.both = [
            Muon(matrices, lr=0.012),
            torch.optim.AdamW(
                [{"params": tables, "lr": 0.01}, {"params": others, "lr": 0.003}], betas=(0.9, 0.98), weight_decay=0.0, fused=True
            ),
        ]
        self.peaks = [[group["lr"] * scale for group in optimizer.param_groups] for optimizer in self.both]

    def step(self, share: float) -> None:
        """One step at this share of the peak learning rates; clears the gradients."""
        for optimizer, peaks in zip(self.both, self.peaks):
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def trapezoid(step: int, steps: int, *, rise: float = 0.03, fall: float = 0.45) -> float:
    """The share of the peak at a step: up, level, down to 3 %."""
    return max(min(1.0, (step + 1) / max(1.0, rise * steps), (steps - step) / (fall * steps)), 0.03)
