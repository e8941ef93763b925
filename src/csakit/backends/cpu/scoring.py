"""Index scores in chunks of queries: all of them, the greatest, and their gradients.

C queries of a chunk, I index heads in S sets, n visible entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import INF, Ranges, accumulator
from .parts import Block, Chunk, Memory, Part, Scratch, all_finite, chunks, entries_part, masked_, tile_size


class _Scorer(NamedTuple):
    """The index branch of a call: its inputs, where gradients go, and how a chunk of it is scored."""

    q: Tensor
    k: Tensor
    weights: Tensor | None
    ranges: Ranges
    scale: float
    relu: bool
    sets: int
    dtype: torch.dtype
    finite: bool
    scratch: Scratch

    def part(self, chunk: Chunk, indices: Tensor | None = None, d_k: Tensor | None = None) -> tuple[Part, Tensor | None]:
        memory = Memory(self.k[chunk.row, :, None], None, 0, None if d_k is None else d_k[chunk.row, :, None])
        return entries_part(memory, chunk, self.ranges, indices, self.scratch, finite=self.finite)

    def heads(self, chunk: Chunk, part: Part) -> Tensor:
        """[C, I, n]: q_i . k, positive part if so asked."""
        dots = part.dots(self.q[chunk.row, chunk.queries].to(self.dtype))
        return dots.relu_() if self.relu else dots

    def combine(self, chunk: Chunk, part: Part, heads: Tensor) -> Tensor:
        """[C, S, n]: scale * sum_i weights_i * heads_i, -inf where not live."""
        count, width, slots = heads.shape
        grouped = heads.view(count * self.sets, width // self.sets, slots)
        if self.weights is None:
            scores = grouped.sum(1)
        else:
            weights = self.weights[chunk.row, chunk.queries].to(self.dtype).reshape(count * self.sets, 1, -1)
            scores = torch.bmm(weights, grouped)
        return scores.view(count, self.sets, slots).mul_(self.scale).masked_fill_(~part.live, -INF)

    def scores(self, chunk: Chunk, part: Part) -> Tensor:
        return self.combine(chunk, part, self.heads(chunk, part))


def _scorer(
    q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, scale: float, relu: bool, sets: int, *, finite: bool = True
) -> _Scorer:
    dtype = accumulator(q, k, weights)
    return _Scorer(q, k.contiguous(), weights, ranges, scale, relu, sets, dtype, finite, Scratch(dtype))


def index_scores(
    q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, scale: float, relu: bool, sets: int, tile: int = 0
) -> Tensor:
    """[B,T,S,E], -inf where not visible."""
    scorer = _scorer(q, k, weights, ranges, scale, relu, sets)
    out = q.new_full((*q.shape[:2], sets, k.shape[1]), -INF, dtype=scorer.dtype)
    for chunk in chunks(ranges, _tile(q, k.shape[1], tile)):
        out[chunk.row, chunk.queries][..., chunk.entries] = scorer.scores(chunk, scorer.part(chunk)[0])
    return out


def select(
    q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, topk: int, scale: float, relu: bool, sets: int, tile: int = 0
) -> tuple[Tensor, Tensor]:
    """(indices [B,T,S,K] int32 ascending, -1 empty and last; their scores, -inf empty)."""
    scorer = _scorer(q, k, weights, ranges, scale, relu, sets)
    indices = torch.full((*q.shape[:2], sets, topk), -1, dtype=torch.int32)
    values = q.new_full(indices.shape, -INF, dtype=scorer.dtype)
    for chunk in chunks(ranges, _tile(q, k.shape[1], tile)):
        at = (chunk.row, chunk.queries)
        part, _ = scorer.part(chunk)
        scores = scorer.scores(chunk, part)
        kept = scores.shape[2] if scores.shape[2] <= topk else topk
        column = _greatest(scores, part.live.expand(scores.shape), kept)
        empty = column < 0
        indices[at][..., :kept] = torch.where(empty, -1, column + chunk.entries.start)
        values[at][..., :kept] = scores.gather(2, column.clamp(min=0)).masked_fill_(empty, -INF)
    return indices, values


def _greatest(scores: Tensor, live: Tensor, topk: int) -> Tensor:
    """[C, S, topk]: columns of the greatest live scores, ties to the lowest column; ascending, -1 last.

    The k-th greatest score decides: what is above it is in, and as many of the first that equal it as there is room for.
    """
    if scores.isnan().any():  # NaN counts as greatest, so that it shows in the loss
        scores = torch.where(live, scores.nan_to_num(nan=INF, posinf=INF, neginf=-INF), -INF)
    if topk < scores.shape[2]:
        threshold = scores.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)
        above, equal = scores > threshold, (scores == threshold) & live
        room = topk - above.sum(-1, keepdim=True)
        if (equal.sum(-1, keepdim=True) > room).any():
            equal &= equal.cumsum(-1) <= room
        live = above | equal
    column = scores.new_full((*scores.shape[:2], topk), -1, dtype=torch.int64)
    filled = torch.arange(topk) < live.sum(-1, keepdim=True)
    column[filled] = live.nonzero(as_tuple=True)[2]  # row by row, ascending
    return column


def scores_backward(
    d_scores: Tensor, q: Tensor, k: Tensor, weights: Tensor | None, indices: Tensor | None, ranges: Ranges,
    *, scale: float, relu: bool, tile: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, weights."""
    scorer = _scorer(q, k, weights, ranges, scale, relu, d_scores.shape[2], finite=all_finite(q, k, weights, d_scores))
    grads = _Gradients(scorer)
    for chunk in chunks(ranges, _tile(q, k.shape[1] if indices is None else indices.shape[3], tile, gathered=indices is not None)):
        part, column = scorer.part(chunk, indices, grads.k)
        upstream = d_scores[chunk.row, chunk.queries].to(scorer.dtype)
        if column is not None:
            upstream = upstream.new_zeros(*column.shape[:2], part.live.shape[2] + 1).scatter_(2, column, upstream)[..., :-1]
        elif indices is None:
            upstream = _columns(upstream, chunk, part, ranges)
        grads.add(chunk, part, scorer.heads(chunk, part), upstream)
    return grads.result()


def _columns(full: Tensor, chunk: Chunk, part: Part, ranges: Ranges) -> Tensor:
    """Of [C, S, E], the columns of a part that holds every visible entry."""
    if isinstance(part, Block):
        return full[..., chunk.entries]
    entry = ranges.entry_start[chunk.row, chunk.queries, None, None] + torch.arange(part.live.shape[2])
    return full.gather(2, entry.clamp(max=max(full.shape[2] - 1, 0)).long().expand(-1, full.shape[1], -1))


class _Gradients:
    """Gradients of the index branch, summed chunk by chunk."""

    def __init__(self, scorer: _Scorer) -> None:
        q, k, weights = scorer.q, scorer.k, scorer.weights
        self._scorer = scorer
        self.q = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.k = torch.zeros(k.shape, dtype=scorer.dtype)
        self.weights = None if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)

    def add(self, chunk: Chunk, part: Part, heads: Tensor, d_scores: Tensor) -> None:
        """d_scores [C, S, n] of the part's rows; heads [C, I, n] as scored."""
        scorer, at = self._scorer, (chunk.row, chunk.queries)
        count, width, slots = heads.shape
        sets = scorer.sets
        if not scorer.finite:
            masked_(heads, part.live, 0)
        grad = torch.where(part.live, d_scores, 0).mul_(scorer.scale)
        grouped = heads.view(count * sets, width // sets, slots)
        if self.weights is not None:
            self.weights[at] = torch.bmm(grouped, grad.reshape(count * sets, slots, 1)).view(count, width)
        per_head = grad.view(count, sets, 1, slots).expand(-1, -1, width // sets, -1)
        if scorer.weights is not None:
            per_head = per_head * scorer.weights[at].to(scorer.dtype).reshape(count, sets, -1, 1)
        d_heads = per_head.reshape(count, width, slots)
        if scorer.relu:
            d_heads = d_heads.masked_fill(heads <= 0, 0)  # relu'(0) = 0
        if not scorer.finite:
            d_heads = masked_(d_heads.contiguous(), part.live, 0)
        self.q[at] = part.keys_by(d_heads)
        part.add_key_gradient(d_heads, scorer.q[at].to(scorer.dtype))

    def result(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.q, self.k.to(self._scorer.k.dtype), self.weights


def _tile(q: Tensor, slots: int, tile: int, *, gathered: bool = False) -> int:
    size = 8 if q.dtype == torch.float64 else 4
    return tile_size(size * (2 * q.shape[2] * slots + (slots * q.shape[3] if gathered else 0)), tile)
