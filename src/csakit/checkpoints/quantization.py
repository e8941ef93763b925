"""FP8 tensors with block scales, as in the released files: E4M3 values, one scale per block of 128 x 128.

A scale is UE8M0 (a power of two) in DeepSeek-V4's files, fp32 in older ones. Blocks at the right and lower edge may be smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csakit import checks

BLOCK = 128
FP8 = torch.float8_e4m3fn
UE8M0 = torch.float8_e8m0fnu
_LARGEST = 448.0  # of E4M3


def dequantize(weight: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """weight * scale of its block, [N, K] in dtype; with UE8M0 scales exact in fp32 and in bf16.

    Args:
        weight: [N, K] float8_e4m3fn.
        scale: [ceil(N / 128), ceil(K / 128)], float8_e8m0fnu or a floating-point dtype. uint8 are UE8M0 bytes.

    Raises:
        TypeError, ValueError: another dtype or shape.
    """
    if not isinstance(weight, Tensor) or weight.dtype != FP8 or weight.ndim != 2:
        raise TypeError(f"weight must be a float8_e4m3fn tensor [N, K]; got {checks.describe(weight)}")
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    dequantize_into(result, weight, scale)
    return result


def dequantize_into(result: Tensor, weight: Tensor, scale: Tensor) -> None:
    """Writes what `dequantize` returns into result [N, K], of any dtype and device: no more than a strip of blocks is held beside it."""
    assert result.shape == weight.shape and weight.dtype == FP8
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    if scale.dtype == torch.uint8:
        scale = scale.view(UE8M0)
    checks.tensor("scale", scale, f"[ceil(N / {BLOCK}), ceil(K / {BLOCK})]", blocks, fix=f"weight is {list(weight.shape)}")
    for row, factors in enumerate(scale.float()):
        strip = slice(row * BLOCK, (row + 1) * BLOCK)
        wide = factors.repeat_interleave(BLOCK)[: weight.shape[1]]
        result[strip] = (weight[strip].float() * wide).to(result.dtype)


def quantize(weight: Tensor, *, scale_dtype: torch.dtype = UE8M0) -> tuple[Tensor, Tensor]:
    """(weight [N, K] float8_e4m3fn, scale [ceil(N / 128), ceil(K / 128)]): the inverse of `dequantize`, up to FP8 rounding.

    The scale of a block is amax / 448, with UE8M0 rounded up to a power of two; 1 where all is 0. What came from such a tensor comes back
    with the same values.

    Args:
        weight: [N, K] floating point.
        scale_dtype: torch.float8_e8m0fnu or torch.float32.

    Raises:
        TypeError, ValueError: another kind of weight or scale_dtype.
    """
    checks.tensor("weight", weight, "[N, K]", (None, None))
    if scale_dtype not in (UE8M0, torch.float32):
        raise ValueError(f"scale_dtype must be torch.float8_e8m0fnu or torch.float32; got {scale_dtype}")
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows of blocks, 128, columns of blocks, 128]
    scale = blocks.abs().amax((1, 3)) / _LARGEST
    if scale_dtype == UE8M0:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent with mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-126)
        scale = torch.where(scale == 0, scale, torch.ldexp(torch.ones_like(scale), exponent))
    scale = torch.where(scale == 0, 1, scale)
    values = (blocks / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    return values.flatten(2).flatten(0, 1)[:rows, :columns].to(FP8).contiguous(), scale.to(scale_dtype)
