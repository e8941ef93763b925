"""The specification as dense torch: no chunks, no flags, any device, any dtype, fp64 all the way when asked.

B rows, T tokens, H heads in S sets, D width, N keys, E entries, K slots, I index heads, C index width, G KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import INF, Ranges, accumulator, objective, over_ranks, subtrahend


def attend(
    q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None, sink: Tensor | None,
    indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int, teacher: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(out [B,T,H,Dv], lse [B,T,H], log_mass [B,T,S,K] or None). One softmax over window, attended entries and sink:

    Z = exp(sink) + sum_window exp(w) + sum_entries exp(c),  lse = ln Z,  out = sum exp(logit - lse) value    (V4 eq. 27)
    """
    keys, vals, mask = _memory(q, kv, entries, values, entry_values, indices, ranges, value_width)
    logits = (scale * torch.einsum("bthd,bnhd->bthn", q.to(keys.dtype), keys)).masked_fill(~mask, -INF)
    with_sink = logits if sink is None else torch.cat([logits, sink.to(logits.dtype).expand(logits.shape[:3])[..., None]], -1)
    lse = with_sink.logsumexp(-1).masked_fill(~ranges.valid[..., None], -INF)
    p = (logits - subtrahend(lse)[..., None]).exp().masked_fill(~mask, 0)
    out = _product("bthn,bnhd->bthd", p, vals, mask)
    mass = None
    if teacher and indices is not None and entries is not None:
        mass = log_mass(q, entries, lse, indices, ranges, scale=scale, sets=indices.shape[2])
    return out.to(q.dtype), lse, mass


def attend_backward(
    d_out: Tensor, lse: Tensor, q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None,
    sink: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, value_width: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, kv, entries, values, entry_values, sink.

    dlogit = P (dO . value - delta),  delta = sum_j P (dO . value),  dq = scale dlogit keys,  dkey = scale dlogit q,
    dvalue = P dO,  dsink = -sum_rows exp(sink - lse) delta
    """
    keys, vals, mask = _memory(q, kv, entries, values, entry_values, indices, ranges, value_width)
    qf, d_out, steady = q.to(keys.dtype), d_out.to(keys.dtype), subtrahend(lse)
    p = (scale * torch.einsum("bthd,bnhd->bthn", qf, keys) - steady[..., None]).exp().masked_fill(~mask, 0)
    dp = torch.einsum("bthd,bnhd->bthn", d_out, vals).masked_fill(~mask, 0)
    delta = (p * dp).sum(-1)
    dlogit = (p * (dp - delta[..., None])).masked_fill(~mask, 0)
    dq = scale * _product("bthn,bnhd->bthd", dlogit, keys, mask)
    dkeys = scale * _product("bthn,bthd->bnhd", dlogit, qf, mask)
    dvals = _product("bthn,bthd->bnhd", p, d_out, mask)
    dsink = None
    if sink is not None:
        share = (sink.to(lse.dtype) - steady).exp().masked_fill(~sink.isfinite(), 0)
        dsink = -torch.where(ranges.valid[..., None], share * delta, 0).sum((0, 1)).to(sink.dtype)
    if values is None and entry_values is None:
        dkeys[..., :value_width] += dvals
    window = 0 if kv is None else kv.shape[1]

    def part(d: Tensor, x: Tensor | None, rows: slice) -> Tensor | None:
        return None if x is None else d[:, rows].unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)

    first, rest = slice(0, window), slice(window, None)
    return (
        dq.to(q.dtype),
        part(dkeys, kv, first),
        part(dkeys, entries, rest),
        part(dvals, values, first),
        part(dvals, entry_values, rest),
        dsink,
    )


def log_mass(q: Tensor, entries: Tensor, lse: Tensor, indices: Tensor | None, ranges: Ranges, *, scale: float, sets: int) -> Tensor:
    """[B,T,S,K], or [B,T,S,E] without indices: logsumexp over the heads of a set of (c - lse), -inf on empty slots (math.md section 6)."""
    dtype = accumulator(q, entries, lse)
    keys = entries.to(dtype).repeat_interleave(q.shape[2] // entries.shape[2], 2)
    c = scale * torch.einsum("bthd,behd->bthe", q.to(dtype), keys) - subtrahend(lse.to(dtype))[..., None]
    mass = c.unflatten(2, (sets, -1)).logsumexp(3).masked_fill(~_visible(ranges, entries.shape[1]), -INF)
    return mass if indices is None else _take(mass, indices, ranges)


def index_scores(q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, scale: float, relu: bool, sets: int) -> Tensor:
    """[B,T,S,E]: scale * sum_i weights_i relu(q_i . k_e) over the index heads of a set, -inf where not visible (V4 eq. 16)."""
    products = _dots(q, k, relu)
    weighted = products if weights is None else products * weights.to(products.dtype)[..., None]
    return (scale * weighted.unflatten(2, (sets, -1)).sum(3)).masked_fill(~_visible(ranges, k.shape[1]), -INF)


def select(
    q: Tensor, k: Tensor, weights: Tensor | None, ranges: Ranges, *, topk: int, scale: float, relu: bool, sets: int
) -> tuple[Tensor, Tensor]:
    """(indices [B,T,S,K] int32 ascending, -1 empty and last; their scores, -inf empty). Ties go to the lowest entry (eq. 17)."""
    scores = index_scores(q, k, weights, ranges, scale=scale, relu=relu, sets=sets)
    entries = k.shape[1]
    visible = _visible(ranges, entries).expand(scores.shape)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]  # stable: equal scores stay in entry order, NaN first
    chosen = torch.where(visible.gather(-1, order), order, entries).sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=entries)
    indices = torch.where(chosen < entries, chosen, -1).to(torch.int32)
    return indices, _take(scores, indices, ranges)


def scores_backward(
    d_scores: Tensor, q: Tensor, k: Tensor, weights: Tensor | None, indices: Tensor | None, ranges: Ranges, *, scale: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, weights from those of the scores [B,T,S,K] of the slots ([B,T,S,E] without indices). relu'(0) = 0."""
    products, sets, entries = _dots(q, k, relu), d_scores.shape[2], k.shape[1]
    live, grad = _visible(ranges, entries), d_scores.to(products.dtype)
    if indices is not None:
        live, slot = _chosen(indices, ranges, entries)
        grad = grad.new_zeros(*slot.shape[:3], entries + 1).scatter(-1, slot, grad)[..., :-1]
    per_head = (q.shape[2] // sets, 2)
    live = live.expand(grad.shape).repeat_interleave(*per_head)
    grad = torch.where(live, scale * grad.repeat_interleave(*per_head), 0)
    active = live & (products > 0) if relu else live
    d_dots = torch.where(active, grad if weights is None else grad * weights.to(grad.dtype)[..., None], 0)
    dq = _product("btie,bec->btic", d_dots, k.to(grad.dtype), active)
    dk = _product("btie,btic->bec", d_dots, q.to(grad.dtype), active)
    dw = None if weights is None else torch.where(live, grad * products, 0).sum(-1).to(weights.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dw


def dense_kl(
    q_index: Tensor, k_index: Tensor, weights: Tensor | None, q: Tensor, entries: Tensor, lse: Tensor, ranges: Ranges,
    *, index_scale: float, scale: float, relu: bool, sets: int, group: str,
) -> Tensor:  # fmt: skip
    """[B,T]: KL(teacher || student) over every visible entry (V3.2 eq. 3)."""
    scores = index_scores(q_index, k_index, weights, ranges, scale=index_scale, relu=relu, sets=sets)
    mass = over_ranks(log_mass(q, entries, lse, None, ranges, scale=scale, sets=sets), group)
    return objective(scores, mass, ranges.valid, None)[0]


def dense_kl_backward(
    d_kl: Tensor, q_index: Tensor, k_index: Tensor, weights: Tensor | None, q: Tensor, entries: Tensor, lse: Tensor, ranges: Ranges,
    *, index_scale: float, scale: float, relu: bool, sets: int, group: str,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q_index, k_index, weights: d kl / d score = student - teacher."""
    scores = index_scores(q_index, k_index, weights, ranges, scale=index_scale, relu=relu, sets=sets)
    mass = over_ranks(log_mass(q, entries, lse, None, ranges, scale=scale, sets=sets), group)
    d_scores = objective(scores, mass, ranges.valid, d_kl)[1]
    assert d_scores is not None
    return scores_backward(d_scores, q_index, k_index, weights, None, ranges, scale=index_scale, relu=relu)


def _visible(ranges: Ranges, entries: int) -> Tensor:
    """[B,T,1,E]: the entries entry_start .. entry_stop - 1 of a token."""
    entry = torch.arange(entries, device=ranges.valid.device)
    return ((entry >= ranges.entry_start[..., None]) & (entry < ranges.entry_stop[..., None]))[:, :, None]


def _chosen(indices: Tensor, ranges: Ranges, entries: int) -> tuple[Tensor, Tensor]:
    """([B,T,S,E] which entries a set has chosen, [B,T,S,K] the entry of each slot). What is not visible is empty: column E."""
    inside = (indices >= ranges.entry_start[..., None, None]) & (indices < ranges.entry_stop[..., None, None])
    slot = torch.where(inside, indices, entries).long()
    chosen = torch.zeros(*slot.shape[:3], entries + 1, dtype=torch.bool, device=slot.device).scatter(-1, slot, inside)
    return chosen[..., :-1], slot


def _take(full: Tensor, indices: Tensor, ranges: Ranges) -> Tensor:
    """[B,T,S,E] -> [B,T,S,K]: what belongs to each slot, -inf on empty slots."""
    slot = _chosen(indices, ranges, full.shape[-1])[1]
    return torch.nn.functional.pad(full, (0, 1), value=-INF).gather(-1, slot)


def _dots(q: Tensor, k: Tensor, relu: bool) -> Tensor:
    dtype = accumulator(q, k)
    dots = torch.einsum("btic,bec->btie", q.to(dtype), k.to(dtype))
    return dots.relu() if relu else dots


def _memory(
    q: Tensor, kv: Tensor | None, entries: Tensor | None, values: Tensor | None, entry_values: Tensor | None,
    indices: Tensor | None, ranges: Ranges, value_width: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """All a query can reach in one array, kv rows before entries: keys and values [B,N,H,.] and who sees what [B,T,H,N]."""
    dtype, heads = accumulator(q, kv, entries, values, entry_values), q.shape[2]

    def join(a: Tensor | None, b: Tensor | None) -> Tensor:
        rows = torch.cat([x.to(dtype) for x in (a, b) if x is not None], 1)
        return rows.repeat_interleave(heads // rows.shape[2], 2)  # head h uses KV head h // (H / G)

    masks = []
    if kv is not None:
        row, query = torch.arange(kv.shape[1], device=q.device), torch.arange(q.shape[1], device=q.device)[:, None] + ranges.kv_offset
        window = (row >= ranges.window_start[..., None]) & (row <= query)
        masks.append(window[:, :, None].expand(-1, -1, heads, -1))
    if entries is not None:
        seen = _visible(ranges, entries.shape[1]) if indices is None else _chosen(indices, ranges, entries.shape[1])[0]
        masks.append(seen.repeat_interleave(heads // seen.shape[2], 2))  # head h uses set h // (H / S)
    keys = join(kv, entries)
    vals = keys[..., :value_width] if values is None and entry_values is None else join(values, entry_values)
    return keys, vals, torch.cat(masks, -1)


def _product(equation: str, weights: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """The einsum, in which rows that the mask leaves out have no influence, not even as NaN or Inf (0 * NaN is NaN)."""
    bad = ~rows.isfinite()
    touched = torch.einsum(equation, mask.to(weights.dtype), bad.to(weights.dtype)) > 0
    return torch.einsum(equation, weights, rows.masked_fill(bad, 0)).masked_fill(touched, float("nan"))
