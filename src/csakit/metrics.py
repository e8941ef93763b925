"""Is the indexer healthy? Where the attention's mass lies, and how much of it the selection catches.

`log_mass` is that of every visible entry, [B, T, E] or [B, T, S, E] (from `teacher_log_mass` with the lse of a dense pass); `indices` are a
selection, [B, T, K] or [B, T, S, K]. Results are [B, T] or [B, T, S], free of NaN, and 0 where nothing is visible.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .attention import attend
from .backends.rows import INF, subtrahend
from .layout import Layout


class Shares(NamedTuple):
    """Shares of each head's attention, [B, T, H] each; they sum to 1 (to 0 where nothing is attended)."""

    window: Tensor
    entries: Tensor
    sink: Tensor


class Pairs(NamedTuple):
    """How many (query, entry) pairs an objective touches, as int64 scalars."""

    dense: Tensor
    sparse: Tensor


@torch.no_grad()
def branch_shares(
    q: Tensor,
    kv: Tensor | None,
    entries: Tensor | None,
    lse: Tensor,
    layout: Layout,
    *,
    indices: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
) -> Shares:
    """The probability each head gives to its window, its entries and its sink: [B, T, H] each.

    The spread of the entries' share over heads says whether the teacher's denominator matters at all: where all heads give the same
    share, a teacher from the compressed keys alone would be the same.

    Args: as in `attend`, whose lse this takes.
    """
    checks.tensor("lse", lse, "[B, T, H]", (*layout.positions.shape, None))
    steady = subtrahend(lse)
    nothing = torch.zeros_like(lse)
    window = branch = nothing
    if kv is not None and layout.window:
        window = (attend(q, kv, None, layout, scale=scale).lse - steady).exp()
    if entries is not None:
        own = torch.arange(1, layout.positions.shape[1] + 1, device=q.device, dtype=torch.int32) + layout.kv_offset
        without = replace(layout, window=0, window_start=own.expand_as(layout.window_start))
        branch = (attend(q, None, entries, without, indices=indices, scale=scale).lse - steady).exp()
    rest = nothing
    if sink is not None:
        share = (sink.to(lse.dtype) - steady).exp()
        rest = torch.where(layout.valid[..., None], torch.where(sink == INF, 1, share), 0)
    return Shares(window, branch, rest)


@torch.no_grad()
def captured_mass(log_mass: Tensor, indices: Tensor) -> Tensor:
    """The part of the entries' attention mass that the selected entries carry, 0..1."""
    teacher = _teacher(log_mass)
    return torch.where(indices >= 0, _at(teacher, indices), 0).sum(-1)


@torch.no_grad()
def topk_recall(log_mass: Tensor, indices: Tensor) -> Tensor:
    """The part of the teacher's own greatest entries that is among the selected: as many of them as are selected, 0..1.

    Ties in the teacher go to the lowest entry, as in `select`. Entries without mass are never among its greatest.
    """
    teacher = _teacher(log_mass)
    count = (indices >= 0).sum(-1, keepdim=True)
    rank = teacher.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    own = (rank < count) & (teacher > 0)
    hits = torch.where(indices >= 0, _at(own.to(teacher.dtype), indices), 0).sum(-1)
    return hits / own.sum(-1).clamp(min=1)


@torch.no_grad()
def top1_hit(log_mass: Tensor, indices: Tensor) -> Tensor:
    """1.0 where the teacher's greatest entry is selected, else 0.0."""
    teacher = _teacher(log_mass)
    if not teacher.shape[-1]:
        return teacher.new_zeros(teacher.shape[:-1])
    greatest = teacher.argmax(-1, keepdim=True)
    hit = (indices == greatest).any(-1) & (teacher.sum(-1) > 0)
    return hit.to(teacher.dtype)


@torch.no_grad()
def teacher_entropy(log_mass: Tensor) -> Tensor:
    """The entropy of the teacher in nats; exp of it is the number of entries it effectively spreads over."""
    teacher = _teacher(log_mass)
    return -torch.where(teacher == 0, 0, teacher * teacher.log()).sum(-1)


@torch.no_grad()
def uniform_kl(log_mass: Tensor) -> Tensor:
    """KL(teacher || uniform over the visible entries) in nats: what an indexer that knows nothing pays.

    `1 - KL / uniform KL` is the part an indexer has learnt. Entries are counted as visible where log_mass is not -inf.
    """
    visible = (log_mass > -INF).sum(-1)
    return torch.where(visible > 0, visible.clamp(min=1).to(log_mass.dtype).log() - teacher_entropy(log_mass), 0).clamp(min=0)


@torch.no_grad()
def look_back(mass_or_indices: Tensor, layout: Layout) -> Tensor:
    """How many tokens back the attended entries begin, on average: weighted by a log_mass, or plainly over selected indices."""
    distance = _distance(layout)
    x = mass_or_indices
    while distance.ndim < x.ndim:
        distance = distance[:, :, None]
    if x.dtype.is_floating_point:
        if x.shape[:2] != layout.positions.shape or x.shape[-1] != layout.num_entries:
            raise ValueError(f"log_mass must be [B, T, .., {layout.num_entries}] of the layout; got {list(x.shape)}")
        return (_teacher(x) * distance).sum(-1)
    live = x >= 0
    if not layout.num_entries:
        return torch.zeros(x.shape[:-1], device=x.device)
    back = torch.where(live, distance.expand(*x.shape[:-1], -1).gather(-1, x.clamp(min=0).long()), 0)
    return back.sum(-1) / live.sum(-1).clamp(min=1)


def attention_pairs(layout: Layout, topk: int) -> Pairs:
    """How many (query, entry) pairs the dense and the sparse objective touch: visible ones, and at most topk per query."""
    checks.whole("topk", topk, at_least=1)
    visible = (layout.entry_stop - layout.entry_start).long()
    return Pairs(visible.sum(), visible.clamp(max=topk).sum())


def _teacher(log_mass: Tensor) -> Tensor:
    """softmax over entries, 0 in rows without mass."""
    if not isinstance(log_mass, Tensor) or not log_mass.dtype.is_floating_point:
        raise TypeError(f"log_mass must be a floating-point tensor [B, T, E]; got {checks.describe(log_mass)}")
    return (log_mass - subtrahend(log_mass.logsumexp(-1, keepdim=True))).exp()


def _at(x: Tensor, indices: Tensor) -> Tensor:
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, [B, T, K]; got {checks.describe(indices)}")
    if indices.ndim != x.ndim or indices.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"indices must be {[*x.shape[:-1], 'K']} to fit log_mass; got {list(indices.shape)}")
    return x.gather(-1, indices.clamp(min=0).long()) if x.shape[-1] else x.new_zeros(indices.shape)


def _distance(layout: Layout) -> Tensor:
    """[B, T, E]: tokens from the first of an entry to the query, by positions in their document, so it holds on a shard too."""
    entry = torch.arange(layout.num_entries, device=layout.positions.device)
    return (layout.positions[..., None] - (entry - layout.entry_start[..., None]) * layout.ratio).to(torch.float32)
