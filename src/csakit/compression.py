"""compress: pools the tokens of each block into one entry."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .backends.rows import INF, accumulator
from .layout import Layout, take_rows, token_shape


def compress(values: Tensor, gates: Tensor, bias: Tensor, layout: Layout, *, overlap: bool = True) -> Tensor:
    """The compressed entries [B, E, D] in values' dtype, pooled in fp32 (fp64 for fp64); 0 on spare capacity.

    Per document and channel one softmax over the gates of 2m slots: the m tokens of the entry's own block with the last D columns
    of values and gates, and the m tokens of the block before it with the first D columns. The first block of a document has no
    block before it. Without overlap: the m tokens of the own block. The norm and rotation that follow belong to the layer.

        entry = sum over slots of softmax(gate + bias) * value                 (V4 eq. 9-12; eq. 20-23 without overlap)

    Args:
        values, gates: [B, T, 2 * D], or [B, T, D] without overlap; any float dtype. Padding has no influence, whatever it holds.
        bias: [m, 2 * D] or [m, D], added to the gates by position inside the block; may have another float dtype.
        layout: of the whole rows.

    Raises:
        TypeError, ValueError: an argument of another kind or shape; a layout of blocks or of a part of the row.
    """
    checks.flag("overlap", overlap)
    rows, tokens = token_shape(layout)
    checks.tensor("values", values, "[B, T, 2 * D]" if overlap else "[B, T, D]", (rows, tokens, None))
    channels = values.shape[2]
    checks.tensor("gates", gates, "of the shape of values", (rows, tokens, channels))
    checks.tensor("bias", bias, "[ratio, channels of values]", (layout.ratio, channels))
    if overlap and channels % 2:
        raise ValueError(
            f"values must have an even number of channels, [previous | current] half; got {channels}. Without halves pass overlap=False"
        )
    if layout.block:
        raise ValueError("compress needs a layout of compressed entries; in a layout of blocks the tokens themselves are attended")
    if layout.kv_offset or layout.num_entries > tokens // layout.ratio:
        raise ValueError("compress needs the layout of whole rows; this one is a part. Compress before shard, or gather the rows")
    dtype = accumulator(values, gates)
    with torch.autocast(values.device.type, enabled=False):
        pooled = _pool(values.to(dtype), gates.to(dtype), bias.to(dtype), layout, channels // 2 if overlap else 0)
        return pooled.to(values.dtype)


def _pool(values: Tensor, gates: Tensor, bias: Tensor, layout: Layout, half: int) -> Tensor:
    """half: channels of the previous half, 0 without overlap."""
    first = layout.entry_token
    within = torch.arange(layout.ratio, device=first.device)
    live = first >= 0
    before = live & (layout.positions.gather(1, first.clamp(min=0).long()) > 0) if layout.num_entries else live

    def slots(offset: int, there: Tensor, channels: slice) -> tuple[Tensor, Tensor]:
        token = torch.where(there[..., None], first[..., None] + within - offset, 0).flatten(1)

        def take(rows: Tensor) -> Tensor:
            return take_rows(rows[..., channels], token).unflatten(1, (layout.num_entries, layout.ratio))

        mask = there[..., None, None]
        return torch.where(mask, take(values), 0), torch.where(mask, take(gates) + bias[:, channels], -INF)

    value, gate = slots(0, live, slice(half, None))
    if half:
        previous_value, previous_gate = slots(layout.ratio, before, slice(half))
        value, gate = torch.cat([previous_value, value], 2), torch.cat([previous_gate, gate], 2)
    gate = torch.where(live[..., None, None], gate, 0)  # spare entries: any finite gate, their values are 0
    return (gate.softmax(2) * value).sum(2)
