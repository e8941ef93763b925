"""One CSA layer of Megatron-LM in csakit's terms: its tensors in csakit's layout, its output and its indexer's loss.

B rows, T tokens, H heads, D width, I index heads, C index width. Megatron's SBHD is [T, B, ..]; its THD is [T, ..] with B = 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import csakit

from ...backends.rows import INF
from ...layout import Layout
from ...selection import Selection
from ..flash_mla import Addresses, packed_entries


class Inputs(NamedTuple):
    """The tensors of a layer: attention's, then the indexer's (detached from the model at its entrance)."""

    layout: Layout
    q: Tensor  # [B, T, H, D]
    kv: Tensor  # [B, T, D]
    entries: Tensor  # [B, E, D]
    q_index: Tensor  # [B, T, I, C]
    k_index: Tensor  # [B, E, C]
    weights: Tensor  # [B, T, I]
    tokens: Tensor | None = None  # scalar, the real tokens of all ranks where this is one rank's part; None: those of the layout


def sbhd_inputs(layer: Any, query: Tensor, x: Tensor, qr: Tensor, kv_full: Tensor, offset: int, packed_seq_params: Any) -> Inputs:
    """From SBHD tensors: query [T, B, H, D]; kv_full [T + E, B, D] holds `offset` = T tokens, then the entries."""
    q_index, k_index, weights = layer.indexer.forward_before_topk(x.detach(), qr.detach(), packed_seq_params)
    tokens, rows = query.shape[:2]
    layout = Layout.batch(rows, tokens, ratio=layer.compress_ratio, window=layer.window_size, device=query.device)
    tensors = (query, kv_full[:offset], kv_full[offset:], q_index, k_index, weights)
    return Inputs(layout, *(tensor.transpose(0, 1) for tensor in tensors))


def thd_inputs(
    layer: Any,
    query: Tensor,
    x: Tensor,
    qr: Tensor,
    kv_full: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_kv_full: Tensor,
    packed_seq_params: Any,
) -> Inputs:
    """From THD tensors: query [T, H, D]; kv_full holds, segment by segment, its tokens and then its entries.

    cu_seqlens are the segments' rooms (padded, if they are); packed_seq_params.cu_seqlens_q says how much of each is real. Megatron also
    compresses a segment's padding; csakit's entries are those of the real tokens.
    """
    q_index, k_index, weights, cu_index = layer.indexer.forward_before_topk(x.detach(), qr.detach(), packed_seq_params)
    layout = Layout.packed(
        packed_seq_params.cu_seqlens_q,
        cu_seqlens_padded=cu_seqlens,
        tokens=query.shape[0],
        ratio=layer.compress_ratio,
        window=layer.window_size,
    )
    addresses = Addresses.thd(layout, cu_seqlens, cu_entries=cu_seqlens_kv_full - cu_seqlens)
    index_rows, _ = packed_entries(layout, cu_seqlens, cu_entries=cu_index)
    return Inputs(
        layout,
        query[None],
        take(kv_full, addresses.tokens),
        take(kv_full, addresses.entries),
        q_index.transpose(0, 1),
        take(k_index.squeeze(1), index_rows),
        weights.transpose(0, 1),
    )


def forward(
    layer: Any, inputs: Inputs, denominator: str, out: Tensor | None = None, picked: Selection | None = None
) -> tuple[Tensor, Tensor | None]:
    """(out [T, B, H * D], the loss for Megatron's auto-scaler or None) of one layer; out and selection as given, if they are.

    In training the loss is coefficient * sum of KL / divisor; the divisor is 1 in per-token mode, where Megatron divides all gradients by
    its global token count, else the number of real tokens. Without a coefficient it is a 0 through which the indexer gets zero gradients:
    Megatron's gradient buckets wait for every parameter.
    """
    layout, q, kv, entries, q_index, k_index, weights, tokens = inputs
    config, indexer = layer.config, layer.indexer
    training = layer.training and torch.is_grad_enabled()
    coefficient = float(config.dsa_indexer_loss_coeff or 0.0)
    teach = training and coefficient > 0
    attended = config.dsa_indexer_use_sparse_loss and denominator == "attended"
    options: dict[str, Any] = {"sink": layer.attn_sink, "scale": layer.softmax_scale}

    if picked is None:
        topk = max(1, min(indexer.index_topk, layout.num_entries))
        picked = csakit.select(q_index, k_index, weights, topk, layout, scale=indexer.softmax_scale)
    mass = None
    if out is None:
        seen = csakit.attend(q, kv, entries, layout, indices=picked.indices, teacher=teach and attended, **options)
        out, mass = seen.out.flatten(2).transpose(0, 1), seen.log_mass
    if not training:
        return out, None
    if not teach:
        return out, no_loss(picked)
    if mass is None:
        chosen = picked.indices if config.dsa_indexer_use_sparse_loss else None
        with torch.no_grad():
            lse = csakit.attend(q, kv, entries, layout, indices=chosen if attended else None, **options).lse
    group = indexer.pg_collection.tp
    reduction: dict[str, Any] = {
        "divisor": 1.0 if config.calculate_per_token_loss else tokens,
        "group": group if group is not None and group.size() > 1 else None,
    }
    if not config.dsa_indexer_use_sparse_loss:
        result = csakit.distill_dense(
            q_index, k_index, weights, q, entries, lse, layout,
            index_scale=indexer.softmax_scale, scale=layer.softmax_scale, **reduction,
        )  # fmt: skip
    else:
        if mass is None:
            mass = csakit.teacher_log_mass(q, entries, lse, layout, indices=chosen, scale=layer.softmax_scale)
        result = csakit.distill(picked.scores, mass, layout, **reduction)
    return out, coefficient * result.loss


def no_loss(picked: Selection) -> Tensor:
    """A 0 with zero gradients for the indexer."""
    return 0.0 * torch.where(picked.scores == -INF, 0, picked.scores).sum()


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], 0 where the index is -1: [N, D] and [B, M] -> [B, M, D]."""
    if not rows.shape[0]:
        return rows.new_zeros(*index.shape, rows.shape[1])
    return torch.where((index >= 0)[..., None], rows[index.clamp(min=0)], 0)
