"""Named settings: `tiny` is the demonstration, minutes on two CPU cores; `small` is the same at a scale of hours."""

from __future__ import annotations

from csakit.train.config import DataConfig, ModelConfig, RunConfig, StageConfig

PRESETS = {
    "tiny": RunConfig(
        model=ModelConfig(num_attention_heads=4),
        data=DataConfig(sequence_length=512, heldout_rows=16),
        dense=StageConfig(steps=320, rows=2, learning_rate=3e-3, ramp=30),
        warmup=StageConfig(steps=60, rows=2, indexer_learning_rate=3e-3, ramp=5, evaluate_every=15),
        sparse=StageConfig(steps=80, rows=2, learning_rate=6e-4, indexer_learning_rate=1e-3, ramp=10),
    ),
    "small": RunConfig(
        model=ModelConfig(
            layers=("sliding", "csa", "hca", "csa", "hca", "csa"),
            hidden_size=256,
            num_attention_heads=8,
            q_lora_rank=128,
            o_lora_rank=128,
            moe_intermediate_size=512,
            n_routed_experts=4,
        ),
        data=DataConfig(sequence_length=1024, heldout_rows=32),
        dense=StageConfig(steps=3000, rows=4, learning_rate=2e-3, ramp=100),
        warmup=StageConfig(steps=300, rows=4, indexer_learning_rate=2e-3, ramp=20, evaluate_every=50),
        sparse=StageConfig(steps=700, rows=4, learning_rate=4e-4, indexer_learning_rate=5e-4, ramp=20),
    ),
}
