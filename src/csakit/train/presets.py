"""Named settings: `tiny` is the demonstration on two CPU cores, `small` an hour or two of the same."""

from __future__ import annotations

from csakit.train.config import DataConfig, ModelConfig, RunConfig, StageConfig

PRESETS = {
    "tiny": RunConfig(
        model=ModelConfig(),
        data=DataConfig(sequence_length=512, heldout_rows=16),
        dense=StageConfig(steps=100),
        warmup=StageConfig(steps=60),
        sparse=StageConfig(steps=40),
    ),
    "small": RunConfig(),
}
