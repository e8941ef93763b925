"""The cpu backend's native kernels, forced: they run or say why not.

build.py     compiles and loads the library
calls.py     structs from tensors
kernels.cpp  the kernels
  attention.h  what a query attends; forward.h, backward.h and teacher.h work on that
  scoring.h    index scores, the greatest of them, and their gradients
  objective.h  KL and its gradient, row by row
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...rows import Ranges
from ..dense import Dense
from . import build
from .calls import TYPES, Attention, Call, Objective, Scoring

__all__ = [
    "attend", "attend_backward", "dense_kl", "dense_kl_backward", "index_scores", "log_mass", "objective", "scores_backward", "select",
]  # fmt: skip


def refuses(*tensors: Tensor | None) -> str | None:
    """Why the kernels cannot take these tensors, or None."""
    for x in tensors:
        if x is not None and x.dtype.is_floating_point and x.dtype not in TYPES:
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
    call = _attention(q, kv, entries, values, entry_values, sink, indices, ranges, scale, value_width, lse)
    call.array("out", out)
    call.struct.mass = call.pointer(mass)
    if out.numel() or lse.numel():
        call(build.load().csakit_attend)
    return out, lse, mass


def attend_backward(
    d_out: Tensor, lse: Tensor, q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None,
    sink: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, kv, entries, values, entry_values, sink. Recomputes the probabilities from lse."""
    _require(q, kv, entries, values, entry_values, d_out)
    call = _attention(q, kv, entries, values, entry_values, sink, indices, ranges, scale, value_width, lse.contiguous())
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_sink = None if sink is None else torch.zeros(sink.shape, dtype=torch.float64)
    call.struct.d_sink = call.pointer(d_sink)
    call.array("d_out", d_out)
    call.array("d_q", dq)
    inputs = {"kv": kv, "entries": entries, "values": values, "entry_values": entry_values}
    grads = {name: None if x is None else _zeros(x) for name, x in inputs.items()}
    for name, grad in grads.items():
        call.array(f"d_{name}", grad)
    if q.numel():
        call(build.load().csakit_attend_backward)
    d_inputs = [None if x is None or grad is None else _narrow(grad, x) for x, grad in zip(inputs.values(), grads.values())]
    return dq, *d_inputs, None if sink is None or d_sink is None else d_sink.to(sink.dtype)


def log_mass(q: Tensor, entries: Tensor, lse: Tensor, indices: Tensor | None, ranges: Ranges, *, scale: float, sets: int) -> Tensor:
    """[B,T,S,K], or [B,T,S,E] without indices."""
    _require(q, entries, lse)
    shape = (*q.shape[:2], sets, entries.shape[1]) if indices is None else indices.shape
    mass = torch.empty(shape, dtype=torch.float32)
    call = _attention(q, None, entries, None, None, None, indices, ranges, scale, q.shape[3], lse.float().contiguous())
    call.struct.sets, call.struct.mass = sets, call.pointer(mass)
    if mass.numel():
        call(build.load().csakit_log_mass)
    return mass


def objective(scores: Tensor, log_mass: Tensor, valid: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(kl [B,T], its gradient for the scores times factor [B,T], or None without factor)."""
    _require(scores, log_mass, factor)
    rows, tokens, sets, slots = scores.shape
    kl = torch.zeros((rows, tokens), dtype=torch.float32)
    gradient = None if factor is None else torch.empty(scores.shape, dtype=torch.float32)
    call = Call(Objective(rows=rows * tokens, sets=sets, slots=slots, threads=torch.get_num_threads()))
    inputs = {"scores": scores, "mass": log_mass, "factor": factor}
    for name, x in inputs.items():
        setattr(call.struct, name, call.pointer(None if x is None else x.float().contiguous()))
    call.struct.valid, call.struct.kl, call.struct.gradient = (call.pointer(x) for x in (valid.contiguous(), kl, gradient))
    if scores.numel():
        call(build.load().csakit_objective)
    return kl, gradient


def index_scores(q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, scale: float, relu: bool, sets: int) -> Tensor:
    """[B,T,S,E], -inf where not visible."""
    _require(q, k, weights)
    out = q.new_empty(*q.shape[:2], sets, k.shape[1], dtype=torch.float32)
    call = _scoring(q, k, weights, ranges, scale, relu, sets)
    call.struct.scores = call.pointer(out)
    if out.numel():
        call(build.load().csakit_score)
    return out


def select(
    q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, topk: int, scale: float, relu: bool, sets: int
) -> tuple[Tensor, Tensor]:
    """(indices [B,T,S,K] int32 ascending, -1 empty and last; their scores, -inf empty)."""
    _require(q, k, weights)
    indices = torch.empty((*q.shape[:2], sets, topk), dtype=torch.int32)
    scores = torch.empty(indices.shape, dtype=torch.float32)
    call = _scoring(q, k, weights, ranges, scale, relu, sets)
    call.struct.topk = topk
    call.struct.chosen, call.struct.scores = call.pointer(indices), call.pointer(scores)
    if indices.numel():
        call(build.load().csakit_score)
    return indices, scores


def scores_backward(
    d_scores: Tensor, q: Tensor, k: Tensor, weights: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, weights."""
    _require(q, k, weights, d_scores)
    call = _scoring(q, k, weights, ranges, scale, relu, d_scores.shape[2])
    dq, dk = torch.empty_like(q, memory_format=torch.contiguous_format), _zeros(k[:, :, None])
    dw = None if weights is None else torch.zeros(weights.shape, dtype=torch.float32)
    call.indices(indices)
    call.array("d_q", dq)
    call.array("d_k", dk)
    call.struct.d_weights, call.struct.d_scores = call.pointer(dw), call.pointer(d_scores.float().contiguous())
    if q.numel():
        call(build.load().csakit_score_backward)
    return dq, _narrow(dk, k[:, :, None]).squeeze(2), None if weights is None or dw is None else dw.to(weights.dtype)


_dense = Dense(index_scores, log_mass, objective, scores_backward)
dense_kl, dense_kl_backward = _dense.kl, _dense.backward


def _require(*tensors: Tensor | None) -> None:
    why = refuses(*tensors)
    if why:
        raise RuntimeError(f"backend 'cpu-native' was asked for, but {why}. Backend 'cpu' takes the torch path instead")


def _attention(
    q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None, sink: Tensor | None,
    indices: Tensor | None, ranges: Ranges, scale: float, value_width: int, lse: Tensor,
) -> Call:  # fmt: skip
    call = Call(Attention(scale=scale, value_width=value_width))
    for name, x in {"q": q, "kv": kv, "entries": entries, "values": values, "entry_values": entry_values}.items():
        call.array(name, x)
    call.struct.sink = call.pointer(None if sink is None else sink.float().contiguous())
    call.struct.lse = call.pointer(lse)
    call.indices(indices)
    call.ranges(ranges)
    rows, tokens, heads, _ = q.shape
    keys = kv if kv is not None else entries
    assert keys is not None
    struct = call.struct
    struct.rows, struct.tokens, struct.heads, struct.groups = rows, tokens, heads, keys.shape[2]
    struct.sets = 1 if indices is None else indices.shape[2]
    struct.num_entries = 0 if entries is None else entries.shape[1]
    struct.threads = torch.get_num_threads()
    return call


def _scoring(q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, scale: float, relu: bool, sets: int) -> Call:
    call = Call(Scoring(scale=scale, relu=relu, sets=sets))
    call.array("q", q)
    call.array("k", k)
    call.ranges(ranges)
    call.struct.weights = call.pointer(None if weights is None else weights.float().contiguous())
    rows, tokens, heads, _ = q.shape
    struct = call.struct
    struct.rows, struct.tokens, struct.heads, struct.entries = rows, tokens, heads, k.shape[1]
    struct.threads = torch.get_num_threads()
    return call


def _zeros(x: Tensor) -> Tensor:
    """Where the gradient of x is summed: float32, rows of whole vectors."""
    lanes = build.load().csakit_lanes()
    return torch.zeros(*x.shape[:3], -(-x.shape[3] // lanes) * lanes, dtype=torch.float32)


def _narrow(grad: Tensor, x: Tensor) -> Tensor:
    return grad[..., : x.shape[3]].to(x.dtype).contiguous()
