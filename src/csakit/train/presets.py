"""Named settings: `tiny` is the demonstration, minutes on two CPU cores; `small` is the same at a scale of hours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from csakit.train.config import DataConfig, DenseStage, ModelConfig, RunConfig, SparseStage, WarmupStage
from csakit.train.settings import updated

PRESETS = {
    "tiny": RunConfig(
        model=ModelConfig(num_attention_heads=4),
        data=DataConfig(sequence_length=512, heldout_rows=16),
        dense=DenseStage(steps=320, rows=2, learning_rate=3e-3, ramp=30),
        warmup=WarmupStage(steps=60, rows=2, accumulation=1, indexer_learning_rate=3e-3, schedule="cosine", ramp=5, evaluate_every=15),
        sparse=SparseStage(steps=80, rows=2, accumulation=1, learning_rate=6e-4, indexer_learning_rate=1e-3, schedule="cosine", ramp=10),
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
        dense=DenseStage(steps=3000, rows=4, learning_rate=2e-3, ramp=100),
        warmup=WarmupStage(steps=300, rows=4, accumulation=1, indexer_learning_rate=2e-3, schedule="cosine", ramp=20, evaluate_every=50),
        sparse=SparseStage(steps=700, rows=4, accumulation=1, learning_rate=4e-4, indexer_learning_rate=5e-4, schedule="cosine", ramp=20),
    ),
}


def settings_of(preset: str | None, changes: dict[str, Any]) -> RunConfig:
    """The settings of a preset (None: the defaults) with those of nested dictionaries in place of its own.

    A preset says how to train; where the changes name a start, the model is that one.

    Raises: ValueError or TypeError naming the dotted key that is unknown or wrong.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(sorted(PRESETS))}, got {preset!r}")
    base = RunConfig() if preset is None else PRESETS[preset]
    start = changes.get("start")
    if isinstance(start, dict) and start.get("path"):
        base = replace(base, model=ModelConfig())
    return updated(base, changes)
