"""The right teacher and the wrong ones. They differ in one thing: what each head's denominator holds.

A teacher is the heads' probabilities of the entries, summed over heads and normalised once (docs/math.md section 6). csakit takes the
denominators as `lse`, so a wrong teacher is the right code with another lse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

import csakit

from .model import LayerView
from .presets import ARMS


@torch.no_grad()
def denominators(view: LayerView, indices: Tensor | None = None, *, arms: Iterable[str] = ARMS) -> dict[str, Tensor]:
    """The lse [B, T, H] of each teacher over the selected entries (None: every visible one).

    full: window, entries and sink. window-only: window and entries. sink-only: entries and sink. compressed-only: entries.
    """
    q, kv, entries, sink, scale = view.inputs
    own = torch.arange(1, q.shape[1] + 1, dtype=torch.int32).expand_as(view.layout.window_start)
    windowless = replace(view.layout, window=0, window_start=own)

    def alone() -> Tensor:
        return csakit.attend(q, None, entries, windowless, indices=indices, scale=scale).lse

    teachers = {
        "full": lambda: csakit.attend(q, kv, entries, view.layout, indices=indices, sink=sink, scale=scale).lse,
        "window-only": lambda: csakit.attend(q, kv, entries, view.layout, indices=indices, scale=scale).lse,
        "sink-only": lambda: csakit.lse_with_sink(alone(), sink),
        "compressed-only": alone,
    }
    return {arm: teachers[arm]() for arm in arms}


@torch.no_grad()
def log_mass(view: LayerView, lse: Tensor, indices: Tensor | None = None) -> Tensor:
    """The teacher's unnormalised logarithm over every visible entry [B, T, E], or over the slots of a selection."""
    q, _, entries, _, scale = view.inputs
    assert entries is not None
    return csakit.teacher_log_mass(q, entries, lse, view.layout, indices=indices, scale=scale)


def greatest(rank: Tensor, topk: int) -> Tensor:
    """The entries [B, T, K] of greatest rank [B, T, E], in ascending order; -inf is not visible, -1 is an empty slot."""
    found = rank.topk(min(topk, rank.shape[-1]), dim=-1)
    entries = torch.where(found.values > -torch.inf, found.indices, rank.shape[-1]).sort(-1).values
    return torch.where(entries < rank.shape[-1], entries, -1).to(torch.int32)


def reference_ranks(view: LayerView, masses: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """What the selections that need no indexer rank the entries [B, T, E] by.

    Args:
        masses: log_mass of the teachers "full" and "compressed-only".
    """
    true = masses["full"]
    visible = view.layout.entry_stop[..., None] > torch.arange(true.shape[-1])
    place = torch.arange(true.shape[-1], dtype=true.dtype).expand(true.shape)
    return {
        "oracle": true,
        "wrong oracle": masses["compressed-only"],
        "recent": place.masked_fill(~visible, -torch.inf),
        "random": torch.rand(true.shape, generator=generator).masked_fill(~visible, -torch.inf),
    }
