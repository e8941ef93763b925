"""A DeepSeek-V4 with random weights that trains in seconds: the model of the examples."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM


def small_model() -> DeepseekV4ForCausalLM:
    sliding, csa, hca = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, layer_types=[sliding, csa, hca], mlp_layer_types=["moe"] * 3,
        num_attention_heads=4, head_dim=32, partial_rotary_factor=0.25, q_lora_rank=32, o_groups=2, o_lora_rank=16,
        index_n_heads=16, index_head_dim=16, index_topk=4, sliding_window=8, compress_rates={csa: 4, hca: 16},
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, hc_mult=2, hc_sinkhorn_iters=2,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config)
