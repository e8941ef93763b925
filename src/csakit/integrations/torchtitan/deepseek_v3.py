"""Override `hybrid_attention`: DeepSeek-V4's attention, from csakit.nn, in the layers of torchtitan's DeepSeek-V3 model.

Projections, compressors and indexers are the layer's own, under the official names; experts, norms and embeddings stay torchtitan's.
Documents are known from `positions`: windows, compressed entries and selections end where they end.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from csakit import Layout, checks
from csakit.nn import HybridAttentionConfig
from csakit.nn.layers import KINDS

from .scale import check_share, check_tokens_per_step

try:
    import spmd_types as spmd
    from torchtitan.config import derive, override
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.decoder_sharding import dense_param_placement
    from torchtitan.models.deepseek_v3 import model as stock
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import ShardingConfig
except ImportError as error:
    raise ImportError(f"torchtitan with its DeepSeek-V3 model is needed, `pip install torchtitan==0.3.0 triton`: {error}") from error


def check_stock(attention: type) -> None:
    """Raises unless a layer of the DeepSeek-V3 model calls its attention in the way this override knows.

    Raises:
        ImportError: it does not; what differs is named.
    """
    arguments = list(inspect.signature(attention.forward).parameters)  # type: ignore[attr-defined]
    known = ["self", "x", "attention_masks", "positions"]
    if arguments != known:
        raise ImportError(f"Attention.forward takes {arguments[1:]}; csakit knows {known[1:]}. This torchtitan is not supported")


check_stock(stock.Attention)


class HybridAttention(stock.Attention):
    """A layer of csakit.nn behind torchtitan's protocol of modules.

    Parameters: those of the layer, under `layer.`: layers.{i}.attention.layer.wq_a.weight and so on.

    Attributes:
        indexer_loss: nats per token in the last training forward; None before it, and in layers without an indexer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(stock.Attention.Config):
        layer: HybridAttentionConfig
        kind: str
        tokens_per_step: int

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.tokens_per_step = config.tokens_per_step
        self.layer = KINDS[config.kind](config.layer)
        inner, outer = config.wkv_b.param_init, config.wo.param_init
        for name, module in self.layer.named_modules():
            kind: Any = type(module)
            module.__class__ = _protocol_class(kind)
            own = {key: dense_param_placement(tp=spmd.R) for key, _ in module.named_parameters(recurse=False)}
            module._sharding_config = ShardingConfig(state_shardings=own)
            if isinstance(module, nn.Linear):
                module._param_init = outer if name == "wo_b" else inner
        self.indexer_loss: Tensor | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """As every module's.

        Raises:
            ValueError: tensor or context parallelism is on, or the backend hands over DTensors.
        """
        if parallel_dims.tp_enabled or parallel_dims.cp_enabled:
            raise ValueError("hybrid_attention does not run under tensor or context parallelism: set both degrees to 1")
        if parallel_dims.spmd_backend == "full_dtensor":
            raise ValueError("hybrid_attention needs local tensors: set parallelism.spmd_backend to spmd_types or partial_dtensor")
        super().parallelize(parallel_dims)

    def forward(self, x: Tensor, attention_masks: Any = None, positions: Tensor | None = None) -> Tensor:
        """The layer's output [B, T, d]; its backward trains the indexer too.

        Args:
            x: [B, T, d], normed.
            attention_masks: not read; the documents are those of positions.
            positions: [B, T], position of each token in its document; a document begins where they do not go on. None: one document a row.
        """
        config = self.layer.config
        ratio = max(self.layer.ratio, 1)
        if positions is None:
            layout = Layout.batch(*x.shape[:2], ratio=ratio, window=config.sliding_window, device=x.device)
        else:
            begins = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0))
            layout = Layout.from_document_ids(begins.cumsum(1), ratio=ratio, window=config.sliding_window)
        if not self.tokens_per_step:
            return self.layer(x, layout).out
        if self.training:
            check_share(self.tokens_per_step, x.shape[0] * x.shape[1])
        out, loss, _ = self.layer(x, layout, divisor=self.tokens_per_step)
        if loss is not None and self.training:
            self.indexer_loss = loss.kl.mean()
        return out


@cache
def _protocol_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module, which also follows torchtitan's protocol: its own `reset_parameters` initialises it after meta init."""
    return type(kind.__name__, (kind, Module), {"__module__": __name__})


@override(target=stock.Attention.Config, description="csakit: DeepSeek-V4 attention whose indexer is trained")
def hybrid_attention(
    cfg: Any, *, kind: str = "compressed_sparse_attention", tokens_per_step: int | None = None, layer: dict[str, Any] | None = None
) -> HybridAttention.Config:
    """DeepSeek-V4's attention in place of DeepSeek-V3's.

    Width, heads, rotated channels, query rank, base of the rotation and epsilon are taken from the DeepSeek-V3 layer.

    Args:
        kind: "compressed_sparse_attention", "heavily_compressed_attention" or "sliding_attention".
        tokens_per_step: what the sum of the KL is divided by, training.global_batch_size * training.seq_len. Needed where there is a loss.
        layer: fields of `csakit.nn.HybridAttentionConfig`; they win over what is taken from the DeepSeek-V3 layer. Its objective is among
            them: indexer_loss, indexer_loss_coef, denominator.

    Raises:
        TypeError, ValueError: an unknown kind or field, a size that does not fit, a missing tokens_per_step.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}; got {kind!r}")
    if layer is not None and not isinstance(layer, dict):
        raise TypeError(f"layer must be a dict of HybridAttentionConfig's fields; got {checks.describe(layer)}")
    given = layer or {}
    unknown = sorted(set(given) - {field.name for field in fields(HybridAttentionConfig)})
    if unknown:
        raise ValueError(f"layer has fields that HybridAttentionConfig has not: {', '.join(unknown)}")
    taken = {
        "hidden_size": cfg.dim,
        "num_attention_heads": cfg.n_heads,
        "head_dim": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim,
        "qk_rope_head_dim": cfg.qk_rope_head_dim,
        "rope_theta": cfg.rope.theta,
        "rms_norm_eps": cfg.kv_norm.eps or HybridAttentionConfig.rms_norm_eps,
    }
    if cfg.q_lora_rank:
        taken["q_lora_rank"] = cfg.q_lora_rank
    config = HybridAttentionConfig(**{**taken, **given})
    if kind == "compressed_sparse_attention" and config.distills:
        check_tokens_per_step(tokens_per_step)
    return derive(
        cfg,
        HybridAttention.Config,
        layer=config,
        kind=kind,
        tokens_per_step=tokens_per_step or 0,
        inner_attention=ScaledDotProductAttention.Config(),  # the trainer then builds no mask
        sharding_config=None,
    )
