"""The cpu backend's native kernels, forced: they run or say why not.

build.py     compiles and loads the library
calls.py     structs from tensors
kernels.cpp  the kernels
  simd.h       vectors; pairs.h: floats, or pairs of bfloat16, as elements of products; product.h: the one matrix product
  attention.h  what a query attends; forward.h, backward.h and teacher.h work on that
  scoring.h    index scores, the greatest of them, and their gradients
  objective.h  KL and its gradient, row by row
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...rows import Ranges
from ..dense import Dense
from . import build
from .calls import ATTENTION, OBJECTIVE, SCORING, TYPES, Call

__all__ = [
    "attend", "attend_backward", "dense_kl", "dense_kl_backward", "index_scores", "log_mass", "objective", "scores_backward", "select",
]  # fmt: skip


def refuses(*inputs: Any) -> str | None:
    """Why the kernels cannot take the tensors among these, or None."""
    for x in inputs:
        if isinstance(x, Tensor) and x.dtype not in TYPES and x.dtype.is_floating_point:
            return f"the kernels take float32 and bfloat16; got {x.dtype}"
    return build.why_not()


def attend(
    q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None, sink: Tensor | None,
    indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int, teacher: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out [B,T,H,Dv], lse [B,T,H], log_mass [B,T,S,K] or None)."""
    _require(q, kv, entries, values, entry_values)
    out = q.new_empty(*q.shape[:3], value_width)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    mass = torch.empty(indices.shape, dtype=torch.float32) if teacher and indices is not None else None
    if out.numel() or lse.numel():
        _attention(
            build.load().csakit_attend, q, kv, entries, values, entry_values, sink, indices, ranges,
            scale=scale, value_width=value_width, lse=lse, out=out, mass=mass,
        )  # fmt: skip
    return out, lse, mass


def attend_backward(
    d_out: Tensor, lse: Tensor, q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None,
    sink: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, kv, entries, values, entry_values, sink. Recomputes the probabilities from lse."""
    _require(q, kv, entries, values, entry_values, d_out)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_sink = None if sink is None else torch.zeros(sink.shape, dtype=torch.float64)
    inputs = (kv, entries, values, entry_values)
    grads = tuple(None if x is None else _zeros(x) for x in inputs)
    if q.numel():
        _attention(
            build.load().csakit_attend_backward, q, kv, entries, values, entry_values, sink, indices, ranges,
            scale=scale, value_width=value_width, lse=lse, d_out=d_out, d_q=dq, grads=grads, d_sink=d_sink,
        )  # fmt: skip
    d_inputs = [None if x is None or grad is None else _narrow(grad, x) for x, grad in zip(inputs, grads)]
    return dq, *d_inputs, None if sink is None or d_sink is None else d_sink.to(sink.dtype)


def log_mass(q: Tensor, entries: Tensor, lse: Tensor, indices: Tensor | None, ranges: Ranges, *, scale: float, sets: int) -> Tensor:
    """[B,T,S,K], or [B,T,S,E] without indices."""
    _require(q, entries, lse)
    shape = (*q.shape[:2], sets, entries.shape[1]) if indices is None else indices.shape
    mass = torch.empty(shape, dtype=torch.float32)
    if mass.numel():
        _attention(
            build.load().csakit_log_mass, q, None, entries, None, None, None, indices, ranges,
            scale=scale, value_width=q.shape[3], lse=lse.float(), mass=mass, sets=sets,
        )  # fmt: skip
    return mass


def objective(scores: Tensor, log_mass: Tensor, valid: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(kl [B,T], its gradient for the scores times factor [B,T], or None without factor)."""
    _require(scores, log_mass, factor)
    rows, tokens, sets, slots = scores.shape
    kl = torch.zeros((rows, tokens), dtype=torch.float32)
    gradient = None if factor is None else torch.empty(scores.shape, dtype=torch.float32)
    if scores.numel():
        call = Call()
        call(
            build.load().csakit_objective, OBJECTIVE,
            call.floats(scores), call.floats(log_mass), call.pointer(valid), call.floats(factor), call.pointer(kl), call.pointer(gradient),
            rows * tokens, sets, slots, torch.get_num_threads(),
        )  # fmt: skip
    return kl, gradient


def index_scores(q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, scale: float, relu: bool, sets: int) -> Tensor:
    """[B,T,S,E], -inf where not visible."""
    _require(q, k, weights)
    out = q.new_empty(*q.shape[:2], sets, k.shape[1], dtype=torch.float32)
    if out.numel():
        _scoring(build.load().csakit_score, q, k, weights, ranges, scale=scale, relu=relu, sets=sets, scores=out)
    return out


def select(
    q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, topk: int, scale: float, relu: bool, sets: int
) -> tuple[Tensor, Tensor]:
    """(indices [B,T,S,K] int32 ascending, -1 empty and last; their scores, -inf empty)."""
    _require(q, k, weights)
    indices = torch.empty((*q.shape[:2], sets, topk), dtype=torch.int32)
    scores = torch.empty(indices.shape, dtype=torch.float32)
    if indices.numel():
        _scoring(build.load().csakit_score, q, k, weights, ranges, scale=scale, relu=relu, sets=sets, chosen=indices, scores=scores)
    return indices, scores


def scores_backward(
    d_scores: Tensor, q: Tensor, k: Tensor, weights: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, weights."""
    _require(q, k, weights, d_scores)
    dq, dk = torch.empty_like(q, memory_format=torch.contiguous_format), _zeros(k[:, :, None])
    dw = None if weights is None else torch.zeros(weights.shape, dtype=torch.float32)
    if q.numel():
        _scoring(
            build.load().csakit_score_backward, q, k, weights, ranges,
            scale=scale, relu=relu, sets=d_scores.shape[2], d_q=dq, d_k=dk, d_weights=dw, d_scores=d_scores, indices=indices,
        )  # fmt: skip
    return dq, _narrow(dk, k[:, :, None]).squeeze(2), None if weights is None or dw is None else dw.to(weights.dtype)


_dense = Dense(index_scores, log_mass, objective, scores_backward)
dense_kl, dense_kl_backward = _dense.kl, _dense.backward


def _require(*tensors: Tensor | None) -> None:
    why = refuses(*tensors)
    if why:
        raise RuntimeError(f"backend 'cpu-native' was asked for, but {why}. Backend 'cpu' takes the torch path instead")


def _attention(
    function: Any, q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None,
    sink: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int, lse: Tensor,
    out: Tensor | None = None, d_out: Tensor | None = None, d_q: Tensor | None = None, grads: tuple[Tensor | None, ...] = (None,) * 4,
    mass: Tensor | None = None, d_sink: Tensor | None = None, sets: int = 1,
) -> None:  # fmt: skip
    call = Call()
    rows, tokens, heads, _ = q.shape
    keys = kv if kv is not None else entries
    assert keys is not None
    call(
        function, ATTENTION,
        *call.arrays(q, kv, entries, values, entry_values, out, d_out, d_q, *grads),
        call.floats(sink), *call.indices(indices), *call.ranges(ranges), call.pointer(lse), call.pointer(mass), call.pointer(d_sink),
        rows, tokens, heads, keys.shape[2], sets if indices is None else indices.shape[2],
        0 if entries is None else entries.shape[1], value_width, torch.get_num_threads(), scale,
    )  # fmt: skip


def _scoring(
    function: Any, q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, scale: float, relu: bool, sets: int,
    chosen: Tensor | None = None, scores: Tensor | None = None, d_q: Tensor | None = None, d_k: Tensor | None = None,
    d_weights: Tensor | None = None, d_scores: Tensor | None = None, indices: Tensor | None = None,
) -> None:  # fmt: skip
    call = Call()
    rows, tokens, heads, _ = q.shape
    call(
        function, SCORING,
        *call.arrays(q, k, d_q, d_k),
        call.floats(weights), call.pointer(d_weights), call.floats(d_scores), *call.indices(indices), *call.ranges(ranges),
        call.pointer(chosen), call.pointer(scores),
        rows, tokens, heads, k.shape[1], sets, 0 if chosen is None else chosen.shape[3], relu, torch.get_num_threads(), scale,
    )  # fmt: skip


def _zeros(x: Tensor) -> Tensor:
    """Where the gradient of x is summed: float32, rows of whole vectors."""
    lanes = build.load().csakit_lanes()
    return torch.zeros(*x.shape[:3], -(-x.shape[3] // lanes) * lanes, dtype=torch.float32)


def _narrow(grad: Tensor, x: Tensor) -> Tensor:
    return grad[..., : x.shape[3]].to(x.dtype).contiguous()
