"""From what a Transformers model is called with to the documents of its rows.

Collators say where documents begin in several ways: `position_ids` that restart, cumulative lengths, sequence numbers, an
attention mask. Here all of them become one Layout. What says it most directly counts: an explicit layout, then cumulative
lengths, then sequence numbers, then positions. The attention mask always removes padding from whatever the others said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from csakit import Layout

OFFSET_NAMES = ("cu_seq_lens_q", "cu_seqlens")


def layout_of(inputs: dict[str, Any], rows: int, tokens: int, *, ratio: int, window: int, explicit: Layout | None = None) -> Layout:
    """The layout of one forward, from its keyword arguments.

    Args:
        inputs: the model's arguments; read are `attention_mask` [B, T] (1 = real), `position_ids` [B, T] or [1, T],
            `cu_seq_lens_q` or `cu_seqlens` [documents + 1] and `seq_idx` [B, T] (-1 = padding). All may be missing.
        rows, tokens: B and T of this forward.
        explicit: documents that are already known; everything but the attention mask is then left unread.

    Raises:
        TypeError: a floating-point mask.
        ValueError: a shape that does not fit [B, T], a 4-D mask, cumulative lengths with several rows, or a mask with a hole inside a
            document.
    """
    mask = of_shape("attention_mask", inputs.get("attention_mask"), rows, tokens)
    documents = _explicit(explicit, rows, tokens, window) if explicit is not None else _documents(inputs, rows, tokens, ratio, window)
    if documents is not None:
        return documents.with_ratio(ratio) if mask is None else _without_padding(documents, mask, ratio, window)
    if mask is not None:
        return Layout.from_mask(mask, ratio=ratio, window=window)
    device = next(value.device for name in ("input_ids", "inputs_embeds") if (value := inputs.get(name)) is not None)
    return Layout.batch(rows, tokens, ratio=ratio, window=window, device=device)


def _documents(inputs: dict[str, Any], rows: int, tokens: int, ratio: int, window: int) -> Layout | None:
    """What the arguments other than the mask say; None when they say nothing."""
    offsets = next((inputs[name] for name in OFFSET_NAMES if inputs.get(name) is not None), None)
    if offsets is not None:
        if rows != 1:
            raise ValueError(f"cumulative lengths describe one packed row; got {rows} rows. Use seq_idx, position_ids or handle.layout")
        return Layout.packed(offsets, ratio=ratio, window=window, tokens=tokens)
    numbers = of_shape("seq_idx", inputs.get("seq_idx"), rows, tokens)
    if numbers is not None:
        return Layout.from_document_ids(numbers, ratio=ratio, window=window)
    positions = of_shape("position_ids", inputs.get("position_ids"), rows, tokens)
    if positions is None:
        return None
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    return Layout.from_document_ids(begins.cumsum(1), ratio=ratio, window=window)


def _explicit(layout: Layout, rows: int, tokens: int, window: int) -> Layout:
    if not isinstance(layout, Layout):
        raise TypeError(f"handle.layout must be a csakit.Layout or None; got {type(layout).__name__}")
    if tuple(layout.positions.shape) != (rows, tokens):
        raise ValueError(
            f"handle.layout describes {list(layout.positions.shape)} tokens, the model was given [{rows}, {tokens}]; "
            "set it before each forward, or to None to have it derived"
        )
    if layout.window != window or layout.block or layout.kv_offset:
        raise ValueError(
            f"handle.layout must describe whole rows with the model's window {window}; "
            f"got window {layout.window}, kv_offset {layout.kv_offset}"
        )
    return layout


def _without_padding(documents: Layout, mask: Tensor, ratio: int, window: int) -> Layout:
    """The same documents where the mask says padding. A hole inside one of them is a mistake of the caller."""
    if mask.dtype.is_floating_point:
        raise TypeError(
            "attention_mask must be bool or 0/1 integers, 1 on real tokens; got a floating-point tensor. "
            "Convert a 0.0/1.0 mask with mask.bool()"
        )
    number = ((documents.positions == 0) & documents.valid).cumsum(1)
    number = torch.where(documents.valid & mask.bool(), number, -1)
    if number.device.type == "cpu" and not torch.compiler.is_compiling() and number.shape[1] > 1:
        seen = number.cummax(1).values[:, :-1]
        if ((number[:, 1:] == seen) & (number[:, 1:] >= 0) & (number[:, :-1] != number[:, 1:])).any():
            raise ValueError("attention_mask has a hole inside a document; padding may lie before, behind and between documents only")
    return Layout.from_document_ids(number, ratio=ratio, window=window)


def queries_of(layout: Layout, start: int, stop: int) -> Layout:
    """The layout of the queries start .. stop - 1 of a whole row, with the kv rows their windows reach back to and all entries."""
    halo = min(max(layout.window - 1, 0), start)
    part = slice(start, stop)
    return replace(
        layout,
        positions=layout.positions[:, part],
        valid=layout.valid[:, part],
        window_start=layout.window_start[:, part] - (start - halo),
        entry_start=layout.entry_start[:, part],
        entry_stop=layout.entry_stop[:, part],
        kv_offset=halo,
    )


def of_shape(name: str, value: Any, rows: int, tokens: int) -> Tensor | None:
    """The argument as [B, T], or None when it is missing.

    Raises:
        ValueError: not a tensor [B, T] or [1, T].
    """
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.ndim != 2:
        what = f"a {value.ndim}-D tensor" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{name} must be [rows, tokens] = [{rows}, {tokens}]; got {what}. csakit reads documents and builds no [T, T] mask"
        )
    if value.shape[1] != tokens or value.shape[0] not in (1, rows):
        raise ValueError(f"{name} must be [rows, tokens] = [{rows}, {tokens}]; got {list(value.shape)}")
    return value.expand(rows, tokens)
