"""The model of a run: a small random DeepSeek-V4 of the Transformers library, with csakit in its attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from csakit.train.config import SEPARATOR, VOCABULARY, RunConfig

if TYPE_CHECKING:
    from transformers import DeepseekV4ForCausalLM

KINDS = {"sliding": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}


def build(config: RunConfig) -> DeepseekV4ForCausalLM:
    """A model with weights drawn from the seed.

    Raises: ImportError naming the extra when transformers is missing.
    """
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError as error:
        raise ImportError("csakit train needs transformers 5.24: pip install 'csakit[train]'") from error
    shape = config.model
    settings = DeepseekV4Config(
        vocab_size=VOCABULARY,
        bos_token_id=SEPARATOR,
        eos_token_id=SEPARATOR,
        num_hidden_layers=len(shape.layers),
        layer_types=[KINDS[kind] for kind in shape.layers],
        mlp_layer_types=["moe"] * len(shape.layers),
        compress_rates={KINDS["csa"]: shape.csa_ratio, KINDS["hca"]: shape.hca_ratio},
        partial_rotary_factor=shape.qk_rope_head_dim / shape.head_dim,
        max_position_embeddings=config.data.sequence_length,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        q_lora_rank=shape.q_lora_rank,
        o_groups=shape.o_groups,
        o_lora_rank=shape.o_lora_rank,
        sliding_window=shape.sliding_window,
        index_n_heads=shape.index_n_heads,
        index_head_dim=shape.index_head_dim,
        index_topk=shape.index_topk,
        moe_intermediate_size=shape.moe_intermediate_size,
        n_routed_experts=shape.n_routed_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
        hc_mult=shape.hc_mult,
        hc_sinkhorn_iters=shape.hc_sinkhorn_iters,
    )
    torch.manual_seed(config.seed)
    model = DeepseekV4ForCausalLM(settings)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model


def install(model: Any, config: RunConfig) -> Any:
    """The handle by which csakit's attention, selection and objective sit in the model."""
    from csakit.integrations import transformers as integration

    return integration.install(model, coef=config.coef, denominator=config.denominator)
