"""Selections to measure attention with: uniform over what is visible, or clustered as a trained indexer picks."""

from __future__ import annotations

import torch
from torch import Tensor

from csakit import Layout

CENTRES = 4  # topics a text goes on about at a time
JUMP = 1 / 256  # how often one of them changes for another
SPREAD = 24.0  # entries around a topic


def make(kind: str, layout: Layout, topk: int, generator: torch.Generator) -> Tensor:
    """[1, T, K] int32 on the CPU: distinct visible entries in ascending order, -1 in slots that stay empty, last.

    Args:
        kind: "uniform": every visible entry alike. "clustered": half of the picks lie near the query, four tenths around topics that walk
            slowly over the text and jump now and then, one tenth anywhere; successive queries share most of their picks' neighbourhoods.
        layout: of one document per row.
    """
    visible = (layout.entry_stop - layout.entry_start)[0, :, None].cpu()
    tokens = visible.shape[0]

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    draws = random(tokens, topk) * visible
    if kind == "clustered":
        which = random(tokens, topk)
        recent = visible + random(tokens, topk).clamp(min=1e-9).log() * (topk / 2)
        centre = _walk(tokens, generator) * visible
        side = torch.where(random(tokens, topk) < 0.5, -SPREAD, SPREAD)
        topical = centre.repeat(1, -(-topk // CENTRES))[:, :topk] + side * random(tokens, topk).clamp(min=1e-9).log()
        draws = torch.where(which < 0.5, recent, torch.where(which < 0.9, topical, draws))
    return _distinct(draws, visible)[None]


def _walk(tokens: int, generator: torch.Generator) -> Tensor:
    """[T, CENTRES]: where each topic lies, as a part 0..1 of the visible entries; a reflected random walk that jumps."""
    steps = torch.randn(tokens, CENTRES, generator=generator) * 0.002
    jumps = torch.rand(tokens, CENTRES, generator=generator) < JUMP
    steps += torch.where(jumps, torch.rand(tokens, CENTRES, generator=generator), 0)
    start = torch.rand(1, CENTRES, generator=generator)
    return ((start + steps.cumsum(0)) % 2 - 1).abs()


def _distinct(draws: Tensor, visible: Tensor) -> Tensor:
    """Draws [T, K] as distinct entries below visible [T, 1]: what is drawn twice moves to the next free neighbour."""
    slot = torch.arange(draws.shape[1])
    drawn = draws.clamp(min=0).minimum((visible - 1).clamp(min=0).float()).long().sort(1).values
    ascending = (drawn - slot).cummax(1).values + slot
    fitting = ascending.minimum(visible - draws.shape[1] + slot)  # room for those that follow
    picked = torch.where(visible > draws.shape[1], fitting, slot.expand_as(drawn))
    return torch.where(picked < visible, picked, -1).to(torch.int32)
