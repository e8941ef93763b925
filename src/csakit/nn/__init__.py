"""csakit.nn: DeepSeek-V4's attention layers as plain PyTorch modules over the four verbs.

    config = HybridAttentionConfig.v4_flash()
    layout = csakit.Layout.packed(cu_seqlens, ratio=4, window=config.sliding_window)
    out, indexer_loss, stats = CompressedSparseAttention(config)(hidden, layout)

Parameters carry the official names; `csakit.checkpoints` reads and writes them in every dialect.
"""

from .config import HybridAttentionConfig
from .layers import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    LayerOutput,
    LayerStats,
    SlidingWindowAttention,
    attention_layer,
)
from .parts import Compressor, LightningIndexer

__all__ = [
    "CompressedSparseAttention",
    "Compressor",
    "HeavilyCompressedAttention",
    "HybridAttentionConfig",
    "LayerOutput",
    "LayerStats",
    "LightningIndexer",
    "SlidingWindowAttention",
    "attention_layer",
]
