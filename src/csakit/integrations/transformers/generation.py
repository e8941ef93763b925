"""Forwards with a cache: csakit steps aside to the stock layers where these are right, and refuses where they are not."""

from __future__ import annotations

from typing import Any

import torch

from csakit import Layout

from .documents import OFFSET_NAMES
from .forwards import Plan


def check_cached(inputs: dict[str, Any], plan: Plan, layout: Layout | None, *, training: bool) -> None:
    """Raises unless the stock layers give this cached forward its right result.

    Raises:
        ValueError: a forward that should train (the stock layers train no indexer), padding or packed documents (the stock cache pools
            entries across both), positions that do not continue the cache, or a stage whose attention the stock layers do not have.
    """
    if training:
        raise ValueError(
            "with a cache the stock layers run, which train no indexer; pass use_cache=False (csakit's default) while training"
        )
    if not plan.selects:
        raise ValueError(
            "with a cache the stock layers select entries, this stage attends to all; pass use_cache=False, or handle.stage('sparse')"
        )
    if layout is not None or any(inputs.get(name) is not None for name in (*OFFSET_NAMES, "seq_idx")):
        raise ValueError("the stock cache pools entries across packed documents; pass use_cache=False, or one document per row")
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask.all():
        raise ValueError(
            "the stock cache pools padding into compressed entries, so a padded batch comes out wrong; "
            "generate with use_cache=False, or prompts of one length"
        )
    cache = inputs["cache"] if inputs.get("cache") is not None else inputs.get("past_key_values")
    positions = inputs.get("position_ids")
    if positions is not None:
        start = cache.get_seq_length() if cache is not None else 0
        expected = torch.arange(start, start + positions.shape[-1], device=positions.device)
        if not (positions == expected).all():
            raise ValueError(
                f"with a cache of {start} tokens position_ids must be {start}, {start + 1}, ..; got others. Pass use_cache=False"
            )
