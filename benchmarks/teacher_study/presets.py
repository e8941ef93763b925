"""The sizes of a study. `full` and `reduced` differ in size alone; `smoke` runs in seconds and shows that everything works."""

from __future__ import annotations

from dataclasses import dataclass, fields

from csakit.nn import HybridAttentionConfig

ARMS = ("full", "window-only", "sink-only", "compressed-only")
REFERENCES = ("oracle", "wrong oracle", "recent", "random")


@dataclass(frozen=True)
class Preset:
    """Everything that decides the numbers of a study, apart from the seeds.

    Attributes:
        layers: kind of each layer, "sliding" or "csa".
        tokens, late_tokens, late_share: row length, and the length that the last share of the language model's steps trains at (held-out
            rows have this length too).
        rows: of late_tokens tokens in a step of the language model (as many more of the shorter ones as give the same bytes).
        tables: rows of each table of hashed n-gram embeddings.
        index_rows, query_parts: rows of a step of the indexers; one of so many equal parts of their queries is distilled.
        sparse_topk: K of the sparse objective. joint_topk: K while everything trains.
        capture_topks, bits_topks: the K at which captured mass and bits per byte are measured.
        raised_sinks: what the positive control adds to the sinks of every second head.
        later_arms: the arms of the index seeds after the first.
    """

    layers: tuple[str, ...] = ("sliding", "csa", "csa")
    hidden: int = 256
    heads: int = 8
    head_dim: int = 64
    rotated: int = 16
    latent: int = 128
    inner: int = 768
    window: int = 32
    ratio: int = 4
    index_heads: int = 16
    index_dim: int = 32
    tables: int = 16384
    tokens: int = 1024
    late_tokens: int = 1024
    late_share: float = 0.0
    rows: int = 4
    language_steps: int = 2000
    index_rows: int = 2
    query_parts: int = 4
    index_steps: int = 800
    sparse_steps: int = 300
    sparse_topk: int = 16
    joint_steps: int = 300
    joint_rows: int = 4
    joint_topk: int = 8
    control_steps: int = 300
    raised_sinks: float = 6.0
    later_arms: tuple[str, ...] = ARMS
    heldout_rows: int = 128
    capture_topks: tuple[int, ...] = (4, 8, 16, 32)
    bits_topks: tuple[int, ...] = (4, 8, 16, 32)
    language_seeds: tuple[int, ...] = (0, 1, 2)
    index_seeds: tuple[int, ...] = (0, 1)

    def attention(self) -> HybridAttentionConfig:
        """The shapes of the attention layers, in csakit's words."""
        return HybridAttentionConfig(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            qk_rope_head_dim=self.rotated,
            q_lora_rank=self.latent,
            o_groups=1,
            o_lora_rank=self.hidden,
            index_n_heads=self.index_heads,
            index_head_dim=self.index_dim,
            index_topk=self.sparse_topk,
            sliding_window=self.window,
            compress_ratio=self.ratio,
            compress_rope_theta=10000.0,
            rope_scaling=None,
        )

    def differences(self) -> str:
        """What distinguishes this preset from `full`, for the report."""
        mine = ((field.name, getattr(self, field.name), getattr(PRESETS["full"], field.name)) for field in fields(self))
        return ", ".join(f"{name} {own} (full: {full})" for name, own, full in mine if own != full)


PRESETS = {
    "full": Preset(
        layers=("sliding", "csa", "csa", "csa"),
        late_tokens=2048,
        late_share=1 / 3,
        rows=2,
        language_steps=1500,
        index_steps=400,
        sparse_steps=100,
        joint_steps=150,
        joint_rows=2,
        control_steps=200,
    ),
    "reduced": Preset(
        hidden=192,
        head_dim=32,
        latent=96,
        inner=512,
        rows=2,
        language_steps=1200,
        index_steps=300,
        sparse_steps=100,
        joint_steps=120,
        joint_rows=2,
        control_steps=200,
        later_arms=("full", "compressed-only"),
        capture_topks=(8, 16, 32),
        bits_topks=(8, 16),
    ),
    "smoke": Preset(
        layers=("sliding", "csa"),
        hidden=32,
        heads=4,
        head_dim=16,
        rotated=8,
        latent=16,
        inner=64,
        window=8,
        index_heads=4,
        index_dim=8,
        tables=256,
        tokens=64,
        late_tokens=128,
        late_share=0.5,
        rows=2,
        language_steps=12,
        index_steps=6,
        sparse_steps=4,
        sparse_topk=4,
        joint_steps=4,
        joint_rows=2,
        joint_topk=2,
        control_steps=4,
        heldout_rows=8,
        capture_topks=(2, 4),
        bits_topks=(2,),
        language_seeds=(0,),
        later_arms=("full", "compressed-only"),
    ),
}
