"""Selections to measure attention with: uniform over what is visible, or clustered as a trained indexer picks.

What the clustered ones imitate was measured on the indexers of `csakit train --preset tiny` (benchmarks/selections.py shows both): some
entries are picked by everybody, successive queries share half of their picks, neighbours are picked together, and there is no love of
what is near: the window has that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from csakit import Layout

# Scores of clustered selections are sums of normal numbers, smoothed over neighbouring entries; these are the shares of their variance.
POPULAR, SLOW, FAST = 0.45, 0.3, 0.25  # of an entry, of what queries look for over a stretch of text, of the single query
STRETCH = 16  # tokens over which the slow part changes
TOPICS = 16  # its rank
SMOOTH = 0.4  # weight of each neighbour
ROWS = 1024  # queries at a time


def make(kind: str, layout: Layout, topk: int, generator: torch.Generator) -> Tensor:
    """[1, T, K] int32 on the CPU: distinct visible entries in ascending order, -1 in slots that stay empty, last.

    Args:
        kind: "uniform": every visible entry alike. "clustered": as a trained indexer picks.
        layout: of one document per row.
    """
    visible = (layout.entry_stop - layout.entry_start)[0, :, None].cpu()
    if kind == "uniform":
        return _distinct(torch.rand(visible.shape[0], topk, generator=generator) * visible, visible)[None]
    return _clustered(visible, layout.num_entries, topk, generator)[None]


def statistics(indices: Tensor, layout: Layout) -> dict[str, float]:
    """How the later half of the queries of one document picks: distances, picks shared between queries, neighbours, favourites.

    Args:
        indices: [1, T, K].
    """
    tokens, entries = indices.shape[1], layout.num_entries
    late = indices[0, tokens // 2 :].long().cpu()
    visible = layout.entry_stop[0, tokens // 2 :, None].cpu()
    picked = torch.zeros(len(late), entries, dtype=torch.bool).scatter_(1, late, True)
    count = float(picked.sum())
    found = {"median distance, of what is visible": float(((visible - 1 - late) / visible).median())}
    for back in (1, 16, 64):
        found[f"picks shared with the query {back} before"] = float((picked[back:] & picked[:-back]).sum() / picked[back:].sum())
    found["picks whose next entry is picked too"] = float((picked[:, 1:] & picked[:, :-1]).sum()) / count
    often = picked.sum(0).sort(descending=True).values
    found["picks that fall on a tenth of the entries"] = float(often[: entries // 10].sum()) / count
    return found


def _clustered(visible: Tensor, entries: int, topk: int, generator: torch.Generator) -> Tensor:
    """[T, K]: the visible entries of greatest score."""

    def normal(*shape: int, part: float) -> Tensor:
        """Of variance `part`, smoothed over neighbouring entries."""
        x = torch.randn(shape, generator=generator)
        beside = x.roll(1, -1) + x.roll(-1, -1)
        return (x + SMOOTH * beside) * math.sqrt(part / (1 + 2 * SMOOTH**2))

    tokens = visible.shape[0]
    popular, topics = normal(entries, part=POPULAR), normal(TOPICS, entries, part=SLOW / TOPICS)
    wanted = _slow(torch.randn(tokens, TOPICS, generator=generator))
    slots = min(topk, entries)
    picked = torch.full((tokens, topk), -1, dtype=torch.int32)
    for start in range(0, tokens, ROWS):
        rows = slice(start, min(start + ROWS, tokens))
        seen = visible[rows]
        scores = popular + wanted[rows] @ topics + normal(len(seen), entries, part=FAST)
        best = scores.masked_fill(torch.arange(entries) >= seen, -torch.inf).topk(slots, -1).indices
        ascending = torch.where(best < seen, best, entries).sort(-1).values
        picked[rows, :slots] = torch.where(ascending < entries, ascending, -1).to(torch.int32)
    return picked


def _slow(noise: Tensor) -> Tensor:
    """[T, N] of variance 1 that forgets over STRETCH rows."""
    kept = math.exp(-1 / STRETCH)
    state, rows = noise[0], []
    for step in noise:
        state = kept * state + math.sqrt(1 - kept**2) * step
        rows.append(state)
    return torch.stack(rows)


def _distinct(draws: Tensor, visible: Tensor) -> Tensor:
    """Draws [T, K] as distinct entries below visible [T, 1]: what is drawn twice moves to the next free neighbour."""
    slot = torch.arange(draws.shape[1])
    drawn = draws.clamp(min=0).minimum((visible - 1).clamp(min=0).float()).long().sort(1).values
    ascending = (drawn - slot).cummax(1).values + slot
    fitting = ascending.minimum(visible - draws.shape[1] + slot)  # room for those that follow
    picked = torch.where(visible > draws.shape[1], fitting, slot.expand_as(drawn))
    return torch.where(picked < visible, picked, -1).to(torch.int32)
