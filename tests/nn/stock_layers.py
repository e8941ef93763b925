"""Stock Transformers attention layers of a tiny DeepSeek-V4, and csakit's layers with the same weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4Config, DeepseekV4RotaryEmbedding

from csakit import Layout
from csakit.checkpoints import official_names
from csakit.nn import HybridAttentionConfig, SlidingWindowAttention, attention_layer

SLIDING, CSA, HCA = KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
WINDOW, TOPK, HIDDEN = 8, 4, 64


def stock_config(**changes) -> DeepseekV4Config:
    """Layer n is of kind n. YaRN is on. Sixteen index heads, so that ReLU makes no exact zero ties, which the stock topk breaks anyhow."""
    settings = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "layer_types": list(KINDS),
        "num_attention_heads": 4,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": TOPK,
        "sliding_window": WINDOW,
        "compress_rates": {CSA: 4, HCA: 16},
        "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
        "max_position_embeddings": 16 * 64,
        "attn_implementation": "eager",
    }
    return DeepseekV4Config(**{**settings, **changes})


def stock_layer(kind: str, config: DeepseekV4Config | None = None, *, seed: int = 0) -> DeepseekV4Attention:
    """A stock attention layer whose parameters are all random."""
    torch.manual_seed(seed)
    layer = DeepseekV4Attention(config or stock_config(), KINDS.index(kind))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith(("sinks", "position_bias")):
                parameter.copy_(noise)
            else:
                parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    return layer


def stock_forward(layer: DeepseekV4Attention, hidden: Tensor) -> Tensor:
    """The stock layer on rows of one document each."""
    config = layer.config
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    rotary = DeepseekV4RotaryEmbedding(config)
    embeddings = {kind: rotary(hidden, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
    mask = create_sliding_window_causal_mask(config=config, inputs_embeds=hidden, attention_mask=None, cache=None, position_ids=positions)
    return layer(hidden, embeddings, positions, mask)[0]


def own_layer(kind: str, stock: DeepseekV4Attention, **changes) -> SlidingWindowAttention:
    """csakit's layer of this kind with the stock layer's weights; no objective unless changed."""
    config = HybridAttentionConfig.from_pretrained_config(stock.config.to_dict())
    layer = attention_layer(replace(config, **{"indexer_loss": "off", **changes}), KINDS.index(kind))
    layer.load_state_dict(official_names(stock.state_dict()))
    return layer


def hidden_states(rows: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def one_document(rows: int, length: int) -> Layout:
    return Layout.batch(rows, length, ratio=4, window=WINDOW)


def gap(got: Tensor, want: Tensor) -> float:
    """The greatest difference, relative to the greatest value."""
    assert got.shape == want.shape
    return float((got - want).detach().abs().max() / want.detach().abs().max().clamp(min=1e-6)) if want.numel() else 0.0
