"""A run of seconds on real text: the smallest model with every kind of layer, over one package of the standard library."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from csakit.train import DataConfig, DenseStage, ModelConfig, RunConfig, SparseStage, WarmupStage, corpus
from csakit.train.log import Console, read_metrics
from csakit.train.loop import Trainer

STEPS = 4
TIMES = ("tokens_per_second",)


def config(**changes: Any) -> RunConfig:
    """Four steps a stage over rows of 64 bytes, of which a query of the sparse stage selects 4 of up to 16 entries."""
    stage = {
        "steps": STEPS,
        "rows": 2,
        "accumulation": 1,
        "ramp": 1,
        "schedule": "cosine",
        "learning_rate": 3e-3,
        "indexer_learning_rate": 1e-2,
    }
    settings = {
        "model": ModelConfig(
            layers=("sliding", "csa", "hca", "csa"),
            hidden_size=32,
            num_attention_heads=2,
            head_dim=16,
            qk_rope_head_dim=8,
            q_lora_rank=16,
            o_lora_rank=16,
            sliding_window=8,
            hca_ratio=16,
            index_head_dim=16,
            index_topk=4,
            moe_intermediate_size=32,
        ),
        "data": DataConfig(path=str(Path(json.__file__).parent), sequence_length=64, heldout_rows=2),
        "dense": DenseStage(**stage),
        "warmup": WarmupStage(**stage),
        "sparse": SparseStage(**stage),
        "save_every": 3,
    }
    return RunConfig(**{**settings, **changes})


def trainer(folder: Path, settings: RunConfig, **options: Any) -> Trainer:
    """The run of these settings in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return Trainer(settings, corpus.load(settings.data), folder, options.pop("console", Console(io.StringIO())), **options)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in read_metrics(folder / "metrics.jsonl")]
