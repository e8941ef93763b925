"""One attention layer in V4-Flash's proportions: its weights, and the modules that hold them.

Weights go by their official names. Modules take the given tensors as they are, so that every provider works on the same ones.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from csakit.checkpoints import official_names
from csakit.nn import HybridAttentionConfig, SlidingWindowAttention
from csakit.nn.config import CSA, HCA, SLIDING
from csakit.nn.layers import KINDS

from .shapes import HCA_RATIO, Shape

KIND = {"sliding": SLIDING, "csa": CSA, "hca": HCA}
ROPE = 64


def config(shape: Shape) -> HybridAttentionConfig:
    """Of a layer with this attention, its objective on."""
    return HybridAttentionConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.width,
        qk_rope_head_dim=_rope(shape),
        q_lora_rank=shape.rank,
        o_groups=shape.groups,
        o_lora_rank=shape.rank,
        index_n_heads=shape.index_heads,
        index_head_dim=shape.index_width,
        index_topk=shape.topk,
        sliding_window=shape.window,
        layer_types=(SLIDING, CSA, HCA),
        compress_ratios=(0, shape.ratio, HCA_RATIO),
    )


def weights(shape: Shape, kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    """Normal random numbers that keep the size of activations, norms about 1; fp32."""
    made = {}
    for name, parameter in _on_meta(shape, kind).named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("attn_sink", "ape")):
            made[name] = noise
        else:
            made[name] = 1 + 0.1 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5
    return made


def own(shape: Shape, kind: str, tensors: dict[str, Tensor], *, trains: bool) -> SlidingWindowAttention:
    """csakit's layer, on these weights."""
    layer = _on_meta(shape, kind)
    layer.load_state_dict({name: nn.Parameter(tensors[name], trains) for name in layer.state_dict()}, assign=True)
    return layer


class AttentionOnly(nn.Module):
    """A decoder layer that is its attention alone."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """[B, T, 1, d] -> the attention's output, alike."""
        return self.self_attn(hidden_states[:, :, 0], **options)[0][:, :, None]


class _Single(nn.Module):
    """The only stream of [B, T, 1, d]."""

    def forward(self, streams: Tensor) -> Tensor:
        return streams[:, :, 0]


def stock(shape: Shape, kind: str, tensors: dict[str, Tensor], *, trains: bool) -> tuple[Any, dict[str, nn.Parameter]]:
    """(a stock DeepseekV4Model whose only layer is its attention alone, on these weights; its parameters by their official names).

    Raises:
        ImportError: no Transformers with DeepSeek-V4.
    """
    host: Any = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    settings = host.DeepseekV4Config(
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        layer_types=[KIND[kind]],
        mlp_layer_types=["moe"],
        num_attention_heads=shape.heads,
        head_dim=shape.width,
        partial_rotary_factor=_rope(shape) / shape.width,
        q_lora_rank=shape.rank,
        o_groups=shape.groups,
        o_lora_rank=shape.rank,
        index_n_heads=shape.index_heads,
        index_head_dim=shape.index_width,
        index_topk=shape.topk,
        sliding_window=shape.window,
        compress_rates={CSA: shape.ratio, HCA: HCA_RATIO},
        rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536},
        max_position_embeddings=1 << 20,
        vocab_size=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        moe_intermediate_size=1,
        n_routed_experts=1,
        num_experts_per_tok=1,
        hc_mult=1,
        attn_implementation="eager",
    )
    model = host.DeepseekV4Model(settings)
    with torch.device("meta"):
        attention = host.DeepseekV4Attention(settings, 0)
    for module in list(attention.modules()):
        for name, child in module.named_children():
            if isinstance(child, host.DeepseekV4RotaryEmbedding):  # its angles are no weights: nothing would fill them
                setattr(module, name, host.DeepseekV4RotaryEmbedding(settings))
    names = dict(zip(official_names(attention.state_dict()), attention.state_dict()))
    parameters = {name: nn.Parameter(tensors[name], trains) for name in names}
    attention.load_state_dict({names[name]: parameter for name, parameter in parameters.items()}, assign=True)
    model.layers[0] = AttentionOnly(attention)
    model.hc_head, model.norm = _Single(), nn.Identity()
    return model, parameters


def _rope(shape: Shape) -> int:
    """Rotated channels: V4's 64, or as many as the smaller width has."""
    return min(ROPE, shape.width // 2 * 2, shape.index_width // 2 * 2)


def _on_meta(shape: Shape, kind: str) -> SlidingWindowAttention:
    with torch.device("meta"):
        return KINDS[KIND[kind]](config(shape))
