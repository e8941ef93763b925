"""Attention weights of a tiny hybrid model for the checkpoint tests."""

from __future__ import annotations

import torch
from torch import Tensor

from csakit.nn import HybridAttentionConfig, SlidingWindowAttention, attention_layer

CONFIG = HybridAttentionConfig(
    hidden_size=48,
    num_attention_heads=4,
    head_dim=16,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=8,
    index_n_heads=4,
    index_head_dim=8,
    index_topk=2,
    sliding_window=4,
    compress_ratios=(0, 4, 128),
)


def random_layers(dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> dict[int, SlidingWindowAttention]:
    """One layer of each kind, every parameter random."""
    generator = torch.Generator().manual_seed(seed)
    layers = {number: attention_layer(CONFIG, number, dtype=dtype) for number in range(3)}
    with torch.no_grad():
        for layer in layers.values():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


def empty_layers(dtype: torch.dtype = torch.bfloat16) -> dict[int, SlidingWindowAttention]:
    """The same layers on the meta device."""
    return {number: attention_layer(CONFIG, number, dtype=dtype, device="meta") for number in range(3)}


def tensors(layers: dict[int, SlidingWindowAttention]) -> dict[tuple[int, str], Tensor]:
    return {(number, name): value for number, layer in layers.items() for name, value in layer.state_dict().items()}


def same_bits(got: dict[tuple[int, str], Tensor], want: dict[tuple[int, str], Tensor]) -> bool:
    return got.keys() == want.keys() and all(got[key].dtype == want[key].dtype and torch.equal(got[key], want[key]) for key in want)
