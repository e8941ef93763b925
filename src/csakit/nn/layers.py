"""The three kinds of attention layers of DeepSeek-V4: sliding window, compressed sparse, heavily compressed.

    layer = CompressedSparseAttention(HybridAttentionConfig.v4_flash())
    out = layer(hidden, layout).out      # backward through out also trains the indexer

All three share queries, window keys, sink, and the grouped output projection; they differ in the entries they attend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

import csakit
from csakit import IndexerLoss, Layout, Selection, checks

from .config import CSA, HCA, SLIDING, HybridAttentionConfig
from .functional import AttendInputs, IndexInputs, Objective, attend_and_distill
from .parts import Compressor, Float32Parameters, GroupedLinear, LightningIndexer, RMSNorm, check_config, layout_of_layer
from .rotary import Angles, angles_at, rotate, rotate_, rotate_unit_rows


class LayerStats(NamedTuple):
    """What the forward computed on its way; constants.

    Attributes:
        lse: [B, T, H] fp32, of `csakit.attend`.
        indices: [B, T, K] int32, the selection; None where every visible entry is attended.
        log_mass: [B, T, K] fp32, the teacher's logarithm over the selection; None without a sparse objective.
    """

    lse: Tensor
    indices: Tensor | None
    log_mass: Tensor | None


class LayerOutput(NamedTuple):
    """What a layer returns.

    Attributes:
        out: [B, T, d]. Its backward trains the indexer too: the loss is attached with weight indexer_loss_coef (`csakit.attach_loss`).
        indexer_loss: the same loss, detached, for logs; it cannot be counted a second time. None without one.
        stats: lse, selection and teacher.
    """

    out: Tensor
    indexer_loss: IndexerLoss | None
    stats: LayerStats


class SlidingWindowAttention(Float32Parameters):
    """Attention over a window of tokens and a sink; the frame of the other two kinds.

    Parameters (official names, relative to `layers.{i}.attn.`): wq_a.weight, q_norm.weight, wq_b.weight, wkv.weight, kv_norm.weight,
    attn_sink (fp32), wo_a.weight, wo_b.weight.

    Args:
        config: shapes. A layer reads the objective from its `config` in each forward: assign another config to change stages.
        device, dtype: of the parameters; attn_sink, position biases and the indexer's gate are fp32 whatever dtype says.

    Raises:
        TypeError: config is not a HybridAttentionConfig.
    """

    kind = SLIDING

    def __init__(
        self, config: HybridAttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.ratio = config.ratio(self.kind)
        heads, width, rank = config.num_attention_heads, config.head_dim, config.o_lora_rank

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.wq_a = linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, device=device, dtype=dtype)
        self.wq_b = linear(config.q_lora_rank, heads * width)
        self.wkv = linear(config.hidden_size, width)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, device=device, dtype=dtype)
        self.attn_sink = nn.Parameter(torch.empty(heads, device=device, dtype=torch.float32))
        self.wo_a = GroupedLinear(config.o_groups, heads * width // config.o_groups, rank, device=device, dtype=dtype)
        self.wo_b = linear(config.o_groups * rank, config.hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.attn_sink)

    def forward(
        self, hidden: Tensor, layout: Layout, *, token_weight: Tensor | None = None, divisor: float | Tensor | None = None
    ) -> LayerOutput:
        """The layer's output, its indexer's loss (compressed sparse layers with an objective), and what it computed on the way.

        Args:
            hidden: [B, T, d], normed. Padding rows have no influence, whatever they hold; their output is 0.
            layout: the documents, with the window of the config; a layout of another ratio serves as well.
            token_weight: [B, T], weight of each token in the indexer's loss; default 1.
            divisor: what the loss is divided by; default the sum of the weights. Give one global count when a step's data is split.

        Raises:
            TypeError, ValueError: hidden does not fit, the layout has another window, or is not one of whole rows of tokens.
        """
        config = self.config
        layout = layout_of_layer(hidden, layout, config, self.ratio)
        hidden = torch.where(layout.valid[..., None], hidden, 0)  # 0 * NaN would reach the gradients of the weights
        inputs, latent, angles = self.project(hidden, layout)
        index, selection = self._select(hidden, latent, layout)
        kind = "off" if index is None or not config.distills else config.indexer_loss
        objective = Objective(kind, config.denominator, token_weight, divisor)
        attention, loss = attend_and_distill(inputs, layout, index=index, selection=selection, objective=objective)
        out = self.output(attention.out, angles)
        stats = LayerStats(attention.lse, None if selection is None else selection.indices, attention.log_mass)
        if loss is None:
            return LayerOutput(out, None, stats)
        out = csakit.attach_loss(out, loss.loss, weight=config.indexer_loss_coef or 0.0)
        return LayerOutput(out, loss._replace(loss=loss.loss.detach()), stats)

    def project(self, hidden: Tensor, layout: Layout) -> tuple[AttendInputs, Tensor, Angles]:
        """What `csakit.attend` needs, the query latent [B, T, r] and the rotation of the tokens; the first part of the forward.

        Args:
            hidden: [B, T, d], normed; 0 on padding.
            layout: with the layer's own ratio.
        """
        config = self.config
        latent = self.q_norm(self.wq_a(hidden))
        angles = angles_at(layout.positions, hidden, config, compressed=self.ratio > 0)
        heads = self.wq_b(latent).unflatten(-1, (config.num_attention_heads, config.head_dim))
        q = rotate_unit_rows(heads, angles, config.rms_norm_eps)
        kv = rotate(self.kv_norm(self.wkv(hidden)), angles)
        inputs = AttendInputs(q, kv, self._entries(hidden, layout), self.attn_sink, config.head_dim**-0.5)
        return inputs, latent, angles

    def output(self, heads: Tensor, angles: Angles) -> Tensor:
        """The layer's output [B, T, d] from that of `csakit.attend` [B, T, H, D]; the last part of the forward.

        Where no gradients are recorded heads is overwritten.
        """
        turn = rotate if torch.is_grad_enabled() else rotate_
        groups = turn(heads.unflatten(2, (self.config.o_groups, -1)), angles, inverse=True)
        return self.wo_b(self.wo_a(groups.flatten(3)).flatten(2))

    def _entries(self, hidden: Tensor, layout: Layout) -> Tensor | None:
        """The compressed entries [B, E, D] this kind attends."""
        return None

    def _select(self, hidden: Tensor, latent: Tensor, layout: Layout) -> tuple[IndexInputs | None, Selection | None]:
        """What this kind selects with, and its selection; None where there is none."""
        return None, None


class HeavilyCompressedAttention(SlidingWindowAttention):
    """Attention over a window, every visible entry of a high ratio (128; pooled without overlap), and a sink: HCA.

    Parameters beyond those of the sliding window: compressor.{wkv.weight, wgate.weight, ape (fp32), norm.weight}.
    """

    kind = HCA

    def __init__(
        self, config: HybridAttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.compressor = Compressor(config, ratio=self.ratio, overlap=self.kind == CSA, device=device, dtype=dtype)

    def _entries(self, hidden: Tensor, layout: Layout) -> Tensor:
        return self.compressor(hidden, layout)


class CompressedSparseAttention(HeavilyCompressedAttention):
    """Attention over a window, the entries its indexer selects (ratio 4, pooled with overlap), and a sink: CSA.

    With `config.indexer_loss` "dense" every visible entry is attended, and the indexer runs only for its loss. With "off", or a
    coefficient of None or 0, the indexer only selects and keeps no graph.

    Parameters beyond those of HCA: indexer.{wq_b.weight, weights_proj.weight (fp32), compressor.*}.
    """

    kind = CSA

    def __init__(
        self, config: HybridAttentionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.indexer = LightningIndexer(config, device=device, dtype=dtype)

    def _select(self, hidden: Tensor, latent: Tensor, layout: Layout) -> tuple[IndexInputs | None, Selection | None]:
        config = self.config
        dense = config.indexer_loss == "dense"
        if dense and not config.distills:
            return None, None
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.distills):
            index = self.indexer(hidden, latent, layout)
            if dense:
                return index, None
            return index, csakit.select(index.q, index.k, index.weights, config.index_topk, layout, scale=index.scale)


KINDS: dict[str, type[SlidingWindowAttention]] = {
    SLIDING: SlidingWindowAttention,
    CSA: CompressedSparseAttention,
    HCA: HeavilyCompressedAttention,
}


def attention_layer(
    config: HybridAttentionConfig, number: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> SlidingWindowAttention:
    """Layer `number` of the config's schedule: a module of its kind, with its ratio.

    Raises:
        TypeError, ValueError: the schedule has no such layer.
    """
    check_config(config)
    checks.whole("number", number, at_least=0)
    if number >= len(config.layer_types):
        raise ValueError(f"number must be below the {len(config.layer_types)} layers of compress_ratios; got {number}")
    own = replace(config, compress_ratio=config.compress_ratios[number])
    return KINDS[config.layer_types[number]](own, device=device, dtype=dtype)
