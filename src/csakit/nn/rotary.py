"""Rotary positions as DeepSeek-V4 has them: interleaved pairs, trailing channels, YaRN on compressed layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from csakit.backends.rows import accumulator

from .config import HybridAttentionConfig


class Angles(NamedTuple):
    """Cosine and sine [B, N, R / 2] of the rotation of N rows, one per pair of channels; fp32 (fp64 for fp64 inputs)."""

    cos: Tensor
    sin: Tensor


def frequencies(config: HybridAttentionConfig, *, compressed: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The angle per position of each of the R / 2 pairs of channels, [R / 2].

    Plain rotations of base rope_theta for sliding-only layers. Compressed layers have base compress_rope_theta and YaRN: pairs that turn
    more than beta_fast times over the original length keep their frequency, pairs that turn less than beta_slow times are slowed down
    by `factor`, with a ramp between. No factor on the logits. (Interleaved order; made anew in each forward, so that nothing of it can
    be missing after meta-device initialisation.)
    """
    channels = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    periods = base ** (torch.arange(0, channels, 2, device=device).to(dtype) / channels)
    scaling = config.rope_scaling if compressed else None
    if scaling is None:
        return 1.0 / periods
    low, high = (
        channels * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    )
    first, last = max(math.floor(low), 0), min(math.ceil(high), channels - 1)
    width = max(last - first, 0.001)  # both ends on one pair: a step
    ramp = ((torch.arange(channels // 2, device=device).to(dtype) - first) / width).clamp(0, 1)
    return ramp / (scaling["factor"] * periods) + (1 - ramp) / periods


def angles_at(positions: Tensor, like: Tensor, config: HybridAttentionConfig, *, compressed: bool) -> Angles:
    """The angles of rows at these positions [B, N], in the precision that rows like these are worked on."""
    dtype = accumulator(like)
    turned = positions[..., None].to(dtype) * frequencies(config, compressed=compressed, device=positions.device, dtype=dtype)
    return Angles(turned.cos(), turned.sin())


def rotate(x: Tensor, angles: Angles, *, inverse: bool = False) -> Tensor:
    """x [B, N, D] or [B, N, H, D] with its last R channels rotated, channel 2i with 2i + 1, and the others as they are; in x's dtype."""
    cos, sin = (angle if x.ndim == 3 else angle[:, :, None] for angle in angles)
    sin = -sin if inverse else sin
    plain, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    even, odd = turned.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat([plain, turned.to(x.dtype)], -1)
