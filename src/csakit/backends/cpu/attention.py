"""attend and its backward in chunks of queries; the log-mass comes from the logits the forward has computed anyway.

C queries of a chunk, H heads in S sets, n keys of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import INF, Ranges, accumulator, subtrahend
from .parts import Block, Chunk, Memory, Part, Scratch, all_finite, chunks, entries_part, masked_, tile_size, window_part


def attend(
    q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None, sink: Tensor | None,
    indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int, teacher: bool, tile: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out [B,T,H,Dv], lse [B,T,H], log_mass [B,T,S,K] or None)."""
    dtype = accumulator(q, kv, entries, values, entry_values)
    kv, entries, values, entry_values = (None if x is None else x.contiguous() for x in (kv, entries, values, entry_values))
    finite = all_finite(kv, entries, values, entry_values)
    rows, tokens, heads, _ = q.shape
    out = q.new_empty(rows, tokens, heads, value_width)
    lse = q.new_empty(rows, tokens, heads, dtype=dtype)
    teacher = teacher and indices is not None
    mass = q.new_empty(*indices.shape, dtype=dtype) if teacher and indices is not None else None
    sink = None if sink is None else sink.to(dtype)
    scratch = Scratch(dtype)
    for chunk in chunks(ranges, _tile(q, kv, entries, indices, ranges, tile)):
        at = (chunk.row, chunk.queries)
        parts, column = _parts(chunk, kv, entries, values, entry_values, indices, ranges, value_width, scratch, finite)
        scaled = q[at].to(dtype) * scale
        logits = [masked_(part.dots(scaled), part.live) for part in parts]
        top = _greatest(logits, sink, scaled)
        total = torch.zeros_like(top) if sink is None else (sink - top).exp()
        for x in logits:
            total += x.sub_(top[..., None]).exp_().sum(-1)
        inverse = torch.where(total == 0, 0, total.reciprocal())
        result = sum(part.values_by(x) for part, x in zip(parts, logits))
        out[at] = result * inverse[..., None]
        lse[at] = top + total.log()
        if chunk.padded:
            lse[at].masked_fill_(~ranges.valid[at][:, None], -INF)
        if mass is not None:
            mass[at] = _by_slot(_set_mass(parts[-1], logits[-1], inverse, scaled, lse[at], mass.shape[2]), column, parts[-1].live)
    return out, lse, mass


def attend_backward(
    d_out: Tensor, lse: Tensor, q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None,
    sink: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int, tile: int = 0,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, kv, entries, values, entry_values, sink. Recomputes the probabilities from lse."""
    dtype = accumulator(q, kv, entries, values, entry_values)
    inputs = kv, entries, values, entry_values = [None if x is None else x.contiguous() for x in (kv, entries, values, entry_values)]
    finite = all_finite(q, d_out, *inputs)
    d_memory = [None if x is None else torch.zeros(x.shape, dtype=dtype) for x in inputs]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_sink = None if sink is None else torch.zeros(sink.shape, dtype=dtype)
    scratch = Scratch(dtype)
    for chunk in chunks(ranges, _tile(q, kv, entries, indices, ranges, tile)):
        at = (chunk.row, chunk.queries)
        parts, _ = _parts(chunk, kv, entries, values, entry_values, indices, ranges, value_width, scratch, finite, d_memory)
        scaled, upstream, steady = q[at].to(dtype) * scale, d_out[at].to(dtype), subtrahend(lse[at])
        p = [masked_(part.dots(scaled), part.live).sub_(steady[..., None]).exp_() for part in parts]
        d_p = [part.value_dots(upstream) for part in parts]
        if not finite:  # a NaN query or gradient reaches what the query sees, and nothing else
            d_p = [masked_(x, part.live, 0) for x, part in zip(d_p, parts)]
        delta = torch.stack([torch.linalg.vecdot(a, b) for a, b in zip(p, d_p)]).sum(0)
        d_logits = [b.sub_(delta[..., None]).mul_(a) for a, b in zip(p, d_p)]
        dq[at] = sum(part.keys_by(x) for part, x in zip(parts, d_logits)) * scale
        for part, a, d_logit in zip(parts, p, d_logits):
            part.add_key_gradient(d_logit, scaled)
            part.add_value_gradient(a, upstream)
        if d_sink is not None and sink is not None:
            share = (sink.to(dtype) - steady).exp() * delta
            d_sink -= torch.where(ranges.valid[at][:, None] & sink.isfinite(), share, 0).sum(0)
    d_inputs = [None if d is None or x is None else d.to(x.dtype) for d, x in zip(d_memory, inputs)]
    return dq, *d_inputs, None if d_sink is None or sink is None else d_sink.to(sink.dtype)


def log_mass(
    q: Tensor, entries: Tensor, lse: Tensor, indices: Tensor | None, ranges: Ranges, *, scale: float, sets: int, tile: int = 0
) -> Tensor:
    """[B,T,S,K], or [B,T,S,E] without indices."""
    dtype = accumulator(q, entries, lse)
    shape = (*q.shape[:2], sets, entries.shape[1]) if indices is None else indices.shape
    out, entries = q.new_full(shape, -INF, dtype=dtype), entries.contiguous()
    scratch = Scratch(dtype)
    finite = all_finite(entries)
    for chunk in chunks(ranges, _tile(q, None, entries, indices, ranges, tile)):
        at = (chunk.row, chunk.queries)
        part, column = entries_part(_memory(chunk, entries, None, entries.shape[3]), chunk, ranges, indices, scratch, finite=finite)
        mass = set_log_mass(part, q[at].to(dtype) * scale, lse[at].to(dtype), sets)
        if indices is not None:
            out[at] = _by_slot(mass, column, part.live)
        elif isinstance(part, Block):
            out[at][..., chunk.entries] = mass
        else:
            spread(out[at], mass, part.live, ranges.entry_start[at])
    return out


def set_log_mass(part: Part, scaled: Tensor, lse: Tensor, sets: int) -> Tensor:
    """[C, S, n]: logsumexp over the heads of each set of (logit - lse)."""
    relative = masked_(part.dots(scaled), part.live).sub_(subtrahend(lse)[..., None])
    count, heads, slots = relative.shape
    return relative.view(count, sets, heads // sets, slots).logsumexp(2)


def spread(out: Tensor, mass: Tensor, live: Tensor, start: Tensor) -> None:
    """Writes mass [C, S, n] of visible entries start, start + 1, .. into out [C, S, E]."""
    where = live.expand(mass.shape).nonzero(as_tuple=True)
    out[where[0], where[1], where[2] + start.long()[where[0]]] = mass[where]


def _set_mass(part: Part, weights: Tensor, inverse: Tensor, scaled: Tensor, lse: Tensor, sets: int) -> Tensor:
    """set_log_mass from weights = exp(logit - top) that are there already; exact again where they underflow."""
    count, heads, slots = weights.shape
    mass = torch.bmm(inverse.view(count * sets, 1, heads // sets), weights.view(count * sets, heads // sets, slots)).view(
        count, sets, slots
    )
    if ((mass < 1e8 * torch.finfo(mass.dtype).tiny) & part.live).any():
        return set_log_mass(part, scaled, lse, sets)
    return mass.log_()


def _by_slot(mass: Tensor, column: Tensor | None, live: Tensor) -> Tensor:
    """Of a Block, the log-mass of each slot; of gathered rows, which are the slots, only the live ones."""
    if column is None:
        return torch.where(live, mass, -INF)
    return torch.nn.functional.pad(mass, (0, 1), value=-INF).gather(2, column)


def _greatest(logits: list[Tensor], sink: Tensor | None, scaled: Tensor) -> Tensor:
    """[C, H]: the greatest finite logit of each row, the sink's included; 0 where there is none."""
    top = scaled.new_full(scaled.shape[:2], -INF)
    for x in logits:
        if x.shape[2]:
            top = torch.maximum(top, x.amax(-1))
    if sink is not None:
        top = torch.maximum(top, torch.where(sink.isfinite(), sink, -INF))
    return torch.where(top == -INF, 0, top)


def _memory(
    chunk: Chunk, keys: Tensor, values: Tensor | None, width: int, d_keys: Tensor | None = None, d_values: Tensor | None = None
) -> Memory:
    def row(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[chunk.row]

    return Memory(keys[chunk.row], row(values), width, row(d_keys), row(d_values))


def _parts(
    chunk: Chunk, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None, indices: Tensor | None,
    ranges: Ranges, width: int, scratch: Scratch, finite: bool, d_memory: list[Tensor | None] | None = None,
) -> tuple[list[Part], Tensor | None]:  # fmt: skip
    """Window first, then entries, as far as they are there."""
    d_kv, d_entries, d_values, d_entry_values = d_memory or [None] * 4
    parts: list[Part] = []
    column = None
    if kv is not None:
        parts.append(window_part(_memory(chunk, kv, values, width, d_kv, d_values), chunk, ranges, scratch, finite=finite))
    if entries is not None:
        memory = _memory(chunk, entries, entry_values, width, d_entries, d_entry_values)
        part, column = entries_part(memory, chunk, ranges, indices, scratch, finite=finite)
        parts.append(part)
    return parts, column


def _tile(q: Tensor, kv: Tensor | None, entries: Tensor | None, indices: Tensor | None, ranges: Ranges, tile: int) -> int:
    """Queries per chunk, from the logits and gathered rows that one query needs."""
    tokens, heads, width = q.shape[1:]
    own = torch.arange(tokens) + (ranges.kv_offset + 1)
    keys = 0 if kv is None or not ranges.window_start.numel() else max(int((own - ranges.window_start).amax()), 0)
    gathered = 0
    if entries is not None and indices is not None:
        gathered = indices.shape[3] * max(indices.shape[2], entries.shape[2])
        keys += indices.shape[3]
    elif entries is not None:
        keys += entries.shape[1]
    size = 8 if q.dtype == torch.float64 else 4
    return tile_size(size * (2 * heads * keys + gathered * width), tile)
