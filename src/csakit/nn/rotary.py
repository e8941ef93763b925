"""Rotary positions as DeepSeek-V4 has them: interleaved pairs, trailing channels, YaRN on compressed layers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    """x [B, N, .., D] with its last R channels rotated, channel 2i with 2i + 1, and the others as they are; contiguous, in x's dtype.

        (x[2i] + j x[2i + 1]) e^(j angle[i]),  and with -angle where `inverse`

    Worked in the precision of the angles. One copy forward and one backward, whatever the layout of the gradient; the rotation itself
    touches the R channels alone. Differentiable once, for x.
    """
    return _Rotation.apply(x, angles.cos, -angles.sin if inverse else angles.sin)


def rotate_(x: Tensor, angles: Angles, *, inverse: bool = False) -> Tensor:
    """x itself, rotated in place like `rotate`: for a tensor nobody else needs, where no gradients are recorded."""
    return _turn_(x, angles.cos, -angles.sin if inverse else angles.sin)


def rotate_unit_rows(x: Tensor, angles: Angles, eps: float) -> Tensor:
    """x [B, N, .., D] with rows of unit mean square, then rotated like `rotate`; in x's dtype.

        rotate(x / sqrt(mean(x^2) + eps))                                                            (the queries of DeepSeek-V4)

    Worked in the precision of the angles. The backward needs the result and a number per row, not x. Differentiable once, for x.
    """
    return _UnitRotation.apply(x, *angles, eps)


def _turn_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, N, .., D], its last R channels rotated in place by the angles [B, N, R / 2]."""
    heads = (1,) * (x.ndim - cos.ndim)
    turn = torch.complex(cos, sin).unflatten(1, (-1, *heads))
    tail = x[..., x.shape[-1] - 2 * cos.shape[-1] :]
    pairs = tail.to(cos.dtype, copy=True, memory_format=torch.contiguous_format).unflatten(-1, (-1, 2))
    tail.copy_(torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2))
    return x


class _Rotation(torch.autograd.Function):
    """The rotation of x by (cos, sin): of its gradient, by (cos, -sin)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn_(x.clone(memory_format=torch.contiguous_format), cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn_(d_out.clone(memory_format=torch.contiguous_format), cos, -sin), None, None


class _UnitRotation(torch.autograd.Function):
    """out = R (x s) with s = 1 / sqrt(mean(x^2) + eps) of each row and R its rotation.

    Of the norm alone, u = x s, the gradient is d_x = s (d_u - u mean(u d_u)). R is orthogonal, so that with d_u = R^T d_out and
    out = R u the mean is that of out d_out, and d_x = R^T s (d_out - out mean(out d_out)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        rows = x.to(cos.dtype)
        scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square().div(x.shape[-1]).add(eps).rsqrt()
        out = _turn_((rows * scale).to(x.dtype), cos, sin)
        ctx.save_for_backward(out, scale, cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None, None]:
        out, scale, cos, sin = ctx.saved_tensors
        rows, upstream = out.to(cos.dtype), d_out.to(cos.dtype)
        product = rows * upstream
        mean = product.mean(-1, keepdim=True)
        d_x = torch.addcmul(upstream, rows, mean, value=-1, out=product).mul_(scale)
        return _turn_(d_x, cos, -sin).to(out.dtype), None, None, None
