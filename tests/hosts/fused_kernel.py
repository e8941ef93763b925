"""A fused sparse kernel's contract in plain torch, from FlashMLA's documented interface of `flash_mla_sparse_fwd`.

Flat queries [s_q, h_q, d_qk], flat keys [s_kv, 1, d_qk] whose first d_v channels are the values, indices [s_q, 1, topk] in which numbers
below 0 or beyond s_kv are invalid, topk_length [s_q] that cuts each row short. The sink scales the output and is not in lse; a row without
any valid index has output 0 and lse +inf; lse_indexer is over the first indexer_topk slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

INF = float("inf")


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[Tensor, ...]:
    """(out [s_q, h_q, d_v], max_logits [s_q, h_q], lse [s_q, h_q]), and lse_indexer [s_q, h_q] when indexer_topk is not 0."""
    assert indices.dtype == torch.int32 and indices.shape[1] == 1 and kv.shape[1] == 1
    keys, slots = kv[:, 0], indices[:, 0].long()
    valid = (slots >= 0) & (slots < keys.shape[0])
    if topk_length is not None:
        valid &= torch.arange(slots.shape[1]) < topk_length[:, None]
    rows = keys[torch.where(valid, slots, 0)]
    logits = (sm_scale * torch.einsum("nhd,nkd->nhk", q, rows)).masked_fill(~valid[:, None], -INF)
    lse = logits.logsumexp(-1)
    total = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(lse.dtype))
    weights = (logits - torch.where(total == -INF, INF, total)[..., None]).exp()
    out = torch.einsum("nhk,nkd->nhd", weights, rows[..., :d_v])

    def marked(x: Tensor) -> Tensor:
        return torch.where(x == -INF, INF, x)

    result = (out, logits.amax(-1), marked(lse))
    return (*result, marked(logits[..., :indexer_topk].logsumexp(-1))) if indexer_topk else result
