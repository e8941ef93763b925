"""Tiny random DeepSeek-V4 models and what the tests of the Transformers integration compare on them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = (SLIDING, CSA, HCA)
WINDOW, TOPK = 8, 4


def tiny(layers: tuple[str, ...] = KINDS, *, seed: int = 0, **config) -> DeepseekV4ForCausalLM:
    """A model whose sinks, position biases and norms are random too: stock initialisation leaves them at 0 and 1.

    Sixteen index heads: with fewer, ReLU makes exact zero ties, which the stock topk breaks as it likes.
    """
    settings = {
        "vocab_size": 61,
        "hidden_size": 64,
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "mlp_layer_types": ["moe"] * len(layers),
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
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "max_position_embeddings": 4096,
        "attn_implementation": "eager",
    }
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**settings, **config}))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("sinks", "position_bias")):
                parameter.copy_(noise)
            elif "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "hc" not in name:
                parameter.mul_(5)
    return model


def tokens(rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Random token ids [rows, length], without 0, which generation takes for padding."""
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The summed cross entropy of one document's next tokens: logits [N, V], ids [N]."""
    return torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Name -> gradient of every parameter that has one, copied; clears them."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def gap(got: Tensor, want: Tensor) -> float:
    """The greatest difference, relative to the greatest value."""
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6)) if want.numel() else 0.0


def worst_gap(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The greatest gap over tensors of the same names, and where it is."""
    assert got.keys() == want.keys(), f"different tensors: {sorted(got.keys() ^ want.keys())}"
    return max((gap(got[name], want[name]), name) for name in want)


def indexer_part(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if ".indexer." in name}
