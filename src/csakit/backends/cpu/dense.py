"""The dense objective over every visible entry, some queries at a time: index scores, log-mass, their KL, and back to the scores.

It is made of a path's own functions, so the torch path and the kernels share it. What is held is the scores, the log-mass and the
gradient of a chunk of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..rows import Ranges, accumulator, over_ranks

CHUNK = 1 << 20  # scores that are held at once


@dataclass(frozen=True)
class Dense:
    """The functions of one path that the objective is made of."""

    index_scores: Callable[..., Tensor]
    log_mass: Callable[..., Tensor]
    objective: Callable[..., tuple[Tensor, Tensor | None]]
    scores_backward: Callable[..., tuple[Tensor, Tensor, Tensor | None]]

    def kl(
        self, q_index: Tensor, k_index: Tensor, weights: Tensor | None, q: Tensor, entries: Tensor, lse: Tensor, ranges: Ranges,
        *, index_scale: float, scale: float, relu: bool, sets: int, group: str, tile: int = 0,
    ) -> Tensor:  # fmt: skip
        """[B,T]: KL(teacher || student) over every visible entry."""
        out = lse.new_empty(q.shape[:2], dtype=accumulator(q_index, k_index, weights, q, entries, lse))
        options = {"tile": tile} if tile else {}
        for at, seen, own in _chunks(ranges, entries.shape[1], sets, tile):
            index = (q_index[at], k_index[seen], _at(weights, at))
            scores = self.index_scores(*index, own, scale=index_scale, relu=relu, sets=sets, **options)
            mass = over_ranks(self.log_mass(q[at], entries[seen], lse[at], None, own, scale=scale, sets=sets, **options), group)
            out[at] = self.objective(scores, mass, own.valid, None)[0]
        return out

    def backward(
        self, d_kl: Tensor, q_index: Tensor, k_index: Tensor, weights: Tensor | None, q: Tensor, entries: Tensor, lse: Tensor,
        ranges: Ranges, *, index_scale: float, scale: float, relu: bool, sets: int, group: str, tile: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Gradients of q_index, k_index, weights."""
        options: dict[str, Any] = {"tile": tile} if tile else {}
        keys = k_index.to(accumulator(q_index, k_index, weights))  # chunks add to the gradient of the same keys
        dq, dk = torch.empty_like(q_index, memory_format=torch.contiguous_format), torch.zeros_like(keys)
        dw = None if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
        for at, seen, own in _chunks(ranges, entries.shape[1], sets, tile):
            index = (q_index[at], keys[seen], _at(weights, at))
            scores = self.index_scores(*index, own, scale=index_scale, relu=relu, sets=sets, **options)
            mass = over_ranks(self.log_mass(q[at], entries[seen], lse[at], None, own, scale=scale, sets=sets, **options), group)
            d_scores = self.objective(scores, mass, own.valid, d_kl[at])[1]
            dq[at], d_keys, d_weights = self.scores_backward(d_scores, *index, None, own, scale=index_scale, relu=relu, **options)
            dk[seen] += d_keys
            if dw is not None and d_weights is not None:
                dw[at] = d_weights
        return dq, dk.to(k_index.dtype), dw


def _at(x: Tensor | None, at: tuple[slice, slice]) -> Tensor | None:
    return None if x is None else x[at]


def _chunks(ranges: Ranges, entries: int, sets: int, tile: int) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], Ranges]]:
    """Some queries of all batch rows, the entries that any of them sees, and their ranges over those."""
    rows, tokens = ranges.valid.shape
    step = tile or max(1, CHUNK // max(1, rows * sets * entries))
    for begin in range(0, tokens if rows else 0, step):
        queries = (slice(None), slice(begin, begin + step))
        valid, start, stop = ranges.valid[queries], ranges.entry_start[queries], ranges.entry_stop[queries]
        live = valid & (start < stop)
        last = int(torch.where(live, stop, 0).max())
        first = min(last, int(torch.where(live, start, entries).min()))
        yield queries, (slice(None), slice(first, last)), Ranges(valid, ranges.window_start[queries], start - first, stop - first, 0)
